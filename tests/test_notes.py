"""`examples/notes`, an ordinary service to which run-once was added: what it did before, it does after."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flask import request, request_started
from webtest import TestApp, Upload

import examples.notes
from flask_runonce import signals

DOCS = Path(__file__).parent.parent / "docs"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notes_diff = load("notes_diff", DOCS / "notes_diff.py")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The service as it was before run-once was added, imported from files of its own."""
    folder = tmp_path_factory.mktemp("before")
    notes_diff.main([str(folder)])
    return load("notes_before", folder / "notes" / "__init__.py")


class Service:
    """A notes service with an account that is logged in. `http` is a browser with a session, `mails` what was sent."""

    def __init__(self, create_app: Callable[[dict[str, Any]], Any], database: Path) -> None:
        self.mails: list[str] = []
        self.database = database

        async def send_mail(to: str, subject: str, text: str) -> None:
            self.mails.append(to)

        self.app = create_app({"DATABASE": str(database), "SEND_MAIL": send_mail, "PASSWORD_METHOD": "pbkdf2:sha256:1"})
        self.http = self.log_in("ada")

    def log_in(self, name: str) -> TestApp:
        http = TestApp(self.app)
        account = {"name": name, "password": "secret"}
        http.post("/users", account, status=201)
        http.token = http.post("/login", account).json["csrf_token"]
        return http

    def send(self, method: str, path: str, fields: Any = "", tool_call_id: str = "", **options: Any) -> Any:
        """A request of the account's session (or of another one, `http`), as a call if it has an ID."""
        http = options.pop("http", self.http)
        headers = {"X-CSRF-Token": http.token, "Coder-Chat-Id": "chat"}
        if tool_call_id:
            headers["Coder-Tool-Call-Id"] = tool_call_id
        return getattr(http, method)(path, fields, headers=headers, **options)

    def count(self, table: str) -> int:
        connection = sqlite3.connect(self.database)
        rows: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        connection.close()
        return rows


@pytest.fixture(params=["before", "after"])
def either(request: pytest.FixtureRequest, before: ModuleType, tmp_path: Path) -> Service:
    module = before if request.param == "before" else examples.notes
    return Service(module.create_app, tmp_path / "notes.db")


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(examples.notes.create_app, tmp_path / "notes.db")


@pytest.fixture
def started(service: Service) -> Iterator[list[str]]:
    """The tool call IDs of the runs that start."""
    ids: list[str] = []

    def start(sender: object, key: Any) -> None:
        ids.append(key.tool_call_id)

    with signals.call_started.connected_to(start, sender=service.app):
        yield ids


# What it did before, it does after.


def test_notes_are_written_read_changed_and_deleted(either: Service) -> None:
    created = either.send("post", "/notes", {"title": "Milk", "text": "Two bottles"}, status=201)
    assert created.headers["Location"] == "/notes/1"
    assert either.http.get("/notes/1").json == {"id": 1, "title": "Milk", "text": "Two bottles"}
    either.send("put_json", "/notes/1", {"title": "Milk", "text": "Three bottles"})
    assert [note["text"] for note in either.http.get("/notes").json["notes"]] == ["Three bottles"]
    either.send("delete", "/notes/1")
    assert either.http.get("/notes").json == {"notes": []}


def test_a_form_may_carry_the_token_that_is_read_before_the_view(either: Service) -> None:
    fields = {"title": "Milk", "text": "", "csrf_token": either.http.token}
    assert either.http.post("/notes", fields, status=201).json["title"] == "Milk"


def test_an_upload_comes_back_as_a_download(either: Service) -> None:
    either.send("post", "/notes", {"title": "Milk", "text": ""})
    content = bytes(range(256)) * 100
    uploaded = either.send("post", "/notes/1/attachments", {"file": Upload("a.bin", content)}, status=201)
    downloaded = either.http.get(uploaded.headers["Location"])
    assert downloaded.body == content
    assert downloaded.headers["Content-Disposition"] == "attachment; filename=a.bin"


def test_the_export_is_streamed_and_written_down(either: Service) -> None:
    for title in ("Milk", "Bread"):
        either.send("post", "/notes", {"title": title, "text": ""})
    lines = either.send("post", "/notes/export").text.splitlines()
    assert [json.loads(line)["title"] for line in lines] == ["Milk", "Bread"]
    assert either.count("exports") == 1


def test_mail_is_sent_by_an_async_view(either: Service) -> None:
    either.send("post", "/notes", {"title": "Milk", "text": ""})
    assert either.send("post", "/notes/1/mail", {"to": "bob"}, status=202).json == {"sent": "Milk"}
    assert either.mails == ["bob"]


def test_mail_is_logged_where_no_server_sends_it(either: Service, caplog: pytest.LogCaptureFixture) -> None:
    module = sys.modules[either.app.import_name]
    log_in = {"name": "bob", "password": "secret"}
    http = TestApp(module.create_app({"DATABASE": str(either.database)}))
    http.post("/users", log_in)
    http.token = http.post("/login", log_in).json["csrf_token"]
    either.send("post", "/notes", {"title": "Milk", "text": ""}, http=http)
    with caplog.at_level("INFO"):
        either.send("post", "/notes/1/mail", {"to": "bob"}, http=http, status=202)
    assert "Mail to bob: Milk" in caplog.text


def test_errors_are_json(either: Service) -> None:
    either.send("post", "/notes", {"title": "Milk", "text": ""})
    twice = either.send("post", "/notes", {"title": "Milk", "text": ""}, status=409)
    assert twice.json["error"] == "Conflict"
    assert either.send("put", "/notes/7", {"title": "", "text": ""}, status=404).json["detail"] == "You have no note 7."
    assert "text" in either.send("post", "/notes", {"title": "Bread"}, status=400).json["detail"]
    assert either.http.get("/notes/1/attachments/1", status=404).json["error"] == "Not Found"
    assert either.http.get("/elsewhere", status=404).json["error"] == "Not Found"
    assert either.send("put", "/login", status=405).headers["Allow"]


def test_only_the_account_reads_its_notes(either: Service) -> None:
    either.send("post", "/notes", {"title": "Milk", "text": ""})
    other = either.log_in("bob")
    other.get("/notes/1", status=404)
    assert other.get("/notes").json == {"notes": []}
    TestApp(either.app).get("/notes", status=401)
    either.http.post("/notes", {"title": "Bread", "text": ""}, status=403)  # without the token
    either.http.post("/login", {"name": "ada", "password": "wrong", "csrf_token": either.http.token}, status=401)
    either.send("post", "/logout")
    either.http.get("/notes", status=401)


def test_every_answer_has_the_apps_headers(either: Service) -> None:
    for answer in (either.http.get("/notes"), either.http.get("/elsewhere", status=404)):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Server-Timing"].startswith("app;dur=")


# What is new: each call runs once.


def thrice(service: Service, *request: Any, **options: Any) -> Any:
    """Send a call three times: the first answer, if the repeats are equal to it."""
    first, *repeats = (service.send(*request, tool_call_id="t", **options) for _ in range(3))
    for repeat in repeats:
        assert (repeat.status, repeat.body, repeat.content_type) == (first.status, first.body, first.content_type)
        assert repeat.headers.get("Location") == first.headers.get("Location")
        assert repeat.headers["Idempotent-Replayed"] == "true"
        assert "Set-Cookie" not in repeat.headers
        assert repeat.headers["X-Content-Type-Options"] == "nosniff"
    assert "Idempotent-Replayed" not in first.headers
    return first


def test_a_note_is_created_once(service: Service, started: list[str]) -> None:
    assert thrice(service, "post", "/notes", {"title": "Milk", "text": ""}, status=201).json["id"] == 1
    assert service.count("notes") == 1
    assert started == ["t"]


def test_a_note_is_deleted_once(service: Service, started: list[str]) -> None:
    service.send("post", "/notes", {"title": "Milk", "text": ""})
    thrice(service, "delete", "/notes/1", status=200)
    assert started == ["t"]


def test_an_attachment_is_uploaded_once_although_its_boundary_changes(service: Service) -> None:
    service.send("post", "/notes", {"title": "Milk", "text": ""})
    content_types = set()

    def look(sender: object) -> None:
        content_types.add(request.content_type)

    with request_started.connected_to(look, sender=service.app):
        thrice(service, "post", "/notes/1/attachments", {"file": Upload("a.txt", b"abc")}, status=201)
    assert len(content_types) == 3
    assert service.count("attachments") == 1


def test_an_export_is_written_down_once_and_its_stream_is_kept(service: Service) -> None:
    service.send("post", "/notes", {"title": "Milk", "text": ""})
    first = thrice(service, "post", "/notes/export")
    assert json.loads(first.text)["title"] == "Milk"
    assert service.count("exports") == 1


def test_mail_is_sent_once(service: Service) -> None:
    service.send("post", "/notes", {"title": "Milk", "text": ""})
    thrice(service, "post", "/notes/1/mail", {"to": "bob"}, status=202)
    assert service.mails == ["bob"]


def test_an_error_is_an_answer_too(service: Service, started: list[str]) -> None:
    assert thrice(service, "put", "/notes/7", {"title": "", "text": ""}, status=404).json["error"] == "Not Found"
    assert started == ["t"]


def test_a_transaction_that_failed_left_nothing_and_is_not_tried_again(service: Service) -> None:
    service.send("post", "/notes", {"title": "Milk", "text": ""})
    thrice(service, "post", "/notes", {"title": "Milk", "text": ""}, status=409)
    service.send("delete", "/notes/1")
    assert service.send("post", "/notes", {"title": "Milk", "text": ""}, tool_call_id="t", status=409).json
    assert service.count("notes") == 0


def test_each_account_has_its_own_calls(service: Service) -> None:
    bob = service.log_in("bob")
    for http in (service.http, bob):
        service.send("post", "/notes", {"title": "Milk", "text": ""}, tool_call_id="t", http=http, status=201)
    assert service.count("notes") == 2
    calls = "/api/v0/tool-calls"
    assert service.send("post", f"{calls}/t/cancel", http=bob).json["state"] == "done"
    assert bob.get(calls, headers={"Coder-Chat-Id": "chat"}).json["tool_calls"][0]["canceled"] is True
    assert service.http.get(calls, headers={"Coder-Chat-Id": "chat"}).json["tool_calls"][0]["canceled"] is False


def test_who_is_logged_out_gets_no_repeat_and_no_cancel(service: Service, started: list[str]) -> None:
    service.send("post", "/notes", {"title": "Milk", "text": ""}, tool_call_id="t")
    service.send("post", "/logout")
    service.send("post", "/notes", {"title": "Milk", "text": ""}, tool_call_id="t", status=401)
    canceled = service.send("post", "/api/v0/tool-calls/t/cancel", status=401)
    assert canceled.json == {"error": "Unauthorized", "detail": "Log in first."}
    service.http.get("/api/v0/tool-calls", headers={"Coder-Chat-Id": "chat"}, status=401)
    service.http.get("/api/v0/tool-calls/t", headers={"Coder-Chat-Id": "chat"}, status=401)
    assert started == ["t"]


def test_a_canceled_note_is_not_written(service: Service) -> None:
    assert service.send("post", "/api/v0/tool-calls/t/cancel").json["received"] is False
    refused = service.send("post", "/notes", {"title": "Milk", "text": ""}, tool_call_id="t", status=409)
    assert refused.json["code"] == "canceled"
    assert service.count("notes") == 0


def test_another_note_under_the_same_id_is_refused(service: Service) -> None:
    service.send("post", "/notes", {"title": "Milk", "text": ""}, tool_call_id="t")
    refused = service.send("post", "/notes", {"title": "Bread", "text": ""}, tool_call_id="t", status=409)
    assert refused.json["code"] == "input_mismatch"
    assert service.count("notes") == 1


def test_who_asks_nothing_of_the_database_opens_none(service: Service) -> None:
    service.database.unlink()
    with service.app.app_context():
        pass
    assert not service.database.exists()


# The page that shows the difference.


def test_the_docs_show_the_difference() -> None:
    assert (DOCS / "notes.diff").read_text("utf-8") == notes_diff.diff(), "run docs/notes_diff.py"


def test_the_difference_is_written_by_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_diff, "DOCS", tmp_path)
    notes_diff.main([])
    assert (tmp_path / "notes.diff").read_bytes() == (DOCS / "notes.diff").read_bytes()


def test_the_service_before_knows_nothing_of_run_once() -> None:
    assert not [name for name, text in notes_diff.before().items() if "runonce" in text.lower() or "run-once" in text]


def test_the_difference_adds_one_file_and_a_line_here_and_there() -> None:
    before, after = notes_diff.before(), notes_diff.after()
    assert set(after) - set(before) == {"calls.py"}
    added = [len(after[name].splitlines()) - len(before[name].splitlines()) for name in before]
    assert sum(added) <= 10


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_applies_the_difference(tmp_path: Path) -> None:
    notes_diff.main([str(tmp_path)])
    subprocess.run(["git", "apply", str(DOCS / "notes.diff")], cwd=tmp_path, check=True)
    assert {path.name: path.read_text("utf-8") for path in (tmp_path / "notes").iterdir()} == notes_diff.after()
