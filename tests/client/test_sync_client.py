"""What the driver for threads does in its own way, mostly without a network: httpx.WSGITransport serves the app."""

import contextvars
import pickle
import signal
import threading

import httpx
import pytest

from flask_runonce.client import NoAnswer, Retry, Stopped, ToolClient
from flask_runonce.client.cancellation import NOT_RUN, WHILE_RUNNING

from .app import CANCELABLE, HELD, LIMIT, FailsTwice, serving
from .conftest import CHAT, QUICK


@pytest.fixture
def connect():
    """Makes a client whose requests `answer(request)` answers."""
    clients = []

    def connect(answer, **options):
        clients.append(ToolClient("http://app", CHAT, transport=httpx.MockTransport(answer), **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(app):
    with ToolClient("http://app", CHAT, transport=httpx.WSGITransport(app), retry=QUICK) as client:
        yield client


def test_an_app_can_be_served_without_a_network(client, effects):
    assert client.call("POST", "/effects", tool_call_id="a", json={"n": 3}).json() == {"n": 3, "square": 9}
    assert client.cancel("a").response.json() == {"n": 3, "square": 9}
    assert effects.counts == {3: 1}


def test_an_error_of_the_app_itself_comes_out_as_it_is(connect):
    def broken(request):
        raise LookupError("a bug in the app")

    with pytest.raises(LookupError, match="a bug in the app"):
        connect(broken).call("POST", "/", tool_call_id="a")


def test_a_stop_ends_an_attempt_that_lasts(client, effects, when):
    stop = threading.Event()
    when(effects.started, stop.set)
    with pytest.raises(Stopped) as caught:
        client.call("POST", "/effects", tool_call_id="a", json={"n": HELD}, stop=stop)
    assert caught.value.cancellation is None
    assert not effects.let_go.is_set(), "the run goes on"


def test_a_stop_with_a_cancel_says_what_became_of_the_call(client, effects, when):
    stop = threading.Event()
    when(effects.started, stop.set)
    with pytest.raises(Stopped) as caught:
        client.call("POST", "/effects", tool_call_id="a", json={"n": CANCELABLE}, stop=stop, cancel_on_stop=True)
    assert caught.value.cancellation.text == WHILE_RUNNING
    assert caught.value.cancellation.response.json()["square"] == 196


def test_a_stop_before_the_call_keeps_it_from_being_sent(connect):
    stop = threading.Event()
    stop.set()
    paths = []

    def answer(request):
        paths.append(request.url.path)
        return httpx.Response(200, json={"received": False, "state": "not_received", "remembers": 3600})

    with pytest.raises(Stopped) as caught:
        connect(answer).call("POST", "/effects", tool_call_id="a", stop=stop, cancel_on_stop=True)
    assert caught.value.cancellation.text == NOT_RUN
    assert paths == ["/api/v0/tool-calls/a/cancel"]


def test_a_stop_ends_a_pause(connect, when):
    stop, failed = threading.Event(), threading.Event()

    def fail(request):
        failed.set()
        return httpx.Response(503, headers={"Retry-After": "3600"})

    when(failed, stop.set)
    with pytest.raises(Stopped):
        connect(fail, retry=Retry(window=7200)).call("POST", "/", tool_call_id="a", stop=stop)


def test_a_fault_after_a_stop_is_the_stop(connect):
    """A person's stop often tears the connection down too; the caller's reason wins."""
    stop = threading.Event()

    def fail(request):
        stop.set()
        raise httpx.ReadError("Connection reset by peer")

    with pytest.raises(Stopped):
        connect(fail, retry=Retry(attempts=1)).call("POST", "/", tool_call_id="a", stop=stop)


def test_a_result_that_came_in_time_is_not_thrown_away(connect):
    stop = threading.Event()

    def answer(request):
        stop.set()
        return httpx.Response(200, text="result")

    assert connect(answer).call("POST", "/", tool_call_id="a", stop=stop).text == "result"


def test_an_unset_stop_changes_nothing(client):
    response = client.call("POST", "/effects", tool_call_id="a", json={"n": 3}, stop=threading.Event())
    assert response.status_code == 201


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_ctrl_c_sends_the_cancel_and_comes_out(client, effects, when):
    main_thread = threading.get_ident()
    when(effects.started, lambda: signal.pthread_kill(main_thread, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        client.call("POST", "/effects", tool_call_id="a", json={"n": CANCELABLE}, cancel_on_stop=True)
    (call,) = client.calls()
    assert call["canceled"]


def test_the_callers_context_is_there_while_it_sends(connect):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("the caller's")
    seen = []

    def answer(request):
        seen.append(variable.get())
        return httpx.Response(200)

    connect(answer).call("POST", "/", tool_call_id="a")
    assert seen == ["the caller's"]


def test_a_body_that_can_be_read_only_once_is_sent_again_whole():
    app = FailsTwice()
    with serving(app) as server, ToolClient("http://{}:{}".format(*server), CHAT, retry=QUICK) as client:
        text = {"Content-Type": "text/plain"}
        client.call("POST", "/", tool_call_id="a", content=(part for part in [b"one ", b"two"]), headers=text)
    assert app.sent == [("text/plain", b"one two")] * 3


def test_one_failing_cancel_loses_no_other_answer(connect):
    def answer(request):
        if request.url.path.endswith("/b/cancel"):
            raise ValueError("a bug in a transport")
        return httpx.Response(200, json={"received": False, "state": "not_received", "remembers": 3600})

    answers = connect(answer).cancel_all(["a", "b", "c"])
    assert {call_id: answer.received for call_id, answer in answers.items()} == {"a": False, "b": None, "c": False}


def test_closing_leaves_a_request_that_was_given_up_its_connection(effects, server):
    with ToolClient("http://{}:{}".format(*server), CHAT, retry=QUICK) as client:
        with pytest.raises(NoAnswer, match="the time allowed is over"):
            client.call("POST", "/effects", tool_call_id="a", json={"n": HELD}, deadline=0.2)
        (given_up,) = client._in_flight
    effects.let_go.set()
    assert given_up.result(LIMIT).json()["square"] == 169


def test_errors_can_be_pickled(connect):
    """They cross process pools with their facts."""
    refusing = connect(lambda request: httpx.Response(502, json={"message": "gone"}), retry=Retry(attempts=1))
    stop = threading.Event()
    stop.set()
    for options in [{}, {"stop": stop}]:
        with pytest.raises((NoAnswer, Stopped)) as caught:
            refusing.call("POST", "/", tool_call_id="a", **options)
        copy = pickle.loads(pickle.dumps(caught.value))
        facts = ["code", "status", "detail", "retryable", "tool_call_id"]
        assert type(copy) is type(caught.value)
        assert [getattr(copy, fact) for fact in facts] == [getattr(caught.value, fact) for fact in facts]
