"""The wrappers one by one: what each adds, and that nothing of it outlives a configure."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ReduceOp  # type: ignore[attr-defined]

from tft_pg import (
    COLLECTIVES,
    AbortedError,
    Collective,
    CollectiveTimeoutError,
    ConfigError,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    NotConfiguredError,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupClosedError,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    UnsupportedOperationError,
)
from tft_pg.testing import Bench
from tft_pg.testing.cases import CASES, Case, Sample

HOUR = timedelta(hours=1)


def swallowing() -> ErrorSwallowingProcessGroupWrapper:
    return ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo())


def stack() -> ProcessGroup:
    return ProcessGroupWrapper(ErrorSwallowingProcessGroupWrapper(FakeProcessGroupWrapper(ProcessGroupGloo())))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(swallowing) as bench:
        yield bench


# --- the table is torch's ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", COLLECTIVES, ids=lambda row: row.name)
def test_a_row_knows_every_keyword_of_torchs(row: Collective) -> None:
    """From the signatures that pybind11 writes; a parameter that has no name there is given by position only."""
    for name in (row.name, *row.aliases):
        words = getattr(dist.ProcessGroup, name).__doc__ or ""
        forms = re.findall(rf"{name}\(self: [\w.]+(.*)\) -> ", words)
        assert forms, f"torch writes no signature of {name}"
        for form in forms:
            keywords = [keyword for keyword in re.findall(r", (\w+): ", form) if not re.fullmatch(r"arg\d", keyword)]
            for place, keyword in enumerate(keywords):
                assert keyword in row.parameters[place], f"{name} has {keyword} at {place}"


# --- swallowing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.row)
def test_after_an_error_every_collective_is_a_finished_dummy(case: Case) -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupDummy())
    group.report_error(PeerDisconnectedError("asked for"))
    started = case.start(group, Sample(0, 1))
    for work in started.works:
        assert work.wait()
        assert work.wait(timedelta(seconds=1))
        assert work.is_completed()
        assert work.get_future().done()
    assert "asked for" in str(group.error())
    group.configure("anywhere:1/x", 0, 1)
    assert group.error() is None
    for work in case.start(group, Sample(0, 1)).works:
        assert work.wait()


def test_an_error_while_others_are_in_flight_ends_them_all(bench: Bench) -> None:
    groups = bench.configured(2)
    for group in groups:
        group.set_timeout(HOUR)
    first, second, third = (groups[0].allreduce([torch.ones(3)]) for _ in range(3))
    future = second.get_future()
    waiting = bench.start(first.wait)
    groups[1].abort()
    assert waiting().get() is False
    assert len(future.wait()) == 1  # the tensors as they are
    assert third.wait() is False
    assert isinstance(groups[0].error(), PeerDisconnectedError)  # type: ignore[attr-defined]
    assert groups[0].allreduce([torch.ones(3)]).wait()
    bench.configure(groups)
    assert bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait()) == [True, True]


def test_a_late_error_of_an_old_group_is_not_the_new_ones(bench: Bench) -> None:
    groups = bench.configured(2)
    old = groups[0].allreduce([torch.ones(3)])
    bench.configure(groups)
    assert old.wait() is False
    assert [group.error() for group in groups] == [None, None]  # type: ignore[attr-defined]


def test_a_wait_whose_time_out_passes_is_an_error(bench: Bench) -> None:
    groups = bench.configured(2)
    assert groups[0].allreduce([torch.ones(3)]).wait(timedelta(milliseconds=10)) is False
    assert isinstance(groups[0].error(), CollectiveTimeoutError)  # type: ignore[attr-defined]


def test_a_call_that_is_wrong_in_itself_is_not_swallowed(bench: Bench) -> None:
    (group,) = bench.configured(1)
    with pytest.raises(OperationRefusedError, match="int16"):
        group.allreduce([torch.ones(3, dtype=torch.int16)])
    assert group.error() is None  # type: ignore[attr-defined]
    assert group.allreduce([torch.ones(3)]).wait()


def test_a_report_from_another_thread_locks_nothing_up(bench: Bench) -> None:
    groups = bench.configured(2)
    reported = threading.Event()

    def report(future: torch.futures.Future[object]) -> None:
        for group in groups:
            group.report_error(PeerDisconnectedError("from a callback"))  # type: ignore[attr-defined]
        reported.set()

    works = bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]))
    works[0].get_future().add_done_callback(report)
    assert reported.wait(20)
    assert all(work.wait() for work in works)
    assert [group.allreduce([torch.ones(3)]).wait() for group in groups] == [True, True]


def test_after_an_error_nothing_of_a_work_raises(bench: Bench) -> None:
    groups = bench.configured(2)
    tensor = torch.ones(3)
    work = groups[0].allreduce([tensor])
    groups[1].abort()
    assert work.wait() is False
    work.synchronize()
    assert work.is_completed()
    assert work.result() == work.get_future().wait() == [tensor]
    assert isinstance(groups[0].error(), PeerDisconnectedError)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [ValueError, KeyError, PeerDisconnectedError])
@pytest.mark.parametrize("through_future", [False, True])
def test_an_error_of_any_kind_is_swallowed(kind: type[Exception], through_future: bool) -> None:
    faulty = FakeProcessGroupWrapper(ProcessGroupDummy())
    group = ErrorSwallowingProcessGroupWrapper(faulty)
    faulty.fail(error=kind("asked for"))
    tensor = torch.ones(1)
    work = group.allreduce([tensor])
    if through_future:
        assert work.get_future().wait() == [tensor]
    else:
        assert work.wait() is False
    assert kind.__name__ in repr(group.error())  # a future has nothing but an error's text


def test_a_wait_for_a_number_of_seconds_is_the_callers_mistake() -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupDummy())
    with pytest.raises(ConfigError, match="pass timedelta"):
        group.allreduce([torch.ones(1)]).wait(5)  # type: ignore[arg-type]
    assert group.error() is None


def test_a_future_of_a_receive_is_refused_and_no_error_of_the_group(bench: Bench) -> None:
    groups = bench.configured(2)
    for group in (groups[0], groups[0].parent):
        assert group is not None
        work = group.recv([torch.zeros(1)], 1, 0)
        with pytest.raises(UnsupportedOperationError, match="has no future; call wait"):
            work.get_future()
        groups[1].send([torch.ones(1)], 0, 0).wait()
        assert work.wait()
    assert groups[0].error() is None  # type: ignore[attr-defined]


# --- receiving from anybody ----------------------------------------------------------------------------------------


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("make", [ProcessGroupGloo, swallowing, stack])
def test_torchs_recv_from_anybody(make: Callable[[], ProcessGroup]) -> None:
    with Bench(make) as bench:
        groups = bench.configured(2)
        groups[1].register("anybody")
        tensor = torch.zeros(1)
        sent = groups[0].send([torch.full((1,), 5.0)], 1, 0)
        assert dist.recv(tensor, group=groups[1]) == 0
        assert sent.wait()
        assert tensor.item() == 5
        work = groups[1].recv_anysource([tensor], 0)
        groups[0].send([torch.ones(1)], 1, 0).wait()
        work.wait()
        assert work._source_rank() == work.source_rank() == 0
        groups[1].unregister()


@pytest.mark.usefixtures("default_group")
def test_torchs_recv_from_anybody_does_not_raise_what_was_swallowed(bench: Bench) -> None:
    groups = bench.configured(2)
    groups[1].register("anybody")
    receiving = bench.start(lambda: dist.recv(torch.zeros(1), group=groups[1]))
    groups[0].abort()
    assert receiving().get() == 0
    assert isinstance(groups[1].error(), PeerDisconnectedError)  # type: ignore[attr-defined]
    assert dist.recv(torch.zeros(1), group=groups[1]) == 0
    groups[1].unregister()


# --- faults that are asked for -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("through_future", [False, True])
def test_a_corrupted_result_is_wrong_without_a_word(dtype: torch.dtype, through_future: bool) -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.corrupt(nth=2, operation="allreduce")
    tensors = [torch.ones(2, 2, dtype=dtype) for _ in range(3)]
    for tensor in tensors:
        work = group.allreduce([tensor], ReduceOp.MAX)
        if through_future:
            work.get_future().wait()
        assert work.wait()
        assert work.wait()
    good, bad, later = ((tensor == 1).tolist() for tensor in tensors)
    assert good == later == [[True, True], [True, True]]
    assert bad == [[False, True], [True, True]]


def test_only_calls_with_a_result_can_be_corrupted() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.corrupt()
    group.barrier().wait()
    group.allreduce([torch.zeros(0)]).wait()
    output = torch.zeros(1)
    group.allgather([[output]], [torch.zeros(1)]).wait()
    assert output.item() == 1
    for operation in ("barrier", "send"):
        with pytest.raises(ConfigError, match="fills in no tensor"):
            group.corrupt(operation=operation)


def test_a_corrupted_allreduce_is_corrupted_on_one_rank() -> None:
    with Bench(lambda: FakeProcessGroupWrapper(ProcessGroupGloo())) as bench:
        groups = bench.configured(2)
        groups[1].corrupt(operation="allreduce")  # type: ignore[attr-defined]

        def reduce(rank: int, group: ProcessGroup) -> list[float]:
            tensor = torch.ones(2)
            group.allreduce([tensor]).wait()
            return list(tensor.tolist())

        assert bench.all(groups, reduce) == [[2.0, 2.0], [-2.0, 2.0]]
        assert [group.errored() for group in groups] == [None, None]


def test_a_corrupted_result_is_wrong_as_soon_as_the_work_says_that_it_has_ended() -> None:
    with Bench(lambda: FakeProcessGroupWrapper(ProcessGroupGloo())) as bench:
        groups = bench.configured(2)
        groups[1].corrupt()  # type: ignore[attr-defined]
        tensors = [torch.ones(2), torch.ones(2)]
        other, work = (group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True))
        assert other.wait()
        while not work.is_completed():
            pass
        assert tensors[1].tolist() == [-2.0, 2.0]


def test_a_result_that_never_came_is_not_touched() -> None:
    with Bench(lambda: FakeProcessGroupWrapper(swallowing())) as bench:
        groups = bench.configured(2)
        groups[0].corrupt()  # type: ignore[attr-defined]
        tensor = torch.ones(2)
        work = groups[0].allreduce([tensor])
        groups[1].abort()
        assert work.wait() is False
        left = tensor.tolist()
        assert left != [-1.0, 1.0]


ARM: dict[str, Callable[[FakeProcessGroupWrapper], None]] = {
    "fail": lambda group: group.fail(),
    "hang": lambda group: group.hang(),
    "delay": lambda group: group.delay(seconds=HOUR.total_seconds()),
    "corrupt": lambda group: group.corrupt(),
}


@pytest.mark.parametrize("fault", ARM)
def test_a_group_that_can_not_be_used_says_so_before_any_fault(fault: str) -> None:
    with Bench(lambda: FakeProcessGroupWrapper(ProcessGroupGloo())) as bench:
        group = bench.make()
        assert isinstance(group, FakeProcessGroupWrapper)
        ends: list[tuple[Callable[[], None], type[Exception]]] = [
            (lambda: None, NotConfiguredError),
            (group.abort, AbortedError),
            (group.shutdown, ProcessGroupClosedError),
        ]
        for end, kind in ends:
            ARM[fault](group)
            end()
            with pytest.raises(kind, match="allreduce"):
                group.allreduce([torch.ones(1)])
            if kind is AbortedError:
                bench.configure([group])


def test_a_fault_waits_for_a_group_that_can_be_used() -> None:
    with Bench(lambda: FakeProcessGroupWrapper(ProcessGroupGloo())) as bench:
        (group,) = bench.configured(1)
        assert isinstance(group, FakeProcessGroupWrapper)
        group.fail()
        with pytest.raises(PeerDisconnectedError, match="injected"):
            group.allreduce([torch.ones(1)]).wait()
        assert group.allreduce([torch.ones(1)]).wait()


@pytest.mark.parametrize(("patience", "limit"), [(HOUR, timedelta(milliseconds=1)), (timedelta(milliseconds=1), HOUR)])
def test_the_shorter_time_out_bounds_a_hanging_call(patience: timedelta, limit: timedelta) -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy(), timeout=patience)
    group.set_timeout(limit)
    group.hang()
    with pytest.raises(CollectiveTimeoutError, match=r"hung for 0\.001 s"):
        group.allreduce([torch.ones(1)]).wait()


def test_configure_forgets_a_corruption() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.corrupt()
    group.configure("anywhere:1/x", 0, 1)
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    assert tensor.item() == 1


# --- the rest ------------------------------------------------------------------------------------------------------


def test_a_wrapper_takes_its_group_by_either_way() -> None:
    inner = ProcessGroupDummy(0, 1)
    for wrapper in (ProcessGroupWrapper, ErrorSwallowingProcessGroupWrapper, FakeProcessGroupWrapper):
        assert wrapper(inner).parent is wrapper(pg=inner).parent is inner


SECOND = timedelta(seconds=1)
WRAPPERS: tuple[Any, ...] = (ProcessGroupWrapper, ErrorSwallowingProcessGroupWrapper, FakeProcessGroupWrapper)
GROUPS: dict[str, Callable[[], Any]] = {
    "gloo": ProcessGroupGloo,
    "dummy": ProcessGroupDummy,
    "wrapped": lambda: ProcessGroupWrapper(ProcessGroupDummy()),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_says_how_it_is_made(wrapper: Any) -> None:
    inner = ProcessGroupDummy()
    for args, kwargs in (
        ((SECOND, inner), {}),
        ((SECOND,), {"pg": inner}),
        ((ProcessGroupGloo,), {}),
        ((None,), {}),
        ((), {}),
    ):
        with pytest.raises(ConfigError, match=rf"write {wrapper.__name__}\(ProcessGroupGloo\(timeout="):
            wrapper(*args, **kwargs)


@pytest.mark.parametrize("make", GROUPS.values(), ids=GROUPS)
def test_a_group_says_how_it_is_configured_and_aborted(make: Callable[[], Any]) -> None:
    group = make()
    for place in (("replica_0", 0, 1), ("0", "1"), (0, 1, "replica_0")):
        with pytest.raises(ConfigError, match="store_addr, rank and world_size in this order"):
            group.configure("localhost:1/x", *place)
    with pytest.raises(ConfigError, match="because an aborted group needs a new configure"):
        group.abort(errored=False)
    assert group.errored() is None
    group.abort(errored=True)
    assert isinstance(group.errored(), AbortedError)
    with pytest.raises(ConfigError, match=r"the timeout is 5; pass timedelta\(seconds="):
        group.set_timeout(5)
    group.shutdown()


def test_a_time_out_is_a_timedelta() -> None:
    makers: tuple[Callable[[Any], object], ...] = (
        lambda timeout: ProcessGroupGloo(timeout=timeout),
        lambda timeout: FakeProcessGroupWrapper(ProcessGroupDummy(), timeout=timeout),
    )
    for make in makers:
        with pytest.raises(ConfigError, match=r"the timeout is 5.0; pass timedelta\(seconds="):
            make(5.0)


@pytest.mark.parametrize("place", [(1, 2), (0, 2), (1, 1), (-1, 1)])
def test_a_dummy_is_rank_0_of_1(place: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="rank 0 of 1"):
        ProcessGroupDummy(*place)


def test_a_dummy_says_what_it_can_not_compute() -> None:
    with pytest.raises(OperationRefusedError, match="PREMUL_SUM"):
        ProcessGroupDummy().allreduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
