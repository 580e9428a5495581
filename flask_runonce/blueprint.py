"""The cancel, list and show routes for Flask: `routes` behind a blueprint."""

from __future__ import annotations

from flask import Blueprint, Response, current_app, request
from flask.blueprints import BlueprintSetupState
from werkzeug.routing import BaseConverter

from . import routes
from .problems import Answer
from .service import Service

EXTENSION = "runonce"
"""The key of an app's service in `app.extensions`."""


class _IDConverter(BaseConverter):
    """Any ID: slashes included, also at its start and doubled, where Werkzeug's own `path` gives up; an empty one."""

    part_isolating = False
    regex = "(?s:.*)"


def service_of_app() -> Service:
    """The current app's service. Raises RuntimeError where `init_app` was not called for it."""
    service = current_app.extensions.get(EXTENSION)
    if not isinstance(service, Service):
        raise RuntimeError("flask-runonce is not set up for this app: call runonce.init_app(app).")
    return service


def response_of(answer: Answer) -> Response:
    """`answer` as the app's own kind of response."""
    response: Response = current_app.response_class(answer.body, answer.status, list(answer.headers))
    if not any(name.lower() == "content-type" for name, _ in answer.headers):
        del response.headers["Content-Type"]
    return response


def make_blueprint() -> Blueprint:
    """The routes of CONTRACT section 5. Where they stand is said when the blueprint is registered."""
    blueprint = Blueprint("runonce", __name__)
    blueprint.record(_add_converter)  # first: the rules name it
    blueprint.add_url_rule("", "list", _list, methods=["GET"])
    ids = "/<runonce_id:tool_call_id>"
    blueprint.add_url_rule(f"{ids}/cancel", "cancel", _cancel, methods=["POST"], merge_slashes=False)
    blueprint.add_url_rule(ids, "show", _show, methods=["GET"], merge_slashes=False)
    return blueprint


def _add_converter(state: BlueprintSetupState) -> None:
    state.app.url_map.converters["runonce_id"] = _IDConverter


def _list() -> Response:
    return response_of(routes.list_calls(service_of_app(), request.environ))


def _cancel(tool_call_id: str) -> Response:
    return response_of(routes.cancel(service_of_app(), request.environ, tool_call_id))


def _show(tool_call_id: str) -> Response:
    return response_of(routes.show(service_of_app(), request.environ, tool_call_id))
