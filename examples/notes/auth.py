"""Accounts, and the session that a login starts."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from flask import Blueprint, abort, current_app, g, request, session
from flask.typing import ResponseReturnValue
from werkzeug.security import check_password_hash, generate_password_hash

from .db import connection, transaction

View = TypeVar("View", bound=Callable[..., Any])

blueprint = Blueprint("auth", __name__)


@blueprint.before_app_request
def load_user() -> None:
    """Set ``g.user`` to the account that is logged in, or None."""
    found = connection().execute("SELECT * FROM users WHERE id = ?", (session.get("user_id"),))
    g.user = found.fetchone()


@blueprint.before_app_request
def check_token() -> None:
    """Refuse a request that acts in a session and does not know its token: another site sent it."""
    if g.user and request.method not in ("GET", "HEAD", "OPTIONS"):
        sent = request.headers.get("X-CSRF-Token") or request.form.get("csrf_token", "")
        if not secrets.compare_digest(sent, session["csrf_token"]):
            abort(403)


def login_required(view: View) -> View:
    """Refuse who is not logged in. A decorator."""

    @functools.wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if g.user is None:
            abort(401)
        return current_app.ensure_sync(view)(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


@blueprint.post("/users")
@transaction
def register() -> ResponseReturnValue:
    password = generate_password_hash(request.form["password"], current_app.config["PASSWORD_METHOD"])
    account = (request.form["name"], password)
    connection().execute("INSERT INTO users (name, password) VALUES (?, ?)", account)
    return {"name": request.form["name"]}, 201


@blueprint.post("/login")
def login() -> ResponseReturnValue:
    found = connection().execute("SELECT * FROM users WHERE name = ?", (request.form["name"],)).fetchone()
    if found is None or not check_password_hash(found["password"], request.form["password"]):
        abort(401)
    session.clear()
    session["user_id"] = found["id"]
    session["csrf_token"] = secrets.token_urlsafe()
    return {"csrf_token": session["csrf_token"]}


@blueprint.post("/logout")
@login_required
def logout() -> ResponseReturnValue:
    session.clear()
    return {}
