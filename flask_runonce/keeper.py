"""The one background thread of a process that shares its store: it says that our runs are alive, and tries again.

It renews the leases of all runs in one call, learns by that which of them were canceled, and repeats the saves and
releases that the store could not take. It is started with the first run and sleeps while there is nothing to keep.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from .call import Call
from .errors import StoreError
from .process import PerProcess
from .record import CallKey
from .signals import log, logger
from .stores.protocol import Store

INTERVAL = 0.5
"""Seconds between renewals at most: a cancel in another process is to be known here within a second."""


class Keeper:
    """Keeps the runs of this process alive in `store`. `forget_after` and `lease` are seconds, as for its verbs."""

    def __init__(self, store: Store, *, forget_after: float, lease: float) -> None:
        self._store = store
        self._forget_after = forget_after
        self._lease = lease
        self._interval = min(INTERVAL, lease / 4)
        self._work = PerProcess(_Work)

    def hold(self, call: Call) -> None:
        """Renew the call's lease until `let_go`."""
        work = self._work()
        work.calls[call.claim.run] = call
        self._wake(work)

    def let_go(self, run: str) -> None:
        """The run has ended: its lease may end."""
        self._work().calls.pop(run, None)

    def again(self, do: Callable[[], None], key: CallKey, what: str) -> None:
        """Do it until it raises no `StoreError`, or until a lease has passed and it can change nothing any more.

        The log says `what` could not be saved then: "The end of a run", or the like.
        """
        work = self._work()
        work.jobs.append(_Job(do, key, what, time.monotonic() + self._lease))
        self._wake(work)

    def _wake(self, work: _Work) -> None:
        work.wake.set()
        if next(work.first, False):
            try:
                threading.Thread(target=self._loop, args=(work,), name="flask-runonce", daemon=True).start()
            except BaseException:
                work.first = iter((True,))  # there may be room for a thread at the next run
                raise

    def _loop(self, work: _Work) -> None:
        while True:
            work.wake.wait()
            time.sleep(self._interval)
            try:
                self._renew(work)
                self._try_again(work)
            except BaseException:  # a thread that dies here would let every lease of the process end
                logger.exception("Leases could not be renewed.")
            work.wake.clear()
            if work.calls or work.jobs:  # also what came between the look and the clear
                work.wake.set()

    def _renew(self, work: _Work) -> None:
        calls = dict(work.calls)
        if not calls:
            return
        try:
            renewed = self._store.renew(
                [call.claim for call in calls.values()], forget_after=self._forget_after, lease=self._lease
            )
        except StoreError as error:
            logger.warning("Leases could not be renewed: %s", error)
            return
        for run in renewed.canceled:
            calls[run].tell_canceled()
        for run in renewed.lost:
            if work.calls.pop(run, None):  # not one that has ended meanwhile
                log(logging.WARNING, calls[run].key, "The claim to a run was lost; its end will change nothing.")

    def _try_again(self, work: _Work) -> None:
        for _ in range(len(work.jobs)):
            job = work.jobs.popleft()
            try:
                job.do()
            except StoreError as error:
                if time.monotonic() < job.deadline:
                    work.jobs.append(job)
                else:
                    log(logging.ERROR, job.key, f"{job.what} could not be saved before its lease ended:", error)
            except BaseException:
                log(logging.ERROR, job.key, f"{job.what} could not be saved.", exc_info=True)


class _Job(NamedTuple):
    do: Callable[[], None]
    key: CallKey
    what: str
    deadline: float


class _Work:
    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.jobs: collections.deque[_Job] = collections.deque()
        self.wake = threading.Event()
        self.first = iter((True,))  # gives True once, to one thread
