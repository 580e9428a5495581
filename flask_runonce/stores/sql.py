"""The store of several processes and machines, on an SQL database: SQLite, PostgreSQL, MySQL or MariaDB.

One statement decides: an INSERT where nothing is, or an UPDATE (or DELETE) of the version that was seen. Every swap
starts with that statement, never with a look, so there is no gap to race through and no read lock to raise. A
connection is taken for one verb, one at a time, and never kept while something is waited for.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from .. import codec
from ..errors import StoreUnavailable, UnreadableRecord
from ..record import CallKey, Claim, Record, Seen, State
from .database import Database
from .protocol import Page, Renewed, Swapped
from .statements import Statements, is_large, values_of

_TIDY_EVERY = 16
"""One in so many puts tidies."""
_RENEW_ROWS = 400
"""How many runs one statement renews: an old SQLite takes 999 values."""
_FIRST_PAUSE, _LAST_PAUSE = 0.005, 0.1
"""Seconds between the looks of a waiter."""


class SQLStore:
    """Keeps records in the tables `<prefix>_calls`, `<prefix>_bodies` and `<prefix>_meta`, which it creates.

    `url_or_engine` is an SQLAlchemy URL, or an engine: then its driver and its settings are used, its time limits too,
    on connections of the store's own. Nothing is opened before the first verb, and every process opens its own. Raises
    `ConfigError` for a database that cannot be a store; any verb may raise `WrongTable`.
    """

    shared = True

    def __init__(self, url_or_engine: str | sa.URL | sa.Engine, *, prefix: str = "runonce") -> None:
        self._db = Database(url_or_engine, prefix)
        self._calls = self._db.calls
        self._sql = Statements(self._db)
        self._puts = itertools.count()

    def read(self, key: CallKey) -> Seen:
        return self._db.do(functools.partial(self._read, digest=key.digest))

    def swap(
        self,
        key: CallKey,
        seen: str,
        new: Record | None,
        *,
        forget_after: float,
        lease: float | None,
        if_lost: bool = False,
        repeat: bool = False,
    ) -> Swapped:
        work = functools.partial(
            self._swap,
            key=key,
            seen=seen,
            new=new,
            version=secrets.token_hex(8),
            forget_after=forget_after,
            lease=lease,
            if_lost=if_lost,
            repeat=repeat,
        )
        swapped = self._db.do(work, whole=new is None or is_large(new))
        if swapped.done and new is not None and next(self._puts) % _TIDY_EVERY == 0:
            try:
                self._db.do(self._tidy, whole=True)
            except StoreUnavailable as error:  # the swap is done all the same
                logging.getLogger("flask_runonce").warning("Forgotten records could not be dropped: %s", error)
        return swapped

    def renew(self, claims: Sequence[Claim], *, forget_after: float, lease: float) -> Renewed:
        renewed: dict[tuple[str, str], bool] = {}
        for start in range(0, len(claims), _RENEW_ROWS):
            some = claims[start : start + _RENEW_ROWS]
            work = functools.partial(self._renew, claims=some, forget_after=forget_after, lease=lease)
            renewed.update(((row.digest, row.run), row.canceled) for row in self._db.do(work))
        fates = {claim.run: renewed.get((claim.key.digest, claim.run)) for claim in claims}
        return Renewed(
            canceled=frozenset(run for run, canceled in fates.items() if canceled),
            lost=frozenset(run for run, canceled in fates.items() if canceled is None),
        )

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        look = functools.partial(self._version, digest=key.digest)
        while self._db.do(look) == version and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LAST_PAUSE)
        return self.read(key)

    def list(self, *, scope: str | None = None, chat_id: str | None = None, limit: int = 50, offset: int = 0) -> Page:
        """As the protocol says, but without the bodies that are large."""
        calls = self._calls.c

        def work(connection: sa.Connection) -> Page:
            now = self._db.now
            wanted = [calls.expires_at > now]
            if scope is not None:
                wanted.append(calls.scope == scope)
            if chat_id is not None:
                wanted.append(calls.chat_id == chat_id)
            total = connection.scalar(sa.select(sa.func.count()).select_from(self._calls).where(*wanted)) or 0
            newest = sa.select(*calls, now.label("now")).where(*wanted).order_by(calls.created_at.desc(), calls.digest)
            rows = connection.execute(newest.limit(limit).offset(offset))
            return Page([_seen(row, row.body or b"") for row in rows], total)

        return self._db.do(work)

    def purge(self) -> int:
        dropped = 0
        while some := self._db.do(self._tidy, whole=True):
            dropped += some
        return dropped

    def age(self) -> float:
        return self._db.do(lambda connection: connection.scalar(self._sql.age)) or 0.0

    def close(self) -> None:
        self._db.close()

    def _swap(
        self,
        connection: sa.Connection,
        *,
        key: CallKey,
        seen: str,
        new: Record | None,
        version: str,
        forget_after: float,
        lease: float | None,
        if_lost: bool = False,
        repeat: bool = False,
    ) -> Swapped:
        """`swap` on a connection that may be another's, as part of its transaction. `version` is what `new` will have.

        Done once more because the answer to it was lost, it knows by that version what it has put.
        """
        values: dict[str, Any] = {
            "key": (digest := key.digest),
            "seen": seen,
            "if_lost": if_lost,
            "forget_after": forget_after,
            "repeat": int(repeat),
        }
        if new is not None:
            values |= values_of(new, version, forget_after, lease)
        while True:
            row = None
            if new is None:
                if seen and self._drop(connection, values):
                    return Swapped(True, self._read(connection, digest))
            else:
                if not seen and not if_lost:  # what is not there has no lease that could have ended
                    row = self._put_anew(connection, values)
                elif lease is None and new.state is State.RUNNING:
                    row = self._sql.put_over_keeping_lease.row(connection, values)
                else:
                    row = self._sql.put_over.row(connection, values)
                if row and row.version == version:
                    if new.response and is_large(new):
                        connection.execute(self._sql.put_body, {**values, "large_body": new.response.body})
                    dated = new._replace(created_at=row.created_at, finished_at=row.finished_at)
                    return Swapped(True, Seen(dated, version, row.now, row.lease_until, row.repeats))
            row = row or self._sql.touch.row(connection, values)
            if row and row.body is not None:
                return Swapped(row.version == version, _seen(row, row.body))
            found = self._read(connection, digest)
            if row and found.record:
                return Swapped(found.version == version, found)
            if not found.record and (seen or if_lost or not new):
                return Swapped(not seen and not if_lost, found)
            # A record went, or came, from one statement to the next: begin again.

    def _put_anew(self, connection: sa.Connection, values: Mapping[str, Any]) -> Any:
        """The row that is there then: the new one, or the other that was touched."""
        return self._sql.put_anew.row(connection, values) or self._sql.put_over_forgotten.row(connection, values)

    def _drop(self, connection: sa.Connection, values: Mapping[str, Any]) -> bool:
        dropped = connection.execute(self._sql.drop, values).rowcount > 0
        if dropped:
            connection.execute(self._sql.drop_body, values)
        return dropped

    def _read(self, connection: sa.Connection, digest: str) -> Seen:
        row = connection.execute(self._sql.read, {"key": digest}).one()
        if row.version is None:
            return Seen(None, "", row.now)
        if row.body is None:
            raise UnreadableRecord("A stored record cannot be read: its body is missing")
        return _seen(row, row.body)

    def _version(self, connection: sa.Connection, digest: str) -> str:
        return connection.scalar(self._sql.version, {"key": digest}) or ""

    def _renew(
        self, connection: sa.Connection, claims: Sequence[Claim], forget_after: float, lease: float
    ) -> Sequence[Any]:
        values = {
            "keys": [claim.key.digest for claim in claims],
            "runs": [claim.run for claim in claims],
            "lease": lease,
            "idle": lease + forget_after,
        }
        return self._sql.renew.rows(connection, values)

    def _tidy(self, connection: sa.Connection) -> int:
        """Drop a few forgotten records and their bodies; how many it dropped."""
        forgotten = connection.scalars(self._sql.forgotten).all()
        if forgotten:
            connection.execute(self._sql.drop_forgotten, {"forgotten": forgotten})
            connection.execute(self._sql.drop_forgotten_bodies, {"forgotten": forgotten})
        return len(forgotten)


def _seen(row: Any, body: bytes) -> Seen:
    record = codec.decode(row.facts, body, created_at=row.created_at, finished_at=row.finished_at)
    return Seen(record, row.version, row.now, row.lease_until, row.repeats)
