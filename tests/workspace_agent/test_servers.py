"""The incident, replayed over HTTP against real servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from examples.workspace_agent import replay
from tests.servers import ROOT, serve
from tests.services import LIMIT

APP = "examples.workspace_agent:create_app"

Until = Callable[[Callable[[], object]], None]


@pytest.mark.parametrize("server", ["gunicorn gthread", "waitress", "flask run"])
def test_the_incident_on_a_server(server: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Without a root the app starts commands in the home folder.
    with serve(server, APP, log=tmp_path / "log", env={"HOME": str(root)}) as url:
        wrong = replay.replay(url, "", root)
    assert wrong == 0, capsys.readouterr().out
    assert (root / "effects").read_text() == "x\n"


def test_the_demo_finds_every_count_right() -> None:
    command = [sys.executable, "-m", "examples.workspace_agent.replay"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert "all counts are right" in ended.stdout


def test_the_demo_finds_wrong_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without run-once nothing is answered from a record."""
    from flask_runonce import RunOnce

    monkeypatch.setattr(RunOnce, "once", lambda self, view: view)
    monkeypatch.setattr(replay, "ATTEMPTS", 2)
    assert replay.main() == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_server_that_stops_in_good_order_ends_its_processes(root: Path, tmp_path: Path, until: Until) -> None:
    with serve("gunicorn gthread", APP, log=tmp_path / "log", env={"HOME": str(root)}) as url:
        caller = replay.Caller(url, "", "chat-1")
        caller.start("call-1", "echo $$ > pid; sleep 300 & echo $! >> pid; echo > done; wait")
        until((root / "done").exists)
        pids = [int(line) for line in (root / "pid").read_text().split()]
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_that_forks_after_it_made_the_app(root: Path, tmp_path: Path) -> None:
    with serve("gunicorn gthread", APP, "--preload", log=tmp_path / "log", env={"HOME": str(root)}) as url:
        caller = replay.Caller(url, "", "chat-1")
        caller.start("call-1", "echo x")
        assert caller.output("call-1")["output"] == "x\n"
