"""What the driver for threads does in its own way. The app is served by httpx.WSGITransport, without a network."""

import contextvars
import signal
import threading

import httpx
import pytest

from flask_runonce.client import Retry, Stopped, ToolClient
from flask_runonce.client.cancellation import NOT_RUN, WHILE_RUNNING

from .conftest import CHAT, QUICK
from .tiny import LIMIT, Effects, TinyRunOnce, serving


@pytest.fixture
def effects():
    effects = Effects(hold=[13])
    yield effects
    effects.let_go[13].set()


@pytest.fixture
def app(effects):
    return TinyRunOnce(effects)


@pytest.fixture
def client(app):
    with ToolClient("http://app", CHAT, transport=httpx.WSGITransport(app), retry=QUICK) as client:
        yield client


def failing(*faults):
    """A transport on which the first requests fail and the others succeed."""
    faults = list(faults)

    def handle(request):
        if faults:
            raise faults.pop(0)
        return httpx.Response(200, json={"received": False, "state": "not_received", "remembers": 3600})

    return httpx.MockTransport(handle)


def test_an_app_can_be_served_without_a_network(client, effects):
    assert client.call("POST", "/effects", tool_call_id="a", json={"n": 3}).json() == {"n": 3, "square": 9}
    assert client.cancel("a").response.json() == {"n": 3, "square": 9}
    assert effects.counts == {3: 1}


def test_an_error_of_the_app_itself_comes_out_as_it_is():
    def broken(environ, start_response):
        raise LookupError("a bug in the app")

    with (
        ToolClient("http://app", CHAT, transport=httpx.WSGITransport(broken)) as client,
        pytest.raises(LookupError, match="a bug in the app"),
    ):
        client.call("POST", "/", tool_call_id="a")


def test_a_stop_ends_an_attempt_that_lasts(client, effects):
    stop = threading.Event()

    def stop_when_started():
        assert effects.started[13].wait(LIMIT)
        stop.set()

    threading.Thread(target=stop_when_started).start()
    with pytest.raises(Stopped) as caught:
        client.call("POST", "/effects", tool_call_id="a", json={"n": 13}, stop=stop)
    assert caught.value.cancellation is None
    assert not effects.let_go[13].is_set(), "the run goes on"


def test_a_stop_with_a_cancel_says_what_became_of_the_call(app, client, effects):
    app.cancel_hooks.append(lambda call_id: effects.let_go[13].set())
    stop = threading.Event()

    def stop_when_started():
        assert effects.started[13].wait(LIMIT)
        stop.set()

    threading.Thread(target=stop_when_started).start()
    with pytest.raises(Stopped) as caught:
        client.call("POST", "/effects", tool_call_id="a", json={"n": 13}, stop=stop, cancel_on_stop=True)
    assert caught.value.cancellation.text == WHILE_RUNNING
    assert caught.value.cancellation.response.json()["square"] == 169


def test_a_stop_before_the_call_keeps_it_from_being_sent(app, client, effects):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped) as caught:
        client.call("POST", "/effects", tool_call_id="a", json={"n": 3}, stop=stop, cancel_on_stop=True)
    assert caught.value.cancellation.text == NOT_RUN
    assert not effects.counts


def test_a_stop_ends_a_pause():
    stop = threading.Event()
    failed = threading.Event()

    def fail(request):
        failed.set()
        return httpx.Response(503, headers={"Retry-After": "3600"})

    def stop_when_failed():
        assert failed.wait(LIMIT)
        stop.set()

    threading.Thread(target=stop_when_failed).start()
    with (
        ToolClient("http://app", CHAT, transport=httpx.MockTransport(fail), retry=Retry(window=7200)) as client,
        pytest.raises(Stopped),
    ):
        client.call("POST", "/", tool_call_id="a", stop=stop)


def test_a_fault_after_a_stop_is_the_stop():
    """A person's stop often tears the connection down too; the caller's reason wins."""
    stop = threading.Event()

    def fail(request):
        stop.set()
        raise httpx.ReadError("Connection reset by peer")

    with (
        ToolClient("http://app", CHAT, transport=httpx.MockTransport(fail), retry=QUICK) as client,
        pytest.raises(Stopped),
    ):
        client.call("POST", "/", tool_call_id="a", stop=stop)


def test_a_result_that_came_in_time_is_not_thrown_away():
    stop = threading.Event()

    def answer(request):
        stop.set()
        return httpx.Response(200, text="result")

    with ToolClient("http://app", CHAT, transport=httpx.MockTransport(answer)) as client:
        assert client.call("POST", "/", tool_call_id="a", stop=stop).text == "result"


def test_an_unset_stop_changes_nothing(client):
    response = client.call("POST", "/effects", tool_call_id="a", json={"n": 3}, stop=threading.Event())
    assert response.status_code == 201


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_ctrl_c_sends_the_cancel_and_comes_out(app, client, effects):
    app.cancel_hooks.append(lambda call_id: effects.let_go[13].set())
    main_thread = threading.get_ident()

    def interrupt_when_started():
        assert effects.started[13].wait(LIMIT)
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=interrupt_when_started).start()
    with pytest.raises(KeyboardInterrupt):
        client.call("POST", "/effects", tool_call_id="a", json={"n": 13}, cancel_on_stop=True)
    assert app.calls[CHAT, "a"].found == "running"
    assert effects.counts == {13: 1}


def test_the_callers_context_is_there_while_it_sends():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("the caller's")
    seen = []

    def answer(request):
        seen.append(variable.get())
        return httpx.Response(200)

    with ToolClient("http://app", CHAT, transport=httpx.MockTransport(answer)) as client:
        client.call("POST", "/", tool_call_id="a")
    assert seen == ["the caller's"]


def test_one_failing_cancel_loses_no_other_answer():
    fault = ValueError("a bug in a transport")
    with ToolClient("http://app", CHAT, transport=failing(fault)) as client:
        answers = client.cancel_all(["a", "b", "c", "d"])
    assert sorted(str(answer.received) for answer in answers.values()) == ["False"] * 3 + ["None"]


def test_closing_waits_for_no_request_that_was_given_up(app, effects):
    with serving(app) as server, ToolClient("http://{}:{}".format(*server), CHAT, retry=QUICK) as client:
        assert client.cancel("other").text == NOT_RUN
        with pytest.raises(Exception, match="the time allowed is over"):
            client.call("POST", "/effects", tool_call_id="a", json={"n": 13}, deadline=0.2)
        (given_up,) = client._in_flight
        client.close()
        effects.let_go[13].set()
        assert given_up.result(LIMIT).json()["square"] == 169, "it could still be read"
