"""The values that travel between the rule, the runner and the stores. All are frozen; none knows its use."""

from __future__ import annotations

import enum
import hashlib
from typing import NamedTuple

NOW = -1.0
"""A time that the store fills in from its own clock when it keeps the record."""


class CallKey(NamedTuple):
    """Names a call: the scope ("" without one), the chat ID and the tool call ID (CONTRACT section 1)."""

    scope: str
    chat_id: str
    tool_call_id: str

    @property
    def digest(self) -> str:
        """32 hex digits over the length-prefixed parts, so that no two keys collide, whatever a store's collation."""
        digest = hashlib.sha256()
        for part in self:
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(4, "big") + encoded)
        return digest.hexdigest()[:32]


class SavedResponse(NamedTuple):
    """What repeats are answered with: the status ("201 CREATED"), the representation headers in order, the body."""

    status: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @property
    def status_code(self) -> int:
        """The status line's number."""
        return int(self.status[:3])

    @property
    def content_type(self) -> str:
        """The Content-Type header's value, "" without one."""
        return next((value for name, value in self.headers if name.lower() == "content-type"), "")


class State(enum.Enum):
    """Where a call stands. CANCELED is a call that was canceled before it ran; a canceled run is RUNNING, then DONE."""

    RUNNING = "running"
    DONE = "done"
    CANCELED = "canceled"


class Found(enum.Enum):
    """What a call's first cancel found; later cancels say the same (CONTRACT section 5)."""

    NOT_RECEIVED = "not_received"
    RUNNING = "running"
    DONE = "done"


class Outcome(enum.Enum):
    """How a run ended: with a response that is kept, with one too large to keep, or in a way that nobody can know."""

    RESPONSE = "response"
    TOO_LARGE = "too_large"
    UNKNOWN = "unknown"


class Record(NamedTuple):
    """What a store keeps of a call.

    `run` is the random token of the run, made by its owner with the claim; it stays the same when a cancel marks the
    record. `found` is None until a cancel came. `owed`: a cancel gave up waiting, so whoever ends the run calls the
    hooks. `created_at` and `finished_at` are Unix seconds by the store's clock. `again`: the run took over from one
    whose owner was lost.
    """

    key: CallKey
    state: State
    run: str = ""
    owner: str = ""
    fingerprint: str | None = None
    found: Found | None = None
    owed: bool = False
    again: bool = False
    outcome: Outcome | None = None
    response: SavedResponse | None = None
    created_at: float = NOW
    finished_at: float | None = None


class Seen(NamedTuple):
    """What a store has under a key, and when it looked.

    `version` is "" where there is nothing. `now` and `lease_until` are Unix seconds by the store's clock; `lease_until`
    is None for a record without a lease: not running, or in a store that has no other owners. `repeats` counts the
    later requests that found the record.
    """

    record: Record | None
    version: str
    now: float
    lease_until: float | None = None
    repeats: int = 0

    @property
    def lost(self) -> bool:
        """True when the lease of a run has ended: its owner has not said for that long that it is alive."""
        return self.lease_until is not None and self.lease_until <= self.now


NOTHING = Seen(None, "", 0.0)
"""What a caller that has not looked yet may assume; the swap says whether it was right."""


class Claim(NamedTuple):
    """The right to a run: the record that was written and the version that it got. Finishing looks nothing else up."""

    record: Record
    version: str

    @property
    def key(self) -> CallKey:
        return self.record.key

    @property
    def run(self) -> str:
        return self.record.run
