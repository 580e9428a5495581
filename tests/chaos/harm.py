"""Who does the harm: threads that pick one of several kinds now and then, and undo it before they end."""

from __future__ import annotations

import collections
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.chaos.book import Book
from tests.chaos.houses import Harm, Pause


class Villain:
    """Does one of `harms` at a time, and rests for about `rest` seconds before each. A context manager.

    `pace` stretches the time that each takes.
    """

    def __init__(self, harms: Mapping[str, Harm], rest: float, *, pace: float, seed: int) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self.failure: BaseException | None = None
        self._harms = harms
        self._rest = rest
        self._pace = pace
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="villain")

    def __enter__(self) -> Villain:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._rest * self._rng.uniform(0.3, 1.7)):
                name = self._rng.choice(list(self._harms))
                self._harms[name](self._rng, self._pause)
                self.done[name] += 1
        except BaseException as error:
            self.failure = error

    def _pause(self, seconds: float) -> None:
        self._over.wait(seconds * self._pace)


class Workers:
    """The workers of the gunicorn whose process ID is in `pid_file`, and the harm that is done to them.

    Times are in leases: a villain of that pace does it.
    """

    def __init__(self, pid_file: Path, book: Book) -> None:
        self.frozen: list[tuple[float, float]] = []
        self._master = psutil.Process(int(pid_file.read_text()))
        self._book = book

    def kill(self, rng: random.Random, pause: Pause) -> None:
        """SIGKILL."""
        self._signal(self._pick(rng), signal.SIGKILL)

    def freeze(self, rng: random.Random, pause: Pause) -> None:
        """SIGSTOP, for longer than a lease, and SIGCONT."""
        worker, began = self._pick(rng), time.monotonic()
        self._signal(worker, signal.SIGSTOP)
        try:
            pause(rng.uniform(1.1, 2.2))
        finally:
            self._signal(worker, signal.SIGCONT)
            self.frozen.append((began, time.monotonic()))

    def stumble(self, rng: random.Random, pause: Pause) -> None:
        """SIGSTOP and SIGCONT within the lease."""
        worker = self._pick(rng)
        self._signal(worker, signal.SIGSTOP)
        try:
            pause(rng.uniform(0.1, 0.6))
        finally:
            self._signal(worker, signal.SIGCONT)

    def _pick(self, rng: random.Random) -> int:
        """One of the workers, most often one that has just begun a run."""
        workers: list[int] = [process.pid for process in self._master.children()]
        recent: list[int] = [line["pid"] for line in self._book.read("effects")[-8:] if line["pid"] in workers]
        return rng.choice(recent if recent and rng.random() < 0.7 else workers or [0])

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        if pid and psutil.pid_exists(pid):
            os.kill(pid, number)
