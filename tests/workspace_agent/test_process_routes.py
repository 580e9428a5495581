from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from examples.workspace_agent import processes
from examples.workspace_agent.output import HEAD_BYTES, TAIL_BYTES

Agent = Any
Offspring = Callable[[], list[psutil.Process]]
Until = Callable[[Callable[[], object]], None]
Gates = Callable[[str], Any]
InThread = Callable[..., Any]

# Start


def test_a_repeated_start_starts_once_and_answers_the_same(agent: Agent, root: Path) -> None:
    first = agent.start("echo x >> effects")
    assert first.json == {"id": "call-1", "started": True}
    again = agent.start("echo x >> effects")
    assert again.body == first.body
    assert again.headers["Idempotent-Replayed"] == "true"
    agent.ended()
    assert agent.start("echo x >> effects").body == first.body
    assert (root / "effects").read_text() == "x\n"
    assert agent.list().json["total"] == 1


def test_the_same_id_for_another_command_is_refused(agent: Agent) -> None:
    agent.start("true")
    assert agent.start("false", status=409).json["code"] == "input_mismatch"


def test_a_start_without_a_tool_call_id_gets_an_id_of_its_own(agent: Agent) -> None:
    ids = {agent.start("true", None).json["id"] for _ in range(2)}
    assert len(ids) == 2
    for process_id in ids:
        assert agent.ended(process_id)["exit_code"] == 0


def test_a_start_that_finds_its_process_says_so(agent: Agent, root: Path) -> None:
    """Without a chat ID nothing is a call, and still one ID has one process."""
    assert agent.start("echo x >> effects", chat=None).json == {"id": "call-1", "started": True}
    attached = agent.start("echo x >> effects", chat=None).json
    assert attached == {"id": "call-1", "started": False, "attached": True}
    agent.ended(chat=None)
    assert (root / "effects").read_text() == "x\n"


def test_the_timeout_counts_from_the_first_start(agent: Agent) -> None:
    agent.start("sleep 60", chat=None, timeout_ms=50)
    process = agent.running.processes.get(processes.Chat("", ""), "call-1")
    assert process.wait_until == pytest.approx(process.started_at + 0.05)
    assert agent.start("sleep 60", chat=None, timeout_ms=900_000).json["attached"]
    facts = agent.output(query="?wait=true&timeout_from_start_process=true", chat=None).json
    assert facts["running"] and facts["timed_out"]


def test_a_repeat_does_not_prolong_the_wait(agent: Agent) -> None:
    for _ in range(2):
        agent.start("sleep 60", timeout_ms=50)
        assert agent.output(query="?wait=true&timeout_from_start_process=true").json["timed_out"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "Request body must be valid JSON."),
        (b"{", "Request body must be valid JSON."),
        (b"\xff", "Request body must be valid JSON."),
        (b"[" * 100_000, "Request body must be valid JSON."),
        (b"[]", "Request body must be valid JSON."),
        (b'{"command": 1}', "Request body must be valid JSON."),
        (b'{"command": "true", "env": {"A": 1}}', "Request body must be valid JSON."),
        (b'{"command": "true", "timeout_ms": true}', "Request body must be valid JSON."),
        (b'{"command": "true", "timeout_ms": 1.5}', "Request body must be valid JSON."),
        (b"{}", "Command is required."),
        (b'{"command": "", "background": true, "timeout_ms": 1}', "Command is required."),
        (b'{"command": "true", "background": true, "timeout_ms": 1}', "Background processes cannot have timeout_ms."),
        (b'{"command": "true", "background": true, "timeout_ms": -1}', "Background processes cannot have timeout_ms."),
        (b'{"command": "true", "timeout_ms": -1}', "timeout_ms must be from 0 to 604800000."),
        (b'{"command": "true", "timeout_ms": 604800001}', "timeout_ms must be from 0 to 604800000."),
        (b'{"command": "true", "timeout_ms": 1' + b"0" * 400 + b"}", "timeout_ms must be from 0 to 604800000."),
        (b'{"command": "true", "workdir": "relative"}', '"relative" is not an absolute path.'),
    ],
)
def test_a_start_that_makes_no_sense(agent: Agent, body: bytes, message: str) -> None:
    answer = agent.send("POST", "/api/v0/processes/start", body=body, status=400)
    assert answer.content_type == "application/json"
    assert answer.json["message"] == message
    assert len(agent.running.processes) == 0


def test_nulls_are_fields_left_out(agent: Agent, root: Path) -> None:
    nothing = {"workdir": None, "env": {"A": None}, "background": None, "timeout_ms": None}
    agent.start("pwd; echo [$A]", **nothing)
    assert agent.ended()["output"] == f"{root}\n[]\n"


def test_a_background_start_may_have_a_timeout_of_nought(agent: Agent) -> None:
    agent.start("true", background=True, timeout_ms=0)
    assert agent.list().json["processes"][0]["background"] is True


def test_the_longest_timeout(agent: Agent) -> None:
    agent.start("true", timeout_ms=604_800_000)
    agent.output(query="?wait=true&timeout_from_start_process=true")
    assert "timed_out" not in agent.ended()


@pytest.mark.parametrize("fields", [{"workdir": "{root}/nowhere"}, {"env": {"A=B": "c"}}, {"env": {"A": "\ud800"}}])
def test_a_start_that_fails_is_the_answer_for_repeats_too(agent: Agent, root: Path, fields: dict[str, Any]) -> None:
    if "workdir" in fields:
        fields = {"workdir": fields["workdir"].format(root=root)}
    first = agent.start("true", status=500, **fields)
    assert first.json["message"] == "Failed to start process."
    assert first.json["detail"]
    again = agent.start("true", status=500, **fields)
    assert again.body == first.body and again.headers["Idempotent-Replayed"] == "true"
    agent.output(status=404)


def test_the_work_dir_is_kept_inside_the_root(agent: Agent, root: Path, tmp_path: Path) -> None:
    (root / "inside").mkdir()
    (root / "out").symlink_to(tmp_path)
    agent.start("pwd", workdir=str(root / "inside"))
    assert agent.ended()["output"] == f"{root}/inside\n"
    for number, outside in enumerate([tmp_path, root / "out", root / ".."]):
        agent.start("true", f"out-{number}", workdir=str(outside), status=403)
    assert agent.list().json["total"] == 1


def test_without_a_root_commands_start_at_home(
    make_agent: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    agent = make_agent(None)
    agent.start("pwd")
    assert agent.ended()["output"] == f"{tmp_path}\n"
    agent.start("pwd", "call-2", workdir="/")
    assert agent.ended("call-2")["output"] == "/\n"


def test_the_environment(agent: Agent) -> None:
    agent.start('echo "$A $CODER_CHAT_ID"', env={"A": "a", "CODER_CHAT_ID": "forged"})
    assert agent.ended()["output"] == "a chat-1\n"


def test_ids_are_one_in_any_spelling(agent: Agent) -> None:
    upper = "CA92E3E7-EE42-5889-B1DF-75869F9117EE"
    assert agent.start("true", upper).json["id"] == upper.lower()
    assert agent.ended(upper)["exit_code"] == 0
    assert agent.start("true", "{" + upper + "}").headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("call", ["a/b", "/a", "a//b", "a/output", "list", "start", "a?b#c%d"])
def test_an_id_may_hold_any_visible_character(agent: Agent, call: str) -> None:
    agent.start("sleep 60", call)
    path = quote(call)
    assert agent.output(path).json["running"]
    agent.signal("terminate", path)
    assert agent.ended(path)["exit_code"] == -15
    assert agent.cancel(path).json["received"] is True


# Output


def test_output(agent: Agent) -> None:
    agent.start("echo out; echo err >&2; exit 3")
    facts = agent.ended()
    assert facts == {
        "output": "out\nerr\n",
        "running": False,
        "exit_code": 3,
        "command": "echo out; echo err >&2; exit 3",
    }
    assert agent.output().json == facts


def test_a_snapshot_does_not_wait(agent: Agent, until: Until) -> None:
    agent.start("echo so far; sleep 60")
    until(lambda: agent.output().json["output"] == "so far\n")
    facts = agent.output().json
    assert facts["running"] is True and "exit_code" not in facts and "timed_out" not in facts


def test_two_who_wait_are_both_answered_at_the_exit(agent: Agent, gates: Gates, in_thread: InThread) -> None:
    gate = gates("go")
    agent.start(f"cat {gate.path}; echo end")
    waiting = [in_thread(agent.ended) for _ in range(2)]
    gate.open()
    assert [thread.result()["output"] for thread in waiting] == ["end\n", "end\n"]


def test_timed_out_is_still_said_after_the_exit(agent: Agent, gates: Gates) -> None:
    gate = gates("go")
    agent.start(f"cat {gate.path}", timeout_ms=20)
    assert agent.output(query="?wait=true&timeout_from_start_process=true").json["timed_out"] is True
    gate.open()
    assert agent.ended()["timed_out"] is True


def test_a_plain_wait_goes_on_past_the_wait_until_time(agent: Agent, gates: Gates, in_thread: InThread) -> None:
    gate = gates("go")
    agent.start(f"cat {gate.path}", timeout_ms=1)
    waiting = in_thread(agent.ended)
    agent.output(query="?wait=true&timeout_from_start_process=true")
    assert waiting.is_alive()
    gate.open()
    assert waiting.result()["exit_code"] == 0


def test_a_wait_is_answered_after_five_minutes(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.MAX_WAIT == 300
    monkeypatch.setattr(processes, "MAX_WAIT", 0.01)
    agent.start("sleep 60")
    facts = agent.output(query="?wait=true").json
    assert facts["running"] and "timed_out" not in facts


def test_big_output_keeps_its_head_and_its_tail(agent: Agent) -> None:
    agent.start("printf HEAD; head -c 1000000 /dev/zero | tr '\\0' x; printf TAIL")
    facts = agent.ended()
    omitted = 1_000_008 - HEAD_BYTES - TAIL_BYTES
    assert facts["truncated"] == {
        "original_bytes": 1_000_008,
        "retained_bytes": HEAD_BYTES + TAIL_BYTES,
        "omitted_bytes": omitted,
        "strategy": "head_tail",
    }
    head, marker, tail = facts["output"].split("\n")
    assert head.startswith("HEADx") and len(head) == HEAD_BYTES
    assert marker == f"... [omitted {omitted} bytes] ..."
    assert tail.endswith("xTAIL") and len(tail) == TAIL_BYTES


def test_a_cut_keeps_characters_whole(agent: Agent) -> None:
    agent.start("printf .; for i in $(seq 20000); do printf €; done")
    facts = agent.ended()
    assert "\ufffd" not in facts["output"]
    assert facts["truncated"]["original_bytes"] == 60_001


def test_binary_output(agent: Agent) -> None:
    agent.start("printf 'a\\000\\377\\376z'")
    assert agent.ended()["output"] == "a\0\ufffd\ufffdz"


def test_output_of_nothing_known(agent: Agent) -> None:
    assert agent.output("none", status=404).json == {"message": 'Process "none" not found.'}
    agent.output("a,b", status=404)


# Signal


def test_signal(agent: Agent, until: Until) -> None:
    agent.start("trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.1; done")
    until(lambda: agent.output().json["output"] == "up\n")
    assert agent.signal("terminate").json == {"message": 'Signal "terminate" sent to process "call-1".'}
    facts = agent.ended()
    assert facts["exit_code"] == 7 and facts["output"].endswith("bye\n")
    assert agent.signal("kill", status=409).json == {"message": 'Process "call-1" is not running.'}


def test_a_kill_by_signal_is_no_cancel(agent: Agent) -> None:
    agent.start("sleep 60")
    agent.signal("kill")
    facts = agent.ended()
    assert facts["exit_code"] == -9 and "canceled" not in facts


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"nonsense", "Request body must be valid JSON."),
        (b"{}", "Signal is required."),
        (b'{"signal": "stop"}', 'Unsupported signal "stop". Use "kill" or "terminate".'),
    ],
)
def test_a_signal_that_makes_no_sense(agent: Agent, body: bytes, message: str) -> None:
    answer = agent.send("POST", "/api/v0/processes/none/signal", body=body, status=400)
    assert answer.json["message"] == message


def test_a_signal_to_nothing_known(agent: Agent) -> None:
    assert agent.signal("kill", "none", status=404).json == {"message": 'Process "none" not found.'}


def test_a_signal_that_is_not_permitted(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    agent.start("sleep 60")
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refuse)
        assert "not permitted" in agent.signal("kill", status=500).json["detail"]


# List


def test_the_list_has_running_ones_first_newest_first(agent: Agent, root: Path) -> None:
    agent.start("sleep 60", "1")
    agent.start("exit 4", "2")
    agent.start("sleep 60", "3", background=True)
    agent.ended("2")
    listed = agent.list().json
    assert (listed["total"], listed["offset"], listed["has_more"]) == (3, 0, False)
    assert [process["id"] for process in listed["processes"]] == ["3", "1", "2"]
    newest, _, exited = listed["processes"]
    assert newest["running"] is True and newest["background"] is True and newest["workdir"] == str(root)
    assert "exit_code" not in newest and "exited_at_unix" not in newest
    assert exited["running"] is False and exited["exit_code"] == 4 and exited["command"] == "exit 4"
    assert exited["exited_at_unix"] >= exited["started_at_unix"]


def test_the_list_pages(agent: Agent) -> None:
    for number in range(12):
        agent.start("sleep 60", str(number))
    pages = [agent.list(f"?limit=5&offset={offset}").json for offset in (0, 5, 10, 15)]
    assert [[process["id"] for process in page["processes"]] for page in pages] == [
        ["11", "10", "9", "8", "7"],
        ["6", "5", "4", "3", "2"],
        ["1", "0"],
        [],
    ]
    assert [page["has_more"] for page in pages] == [True, True, False, False]
    assert len(agent.list().json["processes"]) == 12


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=201", "limit=x", "limit=", "limit=%C2%B2", "offset=-1", "offset=1e3", "offset=" + "9" * 5000],
)
def test_a_page_that_makes_no_sense(agent: Agent, query: str) -> None:
    assert query.split("=")[0] in agent.list(f"?{query}", status=400).json["message"]


def test_a_query_that_is_not_utf8(agent: Agent) -> None:
    assert agent.list("?limit=\xff", status=400).json["message"] == "The query is not UTF-8."


def test_an_exited_process_is_tidied_though_nobody_lists(
    agent: Agent, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "KEEP_EXITED", 0.05)
    agent.start("true")
    until(lambda: len(agent.running.processes) == 0)
    assert agent.list().json["total"] == 0
    agent.output(status=404)


# End


def test_closing_ends_everything(agent: Agent, until: Until, offspring: Offspring) -> None:
    agent.start("sleep 60 & echo $!; wait")
    until(lambda: agent.output().json["output"].endswith("\n"))
    grandchild = psutil.Process(int(agent.output().json["output"]))
    agent.running.close()
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
    assert not offspring()
    assert agent.start("true", "late", status=500).json["detail"] == "The agent is closed."


def test_a_thousand_quick_processes_leave_nothing_behind(agent: Agent, until: Until, offspring: Offspring) -> None:
    agent.start("true", "first")
    agent.ended("first")
    me = psutil.Process()
    until(lambda: not any(thread.name.startswith("watch") for thread in threading.enumerate()))
    threads, descriptors = threading.active_count(), me.num_fds()
    for number in range(1000):
        agent.start("echo x", str(number))
    for number in range(1000):
        assert agent.ended(str(number))["output"] == "x\n"
    until(lambda: threading.active_count() <= threads and me.num_fds() <= descriptors)
    assert not offspring()
