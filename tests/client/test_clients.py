"""What both clients do alike, against a real server on loopback."""

import logging
import socket
import threading

import httpx
import pytest

from flask_runonce.client import NoAnswer, Refused
from flask_runonce.client.cancellation import FINISHED, NO_RESULT, NOT_RUN, WHILE_RUNNING

from .conftest import CHAT
from .tiny import LIMIT, PREFIX, Call, Effects, TinyRunOnce, problem, serving

AWKWARD_IDS = ["a/b//c", "/", "//", "..", "%2F", "%252e", "?x=1#y", "http://u:p@host/", "~!$&'()*+;=:@[]{}|\\^`\"<>", "+"]


@pytest.fixture
def effects():
    effects = Effects(hold=[13])
    yield effects
    effects.let_go[13].set()


@pytest.fixture
def app(effects):
    return TinyRunOnce(effects)


@pytest.fixture
def client(app, connect):
    with serving(app) as server:
        client = connect(server)
        yield client


def in_thread(function, *args, **kwargs):
    """Run it meanwhile; gives a function that waits for the result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args, **kwargs)))
    thread.start()

    def result():
        thread.join(LIMIT)
        return results[0]

    return result


def test_a_call_returns_the_handlers_response(client, effects):
    response = client.call("POST", "/effects", tool_call_id="a", json={"n": 3})
    assert (response.status_code, response.json()) == (201, {"n": 3, "square": 9})
    again = client.call("POST", "/effects", tool_call_id="a", json={"n": 3})
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.content == response.content
    assert effects.counts == {3: 1}


def test_only_the_call_carries_the_tool_call_id(client, app):
    client.call("POST", "/effects", tool_call_id="a", json={"n": 3})
    client.call("GET", "/page", tool_call_id=None)
    client.cancel("a")
    client.cancel_all(["a"])
    client.calls()
    assert [request.headers.get("Coder-Chat-Id") for request in app.requests] == [CHAT] * 5
    assert [request.headers.get("Coder-Tool-Call-Id") for request in app.requests] == ["a"] + [None] * 4


def test_the_names_on_the_wire_can_be_others(app, connect):
    with serving(app) as server:
        client = connect(server, chat_id_header="X-Chat", tool_call_id_header="X-Call", url_prefix="/runonce")
        client.call("POST", "/effects", tool_call_id="a", json={"n": 3})
        client.cancel("b")
    call, cancel = app.requests
    assert (call.headers["X-Chat"], call.headers["X-Call"]) == (CHAT, "a")
    assert (cancel.headers["X-Chat"], cancel.path) == (CHAT, "/runonce/b/cancel")
    assert "Coder-Chat-Id" not in call.headers


def test_options_of_httpx_reach_it(app, connect):
    with serving(app) as server:
        client = connect(server, auth=("user", "password"), headers={"X-Default": "1"})
        client.call("POST", "/effects", tool_call_id="a", content=b'{"n": 3}', headers={"X-Own": "2"}, params={"q": "3"})
    (request,) = app.requests
    assert request.authorization.username == "user"
    assert (request.headers["X-Default"], request.headers["X-Own"], request.args["q"]) == ("1", "2", "3")


def test_every_attempt_sends_the_same_bytes(connect):
    bodies = []

    def app(environ, start_response):
        bodies.append((environ["CONTENT_TYPE"], environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
        start_response(f"{503 if len(bodies) < 3 else 200} -", [("Content-Length", "0")])
        return []

    with serving(app) as server:
        connect(server).call("POST", "/", tool_call_id="a", files={"upload": ("name", b"content")})
    assert len(bodies) == 3
    assert bodies[0] == bodies[1] == bodies[2]
    assert b"content" in bodies[0][1]


def test_a_refusal_is_raised(client, effects):
    client.cancel("a")
    with pytest.raises(Refused) as caught:
        client.call("POST", "/effects", tool_call_id="a", json={"n": 3})
    assert (caught.value.code, caught.value.status) == ("canceled", 409)
    assert caught.value.detail == "The tool call was canceled."
    assert not effects.counts


def test_a_call_that_is_still_running_is_asked_for_again(app, client, effects):
    app.wait_timeout = 0
    asked = threading.Semaphore(0)

    def refuse(*args, **kwargs):
        asked.release()
        return problem(*args, **kwargs)

    first = in_thread(client.call, "POST", "/effects", tool_call_id="a", json={"n": 13})
    assert effects.started[13].wait(LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.client.tiny.problem", refuse)
        second = in_thread(client.call, "POST", "/effects", tool_call_id="a", json={"n": 13})
        for _ in range(3):
            assert asked.acquire(timeout=LIMIT)
        effects.let_go[13].set()
        assert first().json() == second().json() == {"n": 13, "square": 169}
    assert effects.counts == {13: 1}


def test_nobody_there(connect):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        client = connect(taken.getsockname())
        with pytest.raises(NoAnswer) as caught:
            client.call("POST", "/effects", tool_call_id="a", json={}, deadline=0.2)
        assert caught.value.retryable
        assert "http://127.0.0.1" in caught.value.detail
        assert client.cancel("a", timeout=0.2).received is None


def test_a_deadline_ends_an_attempt_that_lasts(client, effects):
    with pytest.raises(NoAnswer, match="the time allowed is over"):
        client.call("POST", "/effects", tool_call_id="a", json={"n": 13}, deadline=0.2)
    effects.let_go[13].set()
    assert client.call("POST", "/effects", tool_call_id="a", json={"n": 13}).json()["square"] == 169
    assert effects.counts == {13: 1}


@pytest.mark.parametrize("tool_call_id", AWKWARD_IDS)
def test_any_allowed_id_can_be_called_and_canceled(client, tool_call_id):
    assert client.call("POST", "/effects", tool_call_id=tool_call_id, json={"n": 3}).status_code == 201
    canceled = client.cancel(tool_call_id)
    assert canceled.state == "done"
    assert canceled.response.json() == {"n": 3, "square": 9}
    assert [call["id"] for call in client.calls()] == [tool_call_id]


def test_a_server_without_cancel_routes_has_not_answered(connect, effects):
    with serving(effects) as server:
        answer = connect(server).cancel("a")
    assert (answer.received, answer.state, answer.text) == (None, None, NO_RESULT)
    assert (answer.error.status, answer.error.detail) == (404, "no such page")


def test_an_interrupted_batch_gets_a_true_text_for_each(app, client, effects):
    """One running, one done, one never sent, and an edit whose answer was lost on the way."""
    app.cancel_hooks.append(lambda call_id: effects.let_go[13].set() if call_id == "running" else None)
    running = in_thread(client.call, "POST", "/effects", tool_call_id="running", json={"n": 13})
    assert effects.started[13].wait(LIMIT)
    client.call("POST", "/effects", tool_call_id="done", json={"n": 3})
    client.call("POST", "/effects", tool_call_id="edit", content=b'{"n": 4}')

    answers = client.cancel_all(["running", "done", "never sent", "edit"], age=60)

    assert {call_id: answer.text for call_id, answer in answers.items()} == {
        "running": WHILE_RUNNING,
        "done": FINISHED,
        "never sent": NOT_RUN,
        "edit": FINISHED,
    }
    assert answers["running"].response.json() == running().json()
    assert answers["done"].response.json()["square"] == 9
    assert answers["edit"].response.json()["square"] == 16
    assert answers["never sent"].response is None
    assert client.cancel("forgotten", age=7200).text == NO_RESULT


def test_fifty_cancels_at_once_with_one_server_thread_stuck(app, client, caplog):
    ids = [f"call {n}".replace(" ", "-") for n in range(50)]
    arrived = threading.Barrier(50, timeout=LIMIT)
    let_go = threading.Event()

    def stick(call_id):
        arrived.wait()  # all 50 are under way at once
        if call_id == ids[7]:
            assert let_go.wait(LIMIT)

    app.before_cancel = stick
    try:
        answers = client.cancel_all(ids, timeout=3)
    finally:
        let_go.set()
    assert list(answers) == ids
    assert [call_id for call_id, answer in answers.items() if answer.received is None] == [ids[7]]
    assert {answer.text for answer in answers.values()} == {NOT_RUN, NO_RESULT}
    assert [(r.levelno, r.tool_call_id) for r in caplog.records if r.levelno > logging.INFO] == [
        (logging.WARNING, ids[7])
    ]


def test_the_same_id_twice_is_canceled_once(app, client):
    assert list(client.cancel_all(iter(["a", "b", "a"]))) == ["a", "b"]
    assert len(app.requests) == 2
    assert client.cancel_all([]) == {}


def test_the_list_is_the_chats_own_newest_first(app, client, connect):
    for n in range(205):
        app.calls[CHAT, f"call-{n}"] = Call("done")
    app.calls["another chat", "other"] = app.calls[CHAT, "call-0"]
    client.cancel("last")
    calls = client.calls()
    assert [call["id"] for call in calls] == ["last", *(f"call-{n}" for n in reversed(range(205)))]
    assert (calls[0]["state"], calls[0]["canceled"]) == ("canceled", True)
    assert [request.path for request in app.requests[1:]] == [PREFIX] * 2


def test_a_caller_may_give_its_own_silence(connect, effects):
    with serving(TinyRunOnce(effects)) as server:
        client = connect(server, timeout=httpx.Timeout(LIMIT, read=0.05))
        with pytest.raises(NoAnswer):
            client.call("POST", "/effects", tool_call_id="a", json={"n": 13}, deadline=0.3)
        effects.let_go[13].set()
    assert effects.counts == {13: 1}
