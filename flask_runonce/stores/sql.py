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
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from .. import codec
from ..errors import StoreUnavailable, UnreadableRecord
from ..record import NOW, CallKey, Claim, Record, Seen, State
from .database import Condition, Database, Time
from .protocol import Page, Renewed, Swapped

_INLINE = 2000
"""Bytes up to which a body stands in its call's row, of which a database writes a page at a time anyway."""
_TIDY_EVERY = 16
"""One in so many puts tidies."""
_TIDY_ROWS = 32
"""How many forgotten records it drops at most."""
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
        self._bodies = self._db.bodies
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
        swapped = self._db.do(work, whole=new is None or _is_large(new))
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
            now = self._db.now()
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
        since = self._db.meta.c.since
        age: float = self._db.do(lambda connection: connection.scalar(sa.select(self._db.now() - since))) or 0.0
        return age

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
        calls, digest = self._calls.c, key.digest
        while True:
            now = self._db.now()
            alive = calls.expires_at > now
            as_seen = [calls.digest == digest, alive, calls.version == seen]
            if if_lost:
                as_seen.append(calls.lease_until <= now)
            touch = {
                "expires_at": sa.case((calls.lease_until > now, calls.lease_until), else_=now) + forget_after,
                "repeats": calls.repeats + int(repeat),
            }
            row = None
            if new is None:
                if seen and self._drop(connection, digest, as_seen):
                    return Swapped(True, self._read(connection, digest))
            else:
                put = _columns(new, version, now, forget_after, lease)
                if lease is None and new.state is State.RUNNING:
                    put |= {"lease_until": calls.lease_until, "expires_at": touch["expires_at"]}
                row = (
                    self._put_over(connection, put, as_seen) if seen else self._put_anew(connection, put, touch, alive)
                )
                if row and row.version == version:
                    self._put_body(connection, new, version)
                    dated = new._replace(created_at=row.created_at, finished_at=row.finished_at)
                    return Swapped(True, Seen(dated, version, row.now, row.lease_until, row.repeats))
            row = row or self._touch(connection, touch, calls.digest == digest, alive)
            if row and row.body is not None:
                return Swapped(row.version == version, _seen(row, row.body))
            found = self._read(connection, digest)
            if row and found.record:
                return Swapped(found.version == version, found)
            if not found.record and (seen or not new):
                return Swapped(not seen, found)
            # A record went, or came, from one statement to the next: begin again.

    def _put_over(self, connection: sa.Connection, put: dict[str, Any], as_seen: Sequence[Condition]) -> Any:
        """Put the record over the one that was seen: the row, or None where that is not there any more."""
        calls = self._calls.c
        statement = sa.update(self._calls).where(*as_seen).values(put)
        return self._first(connection, statement, calls.digest == put["digest"], calls.version == put["version"])

    def _put_anew(self, connection: sa.Connection, put: dict[str, Any], touch: dict[str, Any], alive: Condition) -> Any:
        """Put the record where nothing is, or touch what is there: one trip for a claim, and one for a repeat.

        The row that is there then, the new one or the other.
        """
        put = {**put, "repeats": 0}
        here = self._calls.c.digest == put["digest"]
        row = self._first(connection, self._db.insert(self._calls, put, touch, alive), here, alive)
        return row or self._put_over(connection, put, [here, ~alive])  # what is there has been forgotten

    def _touch(self, connection: sa.Connection, touch: dict[str, Any], *alive: Condition) -> Any:
        return self._first(connection, sa.update(self._calls).where(*alive).values(touch), *alive)

    def _put_body(self, connection: sa.Connection, record: Record, version: str) -> None:
        if record.response and _is_large(record):
            body = {"digest": record.key.digest, "version": version, "body": record.response.body}
            connection.execute(self._db.insert(self._bodies, body))

    def _drop(self, connection: sa.Connection, digest: str, as_seen: Sequence[Condition]) -> bool:
        dropped = connection.execute(sa.delete(self._calls).where(*as_seen)).rowcount > 0
        if dropped:
            connection.execute(sa.delete(self._bodies).where(self._bodies.c.digest == digest))
        return dropped

    def _read(self, connection: sa.Connection, digest: str) -> Seen:
        """One look: the record and its body, of one moment, or nothing; and the time."""
        calls, bodies = self._calls.c, self._bodies.c
        clock = sa.select(self._db.now().label("now")).subquery()
        call = clock.outerjoin(self._calls, sa.and_(calls.digest == digest, calls.expires_at > clock.c.now))
        both = call.outerjoin(
            self._bodies, sa.and_(bodies.digest == calls.digest, bodies.version == calls.version, calls.body.is_(None))
        )
        columns = [column for column in calls if column is not calls.body]
        body = sa.func.coalesce(calls.body, bodies.body).label("body")
        row = connection.execute(sa.select(*columns, body, clock.c.now).select_from(both)).one()
        if row.version is None:
            return Seen(None, "", row.now)
        if row.body is None:
            raise UnreadableRecord("A stored record cannot be read: its body is missing")
        return _seen(row, row.body)

    def _version(self, connection: sa.Connection, digest: str) -> str:
        calls = self._calls.c
        alive = sa.select(calls.version).where(calls.digest == digest, calls.expires_at > self._db.now())
        return connection.scalar(alive) or ""

    def _renew(
        self, connection: sa.Connection, claims: Sequence[Claim], forget_after: float, lease: float
    ) -> Sequence[Any]:
        calls, now = self._calls.c, self._db.now()
        ours = [
            calls.digest.in_([claim.key.digest for claim in claims]),
            calls.run.in_([claim.run for claim in claims]),
            calls.lease_until.is_not(None),
            calls.expires_at > now,
        ]
        fresh = {"lease_until": now + lease, "expires_at": now + (lease + forget_after)}
        return self._db.write(connection, sa.update(self._calls).where(*ours).values(fresh), *ours)

    def _tidy(self, connection: sa.Connection) -> int:
        """Drop a few forgotten records and their bodies; how many it dropped."""
        calls, bodies = self._calls.c, self._bodies.c
        # The clock is a subquery so that PostgreSQL reads it once and can use the index. A record that someone else has
        # in hand, to drop it or to claim it anew, is theirs: whoever waits for no lock is part of no deadlock.
        forgotten = calls.expires_at <= sa.select(self._db.now()).scalar_subquery()
        some = sa.select(calls.digest).where(forgotten).limit(_TIDY_ROWS).with_for_update(skip_locked=True)
        digests = connection.scalars(some).all()
        if digests:
            connection.execute(sa.delete(self._calls).where(calls.digest.in_(digests)))
            connection.execute(sa.delete(self._bodies).where(bodies.digest.in_(digests)))
        return len(digests)

    def _first(self, connection: sa.Connection, statement: sa.Insert | sa.Update, *written: Condition) -> Any:
        rows = self._db.write(connection, statement, *written)
        return rows[0] if rows else None


def _columns(record: Record, version: str, now: Time, forget_after: float, lease: float | None) -> dict[str, Any]:
    facts, body = codec.encode(record)
    running = record.state is State.RUNNING
    return {
        "digest": record.key.digest,
        "version": version,
        "run": record.run,
        "canceled": record.found is not None,
        "scope": record.key.scope,
        "chat_id": record.key.chat_id,
        "facts": facts,
        "body": None if _is_large(record) else body,
        "created_at": now if record.created_at == NOW else record.created_at,
        "finished_at": now if record.finished_at == NOW else record.finished_at,
        "lease_until": now + (lease or 0) if running else None,
        "expires_at": now + ((lease or 0) + forget_after if running else forget_after),
    }


def _is_large(record: Record) -> bool:
    return record.response is not None and len(record.response.body) > _INLINE


def _seen(row: Any, body: bytes) -> Seen:
    record = codec.decode(row.facts, body, created_at=row.created_at, finished_at=row.finished_at)
    return Seen(record, row.version, row.now, row.lease_until, row.repeats)
