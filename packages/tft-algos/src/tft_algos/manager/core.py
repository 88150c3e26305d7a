"""One replica's steps as a state machine: what to ask for, what a plan means, what to vote, what a verdict changes.

A step is a transaction. It starts when the trainer asks for a quorum, it lives under a plan, it ends with a verdict,
and only a yes changes the state: one step more, the participants added, the lineage folded. Everything that goes wrong
on the way is an error of exactly this attempt; what belongs to an earlier one comes too late to count.

A strategy that trains on while it reduces may put the open attempt aside and begin another. Those in flight together
belong to one quorum and end in the order in which they were begun. What is begun later builds on what is begun before:
so another quorum, or one no, fails all of them, here and at every other member.

Law of this file: decisions only. No tensors, no threads, no clock, no I/O; the caller tells what happened, in order,
and performs what is decided.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tft_algos.errors import HealingFailed, QuorumBroken, StateUnavailable, SyncAbandoned, UsageError
from tft_algos.manager.attempt import Attempt, StepName
from tft_coord.core.lineage import checked_lineage, fold_lineage, initial_lineage
from tft_coord.core.types import MAX_INT64, LossNotice, Plan, QuorumKey, RankRequest, Unreached
from tft_coord.errors import GroupLost, StaleQuorum

MAX_NOTICES_KEPT: Final = 1024
FIRST_PAUSE_MS: Final = 10
LONGEST_PAUSE_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What the decisions depend on; the same on every rank of a group. Fields as in ManagerConfig."""

    job: str = "default"
    min_replica_size: int = 1
    use_async_quorum: bool = True
    fixed_with_spares: bool = False
    init_sync: bool = True
    max_retries: int | None = None


class Phase(enum.Enum):
    """Where the attempt is."""

    IDLE = "idle"  # before the first start_quorum, and after a verdict
    ASKED = "asked"  # a quorum was asked for
    PLANNED = "planned"  # the plan is known
    FAILED = "failed"  # there is no quorum for this attempt


class Healing(enum.Enum):
    """How far this attempt's healing is."""

    NONE = "none"
    FETCHING = "fetching"
    LOADED = "loaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a plan asks of the shell.

    Args:
        plan: as it stands for this attempt.
        configure: build the process group for its key.
        heal: fetch its reference from its sources.
        serve: take a snapshot for those that heal.
    """

    plan: Plan
    configure: bool
    heal: bool
    serve: bool


@dataclass(frozen=True, slots=True)
class Check:
    """What the last look at the user's state did to the lineage, here or at the source that this rank healed from.

    Args:
        step: at which it was.
        before, after: the lineage.
    """

    step: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Vote:
    """What this rank votes, and why.

    Args:
        name: of the attempt.
        yes: the vote.
        enough_replicas: there are min_replica_size participants.
        error: first error of the attempt, or None.
    """

    name: StepName
    yes: bool
    enough_replicas: bool
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verdict changed.

    Args:
        committed: the optimizer steps.
        failures: attempts in a row that did not commit.
        exhausted: they exceed max_retries.
    """

    committed: bool
    failures: int
    exhausted: bool


class StepCore:
    """The state of one rank between and within its steps.

    Args:
        settings: see `CoreSettings`.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self.step = 0
        self.batches_committed = 0
        self.lineage: int | None = initial_lineage(settings.job)
        self.live = False
        self.torn = False
        self.commit_failures = 0
        self.failed_quorums = 0
        self.is_left_out = False  # as a straggler: no quorum comes, and that is no failure
        self.failed_heals = 0
        self.held: QuorumKey | None = None
        self.configured: QuorumKey | None = None
        self._standing: Plan | None = None  # of the key that is held
        self.phase = Phase.IDLE
        self.verdict: bool | None = None
        self.healing = Healing.NONE
        self._attempt = Attempt(StepName(attempt=0, step=0))  # the one begun last
        self._deferred: list[Attempt] = []  # in flight beside it, oldest first; those that have not failed with others
        self._failure_is_news = False  # the last failed commit came after the key that is held
        # Reductions in which the others may still wait, in the group that is configured, or steps that they have begun.
        self._left_others = False
        self.lost_flights = 0  # in a row, that failed because there was another quorum
        self.is_asynchronous = settings.use_async_quorum  # this attempt: a member that heals gives zeros in it
        self._group_lost: GroupLost | None = None
        self._notices: list[LossNotice] = []  # of the quorum that is held, and of those that are still to come
        self.divergences = 0  # checks in a row at which this replica's state was not that of the others
        self.check: Check | None = None
        self._looked_at_step = 0
        self._diverged_at_step = 0

    # --- whether all hold the same state ---------------------------------------------------------------------------

    def check_is_due(self, every: int) -> bool:
        """Whether the user's state is to be looked at before the next request: once a step, whatever fails in it.

        Args:
            every: steps between two looks; 0: none.
        """
        due = every > 0 and self.step > 0 and self.step % every == 0 and self._looked_at_step != self.step
        return due and self.lineage is not None

    def state_checked(self, state_digest: bytes | None) -> None:
        """It was looked at, and becomes part of the lineage, so that the plan heals who holds another one.

        Args:
            state_digest: of the whole group's state; None: a rank could not give its own. Then the lineage stays, and
                this group heals from those that could.
        """
        self._looked_at_step = self.step
        if state_digest is not None:
            assert self.lineage is not None, "a check of a state without a lineage"
            self.check = Check(self.step, self.lineage, checked_lineage(self.lineage, state_digest))
            self.lineage = self.check.after

    def diverged_from(self, source: Mapping[str, Any]) -> bool:
        """Whether this rank heals because a check told its state from the source's, not because it missed a commit.

        Args:
            source: its `snapshot_state`.
        """
        own, theirs = self.check, _check_of(source)
        if own is None or theirs is None or self.torn:
            return False
        if (own.step, own.before) != (theirs.step, theirs.before) or own.after == theirs.after:
            return False
        if own.step > self._diverged_at_step:
            self._diverged_at_step = own.step
            self.divergences += 1
        return True

    # --- asking --------------------------------------------------------------------------------------------------

    def quorum_started(
        self,
        *,
        checkpoint_metadata: str,
        group_usable: bool,
        allow_heal: bool = True,
        shrink_only: bool = False,
        use_async_quorum: bool | None = None,
        poor_sources: tuple[str, ...] = (),
        unreached: tuple[Unreached, ...] = (),
    ) -> RankRequest:
        """A new attempt begins; what an earlier one left open is over.

        Args:
            checkpoint_metadata: where this rank's live state can be fetched.
            group_usable: the process group has not failed since it was configured.
            allow_heal, shrink_only, use_async_quorum: as in `Manager.start_quorum`.
            poor_sources: replicas that hung, lied or were slow when this one healed from them.
            unreached: peers that this rank could not reach since its last request.
        Returns: the request to send to the manager server.
        """
        # After an error of its own this rank may have left out reductions in which the others still wait. Those of an
        # attempt that is in flight they do not wait for before its end, and others in flight may end well before that.
        last = self._attempt
        left_others = self._left_others or (
            last not in self._deferred and last.plan is not None and last.own_error is not None
        )
        self._attempt = Attempt(StepName(attempt=self.name.attempt + 1, step=self.step + len(self._deferred)))
        self.is_asynchronous = self._settings.use_async_quorum if use_async_quorum is None else use_async_quorum
        self.phase = Phase.ASKED
        self.verdict = None
        self.healing = Healing.NONE
        return RankRequest(
            step=self.step,
            lineage=self.lineage,
            live=self.live,
            torn=self.torn,
            held=self.held,
            checkpoint_metadata=checkpoint_metadata,
            # Said once, where others are in flight that were begun since: each time it is said the id rises, and fails
            # them.
            commit_failures=self.commit_failures if self._failure_is_news or not self._deferred else 0,
            # Without a key there is nothing that could be unusable: the first plan configures.
            needs_configure=self.held is not None
            and not (group_usable and self.configured == self.held and not self.losses and not left_others),
            failed_heals=self.failed_heals,
            poor_sources=poor_sources,
            shrink_only=shrink_only,
            init_sync=self._settings.init_sync,
            allow_heal=allow_heal,
            use_async_quorum=self.is_asynchronous,
            fixed_with_spares=self._settings.fixed_with_spares,
            min_replica_size=self._settings.min_replica_size,
            attempt=self.name.attempt,
            unreached=unreached,
        )

    def quorum_failed(self, error: Exception, *, others_go_on: bool = False) -> None:
        """Nobody gave a plan. The attempt can't commit, nor can those in flight, because nobody knows whether their
        quorum stands; the next one asks afresh.

        Args:
            error: why.
            others_go_on: the other members begin the next step before they have ended this one, as strategies do that
                put steps aside. They may have been given the plan, and would have one more in flight than this rank.
        """
        if self.phase is Phase.ASKED:
            self.phase = Phase.FAILED
            self._fail_deferred(error)
            self._left_others = self._left_others or others_go_on
        self._attempt.note(error)

    def plan_arrived(self, plan: Plan) -> Arrival:
        """The whole answer.

        Returns: what to do about it. The group is never configured twice under one key: its rendezvous was used.
        """
        self._failure_is_news = self._failure_is_news and plan.key == self.held
        self.held = plan.key
        if not plan.heal and plan.step == self.step and self.lineage is None and plan.replica_rank in plan.up_to_date:
            # A state loaded without a lineage gets the one that this quorum gives to whoever heals from it.
            self.lineage = plan.lineage
        return self._arrived(plan)

    def unchanged_arrived(self, key: QuorumKey) -> Arrival:
        """The short answer: the quorum of that key stands, everyone in it is at this rank's step, nobody heals.

        Returns: as `plan_arrived`.
        Raises: StaleQuorum: this rank does not hold that quorum. Nothing has changed then.
        """
        before = self._standing
        if before is None or before.key != key or self.lineage is None:
            raise StaleQuorum(
                f"the answer names quorum {key} and this rank holds {self.held}; the next step asks again"
            )
        everyone = tuple(range(before.replica_world_size))
        needed = self._settings.min_replica_size
        counted = everyone[:needed] if self._settings.fixed_with_spares else everyone
        own = before.replica_rank
        plan = replace(
            before,
            step=self.step,
            lineage=self.lineage,
            heal=False,
            sources=(),
            recover_dst_replica_ranks=(),
            serve=False,
            up_to_date=everyone,
            participants=counted,
            participating_rank=counted.index(own) if own in counted else None,
            min_replica_size=needed,
            commit_failures=0,
        )
        return self._arrived(plan)

    def _arrived(self, plan: Plan) -> Arrival:
        self._notices = [notice for notice in self._notices if notice.key >= plan.key]
        self.is_left_out = False
        self._attempt.plan = self._standing = plan
        self._abandon_those_of_other_quorums(plan.key)
        self._attempt.name = StepName(self.name.attempt, self.step + len(self._deferred), plan.key)
        self.phase = Phase.PLANNED
        if plan.heal:
            self.healing = Healing.FETCHING
        elif self.check is not None and self._diverged_at_step < self.check.step == self.step:
            self.divergences = 0 if plan.replica_rank in plan.up_to_date else self.divergences
        return Arrival(
            plan=plan,
            configure=self.configured != plan.key,
            heal=plan.heal,
            serve=plan.serve,
        )

    def group_configured(self) -> None:
        """The process group is built for the plan's key."""
        self.configured = self.held
        self._left_others = False

    def configure_failed(self, error: Exception) -> None:
        """It is not; the next request says so, and the id rises."""
        self.configured = None
        self._attempt.note(error)

    # --- losses of others ----------------------------------------------------------------------------------------

    def loss_noticed(self, notice: LossNotice) -> bool:
        """A member of a quorum was lost.

        A notice that comes before its quorum is kept for it; one of a quorum that is over, or one that was heard
        already, in whatever words, changes nothing. Where they are too many, those of the newest quorums are dropped.

        Returns: whether that breaks the quorum that is held: what runs in it must be aborted.
        """
        if (self.held is not None and notice.key < self.held) or _identity(notice) in map(_identity, self._notices):
            return False
        self._notices = sorted([*self._notices, notice], key=lambda kept: kept.key)[:MAX_NOTICES_KEPT]
        return notice.key == self.held

    @property
    def losses(self) -> tuple[LossNotice, ...]:
        """What has broken the quorum that is held; empty while it stands."""
        return tuple(notice for notice in self._notices if notice.key == self.held)

    @property
    def broken(self) -> QuorumBroken | None:
        """Why nothing can be started in the quorum that is held, or None."""
        for notice in self.losses:
            return QuorumBroken(f"{notice}; the next step asks for another", replica_id=notice.replica_id)
        return None

    def server_restarted(self) -> None:
        """A new manager server speaks for this group; it holds no quorum, so neither does this rank."""
        self.held = None
        self.configured = None
        self._standing = None

    @property
    def pause_ms(self) -> int:
        """How long to wait before asking again, milliseconds.

        One failure is a peer's death, and the next attempt is what everybody waits for. What fails again and again
        fails as fast as it is tried, and would keep a core busy with it.
        """
        again = self.commit_failures + self.failed_quorums - 2
        return 0 if again < 0 else min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS << min(again, 16))

    # --- errors --------------------------------------------------------------------------------------------------

    def error_reported(self, error: Exception, name: StepName | None = None) -> bool:
        """Something of an attempt failed.

        Args:
            error: what.
            name: the attempt it belongs to; None for the one that is open.
        Returns: whether it counts; False if it comes too late, for an attempt that is over.
        """
        attempt = self._open_attempt(name)
        if attempt is None:
            return False
        attempt.note(error)
        return True

    def _open_attempt(self, name: StepName | None) -> Attempt | None:
        """The one of that name; None: the one that is open. None if it is over."""
        opened = [] if self.phase is Phase.IDLE else [self._attempt]
        for attempt in opened if name is None else [*opened, *self._deferred]:
            if name is None or attempt.name.attempt == name.attempt:
                return attempt
        return None

    def group_lost(self, error: GroupLost) -> None:
        """This replica group was lost, for this and every attempt to come."""
        self._group_lost = self._group_lost or error
        attempt = self._open_attempt(None)
        if attempt is not None:
            attempt.note(error)

    def fatal_of(self, attempt: Attempt) -> Exception | None:
        """Why this process can't go on with it, and with nothing else; or None."""
        if isinstance(attempt.fatal, GroupLost):
            return self._group_lost or attempt.fatal  # the manager server knows which rank was lost
        return attempt.fatal or self._group_lost

    @property
    def fatal(self) -> Exception | None:
        """The first error with which this process can't go on, however many others came before it; or None."""
        return self.fatal_of(self._attempt)

    @property
    def errors(self) -> tuple[Exception, ...]:
        """Of this attempt, first first."""
        return self._attempt.errors

    @property
    def error(self) -> Exception | None:
        """The first error of this attempt."""
        return self._attempt.error

    # --- the attempt that was begun last -------------------------------------------------------------------------

    @property
    def name(self) -> StepName:
        """Of the attempt that was begun last, whether it is open or not."""
        return self._attempt.name

    @property
    def plan(self) -> Plan | None:
        """Its plan."""
        return self._attempt.plan

    @property
    def is_abandoned(self) -> bool:
        """It has failed with others that were in flight, so nobody votes on it."""
        return self._attempt.abandoned is not None

    # --- several in flight ---------------------------------------------------------------------------------------

    @property
    def num_deferred(self) -> int:
        """Attempts in flight beside the one that is open, that may still commit."""
        return len(self._deferred)

    def defer(self) -> Attempt:
        """Put the open attempt aside: it goes on beside later ones, and ends before them.

        Returns: it; for `vote_on` and `verdict_on`.
        Raises: UsageError: no attempt is open.
        """
        if self.phase is Phase.IDLE:
            raise UsageError(
                "defer was called outside a step; call it after start_quorum, when its reductions have begun"
            )
        attempt, self.phase = self._attempt, Phase.IDLE
        if attempt.abandoned is None:
            self._deferred.append(attempt)
        return attempt

    def is_oldest(self, attempt: Attempt) -> bool:
        """Whether it ends next."""
        return bool(self._deferred) and self._deferred[0] is attempt

    def is_in_flight(self, attempt: Attempt) -> bool:
        """Whether it may still commit."""
        return attempt in self._deferred

    def _fail_deferred(self, error: Exception) -> None:
        """For a reason of this rank's own, which the group's other ranks may not share: it votes no on the oldest. And
        which the other members do not: they have theirs in flight."""
        for attempt in self._deferred:
            attempt.note(error)
            self._left_others = self._left_others or attempt.plan is not None

    def _abandon_those_of_other_quorums(self, key: QuorumKey) -> None:
        others = [attempt for attempt in self._deferred if attempt.plan is None or attempt.plan.key != key]
        for attempt in others:
            self._deferred.remove(attempt)
            attempt.abandon(
                SyncAbandoned(
                    f"{attempt.name} was in flight when quorum {key} came; all that are in flight fail with it"
                )
            )
        self.failed_quorums += sum(attempt.plan is None for attempt in others)
        self.lost_flights += any(attempt.plan is not None for attempt in others)

    def give_up(self, error: Exception) -> None:
        """As `abandon_all`, but the other members have theirs in flight still: the next request breaks the quorum."""
        self._left_others = self._left_others or bool(self._deferred)
        if self.phase is not Phase.IDLE:
            self._attempt.note(error)  # its plan may come yet, and others begin by it
        self.abandon_all(error)

    def abandon_all(self, error: Exception) -> None:
        """Nothing that is in flight can commit any more, the open one included, as all ranks of the group know."""
        for attempt in self._deferred:
            attempt.abandon(error)
        self._deferred.clear()
        if self.phase is not Phase.IDLE:
            self._attempt.abandon(error)
            self._left_others = self._left_others or self.plan is not None

    # --- participation -------------------------------------------------------------------------------------------

    @property
    def num_participants(self) -> int:
        """Members whose gradients count in this step; 0 before the first quorum."""
        return self.plan.num_participants if self.plan is not None else 0

    @property
    def participating_rank(self) -> int | None:
        """This group's place among the participants, or None."""
        return self.plan.participating_rank if self.plan is not None else None

    @property
    def is_participating(self) -> bool:
        """Whether this group's gradients count. A synchronous member counts once its healing has succeeded."""
        return self.participating_rank is not None and self.healing in (Healing.NONE, Healing.LOADED)

    # --- healing -------------------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether the others of this plan wait in the rendezvous for this rank, which has failed there by itself.

        They are told once this rank asks again. Until then no source comes to the end of its step, where it serves.
        """
        return self.plan is not None and self.configured != self.plan.key and self.broken is None

    def heal_failed(self, error: Exception, *, by_source: bool = True) -> None:
        """The state could not be fetched by every rank of the group; nothing was loaded.

        Args:
            error: why.
            by_source: it may be the sources' fault, so the next quorum names others first.
        """
        self.healing = Healing.FAILED
        self.failed_heals += by_source
        self._attempt.note(error)

    def load_began(self) -> None:
        """From here to `healed` this rank's state is neither the old nor the new one."""
        self.torn = True

    def healed(self, state: Mapping[str, Any]) -> None:
        """The reference was loaded, whole.

        Args:
            state: the source's `snapshot_state`.
        """
        plan = self._needed_plan()
        self.step = plan.step
        self.lineage = plan.lineage
        self.batches_committed = int(state["batches_committed"])
        self.live = True
        self.torn = False
        self.failed_heals = 0
        self.commit_failures = self.lost_flights = 0
        self.healing = Healing.LOADED
        self.check = _check_of(state)
        self._looked_at_step = self.step
        self._attempt.name = replace(self.name, step=self.step + len(self._deferred))

    def snapshot_state(self) -> dict[str, Any]:
        """This Manager's part of what a healing member fetches."""
        plan = self._needed_plan()
        return self._state_of(plan.step, plan.lineage)

    def boundary_state(self) -> dict[str, Any]:
        """The same where the plan is not known yet; fits the plan whose reference is this rank's own step and lineage.

        To be asked where the lineage is known.
        """
        assert self.lineage is not None, "the state of a boundary without a lineage"
        return self._state_of(self.step, self.lineage)

    def _state_of(self, step: int, lineage: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "step": step,
            "batches_committed": self.batches_committed,
            "lineage": f"{lineage:016x}",
        }
        if self.check is not None:
            state["check"] = [self.check.step, f"{self.check.before:016x}", f"{self.check.after:016x}"]
        return state

    def check_staged(self, state: Mapping[str, Any]) -> None:
        """Raises: HealingFailed: what was fetched is another state than the plan's reference."""
        plan = self._needed_plan()
        wanted = {"step": plan.step, "lineage": f"{plan.lineage:016x}"}
        got = {name: state.get(name) for name in wanted}
        if got != wanted or not isinstance(state.get("batches_committed"), int):
            raise HealingFailed(
                f"the fetched state says {got} and the plan {wanted}; it was dropped, and the next quorum tries again",
                sources=tuple(source.replica_id for source in plan.sources),
            )

    # --- the vote ------------------------------------------------------------------------------------------------

    def vote(self) -> Vote:
        """What to vote, now that everything of this attempt has ended.

        Raises: UsageError: no attempt is open.
        """
        if self.phase is Phase.IDLE:
            raise UsageError("should_commit was called without a start_quorum before it; call start_quorum first")
        return self.vote_on(self._attempt)

    def vote_on(self, attempt: Attempt) -> Vote:
        """The same for one that was put aside."""
        plan = attempt.plan
        # The plan's number is this group's own, save at step 0, where who heals would never count otherwise.
        enough = plan is not None and plan.num_participants >= plan.min_replica_size
        return Vote(attempt.name, enough and attempt.error is None, enough, attempt.error)

    def verdict_arrived(self, yes: bool) -> Outcome:
        """The group has decided; the attempt is over.

        Args:
            yes: what all ranks of the group were told, or False where there was no quorum to vote in.
        """
        planned, self.phase = self.phase is Phase.PLANNED, Phase.IDLE
        self.verdict = yes
        return self._ended(self._attempt, yes, planned=planned)

    def verdict_on(self, attempt: Attempt, yes: bool) -> Outcome:
        """The same for one that was put aside, the oldest or one that has failed with others.

        A no fails all that were begun after it, the open one included; and none of them is voted on.
        """
        if self.phase is Phase.IDLE:
            self.verdict = yes  # of what is reduced between two steps
        if attempt in self._deferred:
            self._deferred.remove(attempt)
            if not yes:
                left_others = attempt.plan is not None and attempt.own_error is not None
                self._left_others = self._left_others or left_others
                self.abandon_all(
                    SyncAbandoned(f"{attempt.name} was not committed; all that were in flight with it fail with it")
                )
        return self._ended(attempt, yes, planned=attempt.plan is not None)

    def _ended(self, attempt: Attempt, yes: bool, *, planned: bool) -> Outcome:
        plan = attempt.plan
        if yes and plan is not None:
            self.step += 1
            self.batches_committed += plan.num_participants
            if self.lineage is not None:
                self.lineage = fold_lineage(self.lineage, plan.key, self.step)
            self.live = True
            self.commit_failures = self.failed_quorums = self.lost_flights = 0
        elif attempt.abandoned is not None:
            pass  # counted once, with what it failed with
        elif planned:
            self.commit_failures += 1
            self._failure_is_news = True
        elif not self.is_left_out:
            self.failed_quorums += 1
        failures = self.commit_failures + self.failed_quorums + self.lost_flights
        limit = self._settings.max_retries
        return Outcome(yes, failures, limit is not None and failures > limit)

    def optimizer_raised(self) -> None:
        """The step was committed and the optimizer did not finish: this rank's state is half written."""
        self.torn = True

    # --- the state itself ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int | str]:
        """For a durable checkpoint: step, batches_committed, and lineage as 16 hexadecimal digits if it is known."""
        state: dict[str, int | str] = {"step": self.step, "batches_committed": self.batches_committed}
        lineage = self.lineage
        if self.check is not None and lineage == self.check.after:
            lineage = self.check.before  # whoever loads it looks at it anew, at this very step
        if lineage is not None:
            state["lineage"] = f"{lineage:016x}"
        return state

    def state_loaded(self, state: Mapping[str, Any]) -> None:
        """A state from outside this job, such as a durable checkpoint, was loaded.

        Raises: StateUnavailable: it is no state of a Manager. Nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise StateUnavailable(
                f"a Manager's state is a dict, and this one is {type(state).__name__}; give what state_dict() returned"
            )
        step, batches, lineage = state.get("step"), state.get("batches_committed"), state.get("lineage")
        counts_are_right = all(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in (step, batches)
        )
        if not counts_are_right or step > MAX_INT64 or batches > MAX_INT64:  # type: ignore[operator]  # checked
            raise StateUnavailable(
                f"a Manager's state has the whole numbers step and batches_committed, and this one has {dict(state)}"
            )
        if lineage is not None:
            try:
                lineage = int(str(lineage), 16)
            except ValueError:
                lineage = -1
            if not 0 <= lineage < 2**64:
                raise StateUnavailable(
                    f"a Manager's lineage is 16 hexadecimal digits, and this state has {state['lineage']!r}"
                )
        self.step = int(step)  # type: ignore[arg-type]  # checked above
        self.batches_committed = int(batches)  # type: ignore[arg-type]
        self.lineage = lineage
        self.check = None
        self._looked_at_step = self._diverged_at_step = self.divergences = 0
        self.live = False
        self.torn = False
        if self._deferred:
            self._fail_deferred(
                StateUnavailable(f"the state of step {self.step} was loaded while syncs were in flight; they fail")
            )

    def _needed_plan(self) -> Plan:
        assert self.plan is not None, "asked about a plan's reference without a plan"
        return self.plan


def _check_of(state: Mapping[str, Any]) -> Check | None:
    """The last check that a source's `snapshot_state` tells of; None if it tells of none, or of nothing readable."""
    try:
        step, before, after = state["check"]
        return Check(int(step), int(before, 16), int(after, 16))
    except (KeyError, TypeError, ValueError):
        return None


def _identity(notice: LossNotice) -> tuple[QuorumKey, str, int, bool]:
    """What it tells; the reason is a sentence for people."""
    return notice.key, notice.replica_id, notice.session, notice.lives
