"""HTTP over a socket: a server gets exactly the bytes that a test means."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
from typing import Any, NamedTuple

PREFIX = "/api/v0/tool-calls"
CHAT = "chat-1"
LIMIT = 60
"""Seconds after which an answer will not come any more."""


class Answer(NamedTuple):
    """An answer that arrived whole; `kept` says that its connection takes another request."""

    status: int
    replayed: bool
    body: bytes
    kept: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of our problem, "" for any other answer."""
        return str(self.json["code"]) if b"urn:flask-runonce:" in self.body else ""


class Wire:
    """A connection to a server on this `port`. `window` bounds the bytes that may come before they are read."""

    def __init__(self, port: int, *, window: int | None = None) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(LIMIT)
        if window:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        self._socket.connect(("127.0.0.1", port))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self, size: int) -> bytes:
        return self._socket.recv(size)

    def answer(self) -> Answer:
        """The next answer. Raises OSError or HTTPException when it does not come whole."""
        with contextlib.closing(http.client.HTTPResponse(self._socket, method="POST")) as response:
            response.begin()
            body = response.read()
            replayed = response.headers.get("Idempotent-Replayed") == "true"
            return Answer(response.status, replayed, body, not response.will_close)

    def reset(self) -> None:
        """Go away in a way that the server learns of with its next write."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def request(
    target: str,
    call: str | None = None,
    *lines: bytes,
    body: bytes = b"",
    method: str = "POST",
    version: str = "1.1",
    length: int | None = None,
) -> bytes:
    """The bytes of a request. `lines` are headers as they are to be sent; `length` is what is said of the body's."""
    head = [f"{method} {target} HTTP/{version}".encode(), b"Host: localhost", *lines]
    if call is not None:
        head += [b"Coder-Chat-Id: " + CHAT.encode(), b"Coder-Tool-Call-Id: " + call.encode()]
    if not any(line.lower().startswith(b"transfer-encoding:") for line in lines):
        head.append(b"Content-Length: %d" % (len(body) if length is None else length))
    return b"\r\n".join([*head, b"", body])


def chunked(*pieces: bytes) -> bytes:
    """A body in chunks (RFC 9112, section 7.1)."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def send(port: int, data: bytes) -> Answer:
    """Send a request on a connection of its own."""
    with Wire(port) as wire:
        wire.send(data)
        return wire.answer()
