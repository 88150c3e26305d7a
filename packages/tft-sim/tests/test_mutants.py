"""Mutants: a core with one small mistake is caught, and by the invariant that is named here: at least one for each rule
of the protocol.

Each mistake is one that somebody could make. A mutant that survives would show that an invariant is missing, or that
random seeds do not come by the case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tft_coord.compat import replica_group as compat_group
from tft_coord.compat.member_data import RequestExtras
from tft_coord.compat.rule import TorchftCore
from tft_coord.core import assignment, effects, events, lighthouse, quorum, reach, suspicion
from tft_coord.core.bad_links import Pause
from tft_coord.core.commit import RoundName, Votes
from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.handshake import Handshake, Precedence
from tft_coord.core.job_end import Ended, JobEnd
from tft_coord.core.lighthouse import Job, LighthouseCore
from tft_coord.core.lineage import fold_lineage
from tft_coord.core.liveness import Accepted, Liveness, Rejected, Replica
from tft_coord.core.progress import GroupProgress, HangWatch, Phase, Progress
from tft_coord.core.quorum import Situation
from tft_coord.core.reach import Exclusions, Limits, Peer, Reach
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.session import SessionCore
from tft_coord.core.step import Healing, own_state, reducing
from tft_coord.core.step import Phase as StepPhase
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.attempt import Attempt
from tft_coord.core.step.ending import Ending
from tft_coord.core.step.failures import Failures
from tft_coord.core.step.in_flight import StepsInFlight
from tft_coord.core.step.leaving import GracefulShutdown
from tft_coord.core.step.losses import Losses
from tft_coord.core.step.recovery import Recovery as StepRecovery
from tft_coord.core.step.reducing import Reducing
from tft_coord.core.step.starting import Starting
from tft_coord.core.step.state import StepState
from tft_coord.core.step.values import StepName
from tft_coord.core.stops import StopWatch
from tft_coord.core.stragglers import StragglerPolicy, StragglerWatch
from tft_coord.core.suspicion import Sighting, Suspicion
from tft_coord.core.trial import Trials
from tft_coord.core.types import (
    MAX_INT64,
    LossNotice,
    Member,
    Plan,
    Purpose,
    Quorum,
    QuorumKey,
    Refusal,
    Unreached,
    Verdict,
    Via,
)
from tft_sim import InvariantError, SimulationError, play, simulate, syncs
from tft_sim.invariants import Held, Round
from tft_sim.recovery import Recovery, Snapshot
from tft_sim.scenario import ScenarioError
from tft_sim.simulator import STRAGGLERS, SimulationConfig
from tft_sim.trainer import Trainer
from tft_sim.waiting import Life, Refused
from tft_sim.worlds import LighthouseWorld

ON_FOREIGN = SimulationConfig(foreign=True)
WITH_STANDBY = SimulationConfig(standby=True)
WITH_LINKS = SimulationConfig(links=True)
STANDING_WITH_LINKS = SimulationConfig(links=True, speaks=True)
STRAGGLERS_WITH_LINKS = replace(STRAGGLERS, links=True)
PARTIAL = "scenario_21_partial_connectivity"
OLDER_WITH_STANDBY = SimulationConfig(standby=True, probes=False)
WITH_CHECKS = SimulationConfig(checks=True)
WITH_SYNCS = SimulationConfig(syncs=True)
WITHOUT_PROBES = SimulationConfig(probes=False)  # seeds that are hard to find go on as before there were probes
JOB_END_LOOK = JobEnd.look
SILENCE = "silence"
SYNCS = "scenario_13_syncs_in_flight"
SEEDS = 300  # after so many without a word a mistake counts as unseen


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Args:
        target, name, mistake: what is patched, and with what.
        invariant: that sees it, one of these; or `transcript`: the story comes out another one.
        where: a seed from which on that does not take long; or the name of the transcript; or a sequence of events in
            the world of `explore`, of three replicas that train together.
    """

    target: Any
    name: str
    mistake: Callable[..., Any]
    invariant: str
    where: int | str | tuple[str, ...]
    config: SimulationConfig = SimulationConfig()  # noqa: RUF009  # frozen


def breaks_whatever_is_held(self: ReplicaGroupCore, notice: LossNotice) -> list[effects.GroupEffect]:
    held = self.quorum.key if self.quorum is not None else notice.key
    return right_noticed(self, replace(notice, key=held))


def tells_nothing_again(self: ReplicaGroupCore, rank: int) -> list[effects.GroupEffect]:
    return []


def tells_nobody(self: Job, replica_id: str, session: int, reason: str, *, lives: bool = False) -> list[Any]:
    return []


def tells_nobody_of_a_newer_session(
    self: Job, replica_id: str, session: int, reason: str, *, lives: bool = False
) -> list[Any]:
    return [] if "replaced by session" in reason else right_break_quorum(self, replica_id, session, reason, lives=lives)


def answers_no_hello(self: Job, key: QuorumKey | None) -> Iterable[LossNotice]:
    return ()


def forgets_who_was_lost(self: Job) -> None:
    self._losses = {}


def changes_its_mind(
    self: Votes, name: RoundName, rank: int, call: int, yes: bool, deadline_ms: int, **said: bool
) -> list[tuple[int, int, Verdict]]:
    before = self._rounds.get(name)
    if before is not None and rank in before.answered:
        return [(call, rank, Verdict(yes=False))]  # it has had its answer, or its answer was lost
    return right_cast(self, name, rank, call, yes, deadline_ms, **said)


def counts_the_first_vote_for_all(self: Votes, world_size: int) -> None:
    right_votes(self, 1)


def folds_no_quorum(lineage: int, key: QuorumKey, step: int) -> int:
    return fold_lineage(lineage, QuorumKey(1, 1), step)


def hears_of_older_streams(self: Liveness, stream: int, hello: Any, now_ms: int) -> Any:
    known = self.replicas.get(hello.replica_id)
    older = known.stream if known is not None else None
    result = right_hello(self, stream, hello, now_ms)
    if older is not None and known is not None:
        self._by_stream.setdefault(older, known)
    return result


def waits_for_the_lost(self: Job, waiting: Any, now_ms: int) -> Situation:
    situation = right_situation(self, waiting, now_ms)
    return replace(situation, healthy={*situation.healthy, *(each for each in self._members if each in self._losses)})


def waits_for_no_state(*_: object) -> None:
    return None


def lets_a_beat_revive(self: Liveness, stream: int, now_ms: int) -> Any:
    replica = self.of_stream(stream)
    if replica is not None:
        replica.lost = None
    return right_sign(self, stream, now_ms)


def welcomes_the_dead(self: Liveness, known: Any, stream: int, hello: Any, now_ms: int) -> Any:
    rejected = right_reject(self, known, stream, hello, now_ms)
    return None if rejected is not None and rejected.refusal is Refusal.DEAD else rejected


def gives_no_grace(self: Liveness, replica: Replica, now_ms: int) -> bool:
    return replica.broken_ms is not None and not replica.excused


def welcomes_a_twin(self: Liveness, known: Replica, stream: int, hello: Any, now_ms: int) -> Any:
    rejected = right_reject(self, known, stream, hello, now_ms)
    if rejected is None or rejected.refusal is not Refusal.DUPLICATE:
        return rejected
    return right_reject(self, known, stream, replace(hello, address=known.address), now_ms)


def stands_though_somebody_heals(self: Job, quorum: Quorum, previous: Quorum | None) -> bool:
    return previous is not None and previous.key == quorum.key


def needs_no_majority(*_: object) -> None:
    return None


def compares_nothing(self: Handshake, *_: object) -> list[Any]:
    return []


def believes_the_dead(self: Job, replica_id: str) -> Precedence:
    return max(Precedence.NEW, right_standing(self, replica_id))


def takes_both_kinds(self: LighthouseCore, job: str, now_ms: int) -> str | None:
    return None


def waits_for_who_has_left(self: Job, waiting: Any, now_ms: int) -> Situation:
    situation = right_situation(self, waiting, now_ms)
    return replace(situation, healthy={*situation.healthy, *situation.left}, left=())


def takes_the_end_of_who_has_left_for_a_loss(self: Job, now_ms: int) -> list[Any]:
    serving = set(self._serving)
    out = right_release(self, now_ms)
    for replica_id in serving - self._serving:
        if replica_id in self.liveness.replicas:
            self.liveness.replicas[replica_id].serves = True
    return out


def releases_a_source_at_once(self: Job) -> bool:
    return False


def serves_on_beside_a_newer_one(self: LighthouseCore, hello: Any) -> bool:
    return False


right_stands_in = LighthouseCore._resumes_service


def stands_in_at_the_first_word(self: LighthouseCore, now_ms: int, wall_ms: int) -> bool:
    self._redirected_ms = now_ms - self._config.timeouts.heartbeat_timeout_ms, now_ms
    return right_stands_in(self, now_ms, wall_ms)


right_standing = Job._precedence_of


def takes_a_redial_for_an_older_one(self: Liveness, known: Replica, stream: int, hello: Any, now_ms: int) -> Any:
    again = known.stream != stream and known.lost is None and known.session == hello.session
    return right_reject(self, known, stream, replace(hello, session=hello.session - 1) if again else hello, now_ms)


def heals_no_more_after_a_redial(self: Liveness, stream: int, hello: Any, now_ms: int) -> Any:
    result = right_hello(self, stream, hello, now_ms)
    if isinstance(result, Accepted):
        result.replica.healing_since_ms = None
    return result


def presumes_that_nobody_lives(self: Liveness, members: Iterable[Member], started_ms: int) -> None:
    right_presume(self, members, started_ms - self._timeouts.heartbeat_timeout_ms)


def excuses_nobody(self: Liveness, now_ms: int) -> None:
    return None


def is_deaf_to_ends_that_are_told(self: Liveness, stream: int, now_ms: int, *, by_peer: bool = False) -> None:
    right_stream_closed(self, stream, now_ms)


def takes_every_end_for_told(self: Liveness, stream: int, now_ms: int, *, by_peer: bool = False) -> None:
    right_stream_closed(self, stream, now_ms, by_peer=True)


def keeps_one_job(self: LighthouseCore, event: events.HelloReceived, now_ms: int, wall_ms: int) -> Any:
    return right_core_hello(self, replace(event, hello=replace(event.hello, job="job")), now_ms, wall_ms)


def reuses_what_failed(
    previous: Quorum | None, members: tuple[Member, ...], broken: str | None, *gone: Collection[str], **out: Any
) -> str | None:
    reason = right_reason(previous, members, broken, *gone, **out)
    before = [member.identity for member in previous.members] if previous is not None else []
    return None if before == [member.identity for member in members] else reason


def asks_nobody(self: Job, now_ms: int) -> list[effects.LighthouseEffect]:
    return []


def starts_from_any_state(key: QuorumKey, members: tuple[Member, ...]) -> tuple[int, ...]:
    return tuple(range(len(members)))


def takes_the_unknown_for_the_same(key: QuorumKey, members: tuple[Member, ...]) -> tuple[int, ...]:
    return right_holders(
        key, tuple(replace(member, lineage=0) if member.lineage is None else member for member in members)
    )


def takes_rank_0_for_all(self: ReplicaGroupCore) -> tuple[Member, QuorumKey | None]:
    member, held = right_merge(self)
    first = self._asked[0].request
    return replace(member, torn=False, step=first.step, lineage=first.lineage), held


def starts_over_at_once(self: Job, members: Collection[Member], now_ms: int) -> bool:
    return False


def asks_the_lighthouse_again(self: ReplicaGroupCore, event: events.RankAsked) -> None:
    return None


right_core_hello = LighthouseCore._hello
right_reason = quorum.reason_for_new_id
right_merge = ReplicaGroupCore._merge
right_holders = assignment._holders


def names_no_words(lighthouse_id: int, members: Sequence[Member], all_extras: Sequence[RequestExtras]) -> int:
    return lighthouse_id


def looks_at_nothing_that_others_have_seen(told: Member) -> Any:
    both = right_parted(told)
    return None if both is None else (both[0], replace(both[1], seen=0))


def looks_at_no_list(lighthouse_id: int, members: Sequence[Member]) -> int:
    return 1


def follows_nobody(self: SessionCore, *_: object, serves: bool) -> list[Any]:
    return []


def takes_waiting_for_hanging(self: Progress) -> bool:
    return self.phase is not Phase.OUTSIDE and not self.excused and self._too_long


def takes_the_late_for_hung(self: Progress) -> bool:
    return self.phase in (Phase.OWN, Phase.OUTSIDE) and not self.excused and self._too_long


def excuses_no_first_step(self: Progress) -> bool:
    return self.phase is Phase.OWN and self._too_long


def never_sees_a_hang(self: Progress) -> bool:
    return False


def comes_back_while_it_hangs(self: SessionCore, session: int, now_ms: int, *, hung: bool = False) -> list[Any]:
    return right_told_lost(self, session, now_ms)


def never_comes_back_from_a_hang(self: SessionCore, now_ms: int) -> list[Any]:
    return []


def spares_nobody(self: Job) -> list[str]:
    return []


def reports_what_was_formed(self: ReplicaGroupCore) -> Quorum | None:
    return self.quorum


def needs_only_one_to_be_stuck(self: HangWatch, members: object) -> int | None:
    return next(iter(self._stuck.values()), None)


def takes_all_silence_for_work(self: GroupProgress, word: Any, now_ms: int) -> Progress:
    silent_ms = now_ms - word.at_ms
    if silent_ms > self._silent_after_ms and word.progress.phase is not Phase.OWN:
        return replace(word.progress, phase=Phase.OWN, since_ms=silent_ms, excused=False)
    return replace(word.progress, since_ms=word.progress.since_ms + silent_ms)


def never_sees_all_stuck(self: HangWatch, members: object) -> int | None:
    return None


def says_no_more_what_it_is_made_of(self: SessionCore) -> list[Any]:
    said = self._fingerprint_sent
    orders = right_open_newer(self)
    self._fingerprint_sent = said
    return orders


def takes_a_redial_for_another(self: Liveness, known: Replica, stream: int, hello: Any, now_ms: int) -> Any:
    elsewhere = known.stream not in (None, stream) and known.lost is None
    return right_reject(self, known, stream, replace(hello, address="another:1") if elsewhere else hello, now_ms)


def takes_whoever_is_known_for_another(self: Liveness, known: Replica, stream: int, hello: Any, now_ms: int) -> Any:
    if known.lost is None and known.stream != stream:
        return Rejected(Refusal.DUPLICATE, f"replica {hello.replica_id} is already running at {known.address}")
    return right_reject(self, known, stream, hello, now_ms)


def gives_up_at_the_first_refusal(
    self: SessionCore, refusal: Refusal, message: str, now_ms: int, silent_ms: int = 0, *, hung: bool = False
) -> list[Any]:
    self._duplicate_since_ms = -MAX_INT64
    return right_told_refused(self, refusal, message, now_ms, silent_ms, hung=hung)


def takes_time_for_a_proof_of_life(
    self: SessionCore, refusal: Refusal, message: str, now_ms: int, silent_ms: int = 0, *, hung: bool = False
) -> list[Any]:
    return right_told_refused(self, refusal, message, now_ms, hung=hung)


def takes_every_loss_for_a_death(
    self: Liveness, replica: Replica, reason: str, now_ms: int, *, dead: bool = False, fell_silent: bool = False
) -> Any:
    return right_lose(self, replica, reason, now_ms, dead=True)


def believes_no_clock_but_its_own(hello: Any, wall_ms: int, cluster_id: str) -> str | None:
    return right_clock_behind(hello, wall_ms - lighthouse.CLOCKS_DIFFER_MOST_MS, cluster_id)


def takes_the_unknown_for_torn(self: ReplicaGroupCore) -> tuple[Member, QuorumKey | None]:
    member, held = right_merge(self)
    return replace(member, torn=member.torn or member.lineage is None), held


def thinks_of_the_other_kind_all_the_time(self: TorchftCore, now_ms: int) -> str | None:
    return "a replica"


def gives_way_to_every_newcomer(self: Handshake, replica_id: str, fingerprint: Fingerprint) -> list[Any]:
    standing = self._precedence_of
    self._precedence_of = lambda each: Precedence.MEMBER if each == replica_id else Precedence.NEW
    out = right_compare(self, replica_id, fingerprint)
    self._precedence_of = standing
    return out


def lets_the_last_say_who_is_ahead(self: Job, within: Collection[str] | None = None) -> list[Any]:
    last = min((request.member.step for _, request in self._waiting() if request.member.live), default=0)
    for replica, request in self._waiting():
        if request.member.step > last:
            replica.request = replace(request, member=replace(request.member, live=False))
    return right_refuse_the_ahead(self, within)


def forgets_whom_it_leaves_out(self: Job, within: Collection[str] | None = None) -> list[Any]:
    return right_refuse_the_ahead(self) if within is None else []


def takes_an_older_lighthouse_for_the_end(
    self: SessionCore, refusal: Refusal, message: str, now_ms: int, silent_ms: int = 0, *, hung: bool = False
) -> list[Any]:
    known = Refusal.DEAD if refusal is Refusal.OLD_LIGHTHOUSE else refusal
    return right_told_refused(self, known, message, now_ms, silent_ms, hung=hung)


def gives_a_rank_no_grace(self: ReplicaGroupCore, event: events.RankDisconnected, now_ms: int) -> list[Any]:
    out = right_disconnected(self, event, now_ms)
    lost = self._broken_ms.pop(event.rank, None) is not None
    return [*out, *(self._lose(f"the stream of rank {event.rank} broke") if lost else [])]


def names_nobody(self: ReplicaGroupCore) -> str:
    return "a rank is lost"


def cuts_the_time_short(self: ReplicaGroupCore, now_ms: int) -> list[Any]:
    return right_group_tick(self, now_ms + 1_000)


def lets_the_late_train_on(self: Job) -> list[effects.LighthouseEffect]:
    return []


def ends_while_a_member_trains(
    self: JobEnd, key: QuorumKey, member_ids: Iterable[str], able_ids: Iterable[str]
) -> Ended | None:
    return JOB_END_LOOK(self, key, member_ids, ())


def ends_while_a_lost_member_may_come_back(self: Job, replica_id: str, now_ms: int) -> bool:
    replica = self.liveness.replicas.get(replica_id)
    return replica is not None and replica.healthy


def takes_everybody_for_a_new_run(self: Liveness, hello: Any, now_ms: int) -> int:
    return now_ms


def leaves_open_votes_open(self: Votes, now_ms: int) -> list[Any]:
    for name, current in self._rounds.items():
        if current.verdict is None and any(now_ms >= deadline_ms for deadline_ms in current.deadlines_ms.values()):
            self._rounds[name].deadlines_ms.clear()
    return []


def waits_for_the_silent(self: Liveness, now_ms: int) -> list[Any]:
    for stream in list(self._by_stream):
        right_sign(self, stream, now_ms)
    return right_judge(self, now_ms)


def forgives_no_flaps(self: Liveness, replica: Replica, now_ms: int) -> bool:
    replica.stream_losses_ms = []
    return right_break_counts(self, replica, now_ms)


def excuses_nobody_for_its_own_sleep(self: Liveness, now_ms: int) -> None:
    return None


def forgets_the_dead_at_once(self: Liveness, now_ms: int) -> list[Any]:
    out = right_judge(self, now_ms)
    self.replicas = {name: each for name, each in self.replicas.items() if each.stream is not None or each.watched}
    return out


def counts_who_has_never_asked(self: Job, waiting: Any, now_ms: int) -> Situation:
    living = {name for name, replica in self.liveness.replicas.items() if replica.healthy}
    return replace(right_situation(self, waiting, now_ms), healthy=living)


def knows_no_fast_path(situation: Situation) -> Any:
    decision, previous = right_decide(situation), situation.previous
    if not isinstance(decision, quorum.Form) or previous is None:
        return decision
    waiting, eligible = set(situation.waiting), set(situation.healthy) - set(situation.ineligible)
    before = frozenset(previous.replica_ids).difference(situation.left)
    return right_majority(situation, waiting & eligible, eligible, before) or decision


def lets_in_who_never_heals(situation: Situation) -> Any:
    return right_decide(replace(situation, ineligible=()))


def waits_for_who_receives_nothing(self: Job, replica: Any, first_asked_ms: int, now_ms: int) -> bool:
    return False


def needs_few_on_the_fast_path(situation: Situation) -> Any:
    few = is_fast(situation)
    return right_decide(replace(situation, min_replicas=1) if few else situation)


def needs_few_on_the_slow_path(situation: Situation) -> Any:
    few = not is_fast(situation)
    return right_decide(replace(situation, min_replicas=1) if few else situation)


def is_fast(situation: Situation) -> bool:
    before = set(situation.previous.replica_ids) - set(situation.left) if situation.previous is not None else set()
    return bool(before) and before <= situation.waiting.keys()


def leaves_all_survivors_out(situation: Situation, candidates: Any, eligible: Any, before: Any) -> Any:
    return right_majority(situation, candidates, eligible, ())


def takes_half_for_a_majority(situation: Situation, candidates: Any, eligible: Any, before: Any) -> Any:
    half = 2 * len(candidates) == len(eligible)
    return right_majority(situation, candidates, candidates if half else eligible, before)


def waits_for_nobody_who_is_late(situation: Situation, candidates: Any) -> int:
    return 0


def waits_for_the_late_for_ever(situation: Situation, candidates: Any) -> int:
    return 1_000


def waits_for_nobody_who_heals(self: Job, replica: Replica, first_asked_ms: int, now_ms: int) -> bool:
    return False


def knows_its_own_ids_only(self: Job, members: Any, now_ms: int, wall_ms: int) -> list[Any]:
    own = self.previous.key.quorum_id if self._formed_here and self.previous is not None else 0
    self.last_id = max(own, self._incarnation.started_ms)
    return right_formed(self, members, now_ms, wall_ms)


def lets_the_ahead_in(self: Job, within: Collection[str] | None = None) -> list[Any]:
    return []


def asks_one_rank_whether_all_have_staged(
    self: Votes, name: RoundName, rank: int, call: int, yes: bool, deadline_ms: int, **said: bool
) -> list[tuple[int, int, Verdict]]:
    if name.purpose is Purpose.STAGED:
        return [(call, rank, Verdict(yes))]
    return right_cast(self, name, rank, call, yes, deadline_ms, **said)


def finds_nobody(self: Job, now_ms: int, wall_ms: int | None = None) -> list[effects.LighthouseEffect]:
    return []


def gives_the_slow_no_time(self: Any, now_ms: int) -> int | None:
    return suspicion.UNANSWERED_MS if self.answers else None


def loses_though_few_wait(num_waiting: int, num_members: int) -> bool:
    return num_members > 1


def judges_one_that_flaps(self: Job, replica: Replica, now_ms: int) -> Sighting:
    return replace(right_sighting(self, replica, now_ms), may_be_lost=replica.stream is not None)


def probes_at_every_look(self: Suspicion, replica_id: str, now_ms: int) -> bool:
    return True


def takes_one_look_for_a_stop(self: StopWatch, now_ms: int) -> tuple[int, ...]:
    return tuple(sorted(self._found))


def reports_no_stop(self: StopWatch, now_ms: int) -> tuple[int, ...]:
    return ()


def comes_back_while_it_is_stopped(self: ReplicaGroupCore, now_ms: int) -> bool:
    return self._progress.is_hung(now_ms)


def takes_a_stopped_rank_for_dead(self: ReplicaGroupCore, event: events.RanksLookedAt, now_ms: int) -> list[Any]:
    broken, self._broken_ms = self._broken_ms, {}
    out = right_looked_at(self, event, now_ms)
    self._broken_ms = broken
    return out


def believes_that_waits_run_on(self: GroupProgress, now_ms: int) -> int | None:
    words = self._reports.values()
    if len(words) < self._world_size or any(self._now_of(word, now_ms).waits_ms is None for word in words):
        return None
    return max(word.at_ms - word.progress.since_ms for word in words)


def takes_silence_for_a_bad_link(self: Liveness, replica_id: str, reason: str, now_ms: int) -> Any:
    lost = right_silence(self, replica_id, reason, now_ms)
    if lost is not None:
        lost.replica.stream_losses_ms += [now_ms] * 3
    return lost


def waits_no_longer_for_the_paused(self: Job, replica: Replica) -> int:
    return self._timeouts.heartbeat_timeout_ms


def takes_a_stop_for_a_death(self: Liveness, replica: Replica, reason: str, now_ms: int, **known: bool) -> Any:
    return right_lose(self, replica, reason, now_ms, **(known | {"fell_silent": False}))


right_sighting = Job._sighting
right_looked_at = ReplicaGroupCore._looked_at
right_silence = Liveness.silence


def takes_a_small_excess_for_slow(self: StragglerPolicy, median_ms: int) -> float:
    return 1.2 * median_ms


def counts_who_can_not_be_reached(self: Job) -> Any:
    kept, self._exclusions = self._exclusions, Exclusions()
    company = right_company(self)
    self._exclusions = kept
    return company


def leaves_anybody_out(self: StragglerWatch, replica_id: str, over: object, company: object) -> str:
    return ""


def forms_with_whom_it_left_out(self: Job) -> frozenset[str]:
    return frozenset()


def leaves_the_last_holder_out(self: Job) -> frozenset[str]:
    return self.stragglers.left_out


def lets_back_at_once(self: StragglerWatch, now_ms: int, company: Any) -> Any:
    return right_let_back(self, now_ms + 1_000_000, company)


def never_lets_back(self: StragglerWatch, now_ms: int, company: Any) -> list[Any]:
    return []


def waits_for_every_step(self: StragglerWatch, pace: Any, median_ms: int) -> bool:
    return False


def forgives_at_the_limit(self: StragglerPolicy, median_ms: int) -> float:
    return self.limit_ms(median_ms)


def pauses_no_longer(self: StragglerPolicy, times: int) -> int:
    return self.first_pause_ms


def judges_by_one_look(self: StragglerWatch, since: object, pace: object, now_ms: int) -> bool:
    return True


def remembers_how_slow_it_was(self: StragglerWatch, replica_id: str, progress: Progress | None) -> None:
    right_heard_pace(self, replica_id, progress)
    if progress is not None and progress.own_ms:
        self._paces[replica_id].own_ms = progress.own_ms


right_company = Job._quorum_context
right_let_back = StragglerWatch._let_back
right_heard_pace = StragglerWatch.heard
right_parted = compat_group.unpack_member
right_judge = Liveness.judge
right_break_counts = Liveness._break_counts
right_decide = quorum.decide
right_majority = quorum._majority
right_formed = Job._formed
right_vote = Trainer.vote
right_told_refused = SessionCore.told_refused
right_lose = Liveness._lose
right_clock_behind = lighthouse._clock_behind
right_compare = Handshake._compare
right_refuse_the_ahead = Job._refuse_ahead
right_disconnected = ReplicaGroupCore._disconnected
right_group_tick = ReplicaGroupCore.tick
right_told_lost = SessionCore.told_lost
right_open_newer = SessionCore._open_newer
right_noticed = ReplicaGroupCore._noticed
right_release = Job._release_left
right_break_quorum = Job._break_quorum
right_cast = Votes.cast
right_votes = Votes.__init__
right_hello = Liveness.hello
right_stream_closed = Liveness.stream_closed
right_sign = Liveness.sign
right_reject = Liveness._reject
right_presume = Liveness.presume
right_situation = Job._situation


def leaves_out_both_ends(self: Reach, around: Collection[str], peers: Any) -> frozenset[str]:
    return frozenset(around)


def leaves_nobody_out(self: Reach, pairs: Any, peers: Any) -> frozenset[str]:
    return frozenset()


def leaves_out_whoever_is_cheapest(self: Limits, chosen: Collection[str]) -> bool:
    return len(chosen) <= self.most


def goes_on_with_too_few(self: Limits, chosen: Collection[str]) -> bool:
    return not any(each <= set(chosen) for each in self.needed)


def counts_the_waiting_alone(self: Reach, pairs: Any, peers: dict[str, Peer]) -> frozenset[str] | None:
    asked = {name: peer if peer.asked else replace(peer, step=-1) for name, peer in peers.items()}
    return right_cover(self, pairs, asked)


def never_tries_again(self: Pause, now_ms: int) -> bool:
    return True


def waits_as_long_each_time(self: Pause, key: QuorumKey | None, now_ms: int) -> bool:
    is_new = right_again(self, key, now_ms)
    self.length_ms = 5_000
    return is_new


def waits_for_no_other_end(*_: object) -> set[str]:
    return set()


def holds_for_ever(self: Reach, peers: Any, now_ms: int) -> Exclusions:
    if self._hold_until_ms is not None:
        self._hold_until_ms = now_ms + 1_000
    return right_look(self, peers, now_ms)


def avoids_no_store(self: Reach, now_ms: int) -> list[str]:
    return []


def leaves_out_by_the_first_store(self: Reach, one: str, report: Unreached, key: QuorumKey | None, now_ms: int) -> None:
    self._report(one, report.replica_id, "store", key, now_ms)


def tries_one_store_after_another(self: Reach, one: str, report: Unreached, key: QuorumKey | None, now_ms: int) -> None:
    self._missed.clear()
    right_store_missed(self, one, report, key, now_ms)


def leaves_out_by_state_servers(self: Reach, replica: Replica, member: Member, *rest: Any, **more: Any) -> Member:
    said = tuple(replace(each, via=Via.GROUP) if each.via is Via.STATE else each for each in member.unreached)
    return right_reach_heard(self, replica, replace(member, unreached=said), *rest, **more)


def fits_nobody_in(self: Job, form: quorum.Form, now_ms: int) -> quorum.Form:
    return form


def lets_in_before_the_trial(self: Trials) -> list[str]:
    return []


def lets_in_who_has_failed(self: Trials) -> dict[str, dict[str, str]]:
    return {}


def keeps_the_trial_of_a_lost_session(self: Trials, waiting: Iterable[Replica], *rest: Any) -> list[Any]:
    waiting = list(waiting)
    for each in waiting:
        trial = self._trials.get(each.replica_id)
        if trial is not None and trial.connection[0] == each.stream:
            trial.connection = (trial.connection[0], each.session)
    return right_look_at_trials(self, waiting, *rest)


right_look_at_trials = Trials.look


def tries_once(self: Trials, trial: Any, unreached: dict[str, str], now_ms: int) -> None:
    right_end_trial(self, trial, unreached, now_ms)
    trial.again_ms = now_ms + 10_000_000


def puts_members_out_for_newcomers(pairs: Any, order: Any, limits: Limits, free: Any = ()) -> set[str] | None:
    return right_smallest_cover(pairs, order, limits)


def goes_by_an_old_plan(self: Reach, peers: dict[str, Peer], now_ms: int) -> Any:
    if self._plans and self._plans[0].peers.keys() == peers.keys():
        return self._plans[0]
    return right_plan(self, peers, now_ms)


right_plan = Reach._plan
right_end_trial = Trials._end
right_smallest_cover = reach.smallest_cover
right_cover = Reach._cover
right_again = Pause.again
right_look = Reach.look
right_store_missed = Reach._store_missed
right_reach_heard = Reach.heard


# --- the shells of the step: what a trainer does with what its core decides ------------------------------------------


def offers_what_it_took_in_vain(self: Recovery, plan: Plan) -> None:
    kept = vars(self).pop("kept", None) or self._early
    self._early = None
    if kept is not None and plan.serve:
        held, own = kept
        lie = {**own, "step": plan.step, "lineage": f"{plan.lineage:016x}"}
        self.snapshot = Snapshot(plan.key, Held(plan.step, plan.lineage, held.weights), lie)
    elif kept is not None:
        vars(self)["kept"] = kept


def ends_with_its_server(self: Trainer, vote: Round, yes: bool, **said: bool) -> Life:
    verdict = yield self.outside.vote(self, vote, yes, **said)
    if isinstance(verdict, Refused):
        yield from self.quit(f"vote: {verdict.code}", verdict)
    return verdict


def takes_its_open_vote_for_the_verdict(self: Trainer, vote: Round, yes: bool, **said: bool) -> Life:
    verdict = yield self.outside.vote(self, vote, yes, **said)
    return Verdict(yes, said.get("leaving", False)) if isinstance(verdict, Refused) else verdict


def reports_nobody(self: Trainer, group: Any) -> None:
    return None


def counts_none_in_flight(step: int, ahead: int, num_fragments: int) -> int:
    return right_fragment(step, 0, num_fragments)


right_fragment = syncs.fragment_of


# --- the step ---------------------------------------------------------------------------------------------------------


def drops_what_comes_early(self: Losses, notice: LossNotice) -> bool:
    return notice.key == self._current and right_heard(self, notice)


def leaves_with_the_only_state(self: GracefulShutdown, now_ms: int) -> bool:
    return self._group_left or self._reason is not None


def waits_in_vain(self: StepState) -> bool:
    return False


def loads_without_the_others(self: StepRecovery, plan: Plan, purpose: Purpose, *rest: Any, yes: bool = True) -> Any:
    self._error, self._expected_report = rest[0], purpose
    return self._agreed(plan, purpose, yes=yes and rest[0] is None)


def goes_on_in_another_quorum(self: StepsInFlight, key: QuorumKey) -> None:
    return None


def lets_only_one_fail(self: StepsInFlight, attempt: Attempt | None, *, yes: bool, is_left_out: bool) -> None:
    if attempt is not None:
        self.aside.pop(attempt.name.attempt, None)
        if attempt in self.deferred:
            self.deferred.remove(attempt)
        self._count(attempt, yes=yes, planned=attempt.plan is not None, is_left_out=is_left_out)


def reports_what_is_in_flight(self: Starting, event: on.StepStarted, now_ms: int) -> Any:
    (asked,) = right_step_started(self, event, now_ms)
    assert isinstance(asked, do.Ask)
    ahead = len(self._state.attempts.deferred)
    return (replace(asked, request=replace(asked.request, step=asked.request.step + ahead)),)


def says_again_what_failed(self: Starting, event: on.StepStarted, now_ms: int) -> Any:
    (asked,) = right_step_started(self, event, now_ms)
    assert isinstance(asked, do.Ask)
    return (replace(asked, request=replace(asked.request, commit_failures=self._state.attempts.commit_failures)),)


def says_nothing_of_what_it_lost(self: StepsInFlight, step: int, *, is_asynchronous: bool) -> bool:
    right_begin(self, step, is_asynchronous=is_asynchronous)
    return False


def says_nothing_of_what_it_never_heard(self: StepsInFlight, error: Exception, *, others_go_on: bool) -> None:
    right_without_quorum(self, error, others_go_on=False)


def takes_what_it_has_got(self: Failures, error: Exception, name: StepName | None) -> Any:
    return (do.ReportError(name or self._state.attempts.last.name, error, True),)


right_heard = Losses.add
right_step_started = Starting.step_started
right_begin = StepsInFlight.begin
right_without_quorum = StepsInFlight.without_quorum


def builds_each_time(self: Starting, plan: Plan) -> Any:
    self._state.configured = None
    return right_step_planned(self, plan)


def votes_in_spite_of_an_error(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Any:
    *reports, cast = right_cast_vote(self, number, attempt, now_ms)
    assert isinstance(cast, do.CastVote)
    return (*reports, replace(cast, yes=cast.enough_replicas))


def wishes_nothing(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Any:
    *reports, cast = right_cast_vote(self, number, attempt, now_ms)
    assert isinstance(cast, do.CastVote)
    return (*reports, replace(cast, leaving=False))


def counts_while_it_heals(self: Attempt) -> bool:
    return self.plan is not None


def divides_by_the_members(num_participants: int) -> tuple[float, float]:
    return right_mean_factors(num_participants + 1)


def weighs_what_it_does_not_give(self: Reducing, weight: Any, plan: Plan, *, gives: bool, inside: bool) -> Any:
    return right_enters(self, weight, plan, gives=True, inside=inside)


def goes_on_unhealed(self: StepRecovery, event: on.ExchangeAsked, now_ms: int) -> Any:
    return () if self._state.attempts.last.healing is Healing.FETCHING else right_exchange(self, event, now_ms)


def forgets_that_it_is_torn(self: StepRecovery, event: on.StateTorn, now_ms: int) -> Any:
    return ()


def fails_only_what_is_in_flight(self: StepsInFlight, error: Exception) -> None:
    self.fail_deferred(error)


def keeps_what_is_in_flight(self: StepsInFlight, error: Exception) -> None:
    return None


def breaks_nothing(self: Losses) -> None:
    self.broken = None


def breaks_by_any_loss(self: Losses, notice: LossNotice) -> bool:
    heard = right_heard(self, notice)
    return heard or (self._current is not None and notice.key > self._current)


def serves_nobody_to_the_end(self: GracefulShutdown) -> int | None:
    return None


def gives_up_in_silence(self: StepsInFlight, error: Exception) -> None:
    self.abandon_all(error)
    self.peers_may_wait = False


def lets_what_was_begun_later_go_on(self: StepsInFlight, error: Exception) -> None:
    return None


def commits_on_a_no(self: Ending, event: on.VerdictArrived, now_ms: int) -> Any:
    return right_verdict(self, replace(event, yes=True), now_ms)


def blames_the_newest(self: StepsInFlight, name: StepName | None) -> Attempt | None:
    return self.last if self.phase is not StepPhase.IDLE else None


def compares_with_nobody(self: own_state.OwnState, digest: bytes | None) -> None:
    self._compared_step = self.step


def stays_torn(self: own_state.OwnState, plan: Plan, own: Any) -> None:
    torn = self.torn
    right_healed(self, plan, own)
    self.torn = torn


def knows_no_lost_group(self: StepState, attempt: Attempt) -> Exception | None:
    return None


def is_told_of_no_leaving(self: GracefulShutdown) -> None:
    return None


def never_gives_up(self: GracefulShutdown, now_ms: int, *, is_left_out: bool) -> bool:
    return False


right_step_planned = Starting._use_plan
right_cast_vote = Ending._cast_vote
right_mean_factors = reducing.mean_factors
right_enters = Reducing._weight_part
right_exchange = StepRecovery.exchange_asked
right_verdict = Ending.verdict_arrived
right_healed = own_state.OwnState.healed


MUTANTS = [
    # Links: who is left out, for how long, and whose store is used.
    Mutant(Reach, "_cover", leaves_out_both_ends, "R2 I2 I6", 0, WITH_LINKS),
    Mutant(Reach, "_cover", leaves_nobody_out, "R1 R2 I6", 0, WITH_LINKS),
    Mutant(Limits, "allow", leaves_out_whoever_is_cheapest, "R2 I2 I3", 9, WITH_LINKS),
    Mutant(Limits, "allow", goes_on_with_too_few, "I6", PARTIAL),
    Mutant(Reach, "_plan", goes_by_an_old_plan, "R2 I2", 135, WITH_LINKS),
    Mutant(Reach, "_cover", counts_the_waiting_alone, "R2", 607, WITH_LINKS),
    Mutant(Pause, "lasts", never_tries_again, "R3 R2 R1", 5, WITH_LINKS),
    Mutant(Pause, "again", waits_as_long_each_time, "transcript", PARTIAL),
    Mutant(Reach, "_late_ends", waits_for_no_other_end, "transcript", PARTIAL),
    Mutant(Reach, "look", holds_for_ever, "transcript", PARTIAL),
    Mutant(Reach, "stores_failed", avoids_no_store, "transcript", PARTIAL),
    Mutant(Reach, "_store_missed", leaves_out_by_the_first_store, "transcript", PARTIAL),
    Mutant(Reach, "_store_missed", tries_one_store_after_another, "transcript", PARTIAL),
    Mutant(Reach, "heard", leaves_out_by_state_servers, "R2", 249, WITH_LINKS),
    Mutant(Trials, "running", lets_in_before_the_trial, "transcript", PARTIAL),
    Mutant(Trials, "failed", lets_in_who_has_failed, "R2", 18, WITH_LINKS),
    Mutant(Trials, "look", keeps_the_trial_of_a_lost_session, "I6", 110_565, WITH_LINKS),
    Mutant(Trials, "_end", tries_once, "transcript R3", PARTIAL),
    Mutant(reach, "smallest_cover", puts_members_out_for_newcomers, "R2 transcript", PARTIAL),
    Mutant(Job, "_fit", fits_nobody_in, "R2", 221, WITH_LINKS),
    Mutant(StepState, "is_awaited", waits_in_vain, "transcript", PARTIAL),
    Mutant(Trainer, "note_unreached", reports_nobody, "R1", 12, WITH_LINKS),
    # A broken quorum: losses that are not told, or told of the wrong quorum.
    Mutant(Job, "_break_quorum", tells_nobody, "P3", 0),
    Mutant(Job, "_break_quorum", tells_nobody_of_a_newer_session, "P3", 40),
    Mutant(Job, "_losses_in", answers_no_hello, "P3", ("deafen b", "die a", "silence b", "ask c", "hello b")),
    Mutant(
        Job,
        "_forget_losses",
        forgets_who_was_lost,
        "P3",
        ("deafen b", "die a", "silence b", "ask c", "hello b"),
    ),
    Mutant(ReplicaGroupCore, "_noticed", breaks_whatever_is_held, "P3 I3", 393, WITHOUT_PROBES),
    Mutant(ReplicaGroupCore, "_resend", tells_nothing_again, "transcript", "scenario_08_notices"),
    Mutant(Losses, "add", drops_what_comes_early, "P3 transcript", "scenario_08_notices"),
    # Sessions and liveness: who lives, and in which job.
    Mutant(Liveness, "_excuse_outage", excuses_nobody, "transcript", "scenario_14_sick_lighthouse"),
    Mutant(Liveness, "stream_closed", is_deaf_to_ends_that_are_told, "P1", "many_deaths"),
    Mutant(Liveness, "stream_closed", takes_every_end_for_told, "transcript", "scenario_14_sick_lighthouse"),
    Mutant(Liveness, "_break_counts", gives_no_grace, "P1", 0),
    Mutant(Liveness, "_break_counts", forgives_no_flaps, "P1", 108),
    Mutant(Liveness, "judge", waits_for_the_silent, "P1", 16),
    Mutant(Liveness, "judge", forgets_the_dead_at_once, "I2", 0),
    Mutant(Liveness, "excuse_all", excuses_nobody_for_its_own_sleep, "P1", 0),
    Mutant(Liveness, "presume", presumes_that_nobody_lives, "P1", 0),
    Mutant(Job, "_situation", counts_who_has_never_asked, "I6", 8),
    Mutant(LighthouseCore, "_hello", keeps_one_job, "I2", 6),
    Mutant(Liveness, "hello", hears_of_older_streams, "I2", "scenario_11_hangs"),
    Mutant(Liveness, "sign", lets_a_beat_revive, "I6 I2", 11),
    Mutant(Liveness, "_reject", welcomes_the_dead, "I2", 5),
    Mutant(Liveness, "_reject", welcomes_a_twin, "I2", 7),
    # Silence.
    Mutant(Job, "_check_silence", finds_nobody, "P5", 7),
    Mutant(suspicion._Probed, "bound_ms", gives_the_slow_no_time, "P5", SILENCE),
    Mutant(suspicion, "most_wait", loses_though_few_wait, "P5", SILENCE),
    Mutant(Job, "_sighting", judges_one_that_flaps, "P5", SILENCE),
    Mutant(Suspicion, "_is_due", probes_at_every_look, "P5", 0),
    Mutant(StopWatch, "stopped", takes_one_look_for_a_stop, "P5", 0),
    Mutant(StopWatch, "stopped", reports_no_stop, "transcript", SILENCE),
    Mutant(ReplicaGroupCore, "is_hung", comes_back_while_it_is_stopped, "transcript", SILENCE),
    Mutant(ReplicaGroupCore, "_looked_at", takes_a_stopped_rank_for_dead, "transcript", SILENCE),
    Mutant(GroupProgress, "waits_since_ms", believes_that_waits_run_on, "transcript", SILENCE),
    Mutant(Liveness, "silence", takes_silence_for_a_bad_link, "P5", SILENCE),
    # Who has to end, and who is refused: nobody by a lighthouse that fails, nor a sound one.
    Mutant(Liveness, "_reject", takes_a_redial_for_another, "I9", 11),
    Mutant(Liveness, "_reject", takes_whoever_is_known_for_another, "I9", 0),
    Mutant(Liveness, "_reject", takes_a_redial_for_an_older_one, "I9", 0),
    Mutant(SessionCore, "told_refused", gives_up_at_the_first_refusal, "transcript", "scenario_04_sessions"),
    Mutant(SessionCore, "told_refused", takes_time_for_a_proof_of_life, "I8", "scenario_04_sessions"),
    Mutant(Liveness, "_lose", takes_every_loss_for_a_death, "I9", 0),
    Mutant(lighthouse, "_clock_behind", believes_no_clock_but_its_own, "I9", "restart"),
    Mutant(ReplicaGroupCore, "_merge", takes_the_unknown_for_torn, "I8", 3),
    Mutant(TorchftCore, "any_alive", thinks_of_the_other_kind_all_the_time, "I9", 0),
    Mutant(Handshake, "_compare", gives_way_to_every_newcomer, "I8 I2", 37),
    Mutant(Job, "_refuse_ahead", lets_the_last_say_who_is_ahead, "I8", 0),
    Mutant(SessionCore, "told_refused", takes_an_older_lighthouse_for_the_end, "I8", 11, OLDER_WITH_STANDBY),
    Mutant(ReplicaGroupCore, "_disconnected", gives_a_rank_no_grace, "I8", 0),
    Mutant(ReplicaGroupCore, "_lost_message", names_nobody, "I9", 0),
    Mutant(ReplicaGroupCore, "tick", cuts_the_time_short, "I8", 27),
    Mutant(Trainer, "vote", ends_with_its_server, "I8", 42),
    # The quorum rule.
    Mutant(lighthouse, "reason_for_new_id", reuses_what_failed, "I2 I5", 0),
    Mutant(Job, "_ask_for_newest", asks_nobody, "transcript", "scenario_03_lighthouse_without_memory"),
    Mutant(Job, "_situation", waits_for_the_lost, "I6", 0),
    Mutant(Job, "_unchanged", stands_though_somebody_heals, "I3 I2 I6", 25),
    Mutant(quorum, "_majority", needs_no_majority, "I2", 0),
    Mutant(quorum, "_majority", takes_half_for_a_majority, "I2", 0),
    Mutant(quorum, "_majority", leaves_all_survivors_out, "I2", 9),
    Mutant(quorum, "_remaining_ms", waits_for_nobody_who_is_late, "P2", 0),
    Mutant(quorum, "_remaining_ms", waits_for_the_late_for_ever, "transcript", "slow_joiner"),
    Mutant(lighthouse, "decide", knows_no_fast_path, "P2", 0),
    Mutant(lighthouse, "decide", lets_in_who_never_heals, "transcript", "scenario_10_long_healing"),
    Mutant(lighthouse, "decide", needs_few_on_the_fast_path, "I2", 19),
    Mutant(lighthouse, "decide", needs_few_on_the_slow_path, "I2", 0),
    Mutant(Job, "_heals", waits_for_nobody_who_heals, "P2", 118),
    Mutant(Job, "_is_stalled", waits_for_who_receives_nothing, "transcript", "scenario_10_long_healing"),
    Mutant(Liveness, "hello", heals_no_more_after_a_redial, "P2", 767),
    Mutant(Job, "_formed", knows_its_own_ids_only, "I1", 68, WITHOUT_PROBES),
    Mutant(Job, "_refuse_ahead", lets_the_ahead_in, "I3", "scenario_12_foreign_states"),
    Mutant(Job, "_refuse_ahead", forgets_whom_it_leaves_out, "I3", 100_959, STANDING_WITH_LINKS),
    Mutant(quorum, "_lost_state", waits_for_no_state, "I3", 0),
    Mutant(Job, "_patience_ms", waits_no_longer_for_the_paused, "I3", "lost_state"),
    Mutant(Liveness, "_lose", takes_a_stop_for_a_death, "I3", "lost_state"),
    # The plan.
    Mutant(Recovery, "planned", offers_what_it_took_in_vain, "I3", "newcomer"),
    Mutant(assignment, "_holders", starts_from_any_state, "I3", 0),
    Mutant(assignment, "_holders", takes_the_unknown_for_the_same, "I3", 18),
    Mutant(Votes, "cast", asks_one_rank_whether_all_have_staged, "I5", 0),
    Mutant(StepRecovery, "_agree", loads_without_the_others, "P4", 0),
    # Joining: who belongs to a job.
    Mutant(Handshake, "_compare", compares_nothing, "P6", 17),
    Mutant(Job, "_precedence_of", believes_the_dead, "I6", 241),
    Mutant(SessionCore, "_open_newer", says_no_more_what_it_is_made_of, "P6", "scenario_06_members_that_differ"),
    Mutant(LighthouseCore, "any_alive", takes_both_kinds, "P6", 14),
    # Leaving.
    Mutant(Job, "_situation", waits_for_who_has_left, "I6", 0),
    Mutant(Job, "_release_left", takes_the_end_of_who_has_left_for_a_loss, "L1", 0),
    Mutant(Job, "_is_any_healing", releases_a_source_at_once, "transcript", "scenario_20_leaving"),
    Mutant(GracefulShutdown, "is_due", leaves_with_the_only_state, "transcript", "scenario_20_leaving"),
    # Hangs.
    Mutant(Progress, "is_hung", takes_waiting_for_hanging, "H1", 72),
    Mutant(Progress, "is_hung", takes_the_late_for_hung, "H1", 72),
    Mutant(Progress, "is_hung", excuses_no_first_step, "H1", 0),
    Mutant(Progress, "is_hung", never_sees_a_hang, "H2 transcript", "scenario_11_hangs"),
    Mutant(GroupProgress, "_now_of", takes_all_silence_for_work, "H1", 190),
    Mutant(SessionCore, "told_lost", comes_back_while_it_hangs, "H2", "scenario_11_hangs"),
    Mutant(SessionCore, "went_on", never_comes_back_from_a_hang, "I6", 0),
    Mutant(Job, "_last_holder", spares_nobody, "transcript", "last_holder"),
    Mutant(ReplicaGroupCore, "report", reports_what_was_formed, "transcript", "last_holder_without_memory"),
    Mutant(HangWatch, "stuck", needs_only_one_to_be_stuck, "H1", 0),
    Mutant(HangWatch, "stuck", never_sees_all_stuck, "H2 transcript", "scenario_11_hangs"),
    # Stragglers.
    Mutant(StragglerPolicy, "limit_ms", takes_a_small_excess_for_slow, "S1", 227, STRAGGLERS),
    Mutant(StragglerWatch, "_why_kept", leaves_anybody_out, "S2", 21, STRAGGLERS),
    Mutant(Job, "_quorum_context", counts_who_can_not_be_reached, "I6", 83, STRAGGLERS_WITH_LINKS),
    Mutant(Job, "_left_out", forms_with_whom_it_left_out, "S3 I6", 7, STRAGGLERS),
    Mutant(StragglerWatch, "_let_back", lets_back_at_once, "S4", 7, STRAGGLERS),
    Mutant(StragglerWatch, "_let_back", never_lets_back, "I6", 9, STRAGGLERS),
    Mutant(Job, "_left_out", leaves_the_last_holder_out, "S5 I6 I2 transcript", "stragglers"),
    Mutant(StragglerWatch, "_is_late", waits_for_every_step, "transcript", "stragglers"),
    Mutant(StragglerPolicy, "keeps_up_ms", forgives_at_the_limit, "transcript", "stragglers"),
    Mutant(StragglerPolicy, "pause_ms", pauses_no_longer, "transcript", "stragglers"),
    Mutant(StragglerWatch, "_lasts", judges_by_one_look, "transcript", "stragglers"),
    Mutant(StragglerWatch, "heard", remembers_how_slow_it_was, "transcript", "stragglers"),
    # The vote.
    Mutant(ReplicaGroupCore, "_merge", takes_rank_0_for_all, "I3", 0),
    Mutant(Votes, "__init__", counts_the_first_vote_for_all, "I5", 0),
    Mutant(Job, "_refuse_late", lets_the_late_train_on, "E1", "job_end"),
    Mutant(JobEnd, "look", ends_while_a_member_trains, "E1", "job_end"),
    Mutant(Liveness, "_since_ms", takes_everybody_for_a_new_run, "transcript", "job_end"),
    Mutant(Job, "_can_go_on", ends_while_a_lost_member_may_come_back, "E1", "job_end"),
    Mutant(Votes, "tick", leaves_open_votes_open, "transcript", "scenario_02_verdict"),
    Mutant(Trainer, "vote", takes_its_open_vote_for_the_verdict, "I5", 0),
    Mutant(Votes, "cast", changes_its_mind, "I5", "scenario_02_verdict"),
    Mutant(own_state, "fold_lineage", folds_no_quorum, "I3", 0),
    # Syncs in flight.
    Mutant(StepsInFlight, "_abandon_those_of_other_quorums", goes_on_in_another_quorum, "I3 F1", 7),
    Mutant(StepsInFlight, "aside_ended", lets_only_one_fail, "I5 I6 F1 I3", 0, WITH_SYNCS),
    Mutant(Starting, "step_started", reports_what_is_in_flight, "F1 I6", 7),
    Mutant(Starting, "step_started", says_again_what_failed, "I6", 28),
    Mutant(StepsInFlight, "begin", says_nothing_of_what_it_lost, "F1 I3", 56, WITH_SYNCS),
    Mutant(StepsInFlight, "without_quorum", says_nothing_of_what_it_never_heard, "transcript", SYNCS),
    Mutant(syncs, "fragment_of", counts_none_in_flight, "F1", 7),
    Mutant(Failures, "_noted", takes_what_it_has_got, "I3 I5", 0),
    Mutant(ReplicaGroupCore, "_repeated_answer", asks_the_lighthouse_again, "F1", SYNCS),
    # The step: who gives what, what fails it, what its verdict changes.
    Mutant(Starting, "_use_plan", builds_each_time, "I4", 0),
    Mutant(Ending, "_cast_vote", votes_in_spite_of_an_error, "I5", 0),
    Mutant(Ending, "_cast_vote", wishes_nothing, "transcript", "scenario_20_leaving"),
    Mutant(Ending, "verdict_arrived", commits_on_a_no, "I5", 0),
    Mutant(Attempt, "is_participating", counts_while_it_heals, "I3", 0),
    Mutant(reducing, "mean_factors", divides_by_the_members, "I3", 0),
    Mutant(Reducing, "_weight_part", weighs_what_it_does_not_give, "I3", 0),
    Mutant(StepsInFlight, "find", blames_the_newest, "I5 I3 F1", 19, WITH_SYNCS),
    Mutant(StepsInFlight, "abandon_all", lets_what_was_begun_later_go_on, "I5 I3 I6 F1", 0, WITH_SYNCS),
    Mutant(StepsInFlight, "give_up", gives_up_in_silence, "F1 I3 I6", 3, WITH_SYNCS),
    Mutant(StepsInFlight, "fail_own", fails_only_what_is_in_flight, "I3", 190),
    Mutant(StepsInFlight, "fail_deferred", keeps_what_is_in_flight, "transcript", SYNCS),
    # The step: states, losses, leaving.
    Mutant(StepRecovery, "exchange_asked", goes_on_unhealed, "I3 I6", 0),
    Mutant(StepRecovery, "state_torn", forgets_that_it_is_torn, "I3", 0),
    Mutant(own_state.OwnState, "compared", compares_with_nobody, "I3", 0, WITH_CHECKS),
    Mutant(own_state.OwnState, "healed", stays_torn, "I6", 0),
    Mutant(Losses, "_update_broken", breaks_nothing, "transcript", "scenario_08_notices"),
    Mutant(Losses, "add", breaks_by_any_loss, "transcript", "scenario_08_notices"),
    Mutant(StepState, "fatal_of", knows_no_lost_group, "I6 I5", 0),
    Mutant(GracefulShutdown, "serves_until_ms", serves_nobody_to_the_end, "transcript", "scenario_20_leaving"),
    Mutant(GracefulShutdown, "group_left", is_told_of_no_leaving, "transcript", "scenario_20_leaving"),
    Mutant(GracefulShutdown, "gives_up", never_gives_up, "transcript", "scenario_20_leaving"),
    # Several lighthouses; section 6, torchft's lighthouse.
    Mutant(SessionCore, "looked", follows_nobody, "I6", 0, WITH_STANDBY),
    Mutant(Job, "_starts_over", starts_over_at_once, "transcript", "nobody_names_the_quorum"),
    Mutant(LighthouseCore, "_is_superseded", serves_on_beside_a_newer_one, "transcript", "scenario_05_two_lighthouses"),
    Mutant(LighthouseCore, "_resumes_service", stands_in_at_the_first_word, "P1", 98, WITH_STANDBY),
    Mutant(compat_group, "_answer_digest", names_no_words, "I2 I4", 0, ON_FOREIGN),
    Mutant(compat_group, "unpack_member", looks_at_nothing_that_others_have_seen, "F1 I2", 48, ON_FOREIGN),
    Mutant(compat_group, "_list_digest", looks_at_no_list, "I2 I4", 19, ON_FOREIGN),
]


def first_failure(where: int | str | tuple[str, ...], config: SimulationConfig) -> Exception | None:
    """What fails first of what is looked at there; of a seed the failure, with its number."""
    if isinstance(where, tuple):
        world = LighthouseWorld("abc", start="trained")
        for choice in where:
            world.happen(choice)
        world.calm_down()
        return None
    if isinstance(where, str):
        written = (Path(__file__).parent / "transcripts" / f"{where}.txt").read_text()
        try:
            told = play(written)
        except ScenarioError as error:  # what the story waits for does not happen
            told = str(error)
        return None if told == written else InvariantError("transcript", where)
    for seed in range(where, where + SEEDS):
        try:
            simulate(seed, config)
        except SimulationError as failed:
            return failed
    return None


def is_run_anyway(seed: int, config: SimulationConfig) -> bool:
    """Whether `test_simulator.py` shows that the right cores pass that seed."""
    return seed < 1_000 and config == SimulationConfig()


@pytest.mark.in_parts
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mistake.__name__)
def test_a_mistake_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    right = inspect.getattr_static(mutant.target, mutant.name)
    mistake = property(mutant.mistake) if isinstance(right, property) else mutant.mistake
    monkeypatch.setattr(mutant.target, mutant.name, mistake)
    seen: Exception | None
    try:
        seen = first_failure(mutant.where, mutant.config)
    except InvariantError as broken:
        seen = broken
    cause = seen.cause if isinstance(seen, SimulationError) else seen
    assert isinstance(cause, InvariantError), "nobody saw it" if cause is None else repr(cause)
    assert cause.invariant in mutant.invariant.split(), cause
    monkeypatch.undo()
    if isinstance(seen, SimulationError) and not is_run_anyway(seen.seed, mutant.config):
        simulate(seen.seed, mutant.config)
