"""Quantized reductions of a Manager: replicas on threads, over real Gloo groups. The test is the lighthouse."""

from __future__ import annotations

import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_algos import (
    ConfigError,
    ContributionError,
    DiLoCo,
    Manager,
    UnsupportedFeatureError,
    UsageError,
    UserStateError,
)
from tft_algos.agreement import HEADER_BYTES, Agreement
from tft_algos.collectives import allreduce_quantized
from tft_algos.encoded_work import EncodedWork
from tft_algos.gathered import RowExchange
from tft_algos.manager.reduce.quantized import QuantizedReductions
from tft_algos.quantization import ErrorFeedback, Int4, Int8, TopK
from tft_algos.testing import MemoryTransport, ScriptedCoordinator, plan_of
from tft_coord.core.types import QuorumKey
from tft_pg import AbortedError, CollectiveTimeoutError, DummyWork, ProcessGroupGloo
from tft_pg.work import PendingWork

LIMIT = timedelta(seconds=20)


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Job:
    """Replicas of one quorum, each with a Manager and a thread of its own. `changes`: from the second step, another."""

    def __init__(
        self, store: TCPStore, size: int, steps: int, verdicts: Sequence[bool], *, changes: bool = False, **plan: Any
    ) -> None:
        address = f"localhost:{store.port}/{uuid.uuid4().hex}"
        self.managers: list[Manager] = []
        self._threads = ThreadPoolExecutor(size)
        for rank in range(size):
            first, another = (
                replace(plan_of(number, size=size, rank=rank, **plan), store_address=address) for number in (7, 8)
            )
            later: list[Any] = [another, QuorumKey(8, 8)] if changes else [QuorumKey(7, 7)] * (steps - 1)
            state = torch.ones(1)
            self.managers.append(
                Manager(
                    ProcessGroupGloo(LIMIT),
                    state.copy_,
                    state.clone,
                    coordinator=ScriptedCoordinator([first, *later], verdicts, replica_id=f"r{rank}:{uuid.uuid4()}"),
                    checkpoint_transport=MemoryTransport(),
                    lighthouse_addr="localhost:1",
                    hostname="localhost",
                )
            )

    def run(self, replica: Callable[[int, Manager], Any]) -> list[Any]:
        """Run a function for every replica and return the results."""
        running = [self._threads.submit(replica, rank, manager) for rank, manager in enumerate(self.managers)]
        return [each.result(60) for each in running]

    def close(self) -> None:
        for manager in self.managers:
            manager.shutdown()
        self._threads.shutdown()


@pytest.fixture
def jobs(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    made: list[Job] = []

    def make(size: int, *, steps: int = 1, verdicts: Sequence[bool] = (), **plan: Any) -> Job:
        made.append(Job(store, size, steps, verdicts, **plan))
        return made[-1]

    yield make
    for job in made:
        job.close()
    assert "tft-quantized" not in [thread.name for thread in threading.enumerate()]


def numbers(rank: int, size: int = 3000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


# --- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, (1.0, 4.0, 7.0)], ids=["plain", "weighted"])
def test_a_mean_is_within_the_bound_and_equal_everywhere(
    jobs: Callable[..., Job], weights: tuple[float, ...] | None
) -> None:
    def replica(rank: int, manager: Manager) -> tuple[bool, torch.Tensor]:
        manager.start_quorum()
        tensor = numbers(rank)
        work = manager.allreduce(tensor, True, weight=None if weights is None else weights[rank])
        assert work.get_future().wait()[0] is tensor
        return work.wait() and manager.should_commit(), tensor

    results = jobs(3).run(replica)
    given = [1.0, 1.0, 1.0] if weights is None else weights
    exact = sum(numbers(rank) * given[rank] for rank in range(3)) / sum(given)
    largest = max(float(numbers(rank).abs().max()) for rank in range(3))
    assert all(committed and torch.equal(tensor, results[0][1]) for committed, tensor in results)
    assert float((results[0][1] - exact).abs().max()) <= 2.1 * largest / 254


def test_the_order_of_waits_does_not_matter(jobs: Callable[..., Job]) -> None:
    """Plain and quantized reductions run at the same time, and each replica waits in another order."""

    def replica(rank: int, manager: Manager) -> tuple[bool, list[torch.Tensor]]:
        manager.start_quorum()
        tensors = [torch.full((1000 + index,), index + rank + 1.0) for index in range(9)]
        works = [
            manager.allreduce(tensor, (False, Int8(), Int4())[index % 3], dist.ReduceOp.SUM)
            for index, tensor in enumerate(tensors)
        ]
        order = sorted(range(9), key=lambda index: (index * (rank + 2)) % 7)
        assert all(works[index].wait() for index in order)
        return manager.should_commit(), tensors

    for committed, tensors in jobs(3).run(replica):
        assert committed
        for index, tensor in enumerate(tensors):
            assert torch.allclose(tensor, torch.full_like(tensor, 3 * index + 6.0), rtol=1e-5)


def test_a_spare_gives_zeros_and_takes_the_mean(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> torch.Tensor:
        manager.start_quorum()
        tensor = torch.full((100,), rank + 1.0)
        manager.allreduce(tensor, should_quantize=True).wait()
        assert manager.should_commit()
        return tensor

    for tensor in jobs(3, participants=[0, 1]).run(replica):
        assert torch.allclose(tensor, torch.full((100,), 1.5), rtol=1e-6)


def test_an_empty_tensor(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> bool:
        manager.start_quorum()
        return manager.allreduce(torch.ones(0), should_quantize=True).wait() and manager.should_commit()

    assert jobs(2).run(replica) == [True, True]


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (lambda rank, _: (torch.ones(10 * (rank + 1)), True), ("float32 [10]", "float32 [20]")),
        (lambda rank, _: (torch.ones(3000 * rank), True), ("float32 [0]", "float32 [3000]")),
        (lambda rank, _: (torch.ones(2, 3).view(rank + 1, -1), True), ("float32 [1, 6]", "float32 [2, 3]")),
        (lambda rank, _: (torch.ones(99, dtype=(torch.float16, torch.float32)[rank]), True), ("float16 ", "float32 ")),
        (lambda rank, _: (torch.ones(99_999), (Int8(), Int4())[rank]), ("Int8 mean", "Int4 mean")),
        (lambda rank, slots: (torch.ones(99), slots[rank]), ("TopK(128) mean", "TopK(64) mean")),
        (lambda rank, slots: (torch.ones(9_999), (slots[0], Int8())[rank]), ("TopK(128) mean", "Int8 mean")),
    ],
    ids=["size", "empty", "shape", "dtype", "codec", "sparse", "sparse and dense"],
)
def test_members_that_reduce_something_else_are_named_and_commit_nothing(
    jobs: Callable[..., Job], given: Callable[[int, Any], tuple[torch.Tensor, Any]], values: tuple[str, str]
) -> None:
    def replica(rank: int, manager: Manager) -> list[Exception | None]:
        slots = [ErrorFeedback(manager, TopK(sent), key=str(sent)).of("a") for sent in (128, 64)]
        found: list[Exception | None] = []
        for _ in range(2):
            manager.start_quorum()
            tensor, how = given(rank, slots)
            assert not manager.allreduce(tensor, how).wait()
            error = manager.errored()
            found.append(None if error is None else error.original_exception)
            assert not manager.should_commit()
        return found

    for rank, errors in enumerate(jobs(2, steps=2, verdicts=[False, False]).run(replica)):
        for error in errors:
            assert isinstance(error, ContributionError), error
            assert error.replica_rank == 1 - rank
            assert f"replica rank {1 - rank} reduces" in str(error)
            assert all(value in str(error) for value in values)


def test_the_reductions_behind_one_that_differs_go_on(jobs: Callable[..., Job]) -> None:
    """All members find the difference, so the order of their collectives is kept."""

    def replica(rank: int, manager: Manager) -> tuple[torch.Tensor, Exception | None]:
        manager.start_quorum()
        manager.wait_quorum()
        reductions, tensor = manager._parts.reducer.quantized, torch.full((7,), rank + 1.0)
        wrong = reductions.start(torch.ones(9), Int8(), None, text=f"number {rank}")
        right = reductions.start(tensor, Int8(), None, text="a sum")
        with pytest.raises(ContributionError, match=r"replica rank \d reduces number"):
            wrong.wait()
        assert right.wait()
        return tensor, manager._parts.group.errored()

    for tensor, error in jobs(3).run(replica):
        assert torch.allclose(tensor, torch.full((7,), 6.0))
        assert error is None


def test_a_sum_and_a_mean_are_not_added(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> tuple[bool, bool]:
        manager.start_quorum()
        ended = manager.allreduce(torch.ones(9), True, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[rank]).wait()
        return ended, manager.should_commit()

    assert jobs(2, verdicts=[False]).run(replica) == [(False, False)] * 2


def test_an_abort_fails_the_step_and_hangs_nothing(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> bool:
        manager.start_quorum()
        manager.wait_quorum()
        if rank == 1:
            manager._parts.group.abort()
            return False
        tensors = [numbers(0), numbers(1)]
        works = [manager.allreduce(tensor, should_quantize=True) for tensor in tensors]
        plain = manager.allreduce(torch.ones(3))
        assert [work.wait() for work in (*works, plain)] == [False, False, False]
        return manager.should_commit()

    assert jobs(2).run(replica)[0] is False


def test_no_second_half_starts_in_another_configuration() -> None:
    class Group:
        calls = 0

        def __init__(self) -> None:
            self.first = PendingWork(on_timeout=lambda limit: TimeoutError(str(limit)), limit=LIMIT)

        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 0

        def alltoall_base(self, *_: object) -> dist.Work:
            self.calls += 1
            return self.first

        _allgather_base = alltoall_base

    group = Group()
    reductions = QuantizedReductions(group, timeout=LIMIT)
    works = [reductions.start(torch.ones(5), Int8(), None, text="a sum") for _ in range(2)]
    reductions.group_changes()
    group.first.finish([])
    reductions.drain()
    for work in works:
        with pytest.raises(AbortedError, match="configured again"):
            work.wait()
    assert group.calls <= 1
    reductions.close(wait=True)


def test_a_half_that_cannot_start_aborts_the_group_before_the_next_reduction() -> None:
    """Otherwise the next reduction of this member would meet the failed one of the others."""

    class Group:
        error: Exception | None = None
        calls = 0

        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 0

        def errored(self) -> Exception | None:
            return self.error

        def abort(self) -> None:
            self.error = AbortedError("aborted")

        def alltoall_base(self, *_: object) -> dist.Work:
            self.calls += 1
            raise self.error or MemoryError("no memory")

        _allgather_base = alltoall_base

    group = Group()
    reductions = QuantizedReductions(group, timeout=LIMIT)
    works = [reductions.start(torch.ones(5), Int8(), None, text="a sum") for _ in range(2)]
    with pytest.raises(MemoryError):
        works[0].wait()
    with pytest.raises(AbortedError):
        works[1].wait()
    reductions.close(wait=True)


def forks_in_a_step() -> None:
    def replica(rank: int, manager: Manager) -> tuple[bool, int]:
        manager.start_quorum()
        works = [manager.allreduce(torch.ones(100_000), should_quantize=True) for _ in range(3)]
        child = os.fork() if rank == 0 else None
        if child == 0:
            try:
                manager._parts.reducer.quantized.drain()  # would wait for ever
                os._exit(0)
            finally:
                os._exit(1)
        assert all(work.wait() for work in works)
        committed = manager.should_commit()
        return committed, (0 if child is None else os.waitpid(child, 0)[1])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job = Job(store, 2, 1, ())
    results = job.run(replica)
    job.close()
    assert results == [(True, 0), (True, 0)], results


def test_a_fork_leaves_the_thread_and_its_work_behind() -> None:
    """In a process of its own: a child of a test process has all that other tests have left in it."""
    process = multiprocessing.get_context("spawn").Process(target=forks_in_a_step)
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0


def test_what_cannot_work_is_refused(jobs: Callable[..., Job]) -> None:
    job = jobs(1, steps=1)
    (manager,) = job.managers
    slot = ErrorFeedback(manager).of("a")
    manager.start_quorum()
    for given, error, why in [
        ("int8", ConfigError, "should_quantize is 'int8'"),
        (1, ConfigError, "should_quantize is 1"),
        (ErrorFeedback(manager, key="b"), ConfigError, "a slot of an ErrorFeedback"),
    ]:
        with pytest.raises(error, match=why):
            manager.allreduce(torch.ones(1), given)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeatureError, match=r"use ReduceOp\.SUM or ReduceOp\.AVG"):
        manager.allreduce(torch.ones(1), True, dist.ReduceOp.MAX)
    with pytest.raises(UnsupportedFeatureError, match="would be rounded"):
        manager.allreduce(torch.ones(1, dtype=torch.int64), True, dist.ReduceOp.SUM)
    with pytest.raises(ConfigError, match="another Manager"):
        jobs(1).managers[0].allreduce(torch.ones(1), slot)
    with pytest.raises(ConfigError, match="codec is a str"):
        ErrorFeedback(manager, "int4", key="c")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the name of a slot"):
        ErrorFeedback(manager, key="d").of("")
    with pytest.raises(ConfigError, match="another key"):
        ErrorFeedback(manager)


# --- error feedback ---------------------------------------------------------------------------------------------------


def gradient(rank: int) -> torch.Tensor:
    """Return small numbers beside large ones. Four bits alone lose the small ones for ever."""
    values = torch.full((256,), 0.01 * (rank + 1))
    values[::64] = 1.0
    return values


def sums_of(job: Job, steps: int, *, feedback: bool, **weight: float) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Run steps with the same gradient. Return the sum of the committed means, and the residual after each step."""

    def replica(rank: int, manager: Manager) -> tuple[torch.Tensor, list[torch.Tensor]]:
        slot = ErrorFeedback(manager).of("weight")
        total, residuals = torch.zeros(256), []
        for _ in range(steps):
            manager.start_quorum()
            tensor = gradient(rank)
            manager.allreduce(tensor, slot if feedback else Int4(), **weight).wait()
            if manager.should_commit():
                total += tensor
            residual = slot.state()["residual"]
            residuals.append(torch.zeros(256) if residual is None else residual.clone())
        return total, residuals

    return job.run(replica)


@pytest.mark.parametrize("weight", [{}, {"weight": 300.0}], ids=["plain", "weighted"])
def test_feedback_loses_nothing_over_many_steps(jobs: Callable[..., Job], weight: dict[str, float]) -> None:
    exact = 40 * (gradient(0) + gradient(1)) / 2
    (lossy, _), _ = sums_of(jobs(2, steps=40), 40, feedback=False, **weight)
    (total, _), (other, _) = sums_of(jobs(2, steps=40), 40, feedback=True, **weight)
    assert torch.equal(total, other)
    assert float((lossy - exact).abs().max()) > 0.3  # each step loses 0.015
    # Everything but the residuals has arrived: two numbers in a block of ones, and the rounded sum.
    assert float((total - exact).abs().max()) < 4 / 14


def test_a_failed_step_rolls_the_residual_back(jobs: Callable[..., Job]) -> None:
    job = jobs(2, steps=4, verdicts=[True, False, True, False])
    for _, residuals in sums_of(job, 4, feedback=True):
        assert bool(residuals[0].any())
        assert torch.equal(residuals[1], residuals[0])
        assert not torch.equal(residuals[2], residuals[1])
        assert torch.equal(residuals[3], residuals[2])


def test_a_retried_step_gives_what_it_gave_without_the_failure(jobs: Callable[..., Job]) -> None:
    smooth = sums_of(jobs(2, steps=3), 3, feedback=True)
    rough = sums_of(jobs(2, steps=5, verdicts=[True, False, True, False, True]), 5, feedback=True)
    for (total, residuals), (again, after) in zip(smooth, rough, strict=True):
        assert torch.equal(total, again)
        assert torch.equal(residuals[-1], after[-1])


def test_a_spare_returns_the_error_of_the_sums_that_it_rounded(jobs: Callable[..., Job]) -> None:
    results = sums_of(jobs(3, steps=40, participants=[0, 1]), 40, feedback=True)
    exact = 40 * (gradient(0) + gradient(1)) / 2
    assert all(torch.equal(total, results[0][0]) for total, _ in results)
    assert float((results[0][0] - exact).abs().max()) < 6 / 14


def test_a_gradient_that_is_not_finite_leaves_no_residual(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> torch.Tensor:
        slot = ErrorFeedback(manager).of("weight")
        for wrong in (float("nan"), 1.0):
            manager.start_quorum()
            tensor = torch.full((64,), wrong)
            manager.allreduce(tensor, slot).wait()
            assert manager.should_commit()
        return tensor

    assert all(torch.equal(tensor, torch.ones(64)) for tensor in jobs(2, steps=2).run(replica))


def test_a_slot_is_for_one_tensor_and_one_step(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> None:
        slot = ErrorFeedback(manager).of("weight")
        manager.start_quorum()
        manager.allreduce(torch.ones(64), slot)
        with pytest.raises(UsageError, match="another reduction of this step"):
            manager.allreduce(torch.ones(64), slot)
        assert manager.should_commit()
        with pytest.raises(UsageError, match="between two steps"):
            manager.allreduce(torch.ones(64), slot)
        manager.start_quorum()
        with pytest.raises(UsageError, match="has 64 numbers, and the tensor has 65"):
            manager.allreduce(torch.ones(65), slot)
        manager.allreduce(torch.ones(64), slot)
        assert manager.should_commit()

    jobs(2, steps=2).run(replica)


def test_a_slot_is_for_one_step_in_flight(jobs: Callable[..., Job]) -> None:
    """The residual of the step in flight is not known yet. With the old one, each step would send it once more."""

    def replica(rank: int, manager: Manager) -> torch.Tensor:
        feedback, total = ErrorFeedback(manager), torch.zeros(256)
        slots = [feedback.of("even"), feedback.of("odd")]

        def begin(number: int) -> tuple[torch.Tensor, Any]:
            manager.start_quorum()
            tensor = gradient(rank)
            work = manager.allreduce(tensor, slots[number % 2])
            if number == 1:
                with pytest.raises(UsageError, match=r"an earlier step that is still in flight .*number 1, and"):
                    manager.allreduce(gradient(rank), slots[0])
            assert work.wait()
            return tensor, manager.strategy.defer()

        flight = [begin(0)]
        for number in range(1, 40):
            flight.append(begin(number))
            tensor, step = flight.pop(0)
            assert step.should_commit()
            total += tensor
        ((tensor, step),) = flight
        assert step.should_commit()
        return total + tensor

    exact = 40 * (gradient(0) + gradient(1)) / 2
    one, other = jobs(2, steps=40).run(replica)
    assert torch.equal(one, other)
    assert float((one - exact).abs().max()) < 2 * 4 / 14  # of two slots


def test_an_abandoned_step_leaves_its_slot(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> tuple[Any, torch.Tensor]:
        slot = ErrorFeedback(manager).of("weight")
        manager.start_quorum()
        assert manager.allreduce(gradient(rank), slot).wait()
        abandoned = manager.strategy.defer()
        manager.start_quorum()  # with another quorum
        assert manager.allreduce(2 * gradient(rank), slot).wait()
        assert manager.should_commit()
        residual = slot.state()["residual"]
        assert not abandoned.should_commit()
        assert slot.state()["residual"] is residual
        return residual, 2 * gradient(rank)

    for residual, given in jobs(2, changes=True).run(replica):
        assert 0 < float(residual.abs().max()) <= 2 * float(given.abs().max()) / 14


def test_residuals_belong_to_the_replica_that_made_them(jobs: Callable[..., Job]) -> None:
    first, second = jobs(2, steps=1), jobs(2, steps=1)
    states: list[Any] = []

    def replica(rank: int, manager: Manager) -> Any:
        feedback = ErrorFeedback(manager)
        manager.start_quorum()
        manager.allreduce(gradient(rank), feedback.of("weight")).wait()
        assert manager.should_commit()
        return feedback.state_dict()

    states = first.run(replica)
    own = ErrorFeedback(second.managers[0])
    slot = own.of("weight")
    own.load_state_dict(states[0])  # of this replica, from an earlier process
    assert torch.equal(slot.state()["residual"], states[0]["slots"]["weight"]["residual"])
    own.load_state_dict(states[1])  # of the source of a recovery
    assert slot.state()["residual"] is None
    late = ErrorFeedback(second.managers[1])
    late.load_state_dict(states[1])
    assert torch.equal(late.state_dict()["slots"]["weight"]["residual"], late.of("weight").state()["residual"])
    for wrong in (
        None,
        {},
        {"owner": "a", "slots": {"b": 1}},
        {"owner": "a", "slots": {"b": {"kind": "", "residual": 1}}},
    ):
        with pytest.raises(UserStateError, match="load what"):
            own.load_state_dict(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("residual", "why"),
    [
        (lambda: torch.eye(8).to_sparse(), "is not dense"),
        (lambda: torch.ones(64, device="meta"), "on the meta device"),
        (lambda: torch.nested.nested_tensor([torch.ones(3)]), "is not dense"),
        (lambda: torch.full((64,), 1 + 2j), "torch.complex64, which is not floating"),
        (lambda: torch.ones(64, dtype=torch.int64), "torch.int64, which is not floating"),
        (lambda: torch.full((64,), float("nan")), "not finite"),
        (lambda: torch.full((64,), 1e300, dtype=torch.float64), "not finite in float32"),
        (lambda: [1.0], "is a list"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_wrong_residual_changes_nothing(residual: Callable[[], Any], why: str) -> None:
    feedback = ErrorFeedback(_NoManager())
    kept = {name: torch.full((64,), number) for name, number in (("a", 1.0), ("b", 2.0))}
    for name, each in kept.items():
        feedback.of(name).keep("mean", each)
    good = {"kind": "mean", "residual": torch.zeros(64)}
    for wrong, message in [
        ({"b": {"kind": "mean", "residual": residual()}}, f"the residual of 'b' .*{why}"),
        ({"b": {"kind": "mean"}}, "no residual of 'b'"),
        ({5: good}, "a slot 5"),
    ]:
        with pytest.raises(UserStateError, match=message):
            feedback.load_state_dict({"owner": "a", "slots": {"a": good, "c": good, **wrong}})
    slots = feedback.state_dict()["slots"]
    assert {name: state["residual"] for name, state in slots.items()} == kept  # the same tensors


def test_a_residual_of_another_dtype_or_shape_is_converted_and_copied() -> None:
    feedback = ErrorFeedback(_NoManager())
    given = torch.ones(8, 8, dtype=torch.bfloat16, requires_grad=True)
    states = {"early": {"kind": "mean", "residual": given}, "late": {"kind": "sum", "residual": torch.ones(3)}}
    early = feedback.of("early")
    feedback.load_state_dict({"owner": "a", "slots": states})
    states["late"]["residual"].zero_()
    residual = early.state()["residual"]
    assert (residual.dtype, residual.shape, residual.requires_grad) == (torch.float32, (64,), False)
    assert feedback.of("late").state()["residual"].tolist() == [1.0, 1.0, 1.0]


def test_a_replica_that_heals_receives_no_residuals(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> None:
        feedback = ErrorFeedback(manager)
        manager.start_quorum()
        manager.allreduce(gradient(rank), feedback.of("weight")).wait()
        assert manager.should_commit()
        assert bool(feedback.state_dict()["slots"]["weight"]["residual"].any())
        given = manager._parts.shared.user_state.take()["error_feedback"]
        assert given == {"owner": f"r{rank}", "slots": {}}
        feedback.load_state_dict(given)

    jobs(2, steps=1).run(replica)


# --- the largest numbers alone ----------------------------------------------------------------------------------------


def pseudogradient(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(10_000, generator=torch.Generator().manual_seed(100 * rank + step))


@pytest.mark.parametrize("weights", [None, (1.0, 4.0, 7.0)], ids=["plain", "weighted"])
def test_a_sparse_mean_is_that_of_what_was_sent(jobs: Callable[..., Job], weights: tuple[float, ...] | None) -> None:
    def replica(rank: int, manager: Manager) -> tuple[torch.Tensor, torch.Tensor]:
        slot = ErrorFeedback(manager, TopK()).of("fragment")
        manager.start_quorum()
        tensor = pseudogradient(rank)
        work = manager.allreduce(tensor, slot, weight=None if weights is None else weights[rank])
        assert work.get_future().wait()[0] is tensor
        assert work.wait()
        assert manager.should_commit()
        return tensor, slot.state()["residual"]

    results = jobs(3).run(replica)
    assert all(torch.equal(tensor, results[0][0]) for tensor, _ in results)
    given = [1.0, 1.0, 1.0] if weights is None else weights
    sent = torch.zeros(10_000)
    for rank in range(3):
        exact = torch.zeros(10_000)
        TopK().dequantize(TopK().quantize(pseudogradient(rank)), exact)
        sent += exact * given[rank] / sum(given)
    assert torch.allclose(results[0][0], sent, rtol=2**-6, atol=1e-6)


def test_a_sparse_sum_loses_nothing_over_many_steps(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> tuple[torch.Tensor, torch.Tensor]:
        slot = ErrorFeedback(manager, TopK(), decay=1.0).of("fragment")
        total = torch.zeros(10_000)
        for step in range(12):
            manager.start_quorum()
            tensor = pseudogradient(rank, step)
            manager.allreduce(tensor, slot, dist.ReduceOp.SUM).wait()
            if manager.should_commit():
                total += tensor
        return total, slot.state()["residual"]

    verdicts = [step % 3 != 1 for step in range(12)]
    (total, residual), (again, other) = jobs(2, steps=12, verdicts=verdicts).run(replica)
    assert torch.equal(total, again)
    exact = sum(pseudogradient(rank, step) for rank in range(2) for step in range(12) if verdicts[step])
    assert torch.allclose(total + residual + other, exact, atol=1e-4)  # type: ignore[arg-type]
    assert float((total - exact).abs().max()) > 1.0


def test_a_sparse_residual_decays(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> list[torch.Tensor]:
        slot = ErrorFeedback(manager, TopK()).of("fragment")
        residuals = []
        for given in (pseudogradient(rank), torch.zeros(10_000)):
            manager.start_quorum()
            manager.allreduce(given, slot)
            assert manager.should_commit()
            residuals.append(slot.state()["residual"].clone())
        return residuals

    for before, after in jobs(2, steps=2).run(replica):
        kept = (after / before - 0.95).abs() < 1e-4
        assert int((~kept).sum()) == 3 * 128  # the numbers that the second step has sent


def test_sparse_and_other_reductions_keep_their_order(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> list[torch.Tensor]:
        feedback = ErrorFeedback(manager, TopK())
        manager.start_quorum()
        tensors = [torch.full((100 + index,), rank + 1.0) for index in range(9)]
        works = [
            manager.allreduce(tensor, (False, Int8(), feedback.of(str(index)))[index % 3], dist.ReduceOp.SUM)
            for index, tensor in enumerate(tensors)
        ]
        assert all(works[index].wait() for index in sorted(range(9), key=lambda index: (index * (rank + 2)) % 7))
        assert manager.should_commit()
        return tensors

    for tensors in jobs(3).run(replica):
        assert all(torch.allclose(tensor, torch.full_like(tensor, 6.0)) for tensor in tensors)


def test_a_contribution_that_is_not_finite_fails_the_step_and_names_its_replica(jobs: Callable[..., Job]) -> None:
    def replica(rank: int, manager: Manager) -> None:
        slot = ErrorFeedback(manager, TopK()).of("fragment")
        for wrong, verdict in ((0.0, True), (float("nan"), False), (0.0, True)):
            manager.start_quorum()
            tensor = pseudogradient(rank)
            before = slot.state()["residual"]
            tensor[5] += wrong if rank == 1 else 0.0
            assert manager.allreduce(tensor, slot).wait() is verdict
            error = manager.errored()
            assert manager.should_commit() is verdict
            if not verdict:
                assert error is not None
                found = error.original_exception
                assert isinstance(found, ContributionError)
                assert found.replica_rank == 1
                assert "replica rank 1 sent" in str(found)
                assert slot.state()["residual"] is before
                return

    jobs(2, steps=3).run(replica)


def test_a_damaged_row_is_named() -> None:
    class Group:
        def size(self) -> int:
            return 3

        def rank(self) -> int:
            return 0

        def _allgather_base(self, received: torch.Tensor, sent: torch.Tensor) -> dist.Work:
            received.view(3, -1).copy_(sent)
            if sent.numel() != HEADER_BYTES:
                received.view(3, -1)[2, 4] ^= 1  # of the map of positions
            return DummyWork([received])

    feedback = ErrorFeedback(_NoManager(), TopK())
    tensor = pseudogradient(0)
    compensation = feedback.of("fragment").begin(tensor, 1, kind="sum", scale=1.0)
    exchange = RowExchange(Group(), TopK(), tensor, compensation=compensation)
    work = EncodedWork(exchange, Agreement(Group(), "a sum", tensor.device), [tensor])
    with pytest.raises(ContributionError, match="replica rank 2 sent") as raised:
        work.wait()
    assert raised.value.replica_rank == 2


class _NoManager:
    replica_id = "a:1"

    def register_state_dict_fn(self, *_: Any, **__: Any) -> None:
        pass


def test_a_codec_that_needs_feedback_is_refused_without_it(jobs: Callable[..., Job]) -> None:
    (manager,) = jobs(1).managers
    manager.start_quorum()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        with pytest.raises(UnsupportedFeatureError, match=r"TopK sends only a few.*ErrorFeedback\(manager, TopK\(\)\)"):
            manager.allreduce(torch.ones(3), TopK(), op)
    slot = ErrorFeedback(manager, TopK()).of("a")
    with pytest.raises(UnsupportedFeatureError, match=r"use ReduceOp\.SUM or ReduceOp\.AVG"):
        manager.allreduce(torch.ones(3), slot, dist.ReduceOp.MAX)
    with pytest.raises(UnsupportedFeatureError, match="would be rounded"):
        manager.allreduce(torch.ones(3, dtype=torch.int32), slot, dist.ReduceOp.SUM)
    model = torch.nn.Linear(2, 2)
    inner, outer = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(UnsupportedFeatureError, match="TopK sends only a few"):
        DiLoCo(manager, [model], inner, outer, 4, should_quantize=TopK())
    for wrong in (0.0, 1.5, -1, True, "0.9", float("nan")):
        with pytest.raises(ConfigError, match="decay is"):
            ErrorFeedback(manager, TopK(), key="b", decay=wrong)  # type: ignore[arg-type]


# --- deadlines --------------------------------------------------------------------------------------------------------


class Stuck:
    """A process group whose first collective does not end before an abort."""

    def __init__(self) -> None:
        self.first = PendingWork(on_timeout=lambda limit: TimeoutError(str(limit)), limit=LIMIT)
        self.begun = threading.Event()
        self.error: Exception | None = None

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def errored(self) -> Exception | None:
        return self.error

    def abort(self) -> None:
        self.error = AbortedError("aborted")
        self.first.fail(self.error)

    def alltoall_base(self, *_: object) -> dist.Work:
        self.begun.set()
        return self.first

    _allgather_base = alltoall_base


@pytest.mark.parametrize("waits", ["drain", "wait"])
def test_a_reduction_that_stands_still_ends_with_the_time_out(waits: str) -> None:
    group = Stuck()
    reductions = QuantizedReductions(group, timeout=timedelta(seconds=0.2))
    works = [reductions.start(torch.ones(5), Int8(), None, text="a sum") for _ in range(3)]
    assert group.begun.wait(60)
    with pytest.raises(CollectiveTimeoutError, match=r"timed out after 0\.2 s and was aborted, with 2 behind it"):
        reductions.drain() if waits == "drain" else works[1].wait()
    for work in works:
        with pytest.raises(AbortedError):
            work.wait()
    reductions.drain()
    reductions.close(wait=True)


def test_the_time_out_of_a_wait_is_shorter_than_that_of_the_reduction() -> None:
    group = Stuck()
    reductions = QuantizedReductions(group, timeout=LIMIT)
    work = reductions.start(torch.ones(5), Int8(), None, text="a sum")
    with pytest.raises(CollectiveTimeoutError, match=r"timed out after 0\.1 s"):
        work.wait(timedelta(seconds=0.1))
    reductions.close(wait=True)
    with pytest.raises(TimeoutError):
        allreduce_quantized([torch.ones(5)], dist.ReduceOp.SUM, Stuck()).wait(timedelta(seconds=0.1))  # type: ignore[arg-type]


def test_a_long_queue_that_advances_is_not_late() -> None:
    """The time-out is of one reduction, and starts again whenever one has advanced."""
    moved = threading.Semaphore(0)

    class Group(Stuck):
        def alltoall_base(self, *_: object) -> dist.Work:
            assert moved.acquire(timeout=60)
            return DummyWork([])

        def _allgather_base(self, *_: object) -> dist.Work:
            return DummyWork([])

    reductions = QuantizedReductions(Group(), timeout=timedelta(seconds=2))
    for _ in range(5):
        reductions.start(torch.ones(5), Int8(), None, text="a sum")
    ended = threading.Event()

    def move() -> None:
        while not ended.wait(0.6):
            moved.release()

    mover = threading.Thread(target=move)
    mover.start()
    reductions.drain()
    ended.set()
    mover.join()
    reductions.close(wait=True)


# --- syncs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("kind", ["codec", "feedback"])
def test_diloco_quantizes_its_syncs(jobs: Callable[..., Job], kind: str, delay: int) -> None:
    def replica(rank: int, manager: Manager) -> torch.Tensor:
        model = torch.nn.Sequential(torch.nn.Linear(20, 20, bias=False), torch.nn.Linear(20, 3, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        chosen = ErrorFeedback(manager) if kind == "feedback" else True
        with DiLoCo(manager, list(model), inner, outer, 4, fragment_sync_delay=delay, should_quantize=chosen) as diloco:
            while manager.current_step() < 9:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, rank + 0.5)  # the mean is one
                inner.step()
            states = diloco.state_dict().values()
            return torch.cat([each.flatten() for state in states for each in state["original_parameters"].values()])

    one, other = jobs(2, steps=10).run(replica)
    assert torch.equal(one, other)
    # Nine steps are the opening and four syncs of each fragment, of four inner steps each (the first may be shorter).
    assert torch.allclose(one, 1.0 - 0.1 * torch.round((1.0 - one) / 0.1), atol=0.02)
    assert float(one.max()) <= 1.0 - 4 * 0.2
    assert not torch.equal(one, torch.ones_like(one))


@pytest.mark.parametrize("delay", [0, 2])
def test_diloco_sends_the_largest_numbers_and_keeps_the_others(jobs: Callable[..., Job], delay: int) -> None:
    def replica(rank: int, manager: Manager) -> tuple[torch.Tensor, torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(20, 20, bias=False), torch.nn.Linear(20, 3, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        chosen = ErrorFeedback(manager, TopK(), decay=1.0)
        with DiLoCo(manager, list(model), inner, outer, 4, fragment_sync_delay=delay, should_quantize=chosen) as diloco:
            while manager.current_step() < 9:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, rank + 0.5)  # the mean is one
                inner.step()
            states = diloco.state_dict().values()
            weights = [each.flatten() for state in states for each in state["original_parameters"].values()]
            slots = chosen.state_dict()["slots"]
            residuals = [slots[f"fragment {index}, slice 0"]["residual"] for index in range(2)]
            return torch.cat(weights), torch.cat(residuals)

    (one, kept), (other, also_kept) = jobs(2, steps=10).run(replica)
    assert torch.equal(one, other)
    assert bool(kept.any())
    # Every inner step of a sync is in the weights, or is still to come.
    arrived = one - (kept + also_kept) / 2
    assert torch.allclose(arrived, 1.0 - 0.1 * torch.round((1.0 - arrived) / 0.1), atol=1e-4)
    assert float(arrived.max()) <= 1.0 - 4 * 0.2 + 1e-4
