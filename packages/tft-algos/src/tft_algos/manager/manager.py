"""The Manager: what a training loop talks to, a thin shell around the step core.

A step reads like this. `start_quorum` asks who trains together, in the background of the forward pass. `allreduce`
averages over the participants and reports failures instead of raising them. `should_commit` waits until all of that
has ended, gives or takes live state where a member heals, and says whether the optimizer may step.

The user's state is touched by the training thread alone, inside `start_quorum` and `should_commit`.

Law of this file: the surface for training loops; each call is a line or two to the part that does it. The surface for
strategies is `strategy`'s, the calls of a step in their order stand in `runner`, and the life of a Manager beside its
steps in `lifecycle`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from typing_extensions import Unpack  # of typing since Python 3.11

from tft_algos.errors import ExceptionWithTraceback, SettingError, UsageError
from tft_algos.manager.assembly import assemble, resolve
from tft_algos.manager.config import ManagerConfig, ResolvedConfig, config_of, limit_of
from tft_algos.manager.lifecycle import Lifecycle
from tft_algos.manager.parts import Clock, Coordinator, Group
from tft_algos.manager.reduction import check_asked
from tft_algos.manager.runner import StepRunner
from tft_algos.manager.settings import ManagerSettings
from tft_algos.manager.status import ManagerStatus, status_of
from tft_algos.manager.strategy import StepControl
from tft_algos.manager.user_state import LoadState, TakeState, UserState
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on

T = TypeVar("T")


@final
class Manager:
    """Keeps one replica group in step with the others, whatever joins, fails or dies.

    Args:
        pg: the process group across replica groups; configured, and at the end shut down, by this Manager.
        load_state_dict: applies a healthy peer's state to this process, in place; called on the training thread, with
            DTensors on this process's own meshes where the peer's state has DTensors.
        state_dict: gives this process's state: tensors, DTensors and plain data; called on the training thread, by all
            ranks of the group at the same step, so it may run collectives over them. Who heals calls it too if the
            peer's state has DTensors, to find its own meshes.
        min_replica_size: participants without whom no step commits.
        config: all other settings.
        settings: single ones, laid over the config: its fields by name, see `ManagerConfig`.
        coordinator: speaks for this replica group, or makes what does from the resolved config; None: GroupCoordinator.
        clock: tells the time, waits and wakes; None: the system's.
    Attributes:
        quorum_logger, commits_logger, errors_logger: of the records for machines, see `tft_algos.manager.records`.
    Raises:
        SettingError: a setting or an environment variable is wrong, missing or unknown.
        UsageError: this process has an earlier Manager of that replica_id that was not shut down.
        tft_coord.errors.Unreachable, tft_coord.errors.DeadlinePassed: the group's store, or on another rank than 0 its
            manager server, did not answer within connect_timeout. Rank 0's own server starts while the trainer is
            constructed further; the first step waits for it, and raises GroupLost if it can't start.
    """

    def __init__(
        self,
        pg: Group,
        load_state_dict: LoadState | None = None,
        state_dict: TakeState | None = None,
        min_replica_size: int | None = None,
        *,
        config: ManagerConfig | None = None,
        coordinator: Coordinator | Callable[[ResolvedConfig], Coordinator] | None = None,
        clock: Clock | None = None,
        **settings: Unpack[ManagerSettings],
    ) -> None:
        if (load_state_dict is None) != (state_dict is None):
            raise SettingError("load_state_dict and state_dict belong together; give both or neither")
        said = config_of(config, settings, min_replica_size)
        resolved = resolve(said, pg, coordinator, clock)
        user = UserState(is_island=resolved.rank0_synchronization_only)
        if load_state_dict is not None and state_dict is not None:
            user.register("default", load_state_dict, state_dict)
        self._parts = assemble(resolved, pg, user, coordinator, clock)
        self._step = self._parts.shared.step
        self._life = Lifecycle(self._parts)
        self._runner = StepRunner(self._parts, check_open=self._life.check_open)
        self._strategy = StepControl(self._parts, self._runner, self._life)
        records = self._parts.shared.reports.records
        self.quorum_logger, self.commits_logger, self.errors_logger = records.quorums, records.commits, records.errors

    # --- the user's state ----------------------------------------------------------------------------------------

    def register_state_dict_fn(
        self, key: str, load_state_dict: LoadState, state_dict: TakeState, *, compared: bool = True
    ) -> None:
        """Add a piece of user state that a healing member takes from its source.

        It may come as late as after the first step. A replica that has healed in that step has not got this piece then,
        so it heals once more. Of what comes later nothing is made alike: a warning says so where it is to be compared.

        Args:
            key: its name, the same on every replica.
            load_state_dict: applies it in place; called on the training thread, as the Manager's own argument.
            state_dict: gives it; called on the training thread, as the Manager's own argument.
            compared: it is the same on every replica after every commit, so `check_state_every` may compare it. False
                for what differs rightly, such as a replica's place in its own data.
        Raises: Closed. SettingError: there is a piece of that name already, the name is no text, or these are no
            functions.
        """
        self._life.check_open()
        shared = self._parts.shared
        shared.user_state.register(key, load_state_dict, state_dict, compared=compared)
        for order in self._step.tell(on.StateRegistered(compared)):
            if isinstance(order, do.HealAgain):
                shared.reports.log(
                    logging.INFO, "state was registered under %r after the healing, so this replica heals again", key
                )
            elif isinstance(order, do.WarnLateState):
                shared.reports.log(
                    logging.WARNING,
                    "state was registered under %r in attempt %d: it has to be the same on all replicas already, for "
                    "only who heals later takes it from another; register it before the first step",
                    key,
                    self._step.status.name.attempt,
                )

    def set_state_dict_fns(self, load_state_dict: LoadState, state_dict: TakeState) -> None:
        """Register state without a key. Deprecated: use `register_state_dict_fn`, which takes a key."""
        warnings.warn("set_state_dict_fns is deprecated; use register_state_dict_fn", DeprecationWarning, stacklevel=2)
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """Say that the user's state is half written, as between two optimizers' steps.

        State is read on the training thread alone, inside start_quorum and should_commit, so this guards against one
        thing: calling them in that condition, which then raises StateUnavailable when a member wants the state.
        """
        self._parts.shared.user_state.readable = False

    def allow_state_dict_read(self) -> None:
        """Say that the user's state is whole again."""
        self._parts.shared.user_state.readable = True

    def state_dict(self) -> dict[str, Any]:
        """Return this Manager's own state for a durable checkpoint: step, batches_committed, lineage."""
        return dict(self._step.status.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a Manager's state from a durable checkpoint, together with the user's own.

        Raises: StateUnavailable: it is no state of a Manager; nothing has changed then.
        """
        self._runner.settle()
        self._step.tell(on.StateLoaded(state_dict))

    # --- a step --------------------------------------------------------------------------------------------------

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
        *,
        use_async_quorum: bool | None = None,
    ) -> None:
        """Begin a step: ask who trains together.

        With an asynchronous quorum it returns at once; what goes wrong is recorded for this step, and the next call
        starts afresh. With a synchronous one it returns when the group is ready and healed.

        Args:
            allow_heal: members may heal in this step; it counts only if all say so.
            shrink_only: no newcomers.
            timeout: for the quorum; None: quorum_timeout.
            use_async_quorum: of this step, the same on every replica; None: the config's. A strategy whose members heal
                while they already give zeros says True, whatever the config says.
        Raises: Closed. LeftJob, a SystemExit: this replica has left. SettingError: timeout is no timedelta above zero
            and of at most a week, an argument is no bool, or the first step is over, a model or an optimizer is wrapped
            and no state is registered. StateUnavailable, in the first steps: the registered state can't travel, or a
            state_dict raises. In these cases nothing has begun. Synchronous: what the quorum raised; the Manager stays
            usable. Asynchronous: nothing else, it is recorded, and should_commit raises it if this process can't go on.
        """
        self._life.check_open()
        self._runner.start(allow_heal, shrink_only, timeout, use_async_quorum)

    def wait_quorum(self) -> None:
        """Wait until the plan is here and the process group is configured.

        Raises: UsageError: no quorum was started; else what the quorum raised.
        """
        self._runner.wait_quorum()

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
        *,
        weight: float | None = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Reduce a tensor over the participants, in place.

        Failures are reported to this Manager, never raised: the step will not commit, and what the tensor holds then
        means nothing. A member that does not participate gives what changes nothing: zeros to a sum or a mean, ones to
        a product, the least value to a maximum.

        Between a verdict and the next `start_quorum` it reduces over the members of the quorum that is over, where
        those give that have committed the step, so that a loss or a count of tokens is that of the step. A failure
        there is logged and nothing else: `wait()` is False, and the next quorum builds the group anew.

        Args:
            tensor: dense; every replica gives the same shape and dtype, in the same order of calls. Strides may differ:
                equal places meet, and a tensor that is not contiguous is copied twice for that.
            should_quantize: refused; there is no quantized reduction here.
            reduce_op: AVG is the mean over the participants and overflows only where the mean does: tensors are scaled
                before they are added up, and float16 is reduced in float32. SUM, MAX, MIN, PRODUCT and the bitwise
                ones are as torch has them.
            weight: of this replica group in an AVG, such as the number of samples or tokens in its batch: the result is
                sum(weight * tensor) / sum(weight). Every replica says one, or none does: see `set_weight`, whose it is
                by default.
            timeout: for this reduction. When it passes, the reduction has failed, and what runs in the process group is
                ended. None: the process group's own.
        Returns: a Work whose wait() is True if the tensor holds the result and False if not. Its future, done at the
            same time, is of `[tensor]` and holds no error.
        Raises: Closed. Unsupported: should_quantize, or PREMUL_SUM. ValueError: AVG of whole numbers. UsageError: no
            quorum was started, or the tensor or the operation is none. SettingError: the weight can't be one, or
            belongs to another operation than AVG; or timeout is no timedelta above zero and of at most a week.
        """
        self._life.check_open()
        weight = check_asked(tensor, should_quantize, reduce_op, weight)
        limit = None if timeout is None else limit_of(timeout, timeout)
        self._runner.check_no_sync()
        self._runner.await_plan()
        return self._parts.reducer.reduce(tensor, reduce_op, weight=weight, limit=limit)

    def set_weight(self, weight: float) -> None:
        """Say how much this replica group weighs in every AVG of the current step that says no weight itself.

        Gradients that each replica averaged over its own batch become those of all batches together if each weighs as
        many samples (or tokens) as it has. A member that heals, and a spare, weigh zero whatever they say. The sum of
        the weights is reduced once a step, beside the first such AVG. The step's end forgets the weight. No mean of a
        gradient overflows as long as the weights sum to at most 2**32.

        Args:
            weight: zero, or 1e-18 to 1e18. Every replica says one in the same steps, and every rank of this group the
                same one. Where only some do, their reductions meet others than they should: the steps fail, or Gloo
                ends the process ("gloo::EnforceNotMet"), which torch can't be kept from. So say it in every step.
        Raises: Closed. SettingError: it is no such number. UsageError: outside a step, or another one than that
            with which a reduction of this step was weighted already.
        """
        self._life.check_open()
        self._parts.reducer.set_weight(weight)

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that never fails. An error or a time-out is reported, and the result is `default`.

        At `shutdown`, a pending future gets `default` too, and nothing is reported.

        Args:
            fut: any future.
            default: the result in place of an error.
            timeout: maximum wait. None: the Manager's timeout.
        Raises: Closed. SettingError: timeout is not a timedelta above zero and of at most a week. UsageError: fut is
            not a future.
        """
        self._life.check_open()
        if not isinstance(fut, torch.futures.Future):
            raise UsageError(f"wrap_future was given a {type(fut).__name__}; give a torch.futures.Future")
        limit = limit_of(timeout, self._parts.shared.config.timeout)
        return self._parts.futures.wrap(fut, default, limit.total_seconds(), self._step.status.name)

    def report_error(self, e: Exception) -> None:
        """Say that this step has failed: later reductions do nothing, and should_commit votes no.

        Between two steps it fails none; a `shutdown` before the next step is then no finish.

        Raises: UsageError: e is no exception.
        """
        if not isinstance(e, BaseException):
            raise UsageError(f"report_error was given a {type(e).__name__}; give the exception: RuntimeError(...)")
        self._step.tell(on.UserReportedError(e))

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step, or None."""
        error = self._step.status.error
        return None if error is None else ExceptionWithTraceback(error)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End a step: wait for its reductions, heal or serve, vote.

        Args:
            timeout: for the vote; None: the Manager's.
        Returns: True: the optimizer steps now, on every rank of this group. False: it must not.
        Raises:
            tft_coord.errors.GroupLost, Refused: this process can't go on; the message says why.
            tft_coord.errors.DeadlinePassed: no verdict came; neither step nor go on.
            TooManyFailures: more steps in a row failed than max_retries allows.
            StateUnavailable: a member needs this process's state, or the state is due to be compared, and
                disallow_state_dict_read forbids to read it; or this replica could not heal, because a load function
                here or a state_dict at the source raised the same twice in a row. A state function that raises once
                does not end the step: the error is logged, the members that need the state are refused, and the step
                commits.
            SettingError: timeout is no timedelta above zero and of at most a week. Nothing has happened then.
            UsageError: no quorum was started since the last verdict, or a part of the Manager was not set up.
        """
        self._life.check_open()
        return self._runner.end(timeout)

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> StepControl:
        """Return what a strategy of your own needs beyond these calls; a training loop does not."""
        return self._strategy

    def status(self) -> ManagerStatus:
        """Return what this rank is doing: one value of facts, on any thread, also after `shutdown`.

        It never waits, and raises nothing. In a child that was forked from this process it says what was so then.
        """
        return status_of(self._parts)

    @property
    def replica_id(self) -> str:
        """Return the full id of this replica group, `name:uuid4`."""
        return self._parts.shared.coordinator.replica_id

    def current_step(self) -> int:
        """Return the number of committed steps, 0 at the start."""
        return self._step.status.step

    def batches_committed(self) -> int:
        """Return the sum over the committed steps of their participants."""
        return self._step.status.batches_committed

    def num_participants(self) -> int:
        """Return the number of members whose gradients count in this step; waits for the quorum; 0 before the first."""
        self._strategy.wait_plan()
        return self._step.status.num_participants

    def participating_rank(self) -> int | None:
        """Return this group's place among the participants; waits for the quorum; None if it gives zeros."""
        self._strategy.wait_plan()
        status = self._step.status
        return status.plan.participating_rank if status.plan is not None and status.is_participating else None

    def is_participating(self) -> bool:
        """Return whether this group's gradients count in this step; waits for the quorum."""
        return self.participating_rank() is not None

    # --- the end -------------------------------------------------------------------------------------------------

    def leave(self, deadline: timedelta | None = None, *, reason: str = "") -> None:
        """Leave the job after the running step, which ends as it would have: from any thread, or a signal handler.

        It only takes note. The vote in which all ranks of this group agree makes `left` true, and the loop ends by
        `while not manager.left`; `shutdown` then serves those that heal from here. Without a running step `shutdown`
        leaves at once. Nobody waits for this replica any more, and nothing of the others' steps is discarded.

        Args:
            deadline: from now on; so long this replica stays if nobody else holds the state, waits for a quorum, and
                serves those that heal. None: heal_timeout.
            reason: why; the lighthouse logs it.
        Raises: SettingError: deadline is no timedelta above zero and of at most a week, or reason no text.
        """
        self._life.leave(deadline, reason=reason)

    def leave_on_signal(self, *signals: int, deadline: timedelta | None = None) -> None:
        """Leave when this process is sent one of these signals. `shutdown` gives them back their handlers.

        May be called again, for other signals or with another deadline.

        Args:
            signals: none said: SIGTERM.
            deadline: as in `leave`.
        Raises: Closed. UsageError: this is not the main thread, which alone may handle signals. SettingError: one of
            them is no signal that a process can handle, or the deadline is none; nothing has changed then.
        """
        self._life.leave_on_signal(signals, deadline)

    @property
    def left(self) -> bool:
        """Return whether this replica has left: no step begins any more."""
        return self._step.status.left

    def shutdown(self, wait: bool = True, *, finished: bool = True) -> None:
        """End everything that this Manager started, and its process group; again does nothing.

        After a committed step, the training is finished: this replica leaves, and says with which step. When all
        replicas have finished, the job has ended there, and a replica that is behind is told so
        (`tft_coord.errors.JobOver`). A replica that has finished or left first serves those that heal from it, until
        they are done or the deadline passes.

        The training is not finished where the Manager knows of an error: one that passes through the caller, a step
        that is open or did not commit, an error that `start_quorum` raised or that was reported since. It can't know of
        an error of your own code that an `except` has handled between two steps; say `finished=False` then.

        Args:
            wait: until all of it has ended.
            finished: False: an error has ended the training loop, and the other replicas lose this one.
        Raises: what the process group, or another part of the user's own, raises at its end; all else has ended then.
        """
        self._life.shutdown(wait=wait, finished=finished)

    def __enter__(self) -> Manager:
        self._life.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
