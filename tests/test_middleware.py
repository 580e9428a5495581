"""The middleware over plain WSGI apps: the tables of CONTRACT.md sections 4 and 5, and the corners of PEP 3333."""

from __future__ import annotations

import gc
import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import webob
from werkzeug.exceptions import Unauthorized

from flask_runonce import RunOnceMiddleware
from flask_runonce.stores import MemoryStore
from flask_runonce.stores.protocol import Swapped
from tests.plain_app import LIMIT, TEXT, Environ, Site, answer, environ_of

AT_ONCE = {"RUNONCE_WAIT_TIMEOUT": 0, "RUNONCE_CANCEL_TIMEOUT": 0}
"""No repeat and no cancel waits, so a run that was left behind shows as still_running."""


# What cannot be saved

UNSAVABLE = {
    "status without a number": ("OK", TEXT),
    "header value that is no string": ("200 OK", [*TEXT, ("Link", 3)]),
    "header name that is no string": ("200 OK", [*TEXT, (None, "</a>")]),
}


@pytest.mark.parametrize(("status", "headers"), UNSAVABLE.values(), ids=UNSAVABLE)
def test_a_response_that_cannot_be_saved_ends_the_run(status: Any, headers: Any) -> None:
    site = Site(answer(status=status, headers=headers), linted=False, config=AT_ONCE)
    with pytest.raises((TypeError, ValueError, AttributeError, AssertionError)):
        site.call()
    repeat = site.call()
    assert (repeat.json["code"], site.runs) == ("outcome_unknown", 1)


@pytest.mark.parametrize(("status", "headers"), UNSAVABLE.values(), ids=UNSAVABLE)
def test_a_streamed_response_that_cannot_be_saved_ends_the_run(status: Any, headers: Any) -> None:
    config = {**AT_ONCE, "RUNONCE_MAX_BODY_BYTES": 4}
    site = Site(answer(b"x" * 9, status=status, headers=headers), linted=False, config=config)
    with pytest.raises((TypeError, ValueError, AttributeError, AssertionError)):
        body: Any = site.middleware(environ_of(), lambda *head: io.BytesIO().write)
        list(body)
        body.close()
    repeat = site.call(path="/")
    assert (repeat.json["code"], site.runs) == ("outcome_unknown", 1)


# exc_info (PEP 3333, "Error Handling"): an app that answers anew after some of its body is out must not mix the two


def test_exc_info_after_write_does_not_mix_two_bodies() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        write = start_response("200 OK", [*TEXT, ("Content-Length", "7")])
        write(b"partial")
        try:
            raise ValueError("half way")
        except ValueError:
            start_response("500 Internal Server Error", [*TEXT, ("Content-Length", "5")], sys.exc_info())
        return [b"error"]

    assert _clean_or_raised(Site(handler, linted=False))


def test_exc_info_after_a_chunk_does_not_mix_two_bodies() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", [*TEXT, ("Content-Length", "7")])
        yield b"partial"
        try:
            raise ValueError("half way")
        except ValueError:
            start_response("500 Internal Server Error", [*TEXT, ("Content-Length", "5")], sys.exc_info())
        yield b"error"

    assert _clean_or_raised(Site(handler, linted=False))


def _clean_or_raised(site: Site) -> bool:
    try:
        first = site.call()
    except ValueError:
        return bool(site.call().json["code"] == "outcome_unknown")
    return (first.status_int, first.body, site.call().body) == (500, b"error", b"error")


# The tail of a response that is too large to keep


def _broken_stream(environ: Environ, start_response: Callable[..., Any]) -> Iterator[bytes]:
    start_response("200 OK", TEXT)
    yield b"x" * 9
    raise ValueError("half way")


def test_a_tail_that_failed_is_unknown_although_it_is_asked_again() -> None:
    site = Site(_broken_stream, config={**AT_ONCE, "RUNONCE_MAX_BODY_BYTES": 4})
    body: Any = site.middleware(environ_of(), lambda *head: io.BytesIO().write)
    assert next(body) == b"x" * 9
    with pytest.raises(ValueError, match="half way"):
        next(body)
    assert list(body) == []  # a generator that raised is at its end
    body.close()
    assert site.call(path="/").json["code"] == "outcome_unknown"


def test_a_tail_that_the_garbage_collector_finds_does_not_lock_the_store() -> None:
    now: Callable[[], float] = time.monotonic
    timers = [now]  # the store asks its timer with its lock held
    store = MemoryStore(timer=lambda: timers[0]())
    site = Site(answer(b"x" * 9), store=store, linted=False, config={"RUNONCE_MAX_BODY_BYTES": 4})
    gc.disable()
    try:
        cycle: list[Any] = [site.middleware(environ_of(), lambda *head: io.BytesIO().write)]
        cycle.append(cycle)
        del cycle

        def collecting() -> float:
            timers[0] = now
            gc.collect()
            return now()

        timers[0] = collecting
        other = threading.Thread(target=lambda: site.call("call-2"), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()
    finally:
        gc.enable()
    assert site.call(path="/").json["code"] == "outcome_unknown"


# Cancels


class _InterruptedStore(MemoryStore):
    """Calls `then()` once, right after the next swap."""

    then: Callable[[], object] | None = None

    def swap(self, *args: Any, **kwargs: Any) -> Swapped:
        swapped = super().swap(*args, **kwargs)
        then, self.then = self.then, None
        if then:
            then()
        return swapped


def test_a_cancel_between_the_claim_and_the_handler_reaches_the_handler() -> None:
    told = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        told.append(environ["runonce.call"].canceled)
        return answer()(environ, start_response)

    store = _InterruptedStore()
    site = Site(handler, store=store, config=AT_ONCE)
    canceled = []
    store.then = lambda: canceled.append(site.cancel())
    site.call()
    assert (canceled[0].status_int, canceled[0].json) == (202, {"received": True, "state": "running"})
    assert told == [True]


# The request body


def test_a_fingerprint_callable_that_reads_a_large_body_leaves_it_to_the_handler() -> None:
    bodies = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        bodies.append(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        return answer()(environ, start_response)

    site = Site(
        handler,
        fingerprint=lambda environ: environ["wsgi.input"].read(8),
        config={"RUNONCE_FINGERPRINT_BYTES": 4},
    )
    first = site.call(body=b"12345678")
    refused = first.status_int == 500 and first.json["code"] == "key_failed"  # as good: the handler did not run
    assert bodies == ([] if refused else [b"12345678"])


@pytest.mark.parametrize("size", [3, 9])
def test_a_body_that_webob_made_seekable_is_readable_for_webob(size: int) -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = webob.Request(environ)
        assert request.body == request.body  # WebOb rewinds between the two
        return answer(request.body)(environ, start_response)

    site = Site(handler, config={"RUNONCE_FINGERPRINT_BYTES": 4})
    request = webob.Request.blank("/", POST=b"x" * size)
    request.headers.update({"Coder-Chat-Id": "chat-1", "Coder-Tool-Call-Id": "call-1"})
    assert request.is_body_seekable
    assert request.get_response(site.middleware).body == b"x" * size


@pytest.mark.parametrize("callable_name", ["key", "scope", "fingerprint"])
def test_a_body_is_drained_before_an_http_exception_answers(callable_name: str) -> None:
    def refuse(environ: Environ) -> Any:
        raise Unauthorized

    site = Site(answer(), **{callable_name: refuse}, config={"RUNONCE_FINGERPRINT_BYTES": 4})
    body = io.BytesIO(b"x" * 9)
    heads: list[str] = []
    environ = environ_of(CONTENT_LENGTH="9")
    environ["wsgi.input"] = body
    site.middleware(environ, lambda status, *rest: heads.append(status))  # type: ignore[arg-type,func-returns-value]
    assert (heads, body.read(), site.runs) == (["401 UNAUTHORIZED"], b"", 0)


# Log lines


def _raise(environ: Environ) -> Any:
    raise ValueError("no")


@pytest.mark.parametrize("callable_name", ["key", "scope", "guard", "fingerprint"])
def test_the_log_line_of_a_callable_that_raised_carries_the_ids(
    callable_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(answer(), **{callable_name: _raise})
    caplog.set_level(logging.DEBUG, "flask_runonce")
    (site.cancel if callable_name == "guard" else site.call)()
    assert any(record.exc_info for record in caplog.records)
    _carry_ids(caplog)


def test_the_warning_of_open_routes_carries_the_extras(caplog: pytest.LogCaptureFixture) -> None:
    RunOnceMiddleware(answer())
    assert "open to whoever reaches them" in caplog.text
    _carry_ids(caplog)


def _carry_ids(caplog: pytest.LogCaptureFixture) -> None:
    for record in caplog.records:
        assert hasattr(record, "chat_id") and hasattr(record, "tool_call_id"), record.getMessage()


# Ten at once


def test_ten_concurrent_requests_are_one_run_with_equal_answers() -> None:
    start = threading.Barrier(10)
    waiting = threading.Event()
    answers = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        assert waiting.wait(LIMIT)
        return answer(b"once", "201 Created")(environ, start_response)

    site = Site(handler)

    def send() -> None:
        start.wait(LIMIT)
        answers.append(site.call())

    threads = [threading.Thread(target=send) for _ in range(10)]
    for thread in threads:
        thread.start()
    waiting.set()
    for thread in threads:
        thread.join(LIMIT)
    assert site.runs == 1
    assert [(each.status_int, each.body) for each in answers] == [(201, b"once")] * 10
    assert sum("Idempotent-Replayed" in each.headers for each in answers) == 9
