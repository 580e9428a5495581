"""The life of a call as a list of what happened: from its record, and from what this process was told of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...problems import PROBLEMS
from ...record import Found, Outcome, Record, Seen, State
from .calls import FOUND, state_of
from .hour import Event
from .words import duration

_BEFORE = 0.25
"""Seconds by which an event may seem to come before its record: the two clocks are compared roughly."""

_DEEDS = {
    "started": "An earlier run of this ID began",
    "finished": "An earlier run of this ID ended",
    "released": "The run did nothing and was released, so that a repeat may run",
    "lost": "The owner of the run was found lost",
}


class Step(NamedTuple):
    """One thing that happened, or several of a kind in a row: when (Unix seconds by the store's clock) and what.

    `by`: it is the latest moment at which it can have been. `at` is None where nobody here knows even that. `waited`
    is the seconds that a repeat waited.
    """

    kind: str
    at: float | None
    text: str
    by: bool = False
    waited: float = 0.0


class Wait(NamedTuple):
    """A repeat that waited, from one time to the other (Unix seconds by the store's clock)."""

    start: float
    end: float


def steps(seen: Seen, events: Sequence[Event], *, answered: int, waiting: int, now: float) -> list[Step]:
    """What happened to a call, oldest first. `now` is the time by the clock of `events`."""
    record = seen.record
    assert record
    events = _by_the_stores_clock(seen, events, now)
    told = [*_of_record(seen), *_of_events(seen, events)]
    # A cancel of which only the latest moment is known came before the end of the run, not after it.
    told.sort(key=lambda step: (step.at, step.kind in ("end", "unknown")))
    grouped = [_together(list(group)) for _, group in itertools.groupby(told, lambda step: (step.kind, step.text))]
    unseen = seen.repeats - answered - waiting
    if unseen > 0:
        text = f"{_repeats(unseen)} of which this process was not told: to others, before it started, or too long ago"
        grouped.append(Step("repeat", None, text))
    if state_of(seen) == "running":
        who = f", and {_repeats(waiting)} {'waits' if waiting == 1 else 'wait'} for it" if waiting else ""
        grouped.append(Step("now", seen.now, f"It is still running{who}"))
    if state_of(seen) == "lost":
        assert seen.lease_until is not None
        text = f"Its owner has not been heard of since {duration(seen.now - seen.lease_until)}"
        grouped.append(Step("lost", seen.now, f"{text}: the outcome is unknown as soon as somebody asks"))
    return grouped


def waits(seen: Seen, events: Sequence[Event], now: float) -> list[Wait]:
    """The repeats that waited for the run of the record, as far as this process was told, by their arrival."""
    assert seen.record
    began = seen.record.created_at - _BEFORE
    replayed = (event for event in _by_the_stores_clock(seen, events, now) if event.what == "replayed")
    return sorted(Wait(event.at - event.seconds, event.at) for event in replayed if event.seconds and event.at > began)


def _by_the_stores_clock(seen: Seen, events: Sequence[Event], now: float) -> Sequence[Event]:
    return [event._replace(at=event.at + seen.now - now) for event in events]


def _of_record(seen: Seen) -> Iterator[Step]:
    record = seen.record
    assert record
    if record.state is State.CANCELED:
        yield Step("cancel", record.created_at, _canceled(Found.NOT_RECEIVED))
        return
    yield Step("run", record.created_at, f"First request; its run began in {record.owner or 'this process'}")
    if record.finished_at is None:
        return
    took = duration(record.finished_at - record.created_at)
    if record.outcome is Outcome.UNKNOWN:
        yield Step("unknown", record.finished_at, f"The run ended after {took}, and nobody knows how: outcome unknown")
    else:
        assert record.response
        yield Step("end", record.finished_at, f"The run ended after {took}: {record.response.status}")


def _of_events(seen: Seen, events: Sequence[Event]) -> Iterator[Step]:
    record = seen.record
    assert record
    cancel_told = record.found in (None, Found.NOT_RECEIVED)
    for event in events:
        current = event.at >= record.created_at - _BEFORE
        if event.what == "replayed":
            how = "after waiting for the run" if event.seconds else "at once"
            text = f"got the saved response ({event.status}) {how}"
            yield Step("repeat", event.at - event.seconds, text, waited=event.seconds)
        elif event.what == "refused":
            yield Step("refused", event.at, f"refused: {_reason(event.code)}")
        elif event.what == "canceled":
            if record.found and event.state == record.found.value and current:
                cancel_told = True
            yield from _of_cancel(record, event)
        elif event.what in ("lost", "released") or not current:
            yield Step(event.what, event.at, _DEEDS[event.what])
    if not cancel_told:
        assert record.found
        latest = record.finished_at if record.found is Found.RUNNING and record.finished_at else seen.now
        yield Step("cancel", latest, f"{_canceled(record.found)}; this process was not told when", by=True)


def _of_cancel(record: Record, event: Event) -> Iterator[Step]:
    """A cancel is told once it is answered, which for one that waited is after the end of the run."""
    if event.state == "not_received" and record.state is State.CANCELED and abs(event.at - record.created_at) < 1:
        return  # it is the one that made the record
    at, by = event.at, False
    if event.state == "running" and record.finished_at is not None and event.at >= record.finished_at:
        at, by = record.finished_at, True
    waits = "; the cancel was answered before the run had ended" if event.pending else ""
    yield Step("cancel", at, _canceled(Found(event.state)) + waits, by)


def _together(group: list[Step]) -> Step:
    first, many = group[0], len(group)
    if first.kind == "repeat":
        longest = max(step.waited for step in group)
        waited = f", {'up to ' if many > 1 else ''}{duration(longest)}" if longest else ""
        return first._replace(text=f"{_repeats(many)} {first.text}{waited}", waited=longest)
    if first.kind == "refused":
        return first._replace(text=f"{many} request{'' if many == 1 else 's'} {first.text}")
    return first if many == 1 else first._replace(text=f"{first.text} ({many} times)")


def _reason(code: str) -> str:
    entry = PROBLEMS.get(code)
    return f"{code} ({entry.status})" if entry else code


def _canceled(found: Found) -> str:
    return f"Canceled {FOUND[found]}"


def _repeats(number: int) -> str:
    return f"{number} repeat{'' if number == 1 else 's'}"
