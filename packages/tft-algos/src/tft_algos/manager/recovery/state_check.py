"""Checks that all replicas hold the same state: periodic comparisons, and an explanation if one differs.

Law of this file: one replica's part in the comparison. The digest, and the differences of two states, are in
`divergence`. The lighthouse receives the digests with the lineage, and decides which replica has diverged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, final

from tft_algos.errors import StateDivergedError, UserStateError
from tft_algos.manager.context import ManagerContext
from tft_algos.manager.quorum.rank0_groups import island_digests
from tft_algos.manager.recovery.audit import StateAudit
from tft_algos.manager.recovery.divergence import StateDigester, combine, describe, differences
from tft_coord.core.step.effects import CompareState, ExplainDivergence
from tft_coord.core.step.events import StateCompared
from tft_coord.errors import RequestTimeoutError


@final
class StateCheck:
    """The comparison on one rank. The training thread calls its methods.

    Args:
        shared: what all parts share.
        audit: knows whether the state was loaded as received.
    """

    def __init__(self, shared: ManagerContext, audit: StateAudit) -> None:
        self._shared = shared
        self._audit = audit
        self._digester = StateDigester()

    def compare(self, order: CompareState) -> None:
        """Add the digest of the user's state to the lineage that this group reports.

        Raises: UserStateError: the user has marked the state as half written.
        """
        core, config, user = self._shared.step.status, self._shared.config, self._shared.user_state
        name = order.name
        if not user.readable:
            raise UserStateError(
                f"the state of replica {self._shared.coordinator.replica_id} is to be compared at step {core.step}, "
                "and was declared half written by disallow_state_dict_read; call allow_state_dict_read first"
            )
        own = ""  # given by a rank without a state to show, because a group is compared as a whole
        state: dict[str, Any] | None = None
        digests: tuple[str, ...] = ("",)
        try:
            state = user.take_compared()  # on every rank, because it may be a collective of the group
            if not core.torn and not config.rank0_synchronization_only:
                own = self._digester.digest(state)
        except UserStateError as error:
            self._cannot_compare(error)
        try:
            if config.rank0_synchronization_only:
                digests = island_digests(
                    state,
                    name,
                    digest=self._digester.digest,
                    is_torn=core.torn,
                    config=config,
                    coordinator=self._shared.coordinator,
                )
            elif config.world_size > 1:
                digests = self._shared.coordinator.gather(name, own, config.timeout)
            else:
                digests = (own,)
        except (RequestTimeoutError, UserStateError) as error:
            self._cannot_compare(error)
        self._shared.step.tell(StateCompared(combine(digests) if all(digests) else None))

    def explain(self, order: ExplainDivergence, fetched: Mapping[str, Any]) -> None:
        """Report what differs, if this replica heals because its state has diverged.

        Args:
            order: from the step core.
            fetched: the source's state.
        Raises: StateDivergedError: healing is disabled, or the last one did not cure it.
        """
        core, config, user = self._shared.step.status, self._shared.config, self._shared.user_state
        plan = order.plan
        found: list[tuple[str, str]] = []
        if plan.step == core.step:
            try:
                found = differences(user.take_compared(), user.compared(fetched["user"]))
                told = describe(found)
            except UserStateError as error:
                told = str(error)
        else:
            told = f"the others are at step {plan.step} by now, so what differed can't be told any more"
        replica_id, source = self._shared.coordinator.replica_id, plan.sources[0].replica_id
        sentence = (
            f"the state of replica {replica_id}, rank {config.rank}, at step {core.step} is not that of {source} "
            f"({told})"
        )
        if not order.stops:
            self._shared.reports.log(logging.ERROR, "%s; it heals", sentence)
            return
        advice = (
            f"healing did not cure it the last time, {self._why_not_cured()}"
            if order.again
            else "on_divergence is stop; start this replica again to have it heal"
        )
        raise StateDivergedError(
            f"{sentence}; {advice}",
            replica_id=replica_id,
            source=source,
            step=core.step,
            paths=tuple(path for path, _ in found),
        )

    def _why_not_cured(self) -> str:
        audit = self._audit
        if audit.loaded_exactly is None:
            return "and what was loaded then could not be compared; look at what its load_state_dict leaves out"
        if not audit.loaded_exactly:
            return f"because load_state_dict left other values than it was given ({audit.left}); mend that"
        return (
            "though load_state_dict left what it was given, so the steps since then make it differ here: look for "
            "gradients or layouts that are not the same on every replica, values that are set outside the reductions, "
            "random numbers, kernels that are not deterministic, and this machine's memory"
        )

    def _cannot_compare(self, error: Exception) -> None:
        self._shared.reports.log(logging.ERROR, "can't compare the state, so this replica heals: %s", error)
