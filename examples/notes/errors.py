"""Errors, answered as JSON."""

from __future__ import annotations

import json
import sqlite3

from flask import Flask
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException
from werkzeug.sansio.response import Response


def init_app(app: Flask) -> None:
    """Have the app answer errors in one way."""
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(sqlite3.IntegrityError, _conflict)


def _http_error(error: HTTPException) -> Response:
    response = error.get_response()
    response.content_type = "application/json"
    response.data = json.dumps({"error": error.name, "detail": error.description})
    return response


def _conflict(error: sqlite3.IntegrityError) -> ResponseReturnValue:
    return {"error": "Conflict", "detail": str(error)}, 409
