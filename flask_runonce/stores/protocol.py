"""What every store does: keep records and decide nothing. `flask_runonce.testing.StoreContract` holds each to this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..record import CallKey, Claim, Record, Seen


class Swapped(NamedTuple):
    """The answer of a swap: whether the new record was put, and what is there now (it, or the one in its way)."""

    done: bool
    seen: Seen


class Renewed(NamedTuple):
    """The answer of a renewal, as run tokens: whose call has been canceled, and which are not ours any more."""

    canceled: frozenset[str]
    lost: frozenset[str]


class Page(NamedTuple):
    """A slice of a listing, newest first, and how many there are in all."""

    rows: Sequence[Seen]
    total: int


class Store(Protocol):
    """Records under keys. Times are seconds; ages and leases are measured by the store's own clock.

    Every verb raises `StoreUnavailable` when the store cannot be reached and `UnreadableRecord` when what it holds
    under the key is not a record. No verb connects, locks or starts anything before its first call in a process.
    """

    shared: bool
    """True when several processes see the same records. Then runs have leases."""

    def read(self, key: CallKey) -> Seen:
        """What is under `key`. A record past its idle time is not there. Touches nothing."""

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
        """Put `new` (None: leave nothing) where version `seen` ("": nothing) is, as one atomic step.

        A record that is put gets a fresh random version, an idle time of `forget_after` and, while it runs in a shared
        store, a lease of `lease` seconds (None: the one that the record there has); `NOW` in its times becomes the
        store's now. A record put over nothing has no repeats yet, one put over another keeps that one's. With `if_lost`
        the lease of the record there must also have ended, by the store's clock, in the same step.

        Where another record is found (or its lease goes on), that one is touched: its idle time starts afresh and,
        with `repeat`, it counts one more repeat. Neither changes its version.

        Raises `StoreFull` when there is no room for `new`; then nothing has changed.
        """

    def renew(self, claims: Sequence[Claim], *, forget_after: float, lease: float) -> Renewed:
        """Give the runs of `claims` that are still there under their run token a fresh lease, in one call."""

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        """Return what is under `key` as soon as its version is not `version`, or after `timeout` seconds."""

    def list(self, *, scope: str | None = None, chat_id: str | None = None, limit: int = 50, offset: int = 0) -> Page:
        """The records of a scope and chat (None: of all), newest first. For people; never part of a decision.

        A store may leave the bodies of their responses out; `read` has them.
        """

    def purge(self) -> int:
        """Drop every record past its idle time and say how many: 0 where the server itself forgets. For people."""

    def age(self) -> float:
        """For how many seconds the store has been keeping records, since it last began empty."""

    def close(self) -> None:
        """Give connections back. The store may be used again; it then opens new ones."""
