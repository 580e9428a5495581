"""Flask-Session: what a run puts into the session stays there, whatever becomes of its answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from cachelib import SimpleCache
from flask import Flask, Response, session
from flask_session import Session
from webtest import TestApp

from flask_runonce import RunOnce

from .calls import call, replayed

SECTION = "Flask-Session"
LIMIT = 30


def test_the_session_is_there_when_the_answer_was_lost(service: TestApp) -> None:
    service.post("/login/ada")
    cookies = dict(service.cookies)
    call(service, "/cart/tea")
    service.reset()  # the client went away before it had read the answer and its cookie
    for name, value in cookies.items():
        service.set_cookie(name, value)
    repeat = call(service, "/cart/tea")
    assert (repeat.json, replayed(repeat)) == ({"cart": ["tea"]}, [True])
    assert service.get("/cart").json == {"cart": ["tea"]}


def test_flasks_own_session_is_lost_with_the_answer(names: dict[str, Any]) -> None:
    app = Flask(__name__)
    app.secret_key = "change me"
    runonce = RunOnce(app)
    app.post("/cart/<item>")(runonce.once(names["add"].__wrapped__))
    app.get("/cart")(names["cart"])
    first, repeat = TestApp(app), TestApp(app)
    assert replayed(call(first, "/cart/tea"), call(repeat, "/cart/tea")) == [False, True]
    assert [client.get("/cart").json["cart"] for client in (first, repeat)] == [["tea"], []]


def test_each_session_has_its_own_calls(names: dict[str, Any]) -> None:
    clients = TestApp(names["app"]), TestApp(names["app"])
    for user, client in zip(("ada", "bob"), clients, strict=True):
        client.post(f"/login/{user}")
    assert replayed(*(call(client, "/cart/tea") for client in clients)) == [False, False]


@pytest.mark.parametrize("refresh", [False, True])
def test_a_repeat_that_waited_undoes_nothing_unless_it_refreshes(refresh: bool) -> None:
    app = Flask(__name__)
    app.config["SESSION_TYPE"] = "cachelib"
    app.config["SESSION_CACHELIB"] = SimpleCache()
    app.config["SESSION_REFRESH_EACH_REQUEST"] = refresh
    Session(app)
    runonce = RunOnce(app, scope=lambda environ: session.get("user"))
    running, go_on = threading.Event(), threading.Event()

    @app.before_request
    def see_who_comes() -> None:
        if running.is_set():  # the repeat: its session has been read, before the run has written
            go_on.set()

    @app.after_request
    def let_the_first_finish(response: Response) -> Response:
        if "Idempotent-Replayed" in response.headers:
            first.join(LIMIT)
        return response

    @app.post("/login")
    def login() -> str:
        session["user"] = "ada"
        return "welcome"

    @app.post("/cart")
    @runonce.once
    def add() -> str:
        session["cart"] = ["tea"]
        running.set()
        assert go_on.wait(LIMIT)
        return "added"

    @app.get("/cart")
    def cart() -> dict[str, Any]:
        return {"cart": session.get("cart")}

    login_client = TestApp(app)
    login_client.post("/login")
    replies: dict[str, Any] = {}

    def send(who: str) -> None:
        client = TestApp(app)
        for name, value in login_client.cookies.items():
            client.set_cookie(name, value)
        replies[who] = call(client, "/cart")

    first, repeat = (threading.Thread(target=send, args=(who,)) for who in ("first", "repeat"))
    first.start()
    assert running.wait(LIMIT)
    repeat.start()
    repeat.join(2 * LIMIT)
    assert replayed(replies["first"], replies["repeat"]) == [False, True]
    assert login_client.get("/cart").json == {"cart": None if refresh else ["tea"]}
