"""The service of the incident: it starts commands, and was sent one start 36 times.

    flask --app examples.incident run

Commands are only pretended to run: a start is counted, then takes as many seconds as the request says.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

from flask import Flask, Response, jsonify, request

from flask_runonce import RunOnce, current_call

runonce = RunOnce()

MAX_SECONDS = 20


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """The service, with `config` over its defaults."""
    app = Flask(__name__)
    app.config["RUNONCE_MAX_WAITING"] = 64  # 36 attempts at once are the point of this sample
    app.config.from_mapping(config or {})
    runonce.init_app(app)

    numbers = itertools.count(1)
    starts: collections.Counter[str] = collections.Counter()

    @app.post("/commands")
    @runonce.once
    def start() -> tuple[Response, int]:
        """Start a command and wait for its end, or for its cancel."""
        order = request.get_json()
        command, seconds = str(order["command"]), min(float(order.get("seconds", 0)), MAX_SECONDS)
        starts[command] += 1
        number = next(numbers)
        stopped = bool(current_call) and current_call.wait_canceled(seconds)
        return jsonify(number=number, command=command, stopped=stopped), 201

    @app.post("/files")
    @runonce.once
    def upload() -> Response:
        """Take a file and say what arrived."""
        starts["upload"] += 1
        body = request.get_data()
        return jsonify(bytes=len(body), sha256=hashlib.sha256(body).hexdigest())

    @app.get("/starts")
    def count() -> Response:
        """How often each command was started: the judge of the demo."""
        return jsonify(starts)

    return app
