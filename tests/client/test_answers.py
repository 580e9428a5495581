import time
from email.utils import formatdate

import httpx
import pytest

from flask_runonce.client.answers import error_detail, refusal, retry_after

PROBLEM = {"Content-Type": "application/problem+json; charset=utf-8"}


@pytest.mark.parametrize(
    ("response", "detail"),
    [
        (httpx.Response(400, json={"error": {"message": "inner", "type": "x"}}), "inner"),
        (httpx.Response(400, json={"error": "inner"}), "inner"),
        (httpx.Response(400, json={"message": "inner", "detail": "more"}), "inner"),
        (httpx.Response(400, json={"title": "T", "detail": "inner", "message": "M"}, headers=PROBLEM), "inner"),
        (httpx.Response(400, json={"title": "inner"}, headers=PROBLEM), "inner"),
        (httpx.Response(400, text="inner\n"), "inner"),
        (httpx.Response(502, html="<h1>Bad</h1>"), "The server answered 502 Bad Gateway."),
        (httpx.Response(500, json={"error": None}), "The server answered 500 Internal Server Error."),
        (httpx.Response(500, json=["message"]), "The server answered 500 Internal Server Error."),
        (httpx.Response(599), "The server answered 599."),
    ],
)
def test_the_detail_comes_without_its_wrapping(response, detail):
    assert error_detail(response) == detail


def test_only_our_own_problem_documents_are_refusals():
    ours = {"type": "urn:flask-runonce:canceled", "code": "canceled"}
    assert refusal(httpx.Response(409, json=ours, headers=PROBLEM)) == ours
    assert refusal(httpx.Response(409, json=ours)) is None
    assert refusal(httpx.Response(409, json={"type": "about:blank", "code": "canceled"}, headers=PROBLEM)) is None
    assert refusal(httpx.Response(404, content=b"{", headers=PROBLEM)) is None


@pytest.mark.parametrize(("value", "seconds"), [(None, 0), ("7", 7), ("-7", 0), ("soon", 0), ("1.5", 0), ("٣", 0)])
def test_retry_after_in_seconds(value, seconds):
    headers = {} if value is None else {"Retry-After": value.encode()}
    assert retry_after(httpx.Response(503, headers=headers)) == seconds


def test_retry_after_as_a_date(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    in_a_minute = httpx.Response(503, headers={"Retry-After": formatdate(1_700_000_060, usegmt=True)})
    past = httpx.Response(503, headers={"Retry-After": formatdate(1_600_000_000, usegmt=True)})
    assert retry_after(in_a_minute) == 60
    assert retry_after(past) == 0
