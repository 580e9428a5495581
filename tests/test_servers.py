"""The same on every server: the incident, bodies, connections, headers, clients that go away, and each way to end.

What differs from server to server is in `FACTS`, in the words of the table in docs/servers.md.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import re
import select
import shlex
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.incident.replay import Service, replay
from tests.chaos.book import Book
from tests.servers import ROOT, SERVERS, Server, missing, started
from tests.services import LIMIT, until
from tests.wire import CHAT, PREFIX, Answer, Wire, chunked, request, send

RUN = "/book/run"
LEASE = 1
MIB = 2**20
UNREAD = b"x" * (3 * MIB // 2)
"""A body that is not read ahead, because it is over `RUNONCE_FINGERPRINT_BYTES`."""
GONE = (OSError, http.client.HTTPException)


class Facts(NamedTuple):
    """A server's row in the table."""

    connection: str
    chunked: str
    folded: str
    stopped: str
    limit: str


FACTS = {
    "flask run": Facts("closed", "read", "unfolded", "`SIGTERM`: unknown", "none"),
    "gunicorn gthread": Facts("kept", "read", "refused", "`SIGTERM`: finished", "none"),
    "gunicorn gevent": Facts("kept", "read", "refused", "`SIGTERM`: finished", "`--timeout`, if it blocks: unknown"),
    "gunicorn sync": Facts("closed", "read", "refused", "`SIGTERM`: finished", "`--timeout`: unknown"),
    "waitress": Facts("kept", "read", "unfolded", "`SIGINT`: finished", "none"),
    "uWSGI": Facts("closed", "empty", "unfolded", "`SIGTERM`: finished", "`--harakiri`: unknown"),
    "mod_wsgi": Facts(
        "kept, but closed after 400 and 500", "read", "unfolded", "`SIGWINCH`: finished", "`--request-timeout`: unknown"
    ),
}
ENDING = {
    "gunicorn": "Handling signal: term",
    "uWSGI": "graceful shutdown triggered",
    "mod_wsgi": "shutting down gracefully",
}
"""What a server prints when it has been told to end, where it prints something."""
PRELOADED = ["gunicorn gthread --preload", "gunicorn gevent --preload"]


def on(*servers: str) -> list[Any]:
    """Parameters for these servers. One that is not there is skipped, and the reason says why."""
    return [
        pytest.param(server, marks=pytest.mark.skipif(bool(reason), reason=reason or "it is there"))
        for server in servers
        for reason in [missing(server)]
    ]


class Place:
    """A server of the matrix with its store and its book, which outlive it. It is started when it is needed."""

    def __init__(self, name: str, folder: Path, *options: str, app: str = "create_app", **settings: object) -> None:
        self.server, _, preload = name.partition(" --")
        self.facts = FACTS[self.server]
        self.book = Book(folder)
        self._options = [*([f"--{preload}"] if preload else []), *options]
        self._app = f"tests.served:{app}"
        self._log = folder / "log"
        config = {"BOOK": folder, "RUNONCE_STORE_URI": f"sqlite:///{folder / 'runonce.db'}", "RUNONCE_LEASE": LEASE}
        self._env = {f"SERVED_{name}": str(value) for name, value in {**config, **settings}.items()}
        self._running: tuple[Server, contextlib.ExitStack] | None = None

    @property
    def running(self) -> Server:
        if self._running is None or self._running[0].process.poll() is not None:
            self.close()
            with contextlib.ExitStack() as stack:
                running = started(self.server, self._app, *self._options, log=self._log, env=self._env)
                self._running = stack.enter_context(running), stack.pop_all()
        return self._running[0]

    @property
    def port(self) -> int:
        return self.running.port

    def close(self) -> None:
        """End the server by force."""
        if self._running:
            running, stack = self._running
            running.kill()
            stack.close()
            self._running = None

    def send(self, data: bytes) -> Answer:
        return send(self.port, data)

    def begin(self, target: str, call: str) -> Wire:
        """Send a call and return when its handler runs."""
        wire = Wire(self.port)
        wire.send(request(target, call))
        until(lambda: self.runs(call), f"{call} does not run")
        return wire

    def runs(self, call: str | None = None) -> int:
        return len(self.book.read("runs", call))

    def open(self, gate: str) -> None:
        (self.book.folder / gate).touch()


@pytest.fixture(scope="module", params=on(*SERVERS, *PRELOADED))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with contextlib.closing(Place(request.param, tmp_path_factory.mktemp("place"))) as place:
        yield place


@pytest.fixture
def call(request: pytest.FixtureRequest) -> str:
    """A tool call ID that no other test uses."""
    return re.sub("[^a-z0-9]+", "-", request.node.name)


# Requests.


@pytest.mark.parametrize("place", on(*SERVERS), indirect=True)
def test_the_incident_is_replayed_with_every_count_right(place: Place) -> None:
    report = replay(place.running.url, one_at_a_time=place.server == "gunicorn sync")
    assert report.faults == []


def test_bodies_of_4_mib_leave_the_next_answer_whole(place: Place) -> None:
    service = Service(place.running.url)
    body = b"x" * (4 * MIB)
    first = service.send("POST", "/files", chat="large", call="upload", data=body)
    assert first.json["bytes"] == len(body)
    service.cancel("large", "never")
    for _ in range(5):
        repeat = service.send("POST", "/files", chat="large", call="upload", data=body)
        assert (repeat.status, repeat.replayed, repeat.body) == (200, True, first.body)
        for path, call, wanted in (
            ("/commands", "upload", (409, "input_mismatch")),
            ("/files", "never", (409, "canceled")),
            ("/files", "a,b", (400, "invalid_key")),
        ):
            refused = service.send("POST", path, chat="large", call=call, data=body)
            assert (refused.status, refused.json["code"]) == wanted


def test_one_connection_after_another_answer(place: Place, call: str) -> None:
    """Repeats and refusals with bodies that nobody wanted do not spoil the connection for the next request."""
    run, large = request(RUN, call, body=b"a body"), request(RUN, f"{call}-large", body=UNREAD)
    cancel = request(f"/book{PREFIX}/{call}/cancel", None, b"Coder-Chat-Id: " + CHAT.encode())
    plain = request("/starts", method="GET")
    script = [
        (run, (201, "", False)),
        (request(RUN, call, body=UNREAD), (409, "input_mismatch", False)),
        (plain, (200, "", False)),
        (run, (201, "", True)),
        (request(RUN, "a,b", body=UNREAD), (400, "invalid_key", False)),
        (large, (201, "", False)),
        (large, (201, "", True)),
        (cancel, (200, "", False)),
        (request(RUN, call, body=UNREAD), (409, "canceled", False)),
        (plain, (200, "", False)),
    ]
    wire = Wire(place.port)
    try:
        for data, wanted in script:
            wire.send(data)
            answer = wire.answer()
            assert (answer.status, answer.code, answer.replayed) == wanted
            if place.facts.connection == "closed" or str(answer.status) in place.facts.connection:
                assert wire.receive(1) == b""
                wire.close()
                wire = Wire(place.port)
            else:
                assert answer.kept
    finally:
        wire.close()
    assert place.runs(call) == place.runs(f"{call}-large") == 1


def test_a_request_of_http_1_0(place: Place, call: str) -> None:
    first, repeat = (place.send(request(RUN, call, body=b"a body", version="1.0")) for _ in range(2))
    assert (first.status, repeat.status, repeat.replayed, repeat.body) == (201, 201, True, first.body)
    refused = place.send(request(RUN, call, body=UNREAD, version="1.0"))
    assert refused.code == "input_mismatch"
    assert not (first.kept or repeat.kept or refused.kept)


def test_a_body_in_chunks(place: Place, call: str) -> None:
    coding = b"Transfer-Encoding: chunked"
    first, repeat = (place.send(request(RUN, call, coding, body=chunked(b"abc", b"defg"))) for _ in range(2))
    assert (first.status, first.json["bytes"]) == (201, 7 if place.facts.chunked == "read" else 0)
    assert (repeat.status, repeat.replayed, repeat.body) == (201, True, first.body)
    assert place.runs(call) == 1
    if place.facts.chunked == "read":
        with Wire(place.port) as wire:
            wire.send(request(RUN, "a,b", coding, body=chunked(*[UNREAD] * 3)))
            refused = wire.answer()
            assert refused.code == "invalid_key"
            if refused.kept:
                wire.send(request(RUN, call, body=b"other"))
                assert wire.answer().code == "input_mismatch"


# Headers.

ID = b"Coder-Tool-Call-Id: "
MALFORMED = {
    "Latin-1": [ID + b"caf\xe9"],
    "UTF-8": [ID + "\N{SNOWMAN}".encode()],
    "256 characters": [ID + b"x" * 256],
    "nothing": [ID],
    "a blank in it": [ID + b"a b"],
    "a comma in it": [ID + b"a,b"],
    "twice": [ID + b"a", ID + b"b"],
    "the same twice": [ID + b"a", ID + b"a"],
    "the same twice, in another case": [ID + b"a", ID.lower() + b"a"],
    "two chats": [ID + b"a", b"Coder-Chat-Id: other"],
}
REFUSED_BY_SOME_SERVERS = {
    "a control character in it": [ID + b"a\x01b"],
    "a NUL in it": [ID + b"a\0b"],
    "folded": [ID + b"a\r\n b"],
    "5,000 characters": [ID + b"x" * 5_000],
    "70,000 characters": [ID + b"x" * 70_000],
}


@pytest.mark.parametrize("lines", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_id_is_refused(place: Place, lines: Sequence[bytes]) -> None:
    runs = place.runs()
    answer = place.send(request(RUN, None, b"Coder-Chat-Id: chat-1", *lines))
    assert (answer.status, answer.code) == (400, "invalid_key")
    assert place.runs() == runs


@pytest.mark.parametrize("lines", REFUSED_BY_SOME_SERVERS.values(), ids=REFUSED_BY_SOME_SERVERS)
def test_an_id_that_a_server_may_refuse_itself(place: Place, lines: Sequence[bytes]) -> None:
    """With an answer of its own, or with none."""
    runs = place.runs()
    with contextlib.suppress(*GONE):
        answer = place.send(request(RUN, None, b"Coder-Chat-Id: chat-1", *lines))
        assert answer.status in (400, 431)
        assert answer.code in ("invalid_key", "")
    assert place.runs() == runs


def test_blanks_around_an_id_are_no_part_of_it(place: Place, call: str) -> None:
    first = place.send(request(RUN, call))
    repeat = place.send(request(RUN, f" \t{call}\t "))
    assert (first.status, repeat.replayed, repeat.body) == (201, True, first.body)


def test_a_folded_header(place: Place, call: str) -> None:
    answer = place.send(request(RUN, call, b"X-Other: a\r\n b"))
    assert answer.status == (201 if place.facts.folded == "unfolded" else 400)
    assert place.runs(call) == (place.facts.folded == "unfolded")


def test_a_header_with_underscores_cannot_stand_in_for_an_id(place: Place, call: str) -> None:
    """WSGI calls both the same, so a server drops it; or both are the ID, and it is given twice."""
    answer = place.send(request(RUN, call, b"Coder_Tool_Call_Id: another"))
    assert answer.code == "invalid_key" or answer.json["call"] == call
    assert place.runs("another") == 0


# Clients that go away.


def test_an_upload_that_is_cut_off_is_no_run(place: Place, call: str) -> None:
    with Wire(place.port) as wire:
        wire.send(request(RUN, call, body=b"the beg", length=1000))
        wire.reset()
    whole = place.send(request(RUN, call, body=b"x" * 1000))
    assert (whole.status, whole.replayed, whole.json["bytes"]) == (201, False, 1000)
    assert place.runs(call) == 1


def test_a_client_that_goes_away_during_the_run_gets_the_answer_later(place: Place, call: str) -> None:
    target = f"{RUN}?gate={call}"
    with place.begin(target, call) as wire:
        wire.reset()
    place.open(call)
    retry = place.send(request(target, call))
    assert (retry.status, retry.replayed, retry.json["call"]) == (201, True, call)
    assert place.runs(call) == 1


def test_a_client_that_goes_away_during_the_answer_gets_it_whole_later(place: Place, call: str) -> None:
    target = f"{RUN}?padding={6 * MIB}"
    with Wire(place.port, window=4096) as wire:
        wire.send(request(target, call))
        assert wire.receive(16).startswith(b"HTTP/1.")
        wire.reset()
    retry = place.send(request(target, call))
    assert (retry.status, retry.replayed, len(retry.json["padding"])) == (201, True, 6 * MIB)
    assert place.runs(call) == 1


# The server's end. After it the call is done or its outcome is unknown; it does not run again.


def is_unknown(answer: Answer) -> bool:
    return (answer.status, answer.code, answer.replayed) == (500, "outcome_unknown", True)


def test_a_server_that_is_told_to_end_in_mid_run(place: Place, call: str) -> None:
    target = f"{RUN}?gate={call}"
    number, outcome = place.facts.stopped.split(": ")
    with place.begin(target, call) as wire:
        running = place.running
        running.process.send_signal(signal.Signals[number.strip("`")])
        if outcome == "finished":
            ending = ENDING.get(place.server.split()[0], "")
            until(lambda: ending in running.log.read_text(errors="replace"), "the server does not end")
            place.open(call)
            first = wire.answer()
            assert (first.status, first.replayed) == (201, False)
        else:
            with pytest.raises(GONE):
                wire.answer()
    running.process.wait(LIMIT)
    retry = place.send(request(target, call))
    if outcome == "finished":
        assert (retry.status, retry.replayed, retry.body) == (201, True, first.body)
    else:
        assert is_unknown(retry)
    assert place.runs(call) == 1


def test_a_server_that_is_killed_in_mid_run(place: Place, call: str) -> None:
    target = f"{RUN}?gate={call}"
    with place.begin(target, call) as wire:
        place.running.kill()
        with pytest.raises(GONE):
            wire.answer()
    place.open(call)
    assert is_unknown(place.send(request(target, call)))
    assert is_unknown(place.send(request(target, call)))
    assert place.runs(call) == 1


# The server's own time limit.

LIMITS = {
    "gunicorn gevent": ["--timeout", "2"],
    "gunicorn sync": ["--timeout", "1"],
    "uWSGI": ["--harakiri", "1"],
    "mod_wsgi": ["--request-timeout", "1", "--interrupt-timeout", "1", "--threads", "1"],
}


@pytest.mark.parametrize("server", on(*LIMITS))
def test_a_run_that_the_server_gives_up(server: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    target = f"{RUN}?fifo=fifo" if server == "gunicorn gevent" else f"{RUN}?gate=never"
    with contextlib.closing(Place(server, tmp_path, *LIMITS[server])) as place:
        with place.begin(target, "call") as wire, contextlib.suppress(*GONE):
            assert wire.answer().status >= 500
        assert is_unknown(place.send(request(target, "call")))
        assert place.runs("call") == 1


def test_a_run_that_takes_its_time(tmp_path: Path) -> None:
    """Longer than its lease, and than gunicorn's limit for workers that give no sign of life. Its repeat waits."""
    options = {
        "gunicorn gthread": ["--timeout", "3"],
        "gunicorn gevent": ["--timeout", "3"],
        "gunicorn sync": ["--workers", "2"],
    }
    target = f"{RUN}?seconds=4"
    with contextlib.ExitStack() as stack:
        places = []
        for server in SERVERS:
            if not missing(server):
                folder = tmp_path / server
                folder.mkdir()
                place = Place(server, folder, *options.get(server, []))
                places.append(stack.enter_context(contextlib.closing(place)))
        wires = [stack.enter_context(Wire(place.port)) for place in places * 2]
        for wire in wires[: len(places)]:
            wire.send(request(target, "call"))
        for wire, place in zip(wires[len(places) :], places, strict=True):
            until(functools.partial(place.runs, "call"), f"{place.server} does not run it")
            wire.send(request(target, "call"))
        answers = [wire.answer() for wire in wires]
    for first, repeat in zip(answers[: len(places)], answers[len(places) :], strict=True):
        assert (first.status, first.replayed, repeat.status, repeat.replayed) == (201, False, 201, True)
        assert repeat.body == first.body


@pytest.mark.parametrize("server", on("mod_wsgi"))
def test_an_apache_that_does_not_wait_for_the_run(server: str, tmp_path: Path) -> None:
    """The client gets Apache's own answer, and the run goes on: so it is with every proxy."""
    target = f"{RUN}?gate=gate"
    with contextlib.closing(Place(server, tmp_path, "--socket-timeout", "1")) as place:
        with place.begin(target, "call") as wire:
            assert wire.answer().status == 504
        place.open("gate")
        retry = place.send(request(target, "call"))
        assert (retry.status, retry.replayed) == (201, True)
        assert place.runs("call") == 1


# Threads and processes.


def test_repeats_never_take_all_threads(tmp_path: Path) -> None:
    """With `RUNONCE_MAX_WAITING` below half of them a cancel is taken at once."""
    target, show = f"{RUN}?gate=gate", f"/book{PREFIX}/call"
    chat = b"Coder-Chat-Id: " + CHAT.encode()
    with contextlib.ExitStack() as stack:
        place = Place("waitress", tmp_path, "--threads", "8", RUNONCE_MAX_WAITING=3)
        stack.callback(place.close)
        first = stack.enter_context(place.begin(target, "call"))
        repeats = [stack.enter_context(Wire(place.port)) for _ in range(12)]
        for wire in repeats:
            wire.send(request(target, "call"))
        refused = 0
        while refused < 9:
            ready, _, _ = select.select(repeats, [], [], LIMIT)
            assert ready, "the repeats are not answered"
            for wire in ready:
                assert wire.answer().code == "still_running"
                repeats.remove(wire)
                refused += 1
        cancel = stack.enter_context(Wire(place.port))
        cancel.send(request(f"{show}/cancel", None, chat))
        until(lambda: place.send(request(show, None, chat, method="GET")).json["canceled"], "the cancel does not come")
        place.open("gate")
        answers = [wire.answer() for wire in (first, *repeats)]
        assert [answer.status for answer in answers] == [201] * 4
        assert cancel.answer().json["state"] == "running"


def test_workers_with_one_thread_do_not_wait(tmp_path: Path) -> None:
    """With `RUNONCE_MAX_WAITING` 0, what would have to wait is told to come again, and leaves its worker to others."""
    target, chat = f"{RUN}?gate=gate", b"Coder-Chat-Id: " + CHAT.encode()
    place = Place("gunicorn sync", tmp_path, "--workers", "2", RUNONCE_MAX_WAITING=0)
    with contextlib.closing(place), place.begin(target, "call") as wire:
        assert place.send(request(target, "call")).code == "still_running"
        cancel = place.send(request(f"/book{PREFIX}/call/cancel", None, chat))
        assert (cancel.status, cancel.json["state"]) == (202, "running")
        place.open("gate")
        assert wire.answer().status == 201


@pytest.mark.parametrize("server", on("gunicorn sync", "uWSGI", "mod_wsgi"))
def test_a_server_with_several_processes_has_no_store_in_memory(server: str, tmp_path: Path) -> None:
    option = "--workers" if server.startswith("gunicorn") else "--processes"
    with contextlib.closing(Place(server, tmp_path, option, "2")) as place:
        refused = place.send(request("/files", "call", body=b"a file"))
        assert (refused.status, refused.code) == (500, "store_not_shared")
        assert place.send(request(RUN, "call")).status == 201


@pytest.mark.parametrize("server", on("uWSGI"))
def test_a_server_that_forks_after_the_app_was_used(server: str, tmp_path: Path) -> None:
    """uWSGI forks without telling Python. A run that is longer than its lease needs the worker's own thread."""
    target = "/run?seconds=2"
    with contextlib.closing(Place(server, tmp_path, app="create_used_book")) as place:
        with place.begin(target, "call") as wire:
            repeat = place.send(request(target, "call"))
            first = wire.answer()
        assert (first.status, repeat.status, repeat.replayed) == (201, 201, True)
        assert repeat.body == first.body
        assert place.runs("call") == 1


# The page.


PAGE = (ROOT / "docs" / "servers.md").read_text("utf-8")


def test_the_table_of_the_page_says_what_is_tested_here() -> None:
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", PAGE, re.MULTILINE)]
    assert rows[2:] == [[server, *facts] for server, facts in FACTS.items()]
    assert list(FACTS) == list(SERVERS)


def test_each_server_has_its_command_line() -> None:
    """The first paragraph of a server's section is the command that the tests start it with."""
    found = dict(re.findall(r"^## (.+)\n\n`([^`]+)`\n\n", PAGE, re.MULTILINE))
    assert list(found) == list(SERVERS)
    facts = {"app": "orders:create_app", "port": 8000, "script": "orders.wsgi", "root": ".", "folder": "."}
    for server, line in found.items():
        words = shlex.split(line)
        ours = [part.format(**facts) for part in SERVERS[server][2:]]
        assert words[0].removesuffix("-serve").removesuffix("-express") == server.split()[0].lower()
        assert [word for word in ours if word in words] == words[1:], line
