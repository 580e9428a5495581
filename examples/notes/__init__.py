"""A notes service: accounts, notes with attachments, mail and export, kept in one SQLite file.

It serves on its own with ``flask --app examples.notes run``; register an account at ``POST /users``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from flask import Flask, Response, current_app, g

from . import auth, db, errors, notes
from .calls import runonce


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """The service. ``config`` goes to ``app.config``."""
    app = Flask(__name__)
    app.config.from_mapping(
        SECRET_KEY="dev",
        DATABASE="notes.db",
        MAX_CONTENT_LENGTH=16 * 2**20,
        PASSWORD_METHOD="scrypt",
        SEND_MAIL=_log_mail,
    )
    app.config.from_mapping(config)
    db.init_app(app)
    errors.init_app(app)
    app.before_request(_start_clock)
    app.after_request(_add_headers)
    app.register_blueprint(auth.blueprint)
    app.register_blueprint(notes.blueprint)
    runonce.init_app(app)
    return app


def _start_clock() -> None:
    g.started = time.perf_counter()


def _add_headers(response: Response) -> Response:
    response.headers["Server-Timing"] = f"app;dur={1000 * (time.perf_counter() - g.started):.1f}"
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


async def _log_mail(to: str, subject: str, text: str) -> None:
    """Stands for a mail server until ``SEND_MAIL`` names one."""
    current_app.logger.info("Mail to %s: %s (%d characters)", to, subject, len(text))
