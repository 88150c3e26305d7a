"""The watch over losses: how long a replica was silent, or its stream away, before it was taken for lost.

Law of this file: observe only, as in `invariants.py`. It sees messages and the clock alone.
"""

from __future__ import annotations

from tft_coord.core import effects, events
from tft_coord.core.types import Refusal
from tft_coord.timeouts import Timeouts
from tft_sim.invariants import InvariantError

FLAPS_MOST = 3
SICK_STREAMS_LEAST = 4


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
        self._sick_ms = now_ms
        self._hellos: dict[int, str] = {}
        self._streams: dict[str, int] = {}  # newest stream of each welcomed replica
        self._sign_ms: dict[str, int] = {}
        self._closed_ms: dict[str, int] = {}  # time since which the newest stream is gone
        self._broke_ms: dict[str, list[int]] = {}  # times of each replica's losses by its stream alone
        self._left: set[str] = set()  # replicas that left the job, so their end is no loss from then on, or soon
        self._watched: set[str] = set()

    def heard(self, event: events.LighthouseEvent, now_ms: int) -> None:
        """Record an event that the lighthouse receives before it decides."""
        self._note_the_time(now_ms)
        name = self._hellos.get(event.stream, "")
        newest = self._streams.get(name) == event.stream
        match event:
            case events.HelloReceived():
                self._hellos[event.stream] = event.hello.replica_id
            case events.StreamClosed() if newest:
                if not event.told and len(self._streams) + len(self._closed_ms) >= SICK_STREAMS_LEAST:
                    self._sick_ms = now_ms
                del self._streams[name]
                self._closed_ms[name] = now_ms
            case _ if newest:
                self._sign_ms[name] = now_ms

    def decided(self, order: effects.LighthouseEffect, now_ms: int) -> None:
        """Record an effect that the lighthouse decides."""
        match order:
            case effects.Welcome():
                name = self._hellos[order.stream]
                self._streams[name], self._sign_ms[name] = order.stream, now_ms
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
            since_ms = max(self._sign_ms[name], self._away_until_ms, self._sick_ms)
            if now_ms - since_ms >= self._timeouts.heartbeat_timeout_ms + slack_ms:
                raise InvariantError("P1", f"{name} is silent since {since_ms} ms, and not lost")
            closed_ms = self._closed_ms.get(name, now_ms)
            excused = max(self._away_until_ms, self._sick_ms) >= closed_ms or self._flaps(name, now_ms) >= FLAPS_MOST
            if not excused and now_ms - closed_ms >= grace_ms + slack_ms:
                raise InvariantError("P1", f"the stream of {name} is gone since {closed_ms} ms, and it is not lost")

    def looks(self, now_ms: int) -> None:
        """Record the time before a tick."""
        self._note_the_time(now_ms)

    def _note_the_time(self, now_ms: int) -> None:
        if now_ms - self._last_ms >= self._timeouts.quorum_tick_ms + self._timeouts.reconnect_grace_ms:
            self._away_until_ms = now_ms
        self._last_ms = now_ms

    def _flaps(self, name: str, now_ms: int) -> int:
        return sum(now_ms - at_ms < self._timeouts.flap_window_ms for at_ms in self._broke_ms.get(name, ()))

    def _lost(self, order: effects.ReplicaLost, now_ms: int) -> None:
        name = order.replica_id
        self._watched.discard(name)
        sign_ms = max(self._sign_ms.get(name, 0), self._away_until_ms)
        if order.reason.startswith("silent") and now_ms - sign_ms < self._timeouts.heartbeat_timeout_ms:
            raise InvariantError("P1", f"{name} is lost by its silence since {sign_ms} ms")
        closed_ms = self._closed_ms.pop(name, now_ms)
        if not order.reason.startswith("its stream broke"):
            return
        if closed_ms < self._away_until_ms or now_ms - closed_ms < self._timeouts.reconnect_grace_ms:
            raise InvariantError("P1", f"{name} is lost by its stream, which is gone since {closed_ms} ms")
        if self._flaps(name, now_ms) >= FLAPS_MOST:
            raise InvariantError("P1", f"{name} is lost by its stream once more, after {self._broke_ms[name]}")
        self._broke_ms.setdefault(name, []).append(now_ms)
