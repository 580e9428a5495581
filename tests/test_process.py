"""What belongs to one process, and what a fork must not cut in two. Forks of real stores are in `store_contract.py`."""

from __future__ import annotations

import threading

from flask_runonce.process import ForkGate
from flask_runonce.testing.store_contract import in_child, needs_fork, together
from tests.services import LIMIT, until


@needs_fork
def test_a_fork_waits_until_nobody_is_inside() -> None:
    gate = ForkGate(limit=LIMIT)
    inside, forking = threading.Event(), threading.Event()
    order = []

    def stay() -> None:
        with gate:
            inside.set()
            assert forking.wait(LIMIT)
            order.append("left")

    def fork() -> str:
        assert inside.wait(LIMIT)
        forking.set()
        return in_child(lambda: " ".join(order))

    assert together(stay, fork) == [None, "left"]


def test_who_comes_while_a_fork_goes_on_waits_for_its_end() -> None:
    gate = ForkGate(limit=LIMIT)
    changed = gate._place().changed
    gate._shut()
    order = []

    def pass_through() -> None:
        with gate:
            order.append("passed")

    def end_the_fork() -> None:
        until(lambda: changed._waiters, "nobody waits for the fork")  # type: ignore[attr-defined]
        order.append("forked")
        gate._open()

    together(pass_through, end_the_fork)
    assert order == ["forked", "passed"]


@needs_fork
def test_a_fork_and_who_comes_meanwhile_wait_for_a_while_at_most() -> None:
    gate = ForkGate(limit=0.01)
    with gate:
        assert in_child(lambda: "forked") == "forked"
        gate._shut()  # a fork that does not end

        def pass_through() -> str:
            with gate:
                return "passed"

        assert together(pass_through) == ["passed"]
        gate._open()


@needs_fork
def test_a_child_that_was_forked_inside_has_nobody_inside() -> None:
    gate = ForkGate(limit=0.01)

    def leave() -> str:
        gate.__exit__()
        return str(gate._place().inside)

    with gate:
        assert in_child(leave) == "0"
