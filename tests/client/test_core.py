"""The flow by itself: each test plays the driver, so nothing is sent and nobody waits."""

import asyncio
import logging
import time
from collections.abc import Generator

import httpx
import pytest

from flask_runonce.client import NoAnswer, Refused, Retry, SilenceTimeout, Stopped
from flask_runonce.client.cancellation import NO_RESULT, NOT_RUN
from flask_runonce.client.core import Core, Pause, Send, StopRequested, TimeUp

OK = httpx.Response(200, text="result")
GATEWAY = httpx.Response(503, html="<h1>Service Unavailable</h1>")
BROKEN = httpx.ReadError("Connection reset by peer")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


class Played:
    """Runs a flow against a script: a response is sent in, an exception thrown, a number is seconds that pass."""

    def __init__(self, flow: Generator, clock: Clock, *script):
        self.sends: list[Send] = []
        self.pauses: list[Pause] = []
        self.result = self.error = None
        script = list(script)
        advance, argument = flow.send, None
        while True:
            try:
                step = advance(argument)
            except StopIteration as end:
                self.result = end.value
                break
            except BaseException as error:
                self.error = error
                break
            advance, argument = flow.send, None
            if isinstance(step, Pause):
                self.pauses.append(step)
                clock.now += step.seconds
                continue
            self.sends.append(step)
            while script and isinstance(script[0], (int, float)):
                clock.now += script.pop(0)
            assert script, "the flow goes on after the script"
            argument = script.pop(0)
            if isinstance(argument, httpx.Response):
                argument.request = step.request
            advance = flow.throw if isinstance(argument, BaseException) else flow.send
        assert not script, "the flow ended before the script"


def core(**retry):
    client = httpx.Client(base_url="http://server/app/")
    with client:
        return Core(
            client.build_request,
            "chat",
            retry=Retry(**retry),
            chat_id_header="Coder-Chat-Id",
            tool_call_id_header="Coder-Tool-Call-Id",
            url_prefix="/api/v0/tool-calls",
        )


def call(method="POST", tool_call_id="id", *, cancel_on_stop=False, deadline=None, retry=None, **options):
    return core(**retry or {}).call(
        method, "/tool", tool_call_id, cancel_on_stop=cancel_on_stop, deadline=deadline, options=options
    )


def cancel(age=None, timeout=30.0):
    return core().cancel("id", age=age, timeout=timeout)


def refused(code, status, *, retryable=False, **headers):
    document = {"type": f"urn:flask-runonce:{code}", "code": code, "retryable": retryable, "detail": f"It is {code}."}
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json=document, headers={"Content-Type": "application/problem+json", **headers})


def not_received(remembers):
    return httpx.Response(200, json={"received": False, "state": "not_received", "remembers": remembers})


@pytest.mark.parametrize(
    "fault",
    [
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.WriteError("reset"),
        httpx.RemoteProtocolError("cut off"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadTimeout("silent"),
        httpx.PoolTimeout("busy"),
        httpx.ProxyError("gone"),
        GATEWAY,
        httpx.Response(502),
        httpx.Response(504),
        refused("still_running", 409, retryable=True),
        refused("store_unavailable", 503, retryable=True),
        refused("incomplete_body", 400, retryable=True),
    ],
    ids=repr,
)
def test_what_is_sent_again_is_the_same_request(clock, fault):
    played = Played(call(json={"n": 1}), clock, fault, fault, OK)
    assert played.result is OK
    first, second, third = (send.request for send in played.sends)
    assert first is second is third
    assert first.headers["Coder-Tool-Call-Id"] == "id"
    assert len(played.pauses) == 2


@pytest.mark.parametrize(
    "response",
    [
        OK,
        httpx.Response(404, text="no such page"),
        httpx.Response(409, json={"message": "conflict"}),
        httpx.Response(422),
        httpx.Response(429, headers={"Retry-After": "1"}),
        httpx.Response(500, json={"error": {"message": "boom"}}),
        httpx.Response(503, headers={"Idempotent-Replayed": "true"}),
    ],
    ids=repr,
)
def test_an_answer_of_the_handlers_own_is_returned(clock, response):
    played = Played(call(), clock, response)
    assert played.result is response


@pytest.mark.parametrize(
    ("code", "status"),
    [("canceled", 409), ("input_mismatch", 409), ("outcome_unknown", 500), ("invalid_key", 400), ("key_failed", 500)],
)
def test_other_refusals_come_out_at_once_with_the_facts(clock, code, status):
    response = refused(code, status)
    error = Played(call(), clock, response).error
    assert type(error) is Refused
    assert (error.code, error.status, error.detail) == (code, status, f"It is {code}.")
    assert (error.retryable, error.tool_call_id, error.response) == (False, "id", response)
    assert str(error) == error.detail


def test_the_last_fault_comes_out_after_the_last_attempt(clock):
    played = Played(call(retry={"attempts": 3}), clock, GATEWAY, GATEWAY, BROKEN)
    assert type(played.error) is NoAnswer
    assert played.error.detail == "No answer from http://server: Connection reset by peer"
    assert (played.error.code, played.error.status, played.error.retryable) == ("no_answer", None, True)
    assert played.error.__cause__ is BROKEN


def test_a_gateways_refusal_comes_out_with_its_facts(clock):
    bad_gateway = httpx.Response(502, json={"error": {"message": "upstream is gone"}})
    error = Played(call(retry={"attempts": 1}), clock, bad_gateway).error
    assert type(error) is NoAnswer
    assert (error.status, error.detail, error.retryable) == (502, "upstream is gone", True)


def test_silence_has_a_name_of_its_own(clock):
    error = Played(call(retry={"attempts": 1}), clock, httpx.ReadTimeout("")).error
    assert type(error) is SilenceTimeout
    assert (error.code, error.detail) == ("silence_timeout", "No answer from http://server: ReadTimeout")


@pytest.mark.parametrize(
    "error", [httpx.LocalProtocolError("bad header"), httpx.DecodingError("no gzip"), ValueError()]
)
def test_what_another_attempt_cannot_mend_is_raised_as_it_is(clock, error):
    assert Played(call(), clock, error).error is error


def test_pauses_grow_at_random_to_a_bound(clock, monkeypatch):
    bounds = []

    def uniform(low, high):
        bounds.append((low, high))
        return high

    monkeypatch.setattr("random.uniform", uniform)
    retry = {"attempts": 6, "first_pause": 0.5, "longest_pause": 4.0}
    played = Played(call(retry=retry), clock, *[BROKEN] * 5, OK)
    assert [pause.seconds for pause in played.pauses] == [0.5, 1, 2, 4, 4]
    assert bounds == [(0, 0.5), (0, 1), (0, 2), (0, 4), (0, 4)]


def test_retry_after_is_a_floor(clock, monkeypatch):
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    short = refused("store_unavailable", 503, retryable=True, Retry_After="1")
    long = httpx.Response(503, headers={"Retry-After": "90"})
    played = Played(call(retry={"first_pause": 5.0}), clock, short, long, OK)
    assert [pause.seconds for pause in played.pauses] == [5, 90]


def test_no_attempt_starts_after_the_window(clock, monkeypatch):
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    retry = {"window": 10.0, "first_pause": 2.0}
    assert Played(call(retry=retry), clock, 3, BROKEN, 1, BROKEN).error.detail.endswith("Connection reset by peer")
    assert Played(call(retry=retry, deadline=99), clock, 3, BROKEN, 1, BROKEN).error, "the window is the shorter one"
    patient = Played(call(retry=retry), clock, 3, BROKEN, 500, OK)
    assert patient.result is OK, "an attempt that has started may last"


def test_a_longer_wait_than_is_left_is_not_begun(clock):
    busy = refused("store_full", 503, retryable=True, Retry_After="30")
    played = Played(call(deadline=20.0), clock, busy)
    assert (played.error.code, played.error.retry_after, played.pauses) == ("store_full", 30, [])


def test_the_deadline_holds_for_every_attempt(clock):
    start = clock.now
    played = Played(call(deadline=20.0), clock, BROKEN, 20, TimeUp("the time allowed is over"))
    assert {send.until for send in played.sends} == {start + 20}
    assert type(played.error) is NoAnswer
    assert "the time allowed is over" in played.error.detail


def test_without_an_id_only_a_safe_method_is_sent_again(clock):
    post = Played(call("POST", None), clock, BROKEN)
    assert (type(post.error), post.error.retryable) == (NoAnswer, False)
    assert Played(call("GET", None), clock, BROKEN, GATEWAY, OK).result is OK


def test_only_a_call_carries_the_tool_call_id(clock):
    mine = {"coder-tool-call-id": "mine", "coder-chat-id": "mine", "x-other": "mine"}
    (sent,) = Played(call(headers=mine), clock, OK).sends
    assert sent.request.headers["Coder-Tool-Call-Id"] == "id"
    assert sent.request.headers["Coder-Chat-Id"] == "chat"
    assert sent.request.headers["X-Other"] == "mine"
    page = httpx.Response(200, json={"tool_calls": [], "has_more": False})
    for flow, answer in [(call("GET", None, headers=mine), OK), (cancel(), not_received(1)), (core().calls(), page)]:
        (sent,) = Played(flow, clock, answer).sends
        assert "Coder-Tool-Call-Id" not in sent.request.headers
        assert sent.request.headers["Coder-Chat-Id"] == "chat"


# -- The caller's own end


def test_a_stop_is_not_a_network_fault(clock):
    stopped = Played(call(), clock, BROKEN, StopRequested())
    assert type(stopped.error) is Stopped
    assert (stopped.error.tool_call_id, stopped.error.retryable) == ("id", False)
    assert stopped.error.cancellation is None
    assert len(stopped.sends) == 2


def test_a_stop_sends_the_cancel_and_says_what_became_of_the_call(clock):
    running = httpx.Response(202, json={"received": True, "state": "running"})
    played = Played(call(cancel_on_stop=True), clock, StopRequested(), BROKEN, running)
    assert played.error.cancellation.state == "running"
    assert [send.request.url.path for send in played.sends[1:]] == ["/app/api/v0/tool-calls/id/cancel"] * 2
    assert [send.stoppable for send in played.sends] == [True, False, False]
    assert [pause.stoppable for pause in played.pauses] == [False]


def test_the_cancel_after_a_stop_knows_the_calls_age(clock):
    """The server was restarted while the call ran: it must not say that nothing changed."""
    restarted = Played(call(cancel_on_stop=True), clock, 10, StopRequested(), not_received(9))
    assert restarted.error.cancellation.text == NO_RESULT
    steady = Played(call(cancel_on_stop=True), clock, 10, StopRequested(), not_received(10))
    assert steady.error.cancellation.text == NOT_RUN


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()], ids=repr)
def test_the_callers_own_reason_comes_out(clock, reason):
    assert Played(call(), clock, reason).error is reason
    played = Played(call(cancel_on_stop=True), clock, reason, not_received(3600))
    assert played.error is reason
    assert len(played.sends) == 2


def test_a_second_interrupt_ends_the_cancel(clock):
    second = KeyboardInterrupt()
    assert Played(call(cancel_on_stop=True), clock, KeyboardInterrupt(), second).error is second


def test_a_failure_is_not_a_stop(clock):
    played = Played(call(cancel_on_stop=True, retry={"attempts": 1}), clock, BROKEN)
    assert type(played.error) is NoAnswer
    assert len(played.sends) == 1


def test_a_flow_can_be_thrown_away(clock):
    flow = call(cancel_on_stop=True)
    next(flow)
    flow.close()


# -- The cancel


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, html="<h1>Not Found</h1>"),
        httpx.Response(404, json={"message": "no such page"}),
        httpx.Response(405),
        httpx.Response(200, text="welcome"),
        httpx.Response(200, json={}),
        refused("cancel_failed", 500),
        refused("invalid_key", 400),
        ValueError("a bug in a transport"),
    ],
    ids=repr,
)
def test_no_answer_is_never_not_received(clock, caplog, answer):
    result = Played(cancel(), clock, answer).result
    assert result.received is None
    assert result.text == NO_RESULT
    (record,) = caplog.records
    assert (record.levelno, record.chat_id, record.tool_call_id) == (logging.WARNING, "chat", "id")


def test_the_reason_for_no_answer_is_kept(clock):
    result = Played(cancel(), clock, refused("cancel_failed", 500)).result
    assert (result.error.code, result.error.status) == ("cancel_failed", 500)


def test_a_cancel_is_sent_again_within_its_time(clock, monkeypatch):
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    assert Played(cancel(), clock, BROKEN, GATEWAY, not_received(3600)).result.text == NOT_RUN
    late = Played(cancel(timeout=1.0), clock, BROKEN, BROKEN, TimeUp())
    assert late.result.received is None
    assert {send.until for send in late.sends} == {late.sends[0].until}


def test_not_received_needs_a_memory_that_covers_the_calls_age(clock):
    assert Played(cancel(age=60.0), clock, not_received(61)).result.text == NOT_RUN
    assert Played(cancel(age=60.0), clock, not_received(59)).result.text == NO_RESULT
    assert Played(cancel(age=60.0), clock, 2, not_received(61)).result.text == NO_RESULT, "it grew older meanwhile"
    assert Played(cancel(), clock, 2, not_received(0)).result.text == NOT_RUN, "the caller vouches for the age"


def test_a_store_that_began_empty_during_the_cancel_cannot_vouch(clock):
    """The server was restarted: the first attempt met the old one, which ran the call, the second the new one."""
    assert Played(cancel(), clock, 5, BROKEN, 5, not_received(5)).result.text == NO_RESULT
    assert Played(cancel(), clock, 5, BROKEN, 5, not_received(3600)).result.text == NOT_RUN


@pytest.mark.parametrize(
    ("tool_call_id", "path"),
    [
        ("a/b", b"a%2Fb"),
        ("/", b"%2F"),
        ("..", b"%2E%2E"),
        ("a%2Fb", b"a%252Fb"),
        ("?x=1#y", b"%3Fx%3D1%23y"),
        ("http://x", b"http%3A%2F%2Fx"),
        ("plain-1_~", b"plain-1_~"),
    ],
)
def test_the_id_in_the_path_survives_one_decoding(clock, tool_call_id, path):
    flow = core().cancel(tool_call_id, age=None, timeout=30.0)
    (sent,) = Played(flow, clock, not_received(1)).sends
    assert sent.request.method == "POST"
    assert sent.request.url.raw_path == b"/app/api/v0/tool-calls/" + path + b"/cancel"
    assert sent.request.content == b""


# -- The list


def entries(*ids):
    return [{"id": id, "state": "done"} for id in ids]


def test_the_list_turns_its_pages(clock):
    first = httpx.Response(200, json={"tool_calls": entries("d", "c"), "has_more": True})
    second = httpx.Response(200, json={"tool_calls": entries("c", "b"), "has_more": True})
    third = httpx.Response(200, json={"tool_calls": [], "has_more": True})
    played = Played(core().calls(), clock, first, BROKEN, second, third)
    assert [entry["id"] for entry in played.result] == ["d", "c", "b"]
    assert [send.request.url.params["offset"] for send in played.sends] == ["0", "2", "2", "4"]


@pytest.mark.parametrize(
    "answer", [httpx.Response(404), httpx.Response(200, text="hello"), httpx.Response(200, json=[])]
)
def test_a_server_without_the_list_gives_no_answer(clock, answer):
    error = Played(core().calls(), clock, answer).error
    assert type(error) is NoAnswer
    assert (error.status, error.retryable) == (answer.status_code, False)
