"""The state that the user has registered: its parts, and the functions that take and load them.

Law of this file: calls of the user's functions on the training thread, and their errors. The time of these calls, and
the use of the state, are decided elsewhere.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
import torch.optim.optimizer as torch_optimizer

from tft_algos.errors import ConfigError, StateLoadError, UserStateError
from tft_algos.manager.quorum.rank0_groups import whole

LoadState: TypeAlias = Callable[[Any], object]
TakeState: TypeAlias = Callable[[], Any]

_RAISED = re.compile(r"the state_dict registered under .* raised .*")


def refusal_in(sentence: str) -> str:
    """Return the part of an error message that says that a state_dict raised, here or at a source; "" if none."""
    found = _RAISED.search(sentence)
    return found.group() if found else ""


@final
class UserState:
    """One process's parts of the state, by key.

    Args:
        is_rank0_only: the ranks of this group may shard the state in any way, so other groups can use it only whole.
    Attributes:
        readable: False: the user says that the state is half written.
        optimizers: the wrapped optimizers. Their step hooks do not run inside a function that returns state.
    """

    def __init__(self, *, is_rank0_only: bool) -> None:
        self.readable = True
        self._is_rank0_only = is_rank0_only
        self._functions: dict[str, tuple[LoadState, TakeState]] = {}
        self._not_compared: set[str] = set()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def register(self, key: str, load: LoadState, take: TakeState, *, compared: bool = True) -> None:
        """Register a part of the state. See `Manager.register_state_dict_fn`."""
        if not isinstance(key, str) or not key:
            raise ConfigError(f"state is registered under {key!r}; give a name, the same on every replica")
        for name, function in (("load_state_dict", load), ("state_dict", take)):
            if not callable(function):
                raise ConfigError(f"{name} of {key!r} is a {type(function).__name__}; give a function")
        if key in self._functions:
            raise ConfigError(f"state is registered under {key!r} already; give another key")
        self._functions[key] = (load, take)
        if not compared:
            self._not_compared.add(key)

    @property
    def names(self) -> set[str]:
        """Return the keys of all parts."""
        return set(self._functions)

    def take(self) -> dict[str, Any]:
        """Take the state, by key.

        Raises: UserStateError: a function of the user raised.
        """
        return self._call(self._functions)

    def take_compared(self) -> dict[str, Any]:
        """Take the state that is the same on every replica, by key.

        Raises: as `take`.
        """
        return self._call([key for key in self._functions if key not in self._not_compared])

    def take_whole(self) -> dict[str, Any]:
        """Take the state in the form that other replicas can use. On an island this is a collective of its ranks.

        Raises: as `take`.
        """
        state = self.take()
        return whole(state) if self._is_rank0_only else state

    def compared(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a state, by key, that is the same on every replica."""
        return {key: value for key, value in state.items() if key not in self._not_compared}

    def load(self, state: Mapping[str, Any]) -> StateLoadError | None:
        """Load a state that has all keys.

        Returns: the error, with the function's own error as its cause. The state is then half written. None: the load
            succeeded.
        """
        for key, (load, _) in self._functions.items():
            try:
                load(state[key])
            except Exception as error:
                failure = StateLoadError(
                    f"load_state_dict of the state registered under {key!r} raised {error!r}; this replica's state is "
                    "half written until it heals"
                )
                failure.__cause__ = error
                return failure
        return None

    def _call(self, keys: Iterable[str]) -> dict[str, Any]:
        state = {}
        for key in keys:
            _, take = self._functions[key]
            try:
                with _without_step_hooks(self.optimizers):
                    state[key] = take()
            except Exception as error:
                raise UserStateError(f"the state_dict registered under {key!r} raised {error!r}") from error
        return state


@contextmanager
def _without_step_hooks(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Disable the hooks of these optimizers' steps, and of all steps.

    Torch's get_optimizer_state_dict makes a missing optimizer state by a step with zero gradients. This is not a step
    of the training, so hooks that count or average must not run.
    """
    stateless = [optimizer for optimizer in optimizers if not optimizer.state]
    hooks: list[dict[int, Any]] = []
    for optimizer in stateless:
        # A container of optimizers may have no hooks.
        hooks += [getattr(optimizer, name, {}) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    if stateless:
        hooks += torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, own in zip(hooks, kept, strict=True):
            each.update(own)
