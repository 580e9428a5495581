"""What the memory store does beyond the contract of all stores: its bounds, its tidying, its one process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flask_runonce.errors import StoreFull
from flask_runonce.record import CallKey, Claim, Found, Outcome, Record, SavedResponse, State
from flask_runonce.stores import MemoryStore
from flask_runonce.testing.store_contract import (
    FORGET,
    KEY,
    canceled,
    claim_of,
    done,
    in_child,
    put,
    record_of,
    renew,
    running,
    swap,
    together,
    touch,
)
from tests.plain_app import PREFIX, Site, answer, headers

# The same examples each time, however slow the machine.
steady = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SMALL = 32_000
"""Bytes: room for some twenty-odd records without a body."""


class Timer:
    """A clock that the test moves; seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now


@pytest.fixture
def timer() -> Timer:
    return Timer()


@pytest.fixture
def store(timer: Timer) -> MemoryStore:
    return MemoryStore(max_bytes=SMALL, timer=timer)


def key_of(number: int) -> CallKey:
    return KEY._replace(tool_call_id=f"{number:05}")


def finish(store: MemoryStore, key: CallKey, body: bytes = b"") -> Record:
    """Claim a call and end its run."""
    claimed = put(store, running(key))
    return record_of(put(store, done(record_of(claimed), body), claimed.version))


def fill(store: MemoryStore, make: Callable[[CallKey], Record] = running, first: int = 0) -> int:
    """Put new calls until the store is full, and say how many fitted."""
    for number in range(first, first + 10_000):
        try:
            put(store, make(key_of(number)))
        except StoreFull:
            return number - first
    raise AssertionError("the store has no bound")


def room(store: MemoryStore) -> int:
    """How many new calls fit, without a trace."""
    fitted = fill(store, first=50_000)
    for number in range(50_000, 50_000 + fitted):
        seen = store.read(key_of(number))
        assert swap(store, seen.version, None, key_of(number)).done
    return fitted


# Its bounds


def test_nothing_that_is_not_there_is_lost(store: MemoryStore) -> None:
    for new in (running(), None):
        assert not store.swap(KEY, "", new, forget_after=60, lease=30, if_lost=True).done
    assert store.read(KEY).record is None


def test_new_calls_are_refused_when_the_store_is_full(store: MemoryStore) -> None:
    fitted = fill(store)
    assert 20 < fitted < 32
    assert store.list(limit=200).total == fitted
    with pytest.raises(StoreFull, match="RUNONCE_MAX_STORE_BYTES"):
        put(store, running())
    assert store.read(KEY).record is None


def test_nothing_that_is_not_forgotten_is_evicted(store: MemoryStore, timer: Timer) -> None:
    finished = [finish(store, key_of(number)) for number in range(10)]
    fill(store, first=10)
    timer.now += FORGET - 1
    with pytest.raises(StoreFull):
        put(store, running())
    assert [store.read(record.key).record for record in finished] == finished


def test_a_full_store_makes_room_with_what_is_forgotten(store: MemoryStore, timer: Timer) -> None:
    finish(store, key_of(0))
    fill(store, first=1)
    timer.now += FORGET
    put(store, running())
    with pytest.raises(StoreFull):
        put(store, running(key_of(99)))


def test_a_release_makes_room(store: MemoryStore) -> None:
    claimed = put(store, running())
    fill(store)
    assert swap(store, claimed.version, None).done
    put(store, running())


def test_a_full_store_still_answers_repeats_and_cancels(store: MemoryStore) -> None:
    finished = finish(store, KEY, b"saved")
    claimed = put(store, running(key_of(99)))
    fill(store)
    fill(store, canceled, first=30_000)  # the reserve, too
    assert touch(store, repeat=True).record == finished
    version = store.read(KEY).version
    assert put(store, finished._replace(found=Found.DONE), version).record == finished._replace(found=Found.DONE)
    marked = record_of(claimed)._replace(found=Found.RUNNING)
    claimed = put(store, marked, claimed.version)
    assert claimed.record == marked
    assert put(store, canceled(key_of(99)), claimed.version).record  # it was released


def test_calls_that_are_canceled_before_they_come_have_a_reserve(store: MemoryStore) -> None:
    fill(store)
    assert fill(store, canceled, first=30_000) in (1, 2)  # one part in sixteen of some thirty
    with pytest.raises(StoreFull):
        put(store, running())


def test_calls_that_are_canceled_before_they_come_count(store: MemoryStore) -> None:
    everything = fill(store, canceled)
    assert everything in range(27, 32)
    with pytest.raises(StoreFull):
        put(store, running())
    with pytest.raises(StoreFull):
        put(store, canceled())


def test_the_reserve_is_a_sixteenth() -> None:
    assert fill(MemoryStore(max_bytes=1_600_000)) / fill(MemoryStore(max_bytes=1_600_000), canceled) == pytest.approx(
        15 / 16, abs=0.002
    )


def test_an_end_that_does_not_fit_changes_nothing(store: MemoryStore) -> None:
    claimed = put(store, running())
    with pytest.raises(StoreFull):
        put(store, done(record_of(claimed), b"x" * SMALL), claimed.version)
    assert store.read(KEY) == claimed


def test_an_end_without_its_body_always_fits(store: MemoryStore) -> None:
    claimed = put(store, running())
    fill(store)
    fill(store, canceled, first=30_000)
    bare = record_of(claimed)._replace(
        state=State.DONE, outcome=Outcome.TOO_LARGE, response=SavedResponse("201 CREATED"), finished_at=1.0
    )
    assert put(store, bare, claimed.version).record == bare


@pytest.mark.parametrize(
    "response",
    [
        SavedResponse("200 OK", (), b"x" * 3000),
        SavedResponse("200 OK", (("Link", "x" * 3000),)),
        SavedResponse("200 OK", (("L" * 3000, "x"),)),
        SavedResponse("200 OK", tuple(("Link", "x") for _ in range(15))),
    ],
    ids=["body", "header value", "header name", "many headers"],
)
def test_what_is_saved_counts(store: MemoryStore, response: SavedResponse) -> None:
    before = room(store)
    claimed = put(store, running())
    put(store, done(record_of(claimed))._replace(response=response), claimed.version)
    assert before - room(store) in (3, 4, 5)


def test_a_long_key_counts(store: MemoryStore) -> None:
    before = room(store)
    put(store, running(CallKey("s" * 255, "c" * 255, "t" * 255)))
    put(store, running(CallKey("s" * 255, "c" * 255, "u" * 255)))
    assert before - room(store) in (3, 4)


def test_a_store_has_its_room_back_in_the_end(store: MemoryStore, timer: Timer) -> None:
    before = room(store)
    for number in range(5):
        finish(store, key_of(number), b"x" * 1000)
    released = put(store, running(key_of(10)))
    swap(store, released.version, None, key_of(10))
    put(store, canceled(key_of(11)))
    refused = put(store, running(key_of(12)))
    with pytest.raises(StoreFull):
        put(store, done(record_of(refused), b"x" * SMALL), refused.version)
    put(store, done(record_of(refused)), refused.version)
    assert room(store) < before - 5
    timer.now += FORGET
    assert store.purge() == 7
    assert room(store) == before


def test_what_is_looked_for_after_its_time_gives_its_room_back(store: MemoryStore, timer: Timer) -> None:
    before = room(store)
    finish(store, KEY, b"x" * 5000)
    timer.now += FORGET
    assert store.read(KEY).record is None
    assert room(store) == before


def test_a_store_has_its_room_back_after_many_threads(store: MemoryStore) -> None:
    before = room(store)

    def work(worker: int) -> None:
        for number in range(200):
            claimed = put(store, running(key_of(worker)))
            if number % 2:
                claimed = put(store, done(record_of(claimed), b"x" * number), claimed.version)
            assert swap(store, claimed.version, None, key_of(worker)).done

    together(*(lambda worker=worker: work(worker) for worker in range(8)))
    assert room(store) == before


# What the middleware makes of it


def test_a_response_that_does_not_fit_is_kept_without_its_body() -> None:
    site = Site(answer(b"x" * SMALL, "201 Created"), store=MemoryStore(max_bytes=SMALL))
    assert site.call().body == b"x" * SMALL
    repeat = site.call()
    assert (repeat.json["code"], repeat.json["saved_status"], site.runs) == ("response_too_large", 201, 1)
    assert site.cancel().json == {"received": True, "state": "done", "status": 201, "body_too_large": True}


def test_a_full_store_refuses_new_calls_and_answers_the_others() -> None:
    site = Site(answer(), store=MemoryStore(max_bytes=SMALL))
    statuses = [site.call(f"call-{number}").status_int for number in range(40)]
    fitted = statuses.count(200)
    assert statuses == [200] * fitted + [503] * (40 - fitted)
    assert site.runs == fitted
    assert [site.call(f"call-{number}").status_int for number in range(fitted)] == [200] * fitted
    assert site.cancel("call-0").json["state"] == "done"
    assert site.cancel("unknown").json["state"] == "not_received"
    cancels = [site.cancel(f"unknown-{number}") for number in range(5)]
    assert (cancels[-1].status_int, cancels[-1].json["code"]) == (503, "store_full")
    assert site.client.get(PREFIX, headers=headers(None)).json["total"] >= fitted


# Tidying


def test_a_swap_drops_a_few_of_what_is_forgotten(timer: Timer) -> None:
    store = MemoryStore(timer=timer)
    for number in range(1000):
        finish(store, key_of(number))
    timer.now += FORGET
    put(store, running())
    left = store.purge()
    assert 980 < left < 1000


def test_what_is_forgotten_goes_with_the_requests_that_come(timer: Timer) -> None:
    store = MemoryStore(timer=timer)
    for number in range(100):
        finish(store, key_of(number))
    timer.now += FORGET
    for _ in range(100):
        touch_nothing(store)
    assert store.purge() == 0


def touch_nothing(store: MemoryStore) -> None:
    assert not swap(store, "no such version", running()).done


def test_a_refused_call_does_not_drop_all_that_is_forgotten(timer: Timer) -> None:
    store = MemoryStore(max_bytes=4_000_000, timer=timer)
    for number in range(2000):
        finish(store, key_of(number))
    claimed = put(store, running())
    timer.now += FORGET
    with pytest.raises(StoreFull):
        put(store, done(record_of(claimed), b"x" * 3_700_000), claimed.version)
    assert store.purge() > 1000


def test_what_is_forgotten_is_not_listed(store: MemoryStore, timer: Timer) -> None:
    finish(store, KEY)
    timer.now += FORGET
    assert store.list().total == 0


def test_a_list_neither_renews_nor_reorders(timer: Timer) -> None:
    store = MemoryStore(timer=timer)
    for number in range(3):
        finish(store, key_of(number))
        timer.now += 1
    timer.now += FORGET - 10
    for _ in range(2):
        rows = store.list(limit=1, offset=2).rows
        assert [record_of(row).key for row in rows] == [key_of(0)]
    for left in (2, 1, 0):
        timer.now += 7 if left == 2 else 1
        touch_nothing(store)  # on its way it drops what has come to the old end of the order
        assert [record_of(row).key for row in store.list().rows] == [key_of(2 - n) for n in range(left)]
    assert store.purge() == 0


def test_a_touch_of_the_one_that_is_next_to_go_spares_it(timer: Timer) -> None:
    store = MemoryStore(timer=timer)
    for number in (0, 1):
        finish(store, key_of(number))
    timer.now += FORGET / 2
    touch_nothing(store)  # has looked at the oldest
    touch(store, key_of(0))
    timer.now += FORGET / 2
    assert store.purge() == 1
    assert [record_of(row).key for row in store.list().rows] == [key_of(0)]


def test_the_one_that_is_next_to_go_can_be_dropped(timer: Timer) -> None:
    store = MemoryStore(timer=timer)
    finish(store, KEY)
    touch_nothing(store)
    assert store.list().total == 1
    assert swap(store, store.read(KEY).version, None).done
    timer.now += FORGET
    assert (store.read(KEY).record, store.list().total, store.purge()) == (None, 0, 0)


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["finish", "touch", "drop", "cancel"]), st.integers(0, 2)),
        st.tuples(st.just("later"), st.integers(1, 60)),
        st.tuples(st.sampled_from(["list", "look", "tidy"]), st.just(0)),
    ),
    min_size=10,  # of its own accord it makes short ones, in which little happens
    max_size=40,
)


@given(steps)
@settings(steady, max_examples=300)
def test_a_record_stays_for_its_idle_time_whatever_else_happens(todo: list[tuple[str, int]]) -> None:
    timer = Timer()
    store = MemoryStore(max_bytes=SMALL, timer=timer)
    until: dict[CallKey, float] = {}
    for what, number in todo:
        key, there = key_of(number), key_of(number) in until
        if what == "finish" and not there:
            finish(store, key, b"x" * 100 * number)
            until[key] = timer.now + FORGET
        elif what == "cancel" and not there:
            put(store, canceled(key))
            until[key] = timer.now + FORGET
        elif what == "touch" and there:
            touch(store, key)
            until[key] = timer.now + FORGET
        elif what == "drop" and there:
            assert swap(store, store.read(key).version, None, key).done
            del until[key]
        elif what == "later":
            timer.now += number * 36
        elif what == "list":
            store.list()
        elif what == "look":
            store.read(key)
        elif what == "tidy":
            touch_nothing(store)
        until = {key: end for key, end in until.items() if end > timer.now}
        assert {record_of(row).key for row in store.list().rows} == until.keys()
    assert {key for key in map(key_of, range(3)) if store.read(key).record} == until.keys()
    timer.now += FORGET
    store.purge()
    assert room(store) == room(MemoryStore(max_bytes=SMALL))


# Runs


def test_a_run_never_expires_and_has_no_lease(store: MemoryStore, timer: Timer) -> None:
    claimed = put(store, running())
    timer.now += 100 * FORGET
    assert store.purge() == 0
    assert store.list().total == 1
    found = touch(store)
    assert (found.version, found.lease_until, found.lost) == (claimed.version, None, False)
    assert not store.shared


def test_a_run_is_never_lost_so_it_is_never_taken_over(store: MemoryStore, timer: Timer) -> None:
    claimed = put(store, running())
    timer.now += 100 * FORGET
    swapped = swap(store, claimed.version, running(run="run-2"), if_lost=True)
    assert not swapped.done
    assert swapped.seen.record == claimed.record


def test_a_renewal_says_whose_run_is_not_there(store: MemoryStore) -> None:
    claims = [claim_of(put(store, running(key_of(number), f"run-{number}"))) for number in range(3)]
    store_version = store.read(key_of(1)).version
    put(store, claims[1].record._replace(found=Found.RUNNING), store_version)
    stranger = Claim(running(key_of(2), "run-of-another"), claims[2].version)
    assert renew(store, *claims[:2], stranger) == ({"run-1"}, {"run-of-another"})


def test_a_run_that_is_put_over_a_finished_one_takes_its_place(store: MemoryStore, timer: Timer) -> None:
    finish(store, KEY, b"x" * 5000)
    before = store.read(KEY)
    claimed = put(store, running(run="run-2"), before.version)
    timer.now += 2 * FORGET
    assert store.purge() == 0
    assert [row.version for row in store.list().rows] == [claimed.version]
    assert swap(store, claimed.version, None).done
    assert room(store) == room(MemoryStore(max_bytes=SMALL))


# Its clock


def test_times_are_unix_seconds_whatever_the_timer_counts(store: MemoryStore, timer: Timer) -> None:
    before = time.time()
    created_at = record_of(put(store, running())).created_at
    assert before - 1 <= created_at <= time.time() + 1
    timer.now += 50
    assert record_of(put(store, running(key_of(1)))).created_at == pytest.approx(created_at + 50, abs=0.001)


def test_a_host_whose_clock_is_set_changes_nothing(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    created_at = record_of(put(store, running())).created_at
    monkeypatch.setattr("time.time", lambda: 1e10)
    assert record_of(put(store, running(key_of(1)))).created_at == created_at
    assert store.age() == 0


def test_its_age_counts_from_its_first_use(store: MemoryStore, timer: Timer) -> None:
    timer.now += 500
    assert store.age() == 0
    timer.now += 20
    assert store.age() == pytest.approx(20)


# Processes


def test_nothing_is_made_before_its_first_use(timer: Timer) -> None:
    store = MemoryStore(timer=timer)
    assert timer.asked == 0
    store.close()
    assert timer.asked == 0


def test_a_forked_process_starts_clean(store: MemoryStore, timer: Timer) -> None:
    timer.now += 20
    claimed = put(store, running())
    timer.now += 20

    def work() -> str:
        assert store.read(KEY).record is None
        assert store.list().total == 0
        assert store.age() == 0
        put(store, running(run="run-of-the-child"))
        return f"{room(store)} fit"

    assert in_child(work) == f"{room(store)} fit"
    assert store.read(KEY) == claimed._replace(now=store.read(KEY).now)
    assert store.age() == pytest.approx(20)


def test_a_forked_process_is_not_locked_by_a_thread_that_it_has_not(timer: Timer) -> None:
    children = []
    store = MemoryStore(timer=lambda: (forks.pop()() if forks else None, timer())[1])

    def fork() -> None:
        children.append(in_child(lambda: store.read(KEY).version))

    forks: list[Callable[[], None]] = []
    put(store, running())
    forks.append(fork)  # the store asks its timer with its lock held
    store.read(KEY)
    assert children == [""]


# Threads


def test_no_system_call_is_made_under_the_lock(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lets other threads run, and all of them would soon stand before the lock."""
    locked = []

    def urandom(size: int) -> bytes:
        locked.append(store._state().lock.locked())
        return bytes(size)

    monkeypatch.setattr("os.urandom", urandom)
    put(store, running())
    assert locked == [False]
