"""What all routes of the agent share: who calls, JSON bodies and their fields, errors as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from flask import Blueprint, Response, current_app, g, jsonify, request
from werkzeug.exceptions import ClientDisconnected, HTTPException

from flask_runonce import current_call
from flask_runonce.errors import InvalidKey
from flask_runonce.keys import canonical_id

from .errors import AgentError
from .processes import Chat

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

T = TypeVar("T")


def agent_blueprint(
    guard: Callable[[WSGIEnvironment], object] | None, scope: Callable[[WSGIEnvironment], str | None] | None
) -> Blueprint:
    """A blueprint that lets nobody in unasked, knows each request's chat (``g.chat``) and answers errors as JSON."""
    blueprint = Blueprint("workspace_agent", __name__)

    @blueprint.before_request
    def identify() -> None:
        if guard is not None:
            guard(request.environ)
        try:
            request.query_string.decode()
        except UnicodeDecodeError as error:
            raise AgentError(400, "The query is not UTF-8.") from error
        tenant = scope(request.environ) if scope is not None else None
        g.chat = Chat(tenant or "", header_id("RUNONCE_CHAT_ID_HEADER", "Coder-Chat-Id") or "")

    @blueprint.errorhandler(AgentError)
    def refuse(error: AgentError) -> tuple[Response, int]:
        return _answer(message=error.message, detail=error.detail, code=error.code), error.status

    @blueprint.errorhandler(ClientDisconnected)
    def cut_off(error: ClientDisconnected) -> tuple[Response, int]:
        # Nothing was done, so the attempt that brings the whole body may run.
        if current_call:
            current_call.release()
        return _answer(message="The request body was cut off."), 400

    @blueprint.app_errorhandler(HTTPException)  # of the app, for what no route of the blueprint is found for
    def other(error: HTTPException) -> Any:
        response = error.get_response()
        if error.response is None:
            response.set_data(_answer(message=error.description or error.name).get_data())
            response.mimetype = "application/json"
        return response

    return blueprint


def header_id(setting: str, default: str) -> str | None:
    """The ID in the header that a ``RUNONCE_…`` setting names, None without it. Raises AgentError: 400, malformed."""
    name = current_app.config.get(setting, default)
    text = request.headers.get(name)
    try:
        return None if text is None else canonical_id(text)
    except InvalidKey as error:
        raise AgentError(400, f"{name} is not a valid ID.", str(error), "invalid_key") from error


def json_object() -> dict[str, Any]:
    """The request's body. Raises AgentError: 400."""
    try:
        body = json.loads(request.get_data())
    except (ValueError, RecursionError) as error:
        raise _not_json(str(error)) from error
    if not isinstance(body, dict):
        raise _not_json("It must be an object.")
    return body


def field(body: Any, name: str, kind: type[T], default: T) -> T:
    """The field ``name`` of a JSON object; ``default`` where it is missing or null. Raises AgentError: 400."""
    if not isinstance(body, dict):
        raise _not_json(f'An object with "{name}" is expected, not {json.dumps(body)[:80]}.')
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _not_json(f'"{name}" is of the wrong type.')
    return value


def _not_json(detail: str) -> AgentError:
    return AgentError(400, "Request body must be valid JSON.", detail)


def _answer(**fields: str) -> Response:
    return jsonify({name: text for name, text in fields.items() if text})
