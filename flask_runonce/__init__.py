"""Run a request at most once: repeats get the first response, concurrent repeats wait, cancels tell the truth.

What docstrings cite as "CONTRACT section 4" is that section of the documentation's page `docs/contract.md`.
"""

from . import errors, signals
from .budget import budget_for
from .call import current_call
from .extension import RunOnce
from .record import CallKey, SavedResponse
from .wsgi import RunOnceMiddleware

__all__ = [
    "CallKey",
    "RunOnce",
    "RunOnceMiddleware",
    "SavedResponse",
    "budget_for",
    "current_call",
    "errors",
    "signals",
]
