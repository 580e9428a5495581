"""What became of a canceled call, and the sentence that may be said of it.

| the server's answer | sentence |
| --- | --- |
| not received, and its store remembers further back than the call is old | NOT_RUN |
| not received, but the call may be older than what the store remembers | NO_RESULT |
| running | WHILE_RUNNING |
| done | FINISHED; the result is the response |
| running or done, and the run's outcome is not known | NO_RESULT |
| none | NO_RESULT |

Only the first row says that nothing changed, so only an answer that proves it leads there.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Literal

import httpx

from .answers import refusal
from .errors import ToolCallError

NOT_RUN = "tool call was canceled before it ran; no changes were made"
WHILE_RUNNING = "tool call was canceled while running"
FINISHED = "tool call finished before it was canceled"
NO_RESULT = "tool call was interrupted before it produced a result"

State = Literal["not_received", "running", "done"]


@dataclass(frozen=True)
class Cancellation:
    """The answer to one cancel (CONTRACT section 5).

    ``received``: whether the server has seen the call; None: no answer, ``error`` says why.
    ``state``: what the first cancel found, None without an answer.
    ``response``: the saved response. It has a status, a Content-Type and a body, empty where the server kept none.
    ``body_too_large``: the server did not keep the response's body.
    ``remembers``: for how many seconds back the server can vouch for "not received".
    ``vouched``: whether that covers the call's age.
    """

    received: bool | None
    state: State | None = None
    response: httpx.Response | None = None
    body_too_large: bool = False
    remembers: float | None = None
    vouched: bool = False
    error: ToolCallError | None = None

    @property
    def text(self) -> str:
        """The sentence to hand to the model."""
        if self.received is None or self._outcome_unknown:
            return NO_RESULT
        if not self.received:
            return NOT_RUN if self.vouched else NO_RESULT
        return FINISHED if self.state == "done" else WHILE_RUNNING

    @property
    def _outcome_unknown(self) -> bool:
        problem = refusal(self.response) if self.response is not None else None
        return problem is not None and problem.get("code") == "outcome_unknown"


def read_cancellation(answer: httpx.Response, *, oldest: float | None) -> Cancellation:
    """The Cancellation in the answer of a cancel route; ValueError if it is not in there.

    ``oldest`` is the age in seconds, when the answer arrived, that the server has to vouch for; None: any will do.
    """
    document = answer.json()
    match document:
        case {"received": False, "state": "not_received"}:
            remembers = document.get("remembers")
            if not isinstance(remembers, (int, float)):
                return Cancellation(False, "not_received")
            vouched = oldest is None or remembers >= oldest
            return Cancellation(False, "not_received", remembers=remembers, vouched=vouched)
        case {"received": True, "state": "running" | "done" as state}:
            response = _saved_response(document, answer.request)
            return Cancellation(True, state, response, body_too_large=document.get("body_too_large") is True)
        case _:
            raise ValueError("not the answer of a cancel route")


def _saved_response(document: dict[str, object], request: httpx.Request) -> httpx.Response | None:
    status = document.get("status")
    if not isinstance(status, int):
        return None
    content_type = document.get("content_type")
    return httpx.Response(
        status,
        headers={"Content-Type": str(content_type)} if content_type else None,
        content=base64.b64decode(str(document.get("body", "")), validate=True),
        request=request,
    )
