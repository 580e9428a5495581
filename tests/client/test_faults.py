"""A proxy loses requests and answers; still each call has one effect and one right result."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

from .conftest import CHAT, QUICK
from .faulty_proxy import Fault, FaultyProxy
from .tiny import LIMIT, Effects, TinyRunOnce, serving

CALLS = 1000


def library(app):
    from flask_runonce import RunOnceMiddleware

    return RunOnceMiddleware(app)


def faults():
    """Half of the requests are hit, each fault equally often, in a fixed order without a pattern."""
    order = [fault for fault in Fault if fault is not Fault.NONE] * 20
    order += [Fault.NONE] * len(order)
    random.Random(1).shuffle(order)
    return itertools.cycle(order).__next__


@pytest.mark.parametrize("run_once", [TinyRunOnce, library])
def test_a_thousand_calls_through_a_faulty_proxy_have_a_thousand_effects(run_once, kind):
    effects = Effects()
    silence = httpx.Timeout(LIMIT, read=0.5)
    with (
        serving(run_once(effects)) as server,
        FaultyProxy(server, faults()) as proxy,
        closing(kind(proxy.url, CHAT, retry=QUICK, timeout=silence)) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def call(n):
            return client.call("POST", "/effects", tool_call_id=f"call-{n}", json={"n": n})

        responses = list(threads.map(call, range(CALLS)))

    assert [response.status_code for response in responses] == [201] * CALLS
    assert [response.json() for response in responses] == [{"n": n, "square": n * n} for n in range(CALLS)]
    assert effects.counts == dict.fromkeys(range(CALLS), 1)
    assert set(proxy.seen) == set(Fault)
    assert proxy.seen.total() - proxy.seen[Fault.NONE] > CALLS / 2
