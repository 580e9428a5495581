"""Kills the loop in the middle of a batch, starts it again, and counts; once for each recording.

The agent is served on the loopback interface. The loop is a process of its own and is killed by SIGKILL when of its
five calls two have their results, one has acted but its answer is still on the way, one runs, and one was not sent.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from werkzeug.serving import WSGIRequestHandler, make_server

from examples.workspace_agent import create_app
from examples.workspace_agent.replay import Report, bearer
from flask_runonce.client import ToolClient, tool_call_ids

from .formats import FORMATS, Format, Message
from .loop import conversation
from .transcript import Transcript

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

RECORDINGS = Path(__file__).parent / "recordings"
CHECKOUT = Path(__file__).parents[2]
LIMIT = 60.0
"""Seconds to wait for what must happen."""


class Demo:
    """One recording, played in ``folder`` with an agent at ``url``."""

    def __init__(self, recording: Path, folder: Path, report: Report) -> None:
        self.recording = recording
        self.recorded: dict[str, Any] = json.loads(recording.read_text("utf-8"))
        self.form: Format = FORMATS[self.recorded["format"]]
        self.report = report
        self.token = secrets.token_urlsafe()
        self.transcript = folder / "transcript.jsonl"
        self.root = folder / "workspace"
        self.root.mkdir()

    def play(self) -> None:
        app = create_app(self.root, guard=bearer(self.token))
        agent = HeldBack(app)
        try:
            with serving(agent) as url:
                self._crash(agent, url)
                self._start_again(url)
                self._count(url)
        finally:
            agent.let_go.set()
            app.extensions["workspace_agent"].close()

    def _crash(self, agent: HeldBack, url: str) -> None:
        loop = self._loop(url)
        try:
            in_the_middle = wait_for(
                lambda: agent.acted.is_set() and self._results() == 3 and "building" in self._effects(), loop
            )
            self.report.check("the loop is in the middle of its batch", in_the_middle, True)
        finally:
            loop.kill()
        self.report.check("the loop ends with", loop.wait(), -signal.SIGKILL)
        self.report.check("results in the transcript", self._results(), 3)
        agent.let_go.set()
        (self.root / "inputs").touch()
        self.report.check("the build ends without the loop", wait_for(lambda: "built" in self._effects()), True)

    def _start_again(self, url: str) -> None:
        print("  started again", flush=True)
        loop = self._loop(url)
        try:
            with suppress(subprocess.TimeoutExpired):
                loop.wait(LIMIT)
        finally:
            loop.kill()
        self.report.check("the loop ends with", loop.wait(), 0)

    def _count(self, url: str) -> None:
        expected: list[str] = []
        with Transcript(self.transcript) as transcript:
            for entry in transcript.entries:
                provider_ids = [call.provider_id for call in self.form.calls(entry.message)]
                expected += tool_call_ids(self.recorded["chat_id"], entry.id, provider_ids).values()
        try:
            messages = conversation(transcript, self.form)
            results = answered(messages)
        except (LookupError, ValueError) as error:
            self.report.check("the transcript", f"is not complete: {error!r}", "")
            return
        headers = {"Authorization": f"Bearer {self.token}"}
        with ToolClient(url, self.recorded["chat_id"], headers=headers) as client:
            calls = client.calls()
            processes = client.call("GET", "/api/v0/processes/list", tool_call_id=None).json()
        self.report.check("calls that the agent knows", len(calls), 7)
        self.report.check("their IDs are those of the transcript", {c["id"] for c in calls} == set(expected), True)
        self.report.check("of them sent again", sum(call["repeats"] for call in calls), 2)
        self.report.check("commands started", processes["total"], 4)
        self.report.check("effects", " ".join(sorted(self._effects())), "building built installed linted")
        settings = (self.root / "settings.ini").read_text("utf-8").splitlines()
        self.report.check("edits made", settings.count("jobs = 2"), 1)
        self.report.check("results in the transcript", len(results), 7)
        self.report.check("of them successes", sum(result["success"] for result in results), 7)
        self.report.check("the model's last word is there", messages[-1] == self.recorded["messages"][-1], True)

    def _loop(self, url: str) -> subprocess.Popen[bytes]:
        arguments = [str(self.recording), str(self.transcript), "--agent", url, "--root", str(self.root)]
        environment = {**os.environ, "AGENT_TOKEN": self.token}
        command = [sys.executable, "-m", "examples.agent_loop.loop", *arguments]
        return subprocess.Popen(command, cwd=CHECKOUT, env=environment)

    def _results(self) -> int:
        lines = self.transcript.read_bytes().splitlines() if self.transcript.exists() else []
        return sum(b'"result_of"' in line for line in lines)

    def _effects(self) -> list[str]:
        effects = self.root / "effects"
        return effects.read_text("utf-8").splitlines() if effects.exists() else []


class HeldBack:
    """WSGI: lets the app act on an edit, says so, and keeps the answer back until it may go."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app
        self.acted = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer = self._app(environ, start_response)
        if environ["PATH_INFO"] == "/api/v0/edit-files":
            self.acted.set()
            self.let_go.wait(2 * LIMIT)
        return answer


def answered(messages: list[Message]) -> list[dict[str, Any]]:
    """The results in a conversation. Raises ValueError where one is missing or out of order: no provider takes that."""
    results = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            blocks = [{"tool_use_id": message["tool_call_id"], "content": message["content"]}]
        elif isinstance(message["content"], list):
            blocks = [block for block in message["content"] if block["type"] == "tool_result"]
        else:
            blocks = []
        for block in blocks:
            if not waiting or waiting.pop(0) != block["tool_use_id"]:
                raise ValueError(f"a result that nobody waits for: {block}")
            results.append(json.loads(block["content"]))
        if not blocks and waiting:
            raise ValueError(f"calls without a result: {waiting}")
        waiting += [call["id"] for call in message.get("tool_calls") or []]
        if message["role"] == "assistant" and isinstance(message["content"], list):
            waiting += [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    return results


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> bool:
    """Wait until the condition holds and say whether it does. Gives up after LIMIT, or when the process has ended."""
    until = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > until or (process is not None and process.poll() is not None):
            return condition()
        time.sleep(0.02)
    return True


@contextmanager
def serving(app: WSGIApplication) -> Iterator[str]:
    """Serve the app on the loopback interface, a thread for each request; gives the URL."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_QuietHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _QuietHandler(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def main() -> int:
    """Play each recording. Returns 1 if anything came out wrong."""
    report = Report()
    print("\n=== An orchestrator's loop: killed in the middle of a batch of calls, and started again ===\n", flush=True)
    for recording in sorted(RECORDINGS.glob("*.json")):
        print(f"a transcript in the format of {recording.stem}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            Demo(recording, Path(folder), report).play()
    print(f"{report.wrong} counts are WRONG" if report.wrong else "nothing ran twice, and the transcripts are complete")
    return int(report.wrong > 0)
