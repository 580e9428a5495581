import asyncio
import contextlib
import threading

import httpx
import pytest

from flask_runonce.client import AsyncToolClient, Retry, ToolClient

from .app import LIMIT, Effects, Recorded, serving

CHAT = "11111111-1111-1111-1111-111111111111"
QUICK = Retry(first_pause=0.005, longest_pause=0.05)


class Blocking:
    """An AsyncToolClient used like a ToolClient: its methods run on an event loop in another thread."""

    def __init__(self, *args, **options):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._client = AsyncToolClient(*args, **options)

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._run(method(*args, **kwargs))

    def close(self):
        self._run(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT)


@pytest.fixture(params=[ToolClient, Blocking], ids=["threads", "asyncio"])
def kind(request):
    """Either kind of client, to be used in the same way."""
    return request.param


@pytest.fixture
def connect(kind):
    """Makes a client for a server (host, port), and closes it."""
    with contextlib.ExitStack() as clients:

        def connect(server, **options):
            options = {"retry": QUICK, "timeout": httpx.Timeout(LIMIT), **options}
            client = kind("http://{}:{}".format(*server), CHAT, **options)
            clients.callback(client.close)
            return client

        yield connect


@pytest.fixture
def effects():
    effects = Effects()
    yield effects
    effects.let_go.set()


@pytest.fixture
def app(effects):
    return Recorded(effects)


@pytest.fixture
def server(app):
    with serving(app) as address:
        yield address


@pytest.fixture
def client(server, connect):
    return connect(server)


@pytest.fixture
def when():
    """`when(event, action)`: do the action in a thread of its own when the event has happened."""
    threads = []

    def when(event, action):
        def wait():
            assert event.wait(LIMIT)
            action()

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield when
    for thread in threads:
        thread.join()
