"""flask-smorest: `once` keeps a view's metadata, so the description of the API stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from flask.views import MethodView
from flask_smorest import Api, Blueprint
from webtest import TestApp

from flask_runonce import RunOnce

from .calls import call, replayed

SECTION = "flask-smorest"


def served(register: Callable[[Blueprint, Callable[..., Any]], None], *, once: bool = True) -> tuple[Api, TestApp]:
    """An API with the routes that `register(blueprint, once)` adds."""
    app = Flask(__name__)
    app.config.update(API_TITLE="Orders", API_VERSION="v1", OPENAPI_VERSION="3.0.3")
    runonce = RunOnce(app)
    api = Api(app)
    blueprint = Blueprint("orders", __name__)
    register(blueprint, runonce.once if once else lambda view: view)
    api.register_blueprint(blueprint)
    return api, TestApp(app)


def test_an_order_is_parsed_and_dumped_once(names: dict[str, Any], service: TestApp) -> None:
    replies = [call(service, "/orders", json={"item": "tea"}) for _ in range(2)]
    assert [(reply.status_int, reply.json) for reply in replies] == [(201, {"id": 1, "item": "tea"})] * 2
    assert replayed(*replies) == [False, True]
    assert len(names["orders"]) == 1


def test_invalid_arguments_are_an_answer_like_any_other(names: dict[str, Any], service: TestApp) -> None:
    replies = [call(service, "/orders", json={}) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [422, 422]
    assert replies[1].json["errors"] == replies[0].json["errors"]
    assert replayed(*replies) == [False, True]


def as_view(names: dict[str, Any], blueprint: Blueprint, once: Callable[..., Any]) -> None:
    @blueprint.route("/orders", methods=["POST"])
    @once
    @blueprint.arguments(names["OrderSchema"])
    @blueprint.response(201, names["OrderSchema"])
    def order(data: dict[str, Any]) -> dict[str, Any]:
        """Order something."""
        return data | {"id": 1}


def as_method(names: dict[str, Any], blueprint: Blueprint, once: Callable[..., Any]) -> None:
    @blueprint.route("/orders")
    class Orders(MethodView):
        @blueprint.response(200, names["OrderSchema"](many=True))
        def get(self) -> list[Any]:
            """List all orders."""
            return []

        @once
        @blueprint.doc(summary="Another summary")
        @blueprint.arguments(names["OrderSchema"])
        @blueprint.response(201, names["OrderSchema"])
        @blueprint.alt_response(404, description="There is no such item.")
        def post(self, data: dict[str, Any]) -> dict[str, Any]:
            """Order something."""
            return data | {"id": 1}


@pytest.mark.parametrize("register", [as_view, as_method])
def test_the_description_is_the_same_with_and_without(names: dict[str, Any], register: Callable[..., None]) -> None:
    specs = []
    for once in (True, False):
        api, service = served(lambda blueprint, decorate: register(names, blueprint, decorate), once=once)
        specs.append(api.spec.to_dict())
        assert call(service, "/orders", json={"item": "tea"}).json == {"id": 1, "item": "tea"}
        assert replayed(call(service, "/orders", json={"item": "tea"})) == [once]
    assert specs[0] == specs[1]
    operation = specs[0]["paths"]["/orders"]["post"]
    assert set(operation["responses"]) >= {"201", "422", "default"}
    assert "requestBody" in operation
    assert operation["summary"] in ("Order something.", "Another summary")


def test_arguments_above_leave_the_id_unused(names: dict[str, Any]) -> None:
    def register(blueprint: Blueprint, once: Callable[..., Any]) -> None:
        @blueprint.route("/orders", methods=["POST"])
        @blueprint.arguments(names["OrderSchema"])
        @once
        @blueprint.response(201, names["OrderSchema"])
        def order(data: dict[str, Any]) -> dict[str, Any]:
            return data | {"id": 1}

    _, service = served(register)
    invalid = call(service, "/orders", json={})
    assert (invalid.status_int, replayed(invalid)) == (422, [False])
    replies = [call(service, "/orders", json={"item": "tea"}) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [201, 201]
    assert replayed(*replies) == [False, True]


class Item:
    """An order as an object, as a database gives it."""

    id, item = 1, "tea"


@pytest.mark.parametrize(("returned", "answer"), [(Item(), (500, None)), ({"id": 1, "no field": 2}, (200, 2))])
def test_in_the_wrong_order_what_the_view_returns_is_not_dumped(
    names: dict[str, Any], returned: Any, answer: tuple[int, int | None]
) -> None:
    def register(blueprint: Blueprint, once: Callable[..., Any]) -> None:
        @blueprint.route("/orders", methods=["POST"])
        @blueprint.arguments(names["OrderSchema"])
        @blueprint.response(201, names["OrderSchema"])
        @once
        def order(data: dict[str, Any]) -> Any:
            return returned

    _, service = served(register)
    replies = [call(service, "/orders", json={"item": "tea"}) for _ in range(2)]
    assert [(reply.status_int, reply.json.get("no field")) for reply in replies] == [answer] * 2
    if isinstance(returned, Item):
        assert replies[1].json["code"] == "outcome_unknown"


@pytest.mark.parametrize("right", [True, False])
def test_the_order_of_an_etag(names: dict[str, Any], right: bool) -> None:
    def register(blueprint: Blueprint, once: Callable[..., Any]) -> None:
        def order(data: dict[str, Any]) -> dict[str, Any]:
            return data | {"id": 1}

        dump, etag = blueprint.response(201, names["OrderSchema"]), blueprint.etag
        order = once(etag(dump(order))) if right else etag(once(dump(order)))
        blueprint.route("/orders", methods=["POST"])(blueprint.arguments(names["OrderSchema"])(order))

    _, service = served(register)
    replies = [call(service, "/orders", json={"item": "tea"}) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [201, 201 if right else 500]
    assert (replies[0].headers["ETag"] == replies[1].headers.get("ETag")) is right
