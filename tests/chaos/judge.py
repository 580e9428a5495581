"""Holds what the clients saw, and what the effects file says was done, to the contract."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests.chaos.book import Book
from tests.chaos.storm import FINAL, Asked, Story

PASSING = {"store_unavailable": 503, "still_running": 409}
"""Problems that a later repeat need not get again, and their status."""
LASTING = {"outcome_unknown": 500, "canceled": 409}

Facts = dict[str, Any]


class Limits(NamedTuple):
    """Seconds: how long a request may wait for a run, a cancel for one, and a store keep either waiting.

    `frozen` are the times in which a worker was stopped: a request that it had in hand is excused for as long.
    """

    wait: float
    cancel: float
    store: float
    frozen: Sequence[tuple[float, float]] = ()


class Judge:
    """Finds what is wrong with each story. `book` is what the app wrote."""

    def __init__(self, book: Book, limits: Limits) -> None:
        self._limits = limits
        self._effects = _by_call(book.read("effects"))
        self._hooks = _by_call(book.read("hooks"))
        self._lost = _by_call(book.read("lost"))

    @property
    def effects(self) -> int:
        return sum(map(len, self._effects.values()))

    def faults(self, stories: Sequence[Story]) -> list[str]:
        """What is wrong, a sentence each. Empty when the promise was kept."""
        found = [f"{story.call} ({story.path}): {fault}" for story in stories for fault in self._story(story)]
        strangers = set(self._effects) - {story.call for story in stories}
        return found + [f"{call}: has run, and nobody sent it" for call in sorted(strangers)]

    def run_twice(self, stories: Sequence[Story]) -> int:
        """How many calls ran once more than somebody chose."""
        return sum(len(self._effects[story.call]) > self._allowed(story) for story in stories)

    def chosen(self, stories: Sequence[Story]) -> int:
        """How many runs beyond the first one of a call somebody chose: by on_lost="rerun", or by a forget."""
        return sum(max(0, min(len(self._effects[story.call]), self._allowed(story)) - 1) for story in stories)

    def _allowed(self, story: Story) -> int:
        chosen = len(story.forgotten)
        return 1 + chosen + (len(self._lost[story.call]) if story.path == "/rerun" else 0)

    def _story(self, story: Story) -> Iterator[str]:
        effects = self._effects[story.call]
        if len(effects) > self._allowed(story):
            yield f"ran {len(effects)} times, where {self._allowed(story)} can be explained: {effects}"
        tokens = {effect["attempt"]: effect["token"] for effect in effects}
        for asked in story.asked:
            yield from self._late(story, asked)
            if asked.reply and asked.cancel:
                yield from self._cancel(story, asked, set(tokens.values()))
            elif asked.reply:
                yield from self._answer(story, asked, tokens)
        yield from _agreement(story)
        yield from _finality(story)
        audits = [asked for asked in story.asked if asked.audit]
        if audits and not _final(audits[-1], story):
            yield f"has no answer for good after the storm: {_show(audits[-1])}"

    def slowest(self, stories: Sequence[Story]) -> float:
        """By how many seconds at most a request exceeded the time that it may wait for its run."""
        return max(self._beyond(story, asked) for story in stories for asked in story.asked)

    def _beyond(self, story: Story, asked: Asked) -> float:
        limits = self._limits
        excused = sum(max(0.0, min(end, asked.over) - max(start, asked.sent)) for start, end in limits.frozen)
        fair = limits.cancel if asked.cancel else max(limits.wait, story.plan["seconds"])
        return asked.over - asked.sent - excused - fair

    def _late(self, story: Story, asked: Asked) -> Iterator[str]:
        beyond = self._beyond(story, asked)
        if asked.late or beyond > self._limits.store:
            yield f"waited for {beyond:.1f} s longer than for its run: {_show(asked)}"

    def _answer(self, story: Story, asked: Asked, tokens: dict[str, str]) -> Iterator[str]:
        reply = asked.reply
        assert reply
        ran = asked.attempt in tokens
        if reply.status == 201:
            token = reply.json["token"]
            if not reply.replayed and tokens.get(asked.attempt) != token:
                yield f"was answered as if it had run: {_show(asked)}"
            if token not in tokens.values():
                yield f"was answered with a result that no run had: {_show(asked)}"
            if reply.replayed and ran:
                yield f"ran, and was answered from the record: {_show(asked)}"
        elif reply.code:
            wanted = {**PASSING, **LASTING}.get(reply.code)
            if wanted != reply.status or (reply.code in PASSING) != (reply.retry_after is not None):
                yield f"got a problem that the contract does not name here: {_show(asked)}"
            if ran:
                yield f"was refused, and ran: {_show(asked)}"
            if reply.code == "canceled" and not any(each.cancel for each in story.asked):
                yield f"was canceled by nobody: {_show(asked)}"
        elif not (story.plan.get("fails") and reply.status == 500 and ran):
            yield f"got an answer that the contract does not name: {_show(asked)}"

    def _cancel(self, story: Story, asked: Asked, tokens: set[str]) -> Iterator[str]:
        reply = asked.reply
        assert reply
        if reply.code:
            if (reply.code, reply.status) != ("store_unavailable", 503):
                yield f"a cancel got a problem that the contract does not name: {_show(asked)}"
            return
        if reply.status not in (200, 202) or not reply.json:
            yield f"a cancel got an answer that the contract does not name: {_show(asked)}"
            return
        if reply.status == 200 and not self._hooks[story.call]:
            yield f"a cancel was answered, and no hook was called: {_show(asked)}"
        if reply.json["received"] is False and tokens and not story.forgotten:
            yield f"was canceled before it started, and has run: {_show(asked)}"
        if reply.json.get("status") == 201 and reply.saved["token"] not in tokens:
            yield f"a cancel was told of a result that no run had: {_show(asked)}"
        if reply.json.get("status") not in (None, 201, 500):
            yield f"a cancel was told of a status that no run had: {_show(asked)}"


def _agreement(story: Story) -> Iterator[str]:
    """All results of one life of the record are the same one; under "rerun", those that come from the record."""
    last = max((forgotten.ended for forgotten in story.forgotten), default=0.0)
    results = {
        _result(asked)
        for asked in story.asked
        if asked.sent > last and _result(asked) and (story.path != "/rerun" or _from_record(asked))
    }
    if len(results) > 1:
        yield f"was answered with {len(results)} results: {sorted(map(str, results))}"


def _finality(story: Story) -> Iterator[str]:
    """What the record has once said, it says for ever: to every request that is sent after that answer came."""
    asked = sorted(story.asked, key=lambda each: each.sent)
    for early in asked:
        if not early.reply or not (_from_record(early) or early.cancel and early.reply.status in (200, 202)):
            continue
        for after in asked:
            if after.sent <= early.over or after.cancel or not after.reply or after.reply.code in PASSING:
                continue
            if any(each.ended > early.sent and each.began < after.over for each in story.forgotten):
                continue
            if after.reply.code == "canceled":
                continue
            said, says = _said(early), _said(after)
            if early.cancel or says != said:
                yield f"was answered {_show(after)}, after {_show(early)}"
                return


def _from_record(asked: Asked) -> bool:
    """Whether the answer is what the record says for good."""
    return bool(asked.reply and not asked.cancel and (asked.reply.replayed or asked.reply.code in LASTING))


def _said(asked: Asked) -> object:
    assert asked.reply
    return asked.reply.code or (asked.reply.status, asked.reply.body)


def _result(asked: Asked) -> str:
    """The token of the run whose result was answered, "" where none was."""
    reply = asked.reply
    if not reply:
        return ""
    if asked.cancel:
        return str(reply.saved["token"]) if (reply.json or {}).get("status") == 201 else ""
    return str(reply.json["token"]) if reply.status == 201 else ""


def _final(asked: Asked, story: Story) -> bool:
    reply = asked.reply
    if not reply:
        return False
    return reply.status == 201 or reply.code in FINAL or bool(story.plan.get("fails") and not reply.code)


def _by_call(lines: Sequence[Facts]) -> dict[str, list[Facts]]:
    pages: dict[str, list[Facts]] = collections.defaultdict(list)
    for line in lines:
        pages[line["call"]].append(line)
    return pages


def _show(asked: Asked) -> str:
    what = "cancel" if asked.cancel else "audit" if asked.audit else "call"
    reply = asked.reply
    said = f"{reply.status}{' replayed' * reply.replayed} {reply.body[:300]!r}" if reply else "nothing"
    return f"[{what} {asked.attempt}, {asked.sent:.2f} to {asked.over:.2f}: {said}]"
