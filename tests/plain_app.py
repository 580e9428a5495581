"""Plain WSGI apps behind the middleware, and what tests of them need. No framework."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.util import setup_testing_defaults

from webtest import TestApp, lint

from flask_runonce import RunOnceMiddleware

PREFIX = "/api/v0/tool-calls"
LIMIT = 30.0
"""Seconds after which what a test waits for will not come any more."""
TEXT = [("Content-Type", "text/plain")]

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

    def call(
        self,
        tool_call_id: str | None = "call-1",
        chat_id: str | None = "chat-1",
        *,
        path: str = "/act",
        method: str = "POST",
        body: bytes = b"",
        **more: str,
    ) -> Any:
        """WebTest's response, whatever its status."""
        sent = {**headers(tool_call_id, chat_id), **more}
        return self.client.request(path, method=method, body=body, headers=sent, expect_errors=True)

    def cancel(self, tool_call_id: str = "call-1", chat_id: str | None = "chat-1") -> Any:
        return self.client.post(f"{PREFIX}/{tool_call_id}/cancel", headers=headers(None, chat_id), expect_errors=True)
