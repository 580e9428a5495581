"""The conversation on disk, such that a loop which was killed at any moment can go on from it.

A line is a message or the result of one of its calls, as JSON. It is on the disk before anything is done that depends
on it: a message before its calls are sent, because their IDs are made from the message's ID, and because a model that
was asked again would ask for other calls.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from .formats import Message


@dataclass
class Entry:
    """A message of the user or the model.

    ``id``: counts from 1. ``at``: when it was written, in Unix seconds. ``results``: those of its calls that have one,
    by the call's position. ``resumed``: it was written by an earlier process, which may have sent its calls.
    """

    id: int
    at: float
    message: Message
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    resumed: bool = False


class Transcript:
    """The file at ``path``, made if it is not there. For one process at a time, and all of its threads."""

    def __init__(self, path: Path) -> None:
        self.entries: list[Entry] = []
        self._lock = threading.Lock()
        self._file = path.open("a+b")
        self._file.seek(0)
        whole = 0
        for line in self._file:
            if line.endswith(b"\n"):
                whole += len(line)
                self._read(json.loads(line))
        self._file.truncate(whole)  # what a killed process had begun to write

    def add_message(self, message: Message) -> None:
        entry = Entry(len(self.entries) + 1, time.time(), message)
        self._write({"id": entry.id, "at": entry.at, "message": message})
        self.entries.append(entry)

    def add_result(self, entry: Entry, position: int, result: dict[str, Any]) -> None:
        self._write({"result_of": entry.id, "position": position, "result": result})
        entry.results[position] = result

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Transcript:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, line: dict[str, Any]) -> None:
        if "message" in line:
            self.entries.append(Entry(line["id"], line["at"], line["message"], resumed=True))
        else:
            self.entries[line["result_of"] - 1].results[line["position"]] = line["result"]

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
