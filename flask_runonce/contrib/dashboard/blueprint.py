"""The pages, as a Flask blueprint. They read through the runner's own verbs and the signals, and decide nothing."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import jinja2
from flask import Blueprint, Flask, Response, abort, current_app, request, url_for
from flask.blueprints import BlueprintSetupState

from ... import keys
from ...blueprint import service_of_app
from ...errors import ConfigError, InvalidKey, StoreError, StoreFull, StoreUnavailable
from ...problems import PROBLEMS, saved_response
from ...record import CallKey, Outcome, Seen
from ...rule import Do
from ...runner import Canceled
from ...service import Guard, Service
from ...signals import log, logger
from . import calls, life, pictures, words
from .forms import FIELD, Form
from .hour import LastHour

EXTENSION = "runonce_dashboard"
"""The key of what an app's process remembers, in `app.extensions`."""

_CSP = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

_pages = jinja2.Environment(
    # Our own, so that no setting, filter or context of the app's changes what is escaped or found here.
    loader=jinja2.PackageLoader(__name__.rpartition(".")[0], "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_pages.filters.update(
    age=words.age,
    duration=words.duration,
    moment=words.moment,
    minute=words.minute,
    day=words.day,
    iso=words.iso,
    visible=calls.visible,
)


def make_dashboard(*, guard: Guard) -> Blueprint:
    """The pages, to be mounted with `app.register_blueprint(…, url_prefix="/runonce")`, which is the default prefix.

    `guard` takes the WSGI environ, inside the request context, and raises an HTTPException to refuse: it answers for
    every page, since they show all chats of all scopes. One that answers False refuses, too. Mounting starts the memory
    of the last hour, and is given up with `ConfigError` where there is no guard, or no `secret_key` to sign forms with.
    """
    if not callable(guard):
        raise ConfigError("guard", "is needed: the dashboard shows every chat, and cancels")
    blueprint = Blueprint(
        "runonce_dashboard",
        __name__,
        url_prefix="/runonce",
        static_folder="static",
        static_url_path="/dashboard-static",  # also where the blueprint is mounted at the app's root
    )
    blueprint.record(_set_up)
    blueprint.before_request(functools.partial(_ask, guard))
    blueprint.after_request(_protect)
    blueprint.register_error_handler(StoreError, _store_failed)
    blueprint.add_url_rule("/", "calls", _list)
    blueprint.add_url_rule("/hour", "hour", _hour)
    blueprint.add_url_rule("/call", "call", _call)
    blueprint.add_url_rule("/cancel", "cancel", _cancel, methods=["GET", "POST"])
    blueprint.add_url_rule("/forget", "forget", _forget, methods=["GET", "POST"])
    return blueprint


def _set_up(state: BlueprintSetupState) -> None:
    assert isinstance(state.app, Flask)
    if not state.app.secret_key:
        raise ConfigError("SECRET_KEY", "is needed: the dashboard signs its forms with it")
    if EXTENSION not in state.app.extensions:
        state.app.extensions[EXTENSION] = LastHour(state.app)


def _ask(guard: Guard) -> None:
    if current_app.ensure_sync(guard)(request.environ) is False:
        abort(403)


def _protect(response: Response) -> Response:
    response.headers.setdefault("Content-Security-Policy", _CSP)
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Referrer-Policy", "same-origin")
    if response.mimetype == "text/html":
        response.headers["Cache-Control"] = "no-store"  # saved responses are on these pages
    return response


def _list() -> Response:
    service = _service()
    try:
        wanted = calls.Wanted.of(request.args)
    except (InvalidKey, ValueError) as error:
        return _page("problem.html", 400, title="That cannot be looked for", text=str(error))
    listing = calls.search(service.runner, wanted)
    shown = [_shown(service, seen) for seen in listing.rows]
    chats = [(chat, list(group)) for chat, group in _by_chat(shown)]
    return _page(
        "calls.html",
        wanted=wanted,
        listing=listing,
        chats=chats,
        states=calls.STATES,
        running=sum(call.state == "running" for call in shown),
        waiting_total=sum(call.waiting for call in shown),
        scoped=wanted.scope is not None or any(call.key.scope for call in shown),
        searched=calls.SEARCHED,
        query=_query_of(wanted),
    )


def _hour() -> Response:
    _service()
    hour = _last_hour()
    process = f"{socket.gethostname()}:{os.getpid()}"
    if request.args.get("process", process) != process:
        nothing_new = Response(status=204)  # another process's poll: its pictures are not ours to renew
        del nothing_new.headers["Content-Type"]
        return nothing_new
    lives = hour.lives()
    return _page(
        "hour.html",
        process=process,
        alone=not request.environ.get("wsgi.multiprocess"),
        began=hour.began,
        outcomes=pictures.outcomes(lives, hour.now(), width=480, height=180),
        names=pictures.OUTCOMES,
        times=pictures.times(lives, width=450, height=240, floor=262),
    )


def _call() -> Response:
    service = _service()
    key = _key()
    seen = service.runner.find(key)
    if seen.record is None:
        return _unknown()
    answered, events = _last_hour().of(key)
    now = _last_hour().now()
    shown = _shown(service, seen)
    record, saved = seen.record, saved_response(seen.record)
    ends = record.finished_at or seen.now
    return _page(
        "call.html",
        call=shown,
        record=record,
        steps=life.steps(seen, events, answered=answered, waiting=shown.waiting, now=now),
        run=pictures.run(record.created_at, ends, life.waits(seen, events, now), width=696) if record.run else None,
        saved=saved,
        body=saved and calls.body_of(saved, too_large=record.outcome is Outcome.TOO_LARGE),
        may_forget=shown.state != "running",
        ids=_ids(key),
    )


def _cancel() -> Response:
    service = _service()
    key = _key()
    seen = service.runner.find(key)
    form = Form(["cancel", *key])
    if not form.answered:
        return _question("cancel.html", form, seen, key, seconds=service.settings.cancel_timeout)
    try:
        canceled = service.runner.cancel(key)
    except StoreError:
        raise
    except Exception:
        log(logging.ERROR, key, "A cancel hook raised.", exc_info=True)
        return _page("done.html", 500, ids=_ids(key), title="Canceled, but", text=PROBLEMS["cancel_failed"].detail)
    title, text = _became(canceled)
    return _page("done.html", ids=_ids(key), title=title, text=text)


def _forget() -> Response:
    service = _service()
    key = _key()
    seen = service.runner.find(key)
    if seen.record is None:
        return _unknown()
    # The version is asked about, too: an answer that is sent again does not forget the run that came after.
    form = Form(["forget", *key, seen.version])
    if not form.answered:
        return _question("forget.html", form, seen, key, may=calls.state_of(seen) != "running")
    done = service.runner.forget(key)
    if done is Do.REFUSE:
        text = "It runs, and its owner is alive. A call is forgotten when it is over, or its owner is lost."
        return _page("done.html", 409, ids=_ids(key), title="Not forgotten", text=text)
    text = "Nothing is kept of the call any more. If it is sent again, it runs again."
    return _page("done.html", ids=None, title="Forgotten", text=text)


def _question(template: str, form: Form, seen: Seen, key: CallKey, **facts: Any) -> Response:
    """Ask first. An answer that is not to this question, from this browser, is asked again."""
    late = request.method == "POST"
    shown = _shown(service_of_app(), seen) if seen.record else None
    # The app's own CSRF protection looks for its token in every form; Flask-WTF offers it under this name.
    other = current_app.jinja_env.globals.get("csrf_token")
    others_token = (current_app.config.get("WTF_CSRF_FIELD_NAME", "csrf_token"), other()) if callable(other) else None
    response = _page(
        template,
        400 if late else 200,
        call=shown,
        key=key,
        ids=_ids(key),
        late=late,
        field=FIELD,
        token=form.token,
        others_token=others_token,
        **facts,
    )
    return form.mark(response, url_for(".calls"))


def _became(canceled: Canceled) -> tuple[str, str]:
    refused = "Requests of this call that come from now on are refused."
    if canceled.pending:
        text = "The run has been told and still goes on. Cancel again to learn what became of it."
        return "Canceled; its run goes on", f"{text} {refused}"
    found = calls.FOUND[canceled.found]
    return "Canceled", f"The call was canceled {found}. {refused}"


def _unknown() -> Response:
    text = "No record of this call is kept: it never came, or it has been forgotten."
    return _page("problem.html", 404, title="The call is not known", text=text)


def _store_failed(error: StoreError) -> Response:
    logger.warning("The store cannot answer: %s", error)
    title = "The store cannot be read"
    if isinstance(error, StoreUnavailable):
        title = "The store cannot be reached"
    elif isinstance(error, StoreFull):
        title = "The store is full"
    text = "What is known of calls cannot be shown now, and calls are refused until the store answers."
    return _page("problem.html", 503, title=title, text=text, detail=str(error))


def _service() -> Service:
    service = service_of_app()
    refusal = service.unshared(request.environ)
    if refusal:
        entry = PROBLEMS[refusal.code]
        abort(_page("problem.html", entry.status, title=entry.title, text=entry.detail))
    return service


def _last_hour() -> LastHour:
    hour = current_app.extensions[EXTENSION]
    assert isinstance(hour, LastHour)
    return hour


def _key() -> CallKey:
    """The call that the query names. It is no part of the path, where browsers and servers would tidy an ID."""
    try:
        return CallKey(
            keys.canonical_scope(request.args.get("scope", "")),
            keys.canonical_id(request.args.get("chat", ""), "chat ID"),
            keys.canonical_id(request.args.get("id", ""), "tool call ID"),
        )
    except (InvalidKey, ValueError) as error:
        abort(_page("problem.html", 400, title="That names no call", text=str(error)))


def _ids(key: CallKey) -> dict[str, str]:
    scope = {"scope": key.scope} if key.scope else {}
    return {**scope, "chat": key.chat_id, "id": key.tool_call_id}


def _query_of(wanted: calls.Wanted) -> dict[str, str]:
    names = {"scope": wanted.scope, "chat": wanted.chat_id, "id": wanted.part, "state": wanted.state}
    return {name: value for name, value in names.items() if value}


def _shown(service: Service, seen: Seen) -> calls.Shown:
    assert seen.record
    answered, _ = _last_hour().of(seen.record.key)
    shared = service.runner.store.shared
    return calls.show(seen, answered, shared=shared, max_waiting=service.settings.max_waiting)


def _by_chat(shown: list[calls.Shown]) -> Iterator[tuple[tuple[str, str], Iterator[calls.Shown]]]:
    """The calls of a page, those of a chat together, the chat with the newest call first."""
    order: dict[tuple[str, str], int] = {}
    for call in shown:
        order.setdefault(call.key[:2], len(order))
    return itertools.groupby(sorted(shown, key=lambda call: order[call.key[:2]]), lambda call: call.key[:2])


def _page(template: str, status: int = 200, **facts: Any) -> Response:
    nonce = current_app.jinja_env.globals.get("csp_nonce")  # Flask-Talisman's, where the app's policy asks for one
    facts = {"url_for": url_for, "endpoint": request.endpoint, "nonce": nonce() if callable(nonce) else "", **facts}
    text = _pages.get_template(template).render(facts)
    return Response(text, status, content_type="text/html; charset=utf-8")
