"""What is a Redis store's own: its keys, its trips, and what becomes of a call when Redis is full, slow or away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from flask_runonce.errors import ConfigError, StoreFull, StoreUnavailable, UnreadableRecord
from flask_runonce.record import CallKey, Found, Record, Seen
from flask_runonce.stores import RedisStore, Store, open_store
from flask_runonce.stores import redis as redis_store
from flask_runonce.testing.store_contract import (
    EVERY_BYTE,
    FORGET,
    KEY,
    LEASE,
    UNTIL_WOKEN,
    canceled,
    claim_of,
    done,
    put,
    record_of,
    renew,
    running,
    swap,
    together,
    touch,
)
from tests.services import LIMIT, RedisServer, free_port, until

NAME = f"runonce:{{{KEY.digest}}}"


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def store(redis_server: RedisServer, client: redis.Redis) -> Iterator[RedisStore]:
    store = RedisStore(redis_server.url)
    yield store
    store.close()


class Wire(redis.Connection):
    """A connection that counts what is sent, and loses the replies that it is told to lose."""

    trips = 0
    lose = 0

    def send_packed_command(self, *args: Any, **options: Any) -> None:
        Wire.trips += 1
        super().send_packed_command(*args, **options)

    def read_response(self, *args: Any, **options: Any) -> Any:
        reply = super().read_response(*args, **options)
        if Wire.lose:
            Wire.lose -= 1
            self.disconnect()
            raise redis.TimeoutError("the reply is lost")
        return reply


def wired(server: RedisServer, retries: int = 0) -> tuple[RedisStore, redis.ConnectionPool]:
    """A store on a `Wire`, which is connected, and its pool."""
    Wire.trips = Wire.lose = 0
    pool = redis.ConnectionPool(
        connection_class=Wire,
        port=server.port,
        retry=Retry(NoBackoff(), retries),
        retry_on_timeout=True,
    )
    store = RedisStore(redis.Redis(connection_pool=pool))
    put(store, canceled(KEY._replace(chat_id="warm")))
    swap(store, "none", None)
    store.read(KEY)
    store.renew([claim_of(store.read(KEY._replace(chat_id="warm")))], forget_after=FORGET, lease=LEASE)
    return store, pool


# Keys.


def test_every_key_has_an_end(store: Store, client: redis.Redis) -> None:
    def left() -> float:
        return client.pttl(NAME) / 1000

    claimed = put(store, running())
    assert left() == pytest.approx(FORGET + LEASE, abs=LIMIT)
    touch(store)
    assert left() == pytest.approx(FORGET + LEASE, abs=LIMIT)
    renew(store, claim_of(claimed))
    finished = put(store, done(record_of(claimed)), claimed.version)
    assert FORGET - LIMIT < left() <= FORGET
    put(store, canceled(), finished.version)
    assert FORGET - LIMIT < left() <= FORGET
    put(store, canceled(KEY._replace(chat_id="other")))
    names = list(client.scan_iter())
    assert len(names) == 5
    assert all(client.pttl(name) > 0 for name in names)


def test_a_prefix_keeps_stores_apart(redis_server: RedisServer, client: redis.Redis) -> None:
    stores = [RedisStore(redis_server.url, prefix=prefix) for prefix in ("a", "a*", "a[b]", "a\\", "?", "{a}")]
    for number, store in enumerate(stores):
        put(store, running(run=f"run-{number}"))
    for number, store in enumerate(stores):
        for filters in ({}, {"scope": KEY.scope, "chat_id": KEY.chat_id}):
            (seen,) = store.list(**filters).rows
            assert record_of(seen).run == f"run-{number}"
        store.close()
    assert len(client.keys()) == 3 * len(stores)


@pytest.mark.parametrize("value", ["junk", {"field": "value"}, {"version": "0123456789abcdef"}])
def test_what_is_not_a_record_is_an_error(store: Store, client: redis.Redis, value: Any) -> None:
    if isinstance(value, str):
        client.set(NAME, value)
    else:
        client.hset(NAME, mapping=value)
    there = client.dump(NAME)
    for verb in (lambda: store.read(KEY), lambda: swap(store, "", running()), lambda: swap(store, "another", None)):
        with pytest.raises(UnreadableRecord):
            verb()
    assert client.dump(NAME) == there


def test_a_chats_list_is_tidied_a_few_at_a_time(store: Store, client: redis.Redis) -> None:
    put(store, canceled())
    (name,) = client.keys("runonce:chat:*")
    client.zadd(name, {f"forgotten-{number}": number for number in range(100)})
    assert store.list(scope=KEY.scope, chat_id=KEY.chat_id).total == 1
    before = client.zcard(name)
    touch(store)
    assert 0 < before - client.zcard(name) < 10
    assert store.list(scope=KEY.scope, chat_id=KEY.chat_id).total == 1


def test_a_chats_list_lives_as_long_as_its_calls(store: Store, client: redis.Redis) -> None:
    put(store, running(), lease=5000)
    touch(store)
    put(store, canceled(KEY._replace(tool_call_id="another")), forget_after=1)
    (name,) = client.keys("runonce:chat:*")
    assert client.pttl(name) >= client.pttl(NAME) - 1000
    assert client.zscore(name, KEY.digest) - client.time()[0] >= client.pttl(NAME) / 1000 - LIMIT


def test_a_touch_does_not_write_the_body_again(redis_server: RedisServer, store: Store, client: redis.Redis) -> None:
    put(store, done(running(), EVERY_BYTE * 1000))
    size = client.info("persistence")["aof_current_size"]
    for _ in range(10):
        touch(store, repeat=True)
    assert client.info("persistence")["aof_current_size"] - size < 10_000


def test_the_age_starts_afresh_when_the_data_are_lost(store: Store, client: redis.Redis) -> None:
    assert store.age() == 0
    put(store, canceled())
    client.pexpire("runonce:since", client.pttl("runonce:since") - 1_000_000)
    assert store.age() >= 1000
    client.flushall()
    assert store.age() == 0
    put(store, canceled())
    assert 0 <= store.age() < LIMIT


# Trips.


def test_each_verb_is_one_trip(redis_server: RedisServer, client: redis.Redis) -> None:
    store, pool = wired(redis_server)
    claimed = swap(store, "", running()).seen
    claims = [claim_of(put(store, running(KEY._replace(tool_call_id=f"call-{n}"), f"run-{n}"))) for n in range(20)]
    for verb in (
        lambda: put(store, running(KEY._replace(tool_call_id="another"))),
        lambda: touch(store, repeat=True),
        lambda: renew(store, claim_of(claimed), *claims),
        lambda: put(store, done(record_of(claimed), EVERY_BYTE), claimed.version),
        lambda: touch(store),
        lambda: swap(store, store.read(KEY).version, None),
    ):
        before = Wire.trips
        verb()
        assert Wire.trips - before == (2 if "read" in verb.__code__.co_names else 1)
    pool.disconnect()


def test_a_server_that_forgot_the_scripts_is_told_them(store: Store, client: redis.Redis) -> None:
    claimed = put(store, running())
    client.script_flush()
    assert touch(store, repeat=True).repeats == 1
    client.script_flush()
    assert renew(store, claim_of(claimed)) == (set(), set())
    client.script_flush()
    assert store.read(KEY).version == claimed.version
    client.script_flush()
    assert put(store, done(record_of(claimed)), claimed.version).repeats == 1
    assert store.list(scope=KEY.scope, chat_id=KEY.chat_id).total == 1


@pytest.mark.parametrize("seen", ["nothing", "a version"])
def test_a_swap_whose_reply_was_lost_knows_its_own_record(
    redis_server: RedisServer, client: redis.Redis, seen: str
) -> None:
    store, pool = wired(redis_server, retries=1)
    there = put(store, running()) if seen == "a version" else Seen(None, "", 0)
    new = done(record_of(there)) if there.record else running()
    Wire.lose = 1
    swapped = swap(store, there.version, new, repeat=True)
    assert Wire.lose == 0
    assert swapped.done
    assert swapped.seen == store.read(KEY)._replace(now=swapped.seen.now)
    assert swapped.seen.repeats == 0
    pool.disconnect()


def test_without_a_retry_a_lost_reply_is_an_error(redis_server: RedisServer, client: redis.Redis) -> None:
    store, pool = wired(redis_server)
    Wire.lose = 1
    with pytest.raises(StoreUnavailable):
        swap(store, "", running())
    assert record_of(store.read(KEY)) == record_of(touch(store))
    pool.disconnect()


# Waiting.


@pytest.mark.parametrize("subscribed", [True, False])
def test_a_change_is_heard_at_once(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, subscribed: bool
) -> None:
    """Whether it comes while somebody waits, or while he is about to."""
    monkeypatch.setattr(redis_store, "_POLL", UNTIL_WOKEN)
    for number in range(12):
        key = KEY._replace(tool_call_id=f"call-{number}")
        claimed = put(store, running(key))
        new = (done(record_of(claimed)), record_of(claimed)._replace(found=Found.RUNNING), None)[number % 3]

        def change(key: CallKey = key, there: Seen = claimed, new: Record | None = new) -> Seen:
            if subscribed:
                until(lambda: client.pubsub_numsub(f"runonce:{{{key.digest}}}")[0][1] == 1, "nobody waits")
            return swap(store, there.version, new, key).seen

        waited, changed = together(partial(store.wait, key, claimed.version, UNTIL_WOKEN), change)
        assert waited.version == changed.version


def test_a_change_that_was_not_told_is_found(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_POLL", 0.05)
    claimed = put(store, running())

    def forget() -> None:
        until(lambda: client.pubsub_numsub(NAME)[0][1] == 1, "nobody waits")
        client.delete(NAME)

    waited, _ = together(partial(store.wait, KEY, claimed.version, UNTIL_WOKEN), forget)
    assert waited.record is None


def test_nothing_stays_subscribed(store: Store, client: redis.Redis) -> None:
    claimed = put(store, running())
    together(*[partial(store.wait, KEY, claimed.version, 0.01)] * 8)
    until(lambda: client.pubsub_numsub(NAME)[0][1] == 0, "a waiter stays subscribed")


# A server that is full, slow, away, or not ours to command.


def test_a_full_server_refuses_only_new_calls() -> None:
    with RedisServer(forgetful=True) as server, server.client() as client:
        store = RedisStore(server.url)
        claims = [put(store, running(KEY._replace(tool_call_id=f"call-{n}"), f"run-{n}")) for n in range(4)]
        finished = put(store, done(running(), EVERY_BYTE))
        client.config_set("maxmemory", 1)
        for new in (running(KEY._replace(tool_call_id="new")), canceled(KEY._replace(tool_call_id="new"))):
            with pytest.raises(StoreFull):
                swap(store, "", new)
            assert store.read(new.key).record is None
        assert touch(store, repeat=True).repeats == 1
        assert renew(store, *map(claim_of, claims)) == (set(), set())
        marked = put(store, record_of(claims[0])._replace(found=Found.RUNNING), claims[0].version)
        put(store, done(record_of(marked), EVERY_BYTE * 1000), marked.version)
        assert swap(store, claims[1].version, None, record_of(claims[1]).key).done
        assert put(store, record_of(finished)._replace(found=Found.DONE), finished.version).repeats == 1
        assert store.list(scope=KEY.scope, chat_id=KEY.chat_id).total == 4
        client.config_set("maxmemory", 0)
        put(store, running(KEY._replace(tool_call_id="new")))
        store.close()


def each_verb(store: Store) -> list[Callable[[], Any]]:
    claimed = Seen(running(), "0123456789abcdef", 0)
    return [
        lambda: store.read(KEY),
        lambda: swap(store, "", running()),
        lambda: swap(store, "another", None),
        lambda: renew(store, claim_of(claimed)),
        lambda: store.wait(KEY, "", 0.01),
        lambda: store.list(),
        lambda: store.list(scope="", chat_id="chat"),
        lambda: store.age(),
    ]


def test_a_store_connects_when_it_is_first_used() -> None:
    store = RedisStore(f"redis://127.0.0.1:{free_port()}")
    store.close()
    for verb in each_verb(store):
        with pytest.raises(StoreUnavailable):
            verb()
    store.close()


def test_a_cluster_that_is_down() -> None:
    with RedisServer("--cluster-enabled", "yes", forgetful=True) as server, server.client() as own:
        store = RedisStore(own)
        for verb in (lambda: store.read(KEY), lambda: swap(store, "", running()), lambda: store.wait(KEY, "", 0)):
            with pytest.raises(StoreUnavailable):
                verb()


def test_a_server_that_goes_and_comes_back() -> None:
    with RedisServer() as server:
        store = RedisStore(f"{server.url}?socket_timeout=0.3")
        claimed = put(store, running())
        for away, back in ((server.stop, server.start), (server.kill, server.start), (server.pause, server.resume)):
            away()
            for verb in each_verb(store):
                with pytest.raises(StoreUnavailable):
                    verb()
            back()
            assert touch(store).version == claimed.version
            assert renew(store, claim_of(claimed)) == (set(), set())
        store.close()


def test_who_waits_is_told_that_the_server_went() -> None:
    with RedisServer() as server, server.client() as client:
        store = RedisStore(server.url)
        claimed = put(store, running())

        def wait() -> None:
            with pytest.raises(StoreUnavailable):
                store.wait(KEY, claimed.version, UNTIL_WOKEN)

        def kill() -> None:
            until(lambda: client.pubsub_numsub(NAME)[0][1] == 4, "nobody waits")
            server.kill()

        together(wait, wait, wait, wait, kill)
        store.close()


def test_a_replica_is_not_written_to() -> None:
    with RedisServer(forgetful=True) as server, server.client() as client:
        client.replicaof("127.0.0.1", free_port())
        store = RedisStore(server.url)
        with pytest.raises(StoreUnavailable):
            swap(store, "", running())
        store.close()


def test_a_user_without_rights_of_an_administrator(redis_server: RedisServer, client: redis.Redis) -> None:
    client.acl_setuser("app", enabled=True, passwords=["+secret"], keys=["runonce:*"], commands=["+@all", "-@admin"])
    client.execute_command("ACL SETUSER", "app", "-info", "-config", "resetchannels")
    store = RedisStore(redis_server.url.replace("redis://", "redis://app:secret@"))
    claimed = put(store, running())
    put(store, done(record_of(claimed)), claimed.version)
    assert touch(store, repeat=True).repeats == 1
    store.close()
    client.acl_deluser("app")


@pytest.mark.parametrize(
    ("policy", "warnings"), [("noeviction", 0), ("volatile-lru", 1), ("allkeys-lru", 1), ("volatile-ttl", 1)]
)
def test_it_warns_once_where_records_may_be_evicted(
    client: redis.Redis, store: Store, caplog: pytest.LogCaptureFixture, policy: str, warnings: int
) -> None:
    client.config_set("maxmemory-policy", policy)
    try:
        with caplog.at_level(logging.INFO, logger="flask_runonce"):
            keys = [KEY._replace(tool_call_id=f"call-{number}") for number in range(8)]
            together(*(partial(swap, store, "", running(key)) for key in keys))
            store.read(KEY)
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert all(policy in record.getMessage() for record in caplog.records)


# Making one.


@pytest.mark.parametrize("url", ["redis://host:port/0", "http://127.0.0.1", "redis://127.0.0.1/0?socket_timeout=soon"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="RUNONCE_STORE_URI"):
        RedisStore(url)


def test_a_uri_opens_one(redis_server: RedisServer, client: redis.Redis) -> None:
    store = open_store(redis_server.url, prefix="app")
    assert isinstance(store, RedisStore)
    put(store, running(CallKey("", "c", "t")))
    assert all(name.startswith(b"app:") for name in client.scan_iter())
    store.close()


def test_a_unix_socket() -> None:
    with RedisServer("--unixsocket", "socket", forgetful=True) as server:
        store = open_store(f"unix://{server.folder}/socket")
        put(store, running())
        assert store.wait(KEY, "", 0).record
        store.close()


def test_a_given_client_stays_open(redis_server: RedisServer, client: redis.Redis) -> None:
    connection = client.client_id()
    store = RedisStore(client)
    put(store, running())
    store.close()
    assert client.client_id() == connection
