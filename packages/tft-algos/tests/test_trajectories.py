"""LocalSGD and DiLoCo over real Gloo groups, each replica in a thread, against a reference in one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tft_algos import DiLoCo, LocalSGD, Manager
from tft_algos.testing import MemoryTransport, ScriptedCoordinator, plan_of
from tft_algos.testing.trajectory import Recipe, Trajectory, reference
from tft_coord.core.types import QuorumKey
from tft_pg import ProcessGroupGloo

WIDTHS = (6, 7, 5, 9, 3)
NUMBERS = itertools.count(1)  # of quorums, so that no two share a prefix in the store


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(*pair, dtype=dtype) for pair in itertools.pairwise(WIDTHS)))


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch.to(next(model.parameters()).dtype)).abs().square().mean()
    return result


def split(num_fragments: int) -> Any:
    size = (len(WIDTHS) - 1) // num_fragments
    return lambda model: [model[place : place + size] for place in range(0, len(model), size)]


def batches(num_replicas: int, inner_steps: int) -> torch.Tensor:
    return torch.randn(inner_steps, num_replicas, 4, WIDTHS[0], generator=torch.Generator().manual_seed(7))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def global_weights(strategy: Any) -> list[torch.Tensor]:
    """In the order of the fragments."""
    state = strategy.state_dict()
    parts = [state] if isinstance(strategy, LocalSGD) else state.values()
    return [weight.clone() for part in parts for weight in part["original_parameters"].values()]


class Replicas:
    """Trains the replicas of a recipe, each with a Manager and a Gloo group of its own, in a thread of its own."""

    def __init__(self) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def train(
        self,
        recipe: Recipe,
        num_replicas: int,
        inner_steps: int,
        shared: dict[int, list[Any]] | None = None,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> list[list[list[torch.Tensor]]]:
        """By inner step, then by replica: its parameters; `shared` gets the global ones, by replica and inner step."""
        self._shared = {} if shared is None else shared
        data = batches(num_replicas, inner_steps)
        quorum_id = next(NUMBERS)
        models = [make_model(dtype) for _ in range(num_replicas)]  # here, for the seed is that of all threads
        with ThreadPoolExecutor(num_replicas) as threads:
            replicas = [
                threads.submit(self._train, model, recipe, rank, num_replicas, quorum_id, data[:, rank], settings)
                for rank, model in enumerate(models)
            ]
            weights = [replica.result() for replica in replicas]
        return [list(at_step) for at_step in zip(*weights, strict=True)]

    def _train(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        rank: int,
        size: int,
        quorum_id: int,
        data: torch.Tensor,
        settings: dict[str, Any],
    ) -> list[list[torch.Tensor]]:
        plan = plan_of(quorum_id, rank=rank, size=size, store_address=f"localhost:{self._store.port}")
        answers = [plan, *[QuorumKey(quorum_id, quorum_id)] * (2 * len(data))]
        verdicts = [True] + [number not in recipe.fails for number in range(max(recipe.fails, default=-1) + 1)]
        inner = recipe.inner(list(model.parameters()))
        found = []
        with Manager(
            ProcessGroupGloo(),
            coordinator=ScriptedCoordinator(answers, verdicts),
            checkpoint_transport=MemoryTransport(),
            lighthouse_addr="localhost:1",
            hostname="localhost",
        ) as manager:
            if recipe.algorithm == "local_sgd":
                strategy: Any = LocalSGD(manager, model, inner, recipe.sync_every)
            else:
                fragments = recipe.fragments(model)
                outer = [recipe.outer(list(part.parameters())) for part in fragments]
                strategy = DiLoCo(
                    manager,
                    list(fragments),
                    inner,
                    recipe.outer(list(model.parameters())) if recipe.one_outer else outer,
                    recipe.sync_every,
                    fragment_sync_delay=recipe.delay,
                    fragment_update_alpha=recipe.alpha,
                    **settings,
                )
            with strategy:
                for batch in data:
                    inner.zero_grad()
                    loss_of(model, batch).backward()
                    inner.step()
                    found.append([one.detach().clone() for one in model.parameters()])
                    self._shared.setdefault(rank, []).append(global_weights(strategy))
        return found


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    yield Replicas()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tft-quorum")]


def expected(recipe: Recipe, num_replicas: int, inner_steps: int, dtype: torch.dtype = torch.float32) -> Trajectory:
    data = batches(num_replicas, inner_steps)
    return reference(
        [make_model(dtype) for _ in range(num_replicas)],
        recipe,
        lambda model, replica, step: loss_of(model, data[step, replica]),
        inner_steps,
    )


def check_to_the_last_bit(found: list[list[list[torch.Tensor]]], wanted: Trajectory) -> None:
    for step, (ours, theirs) in enumerate(zip(found, wanted.weights, strict=True), start=1):
        for replica, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            for place, (one, two) in enumerate(zip(own, other, strict=True)):
                assert torch.equal(one, two), f"inner step {step}, replica {replica}, parameter {place}"


def delays(num_fragments: int, sync_every: int) -> list[int]:
    """None, one step, a period, and so many that as many as can be are in flight."""
    period = sync_every // num_fragments
    return sorted({0, 1, period, sync_every - period, sync_every - 1} & set(range(sync_every)))


GRID = [
    (num_fragments, delay, alpha, one_outer, buckets)
    for num_fragments in (1, 2, 4)
    for delay in delays(num_fragments, 8)
    for alpha, one_outer, buckets in [
        (0.0, True, False),
        (0.4, False, True),
        (1.0, False, False),
        *([(0.4, True, True), (0.0, False, True)] if num_fragments == 2 else []),
    ]
]

REST_OF_THE_GRID = [
    pytest.param(num_fragments, *point, marks=pytest.mark.soak)
    for num_fragments in (1, 2, 4)
    for point in itertools.product(delays(num_fragments, 8), (0.0, 0.4, 1.0), (True, False), (True, False))
    if (num_fragments, *point) not in GRID
]


@pytest.mark.in_parts
@pytest.mark.parametrize(("num_fragments", "delay", "alpha", "one_outer", "buckets"), [*GRID, *REST_OF_THE_GRID])
def test_diloco_of_two_is_the_reference_to_the_last_bit(
    replicas: Replicas, num_fragments: int, delay: int, alpha: float, one_outer: bool, buckets: bool
) -> None:
    recipe = Recipe(
        algorithm="diloco",
        fragments=split(num_fragments),
        inner=adamw,
        outer=nesterov,
        one_outer=one_outer,
        sync_every=8,
        delay=delay,
        alpha=alpha,
    )
    # 26 numbers a bucket: the largest tensors have 45 and 42, and none of the sizes divides it.
    found = replicas.train(recipe, 2, 24, use_bucketization=buckets, bucket_cap_mb=26 * 4 / 2**20)
    check_to_the_last_bit(found, expected(recipe, 2, 24))


@pytest.mark.in_parts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize(
    ("num_fragments", "delay", "alpha", "buckets"), [(1, 3, 0.4, False), (2, 7, 0.4, True), (4, 2, 1.0, True)]
)
def test_weights_of_another_dtype_are_the_reference_to_the_last_bit(
    replicas: Replicas, dtype: torch.dtype, num_fragments: int, delay: int, alpha: float, buckets: bool
) -> None:
    """What is reduced and what is merged are rounded as the formulas are."""
    recipe = Recipe(
        algorithm="diloco",
        fragments=split(num_fragments),
        inner=lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        outer=nesterov,
        one_outer=False,
        sync_every=8,
        delay=delay,
        alpha=alpha,
    )
    settings = {"use_bucketization": buckets, "bucket_cap_mb": 26 * 4 / 2**20}
    found = replicas.train(recipe, 2, 24, dtype=dtype, **settings)
    check_to_the_last_bit(found, expected(recipe, 2, 24, dtype))


@pytest.mark.parametrize("sync_every", [1, 3])
def test_local_sgd_of_two_is_the_reference_to_the_last_bit(replicas: Replicas, sync_every: int) -> None:
    recipe = Recipe(algorithm="local_sgd", inner=adamw, sync_every=sync_every)
    check_to_the_last_bit(replicas.train(recipe, 2, 10), expected(recipe, 2, 10))


@pytest.mark.in_parts
@pytest.mark.parametrize("num_replicas", [3, 5])
@pytest.mark.parametrize(
    ("algorithm", "num_fragments", "delay", "alpha", "one_outer", "buckets"),
    [
        ("local_sgd", 1, 0, 0.0, True, False),
        ("diloco", 1, 0, 0.0, True, False),
        ("diloco", 2, 3, 0.4, False, True),
        ("diloco", 4, 7, 0.0, True, True),
    ],
)
def test_more_than_two_are_equal_to_the_last_bit_and_the_reference_up_to_rounding(
    replicas: Replicas,
    num_replicas: int,
    algorithm: Any,
    num_fragments: int,
    delay: int,
    alpha: float,
    one_outer: bool,
    buckets: bool,
) -> None:
    """The order in which a process group adds three numbers is its own; which weights all hold then is not."""
    recipe = Recipe(
        algorithm=algorithm,
        fragments=split(num_fragments),
        inner=adamw,
        outer=nesterov,
        one_outer=one_outer,
        sync_every=8,
        delay=delay,
        alpha=alpha,
    )
    shared: dict[int, list[Any]] = {}
    settings = {"use_bucketization": buckets, "bucket_cap_mb": 26 * 4 / 2**20} if algorithm == "diloco" else {}
    found = replicas.train(recipe, num_replicas, 16, shared=shared, **settings)
    wanted = expected(recipe, num_replicas, 16)
    for at_step in zip(*shared.values(), strict=True):
        for other in at_step[1:]:
            assert all(map(torch.equal, at_step[0], other))
    for ours, theirs in zip(shared[0], wanted.shared, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    if alpha == 0.0 and delay == 0:
        assert all(map(torch.equal, *found[-1][:2]))
    for own, other in zip(found[-1], wanted.weights[-1], strict=True):
        for one, two in zip(own, other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("num_fragments", "delay", "fails"),
    [(1, 0, {0}), (1, 3, {1}), (2, 2, {0, 1}), (2, 7, {1}), (4, 7, {2, 5}), (4, 3, {3})],
)
def test_syncs_that_fail_leave_both_with_the_last_global_weights_and_go_on(
    replicas: Replicas, num_fragments: int, delay: int, fails: set[int]
) -> None:
    """With several in flight, all of them fail; and the one after them is about the fragment of the first of those."""
    recipe = Recipe(
        algorithm="diloco",
        fragments=split(num_fragments),
        inner=adamw,
        outer=nesterov,
        sync_every=8,
        delay=delay,
        alpha=0.4,
        fails=fails,
    )
    check_to_the_last_bit(replicas.train(recipe, 2, 32), expected(recipe, 2, 32))


def test_local_sgd_that_fails_to_synchronize(replicas: Replicas) -> None:
    recipe = Recipe(algorithm="local_sgd", inner=adamw, sync_every=2, fails={1, 2})
    check_to_the_last_bit(replicas.train(recipe, 2, 10), expected(recipe, 2, 10))
