"""Clients without a stream: torchft's wire, by torchft's rules.

torchft's managers beat ten times a second with unary calls, and ask with a unary call that waits. There are no
sessions, no lineage and no pushed losses. A member is alive while its beats are younger than heartbeat_timeout.

torchft 0.3 builds its process groups from handles that its members send, and 0.2 from a store. A quorum of both can't
build a group, and torchft asks again for ever. So a member that has handles refuses a later one that has none, and the
reverse, while one of its form is alive.

Law of this file: torchft's rules to the letter (wire.md section 12), where they do no harm: a disconnected caller is no
member, dead members are forgotten, and no quorum is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tft_coord.core import effects, events
from tft_coord.core.config import LighthouseConfig
from tft_coord.core.status import JobStatus, ReplicaState, ReplicaStatus, WaitStatus, job_state
from tft_coord.core.types import Member, Quorum, QuorumKey, Refusal
from tft_coord.core.waits import TELL_AFTER_MS


@dataclass(frozen=True, slots=True)
class _Waiting:
    member: Member
    asked_ms: int


class TorchftCore:
    """The one job of the clients without a stream.

    Args:
        config: min_replicas and timeouts.
        started_ms: wall-clock milliseconds since 1970 at the start; ids are above it, so that they rise over restarts.
    """

    def __init__(self, config: LighthouseConfig, *, started_ms: int) -> None:
        self._config = config
        self._last_id = started_ms
        self._beats: dict[str, int] = {}
        self._refused_ms: dict[str, int] = {}  # when a member of the other form asked last; its beats do not count
        self._last_ms: int | None = None
        self._last_pause: tuple[int, int] | None = None  # start and end of this process's last pause
        self._waiting: dict[int, _Waiting] = {}
        self.previous: Quorum | None = None
        self._formed_ms = 0
        self._changed_ms = 0  # when the id rose
        self._missing_requests = 0  # the number of requests that must come before the rule can say yes
        self.waiting_for = "no replica has asked"

    def note_time(self, now_ms: int) -> None:
        """Note the time of an event or tick, and with it a pause of this process for longer than a grace."""
        timeouts, last_ms = self._config.timeouts, self._last_ms
        if last_ms is not None and now_ms - last_ms >= timeouts.quorum_tick_ms + timeouts.reconnect_grace_ms:
            self._last_pause = last_ms, now_ms
        self._last_ms = now_ms

    def any_alive(self, now_ms: int) -> str | None:
        """Return one member whose beats are young enough, or None.

        Members that were alive when this process paused have time to beat after the pause, so that no other kind takes
        their job meanwhile. torchft's rule for its quorums has no such time.
        """
        timeout_ms = self._config.timeouts.heartbeat_timeout_ms
        oldest_ms = now_ms - timeout_ms
        if self._last_pause is not None and self._last_pause[1] > oldest_ms:
            oldest_ms = min(oldest_ms, self._last_pause[0] - timeout_ms)
        return next((name for name, at_ms in self._beats.items() if at_ms > oldest_ms), None)

    @property
    def has_trained(self) -> bool:
        """Return whether these members have a quorum, or one of them comes with steps of an earlier one."""
        return self.previous is not None or any(entry.member.step > 0 for entry in self._waiting.values())

    def status(self, job: str, now_ms: int) -> JobStatus | None:
        """Return the state of the one job and of its members, for an operator; None: no member is known.

        torchft's members say a step only with a request, and nothing about their progress in it.

        Args:
            job: the name to give it.
            now_ms: the time.
        """
        if not self._beats:
            return None
        asked = {entry.member.replica_id: entry for entry in self._waiting.values()}
        members = self.previous.members if self.previous is not None else ()
        ranks = {member.replica_id: rank for rank, member in enumerate(members)}
        known = {member.replica_id: member for member in members} | {name: each.member for name, each in asked.items()}
        timeout_ms = self._config.timeouts.heartbeat_timeout_ms
        replicas = [
            _replica_status(
                replica_id,
                known.get(replica_id),
                rank=ranks.get(replica_id),
                has_asked=replica_id in asked,
                heard_ms=now_ms - at_ms,
                timeout_ms=timeout_ms,
            )
            for replica_id, at_ms in self._beats.items()
        ]
        replicas.sort(key=lambda each: (each.rank is None, each.rank or 0, each.replica_id))
        lasted_ms = now_ms - min((entry.asked_ms for entry in asked.values()), default=now_ms)
        lives = any(each.rank is not None and not each.reason for each in replicas)
        return JobStatus(
            name=job,
            state=job_state(self.previous, lives=lives, ended=False, waits=lasted_ms >= TELL_AFTER_MS),
            step=max((member.step for member in known.values()), default=0),
            quorum=self.previous,
            quorum_age_ms=now_ms - self._changed_ms if self.previous is not None else 0,
            wait=WaitStatus(sentence=self.waiting_for, lasted_ms=lasted_ms) if asked else None,
            replicas=tuple(replicas),
            is_torchft=True,
            min_replicas=self._config.min_replicas,
        )

    def evict(self, refusal: Refusal, message_to: Callable[[str], str]) -> list[effects.UnaryEffect]:
        """Refuse all waiting members by name, and forget all members."""
        out: list[effects.UnaryEffect] = [
            effects.RefuseUnary(call, refusal, message_to(entry.member.replica_id))
            for call, entry in self._waiting.items()
        ]
        self._waiting.clear()
        self._beats.clear()
        self.previous = None  # a later member counts as untrained
        return out

    def handle(self, event: events.UnaryEvent, now_ms: int, wall_ms: int) -> list[effects.UnaryEffect]:
        """Handle one event; return the effects, in order."""
        match event:
            case events.HeartbeatReceived() if event.replica_id in self._refused_ms:
                return []  # the others would wait for it
            case events.HeartbeatReceived() if self._is_full_for(event.replica_id):
                return []  # its request is refused
            case events.HeartbeatReceived():
                self._beats[event.replica_id] = now_ms
                return []
            case events.UnaryRequestWithdrawn():
                self._waiting.pop(event.call, None)
                return []
            case events.UnaryQuorumRequested() if self._is_full_for(event.member.replica_id):
                return [effects.RefuseUnary(event.call, Refusal.FULL, self._full_for(event.member.replica_id))]
            case events.UnaryQuorumRequested() if (other := self._of_other_form(event.member, now_ms)) is not None:
                self._refused_ms[event.member.replica_id] = now_ms
                self._beats.pop(event.member.replica_id, None)
                return [effects.RefuseUnary(event.call, Refusal.DIFFERS, _mixed(event.member, other))]
            case events.UnaryQuorumRequested():
                self._refused_ms.pop(event.member.replica_id, None)
                self._beats[event.member.replica_id] = now_ms
                self._waiting[event.call] = _Waiting(event.member, now_ms)
                self._missing_requests = 0 if event.member.shrink_only else self._missing_requests - 1
                return self.tick(now_ms, wall_ms) if self._missing_requests <= 0 else []

    def reconfigure(self, config: LighthouseConfig) -> None:
        """Use other settings from now on; only min_replicas and the limits may differ from those at the start."""
        self._config, self._missing_requests = config, 0

    def _is_full_for(self, replica_id: str) -> bool:
        """Return whether a member that is not known yet has no room."""
        known = len(self._beats) + len(self._refused_ms)
        is_known = replica_id in self._beats or replica_id in self._refused_ms
        return not is_known and known >= self._config.limits.max_replicas

    def _full_for(self, replica_id: str) -> str:
        most = self._config.limits.max_replicas
        return (
            f"the job of torchft's clients has {most} members, the most that it may have (max_replicas), so replica "
            f"{replica_id} can't join. Raise max_replicas of the lighthouse, or end a replica: it forgets a silent one "
            f"after {self._config.timeouts.forget_after_ms / 1_000:g} s"
        )

    def _of_other_form(self, member: Member, now_ms: int) -> Member | None:
        """Return a living member whose process groups are built in the other form, or None."""
        oldest_ms = now_ms - self._config.timeouts.heartbeat_timeout_ms
        known = [entry.member for entry in self._waiting.values()]
        if self.previous is not None:
            known += self.previous.members
        return next(
            (
                other
                for other in known
                if _has_handles(other) is not _has_handles(member)
                and other.replica_id != member.replica_id
                and self._beats.get(other.replica_id, oldest_ms) > oldest_ms
            ),
            None,
        )

    def tick(self, now_ms: int, wall_ms: int) -> list[effects.UnaryEffect]:
        """Handle the passage of time; form a quorum when the rule says so."""
        timeouts = self._config.timeouts
        for replica_id in [name for name, at in self._beats.items() if now_ms - at >= timeouts.forget_after_ms]:
            del self._beats[replica_id]
        for replica_id in [name for name, at in self._refused_ms.items() if now_ms - at >= timeouts.forget_after_ms]:
            del self._refused_ms[replica_id]
        healthy = {name for name, at in self._beats.items() if now_ms - at < timeouts.heartbeat_timeout_ms}
        waiting: dict[str, _Waiting] = {}
        for entry in self._waiting.values():  # a replica's newest call counts
            if entry.member.replica_id in healthy:
                waiting[entry.member.replica_id] = entry
        self._missing_requests = self._least(waiting, healthy, now_ms)
        members = self._decide(waiting, healthy, now_ms)
        return [] if members is None else self._formed(members, now_ms, wall_ms)

    def _least(self, waiting: dict[str, _Waiting], healthy: set[str], now_ms: int) -> int:
        """Return the minimum number of further requests before a quorum can form, while nothing else happens."""
        if not waiting or any(entry.member.shrink_only for entry in waiting.values()):
            return 0
        waited_ms = now_ms - min(entry.asked_ms for entry in waiting.values())
        missing = len(healthy) - len(waiting) if waited_ms < self._config.timeouts.join_timeout_ms else 0
        slow = max(self._config.min_replicas - len(waiting), len(healthy) // 2 + 1 - len(waiting), missing)
        if self.previous is None:
            return slow
        return min(slow, sum(1 for replica_id in self.previous.replica_ids if replica_id not in waiting))

    def _decide(self, waiting: dict[str, _Waiting], healthy: set[str], now_ms: int) -> tuple[Member, ...] | None:
        if not waiting:
            self.waiting_for = "no replica has asked"
            return None
        previous_ids = set(self.previous.replica_ids) if self.previous is not None else set()
        # A replica that may not be a member counts too: torchft's rule looks at all replicas that have asked.
        shrinks = previous_ids and any(entry.member.shrink_only for entry in waiting.values())
        names = sorted(previous_ids & set(waiting) if shrinks else waiting)
        if not names:
            self.waiting_for = "no member of the last quorum has asked, and a replica that has asked set shrink_only"
            return None
        members = tuple(waiting[name].member for name in names)
        if previous_ids and previous_ids <= set(waiting):
            return members
        if len(waiting) < self._config.min_replicas:
            self.waiting_for = f"{len(waiting)} of min_replicas {self._config.min_replicas} have asked"
            return None
        if 2 * len(waiting) <= len(healthy):
            self.waiting_for = f"{len(waiting)} of {len(healthy)} healthy replicas have asked"
            return None
        waited_ms = now_ms - min(entry.asked_ms for entry in waiting.values())
        if healthy - set(waiting) and waited_ms < self._config.timeouts.join_timeout_ms:
            self.waiting_for = "healthy replicas have not asked, and join_timeout has not passed"
            return None
        return members

    def _formed(self, members: tuple[Member, ...], now_ms: int, wall_ms: int) -> list[effects.UnaryEffect]:
        previous = self.previous
        ids = tuple(member.replica_id for member in members)
        names = frozenset(ids)
        failed = [member.replica_id for member in members if member.commit_failures > 0]
        out: list[effects.UnaryEffect] = []
        if previous is None or previous.replica_ids != ids or failed:
            self._last_id += 1
            reason = f"failed commits of {', '.join(failed)}" if failed else "the members changed"
            quorum = Quorum(QuorumKey(self._last_id, 0), members, wall_ms)
            self._changed_ms = now_ms
            out.append(effects.QuorumFormed("", quorum, previous, now_ms - self._formed_ms, reason))
        else:
            quorum = Quorum(previous.key, members, wall_ms)
        self.previous = quorum
        self._formed_ms = now_ms
        out += [
            effects.AnswerUnaryQuorum(call, quorum)
            for call, entry in self._waiting.items()
            if entry.member.replica_id in names
        ]
        # A replica that was left out counts as asking now: the next quorum has not waited for it.
        self._waiting = {
            call: _Waiting(entry.member, now_ms)
            for call, entry in self._waiting.items()
            if entry.member.replica_id not in names
        }
        self.waiting_for = "no replica has asked"
        return out


def _has_handles(member: Member) -> bool:
    return any(member.reconfigure_handles)


def _mixed(refused: Member, other: Member) -> str:
    theirs, own = ("0.2", "0.3") if _has_handles(refused) else ("0.3", "0.2")
    return (
        f"replica {refused.replica_id} builds its process groups as torchft {own} does, and replica "
        f"{other.replica_id} of the same job as torchft {theirs}; install one release of torchft on all replicas"
    )


def _replica_status(
    replica_id: str, member: Member | None, *, rank: int | None, has_asked: bool, heard_ms: int, timeout_ms: int
) -> ReplicaStatus:
    """Return the status of a member; `member` is None if it has only beaten."""
    is_lost = heard_ms >= timeout_ms
    state = ReplicaState.JOINING if rank is None else ReplicaState.TRAINING
    return ReplicaStatus(
        replica_id=replica_id,
        state=ReplicaState.LOST if is_lost else ReplicaState.WAITING if has_asked else state,
        rank=rank,
        address=member.address if member is not None else "",
        step=member.step if member is not None else 0,
        heard_ms=heard_ms,
        reason=f"no beat within {timeout_ms} ms" if is_lost else "",
        gone_ms=heard_ms - timeout_ms if is_lost else 0,
    )
