"""Values that belong to one process, made on first use and again after a fork; and what a fork must not cut in two."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_generation = 0


def _after_fork() -> None:
    global _generation
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class PerProcess(Generic[T]):
    """Call it for the value that `make()` gives in this process.

    Locks, connections and threads live in one of these: made at import, they would be native locks in a process that
    gevent patches later, and sockets shared between forked workers. A parent's value is kept in the child, unused, so
    that its collection cannot say goodbye on the parent's socket.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # By process. A fork that Python was not told of (uWSGI) shows only in the ID, a reused ID only in the count.
        self._made: dict[tuple[int, int], T] = {}

    def __call__(self) -> T:
        try:
            return self._made[_generation, os.getpid()]
        except KeyError:
            # Two threads may both make one; setdefault is atomic and lets the first win for both.
            return self._made.setdefault((_generation, os.getpid()), self._make())

    @property
    def made(self) -> T | None:
        """The value, or None when this process has not asked for it yet."""
        return self._made.get((_generation, os.getpid()))


class ForkGate:
    """A context that no fork cuts in two: a fork waits until no thread is in it, and others wait for the fork.

    For a library that has locks of its own, as SQLite has: a child that was forked while another thread held them would
    find them held for ever. Nobody waits for longer than `limit` seconds: those inside may wait for who forks.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._place = PerProcess(_Place)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._shut, after_in_parent=self._open)

    def __enter__(self) -> None:
        place = self._place()
        with place.changed:
            place.changed.wait_for(lambda: not place.forks, self._limit)
            place.inside += 1

    def __exit__(self, *exc_info: object) -> None:
        place = self._place()
        with place.changed:
            place.inside = max(0, place.inside - 1)  # in a child that was forked inside, nobody is
            place.changed.notify_all()

    def _shut(self) -> None:
        if place := self._place.made:
            with place.changed:
                place.forks += 1
                place.changed.wait_for(lambda: not place.inside, self._limit)

    def _open(self) -> None:
        place = self._place.made
        if place and place.forks:  # there may have been no place yet when it was to be shut
            with place.changed:
                place.forks -= 1
                place.changed.notify_all()


class _Place:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside = 0
        self.forks = 0
