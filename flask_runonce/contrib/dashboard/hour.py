"""What this process was told of its calls in the last hour. It is no record: a restart forgets it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flask import Flask

from ... import signals
from ...process import PerProcess
from ...record import CallKey

HOUR = 3600.0
MAX_CALLS = 10_000
"""How many calls are remembered; beyond that, those that were heard of least recently go first."""
MAX_EVENTS = 50_000
"""How many events are, likewise."""
MAX_EVENTS_OF_ONE = 200
"""How many of one call, the newest."""

_TOLD = (
    signals.call_started,
    signals.call_finished,
    signals.call_replayed,
    signals.call_refused,
    signals.call_canceled,
    signals.call_released,
    signals.call_lost,
)
_REPEATS = {"canceled", "input_mismatch", "still_running", "response_too_large"}
"""The refusals of requests that found a record, which counts them as repeats."""
_TIDY = 4
"""How many calls an event may push out."""


class Event(NamedTuple):
    """A signal about a call: its name without "call_", when it came (Unix seconds of this host), and its facts."""

    what: str
    at: float
    status: int = 0
    seconds: float = 0.0
    code: str = ""
    state: str = ""
    pending: bool = False


@dataclasses.dataclass
class Life:
    """What was told of one call. `waited` and `ran` are seconds: the longest wait of a repeat, and the run's time."""

    first: float
    events: collections.deque[Event] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_EVENTS_OF_ONE)
    )
    answered: int = 0
    waited: float | None = None
    ran: float | None = None
    outcome: str = ""

    def add(self, event: Event) -> None:
        if event.what == "started" and not (self.events and self.events[-1].what == "lost"):
            self.answered, self.waited, self.ran = 0, None, None  # another record: the one before was dropped
        self.events.append(event)
        if event.what == "replayed" or (event.what == "refused" and event.code in _REPEATS):
            self.answered += 1
        if event.what == "replayed" and event.seconds > 0:
            self.waited = max(self.waited or 0.0, event.seconds)
        if event.what == "finished":
            self.ran = event.seconds
        if event.what == "started" or self.outcome != "canceled":  # a cancel is the last word on what a run answers
            self.outcome = _outcome(event) or self.outcome


class LastHour:
    """Listens to the signals of `app`. `clock()` gives Unix seconds; tests set their own."""

    def __init__(self, app: Flask, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._memory = PerProcess(lambda: _Memory(clock()))
        names = {signal: signal.name.removeprefix("call_") for signal in _TOLD}
        self._receivers = [functools.partial(self._told, name) for name in names.values()]  # signals hold them weakly
        for signal, receiver in zip(names, self._receivers, strict=True):
            signal.connect(receiver, sender=app)

    @property
    def began(self) -> float:
        """Since when this process remembers, in Unix seconds."""
        memory = self._memory()
        return max(memory.began, self._clock() - HOUR)

    def now(self) -> float:
        """The time by the clock of the events."""
        return self._clock()

    def of(self, key: CallKey) -> tuple[int, Sequence[Event]]:
        """How many repeats of the call were answered here, and what was told of it, oldest first."""
        memory = self._memory()
        with memory.lock:
            life = memory.lives.get(key)
            return (life.answered, tuple(life.events)) if life else (0, ())

    def lives(self) -> Sequence[Life]:
        """Of each call of the last hour, what was told of it. To be read, without its events."""
        memory = self._memory()
        with memory.lock:
            lives = list(memory.lives.values())
        since = self._clock() - HOUR
        return [life for life in lives if life.first > since]

    def _told(
        self,
        what: str,
        sender: Any,
        *,
        key: CallKey | None,
        status: int = 0,
        seconds: float = 0.0,
        code: str = "",
        state: str = "",
        pending: bool = False,
        **facts: Any,
    ) -> None:
        if key is None:
            return
        event = Event(what, self._clock(), status, seconds, code, state, pending)
        memory = self._memory()
        with memory.lock:
            memory.add(key, event)


class _Memory:
    """The lives of the calls, those heard of least recently first. Its methods are called with the lock held."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.lock = threading.Lock()
        self.lives: collections.OrderedDict[CallKey, Life] = collections.OrderedDict()
        self.events = 0

    def add(self, key: CallKey, event: Event) -> None:
        life = self.lives.get(key)
        if life is None:
            life = self.lives[key] = Life(event.at)
        else:
            self.lives.move_to_end(key)
        self.events -= len(life.events)
        life.add(event)
        self.events += len(life.events)
        for _ in range(_TIDY):
            oldest = next(iter(self.lives))
            fits = len(self.lives) <= MAX_CALLS and self.events <= MAX_EVENTS
            if fits and self.lives[oldest].events[-1].at > event.at - HOUR:
                break
            events = self.lives.pop(oldest).events
            self.events -= len(events)
            self.began = max(self.began, events[-1].at)


def _outcome(event: Event) -> str:
    """What an event makes of its call's outcome; "" where it changes nothing."""
    if event.what == "started":
        return "running"
    if event.what == "finished":
        return "answered" if event.status < 400 else "error"
    if event.what == "canceled":
        return "" if event.state == "done" else "canceled"
    return {"released": "released", "lost": "error"}.get(event.what, "")
