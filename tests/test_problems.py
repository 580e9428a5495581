"""Each row of the refusals table (CONTRACT.md section 6), provoked over the middleware; and how a repeat looks."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from flask_runonce.errors import InvalidKey, StoreFull, StoreUnavailable, UnreadableRecord
from flask_runonce.problems import OUTCOME_UNKNOWN, PROBLEMS, Answer, invalid_key, problem, replay, store_problem
from flask_runonce.record import SavedResponse
from flask_runonce.stores import MemoryStore
from tests.plain_app import TEXT, Reply, Site, answer, ask, environ_of

AT_ONCE = {"RUNONCE_WAIT_TIMEOUT": 0, "RUNONCE_CANCEL_TIMEOUT": 0}

TABLE = {
    "invalid_key": (400, False),
    "key_required": (400, False),
    "invalid_query": (400, False),
    "incomplete_body": (400, True),
    "canceled": (409, False),
    "input_mismatch": (409, False),
    "response_too_large": (409, False),
    "still_running": (409, True),
    "unknown_call": (404, False),
    "outcome_unknown": (500, False),
    "cancel_failed": (500, False),
    "key_failed": (500, False),
    "store_not_shared": (500, False),
    "store_unavailable": (503, True),
    "store_full": (503, True),
}


def _fail(*args: Any) -> Any:
    raise ValueError("on purpose")


class _AwayStore(MemoryStore):
    def swap(self, *args: Any, **options: Any) -> Any:
        raise StoreUnavailable("on purpose")


def _cut_off() -> Any:
    site = Site(answer())
    environ = environ_of(CONTENT_LENGTH="9")
    environ["wsgi.input"] = io.BytesIO(b"x")
    return site, ask(site.middleware, environ)


def _canceled() -> Any:
    site = Site(answer())
    site.cancel()
    return site, site.call()


def _input_mismatch() -> Any:
    site = Site(answer())
    site.call(body=b"one")
    return site, site.call(body=b"two")


def _response_too_large() -> Any:
    site = Site(answer(b"xx", "201 Created"), config={"RUNONCE_MAX_BODY_BYTES": 1})
    site.call()
    return site, site.call()


def _still_running() -> Any:
    site = Site(answer(), config=AT_ONCE)
    with site.held():
        return site, site.call()


def _outcome_unknown() -> Any:
    site = Site(_fail)
    with pytest.raises(ValueError, match="on purpose"):
        site.call()
    return site, site.call()


def _cancel_failed() -> Any:
    site = Site(answer())
    site.middleware.on_cancel(_fail)
    return site, site.cancel()


def _one(make: Callable[[Site], Any], **options: Any) -> Callable[[], Any]:
    def provoke() -> Any:
        site = Site(answer(), **options)
        return site, make(site)

    return provoke


# How often the handler ran, and what provokes the refusal
PROVOKED: dict[str, tuple[int, Callable[[], Any]]] = {
    "invalid_key": (0, _one(lambda site: site.call("a,b"))),
    "key_required": (0, _one(lambda site: site.call(None), config={"RUNONCE_REQUIRED": True})),
    "invalid_query": (0, _one(lambda site: site.get("?limit=0"))),
    "incomplete_body": (0, _cut_off),
    "canceled": (0, _canceled),
    "input_mismatch": (1, _input_mismatch),
    "response_too_large": (1, _response_too_large),
    "still_running": (1, _still_running),
    "unknown_call": (0, _one(lambda site: site.get("/call-1"))),
    "outcome_unknown": (1, _outcome_unknown),
    "cancel_failed": (0, _cancel_failed),
    "key_failed": (0, _one(lambda site: site.call(), scope=_fail)),
    "store_not_shared": (0, _one(lambda site: site.call(environ={"wsgi.multiprocess": True}))),
    "store_unavailable": (0, _one(lambda site: site.call(), store=_AwayStore())),
    "store_full": (0, _one(lambda site: site.call(), store=MemoryStore(max_bytes=100))),
}


def test_the_table_has_a_row_for_each_problem() -> None:
    assert TABLE.keys() == PROVOKED.keys() == PROBLEMS.keys()


@pytest.mark.parametrize("code", TABLE)
def test_a_refusal(code: str) -> None:
    status, retryable = TABLE[code]
    runs, provoke = PROVOKED[code]
    site, refused = provoke()
    reply = refused if isinstance(refused, Reply) else Reply(refused.status, refused.headerlist, refused.body)
    sent = dict(reply.headers)
    document = json.loads(reply.body)

    assert reply.status.startswith(f"{status} ")
    assert sent["Content-Type"] == "application/problem+json"
    assert sent["Content-Length"] == str(len(reply.body))
    assert document["type"] == f"urn:flask-runonce:{code}"
    assert document["code"] == code
    assert document["status"] == status
    assert document["retryable"] is retryable
    assert document["message"] == document["title"]
    if retryable:
        assert int(sent["Retry-After"]) > 0
    else:
        assert "Retry-After" not in sent
    assert site.runs == runs
    for text in (document["title"], document["detail"]):
        _is_one_sentence(text)


def _is_one_sentence(text: str) -> None:
    assert re.fullmatch(r"[A-Z][^\n]*\.", text), text
    assert not re.search(r"[.!?]\s", text), text


def test_canceled_says_so() -> None:
    document = json.loads(problem("canceled").body)
    assert {document["title"], document["detail"], document["message"]} == {"The tool call was canceled."}


def test_outcome_unknown_says_what_to_do() -> None:
    document = json.loads(problem("outcome_unknown").body)
    assert "may or may not have taken effect" in document["detail"]
    assert "check before" in document["detail"]
    assert "new ID" in document["detail"]


def test_response_too_large_says_how_the_run_ended() -> None:
    assert _response_too_large()[1].json["saved_status"] == 201


def test_invalid_key_says_which_id_and_why() -> None:
    detail = json.loads(invalid_key(InvalidKey("chat ID", "is empty")).body)["detail"]
    assert detail.startswith("The chat ID is empty")
    _is_one_sentence(detail)


def test_a_detail_and_members_may_be_given() -> None:
    document = json.loads(problem("still_running", "Ask again.", since=7).body)
    assert (document["detail"], document["since"], document["code"]) == ("Ask again.", 7, "still_running")


def test_a_problem_knows_its_code() -> None:
    assert problem("canceled").code == "canceled"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreFull("no room"), "store_full"),
        (StoreUnavailable("away"), "store_unavailable"),
        (UnreadableRecord("from the future"), "store_unavailable"),
    ],
    ids=["full", "away", "unreadable"],
)
def test_a_store_that_cannot_answer_refuses(error: Any, code: str) -> None:
    refused = store_problem(error)
    assert (refused.code, refused.status) == (code, "503 Service Unavailable")


def test_a_refusal_is_a_wsgi_app() -> None:
    refused = problem("canceled")
    assert ask(refused, environ_of()) == Reply("409 Conflict", list(refused.headers), refused.body)


# Repeats


def test_a_repeat_has_what_was_saved_and_is_marked() -> None:
    links = (("Link", "</1>"), ("Link", "</2>"))
    assert replay(SavedResponse("201 MADE", (*TEXT, *links), b"done")) == Answer(
        "201 MADE", (*TEXT, *links, ("Idempotent-Replayed", "true"), ("Content-Length", "4")), b"done"
    )


def test_a_repeat_of_an_empty_body_says_that_it_is_empty() -> None:
    repeat = replay(SavedResponse("200 OK"))
    assert dict(repeat.headers)["Content-Length"] == "0"
    assert list(repeat(environ_of(), lambda *head: io.BytesIO().write)) == []


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_a_repeat_without_content_has_no_length(status: str) -> None:
    assert "Content-Length" not in dict(replay(SavedResponse(status)).headers)


def test_an_unknown_outcome_is_answered_like_a_saved_response() -> None:
    assert OUTCOME_UNKNOWN.status_code == 500
    assert OUTCOME_UNKNOWN.content_type == "application/problem+json"
    assert json.loads(OUTCOME_UNKNOWN.body)["code"] == "outcome_unknown"


def test_a_repeat_of_an_unknown_outcome_is_marked_as_one() -> None:
    repeat = _outcome_unknown()[1]
    assert repeat.headers["Idempotent-Replayed"] == "true"
    assert repeat.headers.getall("Content-Length") == [str(len(repeat.body))]
