"""An app with the dashboard mounted, for all of its tests, and a night that is worth a picture."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flask import Flask, Response, abort, request

from flask_runonce import CallKey, RunOnce, SavedResponse, current_call, signals
from flask_runonce.contrib.dashboard import make_dashboard
from flask_runonce.contrib.dashboard.hour import LastHour
from flask_runonce.record import NOW, Found, Outcome, Record, State
from flask_runonce.stores import MemoryStore, Store

LIMIT = 30
"""Seconds that a test waits at most for something that should happen."""

HOSTILE_ID = "<img/src=x/onerror=alert(1)>'\"&?#/../%2e%2e;"
HOSTILE_BODY = "</pre><script>alert(1)</script>\u202egnp.exe\x00\x1b[31m & &amp; {{ 7*7 }}"
HOSTILE_SCOPE = "<b>ada</b>\u202e"


class Site:
    """An app whose calls do what their JSON body says; `hold` makes a run last until it is canceled, or let go."""

    def __init__(
        self,
        store: Store | str = "memory://",
        config: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.allowed = True
        self.holding = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.stopped: list[bool] = []
        self.app = Flask("site")
        self.app.config.from_mapping({"SECRET_KEY": "for tests", "RUNONCE_CANCEL_TIMEOUT": LIMIT})
        self.app.config.from_mapping(config or {})
        self.runonce = RunOnce(store=store, scope=lambda environ: environ.get("HTTP_SCOPE"))
        self.app.extensions["runonce_dashboard"] = LastHour(self.app, clock=clock)
        self.app.register_blueprint(make_dashboard(guard=self.guard))
        self.runonce.init_app(self.app)
        self.app.add_url_rule("/run", view_func=self.runonce.once(self.run), methods=["POST"])

    def guard(self, environ: dict[str, Any]) -> None:
        if not self.allowed:
            abort(401)

    def run(self) -> Response:
        order = request.get_json()
        if order.get("hold"):
            self.holding.release()
            while not (stopped := current_call.wait_canceled(0.05)) and not self.let_go.is_set():
                pass
            self.stopped.append(stopped)
        if order.get("raise"):
            raise RuntimeError("as ordered")
        if order.get("release"):
            current_call.release()
        return Response(order.get("answer", "done"), order.get("status", 201), headers=order.get("headers"))

    @property
    def store(self) -> Store:
        store: Store = self.app.extensions["runonce"].runner.store
        return store

    def send(self, call: str, chat: str = "chat-1", scope: str = "", **order: Any) -> int:
        """Send a call, or a repeat of it, as a client would. The status."""
        headers = {"Coder-Chat-Id": chat, "Coder-Tool-Call-Id": call, **({"Scope": scope} if scope else {})}
        with contextlib.suppress(RuntimeError):
            return self.app.test_client().post("/run", json=order, headers=headers).status_code
        return 500

    @contextlib.contextmanager
    def held(self, call: str, chat: str = "chat-1", repeats: int = 0) -> Iterator[None]:
        """A call that runs, and `repeats` of it that wait, until the block ends."""
        threads = [
            threading.Thread(target=self.send, args=(call, chat), kwargs={"hold": True}) for _ in range(repeats + 1)
        ]
        try:
            for thread in threads:
                thread.start()
                if thread is threads[0]:
                    assert self.holding.acquire(timeout=LIMIT)
            while self.store.read(CallKey("", chat, call)).repeats < repeats:
                assert threads[0].is_alive()
            yield
        finally:
            self.let_go.set()
            for thread in threads:
                thread.join(LIMIT)


def put(store: Store, key: CallKey, **facts: Any) -> None:
    """Keep a record that is done, or as `facts` say."""
    state = facts.pop("state", State.DONE)
    if state is State.DONE:
        response = SavedResponse("201 CREATED", (("Content-Type", "text/plain"),), b"done")
        facts = {"outcome": Outcome.RESPONSE, "response": response, "finished_at": NOW, **facts}
    seen = store.read(key).version
    record = Record(key, state, **{"run": "run", "owner": "web-1:4711", **facts})
    assert store.swap(key, seen, record, forget_after=7200, lease=30).done


class Timer:
    """Seconds that a test sets, for a store and for the memory of the last hour alike."""

    def __init__(self) -> None:
        self.seconds = 3600.0
        self._unix = time.time() - 3600

    def __call__(self) -> float:
        return self.seconds

    def unix(self) -> float:
        return self._unix + self.seconds


class Night:
    """A site and the hour before now, in which one call was sent 37 times, and others went as calls go."""

    def __init__(self) -> None:
        self._dice = random.Random(36)
        self._timer = Timer()
        self.site = Site(MemoryStore(timer=self._timer), clock=self._timer.unix)
        self.site.store.age()  # its clock starts here, an hour late, and goes on from an hour ago
        self._timer.seconds = 0.0
        chats = [self._id() for _ in range(7)]
        tools = ("execute", "execute", "edit-files", "write-file", "search")
        self.storm = self._key(chats[2], "execute")
        for number in range(200):
            self._timer.seconds += self._dice.expovariate(1 / 17)
            if number == 193:
                self._be_sent_often(self.storm)
            self._go(self._key(self._dice.choice(chats), self._dice.choice(tools)))
        for waiting in (0, 3):
            self._timer.seconds += 4
            self._run(self._key(chats[waiting], "execute"), waiting)
        self._timer.seconds = max(self._timer.seconds + 9, 3600.0)

    def _go(self, key: CallKey) -> None:
        ran = min(300.0, self._dice.lognormvariate(-0.6, 2.0))
        (fate,) = self._dice.choices(("done", "error", "canceled", "before", "unknown"), (80, 6, 5, 4, 2))
        if fate == "before":
            put(self.site.store, key, state=State.CANCELED, run="", owner="", found=Found.NOT_RECEIVED)
            self._tell(signals.call_canceled, key, state="not_received", pending=False)
            return
        self._tell(signals.call_started, key)
        waits = [ran * self._dice.random()] if self._dice.random() < 0.2 else []
        self._end(key, fate, ran, waits)

    def _be_sent_often(self, key: CallKey) -> None:
        self._run(key, 35)
        self._timer.seconds += 24.3
        self._end(key, "done", 24.3, [24.2 - 0.4 * number for number in range(35)])
        self._timer.seconds += 11
        self._repeat(key, 0.0)

    def _run(self, key: CallKey, waiting: int) -> None:
        put(self.site.store, key, state=State.RUNNING)
        self._tell(signals.call_started, key)
        for _ in range(waiting):
            self._touch(key)

    def _end(self, key: CallKey, fate: str, ran: float, waits: list[float]) -> None:
        """The run ends, `ran` seconds after it began, and those who waited are answered."""
        status = "422 UNPROCESSABLE ENTITY" if fate == "error" else "201 CREATED"
        body = b'{"exit_code": 0, "output": "412 passed, 3 skipped in 22.81s\\n"}\n'
        facts: dict[str, Any] = {"response": SavedResponse(status, (("Content-Type", "application/json"),), body)}
        if fate == "unknown":
            facts = {"response": None, "outcome": Outcome.UNKNOWN}
        found = Found.RUNNING if fate == "canceled" else None
        running = self.site.store.read(key).record
        began = running.created_at if running else self._timer.unix() - ran
        put(self.site.store, key, found=found, created_at=began, **facts)
        self._tell(signals.call_finished, key, status=500 if fate == "unknown" else int(status[:3]), seconds=ran)
        for seconds in waits:
            if running is None:
                self._touch(key)
            self._tell(signals.call_replayed, key, status=int(status[:3]), seconds=seconds)
        if found:
            self._tell(signals.call_canceled, key, state="running", pending=False)

    def _repeat(self, key: CallKey, seconds: float) -> None:
        self._touch(key)
        self._tell(signals.call_replayed, key, status=201, seconds=seconds)

    def _touch(self, key: CallKey) -> None:
        self.site.store.swap(key, "", None, forget_after=7200, lease=30, repeat=True)

    def _tell(self, signal: Any, key: CallKey, **facts: Any) -> None:
        signal.send(self.site.app, key=key, **facts)

    def _id(self) -> str:
        return str(uuid.UUID(int=self._dice.getrandbits(128), version=4))

    def _key(self, chat: str, tool: str) -> CallKey:
        return CallKey("", chat, f"call_{self._dice.randrange(16**8):08x}/{tool}")
