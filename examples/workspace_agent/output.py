"""What a process has written, within a bound: its beginning and its end."""

from __future__ import annotations

import codecs
import threading
from typing import NamedTuple

HEAD_BYTES = 16 * 1024
TAIL_BYTES = 16 * 1024


class Output(NamedTuple):
    """A reading of the buffer. Nothing was left out where ``omitted_bytes`` is 0."""

    text: str
    original_bytes: int
    omitted_bytes: int


class OutputBuffer:
    """Keeps the first 16 KiB and the last 16 KiB of what is written to it; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._head = bytearray()
        self._tail = bytearray()
        self._written = 0

    def write(self, data: bytes) -> None:
        with self._lock:
            self._written += len(data)
            room = HEAD_BYTES - len(self._head)
            self._head += data[:room]
            self._tail += data[room:]
            del self._tail[:-TAIL_BYTES]

    def read(self, *, ended: bool) -> Output:
        """The text so far, with a line that says what was left out.

        No cut splits a UTF-8 character: a part of one at either side of the gap is left out too, and while the writer
        goes on (not ``ended``) so is one whose last bytes are still to come. Other bytes become U+FFFD.
        """
        with self._lock:
            head, tail, written = bytes(self._head), bytes(self._tail), self._written
        whole = written == len(head) + len(tail)
        if whole:
            head, tail = b"", head + tail
        else:
            head = head[: len(head) - _begun(head)]
            tail = tail[_continued(tail) :]
        if not ended:
            to_come = _begun(tail)
            tail = tail[: len(tail) - to_come]
            written -= to_come
        omitted = written - len(head) - len(tail)
        text = tail.decode(errors="replace")
        if not whole:
            text = f"{head.decode(errors='replace')}\n... [omitted {omitted} bytes] ...\n{text}"
        return Output(text, written, omitted)


def _begun(data: bytes) -> int:
    """How many bytes at the end of ``data`` are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])


def _continued(data: bytes) -> int:
    """How many bytes at the start of ``data`` can be the rest of a character."""
    return next((n for n, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))
