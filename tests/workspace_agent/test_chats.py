"""Who may see what: chats, malformed chat IDs, guards and scopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import redirect
from werkzeug.exceptions import Forbidden, Unauthorized

from examples.workspace_agent.replay import bearer

Agent = Any
Until = Callable[[Callable[[], object]], None]

NIL = "00000000-0000-0000-0000-000000000000"


def requests(process: str = "call-1") -> list[tuple[str, str, Any]]:
    """One of each route that stands for a process."""
    return [
        ("GET", f"/api/v0/processes/{process}/output", None),
        ("GET", f"/api/v0/processes/{process}/output?wait=true", None),
        ("POST", f"/api/v0/processes/{process}/signal", {"signal": "kill"}),
    ]


@pytest.mark.parametrize(("owner", "other"), [("chat-1", "chat-2"), (None, "chat-1"), ("chat-1", None)])
def test_a_chat_sees_and_reaches_its_own_only(agent: Agent, owner: str | None, other: str | None) -> None:
    agent.start("sleep 60", chat=owner)
    for method, path, body in requests():
        answer = agent.send(method, path, chat=other, body=body, status=404)
        assert answer.json == {"message": 'Process "call-1" not found.'}
    assert agent.list(chat=other).json["processes"] == []
    if other is not None:
        assert agent.cancel(chat=other).json["received"] is False
    assert agent.output(chat=owner).json["running"] is True
    assert agent.list(chat=owner).json["total"] == 1


def test_two_chats_with_one_id_have_two_processes(agent: Agent) -> None:
    for chat in ("chat-1", "chat-2"):
        assert agent.start('echo "$CODER_CHAT_ID"', chat=chat).json == {"id": "call-1", "started": True}
    assert [agent.ended(chat=chat)["output"] for chat in ("chat-1", "chat-2")] == ["chat-1\n", "chat-2\n"]


def test_a_chat_is_one_in_any_spelling(agent: Agent) -> None:
    upper = "11111111-AAAA-1111-1111-111111111111"
    agent.start('echo "$CODER_CHAT_ID"', chat=upper)
    assert agent.ended(chat=upper.lower().replace("-", ""))["output"] == f"{upper.lower()}\n"


@pytest.mark.parametrize("chat", ["", " ", "a,b", "a b", "é", NIL, "x" * 256])
@pytest.mark.parametrize("call", [None, "call-1"])
def test_a_malformed_chat_id_is_refused_and_lands_nowhere(agent: Agent, chat: str, call: str | None) -> None:
    sent = chat.encode().decode("latin-1")
    start = {"command": "sleep 60"}
    refused = [
        ("POST", "/api/v0/processes/start", start),
        ("GET", "/api/v0/processes/list", None),
        *requests(),
        ("POST", "/api/v0/edit-files", {"files": []}),
        ("POST", "/api/v0/write-file?path=/x", b"x"),
    ]
    agent.start("sleep 60", chat=None)
    for method, path, body in refused:
        answer = agent.send(method, path, chat=sent, call=call, body=body, status=400)
        assert answer.json["code"] == "invalid_key" and answer.json["message"] and answer.json["detail"]
    assert len(agent.running.processes) == 1
    assert agent.output(chat=None).json["running"] is True


@pytest.mark.parametrize("chat", [None, "chat-1"])
def test_a_malformed_tool_call_id_starts_nothing(agent: Agent, chat: str | None) -> None:
    agent.start("true", "a,b", chat=chat, status=400)
    assert len(agent.running.processes) == 0


def everything() -> list[tuple[str, str]]:
    return [
        ("POST", "/api/v0/processes/start"),
        ("GET", "/api/v0/processes/list"),
        ("GET", "/api/v0/processes/call-1/output"),
        ("POST", "/api/v0/processes/call-1/signal"),
        ("POST", "/api/v0/edit-files"),
        ("POST", "/api/v0/write-file?path=/x"),
        ("POST", "/api/v0/tool-calls/call-1/cancel"),
        ("GET", "/api/v0/tool-calls"),
        ("GET", "/api/v0/tool-calls/call-1"),
    ]


def test_a_guard_stands_before_every_route(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(guard=bearer("secret"))
    let_in = {"Authorization": "Bearer secret"}
    agent.start("sleep 60", headers=let_in)
    for method, path in everything():
        agent.send(method, path, call="call-1", status=401)
        agent.send(method, path, call="call-1", status=401, headers={"Authorization": "Bearer sesame"})
    assert agent.output(headers=let_in).json["running"] is True
    assert agent.cancel(headers=let_in).json["received"] is True


def test_a_guards_refusal_is_json(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(guard=bearer("secret"))
    answer = agent.list(status=401)
    assert answer.content_type == "application/json" and answer.json["message"]


def test_a_guard_may_answer_in_its_own_way(make_agent: Callable[..., Agent]) -> None:
    def to_login(environ: Any) -> None:
        raise Unauthorized(response=redirect("/login"))

    answer = make_agent(guard=to_login).list(status=302)
    assert answer.location.endswith("/login")


def test_a_scope_keeps_tenants_apart(make_agent: Callable[..., Agent]) -> None:
    def tenant(environ: Any) -> str | None:
        if environ.get("HTTP_TENANT") == "stranger":
            raise Forbidden
        found: str | None = environ.get("HTTP_TENANT")
        return found

    agent = make_agent(scope=tenant)
    one, two = {"Tenant": "one"}, {"Tenant": "two"}
    agent.start("echo one; sleep 60", headers=one)
    assert agent.start("echo two; sleep 60", headers=two).json["started"] is True
    assert agent.output(headers=one).json["command"] == "echo one; sleep 60"
    agent.output(status=404)
    agent.cancel(headers=two)
    assert agent.output(headers=two).json["canceled"] is True
    assert agent.output(headers=one).json["running"] is True
    assert agent.list(headers=one).json["total"] == 1
    for method, path in everything():
        agent.send(method, path, call="call-1", status=403, headers={"Tenant": "stranger"})


def test_a_scope_that_fails_lets_nothing_run(make_agent: Callable[..., Agent]) -> None:
    def broken(environ: Any) -> str:
        raise RuntimeError("no directory server")

    agent = make_agent(scope=broken)
    for call in (None, "call-1"):
        agent.start("sleep 60", call, status=500)
    assert len(agent.running.processes) == 0


@pytest.mark.parametrize(("method", "path", "status"), [("PUT", "processes/start", 405), ("GET", "nothing", 404)])
def test_what_is_not_there_is_said_in_json(agent: Agent, method: str, path: str, status: int) -> None:
    assert agent.send(method, f"/api/v0/{path}", status=status).json["message"]


def test_other_header_names(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(config={"RUNONCE_CHAT_ID_HEADER": "X-Chat", "RUNONCE_TOOL_CALL_ID_HEADER": "X-Call"})
    headers = {"X-Chat": "c", "X-Call": "one"}
    assert agent.start('echo "$CODER_CHAT_ID"', None, chat=None, headers=headers).json["id"] == "one"
    assert agent.ended("one", chat=None, headers=headers)["output"] == "c\n"
    agent.output("one", status=404)
