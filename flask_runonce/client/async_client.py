"""The driver for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID

import httpx

from .cancellation import Cancellation
from .core import DEFAULT_RETRY, LIMITS, TIMEOUT, CallInfo, Core, Flow, Pause, Retry, Send, StopRequested, TimeUp

T = TypeVar("T")


class AsyncToolClient:
    """As :class:`ToolClient`, for one asyncio event loop; ``http_options`` go to ``httpx.AsyncClient``."""

    def __init__(
        self,
        base_url: str,
        chat_id: UUID | str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        retry: Retry = DEFAULT_RETRY,
        chat_id_header: str = "Coder-Chat-Id",
        tool_call_id_header: str = "Coder-Tool-Call-Id",
        url_prefix: str = "/api/v0/tool-calls",
        **http_options: Any,
    ) -> None:
        self._http = httpx.AsyncClient(
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

    async def call(
        self,
        method: str,
        url: str,
        *,
        tool_call_id: str | None,
        stop: asyncio.Event | None = None,
        cancel_on_stop: bool = False,
        deadline: float | None = None,
        **options: Any,
    ) -> httpx.Response:
        """As :meth:`ToolClient.call`. With ``cancel_on_stop`` a canceled task sends the cancel before it ends."""
        flow = self._core.call(
            method, url, tool_call_id, cancel_on_stop=cancel_on_stop, deadline=deadline, options=options
        )
        return await self._drive(flow, stop)

    async def cancel(self, tool_call_id: str, age: float | None = None, *, timeout: float = 30.0) -> Cancellation:
        """As :meth:`ToolClient.cancel`."""
        return await self._drive(self._core.cancel(tool_call_id, age=age, timeout=timeout))

    async def cancel_all(
        self, ids: Iterable[str], timeout: float = 30.0, *, age: float | None = None
    ) -> dict[str, Cancellation]:
        """As :meth:`ToolClient.cancel_all`."""
        unique = list(dict.fromkeys(ids))
        answers = await asyncio.gather(*(self.cancel(id, age, timeout=timeout) for id in unique))
        return dict(zip(unique, answers, strict=True))

    async def calls(self) -> list[CallInfo]:
        """As :meth:`ToolClient.calls`."""
        return await self._drive(self._core.calls())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncToolClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _drive(self, flow: Flow[T], stop: asyncio.Event | None = None) -> T:
        advance: Callable[[], Send | Pause] = partial(next, flow)
        try:
            while True:
                step = advance()
                try:
                    answer = await self._do(step, stop if step.stoppable else None)
                except BaseException as error:
                    advance = partial(flow.throw, error)
                else:
                    advance = partial(flow.send, answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _do(self, step: Send | Pause, stop: asyncio.Event | None) -> httpx.Response | None:
        """Do the step in a task of its own: a cancellation in here is the caller's, one in the task is a fault."""
        if stop is not None and stop.is_set():
            raise StopRequested
        work: asyncio.Future[Any]
        if isinstance(step, Send):
            work = asyncio.ensure_future(self._exchange(step.request))
            left = None if step.until is None else step.until - time.monotonic()
        else:
            work = asyncio.ensure_future(asyncio.sleep(step.seconds))
            left = None
        tasks = [work] if stop is None else [work, asyncio.ensure_future(stop.wait())]
        try:
            await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if stop is not None and stop.is_set() and not _succeeded(work):
                raise StopRequested
            if not work.done():
                raise TimeUp("the time allowed is over")
            if work.cancelled():
                raise httpx.NetworkError("the transport gave up the request")
            response: httpx.Response | None = work.result()
            return response
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        # Holds the body as bytes, so that each attempt sends the same ones (a multipart boundary too).
        await request.aread()
        return await self._http.send(request)


def _succeeded(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
