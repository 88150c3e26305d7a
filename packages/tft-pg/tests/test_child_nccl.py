"""ProcessGroupBabyNCCL: over a device without a device, and, with `-m gpu`, over NCCL; why there is no XCCL form."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from tft_pg import (
    AbortedError,
    CollectiveTimeoutError,
    CommunicatorFailedError,
    ConfigError,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
    ProcessGroupError,
    UnsupportedOperationError,
)
from tft_pg.child import accelerator, cuda_memory
from tft_pg.child.device import CALLS_MAX, Place
from tft_pg.child.nursery import NURSERY
from tft_pg.child.segments import strided_view
from tft_pg.testing import CHECKS, GLOO_LACKS, Bench, FakeMemory, Subject, WaitsOnHost
from tft_pg.testing.dying import every_death_at_every_point

GUARD: Final = timedelta(seconds=20)
HOUR: Final = timedelta(hours=1)
HANGS_AT_MOST_S: Final = 0.5


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + GUARD.total_seconds()
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[None]:
    yield
    NURSERY.end()


@pytest.fixture
def memories() -> list[FakeMemory]:
    return []


@pytest.fixture
def bench(memories: list[FakeMemory]) -> Iterator[Bench]:
    """Groups whose memories are listed in the order in which they are made."""

    def make_memory() -> FakeMemory:
        memories.append(FakeMemory())
        return memories[-1]

    with Bench(lambda: ProcessGroupBabyNCCL(make_memory=make_memory), timeout=GUARD) as bench:
        yield bench


def failure(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except ProcessGroupError as error:
        return error
    return None


def child_of(group: ProcessGroup) -> int:
    pid = group.child_pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


def reduce(group: ProcessGroup) -> list[float]:
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait(GUARD)
    return tensor.tolist()


# --- the contract ---------------------------------------------------------------------------------------------------


def fake() -> ProcessGroup:
    return WaitsOnHost(ProcessGroupBabyNCCL(make_memory=FakeMemory))


@pytest.mark.in_parts
@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check is not every_death_at_every_point], ids=lambda check: check.__name__
)
def test_it_keeps_the_contract(check: Callable[[Subject], None]) -> None:
    # Which types can be combined with which reductions is decided in the fake's Gloo, in a group of any size.
    sizes = {"every_combination_agrees_or_is_refused": (1,), "every_layout_agrees_or_is_refused": (2,)}
    check(Subject(fake, world_sizes=sizes.get(check.__name__, (1, 2, 3)), lacks=GLOO_LACKS))


@pytest.mark.in_parts
def test_it_keeps_the_contract_in_every_death_of_a_peer() -> None:
    every_death_at_every_point(Subject(fake, lacks=GLOO_LACKS), rows=("allreduce",))


# --- the stream's order ---------------------------------------------------------------------------------------------


def test_a_wait_orders_the_stream_and_a_wait_with_a_limit_holds_up_the_host(
    bench: Bench, memories: list[FakeMemory]
) -> None:
    group = bench.make()
    others = [bench.make()]
    bench.configure([group, *others])
    memory = memories[0] if group._sharing._memory is memories[0] else memories[1]  # type: ignore[attr-defined]
    tensor = torch.ones(3)
    work = group.allreduce([tensor])
    assert work.wait()  # although the peer is missing
    assert not work.is_completed()
    assert memory.ordered == memory.flagged
    assert len(memory.ordered) == 1
    assert isinstance(failure(lambda: work.wait(timedelta(milliseconds=20))), CollectiveTimeoutError)
    assert reduce(others[0]) == [2.0] * 3
    assert work.wait(GUARD)
    assert tensor.tolist() == [2.0] * 3
    assert work.is_completed()
    assert work.wait()
    assert len(memory.ordered) == 1  # a device that is done needs no order


def test_a_barrier_holds_up_the_host(bench: Bench) -> None:
    groups = bench.configured(2)
    waiting = bench.start(groups[0].barrier().wait)
    works = [groups[0].allreduce([torch.ones(3)])]
    assert not works[0].is_completed()
    groups[1].barrier().wait()
    assert waiting().get()


def test_the_child_works_on_the_callers_tensors(bench: Bench) -> None:
    groups = bench.configured(2)
    base = torch.arange(24.0).view(4, 6)
    mine, theirs = base[1:3], torch.ones(6, 6)[2:4]
    bench.all(groups, lambda rank, group: group.broadcast([(mine, theirs)[rank]]).wait(GUARD))
    assert torch.equal(theirs, mine)
    assert torch.equal(base, torch.arange(24.0).view(4, 6))
    empty = [torch.empty(0, 3) for _ in groups]
    bench.all(groups, lambda rank, group: group.allreduce([empty[rank]]).wait(GUARD))


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.in_parts
@pytest.mark.parametrize("times", [20])
def test_a_trainer_outlives_the_deaths_of_its_child_and_its_streams_go_on(
    bench: Bench, memories: list[FakeMemory], times: int
) -> None:
    groups = [bench.make() for _ in range(2)]
    for _ in range(times):
        bench.configure(groups)
        for group in groups:
            group.set_timeout(HOUR)
        lent = groups[0]._sharing._memory  # type: ignore[attr-defined]
        work = groups[0].allreduce([torch.ones(3)])
        assert work.wait()
        begun_s = time.monotonic()
        os.kill(child_of(groups[0]), signal.SIGKILL)
        assert isinstance(failure(lambda work=work: work.wait(GUARD)), CommunicatorFailedError)  # type: ignore[misc]
        assert time.monotonic() - begun_s < HANGS_AT_MOST_S
        assert isinstance(groups[0].errored(), CommunicatorFailedError)
        until(lambda lent=lent: lent.released >= 2, "its streams wait")  # type: ignore[misc]
        assert isinstance(failure(lambda: reduce(groups[1])), PeerDisconnectedError)
    bench.configure(groups)
    assert bench.all(groups, lambda rank, group: reduce(group)) == [[2.0] * 3] * 2


def test_errored_asks_the_child_while_an_operation_may_still_fail(bench: Bench) -> None:
    """The stream may be past the operation before the child reports its failure."""
    groups = bench.configured(2)
    groups[0].set_timeout(HOUR)
    assert groups[0].allreduce([torch.ones(3)]).wait()
    assert groups[0].errored() is None
    groups[1].shutdown()
    until(lambda: groups[0].errored() is not None, "nobody noticed")
    assert isinstance(groups[0].errored(), PeerDisconnectedError)


def test_an_abort_ends_the_operations_and_the_child_before_it_returns(bench: Bench) -> None:
    groups = bench.configured(2)
    for group in groups:
        group.set_timeout(HOUR)
    pid = child_of(groups[0])
    work = groups[0].allreduce([torch.ones(1 << 20)])
    assert work.wait()
    os.kill(pid, signal.SIGSTOP)
    groups[0].abort()
    assert not _runs(pid)  # else it could write into a tensor that is already used for something else
    assert isinstance(failure(lambda: work.wait(GUARD)), AbortedError)
    assert isinstance(failure(lambda: work.wait()), AbortedError)


def _runs(pid: int) -> bool:
    """Return whether a process runs; a killed one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_an_operation_that_the_child_refuses_fails_in_its_wait(bench: Bench) -> None:
    group = bench.configured(1)[0]
    work = group.allreduce([torch.ones(3), torch.ones(3)])
    assert isinstance(failure(work.wait), OperationRefusedError)
    assert group.errored() is None
    assert reduce(group) == [1.0] * 3


def test_memory_that_the_child_can_not_map_ends_the_group(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = bench.configured(2)
    monkeypatch.setattr(FakeMemory, "place", lambda self, tensor: Place(0, f"{os.getpid()}:99999:12", 0))
    work = groups[0].allreduce([torch.ones(3)])
    error = failure(work.wait)
    assert isinstance(error, CommunicatorFailedError)
    assert "can't map the memory" in str(error)
    assert isinstance(groups[0].errored(), CommunicatorFailedError)


def test_there_is_a_limit_for_calls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "CALLS_MAX", 2)
    groups = bench.configured(2)
    works = [groups[0].allreduce([torch.ones(3)]) for _ in range(2)]
    error = failure(lambda: groups[0].allreduce([torch.ones(3)]))
    assert isinstance(error, OperationRefusedError)
    assert "wait for some" in str(error)
    for _ in works:
        reduce(groups[1])
    for work in works:
        work.wait(GUARD)


def test_a_tensor_elsewhere_is_refused(bench: Bench) -> None:
    group = bench.configured(1)[0]
    assert isinstance(failure(lambda: group.allreduce([torch.ones(3, device="meta")])), OperationRefusedError)
    assert group.errored() is None


# --- the driver's calls ---------------------------------------------------------------------------------------------


class FakeDriver:
    """The driver of a device whose memory is this process's. Streams do at once what they are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []  # stream, address and value of each write and wait
        self.buffers: dict[int, tuple[int, int]] = {}  # number and size by address

    def lend(self, tensor: torch.Tensor) -> None:
        self.buffers[tensor.data_ptr()] = (len(self.buffers), tensor.nbytes)

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: object) -> int:
        context._obj.value = 1
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        return 0

    def cuCtxPopCurrent_v2(self, context: object) -> int:
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        stream._obj.value = OWN_STREAM
        return 0

    def cuPointerGetAttribute(self, found: Any, kind: int, pointer: int) -> int:
        start = max(address for address in self.buffers if address <= pointer)
        number, size = self.buffers[start]
        names = {"_BUFFER_ID": number, "_RANGE_START": start, "_RANGE_SIZE": size}
        found._obj.value = next(value for name, value in names.items() if getattr(cuda_memory, name) == kind)
        return 0

    def cuIpcGetMemHandle(self, handle: Any, start: int) -> int:
        handle._obj.data = str(start).encode()
        return 0

    def cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: int) -> int:
        pointer._obj.value = int(handle.data)
        return 0

    def cuStreamWriteValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append((stream, address, value))
        ctypes.c_uint32.from_address(address).value = value
        return 0

    def cuStreamWaitValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append((stream, address, value))
        return 0 if ctypes.c_uint32.from_address(address).value >= value else 999  # it would wait


OWN_STREAM: Final = 7
CURRENT_STREAM: Final = 3


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = FakeDriver()

    def new_flags(index: int, own_stream: int) -> torch.Tensor:
        assert own_stream == OWN_STREAM
        flags = torch.zeros(CALLS_MAX + 1, dtype=torch.int32)
        flags.record_stream = lambda stream: None  # type: ignore[method-assign]
        driver.lend(flags)
        return flags

    def bytes_at(pointer: int, size: int, index: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=torch.uint8)

    for name, fake in (("_driver", lambda: driver), ("_new_flags", new_flags), ("_bytes_at", bytes_at)):
        monkeypatch.setattr(cuda_memory, name, fake)
    monkeypatch.setattr(cuda_memory.CudaMemory, "fault", lambda self, tensor: "")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=CURRENT_STREAM))
    for cached in (cuda_memory._context, cuda_memory._own_stream):
        cached.cache_clear()
    yield driver
    for cached in (cuda_memory._context, cuda_memory._own_stream):
        cached.cache_clear()


def both_sides() -> tuple[cuda_memory.CudaMemory, cuda_memory.MappedCudaMemory]:
    ours = cuda_memory.CudaMemory(0)
    settings = json.loads(json.dumps(ours.settings()))
    return ours, cuda_memory.MappedCudaMemory(settings["device"], settings["flags"])


@pytest.mark.parametrize("number", [0, 1, CALLS_MAX - 1, CALLS_MAX, 5 * CALLS_MAX + 3])
def test_the_flags_order_the_streams_of_both_sides(driver: FakeDriver, number: int) -> None:
    ours, theirs = both_sides()
    with pytest.raises(RuntimeError, match="999"):
        theirs.order_after(number)  # the tensors are not ready
    ours.set_flag(number)
    theirs.order_after(number)
    with pytest.raises(RuntimeError, match="999"):
        ours.order_after(number)  # the child has not passed it
    theirs.set_passed(number)
    ours.order_after(number)
    assert {stream for stream, _, _ in driver.calls} == {CURRENT_STREAM}


def test_a_release_ends_every_wait_for_the_child(driver: FakeDriver) -> None:
    ours, theirs = both_sides()
    theirs.set_passed(3)
    ours.release()
    assert driver.calls[-1][0] == OWN_STREAM  # the others wait
    ours.order_after(123_456)


def test_the_child_maps_each_allocation_once_and_finds_the_tensor(driver: FakeDriver) -> None:
    ours, theirs = both_sides()
    base = torch.arange(100.0)
    driver.lend(base)
    for tensor in (base[10:20], base[30:40]):
        place = ours.place(tensor)
        mapped = theirs.map(place.buffer, place.handle)
        assert torch.equal(strided_view(mapped, place.offset, tensor.dtype, [10], [1]), tensor)
        assert theirs.map(place.buffer, place.handle) is mapped


# --- what can not be made -------------------------------------------------------------------------------------------


def test_xccl_says_why_it_can_not_be() -> None:
    with pytest.raises(UnsupportedOperationError, match="use ProcessGroupXCCL"):
        ProcessGroupBabyXCCL()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_without_nccl_the_error_says_what_to_install() -> None:
    with pytest.raises(UnsupportedOperationError, match="built without NCCL"):
        ProcessGroupBabyNCCL()


def test_a_device_of_another_kind_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="pass a cuda device"):
        ProcessGroupBabyNCCL(device="cpu", make_memory=FakeMemory)
