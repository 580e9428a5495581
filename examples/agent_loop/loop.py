"""The loop, and a process that runs it with a recorded model.

python -m examples.agent_loop.loop RECORDING TRANSCRIPT --agent URL --root FOLDER
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import posixpath
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from examples.workspace_agent.client import EXECUTE_TIMEOUT, NO_RESULT, Result, WorkspaceClient
from flask_runonce.client import Retry, tool_call_ids

from .formats import FORMATS, Format, Message, ToolCall
from .transcript import Entry, Transcript

CALLS_AT_ONCE = 2
RESEND_WITHIN = Retry().window
"""Seconds after which a call is not sent again: with the retries it stays below the agent's RUNONCE_FORGET_AFTER."""

Model = Callable[[list[Message]], Message]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tools:
    """What the model may ask for. Its paths are relative to ``root``, the agent's folder."""

    client: WorkspaceClient
    root: str

    def acts(self, call: ToolCall) -> bool:
        """Whether the call changes something, so that it must not be sent again without its ID."""
        return call.name != "read_output"

    def run(self, call: ToolCall, tool_call_id: str | None) -> Result:
        arguments = call.arguments or {}
        match call.name, arguments:
            case "execute", {"command": command}:
                return self.client.execute(
                    command,
                    tool_call_id=tool_call_id,
                    timeout=arguments.get("timeout", EXECUTE_TIMEOUT),
                    background=arguments.get("background", False),
                )
            case "write_file", {"path": path, "content": content}:
                return self.client.write_file(self._path(path), content.encode(), tool_call_id=tool_call_id)
            case "edit_files", {"files": files}:
                files = [{**file, "path": self._path(file["path"])} for file in files]
                return self.client.edit_files(files, tool_call_id=tool_call_id)
            case "read_output", {"process_id": process_id}:
                return self.client.read_output(process_id)
        return {"success": False, "error": f'There is no tool "{call.name}" that takes these arguments.'}

    def _path(self, path: str) -> str:
        return posixpath.join(self.root, path)


class RecordedModel:
    """Gives the replies that a model once gave, whatever it is told."""

    def __init__(self, replies: Sequence[Message]) -> None:
        self._replies = replies

    def __call__(self, conversation: list[Message]) -> Message:
        return self._replies[len([message for message in conversation if message["role"] == "assistant"])]


class Loop:
    """Goes on with the conversation in ``transcript`` until the model asks for nothing more."""

    def __init__(
        self, chat_id: UUID | str, transcript: Transcript, *, form: Format, model: Model, tools: Tools
    ) -> None:
        self._chat_id = chat_id
        self._transcript = transcript
        self._form = form
        self._model = model
        self._tools = tools

    def run(self) -> None:
        while True:
            entry = self._transcript.entries[-1]
            calls = self._form.calls(entry.message)
            if entry.message["role"] == "assistant" and not calls:
                return
            self._run_calls(entry, calls)
            self._transcript.add_message(self._model(conversation(self._transcript, self._form)))

    def _run_calls(self, entry: Entry, calls: list[ToolCall]) -> None:
        """Return when each call has a result in the transcript."""
        ids = tool_call_ids(self._chat_id, entry.id, [call.provider_id for call in calls])
        if entry.resumed:
            self._settle_lost_calls(entry, calls, ids)

        def run(position: int) -> None:
            call = calls[position]
            self._note(entry, position, call, self._result(call, ids.get(call.provider_id)))

        with ThreadPoolExecutor(CALLS_AT_ONCE) as threads:
            list(threads.map(run, _open(entry, calls)))

    def _settle_lost_calls(self, entry: Entry, calls: list[ToolCall], ids: dict[str, str]) -> None:
        """Note what became of those calls of a resumed message that cannot safely be sent again."""
        named: dict[str, int] = {}
        for position in _open(entry, calls):
            call = calls[position]
            if not self._tools.acts(call):
                continue
            if call.provider_id in ids:
                named[ids[call.provider_id]] = position
            else:
                # Without an ID nobody can tell whether it was sent.
                self._note(entry, position, call, {"success": False, "error": NO_RESULT})
        age = time.time() - entry.at
        if age > RESEND_WITHIN:
            for tool_call_id, result in self._tools.client.interrupt(named, age=age).items():
                self._note(entry, named[tool_call_id], calls[named[tool_call_id]], result)

    def _result(self, call: ToolCall, tool_call_id: str | None) -> Result:
        try:
            return self._tools.run(call, tool_call_id)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            # Arguments of the wrong type, mostly. Raised, it would come again after each restart.
            logger.warning("a tool failed", extra={"tool_call_id": tool_call_id}, exc_info=True)
            return {"success": False, "error": f"The tool failed: {error!r}"}

    def _note(self, entry: Entry, position: int, call: ToolCall, result: Result) -> None:
        self._transcript.add_result(entry, position, dict(result))
        print(f"    {call.name} {call.provider_id}: {result.get('error', 'done')}", flush=True)


def conversation(transcript: Transcript, form: Format) -> list[Message]:
    """The transcript as the provider wants it: results right behind the message that asked for them, in its order."""
    messages: list[Message] = []
    for entry in transcript.entries:
        calls = form.calls(entry.message)
        messages.append(entry.message)
        if calls:
            messages += form.results(calls, [entry.results[position] for position in range(len(calls))])
    return messages


def _open(entry: Entry, calls: list[ToolCall]) -> list[int]:
    """The positions of the calls that have no result."""
    return [position for position in range(len(calls)) if position not in entry.results]


def main() -> None:
    """Run the loop. AGENT_TOKEN in the environment, if there is one, is the bearer token for the agent."""
    parser = argparse.ArgumentParser(prog="python -m examples.agent_loop.loop")
    parser.add_argument("recording", type=Path, help="what the user said and the model replied")
    parser.add_argument("transcript", type=Path, help="where the conversation is kept")
    parser.add_argument("--agent", required=True, metavar="URL", help="where the workspace agent is")
    parser.add_argument("--root", required=True, metavar="FOLDER", help="the agent's folder")
    options = parser.parse_args()
    recording: dict[str, Any] = json.loads(options.recording.read_text("utf-8"))
    request, *replies = recording["messages"]
    token = os.environ.get("AGENT_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with (
        Transcript(options.transcript) as transcript,
        WorkspaceClient(options.agent, recording["chat_id"], headers=headers) as client,
    ):
        if not transcript.entries:
            transcript.add_message(request)
        Loop(
            recording["chat_id"],
            transcript,
            form=FORMATS[recording["format"]],
            model=RecordedModel(replies),
            tools=Tools(client, options.root),
        ).run()


if __name__ == "__main__":
    main()
