"""A client without a library that might retry, pool or hide anything."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

PREFIX = "/api/v0/tool-calls"
CHAT = "chat"


class Reply(NamedTuple):
    """An answer that arrived whole."""

    status: int
    content_type: str
    replayed: bool
    retry_after: str | None
    body: bytes

    @property
    def json(self) -> Any:
        """The body's JSON, None where it is none."""
        with contextlib.suppress(ValueError):
            return json.loads(self.body)
        return None

    @property
    def code(self) -> str:
        """The problem's code, "" where the answer is no problem."""
        document = self.json if self.content_type == "application/problem+json" else None
        return str(document["code"]) if document else ""

    @property
    def saved(self) -> Any:
        """In a cancel's answer: the JSON of the saved response's body, None where there is none."""
        document = self.json or {}
        return json.loads(base64.b64decode(document["body"])) if "body" in document else None


class Service:
    """The judged app on a `port` of loopback; `patience` is how many seconds it may take to answer."""

    def __init__(self, port: int, patience: float = 60) -> None:
        self.port = port
        self.patience = patience

    def call(self, path: str, call: str, plan: Mapping[str, Any] | None = None, attempt: str = "") -> Reply:
        return self.send("POST", path, _headers(call, attempt), json.dumps(plan or {}).encode())

    def cancel(self, call: str) -> Reply:
        return self.send("POST", f"{PREFIX}/{call}/cancel", _headers())

    def show(self, call: str) -> Reply:
        return self.send("GET", f"{PREFIX}/{call}", _headers())

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Reply:
        """Send a request. Raises OSError or HTTPException when the connection ends first, TimeoutError when it is late.

        A late answer is one that has not arrived whole within `patience`, however often a part of it comes.
        """
        deadline = time.monotonic() + self.patience
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            whole = response.read()
            if time.monotonic() > deadline:
                raise TimeoutError
            return Reply(
                response.status,
                response.headers.get("Content-Type", ""),
                response.headers.get("Idempotent-Replayed") == "true",
                response.headers.get("Retry-After"),
                whole,
            )

    def hang_up(self, path: str, call: str, plan: Mapping[str, Any], attempt: str, *, after: float) -> None:
        """Send a call and go away after so many seconds, without a look at the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(plan).encode(), _headers(call, attempt))
            time.sleep(after)
            # Reset, not closed: the server's next write fails at once.
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _headers(call: str = "", attempt: str = "") -> dict[str, str]:
    headers = {
        "Content-Type": "application/json",
        "Coder-Chat-Id": CHAT,
        "Coder-Tool-Call-Id": call,
        "X-Attempt": attempt,
    }
    return {name: value for name, value in headers.items() if value}
