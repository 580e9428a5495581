"""The Flask extension: `RunOnce`, and `once` for views (CONTRACT section 2)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from flask import Flask, Response, current_app, has_app_context, request
from flask.globals import request_ctx
from werkzeug.datastructures import Headers

from .blueprint import EXTENSION, make_blueprint, response_of, service_of_app
from .call import Call, CanceledCall, call_each
from .capture import as_current, collect
from .cli import group
from .problems import Answer
from .service import CALL, UNSET, Fingerprint, Guard, Hook, Key, Options, Scope, Service, Unset
from .settings import METHODS, Settings
from .signals import logger
from .stores import Store

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

View = TypeVar("View", bound=Callable[..., Any])
_View: TypeAlias = Callable[..., Any]

_RAISED = "runonce.raised"


class RunOnce:
    """Runs the calls of decorated views at most once.

    `store` is a store or its URI (default: `RUNONCE_STORE_URI`). The callables take the WSGI environ and run inside the
    request context: `key` answers a `CallKey` or None, `scope` a string or None, `guard` raises an HTTPException to
    refuse a cancel, list or show. One object serves several apps; it keeps nothing of theirs.
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        store: Store | str | None = None,
        key: Key | None = None,
        scope: Scope | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._scope = scope
        self._guard = guard
        self._hooks: list[Hook] = []
        self._decorated = _Decorated()
        self.blueprint = make_blueprint()
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Set run-once up for `app`: reads its `RUNONCE_…` configuration and mounts the blueprint.

        Raises `ConfigError` for a setting that is unknown or makes no sense, RuntimeError when `app` has a RunOnce.
        """
        if EXTENSION in app.extensions:
            raise RuntimeError("This app has a RunOnce already.")
        service = Service(
            Settings.load(app.config),
            store=self._store,
            key=self._key,
            scope=self._scope,
            guard=self._guard,
            sender=app,
            call_hooks=functools.partial(self._call_hooks, app),
        )
        app.extensions[EXTENSION] = service
        if service.settings.url_prefix is not None:
            app.register_blueprint(self.blueprint, url_prefix=service.settings.url_prefix)
        app.cli.add_command(group)
        app.wsgi_app = _Entrance(app, service, self._decorated)  # type: ignore[method-assign]
        _let_errors_pass(app)

    @overload
    def once(self, view: View, /) -> View: ...

    @overload
    def once(
        self,
        view: None = None,
        /,
        *,
        required: bool | None = None,
        fingerprint: Fingerprint | Unset = UNSET,
        on_lost: str | None = None,
        result_budget: int | None | Unset = UNSET,
        methods: Collection[str] = METHODS,
    ) -> Callable[[View], View]: ...

    def once(self, view: View | None = None, /, **options: Any) -> View | Callable[[View], View]:
        """Run a view's calls at most once. A decorator, with or without arguments; it stands below `@app.route`.

        `required`: refuse requests without a key. `fingerprint`: None turns it off, a callable takes the environ and
        answers bytes. `on_lost`: "refuse" or "rerun", for views that are safe to repeat when a run's owner was lost.
        `result_budget`: bytes that a text or JSON answer may have. `methods`: those that act. What is not given is the
        configuration's. Raises TypeError and ValueError for options that make no sense.
        """
        if view is None:
            return functools.partial(self._decorate, options=Options(**options))
        return self._decorate(view, options=Options(**options))

    def on_cancel(self, hook: Hook) -> Hook:
        """Have `hook` called with a `CanceledCall` at each cancel, to stop what the call left running. A decorator."""
        self._hooks.append(hook)
        return hook

    def _decorate(self, view: View, *, options: Options) -> View:
        is_async = inspect.iscoroutinefunction(view)

        @functools.wraps(view)
        def once(*args: Any, **kwargs: Any) -> Any:
            service = service_of_app()
            # Before the claim: it raises where asgiref is missing. A class of the app's own may do more than Flask's.
            is_asked = is_async or current_app.__class__.ensure_sync is not Flask.ensure_sync
            sync_view = current_app.ensure_sync(view) if is_asked else view
            admitted = service.admit(request.environ, options)
            if isinstance(admitted, Answer):
                return response_of(admitted)
            if admitted is None:
                return sync_view(*args, **kwargs)
            return _run(service, admitted, functools.partial(sync_view, *args, **kwargs))

        with contextlib.suppress(TypeError):  # a callable object may have no hash: it is run once all the same
            self._decorated.views[view] = weakref.ref(once)
        self._decorated.any_required |= bool(options.required)
        return once  # type: ignore[return-value]

    def _call_hooks(self, app: Flask, call: CanceledCall) -> None:
        with contextlib.nullcontext() if has_app_context() else app.app_context():
            call_each(map(app.ensure_sync, self._hooks), call)


class _Decorated:
    """What each view became, for as long as there are both: some frameworks decorate anew for each request.

    `any_required`: a view refuses requests without a key.
    """

    def __init__(self) -> None:
        self.views: weakref.WeakKeyDictionary[_View, weakref.ref[_View]] = weakref.WeakKeyDictionary()
        self.any_required = False


class _Entrance:
    """Stands around `app.wsgi_app`: makes a body readable ahead of the view, where it may be a call's.

    And where we may answer ourselves, and have to read what is left of the body to its end.
    """

    def __init__(self, app: Flask, service: Service, decorated: _Decorated) -> None:
        self._app = app
        self._wsgi_app: WSGIApplication = app.wsgi_app
        self._service = service
        self._decorated = decorated
        self._first = True

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if self._first:
            self._first = False
            _report_misplaced(self._app, self._decorated)
        if self._decorated.any_required or self._service.may_read(environ):
            self._service.input(environ)
        return self._wsgi_app(environ, start_response)


def _run(service: Service, call: Call, view: Callable[[], Any]) -> Response:
    """Run the view and end the run with the response that the app makes of it, or of what it raised."""
    try:
        request.environ[CALL] = call
        with as_current(call), contextlib.ExitStack() as closing:
            response = _response_of_run(view)
            closing.callback(response.close)  # what fails is never sent, so nobody else would
            collected = collect(
                response.iter_encoded(),
                lambda: (response.status, list(response.headers)),
                limit=service.settings.max_body_bytes,
                result_budget=call.result_budget,
                whole=response.is_sequence,
            )
            close_body = getattr(response.response, "close", _nothing)
            closing.pop_all()
            if collected.rest is None:
                close_body()
        if collected.rest is None:
            service.end(call, collected)
    except BaseException as error:
        service.runner.fail(call)
        request.environ[_RAISED] = error
        raise
    if collected.rest is not None:
        response.response = service.tail(call, collected, close_body)
        return response
    response.response = [collected.body]
    response.direct_passthrough = False
    if collected.original_bytes is not None:
        response.headers = Headers(collected.headers)
    return response


def _response_of_run(view: Callable[[], Any]) -> Response:
    """The view's response, with what it asked for by `after_this_request`: that belongs to the run."""
    functions = getattr(request_ctx, "_after_request_functions", [])  # Flask has no public name for them
    there = len(functions)
    response = _response_of_view(view)
    functions[there:], ours = [], functions[there:]
    for function in ours:
        response = current_app.ensure_sync(function)(response)
    return response


def _response_of_view(view: Callable[[], Any]) -> Response:
    try:
        answer = view()
    except Exception as error:
        # Here, and not after the view, because an abort() and a handled error are the run's response.
        answer = current_app.handle_user_exception(error)
    return current_app.make_response(answer)


def _let_errors_pass(app: Flask) -> None:
    """Have an error that left a run treated as Flask treats one that its error handlers did not answer.

    They have had it already: asked again, one that raised would answer where the app would say 500.
    """
    handle = app.handle_user_exception

    @functools.wraps(handle)
    def handle_user_exception(error: Exception) -> Any:
        if request.environ.get(_RAISED) is error:
            raise error
        return handle(error)

    app.handle_user_exception = handle_user_exception  # type: ignore[method-assign,assignment]


def _report_misplaced(app: Flask, decorated: _Decorated) -> None:
    """Warn of each view whose decorator has no effect, because the app serves what it was put around."""
    served = {endpoint: _layers(view) for endpoint, view in app.view_functions.items()}
    for view, once in list(decorated.views.items()):
        if any(once() in layers for layers in served.values()):
            continue
        for endpoint, layers in served.items():
            if view in layers:
                logger.warning(
                    "The endpoint %r is not run once: its decorator stands above the route. Move it below.", endpoint
                )


def _layers(view: _View) -> list[_View]:
    layers = [view]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    return layers


def _nothing() -> None:
    pass
