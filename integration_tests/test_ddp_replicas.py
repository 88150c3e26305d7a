"""Data parallelism with several replicas that exchange over Gloo, against torch's own over the same wire.

Each replica is a thread here: a Manager over a real process group, with a coordinator that gives the test's answers.
The reference is torch's DistributedDataParallel over a separate process group.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_algos import DistributedDataParallel, Manager, PureDistributedDataParallel
from tft_algos.testing import MemoryTransport, ScriptedCoordinator, plan_of
from tft_coord.core.types import Plan, QuorumKey
from tft_pg import ProcessGroupGloo

TIMEOUT = timedelta(seconds=30)

Grads = list[torch.Tensor | None]


@dataclass(frozen=True)
class Loop:
    """The differences between the compared loops.

    Args:
        wrap: wraps a module.
        begin, end: called at the begin and the end of a step.
    """

    wrap: Callable[[torch.nn.Module], Any]
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None


Train = Callable[[int, Loop], Any]


class Branches(torch.nn.Module):
    """A module whose caller chooses the used branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(8, 8)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        x = self.stem(x)
        for branch in used:
            x = torch.relu(self.branches[branch](x))
        return x


def seeded(module: type[torch.nn.Module]) -> Any:
    with MAKING, torch.random.fork_rng():
        torch.manual_seed(0)
        return module()


MAKING = threading.Lock()  # the replicas are threads, and torch has one random generator


def gradients(module: torch.nn.Module) -> Grads:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def data(step: int, rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))


@pytest.fixture
def store() -> Iterator[str]:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield f"localhost:{server.port}"
    del server


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    yield
    # During a forward, torch records its model in the class, and restores the old value afterwards. With replicas in
    # threads, the class can keep one of their models for good. That model's reducer keeps its last operation, which
    # keeps Gloo's listener.
    torch.nn.parallel.DistributedDataParallel._active_ddp_module = None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tft-")]


Leave = Callable[[], object]


def together(size: int, work: Callable[[int, Leave], Any]) -> list[Any]:
    """Run each replica in a thread and return their results. Each waits for the others before it shuts its groups
    down."""
    done = threading.Barrier(size, timeout=TIMEOUT.total_seconds())

    def one(rank: int) -> Any:
        try:
            return work(rank, done.wait)
        except BaseException:
            done.abort()
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="replica") as executor:
        return list(executor.map(one, range(size)))


def manager_of(store: str, rank: int, size: int, *plans: dict[str, Any]) -> Manager:
    """Return a Manager whose quorums are the plans, and then the last one unchanged."""
    answers: list[Plan | QuorumKey | Exception] = [
        plan_of(number + 1, rank=rank, size=size, store_address=store, **plan)
        for number, plan in enumerate(plans or [{}])
    ]
    answers += [QuorumKey(len(answers), len(answers))] * 20
    return Manager(
        ProcessGroupGloo(timeout=TIMEOUT),
        lambda _: None,
        dict,  # the tests check reductions here, and no state
        coordinator=ScriptedCoordinator(answers, replica_id=f"replica_{rank}"),
        checkpoint_transport=MemoryTransport(),
        lighthouse_addr="localhost:1",
        hostname="localhost",
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
    )


def with_torchs(store: str, size: int, train: Train, **kwargs: Any) -> list[Any]:
    """Return the results of a training with torch's DistributedDataParallel, by replica."""

    def one(rank: int, leave: Leave) -> Any:
        group = ProcessGroupGloo(timeout=TIMEOUT)
        group.configure(f"{store}/reference", rank, size, replica_id=f"r{rank}", quorum_id=1)
        try:
            given = train(
                rank,
                Loop(lambda module: torch.nn.parallel.DistributedDataParallel(module, process_group=group, **kwargs)),
            )
            leave()
            return given
        finally:
            group.shutdown()

    return together(size, one)


def with_ours(store: str, size: int, train: Train, *, pure: bool = False, **kwargs: Any) -> list[Any]:
    """Return the results of the same training with tft's."""

    def one(rank: int, leave: Leave) -> Any:
        with manager_of(store, rank, size) as manager:

            def wrap(module: torch.nn.Module) -> torch.nn.Module:
                if pure:
                    return PureDistributedDataParallel(manager, module)
                return DistributedDataParallel(manager, module, **kwargs)

            def end() -> None:
                assert manager.should_commit(), manager.errored()

            given = train(rank, Loop(wrap, manager.start_quorum, end))
            leave()
            return given

    return together(size, one)


def train_branches(steps: Sequence[Sequence[Sequence[tuple[int, ...]]]]) -> Train:
    """Return a training that uses these branches: by step, by replica and by backward pass. The last pass reduces."""

    def train(rank: int, loop: Loop) -> list[Grads]:
        model = loop.wrap(seeded(Branches))
        seen = []
        for step, by_rank in enumerate(steps):
            loop.begin()
            model.zero_grad()
            *first, last = by_rank[rank]
            for number, used in enumerate(first):
                with model.no_sync():
                    model(data(step, rank, number), *used).square().sum().backward()
            model(data(step, rank, len(first)), *last).square().sum().backward()
            seen.append(gradients(model.module))
            loop.end()
        return seen

    return train


def check_equal(first: Any, second: Any, place: str = "") -> None:
    """Check that both are equal, bit for bit."""
    if isinstance(first, list):
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            check_equal(one, other, f"{place}/{number}")
    elif first is None or second is None:
        assert first is second, f"{place}: {first} and {second}"
    else:
        assert first.dtype == second.dtype
        assert torch.equal(first, second), f"{place}: {first} and {second}"


# --- unused parameters ------------------------------------------------------------------------------------------------

# No replica uses the last branch.
USED = train_branches(
    [
        [[(0,)], [(0, 1)]],
        [[(2,)], [(1,)]],
        [[(0, 1, 2)], [()]],
        [[(0,), (0, 1)], [(1,), (0,), (1,)]],
    ]
)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": False},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.0001, "batched_grad_copy": True},
    ],
    ids=str,
)
def test_unused_parameters_are_bit_equal_to_torchs_own(store: str, kwargs: dict[str, Any]) -> None:
    if lacks := kwargs.keys() - inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters.keys():
        pytest.skip(f"torch {torch.__version__} has no {', '.join(lacks)}")
    theirs = with_torchs(store, 2, USED, **({"gradient_as_bucket_view": True} | kwargs))
    mine = with_ours(store, 2, USED, **kwargs)
    check_equal(mine, theirs)
    for rank in range(2):
        assert [grads[-1] for grads in mine[rank]] == [None] * 4
    assert mine[1][1][6] is not None  # of a branch that only the other replica has used


def test_fault_2_pure_ddp_gives_the_mean_when_backward_returns_bit_equal_to_torchs_own(store: str) -> None:
    check_equal(
        with_ours(store, 2, USED, pure=True),
        with_torchs(store, 2, USED, find_unused_parameters=True, gradient_as_bucket_view=True),
    )


@pytest.mark.parametrize("pure", [False, True])
def test_a_parameter_used_only_before_the_pass_that_reduces_is_reduced_with_the_others(store: str, pure: bool) -> None:
    train = train_branches([[[(0, 1), (0,)], [(0,), (0,), (0,)]]])
    first, second = with_ours(store, 2, train, pure=pure, **({} if pure else {"find_unused_parameters": True}))
    check_equal(first, second)
    module = seeded(Branches)
    module(data(0, 0, 0), 0, 1).square().sum().backward()
    expected = module.branches[1].weight.grad / 2  # the other replica gives zeros
    assert torch.equal(first[0][4], expected)


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("plan", [{"healing": [1]}, {"participants": [0]}], ids=["heals", "is a spare"])
def test_who_does_not_participate_counts_as_using_nothing(store: str, plan: dict[str, Any], pure: bool) -> None:
    def one(rank: int, leave: Leave) -> Grads:
        with manager_of(store, rank, 2, plan) as manager:
            model: Any = seeded(Branches)
            model = (
                PureDistributedDataParallel(manager, model)
                if pure
                else DistributedDataParallel(manager, model, find_unused_parameters=True)
            )
            manager.start_quorum()
            if rank == 1:  # each member may accumulate any number of times
                with model.no_sync():
                    model(data(0, rank, 1), 2).square().sum().backward()
            model(data(0, rank), rank).square().sum().backward()
            assert manager.errored() is None
            leave()
            return gradients(model.module)

    first, second = together(2, one)
    check_equal(first, second)
    assert first[2] is not None
    assert first[4:] == [None] * 6  # of the branch that the second has used, too
    module = seeded(Branches)
    module(data(0, 0), 0).square().sum().backward()
    check_equal(first, gradients(module))


@pytest.mark.parametrize("used", [[(0,), (1,), (0,), (0,)], [(0,), (0,), (0,), (2,)]], ids=str)
def test_groups_of_two_processes_sum_the_map_inside_and_across(store: str, used: list[tuple[int, ...]]) -> None:
    def one(process: int, leave: Leave) -> Grads:
        group, rank = divmod(process, 2)
        inside = ProcessGroupGloo(timeout=TIMEOUT)
        inside.configure(f"{store}/inside/{group}", rank, 2, replica_id=f"{group}", quorum_id=1)
        try:
            with manager_of(f"{store}/across/{rank}", group, 2) as manager:
                model: Any = DistributedDataParallel(
                    manager, seeded(Branches), inside, find_unused_parameters=True, bucket_cap_mb=0.0001
                )
                manager.start_quorum()
                model(data(0, process), *used[process]).square().sum().backward()
                assert manager.should_commit(), manager.errored()
                leave()
                return gradients(model.module)
        finally:
            inside.shutdown()

    theirs = with_torchs(
        store,
        4,
        lambda rank, loop: train_branches([[[each] for each in used]])(rank, loop)[0],
        find_unused_parameters=True,
    )
    mine = together(4, one)
    for other in mine[1:]:
        check_equal(mine[0], other)
    for grad, reference in zip(mine[0], theirs[0], strict=True):
        assert (grad is None) == (reference is None)
        if grad is not None:
            torch.testing.assert_close(grad, reference)


# --- one layout and one order -----------------------------------------------------------------------------------------


class OtherOrder(torch.nn.Module):
    """Several buckets of different sizes, used in another order than that of the definition."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 12)
        self.third = torch.nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(torch.relu(self.third(torch.relu(self.second(x)))))
        return result


@pytest.mark.parametrize(
    "kwargs", [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"pure": True}], ids=str
)
def test_a_newcomer_has_the_buckets_of_those_who_were_there_before(store: str, kwargs: dict[str, Any]) -> None:
    def train(rank: int, loop: Loop) -> list[Grads]:
        module = seeded(OtherOrder)
        model = loop.wrap(module)
        seen = []
        for step in range(4):
            if rank == 1:
                model = loop.wrap(seeded(OtherOrder))  # each step is its first
            loop.begin()
            model.zero_grad()
            model(data(step, rank)).square().sum().backward()
            seen.append(gradients(model.module))
            loop.end()
        return seen

    first, second = with_ours(store, 2, train, **(kwargs if "pure" in kwargs else kwargs | {"bucket_cap_mb": 0.0003}))
    check_equal(first, second)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("pure", [False, True])
def test_several_models_on_one_manager_are_bit_equal_to_torchs_own(store: str, passes: int, pure: bool) -> None:
    def train(rank: int, loop: Loop) -> list[Grads]:
        models = [loop.wrap(seeded(OtherOrder)), loop.wrap(seeded(OtherOrder))]
        seen = []
        for step in range(3):
            loop.begin()
            for model in models:
                model.zero_grad()
            losses = [model(data(step, rank, number)).square().sum() for number, model in enumerate(models)]
            if passes == 1:
                (losses[0] + losses[1]).backward()
            else:
                for loss in losses:
                    loss.backward()
            for model in models:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # sees the averages
            seen.append([grad for model in models for grad in gradients(model.module)])
            loop.end()
        return seen

    kwargs = {"bucket_cap_mb": 0.0003}
    check_equal(
        with_ours(store, 2, train, pure=pure, **({} if pure else kwargs)),
        with_torchs(store, 2, train, gradient_as_bucket_view=True, **kwargs),
    )


# --- dtypes -----------------------------------------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        self.third = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.third(self.second(self.first(x).bfloat16())).float())
        return result


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("pure", [False, True])
def test_mixed_dtypes_are_bit_equal_to_torchs_own(store: str, autocast: bool, pure: bool) -> None:
    def train(rank: int, loop: Loop) -> list[Grads]:
        model = loop.wrap(seeded(OtherOrder if autocast else Mixed))
        seen = []
        for step in range(3):
            loop.begin()
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(data(step, rank)).float().square().sum()
            loss.backward()
            seen.append(gradients(model.module))
            loop.end()
        return seen

    kwargs = {"bucket_cap_mb": 0.0003}
    check_equal(
        with_ours(store, 2, train, pure=pure, **({} if pure else kwargs)),
        with_torchs(store, 2, train, gradient_as_bucket_view=True, **kwargs),
    )


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}, {"pure": True}], ids=str)
def test_unequal_batches_with_weights_give_the_gradient_of_all_samples(store: str, kwargs: dict[str, Any]) -> None:
    samples = [data(0, 0)[:1], data(0, 1)[:3], data(0, 2)]

    def one(rank: int, leave: Leave) -> Grads:
        with manager_of(store, rank, 3) as manager:
            module = seeded(OtherOrder)
            model: Any = (
                PureDistributedDataParallel(manager, module)
                if "pure" in kwargs
                else DistributedDataParallel(manager, module, bucket_cap_mb=0.0003, **kwargs)
            )
            manager.start_quorum()
            manager.set_weight(len(samples[rank]))
            with model.no_sync():
                (model(samples[rank]).square().sum(1).mean() / 2).backward()
            (model(samples[rank]).square().sum(1).mean() / 2).backward()
            assert manager.should_commit(), manager.errored()
            leave()
            return gradients(module)

    alone = seeded(OtherOrder)
    alone(torch.cat(samples)).square().sum(1).mean().backward()
    for grads in together(3, one):
        for ours, expected in zip(grads, gradients(alone), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


# --- a static graph ---------------------------------------------------------------------------------------------------


def test_parameters_that_are_never_used_are_left_alone_with_a_static_graph(store: str) -> None:
    train = train_branches([[[(0, 2)], [(0, 2)]]] * 3)
    check_equal(
        with_ours(store, 2, train, static_graph=True),
        with_torchs(store, 2, train, static_graph=True, gradient_as_bucket_view=True),
    )
