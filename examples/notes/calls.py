"""Which requests are calls that run once: whose they are, and who may cancel them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import abort, g

from flask_runonce import RunOnce

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment


def _account(environ: WSGIEnvironment) -> str | None:
    """Calls belong to an account: nobody repeats, cancels or lists another's, whatever IDs they send."""
    return str(g.user["id"]) if g.user else None


def _logged_in(environ: WSGIEnvironment) -> None:
    """What ``login_required`` is to the views, for the routes that cancel, list and show calls."""
    if g.user is None:
        abort(401, "Log in first.")


runonce = RunOnce(scope=_account, guard=_logged_in)
