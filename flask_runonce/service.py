"""One app's run-once service: what the WSGI middleware and the Flask extension share, so that both stay thin."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeAlias

from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from . import keys
from .call import Call, CanceledCall
from .capture import Collected, Tail, kept_headers
from .errors import ConfigError, InvalidKey
from .fingerprint import Input, fingerprint
from .problems import Answer, invalid_key, problem
from .record import CallKey, SavedResponse
from .runner import Runner
from .settings import METHODS, Settings
from .signals import call_refused, log, logger, result_cut, tell
from .stores import Store, open_store

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

Key: TypeAlias = "Callable[[WSGIEnvironment], CallKey | None]"
Scope: TypeAlias = "Callable[[WSGIEnvironment], str | None]"
Guard: TypeAlias = "Callable[[WSGIEnvironment], object]"
Fingerprint: TypeAlias = "Callable[[WSGIEnvironment], bytes] | None"
Hook: TypeAlias = Callable[[CanceledCall], object]

CALL = "runonce.call"
"""The environ's key of the run that goes on."""


class Unset:
    """Stands for an option that was not given, where None is a value."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()


@dataclasses.dataclass(frozen=True)
class Options:
    """What `once(...)` takes (CONTRACT section 2). What is not given is the configuration's."""

    required: bool | None = None
    fingerprint: Fingerprint | Unset = UNSET
    on_lost: str | None = None
    result_budget: int | None | Unset = UNSET
    methods: Collection[str] = METHODS

    def __post_init__(self) -> None:
        if not (self.required is None or isinstance(self.required, bool)):
            raise TypeError(f"required must be True, False or None, not {self.required!r}.")
        if self.on_lost not in (None, "refuse", "rerun"):
            raise ValueError(f'on_lost must be "refuse" or "rerun", not {self.on_lost!r}.')
        if not (self.fingerprint is None or isinstance(self.fingerprint, Unset) or callable(self.fingerprint)):
            raise TypeError(f"fingerprint must be None or a callable, not {self.fingerprint!r}.")
        if isinstance(self.methods, str) or not self.methods or not all(isinstance(name, str) for name in self.methods):
            raise TypeError(f"methods must be a collection of method names, not {self.methods!r}.")
        Settings(result_budget=None if isinstance(self.result_budget, Unset) else self.result_budget)
        object.__setattr__(self, "methods", frozenset(method.upper() for method in self.methods))


class Service:
    """The settings, the callables and the runner of one app.

    `sender` is the app that signals name; `call_hooks` calls its cancel hooks. Raises `ConfigError`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store | str | None,
        key: Key | None,
        scope: Scope | None,
        guard: Guard | None,
        sender: Any,
        call_hooks: Callable[[CanceledCall], None],
    ) -> None:
        for name, value in (("key", key), ("scope", scope), ("guard", guard)):
            if value is not None and not callable(value):
                raise ConfigError(name, f"must be a callable or None, not {value!r}")
        if key is keys.idempotency_key and scope is None:
            raise ConfigError("scope", "is needed with keys.idempotency_key: all callers share one chat")
        self.settings = settings
        self._sender = sender
        self._has_own_key = key not in (None, keys.tool_call)
        self._tool_call_id_name = keys.environ_name(settings.tool_call_id_header)
        self._key: Key = (
            key
            if key is not None and self._has_own_key
            else functools.partial(
                keys.tool_call,
                chat_id_header=settings.chat_id_header,
                tool_call_id_header=settings.tool_call_id_header,
            )
        )
        self._scope = scope
        self._guard = guard
        if store is None or isinstance(store, str):
            store = open_store(
                store or settings.store_uri, prefix=settings.key_prefix, max_bytes=settings.max_store_bytes
            )
        if isinstance(store, type) or not callable(getattr(store, "swap", None)):
            raise ConfigError("store", f"must be a store, a store's URI or None, not {store!r}")
        self._abandoned: collections.deque[Tail] = collections.deque()
        self._first_unshared = iter((True,))  # gives True once, to one thread
        self.runner = Runner(store, settings, sender=sender, call_hooks=call_hooks)
        if guard is None and scope is None and settings.url_prefix is not None:
            logger.warning(
                "The cancel routes under %s are open to whoever reaches them: they have neither a guard nor a scope. "
                "Set a guard or a scope; the documentation's page on security says how.",
                settings.url_prefix,
            )

    def admit(self, environ: WSGIEnvironment, options: Options) -> Call | Answer | None:
        """Decide what a request is: a `Call` to run, an `Answer` to give, or None where it is no call of ours.

        Raises the HTTPException of a key or scope callable.
        """
        if environ["REQUEST_METHOD"].upper() not in options.methods:  # frameworks take "post" for POST
            return None
        try:
            return self._admit(environ, options)
        except HTTPException:
            self.input(environ).drain()
            raise

    def _admit(self, environ: WSGIEnvironment, options: Options) -> Call | Answer | None:
        if self._abandoned:
            self.end_abandoned()
        key = self._key_of(environ) if self.may_be_call(environ) else None
        if key is None:
            required = self.settings.required if options.required is None else options.required
            return self._refuse(environ, problem("key_required")) if required else None
        if isinstance(key, Answer):
            return self._refuse(environ, key)
        going_on = environ.get(CALL)
        if isinstance(going_on, Call) and going_on.key == key and not going_on.ended:
            return None  # we are inside this very run
        refusal = self.unshared(environ)
        if refusal:
            return self._refuse(environ, refusal, key)
        body = Input.of(environ, self.settings.fingerprint_bytes)
        if not body.fetch():
            return self._refuse(environ, problem("incomplete_body"), key)
        digest = self._fingerprint_of(environ, key, body, options)
        if isinstance(digest, Answer):
            return self._refuse(environ, digest, key)
        on_lost = options.on_lost or self.settings.on_lost
        admitted = self.runner.begin(key, digest, rerun=on_lost == "rerun")
        if isinstance(admitted, Answer):
            body.drain()
            return admitted
        budget = options.result_budget
        admitted.result_budget = self.settings.result_budget if isinstance(budget, Unset) else budget
        return admitted

    def end(self, call: Call, collected: Collected, whole: bool = True) -> None:
        """The run has answered `collected`: save what is to be kept of it.

        `whole` is False for a body that failed on its way to the first caller. Raises ValueError, TypeError or
        AttributeError for a status line or headers that cannot be saved; the run goes on then.
        """
        if collected.original_bytes is not None:
            facts = {"original_bytes": collected.original_bytes, "kept_bytes": len(collected.body)}
            tell(result_cut, self._sender, call.key, **facts)
        if not whole:
            self.runner.fail(call)
            return
        body = b"" if collected.too_large else collected.body
        saved = SavedResponse(collected.status, kept_headers(collected.headers), body)
        self.runner.finish(call, saved, too_large=collected.too_large)

    def tail(self, call: Call, collected: Collected, close_body: Callable[[], object]) -> Tail:
        """The body of a response that is too large to keep, for the first caller alone; its `close()` ends the run."""

        def end(whole: bool) -> None:
            try:
                self.end(call, collected, whole)
            except BaseException:
                self.runner.fail(call)
                raise

        return Tail(call, collected, close_body=close_body, end=end, abandon=self._abandoned.append)

    def end_abandoned(self) -> None:
        """End the runs whose streamed response nobody closed."""
        while self._abandoned:
            tail = self._abandoned.popleft()
            if tail.failure:
                message = "A streamed response that was thrown away could not be closed."
                logger.error(message, exc_info=tail.failure)
            tail.end_abandoned()

    def may_be_call(self, environ: WSGIEnvironment) -> bool:
        """False for a request that `admit` will certainly pass on, told without reading anything."""
        return self._has_own_key or self._tool_call_id_name in environ

    def may_read(self, environ: WSGIEnvironment) -> bool:
        """False for a request whose body `admit` and the cancel routes will certainly leave alone."""
        settings = self.settings
        return (
            self.may_be_call(environ)
            or settings.required
            or settings.url_prefix is None  # the app has mounted the routes where it likes
            or environ.get("PATH_INFO", "").startswith(settings.url_prefix)
        )

    def input(self, environ: WSGIEnvironment) -> Input:
        """The request's body, made readable ahead of the handler."""
        return Input.of(environ, self.settings.fingerprint_bytes if self.may_be_call(environ) else 0)

    def unshared(self, environ: WSGIEnvironment) -> Answer | None:
        """500 where several processes serve and each has a store of its own."""
        if self.runner.store.shared or self.settings.allow_unshared or not environ.get("wsgi.multiprocess"):
            return None
        if next(self._first_unshared, False):
            logger.error(
                "Several processes serve, and the store is not shared: calls are refused. Set RUNONCE_STORE_URI."
            )
        return problem("store_not_shared")

    def scope_of(self, environ: WSGIEnvironment) -> str:
        """The scope of a request, "" without one. Raises whatever the app's callable raises."""
        return "" if self._scope is None else keys.canonical_scope(self._scope(environ))

    def guard(self, environ: WSGIEnvironment) -> None:
        """Let the app refuse a cancel, a list or a show. Raises whatever the app's callable raises.

        A guard refuses by raising. One that seems to refuse in another way raises TypeError here: it must not be taken
        for one that let the request pass.
        """
        answer = None if self._guard is None else self._guard(environ)
        if inspect.iscoroutine(answer):
            answer.close()
            raise TypeError("A guard is no async function.")
        if answer is False or isinstance(answer, Response):
            raise TypeError(f"A guard refuses by raising an HTTPException, not by returning {answer!r}.")

    def _key_of(self, environ: WSGIEnvironment) -> CallKey | Answer | None:
        try:
            if self._has_own_key:
                key = self.input(environ).aside(self._key, environ)
                key = None if key is None else keys.canonical_key(key)
            else:
                key = self._key(environ)
            if key and self._scope is not None:
                key = key._replace(scope=self.input(environ).aside(self.scope_of, environ))
            return key
        except InvalidKey as error:
            return invalid_key(error)
        except HTTPException:
            raise
        except Exception:
            return key_failed("key or scope")

    def _fingerprint_of(
        self, environ: WSGIEnvironment, key: CallKey, body: Input, options: Options
    ) -> str | Answer | None:
        make = options.fingerprint
        if make is None:
            return None
        if isinstance(make, Unset):
            return fingerprint(environ, body.fingerprinted)
        try:
            return hashlib.sha256(body.aside(make, environ)).hexdigest()
        except HTTPException:
            raise
        except Exception:
            return key_failed("fingerprint", key)

    def _refuse(self, environ: WSGIEnvironment, answer: Answer, key: CallKey | None = None) -> Answer:
        self.input(environ).drain()
        tell(call_refused, self._sender, key, code=answer.code, status=int(answer.status[:3]))
        return answer


def key_failed(what: str, key: CallKey | None = None) -> Answer:
    """500, and the exception in the log: an app's callable raised, and the request is not run unprotected."""
    log(logging.ERROR, key, f"The {what} callable raised; the request was refused.", exc_info=True)
    return problem("key_failed")
