"""OpenTelemetry: the request's span says `replayed`, and records a failure once, whoever was set up first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from opentelemetry.instrumentation.flask import FlaskInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from webtest import TestApp

from flask_runonce import RunOnce
from flask_runonce.contrib import otel

from .calls import call, cancel

SECTION = "OpenTelemetry"


class Traces:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def take(self) -> list[ReadableSpan]:
        """The spans since the last look."""
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return spans


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """The spans of all apps that are instrumented in the test, the section's too."""
    traces = Traces()
    instrument_app = FlaskInstrumentor.instrument_app

    def instrument(app: Flask, **options: Any) -> None:
        instrument_app(app, tracer_provider=traces.provider, **options)

    monkeypatch.setattr(FlaskInstrumentor, "instrument_app", staticmethod(instrument))
    yield traces
    traces.provider.shutdown()


@pytest.fixture(params=["us first", "us last"])
def service(request: pytest.FixtureRequest, traces: Traces, names: dict[str, Any]) -> TestApp:
    """The section's app, also with the two set up the other way round."""
    if request.param == "us first":
        return TestApp(names["app"])
    app = Flask(__name__)
    FlaskInstrumentor().instrument_app(app)
    otel.instrument(app)
    runonce = RunOnce(app)
    app.post("/orders/<item>")(runonce.once(names["order"].__wrapped__))
    return TestApp(app)


def outcome(span: ReadableSpan) -> tuple[Any, Any]:
    assert span.attributes
    return span.attributes.get("runonce.outcome"), span.attributes.get("http.status_code")


def test_the_span_of_a_repeat_says_so(traces: Traces, service: TestApp) -> None:
    for _ in range(2):
        call(service, "/orders/tea")
    first, repeat = traces.take()
    assert [outcome(first), outcome(repeat)] == [("finished", 201), ("replayed", 201)]
    assert first.name == repeat.name == "POST /orders/<item>"
    assert repeat.attributes and repeat.attributes["gen_ai.tool.call.id"] == "call"


def test_refusals_and_cancels(traces: Traces, service: TestApp) -> None:
    call(service, "/orders/tea")
    call(service, "/orders/coffee")
    cancel(service)
    call(service, "/orders/tea")
    said = [outcome(span) for span in traces.take()]
    assert said == [("finished", 201), ("refused", 409), ("canceled", 200), ("refused", 409)]


def test_a_failure_is_recorded_once_as_without_us(traces: Traces, names: dict[str, Any], service: TestApp) -> None:
    plain = Flask(__name__)
    FlaskInstrumentor().instrument_app(plain)
    plain.post("/orders/<item>")(names["order"].__wrapped__)
    for each in (TestApp(plain), service, service):
        assert call(each, "/orders/coffee").status_int == 500
    without, first, repeat = traces.take()
    exceptions = [[event.attributes["exception.type"] for event in span.events] for span in (without, first, repeat)]
    assert exceptions == [exceptions[0], exceptions[0], []]
    assert len(exceptions[0]) <= 1
    assert {span.status.status_code for span in (without, first, repeat)} == {StatusCode.ERROR}
    assert outcome(repeat) == ("replayed", 500)


def test_a_failure_that_reaches_the_server_is_recorded_once(
    traces: Traces, names: dict[str, Any], service: TestApp
) -> None:
    service.app.config["PROPAGATE_EXCEPTIONS"] = True
    with pytest.raises(ConnectionError):
        call(service, "/orders/coffee")
    (span,) = traces.take()
    assert [event.attributes["exception.type"] for event in span.events] == ["ConnectionError"]
    assert outcome(span)[0] == "finished"
