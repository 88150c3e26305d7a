"""ProcessGroupNCCL and ProcessGroupXCCL: over a device library without a device, and, with `-m gpu`, over NCCL."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Store, TCPStore

from tft_pg import (
    AbortedError,
    AcceleratorBackend,
    CollectiveTimeoutError,
    Communicator,
    CommunicatorFailedError,
    ConfigError,
    ConfigureError,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupBabyNCCL,
    ProcessGroupError,
    ProcessGroupNCCL,
    ProcessGroupXCCL,
    UnsupportedOperationError,
    format_store_addr,
)
from tft_pg.backends import accelerator, lifeline, torch_library
from tft_pg.backends.attempt import Attempt
from tft_pg.backends.lifeline import Lifeline
from tft_pg.backends.nccl import NCCL
from tft_pg.backends.torch_library import TorchLibrary
from tft_pg.errors import Where
from tft_pg.futures import timer
from tft_pg.testing import (
    CHECKS,
    GLOO_LACKS,
    NCCL_LACKS,
    Bench,
    FakeAccelerator,
    Subject,
    WaitsOnHost,
    computing,
    fake_backend,
)
from tft_pg.testing.cases import CASES, REDUCTIONS, Sample
from tft_pg.testing.computing import DTYPES
from tft_pg.testing.subject import agree

HOUR = timedelta(hours=1)
_Kind = type[ProcessGroupNCCL] | type[ProcessGroupBabyNCCL]
GUARD_S = 20.0
GUARD = timedelta(seconds=GUARD_S)


@pytest.fixture
def library() -> FakeAccelerator:
    return FakeAccelerator()


@pytest.fixture
def bench(library: FakeAccelerator) -> Iterator[Bench]:
    with Bench(lambda: ProcessGroupNCCL(backend=library), timeout=GUARD) as bench:
        yield bench
        library.release()


def failure(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except ProcessGroupError as error:
        return error
    return None


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(4000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came true")


# --- the contract --------------------------------------------------------------------------------------------------


def nccl() -> ProcessGroup:
    return WaitsOnHost(ProcessGroupNCCL(backend=FakeAccelerator()))


def over_a_network() -> ProcessGroup:
    return WaitsOnHost(ProcessGroupXCCL(backend=FakeAccelerator(propagates=True)))


def fitted(check: Callable[..., None]) -> Callable[[Subject], None]:
    """What dies in which message is the fake's Gloo's affair; that a death is noticed is the group's."""
    return partial(check, rows=("allreduce",)) if check.__name__ == "every_death_at_every_point" else check


@pytest.mark.in_parts
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_nccl_over_the_fake(check: Callable[..., None]) -> None:
    # Which types can be combined with which reductions is decided in the fake's Gloo, in a group of any size.
    of_types = check.__name__ in ("every_combination_agrees_or_is_refused", "every_layout_agrees_or_is_refused")
    fitted(check)(Subject(nccl, world_sizes=(2,) if of_types else (1, 2, 3), lacks=GLOO_LACKS))


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if "abort" in check.__name__], ids=lambda check: check.__name__
)
def test_conformance_of_xccl_over_the_fake_as_over_a_network(check: Callable[..., None]) -> None:
    fitted(check)(Subject(over_a_network, world_sizes=(1, 2), lacks=GLOO_LACKS))


# --- the stream's order --------------------------------------------------------------------------------------------


def test_a_wait_returns_before_the_device_is_done(bench: Bench, library: FakeAccelerator) -> None:
    groups = bench.configured(2)
    library.hold()
    tensors = [torch.ones(3), torch.ones(3)]
    works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait()
        assert not work.is_completed()
        assert tensor.tolist() == [1.0] * 3  # on a device, the stream would not get there yet
    assert [group.errored() for group in groups] == [None, None]
    library.release()
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait(GUARD)
        assert work.is_completed()
        assert tensor.tolist() == [2.0] * 3


def test_a_wait_with_a_limit_and_a_barrier_hold_up_the_host(bench: Bench, library: FakeAccelerator) -> None:
    groups = bench.configured(2)
    library.hold()
    barriers = [group.barrier() for group in groups]
    waiting = bench.start(partial(barriers[0].wait))
    error = failure(lambda: barriers[1].wait(timedelta(milliseconds=20)))
    assert isinstance(error, CollectiveTimeoutError)
    assert isinstance(error, TimeoutError)
    assert not barriers[0].is_completed()
    library.release()
    assert waiting().get()
    assert barriers[1].wait()  # who gave up a wait may wait again


def test_an_operation_that_torch_would_put_on_the_callers_stream_is_watched_too(bench: Bench) -> None:
    """Of a synchronous operation torch's NCCL gives no Work."""
    groups = bench.configured(2)
    tensors = [torch.ones(3), torch.ones(3)]
    others = [torch.ones(3), torch.ones(3)]

    def reduce(rank: int, group: ProcessGroup) -> None:
        dist.all_reduce(tensors[rank], group=group)
        opts = dist.AllreduceOptions()
        opts.asyncOp = False
        assert group.allreduce([others[rank]], opts).wait(GUARD)  # behind the one before, on one stream
        assert opts.asyncOp is False  # they are the caller's

    bench.all(groups, reduce)
    assert [tensor.tolist() for tensor in (*tensors, *others)] == [[2.0] * 3] * 4


def test_nothing_waits_for_a_whole_device(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """needs.md, 2.3: a synchronization of the device in each commit and in `errored()`."""

    def forbidden(*args: object) -> None:
        raise AssertionError("the whole device was waited for")

    groups = bench.configured(2)
    for module in (torch.accelerator, torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "synchronize", forbidden)
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait(GUARD))
    groups[0].abort()
    assert isinstance(groups[0].errored(), AbortedError)
    bench.configure(groups)


# --- what ends operations ------------------------------------------------------------------------------------------


def test_fault_14_a_new_time_out_acts_on_the_live_group_and_nobody_need_wait(
    bench: Bench, library: FakeAccelerator
) -> None:
    """needs.md, fault 14: a survivor waited out the time-out that the group was made with."""
    groups = bench.configured(2)
    for group in groups:
        group.set_timeout(HOUR)
    groups[0].set_timeout(timedelta(milliseconds=50))
    tensor = torch.ones(3)
    work = groups[0].allreduce([tensor])  # the peer does not come
    until(lambda: groups[0].errored() is not None)
    assert isinstance(groups[0].errored(), CollectiveTimeoutError)
    assert isinstance(failure(work.wait), CollectiveTimeoutError)
    assert isinstance(failure(lambda: groups[1].allreduce([torch.ones(3)]).wait(GUARD)), PeerDisconnectedError)
    assert isinstance(failure(lambda: groups[0].allreduce([torch.ones(3)])), CollectiveTimeoutError)
    assert tensor.tolist() == [1.0] * 3
    bench.configure(groups)
    assert [group.errored() for group in groups] == [None, None]


def test_an_abort_ends_a_held_kernel_and_nothing_of_it_is_written(bench: Bench, library: FakeAccelerator) -> None:
    groups = bench.configured(3)
    for group in groups:
        group.set_timeout(HOUR)
    library.hold()
    tensors = [torch.ones(3) for _ in groups]
    works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
    begun_s = time.perf_counter()
    groups[1].abort()
    errors = [failure(partial(work.wait, HOUR)) for work in works]
    assert time.perf_counter() - begun_s < 2.0  # on a busy machine; the time-out is an hour
    assert [type(error) for error in errors] == [PeerDisconnectedError, AbortedError, PeerDisconnectedError]
    assert "rank 1 disconnected" in str(errors[0])
    library.release()
    bench.configure(groups)
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 3] * 3


def test_what_ended_well_before_an_abort_stays_well(bench: Bench) -> None:
    groups = bench.configured(2)
    works = [group.allreduce([torch.ones(3)]) for group in groups]
    until(lambda: all(work.is_completed() for work in works))
    groups[0].abort()
    assert works[0].wait()
    assert isinstance(groups[0].errored(), AbortedError)
    assert isinstance(failure(lambda: groups[0].allreduce([torch.ones(3)])), AbortedError)


def test_a_peer_that_leaves_after_the_last_operation_leaves_no_error(bench: Bench) -> None:
    groups = bench.configured(2)
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait(GUARD))
    groups[0].shutdown()
    error = None
    while error is None:  # until the news has come
        error = failure(lambda: groups[1].allreduce([torch.ones(3)]).wait(GUARD))
    assert isinstance(error, PeerDisconnectedError)


@pytest.mark.parametrize(("propagates", "expected"), [(True, PeerDisconnectedError), (False, CollectiveTimeoutError)])
def test_a_lost_data_connection_is_an_error_that_shows_late(
    propagates: bool, expected: type[ProcessGroupError]
) -> None:
    library = FakeAccelerator(propagates=propagates)
    with Bench(lambda: ProcessGroupNCCL(backend=library), timeout=GUARD) as bench:
        groups = bench.configured(2)
        groups[0].set_timeout(timedelta(milliseconds=200))
        groups[1].set_timeout(HOUR)
        work = groups[0].allreduce([torch.ones(3)])
        assert work.wait()
        library.pull_the_cable()
        until(lambda: groups[0].errored() is not None)
        assert isinstance(groups[0].errored(), expected)
        assert isinstance(failure(work.wait), expected)
        bench.configure(groups)
        bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait(GUARD))


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no watch find a failure, so that it is found by the group's user only."""
    monkeypatch.setattr(accelerator._OperationList, "_check", lambda operations: None)
    monkeypatch.setattr(accelerator._OperationList, "_on_peer_disconnected", lambda operations, rank: None)


@pytest.mark.usefixtures("unwatched")
def test_who_has_waited_for_the_device_finds_its_failure_at_once() -> None:
    """NCCL on a GPU: a kernel ended by a failure, its stream was waited for, and the group was not in error yet."""
    library = FakeAccelerator(propagates=True)
    with Bench(lambda: ProcessGroupNCCL(backend=library), timeout=GUARD) as bench:
        groups = bench.configured(2)
        work = groups[0].allreduce([torch.ones(3)])
        library.pull_the_cable()
        until(lambda: bool(work._operation.work.is_completed()))  # type: ignore[attr-defined]
        assert isinstance(groups[0].errored(), PeerDisconnectedError)
        assert isinstance(failure(work.wait), PeerDisconnectedError)


@pytest.mark.usefixtures("unwatched")
def test_a_failure_that_another_thread_is_reporting_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The query of a failed operation aborts the communicator, so kernels end before the failure is reported."""
    library = FakeAccelerator(propagates=True)
    found, go_on = threading.Event(), threading.Event()
    report = accelerator._OperationList.fail

    def report_late(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            found.set()
            go_on.wait(GUARD_S)
        report(*args)

    monkeypatch.setattr(accelerator._OperationList, "fail", report_late)
    with Bench(lambda: ProcessGroupNCCL(backend=library), timeout=GUARD) as bench:
        groups = bench.configured(2)
        works = [groups[0].allreduce([torch.ones(3)]) for _ in range(3)]
        library.pull_the_cable()
        until(lambda: bool(works[0]._operation.work.is_completed()))  # type: ignore[attr-defined]
        other = threading.Thread(target=works[1].is_completed)
        other.start()
        assert found.wait(GUARD_S)
        # The last one's kernel has ended without a result, and looks successful to the library.
        assert isinstance(failure(works[2].wait), PeerDisconnectedError)
        assert isinstance(groups[0].errored(), PeerDisconnectedError)
        assert [type(failure(work.wait)) for work in works] == [PeerDisconnectedError] * 3
        go_on.set()
        other.join(GUARD_S)


def test_a_barrier_of_torch_runs_on_the_groups_device(bench: Bench) -> None:
    """NCCL on a GPU: torch names the CPU in a barrier of a group that it did not make, and NCCL has no CPU."""
    seen: list[object] = []
    groups = bench.configured(2)
    device = torch.device("meta")
    opts = dist.BarrierOptions()
    opts.device = device
    inner = fake_backend._FakeGroup._run

    def barrier(group: Any, collective: Any, args: Any, kwargs: Any) -> dist.Work:
        seen.extend(each.device for each in (*args, *kwargs.values()))
        return inner(group, collective, args, kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fake_backend._FakeGroup, "_run", barrier)
        works = [group.barrier(opts) for group in groups]
    assert [work.wait() for work in works] == [True, True]
    assert seen == [torch.device("cpu")] * 2  # the fake's device
    assert opts.device == device


def test_a_call_that_breaks_the_library_ends_the_group_until_it_is_configured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL on a GPU: after an invalid argument, each later call of any kind failed with the same error."""
    groups = bench.configured(2)

    def broken(*args: object) -> dist.Work:
        raise RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3780, invalid argument (run with NCCL_DEBUG=WARN)")

    with monkeypatch.context() as patched:
        patched.setattr(fake_backend._FakeGroup, "allreduce", broken)
        error = failure(lambda: groups[0].allreduce([torch.ones(3)]))
    for found in (error, groups[0].errored()):
        assert isinstance(found, CommunicatorFailedError)
        assert "invalid argument" in str(found)
    bench.configure(groups)
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait(GUARD))


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_a_reduction_that_torch_refuses_is_a_refusal_of_the_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    groups = bench.configured(2)

    def refused(*args: object) -> dist.Work:
        raise kind("Cannot use ReduceOp.BAND with NCCL")

    with monkeypatch.context() as patched:
        patched.setattr(fake_backend._FakeGroup, "allreduce", refused)
        error = failure(lambda: groups[0].allreduce([torch.ones(3)]))
    assert isinstance(error, OperationRefusedError)
    assert "ReduceOp.BAND" in str(error)
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait(GUARD))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        groups[0].allreduce([1], None)


def test_a_group_that_nobody_holds_any_more_leaves_no_thread(library: FakeAccelerator) -> None:
    with Bench(lambda: ProcessGroupNCCL(backend=library), timeout=GUARD) as bench:
        store = bench.fresh_address()
        pair = [ProcessGroupNCCL(backend=library) for _ in range(2)]
        bench.all(pair, lambda rank, group: group.configure(store, rank, 2))
        pair.clear()
        gc.collect()
        until(lambda: not any(thread.name == "tft-pg-lifeline" for thread in threading.enumerate()))
        library.pull_the_cable()
    until(lambda: len(timer()) == 0)


def test_a_library_that_fails_in_a_call_ends_the_group_for_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = bench.configured(2)

    def broken(*args: object) -> dist.Work:
        raise RuntimeError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")

    for group in groups:
        group.set_timeout(HOUR)
    work = groups[1].allreduce([torch.ones(3)])
    with monkeypatch.context() as patched:
        patched.setattr(fake_backend._FakeGroup, "allreduce", broken)
        error = failure(lambda: groups[0].allreduce([torch.ones(3)]))
    assert isinstance(error, PeerDisconnectedError)
    assert "unhandled system error" in str(error)
    assert isinstance(groups[0].errored(), PeerDisconnectedError)
    assert isinstance(failure(partial(work.wait, HOUR)), PeerDisconnectedError)


_ILLEGAL = "CUDA error: an illegal memory access was encountered"


def _raises_illegal(*args: object) -> bool:
    raise RuntimeError(_ILLEGAL)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(fake_backend._FakeWork, "is_completed"), (fake_backend._FakeCommunicator, "looking")],
    ids=["when it is asked", "before it is asked"],
)
def test_a_device_that_is_broken_ends_the_group(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    """Such an error is raised by every question from then on, also by whether an operation is done."""
    groups = bench.configured(2)
    for group in groups:
        group.set_timeout(HOUR)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, _raises_illegal)
        work = groups[0].allreduce([torch.ones(3)])
        until(lambda: groups[0].errored() is not None)
        assert isinstance(groups[0].errored(), PeerDisconnectedError)
        assert "illegal memory access" in str(groups[0].errored())
        assert isinstance(failure(work.wait), PeerDisconnectedError)
        groups[0].abort()
        assert isinstance(failure(work.wait), AbortedError)  # and not as if it had ended well
        groups[0].shutdown()


def test_an_abort_of_a_device_that_is_broken_leaves_no_operation_that_looks_well(
    bench: Bench, library: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = bench.configured(2)
    library.hold()
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    with monkeypatch.context() as patched:
        # No watch in between: the abort's own look is the first to be told.
        patched.setattr(accelerator._OperationList, "_check", lambda operations: None)
        work = groups[0].allreduce([torch.ones(3)])
        patched.setattr(fake_backend._FakeWork, "is_completed", _raises_illegal)
        begun_s = time.perf_counter()
        groups[0].abort()
        assert isinstance(failure(work.wait), AbortedError)
        groups[0].shutdown()
        assert time.perf_counter() - begun_s < 4.0  # nobody waits for a library that never says that it is over
    assert reported == []


def test_an_abort_is_over_also_when_its_preparations_fail(
    bench: Bench, library: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = bench.configured(1)
    library.hold()
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    with monkeypatch.context() as patched:
        patched.setattr(accelerator._OperationList, "_check", lambda operations: None)
        groups[0].allreduce([torch.ones(3)])
        patched.setattr(accelerator._Operation, "poll", _raises_illegal)
        begun_s = time.perf_counter()
        groups[0].abort()
        groups[0].shutdown()
        assert time.perf_counter() - begun_s < 4.0
    assert [report.exc_type for report in reported] == [RuntimeError]


def test_a_stream_that_can_not_be_ordered_is_an_error_of_that_wait(
    bench: Bench, library: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = bench.configured(2)
    library.hold()
    works = [group.allreduce([torch.ones(3)]) for group in groups]
    with monkeypatch.context() as patched:
        patched.setattr(fake_backend._FakeWork, "block_current_stream", _raises_illegal)
        assert isinstance(failure(works[0].wait), OperationRefusedError)
    library.release()
    assert all(work.wait(GUARD) for work in works)


def test_a_collective_is_no_part_of_a_graph(bench: Bench, library: FakeAccelerator) -> None:
    groups = bench.configured(2)
    library.records = True
    error = failure(lambda: groups[0].allreduce([torch.ones(3)]))
    assert isinstance(error, OperationRefusedError)
    assert "graph" in str(error)
    library.records = False
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait(GUARD))


def test_a_refused_call_leaves_the_group_alone(bench: Bench) -> None:
    groups = bench.configured(2)
    error = failure(lambda: groups[0].send([torch.ones(3)], 0, 0).wait(GUARD))
    assert isinstance(error, OperationRefusedError)
    assert groups[0].errored() is None
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait(GUARD))


# --- a library that does not connect -------------------------------------------------------------------------------


class Stubborn(Communicator, AcceleratorBackend):
    """Hangs in `connect` until it is aborted; it is its own library."""

    def __init__(self) -> None:
        self.connecting = threading.Event()
        self.aborted = threading.Event()

    @property
    def torch_group(self) -> dist.ProcessGroup:
        raise AssertionError("it never connects")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def connect(self) -> None:
        self.connecting.set()
        self.aborted.wait(GUARD_S)
        raise RuntimeError("aborted")

    def looking(self) -> AbstractContextManager[object]:
        return nullcontext()

    def is_recording(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted.set()

    def check(self) -> None:
        return None

    def current_device(self) -> torch.device | None:
        return None

    def communicator(
        self, store: Store, rank: int, world_size: int, device: torch.device | None, limit: timedelta
    ) -> Communicator:
        return self


def stubborn_pair(bench: Bench) -> tuple[Stubborn, list[ProcessGroup]]:
    library = Stubborn()
    return library, [ProcessGroupNCCL(backend=library), ProcessGroupNCCL(backend=library)]


def test_an_abort_ends_a_configure_whose_library_hangs_and_the_peer_hears_of_it(bench: Bench) -> None:
    library, pair = stubborn_pair(bench)
    address = bench.fresh_address()
    waits = [
        bench.start(partial(failure, partial(group.configure, address, rank, 2, timeout=HOUR)))
        for rank, group in enumerate(pair)
    ]
    assert library.connecting.wait(GUARD_S)
    library.aborted.clear()
    pair[0].abort()
    assert isinstance(waits[0]().get(), AbortedError)
    error = waits[1]().get()
    assert isinstance(error, ConfigureError)
    assert library.aborted.is_set()
    for group in pair:
        group.shutdown()


def test_a_library_that_hangs_is_given_up_at_the_deadline(bench: Bench) -> None:
    library, pair = stubborn_pair(bench)
    limit = timedelta(milliseconds=200)
    error = failure(partial(pair[0].configure, bench.fresh_address(), 0, 1, timeout=limit))
    assert isinstance(error, ConfigureError)
    assert library.aborted.is_set()
    for group in pair:
        group.shutdown()


# --- the connections that say nothing ------------------------------------------------------------------------------


def test_a_lifeline_takes_no_stranger_and_cuts_at_both_ends() -> None:
    with Attempt(Where(0, 2), GUARD) as attempt:
        lines = [Lifeline(rank, 2, "127.0.0.1") for rank in range(2)]
        records = [line.record() for line in lines]
        assert records[0] != records[1]
        port = int(records[0].split(b" ")[1])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        strangers[0].sendall(b"\0" * 20)
        strangers[1].sendall(b"short")
        lines[1].connect(records, attempt)
        lines[0].connect(records, attempt)
        for stranger in strangers:
            assert stranger.recv(1) == b""
            stranger.close()
        assert lines[0].disconnected_rank() is None
        cut: list[int] = []
        heard = threading.Event()
        lines[0].watch(lambda rank: (cut.append(rank), heard.set()))  # type: ignore[func-returns-value]
        lines[1].end()
        assert heard.wait(GUARD_S)
        assert cut == [1]
        for line in lines:
            line.end()
            line.settle()


def test_many_silent_strangers_do_not_keep_a_rank_out() -> None:
    with Attempt(Where(0, 2), GUARD) as attempt:
        lines = [Lifeline(rank, 2, "127.0.0.1") for rank in range(2)]
        records = [line.record() for line in lines]
        port = int(records[0].split(b" ")[1])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(lifeline._STRANGERS + 10)]
        lines[1].connect(records, attempt)
        lines[0].connect(records, attempt)
        for stranger in strangers:
            stranger.close()
        for line in lines:
            line.end()


def test_the_kernel_asks_after_a_peer_whose_machine_may_be_gone() -> None:
    with Attempt(Where(0, 2), GUARD) as attempt:
        lines = [Lifeline(rank, 2, "127.0.0.1") for rank in range(2)]
        records = [line.record() for line in lines]
        lines[1].connect(records, attempt)
        lines[0].connect(records, attempt)
        for connection in (lines[0]._peers[1], lines[1]._peers[0]):
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            interval_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            probes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            assert idle_s + interval_s * probes <= 30
            assert 0 < connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
        for line in lines:
            line.end()


@pytest.mark.parametrize("record", [b"", b"no address", b"00 1 x", b"\xff", b"x" * 10_000, b"00" * 16 + b" 99999 ::1"])
def test_a_record_of_something_else_is_an_error_that_names_the_rank(record: bytes) -> None:
    with Attempt(Where(1, 2), GUARD) as attempt:
        line = Lifeline(1, 2, "127.0.0.1")
        with pytest.raises(ConfigureError, match="rank 0"):
            line.connect([record, line.record()], attempt)


def test_a_rank_that_can_not_be_reached_is_named() -> None:
    with Attempt(Where(1, 2), GUARD) as attempt:
        gone, line = Lifeline(0, 2, "127.0.0.1"), Lifeline(1, 2, "127.0.0.1")
        record = gone.record()
        gone.end()
        with pytest.raises(ConfigureError, match=r"rank 0 can't be reached at 127\.0\.0\.1"):
            line.connect([record, line.record()], attempt)


# --- torch's own class ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_by", [ProcessGroupNCCL, ProcessGroupXCCL])
def test_a_torch_without_the_library_is_an_error_in_one_sentence(
    made_by: Callable[[], ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ProcessGroupNCCL", "ProcessGroupXCCL"):
        monkeypatch.delattr(dist, name, raising=False)
    with pytest.raises(
        UnsupportedOperationError, match=r"install a build of torch for .* devices, or use ProcessGroupGloo"
    ):
        made_by()


def test_names_and_devices() -> None:
    assert ProcessGroupNCCL(backend=FakeAccelerator()).getBackendName() == "tft-nccl"
    assert ProcessGroupXCCL(backend=FakeAccelerator()).getBackendName() == "tft-xccl"
    ProcessGroupNCCL(backend=FakeAccelerator(), device=1).shutdown()
    with pytest.raises(ConfigError, match="the device of ProcessGroupNCCL is cpu; pass a cuda device"):
        ProcessGroupNCCL(backend=FakeAccelerator(), device="cpu")


class PerThread(AcceleratorBackend):
    """Has a current device for each thread, the first at first, like CUDA; nothing is in use before `begin`."""

    def __init__(self) -> None:
        self._inner = FakeAccelerator()
        self._threads = threading.local()
        self._begun = False
        self.used: list[torch.device | None] = []

    def begin(self, index: int) -> None:
        self._begun = True
        self._threads.index = index

    def check(self) -> None:
        return None

    def current_device(self) -> torch.device | None:
        return torch.device("cuda", getattr(self._threads, "index", 0)) if self._begun else None

    def communicator(
        self, store: Store, rank: int, world_size: int, device: torch.device | None, limit: timedelta
    ) -> Communicator:
        self.used.append(device)
        return self._inner.communicator(store, rank, world_size, device, limit)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_the_device_is_the_one_of_the_thread_that_makes_or_configures_the_group(
    bench: Bench, device: str | None
) -> None:
    library = PerThread()
    before = ProcessGroupNCCL(GUARD, backend=library, device=device)
    library.begin(3)
    after = ProcessGroupNCCL(GUARD, backend=library, device=device)
    before.configure(bench.fresh_address(), 0, 1)
    library.begin(4)
    for group in (after, before):
        group.configure(bench.fresh_address(), 0, 1)
        group.shutdown()
    assert library.used == [torch.device("cuda", index) for index in (3, 3, 4)]


def test_a_wrong_watchdog_setting_is_said_when_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_WATCHDOG_TIMEOUT_SEC", "soon")
    with pytest.raises(ConfigError, match="TFT_WATCHDOG_TIMEOUT_SEC"):
        ProcessGroupNCCL(backend=FakeAccelerator())


class TorchClass:
    """In the place of torch's class: notes the environment that it is made in, and is Gloo."""

    seen: dict[str, str | None]
    options: Any

    class Options:
        def __init__(self) -> None:
            self._timeout = timedelta(0)
            self.config = type("Config", (), {"blocking": 1})()

    def __new__(cls, store: Store, rank: int, world_size: int, options: Any) -> Any:
        cls.seen = {name: os.environ.get(name) for name in (*NCCL.blocking_wait_envs, NCCL.connect_limit_env)}
        cls.options = options
        return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=10))


class DeviceModule:
    def __init__(self) -> None:
        self.device = nullcontext

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return False


@pytest.fixture
def torch_class(monkeypatch: pytest.MonkeyPatch) -> type[TorchClass]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchClass, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: DeviceModule())
    for name in (*NCCL.blocking_wait_envs, NCCL.connect_limit_env):
        monkeypatch.delenv(name, raising=False)
    # Whatever is set while it runs is taken back.
    monkeypatch.setenv(NCCL.connect_limit_env, "1")
    monkeypatch.delenv(NCCL.connect_limit_env)
    return TorchClass


def test_torchs_watchdog_is_left_out_and_the_environment_stays_as_it_was(
    torch_class: type[TorchClass], caplog: pytest.LogCaptureFixture
) -> None:
    library = TorchLibrary(NCCL)
    library.check()
    assert library.current_device() is None
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            library.communicator(dist.HashStore(), 0, 1, torch.device("cuda", 0), timedelta(seconds=7.5))
    blocking, old_blocking = NCCL.blocking_wait_envs
    assert torch_class.seen == {blocking: "1", old_blocking: None, NCCL.connect_limit_env: "8"}
    assert torch_class.options.config.blocking == 0
    assert blocking not in os.environ
    assert len(caplog.records) == 1  # what was set for the process is said, once
    assert NCCL.connect_limit_env in caplog.text


def test_a_look_from_another_thread_spoils_no_graph(
    torch_class: type[TorchClass], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = [0]  # of the driver: 0 global, 1 of this thread only

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]
        return 0

    monkeypatch.setattr(torch_library, "_capture_mode_exchange", lambda: exchange)
    made = TorchLibrary(NCCL).communicator(dist.HashStore(), 0, 1, torch.device("cuda", 0), HOUR)
    with made.looking():
        assert modes[-1] == 1
    assert modes == [0, 1, 0]
    assert not made.is_recording()


@pytest.mark.parametrize("name", NCCL.blocking_wait_envs)
def test_what_the_user_has_set_is_kept_or_refused(
    torch_class: type[TorchClass], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    library = TorchLibrary(NCCL)
    monkeypatch.setenv(NCCL.connect_limit_env, "99")
    monkeypatch.setenv(name, "true")
    library.check()
    library.communicator(dist.HashStore(), 0, 1, None, HOUR)
    assert torch_class.seen[name] == "true"
    assert torch_class.seen[NCCL.connect_limit_env] == "99"
    monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=f"{name} is '0'"):
        library.check()


# --- on a GPU ------------------------------------------------------------------------------------------------------


def _why_no_gpu() -> str:
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    return "" if torch.cuda.is_available() else "there is no CUDA device here"


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    reason = _why_no_gpu()
    marked: Callable[..., None] = pytest.mark.gpu(
        pytest.mark.timeout(300)(pytest.mark.skipif(bool(reason), reason=reason or "there is one")(test))
    )
    return marked


def on_gpu_in_each_form(test: Callable[..., None]) -> Callable[..., None]:
    """A test of NCCL in this process and of NCCL in a child process."""
    return on_gpu(pytest.mark.parametrize("kind", [ProcessGroupNCCL, ProcessGroupBabyNCCL])(test))


def alone_on_gpu(kind: _Kind) -> ProcessGroup:
    return WaitsOnHost(kind(), device=torch.device("cuda"))


@on_gpu_in_each_form
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_gpu_conformance_of_one_rank(check: Callable[..., None], kind: _Kind) -> None:
    check(Subject(partial(alone_on_gpu, kind), world_sizes=(1,), lacks=NCCL_LACKS))


_Scenario = Callable[["Rank"], None]
_NO_REPORT = "no report in time"


class Rank:
    """One of two processes that share a GPU, inside a scenario.

    Args:
        rank: 0 or 1.
        port: of the store.
        peer: to the other rank, for what must come in order.
        kind: of the group.
    """

    def __init__(self, rank: int, port: int, peer: Connection, kind: _Kind) -> None:
        self.rank = rank
        self._port = port
        self._peer = peer
        self.group = kind(timedelta(seconds=60))

    def configure(self, quorum: int, *, rank: int | None = None, world_size: int = 2) -> None:
        place = self.rank if rank is None else rank
        self.group.configure(format_store_addr("127.0.0.1", self._port, f"quorum/{quorum}"), place, world_size)

    def meet(self) -> None:
        """Go on only when the other one is here, too."""
        self._peer.send(None)
        assert self._peer.poll(120)
        self._peer.recv()

    def reduce(self, expected: float) -> None:
        tensor = torch.ones(1 << 16, device="cuda")
        self.group.allreduce([tensor], ReduceOp.SUM).wait()
        torch.cuda.current_stream().synchronize()
        assert self.group.errored() is None, self.group.errored()
        assert bool((tensor == expected).all())


def _child(scenario: _Scenario, rank: int, port: int, peer: Connection, report: Connection, kind: _Kind) -> None:
    # NCCL takes two ranks on one device only if it thinks that they are on two machines.
    os.environ.update({"NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"})
    torch.cuda.set_device(0)
    me = Rank(rank, port, peer, kind)
    try:
        scenario(me)
        me.group.shutdown()
        report.send("")
    except BaseException as error:
        report.send(f"{type(error).__name__}: {error} {traceback.format_exc()}")
        raise


def play(scenario: _Scenario, kind: _Kind = ProcessGroupNCCL) -> list[str | None]:
    """Run a scenario on two ranks; gives what each has reported, None for one that was killed."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peers = context.Pipe()
    reports = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(
            target=_child, args=(scenario, rank, store.port, peers[rank], reports[rank][1], kind), daemon=True
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        for end in (*peers, *(theirs for _, theirs in reports)):
            end.close()
        found: list[str | None] = [_NO_REPORT] * len(reports)
        waiting = {ours: rank for rank, (ours, _) in enumerate(reports)}
        give_up_s = time.monotonic() + 240
        while waiting and time.monotonic() < give_up_s:
            for ours in wait(list(waiting), timeout=1):
                rank = waiting.pop(ours)  # type: ignore[index]
                try:
                    found[rank] = ours.recv()  # type: ignore[union-attr]
                except EOFError:
                    found[rank] = None
                if found[rank]:  # the other one may wait for this one for ever
                    give_up_s = min(give_up_s, time.monotonic() + GUARD_S)
        return found
    finally:
        for process in processes:
            if process.is_alive():  # else its number may be another's by now: it is the forkserver's child
                process.kill()
            process.join(GUARD_S)
        for ours, _ in reports:
            ours.close()


def _uses_the_result_on_another_stream(me: Rank) -> None:
    me.configure(0)
    for _ in range(20):
        torch.cuda._sleep(10_000_000)  # so that the tensor is not there yet when the operation is started
        tensor = torch.ones(1 << 22, device="cuda")
        work = me.group.allreduce([tensor], ReduceOp.SUM)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work.wait()  # orders the side stream, and no other
            doubled = tensor * 2
        future = me.group.allreduce([torch.full((1 << 22,), 3.0, device="cuda")]).get_future()
        tripled = future.then(lambda done: done.value()[0] / 2).wait()
        side.synchronize()
        assert bool((doubled == 4.0).all())
        assert bool((tripled == 3.0).all())
    assert me.group.errored() is None


@on_gpu_in_each_form
def test_gpu_a_result_is_used_on_another_stream_after_a_wait(kind: _Kind) -> None:
    assert play(_uses_the_result_on_another_stream, kind) == ["", ""]


def _aborts_with_a_missing_peer(me: Rank) -> None:
    me.configure(0)
    me.reduce(2.0)
    me.group.set_timeout(timedelta(seconds=60))
    if me.rank == 0:
        work = me.group.allreduce([torch.ones(1 << 20, device="cuda")])
        work.wait()
        threading.Thread(target=me.group.abort).start()
        torch.cuda.current_stream().synchronize()  # the kernel has left the device
        assert isinstance(me.group.errored(), AbortedError), me.group.errored()
        assert isinstance(failure(work.wait), AbortedError)
        me.meet()
    else:
        me.meet()
        error = failure(lambda: me.group.allreduce([torch.ones(1 << 20, device="cuda")]).wait(GUARD))
        assert isinstance(error, PeerDisconnectedError), error
    me.configure(1)
    me.reduce(2.0)


@on_gpu_in_each_form
def test_gpu_an_abort_ends_a_kernel_whose_peer_is_missing(kind: _Kind) -> None:
    assert play(_aborts_with_a_missing_peer, kind) == ["", ""]


def _times_out(me: Rank) -> None:
    me.configure(0)
    me.reduce(2.0)
    if me.rank == 0:
        me.group.set_timeout(timedelta(seconds=1))
        me.group.allreduce([torch.ones(1 << 20, device="cuda")]).wait()
        torch.cuda.current_stream().synchronize()
        assert isinstance(me.group.errored(), CollectiveTimeoutError), me.group.errored()
    me.meet()
    me.configure(1)
    me.reduce(2.0)


@on_gpu_in_each_form
def test_gpu_a_late_operation_is_ended_and_the_process_lives(kind: _Kind) -> None:
    assert play(_times_out, kind) == ["", ""]


def _dies(me: Rank) -> None:
    me.configure(0)
    me.reduce(2.0)
    me.group.set_timeout(HOUR)
    if me.rank == 1:
        me.meet()
        os.kill(os.getpid(), signal.SIGKILL)
    me.group.allreduce([torch.ones(1 << 20, device="cuda")]).wait()
    me.meet()
    torch.cuda.current_stream().synchronize()
    assert isinstance(me.group.errored(), PeerDisconnectedError), me.group.errored()
    me.configure(1, rank=0, world_size=1)
    me.reduce(1.0)


@on_gpu_in_each_form
def test_gpu_a_killed_peer_fails_the_kernel(kind: _Kind) -> None:
    assert play(_dies, kind) == ["", None]


def _reconfigures(me: Rank) -> None:
    for quorum in range(10):
        me.configure(quorum, rank=(me.rank + quorum) % 2)
        me.reduce(2.0)
        me.meet()


@on_gpu_in_each_form
def test_gpu_ten_reconfigurations(kind: _Kind) -> None:
    assert play(_reconfigures, kind) == ["", ""]


def _records_a_graph(me: Rank) -> None:
    me.configure(me.rank, rank=0, world_size=1)
    tensor = torch.ones(4, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(1_000_000_000)  # so that the operation is on the list all the while
    work = me.group.allreduce([torch.ones(4, device="cuda")])
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
        doubled = tensor * 2
        time.sleep(10 * accelerator._CHECK_S)
        assert isinstance(failure(lambda: me.group.allreduce([tensor])), OperationRefusedError)
        graph.capture_end()
        graph.replay()
    side.synchronize()
    assert doubled.tolist() == [2.0] * 4
    assert work.wait(GUARD)
    assert me.group.errored() is None


@on_gpu_in_each_form
def test_gpu_the_watch_spoils_no_graph_that_is_recorded(kind: _Kind) -> None:
    assert play(_records_a_graph, kind) == ["", ""]


def _tries_every_combination(me: Rank) -> None:
    me.configure(0)
    group = WaitsOnHost(me.group, device=torch.device("cuda"))
    refused = failure(lambda: me.group.recv_anysource([torch.ones(1, device="cuda")], 0))
    assert isinstance(refused, OperationRefusedError), refused
    faults = []
    for case in CASES:
        if case.row == "recv_anysource":
            continue  # it is refused, but its sends would wait for ever
        for dtype in DTYPES if case.sends else (torch.float32,):
            for op in REDUCTIONS if case.reduces else ("SUM",):
                error = computing._tried(group, case, Sample(me.rank, 2, dtype, op=op))
                if error is None and case.row not in NCCL_LACKS:
                    continue
                words = str(error)
                named = str(dtype).removeprefix("torch.") in words or op in words or case.row in NCCL_LACKS
                if not isinstance(error, OperationRefusedError) or not named:
                    faults.append(f"{case.row} of {dtype}, {op}: {error!r}")
    assert not faults, faults
    me.reduce(2.0)


@on_gpu_in_each_form
def test_gpu_two_ranks_agree_in_every_combination_or_refuse_it_alike(kind: _Kind) -> None:
    assert play(_tries_every_combination, kind) == ["", ""]


def _uses_torchs_functions(me: Rank) -> None:
    me.configure(0)
    group = WaitsOnHost(me.group, device=torch.device("cuda"))
    for name, form in computing._FUNCTIONS.items():
        for got, expected in form(group, Sample(me.rank, 2)):
            agree(got, expected)
        assert group.errored() is None, name


@on_gpu_in_each_form
def test_gpu_two_ranks_use_torchs_functions(kind: _Kind) -> None:
    assert play(_uses_torchs_functions, kind) == ["", ""]


def _gives_a_tensor_on_the_cpu(me: Rank) -> None:
    me.configure(me.rank, rank=0, world_size=1)
    error = failure(lambda: me.group.allreduce([torch.ones(3)]))
    assert isinstance(error, OperationRefusedError), error
    assert "cpu" in str(error).lower()
    me.reduce(1.0)


@on_gpu_in_each_form
def test_gpu_a_tensor_on_the_cpu_is_refused(kind: _Kind) -> None:
    assert play(_gives_a_tensor_on_the_cpu, kind) == ["", ""]


def _loses_its_child(me: Rank) -> None:
    me.configure(0)
    me.reduce(2.0)
    me.group.set_timeout(HOUR)
    for quorum in range(1, 4):
        if me.rank == 0:
            assert isinstance(me.group, ProcessGroupBabyNCCL)
            assert me.group.child_pid is not None
            me.group.allreduce([torch.ones(1 << 20, device="cuda")]).wait()
            begun_s = time.monotonic()
            os.kill(me.group.child_pid, signal.SIGKILL)
            torch.cuda.current_stream().synchronize()  # its stream waits for a dead process no more
            assert time.monotonic() - begun_s < 2.0
            assert isinstance(me.group.errored(), CommunicatorFailedError), me.group.errored()
            me.meet()
        else:
            me.meet()
            error = failure(lambda: me.group.allreduce([torch.ones(1 << 20, device="cuda")]).wait(GUARD))
            assert isinstance(error, PeerDisconnectedError), error
        me.configure(quorum)
        me.reduce(2.0)


@on_gpu
def test_gpu_a_stream_goes_on_when_the_child_it_waits_for_is_killed() -> None:
    assert play(_loses_its_child, ProcessGroupBabyNCCL) == ["", ""]


def _gives_memory_that_can_not_be_shared(me: Rank) -> None:
    me.configure(me.rank, rank=0, world_size=1)
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    error = failure(lambda: me.group.allreduce([torch.ones(1 << 24, device="cuda")]))
    assert isinstance(error, OperationRefusedError), error
    assert "unset expandable_segments" in str(error)


@on_gpu
def test_gpu_memory_that_can_not_be_shared_with_a_child_is_refused() -> None:
    assert play(_gives_memory_that_can_not_be_shared, ProcessGroupBabyNCCL) == ["", ""]
