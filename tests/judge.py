"""Holds what happens to one call to the promise of CONTRACT.md, without asking the rule.

The judge sees each change of the record, each start of a handler, each answer, and each hook that is called. It knows
by itself who claimed, whose lease has ended and who was waiting, so a rule that is wrong cannot talk it round.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from flask_runonce.call import CanceledCall
from flask_runonce.problems import Answer, saved_response
from flask_runonce.record import Found, Outcome, Record, Seen, State
from flask_runonce.rule import Do
from flask_runonce.runner import Canceled

if TYPE_CHECKING:
    from tests.interleave import Player, Stage


@dataclasses.dataclass(eq=False)
class Life:
    """A record from its claim, or from the cancel that came first, until it is dropped or taken over.

    In one life one handler may start. Only a release, a person who forgets, `on_lost="rerun"` and the idle time begin
    another.
    """

    owner: str = ""
    """The process that claimed."""
    started: bool = False
    released: bool = False
    given_back: bool = False
    saved: Record | None = None
    owes_hooks: bool = False
    took_over: Life | None = None
    """The run that was lost before: nobody knows what it did."""

    @property
    def state(self) -> object:
        """Equal for two lives that will be judged alike."""
        facts = (self.owner, self.started, self.released, self.given_back, self.saved, self.owes_hooks)
        return (*facts, self.may_have_acted)

    @property
    def may_have_acted(self) -> bool:
        """True when a handler started that did not say that it did nothing."""
        acted = self.started and not self.released
        return acted or (self.took_over is not None and self.took_over.may_have_acted)


class Judge:
    """Raises `AssertionError` at the first thing that the contract does not allow."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._changed_at = stage.now
        self._lives = [Life()]
        self._of_version: dict[str, Life] = {}
        self._of_player: dict[str, Life] = {}

    @property
    def starts(self) -> int:
        """How many handlers have started."""
        return sum(life.started for life in self._lives)

    def life_of(self, version: str) -> Life:
        return self._of_version[version]

    def state(self) -> object:
        """Equal for two judges that will judge alike."""
        return (tuple(life.state for life in self._lives), self._changed_at)

    def knows(self, player: Player) -> object:
        """Equal for two judges that will judge what `player` does alike."""
        lives = [self._of_player.get(player.name), self._of_version.get(player.last.version)]
        numbers = [self._lives.index(life) if life else None for life in lives]
        waited = frozenset(map(self._lives.index, player.waited))
        return (*numbers, waited)

    def changed(self, player: Player, before: Seen, after: Seen) -> None:
        """`player` has put something else where `before` was."""
        was, now, life = before.record, after.record, self._lives[-1]
        mine = bool(life.owner) and life.owner == player.process
        did_nothing = not life.started or life.released
        match (was and was.state, now and now.state):
            case (None, State.RUNNING):
                assert player.kind == "request", "only a request claims"
                self._claimed(player, life)
            case (None, State.CANCELED):
                assert player.kind == "cancel", "only a cancel refuses a call that is not there"
            case (State.RUNNING, State.RUNNING) if was and now and was.run == now.run:
                assert player.kind == "cancel", "only a cancel marks a run"
                assert now == was._replace(found=Found.RUNNING, owed=now.owed), "a mark changes nothing else"
            case (State.RUNNING, State.RUNNING) if was and mine and life.took_over:
                assert did_nothing and after.lost, "only an owner that did nothing gives a call up again"
                life.given_back = True
                self._new_life(life.took_over).owner = life.took_over.owner
            case (State.RUNNING, State.RUNNING) if was:
                assert player.kind == "request" and player.rerun, "only rerun takes a run over"
                assert before.lost, "an owner that is alive was robbed"
                assert not was.found, "a canceled call was taken over"
                self._claimed(player, self._new_life(life))
            case (State.RUNNING, State.DONE) if was and now:
                lost = before.lost and now.outcome is Outcome.UNKNOWN
                assert mine or lost, "the end of a run was written by somebody else"
                assert not lost or self._stage.jumped or life.owner in self._stage.died_at, "a live owner was lost"
                by_cancel = Found.RUNNING if player.kind == "cancel" else None
                assert now.found is (was.found or by_cancel), "a cancel's mark changed"
                assert now.run == was.run, "another run's end"
                if now.outcome is Outcome.RESPONSE:
                    assert now.response and now.response.body == life.owner.encode(), "another run's response"
                life.saved = now
            case (State.RUNNING, State.CANCELED) if was:
                assert mine and was.found and did_nothing, "only an owner that did nothing releases a canceled call"
                life.given_back = True
            case (State.RUNNING, None) if was:
                if player.kind == "forget":
                    assert before.lost, "an owner that is alive was forgotten"
                    self._new_life()
                else:
                    assert mine and did_nothing, "only an owner that did nothing releases a call"
                    assert not was.found, "a cancel was lost"
                    life.given_back = True
                    self._new_life(life.took_over)
            case (State.DONE, State.DONE) if was:
                assert player.kind == "cancel", "only a cancel changes a record that is done"
                assert was.found is None and now == was._replace(found=Found.DONE), "what is saved changed"
                life.saved = now
            case (State.DONE | State.CANCELED, None):
                assert player.kind == "forget", "only a person forgets"
                self._new_life()
            case change:
                raise AssertionError(f"nothing allows {change}")
        if now:
            self._of_version[after.version] = self._lives[-1]
            self._lives[-1].owes_hooks |= now.owed
        self._changed_at = self._stage.now

    def expired(self) -> None:
        """The record went by itself."""
        idle = self._stage.now - self._changed_at
        assert idle >= self._stage.settings.forget_after, "a record went before its idle time was over"
        self._new_life()

    def started(self, player: Player) -> None:
        """The handler of `player`'s request starts."""
        life = self._of_player.get(player.name)
        assert life, "a handler starts without a claim"
        assert not life.started, "the handler ran twice"
        assert not life.given_back, "a claim that was given back ran"
        life.started = True

    def releases(self, player: Player) -> None:
        """That handler says that it did nothing."""
        self._of_player[player.name].released = True

    def answered(self, player: Player, answer: Answer) -> None:
        """`player`'s request did not run, and is answered."""
        player.told = (answer.status[:3], answer.code)
        self._in_time(player, self._stage.settings.wait_timeout)
        if answer.code in ("store_unavailable", "store_full"):
            assert player.faulted, "the store was there"
            return
        record, life = self._last(player)
        if answer.code not in ("canceled", "input_mismatch"):
            assert record.fingerprint == player.input, "another input was passed over"
        match answer.code:
            case "":
                expected = life.saved and saved_response(life.saved)
                assert expected and (answer.status, answer.body) == (expected.status, expected.body), "another answer"
                died_at = self._stage.died_at.get(life.owner, self._stage.now)
                assert self._stage.now <= died_at + self._stage.settings.lease + 10, "a lost owner was noticed late"
            case "canceled":
                assert record.found, "nobody canceled"
                waited = life in player.waited and record.state is not State.CANCELED
                assert not waited, "a request that waited before the cancel came has a right to the response"
            case "still_running":
                assert record.state is State.RUNNING and not player.last.lost
                waited_for = self._stage.now - player.began
                no_place = not self._stage.settings.max_waiting
                assert no_place or waited_for >= self._stage.settings.wait_timeout, "it did not wait"
            case "input_mismatch":
                assert record.fingerprint != player.input and not record.found
            case "response_too_large":
                assert life.saved and life.saved.outcome is Outcome.TOO_LARGE
            case code:
                raise AssertionError(f"nothing allows {code}")

    def canceled(self, player: Player, told: Canceled) -> None:
        """`player`'s cancel is answered."""
        saved = saved_response(told.record)
        player.told = ("202" if told.pending else saved.status[:3] if saved else "", told.found)
        self._in_time(player, self._stage.settings.cancel_timeout)
        record, life = self._last(player)
        assert told.found is record.found, "the cancel says another state than the record"
        if told.pending:
            assert record.state is State.RUNNING and life.owner
            assert life.owes_hooks, "nobody would call the hooks"
            return
        assert not life.owes_hooks or record.state is not State.RUNNING
        assert self._stage.hooks_called_by(player), "the hooks were not called"
        if told.found is Found.NOT_RECEIVED:
            assert record.state is State.CANCELED
            assert not life.may_have_acted, "it ran, and the cancel says that it never came"
        else:
            assert life.owner and life.saved and record.state is State.DONE
            assert saved_response(told.record) == saved_response(life.saved), "another response"

    def forgot(self, player: Player, told: Do) -> None:
        """`player`, a person, asked to forget the call."""
        player.told = told
        seen = player.last
        alive = seen.record is not None and seen.record.state is State.RUNNING and not seen.lost
        if told is Do.GONE and player.faulted:
            return  # what was sent twice finds nothing the second time
        assert told is (Do.REFUSE if alive else Do.SAVED if player.changed else Do.GONE)

    def hooked(self, player: Player, call: CanceledCall) -> None:
        """A cancel hook is called, in `player`'s process."""
        version = player.last.version or player.before.version
        life = self._of_version[version]
        record = player.last.record or player.before.record
        assert record and record.found and call.state == record.found.value
        if player.last.record:
            assert record.state is not State.RUNNING, "the hooks are called when the run has ended"
            assert call.saved == saved_response(record)
        life.owes_hooks = False

    def closed(self, last: Seen) -> None:
        """All are done. `last` is what is left; `self._stage.died_at` says whether a process has died."""
        alive = last.record is not None and last.record.state is State.RUNNING
        assert not alive or self._stage.died_at, "a record is left running by nobody"
        for life in self._lives:
            still_runs = alive and life is self._lives[-1]
            # An owner that died takes its debt along when the answer to the one who noticed was lost as well.
            excused = still_runs or life.owner in self._stage.died_at
            assert not life.owes_hooks or excused, "the hooks are owed for ever"

    def _claimed(self, player: Player, life: Life) -> None:
        life.owner = player.process
        self._of_player[player.name] = life

    def _new_life(self, took_over: Life | None = None) -> Life:
        self._lives.append(Life(took_over=took_over))
        return self._lives[-1]

    def _last(self, player: Player) -> tuple[Record, Life]:
        assert player.last.record
        return player.last.record, self._of_version[player.last.version]

    def _in_time(self, player: Player, timeout: float) -> None:
        waited = self._stage.now - player.began
        assert waited <= timeout + self._stage.jumped, f"it waited {waited} s"
