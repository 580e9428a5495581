"""What each of several processes does when all of them send the same calls at the same moment."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import Any

from flask_runonce.stores import open_store
from tests.chaos.app import create_app, send

LIMIT = 60
THREADS = 16


def claim(config: Mapping[str, Any], rounds: int, together: Barrier, report: Any) -> None:
    """Send `rounds` calls, each from `THREADS` threads at the moment at which the other processes of `together` do.

    Puts on the queue `report` the answers of each round, as status and text, and the lines of the log.
    """
    lines: list[str] = []
    log = logging.Handler()
    log.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(log)
    with contextlib.closing(open_store(config["RUNONCE_STORE_URI"])) as store:
        app = create_app(config, store=store)
        ready = threading.Barrier(THREADS, action=functools.partial(together.wait, LIMIT))  # type: ignore[arg-type]

        def one(_: int) -> list[tuple[int, str]]:
            answers = []
            for number in range(rounds):
                ready.wait(LIMIT)
                answer = send(app, "/run", f"round-{number}", {"seconds": number % 3 * 0.02})
                answers.append((answer.status_code, answer.text))
            return answers

        with ThreadPoolExecutor(THREADS) as pool:
            by_thread = list(pool.map(one, range(THREADS)))
    report.put(([list(answers) for answers in zip(*by_thread, strict=True)], lines))
