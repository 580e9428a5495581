"""Real servers on loopback, each in processes of its own, for the tests that need one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
STARTING = 60
"""Seconds that a server may take to answer on its port."""
STOPPING = 20
"""Seconds that a server may take to end in good order."""

_UWSGI = ["-c", "import pyuwsgi; pyuwsgi.run()"]
_MOD_WSGI = ["-c", "from mod_wsgi.express.cli import main; main()"]

SERVERS: Mapping[str, Sequence[str]] = {
    "flask run": ["-m", "flask", "--app", "{app}", "run", "--port", "{port}"],
    "gunicorn gthread": [
        *("-m", "gunicorn", "--worker-class", "gthread", "--threads", "40"),
        *("--bind", "127.0.0.1:{port}", "{app}()"),
    ],
    "gunicorn gevent": ["-m", "gunicorn", "--worker-class", "gevent", "--bind", "127.0.0.1:{port}", "{app}()"],
    "gunicorn sync": ["-m", "gunicorn", "--worker-class", "sync", "--bind", "127.0.0.1:{port}", "{app}()"],
    "waitress": ["-m", "waitress", "--threads", "40", "--listen", "127.0.0.1:{port}", "--call", "{app}"],
    "uWSGI": [
        *("-c", "import pyuwsgi; pyuwsgi.run()", "--master", "--need-app", "--threads", "40"),
        *("--hook-master-start", "unix_signal:15 gracefully_kill_them_all"),
        *("--http-socket", "127.0.0.1:{port}", "--module", "{app}()"),
    ],
    "mod_wsgi": [
        *("-c", "from mod_wsgi.express.cli import main; main()", "start-server"),
        *("--threads", "40", "--chunked-request", "--host", "127.0.0.1", "--port", "{port}"),
        *("--server-root", "{folder}/apache", "--working-directory", "{root}", "--log-to-terminal", "{script}"),
    ],
}
"""How each server is started, after the interpreter."""

_MISSING = {
    "uWSGI": ("pyuwsgi", "uWSGI is not installed on this Python: it comes with pyuwsgi"),
    "mod_wsgi": ("mod_wsgi", "mod_wsgi is not installed: tox does it where apxs is (Debian: apache2-bin, apache2-dev)"),
}


def missing(server: str) -> str:
    """Why the server is not there, or "" where it is."""
    module, reason = _MISSING.get(server, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        return reason
    prefix = _prefix(server)
    if prefix and subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        return f"Root may not start {server} as somebody else here"
    return ""


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Server:
    """A server that was started: where it listens, its first process, and the file that it prints to."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End all its processes at once, as the machine's end would."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            processes = [first, *first.children(recursive=True)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            deadline = time.monotonic() + STOPPING
            while any(map(_lives, processes)) and time.monotonic() < deadline:
                time.sleep(0.01)
        self.process.wait()

    def stop(self) -> None:
        """End it as a supervisor does: with SIGTERM, and by force when it takes too long."""
        self.process.terminate()
        try:
            self.process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def started(server: str, app: str, *options: str, log: Path, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Serve the app that `app` names ("module:factory") on `server`, a key of `SERVERS`.

    `options` are added to the command line. What the server prints goes to the file `log`.
    """
    port = free_port()
    facts = {"app": app, "port": port, "folder": log.parent, "root": ROOT, "script": log.parent / "app.wsgi"}
    module, factory = app.split(":")
    facts["script"].write_text(f"from {module} import {factory}\n\napplication = {factory}()\n")
    command = [part.format(**facts) for part in SERVERS[server]]
    place = len(command) if server == "mod_wsgi" else 2
    command[place:place] = options
    environment = {**os.environ, **(env or {})}
    if server == "mod_wsgi":
        # Measured by coverage, a thread that the app starts in Apache's Python spins in the interpreter for ever.
        environment.pop("COVERAGE_PROCESS_CONFIG", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_prefix(server), sys.executable, *command],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env=environment,
        )
        running = Server(port, process, log)
        try:
            _wait_for(running)
            yield running
        finally:
            running.stop()


@contextlib.contextmanager
def serve(server: str, app: str, *options: str, log: Path, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """The same as `started`, for a test that only needs the URL."""
    with started(server, app, *options, log=log, env=env) as running:
        yield running.url


def _prefix(server: str) -> Sequence[str]:
    """What stands before the interpreter. Apache serves no page as root, and may have to read what is root's.

    It also asks before it reads: only with this bit is access(2) told the same as open(2).
    """
    if server != "mod_wsgi" or os.getuid():
        return ()
    capabilities = "+dac_override"
    return (
        *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--securebits=+no_setuid_fixup"),
        *(f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", "--"),
    )


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait_for(server: Server) -> None:
    deadline = time.monotonic() + STARTING
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
            return
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"The server did not start:\n{server.log.read_text()}")
        time.sleep(0.05)
