"""The promise holds in every interleaving, and a rule that is a little wrong is found out.

`tests/interleave.py` explores them, `tests/judge.py` says what is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from sqlalchemy import create_engine, text

from flask_runonce import rule, runner
from flask_runonce.call import Call
from flask_runonce.keeper import Keeper
from flask_runonce.problems import Answer
from flask_runonce.record import CallKey, Claim, Found, Outcome, Record, SavedResponse, Seen, State
from flask_runonce.rule import Do, Move, Put
from flask_runonce.runner import Runner
from flask_runonce.stores import MemoryStore, RedisStore, SQLStore, Store
from tests.interleave import (
    KEY,
    LEASE,
    SETTINGS,
    Actor,
    Choice,
    Explored,
    Scenario,
    Stage,
    cancel,
    explore,
    forget,
    jump,
    keeper,
    playing,
    request,
    world,
)
from tests.services import PostgresServer, RedisServer

LEASE_ENDS = jump(LEASE + 1)
NO_PLACES = dataclasses.replace(SETTINGS, max_waiting=0)
IMPATIENT = dataclasses.replace(SETTINGS, wait_timeout=10, cancel_timeout=10)
IMPATIENT_CANCEL = dataclasses.replace(SETTINGS, cancel_timeout=10)
SHORT_MEMORY = dataclasses.replace(SETTINGS, forget_after=14)


def scenario(*actors: Actor, starts: int = 1, **options: Any) -> tuple[Scenario, int]:
    """A scenario, and how many handlers may start in it at most. In some schedule, as many do."""
    return Scenario(actors, **options), starts


SCENARIOS = {
    # Nothing goes wrong.
    "two requests and a cancel": scenario(request("A"), request("B"), cancel("C")),
    "three requests and a cancel": scenario(request("A"), request("B"), request("C"), cancel("D")),
    "a request and two cancels": scenario(request("A"), cancel("B"), cancel("C"), LEASE_ENDS),
    "another input, a large response and a cancel": scenario(
        request("A", "too large"), request("B", input="another"), request("C"), cancel("D")
    ),
    "a handler that fails": scenario(request("A", "fails"), request("B"), cancel("C"), LEASE_ENDS),
    "all in one process": scenario(
        request("A", process="P"), request("B", process="P"), cancel("C", process="P"), keeper("P")
    ),
    # Somebody gives up waiting.
    "no place to wait": scenario(request("A"), request("B"), cancel("C"), settings=NO_PLACES),
    "no time to wait": scenario(request("A"), request("B"), cancel("C"), jump(11), settings=IMPATIENT),
    "hooks owed twice": scenario(request("A"), cancel("B"), cancel("C"), jump(11), settings=IMPATIENT),
    "hooks owed for a release": scenario(
        request("A", "releases"), request("B"), cancel("C"), starts=2, settings=NO_PLACES
    ),
    "hooks owed by a lost owner": scenario(
        request("A"), request("B"), cancel("C"), LEASE_ENDS, keeper("A"), settings=IMPATIENT_CANCEL
    ),
    # An owner releases.
    "a release, two repeats and a cancel": scenario(
        request("A", "releases"), request("B"), request("C"), cancel("D"), starts=2
    ),
    "a release after the lease's end": scenario(
        request("A", "releases"), request("B"), cancel("C"), LEASE_ENDS, starts=2
    ),
    # An owner is lost, or nearly.
    "a lease's end, a renewal and a cancel": scenario(request("A"), request("B"), cancel("C"), LEASE_ENDS, keeper("A")),
    "a lease's end twice, and two renewals": scenario(request("A"), request("B"), jump(20, 20), keeper("A", 2)),
    "a rerun, a renewal and a cancel": scenario(
        request("A", rerun=True), request("B", rerun=True), cancel("C"), LEASE_ENDS, keeper("A"), starts=2
    ),
    "two that would rerun": scenario(
        request("A", rerun=True), request("B", rerun=True), request("C", rerun=True), LEASE_ENDS, starts=2
    ),
    "a rerun and a refusal": scenario(request("A"), request("B", rerun=True), request("C"), LEASE_ENDS, starts=2),
    "a rerun that releases": scenario(
        request("A", rerun=True), request("B", "releases", rerun=True), cancel("C"), LEASE_ENDS, starts=2
    ),
    "an owner's death": scenario(request("A", mortal=True), request("B"), request("C")),
    "an owner's death and a cancel": scenario(request("A", mortal=True), request("B"), cancel("C"), jump(20)),
    "an owner's death and a rerun": scenario(
        request("A", mortal=True), request("B", rerun=True), request("C", rerun=True), jump(20), starts=2
    ),
    "an owner's death with hooks owed": scenario(
        request("A", mortal=True), request("B"), cancel("C"), settings=IMPATIENT_CANCEL
    ),
    # Somebody forgets, or the store does.
    "a forget, a renewal and a late finish": scenario(
        request("A"), request("B"), forget("F"), LEASE_ENDS, keeper("A"), starts=2
    ),
    "a forget and a late finish": scenario(request("A"), request("B"), forget("F"), LEASE_ENDS, starts=2),
    "a forget and a cancel": scenario(request("A"), request("B"), cancel("C"), forget("F"), LEASE_ENDS, starts=2),
    "a forget with hooks owed": scenario(request("A"), cancel("C"), forget("F"), LEASE_ENDS, settings=NO_PLACES),
    "a record that expires": scenario(
        request("A"), request("B"), cancel("C"), jump(50), starts=2, settings=SHORT_MEMORY
    ),
    # The store fails.
    "an owner whose store fails": scenario(request("A", faults=1), request("B"), cancel("C"), keeper("A")),
    "an owner whose store fails twice": scenario(request("A", faults=2), request("B"), keeper("A")),
    "an owner whose store fails until the lease ends": scenario(
        request("A", faults=1), request("B"), LEASE_ENDS, keeper("A", faults=1)
    ),
    "a releasing owner whose store fails": scenario(
        request("A", "releases", faults=1), request("B"), cancel("C"), keeper("A"), starts=2
    ),
    "a repeat whose store fails": scenario(request("A"), request("B", faults=1), cancel("C"), keeper("B")),
    "a rerun whose store fails": scenario(
        request("A", rerun=True), request("B", rerun=True, faults=1), cancel("C"), LEASE_ENDS, keeper("B"), starts=2
    ),
    "a cancel whose store fails": scenario(request("A"), request("B"), cancel("C", faults=1), LEASE_ENDS),
    "a forget whose store fails": scenario(request("A"), request("B"), forget("F", faults=1), LEASE_ENDS, starts=2),
    "a renewal that fails": scenario(request("A"), request("B"), jump(20, 20), keeper("A", 2, faults=1)),
    "hooks owed by an owner whose store fails": scenario(
        request("A", faults=1), request("B"), cancel("C"), keeper("A"), settings=NO_PLACES
    ),
    "hooks owed by a releasing owner whose store fails": scenario(
        request("A", "releases", faults=1), cancel("C"), keeper("A"), settings=NO_PLACES
    ),
}


@functools.cache
def explored(name: str) -> Explored:
    return explore(SCENARIOS[name][0])


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_promise_holds_in_every_interleaving(name: str) -> None:
    assert explored(name).starts == SCENARIOS[name][1]


def test_everything_that_can_be_answered_is_answered_somewhere(capsys: pytest.CaptureFixture[str]) -> None:
    every = [explored(name) for name in SCENARIOS]
    with capsys.disabled():
        schedules, states = sum(one.schedules for one in every), sum(one.states for one in every)
        print(f"\n{schedules:,} interleavings of {len(every)} scenarios, {states:,} states")
    assert frozenset().union(*(one.answers for one in every)) == {
        # Requests.
        ("201", ""),
        ("500", ""),
        ("409", "canceled"),
        ("409", "still_running"),
        ("409", "input_mismatch"),
        ("409", "response_too_large"),
        ("503", "store_unavailable"),
        ("503", "store_full"),
        # Cancels.
        ("", Found.NOT_RECEIVED),
        ("202", Found.RUNNING),
        ("201", Found.RUNNING),
        ("201", Found.DONE),
        ("500", Found.RUNNING),
        ("500", Found.DONE),
        # Forgets.
        Do.SAVED,
        Do.REFUSE,
        Do.GONE,
    }


@pytest.mark.parametrize(
    "actors",
    [
        (request("A", faults=1), request("B"), LEASE_ENDS, keeper("A")),
        (request("A", mortal=True), request("B", rerun=True), cancel("C")),
        (request("A", "releases"), cancel("C"), forget("F", faults=1), LEASE_ENDS),
    ],
)
def test_schedules_that_are_counted_are_those_that_there_are(
    actors: Sequence[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = explore(Scenario(actors))
    monkeypatch.setattr(Stage, "state", lambda stage: object())  # no two are the same, so each is played
    played = explore(Scenario(actors))
    assert len(played.ends) == played.schedules == counted.schedules
    assert played.starts == counted.starts
    assert played.answers == counted.answers


# Mutants: each is a small mistake, and is found out.

BEGIN, FINISH, RELEASE, CANCEL, FORGET = rule.begin, rule.finish, rule.release, rule.cancel, rule.forget
RUNNER_BEGIN = Runner.begin


def finish_of_anything(seen: Seen, run: str, outcome: Outcome, response: SavedResponse | None = None) -> Move:
    move = FINISH(seen, run, outcome, response)
    return Move(Do.SAVED, rule._end(seen.record, outcome, response)) if move.do is Do.GONE and seen.record else move


def finish_without_mark(seen: Seen, run: str, outcome: Outcome, response: SavedResponse | None = None) -> Move:
    move = FINISH(seen, run, outcome, response)
    return move._replace(put=move.put._replace(found=None)) if isinstance(move.put, Record) else move


def begin_at_any_time(seen: Seen, request: rule.Request) -> Move:
    return BEGIN(seen, request)._replace(if_lost=False)


def begin_after_lost(seen: Seen, request: rule.Request) -> Move:
    return Move(Do.RUN, rule._claim(request), if_lost=True) if seen.lost else BEGIN(seen, request)


def begin_after_canceled(seen: Seen, request: rule.Request) -> Move:
    canceled = seen.record and seen.record.state is State.CANCELED
    return Move(Do.RUN, rule._claim(request)) if canceled else BEGIN(seen, request)


def begin_after_unknown(seen: Seen, request: rule.Request) -> Move:
    unknown = seen.record and seen.record.outcome is Outcome.UNKNOWN and not seen.record.found
    return Move(Do.RUN, rule._claim(request)) if unknown else BEGIN(seen, request)


def begin_rerun_of_canceled(seen: Seen, request: rule.Request) -> Move:
    again = request.rerun and seen.lost
    return Move(Do.RUN, rule._claim(request), if_lost=True) if again else BEGIN(seen, request)


def begin_without_patience(seen: Seen, request: rule.Request) -> Move:
    return BEGIN(seen, request._replace(waited_for=None))


def begin_for_any_input(seen: Seen, request: rule.Request) -> Move:
    return BEGIN(seen, request._replace(fingerprint=None))


def begin_waiting_for_ever(seen: Seen, request: rule.Request) -> Move:
    return Move(Do.WAIT) if seen.lost else BEGIN(seen, request)


def release_of_canceled(seen: Seen, run: str) -> Move:
    move = RELEASE(seen, run)
    return Move(Do.SAVED, Put.NOTHING) if move.do is Do.SAVED else move


def release_of_anything(seen: Seen, run: str) -> Move:
    move = RELEASE(seen, run)
    return Move(Do.SAVED, Put.NOTHING) if seen.record and move.do is Do.GONE else move


def cancel_at_any_time(seen: Seen, key: CallKey, *, patient: bool) -> Move:
    return CANCEL(seen, key, patient=patient)._replace(if_lost=False)


def cancel_of_what_is_now(seen: Seen, key: CallKey, *, patient: bool) -> Move:
    if seen.record and seen.record.state is State.DONE and seen.record.found is not Found.DONE:
        return Move(Do.TELL, seen.record._replace(found=Found.DONE))
    return CANCEL(seen, key, patient=patient)


def cancel_that_owes_nothing(seen: Seen, key: CallKey, *, patient: bool) -> Move:
    move = CANCEL(seen, key, patient=patient)
    return move._replace(put=move.put._replace(owed=False)) if isinstance(move.put, Record) else move


def forget_at_any_time(seen: Seen) -> Move:
    return Move(Do.SAVED, Put.NOTHING) if seen.record else FORGET(seen)


def begin_unprotected(self: Runner, key: CallKey, fingerprint: str | None, *, rerun: bool = False) -> Call | Answer:
    admitted = RUNNER_BEGIN(self, key, fingerprint, rerun=rerun)
    if isinstance(admitted, Answer) and admitted.code == "store_unavailable":
        return Call(Claim(Record(key, State.RUNNING, "a run"), "a version"))
    return admitted


def count_of_the_key(stage: Stage) -> str:
    """It begins again where nothing is: a version that is no random token."""
    return str(int(stage.store.read(stage.key).version or 0) + 1)


def count_of_the_process(stage: Stage) -> str:
    stage.playing.tokens += 1
    return str(stage.playing.tokens)


MUTANTS: dict[str, tuple[object, str, object, str]] = {
    "a finish that does not check its claim": (rule, "finish", finish_of_anything, "a forget and a late finish"),
    "a finish that loses the cancel's mark": (rule, "finish", finish_without_mark, "two requests and a cancel"),
    "a takeover without if_lost": (rule, "begin", begin_at_any_time, "a lease's end, a renewal and a cancel"),
    "a rerun without if_lost": (rule, "begin", begin_at_any_time, "a rerun, a renewal and a cancel"),
    "a cancel without if_lost": (rule, "cancel", cancel_at_any_time, "a lease's end, a renewal and a cancel"),
    "a version that is a count": (Stage, "new_version", count_of_the_key, "a forget and a late finish"),
    "a run token that is a count": (Stage, "new_run", count_of_the_process, "a forget and a late finish"),
    "a begin that takes lost for nothing": (rule, "begin", begin_after_lost, "a handler that fails"),
    "a begin that takes canceled for nothing": (rule, "begin", begin_after_canceled, "two requests and a cancel"),
    "a begin that runs what is unknown": (rule, "begin", begin_after_unknown, "a handler that fails"),
    "a rerun of a canceled call": (rule, "begin", begin_rerun_of_canceled, "a rerun, a renewal and a cancel"),
    "a cancel that refuses who waited": (rule, "begin", begin_without_patience, "two requests and a cancel"),
    "a begin that does not compare inputs": (
        rule,
        "begin",
        begin_for_any_input,
        "another input, a large response and a cancel",
    ),
    "a begin that waits for who is lost": (rule, "begin", begin_waiting_for_ever, "an owner's death"),
    "a release that drops a canceled call": (
        rule,
        "release",
        release_of_canceled,
        "a release, two repeats and a cancel",
    ),
    "a release that does not check its claim": (
        rule,
        "release",
        release_of_anything,
        "a release after the lease's end",
    ),
    "a cancel that says what it finds itself": (rule, "cancel", cancel_of_what_is_now, "a request and two cancels"),
    "a cancel that gives up and owes nothing": (rule, "cancel", cancel_that_owes_nothing, "no place to wait"),
    "a forget of what runs": (rule, "forget", forget_at_any_time, "a forget and a cancel"),
    "hooks that are not called": (Runner, "_pay", lambda *_: None, "no place to wait"),
    "a store that fails and is passed over": (Runner, "begin", begin_unprotected, "an owner whose store fails"),
    "a claim whose lost reply burns the call": (Runner, "_give_back", lambda *_: None, "an owner whose store fails"),
    "an end that is saved once or never": (Keeper, "again", lambda *_: None, "an owner whose store fails"),
    "a cancel that the handler cannot see": (
        Call,
        "tell_canceled",
        lambda _: None,
        "a lease's end, a renewal and a cancel",
    ),
    "a waiter that sleeps past the lease": (runner, "_LEASE_MARGIN", 60, "an owner's death"),
    "a waiter with no limit": (runner._Waits, "may_go_on", lambda _: True, "no time to wait"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, mutant, where = MUTANTS[name]
    monkeypatch.setattr(target, attribute, mutant)
    with pytest.raises(AssertionError, match=r"^AssertionError\("):
        explore(SCENARIOS[where][0])


def test_a_count_that_never_begins_again_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # A late finish shows the rule its own claim, so it is the version that tells it from a new one: a count that begins
    # again does not, whatever the run token. But no store can promise never to begin again.
    monkeypatch.setattr(Stage, "new_version", lambda stage: f"{len(stage.trace)}")
    assert explore(SCENARIOS["a forget and a late finish"][0]).starts == 2


# The same schedules on the stores that people use.

ON_REAL_STORES = [
    "three requests and a cancel",
    "a release, two repeats and a cancel",
    "hooks owed for a release",
    "a release after the lease's end",
    "a lease's end, a renewal and a cancel",
    "a rerun, a renewal and a cancel",
    "a forget and a late finish",
    "an owner whose store fails",
    "an owner's death and a rerun",
]
MoveClock: TypeAlias = Callable[[float], None]


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[tuple[Store, MoveClock]]:
    with sql_store(f"sqlite:///{tmp_path / 'runonce.db'}") as store_and_clock:
        yield store_and_clock


@pytest.fixture
def postgresql(postgres_server: PostgresServer) -> Iterator[tuple[Store, MoveClock]]:
    with sql_store(postgres_server.url) as store_and_clock:
        yield store_and_clock


@contextlib.contextmanager
def sql_store(url: str) -> Iterator[tuple[Store, MoveClock]]:
    """A store with tables of its own. Its clock moves by moving back what it has kept."""
    store, engine = SQLStore(url, prefix="interleavings"), create_engine(url)
    store.purge()  # the first verb creates the tables

    def move_clock(seconds: float) -> None:
        with engine.begin() as connection:
            statement = "UPDATE interleavings_calls SET lease_until = lease_until - :s, expires_at = expires_at - :s"
            connection.execute(text(statement), {"s": seconds})

    yield store, move_clock
    store.close()
    engine.dispose()


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[tuple[Store, MoveClock]]:
    """Redis. Its clock moves by moving back the leases that it has kept."""
    store = RedisStore(redis_server.url, prefix="interleavings")
    with redis_server.client() as client:

        def move_clock(seconds: float) -> None:
            for name in client.scan_iter("interleavings:{*}"):
                if lease_until := client.hget(name, "lease"):
                    client.hset(name, "lease", float(lease_until) - seconds)

        yield store, move_clock
        client.delete(*client.scan_iter("interleavings:*"))
    store.close()


@pytest.mark.parametrize("name", ON_REAL_STORES)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis"])
def test_each_end_is_the_same_on_a_real_store(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    store, move_clock = request.getfixturevalue(kind)
    scenario, _ = SCENARIOS[name]
    for number, schedule in enumerate(explored(name).ends):
        model = replay(scenario, schedule)
        key = CallKey("", name, f"call-{number}")
        real = replay(scenario, schedule, key=key, new_store=lambda stage: store, move_clock=move_clock)
        assert real == model


@pytest.mark.parametrize(
    "name",
    ["two requests and a cancel", "no place to wait", "hooks owed for a release"],
)
def test_the_promise_holds_in_every_interleaving_on_the_memory_store(name: str) -> None:
    scenario, starts = SCENARIOS[name]
    explored = explore(scenario, lambda stage: MemoryStore(timer=lambda: stage.now))
    assert explored.starts == starts
    assert explored.schedules >= len(explored.ends)


@world()
def replay(scenario: Scenario, schedule: Sequence[Choice], **where: Any) -> tuple[object, ...]:
    """All that can be seen of a schedule: its steps, the answers, and the record that is left."""
    with playing(scenario, schedule, **where) as stage:
        assert not stage.choices()
        stage.finish()
        left = stage.store.read(stage.key).record
        timeless = left and left._replace(key=KEY, created_at=0, finished_at=left.finished_at and 0)
        return (stage.trace, [player.told for player in stage.players], timeless)
