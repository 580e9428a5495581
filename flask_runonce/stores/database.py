"""The database under the SQL store: its tables, its clock, its transactions, and what differs from one to another."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Column
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import StoreUnavailable, WrongTable
from ..process import ForkGate, PerProcess
from .engines import check_backend, checked_url, open_engine, own_engine

VERSION = "1"
"""Of the tables. A change to them makes another one."""
_ATTEMPTS = 4
"""How often work is done that finds a dead connection or a deadlock."""
_PROMPT = 1.0
"""Seconds within which these are found."""

_in_sqlite = ForkGate(limit=1.0)

T = TypeVar("T")
Time = sa.ColumnElement[float]
Condition = sa.ColumnElement[bool]
Row = Mapping[str, Any]


class Database:
    """The tables `<prefix>_calls`, `<prefix>_bodies` and `<prefix>_meta` behind `url_or_engine`; nothing is opened yet.

    Raises `ConfigError` for a database that cannot be a store.
    """

    def __init__(self, url_or_engine: str | sa.URL | sa.Engine, prefix: str) -> None:
        if isinstance(url_or_engine, sa.Engine):
            given, url = url_or_engine, url_or_engine.url
            check_backend(url)
            self._engine = PerProcess(lambda: own_engine(given))
        else:
            url = checked_url(url_or_engine)
            self._engine = PerProcess(lambda: open_engine(url))
        self._backend = url.get_backend_name()
        self._undivided = _in_sqlite if self._backend == "sqlite" else contextlib.nullcontext()
        self._checked: sa.Engine | None = None
        self._clock = time.time
        self.now = self._now()
        self._tables = sa.MetaData()
        text = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
        data = sa.LargeBinary(2**32 - 1)  # MySQL's BLOB alone ends at 64 KiB
        self.meta = sa.Table(
            f"{prefix}_meta",
            self._tables,
            Column("id", sa.Integer, primary_key=True, autoincrement=False),
            Column("version", sa.String(16), nullable=False),
            Column("since", sa.Double, nullable=False),
        )
        self.calls = sa.Table(
            f"{prefix}_calls",
            self._tables,
            Column("digest", sa.String(32), primary_key=True),
            Column("version", sa.String(16), nullable=False),
            Column("run", sa.String(64), nullable=False),
            Column("canceled", sa.Boolean, nullable=False),
            Column("scope", text, nullable=False),
            Column("chat_id", text, nullable=False),
            Column("facts", data, nullable=False),
            Column("body", data),  # NULL: it is large, and stands in the other table
            Column("created_at", sa.Double, nullable=False),
            Column("finished_at", sa.Double),
            Column("lease_until", sa.Double),  # NULL: not running
            Column("expires_at", sa.Double, nullable=False, index=True),
            Column("repeats", sa.Integer, nullable=False),
            sa.Index(f"ix_{prefix}_calls_chat", "scope", "chat_id", "created_at"),
        )
        # Large bodies stand apart because SQLite, at each touch of a call, would write them again with its row.
        self.bodies = sa.Table(
            f"{prefix}_bodies",
            self._tables,
            Column("digest", sa.String(32), primary_key=True),
            Column("version", sa.String(16), nullable=False),  # of the call's record that it belongs to
            Column("body", data, nullable=False),
        )

    def do(self, work: Callable[[sa.Connection], T], *, whole: bool = False) -> T:
        """Do `work` on a connection of its own: as a `whole`, or as single statements where a transaction costs trips.

        `work` is done again when its connection turns out to be dead, as after a restart of the server, or when it lost
        a deadlock; so it must bear that. Raises `StoreUnavailable` and, at first use, `WrongTable`.
        """
        engine = self._engine()
        began = time.monotonic()
        try:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return self._attempt(engine, work, whole)
                except DBAPIError as error:
                    # A server that was silent for long would keep the caller waiting as long again.
                    if time.monotonic() - began > _PROMPT or not (error.connection_invalidated or _is_deadlock(error)):
                        raise
            return self._attempt(engine, work, whole)
        except (DBAPIError, PoolTimeout) as error:
            self._checked = None  # what comes back may be another, empty database
            reason = error.orig if isinstance(error, DBAPIError) else error  # without the statement and its values
            raise StoreUnavailable(f"The SQL store cannot be used: {reason}") from error

    def insert(
        self, table: sa.Table, values: Row, touch: Row | None = None, where: Condition | None = None
    ) -> sa.Insert:
        """Insert `values`, or put them over a row of that digest; or, if `where` holds, `touch` that row instead."""
        if self._backend in ("mysql", "mariadb"):
            into = mysql.insert(table).values(values)
            if touch is None or where is None:
                return into.on_duplicate_key_update({name: into.inserted[name] for name in values})
            return into.on_duplicate_key_update(
                {name: sa.case((where, value), else_=table.c[name]) for name, value in touch.items()}
            )
        insert: Any = postgresql.insert if self._backend == "postgresql" else sqlite.insert
        statement = insert(table).values(values)
        changed = touch or {name: statement.excluded[name] for name in values}
        upsert: sa.Insert = statement.on_conflict_do_update(index_elements=["digest"], set_=changed, where=where)
        return upsert

    def write(self, statement: sa.Insert | sa.Update, *written: Condition) -> Write:
        """`statement` on the calls, as one that gives the rows as it left them. `written` finds them again."""
        return Write(statement, (*self.calls.c, self.now.label("now")), written)

    def close(self) -> None:
        """Close this process's connections. The next verb opens new ones."""
        engine = self._engine.made
        if engine:
            with self._undivided:
                engine.dispose()

    def _now(self) -> Time:
        """The store's clock in Unix seconds: the server's, whatever the session's time zone; SQLite's is its host's."""
        if self._backend == "sqlite":
            return sa.bindparam("now", callable_=lambda: self._clock(), type_=sa.Double())  # read at each execution
        if self._backend == "postgresql":
            return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double)
        return sa.literal_column("(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)", sa.Double())

    def _attempt(self, engine: sa.Engine, work: Callable[[sa.Connection], T], whole: bool) -> T:
        if self._checked is not engine:
            if not self._once(engine, self._is_there, whole=False):
                self._once(engine, self._create, whole=True)
            self._checked = engine
        return self._once(engine, work, whole)

    def _once(self, engine: sa.Engine, work: Callable[[sa.Connection], T], whole: bool) -> T:
        with self._undivided, engine.connect() as connection:
            if self._backend == "postgresql":
                # Saves the trips of BEGIN and COMMIT; and nobody can be stopped between them, holding a lock.
                connection = connection.execution_options(isolation_level="READ COMMITTED" if whole else "AUTOCOMMIT")
            with connection.begin():
                if whole and self._backend == "sqlite":
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                return work(connection)

    def _is_there(self, connection: sa.Connection) -> bool:
        """Whether all the tables are there. Raises `WrongTable` if they are not ours."""
        has_table = sa.inspect(connection).has_table
        # In the order that they are not made in: another process may be at it.
        some = [has_table(table.name) for table in (self.bodies, self.calls)]
        if not has_table(self.meta.name):
            if any(some):
                raise WrongTable(self.calls.name, "unknown")
            return False
        version = connection.scalar(sa.select(self.meta.c.version))
        if version not in (None, VERSION):
            raise WrongTable(self.calls.name, version)
        return version is not None and all(some)

    def _create(self, connection: sa.Connection) -> None:
        """Create the tables that are not there; one process at a time."""
        lock = f"{self.calls.name}_create"
        if self._backend == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(zlib.crc32(lock.encode()))))
        elif self._backend != "sqlite":
            connection.execute(sa.select(sa.func.get_lock(lock, 5)))
        try:
            if not self._is_there(connection):
                # The version first: MySQL keeps each step, and one that dies halfway must leave what the next can use.
                self.meta.create(connection, checkfirst=True)
                if connection.scalar(sa.select(self.meta.c.version)) is None:
                    connection.execute(self.meta.insert().values(id=1, version=VERSION, since=self.now))
                self._tables.create_all(connection)
        finally:
            if self._backend in ("mysql", "mariadb"):
                connection.execute(sa.select(sa.func.release_lock(lock)))


class Write:
    """A statement that writes calls and gives each row as it left it, with the time as `now`."""

    def __init__(
        self, statement: sa.Insert | sa.Update, columns: Sequence[sa.ColumnElement[Any]], written: Sequence[Condition]
    ) -> None:
        self._returning = statement.returning(*columns)
        self._silent = statement
        self._look = sa.select(*columns).where(*written)

    def rows(self, connection: sa.Connection, values: Row) -> Sequence[Any]:
        if connection.dialect.update_returning:
            return connection.execute(self._returning, values).all()
        connection.execute(self._silent, values)
        return connection.execute(self._look, values).all()

    def row(self, connection: sa.Connection, values: Row) -> Any:
        """The row, or None where there was nothing to write."""
        rows = self.rows(connection, values)
        return rows[0] if rows else None


def _is_deadlock(error: DBAPIError) -> bool:
    """Whether the server undid the work to end a deadlock (MySQL's 1213) or to keep transactions in an order."""
    orig = error.orig
    return orig is not None and (orig.args[:1] == (1213,) or getattr(orig, "sqlstate", None) in ("40001", "40P01"))
