"""The tables, as Markdown, and their place in the documentation."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence

from tests.benchmarks.compare import SITUATIONS, Compared, Spread
from tests.benchmarks.growth import FEW, Grown, Kept
from tests.benchmarks.served import REPEATS, THREADS, Contention
from tests.servers import ROOT

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "% Measured: written by python -m tests.benchmarks --write", "% End of what is measured."
PACKAGES = (
    "flask",
    "werkzeug",
    "sqlalchemy",
    "redis",
    "waitress",
    "gunicorn",
    "idemkit",
    "flask-once",
    "flask-caching",
)

TARGETS = {
    "`RunOnceMiddleware`, memory": ("1.02", "1.30", "0.12"),
    "`once` in Flask, memory": ("1.02", "1.35", "0.95"),
    "`RunOnceMiddleware`, SQLite (WAL)": ("1.02", "2.8", "0.9"),
    "`RunOnceMiddleware`, Redis": ("1.02", "4.2", "1.6"),
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def where() -> str:
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    day = datetime.datetime.now(datetime.timezone.utc).date()
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    return f"Measured on {day}, on a machine with {machine}; {', '.join(versions)}."


def ratios(compared: Compared) -> str:
    rows = []
    for name, found in compared.ratios.items():
        targets = TARGETS.get(name, ("", "", ""))
        cells = [str(found.get(situation, "refused")) for situation in SITUATIONS]
        rows.append([name, *cells, ", ".join(filter(None, targets)) or "–"])
    text = f"The bare app takes {1e6 * compared.bare:.0f} µs for a request. That is 1 in this table."
    return f"## Beside the same app without it\n\n{text}\n\n" + table(["", *SITUATIONS, "target"], rows)


def growth(store: str, grown: Sequence[Grown]) -> str:
    rows = [[f"{each.records:,}", str(each.first_run), str(each.repeat)] for each in grown]
    head = ["records kept", "first run", "repeat"]
    return f"## As {store} grows\n\nBeside the same with {FEW} records.\n\n" + table(head, rows)


def kept(measured: Kept) -> str:
    rows = [
        ["a record takes, besides its body", f"{measured.bytes:,.0f} bytes", "1,000"],
        ["a full garbage collection takes longer, with 100,000 records", f"{measured.collection:.0f} ms", "20"],
        ["the longest request while 100,000 records expire at once", f"{measured.forgetting:.1f} ms", "5"],
    ]
    return "## What records cost in memory\n\n" + table(["", "measured", "target"], rows)


def waiting(measured: Mapping[tuple[str, str], tuple[float, float]]) -> str:
    rows = [[*which, f"{last:.2f}", f"{middle:.2f}"] for which, (last, middle) in measured.items()]
    text = (
        f"{REPEATS} repeats of a run of 200 ms arrive with it, at a server with {THREADS} threads. From the first byte"
    )
    text += " sent to the answers, in multiples of the run; the target is 1.15."
    return f"## Waiting\n\n{text}\n\n" + table(["server", "store", "last answer", "median answer"], rows)


def contention(measured: Contention) -> str:
    text = (
        f"Requests a second through waitress with {THREADS} threads, divided by those with one. {THREADS} connections"
    )
    text += " ask, each on calls of its own. The second row is divided by the first; the target is 0.95."
    rows = [["bare app", str(measured.bare)], ["`RunOnceMiddleware`, memory, beside the bare app", str(measured.ours)]]
    return f"## Threads in each other's way\n\n{text}\n\n" + table(["", "8 threads / 1 thread"], rows)


def import_time(measured: Spread) -> str:
    rows = [["`import flask_runonce` after `import flask`", f"{measured} ms", "15 ms"]]
    return "## Import\n\n" + table(["", "measured", "target"], rows)


def write(tables: Sequence[str]) -> None:
    """Put the tables where the page has those of an earlier run. What is written around them stays."""
    text = PAGE.read_text("utf-8")
    found = re.search(f"(?<={re.escape(BEGIN)}\n).*(?={re.escape(END)})", text, re.DOTALL)
    assert found, f"{PAGE.name} does not say where the tables stand"
    body = "\n\n".join(tables)
    PAGE.write_text(f"{text[: found.start()]}\n{body}\n\n{text[found.end() :]}", "utf-8")
