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
from tft_coord.core.lighthouse import LighthouseConfig
from tft_coord.core.types import Member, Quorum, QuorumKey, Refusal


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
            case events.HeartbeatReceived():
                self._beats[event.replica_id] = now_ms
                return []
            case events.UnaryRequestWithdrawn():
                self._waiting.pop(event.call, None)
                return []
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
