"""Real servers on loopback, each in a process of its own, for the tests that need one."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STARTING = 60
"""Seconds that a server may take to answer on its port."""

SERVERS = {
    "flask run": ["-m", "flask", "--app", "{app}", "run", "--port", "{port}"],
    "gunicorn gthread": ["-m", "gunicorn", "-k", "gthread", "--threads", "40", "-b", "127.0.0.1:{port}", "{app}"],
    "gunicorn gevent": ["-m", "gunicorn", "-k", "gevent", "-b", "127.0.0.1:{port}", "{app}"],
    "gunicorn sync": ["-m", "gunicorn", "-k", "sync", "-b", "127.0.0.1:{port}", "{app}"],
    "waitress": ["-m", "waitress", "--threads", "40", "--listen", "127.0.0.1:{port}", "--call", "{app}"],
}
"""How each server is started, after the interpreter."""


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serve(server: str, app: str, *options: str, log: Path, env: dict[str, str] | None = None) -> Iterator[str]:
    """Serve the app that `app` names ("module:factory") on `server`, a key of `SERVERS`; gives its URL.

    `options` are added to the command line. What the server prints goes to the file `log`.
    """
    port = free_port()
    module, factory = app.split(":")
    name = app if server in ("waitress", "flask run") else f"{module}:{factory}()"
    command = [part.format(port=port, app=name) for part in SERVERS[server]]
    if options:
        command[2:2] = options
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=output, stderr=output, env={**os.environ, **(env or {})}
        )
        try:
            _wait_for(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTING
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"The server did not start:\n{log.read_text()}")
        time.sleep(0.05)
