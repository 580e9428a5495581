"""Notes: to read and to write, with attachments, by mail, and all of them at once."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Response, abort, current_app, g, request, send_file, stream_with_context, url_for
from flask.typing import ResponseReturnValue
from flask.views import MethodView

from .auth import login_required
from .calls import runonce
from .db import connection, transaction

blueprint = Blueprint("notes", __name__, url_prefix="/notes")


class NoSuchNote(LookupError):
    """The account has no note of that number."""


@blueprint.errorhandler(NoSuchNote)
def no_such_note(error: NoSuchNote) -> ResponseReturnValue:
    return {"error": "Not Found", "detail": str(error)}, 404


class Notes(MethodView):
    decorators = [
        transaction,
        runonce.once,
        login_required,
    ]

    def get(self) -> ResponseReturnValue:
        return {"notes": [dict(note) for note in _all()]}

    def post(self) -> ResponseReturnValue:
        note = (g.user["id"], _field("title"), _field("text"))
        note_id = connection().execute("INSERT INTO notes (owner, title, text) VALUES (?, ?, ?)", note).lastrowid
        return dict(_find(note_id)), 201, {"Location": url_for("notes.note", note_id=note_id)}


class Note(MethodView):
    decorators = [
        transaction,
        runonce.once,
        login_required,
    ]

    def get(self, note_id: int) -> ResponseReturnValue:
        return dict(_find(note_id))

    def put(self, note_id: int) -> ResponseReturnValue:
        _find(note_id)
        changed = (_field("title"), _field("text"), note_id)
        connection().execute("UPDATE notes SET title = ?, text = ? WHERE id = ?", changed)
        return dict(_find(note_id))

    def delete(self, note_id: int) -> ResponseReturnValue:
        _find(note_id)
        connection().execute("DELETE FROM notes WHERE id = ?", (note_id,))
        return {}


blueprint.add_url_rule("", view_func=Notes.as_view("notes"))
blueprint.add_url_rule("/<int:note_id>", view_func=Note.as_view("note"))


@blueprint.post("/<int:note_id>/attachments")
@login_required
@runonce.once
@transaction
def attach(note_id: int) -> ResponseReturnValue:
    _find(note_id)
    file = request.files["file"]
    attachment = (note_id, file.filename, file.read())
    added = connection().execute("INSERT INTO attachments (note, name, content) VALUES (?, ?, ?)", attachment)
    where = url_for("notes.download", note_id=note_id, attachment_id=added.lastrowid)
    return {"id": added.lastrowid, "name": file.filename}, 201, {"Location": where}


@blueprint.get("/<int:note_id>/attachments/<int:attachment_id>")
@login_required
def download(note_id: int, attachment_id: int) -> ResponseReturnValue:
    _find(note_id)
    wanted = (attachment_id, note_id)
    found = connection().execute("SELECT * FROM attachments WHERE id = ? AND note = ?", wanted).fetchone()
    if found is None:
        raise NoSuchNote(f"Note {note_id} has no attachment {attachment_id}.")
    return send_file(io.BytesIO(found["content"]), download_name=found["name"], as_attachment=True)


@blueprint.post("/<int:note_id>/mail")
@login_required
@runonce.once
async def mail(note_id: int) -> ResponseReturnValue:
    note = _find(note_id)
    await current_app.config["SEND_MAIL"](_field("to"), note["title"], note["text"])
    return {"sent": note["title"]}, 202


@blueprint.post("/export")
@login_required
@runonce.once
@transaction
def export() -> ResponseReturnValue:
    """Write down that the account took its notes along, and send them line by line."""
    connection().execute("INSERT INTO exports (owner) VALUES (?)", (g.user["id"],))

    def lines() -> Iterator[str]:
        for note in _all():
            yield json.dumps(dict(note)) + "\n"

    return Response(stream_with_context(lines()), mimetype="application/x-ndjson")


def _field(name: str) -> str:
    fields = request.get_json() if request.is_json else request.form
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, str):
        abort(400, f"The request needs the text field {name!r}.")
    return value


def _all() -> sqlite3.Cursor:
    return connection().execute("SELECT id, title, text FROM notes WHERE owner = ? ORDER BY id", (g.user["id"],))


def _find(note_id: int | None) -> Any:
    wanted = (note_id, g.user["id"])
    found = connection().execute("SELECT id, title, text FROM notes WHERE id = ? AND owner = ?", wanted).fetchone()
    if found is None:
        raise NoSuchNote(f"You have no note {note_id}.")
    return found
