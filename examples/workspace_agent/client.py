"""The agent's client: runs the tool calls of one chat in its workspace and says what the model is to be told.

A result is a JSON object for the model, also where the call failed or no answer came. What an interrupt says of a call:

| the cancel's answer | a command | an edit, a write |
| --- | --- | --- |
| not received, and there is no process | NOT_RUN, or NO_RESULT where nobody can vouch for that | the same |
| not received, but there is a process | as a saved success | |
| a saved error | that error | that error |
| a saved success | its result at its exit: the real one, or CANCELED with the output so far | the real result |
| none, an error, a time-out | NO_RESULT, and a warning in the log | the same |

NOT_RUN ("… no changes were made") and the choice between it and NO_RESULT are those of ``Cancellation.text``.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypedDict
from urllib.parse import quote
from uuid import UUID

import httpx

from flask_runonce.client import NoAnswer, ToolCallError, ToolClient, error_detail

CANCELED = "tool call was canceled while running"
NO_RESULT = "tool call was interrupted before it produced a result"

EXECUTE_TIMEOUT = 60.0
FILE_TIMEOUT = 60.0
SNAPSHOT_TIMEOUT = 10.0
"""Seconds for one reading of the output after the waiting for it has failed."""
ASK_EVERY = 1.0
"""Seconds between two waiting reads of the output, where the agent answers the first one at once."""

_PREFIX = "/api/v0"
# A single "&" at the end: not "&&", not the end of a redirection or of "|&", not escaped.
_BACKGROUND = re.compile(r"(?<![&|<>\\])&\s*\Z")

logger = logging.getLogger(__name__)


class _Outcome(TypedDict):
    success: bool


class Result(_Outcome, total=False):
    """What the model is told.

    ``success``: always there. ``error``: why not.
    Of a command: ``output`` and ``exit_code`` (-1: it has none), ``wall_duration_ms`` as ``execute`` measured it,
    ``truncated`` as the agent reports what it left out, ``background_process_id`` where the process may still be
    running and can be read later, ``canceled`` where a cancel ended it.
    Of an edit: ``files``, the diffs that were asked for. Of a write: ``message``.
    ``note``: advice for the model.
    """

    output: str
    exit_code: int
    wall_duration_ms: int
    error: str
    truncated: dict[str, Any]
    note: str
    background_process_id: str
    canceled: bool
    files: list[dict[str, str]]
    message: str


class WorkspaceClient:
    """The workspace of one chat, for use from any thread; ``options`` are those of ``ToolClient``.

    ``tool_call_id`` is the same for each attempt at a call (``flask_runonce.client.tool_call_id``); None: the call has
    no ID, and is sent once.
    """

    def __init__(self, base_url: str, chat_id: UUID | str, **options: Any) -> None:
        self._client = ToolClient(base_url, chat_id, **options)

    def execute(
        self,
        command: str,
        *,
        tool_call_id: str | None,
        timeout: float = EXECUTE_TIMEOUT,
        background: bool = False,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command and wait for its end, or only start it where ``background`` or a trailing ``&`` says so.

        ``timeout``: seconds for start and wait together. It ends the waiting, not the command, whose
        ``background_process_id`` is then in the result.
        """
        began = time.monotonic()
        if (trailing := _BACKGROUND.search(command)) is not None:
            command, background = command[: trailing.start()].rstrip(), True
        body: dict[str, Any] = {"command": command, "background": background}
        if not background:
            body["timeout_ms"] = max(1, round(timeout * 1000))  # 0 is "no limit" to the agent
        if workdir is not None:
            body["workdir"] = workdir
        if env is not None:
            body["env"] = dict(env)
        try:
            started = self._send("POST", "/processes/start", tool_call_id, timeout, expect=["id"], json=body)
        except _Failed as failed:
            # Without an answer it may have been started all the same, under the call's ID.
            return _no_output(str(failed), tool_call_id if failed.unanswered else None)
        process_id = str(started["id"])
        if background:
            return {
                "success": True,
                "output": "",
                "exit_code": 0,
                "background_process_id": process_id,
                "note": "The command runs in the background. Read its output with background_process_id.",
            }
        result = self._foreground(process_id, timeout, until=began + timeout)
        result["wall_duration_ms"] = round((time.monotonic() - began) * 1000)
        return result

    def edit_files(
        self, files: Sequence[Mapping[str, Any]], *, tool_call_id: str | None, include_diff: bool = False
    ) -> Result:
        """Make all edits or none. A file is ``{"path", "edits": [{"old_text", "new_text", "replace_all"?}]}``."""
        body = {"files": [dict(file) for file in files], "include_diff": include_diff}
        return self._file_call("/edit-files", tool_call_id, json=body)

    def write_file(self, path: str, content: bytes, *, tool_call_id: str | None) -> Result:
        """Put ``content`` in the place of what the file held."""
        return self._file_call("/write-file", tool_call_id, params={"path": path}, content=content)

    def read_output(self, process_id: str) -> Result:
        """The result of a command as it stands now; ``process_id`` is its ``background_process_id``."""
        try:
            facts = self._output(process_id, SNAPSHOT_TIMEOUT)
        except _Failed as failed:
            return _no_output(str(failed))
        if not facts["running"]:
            return _ended(facts)
        result = _still_running(facts, process_id)
        result["success"] = True
        result["note"] = "The command is still running."
        return result

    def interrupt(self, ids: Iterable[str], timeout: float = 30.0, *, age: float | None = None) -> dict[str, Result]:
        """Cancel the calls, all at once, and say what became of each, as the table above has it.

        ``timeout``: seconds for everything. ``age``: seconds since the oldest call was made; None: all are younger than
        the agent's memory. The result has an entry for each ID, and the failure of one is that one's alone.
        """
        until = time.monotonic() + timeout
        unique = list(dict.fromkeys(ids))
        with ThreadPoolExecutor(len(unique) or 1) as threads:
            results = threads.map(lambda id: self._interrupt(id, until, age), unique)
            return dict(zip(unique, results, strict=True))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> WorkspaceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _foreground(self, process_id: str, timeout: float, until: float) -> Result:
        error = f"command timed out after {timeout:g}s"
        try:
            facts = self._await_exit(process_id, until, or_timeout=True)
        except _Failed as failed:
            # Our time is mostly over a moment before the agent's, which counts from the start.
            if time.monotonic() < until:
                error = f"waiting for the command failed: {failed}"
            try:
                facts = self._output(process_id, SNAPSHOT_TIMEOUT)
            except _Failed as unread:
                text = f'the output of process "{process_id}" could not be read, read it again with this ID: {unread}'
                return _no_output(text, process_id)
        if not facts["running"]:
            return _ended(facts)
        result = _still_running(facts, process_id)
        result["error"] = error
        return result

    def _interrupt(self, tool_call_id: str, until: float, age: float | None) -> Result:
        canceled = self._client.cancel(tool_call_id, age, timeout=until - time.monotonic())
        if canceled.received is None:  # the client has logged why
            return {"success": False, "error": NO_RESULT}
        if canceled.received:
            if canceled.response is None:
                return _no_result(tool_call_id, "it still runs although it was canceled")
            try:
                saved = {} if canceled.body_too_large else _document(canceled.response)
            except _Failed as failed:
                return {"success": False, "error": str(failed)}
            if "started" not in saved and not canceled.body_too_large:
                return _file_result(saved)
        # A command, or perhaps one: of a call that was not received we know only that an edit leaves no process.
        try:
            return _ended(self._await_exit(tool_call_id, until))
        except _Failed as failed:
            if failed.status == 404 and not canceled.received:
                return {"success": False, "error": canceled.text}
            return _no_result(tool_call_id, str(failed))

    def _await_exit(self, process_id: str, until: float, *, or_timeout: bool = False) -> dict[str, Any]:
        """The output when the process has exited or, with ``or_timeout``, when its own time is over."""
        query = {"wait": "true", "timeout_from_start_process": "true" if or_timeout else "false"}
        while True:
            asked = time.monotonic()
            facts = self._output(process_id, until - asked, params=query)
            if not facts["running"] or (or_timeout and facts.get("timed_out")):
                return facts
            # It answers after minutes, so there is no pause, unless something on the way answers at once.
            time.sleep(max(0.0, min(asked + ASK_EVERY, until) - time.monotonic()))

    def _output(self, process_id: str, timeout: float, **options: Any) -> dict[str, Any]:
        path = f"/processes/{quote(process_id, safe='')}/output"
        return self._send("GET", path, None, timeout, expect=["output", "running"], **options)

    def _file_call(self, path: str, tool_call_id: str | None, **options: Any) -> Result:
        try:
            return _file_result(self._send("POST", path, tool_call_id, FILE_TIMEOUT, **options))
        except _Failed as failed:
            return {"success": False, "error": str(failed)}

    def _send(
        self,
        method: str,
        path: str,
        tool_call_id: str | None,
        timeout: float,
        *,
        expect: Iterable[str] = (),
        **options: Any,
    ) -> dict[str, Any]:
        """What the agent answers to a success, with the fields of ``expect``. Raises _Failed for anything else."""
        try:
            response = self._client.call(method, _PREFIX + path, tool_call_id=tool_call_id, deadline=timeout, **options)
        except ToolCallError as error:
            raise _Failed(error.detail, status=error.status, unanswered=isinstance(error, NoAnswer)) from error
        return _document(response, expect)


class _Failed(Exception):
    """The agent did not do it, or did not say that it did; the text is for the model."""

    def __init__(self, text: str, *, status: int | None, unanswered: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.unanswered = unanswered


def _document(response: httpx.Response, expect: Iterable[str] = ()) -> dict[str, Any]:
    """The JSON object of a 200. Raises _Failed with what any other answer says."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if response.status_code == 200 and isinstance(document, dict) and document.keys() >= set(expect):
        return document
    text = error_detail(response)
    detail = document.get("detail") if isinstance(document, dict) else None
    if isinstance(detail, str) and detail not in text:
        text = f"{text} {detail}"
    raise _Failed(text, status=response.status_code)


def _ended(facts: Mapping[str, Any]) -> Result:
    """The result of a process that has exited."""
    exit_code = facts.get("exit_code", -1)
    result: Result = {"success": exit_code == 0, "output": facts["output"], "exit_code": exit_code}
    if "truncated" in facts:
        result["truncated"] = facts["truncated"]
    if facts.get("canceled"):
        result["exit_code"] = -1
        result["error"] = CANCELED
        result["canceled"] = True
    return result


def _still_running(facts: Mapping[str, Any], process_id: str) -> Result:
    result: Result = {
        "success": False,
        "output": facts["output"],
        "exit_code": -1,
        "background_process_id": process_id,
    }
    if "truncated" in facts:
        result["truncated"] = facts["truncated"]
    return result


def _no_output(error: str, process_id: str | None = None) -> Result:
    result: Result = {"success": False, "output": "", "exit_code": -1, "error": error}
    if process_id is not None:
        result["background_process_id"] = process_id
    return result


def _no_result(tool_call_id: str, why: str) -> Result:
    logger.warning("no result of a canceled call: %s", why, extra={"tool_call_id": tool_call_id})
    return {"success": False, "error": NO_RESULT}


def _file_result(answer: Mapping[str, Any]) -> Result:
    result: Result = {"success": True}
    if "files" in answer:
        result["files"] = answer["files"]
    if "message" in answer:
        result["message"] = answer["message"]
    return result
