from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from webtest import TestApp, TestResponse

from examples.workspace_agent import WorkspaceAgent, create_app

LIMIT = 20.0  # seconds that a test waits for what must happen


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Waits for a condition that nobody announces."""

    def wait(condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)

    return wait


class Gate:
    """A named pipe between a command and its test: each blocks there until the other comes."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    def open(self) -> None:
        """Let a command go on that waits at ``cat gate``."""
        self.path.write_bytes(b"")


@pytest.fixture
def gates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Gate]:
    folder = tmp_path_factory.mktemp("gates")
    return lambda name: Gate(folder / name)


class Agent(TestApp):
    """The agent behind WebTest, its lint on. ``chat=`` and ``call=`` are the headers, None leaves one out."""

    def __init__(self, root: Path | None, **options: Any) -> None:
        self.flask = create_app(root, **options)
        super().__init__(self.flask)

    @property
    def running(self) -> WorkspaceAgent:
        agent = self.flask.extensions["workspace_agent"]
        assert isinstance(agent, WorkspaceAgent)
        return agent

    def send(
        self,
        method: str,
        path: str,
        *,
        chat: str | None = "chat-1",
        call: str | None = None,
        body: Any = None,
        status: int | str = 200,
        headers: dict[str, str] | None = None,
    ) -> TestResponse:
        """``body`` is sent as it is when it is bytes, else as JSON."""
        own = {"Coder-Chat-Id": chat, "Coder-Tool-Call-Id": call}
        sent = {name: value for name, value in own.items() if value is not None} | (headers or {})
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        return self.request(path, method=method, body=data or b"", headers=sent, status=status)

    def start(
        self, command: str, call: str | None = "call-1", *, status: int | str = 200, **fields: Any
    ) -> TestResponse:
        """``chat`` and ``headers`` are the request's, other fields the body's."""
        request = {name: fields.pop(name) for name in ("chat", "headers") if name in fields}
        body = {"command": command, **fields}
        return self.send("POST", "/api/v0/processes/start", call=call, body=body, status=status, **request)

    def output(self, process: str = "call-1", query: str = "", **options: Any) -> TestResponse:
        return self.send("GET", f"/api/v0/processes/{process}/output{query}", **options)

    def ended(self, process: str = "call-1", **options: Any) -> dict[str, Any]:
        """What the process has written, read at its exit."""
        facts: dict[str, Any] = self.output(process, "?wait=true", **options).json
        assert facts["running"] is False
        return facts

    def signal(self, name: str, process: str = "call-1", **options: Any) -> TestResponse:
        return self.send("POST", f"/api/v0/processes/{process}/signal", body={"signal": name}, **options)

    def list(self, query: str = "", **options: Any) -> TestResponse:
        return self.send("GET", f"/api/v0/processes/list{query}", **options)

    def edit(self, *files: dict[str, Any], call: str | None = "call-1", **options: Any) -> TestResponse:
        body = {"files": list(files), **options.pop("fields", {})}
        return self.send("POST", "/api/v0/edit-files", call=call, body=body, **options)

    def write(self, path: Path | str, body: bytes, call: str | None = "call-1", **options: Any) -> TestResponse:
        return self.send("POST", f"/api/v0/write-file?path={quote(str(path))}", call=call, body=body, **options)

    def cancel(self, call: str = "call-1", **options: Any) -> TestResponse:
        return self.send("POST", f"/api/v0/tool-calls/{call}/cancel", **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def make_agent(root: Path) -> Iterator[Callable[..., Agent]]:
    made = []

    def make(folder: Path | None = root, **options: Any) -> Agent:
        made.append(Agent(folder, **options))
        return made[-1]

    yield make
    for agent in made:
        agent.running.close()


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    return make_agent()


class InThread(threading.Thread):
    """Calls a function in a thread of its own; ``result()`` waits for what it returns or raises."""

    def __init__(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*args, **options)
        self._future: Future[Any] = Future()
        self.start()

    def run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        value = self._future.result(LIMIT)
        self.join(LIMIT)
        return value


@pytest.fixture
def in_thread() -> type[InThread]:
    return InThread


@pytest.fixture
def offspring() -> Callable[[], list[psutil.Process]]:
    """Gives the processes that have come since: the servers of other tests are children of ours too."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]
