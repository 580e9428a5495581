"""The database: one connection for each request, one transaction for each view that writes."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from flask import Flask, current_app, g

View = TypeVar("View", bound=Callable[..., Any])


def init_app(app: Flask) -> None:
    """Create the tables where they are missing, and close what a request opened."""
    app.teardown_appcontext(_close)
    with app.app_context(), app.open_resource("schema.sql", "r") as schema:
        connection().executescript(schema.read())


def connection() -> sqlite3.Connection:
    """The request's connection."""
    if "connection" not in g:
        # An async view runs in another thread than its request; it has the connection to itself all the same.
        g.connection = sqlite3.connect(current_app.config["DATABASE"], check_same_thread=False)
        g.connection.row_factory = sqlite3.Row
        g.connection.execute("PRAGMA foreign_keys = ON")
    opened: sqlite3.Connection = g.connection
    return opened


def transaction(view: View) -> View:
    """Commit what a view wrote when it answers, roll it back when it raises. A decorator."""

    @functools.wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with connection():
            return current_app.ensure_sync(view)(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _close(error: BaseException | None) -> None:
    opened = g.pop("connection", None)
    if opened is not None:
        opened.close()
