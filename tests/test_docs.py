"""The documentation: each block of each page is run, each table of facts is compared with the code it describes."""

from __future__ import annotations

import ast
import base64
import dataclasses
import doctest
import importlib.util
import inspect
import json
import re
import shlex
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import flask
import pytest
from flask.cli import ScriptInfo
from markdown_it import MarkdownIt
from markdown_it.token import Token
from packaging.requirements import Requirement
from webtest import TestApp, TestResponse

import flask_runonce
from flask_runonce import client, codec, errors, rule, signals, stores, testing
from flask_runonce.capture import SAVED_HEADERS
from flask_runonce.client.cancellation import Cancellation
from flask_runonce.contrib import dashboard, otel, prometheus
from flask_runonce.problems import PROBLEMS
from flask_runonce.record import CallKey, Found, Outcome, Record, Seen, State
from flask_runonce.service import Options
from flask_runonce.settings import METHODS, MIDDLEWARE_RELEASE_STATUSES, Settings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))
WIDTH = 88
"""Characters that a line of code may have to be read without scrolling."""
LIMIT = 30
"""Seconds that a test waits at most for something that should happen."""

CALL = {"Coder-Chat-Id": "chat-1", "Coder-Tool-Call-Id": "call-1"}


class Page:
    """A page and what its Python blocks have defined so far. They share one namespace, from the top of the page."""

    def __init__(self, name: str) -> None:
        self.path = DOCS / f"{name}.md"
        self.text = self.path.read_text("utf-8")
        self.tokens = MarkdownIt("commonmark").enable("table").parse(self.text)
        self.names: dict[str, Any] = {"__name__": f"docs_{name}"}
        if name in GIVEN:
            self.names.update(GIVEN[name]())
        self._clients: dict[int, TestApp] = {}

    def run(self) -> None:
        """Run each block, in order. Fails for one of a kind that nothing here runs."""
        for token in self.tokens:
            if token.type in ("fence", "code_block", "html_block"):
                kind = token.info.strip() if token.type == "fence" else token.type
                assert kind in KINDS or kind.split("}")[0] in DIRECTIVES, f"{self.where(token)}: nothing runs {kind!r}"
                (KINDS.get(kind) or DIRECTIVES[kind.split("}")[0]])(self, token)

    def where(self, token: Token) -> str:
        assert token.map
        return f"{self.path.name}:{token.map[0] + 1}"

    def table(self, *head: str) -> list[list[str]]:
        """The rows of the table with this head, as they are written."""
        tables: list[list[list[str]]] = []
        for token, inline in zip(self.tokens, [*self.tokens[1:], None], strict=True):
            if token.type == "table_open":
                tables.append([])
            elif token.type == "tr_open":
                tables[-1].append([])
            elif token.type in ("th_open", "td_open"):
                assert inline
                tables[-1][-1].append(inline.content)
        (found,) = (rows for rows in tables if rows[0][: len(head)] == list(head))
        return found[1:]

    @property
    def app(self) -> TestApp:
        """What the page serves: its `app` or its `application`, as they are now."""
        app = self.names.get("app") or self.names["application"]
        return self._clients.setdefault(id(app), TestApp(app))


def run_python(page: Page, token: Token) -> None:
    """Run it in the page's namespace, with the page's own lines in a traceback."""
    assert token.map
    _check_width(page, token)
    source = "\n" * (token.map[0] + 1) + token.content
    exec(compile(source, str(page.path), "exec", dont_inherit=True), page.names)


def run_console(page: Page, token: Token) -> None:
    """Run each line that begins with `$`, and compare what follows with what it prints; `...` stands for anything."""
    assert token.content.startswith("$ "), page.where(token)
    _check_width(page, token)
    content = token.content.replace("\\\n", "")
    for command, wanted in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", content, re.MULTILINE):
        words = shlex.split(command)
        assert words[0] in COMMANDS, f"{page.where(token)}: nothing runs {words[0]!r}"
        printed = COMMANDS[words[0]](page, words[1:])
        same = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        fits = doctest.OutputChecker().check_output(wanted, printed, same)
        assert fits, f"{page.where(token)}: $ {command}\n{printed}\nis not\n{wanted}"


def _check_width(page: Page, token: Token) -> None:
    for number, line in enumerate(token.content.splitlines()):
        assert len(line) <= WIDTH, f"{page.where(token)}, line {number + 1} of the block is too wide: {line}"


def curl(page: Page, words: list[str]) -> str:
    """What curl does with these options. One that is not known here is an error."""
    method, path, headers, body, head = "GET", "", {}, b"", False
    rest = iter(words)
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-H":
            name, value = next(rest).split(": ", 1)
            headers[name] = value
        elif word == "--json":
            method, body, headers["Content-Type"] = "POST", next(rest).encode(), "application/json"
            json.loads(body)
        elif word == "-i":
            head = True
        else:
            assert word.startswith("localhost:5000/"), f"curl {word}"
            path = word.removeprefix("localhost:5000")
    reply = page.app.request(path, method=method, headers=headers, body=body, expect_errors=True)
    lines = [f"HTTP/1.1 {reply.status}", "Server: any", *(f"{name}: {value}" for name, value in reply.headerlist), ""]
    return "\n".join([*lines, ""] if head else []) + reply.text.rstrip("\n") + "\n"


def pip(page: Page, words: list[str]) -> str:
    """Our own name with extras that there are, or a driver."""
    assert words[0] == "install"
    for requirement in map(Requirement, words[1:]):
        if requirement.name == "flask-runonce":
            extras = re.findall(r"^(\w+) = \[", _section("project.optional-dependencies"), re.MULTILINE)
            assert requirement.extras <= set(extras), requirement
        else:
            assert requirement.name in ("psycopg",), requirement
    return ""


def run_flask(page: Page, words: list[str]) -> str:
    """`run` of an app that is there, or a command of ours."""
    assert words[0] == "--app"
    _named(page, words[1])
    if words[2:] == ["run"]:
        return ""
    assert words[2] == "runonce"
    result = page.names["app"].test_cli_runner().invoke(args=words[2:])
    assert result.exit_code == 0, result.output
    return result.output


def gunicorn(page: Page, words: list[str]) -> str:
    """An app that is there, served with options that gunicorn knows."""
    from gunicorn.config import Config

    module, name = words[-1].split(":")
    assert name in page.names
    _named(page, module)
    Config().parser().parse_args(words)
    return ""


def _named(page: Page, module: str) -> None:
    """Fail unless `module` is a block of the page, or a sample that can be loaded."""
    if f"\n# {module}.py\n" not in page.text:
        page.names["app"] = ScriptInfo(app_import_path=module).load_app()


def check_toctree(page: Page, token: Token) -> None:
    for line in token.content.splitlines():
        assert not line or line.startswith(":") or line in PAGES, line


def check_include(page: Page, token: Token) -> None:
    """The included file is another one's to test; here it has to be there, and what the options look for in it too."""
    text = (DOCS / token.info.partition("} ")[2]).read_text("utf-8")
    for option, value in re.findall(r"^:([\w-]+): (.*)$", token.content, re.MULTILINE):
        if option in ("start-at", "end-before"):
            wanted = ast.literal_eval(value) if value.startswith('"') else value
            assert wanted in text, f"{page.where(token)}: {wanted!r}"
            text = text.partition(wanted)[2]


def check_rst(page: Page, token: Token) -> None:
    """The reference; Sphinx itself fails where a name is not there."""
    for line in token.content.splitlines():
        if line.startswith(".. "):
            assert re.match(r"\.\. (auto\w+|module|data):: \S+$", line), line


def the_apps_own() -> dict[str, Any]:
    """What the contract's blocks leave to the app."""

    def as_it_is(view: Callable[..., Any]) -> Callable[..., Any]:
        return view

    def application(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"done"]

    def require_login(environ: Any) -> None:
        if environ.get("HTTP_AUTHORIZATION") != "Basic YWRhOg==":
            flask.abort(401)

    return {
        "app": flask.Flask("contract"),
        "application": application,
        "current_user": SimpleNamespace(get_id=lambda: "ada"),
        "login_required": as_it_is,
        "require_login": require_login,
        "transaction": as_it_is,
    }


GIVEN = {"contract": the_apps_own}
"""Names that a page's blocks may use without defining them; the page says whose they are."""
KINDS: dict[str, Callable[[Page, Token], None]] = {"python": run_python, "console": run_console}
DIRECTIVES = {"{toctree": check_toctree, "{literalinclude": check_include, "{eval-rst": check_rst}
COMMANDS = {"curl": curl, "pip": pip, "flask": run_flask, "gunicorn": gunicorn}


@pytest.fixture
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """The page that the test is marked with; what it writes goes to a folder of its own."""
    opened: list[stores.SQLStore] = []
    init = stores.SQLStore.__init__

    def init_and_note(store: stores.SQLStore, *args: Any, **options: Any) -> None:
        opened.append(store)
        init(store, *args, **options)

    monkeypatch.setattr(stores.SQLStore, "__init__", init_and_note)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    yield Page(request.param)
    for store in opened:
        store.close()


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", [name], indirect=True)


@pytest.mark.parametrize("page", PAGES, indirect=True)
def test_every_block_is_run(page: Page) -> None:
    page.run()


@pytest.mark.parametrize(
    "block",
    ["```\nx\n```", "```text\nx\n```", "```{code-block} python\nx\n```", "    x = 1", "<pre>x</pre>", "~~~sh\nx\n~~~"],
)
def test_a_block_of_another_kind_fails(block: str) -> None:
    page = Page("index")
    page.tokens = MarkdownIt("commonmark").parse(block)
    with pytest.raises(AssertionError, match="nothing runs"):
        page.run()


@pytest.mark.parametrize("block", ["```console\n$ make\n```", "```console\n$ curl localhost:5000/\nother\n```"])
@of("quickstart")
def test_a_command_that_prints_something_else_fails(page: Page, block: str) -> None:
    page.run()
    page.tokens = MarkdownIt("commonmark").parse(block)
    with pytest.raises(AssertionError, match="index.md|quickstart.md"):
        page.run()


def test_there_are_no_other_pages() -> None:
    others = {path.name for path in DOCS.iterdir() if path.suffix != ".md" and not path.name.startswith(("_", "."))}
    assert others == {"conf.py", "draw_rule.py", "notes.diff", "notes_diff.py"}


@pytest.mark.parametrize("page", PAGES, indirect=True)
def test_only_settings_and_codes_that_there_are_are_named(page: Page) -> None:
    settings = {f"RUNONCE_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    assert set(re.findall(r"\bRUNONCE_[A-Z_]+\b", page.text)) <= settings | {"RUNONCE_TEST_MYSQL_URL"}
    assert set(re.findall(r"\d{3} `(\w+)`", page.text)) <= set(PROBLEMS)


# Tables


@pytest.mark.parametrize("page", ["configuration", "contract"], indirect=True)
def test_the_configuration_table(page: Page) -> None:
    described = {key.strip("`"): default for key, default, _ in page.table("key", "default", "meaning")}
    settings = Settings()
    assert list(described) == [f"RUNONCE_{field.name.upper()}" for field in dataclasses.fields(Settings)]
    statuses = described.pop("RUNONCE_RELEASE_STATUSES")
    assert not settings.release_statuses and statuses.startswith("none; ")
    assert set(map(int, re.findall(r"\d+", statuses))) == MIDDLEWARE_RELEASE_STATUSES
    for key, default in described.items():
        if default.endswith(" MiB"):
            value: object = int(default.removesuffix(" MiB")) * 2**20
        else:
            value = ast.literal_eval(default.strip("`"))
        assert value == getattr(settings, key.removeprefix("RUNONCE_").lower()), key


@of("stores")
def test_the_table_of_deployments_is_the_readmes(page: Page) -> None:
    head = ("deployment", "`RUNONCE_STORE_URI`", "needs")
    readme = Page("../README")
    assert [row[:3] for row in page.table(*head)] == readme.table(*head)
    pip(page, ["install", *re.findall(r"flask-runonce\[\w+\]", readme.text)])


@of("flask")
def test_the_table_of_options(page: Page) -> None:
    rows = page.table("option", "default", "meaning")
    options = [field.name for field in dataclasses.fields(Options)]
    assert [row[0].strip("`") for row in rows] == options
    assert list(inspect.signature(flask_runonce.RunOnce.once).parameters) == ["self", "view", "options"]
    assert set(rows[-1][1].split(", ")) == METHODS
    for row in rows[:1] + rows[2:4]:
        assert row[1] == f"`RUNONCE_{row[0].strip('`').upper()}`"


@of("errors")
def test_the_table_of_errors(page: Page) -> None:
    described = {
        code.strip("`"): (int(status), int(after) if after else None, detail)
        for code, status, after, detail in page.table("code", "status", "Retry-After", "`detail`")
    }
    for code, (status, after, detail) in described.items():
        entry = PROBLEMS[code]
        assert (status, after) == (entry.status, entry.retry_after), code
        assert detail == entry.detail or (not entry.detail and detail.startswith("which ")), code
    assert list(described) == list(PROBLEMS)


@of("contract")
def test_the_table_of_refusals(page: Page) -> None:
    rows = page.table("code", "status", "retryable")
    described = {code: (int(status), again) for codes, status, again in rows for code in re.findall(r"\w+", codes)}
    entries = {code: (entry.status, "yes" if entry.retry_after else "no") for code, entry in PROBLEMS.items()}
    assert described == entries


RUNNING = Record(CallKey("", "c", "t"), State.RUNNING, run="1", owner="o", fingerprint="f")
DONE = RUNNING._replace(state=State.DONE, outcome=Outcome.RESPONSE)
CANCELED = Record(RUNNING.key, State.CANCELED, found=Found.NOT_RECEIVED)


def seen(record: Record | None, *, lost: bool = False) -> Seen:
    return Seen(record, "v" if record else "", 9.0, 1.0 if lost else None)


@of("rule")
def test_the_table_of_requests(page: Page) -> None:
    again = rule.Request(RUNNING.key, "2", fingerprint="f")
    other = again._replace(fingerprint="g")
    too_large = DONE._replace(outcome=Outcome.TOO_LARGE)
    moves = {
        "there is none": rule.begin(seen(None), again),
        "canceled": rule.begin(seen(CANCELED), other),
        "asked with another input": rule.begin(seen(RUNNING, lost=True), other),
        "running": rule.begin(seen(RUNNING), again),
        "running, and its owner is lost": rule.begin(seen(RUNNING, lost=True), again),
        "done, and the body was too large to keep": rule.begin(seen(too_large), again),
        "done": rule.begin(seen(DONE), again),
    }
    rows = dict(page.table("the record", "the request gets"))
    assert list(rows) == list(moves)
    for record, move in moves.items():
        if move.do is rule.Do.REFUSE:
            assert rows[record].startswith(f"409 `{move.code}`")
        else:
            beginnings = {
                rule.Do.RUN: "a run",
                rule.Do.WAIT: "a wait",
                rule.Do.REPLAY: ("the saved", "500 `outcome_un"),
            }
            assert rows[record].startswith(beginnings[move.do]), record
    rerun = rule.begin(seen(RUNNING, lost=True), again._replace(rerun=True))
    assert rerun.do is rule.Do.RUN and rows["running, and its owner is lost"].endswith("a run")


@of("rule")
def test_the_table_of_cancels(page: Page) -> None:
    def cancel(record: Record | None, lost: bool = False) -> rule.Move:
        return rule.cancel(seen(record, lost=lost), RUNNING.key, patient=True)

    moves = {
        "there is none": cancel(None),
        "canceled before it came": cancel(CANCELED),
        "running": cancel(RUNNING),
        "running, and its owner is lost": cancel(RUNNING, lost=True),
        "done": cancel(DONE),
    }
    rows = dict(page.table("the record", "the cancel gets"))
    assert list(rows) == list(moves)
    for record, move in moves.items():
        put = move.put if isinstance(move.put, Record) else CANCELED
        assert put.found and f"`{put.found.value}`" in rows[record]
        assert ("wait" in rows[record]) == (move.do is rule.Do.WAIT)
        assert ("outcome_unknown" in rows[record]) == (put.outcome is Outcome.UNKNOWN)
    assert rule.cancel(seen(RUNNING), RUNNING.key, patient=False).do is rule.Do.TELL_LATER


@of("rule")
def test_the_table_of_the_rule_itself(page: Page) -> None:
    _, rulers, *lines = re.findall(r"^    (\S.*|  .*\S.*)$", inspect.getdoc(rule) or "", re.MULTILINE)
    columns = [slice(found.start(), found.end()) for found in re.finditer("-+", rulers)]
    stated = [[line[column].strip() for column in columns] for line in lines]
    for above, below in zip(stated, stated[1:], strict=False):
        below[0] = below[0] or above[0]  # the docstring names an event once
    written = [[event.strip("`"), *cells] for event, *cells in page.table("event", "seen")]
    assert written == stated


@pytest.fixture
def draw_rule() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_rule", DOCS / "draw_rule.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_the_rule_is_what_its_script_draws(draw_rule: ModuleType) -> None:
    assert draw_rule.FILE.read_text("utf-8") == draw_rule.draw(), "run docs/draw_rule.py"


def test_a_way_without_a_line_is_not_drawn_over(draw_rule: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(draw_rule.EVENTS, "forget", lambda seen: rule.Move(rule.Do.SAVED, rule.Put.NOTHING))
    with pytest.raises(ValueError, match=r"\('running, canceled', 'nothing'\)"):
        draw_rule.draw()


@of("client")
def test_the_table_of_what_a_cancel_says(page: Page) -> None:
    texts = dict(page.table("the server's answer", "`.text`"))
    answers = [
        Cancellation(False, "not_received", vouched=True),
        Cancellation(False, "not_received"),
        Cancellation(True, "running"),
        Cancellation(True, "done"),
        Cancellation(None),
    ]
    assert list(texts.values()) == [answer.text for answer in answers]


@of("design")
def test_the_table_of_files(page: Page) -> None:
    package = Path(flask_runonce.__file__).parent
    there = {path.name if path.is_file() else f"{path.name}/" for path in package.iterdir()}
    described = [row[0].strip("`") for row in page.table("file", "what it is")]
    assert len(described) == len(set(described))
    assert set(described) == there - {"py.typed", "__pycache__/"}
    assert {path.name for path in (package / "stores").glob("[!_]*.py")} <= set(re.findall(r"`(\w+\.py)`", page.text))


@of("api")
def test_every_public_name_is_in_the_reference(page: Page) -> None:
    listed = set(re.findall(r"^\.\. (?:auto\w+|data):: (?:[\w.]+\.)?(\w+)", page.text, re.MULTILINE))
    for module in (flask_runonce, stores, client, testing, dashboard):
        assert set(module.__all__) - {"errors", "signals"} <= listed
    for module in (errors, flask_runonce.record, codec, prometheus, otel):
        made = {
            name: value for name, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)
        }
        own = {name for name, value in made.items() if value.__module__ == module.__name__ and name[0] != "_"}
        assert own <= listed
    told = {name for name in vars(signals) if name.startswith(("call_", "result_"))}
    assert told == set(re.findall(r"^- `(\w+)`:", signals.__doc__ or "", re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "before"),
    [("flask", "headers that describe it: "), ("contract", "representation headers ")],
    indirect=["page"],
)
def test_the_headers_that_are_saved_are_listed(page: Page, before: str) -> None:
    (listed,) = re.findall(rf"{before}(Content.*?)(?:\. |, repeated)", " ".join(page.text.split()))
    assert {name.lower() for name in re.split(r", | and ", listed)} == SAVED_HEADERS


@of("contract")
def test_what_docstrings_cite_of_the_contract_is_there(page: Page) -> None:
    sections = re.findall(r"^\(contract-(\d)\)=\n## (\d)\. ", page.text, re.MULTILINE)
    assert sections and all(target == number for target, number in sections)
    there = {f"CONTRACT section {number}" for number, _ in sections}
    for path in Path(flask_runonce.__file__).parent.rglob("*.py"):
        assert set(re.findall(r"CONTRACT.{,10}", path.read_text("utf-8"))) <= there, path


# What the pages say


@of("contract")
def test_the_contract_in_an_app(page: Page) -> None:
    page.run()
    signature = str(inspect.signature(flask_runonce.RunOnce)).replace(" | ", "|")
    assert re.sub(r": '[^']+'", "", re.sub(r" -> .*", "", signature)).replace(" = ", "=") in page.text
    assert [post(page, "/files", params={"n": 1}).json for _ in range(2)] == [{"written": True}] * 2
    assert post(page, "/files", params={"n": 2}).json["code"] == "input_mismatch"
    assert page.app.post("/builds", expect_errors=True).json["code"] == "key_required"
    assert page.app.get("/api/v0/tool-calls", headers=CALL, expect_errors=True).status_int == 401


def post(page: Page, path: str, call: str = "call-1", **options: Any) -> TestResponse:
    headers = {"Coder-Chat-Id": "chat-1", "Coder-Tool-Call-Id": call}
    send = page.app.post_json if "params" in options else page.app.post
    return send(path, headers=headers, expect_errors=True, **options)


@of("quickstart")
def test_the_quick_start_orders_twice_in_all(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run()
    assert capsys.readouterr().out == "ordering tea\n" * 2  # the call, and the request without IDs


def _prefix(page: Page, until: str) -> None:
    """Run the page's Python up to the block that has `until`."""
    for token in page.tokens:
        if token.type == "fence" and token.info == "python":
            run_python(page, token)
            if until in token.content:
                return
    raise AssertionError(until)


def _log_in(app: flask.Flask) -> None:
    @app.get("/login")
    def login() -> str:
        flask.session["user"] = "ada"
        return ""


@of("flask")
def test_the_login_stands_above_and_the_transaction_below(page: Page) -> None:
    _prefix(page, "def order(")
    _log_in(page.names["app"])
    assert post(page, "/orders", params={"item": "tea"}).status_int == 401
    page.app.get("/login")
    replies = [post(page, "/orders", params={"item": "tea"}) for _ in range(2)]
    assert [reply.status_int for reply in replies] == [201, 201]
    with closing(sqlite3.connect("orders.db")) as db:
        assert db.execute("SELECT * FROM orders").fetchall() == [("tea",)]
    page.app.reset()
    assert post(page, "/orders", params={"item": "tea"}).status_int == 401


@of("flask")
def test_the_wrong_orders_do_what_the_page_says(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    _prefix(page, "def order(")
    app, once = page.names["app"], page.names["runonce"].once
    runs = []

    def view() -> str:
        runs.append(1)
        return "done"

    once(app.post("/above-the-route", endpoint="above_the_route")(view))
    app.post("/login-below", endpoint="login_below")(once(page.names["login_required"](view)))
    _log_in(app)
    assert [post(page, "/above-the-route").text for _ in range(2)] == ["done"] * 2
    assert len(runs) == 2
    assert "'above_the_route' is not run once" in caplog.text
    assert post(page, "/login-below", "a").status_int == 401
    page.app.get("/login")
    assert post(page, "/login-below", "b").status_int == 200


@of("flask")
def test_a_class_based_view_with_decorators(page: Page) -> None:
    _prefix(page, "class Note(")
    app = page.names["create_app"]()
    _log_in(app)
    service = TestApp(app)
    service.put("/notes/a", headers=CALL, status=401)
    service.get("/login")
    assert service.put("/notes/a", headers=CALL).json == service.put("/notes/a", headers=CALL).json
    assert "Idempotent-Replayed" not in service.get("/notes/a", headers=CALL).headers


@of("flask")
def test_not_now_is_not_saved(page: Page) -> None:
    _prefix(page, "def reserve(")
    assert post(page, "/reservations", params={"item": "tea"}).status_int == 503
    page.names["stock"]["tea"] = 1
    assert [post(page, "/reservations", params={"item": "tea"}).status_int for _ in range(2)] == [200, 200]
    assert page.names["stock"]["tea"] == 0


@of("flask")
def test_a_run_that_was_rolled_back_may_run_again(page: Page) -> None:
    _prefix(page, "except sqlite3.OperationalError")
    runs = []

    @page.names["app"].post("/rolled-back")
    @page.names["runonce"].once
    @page.names["transaction"]
    def rolled_back() -> str:
        runs.append(1)
        if len(runs) == 1:
            flask.g.db.execute("INSERT INTO nowhere VALUES (1)")
        return "done"

    assert post(page, "/rolled-back").status_int == 500
    assert [post(page, "/rolled-back").text for _ in range(2)] == ["done"] * 2
    assert len(runs) == 2


@of("flask")
def test_a_handler_looks_at_its_call(page: Page) -> None:
    _prefix(page, "def report(")
    assert post(page, "/reports").json == {"stopped": False, "steps": 3}


@of("flask")
def test_a_result_is_cut(page: Page) -> None:
    _prefix(page, "def logs(")
    replies = [post(page, "/logs") for _ in range(2)]
    assert replies[0].body == replies[1].body
    assert 15_000 < len(replies[0].body) <= 16 * 1024
    assert replies[0].json["log"].startswith("a line of the log\n")


def test_a_streamed_response_that_flasks_test_client_leaves_open() -> None:
    app = flask.Flask("large")
    app.config.update(RUNONCE_MAX_BODY_BYTES=10, RUNONCE_MAX_WAITING=0)
    runonce = flask_runonce.RunOnce(app)
    app.post("/exports")(runonce.once(lambda: flask.Response(iter(["a long line\n"] * 2))))
    response = app.test_client().post("/exports", headers=CALL)
    assert len(response.data) == 24
    assert app.test_client().post("/exports", headers=CALL).json["code"] == "still_running"
    response.close()
    assert app.test_client().post("/exports", headers=CALL).json["code"] == "response_too_large"


def test_a_response_class_that_encodes_in_its_own_way() -> None:
    class Shouted(flask.Response):
        def iter_encoded(self) -> Iterator[bytes]:
            return (piece + b"!" for piece in super().iter_encoded())

    app = flask.Flask("shouting")
    runonce = flask_runonce.RunOnce(app)
    app.post("/")(runonce.once(lambda: Shouted(iter(["done"]))))
    client = TestApp(app, lint=False)  # the length is wrong, too
    assert [client.post("/", headers=CALL).body for _ in range(2)] == [b"done!!", b"done!"]


@of("wsgi")
def test_the_middleware_with_a_scope(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run()
    assert "stop what call-1 left running" in capsys.readouterr().out
    assert post(page, "/").status_int == 401
    page.app.authorization = ("Bearer", "s3cret")
    assert [post(page, "/").text for _ in range(2)] == ["ordered"] * 2


@of("wsgi")
def test_the_middleware_inside_an_authentication(page: Page) -> None:
    _prefix(page, "def require_token(")
    assert post(page, "/").status_int == 401
    page.app.authorization = ("Bearer", "s3cret")
    assert [post(page, "/").text for _ in range(2)] == ["ordered in chat-1"] * 2
    page.app.authorization = None
    assert post(page, "/").status_int == 401


@of("retries")
def test_an_invoice_is_paid_once_whoever_asks(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run()
    assert capsys.readouterr().out == "paying 5\n"
    page.app.extra_environ = {"HTTP_X_ACCOUNT": "7"}
    assert post(page, "/payments", "call-7", params={"amount": 5}).text.count("Which invoice?") == 1
    canceled = page.app.post("/api/v0/tool-calls/call-1/cancel", headers={"Coder-Chat-Id": "chat-1"})
    assert canceled.json["state"] == "not_received"
    page.app.extra_environ = {"HTTP_X_ACCOUNT": "8"}
    assert post(page, "/payments", params={"invoice": "2026-17", "amount": 5}).status_int == 201
    assert capsys.readouterr().out == "paying 5\n"


@of("keys")
def test_a_body_that_is_too_large_to_compare_is_not_for_key_or_fingerprint(page: Page) -> None:
    page.run()
    reply = post(page, "/payments", params={"amount": 5, "note": "x" * Settings().fingerprint_bytes})
    assert (reply.status_int, reply.json["code"]) == (500, "key_failed")


@pytest.mark.parametrize("reads", [False, True])
@of("keys")
def test_a_cut_off_body_runs_nothing_whoever_reads_it(page: Page, reads: bool) -> None:
    page.run()
    app = page.names["app"]

    @app.before_request
    def look() -> None:
        if reads:
            flask.request.get_data()

    environ = {"CONTENT_LENGTH": "100"}
    reply = app.test_client().post("/payments", data=b"{}", headers=CALL, environ_overrides=environ)
    assert reply.status_code == 400
    assert (reply.content_type == "application/problem+json") != reads


@of("keys")
def test_a_webhook_is_taken_once(page: Page) -> None:
    _prefix(page, "def hook(")
    delivery = {"X-GitHub-Delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958"}
    assert "Idempotent-Replayed" not in page.app.post("/hooks/github", headers=delivery).headers
    assert page.app.post("/hooks/github", headers=delivery).headers["Idempotent-Replayed"] == "true"
    canceled = page.app.post(
        f"/api/v0/tool-calls/{delivery['X-GitHub-Delivery']}/cancel", headers={"Coder-Chat-Id": "github"}
    )
    assert canceled.json["state"] == "done"


@of("keys")
def test_a_fingerprint_of_ones_own(page: Page) -> None:
    page.run()
    bodies = ('{"amount": 5, "to": 1}', '{"to":1,"amount":5}', '{"to":1,"amount":6}')
    headers = CALL | {"Content-Type": "application/json"}
    replies = [page.app.post("/payments", body, headers=headers, expect_errors=True) for body in bodies]
    assert [reply.status_int for reply in replies] == [201, 201, 409]


@of("cancel")
def test_a_build_is_stopped(page: Page) -> None:
    _prefix(page, "def build(")
    service = page.names["app"].test_client
    replies = []
    running = threading.Thread(
        target=lambda: replies.append(service().post("/builds", json={"seconds": 600}, headers=CALL))
    )
    running.start()
    try:
        while service().get("/api/v0/tool-calls/call-1", headers=CALL).status_code == 404:
            assert running.is_alive()
    finally:
        canceled = service().post("/api/v0/tool-calls/call-1/cancel", headers=CALL)
        running.join(LIMIT)
    assert canceled.json["state"] == "running"
    assert json.loads(base64.b64decode(canceled.json["body"])) == replies[0].json
    assert replies[0].json["exit_code"] != 0


@of("cancel")
def test_a_job_is_stopped_by_its_hook(page: Page) -> None:
    _prefix(page, "def stop(")
    assert post(page, "/jobs").json == {"started": "call-1"}
    job = page.names["jobs"]["call-1"]
    assert job.poll() is None
    page.app.post("/api/v0/tool-calls/call-1/cancel", headers={"Coder-Chat-Id": "chat-1"})
    assert job.poll() is not None


@of("configuration")
def test_a_setting_from_the_environment(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASK_RUNONCE_LEASE", "10")
    page.run()
    settings = page.names["app"].extensions["runonce"].settings
    assert (settings.lease, settings.max_waiting, settings.forget_after) == (10, 8, 86400)


@of("security")
def test_the_guard_of_the_cancel_routes(page: Page) -> None:
    page.run()
    _log_in(page.names["app"])
    chat = {"Coder-Chat-Id": "chat-1"}
    page.app.get("/api/v0/tool-calls", headers=chat, status=401)
    page.app.post("/api/v0/tool-calls/call-1/cancel", headers=chat, status=401)
    page.app.get("/login")
    assert page.app.get("/api/v0/tool-calls", headers=chat).json["total"] == 0


@of("stores")
def test_a_receiver_of_a_signal(page: Page) -> None:
    page.run()

    @page.names["app"].post("/orders")
    @page.names["runonce"].once
    def order() -> str:
        return "ordered"

    post(page, "/orders", "a,b")
    assert page.names["seen"] == {"invalid_key": 1}


@of("client")
def test_the_client_page(page: Page) -> None:
    page.run()
    page.names["test_an_order"]()


@of("adding")
def test_the_tests_for_the_notes_service(page: Page) -> None:
    page.run()
    (block,) = (token.content for token in page.tokens if token.type == "fence" and token.info == "python")
    Path("test_calls.py").write_text(block, "utf-8")
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", ".", "test_calls.py"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    assert result.returncode == 0, result.stdout
    assert "2 passed" in result.stdout


def _section(name: str) -> str:
    """A section of pyproject.toml, as text: there is no parser for it in Python 3.10."""
    return (ROOT / "pyproject.toml").read_text("utf-8").partition(f"[{name}]")[2].partition("\n[")[0]
