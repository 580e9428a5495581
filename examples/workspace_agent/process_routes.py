"""The routes of processes: start, list, output, signal."""

from __future__ import annotations

import os
import signal
import uuid
from typing import Any

from flask import Blueprint, g, request
from flask.blueprints import BlueprintSetupState
from werkzeug.routing import BaseConverter

from flask_runonce import RunOnce
from flask_runonce.errors import InvalidKey
from flask_runonce.keys import canonical_id

from .errors import AgentError
from .files import Workspace
from .processes import Process, ProcessTable, Start, StartError
from .wire import field, header_id, json_object

MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
MAX_LIMIT = 200
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}


class _IDConverter(BaseConverter):
    """Any ID: a tool call ID may hold slashes."""

    part_isolating = False
    regex = ".+"


def add_process_routes(blueprint: Blueprint, processes: ProcessTable, workspace: Workspace, runonce: RunOnce) -> None:
    """Add them to ``blueprint``, which sets ``g.chat``."""

    @blueprint.record
    def add_converter(state: BlueprintSetupState) -> None:
        state.app.url_map.converters["process_id"] = _IDConverter

    @blueprint.post("/processes/start")
    @runonce.once
    def start_process() -> dict[str, Any]:
        start = _start_of(json_object(), workspace)
        # The call's own ID, so that the cancel hook, which knows nothing else, finds the process.
        process_id = header_id("RUNONCE_TOOL_CALL_ID_HEADER", "Coder-Tool-Call-Id") or str(uuid.uuid4())
        try:
            process, new = processes.start(g.chat, process_id, start)
        except StartError as error:
            raise AgentError(500, "Failed to start process.", str(error)) from error
        return {"id": process.id, "started": True} if new else {"id": process.id, "started": False, "attached": True}

    @blueprint.get("/processes/list")
    def list_processes() -> dict[str, Any]:
        limit, offset = _query_number("limit", 50, 1, MAX_LIMIT), _query_number("offset", 0, 0, None)
        own = processes.list(g.chat)
        page = own[offset : offset + limit]
        return {
            "processes": [_listed(process) for process in page],
            "total": len(own),
            "offset": offset,
            "has_more": offset + len(page) < len(own),
        }

    @blueprint.get("/processes/<process_id:process_id>/output")
    def read_output(process_id: str) -> dict[str, Any]:
        process = find(process_id)
        if request.args.get("wait") == "true":
            process.wait(until_timeout=request.args.get("timeout_from_start_process") == "true")
        return _read(process)

    @blueprint.post("/processes/<process_id:process_id>/signal")
    def signal_process(process_id: str) -> dict[str, Any]:
        name = field(json_object(), "signal", str, "")
        if not name:
            raise AgentError(400, "Signal is required.")
        if name not in SIGNALS:
            raise AgentError(400, f'Unsupported signal "{name}". Use "kill" or "terminate".')
        process = find(process_id)
        try:
            sent = process.send(SIGNALS[name])
        except PermissionError as error:
            raise AgentError(500, f'Failed to signal process "{process.id}".', str(error)) from error
        if not sent:
            raise AgentError(409, f'Process "{process.id}" is not running.')
        return {"message": f'Signal "{name}" sent to process "{process.id}".'}

    def find(process_id: str) -> Process:
        try:
            process = processes.get(g.chat, canonical_id(process_id))
        except InvalidKey:
            process = None
        if process is None:
            raise AgentError(404, f'Process "{process_id}" not found.')
        return process


def _start_of(body: dict[str, Any], workspace: Workspace) -> Start:
    """What the body asks for. Raises AgentError."""
    command = field(body, "command", str, "")
    workdir = field(body, "workdir", str, "")
    env = field(body, "env", dict, {})
    background = field(body, "background", bool, False)
    timeout_ms = field(body, "timeout_ms", int, 0)
    for name in env:
        field(env, name, str, "")
    if not command:
        raise AgentError(400, "Command is required.")
    if background and timeout_ms != 0:
        raise AgentError(400, "Background processes cannot have timeout_ms.")
    if not 0 <= timeout_ms <= MAX_TIMEOUT_MS:
        raise AgentError(400, f"timeout_ms must be from 0 to {MAX_TIMEOUT_MS}.")
    return Start(
        command,
        workspace.resolve(workdir) if workdir else workspace.root or os.path.expanduser("~"),
        {name: value for name, value in env.items() if value is not None},
        background,
        timeout_ms / 1000 if timeout_ms else None,
    )


def _listed(process: Process) -> dict[str, Any]:
    running = process.running
    facts: dict[str, Any] = {
        "id": process.id,
        "command": process.command,
        "workdir": process.workdir,
        "background": process.background,
        "running": running,
        "started_at_unix": int(process.started_at_unix),
    }
    if not running and process.exited_at_unix is not None:
        facts |= {"exit_code": process.returncode, "exited_at_unix": int(process.exited_at_unix)}
    return facts


def _read(process: Process) -> dict[str, Any]:
    running = process.running  # asked first: what had exited by then has all its output in the buffer
    output = process.output.read(ended=not running)
    facts: dict[str, Any] = {"output": output.text, "running": running, "command": process.command}
    if output.omitted_bytes:
        facts["truncated"] = {
            "original_bytes": output.original_bytes,
            "retained_bytes": output.original_bytes - output.omitted_bytes,
            "omitted_bytes": output.omitted_bytes,
            "strategy": "head_tail",
        }
    if not running:
        facts["exit_code"] = process.returncode
    if process.timed_out:
        facts["timed_out"] = True
    if process.canceled:
        facts["canceled"] = True
    return facts


def _query_number(name: str, default: int, least: int, most: int | None) -> int:
    text = request.args.get(name)
    if text is None:
        return default
    if (
        not (text.isascii() and text.isdigit())
        or len(text) > 18
        or not least <= (number := int(text)) <= (most or number)
    ):
        raise AgentError(400, f"{name} must be a number from {least}" + (f" to {most}." if most else "."))
    return number
