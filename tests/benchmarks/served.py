"""Behind real servers: how long waiting repeats wait, and what threads lose to each other; and what an import costs."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from tests.benchmarks.apps import BODY, new_ids
from tests.benchmarks.compare import Spread
from tests.servers import ROOT, free_port

LIMIT = 60
THREADS = 8
REPEATS = 64
RUN = 0.2
"""Seconds that the run takes which the repeats wait for."""

COMMANDS = {
    "gunicorn gthread": (
        *("gunicorn", "-k", "gthread", "--threads", "{threads}", "--backlog", "256", "-b", "127.0.0.1:{port}"),
        *("--log-level", "error", "tests.benchmarks.apps:served({kind!r}, {uri!r})"),
    ),
    "waitress": ("tests.benchmarks.waitress", "{port}", "{threads}", "{kind}", "{uri}"),
}


@contextlib.contextmanager
def serve(server: str, kind: str, uri: str = "", threads: int = THREADS) -> Iterator[int]:
    """The port of a server process that serves `apps.served(kind, uri)`."""
    port = free_port()
    words = [word.format(port=port, threads=threads, kind=kind, uri=uri) for word in COMMANDS[server]]
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < deadline, f"{server} does not start"
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(LIMIT)


def request_of(path: str, ids: tuple[str, str], close: bool = False) -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Connection: {'close' if close else 'keep-alive'}",
        f"Coder-Chat-Id: {ids[0]}",
        f"Coder-Tool-Call-Id: {ids[1]}",
        "Content-Type: application/json",
        f"Content-Length: {len(BODY)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + BODY


def waiting(server: str, uri: str, times: int) -> tuple[float, float]:
    """From the first byte sent to the last answer, and to the median one, as medians of multiples of the run."""
    last, middle = [], []
    with serve(server, "ours", uri) as port:
        _wait_for(port, "/run", 1)
        for _ in range(times):
            answers = _wait_for(port, "/sleep", 1 + REPEATS)
            last.append(answers[-1] / RUN)
            middle.append(statistics.median(answers) / RUN)
    return statistics.median(last), statistics.median(middle)


def _wait_for(port: int, path: str, count: int) -> list[float]:
    """Send the same call `count` times at once, and say after how many seconds each answer came."""
    request = request_of(path, new_ids(), close=True)
    answers: list[float] = []
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as ready:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT)) for _ in range(count)]
        start = time.perf_counter()
        for connection in connections:
            connection.sendall(request)
            ready.register(connection, selectors.EVENT_READ)
        while len(answers) < count:
            for key, _ in ready.select(LIMIT):
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                if data:
                    assert data.startswith(b"HTTP/1.1 201"), data
                    answers.append(time.perf_counter() - start)
                ready.unregister(key.fileobj)
    return answers


class Contention(NamedTuple):
    """Requests a second with eight threads by those with one: the bare app's, and ours divided by those."""

    bare: Spread
    ours: Spread


def contention(rounds: int, seconds: float) -> Contention:
    """Through waitress, on different calls. What ours loses beyond what the bare app loses is lost to the lock."""
    with contextlib.ExitStack() as stack:
        ports = {
            (kind, threads): stack.enter_context(serve("waitress", kind, "memory://", threads))
            for kind in ("bare", "ours")
            for threads in (1, THREADS)
        }
        rates: dict[tuple[str, int], list[float]] = {which: [] for which in ports}
        for number in range(rounds + 1):
            for which, port in ports.items():
                rate = _rate(port, seconds)
                if number:
                    rates[which].append(rate)
    kept = {
        kind: [many / one for many, one in zip(rates[kind, THREADS], rates[kind, 1], strict=True)]
        for kind in ("bare", "ours")
    }
    both = [ours / bare for ours, bare in zip(kept["ours"], kept["bare"], strict=True)]
    return Contention(Spread.of(kept["bare"]), Spread.of(both))


def _rate(port: int, seconds: float) -> float:
    """Requests a second of eight connections, each on calls of its own."""
    counts = [0] * THREADS
    end = time.perf_counter() + seconds

    def ask(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port), LIMIT) as connection:
            while time.perf_counter() < end:
                connection.sendall(request_of("/run", new_ids()))
                head = connection.recv(65536)
                assert head.startswith(b"HTTP/1.1 201"), head
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
                left = length - len(head.partition(b"\r\n\r\n")[2])
                while left:
                    left -= len(connection.recv(65536))
                counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def import_time(times: int) -> Spread:
    """Milliseconds of processor time that `import flask_runonce` takes after `import flask`."""
    code = "import flask, time; t = time.process_time(); import flask_runonce; print(time.process_time() - t)"
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        runs = [
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, check=True)
            for _ in range(times + 1)
        ]
    return Spread.of([1000 * float(run.stdout) for run in runs[1:]])  # the first one compiles
