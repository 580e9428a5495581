"""The middleware over plain WSGI apps: the request table and what stands around it (CONTRACT.md section 4)."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import webob
from werkzeug.exceptions import HTTPException, Unauthorized
from werkzeug.wrappers import Response

from flask_runonce import CallKey, RunOnceMiddleware, current_call, keys
from flask_runonce.errors import StoreUnavailable
from flask_runonce.record import Seen
from flask_runonce.stores import MemoryStore, Swapped
from tests.plain_app import (
    AT_ONCE,
    LIMIT,
    TEXT,
    Environ,
    Handler,
    LeasedStore,
    PatientStore,
    Site,
    WatchedStore,
    answer,
    ask,
    environ_of,
    in_thread,
)

CANONICAL = "0af4d6d3-691c-45dd-ac54-55ea97970ebc"


def codes(*answers: Any) -> list[str]:
    return [each.json["code"] for each in answers]


def replayed(reply: Any) -> bool:
    return bool(reply.headers.get("Idempotent-Replayed") == "true")


def reads_body(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
    """A handler that answers with the body that it was sent."""
    return answer(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))(environ, start_response)


# The request table, row by row


def test_none_the_handler_runs_and_its_response_is_saved() -> None:
    site = Site(answer(b"made", "201 Created"))
    first = site.call()
    assert (first.status, first.body, replayed(first), site.runs) == ("201 Created", b"made", False, 1)
    assert site.get("/call-1").json["state"] == "done"


def test_canceled_before_it_arrived_409_at_once() -> None:
    site = Site(answer(), store=(store := WatchedStore()))
    site.cancel()
    refused = [site.call(), site.call(), site.call(path="/other", body=b"another input")]
    assert [each.status_int for each in refused] == [409] * 3
    assert codes(*refused) == ["canceled"] * 3
    assert (site.runs, store.waits) == (0, [])


def test_canceled_while_it_runs_409_at_once_for_those_who_come_later() -> None:
    site = Site(answer(), store=(store := WatchedStore()))
    with site.held():
        cancel = in_thread(site.cancel)
        store.await_waiting()
        assert codes(site.call(), site.call(path="/other")) == ["canceled"] * 2
        assert len(store.waits) == 1
    cancel.result(LIMIT)
    assert codes(site.call()) == ["canceled"]
    assert site.runs == 1


OTHER_INPUTS: dict[str, dict[str, Any]] = {
    "method": {"method": "PUT"},
    "path": {"path": "/other?a=1"},
    "query string": {"path": "/act?a=2"},
    "body": {"body": b"another"},
    "no body": {"body": b""},
}


@pytest.mark.parametrize("other", OTHER_INPUTS.values(), ids=OTHER_INPUTS)
def test_other_fingerprint_409_at_once_when_done(other: dict[str, Any]) -> None:
    site = Site(answer())
    request = {"path": "/act?a=1", "body": b"input"}
    site.call(**request)
    refused = site.call(**{**request, **other})
    assert (refused.status_int, refused.json["code"], site.runs) == (409, "input_mismatch", 1)
    assert replayed(site.call(**request))


@pytest.mark.parametrize("other", OTHER_INPUTS.values(), ids=OTHER_INPUTS)
def test_other_fingerprint_409_at_once_while_the_run_goes_on(other: dict[str, Any]) -> None:
    site = Site(answer(), store=(store := WatchedStore()))
    request = {"path": "/act?a=1", "body": b"input"}
    with site.held(**request):
        assert codes(site.call(**{**request, **other})) == ["input_mismatch"]
    assert (site.runs, store.waits) == (1, [])


def test_running_a_repeat_waits_and_gets_the_saved_response() -> None:
    site = Site(answer(b"once", "201 Created"), store=(store := WatchedStore()))
    with site.held() as first:
        repeat = in_thread(site.call)
        store.await_waiting()
    answers = [first.result(LIMIT), repeat.result(LIMIT)]
    assert [(each.status, each.body, replayed(each)) for each in answers] == [
        ("201 Created", b"once", False),
        ("201 Created", b"once", True),
    ]
    assert site.runs == 1


def test_running_past_the_wait_timeout_409_with_retry_after() -> None:
    site = Site(answer(), config=AT_ONCE)
    with site.held():
        refused = site.call()
    assert (refused.status_int, refused.json["code"]) == (409, "still_running")
    assert int(refused.headers["Retry-After"]) > 0
    assert replayed(site.call())


def test_running_beyond_max_waiting_409_at_once() -> None:
    site = Site(answer(), store=(store := WatchedStore()), config={"RUNONCE_MAX_WAITING": 2})
    with site.held():
        waiting = [in_thread(site.call) for _ in range(2)]
        store.await_waiting(2)
        assert codes(site.call(), site.call()) == ["still_running"] * 2
        assert len(store.waits) == 2
    assert all(replayed(each.result(LIMIT)) for each in waiting)


def test_running_owner_lost_500_outcome_unknown() -> None:
    site = Site(answer(b"late"), store=(store := LeasedStore()))
    with site.held() as first:
        store.dead = True
        lost = site.call()
        assert (lost.status_int, lost.json["code"]) == (500, "outcome_unknown")
        assert site.get("/call-1").json["status"] == 500
    assert first.result(LIMIT).body == b"late"  # its own client still gets its response
    assert codes(site.call()) == ["outcome_unknown"]  # and the late end changes nothing
    assert site.runs == 1


def test_running_owner_lost_reruns_where_that_is_safe() -> None:
    site = Site(answer(b"again"), store=(store := LeasedStore()), config={"RUNONCE_ON_LOST": "rerun"})
    with site.held() as first:
        store.dead = True
        assert site.call().body == b"again"
        store.dead = False
        site.handler = answer(b"never")
    assert first.result(LIMIT).body == b"again"
    assert site.call().body == b"again"
    assert site.runs == 2


def test_running_owner_lost_a_rerun_that_does_nothing_leaves_it_lost() -> None:
    """What the lost run did is still unknown, so the call is not forgotten."""
    site = Site(answer(), store=(store := LeasedStore()), config={"RUNONCE_ON_LOST": "rerun"})
    with site.held():
        store.dead = True
        site.handler = answer(b"busy", "429 Too Many Requests")
        assert site.call().body == b"busy"
        assert site.get("/call-1").json["state"] == "running"
        site.handler = answer(b"again")
        assert site.call().body == b"again"
    assert site.call().body == b"again"
    assert site.runs == 3


def test_running_owner_lost_wakes_those_who_wait() -> None:
    site = Site(answer(), store=(store := LeasedStore()))
    with site.held():
        store.lease = 0.05
        repeat = in_thread(site.call)
        store.await_waiting()
        store.dead = True
        assert repeat.result(LIMIT).json["code"] == "outcome_unknown"


def test_done_the_saved_response_again_and_again() -> None:
    site = Site(answer(b"made", "201 Made Here"))
    first = site.call()
    for _ in range(3):
        repeat = site.call()
        assert (repeat.status, repeat.body) == (first.status, first.body)
        assert replayed(repeat)
    assert site.runs == 1


def test_done_the_response_was_too_large() -> None:
    site = Site(answer(b"x" * 9, "201 Created"), config={"RUNONCE_MAX_BODY_BYTES": 4})
    assert site.call().body == b"x" * 9
    refused = site.call()
    assert (refused.status_int, refused.json["code"], refused.json["saved_status"]) == (409, "response_too_large", 201)
    assert site.runs == 1


def test_a_large_answer_that_is_no_stream_is_done_before_it_is_read() -> None:
    site = Site(answer(b"x" * 9), linted=False, config={"RUNONCE_MAX_BODY_BYTES": 4})
    body = site.opened()
    refused = site.call()
    assert (refused.json["code"], refused.json["saved_status"]) == ("response_too_large", 200)
    assert b"".join(body) == b"x" * 9


# What is a call


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_method_that_acts_runs_once(method: str) -> None:
    site = Site(answer())
    assert [replayed(site.call(method=method)) for _ in range(2)] == [False, True]
    assert site.runs == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE"])
def test_a_method_that_reads_passes_through(method: str) -> None:
    site = Site(answer(b""))
    for _ in range(2):
        assert not replayed(site.call(method=method))
    assert site.runs == 2
    assert site.get().json["total"] == 0


@pytest.mark.parametrize("ids", [(None, "chat-1"), ("call-1", None), (None, None), (None, "a,b")])
def test_a_request_without_both_ids_passes_through(ids: tuple[str | None, str | None]) -> None:
    site = Site(reads_body)
    assert [site.call(*ids, body=b"input").body for _ in range(2)] == [b"input"] * 2
    assert site.runs == 2
    assert site.get().json["total"] == 0


def test_what_passes_through_is_not_touched() -> None:
    seen = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        seen.append((environ["wsgi.input"], start_response, "runonce.call" in environ))
        return body

    body: list[bytes] = []
    wrapped = RunOnceMiddleware(handler, guard=lambda environ: None)
    environ = environ_of(body=b"x")
    del environ["HTTP_CODER_TOOL_CALL_ID"]
    given: Any = environ["wsgi.input"], lambda *head: None
    assert wrapped(environ, given[1]) is body
    assert seen == [(*given, False)]


MALFORMED = {
    "empty": "",
    "blanks": "  ",
    "256 characters": "x" * 256,
    "a comma": "call-1,call-2",
    "sent twice": "call-1, call-1",
    "a blank within": "a b",
    "a byte over 127": "caf\xe9",
    "a control character": "a\x7fb",
    "the nil UUID": "00000000-0000-0000-0000-000000000000",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("header", ["HTTP_CODER_TOOL_CALL_ID", "HTTP_CODER_CHAT_ID"])
def test_a_malformed_id_400_and_nothing_is_recorded(header: str, text: str) -> None:
    site = Site(answer())
    refused = site.call(None, None, environ={**_IDS, header: text})
    assert (refused.status_int, refused.json["code"], site.runs) == (400, "invalid_key", 0)
    assert ("tool call ID" if "TOOL" in header else "chat ID") in refused.json["detail"]
    assert site.store.list().total == 0


_IDS = {"HTTP_CODER_TOOL_CALL_ID": "call-1", "HTTP_CODER_CHAT_ID": "chat-1"}


def test_a_malformed_tool_call_id_is_refused_without_a_chat_id_too() -> None:
    site = Site(answer())
    assert (codes(site.call("a,b", None)), site.runs) == (["invalid_key"], 0)


def test_each_spelling_of_a_uuid_is_the_same_call() -> None:
    site = Site(answer())
    for spelling in (
        CANONICAL,
        CANONICAL.upper(),
        f"{{{CANONICAL}}}",
        f"urn:uuid:{CANONICAL}",
        CANONICAL.replace("-", ""),
    ):
        site.call(spelling, spelling)
    assert site.runs == 1
    assert site.get(f"/{CANONICAL.upper()}", chat_id=CANONICAL).json["id"] == CANONICAL


def test_blanks_around_an_id_do_not_count() -> None:
    site = Site(answer())
    for text in ("call-1", " call-1", "call-1\t "):
        site.call(text, f" {'chat-1'} ")
    assert site.runs == 1


def test_the_same_id_in_two_chats_is_two_calls() -> None:
    site = Site(answer())
    assert [replayed(site.call(chat_id=chat_id)) for chat_id in ("chat-1", "chat-2") * 2] == [False] * 2 + [True] * 2
    assert site.runs == 2


def test_the_same_chat_in_two_scopes_is_two_chats() -> None:
    site = Site(answer(), scope=lambda environ: environ.get("HTTP_X_TENANT"))
    for tenant in ({"X-Tenant": "one"}, {"X-Tenant": "two"}, {}) * 2:
        site.call(**tenant)
    assert site.runs == 3


def test_inside_a_run_of_the_same_call_a_second_middleware_steps_aside() -> None:
    inner = Site(answer(b"once"))
    outer = Site(inner.middleware)
    assert [outer.call().body for _ in range(2)] == [b"once"] * 2
    assert (inner.runs, outer.runs) == (1, 1)
    assert inner.store.list().total == 0


# The request body and the fingerprint


@pytest.mark.parametrize("size", [0, 1, 8, 9, 100_000])
def test_the_body_is_the_handlers(size: int) -> None:
    site = Site(reads_body, config={"RUNONCE_FINGERPRINT_BYTES": 8})
    assert site.call(body=b"x" * size).body == b"x" * size


def test_a_body_over_the_bound_is_not_compared_and_a_repeat_leaves_nothing_of_it() -> None:
    site = Site(answer(), config={"RUNONCE_FINGERPRINT_BYTES": 8})
    site.call(body=b"x" * 9)
    repeat = io.BytesIO(b"y" * 9)
    environ = environ_of(CONTENT_LENGTH="9")
    environ["wsgi.input"] = repeat
    assert ask(site.middleware, environ).body == b"done"
    assert repeat.read() == b""


def test_a_chunked_body_is_not_compared_and_is_the_handlers() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        return answer(environ["wsgi.input"].read())(environ, start_response)

    site = Site(handler)
    for body in (b"one", b"two"):
        environ = environ_of(HTTP_TRANSFER_ENCODING="chunked", **{"wsgi.input_terminated": True})
        del environ["CONTENT_LENGTH"]
        environ["wsgi.input"] = io.BytesIO(body)
        assert ask(site.middleware, environ).body == b"one"
    assert site.runs == 1


def test_a_multipart_body_may_have_another_boundary() -> None:
    site = Site(answer())
    for boundary in ("one", "two"):
        body = f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--{boundary}--\r\n'
        reply = site.call(body=body.encode(), **{"Content-Type": f"multipart/form-data; boundary={boundary}"})
    assert (replayed(reply), site.runs) == (True, 1)


def test_a_cut_off_body_400_and_nothing_is_recorded() -> None:
    site = Site(reads_body)
    environ = environ_of(CONTENT_LENGTH="9")
    environ["wsgi.input"] = io.BytesIO(b"12345")
    refused = ask(site.middleware, environ)
    assert (refused.status, refused.code, site.runs) == ("400 Bad Request", "incomplete_body", 0)
    assert site.store.list().total == 0
    assert site.call(body=b"123456789").body == b"123456789"


def test_fingerprint_none_turns_it_off() -> None:
    site = Site(answer(), fingerprint=None)
    site.call(body=b"one")
    assert replayed(site.call(path="/other", method="PUT", body=b"two"))


def test_a_fingerprint_callable_replaces_it() -> None:
    site = Site(reads_body, fingerprint=lambda environ: environ["wsgi.input"].readline())
    assert site.call(body=b"same\none").body == b"same\none"
    assert replayed(site.call(path="/other", body=b"same\ntwo"))
    assert codes(site.call(body=b"another\none")) == ["input_mismatch"]


def test_a_fingerprint_callable_that_reads_a_large_body_leaves_it_to_the_handler() -> None:
    site = Site(
        reads_body, fingerprint=lambda environ: environ["wsgi.input"].read(8), config={"RUNONCE_FINGERPRINT_BYTES": 4}
    )
    assert (codes(site.call(body=b"12345678")), site.runs) == (["key_failed"], 0)


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


# Idle time


def _visits() -> dict[str, Callable[[Site], Any]]:
    return {
        "a repeat": lambda site: site.call(),
        "a repeat that is refused": lambda site: site.call(path="/other"),
        "a cancel": lambda site: site.cancel(),
    }


@pytest.mark.parametrize("visit", _visits().values(), ids=_visits())
def test_who_finds_a_record_starts_its_idle_time_afresh(visit: Callable[[Site], Any]) -> None:
    clock = [0.0]
    site = Site(answer(), store=MemoryStore(timer=lambda: clock[0]), config={"RUNONCE_FORGET_AFTER": 100})
    site.call()
    for _ in range(3):
        clock[0] += 99
        visit(site)
    assert site.get().json["total"] == 1
    clock[0] += 100
    assert site.get().json["total"] == 0


def test_a_call_that_is_refused_as_canceled_starts_its_idle_time_afresh() -> None:
    clock = [0.0]
    site = Site(answer(), store=MemoryStore(timer=lambda: clock[0]), config={"RUNONCE_FORGET_AFTER": 100})
    site.cancel()
    for _ in range(3):
        clock[0] += 99
        assert codes(site.call()) == ["canceled"]
    assert site.runs == 0


def test_the_end_of_a_run_starts_the_idle_time_afresh_and_a_run_never_expires() -> None:
    clock = [0.0]
    site = Site(answer(), store=MemoryStore(timer=lambda: clock[0]), config={"RUNONCE_FORGET_AFTER": 100, **AT_ONCE})
    with site.held():
        clock[0] += 1000
        assert codes(site.call()) == ["still_running"]
    clock[0] += 99
    assert replayed(site.call())
    assert site.runs == 1


def test_what_is_forgotten_runs_again() -> None:
    clock = [0.0]
    site = Site(answer(), store=MemoryStore(timer=lambda: clock[0]), config={"RUNONCE_FORGET_AFTER": 100})
    site.call()
    clock[0] += 100
    assert not replayed(site.call())
    assert site.runs == 2


# Waiting


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> PatientStore:
    return PatientStore(monkeypatch)


def test_a_repeat_waits_25_seconds(patient: PatientStore) -> None:
    site = Site(answer(), store=patient)
    with site.held():
        assert codes(site.call()) == ["still_running"]
    assert (patient.asked, patient.now) == ([25], 25)


def test_a_cancel_waits_25_seconds(patient: PatientStore) -> None:
    site = Site(answer(), store=patient)
    with site.held():
        assert site.cancel().status_int == 202
    assert (patient.asked, patient.now) == ([25], 25)


def test_a_wait_that_wakes_early_goes_on_for_the_rest_of_its_time(patient: PatientStore) -> None:
    patient.naps = [10, 10]
    site = Site(answer(), store=patient)
    with site.held():
        assert codes(site.call()) == ["still_running"]
    assert (patient.asked, patient.now) == ([25, 15, 5], 25)


def test_a_repeat_that_a_cancels_mark_wakes_goes_on_waiting() -> None:
    site = Site(answer(b"once"), store=(store := WatchedStore()))
    with site.held():
        repeat = in_thread(site.call)
        store.await_waiting()
        cancel = in_thread(site.cancel)
        store.await_waiting(2)  # the cancel, and the repeat anew
    assert (repeat.result(LIMIT).body, replayed(repeat.result(LIMIT))) == (b"once", True)
    assert cancel.result(LIMIT).json["state"] == "running"


def test_places_to_wait_are_given_back() -> None:
    site = Site(answer(), store=(store := WatchedStore()), config={"RUNONCE_MAX_WAITING": 1})
    for tool_call_id in ("call-1", "call-2", "call-3"):
        with site.held(tool_call_id):
            repeat = in_thread(site.call, tool_call_id)
            store.await_waiting()
        assert replayed(repeat.result(LIMIT))


def test_places_to_wait_are_given_back_after_a_timeout(patient: PatientStore) -> None:
    site = Site(answer(), store=patient, config={"RUNONCE_MAX_WAITING": 1})
    with site.held():
        assert codes(site.call(), site.call()) == ["still_running"] * 2
    assert patient.asked == [25, 25]


class _Interrupting(WatchedStore):
    """Raises in the first wait, as a worker's time-out does."""

    error: BaseException | None = None

    def wait(self, *args: Any) -> Seen:
        error, self.error = self.error, None
        if error:
            raise error
        return super().wait(*args)


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), StoreUnavailable("away")], ids=repr)
def test_places_to_wait_are_given_back_by_who_is_interrupted(error: BaseException) -> None:
    store = _Interrupting()
    site = Site(answer(), store=store, config={"RUNONCE_MAX_WAITING": 1})
    with site.held():
        store.error = error
        if isinstance(error, StoreUnavailable):
            assert codes(site.call()) == ["store_unavailable"]
        else:
            with pytest.raises(type(error)):
                site.call()
        repeat = in_thread(site.call)
        store.await_waiting()
    assert replayed(repeat.result(LIMIT))
    assert site.runs == 1


def test_ten_concurrent_requests_are_one_run_with_equal_answers() -> None:
    start = threading.Barrier(10)
    store = WatchedStore()

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        store.await_waiting(9)
        return answer(b"once", "201 Created", [*TEXT, ("ETag", '"1"')])(environ, start_response)

    site = Site(handler, store=store)

    def send() -> Any:
        start.wait(LIMIT)
        return site.call()

    answers = [each.result(LIMIT) for each in [in_thread(send) for _ in range(10)]]
    assert site.runs == 1
    assert [(each.status, each.body, each.headers["ETag"]) for each in answers] == [
        ("201 Created", b"once", '"1"')
    ] * 10
    assert sum(map(replayed, answers)) == 9


def test_calls_do_not_wait_for_each_other() -> None:
    site = Site(answer(), store=(store := WatchedStore()))
    with site.held("call-1"), site.held("call-2"):
        assert site.call("call-3").status_int == 200
    assert store.waits == []


# Released


@pytest.mark.parametrize("by", ["current_call", "environ"])
def test_a_released_call_is_forgotten_and_a_repeat_runs(by: str) -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if site.runs == 1:
            (current_call if by == "current_call" else environ["runonce.call"]).release()
        return answer(b"run %d" % site.runs)(environ, start_response)

    site = Site(handler)
    assert [site.call().body for _ in range(3)] == [b"run 1", b"run 2", b"run 2"]


def test_one_waiting_repeat_takes_a_released_call_over() -> None:
    store = WatchedStore()

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if site.runs == 1:
            store.await_waiting(5)
            current_call.release()
        else:
            store.await_waiting(4)  # those that were not quick enough wait for the second run
        return answer(b"run %d" % site.runs)(environ, start_response)

    site = Site(handler, store=store)
    repeats = []

    def first(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        site.handler = handler
        repeats.extend(in_thread(site.call) for _ in range(5))
        return handler(environ, start_response)

    site.handler = first
    assert site.call().body == b"run 1"
    answers = [each.result(LIMIT) for each in repeats]
    assert [each.body for each in answers] == [b"run 2"] * 5
    assert sum(map(replayed, answers)) == 4
    assert site.runs == 2


@pytest.mark.parametrize("status", ["401 Unauthorized", "429 Too Many Requests"])
def test_one_waiting_repeat_takes_over_after_a_status_that_says_not_processed(status: str) -> None:
    site = Site(answer(b"no", status), store=(store := WatchedStore()))
    with site.held() as first:
        repeat = in_thread(site.call)
        store.await_waiting()
        site.handler = answer(b"yes")
    assert first.result(LIMIT).status == status
    assert (repeat.result(LIMIT).body, replayed(repeat.result(LIMIT))) == (b"yes", False)


def test_a_released_call_that_was_canceled_meanwhile_stays_canceled() -> None:
    store = WatchedStore()
    site = Site(answer(), store=store)
    hooked: list[Any] = []
    site.middleware.on_cancel(hooked.append)
    others: list[Any] = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        others.append(in_thread(site.call))
        store.await_waiting()
        others.append(in_thread(site.cancel))
        store.await_waiting(2)  # the cancel, and the repeat that its mark has woken
        current_call.release()
        return answer()(environ, start_response)

    site.handler = handler
    assert site.call().body == b"done"
    assert others[0].result(LIMIT).json["code"] == "canceled"
    canceled = others[1].result(LIMIT)
    assert canceled.status_int == 200
    assert {name: canceled.json[name] for name in ("received", "state")} == {"received": False, "state": "not_received"}
    assert [(call.state, call.saved) for call in hooked] == [("not_received", None)]
    assert codes(site.call()) == ["canceled"]
    assert site.runs == 1


def test_a_call_that_is_released_and_then_fails_is_released() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        current_call.release()
        raise ValueError("busy")

    site = Site(handler)
    for _ in range(2):
        with pytest.raises(ValueError, match="busy"):
            site.call()
    assert site.runs == 2


# current_call


def test_there_is_no_current_call_outside_of_a_run() -> None:
    told = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        told.append((bool(current_call), "runonce.call" in environ))
        return answer()(environ, start_response)

    site = Site(handler)
    site.call(None)
    site.call(method="PUT", tool_call_id=None)
    assert told == [(False, False)] * 2
    assert not current_call


def test_the_current_call_is_that_of_the_run() -> None:
    told: list[Any] = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", TEXT)
        told.append((bool(current_call), current_call.key, current_call.canceled, environ["runonce.call"].key))
        yield b"a"
        told.append((bool(current_call), current_call.key, current_call.wait_canceled(0), environ["runonce.call"].key))

    key = CallKey("", "chat-1", "call-1")
    Site(handler).call()
    assert told == [(True, key, False, key)] * 2
    assert not current_call


@pytest.mark.parametrize("close_late", [False, True])
def test_the_current_call_is_there_until_the_body_is_closed(close_late: bool) -> None:
    told = []

    class Body(list[bytes]):
        def close(self) -> None:
            told.append(bool(current_call))

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", TEXT)
        return Body([b"x" * 9])

    Site(handler, config={"RUNONCE_MAX_BODY_BYTES": 4 if close_late else 9}).call()
    assert told == [True]


def test_each_run_has_its_own_current_call() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        return answer(current_call.key.tool_call_id.encode())(environ, start_response)

    site = Site(handler)
    with site.held("call-1") as first, site.held("call-2") as second:
        assert site.call("call-3").body == b"call-3"
    assert [first.result(LIMIT).body, second.result(LIMIT).body] == [b"call-1", b"call-2"]


# The app's callables: key, scope and fingerprint


def fail(*args: Any) -> Any:
    raise ValueError("on purpose")


def refuse(*args: Any) -> Any:
    raise Unauthorized("Who are you?")


def redirect(*args: Any) -> Any:
    raise HTTPException(response=Response("", 303, {"Location": "/login"}))


@pytest.mark.parametrize("name", ["key", "scope", "fingerprint"])
def test_a_callable_that_raises_500_key_failed(name: str) -> None:
    site = Site(answer(), **{name: fail})
    refused = site.call()
    assert (refused.status_int, refused.json["code"], site.runs) == (500, "key_failed", 0)
    assert site.store.list().total == 0


@pytest.mark.parametrize("name", ["key", "scope", "fingerprint"])
def test_an_http_exception_of_a_callable_is_the_answer(name: str) -> None:
    site = Site(answer(), **{name: refuse})
    refused = site.call()
    assert (refused.status_int, site.runs, site.store.list().total) == (401, 0, 0)
    assert b"Who are you?" in refused.body


def test_a_response_that_an_http_exception_carries_is_the_answer() -> None:
    site = Site(answer(), scope=redirect)
    refused = site.call()
    assert (refused.status_int, refused.headers["Location"], site.runs) == (303, "/login", 0)


@pytest.mark.parametrize("name", ["key", "scope", "fingerprint"])
@pytest.mark.parametrize("error", [fail, refuse])
def test_a_callable_is_not_asked_about_what_is_no_call(name: str, error: Callable[..., Any]) -> None:
    site = Site(answer(), **{name: error})
    assert site.call(method="GET").status_int == 200
    if name != "key":
        assert site.call(None).status_int == 200


@pytest.mark.parametrize("wrong", [7, b"tenant", "a\nb", "x" * 256], ids=["number", "bytes", "control", "long"])
def test_a_scope_that_makes_no_sense_500_key_failed(wrong: Any) -> None:
    site = Site(answer(), scope=lambda environ: wrong)
    assert (codes(site.call()), site.runs) == (["key_failed"], 0)


@pytest.mark.parametrize("wrong", ["call-1", ("", "chat-1", "call-1"), 7, "", (), 0, False], ids=repr)
def test_a_key_that_is_none_500_key_failed(wrong: Any) -> None:
    site = Site(answer(), key=lambda environ: wrong)
    assert (codes(site.call()), site.runs) == (["key_failed"], 0)


def test_a_fingerprint_that_is_no_bytes_500_key_failed() -> None:
    site = Site(answer(), fingerprint=lambda environ: "text")
    assert (codes(site.call()), site.runs) == (["key_failed"], 0)


def test_a_key_callable_says_what_is_a_call() -> None:
    def key(environ: Environ) -> CallKey | None:
        return CallKey("", "jobs", environ["PATH_INFO"][1:]) if environ["PATH_INFO"] != "/free" else None

    site = Site(answer(), key=key)
    for _ in range(2):
        site.call(None, None, path="/job-1")
    assert site.runs == 1
    for _ in range(2):
        site.call(path="/free")
    assert site.runs == 3
    assert site.get("/job-1", chat_id="jobs").json["repeats"] == 1


def test_a_key_callables_malformed_id_400_invalid_key() -> None:
    site = Site(answer(), key=lambda environ: CallKey("", "chat-1", "a b"))
    assert (codes(site.call()), site.runs) == (["invalid_key"], 0)


def test_a_scope_comes_before_the_scope_of_a_key() -> None:
    site = Site(answer(), key=lambda environ: CallKey("of the key", "chat-1", "call-1"), scope=lambda environ: "one")
    site.call()
    assert [seen.record.key.scope for seen in site.store.list().rows if seen.record] == ["one"]


def test_a_key_callables_own_scope_counts() -> None:
    site = Site(answer(), key=lambda environ: CallKey(environ["HTTP_X_TENANT"], "chat-1", "call-1"))
    for tenant in ("one", "two", "one"):
        site.call(**{"X-Tenant": tenant})
    assert site.runs == 2


def test_the_idempotency_key_header_names_a_call() -> None:
    site = Site(answer(), key=keys.idempotency_key, scope=lambda environ: environ["HTTP_X_TENANT"])
    for tenant, value in (("one", '"8e03"'), ("one", "8e03"), ("two", "8e03")):
        site.call(None, None, **{"Idempotency-Key": value, "X-Tenant": tenant})
    assert site.runs == 2
    assert site.get("/8e03", chat_id="-", **{"X-Tenant": "one"}).json["repeats"] == 1


@pytest.mark.parametrize("name", ["key", "scope", "fingerprint"])
def test_a_callable_may_read_the_body_and_the_handler_still_gets_it(name: str) -> None:
    looks: dict[str, Callable[[bytes], Any]] = {
        "key": lambda body: CallKey("", "chat-1", body.decode()),
        "scope": bytes.decode,
        "fingerprint": bytes,
    }

    def look(environ: Environ) -> Any:
        return looks[name](environ["wsgi.input"].read(5))

    site = Site(reads_body, **{name: look})
    assert [site.call(body=b"input").body for _ in range(2)] == [b"input"] * 2
    assert site.runs == 1


@pytest.mark.parametrize("name", ["key", "scope", "fingerprint"])
@pytest.mark.parametrize("error", [fail, refuse])
def test_a_body_is_drained_before_a_callables_failure_is_answered(name: str, error: Callable[..., Any]) -> None:
    site = Site(answer(), **{name: error}, config={"RUNONCE_FINGERPRINT_BYTES": 4})
    body = io.BytesIO(b"x" * 9)
    environ = environ_of(CONTENT_LENGTH="9")
    environ["wsgi.input"] = body
    assert ask(site.middleware, environ).status[:3] in ("401", "500")
    assert (body.read(), site.runs) == (b"", 0)


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "invalid_key": ({}, {"HTTP_CODER_TOOL_CALL_ID": "a,b"}),
    "key_required": ({"config": {"RUNONCE_REQUIRED": True}}, {"HTTP_CODER_CHAT_ID": None}),
    "canceled": ({}, {}),
    "store_not_shared": ({}, {"wsgi.multiprocess": True}),
    "store_full": ({"store": MemoryStore(max_bytes=0)}, {}),
}


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("bound", [0, 100])
def test_a_body_is_drained_before_a_refusal(code: str, bound: int) -> None:
    options, changed = REFUSALS[code]
    config = {**options.get("config", {}), "RUNONCE_FINGERPRINT_BYTES": bound}
    site = Site(answer(), **{**options, "config": config})
    if code == "canceled":
        site.cancel()
    body = io.BytesIO(b"x" * 9)
    environ = {
        name: value for name, value in {**environ_of(CONTENT_LENGTH="9"), **changed}.items() if value is not None
    }
    environ["wsgi.input"] = body
    assert ask(site.middleware, environ).code == code
    assert (body.read(), site.runs) == (b"", 0)


# The store


def test_several_processes_need_a_store_that_they_share(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(answer())
    for _ in range(2):
        refused = site.call(environ={"wsgi.multiprocess": True})
    assert [record.levelname for record in caplog.records if "RUNONCE_STORE_URI" in record.getMessage()] == ["ERROR"]
    assert (refused.status_int, refused.json["code"], site.runs) == (500, "store_not_shared", 0)
    assert site.call(None, environ={"wsgi.multiprocess": True}).status_int == 200  # no call
    shared = Site(answer(), store=LeasedStore())
    assert shared.call(environ={"wsgi.multiprocess": True}).status_int == 200


class _AwayStore(MemoryStore):
    def swap(self, *args: Any, **options: Any) -> Swapped:
        raise StoreUnavailable("on purpose")


def test_a_store_that_is_away_refuses_and_nothing_runs() -> None:
    site = Site(answer(), store=_AwayStore())
    refused = site.call()
    assert (refused.status_int, refused.json["code"], site.runs) == (503, "store_unavailable", 0)
    assert site.call(None).status_int == 200  # what is no call needs no store


class _RetryingStore(MemoryStore):
    """Loses the reply to each claim, and asks again by itself."""

    meanwhile: Callable[[], object] | None = None

    def swap(self, key: CallKey, seen: str, *args: Any, **options: Any) -> Swapped:
        swapped = super().swap(key, seen, *args, **options)
        if seen or not swapped.done:
            return swapped
        if self.meanwhile:
            self.meanwhile()
        return super().swap(key, seen, *args, **options)


@pytest.mark.parametrize("canceled", [False, True])
def test_a_claim_whose_reply_was_lost_is_recognised(canceled: bool) -> None:
    told = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        told.append(current_call.canceled)
        return answer(b"made")(environ, start_response)

    store = _RetryingStore()
    site = Site(handler, store=store, config=AT_ONCE)
    store.meanwhile = site.cancel if canceled else None
    assert site.call().body == b"made"
    assert (told, site.runs) == ([canceled], 1)


class _ForgetfulStore(MemoryStore):
    """Cannot save the end of a run."""

    def swap(self, key: CallKey, seen: str, *args: Any, **options: Any) -> Swapped:
        if seen:
            raise StoreUnavailable("on purpose")
        return super().swap(key, seen, *args, **options)


def test_an_end_that_cannot_be_saved_is_still_answered() -> None:
    site = Site(answer(b"made"), store=_ForgetfulStore(), config=AT_ONCE)
    assert site.call().body == b"made"
    assert codes(site.call()) == ["still_running"]
    assert site.runs == 1


def test_two_middlewares_may_share_a_store() -> None:
    store = MemoryStore()
    one, two = Site(answer(b"one"), store=store), Site(answer(b"two"), store=store)
    assert [one.call().body, two.call().body] == [b"one", b"one"]
    assert (one.runs, two.runs) == (1, 0)


_handler: Handler = answer()


def test_the_wrapped_app_is_at_hand() -> None:
    assert RunOnceMiddleware(_handler, guard=fail).app is _handler
