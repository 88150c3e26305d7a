"""A model of one training process: the Manager's step, small and exact, without tensors.

Weights are a digest, a gradient is a name, a process group is a meeting of those who were configured with one key. The
model does what design.md section 5 says a step does, in that order, and nothing else; it is here so that the cores are
tried by trainers that behave, and that die, hang and lose their way as real ones do.

Law of this file: one rank's step and what it meets others in (groups, snapshots). The cluster around it is
`simulator.py`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tft_coord.core.fingerprint import Fingerprint, fingerprint_of
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.standing import Ask, GoOn, Late, Standing
from tft_coord.core.standing import State as Stand
from tft_coord.core.stragglers import StragglerNews
from tft_coord.core.suspicion import WAITS_MS
from tft_coord.core.types import (
    LossNotice,
    Plan,
    Purpose,
    QuorumKey,
    QuorumNews,
    RankRequest,
    Refusal,
    Unreached,
    Verdict,
    Via,
)
from tft_coord.timeouts import Timeouts
from tft_sim.clock import VirtualClock
from tft_sim.invariants import Contribution, Held, InvariantBroken, Invariants, Reduced, Round
from tft_sim.links import FAILS_AFTER_MS, Links
from tft_sim.marks import Marks
from tft_sim.pace_truth import OwnTime
from tft_sim.process import Process, State
from tft_sim.stretches import Stretches
from tft_sim.words import Words

if TYPE_CHECKING:
    from tft_sim.syncs import Syncs

NUM_BUCKETS = 2  # reductions in a step: what one death tears between
POLL_MS = 50
HEAL_CHUNKS = 4
SOURCE_SILENT_MS = 1_000  # then another source is asked
ABORT_AFTER_MS = 50  # a reduction that has its data can end
LINGER_MS = 1_000  # so long one that leaves keeps its process group, for its last word
LEAVE_WITHIN_MS = 10_000  # so long one that was told to leave stays or serves for others' sake
OUTSIDE = ("start", "between steps")
OWN = ("forward", "optimizer")
PHASES = {
    **dict.fromkeys(OWN, Phase.OWN),
    "reduction": Phase.REDUCING,
    **dict.fromkeys(OUTSIDE, Phase.OUTSIDE),
}
Hanging = Literal["forward", "optimizer"]  # where in its step a trainer hangs


class Waiter:
    """Something that a process waits for: resolved once, with a value."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self._then: list[Callable[[Any], None]] = []

    def resolve(self, value: Any) -> None:
        """Give it its value; later values are ignored."""
        if self.done:
            return
        self.done = True
        self.value = value
        then, self._then = self._then, []
        for action in then:
            action(value)

    def then(self, action: Callable[[Any], None]) -> None:
        """Let `action` happen with the value."""
        if self.done:
            action(self.value)
        else:
            self._then.append(action)


Life = Generator[Waiter, Any, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """A call failed. `fatal`: this process can only end."""

    code: str
    message: str = ""
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's live state as it was at a step boundary, with the manifest that says which."""

    key: QuorumKey
    held: Held


# --- the process group ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reduction:
    given: dict[str, Contribution] = field(default_factory=dict)
    waiting: dict[str, Waiter] = field(default_factory=dict)
    complete: bool = False


class Group:
    """The meeting of the ranks that were configured with one (key, group rank).

    Its traffic is of the network: across a cut nothing is reduced, and nobody hears that another has left. Each two of
    its members need a link; who finds that one is bad gives up, and can say whom it did not reach.

    Args:
        key, group_rank: what names it.
        members: replica ids that belong to it.
        clock, invariants: of the simulation.
        spread_ms: gives the time after which a member learns that a reduction is complete.
        is_cut: whether nothing comes through between two of the members.
        links: between the members; all work unless given.
        store: of the member whose rendezvous store is used.
    """

    def __init__(
        self,
        key: QuorumKey,
        group_rank: int,
        members: tuple[str, ...],
        clock: VirtualClock,
        invariants: Invariants,
        spread_ms: Callable[[], int],
        is_cut: Callable[[str, str], bool],
        links: Links | None = None,
        store: str = "",
    ) -> None:
        self.key = key
        self._group_rank = group_rank
        self._members = members
        self._clock = clock
        self._invariants = invariants
        self._spread_ms = spread_ms
        self._is_cut = is_cut
        self._links = links or Links()
        self._store = store
        self._unreached: dict[str, list[Unreached]] = {}
        self._is_timed = False  # a bad link is about to be found out
        self._joined: dict[str, Waiter] = {}
        self._met = False
        self._left: set[str] = set()
        self._reductions: dict[int, _Reduction] = {}
        self.sticks = False  # by a fault of the network's, no reduction ends
        self._words = Words(members, clock, spread_ms, self._carries_words, self._note_no_word)

    def join(self, replica_id: str) -> Waiter:
        """Configure: resolves to True when all members are here."""
        waiter = Waiter()
        if self._met or replica_id in self._left:
            waiter.resolve(False)
            return waiter
        if self._links.is_bad(replica_id, self._store, Via.STORE):
            report = Unreached(self._store, Via.STORE, "no connection")
            self._unreached.setdefault(replica_id, []).append(report)
            self._clock.after(FAILS_AFTER_MS, lambda: waiter.resolve(False))
            return waiter
        self._joined[replica_id] = waiter
        self.look()
        return waiter

    def unreached_by(self, replica_id: str) -> list[Unreached]:
        """Whom that member has found that it can't reach."""
        return self._unreached.get(replica_id, [])

    def abort(self, replica_id: str) -> None:
        """End that member's own waiting, in the rendezvous or in a reduction."""
        self._words.abort(replica_id)
        waiting = [reduction.waiting.get(replica_id) for reduction in self._reductions.values()]
        for waiter in (self._joined.get(replica_id), *waiting):
            if waiter is not None:
                waiter.resolve(None)

    def leave(self, replica_id: str) -> None:
        """Abort, shut down or die: who has met here can't go on without that member."""
        self._left.add(replica_id)
        if self._met:
            self.look()
        else:
            self._joined.pop(replica_id, None)

    def reduce(self, number: int, contribution: Contribution) -> Waiter:
        """Reduce: resolves to `Reduced` when all members have reached it, to None when it fails.

        When all have, each learns it a little later; a member that is torn away in between fails it for those who
        have not learned it yet. So one member may commit what another has lost.
        """
        waiter = Waiter()
        reduction = self._reductions.setdefault(number, _Reduction())
        reduction.waiting[contribution.replica_id] = waiter
        if self._misses(contribution.replica_id):
            waiter.resolve(None)
        else:
            reduction.given[contribution.replica_id] = contribution
            self.look()
        return waiter

    def exchange_word(self, step: int, replica_id: str, values: Sequence[int]) -> Waiter:
        """Exchange the word of a round: resolves to the sum, to None when it fails for this member."""
        waiter = Waiter()
        if self._misses(replica_id):
            waiter.resolve(None)
        else:
            self._words.exchange(step, replica_id, values, waiter)
        return waiter

    @property
    def word_has_passed(self) -> bool:
        """Whether every member that waits for a word has it."""
        return self._words.has_passed()

    def _carries_words(self, one: str, other: str) -> bool:
        cut = self._is_cut(one, other) or self._is_cut(other, one)
        return not cut and not self._links.loses_word(one, other, self._group_rank)

    def _note_no_word(self, replica_id: str, other: str) -> bool:
        """A link that loses words is found out; across a cut everything waits."""
        lost = self._links.loses_word(replica_id, other, self._group_rank)
        if lost and other not in self._left:
            self._unreached.setdefault(replica_id, []).append(Unreached(other, Via.GROUP, "no word"))
        return lost

    def look(self) -> None:
        """Somebody came, left, or can be reached again: what does that end?"""
        self._words.look(self._misses)
        self._look_at_links()
        if not self._met and self._all_joined and not self._is_torn_apart():
            self._met = True
            for waiter in list(self._joined.values()):
                waiter.resolve(True)
        for number, reduction in list(self._reductions.items()):
            for replica_id, waiter in list(reduction.waiting.items()):
                if not waiter.done and self._misses(replica_id):
                    waiter.resolve(None)
            if reduction.complete:
                if all(waiter.done for waiter in reduction.waiting.values()):
                    self._reductions.pop(number, None)  # whoever heard of it may have looked in between
            elif len(reduction.given) == len(self._members) and not self._is_torn_apart() and not self.sticks:
                self._complete(number, reduction)

    def _complete(self, number: int, reduction: _Reduction) -> None:
        reduction.complete = True
        self._invariants.reduced(self.key, self._group_rank, reduction.given)
        gradients = tuple(sorted(each.gradient for each in reduction.given.values() if each.gradient is not None))
        result = Reduced(self.key, self._group_rank, (number,), gradients)
        for replica_id, waiter in reduction.waiting.items():
            self._clock.after(self._spread_ms(), partial(self._deliver, replica_id, waiter, result))

    def _deliver(self, replica_id: str, waiter: Waiter, result: Reduced) -> None:
        if not waiter.done:
            self._invariants.delivered(replica_id, result)
            waiter.resolve(result)

    def _misses(self, replica_id: str) -> bool:
        """Whether that member sees that another one has left."""
        return any(gone == replica_id or not self._is_cut(gone, replica_id) for gone in self._left)

    def _is_torn_apart(self) -> bool:
        return bool(self._bad_links()) or any(self._is_cut(one, other) for one, other in combinations(self._members, 2))

    # --- bad links --------------------------------------------------------------------------------------------------

    @property
    def _all_joined(self) -> bool:
        return len(self._joined) == len(self._members)

    def _bad_links(self) -> list[tuple[str, str]]:
        if not self._links.bad:
            return []
        return [pair for pair in permutations(self._members, 2) if self._links.is_bad(*pair, Via.GROUP)]

    def _look_at_links(self) -> None:
        """Where all have come, or reduce, each that uses a bad link finds out after a while."""
        used = self._all_joined if not self._met else any(not each.complete for each in self._reductions.values())
        if used and not self._is_timed and self._bad_links():
            self._is_timed = True
            self._clock.after(FAILS_AFTER_MS, self._links_fail)

    def _links_fail(self) -> None:
        self._is_timed = False
        found: dict[str, list[Unreached]] = {}
        for one, other in self._bad_links():
            if other not in self._left and one not in self._left:
                found.setdefault(one, []).append(Unreached(other, Via.GROUP, "no connection"))
        waits: list[Waiter] = []
        for one, reports in found.items():
            waiting = [each.waiting.get(one) for each in self._reductions.values() if not each.complete]
            waiting += [self._joined.get(one)] if not self._met else []
            open_now = [waiter for waiter in waiting if waiter is not None and not waiter.done]
            if open_now:
                self._unreached[one] = reports
            waits += open_now
        for waiter in waits:
            waiter.resolve(None)


# --- the trainer ----------------------------------------------------------------------------------------------


class Surroundings(Protocol):
    """What a trainer finds outside: its manager server, the groups, the snapshots of others."""

    @property
    def clock(self) -> VirtualClock:
        """Of the simulation."""

    @property
    def timeouts(self) -> Timeouts:
        """Of the job."""

    @property
    def invariants(self) -> Invariants:
        """Of the simulation."""

    @property
    def marks(self) -> Marks:
        """Of the simulation."""

    def own_ms(self) -> int:
        """What the trainer's own clock says, by which its lease counts."""

    def ask(self, trainer: Trainer, request: RankRequest) -> Waiter:
        """Ask the manager server; resolves to a Plan, to a QuorumKey (unchanged), or to Refused."""

    def vote(self, trainer: Trainer, vote: Round, yes: bool, *, leaving: bool = False, stands: bool = False) -> Waiter:
        """Vote, with the wish to leave or without; resolves to the Verdict, or to Refused."""

    def say_late(self, trainer: Trainer, late: Late) -> None:
        """Tell the manager server that a round waits for a member for longer than `join_timeout`."""

    def leave(self, trainer: Trainer) -> Waiter:
        """Leave the job; resolves when the manager server has taken it, or to Refused."""

    def is_healed_from(self, trainer: Trainer) -> bool:
        """Whether this group has not been told yet that nobody heals from it."""

    def group(self, key: QuorumKey, group_rank: int, members: tuple[str, ...], store: str) -> Group:
        """The meeting of that name, at the store of that member."""

    def is_unreachable(self, trainer: Trainer, replica_id: str) -> bool:
        """Whether that replica's state servers can't be reached."""

    def is_silent(self, trainer: Trainer, replica_id: str) -> bool:
        """Whether that replica's state servers accept and send nothing."""

    def snapshot_of(self, trainer: Trainer, replica_id: str, group_rank: int) -> Snapshot | None:
        """What that rank serves, if it can be reached."""

    def received(self, trainer: Trainer, num_bytes: int) -> None:
        """Bytes of state came in; travels with the beats."""

    def step_ms(self, trainer: Trainer) -> int:
        """How long a forward and backward pass takes."""

    def chunk_ms(self, trainer: Trainer) -> int:
        """How long a chunk of a transfer takes."""

    def optimizer_raises(self, trainer: Trainer) -> bool:
        """Whether the optimizer raises after this commit."""

    def load_raises(self, trainer: Trainer) -> bool:
        """Whether a function that loads what was fetched raises, on a rank of a group of several."""

    def hangs(self, trainer: Trainer) -> None:
        """The trainer hangs, or is stopped inside its step, from now on."""

    def ended(self, trainer: Trainer, reason: str, answer: Refused | None = None) -> None:
        """The trainer ends itself; `answer` is what it was refused with, if it does not do so by itself."""

    def note(self, trainer: Trainer, text: str) -> None:
        """For whoever tells the story."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How a job's trainers are set; the same for all of them.

    Args:
        use_async_quorum, init_sync, fixed_with_spares, min_replica_size: as in Member.
        step: at which it starts; more than 0 is a state loaded from outside.
        run: of which it was loaded; other runs have other weights.
        num_fragments: into which the model is split that is synchronized now and then; 0: gradients, in every step.
        most_in_flight: syncs that run at a time.
        speaks: trainers exchange a word at the end of each round; how long they go on without asking is the job's
            `lease_ms`.
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

    def fingerprint(self, world_size: int) -> Fingerprint:
        """What a rank says that it is made of."""
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


class Trainer(Process):
    """One rank of a replica group.

    Args:
        job, replica_id, rank: who it is.
        settings: of the job.
        outside: what it works with.
        host: where it runs, if another process runs under that replica id.
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
        self._phase = "start"
        self.says_long_wait: Callable[[], None] = lambda: None  # to its manager server, out of turn
        self.phase_since_ms = outside.clock.now_ms
        self.stopped_since_ms = 0  # the last time
        self.is_seen_running = False  # by its kernel, though it says nothing
        self.excused = True
        self.busy = Stretches()  # with its own work, in a step that is not excused, or stopped
        self.reducing = Stretches()  # in one reduction
        self.own_time = OwnTime()
        super().__init__(f"{host or replica_id}/{rank}", outside.clock)
        self.replica_id = replica_id
        self.host = host or replica_id
        self.rank = rank
        self.world_size = world_size
        self.step = settings.step
        # A state loaded from outside doesn't know its lineage; a fresh one has its own random weights.
        loaded = settings.step > 0
        self.lineage: int | None = None if loaded else initial_lineage(job)
        first = f"random/{self.name}" if settings.init_sync else f"seeded/{rank}"
        self.weights = f"loaded{settings.run}/{rank}" if loaded else first
        self.live = False
        self.torn = False
        self.commit_failures = 0
        self.failed_heals = 0
        self.poor_sources: set[str] = set()
        self.unreached: dict[tuple[str, Via], Unreached] = {}  # since its last request
        self._reported: frozenset[tuple[str, Via]] = frozenset()  # of these, what its open request says
        self.needs_configure = True
        self.held: QuorumKey | None = None
        self.plan: Plan | None = None
        self.standing = Standing(outside.timeouts)
        self._unfit = ""  # why it can't go on without asking, though its quorum stands
        self.group: Group | None = None
        self.group_since_ms = 0
        self.num_requests = 0
        self.snapshot: Snapshot | None = None
        self.healed_before = False  # in the step before this one
        self._hang: Waiter | None = None
        self.syncs: Syncs | None = None  # it synchronizes now and then, and not in every step
        # What a script may ask of the next step; random faults use the first.
        self.gives_up_after_ms: int | None = None
        self.shrink_only = False
        self.is_silent_source = False  # its state server accepts, and sends nothing
        self.fails_once = False
        self.tears_once = False
        self.snapshots_late = False
        self.loads_step: int | None = None
        self.leaving_since_ms: int | None = None  # it was told to leave
        self.left = False
        self.finishes_at: int | None = None  # its training is over with that step
        self.late_ms = 0
        self.share = 1.0  # of its batch
        self.will_hang: Hanging | None = None
        self.settings = settings
        self._fingerprint = settings.fingerprint(world_size)
        self.outside = outside
        self._life: Life | None = None
        self.num_reductions = 0
        self._received_bytes = 0
        self._refused: set[str] = set()
        self._silent_ms: dict[str, int] = {}  # since when sources of this transfer have sent nothing
        self._newcomer = ""  # who asked, as a hint says that nothing has come of yet
        self._early: Held | None = None  # its state at the boundary, taken on such a hint
        self._notices: list[LossNotice] = []
        self._fetches: tuple[Plan, Waiter] | None = None  # the chunk that is on its way, and of which plan

    @property
    def state_held(self) -> Held:
        """Its state, for comparison."""
        return Held(self.step, self.lineage, self.weights)

    # --- where it is ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Where in its step it is, one word."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        if self._phase in (*OWN, "between steps"):
            self.own_time.passed(self.clock.now_ms - self.phase_since_ms)
        self._phase = name
        self.phase_since_ms = self.clock.now_ms
        self._note_stretches(anew=True)
        since_ms = self.clock.now_ms
        if self.progress_phase in (Phase.WAITING, Phase.REDUCING):
            self.after(WAITS_MS, lambda: self._say_if_waits(since_ms))
        if self.settings.speaks and name in ("reduction", "word"):
            self.after(self.outside.timeouts.join_timeout_ms, lambda: self._say_if_late(since_ms))

    def _say_if_waits(self, since_ms: int) -> None:
        if self.phase_since_ms == since_ms and self.progress_phase in (Phase.WAITING, Phase.REDUCING):
            self.says_long_wait()

    def _say_if_late(self, since_ms: int) -> None:
        now_ms, waits_ms = self.outside.own_ms(), self.clock.now_ms - since_ms
        late = self.standing.late(now_ms, now_ms - waits_ms) if self.phase_since_ms == since_ms else None
        if late is not None:
            self.outside.marks.hit("a standing round was late")
            self.outside.note(self, f"says that step {late.step + 1} waits for a member for too long")
            self.outside.say_late(self, late)

    def _note_stretches(self, *, anew: bool = False) -> None:
        if not self.alive:
            return  # a stopped one whose host is gone stays silent, whoever would wake it up
        now_ms, stopped = self.clock.now_ms, self.state is State.STOPPED
        inside = self._phase not in OUTSIDE
        self.busy.now((stopped and inside) or (self._phase in OWN and not self.excused), now_ms)
        self.reducing.now(self._phase == "reduction", now_ms, anew=anew)

    def hold_lock(self) -> None:
        """It holds its interpreter's lock until `resume`: it says and hears nothing, and its kernel sees it run."""
        self.stop()
        self.is_seen_running = True

    def stop(self) -> None:
        """SIGSTOP; to the others as if it held its interpreter's lock, but for whoever asks the kernel."""
        self.is_seen_running = False
        was_running = self.state is State.RUNNING
        super().stop()
        self._note_stretches()
        if was_running:
            self.stopped_since_ms = self.clock.now_ms
            asks = self.syncs is not None and self.syncs.asks
            if self._phase in (*OWN, "reduction") and not self.excused and not asks:
                self.outside.hangs(self)

    def resume(self) -> None:
        """SIGCONT."""
        super().resume()
        self._note_stretches()

    @property
    def progress_phase(self) -> Phase:
        """Where in its step it is, as its beats tell it."""
        return PHASES.get(self._phase, Phase.WAITING)

    def progress(self) -> Progress:
        """What its beats tell."""
        return Progress(
            step=self.plan.step if self.plan is not None else self.step,
            phase=self.progress_phase,
            since_ms=self.clock.now_ms - self.phase_since_ms,
            excused=self.excused,
            slowest_step_ms=self.outside.timeouts.slowest_step_ms,
            own_ms=self.own_time.median_ms,
        )

    def told_of_its_pace(self, news: StragglerNews) -> None:
        """What the lighthouse says of its pace; a share that is told is taken from the next step on."""
        if news.sentence:
            self.outside.note(self, f"hears of its pace: {news.kind.name}")
        self.share = news.share

    @property
    def hangs(self) -> bool:
        """Whether it does, for ever unless `wake` is called."""
        return self._hang is not None and not self._hang.done

    def wake(self) -> None:
        """If it hangs or would, it does no more."""
        self.will_hang = None
        if self._hang is not None:
            self._hang.resolve(None)

    # --- running ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to train."""
        self._life = self._train()
        self._go_on(None)

    def end(self, *, vanish: bool = False) -> None:
        """Killed, or gone with its host."""
        if not self.alive:
            return
        super().end(vanish=vanish)
        if not vanish:  # nobody is told anything by a host that is gone
            self.leave_group()

    def leave_group(self) -> None:
        """Abort the process group."""
        if self.group is not None:
            self.group.leave(self.replica_id)
            self.group = None
        self.needs_configure = True

    def noticed(self, notice: LossNotice) -> None:
        """A member of a quorum was lost."""
        if self.held is not None and notice.key < self.held:
            self.outside.marks.hit("a notice came after the next quorum")
            self.outside.note(self, "hears of a loss in an older quorum")
            return
        if notice in self._notices:
            self.outside.marks.hit("a notice came twice")
            self.outside.note(self, "hears of the same loss again")
            return
        self._notices.append(notice)
        self.standing.broke(notice.key)
        if notice.key != self.held:
            self.outside.marks.hit("a notice overtook its quorum")
            self.outside.note(self, "hears of a loss in a quorum that it does not hold yet")
            return
        self.outside.marks.hit(f"a notice came in: {self.phase}")
        self.outside.note(self, f"hears of a loss in its quorum ({self.phase})")
        self.after(ABORT_AFTER_MS, lambda: self._abort(notice.key))

    def told_of_quorum(self, news: QuorumNews) -> None:
        """The manager server says which quorum is the newest."""
        before = self.standing.state
        breaks = self.standing.told(news)
        if news.beat and news.age_ms > 2 * self.outside.timeouts.beat_interval_ms:
            self.outside.marks.hit("an answer to an old beat came to a rank")
        if self.standing.state is Stand.RECALLED is not before:
            self.outside.marks.hit("a standing rank was recalled")
            self.outside.note(self, "is told to ask after its next word")
        if breaks and self.held is not None:
            self.outside.marks.hit("the newest quorum broke the one that was held")
            self.outside.note(self, f"hears that its quorum is over ({self.phase})")
            key = self.held
            self.after(ABORT_AFTER_MS, lambda: self._abort(key))

    def heard_of_newcomer(self, replica_id: str) -> None:
        """Somebody asks who will heal."""
        self._newcomer = replica_id

    def _abort(self, key: QuorumKey) -> None:
        """End what runs in that quorum; another one is not touched."""
        if self._fetches is not None and self._has_no_source(self._fetches[0]):
            self._fetches[1].resolve(None)
        if self.group is None or self.group.key != key:
            return
        self.outside.note(self, "aborts what runs in its broken quorum")
        # Whoever waits in the group itself is told by it; who has lost nothing but a neighbour's answer is not.
        self.group.abort(self.replica_id)
        self.leave_group()

    def is_broken(self, key: QuorumKey) -> bool:
        broke = self.standing.key == key and self.standing.state is Stand.BROKEN
        return broke or any(notice.key == key for notice in self._notices)

    def _has_no_source(self, plan: Plan) -> bool:
        return all(self._is_lost_in(plan.key, source.replica_id) for source in plan.sources)

    def _is_lost_in(self, key: QuorumKey, replica_id: str) -> bool:
        return any((each.key, each.replica_id, each.lives) == (key, replica_id, False) for each in self._notices)

    def _go_on(self, value: Any) -> None:
        assert self._life is not None
        try:
            waiter = self._life.send(value)
        except StopIteration:
            return
        waiter.then(lambda result: self.run(lambda: self._go_on(result)))

    def sleep(self, delay_ms: int) -> Waiter:
        waiter = Waiter()
        self.after(delay_ms, lambda: waiter.resolve(None))
        return waiter

    def within(self, waiter: Waiter, timeout_ms: int) -> Waiter:
        """The same, but None when the time-out passes first."""
        timer = self.clock.after(timeout_ms, lambda: waiter.resolve(None))
        waiter.then(lambda _: timer.cancel())
        return waiter

    def quit(self, reason: str, answer: Refused) -> None:
        self.phase = f"ended: {reason}"
        self.outside.ended(self, reason, answer)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Somebody tells it to leave: it does, after the running step."""
        if self.leaving_since_ms is None:
            self.outside.note(self, "is told to leave")
            self.leaving_since_ms = self.clock.now_ms

    def wishes_to_leave(self, plan: Plan | None) -> bool:
        """The last holder of the state waits until others hold it too, for a while."""
        if self.leaving_since_ms is None or plan is None:
            return self.leaving_since_ms is not None
        last = len(plan.up_to_date) == 1 and plan.replica_rank in plan.up_to_date and plan.replica_world_size > 1
        waits = last and self.clock.now_ms - self.leaving_since_ms < LEAVE_WITHIN_MS
        if waits:
            self.outside.marks.hit("the last holder of the state stayed for another step")
            self.outside.note(self, "stays, for nobody else holds the state")
        return not waits

    def leaves(self, plan: Plan | None) -> Life:
        """The group has agreed, or this rank has no quorum to go on in: it serves those that heal, and ends."""
        self.left = True
        self.phase = "left"
        self.outside.note(self, f"leaves after step {self.step}")
        self.outside.invariants.left(self.host, self.rank, self.state_held, torn=self.torn)
        taken = yield self.outside.leave(self)
        self.outside.marks.hit("a rank left" if taken is not None else "a rank left without its manager server")
        if plan is not None and plan.serve:
            since_ms = self.leaving_since_ms if self.leaving_since_ms is not None else self.clock.now_ms
            while self.outside.is_healed_from(self) and self.clock.now_ms - since_ms < LEAVE_WITHIN_MS:
                self.outside.marks.hit("one that has left was healed from")
                yield self.sleep(POLL_MS)
        yield from self._let_the_last_word_pass()
        self.outside.ended(self, "left")
        yield Waiter()  # for ever

    def _let_the_last_word_pass(self) -> Life:
        since_ms = self.clock.now_ms
        while self.group is not None and not self.group.word_has_passed and self.clock.now_ms - since_ms < LINGER_MS:
            self.outside.marks.hit("a leaver let its last word pass")
            yield self.sleep(1)

    # --- one step after another -------------------------------------------------------------------------------------

    def _train(self) -> Life:
        while self.alive:
            yield from self.syncs.one() if self.syncs is not None else self._one_step()
            if self.finished_step is not None:
                self.outside.marks.hit("a trainer finished")
                yield from self.leaves(self.plan)

    @property
    def finished_step(self) -> int | None:
        """The step at which its training is over; None while it trains."""
        return self.step if self.finishes_at is not None and self.step >= self.finishes_at else None

    def between_steps(self) -> Life:
        """What the user does there."""
        if self.late_ms:
            late_ms, self.late_ms = self.late_ms, 0
            if late_ms >= self.outside.timeouts.slowest_step_ms:
                self.outside.marks.hit("a trainer was late for longer than slowest_step")
            self.phase = "between steps"
            yield self.sleep(late_ms)

    def load_by_hand(self) -> None:
        """Another state, if the user is about to load one."""
        if self.loads_step is not None:
            self.step, self.lineage, self.live = self.loads_step, None, False
            self.weights = f"by hand/{self.rank}"
            self.loads_step = None
            self._unfit = "a state was loaded by hand"

    def refused(self, answer: Refused) -> Life:
        """It gets no quorum: it leaves or ends, if it must, else it tries again."""
        self.outside.note(self, f"is refused a quorum ({answer.code})")
        wishes = self.leaving_since_ms is not None and not answer.fatal
        if answer.code == Refusal.LEFT.value or (wishes and self.wishes_to_leave(self.plan)):
            self.outside.marks.hit("a rank left without a quorum")
            yield from self.leaves(self.plan)
        if answer.fatal:
            self.quit(answer.code, answer)
            yield Waiter()  # for ever
        yield self.sleep(POLL_MS)

    def _one_step(self) -> Life:
        yield from self.between_steps()
        self.load_by_hand()
        plan = self.goes_on()
        if plan is None:
            self.phase = "quorum"
            self._take_early()
            self.num_requests += 1
            answer = yield self.ask(self.request())
            if isinstance(answer, Refused):
                self._early = None
                yield from self.refused(answer)
                return
            plan = self.given(answer)
        vote = Round(plan.key, plan.step, plan.lineage, Purpose.COMMIT)
        self._offer_early(plan)
        # The first step after a start, a healing or a reconfiguration may take any time.
        self.excused = self.held != plan.key or plan.heal or self.healed_before
        self.healed_before = plan.heal
        if self.excused:
            self.own_time.forget()
        good = yield from self.configure(plan)
        if not plan.heal and self.lineage is None:
            self.lineage = plan.lineage
        if not self.settings.use_async_quorum:
            if plan.serve:
                self.take_snapshot(plan, "before the forward")
            if plan.heal:
                healed = yield from self.heal(plan, vote)
                if not healed:
                    self.leave_group()
                    good = False
        self.phase = "forward"
        step_ms = round(self.outside.step_ms(self) * self.share)
        yield self.sleep(1 if self.asks_at_once else step_ms)
        if self.clock.now_ms - self.phase_since_ms >= self.outside.timeouts.slowest_step_ms and self.excused:
            self.outside.marks.hit("a first step took longer than slowest_step")
        yield from self.hang_if_asked("forward")
        reduced: Reduced | None = None
        if good:
            reduced = yield from self._reduce(plan)
        if self.settings.use_async_quorum and plan.serve and not self.snapshots_late and not self._offers(plan):
            self.take_snapshot(plan, "after the reductions, before the vote")
        enough = plan.num_participants >= plan.min_replica_size
        good = good and reduced is not None and enough
        wishes = stands = False
        if self.standing.speaks:
            # Whoever recovers does not wait for its state before it.
            wishes = self.wishes_to_leave(plan)
            agreed = yield from self.exchange_word(plan, vote, good and not self._fails(), leaves=wishes)
            good, stands = good and agreed.yes, agreed.stands
        if self.settings.use_async_quorum and plan.heal:
            healed = yield from self.heal(plan, vote)
            good = good and healed
        if not self.standing.speaks:
            good = not self._fails() and good
            wishes = self.wishes_to_leave(plan)
        verdict = yield from self.vote(vote, good, leaving=wishes, stands=stands)
        if good and not verdict.yes:
            self.outside.marks.hit("a rank had its word, and another one of its group did not")
        self.has_decided(verdict)
        self.own_time.step_ended(counts=verdict.yes and not self.excused)
        if verdict.yes:
            assert reduced is not None
            self.commit(plan, vote, reduced)
        else:
            self.commit_failures += 1
            self.outside.marks.hit("a commit failed")
            if self.outside.invariants.was_committed(vote, self.rank):
                self.outside.marks.hit("one group committed what another lost")
            self.outside.note(self, f"does not commit step {vote.step + 1}")
        if plan.serve and self.snapshots_late:
            self.take_snapshot(plan, "after the vote")
        if verdict.leaves:
            if not wishes:
                self.outside.marks.hit("a rank left because another one was told to")
            yield from self.leaves(plan)
        if verdict.yes:
            yield from self.hang_if_asked("optimizer")

    def _fails(self) -> bool:
        fails, self.fails_once = self.fails_once, False
        if fails:
            self.outside.note(self, "has an error of its own in this step")
        return fails

    # --- standing quorums -------------------------------------------------------------------------------------------

    def goes_on(self, in_flight: Collection[QuorumKey] = ()) -> Plan | None:
        """The plan of the next round, where that asks nobody."""
        unfit, self._unfit = self._unfit, ""
        if self.torn:
            unfit = "its state is torn"
        elif self.group is None or self.needs_configure:
            unfit = unfit or "its process group is unusable"
        going = self.standing.next_round(self.outside.own_ms(), unfit)
        if isinstance(going, Ask):
            if going.breaks:
                why = "its lease was over" if "lease" in going.why else "it had changed"
                self.outside.marks.hit(f"a rank asked where its quorum stood: {why}")
                self.outside.note(self, f"asks though its quorum stands: {going.why}")
                self.leave_group()
            return None
        assert isinstance(going, GoOn)
        assert self.plan is not None
        assert self.lineage is not None
        self.outside.marks.hit("a round began without a request")
        if self.plan.num_participants < self.plan.replica_world_size:
            self.outside.marks.hit("a quorum with spares stood")
        if in_flight:
            self.outside.marks.hit("a sync began without a request, with others in flight")
        self.plan = replace(
            self.plan,
            step=self.step,
            lineage=self.lineage,
            heal=False,
            serve=False,
            sources=(),
            recover_dst_replica_ranks=(),
        )
        num_in_flight = sum(key == self.plan.key for key in in_flight)
        assert going.step == self.step + num_in_flight, f"{self.name} goes on at {going.step}, and holds {self.step}"
        self.outside.invariants.planned(self.plan, self.rank, num_in_flight)
        return self.plan

    def ask(self, request: RankRequest) -> Waiter:
        """Ask for the next quorum."""
        self.standing.asked(self.outside.own_ms())
        return self.outside.ask(self, request)

    def given(self, answer: Plan | QuorumKey, in_flight: Collection[QuorumKey] = ()) -> Plan:
        """The plan that the answer means."""
        self.has_reported()
        plan = self.plan_of(answer, in_flight)
        self.standing.planned(plan, self.outside.own_ms(), sum(key == plan.key for key in in_flight))
        if self.settings.speaks and plan.lease_ms is None:
            self.outside.marks.hit("an older member made all ask in every step")
        return plan

    def send_word(self, plan: Plan, vote: Round, good: bool, *, leaves: bool) -> Waiter:
        """Exchange the word of a round, when the own reductions have ended; resolves to the sum, or to None."""
        counts = self._counts(plan, vote)
        lineage = self.lineage if counts else vote.lineage
        now_ms = self.outside.own_ms()
        ends = self.finishes_at is not None and vote.step + 1 >= self.finishes_at
        word = self.standing.word(now_ms, ok=good, lineage=lineage, participates=counts, leave=leaves or ends)
        if plan.lease_ms and self.standing.lease_runs_out(now_ms):
            self.outside.marks.hit("a word said that the lease runs out")
        group = self.group
        if group is None or group.key != plan.key or self.is_broken(plan.key):
            failed = Waiter()
            failed.resolve(None)
            return failed
        sent = group.exchange_word(vote.step, self.replica_id, word.values())
        sent.then(lambda total: self._learned_word(group, total))
        return self.within(sent, self.outside.timeouts.timeout_ms)

    def _learned_word(self, group: Group, total: object) -> None:
        if total is None and self.alive and self.group is group:
            self.note_unreached(group)

    def _counts(self, plan: Plan, vote: Round) -> bool:
        return plan.participating_rank is not None and self.step == vote.step

    def hear_word(self, plan: Plan, vote: Round, sent: Waiter) -> Life:
        """What the sum of a round's words means."""
        self.phase = "word"
        total = yield sent
        agreed = self.standing.summed(total, self.lineage if self._counts(plan, vote) else vote.lineage)
        self.outside.invariants.worded(self.replica_id, self.rank, vote, agreed.yes if total is not None else None)
        if total is not None and plan.lease_ms:
            asks, leaves = total[1], total[2]
            if 0 < asks < plan.replica_world_size:
                self.outside.marks.hit("the word of some told the others to ask")
            if asks and leaves:
                self.outside.marks.hit("one word said that all ask and that one leaves")
        if total is None:
            self.outside.marks.hit("the word of a round failed")
            if self.outside.invariants.was_committed(vote, self.rank):
                self.outside.marks.hit("the word of a round came to some members alone")
            self.outside.note(self, "sees the word of its round fail")
        elif not agreed.yes:
            self.outside.marks.hit("the word of a round was a no")
        return agreed

    def exchange_word(self, plan: Plan, vote: Round, good: bool, *, leaves: bool) -> Life:
        """Send the word, and hear the sum of all."""
        return (yield from self.hear_word(plan, vote, self.send_word(plan, vote, good, leaves=leaves)))

    def has_decided(self, verdict: Verdict) -> None:
        """The group's verdict on the round is known."""
        if self.standing.speaks and self.standing.decided(yes=verdict.yes, stands=verdict.stands):
            self.leave_group()  # nobody shall wait for it in a round that can't complete

    def hang_if_asked(self, where: Hanging) -> Life:
        if self.will_hang != where or self.excused:
            return
        self.will_hang = None
        if self.phase != where:
            self.phase = where
        self.outside.marks.hit(f"a trainer hung in its {where}")
        self.outside.note(self, "hangs" if where == "forward" else f"hangs in its {where}")
        self._hang = Waiter()
        self.outside.hangs(self)
        yield self._hang
        self.outside.note(self, "hangs no more")

    def plan_of(self, answer: Plan | QuorumKey, in_flight: Collection[QuorumKey] = ()) -> Plan:
        """The plan that counts now: the one given, or the one that stands, at our step.

        Args:
            in_flight: the quorum of each sync that is in flight.
        """
        if isinstance(answer, Plan):
            self.plan = answer
        else:
            if self.plan is None or self.plan.key != answer or self.lineage is None:
                raise InvariantBroken(
                    "I2", f"{self.name} is told that plan {answer} stands, and has none to go on with"
                )
            self.outside.marks.hit("a rank was told unchanged")
            self.plan = replace(self.plan, step=self.step, lineage=self.lineage)
        self.outside.invariants.planned(self.plan, self.rank, sum(key == self.plan.key for key in in_flight))
        return self.plan

    def request(self) -> RankRequest:
        self._reported = frozenset(self.unreached)
        return RankRequest(
            step=self.step,
            lineage=self.lineage,
            live=self.live,
            torn=self.torn,
            held=self.held,
            checkpoint_metadata=self.name,
            commit_failures=self.commit_failures,
            needs_configure=self.needs_configure,
            failed_heals=self.failed_heals,
            poor_sources=tuple(sorted(self.poor_sources)),
            unreached=tuple(self.unreached.values()),
            shrink_only=self.shrink_only,
            init_sync=self.settings.init_sync,
            use_async_quorum=self.settings.use_async_quorum,
            fixed_with_spares=self.settings.fixed_with_spares,
            min_replica_size=self.settings.min_replica_size,
            attempt=self.num_requests,
            fingerprint=self._fingerprint,
            lease_ms=self.outside.timeouts.lease_ms if self.settings.speaks else None,
        )

    def configure(self, plan: Plan) -> Life:
        if self.held == plan.key and not self.needs_configure and self.group is not None:
            return True
        if self.held == plan.key:
            # It was aborted since it asked. A key is for one meeting: under it we would meet who has left, or nobody.
            self.outside.marks.hit("a key was not used twice")
            return False
        self.phase = "configure"
        self.leave_group()
        self.held = plan.key
        self._notices = [notice for notice in self._notices if notice.key >= plan.key]
        if self.is_broken(plan.key):
            self.outside.marks.hit("a broken quorum was not configured")
            self.outside.note(self, "is given a broken quorum, and does not try to meet its members")
            return False
        self.outside.invariants.joined_group(plan, self.rank)
        group = self.outside.group(plan.key, self.rank, plan.replica_ids, plan.store_replica_id)
        self.group = group
        self.group_since_ms = self.clock.now_ms
        joined = yield self.within(group.join(self.replica_id), self.outside.timeouts.timeout_ms)
        if not joined or self.group is not group:  # aborted by what it heard when it was stopped, just after they met
            self.outside.marks.hit("a rendezvous failed")
            self.outside.note(self, "can't meet the others of its quorum")
            self.note_unreached(group)
            self.leave_group()
            return False
        self.needs_configure = False
        self.num_reductions = 0
        return True

    def _reduce(self, plan: Plan) -> Life:
        """All buckets; None when one of them fails, and then the group is aborted."""
        counts = plan.participating_rank is not None and self.step == plan.step
        gradients: list[str] = []
        for bucket in range(NUM_BUCKETS):
            group = self.group
            if group is None or self.is_broken(plan.key):
                return None
            gradient = f"{self.replica_id}:{self.step}:{bucket}" if counts else None
            self.num_reductions += 1
            self.phase = "reduction"
            contribution = Contribution(self.replica_id, self.state_held, gradient, f"bucket {bucket}")
            waiter = group.reduce(self.num_reductions, contribution)
            result = yield self.within(waiter, self.outside.timeouts.timeout_ms)
            if result is None:
                self.outside.marks.hit("a reduction failed")
                self.outside.note(self, "sees its reduction fail")
                self.note_unreached(group)
                self.leave_group()
                return None
            gradients += result.gradients
        numbers = range(self.num_reductions - NUM_BUCKETS + 1, self.num_reductions + 1)
        return Reduced(plan.key, self.rank, tuple(numbers), tuple(gradients))

    def has_reported(self) -> None:
        """Its request was answered: what it said was heard."""
        for reported in self._reported:
            self.unreached.pop(reported, None)
        self._reported = frozenset()

    def note_unreached(self, group: Group) -> None:
        """Whom it could not reach in that group, for its next request."""
        for report in group.unreached_by(self.replica_id):
            self._could_not_reach(report)

    def _could_not_reach(self, report: Unreached) -> None:
        if (report.replica_id, report.via) not in self.unreached:
            self.outside.marks.hit(f"a member was not reached: {report.via.value}")
            if report.why == "no word":
                self.outside.marks.hit("a link lost the word of a round")
            self.outside.note(self, f"can't reach {report.replica_id} ({report.via.value})")
            self.unreached[report.replica_id, report.via] = report

    @property
    def asks_at_once(self) -> bool:
        """Whether its group can't be built, and it knows why: the lighthouse should know, before anything else."""
        return self.group is None and any(via is not Via.STATE for _, via in self.unreached)

    # --- healing ----------------------------------------------------------------------------------------------------

    def take_snapshot(self, plan: Plan, when: str) -> None:
        """Offer the state of now to those that this plan heals; `when` is told."""
        self.outside.note(self, f"offers step {self.step}: it has taken it {when}")
        self.snapshot = Snapshot(plan.key, self.state_held)

    def _offers(self, plan: Plan) -> bool:
        """Whether it has offered this plan's state. A key can stand while its plan is told anew, of another step."""
        offered = self.snapshot
        wanted = (plan.key, plan.step, plan.lineage)
        return offered is not None and (offered.key, offered.held.step, offered.held.lineage) == wanted

    def _take_early(self) -> None:
        """At the boundary, if somebody was said to ask who will heal; under which key it goes is not known yet."""
        if self._newcomer and self.settings.use_async_quorum and not self.torn and self.lineage is not None:
            self._early = self.state_held
        self._newcomer = ""

    def _offer_early(self, plan: Plan) -> None:
        """Under the plan's key, if somebody heals from what was taken; else it was taken in vain."""
        early, self._early = self._early, None
        if early is None:
            return
        if not plan.serve or (early.step, early.lineage) != (plan.step, plan.lineage):
            self.outside.marks.hit("a state was taken early in vain")
            self.outside.note(self, "has taken its state early in vain, and drops it")
            return
        self.outside.marks.hit("a state was offered before the forward")
        self.outside.note(self, f"offers step {early.step} at once: it has taken it at the boundary")
        self.snapshot = Snapshot(plan.key, early)

    def heal(self, plan: Plan, vote: Round) -> Life:
        """Fetch, agree with the other ranks that all have, load, agree that all have; all or none."""
        self.phase = "heal"
        started_ms = self.clock.now_ms
        fetched = None if self.asks_at_once else (yield from self._fetch(plan))
        staged = yield from self.vote(replace(vote, purpose=Purpose.STAGED), fetched is not None)
        loads = staged.yes and (yield from self._fits(plan, vote))
        if not loads or fetched is None:
            self.failed_heals += 1
            self.outside.marks.hit("a healing failed")
            if fetched is not None and self.world_size > 1:
                self.outside.marks.hit("half of a group had fetched")
            self.outside.note(self, "could not heal")
            return False
        self.outside.invariants.loads(self.host, self.rank, replace(vote, purpose=Purpose.STAGED))
        if self.world_size > 1:
            raises = self.outside.load_raises(self)
            loaded = yield from self.vote(replace(vote, purpose=Purpose.LOADED), not raises)
            if not loaded.yes:
                self.torn = True  # what it holds may be whole, and is not what the others hold
                self.weights = f"torn/{self.name}"
                self.failed_heals += 1
                self.outside.marks.hit("a rank of a group could not load")
                self.outside.note(self, "could not load what it fetched, or another rank could not")
                return False
        if self.torn:
            self.outside.marks.hit("a torn group healed")
        self.step, self.lineage, self.weights = plan.step, plan.lineage, fetched.weights
        self.live = True
        self.torn = False
        self.failed_heals = 0
        self.outside.marks.hit("a group healed")
        if self.clock.now_ms - started_ms > self.outside.timeouts.join_timeout_ms:
            self.outside.marks.hit("a healing took longer than join_timeout")
        self.outside.note(self, f"has healed: it holds step {self.step}")
        self.outside.invariants.holds(self.replica_id, self.rank, self.state_held)
        return True

    def _fits(self, plan: Plan, vote: Round) -> Life:
        """Whether what was fetched can be loaded; for some states the ranks look at their own first, together."""
        needs_own = (plan.key.nonce + self.rank) % 2 == 1
        without_own = yield from self.vote(replace(vote, purpose=Purpose.WITHOUT_OWN), not needs_own)
        if without_own.yes:
            return True
        self.outside.marks.hit("a healing needed the rank's own state")
        matched = yield from self.vote(replace(vote, purpose=Purpose.MATCHED), True)
        return matched.yes

    def _fetch(self, plan: Plan) -> Life:
        """The reference of the plan from the first source that serves it; the others carry on where one ends."""
        self.outside.note(self, f"heals from {plan.sources[0].replica_id}, step {plan.step}")
        self._refused.clear()
        self._silent_ms.clear()
        deadline_ms = self.clock.now_ms + self.outside.timeouts.timeout_ms
        chunks = 0
        while self.clock.now_ms < deadline_ms:
            if self._has_no_source(plan):
                self.outside.marks.hit("a transfer lost its last source")
                self.outside.note(self, "has lost its last source")
                return None
            served = self._served(plan)
            if served is None:
                yield self.sleep(POLL_MS)
                continue
            self._fetches = plan, self.sleep(self.outside.chunk_ms(self))
            yield self._fetches[1]
            self._fetches = None
            if self._has_no_source(plan):
                continue
            chunks += 1
            self._received_bytes += 1
            self.outside.received(self, self._received_bytes)
            if chunks >= HEAL_CHUNKS:
                return served
        return None

    def _served(self, plan: Plan) -> Held | None:
        for source in plan.sources:
            if self._is_lost_in(plan.key, source.replica_id):
                continue
            if self.outside.is_unreachable(self, source.replica_id):
                self._could_not_reach(Unreached(source.replica_id, Via.STATE, "no connection"))
                self.poor_sources.add(source.replica_id)
                continue
            if self.outside.is_silent(self, source.replica_id):
                if self._is_waited_for(source.replica_id):
                    return None
                continue
            snapshot = self.outside.snapshot_of(self, source.replica_id, self.rank)
            if snapshot is None:
                continue
            held = snapshot.held
            if (snapshot.key, held.step, held.lineage) == (plan.key, plan.step, plan.lineage):
                return held
            if source.replica_id not in self._refused and snapshot.key == plan.key:
                self.outside.note(self, f"refuses a snapshot of step {held.step}, for it needs step {plan.step}")
                self._refused.add(source.replica_id)
            self.outside.marks.hit("a snapshot of another step was refused")
        return None

    def _is_waited_for(self, source: str) -> bool:
        """Whether a source that sends nothing has had less than a second for it."""
        since_ms = self._silent_ms.setdefault(source, self.clock.now_ms)
        if self.clock.now_ms - since_ms < SOURCE_SILENT_MS:
            return True
        if source not in self.poor_sources:
            self.poor_sources.add(source)
            self.outside.note(self, f"has heard nothing from source {source}, and asks it last from now on")
        return False

    # --- the vote -----------------------------------------------------------------------------------------------------

    def vote(self, vote: Round, yes: bool, *, leaving: bool = False, stands: bool = False) -> Life:
        """The verdict; a rank that can't have it ends, unless it is the only one of its group."""
        self.phase = vote.purpose.value
        verdict = yield self.outside.vote(self, vote, yes, leaving=leaving, stands=stands)
        if isinstance(verdict, Refused):
            if verdict.fatal:
                self.quit(f"vote: {verdict.code}", verdict)
                yield Waiter()  # for ever
            # The manager server of a group of one rank died with the vote open: that is a no.
            self.outside.marks.hit("an open vote was taken for a no")
            self.outside.note(self, "takes its open vote for a no")
            return Verdict(yes=False, leaves=leaving)
        return verdict

    def commit(self, plan: Plan, vote: Round, reduced: Reduced) -> None:
        assert (self.step, self.lineage) == (vote.step, vote.lineage), f"{self.name} commits {vote} at {self.step}"
        assert self.lineage is not None
        self.weights = hashlib.blake2b("|".join((self.weights, *reduced.gradients)).encode(), digest_size=8).hexdigest()
        self.step = vote.step + 1
        self.lineage = fold_lineage(self.lineage, plan.key, self.step)
        self.live = True
        self.commit_failures = 0
        after = self.state_held
        self.outside.invariants.committed(self.host, self.rank, vote, plan.replica_world_size, after)
        self.outside.invariants.applied(self.replica_id, self.rank, vote, reduced)
        mean_of = len({gradient.rsplit(":", 2)[0] for gradient in reduced.gradients})
        what = f"a mean of {mean_of}" if reduced.numbers else "the opening"
        self.outside.note(self, f"commits step {self.step}, {what}")
        if self.outside.invariants.num_lineages(self.rank, self.step) > 1:
            self.outside.marks.hit("a lost step was committed again by others")
        tears, self.tears_once = self.tears_once, False
        if tears or self.outside.optimizer_raises(self):
            # Half of the parameters may have been written.
            self.outside.note(self, "raises in its optimizer: its state is torn")
            self.torn = True
            self.weights = f"torn/{self.name}"
