"""A timer that tests move."""

from __future__ import annotations


class Clock:
    """Stands still until `advance`, so that a test can let records be forgotten: `MemoryStore(timer=Clock())`."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Seconds since the clock was made."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Raises ValueError for less than 0: a store's timer never goes back."""
        if seconds < 0:
            raise ValueError(f"A clock goes forward only, not by {seconds!r} seconds.")
        self._now += seconds
