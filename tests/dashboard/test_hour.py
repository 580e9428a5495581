"""The memory of the last hour, and what is drawn and told from it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from flask import Flask

from flask_runonce import CallKey, signals
from flask_runonce.contrib.dashboard import hour, life, pictures, words
from flask_runonce.contrib.dashboard.hour import Event, LastHour, Life
from flask_runonce.contrib.dashboard.life import Wait
from flask_runonce.record import Found, Outcome, Record, Seen, State
from flask_runonce.testing import Clock
from flask_runonce.testing.store_contract import in_child

KEY = CallKey("", "chat-1", "call-1")
RECORD = Record(KEY, State.DONE, "run", "web-1:7", outcome=Outcome.UNKNOWN, created_at=1000.0, finished_at=1002.0)
NOW = 1100.0


class Told:
    """An app whose signals a test sends, and what is remembered of them."""

    def __init__(self) -> None:
        self.app = Flask("app")
        self.clock = Clock()
        self.clock.advance(10_000)
        self.hour = LastHour(self.app, clock=self.clock)

    def tell(self, name: str, key: CallKey | None = KEY, **facts: Any) -> None:
        getattr(signals, name).send(self.app, key=key, **facts)

    def finished(self, key: CallKey = KEY, status: int = 200, seconds: float = 1.0) -> None:
        self.tell("call_started", key)
        self.tell("call_finished", key, status=status, seconds=seconds)


@pytest.fixture
def told() -> Told:
    return Told()


def key(number: int) -> CallKey:
    return KEY._replace(tool_call_id=f"call-{number}")


def outcome(told: Told) -> str:
    (one,) = told.hour.lives()
    return one.outcome


CANCELED = {"state": "running", "pending": False}
FINISHED = {"status": 200, "seconds": 1.0}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("started", {})], "running"),
        ([("started", {}), ("finished", FINISHED)], "answered"),
        ([("started", {}), ("finished", {**FINISHED, "status": 400})], "error"),
        ([("started", {}), ("released", {})], "released"),
        ([("started", {}), ("lost", {"owner": "web-1:7"})], "error"),
        ([("started", {}), ("finished", FINISHED), ("canceled", CANCELED)], "canceled"),
        ([("started", {}), ("canceled", {**CANCELED, "pending": True}), ("finished", FINISHED)], "canceled"),
        ([("started", {}), ("finished", FINISHED), ("canceled", {**CANCELED, "state": "done"})], "answered"),
        ([("canceled", {**CANCELED, "state": "not_received"})], "canceled"),
        ([("canceled", {**CANCELED, "state": "not_received"}), ("started", {})], "running"),
        ([("replayed", FINISHED)], ""),
        ([("refused", {"code": "store_unavailable", "status": 503})], ""),
    ],
)
def test_the_outcome_of_a_call(told: Told, events: list[tuple[str, dict[str, Any]]], expected: str) -> None:
    for name, facts in events:
        told.tell(f"call_{name}", **facts)
    assert outcome(told) == expected


def test_only_its_own_app_is_heard(told: Told) -> None:
    signals.call_started.send(Flask("another"), key=KEY)
    told.tell("call_refused", None, code="key_required", status=400)
    assert told.hour.lives() == []


def test_a_fact_that_it_does_not_know_is_no_error(told: Told) -> None:
    told.tell("call_finished", **FINISHED, weather="fine")
    assert outcome(told) == "answered"


def test_calls_are_forgotten_after_an_hour(told: Told) -> None:
    told.finished(key(1))
    told.clock.advance(1800)
    told.finished(key(2))
    told.clock.advance(1801)
    assert [one.first for one in told.hour.lives()] == [11800.0]
    assert told.hour.began == 10_001.0
    told.finished(key(3))
    assert told.hour.of(key(1)) == (0, ())
    assert len(told.hour.of(key(2))[1]) == 2


def test_the_newest_calls_are_remembered(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hour, "MAX_CALLS", 3)
    for number in range(5):
        told.clock.advance(1)
        told.finished(key(number))
    assert [len(told.hour.of(key(number))[1]) for number in range(5)] == [0, 0, 2, 2, 2]
    assert told.hour.began == 10_002.0  # what came before has been pushed out
    told.clock.advance(1)
    told.tell("call_replayed", key(2), status=200, seconds=0.0)
    told.finished(key(5))
    assert [len(told.hour.of(key(number))[1]) for number in range(2, 6)] == [3, 0, 2, 2]


def test_a_storm_fills_no_memory_and_is_counted(told: Told) -> None:
    told.finished()
    for _ in range(1000):
        told.tell("call_replayed", status=200, seconds=0.5)
    answered, events = told.hour.of(KEY)
    assert (answered, len(events)) == (1000, hour.MAX_EVENTS_OF_ONE)
    (one,) = told.hour.lives()
    assert (one.waited, one.ran) == (0.5, 1.0)


def test_storms_of_many_calls_fill_no_memory_either(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hour, "MAX_EVENTS", 25)
    for number in range(4):
        told.clock.advance(1)
        for _ in range(10):
            told.tell("call_replayed", key(number), status=200, seconds=0.5)
    assert [len(told.hour.of(key(number))[1]) for number in range(4)] == [0, 0, 10, 10]


def test_each_event_pushes_out_a_few_old_calls(told: Told) -> None:
    for number in range(10):
        told.finished(key(number))
    told.clock.advance(3601)
    left = []
    for _ in range(4):
        told.tell("call_replayed", key(10), status=200, seconds=0.0)
        left.append(sum(bool(told.hour.of(key(number))[1]) for number in range(10)))
    assert left == [6, 2, 0, 0]


def test_only_refusals_of_repeats_are_counted_as_answered(told: Told) -> None:
    told.tell("call_started")
    for code in ("still_running", "input_mismatch", "store_unavailable", "incomplete_body"):
        told.tell("call_refused", code=code, status=409)
    assert told.hour.of(KEY)[0] == 2


def test_a_new_record_of_an_old_id_counts_afresh(told: Told) -> None:
    told.finished()
    told.tell("call_replayed", status=200, seconds=0.0)
    told.tell("call_started")  # it was forgotten meanwhile
    assert told.hour.of(KEY)[0] == 0
    told.tell("call_refused", code="still_running", status=409)
    told.tell("call_lost", owner="web-1:7")
    told.tell("call_started")  # on_lost="rerun" keeps the record's count
    assert told.hour.of(KEY)[0] == 1


def test_many_threads_may_tell(told: Told) -> None:
    def work(number: int) -> None:
        for _ in range(300):
            told.tell("call_replayed", key(number % 2), status=200, seconds=0.0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [told.hour.of(key(number))[0] for number in range(2)] == [1200, 1200]


def test_a_child_remembers_nothing_of_its_parents(told: Told) -> None:
    told.finished()
    assert in_child(lambda: f"{len(told.hour.lives())} lives") == "0 lives"
    assert told.hour.lives()


# The pictures


def lives(*facts: tuple[float, str]) -> list[Life]:
    return [Life(first, outcome=outcome) for first, outcome in facts]


def test_a_bar_is_as_tall_as_its_count() -> None:
    drawn = pictures.outcomes(
        lives(
            (7001, "answered"), (7001, "answered"), (7199, "error"), (3700, "canceled"), (100, "answered"), (7001, "")
        ),
        7200.0,
        width=120,
        height=100,
    )
    assert [(bar.outcome, bar.calls, bar.y, bar.height) for bar in drawn.bars] == [
        ("canceled", 1, 75.0, 25.0),
        ("answered", 2, 50.0, 50.0),
        ("error", 1, 25.0, 25.0),
    ]
    assert drawn.totals == {"answered": 2, "error": 1, "canceled": 1, "released": 0, "running": 0}


@pytest.mark.parametrize(("count", "top"), [(0, 2), (1, 2), (3, 4), (9, 10), (10, 10), (27, 30), (99, 100), (101, 200)])
def test_an_axis_ends_at_a_round_number(count: int, top: int) -> None:
    drawn = pictures.outcomes(lives(*[(7000.0, "answered")] * count), 7200.0, width=1, height=100)
    assert [tick.text for tick in drawn.ticks] == ["0", str(top // 2), str(top)]


def test_an_hour_is_twelve_bars_and_the_one_that_goes_on() -> None:
    drawn = pictures.outcomes([], 7200.0 + 299, width=13, height=1)
    assert len(drawn.rows) == 13 and drawn.rows[0].start == "01:00" and drawn.rows[-1].end == "02:05"
    assert [tick.text for tick in drawn.hours] == ["01:00", "01:15", "01:30", "01:45", "02:00"]


@pytest.mark.parametrize(("ran", "x"), [(0.0, 0.0), (0.001, 0.0), (1.0, 300.0), (1000.0, 600.0), (10_000.0, 600.0)])
def test_a_point_stands_at_its_times(ran: float, x: float) -> None:
    alone, waited_for = Life(0.0, ran=ran), Life(0.0, ran=ran, waited=1.0)
    drawn = pictures.times([alone, waited_for, Life(0.0)], width=600, height=240, floor=262)
    assert drawn.points == [(x, 262, False), (x, 120.0, True)]


def test_calls_of_all_run_times_are_in_the_table() -> None:
    ran = [0.0, 0.0099, 0.01, 0.5, 1.0, 9.9, 10.0, 5000.0]
    drawn = pictures.times([Life(0.0, ran=seconds, waited=seconds) for seconds in ran], width=1, height=1, floor=1)
    assert [(row.text, row.calls) for row in drawn.classes] == [
        ("under 10 ms", 2),
        ("10 ms to 100 ms", 1),
        ("100 ms to 1 s", 1),
        ("1 s to 10 s", 2),
        ("10 s and more", 2),
    ]
    assert drawn.classes[-1].longest == "1 h 23 min"


def test_the_newest_thousand_are_drawn() -> None:
    drawn = pictures.times([Life(0.0, ran=1.0)] * 1200, width=1, height=1, floor=1)
    assert (len(drawn.points), drawn.left_out, sum(row.calls for row in drawn.classes)) == (1000, 200, 1200)


def test_a_run_and_those_who_waited() -> None:
    drawn = pictures.run(100.0, 110.0, [Wait(102.0, 110.0), Wait(99.9, 110.0), Wait(120.0, 120.5)], width=100)
    assert drawn.width == 100.0
    assert [(line.x, line.width) for line in drawn.lines] == [(20.0, 80.0), (0.0, 100.0)]
    assert [(tick.at, tick.text) for tick in drawn.ticks][:3] == [(0.0, "0"), (20.0, "2.0 s"), (40.0, "4.0 s")]


def test_a_crowd_is_drawn_in_part() -> None:
    drawn = pictures.run(100.0, 100.0, [Wait(100.0, 101.0)] * 50, width=100)
    assert (len(drawn.lines), drawn.left_out) == (pictures.MAX_WAITS, 10)


@pytest.mark.parametrize("span", [0.0, 0.0013, 0.07, 0.99, 1.0, 3.0, 24.3, 600.0, 7200.0])
def test_an_axis_of_time_has_a_few_round_marks(span: float) -> None:
    ticks = pictures.run(100.0, 100.0 + span, [], width=100).ticks
    assert 2 <= len(ticks) <= 6 and all(0 <= tick.at <= 100 for tick in ticks)


# The life


def steps(seen: Seen, *events: Event, answered: int = 0, waiting: int = 0) -> list[tuple[str, float | None, bool]]:
    told = life.steps(seen, events, answered=answered, waiting=waiting, now=NOW)
    return [(step.text, step.at, step.by) for step in told]


def test_the_times_of_another_clock_are_set_right() -> None:
    """The store's clock is 40 s behind this host's."""
    seen = Seen(RECORD, "v", NOW - 40, repeats=1)
    event = Event("replayed", 1042.5, status=500, seconds=1.5)
    told = steps(seen, event, answered=1)
    assert told[1] == ("1 repeat got the saved response (500) after waiting for the run, 1.5 s", 1001.0, False)


def test_repeats_in_a_row_are_told_together() -> None:
    events = [Event("replayed", 1002.1, status=200, seconds=seconds) for seconds in (2.0, 0.5, 1.0)]
    refused = [Event("refused", 1050.0, code="input_mismatch"), Event("refused", 1051.0, code="a_code_of_tomorrow")]
    later = [Event("replayed", at, status=200) for at in (1060.0, 1070.0)]
    told = steps(Seen(RECORD, "v", NOW, repeats=9), *events, *refused, *later, answered=6)
    assert [text for text, *_ in told] == [
        "First request; its run began in web-1:7",
        "3 repeats got the saved response (200) after waiting for the run, up to 2.0 s",
        "The run ended after 2.0 s, and nobody knows how: outcome unknown",
        "1 request refused: input_mismatch (409)",
        "1 request refused: a_code_of_tomorrow",
        "2 repeats got the saved response (200) at once",
        "3 repeats of which this process was not told: to others, before it started, or too long ago",
    ]


def test_a_cancel_that_stopped_a_run_came_by_its_end() -> None:
    seen = Seen(RECORD._replace(found=Found.RUNNING), "v", NOW)
    told = steps(seen, Event("canceled", 1002.1, state="running"))
    assert told[1] == ("Canceled while it ran", 1002.0, True)
    assert told[2][0].startswith("The run ended")


def test_a_cancel_of_an_earlier_record_is_not_taken_for_this_ones() -> None:
    seen = Seen(RECORD._replace(found=Found.RUNNING), "v", NOW)
    told = steps(seen, Event("canceled", 500.0, state="running"))
    assert ("Canceled while it ran; this process was not told when", 1002.0, True) in told


def test_a_lost_owner_is_told() -> None:
    running = RECORD._replace(state=State.RUNNING, outcome=None, finished_at=None)
    told = steps(Seen(running, "v", NOW, lease_until=1070.0))
    assert told[-1][0].startswith("Its owner has not been heard of since 30 s: the outcome is unknown as soon as")


def test_what_came_under_an_earlier_record_is_told_first() -> None:
    earlier = [Event("started", 500.0), Event("finished", 501.0, status=200), Event("lost", 700.0)]
    told = steps(Seen(RECORD, "v", NOW), *earlier, Event("started", 1000.0), Event("finished", 1002.0, status=200))
    assert [text for text, *_ in told][:3] == [
        "An earlier run of this ID began",
        "An earlier run of this ID ended",
        "The owner of the run was found lost",
    ]
    assert len(told) == 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "<1 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3599, "59 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_a_duration_in_words(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0 s"), (61, "1 min"), (3600, "1 h 0 min")])
def test_an_age_in_words(seconds: float, text: str) -> None:
    assert words.age(seconds) == text
