"""sentry-sdk: a failure is reported once, and a breadcrumb and a tag say that an answer was a repeat."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
from flask import Flask
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.flask import FlaskIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport
from webtest import TestApp

from flask_runonce import RunOnce

from .calls import call, cancel, replayed

SECTION = "sentry-sdk"


class Reports(Transport):
    """Takes what Sentry would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.transactions: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if (event := item.get_event()) is not None:
                self.events.append(event)
            elif (transaction := item.get_transaction_event()) is not None:
                self.transactions.append(transaction)


@pytest.fixture(params=[True, False], ids=["deduplicated", "not deduplicated"])
def reports(request: pytest.FixtureRequest) -> Iterator[Reports]:
    """With and without the integration that would hide a second report of one exception."""
    reports = Reports()
    sentry_sdk.init(
        dsn="https://key@sentry.example/1",
        transport=reports,
        traces_sample_rate=1.0,
        default_integrations=False,  # the others patch what this process needs for other tests
        auto_enabling_integrations=False,
        integrations=[FlaskIntegration(), LoggingIntegration(), *([DedupeIntegration()] if request.param else [])],
    )
    yield reports
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


def told(events: list[Any]) -> collections.Counter[tuple[str, str, bool]]:
    """Which exceptions were reported, by what and as handled or not."""
    return collections.Counter(
        (each["type"], each["mechanism"]["type"], each["mechanism"]["handled"])
        for event in events
        for each in event["exception"]["values"]
    )


def test_a_failure_is_reported_as_without_us(reports: Reports, names: dict[str, Any], service: TestApp) -> None:
    plain = Flask(__name__)
    plain.post("/orders")(names["order"].__wrapped__)
    assert call(TestApp(plain), "/orders").status_int == 500
    without = told(reports.events)
    reports.events.clear()
    assert call(service, "/orders").status_int == 500
    assert told(reports.events) == without
    assert without["ConnectionError", "flask", False] == 1
    assert (without.total() == 1) == bool(sentry_sdk.get_client().get_integration(DedupeIntegration))


def test_a_repeat_reports_nothing(reports: Reports, service: TestApp) -> None:
    call(service, "/orders")
    reports.events.clear()
    assert replayed(call(service, "/orders")) == [True]
    assert reports.events == []


def test_a_breadcrumb_and_a_tag_say_replayed(reports: Reports, names: dict[str, Any], service: TestApp) -> None:
    @names["app"].after_request
    def look(response: Any) -> Any:
        sentry_sdk.capture_message("looked")
        return response

    for _ in range(2):
        call(service, "/orders")
    seen = []
    for event in (event for event in reports.events if event.get("message") == "looked"):
        crumbs = [crumb for crumb in event["breadcrumbs"]["values"] if crumb.get("category") == "runonce"]
        seen.append((event.get("tags", {}).get("runonce"), [(crumb["message"], crumb["data"]) for crumb in crumbs]))
    (first_tag, first_crumbs), (tag, [(message, data)]) = seen
    assert (first_tag, first_crumbs) == (None, [])
    assert (tag, message, data) == ("replayed", "replayed", {"status": 500, "seconds": 0.0})
    assert [transaction["tags"].get("runonce") for transaction in reports.transactions] == [None, "replayed"]


def test_the_transaction_has_the_name_of_the_view(reports: Reports, service: TestApp) -> None:
    call(service, "/orders")
    assert [transaction["transaction"] for transaction in reports.transactions] == ["order"]


def test_what_the_app_answers_itself_is_not_reported(reports: Reports, names: dict[str, Any]) -> None:
    app = Flask(__name__)
    runonce = RunOnce(app)
    app.register_error_handler(ConnectionError, lambda error: ("later", 503))
    app.post("/orders")(runonce.once(names["order"].__wrapped__))
    assert [call(TestApp(app), "/orders").status_int for _ in range(2)] == [503, 503]
    assert reports.events == []


def test_a_hook_that_raises_is_reported_once(reports: Reports, names: dict[str, Any], service: TestApp) -> None:
    @names["runonce"].on_cancel
    def stop(canceled: Any) -> None:
        raise ChildProcessError

    assert cancel(service).json["code"] == "cancel_failed"
    assert told(reports.events) == {("ChildProcessError", "logging", True): 1}


def test_the_request_is_reported_with_its_body(reports: Reports, service: TestApp) -> None:
    call(service, "/orders", json={"item": "tea"})
    assert reports.events[0]["request"]["data"] == {"item": "tea"}
