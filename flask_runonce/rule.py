"""THE RULE: may this call run?

Everything that decides about a call stands in this file, and only here. It does no I/O, reads no clock, knows no store
and no framework. A caller shows what it saw in the store; the rule answers with a `Move`: the record to put there, and
what to do once it is put. The store then swaps only if what was seen is still there; if not, the caller comes back with
what is. So there is no moment between a look and a deed in which the answer could go stale, and no store can get the
rule wrong, because none is asked.

Why nothing may decide elsewhere: each duplicate run that we know of came from a second place that also knew, a little
differently, when a call may run.

    event     seen          asked with                     put                        then
    -------   -----------   ----------------------------   ------------------------   --------------------------
    begin     nothing                                      running, ours              RUN
              ours          the claim's reply was lost                                RUN
              canceled      not waiting for that run                                  REFUSE canceled
              other input                                                             REFUSE input_mismatch
              running                                                                 WAIT
              lost          on_lost="rerun", no cancel     running, again, if lost    RUN
              lost          otherwise                      done, unknown, if lost     REPLAY
              done          the body was too large                                    REFUSE response_too_large
              done          otherwise                                                 REPLAY
    finish    ours                                         done                       SAVED
              ours, done    with this very outcome                                    SAVED
              anything                                                                GONE
    release   ours          it took over from a lost run   running, lost              SAVED
              ours          canceled                       canceled, not received     SAVED
              ours          otherwise                      nothing                    SAVED
              anything                                                                GONE
    cancel    nothing                                      canceled, not received     TELL
              canceled                                                                TELL
              running       willing to wait                running, marked (once)     WAIT
              running       otherwise                      running, marked, owed      TELL_LATER
              lost                                         done, unknown, if lost     TELL
              done                                         done, marked (once)        TELL
    forget    nothing                                                                 GONE
              running                                                                 REFUSE still_running
              lost                                         nothing, if lost           SAVED
              anything                                     nothing                    SAVED

The rows of an event are tried from the top. "canceled" at `begin` is any record with a cancel's mark; at `cancel` it is
a call that never ran. A request that was already waiting for a run when its cancel came still gets that run's response.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from .record import NOW, CallKey, Found, Outcome, Record, SavedResponse, Seen, State


class Do(enum.Enum):
    """What follows, once the move's record is put."""

    RUN = "run the handler"
    WAIT = "wait until the record changes, then ask again"
    REPLAY = "answer from the record"
    REFUSE = "answer with the problem that `code` names"
    TELL = "tell the canceler what became of the call"
    TELL_LATER = "tell the canceler that the run goes on"
    SAVED = "done"
    GONE = "the record is not ours to change, or not there"


class Put(enum.Enum):
    """What a move does to the record, where it does not put another one."""

    AS_IT_IS = "leave it"
    NOTHING = "drop it"


class Move(NamedTuple):
    """The rule's answer.

    `if_lost`: put only if the lease has ended, by the store's clock. `owed`: call the cancel hooks, once it is put.
    `lost`: put with a lease that has ended.
    """

    do: Do
    put: Record | Put = Put.AS_IT_IS
    if_lost: bool = False
    code: str = ""
    owed: bool = False
    lost: bool = False


class Request(NamedTuple):
    """A request that wants to run: `run` is the token of its own run, `waited_for` that of the run it awaits."""

    key: CallKey
    run: str
    owner: str = ""
    fingerprint: str | None = None
    rerun: bool = False
    waited_for: str | None = None


def begin(seen: Seen, request: Request) -> Move:
    """A request has arrived, or has waited and looks again."""
    record = seen.record
    if record is None:
        return Move(Do.RUN, _claim(request))
    if _ours(record, request.run):
        return Move(Do.RUN)
    if record.found and not (record.run and record.run == request.waited_for):
        return Move(Do.REFUSE, code="canceled")
    if record.fingerprint and request.fingerprint and record.fingerprint != request.fingerprint:
        return Move(Do.REFUSE, code="input_mismatch")
    if record.state is State.RUNNING:
        if not seen.lost:
            return Move(Do.WAIT)
        if request.rerun and not record.found:
            return Move(Do.RUN, _claim(request)._replace(again=True), if_lost=True)
        return Move(Do.REPLAY, _end(record, Outcome.UNKNOWN), if_lost=True, owed=record.owed)
    if record.outcome is Outcome.TOO_LARGE:
        return Move(Do.REFUSE, code="response_too_large")
    return Move(Do.REPLAY)


def finish(seen: Seen, run: str, outcome: Outcome, response: SavedResponse | None = None) -> Move:
    """The run `run` has ended; `response` is what to keep of it (None when the outcome is unknown)."""
    record = seen.record
    if record and record.run == run and record.outcome is outcome:
        return Move(Do.SAVED)  # the save that this one repeats did arrive; only its reply was lost
    if record is None or not _ours(record, run):
        return Move(Do.GONE)
    return Move(Do.SAVED, _end(record, outcome, response), owed=record.owed)


def release(seen: Seen, run: str) -> Move:
    """The run `run` did nothing, or never started. A call that was canceled meanwhile stays canceled."""
    record = seen.record
    if record is None or not _ours(record, run):
        return Move(Do.GONE)
    if record.again:
        # Nobody knows what the run did that was lost before it. So the call is not forgotten: it is lost again.
        return Move(Do.SAVED, record._replace(run=""), lost=True)
    if record.found:
        return Move(Do.SAVED, _canceled(record.key), owed=record.owed)
    return Move(Do.SAVED, Put.NOTHING)


def cancel(seen: Seen, key: CallKey, *, patient: bool) -> Move:
    """A cancel has arrived, or has waited and looks again; `patient` while it is willing to wait for the run."""
    record = seen.record
    if record is None:
        return Move(Do.TELL, _canceled(key))
    if record.state is State.CANCELED:
        return Move(Do.TELL)
    if record.state is State.RUNNING:
        marked = record if record.found else record._replace(found=Found.RUNNING)
        if seen.lost:
            return Move(Do.TELL, _end(marked, Outcome.UNKNOWN), if_lost=True)
        if not patient:
            return Move(Do.TELL_LATER, _changed(record, marked._replace(owed=True)))
        return Move(Do.WAIT, _changed(record, marked))
    return Move(Do.TELL, _changed(record, record if record.found else record._replace(found=Found.DONE)))


def forget(seen: Seen) -> Move:
    """A person decides that the call may run again. Not while its owner is alive."""
    if seen.record is None:
        return Move(Do.GONE)
    running = seen.record.state is State.RUNNING
    if running and not seen.lost:
        return Move(Do.REFUSE, code="still_running")
    return Move(Do.SAVED, Put.NOTHING, if_lost=running, owed=seen.record.owed)


def _claim(request: Request) -> Record:
    return Record(request.key, State.RUNNING, request.run, request.owner, request.fingerprint)


def _end(record: Record, outcome: Outcome, response: SavedResponse | None = None) -> Record:
    key, _, run, owner, fingerprint, found, _, again, *_ = record
    return Record(
        key, State.DONE, run, owner, fingerprint, found, False, again, outcome, response, record.created_at, NOW
    )


def _canceled(key: CallKey) -> Record:
    return Record(key, State.CANCELED, found=Found.NOT_RECEIVED)


def _ours(record: Record, run: str) -> bool:
    return record.state is State.RUNNING and record.run == run


def _changed(old: Record, new: Record) -> Record | Put:
    return Put.AS_IT_IS if new == old else new
