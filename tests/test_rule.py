"""The rule's table, a case per cell: who breaks a row or a condition of it breaks the case that is named after it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import pytest

from flask_runonce import rule
from flask_runonce.record import NOW, CallKey, Found, Outcome, Record, SavedResponse, Seen, State
from flask_runonce.rule import Do, Move, Put

Ask: TypeAlias = Callable[[], Move]
Row: TypeAlias = tuple[str, str, str]
"""A row of the table that rule.py opens with: its event, seen and asked-with columns."""

KEY = CallKey("tenant", "chat-1", "call-1")
RUN, ANOTHER = "run-1", "run-2"
RESPONSE = SavedResponse("201 CREATED", (("Content-Type", "text/plain"),), b"done")

RUNNING = Record(KEY, State.RUNNING, RUN, "host:1", "input-1", created_at=100.0)
MARKED = RUNNING._replace(found=Found.RUNNING)
OWING = MARKED._replace(owed=True)
ANOTHERS = RUNNING._replace(run=ANOTHER)
DONE = RUNNING._replace(state=State.DONE, outcome=Outcome.RESPONSE, response=RESPONSE, finished_at=110.0)
TOO_LARGE = DONE._replace(outcome=Outcome.TOO_LARGE, response=RESPONSE._replace(body=b""))
UNKNOWN = DONE._replace(outcome=Outcome.UNKNOWN, response=None)
MARKED_WHILE_IT_RAN = DONE._replace(found=Found.RUNNING)
MARKED_WHEN_DONE = DONE._replace(found=Found.DONE)
CANCELED = Record(KEY, State.CANCELED, found=Found.NOT_RECEIVED, created_at=100.0)

CLAIM = Record(KEY, State.RUNNING, ANOTHER, "host:2", "input-1")
CLAIM_AGAIN = CLAIM._replace(again=True)
TOOK_OVER = RUNNING._replace(again=True)
END = DONE._replace(finished_at=NOW)
END_TOO_LARGE = TOO_LARGE._replace(finished_at=NOW)
END_UNKNOWN = UNKNOWN._replace(finished_at=NOW)
END_UNKNOWN_MARKED = END_UNKNOWN._replace(found=Found.RUNNING)
NOT_RECEIVED = CANCELED._replace(created_at=NOW)


def seen(record: Record | None, lease_until: float | None = None) -> Seen:
    return Seen(record, "version-1" if record else "", 120.0, lease_until)


def alive(record: Record) -> Seen:
    return seen(record, lease_until=120.1)


def lost(record: Record) -> Seen:
    return seen(record, lease_until=120.0)


def begin(what: Seen, fingerprint: str | None = "input-1", **asked_with: Any) -> Ask:
    return functools.partial(rule.begin, what, rule.Request(KEY, ANOTHER, "host:2", fingerprint, **asked_with))


def finish(what: Seen, outcome: Outcome = Outcome.RESPONSE, response: SavedResponse | None = RESPONSE) -> Ask:
    return functools.partial(rule.finish, what, RUN, outcome, response)


def release(what: Seen) -> Ask:
    return functools.partial(rule.release, what, RUN)


def cancel(what: Seen, *, patient: bool = True) -> Ask:
    return functools.partial(rule.cancel, what, KEY, patient=patient)


def forget(what: Seen) -> Ask:
    return functools.partial(rule.forget, what)


CASES: dict[Row, dict[str, tuple[Ask, Move]]] = {
    ("begin", "nothing", ""): {
        "at first": (begin(seen(None)), Move(Do.RUN, CLAIM)),
        "after a wait": (begin(seen(None), waited_for=RUN), Move(Do.RUN, CLAIM)),
    },
    ("begin", "ours", "the claim's reply was lost"): {
        name: (ask, Move(Do.RUN))
        for name, ask in {
            "alive": begin(alive(ANOTHERS)),
            "in a store without leases": begin(seen(ANOTHERS)),
            "late, but not taken over": begin(lost(ANOTHERS)),
            "late, but not taken over, safe to repeat": begin(lost(ANOTHERS), rerun=True),
            "canceled meanwhile": begin(alive(ANOTHERS._replace(found=Found.RUNNING))),
        }.items()
    },
    ("begin", "canceled", "not waiting for that run"): {
        name: (ask, Move(Do.REFUSE, code="canceled"))
        for name, ask in {
            "before it came": begin(seen(CANCELED)),
            "before it came, so there is no run to wait for": begin(seen(CANCELED), waited_for=""),
            "a released run was awaited": begin(seen(CANCELED), waited_for=RUN),
            "while it runs": begin(alive(MARKED)),
            "while it runs, another run was awaited": begin(alive(MARKED), waited_for="run-0"),
            "while its run was lost": begin(lost(MARKED)),
            "while its run was lost, safe to repeat": begin(lost(MARKED), rerun=True),
            "while it ran": begin(seen(MARKED_WHILE_IT_RAN)),
            "when it was done": begin(seen(MARKED_WHEN_DONE)),
            "when it was done, too large": begin(seen(TOO_LARGE._replace(found=Found.DONE))),
            "asked with another input": begin(alive(MARKED), "input-2"),
        }.items()
    },
    ("begin", "other input", ""): {
        name: (ask, Move(Do.REFUSE, code="input_mismatch"))
        for name, ask in {
            "of a run": begin(alive(RUNNING), "input-2"),
            "of a run that was lost": begin(lost(RUNNING), "input-2"),
            "of a run that was lost, safe to repeat": begin(lost(RUNNING), "input-2", rerun=True),
            "of what is done": begin(seen(DONE), "input-2"),
            "of what is done, too large": begin(seen(TOO_LARGE), "input-2"),
            "of what ended nobody knows how": begin(seen(UNKNOWN), "input-2"),
            "of another run than was awaited": begin(seen(DONE), "input-2", waited_for="run-0"),
            "of the run that was awaited": begin(seen(DONE), "input-2", waited_for=RUN),
        }.items()
    },
    ("begin", "running", ""): {
        name: (ask, Move(Do.WAIT))
        for name, ask in {
            "alive": begin(alive(RUNNING)),
            "in a store without leases": begin(seen(RUNNING)),
            "awaited already": begin(alive(RUNNING), waited_for=RUN),
            "another run was awaited": begin(alive(RUNNING), waited_for="run-0"),
            "safe to repeat, but alive": begin(alive(RUNNING), rerun=True),
            "canceled, and awaited when its cancel came": begin(alive(MARKED), waited_for=RUN),
            "a request without a fingerprint": begin(alive(RUNNING), None),
            "a record without a fingerprint": begin(alive(RUNNING._replace(fingerprint=None))),
        }.items()
    },
    ("begin", "lost", 'on_lost="rerun", no cancel'): {
        "safe to repeat": (begin(lost(RUNNING), rerun=True), Move(Do.RUN, CLAIM_AGAIN, if_lost=True)),
    },
    ("begin", "lost", "otherwise"): {
        "not safe to repeat": (begin(lost(RUNNING)), Move(Do.REPLAY, END_UNKNOWN, if_lost=True)),
        "safe to repeat, but canceled": (
            begin(lost(MARKED), rerun=True, waited_for=RUN),
            Move(Do.REPLAY, END_UNKNOWN_MARKED, if_lost=True),
        ),
        "hooks are owed": (
            begin(lost(OWING), waited_for=RUN),
            Move(Do.REPLAY, END_UNKNOWN_MARKED, if_lost=True, owed=True),
        ),
    },
    ("begin", "done", "the body was too large"): {
        name: (ask, Move(Do.REFUSE, code="response_too_large"))
        for name, ask in {
            "no body": begin(seen(TOO_LARGE)),
            "awaited when its cancel came": begin(seen(TOO_LARGE._replace(found=Found.RUNNING)), waited_for=RUN),
        }.items()
    },
    ("begin", "done", "otherwise"): {
        name: (ask, Move(Do.REPLAY))
        for name, ask in {
            "a response": begin(seen(DONE)),
            "a response, safe to repeat": begin(seen(DONE), rerun=True),
            "nobody knows how": begin(seen(UNKNOWN)),
            "nobody knows how, safe to repeat": begin(seen(UNKNOWN), rerun=True),
            "ours was ended as unknown": begin(seen(UNKNOWN._replace(run=ANOTHER)), rerun=True),
            "awaited when its cancel came": begin(seen(MARKED_WHILE_IT_RAN), waited_for=RUN),
            "a request without a fingerprint": begin(seen(DONE), None),
            "a record without a fingerprint": begin(seen(DONE._replace(fingerprint=None))),
        }.items()
    },
    ("finish", "ours", ""): {
        "alive": (finish(alive(RUNNING)), Move(Do.SAVED, END)),
        "in a store without leases": (finish(seen(RUNNING)), Move(Do.SAVED, END)),
        "late, but not taken over": (finish(lost(RUNNING)), Move(Do.SAVED, END)),
        "canceled": (finish(alive(MARKED)), Move(Do.SAVED, END._replace(found=Found.RUNNING))),
        "hooks are owed": (finish(alive(OWING)), Move(Do.SAVED, END._replace(found=Found.RUNNING), owed=True)),
        "too large": (
            finish(alive(RUNNING), Outcome.TOO_LARGE, TOO_LARGE.response),
            Move(Do.SAVED, END_TOO_LARGE),
        ),
        "nobody knows how": (finish(alive(RUNNING), Outcome.UNKNOWN, None), Move(Do.SAVED, END_UNKNOWN)),
    },
    ("finish", "ours, done", "with this very outcome"): {
        name: (ask, Move(Do.SAVED))
        for name, ask in {
            "only the reply was lost": finish(seen(DONE)),
            "canceled since": finish(seen(MARKED_WHEN_DONE)),
            "too large": finish(seen(TOO_LARGE), Outcome.TOO_LARGE, TOO_LARGE.response),
            "nobody knows how": finish(seen(UNKNOWN), Outcome.UNKNOWN, None),
        }.items()
    },
    ("finish", "anything", ""): {
        name: (ask, Move(Do.GONE))
        for name, ask in {
            "nothing there": finish(seen(None)),
            "another run": finish(alive(ANOTHERS)),
            "another run that was lost": finish(lost(ANOTHERS)),
            "another run ended like this": finish(seen(DONE._replace(run=ANOTHER))),
            "ended as unknown": finish(seen(UNKNOWN)),
            "ended as too large": finish(seen(TOO_LARGE)),
            "ended with a response": finish(seen(DONE), Outcome.UNKNOWN, None),
            "canceled before it came": finish(seen(CANCELED)),
        }.items()
    },
    ("release", "ours", "it took over from a lost run"): {
        "not canceled": (release(alive(TOOK_OVER)), Move(Do.SAVED, TOOK_OVER._replace(run=""), lost=True)),
        "canceled": (
            release(alive(TOOK_OVER._replace(found=Found.RUNNING))),
            Move(Do.SAVED, TOOK_OVER._replace(run="", found=Found.RUNNING), lost=True),
        ),
        "hooks are owed, by whoever ends it": (
            release(alive(OWING._replace(again=True))),
            Move(Do.SAVED, OWING._replace(again=True, run=""), lost=True),
        ),
    },
    ("release", "ours", "canceled"): {
        "marked": (release(alive(MARKED)), Move(Do.SAVED, NOT_RECEIVED)),
        "hooks are owed": (release(alive(OWING)), Move(Do.SAVED, NOT_RECEIVED, owed=True)),
    },
    ("release", "ours", "otherwise"): {
        name: (ask, Move(Do.SAVED, Put.NOTHING))
        for name, ask in {
            "alive": release(alive(RUNNING)),
            "in a store without leases": release(seen(RUNNING)),
            "late, but not taken over": release(lost(RUNNING)),
        }.items()
    },
    ("release", "anything", ""): {
        name: (ask, Move(Do.GONE))
        for name, ask in {
            "nothing there": release(seen(None)),
            "another run": release(alive(ANOTHERS)),
            "another run, canceled": release(alive(ANOTHERS._replace(found=Found.RUNNING))),
            "ended": release(seen(DONE)),
            "ended as unknown": release(seen(UNKNOWN)),
            "canceled before it came": release(seen(CANCELED)),
        }.items()
    },
    ("cancel", "nothing", ""): {
        "patient": (cancel(seen(None)), Move(Do.TELL, NOT_RECEIVED)),
        "impatient": (cancel(seen(None), patient=False), Move(Do.TELL, NOT_RECEIVED)),
    },
    ("cancel", "canceled", ""): {
        "patient": (cancel(seen(CANCELED)), Move(Do.TELL)),
        "impatient": (cancel(seen(CANCELED), patient=False), Move(Do.TELL)),
    },
    ("cancel", "running", "willing to wait"): {
        "not yet marked": (cancel(alive(RUNNING)), Move(Do.WAIT, MARKED)),
        "in a store without leases": (cancel(seen(RUNNING)), Move(Do.WAIT, MARKED)),
        "marked": (cancel(alive(MARKED)), Move(Do.WAIT)),
        "hooks are owed to another": (cancel(alive(OWING)), Move(Do.WAIT)),
    },
    ("cancel", "running", "otherwise"): {
        "not yet marked": (cancel(alive(RUNNING), patient=False), Move(Do.TELL_LATER, OWING)),
        "marked": (cancel(alive(MARKED), patient=False), Move(Do.TELL_LATER, OWING)),
        "hooks are owed already": (cancel(alive(OWING), patient=False), Move(Do.TELL_LATER)),
    },
    ("cancel", "lost", ""): {
        name: (ask, Move(Do.TELL, END_UNKNOWN_MARKED, if_lost=True))
        for name, ask in {
            "not yet marked": cancel(lost(RUNNING)),
            "marked": cancel(lost(MARKED)),
            "impatient": cancel(lost(RUNNING), patient=False),
            "calls the hooks that another is owed": cancel(lost(OWING)),
        }.items()
    },
    ("cancel", "done", ""): {
        "a response": (cancel(seen(DONE)), Move(Do.TELL, DONE._replace(found=Found.DONE))),
        "impatient": (cancel(seen(DONE), patient=False), Move(Do.TELL, DONE._replace(found=Found.DONE))),
        "too large": (cancel(seen(TOO_LARGE)), Move(Do.TELL, TOO_LARGE._replace(found=Found.DONE))),
        "nobody knows how": (cancel(seen(UNKNOWN)), Move(Do.TELL, UNKNOWN._replace(found=Found.DONE))),
        "marked when it was done": (cancel(seen(MARKED_WHEN_DONE)), Move(Do.TELL)),
        "marked while it ran": (cancel(seen(MARKED_WHILE_IT_RAN)), Move(Do.TELL)),
    },
    ("forget", "nothing", ""): {"nothing there": (forget(seen(None)), Move(Do.GONE))},
    ("forget", "running", ""): {
        name: (ask, Move(Do.REFUSE, code="still_running"))
        for name, ask in {
            "alive": forget(alive(RUNNING)),
            "in a store without leases": forget(seen(RUNNING)),
            "canceled": forget(alive(MARKED)),
        }.items()
    },
    ("forget", "lost", ""): {
        "its owner died": (forget(lost(RUNNING)), Move(Do.SAVED, Put.NOTHING, if_lost=True)),
        "hooks are owed": (forget(lost(OWING)), Move(Do.SAVED, Put.NOTHING, if_lost=True, owed=True)),
    },
    ("forget", "anything", ""): {
        name: (ask, Move(Do.SAVED, Put.NOTHING))
        for name, ask in {
            "done": forget(seen(DONE)),
            "nobody knows how": forget(seen(UNKNOWN)),
            "canceled before it came": forget(seen(CANCELED)),
        }.items()
    },
}


class Case(NamedTuple):
    row: Row
    ask: Ask
    expected: Move


each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(row, ask, expected), id=f"{' | '.join(filter(None, row))}: {name}")
        for row, cases in CASES.items()
        for name, (ask, expected) in cases.items()
    ],
)


@each_case
def test_the_rule_answers(case: Case) -> None:
    assert case.ask() == case.expected


# The table is what a reader of rule.py goes by, so it must say what the cases say


def _table() -> dict[Row, tuple[str, str]]:
    """Each row's put and then columns."""
    lines = str(rule.__doc__).splitlines()
    rulers = next(number for number, line in enumerate(lines) if re.fullmatch(r"\s*-+(\s+-+)+", line))
    starts = [ruler.start() for ruler in re.finditer("-+", lines[rulers])]
    table, event = {}, ""
    for line in lines[rulers + 1 : lines.index("", rulers)]:
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        event = cells[0] or event
        table[event, cells[1], cells[2]] = (cells[3], cells[4])
    return table


TABLE = _table()

_SAID_OF_A_RECORD: dict[str, Callable[[Record], bool]] = {
    "running": lambda record: record.state is State.RUNNING,
    "done": lambda record: record.state is State.DONE,
    "canceled": lambda record: record.state is State.CANCELED,
    "ours": lambda record: record.run == ANOTHER,
    "again": lambda record: record.run == ANOTHER and record.again,
    "lost": lambda record: record.run == "",
    "unknown": lambda record: record.outcome is Outcome.UNKNOWN,
    "not received": lambda record: record.found is Found.NOT_RECEIVED,
    "marked": lambda record: record.found is not None,
    "owed": lambda record: record.owed,
}


def test_the_table_and_the_cases_have_the_same_rows() -> None:
    assert TABLE.keys() == CASES.keys()


@each_case
def test_the_table_says_what_follows(case: Case) -> None:
    assert TABLE[case.row][1] == f"{case.expected.do.name} {case.expected.code}".strip()


@each_case
def test_the_table_says_what_is_put(case: Case) -> None:
    put, move = TABLE[case.row][0], case.expected
    words = put.replace(" (once)", "").split(", ")
    assert move.if_lost == ("if lost" in words)
    assert move.lost == ("lost" in words)
    if isinstance(move.put, Record):
        assert all(_SAID_OF_A_RECORD[word](move.put) for word in words if word != "if lost")
    elif move.put is Put.NOTHING:
        assert words[0] == "nothing"
    else:
        assert put == "" or {"marked", "owed"} & set(words)  # which others have done already
