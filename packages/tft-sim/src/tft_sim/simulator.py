"""The simulator: a cluster, a seed, random faults, and constant checks of the invariants.

First, faults of every kind occur for a while. Then they stop, and all stopped processes go on. The job must then commit
a step within a bound, with all replicas in it. A seed determines the whole run, so a failure can be repeated:
`python -m tft_sim --seed 17 --trace`.

Law of this file: random choice, from one seed that is split per concern. So an additional fault does not change the
network's delays. Source: design.md sections 4 and 10.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps

from tft_coord.core.stragglers import StragglerAction, StragglerPolicy
from tft_coord.timeouts import Timeouts
from tft_sim.cluster import Cluster
from tft_sim.config import Chance, ClusterConfig, TrainerSettings
from tft_sim.invariants import InvariantError
from tft_sim.lighthouse_process import JOB
from tft_sim.link_faults import LinkFaults
from tft_sim.manager_process import Replica
from tft_sim.marks import Marks
from tft_sim.network import Fate, Rule
from tft_sim.process import Process, State

PAUSE_FIRST_MS = 5_000  # pause before an unreachable replica is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The length, size and severity of a simulation.

    Args:
        faults_ms: duration of the faults.
        fault_every_ms: bounds of the time between two faults.
        most_replicas: largest cluster.
        foreign: whether the lighthouse is torchft's. None: in one job of ten.
        standby: whether the cluster has a second lighthouse. None: in one job of ten.
        stragglers: replicas become slow for a while, and the lighthouse acts on it.
        links: whether links between members fail. None: in one job of eight.
        lost_state_ms: how long the lighthouse waits for a state whose holders fell silent. None: in one job of four
            longer than heartbeat_timeout.
        probes: whether manager servers answer probes. None: in nine jobs of ten. In the others they are older versions.
        speaks: trainers exchange a word at the end of each round. In most jobs quorums stand for a while. In some jobs
            trainers ask in every step. In some jobs one replica is an older version that speaks no word.
        syncs: whether trainers synchronize now and then. None: in one job of five.
        checks: whether states are compared now and then. None: in one job of five.
        verbose_lines: number of trace lines that a failure shows.
    """

    faults_ms: int = 12_000
    fault_every_ms: tuple[int, int] = (200, 2_500)
    most_replicas: int = 5
    foreign: bool | None = None
    standby: bool | None = None
    stragglers: bool = False
    links: bool | None = None
    probes: bool | None = None
    syncs: bool | None = None
    checks: bool | None = None
    lost_state_ms: int | None = None
    speaks: bool = False
    verbose_lines: int = 60


# Paces change most often here, and for long enough to be detected.
STRAGGLERS = SimulationConfig(
    stragglers=True, foreign=False, standby=False, faults_ms=30_000, fault_every_ms=(1_500, 12_000)
)

STANDING = SimulationConfig(speaks=True)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one seed.

    Args:
        seed: of the run.
        num_commits: of all ranks.
        calm_to_commit_ms: virtual time from the last fault to the first commit after it.
        calm_to_whole_ms: virtual time from the last fault until all replicas committed one step together.
        num_events: of the run.
        trace_digest: of every event and effect. Equal seeds give equal digests.
        marks: coverage marks that the run has hit.
    """

    seed: int
    num_commits: int
    calm_to_commit_ms: int
    calm_to_whole_ms: int
    num_events: int
    trace_digest: str
    marks: Marks = field(compare=False)


FOREIGN_SHARE = 0.1  # of the jobs run on torchft's lighthouse
STANDBY_SHARE = 0.1  # of the jobs have two lighthouses
LINKS_SHARE = 0.125  # of the jobs have bad links
LONG_WAIT_SHARE = 0.25  # of the jobs wait long for a state whose holders fell silent
WITHOUT_PROBES_SHARE = 0.1  # of the jobs have manager servers that answer no probes
TRIALS_SHARE = 0.5  # of the jobs with bad links have managers that try their peers
LOAD_ERRORS = 0.1  # of the loads on a rank of a group of several ranks fail
SYNCS_SHARE = 0.2  # of the jobs synchronize now and then
CHECKS_SHARE = 0.2  # of the jobs compare their states now and then
WEIGHTED_SHARE = 0.25  # of the jobs have weighted means
OVER_GROUP_SHARE = 0.125  # of the jobs transfer states over their process groups
OVERLAPS_SHARE = 0.5  # of the jobs compute while the quorum request is pending, in half of their steps
TAKE_ERRORS = 0.02  # of the calls of a function that gives a rank's state fail
TWIN = "twin"  # name of a replica that was started a second time under one replica id
STRANGER = "stranger"  # name of a replica that was started with other settings than the rest
TORCHFT = "torchft"  # name of a torchft group


class SimulationError(AssertionError):
    """A failed seed. The message shows how to repeat the run, and the last events."""

    def __init__(self, seed: int, cause: Exception, log: list[str], mode_flag: str = "") -> None:
        lines = "\n".join(log)
        super().__init__(
            f"seed {seed} failed: {cause}\nrun it again: python -m tft_sim --seed {seed} --trace{mode_flag}\n"
            f"the last events:\n{lines}"
        )
        self.seed = seed
        self.cause = cause


def commit_bound_ms(timeouts: Timeouts) -> int:
    """Return the bound of I6: a step commits within this time after the last fault.

    Within twice this time all replicas commit a step together. A trainer may just have entered a rendezvous, a transfer
    or a reduction that can't end, and a vote after it. Each of them ends by `timeout_ms`. Or a rank asks for its group
    while another rank does not. That ends by `quorum_timeout_ms`. Then the quorum waits in turn: for silent replicas
    until they are lost, for the state that they held for as long again, and for late replicas until `join_timeout_ms`.
    """
    stuck_ms = 2 * timeouts.timeout_ms + timeouts.quorum_timeout_ms
    return stuck_ms + 2 * timeouts.heartbeat_timeout_ms + timeouts.join_timeout_ms


def simulate(
    seed: int, config: SimulationConfig | None = None, *, on_line: Callable[[str], None] | None = None
) -> Report:
    """Run one seed.

    Args:
        seed: determines the whole run.
        config: length, size and severity.
        on_line: called with every line of the trace.
    Returns: the report of the run.
    Raises: SimulationError: an invariant broke, a core or the model raised, or a process ran in a livelock.
    """
    simulation = Simulation(seed, config or SimulationConfig(), on_line=on_line)
    try:
        return simulation.run()
    except Exception as error:  # the message must name the seed, whatever the error is
        mode_flag = " --stragglers" if config == STRAGGLERS else " --standing" if config == STANDING else ""
        raise SimulationError(seed, error, list(simulation.cluster.log), mode_flag) from error


def _both_directions(one: str, other: str, fate: Fate, low_ms: int = 0, high_ms: int = 0) -> list[Rule]:
    return [Rule(one, other, fate, low_ms, high_ms), Rule(other, one, fate, low_ms, high_ms)]


def _on_a_replica(fault: Callable[[Simulation, Replica], None]) -> Callable[[Simulation], None]:
    """Make a fault of one replica strike a random live replica, if there is one."""

    @wraps(fault)
    def strike(simulation: Simulation) -> None:
        simulation._with_random_replica(partial(fault, simulation))

    return strike


class Simulation:
    """The cluster and the faults of one seed."""

    def __init__(self, seed: int, config: SimulationConfig, *, on_line: Callable[[str], None] | None = None) -> None:
        self._seed = seed
        self._config = config
        self._faults = self._rng("faults")
        self._compiles = self._rng("compiles")
        self._loads = self._rng("loads")
        self._hangs = self._rng("hangs")
        workload = self._rng("workload")
        nonces = self._rng("nonces")
        words = self._rng("words")
        jitter = self._rng("jitter")
        groups = self._rng("groups")
        # These occur while faults fall, each in one job of eight: slow transfers, a process that is started twice, a
        # flapping link.
        rare = self._rng("rare")
        slow_chunk_ms = 1_400 if rare.random() < 0.125 else 120
        self._twin_after_ms = rare.randint(2_000, 9_000) if rare.random() < 0.125 else None
        self._flaps_always = rare.random() < 0.125
        self._rare = rare
        # Each in one job of eight: a replica with other settings comes, and a torchft member comes.
        others = self._rng("others")
        self._stranger_after_ms = others.randint(0, 9_000) if others.random() < 0.125 else None
        self._stranger_is_larger = others.random() < 0.5
        self._torchft_after_ms = others.randint(0, 9_000) if others.random() < 0.125 else None
        size = self._rng("size")
        num_replicas = size.randint(2, config.most_replicas)
        world_size = size.choice((1, 1, 1, 2, 2, 3))
        # One job in five continues from a checkpoint. One in four is synchronous. A few have spares.
        settings = TrainerSettings(
            use_async_quorum=size.random() < 0.75,
            init_sync=size.random() < 0.8,
            fixed_with_spares=size.random() < 0.15,
            min_replica_size=size.choice((1, 1, 2)),
            step=100 if size.random() < 0.2 else 0,
        )
        kind = self._rng("kind").random()
        foreign = kind < FOREIGN_SHARE if config.foreign is None else config.foreign
        # torchft's lighthouse knows no clusters, so with it there is one address.
        standby = not foreign and (kind > 1 - STANDBY_SHARE if config.standby is None else config.standby)
        if foreign or standby:
            # torchft's lighthouse has one job, of one kind, and compares nothing. Two lighthouses may each know another
            # replica.
            self._stranger_after_ms = self._torchft_after_ms = None
        # One job in five synchronizes now and then, with one or several syncs in flight. Such a job asks in the
        # background.
        syncs = self._rng("syncs")
        if syncs.random() < SYNCS_SHARE if config.syncs is None else config.syncs:
            fragments = syncs.choice((1, 2, 4))
            most_in_flight = min(fragments, syncs.choice((1, 2, 2, 3)))
            settings = replace(settings, use_async_quorum=True, num_fragments=fragments, most_in_flight=most_in_flight)
        # One job in five compares the states of its replicas, and one in four weights its means. In one of four the
        # groups of one rank decide by themselves.
        user = self._user = self._rng("user")
        checks = user.random() < CHECKS_SHARE if config.checks is None else config.checks
        settings = replace(
            settings,
            check_every=user.choice((1, 2, 3)) if checks else 0,
            heals_divergence=user.random() < 0.7,
            weighted=user.random() < WEIGHTED_SHARE,
            heals_over_group=self._rng("over group").random() < OVER_GROUP_SHARE,
            decides_alone=self._rng("alone").random() < 0.25,
        )
        overlaps = user.random() < OVERLAPS_SHARE
        # One job in ten has older manager servers, which answer no probes. One in two has all ranks of a group on one
        # host.
        silence = self._rng("silence")
        has_probes = silence.random() > WITHOUT_PROBES_SHARE if config.probes is None else config.probes
        ranks_together = silence.random() < 0.5
        waits_ms = silence.randint(3_000, 9_000) if silence.random() < LONG_WAIT_SHARE else 0
        links = self._rng("links")
        has_links = links.random() < LINKS_SHARE if config.links is None else config.links
        # One job in seven shares its lighthouse with another job. In half of the jobs that continue from a checkpoint,
        # each group has the checkpoint of its own run.
        other_job = self._rng("beside")
        num_others = max(other_job.randint(1, 2), settings.min_replica_size) if other_job.random() < 0.14 else 0
        self._separate_checkpoints = other_job.random() < 0.5
        cluster_config = ClusterConfig(
            names=tuple("abcdefgh"[:num_replicas]),
            other_names=() if foreign else ("p", "q")[:num_others],
            world_size=world_size,
            min_replicas=settings.min_replica_size,
            foreign=foreign,
            # In half of the jobs with bad links newcomers are tried first.
            trials=has_links and self._rng("trials").random() < TRIALS_SHARE,
            standby="ours" if standby else "",
            cluster_id="ours" if standby else "",
            trainers=settings,
            wall_start_ms=1_000_000_000,  # so that there is room to set the clock back
            lost_state_ms=waits_ms if config.lost_state_ms is None else config.lost_state_ms,
            probes=has_probes,
            ranks_together=ranks_together,
        )
        self._standing = self._rng("standing")
        self._without_words = ""  # a replica that speaks no word
        if config.speaks:
            cluster_config = self._configure_words(cluster_config)
        self._raising = self._calm = False
        self._paces = self._rng("paces")
        self._slower_ms: dict[str, int] = {}  # extra time of a replica's own part of a step, for a while
        if config.stragglers:
            cluster_config = replace(cluster_config, stragglers=self._straggler_policy())
        chance = Chance(
            network=self._rng("network"),
            extra=self._rng("extra"),
            jitter=jitter.random,
            nonces=lambda: nonces.getrandbits(64),
            words=lambda: words.getrandbits(64),
            step_ms=lambda name: workload.randint(50, 400) + self._compile_ms(name) + self._slower_ms.get(name, 0),
            spread_ms=lambda: groups.randint(1, 60),
            chunk_ms=lambda _: groups.randint(5, 120 if self._calm else slow_chunk_ms),
            optimizer_raises=self._optimizer_raises,
            take_raises=lambda _: not self._calm and self._loads.random() < TAKE_ERRORS,
            overlaps=lambda _: overlaps and workload.random() < 0.5,
            samples=lambda _: workload.randint(0, 63),
            load_raises=lambda _: "" if self._calm or self._loads.random() >= LOAD_ERRORS else "it raised",
        )
        self.cluster = Cluster(
            cluster_config, chance, on_end=self._ended, on_line=on_line, log_lines=config.verbose_lines
        )
        self._num_faults = 0
        # torchft's lighthouse knows no link reports.
        self._links = LinkFaults(self.cluster, links, lambda: self._calm) if has_links and not foreign else None

    def run(self) -> Report:
        """Run the seed to its end and return the report."""
        cluster, clock = self.cluster, self.cluster.clock
        for name in itertools.chain(*cluster.jobs.values()):
            clock.after(self._faults.randint(0, 1_500), partial(self._start, name))
        clock.after(self._faults.randint(1_000, 3_000), self._next_fault)
        if self._twin_after_ms is not None:
            clock.after(self._twin_after_ms, self._start_twin)
        if self._flaps_always:
            clock.after(2_000, self._flap_repeatedly)
        if self._stranger_after_ms is not None:
            clock.after(self._stranger_after_ms, self._start_stranger)
        if self._torchft_after_ms is not None:
            clock.after(self._torchft_after_ms, self._start_torchft)
        if self._config.stragglers:
            clock.after(self._paces.randint(1_000, 3_000), self._change_pace)
        if self._links is not None:
            self._links.begin()
        clock.run_until(self._config.faults_ms)
        to_commit_ms, to_whole_ms = self._check_progress()
        return Report(
            seed=self._seed,
            num_commits=sum(cluster.invariants_of(job).num_commits for job in cluster.jobs),
            calm_to_commit_ms=to_commit_ms,
            calm_to_whole_ms=to_whole_ms,
            num_events=clock.num_events,
            trace_digest=cluster.trace_digest,
            marks=cluster.marks,
        )

    def _configure_words(self, cluster: ClusterConfig) -> ClusterConfig:
        """Configure trainers to speak the word of a round. In one job of four they ask in every step all the same."""
        chance = self._standing
        timeouts = replace(cluster.timeouts, lease_ms=chance.choice((0, 2_500, 4_000, 8_000)))
        if chance.random() < 0.1:
            self._without_words = chance.choice(cluster.names)
        return replace(
            cluster,
            timeouts=timeouts,
            trainers=replace(cluster.trainers, speaks=True),
            durable=cluster.standby == "" and chance.random() < 0.3,
            slow_clocks=chance.random() < 0.2,
        )

    def _start(self, name: str, *, replaces: str = "", loading: bool = False) -> Replica:
        settings = self.cluster.config.trainers
        if self._separate_checkpoints and settings.step > 0:
            settings = replace(settings, run=f" by {name}")
        if name == self._without_words:
            settings = replace(settings, speaks=False)
        return self.cluster.start(name, settings=settings, replaces=replaces, loading=loading)

    def _rng(self, concern: str) -> random.Random:
        return random.Random(f"{self._seed}/{concern}")

    # --- I6 ---------------------------------------------------------------------------------------------------------

    def _check_progress(self) -> tuple[int, int]:
        cluster, clock = self.cluster, self.cluster.clock
        self._calm = True
        self._slower_ms.clear()
        cluster.trace("faults", "stop")
        cluster.network.clear()
        cluster.revive_lighthouse()
        if TWIN in cluster.replicas:
            cluster.shut_down(cluster.replicas[TWIN], "there are two of it")
        if STRANGER in cluster.replicas:
            cluster.shut_down(cluster.replicas[STRANGER], "it was a mistake")
        for stranger in cluster.torchft.values():
            cluster.end_process(stranger)
        cluster.unblock_reductions()
        for each in cluster.replicas.values():
            for trainer in each.trainers:
                trainer.wake()
                trainer.corrupts_once = False
        for process in [cluster.lighthouse, *(p for r in cluster.replicas.values() for p in r.processes())]:
            process.resume()
        if self._links is not None and self._links.leave_some_bad():
            self._check_progress_of_connected()
        cluster.links.mend()
        calm_ms = clock.now_ms
        bound_ms = commit_bound_ms(cluster.timeouts) + cluster.config.lost_state_ms
        if cluster.config.trainers.speaks:
            # Members that were cut off may still train. A replica that waits in their quorum has its lease.
            bound_ms += cluster.timeouts.silence_after_lease_ms(2 * cluster.timeouts.lease_ms)
        # R3: an unreachable replica is tried again after a pause, which is at most as long as its absence.
        pause_ms = self._links.lasted_ms() + PAUSE_FIRST_MS if self._links is not None else 0
        watched = [cluster.invariants_of(job) for job in cluster.jobs]
        before = [each.num_commits for each in watched]

        def all_commit() -> bool:
            return all(each.num_commits > num for each, num in zip(watched, before, strict=True))

        if cluster.config.foreign:
            # On torchft's lighthouse a leaving replica costs the others as much as a loss. A replica that was told to
            # leave during the faults leaves when its step ends, and that is the last fault.
            clock.run_until(calm_ms + bound_ms, lambda: all_commit() or not self._any_leaving())
        over_ms = clock.now_ms
        if not all_commit() and not clock.run_until(over_ms + bound_ms, all_commit):
            raise InvariantError("I6", f"no step within {bound_ms} ms after the last fault; {self._describe_state()}")
        to_commit_ms = clock.now_ms - calm_ms
        if not clock.run_until(over_ms + 2 * bound_ms + pause_ms, self._all_whole):
            raise InvariantError(
                "R3" if pause_ms else "I6",
                f"not all replicas train together {2 * bound_ms + pause_ms} ms after the last fault; "
                f"{self._describe_state()}",
            )
        return to_commit_ms, clock.now_ms - calm_ms

    def _check_progress_of_connected(self) -> None:
        """Check R1: while a few links stay bad and all else is healthy, the connected replicas make progress."""
        clock, watched = self.cluster.clock, self.cluster.invariants_of(JOB)
        bound_ms = commit_bound_ms(self.cluster.timeouts)
        before = watched.num_commits
        if not clock.run_until(clock.now_ms + bound_ms, lambda: watched.num_commits > before):
            bad = sorted(f"{one}-{other} {via.value}" for one, other, via in self.cluster.links.bad)
            raise InvariantError(
                "R1", f"no step within {bound_ms} ms while {', '.join(bad)} are bad; {self._describe_state()}"
            )

    def _any_leaving(self) -> bool:
        """Return whether a replica that was told to leave is still there."""
        trainers = itertools.chain(*(replica.trainers for replica in self._alive()))
        return any(trainer.asked_to_leave for trainer in trainers)

    def _all_whole(self) -> bool:
        """Return whether all groups of each job have committed the newest step in one quorum, and hold one state."""
        return all(self._is_whole(job, names) for job, names in self.cluster.jobs.items())

    def _is_whole(self, job: str, names: tuple[str, ...]) -> bool:
        replicas = [self.cluster.replicas.get(name) for name in names]
        if any(replica is None or not replica.alive for replica in replicas):
            return False
        trainers = [trainer for replica in replicas if replica is not None for trainer in replica.trainers]
        first = trainers[0]
        return (
            not any(each.left for each in trainers)
            and self.cluster.invariants_of(job).newest_commit == (first.step - 1, len(replicas))
            and len({(each.step, each.lineage) for each in trainers}) == 1
            and not any(each.torn for each in trainers)
        )

    def _describe_state(self) -> str:
        trainers = [
            f"{trainer.name} {trainer.phase} at step {trainer.step}"
            for replica in self.cluster.replicas.values()
            for trainer in replica.trainers
        ]
        lighthouse = self.cluster.lighthouse
        waits = [lighthouse.waiting_for(job) for job in self.cluster.jobs]
        return f"{'; '.join(trainers)}; the lighthouse waits: {waits}"

    # --- faults -----------------------------------------------------------------------------------------------------

    def _ended(self, replica: Replica) -> None:
        """Schedule the next life of a replica, as its supervisor does, with fresh or loaded state."""
        if replica.name in (TWIN, STRANGER):
            return
        delay_ms = self._faults.randint(300, 3_000)
        loading_ms = self._faults.randint(-6_000, 3_000)
        replaces = replica.replica_id if self._faults.random() < 0.3 else ""

        def again() -> None:
            self.cluster.marks.hit("a replica was started again")
            if self._calm or loading_ms < 0:
                self._start(replica.name, replaces=replaces)
                return
            self.cluster.marks.hit("a replica loaded for a while")
            new = self._start(replica.name, replaces=replaces, loading=True)
            for trainer in new.trainers:
                trainer.after(loading_ms, partial(self.cluster.train, trainer))

        self.cluster.clock.after(delay_ms, again)

    def _start_twin(self) -> None:
        """Start a group's processes a second time, elsewhere. The first ones live, or their host has just vanished."""
        alive = self._alive()
        if alive and not self._calm:
            first = self._rare.choice(alive)
            if self._rare.random() < 0.5:
                self.cluster.vanish(first)
            self.cluster.marks.hit("a process was started twice")
            self.cluster.start(TWIN, twin_of=first.name)

    def _start_stranger(self) -> None:
        """Start a replica with a setting or a world size that differs from the others'."""
        if self._calm:
            return
        if self._stranger_is_larger:
            self.cluster.marks.hit("a replica came with another world size")
            self.cluster.start(STRANGER, world_size=self.cluster.config.world_size + 1)
        else:
            settings = self.cluster.config.trainers
            other = replace(settings, use_async_quorum=not settings.use_async_quorum)
            self.cluster.marks.hit("a replica came with other settings")
            self.cluster.start(STRANGER, settings=other)

    def _start_torchft(self) -> None:
        """Start a torchft group on the same lighthouse."""
        if not self._calm:
            self.cluster.marks.hit("a member of torchft's came")
            self.cluster.start_torchft(TORCHFT)

    def _flap_repeatedly(self) -> None:
        """Break the link of the first group every two seconds, most often for longer than the grace."""
        replica = self.cluster.replicas.get(self.cluster.config.names[0])
        if self._calm:
            return
        if replica is not None and replica.alive:
            self._break(replica, self._rare.randint(200, 700))
        self.cluster.clock.after(2_000, self._flap_repeatedly)

    def _straggler_policy(self) -> StragglerPolicy:
        actions = (StragglerAction.LEAVE_OUT, StragglerAction.LEAVE_OUT, StragglerAction.WARN, StragglerAction.SHRINK)
        return StragglerPolicy(
            action=self._paces.choice(actions), patience_ms=1_500, first_pause_ms=1_000, longest_pause_ms=4_000
        )

    def _change_pace(self) -> None:
        """Make a replica slow, or let it keep up again."""
        if self._calm:
            return
        name = self._paces.choice(self.cluster.config.names)
        self._slower_ms[name] = self._paces.choice((0, 500, 1_500, 2_500))
        self.cluster.trace("paces", (name, self._slower_ms[name]))
        self.cluster.clock.after(self._paces.randint(500, 12_000), self._change_pace)

    def _compile_ms(self, name: str) -> int:
        """Return extra time for the first step: in a few lives it exceeds the limit of a step."""
        replica = self.cluster.replicas[name]
        first = all(trainer.num_requests == 1 for trainer in replica.trainers)
        if not first or self._calm or self._compiles.random() > 0.1:
            return 0
        return self.cluster.timeouts.slowest_step_ms + self._compiles.randint(0, 2_000)

    def _optimizer_raises(self, _name: str) -> bool:
        raises, self._raising = self._raising, False
        return raises

    def _next_fault(self) -> None:
        if self._calm:
            return
        self._num_faults += 1
        fault = self._faults.choice(FAULTS if not self._config.speaks else (*FAULTS, *STANDING_FAULTS))
        self.cluster.trace("fault", fault.__name__)
        self.cluster.marks.hit(f"fault: {fault.__name__.strip('_')}")
        fault(self)
        # Faults come in bursts, because the second fault most often breaks a protocol.
        low_ms, high_ms = self._config.fault_every_ms
        if self._faults.random() < 0.3:
            low_ms, high_ms = 1, 400
        self.cluster.clock.after(self._faults.randint(low_ms, high_ms), self._next_fault)

    def _random_replica(self) -> Replica | None:
        alive = self._alive()
        return self._faults.choice(alive) if alive else None

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.cluster.replicas.values() if replica.alive]

    def _with_random_replica(self, action: Callable[[Replica], None]) -> None:
        replica = self._random_replica()
        if replica is not None:
            action(replica)

    def _add_for_a_while(self, rules: list[Rule], low_ms: int, high_ms: int) -> None:
        for rule in rules:
            self.cluster.network.add(rule)
        duration_ms = self._faults.randint(low_ms, high_ms)

        def over() -> None:
            for rule in rules:
                self.cluster.network.remove(rule)

        self.cluster.clock.after(duration_ms, over)

    def _some_directions(self, one: str, other: str, fate: Fate) -> list[Rule]:
        """Return rules for both directions between two names, or for one of them."""
        rules = _both_directions(one, other, fate)
        return self._faults.choice((rules, rules[:1], rules[1:]))

    def _stop(self, processes: list[Process], low_ms: int, high_ms: int) -> None:
        for process in processes:
            process.stop()
            self.cluster.clock.after(self._faults.randint(low_ms, high_ms), process.resume)

    # Each fault is a method below. FAULTS gives its frequency.

    def _kill_rank_0(self) -> None:
        self._with_random_replica(lambda replica: self.cluster.kill_trainer(replica, 0))

    @_on_a_replica
    def _kill_some_rank(self, replica: Replica) -> None:
        """Kill one rank of a group of several ranks, alone on its own host."""
        self.cluster.kill_trainer(replica, self._faults.randrange(len(replica.trainers)))

    @_on_a_replica
    def _vanish_rank(self, replica: Replica) -> None:
        """Remove the host of one rank, but keep the host of rank 0 and its manager server."""
        if len(replica.trainers) > 1:
            self.cluster.vanish_rank(replica, self._faults.randrange(1, len(replica.trainers)))

    def _vanish(self) -> None:
        self._with_random_replica(self.cluster.vanish)

    def _kill_manager(self) -> None:
        self._with_random_replica(self.cluster.kill_manager)

    def _stop_trainer(self) -> None:
        self._with_random_replica(lambda replica: self._stop([self._faults.choice(replica.trainers)], 100, 9_000))

    @_on_a_replica
    def _stop_manager(self, replica: Replica) -> None:
        if replica.manager is not None:
            self._stop([replica.manager], 100, 5_000)

    def _stop_group(self) -> None:
        self._with_random_replica(lambda replica: self._stop(replica.processes(), 2_500, 2_500))

    def _stop_lighthouse(self) -> None:
        self._stop([self.cluster.lighthouse], 100, 6_000)

    def _blink(self) -> None:
        """Break one stream, which is redialed at once."""
        self._with_random_replica(lambda replica: self._break(replica, 0))

    def _break_for_long(self) -> None:
        """Break one stream, and let dials fail for longer than the grace."""
        self._with_random_replica(lambda replica: self._break(replica, self._faults.randint(350, 1_500)))

    def _break(self, replica: Replica, for_ms: int) -> None:
        pattern = f"{replica.replica_id}/manager*"
        if for_ms:
            self._add_for_a_while(_both_directions(pattern, "lighthouse", Fate.DROP), for_ms, for_ms)
        self.cluster.network.break_streams(pattern, "lighthouse")

    @_on_a_replica
    def _half_open(self, replica: Replica) -> None:
        """Break one stream, and tell the lighthouse only when the next one is established."""
        late_ms = self._faults.randint(100, 1_000)
        pattern = f"{replica.replica_id}/manager*"
        self.cluster.network.break_streams(pattern, "lighthouse", server_late_ms=late_ms)

    def _blink_all(self) -> None:
        """Break all streams at once, as a faulty network does."""
        if self._faults.random() < 0.5:
            self._add_for_a_while([Rule("*", "lighthouse", Fate.DROP)], 50, 1_200)
        self.cluster.network.break_streams("*/manager*", "lighthouse")

    @_on_a_replica
    def _cut(self, replica: Replica) -> None:
        """Cut the cable between a manager server and the lighthouse, in both directions or in one."""
        rules = self._some_directions(f"{replica.replica_id}/manager*", "lighthouse", Fate.PARTITION)
        self._add_for_a_while(rules, 100, 5_000)

    def _slow(self) -> None:
        """Delay messages from and to one process or all."""
        name = self._faults.choice(["*", *(replica.replica_id + "/*" for replica in self.cluster.replicas.values())])
        high_ms = self._faults.choice((50, 200, 800))
        rules = _both_directions(name, "*", Fate.DELAY, 1, high_ms)
        self._add_for_a_while(rules, 300, 3_000)

    @_on_a_replica
    def _lose_calls(self, replica: Replica) -> None:
        """Lose calls and answers between a rank and its manager server for a moment."""
        rules = self._some_directions(f"{replica.replica_id}/?", f"{replica.replica_id}/manager*", Fate.DROP)
        self._add_for_a_while(rules, 20, 1_500)

    @_on_a_replica
    def _break_rank_stream(self, replica: Replica) -> None:
        rank = self._faults.choice(replica.trainers).name
        if self._faults.random() < 0.3:
            self._add_for_a_while([Rule(rank, "*", Fate.DROP)], 350, 800)
        self.cluster.network.break_streams(rank, "*")

    @_on_a_replica
    def _swallow_answers(self, replica: Replica) -> None:
        """Lose the lighthouse's messages to one group for a moment, and then its stream."""
        pattern = f"{replica.replica_id}/manager*"
        rule = self.cluster.network.add(Rule("lighthouse", pattern, Fate.HOLD))

        def sink() -> None:
            self.cluster.network.break_streams(pattern, "lighthouse")
            self.cluster.network.remove(rule)

        self.cluster.clock.after(self._faults.randint(10, 700), sink)

    @_on_a_replica
    def _delay_notices(self, replica: Replica) -> None:
        """Delay all messages of the lighthouse to one group, on a stream that stays open."""
        self._add_for_a_while([Rule("lighthouse", f"{replica.replica_id}/manager*", Fate.HOLD)], 20, 1_500)

    def _disturb_a_notice(self) -> None:
        """Kill a group, and disturb at that moment the notice to another group."""
        alive = self._alive()
        if len(alive) < 2:
            return
        victim, other = self._faults.sample(alive, 2)
        host, manager = f"{other.replica_id}/?", f"{other.replica_id}/manager*"
        dropped, late = self._faults.randint(20, 250), self._faults.randint(50, 1_500)
        ways: tuple[Callable[[], None], ...] = (
            lambda: self._drop_streams(host, manager, dropped),
            lambda: self._drop_streams(manager, "lighthouse", dropped),
            lambda: self._add_for_a_while([Rule(manager, host, Fate.LAG, late, late)], late, late),
            lambda: self._add_for_a_while([Rule(manager, host, Fate.REORDER, 20, 400)], late, late),
            lambda: self._add_for_a_while([Rule("lighthouse", manager, Fate.HOLD)], late, late),
        )
        self._faults.choice(ways)()
        self.cluster.clock.after(self._faults.randint(0, 300), partial(self._kill_if_alive, victim, 0))

    def _drop_streams(self, source: str, target: str, for_ms: int) -> None:
        self._add_for_a_while([Rule(source, target, Fate.DROP)], for_ms, for_ms)
        self.cluster.network.break_streams(source, target)

    def _flap(self) -> None:
        """Break one link every two seconds, each time for a different duration."""
        self._with_random_replica(lambda replica: self._flap_again(replica, 5))

    def _flap_again(self, replica: Replica, times: int) -> None:
        if self._calm or not replica.alive or times == 0:
            return
        self._break(replica, self._faults.choice((0, 200, 400, 600)))
        self.cluster.clock.after(2_000, lambda: self._flap_again(replica, times - 1))

    @_on_a_replica
    def _cut_rank(self, replica: Replica) -> None:
        """Cut off a rank from its manager server, in both directions or in one."""
        rank, manager = self._faults.choice(replica.trainers).name, f"{replica.replica_id}/manager*"
        self._add_for_a_while(self._some_directions(rank, manager, Fate.PARTITION), 100, 5_000)

    @_on_a_replica
    def _cut_host(self, replica: Replica) -> None:
        """Cut off a group's host from all others, process group traffic included. Inside the host all is well."""
        host = f"{replica.replica_id}/*"
        rules = self._some_directions(host, "*", Fate.PARTITION)
        self._add_for_a_while([*rules, Rule(host, host, Fate.PASS)], 100, 6_000)

    def _cut_in_two(self) -> None:
        """Cut some groups off from the others, in both directions or in one. The lighthouse reaches all."""
        alive = [replica.replica_id for replica in self._alive()]
        self._faults.shuffle(alive)
        half = self._faults.randint(1, max(1, len(alive) - 1))
        pairs = [(f"{one}/*", f"{other}/*") for one in alive[:half] for other in alive[half:]]
        rules = [Rule(one, other, Fate.PARTITION) for one, other in pairs]
        if self._faults.random() < 0.5:
            rules += [Rule(other, one, Fate.PARTITION) for one, other in pairs]
        self._add_for_a_while(rules, 100, 6_000)

    def _duplicate_calls(self) -> None:
        """Duplicate calls and answers between ranks and manager servers."""
        self._on_calls(Fate.DUPLICATE, self._faults.choice((5, 300)))

    def _reorder_calls(self) -> None:
        """Reorder calls and answers between ranks and manager servers."""
        self._on_calls(Fate.REORDER, self._faults.choice((20, 300)))
        self._give_up()  # the withdrawal of a request may come before the request

    def _on_calls(self, fate: Fate, high_ms: int) -> None:
        rules = _both_directions("*/?", "*/manager*", fate, 1, high_ms)
        self._add_for_a_while(rules, 300, 3_000)

    def _stop_ranks(self) -> None:
        """Stop all ranks of a group, but not its manager server."""
        self._with_random_replica(lambda replica: self._stop(list(replica.trainers), 100, 5_000))

    def _set_clock(self) -> None:
        """Set the wall clock back or forward, a little or a lot. Quorum ids and sessions depend on it."""
        jump_ms = self._faults.choice((-600_000, -3_000, -200, 200, 3_000, 600_000))
        if self.cluster.standby is not None:
            return  # the clocks of the two lighthouses decide which is newer
        self.cluster.wall_offset_ms += jump_ms
        if self._faults.random() < 0.5:
            self._restart_lighthouse()

    def _restart_lighthouse(self) -> None:
        for replica in self.cluster.replicas.values():
            for trainer in replica.trainers if replica.alive else ():
                if trainer.phase == "quorum" and trainer.held is None:
                    self.cluster.marks.hit("the lighthouse died while somebody joined")
                if trainer.phase == "heal":
                    self.cluster.marks.hit("the lighthouse died while somebody healed")
                if trainer.asked_to_leave and not trainer.left:
                    self.cluster.marks.hit("the lighthouse died while somebody was about to leave")
                if trainer.left:
                    self.cluster.marks.hit("the lighthouse died while one that has left served")
                if trainer.hangs or (trainer.state is State.STOPPED and trainer.phase == "forward"):
                    self.cluster.marks.hit("the lighthouse died while a trainer hung")
        self.cluster.restart_lighthouse(self._faults.choice((0, 50, 500, 3_000)))

    @_on_a_replica
    def _give_up(self, replica: Replica) -> None:
        """Make some ranks give up their next request early."""
        for trainer in replica.trainers:
            trainer.gives_up_after_ms = self._faults.randint(1, 300)

    def _raise_in_optimizer(self) -> None:
        self._raising = True

    @_on_a_replica
    def _be_late(self, replica: Replica) -> None:
        """Make a group slow between two steps, once."""
        late_ms = self._faults.randint(500, 7_000)
        for trainer in replica.trainers:
            trainer.late_ms = late_ms

    @_on_a_replica
    def _hang(self, replica: Replica) -> None:
        """Make a rank hang in its forward pass or its optimizer, once, for a while."""
        trainer = self._faults.choice(replica.trainers)
        trainer.will_hang = "optimizer" if self._hangs.random() < 0.3 else "forward"
        self.cluster.clock.after(self._faults.randint(1_000, 9_000), trainer.wake)

    @_on_a_replica
    def _hold_lock(self, replica: Replica) -> None:
        """Hold a rank's interpreter lock for longer than a step may take: the rank neither speaks nor hears."""
        trainer = self._faults.choice(replica.trainers)
        trainer.hold_lock()
        self.cluster.clock.after(self._faults.randint(3_000, 9_000), trainer.resume)

    def _stick(self) -> None:
        """Let no reduction of the newest quorum end."""
        self.cluster.block_reductions()

    @_on_a_replica
    def _fail(self, replica: Replica) -> None:
        """Give a rank an error of its own in a step."""
        self._faults.choice(replica.trainers).fails_once = True

    def _report_error(self) -> None:
        """Let the user of a rank report an error, in any phase of the rank."""
        self._with_random_replica(lambda replica: self._user.choice(replica.trainers).report_error())

    @_on_a_replica
    def _register_state(self, replica: Replica) -> None:
        """Let the user register a piece of state, in any phase of the ranks."""
        for trainer in replica.trainers:
            trainer.register_state()

    def _go_astray(self) -> None:
        """Corrupt the memory of a rank before the next comparison of states."""
        if self.cluster.config.trainers.check_every:
            self._with_random_replica(self._corrupt_a_rank)

    def _corrupt_a_rank(self, replica: Replica) -> None:
        self._user.choice(replica.trainers).corrupts_once = True

    @_on_a_replica
    def _break_off(self, replica: Replica) -> None:
        """End the strategies of a group, which are then entered again."""
        for trainer in replica.trainers:
            trainer.restarts_strategy = True

    @_on_a_replica
    def _save(self, replica: Replica) -> None:
        """Save the states of a group's ranks in a durable checkpoint, and load them a while later."""
        for trainer in replica.trainers:
            trainer.save_once = True

    def _abort(self) -> None:
        """Abort a rank's process group, in any phase of the rank."""
        self._with_random_replica(lambda replica: self._faults.choice(replica.trainers).leave_group())

    @_on_a_replica
    def _load_by_hand(self, replica: Replica) -> None:
        """Load a state into a group: an older one, one of this step, or one far ahead."""
        step = max(0, replica.trainers[0].step + self._faults.choice((-3, 0, 0, 1_000)))
        inside = not self.cluster.config.trainers.num_fragments and self._user.random() < 0.3
        for trainer in replica.trainers:
            trainer.loads_step, trainer.loads_inside = step, inside

    @_on_a_replica
    def _leave(self, replica: Replica) -> None:
        """Tell a group to leave: one rank of it, or all ranks at different moments."""
        chosen = replica.trainers if self._faults.random() < 0.7 else [self._faults.choice(replica.trainers)]
        # The loop of a group of one rank may end before its next step.
        alone = len(replica.trainers) == 1 and not self.cluster.config.trainers.num_fragments
        for trainer in chosen:
            trainer.ends_early = alone and self._user.random() < 0.3
            trainer.after(self._faults.randint(0, 600), trainer.leave)

    def _drain(self) -> None:
        """Ask the lighthouse to let a group leave, as an operator does."""
        if self.cluster.lighthouse.alive and not self.cluster.config.foreign:
            self._with_random_replica(lambda replica: self.cluster.drain(replica.name))

    @_on_a_replica
    def _leave_and_die(self, replica: Replica) -> None:
        """Tell a group to leave, and kill one of its ranks a little later, perhaps while it serves."""
        for trainer in replica.trainers:
            trainer.leave()
        rank = self._faults.randrange(len(replica.trainers))
        die = partial(self._kill_if_alive, replica, rank)
        self.cluster.clock.after(self._faults.randint(1, 2_500), die)

    def _kill_if_alive(self, replica: Replica, rank: int) -> None:
        if replica.alive:
            self.cluster.kill_trainer(replica, rank)

    def _leave_the_newcomers(self) -> None:
        """Tell all groups to leave except the healing ones, so that the only source leaves."""
        for replica in self.cluster.replicas.values():
            if replica.alive and not any(each.phase == "heal" for each in replica.trainers):
                for trainer in replica.trainers:
                    trainer.after(self._faults.randint(0, 300), trainer.leave)

    def _lose_words(self) -> None:
        """Lose the words of rounds between two replicas for a while."""
        alive = sorted(replica.name for replica in self._alive())
        if len(alive) > 1:
            one, other = self._standing.sample(alive, 2)
            self.cluster.links.cut_word(one, other)
            after_ms = self._standing.randint(200, 4_000)
            self.cluster.clock.after(after_ms, lambda: self.cluster.links.mend_word(one, other))

    def _lose_the_lighthouse(self) -> None:
        """Cut one or all replicas off from the lighthouse for a while."""
        name = self._standing.choice(("*", *(each.replica_id for each in self.cluster.replicas.values())))
        pattern = f"{name}/manager*"
        self._add_for_a_while(_both_directions(pattern, "lighthouse", Fate.PARTITION), 1_000, 9_000)

    def _restart_out_of_reach(self) -> None:
        """Restart the lighthouse while only a replica that restarts too can reach it."""
        alive = self._alive()
        if len(alive) > 1:
            self.cluster.kill_trainer(self._standing.choice(alive), 0)
            for replica in alive:
                pattern = f"{replica.replica_id}/manager*"
                self._add_for_a_while(
                    _both_directions(pattern, "lighthouse", Fate.PARTITION),
                    4_000,
                    9_000,
                )
            self.cluster.restart_lighthouse(0)

    def _die_in_a_word(self) -> None:
        """Kill a replica while the words of a round are on their way, if there is such a round."""
        speaking = [each for each in self.cluster.replicas.values() if any(t.phase == "word" for t in each.trainers)]
        if speaking:
            self.cluster.kill_trainer(self._standing.choice(speaking), 0)

    @_on_a_replica
    def _shrink_only(self, replica: Replica) -> None:
        """Set shrink_only for a group for a while."""
        for trainer in replica.trainers:
            trainer.shrink_only = True
            trainer.after(self._faults.randint(500, 3_000), partial(setattr, trainer, "shrink_only", False))


FAULTS: tuple[Callable[[Simulation], None], ...] = (
    *[Simulation._kill_rank_0] * 2,
    *[Simulation._kill_some_rank] * 2,
    Simulation._vanish,
    Simulation._vanish_rank,
    Simulation._set_clock,
    Simulation._kill_manager,
    *[Simulation._stop_trainer] * 2,
    Simulation._stop_manager,
    Simulation._stop_group,
    Simulation._stop_lighthouse,
    *[Simulation._blink] * 2,
    Simulation._break_for_long,
    Simulation._half_open,
    Simulation._blink_all,
    *[Simulation._cut] * 2,
    *[Simulation._slow] * 2,
    *[Simulation._lose_calls] * 2,
    Simulation._break_rank_stream,
    *[Simulation._swallow_answers] * 2,
    Simulation._delay_notices,
    *[Simulation._disturb_a_notice] * 2,
    Simulation._flap,
    Simulation._cut_rank,
    *[Simulation._cut_host] * 2,
    Simulation._cut_in_two,
    Simulation._duplicate_calls,
    Simulation._reorder_calls,
    Simulation._stop_ranks,
    *[Simulation._restart_lighthouse] * 2,
    Simulation._give_up,
    Simulation._raise_in_optimizer,
    *[Simulation._be_late] * 2,
    Simulation._hang,
    Simulation._hold_lock,
    Simulation._stick,
    Simulation._fail,
    Simulation._report_error,
    Simulation._register_state,
    Simulation._go_astray,
    Simulation._break_off,
    Simulation._save,
    Simulation._abort,
    Simulation._load_by_hand,
    Simulation._shrink_only,
    *[Simulation._leave] * 2,
    Simulation._drain,
    Simulation._leave_and_die,
    Simulation._leave_the_newcomers,
)
STANDING_FAULTS: tuple[Callable[[Simulation], None], ...] = (
    *[Simulation._lose_words] * 3,
    *[Simulation._lose_the_lighthouse] * 2,
    *[Simulation._die_in_a_word] * 3,
    Simulation._restart_out_of_reach,
    *[Simulation._be_late] * 2,
)
FAULT_NAMES: tuple[str, ...] = tuple(dict.fromkeys(f"fault: {fault.__name__.strip('_')}" for fault in FAULTS))
