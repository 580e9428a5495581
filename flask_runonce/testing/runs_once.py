"""The check that a request's calls run once, made from outside, as a client would; it says in words what broke."""

from __future__ import annotations

import functools
import json as json_module
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .app import RunOnceTestApp
from .threads import together

if TYPE_CHECKING:
    from webtest import TestResponse

AT_ONCE = 10
"""How many requests of one call are sent at the same moment."""

COMPARED = (
    *("Content-Type", "Content-Language", "Content-Location", "Content-Disposition"),
    *("Location", "ETag", "Last-Modified", "Link"),
)
"""The saved headers (CONTRACT section 4), but those that WebTest undoes or that layers around the run add to."""


def assert_runs_once(
    app: Any,
    method: str,
    url: str,
    *,
    effects: Callable[[], int] | None = None,
    status: int | None = None,
    chat: str | None = None,
    json: Any = None,
    **request: Any,
) -> TestResponse:
    """Fail unless this request's calls run once, and are refused once they are canceled. Return the first response.

    Three calls with new IDs: one is sent, repeated, canceled and sent again; one is sent ten times at once; one is
    canceled before it is sent. So the handler is to run twice in all. Where `RUNONCE_URL_PREFIX` is None, nothing is
    canceled.

    `app` is a `RunOnceTestApp`, with the cookies that the request needs, or a WSGI app. `effects()` says how often the
    handler has acted so far (rows, mails, the length of a list); without it, only answers are compared. `status` is
    what the first request is to be answered with, by default anything below 400. `chat` and `request` are those of the
    app's method for `method`: `params`, `headers`, `content_type`, …; `json` is sent as JSON.

    Raises AssertionError, and whatever the app raises.
    """
    __tracebackhide__ = True
    if not isinstance(app, RunOnceTestApp):
        app = RunOnceTestApp(app)
    if json is None:
        send = getattr(app, method.lower())
    else:
        send = functools.partial(getattr(app, f"{method.lower()}_json"), params=json)
    same = {name: request[name] for name in ("headers", "extra_environ") if name in request}
    check = _Check(
        functools.partial(send, url, chat=chat, expect_errors=True, **request),
        functools.partial(app.cancel, chat=chat, expect_errors=True, **same),
        effects,
    )
    try:
        call, first = check.one_after_the_other(status)
        check.at_once()
        if app.url_prefix is not None:
            check.cancel_after(call, first)
            check.cancel_before()
    except _Broken as broken:
        raise AssertionError(f"{method} {url} does not run once: {broken}") from None
    return first


class _Broken(Exception):
    """What broke, in words."""


class _Check:
    """The steps of the check. `send(tool_call=…)` sends the request, `cancel(tool_call)` cancels it."""

    def __init__(
        self,
        send: Callable[..., TestResponse],
        cancel: Callable[..., TestResponse],
        effects: Callable[[], int] | None,
    ) -> None:
        self._send = send
        self._cancel = cancel
        self._effects = effects
        self._acts_per_run = 0

    def one_after_the_other(self, status: int | None) -> tuple[str, TestResponse]:
        """Send a call and repeat it. Return its ID and the first answer."""
        call, before = str(uuid.uuid4()), self._acts()
        first = self._send(tool_call=call)
        if _is_replayed(first):
            raise _Broken("the first request of a new call was answered as a repeat: does the key tell calls apart?")
        if status is None and first.status_int >= 400:
            raise _Broken(
                f"the first request was answered {_told(first)}; if that is its answer, say so by `status`"
                + _advice(first)
            )
        if status is not None and first.status_int != status:
            raise _Broken(f"the first request was answered {_told(first)}, not {status}{_advice(first)}")
        self._acts_per_run = self._acts() - before
        if self._effects and self._acts_per_run < 1:
            raise _Broken(
                "the first request did nothing that `effects` counts, so a second run would not be noticed"
                + _advice(first)
            )
        self._expect_same(first, self._send(tool_call=call), "the repeat")
        self._expect_acts(before + self._acts_per_run, "the repeat")
        return call, first

    def at_once(self) -> None:
        """Send a call many times at the same moment."""
        call, before = str(uuid.uuid4()), self._acts()
        answers = together(*[functools.partial(self._send, tool_call=call)] * AT_ONCE)
        # A repeat that must not wait, or not any longer, is told to come again.
        answers = [self._send(tool_call=call) if _code(answer) == "still_running" else answer for answer in answers]
        for answer in answers:
            if _is_refused(answer):
                raise _Broken(f"one of {AT_ONCE} requests sent at once was refused: {_told(answer)}")
        runs = [answer for answer in answers if not _is_replayed(answer)]
        if not runs:
            raise _Broken("each request of a new call was answered as a repeat: does the key tell calls apart?")
        if len(runs) > 1:
            statuses = ", ".join(sorted(answer.status for answer in runs))
            raise _Broken(f"of {AT_ONCE} requests sent at once, {len(runs)} ran the handler: {statuses}")
        for answer in answers:
            if answer is not runs[0]:
                self._expect_same(runs[0], answer, f"one of {AT_ONCE} requests sent at once")
        acts = self._acts() - before
        if acts > self._acts_per_run:
            raise _Broken(f"{AT_ONCE} requests sent at once acted {acts} times, a single one {self._acts_per_run}")

    def cancel_after(self, call: str, first: TestResponse) -> None:
        """Cancel a call that has run, and send it again."""
        acts = self._acts()
        facts = self._canceled(call, "a call that had run")
        _expect_said(facts, {"received": True, "state": "done"}, "a call that had run")
        if facts.get("status") != first.status_int:
            raise _Broken(
                f"the cancel of a call that was answered {first.status} says that it was {facts.get('status')}"
            )
        if self._canceled(call, "a canceled call") != facts:
            raise _Broken("a second cancel of the same call says something else than the first")
        self._expect_canceled(call, "a call that was canceled after its run")
        self._expect_acts(acts, "a canceled call")

    def cancel_before(self) -> None:
        """Cancel a call that has not been sent, and send it."""
        call, acts = str(uuid.uuid4()), self._acts()
        facts = self._canceled(call, "a call that had not been sent")
        _expect_said(facts, {"received": False, "state": "not_received"}, "a call that had not been sent")
        self._expect_canceled(call, "a call that was canceled before it came")
        self._expect_acts(acts, "a canceled call")

    def _canceled(self, call: str, what: str) -> dict[str, Any]:
        answer = self._cancel(call)
        facts = _json_object(answer)
        if answer.status_int != 200 or "received" not in facts:
            raise _Broken(f"the cancel of {what}, {answer.request.path}, was answered {_told(answer)}{_advice(answer)}")
        return facts

    def _expect_canceled(self, call: str, what: str) -> None:
        answer = self._send(tool_call=call)
        if answer.status_int != 409 or _code(answer) != "canceled":
            raise _Broken(f"{what} was answered {_told(answer)}, not refused by 409 canceled")

    def _expect_same(self, first: TestResponse, answer: TestResponse, what: str) -> None:
        if _is_refused(answer):
            raise _Broken(f"{what} was refused: {_told(answer)}")
        if not _is_replayed(answer):
            raise _Broken(
                f"{what} was not answered from the record, so the handler ran again: the answer {_told(answer)} has no "
                f"Idempotent-Replayed header. Is the view decorated with once, below its route?{_advice(answer)}"
            )
        if answer.status != first.status:
            raise _Broken(f"{what} was answered {answer.status}, the run {first.status}")
        if answer.body != first.body:
            raise _Broken(f"{what} got another body than the run: {answer.body[:200]!r}, not {first.body[:200]!r}")
        for name in COMPARED:
            theirs, ours = answer.headers.getall(name), first.headers.getall(name)
            if theirs != ours:
                raise _Broken(f"{what} got another {name} header than the run: {theirs}, not {ours}")

    def _expect_acts(self, number: int, what: str) -> None:
        acts = self._acts()
        if acts != number:
            raise _Broken(f"{what} acted: `effects` counts {acts} after it, {number} before it")

    def _acts(self) -> int:
        return self._effects() if self._effects else 0


def _expect_said(facts: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    said = {name: facts.get(name) for name in expected}
    if said != expected:
        raise _Broken(f"the cancel of {what} says {json_module.dumps(said)}, not {json_module.dumps(expected)}")


def _is_replayed(answer: TestResponse) -> bool:
    return bool(answer.headers.get("Idempotent-Replayed") == "true")


def _is_refused(answer: TestResponse) -> bool:
    """A saved response can be a problem as well: that of a run whose outcome is unknown."""
    return bool(_code(answer)) and not _is_replayed(answer)


def _code(answer: TestResponse) -> str | None:
    """The code of a refusal of the library's (CONTRACT section 6), None for another answer."""
    problem = _json_object(answer)
    is_ours = str(problem.get("type")).startswith("urn:flask-runonce:")
    return str(problem.get("code")) if is_ours else None


def _told(answer: TestResponse) -> str:
    """An answer in brackets and words: its status, and what it says."""
    code = _code(answer)
    said = f"{code}: {answer.json.get('detail')}" if code else repr(answer.body[:200])
    return f"{answer.status} ({said})"


def _advice(answer: TestResponse) -> str:
    """What to do about an answer as a login gives it to a stranger; nothing for any other."""
    if answer.status_int in (401, 403, 407):
        said = "The request was not let in"
    elif 300 <= answer.status_int < 400 and answer.location:
        said = f"The request was sent to {answer.location}. If that is the login, it was not let in"
    else:
        return ""
    return (
        f". {said}: log in with a RunOnceTestApp and give that as `app`, or send what the app wants (a token, "
        "`Authorization`) in `headers`"
    )


def _json_object(answer: TestResponse) -> dict[str, Any]:
    try:
        document = json_module.loads(answer.body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
