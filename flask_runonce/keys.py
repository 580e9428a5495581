"""From an environ to the call's key: which headers, which IDs are allowed, and the one form that each is kept in.

A key callable takes a WSGI environ and answers a `CallKey`, or None where the request is no call. `tool_call` is the
default; `idempotency_key` reads the IETF draft's `Idempotency-Key` header.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from .errors import InvalidKey
from .record import CallKey

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

CHAT_ID_HEADER = "Coder-Chat-Id"
TOOL_CALL_ID_HEADER = "Coder-Tool-Call-Id"

MAX_LENGTH = 255
_ID = re.compile(r"[!-+\--~]{1,255}")  # visible ASCII, no comma: servers join a repeated header with one
_UUID = re.compile(r"(?:urn:uuid:)?([0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12})|([0-9a-f]{32})", re.IGNORECASE)
_CANONICAL = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_NIL = "00000000-0000-0000-0000-000000000000"
_UNSCOPABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@functools.lru_cache(1024)  # a chat's ID comes with each of its calls, and a retry brings the same IDs
def canonical_id(text: str, what: str = "ID") -> str:
    """The one form of an ID (CONTRACT section 4): blanks around it stripped, a UUID lower-case and hyphenated.

    `what` names the ID in the error. Raises `InvalidKey` for anything but 1 to 255 visible ASCII characters without a
    comma, and for the nil UUID.
    """
    if _CANONICAL.fullmatch(text) and text != _NIL:
        return text  # as most senders write it
    text = text.strip(" \t")
    if not _ID.fullmatch(text):
        if not text:
            raise InvalidKey(what, "is empty")
        if len(text) > MAX_LENGTH:
            raise InvalidKey(what, f"is longer than {MAX_LENGTH} characters")
        if "," in text:
            raise InvalidKey(what, "has a comma, or its header was sent twice")
        raise InvalidKey(what, "has characters other than visible ASCII")
    uuid = _UUID.fullmatch(text[1:-1] if text[0] == "{" and text[-1] == "}" else text)
    if uuid is None:
        return text
    digits = (uuid[1] or uuid[2]).replace("-", "").lower()
    hyphenated = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    if hyphenated == _NIL:
        raise InvalidKey(what, "is the nil UUID, which names nothing")
    return hyphenated


def canonical_key(key: CallKey) -> CallKey:
    """`key` with both IDs in their one form. Raises `InvalidKey`, and TypeError where it is no `CallKey` of strings."""
    if not isinstance(key, CallKey) or not all(isinstance(part, str) for part in key):
        raise TypeError(f"A key callable answers a CallKey of three strings or None, not {key!r}.")
    return CallKey(
        canonical_scope(key.scope), canonical_id(key.chat_id, "chat ID"), canonical_id(key.tool_call_id, "tool call ID")
    )


def canonical_scope(scope: str | None) -> str:
    """`scope` as it is kept: "" for None. Raises TypeError or ValueError where CONTRACT section 2 does not allow it."""
    if scope is None:
        return ""
    if not isinstance(scope, str):
        raise TypeError(f"A scope is a string or None, not {type(scope).__name__}.")
    if len(scope) > MAX_LENGTH or _UNSCOPABLE.search(scope):
        raise ValueError(f"A scope has at most {MAX_LENGTH} characters and no control characters.")
    return scope


@functools.cache
def environ_name(header: str) -> str:
    """The environ key of a request header (PEP 3333)."""
    return "HTTP_" + header.upper().replace("-", "_")


def tool_call(
    environ: WSGIEnvironment,
    chat_id_header: str = CHAT_ID_HEADER,
    tool_call_id_header: str = TOOL_CALL_ID_HEADER,
) -> CallKey | None:
    """The key that the two headers name; None where a tool call ID or a chat ID is missing. Raises `InvalidKey`."""
    tool_call_id = environ.get(environ_name(tool_call_id_header))
    if tool_call_id is None:
        return None
    tool_call_id = canonical_id(tool_call_id, "tool call ID")
    chat_id = environ.get(environ_name(chat_id_header))
    if chat_id is None:
        return None
    return CallKey("", canonical_id(chat_id, "chat ID"), tool_call_id)


def idempotency_key(environ: WSGIEnvironment) -> CallKey | None:
    """The `Idempotency-Key` header (draft-ietf-httpapi-idempotency-key-header) as the tool call ID, in the chat "-".

    A quoted string (RFC 9651, section 3.3.3) is unquoted. None without the header. All callers share that chat, so
    this key needs a scope. Raises `InvalidKey`.
    """
    value = environ.get("HTTP_IDEMPOTENCY_KEY")
    if value is None:
        return None
    value = value.strip(" \t")
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = re.sub(r'\\(["\\])', r"\1", value[1:-1])
    return CallKey("", "-", canonical_id(value, "idempotency key"))
