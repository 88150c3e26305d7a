"""A sharded language model, and a fault at every place of a step: commits are bit-equal, and all reach the end.

Replica groups train the example's model together. One after the other is struck, by every action at every place. A
group that dies of it is restarted. When all commit together, the next is struck. No other group ever ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psutil
import pytest

from integration_tests.conftest import Spawn
from integration_tests.language_model import HANGS_FOR, OF_RANK_ZERO, Cluster, training_together
from tft_algos.testing import Action, Place

CLUSTERS: Final = {"two": (2, 1), "three": (3, 1), "five": (5, 1), "two of two": (2, 2)}


@dataclass(frozen=True)
class Blow:
    """A fault on a rank, and its end.

    Args:
        action, place: of the fault.
        ends_by_kill: of HANG and STOP. True: the supervisor kills the rank, which never continues. False: it continues
            after a while.
    """

    action: Action
    place: Place
    ends_by_kill: bool = False

    def __str__(self) -> str:
        return f"{self.action.value} at {self.place.value}{', killed' if self.ends_by_kill else ''}"


EVERY_BLOW: Final = tuple(
    Blow(action, place, ends_by_kill)
    for place in Place
    for action in Action
    for ends_by_kill in ((False, True) if action in (Action.HANG, Action.STOP) else (False,))
)


def survivable(blow: Blow, groups: int) -> bool:
    """Return whether a holder of the state is left: of two groups one heals, and the other must not die of serving."""
    dies = blow.action is Action.KILL or blow.ends_by_kill
    return groups > 2 or blow.place is not Place.SERVING or not dies


# The blows of every run of the tests: each place and each action, at some size.
SPREAD: Final = {
    "two": (
        Blow(Action.FAIL, Place.QUORUM),
        Blow(Action.KILL, Place.REDUCTION),
        Blow(Action.STOP, Place.FORWARD),
        Blow(Action.KILL, Place.WORD),
    ),
    "three": (
        Blow(Action.RAISE, Place.VOTE),
        Blow(Action.KILL, Place.SERVING),
        Blow(Action.HANG, Place.BACKWARD, ends_by_kill=True),
        Blow(Action.STOP, Place.WORD),
    ),
    "five": (
        Blow(Action.KILL, Place.CONFIGURE),
        Blow(Action.FAIL, Place.HEALING),
        Blow(Action.RAISE, Place.FORWARD),
    ),
    "two of two": (
        Blow(Action.KILL, Place.VOTE),
        Blow(Action.FAIL, Place.OPTIMIZER),
        Blow(Action.FAIL, Place.WORD),
        Blow(Action.STOP, Place.HEALING, ends_by_kill=True),
    ),
}


def strike(cluster: Cluster, turn: int, blow: Blow) -> None:
    """Strike the next group in a standing quorum, and wait until all commit together in one again."""
    # The first holder of the state serves it.
    group = cluster.groups[0 if blow.place is Place.SERVING else turn % len(cluster.groups)]
    rank = 0 if blow.place in OF_RANK_ZERO else len(group.trainers) - 1
    starts = {each.name: each.starts for each in cluster.groups}
    trainer = group.trainers[rank]
    details = {"hang_for": HANGS_FOR} if blow.action is Action.HANG and not blow.ends_by_kill else {}
    cluster.strike(group, rank, blow.action, blow.place, **details)
    if blow.action is Action.STOP or blow.ends_by_kill:
        if len(cluster.groups) > 2:  # one of two can't distinguish a hang from a network cut
            cluster.until_others_go_on(group)
        if blow.ends_by_kill:
            cluster.kill(trainer)
        else:
            process = psutil.Process(trainer.process.pid)
            cluster.until_stopped(process)
            process.resume()
    cluster.until_it_stands(after=cluster.step)
    others = [each for each in cluster.groups if each is not group]
    assert [each.starts for each in others] == [starts[each.name] for each in others], f"{blow}: {cluster.history()}"
    cluster.check_digests()


def test_the_spread_has_every_place_and_every_action() -> None:
    blows = [blow for some in SPREAD.values() for blow in some]
    assert {blow.place for blow in blows} == set(Place)
    assert {blow.action for blow in blows} == set(Action)


@pytest.mark.in_parts(always=["two"])
@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", CLUSTERS)
def test_a_spread_of_faults(spawn: Spawn, size: str) -> None:
    groups, ranks = CLUSTERS[size]
    blows = SPREAD[size]
    with training_together(spawn, groups=groups, ranks=ranks) as cluster:
        cluster.until_it_stands()
        for turn, blow in enumerate(blows):
            strike(cluster, turn, blow)
        losses = cluster.finish()
        assert len(set(losses)) == 1
        assert cluster.check_digests() > len(blows)


@pytest.mark.soak
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("size", CLUSTERS)
def test_every_fault_at_every_place(spawn: Spawn, size: str) -> None:
    groups, ranks = CLUSTERS[size]
    with training_together(spawn, groups=groups, ranks=ranks) as cluster:
        cluster.until_it_stands()
        for turn, blow in enumerate(blow for blow in EVERY_BLOW if survivable(blow, groups)):
            strike(cluster, turn, blow)
        losses = cluster.finish()
        assert len(set(losses)) == 1
