"""The exchange of live state: giving it to replicas that heal, or taking it from a source.

Both happen on the training thread, at a step boundary, in the stages that the step core orders. Only the fetch itself
runs in the background.

Law of this file: performing one step's exchange. The core decides its stages and the effect of a failure. The transport
moves the state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, final

from tft_algos.errors import HealingError, StateLoadError, UserStateError
from tft_algos.manager.context import ManagerContext
from tft_algos.manager.quorum.rank0_groups import spread, whole
from tft_algos.manager.quorum.unreached import UnreachedPeers
from tft_algos.manager.recovery.audit import StateAudit
from tft_algos.manager.recovery.healing import Fetch, state_key, takers
from tft_algos.manager.recovery.shards import has_shards, place_shards, shard_whole
from tft_algos.manager.recovery.speculative import SpeculativeSnapshot
from tft_algos.manager.recovery.state_check import StateCheck
from tft_algos.manager.recovery.user_state import refusal_in
from tft_algos.manager.step.progress import StepProgress
from tft_ckpt import StateUnavailableError
from tft_coord.core.step import Event, Stage
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.repeats import Repeats
from tft_coord.core.types import POOR_SOURCES_MOST, LossNotice, Plan, Purpose
from tft_coord.errors import RequestTimeoutError

POOR_FOR_S: Final = 600.0
SOURCES_KEPT: Final = 256


@final
class StateExchange:
    """One rank's part in the exchange.

    Args:
        shared: what all parts share.
        speculative: snapshots for newcomers.
        check: reports the differences if a replica heals because its state has diverged.
        audit: compares the loaded state with the received one.
        step_progress: marked as waiting while this rank waits for state.
        unreached: receives the sources that answer no connection.
    """

    def __init__(
        self,
        shared: ManagerContext,
        *,
        speculative: SpeculativeSnapshot,
        check: StateCheck,
        audit: StateAudit,
        step_progress: StepProgress,
        unreached: UnreachedPeers,
    ) -> None:
        self._config = shared.config
        self._step = shared.step
        self._coordinator = shared.coordinator
        self._transport = shared.transport
        self._user = shared.user_state
        self._reports = shared.reports
        self._clock = shared.clock
        self._closing = shared.closing
        self._speculative = speculative
        self._check = check
        self._audit = audit
        self._step_progress = step_progress
        self._unreached = unreached
        self._fetch: Fetch | None = None
        self._staged: Mapping[str, Any] = {}  # the fetched state, until it is loaded
        self._received: Mapping[str, Any] = {}  # the state to load, by path, until it is compared
        self._healed_bytes = 0
        # Sources whose manager server did not answer: the reason and the time.
        self._silent: dict[str, tuple[str, float]] = {}
        self._metadata: dict[str, str] = {}  # metadata of the sources that were asked, by replica id
        self._poor: frozenset[str] = frozenset()
        self._untakeable = Repeats()  # the errors with which this replica could not give its state

    # --- the fetch, in the background ---------------------------------------------------------------------------------

    def start_fetch(self, order: do.Fetch) -> None:
        """Start the fetch of a plan that says to heal. The quorum thread calls this."""
        plan = order.plan
        fetch = Fetch(
            plan,
            coordinator=self._coordinator,
            transport=self._transport,
            timeout=self._config.heal_timeout,
            received_before=self._healed_bytes,
        )
        self._fetch = fetch
        self._reports.log(logging.INFO, "healing from %s to step %d", plan.sources[0].replica_id, plan.step)
        fetch.start()
        for notice in self._step.status.losses:  # losses that were reported before the fetch existed
            self.source_lost(notice)

    def source_lost(self, notice: LossNotice) -> None:
        """Record the loss of a quorum member, which may be a source.

        A living member still serves. Any thread may call this.
        """
        fetch = self._fetch
        if fetch is not None and fetch.plan.key == notice.key and not notice.lives:
            fetch.source_lost(notice.replica_id)

    def end_fetch(self, order: do.EndFetch) -> None:
        """End the fetch of an earlier attempt."""
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None

    def close(self) -> None:
        """End the fetch without waiting for a peer."""
        if self._fetch is not None:
            self._transport.abort()
            self._fetch.cancel()

    def poor_sources(self) -> tuple[str, ...]:
        """Return the replicas that hung, lied or were slow as sources in the last ten minutes, for the lighthouse."""
        if not self._metadata and not self._silent:
            return ()
        now = self._clock.monotonic()
        found = {name: why for name, (why, since) in self._silent.items() if now - since < POOR_FOR_S}
        by_metadata = self._transport.poor_sources()
        found |= {name: by_metadata[place] for name, place in self._metadata.items() if place in by_metadata}
        for name in sorted(found.keys() - self._poor):
            self._reports.log(logging.WARNING, "source %s is asked last from now on: %s", name, found[name])
        self._poor = frozenset(found)
        return tuple(sorted(found))[:POOR_SOURCES_MOST]

    def _learn_of_sources(self, fetch: Fetch) -> None:
        """Keep the metadata and the silent sources that a fetch found."""
        now = self._clock.monotonic()
        self._metadata |= fetch.metadata
        self._silent |= {name: (why, now) for name, why in fetch.silent.items()}
        for kept in (self._metadata, self._silent):
            while len(kept) > SOURCES_KEPT:
                kept.pop(next(iter(kept)))

    # --- one step's exchange, on the training thread ------------------------------------------------------------------

    def perform(self) -> None:
        """Serve the members that heal, or heal. Call this once a step, after its plan has arrived."""
        before, self._step_progress.waits = self._step_progress.waits, True
        plan = self._step.status.plan
        effects = self._step.tell(on.ExchangeAsked(offers=plan is not None and self._speculative.serves(plan)))
        while effects:
            (order,) = effects
            effects = self._step.tell(self._done(order))
        self._step_progress.waits = before

    def _done(self, order: do.Effect) -> Event:
        """Perform one effect, and return the event that reports its end."""
        match order:
            case do.Serve():
                self._serve(order)
                return on.StateServed(order.attempt)
            case do.StageState(_, failure):
                return self._stage(failure)
            case do.Agree(plan, purpose, yes):
                return on.Agreed(purpose, self._agree(plan, yes, purpose))
            case do.SpreadState(plan):
                return self._spread(plan)
            case do.MatchState():
                return self._match()
            case do.ExplainDivergence():
                self._check.explain(order, self._staged)
                return on.DivergenceExplained()
            case do.LoadState():
                return self._load()
        raise AssertionError(f"an exchange of state has no {order}")

    # --- giving -------------------------------------------------------------------------------------------------------

    def _serve(self, order: do.Serve) -> None:
        plan = order.plan
        if not self._user.readable:
            sentence = (
                f"replicas {list(plan.recover_dst_replica_ranks)} heal from replica {self._coordinator.replica_id}, "
                "whose state is marked as half written by disallow_state_dict_read; call allow_state_dict_read first"
            )
            # The members continue without this state, because the time of the next allowed read is unknown.
            self.refuse(plan, sentence)
            raise UserStateError(sentence)
        begun = self._clock.monotonic()
        try:
            state = {"user": self._take_for_others(plan), "tft": order.own}
        except UserStateError as error:
            sentence = f"can't serve step {plan.step}: {error}"
            if error.__cause__ is None or self._untakeable.again(str(error)):
                self._reports.log(logging.ERROR, "%s", sentence)
            else:
                self._reports.log_traceback(error.__cause__, "%s", sentence)
            self.refuse(plan, str(error))
            return
        self._untakeable.forget()
        if self._config.is_passive_rank:
            return
        try:
            self._transport.send_checkpoint(
                list(plan.recover_dst_replica_ranks), plan.step, state, self._config.heal_timeout, key=state_key(plan)
            )
        except Exception as error:
            # This replica's step is valid, whatever its transport did. Its peers must not wait for a state that is not
            # offered: the transport may have failed before it registered the key. If no member asks this replica first,
            # the offer is only a spare.
            spare = isinstance(error, StateUnavailableError) and not plan.recover_dst_replica_ranks
            level = logging.WARNING if spare else logging.ERROR
            self._reports.log(level, "can't serve step %d %s: %s", plan.step, takers(plan), error)
            self.refuse(plan, f"its transport could not offer it: {str(error) or type(error).__name__}")
            return
        self._reports.log(
            logging.INFO,
            "serving step %d %s, offered in %.0f ms",
            plan.step,
            takers(plan),
            1_000 * (self._clock.monotonic() - begun),
        )

    def refuse(self, plan: Plan, sentence: str) -> None:
        """Tell the members that wait for this replica's state that they can't get it here."""
        if self._config.is_passive_rank:
            return
        try:
            self._transport.refuse_checkpoint(
                plan.step, sentence, key=state_key(plan), dst_ranks=list(plan.recover_dst_replica_ranks)
            )
        except Exception as error:
            # As for a send, the step is valid, and the waiting members have their own time-out.
            self._reports.log(
                logging.ERROR, "could not notify the healing replicas that this source has failed: %s", error
            )

    def _take_for_others(self, plan: Plan) -> dict[str, Any]:
        """Take the user's state for members that heal. On an island, the result of rank 0 counts.

        Raises: UserStateError: a function of the user raised on this rank or, on an island, on another rank.
        """
        if not self._config.rank0_synchronization_only:
            return self._user.take()
        state: dict[str, Any] = {}
        error: UserStateError | None = None
        try:
            state = self._user.take()
        except UserStateError as failure:
            error = failure
        # The other ranks must not wait in a collective for a rank that can't join it.
        if not self._agree(plan, error is None, Purpose.TAKEN):
            self._reports.raise_fatal()
            raise error or UserStateError(
                f"another rank of replica {self._coordinator.replica_id} could not take its state"
            )
        return whole(state, keep=not self._config.is_passive_rank)  # type: ignore[no-any-return]

    # --- taking -------------------------------------------------------------------------------------------------------

    def _stage(self, failure: Exception | None) -> on.StageEnded:
        """Wait for the fetched state. `failure`: the reason not to wait."""
        fetch = self._fetch  # the fetch stays until its step is over, because the loss of its source must reach it
        if fetch is None:
            assert failure is not None or self._config.is_passive_rank, "a plan that heals has no fetch"
            return on.StageEnded(Stage.FETCH, failure)
        ended = on.StageEnded(Stage.FETCH, failure)
        if failure is not None:
            fetch.cancel()
        else:
            try:
                ended = self._checked(Stage.FETCH, fetch.result())
            except HealingError as error:
                ended = _failed(Stage.FETCH, error)
        self._healed_bytes += fetch.received_bytes
        self._learn_of_sources(fetch)
        if ended.error is not None:
            self._unreached.sources_failed(fetch.unreached)
        return ended

    def _checked(self, stage: Stage, state: Any) -> on.StageEnded:
        """Keep a received state.

        Raises: HealingError: the state does not fit what is registered here.
        """
        if not isinstance(state, Mapping) or not all(isinstance(state.get(key), Mapping) for key in ("user", "tft")):
            raise StateLoadError("the fetched state was not made by a Manager; run the same release on every replica")
        theirs, ours = set(state["user"]), self._user.names
        if theirs != ours:
            raise StateLoadError(
                f"the source has state registered under {sorted(theirs)} and this replica under {sorted(ours)}; "
                "register the same keys on every replica"
            )
        self._staged = state
        return on.StageEnded(stage, own=state["tft"], needs_own=has_shards(state["user"]))

    def _spread(self, plan: Plan) -> on.StageEnded:
        """Copy the staged state from rank 0 of this island to every rank."""
        try:
            state = spread(
                self._staged,
                plan,
                config=self._config,
                coordinator=self._coordinator,
                transport=self._transport,
                received_before=self._healed_bytes,
                cancelled=lambda: self._closing.is_set() or self._step.status.fatal is not None,
            )
            return self._checked(Stage.SPREAD, state)
        except HealingError as error:
            return _failed(Stage.SPREAD, error)

    def _match(self) -> on.StageEnded:
        """Put the DTensors of a staged state on this process's own meshes. Nothing is loaded.

        The meshes come from the user's own state. The functions that return it may run collectives over the ranks of
        this group. On an island, the staged state does not show which tensors are sharded here.
        """
        place = shard_whole if self._config.rank0_synchronization_only else place_shards
        try:
            self._staged = {**self._staged, "user": place(self._staged["user"], self._user.take())}
        except HealingError as failure:
            error: HealingError = StateLoadError(str(failure))
            error.__cause__ = failure.__cause__
            return _failed(Stage.MATCH, error)
        except UserStateError as failure:
            error = HealingError(f"the meshes for the fetched state can't be found: {failure}")
            error.__cause__ = failure
            return _failed(Stage.MATCH, error)
        return on.StageEnded(Stage.MATCH)

    def _load(self) -> on.StageEnded:
        self._received = self._audit.received(self._staged["user"])
        error = self._user.load(self._staged["user"])
        return on.StageEnded(Stage.LOAD) if error is None else _failed(Stage.LOAD, error)

    def healed(self, order: do.ReportHealed) -> None:
        """Report that this rank has healed, and check what was loaded."""
        plan, fetch = order.plan, self._fetch
        source, by = plan.sources[0].replica_id, "through rank 0"
        if fetch is not None:
            by = f"{fetch.received_bytes} bytes in {fetch.seconds:.2f} s"
        self._reports.log(logging.INFO, "healed from %s to step %d: %s", source, plan.step, by)
        self._audit.loaded(self._received, source)
        self._received = self._staged = {}

    def heal_failed(self, order: do.ReportHealFailed) -> None:
        """Report that this rank has not healed."""
        self._received = self._staged = {}
        cause = order.error.__cause__ if isinstance(order.error, StateLoadError) and not order.is_over else None
        self._reports.heal_failed(order.name, order.error, traceback_of=cause)

    # --- the group ----------------------------------------------------------------------------------------------------

    def _agree(self, plan: Plan, yes: bool, purpose: Purpose) -> bool:
        """Return whether all ranks of this group say yes."""
        if self._config.world_size == 1:
            return yes
        try:
            return self._coordinator.vote(plan.step, yes, self._config.heal_timeout, key=plan.key, purpose=purpose).yes
        except RequestTimeoutError:
            self._reports.raise_fatal()  # raises the reason if it became known during the wait
            raise


def _failed(stage: Stage, error: HealingError) -> on.StageEnded:
    """Return the event for a stage that failed.

    `again` is set for an error that may not go away: a failed load, or an error in a user's state_dict.
    """
    again = str(error) if isinstance(error, StateLoadError) else refusal_in(str(error))
    return on.StageEnded(stage, error, again=again)
