"""One Flask app with one view, guarded in every way that is compared, and the request that it is asked with."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import logging
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flask

from flask_runonce import RunOnce, RunOnceMiddleware
from flask_runonce.stores import MemoryStore, RedisStore, SQLStore, Store
from tests.services import RedisServer

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication, WSGIEnvironment

BODY = b'{"command": "%s"}' % (b"x" * 185)
"""200 bytes of JSON."""
ROOM = 4 * 2**30
"""Bytes that a memory store may hold: no run of the benchmarks fills it."""
CALLS_OF_A_CHAT = 10

_count = itertools.count()


@dataclass(frozen=True)
class Subject:
    """An app that is measured. `cpu`: it does all of its work in the thread that asks it, without waiting."""

    name: str
    app: WSGIApplication
    cpu: bool = True
    needs_key: bool = False


def new_ids() -> tuple[str, str]:
    """A chat ID and a tool call ID that were not used before; some calls share a chat."""
    number = next(_count)
    chat = uuid.uuid5(uuid.NAMESPACE_OID, str(number // CALLS_OF_A_CHAT))
    return str(chat), str(uuid.uuid4())


def environ_of(ids: tuple[str, str] | None) -> WSGIEnvironment:
    """A POST of `BODY`, with the headers of a call for ours and for the peers, or with none."""
    environ: WSGIEnvironment = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/run",
        "QUERY_STRING": "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "localhost",
        "HTTP_ACCEPT": "*/*",
        "HTTP_USER_AGENT": "bench",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(BODY)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(BODY),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    if ids:
        environ["HTTP_CODER_CHAT_ID"], environ["HTTP_CODER_TOOL_CALL_ID"] = ids
        environ["HTTP_IDEMPOTENCY_KEY"] = environ["HTTP_IDEMPOTENT_KEY"] = ids[1]
    return environ


def ask(app: WSGIApplication, environ: WSGIEnvironment) -> bytes:
    """What a server does with a request; the response's body. Fails for any status but 201."""
    statuses: list[str] = []
    body = app(environ, lambda status, *_: statuses.append(status))  # type: ignore[arg-type,return-value]
    data = b"".join(body)
    if close := getattr(body, "close", None):
        close()
    assert statuses[0].startswith("201"), (statuses, data)
    return data


def run() -> tuple[dict[str, Any], int]:
    """The view: it reads the JSON and answers with some."""
    return {"exit_code": 0, "output": flask.request.get_json()["command"]}, 201


def sleep() -> tuple[dict[str, Any], int]:
    """A run of 200 ms. What it does is to take this long."""
    time.sleep(0.2)
    return {"exit_code": 0}, 201


def bare() -> flask.Flask:
    app = flask.Flask("bench")
    app.add_url_rule("/run", view_func=run, methods=["POST"])
    app.add_url_rule("/sleep", view_func=sleep, methods=["POST"])
    return app


def middleware(store: Store, **config: Any) -> WSGIApplication:
    return RunOnceMiddleware(bare(), store=store, guard=bool, config=config)


def decorated(store: Store) -> flask.Flask:
    app = flask.Flask("bench")
    runonce = RunOnce(app, store=store, guard=bool)
    app.add_url_rule("/run", view_func=runonce.once(run), methods=["POST"])
    return app


@contextlib.contextmanager
def sqlite() -> Iterator[SQLStore]:
    """A new database file, with the store's own settings for SQLite: WAL, `synchronous=NORMAL`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(SQLStore(f"sqlite:///{folder}/calls.db")) as store:
        yield store


def ours(redis: RedisServer, stack: contextlib.ExitStack) -> list[Subject]:
    """The library in every form and store."""
    subjects = [
        Subject("`RunOnceMiddleware`, memory", middleware(MemoryStore(max_bytes=ROOM))),
        Subject("`once` in Flask, memory", decorated(MemoryStore(max_bytes=ROOM))),
    ]
    for form, make in (("`RunOnceMiddleware`", middleware), ("`once` in Flask", decorated)):
        database = stack.enter_context(sqlite())
        server = stack.enter_context(contextlib.closing(RedisStore(redis.url, prefix=f"bench{len(subjects)}")))
        subjects.append(Subject(f"{form}, SQLite (WAL)", make(database), cpu=False))
        subjects.append(Subject(f"{form}, Redis", make(server), cpu=False))
    return subjects


def peers() -> list[Subject]:
    """Other packages for the same purpose, as their own pages set them up. One that is not installed is left out."""
    found = []
    if importlib.util.find_spec("idemkit"):
        found.append(Subject("idemkit, memory", _idemkit(), cpu=False))  # it works in a thread of its own
    if importlib.util.find_spec("flask_once"):
        found.append(Subject("flask-once, dict", _flask_once(), needs_key=True))
    if importlib.util.find_spec("flask_caching"):
        found.append(Subject("Flask-Caching, memory", _flask_caching()))
    return found


def _idemkit() -> WSGIApplication:
    from idemkit import HttpConfig, InMemoryBackend, WSGIIdempotencyMiddleware

    logging.getLogger("idemkit").setLevel(logging.ERROR)
    config = HttpConfig(scope=lambda request: "all")
    return WSGIIdempotencyMiddleware(bare(), backend=InMemoryBackend(), config=config)


def _flask_once() -> WSGIApplication:
    import flask_once

    app = flask.Flask("bench")
    app.cache = {}  # type: ignore[attr-defined]
    flask_once.attach(app, app.cache)  # type: ignore[attr-defined]
    app.add_url_rule("/run", view_func=flask_once.idempotent()(run), methods=["POST"])
    return app


def _flask_caching() -> WSGIApplication:
    from flask_caching import Cache

    app = flask.Flask("bench")
    cache = Cache(app, config={"CACHE_TYPE": "SimpleCache", "CACHE_THRESHOLD": 10**7})

    def key_of() -> str | None:
        return flask.request.headers.get("Idempotency-Key")

    view = cache.cached(make_cache_key=lambda *_, **__: key_of(), unless=lambda: key_of() is None)(run)
    app.add_url_rule("/run", view_func=view, methods=["POST"])
    return app


def served(kind: str, uri: str = "") -> WSGIApplication:
    """For a server's process: the bare app, or the guarded one on the store that `uri` names."""
    if kind == "bare":
        return bare()
    return RunOnceMiddleware(bare(), store=uri, guard=bool, config={"RUNONCE_MAX_WAITING": 64})
