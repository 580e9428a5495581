"""What a call was asked with: a digest of the request, made without taking its body from the handler."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from werkzeug.wsgi import get_content_length

if TYPE_CHECKING:
    from _typeshed.wsgi import InputStream, WSGIEnvironment

_CHUNK = 64 * 1024
_INPUT = "runonce.input"


class Input:
    """A `wsgi.input` that can be read ahead of the handler, and never past its Content-Length.

    A body that belongs to the fingerprint (not multipart, of a known length up to `limit` bytes) is read whole at the
    first touch and then read from memory by whoever comes, in the order of the first reader's position. Any other body
    passes through and is only counted.
    """

    def __init__(self, environ: WSGIEnvironment, limit: int) -> None:
        self._stream: InputStream = environ["wsgi.input"]
        length = get_content_length(environ)
        self._left: float = length if length is not None else math.inf if environ.get("wsgi.input_terminated") else 0
        multipart = str(environ.get("CONTENT_TYPE", "")).lower().lstrip().startswith("multipart/")
        self._whole = length is not None and length <= limit and not multipart
        self._body: bytes | None = None
        self.complete = True

    @classmethod
    def of(cls, environ: WSGIEnvironment, limit: int) -> Input:
        """The environ's own, put in the place of its `wsgi.input` at the first call."""
        found = environ.get(_INPUT)
        if isinstance(found, cls) and environ["wsgi.input"] is found:
            return found
        made = environ[_INPUT] = environ["wsgi.input"] = cls(environ, limit)
        return made

    def body(self) -> bytes | None:
        """The whole body, which the handler can still read; None where it is no part of the fingerprint.

        Sets `complete` to False when the client sent less than its Content-Length.
        """
        if self._whole and self._body is None:
            self._body = self._fetch(int(self._left))
            self.complete = len(self._body) == self._left
            self._stream, self._left = io.BytesIO(self._body), len(self._body)
        return self._body

    def drain(self) -> None:
        """Read and drop what the handler did not read, so that the connection's next request is not read from it."""
        if self._body is None:
            try:
                while self.read(_CHUNK):
                    pass
            except OSError:
                self._left = 0

    def read(self, size: int | None = -1, /) -> bytes:
        size = self._bounded(size)
        return self._counted(self._stream.read(size)) if size else b""

    def readline(self, size: int | None = -1, /) -> bytes:
        size = self._bounded(size)
        return self._counted(self._stream.readline(size)) if size else b""

    def readlines(self, hint: int | None = -1, /) -> list[bytes]:
        lines, total = [], 0
        for line in self:
            lines.append(line)
            total += len(line)
            if hint is not None and 0 < hint <= total:
                break
        return lines

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def _bounded(self, size: int | None) -> int:
        self.body()
        if size is None or size < 0 or size > self._left:
            return -1 if self._left == math.inf else int(self._left)
        return size

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data

    def _fetch(self, length: int) -> bytes:
        chunks = []
        try:
            while length and (chunk := self._stream.read(length)):
                chunks.append(chunk)
                length -= len(chunk)
        except OSError:  # the client went away; what came is all there is
            pass
        return b"".join(chunks)


def fingerprint(environ: WSGIEnvironment, body: bytes | None) -> str:
    """64 hex digits over method, path, query string and `body` (None: no part of it), each length-prefixed."""
    parts = [
        environ["REQUEST_METHOD"],
        environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""),
        environ.get("QUERY_STRING", ""),
    ]
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%s" % (len(encoded), encoded))
    if body is not None:
        digest.update(body)
    return digest.hexdigest()

