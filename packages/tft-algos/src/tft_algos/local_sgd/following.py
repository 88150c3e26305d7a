"""Following one optimizer, and noticing that another one has taken its place.

A strategy counts the steps of the optimizer object that it was given. A script that makes a new one afterwards, as one
does to change the learning rate or to load a checkpoint, trains on with that, and nothing would ever be synchronized:
no error, and no end of a loop over synchronizations. The parameters' version counters don't tell, for a fused step
does not count there. But torch tells of the steps of all optimizers in a process, so the one that is followed is
compared with those that step in its stead.

Another optimizer beside the followed one is all right: of other parameters (half of a model is trained by another one),
or of the same ones within its steps (a wrapper). What is not: one that steps with the same parameters, again and again,
while the followed one never does.

Law of this file: who has stepped; what a step brings is decided elsewhere.
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

LEAST_PATIENCE: Final = 2  # a wrapper steps beside the optimizer that it wraps


@final
class Follower:
    """Calls back after each step of one optimizer.

    Args:
        optimizer: that is followed.
        stepped: called after each of its steps, on the thread that steps.
        patience: steps of another optimizer with the same parameters, with none of this one among them, that are
            allowed; the next one raises.
    """

    def __init__(self, optimizer: Optimizer, stepped: Callable[[], None], *, patience: int) -> None:
        self._optimizer = optimizer
        self._stepped = stepped
        self._patience = max(patience, LEAST_PATIENCE)
        self._handle: RemovableHandle | None = None
        self._parameters: set[torch.nn.Parameter] = set()
        self._others: Counter[int] = Counter()  # steps of others since its last one, by the identity of who stepped

    @property
    def follows(self) -> bool:
        """Between `begin` and `end`."""
        return self._handle is not None

    def begin(self) -> None:
        """Follow it from here; where it does not yet."""
        self._parameters = set(trained_by(self._optimizer))
        self._others.clear()
        self._handle = self._optimizer.register_step_post_hook(self._has_stepped)
        _ALL_STEPS.tell(self._another_may_have_stepped)

    def end(self) -> None:
        """Follow it no more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
            _ALL_STEPS.tell_no_more(self._another_may_have_stepped)

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
                f"of the inner optimizer, a {type(self._optimizer).__name__} that has not stepped meanwhile, so that "
                "nothing is synchronized; step the one that the strategy was given, or give the strategy the one that "
                "steps"
            )


@final
class _AllSteps:
    """Tells followers of the steps of all optimizers in the process.

    Torch goes through its hooks without a lock. So there is one hook for all followers, from the first to the last, and
    replicas that are threads of one process don't come into each other's way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: tuple[Callable[[Optimizer], None], ...] = ()
        self._handle: RemovableHandle | None = None

    def tell(self, follower: Callable[[Optimizer], None]) -> None:
        with self._lock:
            self._told = (*self._told, follower)
            if self._handle is None:
                self._handle = register_optimizer_step_post_hook(self._one_has_stepped)

    def tell_no_more(self, follower: Callable[[Optimizer], None]) -> None:
        with self._lock:
            self._told = tuple(each for each in self._told if each != follower)
            if not self._told and self._handle is not None:
                self._handle.remove()
                self._handle = None

    def _one_has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for follower in self._told:
            follower(optimizer)


_ALL_STEPS: Final = _AllSteps()
