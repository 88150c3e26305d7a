"""torchft's lighthouse in a simulated cluster: its wire, and the work of grpc around its rule.

A connection to it is a stream here, which carries calls and their answers. Its rule is `tft_coord.testing.TorchftLike`.

Law of this file: messages and streams, and no rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, final

from tft_coord.core import effects, events
from tft_coord.core.types import Quorum
from tft_coord.testing import TorchftLike, stripped
from tft_sim.network import Stream
from tft_sim.parts import Parts
from tft_sim.process import Process


class World(Parts, Protocol):
    """The cluster, as torchft's lighthouse sees it."""

    @property
    def wall_ms(self) -> int: ...
    def trace(self, who: str, what: object) -> None: ...
    def foreign_formed(self, quorum: Quorum) -> None: ...


@dataclass(frozen=True, slots=True)
class Unimplemented:
    """The answer of grpc to a stream of a missing service."""


@final
class ForeignLighthouseProcess(Process):
    """One life of torchft's lighthouse."""

    def __init__(self, cluster: World, number: int, name: str = "lighthouse") -> None:
        super().__init__(name, cluster.clock)
        self._cluster = cluster
        self._core = TorchftLike(cluster.config.min_replicas, cluster.timeouts)
        self._callers: dict[str, tuple[Stream, int]] = {}
        self._number = number

    def waiting_for(self, _job: str) -> str:
        """Return what the next quorum of its one job waits for, as one phrase."""
        return self._core.waiting_for

    def start(self) -> None:
        """Start the tick."""
        self.after(self._cluster.timeouts.quorum_tick_ms, self._tick)

    def accepted(self, stream: Stream) -> None:
        """Listen to a stream that a manager server has dialed."""
        stream.listen(self, lambda message: self._heard(stream, message), lambda: self._closed(stream))

    def _closed(self, stream: Stream) -> None:
        # No caller is left to answer. Its request stays.
        self._callers = {name: caller for name, caller in self._callers.items() if caller[0] is not stream}

    def _tick(self) -> None:
        self._look()
        self.after(self._cluster.timeouts.quorum_tick_ms, self._tick)

    def _heard(self, stream: Stream, message: Any) -> None:
        now_ms = self.clock.now_ms
        match message:
            case events.HelloReceived():
                stream.send(self, Unimplemented())
            case events.HeartbeatReceived(replica_id):
                self._core.beat(replica_id, now_ms)
            case events.UnaryQuorumRequested(call, member):
                self._cluster.trace("lighthouse", message)
                self._callers[member.replica_id] = (stream, call)
                self._core.ask(stripped(member), now_ms)
                self._look()
            case events.UnaryRequestWithdrawn(call):
                gone = [name for name, caller in self._callers.items() if caller == (stream, call)]
                for name in gone:
                    self._cluster.marks.hit("torchft's lighthouse keeps one that went away")
                    del self._callers[name]

    def _look(self) -> None:
        quorum = self._core.tick(self.clock.now_ms, self._cluster.wall_ms, callers=self._callers)
        if quorum is None:
            return
        self._cluster.trace("lighthouse", quorum)
        self._cluster.foreign_formed(quorum)
        if self._number > 1 and quorum.key.quorum_id == 1:
            self._cluster.marks.hit("a foreign lighthouse counts from 1 again")
        for name in quorum.replica_ids:
            stream, call = self._callers.pop(name, (None, 0))
            if stream is not None:
                stream.send(self, effects.AnswerUnaryQuorum(call, quorum))
