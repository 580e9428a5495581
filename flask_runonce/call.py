"""A run as its handler sees it (`current_call`), and a canceled call as a cancel hook sees it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import NamedTuple

from werkzeug.local import LocalProxy

from .record import CallKey, Claim, SavedResponse


class Call:
    """The run that goes on: `current_call` in a handler, `environ["runonce.call"]` in WSGI (CONTRACT section 2)."""

    key: CallKey
    """What names the call."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.key = claim.record.key
        self.result_budget: int | None = None
        self.released = False
        self.ended = False
        self.process = os.getpid()
        self.started = time.monotonic()
        self._canceled = False
        self._events: dict[str, threading.Event] = {}

    @property
    def canceled(self) -> bool:
        """True once a cancel has arrived (from another process: within a second)."""
        return self._canceled

    def wait_canceled(self, timeout: float | None = None) -> bool:
        """Wait for a cancel, at most `timeout` seconds; True when one has arrived."""
        event = self._events.setdefault("canceled", threading.Event())  # made only where somebody waits; atomic
        return self._canceled or event.wait(timeout)  # it may have arrived before there was an event to set

    def release(self) -> None:
        """Say "I did nothing": the call is forgotten when the handler returns, and a repeat may run."""
        self.released = True

    def tell_canceled(self) -> None:
        """A cancel has arrived. For the library."""
        self._canceled = True
        for event in list(self._events.values()):
            event.set()


class CanceledCall(NamedTuple):
    """What a cancel hook is called with: the key, what the first cancel found, and the saved response, if there is one.

    `state` is "not_received", "running" or "done".
    """

    key: CallKey
    state: str
    saved: SavedResponse | None


def call_each(hooks: Iterable[Callable[[CanceledCall], object]], call: CanceledCall) -> None:
    """Call every hook, also after one has raised; then raise what the first of those raised."""
    errors = []
    for hook in hooks:
        try:
            hook(call)
        except BaseException as error:
            errors.append(error)
    if errors and not isinstance(errors[0], (Exception, SystemExit, KeyboardInterrupt, GeneratorExit)):
        raise RuntimeError("A cancel hook was itself canceled.") from errors[0]  # such as an async one, by asyncio
    if errors:
        raise errors[0]


running: ContextVar[Call] = ContextVar("flask_runonce.running")

current_call: Call = LocalProxy(running, unbound_message="There is no run here.")  # type: ignore[assignment]
"""The run that the current code is part of. False outside of one."""
