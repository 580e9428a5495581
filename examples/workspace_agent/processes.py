"""The processes that chats have started.

A process belongs to a chat and has an ID there. It runs in a process group of its own and is independent of the
request that started it. One thread with an event loop reads what all of them write and forgets those that ended an hour
ago; one short thread for each running process waits for its end. Nobody polls while a process runs.

The first process of a group gives the group its number. It is collected only when nothing else of its group is alive,
so that number cannot pass to a stranger before we have sent our last signal to it.

Needs ``os.waitid``: Linux, or macOS with Python 3.13.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from .output import OutputBuffer

KEEP_EXITED = 3600.0  # seconds that an exited process can still be listed and read
MAX_WAIT = 300.0  # seconds that one reading of the output waits at most
KILL_LIMIT = 10.0  # seconds for killed processes to be gone
SETTLE_EVERY = 1.0  # seconds between two looks at a group that outlives its first process

_CHUNK = 64 * 1024
_CHUNKS_AT_ONCE = 16  # together more than a pipe holds

logger = logging.getLogger(__name__)


class Chat(NamedTuple):
    """Who owns a process. ``id`` is the canonical chat ID, empty for requests without one."""

    scope: str
    id: str


@dataclass(frozen=True)
class Start:
    """What a start asks for. ``timeout`` is in seconds and says how long callers want to wait; it stops nothing."""

    command: str
    workdir: str
    env: Mapping[str, str] = field(default_factory=dict)
    background: bool = False
    timeout: float | None = None


class StartError(Exception):
    """The process could not be started; the text says why."""


class KillError(Exception):
    """A process, or one of its group, is alive although it was killed."""


class Process:
    """One command, run by ``/bin/sh``: started by the constructor, tended by its ``ProcessTable``.

    ``returncode`` is None while it runs and negative (minus the signal's number) when a signal ended it. ``canceled``
    says that it was a cancel's kill that ended it. ``*_at`` are monotonic times, ``*_at_unix`` are wall-clock ones.
    """

    def __init__(self, process_id: str, start: Start, environment: Mapping[str, str]) -> None:
        self.id = process_id
        self.command = start.command
        self.workdir = start.workdir
        self.background = start.background
        self.output = OutputBuffer()
        self.returncode: int | None = None
        self.exited_at: float | None = None
        self.exited_at_unix: float | None = None
        self.canceled = False
        self._lock = threading.Lock()
        self._exited = threading.Event()
        self._killed_by_cancel: bool | None = None
        self._popen = subprocess.Popen(
            ["/bin/sh", "-c", start.command],
            cwd=start.workdir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        self.started_at = time.monotonic()
        self.started_at_unix = time.time()
        self.wait_until = None if start.timeout is None else self.started_at + start.timeout
        assert self._popen.stdout is not None
        self.pipe = self._popen.stdout
        os.set_blocking(self.pipe.fileno(), False)

    @property
    def running(self) -> bool:
        return not self._exited.is_set()

    @property
    def timed_out(self) -> bool:
        """It ran past its wait-until time; still true after its exit."""
        exited_at = self.exited_at
        return self.wait_until is not None and (time.monotonic() if exited_at is None else exited_at) >= self.wait_until

    def wait(self, *, until_timeout: bool = False) -> None:
        """Return at the exit, after ``MAX_WAIT``, or (``until_timeout``) at the wait-until time."""
        until = time.monotonic() + MAX_WAIT
        if until_timeout and self.wait_until is not None:
            until = min(until, self.wait_until)
        while (left := until - time.monotonic()) > 0 and not self._exited.wait(left):
            pass

    def send(self, signum: int) -> bool:
        """Signal the whole group. False, and nothing is sent, when the process has exited."""
        return self._send(signum, cancel=False)

    def cancel(self) -> None:
        """Kill the whole group and wait until it is gone; an exited process is left alone.

        Raises OSError when the kill is not permitted and KillError when it does not help.
        """
        if self._send(signal.SIGKILL, cancel=True):
            self.await_end()

    def await_end(self) -> None:
        """Wait for the end of a killed group. Raises KillError after ``KILL_LIMIT``."""
        until = time.monotonic() + KILL_LIMIT
        if not self._exited.wait(KILL_LIMIT):
            raise KillError(f'Process "{self.id}" is alive although it was killed.')
        # Those that remain are not our children: nobody tells us of their end, which a kill makes a matter of moments.
        while self._others():
            if time.monotonic() > until:
                raise KillError(f'Processes that "{self.id}" started are alive although they were killed.')
            time.sleep(0.005)

    def kill_rest(self) -> None:
        """Kill the whole group, also when its first process has exited."""
        with self._lock:
            if self._popen.returncode is None:
                os.killpg(self._popen.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Kill the whole group and collect its first process, which nobody watches."""
        os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def await_exit(self) -> int:
        """Block until the first process ends, without collecting it. Returns its return code."""
        info = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        assert info is not None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def read_pipe(self) -> bool:
        """Move what is in the pipe to the buffer. False at the pipe's end."""
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                data = os.read(self.pipe.fileno(), _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.output.write(data)
        return True

    def finish(self, returncode: int) -> None:
        """Note the exit and wake those who wait for it. All that was written before must be in the buffer."""
        with self._lock:
            self.returncode = returncode
            self.canceled = self._killed_by_cancel is True and returncode == -signal.SIGKILL
            self.exited_at_unix = time.time()
            self.exited_at = time.monotonic()
            self._exited.set()

    def collect(self) -> bool:
        """Give the exited process back to the system unless others of its group are alive."""
        with self._lock:
            if self._others():
                return False
            self._popen.wait()
            return True

    def _send(self, signum: int, *, cancel: bool) -> bool:
        with self._lock:
            if self._exited.is_set():
                return False
            os.killpg(self._popen.pid, signum)
            if signum == signal.SIGKILL and self._killed_by_cancel is None:
                self._killed_by_cancel = cancel
            return True

    def _others(self) -> bool:
        """Is anything of the group alive besides its first process?"""
        if self._popen.returncode is not None:
            return False
        group = self._popen.pid
        for pid in psutil.pids():
            # A zombie is dead, however long its parent takes to notice.
            with suppress(ProcessLookupError, PermissionError, psutil.Error):
                if pid != group and os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    return True
        return False


class ProcessTable:
    """All processes, by chat and process ID. ``close`` it to end them."""

    def __init__(self) -> None:
        self._starting = threading.Lock()  # held while one starts and while all end, never to look one up
        self._lock = threading.Lock()
        self._processes: dict[tuple[Chat, str], Process] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._processes)

    def start(self, chat: Chat, process_id: str, start: Start) -> tuple[Process, bool]:
        """The process of that chat and ID, and whether it is new: started only where there is none yet.

        Raises StartError.
        """
        with self._starting:
            if self._closed:
                raise StartError("The agent is closed.")
            if (known := self.get(chat, process_id)) is not None:
                return known, False
            environment = {**os.environ, **start.env}
            environment.pop("CODER_CHAT_ID", None)
            if chat.id:
                environment["CODER_CHAT_ID"] = chat.id
            loop = self._running_loop()
            try:
                process = Process(process_id, start, environment)
            except (OSError, ValueError) as error:  # ValueError: what no system call can carry, a NUL for example
                raise StartError(str(error)) from error
            loop.call_soon_threadsafe(loop.add_reader, process.pipe, self._readable, process)
            watch = threading.Thread(
                target=self._watch, args=(loop, chat, process), name=f"watch-{process_id}", daemon=True
            )
            with self._lock:
                self._processes[chat, process_id] = process
            try:
                watch.start()
            except RuntimeError as error:  # no thread to be had: a process that nobody watches must not run
                process.discard()
                loop.call_soon_threadsafe(self._forget, chat, process)
                raise StartError(str(error)) from error
            return process, True

    def get(self, chat: Chat, process_id: str) -> Process | None:
        with self._lock:
            return self._processes.get((chat, process_id))

    def list(self, chat: Chat) -> list[Process]:
        """The chat's own: running ones first, newest first."""
        with self._lock:
            own = [process for (owner, _), process in reversed(self._processes.items()) if owner == chat]
        return sorted(own, key=lambda process: not process.running)

    def cancel(self, chat: Chat, process_id: str) -> None:
        """Kill the process with its whole group and wait until they are gone. None there, or exited: nothing happens.

        Raises what ``Process.cancel`` raises.
        """
        process = self.get(chat, process_id)
        if process is not None:
            process.cancel()

    def close(self) -> None:
        """Kill every process with its whole group, wait for them, and start no more. May be called again."""
        with self._starting:
            self._closed = True
            if self._loop is None or self._thread is None:
                return
            with self._lock:
                processes = list(self._processes.values())
            for process in processes:
                try:
                    process.kill_rest()
                except OSError as error:
                    logger.error('Process "%s" could not be killed: %s', process.id, error)
            for process in processes:
                try:
                    process.await_end()
                except KillError as error:
                    logger.error("%s", error)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None
            for process in processes:
                process.pipe.close()
                if not process.running:
                    process.collect()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        # Made at the first start and not before: a server may fork after it has made the app.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="processes", daemon=True)
            self._thread.start()
        return self._loop

    def _watch(self, loop: asyncio.AbstractEventLoop, chat: Chat, process: Process) -> None:
        returncode = process.await_exit()
        with suppress(RuntimeError):  # the loop is closed: the process was given up for immortal
            loop.call_soon_threadsafe(self._note_exit, chat, process, returncode)

    # What follows runs in the loop's thread.

    def _readable(self, process: Process) -> None:
        if not process.read_pipe():
            self._stop_reading(process)

    def _stop_reading(self, process: Process) -> None:
        if not process.pipe.closed:
            asyncio.get_running_loop().remove_reader(process.pipe)
            process.pipe.close()

    def _note_exit(self, chat: Chat, process: Process, returncode: int) -> None:
        if not process.pipe.closed:
            self._readable(process)
        process.finish(returncode)
        self._settle(chat, process)

    def _settle(self, chat: Chat, process: Process) -> None:
        loop = asyncio.get_running_loop()
        assert process.exited_at is not None
        if process.collect():
            loop.call_at(process.exited_at + KEEP_EXITED, self._forget, chat, process)
        else:
            loop.call_later(SETTLE_EVERY, self._settle, chat, process)

    def _forget(self, chat: Chat, process: Process) -> None:
        self._stop_reading(process)  # what has left the group, by setsid, can still hold the pipe
        with self._lock:
            del self._processes[chat, process.id]
