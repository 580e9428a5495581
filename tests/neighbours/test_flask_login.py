"""Flask-Login: the login stands above, and says whose call it is."""

from __future__ import annotations

from typing import Any

from flask import Flask
from flask_login import LoginManager, login_required
from webtest import TestApp

from flask_runonce import RunOnce

from .calls import CHAT, call, cancel, replayed

SECTION = "Flask-Login"


def test_a_repeat_has_to_be_logged_in(names: dict[str, Any], service: TestApp) -> None:
    assert call(service, "/orders").status_int == 401
    service.post("/login/ada")
    replies = [call(service, "/orders") for _ in range(2)]
    assert [reply.json for reply in replies] == [{"ordered_by": "ada"}] * 2
    assert replayed(*replies) == [False, True]
    assert call(TestApp(names["app"]), "/orders").status_int == 401


def test_each_user_has_their_own_calls(names: dict[str, Any], service: TestApp) -> None:
    ada, bob = TestApp(names["app"]), TestApp(names["app"])
    ada.post("/login/ada")
    bob.post("/login/bob")
    replies = call(ada, "/orders"), call(bob, "/orders")
    assert [reply.json["ordered_by"] for reply in replies] == ["ada", "bob"]
    assert replayed(*replies) == [False, False]
    assert cancel(bob, "another").json["state"] == "not_received"
    assert call(ada, "/orders", "another").status_int == 201


def test_the_guard_stands_before_cancel_list_and_show(service: TestApp) -> None:
    routes = "/api/v0/tool-calls"
    assert cancel(service).status_int == 401
    assert service.get(routes, headers=CHAT, status="*").status_int == 401
    assert service.get(f"{routes}/call", headers=CHAT, status="*").status_int == 401
    service.post("/login/ada")
    call(service, "/orders")
    assert service.get(routes, headers=CHAT).json["total"] == 1
    assert cancel(service).json["state"] == "done"


def test_in_the_wrong_order_a_refusal_is_kept_and_a_stranger_gets_the_answer(names: dict[str, Any]) -> None:
    app = Flask(__name__)
    app.secret_key = "change me"
    LoginManager(app).user_loader(names["load_user"])
    runonce = RunOnce(app)
    app.post("/login/<user_id>")(names["login"])

    @app.post("/wrong")
    @runonce.once
    @login_required
    def wrong() -> str:
        return "ada's secret"

    ada, stranger = TestApp(app), TestApp(app)
    assert call(stranger, "/wrong", "early").status_int == 401
    ada.post("/login/ada")
    assert call(ada, "/wrong", "early").status_int == 401
    assert call(ada, "/wrong").text == "ada's secret"
    assert call(stranger, "/wrong").text == "ada's secret"


def test_a_login_that_is_run_once_logs_in_the_first_caller_alone(names: dict[str, Any]) -> None:
    names["app"].post("/login-once/<user_id>", endpoint="login_once")(names["runonce"].once(names["login"]))
    first, repeat = TestApp(names["app"]), TestApp(names["app"])
    assert [call(client, "/login-once/ada").text for client in (first, repeat)] == ["welcome"] * 2
    assert call(first, "/orders", "order").status_int == 201
    assert call(repeat, "/orders", "order").status_int == 401
