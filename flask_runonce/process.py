"""Values that belong to one process: made on first use, and again after a fork."""

from __future__ import annotations

import os
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
