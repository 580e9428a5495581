"""The geometry of the pictures, and the numbers of the tables beside them. The templates draw."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .hour import HOUR, Life
from .life import Wait
from .words import duration, minute

OUTCOMES = {
    "answered": "answered",
    "error": "answered with an error, or unknown",
    "canceled": "canceled",
    "released": "released",
    "running": "running",
}
"""The outcomes of calls, from the bottom of a bar to its top."""

BIN = 300
"""Seconds that a bar stands for."""

MAX_POINTS = 1000
"""Calls that the picture of times shows, the newest."""
MAX_WAITS = 40
"""Repeats that the picture of a run shows, the first to come."""

_MARKS = {0.001: "1 ms", 0.01: "10 ms", 0.1: "100 ms", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s", 1000.0: "1000 s"}
"""The marks of both axes of time, by their seconds."""
_LEAST, _MOST = min(_MARKS), max(_MARKS)
_EDGES = (0.01, 0.1, 1.0, 10.0)
"""Where the classes of run times end."""


class Bar(NamedTuple):
    """One outcome in one bin: where it stands, in the units of the picture, and how many calls it is."""

    outcome: str
    x: float
    y: float
    height: float
    calls: int


class Tick(NamedTuple):
    """A mark on an axis: where, and what it says."""

    at: float
    text: str


class Row(NamedTuple):
    """A bin in the table: its beginning and end ("13:05"), and the calls by outcome."""

    start: str
    end: str
    counts: dict[str, int]


class Outcomes(NamedTuple):
    """Calls by outcome, in bins over the last hour."""

    bars: Sequence[Bar]
    ticks: Sequence[Tick]
    hours: Sequence[Tick]
    rows: Sequence[Row]
    totals: dict[str, int]
    bar_width: float


def outcomes(lives: Iterable[Life], now: float, *, width: float, height: float) -> Outcomes:
    """The picture of outcomes in a field of `width` by `height`. `now` is Unix seconds."""
    first = int((now - HOUR) // BIN)
    bins: dict[int, collections.Counter[str]] = {
        number: collections.Counter() for number in range(first, int(now // BIN) + 1)
    }
    for life in lives:
        if life.outcome and (counts := bins.get(int(life.first // BIN))) is not None:
            counts[life.outcome] += 1
    top = _round_up(max(counts.total() for counts in bins.values()))
    step, bars = width / len(bins), []
    for place, counts in enumerate(bins.values()):
        y = height
        for outcome in OUTCOMES:
            if counts[outcome]:
                tall = counts[outcome] / top * height
                y -= tall
                x = place * step + step * 0.14
                bars.append(Bar(outcome, round(x, 1), round(y, 1), round(tall, 1), counts[outcome]))
    return Outcomes(
        bars,
        [Tick(round(height - height * part / 2, 1), f"{top * part // 2:,}") for part in range(3)],
        [
            Tick(round((place + 0.5) * step, 1), minute(number * BIN))
            for place, number in enumerate(bins)
            if place % 3 == 0
        ],
        [
            Row(minute(number * BIN), minute((number + 1) * BIN), {name: counts[name] for name in OUTCOMES})
            for number, counts in bins.items()
        ],
        {name: sum(counts[name] for counts in bins.values()) for name in OUTCOMES},
        round(step * 0.72, 1),
    )


class Point(NamedTuple):
    """A call: where its run time and the longest wait for it put it. `waited`: somebody waited."""

    x: float
    y: float
    waited: bool


class Class(NamedTuple):
    """The calls of one order of run time: how many, for how many of them somebody waited, and for how long at most."""

    text: str
    calls: int
    waited_for: int
    longest: str


class Times(NamedTuple):
    """Waiting time against run time, both on logarithmic axes from 1 ms to 1000 s."""

    points: Sequence[Point]
    across: Sequence[Tick]
    up: Sequence[Tick]
    classes: Sequence[Class]
    left_out: int


def times(lives: Sequence[Life], *, width: float, height: float, floor: float) -> Times:
    """The picture of times in a field of `width` by `height`; `floor` is where calls are that nobody waited for."""
    timed = [(life.ran, life.waited) for life in lives if life.ran is not None]
    points = [
        Point(
            round(width * _log(ran), 1),
            floor if waited is None else round(height - height * _log(waited), 1),
            waited is not None,
        )
        for ran, waited in timed[-MAX_POINTS:]
    ]
    marks = [(_log(seconds), text) for seconds, text in _MARKS.items()]
    return Times(
        points,
        [Tick(round(width * part, 1), text) for part, text in marks],
        [Tick(round(height - height * part, 1), text) for part, text in marks],
        [_class(text, low, high, timed) for text, low, high in _classes()],
        max(0, len(timed) - MAX_POINTS),
    )


class Line(NamedTuple):
    """A wait in the picture of a run."""

    x: float
    y: float
    width: float


class Run(NamedTuple):
    """A run and the repeats that waited for it, on one axis of time from the first request on."""

    width: float
    lines: Sequence[Line]
    ticks: Sequence[Tick]
    height: float
    left_out: int


def run(start: float, end: float, waits: Sequence[Wait], *, width: float) -> Run:
    """The picture of a run from `start` to `end` (Unix seconds), in a field that is `width` wide."""
    during = [wait for wait in waits if wait.start <= end]
    last = max([end, *(wait.end for wait in during)])
    span = max(last - start, 0.001)
    drawn = during[:MAX_WAITS]
    lines = [
        Line(
            round(max(0.0, wait.start - start) / span * width, 1),
            24 + 5 * number,
            round(max(1.0, (wait.end - max(start, wait.start)) / span * width), 1),
        )
        for number, wait in enumerate(drawn)
    ]
    step = _step(span)
    ticks = [
        Tick(round(number * step / span * width, 1), duration(number * step) if number else "0")
        for number in range(int(span / step) + 1)
    ]
    ends = max(2.0, round((end - start) / span * width, 1))
    return Run(ends, lines, ticks, 24 + 5 * len(drawn), len(during) - len(drawn))


def _round_up(count: int) -> int:
    """The end of an axis for `count`: one digit and zeros, and even, so that its half is a whole number."""
    power = 1
    while 10 * power < count:
        power *= 10
    return next(factor * power for factor in range(2, 11) if factor * power >= count and factor * power % 2 == 0)


def _step(span: float) -> float:
    """The distance of marks on an axis of `span`, so that there are two to five of them after the first."""
    power = 10.0 ** math.floor(math.log10(span))
    return next(power * factor for factor in (0.2, 0.5, 1, 2) if span / (power * factor) < 6)


def _log(seconds: float) -> float:
    """Where a time stands on an axis from 1 ms (0) to 1000 s (1)."""
    within = min(max(seconds, _LEAST), _MOST)
    return math.log(within / _LEAST) / math.log(_MOST / _LEAST)


def _classes() -> Iterable[tuple[str, float, float]]:
    yield f"under {_MARKS[_EDGES[0]]}", 0.0, _EDGES[0]
    for low, high in itertools.pairwise(_EDGES):
        yield f"{_MARKS[low]} to {_MARKS[high]}", low, high
    yield f"{_MARKS[_EDGES[-1]]} and more", _EDGES[-1], math.inf


def _class(text: str, low: float, high: float, timed: Iterable[tuple[float, float | None]]) -> Class:
    waits = [waited for ran, waited in timed if low <= ran < high]
    waited = [seconds for seconds in waits if seconds is not None]
    return Class(text, len(waits), len(waited), duration(max(waited)) if waited else "")
