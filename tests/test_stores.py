"""The contract of stores, on every store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, inspect, text

from flask_runonce.record import CallKey
from flask_runonce.stores import MemoryStore, RedisStore, SQLStore, Store
from flask_runonce.testing import Clock, OwnClockContract, SharedStoreContract, StoreContract
from flask_runonce.testing.store_contract import KEY, in_child, put, running
from tests.services import PostgresServer, RedisCluster, RedisServer


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def store(self, clock: Clock) -> Store:
        return MemoryStore(timer=clock)

    @pytest.fixture
    def advance(self, clock: Clock) -> Callable[[float], None]:
        return clock.advance

    def test_a_child_starts_with_nothing(self, store: Store) -> None:
        put(store, running())
        assert in_child(lambda: store.read(KEY).version) == ""
        assert store.read(KEY).version


class SQLContract(SharedStoreContract):
    """Moves the store's clock by moving what it has kept back."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        store = SQLStore(url)
        yield store
        store.close()

    @pytest.fixture
    def other(self, url: str) -> Iterator[Store]:
        store = SQLStore(url)
        yield store
        store.close()

    @pytest.fixture
    def execute(self, url: str) -> Iterator[Callable[..., None]]:
        engine = create_engine(url)

        def execute(statement: str, **values: Any) -> None:
            with engine.begin() as connection:
                connection.execute(text(statement), values)

        yield execute
        engine.dispose()

    @pytest.fixture
    def advance(self, execute: Callable[..., None]) -> Callable[[float], None]:
        def advance(seconds: float) -> None:
            times = ("created_at", "finished_at", "lease_until", "expires_at")
            execute(f"UPDATE runonce_calls SET {', '.join(f'{name} = {name} - :s' for name in times)}", s=seconds)
            execute("UPDATE runonce_meta SET since = since - :s", s=seconds)

        return advance

    @pytest.fixture
    def damage(self, execute: Callable[..., None]) -> Callable[[CallKey, bytes], None]:
        def damage(key: CallKey, facts: bytes) -> None:
            execute("UPDATE runonce_calls SET facts = :facts WHERE digest = :digest", facts=facts, digest=key.digest)

        return damage


class TestSQLite(SQLContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'runonce.db'}"


class TestSQLiteWithoutReturning(TestSQLite):
    """As it was before 3.35. Also the way of MySQL and MariaDB, on which these tests seldom run."""

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        yield from _without_returning(url)

    @pytest.fixture
    def other(self, url: str) -> Iterator[Store]:
        yield from _without_returning(url)


def _without_returning(url: str) -> Iterator[Store]:
    engine = create_engine(url)
    engine.dialect.update_returning = False
    store = SQLStore(engine)
    yield store
    store.close()
    engine.dispose()


class TestPostgreSQL(SQLContract, OwnClockContract):
    @pytest.fixture
    def url(self, postgres_server: PostgresServer) -> str:
        _drop_tables(postgres_server.url)
        return postgres_server.url


if MYSQL_URL := os.environ.get("RUNONCE_TEST_MYSQL_URL"):

    class TestMySQL(SQLContract, OwnClockContract):
        @pytest.fixture
        def url(self) -> str:
            """An empty database on a MySQL or MariaDB server, which the tests cannot bring along."""
            _drop_tables(MYSQL_URL)
            return MYSQL_URL


def _drop_tables(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for name in inspect(connection).get_table_names():
            if name.startswith("runonce_"):
                connection.execute(text(f"DROP TABLE {name}"))
    engine.dispose()


class RedisContract(OwnClockContract):
    """Moves the store's clock by moving what it has kept back, and by ending what has had its time."""

    forgets_by_itself = True

    @pytest.fixture
    def client(self) -> Any:
        """A client for a look behind the store's back; what it is connected to is empty."""
        raise NotImplementedError

    @pytest.fixture
    def advance(self, client: Any) -> Callable[[float], None]:
        def advance(seconds: float) -> None:
            for name in list(client.scan_iter()):
                left = client.pttl(name) - int(seconds * 1000)
                assert client.pttl(name) > 0, "a key without an end"
                if left <= 0:
                    client.delete(name)
                    continue
                if client.type(name) == b"hash":
                    for field in ("created", "finished", "lease"):
                        if value := client.hget(name, field):
                            client.hset(name, field, repr(float(value) - seconds))
                elif client.type(name) == b"zset":
                    for member in client.zrange(name, 0, -1):
                        client.zincrby(name, -seconds, member)
                client.pexpire(name, left)

        return advance

    @pytest.fixture
    def damage(self, client: Any) -> Callable[[CallKey, bytes], None]:
        def damage(key: CallKey, facts: bytes) -> None:
            assert client.hset(f"runonce:{{{key.digest}}}", "facts", facts) == 0

        return damage


class TestRedis(RedisContract):
    @pytest.fixture
    def client(self, redis_server: RedisServer) -> Iterator[redis.Redis]:
        with redis_server.client() as client:
            client.flushall()
            yield client

    @pytest.fixture
    def store(self, redis_server: RedisServer, client: redis.Redis) -> Iterator[Store]:
        store = RedisStore(redis_server.url)
        yield store
        store.close()

    @pytest.fixture
    def other(self, redis_server: RedisServer) -> Iterator[Store]:
        with redis_server.client() as own:
            yield RedisStore(own)


class TestRedisThatDecodes(TestRedis):
    """On a client of the app's own, made with `decode_responses`."""

    @pytest.fixture
    def store(self, redis_server: RedisServer, client: redis.Redis) -> Iterator[Store]:
        with redis_server.client(decode_responses=True) as own:
            yield RedisStore(own)


class TestRedisCluster(RedisContract):
    @pytest.fixture
    def client(self, redis_cluster: RedisCluster) -> Iterator[redis.RedisCluster]:
        with redis_cluster.client() as client:
            client.flushall()
            yield client

    @pytest.fixture
    def store(self, redis_cluster: RedisCluster, client: redis.RedisCluster) -> Iterator[Store]:
        with redis_cluster.client() as own:
            yield RedisStore(own)

    @pytest.fixture
    def other(self, redis_cluster: RedisCluster) -> Iterator[Store]:
        with redis_cluster.client(decode_responses=True) as own:
            yield RedisStore(own)
