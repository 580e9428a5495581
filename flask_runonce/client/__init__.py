"""The sender's half of run-once: stable IDs, safe retries, truthful cancels (CONTRACT section 9; extra ``client``).

It uses no store and no app.
"""

from .answers import error_detail
from .async_client import AsyncToolClient
from .cancellation import Cancellation
from .core import CallInfo, Retry
from .errors import NoAnswer, Refused, SilenceTimeout, Stopped, ToolCallError
from .ids import tool_call_id, tool_call_ids
from .sync_client import ToolClient

__all__ = [
    "AsyncToolClient",
    "CallInfo",
    "Cancellation",
    "NoAnswer",
    "Refused",
    "Retry",
    "SilenceTimeout",
    "Stopped",
    "ToolCallError",
    "ToolClient",
    "error_detail",
    "tool_call_id",
    "tool_call_ids",
]
