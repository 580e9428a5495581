"""What the servers of the matrix serve: the incident's sample and, beside it, an app that writes down its runs."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flask import Flask, Response, jsonify, request
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from examples import incident
from flask_runonce import RunOnce, current_call
from tests.chaos.book import Book

GATE_LIMIT = 60
"""Seconds after which a run does not wait for its gate any more."""


def create_app() -> Flask:
    """The incident with a store in memory and, under /book, `create_book` with the store that the environment names."""
    app = incident.create_app()
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/book": create_book()})  # type: ignore[method-assign]
    return app


def create_book(config: Mapping[str, Any] | None = None) -> Flask:
    """The app that writes each run into the book in the folder `BOOK`. `SERVED_…` variables configure it."""
    app = Flask(__name__)
    app.config.from_prefixed_env("SERVED")
    app.config.from_mapping(config or {})
    runonce = RunOnce(app, guard=lambda environ: None)
    book = Book(Path(app.config["BOOK"]))

    @app.post("/run")
    @runonce.once
    def run() -> tuple[Response, int]:
        """Note the run, take the body, wait as the query says: `gate`, `fifo` (blocks the thread) or `seconds`."""
        call = current_call.key.tool_call_id if current_call else ""
        book.note("runs", call=call)
        size = len(request.get_data())
        plan = request.args
        if "gate" in plan:
            _wait_for(book.folder / plan["gate"])
        if "fifo" in plan:
            os.close(os.open(book.folder / plan["fifo"], os.O_RDONLY))
        time.sleep(float(plan.get("seconds", 0)))
        token = secrets.token_hex(8)
        return jsonify(call=call, token=token, bytes=size, padding="x" * int(plan.get("padding", 0))), 201

    return app


def create_used_book() -> Flask:
    """The same app after its first call: where it is made, connections are open and the leases' thread runs."""
    app = create_book()
    headers = {"Coder-Chat-Id": "making", "Coder-Tool-Call-Id": str(os.getpid())}
    assert app.test_client().post("/run", headers=headers).status_code == 201
    return app


def _wait_for(gate: Path) -> None:
    deadline = time.monotonic() + GATE_LIMIT
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
