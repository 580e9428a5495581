"""The store of one process: a cachetools LRU for finished records, a dict for running ones, one lock."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from cachetools import Cache, LRUCache

from ..errors import StoreFull
from ..process import PerProcess
from ..record import NOW, CallKey, Claim, Found, Outcome, Record, SavedResponse, Seen, State
from .protocol import Page, Renewed, Swapped

_RECORD_BYTES = 1000
"""What a record takes besides its body, its headers and its key's characters."""
_HEADER_BYTES = 200
"""What a saved header takes besides its characters."""
_RESERVE = 16
"""One part in so many of the store is for calls that are canceled before they come."""
_TIDY = 4
"""How many forgotten records a swap drops on its way."""
_MAKE_ROOM = 500
"""How many a swap drops at most when it would otherwise be refused."""


class MemoryStore:
    """Keeps records in this process. Nothing that has not been forgotten is ever evicted (CONTRACT section 7).

    `max_bytes` bounds what the records hold: beyond it a new call is refused with `StoreFull`. `timer()` gives seconds
    that never go back; tests set their own. Runs have no lease: their owner dies with their record.
    """

    shared = False

    def __init__(self, *, max_bytes: int = 256 * 2**20, timer: Callable[[], float] = time.monotonic) -> None:
        self._state = PerProcess(lambda: _State(max_bytes, timer))

    @property
    def bytes(self) -> int:
        """What the records hold, about, as `max_bytes` counts it."""
        return self._state().bytes

    def read(self, key: CallKey) -> Seen:
        state = self._state()
        with state.lock:
            now = state.now()
            return _seen(state.find(key, now), now)

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
        state = self._state()
        version = os.urandom(8).hex()  # not under the lock: a system call lets other threads run, straight into it
        with state.lock:
            now = state.now()
            state.tidy(_TIDY, now)
            entry = state.find(key, now)
            if (entry.version if entry else "") != seen or if_lost:  # nothing is ever lost here
                if entry is None:
                    return Swapped(False, _seen(None, now))
                state.touch(key, entry, now + forget_after, repeat)
                return Swapped(False, Seen(entry.record, entry.version, now, None, entry.repeats + repeat))
            if new is None:
                state.drop(key)
                changed = None
            else:
                repeats = entry.repeats if entry else 0
                until = math.inf if new.state is State.RUNNING else now + forget_after
                changed = _Entry(_stamped(new, now), version, repeats, _size(new), until)
                state.put(key, changed, entry, now)
            if waiting := state.waiting.pop(key, None):
                waiting.notify_all()
            return Swapped(True, _seen(changed, now))

    def renew(self, claims: Sequence[Claim], *, forget_after: float, lease: float) -> Renewed:
        canceled, lost = set(), set()
        state = self._state()
        with state.lock:
            for claim in claims:
                entry = state.running.get(claim.key)
                if entry is None or entry.record.run != claim.run:
                    lost.add(claim.run)
                elif entry.record.found:
                    canceled.add(claim.run)
        return Renewed(frozenset(canceled), frozenset(lost))

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        state = self._state()
        deadline = time.monotonic() + timeout
        with state.lock:
            while True:
                now = state.now()
                entry = state.find(key, now)
                left = deadline - time.monotonic()
                if (entry.version if entry else "") != version or left <= 0:
                    return _seen(entry, now)
                state.waiting.setdefault(key, threading.Condition(state.lock)).wait(left)

    def list(self, *, scope: str | None = None, chat_id: str | None = None, limit: int = 50, offset: int = 0) -> Page:
        state = self._state()
        with state.lock:
            entries = [*state.running.values(), *state.finished]
            now = state.now()
        rows = [
            entry
            for entry in entries
            if entry.until > now
            and (scope is None or entry.record.key.scope == scope)
            and (chat_id is None or entry.record.key.chat_id == chat_id)
        ]
        rows.sort(key=lambda entry: entry.record.created_at, reverse=True)
        return Page([_seen(entry, now) for entry in rows[offset : offset + limit]], len(rows))

    def purge(self) -> int:
        state = self._state()
        with state.lock:
            return state.tidy(len(state.finished), state.now())

    def age(self) -> float:
        state = self._state()
        return state.now() - state.began

    def close(self) -> None:
        """Nothing to give back; the records stay."""


_Key: TypeAlias = tuple[str, ...]
_Packed: TypeAlias = tuple[Any, ...]
_STATES = {state.value: state for state in State}
_FOUND: dict[str | None, Found | None] = {None: None, **{found.value: found for found in Found}}
_OUTCOMES: dict[str | None, Outcome | None] = {None: None, **{outcome.value: outcome for outcome in Outcome}}


class _Entry(NamedTuple):
    record: Record
    version: str
    repeats: int
    size: int
    until: float


class _State:
    """The records of one process. Every method but `now` is called with the lock held."""

    def __init__(self, max_bytes: int, timer: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.running: dict[CallKey, _Entry] = {}
        self.finished = _IdleOrder()
        self.waiting: dict[CallKey, threading.Condition] = {}
        self.bytes = 0
        self.max_bytes = max_bytes
        self._timer = timer
        self._unix = time.time() - timer()
        self.began = self.now()

    def now(self) -> float:
        """Unix seconds that never go back, whatever becomes of the host's clock."""
        return self._timer() + self._unix

    def find(self, key: CallKey, now: float) -> _Entry | None:
        entry = self.running.get(key) or self.finished.get(key)
        if entry and entry.until <= now:
            self.drop(key)
            return None
        return entry

    def touch(self, key: CallKey, entry: _Entry, until: float, repeat: bool) -> None:
        if entry.record.state is State.RUNNING:
            self.running[key] = entry._replace(repeats=entry.repeats + repeat)
        else:
            self.finished.touch(key, until, repeat)

    def put(self, key: CallKey, entry: _Entry, old: _Entry | None, now: float) -> None:
        """Keep `entry` in the place of `old`. Raises `StoreFull`; then nothing has changed but what was forgotten."""
        growth = entry.size - (old.size if old else 0)
        if growth > 0:
            self._make_room(growth, entry.record.state, now)
        if entry.record.state is State.RUNNING:
            if old:
                self.finished.drop(key)
            self.running[key] = entry
        else:
            self.running.pop(key, None)
            self.finished.put(key, entry)
        self.bytes += growth

    def drop(self, key: CallKey) -> None:
        entry = self.running.pop(key, None) or self.finished.drop(key)
        if entry:
            self.bytes -= entry.size

    def tidy(self, at_most: int, now: float) -> int:
        dropped = 0
        while dropped < at_most and (entry := self.finished.take_expired(now)):
            self.bytes -= entry.size
            dropped += 1
        return dropped

    def _make_room(self, growth: int, state: State, now: float) -> None:
        limit = self.max_bytes if state is State.CANCELED else self.max_bytes - self.max_bytes // _RESERVE
        left = _MAKE_ROOM
        while self.bytes + growth > limit:
            if not left or not self.tidy(1, now):
                raise StoreFull("The memory store is full: RUNONCE_MAX_STORE_BYTES is reached.")
            left -= 1


class _IdleOrder:
    """Finished records in the order in which their idle time ends.

    With one idle time for all, an LRU's order is that order. An LRU gives its oldest only by taking it out, so the one
    that is next to expire may stand beside the cache.

    What is kept has none of our types: the garbage collector stops looking at a tuple that holds only strings, numbers
    and bytes, and it would look at four objects a record at each full collection.
    """

    def __init__(self) -> None:
        self._cache: LRUCache[_Key, _Packed] = LRUCache(maxsize=math.inf)
        self._oldest: tuple[_Key, _Packed] | None = None

    def get(self, key: _Key) -> _Entry | None:
        """The entry, left where it stands in the order."""
        if self._oldest and self._oldest[0] == key:
            return _unpacked(*self._oldest)
        return _unpacked(key, Cache.__getitem__(self._cache, key)) if key in self._cache else None

    def put(self, key: _Key, entry: _Entry) -> None:
        """Keep the entry as the newest."""
        if self._oldest and self._oldest[0] == key:
            self._oldest = None
        self._cache[tuple(key)] = _packed(entry)

    def touch(self, key: _Key, until: float, repeat: bool) -> None:
        """Make the entry the newest. It is not unpacked for that: a repeat has done so once."""
        if self._oldest and self._oldest[0] == key:
            key, packed = self._oldest
            self._oldest = None
        else:
            packed = Cache.__getitem__(self._cache, key)
        _, version, repeats, *more = packed
        self._cache[tuple(key)] = (until, version, repeats + repeat, *more)

    def drop(self, key: _Key) -> _Entry | None:
        if self._oldest and self._oldest[0] == key:
            packed: _Packed | None
            packed, self._oldest = self._oldest[1], None
        else:
            packed = self._cache.pop(key, None)
        return _unpacked(key, packed) if packed else None

    def take_expired(self, now: float) -> _Entry | None:
        """Take out the oldest entry, if its idle time is over."""
        if self._oldest is None:
            if not self._cache:
                return None
            self._oldest = self._cache.popitem()
        key, packed = self._oldest
        if packed[0] > now:
            return None
        self._oldest = None
        return _unpacked(key, packed)

    def __len__(self) -> int:
        return len(self._cache) + (self._oldest is not None)

    def __iter__(self) -> Iterator[_Entry]:
        if self._oldest:
            yield _unpacked(*self._oldest)
        for key in list(self._cache):
            yield _unpacked(key, Cache.__getitem__(self._cache, key))


def _packed(entry: _Entry) -> _Packed:
    record, version, repeats, size, until = entry
    _, state, run, owner, fingerprint, found, owed, again, outcome, response, created_at, finished_at = record
    return (
        *(until, version, repeats, size, state.value, run, owner, fingerprint),
        *(found and found.value, owed, again, outcome and outcome.value),
        *(response or (None, (), b"")),
        *(created_at, finished_at),
    )


def _unpacked(key: _Key, packed: _Packed) -> _Entry:
    until, version, repeats, size, state, run, owner, fingerprint, *more = packed
    found, owed, again, outcome, status, headers, body, created_at, finished_at = more
    response = None if status is None else SavedResponse(status, headers, body)
    record = Record(
        CallKey(*key),
        _STATES[state],
        run,
        owner,
        fingerprint,
        _FOUND[found],
        owed,
        again,
        _OUTCOMES[outcome],
        response,
        created_at,
        finished_at,
    )
    return _Entry(record, version, repeats, size, until)


def _seen(entry: _Entry | None, now: float) -> Seen:
    return Seen(entry.record, entry.version, now, None, entry.repeats) if entry else Seen(None, "", now)


def _stamped(record: Record, now: float) -> Record:
    *facts, created_at, finished_at = record
    times = (now if created_at == NOW else created_at, now if finished_at == NOW else finished_at)
    return Record._make((*facts, *times))


def _size(record: Record) -> int:
    scope, chat_id, tool_call_id = record.key
    size = _RECORD_BYTES + len(scope) + len(chat_id) + len(tool_call_id)
    if record.response:
        size += len(record.response.body)
        for name, value in record.response.headers:
            size += _HEADER_BYTES + len(name) + len(value)
    return size
