"""Data parallelism without torch's reducer: one reduction for each parameter.

Each parameter's gradient goes to the Manager when it is ready, in reverse order of definition. The end of the backward
pass waits for all of them. Without buckets, this is slower with many small parameters. In return, it does not depend on
torch's DistributedDataParallel.

Law of this file: when a gradient is ready, and how it is reduced. The order across models is in `backward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, final

import torch

from tft_algos.backward import Frozen, at_end_of_backward, check_model, fingerprint_parameters, reductions_of
from tft_algos.errors import UsageError
from tft_algos.manager import Manager
from tft_algos.manager.quorum.rank0_groups import refuse_strategy


@final
class PureDistributedDataParallel(torch.nn.Module):
    """A module wrapper whose gradients are averages over the participants of a Manager when `backward` returns.

    Every backward pass outside `no_sync()` reduces every parameter that required a gradient when the module was
    wrapped. So replicas may use different parameters. A parameter without a gradient on any participant has None
    afterwards. A parameter with a gradient on some participants gets the mean over all, with zeros for the others. A
    member that heals, or is a spare, counts as using nothing. A failed reduction never raises: the step is voted down.

    Args:
        manager: averages over its participants.
        module: the module to train. Every replica gives the same parameters in the same order. Only for replica groups
            of one process, because nothing is reduced inside a group.
    Raises: UnsupportedFeatureError: an Embedding with sparse gradients. ConfigError: `manager` is not a Manager or has
        rank0_synchronization_only, or a parameter is on the meta device. UsageError, from `forward`: a parameter was
        unfrozen after the module was wrapped. UsageError, from `backward`: a parameter got gradients twice in one pass,
        as with re-entrant activation checkpointing, or the step was voted on already.
    """

    def __init__(self, manager: Manager, module: torch.nn.Module) -> None:
        super().__init__()
        check_model(manager, module, "PureDistributedDataParallel")
        refuse_strategy(manager, "PureDistributedDataParallel")
        fingerprint_parameters(manager, module)
        self._frozen = Frozen(module, "PureDistributedDataParallel")
        self.module = module
        self._pass = _Pass(manager, [parameter for parameter in module.parameters() if parameter.requires_grad][::-1])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # the check depends on values that differ in every step
            self._frozen.check()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside without reductions.

        The first pass outside reduces the sum.
        """
        before, self._pass.reduces = self._pass.reduces, False
        try:
            yield
        finally:
            self._pass.reduces = before

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a PureDistributedDataParallel is bound to its Manager and can't be copied or pickled; save the module's "
            "state_dict()"
        )


@final
class _Pass:
    """The backward passes, one after the other. Gradients that are ready are reduced in the order of the parameters.

    Args:
        manager: reduces the gradients.
        parameters: in the order of their reductions.
    `reduces` is False while gradients only add up.
    """

    def __init__(self, manager: Manager, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.reduces = True
        self._manager = manager
        self._row = reductions_of(manager)
        self._parameters = parameters
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._attempt = 0
        self._task = -1  # autograd's number of the pass for which the end callback is registered
        self._is_ready = [False] * len(parameters)
        self._next = 0
        self._row.add(self)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: torch.nn.Parameter) -> None:
        """Reduce the gradients that are ready, in order.

        Autograd calls this within the backward pass for each gradient.
        """
        if not self.reduces:
            return
        if self._manager.strategy.attempt != self._attempt:
            self._attempt = self._manager.strategy.attempt
            self._begin()  # discard what is left of a pass that raised
        place = self._places[parameter]
        if self._is_ready[place]:
            raise UsageError(
                f"parameter {place} from the end, of shape {list(parameter.shape)}, got gradients twice in one "
                "backward pass; use checkpoint(..., use_reentrant=False), and each parameter in one graph a pass"
            )
        self._is_ready[place] = True
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            at_end_of_backward(self._end)
        while self._next < len(self._parameters) and self._is_ready[self._next]:
            gradient = self._parameters[self._next].grad
            assert gradient is not None, "a gradient that was accumulated is gone"
            self._row.start(self._manager, gradient)
            self._next += 1

    def is_in_pass(self) -> bool:
        """Return whether a backward pass has delivered gradients and has not ended."""
        return self._attempt == self._manager.strategy.attempt and any(self._is_ready)

    def _begin(self) -> None:
        self._is_ready = [False] * len(self._parameters)
        self._next = 0
        self._task = -1

    def _end(self) -> None:
        """End the pass: reduce the unused parameters too, because the other replicas wait for them."""
        if not any(self._is_ready):
            return  # a nested pass has ended it already
        counts = torch.tensor(
            [parameter.grad is not None for parameter in self._parameters],
            dtype=torch.int32,
            device=self._parameters[0].device,
        )
        unused: dict[torch.nn.Parameter, torch.Tensor] = {}
        for parameter in self._parameters[self._next :]:
            gradient = parameter.grad
            if gradient is None:
                gradient = unused[parameter] = torch.zeros_like(parameter, requires_grad=False)
            self._row.start(self._manager, gradient)
        self._begin()
        outcome: list[bool] = []
        self._row.start(self._manager, counts, average=False, done=outcome.append)
        self._row.end()
        if outcome != [True]:
            return
        for parameter, count in zip(self._parameters, counts.tolist(), strict=True):
            if count == 0:
                parameter.grad = None
            elif parameter in unused:
                parameter.grad = unused[parameter]
