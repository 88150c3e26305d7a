"""What this replica has registered, looked at before somebody needs it, and after it was loaded.

Before the first step, and whenever more was wrapped or registered since, the Manager looks whether the state can travel
and whether what is trained stands in it. It looks once more when a step has been committed, because optimizers make
their state in their first step. After a recovery it compares what was loaded with what was received.

Law of this file: when the user's state is looked at, and who is told; it changes nothing but tensors of an optimizer
that were loaded in another dtype than they came in. What is compared, and how, stands in `coverage` and `divergence`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch

from tft_algos.dtensors import is_dtensor
from tft_algos.errors import SettingError, StateUnavailable
from tft_algos.manager.coverage import forgotten_schedulers, held_by_models, held_by_optimizers, shortened, uncovered
from tft_algos.manager.divergence import describe, difference, leaves
from tft_algos.manager.shared import Shared
from tft_ckpt import StateUnsupported

Leaves = Mapping[str, Any]
_ADVICE: Final = (
    "add them to a registered state_dict and its load_state_dict; register what rightly differs between replicas with "
    "compared=False"
)


@final
class StateAudit:
    """The look of one rank at its own state. Its methods are called on the training thread.

    Attributes:
        loaded_exactly: whether the state that was loaded last was what was received; None: none was loaded, or it could
            not be compared.
        left: what differed then, as text.
    """

    def __init__(self, shared: Shared) -> None:
        self.loaded_exactly: bool | None = None
        self.left = ""
        self._shared = shared
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._wrapped: list[str] = []  # kinds
        self._looked_at = (0, 0)  # wrapped things, and registered pieces, at the last look
        self._looked_at_step: int | None = None  # of the last look after which one more is due
        self._stateless: list[weakref.ref[torch.optim.Optimizer]] = []  # had made no state at the last look
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
        """Look at the state, if a look is due.

        Raises: SettingError: the first step is over, something is wrapped and nothing registered. StateUnavailable: a
            leaf can't travel, or a state function raises.
        """
        user = self._shared.user_state
        now = len(self._wrapped), len(user.names)
        is_news = now != self._looked_at
        if not (is_news or self._is_due_again()):
            return
        core = self._shared.step.status
        if core.torn or not user.readable:
            return
        if self._wrapped and not user.names:
            if core.name.attempt == 0:
                return  # state may be registered when the first step is over, see `Manager.register_state_dict_fn`
            raise SettingError(
                f"replica {self._shared.coordinator.replica_id}, rank {self._shared.config.rank}, trains "
                f"{shortened(self._wrapped)}, and no state is registered at its Manager, so a replica that joins would "
                "train on with weights of its own, without an error; give Manager both load_state_dict and state_dict, "
                "or call register_state_dict_fn before the second step"
            )
        self._stateless = [ref for ref in self._optimizers if not _has_state(ref)]
        try:
            state = user.take()
            self._check_travels(state)
            self._check_coverage(state)
        finally:
            # Torch's get_optimizer_state_dict makes a state by a step, which would count in the bias corrections.
            for optimizer in _living(self._stateless):
                optimizer.state.clear()
        self._looked_at = now
        self._looked_at_step = core.step if is_news else None

    def _is_due_again(self) -> bool:
        """Whether a step was committed since the first look, or an optimizer has made its state since the last one."""
        if self._looked_at_step is not None:
            return self._shared.step.status.step != self._looked_at_step
        # The ranks of a larger group may get their first gradients in different steps, and a state function may gather.
        return self._shared.config.world_size == 1 and any(map(_has_state, self._stateless))

    def _check_travels(self, state: Mapping[str, Any]) -> None:
        try:
            self._shared.transport.check_state(state)
        except StateUnsupported as error:
            raise StateUnavailable(
                f"the state of replica {self._shared.coordinator.replica_id}, rank {self._shared.config.rank}, can't "
                f"be sent to a replica that joins: {error}"
            ) from error

    def _check_coverage(self, state: Mapping[str, Any]) -> None:
        """Warn of what the state lacks. An error of a user's class ends no step here, where nothing depends on it."""
        looks = [self._check_tensors]
        if self._shared.step.status.name.attempt > 0:
            looks.append(self._check_schedulers)  # one may be registered when the first step is over
        for look in looks:
            try:
                look(state)
            except Exception as error:
                self._can_not_look([repr(error)])

    def _can_not_look(self, reasons: list[str]) -> None:
        reasons = [reason for reason in reasons if reason not in self._reported]
        if reasons:
            self._reported.update(reasons)
            self._shared.reports.log(
                logging.DEBUG,
                "can't tell whether the registered state has all that is trained: %s",
                shortened(reasons),
            )

    def _check_tensors(self, state: Mapping[str, Any]) -> None:
        models = held_by_models(_living(self._models))
        held = [*models, *held_by_optimizers(_living(self._optimizers), models)]
        lacking = [name for name in uncovered(held, state) if name not in self._reported]
        if lacking:
            self._reported.update(lacking)
            self._shared.reports.log(
                logging.WARNING,
                "%d of %d tensors of wrapped models and optimizers stand in no registered state, so a replica that "
                "joins keeps its own: %s; %s",
                len(lacking),
                sum(one.changes for one in held),
                shortened(lacking),
                _ADVICE,
            )

    def _check_schedulers(self, state: Mapping[str, Any]) -> None:
        found = forgotten_schedulers(_living(self._optimizers), state)
        self._can_not_look(found.unreadable)
        forgotten = [name for name in found.forgotten if name not in self._reported]
        if forgotten:
            self._reported.update(forgotten)
            self._shared.reports.log(
                logging.WARNING,
                "learning-rate schedulers of wrapped optimizers stand in no registered state, so a replica that joins "
                "goes on with a learning rate of its own: %s; register their state_dict and load_state_dict, under a "
                "key with the word scheduler if it is another dict than torch's",
                shortened(forgotten),
            )

    # --- after a recovery ---------------------------------------------------------------------------------------------

    def received(self, state: Mapping[str, Any]) -> Leaves:
        """Return the leaves to compare after the load. A load function may change the containers, so this is a new
        dict.
        """
        return dict(leaves(self._shared.user_state.compared(state)))

    def loaded(self, received: Leaves, source: str) -> None:
        """Compare the state here with what was received, mend what can be mended, and name the rest.

        All ranks of the group have loaded, and call this.

        Args:
            received: what `received` gave.
            source: replica id.
        """
        reports = self._shared.reports
        self.loaded_exactly, self.left = None, ""
        try:
            own = dict(leaves(self._shared.user_state.take_compared()))
            mended = self._mend_dtypes(received, own)
            found = [(path, how) for path in sorted({*received, *own}) if (how := _how(path, own, received))]
        except StateUnavailable as error:
            reports.log(logging.WARNING, "can't compare the loaded state with what was received: %s", error)
            return
        if mended:
            reports.log(
                logging.INFO,
                "loaded in another dtype than received, as torch's optimizers do it, and set to what was received: %s",
                shortened(mended),
            )
        self.loaded_exactly = not found
        if found:
            self.left = describe(found)
            reports.log(
                logging.WARNING,
                "the loaded state is not what was received from %s: %s; look at what load_state_dict leaves out or "
                "converts, and register what rightly differs with compared=False",
                source,
                self.left,
            )

    def _mend_dtypes(self, received: Leaves, own: dict[str, Any]) -> list[str]:
        """Give optimizers the tensors that they hold in another dtype. Returns: the paths; `own` is as it is then."""
        places = {
            id(value): (entries, key)
            for optimizer in _living(self._optimizers)
            for entries in optimizer.state.values()
            if isinstance(entries, dict)
            for key, value in entries.items()
            if isinstance(value, torch.Tensor)
        }
        mended = []
        for path, here in own.items():
            came = received.get(path)
            if not isinstance(came, torch.Tensor) or not isinstance(here, torch.Tensor) or id(here) not in places:
                continue
            if came.dtype == here.dtype or came.shape != here.shape or is_dtensor(came) != is_dtensor(here):
                continue
            entries, key = places[id(here)]
            # A copy: what was received lies in one piece of memory with all the rest of it.
            entries[key] = own[path] = came.detach().to(here.device, copy=True)
            mended.append(path)
        return mended


def _how(path: str, own: Leaves, received: Leaves) -> str:
    if path not in own:
        return "is at the source and not here"
    if path not in received:
        return "is here and not at the source"
    return difference(own[path], received[path], path, sampled=True)


def _living(references: Sequence[weakref.ref[Any]]) -> list[Any]:
    return [value for reference in references if (value := reference()) is not None]


def _has_state(reference: weakref.ref[torch.optim.Optimizer]) -> bool:
    optimizer = reference()
    return optimizer is not None and bool(optimizer.state)
