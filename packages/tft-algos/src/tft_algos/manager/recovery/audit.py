"""Checks of the registered state, before another replica needs it and after it was loaded.

Before the first step, and after each new wrapper or registration, the Manager checks that the state can be sent. It
also checks that the state contains everything that is trained. A second check follows after a commit, because
optimizers make their state in their first step. After a recovery, the loaded state is compared with the received one.

Law of this file: the time of the checks, and the reports of their results. Nothing is changed, except optimizer tensors
that were loaded with another dtype than received. The comparisons are in `coverage` and `divergence`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch

from tft_algos.dtensors import is_dtensor
from tft_algos.errors import ConfigError, UserStateError
from tft_algos.manager.context import ManagerContext
from tft_algos.manager.recovery.coverage import (
    forgotten_schedulers,
    shortened,
    tensors_of_models,
    tensors_of_optimizers,
    uncovered,
)
from tft_algos.manager.recovery.divergence import describe, difference, leaves
from tft_ckpt import StateUnsupportedError

Leaves = Mapping[str, Any]
_ADVICE: Final = (
    "add them to a registered state_dict and its load_state_dict; register state that may differ between replicas with "
    "compared=False"
)


@final
class StateAudit:
    """The checks of one rank's own state. The training thread calls its methods.

    Attributes:
        loaded_exactly: the last loaded state equals the received one. None: no state was loaded, or it could not be
            compared.
        left: the differences of the last load, as text.
    """

    def __init__(self, shared: ManagerContext) -> None:
        self.loaded_exactly: bool | None = None
        self.left = ""
        self._shared = shared
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._wrapped: list[str] = []  # class names
        self._checked_parts = (0, 0)  # numbers of wrapped objects and registered parts at the last check
        self._checked_step: int | None = None  # the step of the last check, if one more is due after it
        self._stateless: list[weakref.ref[torch.optim.Optimizer]] = []  # optimizers that had no state at the last check
        self._reported: set[str] = set()

    def model_wrapped(self, model: torch.nn.Module) -> None:
        """Record a model that is trained with this Manager."""
        self._models.append(weakref.ref(model))
        self._wrapped.append(type(model).__name__)

    def optimizer_wrapped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer that is used with this Manager."""
        self._optimizers.append(weakref.ref(optimizer))
        self._shared.user_state.optimizers.add(optimizer)
        self._wrapped.append(type(optimizer).__name__)

    # --- before a step ------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Check the state, if a check is due.

        Raises: ConfigError: the first step is over, a model or optimizer is wrapped, and no state is registered.
            UserStateError: a leaf can't be sent, or a state function raises.
        """
        user = self._shared.user_state
        now = len(self._wrapped), len(user.names)
        is_new = now != self._checked_parts
        if not (is_new or self._is_due_again()):
            return
        core = self._shared.step.status
        if core.torn or not user.readable:
            return
        if self._wrapped and not user.names:
            if core.name.attempt == 0:
                return  # state may still be registered after the first step, see `Manager.register_state_dict_fn`
            raise ConfigError(
                f"replica {self._shared.coordinator.replica_id}, rank {self._shared.config.rank}, trains "
                f"{shortened(self._wrapped)}, and no state is registered at its Manager, so a replica that joins would "
                "keep its own weights, without an error; give Manager both load_state_dict and state_dict, or call "
                "register_state_dict_fn before the second step"
            )
        self._stateless = [ref for ref in self._optimizers if not _has_state(ref)]
        try:
            state = user.take()
            self._check_travels(state)
            self._check_coverage(state)
        finally:
            # Torch's get_optimizer_state_dict makes the state with a step, which would count in the bias corrections.
            for optimizer in _alive(self._stateless):
                optimizer.state.clear()
        self._checked_parts = now
        self._checked_step = core.step if is_new else None

    def _is_due_again(self) -> bool:
        """Return whether a step was committed since the first check, or an optimizer has a state since the last one."""
        if self._checked_step is not None:
            return self._shared.step.status.step != self._checked_step
        # In a larger group, the ranks may get their first gradients in different steps, and a state function may
        # gather.
        return self._shared.config.world_size == 1 and any(map(_has_state, self._stateless))

    def _check_travels(self, state: Mapping[str, Any]) -> None:
        try:
            self._shared.transport.check_state(state)
        except StateUnsupportedError as error:
            raise UserStateError(
                f"the state of replica {self._shared.coordinator.replica_id}, rank {self._shared.config.rank}, can't "
                f"be sent to a replica that joins: {error}"
            ) from error

    def _check_coverage(self, state: Mapping[str, Any]) -> None:
        """Warn of missing parts of the state.

        An error of a user's class does not end the step, which does not depend on it.
        """
        checks = [self._check_tensors]
        if self._shared.step.status.name.attempt > 0:
            checks.append(self._check_schedulers)  # a scheduler may still be registered after the first step
        for check in checks:
            try:
                check(state)
            except Exception as error:
                self._report_unreadable([repr(error)])

    def _report_unreadable(self, reasons: list[str]) -> None:
        reasons = [reason for reason in reasons if reason not in self._reported]
        if reasons:
            self._reported.update(reasons)
            self._shared.reports.log(
                logging.DEBUG,
                "can't tell whether the registered state has all trained tensors and schedulers: %s",
                shortened(reasons),
            )

    def _check_tensors(self, state: Mapping[str, Any]) -> None:
        models = tensors_of_models(_alive(self._models))
        tensors = [*models, *tensors_of_optimizers(_alive(self._optimizers), models)]
        missing = [name for name in uncovered(tensors, state) if name not in self._reported]
        if missing:
            self._reported.update(missing)
            self._shared.reports.log(
                logging.WARNING,
                "%d of %d tensors of wrapped models and optimizers are missing in the registered state, so a replica "
                "that joins keeps its own values: %s; %s",
                len(missing),
                sum(one.changes for one in tensors),
                shortened(missing),
                _ADVICE,
            )

    def _check_schedulers(self, state: Mapping[str, Any]) -> None:
        found = forgotten_schedulers(_alive(self._optimizers), state)
        self._report_unreadable(found.unreadable)
        forgotten = [name for name in found.forgotten if name not in self._reported]
        if forgotten:
            self._reported.update(forgotten)
            self._shared.reports.log(
                logging.WARNING,
                "learning-rate schedulers of wrapped optimizers are missing in the registered state, so a replica "
                "that joins keeps its own learning rate: %s; register their state_dict and load_state_dict, under a "
                "key with the word scheduler if the dict is not torch's",
                shortened(forgotten),
            )

    # --- after a recovery ---------------------------------------------------------------------------------------------

    def received(self, state: Mapping[str, Any]) -> Leaves:
        """Return the leaves to compare after the load.

        A load function may change the containers, so this is a new dict.
        """
        return dict(leaves(self._shared.user_state.compared(state)))

    def loaded(self, received: Leaves, source: str) -> None:
        """Compare the state here with the received one, fix what can be fixed, and report the rest.

        All ranks of the group call this after their load.

        Args:
            received: the result of `received`.
            source: replica id.
        """
        reports = self._shared.reports
        self.loaded_exactly, self.left = None, ""
        try:
            own = dict(leaves(self._shared.user_state.take_compared()))
            restored = self._restore_dtypes(received, own)
            found = [(path, how) for path in sorted({*received, *own}) if (how := _difference_at(path, own, received))]
        except UserStateError as error:
            reports.log(logging.WARNING, "can't compare the loaded state with what was received: %s", error)
            return
        if restored:
            reports.log(
                logging.INFO,
                "restored the received tensors, which torch's optimizers had loaded with another dtype: %s",
                shortened(restored),
            )
        self.loaded_exactly = not found
        if found:
            self.left = describe(found)
            reports.log(
                logging.WARNING,
                "the loaded state differs from the state received from %s: %s; check what load_state_dict omits or "
                "converts, and register state that may differ with compared=False",
                source,
                self.left,
            )

    def _restore_dtypes(self, received: Leaves, own: dict[str, Any]) -> list[str]:
        """Replace optimizer tensors that were loaded with another dtype by the received ones.

        Returns: the paths of these tensors. `own` is updated.
        """
        places = {
            id(value): (entries, key)
            for optimizer in _alive(self._optimizers)
            for entries in optimizer.state.values()
            if isinstance(entries, dict)
            for key, value in entries.items()
            if isinstance(value, torch.Tensor)
        }
        restored = []
        for path, here in own.items():
            came = received.get(path)
            if not isinstance(came, torch.Tensor) or not isinstance(here, torch.Tensor) or id(here) not in places:
                continue
            if came.dtype == here.dtype or came.shape != here.shape or is_dtensor(came) != is_dtensor(here):
                continue
            entries, key = places[id(here)]
            # A copy, because the received tensor shares one allocation with the rest of the state.
            entries[key] = own[path] = came.detach().to(here.device, copy=True)
            restored.append(path)
        return restored


def _difference_at(path: str, own: Leaves, received: Leaves) -> str:
    if path not in own:
        return "is missing here"
    if path not in received:
        return "is missing at the source"
    return difference(own[path], received[path], path, sampled=True)


def _alive(references: Sequence[weakref.ref[Any]]) -> list[Any]:
    return [value for reference in references if (value := reference()) is not None]


def _has_state(reference: weakref.ref[torch.optim.Optimizer]) -> bool:
    optimizer = reference()
    return optimizer is not None and bool(optimizer.state)
