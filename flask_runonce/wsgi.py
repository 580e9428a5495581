"""The middleware: run-once for any WSGI app (PEP 3333)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from werkzeug.exceptions import HTTPException

from . import routes
from .call import Call, CanceledCall, call_each
from .capture import Capture, Collected, as_current, collect
from .problems import Answer
from .service import CALL, UNSET, Fingerprint, Guard, Hook, Key, Options, Scope, Service, Unset
from .settings import MIDDLEWARE_RELEASE_STATUSES, Settings
from .stores import Store

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment


class RunOnceMiddleware:
    """Wraps a WSGI app so that each of its calls runs at most once, and serves the cancel routes (CONTRACT section 2).

    Place it inside the app's own authentication, or give it a `scope`. The callables take the environ: `key` answers a
    `CallKey` or None, `scope` a string or None, `guard` raises an HTTPException to refuse, `fingerprint` (None: off)
    answers bytes. `store` is a store or its URI, `config` a mapping of `RUNONCE_…` settings. Raises `ConfigError`.
    """

    def __init__(
        self,
        app: WSGIApplication,
        *,
        store: Store | str | None = None,
        key: Key | None = None,
        scope: Scope | None = None,
        guard: Guard | None = None,
        fingerprint: Fingerprint | Unset = UNSET,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.app = app
        settings = Settings.load(config or {}, release_statuses=MIDDLEWARE_RELEASE_STATUSES)
        self._options = Options(fingerprint=fingerprint)
        self._hooks: list[Hook] = []
        self._service = Service(
            settings, store=store, key=key, scope=scope, guard=guard, sender=app, call_hooks=self._call_hooks
        )

    def on_cancel(self, hook: Hook) -> Hook:
        """Have `hook` called with a `CanceledCall` at each cancel, to stop what the call left running. A decorator.

        Raises TypeError for an async function: WSGI has no event loop that would run it, so nothing would be stopped.
        """
        if inspect.iscoroutinefunction(hook):
            raise TypeError(f"A cancel hook of the middleware is no async function: nothing would await {hook!r}.")
        self._hooks.append(hook)
        return hook

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            admitted = self._route(environ) or self._service.admit(environ, self._options)
        except HTTPException as refusal:
            return refusal.get_response(environ)(environ, start_response)
        if admitted is None:
            return self.app(environ, start_response)
        if isinstance(admitted, Answer):
            return admitted(environ, start_response)
        return self._run(admitted, environ, start_response)

    def _route(self, environ: WSGIEnvironment) -> Answer | None:
        prefix = self._service.settings.url_prefix
        path: str = environ.get("PATH_INFO", "")
        if prefix is None or not path.startswith(prefix):
            return None
        method, rest = environ["REQUEST_METHOD"].upper(), path[len(prefix) :]
        if method == "GET" and not rest:
            return routes.list_calls(self._service, environ)
        if not rest.startswith("/"):
            return None
        name = rest[1:]
        if method == "POST" and name.endswith("/cancel"):
            return routes.cancel(self._service, environ, name.removesuffix("/cancel"))
        if method == "GET":
            return routes.show(self._service, environ, name)
        return None

    def _run(self, call: Call, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ[CALL] = call
        limit = self._service.settings.max_body_bytes
        capture = Capture(start_response, limit=limit, result_budget=call.result_budget)
        try:
            with as_current(call):
                body = self.app(environ, capture.start_response)
                close_body = getattr(body, "close", _nothing)
                rest = None
                try:
                    pieces = capture.pieces(body)
                    if capture.sent:
                        collected = Collected(*capture.head(), b"", pieces, too_large=True)
                    else:
                        collected = collect(
                            pieces,
                            capture.head,
                            limit=limit,
                            result_budget=call.result_budget,
                            whole=isinstance(body, (list, tuple)),
                        )
                    rest = collected.rest
                finally:
                    if rest is None:
                        close_body()
            if collected.rest is None:
                self._service.end(call, collected)
        except BaseException:
            self._service.runner.fail(call)
            raise
        if collected.rest is None:
            capture.send(collected.status, collected.headers)
            return [collected.body]
        tail = self._service.tail(call, collected, close_body)
        if not capture.sent:
            try:
                capture.send(collected.status, collected.headers)
            except BaseException:
                tail.close()
                raise
        return tail

    def _call_hooks(self, call: CanceledCall) -> None:
        call_each(self._hooks, call)


def _nothing() -> None:
    pass
