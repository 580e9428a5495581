"""CSRF protection of the two forms: a signed token, bound to the browser, the deed and what it is done to.

The browser is known by a cookie of its own, which scripts cannot read and other sites cannot send. So a token works
without a login of any kind, and beside the app's own CSRF protection.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from flask import Response, current_app, request
from itsdangerous import BadData, URLSafeTimedSerializer

COOKIE = "runonce_dashboard"
FIELD = "runonce_token"
MAX_AGE = 3600
"""Seconds for which a question can be answered."""


class Form:
    """The question that the current request asks or answers: `asked` says all of it. The app has a `secret_key`."""

    def __init__(self, asked: Sequence[str]) -> None:
        assert current_app.secret_key
        self._signer = URLSafeTimedSerializer(current_app.secret_key, salt="flask_runonce.contrib.dashboard")
        self._known = request.cookies.get(COOKIE, "")
        self._browser = self._known or secrets.token_urlsafe(16)
        self._asked = list(asked)

    @property
    def token(self) -> str:
        """What the form has to send back in `FIELD`."""
        token = self._signer.dumps([self._browser, *self._asked])
        return token if isinstance(token, str) else token.decode()

    @property
    def answered(self) -> bool:
        """True where the request sends back a token of this question, asked of this browser not long ago."""
        try:
            sent = self._signer.loads(request.form.get(FIELD, ""), max_age=MAX_AGE)
        except BadData:
            return False
        return bool(sent == [self._known, *self._asked])

    def mark(self, response: Response, path: str) -> Response:
        """Let the browser be known again, under `path`."""
        if not self._known:
            response.set_cookie(
                COOKIE, self._browser, path=path, httponly=True, samesite="Lax", secure=request.is_secure
            )
        return response
