"""The invariants of the protocol, checked on everything that a simulated cluster does.

Weights are digests. The digest after a commit covers the weights before it and all gradients that went into the mean.
So two members with equal digests have applied the same gradients in the same order, each exactly once.

Law of this file: observe only. Nothing here changes what it observes. The first violation is raised.
Source: docs/architecture.md, "Invariants", and docs/protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tft_coord.core.step.values import Check
from tft_coord.core.types import Plan, Purpose, Quorum, QuorumKey, Verdict

_EQUAL_SETTINGS = ("init_sync", "allow_heal", "use_async_quorum", "fixed_with_spares", "min_replica_size", "data")


class InvariantError(AssertionError):
    """A violated invariant. `invariant` is its code.

    - `I1` to `I9`: the number in docs/architecture.md, "Invariants".
    - `P1`: a replica is lost without cause, or too late.
    - `P2`: a quorum leaves out a replica that it must wait for, or waits without need.
    - `P3`: the survivors of a loss take too long to go on.
    - `P4`: a group does not heal as a whole.
    - `P5`: a replica is lost for a second of silence without cause, or is not lost and must be.
    - `P6`: members differ in a setting that must be equal.
    - `L1`: a graceful leave costs the other members something.
    - `E1`: the end of a job is reported wrongly, or a replica trains on after it.
    - `H1`: a replica is taken to hang and does not. `H2`: a replica hangs and is not lost.
    - `F1`: syncs in flight break their rules. They start in one quorum and commit in that order. They fail with that
      quorum, and with the first of them that fails.
    - `R1`, `R2`: bad links delay a quorum for too long, or a quorum leaves out a replica without need.
    - `S1` to `S5`: stragglers are judged or treated wrongly.
    - `W1`: the word of a round means different things to different members.
    - `W2`: two quorums of a job make progress at once.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True)
class Held:
    """The state that one rank holds."""

    step: int
    lineage: int | None
    weights: str


@dataclass(frozen=True, slots=True)
class Round:
    """A vote or a recovery that a group agrees on.

    The lineage distinguishes a step from the same step after a state was loaded by hand. The attempt distinguishes one
    recovery from the next under the same key. The attempt of a commit is 0.
    """

    key: QuorumKey
    step: int
    lineage: int
    purpose: Purpose
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Contribution:
    """The input of one member to a reduction.

    Args:
        replica_id: of the member.
        before: state of the member before the reduction.
        gradient: digest of its gradient, or None for zeros.
        part: name of the reduced part, such as a bucket or a fragment.
        factor: multiplies the member's tensor before the sum.
        divide_by: divides the sum, in a mean without weights.
        weight: the member's share in the sum of weights, which divides the mean. None: the mean has no weights.
    """

    replica_id: str
    before: Held
    gradient: str | None
    part: str
    factor: float = 1.0
    divide_by: float = 1.0
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of one or several reductions, equal for every member that saw them end."""

    key: QuorumKey
    group_rank: int
    numbers: tuple[int, ...]
    gradients: tuple[str, ...]


class Invariants:
    """The invariants I1 to I5 of one job, over its whole life. (I6 belongs to the simulator, which has to stop the
    faults.)

    Args:
        initial_step: step at which the job's replicas start. Their states are not compared before its first commit.
        several_lighthouses: two lighthouses may form quorums at once, until all replicas have followed to the newer.
    """

    def __init__(self, *, initial_step: int = 0, several_lighthouses: bool = False) -> None:
        self.num_commits = 0
        self.newest_commit: tuple[int, int] = (0, 0)  # (step, members in the reduction)
        self._initial_step = initial_step
        self._several_lighthouses = several_lighthouses
        self._highest_id = 0
        self._members: dict[QuorumKey, tuple[str, ...]] = {}
        self._formed: set[QuorumKey] = set()
        self._plans: dict[tuple[QuorumKey, int, int, int], tuple[object, ...]] = {}
        self._groups: dict[tuple[QuorumKey, int], tuple[str, tuple[str, ...]]] = {}
        self._places: dict[tuple[QuorumKey, int, int], str] = {}
        self._states: dict[tuple[int, int, int], str] = {}
        self._lineages: dict[tuple[int, int], set[int]] = {}
        self._after: dict[tuple[Round, int], Held] = {}
        self._votes: dict[tuple[str, Round], dict[int, bool]] = {}
        self._verdicts: dict[tuple[str, Round], Verdict] = {}
        self._committed: set[tuple[str, int, Round]] = set()
        self._held_by: dict[str, QuorumKey] = {}
        self._left_with: dict[str, tuple[int, int | None]] = {}
        self._delivered: set[tuple[str, int, QuorumKey, int]] = set()
        # syncs in flight of each rank, oldest first
        self._in_flight: dict[tuple[str, int], list[tuple[QuorumKey, int]]] = {}
        self._words: dict[tuple[QuorumKey, int, int], bool] = {}  # meaning of the word, by round and group rank
        # ranks for which the word did not complete
        self._incomplete_words: set[tuple[str, int, QuorumKey, int]] = set()
        self._last_rounds: dict[QuorumKey, set[int]] = {}  # rounds agreed on after a newer quorum had committed
        self._newest_committed: QuorumKey | None = None
        self._twins: set[str] = set()
        self._unknown: frozenset[QuorumKey] = frozenset()  # quorums that a restarted lighthouse could not know of

    def lighthouse_started(self, wall_ms: int) -> bool:
        """Record that another lighthouse starts.

        Args:
            wall_ms: start time by the wall clock.
        Returns: whether the clock was set back so far that its first id may be below an id given before. I1 then starts
            afresh for the job. For the quorums of each replica it still holds, because each replica reports what it
            holds.
        """
        if wall_ms >= self._highest_id:
            return False
        self._highest_id = 0
        self._newest_committed = None
        return True

    # --- I1, I2 ---------------------------------------------------------------------------------------------------

    def formed(self, quorum: Quorum) -> None:
        """Check a quorum that a lighthouse reports as formed."""
        kinds = {(each.world_size, *(getattr(each, name) for name in _EQUAL_SETTINGS)) for each in quorum.members}
        if len(kinds) > 1:
            raise InvariantError("P6", f"quorum {quorum.key} has members of different settings: {kinds}")
        # Two lighthouses don't know each other's quorums. A replica that moves between them still sees ids rise
        # (`received`).
        if quorum.key.quorum_id <= self._highest_id and not self._several_lighthouses:
            raise InvariantError("I1", f"quorum {quorum.key} was formed after one with id {self._highest_id}")
        if quorum.key in self._formed:
            raise InvariantError("I1", f"key {quorum.key} was given twice")
        self._highest_id = quorum.key.quorum_id
        self._formed.add(quorum.key)

    def answered(self, replica_id: str, quorum: Quorum) -> None:
        """Check a quorum that a lighthouse gives to a replica."""
        if quorum.key not in self._formed:
            raise InvariantError("I1", f"{replica_id} receives quorum {quorum.key}, which was never formed")
        ids = quorum.replica_ids
        if list(ids) != sorted(set(ids)):
            raise InvariantError("I2", f"quorum {quorum.key} is out of order or has a member twice: {ids}")
        if replica_id not in ids:
            raise InvariantError("I2", f"{replica_id} receives quorum {quorum.key}, and is no member: {ids}")
        known = self._members.setdefault(quorum.key, ids)
        if known != ids:
            raise InvariantError("I2", f"quorum {quorum.key} was sent with members {known} and with members {ids}")

    def received(self, replica_id: str, key: QuorumKey) -> None:
        """Check an answer that has reached a replica. (An answer that was lost with its lighthouse reached no
        replica.)"""
        before = self._held_by.get(replica_id)
        if before is not None and key < before:
            raise InvariantError("I1", f"{replica_id} receives quorum {key} after the newer quorum {before}")
        self._held_by[replica_id] = key

    def manager_restarted(self, replica_id: str, held: QuorumKey | None) -> None:
        """Record that the replica's manager server was restarted: its ranks' last quorum counts only if they report
        it."""
        self._held_by.pop(replica_id, None)
        if held is not None:
            self._held_by[replica_id] = held

    def planned_from(self, plan: Plan, quorum: Quorum) -> None:
        """Check the plan that a manager server makes of a quorum: it starts at the highest step of a whole member."""
        highest = max(member.step for member in quorum.members if not member.torn)
        if plan.step != highest:
            raise InvariantError(
                "I3", f"{plan.replica_id} continues from step {plan.step} in {plan.key}, not from {highest}"
            )

    def planned(self, plan: Plan, group_rank: int, in_flight: int = 0) -> None:
        """Check a plan that a rank is given: its common part is equal for all members.

        Several plans may be of one step, if that many syncs of the same quorum are in flight.
        """
        common = (plan.replica_ids, plan.up_to_date, plan.participants, plan.min_replica_size)
        known = self._plans.setdefault((plan.key, plan.step, plan.lineage, in_flight), common)
        if known != common:
            raise InvariantError(
                "I2", f"two plans of quorum {plan.key} at step {plan.step}: {known} and {common} (rank {group_rank})"
            )
        if plan.heal == (plan.replica_rank in plan.up_to_date):
            raise InvariantError(
                "I3", f"the plan of {plan.replica_id} in {plan.key} makes it heal and a source, or neither"
            )

    # --- I4 -------------------------------------------------------------------------------------------------------

    def joined_group(self, plan: Plan, group_rank: int) -> None:
        """Check that ranks meet at one store per quorum, under a prefix made of the key and the group rank."""
        group_name = (plan.key, group_rank)
        claims = (plan.store_address, plan.replica_ids)
        known = self._groups.setdefault(group_name, claims)
        if known != claims:
            raise InvariantError("I4", f"two groups met under key {plan.key}, rank {group_rank}: {known} and {claims}")
        place = (plan.key, group_rank, plan.replica_rank)
        if place in self._places:
            raise InvariantError(
                "I4",
                f"{plan.replica_id} takes place {plan.replica_rank} in {plan.key}, as {self._places[place]} did",
            )
        self._places[place] = plan.replica_id

    # --- I3 -------------------------------------------------------------------------------------------------------

    def reduced(self, key: QuorumKey, group_rank: int, given: Mapping[str, Contribution]) -> None:
        """Check a reduction that all members have reached: all members with gradients have the same state."""
        counted = [contribution for contribution in given.values() if contribution.gradient is not None]
        states = {contribution.before for contribution in counted}
        if len(states) > 1:
            shown = ", ".join(f"{each.replica_id} at {each.before}" for each in counted)
            raise InvariantError(
                "I3", f"members with different states reduced together in quorum {key}, rank {group_rank}: {shown}"
            )

        parts = {contribution.part for contribution in given.values()}
        if len(parts) > 1:
            raise InvariantError(
                "I3", f"members reduced different parts together in quorum {key}, rank {group_rank}: {sorted(parts)}"
            )
        self._check_mean(key, group_rank, given.values())

    @staticmethod
    def _check_mean(key: QuorumKey, group_rank: int, given: Collection[Contribution]) -> None:
        """Check that the shares of the contributors add up to one, for every member."""
        where = f"the mean in quorum {key}, rank {group_rank}"
        weights = [each.weight for each in given if each.weight is not None]
        if len(weights) not in (0, len(given)):
            raise InvariantError("I4", f"{where}: only {len(weights)} of {len(given)} members gave a weight")
        total = sum(each.factor for each in given if each.gradient is not None)
        for each in given:
            divides = sum(weights) if weights else each.divide_by
            if total and abs(total / divides - 1.0) > 1e-9:
                raise InvariantError(
                    "I3", f"{where}: {each.replica_id} divides the sum of shares {total:g} by {divides:g}"
                )

    def delivered(self, replica_id: str, reduced: Reduced) -> None:
        """Record that a rank has received the result of a reduction."""
        for number in reduced.numbers:
            self._delivered.add((replica_id, reduced.group_rank, reduced.key, number))

    def check_state(self, replica_id: str, group_rank: int, held: Held) -> None:
        """Check a rank's state: equal step and lineage mean equal weights, on every rank and at every time."""
        if held.lineage is None or held.step <= self._initial_step:
            return
        name = (group_rank, held.step, held.lineage)
        self._lineages.setdefault((group_rank, held.step), set()).add(held.lineage)
        known = self._states.setdefault(name, held.weights)
        if known != held.weights:
            raise InvariantError(
                "I3",
                f"{replica_id} rank {group_rank} holds {held.weights} at step {held.step}, and others hold {known}",
            )

    def committed(self, replica_id: str, group_rank: int, vote: Round, num_members: int, after: Held) -> None:
        """Check and record that a rank's optimizer has stepped."""
        name = (replica_id, group_rank, vote)
        if name in self._committed:
            raise InvariantError("I5", f"{replica_id} rank {group_rank} steps its optimizer twice for {vote}")
        self._committed.add(name)
        verdict = self._verdicts.get((replica_id, vote))
        if verdict is None or not verdict.yes:
            raise InvariantError(
                "I5", f"{replica_id} rank {group_rank} steps its optimizer without a yes ({verdict}) for {vote}"
            )
        known = self._after.setdefault((vote, group_rank), after)
        if known != after:
            raise InvariantError("I3", f"{replica_id} has {after} after {vote}, and others have {known}")
        self.check_state(replica_id, group_rank, after)
        self.num_commits += 1
        newest = self._newest_committed
        if vote.key not in self._unknown and (newest is None or vote.key > newest):
            self._newest_committed = vote.key
        self.newest_commit = (vote.step, num_members)

    def applied(self, replica_id: str, group_rank: int, vote: Round, reduced: Reduced) -> None:
        """Check the reductions that a rank's optimizer has stepped with."""
        known = [(replica_id, group_rank, reduced.key, number) in self._delivered for number in reduced.numbers]
        if (replica_id, group_rank, vote.key, vote.step) in self._incomplete_words:
            raise InvariantError(
                "W1", f"{replica_id} rank {group_rank} commits {vote}, and the word of the round did not complete"
            )
        if reduced.key != vote.key or not all(known):
            raise InvariantError(
                "I5", f"{replica_id} rank {group_rank} steps its optimizer on a failed reduction in {vote}"
            )

    def twin_started(self, replica_id: str) -> None:
        """Record that two processes run under that id by mistake.

        A replacement for one of them reports its end, and the other goes on until it hears of that.
        """
        self._twins.add(replica_id)

    def started_over(self, quorum: Quorum, *, durable: bool) -> None:
        """Record the first quorum of a lighthouse that no replica names an earlier quorum to.

        Members of an earlier quorum that can't reach it go on until their lease expires. A lighthouse with a durable
        counter waits for that. Its ids are lower than theirs if its clock was set back.
        """
        self._unknown = frozenset() if durable else frozenset(self._formed - {quorum.key})
        self._newest_committed = None

    # --- standing quorums -----------------------------------------------------------------------------------------

    def word_completed(self, replica_id: str, group_rank: int, vote: Round, yes: bool | None) -> None:
        """Check that the word of a round means the same for all ranks for which it has completed.

        No two quorums of a job make progress at once. After a newer quorum has committed, an older one may end the
        current round, and begins no other.

        Args:
            replica_id: of the rank.
            group_rank: of the rank.
            vote: the round.
            yes: meaning of the word. None: it did not complete for this rank.
        """
        if yes is None:
            self._incomplete_words.add((replica_id, group_rank, vote.key, vote.step))
            return
        # A lone member may have gone back to an earlier step by hand.
        self._incomplete_words.discard((replica_id, group_rank, vote.key, vote.step))
        known = self._words.setdefault((vote.key, vote.step, group_rank), yes)
        if known != yes:
            raise InvariantError("W1", f"the word of {vote} means {yes} for {replica_id} and {known} for others")
        newest = self._newest_committed
        if replica_id in self._twins:
            return
        if vote.key in self._unknown:
            return
        if yes and newest is not None and vote.key < newest and not self._several_lighthouses:
            rounds = self._last_rounds.setdefault(vote.key, set())
            rounds.add(vote.step)
            if len(rounds) > 1:
                raise InvariantError(
                    "W2",
                    f"{replica_id} agrees on steps {sorted(rounds)} of {vote.key} after {newest} has committed",
                )

    # --- syncs in flight ------------------------------------------------------------------------------------------

    def sync_started(self, host: str, group_rank: int, key: QuorumKey, fragment: int) -> None:
        """Record that a rank starts a sync of that fragment."""
        in_flight = self._in_flight.setdefault((host, group_rank), [])
        if (key, fragment) in in_flight:
            raise InvariantError("F1", f"{host} rank {group_rank} has fragment {fragment} in flight twice in {key}")
        in_flight.append((key, fragment))

    def quorum_known(self, host: str, group_rank: int, key: QuorumKey) -> None:
        """Record that a rank is given a plan. Its syncs in flight of another quorum have failed then."""
        in_flight = self._in_flight.get((host, group_rank), [])
        if any(of != key for of, _ in in_flight):
            in_flight.clear()

    def syncs_discarded(self, host: str, group_rank: int) -> None:
        """Record that all syncs in flight of a rank are discarded: the oldest one's verdict is no, or the rank dropped
        all."""
        self._in_flight.pop((host, group_rank), None)

    def sync_committed(self, host: str, group_rank: int, key: QuorumKey, fragment: int) -> None:
        """Check that a rank commits its oldest sync in flight."""
        in_flight = self._in_flight.get((host, group_rank), [])
        if in_flight[:1] != [(key, fragment)]:
            raise InvariantError(
                "F1",
                f"{host} rank {group_rank} commits fragment {fragment} of {key}, not the oldest of {in_flight}",
            )
        del in_flight[0]

    def was_committed(self, vote: Round, group_rank: int) -> bool:
        """Return whether a member has committed that reduction."""
        return (vote, group_rank) in self._after

    def num_lineages(self, group_rank: int, step: int) -> int:
        """Return the number of different states that have been held at that step."""
        return len(self._lineages.get((group_rank, step), ()))

    def state_loaded(self, host: str, group_rank: int, staged: Round) -> None:
        """Check that a rank loads a fetched state only if all ranks of its group have fetched theirs."""
        verdict = self._verdicts.get((host, staged))
        if verdict is None or not verdict.yes:
            raise InvariantError("P4", f"{host} rank {group_rank} loads a state before all ranks have fetched theirs")

    # --- I5 -------------------------------------------------------------------------------------------------------

    def voted(self, replica_id: str, group_rank: int, vote: Round, yes: bool) -> None:
        """Check that a rank never changes its vote."""
        votes = self._votes.setdefault((replica_id, vote), {})
        if votes.setdefault(group_rank, yes) != yes:
            raise InvariantError("I5", f"{replica_id} rank {group_rank} changes its vote for {vote}")

    def left(self, replica_id: str, group_rank: int, held: Held, check: Check | None, *, torn: bool) -> None:
        """Check that all ranks of a group leave after the same step, unless their states are torn.

        A rank may not know its lineage, because it loaded its state by hand and no quorum came since. It may leave
        beside ranks that know theirs. `check`: its last comparison, which another rank may not have made.
        """
        if torn or held.lineage is None:
            return
        state = (held.step, check.before if check is not None and check.after == held.lineage else held.lineage)
        known = self._left_with.setdefault(replica_id, state)
        if known != state:
            raise InvariantError(
                "L1", f"{replica_id} rank {group_rank} leaves with {state}, and other ranks left with {known}"
            )

    def decided(self, replica_id: str, world_size: int, vote: Round, verdict: Verdict) -> None:
        """Check a verdict that a rank is given: yes only if all voted yes, and the same for all."""
        votes = self._votes.get((replica_id, vote), {})
        if verdict.yes and not (len(votes) == world_size and all(votes.values())):
            raise InvariantError("I5", f"{replica_id} receives a yes with votes {votes} for {vote}")
        if self._verdicts.setdefault((replica_id, vote), verdict) != verdict:
            raise InvariantError("I5", f"{replica_id} receives both a yes and a no for {vote}")
