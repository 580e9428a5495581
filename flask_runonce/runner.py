"""Does what the rule says: the only module that sees both the rule and a store."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from . import rule, signals
from .call import Call, CanceledCall
from .errors import StoreError, StoreFull, StoreUnavailable
from .keeper import Keeper
from .problems import Answer, problem, replay, saved_response, store_problem
from .process import PerProcess
from .record import NOTHING, CallKey, Claim, Found, Outcome, Record, SavedResponse, Seen
from .rule import Do, Move, Put
from .settings import Settings
from .signals import tell
from .stores.protocol import Page, Store, Swapped

_LEASE_MARGIN = 0.05
"""Seconds past a lease's end at which a waiter looks again."""


class Canceled(NamedTuple):
    """What a cancel can truthfully say: what the first cancel found, the record, and whether the run still goes on."""

    found: Found
    record: Record
    pending: bool


class Runner:
    """Claims, waits, finishes, releases and cancels calls in `store`, for the app `sender`.

    `call_hooks(call)` calls the app's cancel hooks with a `CanceledCall`.
    """

    def __init__(
        self, store: Store, settings: Settings, *, sender: Any, call_hooks: Callable[[CanceledCall], None]
    ) -> None:
        self.store = store
        self.settings = settings
        self._sender = sender
        self._call_hooks = call_hooks
        self._owner = PerProcess(lambda: f"{socket.gethostname()}:{os.getpid()}")
        self._calls: PerProcess[dict[str, Call]] = PerProcess(dict)
        self._waiting = PerProcess(lambda: threading.Semaphore(settings.max_waiting))
        self._canceling = PerProcess(lambda: threading.Semaphore(settings.max_waiting))
        self._keeper = Keeper(store, forget_after=settings.forget_after, lease=settings.lease) if store.shared else None

    def begin(self, key: CallKey, fingerprint: str | None, *, rerun: bool = False) -> Call | Answer:
        """Claim the call, or answer for it: from the record, after waiting for its run, or with a refusal.

        A `Call` is the right and the duty to run the handler once and then to call `finish` or `fail`.
        """
        request = rule.Request(key, secrets.token_hex(8), self._owner(), fingerprint, rerun)
        try:
            outcome = self._begin(request)
        except StoreError as error:
            if isinstance(error, StoreUnavailable) and self._keeper:
                # The claim may have been written, and only the reply lost. No handler has started: give it back.
                self._keeper.again(functools.partial(self._give_back, key, request.run), key, "The release of a claim")
            signals.log(logging.WARNING, key, "The store cannot answer:", error)
            outcome = store_problem(error)
        if isinstance(outcome, Call):
            self._started(outcome)
        elif outcome.code:
            tell(signals.call_refused, self._sender, key, code=outcome.code, status=int(outcome.status[:3]))
        return outcome

    def _begin(self, request: rule.Request) -> Call | Answer:
        seen, repeat, waits = NOTHING, True, _Waits(self._waiting, self.settings.wait_timeout)
        try:
            while True:
                move = rule.begin(seen, request)
                if move.put is not Put.AS_IT_IS:
                    lost, swapped = seen.record, self._swap(request.key, seen, move, repeat=repeat)
                    seen, repeat = swapped.seen, False
                    if not swapped.done:
                        continue
                    if lost:
                        tell(signals.call_lost, self._sender, request.key, owner=lost.owner)
                    if move.owed:
                        self._pay(seen.record)
                assert seen.record
                if move.do is Do.RUN:
                    return Call(Claim(seen.record, seen.version))
                if move.do is Do.REFUSE:
                    return self._refusal(move.code, seen.record)
                if move.do is Do.REPLAY:
                    saved = saved_response(seen.record)
                    assert saved
                    tell(
                        signals.call_replayed, self._sender, request.key, status=saved.status_code, seconds=waits.waited
                    )
                    return replay(saved)
                if not waits.may_go_on():
                    return problem("still_running")
                request = request._replace(waited_for=seen.record.run)
                seen = self._wait(request.key, seen, waits)
        finally:
            waits.end()

    def _started(self, call: Call) -> None:
        self._calls()[call.claim.run] = call
        try:
            if call.claim.record.found:
                call.tell_canceled()
            if self._keeper:
                self._keeper.hold(call)
            elif self.store.read(call.key).version != call.claim.version:
                call.tell_canceled()  # by a cancel that came before the call could be found here
            tell(signals.call_started, self._sender, call.key)
        except BaseException:
            self._release(call)
            raise

    def finish(self, call: Call, response: SavedResponse, *, too_large: bool = False) -> None:
        """The run has answered: save `response`, of which the body is missing if it was `too_large`. Raises nothing.

        A call that its handler released, or that answered a status by which nothing was processed, is released.
        """
        status = response.status_code
        if call.released or status in self.settings.release_statuses:
            self._release(call)
        else:
            self._finished(call, Outcome.TOO_LARGE if too_large else Outcome.RESPONSE, response, status)

    def fail(self, call: Call) -> None:
        """The run has ended in a way that leaves its outcome unknown. Raises nothing."""
        if call.released:
            self._release(call)
        else:
            self._finished(call, Outcome.UNKNOWN, None, 500)

    def cancel(self, key: CallKey) -> Canceled:
        """Refuse the call from now on and learn what became of it, waiting for its run. Calls the hooks, but owed ones.

        Raises `StoreError`, and whatever a hook raises; the mark stays then.
        """
        seen, waits = NOTHING, _Waits(self._canceling, self.settings.cancel_timeout)
        patient = True
        try:
            while True:
                move = rule.cancel(seen, key, patient=patient)
                if move.put is not Put.AS_IT_IS:
                    swapped = self._swap(key, seen, move)
                    if swapped.done and move.if_lost and seen.record:
                        tell(signals.call_lost, self._sender, key, owner=seen.record.owner)
                    seen = swapped.seen
                    if not swapped.done:
                        continue
                assert seen.record and seen.record.found
                if move.do is not Do.WAIT:
                    break
                here = self._calls().get(seen.record.run)
                if here:
                    here.tell_canceled()
                patient = waits.may_go_on()
                if patient:
                    seen = self._wait(key, seen, waits)
        finally:
            waits.end()
        canceled = Canceled(seen.record.found, seen.record, move.do is Do.TELL_LATER)
        tell(signals.call_canceled, self._sender, key, state=canceled.found.value, pending=canceled.pending)
        if not canceled.pending:
            self._call_hooks(_canceled_call(seen.record))
        return canceled

    def forget(self, key: CallKey) -> Do:
        """Drop the record, so that the call may run again. SAVED, GONE (no record) or REFUSE (its owner is alive)."""
        seen = self.store.read(key)
        while True:
            move = rule.forget(seen)
            if move.put is Put.AS_IT_IS:
                return move.do
            swapped = self._swap(key, seen, move)
            if swapped.done:
                if move.owed:
                    self._pay(seen.record)
                return move.do
            seen = swapped.seen

    def find(self, key: CallKey) -> Seen:
        """What is kept of the call, without touching it."""
        return self.store.read(key)

    def list(self, scope: str | None, chat_id: str | None, *, limit: int, offset: int) -> Page:
        """The kept calls of a scope and chat (None: of all), newest first."""
        return self.store.list(scope=scope, chat_id=chat_id, limit=limit, offset=offset)

    def remembers(self) -> int:
        """For how many whole seconds back "not received" is certain (CONTRACT section 5)."""
        return max(0, int(min(self.settings.forget_after, self.store.age())))

    def _finished(self, call: Call, outcome: Outcome, response: SavedResponse | None, status: int) -> None:
        seconds = time.monotonic() - call.started
        size = len(response.body) if response else 0
        self._end(call, functools.partial(rule.finish, run=call.claim.run, outcome=outcome, response=response))
        facts = {"status": status, "seconds": seconds, "bytes": size, "ended": outcome.value}
        tell(signals.call_finished, self._sender, call.key, **facts)

    def _release(self, call: Call) -> None:
        self._end(call, functools.partial(rule.release, run=call.claim.run))
        tell(signals.call_released, self._sender, call.key)

    def _end(self, call: Call, decide: Callable[[Seen], Move]) -> None:
        if call.process != os.getpid():
            return  # we are the handler's fork: the run is our parent's
        run = call.claim.run
        call.ended = True
        self._calls().pop(run, None)
        if self._keeper:
            self._keeper.let_go(run)
        end = _End(call.key, Seen(call.claim.record, call.claim.version, 0.0), decide)
        try:
            self._settle(end)
        except StoreError as error:
            signals.log(logging.WARNING, call.key, "The end of a run could not be saved yet:", error)
            if self._keeper:
                self._keeper.again(functools.partial(self._settle, end), call.key, "The end of a run")

    def _settle(self, end: _End) -> None:
        while True:
            move = end.decide(end.seen)
            if move.owed and isinstance(move.put, Record):
                end.owed = move.put
            if move.do is Do.GONE:
                signals.log(logging.WARNING, end.key, "A run ended after its claim was lost; its end changes nothing.")
            if move.put is Put.AS_IT_IS:
                break
            try:
                swapped = self._swap(end.key, end.seen, move)
            except StoreFull:
                # A claim has room for its end without the body, and the first caller has the whole response.
                assert isinstance(move.put, Record) and move.put.response
                bare = SavedResponse(move.put.response.status)
                run = move.put.run
                end.decide = functools.partial(rule.finish, run=run, outcome=Outcome.TOO_LARGE, response=bare)
                continue
            if swapped.done:
                break
            end.seen = swapped.seen
        self._pay(end.owed)

    def _give_back(self, key: CallKey, run: str) -> None:
        seen = self.store.read(key)
        if rule.release(seen, run).do is not Do.GONE:
            self._settle(_End(key, seen, functools.partial(rule.release, run=run)))

    def _pay(self, owed: Record | None) -> None:
        """Call the hooks that a cancel which could not wait is owed: for a call that stands as `owed` says."""
        if owed:
            try:
                self._call_hooks(_canceled_call(owed))
            except BaseException:  # what the handler did wins
                signals.log(logging.ERROR, owed.key, "A cancel hook raised.", exc_info=True)

    def _swap(self, key: CallKey, seen: Seen, move: Move, *, repeat: bool = False) -> Swapped:
        assert move.put is not Put.AS_IT_IS
        return self.store.swap(
            key,
            seen.version,
            None if move.put is Put.NOTHING else move.put,
            forget_after=self.settings.forget_after,
            lease=self._lease(move),
            if_lost=move.if_lost,
            repeat=repeat,
        )

    def _lease(self, move: Move) -> float | None:
        if move.do in (Do.WAIT, Do.TELL_LATER):
            return None  # a cancel's mark is no sign of the owner's life
        return 0.0 if move.lost else self.settings.lease

    def _wait(self, key: CallKey, seen: Seen, waits: _Waits) -> Seen:
        timeout = waits.left()
        if seen.lease_until is not None:
            timeout = min(timeout, max(0.0, seen.lease_until - seen.now) + _LEASE_MARGIN)
        return self.store.wait(key, seen.version, timeout)

    @staticmethod
    def _refusal(code: str, record: Record) -> Answer:
        if code == "response_too_large" and record.response:
            return problem(code, saved_status=record.response.status_code)
        return problem(code)


@dataclasses.dataclass
class _End:
    """The end of a run on its way to the store, which may need several tries.

    `owed` is the record whose hooks are owed once it is there. It is kept from one try to the next: the store may have
    taken it, and only its reply may have been lost.
    """

    key: CallKey
    seen: Seen
    decide: Callable[[Seen], Move]
    owed: Record | None = None


class _Waits:
    """One request's waiting: it takes a place and starts its clock when it first has to."""

    def __init__(self, places: PerProcess[threading.Semaphore], timeout: float) -> None:
        self._places = places
        self._timeout = timeout
        self._place: threading.Semaphore | None = None
        self._since = 0.0

    def may_go_on(self) -> bool:
        """False when there is no place left, or no time."""
        if self._place is None:
            places = self._places()
            if not places.acquire(blocking=False):
                return False
            self._place = places
            self._since = time.monotonic()
        return self.left() > 0

    def left(self) -> float:
        return self._since + self._timeout - time.monotonic()

    @property
    def waited(self) -> float:
        return time.monotonic() - self._since if self._place else 0.0

    def end(self) -> None:
        if self._place:
            self._place.release()


def _canceled_call(record: Record) -> CanceledCall:
    assert record.found
    return CanceledCall(record.key, record.found.value, saved_response(record))
