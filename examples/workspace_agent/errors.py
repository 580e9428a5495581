"""The one error of the agent that its callers see."""

from __future__ import annotations


class AgentError(Exception):
    """Answered as ``{"message", "detail"?, "code"?}`` with ``status``. ``code`` is for machines."""

    def __init__(self, status: int, message: str, detail: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.detail = detail
        self.code = code
