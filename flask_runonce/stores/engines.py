"""SQLAlchemy engines for the SQL store: which databases it takes, and how long it lets them keep a request waiting."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Generator
from typing import Any, TypeVar

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from ..errors import ConfigError

LIMIT = 3
"""Seconds that a server of ours may take to connect, to answer a statement, or to have a connection free."""
BUSY = 5
"""Seconds that a process waits for its turn to write to an SQLite file."""

T = TypeVar("T")


def checked_url(url: str | URL) -> URL:
    """`url` as SQLAlchemy understands it, with psycopg for PostgreSQL where it names no driver. Connects to nothing.

    Raises `ConfigError` for a database that cannot be a store, ImportError without psycopg where it is needed.
    """
    try:
        url = make_url(url)
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        is_async = url.get_dialect().is_async
    except ArgumentError as error:
        raise _wrong("names no database that SQLAlchemy knows") from error
    if is_async:
        raise _wrong(f"names an asyncio driver ({url.drivername}), which WSGI apps cannot use")
    check_backend(url)
    # Looked for, not imported: imported before gevent patches, it would block the whole worker while it waits.
    if url.get_driver_name() == "psycopg" and importlib.util.find_spec("psycopg") is None:
        raise ImportError("The SQL store needs psycopg for PostgreSQL: pip install 'psycopg[binary]'")
    return url


def check_backend(url: URL) -> None:
    """Raise `ConfigError` for a database that cannot be a store."""
    backend = url.get_backend_name()
    if backend not in ("sqlite", "postgresql", "mysql", "mariadb"):
        raise _wrong(f"names {backend}; the SQL store knows SQLite, PostgreSQL, MySQL and MariaDB")
    database = url.database or ":memory:"
    in_memory = database == ":memory:" or database.startswith("file::memory:") or url.query.get("mode") == "memory"
    if backend == "sqlite" and in_memory:
        raise _wrong(
            "names an in-memory SQLite database, which connections and processes cannot share: "
            "name a file (sqlite:///runonce.db), or use memory:// in a single process"
        )


def open_engine(url: URL) -> Engine:
    """A new engine for `url`, with limits: a server that does not answer is an error within seconds."""
    backend = url.get_backend_name()
    options: dict[str, Any] = {"pool_timeout": LIMIT, "hide_parameters": True}
    limits: dict[str, Any] = {}
    if backend == "sqlite":
        limits = {"timeout": BUSY}
        options["max_overflow"] = -1  # a connection is cheap: nobody needs to wait for one, or to fail without
    elif backend == "postgresql" and url.get_driver_name() in ("psycopg", "psycopg2"):
        limits = {"connect_timeout": LIMIT, "options": f"-c statement_timeout={LIMIT}s"}
    elif backend in ("mysql", "mariadb"):
        # The default, repeatable read, would show a statement the past, and lock gaps between keys.
        options["isolation_level"] = "READ COMMITTED"
        if url.get_driver_name() in ("pymysql", "mysqldb"):
            limits = {"connect_timeout": LIMIT, "read_timeout": LIMIT, "write_timeout": LIMIT}
    engine = create_engine(
        url, connect_args={name: value for name, value in limits.items() if name not in url.query}, **options
    )
    if backend == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    elif url.get_driver_name() == "psycopg":
        event.listen(engine, "do_connect", _connect_psycopg)
    return engine


def own_engine(engine: Engine) -> Engine:
    """An engine like `engine`, with connections of its own.

    On the app's connections, requests that hold one until they end would wait for each other: each needs another one
    to save its answer.
    """
    return Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=True)


def _wrong(problem: str) -> ConfigError:
    return ConfigError("RUNONCE_STORE_URI", problem)


def _prepare_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    deadline = time.monotonic() + BUSY
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            break
        except Exception as error:
            # Of several processes that open a new file, SQLite tells all but one at once that it is locked.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _connect_psycopg(dialect: Any, record: object, args: list[Any], options: dict[str, Any]) -> Any:
    return _patient_connection().connect(*args, **options)


@functools.cache
def _patient_connection() -> Any:
    import psycopg

    class PatientConnection(psycopg.Connection[Any]):
        """Gives up on a server that says nothing at all. What the server can still end, its statement_timeout ends."""

        def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
            try:
                return super().wait(_until(time.monotonic() + LIMIT + 1, gen), *args, **options)
            except TimeoutError as error:
                self.pgconn.finish()
                raise psycopg.OperationalError("the server did not answer in time") from error

    return PatientConnection


def _until(deadline: float, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    """`gen`, which waits for a socket at each yield and is called at least every now and then, up to `deadline`."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if time.monotonic() > deadline:
                raise TimeoutError
            state = gen.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result
