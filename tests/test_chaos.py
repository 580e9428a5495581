"""The short form of `python -m tests.chaos`, and proof that its judge finds what it looks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.houses import HOUSES, House
from tests.chaos.run import Report, chaos


@contextlib.contextmanager
def memory(folder: Path) -> Iterator[House]:
    """The store of one process, under several."""
    yield House("memory://", {})


@pytest.fixture(scope="module")
def storms() -> Iterator[Mapping[str, Future[Report]]]:
    """All at the same time, because a storm is mostly waiting."""
    with ThreadPoolExecutor() as pool:
        houses = {**HOUSES, "memory": memory}
        yield {name: pool.submit(chaos, house, 2.5, lease=1, seed=1) for name, house in houses.items()}


@pytest.mark.parametrize("store", HOUSES)
def test_no_call_runs_twice_whatever_dies(store: str, storms: Mapping[str, Future[Report]]) -> None:
    report = storms[store].result()
    print(*report.lines, sep="\n")
    assert report.faults == []


def test_calls_that_run_twice_are_found_out(storms: Mapping[str, Future[Report]]) -> None:
    report = storms["memory"].result()
    assert report.run_twice > 0
    assert any("can be explained" in fault for fault in report.faults)
