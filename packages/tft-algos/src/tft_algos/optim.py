"""The optimizer of a training loop, wrapped so that a step is a transaction.

`zero_grad` begins a step of the Manager, `step` ends it: the wrapped optimizer steps if the group commits, and is left
alone if not. Everything else is the wrapped optimizer's own, so that schedulers, clipping and checkpoints see what
they know.

Law of this file: forwarding, and the two calls to the Manager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, final

import torch
from torch.utils.hooks import RemovableHandle

from tft_algos.errors import UsageError
from tft_algos.manager import Manager


@final
class Optimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose steps are committed by a Manager.

    Args:
        manager: decides whether a step counts.
        optim: does the step. Its hooks run when it steps, so not for a step that was voted down.
    """

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        # The base's own __init__ would make a second set of groups and states; all of that is the wrapped one's.
        self.manager = manager
        self.optim = optim

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step: start the quorum, and clear the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End a step: the wrapped optimizer steps if the group commits.

        Raises: UsageError: a closure was given; it would run the model again, outside the step that is committed.
            Also what `Manager.should_commit` and the wrapped optimizer raise.
        """
        if closure is not None:
            raise UsageError(
                "a step that is committed can't re-evaluate the model through a closure; compute the loss before step()"
            )
        if not self.manager.should_commit():
            return
        try:
            self.optim.step()
        except Exception as error:
            self.manager.report_torn(error)
            raise

    # --- the wrapped optimizer's own ---------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

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
        raise TypeError("an Optimizer is bound to its Manager and can't be pickled; save its state_dict()")

    def __repr__(self) -> str:
        return f"Optimizer({self.optim!r})"
