"""What `flask_runonce.stores.protocol` promises, as one suite. A store is held to it by a subclass in its own tests.

A subclass gives two fixtures: `store`, a store that is empty, and `advance`, which moves that store's clock on (or all
that it has kept back), so that nothing sleeps. Where a test must wait for another thread, it waits for what that
thread does, for `LIMIT` at most.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest

from ..errors import UnreadableRecord
from ..record import NOW, CallKey, Claim, Found, Outcome, Record, SavedResponse, Seen, State
from ..stores import Store, Swapped
from .threads import LIMIT, together

UNTIL_WOKEN = 10 * LIMIT
"""For a wait that must be woken: one that times out takes longer than a test lets it."""
FORGET = 3600.0
LEASE = 30.0
KEY = CallKey("tenant", "chat", "call")
EVERY_BYTE = bytes(range(256))


def running(key: CallKey = KEY, run: str = "run-1", **facts: Any) -> Record:
    return Record(key, State.RUNNING, run, "host-1", "f" * 64, **facts)


def done(record: Record, body: bytes = b"saved") -> Record:
    response = SavedResponse("201 CREATED", (("Content-Type", "text/plain"),), body)
    return record._replace(
        state=State.DONE, outcome=Outcome.RESPONSE, response=response, finished_at=NOW, created_at=record.created_at
    )


def canceled(key: CallKey = KEY) -> Record:
    return Record(key, State.CANCELED, found=Found.NOT_RECEIVED)


def swap(store: Store, seen: str, new: Record | None, key: CallKey = KEY, **options: Any) -> Swapped:
    return store.swap(new.key if new else key, seen, new, **{"forget_after": FORGET, "lease": LEASE, **options})


def put(store: Store, new: Record, seen: str = "", **options: Any) -> Seen:
    """Put `new` where version `seen` is, which must succeed, and give what is there then."""
    swapped = swap(store, seen, new, **options)
    assert swapped.done
    return swapped.seen


def touch(store: Store, key: CallKey = KEY, **options: Any) -> Seen:
    """Meet the record as a later request does: a swap that wants nothing there."""
    swapped = swap(store, "", running(key, "run-of-a-repeat"), **options)
    assert not swapped.done
    return swapped.seen


def renew(store: Store, *claims: Claim) -> tuple[set[str], set[str]]:
    renewed = store.renew(claims, forget_after=FORGET, lease=LEASE)
    return set(renewed.canceled), set(renewed.lost)


def claim_of(seen: Seen) -> Claim:
    assert seen.record is not None
    return Claim(seen.record, seen.version)


def record_of(seen: Seen) -> Record:
    assert seen.record is not None
    return seen.record


def in_child(function: Callable[[], str], *, forked: Callable[[], None] = lambda: None) -> str:
    """What `function` returns in a forked process. `forked` is called here as soon as there is one."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads at a fork, which some tests are about
        child = os.fork()
    if child == 0:
        try:
            answer = function()
        except BaseException:
            answer = traceback.format_exc()
        os.write(writer, answer.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    forked()
    try:
        if not select.select([reader], [], [], LIMIT)[0]:
            os.kill(child, 9)
            raise AssertionError("The child does not come back.")
        return os.read(reader, 65_536).decode()
    finally:
        os.close(reader)
        os.waitpid(child, 0)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")


class StoreContract:
    """What every store promises. `store` is an empty one, `advance(seconds)` moves its clock on."""

    forgets_by_itself: ClassVar[bool] = False
    """True for a server that drops what has had its time; then `purge` has nothing to do."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        raise NotImplementedError

    @pytest.fixture
    def advance(self) -> Callable[[float], None]:
        raise NotImplementedError

    # What is put is what is read.

    def test_nothing_is_there_at_first(self, store: Store) -> None:
        seen = store.read(KEY)
        assert seen.now > 1e9
        assert seen == Seen(None, "", seen.now, None, 0)

    @pytest.mark.parametrize(
        "record",
        [
            running(),
            running()._replace(owner="", fingerprint=None),
            running(found=Found.RUNNING),
            running(found=Found.RUNNING, owed=True),
            done(running()),
            done(running(found=Found.RUNNING)),
            done(running(found=Found.DONE), b""),
            done(running(), EVERY_BYTE * 20_000),
            running()._replace(state=State.DONE, outcome=Outcome.UNKNOWN, finished_at=NOW),
            running()._replace(
                state=State.DONE, outcome=Outcome.TOO_LARGE, response=SavedResponse("200 OK"), finished_at=NOW
            ),
            canceled(),
            canceled(CallKey("", "Ünï ☃ 𝄞", "x" * 255)),
            running()._replace(created_at=1_700_000_000.125, state=State.DONE, finished_at=1_700_000_001.1),
        ],
    )
    def test_a_record_comes_back_as_it_was_put(self, store: Store, record: Record) -> None:
        swapped = swap(store, "", record)
        seen = store.read(record.key)
        assert swapped == Swapped(True, seen._replace(now=swapped.seen.now))
        assert seen.version != ""
        assert seen.repeats == 0
        kept = record_of(seen)
        filled_in = {
            name: getattr(kept, name) for name in ("created_at", "finished_at") if getattr(record, name) == NOW
        }
        assert kept == record._replace(**filled_in)

    def test_headers_come_back_in_order_with_repeated_ones(self, store: Store) -> None:
        headers = (("Link", "</a>"), ("content-type", "text/plain; x=é"), ("Link", "</b>"), ("Vary", ""))
        record = running()._replace(state=State.DONE, response=SavedResponse("200 Ok, indeed", headers, EVERY_BYTE))
        put(store, record)
        assert record_of(store.read(KEY)).response == SavedResponse("200 Ok, indeed", headers, EVERY_BYTE)

    def test_a_body_of_the_largest_size_comes_back(self, store: Store) -> None:
        body = os.urandom(2**16) * 128
        put(store, done(running(), body))
        response = record_of(store.read(KEY)).response
        assert response is not None
        assert response.body == body

    def test_the_store_fills_in_its_now(self, store: Store) -> None:
        before = store.read(KEY).now
        claimed = put(store, running())
        assert before <= record_of(claimed).created_at <= claimed.now
        assert record_of(claimed).finished_at is None
        finished = put(store, done(record_of(claimed)), claimed.version)
        assert record_of(finished).created_at == record_of(claimed).created_at
        finished_at = record_of(finished).finished_at
        assert finished_at is not None
        assert claimed.now <= finished_at <= store.read(KEY).now

    def test_keys_that_look_alike_are_different_calls(self, store: Store) -> None:
        keys = [
            CallKey("a", "b", "c"),
            CallKey("ab", "", "c"),
            CallKey("a", "bc", ""),
            CallKey("", "ab", "c"),
            CallKey("", "a", "bc"),
            CallKey("A", "b", "c"),
            CallKey("a", "B", "c"),
            CallKey("a", "b", "C"),
            CallKey("a", "b", "c "),
            CallKey("a", "b ", "c"),
            CallKey("ä", "b", "c"),
            CallKey("a\u0308", "b", "c"),
            CallKey("a", "b", "{c}"),
            CallKey("a", "b", "*"),
            CallKey("x" * 255, "y" * 255, "z" * 255),
            CallKey("x" * 255, "y" * 255, "z" * 254 + "Z"),
        ]
        for number, key in enumerate(keys):
            put(store, running(key, f"run-{number}"))
        for number, key in enumerate(keys):
            assert (record_of(store.read(key)).key, record_of(store.read(key)).run) == (key, f"run-{number}")
        assert store.list(limit=200).total == len(keys)

    # A swap puts only where what was seen still is.

    def test_a_swap_of_nothing_finds_what_is_there(self, store: Store) -> None:
        claimed = put(store, running())
        swapped = swap(store, "", running(run="run-2"))
        assert swapped == Swapped(False, claimed._replace(now=swapped.seen.now))
        assert record_of(store.read(KEY)).run == "run-1"

    def test_a_swap_of_another_version_finds_what_is_there(self, store: Store) -> None:
        claimed = put(store, running())
        marked = put(store, record_of(claimed)._replace(found=Found.RUNNING), claimed.version)
        swapped = swap(store, claimed.version, done(record_of(claimed)))
        assert swapped == Swapped(False, marked._replace(now=swapped.seen.now))
        swapped = swap(store, claimed.version, None)
        assert swapped == Swapped(False, marked._replace(now=swapped.seen.now))
        assert store.read(KEY).version == marked.version

    @pytest.mark.parametrize("new", [running(), done(running()), None])
    def test_a_swap_of_a_version_finds_nothing(self, store: Store, new: Record | None) -> None:
        swapped = swap(store, "0123456789abcdef", new)
        assert swapped == Swapped(False, Seen(None, "", swapped.seen.now))
        assert store.read(KEY).record is None

    def test_a_record_is_dropped(self, store: Store) -> None:
        claimed = put(store, running())
        swapped = swap(store, claimed.version, None)
        assert swapped == Swapped(True, Seen(None, "", swapped.seen.now))
        assert store.read(KEY).record is None
        assert swap(store, "", None).done

    @pytest.mark.parametrize("body", [b"", EVERY_BYTE * 100])
    def test_a_shorter_body_leaves_nothing_of_a_longer_one(self, store: Store, body: bytes) -> None:
        finished = put(store, done(running(), EVERY_BYTE * 1000))
        put(store, done(running(), body), finished.version)
        response = record_of(store.read(KEY)).response
        assert response is not None
        assert response.body == body

    def test_no_version_comes_twice(self, store: Store) -> None:
        versions = []
        for _ in range(3):
            seen = put(store, running())
            versions.append(seen.version)
            seen = put(store, record_of(seen), seen.version)
            versions.append(seen.version)
            assert swap(store, seen.version, None).done
        assert len(set(versions)) == len(versions)

    def test_an_old_owner_does_not_look_current_after_a_new_claim(self, store: Store) -> None:
        old = put(store, running())
        assert swap(store, old.version, None).done
        new = put(store, running())
        late = swap(store, old.version, done(record_of(old)))
        assert late == Swapped(False, new._replace(now=late.seen.now))
        assert not swap(store, old.version, None).done
        assert store.read(KEY).version == new.version

    def test_a_call_is_forgotten_and_claimed_anew_before_an_old_finish(
        self, store: Store, advance: Callable[[float], None]
    ) -> None:
        old = put(store, canceled())
        advance(FORGET + 1)
        new = put(store, running(run="run-2"))
        assert new.repeats == 0
        late = swap(store, old.version, done(running()))
        assert late == Swapped(False, new._replace(now=late.seen.now))

    # What a swap finds, it touches.

    def test_repeats_are_counted_where_asked(self, store: Store) -> None:
        claimed = put(store, running(), repeat=True)
        assert claimed.repeats == 0
        assert touch(store).repeats == 0
        assert touch(store, repeat=True).repeats == 1
        assert touch(store, repeat=True).repeats == 2
        assert swap(store, "another", None, repeat=True).seen.repeats == 3
        assert store.read(KEY).repeats == 3
        finished = put(store, done(record_of(claimed)), claimed.version, repeat=True)
        assert finished.repeats == 3
        assert touch(store, repeat=True).repeats == 4
        assert swap(store, finished.version, None).done
        assert put(store, running()).repeats == 0

    def test_a_touch_changes_neither_version_nor_record(self, store: Store) -> None:
        for record in (running(found=Found.RUNNING), done(running(), EVERY_BYTE * 100), canceled()):
            there = store.read(KEY)
            there = put(store, record, there.version)
            touched = touch(store, repeat=True)
            assert touched == there._replace(now=touched.now, repeats=there.repeats + 1)
            there = store.read(KEY)
            assert there == touched._replace(now=there.now)

    @pytest.mark.parametrize("record", [done(running()), canceled()])
    def test_a_record_is_forgotten_after_its_idle_time(
        self, store: Store, advance: Callable[[float], None], record: Record
    ) -> None:
        finished = put(store, record)
        advance(FORGET - 60)
        assert store.read(KEY).version == finished.version
        advance(120)
        gone = store.read(KEY)
        assert gone == Seen(None, "", gone.now)
        assert store.list().total == 0
        assert not swap(store, finished.version, record).done
        assert put(store, running()).version != finished.version

    def test_a_touch_starts_the_idle_time_afresh(self, store: Store, advance: Callable[[float], None]) -> None:
        finished = put(store, done(running()))
        for repeat in (False, True, False):
            advance(FORGET * 0.75)
            assert touch(store, repeat=repeat).version == finished.version
        advance(FORGET * 0.75)
        assert not swap(store, "another", None).done
        advance(FORGET * 0.75)
        assert store.read(KEY).version == finished.version
        advance(FORGET)
        assert store.read(KEY).record is None

    def test_a_look_does_not(self, store: Store, advance: Callable[[float], None]) -> None:
        finished = put(store, done(running()))
        advance(FORGET * 0.75)
        assert store.read(KEY).version == finished.version
        assert store.list(scope="tenant", chat_id="chat").total == 1
        assert store.list().total == 1
        advance(FORGET * 0.75)
        assert store.read(KEY).record is None

    def test_the_forget_time_travels_with_the_swap(self, store: Store, advance: Callable[[float], None]) -> None:
        put(store, done(running()), forget_after=100)
        advance(75)
        touch(store, forget_after=1000)
        advance(900)
        finished = touch(store, forget_after=1000)
        advance(900)
        finished = put(store, done(running()), finished.version, forget_after=2000)
        advance(1900)
        assert store.read(KEY).version == finished.version

    def test_the_end_of_a_run_starts_the_idle_time_afresh(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running())
        for _ in range(5):
            advance(LEASE * 0.75)
            assert renew(store, claim_of(claimed)) == (set(), set())
        put(store, done(record_of(claimed)), claimed.version)
        advance(FORGET - 60)
        assert store.read(KEY).record
        advance(120)
        assert store.read(KEY).record is None

    def test_a_run_never_expires_while_it_is_renewed(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running(), forget_after=10)
        for _ in range(20):
            advance(LEASE * 0.9)
            renewed = store.renew([claim_of(claimed)], forget_after=10, lease=LEASE)
            assert not renewed.lost
            store.purge()
        there = store.read(KEY)
        assert (there.version, there.lost) == (claimed.version, False)
        assert put(store, done(record_of(claimed)), claimed.version).record

    # Renewing.

    def test_a_renewal_says_what_was_canceled_and_what_is_lost(self, store: Store) -> None:
        keys = [KEY._replace(tool_call_id=f"call-{number}") for number in range(6)]
        ours, marked, finished, dropped, taken, marked_and_taken = (
            put(store, running(key, f"run-{number}")) for number, key in enumerate(keys)
        )
        claims = [claim_of(seen) for seen in (ours, marked, finished, dropped, taken, marked_and_taken)]
        put(store, record_of(marked)._replace(found=Found.RUNNING), marked.version)
        put(store, done(record_of(finished)), finished.version)
        assert swap(store, dropped.version, None, keys[3]).done
        put(store, running(keys[4], "another-run"), taken.version)
        put(store, running(keys[5], "another-run", found=Found.RUNNING), marked_and_taken.version)
        never = Claim(running(KEY._replace(chat_id="other"), "run-6"), "0123456789abcdef")
        assert renew(store, *claims, never) == ({"run-1"}, {"run-2", "run-3", "run-4", "run-5", "run-6"})

    def test_a_renewal_of_nothing(self, store: Store) -> None:
        assert renew(store) == (set(), set())

    def test_a_renewal_of_very_many_runs_is_one_call(self, store: Store) -> None:
        seen = [put(store, running(KEY._replace(tool_call_id=f"call-{n}"), f"run-{n}")) for n in range(450)]
        put(store, record_of(seen[7])._replace(found=Found.RUNNING), seen[7].version)
        assert swap(store, seen[440].version, None, record_of(seen[440]).key).done
        assert renew(store, *map(claim_of, seen)) == ({"run-7"}, {"run-440"})

    def test_a_renewal_changes_neither_version_nor_record(self, store: Store) -> None:
        claimed = put(store, running(found=Found.RUNNING))
        assert renew(store, claim_of(claimed)) == ({"run-1"}, set())
        there = store.read(KEY)
        assert there == claimed._replace(now=there.now, lease_until=there.lease_until)
        assert swap(store, claimed.version, done(record_of(claimed))).done

    # Waiting.

    def test_a_wait_returns_at_once_where_the_version_is_another(self, store: Store) -> None:
        nothing = store.wait(KEY, "0123456789abcdef", UNTIL_WOKEN)
        assert nothing == Seen(None, "", nothing.now)
        claimed = put(store, running())
        for version in ("", "0123456789abcdef"):
            seen = store.wait(KEY, version, UNTIL_WOKEN)
            assert seen == claimed._replace(now=seen.now)

    def test_a_wait_ends_with_its_timeout(self, store: Store) -> None:
        nothing = store.wait(KEY, "", 0)
        assert nothing == Seen(None, "", nothing.now)
        claimed = put(store, running())
        for timeout in (-1, 0, 0.01, 0.2):
            seen = store.wait(KEY, claimed.version, timeout)
            assert seen == claimed._replace(now=seen.now)

    @pytest.mark.parametrize("new", [done(running(), EVERY_BYTE), running(run="run-2"), None])
    def test_a_wait_ends_when_the_record_changes(self, store: Store, new: Record | None) -> None:
        claimed = put(store, running())
        waiting = threading.Event()

        def wait() -> Seen:
            waiting.set()
            return store.wait(KEY, claimed.version, UNTIL_WOKEN)

        def change() -> Seen:
            assert waiting.wait(LIMIT)
            swapped = swap(store, claimed.version, new)
            assert swapped.done
            return swapped.seen

        waited, changed = together(wait, change)
        assert waited == changed._replace(now=waited.now)

    def test_all_who_wait_are_woken(self, store: Store) -> None:
        claimed = put(store, running())
        *waited, finished = together(
            *[lambda: store.wait(KEY, claimed.version, UNTIL_WOKEN)] * 12,
            lambda: put(store, done(record_of(claimed)), claimed.version),
        )
        assert {seen.version for seen in waited} == {finished.version}

    def test_a_touch_or_a_renewal_does_not_end_a_wait(self, store: Store) -> None:
        claimed = put(store, running())
        waiting = threading.Event()

        def wait() -> Seen:
            waiting.set()
            return store.wait(KEY, claimed.version, UNTIL_WOKEN)

        def change() -> Seen:
            assert waiting.wait(LIMIT)
            for _ in range(20):
                touch(store, repeat=True)
                renew(store, claim_of(claimed))
            return put(store, done(record_of(claimed)), claimed.version)

        waited, finished = together(wait, change)
        assert (waited.version, waited.repeats) == (finished.version, 20)

    def test_waits_for_different_calls_do_not_disturb_each_other(self, store: Store) -> None:
        seen = [put(store, running(KEY._replace(tool_call_id=f"call-{n}"))) for n in range(4)]

        def wait(there: Seen) -> Seen:
            return store.wait(record_of(there).key, there.version, UNTIL_WOKEN)

        def finish() -> list[Seen]:
            return [put(store, done(record_of(there)), there.version) for there in seen]

        *waited, finished = together(*(lambda there=there: wait(there) for there in seen), finish)
        assert [record_of(one) for one in waited] == [record_of(one) for one in finished]

    # For people.

    def test_a_listing_is_newest_first_in_pages(self, store: Store, advance: Callable[[float], None]) -> None:
        for number in range(5):
            put(store, running(KEY._replace(tool_call_id=f"call-{number}")))
            advance(1)
        each: list[dict[str, Any]] = [
            {"scope": "tenant", "chat_id": "chat"},
            {"scope": "tenant"},
            {"chat_id": "chat"},
            {},
        ]
        for filters in each:
            pages = [store.list(limit=2, offset=offset, **filters) for offset in (0, 2, 4, 6)]
            assert [page.total for page in pages] == [5, 5, 5, 5]
            names = [[record_of(seen).key.tool_call_id for seen in page.rows] for page in pages]
            assert names == [["call-4", "call-3"], ["call-2", "call-1"], ["call-0"], []]

    def test_a_listing_is_of_a_scope_and_a_chat(self, store: Store) -> None:
        keys = [CallKey(*parts) for parts in itertools.product(("", "a", "A"), ("1", "2"), ("x", "y"))]
        for key in keys:
            put(store, running(key))

        def listed(**filters: Any) -> set[CallKey]:
            page = store.list(limit=100, **filters)
            assert page.total == len(page.rows)
            return {record_of(seen).key for seen in page.rows}

        assert listed() == set(keys)
        assert listed(scope="a") == {key for key in keys if key.scope == "a"}
        assert listed(scope="") == {key for key in keys if key.scope == ""}
        assert listed(chat_id="2") == {key for key in keys if key.chat_id == "2"}
        assert listed(scope="A", chat_id="1") == {CallKey("A", "1", "x"), CallKey("A", "1", "y")}
        assert listed(scope="", chat_id="1") == {CallKey("", "1", "x"), CallKey("", "1", "y")}
        assert listed(scope="b") == listed(scope="a", chat_id="3") == listed(scope="*", chat_id="*") == set()

    def test_a_listing_shows_what_is_there(self, store: Store, advance: Callable[[float], None]) -> None:
        keys = [KEY._replace(tool_call_id=f"call-{number}") for number in range(4)]
        old, dropped, touched, finished = (put(store, canceled(key)) for key in keys)
        assert swap(store, dropped.version, None, keys[1]).done
        put(store, done(running(keys[3])), finished.version)
        touch(store, keys[3], repeat=True)
        advance(FORGET * 0.75)
        touch(store, keys[2])
        touch(store, keys[3])
        advance(FORGET * 0.75)
        each: list[dict[str, Any]] = [{"scope": "tenant", "chat_id": "chat"}, {}]
        for filters in each:
            page = store.list(**filters)
            assert page.total == 2
            rows = {record_of(seen).key: seen for seen in page.rows}
            assert rows.keys() == {keys[2], keys[3]}
            there = store.read(keys[3])
            assert rows[keys[3]].version == there.version
            assert (rows[keys[3]].repeats, rows[keys[3]].lease_until) == (1, None)
            shown = record_of(rows[keys[3]])
            assert (shown.state, shown.outcome) == (State.DONE, Outcome.RESPONSE)
            assert (shown.created_at, shown.finished_at) == record_of(there)[-2:]
            assert shown.response is not None
            assert shown.response.status == "201 CREATED"

    def test_a_long_run_stays_listed(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running(), forget_after=10)
        for _ in range(5):
            advance(LEASE * 0.9)
            store.renew([claim_of(claimed)], forget_after=10, lease=LEASE)
        assert [seen.version for seen in store.list(scope="tenant", chat_id="chat").rows] == [claimed.version]

    def test_a_purge_drops_what_is_forgotten(self, store: Store, advance: Callable[[float], None]) -> None:
        old = [KEY._replace(tool_call_id=f"old-{number}") for number in range(100)]
        for key in old:
            put(store, canceled(key))
        advance(FORGET - 10)
        kept = put(store, canceled())
        run = put(store, running(KEY._replace(tool_call_id="run")))
        assert all(store.read(key).record for key in old)
        advance(20)
        assert store.purge() == (0 if self.forgets_by_itself else len(old))
        assert store.purge() == 0
        assert store.read(KEY).version == kept.version
        assert store.read(record_of(run).key).version == run.version
        assert store.list().total == 2

    def test_the_age_counts_from_the_first_record(self, store: Store, advance: Callable[[float], None]) -> None:
        put(store, canceled())
        age = store.age()
        assert 0 <= age < LIMIT
        advance(1000)
        assert 1000 <= store.age() < 1000 + LIMIT
        put(store, running(KEY._replace(tool_call_id="call-2")))
        assert store.age() >= 1000
        advance(FORGET)
        assert store.read(KEY).record is None
        assert store.age() >= 1000 + FORGET

    # Races. Each is decided once, whoever comes first.

    def test_of_32_simultaneous_claims_one_wins(self, store: Store) -> None:
        swaps = together(
            *(lambda n=n: swap(store, "", running(run=f"run-{n}"), repeat=True) for n in range(32)),
        )
        (winner,) = [swapped.seen for swapped in swaps if swapped.done]
        assert {swapped.seen.version for swapped in swaps} == {winner.version}
        assert {record_of(swapped.seen) for swapped in swaps} == {record_of(winner)}
        assert sorted(swapped.seen.repeats for swapped in swaps) == list(range(32))
        assert store.read(KEY).repeats == 31

    def test_of_32_simultaneous_claims_of_a_forgotten_call_one_wins(
        self, store: Store, advance: Callable[[float], None]
    ) -> None:
        put(store, done(running(), EVERY_BYTE))
        touch(store, repeat=True)
        advance(FORGET + 1)
        swaps = together(*(lambda n=n: swap(store, "", running(run=f"run-{n}"), repeat=True) for n in range(32)))
        (winner,) = [swapped.seen for swapped in swaps if swapped.done]
        assert {swapped.seen.version for swapped in swaps} == {winner.version}
        assert store.read(KEY).repeats == 31

    def test_of_16_simultaneous_claims_of_each_of_many_calls_one_wins(self, store: Store) -> None:
        keys = [KEY._replace(tool_call_id=f"call-{number}") for number in range(10)]

        def claim_all(order: Sequence[CallKey], run: str) -> list[CallKey]:
            return [key for key in order if swap(store, "", running(key, run)).done]

        won = together(*(lambda n=n: claim_all(keys[n % 10 :] + keys[: n % 10], f"run-{n}") for n in range(16)))
        assert sorted(itertools.chain(*won)) == sorted(keys)

    def test_of_a_finish_and_a_cancels_mark_one_comes_first(self, store: Store) -> None:
        for round_ in range(10):
            key = KEY._replace(tool_call_id=f"call-{round_}")
            claimed = put(store, running(key))
            finish, mark = together(
                partial(swap, store, claimed.version, done(record_of(claimed))),
                partial(swap, store, claimed.version, record_of(claimed)._replace(found=Found.RUNNING)),
            )
            assert finish.done != mark.done
            first, second = (finish, mark) if finish.done else (mark, finish)
            assert second.seen.version == first.seen.version == store.read(key).version
            assert record_of(second.seen) == record_of(first.seen) == record_of(store.read(key))

    def test_of_many_changes_of_one_version_one_wins(self, store: Store) -> None:
        for round_ in range(5):
            key = KEY._replace(tool_call_id=f"call-{round_}")
            claimed = put(store, running(key))
            news = [done(record_of(claimed), b"x" * 4000 * number) for number in range(7)]
            swaps = together(*(partial(swap, store, claimed.version, new, key) for new in [*news, None]))
            assert sum(swapped.done for swapped in swaps) == 1
            (winner,) = [swapped.seen for swapped in swaps if swapped.done]
            there = store.read(key)
            assert (there.version, there.record) == (winner.version, winner.record)

    def test_touches_bring_nothing_back(self, store: Store) -> None:
        for round_ in range(5):
            key = KEY._replace(tool_call_id=f"call-{round_}")
            claimed = put(store, running(key))
            *touched, finished = together(
                *[partial(touch, store, key, repeat=True)] * 8,
                partial(put, store, done(record_of(claimed), EVERY_BYTE * 50), claimed.version),
            )
            there = store.read(key)
            assert (there.version, there.record, there.repeats) == (finished.version, finished.record, 8)
            for seen in touched:
                expected = record_of(claimed if seen.version == claimed.version else finished)
                assert record_of(seen) == expected

    def test_only_one_at_a_time_holds_a_claim(self, store: Store) -> None:
        inside = threading.Lock()
        held: list[str] = []

        def hold(name: str) -> None:
            for number in range(5):
                run = f"{name}-{number}"
                while not (swapped := swap(store, "", running(run=run))).done:
                    store.wait(KEY, swapped.seen.version, UNTIL_WOKEN)
                assert inside.acquire(blocking=False), "two hold the claim"
                assert record_of(store.read(KEY)).run == run
                held.append(run)
                inside.release()
                assert swap(store, swapped.seen.version, None).done

        together(*(lambda name=name: hold(name) for name in "abcdef"))
        assert len(held) == len(set(held)) == 30
        assert store.read(KEY).record is None

    # Processes.

    def test_a_store_is_used_again_after_it_was_closed(self, store: Store) -> None:
        store.close()
        claimed = put(store, running())
        store.close()
        store.close()
        assert store.read(KEY).version == claimed.version

    @needs_fork
    def test_a_child_works_while_its_parent_waits(self, store: Store) -> None:
        claimed = put(store, running())
        waiting = threading.Event()
        key = KEY._replace(tool_call_id="of the child")

        def wait() -> Seen:
            waiting.set()
            return store.wait(KEY, claimed.version, UNTIL_WOKEN)

        def work() -> str:
            seen = put(store, running(key, "run-of-the-child"))
            put(store, done(record_of(seen), EVERY_BYTE * 20), seen.version)
            assert renew(store, claim_of(seen)) == (set(), {"run-of-the-child"})
            store.wait(key, "", LIMIT)
            store.close()
            return "done"

        def fork() -> Seen:
            assert waiting.wait(LIMIT)
            assert [in_child(work) for _ in range(3)][0] == "done"
            assert touch(store).version == claimed.version
            return put(store, done(record_of(claimed)), claimed.version)

        waited, finished = together(wait, fork)
        assert waited.version == finished.version


class SharedStoreContract(StoreContract):
    """What stores of several processes promise besides. `other` is a second store on the same data."""

    @pytest.fixture
    def other(self) -> Iterator[Store]:
        raise NotImplementedError

    @pytest.fixture
    def damage(self) -> Callable[[CallKey, bytes], None]:
        """Replaces the facts that are kept of a call."""
        raise NotImplementedError

    def test_it_is_shared(self, store: Store, other: Store) -> None:
        assert store.shared
        claimed = put(store, running())
        there = other.read(KEY)
        assert there == claimed._replace(now=there.now)
        assert touch(other, repeat=True).repeats == 1
        finished = put(other, done(record_of(claimed), EVERY_BYTE), claimed.version)
        assert touch(store).version == finished.version
        assert renew(other, claim_of(claimed)) == renew(store, claim_of(claimed)) == (set(), {"run-1"})

    def test_a_wait_ends_when_another_process_changes_the_record(self, store: Store, other: Store) -> None:
        claimed = put(store, running())
        waited, finished = together(
            lambda: store.wait(KEY, claimed.version, UNTIL_WOKEN),
            lambda: put(other, done(record_of(claimed)), claimed.version),
        )
        assert waited == finished._replace(now=waited.now)

    def test_of_32_simultaneous_claims_through_two_stores_one_wins(self, store: Store, other: Store) -> None:
        swaps = together(*(lambda n=n: swap((store, other)[n % 2], "", running(run=f"r{n}")) for n in range(32)))
        assert [swapped.done for swapped in swaps].count(True) == 1
        assert len({swapped.seen.version for swapped in swaps}) == 1

    def test_the_age_is_that_of_the_data(self, store: Store, other: Store, advance: Callable[[float], None]) -> None:
        put(store, running())
        advance(500)
        put(other, running(KEY._replace(tool_call_id="call-2")))
        assert 500 <= other.age() < 500 + LIMIT

    # Leases.

    def test_only_a_run_has_a_lease(self, store: Store) -> None:
        claimed = put(store, running())
        assert claimed.lease_until == pytest.approx(claimed.now + LEASE, abs=1)
        assert not claimed.lost
        assert touch(store).lease_until == claimed.lease_until
        marked = put(store, record_of(claimed)._replace(found=Found.RUNNING), claimed.version, lease=2 * LEASE)
        assert marked.lease_until == pytest.approx(marked.now + 2 * LEASE, abs=1)
        finished = put(store, done(record_of(claimed)), marked.version)
        assert finished.lease_until is None
        assert store.read(KEY).lease_until is None
        assert put(store, canceled(), finished.version).lease_until is None

    def test_a_run_whose_lease_has_ended_is_lost(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running())
        advance(LEASE - 5)
        assert not store.read(KEY).lost
        advance(10)
        there = store.read(KEY)
        assert (there.version, there.lost) == (claimed.version, True)
        assert touch(store).lost
        assert store.wait(KEY, claimed.version, 0).lost
        assert [seen.lost for seen in store.list().rows] == [True]

    def test_a_lost_run_is_forgotten_in_the_end(self, store: Store, advance: Callable[[float], None]) -> None:
        put(store, running())
        advance(LEASE + FORGET - 60)
        assert store.read(KEY).lost
        advance(120)
        assert store.read(KEY).record is None
        assert put(store, running(run="run-2")).version

    def test_a_touch_starts_a_lost_runs_idle_time_afresh(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running())
        advance(LEASE + FORGET * 0.75)
        assert touch(store).lost
        advance(FORGET * 0.75)
        assert store.read(KEY).version == claimed.version
        advance(FORGET * 0.5)
        assert store.read(KEY).record is None

    def test_a_touch_never_shortens_a_lease(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running(), lease=5000, forget_after=10)
        touch(store, forget_after=10)
        advance(4990)
        there = store.read(KEY)
        assert (there.version, there.lost) == (claimed.version, False)

    def test_a_renewal_gives_a_fresh_lease(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running())
        advance(LEASE * 0.75)
        renew(store, claim_of(claimed))
        there = store.read(KEY)
        assert there.lease_until == pytest.approx(there.now + LEASE, abs=LIMIT)
        advance(LEASE * 0.75)
        assert not store.read(KEY).lost

    def test_a_renewal_revives_a_run_that_nobody_took_over(
        self, store: Store, advance: Callable[[float], None]
    ) -> None:
        claimed = put(store, running())
        advance(LEASE * 3)
        assert store.read(KEY).lost
        assert renew(store, claim_of(claimed)) == (set(), set())
        assert not store.read(KEY).lost

    def test_a_takeover_waits_for_the_end_of_the_lease(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running())
        early = swap(store, claimed.version, running(run="run-2"), if_lost=True, repeat=True)
        assert early == Swapped(False, claimed._replace(now=early.seen.now, repeats=1))
        advance(LEASE + 1)
        assert not swap(store, "another", running(run="run-2"), if_lost=True).done
        taken = put(store, running(run="run-2"), claimed.version, if_lost=True)
        assert (record_of(taken).run, taken.lost, taken.repeats) == ("run-2", False, 1)
        assert renew(store, claim_of(claimed)) == (set(), {"run-1"})
        late = swap(store, claimed.version, done(record_of(claimed)))
        assert late == Swapped(False, taken._replace(now=late.seen.now))

    def test_nothing_is_taken_over_but_a_run(self, store: Store, advance: Callable[[float], None]) -> None:
        for new in (running(), None):
            assert not swap(store, "", new, if_lost=True).done
        assert store.read(KEY).record is None
        finished = put(store, done(running()))
        advance(LEASE * 2)
        for new in (running(run="run-2"), None):
            assert not swap(store, finished.version, new, if_lost=True).done
        assert store.read(KEY).version == finished.version

    def test_of_16_simultaneous_takeovers_one_wins(self, store: Store, advance: Callable[[float], None]) -> None:
        claimed = put(store, running())
        advance(LEASE + 1)
        swaps = together(
            *(lambda n=n: swap(store, claimed.version, running(run=f"r{n}"), if_lost=True) for n in range(16))
        )
        (winner,) = [swapped.seen for swapped in swaps if swapped.done]
        assert {swapped.seen.version for swapped in swaps} == {winner.version}

    def test_a_takeover_cannot_race_with_a_renewal(self, store: Store, advance: Callable[[float], None]) -> None:
        for round_ in range(10):
            key = KEY._replace(tool_call_id=f"call-{round_}")
            claimed = put(store, running(key))
            advance(LEASE + 1)
            (_, lost), takeover = together(
                partial(renew, store, claim_of(claimed)),
                partial(swap, store, claimed.version, running(key, "run-2"), if_lost=True),
            )
            assert takeover.done == (lost == {"run-1"})
            there = store.read(key)
            assert not there.lost
            assert record_of(there).run == ("run-2" if takeover.done else "run-1")

    def test_of_a_late_finish_and_a_takeover_one_comes_first(
        self, store: Store, advance: Callable[[float], None]
    ) -> None:
        for round_ in range(10):
            key = KEY._replace(tool_call_id=f"call-{round_}")
            claimed = put(store, running(key))
            advance(LEASE + 1)
            finish, takeover = together(
                partial(swap, store, claimed.version, done(record_of(claimed))),
                partial(swap, store, claimed.version, running(key, "run-2"), if_lost=True),
            )
            assert finish.done != takeover.done
            first = finish if finish.done else takeover
            assert store.read(key).version == first.seen.version

    # A record that cannot be read is an error, never "no record".

    @pytest.mark.parametrize("facts", [b"", b"junk", b"\xff\x00", b"[]", b"{}", b'[99,["a","b","c"],"running"]'])
    def test_an_unreadable_record_is_an_error(
        self, store: Store, damage: Callable[[CallKey, bytes], None], facts: bytes
    ) -> None:
        put(store, running())
        damage(KEY, facts)
        for verb in (
            lambda: store.read(KEY),
            lambda: swap(store, "", running(run="run-2")),
            lambda: swap(store, "another", None),
            lambda: store.wait(KEY, "another", 0),
        ):
            with pytest.raises(UnreadableRecord):
                verb()

    # Processes.

    @needs_fork
    def test_parent_and_child_share_records_but_no_connection(self, store: Store) -> None:
        claimed = put(store, running())

        def work() -> str:
            assert touch(store, repeat=True).version == claimed.version
            return put(store, done(record_of(claimed), EVERY_BYTE), claimed.version).version

        version = in_child(work)
        assert touch(store).version == version
        assert store.read(KEY).repeats == 1

        # All at the same time: on a connection that two of them share, answers would go astray.
        def work_hard() -> str:
            for number in range(100):
                key = KEY._replace(tool_call_id=f"{os.getpid()}-{number}")
                assert record_of(put(store, running(key))).key == key
            return "done"

        forks = threading.Semaphore(0)

        def parent() -> str:
            assert forks.acquire(timeout=LIMIT) and forks.acquire(timeout=LIMIT)
            return work_hard()

        child = partial(in_child, work_hard, forked=forks.release)
        assert together(child, child, parent) == ["done"] * 3


class OwnClockContract(SharedStoreContract):
    """What a server's clock is good for. SQLite has none: there all processes are on one host."""

    def test_a_host_whose_clock_is_off_changes_nothing(
        self, store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claimed = put(store, running())
        monkeypatch.setattr("time.time", lambda: 1e10)
        there = other.read(KEY)
        assert not there.lost
        assert there.now == pytest.approx(claimed.now, abs=LIMIT)
        assert renew(other, claim_of(claimed)) == (set(), set())
        assert not swap(other, claimed.version, running(run="run-2"), if_lost=True).done
        finished = put(other, done(record_of(claimed)), claimed.version)
        assert record_of(finished).finished_at == pytest.approx(claimed.now, abs=LIMIT)
        assert other.age() < LIMIT
        monkeypatch.undo()
        assert store.read(KEY).version == finished.version
