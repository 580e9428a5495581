"""Explores every interleaving of a few actors that share one call.

The actors drive the real `Runner` and the real `Keeper`, one process each. Every actor stops before each verb of the
store and before its handler starts; at each stop a schedule says whose turn it is, and whether the step goes well. A
schedule is played from its start, and on past its end for as long as it comes to choices that were not taken yet.

Two schedules that have led to the same state (of the record, the clock, the judge, and of what every actor has seen)
have the same future. It is played once, and counted for both.

No thread, no sleep, no chance: an actor is a greenlet, time moves where an actor moves it, or to the next time-out when
everybody waits, and tokens are named after who made them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

from flask_runonce import call as call_module
from flask_runonce import keeper as keeper_module
from flask_runonce import runner as runner_module
from flask_runonce import signals
from flask_runonce.call import CanceledCall
from flask_runonce.errors import StoreError, StoreFull, StoreUnavailable
from flask_runonce.keeper import Keeper
from flask_runonce.problems import Answer
from flask_runonce.record import CallKey, Claim, Record, SavedResponse, Seen
from flask_runonce.runner import Runner
from flask_runonce.settings import Settings
from flask_runonce.stores import Renewed, Store, Swapped
from tests.judge import Judge, Life
from tests.model_store import ModelStore

T = TypeVar("T")

LEASE = 35.0
SETTINGS = Settings(lease=LEASE, wait_timeout=100, cancel_timeout=100, forget_after=3600)
KEY = CallKey("", "chat", "call")
ROUND = 10.0
"""Seconds up to which all waiting is rounded, so that nothing depends on how long a step takes on a real store."""
FEW = 30
"""Steps after which an actor that is still not done will never be."""


@dataclasses.dataclass(frozen=True)
class Actor:
    """What somebody does. `faults`: how many of its verbs may fail. `mortal`: its process may be killed at any step."""

    kind: str
    name: str
    play: Callable[[Stage], None]
    process: str
    rerun: bool = False
    input: str = "an input"
    faults: int = 0
    mortal: bool = False


def request(name: str, ends: str = "answers", *, process: str = "", **options: Any) -> Actor:
    """A request that claims, runs a handler that "answers", "fails", "releases" or is "too large", and saves its end.

    Or it is answered otherwise. It stands in a process of its own, unless `process` names another one.
    """

    def play(stage: Stage) -> None:
        player, runner = stage.playing, stage.runner()
        admitted = runner.begin(stage.key, player.input, rerun=player.rerun)
        if isinstance(admitted, Answer):
            stage.judge.answered(player, admitted)
            return
        stage.pause("start")
        stage.judge.started(player)
        if ends == "releases":
            admitted.release()
            stage.judge.releases(player)
        if ends == "fails":
            runner.fail(admitted)
        else:
            response = SavedResponse("201 CREATED", (("Content-Type", "text/plain"),), player.process.encode())
            runner.finish(admitted, response, too_large=ends == "too large")

    return Actor("request", name, play, process or name, **options)


def cancel(name: str, *, process: str = "", **options: Any) -> Actor:
    """A cancel of the call."""

    def play(stage: Stage) -> None:
        try:
            told = stage.runner().cancel(stage.key)
        except StoreError:
            assert stage.playing.faulted, "the store was there"
        else:
            stage.judge.canceled(stage.playing, told)

    return Actor("cancel", name, play, process or name, **options)


def forget(name: str, **options: Any) -> Actor:
    """A person who forgets the call."""

    def play(stage: Stage) -> None:
        try:
            told = stage.runner().forget(stage.key)
        except StoreError:
            assert stage.playing.faulted, "the store was there"
        else:
            stage.judge.forgot(stage.playing, told)

    return Actor("forget", name, play, name, **options)


def keeper(process: str, ticks: int = 1, **options: Any) -> Actor:
    """The background thread of `process`: it renews the lease and tries again, `ticks` times."""

    def play(stage: Stage) -> None:
        for _ in range(ticks):
            stage.pause("tick")
            stage.tick()

    return Actor("keeper", f"{process}'s keeper", play, process, **options)


def jump(*seconds: float) -> Actor:
    """The clock, which moves on once for each of `seconds`: the processes were paused, or the store was away."""

    def play(stage: Stage) -> None:
        for some in seconds:
            stage.pause(f"+{some:g} s")
            stage.jumped += some
            stage.advance(some)

    return Actor("clock", "clock", play, "clock")


class Choice(NamedTuple):
    """Whose turn it is, and what becomes of the step.

    It is "done", or it "fails", or there is "no room"; or it is done and the "reply lost"; or it is "sent twice" by a
    driver, and the second time is a step of its own; or the whole process "dies" before it.
    """

    player: int
    what: str = "done"


class Scenario(NamedTuple):
    """Actors that share a call."""

    actors: Sequence[Actor]
    settings: Settings = SETTINGS


_playing: list[Stage] = []


class Player:
    """An actor on a stage: where it stands, and what it has seen."""

    def __init__(self, stage: Stage, actor: Actor) -> None:
        self.name, self.kind, self.process = actor.name, actor.kind, actor.process
        self.rerun, self.input, self.mortal, self.faults = actor.rerun, actor.input, actor.mortal, actor.faults
        self.step = ""
        self.failures: Sequence[str] = ()
        self.ready: Callable[[], bool] = bool
        self.deadline: float | None = None
        self.began = stage.now
        self.before = self.last = Seen(None, "", stage.now)
        self.waited: set[Life] = set()
        self.told: object = None
        self.faulted = self.changed = self.dead = False
        self.tokens = self.steps = 0
        self.past = 0
        """Stands for all that it has seen."""
        self.greenlet = greenlet(functools.partial(actor.play, stage))

    @property
    def over(self) -> bool:
        return self.dead or self.greenlet.dead

    def saw(self, *what: object) -> None:
        self.past = hash((self.past, *what))


class Stage:
    """One schedule of a scenario, step by step.

    `new_store(stage)` makes the store that keeps the call under `key`, `move_clock(seconds)` moves its clock, unless it
    goes by the stage's `now`.
    """

    def __init__(
        self,
        scenario: Scenario,
        key: CallKey,
        new_store: Callable[[Stage], Store],
        move_clock: Callable[[float], None],
    ) -> None:
        self.now = 1000.0
        self.jumped = 0.0
        self.died_at: dict[str, float] = {}
        self.key = key
        self.settings = scenario.settings
        self.store = new_store(self)
        self.judge = Judge(self)
        self.trace: list[str] = []
        self._move_clock = move_clock
        self._hub = getcurrent()
        self._free = self._cleared = False
        self._runners: dict[str, Runner] = {}
        self._hooks_called: list[str] = []
        self._version = ""
        self.players = [Player(self, actor) for actor in scenario.actors]

    def start(self) -> None:
        """Let all go to their first stop."""
        for player in self.players:
            self.playing = player
            player.greenlet.switch()

    # For the actors.

    def pause(
        self,
        step: str,
        *,
        failures: Sequence[str] = (),
        ready: Callable[[], bool] = lambda: True,
        deadline: float | None = None,
    ) -> str:
        """Stop before `step` until it is this actor's turn, and give what is to become of it: "done" or a failure.

        Its turn does not come before `ready()`, which will be true at `deadline`.
        """
        if self._cleared:
            raise GreenletExit
        if self._free:
            return "done"
        player = self.playing
        player.step, player.failures, player.ready, player.deadline = step, failures, ready, deadline
        what: str = self._hub.switch()
        player.saw(step, what, failures and self.now)
        return what

    def runner(self) -> Runner:
        """The runner of the process of the actor whose turn it is."""
        process = self.playing.process
        if process not in self._runners:
            store = cast(Store, _Door(self))
            self._runners[process] = Runner(store, self.settings, sender=None, call_hooks=self._call_hooks)
        return self._runners[process]

    def tick(self) -> None:
        """What a process's background thread does each time it wakes."""
        keeper = self.runner()._keeper
        assert keeper
        work, player = keeper._work(), self.playing
        calls = dict(work.calls)
        player.saw(*calls, len(work.jobs))
        keeper._renew(work)
        there = self.store.read(self.key).record
        for run, call in work.calls.items():
            if there and there.run == run in calls and there.found:
                assert call.canceled or player.faulted, "the handler cannot learn that it was canceled"
        keeper._try_again(work)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._move_clock(seconds)

    def verb(self, step: str, do: Callable[[], T], *failures: str, **until: Any) -> T:
        """Stop before a verb of the store, do it, and show the judge what it changed."""
        what = self.pause(step, failures=("fails", *failures), **until)
        if what == "fails":
            raise StoreUnavailable("it failed")
        if what == "no room":
            raise StoreFull("there was no room")
        result = self._watched(step, do)
        if what == "sent twice":
            self.pause(f"{step} again")
            result = self._watched(step, do)
        if what == "reply lost":
            raise StoreUnavailable("the reply was lost")
        return result

    def _watched(self, step: str, do: Callable[[], T]) -> T:
        player = self.playing
        player.before = before = self.store.read(self.key)
        if before.record is None and self._version:
            self.judge.expired()
        result = do()
        after = self.store.read(self.key) if step == "swap" else before
        self._version = after.version
        if before.version != after.version:
            player.changed = True
            self.judge.changed(player, before, after)
        return result

    def hooks_called_by(self, player: Player) -> bool:
        return player.name in self._hooks_called

    def new_version(self) -> str:
        """A version that was never there, named after who puts it."""
        return self._token()

    def new_run(self) -> str:
        """A run token that was never there, named after who makes it."""
        return self._token()

    def _token(self) -> str:
        self.playing.tokens += 1
        return f"{self.playing.name}.{self.playing.tokens}"

    def _call_hooks(self, call: CanceledCall) -> None:
        self._hooks_called.append(self.playing.name)
        self.judge.hooked(self.playing, call)

    # For the schedule.

    def choices(self) -> list[Choice]:
        """What may happen next. When all wait, time passes until one need not wait longer. Nothing when all is over."""
        while not (able := [n for n, player in enumerate(self.players) if not player.over and player.ready()]):
            deadlines = [player.deadline for player in self.players if not player.over and player.deadline is not None]
            assert bool(deadlines) != self.over, "somebody waits for ever"
            if not deadlines:
                return []
            if not self._catch_up():
                self.trace.append("(time passes)")
                self.advance(min(deadlines) - self.now)
        found = [Choice(n) for n in able]
        found += [Choice(n, what) for n in able if self.players[n].faults for what in self.players[n].failures]
        found += [Choice(n, "dies") for n, player in enumerate(self.players) if player.mortal and not player.over]
        return found

    @property
    def over(self) -> bool:
        return all(player.over for player in self.players)

    def take(self, choice: Choice) -> None:
        """Let one take a step."""
        player = self.players[choice.player]
        told = "" if choice.what == "done" else f" ({choice.what})"
        self.trace.append(f"{player.name}: {player.step}{told}")
        if choice.what == "dies":
            self.died_at[player.process] = self.now
            for other in self.players:
                other.dead |= other.process == player.process
            return
        if choice.what != "done":
            player.faults -= 1
            player.faulted = True
        player.steps += 1
        assert player.steps < FEW, f"{player.name} never comes to an end"
        self.playing = player
        player.greenlet.switch(choice.what)

    def state(self) -> object:
        """Equal for two stages that have the same future. Of a store that is not the model, one cannot know."""
        if not isinstance(self.store, ModelStore):
            return object()
        # What an actor has seen says where it stands. It does not matter any more when its whole process is done.
        busy = self._busy | {player.process for player in self.players if not player.over}
        pasts = tuple(
            (player.past, player.over, self.judge.knows(player)) if player.process in busy else None
            for player in self.players
        )
        entry = self.store.entries.get(self.key)
        return (pasts, entry and entry[:4], self.now, (*self.died_at.items(),), self.judge.state())

    def finish(self) -> None:
        """All is over: the background threads do what they still have to, and the judge looks at what is left."""
        self._catch_up()
        self.judge.closed(self.store.read(self.key))

    def _catch_up(self) -> bool:
        """Let the background threads do their jobs in one step. False when they have none."""
        by_process = {player.process: player for player in self.players}
        busy = sorted(self._busy - self.died_at.keys())
        self._free = True
        for process in busy:
            self.trace.append(f"({process}'s keeper works)")
            self.playing = by_process[process]
            self.tick()
        self._free = False
        return bool(busy)

    @property
    def _busy(self) -> set[str]:
        """The processes whose background thread has jobs."""
        keepers = {process: runner._keeper for process, runner in self._runners.items()}
        return {process for process, keeper in keepers.items() if keeper and keeper._work().jobs}

    def clear(self) -> None:
        """End the actors that stand in the middle of something."""
        self._cleared = True
        for player in self.players:
            player.greenlet.throw()


class _Door:
    """The store as the runner of one process sees it: each verb is a step."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.shared = stage.store.shared

    def read(self, key: CallKey) -> Seen:
        return self._saw(self._stage.verb("read", lambda: self._stage.store.read(key)))

    def swap(self, key: CallKey, seen: str, new: Record | None, **options: Any) -> Swapped:
        put = ""

        def swap() -> Swapped:
            nonlocal put
            swapped = self._stage.store.swap(key, seen, new, **options)
            if swapped.done:
                put = swapped.seen.version
            elif put and swapped.seen.version == put:
                swapped = swapped._replace(done=True)  # a store knows its own version, when it sends a swap again
            return swapped

        needs_room = new and (not seen or new.response and new.response.body)
        swapped = self._stage.verb("swap", swap, "reply lost", "sent twice", *(["no room"] if needs_room else []))
        self._stage.playing.saw(swapped.done)
        return swapped._replace(seen=self._saw(swapped.seen))

    def renew(self, claims: Sequence[Claim], **options: Any) -> Renewed:
        renewed = self._stage.verb("renew", lambda: self._stage.store.renew(claims, **options), "reply lost")
        self._stage.playing.saw(renewed)
        return renewed

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        stage, deadline = self._stage, self._stage.now + ROUND * math.ceil(timeout / ROUND)

        def ready() -> bool:
            return stage.now >= deadline or stage.store.read(key).version != version

        stage.playing.waited.add(stage.judge.life_of(version))
        return self._saw(stage.verb("wait", lambda: stage.store.read(key), ready=ready, deadline=deadline))

    def _saw(self, seen: Seen) -> Seen:
        self._stage.playing.last = seen
        self._stage.playing.saw(*seen[:4])
        return seen


def new_model(stage: Stage) -> Store:
    return cast(Store, ModelStore(lambda: stage.now, stage.new_version))


@contextlib.contextmanager
def playing(
    scenario: Scenario,
    schedule: Sequence[Choice],
    *,
    key: CallKey = KEY,
    new_store: Callable[[Stage], Store] = new_model,
    move_clock: Callable[[float], None] = lambda seconds: None,
) -> Iterator[Stage]:
    """A stage on which `schedule` has been played. What goes wrong on it is told with the schedule."""
    stage = Stage(scenario, key, new_store, move_clock)
    try:
        _playing[:] = [stage]
        stage.start()
        for choice in schedule:
            assert choice in stage.choices(), f"{choice} cannot be taken"
            stage.take(choice)
        yield stage
    except Exception as error:
        trace = "\n    ".join(stage.trace)
        raise AssertionError(f"{error!r} after\n    {trace}") from error
    finally:
        stage.clear()


@contextlib.contextmanager
def world() -> Iterator[None]:
    """Let the package take its time and its tokens from the stage that plays, start no thread and log nothing."""
    time = types.SimpleNamespace(monotonic=lambda: _playing[0].now)
    secrets = types.SimpleNamespace(token_hex=lambda _: _playing[0].new_run())
    with (
        mock.patch.object(call_module, "time", time),
        mock.patch.object(keeper_module, "time", time),
        mock.patch.object(runner_module, "time", time),
        mock.patch.object(runner_module, "secrets", secrets),
        mock.patch.object(Keeper, "_wake", lambda self, work: work.wake.set()),
        mock.patch.object(signals.logger, "disabled", True),
    ):
        yield


class Explored(NamedTuple):
    """What was explored: how many schedules there are, and how many different states they pass.

    `ends` holds one schedule for each state in which it can end, `starts` is the number of handlers that started in the
    schedule with most of them, `answers` are all that were given.
    """

    schedules: int
    states: int
    ends: Sequence[Sequence[Choice]]
    starts: int
    answers: frozenset[object]


@world()
def explore(scenario: Scenario, new_store: Callable[[Stage], Store] = new_model) -> Explored:
    """Play every schedule of `scenario`. Raises `AssertionError`, with the schedule, at the first that is wrong."""
    with playing(scenario, (), new_store=new_store) as stage:
        untaken: dict[object, list[Choice]] = {"start": stage.choices()}
    following: dict[object, list[object]] = {"start": []}
    ends: list[Sequence[Choice]] = []
    answers: set[object] = set()
    starts = 0
    todo: deque[tuple[tuple[Choice, ...], object]] = deque([((), "start")])
    while todo:
        schedule, state = todo[0]
        if not untaken[state]:
            todo.popleft()
            continue
        with playing(scenario, schedule, new_store=new_store) as stage:
            stage.choices()  # time passes as it did
            while untaken[state]:
                choice = untaken[state].pop()
                schedule = (*schedule, choice)
                stage.take(choice)
                choices, before, state = stage.choices(), state, stage.state()
                following[before].append(state)
                if state in following:
                    continue
                following[state], untaken[state] = [], choices
                todo.append((schedule, state))
                if not choices:
                    stage.finish()
                    ends.append(schedule)
                    starts = max(starts, stage.judge.starts)
            answers.update(player.told for player in stage.players)
    return Explored(_count("start", following), len(following), ends, starts, frozenset(answers - {None}))


def _count(root: object, following: dict[object, list[object]]) -> int:
    """How many ways lead from `root` to an end."""
    counts: dict[object, int] = {}
    todo = [root]
    while todo:
        state = todo[-1]
        missing = [after for after in following[state] if after not in counts]
        if missing:
            todo += missing
        else:
            counts[state] = sum(counts[after] for after in following[state]) or 1
            todo.pop()
    return counts[root]
