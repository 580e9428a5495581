"""Ratios: every subject beside the bare app, in one process, batches interleaved."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tests.benchmarks.apps import BODY, Subject, ask, environ_of, new_ids

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication, WSGIEnvironment

SITUATIONS = ("no key header", "first run", "repeat")


class Spread(NamedTuple):
    """A median between its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        digits = 3 if self.median < 0.2 else 2
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


class Took(NamedTuple):
    """Seconds a request: by the clock on the wall, and of this process's time on a processor."""

    wall: float
    cpu: float


def batch(app: WSGIApplication, environs: Sequence[WSGIEnvironment]) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    for environ in environs:
        ask(app, environ)
    count = len(environs)
    return Took((time.perf_counter() - wall) / count, (time.process_time() - cpu) / count)


def compare(bare: WSGIApplication, subjects: Sequence[Subject], *, rounds: int, size: int) -> Compared:
    """Measure all subjects; each batch is divided by a batch of the bare app beside it.

    A subject that works only in its own thread is compared by processor time, which other programs disturb less. One
    that waits for a store, or has other threads, is compared by the wall clock, and by its processor time in a row of
    its own.
    """
    ratios: dict[str, dict[str, list[float]]] = {name: {} for subject in subjects for name in names_of(subject)}
    took: list[float] = []
    for number in range(rounds + 1):
        for subject in subjects:
            for situation, environs in _situations(subject, size):
                pair = [(bare, [dict(environ) for environ in environs]), (subject.app, environs)]
                for _, each in pair:
                    for environ in each:
                        environ["wsgi.input"] = io.BytesIO(BODY)
                order = (0, 1) if number % 2 else (1, 0)  # neither is always the one that comes after the other
                times = {which: batch(*pair[which]) for which in order}
                if number:  # the first round warms up
                    for name in names_of(subject):
                        of_cpu = subject.cpu or name != subject.name
                        ratio = times[1].cpu / times[0].cpu if of_cpu else times[1].wall / times[0].wall
                        ratios[name].setdefault(situation, []).append(ratio)
                    took.append(times[0].cpu)
    return Compared(
        statistics.median(took),
        {name: {what: Spread.of(values) for what, values in found.items()} for name, found in ratios.items()},
    )


def names_of(subject: Subject) -> list[str]:
    """The rows that a subject has in the table."""
    return [subject.name] if subject.cpu else [subject.name, f"{subject.name}: processor time"]


class Compared(NamedTuple):
    """`bare` is the bare app's time for a request, in seconds; `ratios` is by subject, then by situation."""

    bare: float
    ratios: dict[str, dict[str, Spread]]


def _situations(subject: Subject, size: int) -> Iterable[tuple[str, list[WSGIEnvironment]]]:
    ids = [new_ids() for _ in range(size)]
    if not subject.needs_key:
        yield "no key header", [environ_of(None) for _ in ids]
    yield "first run", [environ_of(each) for each in ids]
    yield "repeat", [environ_of(each) for each in ids]
