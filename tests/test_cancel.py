"""The cancel, list and show routes of the middleware (CONTRACT.md section 5)."""

from __future__ import annotations

import base64
import functools
import io
import string
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

import pytest
from werkzeug.exceptions import Forbidden

from flask_runonce import CallKey, SavedResponse, current_call
from flask_runonce.call import CanceledCall
from flask_runonce.errors import StoreUnavailable
from flask_runonce.problems import OUTCOME_UNKNOWN
from flask_runonce.record import Record, Seen, State
from flask_runonce.stores import MemoryStore, Page, Swapped
from tests.plain_app import (
    AT_ONCE,
    LIMIT,
    PREFIX,
    TEXT,
    Environ,
    LeasedStore,
    Site,
    WatchedStore,
    answer,
    ask,
    environ_of,
    headers,
    in_thread,
)

KEY = CallKey("", "chat-1", "call-1")
MADE = SavedResponse("201 Created", tuple(TEXT), b"made")
WITH_MADE = {"status": 201, "content_type": "text/plain", "body": base64.b64encode(b"made").decode()}
WITH_UNKNOWN = {
    "status": 500,
    "content_type": "application/problem+json",
    "body": base64.b64encode(OUTCOME_UNKNOWN.body).decode(),
}


def hooked_site(**options: Any) -> tuple[Site, list[CanceledCall]]:
    """A site whose handler makes something, and the calls that its cancel hook was called with."""
    site = Site(answer(b"made", "201 Created"), **options)
    hooked: list[CanceledCall] = []
    site.middleware.on_cancel(hooked.append)
    return site, hooked


# The cancel table, row by row


def test_none_it_is_not_received_and_will_not_run() -> None:
    site, hooked = hooked_site(store=MemoryStore(timer=lambda: 0.0))
    canceled = site.cancel()
    assert (canceled.status_int, canceled.json) == (200, {"received": False, "state": "not_received", "remembers": 0})
    assert hooked == [CanceledCall(KEY, "not_received", None)]
    assert site.call().json["code"] == "canceled"
    assert site.runs == 0


def test_running_it_waits_for_the_run_and_tells_what_it_answered() -> None:
    store = WatchedStore()
    site, hooked = hooked_site(store=store)
    with site.held() as first:
        repeat = in_thread(site.call)
        store.await_waiting()
        cancel = in_thread(site.cancel)
        store.await_waiting(2)  # the cancel, and the repeat that its mark has woken
        assert hooked == []
        assert site.call().json["code"] == "canceled"
    canceled = cancel.result(LIMIT)
    assert (canceled.status_int, canceled.json) == (200, {"received": True, "state": "running", **WITH_MADE})
    assert hooked == [CanceledCall(KEY, "running", MADE)]
    assert (first.result(LIMIT).body, repeat.result(LIMIT).body) == (b"made", b"made")
    assert site.call().json["code"] == "canceled"
    assert site.runs == 1


@pytest.mark.parametrize("by", ["current_call", "environ"])
def test_running_the_handler_learns_of_it(by: str) -> None:
    store = WatchedStore()
    told = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        call = current_call if by == "current_call" else environ["runonce.call"]
        told.append(call.canceled)
        cancels.append(in_thread(site.cancel))
        told.append(call.wait_canceled(LIMIT))
        told.append(call.canceled)
        told.append(call.wait_canceled(0))
        return answer(b"made", "201 Created")(environ, start_response)

    cancels: list[Any] = []
    site = Site(handler, store=store)
    assert site.call().body == b"made"
    assert told == [False, True, True, True]
    assert cancels[0].result(LIMIT).json == {"received": True, "state": "running", **WITH_MADE}


def test_running_a_handler_that_waits_for_no_cancel_waits_no_longer_than_it_says() -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        return answer(b"%d" % current_call.wait_canceled(0.001))(environ, start_response)

    assert Site(handler).call().body == b"0"


class _InterruptedStore(MemoryStore):
    """Calls `then()` once, right after the next swap."""

    then: Callable[[], object] | None = None

    def swap(self, *args: Any, **options: Any) -> Swapped:
        swapped = super().swap(*args, **options)
        then, self.then = self.then, None
        if then:
            then()
        return swapped


def test_running_a_cancel_between_the_claim_and_the_handler_reaches_the_handler() -> None:
    told = []

    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        told.append(environ["runonce.call"].canceled)
        return answer()(environ, start_response)

    store = _InterruptedStore()
    site = Site(handler, store=store, config=AT_ONCE)
    canceled = []
    store.then = lambda: canceled.append(site.cancel())
    site.call()
    assert (canceled[0].status_int, canceled[0].json) == (202, {"received": True, "state": "running"})
    assert told == [True]


def test_running_past_the_cancel_timeout_it_says_so_and_the_hooks_are_owed() -> None:
    site, hooked = hooked_site(config=AT_ONCE)
    with site.held():
        for _ in range(2):
            canceled = site.cancel()
            assert (canceled.status_int, canceled.json) == (202, {"received": True, "state": "running"})
            assert int(canceled.headers["Retry-After"]) > 0
        assert hooked == []
        assert site.call().json["code"] == "canceled"  # the mark stays
    assert hooked == [CanceledCall(KEY, "running", MADE)]
    assert site.cancel().json == {"received": True, "state": "running", **WITH_MADE}
    assert hooked == [CanceledCall(KEY, "running", MADE)] * 2


def test_running_past_the_cancel_timeout_a_run_that_fails_owes_its_hooks_too() -> None:
    def fail(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        raise ValueError("on purpose")

    site, hooked = hooked_site(config=AT_ONCE)
    site.handler = fail
    with site.held():
        site.cancel()
    assert hooked == [CanceledCall(KEY, "running", OUTCOME_UNKNOWN)]


def test_running_past_the_cancel_timeout_a_run_that_is_released_owes_its_hooks_too() -> None:
    site, hooked = hooked_site(config={**AT_ONCE, "RUNONCE_RELEASE_STATUSES": [201]})
    with site.held():
        site.cancel()
    assert hooked == [CanceledCall(KEY, "not_received", None)]
    assert site.cancel().json["received"] is False


def test_running_owner_lost_the_outcome_is_unknown() -> None:
    store = LeasedStore()
    site, hooked = hooked_site(store=store)
    with site.held() as first:
        store.dead = True
        canceled = site.cancel()
        assert (canceled.status_int, canceled.json) == (200, {"received": True, "state": "running", **WITH_UNKNOWN})
        assert hooked == [CanceledCall(KEY, "running", OUTCOME_UNKNOWN)]
    assert first.result(LIMIT).body == b"made"
    assert site.call().json["code"] == "canceled"
    assert site.cancel().json == canceled.json


class _AskedStore(LeasedStore):
    def __init__(self) -> None:
        super().__init__()
        self.leases: list[float | None] = []

    def swap(self, key: CallKey, seen: str, new: Record | None, **options: Any) -> Swapped:
        if new and new.state is State.RUNNING:
            self.leases.append(options["lease"])
        return super().swap(key, seen, new, **options)


def test_running_a_cancels_mark_is_no_sign_of_its_owners_life() -> None:
    site, _ = hooked_site(store=(store := _AskedStore()), config={**AT_ONCE, "RUNONCE_LEASE": 7})
    with site.held():
        site.cancel()
    assert store.leases[0] == 7  # the claim's
    assert set(store.leases[1:]) == {None}  # the marks leave it as it is


def test_running_owner_lost_a_repeat_calls_the_hooks_that_are_owed() -> None:
    store = LeasedStore()
    site, hooked = hooked_site(store=store, config={"RUNONCE_CANCEL_TIMEOUT": 0})
    with site.held():
        repeat = in_thread(site.call)
        store.await_waiting()
        store.lease = 0.05
        assert site.cancel().status_int == 202
        store.dead = True
        assert repeat.result(LIMIT).json["code"] == "outcome_unknown"
        assert hooked == [CanceledCall(KEY, "running", OUTCOME_UNKNOWN)]
    assert len(hooked) == 1


def test_done_it_tells_what_the_run_answered() -> None:
    site, hooked = hooked_site()
    site.call()
    canceled = site.cancel()
    assert (canceled.status_int, canceled.json) == (200, {"received": True, "state": "done", **WITH_MADE})
    assert hooked == [CanceledCall(KEY, "done", MADE)]
    assert site.call().json["code"] == "canceled"
    assert site.runs == 1


def test_done_an_unknown_outcome_is_told_as_such() -> None:
    site = Site(lambda environ, start_response: None, linted=False)
    with pytest.raises(TypeError):
        site.call()
    assert site.cancel().json == {"received": True, "state": "done", **WITH_UNKNOWN}


def test_done_what_is_empty_is_left_out() -> None:
    site = Site(answer(b"", "204 No Content", []))
    site.call()
    assert site.cancel().json == {"received": True, "state": "done", "status": 204}


def test_done_a_body_that_was_too_large_is_named() -> None:
    site = Site(answer(b"made", "201 Created"), config={"RUNONCE_MAX_BODY_BYTES": 3})
    site.call()
    expected = {**WITH_MADE, "body_too_large": True}
    del expected["body"]
    assert site.cancel().json == {"received": True, "state": "done", **expected}


def test_done_every_byte_of_the_body_is_told() -> None:
    body = bytes(range(256))
    site = Site(answer(body))
    site.call()
    assert base64.b64decode(site.cancel().json["body"]) == body


def _before_it_came(site: Site) -> None:
    site.cancel()


def _when_done(site: Site) -> None:
    site.call()
    site.cancel()


def _while_it_ran(site: Site) -> None:
    with site.held():
        site.cancel()


@pytest.mark.parametrize("earlier", [_before_it_came, _while_it_ran, _when_done], ids=["none", "running", "done"])
def test_canceled_earlier_the_same_answer_again(earlier: Callable[[Site], None]) -> None:
    site, hooked = hooked_site(store=MemoryStore(timer=lambda: 0.0), config=AT_ONCE)
    earlier(site)
    first = site.cancel()
    hooked.clear()
    for _ in range(2):
        again = site.cancel()
        assert (again.status_int, again.json) == (first.status_int, first.json)
    assert len(hooked) == 2  # the hooks are called again
    assert hooked[0] == hooked[1]
    assert hooked[0].state == first.json["state"]
    assert hooked[0].saved == (MADE if first.json["received"] else None)


# For how long the store can vouch for "not received"


def test_remembers_is_since_the_store_began_and_at_most_the_forget_time() -> None:
    clock = [50.0]
    site = Site(answer(), store=MemoryStore(timer=lambda: clock[0]))
    assert site.cancel("call-0").json["remembers"] == 0
    clock[0] += 100.9
    assert site.cancel("call-1").json["remembers"] == 100
    clock[0] += 10_000
    assert site.cancel("call-2").json["remembers"] == 3600


# Beyond RUNONCE_MAX_WAITING


def test_cancels_have_places_to_wait_besides_those_of_repeats() -> None:
    store = WatchedStore()
    site, hooked = hooked_site(store=store, config={"RUNONCE_MAX_WAITING": 1})
    with site.held():
        repeat = in_thread(site.call)
        store.await_waiting()
        cancel = in_thread(site.cancel)
        store.await_waiting(2)
        for _ in range(2):
            beyond = site.cancel()
            assert (beyond.status_int, beyond.json) == (202, {"received": True, "state": "running"})
        assert hooked == []
    assert repeat.result(LIMIT).body == b"made"
    assert cancel.result(LIMIT).json["state"] == "running"
    # once by the cancel that waited, once by the owner for those that could not
    assert hooked == [CanceledCall(KEY, "running", MADE)] * 2


def test_a_cancel_that_finds_no_place_to_wait_leaves_its_mark() -> None:
    site, hooked = hooked_site(config={"RUNONCE_MAX_WAITING": 0})
    with site.held():
        assert site.cancel().status_int == 202
        assert site.call().json["code"] == "canceled"
    assert hooked == [CanceledCall(KEY, "running", MADE)]


def test_places_to_wait_are_given_back() -> None:
    store = WatchedStore()
    site, _ = hooked_site(store=store, config={"RUNONCE_MAX_WAITING": 1})
    for tool_call_id in ("call-1", "call-2", "call-3"):
        with site.held(tool_call_id):
            cancel = in_thread(site.cancel, tool_call_id)
            store.await_waiting()
        assert cancel.result(LIMIT).status_int == 200


# Hooks


def test_hooks_are_called_in_order_and_on_cancel_is_a_decorator() -> None:
    site = Site(answer())
    called = []

    @site.middleware.on_cancel
    def one(call: CanceledCall) -> None:
        called.append(("one", call.key))

    site.middleware.on_cancel(lambda call: called.append(("two", call.key)))
    site.cancel()
    assert called == [("one", KEY), ("two", KEY)]
    one(CanceledCall(KEY, "done", None))
    assert len(called) == 3


def test_an_async_hook_would_never_be_awaited() -> None:
    """In Flask it is run: see `test_hooks_may_be_async_and_are_all_called_in_order`."""
    site = Site(answer())

    async def stop(call: CanceledCall) -> None:
        pass

    for hook in (stop, functools.partial(stop)):
        with pytest.raises(TypeError, match="nothing would await .*stop"):
            site.middleware.on_cancel(hook)
    assert site.cancel().status_int == 200


@pytest.mark.parametrize("error", [ValueError("on purpose"), Forbidden()], ids=["error", "HTTPException"])
def test_a_hook_that_raises_500_cancel_failed_and_the_others_are_called(error: Exception) -> None:
    site, hooked = hooked_site()
    errors = [error]

    def fail(call: CanceledCall) -> None:
        if errors:
            raise errors.pop()

    site.middleware.on_cancel(fail)
    site.middleware.on_cancel(hooked.append)
    failed = site.cancel()
    assert (failed.status_int, failed.json["code"]) == (500, "cancel_failed")
    assert len(hooked) == 2
    assert site.call().json["code"] == "canceled"  # the mark stays
    assert site.cancel().json["state"] == "not_received"
    assert site.runs == 0


def test_a_hook_that_raises_does_not_take_a_runs_response_away() -> None:
    def fail(call: CanceledCall) -> None:
        raise ValueError("on purpose")

    site = Site(answer(b"made", "201 Created"), config=AT_ONCE)
    hooked: list[CanceledCall] = []
    site.middleware.on_cancel(fail)
    site.middleware.on_cancel(hooked.append)
    with site.held() as first:
        assert site.cancel().status_int == 202
    assert first.result(LIMIT).body == b"made"
    assert hooked == [CanceledCall(KEY, "running", MADE)]


# What a cancel needs, and what it is not


@pytest.mark.parametrize("path", ["/call-1/cancel", "", "/call-1"], ids=["cancel", "list", "show"])
def test_a_chat_id_is_needed(path: str) -> None:
    site, hooked = hooked_site()
    method = "POST" if path.endswith("cancel") else "GET"
    refused = site.client.request(PREFIX + path, method=method, expect_errors=True)
    assert (refused.status_int, refused.json["code"]) == (400, "key_required")
    assert (site.store.list().total, hooked) == (0, [])


@pytest.mark.parametrize("path", ["/call-1/cancel", "", "/call-1"], ids=["cancel", "list", "show"])
@pytest.mark.parametrize("chat_id", ["", "a,b", "x" * 256, "caf\xe9"], ids=["empty", "comma", "long", "byte"])
def test_a_malformed_chat_id_is_refused(path: str, chat_id: str) -> None:
    site, hooked = hooked_site()
    environ = environ_of(REQUEST_METHOD="POST" if path.endswith("cancel") else "GET", PATH_INFO=PREFIX + path)
    refused = ask(site.middleware, {**environ, "HTTP_CODER_CHAT_ID": chat_id})
    assert (refused.status, refused.code) == ("400 Bad Request", "invalid_key")
    assert (site.store.list().total, hooked) == (0, [])


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize(
    "tool_call_id", ["", "a,b", "a b", "x" * 256, "caf\xe9", "\x7f", "00000000-0000-0000-0000-000000000000"], ids=ascii
)
def test_a_malformed_tool_call_id_is_refused(method: str, tool_call_id: str) -> None:
    site, hooked = hooked_site()
    path = f"{PREFIX}/{tool_call_id}" + ("/cancel" if method == "POST" else "")
    refused = ask(site.middleware, environ_of(REQUEST_METHOD=method, PATH_INFO=path))
    assert (refused.status, refused.code) == ("400 Bad Request", "invalid_key")
    assert (site.store.list().total, hooked) == (0, [])


@pytest.mark.parametrize("tool_call_id", ["call-1", "call-2", "a,b"], ids=["its own", "another", "malformed"])
def test_a_cancel_is_never_itself_a_call(tool_call_id: str) -> None:
    site, _ = hooked_site(config={"RUNONCE_REQUIRED": True})
    site.call()
    for _ in range(2):
        assert site.cancel(**{"Coder-Tool-Call-Id": tool_call_id}).json["state"] == "done"
    assert site.get().json["total"] == 1


def test_a_cancel_whose_body_is_sent_nevertheless_leaves_nothing_of_it() -> None:
    site, _ = hooked_site()
    body = io.BytesIO(b"x" * 9)
    environ = environ_of(PATH_INFO=f"{PREFIX}/call-1/cancel", CONTENT_LENGTH="9")
    environ["wsgi.input"] = body
    assert ask(site.middleware, environ).status == "200 OK"
    assert body.read() == b""


VISIBLE = "".join(sorted({*string.ascii_letters, *string.digits, *string.punctuation} - {","}))
IDS = [
    VISIBLE,
    *("/", "//", "/a", "a/", "a//b", "/a/b/", "..", "../../x", "./x"),
    *("cancel", "/cancel", "cancel/cancel", "a/cancel"),
    *("%", "%2F", "a%20b", "%25", "%252F"),
    *("?a=b", "a#b", "a;b=c", "a&b", "{a}", "<a>", '"a"', "'", "\\", "a:b", "+", "=", "~"),
]


@pytest.mark.parametrize("tool_call_id", IDS)
def test_an_id_may_hold_whatever_an_id_may(tool_call_id: str) -> None:
    site, hooked = hooked_site()
    site.call(tool_call_id)
    assert site.get(f"/{quote(tool_call_id, safe='')}").json["id"] == tool_call_id
    assert site.cancel(tool_call_id).json["state"] == "done"
    assert [call.key.tool_call_id for call in hooked] == [tool_call_id]
    assert site.call(tool_call_id).json["code"] == "canceled"


def test_each_spelling_of_a_uuid_is_the_same_call() -> None:
    site, _ = hooked_site()
    site.call("0af4d6d3-691c-45dd-ac54-55ea97970ebc")
    assert site.cancel("{0AF4D6D3691C45DDAC5455EA97970EBC}").json["state"] == "done"


def test_a_cancel_without_an_id_names_no_call() -> None:
    site, hooked = hooked_site()
    site.handler = answer(b"the app", "404 Not Found")
    assert site.client.post(f"{PREFIX}/cancel", headers=headers(None), expect_errors=True).body == b"the app"
    assert (hooked, site.store.list().total) == ([], 0)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/call-1/cancel"),
        ("DELETE", "/call-1"),
        ("POST", "/call-1"),
        ("POST", ""),
        ("HEAD", ""),
        ("POST", "-of-another/call-1/cancel"),
        ("GET", "-of-another"),
    ],
)
def test_what_is_none_of_the_routes_is_the_apps(method: str, path: str) -> None:
    site, hooked = hooked_site()
    site.handler = answer(b"", "404 Not Found")
    reply = site.client.request(PREFIX + path, method=method, headers=headers(None), expect_errors=True)
    assert (reply.status, reply.body, site.runs, hooked) == ("404 Not Found", b"", 1, [])


def test_the_routes_stand_where_the_app_is_mounted() -> None:
    site, _ = hooked_site()
    environ = environ_of(SCRIPT_NAME="/mounted", PATH_INFO=f"{PREFIX}/call-1/cancel")
    assert ask(site.middleware, environ).status == "200 OK"
    assert site.get("/call-1").json["state"] == "canceled"


def test_the_routes_go_by_scope_and_chat() -> None:
    site = Site(answer(), scope=lambda environ: environ.get("HTTP_X_TENANT"))
    site.call(**{"X-Tenant": "one"})
    assert site.cancel(**{"X-Tenant": "two"}).json["received"] is False
    assert site.cancel(chat_id="chat-2", **{"X-Tenant": "one"}).json["received"] is False
    assert site.cancel().json["received"] is False
    assert site.cancel(**{"X-Tenant": "one"}).json["received"] is True
    assert site.get(**{"X-Tenant": "three"}).json["total"] == 0
    assert site.get("/call-1", **{"X-Tenant": "three"}).status_int == 404


# Guards and scopes


def fail(environ: Environ) -> Any:
    raise ValueError("on purpose")


def refuse(environ: Environ) -> Any:
    raise Forbidden("Not yours.")


def routes_of(site: Site) -> list[Any]:
    return [site.cancel(), site.get(), site.get("/call-1")]


def test_a_guard_stands_before_the_routes_and_not_before_calls() -> None:
    site, hooked = hooked_site(guard=refuse)
    assert site.call().body == b"made"
    for refused in routes_of(site):
        assert refused.status_int == 403
        assert b"Not yours." in refused.body
    assert hooked == []
    assert site.call().body == b"made"  # it was not canceled


def test_a_guard_is_asked_before_anything_else_is_told() -> None:
    site, _ = hooked_site(guard=refuse)
    assert site.client.post(f"{PREFIX}/a,b/cancel", expect_errors=True).status_int == 403
    assert site.client.get(PREFIX, expect_errors=True).status_int == 403


def test_a_guard_that_lets_pass() -> None:
    asked = []
    site, _ = hooked_site(guard=lambda environ: asked.append(environ["PATH_INFO"]))
    assert [reply.status_int for reply in routes_of(site)] == [200, 200, 200]
    assert asked == [f"{PREFIX}/call-1/cancel", PREFIX, f"{PREFIX}/call-1"]


@pytest.mark.parametrize("name", ["guard", "scope"])
def test_a_guard_or_scope_that_raises_500_key_failed(name: str) -> None:
    site, hooked = hooked_site(**{name: fail})
    for refused in routes_of(site):
        assert (refused.status_int, refused.json["code"]) == (500, "key_failed")
    assert (site.store.list().total, hooked) == (0, [])


def test_an_http_exception_of_a_scope_is_the_answer() -> None:
    site, hooked = hooked_site(scope=refuse)
    assert [reply.status_int for reply in routes_of(site)] == [403] * 3
    assert (site.store.list().total, hooked) == (0, [])


def test_a_scope_that_makes_no_sense_500_key_failed() -> None:
    site, _ = hooked_site(scope=lambda environ: "a\nb")
    assert [reply.json["code"] for reply in routes_of(site)] == ["key_failed"] * 3


def test_several_processes_need_a_store_that_they_share() -> None:
    site, _ = hooked_site()
    for method, path in (("POST", "/call-1/cancel"), ("GET", ""), ("GET", "/call-1")):
        environ = environ_of(REQUEST_METHOD=method, PATH_INFO=PREFIX + path, **{"wsgi.multiprocess": True})
        assert ask(site.middleware, environ).code == "store_not_shared"


class _AwayStore(MemoryStore):
    def swap(self, *args: Any, **options: Any) -> Swapped:
        raise StoreUnavailable("on purpose")

    def read(self, key: CallKey) -> Seen:
        raise StoreUnavailable("on purpose")

    def list(self, **options: Any) -> Page:
        raise StoreUnavailable("on purpose")


def test_a_store_that_is_away_says_so(caplog: pytest.LogCaptureFixture) -> None:
    site, hooked = hooked_site(store=_AwayStore())
    for refused in routes_of(site):
        assert (refused.status_int, refused.json["code"]) == (503, "store_unavailable")
    assert hooked == []
    lines = [record for record in caplog.records if "cannot answer" in record.getMessage()]
    assert {line.chat_id for line in lines} == {"chat-1"}  # type: ignore[attr-defined]
    assert {line.tool_call_id for line in lines} == {"", "call-1"}  # type: ignore[attr-defined]


# List and show


def test_a_list_of_nothing() -> None:
    site = Site(answer())
    assert site.get().json == {"tool_calls": [], "total": 0, "offset": 0, "has_more": False}


def test_a_list_tells_of_each_call_newest_first() -> None:
    clock = [0.0]
    site = Site(answer(b"made", "201 Created"), store=MemoryStore(timer=lambda: clock[0]), config=AT_ONCE)

    def fail(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        raise ValueError("on purpose")

    began = site.store.read(KEY).now
    site.cancel("before-it-came")
    clock[0] += 10
    with site.held("running"):
        site.call("running")
        site.call("running", path="/other")
        clock[0] += 10
        with site.held("canceled-while-running"):
            site.cancel("canceled-while-running")
            clock[0] += 10
            site.call("done")
            clock[0] += 10
            for send in (site.call, site.cancel, site.cancel, site.call):
                send("canceled-when-done")
            clock[0] += 10
            made, site.handler = site.handler, fail
            with pytest.raises(ValueError, match="on purpose"):
                site.call("unknown")
            site.handler = made
            listed = site.get().json
            shown = [site.get(f"/{call['id']}").json for call in listed["tool_calls"]]
    assert (listed["total"], listed["offset"], listed["has_more"]) == (6, 0, False)
    assert shown == listed["tool_calls"]
    for call in listed["tool_calls"]:
        for name in ("started_at", "finished_at"):
            call[name] = None if call[name] is None else round(call[name] - began)
    none = {"canceled": False, "started_at": None, "finished_at": None, "status": None, "repeats": 0}
    running = {**none, "state": "running"}
    done = {**none, "state": "done", "status": 201}
    assert listed["tool_calls"] == [
        {**done, "id": "unknown", "started_at": 50, "finished_at": 50, "status": 500},
        {**done, "id": "canceled-when-done", "canceled": True, "started_at": 40, "finished_at": 40, "repeats": 1},
        {**done, "id": "done", "started_at": 30, "finished_at": 30},
        {**running, "id": "canceled-while-running", "canceled": True, "started_at": 20},
        {**running, "id": "running", "started_at": 10, "repeats": 2},
        {**none, "id": "before-it-came", "state": "canceled", "canceled": True},
    ]


def test_a_list_comes_in_pages() -> None:
    clock = [0.0]
    site = Site(answer(), store=MemoryStore(timer=lambda: clock[0]))
    for number in range(120):
        clock[0] += 1
        site.call(f"{number}")

    def page(query: str) -> tuple[list[int], int, int, bool]:
        found = site.get(query).json
        ids = [int(call["id"]) for call in found["tool_calls"]]
        return ids, found["total"], found["offset"], found["has_more"]

    newest_first = list(range(119, -1, -1))
    assert page("") == page("?offset=0") == page("?limit=50") == (newest_first[:50], 120, 0, True)
    assert page("?offset=70") == (newest_first[70:], 120, 70, False)
    assert page("?offset=69") == (newest_first[69:119], 120, 69, True)
    assert page("?limit=1") == ([119], 120, 0, True)
    assert page("?limit=200") == (newest_first, 120, 0, False)
    assert page("?limit=20&offset=110") == (newest_first[110:], 120, 110, False)
    assert page("?limit=20&offset=120") == ([], 120, 120, False)
    assert page("?offset=9007199254740992") == ([], 120, 2**53, False)


INVALID = [
    *("limit=0", "limit=201", "limit=-1", "limit=", "limit=ten", "limit=1.5", "limit=%2B1", "limit=%201", "limit=1e2"),
    *("limit=%D9%A1", "limit=1&limit=2", "limit=99999999999999999999", "offset=-1", "offset=", "offset=x"),
    *("offset=0&offset=0", "offset=99999999999999999999", "limit=50&offset=-1"),
]


@pytest.mark.parametrize("query", INVALID)
def test_a_query_that_makes_no_sense_400_invalid_query(query: str) -> None:
    refused = Site(answer()).get(f"?{query}")
    assert (refused.status_int, refused.json["code"]) == (400, "invalid_query")
    assert ("offset" if "offset=-" in query or query.startswith("offset") else "limit") in refused.json["detail"]


def test_a_call_that_is_not_known_404_unknown_call() -> None:
    site = Site(answer())
    site.call()
    unknown = site.get("/call-2")
    assert (unknown.status_int, unknown.json["code"]) == (404, "unknown_call")
    assert site.get("/call-1", chat_id="chat-2").status_int == 404


@pytest.mark.parametrize("path", ["", "/call-1"], ids=["list", "show"])
def test_a_look_does_not_renew_a_records_age(path: str) -> None:
    clock = [0.0]
    site = Site(answer(), store=MemoryStore(timer=lambda: clock[0]), config={"RUNONCE_FORGET_AFTER": 100})
    site.call()
    clock[0] += 99
    site.get(path)
    clock[0] += 1
    site.call()
    assert site.runs == 2


def test_a_look_is_no_repeat() -> None:
    site = Site(answer())
    site.call()
    for _ in range(3):
        assert site.get("/call-1").json["repeats"] == 0
