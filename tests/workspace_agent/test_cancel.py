"""A cancel before, during and after each of the three acting calls."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.workspace_agent import processes

Agent = Any
Until = Callable[[Callable[[], object]], None]
InThread = Callable[..., Any]

ACTS = ["start", "edit", "write"]


def act(agent: Agent, root: Path, kind: str, **options: Any) -> Any:
    """Each leaves "new" in the file, the process keeps on running then."""
    file = root / "file"
    if kind == "start":
        return agent.start("printf new > file; echo; sleep 60", **options)
    if kind == "edit":
        return agent.edit({"path": str(file), "edits": [{"old_text": "old", "new_text": "new"}]}, **options)
    return agent.write(file, b"new", **options)


@pytest.fixture(autouse=True)
def file(root: Path) -> Path:
    path = root / "file"
    path.write_text("old")
    return path


def saved(answer: Any) -> Any:
    return json.loads(base64.b64decode(answer.json["body"]))


@pytest.mark.parametrize("kind", ACTS)
def test_before(agent: Agent, root: Path, file: Path, kind: str) -> None:
    answer = agent.cancel().json
    assert answer["received"] is False and answer["state"] == "not_received"
    assert act(agent, root, kind, status=409).json["code"] == "canceled"
    assert file.read_text() == "old"
    agent.output(status=404)
    assert agent.cancel().json["received"] is False


@pytest.mark.parametrize("kind", ACTS)
def test_during(
    agent: Agent,
    root: Path,
    file: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
    in_thread: InThread,
) -> None:
    arrived, go = threading.Event(), threading.Event()
    stopped: Any = subprocess.Popen if kind == "start" else os.fsync

    def stop(*args: Any, **options: Any) -> Any:
        arrived.set()
        assert go.wait(20)
        return stopped(*args, **options)

    monkeypatch.setattr(*((subprocess, "Popen") if kind == "start" else (os, "fsync")), stop)
    running = in_thread(act, agent, root, kind)
    assert arrived.wait(20)
    canceling = in_thread(agent.cancel)
    until(lambda: agent.send("GET", "/api/v0/tool-calls/call-1").json["canceled"])
    go.set()
    answer = canceling.result()
    assert answer.json["received"] is True and answer.json["state"] == "running" and answer.json["status"] == 200
    assert saved(answer) == running.result().json
    assert act(agent, root, kind, status=409).json["code"] == "canceled"
    if kind == "start":
        facts = agent.output().json
        assert facts["running"] is False and facts["canceled"] is True and facts["exit_code"] == -9
    else:
        assert file.read_text() == "new"


@pytest.mark.parametrize("kind", ACTS)
def test_after(agent: Agent, root: Path, file: Path, kind: str, until: Until) -> None:
    first = act(agent, root, kind)
    if kind == "start":
        until(lambda: agent.output().json["output"])
    answer = agent.cancel()
    assert answer.json["received"] is True and answer.json["state"] == "done"
    assert saved(answer) == first.json
    assert act(agent, root, kind, status=409).json["code"] == "canceled"
    assert file.read_text() == "new"
    if kind == "start":
        facts = agent.output().json
        assert facts["running"] is False and facts["canceled"] is True and facts["output"] == "\n"
    assert agent.cancel().json == answer.json


def test_the_group_is_gone_when_the_cancel_answers(agent: Agent, until: Until) -> None:
    agent.start("(trap '' TERM; sleep 60) & echo $!; wait")
    until(lambda: agent.output().json["output"].endswith("\n"))
    grandchild = psutil.Process(int(agent.output().json["output"]))
    agent.cancel()
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_an_exited_process_is_left_alone(agent: Agent) -> None:
    agent.start("echo done; exit 3")
    facts = agent.ended()
    agent.cancel()
    assert agent.output().json == facts
    assert "canceled" not in facts


def test_a_failed_start_is_what_the_cancel_answers(agent: Agent, root: Path) -> None:
    agent.start("true", workdir=str(root / "nowhere"), status=500)
    answer = agent.cancel()
    assert answer.json["status"] == 500
    assert saved(answer)["message"] == "Failed to start process."


def test_a_kill_that_fails_is_not_called_a_cancel(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    agent.start("sleep 60")
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refuse)
        assert agent.cancel(status=500).json["code"] == "cancel_failed"
    facts = agent.output().json
    assert facts["running"] is True and "canceled" not in facts
    assert agent.start("sleep 60", status=409).json["code"] == "canceled"
    agent.cancel()
    assert agent.output().json["canceled"] is True


def test_a_cancel_that_gives_up_still_has_its_process_killed(
    make_agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch, in_thread: InThread, until: Until
) -> None:
    agent = make_agent(config={"RUNONCE_CANCEL_TIMEOUT": 0.05})
    arrived, go = threading.Event(), threading.Event()
    popen: Any = subprocess.Popen

    def stop(*args: Any, **options: Any) -> Any:
        arrived.set()
        assert go.wait(20)
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", stop)
    running = in_thread(agent.start, "sleep 60")
    assert arrived.wait(20)
    assert agent.cancel(status=202).json == {"received": True, "state": "running"}
    go.set()
    running.result()
    until(lambda: agent.output().json.get("canceled"))


def test_a_cancel_needs_a_chat(agent: Agent) -> None:
    agent.start("sleep 60", chat=None)
    assert agent.cancel(chat=None, status=400).json["code"] == "key_required"
    assert agent.output(chat=None).json["running"] is True


def test_a_cancel_that_carries_its_own_id_does_not_wait_for_itself(agent: Agent) -> None:
    agent.start("sleep 60")
    assert agent.cancel(call="call-1", headers={"Coder-Tool-Call-Id": "call-1"}).json["received"] is True
    assert agent.output().json["canceled"] is True


def test_the_cancel_of_one_chat_leaves_the_other_alone(agent: Agent) -> None:
    for chat in ("chat-1", "chat-2"):
        agent.start("sleep 60", chat=chat)
    agent.cancel(chat="chat-2")
    assert agent.output(chat="chat-1").json["running"] is True
    assert agent.output(chat="chat-2").json["canceled"] is True
    assert processes.Chat("", "chat-1") != processes.Chat("", "chat-2")
