"""The parts and settings of a simulated cluster, and its random or scripted values.

Law of this file: values only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tft_coord.core.fingerprint import Fingerprint, fingerprint_of
from tft_coord.core.stragglers import StragglerAction, StragglerPolicy
from tft_coord.timeouts import Timeouts

SHORT_TIMEOUTS = Timeouts(
    timeout_ms=6_000,
    quorum_timeout_ms=8_000,
    connect_timeout_ms=6_000,
    heartbeat_timeout_ms=2_000,
    join_timeout_ms=3_000,
    heal_timeout_ms=12_000,
    beat_interval_ms=500,
    slowest_step_ms=3_000,
)
NO_STRAGGLERS = StragglerPolicy(action=StragglerAction.OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of a job's trainers, equal for all of them.

    Args:
        use_async_quorum, init_sync, fixed_with_spares, min_replica_size: as in Member.
        step: initial step. More than 0 means a state loaded from outside.
        run: the run that the state was loaded from. Other runs have other weights.
        num_fragments: number of model fragments that are synchronized now and then. 0: gradients are reduced in every
            step.
        most_in_flight: maximum number of concurrent syncs.
        check_every: committed steps between two comparisons of the states. 0: none.
        heals_divergence: a replica whose state differs recovers once before it stops.
        weighted: means are weighted by the samples of each replica.
        speaks: trainers exchange a word at the end of each round. The job's `lease_ms` limits how long they go on
            without a request.
        heals_over_group: states travel over the process group of a quorum, and a transfer ends with it.
        decides_alone: a group of one rank decides its votes by itself while its quorum has other members, as the
            product does. Otherwise it votes through its manager server, as larger groups do.
    """

    speaks: bool = False

    use_async_quorum: bool = True
    init_sync: bool = True
    fixed_with_spares: bool = False
    min_replica_size: int = 1
    step: int = 0
    run: str = ""
    num_fragments: int = 0
    most_in_flight: int = 1
    check_every: int = 0
    heals_divergence: bool = True
    weighted: bool = False
    heals_over_group: bool = False
    decides_alone: bool = False

    def fingerprint(self, world_size: int) -> Fingerprint:
        """Return the rank's fingerprint."""
        return fingerprint_of(
            {
                "group world size": str(world_size),
                "use_async_quorum": str(self.use_async_quorum),
                "world_size_mode": "FIXED_WITH_SPARES" if self.fixed_with_spares else "DYNAMIC",
                "min_replica_size": str(self.min_replica_size),
                "init_sync": str(self.init_sync),
                "fragments": f"{self.num_fragments}, syncs in flight {self.most_in_flight}",
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The parts and settings of a simulated cluster.

    Args:
        names: of the replica groups.
        other_names: replica groups of another job, with the same settings, on the same lighthouse.
        world_size: ranks in each replica group.
        min_replicas: of the lighthouse.
        foreign: the lighthouse is torchft's.
        trials: manager servers try their peers on request.
        cluster_id: of the lighthouse. "": each life has its own.
        standby: cluster id of a lighthouse at a second address, `lighthouse2`. "": there is none.
        timeouts: of all processes. They are shorter than in production, so that fewer events happen during waits.
        stragglers: the lighthouse's policy on a replica that slows the others down.
        trainers: settings of the job.
        wall_start_ms: wall clock at the start of virtual time.
        delay_ms: bounds of a message's delay.
        lost_state_ms: `lost_state_timeout_ms` of the lighthouse.
        probes: manager servers answer probes and report long waits. False: they are older versions, which do not.
        ranks_together: all ranks of a group run on its manager server's host. False: only rank 0 does.
        durable: a restarted lighthouse knows that there was an earlier one.
        slow_clocks: by the clocks of the trainers leases last one percent longer than by the lighthouse's clock.
        budget_events: after this many events the run fails as a livelock.
    """

    names: tuple[str, ...] = ("a", "b", "c")
    other_names: tuple[str, ...] = ()
    world_size: int = 1
    min_replicas: int = 1
    foreign: bool = False
    trials: bool = False
    cluster_id: str = ""
    standby: str = ""
    timeouts: Timeouts = SHORT_TIMEOUTS
    stragglers: StragglerPolicy = NO_STRAGGLERS
    trainers: TrainerSettings = TrainerSettings()  # frozen
    wall_start_ms: int = 1_000_000
    delay_ms: tuple[int, int] = (1, 5)
    lost_state_ms: int = 0
    probes: bool = True
    ranks_together: bool = False
    durable: bool = False
    slow_clocks: bool = False
    budget_events: int = 400_000


def _steady_step_ms(_name: str) -> int:
    return 200


@dataclass(slots=True, kw_only=True)
class Chance:
    """The values that are random, or fixed by a script.

    Args:
        network: source of delays.
        extra: source of the delays of probes, their answers, and reports of long waits.
        jitter: returns a number in [0, 1), which spreads redials.
        nonces: random 64-bit numbers of the lighthouse.
        words: random 64-bit numbers of the replica groups.
        step_ms: duration of a replica's forward and backward.
        spread_ms: time after which a member learns that a reduction is complete.
        chunk_ms: duration of one chunk of a transfer, by the name of the fetching rank.
        optimizer_raises: whether a rank's optimizer raises after this commit.
        load_raises: error of a function that loads fetched state, by the rank's name. "": it succeeds.
        take_raises: whether a function that returns a rank's state raises, by the rank's name.
        overlaps: whether a rank's forward pass runs while its quorum request is pending.
        samples: number of samples that a replica has seen in a step.
    """

    network: random.Random = field(default_factory=lambda: random.Random("network"))
    extra: random.Random = field(default_factory=lambda: random.Random("extra"))
    jitter: Callable[[], float] = lambda: 0.5
    nonces: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)
    words: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)
    step_ms: Callable[[str], int] = _steady_step_ms
    spread_ms: Callable[[], int] = lambda: 1
    chunk_ms: Callable[[str], int] = lambda _: 20
    optimizer_raises: Callable[[str], bool] = lambda _: False
    load_raises: Callable[[str], str] = lambda _: ""
    take_raises: Callable[[str], bool] = lambda _: False
    overlaps: Callable[[str], bool] = lambda _: False
    samples: Callable[[str], int] = lambda _: 1
