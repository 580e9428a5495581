"""The dashboard in a headless Chromium: live, without a request that leaves the host, and for everyone to use.

Run by `tox run -e dashboard`. With RUNONCE_TEST_SCREENSHOTS, the name of a folder, it leaves the pictures of the
documentation there.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import pytest

from flask_runonce import CallKey, SavedResponse
from flask_runonce.errors import StoreUnavailable
from tests.client.app import serving

from .site import HOSTILE_BODY, HOSTILE_ID, HOSTILE_SCOPE, LIMIT, Night, Site, put

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser

KEY = CallKey("", "chat-1", "call-1")
WIDE, PHONE = {"width": 1180, "height": 820}, {"width": 390, "height": 844}
LOOKS = {"light": ("light", WIDE), "dark": ("dark", WIDE), "phone": ("light", PHONE), "phone-dark": ("dark", PHONE)}
QUIET = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("The dashboard's browser tests need Chromium: apt-get install chromium", pytrace=False)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, chromium_sandbox=False, args=QUIET)
        yield browser
        browser.close()


class Visit:
    """A browser's window at a site that is served on loopback. What it asked for and complained of is noted."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.address = address
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        self.page = self.watched(context.new_page())

    def watched(self, page: Page) -> Page:
        page.set_default_timeout(LIMIT * 1000)
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"a dialog: {dialog.message}"))
        return page

    def look(self, path: str = "") -> Page:
        self.page.goto(f"{self.address}/runonce/{path}")
        return self.page

    def call(self, key: CallKey = KEY, page: str = "call") -> Page:
        return self.look(f"{page}?{urlencode({'scope': key.scope, 'chat': key.chat_id, 'id': key.tool_call_id})}")

    def check(self) -> None:
        assert self.hosts == {urlsplit(self.address).netloc}
        assert self.complaints == []


@pytest.fixture
def address(site: Site) -> Iterator[str]:
    with serving(site.app) as (host, port):
        yield f"http://{host}:{port}"


@pytest.fixture
def visit(browser: Browser, site: Site, address: str) -> Iterator[Visit]:
    with browser.new_context(viewport=WIDE) as context:
        visit = Visit(context, address)
        yield visit
        visit.check()


def row(page: Page, call: str) -> str:
    return page.locator(f"tr:has(a:text-is('{call}'))").inner_text()


# Live


def test_a_call_appears_and_changes_while_the_page_is_open(site: Site, visit: Visit) -> None:
    page = visit.look()
    page.evaluate("window.sameDocument = true")
    assert "No calls are kept." in page.inner_text("main")
    with site.held("call-1", repeats=2):
        page.wait_for_selector("tr:has-text('call-1') .state:has-text('running')")
        page.wait_for_selector("text=and 2 repeats wait")
    page.wait_for_selector(".state:has-text('done')")
    assert row(page, "call-1").split()[:6] == ["call-1", "done", "201", "2", "once", "–"]
    assert page.evaluate("window.sameDocument")


def test_what_has_not_changed_stays_as_it_is(site: Site, visit: Visit) -> None:
    for number in range(3):
        site.send(f"call-{number}")
    page = visit.look()
    page.focus("text=call-1")
    page.evaluate("window.link = document.activeElement")
    site.send("call-3")
    page.wait_for_selector("text=call-3")
    assert page.evaluate("document.activeElement === window.link && window.link.innerText") == "call-1"


def test_a_table_that_was_opened_stays_open(site: Site, visit: Visit) -> None:
    page = visit.look("hour")
    page.click("#outcomes-table summary")
    site.send("call-1")
    page.wait_for_selector("text=1 call.")
    assert page.is_visible("#outcomes-table table")
    assert not page.is_visible("#times-table table")


def test_a_screen_reader_is_told_politely(site: Site, visit: Visit) -> None:
    page = visit.look()
    page.evaluate("window.summary = document.getElementById('summary')")
    assert page.get_attribute("#summary", "role") == "status"
    site.send("call-1")
    page.wait_for_selector("text=1 call kept.")
    assert page.evaluate("window.summary.isConnected && !window.summary.closest('[aria-live=assertive]')")
    assert not page.locator("table [role=status], table [aria-live]").count()


def test_it_can_be_paused(site: Site, visit: Visit) -> None:
    visit.page.clock.install()
    page = visit.look()
    page.click("text=Pause")
    site.send("call-1")
    assert asked_within_a_minute(page) == 0
    page.click("text=Go on")
    page.wait_for_selector("text=call-1")
    assert asked_within_a_minute(page) > 0


def test_a_page_out_of_sight_asks_for_nothing(site: Site, visit: Visit) -> None:
    visit.page.clock.install()
    page = visit.look()
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.away})")
    page.evaluate("window.away = true; document.dispatchEvent(new Event('visibilitychange'))")
    site.send("call-1")
    assert asked_within_a_minute(page) == 0
    page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    assert asked_within_a_minute(page) > 0
    page.wait_for_selector("text=call-1")


def asked_within_a_minute(page: Page) -> int:
    """How many requests a page makes while its clock, which the test has, goes on by a minute."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)
    return len(asked)


def test_a_store_that_cannot_be_reached_is_said_and_so_is_its_return(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.send("call-1")
    page = visit.look()

    def fail(*args: Any, **options: Any) -> None:
        raise StoreUnavailable("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(type(site.store), "list", fail)
        page.wait_for_selector("#trouble:has-text('The store cannot be reached.')")
        assert "call-1" in page.inner_text("#live") and "old" in (page.get_attribute("#live", "class") or "")
    page.wait_for_selector("#trouble", state="hidden")
    assert "old" not in (page.get_attribute("#live", "class") or "")
    assert {complaint for complaint in visit.complaints if "503" in complaint} == set(visit.complaints)
    visit.complaints.clear()  # the browser's own line about each 503


def test_who_is_not_let_in_any_more_is_told(site: Site, visit: Visit) -> None:
    page = visit.look()
    site.allowed = False
    page.wait_for_selector("text=You are not let in any more.")
    visit.complaints.clear()  # the browser's own line about each 401


def test_a_server_that_is_gone_is_said(browser: Browser, site: Site) -> None:
    with browser.new_context() as context:
        with serving(site.app) as (host, port):
            visit = Visit(context, f"http://{host}:{port}")
            page = visit.look()
        page.wait_for_selector("text=The server does not answer.")


# The deeds


def test_a_cancel_by_button_reaches_the_running_view(site: Site, visit: Visit) -> None:
    with site.held("call-1"):
        page = visit.look()
        page.click("text=call-1")
        page.click("text=Cancel…")
        page.wait_for_selector("h1:has-text('Cancel this call?')")
        assert site.stopped == []
        page.click("button:has-text('Cancel the call')")
        page.wait_for_selector("text=The call was canceled while it ran.")
        assert site.stopped == [True]
    page.click("text=Back to the call")
    page.wait_for_selector(".state:has-text('done, canceled')")


def test_forget_asks_first_and_takes_a_no(site: Site, visit: Visit) -> None:
    site.send("call-1")
    page = visit.call()
    page.click("text=Forget…")
    assert "If the call is sent again, it runs again." in page.inner_text("main")
    page.click("text=No, go back")
    page.wait_for_selector("text=Sent once, ran once.")
    assert site.store.read(KEY).record
    page.click("text=Forget…")
    page.click("button:has-text('Forget the call')")
    page.wait_for_selector("h1:has-text('Forgotten')")
    assert site.store.read(KEY).record is None


def test_another_site_cannot_answer_for_the_person(browser: Browser, site: Site, address: str) -> None:
    """A page of another origin posts the form that it would have to post, with the person's cookies."""
    site.send("call-1")
    with browser.new_context() as context:
        visit = Visit(context, address)
        token = visit.call(page="cancel").input_value("input[name=runonce_token]")
        page = context.new_page()
        page.set_content(
            f"<form method=post action='{address}/runonce/cancel?chat=chat-1&id=call-1'>"
            f"<input name=runonce_token value='{token}'><button>win</button></form>"
        )
        page.click("button")
        page.wait_for_selector("text=Nothing was done")
    record = site.store.read(KEY).record
    assert record and record.found is None


def test_all_of_it_works_without_scripts(browser: Browser, site: Site, address: str) -> None:
    site.send("call-1")
    with browser.new_context(java_script_enabled=False) as context:
        visit = Visit(context, address)
        page = visit.look("?state=done")
        assert not page.is_visible("#pause")
        page.click("text=call-1")
        page.click("text=Forget…")
        page.click("button:has-text('Forget the call')")
        page.wait_for_selector("h1:has-text('Forgotten')")
        visit.look("hour")
        visit.check()


# Hostile guests


def test_hostile_ids_and_bodies_are_text(site: Site, visit: Visit) -> None:
    key = CallKey(HOSTILE_SCOPE, HOSTILE_ID, HOSTILE_ID)
    headers = (("Content-Type", "text/html"), ("Content-Disposition", "<img src=x onerror=alert(1)>"))
    put(site.store, key, response=SavedResponse("200 OK", headers, HOSTILE_BODY.encode()), owner="<b>host")
    page = visit.look()
    page.click("td a >> nth=0")
    page.wait_for_selector("h2:has-text('Its saved response')")
    assert HOSTILE_ID in page.inner_text("h1")
    assert "<script>alert(1)</script>\\u202egnp.exe" in page.inner_text("pre")
    page.click("text=Cancel…")
    assert HOSTILE_ID in page.inner_text("main")
    page.click("button:has-text('Cancel the call')")
    page.wait_for_selector("h1:has-text('Canceled')")
    visit.look()
    page.click("tr.chat a")
    assert page.input_value("#chat") == HOSTILE_ID and page.locator("td a").count() == 1
    record = site.store.read(key).record
    assert record and record.found


def test_a_hostile_body_stays_text_when_it_comes_by_the_poll(site: Site, visit: Visit) -> None:
    page = visit.look()
    put(site.store, CallKey(HOSTILE_SCOPE, HOSTILE_ID, HOSTILE_ID), response=SavedResponse("200 OK"))
    page.wait_for_selector("td a")
    assert page.inner_text("td a") == HOSTILE_ID


# As a new user would


def test_the_call_that_was_sent_often_is_found(site: Site, visit: Visit) -> None:
    for number in range(60):
        site.send(f"other-{number}", chat=f"chat-{number}")
    attempts = [threading.Thread(target=site.send, args=("storm",)) for _ in range(37)]
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.join(LIMIT)
    for number in range(60, 120):
        site.send(f"other-{number}", chat=f"chat-{number}")
    page = visit.look()
    page.select_option("#state", label="repeated")
    page.click("button:has-text('Show')")
    page.wait_for_selector("td")
    assert row(page, "storm").split()[:6] == ["storm", "done", "201", "36", "once", "–"]
    page.click("text=storm")
    page.wait_for_selector("text=Sent 37 times, ran once.")


# Every page in every light, for everyone


@pytest.fixture(scope="module")
def night() -> Iterator[tuple[Night, str]]:
    night = Night()
    with serving(night.site.app) as (host, port):
        yield night, f"http://{host}:{port}"


SHOTS: dict[str, Callable[[Visit, Night], Page]] = {
    "calls": lambda visit, night: visit.look(),
    "call": lambda visit, night: visit.call(night.storm),
    "hour": lambda visit, night: visit.look("hour"),
    "cancel": lambda visit, night: visit.call(night.storm, "cancel"),
    "forget": lambda visit, night: visit.call(night.storm, "forget"),
    "problem": lambda visit, night: visit.look("?start=x"),
}
PICTURES = {("calls", "light"), ("call", "dark"), ("hour", "light"), ("calls", "phone")}
"""Those in the documentation."""


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("shot", SHOTS)
def test_a_page_in_every_light(
    browser: Browser, night: tuple[Night, str], tmp_path: Path, shot: str, look: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    scheme, viewport = LOOKS[look]
    with browser.new_context(viewport=viewport, color_scheme=scheme) as context:
        visit = Visit(context, night[1])
        page = SHOTS[shot](visit, night[0])
        if (shot, look) in PICTURES:
            folder = Path(os.environ.get("RUNONCE_TEST_SCREENSHOTS") or tmp_path)
            page.screenshot(path=folder / f"dashboard-{shot}-{look}.png")
        for summary in page.locator("summary").all():
            summary.click()
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        visit.complaints = [complaint for complaint in visit.complaints if "400" not in complaint]
        visit.check()


def test_everything_is_reached_by_keyboard(site: Site, visit: Visit) -> None:
    site.send("call-1")
    page = visit.look()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
    assert reached[:6] == ["chat", "id", "state", "Show", "chat-1", "call-1"]
