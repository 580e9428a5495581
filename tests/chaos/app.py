"""The judged app. The first thing that a run does is to write itself into the book of effects."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flask import Flask, Response, current_app, jsonify, request
from werkzeug.test import TestResponse

from flask_runonce import RunOnce, current_call, signals
from flask_runonce.call import CanceledCall
from flask_runonce.stores import Store
from tests.chaos.book import Book
from tests.chaos.client import CHAT

GATE_LIMIT = 30
"""Seconds after which a run does not wait for its gate any more."""


def create_app(config: Mapping[str, Any] | None = None, *, store: Store | None = None) -> Flask:
    """The app, set up by `CHAOS_…` variables of the environment (`CHAOS_RUNONCE_LEASE=2`) and by `config`.

    `BOOK` is the folder of the book: its pages are `effects`, `stopped`, `hooks` and `lost`.
    """
    app = Flask(__name__)
    app.config.from_prefixed_env("CHAOS")
    app.config.from_mapping(config or {})
    book = Book(Path(app.config["BOOK"]))
    runonce = RunOnce(app, store=store, guard=lambda environ: None)

    def work() -> tuple[Response, int]:
        call = current_call.key.tool_call_id
        token = secrets.token_hex(8)
        book.note("effects", call=call, token=token, attempt=request.headers.get("X-Attempt", ""))
        plan = request.get_json()
        if "gate" in plan:
            _wait_for(book.gate(plan["gate"], os.getpid()))
        stopped = current_call.wait_canceled(plan.get("seconds", 0))
        if stopped:
            book.note("stopped", call=call)
        if plan.get("fails"):
            raise RuntimeError("as planned")
        return jsonify(token=token, stopped=stopped, pid=os.getpid()), 201

    app.add_url_rule("/run", "run", runonce.once(work), methods=["POST"])
    app.add_url_rule("/rerun", "rerun", runonce.once(on_lost="rerun")(work), methods=["POST"])
    app.add_url_rule("/fork", "fork", fork, methods=["POST"])

    @runonce.on_cancel
    def hook(call: CanceledCall) -> None:
        book.note("hooks", call=call.key.tool_call_id, state=call.state)

    def lost(sender: Flask, key: Any, **facts: Any) -> None:
        book.note("lost", call=key.tool_call_id)

    signals.call_lost.connect(lost, app, weak=False)
    return app


def create_used_app() -> Flask:
    """The app, after a call has been sent to it: where it is made, connections are open and the keeper runs."""
    app = create_app()
    answer = send(app, "/run", f"import-{os.getpid()}")
    assert answer.status_code == 201, answer.text
    return app


def send(app: Flask, path: str, call: str, plan: Mapping[str, Any] | None = None) -> TestResponse:
    """Send a call to `app` without a server."""
    headers = {"Coder-Chat-Id": CHAT, "Coder-Tool-Call-Id": call}
    return app.test_client().post(path, json=plan or {}, headers=headers)


def fork() -> Response:
    """Fork, and send the call that the body names from both processes at once. Answers what each was answered."""
    order = request.get_json()
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(sink, json.dumps(_outcome(app, order)).encode())
        finally:
            os._exit(0)
    os.close(sink)
    with open(source, "rb") as pipe:
        here = _outcome(app, order)
        there = json.loads(pipe.read())
    os.waitpid(child, 0)
    return jsonify(parent=here, child=there)


def _outcome(app: Flask, order: Mapping[str, Any]) -> list[Any]:
    answer = send(app, "/run", order["call"], order["plan"])
    return [answer.status_code, answer.get_json()]


def _wait_for(gate: Path) -> None:
    deadline = time.monotonic() + GATE_LIMIT
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
