"""The optimizer of a training loop, wrapped so that a step is a transaction.

`zero_grad` begins a step of the Manager, and `step` ends it. The wrapped optimizer steps if the group commits, and is
left alone otherwise. Several wrapped optimizers share a step: the first `zero_grad` begins it, and the first `step`
votes on it. Everything else is forwarded to the wrapped optimizer, so that schedulers, clipping and checkpoints work as
usual.

Law of this file: forwarding, and which call begins and ends a step of the Manager.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, final

import torch
from torch.utils.hooks import RemovableHandle

from tft_algos.backward import reductions_of
from tft_algos.errors import ConfigError, UnsupportedFeatureError, UsageError
from tft_algos.manager import Manager

_FRAMES_BETWEEN = 4  # maximum number of frames of a scheduler and a profiler between torch's function and this module
_INITIALIZES_STATE = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")


@final
class Optimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose steps are committed by a Manager.

    A loop calls `zero_grad()`, forward, backward, `step()`. Several optimizers on one Manager, each in its own wrapper,
    commit together. For this, all `zero_grad` calls and all backward passes come before the first `step`. If the
    optimizers alternate (`a.zero_grad`, backward, `a.step`, `b.zero_grad`, backward, `b.step`), each has its own steps.
    If `a` and `b` then reduce different parameters, a newcomer must not begin with `a` while the others are at `b`. So
    derive the turn from the step. With `use_async_quorum=False` the step is known before the forward pass:

        manager.start_quorum()
        turn = a if manager.current_step() % 2 == 0 else b
        turn.zero_grad()

    A rejected step leaves the parameters unchanged here, but not necessarily on the other replicas. So a counter of
    steps must not advance either. `step` returns whether it stepped:

        if optimizer.step():
            scheduler.step()

    Register the scheduler's state at the Manager beside the optimizer's, so that a replica that heals continues with
    the others' learning rate. With a `torch.amp.GradScaler`, `scaler.step(optimizer)` returns the result of `step`. It
    returns None if it skipped the step because of infinities. A skipped step stays open, without a vote, and the next
    `zero_grad` begins the next one. The gradients are averages, so every replica skips the same steps. Register the
    scaler's state at the Manager, too. A replica that heals has unscaled its gradients with its own scale, before it
    got the others' scale. If the two differ, this replica does not step, and heals once more.

    Args:
        manager: decides whether a step counts.
        optim: performs the step. Its hooks run when it steps, so not for a rejected step. It may be a container of
            optimizers whose own `zero_grad` and `step` call this wrapper's methods. The container must call its parts
            when the wrapper calls it in turn.
    Raises: ConfigError: `manager` is not a Manager, or `optim` is not an optimizer. UnsupportedFeatureError: `optim`
        can't step without a closure, for example LBFGS.
    """

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        # The base class's __init__ would make a second set of groups and states. This class uses the wrapped
        # optimizer's.
        is_manager = callable(getattr(manager, "should_commit", None))  # the user may have a Manager class of their own
        if not is_manager or not isinstance(optim, torch.optim.Optimizer):
            given = optim.__name__ if isinstance(optim, type) else type(optim).__name__
            raise ConfigError(
                f"Optimizer was given a {type(manager).__name__} and {given}; give a Manager, and the "
                "torch.optim.Optimizer after it"
            )
        closure = inspect.signature(optim.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedFeatureError(
                f"{type(optim).__name__} evaluates the model again through a closure, outside the step that is "
                "committed; use an optimizer that steps without one"
            )
        self.manager = manager
        self.optim = optim
        self._attempt = 0  # the Manager's attempt that this optimizer has joined
        self._has_stepped = False
        self._inside: str | None = None  # the running method of the wrapped optimizer
        self._initialized_state = False
        # A Manager class of the user may lack it.
        describe = getattr(getattr(manager, "strategy", None), "describe_optimizer", None)
        if describe is not None:
            describe(optim)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step: start the quorum, and clear the gradients.

        This call joins a step that is open. If this optimizer has joined it already, for example because a batch was
        discarded after its forward pass, the step may continue. It continues if nothing was reduced in it yet. Other
        replicas may wait in their reductions, and then only wait for the next batch. Otherwise a new step begins.

        Raises: UsageError: the wrapped optimizer's own zero_grad called this. Also any error of `Manager.start_quorum`.
        """
        if self._initialized_state:
            self._initialized_state = False
            self.optim.zero_grad(set_to_none)
            return
        with self._calling("zero_grad"):
            manager = self.manager
            attempt = manager.strategy.attempt
            if (
                attempt == 0
                or manager.strategy.verdict is not None
                or (attempt == self._attempt and not self._can_continue())
            ):
                try:
                    manager.start_quorum()
                finally:
                    self._attempt = manager.strategy.attempt
            self._attempt = manager.strategy.attempt
            self._has_stepped = False
            self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """End a step. The wrapped optimizer steps if the group commits.

        Returns: whether the optimizer stepped.
        Raises:
            UsageError: one of these cases. A closure was given, which would run the model again outside the committed
                step. No zero_grad came before, or another optimizer has begun another step since. This optimizer has
                stepped already. A backward pass of this step has left out gradients, because it raised or because
                parameters were not used. No pass has reduced a gradient though a wrapped model needs it. The wrapped
                optimizer's own step called this.
            Also any error of `Manager.should_commit` and of the wrapped optimizer. After the latter, this replica heals
                before its gradients count again.
        """
        if closure is not None:
            raise UsageError(
                "a step that is committed can't re-evaluate the model through a closure; compute the loss before step()"
            )
        if not self.optim.state and _torch_initializes_state():
            # This is not a step of the training: gradients and learning rates are zero.
            self.optim.step()
            self._initialized_state = True
            return True
        with self._calling("step"):
            self._check_turn()
            if self.manager.strategy.verdict is None and self._has_open_pass():
                raise UsageError(
                    f"step() was called after a backward pass of attempt {self._attempt} that did not reduce all "
                    "gradients; if the pass raised, give its error to Manager.report_error, or continue with "
                    "zero_grad(); if the loss does not depend on all parameters, set find_unused_parameters=True"
                )
            if reductions_of(self.manager).has_models and self.manager.strategy.is_untouched:
                raise UsageError(
                    f"step() was called in attempt {self._attempt}, in which no gradient was reduced, so this replica "
                    "would commit an update that no other replica has; if the pass raised, continue with zero_grad() "
                    "and the next batch; with gradient accumulation, run the last pass outside no_sync()"
                )
            try:
                return self._vote_and_step(_scaler_that_calls())
            except BaseException as error:  # also Ctrl-C, after which a notebook continues
                if self.manager.strategy.verdict:
                    self.manager.strategy.report_torn(error)
                raise

    def _vote_and_step(self, scaler: torch.amp.GradScaler | None) -> bool:
        """Vote, and step the wrapped optimizer if the step commits.

        An error between the verdict and the end is a torn state.
        """
        manager = self.manager
        # Reading the scale waits for the device. So only a rank that does not participate reads it, because only such a
        # rank may heal to another scale.
        scale = None if scaler is None or manager.is_participating() else scaler.get_scale()
        verdict = manager.strategy.verdict
        if verdict is None:
            verdict = manager.should_commit()
        self._has_stepped = True
        if not verdict:
            return False
        if scaler is not None and scale is not None and scaler.get_scale() != scale:
            manager.strategy.report_torn(
                UsageError(
                    f"the gradients of step {manager.current_step()} were unscaled by {scale:g}, and the scale that "
                    f"this replica healed to is {scaler.get_scale():g}"
                )
            )
            return False
        with manager.strategy.applying():
            self.optim.step()
        return True

    def _can_continue(self) -> bool:
        """Return whether the step that this optimizer has joined, and has not ended, can continue."""
        if self._has_open_pass():
            # The other replicas wait for the missing reductions. An error of this step notifies them.
            self.manager.report_error(
                UsageError(
                    f"zero_grad() was called after a backward pass of attempt {self._attempt} that did not reduce all "
                    "gradients, so that step is discarded; if the pass raised, nothing else needs to be done"
                )
            )
            return False
        return self.manager.strategy.is_untouched

    def _has_open_pass(self) -> bool:
        """Return whether a backward pass of this step has left out reductions, without a reported error."""
        return reductions_of(self.manager).pass_has_raised() and self.manager.errored() is None

    def _check_turn(self) -> None:
        """Check that this optimizer may end the open step.

        Raises: UsageError: there is no such step.
        """
        attempt = self.manager.strategy.attempt
        if self._attempt == 0:
            raise UsageError("step() was called before zero_grad(); call zero_grad() before the forward pass")
        if self._attempt != attempt:
            raise UsageError(
                f"step() would end attempt {self._attempt}, but another optimizer's zero_grad() has begun attempt "
                f"{attempt} since; call zero_grad() of all optimizers that step together before the first step()"
            )
        if self._has_stepped:
            raise UsageError(f"step() was called twice in attempt {attempt}; call zero_grad() before the next one")

    @contextlib.contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        """Mark a method as running, to detect a wrapped optimizer that calls back.

        Raises: UsageError: the wrapped optimizer calls its wrapper instead of doing its own work.
        """
        if self._inside is not None:
            kind = type(self.optim).__name__
            raise UsageError(
                f"{kind}.{self._inside}(), called by its wrapper, called the wrapper's {method}() in turn; when the "
                f"wrapper calls {kind}, it must call the method of its own optimizers (keep a flag for this)"
            )
        self._inside = method
        try:
            yield
        finally:
            self._inside = None

    # --- forwarded to the wrapped optimizer --------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> Any:
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optim.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optim.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optim.defaults = value

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return self.optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return self.optim.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> NoReturn:
        raise TypeError("an Optimizer is bound to its Manager and can't be copied or pickled; save its state_dict()")

    def __repr__(self) -> str:
        return f"Optimizer({self.optim!r})"


def _callers() -> list[FrameType]:
    """Return the frames of the callers of `step`, outside a scheduler's and a profiler's wrapping.

    This must be called from a function that `step` calls.
    """
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and len(found) < _FRAMES_BETWEEN:
        found.append(frame)
        frame = frame.f_back
    return found


def _torch_initializes_state() -> bool:
    """Return whether torch's checkpoint code called, which makes an optimizer's state by a step that does nothing.

    Only the call stack identifies this caller.
    """
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) == _INITIALIZES_STATE for frame in _callers())


def _scaler_that_calls() -> torch.amp.GradScaler | None:
    """Return the GradScaler whose `step` calls the optimizer's. Only the call stack identifies the scaler."""
    for frame in _callers():
        scaler = frame.f_locals.get("self") if frame.f_code.co_name == "_maybe_opt_step" else None
        if isinstance(scaler, torch.amp.GradScaler):
            return scaler
    return None
