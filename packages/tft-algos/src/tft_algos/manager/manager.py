"""The Manager: what a training loop talks to, a thin shell around the step core.

A step reads like this. `start_quorum` asks who trains together, in the background of the forward pass. `allreduce`
averages over the participants and reports failures instead of raising them. `should_commit` waits until all of that
has ended, gives or takes live state where a member heals, and says whether the optimizer may step.

The user's state is touched by the training thread alone, inside `start_quorum` and `should_commit`.

Law of this file: the surface, and the calls of a step in their order. What is decided about a step stands in
`tft_coord.core.step`; how each part does its work stands in a file of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist

from tft_algos.errors import (
    Closed,
    ExceptionWithTraceback,
    LeftJob,
    SettingError,
    TooManyFailures,
    Unsupported,
    UsageError,
)
from tft_algos.manager import at_exit
from tft_algos.manager.audit import StateAudit
from tft_algos.manager.bounded import BoundedFutures
from tft_algos.manager.breaking import Breaker
from tft_algos.manager.clock import SystemClock
from tft_algos.manager.config import (
    COORDINATOR_METHODS,
    ManagerConfig,
    ResolvedConfig,
    WorldSizeMode,
    check_made_coordinator,
    check_part,
    config_of,
    from_environment,
)
from tft_algos.manager.coordinator import GroupCoordinator
from tft_algos.manager.deferred import DeferredStep
from tft_algos.manager.early import EarlyState
from tft_algos.manager.exchange import StateExchange
from tft_algos.manager.fingerprint import USER, OwnFingerprint
from tft_algos.manager.group_store import own_host
from tft_algos.manager.island import Bystander, check_transport
from tft_algos.manager.leaving import GracefulShutdown
from tft_algos.manager.mailbox import StepMailbox
from tft_algos.manager.negotiation import Negotiation
from tft_algos.manager.orders import Orders
from tft_algos.manager.own_time import OwnTime
from tft_algos.manager.parts import Clock, Coordinator, Group, ServerRestarted
from tft_algos.manager.reducer import Reducer
from tft_algos.manager.reduction import check_weight
from tft_algos.manager.reports import Reports
from tft_algos.manager.settings import ManagerSettings
from tft_algos.manager.shared import Shared
from tft_algos.manager.signals import SignalHandlers
from tft_algos.manager.state_check import StateCheck
from tft_algos.manager.straggling import OnStraggler, Straggling
from tft_algos.manager.unreached import UnreachedPeers
from tft_algos.manager.user_state import LoadState, TakeState, UserState
from tft_algos.manager.waits import WaitWatch
from tft_algos.manager.whereabouts import Whereabouts
from tft_ckpt import CheckpointTransport, HTTPTransport
from tft_coord.core.progress import Progress
from tft_coord.core.step import Effects, Healing, StepSettings
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.stragglers import StragglerNews
from tft_coord.core.types import (
    KillOrder,
    LeaveRequest,
    LossNotice,
    NewcomerAsks,
    Plan,
    Purpose,
    Released,
    Verdict,
    WaitsFor,
)
from tft_coord.errors import DeadlinePassed, GroupLost
from tft_coord.news import News
from tft_coord.timeouts import LONGEST_MS

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing since Python 3.11

T = TypeVar("T")

MILLISECOND = timedelta(milliseconds=1)
LONGEST_TIMEOUT = timedelta(milliseconds=LONGEST_MS)
LAST_WORDS_S = 1.0
LOOK_EVERY_BEATS = 0.9  # the next beat may come a little early


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
        _check_group(pg)
        if (load_state_dict is None) != (state_dict is None):
            raise SettingError("load_state_dict and state_dict belong together; give both or neither")
        if not callable(coordinator):
            check_part("coordinator", coordinator, *COORDINATOR_METHODS)
        check_part("clock", clock, "monotonic", "wait", "after")
        said = config_of(config, settings, min_replica_size)
        self._config: ResolvedConfig = from_environment(said, os.environ, own_host=own_host)
        check_transport(self._config)
        pg = Bystander(pg) if self._config.stands_by else pg
        self._pg = pg
        self._pid = os.getpid()
        self._fingerprint = OwnFingerprint(self._config)
        self._unreached = UnreachedPeers()
        self._user = UserState(is_island=self._config.rank0_synchronization_only)
        if load_state_dict is not None and state_dict is not None:
            self._user.register("default", load_state_dict, state_dict)
        self._clock: Clock = clock or SystemClock()
        self._breaker = Breaker(pg, self._clock)
        self._deferred: list[DeferredStep] = []  # that have not ended
        self._strategy: str | None = None  # whose syncs the steps are
        self._signals = SignalHandlers()
        self._closing = threading.Event()
        self._exits = False  # the interpreter does, and has shut this Manager down
        self._synchronize: Callable[[], None] | None = (
            torch.accelerator.synchronize if torch.accelerator.is_available() else None
        )
        self._own_time = OwnTime(self._clock.monotonic)
        if self._config.timeout_was_said:
            pg.set_timeout(self._config.timeout)
        self._transport = self._config.checkpoint_transport or _own_transport(self._config)
        try:
            made = coordinator or GroupCoordinator
            self._coordinator: Coordinator = made(self._config) if callable(made) else made
            if made is not GroupCoordinator:
                check_made_coordinator(self._coordinator)
        except BaseException:
            self._transport.shutdown()
            raise
        # From here on a process of ours runs: nothing below waits, or asks anything that can fail.
        self._step = StepMailbox(_settings(self._config, self._coordinator.replica_id), self._clock.monotonic)
        self._where = Whereabouts(
            self._step,
            slowest_step_ms=self._config.timeouts.slowest_step_ms,
            num_reductions=lambda: self._reducer.num_started,
            reduces=lambda: self._reducer.reduces or any(step.started.runs for step in tuple(self._deferred)),
            monotonic=self._clock.monotonic,
            own_time=self._own_time,
        )
        self._reports = Reports(
            lambda: self._step.status,
            job_id=self._config.job,
            replica_id=self._coordinator.replica_id,
            rank=self._config.rank,
        )
        self.quorum_logger = self._reports.records.quorums
        self.commits_logger = self._reports.records.commits
        self.errors_logger = self._reports.records.errors
        self._futures = BoundedFutures(self._clock, lambda error, name: self._step.tell(on.ErrorReported(error, name)))
        self._reducer = Reducer(pg, self._step, self._clock, own_time=self._own_time)
        shared = Shared(
            config=self._config,
            step=self._step,
            coordinator=self._coordinator,
            transport=self._transport,
            user_state=self._user,
            reports=self._reports,
            clock=self._clock,
            closing=self._closing,
        )
        self._audit = StateAudit(shared)
        self._check = StateCheck(shared, self._audit)
        self._early = EarlyState(
            take=self._user.take_whole,
            transport=self._transport,
            timeout=self._config.heal_timeout,
            log=self._reports.log,
        )
        self._exchange = StateExchange(
            shared,
            early=self._early,
            check=self._check,
            audit=self._audit,
            where=self._where,
            unreached=self._unreached,
        )
        self._negotiation = Negotiation(
            shared, group=pg, breaker=self._breaker, fingerprint=self._fingerprint, unreached=self._unreached
        )
        self._farewell = GracefulShutdown(shared)
        self._straggling = Straggling(self._reports)
        self._waits = WaitWatch(
            self._step,
            self._where,
            self._config,
            self._reports,
            self._clock.monotonic,
            failed_before=lambda: self._unreached.last,
            left_out=lambda: self._straggling.left_out if self._step.status.is_left_out else "",
        )
        orders = Orders(
            shared,
            pg,
            self._breaker,
            self._early,
            self._exchange,
            self._check,
            self._farewell,
            self._own_time,
        )
        self._step.performs(orders.performers())
        self._coordinator.listen(self._told)
        self._next_look_s = 0.0
        self._coordinator.follow(self._look_often)
        at_exit.shut_down_at_exit(self)

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
        self._check_open()
        self._user.register(key, load_state_dict, state_dict, compared=compared)
        for order in self._step.tell(on.StateRegistered(compared)):
            if isinstance(order, do.HealAgain):
                self._reports.log(
                    logging.INFO, "state was registered under %r after the healing, so this replica heals again", key
                )
            elif isinstance(order, do.WarnLateState):
                self._reports.log(
                    logging.WARNING,
                    "state was registered under %r in attempt %d: it has to be the same on all replicas already, for "
                    "only who heals later takes it from another; register it before the first step",
                    key,
                    self.attempt,
                )

    def add_to_fingerprint(self, name: str, value: str) -> None:
        """Add a part in which all replicas of the job have to be alike; who differs is refused by name.

        It goes with the next request for a quorum, so that it is compared before the reductions of that step. A part
        that another replica lacks is not compared.

        Args:
            name: of the part, the same on every replica.
            value: what has to be the same: a digest of the tokenizer, say.
        Raises: SettingError: there is a part of that name with another value, or these are no texts.
        """
        self._fingerprint.add(USER + name if isinstance(name, str) else name, value)

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
        self._fingerprint.add_model(model, strides=strides)
        self._audit.model_wrapped(model)

    def describe_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add dtypes and (global) shapes of what an optimizer steps to the fingerprint.

        `Optimizer` does it itself, so that it is known also of models whose wrapper is torch's own, as with
        `extend_mesh`. In the same order on every replica, before the first step.
        """
        self._fingerprint.add_optimizer(parameter for group in optimizer.param_groups for parameter in group["params"])
        self._audit.optimizer_wrapped(optimizer)

    def set_state_dict_fns(self, load_state_dict: LoadState, state_dict: TakeState) -> None:
        """Deprecated: use register_state_dict_fn, which takes a key."""
        warnings.warn("set_state_dict_fns is deprecated; use register_state_dict_fn", DeprecationWarning, stacklevel=2)
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """Say that the user's state is half written, as between two optimizers' steps.

        State is read on the training thread alone, inside start_quorum and should_commit, so this guards against one
        thing: calling them in that condition, which then raises StateUnavailable when a member wants the state.
        """
        self._user.readable = False

    def allow_state_dict_read(self) -> None:
        """Say that the user's state is whole again."""
        self._user.readable = True

    def state_dict(self) -> dict[str, Any]:
        """This Manager's own state, for a durable checkpoint: step, batches_committed, lineage."""
        return dict(self._step.status.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a Manager's state from a durable checkpoint, together with the user's own.

        Raises: StateUnavailable: it is no state of a Manager; nothing has changed then.
        """
        self._settle()
        self._step.tell(on.StateLoaded(state_dict))

    # --- the quorum ----------------------------------------------------------------------------------------------

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
        self._check_open()
        if self._step.tell(on.StartAsked()):
            self.raise_if_left()
        limit = self._limit(timeout, self._config.quorum_timeout)
        for name, said in (("allow_heal", allow_heal), ("shrink_only", shrink_only)):
            if not isinstance(said, bool):
                raise SettingError(f"{name} is {said!r}; give True or False")
        if use_async_quorum is not None and not isinstance(use_async_quorum, bool):
            raise SettingError(f"use_async_quorum is {use_async_quorum!r}; give True, False or None")
        with self._own_time:
            self._settle()
        self._audit.step_begins()
        last = self._step.status
        if last.errors:
            silent = self._unreached.step_failed(last.plan, last.errors)
            if silent:
                self._reports.log(logging.WARNING, "%s", silent)
        self._reducer.step_begins()
        self._step.tell(on.StartReady(urgent=self._unreached.has_unsaid))
        (ask,) = self._step.tell(
            on.StepStarted(
                checkpoint_metadata=self._transport.metadata(),
                group_usable=self._pg.errored() is None,
                allow_heal=allow_heal,
                shrink_only=shrink_only,
                use_async_quorum=use_async_quorum,
                poor_sources=self._exchange.poor_sources(),
                unreached=self._unreached.take(),
                fingerprint=self._fingerprint.unsaid(),
            )
        )
        assert isinstance(ask, do.Ask), ask
        own_state = self._step.status.own_state() if self._takes_early(ask) else None
        self._where.step_begins()
        self._waits.quorum_limit = limit
        self._negotiation.start(ask, limit)
        if own_state is not None:
            self._early.take(own_state)
        if ask.prepares_to_serve:
            self._transport.prepare_to_send()
        if not ask.request.use_async_quorum:
            self.wait_quorum()
            self._exchange.perform()
            self._reports.raise_fatal()  # who was told meanwhile that its group is lost has nobody to train with

    def _takes_early(self, ask: do.Ask) -> bool:
        """Whether the state is taken at this step boundary, for a newcomer that asks."""
        request = ask.request
        if not ask.may_take_early:
            return False
        lineage = request.lineage if self._user.readable and not request.torn else None
        return self._early.step_begins(ask.attempt, request.step, lineage, len(self._user.names))

    def wait_quorum(self) -> None:
        """Wait until the plan is here and the process group is configured.

        Raises: UsageError: no quorum was started; else what the quorum raised.
        """
        if not self._negotiation.has_begun:
            raise UsageError("wait_quorum was called before start_quorum; call start_quorum first")
        with self._own_time:
            self._negotiation.wait()

    def quorum_is_known(self) -> bool:
        """Whether `wait_quorum` would return, or raise, at once: the plan is here and the process group configured, or
        there is no quorum for this step. Never waits.

        Raises: UsageError: no quorum was started.
        """
        if not self._negotiation.has_begun:
            raise UsageError("quorum_is_known was called before start_quorum; call start_quorum first")
        return self._negotiation.has_ended

    def _settle(self) -> None:
        """End what an attempt has left running: its quorum, its fetch, its reductions."""
        self._negotiation.settle()
        plan = self._step.status.plan
        self._step.tell(on.AttemptSettled(offers=plan is not None and self._early.serves(plan)))
        self._reducer.finish()
        self._reducer.release()
        dropped = [step for step in self._deferred if step.is_abandoned and not step.started.runs]
        for step in dropped:
            step.started.let_go()
            self._deferred.remove(step)
        if dropped:
            self._step.tell(on.FlightsDropped(tuple(step.name.attempt for step in dropped)))

    def _plan(self) -> Plan | None:
        """The plan of this step, waited for; None if there is none. Never raises what the quorum raised."""
        self._await_plan()
        return self._step.status.plan

    def _await_plan(self) -> None:
        """Wait until the plan of this step is here, or it is known that there is none."""
        if not self._negotiation.has_begun:
            raise UsageError("a reduction needs a quorum; call start_quorum first")
        if not self._negotiation.has_ended:
            with self._own_time:
                self._negotiation.settle()

    # --- reductions ----------------------------------------------------------------------------------------------

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
        self._check_open()
        if should_quantize:
            raise Unsupported(
                "quantized reductions do not exist here, and nothing is sent unquantized in their place; call "
                "allreduce without should_quantize"
            )
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"allreduce was given a {type(tensor).__name__}; give one tensor")
        if not isinstance(reduce_op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            raise UsageError(f"reduce_op is {reduce_op!r}; give one of torch's, such as torch.distributed.ReduceOp.AVG")
        if reduce_op == dist.ReduceOp.PREMUL_SUM:
            raise Unsupported("PREMUL_SUM does not exist here; multiply the tensor, and reduce it with ReduceOp.SUM")
        average = reduce_op == dist.ReduceOp.AVG
        if average and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"an average needs a floating point tensor, and this one is {tensor.dtype}; use ReduceOp.SUM"
            )
        if weight is not None:
            weight = check_weight(weight)
            if not average:
                raise SettingError(f"a weight belongs to ReduceOp.AVG, and this reduction is {reduce_op}; leave it out")
        limit = None if timeout is None else self._limit(timeout, timeout)
        if self._strategy is not None and (self._step.status.is_open or self.num_deferred):
            raise UsageError(
                f"allreduce was called while a sync of {self._strategy} is in flight, whose reductions may begin "
                "before or after it on other members; call it where none is in flight, as behind the inner step in "
                "which current_step() has risen, with fragment_sync_delay below a period"
            )
        self._await_plan()
        return self._reducer.reduce(tensor, reduce_op, weight=weight, limit=limit)

    def attach_strategy(self, name: str) -> None:
        """Say that this Manager's steps are the syncs of a strategy, which reduces by `reduce_in_sync`.

        From then on `allreduce` is for what is between two syncs: while one is in flight, members would mix it with the
        reductions of the sync in different orders, because those begin when the quorum is known.

        Args:
            name: of the strategy, for messages.
        Raises: SettingError: it has one.
        """
        if self._strategy is not None:
            raise SettingError(
                f"{name} was given a Manager whose steps are the syncs of a {self._strategy} already; give each "
                "strategy a Manager of its own, and enter one strategy again rather than make another"
            )
        self._strategy = name

    def reduce_in_sync(self, tensor: torch.Tensor) -> dist.Work:
        """The mean of a tensor over the participants, as `allreduce`, in the open step of an attached strategy."""
        self._await_plan()
        return self._reducer.reduce(tensor, dist.ReduceOp.AVG, weight=None, limit=None)

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
        self._check_open()
        self._reducer.set_weight(weight)

    @property
    def share(self) -> float:
        """The share of its usual batch that this replica is to take, above 0 and up to 1.

        It is less than 1 where the lighthouse runs with `--stragglers shrink` and this replica holds the others at its
        pace. Read it at the start of each step, take so much of the batch, and say with `set_weight` how many samples
        that were. Ranks of a group hear of a change at different moments: where they must take the same part, as with
        tensor or pipeline parallelism, let rank 0 tell the others.
        """
        return self._straggling.share

    def on_straggler(self, listener: OnStraggler) -> None:
        """Have a function called with each change of this replica's pace: it is a straggler, is left out, may join
        again, or is to take another share of its batch. Each change is logged in any case.

        Args:
            listener: called with a `tft_coord.StragglerNews` by a thread of the Manager's; it must return at once.
        Raises: Closed. SettingError: it is no function.
        """
        self._check_open()
        if not callable(listener):
            raise SettingError(f"on_straggler was given a {type(listener).__name__}; give a function of one argument")
        self._straggling.listen(listener)

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """A future that never fails: on an error or a time-out, that is reported and the result is `default`.

        So it is for what is pending at `shutdown`, of which nothing is reported.

        Args:
            fut: any future.
            default: the result in place of an error.
            timeout: None: the Manager's.
        Raises: Closed. SettingError: timeout is no timedelta above zero and of at most a week. UsageError: fut is no
            future.
        """
        self._check_open()
        if not isinstance(fut, torch.futures.Future):
            raise UsageError(f"wrap_future was given a {type(fut).__name__}; give a torch.futures.Future")
        limit = self._limit(timeout, self._config.timeout)
        return self._futures.wrap(fut, default, limit.total_seconds(), self._step.status.name)

    # --- errors --------------------------------------------------------------------------------------------------

    def report_error(self, e: Exception) -> None:
        """Say that this step has failed: later reductions do nothing, and should_commit votes no.

        Between two steps it fails none; a `shutdown` before the next step is then no finish.

        Raises: UsageError: e is no exception.
        """
        if not isinstance(e, BaseException):
            raise UsageError(f"report_error was given a {type(e).__name__}; give the exception: RuntimeError(...)")
        self._step.tell(on.UserReportedError(e))

    def errored(self) -> ExceptionWithTraceback | None:
        """The first error of this step, or None."""
        error = self._step.status.error
        return None if error is None else ExceptionWithTraceback(error)

    def errors(self) -> tuple[Exception, ...]:
        """The errors of this step, in order; at most 16 are kept."""
        return self._step.status.errors

    # --- losses of others ----------------------------------------------------------------------------------------

    def _told(self, news: News) -> None:
        """A loss in a quorum or of this group, a newcomer, or what somebody wants of this process; a thread of the
        coordinator calls: nothing waits here."""
        match news:
            case LossNotice() | NewcomerAsks() | GroupLost():
                self._told_of_others(news)
            case LeaveRequest(reason, serve_ms):
                self._reports.log(logging.WARNING, "asked to leave: %s", reason)
                self.leave(timedelta(milliseconds=serve_ms) if serve_ms else None, reason=reason)
            case Released():
                self._farewell.released.set()
            case WaitsFor(sentence, warns):
                if warns:
                    self._reports.log(logging.WARNING, "%s", sentence)
                else:
                    self._waits.told(sentence)
            case StragglerNews():
                self._straggling.told(news)
                self._step.tell(on.PaceHeard(bool(self._straggling.left_out)))
            case KillOrder(message):
                self._end_process(message)

    def _end_process(self, message: str) -> None:
        """End with exit code 1, at once, whatever other threads do or hold."""

        def last_words() -> None:
            self._reports.log(logging.CRITICAL, "this process is ended: %s", message)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()

        speaker = threading.Thread(target=last_words, name="tft-last-words", daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)
        os._exit(1)

    def _told_of_others(self, news: LossNotice | NewcomerAsks | GroupLost) -> None:
        if isinstance(news, GroupLost):
            self._step.tell(on.GroupWasLost(news))
            return
        if isinstance(news, NewcomerAsks):
            self._early.heard(news.replica_id)
            return
        if not news.lives:
            self._early.lost()
        self._step.tell(on.LossNoticed(news))

    # --- the vote ------------------------------------------------------------------------------------------------

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
        self._check_open()
        limit = self._vote_limit(timeout)
        self._step.tell(on.EndAsked())
        self._own_time.finishes()
        self._await_plan()
        self._wait_for(self._reducer.finish)
        effects = self._step.tell(on.ReductionsEnded())
        if isinstance(effects[-1], do.Concluded):
            self._reducer.let_go()
            return self._concluded(effects[-1])
        if self._synchronize is not None:
            self._synchronize()
        self._reducer.release()
        self._early.reductions_ended(readable=self._user.readable)
        self._where.waits = True  # for state, and for the verdict
        effects = self._step.tell(
            on.DeviceSynchronized(group_error=self._pg.errored(), on_device=self._synchronize is not None)
        )
        if isinstance(effects[-1], do.ExchangeState):
            self._exchange.perform()
            effects = self._step.tell(on.VoteAsked())
        return self._concluded(self._vote(effects, limit))

    def _wait_for(self, finish: Callable[[], None]) -> None:
        """Wait for what was begun in a step."""
        self._where.finishes = True
        try:
            finish()
        finally:
            self._where.finishes = False

    def _vote_limit(self, timeout: timedelta | None) -> timedelta:
        limit = self._limit(timeout, self._config.timeout)
        if self._config.stands_by:
            limit += self._config.timeout  # rank 0 votes when its reductions have ended, which may take so long
        return limit

    def _vote(self, effects: Effects, limit: timedelta) -> do.Effect:
        """Vote, and end the step with the verdict.

        Raises: DeadlinePassed, and what else the coordinator raises: there is no verdict.
        """
        (cast,) = effects
        assert isinstance(cast, do.CastVote), cast
        if not cast.yes:
            # An error has a line of its own, with the loss that has caused it.
            self._reports.log(
                logging.INFO if cast.error is None else logging.DEBUG,
                "should_commit=False enough_replicas=%s errored=%s",
                cast.enough_replicas,
                None if cast.error is None else type(cast.error).__name__,
            )
        try:
            verdict = self._coordinator.vote(
                cast.step, cast.yes, limit, key=cast.key, purpose=Purpose.COMMIT, leaving=cast.leaving
            )
        except ServerRestarted:
            self._step.tell(on.ServerRestarted())
            self._reports.log(logging.WARNING, "the manager server ended during the vote, which counts as no")
            verdict = Verdict(yes=False)
        except DeadlinePassed:
            self._reports.raise_fatal()  # why nobody answered, where that was told while we waited
            raise
        (end,) = self._step.tell(on.VerdictArrived(cast.attempt, verdict.yes, verdict.leaves))
        return end

    def _concluded(self, end: do.Effect, failure: Exception | None = None) -> bool:
        """A step is over. `failure`: of one that was put aside. Raises: TooManyFailures."""
        assert isinstance(end, do.Concluded), end
        error = failure or end.error
        if end.exhausted:
            raise TooManyFailures(
                f"replica {self.replica_id} failed to commit {end.failures} times in a row, and max_retries is "
                f"{self._config.max_retries}; {self._last_failure(error, end.plan)}",
                failures=end.failures,
            ) from error
        return end.committed

    @staticmethod
    def _last_failure(error: BaseException | None, plan: Plan | None) -> str:
        if error is None and plan is not None and plan.num_participants < plan.min_replica_size:
            return f"{plan.num_participants} replicas take part, and min_replica_size is {plan.min_replica_size}"
        return f"the last error was: {error}" if error is not None else "another rank of the group voted no"

    # --- several steps in flight ---------------------------------------------------------------------------------

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
        self._check_open()
        if self._step.status.is_open:
            self._exchange_open()
        (aside,) = self._step.tell(on.DeferAsked())
        assert isinstance(aside, do.PutAside), aside
        step = DeferredStep(aside.name, self._step, self._reducer.put_aside(), end=self._end_deferred)
        self._deferred.append(step)
        return step

    @property
    def num_deferred(self) -> int:
        """Steps that were put aside and may still commit: in the open one's quorum, when that is known."""
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
        self._where.inner_step_ended()

    def _exchange_open(self) -> None:
        """What was put off in the step that is open: wait for its quorum, give or take state."""
        self._step.tell(on.StrategyExchanges())
        if self._plan() is not None:
            self._exchange.perform()

    def _end_deferred(self, step: DeferredStep, timeout: timedelta | None) -> bool:
        """See `DeferredStep.should_commit`."""
        self._check_open()
        limit = self._vote_limit(timeout)
        number = step.name.attempt
        if step.is_over:
            raise UsageError(f"{step.name} has ended; should_commit is called once for each deferred step")
        self._own_time.finishes()
        if self._step.status.is_open:
            self._exchange_open()
        self._step.tell(on.EndAsked(number))
        self._wait_for(step.started.finish)
        step.look()
        (end,) = self._step.tell(on.ReductionsEnded(number))
        if isinstance(end, do.Concluded):
            step.started.let_go()
        else:
            if self._synchronize is not None:
                # Not the whole device: what was begun later may run for long. It runs on streams of the group's.
                torch.accelerator.current_stream().synchronize()
            step.started.release()
            effects = self._step.tell(
                on.DeviceSynchronized(number, self._pg.errored(), on_device=self._synchronize is not None)
            )
            step.look()
            before, self._where.waits = self._where.waits, True
            end = self._vote(effects, limit)
            self._where.waits = before
        step.is_over = True
        if step in self._deferred:  # or nobody held it any more
            self._deferred.remove(step)
        return self._concluded(end, step.failure)

    # --- live state ----------------------------------------------------------------------------------------------

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
        self._check_open()
        self._step.tell(on.StrategyExchanges())
        self._await_plan()
        status = self._step.status
        if status.plan is None or status.exchanged or status.is_abandoned:
            return False
        self._reports.raise_fatal()
        self._exchange.perform()
        self._reports.raise_fatal()
        return self._step.status.healing is Healing.LOADED

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """While a committed step is applied: the trainer is busy with its own work, and not between two steps.

        So it is found if it hangs there. `Optimizer` steps inside this; a strategy of your own may, too. What begins
        after it, an evaluation perhaps, may take any time again.
        """
        self._where.applies = True
        try:
            yield
        finally:
            self._where.applies = False

    def report_torn(self, error: BaseException) -> None:
        """Say that the step was committed and could not be applied: the state here is half written.

        This group heals, whole, before its gradients count again. `Optimizer` calls it when the optimizer raises, and
        when the gradients were unscaled by another scale than the one that this replica healed to.
        """
        self._step.tell(on.StateTorn())
        self._reports.torn(error)

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def replica_id(self) -> str:
        """The full id of this replica group, `name:uuid4`."""
        return self._coordinator.replica_id

    @property
    def config(self) -> ResolvedConfig:
        """The settings, with what the environment and the defaults filled in."""
        return self._config

    @property
    def attempt(self) -> int:
        """Calls of start_quorum so far; the number of the step that was begun last, committed or not."""
        return self._step.status.name.attempt

    @property
    def verdict(self) -> bool | None:
        """Whether that step was committed; None while should_commit has not said it."""
        return self._step.status.verdict

    @property
    def is_untouched(self) -> bool:
        """Whether that step is as it was begun: nothing was reduced in it, nothing has failed, nobody has voted."""
        return self._step.status.is_untouched

    @property
    def torn(self) -> bool:
        """Whether the state here is half written, because an optimizer or a load function raised, so that it heals."""
        return self._step.status.torn

    def current_step(self) -> int:
        """Committed steps, 0 at the start."""
        return self._step.status.step

    def batches_committed(self) -> int:
        """Sum over the committed steps of their participants."""
        return self._step.status.batches_committed

    @property
    def plan(self) -> Plan | None:
        """Of this step; waits for the quorum; None without one, and before the first."""
        return self._plan() if self._negotiation.has_begun else None

    def num_participants(self) -> int:
        """Members whose gradients count in this step; waits for the quorum; 0 before the first."""
        if not self._negotiation.has_begun:
            return 0
        self._plan()
        return self._step.status.num_participants

    def participating_rank(self) -> int | None:
        """This group's place among the participants; waits for the quorum; None if it gives zeros."""
        if not self._negotiation.has_begun:
            return None
        self._plan()
        status = self._step.status
        return status.plan.participating_rank if status.plan is not None and status.is_participating else None

    def is_participating(self) -> bool:
        """Whether this group's gradients count in this step; waits for the quorum."""
        return self.participating_rank() is not None

    # --- leaving -------------------------------------------------------------------------------------------------

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
        limit = self._deadline(deadline)
        if not isinstance(reason, str):
            raise SettingError(f"reason is a {type(reason).__name__}; give a text")
        by_ms = round((self._clock.monotonic() + limit.total_seconds()) * 1_000)
        self._step.post(on.LeaveWished(reason or "it was told to", by_ms))

    def leave_on_signal(self, *signals: int, deadline: timedelta | None = None) -> None:
        """Leave when this process is sent one of these signals. `shutdown` gives them back their handlers.

        May be called again, for other signals or with another deadline.

        Args:
            signals: none said: SIGTERM.
            deadline: as in `leave`.
        Raises: Closed. UsageError: this is not the main thread, which alone may handle signals. SettingError: one of
            them is no signal that a process can handle, or the deadline is none; nothing has changed then.
        """
        self._check_open()
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("leave_on_signal was called outside the main thread; call it there, once")
        self._deadline(deadline)
        self._signals.handle(signals, lambda name: self.leave(deadline, reason=f"it was sent {name}"))

    @property
    def leaving(self) -> bool:
        """Whether this replica has left, or somebody wishes it."""
        status = self._step.status
        return status.wishes or status.left

    @property
    def left(self) -> bool:
        """Whether this replica has left: no step begins any more."""
        return self._step.status.left

    def raise_if_left(self) -> None:
        """End a training loop that does not look at `left`: `start_quorum` calls this, and so does each inner step of
        LocalSGD and DiLoCo.

        Raises: LeftJob, a SystemExit with exit code 0: this replica has left.
        """
        status = self._step.status
        if status.left:
            self._reports.log(logging.INFO, "the training loop ends here, because this replica has left the job")
            raise LeftJob(f"replica {self.replica_id} has left the job ({status.leave_reason})")

    def _look_often(self) -> Progress:
        """Several times a beat, on a thread of the coordinator's: where this rank is. Once a beat also all the rest."""
        now_s = self._clock.monotonic()
        if now_s < self._next_look_s:
            return self._where.look()
        self._next_look_s = now_s + LOOK_EVERY_BEATS * self._config.timeouts.beat_interval_ms / 1_000
        return self._look()

    def _look(self) -> Progress:
        """Once a beat, on a thread of the coordinator's: where this rank is, and whether it waits in vain."""
        if not self._closing.is_set():
            self._waits.look(self._reducer.num_started)
            self._step.tell(on.Looked(self._waits.is_left_out))
        self._reports.look()
        return self._where.look()

    # --- the end -------------------------------------------------------------------------------------------------

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
        if self._closing.is_set() or os.getpid() != self._pid:
            return  # what a forked child has a copy of is its parent's
        try:
            # An error is set in an `except`, a `finally` and a `with` that it passes. And a script that ends without
            # `shutdown` may have been told to exit; its end is a loss to the others.
            clean = finished and not self._exits and sys.exc_info()[0] is None
            for order in self._step.tell(on.EndingAsked(clean, round(self._config.heal_timeout / MILLISECOND))):
                if isinstance(order, do.ServeOn):
                    self._farewell.serve_on(order)
        finally:
            self._reports.write_held()  # what fails from now on fails by this end
            self._closing.set()
            self._end_parts(wait)
            at_exit.forget(self)

    def end_at_exit(self) -> None:
        """Shut down because the interpreter exits; called by `at_exit` alone."""
        self._exits = True
        self.shutdown()

    def _end_parts(self, wait: bool) -> None:
        self._farewell.close()
        with contextlib.ExitStack() as rest:  # whatever one of them raises, the others end; the last one comes first
            # Not before: a launcher that sends a signal twice would end this process in the midst of it.
            rest.callback(self._signals.give_back)
            rest.callback(self._negotiation.close, wait=wait)
            rest.callback(self._transport.shutdown, wait)
            rest.callback(self._early.drop)
            rest.callback(self._coordinator.close)
            rest.callback(self._pg.shutdown)
            for step in self._deferred:
                rest.callback(step.started.let_go)
            rest.callback(self._reducer.release)
            rest.callback(self._futures.close)
            rest.callback(self._breaker.close, wait=wait)
            rest.callback(self._exchange.close)

    def __enter__(self) -> Manager:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @staticmethod
    def _limit(said: timedelta | None, otherwise: timedelta, name: str = "timeout") -> timedelta:
        if said is None:
            return otherwise
        if not isinstance(said, timedelta) or said <= timedelta():
            raise SettingError(f"{name} is {said!r}; give a timedelta above zero")
        if said > LONGEST_TIMEOUT:
            raise SettingError(f"{name} is {said!r}; give a timedelta of at most a week")
        return said

    def _deadline(self, said: timedelta | None) -> timedelta:
        return self._limit(said, self._config.heal_timeout, "deadline")

    def _check_open(self) -> None:
        if self._closing.is_set():
            if self._exits and threading.current_thread().daemon:
                sys.exit()  # the interpreter is about to end this thread anyway, without a traceback
            raise Closed(f"the Manager of replica {self.replica_id} was shut down; make a new one")
        if os.getpid() != self._pid:  # none of its threads is here
            raise UsageError(
                f"the Manager of replica {self.replica_id} belongs to process {self._pid}, of which this one was "
                "forked; use it there, or make one here"
            )


def _check_group(pg: object) -> None:
    """Raises: SettingError: it is no process group that a Manager can use."""
    needed = ("configure", "allreduce", "abort", "errored", "set_timeout", "shutdown")
    if isinstance(pg, type) or not all(callable(getattr(pg, name, None)) for name in needed):
        what = f"the class {pg.__name__}" if isinstance(pg, type) else f"a {type(pg).__name__}"
        raise SettingError(f"pg is {what}; give a process group that can be configured: ProcessGroupGloo()")


def _settings(config: ResolvedConfig, replica_id: str) -> StepSettings:
    return StepSettings(
        replica_id=replica_id,
        rank=config.rank,
        world_size=config.world_size,
        job=config.job,
        min_replica_size=config.min_replica_size,
        use_async_quorum=config.use_async_quorum,
        fixed_with_spares=config.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES,
        init_sync=config.init_sync,
        max_retries=config.max_retries,
        check_every=config.check_state_every,
        heals_divergence=config.on_divergence == "heal",
        is_island=config.rank0_synchronization_only,
        stands_by=config.stands_by,
    )


def _own_transport(config: ResolvedConfig) -> CheckpointTransport[Any]:
    return HTTPTransport(
        config.timeout,
        advertise_addr=config.hostname,
        token=config.token,
        tls=config.tls,
        import_later=True,
        insecure=config.insecure,
    )
