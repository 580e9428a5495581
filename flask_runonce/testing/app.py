"""WebTest's `TestApp` for calls: a request says by keyword which call it is."""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote
from uuid import UUID

from ..settings import Settings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "'cgi' is deprecated", DeprecationWarning)  # WebOb's import, before Python 3.13
    from webtest import TestApp, TestResponse

_headers: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("headers")
"""Those of the call that is being sent, on their way through WebTest's methods to the request."""


def _naming(send: Callable[..., TestResponse]) -> Callable[..., TestResponse]:
    """`send`, which also takes `chat` and `tool_call`."""

    @functools.wraps(send)
    def named(
        app: RunOnceTestApp,
        *args: Any,
        chat: UUID | str | None = None,
        tool_call: UUID | str | None = None,
        **options: Any,
    ) -> TestResponse:
        before = _headers.set(app._headers_of(chat, tool_call))
        try:
            return send(app, *args, **options)
        finally:
            _headers.reset(before)

    return named


class RunOnceTestApp(TestApp):  # type: ignore[misc]
    """A `webtest.TestApp` each of whose request methods takes `chat` and `tool_call`, the IDs of a call.

    `chat` is the chat ID of requests that name none; None: those have none. `config` holds the app's `RUNONCE_…`
    settings, which may rename the headers and move the cancel routes; a Flask app's own are found. All other arguments
    are WebTest's. Headers that a request is given win over those that its IDs would make.
    """

    def __init__(
        self,
        app: Any,
        *args: Any,
        chat: UUID | str | None = "chat-1",
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(app, *args, **options)
        if config is None:
            own = getattr(app, "config", None)
            config = own if isinstance(own, Mapping) else {}
        settings = Settings.load(config)
        self.chat = chat
        self.url_prefix = settings.url_prefix
        self._chat_id_header = settings.chat_id_header
        self._tool_call_id_header = settings.tool_call_id_header

    get = _naming(TestApp.get)
    head = _naming(TestApp.head)
    options = _naming(TestApp.options)
    post = _naming(TestApp.post)
    post_json = _naming(TestApp.post_json)
    put = _naming(TestApp.put)
    put_json = _naming(TestApp.put_json)
    patch = _naming(TestApp.patch)
    patch_json = _naming(TestApp.patch_json)
    delete = _naming(TestApp.delete)
    delete_json = _naming(TestApp.delete_json)
    request = _naming(TestApp.request)

    def cancel(self, tool_call: UUID | str, *, chat: UUID | str | None = None, **options: Any) -> TestResponse:
        """Cancel the call `tool_call` of `chat`. `options` are those of `post`.

        Raises ValueError where the app has no cancel routes (`RUNONCE_URL_PREFIX` is None).
        """
        if self.url_prefix is None:
            raise ValueError("RUNONCE_URL_PREFIX is None: this app has no cancel routes.")
        url = f"{self.url_prefix}/{quote(str(tool_call), safe='')}/cancel"
        return self.post(url, chat=chat, **options)

    def do_request(self, req: Any, *args: Any, **options: Any) -> TestResponse:
        """WebTest's: all requests come by here."""
        for name, value in _headers.get({}).items():
            req.headers.setdefault(name, value)
        return super().do_request(req, *args, **options)

    def _headers_of(self, chat: UUID | str | None, tool_call: UUID | str | None) -> dict[str, str]:
        chat = self.chat if chat is None else chat
        ids = {self._chat_id_header: chat, self._tool_call_id_header: tool_call}
        return {name: str(value) for name, value in ids.items() if value is not None}
