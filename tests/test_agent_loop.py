"""`examples/agent_loop`: killed at any moment and started again, it runs nothing twice and loses no result."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.agent_loop import demo
from examples.agent_loop.demo import RECORDINGS, answered, serving
from examples.agent_loop.formats import FORMATS, Message, ToolCall
from examples.agent_loop.loop import RESEND_WITHIN, Loop, RecordedModel, Tools, conversation
from examples.agent_loop.transcript import Transcript
from examples.workspace_agent import create_app
from examples.workspace_agent.client import NO_RESULT, WorkspaceClient
from flask_runonce import RunOnce
from flask_runonce.client import tool_call_id
from tests.services import LIMIT, until

CHAT = "11111111-1111-1111-1111-111111111111"
ROOT = Path(__file__).parent.parent
DONE = {"role": "assistant", "content": "Done."}

# The demo


def test_the_demo_finds_every_count_right(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("examples.agent_loop", run_name="__main__")
    assert not ended.value.code
    printed = capfd.readouterr().out
    assert "nothing ran twice, and the transcripts are complete" in printed
    assert printed.count("the loop ends with                             -9") == 2


def test_the_demo_finds_what_ran_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(RunOnce, "once", lambda self, view: view)
    assert demo.main() == 1
    assert "edits made                                     2  WRONG, expected 1" in capsys.readouterr().out


def test_the_demo_finds_a_transcript_with_gaps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.Demo, "_start_again", lambda self, url: None)
    assert demo.main() == 1
    assert "is not complete: KeyError(2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, DONE],
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, DONE],
        [{"role": "tool", "tool_call_id": "a", "content": "{}"}],
        [
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}, {"id": "b"}]},
            {"role": "tool", "tool_call_id": "b", "content": "{}"},
            {"role": "tool", "tool_call_id": "a", "content": "{}"},
        ],
    ],
)
def test_the_demo_takes_no_conversation_that_a_provider_refuses(messages: list[Message]) -> None:
    with pytest.raises(ValueError, match="without a result|nobody waits for"):
        answered(messages)


# Killed for real

DIES = """
import os, signal
from examples.agent_loop import loop
from examples.agent_loop.transcript import Transcript

write = Transcript._write

def write_and_die(transcript, line):
    write(transcript, line)
    os.kill(os.getpid(), signal.SIGKILL)

Transcript._write = write_and_die
loop.main()
"""


def test_a_loop_that_is_killed_after_each_line_it_writes(agent: Any, root: Path, tmp_path: Path) -> None:
    (root / "inputs").touch()
    transcript = tmp_path / "transcript"
    recording = RECORDINGS / "openai.json"
    recorded = json.loads(recording.read_text())
    deaths = 0
    with serving(agent) as url:
        command = [sys.executable, "-c", DIES, str(recording), str(transcript), "--agent", url, "--root", str(root)]
        while (code := subprocess.run(command, cwd=ROOT, timeout=LIMIT, stdout=subprocess.DEVNULL).returncode) != 0:
            deaths += 1
            assert code == -9
            assert deaths <= 12, "each life adds a line"
    assert deaths >= 8  # the lines, but for results that two threads write at the same time
    assert Counter((root / "effects").read_text().split()) == dict.fromkeys(
        ["building", "built", "installed", "linted"], 1
    )
    assert (root / "settings.ini").read_text() == "[build]\njobs = 2\ntarget = release\n"
    with Transcript(transcript) as ended:
        messages = conversation(ended, FORMATS["openai"])
    assert [message for message in messages if message["role"] != "tool"] == recorded["messages"]
    results = answered(messages)
    assert [result["success"] for result in results] == [True] * 7


# In this process


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


@pytest.fixture
def agent(root: Path) -> Iterator[Any]:
    app = create_app(root)
    with closing(app.extensions["workspace_agent"]):
        yield app


@pytest.fixture
def sent() -> list[tuple[str, str | None]]:
    """The last part of the path, and the tool call ID, of each request to the agent."""
    return []


@pytest.fixture
def tools(agent: Any, root: Path, sent: list[tuple[str, str | None]]) -> Iterator[Tools]:
    def note(request: httpx.Request) -> None:
        sent.append((request.url.path.rpartition("/")[2], request.headers.get("Coder-Tool-Call-Id")))

    transport = httpx.WSGITransport(agent)
    with WorkspaceClient("http://agent", CHAT, transport=transport, event_hooks={"request": [note]}) as client:
        yield Tools(client, str(root))


def asks(*calls: tuple[str, str, Any]) -> Message:
    """The model's message with calls (provider ID, name, arguments)."""
    tool_calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for id, name, arguments in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def runs(command: str) -> tuple[str, dict[str, str]]:
    return "execute", {"command": command}


@pytest.fixture
def play(tools: Tools, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`play(replies)` runs the loop on the transcript as it stands, and gives the results that are in it then."""

    def play(*replies: Message) -> list[dict[str, Any]]:
        with Transcript(tmp_path / "transcript") as transcript:
            if not transcript.entries:
                transcript.add_message({"role": "user", "content": "Go on."})
            form = FORMATS["openai"]
            Loop(CHAT, transcript, form=form, model=RecordedModel([*replies, DONE]), tools=tools).run()
            return answered(conversation(transcript, form))

    return play


def crashed(tmp_path: Path, *messages: Message, ago: float = 0) -> None:
    """A transcript that a loop has left, which died when its last message was written."""
    lines = [{"id": n, "at": time.time() - ago, "message": message} for n, message in enumerate(messages, 1)]
    (tmp_path / "transcript").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_the_ids_are_made_from_message_and_call(
    play: Callable[..., Any], root: Path, sent: list[tuple[str, str | None]]
) -> None:
    """A provider that uses an ID again in the next message means another call."""
    play(asks(("call_1", *runs("echo x >> effects"))), asks(("call_1", *runs("echo x >> effects"))))
    assert (root / "effects").read_text() == "x\nx\n"
    assert [id for route, id in sent if route == "start"] == [
        tool_call_id(CHAT, 2, "call_1"),
        tool_call_id(CHAT, 3, "call_1"),
    ]
    assert {id for route, id in sent if route != "start"} == {None}


def test_a_resumed_loop_sends_the_same_ids(
    play: Callable[..., Any], tools: Tools, root: Path, sent: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    message = asks(
        ("call_1", *runs("echo x >> effects; echo out")), ("call_2", "write_file", {"path": "a", "content": ""})
    )
    tools.run(FORMATS["openai"].calls(message)[0], tool_call_id(CHAT, 2, "call_1"))
    crashed(tmp_path, {"role": "user", "content": "Go on."}, message)
    first, second = play(message)
    assert (first["output"], second["success"]) == ("out\n", True)
    assert (root / "effects").read_text() == "x\n"
    assert Counter(id for _, id in sent if id) == {
        tool_call_id(CHAT, 2, "call_1"): 2,
        tool_call_id(CHAT, 2, "call_2"): 1,
    }


def test_only_calls_without_a_result_are_sent_again(
    play: Callable[..., Any], sent: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    message = asks(("call_1", *runs("true")), ("call_2", *runs("true")))
    crashed(tmp_path, {"role": "user", "content": "Go on."}, message)
    with Transcript(tmp_path / "transcript") as transcript:
        transcript.add_result(transcript.entries[1], 1, {"success": True, "output": "noted"})
    results = play(message)
    assert results[1] == {"success": True, "output": "noted"}
    assert [id for route, id in sent if route == "start"] == [tool_call_id(CHAT, 2, "call_1")]


def test_calls_that_cannot_be_told_apart_are_sent_once_without_an_id(
    play: Callable[..., Any], root: Path, sent: list[tuple[str, str | None]]
) -> None:
    append = runs("echo x >> effects")
    results = play(asks(("", *append), ("twice", *append), ("twice", *append)))
    assert [result["success"] for result in results] == [True] * 3
    assert (root / "effects").read_text() == "x\n" * 3
    assert {id for _, id in sent} == {None}


def test_after_a_crash_they_are_not_sent_again(
    play: Callable[..., Any], root: Path, sent: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    append = runs("echo x >> effects")
    message = asks(("", *append), ("twice", *append), ("twice", *append), ("named", *append))
    crashed(tmp_path, {"role": "user", "content": "Go on."}, message)
    results = play(message)
    assert results[:3] == [{"success": False, "error": NO_RESULT}] * 3
    assert results[3]["success"] is True
    assert (root / "effects").read_text() == "x\n"


def test_what_is_as_old_as_the_agents_memory_is_canceled_instead(
    play: Callable[..., Any], tools: Tools, root: Path, sent: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    message = asks(
        ("ran", *runs("echo x >> effects; echo out")),
        ("lost", *runs("echo x >> effects")),
        ("read", "read_output", {"process_id": "nobody"}),
    )
    tools.run(FORMATS["openai"].calls(message)[0], tool_call_id(CHAT, 2, "ran"))
    sent.clear()
    crashed(tmp_path, {"role": "user", "content": "Go on."}, message, ago=RESEND_WITHIN + 60)
    results = play(message)
    assert results[:2] == [
        {"success": True, "output": "out\n", "exit_code": 0},
        {"success": False, "error": NO_RESULT},  # the agent is younger than the call, so it cannot vouch
    ]
    assert results[2]["error"] == 'Process "nobody" not found.'
    assert (root / "effects").read_text() == "x\n"
    assert {route for route, _ in sent} == {"cancel", "output"}


def test_a_conversation_that_has_ended_is_left_alone(
    play: Callable[..., Any], sent: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    play(asks(("call_1", *runs("true"))))
    before = (tmp_path / "transcript").read_bytes()
    sent.clear()
    play(asks(("call_1", *runs("true"))))
    assert (tmp_path / "transcript").read_bytes() == before
    assert sent == []


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("fly", {}, 'There is no tool "fly" that takes these arguments.'),
        ("execute", {"cmd": "true"}, 'There is no tool "execute" that takes these arguments.'),
        ("execute", ["true"], 'There is no tool "execute" that takes these arguments.'),
        ("execute", {"command": ["true"]}, "The tool failed: TypeError"),
        ("edit_files", {"files": ["a"]}, "The tool failed: TypeError"),
        ("write_file", {"path": "a", "content": "\ud800"}, "The tool failed: UnicodeEncodeError"),
        ("edit_files", {"files": [{"path": "a", "edits": 1}]}, "Request body must be valid JSON."),
    ],
)
def test_a_call_that_makes_no_sense_is_the_models_to_mend(
    play: Callable[..., Any], name: str, arguments: Any, error: str
) -> None:
    wrong, right = play(asks(("call_1", name, arguments), ("call_2", *runs("echo out"))))
    assert wrong["success"] is False
    assert wrong["error"].startswith(error)
    assert right["output"] == "out\n"


def test_a_command_that_goes_on_is_read_later(play: Callable[..., Any], tools: Tools, root: Path) -> None:
    process = tool_call_id(CHAT, 2, "call_1")
    command = "echo working; until [ -e go ]; do sleep 0.02; done; echo done"

    def has_ended() -> bool:
        (root / "go").touch()
        return "note" not in tools.client.read_output(process)

    (started,) = play(asks(("call_1", "execute", {"command": command, "background": True})))
    assert started["background_process_id"] == process
    until(has_ended, "the command ends")
    read = ToolCall("call_1", "read_output", {"process_id": process})
    assert tools.run(read, None) == {"success": True, "output": "working\ndone\n", "exit_code": 0}


# The formats and the file


def test_calls_and_results_in_the_messages_of_openai() -> None:
    form = FORMATS["openai"]
    message = asks(("a", "execute", {"command": "true"}), ("b", "execute", [1]))
    message["tool_calls"][1]["function"]["arguments"] = '{"command": '
    calls = form.calls(message)
    assert calls == [ToolCall("a", "execute", {"command": "true"}), ToolCall("b", "execute", None)]
    assert form.results(calls, [{"success": True}, {"success": False}]) == [
        {"role": "tool", "tool_call_id": "a", "content": '{"success": true}'},
        {"role": "tool", "tool_call_id": "b", "content": '{"success": false}'},
    ]
    assert form.calls(DONE) == form.calls({"role": "user", "content": "Go on."}) == []


def test_calls_and_results_in_the_messages_of_anthropic() -> None:
    form = FORMATS["anthropic"]
    use = {"type": "tool_use", "id": "a", "name": "execute", "input": {"command": "true"}}
    calls = form.calls({"role": "assistant", "content": [{"type": "text", "text": "So."}, use, {**use, "id": "b"}]})
    assert calls == [ToolCall(id, "execute", {"command": "true"}) for id in "ab"]
    assert form.results(calls, [{"success": True}, {"success": False}]) == [
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": '{"success": true}', "is_error": False},
                {"type": "tool_result", "tool_use_id": "b", "content": '{"success": false}', "is_error": True},
            ],
        }
    ]
    assert form.calls(DONE) == form.calls({"role": "user", "content": "Go on."}) == []


def test_half_a_line_is_as_if_it_had_not_been_written(tmp_path: Path) -> None:
    path = tmp_path / "transcript"
    with Transcript(path) as transcript:
        transcript.add_message({"role": "user", "content": "Go on."})
        transcript.add_message(asks(("a", *runs("true")), ("b", *runs("true"))))
        transcript.add_result(transcript.entries[1], 1, {"success": True})
        assert not any(entry.resumed for entry in transcript.entries)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"result_of": 2, "positi')
    with Transcript(path) as transcript:
        assert transcript.entries[1].results == {1: {"success": True}}
        assert all(entry.resumed for entry in transcript.entries)
        transcript.add_result(transcript.entries[1], 0, {"success": False})
        transcript.add_message(DONE)
        assert not transcript.entries[2].resumed
    with Transcript(path) as transcript:
        assert transcript.entries[1].results == {1: {"success": True}, 0: {"success": False}}
        assert [entry.id for entry in transcript.entries] == [1, 2, 3]
        assert transcript.entries[2].message == DONE


def test_a_line_is_on_the_disk_before_anything_depends_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "transcript"
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(path.read_bytes()))
    with Transcript(path) as transcript:
        transcript.add_message(DONE)
        assert len(synced) == 1
        assert json.loads(synced[0])["message"] == DONE
