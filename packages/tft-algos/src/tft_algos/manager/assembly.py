"""The parts of one Manager, and the order in which they are made and end.

Law of this file: making, connecting and ending. No call of a step passes through here, and nothing is decided.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from tft_algos.errors import ConfigError
from tft_algos.manager.clock import SystemClock
from tft_algos.manager.config import (
    COORDINATOR_METHODS,
    ManagerConfig,
    ResolvedConfig,
    WorldSizeMode,
    check_made_coordinator,
    check_part,
    from_environment,
)
from tft_algos.manager.context import ManagerContext
from tft_algos.manager.interfaces import Clock, Coordinator, ProcessGroupLike
from tft_algos.manager.lifecycle.graceful_shutdown import GracefulShutdown
from tft_algos.manager.quorum.aborter import QuorumAborter
from tft_algos.manager.quorum.coordinator import GroupCoordinator
from tft_algos.manager.quorum.fingerprint import OwnFingerprint
from tft_algos.manager.quorum.group_store import own_host
from tft_algos.manager.quorum.rank0_groups import NullGroup, check_transport
from tft_algos.manager.quorum.task import QuorumTask
from tft_algos.manager.quorum.unreached import UnreachedPeers
from tft_algos.manager.recovery.audit import StateAudit
from tft_algos.manager.recovery.exchange import StateExchange
from tft_algos.manager.recovery.speculative import SpeculativeSnapshot
from tft_algos.manager.recovery.state_check import StateCheck
from tft_algos.manager.recovery.user_state import UserState
from tft_algos.manager.reduce.future_timeouts import FutureTimeouts
from tft_algos.manager.reduce.reducer import Reducer
from tft_algos.manager.step.control_words import ControlWords, lease_of
from tft_algos.manager.step.error_reporter import ErrorReporter
from tft_algos.manager.step.mailbox import StepMailbox
from tft_algos.manager.step.orders import Orders
from tft_algos.manager.step.own_time import OwnTime
from tft_algos.manager.step.progress import StepProgress
from tft_algos.manager.step.straggling import Straggling
from tft_algos.manager.step.time_account import TimeAccount, Wait
from tft_algos.manager.step.waits import WaitWatch
from tft_algos.manager.variables import warn_of_misspelt
from tft_ckpt import CheckpointTransport, HTTPTransport
from tft_coord.core.step import StepSettings
from tft_coord.core.step import events as on
from tft_pg.recorder import name_job


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one Manager.

    Args:
        shared: what most of the other parts need.
        group: the process group across replicas.
        aborter: aborts running operations of a broken quorum.
        fingerprint: this replica's fingerprint.
        unreached: peers that this rank could not reach.
        step_progress: the phase of this rank in its step, and the duration of its own part of a step.
        futures: the user's futures, with time-outs.
        reducer: starts reductions.
        audit: checks that everything that is trained is registered.
        speculative: snapshots of the state before the forward pass.
        exchange: gives and takes live state.
        quorum_task: gets a quorum and builds its process group.
        graceful_shutdown: the calls of a replica that leaves.
        straggling: the lighthouse's messages about this replica's pace.
        waits: what this rank waits for.
        control_words: the word of a round.
    """

    shared: ManagerContext
    group: ProcessGroupLike
    aborter: QuorumAborter
    fingerprint: OwnFingerprint
    unreached: UnreachedPeers
    step_progress: StepProgress
    futures: FutureTimeouts
    reducer: Reducer
    audit: StateAudit
    speculative: SpeculativeSnapshot
    exchange: StateExchange
    quorum_task: QuorumTask
    graceful_shutdown: GracefulShutdown
    straggling: Straggling
    waits: WaitWatch
    control_words: ControlWords

    @property
    def quantizing_group(self) -> ProcessGroupLike | None:
        """Return the group that quantized reductions use. None: rank 0 reduces for this rank."""
        return None if self.shared.config.is_passive_rank else self.group

    def end(self, *, last: Callable[[], object], wait: bool) -> None:
        """End all parts. If one of them raises, the others still end.

        Args:
            last: called after everything else has ended.
            wait: wait until running operations have ended.
        """
        self.graceful_shutdown.close()
        with contextlib.ExitStack() as rest:  # the last callback runs first
            rest.callback(last)
            rest.callback(self.quorum_task.close, wait=wait)
            rest.callback(self.shared.transport.shutdown, wait)
            rest.callback(self.speculative.drop)
            rest.callback(self.shared.coordinator.close)
            rest.callback(self.control_words.close)
            rest.callback(self.reducer.quantized.close, wait=wait)  # its thread waits for operations of the group
            rest.callback(self.group.shutdown)
            rest.callback(self.control_words.linger)
            rest.callback(self.reducer.close)
            rest.callback(self.futures.close)
            rest.callback(self.aborter.close, wait=wait)
            rest.callback(self.exchange.close)


def resolve(config: ManagerConfig, group: ProcessGroupLike, coordinator: object, clock: object) -> ResolvedConfig:
    """Check the arguments of a Manager, and fill in missing settings.

    Raises: ConfigError: a part or a setting can't work, or is missing.
    """
    _check_group(group)
    if not callable(coordinator):
        check_part("coordinator", coordinator, *COORDINATOR_METHODS)
    check_part("clock", clock, "monotonic", "wait", "after")
    warn_of_misspelt(os.environ)
    resolved = from_environment(config, os.environ, own_host=own_host)
    check_transport(resolved)
    return resolved


def assemble(
    config: ResolvedConfig,
    group: ProcessGroupLike,
    user: UserState,
    coordinator: Coordinator | Callable[[ResolvedConfig], Coordinator] | None,
    clock: Clock | None,
) -> Parts:
    """Make the parts of a Manager and connect them.

    Args:
        config: checked by `resolve`.
        group: the user's process group.
        user: the state that the user has registered so far.
        coordinator, clock: as in Manager.
    Raises: errors of preparing the group, of making the coordinator or of setting the group's time-out. Nothing is left
        running then.
    """
    name_job(config.job)
    prepare = getattr(group, "prepare", None)
    if prepare is not None and not config.is_passive_rank:
        prepare()  # the other replicas wait for this one as soon as it has asked for a quorum
    group = NullGroup(group) if config.is_passive_rank else group
    clock = clock or SystemClock()
    if config.timeout_is_explicit:
        group.set_timeout(config.timeout)
    transport = config.checkpoint_transport or _own_transport(config)
    try:
        speaker = _speaker(config, coordinator)
    except BaseException:
        transport.shutdown()
        raise
    # From here on a child process runs. No code below waits or can fail.
    settings = _settings(
        config, speaker.replica_id, lease_of(config, group, speaker), heals_over_group=transport.needs_group
    )
    step = StepMailbox(settings, clock.monotonic)
    shared = ManagerContext(
        config=config,
        step=step,
        coordinator=speaker,
        transport=transport,
        user_state=user,
        reports=ErrorReporter(lambda: step.status, job_id=config.job, replica_id=speaker.replica_id, rank=config.rank),
        clock=clock,
        times=TimeAccount(clock.monotonic),
        closing=threading.Event(),
    )
    return _connected(shared, group)


def _connected(shared: ManagerContext, group: ProcessGroupLike) -> Parts:
    """Make the parts that depend on the shared ones."""
    config, step, reports, clock = shared.config, shared.step, shared.reports, shared.clock
    aborter, fingerprint, unreached = QuorumAborter(group, clock), OwnFingerprint(config), UnreachedPeers()
    own_time = OwnTime(clock.monotonic)
    waits = shared.times.waiting(Wait.ROUND, also=own_time)
    reducer = Reducer(group, step, clock, own_time=own_time, waits=waits, timeout=config.timeout)
    step_progress = _step_progress(shared, reducer, own_time)
    audit = StateAudit(shared)
    check = StateCheck(shared, audit)
    speculative = SpeculativeSnapshot(
        take=shared.user_state.take_whole,
        transport=shared.transport,
        timeout=config.heal_timeout,
        log=reports.log,
    )
    exchange = StateExchange(
        shared, speculative=speculative, check=check, audit=audit, step_progress=step_progress, unreached=unreached
    )
    graceful_shutdown, straggling = GracefulShutdown(shared), Straggling(reports, config.on_straggler)
    orders = Orders(shared, group, aborter, speculative, exchange, check, graceful_shutdown, own_time, reducer)
    step.performs(orders.performers())
    return Parts(
        shared=shared,
        group=group,
        aborter=aborter,
        fingerprint=fingerprint,
        unreached=unreached,
        step_progress=step_progress,
        futures=FutureTimeouts(clock, lambda error, name: step.tell(on.ErrorReported(error, name))),
        reducer=reducer,
        audit=audit,
        speculative=speculative,
        exchange=exchange,
        quorum_task=QuorumTask(
            shared,
            group=group,
            aborter=aborter,
            fingerprint=fingerprint,
            unreached=unreached,
            before_configure=reducer.quantized.group_changes,
        ),
        graceful_shutdown=graceful_shutdown,
        straggling=straggling,
        waits=WaitWatch(
            step,
            step_progress,
            config,
            reports,
            clock.monotonic,
            failed_before=lambda: unreached.last,
            left_out=lambda: straggling.left_out if step.status.is_left_out else "",
        ),
        control_words=ControlWords(shared, group),
    )


def _step_progress(shared: ManagerContext, reducer: Reducer, own_time: OwnTime) -> StepProgress:
    config = shared.config
    return StepProgress(
        shared.step,
        slowest_step_ms=config.timeouts.slowest_step_ms,
        num_reductions=lambda: reducer.num_started,
        reduces=lambda: reducer.reduces,
        monotonic=shared.clock.monotonic,
        own_time=own_time,
        report=shared.times.report if config.rank == 0 else lambda: None,
    )


def _speaker(
    config: ResolvedConfig, given: Coordinator | Callable[[ResolvedConfig], Coordinator] | None
) -> Coordinator:
    if given is None:
        return GroupCoordinator(config)
    made = given(config) if callable(given) else given
    check_made_coordinator(made)
    return made


def _check_group(pg: object) -> None:
    """Check that a Manager can use this object as its process group.

    Raises: ConfigError: a method is missing.
    """
    needed = ("configure", "allreduce", "abort", "errored", "set_timeout", "shutdown")
    if isinstance(pg, type) or not all(callable(getattr(pg, name, None)) for name in needed):
        what = f"the class {pg.__name__}" if isinstance(pg, type) else f"a {type(pg).__name__}"
        raise ConfigError(
            f"pg is {what}; give a process group that can be configured: ProcessGroupGloo(), or torch's own, made with "
            "enable_reconfigure=True (torch 2.14 and later)"
        )


def _settings(config: ResolvedConfig, replica_id: str, lease_ms: int | None, *, heals_over_group: bool) -> StepSettings:
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
        is_rank0_only=config.rank0_synchronization_only,
        is_passive_rank=config.is_passive_rank,
        heals_over_group=heals_over_group,
        lease_ms=lease_ms,
        timeouts=config.timeouts,
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
