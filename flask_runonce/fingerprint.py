"""What a call was asked with: a digest of the request, made without taking its body from the handler."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from werkzeug.sansio.utils import get_content_length

if TYPE_CHECKING:
    from _typeshed.wsgi import InputStream, WSGIEnvironment

_CHUNK = 64 * 1024
_BODY_OF_REQUEST = ("stream", "data", "form", "files", "values", "_cached_data", "_cached_json")
"""Where Werkzeug's request keeps the body that it has read."""

T = TypeVar("T")


class Input:
    """A `wsgi.input` that can be read ahead of the handler, and never past its Content-Length.

    A body of a known length up to `limit` bytes is read whole at the first touch, and then from memory by whoever
    comes. Any other body passes through and is only counted.
    """

    def __init__(self, environ: WSGIEnvironment, limit: int) -> None:
        self._stream: InputStream = environ["wsgi.input"]
        length = get_content_length(environ.get("CONTENT_LENGTH"), environ.get("HTTP_TRANSFER_ENCODING"))
        self._left: float = length if length is not None else math.inf if environ.get("wsgi.input_terminated") else 0
        self._length = length
        self._fits = length is not None and length <= limit
        self._content_type: str = environ.get("CONTENT_TYPE") or ""
        self._body: bytes | None = None
        self._complete = True
        self._withheld = False

    @classmethod
    def of(cls, environ: WSGIEnvironment, limit: int) -> Input:
        """The environ's own, put in the place of its `wsgi.input` at the first call."""
        found = environ["wsgi.input"]
        if isinstance(found, cls):
            found._allow(limit)
            return found
        made = environ["wsgi.input"] = cls(environ, limit)
        environ["webob.is_body_seekable"] = False  # WebOb would trust what it found out about the other stream
        return made

    def _allow(self, limit: int) -> None:
        """Another front door may read further ahead, as long as nobody has read anything."""
        untouched = self._length is not None and self._left == self._length
        self._fits = self._fits or (untouched and self._left <= limit)

    def fetch(self) -> bool:
        """Read the body ahead, if it fits; False when the client sent less than its Content-Length."""
        if self._fits and self._body is None:
            self._body = self._receive(int(self._left))
            self._complete = len(self._body) == self._left
            self._stream, self._left = io.BytesIO(self._body), len(self._body)
        return self._complete

    @property
    def fingerprinted(self) -> bytes | None:
        """The body as far as it belongs to the fingerprint: None for multipart (its boundary changes), or too large."""
        multipart = self._content_type.lstrip()[:10].lower() == "multipart/"
        return None if multipart else self._body

    def aside(self, read: Callable[[WSGIEnvironment], T], environ: WSGIEnvironment) -> T:
        """What `read(environ)` returns, who may read the body from its start without taking it from the handler.

        Also by Werkzeug's request, which keeps what it has read. A body that does not fit cannot be read twice: for
        `read`, touching it raises RuntimeError.
        """
        self.fetch()
        position = self._tell()
        self._seek(0)
        self._withheld = self._body is None
        try:
            with _left_as_it_was(environ.get("werkzeug.request")):
                return read(environ)
        finally:
            self._withheld = False
            self._seek(position)

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

    def _tell(self) -> int:
        return 0 if self._body is None else len(self._body) - int(self._left)

    def _seek(self, position: int) -> None:
        if self._body is not None:
            self._stream = io.BytesIO(self._body)
            self._stream.seek(position)
            self._left = len(self._body) - position

    def _bounded(self, size: int | None) -> int:
        if self._withheld:
            raise RuntimeError("A body over RUNONCE_FINGERPRINT_BYTES, or without a length, is the handler's alone.")
        self.fetch()
        if size is None or size < 0 or size > self._left:
            return -1 if self._left == math.inf else int(self._left)
        return size

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data

    def _receive(self, length: int) -> bytes:
        chunks = []
        try:
            while length and (chunk := self._stream.read(length)):
                chunks.append(chunk)
                length -= len(chunk)
        except OSError:  # the client went away; what came is all there is
            pass
        return b"".join(chunks)


@contextlib.contextmanager
def _left_as_it_was(request: Any) -> Iterator[None]:
    """Whatever is read of the body by Werkzeug's `request` (None: there is none), it then keeps what it kept before."""
    kept: dict[str, Any] = getattr(request, "__dict__", {})
    before = {name: kept[name] for name in _BODY_OF_REQUEST if name in kept}
    files = _open_files(before)
    places = [file.tell() for file in files]
    kept.pop("stream", None)  # it counts what is read of it: from the start, that takes another one
    try:
        yield
    finally:
        for file in _open_files(kept):
            if file not in files:
                file.close()
        for name in _BODY_OF_REQUEST:
            kept.pop(name, None)
        kept.update(before)
        for file, place in zip(files, places, strict=True):
            file.seek(place)


def _open_files(kept: dict[str, Any]) -> list[Any]:
    return [file.stream for _, file in kept["files"].items(multi=True) if not file.closed] if "files" in kept else []


def fingerprint(environ: WSGIEnvironment, body: bytes | None) -> str:
    """64 hex digits over method, path, query string and `body` (None: no part of it), each length-prefixed."""
    method, query = environ["REQUEST_METHOD"].upper(), environ.get("QUERY_STRING", "")
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    head = f"{len(method)}:{method}{len(path)}:{path}{len(query)}:{query}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(head + body if body else head).hexdigest()
