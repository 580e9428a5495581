"""What is the SQL store's own. What every store does stands in `store_contract.py`."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from flask_runonce.errors import ConfigError, StoreUnavailable, WrongTable
from flask_runonce.record import NOW, CallKey, Claim, Outcome, Record, SavedResponse, State
from flask_runonce.stores import SQLStore, Swapped, engines, open_store
from flask_runonce.testing.store_contract import in_child, needs_fork, together
from tests.services import LIMIT, PostgresServer, until

KEY = CallKey("tenant", "chat", "call")
LARGE = b"x" * 200_000


def running(key: CallKey = KEY, run: str = "run-1") -> Record:
    return Record(key, State.RUNNING, run)


def done(key: CallKey = KEY, body: bytes = b"saved") -> Record:
    response = SavedResponse("200 OK", (), body)
    return Record(key, State.DONE, "run-1", outcome=Outcome.RESPONSE, response=response, finished_at=NOW)


def numbered(number: int) -> CallKey:
    return KEY._replace(tool_call_id=f"call-{number}")


def swap(store: SQLStore, seen: str, new: Record | None, key: CallKey = KEY, **options: Any) -> Swapped:
    return store.swap(new.key if new else key, seen, new, **{"forget_after": 3600, "lease": 30, **options})


@contextlib.contextmanager
def behind_its_back(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def rows(url: str, query: str) -> list[Any]:
    with behind_its_back(url) as connection:
        return list(connection.execute(sa.text(query)))


def execute(url: str, *statements: str) -> None:
    with behind_its_back(url) as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "runonce.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, file: Path) -> str:
    """A database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{file}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    execute(server.url, "DROP TABLE IF EXISTS runonce_calls, runonce_bodies, runonce_meta")
    return server.url


@pytest.fixture
def store(url: str) -> Iterator[SQLStore]:
    with contextlib.closing(SQLStore(url)) as store:
        yield store


@pytest.fixture
def statements(store: SQLStore) -> list[str]:
    """The first words of the statements that reach the database; the tables are there already."""
    store.age()
    words: list[str] = []
    engine = store._db._engine()
    sa.event.listen(engine, "before_cursor_execute", lambda *event: words.append(event[2].split()[0]))
    return words


def purge_all(store: SQLStore) -> None:
    store._db.do(lambda connection: connection.execute(sa.delete(store._calls)))


# Which databases it takes.


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot share"):
        open_store(url)


def test_an_engine_for_a_database_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot share"):
        SQLStore(sa.create_engine("sqlite://"))


@pytest.mark.parametrize(
    "url, problem",
    [
        ("nosuchthing://host/name", "no database that SQLAlchemy knows"),
        ("sqlite:/runonce.db", "no database that SQLAlchemy knows"),
        ("oracle://host/name", "oracle"),
        ("postgresql+asyncpg://host/name", "asyncio"),
    ],
)
def test_a_database_that_cannot_be_a_store_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SQLStore(url)


def test_postgresql_is_reached_by_psycopg(postgres_server: PostgresServer) -> None:
    with contextlib.closing(open_store(postgres_server.url.replace("+psycopg", ""), prefix="other")) as store:
        assert store.read(KEY).record is None
    assert rows(postgres_server.url, "SELECT count(*) FROM other_meta") == [(1,)]


def test_nothing_is_opened_before_the_first_verb(file: Path) -> None:
    store = SQLStore(f"sqlite:///{file}")
    store.close()
    assert not file.exists()


# Its tables.


def test_a_table_of_another_version_is_told_by_name(store: SQLStore, url: str) -> None:
    swap(store, "", running())
    execute(url, "UPDATE runonce_meta SET version = '99'")
    with contextlib.closing(SQLStore(url)) as other, pytest.raises(WrongTable, match="runonce_calls.*99"):
        swap(other, "", running())


def test_a_table_of_another_kind_is_told_by_name_and_left_alone(store: SQLStore, url: str) -> None:
    execute(url, "CREATE TABLE runonce_calls (id INTEGER)")
    for _ in range(2):
        with pytest.raises(WrongTable, match="runonce_calls"):
            store.read(KEY)
    with pytest.raises(sa.exc.DBAPIError):
        rows(url, "SELECT 1 FROM runonce_meta")
    assert rows(url, "SELECT * FROM runonce_calls") == []


def test_tables_that_went_away_are_made_again(store: SQLStore, url: str) -> None:
    swap(store, "", running())
    execute(url, "DROP TABLE runonce_calls", "DROP TABLE runonce_bodies", "DROP TABLE runonce_meta")
    with pytest.raises(StoreUnavailable):
        swap(store, "", running())
    assert swap(store, "", running()).done
    assert store.age() < LIMIT


def test_prefixes_keep_stores_apart(store: SQLStore, url: str) -> None:
    swap(store, "", running())
    with contextlib.closing(SQLStore(url, prefix="elsewhere")) as other:
        other.purge()
        assert other.read(KEY).record is None
    execute(url, *(f"DROP TABLE elsewhere_{name}" for name in ("calls", "bodies", "meta")))


# What it costs.


def test_a_claim_a_renewal_a_finish_and_a_replay_are_one_statement_each(store: SQLStore, statements: list[str]) -> None:
    swap(store, "", done(numbered(0)))  # the first one tidies
    statements.clear()
    claimed = swap(store, "", running()).seen
    assert statements == ["INSERT"]
    store.renew([Claim(running(), claimed.version)], forget_after=3600, lease=30)
    assert statements == ["INSERT", "UPDATE"]
    assert swap(store, claimed.version, done()).done
    assert statements == ["INSERT", "UPDATE", "UPDATE"]
    assert not swap(store, "", running(run="run-2"), repeat=True).done
    assert statements == ["INSERT", "UPDATE", "UPDATE", "INSERT"]
    assert store.read(KEY).repeats == 1
    assert statements == ["INSERT", "UPDATE", "UPDATE", "INSERT", "SELECT"]


def test_a_large_body_costs_one_statement_more(store: SQLStore, statements: list[str]) -> None:
    claimed = swap(store, "", running()).seen
    statements.clear()
    assert swap(store, claimed.version, done(body=LARGE)).done
    assert [word for word in statements if word != "BEGIN"] == ["UPDATE", "INSERT"]
    statements.clear()
    assert swap(store, "", running(run="run-2")).seen.record == store.read(KEY).record
    assert statements == ["INSERT", "SELECT", "SELECT"]


def test_a_touch_does_not_write_the_body_again(file: Path) -> None:
    with contextlib.closing(SQLStore(f"sqlite:///{file}")) as store:
        swap(store, "", done(body=LARGE))
        checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)"
        assert rows(f"sqlite:///{file}", checkpoint) == [(0, 0, 0)]
        for _ in range(3):
            touched = swap(store, "", running(), repeat=True).seen
        assert touched.record is not None
        assert touched.record.response == done(body=LARGE).response
        written = Path(f"{file}-wal").stat().st_size
        assert 0 < written < len(LARGE) / 2


def test_forgotten_records_are_dropped_a_few_at_a_time(store: SQLStore, url: str) -> None:
    for number in range(150):
        swap(store, "", done(numbered(number), LARGE if number % 10 == 0 else b""))
    execute(url, "UPDATE runonce_calls SET expires_at = expires_at - 4000")
    finished = sa.text("SELECT count(*) FROM runonce_calls WHERE lease_until IS NULL")

    def forgotten() -> int:
        return store._db.do(lambda connection: connection.scalar(finished)) or 0

    left = [forgotten()]
    for number in range(150, 250):
        swap(store, "", running(numbered(number)))
        left.append(forgotten())
    dropped = [before - after for before, after in itertools.pairwise(left)]
    assert (left[0], left[-1]) == (150, 0)
    assert max(dropped) <= 32
    assert dropped.count(0) > 90
    assert rows(url, "SELECT count(*) FROM runonce_calls") == [(100,)]
    assert rows(url, "SELECT count(*) FROM runonce_bodies") == [(0,)]


def test_a_record_that_cannot_be_dropped_does_not_fail_the_swap(
    store: SQLStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(connection: sa.Connection) -> int:
        raise StoreUnavailable("not now")

    monkeypatch.setattr(store, "_tidy", fail)
    assert swap(store, "", running()).done
    assert "not now" in caplog.text


# SQLite.


def test_sqlite_keeps_a_log(file: Path) -> None:
    with contextlib.closing(SQLStore(f"sqlite:///{file}")) as store:
        store.age()
        with store._db._engine().connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1
    assert rows(f"sqlite:///{file}", "PRAGMA journal_mode") == [("wal",)]


def test_a_file_that_stays_locked_is_unavailable_until_it_is_free(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "BUSY", 0.05)
    url = f"sqlite:///{file}"
    with contextlib.closing(SQLStore(url)) as store:
        claimed = swap(store, "", running()).seen
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked"):
                swap(store, claimed.version, done())
            assert store.read(KEY).version == claimed.version
            connection.rollback()
        engine.dispose()
        assert swap(store, claimed.version, done()).done


def test_no_thread_waits_for_a_connection_to_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of more threads than the pool keeps connections holds one, and none lets go before all have one."""
    monkeypatch.setattr(engines, "LIMIT", 0)  # whoever had to wait would give up at once
    with contextlib.closing(SQLStore(f"sqlite:///{file}")) as store:
        store.age()
        threads = 30
        all_have_one = threading.Barrier(threads)

        def hold() -> int:
            return store._db.do(lambda connection: all_have_one.wait(LIMIT))

        assert sorted(together(*[hold] * threads)) == list(range(threads))


@needs_fork
def test_a_fork_waits_for_the_end_of_a_transaction(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own locks would be held in the child for ever, by a thread that is not there."""
    monkeypatch.setattr(engines, "BUSY", 0.05)
    with contextlib.closing(SQLStore(f"sqlite:///{file}")) as store:
        store.age()
        inside, forking = threading.Event(), threading.Event()
        os.register_at_fork(before=forking.set)  # what is registered last is called first

        def hold() -> None:
            store._db.do(lambda connection: inside.set() or forking.wait(LIMIT), whole=True)

        def fork() -> str:
            assert inside.wait(LIMIT)
            return in_child(lambda: str(swap(store, "", running()).done))

        assert together(hold, fork) == [None, "True"]
        assert store.read(KEY).record


# Connections.


def test_an_app_that_holds_all_its_connections_does_not_stop_the_store(postgres_server: PostgresServer) -> None:
    engine = sa.create_engine(postgres_server.url, pool_size=2, max_overflow=0, pool_timeout=0.1)
    with contextlib.closing(SQLStore(engine)) as store:
        purge_all(store)

        def view(key: CallKey) -> Swapped:
            # As an app's session does, until the request ends, after the answer was saved.
            with engine.connect() as connection:
                connection.execute(sa.text("SELECT 1"))
                claimed = swap(store, "", running(key)).seen
                both.wait(LIMIT)
                finished = swap(store, claimed.version, done(key))
                both.wait(LIMIT)
                return finished

        both = threading.Barrier(2)
        first, second = together(lambda: view(numbered(1)), lambda: view(numbered(2)))
        assert first.done
        assert second.done
        assert engine.pool.status().endswith("Current Checked out connections: 0")
    engine.dispose()


def test_the_store_takes_one_connection_at_a_time_and_none_while_it_waits(postgres_server: PostgresServer) -> None:
    """On a pool of one: a second connection, or one kept while waiting, would be refused."""
    engine = sa.create_engine(postgres_server.url, pool_size=1, max_overflow=0, pool_timeout=LIMIT)
    with contextlib.closing(SQLStore(engine)) as store:
        purge_all(store)
        claimed = swap(store, "", running()).seen
        waiters = [lambda: store.wait(KEY, claimed.version, LIMIT).version] * 8
        *waited, finished = together(*waiters, lambda: swap(store, claimed.version, done(body=LARGE)).seen.version)
        assert waited == [finished] * 8
    engine.dispose()


def test_an_engine_gives_its_settings_but_not_its_connections(postgres_server: PostgresServer) -> None:
    engine = sa.create_engine(postgres_server.url, connect_args={"application_name": "the app"})
    with contextlib.closing(SQLStore(engine)) as store:
        names = store._db.do(lambda connection: connection.scalar(sa.text("SHOW application_name")))
        assert names == "the app"
        assert engine.pool.status().startswith("Pool size: 5  Connections in pool: 0")
    engine.dispose()


def test_a_child_has_connections_of_its_own(postgres_server: PostgresServer) -> None:
    def backend() -> str:
        return str(store._db.do(lambda connection: connection.scalar(sa.text("SELECT pg_backend_pid()"))))

    engine = sa.create_engine(postgres_server.url)
    for store in (SQLStore(postgres_server.url), SQLStore(engine)):
        before = backend()
        assert in_child(backend) not in ("", before)
        assert backend() == before
        store.close()
    engine.dispose()


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/New_York"])
def test_the_clock_is_the_servers_in_any_time_zone(postgres_server: PostgresServer, zone: str) -> None:
    with contextlib.closing(SQLStore(f"{postgres_server.url}?options=-c timezone={zone}")) as store:
        store._db._clock = lambda: 0.0  # a host that is far off
        assert abs(store.read(KEY).now - time.time()) < LIMIT


# One transaction, the app's.


@pytest.mark.parametrize("body", [b"saved", LARGE])
def test_a_swap_can_be_part_of_another_transaction(store: SQLStore, url: str, body: bytes) -> None:
    claimed = swap(store, "", running()).seen
    engine = sa.create_engine(url)

    def finish(connection: sa.Connection) -> Swapped:
        return store._swap(
            connection,
            key=KEY,
            seen=claimed.version,
            new=done(body=body),
            version="0123456789abcdef",
            forget_after=3600,
            lease=30,
        )

    with engine.connect() as connection:
        assert finish(connection).done
        connection.rollback()
    assert store.read(KEY).version == claimed.version
    with engine.connect() as connection:
        finished = finish(connection)
        connection.commit()
    engine.dispose()
    there = store.read(KEY)
    assert (there.version, there.record) == ("0123456789abcdef", finished.seen.record)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("body", [b"saved", LARGE])
def test_a_swap_whose_answer_was_lost_knows_its_own_record(store: SQLStore, body: bytes, seen: bool) -> None:
    version = swap(store, "", running()).seen.version if seen else ""
    answers: list[Swapped] = []

    def twice(connection: sa.Connection) -> None:
        for _ in range(2):
            swapped = store._swap(
                connection, key=KEY, seen=version, new=done(body=body), version="ours", forget_after=3600, lease=30
            )
            answers.append(swapped)

    store._db.do(twice, whole=True)
    first, second = answers
    assert first.done
    assert second == first._replace(seen=first.seen._replace(now=second.seen.now))


@pytest.mark.parametrize("ends", [3, 100])
def test_work_that_the_server_undid_is_done_again_a_few_times(store: SQLStore, ends: int) -> None:
    attempts: list[int] = []

    def work(connection: sa.Connection) -> int:
        attempts.append(0)
        if len(attempts) < ends:
            raise sa.exc.OperationalError("INSERT", {}, Exception(1213, "Deadlock found"))
        return len(attempts)

    if ends == 3:
        assert store._db.do(work) == 3
    else:
        with pytest.raises(StoreUnavailable, match="Deadlock"):
            store._db.do(work)


# Processes, from the first moment of an empty database on.


def claim_all(url: str, number: int, start: Barrier, report: Any) -> None:
    """What each of several processes does: eight threads claim the same calls at the same moment."""
    with contextlib.closing(SQLStore(url)) as store:

        def claim(thread: int) -> list[str]:
            won = []
            for round_ in range(ROUNDS):
                claimed = swap(store, "", running(numbered(round_), f"run-{number}-{thread}"))
                if claimed.done:
                    won.append(f"call-{round_}")
                    finished = swap(store, claimed.seen.version, done(numbered(round_), LARGE if round_ % 2 else b""))
                    assert finished.done
                else:
                    seen = store.wait(numbered(round_), claimed.seen.version, 0.01)
                    assert seen.record
            return won

        start.wait(LIMIT)
        try:
            report.put(sum(together(*(lambda thread=thread: claim(thread) for thread in range(8))), []))
        except BaseException as error:
            report.put([repr(error)])


ROUNDS = 10


def test_of_32_claims_in_4_processes_one_wins_and_nothing_is_locked(url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    start, report = spawn.Barrier(4), spawn.Queue()
    processes = [spawn.Process(target=claim_all, args=(url, number, start, report)) for number in range(4)]
    for process in processes:
        process.start()
    won = sum((report.get(timeout=LIMIT) for _ in processes), [])
    for process in processes:
        process.join(LIMIT)
        process.close()
    report.close()
    report.join_thread()
    assert sorted(won) == sorted(f"call-{round_}" for round_ in range(ROUNDS))


# A server that is away.


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with contextlib.closing(SQLStore("postgresql://postgres@127.0.0.1:1/none")) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                store.read(KEY)


def test_a_server_that_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LIMIT", 2)  # as little as libpq takes
    with PostgresServer() as server, contextlib.closing(SQLStore(server.url)) as store:
        claimed = swap(store, "", running()).seen

        server.restart()
        assert store.read(KEY).version == claimed.version, "a restart goes by unnoticed"

        with server.connect() as connection, connection.transaction():
            connection.execute("LOCK TABLE runonce_calls")
            with pytest.raises(StoreUnavailable, match="timeout"):
                swap(store, claimed.version, done())
        assert store.read(KEY).version == claimed.version

        server.pause()
        for _ in range(2):  # on the connection that it has, and on a new one
            with pytest.raises(StoreUnavailable):
                swap(store, claimed.version, done())
        server.resume()
        until(lambda: store.wait(KEY, claimed.version, 0), "the store is usable again")

        server.kill()
        with pytest.raises(StoreUnavailable):
            store.read(KEY)
        server.start()
        assert store.read(KEY).record
