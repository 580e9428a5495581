"""A store that several processes share, with the judged app in each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flask import Flask

from flask_runonce.stores import Store, open_store
from tests.chaos.app import create_app
from tests.chaos.book import Book
from tests.chaos.client import Service
from tests.servers import serve
from tests.services import until

LEASE = 1


class Site:
    """A store that several processes share, and the book that they write their runs into."""

    def __init__(self, uri: str, folder: Path, **config: Any) -> None:
        self.book = Book(folder)
        self.log = folder / "log"
        self.config = {"BOOK": str(folder), "RUNONCE_STORE_URI": uri, "RUNONCE_LEASE": LEASE, **config}
        self._closing = contextlib.ExitStack()
        self._pool = ThreadPoolExecutor(64)

    @property
    def on_sqlite(self) -> bool:
        """Whether the store is a file: then there are no connections to look at."""
        return str(self.config["RUNONCE_STORE_URI"]).startswith("sqlite")

    @contextlib.contextmanager
    def serve(self, server: str, *options: str, factory: str = "create_app") -> Iterator[Service]:
        env = {f"CHAOS_{name}": str(value) for name, value in self.config.items()}
        with serve(server, f"tests.chaos.app:{factory}", *options, log=self.log, env=env) as url:
            yield Service(urlsplit(url).port or 0)

    def store(self) -> Store:
        """A store of this process, closed at the end."""
        store = open_store(self.config["RUNONCE_STORE_URI"])
        self._closing.callback(store.close)
        return store

    def app(self, store: Store | None = None, **config: Any) -> Flask:
        """The app in this process."""
        return create_app({**self.config, **config}, store=store or self.store())

    def soon(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do `work` in a thread."""
        return self._pool.submit(work, *args)

    def began(self, call: str, runs: int = 1) -> Mapping[str, Any]:
        """Wait until the call has begun that many runs; gives what the last one wrote."""
        until(lambda: len(self.book.read("effects", call)) >= runs, f"{call} does not run")
        return self.book.read("effects", call)[-1]

    def open(self, call: str, pid: int) -> None:
        """Let that process's run of the call go on."""
        self.book.gate(call, pid).touch()

    def close(self) -> None:
        self._pool.shutdown()
        self._closing.close()
