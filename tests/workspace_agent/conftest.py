from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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

    def arrived(self) -> None:
        """Return when a command has come to ``echo > gate``."""
        self.path.read_bytes()

    def open(self) -> None:
        """Let a command go on that waits at ``cat gate``."""
        self.path.write_bytes(b"")


@pytest.fixture
def gates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Gate]:
    folder = tmp_path_factory.mktemp("gates")
    return lambda name: Gate(folder / name)
