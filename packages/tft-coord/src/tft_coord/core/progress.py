"""Where in its step a trainer is, and when that is too long.

A trainer that waits for others is never the one that hangs; one that is busy with its own work for longer than any step
may take is. So each rank says with its beats where it is and for how long. A rank that holds its interpreter's lock
can't say anything. A wait gives that lock up, so who is silent inside a step is taken to be busy with its own work ever
since it was last heard of; who is silent between two steps may evaluate, and is only late.

Law of this file: the value that is told, and what it means for a group and for a quorum; the caller gives the time.
Source: protocol.md section 6.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from tft_coord.core.suspicion import WAITS_MS
from tft_coord.core.types import MAX_INT64
from tft_coord.timeouts import Timeouts

SAID_FOR_BEATS = 1.5  # a rank that waits says so with each beat
SILENT_AFTER_BEATS = 2.5  # one beat may be missed, and the next may be late


class Phase(enum.Enum):
    """Where in its step a trainer is."""

    OUTSIDE = 0  # between should_commit and start_quorum: evaluation, checkpoints, data
    OWN = 1  # forward, backward, optimizer
    WAITING = 2  # for a quorum, a configuration, a vote, a transfer
    REDUCING = 3  # for a reduction


WORDS: Final = {
    Phase.OUTSIDE: "between two steps",
    Phase.OWN: "busy with its own part of the step",
    Phase.WAITING: "waiting",
    Phase.REDUCING: "in a reduction",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank, or the group of it, says of its training thread.

    Args:
        step: committed steps: between two steps all of them, in a step those before it.
        phase: where in it.
        since_ms: for so many milliseconds without a break.
        excused: the step is the first after a start, a healing or a reconfiguration, and may take any time.
        slowest_step_ms: longest time that a step may take; 0: any.
        own_ms: the median of its own part of the last few steps, without its waits for others; 0: not known.
    """

    step: int
    phase: Phase
    since_ms: int
    excused: bool = False
    slowest_step_ms: int = 0
    own_ms: int = 0

    @property
    def _too_long(self) -> bool:
        return 0 < self.slowest_step_ms <= self.since_ms

    @property
    def waits_ms(self) -> int | None:
        """For how long it has waited for others; None: it does not."""
        return self.since_ms if self.phase in (Phase.WAITING, Phase.REDUCING) else None

    @property
    def is_hung(self) -> bool:
        """It is busy with its own work for longer than a step may take."""
        return self.phase is Phase.OWN and not self.excused and self._too_long

    @property
    def is_stuck(self) -> bool:
        """It waits in one reduction for longer than a step may take."""
        return self.phase is Phase.REDUCING and self._too_long


# --- the ranks of a group ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Word:
    """The last that is known of a rank: what it was, at `at_ms`."""

    progress: Progress
    at_ms: int
    told_ms: int = 0  # its since_ms as the beat itself said it, however long that was on its way
    healed: bool = False  # it was given a plan that heals it
    seen: bool = False  # it did something, or was given something, just then; else its beat said it
    stands: bool = False  # its next round begins without a request, so that nothing is seen of that


class GroupProgress:
    """What the ranks of one group say, made into one word.

    Args:
        world_size: ranks of the group.
        timeouts: of the job; beat_interval_ms says when a rank is silent.
    """

    def __init__(self, world_size: int, timeouts: Timeouts) -> None:
        self._world_size = world_size
        self._beat_interval_ms = timeouts.beat_interval_ms
        self._said_for_ms = int(SAID_FOR_BEATS * timeouts.beat_interval_ms)
        self._silent_after_ms = int(SILENT_AFTER_BEATS * timeouts.beat_interval_ms)
        self._words: dict[int, _Word] = {}

    def said(self, rank: int, progress: Progress, now_ms: int) -> None:
        """A rank's beat tells where it is."""
        before = self._words.get(rank)
        told_ms = progress.since_ms
        if before is None:
            self._words[rank] = _Word(progress, now_ms, told_ms)
            return
        if self._is_overtaken(before, progress, now_ms):
            return
        if self._was_there(before, progress, now_ms):
            known_ms = min(before.progress.since_ms + now_ms - before.at_ms, MAX_INT64)
            progress = replace(progress, since_ms=max(progress.since_ms, known_ms))
        self._words[rank] = _Word(progress, now_ms, told_ms, before.healed, stands=before.stands)

    def _is_overtaken(self, word: _Word, progress: Progress, now_ms: int) -> bool:
        """Whether a beat was sent before what has been seen of its rank since. Believed, one who hears its verdict and
        evaluates would seem to wait, and hang. The next beat is believed in any case: an answer may have been lost."""
        if not word.seen or now_ms - word.at_ms >= self._beat_interval_ms:
            return False
        waits = progress.phase in (Phase.WAITING, Phase.REDUCING)
        has_ended = word.progress.phase is Phase.OUTSIDE and waits  # it waits for nothing before it asks
        return has_ended or now_ms - progress.since_ms < word.at_ms

    def _was_there(self, word: _Word, progress: Progress, now_ms: int) -> bool:
        """Whether a beat is about what the last one was about. One that is long on its way seems to tell of what began
        later, and a trainer that hangs would seem to have gone on. But who came to the same phase again has said so
        within a beat, and tells of less; who tells of a beat more than before has been there all the while. So has who
        tells of what began two beats before the last beat came, whatever was lost between them with a stream."""
        if (progress.step, progress.phase) != (word.progress.step, word.progress.phase):
            return False
        tells_more = progress.since_ms >= word.told_ms + self._beat_interval_ms
        return tells_more or now_ms - progress.since_ms <= word.at_ms - 2 * self._beat_interval_ms

    def asked(self, rank: int, step: int, now_ms: int) -> None:
        """A rank asks for a quorum, and waits for it. Whether its step is excused, the plan tells.

        One that has never said anything with a beat says nothing by this either, nor by what follows.
        """
        self._is(rank, Phase.WAITING, step, now_ms, excused=True)

    def planned(self, rank: int, step: int | None, now_ms: int, *, excused: bool, heals: bool) -> None:
        """A rank is given its plan and goes on by itself, in a step that may be excused; None: in the one it asked for,
        as the plan that stands."""
        word = self._words.get(rank)
        if word is not None:
            step = word.progress.step if step is None else step
            self._is(rank, Phase.OWN, step, now_ms, excused=excused or heals or word.healed)
            word.healed = heals

    def votes(self, rank: int, now_ms: int) -> None:
        """A rank votes, and waits for the verdict."""
        word = self._words.get(rank)
        if word is not None:
            self._is(rank, Phase.WAITING, word.progress.step, now_ms, excused=word.progress.excused)

    def ended(self, rank: int, step: int, now_ms: int, *, stands: bool = False) -> None:
        """A rank is given the verdict on its step, and is between two steps. `step`: those that are committed now."""
        self._is(rank, Phase.OUTSIDE, step, now_ms, excused=False)
        word = self._words.get(rank)
        if word is not None:
            word.stands = stands

    def _is(self, rank: int, phase: Phase, step: int, now_ms: int, *, excused: bool) -> None:
        word = self._words.get(rank)
        if word is not None:
            before = word.progress
            word.progress = Progress(step, phase, 0, excused, before.slowest_step_ms, before.own_ms)
            word.at_ms, word.told_ms, word.seen = now_ms, 0, True

    def now(self, now_ms: int) -> Progress | None:
        """The group's word: of the rank that is longest in its own work, if any is; None: no rank says anything.

        The group reduces when all its ranks do, and waits when any does. Its own part of a step takes as long as its
        slowest rank's.
        """
        if not self._words:
            return None
        own_ms = max(word.progress.own_ms for word in self._words.values())
        return replace(self._where(now_ms), own_ms=own_ms)

    def _where(self, now_ms: int) -> Progress:
        words = [self._now_of(word, now_ms) for word in self._words.values()]
        own = [word for word in words if word.phase is Phase.OWN]
        if own:
            return max(own, key=lambda word: (not word.excused, word.since_ms))
        reducing = [word for word in words if word.phase is Phase.REDUCING]
        newest = max(words, key=lambda word: (word.step, -word.since_ms))
        if len(reducing) == self._world_size and len({word.step for word in words}) == 1:
            return min(words, key=lambda word: word.since_ms)
        if reducing or any(word.phase is Phase.WAITING for word in words):
            return replace(newest, phase=Phase.WAITING)
        return newest

    def waits_since_ms(self, now_ms: int) -> int | None:
        """Return since when all ranks wait for others, as each has said itself not long ago; None: one does not, or the
        wait has not lasted for `WAITS_MS`. What a beat said of a wait that had just begun is no proof of it."""
        if len(self._words) < self._world_size:
            return None
        begun_ms = 0
        for word in self._words.values():
            waits = word.progress.phase in (Phase.WAITING, Phase.REDUCING)
            if not waits or now_ms - word.at_ms > self._said_for_ms or (not word.seen and word.told_ms < WAITS_MS):
                return None
            begun_ms = max(begun_ms, word.at_ms - word.progress.since_ms)
        return begun_ms if now_ms - begun_ms >= WAITS_MS else None

    def last_seen(self, rank: int, now_ms: int) -> str:
        """A rank, and where in its step it was when it was last heard."""
        word = self._words.get(rank)
        if word is None:
            return f"rank {rank} (has said nothing yet)"
        progress = self._now_of(word, now_ms)
        return f"rank {rank} (step {progress.step}, {WORDS[progress.phase]} for {progress.since_ms // 1_000} s)"

    def is_hung(self, now_ms: int) -> bool:
        """Whether a rank of the group is."""
        progress = self.now(now_ms)
        return progress is not None and progress.is_hung

    def _now_of(self, word: _Word, now_ms: int) -> Progress:
        """What it said runs on. Who has said nothing since, inside a step, holds its lock, and nobody waits so. Where
        the quorum stands, its next step may have begun: it is between two steps until it would hang in that one."""
        progress, silent_ms = word.progress, min(now_ms - word.at_ms, MAX_INT64 - word.progress.since_ms)
        waits = progress.phase in (Phase.WAITING, Phase.REDUCING)
        hangs = word.stands and 0 < progress.slowest_step_ms <= silent_ms
        if (waits or (hangs and progress.phase is Phase.OUTSIDE)) and silent_ms > self._silent_after_ms:
            return replace(progress, phase=Phase.OWN, since_ms=silent_ms)
        return replace(progress, since_ms=progress.since_ms + silent_ms)


# --- the replicas of a job --------------------------------------------------------------------------------------


class HangWatch:
    """Which replica of a job hangs, by what their beats say. Looked at by its `hung` and `stuck`, which cost nothing
    while nobody is suspected.

    Groups whose ranks wait for one another in collectives of their own seem busy behind the one that hangs. So only
    the one that is longest in its own work is lost, and the others have a while to go on.

    Args:
        timeouts: heartbeat_timeout_ms is that while.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._patience_ms = timeouts.heartbeat_timeout_ms
        self._hung: dict[str, tuple[Progress, int]] = {}  # with when that was said
        self._stuck: dict[str, int] = {}  # and in which step
        self._lost_ms: int | None = None

    def heard(self, replica_id: str, progress: Progress | None, now_ms: int) -> None:
        """What a replica's newest beat says, or None: it has done something since."""
        self._hung.pop(replica_id, None)
        self._stuck.pop(replica_id, None)
        if progress is None:
            return
        if progress.is_hung:
            self._hung[replica_id] = progress, now_ms
        elif progress.is_stuck:
            self._stuck[replica_id] = progress.step

    def forget(self) -> None:
        """What was said is too old to be believed."""
        self._hung.clear()
        self._stuck.clear()

    def hung(self, now_ms: int, spared: Callable[[], Collection[str]] = tuple) -> tuple[str, Progress] | None:
        """Who hangs, and must be taken for lost now; told once.

        Args:
            spared: gives those without whom nobody could go on.
        """
        if not self._hung or (self._lost_ms is not None and now_ms - self._lost_ms < self._patience_ms):
            return None
        names = sorted(self._hung.keys() - set(spared()))
        if not names:
            return None
        replica_id = max(names, key=lambda name: self._hung[name][0].since_ms - self._hung[name][1])
        progress, _ = self._hung.pop(replica_id)
        self._lost_ms = now_ms
        return replica_id, progress

    def stuck(self, members: Collection[str]) -> int | None:
        """The step in which all of these wait in a reduction for too long, or None."""
        if len(members) < 2 or len(self._stuck) < len(members):
            return None
        steps = {self._stuck.get(replica_id) for replica_id in members}
        return steps.pop() if len(steps) == 1 else None


def hang_reason(progress: Progress) -> str:
    """Why a replica is taken for lost, one phrase."""
    return (
        f"its trainer hangs: busy with step {progress.step} for {progress.since_ms} ms, and slowest_step is "
        f"{progress.slowest_step_ms} ms"
    )


def stuck_reason(step: int) -> str:
    """Why a quorum is broken in which nobody is to blame, one phrase about any of its members."""
    return f"waits in a reduction of step {step}, as all others do, for longer than slowest_step"
