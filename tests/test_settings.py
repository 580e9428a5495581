"""Each line of the configuration table (CONTRACT.md section 3): its default, what it does, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from flask_runonce import RunOnceMiddleware
from flask_runonce.errors import ConfigError
from flask_runonce.settings import Settings
from flask_runonce.stores import MemoryStore, Swapped, open_store
from tests.plain_app import LIMIT, PREFIX, LeasedStore, PatientStore, Site, WatchedStore, answer, headers

DEFAULTS: dict[str, Any] = {
    "RUNONCE_STORE_URI": "memory://",
    "RUNONCE_CHAT_ID_HEADER": "Coder-Chat-Id",
    "RUNONCE_TOOL_CALL_ID_HEADER": "Coder-Tool-Call-Id",
    "RUNONCE_URL_PREFIX": "/api/v0/tool-calls",
    "RUNONCE_FORGET_AFTER": 3600,
    "RUNONCE_WAIT_TIMEOUT": 25,
    "RUNONCE_CANCEL_TIMEOUT": 25,
    "RUNONCE_MAX_WAITING": 16,
    "RUNONCE_LEASE": 30,
    "RUNONCE_MAX_BODY_BYTES": 8 * 1024 * 1024,
    "RUNONCE_MAX_STORE_BYTES": 256 * 1024 * 1024,
    "RUNONCE_FINGERPRINT_BYTES": 1024 * 1024,
    "RUNONCE_RELEASE_STATUSES": set(),
    "RUNONCE_REQUIRED": False,
    "RUNONCE_ON_LOST": "refuse",
    "RUNONCE_RESULT_BUDGET": None,
    "RUNONCE_KEY_PREFIX": "runonce",
    "RUNONCE_ALLOW_UNSHARED": False,
}

_SECONDS = [-1, -0.001, "25", None, True, math.nan, math.inf, 10.0**300]
_BYTES = [-1, 1.5, "1", None, True, math.nan, math.inf]

SENSELESS: dict[str, list[Any]] = {
    "RUNONCE_STORE_URI": ["", "memory", "memory://x", "runonce.db", None, b"memory://", 7],
    "RUNONCE_CHAT_ID_HEADER": ["", "Chat Id", "Chat:Id", "Chat_Id", "Chät", None, 7, "Content-Type", "content-length"],
    "RUNONCE_TOOL_CALL_ID_HEADER": ["", "Call Id", "Call_Id", None, 7, "Content-Length", "coder-chat-ID"],
    "RUNONCE_URL_PREFIX": [
        *("", "/", "runs", "/runs/", "https://example.org/runs", 7, False, b"/runs"),
        *("/<chat>", "/<int:n>/runs", "/a>b", "/runs?a", "/runs#a", "/ru%6es", "/my runs", "/runs\n", "//runs"),
        "/läufe",
    ],
    "RUNONCE_FORGET_AFTER": [0, *_SECONDS],
    "RUNONCE_WAIT_TIMEOUT": _SECONDS,
    "RUNONCE_CANCEL_TIMEOUT": _SECONDS,
    "RUNONCE_MAX_WAITING": [-1, 1.5, "16", None, True],
    "RUNONCE_LEASE": [0, 0.049, *_SECONDS],
    "RUNONCE_MAX_BODY_BYTES": _BYTES,
    "RUNONCE_MAX_STORE_BYTES": [0, *_BYTES],
    "RUNONCE_FINGERPRINT_BYTES": _BYTES,
    "RUNONCE_RELEASE_STATUSES": [503, "503", b"503", None, {"503"}, [99], [600], [True], [503.0], [None]],
    "RUNONCE_REQUIRED": [1, 0, "yes", None],
    "RUNONCE_ON_LOST": ["", "Rerun", "run", None, True, ["rerun"]],
    "RUNONCE_RESULT_BUDGET": [0, 63, -1, 1000.0, "65536", True],
    "RUNONCE_KEY_PREFIX": ["", "1st", "_x", "run-once", "run once", "a:b", "x" * 41, "ü", "a\n", None, 7],
    "RUNONCE_ALLOW_UNSHARED": [1, 0, "yes", None],
}

SENSIBLE: dict[str, list[Any]] = {
    "RUNONCE_STORE_URI": ["memory://"],
    "RUNONCE_CHAT_ID_HEADER": ["X-Chat", "chat"],
    "RUNONCE_TOOL_CALL_ID_HEADER": ["X-Call", "Idempotency-Key"],
    "RUNONCE_URL_PREFIX": [None, "/runs", "/a/b", "/~ada/api.v0/tool_calls", "/runs:all(1)"],
    "RUNONCE_FORGET_AFTER": [0.001, 7200, 10**9],
    "RUNONCE_WAIT_TIMEOUT": [0, 0.5, 3600],
    "RUNONCE_CANCEL_TIMEOUT": [0, 0.5, 3600],
    "RUNONCE_MAX_WAITING": [0, 1, 1000],
    "RUNONCE_LEASE": [0.05, 5, 60],
    "RUNONCE_MAX_BODY_BYTES": [0, 1, 2**40],
    "RUNONCE_MAX_STORE_BYTES": [1, 2**40],
    "RUNONCE_FINGERPRINT_BYTES": [0, 1, 2**40],
    "RUNONCE_RELEASE_STATUSES": [(), [100], (599,), {503}, frozenset({401, 503})],
    "RUNONCE_REQUIRED": [True, False],
    "RUNONCE_ON_LOST": ["refuse", "rerun"],
    "RUNONCE_RESULT_BUDGET": [None, 64, 65536],
    "RUNONCE_KEY_PREFIX": ["a", "Run_once_2", "x" * 40],
    "RUNONCE_ALLOW_UNSHARED": [True, False],
}


def _each(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(key, value, id=f"{key} {value!a}") for key, values in table.items() for value in values]


def middleware(config: dict[str, Any]) -> RunOnceMiddleware:
    return RunOnceMiddleware(answer(), guard=lambda environ: None, config=config)


def test_the_table_has_a_line_for_each_setting() -> None:
    settings = {f"RUNONCE_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    assert settings == DEFAULTS.keys() == SENSELESS.keys() == SENSIBLE.keys()


@pytest.mark.parametrize(("key", "default"), DEFAULTS.items(), ids=DEFAULTS)
def test_a_default(key: str, default: Any) -> None:
    assert getattr(Settings.load({}), key.removeprefix("RUNONCE_").lower()) == default


@pytest.mark.parametrize(("key", "value"), _each(SENSELESS))
def test_a_senseless_value_is_an_error_that_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        middleware({key: value})
    assert caught.value.name == key
    assert str(caught.value).startswith(f"{key} must be ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("key", "value"), _each(SENSIBLE))
def test_a_sensible_value_is_taken(key: str, value: Any) -> None:
    middleware({key: value})


@pytest.mark.parametrize(
    "key", ["RUNONCE_", "RUNONCE_FORGET_AFTR", "RUNONCE_forget_after", "RUNONCE_STORE", "RUNONCE_NAME"]
)
def test_an_unknown_key_is_an_error_that_names_it(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        middleware({key: 1})
    assert caught.value.name == key
    assert key in str(caught.value)
    assert "RUNONCE_FORGET_AFTER" in str(caught.value)  # and what there is


def test_other_keys_are_none_of_ours() -> None:
    middleware({"SECRET_KEY": "x", "RUNONCE": 1, "runonce_forget_after": 0, "APP_RUNONCE_LEASE": 0})


def test_a_value_changes_nothing_of_another_app() -> None:
    middleware({"RUNONCE_FORGET_AFTER": 1, "RUNONCE_RELEASE_STATUSES": [503]})
    assert Settings.load({}) == Settings()


# What each of them does


def test_store_uri_names_the_store(tmp_path: Path) -> None:
    config = {"RUNONCE_STORE_URI": f"sqlite:///{tmp_path / 'calls.db'}"}
    sites = [Site(answer(name), config=config) for name in (b"one", b"two")]
    assert [site.call().body for site in sites] == [b"one", b"one"]
    for site in sites:
        site.store.close()


def test_store_uri_of_memory_is_each_apps_own() -> None:
    sites = [Site(answer(name), config={"RUNONCE_STORE_URI": "memory://"}) for name in (b"one", b"two")]
    assert [site.call().body for site in sites] == [b"one", b"two"]


def test_a_store_that_is_given_comes_before_store_uri() -> None:
    config = {"RUNONCE_STORE_URI": "sqlite:////nowhere/calls.db"}
    assert Site(answer(), store="memory://", config=config).call().status_int == 200
    assert Site(answer(), store=MemoryStore(), config=config).call().status_int == 200


def test_chat_id_header_is_where_the_chat_id_stands() -> None:
    site = Site(answer(), config={"RUNONCE_CHAT_ID_HEADER": "X-Chat"})
    for _ in range(2):
        site.call(chat_id=None, **{"X-Chat": "chat-1"})
    assert site.runs == 1
    assert site.call().headers.get("Idempotent-Replayed") is None  # no call: it has a tool call ID, but no X-Chat
    assert site.get(chat_id="chat-1").json["code"] == "key_required"
    assert site.get(chat_id=None, **{"X-Chat": "chat-1"}).json["total"] == 1


def test_tool_call_id_header_is_where_the_tool_call_id_stands() -> None:
    site = Site(answer(), config={"RUNONCE_TOOL_CALL_ID_HEADER": "X-Call"})
    for _ in range(2):
        site.call(None, **{"X-Call": "call-1"})
    assert site.runs == 1
    for _ in range(2):
        site.call()
    assert site.runs == 3


def test_url_prefix_is_where_the_routes_are() -> None:
    site = Site(answer(b"the app"), config={"RUNONCE_URL_PREFIX": "/runs"})
    assert site.client.get("/runs", headers=headers(None)).json["total"] == 0
    assert site.client.post("/runs/call-1/cancel", headers=headers(None)).json["received"] is False
    assert site.client.get("/runs/call-1", headers=headers(None)).json["state"] == "canceled"
    assert site.cancel().body == b"the app"
    assert site.client.get("/running", headers=headers(None)).body == b"the app"


def test_url_prefix_of_none_mounts_no_routes() -> None:
    site = Site(answer(b"the app"), config={"RUNONCE_URL_PREFIX": None})
    assert site.cancel().body == b"the app"
    assert site.get().body == b"the app"


def test_forget_after_is_for_how_long_a_record_is_kept() -> None:
    clock = [0.0]
    site = Site(answer(), store=MemoryStore(timer=lambda: clock[0]), config={"RUNONCE_FORGET_AFTER": 60})
    site.call()
    clock[0] += 59.9
    site.call()
    assert site.runs == 1
    clock[0] += 60
    site.call()
    assert site.runs == 2
    assert site.cancel("call-2").json["remembers"] == 60


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> PatientStore:
    return PatientStore(monkeypatch)


def test_wait_timeout_is_for_how_long_a_repeat_waits(patient: PatientStore) -> None:
    site = Site(answer(), store=patient, config={"RUNONCE_WAIT_TIMEOUT": 7.5})
    with site.held():
        assert site.call().json["code"] == "still_running"
    assert patient.asked == [7.5]


def test_wait_timeout_of_nothing_lets_nobody_wait() -> None:
    site = Site(answer(), store=(store := WatchedStore()), config={"RUNONCE_WAIT_TIMEOUT": 0})
    with site.held():
        assert site.call().json["code"] == "still_running"
    assert store.waits == []


def test_cancel_timeout_is_for_how_long_a_cancel_waits(patient: PatientStore) -> None:
    site = Site(answer(), store=patient, config={"RUNONCE_CANCEL_TIMEOUT": 7.5})
    with site.held():
        assert site.cancel().status_int == 202
    assert patient.asked == [7.5]


def test_cancel_timeout_of_nothing_lets_no_cancel_wait() -> None:
    site = Site(answer(), store=(store := WatchedStore()), config={"RUNONCE_CANCEL_TIMEOUT": 0})
    with site.held():
        assert site.cancel().status_int == 202
    assert store.waits == []


def test_max_waiting_of_nothing_lets_nobody_wait() -> None:
    site = Site(answer(), store=(store := WatchedStore()), config={"RUNONCE_MAX_WAITING": 0})
    with site.held():
        assert site.call().json["code"] == "still_running"
        assert site.cancel().status_int == 202
    assert store.waits == []


class _AskedStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []

    def swap(self, *args: Any, **options: Any) -> Swapped:
        self.asked.append(options)
        return super().swap(*args, **options)


def test_lease_is_what_the_store_is_told() -> None:
    site = Site(answer(), store=(store := _AskedStore()), config={"RUNONCE_LEASE": 7, "RUNONCE_FORGET_AFTER": 70})
    site.call()
    site.cancel()
    assert [(options["lease"], options["forget_after"]) for options in store.asked] == [(7, 70)] * len(store.asked)
    assert store.asked


@pytest.mark.parametrize(("size", "kept"), [(4, True), (5, False)])
def test_max_body_bytes_is_the_largest_body_that_is_saved(size: int, kept: bool) -> None:
    site = Site(answer(b"x" * size), config={"RUNONCE_MAX_BODY_BYTES": 4})
    assert site.call().body == b"x" * size
    repeat = site.call()
    assert (repeat.body == b"x" * size) is kept
    assert kept or repeat.json["code"] == "response_too_large"


def test_max_body_bytes_of_nothing_saves_empty_bodies() -> None:
    empty = Site(answer(b""), config={"RUNONCE_MAX_BODY_BYTES": 0})
    assert [empty.call().status_int for _ in range(2)] == [200, 200]
    full = Site(answer(b"x"), config={"RUNONCE_MAX_BODY_BYTES": 0})
    assert [full.call().status_int for _ in range(2)] == [200, 409]


def test_max_store_bytes_bounds_the_store() -> None:
    site = Site(answer(), config={"RUNONCE_MAX_STORE_BYTES": 10_000})
    answers = [site.call(f"call-{number}") for number in range(20)]
    assert answers[0].status_int == 200
    assert (answers[-1].status_int, answers[-1].json["code"]) == (503, "store_full")
    assert site.runs < 10


@pytest.mark.parametrize(("size", "compared"), [(4, True), (5, False)])
def test_fingerprint_bytes_is_the_largest_body_that_is_compared(size: int, compared: bool) -> None:
    site = Site(answer(), config={"RUNONCE_FINGERPRINT_BYTES": 4})
    site.call(body=b"x" * size)
    assert site.call(body=b"y" * size).status_int == (409 if compared else 200)


def test_release_statuses_are_not_saved() -> None:
    site = Site(answer(status="503 Service Unavailable"), config={"RUNONCE_RELEASE_STATUSES": [503]})
    for _ in range(2):
        site.call()
    assert site.runs == 2


@pytest.mark.parametrize(
    ("status", "released"),
    [("401 Unauthorized", True), ("407 Proxy Authentication Required", True), ("425 Too Early", True)]
    + [("429 Too Many Requests", True), ("403 Forbidden", False), ("503 Service Unavailable", False)],
)
def test_release_statuses_of_the_middleware_are_those_of_an_apps_own_guards(status: str, released: bool) -> None:
    site = Site(answer(status=status))
    for _ in range(2):
        site.call()
    assert site.runs == (2 if released else 1)


def test_release_statuses_that_are_set_replace_the_middlewares() -> None:
    site = Site(answer(status="401 Unauthorized"), config={"RUNONCE_RELEASE_STATUSES": ()})
    for _ in range(2):
        site.call()
    assert site.runs == 1


def test_release_statuses_are_those_that_were_given_whatever_becomes_of_the_list() -> None:
    statuses = [503]
    site = Site(answer(status="503 Service Unavailable"), config={"RUNONCE_RELEASE_STATUSES": statuses})
    statuses.clear()
    for _ in range(2):
        site.call()
    assert site.runs == 2


@pytest.mark.parametrize("ids", [(None, "chat-1"), ("call-1", None), (None, None)])
def test_required_refuses_what_has_no_key(ids: tuple[str | None, str | None]) -> None:
    site = Site(answer(), config={"RUNONCE_REQUIRED": True})
    refused = site.call(*ids)
    assert (refused.status_int, refused.json["code"], site.runs) == (400, "key_required", 0)
    assert site.client.get("/", headers=headers(None)).status_int == 200


@pytest.mark.parametrize(("on_lost", "code", "runs"), [("refuse", "outcome_unknown", 0), ("rerun", None, 1)])
def test_on_lost_is_what_becomes_of_a_lost_run(on_lost: str, code: str | None, runs: int) -> None:
    store = LeasedStore()
    site = Site(answer(), store=store, config={"RUNONCE_ON_LOST": on_lost})
    with site.held() as first:
        store.dead = True
        repeat = site.call()
        assert ((repeat.json["code"] if code else None), site.runs - 1) == (code, runs)
    assert first.result(LIMIT).body == b"done"


def test_result_budget_is_what_an_answer_may_have() -> None:
    site = Site(answer(b"x" * 1000), config={"RUNONCE_RESULT_BUDGET": 100})
    first, repeat = site.call(), site.call()
    assert first.body == repeat.body
    assert len(first.body) <= 100


def test_key_prefix_starts_every_name_in_a_shared_store(tmp_path: Path) -> None:
    file = tmp_path / "calls.db"
    site = Site(answer(), config={"RUNONCE_STORE_URI": f"sqlite:///{file}", "RUNONCE_KEY_PREFIX": "agent_7"})
    site.call()
    site.store.close()
    database = sqlite3.connect(file)
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    database.close()
    assert names
    assert all(name.startswith("agent_7") for name in names)


@pytest.mark.parametrize(("allowed", "status", "runs"), [(False, 500, 0), (True, 200, 1)])
def test_allow_unshared_lets_memory_serve_several_processes(allowed: bool, status: int, runs: int) -> None:
    site = Site(answer(), config={"RUNONCE_ALLOW_UNSHARED": allowed})
    several = {"wsgi.multiprocess": True}
    assert site.call(environ=several).status_int == status
    assert (
        site.client.get(PREFIX, headers=headers(None), extra_environ=several, expect_errors=True).status_int == status
    )
    assert site.runs == runs


@pytest.mark.parametrize(
    ("uri", "module", "store", "extra"),
    [
        ("sqlite:///runonce.db", "sqlalchemy", "flask_runonce.stores.sql", "sql"),
        ("redis://localhost", "redis", "flask_runonce.stores.redis", "redis"),
    ],
)
def test_a_store_whose_extra_is_missing_says_what_to_install(
    uri: str, module: str, store: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, store, raising=False)
    with pytest.raises(ImportError, match=rf"needs {module}: pip install 'flask-runonce\[{extra}\]'"):
        open_store(uri)
