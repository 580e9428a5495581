"""`examples/plain_wsgi` through WebTest: each way in which a WSGI app may answer is saved and repeated as it was."""

from __future__ import annotations

import pytest
from webtest import TestApp

from examples.plain_wsgi import create_application

CALL = {"Coder-Chat-Id": "chat", "Coder-Tool-Call-Id": "call"}

ANSWERS = {
    "/list": (201, b"order 1"),
    "/written": (201, b"written, then returned"),
    "/generated": (201, b"piece by piece"),
    "/recovered": (422, b"no such order"),
    "/closing": (201, b"close me"),
    "/file": (200, bytes(range(256)) * 1024),
    "/links": (200, b"linked"),
    "/empty": (204, b""),
}


@pytest.mark.parametrize("path", ANSWERS)
def test_each_answer_is_repeated_as_it_was(path: str) -> None:
    orders, application = create_application()
    service = TestApp(application)
    replies = [service.post(path, headers=CALL, status="*") for _ in range(3)]
    assert [(reply.status_int, reply.body) for reply in replies] == [ANSWERS[path]] * 3
    assert [reply.status for reply in replies] == [replies[0].status] * 3
    assert orders.taken[path] == 1
    assert ["Idempotent-Replayed" in reply.headers for reply in replies] == [False, True, True]


def test_a_body_is_closed_exactly_once() -> None:
    orders, application = create_application()
    service = TestApp(application)
    for _ in range(3):
        service.post("/closing", headers=CALL)
    assert orders.closed["/closing"] == 1


def test_repeated_headers_keep_their_order_and_cookies_are_the_first_callers() -> None:
    service = TestApp(create_application()[1])
    for _ in range(2):
        links = service.post("/links", headers=CALL).headers.getall("Link")
        assert links == ["</1>; rel=first", "</9>; rel=last"]
    call = {**CALL, "Coder-Tool-Call-Id": "another"}
    assert service.post("/list", headers=call).headers["Set-Cookie"] == "seen=1"
    repeat = TestApp(service.app).post("/list", headers=call)
    assert "Set-Cookie" not in repeat.headers
    assert "X-Order" not in repeat.headers


def test_a_page_that_is_not_there_is_an_answer_too() -> None:
    service = TestApp(create_application()[1])
    for _ in range(2):
        assert service.post("/nowhere", headers=CALL, status=404).body == b"no such page"
