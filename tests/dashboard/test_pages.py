"""The dashboard over plain HTTP: who may see it, what it says, and that its two deeds ask first."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Response, redirect
from flask_wtf import CSRFProtect
from webtest import TestApp, TestResponse
from werkzeug.exceptions import HTTPException

from flask_runonce import CallKey, RunOnce, SavedResponse
from flask_runonce.contrib.dashboard import calls, forms, make_dashboard
from flask_runonce.errors import ConfigError, StoreFull, StoreUnavailable, UnreadableRecord
from flask_runonce.record import Found, Outcome, State
from flask_runonce.stores import RedisStore, SQLStore, Store
from tests.services import RedisServer

from .site import HOSTILE_BODY, HOSTILE_ID, HOSTILE_SCOPE, Night, Site, put

KEY = CallKey("", "chat-1", "call-1")
PAGES = ["/", "/hour", "/call?chat=chat-1&id=call-1", "/cancel?chat=chat-1&id=call-1", "/forget?chat=chat-1&id=call-1"]
FILES = ["dashboard.css", "dashboard.js", "icon.svg"]
SECRET = {"SECRET_KEY": "for tests"}


def look(person: TestApp, page: str = "/", **options: Any) -> TestResponse:
    """A page of the dashboard."""
    return person.get(f"/runonce{page}", **options)


def call(person: TestApp, key: CallKey = KEY, page: str = "/call", **options: Any) -> TestResponse:
    scope = {"scope": key.scope} if key.scope else {}
    return look(person, page, params={**scope, "chat": key.chat_id, "id": key.tool_call_id}, **options)


def words(reply: TestResponse) -> str:
    """What stands on the page, without the spaces between."""
    return " ".join(reply.html.select_one("main").get_text(" ").split())


def rows(reply: TestResponse) -> dict[str, list[str]]:
    """The rows of the list, by the call's ID."""
    cells = [[" ".join(cell.get_text().split()) for cell in row.select("td")] for row in reply.html.select("tbody tr")]
    return {row[0]: row[1:] for row in cells if row}


def facts(reply: TestResponse) -> dict[str, str]:
    pairs = reply.html.select("dl.facts > div")
    return {pair.select_one("dt").get_text(): " ".join(pair.select_one("dd").get_text().split()) for pair in pairs}


def life(reply: TestResponse) -> list[str]:
    return [step.get_text() for step in reply.html.select("ol.steps .what")]


# Who may see it


def test_without_a_guard_there_is_no_dashboard() -> None:
    with pytest.raises(TypeError, match="guard"):
        make_dashboard()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="guard"):
        make_dashboard(guard=None)  # type: ignore[arg-type]


def test_without_a_secret_key_it_is_not_mounted() -> None:
    app = Flask("app")
    with pytest.raises(ConfigError, match="SECRET_KEY"):
        app.register_blueprint(make_dashboard(guard=bool))
    assert app.extensions == {}


def test_it_is_off_unless_mounted() -> None:
    app = Flask("app")
    RunOnce(app, guard=bool)
    assert TestApp(app).get("/runonce/", status=404)


@pytest.mark.parametrize("page", [*PAGES, *(f"/dashboard-static/{name}" for name in FILES)])
def test_the_guard_stands_before_every_page_and_file(site: Site, person: TestApp, page: str) -> None:
    put(site.store, KEY)
    assert look(person, page).status_int == 200
    site.allowed = False
    refused = look(person, page, status=401)
    assert "call-1" not in refused.text


@pytest.mark.parametrize("deed", ["cancel", "forget"])
def test_the_guard_stands_before_every_deed(site: Site, person: TestApp, deed: str) -> None:
    put(site.store, KEY)
    form = call(person, page=f"/{deed}").form
    site.allowed = False
    form.submit(status=401)
    record = site.store.read(KEY).record
    assert record and record.found is None


def guarded(guard: Any) -> TestApp:
    app = Flask("app")
    app.config.update(SECRET)
    RunOnce(app, guard=bool)
    app.register_blueprint(make_dashboard(guard=guard))
    return TestApp(app)


async def closed(environ: dict[str, Any]) -> None:
    raise HTTPException(response=Response("closed", 403))


def open_the_door(environ: dict[str, Any]) -> None:
    pass


def to_the_login(environ: dict[str, Any]) -> None:
    raise HTTPException(response=redirect("/login"))


@pytest.mark.parametrize(
    ("guard", "status"), [(open_the_door, 200), (closed, 403), (lambda environ: False, 403), (to_the_login, 302)]
)
def test_a_guard_refuses_in_its_own_way(guard: Any, status: int) -> None:
    guarded(guard).get("/runonce/", status=status)


def test_a_guard_that_fails_opens_nothing() -> None:
    def failing(environ: dict[str, Any]) -> None:
        raise LookupError("no such user")

    guarded(failing).get("/runonce/", status=500)


def test_it_says_where_it_is_mounted_without_a_run_once() -> None:
    app = Flask("app")
    app.config.update(SECRET, PROPAGATE_EXCEPTIONS=True)
    app.register_blueprint(make_dashboard(guard=bool))
    with pytest.raises(RuntimeError, match="init_app"):
        TestApp(app).get("/runonce/")


# What a browser is told


@pytest.mark.parametrize("page", [*PAGES, "/call?chat=chat-1&id=never", "/?state=nonsense"])
def test_a_page_is_for_a_strict_content_security_policy(site: Site, person: TestApp, page: str) -> None:
    put(site.store, KEY)
    reply = look(person, page, expect_errors=True)
    assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in reply.headers["Content-Security-Policy"]
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Cache-Control"] == "no-store"
    for element in reply.html.find_all():
        assert element.name != "style"
        assert element.name != "script" or (element["src"] and not element.string)
        assert not [name for name in element.attrs if name == "style" or name.startswith("on")]
        for name in ("src", "href", "action"):
            assert element.get(name, "/").startswith(("/", "#main")), element


def test_the_files_ask_for_nothing_from_elsewhere(person: TestApp) -> None:
    for name in FILES:
        text = look(person, f"/dashboard-static/{name}").text
        assert not re.findall(r"//[\w.]+\.\w+|@import|url\((?!#)", text.replace("http://www.w3.org/2000/svg", ""))


def test_an_app_with_a_policy_of_its_own_keeps_it(site: Site, person: TestApp) -> None:
    @site.app.after_request
    def policy(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = "default-src 'self'"
        return response

    assert look(person).headers.getall("Content-Security-Policy") == ["default-src 'self'"]


def test_an_app_whose_policy_has_nonces(site: Site, person: TestApp) -> None:
    """As Flask-Talisman does it."""
    site.app.jinja_env.globals["csp_nonce"] = lambda: "c2VjcmV0"
    page = look(person)
    assert [element["nonce"] for element in page.html.select("script, link[rel=stylesheet]")] == ["c2VjcmV0"] * 2


@pytest.mark.parametrize("prefix", ["/", "/team/calls"])
def test_it_may_be_mounted_elsewhere(prefix: str) -> None:
    app = Flask("app", static_folder=str(Path(__file__).parent))
    app.config.update(SECRET)
    RunOnce(app, guard=bool)
    app.register_blueprint(make_dashboard(guard=bool), url_prefix=prefix)
    person = TestApp(app)
    page = person.get(prefix.rstrip("/") + "/")
    assert person.get(page.html.select_one("link[rel=stylesheet]")["href"]).content_type == "text/css"


def test_it_may_be_part_of_another_blueprint_and_of_two_apps() -> None:
    from flask import Blueprint

    for _ in range(2):
        app, team = Flask("app"), Blueprint("team", __name__, url_prefix="/team")
        app.config.update(SECRET)
        RunOnce(app, guard=bool)
        team.register_blueprint(make_dashboard(guard=bool))
        app.register_blueprint(team)
        page = TestApp(app).get("/team/runonce/")
        assert page.html.select_one("nav a")["href"] == "/team/runonce/"


def test_an_app_and_its_memory_go_together() -> None:
    site = Site()
    gone = weakref.ref(site.app.extensions["runonce_dashboard"])
    del site
    gc.collect()
    assert gone() is None


# The list


def test_nothing_has_come_yet(person: TestApp) -> None:
    assert "No calls are kept. A call appears here as soon as its first request comes." in words(look(person))


def test_a_call_that_was_sent_often_and_ran_once(site: Site, person: TestApp) -> None:
    for _ in range(37):
        assert site.send("call-1") == 201
    assert rows(look(person))["call-1"][:5] == ["done", "201", "36", "once", "–"]
    page = call(person)
    assert "Sent 37 times, ran once." in words(page)
    assert facts(page)["Repeats"] == "36"
    assert life(page)[-1] == "36 repeats got the saved response (201) at once"


def test_calls_stand_under_their_chat_and_scope(site: Site, person: TestApp) -> None:
    for chat, scope in (("chat-1", ""), ("chat-2", "ada"), ("chat-1", "ada"), ("chat-1", "")):
        site.send(f"call-{chat}-{scope}-{len(rows(look(person)))}", chat, scope)
    heads = [" ".join(head.get_text().split()) for head in look(person).html.select("tr.chat")]
    assert heads == ["Chat chat-1", "Chat chat-1 scope ada", "Chat chat-2 scope ada"]


STATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "running": ({"state": State.RUNNING}, ["running", "–", "0", "once"]),
    "done": ({}, ["done", "201", "0", "once"]),
    "unknown": ({"outcome": Outcome.UNKNOWN, "response": None}, ["outcome unknown", "–", "0", "unknown"]),
    "canceled": (
        {"state": State.CANCELED, "run": "", "owner": "", "found": Found.NOT_RECEIVED},
        ["canceled", "–", "0", "never"],
    ),
    "stopped": ({"found": Found.RUNNING}, ["done, canceled", "201", "0", "once"]),
    "stopping": ({"state": State.RUNNING, "found": Found.RUNNING}, ["running, canceled", "–", "0", "once"]),
    "failed": ({"response": SavedResponse("500 INTERNAL SERVER ERROR")}, ["done", "500", "0", "once"]),
    "large": ({"outcome": Outcome.TOO_LARGE}, ["done", "201", "0", "once"]),
}
ASKED = {
    "running": {"running", "stopping"},
    "lost": set[str](),
    "done": {"done", "stopped", "failed", "large"},
    "unknown": {"unknown"},
    "canceled": {"canceled", "stopped", "stopping"},
    "repeated": set[str](),
}


@pytest.fixture
def states(site: Site) -> None:
    for name, (record, _) in STATES.items():
        put(site.store, KEY._replace(tool_call_id=name), **record)


@pytest.mark.usefixtures("states")
def test_each_state_has_its_word_and_its_shape(person: TestApp) -> None:
    page = look(person)
    assert {name: row[:4] for name, row in rows(page).items()} == {name: row for name, (_, row) in STATES.items()}
    shapes = {mark["class"][-1]: mark.decode_contents() for mark in page.html.select("td .mark")}
    assert len(set(shapes.values())) == len(shapes) == 4


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("state", ASKED)
def test_calls_are_found_by_state(person: TestApp, state: str) -> None:
    assert set(rows(look(person, f"/?state={state}"))) == ASKED[state]
    assert ASKED.keys() == calls.STATES.keys()


@pytest.mark.usefixtures("states")
def test_calls_are_found_by_a_part_of_their_id(person: TestApp) -> None:
    page = look(person, "/?id=STOP&state=canceled")
    assert set(rows(page)) == {"stopped", "stopping"}
    assert "2 found among 8 of 8 calls." in words(page)
    assert page.form["id"].value == "STOP" and page.form["state"].value == "canceled"
    assert "Nothing here is what you asked for." in words(look(person, "/?id=nowhere"))


def test_calls_are_found_by_chat_and_scope(site: Site, person: TestApp) -> None:
    for number, (scope, chat) in enumerate([("", "chat-1"), ("ada", "chat-1"), ("ada", "chat-2")]):
        put(site.store, CallKey(scope, chat, f"call-{number}"))
    assert set(rows(look(person, "/?chat=chat-1"))) == {"call-0", "call-1"}
    page = look(person, "/?chat=chat-1&scope=ada")
    assert set(rows(page)) == {"call-1"} and page.form["scope"].value == "ada"
    assert "No such calls are kept" in words(look(person, "/?chat=chat-3"))


def test_a_chat_is_found_by_any_spelling_of_its_uuid(site: Site, person: TestApp) -> None:
    chat = "11111111-1111-1111-1111-11111111aaaa"
    put(site.store, KEY._replace(chat_id=chat))
    assert rows(look(person, "/", params={"chat": f" {chat.replace('-', '').upper()} "}))


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("chat=a,b", "The chat ID has a comma"),
        ("state=gone", "There is no such state."),
        ("start=-1", "The start must be a whole number"),
        ("start=%D9%A3", "The start must be a whole number"),
        ("scope=%00", "A scope has at most 255 characters"),
    ],
)
def test_what_cannot_be_looked_for_is_said(person: TestApp, query: str, text: str) -> None:
    assert text in words(look(person, f"/?{query}", status=400))


def test_the_most_repeated_come_first(site: Site, person: TestApp) -> None:
    for name, times in (("often", 5), ("never", 1), ("twice", 2)):
        for _ in range(times):
            site.send(name)
    assert [(name, row[2]) for name, row in rows(look(person, "/?state=repeated")).items()] == [
        ("often", "4"),
        ("twice", "1"),
    ]


class Counting:
    """A store that notes what its list was asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.limits: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, *, limit: int, **options: Any) -> Any:
        self.limits.append(limit)
        return self._store.list(limit=limit, **options)


def test_ten_thousand_calls_are_read_page_by_page(site: Site, person: TestApp) -> None:
    for number in range(10_000):
        put(site.store, CallKey("", f"chat-{number % 100}", f"call-{number}"), created_at=float(number))
    runner = site.app.extensions["runonce"].runner
    runner.store = counting = Counting(runner.store)
    page = look(person)
    assert "10,000 calls kept; here are 1 to 50, newest first." in words(page)
    assert len(page.body) < 100_000
    assert set(rows(page)) == {f"call-{number}" for number in range(9950, 10_000)}
    older = page.click("Older calls")
    assert "here are 51 to 100" in words(older) and "call-9949" in rows(older)
    assert set(rows(older.click("Newest calls"))) == set(rows(page))
    assert "Older calls" not in look(person, "/?start=9950").text
    assert counting.limits == [calls.PAGE] * 4
    call(person, CallKey("", "chat-1", "call-1"))
    assert len(counting.limits) == 4


def test_a_search_is_bounded_and_goes_on(site: Site, person: TestApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SEARCHED", 100)
    for number in range(250):
        name = "needle" if number in (5, 30, 200) else "hay"
        put(site.store, CallKey("", "chat-1", f"{name}-{number}"), created_at=float(number))
    page = look(person, "/?id=needle")
    assert "1 found among 100 of 250 calls; the older ones were not searched yet" in words(page)
    assert list(rows(page)) == ["needle-200"]
    page = page.click("Search older calls").click("Search older calls")
    assert list(rows(page)) == ["needle-30", "needle-5"]
    assert "Search older calls" not in page.text


def test_a_search_turns_its_pages_without_a_gap(site: Site, person: TestApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PAGE", 3)
    for number in range(20):
        put(site.store, CallKey("", "chat-1", f"{'ab'[number % 2]}-{number}"), created_at=float(number))
    page, seen = look(person, "/?id=a-"), []
    while True:
        seen += list(rows(page))
        if "Search older calls" not in page.text:
            break
        page = page.click("Search older calls")
    assert seen == [f"a-{number}" for number in range(18, -1, -2)]


@pytest.fixture(params=["memory", "sqlite", "redis"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        yield "memory://"
        return
    if request.param == "sqlite":
        store: Any = SQLStore(f"sqlite:///{tmp_path}/calls.db")
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        store = RedisStore(server.url, prefix="dashboard")
    yield store
    store.close()


def test_every_store_is_shown_alike(any_store: Any) -> None:
    site = Site(any_store)
    person = TestApp(site.app)
    for _ in range(3):
        site.send("call-1", answer="x" * 5000)
    assert rows(look(person, "/?chat=chat-1"))["call-1"][:4] == ["done", "201", "2", "once"]
    assert call(person).html.select_one("pre").get_text() == "x" * 5000
    site.store.close()


# One call


def test_a_running_call_and_who_waits(site: Site, person: TestApp) -> None:
    with site.held("call-1", repeats=2):
        assert "Of these, 1 is running, and 2 repeats wait." in words(look(person))
        assert rows(look(person))["call-1"][:5] == ["running", "–", "2", "once", "2"]
        page = call(person)
        assert "Sent 3 times, running once." in words(page)
        assert facts(page)["Waiting now"] == "2"
        assert life(page)[-1] == "It is still running, and 2 repeats wait for it"
        assert "There is none yet." in words(page)
        assert not page.html.select("#forget") and page.html.select("#cancel")
    page = call(person)
    assert life(page)[1].startswith("2 repeats got the saved response (201) after waiting for the run, up to ")
    assert "and 2 repeats that waited for it" in page.html.select_one("figure svg")["aria-label"]


def test_who_was_sent_away_does_not_wait() -> None:
    site = Site(config={"RUNONCE_WAIT_TIMEOUT": 0})
    person = TestApp(site.app)
    with site.held("call-1"):
        assert site.send("call-1", hold=True) == 409
        assert rows(look(person))["call-1"][2:5] == ["1", "once", "–"]
        assert "1 request refused: still_running (409)" in life(call(person))


def test_with_a_shared_store_the_number_who_wait_is_a_bound(tmp_path: Path) -> None:
    store = SQLStore(f"sqlite:///{tmp_path}/calls.db")
    site = Site(store)
    put(store, KEY, state=State.RUNNING)
    store.swap(KEY, "", None, forget_after=60, lease=30, repeat=True)
    assert rows(look(TestApp(site.app)))["call-1"][4] == "up to 1"
    store.close()


@pytest.mark.usefixtures("states")
def test_each_state_has_its_sentence(person: TestApp) -> None:
    said = {name: words(call(person, KEY._replace(tool_call_id=name))) for name in STATES}
    assert "Sent once, ran once." in said["done"]
    assert "Not sent yet, never ran." in said["canceled"] and "the call never ran" in said["canceled"]
    assert "Sent once; nobody knows whether its run took effect." in said["unknown"]
    assert "and nobody knows how: outcome unknown" in said["unknown"]
    assert "The body was too large to keep." in said["large"]
    assert "Canceled while it ran; this process was not told when" in said["stopped"]


def test_a_canceled_call_that_came_later(site: Site, person: TestApp) -> None:
    cancel = "/api/v0/tool-calls/call-1/cancel"
    person.post(cancel, headers={"Coder-Chat-Id": "chat-1"})
    assert site.send("call-1") == 409
    page = call(person)
    assert "Sent once, never ran." in words(page)
    assert life(page) == ["Canceled before it came, or before it did anything", "1 request refused: canceled (409)"]


def test_a_call_that_was_done_when_the_cancel_came(site: Site, person: TestApp) -> None:
    site.send("call-1")
    person.post("/api/v0/tool-calls/call-1/cancel", headers={"Coder-Chat-Id": "chat-1"})
    page = call(person)
    assert life(page)[-1] == "Canceled after it was done"
    assert facts(page)["Canceled"] == "after it was done"


def test_a_released_run_is_told(site: Site, person: TestApp) -> None:
    site.send("call-1", release=True)
    call(person, status=404)
    site.send("call-1", release=True)
    site.send("call-1")
    steps = life(call(person))
    assert "The run did nothing and was released, so that a repeat may run (2 times)" in steps
    assert steps[-1].startswith("The run ended")


def test_what_this_process_was_not_told_is_said(site: Site, person: TestApp) -> None:
    put(site.store, KEY)
    for _ in range(4):
        site.store.swap(KEY, "", None, forget_after=60, lease=30, repeat=True)
    assert life(call(person))[-1].startswith("4 repeats of which this process was not told")


def test_an_unknown_call(person: TestApp) -> None:
    assert "No record of this call is kept" in words(call(person, status=404))
    assert "No record of this call is kept" in words(call(person, page="/forget", status=404))


@pytest.mark.parametrize("query", ["", "chat=chat-1", "id=call-1", "chat=chat-1&id=a,b", "chat=a&id=b&scope=%00"])
@pytest.mark.parametrize("page", ["call", "cancel", "forget"])
def test_what_names_no_call(person: TestApp, page: str, query: str) -> None:
    assert "That names no call" in words(look(person, f"/{page}?{query}", status=400))


# Hostile guests


def test_hostile_ids_and_bodies_are_text(site: Site, person: TestApp) -> None:
    key = CallKey(HOSTILE_SCOPE, HOSTILE_ID, HOSTILE_ID)
    headers = (("Content-Type", "text/html"), ("Link", HOSTILE_BODY.encode("ascii", "ignore").decode()))
    put(site.store, key, response=SavedResponse("201 <b>CREATED", headers, HOSTILE_BODY.encode()), owner="<b>host:1")
    listed = look(person)
    assert list(rows(listed)) == [HOSTILE_ID]
    page = listed.click(linkid=None, href="/runonce/call")
    body = page.html.select_one("pre").get_text()
    assert body == HOSTILE_BODY.replace("\u202e", "\\u202e").replace("\x00", "\\u0000").replace("\x1b", "\\u001b")
    for reply in (listed, page, call(person, key, "/cancel"), call(person, key, "/forget")):
        assert not reply.html.select("main b, main img, main script")
        assert "\u202e" not in reply.text and HOSTILE_ID in words(reply)


def test_a_filter_is_text(person: TestApp) -> None:
    page = look(person, "/", params={"id": HOSTILE_ID, "chat": HOSTILE_ID})
    assert page.form["id"].value == page.form["chat"].value == HOSTILE_ID
    assert not page.html.select("main img")


@pytest.mark.parametrize(
    ("response", "note", "text"),
    [
        (SavedResponse("204 NO CONTENT"), "The body is empty.", None),
        (SavedResponse("200 OK", (), "größer\r\n".encode()), "10 bytes.", "größer\n"),
        (
            SavedResponse("200 OK", (), b"\x89PNG"),
            "4 bytes that are no UTF-8 text, in hexadecimal.",
            "0000  89 50 4e 47",
        ),
        (
            SavedResponse("200 OK", (("Content-Encoding", "gzip"),), b"\x1f\x8b"),
            "2 bytes, encoded as gzip, in hexadecimal.",
            "0000  1f 8b",
        ),
        (
            SavedResponse("200 OK", (), b"\xff" * 600),
            "600 bytes that are no UTF-8 text; the first 512 of them, in",
            None,
        ),
    ],
)
def test_a_body_is_shown_as_what_it_is(
    site: Site, person: TestApp, response: SavedResponse, note: str, text: str | None
) -> None:
    put(site.store, KEY, response=response)
    page = call(person)
    assert note in words(page)
    if text is not None:
        assert page.html.select_one("pre").get_text() == text


@pytest.mark.parametrize("length", [calls.SHOWN_BYTES - 1, calls.SHOWN_BYTES])
def test_a_long_body_is_cut_between_characters(length: int) -> None:
    body = calls.body_of(SavedResponse("200 OK", (), ("x" * length + "é" * 9).encode()), too_large=False)
    assert body.text == "x" * length
    assert body.note == f"The first 65,536 of {length + 18:,} bytes."


# The two deeds


def test_a_cancel_asks_first_and_then_stops_the_run(site: Site, person: TestApp) -> None:
    with site.held("call-1"):
        question = call(person).click("Cancel…")
        assert "The run is told, and the answer comes when it has ended, or after 30 s." in words(question)
        assert not site.stopped
        done = question.form.submit()
        assert "The call was canceled while it ran." in words(done)
        assert site.stopped == [True]
    page = done.click("Back to the call")
    assert "done, canceled" in words(page) and "Cancel again…" in words(page)
    first, canceled, end = life(page)
    assert first.startswith("First request") and canceled == "Canceled while it ran" and end.startswith("The run ended")


def test_a_cancel_that_cannot_wait_says_so() -> None:
    site = Site(config={"RUNONCE_CANCEL_TIMEOUT": 0})
    person = TestApp(site.app)
    put(site.store, KEY, state=State.RUNNING)
    assert "Canceled; its run goes on" in words(call(person, page="/cancel").form.submit())
    assert "Canceled while it ran; the cancel was answered before the run had ended" in life(call(person))


def test_a_cancel_before_the_call_comes(site: Site, person: TestApp) -> None:
    question = call(person, page="/cancel")
    assert "should it come, it will not run" in words(question)
    assert "before it came" in words(question.form.submit())
    assert site.send("call-1") == 409


def test_a_cancel_whose_hook_fails(site: Site, person: TestApp, caplog: pytest.LogCaptureFixture) -> None:
    @site.runonce.on_cancel
    def hook(call: Any) -> None:
        raise LookupError("nothing to stop")

    site.send("call-1")
    done = call(person, page="/cancel").form.submit(status=500)
    assert "what it left running may not have been stopped" in words(done)
    assert "nothing to stop" in caplog.text and "nothing to stop" not in done.text


def test_forget_asks_first(site: Site, person: TestApp) -> None:
    site.send("call-1")
    question = call(person).click("Forget…")
    assert "If the call is sent again, it runs again." in words(question)
    assert site.store.read(KEY).record
    assert "Nothing is kept of the call any more." in words(question.form.submit())
    assert site.store.read(KEY).record is None


def test_a_running_call_is_not_forgotten(site: Site, person: TestApp) -> None:
    with site.held("call-1"):
        question = call(person, page="/forget")
        assert "It runs, and its owner is alive." in words(question)
        assert not question.html.select("form button")
        done = question.form.submit(status=409)
        assert "Not forgotten" in words(done)
    assert site.store.read(KEY).record


def test_a_call_whose_owner_is_lost_is_forgotten(tmp_path: Path) -> None:
    store = SQLStore(f"sqlite:///{tmp_path}/calls.db")
    site = Site(store)
    person = TestApp(site.app)
    put(store, KEY, state=State.RUNNING)
    with store._db._engine().begin() as connection:
        connection.exec_driver_sql("UPDATE runonce_calls SET lease_until = lease_until - 60")
    assert rows(look(person, "/?state=lost"))["call-1"][:4] == ["owner lost", "–", "0", "unknown"]
    page = call(person)
    assert life(page)[-1].startswith("Its owner has not been heard of since ")
    question = page.click("Forget…")
    assert "Nobody knows whether its run took effect." in words(question)
    question.form.submit()
    assert store.read(KEY).record is None
    store.close()


def test_an_answer_that_is_sent_again_does_not_forget_the_next_run(site: Site, person: TestApp) -> None:
    site.send("call-1")
    form = call(person, page="/forget").form
    form.submit()
    site.send("call-1")
    assert "Nothing was done" in words(form.submit(status=400))
    assert site.store.read(KEY).record


def other_browser(site: Site, form: Any) -> TestResponse:
    person = TestApp(site.app)
    call(person, page="/cancel")  # it has a cookie of its own
    return person.post("/runonce/cancel?chat=chat-1&id=call-1", form.submit_fields(), expect_errors=True)


def no_cookie(site: Site, form: Any) -> TestResponse:
    return TestApp(site.app).post("/runonce/cancel?chat=chat-1&id=call-1", form.submit_fields(), expect_errors=True)


def no_token(site: Site, form: Any) -> TestResponse:
    form[forms.FIELD] = ""
    return form.submit(expect_errors=True)


def made_up(site: Site, form: Any) -> TestResponse:
    form[forms.FIELD] = form[forms.FIELD].value[:-1] + ("A" if form[forms.FIELD].value[-1] != "A" else "B")
    return form.submit(expect_errors=True)


def other_call(site: Site, form: Any) -> TestResponse:
    form.action = "/runonce/cancel?chat=chat-1&id=call-2"
    return form.submit(expect_errors=True)


def other_deed(site: Site, form: Any) -> TestResponse:
    form.action = "/runonce/forget?chat=chat-1&id=call-1"
    return form.submit(expect_errors=True)


@pytest.mark.parametrize("forge", [other_browser, no_cookie, no_token, made_up, other_call, other_deed])
def test_a_forged_answer_does_nothing(site: Site, person: TestApp, forge: Any) -> None:
    for name in ("call-1", "call-2"):
        site.send(name)
    before = [site.store.read(KEY._replace(tool_call_id=name)).record for name in ("call-1", "call-2")]
    reply = forge(site, call(person, page="/cancel").form)
    assert reply.status_int == 400 and "Nothing was done" in words(reply)
    assert before == [site.store.read(KEY._replace(tool_call_id=name)).record for name in ("call-1", "call-2")]


def test_a_question_may_be_answered_for_an_hour(site: Site, person: TestApp, monkeypatch: pytest.MonkeyPatch) -> None:
    site.send("call-1")
    form = call(person, page="/cancel").form
    monkeypatch.setattr(forms, "MAX_AGE", -1)
    again = form.submit(status=400)
    monkeypatch.undo()
    assert "Canceled" in words(again.form.submit())


def test_the_cookie_is_for_the_dashboard_alone(site: Site) -> None:
    person = TestApp(site.app, extra_environ={"wsgi.url_scheme": "https"})
    (cookie,) = call(person, page="/cancel").headers.getall("Set-Cookie")
    attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert attributes == {"secure", "httponly", "path=/runonce/", "samesite=lax"}
    assert "Set-Cookie" not in call(person, page="/cancel").headers


def test_beside_an_apps_own_csrf_protection(site: Site, person: TestApp) -> None:
    CSRFProtect(site.app).exempt(site.app.view_functions["run"])
    site.send("call-1")
    person.post("/runonce/cancel?chat=chat-1&id=call-1", {forms.FIELD: "made up"}, status=400)
    assert "The call was canceled after it was done." in words(call(person, page="/cancel").form.submit())


# What can go wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page != "/hour"])
@pytest.mark.parametrize(
    ("error", "title"),
    [
        (StoreUnavailable("Redis cannot be reached: <b>refused"), "The store cannot be reached"),
        (StoreFull("The store is full"), "The store is full"),
        (UnreadableRecord("A stored record cannot be read"), "The store cannot be read"),
    ],
)
def test_a_store_that_fails_is_said_plainly(
    site: Site, person: TestApp, monkeypatch: pytest.MonkeyPatch, page: str, error: Exception, title: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(type(site.store), "read", fail)
    monkeypatch.setattr(type(site.store), "list", fail)
    reply = look(person, page, status=503)
    assert title in words(reply) and str(error) in words(reply)
    assert "calls are refused until the store answers" in reply.html.select_one("#problem").get_text()
    assert not reply.html.select("main b")


def test_a_store_that_fails_at_the_deed(site: Site, person: TestApp, monkeypatch: pytest.MonkeyPatch) -> None:
    site.send("call-1")
    question = call(person, page="/cancel")

    def fail(*args: Any, **options: Any) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(type(site.store), "swap", fail)
    assert "The store cannot be reached" in words(question.form.submit(status=503))


def test_a_memory_of_one_process_among_several_is_not_shown(site: Site) -> None:
    person = TestApp(site.app, extra_environ={"wsgi.multiprocess": True})
    for page in PAGES:
        assert "not shared between the server's processes" in words(look(person, page, status=500))


# The last hour


def table(reply: TestResponse, name: str) -> list[list[str]]:
    return [[cell.get_text() for cell in row.select("th, td")] for row in reply.html.select(f"#{name} tr")]


def test_the_last_hour_by_outcome(site: Site, person: TestApp) -> None:
    site.send("answered")
    site.send("answered")
    site.send("refused", status=422)
    site.send("raised", **{"raise": True})
    site.send("released", release=True)
    person.post("/api/v0/tool-calls/before/cancel", headers={"Coder-Chat-Id": "chat-1"})
    with site.held("during"):
        person.post(
            "/runonce/cancel?chat=chat-1&id=during",
            call(person, KEY._replace(tool_call_id="during"), "/cancel").form.submit_fields(),
        )
    page = look(person, "/hour")
    assert "6 calls." in words(page)
    head, *bins = table(page, "outcomes-table")
    assert head == ["From", "To", "answered", "answered with an error, or unknown", "canceled", "released", "running"]
    assert [sum(int(row[column]) for row in bins) for column in range(2, 7)] == [1, 2, 2, 1, 0]
    legend = [" ".join(item.get_text().split()) for item in page.html.select(".legend li")]
    assert legend[0] == "1 answered" and legend[2] == "2 canceled"


def test_the_last_hour_in_times(person: TestApp, site: Site) -> None:
    with site.held("call-1", repeats=1):
        pass
    site.send("call-2")
    page = look(person, "/hour")
    classes = table(page, "times-table")[1:]
    assert sum(int(row[1]) for row in classes) == 2 and sum(int(row[2]) for row in classes) == 1
    assert len(page.html.select("circle.point")) == 1 and len(page.html.select("line.tick")) == 1


def test_another_processs_poll_is_left_alone(person: TestApp) -> None:
    page = look(person, "/hour")
    source = page.html.select_one("#live")["data-source"]
    assert person.get(source).status_int == 200
    assert look(person, "/hour?process=elsewhere:1").status_int == 204


def test_with_several_processes_the_hour_says_whose_it_is(tmp_path: Path) -> None:
    store = SQLStore(f"sqlite:///{tmp_path}/calls.db")
    person = TestApp(Site(store).app, extra_environ={"wsgi.multiprocess": True})
    assert "Other processes of this app were told of other calls." in words(look(person, "/hour"))
    store.close()


def test_the_night_of_the_pictures_is_told() -> None:
    night = Night()
    person = TestApp(night.site.app)
    assert "Sent 37 times, ran once." in words(call(person, night.storm))
    assert "203 calls." in words(look(person, "/hour"))


def test_the_core_does_not_know_the_dashboard() -> None:
    import flask_runonce

    package = Path(flask_runonce.__file__).parent
    others = [path for path in package.rglob("*.py") if "contrib" not in path.parts]
    assert others and not [path for path in others if "dashboard" in path.read_text("utf-8")]
