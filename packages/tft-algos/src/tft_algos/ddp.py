"""Data parallelism across replica groups that come and go.

Torch's own DistributedDataParallel does the work. It packs gradients into buckets, and hands over each full bucket
while the backward pass continues. This module gives the bucket to the Manager, which averages over the participants. At
the end of the backward pass, this module waits for all buckets.

Torch must not change the buckets here. It lays them out in the order of definition, and once more in the order of the
first gradients. A newcomer would then exchange other sizes than the existing members, and Gloo would end the process.
So the second layout is made at the start, from all parameters in reverse order of definition. This layout is the same
on every replica and in every step. (With find_unused_parameters torch makes no second layout.)

Law of this file: the differences from torch's class. No reduction is implemented here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel.distributed import _find_tensors

from tft_algos.backward import Frozen, at_end_of_backward, check_model, fingerprint_parameters, reductions_of
from tft_algos.errors import ConfigError, UnsupportedFeatureError, UsageError
from tft_algos.manager import Manager
from tft_algos.manager.quorum.fingerprint import strides_of
from tft_algos.manager.quorum.rank0_groups import refuse_strategy
from tft_pg import Collective, DummyWork, ProcessGroup, ProcessGroupDummy

_GRAPH = "tft-graph"

# Arguments of torch's class that are not supported here, and their replacements.
_REFUSED = {
    "mixed_precision": "it would replace the hook that reduces gradients across replicas; use torch.autocast, or "
    "parameters of the dtype that you want",
    "delay_all_reduce_named_params": "those parameters would not be reduced across replicas; leave it out",
    "param_to_hook_all_reduce": "it goes with delay_all_reduce_named_params, which is not supported; leave it out",
    "skip_all_reduce_unused_params": "a bucket that only some replicas skip makes the reduction fail; leave it out",
    "device_mesh": "the groups of a mesh are fixed, but the set of replicas changes; give the mesh's own group as "
    "process_group, if this replica group has several processes",
}


@final
class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel` across the replica groups of a Manager.

    After `backward` the gradients are averages over the participants. A failed reduction never raises: the step is
    voted down. A failure among the processes of this group is fatal to the group, and `should_commit` then raises
    ReplicaGroupLostError.

    A backward pass may raise by itself (out of memory, for example). In a replica group of one process, this ends the
    step but not the training. Report the error to `Manager.report_error` or ignore it, and continue with the next
    `zero_grad`. A batch may also be discarded before its backward pass. The next `zero_grad` then continues the same
    step, and passes under `no_sync()` still reduce nothing.

    - Accumulation: backward passes under `no_sync()` add up, and the first pass outside reduces the sum. All of them
      belong to the step of the last `zero_grad`. Members change only between steps. A member that heals gives zeros in
      that one reduction, however often it accumulated. All replicas run the same number of passes outside `no_sync()`
      in a step. The number of passes inside may differ.
    - Several models on one Manager, in one backward pass or in several: their reductions have one common order. So
      every replica runs the same passes in the same order.
    - Buffers (BatchNorm's) are broadcast inside the replica group as in torch, and not across groups. Each replica
      group keeps the statistics of its own data. A replica that heals takes its source's buffers with the state.
    - Unused parameters, with find_unused_parameters: a parameter without a gradient on any participant has None after
      the backward pass. A parameter with a gradient on some participants gets the mean over all, with zeros for the
      others. A member that heals, or is a spare, counts as using nothing. Every replica's loss uses at least one
      parameter.
    - static_graph: torch learns in the first step which parameters are never used. These must be the same on every
      replica. Torch learns this from a pass outside `no_sync()`, so a process can accumulate from its second step on.
    - With torch.compile, compile the wrapper, or the module before it is wrapped.

    Args:
        manager: averages over its participants.
        module: the module to train. Every replica gives the same parameters in the same order and memory format. A
            replica whose parameters have other strides is refused, and the error names the parameter. Convert the
            module before wrapping it.
        process_group: the processes of this replica group, if there are several. Gradients are averaged inside it
            first, then across groups. None, or a group of one process: this process is the group.
        kwargs: arguments of torch's class. `gradient_as_bucket_view` defaults to True, which saves a copy of every
            gradient.
    Raises: UnsupportedFeatureError: mixed_precision, delay_all_reduce_named_params, skip_all_reduce_unused_params,
        device_mesh, an Embedding with sparse gradients, or torch's reducer in Python. None of these is supported.
        ConfigError: this release of torch can't keep one layout of buckets, `manager` is not a Manager or has
            rank0_synchronization_only, or a parameter is on the meta device. RuntimeError: no parameter requires a
            gradient. UsageError, from `forward`: a first pass with static_graph under `no_sync()`, or a parameter was
            unfrozen after the module was wrapped.
    """

    def __init__(
        self,
        manager: Manager,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        for name, instead in _REFUSED.items():
            if kwargs.get(name) not in (None, False):
                raise UnsupportedFeatureError(f"{name} is not supported: {instead}")
        check_model(manager, module, "DistributedDataParallel")
        refuse_strategy(manager, "DistributedDataParallel")
        kwargs.setdefault("gradient_as_bucket_view", True)
        static = bool(kwargs.get("static_graph"))
        if static and not kwargs["gradient_as_bucket_view"]:
            # Torch then copies the first step's gradients out of the buckets before their reductions have ended.
            raise UnsupportedFeatureError(
                "static_graph needs gradient_as_bucket_view here; leave gradient_as_bucket_view out"
            )
        if process_group is not None and process_group.size() == 1:
            process_group = None  # a group of one has nothing to reduce
        group: dist.ProcessGroup = process_group if process_group is not None else ProcessGroupDummy(0, 1)
        # Torch itself then reduces only the map of used parameters, through its group. With a static graph it does so
        # only in its own first step. Other replicas have another first step, so this reduction stays inside the replica
        # group.
        maps = None
        if kwargs.get("find_unused_parameters") and not static:
            maps = _UsedMaps(manager, group, process_group, ends_pass=self._end_pass)
        self._keeps_layout = maps is not None
        self._knows_graph = not static
        self._manager = manager
        self._used_in = 0, 0  # attempt and step of the last forward pass or bucket, whichever came later
        self._refused = False  # True while a bucket goes to a reduction that may be refused. A refusal leaves it True.
        self._awaited: _AwaitedPass | None = None  # None: torch reduces nothing in the next backward pass
        super().__init__(module, process_group=maps or group, **kwargs)
        if self._use_python_reducer:
            raise UnsupportedFeatureError(
                "torch's Python reducer needs a process group that does not change; set "
                "torch._dynamo.config.optimize_ddp to another mode than 'python_reducer'"
            )
        row = reductions_of(manager)

        def reduce(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            """Reduce a bucket.

            The future completes at once, because the end of the pass waits before torch reads the bucket.
            """
            buffer = bucket.buffer()
            self._knows_graph = True
            self._used_in = manager.strategy.attempt, manager.current_step()
            if not self._is_pass_of_another_batch():
                self._refused = True
                row.start(manager, buffer, group=process_group)
                self._refused = False
            # With a map of used parameters, torch reduces the map after the last bucket.
            if bucket.is_last() and maps is None:
                self._end_pass()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

        # Torch compares a hook's annotations with types, and annotations are strings here. A lambda has none.
        super().register_comm_hook(None, lambda _, bucket: reduce(bucket))
        if maps is not None:
            maps.parameters = self._build_params_for_reducer()[0]
        self._lay_out_buckets()
        self._strides = {name: (parameter, strides_of(parameter)) for name, parameter in module.named_parameters()}
        self._frozen = Frozen(module, "DistributedDataParallel", self.parameters_to_ignore)
        fingerprint_parameters(manager, module, strides=True)
        row.add(self)

    def _lay_out_buckets(self) -> None:
        if self._keeps_layout:
            return
        self.reducer._push_all_rebuilt_params()
        if not self.reducer._rebuild_buckets():
            raise ConfigError(
                f"torch {torch.__version__} did not build its gradient buckets at the start, so replicas that join "
                "later would have other buckets; use torch 2.11 to 2.15"
            )

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        # Gradients arrive roughly in reverse order of definition, and the second layout follows the reducer's order.
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self._keeps_layout:
            return parameters, sparse
        return parameters[::-1], sparse[::-1]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # its checks depend on values that differ in every step
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._knows_graph and not self.require_backward_grad_sync and torch.is_grad_enabled():
            raise UsageError(
                "with static_graph torch learns the graph from the first backward pass, and this one is under "
                "no_sync(); do the first step of this process without no_sync(), or leave static_graph out"
            )
        self._frozen.check()
        self._forget_pass_that_raised()
        if torch.is_grad_enabled():
            if self.require_backward_grad_sync:
                self._awaited = _AwaitedPass(self._manager.strategy.attempt)
            else:
                self._forget_pass_without_gradients()
                self._forget_batch_thrown_away()
        self._used_in = self._manager.strategy.attempt, self._manager.current_step()
        return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # as above
    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        awaited = self._awaited
        if awaited is None or not torch.is_grad_enabled():
            return output
        ends = [tensor.grad_fn for tensor in _find_tensors(output) if tensor.grad_fn is not None]
        if self.require_backward_grad_sync:
            awaited.forward_ended(ends)
            for end in ends:
                end.register_prehook(self._pass_begins)
        else:
            awaited.is_in_doubt = True
            # The program may drop the output of the earlier batch as late as the assignment of this one.
            for end in ends:
                end.register_prehook(lambda _: self._forget_batch_thrown_away())
        return output

    def _pass_begins(self, _: object) -> None:
        if self._awaited is not None:
            self._awaited.has_begun = True

    def _is_pass_of_another_batch(self) -> bool:
        """Return whether torch reduces in a backward pass under no_sync() what the awaited pass would have reduced."""
        return self._awaited is not None and self._awaited.is_replaced()

    def _end_pass(self) -> bool:
        """End a pass at torch's last reduction. Return whether nothing of this pass is reduced."""
        left_out, self._awaited = self._is_pass_of_another_batch(), None
        return left_out

    def _forget_pass_without_gradients(self) -> None:
        """Mark the awaited pass as not begun, if a backward pass ended before it reached a parameter.

        Torch then still waits for a pass. A pass ends like this if it raises, or if it computes gradients of other
        tensors only (`torch.autograd.grad`).
        """
        runs = torch._C._current_graph_task_id() != -1
        if self._awaited is not None and not runs and not self._is_unfinished():
            self._awaited.has_begun = False

    def _forget_pass_that_raised(self) -> None:
        """Reset torch if a backward pass of an earlier step raised, because torch still waits for its gradients.

        No reset is made if the earlier step committed, because the missing gradients then belong to unused parameters.
        Torch's own error says so. A pass after the vote is an exception, and is reset too.
        """
        attempt, step = self._used_in
        if (attempt == self._manager.strategy.attempt and not self._refused) or not self._is_unfinished():
            return
        committed = self._manager.strategy.attempt == attempt + 1 and self._manager.current_step() > step
        if self._refused or not committed:
            self._reset()

    def _forget_batch_thrown_away(self) -> None:
        """Reset torch if the last batch outside `no_sync()` was discarded before its backward pass.

        Under no_sync(), torch would still reduce in the next backward pass. This replica would then reduce once more
        than the others, and its later reductions would not match theirs. In the same step, the backward pass may still
        come while the graph of that batch lives.
        """
        awaited = self._awaited
        if awaited is None or self._is_unfinished():
            return
        if awaited.attempt != self._manager.strategy.attempt or not awaited.may_come():
            self._reset()

    def _reset(self) -> None:
        """Reset torch's reducer, so that it expects no backward pass.

        Raises: UsageError: torch would lay out its buckets again, and differently from the other replicas.
        """
        for name, (parameter, strides) in self._strides.items():
            if strides_of(parameter) != strides:
                raise UsageError(
                    f"the memory format of parameter {name} was changed after DistributedDataParallel was made, so its "
                    "gradient would have another layout than on the other replicas; convert the module before wrapping "
                    "it"
                )
        self._awaited = None
        self.reducer._reset_state()
        self._lay_out_buckets()

    def is_in_pass(self) -> bool:
        """Return whether a backward pass of this attempt has begun to fill buckets and has not filled all of them."""
        return self._used_in[0] == self._manager.strategy.attempt and self._is_unfinished()

    def _is_unfinished(self) -> bool:
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:
            return True
        return False

    # --- parts of torch's class that are not supported ---------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Refuse the hook, because the hook that reduces across replicas already uses this place.

        Raises: UnsupportedFeatureError: always.
        """
        raise UnsupportedFeatureError(
            "the Manager uses the communication hook to reduce gradients across replicas, so "
            f"{getattr(hook, '__qualname__', hook)} can't be registered"
        )

    def _setup_in_backward_optimizers(self) -> None:
        # Torch takes a stream for them before it registers its hook, which fails without an accelerator.
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self._module_parameters):
            raise UnsupportedFeatureError(
                "optimizers that step in the backward pass are not supported, because they would step before the vote; "
                "give their parameters to another optimizer, and wrap it in Optimizer"
            )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> NoReturn:
        raise UnsupportedFeatureError(
            f"the gradients are reduced across replicas by the Manager, in the place of a communication hook, so "
            f"{comm_hook_type} can't be registered"
        )

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> NoReturn:
        raise UnsupportedFeatureError(
            f"{optim.__name__} would step in the backward pass, before the vote; wrap it in Optimizer"
        )

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to join. A replica without data leaves the job instead, which costs the others nothing.

        Raises: UnsupportedFeatureError: always.
        """
        raise UnsupportedFeatureError(
            "join is not supported; shut the Manager down on a replica that has no more data, and the others continue"
        )

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse to join, as `join` does.

        Raises: UnsupportedFeatureError: always.
        """
        self.join()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a DistributedDataParallel is bound to its Manager and can't be copied or pickled; save the module's "
            "state_dict()"
        )


@final
class _AwaitedPass:
    """The last forward pass outside `no_sync()`. Torch reduces its gradients, or those of the next pass instead.

    Attributes:
        attempt: the attempt of the forward pass.
        is_in_doubt: a forward pass under `no_sync()` came after it.
        has_begun: its backward pass has begun.
    """

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.is_in_doubt = False
        self.has_begun = False
        self._graph: Callable[[], object] | None = lambda: None  # None: the output hides its tensors

    def forward_ended(self, ends: Sequence[Any]) -> None:
        """Watch the graph that ends in these nodes."""
        graph = _Graph()
        for end in ends:
            end.metadata[_GRAPH] = graph
        self._graph = weakref.ref(graph) if ends else None

    def may_come(self) -> bool:
        """Return whether its backward pass may still come or runs: its graph lives, or can't be observed."""
        return self.has_begun or self._graph is None or self._graph() is not None

    def is_replaced(self) -> bool:
        """Return whether the running backward pass belongs to a batch under `no_sync()` instead."""
        return self.is_in_doubt and not self.has_begun and self._graph is not None


class _Graph:
    """A marker in the metadata of the last nodes of a graph. It lives as long as one of them."""


@final
class _UsedMaps(ProcessGroup):
    """The process group whose allreduce torch uses for one purpose: to find parameters that no replica used.

    Torch calls it when the last bucket is on its way. A parameter then has a gradient iff it was used, in this pass or
    in an earlier accumulated pass. The participants with such a gradient are counted.

    Args:
        manager: sums across replica groups.
        group: the group for all other collectives.
        inside: the processes of this replica group. None: this process is the group.
        ends_pass: a function that is called for the map, the last reduction of a pass. It returns whether nothing of
            the pass is reduced.
    `parameters` are the reducer's parameters, in its order.
    """

    def __init__(
        self,
        manager: Manager,
        group: dist.ProcessGroup,
        inside: dist.ProcessGroup | None,
        *,
        ends_pass: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._manager = manager
        self._ends_pass = ends_pass
        self._group = group
        self._inside = inside
        self.parameters: Sequence[torch.nn.Parameter] = ()

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        if collective.name != "allreduce":
            work: dist.Work = getattr(self._group, collective.name)(*args, **kwargs)
            return work
        (counts,) = collective.results(args, kwargs)
        counts.copy_(torch.tensor([parameter.grad is not None for parameter in self.parameters]))
        if self._ends_pass():
            return DummyWork([counts])

        def done(succeeded: bool) -> None:
            if succeeded and not self._manager.is_participating():
                at_end_of_backward(lambda: self._forget(counts))  # after torch has handed out the gradients

        reductions_of(self._manager).start(self._manager, counts, group=self._inside, average=False, done=done)
        return DummyWork([counts])  # torch reads it after the end of the pass, which waits

    def _forget(self, counts: torch.Tensor) -> None:
        """Remove the gradients of parameters that no participant used.

        This replica does not participate, so its own use of a parameter does not count.
        """
        for parameter, count in zip(self.parameters, counts.tolist(), strict=True):
            if count == 0:
                parameter.grad = None

    def size(self) -> int:
        return self._group.size()

    def rank(self) -> int:
        return self._group.rank()

    def getBackendName(self) -> str:
        return "tft-used-maps"

    def __repr__(self) -> str:
        return f"_UsedMaps({self._group!r})"

    # The Manager and the other group control its life. Torch never calls these.

    def configure(self, store_addr: str, rank: int, world_size: int, **identity: Any) -> NoReturn:
        raise UnsupportedFeatureError("only the Manager of a DistributedDataParallel can configure its group")

    def abort(self) -> NoReturn:
        raise UnsupportedFeatureError("only the Manager of a DistributedDataParallel can abort its group")

    def errored(self) -> None:
        return None

    def set_timeout(self, timeout: timedelta) -> NoReturn:
        raise UnsupportedFeatureError(
            "only the Manager of a DistributedDataParallel can set the timeout of its reductions"
        )

    def shutdown(self) -> None:
        """Do nothing, because this group owns nothing."""
