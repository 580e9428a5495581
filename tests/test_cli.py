"""`flask runonce`: what a person sees of a shared store, and what they may decide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask import Flask, abort, current_app
from webtest import TestApp

from flask_runonce import CallKey, RunOnce
from flask_runonce.errors import StoreUnavailable, UnreadableRecord
from flask_runonce.record import Record, Seen, State
from flask_runonce.stores import MemoryStore, Page, Swapped

UUID = "0af4d6d3-691c-45dd-ac54-55ea97970ebc"


class SharedStore(MemoryStore):
    """Stands for a store of several processes. The owner of a run named in `lost` has been killed."""

    shared = True

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()
        self.error: Exception | None = None

    def read(self, key: CallKey) -> Seen:
        if self.error:
            raise self.error
        return self._aged(super().read(key))

    def swap(self, key: CallKey, seen: str, new: Record | None, *, if_lost: bool = False, **options: Any) -> Swapped:
        swapped = super().swap(key, seen, new, **options)
        return swapped._replace(seen=self._aged(swapped.seen))

    def list(self, **options: Any) -> Page:
        if self.error:
            raise self.error
        page = super().list(**options)
        return page._replace(rows=[self._aged(seen) for seen in page.rows])

    def _aged(self, seen: Seen) -> Seen:
        if seen.record is None or seen.record.state is not State.RUNNING:
            return seen
        alive = seen.record.key.tool_call_id not in self.lost
        return seen._replace(lease_until=seen.now + (30 if alive else -1))


class Service:
    def __init__(self, store: Any, **config: Any) -> None:
        self.app = Flask("service")
        self.app.config.update(config)
        self.runonce = RunOnce(self.app, store=store, scope=lambda environ: environ.get("HTTP_X_USER"))
        self.app.add_url_rule("/", "view", self.runonce.once(lambda: "text"), methods=["POST"])
        self.app.add_url_rule("/missing", "missing", self.runonce.once(lambda: abort(404)), methods=["POST"])
        self.store = store

    def post(self, tool_call_id: str, chat_id: str = "chat", path: str = "/", user: str = "", **options: Any) -> Any:
        headers = {"Coder-Chat-Id": chat_id, "Coder-Tool-Call-Id": tool_call_id}
        if user:
            headers["X-User"] = user
        return TestApp(self.app).post(path, headers=headers, **options)

    def start(self, tool_call_id: str, *, lost: bool = False) -> None:
        """A run that goes on in another process, or whose owner was killed."""
        key = CallKey("", "chat", tool_call_id)
        self.store.swap(key, "", Record(key, State.RUNNING, "run", "other:1"), forget_after=60, lease=30)
        if lost:
            self.store.lost.add(tool_call_id)

    def run(self, *arguments: str, code: int = 0) -> Result:
        result: Result = self.app.test_cli_runner().invoke(args=["runonce", *arguments])
        assert result.exit_code == code, (result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), "a traceback is no message"
        return result

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").output)

    def listed(self, *arguments: str) -> list[str]:
        return [call["id"] for call in self.json("list", *arguments)["tool_calls"]]


@pytest.fixture
def service() -> Service:
    return Service(SharedStore(), RUNONCE_CANCEL_TIMEOUT=0)


@pytest.fixture
def calls(service: Service) -> Service:
    """Five calls: done, repeated, failed, of another user's chat, and canceled before it came."""
    service.post("done")
    service.post("repeated")
    service.post("repeated")
    service.post("missing", path="/missing", status=404)
    service.post("scoped", chat_id=UUID, user="ada")
    service.run("cancel", "--chat", "chat", "canceled")
    return service


# list


def test_an_empty_store_has_nothing_to_list(service: Service) -> None:
    assert service.json("list") == {"tool_calls": [], "total": 0}
    assert "0 of 0 calls" in service.run("list").output


def test_all_calls_are_listed_newest_first(calls: Service) -> None:
    assert calls.listed() == ["canceled", "scoped", "missing", "repeated", "done"]
    header, *lines, last = calls.run("list").output.splitlines()
    assert header.split()[:4] == ["scope", "chat_id", "id", "state"]
    assert len(lines) == 5 and last == "5 of 5 calls"
    for word in ("ada", UUID, "repeated", "404", "canceled"):
        assert word in "".join(lines)


def test_the_list_may_be_of_a_scope_or_a_chat(calls: Service) -> None:
    assert calls.listed("--scope", "ada") == ["scoped"]
    assert calls.listed("--scope", "") == ["canceled", "missing", "repeated", "done"]
    assert calls.listed("--chat", UUID) == ["scoped"]
    assert calls.listed("--scope", "ada", "--chat", "chat") == []


@pytest.mark.parametrize("spelled", [UUID.upper(), f"{{{UUID}}}", f" {UUID} "])
def test_a_chat_may_be_spelled_in_any_way(calls: Service, spelled: str) -> None:
    assert calls.listed("--chat", spelled) == ["scoped"]
    assert calls.json("stats", "--chat", spelled)["total"] == 1


def test_the_list_may_be_shorter(calls: Service) -> None:
    assert calls.listed("--limit", "2") == ["canceled", "scoped"]
    assert calls.json("list", "--limit", "2")["total"] == 5
    assert "2 of 5 calls" in calls.run("list", "--limit", "2").output
    for senseless in ("0", "1000000000000000000000"):
        calls.run("list", "--limit", senseless, code=2)


def test_a_call_is_listed_with_its_facts(calls: Service) -> None:
    facts = {call["id"]: call for call in calls.json("list")["tool_calls"]}
    owner = facts["done"]["owner"]
    assert owner and all(facts[name]["owner"] == owner for name in ("repeated", "missing", "scoped"))
    wanted = ("scope", "chat_id", "state", "canceled", "status", "outcome", "repeats")
    assert {name: tuple(call[key] for key in wanted) for name, call in facts.items()} == {
        "done": ("", "chat", "done", False, 200, "response", 0),
        "repeated": ("", "chat", "done", False, 200, "response", 1),
        "missing": ("", "chat", "done", False, 404, "response", 0),
        "scoped": ("ada", UUID, "done", False, 200, "response", 0),
        "canceled": ("", "chat", "canceled", True, None, None, 0),
    }


def test_a_call_whose_outcome_nobody_knows_shows_as_such(service: Service) -> None:
    service.start("killed", lost=True)
    service.post("killed", status=500)
    assert service.json("list")["tool_calls"][0]["outcome"] == "unknown"
    assert "unknown" in service.run("show", "--chat", "chat", "killed").output


def test_a_run_whose_owner_was_killed_shows_as_lost(service: Service) -> None:
    service.start("alive")
    service.start("killed", lost=True)
    assert {call["id"]: call["state"] for call in service.json("list")["tool_calls"]} == {
        "alive": "running",
        "killed": "lost",
    }
    assert service.json("show", "--chat", "chat", "killed")["state"] == "lost"


# show


def test_one_call_is_shown(calls: Service) -> None:
    shown = calls.json("show", "--scope", "ada", "--chat", UUID.upper(), "scoped")
    assert shown == calls.json("list", "--scope", "ada")["tool_calls"][0]
    text = calls.run("show", "--chat", "chat", "repeated").output
    lines = dict(line.split(maxsplit=1) for line in text.splitlines()[1:])
    assert (lines["id"], lines["state"], lines["status"], lines["repeats"]) == ("repeated", "done", "200", "1")
    assert lines["started_at"].endswith("Z")


def test_showing_does_not_count_as_a_repeat(calls: Service) -> None:
    for _ in range(2):
        assert calls.json("show", "--chat", "chat", "done")["repeats"] == 0


@pytest.mark.parametrize("command", ["show", "forget"])
def test_a_call_that_is_not_known_is_said_to_be_so(calls: Service, command: str) -> None:
    for arguments in ("--chat chat other", f"--chat {UUID} scoped", "--scope x --chat chat done"):
        assert "No record" in calls.run(command, *arguments.split(), code=1).output


@pytest.mark.parametrize("command", ["show", "cancel", "forget"])
@pytest.mark.parametrize("arguments", [["call"], ["--chat", "chat"], ["--chat", "a,b", "call"], ["--chat", "c", "é"]])
def test_wrong_usage_is_said_to_be_so(service: Service, command: str, arguments: list[str]) -> None:
    assert "Usage" in service.run(command, *arguments, code=2).output


@pytest.mark.parametrize("command", ["show", "cancel", "forget"])
@pytest.mark.parametrize("scope", ["x" * 256, "a\nb"])
def test_a_scope_that_cannot_be_is_wrong_usage(service: Service, command: str, scope: str) -> None:
    assert "scope" in service.run(command, "--scope", scope, "--chat", "chat", "call", code=2).output


@pytest.mark.parametrize("command", ["list", "stats"])
@pytest.mark.parametrize("scope", ["x" * 256, "a\nb"])
def test_a_scope_that_cannot_be_has_no_list(service: Service, command: str, scope: str) -> None:
    assert "A scope has" in service.run(command, "--scope", scope, code=2).output


@pytest.mark.parametrize("command", ["list", "stats"])
def test_a_chat_that_is_no_id_is_wrong_usage(service: Service, command: str) -> None:
    assert "chat ID" in service.run(command, "--chat", "a,b", code=2).output


def test_an_id_may_look_like_an_option(service: Service) -> None:
    service.post("--json")
    assert "--json" in service.run("show", "--chat", "chat", "--", "--json").output


# cancel


def test_a_call_is_canceled_as_by_the_route(calls: Service) -> None:
    assert "not received" in calls.run("cancel", "--chat", "chat", "future").output
    assert "done" in calls.run("cancel", "--chat", "chat", "done").output
    assert "done" in calls.run("cancel", "--chat", "chat", "done").output
    for name in ("future", "done"):
        assert calls.post(name, status=409).json["code"] == "canceled"
    assert calls.json("show", "--chat", "chat", "done")["canceled"] is True


def test_a_cancel_calls_the_hooks_inside_the_apps_context(service: Service) -> None:
    called = []
    service.runonce.on_cancel(lambda call: called.append((call.key, call.state, current_app.name)))
    service.post("call", user="ada")
    service.run("cancel", "--scope", "ada", "--chat", "chat", "call")
    assert called == [(CallKey("ada", "chat", "call"), "done", "service")]


def test_a_run_that_goes_on_is_marked_and_said_to_go_on(service: Service) -> None:
    service.start("alive")
    assert "still goes on" in service.run("cancel", "--chat", "chat", "alive", code=1).output
    assert service.json("show", "--chat", "chat", "alive")["canceled"] is True


def test_a_run_whose_owner_was_killed_is_canceled_with_an_unknown_outcome(service: Service) -> None:
    service.start("killed", lost=True)
    assert "running" in service.run("cancel", "--chat", "chat", "killed").output
    shown = service.json("show", "--chat", "chat", "killed")
    assert (shown["state"], shown["status"], shown["canceled"]) == ("done", 500, True)


def test_a_hook_that_raises_is_told_without_a_traceback(service: Service) -> None:
    @service.runonce.on_cancel
    def stop(call: Any) -> None:
        raise RuntimeError("cannot stop it")

    assert "hook" in service.run("cancel", "--chat", "chat", "call", code=1).output
    assert service.post("call", status=409).json["code"] == "canceled"


# forget


def test_a_forgotten_call_runs_again(service: Service) -> None:
    service.post("call")
    assert "Forgotten" in service.run("forget", "--chat", "chat", "call").output
    assert "Idempotent-Replayed" not in service.post("call").headers
    assert "Idempotent-Replayed" in service.post("call").headers


def test_a_run_whose_owner_is_alive_is_not_forgotten(service: Service) -> None:
    service.start("alive")
    assert "alive" in service.run("forget", "--chat", "chat", "alive", code=1).output
    assert service.listed() == ["alive"]


def test_a_call_with_an_unknown_outcome_may_be_forgotten_and_run_again(service: Service) -> None:
    service.start("killed", lost=True)
    assert service.post("killed", status=500).json["code"] == "outcome_unknown"
    service.run("forget", "--chat", "chat", "killed")
    assert service.post("killed").text == "text"


def test_a_lost_run_may_be_forgotten_and_run_again(service: Service) -> None:
    service.start("killed", lost=True)
    service.run("forget", "--chat", "chat", "killed")
    assert service.post("killed").text == "text"


# stats


def test_calls_are_counted_by_state(calls: Service) -> None:
    calls.start("alive")
    calls.start("killed", lost=True)
    assert calls.json("stats") == {"running": 1, "lost": 1, "done": 4, "canceled": 1, "total": 7}
    assert calls.json("stats", "--scope", "ada") == {"running": 0, "lost": 0, "done": 1, "canceled": 0, "total": 1}
    lines = [line.split() for line in calls.run("stats", "--chat", "chat").output.splitlines()]
    assert lines == [["running", "1"], ["lost", "1"], ["done", "3"], ["canceled", "1"], ["total", "6"]]


def test_every_call_is_counted_however_many_there_are(service: Service) -> None:
    for number in range(450):
        key = CallKey("", "chat", str(number))
        service.store.swap(key, "", Record(key, State.DONE), forget_after=60, lease=30)
    assert service.json("stats")["total"] == 450


# The store.

COMMANDS = [
    ["list"],
    ["stats"],
    ["show", "--chat", "chat", "call"],
    ["cancel", "--chat", "chat", "call"],
    ["forget", "--chat", "chat", "call"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_memory_store_has_nothing_to_see(command: list[str]) -> None:
    assert "memory store" in Service(MemoryStore()).run(*command, code=1).output


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("error", [StoreUnavailable("no route to it"), UnreadableRecord("no record of ours")])
def test_a_store_that_cannot_answer_is_told_and_has_its_own_exit_code(command: list[str], error: Exception) -> None:
    class Broken(SharedStore):
        def swap(self, *arguments: Any, **options: Any) -> Swapped:
            raise error

    service = Service(store := Broken())
    store.error = error
    assert str(error) in service.run(*command, code=3).output


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("sqlalchemy")
    yield f"sqlite:///{tmp_path / 'runonce.db'}"


def test_another_process_sees_and_decides_on_an_sql_store(url: str) -> None:
    server, shell = Service(url), Service(url)
    try:
        server.post("call")
        server.post("call")
        assert [(call["id"], call["repeats"]) for call in shell.json("list")["tool_calls"]] == [("call", 1)]
        assert shell.json("stats")["done"] == 1
        shell.run("cancel", "--chat", "chat", "call")
        assert server.post("call", status=409).json["code"] == "canceled"
        shell.run("forget", "--chat", "chat", "call")
        assert server.post("call").text == "text"
    finally:
        for service in (server, shell):
            service.app.extensions["runonce"].runner.store.close()


def test_the_commands_explain_themselves(service: Service) -> None:
    text = service.run("--help").output
    assert all(command[0] in text for command in COMMANDS)
    assert "RUNS again" in service.run("forget", "--help").output
