"""The short form of `python -m tests.chaos`, and proof that its judge finds what it looks for."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.book import Book
from tests.chaos.client import Reply
from tests.chaos.houses import HOUSES, House
from tests.chaos.judge import Judge, Limits
from tests.chaos.run import Report, chaos
from tests.chaos.storm import Asked, Forgotten, Story


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


def reply(status: int, *, replayed: bool = False, **facts: Any) -> Reply:
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
