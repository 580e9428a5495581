"""The SQL store's statements, each built once: to build one costs several times what it costs to execute it.

What differs from one execution to the next is a parameter. No parameter has a column's name: SQLAlchemy would take that
for an order to write the column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from .. import codec
from ..record import NOW, Record, State
from .database import Condition, Database, Time

_INLINE = 2000
"""Bytes up to which a body stands in its call's row, of which a database writes a page at a time anyway."""
_TIDY_ROWS = 32
"""How many forgotten records one tidying drops at most."""


class Statements:
    """What the store says to `database`.

    Parameters: `key`, a call's digest; `seen` and `if_lost`, of a swap; `forget_after` and `repeat`, of a touch; what
    `values_of` says of a record; `large_body`; `keys`, `runs`, `lease` and `idle`, of a renewal; `forgotten`, digests.
    """

    def __init__(self, database: Database) -> None:
        calls, bodies, meta, now = database.calls.c, database.bodies.c, database.meta.c, database.now
        here = calls.digest == _value("key", calls.digest)
        alive = calls.expires_at > now
        as_seen: list[Condition] = [
            here,
            alive,
            calls.version == _value("seen", calls.version),
            sa.or_(sa.not_(sa.bindparam("if_lost", type_=sa.Boolean)), calls.lease_until <= now),
        ]
        touched: dict[str, Any] = {
            "expires_at": sa.case((calls.lease_until > now, calls.lease_until), else_=now) + _seconds("forget_after"),
            "repeats": calls.repeats + _value("repeat", calls.repeats),
        }
        as_given = ("version", "run", "canceled", "scope", "chat_id", "facts", "body")
        put: dict[str, Any] = {
            "digest": _value("key", calls.digest),
            **{name: _value(f"new_{name}", calls[name]) for name in as_given},
            "created_at": _stamp("new_created_at", now),
            "finished_at": _stamp("new_finished_at", now),
            "lease_until": now + _seconds("new_lease"),  # NULL without one
            "expires_at": now + _seconds("new_idle"),
        }
        update = sa.update(database.calls)
        as_put = (here, calls.version == _value("new_version", calls.version))

        self.put_anew = database.write(
            database.insert(database.calls, {**put, "repeats": 0}, touched, alive), here, alive
        )
        """Put the record where nothing is, or touch what is there: one trip for a claim, and one for a repeat."""
        self.put_over_forgotten = database.write(update.where(here, ~alive).values({**put, "repeats": 0}), *as_put)
        self.put_over = database.write(update.where(*as_seen).values(put), *as_put)
        self.put_over_keeping_lease = database.write(
            update.where(*as_seen).values(
                {**put, "lease_until": calls.lease_until, "expires_at": touched["expires_at"]}
            ),
            *as_put,
        )
        self.touch = database.write(update.where(here, alive).values(touched), here, alive)
        self.drop = sa.delete(database.calls).where(*as_seen)
        self.put_body = database.insert(
            database.bodies,
            {
                "digest": _value("key", bodies.digest),
                "version": _value("new_version", bodies.version),
                "body": _value("large_body", bodies.body),
            },
        )
        self.drop_body = sa.delete(database.bodies).where(bodies.digest == _value("key", bodies.digest))

        clock = sa.select(now.label("now")).subquery()
        call = clock.outerjoin(database.calls, sa.and_(here, calls.expires_at > clock.c.now))
        both = call.outerjoin(
            database.bodies,
            sa.and_(bodies.digest == calls.digest, bodies.version == calls.version, calls.body.is_(None)),
        )
        columns = [column for column in calls if column is not calls.body]
        body = sa.func.coalesce(calls.body, bodies.body).label("body")
        self.read = sa.select(*columns, body, clock.c.now).select_from(both)
        """The record and its body, of one moment, or a row of nothing; and the time."""
        self.version = sa.select(calls.version).where(here, alive)
        self.age = sa.select(now - meta.since)

        ours: list[Condition] = [
            calls.digest.in_(sa.bindparam("keys", expanding=True)),
            calls.run.in_(sa.bindparam("runs", expanding=True)),
            calls.lease_until.is_not(None),
            alive,
        ]
        fresh = {"lease_until": now + _seconds("lease"), "expires_at": now + _seconds("idle")}
        self.renew = database.write(update.where(*ours).values(fresh), *ours)

        # The clock is a subquery so that PostgreSQL reads it once and can use the index. A record that someone else has
        # in hand, to drop it or to claim it anew, is theirs: whoever waits for no lock is part of no deadlock.
        over = calls.expires_at <= sa.select(now).scalar_subquery()
        self.forgotten = sa.select(calls.digest).where(over).limit(_TIDY_ROWS).with_for_update(skip_locked=True)
        forgotten: sa.BindParameter[Any] = sa.bindparam("forgotten", expanding=True)
        self.drop_forgotten = sa.delete(database.calls).where(calls.digest.in_(forgotten))
        self.drop_forgotten_bodies = sa.delete(database.bodies).where(bodies.digest.in_(forgotten))


def values_of(record: Record, version: str, forget_after: float, lease: float | None) -> Mapping[str, Any]:
    """The parameters that put `record` as `version`. A body that is large is none of them."""
    facts, body = codec.encode(record)
    if record.state is not State.RUNNING:
        lease = None
    return {
        "new_version": version,
        "new_run": record.run,
        "new_canceled": record.found is not None,
        "new_scope": record.key.scope,
        "new_chat_id": record.key.chat_id,
        "new_facts": facts,
        "new_body": None if is_large(record) else body,
        "new_created_at": record.created_at,
        "new_finished_at": record.finished_at,
        "new_lease": lease,
        "new_idle": (lease or 0) + forget_after,
    }


def is_large(record: Record) -> bool:
    """Whether the body stands in a table of its own."""
    return record.response is not None and len(record.response.body) > _INLINE


def _value(name: str, column: sa.ColumnElement[Any]) -> sa.BindParameter[Any]:
    return sa.bindparam(name, type_=column.type)


def _seconds(name: str) -> sa.BindParameter[float]:
    return sa.bindparam(name, type_=sa.Double())


def _stamp(name: str, now: Time) -> sa.ColumnElement[Any]:
    """The time that the parameter gives, `NOW` by the store's clock."""
    return sa.case((_seconds(name) == NOW, now), else_=_seconds(name))
