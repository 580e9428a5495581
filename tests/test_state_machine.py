"""Whatever is done to some calls on the memory store, in whatever order, a model of a few lines says what comes of it.

One thing is done at a time, so nobody waits: who would have to is told so at once. What happens when several act at
once is in `test_interleavings.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from flask_runonce.call import Call, CanceledCall
from flask_runonce.problems import OUTCOME_UNKNOWN, Answer
from flask_runonce.record import CallKey, SavedResponse
from flask_runonce.rule import Do
from flask_runonce.runner import Runner
from flask_runonce.settings import Settings
from flask_runonce.stores import MemoryStore

FORGET = 100.0
SETTINGS = Settings(wait_timeout=0, cancel_timeout=0, forget_after=FORGET, release_statuses={429})

keys = st.sampled_from([CallKey("", "chat", "a"), CallKey("", "chat", "b")])


class Known(NamedTuple):
    """What the model knows of a call. `state` is "running", "done" or "canceled"; the times are those of the test."""

    state: str
    run: str = ""
    input: str | None = None
    found: str | None = None
    owed: bool = False
    saved: SavedResponse | None = None
    too_large: bool = False
    repeats: int = 0
    used_at: float = 0.0


class RunOnceMachine(RuleBasedStateMachine):
    """Does the same to a runner and to the model, and compares."""

    running = Bundle("running")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.known: dict[CallKey, Known] = {}
        self.hooks: list[CanceledCall] = []
        self.expected_hooks: list[CanceledCall] = []
        store = MemoryStore(timer=lambda: self.now)
        self.runner = Runner(store, SETTINGS, sender=None, call_hooks=self.hooks.append)

    @rule(target=running, key=keys, input=st.sampled_from(["an input", "another", None]))
    def begin(self, key: CallKey, input: str | None) -> object:
        got = self.runner.begin(key, input)
        known = self.known.get(key)
        if known is None:
            assert isinstance(got, Call)
            self.known[key] = Known("running", got.claim.run, input)
            return got
        assert isinstance(got, Answer)
        self.known[key] = known._replace(repeats=known.repeats + 1, used_at=self.now)
        if known.found:
            assert got.code == "canceled"
        elif known.input and input and known.input != input:
            assert got.code == "input_mismatch"
        elif known.state == "running":
            assert got.code == "still_running"
        elif known.too_large:
            assert got.code == "response_too_large"
        else:
            assert known.saved and not got.code
            assert (got.status, got.body) == (known.saved.status, known.saved.body)
        return multiple()

    @rule(
        target=ended,
        call=consumes(running),
        status=st.sampled_from(["201 CREATED", "404 NOT FOUND", "429 TOO MANY REQUESTS"]),
        body=st.binary(max_size=3),
        too_large=st.booleans(),
    )
    def finish(self, call: Call, status: str, body: bytes, too_large: bool) -> Call:
        saved = SavedResponse(status, body=b"" if too_large else body)
        self.runner.finish(call, saved, too_large=too_large)
        if status.startswith("429"):
            self._released(call)
        else:
            self._done(call, saved, too_large)
        return call

    @rule(target=ended, call=consumes(running))
    def fail(self, call: Call) -> Call:
        self.runner.fail(call)
        self._done(call, OUTCOME_UNKNOWN)
        return call

    @rule(target=ended, call=consumes(running), fails=st.booleans())
    def release(self, call: Call, fails: bool) -> Call:
        call.release()
        if fails:
            self.runner.fail(call)
        else:
            self.runner.finish(call, SavedResponse("201 CREATED"))
        self._released(call)
        return call

    @rule(call=ended)
    def end_again(self, call: Call) -> None:
        known = self.known.get(call.key)
        if known is None or known.run != call.claim.run:
            self.runner.finish(call, SavedResponse("200 OK", body=b"late"))
            if known:  # it changes nothing but the idle time: it is one more who has found the record
                self.known[call.key] = known._replace(used_at=self.now)

    @rule(key=keys)
    def cancel(self, key: CallKey) -> None:
        told = self.runner.cancel(key)
        known = self.known.get(key, Known("canceled", found="not_received"))
        self.known[key] = known = known._replace(
            found=known.found or known.state, owed=known.state == "running", used_at=self.now
        )
        assert (told.found.value, told.pending) == (known.found, known.owed)
        if not known.owed:
            self._hook(key)

    @rule(key=keys)
    def forget(self, key: CallKey) -> None:
        told = self.runner.forget(key)
        known = self.known.get(key)
        if known and known.state == "running":
            assert told is Do.REFUSE
        else:
            assert told is (Do.SAVED if self.known.pop(key, None) else Do.GONE)

    @rule(seconds=st.sampled_from([35.0, FORGET - 1, FORGET + 1]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        for key, known in list(self.known.items()):
            if known.state != "running" and known.used_at + FORGET <= self.now:
                del self.known[key]

    @invariant()
    def all_is_as_expected(self) -> None:
        rows = self.runner.list(None, None, limit=10, offset=0).rows
        assert {seen.record.key: (seen.record.state.value, seen.repeats) for seen in rows if seen.record} == {
            key: (known.state, known.repeats) for key, known in self.known.items()
        }
        assert self.hooks == self.expected_hooks

    def _done(self, call: Call, saved: SavedResponse, too_large: bool = False) -> None:
        known = self.known[call.key]
        assert call.canceled == bool(known.found)
        self.known[call.key] = known._replace(
            state="done", saved=saved, too_large=too_large, owed=False, used_at=self.now
        )
        if known.owed:
            self._hook(call.key)

    def _released(self, call: Call) -> None:
        known = self.known.pop(call.key)
        if known.found:
            self.known[call.key] = Known(
                "canceled", call.claim.run, found="not_received", repeats=known.repeats, used_at=self.now
            )
            self._hook(call.key)

    def _hook(self, key: CallKey) -> None:
        known = self.known[key]
        assert known.found
        self.expected_hooks.append(CanceledCall(key, known.found, known.saved))


TestRunOnce = RunOnceMachine.TestCase
TestRunOnce.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
