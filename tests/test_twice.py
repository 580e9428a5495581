"""`docs/twice.md`: each row of its two tables is tried out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import pytest
from webtest import TestApp
from werkzeug.test import create_environ

from flask_runonce import RunOnce, current_call, errors
from flask_runonce.record import CallKey, Record, State
from flask_runonce.runner import Runner
from flask_runonce.stores import MemoryStore, SQLStore

from .test_docs import CALL, LIMIT, Page

KEY = CallKey("", "chat-1", "call-1")


class Orders:
    """A service that counts its runs. `during` is what its handler does, `now` the clock of its store.

    The store is in memory, or the SQLite file that `file` names. Options are settings.
    """

    opened: list[Orders] = []

    def __init__(self, file: str = "", *, during: Callable[[], Any] = str, **settings: Any) -> None:
        self.runs = 0
        self.now = time.time()
        self.store: Any = MemoryStore(timer=lambda: self.now)
        if file:
            self.store = SQLStore(f"sqlite:///{file}")
            self.store._db._clock = lambda: self.now
        self.app = flask.Flask("orders")
        self.app.config.update({f"RUNONCE_{name.upper()}": value for name, value in settings.items()})
        runonce = RunOnce(self.app, store=self.store)
        self.runner: Runner = self.app.extensions["runonce"].runner

        @self.app.post("/orders")
        @runonce.once
        def order() -> Any:
            self.runs += 1
            return during()

        self.opened.append(self)

    def send(self, call: str = "call-1", **environ: Any) -> tuple[int, str]:
        """Send the call: the answer's status, and the code where it is a refusal."""
        headers = CALL | {"Coder-Tool-Call-Id": call}
        reply = TestApp(self.app, environ).post("/orders", headers=headers, expect_errors=True)
        return reply.status_int, reply.json["code"] if reply.content_type == "application/problem+json" else ""

    def send_around(self, between: Callable[[], Any]) -> int:
        """The runs when the call is sent, `between` happens, and it is sent again."""
        self.send()
        between()
        self.send()
        return self.runs

    def cancel(self) -> None:
        TestApp(self.app).post("/api/v0/tool-calls/call-1/cancel", headers={"Coder-Chat-Id": "chat-1"})

    def die(self) -> None:
        """Leave the call as a process does that is killed during its run, and let its lease end."""
        left = Record(KEY, State.RUNNING, run="of the dead", owner="the dead")
        assert self.store.swap(KEY, "", left, forget_after=3600, lease=30).done
        self.runs += 1
        self.pass_time(31)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def nothing() -> None:
    pass


def the_handler_releases() -> int:
    def release() -> str:
        current_call.release()
        return ""

    return Orders(during=release).send_around(nothing)


def on_lost_rerun() -> int:
    orders = Orders("a.db", on_lost="rerun")
    orders.die()
    assert orders.send() == (200, "")
    return orders.runs


def somebody_forgets() -> int:
    orders = Orders("a.db")
    forget = ["runonce", "forget", "--chat", "chat-1", "call-1"]
    return orders.send_around(lambda: orders.app.test_cli_runner().invoke(args=forget))


def idle_time() -> int:
    orders = Orders("a.db")
    return orders.send_around(lambda: orders.pass_time(3601))


def a_clock_set_far_forward() -> int:
    def order() -> str:
        if orders.runs == 1:
            orders.pass_time(3600 + 31)
            assert orders.send() == (200, "")
        return ""

    orders = Orders("a.db", during=order)
    orders.send()
    return orders.runs


def data_lost() -> int:
    services = [Orders("a.db"), Orders("b.db")]  # the second is what the first finds, were its file gone
    assert [service.send() for service in services] == [(200, "")] * 2
    return sum(service.runs for service in services)


def restart() -> int:
    processes = [Orders(), Orders()]
    assert [process.send() for process in processes] == [(200, "")] * 2
    return sum(process.runs for process in processes)


def several_stores() -> int:
    several = {"wsgi.multiprocess": True}
    assert Orders().send(**several) == (500, "store_not_shared")
    workers = [Orders(allow_unshared=True) for _ in range(2)]
    assert [worker.send(**several) for worker in workers] == [(200, "")] * 2
    return sum(worker.runs for worker in workers)


def another_key() -> int:
    orders = Orders()
    assert [orders.send("made-first"), orders.send("made-for-the-retry")] == [(200, "")] * 2
    return orders.runs


def at_the_same_moment() -> int:
    def order() -> str:
        started.set()
        assert let_go.wait(LIMIT)
        return ""

    def repeat() -> None:
        repeating.set()
        orders.send()

    started, repeating, let_go = threading.Event(), threading.Event(), threading.Event()
    orders = Orders(during=order)
    threads = [threading.Thread(target=orders.send), threading.Thread(target=repeat)]
    for thread, event in zip(threads, (started, repeating), strict=True):
        thread.start()
        assert event.wait(LIMIT)
    let_go.set()
    for thread in threads:
        thread.join(LIMIT)
    return orders.runs


def client_goes_away() -> int:
    orders = Orders()
    body: Any = orders.app(create_environ("/orders", method="POST", headers=CALL), lambda *_: nothing)
    getattr(body, "close", nothing)()  # what a server does whose connection is gone: it reads nothing of the body
    assert orders.send() == (200, "")
    return orders.runs


def a_long_run() -> int:
    def order() -> str:
        orders.pass_time(365 * 86400)
        assert orders.send() == (409, "still_running")
        return ""

    orders = Orders(during=order, wait_timeout=0)
    return orders.send_around(nothing)


def the_handler_raises() -> int:
    def order() -> str:
        raise LookupError

    orders = Orders(during=order)
    assert [orders.send(), orders.send()] == [(500, ""), (500, "outcome_unknown")]
    return orders.runs


def the_process_is_killed() -> int:
    orders = Orders("a.db")
    orders.die()
    assert orders.send() == (500, "outcome_unknown")
    return orders.runs


def no_store() -> int:
    def out_of_reach(*args: Any, **options: Any) -> Any:
        raise errors.StoreUnavailable("out of reach")

    orders = Orders("a.db")
    orders.send()
    orders.store.swap = out_of_reach
    assert orders.send() == (503, "store_unavailable")
    return orders.runs


def store_out_of_sight() -> int:
    def lose_sight() -> str:
        orders.store.swap = out_of_sight
        return ""

    def out_of_sight(*args: Any, **options: Any) -> Any:
        raise errors.StoreUnavailable("out of sight")

    orders = Orders("a.db", during=lose_sight)
    assert orders.send() == (200, "")
    another_process = Orders("a.db")
    another_process.pass_time(31)
    assert another_process.send() == (500, "outcome_unknown")
    return orders.runs + another_process.runs


def a_late_claim() -> int:
    late: list[Callable[[], Any]] = []
    given_back = threading.Event()

    def into_the_network(*args: Any, **options: Any) -> Any:
        late.append(lambda: swap(*args, **options))
        raise errors.StoreUnavailable("no reply")

    def find_nothing_to_give_back(key: CallKey) -> Any:
        seen = read(key)
        given_back.set()
        return seen

    orders = Orders("a.db", wait_timeout=0)
    swap, orders.store.swap = orders.store.swap, into_the_network
    read, orders.store.read = orders.store.read, find_nothing_to_give_back
    assert orders.send() == (503, "store_unavailable")
    assert given_back.wait(LIMIT)
    orders.store.swap = swap
    late.pop()()
    assert orders.send() == (409, "still_running")
    orders.pass_time(31)
    assert orders.send() == (500, "outcome_unknown")
    assert orders.runs == 0
    orders.send("a-new-id")
    return orders.runs


def a_clock_set_forward() -> int:
    def order() -> str:
        another_process.pass_time(31)
        assert another_process.send() == (500, "outcome_unknown")
        return ""

    orders, another_process = Orders("a.db", during=order), Orders("a.db")
    assert orders.send() == (200, "")
    return orders.runs + another_process.runs


def canceled() -> int:
    orders = Orders()
    runs = orders.send_around(orders.cancel)
    assert orders.send() == (409, "canceled")
    return runs


def canceled_and_released() -> int:
    def order() -> str:
        orders.cancel()
        current_call.release()
        return ""

    orders = Orders(during=order, cancel_timeout=0)
    runs = orders.send_around(nothing)
    assert orders.send() == (409, "canceled")
    return runs


CAN = {
    "the handler released the call": the_handler_releases,
    '`on_lost="rerun"`': on_lost_rerun,
    "somebody forgot the call": somebody_forgets,
    "the idle time is over": idle_time,
    "the host's clock is set forward, on SQLite": a_clock_set_far_forward,
    "the store lost its data": data_lost,
    "the memory store's process was restarted": restart,
    "several processes have a store each": several_stores,
    "the key is another one": another_key,
}
CANNOT = {
    "repeats at the same moment": at_the_same_moment,
    "the client goes away": client_goes_away,
    "the handler takes longer than any time limit": a_long_run,
    "the handler raises": the_handler_raises,
    "the process is killed": the_process_is_killed,
    "the store cannot be reached": no_store,
    "the store is lost from sight during the run": store_out_of_sight,
    "the network delivers a claim to the store after all, when it was already given back": a_late_claim,
    "the host's clock is set by less than the forget time, on SQLite": a_clock_set_forward,
    "the call is canceled, and sent again": canceled,
    "the call was canceled, and its handler releases it": canceled_and_released,
}


@pytest.fixture(autouse=True)
def close_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    while Orders.opened:
        Orders.opened.pop().store.close()


def test_the_tables_have_the_rows_that_are_tried_out() -> None:
    page = Page("twice")
    assert [row[0] for row in page.table("it can")] == list(CAN)
    assert [row[0] for row in page.table("it cannot")] == list(CANNOT)


@pytest.mark.parametrize("way", CAN)
def test_it_can(way: str) -> None:
    assert CAN[way]() == 2


@pytest.mark.parametrize("way", CANNOT)
def test_it_cannot(way: str) -> None:
    assert CANNOT[way]() == 1
