"""The current span says what became of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flask
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from webtest import TestApp

from flask_runonce import CallKey, RunOnce, RunOnceMiddleware, current_call, signals
from flask_runonce.contrib import otel

CALL = {"Coder-Chat-Id": "chat", "Coder-Tool-Call-Id": "call"}


class Traced:
    """Sends requests, each in a span of its own, and shows what the spans say."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(__name__)

    def post(self, app: Any, path: str, call: str = "call") -> dict[str, Any]:
        """What the span of the request says by our names and the conventions' ones for the IDs."""
        with self.span():
            TestApp(app).post(path, headers=CALL | {"Coder-Tool-Call-Id": call}, status="*")
        return self.said()

    def span(self) -> Any:
        return self._tracer.start_as_current_span("request")

    def said(self) -> dict[str, Any]:
        return dict(self._exporter.get_finished_spans()[-1].attributes or {})

    def close(self) -> None:
        self._provider.shutdown()


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.close()


@pytest.fixture
def app() -> flask.Flask:
    app = flask.Flask(__name__)
    runonce = RunOnce(app, scope=lambda environ: "ada@example.org")
    otel.instrument(app)

    @app.post("/<what>")
    @runonce.once(result_budget=64)
    def view(what: str) -> Any:
        if what == "release":
            current_call.release()
        return "x" * 100 if what == "long" else ("done", 201)

    return app


IDS = {"gen_ai.conversation.id": "chat", "gen_ai.tool.call.id": "call"}


def test_a_run_and_its_repeat(traced: Traced, app: flask.Flask) -> None:
    said = traced.post(app, "/done")
    assert said.pop("runonce.seconds") > 0
    assert said.pop("runonce.bytes") > 0
    assert said == IDS | {"runonce.outcome": "finished", "runonce.status": 201, "runonce.ended": "response"}
    repeat = IDS | {"runonce.outcome": "replayed", "runonce.status": 201, "runonce.seconds": 0}
    assert traced.post(app, "/done") == repeat


def test_refusals(traced: Traced, app: flask.Flask) -> None:
    traced.post(app, "/done")
    refused = {"runonce.outcome": "refused", "runonce.code": "input_mismatch", "runonce.status": 409}
    assert traced.post(app, "/other") == IDS | refused
    no_key = {"runonce.outcome": "refused", "runonce.code": "invalid_key", "runonce.status": 400}
    assert traced.post(app, "/done", "a,b") == no_key


def test_a_release(traced: Traced, app: flask.Flask) -> None:
    assert traced.post(app, "/release") == IDS | {"runonce.outcome": "released"}


def test_a_cancel(traced: Traced, app: flask.Flask) -> None:
    said = traced.post(app, "/api/v0/tool-calls/call/cancel", "in the header")
    assert said == IDS | {"runonce.outcome": "canceled", "runonce.state": "not_received", "runonce.pending": False}


def test_a_result_that_was_cut(traced: Traced, app: flask.Flask) -> None:
    said = traced.post(app, "/long")
    assert said["runonce.original_bytes"] == 100
    assert said["runonce.kept_bytes"] <= 64
    assert said["runonce.outcome"] == "finished"


def test_an_owner_that_was_lost(traced: Traced, app: flask.Flask) -> None:
    key = CallKey("", "chat", "call")
    with traced.span():
        signals.call_lost.send(app, key=key, owner="host:1")
        signals.call_replayed.send(app, key=key, status=500, seconds=2.5)
    said = {"runonce.owner": "host:1", "runonce.outcome": "replayed", "runonce.status": 500, "runonce.seconds": 2.5}
    assert traced.said() == IDS | said


def test_another_app_says_nothing(traced: Traced) -> None:
    app = flask.Flask(__name__)
    runonce = RunOnce(app)
    app.post("/")(runonce.once(lambda: "done"))
    assert traced.post(app, "/") == {}


@pytest.mark.usefixtures("all_apps")
def test_all_apps_the_middlewares_too(traced: Traced) -> None:
    def hello(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"hello"]

    application = RunOnceMiddleware(hello)
    otel.instrument()
    assert traced.post(application, "/")["runonce.outcome"] == "finished"
    assert traced.post(application, "/")["runonce.outcome"] == "replayed"


def test_a_span_that_has_ended_is_left_alone(
    traced: Traced, app: flask.Flask, caplog: pytest.LogCaptureFixture
) -> None:
    with traced.span() as span:
        span.end()
        TestApp(app).post("/done", headers=CALL)
    assert traced.said() == {}
    assert "attribute" not in caplog.text


def test_without_a_span_nothing_happens(app: flask.Flask) -> None:
    assert TestApp(app).post("/done", headers=CALL).status_int == 201
