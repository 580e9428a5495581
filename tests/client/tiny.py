"""What the client's tests send to: a small app with countable effects, and a small run-once around it.

TinyRunOnce speaks the wire of CONTRACT sections 4 to 6 as far as a client sees it, for one process and without limits.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import run_wsgi_app
from werkzeug.wrappers import Request, Response

PREFIX = "/api/v0/tool-calls"
LIMIT = 30
"""Seconds that a test waits at most for something that should happen."""


class Effects:
    """POST /effects {"n": …} has the effect n once per run. `hold` numbers wait in their run until they are let go."""

    def __init__(self, hold: Iterable[int] = ()) -> None:
        self.counts: Counter[int] = Counter()
        self.started = {n: threading.Event() for n in hold}
        self.let_go = {n: threading.Event() for n in hold}
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        if request.path != "/effects":
            return Response("no such page", 404, mimetype="text/plain")(environ, start_response)
        n = json.loads(request.get_data())["n"]
        with self._lock:
            self.counts[n] += 1
        if n in self.started:
            self.started[n].set()
            assert self.let_go[n].wait(LIMIT)
        return Response(json.dumps({"n": n, "square": n * n}), 201, mimetype="application/json")(environ, start_response)


@dataclass
class Call:
    state: str = "running"
    found: str | None = None
    """What the first cancel found."""
    response: Response | None = None
    repeats: int = 0
    started_at: float = field(default_factory=time.time)


class TinyRunOnce:
    def __init__(self, app: Any, *, wait_timeout: float = 25, remembers: float = 3600) -> None:
        self.app = app
        self.wait_timeout = wait_timeout
        self.remembers = remembers
        self.calls: dict[tuple[str, str], Call] = {}
        self.requests: list[Request] = []
        self.before_cancel: Callable[[str], None] = lambda _: None
        self.cancel_hooks: list[Callable[[str], None]] = []
        self._changed = threading.Condition()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        environ["wsgi.input"] = io.BytesIO(request.get_data())
        self.requests.append(request)
        chat = request.headers.get("Coder-Chat-Id")
        call_id = request.headers.get("Coder-Tool-Call-Id")
        path = environ["PATH_INFO"]
        if path == PREFIX:
            response = self._list(chat, request)
        elif path.startswith(PREFIX + "/") and path.endswith("/cancel"):
            response = self._cancel((chat, path[len(PREFIX) + 1 : -len("/cancel")]))
        elif call_id is not None and request.method == "POST":
            response = self._call((chat, call_id), environ)
        else:
            response = self._run(environ)
        return response(environ, start_response)

    def _run(self, environ: dict[str, Any]) -> Response:
        return Response(*run_wsgi_app(self.app, environ, buffered=True))

    def _call(self, key: tuple[str, str], environ: dict[str, Any]) -> Response:
        with self._changed:
            call = self.calls.get(key)
            if call is None:
                call = self.calls[key] = Call()
            else:
                call.repeats += 1
                if call.found is not None:
                    return problem(409, "canceled", "The tool call was canceled.")
                if not self._changed.wait_for(lambda: call.response, self.wait_timeout):
                    return problem(409, "still_running", "It is still running.", retry_after=0)
                response = call.response
                return Response(
                    response.data, response.status, [*response.headers, ("Idempotent-Replayed", "true")]
                )
        response = self._run(environ)
        with self._changed:
            call.response, call.state = response, "done"
            self._changed.notify_all()
        return response

    def _cancel(self, key: tuple[str, str]) -> Response:
        self.before_cancel(key[1])
        with self._changed:
            call = self.calls.setdefault(key, Call("canceled", "not_received"))
            call.found = call.found or call.state
            for hook in self.cancel_hooks:
                hook(key[1])
            if call.found == "not_received":
                return answer(200, {"received": False, "state": "not_received", "remembers": self.remembers})
            if not self._changed.wait_for(lambda: call.response, self.wait_timeout):
                return answer(202, {"received": True, "state": "running"})
            return answer(200, {"received": True, "state": call.found, **saved(call.response)})

    def _list(self, chat: str | None, request: Request) -> Response:
        limit, offset = request.args.get("limit", 50, int), request.args.get("offset", 0, int)
        with self._changed:
            entries = [
                {
                    "id": call_id,
                    "state": call.state,
                    "canceled": call.found is not None,
                    "started_at": call.started_at,
                    "finished_at": None,
                    "status": call.response.status_code if call.response else None,
                    "repeats": call.repeats,
                }
                for (call_chat, call_id), call in reversed(self.calls.items())
                if call_chat == chat
            ]
        page = entries[offset : offset + limit]
        return answer(
            200, {"tool_calls": page, "total": len(entries), "offset": offset, "has_more": offset + limit < len(entries)}
        )


def saved(response: Response) -> dict[str, Any]:
    facts = {"status": response.status_code, "content_type": response.content_type}
    return facts | ({"body": base64.b64encode(response.data).decode()} if response.data else {})


def answer(status: int, document: dict[str, Any]) -> Response:
    return Response(json.dumps(document), status, mimetype="application/json")


def problem(status: int, code: str, detail: str, *, retry_after: float | None = None) -> Response:
    document = {
        "type": f"urn:flask-runonce:{code}",
        "title": code,
        "status": status,
        "detail": detail,
        "code": code,
        "retryable": retry_after is not None,
        "message": code,
    }
    headers = [] if retry_after is None else [("Retry-After", str(retry_after))]
    return Response(json.dumps(document), status, headers, mimetype="application/problem+json")


class _Quiet(WSGIRequestHandler):
    def log(self, *args: Any) -> None:
        pass


@contextmanager
def serving(app: Any) -> Any:
    """The app on loopback, a thread per request; gives (host, port)."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
