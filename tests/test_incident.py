"""`examples/incident` through WebTest: what the README promises about it."""

from __future__ import annotations

import pytest
from webtest import TestApp

from examples.incident import create_app, demo

CHAT = {"Coder-Chat-Id": "chat-1"}
CALL = {**CHAT, "Coder-Tool-Call-Id": "call-1"}
CANCEL = "/api/v0/tool-calls/call-1/cancel"


@pytest.fixture
def service() -> TestApp:
    return TestApp(create_app())


def test_a_call_starts_its_command_once(service: TestApp) -> None:
    first = service.post_json("/commands", {"command": "make"}, headers=CALL, status=201)
    again = service.post_json("/commands", {"command": "make"}, headers=CALL, status=201)
    assert again.body == first.body
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert service.get("/starts").json == {"make": 1}


def test_a_request_without_a_call_starts_each_time(service: TestApp) -> None:
    for _ in range(2):
        service.post_json("/commands", {"command": "make"}, status=201)
    assert service.get("/starts").json == {"make": 2}


def test_a_canceled_call_never_starts(service: TestApp) -> None:
    canceled = service.post(CANCEL, headers=CHAT)
    assert (canceled.json["received"], canceled.json["state"]) == (False, "not_received")
    late = service.post_json("/commands", {"command": "make"}, headers=CALL, status=409)
    assert late.json["detail"] == "The tool call was canceled."
    assert service.get("/starts").json == {}


def test_two_chats_have_two_calls(service: TestApp) -> None:
    for chat in ("chat-1", "chat-2"):
        service.post_json("/commands", {"command": "make"}, headers={**CALL, "Coder-Chat-Id": chat}, status=201)
    assert service.get("/starts").json == {"make": 2}


def test_a_large_upload_is_taken_once(service: TestApp) -> None:
    body = b"x" * (4 * 2**20)
    first = service.post("/files", body, headers=CALL)
    assert service.post("/files", body, headers=CALL).json == first.json
    assert service.get("/starts").json == {"upload": 1}


def test_the_demo_finds_every_count_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    assert "Every count is right." in capsys.readouterr().out


def test_the_demo_fails_when_calls_are_not_run_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flask_runonce.service.Service.admit", lambda *_: None)
    assert demo.main() == 1
    assert "WRONG: expected 1" in capsys.readouterr().out
