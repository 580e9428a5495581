"""The corners of PEP 3333 behind the middleware: each way to answer, to stream, to fail and to be thrown away."""

from __future__ import annotations

import gc
import gzip
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from flask_runonce import current_call
from flask_runonce.stores import MemoryStore
from tests.plain_app import (
    AT_ONCE,
    LIMIT,
    TEXT,
    Environ,
    Handler,
    Site,
    WatchedStore,
    answer,
    ask,
    environ_of,
    in_thread,
)

TINY = {**AT_ONCE, "RUNONCE_MAX_BODY_BYTES": 4}
"""Bodies over 4 bytes stream on to the first caller."""


class Body:
    """A response body that counts how often it is closed, and may fail at it."""

    def __init__(self, *chunks: bytes, error: BaseException | None = None) -> None:
        self.chunks = chunks
        self.error = error
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.chunks)

    def close(self) -> None:
        self.closed += 1
        if self.error:
            raise self.error


def giving(body: Iterable[bytes], status: str = "200 OK") -> Handler:
    """A handler that returns this very body."""

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response(status, [*TEXT])
        return body

    return handler


def code_of(site: Site) -> str:
    """The code of the refusal that a repeat gets."""
    code: str = site.call().json["code"]
    return code


def _yields_in_finally(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
    start_response("200 OK", [*TEXT])
    try:
        yield b"12345"
        yield b"678"
    finally:
        yield b"."


# What the app answers is what everybody gets


def parts_of(reply: Any) -> tuple[str, bytes, list[str]]:
    return reply.status, reply.body, reply.headers.getall("Content-Type")


STATUSES = [
    "200 OK",
    "201 Made Here",
    "202 Accepted",
    "303 See Other",
    "404 Not Found",
    "418 I'm a teapot",
    "500 Oh no",
]


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_line_is_saved_as_it_is(status: str) -> None:
    site = Site(answer(b"body", status))
    assert parts_of(site.call()) == parts_of(site.call()) == (status, b"body", ["text/plain"])
    assert site.runs == 1


@pytest.mark.parametrize("status", ["200 OK", "201 Created", "204 No Content", "304 Not Modified"])
@pytest.mark.parametrize("chunks", [[], [b""], [b"", b""]], ids=["no chunk", "an empty chunk", "two empty chunks"])
def test_an_empty_body_is_saved(status: str, chunks: list[bytes]) -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response(status, [])
        return chunks

    site = Site(handler)
    answers = [site.call() for _ in range(2)]
    assert [(each.status, each.body) for each in answers] == [(status, b"")] * 2
    assert site.runs == 1
    if status[:3] in ("204", "304"):
        assert "Content-Length" not in answers[1].headers
    else:
        assert answers[1].headers["Content-Length"] == "0"


REPRESENTATION = [
    ("Content-Type", "application/json"),
    ("Content-Encoding", "br"),
    ("Content-Language", "de, en"),
    ("Content-Location", "/orders/1.json"),
    ("Content-Disposition", 'attachment; filename="caf\xe9"'),
    ("Location", "/orders/1"),
    ("ETag", '"1"'),
    ("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT"),
    ("Link", "</1>; rel=first"),
    ("Cache-Control", "no-store"),
    ("Vary", "Accept"),
    ("link", "</9>; rel=last"),
    ("LINK", "</2>; rel=next"),
]
THE_FIRST_CALLERS = [
    ("Set-Cookie", "session=secret"),
    ("set-cookie", "seen=1"),
    ("Date", "Mon, 01 Jan 2024 00:00:00 GMT"),
    ("Server", "plain"),
    ("WWW-Authenticate", "Basic"),
    ("Retry-After", "7"),
    ("X-Request-Id", "1"),
    ("Content-Length", "4"),
]


def test_representation_headers_are_saved_in_order_and_no_others() -> None:
    site = Site(answer(b"body", headers=[*REPRESENTATION, *THE_FIRST_CALLERS]))
    first, repeat = (ask(site.middleware, environ_of()) for _ in range(2))
    assert first.headers == [*REPRESENTATION, *THE_FIRST_CALLERS]
    assert repeat.headers == [*REPRESENTATION, ("Idempotent-Replayed", "true"), ("Content-Length", "4")]


def test_a_compressed_body_stays_compressed() -> None:
    packed = gzip.compress(b"x" * 1000)
    site = Site(answer(packed, headers=[*TEXT, ("Content-Encoding", "gzip")]))
    for _ in range(2):
        reply = ask(site.middleware, environ_of())
        assert (dict(reply.headers)["Content-Encoding"], reply.body) == ("gzip", packed)


def test_every_byte_is_saved() -> None:
    site = Site(answer(bytes(range(256)) * 300, headers=[("Content-Type", "application/octet-stream")]))
    assert site.call().body == site.call().body == bytes(range(256)) * 300


@pytest.mark.parametrize("status", ["500 Internal Server Error", "400 Bad Request"])
def test_a_failure_that_the_app_answers_itself_is_its_response(status: str) -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            raise ValueError
        except ValueError:
            start_response(status, [*TEXT], sys.exc_info())
        return [b"sorry"]

    site = Site(handler)
    assert parts_of(site.call()) == parts_of(site.call()) == (status, b"sorry", ["text/plain"])
    assert site.runs == 1


# write()


def test_what_is_written_comes_before_what_is_returned() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        write = start_response("200 OK", [*TEXT])
        for piece in (b"a", b"", b"b"):
            write(piece)
        return [b"c", b"d"]

    site = Site(handler)
    assert [site.call().body for _ in range(2)] == [b"abcd"] * 2


def test_what_a_generator_writes_comes_where_it_was_written() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        write = start_response("200 OK", [*TEXT])
        write(b"a")
        yield b"b"
        write(b"c")
        yield b"d"
        write(b"e")

    site = Site(handler)
    assert [site.call().body for _ in range(2)] == [b"abcde"] * 2


def test_what_a_generator_writes_past_the_bound_comes_where_it_was_written() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        write = start_response("200 OK", [*TEXT])
        yield b"a"
        write(b"12345")
        yield b"b"
        write(b"678")

    site = Site(handler, config=TINY)
    assert site.call().body == b"a12345b678"
    assert code_of(site) == "response_too_large"


@pytest.mark.parametrize("returned", [b"", b"tail"])
def test_what_is_written_past_the_bound_goes_out_at_once(returned: bytes) -> None:
    sent: list[bytes] = []
    seen_by_the_handler = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        write = start_response("201 Created", [*TEXT])
        for piece in (b"one", b"two", b"three"):
            write(piece)
            seen_by_the_handler.append(b"".join(sent))
        return [returned]

    site = Site(handler, config=TINY)
    body: Any = site.middleware(environ_of(), lambda *head: sent.append)
    assert seen_by_the_handler == [b"", b"onetwo", b"onetwothree"]
    assert code_of(site) == "still_running"
    sent.extend(body)
    body.close()
    assert b"".join(sent) == b"onetwothree" + returned
    repeat = site.call()
    assert (repeat.json["code"], repeat.json["saved_status"]) == ("response_too_large", 201)


def test_what_is_written_up_to_the_bound_is_saved() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        write = start_response("200 OK", [*TEXT])
        write(b"ab")
        write(b"cd")
        return []

    site = Site(handler, config=TINY)
    assert [site.call().body for _ in range(2)] == [b"abcd"] * 2


def test_a_client_that_is_gone_while_the_app_writes_leaves_the_outcome_unknown() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [*TEXT])(b"12345")
        raise AssertionError("write did not say that the client has gone")

    def write(data: bytes) -> None:
        raise BrokenPipeError

    site = Site(handler, config=TINY)
    with pytest.raises(BrokenPipeError):
        site.middleware(environ_of(), lambda *head: write)
    assert (code_of(site), site.runs) == ("outcome_unknown", 1)


# start_response


def test_a_generator_may_call_start_response_as_late_as_its_first_chunk() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("201 Created", [*TEXT])
        yield b"late"

    for config in ({}, {"RUNONCE_MAX_BODY_BYTES": 3}):
        site = Site(handler, config=config)
        first = site.call()
        assert (first.status, first.body) == ("201 Created", b"late")


def test_a_generator_without_a_chunk_may_call_start_response_at_its_end() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("204 No Content", [])
        return
        yield

    site = Site(handler)
    assert [site.call().status for _ in range(2)] == ["204 No Content"] * 2


@pytest.mark.parametrize("chunks", [[], [b"x"], [b"12345"]], ids=["nothing", "short", "long"])
def test_an_app_that_never_calls_start_response_is_an_error(chunks: list[bytes]) -> None:
    site = Site(lambda environ, start_response: Body(*chunks), linted=False, config=TINY)
    with pytest.raises(AssertionError, match="without calling start_response"):
        site.call()
    assert (code_of(site), site.runs) == ("outcome_unknown", 1)


def test_an_app_that_calls_start_response_twice_is_an_error() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [*TEXT])
        start_response("201 Created", [*TEXT])
        return []

    site = Site(handler)
    with pytest.raises(AssertionError, match="twice"):
        site.call()
    assert (code_of(site), site.runs) == ("outcome_unknown", 1)


def test_the_headers_are_those_that_start_response_was_called_with() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        headers = [*TEXT]
        start_response("200 OK", headers)
        headers.append(("ETag", '"late"'))
        return [b"x"]

    site = Site(handler)
    assert ["ETag" in site.call().headers for _ in range(2)] == [False, False]


# exc_info: an app may answer anew as long as nothing of its first answer is out, and must not mix the two


def _answering_anew(first: Iterable[bytes], *, written: bool) -> Handler:
    """A handler that fails after the chunks `first`, and then answers anew."""

    def generate(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        write = start_response("200 OK", [*TEXT, ("ETag", '"1"')])
        for chunk in first:
            if written:
                write(chunk)
            else:
                yield chunk
        try:
            raise ValueError("half way")
        except ValueError:
            start_response("500 Internal Server Error", [*TEXT, ("Content-Length", "5")], sys.exc_info())
        yield b"error"

    return generate


@pytest.mark.parametrize("written", [False, True], ids=["chunks", "write()"])
@pytest.mark.parametrize("first", [[], [b""]], ids=["nothing", "no byte"])
def test_an_answer_of_which_nothing_is_out_may_be_replaced(first: list[bytes], written: bool) -> None:
    site = Site(_answering_anew(first, written=written))
    answers = [site.call() for _ in range(2)]
    assert [(each.status_int, each.body, "ETag" in each.headers) for each in answers] == [(500, b"error", False)] * 2
    assert site.runs == 1


@pytest.mark.parametrize("written", [False, True], ids=["chunks", "write()"])
@pytest.mark.parametrize("config", [AT_ONCE, TINY], ids=["held back", "sent"])
def test_an_answer_of_which_something_is_out_is_not_mixed_with_another(config: dict[str, Any], written: bool) -> None:
    site = Site(_answering_anew([b"partial"], written=written), config=config)
    with pytest.raises(ValueError, match="half way"):
        site.call()
    assert (code_of(site), site.runs) == ("outcome_unknown", 1)


# Streaming


def test_a_response_is_read_to_its_end_and_saved_before_its_first_byte_is_sent() -> None:
    events: list[str] = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        try:
            start_response("200 OK", [*TEXT])
            yield b"a"
            yield b"b"
            events.append("end")
        finally:
            events.append("finally")

    def start_response(*head: Any) -> Any:
        events.append("sent")
        events.append(site.get("/call-1").json["state"])

    site = Site(handler)
    assert b"".join(site.middleware(environ_of(), start_response)) == b"ab"
    assert events == ["end", "finally", "sent", "done"]


def test_a_response_that_cannot_be_sent_is_what_a_retry_gets() -> None:
    def start_response(*head: Any) -> Any:
        raise BrokenPipeError

    site = Site(answer(b"made", "201 Created"))
    with pytest.raises(BrokenPipeError):
        site.middleware(environ_of(), start_response)
    repeat = site.call()
    assert (repeat.status, repeat.body, site.runs) == ("201 Created", b"made", 1)


def test_a_response_that_nobody_reads_is_what_a_retry_gets() -> None:
    site = Site(answer(b"made"))
    site.opened()
    assert site.call().body == b"made"


@pytest.mark.parametrize(
    "chunks",
    [[b"1234", b"5", b"678", b""], [b"", b"12345678"], [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8"]],
    ids=["one over", "all at once", "byte by byte"],
)
def test_a_response_that_is_too_large_reaches_the_first_caller_whole(chunks: list[bytes]) -> None:
    body = Body(*chunks)
    site = Site(giving(body, "201 Created"), config=TINY)
    first = site.call()
    assert (first.status, first.body, body.closed) == ("201 Created", b"12345678", 1)
    repeat = site.call()
    assert (repeat.status_int, repeat.json["code"], repeat.json["saved_status"]) == (409, "response_too_large", 201)
    assert site.cancel().json == {
        "received": True,
        "state": "done",
        "status": 201,
        "content_type": "text/plain",
        "body_too_large": True,
    }
    assert site.runs == 1


def test_a_response_that_is_too_large_streams_on() -> None:
    made = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", [*TEXT])
        for number in range(100):
            made.append(number)
            yield b"abc"

    site = Site(handler, config=TINY)
    body = site.opened()
    assert len(made) == 2
    assert next(body) == b"abcabc"
    assert next(body) == b"abc"
    assert len(made) == 3
    assert b"".join(body) == b"abc" * 97
    body.close()


def test_a_run_that_streams_on_ends_at_close() -> None:
    site = Site(answer(b"12345", "201 Created"), config=TINY)
    body = site.opened()
    assert code_of(site) == "still_running"
    assert list(body) == [b"12345"]
    assert code_of(site) == "still_running"
    body.close()
    assert code_of(site) == "response_too_large"


def test_who_waits_for_a_run_that_streams_on_is_answered_at_its_close() -> None:
    site = Site(answer(b"12345"), store=(store := WatchedStore()), config={"RUNONCE_MAX_BODY_BYTES": 4})
    body = site.opened()
    repeat, cancel = in_thread(site.call), None
    store.await_waiting()
    cancel = in_thread(site.cancel)
    store.await_waiting(2)
    list(body)
    body.close()
    assert repeat.result(LIMIT).json["code"] == "response_too_large"
    assert cancel.result(LIMIT).json["body_too_large"] is True


@pytest.mark.parametrize("reads", [0, 1])
def test_a_response_that_streams_on_and_is_closed_early_leaves_the_outcome_unknown(reads: int) -> None:
    app_body = Body(b"12345", b"678")
    site = Site(giving(app_body), config=TINY)
    body = site.opened()
    for _ in range(reads):
        next(body)
    body.close()
    assert (code_of(site), app_body.closed, site.runs) == ("outcome_unknown", 1, 1)


def test_a_response_that_streams_on_and_cannot_be_sent_leaves_the_outcome_unknown() -> None:
    def start_response(*head: Any) -> Any:
        raise BrokenPipeError

    app_body = Body(b"12345")
    site = Site(giving(app_body), config=TINY)
    with pytest.raises(BrokenPipeError):
        site.middleware(environ_of(), start_response)
    assert app_body.closed == 1
    assert (code_of(site), site.runs) == ("outcome_unknown", 1)


def _thrown_away(site: Site) -> None:
    """A server that takes the response of call-1 and drops it without a close()."""
    iter(site.opened())
    gc.collect()


def test_a_response_that_streams_on_and_is_thrown_away_leaves_the_outcome_unknown() -> None:
    app_body = Body(b"12345")
    site = Site(giving(app_body), config=TINY)
    _thrown_away(site)
    assert (code_of(site), app_body.closed, site.runs) == ("outcome_unknown", 1, 1)


@pytest.mark.parametrize("next_request", ["a call", "a cancel", "a list"])
def test_who_waits_for_what_was_thrown_away_is_answered_with_the_next_request(next_request: str) -> None:
    site = Site(answer(b"12345"), store=(store := WatchedStore()), config={"RUNONCE_MAX_BODY_BYTES": 4})
    body = site.opened()
    repeat = in_thread(site.call)
    store.await_waiting()
    del body
    gc.collect()
    {"a call": lambda: site.call("call-2"), "a cancel": lambda: site.cancel("call-2"), "a list": site.get}[
        next_request
    ]()
    assert repeat.result(LIMIT).json["code"] == "outcome_unknown"


@pytest.mark.parametrize(
    "handler", [giving(Body(b"12345", error=ValueError())), _yields_in_finally], ids=["body", "generator"]
)
def test_what_was_thrown_away_and_cannot_be_closed_is_not_the_next_requests_trouble(handler: Handler) -> None:
    site = Site(handler, linted=False, config=TINY)
    _thrown_away(site)
    site.handler = answer(b"ok")
    assert site.call("call-2").body == b"ok"
    assert (code_of(site), site.runs) == ("outcome_unknown", 2)


def test_what_the_garbage_collector_finds_does_not_lock_the_store() -> None:
    now: Callable[[], float] = time.monotonic
    timers = [now]  # the store asks its timer with its lock held
    store = MemoryStore(timer=lambda: timers[0]())
    site = Site(giving(Body(b"12345")), store=store, linted=False, config={"RUNONCE_MAX_BODY_BYTES": 4})
    gc.disable()
    try:
        cycle: list[Any] = [site.opened()]
        cycle.append(cycle)
        del cycle

        def collecting() -> float:
            timers[0] = now
            gc.collect()
            return now()

        timers[0] = collecting
        site.handler = answer(b"ok")
        assert in_thread(site.call, "call-2").result(LIMIT).status_int == 200
        assert timers[0] is now
    finally:
        gc.enable()
    assert code_of(site) == "outcome_unknown"


@pytest.mark.parametrize("by", ["release", "status"])
def test_a_released_call_may_stream_on(by: str) -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("429 Too Many Requests" if by == "status" else "200 OK", [*TEXT])
        yield b"12345"
        if by == "release":
            current_call.release()
        yield b"678"

    site = Site(handler, config=TINY)
    assert [site.call().body for _ in range(2)] == [b"12345678"] * 2
    assert site.runs == 2


# A result budget, where the app streams or writes

BUDGET = 64
BUDGETED = {**AT_ONCE, "RUNONCE_MAX_BODY_BYTES": 100, "RUNONCE_RESULT_BUDGET": BUDGET}


def _writing(*chunks: bytes, headers: list[tuple[str, str]] = TEXT) -> Handler:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        write = start_response("200 OK", [*headers])
        for chunk in chunks:
            write(chunk)
        return []

    return handler


def _yielding(*chunks: bytes, headers: list[tuple[str, str]] = TEXT) -> Handler:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [*headers])
        return chunks

    return handler


each_way = pytest.mark.parametrize("way", [_writing, _yielding], ids=["write()", "chunks"])


@each_way
def test_a_long_text_is_cut_however_it_comes(way: Callable[..., Handler]) -> None:
    site = Site(way(*[b"x" * 50] * 10), config=BUDGETED)
    answers = [ask(site.middleware, environ_of()) for _ in range(2)]
    assert answers[0].body == answers[1].body
    assert b"left out" in answers[0].body
    for reply in answers:
        assert len(reply.body) <= BUDGET
        assert [value for name, value in reply.headers if name == "Content-Length"] == [str(len(reply.body))]
    assert site.runs == 1


@each_way
@pytest.mark.parametrize(
    "headers",
    [[("Content-Type", "application/octet-stream")], [*TEXT, ("Content-Encoding", "br")]],
    ids=["no text", "compressed"],
)
def test_what_a_budget_does_not_apply_to_is_not_cut(
    way: Callable[..., Handler], headers: list[tuple[str, str]]
) -> None:
    site = Site(way(*[b"x" * 50] * 10, headers=headers), config=BUDGETED)
    assert ask(site.middleware, environ_of()).body == b"x" * 500
    assert code_of(site) == "response_too_large"
    site = Site(way(b"x" * 80, headers=headers), config=BUDGETED)
    for _ in range(2):
        assert ask(site.middleware, environ_of()).body == b"x" * 80


@each_way
@pytest.mark.parametrize("size", [101, 150, 199, 200])
def test_a_text_within_its_budget_may_still_be_too_large_to_keep(way: Callable[..., Handler], size: int) -> None:
    chunks = [b"x" * 50] * (size // 50) + [b"x" * (size % 50)]
    site = Site(way(*chunks), config={**BUDGETED, "RUNONCE_RESULT_BUDGET": 200})
    assert site.call().body == b"x" * size
    assert code_of(site) == "response_too_large"


# close(), exactly once


@pytest.mark.parametrize("config", [{}, TINY], ids=["saved", "streams on"])
def test_a_body_is_closed_once(config: dict[str, Any]) -> None:
    app_body = Body(b"12345", b"678")
    site = Site(giving(app_body), config=config)
    for _ in range(2):
        site.call()
    assert app_body.closed == 1


def test_a_body_that_streams_on_is_closed_once_by_a_server_that_closes_twice() -> None:
    app_body = Body(b"12345")
    site = Site(giving(app_body), config=TINY)
    body = site.opened()
    list(body)
    body.close()
    body.close()
    del body
    gc.collect()
    assert (app_body.closed, code_of(site)) == (1, "response_too_large")


@pytest.mark.parametrize("chunks", [[b"1"], [b"12345", b"678"]], ids=["saved", "streams on"])
@pytest.mark.parametrize("close_error", [None, ValueError("in close")], ids=["closes", "cannot be closed"])
def test_a_body_whose_iteration_raises_is_closed_once(chunks: list[bytes], close_error: Exception | None) -> None:
    class Failing(Body):
        def __iter__(self) -> Iterator[bytes]:
            yield from self.chunks
            raise LookupError("half way")

    app_body = Failing(*chunks, error=close_error)
    site = Site(giving(app_body), config=TINY)
    with pytest.raises(ValueError if close_error else LookupError):
        site.call()
    assert (app_body.closed, code_of(site), site.runs) == (1, "outcome_unknown", 1)


class _Iterator:
    """An iterator that counts how often it is closed, too."""

    def __init__(self) -> None:
        self.chunks = iter([b"12345", b"678"])
        self.closed = 0

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> bytes:
        return next(self.chunks)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("config", [{}, TINY], ids=["saved", "streams on"])
def test_the_iterable_is_closed_and_not_its_iterator(config: dict[str, Any]) -> None:
    iterator = _Iterator()

    class Iterable(Body):
        def __iter__(self) -> Iterator[bytes]:
            return iterator

    app_body = Iterable()
    site = Site(giving(app_body), linted=False, config=config)
    assert site.call().body == b"12345678"
    assert (app_body.closed, iterator.closed) == (1, 0)


@pytest.mark.parametrize("config", [{}, TINY], ids=["saved", "streams on"])
def test_a_generators_finally_runs_once(config: dict[str, Any]) -> None:
    ended = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        try:
            start_response("200 OK", [*TEXT])
            yield b"12345"
            yield b"678"
        finally:
            ended.append(True)

    site = Site(handler, config=config)
    assert site.call().body == b"12345678"
    site.call()
    assert ended == [True]


@pytest.mark.parametrize("config", [{}, {"RUNONCE_MAX_BODY_BYTES": 4}], ids=["saved", "streams on"])
def test_a_yield_in_a_generators_finally_is_a_chunk(config: dict[str, Any]) -> None:
    site = Site(_yields_in_finally, config=config)
    assert site.call().body == b"12345678."


def test_a_yield_in_the_finally_of_a_generator_that_is_closed_early_leaves_the_outcome_unknown() -> None:
    site = Site(_yields_in_finally, linted=False, config=TINY)
    body = site.opened()
    next(body)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        body.close()
    body.close()
    assert (code_of(site), site.runs) == ("outcome_unknown", 1)


# Handlers that fail: nobody is left waiting, nobody runs them again


class Killed(BaseException):
    """What a greenlet's kill raises."""


Meanwhile = Callable[[], object]
Failing = Callable[[BaseException, Meanwhile], Handler]


def _before_start_response(error: BaseException, meanwhile: Meanwhile) -> Handler:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        meanwhile()
        raise error

    return handler


def _after_start_response(error: BaseException, meanwhile: Meanwhile) -> Handler:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [*TEXT])
        meanwhile()
        raise error

    return handler


def _after_write(error: BaseException, meanwhile: Meanwhile) -> Handler:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [*TEXT])(b"12")
        meanwhile()
        raise error

    return handler


def _after_write_past_the_bound(error: BaseException, meanwhile: Meanwhile) -> Handler:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [*TEXT])(b"12345")
        meanwhile()
        raise error

    return handler


def _streaming(*chunks: bytes) -> Failing:
    def make(error: BaseException, meanwhile: Meanwhile) -> Handler:
        def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
            start_response("200 OK", [*TEXT])
            yield from chunks
            meanwhile()
            raise error

        return handler

    return make


def _closing(*chunks: bytes) -> Failing:
    def make(error: BaseException, meanwhile: Meanwhile) -> Handler:
        def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
            start_response("200 OK", [*TEXT])
            meanwhile()
            return Body(*chunks, error=error)

        return handler

    return make


MOMENTS: dict[str, Failing] = {
    "before start_response": _before_start_response,
    "before it streams": _after_start_response,
    "after write()": _after_write,
    "after write() past the bound": _after_write_past_the_bound,
    "before its first chunk": _streaming(),
    "while it streams": _streaming(b"1", b"2"),
    "while it streams on": _streaming(b"12345", b"678"),
    "at close()": _closing(b"1"),
    "at close(), with nothing streamed": _closing(),
    "at close(), after it has streamed on": _closing(b"12345", b"678"),
}
ERRORS = [ValueError("on purpose"), SystemExit(1), GeneratorExit(), KeyboardInterrupt(), Killed()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS)
def test_a_handler_that_fails_leaves_nobody_waiting_and_is_not_run_again(make: Failing, error: BaseException) -> None:
    store = WatchedStore()
    waiting: list[Future[Any]] = []

    def meanwhile() -> None:
        waiting.append(in_thread(site.call))
        store.await_waiting()

    site = Site(make(error, meanwhile), store=store, config={"RUNONCE_MAX_BODY_BYTES": 4})
    with pytest.raises(type(error)) as caught:
        site.call()
    assert caught.value is error
    for reply in (waiting[0].result(LIMIT), site.call()):
        assert (reply.status_int, reply.json["code"]) == (500, "outcome_unknown")
    assert site.runs == 1
    assert site.cancel().json["status"] == 500
    assert not current_call


def test_a_failure_that_nobody_asks_about_is_not_left_running() -> None:
    site = Site(_before_start_response(ValueError(), lambda: None))
    with pytest.raises(ValueError):
        site.call()
    described = site.get("/call-1").json
    assert (described["state"], described["status"]) == ("done", 500)


def _broken_stream(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
    start_response("200 OK", [*TEXT])
    yield b"12345"
    raise ValueError("half way")


def test_a_stream_that_failed_is_unknown_although_it_is_asked_again() -> None:
    site = Site(_broken_stream, config=TINY)
    body = site.opened()
    assert next(body) == b"12345"
    with pytest.raises(ValueError, match="half way"):
        next(body)
    assert list(body) == []  # a generator that raised is at its end
    body.close()
    assert code_of(site) == "outcome_unknown"


# What cannot be saved

UNSAVABLE: dict[str, tuple[Any, Any, Any]] = {
    "a status without a number": ("OK", TEXT, [b"12345"]),
    "a status that is no string": (200, TEXT, [b"12345"]),
    "a header value that is no string": ("200 OK", [*TEXT, ("Link", 3)], [b"12345"]),
    "a header name that is no string": ("200 OK", [*TEXT, (None, "</a>")], [b"12345"]),
    "a header that is no pair": ("200 OK", [("Link",)], [b"12345"]),
    "a body of strings": ("200 OK", TEXT, ["12345"]),
    "a body of numbers": ("200 OK", TEXT, [1]),
    "a body that is none": ("200 OK", TEXT, None),
}


@pytest.mark.parametrize("config", [AT_ONCE, TINY], ids=["saved", "streams on"])
@pytest.mark.parametrize(("status", "headers", "chunks"), UNSAVABLE.values(), ids=UNSAVABLE)
def test_a_response_that_cannot_be_saved_ends_the_run(
    status: Any, headers: Any, chunks: Any, config: dict[str, Any]
) -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Any:
        start_response(status, [*headers])
        return chunks

    site = Site(handler, linted=False, config=config)
    with pytest.raises((TypeError, ValueError, AttributeError, AssertionError)):
        ask(site.middleware, environ_of())
    assert (code_of(site), site.runs) == ("outcome_unknown", 1)


# Threads


def test_a_body_may_be_read_and_closed_in_another_thread() -> None:
    """As by a server that hands streams to a pool: `current_call` is set wherever the app's code runs."""
    told = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", [*TEXT])
        for _ in range(3):
            told.append((bool(current_call), threading.current_thread()))
            yield b"12345"

    site = Site(handler, config=TINY)
    body = site.opened()
    assert in_thread(next, body).result(LIMIT) == b"12345"
    assert in_thread(next, body).result(LIMIT) == b"12345"
    assert in_thread(lambda: list(body)).result(LIMIT) == [b"12345"]
    in_thread(body.close).result(LIMIT)
    assert [there for there, _ in told] == [True] * 3
    assert len({thread for _, thread in told}) == 3
    assert code_of(site) == "response_too_large"
