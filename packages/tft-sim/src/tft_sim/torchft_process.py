"""A torchft replica group, as a lighthouse sees it: unary beats, unary questions, no stream.

The group "trains": it counts the quorums that it received. It ends when it is refused, as torchft's manager does.

Law of this file: the messages of such a member, and their times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tft_coord.core import effects, events
from tft_coord.core.types import Member, Quorum
from tft_sim.lighthouse_process import LighthouseProcess
from tft_sim.parts import Parts
from tft_sim.process import Process

BEAT_MS = 100
STEP_MS = 300
PATIENCE_MS = 4_000


class World(Parts, Protocol):
    """The cluster, as a member of torchft sees it."""

    @property
    def on_note(self) -> Callable[[str, str], None]: ...
    @property
    def our_lighthouse(self) -> LighthouseProcess: ...
    def end_process(self, process: Process) -> None: ...


class TorchftProcess(Process):
    """One process of a torchft group.

    Args:
        cluster: the cluster of its lighthouse.
        name: its replica id.
        step: the step that it has reached.
    """

    def __init__(self, cluster: World, name: str, step: int = 0) -> None:
        super().__init__(name, cluster.clock)
        self.step = step
        self._cluster = cluster
        self._asks = 0

    def start(self) -> None:
        """Start the beats and the questions."""
        self._beat()
        self._ask()

    def _beat(self) -> None:
        lighthouse = self._cluster.our_lighthouse
        beat = events.HeartbeatReceived(self.name)
        self._cluster.network.message(self, lighthouse, lambda: lighthouse.called(beat), lambda: None)
        self.after(BEAT_MS, self._beat)

    def _ask(self) -> None:
        self._asks += 1
        number, lighthouse = self._asks, self._cluster.our_lighthouse
        timer = self.after(PATIENCE_MS, lambda: again())
        asks: list[int] = []

        def again() -> None:
            if number != self._asks:
                return
            timer.cancel()
            if asks:
                gone = events.UnaryRequestWithdrawn(asks[0])
                self._cluster.network.message(self, lighthouse, lambda: lighthouse.called(gone), lambda: None)
            self.after(BEAT_MS, self._ask)

        def answered(answer: Quorum | effects.RefuseUnary) -> None:
            if number != self._asks:
                return
            timer.cancel()
            if isinstance(answer, Quorum):
                self.step += 1
                self._cluster.on_note(f"{self.name}/0", f"trains step {self.step} with {', '.join(answer.replica_ids)}")
                self._cluster.marks.hit("a member of torchft's trained")
                self.after(STEP_MS, self._ask)
            else:
                self._cluster.marks.hit("a member of torchft's was refused")
                self._cluster.on_note(f"{self.name}/0", f"is refused a quorum ({answer.refusal.value}), and ends")
                self._cluster.end_process(self)

        def arrived() -> None:
            if not asks:
                member = Member(self.name, address=f"{self.name}:1", step=self.step)
                asks.append(lighthouse.handle_unary_request(self, member, answered))

        self._cluster.network.message(self, lighthouse, arrived, again)
