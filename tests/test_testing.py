"""The testing kit: it passes what is right, and says in words what is wrong with what is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import flask
import pytest
from flask import Flask, request
from markdown_it import MarkdownIt
from webtest import TestRequest
from werkzeug.exceptions import Unauthorized
from werkzeug.wrappers import Request, Response

import examples.incident
import examples.notes
import examples.plain_wsgi
from flask_runonce import RunOnce, RunOnceMiddleware, current_call, keys
from flask_runonce.problems import problem
from flask_runonce.stores import MemoryStore
from flask_runonce.testing import Clock, RunOnceTestApp, assert_runs_once
from flask_runonce.testing.runs_once import AT_ONCE
from flask_runonce.testing.threads import LIMIT, together

ROOT = Path(__file__).parent.parent
PREFIX = "/api/v0/tool-calls"
REPLAYED = {"Idempotent-Replayed": "true"}
METHODS = ["POST", "PUT", "PATCH", "DELETE"]
MEASURED = {name: value for name, value in os.environ.items() if name == "COVERAGE_PROCESS_CONFIG"}
"""By this a Python that is started knows that its coverage is measured."""


class Shop:
    """A Flask app that takes orders, and the list of them. `options` are those of `RunOnce`, `config` is the app's."""

    def __init__(self, *, once: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **options: Any):
        self.orders: list[str] = []
        self.app = Flask(__name__)
        self.app.config.update(config or {})
        self.runonce = RunOnce(self.app, **{"guard": lambda environ: None, **options})

        @self.app.route("/orders", methods=METHODS)
        @self.runonce.once(**once or {})
        def order() -> Any:
            self.orders.append(request.get_data(as_text=True))
            return {"number": len(self.orders)}, 201, {"Location": f"/orders/{len(self.orders)}"}

        @self.app.route("/echo", methods=["GET", "HEAD", "OPTIONS", *METHODS], provide_automatic_options=False)
        def echo() -> Any:
            """The request's headers, in a header, which a HEAD has too."""
            names = ("Coder-Chat-Id", "Coder-Tool-Call-Id")
            return "", 200, {"X-Echo": " ".join(request.headers.get(name, "-") for name in names)}

    def count(self) -> int:
        return len(self.orders)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def client(shop: Shop) -> RunOnceTestApp:
    return RunOnceTestApp(shop.app)


# Requests


@pytest.mark.parametrize(
    "method",
    ["get", "head", "options", *("post", "post_json", "put", "put_json"), *("patch", "patch_json", "delete")],
)
def test_each_method_takes_ids(client: RunOnceTestApp, method: str) -> None:
    send = getattr(client, method)
    assert send("/echo", chat="c", tool_call="t").headers["X-Echo"] == "c t"
    assert send("/echo", tool_call="t").headers["X-Echo"] == "chat-1 t"
    assert send("/echo", headers={"X-Other": "1"}, chat="c").headers["X-Echo"] == "c -"
    assert send("/echo").headers["X-Echo"] == "chat-1 -"


@pytest.mark.filterwarnings("ignore:You are not supposed to send a body in a DELETE request")  # WebTest's opinion
def test_a_delete_with_json_takes_ids(client: RunOnceTestApp) -> None:
    assert client.delete_json("/echo", {"a": 1}, tool_call="t").headers["X-Echo"] == "chat-1 t"


@pytest.mark.parametrize("made", [str, TestRequest.blank])
def test_a_request_takes_ids(client: RunOnceTestApp, made: Callable[[str], Any]) -> None:
    assert client.request(made("/echo"), method="PUT", tool_call="t").headers["X-Echo"] == "chat-1 t"
    assert client.request(made("/echo")).headers["X-Echo"] == "chat-1 -"


def test_ids_may_be_uuids(client: RunOnceTestApp) -> None:
    chat, call = uuid.uuid4(), uuid.uuid4()
    assert client.post("/echo", chat=chat, tool_call=call).headers["X-Echo"] == f"{chat} {call}"


def test_headers_of_ones_own_win(client: RunOnceTestApp) -> None:
    headers = {"Coder-Chat-Id": "mine"}
    assert client.post("/echo", headers=headers, tool_call="t").headers["X-Echo"] == "mine t"
    assert headers == {"Coder-Chat-Id": "mine"}


def test_the_chat_of_a_client_is_for_requests_that_name_none(shop: Shop) -> None:
    assert RunOnceTestApp(shop.app, chat="c").post("/echo").headers["X-Echo"] == "c -"
    client = RunOnceTestApp(shop.app, chat=None)
    assert client.post("/echo", tool_call="t").headers["X-Echo"] == "- t"
    assert client.post("/echo", chat="c").headers["X-Echo"] == "c -"


def test_threads_do_not_mix_their_ids(client: RunOnceTestApp) -> None:
    def send(number: int) -> set[str]:
        return {client.post("/echo", tool_call=f"call-{number}").headers["X-Echo"] for _ in range(20)}

    assert together(*(lambda n=n: send(n) for n in range(8))) == [{f"chat-1 call-{n}"} for n in range(8)]


def test_webtests_own_arguments_are_its_own(shop: Shop) -> None:
    client = RunOnceTestApp(shop.app, {"HTTP_X_USER": "ada"}, lint=False)
    assert client.extra_environ == {"HTTP_X_USER": "ada"}
    assert client.lint is False


def test_a_call_is_sent_repeated_and_canceled(shop: Shop, client: RunOnceTestApp) -> None:
    first = client.post_json("/orders", {"item": "tea"}, tool_call="call-1")
    repeat = client.post_json("/orders", {"item": "tea"}, tool_call="call-1")
    assert (repeat.json, repeat.headers["Idempotent-Replayed"]) == (first.json, "true")
    client.post_json("/orders", {"item": "tea"}, chat="chat-2", tool_call="call-1")
    assert shop.count() == 2
    assert client.cancel("call-1").json["state"] == "done"
    assert client.cancel("call-1", chat="chat-3").json["state"] == "not_received"
    assert client.get(PREFIX).json["total"] == 1


@pytest.mark.parametrize("call", ["a/b", "/a", "a%2Fb", "a?b", "a#b", "%"])
def test_a_cancel_of_an_id_with_odd_characters(client: RunOnceTestApp, call: str) -> None:
    client.post("/orders", tool_call=call)
    assert client.cancel(call).json["received"] is True


def test_renamed_headers_and_routes_are_found_in_the_app() -> None:
    config = {
        "RUNONCE_CHAT_ID_HEADER": "X-Chat",
        "RUNONCE_TOOL_CALL_ID_HEADER": "X-Call",
        "RUNONCE_URL_PREFIX": "/calls",
    }
    for client in (
        RunOnceTestApp(Shop(config=config).app),
        RunOnceTestApp(RunOnceMiddleware(examples.plain_wsgi.Orders(), config=config), config=config),
    ):
        path = "/orders" if isinstance(client.app, Flask) else "/list"
        client.post(path, tool_call="call-1")
        assert client.post(path, tool_call="call-1").headers["Idempotent-Replayed"] == "true"
        assert client.cancel("call-1").json["state"] == "done"


def test_an_app_without_cancel_routes() -> None:
    client = RunOnceTestApp(Shop(config={"RUNONCE_URL_PREFIX": None}).app)
    with pytest.raises(ValueError, match="RUNONCE_URL_PREFIX"):
        client.cancel("call-1")


def test_a_setting_that_makes_no_sense_is_refused(shop: Shop) -> None:
    with pytest.raises(ValueError, match="RUNONCE_CHAT_HEADER"):
        RunOnceTestApp(shop.app, config={"RUNONCE_CHAT_HEADER": "X-Chat"})


# Time


def test_a_clock_stands_still() -> None:
    clock = Clock()
    assert clock() == clock() == 0
    clock.advance(1.5)
    clock.advance(0)
    assert clock() == 1.5
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1)
    assert clock() == 1.5


def test_calls_are_forgotten_when_the_clock_says_so() -> None:
    clock = Clock()
    shop = Shop(store=MemoryStore(timer=clock), config={"RUNONCE_FORGET_AFTER": 60})
    client = RunOnceTestApp(shop.app)
    for seconds, orders in ((0, 1), (59, 1), (59, 1), (60, 2)):
        clock.advance(seconds)
        client.post("/orders", tool_call="call-1")
        assert shop.count() == orders


# Whole calls: what is right passes


@pytest.mark.parametrize("method", METHODS)
def test_a_view_that_runs_once(shop: Shop, method: str) -> None:
    first = assert_runs_once(shop.app, method, "/orders", effects=shop.count)
    assert first.json == {"number": 1}
    assert shop.count() == 2
    assert_runs_once(shop.app, method, "/orders", effects=shop.count)


def test_the_request_is_as_it_is_said(shop: Shop) -> None:
    assert_runs_once(shop.app, "PUT", "/orders?a=1", params={"item": "tea"}, content_type="text/plain")
    assert_runs_once(shop.app, "POST", "/orders", json={"item": "tea"})
    assert_runs_once(shop.app, "POST", "/orders", upload_files=[("file", "a.txt", b"tea")])
    assert shop.orders[0] == "item=tea"
    assert shop.orders[2] == '{"item": "tea"}'
    assert "a.txt" in shop.orders[4]


@pytest.mark.parametrize(
    "config",
    [
        {"RUNONCE_MAX_WAITING": 0},
        {"RUNONCE_WAIT_TIMEOUT": 0},
        {"RUNONCE_URL_PREFIX": None},
        {"RUNONCE_URL_PREFIX": "/calls", "RUNONCE_TOOL_CALL_ID_HEADER": "X-Call"},
        {"RUNONCE_STORE_URI": "sqlite:///{folder}/runonce.db"},
    ],
)
def test_settings_that_change_what_repeats_get(config: dict[str, Any], tmp_path: Path) -> None:
    config = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in config.items()}
    shop = Shop(config=config)
    assert_runs_once(shop.app, "POST", "/orders", effects=shop.count)
    shop.app.extensions["runonce"].runner.store.close()


def test_repeats_that_are_told_to_come_again_are() -> None:
    shop = Shop(config={"RUNONCE_MAX_WAITING": 0})
    held = threading.Event()
    refused: list[int] = []

    @shop.app.post("/held")
    @shop.runonce.once
    def hold() -> str:
        if shop.orders:  # the second call
            assert held.wait(LIMIT)
        shop.orders.append("")
        return "taken"

    @shop.app.after_request
    def let_go(response: Any) -> Any:
        if response.status_code == 409:
            refused.append(1)
            if len(refused) == AT_ONCE - 1:
                held.set()
        return response

    assert_runs_once(shop.app, "POST", "/held", effects=shop.count)
    assert len(refused) > AT_ONCE - 1


def test_an_answer_that_is_an_error_is_said() -> None:
    shop = Shop()

    @shop.app.post("/nothing")
    @shop.runonce.once
    def nothing() -> Any:
        shop.orders.append("")
        return {"error": "nothing there"}, 404

    first = assert_runs_once(shop.app, "POST", "/nothing", status=404, effects=shop.count)
    assert first.json == {"error": "nothing there"}


def test_another_key() -> None:
    shop = Shop(key=keys.idempotency_key, scope=lambda environ: "tenant")
    client = RunOnceTestApp(shop.app, chat="-", config={"RUNONCE_TOOL_CALL_ID_HEADER": "Idempotency-Key"})
    assert_runs_once(client, "POST", "/orders", effects=shop.count)


def test_an_async_view_behind_the_middleware_too() -> None:
    shop = Shop()

    @shop.app.post("/later")
    @shop.runonce.once
    async def later() -> str:
        shop.orders.append("")
        return "taken"

    assert_runs_once(shop.app, "POST", "/later", effects=shop.count)
    assert_runs_once(RunOnceMiddleware(shop.app, guard=lambda environ: None), "POST", "/later", effects=shop.count)


@pytest.mark.parametrize("path", ["list", "written", "generated", "recovered", "closing", "file", "links", "empty"])
def test_each_page_of_the_plain_sample(path: str) -> None:
    orders, application = examples.plain_wsgi.create_application()
    status = 422 if path == "recovered" else None
    assert_runs_once(application, "POST", f"/{path}", status=status, effects=lambda: orders.taken[f"/{path}"])


@pytest.mark.parametrize(("path", "sent"), [("/commands", {"command": "make"}), ("/files", {"a": 1})])
def test_the_sample_of_the_incident(path: str, sent: dict[str, Any]) -> None:
    client = RunOnceTestApp(examples.incident.create_app())
    assert_runs_once(client, "POST", path, json=sent, effects=lambda: sum(client.get("/starts").json.values()))


def test_the_notes_service_with_its_login_and_its_token(tmp_path: Path) -> None:
    config = {"DATABASE": str(tmp_path / "notes.db"), "PASSWORD_METHOD": "pbkdf2:sha256:1"}
    client = RunOnceTestApp(examples.notes.create_app(config))
    account = {"name": "ada", "password": "secret"}
    client.post("/users", account)
    token = client.post("/login", account).json["csrf_token"]

    def notes() -> int:
        return len(client.get("/notes").json["notes"])

    note = {"title": "tea", "text": "buy some"}
    first = assert_runs_once(client, "POST", "/notes", json=note, headers={"X-CSRF-Token": token}, effects=notes)
    # The second call finds nothing to delete any more: its run answers otherwise, and acts less, than the first one.
    path = f"/notes/{first.json['id']}"
    assert_runs_once(client, "DELETE", path, headers={"X-CSRF-Token": token}, effects=lambda: 10 - notes())
    with pytest.raises(AssertionError, match="was answered 403"):
        assert_runs_once(client, "POST", "/notes", json=note)


# Whole calls: what is wrong is said


class HomeMade:
    """Run-once made at home, right as far as anyone looks. Each subclass has one flaw."""

    def __init__(self) -> None:
        self.runs = 0
        self.saved: dict[str, Response] = {}
        self.canceled: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environ)
        if request.path.startswith(PREFIX):
            answer = self.cancel(request.path.split("/")[-2])
        else:
            answer = self.send(request.headers["Coder-Tool-Call-Id"])
        return answer(environ, start_response)

    def send(self, call: str) -> Response:
        with self.lock:
            if call in self.canceled:
                return self.refuse("canceled")
            if call in self.saved:
                return self.repeat(call)
            self.saved[call] = self.run()
            return self.saved[call]

    def run(self) -> Response:
        self.runs += 1
        return Response(f"order {self.runs}", 201, {"Location": f"/orders/{self.runs}"})

    def repeat(self, call: str, **changes: Any) -> Response:
        first = self.saved[call]
        same = {"response": first.data, "status": first.status, "headers": {**first.headers, **REPLAYED}}
        return Response(**{**same, **changes})

    def cancel(self, call: str) -> Response:
        return Response(json.dumps(self.canceled.setdefault(call, self.facts(call))), 200)

    def facts(self, call: str) -> dict[str, Any]:
        if call in self.saved:
            return {"received": True, "state": "done", "status": self.saved[call].status_code}
        return {"received": False, "state": "not_received", "remembers": 3600}

    def refuse(self, code: str) -> Response:
        answer = problem(code)
        return Response(answer.body, answer.status, list(answer.headers))


class RunsAgain(HomeMade):
    def repeat(self, call: str, **changes: Any) -> Response:
        return self.run()


class RunsAgainInSecret(HomeMade):
    def repeat(self, call: str, **changes: Any) -> Response:
        self.runs += 1
        return super().repeat(call)


class RepeatsAnotherBody(HomeMade):
    def repeat(self, call: str, **changes: Any) -> Response:
        return super().repeat(call, response="order 99")


class RepeatsAnotherStatus(HomeMade):
    def repeat(self, call: str, **changes: Any) -> Response:
        return super().repeat(call, status=200)


class RepeatsAnotherHeader(HomeMade):
    def repeat(self, call: str, **changes: Any) -> Response:
        return super().repeat(call, headers=REPLAYED)


class RefusesRepeats(HomeMade):
    def repeat(self, call: str, **changes: Any) -> Response:
        return self.refuse("input_mismatch")


class RepeatsAtFirst(HomeMade):
    def run(self) -> Response:
        answer = super().run()
        answer.headers.extend(REPLAYED)
        return answer


class TellsNoCallsApart(HomeMade):
    """From the second call on."""

    def send(self, call: str) -> Response:
        return super().send(next(iter(self.saved), call))


class LooksAndThenRuns(HomeMade):
    """Checks, then acts: of two requests at once, neither finds what the other saves later."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Barrier(AT_ONCE)

    def send(self, call: str) -> Response:
        if not self.saved or call in self.saved or call in self.canceled:
            return super().send(call)
        self.gate.wait(LIMIT)
        with self.lock:
            return self.run_again(call)

    def run_again(self, call: str) -> Response:
        self.saved[call] = self.run()
        return self.saved[call]


class LooksAndThenRunsInSecret(LooksAndThenRuns):
    def run_again(self, call: str) -> Response:
        if call not in self.saved:
            return super().run_again(call)
        self.runs += 1
        return self.repeat(call)


class AnswersThoseThatWaitOtherwise(LooksAndThenRuns):
    def run_again(self, call: str) -> Response:
        if call not in self.saved:
            return super().run_again(call)
        return self.repeat(call, response="")


class RefusesThoseThatWait(LooksAndThenRuns):
    def run_again(self, call: str) -> Response:
        return self.refuse("store_full") if call in self.saved else super().run_again(call)


class LimitsRequests(LooksAndThenRuns):
    def run_again(self, call: str) -> Response:
        return Response("slow down", 429) if call in self.saved else super().run_again(call)


class HasNoCancel(HomeMade):
    def cancel(self, call: str) -> Response:
        return Response("no such page", 404)


class CancelsInText(HomeMade):
    def cancel(self, call: str) -> Response:
        return Response('["canceled"]', 200)


class FailsToCancel(HomeMade):
    def cancel(self, call: str) -> Response:
        return self.refuse("cancel_failed")


class RepeatsWhatWasCanceled(HomeMade):
    def send(self, call: str) -> Response:
        if call in self.saved:
            return self.repeat(call)
        return super().send(call)


class RunsWhatWasCanceled(HomeMade):
    def send(self, call: str) -> Response:
        if call not in self.saved:
            self.canceled.pop(call, None)
        return super().send(call)


class ActsBeforeItRefuses(HomeMade):
    def refuse(self, code: str) -> Response:
        self.runs += 1
        return super().refuse(code)


class ActsBeforeItRefusesNewCalls(ActsBeforeItRefuses):
    def send(self, call: str) -> Response:
        if call in self.saved and call in self.canceled:
            return HomeMade.refuse(self, "canceled")
        return super().send(call)


class RefusesInOtherWords(HomeMade):
    def refuse(self, code: str) -> Response:
        return Response("canceled", 409)


class Cancels(HomeMade):
    """Says `said` of a call that had run, `unsent` of one that had not been sent, each at its first cancel."""

    said: dict[str, Any] = {}
    unsent: dict[str, Any] = {}

    def facts(self, call: str) -> dict[str, Any]:
        return {**super().facts(call), **(self.said if call in self.saved else self.unsent)}


class CancelDenies(Cancels):
    said = {"received": False}


class CancelSaysRunning(Cancels):
    said = {"state": "running"}


class CancelSaysAnotherStatus(Cancels):
    said = {"status": 200}


class CancelClaims(Cancels):
    unsent = {"received": True}


class CancelSaysDone(Cancels):
    unsent = {"state": "done"}


class CancelChangesItsMind(HomeMade):
    def cancel(self, call: str) -> Response:
        again = call in self.canceled
        return Response(b'{"received": false}', 200) if again else super().cancel(call)


FLAWS: list[tuple[type[HomeMade], str]] = [
    (
        RunsAgain,
        "the repeat was not answered from the record, so the handler ran again: the answer 201 CREATED (b'order 2') "
        "has no Idempotent-Replayed header. Is the view decorated with once, below its route?",
    ),
    (RunsAgainInSecret, "the repeat acted: `effects` counts 2 after it, 1 before it"),
    (RepeatsAnotherBody, "the repeat got another body than the run: b'order 99', not b'order 1'"),
    (RepeatsAnotherStatus, "the repeat was answered 200 OK, the run 201 CREATED"),
    (RepeatsAnotherHeader, "the repeat got another Location header than the run: [], not ['/orders/1']"),
    (RefusesRepeats, "the repeat was refused: 409 Conflict (input_mismatch: This tool call ID has been used for"),
    (RepeatsAtFirst, "the first request of a new call was answered as a repeat: does the key tell calls apart?"),
    (TellsNoCallsApart, "each request of a new call was answered as a repeat: does the key tell calls apart?"),
    (LooksAndThenRuns, "of 10 requests sent at once, 10 ran the handler: 201 CREATED, 201 CREATED, "),
    (LooksAndThenRunsInSecret, "10 requests sent at once acted 10 times, a single one 1"),
    (AnswersThoseThatWaitOtherwise, "one of 10 requests sent at once got another body than the run: b'', not b'order"),
    (RefusesThoseThatWait, "one of 10 requests sent at once was refused: 503 Service Unavailable (store_full: The "),
    (LimitsRequests, "of 10 requests sent at once, 10 ran the handler: 201 CREATED, 429 TOO MANY REQUESTS, "),
    (HasNoCancel, ", was answered 404 NOT FOUND (b'no such page')"),
    (CancelsInText, ", was answered 200 OK (b'[\"canceled\"]')"),
    (FailsToCancel, ", was answered 500 Internal Server Error (cancel_failed: The tool call is canceled and will"),
    (
        RepeatsWhatWasCanceled,
        "a call that was canceled after its run was answered 201 CREATED (b'order 1'), not refused by 409 canceled",
    ),
    (
        RunsWhatWasCanceled,
        "a call that was canceled before it came was answered 201 CREATED (b'order 3'), not refused by 409 canceled",
    ),
    (RefusesInOtherWords, "was answered 409 CONFLICT (b'canceled'), not refused by 409 canceled"),
    (ActsBeforeItRefuses, "a canceled call acted: `effects` counts 3 after it, 2 before it"),
    (ActsBeforeItRefusesNewCalls, "a canceled call acted: `effects` counts 3 after it, 2 before it"),
    (
        CancelDenies,
        'the cancel of a call that had run says {"received": false, "state": "done"}, '
        'not {"received": true, "state": "done"}',
    ),
    (CancelSaysRunning, 'the cancel of a call that had run says {"received": true, "state": "running"}, not '),
    (CancelSaysAnotherStatus, "the cancel of a call that was answered 201 CREATED says that it was 200"),
    (
        CancelClaims,
        'the cancel of a call that had not been sent says {"received": true, "state": "not_received"}, '
        'not {"received": false, "state": "not_received"}',
    ),
    (CancelSaysDone, 'the cancel of a call that had not been sent says {"received": false, "state": "done"}, not '),
    (CancelChangesItsMind, "a second cancel of the same call says something else than the first"),
]


def test_what_is_made_at_home_passes_without_a_flaw() -> None:
    app = HomeMade()
    assert_runs_once(app, "POST", "/orders", effects=lambda: app.runs)
    assert app.runs == 2


@pytest.mark.parametrize(("flawed", "words"), FLAWS)
def test_each_flaw_is_said_in_words(flawed: type[HomeMade], words: str) -> None:
    app = flawed()
    with pytest.raises(AssertionError) as caught:
        assert_runs_once(app, "POST", "/orders", effects=lambda: app.runs)
    assert str(caught.value).startswith("POST /orders does not run once: ")
    assert words in str(caught.value)


def test_the_cancel_that_failed_is_named() -> None:
    with pytest.raises(AssertionError, match=rf"the cancel of a call that had run, {PREFIX}/[\w-]+/cancel, was "):
        assert_runs_once(HasNoCancel(), "POST", "/orders")


def test_a_request_that_is_not_taken_is_no_proof(shop: Shop) -> None:
    with pytest.raises(AssertionError, match="the first request was answered 404 NOT FOUND .*say so by `status`"):
        assert_runs_once(shop.app, "POST", "/nowhere")
    with pytest.raises(AssertionError, match=r"the first request was answered 201 CREATED .*, not 404$"):
        assert_runs_once(shop.app, "POST", "/orders", status=404)


def test_effects_that_count_nothing_are_no_proof(shop: Shop) -> None:
    with pytest.raises(AssertionError, match="did nothing that `effects` counts"):
        assert_runs_once(shop.app, "POST", "/orders", effects=lambda: 7)


def test_what_the_app_raises_is_raised(shop: Shop) -> None:
    shop.app.testing = True

    @shop.app.post("/broken")
    @shop.runonce.once
    def broken() -> str:
        raise LookupError("no such order")

    with pytest.raises(LookupError, match="no such order"):
        assert_runs_once(shop.app, "POST", "/broken")


def test_a_decorator_above_the_route(shop: Shop) -> None:
    @shop.runonce.once
    @shop.app.post("/misplaced")
    def misplaced() -> str:
        return "taken"

    with pytest.raises(AssertionError, match="Is the view decorated with once, below its route"):
        assert_runs_once(shop.app, "POST", "/misplaced")


def test_a_request_without_a_chat_is_not_protected(shop: Shop) -> None:
    with pytest.raises(AssertionError, match="the handler ran again"):
        assert_runs_once(RunOnceTestApp(shop.app, chat=None), "POST", "/orders")


def test_a_method_that_does_not_act(shop: Shop) -> None:
    with pytest.raises(AssertionError, match="GET /echo does not run once: the repeat was not answered from the"):
        assert_runs_once(shop.app, "GET", "/echo")


def test_a_fingerprint_that_changes() -> None:
    shop = Shop(once={"fingerprint": lambda environ: os.urandom(8)})
    with pytest.raises(AssertionError, match="the repeat was refused: 409 Conflict .input_mismatch: "):
        assert_runs_once(shop.app, "POST", "/orders")


def test_a_view_that_releases_its_run(shop: Shop) -> None:
    @shop.app.post("/released")
    @shop.runonce.once
    def released() -> str:
        current_call.release()
        return "taken"

    with pytest.raises(AssertionError, match="the handler ran again"):
        assert_runs_once(shop.app, "POST", "/released")


NOT_LET_IN = "was not let in: log in with a RunOnceTestApp and give that as `app`, or send .* in `headers`$"


@pytest.mark.parametrize("options", [{}, {"status": 201}])
@pytest.mark.parametrize("refusal", [401, 403])
def test_a_request_that_is_not_let_in(shop: Shop, refusal: int, options: dict[str, Any]) -> None:
    """Nothing of the kit is wrong then, and nothing of the view: the credentials are missing."""
    shop.app.before_request(lambda: None if "Authorization" in request.headers else flask.abort(refusal))
    with pytest.raises(AssertionError, match=rf"answered {refusal} .*\. The request {NOT_LET_IN}"):
        assert_runs_once(shop.app, "POST", "/orders", **options)
    headers = {"Authorization": "Bearer ada"}
    assert_runs_once(shop.app, "POST", "/orders", headers=headers, effects=shop.count, **options)


@pytest.mark.parametrize("counts", [True, False])
def test_a_request_that_is_sent_to_the_login(shop: Shop, counts: bool) -> None:
    """Its redirect is a success, so the check goes on until there is no repeat, or no effect."""

    @shop.app.post("/login")
    def login() -> str:
        flask.session["user"] = "ada"
        return "welcome"

    shop.app.secret_key = "a secret"
    shop.app.before_request(lambda: None if flask.session or request.path == "/login" else flask.redirect("/login"))
    client, effects = RunOnceTestApp(shop.app), shop.count if counts else None
    with pytest.raises(AssertionError, match=rf"sent to .*/login\. If that is the login, it {NOT_LET_IN}"):
        assert_runs_once(client, "POST", "/orders", effects=effects)
    client.post("/login")
    assert_runs_once(client, "POST", "/orders", effects=effects)


def test_a_guard_that_refuses_the_cancel(shop: Shop) -> None:
    def guard(environ: dict[str, Any]) -> None:
        if "HTTP_X_USER" not in environ:
            raise Unauthorized

    shop = Shop(guard=guard)
    with pytest.raises(AssertionError, match="the cancel of a call that had run, .* 401 UNAUTHORIZED .* not let in"):
        assert_runs_once(shop.app, "POST", "/orders")
    assert_runs_once(shop.app, "POST", "/orders", headers={"X-User": "ada"})
    assert_runs_once(shop.app, "POST", "/orders", extra_environ={"HTTP_X_USER": "ada"})


# Threads


def test_what_threads_raise_or_return_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise LookupError

    assert together(lambda: 1, lambda: 2) == [1, 2]
    with pytest.raises(LookupError):
        together(lambda: 1, fail)
    monkeypatch.setattr("flask_runonce.testing.threads.LIMIT", 0.01)
    held = threading.Event()
    try:
        with pytest.raises(AssertionError, match="does not come back"):
            together(held.wait)
    finally:
        held.set()


# pytest: the plugin, the page of the docs, the suite for stores


def run_pytest(folder: Path, *options: str, without_webtest: bool = False, **files: str) -> str:
    """Run pytest in `folder` on `files`, with the plugin found as an installed one is. Return what it prints."""
    site = folder / "site"
    (site / "flask_runonce-0.dist-info").mkdir(parents=True)
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    (entry_point,) = re.findall(r"^\[project\.entry-points\.pytest11\]\n(.*)\n$", pyproject, re.MULTILINE)
    (site / "flask_runonce-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flask-runonce\n")
    (site / "flask_runonce-0.dist-info" / "entry_points.txt").write_text(
        f"[pytest11]\n{entry_point.replace(chr(34), '')}\n"
    )
    if without_webtest:
        (site / "webtest.py").write_text("raise ModuleNotFoundError(\"No module named 'webtest'\")\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, "utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", ".", *options],
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "PATH": "", "COLUMNS": "200", **MEASURED},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return result.stdout + result.stderr


def test_the_page_of_the_docs(tmp_path: Path) -> None:
    tokens = MarkdownIt("commonmark").parse((ROOT / "docs" / "testing.md").read_text("utf-8"))
    blocks = [token.content for token in tokens if token.type == "fence" and token.info == "python"]
    printed = run_pytest(tmp_path, test_page="\n\n".join(blocks))
    assert re.search(r"^[6-9]\d passed", printed, re.MULTILINE), printed


PLAIN = """
import sys

def test_nothing_of_ours_was_imported():
    assert not {"webtest", "webob", "flask_runonce.testing"} & set(sys.modules)
"""

ASKING = """
def test_the_store(runonce_store, runonce_clock):
    assert runonce_store.age() == 0
    runonce_clock.advance(5)
    assert runonce_store.age() == 5

def test_the_client(runonce_testapp):
    pass
"""


def test_a_project_without_webtest_is_left_alone(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path, without_webtest=True, test_plain=PLAIN)
    assert "1 passed" in printed, printed


def test_a_fixture_without_webtest_says_what_is_missing(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path, without_webtest=True, test_asking="def test(runonce_clock):\n    pass\n")
    assert "No module named 'webtest'" in printed, printed


def test_the_fixtures(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path, test_asking=ASKING)
    assert "1 passed, 1 error" in printed, printed
    assert "fixture 'app' not found" in printed, printed


def test_the_plugin_can_be_left_out(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path, "-p", "no:runonce", test_asking=ASKING)
    assert "fixture 'runonce_store' not found" in printed, printed


CARELESS = """
import pytest
from flask_runonce.stores import MemoryStore
from flask_runonce.testing import StoreContract

class Careless(MemoryStore):
    def swap(self, key, seen, new, **options):
        return super().swap(key, self.read(key).version, new, **options)

class TestCareless(StoreContract):
    @pytest.fixture
    def store(self, runonce_clock):
        return Careless(timer=runonce_clock)

    @pytest.fixture
    def advance(self, runonce_clock):
        return runonce_clock.advance
"""


def test_a_store_that_puts_over_anything_fails_the_suite(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path, "-k", "swap_of or old_owner or comes_back", test_careless=CARELESS)
    for failed in (
        "test_a_swap_of_nothing_finds_what_is_there",
        "test_a_swap_of_another_version_finds_what_is_there",
        "test_an_old_owner_does_not_look_current_after_a_new_claim",
    ):
        assert f"FAILED test_careless.py::TestCareless::{failed}" in printed, printed
    assert "assert Swapped(" in printed, "pytest does not show what was compared"
    assert re.search(r"\b1[3-9] passed", printed), printed
