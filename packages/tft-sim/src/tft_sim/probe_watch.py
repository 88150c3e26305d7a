"""The watch over silence while others wait: which replicas are lost after a second of it, and which should be.

Law of this file: observe only, as in `invariants.py`. It sees messages and the clock. For a reported stop it also sees
the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tft_coord.core import effects, events
from tft_coord.core.assignment import assign
from tft_coord.core.suspicion import LOST_SILENT, LOST_STOPPED
from tft_coord.core.types import Quorum
from tft_coord.errors import ProtocolError
from tft_coord.timeouts import Timeouts
from tft_sim.invariants import InvariantError

SILENT_MS = 1_000
UNANSWERED_MS = 500
PROBE_EVERY_MS = 500
WAIT_REPORT_LIFETIME_MS = 2_500
STOPPED_MS = 400
LOST_WITHIN_MS = 1_300  # of silence while most others wait: a second, a late report of a wait, two ticks
PROMPT_ANSWER_MS = 250  # answers that take no longer show that nothing on the way is late
WITNESS_MAX_AGE_MS = 300  # maximum age of a witness's newest message
MAX_FLAPS = 3


@dataclass(slots=True)
class _Known:
    """The facts about one replica, on its newest stream."""

    job: str
    answers_probes: bool
    last_heard_ms: int
    sent_ms: dict[int, int] = field(default_factory=dict)
    answers_ms: list[tuple[int, int]] = field(default_factory=list)
    probed_ms: int | None = None
    requested_ms: int | None = None
    wait_reported_ms: int | None = None
    is_connected: bool = True


class ProbeWatch:
    """The check P5 for one life of a lighthouse: replicas lost after a second of silence are silent, and are lost soon.

    Source: docs/protocol/sessions-and-quorums.md, "Silence and probes".

    Args:
        timeouts: of the lighthouse.
        now_ms: start time of the lighthouse.
        lives: whether a replica of that job has a session.
        is_stopped: whether a replica was recently stopped for that time, by the state of its processes.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        now_ms: int,
        is_alive: Callable[[str, str], bool],
        is_stopped: Callable[[str, int], bool],
    ) -> None:
        self._timeouts = timeouts
        self._is_alive = is_alive
        self._is_stopped = is_stopped
        self._awake_ms = now_ms  # time of its last activity
        self._delayed_ms = now_ms  # time of its last delay
        self._hellos: dict[int, events.HelloReceived] = {}
        self._streams: dict[int, str] = {}  # newest stream of each welcomed replica
        self._known: dict[str, _Known] = {}
        # members of each job's quorum, and the time of their last answer
        self._members: dict[str, tuple[frozenset[str], int]] = {}
        self._holders: dict[str, frozenset[str]] = {}  # holders of the state that the quorum started from
        self._broke_ms: dict[str, list[int]] = {}

    def heard(self, event: events.LighthouseEvent, now_ms: int) -> None:
        """Record an event that the lighthouse receives before it decides."""
        self.woke(now_ms)
        if isinstance(event, events.HelloReceived):
            self._hellos[event.stream] = event
            return
        known = self._known.get(self._streams.get(event.stream, ""))
        if known is None:
            return
        if isinstance(event, events.StreamClosed):
            known.is_connected, known.requested_ms = False, None
            return
        known.last_heard_ms = now_ms
        match event:
            case events.QuorumRequested():
                known.requested_ms, known.wait_reported_ms = now_ms, None
            case events.RequestWithdrawn():
                known.requested_ms = None
            case events.BeatReceived():
                known.wait_reported_ms = now_ms if event.waits else None
            case events.ProbeAnswered() if event.number in known.sent_ms:
                known.answers_ms.append((now_ms, now_ms - known.sent_ms[event.number]))
                known.sent_ms = {number: at for number, at in known.sent_ms.items() if number > event.number}

    def decided(self, order: effects.LighthouseEffect, now_ms: int) -> None:
        """Record and check an effect that the lighthouse decides."""
        match order:
            case effects.Welcome():
                hello = self._hellos[order.stream].hello
                self._streams = {each: name for each, name in self._streams.items() if name != hello.replica_id}
                self._streams[order.stream] = hello.replica_id
                self._known[hello.replica_id] = _Known(hello.job, hello.answers_probes, now_ms)
            case effects.Probe():
                name = self._streams[order.stream]
                if not self._known[name].answers_probes:
                    raise InvariantError("P5", f"{name} received a probe, and does not support probes")
                self._probed(name, order.number, now_ms)
            case effects.QuorumFormed():
                self._members[order.job] = frozenset(order.quorum.replica_ids), now_ms
                self._holders[order.job] = _holders(order.quorum)
            case effects.AnswerQuorum() | effects.AnswerUnchanged() | effects.RefuseRequest():
                self._answered(order, now_ms)
            case effects.ReplicaLeft():
                self._known.pop(order.replica_id, None)
            case effects.RefuseSession():
                self._known.pop(self._streams.pop(order.stream, ""), None)
            case effects.ReplicaLost():
                if order.reason.startswith("its stream disconnected"):
                    self._broke_ms.setdefault(order.replica_id, []).append(now_ms)
                if order.reason.startswith(LOST_SILENT):
                    self._lost(order.replica_id, now_ms)
                if order.reason.startswith(LOST_STOPPED) and not self._is_stopped(order.replica_id, STOPPED_MS):
                    raise InvariantError("P5", f"{order.replica_id} is lost for a stop, and its processes run")
                if order.reason.startswith(LOST_SILENT) and self._is_spared(order.job, order.replica_id):
                    raise InvariantError(
                        "P5", f"{order.replica_id} is lost for silence, and is the last holder of the job's state"
                    )
                self._known.pop(order.replica_id, None)

    def _probed(self, name: str, number: int, now_ms: int) -> None:
        known = self._known[name]
        if known.probed_ms is not None and now_ms - known.probed_ms < PROBE_EVERY_MS:
            raise InvariantError("P5", f"{name} is probed again after {now_ms - known.probed_ms} ms")
        known.probed_ms = known.sent_ms[number] = now_ms

    def _answered(
        self, order: effects.AnswerQuorum | effects.AnswerUnchanged | effects.RefuseRequest, now_ms: int
    ) -> None:
        known = self._known.get(self._streams.get(order.stream, ""))
        if known is None:
            return
        known.requested_ms = None
        if isinstance(order, effects.RefuseRequest) or known.job not in self._members:
            return
        members, _ = self._members[known.job]
        if isinstance(order, effects.AnswerUnchanged):  # a quorum that is given again ends no other member's wait
            self._members[known.job] = members, now_ms
        self._holders[known.job] = _holders(order.quorum) if isinstance(order, effects.AnswerQuorum) else members

    def _is_spared(self, job: str, name: str) -> bool:
        """Return whether the replica is the last holder of its job's state."""
        return {each for each in self._holders.get(job, ()) if self._is_alive(job, each)} == {name}

    def woke(self, now_ms: int) -> None:
        """Record that the lighthouse is awake, before it handles an event or a tick."""
        if now_ms - self._awake_ms >= self._timeouts.quorum_tick_ms + self._timeouts.reconnect_grace_ms:
            self._delayed_ms = now_ms
            for known in self._known.values():
                known.sent_ms.clear()
        self._awake_ms = now_ms

    def ticked(self, now_ms: int) -> None:
        """Check after a tick that no member is silent for long while most others wait for it."""
        for job, (members, _) in self._members.items():
            here = [name for name in sorted(members) if name in self._known]
            for name in here:
                suspect = self._known[name]
                asked = [
                    other
                    for other in here
                    if other != name and now_ms - self._known[other].last_heard_ms <= WITNESS_MAX_AGE_MS
                    if now_ms - (self._known[other].requested_ms or now_ms) >= LOST_WITHIN_MS
                ]
                answer_delays_ms = [late_ms for _, late_ms in suspect.answers_ms]
                if (
                    suspect.requested_ms is not None
                    or suspect.wait_reported_ms is not None
                    or not suspect.is_connected
                    or not answer_delays_ms
                ):
                    continue
                if (
                    max(answer_delays_ms) > PROMPT_ANSWER_MS
                    or now_ms - self._delayed_ms < LOST_WITHIN_MS + SILENT_MS
                    or self._flaps(name, now_ms)
                ):
                    continue
                silent_ms = now_ms - suspect.last_heard_ms
                if silent_ms >= LOST_WITHIN_MS and 2 * len(asked) > len(members) - 1 and not self._is_spared(job, name):
                    raise InvariantError(
                        "P5", f"{name} is silent for {silent_ms} ms, most members wait for it, and it is not lost"
                    )

    def _lost(self, name: str, now_ms: int) -> None:
        suspect = self._known[name]
        oldest_ms = next(iter(suspect.sent_ms.values()), now_ms)
        recent = [late_ms for at_ms, late_ms in suspect.answers_ms[-16:] if now_ms - at_ms < 60_000]
        bound_ms = max(UNANSWERED_MS, 2 * max(recent, default=0))
        if now_ms - max(suspect.last_heard_ms, self._delayed_ms) < SILENT_MS or now_ms - oldest_ms < bound_ms:
            raise InvariantError(
                "P5",
                f"{name} is lost for silence too early: heard at {suspect.last_heard_ms} ms, probed at {oldest_ms} ms",
            )
        if not suspect.answers_probes or not suspect.answers_ms or self._flaps(name, now_ms):
            raise InvariantError(
                "P5", f"{name} is lost for a second of silence, and only heartbeat_timeout applies to it"
            )
        if suspect.job not in self._members:
            return  # the replica has formed no quorum itself, and was told of one
        members, formed_ms = self._members[suspect.job]
        others = [self._known[each] for each in members if each in self._known and each != name]
        waited = sum(1 for each in others if each.last_heard_ms > oldest_ms and self._waits(each, formed_ms, now_ms))
        if 2 * waited <= len(others):
            raise InvariantError(
                "P5", f"{name} is lost for silence, and only {waited} of {len(others)} other members waited"
            )

    @staticmethod
    def _waits(each: _Known, formed_ms: int, now_ms: int) -> bool:
        if each.requested_ms is not None:
            return True  # the duration is known only to watches that saw the earlier request
        return (
            each.wait_reported_ms is not None
            and each.wait_reported_ms > formed_ms
            and now_ms - each.wait_reported_ms < WAIT_REPORT_LIFETIME_MS
        )

    def _flaps(self, name: str, now_ms: int) -> bool:
        recent = [at_ms for at_ms in self._broke_ms.get(name, ()) if now_ms - at_ms < self._timeouts.flap_window_ms]
        return len(recent) >= MAX_FLAPS


def _holders(quorum: Quorum) -> frozenset[str]:
    try:
        common = assign(quorum)
    except ProtocolError:
        return frozenset()  # all members are torn
    return frozenset(quorum.replica_ids[rank] for rank in common.up_to_date) if common.step > 0 else frozenset()
