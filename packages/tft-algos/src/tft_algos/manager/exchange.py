"""Live state between replicas: given to those that heal, or taken from one that has it.

Both happen on the training thread, at a step boundary, stage after stage as the step's core orders them. Only the
fetching itself runs in the background.

Law of this file: performing one step's exchange. Its stages, and what a failure means, are decided by the core; how
a state crosses is the transport's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, final

from tft_algos.errors import HealingFailed, LoadFailed, StateUnavailable
from tft_algos.manager.audit import StateAudit
from tft_algos.manager.early import EarlyState
from tft_algos.manager.healing import Fetch, state_key, takers
from tft_algos.manager.island import spread, whole
from tft_algos.manager.shards import cut_whole, has_shards, place_shards
from tft_algos.manager.shared import Shared
from tft_algos.manager.state_check import StateCheck
from tft_algos.manager.unreached import UnreachedPeers
from tft_algos.manager.user_state import refusal_in
from tft_algos.manager.whereabouts import Whereabouts
from tft_ckpt import StateUnavailable as TransportStateUnavailable
from tft_coord.core.step import Event, Stage
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.repeats import Repeats
from tft_coord.core.types import POOR_SOURCES_MOST, LossNotice, Plan, Purpose
from tft_coord.errors import DeadlinePassed

POOR_FOR_S: Final = 600.0
SOURCES_KEPT: Final = 256


@final
class StateExchange:
    """The exchange, as one rank takes part in it.

    Args:
        shared: what all parts share.
        early: states for newcomers that were taken before.
        check: says what differs where a replica heals because its state is not that of the others.
        audit: compares what was loaded with what was received.
        where: told while this rank waits for state.
        unreached: told of the sources that answer no connection.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        early: EarlyState,
        check: StateCheck,
        audit: StateAudit,
        where: Whereabouts,
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
        self._early = early
        self._check = check
        self._audit = audit
        self._where = where
        self._unreached = unreached
        self._fetch: Fetch | None = None
        self._staged: Mapping[str, Any] = {}  # what was fetched, until it was loaded
        self._received: Mapping[str, Any] = {}  # what is loaded, by path, until it was compared
        self._healed_bytes = 0
        self._silent: dict[str, tuple[str, float]] = {}  # sources whose manager server did not answer, and when
        self._metadata: dict[str, str] = {}  # of sources that were asked, by replica id
        self._poor: frozenset[str] = frozenset()
        self._untakeable = Repeats()  # why this replica's own state could not be given

    # --- the fetch, in the background ---------------------------------------------------------------------------------

    def start_fetch(self, order: do.Fetch) -> None:
        """On the quorum thread: a plan says to heal."""
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
        for notice in self._step.status.losses:  # told before there was anything to end
            self.source_lost(notice)

    def source_lost(self, notice: LossNotice) -> None:
        """From any thread: a quorum was broken by a member, which may be a source; one that lives still serves."""
        fetch = self._fetch
        if fetch is not None and fetch.plan.key == notice.key and not notice.lives:
            fetch.source_lost(notice.replica_id)

    def end_fetch(self, order: do.EndFetch) -> None:
        """End the fetch that an attempt has left running."""
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None

    def close(self) -> None:
        """End what runs, without waiting for a peer."""
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
        found |= {name: by_metadata[where] for name, where in self._metadata.items() if where in by_metadata}
        for name in sorted(found.keys() - self._poor):
            self._reports.log(logging.WARNING, "source %s is asked last from now on: %s", name, found[name])
        self._poor = frozenset(found)
        return tuple(sorted(found))[:POOR_SOURCES_MOST]

    def _learn_of_sources(self, fetch: Fetch) -> None:
        """Keep what a fetch found out."""
        now = self._clock.monotonic()
        self._metadata |= fetch.metadata
        self._silent |= {name: (why, now) for name, why in fetch.silent.items()}
        for kept in (self._metadata, self._silent):
            while len(kept) > SOURCES_KEPT:
                kept.pop(next(iter(kept)))

    # --- one step's exchange, on the training thread ------------------------------------------------------------------

    def perform(self) -> None:
        """Serve those that heal, or heal; once a step, when its plan is here."""
        before, self._where.waits = self._where.waits, True
        plan = self._step.status.plan
        effects = self._step.tell(on.ExchangeAsked(offers=plan is not None and self._early.serves(plan)))
        while effects:
            (order,) = effects
            effects = self._step.tell(self._done(order))
        self._where.waits = before

    def _done(self, order: do.Effect) -> Event:
        """Do one thing, and tell how it ended."""
        match order:
            case do.Serve():
                self._serve(order)
                return on.StateServed(order.attempt)
            case do.StageState(plan, in_vain):
                return self._stage(plan, in_vain)
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
                "whose state was declared half written by disallow_state_dict_read; call allow_state_dict_read first"
            )
            self.refuse(plan, sentence)  # they go on without it, for nobody knows when it is allowed again
            raise StateUnavailable(sentence)
        begun = self._clock.monotonic()
        try:
            state = {"user": self._take_for_others(plan), "tft": order.own}
        except StateUnavailable as error:
            sentence = f"can't serve step {plan.step}: {error}"
            if error.__cause__ is None or self._untakeable.again(str(error)):
                self._reports.log(logging.ERROR, "%s", sentence)
            else:
                self._reports.log_traceback(error.__cause__, "%s", sentence)
            self.refuse(plan, str(error))
            return
        self._untakeable.forget()
        if self._config.stands_by:
            return
        try:
            self._transport.send_checkpoint(
                list(plan.recover_dst_replica_ranks), plan.step, state, self._config.heal_timeout, key=state_key(plan)
            )
        except Exception as error:
            # This replica's step is sound, whatever its transport did. Its peers must not wait for a state that it has
            # not offered: the transport may have failed before it knew the key.
            # Where nobody comes here first, nobody misses it.
            spare = isinstance(error, TransportStateUnavailable) and not plan.recover_dst_replica_ranks
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
        """Tell those that wait for this replica's state that it can't be had from here."""
        if self._config.stands_by:
            return
        try:
            self._transport.refuse_checkpoint(
                plan.step, sentence, key=state_key(plan), dst_ranks=list(plan.recover_dst_replica_ranks)
            )
        except Exception as error:
            # As for a send: the step is sound, and who waits has its own time-out.
            self._reports.log(logging.ERROR, "can't tell those that heal that they heal in vain: %s", error)

    def _take_for_others(self, plan: Plan) -> dict[str, Any]:
        """Take the user's state for members that heal. On an island, the result of rank 0 counts.

        Raises: StateUnavailable: a function of the user raised on this rank or, on an island, on another rank.
        """
        if not self._config.rank0_synchronization_only:
            return self._user.take()
        state: dict[str, Any] = {}
        error: StateUnavailable | None = None
        try:
            state = self._user.take()
        except StateUnavailable as failure:
            error = failure
        # Who can't take part must not be waited for in a collective.
        if not self._agree(plan, error is None, Purpose.TAKEN):
            self._reports.raise_fatal()
            raise error or StateUnavailable(
                f"another rank of replica {self._coordinator.replica_id} could not take its state"
            )
        return whole(state, keep=not self._config.stands_by)  # type: ignore[no-any-return]

    # --- taking -------------------------------------------------------------------------------------------------------

    def _stage(self, plan: Plan, in_vain: Exception | None) -> on.StageEnded:
        """Wait for what is fetched. `in_vain`: why not."""
        fetch = self._fetch  # which stays until its step is over: the loss of its source must reach it
        if fetch is None:
            assert self._config.stands_by, "a plan that heals has no fetch"
            return on.StageEnded(Stage.FETCH, in_vain)
        ended = on.StageEnded(Stage.FETCH, in_vain)
        if in_vain is not None:
            fetch.cancel()
        else:
            try:
                ended = self._checked(Stage.FETCH, fetch.result())
            except HealingFailed as error:
                ended = _failed(Stage.FETCH, error)
        self._healed_bytes += fetch.received_bytes
        self._learn_of_sources(fetch)
        if ended.error is not None:
            self._unreached.sources_failed(fetch.unreached)
        return ended

    def _checked(self, stage: Stage, state: Any) -> on.StageEnded:
        """Keep a state that has come. Raises: HealingFailed: it does not fit what is registered here."""
        if not isinstance(state, Mapping) or not all(isinstance(state.get(key), Mapping) for key in ("user", "tft")):
            raise LoadFailed("the fetched state is none of a Manager's; run the same release on every replica")
        theirs, ours = set(state["user"]), self._user.names
        if theirs != ours:
            raise LoadFailed(
                f"the source has state registered under {sorted(theirs)} and this replica under {sorted(ours)}; "
                "register the same keys on every replica"
            )
        self._staged = state
        return on.StageEnded(stage, own=state["tft"], needs_own=has_shards(state["user"]))

    def _spread(self, plan: Plan) -> on.StageEnded:
        """Have what rank 0 of this island has staged on every rank."""
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
        except HealingFailed as error:
            return _failed(Stage.SPREAD, error)

    def _match(self) -> on.StageEnded:
        """Put the DTensors of a staged state on this process's own meshes; nothing is loaded.

        The meshes are those of the user's own state. The functions that give it may run collectives over the ranks of
        this group. On an island nothing in the staged state says what is cut here.
        """
        place = cut_whole if self._config.rank0_synchronization_only else place_shards
        try:
            self._staged = {**self._staged, "user": place(self._staged["user"], self._user.take())}
        except HealingFailed as failure:
            error: HealingFailed = LoadFailed(str(failure))
            error.__cause__ = failure.__cause__
            return _failed(Stage.MATCH, error)
        except StateUnavailable as failure:
            error = HealingFailed(f"the meshes for the fetched state can't be found: {failure}")
            error.__cause__ = failure
            return _failed(Stage.MATCH, error)
        return on.StageEnded(Stage.MATCH)

    def _load(self) -> on.StageEnded:
        self._received = self._audit.received(self._staged["user"])
        error = self._user.load(self._staged["user"])
        return on.StageEnded(Stage.LOAD) if error is None else _failed(Stage.LOAD, error)

    def healed(self, order: do.ReportHealed) -> None:
        """Say that this rank has healed, and look at what was loaded."""
        plan, fetch = order.plan, self._fetch
        source, by = plan.sources[0].replica_id, "through rank 0"
        if fetch is not None:
            by = f"{fetch.received_bytes} bytes in {fetch.seconds:.2f} s"
        self._reports.log(logging.INFO, "healed from %s to step %d: %s", source, plan.step, by)
        self._audit.loaded(self._received, source)
        self._received = self._staged = {}

    def heal_failed(self, order: do.ReportHealFailed) -> None:
        """Say that this rank has not healed."""
        self._received = self._staged = {}
        cause = order.error.__cause__ if isinstance(order.error, LoadFailed) and not order.is_over else None
        self._reports.heal_failed(order.name, order.error, traceback_of=cause)

    # --- the group ----------------------------------------------------------------------------------------------------

    def _agree(self, plan: Plan, yes: bool, purpose: Purpose) -> bool:
        """Whether all ranks of this group say yes."""
        if self._config.world_size == 1:
            return yes
        try:
            return self._coordinator.vote(plan.step, yes, self._config.heal_timeout, key=plan.key, purpose=purpose).yes
        except DeadlinePassed:
            self._reports.raise_fatal()  # why nobody answered, where that was told while we waited
            raise


def _failed(stage: Stage, error: HealingFailed) -> on.StageEnded:
    """Return the event for a stage that failed.

    `again` is set for an error that may not go away: a failed load, or an error in a user's state_dict.
    """
    again = str(error) if isinstance(error, LoadFailed) else refusal_in(str(error))
    return on.StageEnded(stage, error, again=again)
