"""The Manager: the interface of a training loop, a thin shell around the step core.

A step has three calls. `start_quorum` requests the members of the step, in the background of the forward pass.
`allreduce` averages over the participants, and reports failures instead of raising them. `should_commit` waits until
all of this has ended, exchanges live state if a member heals, and returns whether the optimizer may step.

Only the training thread touches the user's state, inside `start_quorum` and `should_commit`.

Law of this file: the interface for training loops. Each call is a line or two to the part that does the work. The
interface for strategies is in `strategy`, the order of a step's calls in `runner`, and the rest of a Manager's life in
`lifecycle`.
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
from typing_extensions import Unpack  # in typing since Python 3.11

from tft_algos.errors import ConfigError, ExceptionWithTraceback, UsageError
from tft_algos.manager.adoption import adopted
from tft_algos.manager.assembly import assemble, resolve
from tft_algos.manager.config import ManagerConfig, ResolvedConfig, config_of, limit_of
from tft_algos.manager.interfaces import Clock, Coordinator, ProcessGroupLike
from tft_algos.manager.lifecycle.lifecycle import Lifecycle
from tft_algos.manager.recovery.user_state import LoadState, TakeState, UserState
from tft_algos.manager.reduce.quantized import quantizer_of
from tft_algos.manager.reduce.reduction import check_arguments
from tft_algos.manager.settings import ManagerSettings
from tft_algos.manager.status import ManagerStatus, status_of
from tft_algos.manager.step.runner import StepRunner
from tft_algos.manager.strategy import StepControl
from tft_algos.quantization import Codec, FeedbackSlot
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on

T = TypeVar("T")


@final
class Manager:
    """The manager of one replica group, which keeps it in step with the others across joins, failures and losses.

    Args:
        pg: the process group across replica groups. The Manager configures it, and shuts it down at the end. A torch
            group made with `enable_reconfigure=True` (torch 2.14 and later) is wrapped in a
            `tft_pg.ReconfigurableProcessGroup`.
        load_state_dict: loads a healthy peer's state into this process, in place. The training thread calls it.
            DTensors of the peer's state arrive as DTensors on this process's own meshes.
        state_dict: returns the state of this process: tensors, DTensors and plain data. The training thread calls it on
            all ranks of the group at the same step, so the function may run collectives over them. A replica that heals
            calls it too if the peer's state has DTensors, to find its own meshes.
        min_replica_size: minimum number of participants for a commit.
        config: all other settings.
        settings: single settings, laid over the config. The names are the fields of `ManagerConfig`.
        coordinator: represents this replica group, or is a function that makes a coordinator from the resolved config.
            None: GroupCoordinator.
        clock: returns the time, waits and wakes. None: the system's clock.
    Attributes:
        quorum_logger, commits_logger, errors_logger: loggers of the records for machines, see
            `tft_algos.manager.step.event_log`.
    Raises:
        ConfigError: a setting or an environment variable is wrong, missing or unknown.
        tft_pg.UnsupportedOperationError: pg is a torch group that reconfigures, for tensors that are not on the CPU.
        UsageError: this process has an earlier Manager of that replica_id that was not shut down.
        UnreachableError, RequestTimeoutError: the group's store did not answer within
            connect_timeout. On a rank other than 0, this also holds for its manager server. Rank 0 does not wait here
            for its own server, which starts in the background. The first step waits for it, and raises
            ReplicaGroupLostError if it can't start.
    """

    def __init__(
        self,
        pg: ProcessGroupLike | dist.ProcessGroup,
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
            raise ConfigError("load_state_dict and state_dict belong together; give both or neither")
        requested = config_of(config, settings, min_replica_size)
        group = adopted(pg)
        resolved = resolve(requested, group, coordinator, clock)
        user = UserState(is_rank0_only=resolved.rank0_synchronization_only)
        if load_state_dict is not None and state_dict is not None:
            user.register("default", load_state_dict, state_dict)
        self._parts = assemble(resolved, group, user, coordinator, clock)
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
        """Add a part of the user's state that a healing member takes from its source.

        A part may be added before the second step. A replica that healed in the first step heals once more, because it
        did not get this part. A part that is added later is not made equal on the replicas. If such a part is compared,
        a warning says so.

        Args:
            key: the name of the part, the same on every replica.
            load_state_dict: loads the part in place. It is called like the Manager's own argument.
            state_dict: returns the part. It is called like the Manager's own argument.
            compared: the part is the same on every replica after every commit, so `check_state_every` may compare it.
                False: replicas may differ in it, for example in their position in their own data.
        Raises: ManagerClosedError. ConfigError: the key is used already or is not a text, or an argument is not a
        function.
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
                    "state was registered under %r in attempt %d, and only replicas that heal after that receive it, "
                    "so it must already be the same on all replicas; register it before the first step",
                    key,
                    self._step.status.name.attempt,
                )

    def set_state_dict_fns(self, load_state_dict: LoadState, state_dict: TakeState) -> None:
        """Register state without a key. Deprecated: use `register_state_dict_fn`, which takes a key."""
        warnings.warn("set_state_dict_fns is deprecated; use register_state_dict_fn", DeprecationWarning, stacklevel=2)
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """Mark the user's state as half written, for example between the steps of two optimizers.

        Only the training thread reads the state, inside start_quorum and should_commit. So this protects against one
        mistake: a call of these with a half-written state. The call then raises UserStateError if a member wants the
        state.
        """
        self._parts.shared.user_state.readable = False

    def allow_state_dict_read(self) -> None:
        """Mark the user's state as complete again."""
        self._parts.shared.user_state.readable = True

    def state_dict(self) -> dict[str, Any]:
        """Return this Manager's own state for a durable checkpoint: step, batches_committed, lineage."""
        return dict(self._step.status.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a Manager's state from a durable checkpoint, together with the user's own state.

        Raises: UserStateError: `state_dict` is not the state of a Manager. Nothing has changed then.
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
        """Begin a step: request a quorum.

        With an asynchronous quorum, this returns at once. An error is recorded for this step, and the next call starts
        afresh. With a synchronous quorum, this returns when the group is ready and healed.

        Args:
            allow_heal: members may heal in this step. It counts only if all replicas say so.
            shrink_only: no new members.
            timeout: maximum wait for the quorum. None: quorum_timeout.
            use_async_quorum: for this step, the same on every replica. None: the config's value. A strategy whose
                members heal while they give zeros passes True, whatever the config says.
        Raises: ManagerClosedError. LeftJob, a SystemExit: this replica has left. ConfigError: timeout is not a
            timedelta above zero and of at most a week, or an argument is not a bool. ConfigError also: the first step
            is over, a model or an optimizer is wrapped, and no state is registered. UserStateError, in the first
            steps: the registered state can't be sent, or a state_dict raises. In these cases no step has begun. With a
            synchronous quorum:
            also the error of the quorum, and the Manager stays usable. With an asynchronous quorum, that error is
            recorded. should_commit raises it if this process can't continue.
        """
        self._life.check_open()
        self._runner.start(allow_heal, shrink_only, timeout, use_async_quorum)

    def wait_quorum(self) -> None:
        """Wait until the plan has arrived and the process group is configured.

        Raises: UsageError: no quorum was started. Otherwise the error of the quorum.
        """
        self._runner.wait_quorum()

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool | Codec | FeedbackSlot = False,
        reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
        *,
        weight: float | None = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Reduce a tensor over the participants, in place.

        A failure is reported to this Manager and never raised. The step then does not commit, and the content of the
        tensor is undefined. A member that does not participate gives a neutral value: zeros to a sum or a mean, ones to
        a product, the lowest value to a maximum.

        A call between a verdict and the next `start_quorum` reduces over the members of the last quorum. Only members
        that committed the step contribute, so that a loss or a token count belongs to that step. A failure of such a
        call is only logged: `wait()` returns False, and the next quorum builds the group again.

        Args:
            tensor: dense. Every replica gives the same shape and dtype, in the same order of calls. Strides may differ,
                because elements of equal index are reduced. A tensor that is not contiguous is copied twice for this.
            should_quantize: True: send the tensor as 8-bit codes, see `tft_algos.quantization.Int8`. Or a codec, or a
                slot of an `ErrorFeedback` of this Manager. Every replica gives the same. Only for SUM and AVG of
                floating-point and complex dtypes. All replicas get equal bits. A lone replica rounds nothing. The
                reduction of a float64 is in float32. A block with NaN or infinity becomes NaN.
            reduce_op: AVG is the mean over the participants. AVG overflows only if the mean does: tensors are scaled
                before the sum, and float16 is reduced in float32. SUM, MAX, MIN, PRODUCT and the bitwise operations are
                torch's.
            weight: the weight of this replica group in an AVG, for example the number of samples or tokens in its
                batch. The result is sum(weight * tensor) / sum(weight). Either every replica gives a weight, or none
                does. The default comes from `set_weight`.
            timeout: maximum time of this reduction. After it the reduction has failed, and running operations of the
                process group are aborted. None: the timeout of the process group.
        Returns: a Work whose wait() is True if the tensor holds the result, and False if not. Its future completes at
            the same time, with `[tensor]` and without an error.
        Raises: ManagerClosedError. UnsupportedFeatureError: PREMUL_SUM, or should_quantize with another operation,
            tensor or group than it works with. ValueError: AVG of whole numbers. UsageError: no quorum was started, the
            tensor or the operation has a wrong type, or a slot is used twice in a step, or between two steps.
            ConfigError: the weight is invalid or is used with another operation than AVG, should_quantize is no codec
            and no slot of this Manager, or timeout is not a timedelta above zero and of at most a week.
        """
        self._life.check_open()
        weight = check_arguments(tensor, reduce_op, weight)
        quantizer = None
        if should_quantize is not False:
            group = self._parts.quantizing_group
            quantizer = quantizer_of(should_quantize, tensor, reduce_op, group=group, manager=self)
        limit = None if timeout is None else limit_of(timeout, timeout)
        self._runner.check_no_sync()
        self._runner.await_plan()
        return self._parts.reducer.reduce(tensor, reduce_op, weight=weight, limit=limit, quantizer=quantizer)

    def set_weight(self, weight: float) -> None:
        """Set the weight of this replica group for every AVG of the current step that gives no weight itself.

        Each replica averages its gradients over its own batch. Weighted with the number of samples or tokens, their
        mean is the mean over all batches. A member that heals, or is a spare, always weighs zero. The sum of the
        weights is reduced once a step, beside the first such AVG. The end of the step clears the weight. A mean of
        gradients does not overflow if the weights sum to at most 2**32.

        Args:
            weight: zero, or 1e-18 to 1e18. All replicas set a weight in the same steps. All ranks of this group set the
                same weight. If only some replicas do, their reductions do not match. The steps then fail, or Gloo ends
                the process ("gloo::EnforceNotMet"), which torch can't prevent. So set the weight in every step.
        Raises: ManagerClosedError. ConfigError: the weight is invalid. UsageError: no step is open, or a reduction of
            this step already used another weight.
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
        Raises: ManagerClosedError. ConfigError: timeout is not a timedelta above zero and of at most a week.
            UsageError: fut is not a future.
        """
        self._life.check_open()
        if not isinstance(fut, torch.futures.Future):
            raise UsageError(f"wrap_future was given a {type(fut).__name__}; give a torch.futures.Future")
        limit = limit_of(timeout, self._parts.shared.config.timeout)
        return self._parts.futures.wrap(fut, default, limit.total_seconds(), self._step.status.name)

    def report_error(self, e: Exception) -> None:
        """Report that this step has failed. Later reductions do nothing, and should_commit votes no.

        An error between two steps fails no step. A `shutdown` before the next step then does not count as finished.

        Raises: UsageError: e is not an exception.
        """
        if not isinstance(e, BaseException):
            raise UsageError(f"report_error was given a {type(e).__name__}; give the exception: RuntimeError(...)")
        self._step.tell(on.UserReportedError(e))

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step, or None."""
        error = self._step.status.error
        return None if error is None else ExceptionWithTraceback(error)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End a step: wait for its reductions, heal or serve, and vote.

        Args:
            timeout: for the vote. None: the Manager's timeout.
        Returns: True: the optimizer steps now, on every rank of this group. False: the optimizer must not step.
        Raises:
            ReplicaGroupLostError, RefusedError: this process can't continue. The message says why.
            RequestTimeoutError: no verdict arrived. Neither step nor continue.
            TooManyFailuresError: more steps in a row failed than max_retries allows.
            UserStateError: a member needs the state of this process, or the state is due to be compared, and
                disallow_state_dict_read forbids reading it. Also: this replica could not heal, because a load function
                here or a state_dict at the source raised the same error twice in a row. A state function that raises
                once does not end the step. That error is logged, the members that need the state are refused, and the
                step commits.
            ConfigError: timeout is not a timedelta above zero and of at most a week. Nothing has happened then.
            UsageError: no quorum was started since the last verdict, or a part of the Manager was not set up.
        """
        self._life.check_open()
        return self._runner.end(timeout)

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> StepControl:
        """Return the interface for strategies. A training loop does not need it."""
        return self._strategy

    def status(self) -> ManagerStatus:
        """Return what this rank is doing, as one value of facts. Works on any thread, also after `shutdown`.

        This never waits and raises nothing. In a forked child of this process, it returns the facts at the time of the
        fork.
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
        """Return the number of members whose gradients count in this step; 0 before the first. Waits for the quorum."""
        self._strategy.wait_plan()
        return self._step.status.num_participants

    def participating_rank(self) -> int | None:
        """Return this group's rank among the participants; None if it gives zeros. Waits for the quorum."""
        self._strategy.wait_plan()
        status = self._step.status
        return status.plan.participating_rank if status.plan is not None and status.is_participating else None

    def is_participating(self) -> bool:
        """Return whether this group's gradients count in this step. Waits for the quorum."""
        return self.participating_rank() is not None

    # --- the end -------------------------------------------------------------------------------------------------

    def leave(self, deadline: timedelta | None = None, *, reason: str = "") -> None:
        """Leave the job after the running step, which ends as usual. Any thread or a signal handler may call this.

        This call only records the request. `left` becomes true in the vote in which all ranks of this group agree. The
        loop `while not manager.left` then ends, and `shutdown` serves the members that heal from here. Without a
        running step, `shutdown` leaves at once. The other replicas do not wait for this replica afterwards, and lose no
        step.

        Args:
            deadline: from now on. For this long at most, this replica stays if no other replica holds the state, waits
                for a quorum, and serves the members that heal. None: heal_timeout.
            reason: the reason, which the lighthouse logs.
        Raises: ConfigError: deadline is not a timedelta above zero and of at most a week, or reason is not a text.
        """
        self._life.leave(deadline, reason=reason)

    def leave_on_signal(self, *signals: int, deadline: timedelta | None = None) -> None:
        """Leave when this process receives one of these signals. `shutdown` restores the earlier handlers.

        This may be called again, with other signals or another deadline.

        Args:
            signals: signal numbers. None given: SIGTERM.
            deadline: as in `leave`.
        Raises: ManagerClosedError. UsageError: this is not the main thread, which alone may handle signals.
            ConfigError: a process can't handle one of the signals, or the deadline is invalid. Nothing has changed
            then.
        """
        self._life.leave_on_signal(signals, deadline)

    @property
    def left(self) -> bool:
        """Return whether this replica has left. No step begins any more."""
        return self._step.status.left

    def shutdown(self, wait: bool = True, *, finished: bool = True) -> None:
        """End everything that this Manager started, and its process group. A second call does nothing.

        After a committed step, the training counts as finished. This replica then leaves, and reports its last step.
        When all replicas have finished, the job has ended at that step. A replica that is behind then gets
        `JobOverError`. A replica that has finished or left first serves the members that heal from it,
        until they are done or the deadline passes.

        The training does not count as finished if the Manager knows of an error. Such an error passes through the
        caller, was reported since the last commit, or was raised by `start_quorum`. A step that is open or did not
        commit counts as an error, too. The Manager does not see an error of your own code that an `except` handled
        between two steps. Pass `finished=False` then.

        Args:
            wait: wait until everything has ended.
            finished: False: an error has ended the training loop, and the other replicas lose this one.
        Raises: errors that the process group, or another part of the user's own, raises at its end. Everything else has
            ended then.
        """
        self._life.shutdown(wait=wait, finished=finished)

    def __enter__(self) -> Manager:
        self._life.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
