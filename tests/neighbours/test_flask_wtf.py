"""Flask-WTF: the check of the CSRF token stands above; the cancel route is exempt, and guarded."""

from __future__ import annotations

from typing import Any

import itsdangerous
import pytest
from flask import Flask, session
from flask_wtf import CSRFProtect
from webtest import TestApp

from flask_runonce import RunOnce

from .calls import call, cancel, replayed

SECTION = "Flask-WTF"
FORM = {"item": "tea"}


@pytest.fixture
def token(service: TestApp) -> str:
    """The token of a session that is logged in."""
    return str(service.get("/token").text)


def with_token(token: str) -> dict[str, str]:
    return {"X-CSRFToken": token}


def test_a_repeat_needs_a_token_too(service: TestApp, token: str) -> None:
    assert call(service, "/orders", params=FORM).status_int == 400
    replies = [call(service, "/orders", headers=with_token(token), params=FORM) for _ in range(2)]
    assert [reply.json for reply in replies] == [{"ordered": "tea"}] * 2
    assert replayed(*replies) == [False, True]
    refused = call(service, "/orders", params=FORM)
    assert (refused.status_int, replayed(refused)) == (400, [False])


def test_a_token_in_the_form_is_read_before_the_view_and_is_there_for_it(service: TestApp, token: str) -> None:
    replies = [call(service, "/orders", params=FORM | {"csrf_token": token}) for _ in range(2)]
    assert [reply.json for reply in replies] == [{"ordered": "tea"}] * 2
    assert replayed(*replies) == [False, True]


def test_a_newer_token_in_the_form_is_another_input_but_not_one_in_the_header(
    service: TestApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        made_at = itsdangerous.TimestampSigner.get_timestamp
        earlier.setattr(itsdangerous.TimestampSigner, "get_timestamp", lambda signer: made_at(signer) - 60)
        old = service.get("/token").text
    new = service.get("/token").text
    assert old != new
    assert call(service, "/orders", "form", params=FORM | {"csrf_token": old}).status_int == 201
    refused = call(service, "/orders", "form", params=FORM | {"csrf_token": new})
    assert (refused.status_int, refused.json["code"]) == (409, "input_mismatch")
    replies = [call(service, "/orders", "header", headers=with_token(token), params=FORM) for token in (old, new)]
    assert replayed(*replies) == [False, True]


def test_a_cancel_needs_no_token_but_passes_the_guard(names: dict[str, Any], service: TestApp, token: str) -> None:
    assert cancel(TestApp(names["app"])).status_int == 401
    call(service, "/orders", headers=with_token(token), params=FORM)
    assert cancel(service).json["state"] == "done"


def protected(**config: Any) -> tuple[Flask, RunOnce, CSRFProtect]:
    """An app that checks tokens, with nothing exempt."""
    app = Flask(__name__)
    app.secret_key = "change me"
    app.config.update(config)
    csrf = CSRFProtect(app)
    return app, RunOnce(app, scope=lambda environ: session.get("user")), csrf


def test_without_the_exemption_a_cancel_needs_a_token(names: dict[str, Any]) -> None:
    app, _, _ = protected()
    app.get("/token")(names["token"])
    service = TestApp(app)
    assert cancel(service).status_int == 400
    token = service.get("/token").text
    assert cancel(service, headers=with_token(token)).json["state"] == "not_received"


def test_in_the_wrong_order_a_missing_token_is_the_answer_for_good(names: dict[str, Any]) -> None:
    app, runonce, csrf = protected(WTF_CSRF_CHECK_DEFAULT=False)
    app.get("/token")(names["token"])

    @app.post("/wrong")
    @runonce.once
    def wrong() -> str:
        csrf.protect()
        return "done"

    service = TestApp(app)
    token = service.get("/token").text
    assert call(service, "/wrong").status_int == 400
    kept = call(service, "/wrong", headers=with_token(token))
    assert (kept.status_int, replayed(kept)) == (400, [True])
