"""A rank is killed, raises, fails, hangs or is stopped, at each place of a step: the others go on, bit-equal.

Three groups train together. Two survivors train through the whole module. A victim is started afresh for each test that
needs one. There are two survivors, because one of two groups can't distinguish a hang from a network cut. Two of three
are a majority. A survivor's process does not end, whatever happens to the victim. At the end of the module it ends as
it was told.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from typing import Any, Final

import psutil
import pytest

from integration_tests.conftest import spawning
from integration_tests.training import Job, Launcher, Trainer
from tft_algos.testing import Action, Fault, Place
from tft_coord.timeouts import Timeouts
from tft_lighthouse import LighthouseServer

VICTIM: Final = "a"  # the first by name is the first source, and hosts the others' rendezvous
SURVIVORS: Final = ("s", "t")
FURTHER_STEPS: Final = 5
# On a busy machine a survivor may ask later than this. It is then left out of a quorum and notices no event in it. The
# victim may then be the last holder of a step, and the others repeat the step.
JOIN_TIMEOUT_MS: Final = 1_000
OF_RANK_ZERO: Final = (Place.BACKWARD, Place.VOTE, Place.HEALING)
SETTINGS: Final[dict[str, Any]] = {
    "timeout": timedelta(seconds=1),
    "timeouts": Timeouts(
        heal_timeout_ms=3_000,
        heartbeat_timeout_ms=2_000,
        beat_interval_ms=500,
    ),
    "faults": (),
    "model": "small",
    "batch_s": 0.01,  # leaves the machine's cores to starting processes
}

# The faults that end a victim, and its error. Its loop does not catch errors of its own code. Without a verdict no rank
# may step or continue. All other faults are errors of one step.
ENDS: Final = {
    (Action.RAISE, Place.FORWARD): "InjectedError",
    (Action.RAISE, Place.BACKWARD): "InjectedError",
    (Action.RAISE, Place.VOTE): "InjectedError",
    (Action.FAIL, Place.VOTE): "RequestTimeoutError",
}


class Cluster:
    """Two surviving groups and a struck one, with equal numbers of ranks.

    Args:
        job: of the groups.
        world_size: ranks of each group.
    """

    def __init__(self, job: Job, world_size: int) -> None:
        self.job = job
        self.world_size = world_size
        self._launchers: list[Launcher] = []
        self.survivors = [self._start(name) for name in SURVIVORS]
        self.victim: list[Trainer] = []
        self._next: list[Trainer] = []  # the next victim, which starts during the faults of this one
        self.stands = False  # the victim has shown that nothing is wrong with it
        self._seen: dict[Trainer, int] = {}

    def _start(self, name: str, **options: Any) -> list[Trainer]:
        if self.world_size == 1:
            return [self.job.start(name, **SETTINGS, **options)]
        # Each start has a separate store. Otherwise it would replace the one before, as its successor.
        self._launchers.append(Launcher(self.job, name, self.world_size))
        return self._launchers[-1].start(**SETTINGS, **options)

    def rank_for(self, place: Place) -> int:
        """Return the rank that is struck: of two, the rank without the manager server, and at some places the other."""
        return 0 if self.world_size == 1 or place in OF_RANK_ZERO else 1

    @property
    def surviving(self) -> list[Trainer]:
        return [trainer for group in self.survivors for trainer in group]

    def all_three(self) -> list[Trainer]:
        """Return a victim, reused if it is healthy, after all groups have committed together."""
        self.job.until(lambda: self._together(self.surviving, 2, 3), "the survivors commit together")
        if not self.victim:
            self.victim = self._next or self._start(VICTIM, waits=True)
            self._next = []
            for trainer in self.victim:
                trainer.connection.send("go")
        self._wait_for_all_three()
        return self.victim

    def _wait_for_all_three(self) -> None:
        everybody = self.surviving + self.victim
        self.job.until(lambda: self._together(everybody, 3), "all three groups commit together")

    def _together(self, trainers: Sequence[Trainer], *participants: int) -> bool:
        return all(any(trainer.committed_with(number, 3) for number in participants) for trainer in trainers)

    def strike(self, trainer: Trainer, fault: Fault) -> None:
        """Inject faults into a trainer, and wait until the last one strikes."""
        self.stands = False
        self._seen = {other: len(other.events) for other in self.job.trainers}
        for asked in _in_order(fault):
            trainer.connection.send(asked)
        self._next = self._next or self._start(VICTIM, waits=True)
        heals = 0

        def struck() -> bool:
            nonlocal heals
            if fault.place is Place.SERVING and self._has_healed(heals):
                # A survivor must heal, so its state is declared torn. It heals again if the victim came too late for
                # that quorum, which waits only for JOIN_TIMEOUT_MS, and so had no replica to serve.
                self.survivors[1][0].connection.send(
                    Fault(action=Action.FAIL, place=Place.OPTIMIZER, replica=SURVIVORS[1], rank=0)
                )
                heals += 1
            return _was_struck(self._since(trainer), fault)

        self.job.until(struck, f"{fault.describe()}")

    def _has_healed(self, times: int) -> bool:
        """Return whether the survivor that heals for the others' sake has done so that many times."""
        return len([event for event in self._since(self.survivors[1][0]) if event.kind == "healed"]) == times

    def _since(self, trainer: Trainer) -> list[Any]:
        return trainer.events[self._seen[trainer] :]

    def survivors_go_on(self) -> None:
        """Check that the survivors commit further steps, and that commits of one step are bit-equal in all trainers."""
        last = max(trainer.step for trainer in self.job.trainers)
        common = self.job.check_digests()
        self.job.until(
            lambda: all(trainer.step >= last + FURTHER_STEPS for trainer in self.surviving), "the survivors go on"
        )
        assert [trainer.ended for trainer in self.surviving] == [None] * len(self.surviving), self.job.history()
        assert self.job.check_digests() >= common + FURTHER_STEPS

    def survivors_noticed(self) -> None:
        """Check that in each surviving group a Manager has recorded an error of the lost step."""
        for group in self.survivors:
            errors = [event.text for rank in group for event in self._since(rank) if event.kind == "failed"]
            assert any(text != "None" for text in errors), self.job.history()

    def victim_goes_on(self) -> None:
        """Check that the victim commits with the others again, without a restart."""
        self._wait_for_all_three()
        assert [trainer.ended for trainer in self.victim] == [None] * len(self.victim), self.job.history()
        self.job.check_digests()
        self.stands = True

    def victim_ends(self) -> None:
        """Wait until every process of the victim's group has ended."""
        self.job.until(
            lambda: all(trainer.connection.closed or trainer.ended for trainer in self.victim),
            "the victim's group ends",
        )

    def end(self) -> None:
        """Stop the survivors at a given step, which shows that they were never in trouble."""
        self.bury()
        self.job.finish(self.surviving)
        for trainer in self._next:
            trainer.process.kill()
        self._launchers.clear()  # the stores listen

    def bury(self) -> None:
        """Kill all processes of the victim."""
        for trainer in self.victim:
            trainer.process.kill()
            trainer.process.join()
        self.victim = []


def _in_order(fault: Fault) -> list[Fault]:
    """Return the faults in order, the fault last, so that its place is reached."""
    before = {Place.CONFIGURE: Place.REDUCTION, Place.HEALING: Place.OPTIMIZER}.get(fault.place)
    if before is None:
        return [fault]
    return [Fault(action=Action.FAIL, place=before, replica=fault.replica, rank=fault.rank), fault]


def _was_struck(events: Sequence[Any], fault: Fault) -> bool:
    return any(event.kind == "struck" and event.text == fault.describe() for event in events)


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def standing(request: pytest.FixtureRequest, forkserver: ForkServerContext) -> Iterator[Cluster]:
    """Yield survivors for all tests of groups of that size."""
    lighthouse = LighthouseServer("127.0.0.1:0", join_timeout_ms=JOIN_TIMEOUT_MS, heartbeat_timeout_ms=2_000)
    with lighthouse, spawning(forkserver) as spawn:
        cluster = Cluster(Job(spawn, lighthouse), request.param)
        yield cluster
        cluster.end()


@pytest.fixture
def cluster(standing: Cluster) -> Iterator[Cluster]:
    """Yield three groups that train together."""
    standing.all_three()
    yield standing
    if not standing.stands:
        standing.bury()


def must_notice(fault: Fault) -> bool:
    """Return whether the survivors were in a rendezvous or a reduction that could not succeed."""
    if fault.action is Action.HANG and fault.place in (Place.FORWARD, Place.BACKWARD):
        return True
    return fault.place in (Place.CONFIGURE, Place.REDUCTION)


@pytest.mark.in_parts(always=["one-Place.REDUCTION", "one-Place.SERVING"])
@pytest.mark.parametrize("place", list(Place))
def test_killed(cluster: Cluster, place: Place) -> None:
    rank = cluster.rank_for(place)
    fault = Fault(action=Action.KILL, place=place, replica=VICTIM, rank=rank)
    cluster.strike(cluster.victim[rank], fault)
    cluster.survivors_go_on()
    assert cluster.victim[rank].process.exitcode == -signal.SIGKILL
    if must_notice(fault):
        cluster.survivors_noticed()
    cluster.victim_ends()
    for trainer in cluster.victim:
        assert trainer is cluster.victim[rank] or "ReplicaGroupLostError" in trainer.events[-1].text


@pytest.mark.in_parts(always=["one-Place.BACKWARD", "one-Place.VOTE"])
@pytest.mark.parametrize("place", list(Place))
def test_hangs(cluster: Cluster, place: Place) -> None:
    rank = cluster.rank_for(place)
    fault = Fault(action=Action.HANG, place=place, replica=VICTIM, rank=rank)
    cluster.strike(cluster.victim[rank], fault)
    cluster.survivors_go_on()
    assert cluster.victim[rank].process.is_alive()
    if must_notice(fault):
        cluster.survivors_noticed()


@pytest.mark.in_parts(always=[f"one-{place}-Action.FAIL" for place in Place])
@pytest.mark.parametrize("action", [Action.FAIL, Action.RAISE])
@pytest.mark.parametrize("place", list(Place))
def test_raises_or_fails(cluster: Cluster, place: Place, action: Action) -> None:
    rank = cluster.rank_for(place)
    fault = Fault(action=action, place=place, replica=VICTIM, rank=rank)
    cluster.strike(cluster.victim[rank], fault)
    cluster.survivors_go_on()
    if must_notice(fault):
        cluster.survivors_noticed()
    if (action, place) not in ENDS:
        cluster.victim_goes_on()
        return
    cluster.victim_ends()
    for trainer in cluster.victim:
        expected = (
            f"{ENDS[action, place]}: {fault.describe()}" if trainer is cluster.victim[rank] else "ReplicaGroupLostError"
        )
        assert trainer.events[-1].text.startswith(expected), trainer.events[-1].text


@pytest.mark.in_parts(always=["one"])
def test_stopped(cluster: Cluster) -> None:
    rank = cluster.rank_for(Place.REDUCTION)
    fault = Fault(action=Action.STOP, place=Place.REDUCTION, replica=VICTIM, rank=rank)
    cluster.strike(cluster.victim[rank], fault)
    cluster.survivors_go_on()
    assert psutil.Process(cluster.victim[rank].process.pid).status() == psutil.STATUS_STOPPED
    cluster.survivors_noticed()
