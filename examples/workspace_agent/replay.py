"""The incident, replayed for real: one start, sent 36 times by 12 threads over HTTP; an interrupt; a late retry.

``python -m examples.workspace_agent.replay`` serves the agent on the loopback interface, prints what came out of it and
exits 1 when any of it is wrong.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from werkzeug.exceptions import Unauthorized
from werkzeug.serving import WSGIRequestHandler, make_server

from . import create_app

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

ATTEMPTS = 36
THREADS = 12


class Answer(NamedTuple):
    status: int
    replayed: bool
    json: dict[str, Any]


class Caller:
    """Sends the requests of one chat to an agent at ``base_url``."""

    def __init__(self, base_url: str, token: str, chat_id: str) -> None:
        self.base_url = base_url
        self.headers = {"Authorization": f"Bearer {token}", "Coder-Chat-Id": chat_id}

    def get(self, path: str) -> Answer:
        return self._send(urllib.request.Request(self.base_url + path, headers=self.headers))

    def start(self, tool_call_id: str, command: str) -> Answer:
        headers = {**self.headers, "Coder-Tool-Call-Id": tool_call_id, "Content-Type": "application/json"}
        body = json.dumps({"command": command}).encode()
        return self._send(urllib.request.Request(self.base_url + "/api/v0/processes/start", body, headers))

    def output(self, tool_call_id: str) -> dict[str, Any]:
        """What it has written, read at its exit."""
        return self.get(f"/api/v0/processes/{quote(tool_call_id)}/output?wait=true").json

    def cancel(self, tool_call_id: str) -> Answer:
        path = f"/api/v0/tool-calls/{quote(tool_call_id)}/cancel"
        return self._send(urllib.request.Request(self.base_url + path, b"", self.headers))

    def _send(self, request: urllib.request.Request) -> Answer:
        try:
            response = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return Answer(response.status, response.headers.get("Idempotent-Replayed") == "true", json.load(response))


class Report:
    """Prints what is and what should be, and remembers whether they differed."""

    def __init__(self) -> None:
        self.wrong = 0

    def check(self, what: str, found: object, expected: object) -> None:
        self.wrong += found != expected
        print(f"  {what:<46} {found}" + ("" if found == expected else f"  WRONG, expected {expected}"), flush=True)


def replay(base_url: str, token: str, root: Path) -> int:
    """Play the incident against the agent at ``base_url``, which serves ``root``. Returns how many counts are wrong."""
    report = Report()
    chat, other_chat = (Caller(base_url, token, chat_id) for chat_id in ("chat-1", "chat-2"))

    command = "sleep 1; echo x >> effects"
    print(f"{ATTEMPTS} starts of `{command}` from {THREADS} threads")
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda _: chat.start("call-1", command), range(ATTEMPTS)))
    report.check("answers 200", sum(answer.status == 200 for answer in answers), ATTEMPTS)
    report.check("different answers", len({str(answer.json) for answer in answers}), 1)
    report.check("of them repeats", sum(answer.replayed for answer in answers), ATTEMPTS - 1)
    report.check("processes", chat.get("/api/v0/processes/list").json.get("total"), 1)
    report.check("exit code", chat.output("call-1").get("exit_code"), 0)
    report.check("a repeat after its end starts nothing", chat.start("call-1", command).replayed, True)
    report.check("lines in effects", _lines(root / "effects"), 1)

    print("an interrupt while a command runs")
    begun = _pipe(root / "begun")
    command = "echo working; echo > begun; sleep 60; echo x >> late"
    chat.start("call-2", command)
    report.check("it runs", _readable(begun), True)
    canceled = chat.cancel("call-2")
    report.check("the cancel says that the call was received", canceled.json.get("received"), True)
    output = chat.output("call-2")
    report.check("running", output.get("running"), False)
    report.check("canceled", output.get("canceled"), True)
    report.check("output so far", output.get("output", "").strip(), "working")
    retry = chat.start("call-2", command)
    report.check("a late retry", f"{retry.status} {retry.json.get('code')}", "409 canceled")
    report.check("lines in late", _lines(root / "late"), 0)

    print("a cancel that comes before its call")
    canceled = chat.cancel("call-3")
    report.check("the cancel says that the call was received", canceled.json.get("received"), False)
    retry = chat.start("call-3", "echo x >> never")
    report.check("the call", f"{retry.status} {retry.json.get('code')}", "409 canceled")
    report.check("lines in never", _lines(root / "never"), 0)

    print("two chats with one ID")
    for caller in (chat, other_chat):
        caller.start("call-4", 'echo "$CODER_CHAT_ID" >> both')
        report.check("exit code", caller.output("call-4").get("exit_code"), 0)
    report.check("lines in both", _lines(root / "both"), 2)

    print("all counts are right" if not report.wrong else f"{report.wrong} counts are WRONG")
    return report.wrong


def bearer(token: str) -> Callable[[WSGIEnvironment], None]:
    """A guard that lets in who has the token."""

    def guard(environ: WSGIEnvironment) -> None:
        if not secrets.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), f"Bearer {token}".encode()):
            raise Unauthorized

    return guard


def main() -> int:
    """Serve the agent in a folder of its own and replay the incident. Returns 1 if any count is wrong."""
    print("\n=== A workspace agent: real commands are sent again, interrupted and canceled ===\n")
    token = secrets.token_urlsafe()
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(folder, guard=bearer(token))
        server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_QuietHandler)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            return int(replay(f"http://127.0.0.1:{server.port}", token, Path(folder)) > 0)
        finally:
            server.shutdown()
            serving.join()
            server.server_close()
            app.extensions["workspace_agent"].close()


def _pipe(path: Path) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _readable(pipe: int) -> bool:
    """Wait until something was written to the pipe, at most half a minute."""
    ready, _, _ = select.select([pipe], [], [], 30)
    os.close(pipe)
    return bool(ready)


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


class _QuietHandler(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


if __name__ == "__main__":
    sys.exit(main())
