"""A proxy that loses requests and answers on purpose, to stand between a client and a server."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

LIMIT = 30


class Fault(Enum):
    NONE = "hand the answer on"
    REFUSE_BEFORE = "503, the server has not seen the request"
    RESET_BEFORE = "reset, the server has not seen the request"
    REFUSE_AFTER = "503, although the server ran it"
    RESET_AFTER = "reset, although the server ran it"
    DROP = "close without the answer"
    CUT = "close in the middle of the answer's body"
    DELAY = "keep the answer back until the client gives up"


BEFORE = {Fault.REFUSE_BEFORE, Fault.RESET_BEFORE}


class FaultyProxy:
    """Hands each request on to `upstream` (host, port) and treats it as `next_fault()` says; counts them in `seen`."""

    def __init__(self, upstream: tuple[str, int], next_fault: Callable[[], Fault]) -> None:
        self.upstream = upstream
        self.seen: Counter[Fault] = Counter()
        self._next_fault = next_fault
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._server.server_address)

    def choose(self) -> Fault:
        with self._lock:
            fault = self._next_fault()
            self.seen[fault] += 1
            return fault

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the open connections, so the client has to be closed before."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128
    proxy: FaultyProxy

    def shutdown_request(self, request: socket.socket) -> None:
        request.close()  # without the polite FIN, so that SO_LINGER can make it a reset


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.proxy.choose()
        if fault in BEFORE:
            status, headers, answer = 503, [("Content-Type", "text/html")], b"<h1>Service Unavailable</h1>"
        else:
            status, headers, answer = self._forward(body)
        if fault is Fault.REFUSE_AFTER:
            status, headers, answer = 503, [("Content-Type", "text/html")], b"<h1>Service Unavailable</h1>"

        if fault in (Fault.RESET_BEFORE, Fault.RESET_AFTER):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
        elif fault is Fault.DROP:
            self.close_connection = True
        elif fault is Fault.DELAY:
            self.connection.settimeout(LIMIT)
            assert self.connection.recv(1) == b"", "the client gave up"
            self.close_connection = True
        else:
            self._answer(status, headers, answer, cut=fault is Fault.CUT)

    do_GET = do_POST

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=LIMIT)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            answer = response.read()
        finally:
            upstream.close()
        dropped = {"connection", "content-length", "transfer-encoding"}
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in dropped]
        return response.status, headers, answer

    def _answer(self, status: int, headers: list[tuple[str, str]], answer: bytes, *, cut: bool) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer[: len(answer) // 2] if cut else answer)
        self.close_connection = self.close_connection or cut
