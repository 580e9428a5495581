"""Edges at which a host, a framework or a fault leaves the usual path: the promise holds there too."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flask
import pytest
from werkzeug.test import Client, EnvironBuilder, run_wsgi_app

from flask_runonce import RunOnce, RunOnceMiddleware, codec, keeper
from flask_runonce.errors import UnreadableRecord
from flask_runonce.record import CallKey, Record, State
from flask_runonce.stores import SQLStore

HEADERS = {"Coder-Chat-Id": "chat", "Coder-Tool-Call-Id": "call"}
CANCEL = "/api/v0/tool-calls/call/cancel"


def served(view: Any, config: dict[str, Any] | None = None, **options: Any) -> tuple[flask.Flask, RunOnce, Client]:
    app = flask.Flask(__name__)
    app.config.update(config or {}, RUNONCE_WAIT_TIMEOUT=0.05)
    runonce = RunOnce(app, guard=lambda environ: None)
    app.add_url_rule("/", "view", runonce.once(**options)(view), methods=["POST"])
    return app, runonce, Client(app)


@pytest.mark.parametrize("method", ["post", "Post"])
def test_a_method_in_another_case_is_the_same_method(method: str) -> None:
    runs = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        runs.append(1)
        start_response("200 OK", [])
        return [b"ran"]

    middleware = RunOnceMiddleware(app, guard=lambda environ: None)
    for sent in (method, method, "POST"):
        environ = EnvironBuilder(path="/", headers=HEADERS).get_environ()
        environ["REQUEST_METHOD"] = sent
        body, _, _ = run_wsgi_app(middleware, environ)
        assert b"".join(body) == b"ran"
    environ = EnvironBuilder(path=CANCEL, headers=HEADERS).get_environ()
    environ["REQUEST_METHOD"] = method
    body, _, _ = run_wsgi_app(middleware, environ)
    assert json.loads(b"".join(body))["state"] == "done"
    assert len(runs) == 1


def test_a_stream_that_was_thrown_away_takes_no_context_from_the_next_request() -> None:
    def view() -> flask.Response:
        return flask.Response(flask.stream_with_context(iter(["a", "b"])))

    app, runonce, client = served(view, {"RUNONCE_MAX_BODY_BYTES": 0})
    app.add_url_rule("/next", "next", runonce.once(lambda: flask.request.path), methods=["POST"])

    @app.after_request
    def replace(response: flask.Response) -> flask.Response:
        return flask.Response("replaced") if flask.request.path == "/" else response

    assert client.post("/", headers=HEADERS).text == "replaced"
    assert client.post("/next", headers={**HEADERS, "Coder-Tool-Call-Id": "next"}).text == "/next"
    assert client.post("/", headers=HEADERS).text == "replaced"


def test_a_keeper_that_found_no_thread_tries_again_with_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    class Thread(threading.Thread):
        fail = True

        def start(self) -> None:
            if Thread.fail:
                raise RuntimeError("can't start new thread")
            started.set()
            super().start()

    monkeypatch.setattr(keeper.threading, "Thread", Thread)
    store = SQLStore(f"sqlite:///{tmp_path / 'calls.db'}")
    app = flask.Flask(__name__)
    runonce = RunOnce(app, store=store, guard=lambda environ: None)
    app.add_url_rule("/", "view", runonce.once(lambda: "ran"), methods=["POST"])
    client = Client(app)
    assert client.post("/", headers=HEADERS).status_code == 500
    Thread.fail = False
    assert client.post("/", headers=HEADERS).text == "ran"  # the first one was released: it had not begun
    assert started.is_set()
    store.close()


def test_an_async_hook_that_is_canceled_is_a_hook_that_failed() -> None:
    _, runonce, client = served(lambda: "ran")
    called = []

    @runonce.on_cancel
    async def stop(call: Any) -> None:
        raise asyncio.CancelledError

    runonce.on_cancel(called.append)
    assert client.post(CANCEL, headers=HEADERS).json["code"] == "cancel_failed"
    assert len(called) == 1


def test_an_owed_hook_takes_no_answer_from_the_first_caller() -> None:
    def view() -> str:
        Client(app).post(CANCEL, headers=HEADERS)  # does not wait: the hooks are owed
        return "ran"

    app, runonce, client = served(view, {"RUNONCE_CANCEL_TIMEOUT": 0})

    @runonce.on_cancel
    def stop(call: Any) -> None:
        raise SystemExit

    assert client.post("/", headers=HEADERS).text == "ran"


@pytest.mark.parametrize("tool_call_id", ["a%0Ab", "a%0A", "%0A"])
def test_a_line_break_in_an_id_is_an_invalid_key(tool_call_id: str) -> None:
    _, _, client = served(lambda: "ran")
    for reply in (
        client.post(f"/api/v0/tool-calls/{tool_call_id}/cancel", headers=HEADERS),
        client.get(f"/api/v0/tool-calls/{tool_call_id}", headers=HEADERS),
    ):
        assert (reply.status_code, reply.json and reply.json["code"]) == (400, "invalid_key")


def test_a_clock_that_stepped_back_vouches_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SQLStore(f"sqlite:///{tmp_path / 'calls.db'}")
    app = flask.Flask(__name__)
    RunOnce(app, store=store, guard=lambda environ: None)
    monkeypatch.setattr(store, "age", lambda: -86400.0)
    assert Client(app).post(CANCEL, headers=HEADERS).json["remembers"] == 0
    store.close()


def test_an_inner_front_door_has_its_own_bound() -> None:
    runs = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        runs.append(environ["wsgi.input"].read())
        start_response("200 OK", [])
        return runs[-1:]

    outer_headers = {"RUNONCE_CHAT_ID_HEADER": "X-Chat", "RUNONCE_TOOL_CALL_ID_HEADER": "X-Call"}
    config = {"RUNONCE_FINGERPRINT_BYTES": 0, "RUNONCE_URL_PREFIX": "/outer", **outer_headers}
    inner = RunOnceMiddleware(app, guard=lambda environ: None)
    client = Client(RunOnceMiddleware(inner, guard=lambda environ: None, config=config))
    first = client.post("/", data=b"one", headers={**HEADERS, "X-Chat": "c", "X-Call": "1"})
    other = client.post("/", data=b"two", headers={**HEADERS, "X-Chat": "c", "X-Call": "2"})
    assert first.data == b"one"
    assert other.json["code"] == "input_mismatch"
    assert runs == [b"one"]


@pytest.mark.parametrize(
    "place, value", [(-1, [5, []]), (-1, None), (6, None), (2, "canceled"), (-1, ["no number", []])]
)
def test_facts_that_cannot_be_are_unreadable(place: int, value: Any) -> None:
    facts = [1, ["", "chat", "call"], "done", "run", "", None, "done", False, False, "response", ["200 OK", []]]
    assert codec.decode(json.dumps(facts).encode(), b"", created_at=1.0, finished_at=2.0).run == "run"
    facts[place] = value
    if place in (2, 6):
        facts[2], facts[6] = "canceled", None
    with pytest.raises(UnreadableRecord):
        codec.decode(json.dumps(facts).encode(), b"", created_at=1.0, finished_at=2.0)


def test_facts_that_nest_too_deep_are_unreadable() -> None:
    with pytest.raises(UnreadableRecord):
        codec.decode(b"[" * 100_000, b"", created_at=1.0, finished_at=None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_handlers_fork_that_falls_out_of_the_handler_ends_nobodys_run(tmp_path: Path) -> None:
    store = SQLStore(f"sqlite:///{tmp_path / 'calls.db'}")

    def view() -> str:
        child = os.fork()
        if child == 0:
            raise SystemExit
        os.waitpid(child, 0)
        return "ran"

    app = flask.Flask(__name__)
    runonce = RunOnce(app, store=store, guard=lambda environ: None)
    app.add_url_rule("/", "view", runonce.once(view), methods=["POST"])
    parent = os.getpid()
    try:
        replies = [Client(app).post("/", headers=HEADERS).text for _ in range(2)]
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert replies == ["ran", "ran"]
    record = store.read(CallKey("", "chat", "call")).record
    assert isinstance(record, Record) and record.state is State.DONE
    store.close()
