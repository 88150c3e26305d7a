"""The transfer of a state between simulated trainers: its source, its destination, and a rank's work in each stage.

Law of this file: perform the core's orders about states, with a digest for a state. The core decides the next stage,
and what a failure means.
"""

from __future__ import annotations

from typing import Any

from tft_coord.core.step import Stage
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.errors import HealingError
from tft_coord.core.types import LossNotice, Plan, Purpose, QuorumKey, Unreached, Via
from tft_sim.invariants import Held, Round
from tft_sim.rank import Rank, Snapshot
from tft_sim.waiting import Life, Refused, Waiter

POLL_MS = 50
HEAL_CHUNKS = 4
SOURCE_SILENT_MS = 1_000  # then another source is asked


class StateLoadError(Exception):
    """An error raised by the user's function that loads a state."""


class Recovery:
    """The exchange of state, from one rank's side.

    Args:
        trainer: the rank.
    """

    def __init__(self, trainer: Rank) -> None:
        self._trainer = trainer
        self.snapshot: Snapshot | None = None
        self.refuses: Plan | None = None  # plan whose state this rank could not give
        self.poor_sources: set[str] = set()
        self.is_silent_source = False  # its state server accepts connections and sends nothing
        self.snapshots_late = False  # snapshots are taken too late, as a simulated mistake
        self._late_order: do.Serve | None = None
        self._newcomer = ""  # replica that asks, by a hint that has led to nothing yet
        self._early: tuple[Held, dict[str, Any]] | None = None  # state at the boundary, taken on such a hint
        self._lost: set[tuple[QuorumKey, str]] = set()  # members that serve nothing more
        self._fetching: Waiter | None = None  # the fetch of the plan's reference, in the background
        self._plan: Plan | None = None  # plan of that fetch
        self._chunk: Waiter | None = None  # the chunk on its way
        self._fetched: Snapshot | None = None
        self._is_loading = False
        self.failed_loads = 0
        self.num_corruptions = 0  # number of corruptions of its memory
        self._was_torn = False
        self._started_ms = 0
        self._received_bytes = 0
        self._refused: set[str] = set()
        self._silent_ms: dict[str, int] = {}  # start of the silence of each source of this transfer

    # --- giving -----------------------------------------------------------------------------------------------------

    def newcomer_announced(self, replica_id: str) -> None:
        """Record the hint that a replica asks that will heal."""
        self._newcomer = replica_id

    def take_speculative_snapshot(self) -> None:
        """Take the state at the boundary after such a hint. The key under which it is offered is not known yet."""
        status, settings = self._trainer.status, self._trainer.settings
        self._early = None
        readable = not status.torn and status.lineage is not None and not self.snapshots_late
        readable = readable and not settings.heals_over_group  # there is no group yet to send it over
        if self._newcomer and settings.use_async_quorum and not settings.num_fragments and readable:
            self._early = self._trainer.state_held, status.own_state()
        self._newcomer = ""

    def planned(self, plan: Plan) -> None:
        """Offer the early snapshot under the plan's key if a replica heals from it. Discard it otherwise."""
        trainer = self._trainer
        self._lost = {(key, name) for key, name in self._lost if key >= plan.key}
        speculative, self._early = self._early, None
        if speculative is None:
            return
        held, own = speculative
        if not plan.serve or (held.step, held.lineage) != (plan.step, plan.lineage):
            trainer.mark("a state was taken early in vain")
            trainer.note("discards an unused snapshot")
            return
        trainer.mark("a state was offered before the forward")
        trainer.note(f"offers step {held.step}, with the snapshot taken before the step")
        self.snapshot = Snapshot(plan.key, held, own)

    def offers(self, plan: Plan | None) -> bool:
        """Return whether this plan's state is offered. A key can stand while its plan is sent again, for another
        step."""
        offered = self.snapshot
        if plan is None or offered is None:
            return False
        return (offered.key, offered.held.step, offered.held.lineage) == (plan.key, plan.step, plan.lineage)

    def refuse(self, plan: Plan) -> None:
        """Tell the waiting replicas that this rank can't give that plan's state."""
        self._trainer.mark("a state was refused to those that wait for it")
        self.refuses = plan

    def _serve(self, order: do.Serve) -> None:
        trainer, plan = self._trainer, order.plan
        if self.snapshots_late:
            self._late_order = order
        elif trainer.outside.chance.take_raises(trainer.name):
            self.refuse(plan)
        else:
            by_strategy = trainer.status.by_strategy
            asynchronous = "at the start of its sync" if by_strategy else "after the reductions, before the vote"
            self._offer(order, asynchronous if trainer.status.is_asynchronous else "before the forward")

    def _send(self, plan: Plan) -> Life:
        """Wait until a state that travels over the process group has arrived, or the group has ended."""
        trainer, snapshot = self._trainer, self.snapshot
        if not trainer.settings.heals_over_group or snapshot is None or snapshot.key != plan.key:
            return
        deadline_ms = trainer.clock.now_ms + trainer.outside.timeouts.timeout_ms
        while trainer.clock.now_ms < deadline_ms and trainer.outside.is_received_from(trainer, plan.key):
            if self._has_lost_its_group(plan):
                trainer.mark("a source's send ended with its process group")
                return
            yield trainer.sleep(POLL_MS)

    def receives(self, replica_id: str, key: QuorumKey) -> bool:
        """Return whether this rank is receiving the state of that quorum from the replica."""
        plan = self._plan
        if self._fetching is None or self._fetching.done or plan is None or plan.key != key:
            return False
        return any(source.replica_id == replica_id for source in plan.sources)

    def _offer(self, order: do.Serve, when: str) -> None:
        trainer = self._trainer
        trainer.note(f"offers step {trainer.step}, with a snapshot taken {when}")
        self.snapshot = Snapshot(order.plan.key, trainer.state_held, dict(order.own))

    def step_ended(self) -> None:
        """Take the snapshot after the optimizer has stepped, as the simulated mistake wants it."""
        order, self._late_order = self._late_order, None
        if order is not None:
            self._offer(order, "after the vote")

    # --- the exchange, on the training thread -------------------------------------------------------------------------

    def exchange(self) -> Life:
        """Give or take state, if the plan orders it."""
        trainer = self._trainer
        orders = trainer.report(on.ExchangeAsked(self.offers(trainer.plan)))
        while orders:
            outcome: on.Event | None = None
            for order in orders:
                outcome = yield from self._perform_stage(order)
            orders = trainer.report(outcome) if outcome is not None else ()

    def _perform_stage(self, order: do.Effect) -> Life:
        """Perform one stage. Returns: the event that reports its outcome."""
        trainer = self._trainer
        match order:
            case do.Serve(attempt, plan):
                self._serve(order)
                yield from self._send(plan)
                return on.StateServed(attempt)
            case do.StageState(_, in_vain):
                return (yield from self._stage(in_vain))
            case do.Agree(plan, purpose, yes):
                verdict = yield from trainer.vote(self._round(plan, purpose), yes)
                return on.Agreed(purpose, verdict.yes)
            case do.MatchState():
                trainer.mark("a healing needed the rank's own state")
                raises = trainer.outside.chance.take_raises(trainer.name)
                return on.StageEnded(Stage.MATCH, HealingError("its own state can't be taken") if raises else None)
            case do.ExplainDivergence(plan, stops):
                trainer.mark("a state that went astray was found")
                trainer.note(f"finds that its state differs from that of {plan.sources[0].replica_id}")
                if stops:
                    why = f"the state of replica {trainer.replica_id} is not that of the others"
                    yield from trainer.quit("diverged", Refused("diverged", why, fatal=True))
                return on.DivergenceExplained()
            case do.LoadState(plan):
                return self._load(plan)
            case do.Raise(error):
                yield from trainer.raises(error)
        raise AssertionError(f"{trainer.name} can't do {order}")

    def _round(self, plan: Plan, purpose: Purpose) -> Round:
        return Round(plan.key, plan.step, plan.lineage, purpose, self._trainer.num_requests)

    def _stage(self, in_vain: Exception | None) -> Life:
        """Wait for the fetch."""
        trainer = self._trainer
        trainer.phase = "heal"
        self._started_ms, self._was_torn = trainer.clock.now_ms, trainer.torn
        self._fetched, self._is_loading = None, False
        if in_vain is not None:
            trainer.mark("a rank did not wait for a state in vain")
            self.end_fetch()
            return on.StageEnded(Stage.FETCH, in_vain)
        assert self._fetching is not None
        self._fetched = yield self._fetching
        if self._fetched is None:
            return on.StageEnded(Stage.FETCH, HealingError("no source has served the state"))
        needs_own = (self._fetched.key.nonce + trainer.rank) % 2 == 1
        return on.StageEnded(Stage.FETCH, None, self._fetched.own, needs_own)

    def _load(self, plan: Plan) -> on.Event:
        trainer, fetched = self._trainer, self._fetched
        assert fetched is not None
        self._is_loading = True
        if trainer.world_size > 1:
            trainer.outside.invariants.state_loaded(trainer.host, trainer.rank, self._round(plan, Purpose.STAGED))
        sentence = trainer.outside.chance.load_raises(trainer.name)
        if sentence:
            self.failed_loads += 1
            trainer.weights = f"torn/{trainer.name}"
            return on.StageEnded(Stage.LOAD, StateLoadError(sentence), again=sentence)
        trainer.weights = fetched.held.weights
        return on.StageEnded(Stage.LOAD)

    def ended(self, report: do.ReportHealed | do.ReportHealFailed) -> None:
        """Record the end of a recovery."""
        trainer = self._trainer
        if isinstance(report, do.ReportHealFailed):
            trainer.mark("a healing failed")
            if self._is_loading:
                trainer.mark("a rank of a group could not load" if trainer.world_size > 1 else "a rank could not load")
                trainer.note("could not heal: this rank or another one failed to load the state")
            else:
                if self._fetched is not None and trainer.world_size > 1:
                    trainer.mark("half of a group had fetched")
                trainer.note("could not heal")
            return
        if self._was_torn:
            trainer.mark("a torn group healed")
        trainer.mark("a group healed")
        if trainer.clock.now_ms - self._started_ms > trainer.outside.timeouts.join_timeout_ms:
            trainer.mark("a healing took longer than join_timeout")
        trainer.note(f"has healed to step {trainer.step}")
        trainer.outside.invariants.check_state(trainer.replica_id, trainer.rank, trainer.state_held)

    # --- the fetch, beside the training thread ------------------------------------------------------------------------

    def fetch(self, plan: Plan) -> None:
        """Begin to fetch a plan's reference."""
        self.end_fetch()
        self._plan = plan
        self._fetching = self._trainer.spawn(self._fetch(plan))

    def end_fetch(self) -> None:
        """End the current fetch."""
        self._plan = None
        self._wake_fetch()

    def lost(self, notice: LossNotice) -> None:
        """Record that a member of a quorum is lost. A live one still serves."""
        if not notice.lives:
            self._lost.add((notice.key, notice.replica_id))

    def check_sources(self) -> None:
        """End a fetch whose last source is lost."""
        if self._plan is not None and self._has_no_source(self._plan):
            self._wake_fetch()

    def _wake_fetch(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.resolve(None)

    def _has_no_source(self, plan: Plan) -> bool:
        return all((plan.key, source.replica_id) in self._lost for source in plan.sources)

    def _has_lost_its_group(self, plan: Plan) -> bool:
        """Return whether the state travels over a process group that has ended."""
        group = self._trainer.group
        return self._trainer.settings.heals_over_group and (group is None or group.key != plan.key)

    def _is_refused(self, replica_id: str, plan: Plan) -> bool:
        """Return whether the replica refuses to give that plan's state."""
        source = self._trainer.outside.source(self._trainer, replica_id)
        refused = source.refuses if source is not None else None
        return refused is not None and (refused.key, refused.step, refused.lineage) == (
            plan.key,
            plan.step,
            plan.lineage,
        )

    def _fetch(self, plan: Plan) -> Life:
        """Fetch the plan's reference from the first source that serves it. The other sources continue where one
        ends."""
        trainer = self._trainer
        trainer.note(f"heals from {plan.sources[0].replica_id}, step {plan.step}")
        self._refused.clear()
        self._silent_ms.clear()
        deadline_ms = trainer.clock.now_ms + trainer.outside.timeouts.timeout_ms
        chunks = 0
        while trainer.clock.now_ms < deadline_ms and self._plan is plan:
            if self._has_no_source(plan):
                trainer.mark("a transfer lost its last source")
                trainer.note("has lost its last source")
                return None
            if all(self._is_refused(source.replica_id, plan) for source in plan.sources):
                trainer.mark("a transfer was refused by all its sources")
                return None
            if self._has_lost_its_group(plan):
                trainer.mark("a transfer ended with its process group")
                trainer.note("ends its transfer, because its process group has ended")
                return None
            served = self._served(plan)
            if served is None:
                self._chunk = trainer.sleep(POLL_MS)
                yield self._chunk
                continue
            self._chunk = trainer.sleep(trainer.outside.chance.chunk_ms(trainer.name))
            yield self._chunk
            if self._has_no_source(plan) or self._plan is not plan or self._has_lost_its_group(plan):
                continue
            chunks += 1
            self._received_bytes += 1
            trainer.outside.received(trainer, self._received_bytes)
            if chunks >= HEAL_CHUNKS:
                return served
        return None

    def _served(self, plan: Plan) -> Snapshot | None:
        trainer, outside = self._trainer, self._trainer.outside
        for source in plan.sources:
            name = source.replica_id
            if (plan.key, name) in self._lost:
                continue
            if outside.is_unreachable(trainer, name):
                trainer.record_unreached(Unreached(name, Via.STATE, "no connection"))
                self.poor_sources.add(name)
                continue
            if outside.is_silent(trainer, name):
                if self._is_waited_for(name):
                    return None
                continue
            giver = outside.source(trainer, name)
            snapshot = giver.snapshot if giver is not None else None
            if snapshot is None:
                continue
            held = snapshot.held
            if (snapshot.key, held.step, held.lineage) == (plan.key, plan.step, plan.lineage):
                return snapshot
            if name not in self._refused and snapshot.key == plan.key:
                trainer.note(f"refuses a snapshot of step {held.step}, because it needs step {plan.step}")
                self._refused.add(name)
            trainer.mark("a snapshot of another step was refused")
        return None

    def _is_waited_for(self, source: str) -> bool:
        """Return whether the source has been silent for less than a second."""
        since_ms = self._silent_ms.setdefault(source, self._trainer.clock.now_ms)
        if self._trainer.clock.now_ms - since_ms < SOURCE_SILENT_MS:
            return True
        if source not in self.poor_sources:
            self.poor_sources.add(source)
            self._trainer.note(f"has received nothing from source {source}, and asks it last from now on")
        return False
