"""Flask-RESTX: `once` stands around RESTX's own output, and keeps a resource's documentation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from flask import Flask
from flask_restx import Api, Resource, fields
from webtest import TestApp

from flask_runonce import RunOnce

from .calls import call, cancel, replayed

SECTION = "Flask-RESTX"

# RESTX gives it a type, with or without us.
allow_the_204 = pytest.mark.filterwarnings("ignore:Content-Type header found in a 204 response")


def test_a_resource_runs_once(names: dict[str, Any], service: TestApp) -> None:
    replies = [call(service, "/orders/", json={"item": "tea"}) for _ in range(2)]
    assert [(reply.status_int, reply.json) for reply in replies] == [(201, {"item": "tea"})] * 2
    assert replayed(*replies) == [False, True]
    assert names["items"] == ["tea"]


@allow_the_204
def test_an_answer_that_only_restx_understands(names: dict[str, Any], service: TestApp) -> None:
    ids = {"Coder-Chat-Id": "chat", "Coder-Tool-Call-Id": "call"}
    replies = [service.delete("/orders/", headers=ids) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [204, 204]
    assert replayed(*replies) == [False, True]


def test_invalid_input_is_an_answer_like_any_other(service: TestApp) -> None:
    replies = [call(service, "/orders/", json={}) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [400, 400]
    assert replies[1].json == replies[0].json
    assert replayed(*replies) == [False, True]


def test_a_cancel(service: TestApp) -> None:
    call(service, "/orders/", json={"item": "tea"})
    assert cancel(service).json["state"] == "done"
    refused = call(service, "/orders/", json={"item": "tea"})
    assert (refused.status_int, refused.json["code"]) == (409, "canceled")
    assert refused.content_type == "application/problem+json"


class Served:
    """An API with a resource at /resource, decorated in one of the ways there are."""

    def __init__(self, how: str, methods: dict[str, Any], **config: Any) -> None:
        self.app = Flask(__name__)
        self.app.config.update(config)
        self.runonce = RunOnce(self.app)
        once = self.runonce.once
        around = [once] if how == "namespace" else []
        self.api = Api(self.app, decorators=[once] if how == "api" else [])
        self.namespace = self.api.namespace("ns", path="/", decorators=around)
        methods = {name: once(method) if how == "method" else method for name, method in methods.items()}
        if how == "method_decorators":
            methods["method_decorators"] = [once]
        self.namespace.route("/resource")(type("Thing", (Resource,), methods))
        self.service = TestApp(self.app)


HOW = ["namespace", "api", "method", "method_decorators"]


@pytest.mark.parametrize("how", HOW)
def test_each_way_runs_a_plain_answer_once(how: str) -> None:
    runs = []

    def post(self: Resource) -> tuple[dict[str, int], int, dict[str, str]]:
        runs.append(1)
        return {"runs": len(runs)}, 201, {"Location": "/resource/1"}

    service = Served(how, {"post": post}).service
    replies = [call(service, "/resource") for _ in range(2)]
    assert [(reply.status_int, reply.json) for reply in replies] == [(201, {"runs": 1})] * 2
    assert [reply.headers["Location"].endswith("/resource/1") for reply in replies] == [True, True]
    assert replayed(*replies) == [False, True]


@allow_the_204
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("returned", "answer"), [((None, 204), (204, b"")), ("text", (200, b'"text"\n'))])
def test_only_around_the_output_is_all_that_restx_understands_an_answer(how: str, returned: Any, answer: Any) -> None:
    def post(self: Resource) -> Any:
        return returned

    service = Served(how, {"post": post}).service
    replies = [call(service, "/resource") for _ in range(2)]
    right = how in ("namespace", "api")
    assert [(reply.status_int, reply.body) == answer for reply in replies] == [right, right]


@pytest.mark.parametrize("how", HOW)
def test_the_documentation_is_the_same_with_and_without(how: str) -> None:
    described = []
    for each in (how, "nowhere"):
        api = Api()
        model = api.model("Order", {"item": fields.String(required=True)})

        @api.expect(model, validate=True)
        @api.doc(params={"note": "What else there is to say."}, responses={404: "There is no such item."})
        @api.marshal_with(model, code=201)
        def post(self: Resource) -> tuple[dict[str, str], int]:
            """Order something."""
            return {"item": "tea"}, 201

        served = Served(each, {"post": post})
        served.api.models.update(api.models)
        with served.app.test_request_context():
            described.append(served.api.__schema__)
        assert call(served.service, "/resource", json={}).status_int == 400
        assert call(served.service, "/resource", "another", json={"item": "tea"}).status_int == 201
    assert described[0] == described[1]
    operation = described[0]["paths"]["/resource"]["post"]
    assert operation["summary"] == "Order something"
    assert set(operation["responses"]) == {"201", "404"}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("passes", [False, True])
def test_a_failure_is_restx_answer_unless_it_lets_it_pass(how: str, passes: bool) -> None:
    def post(self: Resource) -> None:
        raise LookupError

    service = Served(how, {"post": post}, PROPAGATE_EXCEPTIONS=passes).service
    if passes:
        with pytest.raises(LookupError):
            call(service, "/resource")
        assert call(service, "/resource").json["code"] == "outcome_unknown"
    else:
        replies = [call(service, "/resource") for _ in range(2)]
        assert [(reply.status_int, reply.json) for reply in replies] == [
            (500, {"message": "Internal Server Error"}),
        ] * 2
        assert replayed(*replies) == [False, True]


def test_marshalling_around_once_marshals_an_answer() -> None:
    app = Flask(__name__)
    runonce = RunOnce(app)
    api = Api(app)
    model = api.model("Order", {"item": fields.String})

    class Wrong(Resource):
        @api.marshal_with(model)
        @runonce.once
        def post(self) -> dict[str, str]:
            return {"item": "tea"}

    api.add_resource(Wrong, "/wrong")
    assert call(TestApp(app), "/wrong").json == {"item": None}


def test_method_decorators_leave_nothing_behind() -> None:
    resources = []

    def post(self: Resource) -> str:
        resources.append(weakref.ref(self))
        return "done"

    service = Served("method_decorators", {"post": post}).service
    for number in range(3):
        call(service, "/resource", str(number))
    gc.collect()
    assert [resource() for resource in resources] == [None] * 3
