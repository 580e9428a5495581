"""The driver for threads."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID

import httpx

from .cancellation import Cancellation
from .core import DEFAULT_RETRY, LIMITS, TIMEOUT, CallInfo, Core, Flow, Pause, Retry, Send, StopRequested, TimeUp

T = TypeVar("T")

# How long a set `stop` event may go unseen while a response is awaited: two events cannot be waited for at once.
STOP_POLL = 0.05


class ToolClient:
    """Sends the tool calls of one chat to one server, from any thread.

    ``base_url``: where the app is mounted; URLs given to :meth:`call` are relative to it.
    ``chat_id``: the conversation that all calls of this client belong to.
    ``transport``: an httpx transport in place of the network, such as ``httpx.WSGITransport(app)``.
    ``retry``: when a request is sent again.
    The next three name what the server's ``RUNONCE_…`` configuration names. ``http_options`` go to ``httpx.Client``
    (``auth``, ``headers``, ``verify``, ``timeout``, …). The ``read`` time-out is the silence after which a server is
    given up; it starts afresh with each piece that comes.
    """

    def __init__(
        self,
        base_url: str,
        chat_id: UUID | str,
        *,
        transport: httpx.BaseTransport | None = None,
        retry: Retry = DEFAULT_RETRY,
        chat_id_header: str = "Coder-Chat-Id",
        tool_call_id_header: str = "Coder-Tool-Call-Id",
        url_prefix: str = "/api/v0/tool-calls",
        **http_options: Any,
    ) -> None:
        self._http = httpx.Client(
            base_url=base_url, transport=transport, **{"timeout": TIMEOUT, "limits": LIMITS, **http_options}
        )
        self._core = Core(
            self._http.build_request,
            str(chat_id),
            retry=retry,
            chat_id_header=chat_id_header,
            tool_call_id_header=tool_call_id_header,
            url_prefix=url_prefix,
        )
        self._in_flight: set[concurrent.futures.Future[httpx.Response]] = set()

    def call(
        self,
        method: str,
        url: str,
        *,
        tool_call_id: str | None,
        stop: threading.Event | None = None,
        cancel_on_stop: bool = False,
        deadline: float | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Send one call, again with the same ID where that is needed, and return the handler's response.

        ``tool_call_id``: None for a request that is not a call; it carries no ID and is sent once, or again only if its
        method is safe. ``stop``: ends the call when it is set. ``cancel_on_stop``: on ``stop``, KeyboardInterrupt or
        SystemExit, also cancel the call on the server and wait for its answer. ``deadline``: seconds for everything;
        None: no limit but ``retry`` and silence. ``options`` (``json``, ``content``, ``params``, ``headers``, …) go to
        ``httpx.Client.build_request``. An error status of the handler's own is returned like any other response.

        Raises :class:`Refused`, :class:`NoAnswer` or :class:`Stopped`. A request that is given up is not recalled: the
        server may still run it, and only a cancel tells.
        """
        flow = self._core.call(
            method, url, tool_call_id, cancel_on_stop=cancel_on_stop, deadline=deadline, options=options
        )
        return self._drive(flow, stop)

    def cancel(self, tool_call_id: str, age: float | None = None, *, timeout: float = 30.0) -> Cancellation:
        """Cancel a call and say truthfully what became of it. Raises nothing for want of an answer.

        ``age``: seconds since the call was made; None: younger than the store's memory. ``timeout``: seconds for
        everything. A missing answer is logged as a warning and gives ``received=None``.
        """
        return self._drive(self._core.cancel(tool_call_id, age=age, timeout=timeout))

    def cancel_all(
        self, ids: Iterable[str], timeout: float = 30.0, *, age: float | None = None
    ) -> dict[str, Cancellation]:
        """Cancel several calls at once, under one deadline; ``age`` is that of the oldest.

        The result has an entry for each ID; one failure never loses another's answer.
        """
        answers = {id: _in_thread(partial(self.cancel, id, age, timeout=timeout)) for id in dict.fromkeys(ids)}
        return {id: answer.result() for id, answer in answers.items()}

    def calls(self) -> list[CallInfo]:
        """The chat's calls that the server remembers, newest first. Raises as :meth:`call` does."""
        return self._drive(self._core.calls())

    def close(self) -> None:
        """Close the connections; that of a request which was given up only when it ends, at the latest in silence."""
        in_flight = set(self._in_flight)
        if not in_flight:
            self._http.close()
            return

        def close_after() -> None:
            concurrent.futures.wait(in_flight)
            self._http.close()

        _in_thread(close_after)

    def __enter__(self) -> ToolClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _drive(self, flow: Flow[T], stop: threading.Event | None = None) -> T:
        advance: Callable[[], Send | Pause] = partial(next, flow)
        try:
            while True:
                step = advance()
                try:
                    answer = self._do(step, stop if step.stoppable else None)
                except BaseException as error:
                    advance = partial(flow.throw, error)
                else:
                    advance = partial(flow.send, answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def _do(self, step: Send | Pause, stop: threading.Event | None) -> httpx.Response | None:
        if stop is not None and stop.is_set():
            raise StopRequested
        if isinstance(step, Send):
            return self._send(step, stop)
        if stop is None:
            time.sleep(step.seconds)
        else:
            stop.wait(step.seconds)  # the next step sees it
        return None

    def _send(self, step: Send, stop: threading.Event | None) -> httpx.Response:
        """Send in a thread of its own, so that the caller can end while the server keeps still."""
        sending = _in_thread(partial(self._exchange, step.request))
        self._in_flight.add(sending)
        sending.add_done_callback(self._in_flight.discard)
        poll = threading.TIMEOUT_MAX if stop is None else STOP_POLL
        while not (sending.done() or (stop is not None and stop.is_set())):
            left = poll if step.until is None else step.until - time.monotonic()
            if left <= 0:
                raise TimeUp("the time allowed is over")
            concurrent.futures.wait([sending], timeout=min(left, poll))
        if stop is not None and stop.is_set() and not _succeeded(sending):
            raise StopRequested
        return sending.result()

    def _exchange(self, request: httpx.Request) -> httpx.Response:
        # Holds the body as bytes, so that each attempt sends the same ones (a multipart boundary too).
        request.read()
        return self._http.send(request)


def _succeeded(future: concurrent.futures.Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _in_thread(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run in a daemon thread: unlike an executor's, it does not hold up the end of the process."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="flask-runonce-client", daemon=True).start()
    return future
