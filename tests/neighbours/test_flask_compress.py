"""Flask-Compress: each answer is encoded as its own request accepts."""

from __future__ import annotations

import gzip
import json
from typing import Any
from wsgiref.validate import validator

import pytest
from flask import Flask, Response
from flask_compress import Compress
from werkzeug.test import Client, TestResponse

from flask_runonce import RunOnce

from .calls import CHAT

SECTION = "Flask-Compress"
GZIP = {"Accept-Encoding": "gzip"}
NONE: dict[str, str] = {}


def call(app: Flask, path: str, headers: dict[str, str] = NONE, data: bytes = b"") -> TestResponse:
    """POST a call and keep its answer encoded, which WebTest would not."""
    ids = CHAT | {"Coder-Tool-Call-Id": "call"}
    return Client(validator(app)).post(path, headers=ids | headers, data=data, buffered=True)


def encoding(reply: TestResponse) -> str | None:
    return reply.headers.get("Content-Encoding")


def read(reply: TestResponse) -> Any:
    assert len(reply.data) == int(reply.headers["Content-Length"])
    return json.loads(gzip.decompress(reply.data) if encoding(reply) else reply.data)


@pytest.mark.parametrize(("first", "second"), [(GZIP, NONE), (NONE, GZIP), (GZIP, GZIP), (NONE, NONE)])
def test_a_repeat_is_encoded_as_it_accepts(
    names: dict[str, Any], first: dict[str, str], second: dict[str, str]
) -> None:
    replies = [call(names["app"], "/reports", accepted) for accepted in (first, second, first)]
    assert ["Idempotent-Replayed" in reply.headers for reply in replies] == [False, True, True]
    assert [encoding(reply) for reply in replies] == [
        accepted.get("Accept-Encoding") for accepted in (first, second, first)
    ]
    assert read(replies[0]) == read(replies[1]) == read(replies[2]) == {"lines": ["the same line"] * 1000}
    assert [reply.headers.getlist("Vary") for reply in replies] == [["Accept-Encoding"]] * 3


@pytest.mark.parametrize("accepted", ["br", "zstd", "deflate"])
def test_the_other_encodings_too(names: dict[str, Any], accepted: str) -> None:
    call(names["app"], "/reports")
    assert encoding(call(names["app"], "/reports", {"Accept-Encoding": accepted})) == accepted


def test_a_streamed_answer_and_its_etag(names: dict[str, Any]) -> None:
    @names["app"].post("/streamed")
    @names["runonce"].once
    def streamed() -> Response:
        response = Response((f"{number}\n" for number in range(1000)), mimetype="text/plain")
        response.set_etag("v1")
        return response

    first, plain, again = (call(names["app"], "/streamed", accepted) for accepted in (GZIP, NONE, GZIP))
    assert gzip.decompress(first.data) == plain.data == gzip.decompress(again.data)
    assert [reply.headers["ETag"] for reply in (first, plain, again)] == ['"v1:gzip"', '"v1"', '"v1:gzip"']


def test_an_answer_that_the_view_encoded_itself_is_left_alone(names: dict[str, Any]) -> None:
    @names["app"].post("/encoded")
    @names["runonce"].once
    def encoded() -> Response:
        return Response(gzip.compress(b"x" * 9000), mimetype="text/plain", headers={"Content-Encoding": "gzip"})

    replies = [call(names["app"], "/encoded", GZIP) for _ in range(2)]
    assert [gzip.decompress(reply.data) for reply in replies] == [b"x" * 9000] * 2


def test_a_refusal_is_left_as_it_is(names: dict[str, Any]) -> None:
    call(names["app"], "/reports")
    refused = call(names["app"], "/reports", GZIP, data=b"other")
    assert refused.json
    assert refused.json["code"] == "input_mismatch"
    assert encoding(refused) is None


@pytest.mark.parametrize("right", [True, False])
def test_the_order_on_a_single_view(right: bool) -> None:
    app = Flask(__name__)
    app.config["COMPRESS_REGISTER"] = False
    once, compressed = RunOnce(app).once, Compress(app).compressed()

    def report() -> dict[str, Any]:
        return {"lines": ["the same line"] * 1000}

    app.post("/reports")(compressed(once(report)) if right else once(compressed(report)))
    assert encoding(call(app, "/reports", GZIP)) == "gzip"
    assert encoding(call(app, "/reports")) == (None if right else "gzip")
