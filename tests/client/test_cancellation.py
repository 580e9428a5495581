import base64

import httpx
import pytest

from flask_runonce.client import Cancellation
from flask_runonce.client.cancellation import FINISHED, NO_RESULT, NOT_RUN, WHILE_RUNNING, read_cancellation

NOT_RECEIVED = {"received": False, "state": "not_received"}
UNKNOWN = b'{"type": "urn:flask-runonce:outcome_unknown", "code": "outcome_unknown"}'


def read(document, oldest=None):
    request = httpx.Request("POST", "http://server/cancel")
    return read_cancellation(httpx.Response(200, json=document, request=request), oldest=oldest)


def received(state, body=b"", content_type="text/plain", **more):
    encoded = {"body": base64.b64encode(body).decode()} if body else {}
    return {"received": True, "state": state, "status": 200, "content_type": content_type, **encoded, **more}


@pytest.mark.parametrize(
    ("document", "oldest", "text"),
    [
        (NOT_RECEIVED | {"remembers": 3600}, None, "tool call was canceled before it ran; no changes were made"),
        (NOT_RECEIVED | {"remembers": 0}, None, NOT_RUN),
        (NOT_RECEIVED | {"remembers": 60.5}, 60, NOT_RUN),
        (NOT_RECEIVED | {"remembers": 60}, 61, "tool call was interrupted before it produced a result"),
        (NOT_RECEIVED, None, NO_RESULT),
        (NOT_RECEIVED | {"remembers": "long"}, None, NO_RESULT),
        ({"received": True, "state": "running"}, None, "tool call was canceled while running"),
        (received("running", b"so far"), None, WHILE_RUNNING),
        (received("done", b"result"), None, FINISHED),
        (received("running", UNKNOWN, "application/problem+json"), None, NO_RESULT),
        (received("done", UNKNOWN, "application/problem+json"), None, NO_RESULT),
    ],
)
def test_the_sentence_for_each_answer(document, oldest, text):
    assert read(document, oldest).text == text


def test_the_saved_response_is_a_whole_response():
    answer = read(received("done", b'{"n": 1}', "application/json", status=422))
    assert answer.received is True
    assert answer.state == "done"
    assert answer.response.status_code == 422
    assert answer.response.headers["Content-Type"] == "application/json"
    assert answer.response.json() == {"n": 1}
    with pytest.raises(httpx.HTTPStatusError):
        answer.response.raise_for_status()


def test_a_body_that_was_not_kept_is_not_an_empty_result():
    answer = read({"received": True, "state": "done", "status": 201, "body_too_large": True})
    assert answer.response.status_code == 201
    assert answer.body_too_large
    assert not read({"received": True, "state": "done", "status": 201}).body_too_large


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"received": None},
        {"received": False},
        {"received": True, "state": "not_received"},
        {"received": True, "state": "finished"},
        {"received": True, "state": "done", "status": 200, "body": "no base64!"},
    ],
)
def test_anything_else_is_not_an_answer(document):
    with pytest.raises(ValueError):
        read(document)


def test_without_an_answer_nothing_is_known():
    nothing = Cancellation(None)
    assert (nothing.state, nothing.response, nothing.remembers) == (None, None, None)
    assert nothing.text == NO_RESULT
