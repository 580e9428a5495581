"""Flask-Limiter: a 429 is not kept, and a cancel gets through."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address
from webtest import TestApp

from flask_runonce import RunOnce

from .calls import call, cancel, replayed

SECTION = "Flask-Limiter"


def test_a_refusal_is_not_kept(names: dict[str, Any], service: TestApp) -> None:
    assert [call(service, "/orders", name).status_int for name in ("a", "b", "c", "c")] == [201, 201, 429, 429]
    names["limiter"].reset()
    replies = [call(service, "/orders", "c") for _ in range(2)]
    assert [reply.status_int for reply in replies] == [201, 201]
    assert replayed(*replies) == [False, True]


def test_repeats_count(service: TestApp) -> None:
    assert [call(service, "/orders").status_int for _ in range(3)] == [201, 201, 429]


def test_a_cancel_gets_through(service: TestApp) -> None:
    assert {cancel(service).status_int for _ in range(201)} == {200}


def limited(**config: Any) -> tuple[Limiter, TestApp]:
    """One view with the limit below `once`."""
    app = Flask(__name__)
    app.config.update(config)
    limiter = Limiter(get_remote_address, app=app, storage_uri="memory://")
    runonce = RunOnce(app)

    @app.post("/orders")
    @runonce.once
    @limiter.limit("2 per day")
    def order() -> str:
        return "ordered"

    return limiter, TestApp(app)


def test_without_the_exemption_a_cancel_counts() -> None:
    app = Flask(__name__)
    Limiter(get_remote_address, app=app, storage_uri="memory://", default_limits=["1 per day"])
    RunOnce(app)
    assert [cancel(TestApp(app)).status_int for _ in range(2)] == [200, 429]


def test_in_the_wrong_order_the_refusal_is_kept() -> None:
    limiter, service = limited()
    assert [call(service, "/orders", name).status_int for name in ("a", "b", "c")] == [200, 200, 429]
    limiter.reset()
    kept = call(service, "/orders", "c")
    assert (kept.status_int, replayed(kept)) == (429, [True])


def test_below_with_429_released_runs_count_alone() -> None:
    limiter, service = limited(RUNONCE_RELEASE_STATUSES=[429])
    assert [call(service, "/orders", name).status_int for name in ("a", "a", "a", "b", "c")] == [200] * 4 + [429]
    limiter.reset()
    assert call(service, "/orders", "c").status_int == 200


@pytest.mark.parametrize("name", ["a", "a,b"])
def test_refusals_of_ours_count_like_any_request(service: TestApp, name: str) -> None:
    call(service, "/orders", name)
    call(service, "/orders", name, params={"other": "input"})
    assert call(service, "/orders", name).status_int == 429
