"""What both clients do alike, against a real server on loopback."""

import io
import socket
import threading

import httpx
import pytest

from flask_runonce.client import NoAnswer, Refused, Retry, SilenceTimeout, ToolClient
from flask_runonce.client.cancellation import NO_RESULT

from .app import HELD, LIMIT, FailsTwice, Recorded, serving
from .conftest import CHAT

AWKWARD_IDS = [
    "a/b//c",
    "/",
    "//",
    "..",
    "%2F",
    "%252e",
    "?x=1#y",
    "http://u:p@host/",
    "~!$&'()*+;=:@[]{}|\\^`\"<>",
    "+",
]


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


def test_the_names_on_the_wire_can_be_others(effects, connect):
    names = {"chat_id_header": "X-Chat", "tool_call_id_header": "X-Call", "url_prefix": "/runonce"}
    app = Recorded(effects, **{f"RUNONCE_{name.upper()}": value for name, value in names.items()})
    with serving(app) as server:
        client = connect(server, **names)
        client.call("POST", "/effects", tool_call_id="a", json={"n": 3})
        assert client.cancel("a").state == "done"
        assert [call["id"] for call in client.calls()] == ["a"]
    assert [request.headers["X-Chat"] for request in app.requests] == [CHAT] * 3
    assert "Coder-Chat-Id" not in app.requests[0].headers


def test_options_of_httpx_reach_it(app, server, connect):
    client = connect(server, auth=("user", "password"), headers={"X-Default": "1"})
    client.call("POST", "/effects", tool_call_id="a", content=b'{"n": 3}', headers={"X-Own": "2"}, params={"q": "3"})
    (request,) = app.requests
    assert request.authorization.username == "user"
    assert (request.headers["X-Default"], request.headers["X-Own"], request.args["q"]) == ("1", "2", "3")


def test_every_attempt_sends_the_same_bytes(connect):
    app = FailsTwice()
    with serving(app) as server:
        connect(server).call("POST", "/", tool_call_id="a", files={"upload": ("name", io.BytesIO(b"content"))})
    assert len(app.sent) == 3
    assert app.sent[0] == app.sent[1] == app.sent[2]
    assert b"content" in app.sent[0][1]


def test_a_refusal_is_raised(client, effects):
    client.cancel("a")
    with pytest.raises(Refused) as caught:
        client.call("POST", "/effects", tool_call_id="a", json={"n": 3})
    assert (caught.value.code, caught.value.status) == ("canceled", 409)
    assert caught.value.detail == "The tool call was canceled."
    assert not effects.counts


def test_a_call_that_is_still_running_is_asked_for_again(effects, connect):
    app = Recorded(effects, RUNONCE_WAIT_TIMEOUT=0)
    with serving(app) as server:
        client = connect(server)
        first = in_thread(client.call, "POST", "/effects", tool_call_id="a", json={"n": HELD})
        assert effects.started.wait(LIMIT)
        second = in_thread(client.call, "POST", "/effects", tool_call_id="a", json={"n": HELD})
        with app.answered:
            assert app.answered.wait_for(lambda: 409 in app.statuses, LIMIT)
        effects.let_go.set()
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
        client.call("POST", "/effects", tool_call_id="a", json={"n": HELD}, deadline=0.2)
    effects.let_go.set()
    assert client.call("POST", "/effects", tool_call_id="a", json={"n": HELD}).json()["square"] == 169
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


def test_the_same_id_twice_is_canceled_once(app, client):
    assert list(client.cancel_all(iter(["a", "b", "a"]))) == ["a", "b"]
    assert len(app.requests) == 2
    assert client.cancel_all([]) == {}


def test_the_list_is_the_chats_own_newest_first(app, client):
    in_process = httpx.WSGITransport(app)
    with (
        ToolClient("http://app", CHAT, transport=in_process) as own,
        ToolClient("http://app", "another", transport=in_process) as other,
    ):
        for n in range(205):
            own.call("POST", "/effects", tool_call_id=f"call-{n}", json={"n": n + 100})
        other.call("POST", "/effects", tool_call_id="other", json={"n": 1})
        own.cancel("last")
    calls = client.calls()
    assert sorted(call["id"] for call in calls) == sorted(["last", *(f"call-{n}" for n in range(205))])
    assert [call["started_at"] for call in calls[1:]] == sorted((c["started_at"] for c in calls[1:]), reverse=True)
    assert ("last", "canceled", True) in [(call["id"], call["state"], call["canceled"]) for call in calls]


def test_silence_ends_an_attempt(server, connect, effects):
    client = connect(server, timeout=httpx.Timeout(LIMIT, read=0.05), retry=Retry(attempts=2, longest_pause=0))
    with pytest.raises(SilenceTimeout):
        client.call("POST", "/effects", tool_call_id="a", json={"n": HELD})
    assert effects.counts == {13: 1}
