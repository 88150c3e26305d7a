"""DiLoCo, and a fault in each phase of a sync, with one sync in flight and with two.

Three replicas train a small model together. One after the other is struck: at the start of a sync, in flight, at its
end. No sync commits on a failed reduction (the trainers check this). Replicas that commit the same sync have the same
global weights and outer state. A newcomer has them after its first sync.
"""

from __future__ import annotations

from typing import Final

import pytest

from integration_tests import syncs
from integration_tests.conftest import Spawn
from integration_tests.language_model import Cluster, Event, ReplicaGroup, training_together
from integration_tests.syncs import Syncs
from integration_tests.test_faults_at_every_phase import Blow, strike, survivable
from tft_algos.testing import Action, Place

REPLICAS: Final = 3
KINDS: Final = {
    "one in flight": Syncs(fragments=2, sync_every=4, delay=1),
    "two in flight": Syncs(fragments=4, sync_every=8, delay=3),
    "without delay": Syncs(fragments=1, sync_every=2),
}
# The phase of a sync at each place: it begins, it is in flight, it ends, its state travels.
PHASES: Final = {
    "begins": (Place.QUORUM, Place.CONFIGURE, Place.REDUCTION),
    "is in flight": (Place.FORWARD, Place.BACKWARD),
    "ends": (Place.VOTE, Place.OPTIMIZER),
    "travels": (Place.SERVING, Place.HEALING),
}
BLOWS: Final = (
    *(Blow(action, place) for places in PHASES.values() for place in places for action in (Action.FAIL, Action.KILL)),
    *(Blow(Action.HANG, place) for places in PHASES.values() for place in places),
    *(Blow(Action.HANG, place, ends_by_kill=True) for places in PHASES.values() for place in places),
    Blow(Action.RAISE, Place.OPTIMIZER),
)
# The blows of every run of the tests: each phase and each action.
SPREAD: Final = {
    "one in flight": (
        Blow(Action.FAIL, Place.REDUCTION),
        Blow(Action.KILL, Place.VOTE),
        Blow(Action.HANG, Place.BACKWARD),
        Blow(Action.FAIL, Place.OPTIMIZER),
    ),
    "two in flight": (
        Blow(Action.KILL, Place.REDUCTION),
        Blow(Action.FAIL, Place.VOTE),
        Blow(Action.HANG, Place.REDUCTION),
        Blow(Action.KILL, Place.FORWARD),
        Blow(Action.KILL, Place.SERVING),
    ),
    "without delay": (Blow(Action.KILL, Place.QUORUM), Blow(Action.FAIL, Place.HEALING)),
}
# The last rank of a group is struck, and at the vote the first.
IN_GROUPS_OF_TWO: Final = (
    Blow(Action.KILL, Place.REDUCTION),
    Blow(Action.KILL, Place.VOTE),
)


def check_newcomers(cluster: Cluster) -> None:
    """Check that a newcomer's first committed sync was committed by another too, with the same result."""
    for group in cluster.groups:
        others = [event for each in cluster.groups if each is not group for event in commits_of(each)]
        for _, newcomer in group.all_trainers[len(group.trainers) :]:
            first = next(event for event in newcomer.events if event.kind == "commit")
            equal = {event.digest for event in others if (event.step, event.lineage) == (first.step, first.lineage)}
            assert equal == {first.digest}, (
                f"{group.name}, process {newcomer.process.pid}: {first}; {cluster.history()}"
            )


def commits_of(group: ReplicaGroup) -> list[Event]:
    """Return all commits that the group's processes reported."""
    return [event for _, trainer in group.all_trainers for event in trainer.events if event.kind == "commit"]


def strike_all(spawn: Spawn, kind: str, blows: tuple[Blow, ...], *, groups: int = REPLICAS, ranks: int = 1) -> None:
    with training_together(spawn, groups=groups, ranks=ranks, trainer=syncs.train, details=KINDS[kind]) as cluster:
        for turn, blow in enumerate(blows):
            strike(cluster, turn, blow)
        cluster.finish()
        assert cluster.check_digests() > len(blows)
        check_newcomers(cluster)


def test_the_kinds_are_what_they_are_called() -> None:
    assert [kind.in_flight for kind in KINDS.values()] == [1, 2, 1]


def test_the_spread_has_every_phase_and_every_action() -> None:
    blows = [blow for some in SPREAD.values() for blow in some]
    assert all(any(blow.place in places for blow in blows) for places in PHASES.values())
    assert {blow.action for blow in blows} == {Action.FAIL, Action.KILL, Action.HANG}


@pytest.mark.in_parts
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_spread_of_faults(spawn: Spawn, kind: str) -> None:
    strike_all(spawn, kind, SPREAD[kind])


@pytest.mark.in_parts
@pytest.mark.timeout(150)
def test_ranks_die_where_groups_of_two_have_two_syncs_in_flight(spawn: Spawn) -> None:
    """A group is restarted and heals whole. The other one goes on, both ranks alike."""
    strike_all(spawn, "two in flight", IN_GROUPS_OF_TWO, groups=2, ranks=2)


@pytest.mark.soak
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_in_every_phase(spawn: Spawn, kind: str) -> None:
    strike_all(spawn, kind, BLOWS)


@pytest.mark.soak
@pytest.mark.timeout(1_200)
def test_every_fault_in_groups_of_two_with_two_syncs_in_flight(spawn: Spawn) -> None:
    blows = tuple(blow for blow in BLOWS if survivable(blow, groups=2))
    strike_all(spawn, "two in flight", blows, groups=2, ranks=2)
