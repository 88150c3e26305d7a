"""Stragglers: replicas that slow the others down, and the policy for them.

All members of a quorum wait for the slowest one in every step. Beats report how long each member's own part of a step
takes, without its waits for others. A member is a straggler when that time is far above the median of the others for
several steps. A member whose running step is already that late is a straggler before its step ends.

The policy warns, leaves the straggler out of the next quorums, or asks it to take a smaller share of its batch. A
replica that is left out takes no steps, so its pace can't be measured. It may return for a trial after a pause, and the
pause doubles with each trial that fails.

Law of this file: the paces of one job's replicas and the policy; the caller gives the time, and performs the changes.
Source: docs/protocol/sessions-and-quorums.md, "Stragglers".
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tft_coord.core.progress import Phase, Progress
from tft_coord.errors import ConfigError

LOOK_EVERY_MS = 500
LEAST_SHARE = 0.0625  # of a batch
RAISES_LEAST = 1.25  # a share is raised by at least this factor, or to the whole
LEFT_OUT_REASON = "is left out as a straggler"  # the start of the reason for which its quorum is ended
FORGIVEN_AFTER_PAUSES = 10  # a replica that has kept up for so many of its last pauses is a new case
LONGEST_MS = 7 * 24 * 3_600_000
_REMEDY = "Check its host for a slow or shared device, slow data loading, or thermal throttling"


class StragglerAction(enum.Enum):
    """The action against a straggler."""

    OFF = "off"  # no action and no measurements
    WARN = "warn"
    LEAVE_OUT = "leave-out"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """The conditions of a straggler, and the action against it.

    Args:
        action: see `StragglerAction`.
        ratio: a straggler's own part of a step takes more than this times the median of the others.
        steps: for so many steps in a row, and
        patience_ms: for so long.
        least_ms: and takes at least so much longer.
        first_pause_ms: how long it is left out the first time; each failed trial doubles that, up to
        longest_pause_ms.
    Raises: ConfigError: a number is out of its range.
    """

    action: StragglerAction = StragglerAction.WARN
    ratio: float = 2.0
    steps: int = 3
    patience_ms: int = 5_000
    least_ms: int = 50
    first_pause_ms: int = 5_000
    longest_pause_ms: int = 300_000

    def __post_init__(self) -> None:
        if not isinstance(self.action, StragglerAction):
            raise ConfigError(f"action is {self.action!r}; give a StragglerAction, such as StragglerAction.LEAVE_OUT")
        if not isinstance(self.ratio, int | float) or not 1.1 <= self.ratio <= 1_000:
            raise ConfigError(f"the straggler ratio is {self.ratio!r}; give a number, 1.1 to 1000")
        for name in ("steps", "patience_ms", "least_ms", "first_pause_ms", "longest_pause_ms"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give a whole number")
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; give at least 1")
        for name in ("patience_ms", "least_ms", "first_pause_ms", "longest_pause_ms"):
            if not 0 <= getattr(self, name) <= LONGEST_MS:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 to {LONGEST_MS} milliseconds (a week)")
        if self.first_pause_ms > self.longest_pause_ms:
            raise ConfigError(
                f"first_pause_ms ({self.first_pause_ms}) exceeds longest_pause_ms ({self.longest_pause_ms}); "
                "lower the first or raise the second"
            )

    def describe(self) -> str:
        """Return the policy as an operator set it, one phrase."""
        return (
            self.action.value if self.action is StragglerAction.OFF else f"{self.action.value} (ratio {self.ratio:g})"
        )

    def limit_ms(self, median_ms: int) -> float:
        """Return the own time above which a member is too slow."""
        return max(self.ratio * median_ms, median_ms + self.least_ms)

    def keeps_up_ms(self, median_ms: int) -> float:
        """Return the own time below which a straggler keeps up again: half of the way back."""
        return median_ms + (self.limit_ms(median_ms) - median_ms) / 2

    def pause_ms(self, times: int) -> int:
        """Return for how long a replica is left out that was left out `times` times before."""
        return min(self.longest_pause_ms, self.first_pause_ms << min(times, 32))


class PaceKind(enum.Enum):
    """The change of a replica's pace."""

    SLOW = 0  # it is a straggler
    KEEPS_UP = 1  # it is no straggler any more
    LEFT_OUT = 2  # the next quorums form without it
    LET_BACK = 3  # it may join the next quorum, for a trial
    SHARE = 4  # it must take this share of its batch


@dataclass(frozen=True, slots=True)
class StragglerNotice:
    """One change of a replica's pace. Each change is reported once.

    Args:
        replica_id: of the replica.
        kind: of the change.
        own_ms: its own part of a step.
        median_ms: that of the other members.
        share: of its batch that it must take from now on, up to 1.
        pause_ms: for how long it is left out.
        sentence: the same in words, with a remedy.
    """

    replica_id: str
    kind: PaceKind
    own_ms: int = 0
    median_ms: int = 0
    share: float = 1.0
    pause_ms: int = 0
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class PaceChange:
    """One decision of the policy.

    Args:
        news: for the log and the replica.
        ends_quorum: the newest quorum ends because of it: its running step is too late to wait for.
    """

    news: StragglerNotice
    ends_quorum: bool = False


@dataclass(frozen=True, slots=True)
class QuorumContext:
    """The replicas besides the straggler, for the decision to leave it out.

    Args:
        healthy: ids of the healthy replicas that count for a quorum.
        members: those that are in the newest one.
        waiting: those that have asked for the next one.
        holders: those that hold the job's state, so that the others can go on from it.
        min_replicas: the minimum number that must stay.
    """

    healthy: Collection[str]
    members: Collection[str]
    waiting: Collection[str]
    holders: Collection[str]
    min_replicas: int


class _State(enum.Enum):
    KEEPS_UP = "keeps up"
    SLOW = "is a straggler"
    LEFT_OUT = "is left out"
    ON_TRIAL = "is on trial"


@dataclass(slots=True)
class _Pace:
    """The pace of one replica.

    `own_ms` comes from its newest beat with a number, for a step before `step`. `late_ms` is how long it has been busy
    with the running step, if that is long enough to count.
    """

    own_ms: int = 0
    step: int = 0
    late_ms: int = 0
    state: _State = _State.KEEPS_UP
    over_since: tuple[int, int] | None = None  # (time, step) when it first became too slow without a break
    good_since: tuple[int, int] | None = None  # the same for keeping up, while it is a straggler
    measured_from: int = 0  # a number of an earlier step was measured before it was left out
    times_out: int = 0
    until_ms: int = 0  # end of the pause in which it is left out, or its share is not raised
    kept_up_ms: int = 0  # since when it keeps up again
    share: float = 1.0
    settles_at: int = 0  # the first step whose own time belongs to its new share
    newest: StragglerNotice | None = field(default=None)  # while it does not keep up

    @property
    def latest_ms(self) -> int:
        """Return its own part of a step, or the time of the running step if that is longer by now."""
        return max(self.own_ms, self.late_ms)

    @property
    def is_watched(self) -> bool:
        return self.over_since is not None or self.state is not _State.KEEPS_UP


class StragglerWatch:
    """The paces of one job's replicas. While all keep up, a look costs a sort of their numbers, twice a second.

    Args:
        policy: the conditions of a straggler, and the action.
    """

    def __init__(self, policy: StragglerPolicy) -> None:
        self._policy = policy
        self._paces: dict[str, _Pace] = {}
        self._next_look_ms = 0
        self.left_out: frozenset[str] = frozenset()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what is wrong now, one sentence for each replica that does not keep up."""
        return tuple(pace.newest.sentence for pace in self._paces.values() if pace.newest is not None)

    # --- what is heard -----------------------------------------------------------------------------------------------

    def heard(self, replica_id: str, progress: Progress | None) -> None:
        """Take a replica's newest beat; None: it has done something since."""
        if self._policy.action is StragglerAction.OFF:
            return
        pace = self._paces.get(replica_id)
        if pace is None:
            pace = self._paces[replica_id] = _Pace()
        if progress is None or pace.state is _State.LEFT_OUT:
            pace.late_ms = 0
            return
        pace.step = progress.step
        # The first step after a start may take any time. A replica on trial has trained before, and is not excused.
        excused = progress.excused and pace.state is not _State.ON_TRIAL
        counts = progress.phase is Phase.OWN and not excused and progress.since_ms >= self._policy.patience_ms
        pace.late_ms = progress.since_ms if counts else 0
        if progress.own_ms and progress.step >= pace.measured_from:
            pace.own_ms = progress.own_ms

    def gone(self, replica_id: str) -> None:
        """Forget the pace of a replica that is lost or has left, but not how often it was left out."""
        pace = self._paces.get(replica_id)
        if pace is not None:
            pace.own_ms = pace.late_ms = 0
            pace.over_since = pace.good_since = pace.newest = None
            if pace.state is _State.SLOW:
                pace.state = _State.KEEPS_UP

    def share_of(self, replica_id: str) -> StragglerNotice | None:
        """Return the share for a replica that says hello, because it may have another lighthouse's; None if shares
        don't change."""
        if self._policy.action is not StragglerAction.SHRINK:
            return None
        pace = self._paces.get(replica_id)
        return StragglerNotice(replica_id, PaceKind.SHARE, share=pace.share if pace is not None else 1.0)

    # --- what is decided ---------------------------------------------------------------------------------------------

    def look(self, members: Collection[str], now_ms: int, context: Callable[[], QuorumContext]) -> list[PaceChange]:
        """Judge the members of the newest quorum, and those that are left out.

        Args:
            members: their ids.
            now_ms: the time.
            context: returns the other replicas; called only if a replica is slow or left out.
        Returns: the changes, in order.
        """
        if self._policy.action is StragglerAction.OFF or now_ms < self._next_look_ms:
            return []
        self._next_look_ms = now_ms + LOOK_EVERY_MS
        changes = self._let_back(now_ms, context) if self.left_out else []
        medians = self._medians(members)
        over = [name for name, median_ms in medians.items() if self._is_over(self._paces[name], median_ms)]
        for replica_id, median_ms in medians.items():
            pace = self._paces[replica_id]
            if replica_id in over:
                changes += self._too_slow(replica_id, pace, median_ms, over, now_ms, context)
            else:
                changes += self._not_too_slow(replica_id, pace, median_ms, now_ms)
        if len(self._paces) > 2 * len(members) + 16:
            known = {*context().healthy, *members}
            self._paces = {name: pace for name, pace in self._paces.items() if name in known}
        self.left_out = self._now_left_out()  # a forgotten replica is not left out either
        return changes

    def _now_left_out(self) -> frozenset[str]:
        return frozenset(name for name, pace in self._paces.items() if pace.state is _State.LEFT_OUT)

    def _medians(self, members: Collection[str]) -> dict[str, int]:
        """Return for each member the upper median of the others' own times.

        The result is empty while all keep up, and while too few members were measured.
        """
        paces = {name: pace for name in members if (pace := self._paces.get(name)) is not None}
        times = sorted(pace.latest_ms for pace in paces.values() if pace.own_ms)
        if not times or 2 * len(times) < len(members):
            return {}
        # The median of the others is lowest for the slowest member.
        slowest_ms = max(pace.latest_ms for pace in paces.values())
        if slowest_ms <= self._policy.limit_ms(times[(len(times) - 1) // 2]) and not any(
            pace.is_watched for pace in paces.values()
        ):
            return {}
        medians: dict[str, int] = {}
        for name, pace in paces.items():
            # A straggler in its first step that counts has no number yet; its running step may have one.
            others = len(times) - bool(pace.own_ms)
            if not others or not pace.latest_ms or pace.state is _State.LEFT_OUT:
                continue
            middle = others // 2
            at = bisect_left(times, pace.latest_ms) if pace.own_ms else len(times)
            medians[name] = times[middle + (at <= middle)]
        return medians

    def _is_over(self, pace: _Pace, median_ms: int) -> bool:
        return pace.step >= pace.settles_at and pace.latest_ms > self._policy.limit_ms(median_ms)

    def _is_late(self, pace: _Pace, median_ms: int) -> bool:
        """Return whether the running step has taken as long as all the steps for which a straggler is watched."""
        policy = self._policy
        return pace.late_ms >= max(policy.patience_ms, policy.steps * policy.limit_ms(median_ms))

    def _lasts(self, since: tuple[int, int], pace: _Pace, now_ms: int) -> bool:
        return now_ms - since[0] >= self._policy.patience_ms and pace.step - since[1] >= self._policy.steps

    def _too_slow(
        self,
        replica_id: str,
        pace: _Pace,
        median_ms: int,
        over: Collection[str],
        now_ms: int,
        context: Callable[[], QuorumContext],
    ) -> list[PaceChange]:
        pace.good_since = None
        pace.over_since = pace.over_since or (now_ms, pace.step)
        late = self._is_late(pace, median_ms)
        if not late and not self._lasts(pace.over_since, pace, now_ms):
            return []
        self._forgive(pace, now_ms)
        action = self._policy.action
        if action is StragglerAction.LEAVE_OUT:
            kept = self._why_kept(replica_id, over, context())
            if not kept:
                return [self._leave_out(replica_id, pace, median_ms, now_ms, late=late)]
            if pace.state is not _State.SLOW:
                return [self._slow(replica_id, pace, median_ms, f"It is not left out, because {kept}")]
            return []
        if action is StragglerAction.SHRINK and not late and pace.share > LEAST_SHARE:
            return [self._shrink(replica_id, pace, median_ms, now_ms)]
        return [] if pace.state is _State.SLOW else [self._slow(replica_id, pace, median_ms, "")]

    def _forgive(self, pace: _Pace, now_ms: int) -> None:
        """Treat a replica that has kept up for long as a new case."""
        if pace.times_out and pace.state is _State.KEEPS_UP:
            last_pause_ms = self._policy.pause_ms(pace.times_out - 1)
            if now_ms - pace.kept_up_ms >= FORGIVEN_AFTER_PAUSES * last_pause_ms:
                pace.times_out = 0

    def _not_too_slow(self, replica_id: str, pace: _Pace, median_ms: int, now_ms: int) -> list[PaceChange]:
        pace.over_since = None
        if pace.state is _State.KEEPS_UP:
            return []
        if not pace.own_ms or pace.latest_ms >= self._policy.keeps_up_ms(median_ms) or pace.step < pace.settles_at:
            pace.good_since = None
            return []
        pace.good_since = pace.good_since or (now_ms, pace.step)
        if not self._lasts(pace.good_since, pace, now_ms):
            return []
        if pace.share < 1.0:
            return self._raise_share(replica_id, pace, median_ms, now_ms)
        pace.state, pace.good_since, pace.kept_up_ms = _State.KEEPS_UP, None, now_ms
        return [self._changed(replica_id, pace, PaceKind.KEEPS_UP, median_ms)]

    # --- the changes -------------------------------------------------------------------------------------------------

    def _slow(self, replica_id: str, pace: _Pace, median_ms: int, why: str) -> PaceChange:
        pace.state = _State.SLOW
        return self._changed(replica_id, pace, PaceKind.SLOW, median_ms, why=why)

    def _leave_out(self, replica_id: str, pace: _Pace, median_ms: int, now_ms: int, *, late: bool) -> PaceChange:
        pause_ms = self._policy.pause_ms(pace.times_out)
        change = self._changed(replica_id, pace, PaceKind.LEFT_OUT, median_ms, pause_ms=pause_ms, ends_quorum=late)
        pace.state, pace.over_since = _State.LEFT_OUT, None
        pace.times_out += 1
        pace.until_ms = now_ms + pause_ms
        pace.own_ms, pace.late_ms, pace.measured_from = 0, 0, pace.step + 1  # a trial measures it anew
        self.left_out = self._now_left_out()
        return change

    def _why_kept(self, replica_id: str, over: Collection[str], context: QuorumContext) -> str:
        """Return why this straggler must stay, one phrase; "" where the others can do without it."""
        stay = [name for name in context.healthy if name not in self.left_out and name != replica_id]
        if len(stay) < context.min_replicas:
            return f"{len(stay)} replicas would stay, and at least {context.min_replicas} are needed"
        # Half of the replicas or more are no exception: the job's pace is theirs, or the measurement is wrong.
        slow = self.left_out.union(over).intersection(context.healthy)
        if 2 * len(slow) >= len(context.healthy):
            return f"{len(slow)} of {len(context.healthy)} replicas are as slow, and only a minority is left out"
        if context.holders and not any(name in stay for name in context.holders):
            return "it alone holds the job's state"
        return ""

    def _let_back(self, now_ms: int, context: Callable[[], QuorumContext]) -> list[PaceChange]:
        around = context()
        stay = [name for name in around.healthy if name not in self.left_out]
        needed = len(stay) < around.min_replicas or self.left_out.issuperset(around.members)
        changes = []
        for replica_id in sorted(self.left_out):
            pace = self._paces[replica_id]
            # A lost replica has no request; if it comes back it is on trial as well.
            may = replica_id in around.waiting or replica_id not in around.healthy
            if needed or (now_ms >= pace.until_ms and may):
                pace.state, pace.over_since, pace.good_since = _State.ON_TRIAL, None, None
                why = "too few replicas are left without it" if needed else ""
                changes.append(self._changed(replica_id, pace, PaceKind.LET_BACK, 0, why=why))
        self.left_out = self._now_left_out()
        return changes

    def _shrink(self, replica_id: str, pace: _Pace, median_ms: int, now_ms: int) -> PaceChange:
        share = max(LEAST_SHARE, round(pace.share * median_ms / max(pace.own_ms, 1), 4))
        pace.until_ms = now_ms + self._policy.pause_ms(pace.times_out)
        pace.times_out += 1
        pace.state, pace.over_since = _State.SLOW, None
        return self._share_changed(replica_id, pace, median_ms, min(share, pace.share))

    def _raise_share(self, replica_id: str, pace: _Pace, median_ms: int, now_ms: int) -> list[PaceChange]:
        """Raise a share that was too small, but not before the pause is over: a larger share may be too slow again."""
        share = min(1.0, round(pace.share * max(median_ms, 1) / pace.own_ms, 4))
        if now_ms < pace.until_ms or share < min(1.0, RAISES_LEAST * pace.share):
            return []
        pace.good_since = None
        if share == 1.0:
            pace.state, pace.kept_up_ms = _State.KEEPS_UP, now_ms
        return [self._share_changed(replica_id, pace, median_ms, share)]

    def _share_changed(self, replica_id: str, pace: _Pace, median_ms: int, share: float) -> PaceChange:
        rises, pace.share = share > pace.share, share
        # The number in the beats is a median of the last few steps.
        pace.settles_at = pace.step + 2 * self._policy.steps
        kind = PaceKind.KEEPS_UP if share == 1.0 else PaceKind.SHARE
        return self._changed(replica_id, pace, kind, median_ms, rises=rises)

    def _changed(
        self,
        replica_id: str,
        pace: _Pace,
        kind: PaceKind,
        median_ms: int,
        *,
        pause_ms: int = 0,
        why: str = "",
        ends_quorum: bool = False,
        rises: bool = False,
    ) -> PaceChange:
        own_ms = pace.latest_ms
        if rises:
            sentence = rising_share(replica_id, own_ms, median_ms, pace.share)
        else:
            sentence = sentence_of(replica_id, kind, own_ms, median_ms, share=pace.share, pause_ms=pause_ms, why=why)
        news = StragglerNotice(replica_id, kind, own_ms, median_ms, pace.share, pause_ms, sentence)
        pace.newest = None if kind is PaceKind.KEEPS_UP else news
        return PaceChange(news, ends_quorum)


def sentence_of(
    replica_id: str, kind: PaceKind, own_ms: int, median_ms: int, *, share: float, pause_ms: int, why: str
) -> str:
    """Return a change in words: the change, its numbers, and a remedy."""
    numbers = _numbers(own_ms, median_ms)
    match kind:
        case PaceKind.SLOW:
            end = f". {why}" if why else ""
            return f"replica {replica_id} is a straggler: {numbers}. Every step waits for it. {_REMEDY}{end}"
        case PaceKind.KEEPS_UP:
            return f"replica {replica_id} keeps up again: {numbers}"
        case PaceKind.LEFT_OUT:
            return (
                f"replica {replica_id} is left out of the next quorums for {_seconds(pause_ms)} s as a straggler: "
                f"{numbers}. The others train on, and it gets a trial after that. {_REMEDY}"
            )
        case PaceKind.LET_BACK:
            end = f", because {why}" if why else ""
            return f"replica {replica_id} was left out as a straggler and may join again for a trial{end}"
        case PaceKind.SHARE:
            return (
                f"replica {replica_id} is a straggler and must take {share:g} of its batch: {numbers}. "
                f"Multiply the batch size by Manager.status().share. {_REMEDY}"
            )


def rising_share(replica_id: str, own_ms: int, median_ms: int, share: float) -> str:
    """Return in words that a straggler has become faster, and may take more of its batch again."""
    numbers = _numbers(own_ms, median_ms)
    if share == 1.0:
        return f"replica {replica_id} keeps up again and must take its whole batch: {numbers}"
    return f"replica {replica_id} may take more of its batch again, {share:g}: with the smaller part {numbers}"


def left_out_reason(news: StragglerNotice) -> str:
    """Return the phrase about a straggler that says why a quorum is ended."""
    return f"{LEFT_OUT_REASON}: {_numbers(news.own_ms, news.median_ms)}"


def left_out_wait(news: StragglerNotice, remaining_ms: int) -> str:
    """Return why a replica that is left out got no quorum in time, and a remedy."""
    when = (
        f"It is left out for {_seconds(remaining_ms)} s more, and may join again for a trial after that"
        if remaining_ms > 0
        else "Its pause is over, and it joins for a trial when the others ask for the next quorum"
    )
    return (
        f"replica {news.replica_id} {left_out_reason(news)}. {when}. Keep asking: steps without a quorum do not count "
        f"as failures meanwhile. {_REMEDY}"
    )


def _numbers(own_ms: int, median_ms: int) -> str:
    return f"its own part of a step takes {_seconds(own_ms)} s (median of the others: {_seconds(median_ms)} s)"


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.2f}" if milliseconds < 10_000 else f"{milliseconds / 1000:.0f}"
