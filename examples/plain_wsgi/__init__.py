"""A service without a framework, run once through the middleware: each way in which a WSGI app may answer (PEP 3333).

waitress-serve examples.plain_wsgi:application
"""

from __future__ import annotations

import collections
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flask_runonce import RunOnceMiddleware

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

TEXT = [("Content-Type", "text/plain; charset=utf-8")]

Page = Callable[["WSGIEnvironment", "StartResponse"], Iterable[bytes]]


class Orders:
    """Takes orders. `taken` counts them by path, `closed` counts the bodies whose `close()` was called."""

    def __init__(self) -> None:
        self.taken: collections.Counter[str] = collections.Counter()
        self.closed: collections.Counter[str] = collections.Counter()
        self._pages: dict[str, Page] = {
            "/list": self.as_list,
            "/written": self.written,
            "/generated": self.generated,
            "/recovered": self.recovered,
            "/closing": self.closing,
            "/file": self.as_file,
            "/links": self.links,
            "/empty": self.empty,
        }

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        page = self._pages.get(environ["PATH_INFO"])
        if page is None:
            start_response("404 Not Found", TEXT)
            return [b"no such page"]
        self.taken[environ["PATH_INFO"]] += 1
        return page(environ, start_response)

    def as_list(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """A list, the plainest body."""
        start_response("201 Created", [*TEXT, ("Set-Cookie", "seen=1"), ("X-Order", "1")])
        return [b"order ", str(self.taken["/list"]).encode()]

    def written(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """The old way: `write()`, and then a body too."""
        write = start_response("201 Created", TEXT)
        write(b"written, ")
        return [b"then returned"]

    def generated(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        """A generator: nothing happens before the first piece is asked for, not even `start_response`."""
        start_response("201 Created", TEXT)
        yield b"piece "
        yield b"by "
        yield b"piece"

    def recovered(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """An error after `start_response`, answered with another one that carries `exc_info`."""
        start_response("201 Created", TEXT)
        try:
            raise LookupError("no such order")
        except LookupError:
            start_response("422 Unprocessable Content", TEXT, sys.exc_info())
        return [b"no such order"]

    def closing(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """A body that wants to be closed, exactly once."""
        start_response("201 Created", TEXT)
        return _Closing([b"close ", b"me"], lambda: self.closed.update(["/closing"]))

    def as_file(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """A file, by the server's own wrapper where it has one."""
        start_response("200 OK", [("Content-Type", "application/octet-stream")])
        content = io.BytesIO(bytes(range(256)) * 1024)
        wrap = environ.get("wsgi.file_wrapper", lambda file, size: iter(lambda: file.read(size), b""))
        body: Iterable[bytes] = wrap(content, 8192)
        return body

    def links(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """The same header twice: both count, and so does their order."""
        start_response("200 OK", [*TEXT, ("Link", "</1>; rel=first"), ("Link", "</9>; rel=last")])
        return [b"linked"]

    def empty(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """No body at all."""
        start_response("204 No Content", [])
        return []


class _Closing:
    def __init__(self, pieces: Iterable[bytes], closed: Callable[[], None]) -> None:
        self._pieces = iter(pieces)
        self._closed = closed

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        self._closed()


def create_application(config: Mapping[str, Any] | None = None) -> tuple[Orders, RunOnceMiddleware]:
    """The service, and the service run once."""
    orders = Orders()
    return orders, RunOnceMiddleware(orders, config=config)


application = create_application()[1]
