"""Reading an answer: is it flask-runonce's own, what does it say, when may one ask again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

PROBLEM_TYPE = "urn:flask-runonce:"


def refusal(response: httpx.Response) -> Mapping[str, Any] | None:
    """The problem document of flask-runonce (CONTRACT section 6), None if the answer is anybody else's."""
    if not _has_media_type(response, "application/problem+json"):
        return None
    document = _json_object(response)
    return document if str(document.get("type", "")).startswith(PROBLEM_TYPE) else None


def error_detail(response: httpx.Response) -> str:
    """What an error response says, without its wrapping.

    Understands ``{"error": {"message": …}}``, ``{"message": …}``, problem+json (RFC 9457) and plain text; anything else
    gives the status line.
    """
    document = _json_object(response)
    error = document.get("error")
    candidates = [error.get("message")] if isinstance(error, dict) else [error]
    if _has_media_type(response, "application/problem+json"):
        candidates += [document.get("detail"), document.get("title")]
    candidates.append(document.get("message"))
    if _has_media_type(response, "text/plain"):
        candidates.append(response.text.strip())
    for candidate in candidates:
        if isinstance(candidate, str) and candidate:
            return candidate
    return f"The server answered {response.status_code} {response.reason_phrase}".rstrip() + "."


def retry_after(response: httpx.Response) -> float:
    """``Retry-After`` in seconds from now (RFC 9110 section 10.2.3, both forms); 0 where there is none to be read."""
    value = response.headers.get("Retry-After", "")
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _has_media_type(response: httpx.Response, media_type: str) -> bool:
    content_type: str = response.headers.get("Content-Type", "")
    return content_type.partition(";")[0].strip().lower() == media_type


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
