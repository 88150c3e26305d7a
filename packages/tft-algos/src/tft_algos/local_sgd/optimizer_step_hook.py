"""Following one optimizer, and detecting that another one has taken its place.

A strategy counts the steps of the optimizer object that it was given. A script may make a new optimizer later, for
example to change the learning rate or to load a checkpoint. If the script then trains with the new one, nothing is
synchronized. There is no error, and a loop over synchronizations never ends. The parameters' version counters can't
detect this, because a fused step does not count there. But torch reports the steps of all optimizers in a process. So
steps of other optimizers are compared with those of the followed one.

Another optimizer beside the followed one is allowed, if it trains other parameters, or trains the same ones within the
followed steps (a wrapper). An optimizer that steps the same parameters repeatedly, without a step of the followed one,
is an error.

Law of this file: which optimizer has stepped. The effect of a step is decided elsewhere.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from tft_algos.errors import UsageError
from tft_algos.local_sgd.checks import trained_by

LEAST_PATIENCE: Final = 2  # a wrapper steps in addition to the optimizer that it wraps


@final
class OptimizerStepHook:
    """A callback after each step of one optimizer.

    Args:
        optimizer: the optimizer to follow.
        stepped: called after each of its steps, on the thread that steps.
        patience: the number of steps of another optimizer with the same parameters that are allowed without a step of
            this one. The next such step raises.
    """

    def __init__(self, optimizer: Optimizer, stepped: Callable[[], None], *, patience: int) -> None:
        self._optimizer = optimizer
        self._stepped = stepped
        self._patience = max(patience, LEAST_PATIENCE)
        self._handle: RemovableHandle | None = None
        self._parameters: set[torch.nn.Parameter] = set()
        # Steps of other optimizers since the last followed step, by id of the optimizer.
        self._others: Counter[int] = Counter()

    @property
    def follows(self) -> bool:
        """Return whether this follows the optimizer: after `begin` and before `end`."""
        return self._handle is not None

    def begin(self) -> None:
        """Begin to follow the optimizer. Call this only while not following."""
        self._parameters = set(trained_by(self._optimizer))
        self._others.clear()
        self._handle = self._optimizer.register_step_post_hook(self._has_stepped)
        _ALL_STEPS.add(self._another_may_have_stepped)

    def end(self) -> None:
        """Stop following the optimizer."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
            _ALL_STEPS.remove(self._another_may_have_stepped)

    def _has_stepped(self, *_: Any) -> None:
        self._others.clear()
        self._stepped()

    def _another_may_have_stepped(self, optimizer: Optimizer) -> None:
        """Count the step of another optimizer that trains the same parameters.

        Raises: UsageError: the other optimizer trains in place of the followed one.
        """
        if optimizer is self._optimizer or self._parameters.isdisjoint(trained_by(optimizer)):
            return
        self._others[id(optimizer)] += 1
        if self._others[id(optimizer)] > self._patience:
            raise UsageError(
                f"another {type(optimizer).__name__} has stepped {self._others[id(optimizer)]} times with parameters "
                f"of the inner optimizer, but the inner optimizer (a {type(self._optimizer).__name__}) has not "
                "stepped, so nothing is synchronized; step the inner optimizer, or give the strategy the optimizer "
                "that steps"
            )


@final
class _AllSteps:
    """The source of step notifications from all optimizers in the process.

    Torch calls its hooks without a lock. So all followers share one hook, from the first follower to the last. Replicas
    that are threads of one process then don't interfere.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: tuple[Callable[[Optimizer], None], ...] = ()
        self._handle: RemovableHandle | None = None

    def add(self, follower: Callable[[Optimizer], None]) -> None:
        with self._lock:
            self._followers = (*self._followers, follower)
            if self._handle is None:
                self._handle = register_optimizer_step_post_hook(self._one_has_stepped)

    def remove(self, follower: Callable[[Optimizer], None]) -> None:
        with self._lock:
            self._followers = tuple(each for each in self._followers if each != follower)
            if not self._followers and self._handle is not None:
                self._handle.remove()
                self._handle = None

    def _one_has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for follower in self._followers:
            follower(optimizer)


_ALL_STEPS: Final = _AllSteps()
