"""What the driver for asyncio does in its own way."""

import asyncio
import threading

import httpx
import pytest

from flask_runonce.client import AsyncToolClient, Retry, Stopped
from flask_runonce.client.cancellation import WHILE_RUNNING

from .app import CANCELABLE, HELD, LIMIT, FailsTwice, serving
from .conftest import CHAT, QUICK


@pytest.fixture
def url(server):
    return "http://{}:{}".format(*server)


def answering(answer, **options):
    """A client whose requests `answer(request)` answers."""
    return AsyncToolClient("http://app", CHAT, transport=httpx.MockTransport(answer), **options)


async def happened(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, LIMIT)


def test_a_canceled_task_sends_the_cancel_and_ends_as_canceled(url, effects):
    async def main():
        async with AsyncToolClient(url, CHAT) as client:
            call = client.call("POST", "/effects", tool_call_id="a", json={"n": CANCELABLE}, cancel_on_stop=True)
            task = asyncio.create_task(call)
            await happened(effects.started)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await client.calls()

    (call,) = asyncio.run(main())
    assert call["canceled"]


def test_a_canceled_task_ends_at_once(url, effects):
    async def main():
        async with AsyncToolClient(url, CHAT, retry=QUICK) as client:
            task = asyncio.create_task(client.call("POST", "/effects", tool_call_id="a", json={"n": HELD}))
            await happened(effects.started)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert not effects.let_go.is_set(), "the run goes on"
    assert effects.counts == {HELD: 1}


def test_a_stop_ends_an_attempt_and_says_what_became_of_the_call(url, effects):
    async def main():
        stop = asyncio.Event()
        async with AsyncToolClient(url, CHAT) as client:
            json = {"n": CANCELABLE}
            call = client.call("POST", "/effects", tool_call_id="a", json=json, stop=stop, cancel_on_stop=True)
            task = asyncio.create_task(call)
            await happened(effects.started)
            stop.set()
            with pytest.raises(Stopped) as caught:
                await task
        return caught.value.cancellation

    cancellation = asyncio.run(main())
    assert cancellation.text == WHILE_RUNNING
    assert cancellation.response.json()["square"] == 196


def test_a_stop_leaves_nothing_running(url, effects):
    async def main():
        stop = asyncio.Event()
        async with AsyncToolClient(url, CHAT) as client:
            task = asyncio.create_task(client.call("POST", "/effects", tool_call_id="a", json={"n": HELD}, stop=stop))
            await happened(effects.started)
            stop.set()
            with pytest.raises(Stopped):
                await task
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_stop_before_the_call_keeps_it_from_being_sent():
    async def main():
        stop = asyncio.Event()
        stop.set()
        paths = []

        def answer(request):
            paths.append(request.url.path)
            return httpx.Response(200)

        async with answering(answer) as client:
            with pytest.raises(Stopped):
                await client.call("POST", "/", tool_call_id="a", stop=stop)
        return paths

    assert asyncio.run(main()) == []


def test_a_stop_ends_a_pause():
    async def main():
        stop = asyncio.Event()

        def fail(request):
            asyncio.get_running_loop().call_later(0.05, stop.set)
            return httpx.Response(503, headers={"Retry-After": "3600"})

        async with answering(fail, retry=Retry(window=7200)) as client:
            with pytest.raises(Stopped):
                await client.call("POST", "/", tool_call_id="a", stop=stop)

    asyncio.run(main())


def test_a_fault_after_a_stop_is_the_stop():
    async def main():
        stop = asyncio.Event()

        def fail(request):
            stop.set()
            raise httpx.ReadError("Connection reset by peer")

        async with answering(fail, retry=Retry(attempts=1)) as client:
            with pytest.raises(Stopped):
                await client.call("POST", "/", tool_call_id="a", stop=stop)

    asyncio.run(main())


def test_a_result_that_came_in_time_is_not_thrown_away():
    async def main():
        stop = asyncio.Event()

        def answer(request):
            stop.set()
            return httpx.Response(200, text="result")

        async with answering(answer) as client:
            return await client.call("POST", "/", tool_call_id="a", stop=stop)

    assert asyncio.run(main()).text == "result"


def test_a_cancellation_that_is_not_the_callers_is_a_fault():
    """A transport may end a request by canceling it; the caller is well and gets its result."""
    paths = []

    def answer(request):
        paths.append(request.url.path)
        if len(paths) == 1:
            raise asyncio.CancelledError
        return httpx.Response(200, text="result")

    async def main():
        async with answering(answer, retry=QUICK) as client:
            return await client.call("POST", "/", tool_call_id="a", cancel_on_stop=True)

    assert asyncio.run(main()).text == "result"
    assert paths == ["/", "/"]


def test_a_body_that_can_be_read_only_once_is_sent_again_whole():
    app = FailsTwice()

    async def parts():
        yield b"one "
        yield b"two"

    async def main(url):
        async with AsyncToolClient(url, CHAT, retry=QUICK) as client:
            headers = {"Content-Type": "text/plain"}
            await client.call("POST", "/", tool_call_id="a", content=parts(), headers=headers)

    with serving(app) as server:
        asyncio.run(main("http://{}:{}".format(*server)))
    assert app.sent == [("text/plain", b"one two")] * 3
