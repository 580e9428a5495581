"""A store in eighty lines: the verbs of `flask_runonce.stores.protocol` that decide, with leases.

The interleavings are explored on it. It owns no clock, makes no version up by itself and never blocks: what time it
is, and who waits until when, is for the test to arrange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flask_runonce.record import NOW, CallKey, Claim, Record, Seen, State
from flask_runonce.stores import Renewed, Swapped


class Entry(NamedTuple):
    record: Record
    version: str
    lease_until: float | None
    expires_at: float
    repeats: int = 0


class ModelStore:
    """`clock()` gives the store's now in seconds, `new_version()` a token that was never there before."""

    shared = True

    def __init__(self, clock: Callable[[], float], new_version: Callable[[], str]) -> None:
        self.entries: dict[CallKey, Entry] = {}
        self._clock = clock
        self._new_version = new_version

    def read(self, key: CallKey) -> Seen:
        entry = self.entries.get(key)
        if entry is None or entry.expires_at <= self._clock():
            return Seen(None, "", self._clock())
        return Seen(entry.record, entry.version, self._clock(), entry.lease_until, entry.repeats)

    def swap(
        self,
        key: CallKey,
        seen: str,
        new: Record | None,
        *,
        forget_after: float,
        lease: float | None,
        if_lost: bool = False,
        repeat: bool = False,
    ) -> Swapped:
        there = self.read(key)
        if there.version != seen or (if_lost and not there.lost):
            if there.record:
                idle_from = max(there.now, there.lease_until or there.now)
                touched = (there.record, there.version, there.lease_until, idle_from + forget_after)
                self.entries[key] = Entry(*touched, there.repeats + repeat)
            return Swapped(False, self.read(key))
        if new is None:
            self.entries.pop(key, None)
            return Swapped(True, self.read(key))
        new = new._replace(
            created_at=there.now if new.created_at == NOW else new.created_at,
            finished_at=there.now if new.finished_at == NOW else new.finished_at,
        )
        lease_until = None
        if new.state is State.RUNNING:
            lease_until = there.lease_until if lease is None else there.now + lease
        expires_at = max(lease_until or 0, there.now) + forget_after
        self.entries[key] = Entry(new, self._new_version(), lease_until, expires_at, there.repeats)
        return Swapped(True, self.read(key))

    def renew(self, claims: Sequence[Claim], *, forget_after: float, lease: float) -> Renewed:
        canceled, lost = set(), set()
        for claim in claims:
            there = self.read(claim.key)
            if there.record is None or there.record.state is not State.RUNNING or there.record.run != claim.run:
                lost.add(claim.run)
                continue
            until = there.now + lease
            self.entries[claim.key] = Entry(there.record, there.version, until, until + forget_after, there.repeats)
            if there.record.found:
                canceled.add(claim.run)
        return Renewed(frozenset(canceled), frozenset(lost))
