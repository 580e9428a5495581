"""`python -m tests.benchmarks` in the smallest form that measures everything once: it runs, and fills its page."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import growth, page, served

TABLES = {
    "Beside the same app without it": 7,
    "As the memory store grows": 2,
    "As SQLite grows": 2,
    "What records cost in memory": 3,
    "Waiting": 6,
    "Threads in each other's way": 2,
    "Import": 1,
}
"""The page's headings, and how many rows their tables have at least."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def shrink(module: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        monkeypatch.setattr(module, name, make(getattr(module, name)))

    def one_store(wait: Callable[..., Any]) -> Callable[..., Any]:
        measured = cache(lambda server: wait(server, "memory://", 1))
        return lambda server, uri, times: measured(server)

    shrink(benchmarks, "compare", lambda compare: lambda bare, subjects, **_: compare(bare, subjects, rounds=2, size=2))
    for store in ("memory", "sqlite"):
        shrink(growth, store, lambda grow: lambda sizes, rounds: grow([100, 200], 2))
    shrink(growth, "kept", lambda kept: partial(kept, 100))
    shrink(growth, "_bytes_of_a_record", lambda size: partial(size, 10))
    shrink(served, "waiting", one_store)
    shrink(served, "contention", lambda contend: lambda rounds, seconds: contend(2, 0.01))
    shrink(served, "import_time", lambda measure: lambda times: measure(2))


@pytest.mark.usefixtures("small")
def test_every_table_is_filled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "performance.md"
    before, _, after = page.PAGE.read_text("utf-8").partition(page.BEGIN)
    copy.write_text(f"{before}{page.BEGIN}\nan earlier run's\n{page.END}{after.partition(page.END)[2]}", "utf-8")
    monkeypatch.setattr(page, "PAGE", copy)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", "--write"])
    benchmarks.main()
    written = copy.read_text("utf-8")
    assert (written.partition(page.BEGIN)[0], written.partition(page.END)[2]) == (before, after.partition(page.END)[2])
    measured = written.partition(page.BEGIN)[2].partition(page.END)[0]
    assert "an earlier run's" not in measured
    assert measured.strip() in capsys.readouterr().out
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", measured, re.MULTILINE))
    assert sections.keys() == TABLES.keys()
    for heading, rows in TABLES.items():
        cells = re.findall(r"^\| (?!---)(.*) \|$", sections[heading], re.MULTILINE)[1:]
        assert len(cells) >= rows, heading
        assert all(re.search(r"\d", cell.partition(" | ")[2]) for cell in cells), sections[heading]
