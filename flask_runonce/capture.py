"""A response on its way from the app to the record and the first caller: read whole, bounded, closed exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from . import budget
from .call import Call, running

if TYPE_CHECKING:
    from _typeshed import OptExcInfo
    from _typeshed.wsgi import StartResponse

Headers = list[tuple[str, str]]

SAVED_HEADERS = frozenset(
    {
        "content-type",
        "content-encoding",
        "content-language",
        "content-location",
        "content-disposition",
        "location",
        "etag",
        "last-modified",
        "link",
        "cache-control",
        "vary",
    }
)
"""The representation headers (CONTRACT section 4). Everything else belongs to one answer, not to the call."""


def kept_headers(headers: Headers) -> tuple[tuple[str, str], ...]:
    """The headers that are saved, repeated ones in order."""
    return tuple((name, value) for name, value in headers if name.lower() in SAVED_HEADERS)


class Collected(NamedTuple):
    """A response: `body` is all of it when `rest` is None, else its beginning.

    `too_large`: it is not to be kept. `original_bytes` is the length of a body that was cut, else None.
    """

    status: str
    headers: Headers
    body: bytes
    rest: Iterator[bytes] | None = None
    too_large: bool = False
    original_bytes: int | None = None


def collect(
    chunks: Iterable[bytes],
    head: Callable[[], tuple[str, Headers]],
    *,
    limit: int,
    result_budget: int | None,
    whole: bool,
) -> Collected:
    """Read `chunks` to their end, or to the first that passes `limit` bytes. Where the `whole` is there, to their end.

    `head()` gives the status line and the headers; it is called once there is a first chunk or an end (PEP 3333 lets an
    app call `start_response` as late as that). A body that `result_budget` (bytes) applies to is read to its end
    however long it is, in bounded memory, and cut.
    """
    iterator = iter(chunks)
    kept, size = [], 0
    for chunk in iterator:
        kept.append(chunk)
        size += len(chunk)
        if size > limit and not whole:
            break
    else:
        status, headers = head()
        return _cut(Collected(status, headers, b"".join(kept), too_large=size > limit), result_budget)
    status, headers = head()
    if result_budget is None or not cuttable(headers):
        return Collected(status, headers, b"".join(kept), iterator, too_large=True)
    while size <= result_budget:  # it may yet be within its budget, though too large to keep
        more = next(iterator, None)
        if more is None:
            return Collected(status, headers, b"".join(kept), iterator, too_large=True)
        kept.append(more)
        size += len(more)
    return _cut(Collected(status, headers, b"".join(kept), iterator, too_large=True), result_budget)


def cuttable(headers: Headers) -> bool:
    """Whether a result budget applies: to text and JSON that is not compressed."""
    names = {name.lower(): value for name, value in headers}
    return names.get("content-encoding", "identity") == "identity" and budget.cuttable(names.get("content-type", ""))


def _cut(collected: Collected, result_budget: int | None) -> Collected:
    if result_budget is None or not cuttable(collected.headers):
        return collected
    content_type = next(value for name, value in collected.headers if name.lower() == "content-type")
    body: bytes | budget.Excerpt = collected.body
    if collected.rest is not None:
        body = _excerpt(collected.body, collected.rest, result_budget)
    shorter = budget.cut(body, content_type, result_budget)
    if shorter is None:
        return collected
    headers = [(name, value) for name, value in collected.headers if name.lower() not in ("content-length", "etag")]
    headers.append(("Content-Length", str(len(shorter))))
    original = len(body) if isinstance(body, bytes) else body.total
    return Collected(collected.status, headers, shorter, original_bytes=original)


def _excerpt(body: bytes, rest: Iterator[bytes], size: int) -> budget.Excerpt:
    total, tail = len(body), body[-size:]
    for chunk in rest:
        total += len(chunk)
        tail = (tail + chunk)[-size:]
    return budget.Excerpt(body[:size], tail, total)


class Tail:
    """The body of a response that is too large to keep: it streams on, and the run ends at `close()`.

    `close_body()` closes the app's own iterable. `end(whole)` is called exactly once, with False for a body that failed
    on the way or was thrown away before its end. `abandon(tail)` is called for one that nobody closed.
    """

    def __init__(
        self,
        call: Call,
        collected: Collected,
        *,
        close_body: Callable[[], object],
        end: Callable[[bool], None],
        abandon: Callable[[Tail], None],
    ) -> None:
        self._chunks = itertools.chain([collected.body] if collected.body else [], collected.rest or ())
        self._call = call
        self._close_body = close_body
        self._end = end
        self._abandon = abandon
        self._whole = False
        self._failed = False
        self._closed = False
        self.failure: BaseException | None = None

    def __iter__(self) -> Tail:
        return self

    def __next__(self) -> bytes:
        token = running.set(self._call)
        try:
            return next(self._chunks)
        except StopIteration:
            self._whole = not self._failed
            raise
        except BaseException:
            self._failed = True
            raise
        finally:
            running.reset(token)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with as_current(self._call):
                self._close_body()
        except BaseException:
            self._whole = False
            raise
        finally:
            self._end(self._whole)

    def __del__(self) -> None:
        # A server that throws the body away must not leave a run that never ends. The app's body is closed here and
        # now, as it would be without us. But this may be the garbage collector, inside a lock of the store: so the run
        # is only put aside, and ended by the next request.
        if not self._closed:
            self._closed = True
            try:
                self._close_body()
            except BaseException as error:
                self.failure = error
            self._abandon(self)

    def end_abandoned(self) -> None:
        """End the run of a body that nobody closed."""
        self._end(False)


class Capture:
    """The `start_response` that an app is given: nothing reaches the server before the response is known.

    `sent` says that the head has gone out. What the app gives to `write()` goes out at once only when it passes
    `limit` bytes.
    """

    def __init__(self, start_response: StartResponse, *, limit: int, result_budget: int | None) -> None:
        self._start_response = start_response
        self._limit = limit
        self._result_budget = result_budget
        self._status = ""
        self._headers: Headers = []
        self._size = 0
        self._written: list[bytes] = []
        self._server_write: Callable[[bytes], object] | None = None
        self._begun = False
        self._iterating = False
        self.sent = False

    def start_response(
        self, status: str, headers: Headers, exc_info: OptExcInfo | None = None, /
    ) -> Callable[[bytes], object]:
        if exc_info and exc_info[1] and (self.sent or self._begun):
            raise exc_info[1].with_traceback(exc_info[2])  # a server would have sent the head with the first bytes
        if self._status and not exc_info:
            raise AssertionError("The app called start_response twice without exc_info (PEP 3333).")
        self._status, self._headers = status, list(headers)
        return self.write

    def head(self) -> tuple[str, Headers]:
        """The status line and the headers that the app gave."""
        if not self._status:
            raise AssertionError("The app answered without calling start_response (PEP 3333).")
        return self._status, self._headers

    def send(self, status: str, headers: Headers) -> Callable[[bytes], object]:
        """Give the head to the server."""
        self.sent = True
        return self._start_response(status, headers)

    def write(self, data: bytes) -> None:
        self._begun = self._begun or bool(data)
        if self._server_write is None:
            self._written.append(data)
            self._size += len(data)
            budgeted = self._result_budget is not None and cuttable(self._headers)
            if self._size <= self._limit or budgeted or self._iterating:
                return
            self._server_write = self.send(self._status, self._headers)
            data = b"".join(self._take_written())
        self._server_write(data)

    def pieces(self, body: Iterable[bytes]) -> Iterator[bytes]:
        """What the app wrote and what it returned, in order."""
        self._iterating = True
        for piece in body:
            if self._written:
                yield from self._take_written()
            self._begun = self._begun or bool(piece)
            yield piece
        if self._written:
            yield from self._take_written()

    def _take_written(self) -> list[bytes]:
        written, self._written = self._written, []
        return written


class as_current:
    """A context in which `current_call` is `call`."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._token: Any = running.set(self._call)

    def __exit__(self, *exc_info: object) -> None:
        running.reset(self._token)
