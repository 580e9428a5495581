"""`python -m examples.incident.demo --page`: the demo's page, found as someone finds it who has just started it."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).parents[2]
LIMIT = 120
"""Seconds that the demo may take to say where its page is."""


@pytest.fixture(scope="module")
def demo() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "examples.incident.demo", "--page"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def page(demo: subprocess.Popen[str]) -> SplitResult:
    assert demo.stdout
    for line in demo.stdout:
        if found := re.match(r"Look at the calls: (http://\S+)", line):
            return urlsplit(found[1])
    raise AssertionError("The demo does not say where its page is.")


def get(page: SplitResult, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(page.hostname or "", page.port, timeout=LIMIT)
    try:
        connection.request("GET", page.path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def test_the_call_that_was_sent_often_is_on_the_first_page(page: SplitResult) -> None:
    status, text = get(page)
    assert status == 200
    lines = [
        [cell.get_text().strip() for cell in row.select("td")]
        for row in BeautifulSoup(text, "html.parser").select("tr")
    ]
    (storm,) = [line for line in lines if line and line[0].startswith("storm-")]
    assert storm[1:5] == ["done", "201", "36", "once"]


def test_only_this_machine_is_let_in_by_its_address(page: SplitResult) -> None:
    assert get(page, Host=f"evil.example:{page.port}")[0] == 403


def test_it_is_served_until_it_is_interrupted(demo: subprocess.Popen[str], page: SplitResult) -> None:
    assert demo.poll() is None
    demo.send_signal(signal.SIGINT)
    assert demo.wait(LIMIT) == 0
