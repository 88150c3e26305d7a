"""Data parallelism across replica groups that come and go.

Torch's own DistributedDataParallel does the work: it packs gradients into buckets and hands each over as soon as it is
full, while the backward pass goes on. We hand the bucket to the Manager, whose averages are over whoever participates,
and wait for all of them when the backward pass is done.

One thing torch may not do here is to change the buckets: it lays them out by definition order, and again, once, in the
order in which the first gradients came. A newcomer would then exchange other sizes than those who were here before,
which Gloo answers by ending the process. So the second layout is made at the start, of all parameters in the reverse
order of their definition, the same on every replica and in every step. (With find_unused_parameters torch makes no
second layout.)

Law of this file: what differs from torch's class; no reduction is implemented here.
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

from tft_algos.backward import Frozen, at_end_of_backward, check_model, reductions_of, tell_parameters
from tft_algos.errors import SettingError, Unsupported, UsageError
from tft_algos.manager import Manager
from tft_algos.manager.fingerprint import strides_of
from tft_algos.manager.island import refuse_strategy
from tft_pg import Collective, DummyWork, ProcessGroup, ProcessGroupDummy

_GRAPH = "tft-graph"

# Arguments of torch's class that can't hold here, and what to do instead.
_REFUSED = {
    "mixed_precision": "it needs the place of the hook that reduces across replicas; use torch.autocast, or parameters "
    "of the dtype that you want",
    "delay_all_reduce_named_params": "those parameters would not be reduced across replicas; leave it out",
    "param_to_hook_all_reduce": "it goes with delay_all_reduce_named_params, which does not exist here; leave it out",
    "skip_all_reduce_unused_params": "a bucket that one replica skips and another does not would end both; leave it "
    "out",
    "device_mesh": "the groups of a mesh are fixed, and replicas come and go; give the mesh's own group as "
    "process_group, if this replica group has several processes",
}


@final
class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel` across the replica groups of a Manager.

    After `backward` the gradients are averages over the participants. A failed reduction never raises: the step is
    voted down. Only one among the processes of this group is fatal to it, and `should_commit` then raises GroupLost.
    A backward pass that raises by itself (out of memory, say) ends the step of a replica group of one process, not its
    training: give the error to `Manager.report_error`, or don't, and go on with the next `zero_grad`. Nor does a batch
    that is thrown away before its backward pass: the next `zero_grad` then goes on with the same step, and passes under
    `no_sync()` reduce nothing all the same.

    - Accumulation: backward passes under `no_sync()` add up, and the first one outside reduces the sum. All of them
      belong to the step that the last `zero_grad` began: members change between steps only, and a member that heals
      gives zeros in that one reduction, however often it accumulated. Every replica has one pass outside `no_sync()`
      a step for each pass of the others; how many are inside is its own business.
    - Several models on one Manager, in one backward pass or in several: their reductions share one row, so every
      replica runs the same passes in the same order.
    - Buffers (BatchNorm's) are broadcast inside the replica group as torch does, and not across: each replica group
      keeps the statistics of its own data, and a replica that heals takes its source's with the state.
    - Unused parameters, with find_unused_parameters: one that has a gradient on no participant has None after the
      backward pass; one that has a gradient on some gets the mean over all, zeros counting for the others. A member
      that heals, or is a spare, counts as using nothing. Every replica's loss uses at least one parameter.
    - static_graph: torch learns in the first step which parameters are never used; it has to be so on every replica.
      It learns that from a pass outside `no_sync()`, so a process accumulates from its second step on.
    - With torch.compile compile the wrapper, or the module before it is wrapped.

    Args:
        manager: averages over its participants.
        module: to be trained. Every replica gives the same parameters in the same order and memory format: a replica
            whose parameters have other strides is refused by name. Convert the module before it is wrapped.
        process_group: the processes of this replica group, where it has more than one; gradients are averaged inside
            it first, then across. None, or a group of one process: this process is the group.
        kwargs: torch's own. `gradient_as_bucket_view` is True unless given: it saves a copy of every gradient.
    Raises: Unsupported: mixed_precision, delay_all_reduce_named_params, skip_all_reduce_unused_params, device_mesh, an
        Embedding with sparse gradients, or torch's reducer in Python: none of them can hold here.
        SettingError: this release of torch can't hold one layout of buckets, or the manager has
        rank0_synchronization_only or is none, or a parameter is on the meta device. RuntimeError: no parameter requires
        a gradient. UsageError, from `forward`: a first pass with static_graph under `no_sync()`; or a parameter was
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
                raise Unsupported(f"{name} does not exist here: {instead}")
        check_model(manager, module, "DistributedDataParallel")
        refuse_strategy(manager, "DistributedDataParallel")
        kwargs.setdefault("gradient_as_bucket_view", True)
        static = bool(kwargs.get("static_graph"))
        if static and not kwargs["gradient_as_bucket_view"]:
            # Torch then copies the first step's gradients out of the buckets before anybody has waited for them.
            raise Unsupported("static_graph needs gradient_as_bucket_view here; leave gradient_as_bucket_view out")
        if process_group is not None and process_group.size() == 1:
            process_group = None  # nothing to reduce inside a group of one
        group: dist.ProcessGroup = process_group if process_group is not None else ProcessGroupDummy(0, 1)
        # What torch then reduces itself, through its group, is the map of used parameters. With a static graph it does
        # so in its own first step alone, which is not that of the others, so that stays inside the replica group.
        maps = None
        if kwargs.get("find_unused_parameters") and not static:
            maps = _UsedMaps(manager, group, process_group, ends_pass=self._end_pass)
        self._keeps_layout = maps is not None
        self._knows_graph = not static
        self._manager = manager
        self._used_in = 0, 0  # the attempt, and its step, of the last forward pass, or bucket, whichever came later
        self._refused = False  # whether that was a pass in which nothing may be reduced
        self._awaited: _AwaitedPass | None = None  # None: torch reduces nothing in the next backward pass
        super().__init__(module, process_group=maps or group, **kwargs)
        if self._use_python_reducer:
            raise Unsupported(
                "torch's reducer in Python asks for a process group that does not change; set "
                "torch._dynamo.config.optimize_ddp to another mode than 'python_reducer'"
            )
        row = reductions_of(manager)

        def reduce(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            """Its future is done at once, because the end of the pass waits before torch reads the bucket."""
            buffer = bucket.buffer()
            self._knows_graph = True
            self._used_in = manager.strategy.attempt, manager.current_step()
            if not self._is_pass_of_another_batch():
                self._refused = True
                row.start(manager, buffer, group=process_group)
                self._refused = False
            if bucket.is_last() and maps is None:  # else torch asks for the map of used parameters after this
                self._end_pass()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

        # Torch compares a hook's annotations with types, and ours are strings; a lambda has none.
        super().register_comm_hook(None, lambda _, bucket: reduce(bucket))
        if maps is not None:
            maps.parameters = self._build_params_for_reducer()[0]
        self._lay_out_buckets()
        self._strides = {name: (parameter, strides_of(parameter)) for name, parameter in module.named_parameters()}
        self._frozen = Frozen(module, "DistributedDataParallel", self.parameters_to_ignore)
        tell_parameters(manager, module, strides=True)
        row.add(self)

    def _lay_out_buckets(self) -> None:
        if self._keeps_layout:
            return
        self.reducer._push_all_rebuilt_params()
        if not self.reducer._rebuild_buckets():
            raise SettingError(
                f"torch {torch.__version__} did not lay out its gradient buckets at the start, so that replicas which "
                "join later would have others; use torch 2.11 to 2.15"
            )

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        # Gradients come in about the reverse order of definition, and the second layout is in the reducer's order.
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self._keeps_layout:
            return parameters, sparse
        return parameters[::-1], sparse[::-1]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # it asks what differs in every step
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
            # The program may drop the output of the earlier batch as late as with the assignment of this one.
            for end in ends:
                end.register_prehook(lambda _: self._forget_batch_thrown_away())
        return output

    def _pass_begins(self, _: object) -> None:
        if self._awaited is not None:
            self._awaited.has_begun = True

    def _is_pass_of_another_batch(self) -> bool:
        """Whether torch reduces in a backward pass under no_sync() what the awaited one would have reduced."""
        return self._awaited is not None and self._awaited.is_replaced()

    def _end_pass(self) -> bool:
        """Torch makes the last reduction of a backward pass. Returns: whether nothing of this pass is reduced."""
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
        """Torch still waits for the gradients of a pass that raised, if one did, in a step that is over.

        After a pass in the step before, which committed, it would be a parameter that was not used, and torch's error
        says so; unless it was a pass that came after the vote.
        """
        attempt, step = self._used_in
        if (attempt == self._manager.strategy.attempt and not self._refused) or not self._is_unfinished():
            return
        committed = self._manager.strategy.attempt == attempt + 1 and self._manager.current_step() > step
        if self._refused or not committed:
            self._reset()

    def _forget_batch_thrown_away(self) -> None:
        """Under no_sync(), torch still reduces in the next backward pass if the last forward pass outside had none.

        So a replica that throws such a batch away would reduce once more than the others, each of whose reductions then
        meets another one. While the graph of that batch lives, in the same step, its backward pass may still come.
        """
        awaited = self._awaited
        if awaited is None or self._is_unfinished():
            return
        if awaited.attempt != self._manager.strategy.attempt or not awaited.may_come():
            self._reset()

    def _reset(self) -> None:
        """Have torch expect no backward pass.

        Raises: UsageError: torch would lay out its buckets anew, and not as those of the others are.
        """
        for name, (parameter, strides) in self._strides.items():
            if strides_of(parameter) != strides:
                raise UsageError(
                    f"the memory format of parameter {name} was changed after DistributedDataParallel was made, so "
                    "that its gradient would be reduced in another layout than on the other replicas; convert the "
                    "module before it is wrapped"
                )
        self._awaited = None
        self.reducer._reset_state()
        self._lay_out_buckets()

    def is_in_pass(self) -> bool:
        """Whether a backward pass of this attempt has begun to fill buckets and has not filled all of them."""
        return self._used_in[0] == self._manager.strategy.attempt and self._is_unfinished()

    def _is_unfinished(self) -> bool:
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:
            return True
        return False

    # --- what torch's class has and this one can't -------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Refuse the hook, because the hook that reduces across replicas already uses this place.

        Raises: Unsupported: always.
        """
        raise Unsupported(
            f"the gradients are reduced across replicas by the Manager, in the place of a communication hook, so "
            f"{getattr(hook, '__qualname__', hook)} can't be registered"
        )

    def _setup_in_backward_optimizers(self) -> None:
        # Torch takes a stream for them before it registers its hook, which it can't where there is no accelerator.
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self._module_parameters):
            raise Unsupported(
                "optimizers that step in the backward pass can't be used: they would step before the vote; give their "
                "parameters to one that does not, and wrap it in Optimizer"
            )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> NoReturn:
        raise Unsupported(
            f"the gradients are reduced across replicas by the Manager, in the place of a communication hook, so "
            f"{comm_hook_type} can't be registered"
        )

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> NoReturn:
        raise Unsupported(f"{optim.__name__} would step in the backward pass, before the vote; wrap it in Optimizer")

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to join. A replica without data leaves the job instead, which costs the others nothing.

        Raises: Unsupported: always.
        """
        raise Unsupported(
            "join does not exist here: a replica whose data has ended shuts its Manager down, and the others go on"
        )

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse to join, as `join` does.

        Raises: Unsupported: always.
        """
        self.join()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a DistributedDataParallel is bound to its Manager and can't be copied or pickled; save the module's "
            "state_dict()"
        )


@final
class _AwaitedPass:
    """The last forward pass outside `no_sync()`: torch reduces its gradients, or those of whatever pass comes next.

    Attributes:
        attempt: in which the forward pass was made.
        is_in_doubt: whether a forward pass under `no_sync()` came after it.
        has_begun: whether its backward pass has.
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
        """Return whether a backward pass may still come, or runs: its graph lives, or nobody can tell."""
        return self.has_begun or self._graph is None or self._graph() is not None

    def is_replaced(self) -> bool:
        """Return whether a backward pass that runs now is not this one, but of a batch under `no_sync()`."""
        return self.is_in_doubt and not self.has_begun and self._graph is not None


class _Graph:
    """Stands in the metadata of the nodes at the end of a graph, and so lives as long as one of them."""


@final
class _UsedMaps(ProcessGroup):
    """The group whose allreduce torch calls for one thing: to learn which parameters were used by anybody.

    It does so when the last bucket is on its way, so a parameter has a gradient now iff it was used, in this pass or in
    one that it adds up with; that is what is counted, over the participants.

    Args:
        manager: sums across.
        group: for everything else.
        inside: the processes of this replica group; None: this process is the group.
        ends_pass: called for the map, which is the last reduction of a pass; returns whether nothing of it is reduced.

    `parameters` are the reducer's, in its order.
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
                at_end_of_backward(lambda: self._forget(counts))  # after torch has given out the gradients

        reductions_of(self._manager).start(self._manager, counts, group=self._inside, average=False, done=done)
        return DummyWork([counts])  # torch looks at it after the end of the pass, which waits

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

    # Its life is the Manager's and the other group's; torch never asks.

    def configure(self, store_addr: str, rank: int, world_size: int, **identity: Any) -> NoReturn:
        raise Unsupported("the group of a DistributedDataParallel is configured by its Manager")

    def abort(self) -> NoReturn:
        raise Unsupported("the group of a DistributedDataParallel is aborted by its Manager")

    def errored(self) -> None:
        return None

    def set_timeout(self, timeout: timedelta) -> NoReturn:
        raise Unsupported("the time-out of a DistributedDataParallel's reductions is its Manager's")

    def shutdown(self) -> None:
        """Nothing: it holds nothing."""
