"""The sample's README: its code runs and does what it says."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import waitress
from webtest import TestApp

import examples.workspace_agent as sample


def test_the_code_of_the_readme(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    readme = (Path(sample.__file__).parent / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    served: list[Any] = []
    create_app: Callable[..., Any] = sample.create_app
    monkeypatch.setenv("TOKEN_OF_ANNE", "a")
    monkeypatch.setenv("TOKEN_OF_BOB", "b")
    monkeypatch.setattr(sample, "create_app", lambda _, **options: create_app(root, **options))
    monkeypatch.setattr(waitress, "serve", lambda app, **_: served.append(app))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    exec("\n".join(blocks), {})
    (app,) = served
    try:
        agent = TestApp(app)
        anne, bob = ({"Authorization": f"Bearer {token}", "Coder-Chat-Id": "chat-1"} for token in "ab")
        call = {"Coder-Tool-Call-Id": "call-1"}
        agent.post_json("/api/v0/processes/start", {"command": "echo anne"}, headers=anne | call)
        output = "/api/v0/processes/call-1/output?wait=true"
        assert agent.get(output, headers=anne).json["output"] == "anne\n"
        agent.get(output, headers=bob, status=404)
        agent.get(output, headers={"Coder-Chat-Id": "chat-1"}, status=401)
        assert agent.post("/api/v0/tool-calls/call-1/cancel", headers=bob).json["received"] is False
        agent.post("/api/v0/tool-calls/call-1/cancel", headers={"Coder-Chat-Id": "chat-1"}, status=401)
    finally:
        app.extensions["workspace_agent"].close()
