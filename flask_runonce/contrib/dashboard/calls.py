"""Calls as the pages show them: each record in words, and the search for those that a person asks for."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ... import keys
from ...problems import saved_response
from ...record import CallKey, Found, Outcome, SavedResponse, Seen, State
from ...runner import Runner

PAGE = 50
"""Calls on a page."""
SEARCHED = 5000
"""Calls that one request looks through at most, where the store cannot select them."""
SHOWN_BYTES = 64 * 1024
"""Bytes of a body that are shown."""
_DUMPED_BYTES = 512
"""Bytes that are shown of a body that is no text."""

STATES = {
    "running": "running",
    "lost": "owner lost",
    "done": "done",
    "unknown": "outcome unknown",
    "canceled": "canceled",
    "repeated": "repeated",
}
"""What can be asked for, and what it is called."""

FOUND = {
    Found.NOT_RECEIVED: "before it came, or before it did anything",
    Found.RUNNING: "while it ran",
    Found.DONE: "after it was done",
}
"""What a call's first cancel found, to follow the word "canceled"."""

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Characters that cannot be seen, or that change the order of others: controls, also those of bidirectional text."""


class Wanted(NamedTuple):
    """What a person asks for: scope and chat (None: all), a part of the ID, a key of `STATES`, and where to begin."""

    scope: str | None = None
    chat_id: str | None = None
    part: str = ""
    state: str = ""
    start: int = 0

    @classmethod
    def of(cls, args: Mapping[str, str]) -> Wanted:
        """What a query asks for. Raises `InvalidKey` for a malformed chat ID, ValueError for anything else."""
        chat_id, state, start = args.get("chat", "").strip(), args.get("state", ""), args.get("start", "0")
        if state and state not in STATES:
            raise ValueError("There is no such state.")
        if not (start.isascii() and start.isdigit() and len(start) < 12):
            raise ValueError("The start must be a whole number from 0.")
        return cls(
            scope=keys.canonical_scope(args.get("scope") or None) or None,
            chat_id=keys.canonical_id(chat_id, "chat ID") if chat_id else None,
            part=args.get("id", "").strip(),
            state=state,
            start=int(start),
        )

    @property
    def searches(self) -> bool:
        """True where calls have to be looked at one by one."""
        return bool(self.part or self.state)

    @property
    def any(self) -> bool:
        """True where not all calls are asked for."""
        return self.searches or self.scope is not None or self.chat_id is not None

    def fits(self, seen: Seen) -> bool:
        assert seen.record
        record = seen.record
        if self.part and self.part.lower() not in record.key.tool_call_id.lower():
            return False
        if self.state == "repeated":
            return seen.repeats > 0
        if self.state == "canceled":
            return record.found is not None
        return self.state in ("", state_of(seen))


class Listing(NamedTuple):
    """A page of calls, newest first: those that fit, of the calls from `start` to `end` of `total`.

    Of the repeated ones, those that were repeated most, of `found`.
    """

    rows: Sequence[Seen]
    start: int
    end: int
    total: int
    found: int


def search(runner: Runner, wanted: Wanted) -> Listing:
    """A page of what is asked for. It asks the store once, for a bounded number of calls. Raises `StoreError`."""
    limit = SEARCHED if wanted.searches else PAGE
    page = runner.list(wanted.scope, wanted.chat_id, limit=limit, offset=wanted.start)
    fitting = [number for number, seen in enumerate(page.rows) if wanted.fits(seen)]
    end = len(page.rows)
    if wanted.state == "repeated":
        fitting.sort(key=lambda number: -page.rows[number].repeats)
    elif len(fitting) > PAGE:
        end = fitting[PAGE]  # the next page begins with the first that has no room here
    rows = [page.rows[number] for number in fitting[:PAGE]]
    return Listing(rows, wanted.start, wanted.start + end, page.total, len(fitting))


def state_of(seen: Seen) -> str:
    """Where a call stands: "running", "lost", "done", "unknown" or "canceled" (it never ran)."""
    assert seen.record
    if seen.record.state is State.RUNNING:
        return "lost" if seen.lost else "running"
    return "unknown" if seen.record.outcome is Outcome.UNKNOWN else seen.record.state.value


class Shown(NamedTuple):
    """A call in words and numbers. `age` and `took` are seconds; `waiting` is at most so many where `roughly`."""

    key: CallKey
    state: str
    word: str
    status: int | None
    repeats: int
    ran: str
    waiting: int
    roughly: bool
    age: float
    took: float | None
    owner: str
    canceled: bool
    found: str

    @property
    def chat_digest(self) -> str:
        """Names the chat on a page."""
        return self.key._replace(tool_call_id="").digest


def show(seen: Seen, answered: int, *, shared: bool, max_waiting: int) -> Shown:
    """`seen` for a page. `answered` repeats have had their answer, as far as this process knows.

    Who has come and has had no answer is waiting. With a `shared` store others may have answered, so it is a bound.
    """
    record = seen.record
    assert record
    state, saved = state_of(seen), saved_response(record)
    canceled = record.found is not None and state != "canceled"
    waiting = max(0, seen.repeats - answered) if state == "running" else 0
    return Shown(
        key=record.key,
        state=state,
        word=STATES[state] + (", canceled" if canceled else ""),
        status=saved.status_code if saved and state == "done" else None,
        repeats=seen.repeats,
        ran={"canceled": "never", "unknown": "unknown", "lost": "unknown"}.get(state, "once"),
        waiting=waiting if shared else min(waiting, max_waiting),
        roughly=shared,
        age=max(0.0, seen.now - record.created_at),
        took=None if record.finished_at is None else max(0.0, record.finished_at - record.created_at),
        owner=record.owner,
        canceled=record.found is not None,
        found=FOUND[record.found] if record.found else "",
    )


class Body(NamedTuple):
    """A saved body as text, and what has to be said of it."""

    text: str
    note: str = ""


def body_of(saved: SavedResponse, *, too_large: bool) -> Body:
    """The saved body as text that does nothing: what is no text as a hex dump, and not more of it than can be read."""
    body, size = saved.body, f"{len(saved.body):,} bytes"
    if too_large:
        return Body("", "The body was too large to keep.")
    if not body:
        return Body("", "The body is empty.")
    encoding = next((value for name, value in saved.headers if name.lower() == "content-encoding"), "")
    if encoding.strip().lower() in ("", "identity"):
        try:
            # What is cut off in the middle of a character is not an error.
            text = codecs.getincrementaldecoder("utf-8")().decode(body[:SHOWN_BYTES], final=len(body) <= SHOWN_BYTES)
        except UnicodeDecodeError:
            pass
        else:
            note = f"The first {SHOWN_BYTES:,} of {size}." if len(body) > SHOWN_BYTES else f"{size}."
            return Body(visible(text.replace("\r\n", "\n")), note)
    note = f"{size}, encoded as {visible(encoding)}" if encoding else f"{size} that are no UTF-8 text"
    left = f"; the first {_DUMPED_BYTES} of them" if len(body) > _DUMPED_BYTES else ""
    return Body(_dump(body[:_DUMPED_BYTES]), f"{note}{left}, in hexadecimal.")


def visible(text: str) -> str:
    """`text` with what cannot be seen in it, or reorders it, written out."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _dump(body: bytes) -> str:
    lines = (body[start : start + 16] for start in range(0, len(body), 16))
    return "\n".join(f"{number * 16:04x}  {line.hex(' ')}" for number, line in enumerate(lines))
