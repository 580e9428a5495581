"""What a client raises, with the facts on it.

ToolCallError           a request that gave no result of the handler
├── Refused             flask-runonce refused it; ``code`` says why (CONTRACT section 6)
├── NoAnswer            the app's answer did not arrive: connection, time-out, a gateway's 502, 503 or 504
│   └── SilenceTimeout  the server sent nothing for too long
└── Stopped             the caller's ``stop`` event ended it; ``cancellation`` says what became of the call
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

    from .cancellation import Cancellation


class ToolCallError(Exception):
    """The root of this tree; ``str(error)`` is its detail.

    ``detail``: one sentence that can be handed to a language model.
    ``tool_call_id``: the call's ID, None for a request that has none.
    ``code``: of section 6 where flask-runonce refused, else this class's own word.
    ``status``, ``response``: of the answer behind it, None where there was none.
    ``retryable``: whether the same request with the same ID may be sent again.
    ``retry_after``: the shortest wait before that, in seconds.
    """

    code = "failed"

    def __init__(
        self,
        detail: str,
        *,
        tool_call_id: str | None = None,
        code: str | None = None,
        response: httpx.Response | None = None,
        retryable: bool = False,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.tool_call_id = tool_call_id
        if code is not None:
            self.code = code
        self.response = response
        self.status = None if response is None else response.status_code
        self.retryable = retryable
        self.retry_after = retry_after


class Refused(ToolCallError):
    code = "refused"


class NoAnswer(ToolCallError):
    code = "no_answer"


class SilenceTimeout(NoAnswer):
    code = "silence_timeout"


class Stopped(ToolCallError):
    """``cancellation`` is the cancel's answer, None where ``cancel_on_stop`` was not asked for."""

    code = "stopped"

    def __init__(self, tool_call_id: str | None, cancellation: Cancellation | None = None) -> None:
        super().__init__("The tool call was stopped by its caller.", tool_call_id=tool_call_id)
        self.cancellation = cancellation
