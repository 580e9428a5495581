"""The workspace agent's client against the real agent on a real server: commands, files, and what an interrupt says."""

import logging
import os
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from urllib.parse import unquote

import pytest
from werkzeug.wrappers import Request, Response

from examples.workspace_agent import client as client_module
from examples.workspace_agent import create_app, processes
from examples.workspace_agent.client import CANCELED, NO_RESULT, WorkspaceClient
from flask_runonce.client.cancellation import NOT_RUN
from tests.services import until

from .app import LIMIT, serving
from .conftest import CHAT, QUICK

WAITING = "echo working; until [ -e go ]; do sleep 0.02; done; echo x >> effects; echo done"
"""A command that goes on when there is a file `go`."""

KINDS = ["execute", "edit", "write"]


@contextmanager
def agent_at(root, wrap=lambda app: app, **config):
    """An agent that works in `root`, and a client of it."""
    app = create_app(root, config)
    try:
        with serving(wrap(app)) as (host, port), WorkspaceClient(f"http://{host}:{port}", CHAT, retry=QUICK) as client:
            yield client
    finally:
        app.extensions["workspace_agent"].close()
        app.extensions["runonce"].runner.store.close()


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    (path / "file").write_text("old")
    return path


@pytest.fixture
def agent(root):
    """`agent(wrap=…, RUNONCE_…=…)` starts an agent and gives a client of it."""
    with ExitStack() as agents:
        yield lambda **options: agents.enter_context(agent_at(root, **options))


@pytest.fixture
def client(agent):
    return agent()


@pytest.fixture
def in_thread():
    """`in_thread(function, …)` gives a future. The threads end before the agent does."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


@pytest.fixture
def warnings(caplog):
    """The IDs of the calls that the clients have warned of."""
    loggers = {"flask_runonce.client", client_module.__name__}
    return lambda: [
        record.tool_call_id for record in caplog.records if record.name in loggers and record.levelno == logging.WARNING
    ]


@pytest.fixture
def pausing(monkeypatch):
    """`pausing(pause)` has the client call `pause(seconds)` instead of pausing."""

    def pausing(pause):
        clock = types.SimpleNamespace(monotonic=client_module.time.monotonic, sleep=pause)
        monkeypatch.setattr(client_module, "time", clock)

    return pausing


class Failing:
    """WSGI: answers requests in the agent's place, with 500, where `fails(request)`."""

    def __init__(self, app, fails):
        self.app, self.fails = app, fails

    def __call__(self, environ, start_response):
        if self.fails(Request(environ)):
            broken = Response('{"error": {"message": "the disk is full"}}', 500, mimetype="application/json")
            return broken(environ, start_response)
        return self.app(environ, start_response)


def failing(fails):
    return lambda app: Failing(app, fails)


def reads(request):
    return request.path.endswith("/output")


def waits(request):
    return "wait" in request.args


def act(client, root, kind, call="call-1"):
    """Each leaves "new" in the file."""
    file = str(root / "file")
    if kind == "execute":
        return client.execute("printf new > file; echo done", tool_call_id=call)
    if kind == "edit":
        edits = [{"old_text": "old", "new_text": "new"}]
        return client.edit_files([{"path": file, "edits": edits}], tool_call_id=call, include_diff=True)
    return client.write_file(file, b"new", tool_call_id=call)


def fail(client, root, kind, call="call-1"):
    """The same with an input that the agent refuses."""
    nowhere = str(root / "nowhere")
    if kind == "execute":
        return client.execute("true", workdir=nowhere, tool_call_id=call)
    if kind == "edit":
        return client.edit_files([{"path": nowhere, "edits": []}], tool_call_id=call)
    return client.write_file(str(root), b"new", tool_call_id=call)


def interrupted(client, call="call-1", **options):
    (result,) = client.interrupt([call], **options).values()
    return result


def works(client, call="call-1"):
    """Wait until the command has begun."""
    until(lambda: client.read_output(call).get("output") == "working\n", "the command begins")


def measured(result):
    """The result without its duration, which has to be there."""
    assert result.pop("wall_duration_ms") >= 0
    return result


# Commands


def test_a_command_in_the_foreground(client):
    result = client.execute("echo out; echo err >&2", tool_call_id="call-1")
    assert measured(result) == {"success": True, "output": "out\nerr\n", "exit_code": 0}


def test_a_command_that_fails(client):
    result = client.execute("echo sorry; exit 3", tool_call_id="call-1")
    assert measured(result) == {"success": False, "output": "sorry\n", "exit_code": 3}


def test_a_commands_folder_and_environment(client, root):
    (root / "sub").mkdir()
    options = {"workdir": str(root / "sub"), "env": {"GREETING": "hello"}}
    result = client.execute('echo "$GREETING from $(basename "$PWD") in $CODER_CHAT_ID"', tool_call_id=None, **options)
    assert result["output"] == f"hello from sub in {CHAT}\n"


def test_what_was_left_out_of_the_output_is_said(client):
    result = client.execute("head -c 40000 /dev/zero | tr '\\0' x", tool_call_id="call-1")
    assert "[omitted 7232 bytes]" in result["output"]
    assert result["truncated"] == {
        "original_bytes": 40000,
        "retained_bytes": 32768,
        "omitted_bytes": 7232,
        "strategy": "head_tail",
    }


def test_what_was_left_out_so_far_is_said_of_a_command_that_runs(client, root):
    client.execute(f"head -c 40000 /dev/zero; {WAITING}", tool_call_id="call-1", background=True)
    until(lambda: "working" in client.read_output("call-1")["output"], "the command writes")
    result = client.read_output("call-1")
    assert result["background_process_id"] == "call-1"
    assert result["truncated"]["original_bytes"] == 40008
    (root / "go").touch()


def test_a_command_that_cannot_be_started(client, root):
    result = fail(client, root, "execute")
    assert result.pop("error").startswith("Failed to start process. [Errno 2] No such file or directory")
    assert result == {"success": False, "output": "", "exit_code": -1}


def test_a_repeat_waits_for_the_same_process(client, root, in_thread):
    first = in_thread(client.execute, WAITING, tool_call_id="call-1")
    works(client)
    second = in_thread(client.execute, WAITING, tool_call_id="call-1")
    (root / "go").touch()
    results = [measured(future.result()) for future in (first, second)]
    assert results == [{"success": True, "output": "working\ndone\n", "exit_code": 0}] * 2
    assert (root / "effects").read_text() == "x\n"


def test_what_is_asked_and_that_only_what_acts_carries_the_calls_id(agent, root):
    sent = []

    def noting(app):
        def application(environ, start_response):
            request = Request(environ)
            sent.append((unquote(request.full_path).rstrip("?"), request.headers.get("Coder-Tool-Call-Id")))
            return app(environ, start_response)

        return application

    client = agent(wrap=noting)
    for kind in KINDS:
        act(client, root, kind, kind)
    client.interrupt(["execute"])
    assert sent == [
        ("/api/v0/processes/start", "execute"),
        ("/api/v0/processes/execute/output?wait=true&timeout_from_start_process=true", None),
        ("/api/v0/edit-files", "edit"),
        (f"/api/v0/write-file?path={root}/file", "write"),
        ("/api/v0/tool-calls/execute/cancel", None),
        ("/api/v0/processes/execute/output?wait=true&timeout_from_start_process=false", None),
    ]


@pytest.mark.parametrize("command", ["true &", "true &  \n", "true && sleep 60 &"])
def test_a_trailing_ampersand_means_background(client, command):
    result = client.execute(command, tool_call_id="call-1")
    assert "background" in result.pop("note")
    assert result == {"success": True, "output": "", "exit_code": 0, "background_process_id": "call-1"}
    assert client.interrupt(["call-1"])["call-1"]["output"] == ""


@pytest.mark.parametrize("command", ["echo a \\&", "sh -c 'exit 0 &'", "echo a; # &&"])
def test_other_ampersands_do_not(client, command):
    assert "background_process_id" not in client.execute(command, tool_call_id="call-1")


def test_a_command_in_the_background_is_read_later(client, root):
    result = client.execute(WAITING, tool_call_id="call-1", background=True)
    process = result["background_process_id"]
    works(client, process)
    assert client.read_output(process) == {
        "success": True,
        "output": "working\n",
        "exit_code": -1,
        "background_process_id": process,
        "note": "The command is still running.",
    }
    (root / "go").touch()
    until(lambda: "note" not in client.read_output(process), "the command ends")
    assert client.read_output(process) == {"success": True, "output": "working\ndone\n", "exit_code": 0}


def test_an_unknown_process_is_an_error_for_the_model(client):
    result = client.read_output("nobody")
    assert result == {"success": False, "output": "", "exit_code": -1, "error": 'Process "nobody" not found.'}


def test_a_time_out_ends_the_waiting_and_not_the_command(client, root):
    for _ in range(2):  # the repeat finds that the time is over
        result = measured(client.execute(WAITING, tool_call_id="call-1", timeout=0.3))
        assert result.pop("output") in ("working\n", "")
        assert result == {
            "success": False,
            "exit_code": -1,
            "error": "command timed out after 0.3s",
            "background_process_id": "call-1",
        }
    (root / "go").touch()
    until(lambda: client.read_output("call-1")["exit_code"] == 0, "the command ends")
    assert (root / "effects").read_text() == "x\n"


def test_the_agent_may_say_that_the_time_is_over(client, pausing, monkeypatch):
    """As it does of a command that another replica started long ago."""

    def pause(seconds):
        raise AssertionError("it is asked again")

    pausing(pause)
    monkeypatch.setattr(processes, "MAX_WAIT", 0.0)
    monkeypatch.setattr(processes.Process, "timed_out", True)
    result = client.execute(WAITING, tool_call_id="call-1", timeout=1000)
    assert result["error"] == "command timed out after 1000s"
    assert result["background_process_id"] == "call-1"


def test_one_deadline_covers_the_start_too(client, monkeypatch):
    let_go = threading.Event()
    start = processes.ProcessTable.start

    def stuck(*args):
        assert let_go.wait(LIMIT)
        return start(*args)

    monkeypatch.setattr(processes.ProcessTable, "start", stuck)
    try:
        result = client.execute("true", tool_call_id="call-1", timeout=0.2)
    finally:
        let_go.set()
    assert result.pop("error").startswith("No answer from http://127.0.0.1:")
    assert result == {"success": False, "output": "", "exit_code": -1, "background_process_id": "call-1"}


def test_an_agent_that_answers_at_once_is_not_asked_in_a_hot_loop(agent, root, pausing, monkeypatch):
    asked, pauses = [], []

    def noting(request):
        if waits(request):
            asked.append(request)
            if len(asked) == 4:
                (root / "go").touch()
        return False

    monkeypatch.setattr(processes, "MAX_WAIT", 0.0)
    monkeypatch.setattr(client_module, "ASK_EVERY", 1000.0)
    client = agent(wrap=failing(noting))

    def pause(seconds):
        pauses.append(seconds)
        if (root / "go").exists():
            until(lambda: client.read_output("call-1")["exit_code"] == 0, "the command ends")

    pausing(pause)
    result = client.execute(WAITING, tool_call_id="call-1", timeout=3000)
    assert result["output"] == "working\ndone\n"
    assert len(pauses) == len(asked) - 1 <= 4
    assert min(pauses) > 900


def test_a_wait_that_fails_is_made_up_for_by_one_reading(agent):
    def wrap(app):
        table = app.extensions["workspace_agent"].processes

        def fails(request):
            if waits(request):
                until(lambda: not table.get(processes.Chat("", CHAT), "call-1").running, "the command ends")
            return waits(request)

        return Failing(app, fails)

    result = agent(wrap=wrap).execute("echo done", tool_call_id="call-1")
    assert measured(result) == {"success": True, "output": "done\n", "exit_code": 0}


def test_a_wait_that_fails_while_the_command_runs(agent):
    result = measured(agent(wrap=failing(waits)).execute(WAITING, tool_call_id="call-1"))
    assert result.pop("output") in ("working\n", "")
    assert result == {
        "success": False,
        "exit_code": -1,
        "error": "waiting for the command failed: the disk is full",
        "background_process_id": "call-1",
    }


def test_an_output_that_cannot_be_read_names_the_process(agent):
    result = measured(agent(wrap=failing(reads)).execute("true", tool_call_id="call-1"))
    text = 'the output of process "call-1" could not be read, read it again with this ID: the disk is full'
    assert result.pop("error") == text
    assert result == {"success": False, "output": "", "exit_code": -1, "background_process_id": "call-1"}


@pytest.mark.parametrize("body", ['{"hello": "world"}', "hello"])
def test_an_answer_of_somebody_else_is_no_success(agent, body):
    def wrap(app):
        return Response(body, mimetype="application/json")

    client = agent(wrap=wrap)
    assert client.execute("true", tool_call_id="call-1")["success"] is False
    assert client.read_output("call-1")["success"] is False


# Files


def test_an_edit_and_a_write(client, root):
    result = act(client, root, "edit")
    (file,) = result.pop("files")
    assert file["path"] == str(root / "file")
    assert "-old\n" in file["diff"] and "+new\n" in file["diff"]
    assert result == {"success": True}

    path = str(root / "sub" / "binary ü")
    assert client.write_file(path, b"\xff\x00", tool_call_id="call-2") == {
        "success": True,
        "message": f'Successfully wrote to "{path}"',
    }
    assert (root / "sub" / "binary ü").read_bytes() == b"\xff\x00"


def test_an_edit_and_a_write_that_are_refused(client, root):
    error = f'"{root / "nowhere"}" does not exist.'
    assert fail(client, root, "edit") == {"success": False, "error": error}
    assert fail(client, root, "write", "call-2") == {"success": False, "error": f'"{root}" is a directory.'}


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeat_gets_the_first_result(client, root, kind):
    first = act(client, root, kind)
    (root / "file").write_text("changed since")
    again = act(client, root, kind)
    for result in (first, again):
        result.pop("wall_duration_ms", None)
    assert first["success"] and again == first
    assert (root / "file").read_text() == "changed since"


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_was_canceled_is_told_so(client, root, kind):
    client.interrupt(["call-1"])
    result = act(client, root, kind)
    assert (result["success"], result["error"]) == (False, "The tool call was canceled.")
    assert "background_process_id" not in result
    assert (root / "file").read_text() == "old"


# An interrupt: each row of the table


@pytest.mark.parametrize("kind", KINDS)
def test_not_received(client, root, kind):
    assert interrupted(client) == {"success": False, "error": NOT_RUN}
    act(client, root, kind)
    assert (root / "file").read_text() == "old"


def test_not_received_as_far_as_the_agent_remembers(client):
    """The agent is younger than the call, so it may have run in an earlier life of the agent."""
    assert interrupted(client, age=3600) == {"success": False, "error": NO_RESULT}


def test_not_received_but_a_running_process_is_found(agent):
    client = agent(RUNONCE_FORGET_AFTER=0.05)
    client.execute(WAITING, tool_call_id="call-1", background=True)
    works(client)
    until_forgotten(client, "call-1")
    assert interrupted(client) == {
        "success": False,
        "output": "working\n",
        "exit_code": -1,
        "error": CANCELED,
        "canceled": True,
    }


def test_not_received_but_an_exited_process_is_found(agent):
    client = agent(RUNONCE_FORGET_AFTER=0.05)
    client.execute("echo done; exit 3", tool_call_id="call-1")
    until_forgotten(client, "call-1")
    assert interrupted(client) == {"success": False, "output": "done\n", "exit_code": 3}


def until_forgotten(client, call):
    until(lambda: call not in [entry["id"] for entry in client._client.calls()], "the agent forgets the call")


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_error(client, root, kind):
    error = fail(client, root, kind)["error"]
    assert interrupted(client) == {"success": False, "error": error}


def test_a_saved_start_of_a_command_that_runs(client, root):
    client.execute(WAITING, tool_call_id="call-1", background=True)
    works(client)
    assert interrupted(client) == {
        "success": False,
        "output": "working\n",
        "exit_code": -1,
        "error": CANCELED,
        "canceled": True,
    }
    (root / "go").touch()
    assert not (root / "effects").exists()


def test_the_sender_of_a_canceled_command_is_told_the_same(client, in_thread):
    sending = in_thread(client.execute, WAITING, tool_call_id="call-1")
    works(client)
    assert interrupted(client) == measured(sending.result())


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_success(client, root, kind):
    result = act(client, root, kind)
    result.pop("wall_duration_ms", None)
    assert interrupted(client) == result


def test_a_server_without_cancel_routes(agent, root, warnings):
    client = agent(RUNONCE_URL_PREFIX=None)
    act(client, root, "write")
    assert client.interrupt(["call-1", "never-sent"]) == {
        "call-1": {"success": False, "error": NO_RESULT},
        "never-sent": {"success": False, "error": NO_RESULT},
    }
    assert sorted(warnings()) == ["call-1", "never-sent"]


def test_a_cancel_that_fails(client, monkeypatch, warnings):
    def refuse(group, signum):
        raise PermissionError(1, "Operation not permitted")

    client.execute("sleep 60", tool_call_id="call-1", background=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refuse)
        assert interrupted(client) == {"success": False, "error": NO_RESULT}
    assert warnings() == ["call-1"]


def test_a_cancel_whose_answer_does_not_come(client, monkeypatch, warnings):
    let_go = threading.Event()

    def stuck(table, chat, process_id):
        assert process_id != "call-1" or let_go.wait(LIMIT)

    monkeypatch.setattr(processes.ProcessTable, "cancel", stuck)
    try:
        results = client.interrupt(["call-1", "call-2"], timeout=3)
    finally:
        let_go.set()
    assert results == {
        "call-1": {"success": False, "error": NO_RESULT},
        "call-2": {"success": False, "error": NOT_RUN},
    }
    assert warnings() == ["call-1"]


def test_a_run_that_does_not_end_although_it_is_canceled(agent, root, monkeypatch, in_thread, warnings):
    client = agent(RUNONCE_CANCEL_TIMEOUT=0.01)
    arrived, let_go = threading.Event(), threading.Event()

    def stuck(file):
        arrived.set()
        assert let_go.wait(LIMIT)

    monkeypatch.setattr(os, "fsync", stuck)
    writing = in_thread(act, client, root, "write")
    assert arrived.wait(LIMIT)
    try:
        assert interrupted(client) == {"success": False, "error": NO_RESULT}
    finally:
        let_go.set()
    assert warnings() == ["call-1"]
    assert interrupted(client) == writing.result()


def test_an_output_that_cannot_be_read(agent, warnings):
    client = agent(wrap=failing(reads))
    client.execute("true", tool_call_id="call-1", background=True)
    assert client.interrupt(["call-1", "never-sent"]) == {
        "call-1": {"success": False, "error": NO_RESULT},
        "never-sent": {"success": False, "error": NO_RESULT},
    }
    assert sorted(warnings()) == ["call-1", "never-sent"]


def test_an_agent_that_was_restarted_does_not_say_that_nothing_ran(root, tmp_path, warnings):
    """The record has outlived the process."""
    store = {"RUNONCE_STORE_URI": f"sqlite:///{tmp_path / 'runonce.db'}"}
    with agent_at(root, **store) as client:
        client.execute("echo x > effects", tool_call_id="call-1")
    with agent_at(root, **store) as client:
        assert client.interrupt(["call-1", "never-sent"]) == {
            "call-1": {"success": False, "error": NO_RESULT},
            "never-sent": {"success": False, "error": NOT_RUN},
        }
    assert warnings() == ["call-1"]


def test_a_result_that_was_not_kept_is_not_called_a_failure(agent, root, warnings):
    client = agent(RUNONCE_MAX_BODY_BYTES=8)
    act(client, root, "edit", "edit")
    client.execute("echo done", tool_call_id="execute")
    assert client.interrupt(["edit", "execute"]) == {
        "edit": {"success": False, "error": NO_RESULT},
        "execute": {"success": True, "output": "done\n", "exit_code": 0},
    }
    assert warnings() == ["edit"]


def test_an_interrupt_of_nothing(client):
    assert client.interrupt([]) == {}


def test_an_interrupted_batch_gets_a_true_result_for_each(client, root, in_thread):
    """One running, one done, one never sent, and an edit."""
    running = in_thread(client.execute, WAITING, tool_call_id="running")
    client.execute("echo x >> effects; echo done", tool_call_id="done")
    edited = act(client, root, "edit", "edit")
    works(client, "running")

    results = client.interrupt(["running", "done", "never-sent", "edit"])

    assert results == {
        "running": {
            "success": False,
            "output": "working\n",
            "exit_code": -1,
            "error": CANCELED,
            "canceled": True,
        },
        "done": {"success": True, "output": "done\n", "exit_code": 0},
        "never-sent": {"success": False, "error": NOT_RUN},
        "edit": edited,
    }
    assert measured(running.result()) == results["running"]
    assert edited["success"] is True
    # What was said is so, also for those who come too late.
    (root / "go").touch()
    assert client.execute("echo x >> effects", tool_call_id="never-sent")["error"] == "The tool call was canceled."
    assert (root / "effects").read_text() == "x\n"
    assert (root / "file").read_text() == "new"
