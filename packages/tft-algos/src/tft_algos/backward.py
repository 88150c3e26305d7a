"""The reductions of a Manager's backward passes, in the same order on every replica.

Reductions across replica groups are matched by their position: the third one here meets the third one of each other
group. In a replica group of several processes, each gradient is reduced inside the group first. These inner reductions
end in any order. So reductions across groups start strictly in the order of the calls, over all models of one Manager.
The end of the backward pass waits for all of them, so that clipping sees averages.

Law of this file: the order and the waiting. The callers decide what is reduced, and when it is ready.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol, final

import torch
import torch.distributed as dist

from tft_algos.errors import ConfigError, UnsupportedFeatureError, UsageError
from tft_algos.manager import Manager
from tft_coord.errors import ReplicaGroupLostError
from tft_pg import DummyWork

Done = Callable[[bool], None]

_of_manager: weakref.WeakKeyDictionary[Manager, BackwardReductions] = weakref.WeakKeyDictionary()


def reductions_of(manager: Manager) -> BackwardReductions:
    """Return the reductions of one Manager, shared by all models that are trained with this Manager."""
    return _of_manager.setdefault(manager, BackwardReductions())


def fingerprint_parameters(manager: object, *models: torch.nn.Module, strides: bool = False) -> None:
    """Add the parameters of models to the Manager's fingerprint, if the Manager supports it.

    Args:
        strides: the layout of the parameters must be the same on all replicas.
    """
    describe = getattr(getattr(manager, "strategy", None), "describe_parameters", None)
    if describe is not None:
        for model in models:
            describe(model, strides=strides)


class Model(Protocol):
    """A model that makes reductions in backward passes."""

    def is_in_pass(self) -> bool:
        """Return whether a backward pass has begun to reduce and has not ended.

        Outside a pass, True means that it raised.
        """
        ...


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass.

    Several functions are called in the order of registration.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def check_model(manager: object, module: object, strategy: str) -> None:
    """Check the arguments of a strategy.

    Args:
        manager: an object with an allreduce. A strategy of the user may have its own class.
        module: the model.
        strategy: the name of the strategy, for messages.
    Raises: ConfigError: `manager` is not a Manager, `module` is not a module, a parameter is on the meta device, or a
        part is sharded by fully_shard. UnsupportedFeatureError: a part of the module makes sparse gradients.
    """
    if not callable(getattr(manager, "allreduce", None)) or not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"{strategy} was given a {type(manager).__name__} and a {type(module).__name__}; give a Manager, and the "
            "module after it"
        )
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name} is on the meta device and has no gradients to reduce; materialize the module before "
                f"it is given to {strategy}, because that makes new parameters"
            )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, nothing is sharded
    if any(isinstance(part, getattr(fsdp, "FSDPModule", ())) for part in module.modules()):
        raise ConfigError(
            f"the module is sharded by fully_shard, which reduces gradients where {strategy} can't see them; call "
            "reduce_across(manager, module) instead, or shard over a mesh from extend_mesh"
        )
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    if any(isinstance(part, embeddings) and part.sparse for part in module.modules()):
        raise UnsupportedFeatureError(
            "sparse gradients are not reduced across replicas; make the Embedding with sparse=False"
        )


@final
class Frozen:
    """The parameters of a model that are not reduced, because they required no gradient when the model was wrapped.

    Args:
        module: the module that is being wrapped.
        strategy: the name of the wrapper, for a message.
        ignored: names of parameters that the user wants to leave alone.
    """

    def __init__(self, module: torch.nn.Module, strategy: str, ignored: Collection[str] = ()) -> None:
        self._strategy = strategy
        self._parameters = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and name not in ignored
        ]

    def check(self) -> None:
        """Check that every parameter that was frozen at wrapping is still frozen.

        Raises: UsageError: a frozen parameter requires a gradient now, so the states of the replicas would diverge
            silently.
        """
        if not torch.is_grad_enabled():
            return
        for name, parameter in self._parameters:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name} was unfrozen after {self._strategy} was made, so its gradient is not reduced; "
                    "let every parameter that will be trained require gradients when the module is wrapped, and freeze "
                    "parameters afterwards (with find_unused_parameters=True, torch's buckets accept parameters "
                    "without gradients)"
                )


@final
class BackwardReductions:
    """The ordered reductions of one Manager.

    They start in the order of the calls, and the end of the backward pass waits.
    """

    def __init__(self) -> None:
        self._attempt = 0
        self._inside: deque[tuple[dist.Work, Callable[[], dist.Work], Done | None]] = deque()
        self._across: list[tuple[dist.Work, Done | None]] = []
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()

    def add(self, model: Model) -> None:
        """Add a model whose reductions use this order."""
        self._models.add(model)

    @property
    def has_models(self) -> bool:
        """Return whether a model was added."""
        return len(self._models) > 0

    def pass_has_raised(self) -> bool:
        """Return whether the last backward pass of a model has left out reductions.

        Call this outside of backward passes.
        """
        return any(model.is_in_pass() for model in self._models)

    def start(
        self,
        manager: Manager,
        tensor: torch.Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        average: bool = True,
        wait: bool = False,
        done: Done | None = None,
    ) -> None:
        """Reduce a tensor in place, inside this replica group and then over the participants.

        Call this within a backward pass. At the end of the pass, the tensor holds the result.

        Args:
            manager: the Manager that owns these reductions.
            tensor: dense, with the same shape and dtype at the same position on every replica.
            group: the processes of this replica group. None: this process is the group.
            average: True: a mean. False: a sum.
            wait: wait for everything that was started. The call is then allowed outside of a backward pass, too.
            done: a function that is called at the end of the backward pass. Its argument says whether the reduction
                across groups succeeded.
        Raises: UsageError: the step was voted on already, so no vote would cover the reduction.
        """
        if manager.strategy.verdict is not None:
            raise UsageError(
                f"a backward pass reduces gradients after the vote on step {manager.current_step()}; call zero_grad() "
                "before the backward pass, and step() after the last backward pass of a step"
            )
        self._forget_others(manager)
        # Register this once for each tensor, because a pass may contain passes that end first.
        if not wait:
            at_end_of_backward(self.end)
        inside: dist.Work = DummyWork([tensor])
        if group is not None:
            if average:
                tensor.div_(group.size())  # divide before the sum, so that the sum is the mean of the group
            inside = group.allreduce([tensor], dist.ReduceOp.SUM)
        across = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._inside.append((inside, lambda: self._reduced_inside(manager, inside, tensor, across), done))
        while self._inside and self._inside[0][0].is_completed():
            self._pass_on()
        if wait:
            self.end()

    def pass_on(self, manager: Manager) -> None:
        """Start all waiting reductions across groups.

        The manager's next reduction then follows them on every replica.
        """
        self._forget_others(manager)
        while self._inside:
            self._pass_on()

    def end(self) -> None:
        """Wait until everything that was started is reduced. A second call does nothing."""
        while self._inside:
            self._pass_on()
        works, self._across = self._across, []
        for work, done in works:
            succeeded = work.wait()
            if done is not None:
                done(succeeded)

    def _forget_others(self, manager: Manager) -> None:
        """Discard what is left of an earlier attempt, in which a backward pass raised.

        That attempt is over on all replicas.
        """
        if manager.strategy.attempt != self._attempt:
            self._attempt = manager.strategy.attempt
            self._inside.clear()
            self._across.clear()

    def _pass_on(self) -> None:
        """Start the reduction across replicas for the oldest tensor, after its reduction inside the group."""
        _, across, done = self._inside.popleft()
        self._across.append((across(), done))

    @staticmethod
    def _reduced_inside(
        manager: Manager, inside: dist.Work, tensor: torch.Tensor, across: dist.ReduceOp.RedOpType
    ) -> dist.Work:
        try:
            inside.wait()
        except RuntimeError as error:
            # Torch's own groups can't be rebuilt, so this replica is lost, and should_commit raises this error.
            lost = ReplicaGroupLostError(
                f"a reduction among the processes of this replica failed ({error}); end this process and start the "
                "group again"
            )
            lost.__cause__ = error
            manager.report_error(lost)
        return manager.allreduce(tensor, reduce_op=across)
