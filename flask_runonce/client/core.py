"""The request flow of both clients. It does no I/O: it says what to do next, and a driver does it.

| what came back | then |
| --- | --- |
| a refusal of flask-runonce that is ``retryable`` | the same request again |
| any other refusal of flask-runonce | Refused |
| 502, 503 or 504 of anybody else, unless marked as a repeat of a saved response | the same request again |
| any other response | it is the answer |
| a connection error, a reset, a time-out, a cut-off response | the same request again |
| the caller's own end: its ``stop`` event, KeyboardInterrupt, SystemExit, asyncio cancellation | no further attempt |

"Again" means with the same ID and the same bytes, after a pause; NoAnswer or Refused comes out when the attempts or the
time are used up. A request without a tool call ID is sent again only if its method is safe (RFC 9110 section 9.2.1).
A cancel may always be sent again. The last row is decided before all others, because a canceled caller and a broken
connection can raise the same errors: a driver looks at its caller before, during and after each step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar
from urllib.parse import quote

import httpx
import tenacity

from .answers import error_detail, refusal, retry_after
from .cancellation import Cancellation, read_cancellation
from .errors import NoAnswer, Refused, SilenceTimeout, Stopped, ToolCallError

T = TypeVar("T")

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
GATEWAY_STATUSES = frozenset({502, 503, 504})
NETWORK_FAULTS = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)

# A handler may be quiet for as long as it works, so only a long silence counts as a dead server.
TIMEOUT = httpx.Timeout(10.0, read=600.0)
# Calls that wait for their runs must not keep a cancel from getting a connection.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
CANCEL_TIMEOUT = 30.0
PAGE_SIZE = 200

logger = logging.getLogger("flask_runonce.client")


@dataclass(frozen=True)
class Retry:
    """When to send a request again; times in seconds.

    ``attempts``: how often it is sent at most.
    ``window``: no attempt starts later than this after the first. Keep it below the server's ``RUNONCE_FORGET_AFTER``:
    once that has forgotten the call, a repeat would be a new call.
    ``first_pause``, ``longest_pause``: a pause is random between 0 and a bound that starts at the first, doubles with
    each attempt and ends at the second. A server's Retry-After is a floor.
    """

    attempts: int = 25
    window: float = 1800.0
    first_pause: float = 0.25
    longest_pause: float = 60.0


DEFAULT_RETRY = Retry()


class CallInfo(TypedDict):
    """One entry of the server's list (CONTRACT section 5); times in Unix seconds."""

    id: str
    state: str
    canceled: bool
    started_at: float | None
    finished_at: float | None
    status: int | None
    repeats: int


@dataclass(frozen=True)
class Send:
    """Send ``request`` and give back the whole response. Past ``until``, on ``time.monotonic()``, raise TimeUp."""

    request: httpx.Request
    until: float | None
    stoppable: bool


@dataclass(frozen=True)
class Pause:
    """Wait that many seconds."""

    seconds: float
    stoppable: bool


class StopRequested(Exception):
    """For a driver to raise in a stoppable step: the caller's ``stop`` event is set."""


class TimeUp(Exception):
    """For a driver to raise in a Send: its time is over and there is no response."""


# What a step raised is thrown in at its place; a Send is answered by the response, a Pause by nothing.
Flow = Generator[Send | Pause, Any, T]


class Core:
    """Makes the flows for one chat on one server; ``build_request`` is that of the driver's httpx client."""

    def __init__(
        self,
        build_request: Callable[..., httpx.Request],
        chat_id: str,
        *,
        retry: Retry,
        chat_id_header: str,
        tool_call_id_header: str,
        url_prefix: str,
    ) -> None:
        self._build_request = build_request
        self._chat_id = chat_id
        self._retry = retry
        self._chat_id_header = chat_id_header
        self._tool_call_id_header = tool_call_id_header
        self._url_prefix = url_prefix

    def call(
        self,
        method: str,
        url: str,
        tool_call_id: str | None,
        *,
        cancel_on_stop: bool,
        deadline: float | None,
        options: Mapping[str, Any],
    ) -> Flow[httpx.Response]:
        request = self._request(method, url, tool_call_id, **options)
        started = time.monotonic()
        until = None if deadline is None else started + deadline
        try:
            response, _ = yield from self._ask(request, tool_call_id, until=until)
        except (StopRequested, KeyboardInterrupt, SystemExit, asyncio.CancelledError) as reason:
            cancellation = None
            if cancel_on_stop and tool_call_id is not None:
                age = time.monotonic() - started
                cancellation = yield from self.cancel(tool_call_id, age=age, timeout=CANCEL_TIMEOUT)
            if isinstance(reason, StopRequested):
                raise Stopped(tool_call_id, cancellation) from None
            raise
        return response

    def cancel(self, tool_call_id: str, *, age: float | None, timeout: float) -> Flow[Cancellation]:
        started = time.monotonic()
        try:
            # Quoted whole, dots too: a path segment of dots alone would be taken for a relative path.
            segment = quote(tool_call_id, safe="").replace(".", "%2E")
            request = self._request("POST", f"{self._url_prefix}/{segment}/cancel")
            response, attempts = yield from self._ask(request, tool_call_id, until=started + timeout, stoppable=False)
            elapsed = time.monotonic() - started
            # No age says that the store remembered the call when the cancel began. It may have been lost in a failed
            # attempt, so after one it has to vouch for the time since then.
            oldest = None if age is None and attempts == 1 else (age or 0.0) + elapsed
            return _cancellation(response, tool_call_id, oldest)
        except Exception as error:
            expected = isinstance(error, ToolCallError)
            logger.warning(
                "no answer to a cancel: %s", error, extra=self._log_extra(tool_call_id), exc_info=not expected
            )
            return Cancellation(None, error=error if isinstance(error, ToolCallError) else None)

    def calls(self) -> Flow[list[CallInfo]]:
        # New calls come in at the front while the pages are turned, so an entry may be seen twice.
        found: dict[str, CallInfo] = {}
        offset = 0
        while True:
            request = self._request("GET", self._url_prefix, params={"limit": PAGE_SIZE, "offset": offset})
            response, _ = yield from self._ask(request, None)
            entries, has_more = _page(response)
            for entry in entries:
                found.setdefault(entry["id"], entry)
            offset += len(entries)
            if not (entries and has_more):
                return list(found.values())

    def _request(self, method: str, url: str, tool_call_id: str | None = None, **options: Any) -> httpx.Request:
        headers = httpx.Headers(options.pop("headers", None))
        headers[self._chat_id_header] = self._chat_id
        headers.pop(self._tool_call_id_header, None)
        if tool_call_id is not None:
            headers[self._tool_call_id_header] = tool_call_id
        return self._build_request(method, url, headers=headers, **options)

    def _ask(
        self, request: httpx.Request, tool_call_id: str | None, *, until: float | None = None, stoppable: bool = True
    ) -> Flow[tuple[httpx.Response, int]]:
        """Send until there is an answer of the app or of a route; give it with the number of attempts."""
        repeatable = tool_call_id is not None or request.method in SAFE_METHODS
        pauses: list[float] = []
        for attempt in self._attempts(tool_call_id, until, sleep=pauses.append):
            while pauses:
                yield Pause(pauses.pop(), stoppable)
            with attempt:
                try:
                    response: httpx.Response = yield Send(request, until, stoppable)
                except (*NETWORK_FAULTS, TimeUp) as fault:
                    kind = SilenceTimeout if isinstance(fault, httpx.ReadTimeout) else NoAnswer
                    detail = f"No answer from {_origin(request)}: {str(fault) or type(fault).__name__}"
                    raise kind(detail, tool_call_id=tool_call_id, retryable=repeatable) from fault
                _refuse(response, tool_call_id, repeatable)
                return response, attempt.retry_state.attempt_number
        raise AssertionError("tenacity gives up by raising the last error")

    def _attempts(
        self, tool_call_id: str | None, until: float | None, sleep: Callable[[float], None]
    ) -> tenacity.Retrying:
        last_start = time.monotonic() + self._retry.window
        if until is not None:
            last_start = min(last_start, until)
        backoff = tenacity.wait_random_exponential(multiplier=self._retry.first_pause, max=self._retry.longest_pause)

        def wait(state: tenacity.RetryCallState) -> float:
            return max(backoff(state), _error(state).retry_after)

        def used_up(state: tenacity.RetryCallState) -> bool:
            too_late = time.monotonic() + state.upcoming_sleep >= last_start
            return too_late or state.attempt_number >= self._retry.attempts

        def log(state: tenacity.RetryCallState) -> None:
            logger.info(
                "attempt %d failed, the next in %.1f s: %s",
                state.attempt_number,
                state.upcoming_sleep,
                _error(state),
                extra=self._log_extra(tool_call_id),
            )

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, ToolCallError) and error.retryable),
            stop=used_up,
            wait=wait,
            before_sleep=log,
            sleep=sleep,
            reraise=True,
        )

    def _log_extra(self, tool_call_id: str | None) -> dict[str, str | None]:
        return {"chat_id": self._chat_id, "tool_call_id": tool_call_id}


def _refuse(response: httpx.Response, tool_call_id: str | None, repeatable: bool) -> None:
    """Raise unless the response is an answer of the app, or of a route of ours."""
    problem = refusal(response)
    if problem is not None:
        raise Refused(
            error_detail(response),
            tool_call_id=tool_call_id,
            code=str(problem.get("code")),
            response=response,
            retryable=problem.get("retryable") is True,
            retry_after=retry_after(response),
        )
    replayed = response.headers.get("Idempotent-Replayed") == "true"
    if response.status_code in GATEWAY_STATUSES and not replayed:
        raise NoAnswer(
            error_detail(response),
            tool_call_id=tool_call_id,
            response=response,
            retryable=repeatable,
            retry_after=retry_after(response),
        )


def _cancellation(response: httpx.Response, tool_call_id: str, oldest: float | None) -> Cancellation:
    if response.status_code in (200, 202):
        with suppress(ValueError):
            return read_cancellation(response, oldest=oldest)
    raise _not_ours(response, tool_call_id)


def _page(response: httpx.Response) -> tuple[list[CallInfo], bool]:
    if response.status_code == 200:
        with suppress(ValueError, KeyError, TypeError):
            document = response.json()
            return list(document["tool_calls"]), bool(document["has_more"])
    raise _not_ours(response, None)


def _not_ours(response: httpx.Response, tool_call_id: str | None) -> NoAnswer:
    """For an answer that no route of ours gives, above all the 404 of a server without these routes."""
    return NoAnswer(error_detail(response), tool_call_id=tool_call_id, response=response)


def _error(state: tenacity.RetryCallState) -> ToolCallError:
    error = state.outcome and state.outcome.exception()
    assert isinstance(error, ToolCallError)
    return error


def _origin(request: httpx.Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"
