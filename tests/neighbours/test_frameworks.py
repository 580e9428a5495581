"""`examples/frameworks` through WebTest: the same service in Django, Bottle, Falcon and Pyramid, run once."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterable
from typing import Any

import pytest
from webtest import TestApp

from .calls import call, cancel, replayed

SECTION = "Django, Bottle, Falcon, Pyramid"
FRAMEWORKS = ("django", "bottle", "falcon", "pyramid")
pytestmark = [  # Pyramid imports pkg_resources, which says so
    pytest.mark.filterwarnings("ignore:pkg_resources is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Deprecated call to .pkg_resources:DeprecationWarning"),
]
ANSWERS_ITS_FAILURES = {"django": True, "bottle": True, "falcon": True, "pyramid": False}


class Orders:
    """A sample, served, and how often the framework was asked in this test."""

    def __init__(self, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.framework = framework
        self.asked = 0
        application = importlib.import_module(f"examples.frameworks.{framework}_orders").application
        ask = application.app

        def counting(environ: Any, start_response: Any) -> Iterable[bytes]:
            self.asked += 1
            answer: Iterable[bytes] = ask(environ, start_response)
            return answer

        monkeypatch.setattr(application, "app", counting)
        self.service = TestApp(application)


@pytest.fixture(params=FRAMEWORKS)
def orders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Orders:
    return Orders(request.param, monkeypatch)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A call's ID for this test alone; the samples keep their store from test to test."""
    return request.node.name


def test_an_order_runs_once(orders: Orders, name: str) -> None:
    replies = [call(orders.service, "/orders/tea", name, params="hot") for _ in range(3)]
    assert [(reply.status, reply.json) for reply in replies] == [
        ("201 Created", {"ordered": "tea", "note": "hot"}),
    ] * 3
    assert [reply.content_type for reply in replies] == ["application/json"] * 3
    assert replayed(*replies) == [False, True, True]
    assert orders.asked == 1


def test_another_input_is_refused(orders: Orders, name: str) -> None:
    call(orders.service, "/orders/tea", name, params="hot")
    for path, note in (("/orders/tea", "cold"), ("/orders/coffee", "hot")):
        refused = call(orders.service, path, name, params=note)
        assert (refused.status_int, refused.json["code"]) == (409, "input_mismatch")
    assert orders.asked == 1


def test_without_ids_it_runs_each_time(orders: Orders) -> None:
    for _ in range(2):
        assert orders.service.post("/orders/tea", "hot").status_int == 201
    assert orders.asked == 2


def test_a_body_that_is_too_long_to_compare_reaches_the_framework_whole(orders: Orders, name: str) -> None:
    note = "hot " * 2**19
    replies = [call(orders.service, "/orders/tea", name, params=note) for _ in range(2)]
    assert [reply.json["note"] == note for reply in replies] == [True, True]
    assert orders.asked == 1


def test_a_cancel_after_the_run(orders: Orders, name: str) -> None:
    first = call(orders.service, "/orders/tea", name, params="hot")
    canceled = cancel(orders.service, name).json
    assert canceled["state"] == "done"
    assert base64.b64decode(canceled["body"]) == first.body
    assert call(orders.service, "/orders/tea", name, params="hot").json["code"] == "canceled"
    assert orders.asked == 1


def test_a_cancel_before_the_run(orders: Orders, name: str) -> None:
    assert cancel(orders.service, name).json["state"] == "not_received"
    assert call(orders.service, "/orders/tea", name, params="hot").json["code"] == "canceled"
    assert orders.asked == 0


def test_a_page_that_is_not_there_is_an_answer(orders: Orders, name: str) -> None:
    replies = [call(orders.service, "/nowhere", name) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [404, 404]
    assert replies[0].body == replies[1].body
    assert orders.asked == 1


def test_a_failure_is_the_frameworks_answer_or_nobody_knows_the_outcome(orders: Orders, name: str) -> None:
    def send() -> Any:
        return call(orders.service, "/orders/tea", name, params=b"\xff", expect_errors=True)  # no UTF-8

    if ANSWERS_ITS_FAILURES[orders.framework]:
        first, repeat = send(), send()
        assert (first.status_int, repeat.status_int) == (500, 500)
        assert repeat.body == first.body
        assert replayed(first, repeat) == [False, True]
    else:
        with pytest.raises(UnicodeDecodeError):
            send()
        assert (send().status_int, send().json["code"]) == (500, "outcome_unknown")
    assert orders.asked == 1


def test_django_is_told_once_that_the_request_is_over(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from django.core.signals import request_finished

    orders = Orders("django", monkeypatch)
    over = []

    def note(**facts: Any) -> None:
        over.append(facts["sender"])

    request_finished.connect(note)
    for _ in range(3):
        call(orders.service, "/orders/tea", name, params="hot")
    request_finished.disconnect(note)
    assert len(over) == 1
