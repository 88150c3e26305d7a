"""The watch over stragglers: whose pace is judged, and how it is in truth.

Each trainer notes for itself how long its own part of each step took. What the lighthouse says of its pace is held
against that.

Law of this file: looking on, as in `invariants.py`; it needs the cluster to know who trains.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tft_coord.core.stragglers import PaceKind, StragglerAction, StragglerNews
from tft_coord.core.types import Quorum
from tft_sim.invariants import InvariantBroken

if TYPE_CHECKING:
    from tft_sim.cluster import Cluster

FIRST = "lighthouse"  # a standby knows nothing of whom this one has left out
STEPS_KEPT = 5
STEPS_LOOKED_AT = 40


class OwnTime:
    """How long a trainer's own part of its steps takes, without its waits for others."""

    def __init__(self) -> None:
        self.running_ms = 0  # of the step that runs, up to the last change of phase
        self._last: deque[int] = deque(maxlen=STEPS_KEPT)
        self.all_ms: deque[int] = deque(maxlen=STEPS_LOOKED_AT)  # also of steps that do not count
        self.counted_ms: deque[int] = deque(maxlen=STEPS_LOOKED_AT)

    def passed(self, own_ms: int) -> None:
        """It was busy with its own part for so long."""
        self.running_ms += own_ms

    def step_ended(self, *, counts: bool) -> None:
        """The step that ran is over; an excused or a failed one does not count."""
        if counts:
            self._last.append(self.running_ms)
            self.counted_ms.append(self.running_ms)
        self.all_ms.append(self.running_ms)
        self.running_ms = 0

    def forget(self) -> None:
        """What was measured before a reconfiguration does not count any more."""
        self._last.clear()

    @property
    def median_ms(self) -> int:
        """Of the last few steps that count; 0: there is none."""
        return sorted(self._last)[len(self._last) // 2] if self._last else 0


class PaceTruth:
    """Whether stragglers are slow, S1; a minority that can be spared, S2; absent while they are left out, S3, and for
    as long as was said, S4; and are let back where they alone hold the job's state, S5 (protocol.md section 7).

    Args:
        cluster: that it watches.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._out: dict[str, tuple[int, int]] = {}  # who is left out: since when, and for how long
        self._pauses: dict[str, int] = {}  # the last one of each

    def forget(self) -> None:
        """Another lighthouse serves, which knows of nobody that was left out."""
        self._out.clear()
        self._pauses.clear()

    def decided(self, job: str, news: StragglerNews, quorum: Quorum | None, healthy: int) -> None:
        """A lighthouse says that a replica's pace has changed."""
        cluster = self._cluster
        cluster.marks.hit(f"pace: {news.kind.name}")
        if cluster.decides != FIRST:
            return
        policy = cluster.config.stragglers
        if policy.action is StragglerAction.OFF:
            raise InvariantBroken("S1", f"{news.replica_id} is judged, and no policy wants it: {news}")
        if news.kind in (PaceKind.SLOW, PaceKind.LEFT_OUT):
            self._look_whether_slow(news, quorum)
        if news.kind is PaceKind.LEFT_OUT:
            self._look_who_stays(job, news, healthy)
        if news.kind is PaceKind.LET_BACK:
            since_ms, pause_ms = self._out.pop(news.replica_id, (0, 0))
            early = cluster.clock.now_ms - since_ms < pause_ms
            if early and "too few replicas" not in news.sentence:
                raise InvariantBroken("S4", f"{news.replica_id} is let back before its pause of {pause_ms} ms is over")

    def _look_whether_slow(self, news: StragglerNews, quorum: Quorum | None) -> None:
        """Its own time is above all that another one has needed lately, by the ratio; as the trainers have noted it."""
        members = quorum.replica_ids if quorum is not None else ()
        own_ms = self._slowest_ms(news.replica_id)
        others = [self._fastest_ms(each) for each in members if each != news.replica_id]
        known = [each for each in others if each]
        if known and own_ms < self._cluster.config.stragglers.ratio * min(known):
            raise InvariantBroken("S1", f"{news.replica_id} is taken for slow with {own_ms} ms, the others {others} ms")

    def _slowest_ms(self, replica_id: str) -> int:
        now_ms = self._cluster.clock.now_ms
        trainers = [each for life in self._cluster.lives if life.replica_id == replica_id for each in life.trainers]
        running = [max(now_ms - each.phase_since_ms, each.own_time.running_ms) for each in trainers]
        return max([*running, *(ms for each in trainers for ms in each.own_time.all_ms)], default=0)

    def _fastest_ms(self, replica_id: str) -> int:
        trainers = [each for life in self._cluster.lives if life.replica_id == replica_id for each in life.trainers]
        return min((ms for each in trainers for ms in each.own_time.counted_ms), default=0)

    def _look_who_stays(self, job: str, news: StragglerNews, healthy: int) -> None:
        self._out[news.replica_id] = self._cluster.clock.now_ms, news.pause_ms
        out = [name for name in self._out if self._cluster.our_lighthouse.attendance_of(job).lives(name)]
        if 2 * len(out) >= healthy:
            raise InvariantBroken("S2", f"{out} are left out, {len(out)} of {healthy} healthy replicas")
        if healthy - len(out) < max(1, self._cluster.config.min_replicas):
            raise InvariantBroken("S2", f"{healthy - len(out)} replicas stay, fewer than min_replicas")
        before_ms = self._pauses.get(news.replica_id, 0)
        if news.pause_ms < before_ms and news.pause_ms > self._cluster.config.stragglers.first_pause_ms:
            raise InvariantBroken("S4", f"{news.replica_id} is left out for {news.pause_ms} ms after {before_ms} ms")
        self._pauses[news.replica_id] = news.pause_ms

    def formed(self, job: str, quorum: Quorum, previous: Quorum | None) -> None:
        """A lighthouse forms a quorum."""
        if self._cluster.decides != FIRST:
            return
        before = previous.replica_ids if previous is not None else ()
        if not set(before) & set(quorum.replica_ids):
            self._look_who_is_ahead(job, quorum)
        attendance = self._cluster.our_lighthouse.attendance_of(job)
        needed = not any(attendance.lives(name) for name in before if name not in self._out)
        inside = [] if needed else sorted(self._out.keys() & set(quorum.replica_ids))
        if inside:
            raise InvariantBroken("S3", f"{inside} are left out, and are in quorum {quorum.key} of job {job}")

    def _look_who_is_ahead(self, job: str, quorum: Quorum) -> None:
        """Nobody starts over while a replica that is left out holds the state."""
        step = max(member.step for member in quorum.members)
        attendance = self._cluster.our_lighthouse.attendance_of(job)
        for life in [each for each in self._cluster.lives if each.replica_id in self._out and each.alive]:
            held = min(trainer.step for trainer in life.trainers)
            if attendance.lives(life.replica_id) and held > step:
                raise InvariantBroken(
                    "S5", f"quorum {quorum.key} starts over from step {step}, and {life.replica_id} holds step {held}"
                )
