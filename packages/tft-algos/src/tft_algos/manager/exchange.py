"""Live state between replicas: given to those that heal, or taken from one that has it.

Both happen on the training thread, at a step boundary, whole groups at a time: all ranks of a group have staged what
they fetched, and found where it belongs, before one of them loads, and all have loaded before one goes on. Only the
fetching itself runs in the background.

Law of this file: one step's exchange. Whether there is one is said by the plan; what a healing means for the step is
`core`'s, and how a state crosses is the transport's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, final

from tft_algos.errors import HealingFailed, LoadFailed, StateUnavailable
from tft_algos.manager.audit import StateAudit
from tft_algos.manager.core import Healing
from tft_algos.manager.early import EarlyState
from tft_algos.manager.healing import Fetch, state_key, takers
from tft_algos.manager.island import spread, whole
from tft_algos.manager.parts import Group
from tft_algos.manager.repeats import Repeats
from tft_algos.manager.shards import cut_whole, has_shards, place_shards
from tft_algos.manager.shared import Shared
from tft_algos.manager.state_check import StateCheck
from tft_algos.manager.unreached import UnreachedPeers
from tft_algos.manager.user_state import refusal_in
from tft_algos.manager.whereabouts import Whereabouts
from tft_ckpt import StateUnavailable as TransportStateUnavailable
from tft_coord.core.types import POOR_SOURCES_MOST, LossNotice, Plan, Purpose
from tft_coord.errors import DeadlinePassed

POOR_FOR_S: Final = 600.0
SOURCES_KEPT: Final = 256


@final
class StateExchange:
    """The exchange, as one rank takes part in it.

    Args:
        shared: what all parts share.
        group: the process group across replicas, ended where others count on a replica that could not heal.
        early: states for newcomers that were taken before.
        check: says what differs where a replica heals because its state is not that of the others.
        audit: compares what was loaded with what was received.
        where: told while this rank waits for state.
        unreached: told of the sources that answer no connection.
    Attributes:
        done: state was given or taken in this step, or nobody wanted any.
        healed_in: the last attempt in which the user's state came from a source.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        group: Group,
        early: EarlyState,
        check: StateCheck,
        audit: StateAudit,
        where: Whereabouts,
        unreached: UnreachedPeers,
    ) -> None:
        self.done = False
        self.healed_in: int | None = None
        self._config = shared.config
        self._core = shared.core
        self._coordinator = shared.coordinator
        self._transport = shared.transport
        self._user = shared.user_state
        self._reports = shared.reports
        self._clock = shared.clock
        self._closing = shared.closing
        self._group = group
        self._early = early
        self._check = check
        self._audit = audit
        self._where = where
        self._unreached = unreached
        self._fetch: Fetch | None = None
        self._received: Mapping[str, Any] = {}  # what is loaded, by path, until it was compared
        self._healed_bytes = 0
        self._silent: dict[str, tuple[str, float]] = {}  # sources whose manager server did not answer, and when
        self._metadata: dict[str, str] = {}  # of sources that were asked, by replica id
        self._poor: frozenset[str] = frozenset()
        self._untakeable = Repeats()  # why this replica's own state could not be given
        self._unloadable = Repeats()  # why a state could not be loaded here

    @property
    def has_just_healed(self) -> bool:
        """Whether this replica healed in the attempt before the one that was begun last."""
        return self.healed_in == self._core.name.attempt - 1

    # --- the fetch, in the background ---------------------------------------------------------------------------------

    def start_fetch(self, plan: Plan) -> None:
        """On the quorum thread: a plan says to heal."""
        if self._config.stands_by:
            return
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

    def source_lost(self, notice: LossNotice) -> None:
        """From any thread: a quorum was broken by a member, which may be a source; one that lives still serves."""
        fetch = self._fetch
        if fetch is not None and fetch.plan.key == notice.key and not notice.lives:
            fetch.source_lost(notice.replica_id)

    def settle(self) -> None:
        """End what an attempt has left running, and what its peers may still wait for."""
        plan = self._core.plan
        if plan is not None and plan.serve and not self.done and not self._early.serves(plan):
            self._refuse(plan, f"its step {plan.step} ended before it took its state")
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None

    def close(self) -> None:
        """End what runs, without waiting for a peer."""
        if self._fetch is not None:
            self._transport.abort()
            self._fetch.cancel()

    def poor_sources(self) -> tuple[str, ...]:
        """The replicas that hung, lied or were slow as sources within the last ten minutes; for the lighthouse."""
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

    def step_begins(self) -> None:
        """A quorum is asked for: nothing was exchanged yet."""
        self.done = False

    def perform(self) -> None:
        """Serve those that heal, or heal; once a step, when its plan is here."""
        before, self._where.waits = self._where.waits, True
        plan = self._core.plan
        if plan is not None and plan.serve:
            if not self._early.serves(plan):
                self._serve(plan)
        elif plan is not None and self._core.healing is Healing.FETCHING:
            self._heal(plan)
        self._where.waits = before
        self.done = True

    # --- giving -------------------------------------------------------------------------------------------------------

    def _serve(self, plan: Plan) -> None:
        if not self._user.readable:
            sentence = (
                f"replicas {list(plan.recover_dst_replica_ranks)} heal from replica {self._coordinator.replica_id}, "
                "whose state was declared half written by disallow_state_dict_read; call allow_state_dict_read first"
            )
            self._refuse(plan, sentence)  # they go on without it, for nobody knows when it is allowed again
            raise StateUnavailable(sentence)
        begun = self._clock.monotonic()
        try:
            state = {"user": self._take_for_others(plan), "tft": self._core.snapshot_state()}
        except StateUnavailable as error:
            sentence = f"can't serve step {plan.step}: {error}"
            if error.__cause__ is None or self._untakeable.again(str(error)):
                self._reports.log(logging.ERROR, "%s", sentence)
            else:
                self._reports.log_traceback(error.__cause__, "%s", sentence)
            self._refuse(plan, str(error))
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
            self._refuse(plan, f"its transport could not offer it: {str(error) or type(error).__name__}")
            return
        self._reports.log(
            logging.INFO,
            "serving step %d %s, offered in %.0f ms",
            plan.step,
            takers(plan),
            1_000 * (self._clock.monotonic() - begun),
        )

    def _refuse(self, plan: Plan, sentence: str) -> None:
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
        """The user's state for those that heal; on an island rank 0's result counts.

        Raises: StateUnavailable: on this rank or, on an island, another one, a function of the user's raised.
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

    def _heal(self, plan: Plan) -> None:
        """Stage, agree inside the group that all have staged, load, agree that all have loaded; all or none."""
        fetch = self._fetch  # which stays until `settle`: the loss of its source must reach it, and it may end late
        assert fetch is not None or self._config.stands_by, "a plan that heals has no fetch"
        error: Exception | None = None
        state: Mapping[str, Any] = {}
        in_vain = self._core.is_awaited
        try:
            if in_vain:
                if fetch is not None:
                    fetch.cancel()
                raise HealingFailed(
                    f"replica {plan.replica_id} does not wait for the state of step {plan.step}, because its source "
                    "waits for a process group that could not be configured here; the next quorum tries again",
                    sources=tuple(source.replica_id for source in plan.sources),
                )
            if fetch is not None:
                state = self._check_staged(fetch.result())
        except HealingFailed as failure:
            error = failure
        if fetch is not None:
            self._healed_bytes += fetch.received_bytes
            self._learn_of_sources(fetch)
            if error is not None:
                self._unreached.sources_failed(fetch.unreached)
        if not self._agree(plan, error is None, Purpose.STAGED):
            error = error or self._other_rank_failed(plan, "fetch")
        if error is None:
            try:
                state = self._place(plan, self._spread(plan, state))
            except HealingFailed as failure:
                error = failure
        if error is None:
            error = self._load(plan, state)
        if error is not None:
            self._did_not_heal(plan, error, by_source=not in_vain)
            return
        self._core.healed(state["tft"])
        self._unloadable.forget()
        self.healed_in = self._core.name.attempt
        source, by = plan.sources[0].replica_id, "through rank 0"
        if fetch is not None:
            by = f"{fetch.received_bytes} bytes in {fetch.seconds:.2f} s"
        self._reports.log(logging.INFO, "healed from %s to step %d: %s", source, plan.step, by)
        self._audit.loaded(self._received, source)
        self._received = {}

    def _load(self, plan: Plan, state: Mapping[str, Any]) -> HealingFailed | None:
        """Load a staged state. Returns: why not all ranks of this group have."""
        self._check.explain(plan, state)
        self._received = self._audit.received(state["user"])
        self._core.load_began()
        error: HealingFailed | None = self._user.load(state["user"])
        # Who has loaded would vote on another step than who has not, and each would wait for the other.
        if not self._agree(plan, error is None, Purpose.LOADED):
            self._reports.raise_fatal()
            error = error or self._other_rank_failed(plan, "load")
        return error

    def _did_not_heal(self, plan: Plan, error: Exception, *, by_source: bool) -> None:
        """Report it, or raise it where the next attempt would fail in the same way.

        Raises: StateUnavailable: for the same reason twice in a row, a state could not be loaded here, or a source's
            state_dict raised.
        """
        self._received = {}
        cause = error.__cause__ if isinstance(error, LoadFailed) else None
        repeated = str(error) if isinstance(error, LoadFailed) else refusal_in(str(error))
        is_over = bool(repeated) and self._unloadable.again(repeated)
        self._reports.heal_failed(error, by_source=by_source, traceback_of=None if is_over else cause)
        if not self._core.is_asynchronous:
            # The others count on this group's gradients: end the reduction for them, rather than let them wait.
            self._group.abort()
        if is_over:
            raise StateUnavailable(
                f"replica {self._coordinator.replica_id}, rank {self._config.rank}, could not take over step "
                f"{plan.step} for the same reason as the last time: {error}. It ends, so that the others are not "
                "disturbed by further attempts; mend what is named, and start this replica again"
            ) from (cause or error)

    def _check_staged(self, state: Any) -> Mapping[str, Any]:
        """Raises: HealingFailed: the fetched state does not fit what is registered here. Nothing was loaded."""
        if not isinstance(state, Mapping) or not all(isinstance(state.get(key), Mapping) for key in ("user", "tft")):
            raise LoadFailed("the fetched state is none of a Manager's; run the same release on every replica")
        self._core.check_staged(state["tft"])
        theirs, ours = set(state["user"]), self._user.names
        if theirs != ours:
            raise LoadFailed(
                f"the source has state registered under {sorted(theirs)} and this replica under {sorted(ours)}; "
                "register the same keys on every replica"
            )
        return state

    def _spread(self, plan: Plan, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A staged state; on an island that which rank 0 has staged, on every rank.

        Raises: HealingFailed: on this rank or another one, it did not come, or does not fit what is registered there.
        """
        if not self._config.rank0_synchronization_only or self._config.world_size == 1:
            return state
        error: HealingFailed | None = None
        try:
            state = spread(
                state,
                plan,
                config=self._config,
                coordinator=self._coordinator,
                transport=self._transport,
                received_before=self._healed_bytes,
                cancelled=lambda: self._closing.is_set() or self._core.fatal is not None,
            )
            self._check_staged(state)
        except HealingFailed as failure:
            error = failure
        if not self._agree(plan, error is None, Purpose.SPREAD):
            self._reports.raise_fatal()
            raise error or self._other_rank_failed(plan, "take over")
        return state

    def _place(self, plan: Plan, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A staged state with DTensors on this process's own meshes; nothing is loaded.

        The meshes are those of the user's own state. The functions that give it may run collectives over the ranks of
        this group, so all ranks call them, at the same time, or none does; and all have found their meshes before one
        of them loads.

        Raises: HealingFailed: on this rank or another one, the state does not fit.
        """
        whole_only = self._config.rank0_synchronization_only  # and then nothing in it says what is sharded here
        if not whole_only and self._agree(plan, not has_shards(state["user"]), Purpose.WITHOUT_OWN):
            return state
        # A rank that was lost makes it a no as well, and there is nobody to run a collective with.
        self._reports.raise_fatal()
        error: HealingFailed | None = None
        user: Any = None
        try:
            user = (cut_whole if whole_only else place_shards)(state["user"], self._user.take())
        except HealingFailed as failure:
            error = LoadFailed(str(failure))
            error.__cause__ = failure.__cause__
        except StateUnavailable as failure:
            error = HealingFailed(f"the meshes for the fetched state can't be found: {failure}")
            error.__cause__ = failure
        if not self._agree(plan, error is None, Purpose.MATCHED):
            raise error or self._other_rank_failed(plan, "find the meshes for")
        return {**state, "user": user}

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

    def _other_rank_failed(self, plan: Plan, what: str) -> HealingFailed:
        return HealingFailed(
            f"another rank of replica {self._coordinator.replica_id} could not {what} step {plan.step}; a group heals "
            "whole, so the next quorum tries again",
            sources=tuple(source.replica_id for source in plan.sources),
        )
