"""When replica groups start, restart and end: decisions without processes and without a clock.

A replica group is one unit. If one of its ranks fails, the other ranks are ended too, and the whole group starts again
after a pause. The pause doubles with each failure in a row. An operator's first signal drains all groups, and the
second one kills them.

    WAITING --start--> RUNNING --a rank fails--> ENDING --all ranks have ended--> WAITING or FAILED
                          |--all ranks exit with 0--> DONE
                          |--a signal--> DRAINING --all ranks have ended--> DRAINED or FAILED

Law of this file: events and the time in, actions out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, final

from tft_suite.launch.exit_codes import DONE, NEVER, RESTART, describe
from tft_suite.launch.settings import RestartPolicy


class GroupState(Enum):
    """The state of a replica group."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    DRAINING = "draining"
    DONE = "done"
    DRAINED = "drained"
    FAILED = "failed"


@final
@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank of this attempt has ended. `code`: as `subprocess` has it, negative for a signal."""

    replica: int
    attempt: int
    rank: int
    code: int


@final
@dataclass(frozen=True, slots=True)
class StartFailed:
    """The processes of this attempt could not be started. None of them is left."""

    replica: int
    attempt: int
    reason: str


@final
@dataclass(frozen=True, slots=True)
class StopAsked:
    """An operator has asked the launcher to end."""

    signal_number: int


@final
@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing has happened but time."""


Event: TypeAlias = RankEnded | StartFailed | StopAsked | TimePassed


@final
@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start all ranks of a group."""

    replica: int
    attempt: int


@final
@dataclass(frozen=True, slots=True)
class DrainGroup:
    """Ask a group to leave its job, and its ranks to end."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class EndRanks:
    """Ask the remaining ranks of a group to end."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class KillRanks:
    """Kill all processes of a group, also those that its ranks have started."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class Note:
    """Tell the operator. `failed`: the rank whose last output explains it, as (replica, attempt, rank)."""

    text: str
    is_bad: bool = False
    failed: tuple[int, int, int] | None = None


@final
@dataclass(frozen=True, slots=True)
class Finish:
    """End the launcher with this exit code."""

    code: int


Action: TypeAlias = StartGroup | DrainGroup | EndRanks | KillRanks | Note | Finish


@final
@dataclass(slots=True)
class Group:
    """A replica group. `failures`: in a row. `until_s`: when its pause or its grace ends."""

    replica: int
    state: GroupState = GroupState.WAITING
    attempt: int = 0
    failures: int = 0
    code: int = DONE
    is_killed: bool = False
    started_s: float = 0.0
    until_s: float = 0.0
    running: set[int] = field(default_factory=set)


_ONE_REQUEST_S = 1.0  # a cluster manager may signal a launcher directly and through its parent
_OVER = (GroupState.DONE, GroupState.DRAINED, GroupState.FAILED)


@final
class LaunchCore:
    """Decide what happens to the groups of one host.

    Args:
        replicas: the numbers of the groups.
        nproc: ranks of each.
        policy: when groups are started again.
        host: the name of this host, for notes.
    """

    def __init__(self, replicas: Sequence[int], nproc: int, policy: RestartPolicy, host: str) -> None:
        self._groups = {replica: Group(replica) for replica in replicas}
        self._nproc = nproc
        self._policy = policy
        self._host = host
        self._stop_signal: int | None = None
        self._stop_s = 0.0
        self._is_over = False

    @property
    def groups(self) -> Sequence[Group]:
        """Return the groups, for a view. The caller changes nothing in them."""
        return tuple(self._groups.values())

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions that follow an event, in order.

        Args:
            now_s: seconds of a monotonic clock.
        """
        actions: list[Action] = []
        match event:
            case RankEnded(replica, attempt, rank, code):
                group = self._groups[replica]
                if attempt == group.attempt and rank in group.running:
                    actions += self._rank_ended(group, rank, code, now_s)
            case StartFailed(replica, attempt, reason):
                group = self._groups[replica]
                if attempt == group.attempt:
                    group.running.clear()
                    group.state, group.code = GroupState.FAILED, NEVER
                    actions.append(Note(f"replica {replica} can't be started: {reason}", is_bad=True))
            case StopAsked(number):
                actions += self._stop(number, now_s)
            case TimePassed():
                pass
        for group in self._groups.values():
            actions += self._time_passed(group, now_s)
        if not self._is_over and all(group.state in _OVER for group in self._groups.values()):
            self._is_over = True
            actions.append(Finish(self._exit_code()))
        return actions

    def _rank_ended(self, group: Group, rank: int, code: int, now_s: float) -> list[Action]:
        group.running.discard(rank)
        actions: list[Action] = []
        if group.state is GroupState.RUNNING and code != DONE:
            group.state, group.code, group.until_s = GroupState.ENDING, code, now_s + self._policy.grace_s
            where = f"replica {group.replica}" + (f", rank {rank}" if self._nproc > 1 else "")
            after = f"{where} ended with {describe(code)} after {now_s - group.started_s:.1f} s"
            actions.append(Note(after, is_bad=True, failed=(group.replica, group.attempt, rank)))
            if group.running:
                actions.append(EndRanks(group.replica))
        elif code == NEVER or group.code == DONE:
            group.code = code  # the first failure counts, but before it a rank that must never be restarted
        if not group.running:
            actions += self._group_ended(group, now_s)
        return actions

    def _group_ended(self, group: Group, now_s: float) -> list[Action]:
        if group.state is GroupState.ENDING and group.code != NEVER:
            return self._restart_later(group, now_s)
        # What the ranks have started may outlive them, and hold their devices.
        actions: list[Action] = [] if group.is_killed else [KillRanks(group.replica)]
        if group.state is GroupState.RUNNING:
            group.state = GroupState.DONE
            return [*actions, Note(f"replica {group.replica} is done")]
        if group.state is GroupState.DRAINING:
            group.state = GroupState.DRAINED if group.code == DONE else GroupState.FAILED
            return [*actions, Note(f"replica {group.replica} ended with {describe(group.code)}")]
        group.state = GroupState.FAILED
        text = f"replica {group.replica} is not restarted: exit code {NEVER} says that a restart can't help"
        return [*actions, Note(text, is_bad=True)]

    def _restart_later(self, group: Group, now_s: float) -> list[Action]:
        if now_s - group.started_s >= self._policy.good_after_s:
            group.failures = 0
        group.failures += 1
        if group.failures > self._policy.max_restarts:
            group.state = GroupState.FAILED
            text = f"replica {group.replica} is given up after {group.failures} failures in a row (--max-restarts)"
            return [KillRanks(group.replica), Note(text, is_bad=True)]
        delay_s = self._policy.delay_s(group.failures)
        group.state, group.until_s = GroupState.WAITING, now_s + delay_s
        return [Note(f"replica {group.replica} is restarted in {delay_s:g} s")]

    def _stop(self, number: int, now_s: float) -> list[Action]:
        is_first = self._stop_signal is None
        if is_first:
            self._stop_signal, self._stop_s = number, now_s
        elif now_s - self._stop_s < _ONE_REQUEST_S:
            return []
        name = describe(-number)
        what = "draining all replicas; a second signal kills them" if is_first else "killing all replicas"
        actions: list[Action] = [Note(f"received {name}: {what}")]
        for group in self._groups.values():
            if not group.running:
                if group.state is GroupState.WAITING:
                    group.state, group.code = GroupState.FAILED, RESTART
            elif is_first:
                if group.state is GroupState.RUNNING:
                    actions.append(DrainGroup(group.replica))
                    group.code = DONE
                group.state, group.until_s = GroupState.DRAINING, now_s + self._policy.grace_s
            else:
                actions += self._kill(group)
        return actions

    def _time_passed(self, group: Group, now_s: float) -> list[Action]:
        if now_s < group.until_s:
            return []
        if group.state is GroupState.WAITING:
            group.state, group.started_s, group.is_killed = GroupState.RUNNING, now_s, False
            group.attempt += 1
            group.code = DONE
            group.running = set(range(self._nproc))
            text = f"launching replica {group.replica} (attempt {group.attempt}) on {self._host}"
            start: list[Action] = [Note(text), StartGroup(group.replica, group.attempt)]
            # Until now the manager server of the last attempt could tell the lighthouse how that attempt ended.
            return [KillRanks(group.replica), *start] if group.attempt > 1 else start
        if group.state in (GroupState.ENDING, GroupState.DRAINING) and not group.is_killed:
            text = f"replica {group.replica} has not ended within {self._policy.grace_s:g} s (--grace), and is killed"
            return [Note(text, is_bad=True), *self._kill(group)]
        return []

    def _kill(self, group: Group) -> list[Action]:
        group.is_killed = True
        return [KillRanks(group.replica)]

    def _exit_code(self) -> int:
        groups = self._groups.values()
        if all(group.state is GroupState.DONE for group in groups):
            return DONE
        if self._stop_signal is not None:
            return 128 + self._stop_signal
        return NEVER if any(group.code == NEVER for group in groups) else RESTART
