"""The routes of files: edit and write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flask import Blueprint, request

from flask_runonce import RunOnce

from .edits import Edit, unified_diff
from .errors import AgentError
from .files import FileEdits, Workspace
from .wire import field, json_object

_CHUNK = 64 * 1024


def add_file_routes(blueprint: Blueprint, workspace: Workspace, runonce: RunOnce) -> None:
    """Add them to ``blueprint``."""

    @blueprint.post("/edit-files")
    @runonce.once
    def edit_files() -> dict[str, Any]:
        body = json_object()
        files = [
            FileEdits(field(file, "path", str, ""), [_edit_of(edit) for edit in field(file, "edits", list, [])])
            for file in field(body, "files", list, [])
        ]
        edited = workspace.edit(files)
        if not field(body, "include_diff", bool, False):
            return {}
        return {"files": [{"path": e.path, "diff": _readable(unified_diff(e.path, e.before, e.after))} for e in edited]}

    @blueprint.post("/write-file")
    @runonce.once
    def write_file() -> dict[str, Any]:
        path = request.args.get("path", "")
        if not path:
            raise AgentError(400, '"path" is required.')
        workspace.write(path, _body())
        return {"message": f'Successfully wrote to "{path}"'}


def _edit_of(edit: Any) -> Edit:
    return Edit(
        field(edit, "old_text", str, ""), field(edit, "new_text", str, ""), field(edit, "replace_all", bool, False)
    )


def _body() -> Iterator[bytes]:
    while chunk := request.stream.read(_CHUNK):
        yield chunk


def _readable(text: str) -> str:
    """Bytes that are not UTF-8, which the files keep, as U+FFFD."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
