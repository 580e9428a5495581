"""Draws the rule: each way from one state of a record to another that `flask_runonce.rule` makes.

``python docs/draw_rule.py`` writes ``docs/_static/rule.svg``. What is drawn comes from asking the rule; where it is
drawn is laid out here, by hand. It fails if the rule knows a way that the layout does not, or the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from flask_runonce import rule
from flask_runonce.record import CallKey, Found, Outcome, Record, Seen, State
from flask_runonce.rule import Move, Put

FILE = Path(__file__).resolve().parent / "_static" / "rule.svg"

KEY = CallKey("", "chat", "call")
RUN = Record(KEY, State.RUNNING, run="ours")
END = RUN._replace(state=State.DONE, outcome=Outcome.RESPONSE)
NEW = rule.Request(KEY, run="new", waited_for="ours")


def _seen(record: Record | None, *, lost: bool = False) -> Seen:
    return Seen(record, "version" if record else "", now=1.0, lease_until=0.0 if lost else None)


SEEN = {
    "nothing": _seen(None),
    "running": _seen(RUN),
    "lost": _seen(RUN, lost=True),
    "done": _seen(END),
    "canceled": _seen(Record(KEY, State.CANCELED, found=Found.NOT_RECEIVED)),
    "running, canceled": _seen(RUN._replace(found=Found.RUNNING)),
    "lost, canceled": _seen(RUN._replace(found=Found.RUNNING), lost=True),
    "done, canceled": _seen(END._replace(found=Found.DONE)),
}
EVENTS: dict[str, Callable[[Seen], Move]] = {
    "begin": lambda seen: rule.begin(seen, NEW),
    "begin (rerun)": lambda seen: rule.begin(seen, NEW._replace(rerun=True)),
    "finish": lambda seen: rule.finish(seen, "ours", Outcome.RESPONSE),
    "release": lambda seen: rule.release(seen, "ours"),
    "release (rerun)": lambda seen: rule.release(_again(seen), "ours"),
    "cancel": lambda seen: rule.cancel(seen, KEY, patient=True),
    "forget": rule.forget,
}
TIME = {
    ("running", "lost"): "lease ends",
    ("running, canceled", "lost, canceled"): "lease ends",
    ("done", "nothing"): "idle time",
    ("canceled", "nothing"): "idle time",
    ("done, canceled", "nothing"): "idle time",
}
"""What becomes of a record without an event. The rule reads no clock; a store shows it what time has done."""

Way = tuple[str, str]


def _again(seen: Seen) -> Seen:
    return seen._replace(record=seen.record and seen.record._replace(again=True))


def ways() -> dict[Way, list[str]]:
    """The ways from state to state, and the events that lead there."""
    found: dict[Way, list[str]] = defaultdict(list)
    for start, seen in SEEN.items():
        for event, ask in EVENTS.items():
            move = ask(seen)
            if move.put is not Put.AS_IT_IS:
                end = _name(None if move.put is Put.NOTHING else move.put, move.lost)
                usual = event.removesuffix(" (rerun)")
                if end != start and usual not in found[start, end]:
                    found[start, end].append(event)
    for way, what in TIME.items():
        found[way].append(what)
    return {way: events for way, events in found.items() if events}


def _name(record: Record | None, lost: bool) -> str:
    if record is None:
        return "nothing"
    name = "lost" if lost else record.state.value
    return f"{name}, canceled" if record.found and record.state is not State.CANCELED else name


# The layout, in pixels.

WIDTH, HEIGHT = 910, 540
BOX = (116, 64)
PLACES = {
    "nothing": (118, 190),
    "running": (346, 190),
    "lost": (574, 190),
    "done": (802, 190),
    "canceled": (118, 376),
    "running, canceled": (346, 376),
    "lost, canceled": (574, 376),
    "done, canceled": (802, 376),
}
"""The middle of each state's box: how far the run is from left to right, a cancel's mark below."""


class Line(NamedTuple):
    """Where a way goes, and where its events are written: in one line, upwards (`rise` -1) or downwards (1)."""

    path: str
    x: int
    y: int
    anchor: str = "middle"
    rise: int = 0


LINES = {
    ("nothing", "running"): Line("M176 176 H284", 232, 170, rise=-1),
    ("running", "nothing"): Line("M288 204 H180", 232, 219, rise=1),
    ("running", "lost"): Line("M404 176 H512", 460, 170, rise=-1),
    ("lost", "running"): Line("M516 204 H408", 460, 219, rise=1),
    ("lost", "done"): Line("M632 190 H740", 688, 184, rise=-1),
    ("running", "done"): Line("M356 158 V120 H792 V154", 674, 115),
    ("lost", "nothing"): Line("M574 158 V85 H128 V154", 346, 80),
    ("done", "nothing"): Line("M812 158 V50 H108 V154", 460, 45),
    ("nothing", "canceled"): Line("M104 222 V340", 98, 286, "end"),
    ("canceled", "nothing"): Line("M132 344 V226", 138, 279, "start", rise=1),
    ("running", "running, canceled"): Line("M346 222 V340", 352, 286, "start"),
    ("lost", "done, canceled"): Line("M598 222 L750 341", 686, 280, "start"),
    ("done", "done, canceled"): Line("M802 222 V340", 808, 286, "start"),
    ("running, canceled", "canceled"): Line("M288 376 H180", 232, 370, rise=-1),
    ("running, canceled", "lost, canceled"): Line("M404 376 H512", 460, 370, rise=-1),
    ("lost, canceled", "done, canceled"): Line("M632 376 H740", 688, 391, rise=1),
    ("running, canceled", "done, canceled"): Line("M356 408 V446 H792 V412", 674, 461),
    ("lost, canceled", "canceled"): Line("M560 408 V480 H118 V412", 346, 475),
    ("lost, canceled", "nothing"): Line("M588 408 V516 H24 V190 H56", 594, 510, "start"),
    ("done, canceled", "nothing"): Line("M812 408 V516 H24 V190 H56", 806, 510, "end"),
}


def draw() -> str:
    """The diagram, as SVG. Raises ValueError if the layout is not that of the rule."""
    known = ways()
    if known.keys() != LINES.keys():
        raise ValueError(f"Not in the rule, or without a line: {sorted(known.keys() ^ LINES.keys())}")
    return "\n".join([*_head(), *map(_box, PLACES), *(_line(LINES[way], known[way]) for way in LINES), "</svg>", ""])


def _head() -> Iterator[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="14"'
    yield '  font-family="sans-serif" text-anchor="middle" fill="#222">'
    yield "<title>The states of a record, and what leads from one to another</title>"
    yield '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    yield '  <path d="M0 0 L8 4 L0 8 Z" fill="#555"/></marker>'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'


def _box(state: str) -> str:
    (x, y), (width, height) = PLACES[state], BOX
    place = f'x="{x - width // 2}" y="{y - height // 2}" width="{width}" height="{height}" rx="8"'
    words = state.replace("lost", "owner lost").split(", ")
    texts = (
        f'<text x="{x}" y="{y + 5 + 18 * n - 9 * (len(words) - 1)}" font-weight="bold">{word}</text>'
        for n, word in enumerate(words)
    )
    fill = "#f6d9d5" if "canceled" in state else "#dbe8f6"
    return f'<rect {place} fill="{fill}" stroke="#555"/>' + "".join(texts)


def _line(line: Line, events: list[str]) -> str:
    rows = events if line.rise else [", ".join(events)]
    texts = (
        f'<text x="{line.x}" y="{line.y + 16 * n * line.rise}" text-anchor="{line.anchor}">{escape(row)}</text>'
        for n, row in enumerate(rows[:: line.rise or 1])
    )
    return f'<path d="{line.path}" fill="none" stroke="#555" marker-end="url(#head)"/>' + "".join(texts)


if __name__ == "__main__":
    FILE.write_text(draw(), "utf-8")
