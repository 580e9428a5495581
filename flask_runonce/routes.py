"""The cancel, list and show routes (CONTRACT section 5): an environ and an ID in, an answer out. No framework."""

from __future__ import annotations

import base64
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from werkzeug.exceptions import HTTPException

from . import keys
from .errors import InvalidKey, StoreError
from .problems import Answer, invalid_key, json_answer, problem, saved_response, store_problem
from .record import CallKey, Found, Outcome, Seen, State
from .runner import Canceled
from .service import Service, key_failed
from .signals import log

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

MAX_LIMIT = 200
DEFAULT_LIMIT = 50


def _guarded(route: Callable[[Service, WSGIEnvironment, CallKey], Answer]) -> Callable[..., Answer]:
    """Ask the guard, work out the key (its tool call ID is "" where all of a chat is meant), turn errors into problems.

    Raises the HTTPException by which a guard or scope callable refuses.
    """

    @functools.wraps(route)
    def answer(service: Service, environ: WSGIEnvironment, tool_call_id: str | None = None) -> Answer:
        service.input(environ).drain()
        service.end_abandoned()
        try:
            service.guard(environ)
            scope = service.scope_of(environ)
        except HTTPException:
            raise
        except Exception:
            return key_failed("guard or scope")
        refusal = service.unshared(environ)
        if refusal:
            return refusal
        header = environ.get(keys.environ_name(service.settings.chat_id_header))
        if header is None:
            return problem("key_required", "The request needs a chat ID: send its header.")
        try:
            key = CallKey(scope, keys.canonical_id(header, "chat ID"), "")
            if tool_call_id is not None:
                key = key._replace(tool_call_id=keys.canonical_id(tool_call_id, "tool call ID"))
        except InvalidKey as error:
            return invalid_key(error)
        try:
            return route(service, environ, key)
        except StoreError as error:
            log(logging.WARNING, key, "The store cannot answer:", error)
            return store_problem(error)

    return answer


@_guarded
def cancel(service: Service, environ: WSGIEnvironment, key: CallKey) -> Answer:
    """`POST {prefix}/{tool call ID}/cancel`: refuse the call from now on, and say truthfully what became of it."""
    try:
        canceled = service.runner.cancel(key)
    except StoreError:
        raise
    except Exception:
        log(logging.ERROR, key, "A cancel hook raised.", exc_info=True)
        return problem("cancel_failed")
    if canceled.found is Found.NOT_RECEIVED:
        facts = {"received": False, "state": canceled.found.value, "remembers": service.runner.remembers()}
        return json_answer(200, facts)
    if canceled.pending:
        return json_answer(202, {"received": True, "state": canceled.found.value}, ("Retry-After", "1"))
    return json_answer(200, _became(canceled))


@_guarded
def list_calls(service: Service, environ: WSGIEnvironment, key: CallKey) -> Answer:
    """`GET {prefix}`: the chat's calls, newest first."""
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    limit = _number(query, "limit", DEFAULT_LIMIT, least=1, most=MAX_LIMIT)
    offset = _number(query, "offset", 0, least=0)
    if limit is None:
        return problem("invalid_query", f"The limit must be one whole number from 1 to {MAX_LIMIT}.")
    if offset is None:
        return problem("invalid_query", "The offset must be one whole number from 0.")
    page = service.runner.list(key.scope, key.chat_id, limit=limit, offset=offset)
    calls = [describe(seen) for seen in page.rows]
    more = offset + len(calls) < page.total
    return json_answer(200, {"tool_calls": calls, "total": page.total, "offset": offset, "has_more": more})


@_guarded
def show(service: Service, environ: WSGIEnvironment, key: CallKey) -> Answer:
    """`GET {prefix}/{tool call ID}`: one of them."""
    seen = service.runner.find(key)
    return json_answer(200, describe(seen)) if seen.record else problem("unknown_call")


def describe(seen: Seen) -> dict[str, Any]:
    """A kept call as the list shows it. Times are Unix seconds."""
    record = seen.record
    assert record
    saved = saved_response(record)
    return {
        "id": record.key.tool_call_id,
        "state": record.state.value,
        "canceled": record.found is not None,
        "started_at": None if record.state is State.CANCELED else record.created_at,
        "finished_at": record.finished_at,
        "status": saved.status_code if saved else None,
        "repeats": seen.repeats,
    }


def _became(canceled: Canceled) -> dict[str, Any]:
    saved = saved_response(canceled.record)
    assert saved  # the run has ended
    facts: dict[str, Any] = {"received": True, "state": canceled.found.value, "status": saved.status_code}
    if saved.content_type:
        facts["content_type"] = saved.content_type
    if saved.body:
        facts["body"] = base64.b64encode(saved.body).decode()
    if canceled.record.outcome is Outcome.TOO_LARGE:
        facts["body_too_large"] = True
    return facts


def _number(query: dict[str, list[str]], name: str, default: int, *, least: int, most: int = 2**53) -> int | None:
    values = query.get(name)
    if values is None:
        return default
    if len(values) != 1 or not values[0].isascii() or not values[0].isdigit():
        return None
    if len(values[0]) > len(str(most)):
        return None
    number = int(values[0])
    return number if least <= number <= most else None
