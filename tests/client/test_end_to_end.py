"""The client and the real middleware together: lost answers, stuck threads, an interrupted batch."""

import itertools
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx

from flask_runonce import RunOnceMiddleware
from flask_runonce.client.cancellation import FINISHED, NO_RESULT, NOT_RUN, WHILE_RUNNING

from .app import CANCELABLE, LIMIT, serving
from .conftest import CHAT, QUICK
from .faulty_proxy import Fault, FaultyProxy

CALLS = 1000


def faults():
    """Half of the requests are hit, each fault equally often but the slow one, in a fixed order without a pattern."""
    order = [fault for fault in Fault if fault not in (Fault.NONE, Fault.DELAY)] * 12 + [Fault.DELAY] * 2
    order += [Fault.NONE] * len(order)
    random.Random(1).shuffle(order)
    return itertools.cycle(order).__next__


def test_a_thousand_calls_through_a_faulty_proxy_have_a_thousand_effects(effects, server, kind):
    silence = httpx.Timeout(LIMIT, read=0.5)
    with (
        FaultyProxy(server, faults()) as proxy,
        closing(kind(proxy.url, CHAT, retry=QUICK, timeout=silence)) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def call(n):
            return client.call("POST", "/effects", tool_call_id=f"call-{n}", json={"n": -n})

        responses = list(threads.map(call, range(CALLS)))

    assert [response.status_code for response in responses] == [201] * CALLS
    assert [response.json() for response in responses] == [{"n": -n, "square": n * n} for n in range(CALLS)]
    assert effects.counts == dict.fromkeys(range(0, -CALLS, -1), 1)
    assert set(proxy.seen) == set(Fault)
    assert proxy.seen.total() - proxy.seen[Fault.NONE] > CALLS / 2


def test_fifty_cancels_at_once_with_one_server_thread_stuck(effects, connect, caplog):
    ids = [f"call-{n}" for n in range(50)]
    under_way = threading.Barrier(50, timeout=LIMIT)
    let_go = threading.Event()
    app = RunOnceMiddleware(effects)

    @app.on_cancel
    def stick(call):
        under_way.wait()
        if call.key.tool_call_id == ids[7]:
            assert let_go.wait(LIMIT)

    caplog.clear()  # of what the middleware said when it was made
    with serving(app) as server:
        client = connect(server)
        try:
            answers = client.cancel_all(ids, timeout=5)
        finally:
            let_go.set()
    assert list(answers) == ids
    assert [call_id for call_id, answer in answers.items() if answer.received is None] == [ids[7]]
    assert [answers[call_id].text for call_id in ids[6:9]] == [NOT_RUN, NO_RESULT, NOT_RUN]
    warnings = [record.tool_call_id for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [ids[7]]


def test_an_interrupted_batch_gets_a_true_text_for_each(client, effects):
    """One running, one done, one never sent, and an edit."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(client.call, "POST", "/effects", tool_call_id="running", json={"n": CANCELABLE})
        assert effects.started.wait(LIMIT)
        client.call("POST", "/effects", tool_call_id="done", json={"n": 3})
        client.call("PUT", "/effects", tool_call_id="edit", json={"n": 4})

        answers = client.cancel_all(["running", "done", "never-sent", "edit"])

    assert {call_id: answer.text for call_id, answer in answers.items()} == {
        "running": WHILE_RUNNING,
        "done": FINISHED,
        "never-sent": NOT_RUN,
        "edit": FINISHED,
    }
    assert answers["running"].response.json() == running.result().json()
    assert answers["done"].response.json()["square"] == 9
    assert answers["edit"].response.json()["square"] == 16
    assert answers["never-sent"].response is None


def test_a_server_that_lost_its_memory_cannot_vouch(client):
    """The call was made a minute ago; the server has begun empty since."""
    assert client.cancel("a", age=60).text == NO_RESULT
