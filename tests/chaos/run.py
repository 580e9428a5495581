"""One run of chaos on one store: sets the scene, lets the storm blow, and hands what was seen to the judge."""

from __future__ import annotations

import collections
import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from flask_runonce.stores import open_store
from tests.chaos.app import create_app
from tests.chaos.book import Book
from tests.chaos.client import Service
from tests.chaos.harm import Villain, Workers
from tests.chaos.houses import Harm, House
from tests.chaos.judge import Judge, Limits
from tests.chaos.storm import Storm, Story, count_asked
from tests.servers import serve

WAIT, CANCEL = 2.5, 1.5
"""How long a request waits for a run, and a cancel, in leases."""
STORE = 15.0
"""Seconds that a store which does not answer may cost a request, all its verbs together, on a busy machine."""
CLIENTS = 64
WORKERS = 4


MakeHouse: TypeAlias = Callable[[Path], AbstractContextManager[House]]


class Report(NamedTuple):
    """What was done, in lines for a person, and what was wrong."""

    lines: Sequence[str]
    faults: Sequence[str]
    run_twice: int


def chaos(house: MakeHouse, seconds: float, *, lease: float, seed: int) -> Report:
    """Storm for so many `seconds` on the store of `house`, whose owners have a `lease` of so many seconds.

    The seed makes the plan; what happens is not the same again, because the machine has its say.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="runonce-")))
        place = stack.enter_context(house(folder))
        book, log, pid_file = Book(folder), folder / "log", folder / "pid"
        limits = Limits(WAIT * lease, CANCEL * lease, STORE)
        config = {
            "BOOK": str(folder),
            "RUNONCE_STORE_URI": place.uri,
            "RUNONCE_LEASE": lease,
            "RUNONCE_WAIT_TIMEOUT": limits.wait,
            "RUNONCE_CANCEL_TIMEOUT": limits.cancel,
            "RUNONCE_ALLOW_UNSHARED": place.uri == "memory://",
        }
        own = open_store(place.uri)
        stack.callback(own.close)
        runner = create_app(config, store=own).extensions["runonce"].runner
        url = stack.enter_context(
            serve(
                "gunicorn gthread",
                "tests.chaos.app:create_app",
                *("--workers", str(WORKERS), "--preload", "--pid", str(pid_file)),
                log=log,
                env={f"CHAOS_{name}": json.dumps(value) for name, value in config.items()},
            )
        )
        workers = Workers(pid_file, book)
        storm = Storm(Service(urlsplit(url).port or 0), runner, lease=lease, seed=seed, clients=CLIENTS)
        plots: list[tuple[Mapping[str, Harm], float]] = [
            ({"workers killed": workers.kill}, 1),
            ({"workers frozen past their lease": workers.freeze, "workers frozen for less": workers.stumble}, 0.5),
            (place.harms, 1),
        ]
        with contextlib.ExitStack() as villains:
            gang = [
                villains.enter_context(Villain(harms, rest * lease, pace=lease, seed=seed + number))
                for number, (harms, rest) in enumerate(plots)
                if harms
            ]
            storm.blow(seconds)
        for villain in gang:
            if villain.failure:
                raise villain.failure
        storm.audit()
        judge = Judge(book, limits._replace(frozen=workers.frozen))
        text = log.read_text()
        harm = {name: count for villain in gang for name, count in villain.done.items()}
        if place.cut_replies():
            harm["replies cut"] = place.cut_replies()
        faults = [*judge.faults(storm.stories), *_log_faults(text)]
        return Report(_lines(storm.stories, book, judge, harm, text), faults, judge.run_twice(storm.stories))


def _log_faults(log: str) -> list[str]:
    planned = log.count("RuntimeError: as planned")
    raised = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Unavailable)\b.*$", log, re.MULTILINE)
    others = [line for line in raised if "as planned" not in line]
    faults = [f"the server's log: {line}" for line in dict.fromkeys(others)]
    if log.count("Traceback") > planned and not faults:
        faults.append(f"the server's log has {log.count('Traceback')} tracebacks, of which {planned} were planned")
    return faults


def _warnings(log: str) -> collections.Counter[str]:
    """What the library and gunicorn said, without what differs from one line to the next."""
    lines = (re.sub(r"\d[\d.]*", "N", line)[:110] for line in log.splitlines() if re.match(r"[A-Z\[]\S* \S", line))
    return collections.Counter(line for line in lines if not line.startswith(("Traceback", "[N-N-N")))


def _lines(stories: Sequence[Story], book: Book, judge: Judge, harm: Mapping[str, int], log: str) -> list[str]:
    answers: collections.Counter[str] = collections.Counter()
    cancels: collections.Counter[str] = collections.Counter()
    longest = 0.0
    for story in stories:
        for asked in story.asked:
            reply = asked.reply
            longest = max(longest, asked.over - asked.sent)
            if not reply:
                (cancels if asked.cancel else answers)["no answer (killed, or hung up)"] += 1
            elif asked.cancel:
                state = (reply.json or {}).get("state", "")
                cancels[f"{reply.status} {reply.code or state}"] += 1
            else:
                answers[f"{reply.status} {reply.code or 'replayed' * reply.replayed}".strip()] += 1
    facts = {
        "calls": len(stories),
        "requests, with repeats and cancels": count_asked(stories),
        "effects (runs that began)": judge.effects,
        "calls run twice": judge.run_twice(stories),
        "further runs, by rerun or forget": judge.chosen(stories),
        "lost owners found": len(book.read("lost")),
        "late ends that changed nothing": log.count("its end changes nothing"),
        "saves that had to be tried again": log.count("could not be saved yet"),
        "times that SQLite was locked for too long": log.count("database is locked"),
        "longest request, s": round(longest, 1),
        "longest beyond its waiting time, s": round(judge.slowest(stories), 1),
    }
    return [
        *(f"  {name:42} {value}" for name, value in facts.items()),
        "  harm:",
        *(f"    {name:40} {count}" for name, count in sorted(harm.items())),
        "  answers:",
        *(f"    {name:40} {count}" for name, count in sorted(answers.items())),
        "  cancels:",
        *(f"    {name:40} {count}" for name, count in sorted(cancels.items())),
        "  the log:",
        *(f"    {count:6} x {line}" for line, count in _warnings(log).most_common(8)),
    ]
