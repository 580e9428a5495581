"""Plain WSGI apps behind the middleware, and what tests of them need. No framework."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote
from wsgiref.util import setup_testing_defaults

import pytest
from webtest import TestApp, lint

from flask_runonce import CallKey, RunOnceMiddleware, runner
from flask_runonce.record import Record, Seen, State
from flask_runonce.stores import MemoryStore, Store, Swapped

PREFIX = "/api/v0/tool-calls"
LIMIT = 30.0
"""Seconds after which what a test waits for will not come any more."""
TEXT = [("Content-Type", "text/plain")]
AT_ONCE = {"RUNONCE_WAIT_TIMEOUT": 0, "RUNONCE_CANCEL_TIMEOUT": 0}
"""No repeat and no cancel waits, so a run that was left behind shows as still_running."""

T = TypeVar("T")
Environ = dict[str, Any]
Handler = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]


def headers(tool_call_id: str | None = "call-1", chat_id: str | None = "chat-1") -> dict[str, str]:
    """The two headers of a call, without the one that is None."""
    ids = {"Coder-Chat-Id": chat_id, "Coder-Tool-Call-Id": tool_call_id}
    return {name: value for name, value in ids.items() if value is not None}


def answer(body: bytes = b"done", status: str = "200 OK", headers: Iterable[tuple[str, str]] = TEXT) -> Handler:
    """A handler that answers this."""

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response(status, [*headers])
        return [body]

    return handler


def environ_of(tool_call_id: str = "call-1", body: bytes = b"", **more: Any) -> Environ:
    """A POST of a call, for a test that is its own server."""
    environ: Environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/act",
        "HTTP_CODER_CHAT_ID": "chat-1",
        "HTTP_CODER_TOOL_CALL_ID": tool_call_id,
        "QUERY_STRING": "",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        **more,
    }
    setup_testing_defaults(environ)
    environ["wsgi.errors"] = sys.stderr
    return environ


class Reply(NamedTuple):
    """What a server has sent: the status line, the headers in order, the body."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def code(self) -> str | None:
        """The code of a problem, None for another answer."""
        found: str | None = json.loads(self.body)["code"] if b"urn:flask-runonce:" in self.body else None
        return found


def ask(app: Callable[..., Iterable[bytes]], environ: Environ) -> Reply:
    """Be a server, as strict as PEP 3333 allows: the head goes out with the first byte of the body, or at its end."""
    head: list[Any] = []
    sent: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if exc_info and any(sent):
            raise exc_info[1].with_traceback(exc_info[2])
        assert exc_info or not head, "start_response was called twice"
        head[:] = [status, headers]
        return sent.append

    body = app(environ, start_response)
    try:
        for piece in body:
            assert head, "the body came before start_response was called"
            sent.append(piece)
    finally:
        getattr(body, "close", lambda: None)()
    return Reply(head[0], head[1], b"".join(sent))


def in_thread(function: Callable[..., T], *args: Any, **options: Any) -> Future[T]:
    """Call the function in a thread of its own: `result(LIMIT)` gives what it returned, or raises what it raised."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class WatchedStore(MemoryStore):
    """Tells who waits: `waits` are the key and the seconds of each wait that has begun."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waits: list[tuple[CallKey, float]] = []
        self._begun = threading.Semaphore(0)

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        self.waits.append((key, timeout))
        self._begun.release()
        return super().wait(key, version, timeout)

    def await_waiting(self, number: int = 1) -> None:
        """Return when so many more waits have begun. Whatever changes the record from now on ends them."""
        for _ in range(number):
            assert self._begun.acquire(timeout=LIMIT), "nobody waits"


class PatientStore(MemoryStore):
    """Waits without waiting: moves the runner's clock instead. Wakes early, for nothing, while there are `naps`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(runner, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        self.now = 0.0
        self.naps: list[float] = []
        self.asked: list[float] = []

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        self.asked.append(timeout)
        self.now += self.naps.pop(0) if self.naps else timeout
        return self.read(key)


class LeasedStore(WatchedStore):
    """Says that it is shared, and gives runs a lease. When the test sets `dead`, every owner is lost."""

    shared = True
    dead = False
    lease = 30.0

    def read(self, key: CallKey) -> Seen:
        return self._leased(super().read(key))

    def swap(self, key: CallKey, seen: str, new: Record | None, **options: Any) -> Swapped:
        options["if_lost"] = options.get("if_lost", False) and not self.dead
        swapped = super().swap(key, seen, new, **options)
        return swapped._replace(seen=self._leased(swapped.seen))

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        return self._leased(super().wait(key, version, timeout))

    def _leased(self, seen: Seen) -> Seen:
        if seen.record is None or seen.record.state is not State.RUNNING:
            return seen
        return seen._replace(lease_until=seen.now if self.dead else seen.now + self.lease)


class Site:
    """`handler` behind the middleware, with WebTest's lint on both of its sides; `runs` counts the handler's runs.

    `linted=False` is for handlers that break PEP 3333 on purpose: nothing is checked then.
    """

    def __init__(self, handler: Handler, *, linted: bool = True, config: dict[str, Any] | None = None, **options: Any):
        self.runs = 0
        self.handler = handler
        app = lint.middleware(self._count) if linted else self._count
        if not {"guard", "scope"} & options.keys():
            options["guard"] = lambda environ: None
        self.middleware = RunOnceMiddleware(app, config=config, **options)
        self.client = TestApp(self.middleware, lint=linted)

    def _count(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.runs += 1
        return self.handler(environ, start_response)

    @property
    def store(self) -> Store:
        return self.middleware._service.runner.store

    def call(
        self,
        tool_call_id: str | None = "call-1",
        chat_id: str | None = "chat-1",
        *,
        path: str = "/act",
        method: str = "POST",
        body: bytes = b"",
        environ: Environ | None = None,
        **more: str,
    ) -> Any:
        """WebTest's response, whatever its status. `more` are headers, `environ` what else the server says."""
        sent = {**headers(tool_call_id, chat_id), **more}
        return self.client.request(
            path, method=method, body=body, headers=sent, environ=environ or {}, expect_errors=True
        )

    def opened(self) -> Any:
        """The body of call-1's response, in the hands of a server that has not read it yet."""
        return self.middleware(environ_of(), lambda *head: None)

    def cancel(self, tool_call_id: str = "call-1", chat_id: str | None = "chat-1", **more: str) -> Any:
        sent = {**headers(None, chat_id), **more}
        return self.client.post(f"{PREFIX}/{quote(tool_call_id)}/cancel", headers=sent, expect_errors=True)

    def get(self, path: str = "", chat_id: str | None = "chat-1", **more: str) -> Any:
        """The list, or with "/<ID>" one call of it."""
        return self.client.get(PREFIX + path, headers={**headers(None, chat_id), **more}, expect_errors=True)

    @contextlib.contextmanager
    def held(self, tool_call_id: str = "call-1", **options: Any) -> Iterator[Future[Any]]:
        """A call whose handler has started and goes on at the end of the context. Gives its answer, in the future."""
        handler, started, go_on = self.handler, threading.Event(), threading.Event()

        def gate(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
            self.handler = handler  # only this call is held
            started.set()
            assert go_on.wait(LIMIT), "the handler was not let go"
            return handler(environ, start_response)

        self.handler = gate
        first = in_thread(self.call, tool_call_id, **options)
        first.add_done_callback(lambda first: started.set())
        try:
            assert started.wait(LIMIT) and not first.done(), "the handler does not start"
            yield first
        finally:
            go_on.set()
            first.exception(LIMIT)
