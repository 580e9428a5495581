"""What really happened, in files that outlive every process which writes them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Book:
    """Pages of facts in `folder`, one line each. Any number of processes may write; what is written survives a kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, page: str, **facts: Any) -> None:
        """Add a line with `facts`, the process and the time (`time.monotonic`, which all processes share)."""
        line = json.dumps({**facts, "pid": os.getpid(), "at": time.monotonic()}) + "\n"
        # One write to a file that is open for appending is whole, and in its place, whatever others write meanwhile.
        descriptor = os.open(self.folder / page, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def read(self, page: str, call: str | None = None) -> list[dict[str, Any]]:
        """The lines of a page, in order; only those about one tool call ID, if `call` is given."""
        path = self.folder / page
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [line for line in lines if call in (None, line["call"])]

    def gate(self, name: str, pid: int) -> Path:
        """The file that lets a run of that process go on, when it waits at the gate `name`."""
        return self.folder / f"gate-{name}-{pid}"
