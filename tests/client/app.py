"""What the client's tests send to: an app with countable effects, behind the real middleware."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

from flask_runonce import RunOnceMiddleware

LIMIT = 30
"""Seconds that a test waits at most for something that should happen."""

HELD = 13
"""The effect whose run lasts until the test lets it go."""

CANCELABLE = 14
"""The effect whose run lasts until it is canceled."""


class Effects:
    """POST /effects {"n": …} has the effect n once per run."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.started = threading.Event()
        self.let_go = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        if request.path != "/effects":
            return Response("no such page", 404, mimetype="text/plain")(environ, start_response)
        n = json.loads(request.get_data())["n"]
        with self._lock:
            self.counts[n] += 1
        if n in (HELD, CANCELABLE):
            self.started.set()
            assert self.let_go.wait(LIMIT) if n == HELD else environ["runonce.call"].wait_canceled(LIMIT)
        return Response(json.dumps({"n": n, "square": n * n}), 201, mimetype="application/json")(
            environ, start_response
        )


class Recorded:
    """The effects behind the middleware, with the requests that arrived and the statuses that left."""

    def __init__(self, effects: Effects, **config: Any) -> None:
        self.middleware = RunOnceMiddleware(effects, config=config)
        self.requests: list[Request] = []
        self.statuses: list[int] = []
        self.answered = threading.Condition()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        def start(status: str, *args: Any) -> Any:
            with self.answered:
                self.statuses.append(int(status[:3]))
                self.answered.notify_all()
            return start_response(status, *args)

        self.requests.append(Request(environ.copy()))
        return self.middleware(environ, start)


class FailsTwice:
    """Answers 503 to the first two requests, 200 to the others; keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        self.sent.append((request.headers["Content-Type"], request.get_data()))
        return Response(status=503 if len(self.sent) < 3 else 200)(environ, start_response)


class _Quiet(WSGIRequestHandler):
    def log(self, *args: Any) -> None:
        pass


@contextmanager
def serving(app: Any) -> Iterator[tuple[str, int]]:
    """The app on loopback, a thread per request; gives (host, port)."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
