"""Groups in a child process: the published contract, and a trainer that outlives every death of its child."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from tft_pg import (
    AbortedError,
    CommunicatorFailedError,
    ConfigError,
    ConfigureError,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupClosedError,
    ProcessGroupError,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from tft_pg.child import gloo
from tft_pg.child import link as links
from tft_pg.child.nursery import NURSERY
from tft_pg.child.segments import Pool
from tft_pg.testing import CHECKS, GLOO_LACKS, Bench, Subject, end_children, fork_child
from tft_pg.testing.computing import every_combination_agrees_or_is_refused
from tft_pg.testing.dying import every_death_at_every_point
from tft_pg.testing.forking import FORKS

GUARD: Final = timedelta(seconds=20)
HOUR: Final = timedelta(hours=1)
HANGS_AT_MOST_S: Final = 0.5
SOON_S: Final = 3.0  # milliseconds on an idle machine

GLOO = Subject(ProcessGroupBabyGloo, lacks=GLOO_LACKS)
GLOO_OF_TWO = Subject(ProcessGroupBabyGloo, (2,), lacks=GLOO_LACKS)
# Each process that this check kills had a nursery of its own, whose imports take seconds.
IN_A_SOAK = every_death_at_every_point
KEPT = (*(check for check in CHECKS if check is not IN_A_SOAK), partial(IN_A_SOAK, rows=("allreduce",)))
WRAPPERS = (ProcessGroupWrapper, ErrorSwallowingProcessGroupWrapper, FakeProcessGroupWrapper)
STACKED = tuple(
    check
    for check in CHECKS
    if check.__name__
    in {
        "every_size_agrees",
        "both_call_forms_agree",
        "torchs_functions_take_the_group",
        "futures_hold_the_results",
        "a_wait_may_be_given_up_and_repeated",
        "use_before_configure_is_an_error",
        "shutdown_is_for_ever",
        "abort_leaves_an_error_until_configure",
        "abort_ends_a_running_collective",
    }
)


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[None]:
    """Nothing of this module's groups runs any more when the module has ended."""
    child = NURSERY.child(check=lambda: None)  # so that the nursery has no children of its imports any more
    child.close()
    yield
    pid = NURSERY.pid
    assert pid is not None
    until(lambda: not children_of(pid), "children are left")
    NURSERY.end()
    assert not Path(f"/proc/{pid}").exists()
    assert not [name for name in os.listdir("/dev/shm") if "tft" in name]
    gc.collect()
    assert "memfd:tft-pg" not in Path("/proc/self/maps").read_text()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(ProcessGroupBabyGloo, timeout=GUARD) as bench:
        yield bench


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + GUARD.total_seconds()
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def failure(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except ProcessGroupError as error:
        return error
    return None


def reduce(group: ProcessGroup) -> torch.Tensor:
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    return tensor


def all_reduce(bench: Bench, groups: Sequence[ProcessGroup]) -> None:
    found = [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))]
    assert found == [[float(len(groups))] * 3] * len(groups)


def child_of(group: ProcessGroup) -> int:
    pid = group.child_pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


# --- the contract ---------------------------------------------------------------------------------------------------


@pytest.mark.in_parts
@pytest.mark.parametrize("check", KEPT, ids=lambda check: getattr(check, "__name__", "every_death_at_every_point"))
def test_it_keeps_the_contract(check: Callable[[Subject], None]) -> None:
    # Which types can be combined with which reductions is decided in Gloo, in a group of any size.
    check(GLOO_OF_TWO if check is every_combination_agrees_or_is_refused else GLOO)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_soak_it_keeps_the_contract_in_every_death_at_every_point() -> None:
    IN_A_SOAK(GLOO)


def stacked(outer: Any, inner: Any) -> ProcessGroup:
    group: ProcessGroup = outer(inner(ProcessGroupBabyGloo()))
    return group


@pytest.mark.in_parts
@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_every_stack_of_two_wrappers_keeps_the_contract(outer: Any, inner: Any) -> None:
    for check in STACKED:
        check(Subject(partial(stacked, outer, inner), (2,), lacks=GLOO_LACKS))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_soak_every_stack_of_two_wrappers_keeps_the_whole_contract(outer: Any, inner: Any) -> None:
    for check in CHECKS:
        if check is not IN_A_SOAK:
            check(Subject(partial(stacked, outer, inner), (1, 2, 3), lacks=GLOO_LACKS))


def test_a_swallowing_wrapper_passes_on_what_the_child_refuses(bench: Bench) -> None:
    """The child refuses a call, so the error comes with the Work. No `configure` would fix it."""
    group = ErrorSwallowingProcessGroupWrapper(bench.configured(1)[0])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND
    with pytest.raises(OperationRefusedError, match="allreduce"):
        group.allreduce([torch.ones(3)], options).wait()
    assert group.error() is None
    assert reduce(group).tolist() == [1.0] * 3


# --- deaths of the child --------------------------------------------------------------------------------------------

PHASES: Final = (
    *("idle", "waiting for a peer", "in the middle", "in several parts", "at any moment", "configuring", "in a word"),
)
LARGE: Final = 1 << 21
LENGTHS: Final = {"in the middle": LARGE, "in several parts": 6 * LARGE}


def strike(bench: Bench, groups: Sequence[ProcessGroup], phase: str, number: int) -> None:
    """Kill rank 0's child in a phase. Every operation must end at once on both ranks, and both must go on."""
    if phase == "configuring":
        strike_while_configuring(bench, groups[0])
        bench.configure(groups)
        all_reduce(bench, groups)
        return
    bench.configure(groups)
    for group in groups:
        group.set_timeout(HOUR)
    before = torch.arange(LENGTHS.get(phase, 1000), dtype=torch.float32)
    tensors = [before.clone() for _ in groups]
    may_end = phase in ("in the middle", "in several parts", "at any moment")
    started = groups if may_end else groups[:1] if phase != "idle" else []
    waits: list[Callable[[], object]]
    if phase == "in a word":
        waits = [groups[0].exchange_word([1], round_number=1, timeout=HOUR).wait]
    else:
        works = [group.allreduce([tensor]) for group, tensor in zip(started, tensors, strict=False)]
        waits = [work.wait for work in works]
        waits += [work.get_future().wait for work in works]
    if phase == "at any moment":
        time.sleep(0.0005 * (number % 10))
    finished = [bench.start(partial(failed, wait)) for wait in waits]
    begun_s = time.monotonic()
    os.kill(child_of(groups[0]), signal.SIGKILL)
    errors = [finish().get() for finish in finished]
    took_s = time.monotonic() - begun_s
    assert took_s < HANGS_AT_MOST_S, f"{phase}: it took {took_s:.2f} s"
    for error in errors:
        assert isinstance(error, RuntimeError) or (may_end and error is None), f"{phase}: {error!r}"
    if errors and errors[0] is not None and phase != "in a word":
        assert isinstance(errors[0], CommunicatorFailedError)
        assert phase == "in several parts" or torch.equal(tensors[0], before), f"{phase}: a failed operation wrote"
    assert isinstance(failure(partial(reduce, groups[0])), CommunicatorFailedError)
    assert isinstance(groups[0].errored(), CommunicatorFailedError)
    assert isinstance(failure(partial(reduce, groups[1])), PeerDisconnectedError)


def failed(wait: Callable[[], object]) -> BaseException | None:
    try:
        wait()
    except RuntimeError as error:
        return error
    return None


def strike_while_configuring(bench: Bench, group: ProcessGroup) -> None:
    known = group.child_pid  # type: ignore[attr-defined]
    address = bench.fresh_address()
    finish = bench.start(lambda: failure(lambda: group.configure(address, 0, 2, timeout=GUARD)))
    until(lambda: group.child_pid not in (None, known), "no child is configured")  # type: ignore[attr-defined]
    begun_s = time.monotonic()
    os.kill(child_of(group), signal.SIGKILL)
    error = finish().get()
    assert time.monotonic() - begun_s < HANGS_AT_MOST_S
    assert isinstance(error, CommunicatorFailedError), repr(error)


def strikes(bench: Bench, phase: str, kills: int) -> None:
    groups = [bench.make() for _ in range(2)]
    for number in range(kills):
        strike(bench, groups, phase, number)
    bench.configure(groups)
    all_reduce(bench, groups)


@pytest.mark.in_parts
@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_outlives_twenty_deaths_of_its_child(bench: Bench, phase: str) -> None:
    strikes(bench, phase, 20)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_soak_a_trainer_outlives_two_hundred_deaths_of_its_child(bench: Bench, phase: str) -> None:
    strikes(bench, phase, 200)


def test_a_child_that_hangs_costs_half_a_second(bench: Bench) -> None:
    """It is stopped, so it answers nothing. The abort ends the operations here at once, and kills it for the peers."""
    groups = bench.configured(2)
    for group in groups:
        group.set_timeout(HOUR)
    works = [group.allreduce([torch.ones(LARGE)]) for group in groups]
    os.kill(child_of(groups[0]), signal.SIGSTOP)
    works.append(groups[0].allreduce([torch.ones(3)]))
    begun_s = time.monotonic()
    groups[0].abort()
    assert isinstance(failure(works[2].wait), AbortedError)
    assert time.monotonic() - begun_s < HANGS_AT_MOST_S
    assert isinstance(failure(partial(reduce, groups[1])), PeerDisconnectedError)
    assert time.monotonic() - begun_s < HANGS_AT_MOST_S + 0.5
    bench.configure(groups)
    all_reduce(bench, groups)


def test_a_child_that_hangs_is_killed_after_the_operations_timeout(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_LATE_S", 0.1)
    group = bench.configured(1)[0]
    group.set_timeout(timedelta(milliseconds=100))
    pid = child_of(group)
    os.kill(pid, signal.SIGSTOP)
    futures = [group.allreduce([torch.ones(3)]).get_future() for _ in range(3)]
    for future in futures:
        with pytest.raises(RuntimeError, match="was killed"):
            future.wait()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the child lives")
    bench.configure([group])
    all_reduce(bench, [group])


def test_the_nursery_may_die_too(bench: Bench) -> None:
    groups = bench.configured(2)
    assert NURSERY.pid is not None
    os.kill(NURSERY.pid, signal.SIGKILL)
    for group in groups:
        until(lambda group=group: group.errored() is not None, "nobody noticed")  # type: ignore[misc]
        assert isinstance(group.errored(), CommunicatorFailedError)
    bench.configure(groups)
    all_reduce(bench, groups)


def test_a_prepared_group_waits_for_no_imports(bench: Bench) -> None:
    """The helper process makes a child, and so has imported everything, when `prepare` returns."""
    NURSERY.end()
    group = ProcessGroupWrapper(bench.make())
    made = NURSERY._requests
    group.prepare()
    pid = NURSERY.pid
    assert pid is not None
    assert NURSERY._requests == made + 1
    until(lambda: not children_of(pid), "a child is left")
    bench.configure([group])
    assert NURSERY.pid == pid
    all_reduce(bench, [group])


# --- what is given back ---------------------------------------------------------------------------------------------


def resources() -> tuple[int, int, int]:
    """The threads, the descriptors and the children of the nursery."""
    assert NURSERY.pid is not None
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(children_of(NURSERY.pid))


def reconfigure(bench: Bench, times: int) -> None:
    groups = bench.configured(2)
    all_reduce(bench, groups)
    bench.configure(groups)
    all_reduce(bench, groups)
    until(lambda: resources()[2] == 2, "the previous children live")
    before = resources()
    for number in range(times):
        bench.configure(groups)
        if number % 10 == 0:
            all_reduce(bench, groups)
    until(lambda: resources()[2] == 2, "the previous children live")
    all_reduce(bench, groups)
    until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)), f"{before}, {resources()}")


@pytest.mark.in_parts
def test_fifty_reconfigurations_leave_nothing(bench: Bench) -> None:
    reconfigure(bench, 50)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_soak_a_thousand_reconfigurations_leave_nothing(bench: Bench) -> None:
    reconfigure(bench, 1000)


def test_a_result_that_comes_after_the_abort_is_written_nowhere(bench: Bench) -> None:
    groups = bench.configured(2)
    tensors = [torch.ones(LARGE) for _ in groups]
    pid = child_of(groups[0])
    works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
    groups[0].abort()
    left = tensors[0].clone()
    is_done = failure(works[0].wait) is None
    until(lambda: not Path(f"/proc/{pid}").exists(), "the child lives")
    assert torch.equal(tensors[0], left)
    assert is_done or torch.equal(left, torch.ones(LARGE))


# --- forks ----------------------------------------------------------------------------------------------------------


@pytest.mark.in_parts
@pytest.mark.parametrize("way", FORKS)
def test_a_fork_keeps_nothing_alive(bench: Bench, way: str) -> None:
    groups = bench.configured(2)
    all_reduce(bench, groups)
    pids = [child_of(group) for group in groups]
    children = [fork_child(way)]
    try:
        all_reduce(bench, groups)
        groups[0].abort()
        assert isinstance(failure(partial(reduce, groups[1])), PeerDisconnectedError)
        bench.configure(groups)
        all_reduce(bench, groups)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the previous children live")
    finally:
        end_children(children)


def test_a_forked_child_of_the_trainer_has_no_group(bench: Bench) -> None:
    group = bench.configured(1)[0]
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            error = failure(partial(reduce, group))
            group.shutdown()
            os.write(writer, type(error).__name__.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        assert told.read() == ProcessGroupClosedError.__name__.encode()
    os.waitpid(pid, 0)
    all_reduce(bench, [group])


# --- large tensors --------------------------------------------------------------------------------------------------


def parts_of(length: int, dtype: torch.dtype) -> int:
    return -(-length * dtype.itemsize // gloo._PART_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex128], ids=str)
def test_a_large_tensor_crosses_in_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(gloo, "_PART_BYTES", 1 << 16)
    groups = bench.configured(3)
    length = (1 << 18) + 5
    assert parts_of(length, dtype) > 4
    base = torch.arange(length).remainder(7).to(dtype)
    summed = [base.clone().view(-1, 1) for _ in groups]
    sent = [base * (rank + 1) for rank in range(3)]

    def act(rank: int, group: ProcessGroup) -> object:
        work = group.allreduce([summed[rank]])
        group.broadcast(sent[rank], 1).wait()
        return work.get_future().wait()

    found = bench.all(groups, act)
    for rank in range(3):
        assert found[rank] == [summed[rank]]
        assert torch.equal(summed[rank], (base * 3).view(-1, 1))
        assert torch.equal(sent[rank], base * 2)


def test_a_part_that_fails_fails_the_whole_and_nothing_is_written_any_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "_PART_BYTES", 1 << 16)
    groups = bench.configured(2)
    for group in groups:
        group.set_timeout(HOUR)
    tensor = torch.ones(1 << 16)
    work = groups[0].allreduce([tensor])
    groups[1].allreduce([torch.ones(1 << 14)]).wait()  # the first part only
    until(lambda: bool((tensor[: 1 << 14] == 2).all()), "no part has crossed")
    os.kill(child_of(groups[0]), signal.SIGKILL)
    assert isinstance(failure(work.wait), CommunicatorFailedError)
    with pytest.raises(RuntimeError):
        work.get_future().wait()
    assert bool((tensor[1 << 14 :] == 1).all())


def test_without_memory_for_all_parts_nothing_is_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_PART_BYTES", 1 << 16)
    group = bench.configured(1)[0]
    all_reduce(bench, [group])
    take, taken = Pool.take, []

    def take_two(pool: Pool, size: int) -> Any:
        if len(taken) == 2:
            raise OSError("too many open files")
        taken.append(take(pool, size))
        return taken[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "take", take_two)
        error = failure(lambda: group.allreduce([torch.ones(1 << 16)]))
    assert isinstance(error, OperationRefusedError)
    assert "too many open files" in str(error)
    pool = group._sharing._pool  # type: ignore[attr-defined]
    assert len(pool._free) == len(pool._all)
    all_reduce(bench, [group])


def test_ranks_of_another_kind_of_group_are_not_met(bench: Bench) -> None:
    """They would not split a large tensor."""
    ours, theirs = bench.make(), ProcessGroupGloo()
    address, limit = bench.fresh_address(), timedelta(milliseconds=500)
    try:
        finish = bench.start(lambda: failure(lambda: theirs.configure(address, 1, 2, timeout=limit)))
        error = failure(lambda: ours.configure(address, 0, 2, timeout=limit))
        assert isinstance(error, ConfigureError)
        assert error.missing_ranks == (1,)
        assert isinstance(finish().get(), ConfigureError)
    finally:
        theirs.shutdown()


# --- calls ----------------------------------------------------------------------------------------------------------


def test_what_can_not_be_is_refused_before_anything_is_sent(bench: Bench) -> None:
    group = bench.configured(1)[0]
    for call in (
        lambda: group.allreduce([torch.ones(2), torch.ones(2)]),
        lambda: group.allreduce([torch.ones(2, device="meta")]),
        lambda: group.send([torch.ones(2)], 0, 0),
    ):
        assert isinstance(failure(call), OperationRefusedError)
        assert group.errored() is None
    with pytest.raises(TypeError):
        group.allreduce("no tensor")  # type: ignore[call-overload]
    many = [torch.ones(1) for _ in range(3000)]
    error = failure(lambda: group.allreduce_coalesced(many))
    assert isinstance(error, OperationRefusedError)
    assert "fewer tensors" in str(error)
    all_reduce(bench, [group])


def test_a_callback_may_wait_for_another_operation(bench: Bench) -> None:
    groups = bench.configured(2)

    def act(rank: int, group: ProcessGroup) -> float:
        first, second = torch.ones(4), torch.ones(4)

        def callback(_: object) -> torch.Tensor:
            group.allreduce([second]).wait()
            return second

        value: torch.Tensor = group.allreduce([first], ReduceOp.SUM).get_future().then(callback).wait()
        return float(value[0])

    assert bench.all(groups, act) == [2.0, 2.0]


def test_a_callback_may_shut_the_group_down(bench: Bench) -> None:
    groups = bench.configured(2)
    took_s: list[float] = []

    def callback(_: object) -> None:
        begun_s = time.monotonic()
        groups[0].shutdown()
        took_s.append(time.monotonic() - begun_s)

    future = groups[0].allreduce([torch.ones(4)]).get_future()
    future.add_done_callback(callback)
    os.kill(child_of(groups[0]), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        future.wait()
    until(lambda: bool(took_s), "the callback hangs")
    assert took_s[0] < SOON_S
    assert isinstance(groups[0].errored(), ProcessGroupClosedError)


def test_torchs_ddp_runs_on_it_unmodified(bench: Bench) -> None:
    groups = bench.configured(2)

    def gradients(rank: int, group: ProcessGroup) -> list[torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.constant_(parameter, 0.01 * (number + 1))
        trained = DistributedDataParallel(model, process_group=group)
        for step in range(3):
            trained.zero_grad()
            trained(torch.full((2, 4), float(rank + step))).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    found = bench.all(groups, gradients)
    assert len(found[0]) == 4
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_settings_are_checked() -> None:
    for timeout in (0, -1.0, timedelta(0), "soon"):
        with pytest.raises(ConfigError):
            ProcessGroupBabyGloo(timeout)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not both"):
        ProcessGroupBabyGloo(interface="lo", hostname="localhost")


def test_the_child_listens_where_the_environment_says(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    group = bench.make()
    error = failure(lambda: group.configure(bench.fresh_address(), 0, 1))
    assert error is not None
    assert "nope0" in str(error)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    bench.configure([group])
    all_reduce(bench, [group])


def test_groups_may_be_made_and_shut_down_by_many_threads(bench: Bench) -> None:
    def live() -> None:
        with Bench(ProcessGroupBabyGloo, timeout=GUARD) as own:
            all_reduce(own, own.configured(1))

    threads = [threading.Thread(target=live, name="tft-pg-test-lives") for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [each for each in threading.enumerate() if each.name.startswith("tft-child")]
