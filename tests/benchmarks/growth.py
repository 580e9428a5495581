"""What does not grow: the time of a request, and the garbage collector's, however many calls are kept."""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flask_runonce.record import NOW, CallKey, Outcome, Record, SavedResponse, State
from flask_runonce.stores import MemoryStore, SQLStore, Store
from tests.benchmarks.apps import ROOM, ask, environ_of, middleware, new_ids
from tests.benchmarks.compare import Spread, batch

FEW = 100
FORGET = 3600.0
DROPPED = 8
"""Forgotten records that the memory store drops with each first run."""


class Grown(NamedTuple):
    """A first run and a repeat with so many records kept, as ratios to the same with `FEW`."""

    records: int
    first_run: Spread
    repeat: Spread


def fill(store: Store, count: int) -> None:
    """Keep `count` more calls that have ended, each as a request would leave it."""
    run, owner, fingerprint = "0123456789abcdef", "host:1", "f" * 64
    for number in range(count):
        key = CallKey("", *new_ids())
        record = Record(key, State.RUNNING, f"{run}{number}", owner, f"{fingerprint}{number}")
        claimed = store.swap(key, "", record, forget_after=FORGET, lease=30).seen
        assert claimed.record
        response = SavedResponse("201 CREATED", (("Content-Type", "application/json"),), b"%9d" % number)
        done = claimed.record._replace(state=State.DONE, outcome=Outcome.RESPONSE, response=response, finished_at=NOW)
        store.swap(key, claimed.version, done, forget_after=FORGET, lease=30)


def memory(sizes: Sequence[int], rounds: int) -> list[Grown]:
    """The memory store, by processor time."""
    store, kept, grown = MemoryStore(max_bytes=ROOM), 0, []
    for size in sizes:
        fill(store, size - kept)
        grown.append(_grown(size, store, lambda: MemoryStore(max_bytes=ROOM), rounds, cpu=True))
        kept = size + rounds * FEW
    return grown


def sqlite(sizes: Sequence[int], rounds: int) -> list[Grown]:
    """SQLite, by the clock on the wall."""
    grown = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def opened(name: str) -> SQLStore:
            return stack.enter_context(contextlib.closing(SQLStore(f"sqlite:///{folder}/{name}.db")))

        few, many = opened("few"), opened("many")
        for store in (few, many):
            fill(store, FEW)
        for size in sizes:
            _multiply(f"{folder}/many.db", size)
            grown.append(_grown(size, many, lambda: few, rounds, cpu=False))
    return grown


def _multiply(path: str, size: int) -> None:
    """Copy rows of a store's database until it has `size`, under digests of their own."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(runonce_calls)")]
        chosen = ", ".join("lower(hex(randomblob(16)))" if name == "digest" else name for name in columns)
        (count,) = database.execute("SELECT count(*) FROM runonce_calls").fetchone()
        while count < size:
            copied = database.execute(
                f"INSERT INTO runonce_calls SELECT {chosen} FROM runonce_calls LIMIT ?", (size - count,)
            )
            count += copied.rowcount


def _grown(size: int, many: Store, make_few: Callable[[], Store], rounds: int, *, cpu: bool) -> Grown:
    ratios: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        few = make_few()
        if isinstance(few, MemoryStore):
            fill(few, FEW)
        apps = {"few": middleware(few), "many": middleware(many)}
        ids = [new_ids() for _ in range(FEW)]
        for which in ratios:
            times = {name: batch(app, [environ_of(each) for each in ids]) for name, app in apps.items()}
            if number:
                which.append(times["many"].cpu / times["few"].cpu if cpu else times["many"].wall / times["few"].wall)
    return Grown(size, Spread.of(ratios[0]), Spread.of(ratios[1]))


class Kept(NamedTuple):
    """`bytes`: what a record takes in memory besides its body. The rest is milliseconds."""

    bytes: float
    collection: float
    forgetting: float


def kept(count: int = 100_000) -> Kept:
    """What `count` records cost while they are kept, and the longest request while all are forgotten at once."""
    now = 0.0
    store = MemoryStore(max_bytes=ROOM, timer=lambda: now)
    app = middleware(store)
    ask(app, environ_of(new_ids()))
    without = _collection()
    fill(store, count)
    collection = _collection() - without
    now = 2 * FORGET
    longest = 0.0
    gc.collect()
    gc.disable()  # a pause of the collector's is measured above
    try:
        for _ in range(count // DROPPED + 100):
            environ = environ_of(new_ids())
            before = time.thread_time()
            ask(app, environ)
            longest = max(longest, time.thread_time() - before)
    finally:
        gc.enable()
    return Kept(_bytes_of_a_record(), 1000 * collection, 1000 * longest)


def _collection() -> float:
    def once() -> float:
        before = time.thread_time()
        gc.collect()
        return time.thread_time() - before

    return statistics.median(once() for _ in range(5))


def _bytes_of_a_record(count: int = 5000) -> float:
    app = middleware(MemoryStore(max_bytes=ROOM))
    bodies = sum(len(ask(app, environ_of(new_ids()))) for _ in range(100))
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        bodies = sum(len(ask(app, environ_of(new_ids()))) for _ in range(count))
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before - bodies) / count
    finally:
        tracemalloc.stop()
