"""Every way in which a Flask view can answer: the first caller gets what it gets without run-once, repeats the same.

Each view is served by two apps, one with run-once and one without, and the answers are compared.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import pytest
import werkzeug
from flask import Blueprint, Flask, Response, abort, current_app, got_request_exception, request, session
from flask.views import MethodView
from webtest import TestApp
from webtest.response import TestResponse
from werkzeug.exceptions import HTTPException, ImATeapot, NotFound

from flask_runonce import RunOnce

HEADERS = {"Coder-Chat-Id": "chat", "Coder-Tool-Call-Id": "call"}
SAVED = {
    *("content-type", "content-encoding", "content-language", "content-location", "content-disposition", "location"),
    *("etag", "last-modified", "link", "cache-control", "vary"),
}

View = Callable[..., Any]
Prepare = Callable[[Flask], object]


def happened() -> None:
    """What a view does in the world."""
    current_app.config["EFFECTS"].append(request.path)


class Served:
    """A view, served under "/" with run-once or without. Each request comes from a new browser."""

    def __init__(self, view: View, prepare: Prepare | None = None, *, once: bool = True, **options: Any) -> None:
        self.app = Flask(__name__, template_folder=None, static_folder=None)
        self.app.secret_key = "secret"
        self.app.config["EFFECTS"] = self.effects = []
        if prepare:
            prepare(self.app)
        if once:
            runonce = RunOnce(self.app, scope=lambda environ: "tests")
            view = runonce.once(**options)(view)
        self.app.add_url_rule("/", "view", view, methods=["POST", "GET"])

    def send(self, method: str = "post", headers: dict[str, str] | None = None) -> TestResponse:
        return getattr(TestApp(self.app), method)("/", headers={**HEADERS, **(headers or {})}, expect_errors=True)

    def raised(self) -> type[BaseException]:
        """What a request leaves to the server to deal with."""
        with pytest.raises(BaseException) as caught:  # noqa: B017
            self.send()
        return caught.type


def seen(answer: TestResponse) -> tuple[Any, ...]:
    """What a client sees of an answer, apart from how long a stream is said to be and what a cookie holds."""
    headers = [(name, value.split("=")[0]) for name, value in answer.headerlist if name != "Content-Length"]
    return answer.status, sorted(headers), answer.body


def saved(answer: TestResponse) -> tuple[Any, ...]:
    """What a repeat has in common with the first answer."""
    headers = [(name, value) for name, value in answer.headerlist if name.lower() in SAVED and value != "Cookie"]
    return answer.status, sorted(headers), answer.body


def assert_repeats(first: TestResponse, *repeats: TestResponse) -> None:
    for repeat in repeats:
        assert saved(repeat) == saved(first)
        assert repeat.headers["Idempotent-Replayed"] == "true"
        assert "Set-Cookie" not in repeat.headers
        assert repeat.status_int in (204, 304) or repeat.headers["Content-Length"] == str(len(repeat.body))
    assert "Idempotent-Replayed" not in first.headers


def assert_unknown(*repeats: TestResponse) -> None:
    for repeat in repeats:
        assert repeat.status_int == 500
        assert repeat.content_type == "application/problem+json"
        assert repeat.json["code"] == "outcome_unknown"
        assert repeat.headers["Idempotent-Replayed"] == "true"
        assert "Set-Cookie" not in repeat.headers


# The views. Each makes itself felt exactly once in a run.


def answers_str() -> Any:
    happened()
    return "text – ünïcode"


def answers_bytes() -> Any:
    happened()
    return b"\x00\xff"


def answers_dict() -> Any:
    happened()
    return {"a": [1, None, "ü"]}


def answers_list() -> Any:
    happened()
    return [1, {"a": 2}]


def answers_nothing() -> Any:
    happened()
    return ""


def answers_text_and_status() -> Any:
    happened()
    return "created", 201


def answers_text_and_headers() -> Any:
    happened()
    return "text", {"Content-Type": "text/plain", "Content-Language": "de", "X-Own": "1"}


def answers_dict_status_and_headers() -> Any:
    happened()
    return {"id": 7}, 201, [("Location", "/notes/7"), ("Link", "</a>; rel=a"), ("Link", "</b>; rel=b")]


def answers_a_status_of_its_own() -> Any:
    happened()
    return "text", "299 So To Speak"


def answers_no_content() -> Any:
    happened()
    response = Response(status=204)
    del response.headers["Content-Type"]
    return response


def answers_response() -> Any:
    happened()
    response = Response("text", 202, mimetype="text/csv")
    response.headers["Content-Disposition"] = 'attachment; filename="a.csv"'
    response.last_modified = 1_700_000_000
    response.cache_control.max_age = 60
    response.vary.add("Accept")
    response.content_location = "/there"
    return response


def answers_jsonify() -> Any:
    happened()
    return flask.jsonify(a=1), 418


class Csv(Response):
    default_mimetype = "text/csv"


def answers_response_subclass() -> Any:
    happened()
    return Csv("a,b")


def answers_werkzeug_response() -> Any:
    happened()
    return werkzeug.Response("text", mimetype="text/plain")


def answers_wsgi_app() -> Any:
    happened()

    def application(environ: Any, start_response: Any) -> list[bytes]:
        start_response("201 CREATED", [("Content-Type", "text/plain"), ("ETag", '"a"')])
        return [b"from ", environ["PATH_INFO"].encode()]

    return application


def answers_http_exception() -> Any:
    happened()
    return NotFound("returned, not raised")


def answers_compressed() -> Any:
    happened()
    return Response(gzip.compress(b"text", mtime=0), headers={"Content-Encoding": "gzip"})


def answers_generator() -> Any:
    happened()
    return (chunk for chunk in ("a – ", b"b"))


def answers_generator_of_nothing() -> Any:
    happened()
    return (chunk for chunk in ())


def answers_stream_with_context() -> Any:
    @flask.stream_with_context
    def chunks() -> Iterator[str]:
        yield request.path
        happened()
        yield flask.g.get("nothing", "-")

    return Response(chunks(), mimetype="text/plain")


def answers_stream_template() -> Any:
    happened()
    return flask.stream_template_string("{% for i in range(3) %}{{ i }} of {{ request.path }};{% endfor %}")


def answers_template() -> Any:
    happened()
    return flask.render_template_string("<p>{{ text }}", text="<&>")


def answers_file_in_memory() -> Any:
    happened()
    return flask.send_file(io.BytesIO(b"content"), download_name="a.txt", as_attachment=True, etag="abc", max_age=60)


def answers_file_on_disk() -> Any:
    happened()
    return flask.send_file(Path(__file__))


def answers_redirect() -> Any:
    happened()
    return flask.redirect("/elsewhere", 303)


def aborts() -> Any:
    happened()
    abort(404, "no such thing")


def aborts_with_response() -> Any:
    happened()
    abort(Response("own", 418))


def aborts_with_headers() -> Any:
    happened()
    raise werkzeug.exceptions.MethodNotAllowed(["GET"])


def misses_a_form_field() -> Any:
    happened()
    return request.form["missing"]


async def answers_async() -> Any:
    await asyncio.sleep(0)
    happened()
    return {"async": True}, 201


async def aborts_async() -> Any:
    await asyncio.sleep(0)
    happened()
    abort(409)


async def answers_async_generator_of_a_thread() -> Any:
    happened()
    return (str(number) for number in range(3))


def uses_after_this_request() -> Any:
    @flask.after_this_request
    def sign(response: Response) -> Response:
        response.headers["X-Own"] = "1"
        response.set_cookie("seen", "1")
        return response

    happened()
    return "text"


def flashes() -> Any:
    happened()
    flask.flash("done")
    return "text"


def writes_session() -> Any:
    happened()
    session["count"] = session.get("count", 0) + 1
    return str(session["count"])


def sets_cookies() -> Any:
    happened()
    response = Response("text")
    response.set_cookie("a", "1")
    response.set_cookie("b", "2", httponly=True)
    return response


def is_conditional() -> Any:
    happened()
    response = Response("text")
    response.add_etag()
    return response.make_conditional(request)


class Resource(MethodView):
    init_every_request = False

    def post(self) -> Any:
        happened()
        return {"method": "post"}


class AsyncResource(MethodView):
    async def post(self) -> Any:
        happened()
        return {"method": "post"}, 202


VIEWS: list[View] = [
    *(answers_str, answers_bytes, answers_dict, answers_list, answers_nothing, answers_text_and_status),
    *(answers_text_and_headers, answers_dict_status_and_headers, answers_a_status_of_its_own, answers_no_content),
    *(answers_response, answers_jsonify, answers_response_subclass),
    *(answers_werkzeug_response, answers_wsgi_app, answers_http_exception, answers_compressed, answers_generator),
    *(answers_generator_of_nothing, answers_stream_with_context, answers_stream_template, answers_template),
    *(answers_file_in_memory, answers_file_on_disk, answers_redirect, aborts, aborts_with_response),
    *(aborts_with_headers, misses_a_form_field, answers_async, aborts_async, answers_async_generator_of_a_thread),
    *(uses_after_this_request, flashes, writes_session, sets_cookies, is_conditional),
    *(Resource.as_view("resource"), AsyncResource.as_view("async_resource")),
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_every_answer_is_as_without_run_once_and_repeats_equal_it(view: View) -> None:
    expected = Served(view, once=False).send()
    served = Served(view)
    first, *repeats = (served.send() for _ in range(3))
    assert seen(first) == seen(expected)
    assert_repeats(first, *repeats)
    assert served.effects == ["/"]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_a_request_without_ids_is_answered_as_without_run_once(view: View) -> None:
    expected = TestApp(Served(view, once=False).app).post("/", expect_errors=True)
    served = Served(view)
    for _ in range(2):
        assert seen(TestApp(served.app).post("/", expect_errors=True)) == seen(expected)
    assert served.effects == ["/", "/"]


def test_a_view_may_change_its_answer_after_itself() -> None:
    """What `after_this_request` does belongs to the run: a repeat, which runs no view, has it from the record."""

    def view() -> str:
        @flask.after_this_request
        def translate(response: Response) -> Response:
            response.set_data("übersetzt")
            response.content_language.add("de")
            return response

        return "to be translated"

    expected = Served(view, once=False).send()
    served = Served(view)
    first, *repeats = (served.send() for _ in range(3))
    assert seen(first) == seen(expected)
    assert_repeats(first, *repeats)


def test_a_flashed_message_shows_once() -> None:
    served = Served(flashes)
    served.app.add_url_rule("/messages", "messages", lambda: flask.get_flashed_messages())
    browser = TestApp(served.app)
    for _ in range(3):
        browser.post("/", headers=HEADERS)
    assert browser.get("/messages").json == ["done"]
    assert browser.get("/messages").json == []


def test_a_repeat_leaves_the_session_as_it_is() -> None:
    served = Served(writes_session)
    browser = TestApp(served.app)
    assert [browser.post("/", headers=HEADERS).text for _ in range(3)] == ["1", "1", "1"]
    assert browser.post("/", headers={**HEADERS, "Coder-Tool-Call-Id": "another"}).text == "2"


def test_a_session_that_is_renewed_with_each_answer_is_renewed_with_a_repeat_too() -> None:
    def view() -> str:
        session.permanent = True
        return "text"

    browser = TestApp(Served(view).app)
    for _ in range(2):
        assert browser.post("/", headers=HEADERS).headers["Set-Cookie"].startswith("session=")


def test_conditional_answers_are_kept_where_reads_are_calls() -> None:
    served = Served(is_conditional, methods={"GET"})
    etag = served.send("get", {"Coder-Tool-Call-Id": "first"}).headers["ETag"]
    first, *repeats = (served.send("get", {"If-None-Match": etag}) for _ in range(3))
    assert (first.status_int, first.body, first.headers["ETag"]) == (304, b"", etag)
    assert_repeats(first, *repeats)
    assert len(served.effects) == 2


def test_a_status_that_is_no_number_leaves_no_repeat_waiting() -> None:
    def view() -> Any:
        happened()
        return "text", "OK"

    served = Served(view, lambda app: app.config.update(RUNONCE_WAIT_TIMEOUT=0))
    assert served.send().status_int == 500
    assert_unknown(served.send(), served.send())
    assert served.effects == ["/"]


def test_reads_pass_through() -> None:
    served = Served(answers_str)
    for _ in range(2):
        assert "Idempotent-Replayed" not in served.send("get").headers
    assert served.effects == ["/", "/"]


# Errors that are handled: the handler's answer is the run's.


class Broken(Exception):
    pass


def breaks() -> Any:
    happened()
    raise Broken("pieces")


async def breaks_async() -> Any:
    happened()
    raise Broken("pieces")


class Handlers:
    """Registers an error handler and counts its calls."""

    def __init__(self, kind: type[Exception] | int, answer: Callable[[Exception], Any]) -> None:
        self.kind = kind
        self.answer = answer
        self.errors: list[Exception] = []

    def __call__(self, app: Flask | Blueprint) -> None:
        app.register_error_handler(self.kind, self.handle)

    def handle(self, error: Exception) -> Any:
        self.errors.append(error)
        return self.answer(error)


def described(error: Exception) -> Any:
    return {"error": type(error).__name__, "original": repr(getattr(error, "original_exception", None))}, 422


def teapot(error: Exception) -> Any:
    raise ImATeapot


def broken_again(error: Exception) -> Any:
    raise RuntimeError("the handler is broken too")


def same_again(error: Exception) -> Any:
    raise error


def nothing(error: Exception) -> Any:
    return None


@pytest.mark.parametrize("view", [breaks, breaks_async, aborts, aborts_async, answers_http_exception])
def test_the_answer_of_an_error_handler_is_the_runs(view: View) -> None:
    expected = Served(view, Handlers(Exception, described), once=False).send()
    handlers = Handlers(Exception, described)
    served = Served(view, handlers)
    first, *repeats = (served.send() for _ in range(3))
    assert seen(first) == seen(expected)
    assert_repeats(first, *repeats)
    assert len(handlers.errors) == (0 if view is answers_http_exception else 1)
    assert served.effects == ["/"]


@pytest.mark.parametrize("kind", [404, NotFound, HTTPException, LookupError, Exception])
def test_the_handler_that_is_asked_is_the_one_that_flask_asks(kind: Any) -> None:
    def view() -> Any:
        raise KeyError("k") if kind is LookupError else NotFound

    handlers = Handlers(kind, described)
    served = Served(view, handlers)
    first, *repeats = (served.send() for _ in range(3))
    assert first.status_int == 422
    assert_repeats(first, *repeats)
    assert len(handlers.errors) == 1


@pytest.mark.parametrize("in_blueprint", [True, False])
def test_a_blueprints_handler_comes_before_the_apps(in_blueprint: bool) -> None:
    app = Flask(__name__)
    runonce = RunOnce(app, scope=lambda environ: "tests")
    blueprint = Blueprint("notes", __name__)
    blueprint.add_url_rule("/", "view", runonce.once(lambda: abort(404)), methods=["POST"])
    app.register_error_handler(404, lambda error: ("the app's", 404))
    if in_blueprint:
        blueprint.register_error_handler(404, lambda error: ("the blueprint's", 404))
    app.register_blueprint(blueprint)
    first, *repeats = (TestApp(app).post("/", headers=HEADERS, status=404) for _ in range(3))
    assert first.text == ("the blueprint's" if in_blueprint else "the app's")
    assert_repeats(first, *repeats)


def test_an_error_handler_may_be_async_and_may_stream() -> None:
    async def handle(error: Exception) -> Any:
        return Response((chunk for chunk in ("a", "b")), 503)

    served = Served(breaks, lambda app: app.register_error_handler(Broken, handle))
    first, *repeats = (served.send() for _ in range(3))
    assert (first.status_int, first.text) == (503, "ab")
    assert_repeats(first, *repeats)


def test_an_abort_with_500_is_an_answer_and_no_unknown_outcome() -> None:
    served = Served(lambda: abort(500), lambda app: app.register_error_handler(500, lambda error: ("own", 500)))
    first, *repeats = (served.send() for _ in range(3))
    assert (first.status_int, first.text) == (500, "own")
    assert_repeats(first, *repeats)


# Errors that are not handled: the first caller gets what it would get without run-once, repeats that nobody knows.


def answers_none() -> Any:
    happened()


def answers_a_number() -> Any:
    happened()
    return 7


def answers_too_long_a_tuple() -> Any:
    happened()
    return "text", 200, {}, "more"


def answers_unserialisable() -> Any:
    happened()
    return {"a": object()}


UNANSWERED = [
    *(breaks, breaks_async, answers_none, answers_a_number, answers_too_long_a_tuple),
    answers_unserialisable,
]
HANDLERS: list[tuple[Any, Callable[[Exception], Any]]] = [
    (500, described),
    (Broken, broken_again),
    (Broken, same_again),
    (Broken, teapot),
    (Broken, nothing),
    (Exception, broken_again),
    (500, broken_again),
    (404, described),
]


@pytest.mark.parametrize("view", UNANSWERED, ids=lambda view: view.__name__)
@pytest.mark.parametrize(("kind", "answer"), HANDLERS)
def test_what_is_not_handled_is_answered_as_without_run_once(
    view: View, kind: Any, answer: Callable[[Exception], Any]
) -> None:
    alone = Handlers(kind, answer)
    plain = Served(view, alone, once=False)
    handlers = Handlers(kind, answer)
    served = Served(view, handlers)
    for app in (plain.app, served.app):
        app.config["PROPAGATE_EXCEPTIONS"] = False
    if kind in (500, Exception) and answer is broken_again:
        with pytest.raises(RuntimeError, match="broken too"):
            plain.send()
        with pytest.raises(RuntimeError, match="broken too"):
            served.send()
    else:
        assert seen(served.send()) == seen(plain.send())
    assert list(map(repr, handlers.errors)) == list(map(repr, alone.errors))
    calls = len(handlers.errors)
    assert_unknown(served.send(), served.send())
    assert len(handlers.errors) == calls
    assert served.effects == ["/"]


@pytest.mark.parametrize("view", UNANSWERED, ids=lambda view: view.__name__)
def test_an_app_that_propagates_errors_still_does(view: View) -> None:
    def propagate(app: Flask) -> None:
        app.config["PROPAGATE_EXCEPTIONS"] = True

    expected = Served(view, propagate, once=False).raised()
    served = Served(view, propagate)
    assert served.raised() is expected
    assert_unknown(served.send(), served.send())
    assert served.effects == ["/"]


@pytest.mark.parametrize("config", ["TRAP_HTTP_EXCEPTIONS", "TRAP_BAD_REQUEST_ERRORS"])
@pytest.mark.parametrize("view", [aborts, misses_a_form_field])
def test_trapped_http_exceptions_are_as_without_run_once(view: View, config: str) -> None:
    def trap(app: Flask) -> None:
        app.config[config] = True

    expected = Served(view, trap, once=False).send()
    served = Served(view, trap)
    first, *repeats = (served.send() for _ in range(3))
    assert seen(first) == seen(expected)
    if first.status_int == 500:
        assert_unknown(*repeats)
    else:
        assert_repeats(first, *repeats)
    assert served.effects == ["/"]


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, KeyboardInterrupt])
@pytest.mark.parametrize("streams", [False, True])
def test_an_exit_goes_to_the_server_and_leaves_no_repeat_waiting(error: type[BaseException], streams: bool) -> None:
    def view() -> Any:
        happened()
        if not streams:
            raise error

        def chunks() -> Iterator[str]:
            yield "text"
            raise error

        return chunks()

    served = Served(view)
    assert served.raised() is error
    assert_unknown(served.send(), served.send())
    assert served.effects == ["/"]


def test_the_server_error_is_signalled_once_and_teardown_is_told() -> None:
    signalled, torn_down = [], []

    def note(sender: object, exception: BaseException) -> None:
        signalled.append(exception)

    served = Served(breaks, lambda app: app.teardown_request(torn_down.append))
    with got_request_exception.connected_to(note, sender=served.app):
        served.send()
        served.send()
    assert [type(error) for error in signalled] == [Broken]
    assert [type(error) for error in torn_down] == [Broken, type(None)]


def test_a_stream_that_breaks_is_answered_by_the_app_and_its_outcome_is_unknown() -> None:
    closed = []

    def view() -> Response:
        def chunks() -> Iterator[str]:
            try:
                yield "text"
                happened()
                raise Broken
            finally:
                closed.append("generator")

        response = Response(chunks())
        response.call_on_close(lambda: closed.append("response"))
        return response

    handlers = Handlers(500, described)
    served = Served(view, handlers)
    assert served.send().status_int == 422
    assert_unknown(served.send(), served.send())
    assert served.effects == ["/"]
    assert closed == ["generator", "response"]
    assert len(handlers.errors) == 1


# What belongs to a response and is not its text.


class Closing:
    """Chunks that know how often they were closed."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = iter(chunks)
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("size", [10, 100])
def test_a_body_is_closed_exactly_once_and_so_is_its_response(size: int) -> None:
    chunks, closed = Closing(b"x" * size, b"y"), []

    def view() -> Response:
        response = Response(chunks)  # type: ignore[arg-type]
        response.call_on_close(lambda: closed.append(1))
        return response

    served = Served(view, lambda app: app.config.update(RUNONCE_MAX_BODY_BYTES=50))
    assert served.send().body == b"x" * size + b"y"
    assert (chunks.closed, closed) == (1, [1])
    served.send()
    assert (chunks.closed, closed) == (1, [1])


def test_a_body_whose_close_raises_has_an_unknown_outcome() -> None:
    class Stuck(Closing):
        def close(self) -> None:
            super().close()
            raise Broken

    chunks = Stuck(b"text")
    served = Served(lambda: Response(chunks))  # type: ignore[arg-type]
    assert served.send().status_int == 500
    assert_unknown(served.send(), served.send())
    assert chunks.closed == 1


@pytest.mark.parametrize("over", [0, 1])
def test_a_stream_is_kept_up_to_the_bound(over: int) -> None:
    def view() -> Any:
        @flask.stream_with_context
        def chunks() -> Iterator[bytes]:
            yield b"x" * 60
            happened()
            yield b"y" * (40 + over)

        return Response(chunks(), 201)

    served = Served(view, lambda app: app.config.update(RUNONCE_MAX_BODY_BYTES=100))
    first, *repeats = (served.send() for _ in range(3))
    assert (first.status_int, first.body) == (201, b"x" * 60 + b"y" * (40 + over))
    if not over:
        assert_repeats(first, *repeats)
    for repeat in repeats if over else ():
        assert (repeat.status_int, repeat.json["code"], repeat.json["saved_status"]) == (409, "response_too_large", 201)
    assert served.effects == ["/"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_large_stream_that_is_thrown_away_has_an_unknown_outcome(whole: bool) -> None:
    chunks = Closing(*[b"x" * 60] * 5)
    served = Served(lambda: Response(chunks), lambda app: app.config.update(RUNONCE_MAX_BODY_BYTES=100))  # type: ignore[arg-type]
    answer = served.app.test_client().post("/", headers=HEADERS)
    if whole:
        assert len(answer.data) == 300
    answer.close()
    assert chunks.closed == 1
    repeat = served.send()
    assert repeat.json["code"] == ("response_too_large" if whole else "outcome_unknown")


def test_a_large_answer_that_is_no_stream_is_done_before_it_is_read() -> None:
    served = Served(lambda: ("x" * 101, 201), lambda app: app.config.update(RUNONCE_MAX_BODY_BYTES=100))
    with served.app.test_client().post("/", headers=HEADERS, buffered=False):  # which reads nothing of it
        repeat = served.send()
    assert (repeat.json["code"], repeat.json["saved_status"]) == ("response_too_large", 201)


def test_a_large_file_is_sent_whole_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 1000)
    opened = []

    def view() -> Response:
        opened.append(path.open("rb"))
        return flask.send_file(opened[-1], "application/octet-stream")

    served = Served(view, lambda app: app.config.update(RUNONCE_MAX_BODY_BYTES=100))
    first, repeat = served.send(), served.send()
    assert first.body == b"x" * 1000
    assert repeat.json["code"] == "response_too_large"
    assert [file.closed for file in opened] == [True]


def test_current_call_is_there_while_a_large_body_streams_on() -> None:
    from flask_runonce import current_call

    keys = []

    def view() -> Any:
        def chunks() -> Iterator[bytes]:
            for _ in range(3):
                yield b"x" * 60
                keys.append(current_call.key.tool_call_id)

        return chunks()

    served = Served(view, lambda app: app.config.update(RUNONCE_MAX_BODY_BYTES=100))
    served.send()
    assert keys == ["call"] * 3
    assert not current_call


def test_a_decorator_without_arguments_is_the_same() -> None:
    app = Flask(__name__)
    runonce = RunOnce(app, scope=lambda environ: "tests")
    ran = []

    @app.post("/")
    @runonce.once
    @functools.wraps(answers_str)
    def view() -> str:
        ran.append(1)
        return "text"

    first, *repeats = (TestApp(app).post("/", headers=HEADERS) for _ in range(3))
    assert_repeats(first, *repeats)
    assert ran == [1]
