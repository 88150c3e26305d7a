"""What a strategy needs of a Manager beyond a training loop's calls: `manager.strategy`.

A plain loop never looks here. `DistributedDataParallel`, `Optimizer`, `LocalSGD` and `DiLoCo` are built on this, and so
is a strategy of your own: it says what it trains, whether its steps are syncs that run beside the training, when state
may be exchanged, and what became of a step that it applied.

Law of this file: the surface for strategies; each call is one line to the part that does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

import torch
import torch.distributed as dist

from tft_algos.errors import SettingError
from tft_algos.manager.assembly import Parts
from tft_algos.manager.config import ResolvedConfig
from tft_algos.manager.deferred import DeferredStep
from tft_algos.manager.fingerprint import USER
from tft_algos.manager.lifecycle import Lifecycle
from tft_algos.manager.runner import StepRunner
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan


@final
class StepControl:
    """Steers the steps of one Manager; it is the Manager's `strategy`.

    Its properties and `quorum_is_known` never wait, and may be read on any thread. Everything else belongs on the
    training thread, except where it says otherwise.

    Args:
        parts, runner, life: of the Manager, which makes this.
    """

    def __init__(self, parts: Parts, runner: StepRunner, life: Lifecycle) -> None:
        self._parts = parts
        self._step = parts.shared.step
        self._runner = runner
        self._life = life

    # --- what is trained ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> ResolvedConfig:
        """Return the settings, with what the environment and the defaults filled in."""
        return self._parts.shared.config

    def attach(self, name: str) -> None:
        """Say that the Manager's steps are the syncs of a strategy, which reduces by `reduce_in_sync`.

        From then on `Manager.allreduce` is for what is between two syncs: while one is in flight, members would mix it
        with the reductions of the sync in different orders, because those begin when the quorum is known.

        Args:
            name: of the strategy, for messages.
        Raises: SettingError: there is one already.
        """
        before = self._runner.strategy
        if before is not None:
            raise SettingError(
                f"{name} was given a Manager whose steps are the syncs of a {before} already; give each strategy a "
                "Manager of its own, and enter one strategy again rather than make another"
            )
        self._runner.strategy = name
        if self._parts.wording.is_ordered:
            # Members begin the reductions of a sync in flight when they know its quorum, before a word or after it.
            self._step.tell(on.WordsRefused())

    def describe_parameters(self, model: torch.nn.Module, *, strides: bool = False) -> None:
        """Add names, dtypes and (global) shapes of a model's parameters to the fingerprint.

        In the first step the Manager looks whether parameters and buffers of the model stand in the registered state.

        The wrappers of models do it themselves; a strategy of your own calls it once for each model, in the same order
        on every replica, before the first step.

        Args:
            strides: add also the layout in memory of what is trained, so that a replica with channels_last or
                transposed parameters is refused where others have none. `DistributedDataParallel` needs this, because
                torch's buckets are laid out as the parameters are; `allreduce` of single tensors does not.
        """
        self._parts.fingerprint.add_model(model, strides=strides)
        self._parts.audit.model_wrapped(model)

    def describe_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add dtypes and (global) shapes of what an optimizer steps to the fingerprint.

        `Optimizer` does it itself, so that it is known also of models whose wrapper is torch's own, as with
        `extend_mesh`. In the same order on every replica, before the first step.
        """
        groups = optimizer.param_groups
        self._parts.fingerprint.add_optimizer(parameter for group in groups for parameter in group["params"])
        self._parts.audit.optimizer_wrapped(optimizer)

    def add_to_fingerprint(self, name: str, value: str) -> None:
        """Add a part in which all replicas of the job have to be alike; who differs is refused by name.

        It goes with the next request for a quorum, so that it is compared before the reductions of that step. A part
        that another replica lacks is not compared. What is known at the start belongs in `ManagerConfig.fingerprint`.

        Args:
            name: of the part, the same on every replica.
            value: what has to be the same: a digest of the tokenizer, say.
        Raises: SettingError: there is a part of that name with another value, or these are no texts.
        """
        self._parts.fingerprint.add(USER + name if isinstance(name, str) else name, value)

    # --- the step that was begun last ---------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """Return the calls of start_quorum so far: the number of the step that was begun last, committed or not."""
        return self._step.status.name.attempt

    @property
    def verdict(self) -> bool | None:
        """Return whether that step was committed; None while should_commit has not said it."""
        return self._step.status.verdict

    @property
    def is_untouched(self) -> bool:
        """Return whether that step is as it was begun: nothing reduced in it, nothing failed, nobody has voted."""
        return self._step.status.is_untouched

    def wait_plan(self) -> Plan | None:
        """Wait for the plan of that step, on any thread.

        Returns: None without a quorum, and before the first step. What the quorum raised is not raised here.
        """
        return self._runner.plan() if self._runner.has_begun else None

    def quorum_is_known(self) -> bool:
        """Return whether `wait_plan` would return at once: the plan is here and the process group configured, or there
        is no quorum for this step.

        Raises: UsageError: no quorum was started.
        """
        return self._runner.quorum_is_known()

    def raise_if_left(self) -> None:
        """End a training loop that does not look at `Manager.left`; `start_quorum` calls this, and so does each inner
        step of LocalSGD and DiLoCo.

        Raises: LeftJob, a SystemExit with exit code 0: this replica has left.
        """
        self._runner.raise_if_left()

    # --- syncs beside the training ------------------------------------------------------------------------------------

    def reduce_in_sync(self, tensor: torch.Tensor) -> dist.Work:
        """Reduce a tensor to its mean over the participants, as `allreduce`, in the open step of an attached strategy.

        It waits for the quorum.
        """
        self._runner.await_plan()
        return self._parts.reducer.reduce(tensor, dist.ReduceOp.AVG, weight=None, limit=None)

    def exchange_state(self) -> bool:
        """Serve those that heal in this step, or heal, now rather than in `should_commit`; waits for the quorum.

        For a strategy whose state does not change until its step ends, so that it may be given at once and a newcomer
        trains on from it. Start the step's reductions before: nobody's reduction shall wait for a transfer. The
        functions that give and take the user's state are called here, on the training thread, by all ranks of the
        group at the same step. A second call in a step does nothing, and so does one after a synchronous quorum or
        without a plan.

        Returns: whether this call has healed this replica. If its healing failed, the step will not commit.
        Raises: UsageError: no step is open. StateUnavailable, StateDiverged, tft_coord.errors.GroupLost: as
            `should_commit`.
        """
        self._life.check_open()
        return self._runner.exchange_state()

    def defer(self) -> DeferredStep:
        """Put the open step aside, so that the next `start_quorum` begins another one beside it.

        For a strategy that trains on while it reduces. Call it when the step's reductions have been started; it waits
        for the quorum, and does what `exchange_state` does if that was not called. Steps in flight together belong to
        one quorum, and end in the order in which they were begun, each by its own `should_commit`. Another quorum, or a
        verdict of no, fails all of them, here and on every other member. Every replica has as many in flight, so all
        begin and end theirs in the same order. A request for a quorum reports committed steps only.

        Returns: the step.
        Raises: Closed. UsageError: no step is open. What `exchange_state` raises; then the step is open still.
        """
        self._life.check_open()
        return self._runner.defer()

    @property
    def num_deferred(self) -> int:
        """Return how many steps that were put aside may still commit: in the open one's quorum, when that is known."""
        return self._step.status.num_deferred

    def give_up_deferred(self) -> None:
        """Fail all that is in flight, the open step included, as when a strategy ends: by all ranks of the group, after
        the same inner step. The next quorum is another one, and fails what the other members have in flight too."""
        self._step.tell(on.FlightsGivenUp())

    def inner_step_ended(self) -> None:
        """Say that the trainer goes on: a strategy's inner step has ended. May be called at any time.

        A trainer that says so is not taken to wait for the reductions that run meanwhile, however long they take, nor
        to hang in a step that spans many inner ones.
        """
        self._parts.where.inner_step_ended()

    # --- what was committed -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """Enter this while a committed step is applied: the trainer is busy with its own work, not between two steps.

        So it is found if it hangs there. `Optimizer` steps inside this; a strategy of your own may, too. What begins
        after it, an evaluation perhaps, may take any time again.
        """
        self._parts.where.applies = True
        try:
            yield
        finally:
            self._parts.where.applies = False

    def report_torn(self, error: BaseException) -> None:
        """Say that the step was committed and could not be applied: the state here is half written.

        This group heals, whole, before its gradients count again. `Optimizer` calls it when the optimizer raises, and
        when the gradients were unscaled by another scale than the one that this replica healed to.
        """
        self._step.tell(on.StateTorn())
        self._parts.shared.reports.torn(error)
