"""A rank of a simulated replica group, as the parts of its trainer see it, and its surroundings.

Law of this file: the state of a rank, and what its parts do with it. `trainer.py` performs the step core's orders.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Protocol

from tft_coord.core.progress import Progress
from tft_coord.core.step import Effects, StepCore, StepSettings, StepStatus
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan, QuorumKey, RankRequest, Unreached, Verdict, Via
from tft_coord.timeouts import Timeouts
from tft_sim.clock import VirtualClock
from tft_sim.config import Chance, TrainerSettings
from tft_sim.group import SimulatedGroup
from tft_sim.invariants import Held, Invariants, Round
from tft_sim.marks import Marks
from tft_sim.training_process import TrainingProcess
from tft_sim.waiting import Life, Refused, Waiter, answer_of

# These effects run beside the training thread. The thread that reports an event performs them at once.
BACKGROUND_EFFECTS = (
    do.Fetch,
    do.EndFetch,
    do.RefuseState,
    do.UsePlan,
    do.ForgetPace,
    do.BreakQuorum,
    do.EndQuorum,
    do.GoOn,
    do.ReportLateLoss,
    do.BreakAll,
    do.AbortGroup,
    do.RecordCommit,
    do.ReportError,
    do.ReportNoQuorum,
    do.ReportGroupLost,
    do.ReportAbandoned,
    do.ReportTooFew,
    do.ReportHealed,
    do.ReportHealFailed,
    do.HealAgain,
    do.WarnLateState,
    do.ReportLeft,
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's live state at a step boundary: the key under which it is offered, and the core's part of it."""

    key: QuorumKey
    held: Held
    own: dict[str, Any]


class Source(Protocol):
    """What a rank gives to those that heal from it: a snapshot, and the plan whose state it could not give."""

    @property
    def snapshot(self) -> Snapshot | None: ...
    @property
    def refuses(self) -> Plan | None: ...


@dataclass(frozen=True, slots=True)
class SentBeat:
    """A beat of a trainer to its manager server, with two facts that the manager server can't know.

    The facts are the time when the beat was sent, and the start of the phase that it reports.
    """

    progress: Progress
    sent_ms: int
    since_ms: int
    number: int = 0  # of the beat, if it wants an answer


class Surroundings(Protocol):
    """The surroundings of a rank; see `surroundings.Outside`."""

    @property
    def clock(self) -> VirtualClock: ...
    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def invariants(self) -> Invariants: ...
    @property
    def marks(self) -> Marks: ...
    @property
    def chance(self) -> Chance: ...
    @property
    def name(self) -> str: ...
    def own_ms(self) -> int: ...
    def ask(self, trainer: Rank, request: RankRequest, deadline_ms: int) -> Waiter: ...
    def leave(self, trainer: Rank, order: do.TellLeaving) -> Waiter: ...
    def is_healed_from(self, trainer: Rank) -> bool: ...
    def report_late(self, trainer: Rank, key: QuorumKey, step: int) -> None: ...
    def vote(self, trainer: Rank, vote: Round, yes: bool, *, leaving: bool = False, stands: bool = False) -> Waiter: ...
    def group(self, key: QuorumKey, group_rank: int, members: tuple[str, ...], store: str) -> SimulatedGroup: ...
    def is_unreachable(self, trainer: Rank, replica_id: str) -> bool: ...
    def is_silent(self, trainer: Rank, replica_id: str) -> bool: ...
    def source(self, trainer: Rank, replica_id: str) -> Source | None: ...
    def is_received_from(self, trainer: Rank, key: QuorumKey) -> bool: ...
    def gather(self, trainer: Rank, name: str, value: str) -> Waiter: ...
    def received(self, trainer: Rank, num_bytes: int) -> None: ...
    def hangs(self, trainer: Rank) -> None: ...
    def note(self, trainer: Rank, text: str) -> None: ...
    def ended(self, trainer: Rank, reason: str, answer: Refused | None = None) -> None: ...


class Rank(TrainingProcess, abc.ABC):
    """The state of one rank of a replica group.

    Args:
        job, replica_id, rank: its identity.
        settings: of the job.
        outside: its surroundings.
        host: its host, if another process runs under that replica id.
    """

    def __init__(
        self,
        job: str,
        replica_id: str,
        rank: int,
        world_size: int,
        settings: TrainerSettings,
        outside: Surroundings,
        *,
        host: str = "",
    ) -> None:
        self.core = StepCore(
            StepSettings(
                replica_id=replica_id,
                rank=rank,
                world_size=world_size,
                job=job,
                min_replica_size=settings.min_replica_size,
                use_async_quorum=settings.use_async_quorum,
                fixed_with_spares=settings.fixed_with_spares,
                init_sync=settings.init_sync,
                check_every=settings.check_every,
                heals_divergence=settings.heals_divergence,
                heals_over_group=settings.heals_over_group,
                lease_ms=outside.timeouts.lease_ms if settings.speaks else None,
                timeouts=outside.timeouts,
            )
        )
        super().__init__(f"{host or replica_id}/{rank}", outside.clock, self.core, outside.marks, outside.timeouts)
        self.replica_id = replica_id
        self.host = host or replica_id
        self.rank = rank
        self.world_size = world_size
        self.settings = settings
        self.outside = outside
        # A state loaded from outside doesn't know its lineage. A fresh trainer has its own random weights.
        first = f"random/{self.name}" if settings.init_sync else f"seeded/{rank}"
        self.weights = f"loaded{settings.run}/{rank}" if settings.step > 0 else first
        if settings.step > 0:
            self.core.handle(on.StateLoaded({"step": settings.step, "batches_committed": 0}), outside.own_ms())
        self.unreached: dict[tuple[str, Via], Unreached] = {}  # bad links found since its last request
        self.group: SimulatedGroup | None = None
        self.group_since_ms = 0
        self.num_reductions = 0  # number of reductions in this group
        self.left_out = False  # left out as a straggler
        self.fingerprint = settings.fingerprint(world_size)
        # What a script may demand of the next step. Random faults use the first of these.
        self.gives_up_after_ms: int | None = None
        self.shrink_only = False
        self.fails_once = False
        self.tears_once = False
        self.corrupts_once = False  # its memory is wrong at the next comparison of states
        self.restarts_strategy = False  # its strategy ends, and is entered again
        self.ends_early = False  # its loop ends between two steps after a request to leave
        self.save_once = False  # it saves its state in a durable checkpoint
        self.saved: tuple[str, dict[str, int | str]] | None = None  # weights, and the core's part
        self.loads_step: int | None = None
        self.loads_inside = False  # the load happens inside a step
        self.finishes_at: int | None = None  # the step that ends its training
        self.late_ms = 0
        self.share = 1.0  # its share of the batch

    # --- what others see --------------------------------------------------------------------------------------------

    @property
    def status(self) -> StepStatus:
        """Return the core's status of its step."""
        return self.core.status

    @property
    def step(self) -> int:
        """Return the number of its committed steps."""
        return self.core.status.step

    @property
    def lineage(self) -> int | None:
        """Return the lineage of its state. None: unknown."""
        return self.core.status.lineage

    @property
    def live(self) -> bool:
        """Return whether its state was committed or fetched in this job."""
        return self.core.status.live

    @property
    def torn(self) -> bool:
        """Return whether its state is incomplete."""
        return self.core.status.torn

    @property
    def held(self) -> QuorumKey | None:
        """Return the quorum that it was given last."""
        return self.core.status.held

    @property
    def num_requests(self) -> int:
        """Return the number of attempts that it has begun."""
        return self.core.status.name.attempt

    @property
    def asked_to_leave(self) -> bool:
        """Return whether it was told to leave."""
        return self.core.status.wishes

    @property
    def left(self) -> bool:
        """Return whether it has left."""
        return self.core.status.left

    @property
    def finished_step(self) -> int | None:
        """Return the step that ended its training, or None while it trains."""
        return self.step if self.finishes_at is not None and self.step >= self.finishes_at else None

    @property
    def state_held(self) -> Held:
        """Return its state, for comparison."""
        status = self.core.status
        return Held(status.step, status.lineage, self.weights)

    def _hang_began(self) -> None:
        self.outside.hangs(self)

    def note(self, text: str) -> None:
        """Report an event to the transcript."""
        self.outside.note(self, text)

    def mark(self, name: str) -> None:
        """Hit a coverage mark."""
        self.outside.marks.hit(name)

    # --- the core ---------------------------------------------------------------------------------------------------

    def report(self, event: on.Event) -> Effects:
        """Report an event to the core, and perform the effects that run beside the training thread.

        Returns: the other effects, in order.
        """
        effects = self.core.handle(event, self.outside.own_ms())
        if not effects:
            return effects
        rest = []
        for effect in effects:
            if isinstance(effect, BACKGROUND_EFFECTS):
                self._perform(effect)
            else:
                rest.append(effect)
        return tuple(rest)

    @abc.abstractmethod
    def _perform(self, effect: do.Effect) -> None:
        """Perform an effect that needs no answer."""

    # --- the group and the manager server ---------------------------------------------------------------------------

    def leave_group(self) -> None:
        """Abort the process group."""
        group, self.group = self.group, None
        if group is not None:
            group.leave(self.replica_id)

    def note_unreached(self, group: SimulatedGroup) -> None:
        """Keep the bad links found in that group, for the next request."""
        for report in group.unreached_by(self.replica_id):
            self.record_unreached(report)

    def record_unreached(self, report: Unreached) -> None:
        """Keep that report for the next request."""
        if (report.replica_id, report.via) not in self.unreached:
            self.mark(f"a member was not reached: {report.via.value}")
            if report.why == "no word":
                self.mark("a link lost the word of a round")
            self.note(f"can't reach {report.replica_id} ({report.via.value})")
            self.unreached[report.replica_id, report.via] = report

    def vote(self, vote: Round, yes: bool, *, leaving: bool = False, stands: bool = False) -> Life:
        """Return the verdict. A rank without a verdict ends, unless it is the only rank of its group."""
        self.phase = vote.purpose.value
        verdict = yield self.outside.vote(self, vote, yes, leaving=leaving, stands=stands)
        if isinstance(verdict, Verdict):
            return verdict
        if verdict.fatal and leaving and verdict.code == "group_lost":
            self.mark("a rank that leaves lost its group during the vote")
            return Verdict(yes=False, leaves=True)
        if verdict.fatal:
            yield from self.quit(f"vote: {verdict.code}", verdict)
        # The manager server of a group of one rank died with the vote open, which counts as a no.
        self.mark("an open vote was taken for a no")
        self.note("counts its unanswered vote as a no")
        self.report(on.ServerRestarted())
        return Verdict(yes=False)

    def raises(self, error: Exception) -> Life:
        """End this process with an error that is raised in the training loop."""
        answer = answer_of(error)
        yield from self.quit(answer.code, answer)

    def quit(self, reason: str, answer: Refused) -> Life:
        """End this process."""
        self.outside.ended(self, reason, answer)
        yield Waiter()  # waits for ever
