"""Standing quorums in whole rounds: random seeds, quiet jobs that newcomers join, and mutants of whole rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tft_coord.core import effects, events
from tft_coord.core.commit import Votes
from tft_coord.core.lighthouse import Job
from tft_coord.core.living_quorum import LivingQuorum
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.standing import Lease, StandingQuorum, Vote
from tft_coord.core.step import effects as do
from tft_coord.core.types import QuorumKey, QuorumNews
from tft_coord.timeouts import Timeouts
from tft_sim import STANDING_MARKS, InvariantError, SimulationError, play, run_many, simulate
from tft_sim.cluster import Cluster
from tft_sim.config import SHORT_TIMEOUTS, Chance, ClusterConfig, TrainerSettings
from tft_sim.ending import Ending
from tft_sim.rank import Rank
from tft_sim.scenario import ScenarioError
from tft_sim.simulator import STANDING
from tft_sim.speaking import Speaking
from tft_sim.surroundings import Outside
from tft_sim.waiting import Life

SEEDS = range(100)  # the rarest scenario is first reached by seed 52
TRANSCRIPTS = Path(__file__).parent / "transcripts"


@pytest.mark.timeout(400)
def test_random_seeds_keep_the_invariants_and_reach_every_scenario() -> None:
    marks = run_many(SEEDS, processes=2, config=STANDING)
    missing = {number: marks.missing(names) for number, names in STANDING_MARKS.items() if marks.missing(names)}
    assert missing == {}, f"\n{marks}"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_seeds(request: pytest.FixtureRequest) -> None:
    num_seeds = request.config.getoption("--simulator-seeds", default=20_000)
    run_many(range(SEEDS.stop, SEEDS.stop + num_seeds), processes=2, config=STANDING)


def test_the_only_member_of_a_quorum_asks_its_manager_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manager server has reported its death, because the two were cut from each other for 300 ms."""

    def decides(outside: Outside, rank: Rank) -> bool:
        return outside.replica.world_size == 1 and rank.plan is not None and rank.plan.replica_world_size > 1

    monkeypatch.setattr(Outside, "_decides_alone", decides)
    simulate(662, STANDING)
    monkeypatch.setattr(Outside, "_decides_alone", lambda outside, _: outside.replica.world_size == 1)
    with pytest.raises(SimulationError, match="W2"):
        simulate(662, STANDING)


# --- quiet jobs -------------------------------------------------------------------------------------------------------


class Quiet:
    """A job in which nothing fails: steps of different lengths, and replicas that join and leave."""

    def __init__(self, seed: int, *, lease_ms: int = 60_000, world_size: int = 1) -> None:
        self.rng = random.Random(seed)
        config = ClusterConfig(
            names=(),
            world_size=world_size,
            timeouts=replace(SHORT_TIMEOUTS, lease_ms=lease_ms),
            trainers=TrainerSettings(speaks=True),
        )
        chance = Chance(
            network=random.Random(f"{seed}/network"),
            step_ms=lambda _: self.rng.randint(20, 250),
            spread_ms=lambda: self.rng.randint(1, 30),
            chunk_ms=lambda _: self.rng.randint(1, 20),
        )
        self.cluster = Cluster(config, chance)
        self.cluster.on_effect = self._saw
        self.formed: list[tuple[int, tuple[str, ...]]] = []
        self.cluster.clock.run_until(1_000)

    def _saw(self, order: effects.LighthouseEffect) -> None:
        if isinstance(order, effects.QuorumFormed):
            self.formed.append((self.cluster.clock.now_ms, order.quorum.replica_ids))

    def run(self, ms: int) -> None:
        self.cluster.clock.run_until(self.cluster.clock.now_ms + ms)

    def steps(self) -> dict[str, int]:
        return {name: replica.trainers[0].step for name, replica in self.cluster.replicas.items()}

    @property
    def heard(self) -> dict[str, int]:
        return dict(self.cluster.our_lighthouse.num_heard)


@pytest.mark.parametrize("seed", range(12))
def test_a_newcomer_is_in_within_two_rounds_and_no_round_fails_for_it(seed: int) -> None:
    job = Quiet(seed, world_size=1 + seed % 2)
    for name in "ab":
        job.cluster.start(name)
    job.run(3_000)
    for name in "cde":
        before = job.steps()["a"]
        job.cluster.start(name)
        job.cluster.clock.run_until(
            job.cluster.clock.now_ms + 10_000, lambda who=name: any(f"{who}:1" in ids for _, ids in job.formed)
        )
        assert job.steps()["a"] - before <= 2, f"{name} came at step {before}, and is in at {job.steps()['a']}"
        job.run(job.rng.randint(500, 3_000))
    marks = job.cluster.marks
    assert [
        name for name in ("a commit failed", "a reduction failed", "the word of a round failed") if marks[name]
    ] == []
    assert len(set(job.steps().values())) <= 2


@pytest.mark.parametrize("seed", range(4))
def test_steady_rounds_send_nothing_but_beats(seed: int) -> None:
    job = Quiet(seed, world_size=1 + seed % 2)
    for name in "abc":
        job.cluster.start(name)
    job.run(2_000)
    before = job.steps()["a"]
    job.cluster.our_lighthouse.num_heard.clear()
    while job.steps()["a"] < before + 250:
        job.run(1_000)
    assert set(job.heard) == {"BeatReceived"}
    assert job.cluster.marks["a round began without a request"] > 3 * 240


def test_with_a_lease_of_0_every_round_asks() -> None:
    job = Quiet(1, lease_ms=0)
    for name in "ab":
        job.cluster.start(name)
    job.run(6_000)
    assert job.steps()["a"] > 20
    assert job.heard["QuorumRequested"] > 2 * 20
    assert job.cluster.marks["a round began without a request"] == 0
    assert not any(isinstance(each, events.LateReported) for each in job.heard)


@pytest.mark.parametrize("seed", range(4))
def test_a_lighthouse_that_is_away_for_less_than_the_lease_costs_no_round(seed: int) -> None:
    job = Quiet(seed)
    for name in "abc":
        job.cluster.start(name)
    job.run(2_000)
    before, failed = job.steps()["a"], job.cluster.marks["a commit failed"]
    job.cluster.end_process(job.cluster.lighthouse)
    job.run(30_000)
    assert job.steps()["a"] - before > 70
    job.cluster.revive_lighthouse()
    job.run(5_000)
    assert job.cluster.marks["a commit failed"] == failed
    assert set(job.heard) <= {"BeatReceived", "HelloReceived", "ProbeAnswered", "QuorumReported"}


# --- mutants ----------------------------------------------------------------------------------------------------------

right_speak, right_news, right_told = Ending.speak, LivingQuorum.news, StandingQuorum.told


def lets_the_others_hang(self: StandingQuorum, *, yes: bool, stands: bool) -> bool:
    right_decided(self, yes=yes, stands=stands)
    return False


right_decided = StandingQuorum.decided
right_summed = StandingQuorum.summed


def takes_a_lost_word_for_a_yes(self: StandingQuorum, total: Sequence[int] | None, lineage: int | None) -> Vote:
    return Vote(yes=True, stands=True) if total is None else right_summed(self, total, lineage)


def has_ten_leases(self: Lease, lease_ms: int, sent_ms: int) -> None:
    right_begin(self, 10 * lease_ms, sent_ms)


right_begin = Lease.begin


def says_nothing_before_the_lease_ends(self: Lease, now_ms: int) -> bool:
    return False


def waits_for_nobody(self: LivingQuorum, *_: Any) -> None:
    return None


def waits_for_heartbeat_timeout_alone(self: Timeouts, lease_ms: int) -> int:
    return self.heartbeat_timeout_ms


def ends_before_its_last_word(self: Speaking) -> Life:
    yield self._trainer.sleep(1)


def waits_for_its_state_before_the_word(self: Ending, order: do.SendWord) -> Life:
    plan = self._trainer.plan
    if plan is not None and plan.heal:
        yield self._trainer.sleep(3_000)
    return (yield from right_speak(self, order))


def pushes_no_recall(self: Job) -> list[Any]:
    self._living.recall()
    return []


def repeats_no_recall(self: LivingQuorum, key: QuorumKey | None, beat: int, *, broken: bool) -> QuorumNews:
    return replace(right_news(self, key, beat, broken=broken), recalled=not beat)


def tells_no_other_rank(self: ReplicaGroupCore, rank: int, held: QuorumKey | None) -> list[Any]:
    return []


def ignores_newer_quorums(self: StandingQuorum, news: QuorumNews) -> bool:
    return right_told(self, replace(news, key=self.key)) if self.key is not None else right_told(self, news)


def breaks_for_nobody(self: LivingQuorum, members: Any) -> None:
    return None


def stands_whatever_the_others_say(
    self: Votes, name: Any, rank: int, call: int, yes: bool, deadline_ms: int, **said: bool
) -> list[Any]:
    return right_cast(self, name, rank, call, yes, deadline_ms, **{**said, "stands": True})


right_cast = Votes.cast


@dataclass(frozen=True)
class Mutant:
    """A mistake, and where it is seen: in a transcript, or by an invariant from that seed on."""

    target: Any
    name: str
    mistake: Callable[..., Any]
    where: str | int
    invariant: str = "transcript"


MUTANTS = [
    Mutant(Ending, "speak", waits_for_its_state_before_the_word, "standing_02_recall"),
    Mutant(StandingQuorum, "summed", takes_a_lost_word_for_a_yes, 0, "W1 I5"),
    Mutant(Votes, "cast", stands_whatever_the_others_say, "standing_03_words"),
    Mutant(StandingQuorum, "decided", lets_the_others_hang, "standing_03_words"),
    Mutant(ReplicaGroupCore, "_leave_standing", tells_no_other_rank, "standing_04_alone"),
    Mutant(Job, "_recall", pushes_no_recall, "standing_02_recall"),
    Mutant(LivingQuorum, "news", repeats_no_recall, "standing_02_recall"),
    Mutant(StandingQuorum, "told", ignores_newer_quorums, "standing_07_nobody_starts_over"),
    Mutant(LivingQuorum, "breaks_for", breaks_for_nobody, "standing_04_alone"),
    Mutant(Lease, "begin", has_ten_leases, "standing_06_lighthouse_away"),
    Mutant(Lease, "runs_out", says_nothing_before_the_lease_ends, "standing_06_lighthouse_away"),
    Mutant(LivingQuorum, "waits_for", waits_for_nobody, "standing_07_nobody_starts_over"),
    Mutant(Timeouts, "silence_after_lease_ms", waits_for_heartbeat_timeout_alone, "standing_07_nobody_starts_over"),
    Mutant(LivingQuorum, "waits_for_unnamed", waits_for_nobody, "standing_07_nobody_starts_over"),
    Mutant(Speaking, "let_the_last_word_pass", ends_before_its_last_word, "standing_05_leaving"),
]


def seen(mutant: Mutant) -> str:
    """Which invariant sees it first, or nothing."""
    if isinstance(mutant.where, str):
        written = (TRANSCRIPTS / f"{mutant.where}.txt").read_text()
        try:
            told = play(written)
        except ScenarioError as error:
            told = str(error)
        except InvariantError:
            return "transcript"  # the right cores play it
        return "transcript" if told != written else ""
    for seed in range(mutant.where, mutant.where + 300):
        try:
            simulate(seed, STANDING)
        except SimulationError as failed:
            return failed.cause.invariant if isinstance(failed.cause, InvariantError) else repr(failed.cause)
    return ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.mistake.__name__)
def test_a_mistake_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vars(mutant.target)[mutant.name]
    mistake = property(mutant.mistake) if isinstance(right, property) else mutant.mistake
    monkeypatch.setattr(mutant.target, mutant.name, mistake)
    assert seen(mutant) in mutant.invariant.split()
