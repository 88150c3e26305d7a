"""The watch over stragglers: it compares each reported pace with the real one.

Each trainer records the duration of its own part of each step. The watch compares what the lighthouse says of its pace
with these records.

Law of this file: observe only, as in `invariants.py`. It needs the cluster to know the replicas that train.
"""

from __future__ import annotations

from tft_coord.core.stragglers import PaceKind, StragglerAction, StragglerNotice
from tft_coord.core.types import Quorum
from tft_sim.invariants import InvariantError
from tft_sim.watched import World

FIRST = "lighthouse"  # a standby does not know which replicas this lighthouse has left out


class PaceTruth:
    """The checks S1 to S5 on stragglers.

    Source: docs/protocol/sessions-and-quorums.md, "Stragglers".

    - S1: stragglers are slow.
    - S2: stragglers are a minority that the job can spare.
    - S3: stragglers that are left out are in no quorum.
    - S4: a straggler stays left out for the announced pause.
    - S5: stragglers are let back if they alone hold the job's state.

    Args:
        cluster: the watched cluster.
    """

    def __init__(self, cluster: World) -> None:
        self._cluster = cluster
        self._out: dict[str, tuple[int, int]] = {}  # replicas that are left out: start and duration
        self._pauses: dict[str, int] = {}  # the last pause of each replica

    def forget(self) -> None:
        """Forget all, because another lighthouse serves that knows no replica as left out."""
        self._out.clear()
        self._pauses.clear()

    def decided(self, job: str, notice: StragglerNotice, quorum: Quorum | None, healthy: int) -> None:
        """Check a change of a replica's pace that a lighthouse reports."""
        cluster = self._cluster
        cluster.marks.hit(f"pace: {notice.kind.name}")
        if cluster.deciding != FIRST:
            return
        policy = cluster.config.stragglers
        if policy.action is StragglerAction.OFF:
            raise InvariantError("S1", f"{notice.replica_id} is judged as a straggler, and the policy is off: {notice}")
        if notice.kind in (PaceKind.SLOW, PaceKind.LEFT_OUT):
            self._check_slow(notice, quorum)
        if notice.kind is PaceKind.LEFT_OUT:
            self._check_remaining(job, notice, healthy)
        if notice.kind is PaceKind.LET_BACK:
            since_ms, pause_ms = self._out.pop(notice.replica_id, (0, 0))
            early = cluster.clock.now_ms - since_ms < pause_ms
            if early and "too few replicas" not in notice.sentence:
                raise InvariantError("S4", f"{notice.replica_id} is let back before its pause of {pause_ms} ms is over")

    def _check_slow(self, notice: StragglerNotice, quorum: Quorum | None) -> None:
        """Check that the replica's own time exceeds the fastest other member's by the ratio, as the trainers recorded
        it."""
        members = quorum.replica_ids if quorum is not None else ()
        own_ms = self._slowest_ms(notice.replica_id)
        others = [self._fastest_ms(each) for each in members if each != notice.replica_id]
        known = [each for each in others if each]
        if known and own_ms < self._cluster.config.stragglers.ratio * min(known):
            raise InvariantError(
                "S1", f"{notice.replica_id} is reported slow with {own_ms} ms a step, and others need {others} ms"
            )

    def _slowest_ms(self, replica_id: str) -> int:
        now_ms = self._cluster.clock.now_ms
        trainers = [each for life in self._cluster.lives if life.replica_id == replica_id for each in life.trainers]
        running = [max(now_ms - each.phase_since_ms, each.own_time.running_ms) for each in trainers]
        return max([*running, *(ms for each in trainers for ms in each.own_time.all_ms)], default=0)

    def _fastest_ms(self, replica_id: str) -> int:
        trainers = [each for life in self._cluster.lives if life.replica_id == replica_id for each in life.trainers]
        return min((ms for each in trainers for ms in each.own_time.counted_ms), default=0)

    def _check_remaining(self, job: str, notice: StragglerNotice, healthy: int) -> None:
        self._out[notice.replica_id] = self._cluster.clock.now_ms, notice.pause_ms
        left_out = [name for name in self._out if self._cluster.our_lighthouse.liveness_of(job).is_alive(name)]
        if 2 * len(left_out) >= healthy:
            raise InvariantError("S2", f"{left_out} are left out, {len(left_out)} of {healthy} healthy replicas")
        if healthy - len(left_out) < max(1, self._cluster.config.min_replicas):
            raise InvariantError("S2", f"{healthy - len(left_out)} replicas remain, fewer than min_replicas")
        before_ms = self._pauses.get(notice.replica_id, 0)
        if notice.pause_ms < before_ms and notice.pause_ms > self._cluster.config.stragglers.first_pause_ms:
            raise InvariantError(
                "S4",
                f"{notice.replica_id} is left out for {notice.pause_ms} ms, less than the pause before, {before_ms} ms",
            )
        self._pauses[notice.replica_id] = notice.pause_ms

    def formed(self, job: str, quorum: Quorum, previous: Quorum | None) -> None:
        """Check that a new quorum has no replica that is left out."""
        if self._cluster.deciding != FIRST:
            return
        before = previous.replica_ids if previous is not None else ()
        if not set(before) & set(quorum.replica_ids):
            self._check_state_kept(job, quorum)
        liveness = self._cluster.our_lighthouse.liveness_of(job)
        needed = not any(liveness.is_alive(name) for name in before if name not in self._out)
        inside = [] if needed else sorted(self._out.keys() & set(quorum.replica_ids))
        if inside:
            raise InvariantError("S3", f"{inside} are left out, and are in quorum {quorum.key} of job {job}")

    def _check_state_kept(self, job: str, quorum: Quorum) -> None:
        """Check that no quorum starts over while a replica that is left out holds the state."""
        step = max(member.step for member in quorum.members)
        liveness = self._cluster.our_lighthouse.liveness_of(job)
        for life in [each for each in self._cluster.lives if each.replica_id in self._out and each.alive]:
            held = min(trainer.step for trainer in life.trainers)
            if liveness.is_alive(life.replica_id) and held > step:
                raise InvariantError(
                    "S5", f"quorum {quorum.key} starts over from step {step}, and {life.replica_id} holds step {held}"
                )
