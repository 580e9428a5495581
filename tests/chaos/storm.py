"""The storm: many clients that send calls, repeats and cancels, hang up, forget, and note what they were answered."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import http.client
import itertools
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from flask_runonce.errors import StoreError
from flask_runonce.record import CallKey
from flask_runonce.rule import Do
from flask_runonce.runner import Runner
from tests.chaos.client import CHAT, Reply, Service

AUDIT = 90
"""Seconds within which, after the storm, each call must have an answer for good."""
BREATH = 0.2
"""Seconds that a client rests when the service cannot answer."""
FINAL = {"outcome_unknown", "canceled"}
"""The problems that are answers for good."""


class Asked(NamedTuple):
    """One request: when it was sent and when it was over (`time.monotonic`), and what came back.

    `reply` is None where the connection ended first; `late` says that this was our patience that ended.
    """

    attempt: str
    cancel: bool
    sent: float
    over: float
    reply: Reply | None
    late: bool = False
    audit: bool = False


class Forgotten(NamedTuple):
    """A person's wish that the call may run again, which may have been granted between two moments."""

    began: float
    ended: float


@dataclasses.dataclass(eq=False)
class Story:
    """One call, what its clients plan, and all that they saw."""

    call: str
    path: str
    plan: dict[str, Any]
    forgettable: bool
    asked: list[Asked] = dataclasses.field(default_factory=list)
    forgotten: list[Forgotten] = dataclasses.field(default_factory=list)


Deed = Callable[[Story], object]


class Storm:
    """Sends calls to `service` for as long as it is told. `runner` forgets calls; `lease` (seconds) is the app's."""

    def __init__(self, service: Service, runner: Runner, *, lease: float, seed: int, clients: int) -> None:
        self.stories: list[Story] = []
        self._service = service
        self._runner = runner
        self._lease = lease
        self._clients = clients
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._due: list[tuple[float, int, Deed, Story]] = []
        self._numbers = itertools.count()
        self._over = threading.Event()

    def blow(self, seconds: float) -> None:
        """Storm for so many seconds; returns when the last answer has come."""
        end = time.monotonic() + seconds

        def client(_: int) -> None:
            while time.monotonic() < end and not self._over.is_set():
                deed, story = self._next()
                deed(story)

        self._together(client, range(self._clients))

    def audit(self) -> None:
        """Ask for each call, in quiet, until it is answered for good."""
        self._together(self._settle, self.stories)

    def _together(self, work: Callable[[Any], None], items: Iterable[Any]) -> None:
        with ThreadPoolExecutor(self._clients) as pool:
            try:
                list(pool.map(work, items))
            except BaseException:
                self._over.set()
                raise

    def _next(self) -> tuple[Deed, Story]:
        """What is due, or else the first deed of a new story, whose others are put down for their time."""
        with self._lock:
            if not (self._due and self._due[0][0] <= time.monotonic()):
                self._begin()
            _, _, deed, story = heapq.heappop(self._due)
        return deed, story

    def _begin(self) -> None:
        rng = self._rng
        seconds = rng.choices((0, rng.uniform(0, 0.3), rng.uniform(0.3, 2), 3 * self._lease), (4, 4, 4, 1))[0]
        plan: dict[str, Any] = {"seconds": round(seconds, 2)}
        if rng.random() < 0.05:
            plan["fails"] = True
        path = "/rerun" if rng.random() < 0.15 else "/run"
        story = Story(f"call-{secrets.token_hex(8)}", path, plan, forgettable=rng.random() < 0.3)
        self.stories.append(story)
        first = 0.0
        kind = rng.random()
        if kind < 0.1:
            self._plan(story, self._cancel, 0.0)
            first = rng.choice((0.0, 0.05, 0.5))
        elif kind < 0.3:
            self._plan(story, self._cancel, rng.uniform(0, 1 + seconds))
        for _ in range(rng.choice((1, 2, 4, 8, 12))):
            self._plan(story, self._hang_up if rng.random() < 0.1 else self._call, first)
        for _ in range(rng.choice((0, 1, 2, 3))):
            self._plan(story, self._call, first + rng.uniform(0, 4 * self._lease))

    def _plan(self, story: Story, deed: Deed, after: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + after, next(self._numbers), deed, story))

    def _call(self, story: Story) -> None:
        asked = self._ask(story, cancel=False)
        if story.forgettable and asked.reply and asked.reply.code == "outcome_unknown" and len(story.forgotten) < 2:
            self._forget(story)
            with self._lock:
                for _ in range(4):
                    self._plan(story, self._call, 0.0)

    def _cancel(self, story: Story) -> None:
        self._ask(story, cancel=True)

    def _hang_up(self, story: Story) -> None:
        attempt, sent = secrets.token_hex(8), time.monotonic()
        with contextlib.suppress(OSError):  # the server may be gone first
            self._service.hang_up(story.path, story.call, story.plan, attempt, after=random.uniform(0, 0.2))
        story.asked.append(Asked(attempt, False, sent, time.monotonic(), None))

    def _forget(self, story: Story) -> None:
        began = time.monotonic()
        try:
            done = self._runner.forget(CallKey("", CHAT, story.call))
        except StoreError:
            done = Do.SAVED  # it may be
        if done is not Do.REFUSE:
            story.forgotten.append(Forgotten(began, time.monotonic()))

    def _ask(self, story: Story, *, cancel: bool, audit: bool = False) -> Asked:
        attempt, sent, reply, late = secrets.token_hex(8), time.monotonic(), None, False
        try:
            if cancel:
                reply = self._service.cancel(story.call)
            else:
                reply = self._service.call(story.path, story.call, story.plan, attempt)
        except TimeoutError:
            late = True
        except (OSError, http.client.HTTPException):
            pass  # killed, with what it had in hand
        asked = Asked(attempt, cancel, sent, time.monotonic(), reply, late, audit)
        story.asked.append(asked)
        if not reply or reply.status == 503:
            time.sleep(BREATH)
        return asked

    def _settle(self, story: Story) -> None:
        deadline = time.monotonic() + AUDIT
        while time.monotonic() < deadline and not self._over.is_set():
            reply = self._ask(story, cancel=False, audit=True).reply
            if reply and (reply.status == 201 or reply.code in FINAL or story.plan.get("fails") and not reply.code):
                return
            time.sleep(0.1)


def count_asked(stories: Sequence[Story]) -> int:
    """How many requests were sent in all."""
    return sum(len(story.asked) for story in stories)
