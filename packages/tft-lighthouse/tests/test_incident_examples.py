"""docs/read-an-incident.md shows the lines that a lighthouse really logs for ten faults.

The faults happen to the lighthouse's core in virtual time. A line that changes is to be copied into the page.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tft_coord import Member, QuorumKey, StragglerAction, StragglerPolicy, Timeouts
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import Hello
from tft_coord.lighthouse import LighthouseConfig, LighthouseCore, TorchftCore, effects, events
from tft_lighthouse import log
from tft_lighthouse.journal import Journal

PAGE: Final = Path(__file__).parents[3] / "docs/read-an-incident.md"
JOB: Final = "llama"
REPORTS: Final = {
    effects.QuorumFormed: lambda _: None,  # its lines are long, and the page says what is in them
    effects.ReplicaLost: log.replica_lost,
    effects.ReplicaLeft: log.replica_left,
    effects.PaceChanged: log.pace_changed,
    effects.WaitNoticed: log.wait,
    effects.JobEnded: log.job_ended,
}


def whole(number: int) -> str:
    """Return the id of a replica; its short form ends with 8 digits."""
    return f"replica_{number}:{0x0F3A9C1D + number * 0x11111111:08x}-0000-4000-8000-000000000000"


class Scene:
    """A job of three replicas in a standing quorum, at step 6410, and all that is logged from then on."""

    def __init__(self, action: StragglerAction = StragglerAction.WARN) -> None:
        nonces = itertools.count(1)
        config = LighthouseConfig(timeouts=Timeouts(), stragglers=StragglerPolicy(action=action))
        self.core = LighthouseCore(config, started_ms=16, cluster_id="c", nonces=lambda: next(nonces), now_ms=0)
        self.now_ms = 0
        self.journal = Journal(
            self.core, TorchftCore(config, started_ms=16), now_ms=lambda: self.now_ms, wall_ms=lambda: self.now_ms
        )
        self.step = 6_410
        self.own_ms = dict.fromkeys(range(5), 300)
        self.beating = {0, 1, 2}
        self.where: dict[int, Progress] = {}
        self._requests = itertools.count(1)
        self.wait(0.4)
        for number in range(3):
            self.hello(number)
        self.ask(0, 1, 2)
        self.wait(0.2)
        self.commit()

    def give(self, event: events.LighthouseEvent) -> None:
        self._perform(self.core.handle(event, self.now_ms, self.now_ms))

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now_ms += 100
            if self.now_ms % 1_000 == 0:
                for number in sorted(self.beating):
                    own_ms = self.own_ms[number]
                    own = Progress(self.step, Phase.OWN, 10, excused=False, slowest_step_ms=600_000, own_ms=own_ms)
                    self.give(events.BeatReceived(number + 1, 1, self.where.get(number, own)))
                self._perform(self.core.look_at_waits(self.now_ms))
            self._perform(self.core.tick(self.now_ms, self.now_ms))
            self.journal.tick()

    def _perform(self, decisions: list[object]) -> None:
        for decision in decisions:
            self.journal.note(decision)
            report: Callable[..., None] | None = REPORTS.get(type(decision))
            if report is not None:
                report(decision)

    def hello(self, number: int) -> None:
        said = Hello(JOB, whole(number), 1, f"node-{number}:40917", ready=True)
        self.give(events.HelloReceived(number + 1, said))

    def ask(self, *numbers: int, failures: int = 0, step: int | None = None) -> None:
        for number in numbers:
            quorum = self.core.quorum(JOB)
            held: QuorumKey | None = None
            if quorum is not None and whole(number) in quorum.replica_ids:
                held = quorum.key
            step_of = self.step if step is None else step
            member = Member(
                whole(number),
                address=f"node-{number}:40917",
                step=step_of,
                lineage=step_of,
                live=step_of > 0,
                commit_failures=failures,
                init_sync=False,
            )
            self.give(events.QuorumRequested(number + 1, next(self._requests), member, held))

    def commit(self, *numbers: int, seconds: float = 0.3) -> None:
        """Let these members commit a step, or all that beat, and ask for the next quorum."""
        self.wait(seconds)
        self.step += 1
        self.ask(*(numbers or sorted(self.beating)))
        self.wait(0.2)


def killed() -> None:
    scene = Scene()
    scene.beating.remove(1)
    scene.give(events.DeathReported(2, "rank 0 ended: its process ended"))
    scene.wait(0.1)
    scene.ask(0, 2, failures=1)
    scene.commit()


def stopped() -> None:
    scene = Scene()
    scene.beating.remove(1)
    scene.wait(6.0)
    scene.ask(0, 2, failures=1)
    scene.commit()


def cut() -> None:
    scene = Scene()
    scene.beating.remove(1)
    scene.give(events.StreamClosed(2))
    scene.wait(0.5)
    scene.ask(0, 2, failures=1)
    scene.commit()


def slow() -> None:
    scene = Scene(StragglerAction.LEAVE_OUT)
    scene.own_ms[1] = 1_500
    for _ in range(12):
        scene.commit()
    scene.ask(0, 1, 2)
    scene.wait(0.2)
    scene.commit()


def failed() -> None:
    scene = Scene()
    scene.wait(0.2)
    scene.ask(0, 1, 2, failures=1)
    scene.wait(0.2)
    scene.commit()


def drained() -> None:
    scene = Scene()
    scene.beating.remove(1)
    reason = "it is drained: new disk (asked by 10.0.0.7:51522 over HTTP)"
    scene.give(events.LeaveReceived(2, reason, 1_000))
    scene.wait(0.1)
    scene.ask(0, 2)
    scene.commit()


def joins(scene: Scene) -> None:
    """Let a newcomer ask, and the next quorum form with it; it waits for the state."""
    scene.hello(3)
    scene.ask(3, step=0)
    scene.wait(0.1)
    scene.ask(0, 1, 2)
    scene.beating.add(3)
    scene.where[3] = Progress(0, Phase.WAITING, 100, excused=True, slowest_step_ms=600_000)


def has_healed(scene: Scene) -> None:
    scene.where[3] = Progress(scene.step, Phase.OUTSIDE, 100, excused=True, slowest_step_ms=600_000)
    scene.wait(2.0)
    del scene.where[3]


def joined() -> None:
    scene = Scene()
    joins(scene)
    scene.commit(0, 1, 2)
    scene.wait(1.0)
    has_healed(scene)


def source_killed() -> None:
    scene = Scene()
    joins(scene)
    scene.wait(1.0)
    scene.beating.remove(0)
    scene.give(events.DeathReported(1, "rank 0 ended: its process ended"))
    scene.wait(0.1)
    scene.ask(1, 2, failures=1)
    scene.ask(3, step=0)
    scene.commit(1, 2)
    scene.wait(1.0)
    has_healed(scene)


def evaluates() -> None:
    scene = Scene()
    scene.where[1] = Progress(scene.step, Phase.OUTSIDE, since_ms=26_000, excused=True, slowest_step_ms=600_000)
    scene.ask(0, 2)
    scene.wait(7.0)
    scene.ask(1)
    del scene.where[1]
    scene.wait(1.0)


def restarted() -> None:
    quorum = Scene().core.quorum(JOB)
    assert quorum is not None
    log.resumed(JOB, quorum, whole(2))


@pytest.mark.parametrize(
    "fault", [killed, stopped, cut, slow, failed, drained, restarted, source_killed, joined, evaluates]
)
def test_the_page_shows_what_is_logged(fault: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    Scene()
    caplog.clear()
    with caplog.at_level(logging.INFO, "tft_lighthouse"):
        fault()
    lines = [message for message in caplog.messages if "kind=start" not in message]
    assert lines
    assert "\n" + "\n".join(lines) + "\n```" in PAGE.read_text(encoding="utf-8"), "\n".join(lines)
