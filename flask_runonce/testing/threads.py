"""Several threads at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

LIMIT = 60.0
"""Seconds after which what a test waits for will not come any more."""


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Call all at the same moment, each in a thread of its own, and give what they returned, in order.

    Raises what the first of them raised, and AssertionError when one does not come back within `LIMIT`.
    """
    barrier = threading.Barrier(len(functions))
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            barrier.wait(LIMIT)
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        if thread.is_alive():
            raise AssertionError("A thread does not come back.")
    if errors:
        raise errors[0]
    return results
