"""The short form of `python -m tests.chaos`, and proof that its judge finds what it looks for."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.wrappers import Response

from flask_runonce.errors import StoreError, StoreUnavailable
from flask_runonce.stores import open_store
from tests.chaos import __main__ as command
from tests.chaos import client
from tests.chaos.book import Book
from tests.chaos.client import Reply, Service
from tests.chaos.harm import Villain
from tests.chaos.houses import HOUSES, House
from tests.chaos.judge import Judge, Limits
from tests.chaos.run import Report, chaos
from tests.chaos.storm import Asked, Forgotten, Storm, Story
from tests.client.app import serving
from tests.services import until


@contextlib.contextmanager
def memory(folder: Path) -> Iterator[House]:
    """The store of one process, under several."""
    yield House("memory://", {})


@pytest.fixture(scope="module")
def storms() -> Iterator[Mapping[str, Future[Report]]]:
    """All at the same time, because a storm is mostly waiting."""
    with ThreadPoolExecutor() as pool:
        houses = {**HOUSES, "memory": memory}
        yield {name: pool.submit(chaos, house, 2.5, lease=1, seed=1) for name, house in houses.items()}


@pytest.mark.parametrize("store", HOUSES)
def test_no_call_runs_twice_whatever_dies(store: str, storms: Mapping[str, Future[Report]]) -> None:
    report = storms[store].result()
    print(*report.lines, sep="\n")
    assert report.faults == []


def test_calls_that_run_twice_are_found_out(storms: Mapping[str, Future[Report]]) -> None:
    report = storms["memory"].result()
    assert report.run_twice > 0
    assert any("can be explained" in fault for fault in report.faults)


# The judge. Each story is of one call with the ID "call"; a run is (attempt, token).

RAN = ("first", "token")
PLAN = {"seconds": 0.0}


def reply(status: int, /, *, replayed: bool = False, **facts: Any) -> Reply:
    kind = "application/problem+json" if "code" in facts else "application/json"
    retry = "1" if facts.get("code") in ("store_unavailable", "still_running") else None
    return Reply(status, kind, replayed, retry, json.dumps(facts).encode())


def called(answer: Reply | None, attempt: str = "", at: float = 0.0, **facts: Any) -> Asked:
    return Asked(attempt, False, at, at + 1, answer, **facts)


def canceled(answer: Reply | None, at: float = 0.0) -> Asked:
    return Asked("", True, at, at + 1, answer)


LIVE = reply(201, token="token")
REPLAY = reply(201, token="token", replayed=True)
OTHER = reply(201, token="other", replayed=True)
UNKNOWN = reply(500, code="outcome_unknown", replayed=True)
CANCELED = reply(409, code="canceled")
AWAY = reply(503, code="store_unavailable")
BEFORE = reply(200, received=False, state="not_received")


def told(**saved: Any) -> Reply:
    body = base64.b64encode(json.dumps(saved).encode()).decode()
    answer = {"received": True, "state": "done", "status": 201, "body": body}
    return Reply(200, "application/json", False, None, json.dumps(answer).encode())


def faults(folder: Path, asked: list[Asked], *runs: tuple[str, str], hooks: int = 1, **facts: Any) -> list[str]:
    book = Book(folder)
    for attempt, token in runs:
        book.note("effects", call="call", attempt=attempt, token=token)
    for _ in range(hooks):
        book.note("hooks", call="call", state="done")
    for _ in range(facts.pop("lost", 0)):
        book.note("lost", call="call")
    story = Story("call", **{"path": "/run", "plan": PLAN, "forgettable": False, **facts}, asked=asked)
    return Judge(book, Limits(wait=1, cancel=1, store=1)).faults([story])


GOOD: dict[str, tuple[list[Asked], list[tuple[str, str]], dict[str, Any]]] = {
    "answered and replayed": ([called(LIVE, "first"), called(REPLAY, at=2)], [RAN], {}),
    "canceled while the store was away": ([canceled(AWAY), called(LIVE, "first", at=2)], [RAN], {}),
    "answered late to the first caller": ([called(LIVE, "first"), called(UNKNOWN, at=2)], [RAN], {}),
    "refused, then run": ([called(AWAY), called(LIVE, "first", at=2)], [RAN], {}),
    "killed": ([called(None, "first"), called(UNKNOWN, at=2)], [RAN], {}),
    "failed as planned": ([called(reply(500), "first")], [RAN], {"plan": {"seconds": 0, "fails": True}}),
    "canceled before": ([canceled(BEFORE), called(CANCELED, at=2)], [], {}),
    "canceled after": ([called(LIVE, "first"), canceled(told(token="token"), at=2), called(CANCELED, at=4)], [RAN], {}),
    "rerun": ([called(None, "first"), called(OTHER, at=2)], [RAN, ("second", "other")], {"path": "/rerun", "lost": 1}),
    "forgotten": (
        [called(UNKNOWN), called(LIVE, "first", at=4)],
        [RAN, ("lost", "other")],
        {"forgotten": [Forgotten(2, 3)]},
    ),
}

BAD: dict[str, tuple[list[Asked], list[tuple[str, str]], dict[str, Any]]] = {
    "ran 2 times": ([called(LIVE, "first"), called(None, "second")], [RAN, ("second", "other")], {}),
    "ran 2 times, where 1": ([called(None)], [RAN, ("second", "other")], {"path": "/rerun"}),
    "ran 3 times": ([called(None)], [RAN, RAN, RAN], {"forgotten": [Forgotten(2, 3)]}),
    "2 results": (
        [called(LIVE, "first"), called(OTHER)],
        [RAN, ("second", "other")],
        {"forgotten": [Forgotten(-2, -1)]},
    ),
    "a result that no run had": ([called(OTHER)], [RAN], {}),
    "as if it had run": ([called(LIVE, "second")], [RAN], {}),
    "ran, and was answered from the record": ([called(REPLAY, "first")], [RAN], {}),
    "was refused, and ran": ([called(AWAY, "first")], [RAN], {}),
    "canceled by nobody": ([called(CANCELED)], [], {}),
    "does not name here": ([called(reply(409, code="input_mismatch"))], [], {}),
    "contract does not name:": ([called(reply(500), "first")], [RAN], {}),
    "cancel got a problem": ([canceled(reply(500, code="cancel_failed"))], [], {}),
    "cancel got an answer": ([canceled(reply(404))], [], {}),
    "of a status that no run had": ([canceled(reply(200, received=True, state="done", status=404))], [RAN], {}),
    "no answer for good after the storm: [audit , 0.00 to 1.00: nothing]": ([called(None, audit=True)], [], {}),
    "no hook was called": ([canceled(BEFORE)], [], {"hooks": 0}),
    "canceled before it started, and has run": ([canceled(BEFORE), called(LIVE, "first")], [RAN], {}),
    "told of a result that no run had": ([called(LIVE, "first"), canceled(told(token="other"))], [RAN], {}),
    "after [call": ([called(UNKNOWN), called(REPLAY, at=2)], [RAN], {}),
    "was answered [call": ([called(REPLAY), called(UNKNOWN, at=2)], [RAN], {}),
    "after [cancel": ([canceled(told(token="token")), called(REPLAY, at=2)], [RAN], {}),
    "longer than for its run": ([called(None)._replace(over=2.5)], [], {}),
    "s longer than for": ([called(None, late=True)], [], {}),
    "no answer for good": ([called(AWAY, audit=True)], [], {}),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_story_has_no_fault(name: str, tmp_path: Path) -> None:
    asked, runs, facts = GOOD[name]
    assert faults(tmp_path, asked, *runs, **facts) == []


@pytest.mark.parametrize("fault", BAD)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    asked, runs, facts = BAD[fault]
    assert fault in "\n".join(faults(tmp_path, asked, *runs, **facts))


def test_a_frozen_worker_excuses_who_waited_for_it(tmp_path: Path) -> None:
    story = Story("call", "/run", PLAN, False, asked=[called(None)._replace(over=5.0)])
    assert Judge(Book(tmp_path), Limits(1, 1, 1)).faults([story])
    assert Judge(Book(tmp_path), Limits(1, 1, 1, frozen=[(1.0, 4.5)])).faults([story]) == []


def test_a_run_that_nobody_sent_is_found(tmp_path: Path) -> None:
    Book(tmp_path).note("effects", call="another", attempt="", token="")
    assert "nobody sent it" in Judge(Book(tmp_path), Limits(1, 1, 1)).faults([])[0]


# The storm, and who does the harm.


class Answers:
    """A service that gives, or raises, the next of `answers` to whoever asks; the last one for ever."""

    def __init__(self, *answers: Reply | BaseException) -> None:
        self._answers = list(answers)

    def call(self, *_: Any) -> Reply:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    cancel = call

    def hang_up(self, *_: Any, **__: Any) -> None:
        raise ConnectionRefusedError


class Away:
    """A runner whose store is away."""

    def forget(self, *_: Any) -> Any:
        raise StoreUnavailable("away")


def storm_of(*answers: Reply | BaseException, clients: int = 1) -> Storm:
    return Storm(Answers(*answers), Away(), lease=0.01, seed=1, clients=clients)  # type: ignore[arg-type]


def test_a_call_is_asked_for_until_it_is_answered_for_good() -> None:
    storm = storm_of(TimeoutError(), ConnectionResetError(), AWAY, reply(409, code="still_running"), CANCELED)
    storm.stories = [Story("call", "/run", PLAN, False)]
    storm.audit()
    asked = storm.stories[0].asked
    assert [each.reply and each.reply.code for each in asked] == [
        *(None, None, "store_unavailable", "still_running", "canceled")
    ]
    assert [each.late for each in asked] == [True, False, False, False, False]


def test_a_client_that_fails_ends_the_storm() -> None:
    with pytest.raises(LookupError):
        storm_of(LookupError(), clients=3).blow(3600)


def test_a_forget_whose_answer_is_lost_may_have_been_granted() -> None:
    storm = storm_of(UNKNOWN)
    storm.blow(0.3)
    assert {len(story.forgotten) for story in storm.stories if not story.forgettable} <= {0}
    assert any(len(story.forgotten) == 2 for story in storm.stories)


def test_an_answer_that_comes_too_late_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 161.0])
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with serving(Response("late")) as (_, port), pytest.raises(TimeoutError):
        Service(port, patience=60).show("call")


def test_a_body_that_is_no_json() -> None:
    answer = Reply(200, "text/html", False, None, b"<p>")
    assert (answer.json, answer.code, answer.saved) == (None, "", None)


def test_what_fails_a_villain_is_told() -> None:
    def harm(rng: random.Random, pause: Any) -> None:
        raise LookupError

    with Villain({"harm": harm}, rest=0.0, pace=1.0, seed=1) as villain:
        until(lambda: villain.failure, "the villain does not fail")
    assert isinstance(villain.failure, LookupError) and not villain.done


@pytest.mark.parametrize("house", ["sqlite", "redis"])
def test_each_harm_is_undone(house: str, tmp_path: Path) -> None:
    with HOUSES[house](tmp_path) as place, contextlib.closing(open_store(place.uri)) as store:

        def works() -> bool:
            with contextlib.suppress(StoreError):
                return store.list().total == 0
            return False

        until(works, "the store does not work")
        for name, harm in place.harms.items():
            harm(random.Random(1), lambda leases: None)
            until(works, f"the store does not work after {name}")


# The command.


@pytest.mark.parametrize("faults", [[], ["ran 2 times"]])
def test_the_command_says_what_was_wrong(
    faults: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.WARNING, "flask_runonce")  # what the command sets is undone with this
    asked = []

    def storm(house: Any, seconds: float, *, lease: float, seed: int) -> Report:
        asked.append((house, seconds, seed))
        return Report(["  calls 7"], faults, 0)

    monkeypatch.setattr(command, "chaos", storm)
    monkeypatch.setattr(
        sys, "argv", ["chaos", "--seconds", "5", "--seed", "3", "--store", "redis", "--store", "sqlite"]
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert command.main() == bool(faults)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [(HOUSES["redis"], 5, 3), (HOUSES["sqlite"], 5, 3)]
    printed = capsys.readouterr().out
    assert "redis, 5 s, seed 3\n  calls 7\n" in printed
    assert printed.count("WRONG: ran 2 times") == 2 * len(faults)
