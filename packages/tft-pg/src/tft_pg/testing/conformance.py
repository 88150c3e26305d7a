"""The contract of `tft_pg.ProcessGroup` as a list of checks that any group can be put through.

A fake or a wrapper that passes them can stand for the real thing, and a real one that passes them can be trusted
with a training job. Each check is a function of a `Subject`; its docstring says what holds. The law of this file:
no backend is named; what a group may do otherwise is said by the subject's fields.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from tft_pg.base import ProcessGroup
from tft_pg.errors import (
    Aborted,
    Closed,
    ConfigureFailed,
    DeadlinePassed,
    InvalidSetting,
    NotConfigured,
    PeerFailed,
    StoreAddressError,
)
from tft_pg.testing.bench import GUARD_S, Bench
from tft_pg.wrappers.swallowing import ErrorSwallowingProcessGroupWrapper
from tft_pg.wrappers.wrapping import WrappingProcessGroup

__all__ = ["CHECKS", "Subject", "check_process_group"]

_HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Subject:
    """A kind of group under test.

    Args:
        make: makes one unconfigured group; can be pickled if the group talks to other processes.
        world_sizes: the sizes that it can have.
        ready: whether it works before its first `configure`.
        meets_peers: whether `configure` waits for the other ranks.
    """

    make: Callable[[], ProcessGroup]
    world_sizes: tuple[int, ...] = (1, 2, 3)
    ready: bool = False
    meets_peers: bool = True

    @property
    def most(self) -> int:
        return max(self.world_sizes)


def check_process_group(
    make: Callable[[], ProcessGroup],
    *,
    world_sizes: tuple[int, ...] = (1, 2, 3),
    ready: bool = False,
    meets_peers: bool = True,
) -> None:
    """Put a kind of group through every check; raises AssertionError, or the group's own error, at the first fault.

    Args:
        make: makes one unconfigured group. It is sent to a child process by pickling.
        world_sizes: the sizes that it can have; a group of one only skips what needs a peer.
        ready: whether it works before its first `configure`.
        meets_peers: whether `configure` waits for the other ranks.
    """
    subject = Subject(make, tuple(world_sizes), ready, meets_peers)
    for check in CHECKS:
        check(subject)


# --- what the group computes ---------------------------------------------------------------------------------------


def _input(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, so that every reduction is exact; another tensor on each rank."""
    return ((torch.arange(length) * 7 + rank * 3) % 11 + 1).to(dtype)


def _inputs(world_size: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [_input(rank, length, dtype) for rank in range(world_size)]


_REDUCTIONS: tuple[tuple[Any, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (ReduceOp.SUM, lambda stacked: stacked.sum(0)),
    (ReduceOp.AVG, lambda stacked: stacked.sum(0) / stacked.shape[0]),
    (ReduceOp.MAX, lambda stacked: stacked.max(0).values),
    (ReduceOp.MIN, lambda stacked: stacked.min(0).values),
    (ReduceOp.PRODUCT, lambda stacked: stacked.prod(0)),
)


def _agree(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def allreduce_matches_the_oracle(subject: Subject) -> None:
    """Each reduction, in each call form, gives on every rank what one process computes from all inputs."""
    for world_size in subject.world_sizes:
        with Bench(subject.make) as bench:
            groups = bench.configured(world_size)
            for op, oracle in _REDUCTIONS:
                expected = oracle(torch.stack(_inputs(world_size, 13)))

                def reduce(rank: int, group: ProcessGroup, op: Any = op) -> list[torch.Tensor]:
                    opts = dist.AllreduceOptions()
                    opts.reduceOp = op
                    tensors = [_input(rank, 13) for _ in range(4)]
                    group.allreduce([tensors[0]], opts).wait()
                    group.allreduce([tensors[1]], op).wait()
                    group.allreduce(tensors[2], op).wait()
                    dist.all_reduce(tensors[3], op=op, group=group)
                    return tensors

                for tensors in bench.all(groups, reduce):
                    _agree(tensors, [expected] * 4)


def other_collectives_match_the_oracle(subject: Subject) -> None:
    """Broadcasts, gathers, scatters, exchanges and barriers give what one process computes from all inputs."""
    for world_size in subject.world_sizes:
        with Bench(subject.make) as bench:
            groups = bench.configured(world_size)
            for name, action, oracle in _OTHERS:
                results = bench.all(groups, partial(_with_size, action))
                for rank, got in enumerate(results):
                    try:
                        _agree(got, oracle(rank, world_size))
                    except AssertionError as error:
                        raise AssertionError(f"{name} on rank {rank} of {world_size}: {error}") from None


def _with_size(action: _Action, rank: int, group: ProcessGroup) -> Any:
    return action(rank, group, group.size())


_Action = Callable[[int, ProcessGroup, int], Any]
_Oracle = Callable[[int, int], Any]


def _broadcast(rank: int, group: ProcessGroup, n: int) -> Any:
    tensors = [_input(rank, 5) for _ in range(3)]
    opts = dist.BroadcastOptions()
    opts.rootRank = n - 1
    group.broadcast([tensors[0]], opts).wait()
    group.broadcast(tensors[1], n - 1).wait()
    group.broadcast_one(tensors[2], n - 1).wait()
    return tensors


def _allgather(rank: int, group: ProcessGroup, n: int) -> Any:
    lists = [[torch.zeros(5) for _ in range(n)] for _ in range(2)]
    group.allgather([lists[0]], [_input(rank, 5)], AllgatherOptions()).wait()
    group.allgather(lists[1], _input(rank, 5)).wait()
    return lists


def _allgather_base(rank: int, group: ProcessGroup, n: int) -> Any:
    outputs = [torch.zeros(5 * n) for _ in range(3)]
    group._allgather_base(outputs[0], _input(rank, 5), AllgatherOptions()).wait()
    group.all_gather_single(outputs[1], _input(rank, 5)).wait()
    group.allgather_into_tensor_coalesced([outputs[2]], [_input(rank, 5)], AllgatherOptions()).wait()
    return outputs


def _reduce_scatter(rank: int, group: ProcessGroup, n: int) -> Any:
    opts = dist.ReduceScatterOptions()
    outputs = [torch.zeros(5) for _ in range(3)]
    group.reduce_scatter([outputs[0]], [list(_input(rank, 5 * n).chunk(n))], opts).wait()
    group._reduce_scatter_base(outputs[1], _input(rank, 5 * n), opts).wait()
    group.reduce_scatter_tensor_coalesced([outputs[2]], [_input(rank, 5 * n)], opts).wait()
    return outputs


def _alltoall(rank: int, group: ProcessGroup, n: int) -> Any:
    output = torch.zeros(3 * n)
    group.alltoall_base(output, _input(rank, 3 * n), [], [], dist.AllToAllOptions()).wait()
    return output


def _coalesced(rank: int, group: ProcessGroup, n: int) -> Any:
    tensors = [_input(rank, 5), _input(rank, 9)]
    group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
    return tensors


def _ring(rank: int, group: ProcessGroup, n: int) -> Any:
    received = torch.zeros(5)
    if n == 1:
        return received
    sent = group.send([_input(rank, 5)], (rank + 1) % n, 3)
    group.recv([received], (rank - 1) % n, 3).wait()
    sent.wait()
    return received


def _barrier(rank: int, group: ProcessGroup, n: int) -> Any:
    group.barrier(opts=dist.BarrierOptions()).wait()
    dist.barrier(group=group)
    return torch.zeros(1)


def _future(rank: int, group: ProcessGroup, n: int) -> Any:
    tensor = _input(rank, 5)
    value = group.allreduce([tensor], ReduceOp.SUM).get_future().wait()
    return [tensor, value[0]]


def _sum(n: int, length: int) -> torch.Tensor:
    return torch.stack(_inputs(n, length)).sum(0)


_OTHERS: tuple[tuple[str, _Action, _Oracle], ...] = (
    ("broadcast", _broadcast, lambda rank, n: [_input(n - 1, 5)] * 3),
    ("allgather", _allgather, lambda rank, n: [_inputs(n, 5)] * 2),
    ("allgather_base", _allgather_base, lambda rank, n: [torch.cat(_inputs(n, 5))] * 3),
    ("reduce_scatter", _reduce_scatter, lambda rank, n: [_sum(n, 5 * n).chunk(n)[rank]] * 3),
    ("alltoall", _alltoall, lambda rank, n: torch.cat([item.chunk(n)[rank] for item in _inputs(n, 3 * n)])),
    ("allreduce_coalesced", _coalesced, lambda rank, n: [_sum(n, 5), _sum(n, 9)]),
    ("send and recv", _ring, lambda rank, n: torch.zeros(5) if n == 1 else _input((rank - 1) % n, 5)),
    ("barrier", _barrier, lambda rank, n: torch.zeros(1)),
    ("future", _future, lambda rank, n: [_sum(n, 5)] * 2),
)


# --- how the group lives -------------------------------------------------------------------------------------------


def _swallowed(group: ProcessGroup) -> Exception | None:
    """The error that a wrapper, however deep, keeps to itself."""
    while isinstance(group, WrappingProcessGroup):
        if isinstance(group, ErrorSwallowingProcessGroupWrapper) and group.error() is not None:
            return group.error()
        group = group.parent
    return None


def _failure(group: ProcessGroup, act: Callable[[], object]) -> BaseException | None:
    """What an action fails with: what it raises, or what a swallowing group reports instead."""
    try:
        act()
    except RuntimeError as error:
        return error
    return _swallowed(group)


def _require(error: object, *kinds: type[BaseException]) -> None:
    names = " or ".join(kind.__name__ for kind in kinds)
    assert isinstance(error, kinds), f"expected {names}, got {error!r}"
    assert len(str(error)) > 10, f"{error!r} says nothing"


def _reduce_ones(group: ProcessGroup) -> torch.Tensor:
    tensor = torch.ones(3)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    return tensor


def _works(bench: Bench, groups: Sequence[ProcessGroup]) -> None:
    for rank, tensor in enumerate(bench.all(groups, lambda rank, group: _reduce_ones(group))):
        _agree(tensor, torch.full((3,), float(len(groups))))
        assert (groups[rank].rank(), groups[rank].size()) == (rank, len(groups))
        assert groups[rank].errored() is None


def use_before_configure_is_an_error(subject: Subject) -> None:
    """A group that was never configured says so, reports no error, and can be printed."""
    with Bench(subject.make) as bench:
        group = bench.make()
        assert group.errored() is None
        assert type(group).__name__ in repr(group)
        assert group.getBackendName()
        if not subject.ready:
            _require(_failure(group, lambda: _reduce_ones(group)), NotConfigured)
            _require(_failure(group, group.size), NotConfigured)


def bad_arguments_are_errors(subject: Subject) -> None:
    """A rank out of range, an address that is none and a time-out of zero are refused at once; the group works on."""
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        group, address = groups[0], bench.fresh_address()
        for rank, world_size in ((-1, 1), (subject.most, subject.most), (0, 0)):
            error = _failure(group, partial(group.configure, address, rank, world_size))
            _require(error, InvalidSetting)
        _require(_failure(group, lambda: group.set_timeout(timedelta(0))), InvalidSetting)
        if subject.meets_peers:
            _require(_failure(group, lambda: group.configure("nowhere", 0, 1)), StoreAddressError)
        _works(bench, groups)


def shutdown_is_for_ever(subject: Subject) -> None:
    """After `shutdown`, which may be repeated, every use is `Closed`; before the first `configure` too."""
    with Bench(subject.make) as bench:
        for group in [bench.make(), *bench.configured(subject.most)]:
            group.shutdown()
            group.shutdown()
            group.abort()
            _require(_failure(group, partial(_reduce_ones, group)), Closed)
            address = bench.fresh_address()
            _require(_failure(group, partial(group.configure, address, 0, 1)), Closed)
            _require(group.errored(), Closed)


def shutdown_leaves_nothing(subject: Subject) -> None:
    """After `shutdown` the threads of the process and its descriptors are as many as before."""
    with Bench(subject.make) as bench:
        _works(bench, bench.configured(subject.most))  # what torch itself keeps from the first use on
    with Bench(subject.make) as bench:
        before = _resources()
        groups = bench.configured(subject.most)
        _works(bench, groups)
        for group in groups:
            group.shutdown()
        # The store's server notices a client that left a moment later.
        _until(lambda: all(now <= then for now, then in zip(_resources(), before, strict=True)))


def reconfigure_changes_rank_and_size(subject: Subject) -> None:
    """The same groups work in every size and order, one configure after another."""
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for world_size in (*subject.world_sizes, *reversed(subject.world_sizes)):
            for members in (groups[:world_size], groups[:world_size][::-1]):
                bench.configure(members)
                _works(bench, members)


def abort_before_configure_is_harmless(subject: Subject) -> None:
    """An abort of a group that never was leaves an error until the next `configure`, which works."""
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for group in groups:
            group.abort()
            _require(group.errored(), Aborted)
        bench.configure(groups)
        _works(bench, groups)


def abort_leaves_an_error_until_configure(subject: Subject) -> None:
    """After `abort` the group is in error, collectives raise `Aborted`, and a new `configure` mends both."""
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        for _ in range(2):
            for group in groups:
                group.abort()
                group.abort()
                _require(group.errored(), Aborted)
                _require(_failure(group, partial(_reduce_ones, group)), Aborted)
            bench.configure(groups)
            _works(bench, groups)


def abort_ends_a_running_collective(subject: Subject) -> None:
    """A collective whose last peer never comes ends by `abort` from another thread, here and on the others too.

    Nothing of it is written into a tensor after that, whatever the group does next.
    """
    if subject.most < 2:
        return
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        for group in groups:
            group.set_timeout(_HOUR)
        tensors = [torch.ones(1000) for _ in groups[:-1]]
        works = [group.allreduce([tensor], ReduceOp.SUM) for group, tensor in zip(groups, tensors, strict=False)]
        waits = [bench.start(partial(_failure, group, work.wait)) for group, work in zip(groups, works, strict=False)]
        groups[0].abort()
        _require(waits[0]().get(), Aborted)
        for group, finish in zip(groups[1:], waits[1:], strict=False):
            _require(finish().get(), PeerFailed)
            _require(group.errored(), PeerFailed)
        left = [tensor.clone() for tensor in tensors]
        _require(_failure(groups[-1], partial(_reduce_ones, groups[-1])), PeerFailed)
        bench.configure(groups)
        _works(bench, groups)
        _agree(tensors, left)


def abort_ends_a_running_configure(subject: Subject) -> None:
    """A `configure` whose peer never comes ends by `abort` from another thread; the next one works."""
    if subject.most < 2 or not subject.meets_peers:
        return
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for _ in range(3):
            address = bench.fresh_address()
            entered = threading.Event()

            def configure(address: str = address, entered: threading.Event = entered) -> None:
                entered.set()
                groups[0].configure(address, 0, subject.most, timeout=_HOUR)

            running = bench.start(partial(_failure, groups[0], configure))
            assert entered.wait(GUARD_S)
            # Whether it falls before the configure has begun, and is harmless, or into it, is for chance.
            finished = threading.Event()
            aborting = bench.start(partial(_abort_until, groups[0], finished))
            try:
                error = running().get()
            finally:
                finished.set()
                aborting().get()
            _require(error, Aborted)
            _require(groups[0].errored(), Aborted)
        bench.configure(groups)
        _works(bench, groups)


def a_missing_peer_fails_configure(subject: Subject) -> None:
    """A `configure` whose peer never comes fails at its deadline and names the rank; the next one works."""
    if subject.most < 2 or not subject.meets_peers:
        return
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        limit = timedelta(milliseconds=200)
        address = bench.fresh_address()
        error = _failure(groups[0], lambda: groups[0].configure(address, 0, subject.most, timeout=limit))
        _require(error, ConfigureFailed)
        assert isinstance(error, ConfigureFailed)
        assert error.missing_ranks == tuple(range(1, subject.most)), error
        _require(groups[0].errored(), ConfigureFailed)
        _require(_failure(groups[0], lambda: _reduce_ones(groups[0])), NotConfigured)
        bench.configure(groups)
        _works(bench, groups)


def a_used_prefix_is_refused(subject: Subject) -> None:
    """A second `configure` under the same prefix fails with an error that says so, on every rank; none hangs."""
    if not subject.meets_peers:
        return
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        address = bench.fresh_address()

        def configure(rank: int, group: ProcessGroup) -> BaseException | None:
            return _failure(group, lambda: group.configure(address, rank, len(groups)))

        assert bench.all(groups, configure) == [None] * len(groups)
        for error in bench.all(groups, configure):
            _require(error, ConfigureFailed)
            assert "fresh prefix" in str(error), error
        bench.configure(groups)
        _works(bench, groups)


def set_timeout_acts_at_once(subject: Subject) -> None:
    """`set_timeout` on a live group bounds the next operation."""
    if subject.most < 2:
        return
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        groups[0].set_timeout(timedelta(milliseconds=100))
        error = _failure(groups[0], lambda: _reduce_ones(groups[0]))
        _require(error, DeadlinePassed)
        _require(groups[0].errored(), DeadlinePassed)
        groups[0].set_timeout(timedelta(seconds=GUARD_S))
        bench.configure(groups)
        _works(bench, groups)


def a_killed_peer_fails_the_collective(subject: Subject) -> None:
    """When another process is killed in the middle of a collective, this one's fails, long before its time-out."""
    if subject.most < 2:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tft_pg"])
    with Bench(subject.make) as bench:
        group, address = bench.make(), bench.fresh_address()
        ours, theirs = context.Pipe()
        child = context.Process(target=_peer, args=(subject.make, address, theirs), name="tft-pg-peer", daemon=True)
        child.start()
        theirs.close()
        try:
            group.configure(address, 0, 2, timeout=timedelta(seconds=GUARD_S))
            group.set_timeout(_HOUR)
            assert ours.poll(GUARD_S)
            assert ours.recv() == "configured"
            assert child.pid is not None
            work = group.allreduce([torch.ones(3)], ReduceOp.SUM)
            waiting = bench.start(lambda: _failure(group, work.wait))
            os.kill(child.pid, signal.SIGKILL)
            _require(waiting().get(), PeerFailed)
            _require(group.errored(), PeerFailed)
        finally:
            child.kill()
            child.join(GUARD_S)
            ours.close()
        if 1 in subject.world_sizes:
            bench.configure([group])
            _works(bench, [group])


def _peer(make: Callable[[], ProcessGroup], address: str, parent: Connection) -> None:
    torch.set_num_threads(1)
    group = make()
    group.configure(address, 1, 2, timeout=timedelta(seconds=GUARD_S))
    parent.send("configured")
    parent.poll(None)  # until killed, or the parent has gone


def _abort_until(group: ProcessGroup, finished: threading.Event) -> None:
    while not finished.wait(0.005):
        group.abort()


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody tells of."""
    pause = threading.Event()
    for _ in range(500):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("threads or descriptors were left behind")


CHECKS: tuple[Callable[[Subject], None], ...] = (
    allreduce_matches_the_oracle,
    other_collectives_match_the_oracle,
    use_before_configure_is_an_error,
    bad_arguments_are_errors,
    shutdown_is_for_ever,
    shutdown_leaves_nothing,
    reconfigure_changes_rank_and_size,
    abort_before_configure_is_harmless,
    abort_leaves_an_error_until_configure,
    abort_ends_a_running_collective,
    abort_ends_a_running_configure,
    a_missing_peer_fails_configure,
    a_used_prefix_is_refused,
    set_timeout_acts_at_once,
    a_killed_peer_fails_the_collective,
)
"""Every check, each a function of a `Subject`; a test runner makes one test of each."""
