"""The two kinds of jobs: torchft's members use unary calls, and this project's replicas hold a stream. They never meet.

The two kinds can't train together, because torchft's wire lacks fields that a plan depends on. Nor may both exist under
one name, each as the whole job. torchft knows no job ids, so its members are of the job "default". While a member of
one kind is healthy there, the other kind is refused by name.

A restarted lighthouse does not know which kind was there before. In its first heartbeat_timeout, members that have
trained therefore win over those that have not. At any time, this project's replicas of a job that has trained here win
too, when all of them return after a network failure.

Law of this file: which of the two cores gets an event; every other decision is theirs.
"""

from __future__ import annotations

from typing import Final

from tft_coord.compat.rule import TorchftCore
from tft_coord.core import effects, events
from tft_coord.core.lighthouse import LighthouseCore
from tft_coord.core.types import Refusal

TORCHFT_JOB: Final = "default"

Effects = list[effects.LighthouseEffect | effects.UnaryEffect]


class ProtocolRouter:
    """This project's sessions and torchft's calls on one lighthouse.

    Args:
        ours, theirs: the core for each kind.
        undecided_ms: how long after the start the earlier kind may be unknown.
        now_ms: the time at the start.
        job: the job of torchft's members.
    """

    def __init__(
        self, ours: LighthouseCore, theirs: TorchftCore, *, undecided_ms: int, now_ms: int, job: str = TORCHFT_JOB
    ) -> None:
        self._ours = ours
        self._theirs = theirs
        self._undecided_until_ms = now_ms + undecided_ms
        self._job = job

    def handle(self, event: events.LighthouseEvent, now_ms: int, wall_ms: int) -> Effects:
        """Handle an event of a stream; return the effects, in order."""
        self._theirs.note_time(now_ms)
        match event:
            case events.HelloReceived() if event.hello.job == self._job:
                return self._hello(event, now_ms, wall_ms)
            case events.QuorumReported() if (
                self._ours.job_of(event.stream) == self._job and self._theirs.any_alive(now_ms) is not None
            ):
                # The reporter may be gone, and the members that it names have not connected. They would count as alive
                # beside torchft's for a while.
                event = events.QuorumReported(event.stream, None)
        return [*self._ours.handle(event, now_ms, wall_ms)]

    def _hello(self, event: events.HelloReceived, now_ms: int, wall_ms: int) -> Effects:
        other, name = self._theirs.any_alive(now_ms), event.hello.replica_id
        trains = event.hello.held is not None and not self._theirs.has_trained
        is_known = now_ms < self._undecided_until_ms or self._ours.has_trained(self._job)
        if other is not None and not (trains and is_known):
            message = self._message(f"replica {name} (tft)", f"{other} (torchft)")
            return [effects.RefuseSession(event.stream, Refusal.OTHER_KIND, message)]
        out = self._ours.handle(event, now_ms, wall_ms)
        if not any(isinstance(order, effects.Welcome) for order in out):
            return [*out]  # a replica that is refused evicts no members
        # The remaining torchft members have asked and then fallen silent, or have not trained.
        evicted = self._theirs.evict(
            Refusal.OTHER_KIND, lambda each: self._message(f"replica {each} (torchft)", f"{name} (tft)")
        )
        return [*evicted, *out]

    def handle_unary(self, event: events.UnaryEvent, now_ms: int, wall_ms: int) -> Effects:
        """Handle one of torchft's calls; return the effects, in order."""
        self._theirs.note_time(now_ms)
        out: Effects = []
        if not isinstance(event, events.UnaryRequestWithdrawn):
            other = self._ours.any_alive(self._job, now_ms)
            if other is not None:
                if not isinstance(event, events.UnaryQuorumRequested):
                    # The refusal follows its request. Its beats would make the others wait for it.
                    return []
                name = event.member.replica_id
                trains = event.member.step > 0 and not self._ours.has_trained(self._job)
                if not trains or now_ms >= self._undecided_until_ms:
                    message = self._message(f"replica {name} (torchft)", f"{other} (tft)")
                    return [effects.RefuseUnary(event.call, Refusal.OTHER_KIND, message)]
                out += self._ours.evict(
                    self._job,
                    Refusal.OTHER_KIND,
                    lambda each: self._message(f"replica {each} (tft)", f"{name} (torchft)"),
                )
        return [*out, *self._theirs.handle(event, now_ms, wall_ms)]

    def tick(self, now_ms: int, wall_ms: int) -> Effects:
        """Handle the passage of time; call it every quorum_tick_ms."""
        self._theirs.note_time(now_ms)
        return [*self._ours.tick(now_ms, wall_ms), *self._theirs.tick(now_ms, wall_ms)]

    def _message(self, refused: str, other: str) -> str:
        return (
            f"{refused} can't join job {self._job!r}, because replica {other} is in it: tft and torchft replicas never "
            "share a quorum; use a lighthouse for each, or start the tft replicas under another job (TFT_JOB_ID)"
        )
