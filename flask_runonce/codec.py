"""A record as bytes, once for every store that keeps bytes: JSON for the facts, the body beside them as it is.

The store's own columns (times, lease, repeats, version) are not part of it. No pickle: reading a record runs nothing.
"""

from __future__ import annotations

import json

from .errors import UnreadableRecord
from .record import CallKey, Found, Outcome, Record, SavedResponse, State

VERSION = 1

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(record: Record) -> tuple[bytes, bytes]:
    """The facts of `record` as JSON bytes, and the body of its response (b"" without one)."""
    response = record.response
    facts = [
        VERSION,
        list(record.key),
        record.state.value,
        record.run,
        record.owner,
        record.fingerprint,
        record.found and record.found.value,
        record.owed,
        record.again,
        record.outcome and record.outcome.value,
        response and [response.status, response.headers],
    ]
    return _to_json(facts).encode(), response.body if response else b""


def decode(facts: bytes, body: bytes, *, created_at: float, finished_at: float | None) -> Record:
    """The record that `encode` took apart, with the times that the store kept. Raises `UnreadableRecord`."""
    try:
        version, key, state, run, owner, fingerprint, found, owed, again, outcome, response = json.loads(facts)
        if version != VERSION:
            raise ValueError(f"version {version!r}")
        record = Record(
            key=CallKey(*key),
            state=State(state),
            run=run,
            owner=owner,
            fingerprint=fingerprint,
            found=None if found is None else Found(found),
            owed=owed,
            again=again,
            outcome=None if outcome is None else Outcome(outcome),
            response=response
            and SavedResponse(response[0], tuple((name, value) for name, value in response[1]), bytes(body)),
            created_at=created_at,
            finished_at=finished_at,
        )
        if record.response and not record.response.status[:3].isdigit():
            raise ValueError("a status line without a number")
        if record.outcome in (Outcome.RESPONSE, Outcome.TOO_LARGE) and not record.response:
            raise ValueError("an answered call without its response")
        if record.state is State.CANCELED and not record.found:
            raise ValueError("a canceled call without its cancel")
        return record
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UnreadableRecord(f"A stored record cannot be read: {error}") from error
