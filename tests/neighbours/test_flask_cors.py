"""Flask-CORS: a browser shows repeats and refusals to its page."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask
from flask_cors import cross_origin
from webtest import TestApp, TestResponse

from flask_runonce import RunOnce

from .calls import CHAT, call, cancel, replayed

SECTION = "Flask-CORS"
ORIGIN = "https://chat.example"
FROM = {"Origin": ORIGIN}


def shown(reply: TestResponse, origin: str = ORIGIN) -> bool:
    """Whether a browser lets a page of `origin` see the answer, and the headers that say what it is."""
    exposed = set(reply.headers.get("Access-Control-Expose-Headers", "").split(", "))
    return (
        reply.headers.get("Access-Control-Allow-Origin") == origin
        and "Origin" in reply.headers["Vary"]
        and {"Idempotent-Replayed", "Retry-After"} <= exposed
    )


@pytest.mark.parametrize("path", ["/orders", "/api/v0/tool-calls/call/cancel"])
def test_a_browser_may_send_the_ids(service: TestApp, path: str) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ", ".join(CHAT)}
    allowed = service.options(path, headers=FROM | asked).headers
    assert allowed["Access-Control-Allow-Origin"] == ORIGIN
    assert "POST" in allowed["Access-Control-Allow-Methods"]
    assert "coder-chat-id" in allowed["Access-Control-Allow-Headers"].lower()


def test_a_repeat_is_shown(service: TestApp) -> None:
    replies = [call(service, "/orders", headers=FROM, json={"item": "tea"}) for _ in range(2)]
    assert replayed(*replies) == [False, True]
    assert all(map(shown, replies))


def test_a_repeat_is_shown_to_the_origin_that_asks_for_it(service: TestApp) -> None:
    call(service, "/orders", headers=FROM, json={"item": "tea"})
    admin = "https://admin.example"
    repeat = call(service, "/orders", headers={"Origin": admin}, json={"item": "tea"})
    assert replayed(repeat) == [True]
    assert shown(repeat, admin)
    assert repeat.headers.getall("Access-Control-Allow-Origin") == [admin]
    stranger = call(service, "/orders", headers={"Origin": "https://other.example"}, json={"item": "tea"})
    assert "Access-Control-Allow-Origin" not in stranger.headers


def test_refusals_and_cancels_are_shown(service: TestApp) -> None:
    call(service, "/orders", headers=FROM, json={"item": "tea"})
    replies = [
        call(service, "/orders", headers=FROM, json={"item": "coffee"}),
        call(service, "/orders", "a,b", headers=FROM, json={"item": "tea"}),
        cancel(service, headers=FROM),
        call(service, "/orders", headers=FROM, json={"item": "tea"}),
        cancel(service, "a,b", headers=FROM),
    ]
    codes = [reply.json.get("code") for reply in replies]
    assert codes == ["input_mismatch", "invalid_key", None, "canceled", "invalid_key"]
    assert all(map(shown, replies))


def test_an_unknown_outcome_is_shown(names: dict[str, Any], service: TestApp) -> None:
    @names["app"].post("/failing")
    @names["runonce"].once
    def failing() -> str:
        raise LookupError

    replies = [call(service, "/failing", headers=FROM) for _ in range(2)]
    assert replies[1].json["code"] == "outcome_unknown"
    assert all(map(shown, replies))


@pytest.mark.parametrize("right", [True, False])
def test_the_order_of_a_single_views_headers(right: bool) -> None:
    app = Flask(__name__)
    once, cors = RunOnce(app).once, cross_origin(origins=[ORIGIN])

    def one() -> str:
        return "done"

    app.post("/one")(cors(once(one)) if right else once(cors(one)))
    replies = [call(TestApp(app), "/one", headers=FROM) for _ in range(2)]
    assert replayed(*replies) == [False, True]
    assert ["Access-Control-Allow-Origin" in reply.headers for reply in replies] == [True, right]
