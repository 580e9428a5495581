"""The Flask extension: how it is set up, what stands around `once`, and what a view sees of its run."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import inspect
import io
import logging
import string
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import flask
import pytest
from flask import Blueprint, Flask, Response, abort, current_app, g, jsonify, request, session
from flask.views import MethodView
from webtest import TestApp, Upload
from werkzeug.exceptions import Forbidden, Unauthorized
from werkzeug.test import EnvironBuilder, run_wsgi_app

from flask_runonce import CallKey, RunOnce, RunOnceMiddleware, SavedResponse, current_call, keys, signals
from flask_runonce.errors import ConfigError
from flask_runonce.record import Record, Seen, State
from flask_runonce.stores import MemoryStore, Swapped

LIMIT = 30
"""Seconds that a test waits at most for what must happen."""
ROUTES = "/api/v0/tool-calls"

View = Callable[..., Any]


def ids(tool_call_id: str = "call", chat_id: str = "chat", **more: str) -> dict[str, str]:
    """The headers of a call."""
    return {"Coder-Chat-Id": chat_id, "Coder-Tool-Call-Id": tool_call_id, **more}


def make_app(*, once: RunOnce | None = None, **config: Any) -> tuple[Flask, RunOnce]:
    app = Flask(__name__)
    app.secret_key = "secret"
    app.config.update(config)
    runonce = once or RunOnce(scope=lambda environ: None)
    runonce.init_app(app)
    return app, runonce


def add(app: Flask, view: View, path: str = "/", method: str = "POST") -> list[str]:
    """Serve `view` and count what it does: the list that is given grows with each run of a view that appends to it."""
    app.add_url_rule(path, path, view, methods=[method])
    return []


def post(app: Flask, path: str = "/", body: Any = "", headers: dict[str, str] | None = None, **options: Any) -> Any:
    """A POST by a new browser, a call unless other headers are given."""
    options.setdefault("expect_errors", True)
    return TestApp(app).post(path, body, headers=ids() if headers is None else headers, **options)


def cancel(app: Flask, tool_call_id: str = "call", **options: Any) -> Any:
    return post(app, f"{ROUTES}/{quote(tool_call_id, safe='')}/cancel", headers={"Coder-Chat-Id": "chat"}, **options)


def code_of(answer: Any) -> Any:
    return answer.json["code"] if answer.content_type == "application/problem+json" else None


class Counting:
    """A view that counts its runs."""

    def __init__(self, answer: Callable[[], Any] = lambda: "text") -> None:
        self.answer = answer
        self.runs = 0
        self.__name__ = "counting"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.answer()


class WatchedStore(MemoryStore):
    """Says when a request begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        self.waits.release()
        return super().wait(key, version, timeout)

    def until_waiting(self, requests: int = 1) -> None:
        for _ in range(requests):
            assert self.waits.acquire(timeout=LIMIT)


class LostOwners(MemoryStore):
    """Its runs look as if their owner had been killed."""

    def swap(self, key: CallKey, seen: str, new: Record | None, *, if_lost: bool = False, **options: Any) -> Swapped:
        swapped = super().swap(key, seen, new, **options)
        found = swapped.seen
        if found.record and found.record.state is State.RUNNING and not swapped.done:
            return swapped._replace(seen=found._replace(lease_until=found.now - 1))
        return swapped


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


# Setting up.


def test_one_object_serves_several_apps_that_share_nothing() -> None:
    runonce = RunOnce(scope=lambda environ: None)
    view = Counting()
    apps = [make_app(once=runonce, RUNONCE_URL_PREFIX=prefix)[0] for prefix in ("/a", "/b")]
    for app in apps:
        add(app, runonce.once(view))
    for app in apps:
        assert [post(app).headers.get("Idempotent-Replayed") for _ in range(2)] == [None, "true"]
    assert view.runs == 2
    chat = {"Coder-Chat-Id": "chat"}
    for app, prefix, other in zip(apps, ("/a", "/b"), ("/b", "/a"), strict=True):
        assert TestApp(app).get(prefix, headers=chat).json["total"] == 1
        TestApp(app).get(other, headers=chat, status=404)


def test_hooks_are_called_for_the_app_that_got_the_cancel() -> None:
    runonce = RunOnce(scope=lambda environ: None)
    apps = [make_app(once=runonce)[0] for _ in range(2)]
    called = []
    runonce.on_cancel(lambda call: called.append(current_app._get_current_object()))
    cancel(apps[1], status=200)
    assert called == [apps[1]]


def test_init_app_twice_is_an_error_and_changes_nothing() -> None:
    app, runonce = make_app()
    service = app.extensions["runonce"]
    for again in (runonce, RunOnce()):
        with pytest.raises(RuntimeError, match="already"):
            again.init_app(app)
    assert app.extensions["runonce"] is service


def test_an_app_factory_may_make_apps_of_one_module_level_object() -> None:
    runonce = RunOnce(scope=lambda environ: None)
    blueprint = Blueprint("notes", __name__)
    view = Counting()
    blueprint.post("/")(runonce.once(view))

    def create_app(**config: Any) -> Flask:
        app = Flask(__name__)
        app.config.update(config)
        app.register_blueprint(blueprint)
        runonce.init_app(app)
        return app

    assert [code_of(post(create_app(RUNONCE_REQUIRED=True), headers={})) for _ in range(2)] == ["key_required"] * 2
    assert post(create_app(), headers={}).text == "text"
    assert view.runs == 1


def test_the_app_may_be_given_to_the_constructor() -> None:
    app = Flask(__name__)
    RunOnce(app, scope=lambda environ: None)
    cancel(app, status=200)


def test_a_view_of_an_app_that_was_not_set_up_does_not_run() -> None:
    app = Flask(__name__)
    app.testing = True
    view = Counting()
    add(app, RunOnce().once(view))
    with pytest.raises(RuntimeError, match="init_app"):
        post(app, headers={})
    assert view.runs == 0


@pytest.mark.parametrize("store", ["memory://", MemoryStore(), None])
def test_a_store_may_be_given_as_itself_or_by_its_uri(store: Any) -> None:
    app, runonce = make_app(once=RunOnce(store=store, scope=lambda environ: None))
    add(app, runonce.once(view := Counting()))
    assert [post(app).text for _ in range(2)] == ["text", "text"]
    assert view.runs == 1


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"RUNONCE_FORGET_AFTR": 1}, "RUNONCE_FORGET_AFTR"),
        ({"RUNONCE_WAIT_TIMEOUT": "25"}, "RUNONCE_WAIT_TIMEOUT"),
        ({"RUNONCE_ON_LOST": "again"}, "RUNONCE_ON_LOST"),
        ({"RUNONCE_STORE_URI": "nowhere"}, "RUNONCE_STORE_URI"),
    ],
)
def test_init_app_names_a_setting_that_makes_no_sense(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_app(**config)


def test_an_idempotency_key_needs_a_scope() -> None:
    with pytest.raises(ConfigError, match="scope"):
        make_app(once=RunOnce(key=keys.idempotency_key))


@pytest.mark.parametrize(
    ("name", "wrong"), [("store", 5), ("store", MemoryStore), ("key", 5), ("scope", 5), ("guard", 5)]
)
def test_what_cannot_be_called_is_no_callable_and_no_store(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        make_app(once=RunOnce(**{name: wrong}))


def test_a_guard_that_is_false_by_itself_guards_all_the_same() -> None:
    class Guard:
        def __len__(self) -> int:
            return 0

        def __call__(self, environ: Any) -> None:
            abort(403)

    app, _ = make_app(once=RunOnce(guard=Guard()))
    assert cancel(app).status_int == 403


def open_routes(caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    prefix = options.pop("prefix", ROUTES)
    with caplog.at_level(logging.WARNING, "flask_runonce"):
        make_app(once=RunOnce(**options), RUNONCE_URL_PREFIX=prefix)
    return [record.getMessage() for record in caplog.records]


def test_cancel_routes_that_are_open_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = open_routes(caplog)
    assert ROUTES in warning and "open" in warning


@pytest.mark.parametrize("options", [{"guard": print}, {"scope": lambda environ: "a"}, {"prefix": None}])
def test_guarded_scoped_or_missing_routes_are_not(caplog: pytest.LogCaptureFixture, options: dict[str, Any]) -> None:
    assert open_routes(caplog, **options) == []


# A decorator in the wrong place.


def misplaced(caplog: pytest.LogCaptureFixture, app: Flask) -> list[str]:
    """The warnings that come with the first request, and none with the second."""
    with caplog.at_level(logging.WARNING, "flask_runonce"):
        TestApp(app).get("/nowhere", status=404)
        messages = [record.getMessage() for record in caplog.records if "decorator" in record.getMessage()]
        caplog.clear()
        TestApp(app).get("/nowhere", status=404)
        assert not caplog.records
    return messages


def logged_in(view: View) -> View:
    @functools.wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return current_app.ensure_sync(view)(*args, **kwargs)

    return wrapper


def test_a_decorator_above_the_route_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    app, runonce = make_app()

    @runonce.once
    @app.post("/wrong")
    def wrong() -> str:
        return "text"

    @runonce.once(required=True)
    @app.post("/wrong-and-wrapped")
    @logged_in
    async def wrong_and_wrapped() -> str:
        return "text"

    @app.post("/right")
    @runonce.once
    def right() -> str:
        return "text"

    warnings = misplaced(caplog, app)
    assert len(warnings) == 2
    assert "'wrong'" in warnings[0] and "'wrong_and_wrapped'" in warnings[1]


def test_the_warning_names_the_endpoint_of_a_blueprint(caplog: pytest.LogCaptureFixture) -> None:
    app, runonce = make_app()
    blueprint = Blueprint("notes", __name__)

    @runonce.once
    @blueprint.post("/wrong")
    def wrong() -> str:
        return "text"

    app.register_blueprint(blueprint)
    (warning,) = misplaced(caplog, app)
    assert "'notes.wrong'" in warning


def test_decorators_in_their_place_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    app, runonce = make_app()
    blueprint = Blueprint("notes", __name__)

    class Decorated(MethodView):
        decorators = [runonce.once, logged_in]

        def post(self) -> str:
            return "text"

    class Methods(MethodView):
        @runonce.once
        def post(self) -> str:
            return "text"

    @blueprint.post("/blueprint")
    @logged_in
    @runonce.once
    @logged_in
    def view() -> str:
        return "text"

    @app.post("/async")
    @runonce.once
    async def asynchronous() -> str:
        return "text"

    def bare(view: View) -> View:
        return lambda: view()

    def here_and_there() -> str:
        return "text"

    @runonce.once
    def helper() -> str:
        return "text"

    app.register_blueprint(blueprint)
    app.register_blueprint(blueprint, name="again", url_prefix="/again")
    app.add_url_rule("/decorated", view_func=Decorated.as_view("decorated"))
    app.add_url_rule("/methods", view_func=Methods.as_view("methods"))
    app.add_url_rule("/bare", "bare", bare(runonce.once(lambda: "text")), methods=["POST"])
    app.add_url_rule("/partial", "partial", functools.partial(runonce.once(lambda: "text")), methods=["POST"])
    app.add_url_rule("/once", "here", runonce.once(here_and_there), methods=["POST"])
    app.add_url_rule("/always", "there", here_and_there, methods=["POST"])
    app.add_url_rule("/helped", "helped", lambda: helper(), methods=["POST"])
    assert misplaced(caplog, app) == []


def test_a_callable_object_without_a_hash_is_run_once() -> None:
    @dataclasses.dataclass
    class Order:
        runs: int = 0

        def __call__(self) -> str:
            self.runs += 1
            return "text"

    app = served(order := Order())
    assert [post(app).headers.get("Idempotent-Replayed") for _ in range(2)] == [None, "true"]
    assert order.runs == 1


# What `once` takes.


def served(view: View, config: dict[str, Any] | None = None, runonce: RunOnce | None = None, **options: Any) -> Flask:
    """An app with one view under "/", run once with these options."""
    app, runonce = make_app(once=runonce, **(config or {}))
    add(app, runonce.once(**options)(view))
    return app


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reqired": True}, TypeError),
        ({"on_lost": "again"}, ValueError),
        ({"result_budget": -1}, ValueError),
        ({"methods": "POST"}, TypeError),
        ({"methods": {5}}, TypeError),
        ({"required": "no"}, TypeError),
    ],
)
def test_an_option_that_makes_no_sense_is_an_error_where_it_is_given(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        RunOnce().once(**options)


def test_required_refuses_a_request_without_a_key() -> None:
    app = served(view := Counting(), required=True)
    for headers in ({}, {"Coder-Tool-Call-Id": "call"}, {"Coder-Chat-Id": "chat"}):
        refused = post(app, headers=headers)
        assert (refused.status_int, code_of(refused)) == (400, "key_required")
    assert view.runs == 0
    assert post(app).text == "text"


def test_required_may_be_the_apps_default_and_be_lifted_for_a_view() -> None:
    config = {"RUNONCE_REQUIRED": True}
    assert code_of(post(served(Counting(), config), headers={})) == "key_required"
    assert post(served(Counting(), config, required=False), headers={}).text == "text"


def test_a_read_needs_no_key() -> None:
    app, runonce = make_app()
    app.add_url_rule("/", "view", runonce.once(required=True)(Counting()), methods=["GET"])
    assert TestApp(app).get("/").text == "text"


def test_another_input_is_refused_unless_the_fingerprint_is_off() -> None:
    app = served(view := Counting())
    post(app, body={"a": "1"})
    assert code_of(post(app, body={"a": "2"})) == "input_mismatch"
    assert code_of(post(app, "/?q=1", {"a": "1"})) == "input_mismatch"
    app = served(view, fingerprint=None)
    post(app, body={"a": "1"})
    assert post(app, "/?q=1", {"a": "2"}).headers["Idempotent-Replayed"] == "true"
    assert view.runs == 2


def test_a_fingerprint_may_be_the_apps_own_and_see_the_request() -> None:
    def path_and_title(environ: Any) -> bytes:
        return f"{environ['PATH_INFO']} {request.get_json()['title']}".encode()

    app = served(Counting(lambda: jsonify(request.get_json())), fingerprint=path_and_title)
    send = functools.partial(TestApp(app).post_json, "/", headers=ids())
    assert send({"title": "a", "try": 1}).json == {"title": "a", "try": 1}
    assert send({"title": "a", "try": 2}).json == {"title": "a", "try": 1}
    assert code_of(send({"title": "b", "try": 1}, status=409)) == "input_mismatch"


READS_OF_REQUEST: dict[str, Callable[[], Any]] = {
    "data": lambda: request.get_data(as_text=True),
    "property": lambda: request.data.decode(),
    "stream": lambda: request.stream.read().decode(),
    "form": lambda: dict(request.form),
    "values": lambda: dict(request.values),
    "json": lambda: request.get_json(force=True, silent=True),
}


@pytest.mark.parametrize("view", READS_OF_REQUEST)
@pytest.mark.parametrize("first", READS_OF_REQUEST)
@pytest.mark.parametrize("before", [None, *READS_OF_REQUEST])
@pytest.mark.parametrize("json", [True, False], ids=["json", "form"])
def test_what_a_callable_reads_by_the_request_is_left_for_the_view(
    json: bool, before: str | None, first: str, view: str
) -> None:
    """As the view would find it without us, also when a `before_request` function has read it before."""

    def read(environ: Any) -> None:
        READS_OF_REQUEST[first]()

    def key(environ: Any) -> CallKey:
        read(environ)
        return CallKey("", "chat-1", "call-1")

    def asked(runonce: RunOnce | None = None, **options: Any) -> Any:
        app = served(lambda: jsonify(READS_OF_REQUEST[view]()), runonce=runonce, **options)
        if before:
            app.before_request(lambda: (READS_OF_REQUEST[before](), None)[1])
        client = TestApp(app)
        return (client.post_json if json else client.post)("/", {"a": "1"}, headers=ids()).json

    expected = asked(fingerprint=None)
    assert asked(RunOnce(guard=print, key=key)) == expected
    assert asked(RunOnce(guard=print, scope=read)) == expected
    assert asked(fingerprint=lambda environ: read(environ) or b"") == expected


def test_what_a_callable_leaves_on_the_request_besides_the_body_stays() -> None:
    def scope(environ: Any) -> str:
        request.tenant = "a"  # type: ignore[attr-defined]
        return "a"

    app = served(lambda: request.tenant, runonce=RunOnce(guard=print, scope=scope))  # type: ignore[attr-defined]
    assert post(app).text == "a"


@pytest.mark.parametrize("before", [True, False], ids=["parsed before", "parsed by the callable"])
def test_a_file_that_a_callable_reads_is_left_for_the_view(before: bool) -> None:
    streams = []

    def read(environ: Any) -> bytes:
        streams.append(request.files["f"].stream)
        return request.files["f"].read()

    app = served(lambda: request.files["f"].read(), fingerprint=read)
    if before:
        app.before_request(lambda: request.files and None)
    assert TestApp(app).post("/", headers=ids(), upload_files=[("f", "a.txt", b"x" * 1000)]).body == b"x" * 1000
    assert streams[0].closed


def test_a_fingerprint_that_raises_refuses_and_an_abort_in_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    view = Counting()
    assert code_of(post(served(view, fingerprint=lambda environ: b"" if 1 / 0 else b""))) == "key_failed"
    assert "ZeroDivisionError" in caplog.text
    assert post(served(view, fingerprint=lambda environ: abort(415))).status_int == 415
    assert view.runs == 0


def running_elsewhere(store: MemoryStore) -> None:
    """Put a run into the store that another process has begun."""
    key = CallKey("", "chat", "call")
    store.swap(key, "", Record(key, State.RUNNING, "run", "another"), forget_after=60, lease=30)


@pytest.mark.parametrize(
    ("config", "options"),
    [({}, {}), ({"RUNONCE_ON_LOST": "refuse"}, {}), ({"RUNONCE_ON_LOST": "rerun"}, {"on_lost": "refuse"})],
)
def test_a_run_whose_owner_was_lost_is_not_run_again(config: Any, options: Any) -> None:
    running_elsewhere(store := LostOwners())
    app = served(view := Counting(), config, RunOnce(store=store, scope=lambda environ: None), **options)
    assert [post(app).json["code"] for _ in range(2)] == ["outcome_unknown"] * 2
    assert view.runs == 0


@pytest.mark.parametrize(("config", "options"), [({}, {"on_lost": "rerun"}), ({"RUNONCE_ON_LOST": "rerun"}, {})])
def test_a_view_that_is_safe_to_repeat_runs_again_after_its_owner_was_lost(config: Any, options: Any) -> None:
    running_elsewhere(store := LostOwners())
    app = served(view := Counting(), config, RunOnce(store=store, scope=lambda environ: None), **options)
    assert [post(app).text for _ in range(2)] == ["text"] * 2
    assert view.runs == 1


def test_methods_replaces_the_set_that_acts() -> None:
    app, runonce = make_app()
    view = Counting()
    app.add_url_rule("/", "view", runonce.once(methods={"get", "PUT"})(view), methods=["GET", "POST", "PUT"])
    for method, runs in (("GET", 1), ("POST", 3), ("PUT", 4)):
        for _ in range(2):
            TestApp(app).request("/", method=method, headers=ids(method))
        assert view.runs == runs


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_each_method_that_acts_runs_once(method: str) -> None:
    app, runonce = make_app()
    app.add_url_rule("/", "view", runonce.once(view := Counting()), methods=[method])
    for _ in range(3):
        assert TestApp(app).request("/", method=method, headers=ids()).text == "text"
    assert view.runs == 1


def test_an_app_may_have_its_own_way_to_make_a_view_sync() -> None:
    class OwnFlask(Flask):
        def ensure_sync(self, func: Any) -> Any:
            def sync(*args: Any, **kwargs: Any) -> Any:
                answer = func(*args, **kwargs)
                return answer() if inspect.isfunction(answer) else answer

            return sync

    app = OwnFlask(__name__)
    app.add_url_rule("/", view_func=RunOnce(app, guard=print).once(lambda: lambda: "text"), methods=["POST"])
    assert [post(app).text for _ in range(2)] == ["text"] * 2


def test_head_and_options_pass_through() -> None:
    app, runonce = make_app()
    app.add_url_rule("/", "view", runonce.once(view := Counting()), methods=["GET", "POST"])
    for _ in range(2):
        TestApp(app).head("/", headers=ids())
        assert "POST" in TestApp(app).options("/", headers=ids()).headers["Allow"]
    assert view.runs == 2


# What stands around `once`.


def test_a_before_request_function_refuses_repeats_too() -> None:
    app, runonce = make_app()
    add(app, runonce.once(view := Counting()))
    locked = []
    app.before_request(lambda: abort(403) if locked else None)
    assert post(app).status_int == 200
    locked.append(True)
    assert post(app).status_int == 403
    assert cancel(app).status_int == 403
    assert view.runs == 1


def test_after_request_functions_dress_repeats_and_refusals() -> None:
    app, runonce = make_app()
    add(app, runonce.once(Counting()))

    @app.after_request
    def dress(response: Response) -> Response:
        response.headers["X-Dressed"] = "yes"
        response.headers["X-Length"] = str(len(response.get_data()))
        return response

    for body in ("a", "a", "b"):
        answer = post(app, body=body)
        assert answer.headers["X-Dressed"] == "yes"
        assert answer.headers["X-Length"] == str(len(answer.body))
    assert code_of(answer) == "input_mismatch"
    for answer in (post(app, headers=ids("")), cancel(app)):
        assert answer.headers["X-Dressed"] == "yes"


def test_what_after_request_adds_is_not_saved() -> None:
    app, runonce = make_app()
    add(app, runonce.once(Counting()))
    numbers = iter("123")
    app.after_request(lambda response: response.headers.set("Link", next(numbers)) or response)
    assert [post(app).headers.getall("Link") for _ in range(3)] == [["1"], ["2"], ["3"]]


def test_an_after_request_function_that_raises_does_not_cost_the_response() -> None:
    app, runonce = make_app()
    add(app, runonce.once(view := Counting()))
    failures = [RuntimeError]

    @app.after_request
    def fail(response: Response) -> Response:
        for failure in failures:
            raise failure
        return response

    assert post(app).status_int == 500
    failures.clear()
    assert (post(app).text, view.runs) == ("text", 1)


def test_teardown_functions_run_for_repeats_too() -> None:
    app, runonce = make_app()
    add(app, runonce.once(Counting()))
    torn_down: list[Any] = []
    app.teardown_request(torn_down.append)
    app.teardown_appcontext(torn_down.append)
    post(app)
    post(app)
    assert torn_down == [None] * 4


def login_required(view: View) -> View:
    @functools.wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if request.headers.get("X-User") != "ada":
            abort(401)
        return view(*args, **kwargs)

    return wrapper


def test_a_guard_above_answers_for_repeats_too_and_one_below_does_not() -> None:
    view = Counting()
    app, runonce = make_app()
    add(app, login_required(runonce.once(view)), "/right")
    add(app, runonce.once(login_required(view)), "/wrong")
    for path in ("/right", "/wrong"):
        assert post(app, path, headers=ids(path, **{"X-User": "ada"})).text == "text"
    assert post(app, "/right", headers=ids("/right")).status_int == 401
    assert post(app, "/wrong", headers=ids("/wrong")).text == "text"  # the record answers whoever asks
    assert post(app, "/wrong", headers=ids("new")).status_int == 401
    assert post(app, "/wrong", headers=ids("new", **{"X-User": "ada"})).status_int == 401  # the refusal was saved


def transaction(log: list[str]) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @functools.wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = view(*args, **kwargs)
            except BaseException:
                log.append("rollback")
                raise
            log.append("commit")
            return answer

        return wrapper

    return decorate


def test_a_transaction_below_is_the_runs_and_one_above_is_every_requests() -> None:
    log: list[str] = []
    app, runonce = make_app()
    add(app, runonce.once(transaction(log)(lambda: abort(409))), "/right")
    add(app, transaction(log)(runonce.once(lambda: abort(409))), "/wrong")
    assert [post(app, "/right").status_int for _ in range(2)] == [409, 409]
    assert log == ["rollback"]
    log.clear()
    assert [post(app, "/wrong", headers=ids("other")).status_int for _ in range(2)] == [409, 409]
    assert log == ["commit", "commit"]  # above, an error is an answer already, and repeats have transactions too


def marshal(view: View) -> View:
    @functools.wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        answer = view(*args, **kwargs)
        return jsonify(data=answer) if isinstance(answer, str) else f"cannot marshal a {type(answer).__name__}"

    return wrapper


def test_marshalling_below_sees_what_the_view_answered_and_above_a_response() -> None:
    app, runonce = make_app()
    add(app, runonce.once(marshal(Counting())), "/right")
    add(app, marshal(runonce.once(Counting())), "/wrong")
    assert [post(app, "/right").json for _ in range(2)] == [{"data": "text"}] * 2
    assert post(app, "/wrong", headers=ids("other")).text == "cannot marshal a Response"


def retry(view: View) -> View:
    """Calls what it stands above once more after an error, as wrappers for deadlocks do."""

    @functools.wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return view(*args, **kwargs)
        except ValueError:
            return view(*args, **kwargs)

    return wrapper


def test_a_retry_below_is_part_of_the_run() -> None:
    failures = [ValueError]

    def answer() -> str:
        while failures:
            raise failures.pop()
        return "text"

    app = served(retry(view := Counting(answer)))
    assert [post(app).text for _ in range(2)] == ["text"] * 2
    assert view.runs == 2


def test_a_retry_above_does_not_run_the_handler_again() -> None:
    def answer() -> str:
        raise ValueError

    app, runonce = make_app()
    add(app, retry(runonce.once(view := Counting(answer))))
    assert [post(app).json["code"] for _ in range(2)] == ["outcome_unknown"] * 2
    assert view.runs == 1


def test_a_view_that_is_called_twice_in_one_request_runs_once() -> None:
    app, runonce = make_app()
    once = runonce.once(view := Counting())
    add(app, lambda: once() and once())
    assert post(app).headers["Idempotent-Replayed"] == "true"
    assert view.runs == 1


def test_a_decorated_view_may_call_another_one() -> None:
    app, runonce = make_app()
    inner = runonce.once(view := Counting())
    add(app, runonce.once(lambda: inner()))
    assert [post(app).text for _ in range(2)] == ["text"] * 2
    assert view.runs == 1


# The body is the view's, whoever looked at it before.


def read_form() -> Any:
    return request.form.to_dict()


def read_data() -> Any:
    return request.get_data(as_text=True)


def read_json() -> Any:
    return request.get_json(silent=True, force=True)


def read_stream() -> Any:
    return request.stream.read().decode()


def read_lines() -> Any:
    return [line.decode() for line in request.stream]


def read_files() -> Any:
    return {name: file.read().decode() for name, file in request.files.items()}


def read_raw() -> Any:
    return request.environ["wsgi.input"].read(5).decode()


READERS = [read_form, read_data, read_json, read_stream, read_lines, read_files]
BODIES: dict[str, Any] = {
    "form": {"body": {"a": "1", "b": "ü"}},
    "json": {"body": '{"a": [1,\n2]}', "content_type": "application/json"},
    "text": {"body": "one\ntwo\nthree", "content_type": "text/plain"},
    "file": {"body": {"f": Upload("a.txt", b"one\ntwo")}},
    "nothing": {"body": ""},
}


def reading(first: Callable[[], Any] | None, then: Callable[[], Any], *, once: bool, length: int) -> Flask:
    app, runonce = make_app(RUNONCE_FINGERPRINT_BYTES=length)

    @app.before_request
    def look() -> None:
        g.first = first() if first else None

    view = lambda: jsonify(first=g.first, then=then())  # noqa: E731
    add(app, runonce.once(view) if once else view)
    return app


@pytest.mark.parametrize("length", [1000, 2], ids=["fingerprinted", "too-long"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("then", READERS)
@pytest.mark.parametrize("first", [None, read_form, read_data, read_stream, read_raw])
def test_a_body_is_read_as_without_run_once(
    first: Callable[[], Any] | None, then: Callable[[], Any], body: str, length: int
) -> None:
    expected = post(reading(first, then, once=False, length=length), **BODIES[body])
    app = reading(first, then, once=True, length=length)
    answers = [post(app, **BODIES[body]) for _ in range(2)]
    assert [answer.status for answer in answers] == [expected.status] * 2
    if body != "file":  # its boundary is another each time
        assert [answer.body for answer in answers] == [expected.body] * 2
    if first not in (read_raw, read_stream):  # these leave nothing or a torn body to the view
        assert answers[1].headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("first", [None, read_form, read_data, read_stream, read_raw])
def test_a_changed_body_is_noticed_whoever_read_it_first(first: Callable[[], Any] | None) -> None:
    app = reading(first, read_data, once=True, length=1000)
    post(app, body={"a": "1"})
    assert code_of(post(app, body={"a": "2"})) == "input_mismatch"
    assert post(app, body={"a": "1"}).headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize(("length", "noticed"), [(0, True), (99, True), (100, True), (101, False)])
def test_a_body_is_fingerprinted_up_to_the_bound(length: int, noticed: bool) -> None:
    app = reading(None, read_data, once=True, length=100)
    sent = b"x" * length
    options = {"content_type": "application/octet-stream"}
    assert post(app, body=sent, **options).json["then"] == "x" * length
    assert post(app, body=sent, **options).headers["Idempotent-Replayed"] == "true"
    other = post(app, body=b"y" * max(length, 1), **options)
    assert code_of(other) == ("input_mismatch" if noticed else None)


def test_a_file_is_uploaded_once_and_is_no_part_of_the_fingerprint() -> None:
    app = served(Counting(read_files))
    assert post(app, body={"f": Upload("a.txt", b"one")}).json == {"f": "one"}
    assert post(app, body={"f": Upload("a.txt", b"two")}).json == {"f": "one"}


class Socket(io.RawIOBase):
    """An input that is the connection itself: whoever reads past the body waits for ever. Here it fails instead."""

    def __init__(self, body: bytes, more_to_come: bool = True) -> None:
        self.body = io.BytesIO(body)
        self.more_to_come = more_to_come

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self.body.readinto(buffer)
        assert read or not self.more_to_come or not len(buffer), "This would wait for the client for ever."
        return read

    @property
    def left(self) -> int:
        return len(self.body.getvalue()) - self.body.tell()


def send_raw(app: Flask, stream: Socket, length: int, path: str = "/", **headers: str) -> tuple[str, bytes]:
    """A request whose body is only what the socket gives; "wsgi.input" is as Werkzeug's server has it."""
    environ = EnvironBuilder(path=path, method="POST", headers=headers or ids()).get_environ()
    environ["wsgi.input"] = io.BufferedReader(stream)
    environ["CONTENT_LENGTH"] = str(length)
    chunks, status, _ = run_wsgi_app(app, environ, buffered=True)
    return status, b"".join(chunks)


@pytest.mark.parametrize("length", [5, 0])
def test_a_cut_off_body_runs_nothing_and_is_not_recorded(length: int) -> None:
    app = reading(None, read_data, once=True, length=1000)
    status, body = send_raw(app, Socket(b"x" * length, more_to_come=False), 10)
    assert status.startswith("400") and b"incomplete_body" in body
    status, body = send_raw(app, Socket(b"x" * 10), 10)
    assert status.startswith("200") and b"x" * 10 in body


def test_a_cut_off_body_over_the_bound_is_the_views_to_notice() -> None:
    app = reading(None, read_data, once=True, length=8)
    status, body = send_raw(app, Socket(b"x" * 9, more_to_come=False), 10)
    assert (status, b"incomplete_body" in body) == ("400 BAD REQUEST", False)


@pytest.mark.parametrize("first", [None, read_data, read_form, read_stream])
@pytest.mark.parametrize("length", [1000, 8])
@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", ids()),
        ("/", ids("é,")),
        ("/", {"X-Nothing": "1"}),
        ("/required", {"X-Nothing": "1"}),
        (f"{ROUTES}/call/cancel", {"Coder-Chat-Id": "chat"}),
        (f"{ROUTES}/call/cancel", ids()),
    ],
    ids=["call", "invalid", "no-call", "required", "cancel", "cancel-with-id"],
)
def test_no_request_is_read_past_its_body(
    first: Callable[[], Any] | None, length: int, path: str, headers: dict[str, str]
) -> None:
    app, runonce = make_app(RUNONCE_FINGERPRINT_BYTES=length)

    @app.before_request
    def look() -> None:
        if first:
            first()

    add(app, runonce.once(lambda: "text"))
    if path == "/required":  # one such view has the bodies of all requests looked after
        add(app, runonce.once(required=True)(lambda: "text"), path)
    for _ in range(2):
        status, _ = send_raw(app, Socket(b"x" * 10), 10, path, **headers)
        assert status[:3] in ("200", "400")


def test_a_repeat_takes_its_body_off_the_connection() -> None:
    app = served(lambda: "text", {"RUNONCE_FINGERPRINT_BYTES": 8})
    for _ in range(2):
        socket = Socket(b"x" * 20_000)
        assert send_raw(app, socket, 20_000) == ("200 OK", b"text")
    assert socket.left == 0


def test_a_body_without_a_length_reaches_the_view() -> None:
    app = reading(None, read_data, once=True, length=1000)
    for _ in range(2):
        environ = EnvironBuilder(path="/", method="POST", headers=ids()).get_environ()
        environ.update({"wsgi.input": io.BytesIO(b"chunked"), "wsgi.input_terminated": True})
        environ.pop("CONTENT_LENGTH", None)
        environ["HTTP_TRANSFER_ENCODING"] = "chunked"
        chunks, status, _ = run_wsgi_app(app, environ, buffered=True)
        assert status == "200 OK" and b"chunked" in b"".join(chunks)


def test_a_body_that_is_too_large_for_the_app_is_its_413() -> None:
    app = served(view := Counting(lambda: str(len(request.get_data()))), {"MAX_CONTENT_LENGTH": 10})
    assert [post(app, body=b"x" * 11, content_type="text/plain").status_int for _ in range(2)] == [413, 413]
    assert view.runs == 1


# The run as its view sees it.


def test_current_call_is_the_run() -> None:
    found: list[Any] = []

    def view() -> str:
        found.extend([bool(current_call), current_call.key, current_call.canceled])
        assert request.environ["runonce.call"].key == current_call.key
        return "text"

    app = served(view, runonce=RunOnce(scope=lambda environ: "tenant"))
    assert not current_call
    with pytest.raises(RuntimeError, match="no run"):
        current_call.key  # noqa: B018
    post(app)
    assert not current_call
    assert found == [True, CallKey("tenant", "chat", "call"), False]


def test_current_call_is_none_like_in_a_request_that_is_no_call() -> None:
    app = served(lambda: str(bool(current_call)))
    assert post(app, headers={}).text == "False"
    assert post(app).text == "True"


def test_current_call_is_there_in_an_async_view_and_in_its_stream() -> None:
    async def view() -> Any:
        key = current_call.key
        return (part for part in (key.chat_id, str(bool(current_call))))

    assert post(served(view)).text == "chatTrue"


def test_functions_after_the_request_are_outside_the_run() -> None:
    app, runonce = make_app()
    add(app, runonce.once(lambda: "text"))
    inside = []
    app.after_request(lambda response: inside.append(bool(current_call)) or response)
    app.teardown_request(lambda error: inside.append(bool(current_call)))
    post(app)
    assert inside == [False, False]


@pytest.mark.parametrize("fails", [False, True])
def test_a_released_call_is_forgotten_and_a_repeat_runs(fails: bool) -> None:
    def answer() -> str:
        if view.runs == 1:
            current_call.release()
            if fails:
                raise ValueError
            abort(503)
        return "text"

    app = served(view := Counting(answer))
    assert post(app).status_int == (500 if fails else 503)
    assert [post(app).text for _ in range(2)] == ["text", "text"]
    assert view.runs == 2


def test_a_status_may_say_that_nothing_was_processed() -> None:
    app = served(view := Counting(lambda: ("busy", 429)), {"RUNONCE_RELEASE_STATUSES": {429}})
    assert [post(app).status_int for _ in range(2)] == [429, 429]
    assert view.runs == 2


def test_by_default_a_refusal_of_the_view_is_its_answer() -> None:
    app = served(view := Counting(lambda: ("busy", 429)))
    assert [post(app).status_int for _ in range(2)] == [429, 429]
    assert view.runs == 1


def test_a_cancel_wakes_the_view_and_waits_for_it(threads: ThreadPoolExecutor) -> None:
    started = threading.Event()

    def view() -> Any:
        started.set()
        assert current_call.wait_canceled(LIMIT)
        return jsonify(canceled=current_call.canceled), 202

    app = served(view)
    run = threads.submit(post, app)
    assert started.wait(LIMIT)
    canceled = threads.submit(cancel, app).result(LIMIT).json
    assert run.result(LIMIT).json == {"canceled": True}
    assert base64.b64decode(canceled.pop("body")) == run.result().body
    assert canceled == {"received": True, "state": "running", "status": 202, "content_type": "application/json"}
    assert code_of(post(app)) == "canceled"


def test_a_repeat_that_waits_when_the_cancel_comes_gets_the_response(threads: ThreadPoolExecutor) -> None:
    go_on = threading.Event()
    app = served(
        view := Counting(lambda: str(go_on.wait(LIMIT))),
        runonce=RunOnce(store=(store := WatchedStore()), scope=lambda environ: None),
    )
    requests = [threads.submit(post, app) for _ in range(2)]
    store.until_waiting()
    canceled = threads.submit(cancel, app)
    store.until_waiting()
    go_on.set()
    assert [answer.result(LIMIT).text for answer in requests] == ["True", "True"]
    assert canceled.result(LIMIT).json["state"] == "running"
    assert view.runs == 1


def test_ten_requests_at_once_are_one_run_and_ten_equal_answers(threads: ThreadPoolExecutor) -> None:
    go_on = threading.Event()

    def answer() -> Any:
        assert go_on.wait(LIMIT)
        return {"id": view.runs}, 201, {"Location": "/notes/1"}

    view = Counting(answer)
    store = WatchedStore()
    app = served(view, runonce=RunOnce(store=store, scope=lambda environ: None))
    barrier = threading.Barrier(10)

    def send() -> Any:
        barrier.wait(LIMIT)
        return post(app, body={"a": "1"})

    requests = [threads.submit(send) for _ in range(10)]
    store.until_waiting(9)
    go_on.set()
    answers = [future.result(LIMIT) for future in requests]
    assert view.runs == 1
    assert {(answer.status, answer.body, answer.headers["Location"]) for answer in answers} == {
        ("201 CREATED", b'{"id":1}\n', "/notes/1")
    }
    assert sum("Idempotent-Replayed" in answer.headers for answer in answers) == 9


def test_a_repeat_that_may_not_wait_is_told_to_come_again(threads: ThreadPoolExecutor) -> None:
    started, go_on = threading.Event(), threading.Event()

    def view() -> str:
        started.set()
        return str(go_on.wait(LIMIT))

    app = served(view, {"RUNONCE_WAIT_TIMEOUT": 0})
    run = threads.submit(post, app)
    assert started.wait(LIMIT)
    refused = post(app)
    assert (refused.status_int, code_of(refused), refused.json["retryable"]) == (409, "still_running", True)
    assert int(refused.headers["Retry-After"]) > 0
    go_on.set()
    assert run.result(LIMIT).text == post(app).text == "True"


def test_each_chat_and_each_scope_has_its_own_calls() -> None:
    app = served(view := Counting(), runonce=RunOnce(scope=lambda environ: request.headers.get("X-User")))
    for headers in (ids(), ids(chat_id="other"), ids(**{"X-User": "ada"}), ids("other")):
        post(app, headers=headers)
    assert view.runs == 4


# Hooks.


def test_a_hook_is_given_the_call_inside_the_request_of_its_cancel() -> None:
    app, runonce = make_app()
    add(app, runonce.once(lambda: ("text", 201)))
    calls, inside = [], []

    @runonce.on_cancel
    def stop(call: Any) -> None:
        calls.append(call)
        inside.append((request.path, current_app.name))

    post(app)
    for _ in range(2):
        cancel(app, status=200)
    cancel(app, "unknown")
    saved = SavedResponse("201 CREATED", (("Content-Type", "text/html; charset=utf-8"),), b"text")
    found = [(call.key, call.state, call.saved) for call in calls]
    assert found == [
        (CallKey("", "chat", "call"), "done", saved),
        (CallKey("", "chat", "call"), "done", saved),
        (CallKey("", "chat", "unknown"), "not_received", None),
    ]
    assert inside[0] == (f"{ROUTES}/call/cancel", app.name)


def test_hooks_may_be_async_and_are_all_called_in_order() -> None:
    app, runonce = make_app()
    called = []

    @runonce.on_cancel
    async def first(call: Any) -> None:
        called.append(("first", current_app.name))

    @runonce.on_cancel
    def second(call: Any) -> None:
        called.append(("second", current_app.name))

    cancel(app, status=200)
    assert called == [("first", app.name), ("second", app.name)]


@pytest.mark.parametrize("error", [RuntimeError, Forbidden])
def test_a_hook_that_raises_is_told_and_the_mark_stays(error: type[Exception]) -> None:
    app, runonce = make_app()
    add(app, runonce.once(view := Counting()))
    failures = [error]

    @runonce.on_cancel
    def stop(call: Any) -> None:
        for failure in failures:
            raise failure

    failed = cancel(app)
    assert (failed.status_int, code_of(failed)) == (500, "cancel_failed")
    assert code_of(post(app)) == "canceled"
    failures.clear()
    assert cancel(app).json["state"] == "not_received"
    assert view.runs == 0


def test_hooks_that_are_owed_are_called_when_the_run_ends(threads: ThreadPoolExecutor) -> None:
    started, go_on, called = threading.Event(), threading.Event(), []

    def view() -> str:
        started.set()
        return str(go_on.wait(LIMIT))

    app, runonce = make_app(RUNONCE_CANCEL_TIMEOUT=0)
    add(app, runonce.once(view))
    runonce.on_cancel(lambda call: called.append((call.state, call.saved.body, request.path)))
    run = threads.submit(post, app)
    assert started.wait(LIMIT)
    pending = cancel(app)
    assert (pending.status_int, pending.json) == (202, {"received": True, "state": "running"})
    assert int(pending.headers["Retry-After"]) > 0
    assert called == []
    go_on.set()
    run.result(LIMIT)
    assert called == [("running", b"True", "/")]
    assert cancel(app).json["state"] == "running"


def test_hooks_that_are_owed_after_a_large_stream_have_the_apps_context() -> None:
    app, runonce = make_app(RUNONCE_CANCEL_TIMEOUT=0, RUNONCE_MAX_BODY_BYTES=10)
    add(app, runonce.once(lambda: (b"x" * 20 for _ in range(3))))
    called = []
    runonce.on_cancel(lambda call: called.append((current_app.name, flask.has_request_context())))
    answer = app.test_client().post("/", headers=ids())
    assert cancel(app).status_int == 202
    assert len(answer.data) == 60
    answer.close()
    assert called == [(app.name, False)]


def test_a_hook_that_is_owed_and_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    app, runonce = make_app(RUNONCE_CANCEL_TIMEOUT=0, RUNONCE_MAX_BODY_BYTES=10)
    add(app, runonce.once(lambda: (b"x" * 20 for _ in range(3))))

    @runonce.on_cancel
    def stop(call: Any) -> None:
        raise RuntimeError("cannot stop it")

    answer = app.test_client().post("/", headers=ids())
    assert cancel(app).status_int == 202
    answer.close()
    assert "cannot stop it" in caplog.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (record.chat_id, record.tool_call_id) == ("chat", "call")  # type: ignore[attr-defined]


# The routes.

VISIBLE = "".join(sorted(set(string.printable) - set(string.whitespace) - {","}))
ODD_IDS = [
    *VISIBLE.replace(".", ""),
    *("/a", "a/", "//", "a//b", "//a//", "cancel", "a/cancel", "/cancel", "cancel/", "cancel/cancel", "..a", "a/../b"),
    *("%2F", "%252f", "a?b", "a#b", "a;b=c", VISIBLE, "~" * 255),
]


@pytest.mark.parametrize("tool_call_id", ODD_IDS)
def test_an_id_may_hold_every_character_that_ids_may(tool_call_id: str) -> None:
    app = served(lambda: "text")
    post(app, headers=ids(tool_call_id))
    shown = TestApp(app).get(f"{ROUTES}/{quote(tool_call_id, safe='')}", headers={"Coder-Chat-Id": "chat"})
    assert shown.json["id"] == tool_call_id
    assert cancel(app, tool_call_id).json["state"] == "done"
    if "%" not in tool_call_id and "?" not in tool_call_id and "#" not in tool_call_id:  # as clients may also send it
        path = f"{ROUTES}/{tool_call_id}/cancel"
        raw = EnvironBuilder(method="POST", headers={"Coder-Chat-Id": "chat"}).get_environ() | {"PATH_INFO": path}
        chunks, _, _ = run_wsgi_app(app, raw, buffered=True)
        assert b'"state": "done"' in b"".join(chunks)


@pytest.mark.parametrize("tool_call_id", ["a,b", "é", "a b", "x" * 256, "00000000-0000-0000-0000-000000000000"])
def test_the_routes_refuse_what_is_no_id(tool_call_id: str) -> None:
    app, _ = make_app()
    chat = {"Coder-Chat-Id": "chat"}
    assert code_of(cancel(app, tool_call_id)) == "invalid_key"
    shown = TestApp(app).get(f"{ROUTES}/{quote(tool_call_id, safe='')}", headers=chat, status=400)
    assert code_of(shown) == "invalid_key"
    assert TestApp(app).get(ROUTES, headers=chat).json["total"] == 0


def test_an_id_in_the_route_is_taken_in_its_one_form() -> None:
    app = served(lambda: "text")
    spelled = "{0AF4D6D3-691C-45DD-AC54-55EA97970EBC}"
    post(app, headers=ids(spelled))
    assert cancel(app, "urn:uuid:0af4d6d3-691c-45dd-ac54-55ea97970ebc").json["state"] == "done"
    listed = TestApp(app).get(ROUTES, headers={"Coder-Chat-Id": "chat"}).json
    assert [call["id"] for call in listed["tool_calls"]] == ["0af4d6d3-691c-45dd-ac54-55ea97970ebc"]


def test_the_routes_need_a_chat_id() -> None:
    app, _ = make_app()
    for method, path in (("post", f"{ROUTES}/call/cancel"), ("get", ROUTES), ("get", f"{ROUTES}/call")):
        refused = getattr(TestApp(app), method)(path, status=400)
        assert code_of(refused) == "key_required"


def test_a_cancel_that_carries_an_id_is_no_call() -> None:
    app = served(lambda: "text")
    post(app)
    for _ in range(2):
        canceled = post(app, f"{ROUTES}/call/cancel", headers=ids("call"))
        assert canceled.json["state"] == "done"
        assert "Idempotent-Replayed" not in canceled.headers


def test_the_routes_answer_only_their_methods() -> None:
    app, _ = make_app()
    chat = {"Coder-Chat-Id": "chat"}
    TestApp(app).post(ROUTES, headers=chat, status=405)
    TestApp(app).delete(f"{ROUTES}/call", headers=chat, status=405)
    TestApp(app).get(f"{ROUTES}/call", headers=chat, status=404)


def test_an_empty_id_is_malformed_in_the_routes_too() -> None:
    app, _ = make_app()
    chat = {"Coder-Chat-Id": "chat"}
    for reply in (TestApp(app).get(f"{ROUTES}/", headers=chat, status=400), cancel(app, "")):
        assert code_of(reply) == "invalid_key"


def test_the_list_is_the_chats_own_newest_first_in_pages() -> None:
    app, runonce = make_app()
    add(app, runonce.once(lambda: "text"))
    add(app, runonce.once(lambda: abort(404)), "/missing")
    for number in range(3):
        post(app, headers=ids(f"call-{number}"))
    post(app, headers=ids("call-1"))
    post(app, "/missing", headers=ids("missing"))
    cancel(app, "canceled")
    cancel(app, "call-0")
    post(app, headers=ids(chat_id="other"))
    listed = TestApp(app).get(ROUTES, headers={"Coder-Chat-Id": "chat"}).json
    assert (listed["total"], listed["offset"], listed["has_more"]) == (5, 0, False)
    facts = {
        call["id"]: (call["state"], call["canceled"], call["status"], call["repeats"]) for call in listed["tool_calls"]
    }
    assert facts == {
        "canceled": ("canceled", True, None, 0),
        "missing": ("done", False, 404, 0),
        "call-2": ("done", False, 200, 0),
        "call-1": ("done", False, 200, 1),
        "call-0": ("done", True, 200, 0),
    }
    names = [call["id"] for call in listed["tool_calls"]]
    assert names == ["canceled", "missing", "call-2", "call-1", "call-0"]
    for call in listed["tool_calls"]:
        assert (call["started_at"] is None) == (call["finished_at"] is None) == (call["id"] == "canceled")
    page = TestApp(app).get(f"{ROUTES}?limit=2&offset=1", headers={"Coder-Chat-Id": "chat"}).json
    assert [call["id"] for call in page["tool_calls"]] == names[1:3]
    assert (page["total"], page["offset"], page["has_more"]) == (5, 1, True)
    shown = TestApp(app).get(f"{ROUTES}/call-1", headers={"Coder-Chat-Id": "chat"}).json
    assert shown == listed["tool_calls"][3]


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "limit=x", "limit=", "limit=1&limit=2", "offset=-1"])
def test_a_query_that_makes_no_sense_is_refused(query: str) -> None:
    app, _ = make_app()
    refused = TestApp(app).get(f"{ROUTES}?{query}", headers={"Coder-Chat-Id": "chat"}, status=400)
    assert code_of(refused) == "invalid_query"


def test_the_routes_stand_where_the_app_says() -> None:
    app, _ = make_app(RUNONCE_URL_PREFIX="/runs")
    assert post(app, "/runs/a/cancel", headers={"Coder-Chat-Id": "chat"}).json["state"] == "not_received"
    app, _ = make_app(RUNONCE_URL_PREFIX=None)
    assert cancel(app).status_int == 404


def test_the_routes_leave_the_apps_own_paths_alone() -> None:
    app, _ = make_app()
    app.add_url_rule("/files//<path:name>", "files", lambda name: name)
    app.add_url_rule("/merged/<name>", "merged", lambda name: name)
    assert TestApp(app).get("/merged//a", status=308).headers["Location"].endswith("/merged/a")


# Key, scope and guard.


def test_a_scope_runs_inside_the_request_context() -> None:
    app, runonce = make_app(once=RunOnce(scope=lambda environ: session.get("user")))
    add(app, runonce.once(view := Counting()))
    app.add_url_rule("/login/<user>", "login", lambda user: session.update(user=user) or user)
    for user in ("ada", "bob"):
        browser = TestApp(app)
        browser.get(f"/login/{user}")
        for _ in range(2):
            browser.post("/", headers=ids())
        assert browser.get(ROUTES, headers={"Coder-Chat-Id": "chat"}).json["tool_calls"][0]["repeats"] == 1
    assert view.runs == 2


@pytest.mark.parametrize("scope", [None, "", "x" * 255, "ü / –"])
def test_scopes_that_are_allowed(scope: str | None) -> None:
    app = served(view := Counting(), runonce=RunOnce(scope=lambda environ: scope))
    assert [post(app).text for _ in range(2)] == ["text"] * 2
    assert cancel(app).json["state"] == "done"
    assert view.runs == 1


@pytest.mark.parametrize("scope", [7, b"a", "x" * 256, "a\nb", "\x7f"])
def test_a_scope_that_is_none_refuses(scope: Any, caplog: pytest.LogCaptureFixture) -> None:
    app = served(view := Counting(), runonce=RunOnce(scope=lambda environ: scope))
    for refused in (post(app), cancel(app)):
        assert (refused.status_int, code_of(refused)) == (500, "key_failed")
    assert view.runs == 0
    assert "scope" in caplog.text


def raises(error: Exception) -> Callable[[Any], Any]:
    def refuse(environ: Any) -> Any:
        raise error

    return refuse


@pytest.mark.parametrize("which", ["key", "scope"])
def test_key_and_scope_may_refuse_through_the_apps_error_handlers(which: str) -> None:
    app, runonce = make_app(once=RunOnce(**{which: raises(Unauthorized("log in"))}))
    app.register_error_handler(401, lambda error: ({"error": error.description}, 401))
    add(app, runonce.once(view := Counting()))
    for _ in range(2):
        refused = post(app)
        assert (refused.status_int, refused.json) == (401, {"error": "log in"})
    assert view.runs == 0


@pytest.mark.parametrize("which", ["key", "scope"])
def test_a_key_or_scope_that_raises_runs_nothing(which: str, caplog: pytest.LogCaptureFixture) -> None:
    app = served(view := Counting(), runonce=RunOnce(**{which: raises(ZeroDivisionError())}))
    refused = post(app)
    assert (refused.status_int, code_of(refused)) == (500, "key_failed")
    assert view.runs == 0
    assert "ZeroDivisionError" in caplog.text


def guard(environ: Any) -> None:
    if request.headers.get("X-User") is None:
        raise Forbidden("who are you?")


def test_a_guard_stands_before_cancel_list_and_show_and_nowhere_else() -> None:
    app, runonce = make_app(once=RunOnce(guard=guard))
    app.register_error_handler(403, lambda error: ({"error": error.description}, 403))
    add(app, runonce.once(Counting()))
    assert post(app).text == "text"
    chat = {"Coder-Chat-Id": "chat"}
    for method, path in (("post", f"{ROUTES}/call/cancel"), ("get", ROUTES), ("get", f"{ROUTES}/call")):
        refused = getattr(TestApp(app), method)(path, headers=chat, status=403)
        assert refused.json == {"error": "who are you?"}
        getattr(TestApp(app), method)(path, headers={**chat, "X-User": "ada"}, status=200)


def test_a_canceled_call_is_not_canceled_by_who_is_refused() -> None:
    app, runonce = make_app(once=RunOnce(guard=guard))
    called = []
    runonce.on_cancel(called.append)
    add(app, runonce.once(Counting()))
    assert cancel(app).status_int == 403
    assert post(app).text == "text"
    assert called == []


def test_a_guard_that_fails_refuses(caplog: pytest.LogCaptureFixture) -> None:
    app, _ = make_app(once=RunOnce(guard=raises(ZeroDivisionError())))
    refused = cancel(app)
    assert (refused.status_int, code_of(refused)) == (500, "key_failed")


def test_the_idempotency_key_header() -> None:
    app = served(
        view := Counting(),
        runonce=RunOnce(key=keys.idempotency_key, scope=lambda environ: request.headers["X-User"]),
    )
    for user in ("ada", "bob"):
        for value in ("abc", '"abc"', ' "abc" '):
            assert post(app, headers={"Idempotency-Key": value, "X-User": user}).text == "text"
    assert view.runs == 2
    assert post(app, headers={"X-User": "ada"}).text == "text"  # no call
    assert code_of(post(app, headers={"Idempotency-Key": "a,b", "X-User": "ada"})) == "invalid_key"
    canceled = post(app, f"{ROUTES}/abc/cancel", headers={"Coder-Chat-Id": "-", "X-User": "ada"})
    assert canceled.json["state"] == "done"


def test_a_key_may_be_the_apps_own_and_come_from_the_body() -> None:
    def key(environ: Any) -> CallKey | None:
        number = request.get_json()["number"]
        return CallKey("shop", "orders", number) if number else None

    app = served(Counting(lambda: f"run {view.runs}"), runonce=RunOnce(key=key, guard=print))
    view = app.view_functions["/"].__wrapped__  # type: ignore[attr-defined]

    def send(number: Any) -> Any:
        return TestApp(app).post_json("/", {"number": number}, expect_errors=True)

    assert [send(number).text for number in ("a", "b", "a", None, None)] == [
        "run 1",
        "run 2",
        "run 1",
        "run 3",
        "run 4",
    ]
    assert code_of(send("a,b")) == "invalid_key"
    assert code_of(send(7)) == "key_failed"


def test_the_headers_may_have_other_names() -> None:
    config = {"RUNONCE_CHAT_ID_HEADER": "X-Chat", "RUNONCE_TOOL_CALL_ID_HEADER": "X-Call"}
    app = served(view := Counting(), config)
    for _ in range(2):
        post(app, headers={"X-Chat": "a", "X-Call": "b"})
    assert view.runs == 1
    for _ in range(2):
        post(app)
    assert view.runs == 3
    assert post(app, f"{ROUTES}/b/cancel", headers={"X-Chat": "a"}).json["state"] == "done"


# Processes, middleware, signals, logs.


def test_a_memory_store_under_several_processes_refuses() -> None:
    several = {"wsgi.multiprocess": True}
    app = served(view := Counting())
    for refused in (post(app, extra_environ=several), cancel(app, extra_environ=several)):
        assert (refused.status_int, code_of(refused)) == (500, "store_not_shared")
    assert view.runs == 0
    assert post(app, headers={}, extra_environ=several).text == "text"
    app = served(view, {"RUNONCE_ALLOW_UNSHARED": True})
    assert post(app, extra_environ=several).text == "text"


def test_inside_a_middleware_that_has_the_same_key_the_view_is_just_called() -> None:
    app = served(view := Counting())
    inner = app.extensions["runonce"].runner.store
    app.wsgi_app = RunOnceMiddleware(app.wsgi_app, scope=lambda environ: None)  # type: ignore[method-assign]
    assert [post(app).text for _ in range(2)] == ["text"] * 2
    assert view.runs == 1
    assert inner.list().total == 0
    assert cancel(app).json["state"] == "done"


def test_inside_a_middleware_that_has_another_key_both_keep_a_record() -> None:
    app = served(view := Counting(), runonce=RunOnce(scope=lambda environ: "tenant"))
    inner = app.extensions["runonce"].runner.store
    app.wsgi_app = RunOnceMiddleware(app.wsgi_app, scope=lambda environ: None)  # type: ignore[method-assign]
    assert [post(app).text for _ in range(2)] == ["text"] * 2
    assert view.runs == 1
    assert inner.list().total == 1


@contextlib.contextmanager
def signalled(app: Flask) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What the signals tell of this app."""
    told: list[tuple[str, dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        for name in ("started", "finished", "replayed", "refused", "canceled", "released", "lost"):
            signal = getattr(signals, f"call_{name}")

            def note(sender: Any, name: str = name, **facts: Any) -> None:
                told.append((name, facts))

            stack.enter_context(signal.connected_to(note, sender=app))
        yield told


def test_signals_are_sent_by_the_app_with_the_key_and_their_facts() -> None:
    key = CallKey("", "chat", "call")
    app = served(lambda: ("text", 201))
    other = served(lambda: ("text", 201))
    with signalled(app) as told:
        post(app)
        post(app)
        post(app, body={"a": "1"})
        cancel(app)
        post(other)
    seconds = [facts.pop("seconds") for name, facts in told if name in ("finished", "replayed")]
    assert all(value >= 0 for value in seconds)
    assert told == [
        ("started", {"key": key}),
        ("finished", {"key": key, "status": 201, "bytes": 4, "ended": "response"}),
        ("replayed", {"key": key, "status": 201}),
        ("refused", {"key": key, "code": "input_mismatch", "status": 409}),
        ("canceled", {"key": key, "state": "done", "pending": False}),
    ]


def test_a_view_that_flask_cannot_call_leaves_no_run_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    app = served(lambda: "text")

    def ensure_sync(function: Any) -> Any:
        if getattr(function, "__name__", "") == "<lambda>":
            raise RuntimeError("Install Flask with the 'async' extra in order to use async views.")
        return function

    monkeypatch.setattr(app, "ensure_sync", ensure_sync)
    for _ in range(2):
        assert post(app).status_int == 500
    assert cancel(app).json["state"] == "not_received"


async def _async_guard(environ: Any) -> None:
    raise Unauthorized


@pytest.mark.parametrize("guard", [_async_guard, lambda environ: False, lambda environ: Response(status=401)])
def test_a_guard_that_refuses_in_another_way_than_by_raising_lets_nobody_pass(guard: Any) -> None:
    app = served(lambda: "text", runonce=RunOnce(guard=guard))
    assert cancel(app).json["code"] == "key_failed"


def test_released_and_lost_runs_are_signalled_too() -> None:
    key = CallKey("", "chat", "call")

    def view() -> str:
        current_call.release()
        return "text"

    app = served(view)
    with signalled(app) as told:
        post(app)
    assert told == [("started", {"key": key}), ("released", {"key": key})]
    running_elsewhere(store := LostOwners())
    app = served(view, runonce=RunOnce(store=store, scope=lambda environ: None))
    with signalled(app) as told:
        post(app)
    assert told[0] == ("lost", {"key": key, "owner": "another"})


def test_a_refusal_without_a_key_is_signalled_without_one() -> None:
    app = served(lambda: "text", required=True)
    with signalled(app) as told:
        post(app, headers={})
        post(app, headers=ids(""))
    assert told == [
        ("refused", {"key": None, "code": "key_required", "status": 400}),
        ("refused", {"key": None, "code": "invalid_key", "status": 400}),
    ]


def test_log_lines_carry_the_ids(caplog: pytest.LogCaptureFixture) -> None:
    app = served(lambda: "text")
    with caplog.at_level(logging.DEBUG, "flask_runonce"):
        post(app)
    records = [record for record in caplog.records if record.name == "flask_runonce"]
    assert records
    assert {(record.chat_id, record.tool_call_id) for record in records} == {("chat", "call")}  # type: ignore[attr-defined]
