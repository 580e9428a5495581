"""The background thread of a process that shares its store: it renews, learns of cancels, repeats saves, gives back."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from flask_runonce import CallKey, current_call, keeper
from flask_runonce.call import Call, CanceledCall
from flask_runonce.errors import StoreFull, StoreUnavailable
from flask_runonce.keeper import Keeper
from flask_runonce.record import Claim, Record, SavedResponse, State
from flask_runonce.stores import Renewed, Swapped
from flask_runonce.testing.store_contract import in_child, together
from tests.plain_app import AT_ONCE, LIMIT, TEXT, Environ, LeasedStore, Site, answer, in_thread

FORGET, LEASE = 3600.0, 30.0
KEY = CallKey("", "chat-1", "call-1")
WHAT = "The end of a run"


class Beat:
    """Stands in for the keeper's clock: a round begins when the test says so, after the time that it would sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.wakes: list[_Wake] = []
        self.keepers: set[threading.Thread] = set()
        self._came_round = threading.Semaphore(0)
        self._asleep = threading.Semaphore(0)
        self._awake = threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() not in self.keepers:
            threading.Semaphore(0).acquire()  # the keeper of a test that is over has come round to the next one's clock
        self.slept.append(seconds)
        self._asleep.release()
        self._awake.acquire()  # for ever, when the test is over
        self.now += seconds

    def event(self) -> _Wake:
        self.wakes.append(_Wake(self._came_round, self.keepers))
        return self.wakes[-1]

    @property
    def at_rest(self) -> bool:
        """Whether the keeper has nothing to do. To be asked after a round."""
        return not self.wakes[0].is_set()

    def begin(self) -> None:
        """Let a round begin, for which there must be a reason."""
        assert self._came_round.acquire(timeout=LIMIT), "there is no keeper"
        assert self._asleep.acquire(timeout=LIMIT), "the keeper has nothing to do"
        self._awake.release()

    def round(self, number: int = 1) -> None:
        """Let so many rounds pass, to their end."""
        for _ in range(number):
            self.begin()
            assert self._came_round.acquire(timeout=LIMIT), "the keeper does not come round"
            self._came_round.release()


class _Wake(threading.Event):
    """The event that the keeper waits for at the start of each round."""

    def __init__(self, came_round: threading.Semaphore, keepers: set[threading.Thread]) -> None:
        super().__init__()
        self._came_round = came_round
        self._keepers = keepers

    def wait(self, timeout: float | None = None) -> bool:
        self._keepers.add(threading.current_thread())
        self._came_round.release()
        return super().wait(timeout)


@pytest.fixture
def beat(monkeypatch: pytest.MonkeyPatch) -> Beat:
    beat = Beat()
    monkeypatch.setattr(keeper, "time", types.SimpleNamespace(monotonic=beat.monotonic, sleep=beat.sleep))
    monkeypatch.setattr(keeper, "threading", types.SimpleNamespace(Event=beat.event, Thread=threading.Thread))
    return beat


class Store:
    """Says of renewals what the test wants said: the next of `replies`, or that all is well."""

    def __init__(self) -> None:
        self.renewals: list[tuple[set[str], float, float]] = []
        self.renewed = threading.Semaphore(0)
        self.replies: list[Renewed | BaseException | Callable[[], Renewed]] = []

    def renew(self, claims: Sequence[Claim], *, forget_after: float, lease: float) -> Renewed:
        self.renewals.append(({claim.run for claim in claims}, forget_after, lease))
        self.renewed.release()
        reply = self.replies.pop(0) if self.replies else Renewed(frozenset(), frozenset())
        if isinstance(reply, BaseException):
            raise reply
        return reply() if callable(reply) else reply

    @property
    def runs(self) -> list[set[str]]:
        return [runs for runs, _, _ in self.renewals]


@pytest.fixture
def store() -> Store:
    return Store()


def keeper_of(store: Any, lease: float = LEASE) -> Keeper:
    return Keeper(store, forget_after=FORGET, lease=lease)


def call_of(run: str) -> Call:
    return Call(Claim(Record(KEY._replace(tool_call_id=run), State.RUNNING, run), f"version of {run}"))


# Renewing


def test_all_runs_are_renewed_in_one_call(beat: Beat, store: Store) -> None:
    kept = keeper_of(store)
    for run in ("a", "b", "c"):
        kept.hold(call_of(run))
    beat.round(2)
    assert store.renewals == [({"a", "b", "c"}, FORGET, LEASE)] * 2


def test_a_run_that_has_ended_is_not_renewed(beat: Beat, store: Store) -> None:
    kept = keeper_of(store)
    kept.hold(call_of("a"))
    kept.hold(call_of("b"))
    beat.round()
    kept.let_go("a")
    beat.round()
    assert store.runs == [{"a", "b"}, {"b"}]


def test_a_run_that_begins_while_others_are_renewed_is_renewed_next(beat: Beat, store: Store) -> None:
    kept = keeper_of(store)

    def meanwhile() -> Renewed:
        kept.hold(call_of("b"))
        kept.let_go("a")
        return Renewed(frozenset(), frozenset())

    store.replies = [meanwhile]
    kept.hold(call_of("a"))
    beat.round(2)
    assert store.runs == [{"a"}, {"b"}]


@pytest.mark.parametrize(("lease", "interval"), [(30, 0.5), (2, 0.5), (1, 0.25), (0.1, 0.025)])
def test_it_renews_twice_a_second_and_four_times_a_lease(
    lease: float, interval: float, beat: Beat, store: Store
) -> None:
    kept = keeper_of(store, lease)
    kept.hold(call_of("a"))
    beat.round(2)
    assert beat.slept[:2] == [pytest.approx(interval)] * 2


def keepers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "flask-runonce"}


def test_it_starts_with_the_first_run_and_is_one_thread(beat: Beat, store: Store) -> None:
    before = keepers()
    kept = keeper_of(store)
    assert keepers() == before
    for run in "abcdefgh":
        kept.hold(call_of(run))
    beat.round()
    (thread,) = keepers() - before
    assert thread.daemon


def test_it_is_one_thread_although_the_first_runs_begin_together(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    started: list[Any] = []

    class Thread:
        def __init__(self, **options: Any) -> None:
            started.append(options)

        def start(self) -> None:
            pass

    monkeypatch.setattr(keeper, "threading", types.SimpleNamespace(Event=threading.Event, Thread=Thread))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            kept = keeper_of(store)
            together(*(partial(kept.hold, call_of(run)) for run in "abcd"))
    finally:
        sys.setswitchinterval(interval)
    assert len(started) == 50


def test_it_sleeps_while_there_is_nothing_to_keep(beat: Beat, store: Store) -> None:
    kept = keeper_of(store)
    kept.hold(call_of("a"))
    beat.round()
    assert not beat.at_rest
    kept.let_go("a")
    beat.round()
    assert beat.at_rest
    kept.hold(call_of("b"))
    beat.round()
    assert store.runs == [{"a"}, {"b"}]
    assert len(beat.wakes) == 1


def test_it_serves_a_forked_process_too(store: Store) -> None:
    """With the clock that it really has: what a child waits for is its own thread's renewal."""
    kept = keeper_of(store, 0.02)
    kept.hold(call_of("a"))
    assert store.renewed.acquire(timeout=LIMIT)
    kept.let_go("a")

    def work() -> str:
        store.renewed = threading.Semaphore(0)
        store.renewals.clear()
        kept.hold(call_of("of the child"))
        assert store.renewed.acquire(timeout=LIMIT)
        return str(store.runs[0])

    assert in_child(work) == "{'of the child'}"


# What a renewal says


def test_a_cancel_in_another_process_reaches_its_run_alone(beat: Beat, store: Store) -> None:
    calls = {run: call_of(run) for run in ("a", "b")}
    kept = keeper_of(store)
    for call in calls.values():
        kept.hold(call)
    store.replies = [Renewed(frozenset({"a"}), frozenset())]
    waiting = in_thread(calls["a"].wait_canceled, LIMIT)
    beat.round()
    assert waiting.result(LIMIT)
    assert [call.canceled for call in calls.values()] == [True, False]
    beat.round()
    assert store.runs == [{"a", "b"}] * 2  # a canceled run goes on, and stays alive


def test_a_claim_that_was_lost_is_told_once_and_not_renewed_again(
    beat: Beat, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keeper_of(store)
    kept.hold(call_of("a"))
    kept.hold(call_of("b"))
    store.replies = [Renewed(frozenset(), frozenset({"a"}))]
    beat.round(2)
    assert store.runs == [{"a", "b"}, {"b"}]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [(record.chat_id, record.tool_call_id) for record in warnings] == [("chat-1", "a")]
    assert "lost" in warnings[0].getMessage()


def test_a_run_that_ended_during_the_renewal_is_not_told_as_lost(
    beat: Beat, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keeper_of(store)

    def meanwhile() -> Renewed:
        kept.let_go("a")
        return Renewed(frozenset(), frozenset({"a"}))

    store.replies = [meanwhile]
    kept.hold(call_of("a"))
    kept.hold(call_of("b"))
    beat.round()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("error", [StoreUnavailable("away"), ValueError("a bug")], ids=repr)
def test_a_renewal_that_fails_is_logged_and_tried_again(
    error: Exception, beat: Beat, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keeper_of(store)
    kept.hold(call_of("a"))
    store.replies = [error, error]
    beat.round(3)
    assert store.runs == [{"a"}] * 3
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(logged) == 2
    assert all("renewed" in record.getMessage() for record in logged)


# Jobs


def test_a_job_is_done_once(beat: Beat, store: Store) -> None:
    done = []
    keeper_of(store).again(lambda: done.append(1), KEY, WHAT)
    beat.round()
    assert done == [1]
    assert beat.at_rest
    assert store.renewals == []  # there are no runs


def test_a_job_is_tried_again_while_the_store_cannot(beat: Beat, store: Store) -> None:
    tries: list[float] = []

    def job() -> None:
        tries.append(beat.now)
        if len(tries) < 4:
            raise (StoreUnavailable if len(tries) % 2 else StoreFull)("not yet")

    keeper_of(store).again(job, KEY, WHAT)
    beat.round(4)
    assert tries == [0.5, 1.0, 1.5, 2.0]
    assert beat.at_rest


def test_a_job_is_given_up_when_a_lease_has_passed(beat: Beat, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[float] = []

    def job() -> None:
        tries.append(beat.now)
        raise StoreUnavailable("nobody answers at db-7")

    keeper_of(store, lease=2).again(job, KEY, WHAT)
    beat.round(4)
    assert tries == [0.5, 1.0, 1.5, 2.0]
    assert beat.at_rest
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [error.getMessage() for error in errors] == [
        "The end of a run could not be saved before its lease ended: nobody answers at db-7"
    ]
    assert (errors[0].chat_id, errors[0].tool_call_id) == ("chat-1", "call-1")


def test_a_job_that_fails_takes_no_other_along(beat: Beat, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    done = []

    def broken() -> None:
        raise ValueError("a bug")

    kept = keeper_of(store)
    kept.again(broken, KEY, WHAT)
    kept.again(lambda: done.append(1), KEY, WHAT)
    beat.round()
    if not beat.at_rest:
        beat.round()
    assert done == [1]
    assert [(record.getMessage().strip(), record.tool_call_id) for record in caplog.records if record.exc_info] == [
        ("The end of a run could not be saved.", "call-1")
    ]


def test_a_job_that_a_job_asks_for_is_done_next(beat: Beat, store: Store) -> None:
    done: list[int] = []
    kept = keeper_of(store)
    kept.again(lambda: kept.again(lambda: done.append(1), KEY, WHAT), KEY, WHAT)
    beat.round()
    assert done == []
    beat.round()
    assert done == [1]


def test_no_job_is_lost_at_whatever_moment_it_comes(beat: Beat, store: Store) -> None:
    """A job is handed over before each single instruction of the keeper's thread, as another thread may do it."""
    handed: list[str] = []
    done: list[str] = []
    moments = set()
    kept = keeper_of(store)

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != keeper.__file__:
            return None
        frame.f_trace_opcodes = True
        moment = f"{frame.f_code.co_name}:{frame.f_lineno} ({frame.f_lasti})"
        if event == "opcode" and beat.slept and moment not in moments:
            moments.add(moment)
            handed.append(moment)
            kept.again(lambda: done.append(moment), KEY, WHAT)
        return trace

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        kept.again(lambda: None, KEY, WHAT)  # starts the thread
    finally:
        threading.settrace(before)  # type: ignore[arg-type]
    for _ in range(100):
        beat.round()
        if beat.at_rest:
            break
    assert len(handed) > 50
    assert [moment for moment in handed if moment not in done] == []
    assert len(done) == len(handed)


# What the middleware makes of it


class Unreliable(LeasedStore):
    """Is away at the swaps that the test names: "before" it has written, or "after" that, before it has replied."""

    def __init__(self) -> None:
        super().__init__()
        self.away: dict[State | None, str] = {}
        self.renewals = 0

    def swap(self, key: CallKey, seen: str, new: Record | None, **options: Any) -> Swapped:
        when = self.away.get(new.state if new else None)
        if when == "before":
            raise StoreUnavailable("on purpose")
        swapped = super().swap(key, seen, new, **options)
        if when == "after" and swapped.done:
            raise StoreUnavailable("on purpose")
        return swapped

    def renew(self, claims: Sequence[Claim], *, forget_after: float, lease: float) -> Renewed:
        self.renewals += 1
        return super().renew(claims, forget_after=forget_after, lease=lease)


def hooked_site(store: LeasedStore, **options: Any) -> tuple[Site, list[CanceledCall]]:
    site = Site(answer(b"made", "201 Created"), store=store, config=AT_ONCE, **options)
    hooked: list[CanceledCall] = []
    site.middleware.on_cancel(hooked.append)
    return site, hooked


MADE = SavedResponse("201 Created", tuple(TEXT), b"made")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_failed_is_repeated(when: str, beat: Beat) -> None:
    store = Unreliable()
    site, _ = hooked_site(store)
    store.away = {State.DONE: when}
    assert site.call().body == b"made"  # the first caller has it all the same
    store.away = {}
    beat.round()
    record = store.read(KEY).record
    assert record and (record.state, record.response) == (State.DONE, MADE)
    assert site.call().body == b"made"
    assert site.runs == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_hooks_that_a_run_owes_are_called_when_its_save_arrives(when: str, beat: Beat) -> None:
    store = Unreliable()
    site, hooked = hooked_site(store)
    with site.held():
        assert site.cancel().status_int == 202
        store.away = {State.DONE: when}
    store.away = {}
    beat.round()
    assert hooked == [CanceledCall(KEY, "running", MADE)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_release_that_failed_is_repeated(when: str, beat: Beat) -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        current_call.release()
        return answer()(environ, start_response)

    store = Unreliable()
    site, _ = hooked_site(store)
    site.handler = handler
    store.away = {None: when}
    site.call()
    store.away = {}
    beat.round()
    assert store.read(KEY).record is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_hooks_that_a_released_run_owes_are_called_when_that_arrives(when: str, beat: Beat) -> None:
    store = Unreliable()
    site, hooked = hooked_site(store)
    site.handler = answer(status="429 Too Many Requests")
    with site.held():
        assert site.cancel().status_int == 202
        store.away = {State.CANCELED: when}
    store.away = {}
    beat.round()
    assert hooked == [CanceledCall(KEY, "not_received", None)]


def test_a_save_is_given_up_when_the_lease_has_ended(beat: Beat, caplog: pytest.LogCaptureFixture) -> None:
    store = Unreliable()
    site = Site(answer(), store=store, config={**AT_ONCE, "RUNONCE_LEASE": 2})
    store.away = {State.DONE: "before"}
    site.call()
    beat.round(4)
    assert beat.at_rest
    store.away = {}
    assert site.call().json["code"] == "still_running"
    store.dead = True
    assert site.call().json["code"] == "outcome_unknown"
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_a_claim_whose_reply_was_lost_is_given_back(beat: Beat) -> None:
    store = Unreliable()
    site, _ = hooked_site(store)
    store.away = {State.RUNNING: "after"}
    refused = site.call()
    assert (refused.status_int, refused.json["code"], site.runs) == (503, "store_unavailable", 0)
    assert store.read(KEY).record
    store.away = {}
    beat.round()
    assert store.read(KEY).record is None
    assert site.call().body == b"made"


def test_a_claim_that_was_never_written_needs_no_giving_back(beat: Beat) -> None:
    store = Unreliable()
    site, _ = hooked_site(store)
    store.away = {State.RUNNING: "before"}
    assert site.call().json["code"] == "store_unavailable"
    store.away = {}
    with site.held():  # a retry came first: the run is its, and not what is to be given back
        beat.round()
        assert site.call().json["code"] == "still_running"
    assert site.call().body == b"made"


def test_a_claim_that_was_canceled_before_it_was_given_back_stays_canceled(beat: Beat) -> None:
    store = Unreliable()
    site, hooked = hooked_site(store)
    store.away = {State.RUNNING: "after"}
    assert site.call().json["code"] == "store_unavailable"
    store.away = {}
    assert site.cancel().status_int == 202
    beat.round()
    assert site.call().json["code"] == "canceled"
    assert hooked == [CanceledCall(KEY, "not_received", None)]


def test_a_claim_is_given_back_although_the_store_stays_away_for_a_while(beat: Beat) -> None:
    store = Unreliable()
    site, _ = hooked_site(store)
    store.away = {State.RUNNING: "after", None: "before"}
    assert site.call().json["code"] == "store_unavailable"
    beat.round(3)
    assert store.read(KEY).record
    store.away = {}
    beat.round()
    assert store.read(KEY).record is None


def test_a_claim_that_could_not_be_given_back_is_no_end_of_a_run(beat: Beat, caplog: pytest.LogCaptureFixture) -> None:
    store = Unreliable()
    site = Site(answer(), store=store, config={**AT_ONCE, "RUNONCE_LEASE": 2})
    store.away = {State.RUNNING: "after", None: "before"}
    assert site.call().json["code"] == "store_unavailable"
    beat.round(4)
    assert beat.at_rest
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [(error.getMessage(), error.tool_call_id) for error in errors] == [
        ("The release of a claim could not be saved before its lease ended: on purpose", "call-1")
    ]
    store.away = {}
    store.dead = True
    assert site.call().json["code"] == "outcome_unknown"
    assert site.runs == 0


def test_a_cancel_in_another_process_reaches_the_handler(beat: Beat) -> None:
    """Two middlewares on one store are two processes to each other."""
    told = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        told.append(current_call.canceled)
        assert other.cancel().status_int == 202
        told.append(current_call.canceled)
        beat.begin()
        told.append(current_call.wait_canceled(LIMIT))
        return answer(b"made", "201 Created")(environ, start_response)

    store = LeasedStore()
    site = Site(handler, store=store, config=AT_ONCE)
    other = Site(answer(), store=store, config=AT_ONCE)
    assert site.call().body == b"made"
    assert told == [False, False, True]


def test_a_run_is_renewed_until_its_end(beat: Beat) -> None:
    store = Unreliable()
    site, _ = hooked_site(store)
    with site.held("call-1"), site.held("call-2"):
        beat.round(3)
        assert store.renewals == 3
    beat.round()
    assert beat.at_rest
    assert store.renewals == 3


def test_a_store_of_one_process_needs_no_keeper() -> None:
    before = keepers()
    site = Site(answer())
    site.call()
    assert keepers() == before
