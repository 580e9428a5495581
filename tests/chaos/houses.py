"""The durable stores, each with what can happen to it: where a store lives, and the harm that is done there."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos.proxy import Proxy
from tests.services import PostgresServer, RedisServer, Server

Pause = Callable[[float], object]
"""Waits so many leases, or until the storm is over."""
Harm = Callable[[random.Random, Pause], None]
"""Does harm, and undoes it before it returns."""


class House(NamedTuple):
    """A store's URI, the harm that can be done to it by name, and what counts the replies that were cut."""

    uri: str
    harms: dict[str, Harm]
    cut_replies: Callable[[], int] = int


class DurablePostgres(PostgresServer):
    """With PostgreSQL's own defaults for what a crash may lose: nothing."""

    def command(self) -> Sequence[str | Path]:
        return (*super().command(), "-c", "fsync=on", "-c", "full_page_writes=on")


@contextlib.contextmanager
def sqlite_house(folder: Path) -> Iterator[House]:
    """A file in WAL mode. Beside the killed workers, its harm is somebody else who writes for long."""
    path = folder / "runonce.db"

    def lock(rng: random.Random, pause: Pause) -> None:
        with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            pause(rng.uniform(0.1, 0.7))
            connection.execute("ROLLBACK")

    yield House(f"sqlite:///{path}", {"file locked": lock})


@contextlib.contextmanager
def redis_house(folder: Path) -> Iterator[House]:
    """Redis that has every write on disk before it answers, behind a proxy."""
    with RedisServer("--appendfsync", "always") as server, Proxy(server.port) as proxy:
        yield House(f"redis://127.0.0.1:{proxy.port}/0", _harms(server, proxy), lambda: proxy.cut_replies)


@contextlib.contextmanager
def postgres_house(folder: Path) -> Iterator[House]:
    """PostgreSQL with its default durability, behind a proxy."""
    with DurablePostgres() as server, Proxy(server.port) as proxy:
        url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        yield House(url, _harms(server, proxy), lambda: proxy.cut_replies)


HOUSES = {"sqlite": sqlite_house, "postgres": postgres_house, "redis": redis_house}


def _harms(server: Server, proxy: Proxy) -> dict[str, Harm]:
    def restart(rng: random.Random, pause: Pause) -> None:
        server.stop()
        pause(rng.uniform(0, 1))
        server.start()

    def crash(rng: random.Random, pause: Pause) -> None:
        server.kill()
        pause(rng.uniform(0, 1))
        server.start()

    def freeze(rng: random.Random, pause: Pause) -> None:
        server.pause()
        try:
            pause(rng.uniform(0.2, 2))
        finally:
            server.resume()

    def cut(rng: random.Random, pause: Pause) -> None:
        proxy.cut()

    def cut_in_reply(rng: random.Random, pause: Pause) -> None:
        proxy.cut_in_reply(rng.randint(1, 20))
        pause(0.25)
        proxy.recover()

    def refuse(rng: random.Random, pause: Pause) -> None:
        proxy.refuse()
        pause(rng.uniform(0.2, 1.5))
        proxy.recover()

    def fall_silent(rng: random.Random, pause: Pause) -> None:
        proxy.fall_silent()
        pause(rng.uniform(0.2, 2))
        proxy.recover()

    return {
        "restarts": restart,
        "crashes": crash,
        "frozen": freeze,
        "connections cut": cut,
        "cut in mid-reply": cut_in_reply,
        "connections refused": refuse,
        "silences": fall_silent,
    }
