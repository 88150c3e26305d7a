"""The watch over losses: how long a replica was silent, or its stream away, before it was taken for lost.

Law of this file: observe only, as in `invariants.py`. It sees messages and the clock alone.
"""

from __future__ import annotations

from tft_coord.core import effects, events
from tft_coord.core.types import Refusal
from tft_coord.timeouts import Timeouts
from tft_sim.invariants import InvariantError

MAX_FLAPS = 3
MASS_BREAK_MIN_STREAMS = 4


class Silence:
    """The check P1 for one life of a lighthouse: it takes replicas for lost if they are, and soon.

    Source: docs/protocol/sessions-and-quorums.md, "Losses".

    A lighthouse that forgets everything, or begins to stand in for a newer one, begins another life.

    Args:
        timeouts: of the lighthouse.
        now_ms: start time of the lighthouse.
    """

    def __init__(self, timeouts: Timeouts, now_ms: int) -> None:
        self._timeouts = timeouts
        self._last_ms = now_ms
        self._away_until_ms = now_ms  # a silence or break before this time is excused
        # streams broke at this time, while enough were open that it may be the lighthouse's own fault
        self._mass_break_ms = now_ms
        self._hellos: dict[int, str] = {}
        self._streams: dict[str, int] = {}  # newest stream of each welcomed replica
        self._last_heard_ms: dict[str, int] = {}
        self._closed_ms: dict[str, int] = {}  # time since which the newest stream is gone
        self._broke_ms: dict[str, list[int]] = {}  # times of each replica's losses by its stream alone
        self._left: set[str] = set()  # replicas that left the job, so their end is no loss from then on, or soon
        self._watched: set[str] = set()

    def heard(self, event: events.LighthouseEvent, now_ms: int) -> None:
        """Record an event that the lighthouse receives before it decides."""
        self._record_time(now_ms)
        name = self._hellos.get(event.stream, "")
        newest = self._streams.get(name) == event.stream
        match event:
            case events.HelloReceived():
                self._hellos[event.stream] = event.hello.replica_id
            case events.StreamClosed() if newest:
                if not event.told and len(self._streams) + len(self._closed_ms) >= MASS_BREAK_MIN_STREAMS:
                    self._mass_break_ms = now_ms
                del self._streams[name]
                self._closed_ms[name] = now_ms
            case _ if newest:
                self._last_heard_ms[name] = now_ms

    def decided(self, order: effects.LighthouseEffect, now_ms: int) -> None:
        """Record an effect that the lighthouse decides."""
        match order:
            case effects.Welcome():
                name = self._hellos[order.stream]
                self._streams[name], self._last_heard_ms[name] = order.stream, now_ms
                self._closed_ms.pop(name, None)
                if name not in self._left:  # its manager server may have been restarted since
                    self._watched.add(name)
            case effects.ReplicaLeft():
                self._left.add(order.replica_id)
                self._watched.discard(order.replica_id)
            case effects.ReplicaLost():
                self._lost(order, now_ms)
            case effects.RefuseSession() if order.refusal is Refusal.OTHER_KIND:
                self._watched.clear()  # the lighthouse has forgotten the job

    def ticked(self, now_ms: int) -> None:
        """Check after a tick that each replica with a long silence, or a long-gone stream, is lost."""
        slack_ms, grace_ms = 2 * self._timeouts.quorum_tick_ms, self._timeouts.reconnect_grace_ms
        for name in sorted(self._watched):
            since_ms = max(self._last_heard_ms[name], self._away_until_ms, self._mass_break_ms)
            if now_ms - since_ms >= self._timeouts.heartbeat_timeout_ms + slack_ms:
                raise InvariantError("P1", f"{name} is silent since {since_ms} ms, and is not lost")
            closed_ms = self._closed_ms.get(name, now_ms)
            excused = (
                max(self._away_until_ms, self._mass_break_ms) >= closed_ms or self._flaps(name, now_ms) >= MAX_FLAPS
            )
            if not excused and now_ms - closed_ms >= grace_ms + slack_ms:
                raise InvariantError(
                    "P1", f"the stream of {name} is closed since {closed_ms} ms, and {name} is not lost"
                )

    def woke(self, now_ms: int) -> None:
        """Record the time before a tick."""
        self._record_time(now_ms)

    def _record_time(self, now_ms: int) -> None:
        if now_ms - self._last_ms >= self._timeouts.quorum_tick_ms + self._timeouts.reconnect_grace_ms:
            self._away_until_ms = now_ms
        self._last_ms = now_ms

    def _flaps(self, name: str, now_ms: int) -> int:
        return sum(now_ms - at_ms < self._timeouts.flap_window_ms for at_ms in self._broke_ms.get(name, ()))

    def _lost(self, order: effects.ReplicaLost, now_ms: int) -> None:
        name = order.replica_id
        self._watched.discard(name)
        last_heard_ms = max(self._last_heard_ms.get(name, 0), self._away_until_ms)
        if order.reason.startswith("silent") and now_ms - last_heard_ms < self._timeouts.heartbeat_timeout_ms:
            raise InvariantError("P1", f"{name} is lost for a silence since {last_heard_ms} ms, which is too short")
        closed_ms = self._closed_ms.pop(name, now_ms)
        if not order.reason.startswith("its stream disconnected"):
            return
        if closed_ms < self._away_until_ms or now_ms - closed_ms < self._timeouts.reconnect_grace_ms:
            raise InvariantError(
                "P1", f"{name} is lost for a stream that closed at {closed_ms} ms, which is too early or excused"
            )
        if self._flaps(name, now_ms) >= MAX_FLAPS:
            raise InvariantError(
                "P1", f"{name} is lost for a broken stream again, after its losses at {self._broke_ms[name]} ms"
            )
        self._broke_ms.setdefault(name, []).append(now_ms)
