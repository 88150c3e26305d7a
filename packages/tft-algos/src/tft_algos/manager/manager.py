"""The Manager: what a training loop talks to, a thin shell around the step core.

A step reads like this. `start_quorum` asks who trains together, in the background of the forward pass. `allreduce`
averages over the participants and reports failures instead of raising them. `should_commit` waits until all of that
has ended, gives or takes live state where a member heals, and says whether the optimizer may step.

The user's state is touched by the training thread alone, inside `start_quorum` and `should_commit`.

Law of this file: performing what `core` decides, one line a decision: threads, process group, transport, logs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from tft_algos.errors import (
    Closed,
    ExceptionWithTraceback,
    HealingFailed,
    LeftJob,
    SettingError,
    StateDiverged,
    StateUnavailable,
    SyncAbandoned,
    TooManyFailures,
    Unsupported,
    UsageError,
)
from tft_algos.manager.attempt import Attempt, StepName
from tft_algos.manager.breaking import Breaker
from tft_algos.manager.clock import SystemClock
from tft_algos.manager.config import (
    ManagerConfig,
    ResolvedConfig,
    WorldSizeMode,
    check_part,
    config_of,
    from_environment,
)
from tft_algos.manager.coordinator import GroupCoordinator
from tft_algos.manager.core import Arrival, CoreSettings, Healing, Phase, StepCore, Vote
from tft_algos.manager.deferred import DeferredStep
from tft_algos.manager.divergence import StateDigester, combine, describe, differences
from tft_algos.manager.early import EarlyState
from tft_algos.manager.fingerprint import USER, OwnFingerprint
from tft_algos.manager.group_store import own_host
from tft_algos.manager.healing import Fetch, state_key
from tft_algos.manager.island import Bystander, check_transport, global_ranks, island_digests, spread, whole
from tft_algos.manager.leaving import Leaving, Wish, signal_name
from tft_algos.manager.parts import Clock, Coordinator, Group, ServerRestarted
from tft_algos.manager.records import Records
from tft_algos.manager.reducer import Reducer
from tft_algos.manager.reduction import check_weight
from tft_algos.manager.shards import cut_whole, has_shards, place_shards
from tft_algos.manager.whereabouts import Whereabouts
from tft_ckpt import CheckpointTransport, HTTPTransport
from tft_coord.core.progress import Progress
from tft_coord.core.types import (
    KillOrder,
    LeaveRequest,
    LossNotice,
    NewcomerAsks,
    Plan,
    Purpose,
    QuorumKey,
    RankRequest,
    Refusal,
    Released,
    Verdict,
)
from tft_coord.errors import CoordinationError, DeadlinePassed, GroupLost, Refused
from tft_coord.news import News
from tft_coord.timeouts import LONGEST_MS

T = TypeVar("T")
LoadState = Callable[[Any], object]
TakeState = Callable[[], Any]

logger = logging.getLogger("tft_algos.manager")

LEAVE_TAKEN_WITHIN = timedelta(seconds=5)
LONGEST_TIMEOUT = timedelta(milliseconds=LONGEST_MS)
LAST_WORDS_S = 1.0


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
        config: all other settings; single ones may be given by keyword instead, see `ManagerConfig`.
        coordinator: speaks for this replica group, or makes what does from the resolved config; None: GroupCoordinator.
        clock: tells the time, waits and wakes; None: the system's.
    Attributes:
        quorum_logger, commits_logger, errors_logger: of the records for machines, see `tft_algos.manager.records`.
    Raises:
        SettingError: a setting or an environment variable is wrong, missing or unknown.
        tft_coord.errors.Unreachable, tft_coord.errors.DeadlinePassed: the group's store, its manager server or the
            lighthouse did not answer within connect_timeout.
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
        **settings: Any,
    ) -> None:
        if min_replica_size is not None:
            settings["min_replica_size"] = min_replica_size
        if isinstance(pg, type) or not all(
            callable(getattr(pg, name, None)) for name in ("configure", "allreduce", "abort", "errored", "set_timeout")
        ):
            what = f"the class {pg.__name__}" if isinstance(pg, type) else f"a {type(pg).__name__}"
            raise SettingError(f"pg is {what}; give a process group that can be configured: ProcessGroupGloo()")
        if (load_state_dict is None) != (state_dict is None):
            raise SettingError("load_state_dict and state_dict belong together; give both or neither")
        if not callable(coordinator):
            check_part("coordinator", coordinator, "quorum", "vote")
        check_part("clock", clock, "monotonic", "wait", "after")
        self._config: ResolvedConfig = from_environment(config_of(config, settings), os.environ, own_host=own_host)
        check_transport(self._config)
        pg = Bystander(pg) if self._config.stands_by else pg
        self._pg = pg
        self._fingerprint = OwnFingerprint(self._config)
        self._core = StepCore(
            CoreSettings(
                job=self._config.job,
                min_replica_size=self._config.min_replica_size,
                use_async_quorum=self._config.use_async_quorum,
                fixed_with_spares=self._config.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES,
                init_sync=self._config.init_sync,
                max_retries=self._config.max_retries,
            )
        )
        self._lock = threading.Lock()  # guards the core's errors and notices, of which any thread may tell
        self._clock: Clock = clock or SystemClock()
        self._breaker = Breaker(pg, self._clock)
        self._user_state: dict[str, tuple[LoadState, TakeState]] = {}
        self._not_compared: set[str] = set()
        self._healed_in: int | None = None  # the last attempt in which the user's state came from a source
        self._digester = StateDigester()
        self._reading_allowed = True
        self._exchanged = False  # state was given or taken in this step
        self._strategy: str | None = None  # whose syncs the steps are
        self._exchanges = False  # by a strategy, which calls exchange_state
        self._reducer = Reducer(pg, self._core, self._clock, self._report, stands_by=self._config.stands_by)
        self._where = Whereabouts(
            self._core,
            slowest_step_ms=self._config.timeouts.slowest_step_ms,
            num_reductions=lambda: self._reducer.num_started,
            reduces=lambda: self._reducer.reduces or any(step.started.runs for step in tuple(self._deferred)),
            monotonic=self._clock.monotonic,
        )
        self._deferred: list[DeferredStep] = []  # that have not ended
        self._quorum: Future[None] | None = None
        self._fetch: Fetch | None = None
        self._healed_bytes = 0
        self._said_too_few: int | None = None  # participants, when that was logged the last time
        self._alarms: dict[object, Callable[[], object]] = {}  # of the wrapped futures that are not done
        self._leaving = Leaving()
        self._giver_up: threading.Thread | None = None  # leaves where no quorum comes before the deadline to leave
        self._handlers: dict[int, tuple[Any, Any]] = {}  # of signals: ours, and the one before
        self._closing = threading.Event()
        self._synchronize: Callable[[], None] | None = (
            torch.accelerator.synchronize if torch.accelerator.is_available() else None
        )
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        if self._config.timeout_was_said:
            pg.set_timeout(self._config.timeout)
        self._transport: CheckpointTransport[Any] = self._config.checkpoint_transport or HTTPTransport(
            self._config.timeout,
            advertise_addr=self._config.hostname,
            token=self._config.token,
            tls=self._config.tls,
            import_later=True,
        )
        self._early = EarlyState(
            take=self._take_whole, transport=self._transport, timeout=self._config.heal_timeout, log=self._log
        )
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tft-quorum")
        try:
            made = coordinator or GroupCoordinator
            self._coordinator: Coordinator = made(self._config) if callable(made) else made
        except BaseException:
            self._transport.shutdown(wait=False)
            self._executor.shutdown(wait=False)
            raise
        self._records = Records(
            job_id=self._config.job, replica_id=self._coordinator.replica_id, rank=self._config.rank
        )
        self.quorum_logger = self._records.quorums
        self.commits_logger = self._records.commits
        self.errors_logger = self._records.errors
        self._coordinator.listen(self._told)
        self._coordinator.follow(self._look)

    # --- the user's state ----------------------------------------------------------------------------------------

    def register_state_dict_fn(
        self, key: str, load_state_dict: LoadState, state_dict: TakeState, *, compared: bool = True
    ) -> None:
        """Add a piece of user state that a healing member takes from its source.

        It may come as late as after the first step. A replica that has healed in that step has not got this piece then,
        so it heals once more.

        Args:
            key: its name, the same on every replica.
            load_state_dict: applies it in place; called on the training thread, as the Manager's own argument.
            state_dict: gives it; called on the training thread, as the Manager's own argument.
            compared: it is the same on every replica after every commit, so `check_state_every` may compare it. False
                for what differs rightly, such as a replica's place in its own data.
        Raises: SettingError: there is a piece of that name already, the name is no text, or these are no functions.
        """
        if not isinstance(key, str) or not key:
            raise SettingError(f"state is registered under {key!r}; give a name, the same on every replica")
        for name, function in (("load_state_dict", load_state_dict), ("state_dict", state_dict)):
            if not callable(function):
                raise SettingError(f"{name} of {key!r} is a {type(function).__name__}; give a function")
        if key in self._user_state:
            raise SettingError(f"state is registered under {key!r} already; give another key")
        self._user_state[key] = (load_state_dict, state_dict)
        if not compared:
            self._not_compared.add(key)
        if self._healed_in == self.attempt:
            self._core.optimizer_raised()
            self._log(logging.INFO, "state was registered under %r after the healing, so this replica heals again", key)

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

    def describe_parameters(self, model: torch.nn.Module) -> None:
        """Add names, dtypes and (global) shapes of a model's parameters to the fingerprint.

        The wrappers of models do it themselves; a strategy of your own calls it once for each model, in the same order
        on every replica, before the first step.
        """
        self._fingerprint.add_model(model)

    def set_state_dict_fns(self, load_state_dict: LoadState, state_dict: TakeState) -> None:
        """Deprecated: use register_state_dict_fn, which takes a key."""
        warnings.warn("set_state_dict_fns is deprecated; use register_state_dict_fn", DeprecationWarning, stacklevel=2)
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """Say that the user's state is half written, as between two optimizers' steps.

        State is read on the training thread alone, inside start_quorum and should_commit, so this guards against one
        thing: calling them in that condition, which then raises StateUnavailable when a member wants the state.
        """
        self._reading_allowed = False

    def allow_state_dict_read(self) -> None:
        """Say that the user's state is whole again."""
        self._reading_allowed = True

    def state_dict(self) -> dict[str, Any]:
        """This Manager's own state, for a durable checkpoint: step, batches_committed, lineage."""
        return dict(self._core.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a Manager's state from a durable checkpoint, together with the user's own.

        Raises: StateUnavailable: it is no state of a Manager; nothing has changed then.
        """
        self._settle()
        self._core.state_loaded(state_dict)

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
        Raises: Closed. LeftJob: this replica has left. SettingError: timeout is no timedelta above zero and of at most
            a week; in these cases nothing has begun. Synchronous: what the quorum raised; the Manager stays usable.
            Asynchronous: nothing else, it is recorded, and should_commit raises it if this process can't go on.
        """
        self._check_open()
        if self._leaving.left:
            raise LeftJob(
                f"replica {self.replica_id} has left the job ({self._leaving.reason}); end the loop by "
                "`while not manager.left`"
            )
        limit = self._limit(timeout, self._config.quorum_timeout)
        if self._core.num_deferred and self._core.phase is not Phase.IDLE:
            raise UsageError(
                "start_quorum was called in a step that is open, beside others that are in flight; call defer() first"
            )
        self._settle()
        pause_ms = self._core.pause_ms
        if pause_ms:
            self._clock.wait(self._closing, pause_ms / 1_000)
            self._check_open()
        self._reducer.step_begins()
        self._check_state()
        request = self._core.quorum_started(
            checkpoint_metadata=self._transport.metadata(),
            group_usable=self._pg.errored() is None,
            allow_heal=allow_heal,
            shrink_only=shrink_only,
            use_async_quorum=use_async_quorum,
        )
        self._exchanged = False
        unsaid = self._fingerprint.unsaid()
        if unsaid:
            request = replace(request, fingerprint=unsaid)
        takes_early = self._takes_early()
        self._where.step_begins()
        self._quorum = self._executor.submit(self._negotiate, request, limit)
        if takes_early:
            self._early.take(self._core.boundary_state())
        if self.attempt == 2 or self._healed_in == self.attempt - 1:
            self._transport.prepare_to_send()  # now that nobody waits for this replica's first step any more
        if not self._core.is_asynchronous:
            self.wait_quorum()
            self._exchange()
            self._raise_fatal()  # who was told meanwhile that its group is lost has nobody to train with

    def _takes_early(self) -> bool:
        """Whether the state is taken at this step boundary, for a newcomer that asks.

        The ranks of a larger group can't know alike that somebody asks. A synchronous quorum serves here anyway, and so
        does a strategy that exchanges state as soon as the plan is here.
        """
        core, config = self._core, self._config
        if not core.is_asynchronous or self._exchanges or config.world_size > 1:
            return False
        readable = self._reading_allowed and not core.torn
        lineage = core.lineage if readable else None
        return self._early.step_begins(core.name.attempt, core.step, lineage, len(self._user_state))

    def wait_quorum(self) -> None:
        """Wait until the plan is here and the process group is configured.

        Raises: UsageError: no quorum was started; else what the quorum raised.
        """
        if self._quorum is None:
            raise UsageError("wait_quorum was called before start_quorum; call start_quorum first")
        self._quorum.result()

    def quorum_is_known(self) -> bool:
        """Whether `wait_quorum` would return, or raise, at once: the plan is here and the process group configured, or
        there is no quorum for this step. Never waits.

        Raises: UsageError: no quorum was started.
        """
        if self._quorum is None:
            raise UsageError("quorum_is_known was called before start_quorum; call start_quorum first")
        return self._quorum.done()

    def _negotiate(self, request: RankRequest, timeout: timedelta) -> None:
        """On the quorum thread: from the request to a configured group."""
        begun = self._clock.monotonic()
        excused = True
        try:
            arrival = self._ask(request, timeout)
            excused = arrival.configure or arrival.heal or self._healed_in == self.attempt - 1
            self._early.plan_arrived(arrival.plan)
            self._leaving.plan_arrived(arrival.plan)
            if arrival.heal:
                self._start_fetch(arrival.plan)
            for loss in self._core.losses:
                self._quorum_broke(loss)  # the notice came before its quorum
            if arrival.configure:
                self._configure(arrival.plan)
            self._records.quorum(
                self._core.name,
                arrival.plan,
                reconfigured=arrival.configure and self._core.configured == arrival.plan.key,
                duration_s=self._clock.monotonic() - begun,
            )
        except Refused as error:
            if error.code != Refusal.LEFT.value:
                self._no_quorum(error)
                raise
            # Another rank of this group had no quorum to go on in, and has left with all of them.
            self._leaving.told()
            left = LeftJob(str(error))
            self._no_quorum(left)
            raise left from error
        except Exception as error:
            self._no_quorum(error)
            raise
        finally:
            self._where.planned(excused=excused)

    def _no_quorum(self, error: Exception) -> None:
        with self._lock:
            self._core.quorum_failed(error, others_go_on=self._exchanges)
        self._records.error(self._core.name, error, counts=True)
        self._log(logging.WARNING, "no quorum: %s", error)

    def _ask(self, request: RankRequest, timeout: timedelta) -> Arrival:
        """Raises: what the coordinator raises; StaleQuorum: the answer names a quorum that is not held here."""
        deadline = self._clock.monotonic() + timeout.total_seconds()
        while True:
            remaining = timedelta(seconds=max(deadline - self._clock.monotonic(), 0.001))
            try:
                answer = self._coordinator.quorum(request, remaining)
            except ServerRestarted:
                self._core.server_restarted()
                request = replace(request, held=None, needs_configure=False, fingerprint=self._fingerprint.whole())
                continue
            self._fingerprint.was_said(request.fingerprint)
            with self._lock:
                if not isinstance(answer, QuorumKey):
                    return self._core.plan_arrived(answer)
                return self._core.unchanged_arrived(answer)

    def _configure(self, plan: Plan) -> None:
        """Build the process group for a plan. A failure is an error of the step, not of the quorum."""
        config = self._config
        begun = self._clock.monotonic()
        store = f"{plan.store_address}/tft/{config.job}/{plan.key}/{config.rank}"
        try:
            with self._breaker.configuring(plan.key):
                broken = self._core.broken
                if broken is not None:
                    raise broken
                self._pg.configure(
                    store,
                    plan.replica_rank,
                    plan.replica_world_size,
                    replica_id=plan.replica_id,
                    quorum_id=plan.key.quorum_id,
                    group_rank=config.rank,
                    group_world_size=config.world_size,
                    global_ranks=global_ranks(plan.replica_world_size, config),
                )
        except Exception as error:
            with self._lock:
                self._core.configure_failed(error)
            self._records.error(self._core.name, error, counts=True)
            self._log(logging.WARNING, "could not configure quorum %s: %s", plan.key, error)
            return
        self._core.group_configured()
        self._log(
            logging.INFO,
            "reconfigured: quorum %s, rank %d of %d, %d participants, %.0f ms",
            plan.key,
            plan.replica_rank,
            plan.replica_world_size,
            plan.num_participants,
            1_000 * (self._clock.monotonic() - begun),
        )

    def _settle(self) -> None:
        """End what an attempt has left running: its quorum, its fetch, its reductions."""
        if self._quorum is not None:
            with contextlib.suppress(Exception):  # recorded when it happened
                self._quorum.result()
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None
        self._reducer.finish()
        self._reducer.release()
        for step in [step for step in self._deferred if step.is_abandoned and not step.started.runs]:
            step.started.let_go()
            self._deferred.remove(step)

    def _plan(self) -> Plan | None:
        """The plan of this step, waited for; None if there is none. Never raises what the quorum raised."""
        if self._quorum is None:
            raise UsageError("a reduction needs a quorum; call start_quorum first")
        if not self._quorum.done():
            with contextlib.suppress(Exception):
                self._quorum.result()
        return self._core.plan

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
            tensor: dense; every replica gives the same shape and dtype, in the same order of calls.
            should_quantize: refused; there is no quantized reduction here.
            reduce_op: AVG is the sum divided by the number of participants; SUM, MAX, MIN, PRODUCT and the bitwise ones
                as they are.
            weight: of this replica group in an AVG, such as the number of samples or tokens in its batch: the result is
                sum(weight * tensor) / sum(weight). Every replica says one, or none does. None: that of `set_weight`.
            timeout: for this reduction. When it passes, the reduction has failed, and what runs in the process group is
                ended. None: the process group's own.
        Returns: a Work whose wait() is True if the tensor holds the result and False if not. Its future, done at the
            same time, is of `[tensor]` and holds no error.
        Raises: Unsupported: should_quantize. ValueError: AVG of whole numbers. UsageError: no quorum was started, or
            the tensor or the operation is none. SettingError: the weight is no finite number, is below zero, or belongs
            to another operation than AVG; or timeout is no timedelta above zero and of at most a week.
        """
        if should_quantize:
            raise Unsupported(
                "quantized reductions do not exist here, and nothing is sent unquantized in their place; call "
                "allreduce without should_quantize"
            )
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"allreduce was given a {type(tensor).__name__}; give one tensor")
        if not isinstance(reduce_op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            raise UsageError(f"reduce_op is {reduce_op!r}; give one of torch's, such as torch.distributed.ReduceOp.AVG")
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
        if self._strategy is not None and (self._core.phase is not Phase.IDLE or self._core.num_deferred):
            raise UsageError(
                f"allreduce was called while a sync of {self._strategy} is in flight, whose reductions may begin "
                "before or after it on other members; call it where none is in flight, as behind the inner step in "
                "which current_step() has risen, with fragment_sync_delay below a period"
            )
        return self._reducer.reduce(tensor, reduce_op, plan=self._plan(), weight=weight, limit=limit)

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
        return self._reducer.reduce(tensor, dist.ReduceOp.AVG, plan=self._plan(), weight=None, limit=None)

    def set_weight(self, weight: float) -> None:
        """Say how much this replica group weighs in every AVG of the current step that says no weight itself.

        Gradients that each replica averaged over its own batch become those of all batches together if each weighs as
        many samples (or tokens) as it has. A member that heals, and a spare, weigh zero whatever they say. The sum of
        the weights is reduced once a step, beside the first such AVG. The step's end forgets the weight.

        Args:
            weight: not below zero. Every replica says one in the same steps, and every rank of this group the same one.
        Raises: SettingError: it is no finite number or below zero. UsageError: outside a step, or another one than that
            with which a reduction of this step was weighted already.
        """
        self._check_open()
        self._reducer.set_weight(weight)

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """A future that never fails: on an error or a time-out, that is reported and the result is `default`.

        Args:
            fut: any future.
            default: the result in place of an error.
            timeout: None: the Manager's.
        Raises: SettingError: timeout is no timedelta above zero and of at most a week. UsageError: fut is no future.
        """
        if not isinstance(fut, torch.futures.Future):
            raise UsageError(f"wrap_future was given a {type(fut).__name__}; give a torch.futures.Future")
        limit = self._limit(timeout, self._config.timeout)
        wrapped: torch.futures.Future[T] = torch.futures.Future()
        name = self._core.name
        once = threading.Lock()

        def end(error: Exception | None, result: T) -> None:
            if not once.acquire(blocking=False):
                return
            if error is not None:
                self._report(error, name)
            wrapped.set_result(result)

        def expired() -> None:
            self._alarms.pop(wrapped, None)
            end(TimeoutError(f"future did not complete within {limit.total_seconds():g} s"), default)

        def done(finished: torch.futures.Future[T]) -> None:
            no_alarm = self._alarms.pop(wrapped, None)
            if no_alarm is not None:
                no_alarm()
            try:
                result = finished.value()
            except Exception as error:
                end(error, default)
            else:
                end(None, result)

        if not fut.done():
            self._alarms[wrapped] = self._clock.after(limit.total_seconds(), expired)
        fut.add_done_callback(done)
        return wrapped

    # --- errors --------------------------------------------------------------------------------------------------

    def report_error(self, e: Exception) -> None:
        """Say that this step has failed: later reductions do nothing, and should_commit votes no.

        Raises: UsageError: e is no exception.
        """
        if not isinstance(e, BaseException):
            raise UsageError(f"report_error was given a {type(e).__name__}; give the exception: RuntimeError(...)")
        self._report(e, None)

    def errored(self) -> ExceptionWithTraceback | None:
        """The first error of this step, or None."""
        error = self._core.error
        return None if error is None else ExceptionWithTraceback(error)

    def errors(self) -> tuple[Exception, ...]:
        """The errors of this step, in order; at most 16 are kept."""
        return self._core.errors

    def _report(self, error: Exception, name: StepName | None) -> None:
        with self._lock:
            counts = self._core.error_reported(error, name)
            is_first = self._core.num_reports(name) == 1
        self._records.error(name or self._core.name, error, counts=counts)
        if counts:
            # One loss fails hundreds of reductions, each with the same words; the records have them all.
            level = logging.WARNING if is_first else logging.DEBUG
            self._log(level, "this step will not commit: %s", error)
        else:
            self._log(logging.WARNING, "an error of %s came when that was over: %s", name or "a step", error)

    # --- losses of others ----------------------------------------------------------------------------------------

    def _told(self, news: News) -> None:
        """A loss in a quorum or of this group, a newcomer, or what somebody wants of this process; a thread of the
        coordinator calls: nothing waits here."""
        match news:
            case LossNotice() | NewcomerAsks() | GroupLost():
                self._told_of_others(news)
            case LeaveRequest(reason, serve_ms):
                self._log(logging.WARNING, "asked to leave: %s", reason)
                self.leave(timedelta(milliseconds=serve_ms) if serve_ms else None, reason=reason)
            case Released():
                self._leaving.released.set()
            case KillOrder(message):
                self._end_process(message)

    def _end_process(self, message: str) -> None:
        """End with exit code 1, at once, whatever other threads do or hold."""

        def last_words() -> None:
            self._log(logging.CRITICAL, "this process is ended: %s", message)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()

        speaker = threading.Thread(target=last_words, name="tft-last-words", daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)
        os._exit(1)

    def _told_of_others(self, news: LossNotice | NewcomerAsks | GroupLost) -> None:
        if isinstance(news, GroupLost):
            self._leaving.released.set()
            with self._lock:
                self._core.group_lost(news)
            self._records.error(self._core.name, news, counts=True)
            self._log(logging.ERROR, "%s", news)
            self._breaker.break_all()
            return
        if isinstance(news, NewcomerAsks):
            self._early.heard(news.replica_id)
            return
        if not news.lives:
            self._early.lost()
        with self._lock:
            breaks = self._core.loss_noticed(news)
        if breaks:
            self._quorum_broke(news)

    def _quorum_broke(self, notice: LossNotice) -> None:
        self._log(logging.WARNING, "%s; what runs in it is ended", notice)
        self._breaker.break_quorum(notice.key)
        fetch = self._fetch
        if fetch is not None and fetch.plan.key == notice.key and not notice.lives:
            fetch.source_lost(notice.replica_id)

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
            StateUnavailable: a member wants this process's state, which can't be taken.
            SettingError: timeout is no timedelta above zero and of at most a week. Nothing has happened then.
            UsageError: no quorum was started since the last verdict, or a part of the Manager was not set up.
        """
        self._check_open()
        limit = self._vote_limit(timeout)
        core = self._core
        if core.phase is Phase.IDLE or self._quorum is None:
            raise UsageError("should_commit was called without a start_quorum before it; call start_quorum first")
        if core.num_deferred:
            raise UsageError(
                f"should_commit was called while {core.num_deferred} earlier steps are in flight; end those first"
            )
        plan = self._plan()
        self._wait_for(self._reducer.finish)
        self._raise_fatal()
        if core.is_abandoned:
            self._reducer.release()
            return self._conclude(Verdict(yes=False))
        if plan is None:
            return self._conclude(Verdict(yes=False, leaves=self._leaving.wishes(self._clock.monotonic())))
        if self._synchronize is not None:
            self._synchronize()
        self._reducer.release()
        self._where.waits = True  # for state, and for the verdict
        failure = self._pg.errored()
        # On the CPU each reduction has told its own end by now; the abort of a broken quorum leaves the gradients of
        # those that succeeded alone. On a device it may have torn what was only queued.
        if failure is not None and core.error is None and (core.broken is None or self._synchronize is not None):
            self._report(failure, core.name)
        if not self._exchanged:
            self._early.reductions_ended(readable=self._reading_allowed)
            self._exchange()
            self._raise_fatal()  # who was told meanwhile that its group is lost has nobody to vote with
        verdict = self._vote(core.vote(), plan, limit)
        return self._conclude(verdict)

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

    def _vote(self, vote: Vote, plan: Plan, limit: timedelta) -> Verdict:
        """Raises: DeadlinePassed, and what else the coordinator raises: there is no verdict."""
        core = self._core
        if vote.enough_replicas:
            self._said_too_few = None
        elif self._said_too_few != plan.num_participants:
            self._said_too_few = plan.num_participants
            self._log(
                logging.WARNING,
                "%d replicas take part, and min_replica_size is %d, so no step commits until more have joined",
                plan.num_participants,
                plan.min_replica_size,
            )
        if not vote.yes:
            self._log(
                logging.INFO,
                "should_commit=False enough_replicas=%s errored=%s",
                vote.enough_replicas,
                vote.error,
            )
        try:
            return self._coordinator.vote(
                core.step,
                vote.yes,
                limit,
                key=plan.key,
                purpose=Purpose.COMMIT,
                leaving=self._leaving.wishes(self._clock.monotonic()),
            )
        except ServerRestarted:
            core.server_restarted()
            self._log(logging.WARNING, "the manager server ended during the vote, which counts as no")
            return Verdict(yes=False)
        except DeadlinePassed:
            self._raise_fatal()  # why nobody answered, where that was told while we waited
            raise

    def _raise_fatal(self, attempt: Attempt | None = None) -> None:
        fatal = self._core.fatal if attempt is None else self._core.fatal_of(attempt)
        if fatal is not None:
            raise fatal

    def _conclude(self, verdict: Verdict, step: DeferredStep | None = None) -> bool:
        """The step that is open is over, or one that was put aside."""
        core = self._core
        error, name, plan = core.error, core.name, core.plan
        if step is not None:
            error, name, plan = step.failure, step.attempt.name, step.plan
            step.is_over = True
            if step in self._deferred:  # or nobody held it any more
                self._deferred.remove(step)
        self._records.commit(name, verdict.yes, num_participants=plan.num_participants if plan is not None else 0)
        if plan is not None:
            self._early.step_ended(name.attempt, plan)
        with self._lock:
            outcome = core.verdict_arrived(verdict.yes) if step is None else core.verdict_on(step.attempt, verdict.yes)
        if verdict.leaves:
            self._leave_now()
        if outcome.exhausted:
            raise TooManyFailures(
                f"replica {self.replica_id} failed to commit {outcome.failures} times in a row, and max_retries is "
                f"{self._config.max_retries}; the last error was: {error}",
                failures=outcome.failures,
            ) from error
        return outcome.committed

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
        core = self._core
        if core.phase is Phase.IDLE:
            raise UsageError(
                "defer was called outside a step; call it after start_quorum, when its reductions have begun"
            )
        self._exchange_open()
        with self._lock:
            attempt = core.defer()
        step = DeferredStep(
            attempt, self._reducer.put_aside(), end=self._end_deferred, report=lambda e, of: self._report(e, of.name)
        )
        self._deferred.append(step)
        return step

    @property
    def num_deferred(self) -> int:
        """Steps that were put aside and may still commit: in the open one's quorum, when that is known."""
        return self._core.num_deferred

    def give_up_deferred(self) -> None:
        """Fail all that is in flight, the open step included, as when a strategy ends: by all ranks of the group, after
        the same inner step. The next quorum is another one, and fails what the other members have in flight too."""
        with self._lock:
            self._core.give_up(SyncAbandoned(f"replica {self.replica_id} gave up what it had in flight"))

    def inner_step_ended(self) -> None:
        """Say that the trainer goes on: a strategy's inner step has ended. May be called at any time.

        A trainer that says so is not taken to wait for the reductions that run meanwhile, however long they take, nor
        to hang in a step that spans many inner ones.
        """
        self._where.inner_step_ended()

    def _exchange_open(self) -> None:
        """What was put off in the step that is open: wait for its quorum, give or take state."""
        core = self._core
        if core.phase is Phase.IDLE:
            return
        self._exchanges = True
        if self._plan() is not None and not self._exchanged and core.fatal is None and not core.is_abandoned:
            self._exchange()

    def _end_deferred(self, step: DeferredStep, timeout: timedelta | None) -> bool:
        """See `DeferredStep.should_commit`."""
        self._check_open()
        limit = self._vote_limit(timeout)
        core, attempt = self._core, step.attempt
        if step.is_over:
            raise UsageError(f"{attempt.name} has ended; should_commit is called once for each deferred step")
        self._exchange_open()
        self._raise_fatal(attempt)
        if attempt.abandoned is None and not core.is_oldest(attempt):
            raise UsageError(f"{attempt.name} is not the oldest that is in flight; end the older ones first")
        self._wait_for(step.started.finish)
        self._raise_fatal(attempt)
        plan = attempt.plan
        if attempt.abandoned is not None:
            step.started.let_go()
            self._log(logging.INFO, "should_commit=False: %s", attempt.abandoned)
            return self._conclude(Verdict(yes=False), step)
        if plan is None:
            leaves = self._leaving.wishes(self._clock.monotonic())
            return self._conclude(Verdict(yes=False, leaves=leaves), step)
        if self._synchronize is not None:
            # Not the whole device: what was begun later may run for long. It runs on streams of the process group's.
            torch.accelerator.current_stream().synchronize()
        step.started.release()
        failure = self._pg.errored()
        # On the CPU each reduction has told its own end. On a device a later abort may have torn what was only queued.
        if failure is not None and attempt.error is None and self._synchronize is not None:
            self._report(failure, attempt.name)
        before, self._where.waits = self._where.waits, True
        verdict = self._vote(core.vote_on(attempt), plan, limit)
        self._where.waits = before
        return self._conclude(verdict, step)

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
        core = self._core
        if core.phase is Phase.IDLE:
            raise UsageError("exchange_state was called outside a step; call it after start_quorum")
        self._exchanges = True
        if self._plan() is None or self._exchanged or core.is_abandoned:
            return False
        self._raise_fatal()
        self._exchange()
        self._raise_fatal()
        return core.healing is Healing.LOADED

    def _exchange(self) -> None:
        """Once a step, when its plan is here."""
        before, self._where.waits = self._where.waits, True
        self._give_or_take_state()
        self._where.waits = before
        self._exchanged = True

    def _give_or_take_state(self) -> None:
        """On the training thread, at a step boundary: serve those that heal, or heal."""
        plan = self._core.plan
        if plan is None:
            return
        if plan.serve:
            if not self._early.serves(plan):
                self._serve(plan)
        elif self._core.healing is Healing.FETCHING:
            self._heal(plan)

    def _serve(self, plan: Plan) -> None:
        if not self._reading_allowed:
            raise StateUnavailable(
                f"replicas {list(plan.recover_dst_replica_ranks)} heal from replica {self.replica_id}, whose state was "
                "declared half written by disallow_state_dict_read; call allow_state_dict_read first"
            )
        begun = self._clock.monotonic()
        try:
            state = {"user": self._take_for_others(plan), "tft": self._core.snapshot_state()}
        except StateUnavailable as error:
            self._log(logging.ERROR, "can't serve step %d: %s", plan.step, error)
            self._refuse(plan, str(error))
            return
        if self._config.stands_by:
            return
        try:
            self._transport.send_checkpoint(
                list(plan.recover_dst_replica_ranks), plan.step, state, self._config.heal_timeout, key=state_key(plan)
            )
        except Exception as error:
            # This replica's step is sound, whatever its transport did; who waits for the state finds another source.
            self._log(logging.ERROR, "can't serve step %d: %s", plan.step, error)
            return
        self._log(
            logging.INFO,
            "serving step %d to %s, snapshot taken in %.0f ms",
            plan.step,
            [plan.replica_ids[rank] for rank in plan.recover_dst_replica_ranks] or "nobody first",
            1_000 * (self._clock.monotonic() - begun),
        )

    def _refuse(self, plan: Plan, sentence: str) -> None:
        """Tell those that wait for this replica's state that it can't be had from here."""
        if self._config.stands_by:
            return
        try:
            self._transport.refuse_checkpoint(
                plan.step, sentence, key=state_key(plan), dst_ranks=list(plan.recover_dst_replica_ranks)
            )
        except Exception as error:
            # As for a send: the step is sound, and who waits has its own time-out.
            self._log(logging.ERROR, "can't tell those that heal that they heal in vain: %s", error)

    def _take(self, *, compared_only: bool = False) -> dict[str, Any]:
        """The user's state, by key. Raises: StateUnavailable: a function of the user's raised."""
        taken = {}
        for key, (_, take) in self._user_state.items():
            if compared_only and key in self._not_compared:
                continue
            try:
                taken[key] = take()
            except Exception as error:
                raise StateUnavailable(f"the state_dict registered under {key!r} raised {error!r}") from error
        return taken

    def _take_whole(self) -> dict[str, Any]:
        """The same, as others can make use of it; on an island that is a collective of its ranks. Raises: as it."""
        state = self._take()
        return whole(state) if self._config.rank0_synchronization_only else state

    def _take_for_others(self, plan: Plan) -> dict[str, Any]:
        """The same for those that heal; on an island rank 0's result counts. Raises: as it, if any rank can't."""
        if not self._config.rank0_synchronization_only:
            return self._take()
        state: dict[str, Any] = {}
        error: StateUnavailable | None = None
        try:
            state = self._take()
        except StateUnavailable as failure:
            error = failure
        # Who can't take part must not be waited for in a collective.
        if not self._agree(plan, error is None, Purpose.TAKEN):
            self._raise_fatal()
            raise error or StateUnavailable(f"another rank of replica {self.replica_id} could not take its state")
        return whole(state, keep=not self._config.stands_by)  # type: ignore[no-any-return]

    def _start_fetch(self, plan: Plan) -> None:
        if self._config.stands_by:
            return
        fetch = Fetch(
            plan,
            coordinator=self._coordinator,
            transport=self._transport,
            timeout=self._config.heal_timeout,
            received_before=self._healed_bytes,
        )
        self._fetch = fetch
        self._log(logging.INFO, "healing from %s to step %d", plan.sources[0].replica_id, plan.step)
        fetch.start()

    def _heal(self, plan: Plan) -> None:
        """Stage, agree inside the group that all have staged, load; all or none."""
        fetch = self._fetch  # which stays until `_settle`: the loss of its source must reach it, and it may end late
        assert fetch is not None or self._config.stands_by, "a plan that heals has no fetch"
        error: Exception | None = None
        state: Mapping[str, Any] = {}
        in_vain = self._core.is_awaited
        try:
            if in_vain:
                if fetch is not None:
                    fetch.cancel()
                raise HealingFailed(
                    f"replica {plan.replica_id} does not wait for the state of step {plan.step}, because its source "
                    "waits for a process group that could not be configured here; the next quorum tries again",
                    sources=tuple(source.replica_id for source in plan.sources),
                )
            if fetch is not None:
                state = self._check_staged(fetch.result())
        except HealingFailed as failure:
            error = failure
        if fetch is not None:
            self._healed_bytes += fetch.received_bytes
        if not self._agree(plan, error is None, Purpose.STAGED):
            error = error or self._other_rank_failed(plan, "fetch")
        if error is None:
            try:
                state = self._place(plan, self._spread(plan, state))
            except HealingFailed as failure:
                error = failure
        if error is None:
            self._explain_divergence(plan, state)
            error = self._load(state)
        if error is None:
            self._core.healed(state["tft"])
            self._healed_in = self.attempt
            source, by = plan.sources[0].replica_id, "through rank 0"
            if fetch is not None:
                by = f"{fetch.received_bytes} bytes in {fetch.seconds:.2f} s"
            self._log(logging.INFO, "healed from %s to step %d: %s", source, plan.step, by)
            return
        with self._lock:
            self._core.heal_failed(error, by_source=not in_vain)
        self._records.error(self._core.name, error, counts=True)
        self._log(logging.WARNING, "%s", error)
        if not self._core.is_asynchronous:
            # The others count on this group's gradients: end the reduction for them, rather than let them wait.
            self._pg.abort()

    def _check_staged(self, state: Any) -> Mapping[str, Any]:
        """Raises: HealingFailed: the fetched state does not fit what is registered here. Nothing was loaded."""
        if not isinstance(state, Mapping) or not all(isinstance(state.get(key), Mapping) for key in ("user", "tft")):
            raise HealingFailed("the fetched state is none of a Manager's; run the same release on every replica")
        self._core.check_staged(state["tft"])
        theirs, ours = set(state["user"]), set(self._user_state)
        if theirs != ours:
            raise HealingFailed(
                f"the source has state registered under {sorted(theirs)} and this replica under {sorted(ours)}; "
                "register the same keys on every replica"
            )
        return state

    def _agree(self, plan: Plan, yes: bool, purpose: Purpose) -> bool:
        """Whether all ranks of this group say yes."""
        if self._config.world_size == 1:
            return yes
        try:
            return self._coordinator.vote(plan.step, yes, self._config.heal_timeout, key=plan.key, purpose=purpose).yes
        except DeadlinePassed:
            self._raise_fatal()  # why nobody answered, where that was told while we waited
            raise

    def _other_rank_failed(self, plan: Plan, what: str) -> HealingFailed:
        return HealingFailed(
            f"another rank of replica {self.replica_id} could not {what} step {plan.step}; a group heals whole, so the "
            "next quorum tries again",
            sources=tuple(source.replica_id for source in plan.sources),
        )

    def _spread(self, plan: Plan, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A staged state; on an island that which rank 0 has staged, on every rank.

        Raises: HealingFailed: on this rank or another one, it did not come, or does not fit what is registered there.
        """
        if not self._config.rank0_synchronization_only or self._config.world_size == 1:
            return state
        error: HealingFailed | None = None
        try:
            state = spread(
                state,
                plan,
                config=self._config,
                coordinator=self._coordinator,
                transport=self._transport,
                received_before=self._healed_bytes,
                cancelled=lambda: self._closing.is_set() or self._core.fatal is not None,
            )
            self._check_staged(state)
        except HealingFailed as failure:
            error = failure
        if not self._agree(plan, error is None, Purpose.SPREAD):
            self._raise_fatal()
            raise error or self._other_rank_failed(plan, "take over")
        return state

    def _place(self, plan: Plan, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A staged state with DTensors on this process's own meshes; nothing is loaded.

        The meshes are those of the user's own state. The functions that give it may run collectives over the ranks of
        this group, so all ranks call them, at the same time, or none does; and all have found their meshes before one
        of them loads.

        Raises: HealingFailed: on this rank or another one, the state does not fit.
        """
        whole_only = self._config.rank0_synchronization_only  # and then nothing in it says what is sharded here
        if not whole_only and self._agree(plan, not has_shards(state["user"]), Purpose.WITHOUT_OWN):
            return state
        self._raise_fatal()  # a rank that was lost makes it a no as well, and there is nobody to run a collective with
        error: HealingFailed | None = None
        user: Any = None
        try:
            user = (cut_whole if whole_only else place_shards)(state["user"], self._take())
        except HealingFailed as failure:
            error = failure
        except StateUnavailable as failure:
            error = HealingFailed(f"the meshes for the fetched state can't be found: {failure}")
            error.__cause__ = failure
        if not self._agree(plan, error is None, Purpose.MATCHED):
            raise error or self._other_rank_failed(plan, "find the meshes for")
        return {**state, "user": user}

    def _load(self, state: Mapping[str, Any]) -> Exception | None:
        """Apply a staged state, on the training thread."""
        self._core.load_began()
        for key, (load, _) in self._user_state.items():
            try:
                load(state["user"][key])
            except Exception as error:
                failure = HealingFailed(
                    f"load_state_dict of the state registered under {key!r} raised {error!r}; this replica's state is "
                    "half written until it heals"
                )
                failure.__cause__ = error
                return failure
        return None

    # --- whether all hold the same state -------------------------------------------------------------------------

    def _check_state(self) -> None:
        """Where it is due, make the user's state a part of the lineage that this group reports."""
        core = self._core
        if not core.check_is_due(self._config.check_state_every):
            return
        if not self._reading_allowed:
            raise StateUnavailable(
                f"the state of replica {self.replica_id} is to be compared at step {core.step}, and was declared half "
                "written by disallow_state_dict_read; call allow_state_dict_read first"
            )
        own = ""  # what a rank gives that has no state to show: a group is compared whole
        state: dict[str, Any] | None = None
        name = f"check {core.step}, attempt {core.name.attempt + 1}"
        digests: tuple[str, ...] = ("",)
        try:
            state = self._take(compared_only=True)  # on every rank, for it may be a collective of the group
            if not core.torn and not self._config.rank0_synchronization_only:
                own = self._digester.digest(state)
        except StateUnavailable as error:
            self._log(logging.ERROR, "can't compare the state, so this replica heals: %s", error)
        try:
            if self._config.rank0_synchronization_only:
                digests = island_digests(
                    state,
                    name,
                    digest=self._digester.digest,
                    is_torn=core.torn,
                    config=self._config,
                    coordinator=self._coordinator,
                )
            else:
                digests = (
                    self._coordinator.gather(name, own, self._config.timeout) if self._config.world_size > 1 else (own,)
                )
        except (DeadlinePassed, StateUnavailable) as error:
            self._log(logging.ERROR, "can't compare the state, so this replica heals: %s", error)
        core.state_checked(combine(digests) if all(digests) else None)

    def _explain_divergence(self, plan: Plan, state: Mapping[str, Any]) -> None:
        """Where this replica heals because its state is not that of the others: say what differs.

        Raises: StateDiverged: healing is not wanted, or the last one did not cure it.
        """
        core = self._core
        if not core.diverged_from(state["tft"]):
            return
        found: list[tuple[str, str]] = []
        if plan.step == core.step:
            theirs = {key: value for key, value in state["user"].items() if key not in self._not_compared}
            try:
                found = differences(self._take(compared_only=True), theirs)
                told = describe(found)
            except StateUnavailable as error:
                told = str(error)
        else:
            told = f"the others are at step {plan.step} by now, so what differed can't be told any more"
        source = plan.sources[0].replica_id
        sentence = (
            f"the state of replica {self.replica_id}, rank {self._config.rank}, at step {core.step} is not that of "
            f"{source} ({told})"
        )
        if self._config.on_divergence == "heal" and core.divergences < 2:
            self._log(logging.ERROR, "%s; it heals", sentence)
            return
        advice = (
            "healing did not cure it the last time; look at what its load_state_dict leaves out"
            if core.divergences > 1
            else "on_divergence is stop; start this replica again to have it heal"
        )
        raise StateDiverged(
            f"{sentence}; {advice}",
            replica_id=self.replica_id,
            source=source,
            step=core.step,
            paths=tuple(path for path, _ in found),
        )

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
        self._core.optimizer_raised()
        self._records.error(self._core.name, error, counts=False)
        self._log(logging.WARNING, "the commit could not be applied here, so this replica heals: %r", error)

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
        return self._core.name.attempt

    @property
    def verdict(self) -> bool | None:
        """Whether that step was committed; None while should_commit has not said it."""
        return self._core.verdict

    @property
    def is_untouched(self) -> bool:
        """Whether that step is as it was begun: nothing was reduced in it, nothing has failed, nobody has voted."""
        core = self._core
        is_open = core.phase in (Phase.ASKED, Phase.PLANNED)
        return is_open and core.error is None and core.broken is None and not self._reducer.has_reduced

    @property
    def torn(self) -> bool:
        """Whether the state here is half written, because an optimizer or a load function raised, so that it heals."""
        return self._core.torn

    def current_step(self) -> int:
        """Committed steps, 0 at the start."""
        return self._core.step

    def batches_committed(self) -> int:
        """Sum over the committed steps of their participants."""
        return self._core.batches_committed

    @property
    def plan(self) -> Plan | None:
        """Of this step; waits for the quorum; None without one, and before the first."""
        return None if self._quorum is None else self._plan()

    def num_participants(self) -> int:
        """Members whose gradients count in this step; waits for the quorum; 0 before the first."""
        if self._quorum is None:
            return 0
        self._plan()
        return self._core.num_participants

    def participating_rank(self) -> int | None:
        """This group's place among the participants; waits for the quorum; None if it gives zeros."""
        if self._quorum is None:
            return None
        self._plan()
        return self._core.participating_rank if self._core.is_participating else None

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
        self._leaving.wish(Wish(reason or "it was told to", self._clock.monotonic() + limit.total_seconds()))

    def leave_on_signal(self, *signals: int, deadline: timedelta | None = None) -> None:
        """Leave when this process is sent one of these signals. `shutdown` gives them back their handlers.

        May be called again, for other signals or with another deadline.

        Args:
            signals: none said: SIGTERM.
            deadline: as in `leave`.
        Raises: UsageError: this is not the main thread, which alone may handle signals. SettingError: one of them is no
            signal that a process can handle, or the deadline is none; nothing has changed then.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("leave_on_signal was called outside the main thread; call it there, once")
        self._deadline(deadline)
        for number in signals:
            if not isinstance(number, int) or number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                raise SettingError(f"{number!r} is no signal that can be handled; give some, such as signal.SIGTERM")

        def handle(number: int, _frame: object) -> None:
            self.leave(deadline, reason=f"it was sent {signal_name(number)}")

        for number in signals or (signal.SIGTERM,):
            before = signal.signal(number, handle)
            ours, first = self._handlers.get(number, (None, None))
            self._handlers[number] = handle, first if before is ours else before

    @property
    def leaving(self) -> bool:
        """Whether this replica has left, or somebody wishes it."""
        return self._leaving.wished or self._leaving.left

    @property
    def left(self) -> bool:
        """Whether this replica has left: no step begins any more."""
        return self._leaving.left

    def _look(self) -> Progress:
        """Once a beat, on a thread of the coordinator's: where this rank is, and whether it waits in vain."""
        overdue = self._where.quorum_pends and self._leaving.is_overdue(self._clock.monotonic())
        if overdue and self._giver_up is None and not self._closing.is_set():
            self._giver_up = threading.Thread(target=self._tell_that_it_leaves, name="tft-leave", daemon=True)
            self._giver_up.start()  # the manager server refuses the question that waits, and the step ends without one
        return self._where.look()

    def _leave_now(self) -> None:
        leaving = self._leaving
        leaving.left = True
        self._log(logging.INFO, "leaves: %s", leaving.reason)
        with self._lock:
            self._core.abandon_all(LeftJob(f"replica {self.replica_id} has left the job while this step was in flight"))
        self._tell_that_it_leaves()

    def _tell_that_it_leaves(self) -> None:
        leaving = self._leaving
        serve = timedelta(seconds=leaving.remaining_s(self._clock.monotonic()))
        try:
            self._coordinator.leave(leaving.reason, serve, min(LEAVE_TAKEN_WITHIN, self._config.timeout))
        except (CoordinationError, ServerRestarted) as error:
            # The others find out that this process ends, and lose the step that runs then.
            self._log(logging.WARNING, "nobody was told that this replica leaves: %s", error)
            leaving.released.set()

    def _serve_to_the_end(self) -> None:
        """Those that heal from here have their state before this process ends; and so have the other ranks'."""
        remaining_s = self._leaving.remaining_s(self._clock.monotonic())
        if remaining_s > 0 and not self._clock.wait(self._leaving.released, remaining_s):
            self._log(logging.WARNING, "ends though others may still heal from it: its deadline to leave has passed")
        if self._config.world_size > 1 and self._core.fatal is None:
            # The manager server, which says where each rank's state is, ends with rank 0.
            with contextlib.suppress(DeadlinePassed, CoordinationError):
                self._coordinator.gather("left", "", self._config.timeout)

    def _give_signals_back(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only there they can be
        while self._handlers:
            number, (ours, before) = self._handlers.popitem()
            if signal.getsignal(number) is ours:
                signal.signal(number, before if before is not None else signal.SIG_DFL)

    # --- the end -------------------------------------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """End everything that this Manager started, and its process group; again does nothing.

        After `leave` it first serves those that heal from this replica, until they are done or the deadline passes.

        Args:
            wait: until all of it has ended.
        """
        if self._closing.is_set():
            return
        if self._leaving.wished and not self._leaving.left and self._core.phase is Phase.IDLE:
            self._leave_now()
        if self._leaving.left:
            self._serve_to_the_end()
        self._closing.set()
        if self._giver_up is not None:
            self._giver_up.join()
        if self._fetch is not None:
            self._transport.abort()
            self._fetch.cancel()
        self._breaker.close(wait=wait)
        for no_alarm in list(self._alarms.values()):
            no_alarm()
        self._reducer.release()
        for step in self._deferred:
            step.started.let_go()
        self._pg.shutdown()
        self._coordinator.close()
        self._early.drop()
        self._transport.shutdown(wait)
        self._executor.shutdown(wait, cancel_futures=True)
        self._give_signals_back()  # not before: a launcher that says it twice would end this process in the midst of it

    def __enter__(self) -> Manager:
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
            raise Closed(f"the Manager of replica {self.replica_id} was shut down; make a new one")

    def _log(self, level: int, message: str, *args: object) -> None:
        if logger.isEnabledFor(level):
            prefix = f"[{self.replica_id}/{self._config.rank} - step {self._core.step}] "
            logger.log(level, prefix.replace("%", "%%") + message, *args)
