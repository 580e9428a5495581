"""`result_budget` end to end: the live answer, the record and every repeat are the same bounded text."""

from __future__ import annotations

import base64
import gzip
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, Response, abort, jsonify, send_file, stream_with_context
from webtest import TestApp

from flask_runonce import RunOnce, signals

HEADERS = {"Coder-Chat-Id": "chat", "Coder-Tool-Call-Id": "call"}
MARKER = "bytes left out; narrow the request"
LONG = "".join(f"line {number}\n" for number in range(1000))


class Served:
    """A view under "/" that is run once. `cuts` is what the signal told."""

    def __init__(self, view: Callable[[], Any], config: dict[str, Any] | None = None, **options: Any) -> None:
        self.app = Flask(__name__)
        self.app.config.update(config or {})
        self.app.register_error_handler(422, lambda error: ({"error": error.description}, 422))
        runonce = RunOnce(self.app, scope=lambda environ: None)
        self.app.add_url_rule("/", "view", runonce.once(**options)(view), methods=["POST"])
        self.cuts: list[dict[str, Any]] = []
        signals.result_cut.connect(self._note, sender=self.app)

    def _note(self, sender: Any, **facts: Any) -> None:
        self.cuts.append(facts)

    def post(self, headers: dict[str, str] = HEADERS) -> Any:
        return TestApp(self.app).post("/", headers=headers, expect_errors=True)

    def canceled(self) -> Any:
        chat = {"Coder-Chat-Id": "chat"}
        return TestApp(self.app).post("/api/v0/tool-calls/call/cancel", headers=chat).json


def assert_bounded(served: Served, budget: int, original: int) -> bytes:
    """Send the call three times, cancel it, and return the one body that all of these gave."""
    first, *repeats = (served.post() for _ in range(3))
    body: bytes = first.body
    assert len(body) <= budget
    assert [repeat.body for repeat in repeats] == [body, body]
    for answer in (first, *repeats):
        assert answer.headers.getall("Content-Length") == [str(len(body))]
        assert answer.content_type == first.content_type
        assert answer.status == first.status
        assert "ETag" not in answer.headers
    assert base64.b64decode(served.canceled()["body"]) == body
    (facts,) = served.cuts
    assert (facts["key"].tool_call_id, facts["original_bytes"], facts["kept_bytes"]) == ("call", original, len(body))
    return body


def text() -> Any:
    return Response(LONG, mimetype="text/plain")


def text_stream() -> Any:
    @stream_with_context
    def lines() -> Iterator[str]:
        yield from LONG.splitlines(keepends=True)

    return Response(lines(), mimetype="text/plain")


def text_file() -> Any:
    return send_file(io.BytesIO(LONG.encode()), "text/plain", etag="abc")


def text_with_etag_and_length() -> Any:
    response = Response(LONG, mimetype="text/plain", headers={"Content-Length": str(len(LONG))})
    response.add_etag()
    return response


async def text_async() -> Any:
    return Response(LONG, mimetype="text/plain")


@pytest.mark.parametrize("view", [text, text_stream, text_file, text_with_etag_and_length, text_async])
@pytest.mark.parametrize("max_body", [2**20, 1000])
def test_long_text_is_cut_once_for_all(view: Callable[[], Any], max_body: int) -> None:
    """Also where the whole is too large to be kept: what is cut is not."""
    served = Served(view, {"RUNONCE_MAX_BODY_BYTES": max_body}, result_budget=600)
    body = assert_bounded(served, 600, len(LONG)).decode()
    head, tail = body.split("[...")[0], body.split("...]")[1]
    assert LONG.startswith(head) and LONG.endswith(tail) and MARKER in body
    assert 1.5 < len(head) / len(tail) < 2.5


def test_json_stays_json() -> None:
    served = Served(lambda: {"path": "a.txt", "text": LONG}, result_budget=600)
    document = json.loads(assert_bounded(served, 600, len(jsonify_of({"path": "a.txt", "text": LONG}))))
    assert document["path"] == "a.txt"
    assert MARKER in document["text"] and LONG.startswith(document["text"].split("[...")[0])


def test_json_that_cannot_be_cut_is_wrapped() -> None:
    numbers = list(range(1000))
    served = Served(lambda: numbers, result_budget=600)
    original = len(jsonify_of(numbers))
    document = json.loads(assert_bounded(served, 600, original))
    assert document["truncated"] == {"original_bytes": original}
    assert document["text"].startswith("[0,") and MARKER in document["text"]


def jsonify_of(data: Any) -> bytes:
    with Flask(__name__).app_context():
        return jsonify(data).get_data()


def test_an_error_is_bounded_too() -> None:
    served = Served(lambda: abort(422, LONG), result_budget=600)
    assert MARKER in json.loads(assert_bounded(served, 600, len(jsonify_of({"error": LONG}))))["error"]


@pytest.mark.parametrize(("over", "cuts"), [(-1, 0), (0, 0), (1, 1)])
def test_the_budget_is_the_most_that_stays_whole(over: int, cuts: int) -> None:
    served = Served(lambda: "x" * (600 + over), result_budget=600)
    assert (MARKER in served.post().text) == bool(cuts)
    assert len(served.cuts) == cuts


def test_a_cut_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flask_runonce"):
        Served(text, result_budget=600).post()
    (record,) = [record for record in caplog.records if "cut" in record.getMessage()]
    assert str(len(LONG)) in record.getMessage()
    assert (record.chat_id, record.tool_call_id) == ("chat", "call")  # type: ignore[attr-defined]


def test_what_else_the_response_says_stays() -> None:
    def view() -> Response:
        response = Response(LONG, 201, mimetype="text/plain", headers={"Location": "/a", "X-Own": "1"})
        response.headers.add("Link", "</a>; rel=a")
        response.headers.add("Link", "</b>; rel=b")
        response.set_cookie("a", "1")
        response.set_cookie("b", "2")
        return response

    served = Served(view, result_budget=600)
    first, repeat = served.post(), served.post()
    for answer in (first, repeat):
        assert answer.status == "201 CREATED"
        assert answer.headers["Location"] == "/a"
        assert answer.headers.getall("Link") == ["</a>; rel=a", "</b>; rel=b"]
    assert first.headers["X-Own"] == "1"
    assert len(first.headers.getall("Set-Cookie")) == 2
    assert "Set-Cookie" not in repeat.headers


def compressed() -> Any:
    body = gzip.compress(bytes(range(256)) * 20, 0)
    return Response(body, mimetype="text/plain", headers={"Content-Encoding": "gzip"})


def binary() -> Any:
    return Response(bytes(range(256)) * 20, mimetype="application/octet-stream")


@pytest.mark.parametrize("view", [compressed, binary])
def test_what_is_no_plain_text_is_left_alone(view: Callable[[], Any]) -> None:
    served = Served(view, result_budget=600)
    whole = view().get_data()
    for _ in range(2):
        answer = served.app.test_client().post("/", headers=HEADERS)  # WebTest would decompress it
        assert answer.data == whole
        assert answer.headers["Content-Length"] == str(len(whole))
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert served.cuts == []


def test_a_large_body_that_may_not_be_cut_is_too_large_to_keep() -> None:
    served = Served(binary, {"RUNONCE_MAX_BODY_BYTES": 1000}, result_budget=600)
    assert len(served.post().body) == 5120
    assert served.post().json["code"] == "response_too_large"


def test_a_budget_over_what_is_kept_cuts_nothing_that_is_within_it() -> None:
    served = Served(lambda: (part for part in ["x" * 100] * 5), {"RUNONCE_MAX_BODY_BYTES": 150}, result_budget=600)
    assert served.post().text == "x" * 500
    assert served.post().json["code"] == "response_too_large"
    assert served.cuts == []


@pytest.mark.parametrize(
    ("config", "options", "cut"),
    [
        ({}, {}, False),
        ({"RUNONCE_RESULT_BUDGET": 600}, {}, True),
        ({"RUNONCE_RESULT_BUDGET": 600}, {"result_budget": None}, False),
        ({"RUNONCE_RESULT_BUDGET": 10**6}, {"result_budget": 600}, True),
    ],
)
def test_the_apps_budget_is_the_default_of_the_views(config: Any, options: Any, cut: bool) -> None:
    assert (MARKER in Served(text, config, **options).post().text) is cut


def test_a_request_that_is_no_call_is_not_cut() -> None:
    assert Served(text, result_budget=600).post(headers={}).text == LONG


def test_characters_stay_whole() -> None:
    long = "äöü€😀" * 500
    body = assert_bounded(Served(lambda: long, result_budget=601), 601, len(long.encode())).decode()
    assert MARKER in body and "\ufffd" not in body
