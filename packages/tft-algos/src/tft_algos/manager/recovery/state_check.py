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
from tft_algos.manager.quorum.rank0_groups import rank0_digests
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
                f"can't compare the state of replica {self._shared.coordinator.replica_id} at step {core.step}, "
                "because disallow_state_dict_read marked it as half written; call allow_state_dict_read first"
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
                digests = rank0_digests(
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
                differing = describe(found)
            except UserStateError as error:
                differing = str(error)
        else:
            differing = f"the difference is unknown, because the others are already at step {plan.step}"
        replica_id, source = self._shared.coordinator.replica_id, plan.sources[0].replica_id
        sentence = (
            f"the state of replica {replica_id}, rank {config.rank}, at step {core.step} differs from that of {source} "
            f"({differing})"
        )
        if not order.stops:
            self._shared.reports.log(logging.ERROR, "%s; this replica heals", sentence)
            return
        advice = (
            f"the last healing did not fix this, {self._why_not_cured()}"
            if order.again
            else "on_divergence is stop, so restart this replica to heal it"
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
            return "and the state loaded then could not be compared; check what load_state_dict omits"
        if not audit.loaded_exactly:
            return f"because load_state_dict did not restore the received values ({audit.left}); fix load_state_dict"
        return (
            "although load_state_dict restored the received values, so the steps since then cause the difference; look "
            "for gradients or layouts that differ between replicas, values that are set outside the reductions, random "
            "numbers, nondeterministic kernels, and faulty memory in this machine"
        )

    def _cannot_compare(self, error: Exception) -> None:
        self._shared.reports.log(logging.ERROR, "can't compare the state, so this replica heals: %s", error)
