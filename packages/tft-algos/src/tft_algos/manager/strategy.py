"""The interface of a Manager for strategies: `manager.strategy`.

A plain training loop does not need it. `DistributedDataParallel`, `Optimizer`, `LocalSGD` and `DiLoCo` are built on it,
and so is a strategy of your own. A strategy declares what it trains, and whether its steps are syncs that run beside
the training. It also decides when state may be exchanged, and reports whether it could apply a committed step.

Law of this file: the interface for strategies. Each call is one line to the part that does the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

import torch
import torch.distributed as dist

from tft_algos.errors import ConfigError
from tft_algos.manager.assembly import Parts
from tft_algos.manager.config import ResolvedConfig
from tft_algos.manager.lifecycle.lifecycle import Lifecycle
from tft_algos.manager.quorum.fingerprint import USER
from tft_algos.manager.reduce.quantized import Quantizer, quantizer_of
from tft_algos.manager.step.deferred import DeferredStep
from tft_algos.manager.step.event_log import RecordListener
from tft_algos.manager.step.runner import StepRunner
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan


@final
class StepControl:
    """The controls of a Manager's steps, as `Manager.strategy`.

    Its properties and `quorum_is_known` never wait, and any thread may read them. All other methods belong on the
    training thread, unless they say otherwise.

    Args:
        parts, runner, life: of the Manager, which makes this object.
    """

    def __init__(self, parts: Parts, runner: StepRunner, life: Lifecycle) -> None:
        self._parts = parts
        self._step = parts.shared.step
        self._runner = runner
        self._life = life

    # --- what is trained ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> ResolvedConfig:
        """Return the settings, completed from the environment and the defaults."""
        return self._parts.shared.config

    def attach(self, name: str) -> None:
        """Declare that the Manager's steps are the syncs of a strategy, which reduces with `reduce_in_sync`.

        From then on, `Manager.allreduce` is only for calls between two syncs. The reductions of a sync begin when the
        quorum is known. So during a sync, members would mix an allreduce with these reductions in different orders.

        Args:
            name: the name of the strategy, for messages.
        Raises: ConfigError: a strategy is attached already.
        """
        before = self._runner.strategy
        if before is not None:
            raise ConfigError(
                f"{name} was given a Manager that already runs the syncs of a {before}; give each strategy a Manager "
                "of its own, and enter the same strategy again instead of making another"
            )
        self._runner.strategy = name
        if self._parts.control_words.is_ordered:
            # Each member begins the reductions of a sync when it knows the quorum. That may be before or after a word.
            self._step.tell(on.WordsRefused())

    def describe_parameters(self, model: torch.nn.Module, *, strides: bool = False) -> None:
        """Add names, dtypes and (global) shapes of a model's parameters to the fingerprint.

        In the first step, the Manager checks whether parameters and buffers of the model are in the registered state.
        The wrappers of models call this themselves. A strategy of your own calls it once for each model, in the same
        order on every replica, before the first step.

        Args:
            strides: also add the memory layout of the trained parameters. A replica with channels_last or transposed
                parameters is then refused if other replicas have none. `DistributedDataParallel` needs this, because
                torch lays out its buckets like the parameters. `allreduce` of single tensors does not need it.
        """
        self._parts.fingerprint.add_model(model, strides=strides)
        self._parts.audit.model_wrapped(model)

    def describe_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add dtypes and (global) shapes of an optimizer's parameters to the fingerprint.

        `Optimizer` calls this itself. So the parameters are known also for a model in torch's own wrapper, for example
        with `extend_mesh`. Call it in the same order on every replica, before the first step.
        """
        groups = optimizer.param_groups
        self._parts.fingerprint.add_optimizer(parameter for group in groups for parameter in group["params"])
        self._parts.audit.optimizer_wrapped(optimizer)

    def add_to_fingerprint(self, name: str, value: str) -> None:
        """Add a value that all replicas of the job must share.

        A replica that differs is refused, and the error names the value.

        The next request for a quorum carries the value, so it is compared before the reductions of that step. A value
        that another replica lacks is not compared. Values that are known at the start belong in
        `ManagerConfig.fingerprint`.

        Args:
            name: the name of the value, the same on every replica.
            value: the value that must be the same, for example a digest of the tokenizer.
        Raises: ConfigError: the name has another value already, or an argument is not a text.
        """
        self._parts.fingerprint.add(USER + name if isinstance(name, str) else name, value)

    # --- the step that was begun last ---------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """Return the number of start_quorum calls so far. This is the number of the last step, committed or not."""
        return self._step.status.name.attempt

    @property
    def verdict(self) -> bool | None:
        """Return whether the last step was committed; None until should_commit returns."""
        return self._step.status.verdict

    @property
    def is_untouched(self) -> bool:
        """Return whether the last step is as it began: no reduction, no failure, no vote."""
        return self._step.status.is_untouched

    def wait_plan(self) -> Plan | None:
        """Wait for the plan of the last step, on any thread.

        Returns: the plan. None: there is no quorum, or no step has begun. Errors of the quorum are not raised here.
        """
        return self._runner.plan() if self._runner.has_begun else None

    def quorum_is_known(self) -> bool:
        """Return whether `wait_plan` would return at once.

        This is so if the plan is here and the process group is configured, or if the step has no quorum.

        Raises: UsageError: no quorum was started.
        """
        return self._runner.quorum_is_known()

    def raise_if_left(self) -> None:
        """End a training loop that does not check `Manager.left`.

        `start_quorum` and each inner step of LocalSGD and DiLoCo call this.

        Raises: LeftJob, a SystemExit with exit code 0: this replica has left.
        """
        self._runner.raise_if_left()

    # --- syncs beside the training ------------------------------------------------------------------------------------

    def reduce_in_sync(self, tensor: torch.Tensor, quantizer: Quantizer | None = None) -> dist.Work:
        """Reduce a tensor to its mean over the participants, in the open step of an attached strategy.

        Waits for the quorum.

        Args:
            tensor: the tensor to reduce.
            quantizer: of `quantizer_of`. None: the tensor is sent as it is.
        Raises: UsageError: `exchange_state` was called in this step, and has told the others that its reductions are
            done.
        """
        self._runner.await_plan()
        return self._parts.reducer.reduce(tensor, dist.ReduceOp.AVG, weight=None, limit=None, quantizer=quantizer)

    def quantizer_of(self, should_quantize: object, tensor: torch.Tensor) -> Quantizer:
        """Return how `reduce_in_sync` quantizes a tensor.

        Args:
            should_quantize: as in `Manager.allreduce`, and not False.
            tensor: the tensor to reduce.
        Raises: ConfigError: should_quantize is none of its types. UnsupportedFeatureError: the tensor or the process
            group can't be used.
        """
        return quantizer_of(
            should_quantize, tensor, dist.ReduceOp.AVG, group=self._parts.quantizing_group, manager=None
        )

    def exchange_state(self) -> bool:
        """Serve the members that heal in this step, or heal, now instead of in `should_commit`. Waits for the quorum.

        This is for a strategy whose state does not change until its step ends. The state may then be given at once, and
        a newcomer trains on from it. Start the step's reductions first, so that they do not wait for a transfer. The
        functions for the user's state are called here, on the training thread, by all ranks of the group at the same
        step. A second call in a step does nothing. A call after a synchronous quorum, or without a plan, does nothing
        either.

        Returns: whether this call has healed this replica. If its healing failed, the step does not commit.
        Raises: UsageError: no step is open. UserStateError, StateDivergedError,
            ReplicaGroupLostError: as `should_commit`.
        """
        self._life.check_open()
        return self._runner.exchange_state()

    def defer(self) -> DeferredStep:
        """Detach the open step, so that the next `start_quorum` begins another step at the same time.

        This is for a strategy that trains on while it reduces. Call it after the step's reductions have been started.
        It waits for the quorum, and exchanges state if `exchange_state` was not called. Steps in flight together belong
        to one quorum. They end in the order in which they began, each by its own `should_commit`. Another quorum, or a
        verdict of no, fails all of them, here and on every other member. All replicas have the same number in flight,
        so all begin and end theirs in the same order. A request for a quorum reports committed steps only.

        Returns: the step.
        Raises: ManagerClosedError. UsageError: no step is open. Any error of `exchange_state`, after which the step is
        still open.
        """
        self._life.check_open()
        return self._runner.defer()

    @property
    def num_deferred(self) -> int:
        """Return how many deferred steps may still commit, in the quorum of the open step if it is known."""
        return self._step.status.num_deferred

    def give_up_deferred(self) -> None:
        """Fail everything in flight, including the open step, for example when a strategy ends.

        All ranks of the group call this after the same inner step. The next quorum is a new one, and also fails what
        the other members have in flight.
        """
        self._step.tell(on.FlightsGivenUp())

    def inner_step_ended(self) -> None:
        """Report that the trainer continues: a strategy's inner step has ended. May be called at any time.

        A trainer that reports this is not taken to wait for reductions that run meanwhile, however long they take. It
        is also not taken to hang in a step that spans many inner steps.
        """
        self._parts.step_progress.inner_step_ended()

    # --- what was committed -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """Mark that a committed step is being applied: the trainer is busy with its own work, not between two steps.

        A hang inside this context is detected. `Optimizer` steps inside it, and a strategy of your own may do so too.
        Work after it, such as an evaluation, may take any time.
        """
        self._parts.step_progress.applies = True
        try:
            yield
        finally:
            self._parts.step_progress.applies = False

    def report_torn(self, error: BaseException) -> None:
        """Report that a committed step could not be applied, so the state here is half written.

        The whole group heals before its gradients count again. `Optimizer` calls this in two cases: the optimizer
        raises, or the gradients were unscaled by another scale than the one after the healing.
        """
        self._step.tell(on.StateTorn())
        self._parts.shared.reports.torn(error)


def follow_records(strategy: StepControl, listener: RecordListener) -> None:
    """Set a function that receives a Manager's records for machines, for example to write them in another form.

    Args:
        strategy: of the Manager.
        listener: called with "quorum", "commit" or "error", and the attributes of the record as in
            `tft_algos.manager.step.event_log`. Any thread of the Manager calls it, so it must return at once.
    """
    strategy._parts.shared.reports.records.listener = listener
