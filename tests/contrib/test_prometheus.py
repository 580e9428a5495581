"""The metrics count what becomes of calls, by the signals alone."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import flask
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from webtest import TestApp

from flask_runonce import RunOnce, RunOnceMiddleware, current_call, signals
from flask_runonce.contrib.prometheus import Records, instrument
from flask_runonce.errors import StoreUnavailable
from flask_runonce.stores import MemoryStore, SQLStore

LIMIT = 30
CALL = {"Coder-Chat-Id": "chat", "Coder-Tool-Call-Id": "call"}


class Watched:
    """An app with one view that does what it is told, and its metrics."""

    def __init__(self) -> None:
        self.app = flask.Flask(__name__)
        self.app.config["RUNONCE_WAIT_TIMEOUT"] = 0
        self.store = MemoryStore()
        self.runonce = RunOnce(self.app, store=self.store)
        self.registry = CollectorRegistry()
        instrument(self.app, registry=self.registry)
        self.started, self.go_on = threading.Event(), threading.Event()

        @self.app.post("/<what>")
        @self.runonce.once(result_budget=64)
        def view(what: str) -> Any:
            if what == "release":
                current_call.release()
            if what == "fail":
                raise LookupError
            if what == "wait":
                self.started.set()
                assert self.go_on.wait(LIMIT)
            return "x" * 100 if what == "long" else ("done", 201)

    def post(self, what: str, call: str = "call", **options: Any) -> Any:
        headers = CALL | {"Coder-Tool-Call-Id": call}
        return TestApp(self.app).post(f"/{what}", headers=headers, status="*", **options)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_run_and_its_repeats(watched: Watched) -> None:
    for _ in range(3):
        watched.post("done")
    assert watched.value("runonce_calls_total", outcome="finished") == 1
    assert watched.value("runonce_calls_total", outcome="replayed") == 2
    assert watched.value("runonce_run_seconds_count", status="201") == 1
    assert watched.value("runonce_run_seconds_bucket", status="201", le="1800.0") == 1
    assert watched.value("runonce_wait_seconds_count") == 2
    assert watched.value("runonce_wait_seconds_sum") == 0
    assert watched.value("runonce_saved_bytes_total") == len(b"done")


def test_a_repeat_that_waited(watched: Watched) -> None:
    signals.call_replayed.send(watched.app, key=None, status=201, seconds=7.5)
    assert watched.value("runonce_wait_seconds_sum") == 7.5
    assert watched.value("runonce_wait_seconds_bucket", le="5.0") == 0
    assert watched.value("runonce_wait_seconds_bucket", le="7.5") == 1


def test_a_run_that_fails_and_one_that_is_released(watched: Watched) -> None:
    watched.post("fail", "a")
    watched.post("release", "b")
    watched.post("release", "b")
    assert watched.value("runonce_run_seconds_count", status="500") == 1
    assert watched.value("runonce_calls_total", outcome="unknown") == 1
    assert watched.value("runonce_calls_total", outcome="released") == 2


def test_refusals_by_code(watched: Watched) -> None:
    watched.post("done")
    watched.post("other")
    watched.post("done", "a,b")
    running = threading.Thread(target=watched.post, args=("wait", "w"))
    running.start()
    assert watched.started.wait(LIMIT)
    watched.post("wait", "w")
    watched.go_on.set()
    running.join(LIMIT)
    for code in ("input_mismatch", "invalid_key", "still_running"):
        assert watched.value("runonce_refusals_total", code=code) == 1, code
    assert watched.value("runonce_calls_total", outcome="refused") == 3


def test_cancels_by_what_they_found(watched: Watched) -> None:
    watched.post("done")
    service = TestApp(watched.app)
    for call in ("call", "call", "unknown"):
        service.post(f"/api/v0/tool-calls/{call}/cancel", headers={"Coder-Chat-Id": "chat"})
    assert watched.value("runonce_cancels_total", state="done") == 2
    assert watched.value("runonce_cancels_total", state="not_received") == 1


def test_lost_owners(watched: Watched) -> None:
    signals.call_lost.send(watched.app, key=None, owner="host:1")
    assert watched.value("runonce_lost_owners_total") == 1


def test_bytes_of_a_result_that_was_cut(watched: Watched) -> None:
    kept = len(watched.post("long").body)
    assert watched.value("runonce_result_bytes_total", part="kept") == kept <= 64
    assert watched.value("runonce_result_bytes_total", part="left_out") == 100 - kept


def test_records_are_counted_at_the_scrape(watched: Watched) -> None:
    watched.registry.register(Records(watched.store))
    assert watched.value("runonce_records") == 0
    watched.post("done", "a")
    watched.post("done", "b")
    assert watched.value("runonce_records") == 2
    assert watched.value("runonce_records_bytes") == watched.store.bytes > 0


def test_a_store_is_not_opened_at_the_start_and_may_be_down_at_the_scrape(caplog: pytest.LogCaptureFixture) -> None:
    class Down(MemoryStore):
        asked = 0

        def list(self, **options: Any) -> Any:
            self.asked += 1
            raise StoreUnavailable("gone fishing")

    store, registry = Down(), CollectorRegistry(auto_describe=True)
    registry.register(Records(store))
    assert store.asked == 0
    instrument(object(), registry=registry)
    page = generate_latest(registry).decode()
    assert "runonce_lost_owners_total 0.0" in page
    assert "\nrunonce_records " not in page
    assert store.asked == 1
    assert "gone fishing" in caplog.text


def test_the_bytes_of_a_database_are_not_told(tmp_path: Path) -> None:
    with contextlib.closing(SQLStore(f"sqlite:///{tmp_path / 'calls.db'}")) as store:
        registry = CollectorRegistry(auto_describe=True)
        registry.register(Records(store))
        assert registry.get_sample_value("runonce_records") == 0
        assert registry.get_sample_value("runonce_records_bytes") is None


def test_another_app_is_not_counted(watched: Watched) -> None:
    Watched().post("done")
    assert watched.value("runonce_calls_total", outcome="finished") is None


@pytest.mark.usefixtures("all_apps")
def test_all_apps_the_middlewares_too() -> None:
    registry = CollectorRegistry()
    instrument(registry=registry)

    def hello(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"hello"]

    TestApp(RunOnceMiddleware(hello)).post("/", headers=CALL)
    Watched().post("done")
    assert registry.get_sample_value("runonce_calls_total", {"outcome": "finished"}) == 2


def test_a_registry_is_instrumented_once(watched: Watched) -> None:
    with pytest.raises(ValueError, match="runonce_calls"):
        instrument(watched.app, registry=watched.registry)
