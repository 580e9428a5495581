"""The README's code runs, and does what the README says."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import flask
import pytest
from webtest import TestApp, TestResponse

from examples.incident import create_app
from flask_runonce import RunOnce

README = (Path(__file__).parent.parent / "README.md").read_text()
CALL = {"Coder-Chat-Id": "chat-1", "Coder-Tool-Call-Id": "call-1"}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def curl(app: TestApp, line: str, **changed: Any) -> TestResponse:
    """Send what a `curl` line of the README sends."""
    words = iter(shlex.split(line.removesuffix("&")))
    assert next(words) == "curl"
    method, path, headers, body = "GET", "", {}, b""
    for word in words:
        if word == "-X":
            method = next(words)
        elif word == "-H":
            name, value = next(words).split(": ")
            headers[name] = value
        elif word == "--json":
            data = {**json.loads(next(words)), **changed}
            method, body, headers["Content-Type"] = "POST", json.dumps(data).encode(), "application/json"
        elif word not in ("-i", "-s"):
            path = word.removeprefix("localhost:5000")
    return app.request(path, method=method, headers=headers, body=body, expect_errors=True)


@pytest.fixture
def flask_quick_start() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "quick_start"}
    exec(blocks("python")[0], namespace)
    return namespace


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert set(re.findall(r"^```(\w+)$", README, re.MULTILINE)) == {"python", "sh"}
    assert (len(blocks("python")), len(blocks("sh"))) == (5, 7)


def test_the_flask_quick_start_orders_once(
    flask_quick_start: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    app = TestApp(flask_quick_start["app"])
    order, cancel = (block for block in blocks("sh") if block.startswith("curl -i"))
    replies = [curl(app, order) for _ in range(3)]
    assert [reply.status_int for reply in replies] == [201] * 3
    assert replies[1].headers["Idempotent-Replayed"] == "true"
    assert capsys.readouterr().out.count("ordering") == 1
    assert curl(app, order, item="coffee").json["code"] == "input_mismatch"
    assert curl(app, cancel).json["state"] == "done"


def test_the_guard_and_the_hook_of_the_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "guarded"}
    exec(blocks("python")[1], namespace)
    app = namespace["app"]

    @app.get("/login")
    def login() -> str:
        flask.session["user"] = "ada"
        return ""

    client = TestApp(app)
    path = "/api/v0/tool-calls/call-1/cancel"
    client.post(path, headers={"Coder-Chat-Id": "chat-1"}, status=401)
    client.get("/login")
    client.post(path, headers={"Coder-Chat-Id": "chat-1"}, status=200)
    assert "stop what call-1 left running; it was not_received" in capsys.readouterr().out
    assert client.post("/long", headers=CALL, status=409).json["code"] == "canceled"


def test_the_wsgi_quick_start_orders_once() -> None:
    namespace: dict[str, Any] = {}
    exec(blocks("python")[2], namespace)
    app = TestApp(namespace["application"])
    replies = [app.post("/", headers=CALL, status=201) for _ in range(2)]
    assert [reply.body for reply in replies] == [b"ordered"] * 2
    assert replies[1].headers["Idempotent-Replayed"] == "true"


def test_the_line_for_the_store_is_one_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = flask.Flask("orders")
    exec(blocks("python")[3], {"app": app})
    assert f"| several workers on one machine | `{app.config['RUNONCE_STORE_URI']}` |" in README
    RunOnce(app, guard=lambda environ: None)
    store = app.extensions["runonce"].runner.store
    assert TestApp(app).get("/api/v0/tool-calls", headers=CALL).json["total"] == 0
    store.close()
    assert (tmp_path / "runonce.db").exists()


@pytest.mark.parametrize("decorated", [True, False])
def test_the_test_tells_a_view_that_runs_once(decorated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = types.ModuleType("orders")
    exec(blocks("python")[0].replace("@runonce.once", "@runonce.once" if decorated else "#"), orders.__dict__)
    monkeypatch.setitem(sys.modules, "orders", orders)
    namespace: dict[str, Any] = {}
    exec(blocks("python")[4], namespace)
    with contextlib.nullcontext() if decorated else pytest.raises(AssertionError, match="does not run once"):
        namespace["test_an_order_is_taken_once"]()


def test_the_lines_to_try_by_hand() -> None:
    app = TestApp(create_app())
    lines = [block for block in blocks("sh") if "/commands" in block][0].splitlines()
    first, repeat = (curl(app, line, seconds=0) for line in lines[:2])
    starts, cancel, refused, calls = (curl(app, line) for line in lines[2:])
    assert (first.status_int, repeat.body) == (201, first.body)
    assert starts.json == {"make": 1}
    assert cancel.json["state"] == "not_received"
    assert refused.json["code"] == "canceled"
    assert [call["id"] for call in calls.json["tool_calls"]] == ["2", "1"]
