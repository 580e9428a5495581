"""Several processes on one store: simultaneous claims, owners that die or freeze, forks, and stores that go away.

The owner of a run is most often a gunicorn worker; this process is another one on the same store.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from werkzeug.test import TestResponse

from flask_runonce.record import CallKey, Seen
from flask_runonce.stores import Store, Swapped
from tests.chaos.app import send
from tests.chaos.claims import claim
from tests.chaos.client import CHAT, PREFIX, Reply, Service
from tests.chaos.proxy import Proxy
from tests.chaos.site import LEASE, Site
from tests.servers import ROOT
from tests.services import LIMIT, PostgresServer, RedisServer, Server, until

STORES = ("sqlite", "postgres", "redis")
ROUNDS = int(os.environ.get("RUNONCE_TEST_ROUNDS", "5"))
PROCESSES = 4


@pytest.fixture(scope="module", params=STORES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    if request.param == "sqlite":
        uri = f"sqlite:///{folder / 'runonce.db'}"
    else:
        uri = request.getfixturevalue(f"{request.param}_server").url
    with contextlib.closing(Site(uri, folder)) as site:
        yield site


@pytest.fixture(scope="module")
def owner(site: Site) -> Iterator[Service]:
    """A gunicorn of one worker: its own process, which may be killed; then gunicorn starts another."""
    with site.serve("gunicorn gthread") as service:
        yield service


@pytest.fixture
def call(request: pytest.FixtureRequest) -> str:
    """A tool call ID that no other test uses."""
    return f"{re.sub('[^a-z]+', '-', request.node.name)}-{time.monotonic_ns()}"


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def key(call: str) -> CallKey:
    return CallKey("", CHAT, call)


def to_json(**facts: Any) -> bytes:
    return json.dumps(facts).encode()


def lost(store: Store, call: str) -> bool:
    return store.read(key(call)).lost


def same(one: Seen, other: Seen) -> bool:
    """Whether nothing was put between two looks."""
    return (one.version, one.record) == (other.version, other.record)


def is_unknown(answer: Reply | TestResponse) -> bool:
    status = answer.status if isinstance(answer, Reply) else answer.status_code
    code = answer.code if isinstance(answer, Reply) else answer.get_json()["code"]
    return (status, code) == (500, "outcome_unknown")


# Simultaneous claims.


def test_64_simultaneous_claims_in_4_processes_are_one_run(site: Site) -> None:
    spawn = multiprocessing.get_context("spawn")
    together, report = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [
        spawn.Process(target=claim, args=(site.config, ROUNDS, together, report), daemon=True) for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    reports = [report.get(timeout=LIMIT + ROUNDS) for _ in processes]
    for process in processes:
        process.join(LIMIT)
        process.close()
    report.close()
    report.join_thread()
    for number in range(ROUNDS):
        answers = [answer for rounds, _ in reports for answer in rounds[number]]
        assert len(answers) == 64
        assert len(set(answers)) == 1 and answers[0][0] == 201, set(answers)
        assert len(site.book.read("effects", f"round-{number}")) == 1
    assert [line for _, lines in reports for line in lines] == []


# An owner that dies.


def test_who_waits_for_a_killed_owner_is_told_that_the_outcome_is_unknown(
    site: Site, owner: Service, call: str, record_property: Callable[[str, object], None]
) -> None:
    app = site.app()
    other = f"{call}-other"
    undisturbed = site.soon(send, app, "/run", other, {"seconds": 3 * LEASE})
    first = site.soon(owner.call, "/run", call, {"gate": call})
    pid = site.began(call)["pid"]
    waiting = [site.soon(send, app, "/run", call, {"gate": call}) for _ in range(8)]
    until(lambda: app.extensions["runonce"].runner.find(key(call)).repeats >= 8, "the repeats do not come")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert all(is_unknown(repeat.result(LIMIT)) for repeat in waiting)
    record_property("seconds_until_told", round(time.monotonic() - killed, 2))
    with pytest.raises(OSError):
        first.result(LIMIT)
    assert is_unknown(owner.call("/run", call, {"gate": call}))
    assert len(site.book.read("effects", call)) == 1
    answer = undisturbed.result(LIMIT)
    assert answer.status_code == 201
    assert owner.call("/run", other, {"seconds": 3 * LEASE}).body == answer.data
    assert len(site.book.read("effects", other)) == 1
    assert site.book.read("lost", other) == []


def test_a_killed_owners_run_is_run_again_where_that_is_chosen(site: Site, owner: Service, call: str) -> None:
    first = site.soon(owner.call, "/rerun", call, {"gate": call})
    pid = site.began(call)["pid"]
    app = site.app()
    waiting = [site.soon(send, app, "/rerun", call, {"gate": call}) for _ in range(4)]
    os.kill(pid, signal.SIGKILL)
    assert site.began(call, runs=2)["pid"] == os.getpid()
    site.open(call, os.getpid())
    answers = {(repeat.result(LIMIT).status_code, repeat.result(LIMIT).data) for repeat in waiting}
    assert len(answers) == 1
    assert answers.pop()[0] == 201
    assert len(site.book.read("effects", call)) == 2
    assert len(site.book.read("lost", call)) == 1
    with pytest.raises(OSError):
        first.result(LIMIT)


# An owner that freezes, and wakes after its lease.


def test_the_late_end_of_a_frozen_owner_changes_nothing(site: Site, owner: Service, call: str) -> None:
    first = site.soon(owner.call, "/run", call, {"gate": call})
    pid = site.began(call)["pid"]
    store = site.store()
    logged = site.log.read_text().count("its end changes nothing")
    with frozen(pid):
        assert is_unknown(send(site.app(store), "/run", call, {"gate": call}))
        before = store.read(key(call))
    site.open(call, pid)
    late = first.result(LIMIT)
    assert (late.status, late.replayed) == (201, False)
    assert late.json["pid"] == pid
    assert same(store.read(key(call)), before)
    assert is_unknown(owner.call("/run", call, {"gate": call}))
    assert site.log.read_text().count("its end changes nothing") == logged + 1
    assert len(site.book.read("effects", call)) == 1


def test_the_late_end_of_a_frozen_owner_does_not_end_the_run_that_took_over(
    site: Site, owner: Service, call: str
) -> None:
    first = site.soon(owner.call, "/rerun", call, {"gate": call})
    pid = site.began(call)["pid"]
    store = site.store()
    with frozen(pid):
        second = site.soon(send, site.app(store), "/rerun", call, {"gate": call})
        site.began(call, runs=2)
        before = store.read(key(call))
    site.open(call, pid)
    late = first.result(LIMIT)
    assert (late.status, late.json["pid"]) == (201, pid)
    assert same(store.read(key(call)), before)
    site.open(call, os.getpid())
    answer = second.result(LIMIT)
    assert (answer.status_code, answer.get_json()["pid"]) == (201, os.getpid())
    repeat = owner.call("/rerun", call, {"gate": call})
    assert (repeat.replayed, repeat.body) == (True, answer.data)
    assert len(site.book.read("effects", call)) == 2


def test_the_late_end_of_a_frozen_owner_does_not_end_the_run_after_a_forget(
    site: Site, owner: Service, call: str
) -> None:
    first = site.soon(owner.call, "/run", call, {"gate": call})
    pid = site.began(call)["pid"]
    store = site.store()
    app = site.app(store)
    command = ["runonce", "forget", "--chat", CHAT, call]
    assert app.test_cli_runner().invoke(args=command).exit_code != 0  # its owner is alive
    with frozen(pid):
        until(lambda: lost(store, call), "the lease does not end")
        forgotten = app.test_cli_runner().invoke(args=command)
        assert forgotten.exit_code == 0, forgotten.output
        second = site.soon(send, app, "/run", call, {"gate": call})
        site.began(call, runs=2)
        before = store.read(key(call))
    site.open(call, pid)
    late = first.result(LIMIT)
    assert (late.status, late.json["pid"]) == (201, pid)
    assert same(store.read(key(call)), before)
    site.open(call, os.getpid())
    answer = second.result(LIMIT)
    assert answer.status_code == 201
    repeat = owner.call("/run", call, {"gate": call})
    assert (repeat.replayed, repeat.body) == (True, answer.data)


class Hesitant:
    """A store whose swaps over a record say that they come, wait until they may, and say that they are done."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.comes = Event()
        self.may = Event()
        self.came = Event()

    def swap(self, key: CallKey, seen: str, *args: Any, **options: Any) -> Swapped:
        if not seen:
            return self._store.swap(key, seen, *args, **options)
        self.comes.set()
        assert self.may.wait(LIMIT)
        swapped = self._store.swap(key, seen, *args, **options)
        self.came.set()
        return swapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("path", ["/run", "/rerun"])
def test_a_takeover_cannot_race_with_a_renewal(path: str, site: Site, owner: Service, call: str) -> None:
    first = site.soon(owner.call, path, call, {"gate": call})
    pid = site.began(call)["pid"]
    store = site.store()
    hesitant: Any = Hesitant(store)
    with frozen(pid):
        repeat = site.soon(send, site.app(hesitant), path, call, {"gate": call})
        assert hesitant.comes.wait(LIMIT)  # it has seen that the owner is lost
    until(lambda: not lost(store, call), "the owner does not renew its lease")
    hesitant.may.set()
    assert hesitant.came.wait(LIMIT)
    site.open(call, os.getpid())
    site.open(call, pid)
    assert first.result(LIMIT).status == 201
    answer = repeat.result(LIMIT)
    assert (answer.status_code, answer.data) == (201, first.result().body)
    assert len(site.book.read("effects", call)) == 1


# A cancel from another process.


def test_a_cancel_reaches_a_run_in_another_process(
    site: Site, owner: Service, call: str, record_property: Callable[[str, object], None]
) -> None:
    first = site.soon(owner.call, "/run", call, {"seconds": LIMIT})
    pid = site.began(call)["pid"]
    client = site.app().test_client()
    sent = time.monotonic()
    canceled = client.post(f"{PREFIX}/{call}/cancel", headers={"Coder-Chat-Id": CHAT}).get_json()
    (stopped,) = site.book.read("stopped", call)
    record_property("seconds_until_stopped", round(stopped["at"] - sent, 2))
    assert stopped["pid"] == pid
    assert (canceled["received"], canceled["state"], canceled["status"]) == (True, "running", 201)
    assert first.result(LIMIT).json["stopped"] is True
    (hook,) = site.book.read("hooks", call)
    assert (hook["pid"], hook["state"]) == (os.getpid(), "running")
    late = owner.call("/run", call, {"seconds": LIMIT})
    assert (late.status, late.code) == (409, "canceled")


def test_the_hooks_that_are_owed_are_called_by_the_owner(site: Site, owner: Service, call: str) -> None:
    first = site.soon(owner.call, "/run", call, {"gate": call})
    pid = site.began(call)["pid"]
    client = site.app(RUNONCE_CANCEL_TIMEOUT=0).test_client()
    pending = client.post(f"{PREFIX}/{call}/cancel", headers={"Coder-Chat-Id": CHAT})
    assert (pending.status_code, pending.get_json()) == (202, {"received": True, "state": "running"})
    assert site.book.read("hooks", call) == []
    site.open(call, pid)
    assert first.result(LIMIT).status == 201
    (hook,) = site.book.read("hooks", call)
    assert (hook["pid"], hook["state"]) == (pid, "running")
    canceled = owner.cancel(call)
    assert (canceled.status, canceled.saved) == (200, first.result().json)


# Forks.


def test_a_fork_in_a_running_app_runs_nothing_twice(site: Site, owner: Service, call: str) -> None:
    plan = {"gate": call}
    first = site.soon(owner.call, "/run", call, plan)
    pid = site.began(call)["pid"]
    order = to_json(call=call, plan=plan)
    parent = psutil.Process(pid)
    inherited = sockets(parent)
    forked = site.soon(owner.send, "POST", "/fork", {"Content-Type": "application/json"}, order)
    until(lambda: site.store().read(key(call)).repeats >= 2, "the parent and its child do not both wait")
    (child,) = parent.children()
    own = sockets(child) - inherited
    assert own or site.on_sqlite
    assert not own & sockets(parent)
    site.open(call, pid)
    mine = [201, first.result(LIMIT).json]
    assert forked.result(LIMIT).json == {"parent": mine, "child": mine}
    for number in range(5):
        new = f"{call}-{number}"
        raced = owner.send("POST", "/fork", {"Content-Type": "application/json"}, to_json(call=new, plan={})).json
        assert raced["parent"] == raced["child"]
        assert raced["parent"][0] == 201
        assert len(site.book.read("effects", new)) == 1
    assert len(site.book.read("effects", call)) == 1


# Deployments: each line of the README's table, and the ways of gunicorn to start.


def test_every_store_of_the_readmes_table_is_tried_here() -> None:
    uris = re.findall(r"^\| .* \| `(\w+[+\w]*://.*?)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [uri.split(":")[0] for uri in uris] == ["memory", "sqlite", "postgresql+psycopg", "redis"]


def race(site: Site, service: Service, call: str, repeats: int = 12) -> int:
    """Send a call many times at once and hold it to the promise; gives the process that ran it."""
    answers = [site.soon(service.call, "/run", call, {"gate": call}) for _ in range(repeats)]
    pid = int(site.began(call)["pid"])
    until(lambda: service.show(call).json["repeats"] == repeats - 1, "the repeats do not come")
    for _ in range(10):  # and nobody who waits keeps a worker from its work
        assert service.show(call).json["state"] == "running"
    site.open(call, pid)
    assert len({answer.result(LIMIT).body for answer in answers}) == 1
    assert {answer.result().status for answer in answers} == {201}
    assert sum(not answer.result().replayed for answer in answers) == 1
    assert len(site.book.read("effects", call)) == 1
    return pid


@pytest.mark.parametrize("server", ["gunicorn gthread", "gunicorn gevent"])
def test_one_process_may_keep_its_records_in_memory(server: str, tmp_path: Path, call: str) -> None:
    with contextlib.closing(Site("memory://", tmp_path)) as site, site.serve(server, "--workers", "1") as service:
        race(site, service, call)


def test_several_processes_may_not_keep_their_records_in_memory(tmp_path: Path, call: str) -> None:
    with contextlib.closing(Site("memory://", tmp_path)) as site:
        with site.serve("gunicorn gthread", "--workers", "4") as service:
            refused = service.call("/run", call)
            assert (refused.status, refused.code) == (500, "store_not_shared")
            refused = service.cancel(call)
            assert (refused.status, refused.code) == (500, "store_not_shared")
        assert site.book.read("effects") == []


def test_four_workers_share_a_store(site: Site, call: str) -> None:
    with site.serve("gunicorn gthread", "--workers", "4") as service:
        pids = {race(site, service, f"{call}-{number}") for number in range(4)}
        assert os.getpid() not in pids
        canceled = service.cancel(f"{call}-0")
        assert (canceled.json["state"], canceled.json["status"]) == ("done", 201)
        assert service.call("/run", f"{call}-0", {"gate": f"{call}-0"}).code == "canceled"


@pytest.mark.parametrize("server", ["gunicorn gthread", "gunicorn gevent"])
def test_workers_start_clean_from_a_process_that_has_used_the_store(server: str, site: Site, call: str) -> None:
    done = len(site.book.read("effects"))
    with site.serve(server, "--workers", "2", "--preload", factory="create_used_app") as service:
        (at_import,) = site.book.read("effects")[done:]
        master = psutil.Process(at_import["pid"])
        theirs = sockets(master)
        repeat = service.call("/run", at_import["call"])
        assert (repeat.status, repeat.replayed, repeat.json["pid"]) == (201, True, master.pid)
        for number in range(3):
            assert race(site, service, f"{call}-{number}") != master.pid
        long = site.soon(service.call, "/run", call, {"gate": call})
        pid = site.began(call)["pid"]
        store = site.store()
        claimed = store.read(key(call))
        until(lambda: newer(store.read(key(call)), claimed), "the worker does not renew its leases")
        own = [sockets(worker) - theirs for worker in master.children()]
        assert len(own) == 2
        assert site.on_sqlite or theirs and (own[0] | own[1])
        assert not own[0] & own[1]
        site.open(call, pid)
        assert long.result(LIMIT).status == 201


def newer(seen: Seen, other: Seen) -> bool:
    assert seen.lease_until and other.lease_until
    return seen.lease_until > other.lease_until


def sockets(process: psutil.Process) -> set[int]:
    """The local ports of a process's connections."""
    connections = process.net_connections("tcp")
    return {each.laddr.port for each in connections if each.raddr and each.status == psutil.CONN_ESTABLISHED}


# A store that goes away.


@pytest.fixture(scope="module", params=[PostgresServer, RedisServer], ids=["postgres", "redis"])
def far(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Proxy]]:
    """A store behind a proxy, on a server of its own."""
    server: Server
    with request.param() as server, Proxy(server.port) as proxy:
        uri = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        with contextlib.closing(Site(uri, tmp_path_factory.mktemp("site"), RUNONCE_LEASE=30)) as site:
            yield site, proxy


@pytest.fixture(scope="module")
def far_owner(far: tuple[Site, Proxy]) -> Iterator[Service]:
    with far[0].serve("gunicorn gthread", "--workers", "1") as service:
        yield service


@pytest.mark.parametrize("away", [Proxy.refuse, Proxy.fall_silent], ids=["refusing", "silent"])
def test_a_store_that_is_away_refuses_and_comes_back(
    away: Callable[[Proxy], None],
    far: tuple[Site, Proxy],
    far_owner: Service,
    call: str,
    record_property: Callable[[str, object], None],
) -> None:
    site, proxy = far
    pid = far_owner.call("/run", f"{call}-before").json["pid"]
    away(proxy)
    began = time.monotonic()
    new = site.soon(far_owner.call, "/run", call)
    others = [site.soon(far_owner.cancel, f"{call}-other"), site.soon(far_owner.show, f"{call}-before")]
    refused = new.result(LIMIT)
    record_property("seconds_until_refused", round(time.monotonic() - began, 2))
    assert (refused.status, refused.code, refused.json["retryable"]) == (503, "store_unavailable", True)
    assert int(refused.retry_after or 0) > 0
    assert [other.result(LIMIT).code for other in others] == ["store_unavailable"] * 2
    assert site.book.read("effects", call) == []
    proxy.recover()
    after = until(lambda: answered(far_owner, f"{call}-after"), "the store does not come back")
    assert after.json["pid"] == pid
    assert far_owner.call("/run", f"{call}-before").replayed
    # What was refused has not run. A claim that arrives so late that its process has given it back already is burned.
    in_the_end = until(lambda: answered(far_owner, call), "the refused call is not answered")
    assert (in_the_end.status, len(site.book.read("effects", call))) in {(201, 1), (500, 0)}


def test_a_store_that_is_away_at_the_end_of_a_run_is_told_of_it_later(
    far: tuple[Site, Proxy], far_owner: Service, call: str
) -> None:
    site, proxy = far
    first = site.soon(far_owner.call, "/run", call, {"gate": call})
    pid = site.began(call)["pid"]
    proxy.refuse()
    site.open(call, pid)
    assert first.result(LIMIT).status == 201
    refused = far_owner.call("/run", call, {"gate": call})
    assert (refused.status, refused.code) == (503, "store_unavailable")
    proxy.recover()
    repeat = until(lambda: answered(far_owner, call, {"gate": call}), "the store does not come back")
    assert (repeat.status, repeat.replayed, repeat.body) == (201, True, first.result().body)
    assert len(site.book.read("effects", call)) == 1


def answered(service: Service, call: str, plan: Mapping[str, Any] | None = None) -> Reply | None:
    """The answer of a call, None while there is none to be had."""
    reply = service.call("/run", call, plan)
    return None if reply.code in ("store_unavailable", "still_running") else reply


def test_a_file_that_stays_locked_refuses_and_is_told_later(tmp_path: Path, call: str) -> None:
    file = tmp_path / "runonce.db"
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(contextlib.closing(Site(f"sqlite:///{file}", tmp_path, RUNONCE_LEASE=30)))
        service = stack.enter_context(site.serve("gunicorn gthread", "--workers", "1"))
        first = site.soon(service.call, "/run", call, {"gate": call})
        pid = site.began(call)["pid"]
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as somebody:
            somebody.execute("BEGIN IMMEDIATE")
            new = site.soon(service.call, "/run", f"{call}-new")
            site.open(call, pid)
            assert first.result(LIMIT).status == 201
            assert (new.result(LIMIT).status, new.result().code) == (503, "store_unavailable")
            assert site.book.read("effects", f"{call}-new") == []
            somebody.execute("ROLLBACK")
        repeat = service.call("/run", call, {"gate": call})
        assert (repeat.status, repeat.replayed, repeat.body) == (201, True, first.result().body)
        assert service.call("/run", f"{call}-new").status == 201
