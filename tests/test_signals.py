"""What the library tells (CONTRACT.md section 8): signals with their facts, and log lines that carry the IDs."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from flask_runonce import CallKey, RunOnceMiddleware, current_call, signals
from flask_runonce.call import CanceledCall
from flask_runonce.errors import StoreUnavailable
from flask_runonce.stores import MemoryStore, Swapped
from tests.plain_app import AT_ONCE, LIMIT, Environ, LeasedStore, Site, WatchedStore, answer, ask, environ_of, in_thread

KEY = CallKey("", "chat-1", "call-1")
NAMES = [
    *("call_started", "call_finished", "call_replayed", "call_refused"),
    *("call_canceled", "call_released", "call_lost", "result_cut"),
]

Heard = list[tuple[str, dict[str, Any]]]


@contextlib.contextmanager
def listening(site: Site) -> Iterator[Heard]:
    """What the site's app tells, in order: the signal's name and its facts. Seconds are checked and left out."""
    heard: Heard = []

    def listener(name: str) -> Callable[..., None]:
        def listen(sender: Any, **facts: Any) -> None:
            if "seconds" in facts:
                assert 0 <= facts.pop("seconds") < LIMIT
            heard.append((name, facts))

        return listen

    with contextlib.ExitStack() as connected:
        for name in NAMES:
            signal = getattr(signals, name)
            connected.enter_context(signal.connected_to(listener(name), sender=site.middleware.app))
        yield heard


def fail(*args: Any) -> Any:
    raise ValueError("on purpose")


STARTED = ("call_started", {"key": KEY})


def finished(status: int, size: int = 4, ended: str = "response") -> tuple[str, dict[str, Any]]:
    return "call_finished", {"key": KEY, "status": status, "bytes": size, "ended": ended}


def refused(code: str, status: int, key: CallKey | None = KEY) -> tuple[str, dict[str, Any]]:
    return "call_refused", {"key": key, "code": code, "status": status}


def canceled(state: str, pending: bool = False) -> tuple[str, dict[str, Any]]:
    return "call_canceled", {"key": KEY, "state": state, "pending": pending}


# Signals


def test_the_signals_are_those_that_are_promised() -> None:
    assert {name for name in vars(signals) if name.startswith(("call_", "result_"))} == set(NAMES)
    assert [getattr(signals, name).name for name in NAMES] == NAMES


def test_a_run_and_its_repeats() -> None:
    site = Site(answer(b"made", "201 Created"))
    with listening(site) as heard:
        for _ in range(3):
            site.call()
    assert heard == [STARTED, finished(201), *[("call_replayed", {"key": KEY, "status": 201})] * 2]


def test_a_run_that_nobody_knows_the_end_of() -> None:
    site = Site(fail)
    with listening(site) as heard:
        with pytest.raises(ValueError, match="on purpose"):
            site.call()
        site.call()
    assert heard == [STARTED, finished(500, 0, "unknown"), ("call_replayed", {"key": KEY, "status": 500})]


def test_a_repeat_tells_how_long_it_waited() -> None:
    seconds = []

    def listen(sender: Any, **facts: Any) -> None:
        seconds.append(facts["seconds"])

    site = Site(answer(), store=(store := WatchedStore()))
    with signals.call_replayed.connected_to(listen, sender=site.middleware.app):
        with site.held():
            repeat = in_thread(site.call)
            store.await_waiting()
        repeat.result(LIMIT)
        site.call()
    assert len(seconds) == 2
    assert seconds[0] > 0
    assert seconds[1] == 0


def test_a_run_tells_how_long_it_took() -> None:
    seconds = []

    def listen(sender: Any, **facts: Any) -> None:
        seconds.append(facts["seconds"])

    site = Site(answer())
    with signals.call_finished.connected_to(listen, sender=site.middleware.app):
        site.call()
    assert 0 < seconds[0] < LIMIT


def test_refusals_after_a_look_at_the_record() -> None:
    site = Site(answer(b"12345"), config={**AT_ONCE, "RUNONCE_MAX_BODY_BYTES": 4})
    with listening(site) as heard:
        with site.held():
            site.call()
            site.call(path="/other")
        site.call()
        site.cancel()
        site.call()
    assert [told for told in heard if told[0] == "call_refused"] == [
        refused("still_running", 409),
        refused("input_mismatch", 409),
        refused("response_too_large", 409),
        refused("canceled", 409),
    ]


def _cut_off(site: Site) -> None:
    environ = environ_of(CONTENT_LENGTH="9")
    environ["wsgi.input"] = io.BytesIO(b"x")
    ask(site.middleware, environ)


EARLY: dict[str, tuple[dict[str, Any], Callable[[Site], Any], tuple[str, dict[str, Any]]]] = {
    "invalid_key": ({}, lambda site: site.call("a,b"), refused("invalid_key", 400, None)),
    "key_required": (
        {"config": {"RUNONCE_REQUIRED": True}},
        lambda site: site.call(None),
        refused("key_required", 400, None),
    ),
    "key_failed, key": ({"key": fail}, lambda site: site.call(), refused("key_failed", 500, None)),
    "key_failed, scope": ({"scope": fail}, lambda site: site.call(), refused("key_failed", 500, None)),
    "key_failed, fingerprint": ({"fingerprint": fail}, lambda site: site.call(), refused("key_failed", 500)),
    "incomplete_body": ({}, _cut_off, refused("incomplete_body", 400)),
    "store_not_shared": (
        {},
        lambda site: site.call(environ={"wsgi.multiprocess": True}),
        refused("store_not_shared", 500),
    ),
    "store_full": ({"store": MemoryStore(max_bytes=0)}, lambda site: site.call(), refused("store_full", 503)),
}


@pytest.mark.parametrize(("options", "send", "told"), EARLY.values(), ids=EARLY)
def test_refusals_before_that(options: dict[str, Any], send: Callable[[Site], Any], told: Any) -> None:
    site = Site(answer(), **options)
    with listening(site) as heard:
        send(site)
    assert heard == [told]


def test_cancels() -> None:
    site = Site(answer(), config=AT_ONCE)
    with listening(site) as heard:
        site.cancel()
        site.cancel()
    assert heard == [canceled("not_received")] * 2
    site = Site(answer(), config=AT_ONCE)
    with listening(site) as heard:
        with site.held():
            site.cancel()
        site.cancel()
    assert heard == [STARTED, canceled("running", pending=True), finished(200), canceled("running")]
    site = Site(answer())
    with listening(site) as heard:
        site.call()
        site.cancel()
    assert heard == [STARTED, finished(200), canceled("done")]


def test_a_cancel_is_told_although_a_hook_raises() -> None:
    site = Site(answer())
    site.middleware.on_cancel(fail)
    with listening(site) as heard:
        assert site.cancel().status_int == 500
    assert heard == [canceled("not_received")]


@pytest.mark.parametrize("by", ["release", "status"])
def test_a_release(by: str) -> None:
    def handler(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if by == "release":
            current_call.release()
        return answer(status="200 OK" if by == "release" else "429 Too Many Requests")(environ, start_response)

    site = Site(handler)
    with listening(site) as heard:
        site.call()
    assert heard == [STARTED, ("call_released", {"key": KEY})]


@pytest.mark.parametrize("found_by", ["repeat", "rerun", "cancel"])
def test_a_lost_run(found_by: str) -> None:
    store = LeasedStore()
    config = {"RUNONCE_ON_LOST": "rerun" if found_by == "rerun" else "refuse"}
    site = Site(answer(), store=store, config=config)
    with site.held():
        record = store.read(KEY).record
        assert record
        store.dead = True
        with listening(site) as heard:
            if found_by == "cancel":
                site.cancel()
            else:
                site.call()
        store.dead = False
    lost = ("call_lost", {"key": KEY, "owner": record.owner})
    assert record.owner
    assert (
        heard
        == {
            "repeat": [lost, ("call_replayed", {"key": KEY, "status": 500})],
            "rerun": [lost, STARTED, finished(200)],
            "cancel": [lost, canceled("running")],
        }[found_by]
    )


def test_a_result_that_was_cut() -> None:
    site = Site(answer(b"x" * 1000), config={"RUNONCE_RESULT_BUDGET": 100})
    with listening(site) as heard:
        kept = len(site.call().body)
        site.call()
    assert heard == [
        STARTED,
        ("result_cut", {"key": KEY, "original_bytes": 1000, "kept_bytes": kept}),
        finished(200, 99),
        ("call_replayed", {"key": KEY, "status": 200}),
    ]


def test_a_run_that_streams_on_is_told_once_although_it_is_closed_twice() -> None:
    site = Site(answer(b"12345"), config={"RUNONCE_MAX_BODY_BYTES": 4})
    with listening(site) as heard:
        body = site.opened()
        list(body)
        body.close()
        body.close()
    assert [name for name, _ in heard] == ["call_started", "call_finished"]


def test_what_is_no_call_tells_nothing() -> None:
    site = Site(answer())
    with listening(site) as heard:
        site.call(None)
        site.call(method="GET")
        site.get()
        site.get("/call-1")
    assert heard == []


def test_the_sender_is_the_app() -> None:
    senders = []

    def listen(sender: Any, **facts: Any) -> None:
        senders.append(sender)

    sites = [Site(answer()), Site(answer())]
    with signals.call_started.connected_to(listen):
        for site in sites:
            site.call()
    assert senders == [site.middleware.app for site in sites]


def test_a_key_has_all_its_parts() -> None:
    site = Site(answer(), scope=lambda environ: "tenant")
    with listening(site) as heard:
        site.call()
        site.cancel()
    assert [facts["key"] for _, facts in heard] == [CallKey("tenant", "chat-1", "call-1")] * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_receiver_that_raises_changes_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    store = LeasedStore()
    site = Site(answer(b"x" * 100), store=store, config={"RUNONCE_RESULT_BUDGET": 64})
    with getattr(signals, name).connected_to(fail, sender=site.middleware.app):
        with site.held("call-1"):
            store.dead = True
            assert site.call("call-1").json["code"] == "outcome_unknown"
            store.dead = False
        assert site.call("call-2").body == site.call("call-2").body
        assert site.cancel("call-2").json["state"] == "done"
        assert site.call("call-2").json["code"] == "canceled"
        site.handler = answer(status="429 Too Many Requests")
        assert site.call("call-3").status_int == site.call("call-3").status_int == 429
    logged = [record for record in caplog.records if record.exc_info]
    assert logged
    assert all(name in record.getMessage() for record in logged)
    assert {record.chat_id for record in logged} == {"chat-1"}


@pytest.mark.parametrize("store", [MemoryStore, LeasedStore])
def test_a_worker_that_ends_before_the_handler_has_started_gives_the_claim_back(store: type[MemoryStore]) -> None:
    def leave(sender: Any, **facts: Any) -> None:
        raise SystemExit

    site = Site(answer(), store=store())
    with signals.call_started.connected_to(leave, sender=site.middleware.app), pytest.raises(SystemExit):
        site.call()
    assert site.runs == 0
    assert site.call().body == b"done"


# Log lines


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """Every line of the library. Each must carry the two extras."""
    handler, logger = _Lines(), logging.getLogger("flask_runonce")
    caplog.set_level(logging.DEBUG, "flask_runonce")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)
    for record in handler.records:
        assert hasattr(record, "chat_id") and hasattr(record, "tool_call_id"), record.getMessage()


def ids(lines: list[logging.LogRecord]) -> set[tuple[str, str]]:
    return {(record.chat_id, record.tool_call_id) for record in lines}


def test_each_line_about_a_call_carries_its_ids(lines: list[logging.LogRecord]) -> None:
    site = Site(answer(), config=AT_ONCE)
    with site.held():
        site.call()
    for send in (site.call, site.cancel, site.call):
        send()
    site.cancel("call-2")
    assert ids(lines) == {("chat-1", "call-1"), ("chat-1", "call-2")}
    assert len(lines) >= 6


def test_a_line_says_what_has_happened(lines: list[logging.LogRecord]) -> None:
    site = Site(answer(b"made", "201 Created"))
    for send in (site.call, site.call, site.cancel, site.call):
        send()
    texts = [record.getMessage() for record in lines]
    for words in (["started"], ["finished", "201"], ["replayed", "201"], ["canceled", "done"], ["refused", "canceled"]):
        assert any(all(word in text for word in words) for text in texts), words


def test_a_lost_run_is_a_warning_that_names_its_owner(lines: list[logging.LogRecord]) -> None:
    store = LeasedStore()
    site = Site(answer(), store=store)
    with site.held():
        record = store.read(KEY).record
        store.dead = True
        site.call()
    warnings = [line for line in lines if line.levelno >= logging.WARNING]
    assert record and any("lost" in line.getMessage() and record.owner in line.getMessage() for line in warnings)
    assert ids(warnings) == {("chat-1", "call-1")}


def test_ordinary_calls_are_no_warnings(lines: list[logging.LogRecord]) -> None:
    site = Site(answer())
    for send in (site.call, site.call, site.cancel, site.call, site.get):
        send()
    assert [line for line in lines if line.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", ["key", "scope", "guard", "fingerprint"])
def test_a_callable_that_raises_is_logged_with_its_traceback(name: str, lines: list[logging.LogRecord]) -> None:
    site = Site(answer(), **{name: fail})
    (site.cancel if name == "guard" else site.call)()
    logged = [line for line in lines if line.exc_info]
    assert [line.levelno for line in logged] == [logging.ERROR]
    if name == "fingerprint":  # the others are asked before the key is known
        assert ids(logged) == {("chat-1", "call-1")}


class _AwayStore(MemoryStore):
    def swap(self, *args: Any, **options: Any) -> Swapped:
        raise StoreUnavailable("nobody answers at db-7")


@pytest.mark.parametrize("send", ["call", "cancel"])
def test_a_store_that_is_away_is_a_warning_that_says_why(send: str, lines: list[logging.LogRecord]) -> None:
    site = Site(answer(), store=_AwayStore())
    assert getattr(site, send)().json["code"] == "store_unavailable"
    warnings = [line for line in lines if line.levelno == logging.WARNING]
    assert any("nobody answers at db-7" in line.getMessage() for line in warnings)
    assert ids(warnings) == {("chat-1", "call-1")}


def test_a_hook_that_raises_is_logged_with_its_traceback_and_ids(lines: list[logging.LogRecord]) -> None:
    site = Site(answer(), config=AT_ONCE)
    site.middleware.on_cancel(fail)
    site.cancel("call-1")
    with site.held("call-2"):
        site.cancel("call-2")  # its hooks are owed
    logged = [line for line in lines if line.exc_info]
    assert [line.tool_call_id for line in logged] == ["call-1", "call-2"]


def test_of_hooks_that_raise_the_first_is_logged(lines: list[logging.LogRecord]) -> None:
    errors = [ValueError("first"), ValueError("second")]

    def raising(error: Exception) -> Callable[..., None]:
        def hook(call: CanceledCall) -> None:
            raise error

        return hook

    site = Site(answer())
    for error in errors:
        site.middleware.on_cancel(raising(error))
    site.cancel()
    assert [line.exc_info[1] for line in lines if line.exc_info] == errors[:1]


def test_open_routes_are_warned_of(lines: list[logging.LogRecord]) -> None:
    RunOnceMiddleware(answer())
    assert [line.levelno for line in lines] == [logging.WARNING]
    assert "open to whoever reaches them" in lines[0].getMessage()


@pytest.mark.parametrize(
    "options",
    [{"guard": lambda environ: None}, {"scope": lambda environ: ""}, {"config": {"RUNONCE_URL_PREFIX": None}}],
    ids=["guard", "scope", "not mounted"],
)
def test_routes_that_are_not_open_are_not_warned_of(options: Any, lines: list[logging.LogRecord]) -> None:
    RunOnceMiddleware(answer(), **options)
    assert lines == []


def test_a_formatter_may_name_the_extras_of_every_line() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(chat_id)s/%(tool_call_id)s %(message)s"))
    logger = logging.getLogger("flask_runonce")
    logger.addHandler(handler)
    try:
        RunOnceMiddleware(answer())
        site = Site(answer())
        site.middleware.on_cancel(fail)
        site.cancel()
    finally:
        logger.removeHandler(handler)
    first, second = (line for line in written.getvalue().splitlines() if line.startswith(("/ ", "chat-1/call-1 ")))
    assert first.startswith("/ ")
    assert "hook" in second
