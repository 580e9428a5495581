"""What we answer ourselves: refusals as problem+json (RFC 9457, CONTRACT section 6), replays, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from werkzeug.http import HTTP_STATUS_CODES

from .errors import InvalidKey, StoreError, StoreFull
from .record import Outcome, Record, SavedResponse

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


class Answer(NamedTuple):
    """A whole response, and a WSGI app: status line, headers in order, body. `code` names the problem, if it is one."""

    status: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    code: str = ""

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response(self.status, list(self.headers))
        return [self.body] if self.body else []


class _Problem(NamedTuple):
    status: int
    title: str
    detail: str
    retry_after: int | None = None
    """Seconds; None where a retry cannot help."""


PROBLEMS = {
    "invalid_key": _Problem(400, "The IDs of the tool call are malformed.", ""),
    "key_required": _Problem(
        400,
        "The tool call has no key.",
        "This request needs a chat ID and a tool call ID and was not run: send it with both headers.",
    ),
    "invalid_query": _Problem(400, "The query is not understood.", ""),
    "incomplete_body": _Problem(
        400,
        "The request body was cut off.",
        "The request body ended before its Content-Length and nothing was run: send the same call again.",
        1,
    ),
    "canceled": _Problem(409, "The tool call was canceled.", "The tool call was canceled."),
    "input_mismatch": _Problem(
        409,
        "The tool call was first sent with another input.",
        "This tool call ID has been used for another request and was not run again: give the new request its own ID.",
    ),
    "response_too_large": _Problem(
        409,
        "The response of the tool call was too large to keep.",
        "The tool call has run and its response was too large to keep: it will not run again under this ID.",
    ),
    "still_running": _Problem(
        409,
        "The tool call is still running.",
        "The tool call is still running: ask again later with the same ID to get its response.",
        1,
    ),
    "unknown_call": _Problem(404, "The tool call is not known.", "No record of this tool call is kept."),
    "outcome_unknown": _Problem(
        500,
        "The outcome of the tool call is unknown.",
        "The tool call may or may not have taken effect: check before you repeat it under a new ID.",
    ),
    "cancel_failed": _Problem(
        500,
        "The cancel could not stop the tool call.",
        "The tool call is canceled and will not run again, but what it left running may not have been stopped.",
    ),
    "key_failed": _Problem(
        500,
        "The key of the tool call could not be determined.",
        "The server could not tell which tool call this is and did not run it.",
    ),
    "store_not_shared": _Problem(
        500,
        "The store is not shared between the server's processes.",
        "The server is set up so that a tool call could run twice and did not run it: a shared store is needed.",
    ),
    "store_unavailable": _Problem(
        503,
        "The store of tool calls is unavailable.",
        "The server cannot tell whether this tool call has run and did not run it now: send it again with the same ID.",
        2,
    ),
    "store_full": _Problem(
        503,
        "The store of tool calls is full.",
        "The server has no room to remember this tool call and did not run it: send it again later with the same ID.",
        30,
    ),
}


def problem(code: str, detail: str = "", **members: Any) -> Answer:
    """The refusal that `code` names. `detail` replaces its sentence, `members` are added to its JSON object."""
    entry = PROBLEMS[code]
    headers = [("Content-Type", "application/problem+json")]
    if entry.retry_after is not None:
        headers.append(("Retry-After", str(entry.retry_after)))
    document = {
        "type": f"urn:flask-runonce:{code}",
        "title": entry.title,
        "status": entry.status,
        "detail": detail or entry.detail,
        "code": code,
        "retryable": entry.retry_after is not None,
        "message": entry.title,
        **members,
    }
    return _whole(entry.status, headers, json.dumps(document).encode(), code)


def invalid_key(error: InvalidKey) -> Answer:
    """400 for a malformed ID, saying which and why."""
    return problem("invalid_key", f"The {error.what} {error.problem}, and the request was not run.")


def store_problem(error: StoreError) -> Answer:
    """503 for a store that cannot answer: it refuses, and never runs unprotected."""
    return problem("store_full" if isinstance(error, StoreFull) else "store_unavailable")


def json_answer(status: int, data: dict[str, Any], *headers: tuple[str, str]) -> Answer:
    """`data` as JSON."""
    return _whole(status, [("Content-Type", "application/json"), *headers], json.dumps(data).encode())


def replay(saved: SavedResponse) -> Answer:
    """The answer of a repeat: the saved response, marked as replayed."""
    headers = (*saved.headers, ("Idempotent-Replayed", "true"))
    if saved.status[:3] not in ("204", "304"):  # RFC 9110, section 8.6: these have no Content-Length
        headers += (("Content-Length", str(len(saved.body))),)
    return Answer(saved.status, headers, saved.body)


def saved_response(record: Record) -> SavedResponse | None:
    """What the run of `record` answered; for a run that nobody knows the end of, the problem that says so."""
    if record.outcome is Outcome.UNKNOWN:
        return OUTCOME_UNKNOWN
    return record.response


def _whole(status: int, headers: list[tuple[str, str]], body: bytes, code: str = "") -> Answer:
    length = ("Content-Length", str(len(body)))
    return Answer(f"{status} {HTTP_STATUS_CODES[status]}", (*headers, length), body, code)


def _saved(answer: Answer) -> SavedResponse:
    return SavedResponse(answer.status, answer.headers[:1], answer.body)


OUTCOME_UNKNOWN = _saved(problem("outcome_unknown"))
"""The saved response of a run whose end is not known."""
