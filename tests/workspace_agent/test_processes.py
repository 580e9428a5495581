from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.workspace_agent import processes
from examples.workspace_agent.processes import Chat, KillError, Process, ProcessTable, Start, StartError

CHAT = Chat("", "chat-1")

Starter = Callable[..., Process]
Offspring = Callable[[], list[psutil.Process]]
Until = Callable[[Callable[[], object]], None]
Gates = Callable[[str], Any]


@pytest.fixture
def table() -> Iterator[ProcessTable]:
    table = ProcessTable()
    yield table
    table.close()


@pytest.fixture
def start(table: ProcessTable, tmp_path: Path) -> Starter:
    def start(command: str, process_id: str = "p", chat: Chat = CHAT, **options: Any) -> Process:
        return table.start(chat, process_id, Start(command, str(tmp_path), **options))[0]

    return start


def text(process: Process) -> str:
    return process.output.read(ended=not process.running).text


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("watch-")]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_runs_the_command_and_keeps_its_end(start: Starter, tmp_path: Path) -> None:
    process = start("echo out; echo err >&2; pwd; cat; exit 3")
    process.wait()
    assert not process.running
    assert process.returncode == 3
    assert text(process) == f"out\nerr\n{tmp_path}\n"
    assert process.exited_at_unix >= process.started_at_unix
    assert not process.canceled and not process.timed_out


def test_environment(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "agent")
    monkeypatch.setenv("BOTH", "agent")
    command = 'echo "$OURS $BOTH $THEIRS [$CODER_CHAT_ID]"'
    env = {"BOTH": "request", "THEIRS": "request", "CODER_CHAT_ID": "another"}
    process = start(command, env=env)
    process.wait()
    assert text(process) == "agent request request [chat-1]\n"
    chatless = start(command, chat=Chat("", ""), env=env)
    chatless.wait()
    assert text(chatless) == "agent request request []\n"


def test_a_second_start_finds_the_first(table: ProcessTable, tmp_path: Path) -> None:
    first, new = table.start(CHAT, "p", Start("sleep 60", str(tmp_path), timeout=100))
    again, again_new = table.start(CHAT, "p", Start("echo other", str(tmp_path), timeout=1))
    assert (new, again_new) == (True, False)
    assert again is first
    assert first.command == "sleep 60"
    assert first.wait_until == first.started_at + 100


def test_starts_at_the_same_time_start_one(table: ProcessTable, tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    answers = []

    def run() -> None:
        barrier.wait()
        answers.append(table.start(CHAT, "p", Start("echo x >> effects", str(tmp_path))))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(new for _, new in answers) == [False] * 7 + [True]
    assert len({id(process) for process, _ in answers}) == 1
    answers[0][0].wait()
    assert (tmp_path / "effects").read_text() == "x\n"


def test_chats_and_scopes_are_apart(table: ProcessTable, start: Starter) -> None:
    chats = [Chat("", "chat-1"), Chat("", "chat-2"), Chat("tenant", "chat-1"), Chat("", "")]
    started = [start(f"echo {number}", chat=chat) for number, chat in enumerate(chats)]
    for number, chat in enumerate(chats):
        assert table.get(chat, "p") is started[number]
        assert table.list(chat) == [started[number]]
        started[number].wait()
        assert text(started[number]) == f"{number}\n"
    assert table.get(CHAT, "other") is None


def test_the_list_has_running_ones_first_newest_first(table: ProcessTable, start: Starter) -> None:
    start("sleep 60", process_id="1")
    start("true", process_id="2").wait()
    start("sleep 60", process_id="3")
    start("true", process_id="4").wait()
    assert [process.id for process in table.list(CHAT)] == ["3", "1", "4", "2"]


@pytest.mark.parametrize(
    "wrong", [{"workdir": "/nowhere"}, {"command": "a\0b"}, {"env": {"A=B": "c"}}, {"env": {"A": "\ud800"}}]
)
def test_what_cannot_be_started_leaves_nothing(table: ProcessTable, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(StartError):
        table.start(CHAT, "p", Start(**{"command": "true", "workdir": str(tmp_path), **wrong}))
    assert len(table) == 0


def test_without_a_thread_to_watch_it_the_process_does_not_run(
    table: ProcessTable, start: Starter, monkeypatch: pytest.MonkeyPatch, until: Until, offspring: Offspring
) -> None:
    start("true").wait()
    before = {child.pid for child in offspring()}

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StartError, match="new thread"):
        start("sleep 60", process_id="q")
    assert {child.pid for child in offspring()} <= before
    until(lambda: table.get(CHAT, "q") is None)


def test_signal_reaches_the_whole_group(start: Starter, until: Until) -> None:
    process = start("sleep 60 & echo $!; wait")
    until(lambda: text(process).endswith("\n"))
    assert process.send(signal.SIGTERM) is True
    process.wait()
    assert process.returncode == -signal.SIGTERM
    assert not process.canceled
    until(lambda: not alive(int(text(process))))


def test_an_exited_process_gets_no_signal(start: Starter) -> None:
    process = start("exit 4")
    process.wait()
    assert process.send(signal.SIGKILL) is False
    process.cancel()
    assert process.returncode == 4 and not process.canceled


def test_cancel_kills_the_group_and_returns_when_it_is_gone(start: Starter, until: Until) -> None:
    process = start("trap '' TERM; (trap '' TERM; sleep 60) & echo $!; sleep 60")
    until(lambda: text(process).endswith("\n"))
    process.cancel()
    assert process.canceled and process.returncode == -signal.SIGKILL
    assert not alive(int(text(process)))
    process.cancel()


def test_canceled_is_not_said_of_a_kill_that_failed(
    start: Starter, monkeypatch: pytest.MonkeyPatch, gates: Gates
) -> None:
    gate = gates("go")
    process = start(f"cat {gate.path}; exit 5")

    def refuse(group: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refuse)
        with pytest.raises(PermissionError):
            process.cancel()
    assert process.running and not process.canceled
    gate.open()
    process.wait()
    assert process.returncode == 5 and not process.canceled


def test_canceled_is_not_said_of_a_process_that_ended_by_itself(
    start: Starter, monkeypatch: pytest.MonkeyPatch, gates: Gates
) -> None:
    """The kill meets a process that has exited and has not been collected yet."""
    gate = gates("go")
    process = start(f"cat {gate.path}; exit 0")
    kill = os.killpg

    def late_kill(group: int, signum: int) -> None:
        gate.open()
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)
        kill(group, signum)

    monkeypatch.setattr(os, "killpg", late_kill)
    process.cancel()
    assert process.returncode == 0 and not process.canceled


def test_canceled_is_not_said_of_a_kill_by_signal(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("sleep 60")
    process.send(signal.SIGKILL)
    process.cancel()
    process.wait()
    assert process.returncode == -signal.SIGKILL and not process.canceled


def test_a_kill_that_does_not_help_is_said(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("sleep 60")
    monkeypatch.setattr(processes, "KILL_LIMIT", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda group, signum: None)
        with pytest.raises(KillError, match='"p" is alive'):
            process.cancel()
    assert process.running and not process.canceled


def test_what_has_the_group_survive_a_cancel_is_said(
    start: Starter, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    process = start("sleep 60 & echo; wait")
    until(lambda: text(process))
    monkeypatch.setattr(processes, "KILL_LIMIT", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", os.kill)  # reaches the first process only
        with pytest.raises(KillError, match='that "p" started'):
            process.cancel()


def test_wait_ends_at_the_wait_until_time(start: Starter) -> None:
    process = start("sleep 60", timeout=0.01)
    process.wait(until_timeout=True)
    assert process.running and process.timed_out


def test_a_plain_wait_ends_after_its_limit(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_WAIT", 0.01)
    process = start("sleep 60", timeout=1000)
    process.wait()
    process.wait(until_timeout=True)
    assert process.running and not process.timed_out


def test_timed_out_stays_after_the_exit(start: Starter, gates: Gates) -> None:
    gate = gates("go")
    process = start(f"cat {gate.path}", timeout=0.01)
    process.wait(until_timeout=True)
    gate.open()
    process.wait()
    assert process.returncode == 0 and process.timed_out


def test_all_who_wait_are_woken(start: Starter, gates: Gates) -> None:
    gate = gates("go")
    process = start(f"cat {gate.path}; echo end")
    seen = []

    def read() -> None:
        process.wait()
        seen.append(text(process))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    gate.open()
    for reader in readers:
        reader.join()
    assert seen == ["end\n", "end\n"]


def test_a_flood_is_read_to_its_end(start: Starter) -> None:
    process = start("head -c 3000000 /dev/zero | tr '\\0' a; printf END")
    process.wait()
    output = process.output.read(ended=True)
    assert output.original_bytes == 3000003
    assert output.text.endswith("aEND")


def test_a_flood_is_read_in_turns(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_CHUNKS_AT_ONCE", 1)
    process = start("head -c 3000000 /dev/zero")
    process.wait()
    assert process.output.read(ended=True).original_bytes == 3_000_000


def test_exit_does_not_wait_for_what_the_command_left_running(
    start: Starter, gates: Gates, until: Until, monkeypatch: pytest.MonkeyPatch, offspring: Offspring
) -> None:
    monkeypatch.setattr(processes, "SETTLE_EVERY", 0.01)
    gate = gates("go")
    process = start(f"(cat {gate.path}; echo later) & echo now")
    process.wait()
    assert process.returncode == 0
    assert text(process) == "now\n"
    gate.open()
    until(lambda: text(process) == "now\nlater\n")
    until(lambda: process.pipe.closed and not offspring())


def test_exited_ones_are_forgotten_without_anybody_asking(
    table: ProcessTable, start: Starter, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(processes, "KEEP_EXITED", 0.05)
    running = start("sleep 60", process_id="running")
    start("true", process_id="exited")
    until(lambda: len(table) == 1)
    assert table.list(CHAT) == [running]


def test_forgetting_lets_go_of_a_pipe_that_a_daemon_holds(
    table: ProcessTable, start: Starter, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(processes, "KEEP_EXITED", 0.05)
    monkeypatch.setattr(processes, "SETTLE_EVERY", 0.01)
    process = start("setsid sleep 60 & echo $!")
    process.wait()
    daemon = int(text(process))
    try:
        until(lambda: len(table) == 0)
        assert process.pipe.closed
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_exited_ones_stay_for_an_hour(table: ProcessTable, start: Starter) -> None:
    assert processes.KEEP_EXITED == 3600
    process = start("true")
    process.wait()
    assert table.list(CHAT) == [process]


def test_close_ends_all_grandchildren_included(
    table: ProcessTable, start: Starter, until: Until, offspring: Offspring
) -> None:
    running = start("sleep 60 & echo $!; sleep 60", process_id="running")
    exited = start("sleep 60 >/dev/null 2>&1 & echo $!", process_id="exited")
    exited.wait()
    until(lambda: text(running).endswith("\n"))
    pids = [int(text(running)), int(text(exited))]
    assert all(map(alive, pids))
    table.close()
    assert not any(map(alive, pids))
    assert not running.running and not running.canceled
    assert not offspring()
    with pytest.raises(StartError, match="closed"):
        start("true", process_id="late")
    table.close()


def test_close_says_what_it_could_not_end(
    table: ProcessTable, start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    process = start("sleep 60")

    def refuse(group: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processes, "KILL_LIMIT", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refuse)
        table.close()
    assert "could not be killed" in caplog.text and "is alive" in caplog.text
    process.kill_rest()
    process.await_exit()
    until(lambda: not watching())
    until(process.collect)


def test_close_wakes_those_who_wait(table: ProcessTable, start: Starter) -> None:
    process = start("sleep 60")
    reader = threading.Thread(target=process.wait)
    reader.start()
    table.close()
    reader.join()
    assert not process.running


def test_a_thousand_quick_processes_leave_nothing_behind(
    table: ProcessTable, start: Starter, until: Until, offspring: Offspring
) -> None:
    start("true", process_id="first").wait()
    me = psutil.Process()
    until(lambda: not watching())
    threads, descriptors = threading.active_count(), me.num_fds()
    started = [start("echo x", process_id=str(number)) for number in range(1000)]
    for process in started:
        process.wait()
    until(lambda: threading.active_count() <= threads and me.num_fds() <= descriptors)
    assert not offspring()
    assert all(text(process) == "x\n" for process in started)
