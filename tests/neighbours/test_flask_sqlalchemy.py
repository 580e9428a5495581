"""Flask-SQLAlchemy: a view rolls back and its record stays; the store has connections of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, Response
from flask_sqlalchemy import SQLAlchemy
from webtest import TestApp

from flask_runonce import RunOnce, current_call
from flask_runonce.stores import SQLStore
from tests.services import PostgresServer

from .calls import call, replayed

SECTION = "Flask-SQLAlchemy"


@pytest.fixture
def orders(names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The section's app with its table, closed in the end."""
    app, db = names["app"], names["db"]
    with app.app_context():
        db.create_all()
        yield names
        db.session.remove()
        db.engine.dispose()
    app.extensions["runonce"].runner.store.close()


def kept(names: dict[str, Any]) -> list[str]:
    """What is in the table."""
    db = names["db"]
    with names["app"].app_context(), db.engine.connect() as connection:
        return list(connection.scalars(sa.select(names["Order"].item)))


def test_what_is_committed_is_kept_once(orders: dict[str, Any]) -> None:
    replies = [call(TestApp(orders["app"]), "/orders", json={"item": "tea"}) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [201, 201]
    assert replayed(*replies) == [False, True]
    assert kept(orders) == ["tea"]


def test_a_view_that_rolls_back_has_answered(orders: dict[str, Any]) -> None:
    service = TestApp(orders["app"])
    call(service, "/orders", "first", json={"item": "tea"})
    replies = [call(service, "/orders", "second", json={"item": "tea"}) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [409, 409]
    assert "There is such an order." in replies[1].text
    assert replayed(*replies) == [False, True]
    assert kept(orders) == ["tea"]


def test_a_view_that_raises_is_rolled_back_and_its_outcome_is_unknown(orders: dict[str, Any]) -> None:
    @orders["app"].post("/failing")
    @orders["runonce"].once
    def failing() -> str:
        orders["db"].session.add(orders["Order"](item="tea"))
        orders["db"].session.flush()
        raise LookupError

    service = TestApp(orders["app"])
    assert [call(service, "/failing").status_int for _ in range(2)] == [500, 500]
    assert call(service, "/failing").json["code"] == "outcome_unknown"
    assert kept(orders) == []


def test_a_view_that_knows_that_it_rolled_back_may_run_again(orders: dict[str, Any]) -> None:
    runs = []

    @orders["app"].post("/again")
    @orders["runonce"].once
    def again() -> str:
        runs.append(1)
        orders["db"].session.add(orders["Order"](item="tea"))
        orders["db"].session.flush()
        if len(runs) == 1:
            orders["db"].session.rollback()
            current_call.release()
            raise LookupError
        orders["db"].session.commit()
        return "ordered"

    service = TestApp(orders["app"])
    assert [call(service, "/again").status_int for _ in range(3)] == [500, 200, 200]
    assert (len(runs), kept(orders)) == (2, ["tea"])


def test_in_the_wrong_order_the_answer_of_a_commit_that_failed_is_repeated(orders: dict[str, Any]) -> None:
    app, db = orders["app"], orders["db"]

    @app.post("/wrong")
    @orders["runonce"].once
    def wrong() -> tuple[str, int]:
        db.session.add(orders["Order"](item="tea"))
        return "ordered", 201

    @app.after_request
    def commit(response: Response) -> Response:
        if "Idempotent-Replayed" not in response.headers:
            db.session.add(orders["Order"](item=None))  # cannot be kept
            db.session.commit()
        return response

    service = TestApp(app)
    assert call(service, "/wrong").status_int == 500
    repeat = call(service, "/wrong")
    assert (repeat.status_int, repeat.text) == (201, "ordered")
    assert kept(orders) == []


@pytest.mark.parametrize("commits", [True, False])
def test_one_engine_for_both_and_no_request_waits_for_its_own_connection(
    postgres_server: PostgresServer, commits: bool
) -> None:
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = postgres_server.url
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {
        "pool_size": 1,
        "max_overflow": 0,
        "pool_timeout": 30,
        "connect_args": {"application_name": f"both-{commits}"},
    }
    db = SQLAlchemy(app)
    with app.app_context():
        store = SQLStore(db.engine, prefix=f"neighbours_{commits}".lower())
        runonce = RunOnce(app, store=store)
    used: list[int] = []

    @app.post("/orders")
    @runonce.once
    def order() -> str:
        used.append(db.session.scalar(sa.text("SELECT pg_backend_pid()")))
        if commits:
            db.session.commit()
        return "ordered"  # or the session holds the app's only connection until the request ends

    service = TestApp(app)
    assert replayed(*[call(service, "/orders") for _ in range(2)]) == [False, True]
    with postgres_server.connect() as connection:
        name = f"both-{commits}"
        there = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
        pids = [pid for (pid,) in connection.execute(there, [name])]
    assert len(pids) == 2  # the app's and the store's, both opened with the engine's settings
    assert set(used) < set(pids)
    with app.app_context():
        db.engine.dispose()
    store.close()


def test_the_engine_of_the_section_is_not_opened_at_the_start(names: dict[str, Any]) -> None:
    from .conftest import PAGE, sections

    exec(compile(sections()[SECTION][1], str(PAGE), "exec", dont_inherit=True), names)
    with names["app"].app_context():
        assert names["db"].engine.pool.checkedin() == names["db"].engine.pool.checkedout() == 0
    assert isinstance(names["app"].extensions["runonce"].runner.store, SQLStore)
