"""What training loops do beside the inner optimizer's step, under LocalSGD and DiLoCo, over real Gloo groups.

Two replicas, each in a thread, and the same two in a list, whose means and outer steps are computed here: they end with
the same weights, to the last bit.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest
import torch
from torch.distributed import TCPStore

from tft_algos import DiLoCo, LocalSGD, Manager, fragment_model
from tft_algos.testing import MemoryTransport, ScriptedCoordinator, plan_of
from tft_coord.core.types import QuorumKey
from tft_pg import ProcessGroupGloo

SYNC_EVERY, ROUNDS, WIDTH = 3, 3, 6
PATIENCE_S = 60.0
NUMBERS = itertools.count(1)  # of quorums, so that no two share a prefix in the store

Step: TypeAlias = Callable[[torch.Tensor], None]
# Of one replica, by its number: its inner optimizer, and what its loop does with a batch.
Loop: TypeAlias = Callable[[torch.nn.Module, int], tuple[torch.optim.Optimizer, Step]]


def real(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))).to(dtype)


class Rotation(torch.nn.Module):
    """A complex layer with a real bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.bias = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.view_as_real(x.to(torch.complex64) @ self.weight).sum(-1) + self.bias
        return result


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch.to(next(model.parameters()).real.dtype)).square().mean()
    return result


def batches(replica: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(replica)
    while True:
        yield torch.randn(4, WIDTH, generator=generator)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


# --- the loops --------------------------------------------------------------------------------------------------------


def plain(model: torch.nn.Module, _: int) -> tuple[torch.optim.Optimizer, Step]:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: torch.Tensor) -> None:
        inner.zero_grad()
        loss_of(model, batch).backward()
        inner.step()

    return inner, step


def with_a_scheduler(model: torch.nn.Module, replica: int) -> tuple[torch.optim.Optimizer, Step]:
    inner, train = plain(model, replica)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, 0.1, SYNC_EVERY * ROUNDS)

    def step(batch: torch.Tensor) -> None:
        train(batch)
        scheduler.step()

    return inner, step


def with_clipping(model: torch.nn.Module, _: int) -> tuple[torch.optim.Optimizer, Step]:
    inner = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(batch: torch.Tensor) -> None:
        inner.zero_grad()
        loss_of(model, batch).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        inner.step()

    return inner, step


def with_a_scaler(model: torch.nn.Module, replica: int) -> tuple[torch.optim.Optimizer, Step]:
    """The first replica's second step overflows, so that its scaler skips it."""
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler, numbers = torch.amp.GradScaler("cpu", init_scale=16.0), itertools.count()

    def step(batch: torch.Tensor) -> None:
        inner.zero_grad()
        scale = float("inf") if (replica, next(numbers)) == (0, 1) else 1.0
        scaler.scale(loss_of(model, batch) * scale).backward()
        scaler.step(inner)
        scaler.update()

    return inner, step


def compiled(model: torch.nn.Module, replica: int) -> tuple[torch.optim.Optimizer, Step]:
    inner, _ = plain(model, replica)
    fast = torch.compile(model, backend="eager")
    loss_of(fast, torch.zeros(4, WIDTH))  # compiled now

    def step(batch: torch.Tensor) -> None:
        inner.zero_grad()
        loss_of(fast, batch).backward()
        inner.step()

    return inner, step


# --- two replicas, and what they must hold ----------------------------------------------------------------------------


def models(make: Callable[[], torch.nn.Module]) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    first, second = make(), make()
    second.load_state_dict(first.state_dict())
    return [first, second]


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Pair:
    """What came of two replicas.

    Attributes:
        weights: of each.
        batches: that each trained.
        strategies: of each.
        fingerprints: that each was compared by.
    """

    def __init__(
        self,
        store: TCPStore,
        loop: Loop,
        *,
        algorithm: str = "diloco",
        make: Callable[[], torch.nn.Module] = real,
        fragments: Callable[[torch.nn.Module, int], Sequence[torch.nn.Module]] = lambda model, _: [model],
        **settings: Any,
    ) -> None:
        quorum_id = next(NUMBERS)
        self.batches = [0, 0]
        self.strategies: list[Any] = [None, None]
        self.fingerprints: list[Any] = [None, None]
        replicas = models(make)

        def train(replica: int) -> list[torch.Tensor]:
            model = replicas[replica]
            plan = plan_of(quorum_id, rank=replica, size=2, store_address=f"localhost:{store.port}")
            coordinator = ScriptedCoordinator([plan, *[QuorumKey(quorum_id, quorum_id)] * ROUNDS])
            with Manager(
                ProcessGroupGloo(),
                coordinator=coordinator,
                checkpoint_transport=MemoryTransport(),
                lighthouse_addr="localhost:1",
                hostname="localhost",
            ) as manager:
                inner, step = loop(model, replica)
                if algorithm == "local_sgd":
                    strategy: Any = LocalSGD(manager, model, inner, SYNC_EVERY)
                else:
                    outer = nesterov(model.parameters())
                    strategy = DiLoCo(manager, fragments(model, replica), inner, outer, SYNC_EVERY, **settings)
                self.strategies[replica] = strategy
                with strategy:
                    for batch in batches(replica):
                        step(batch)
                        self.batches[replica] += 1
                        if manager.current_step() == 1 + ROUNDS:
                            break
                self.fingerprints[replica] = coordinator.requests[0].fingerprint
                return [one.detach().clone() for one in model.parameters()]

        with ThreadPoolExecutor(2) as threads:
            self.weights = list(threads.map(train, range(2)))


def expected(loop: Loop, *, algorithm: str = "diloco", make: Callable[[], torch.nn.Module] = real) -> list[Any]:
    """An inner step is a step that the inner optimizer makes."""
    replicas = models(make)
    counts = [0, 0]
    shared = [torch.nn.Parameter(one.detach().clone()) for one in replicas[0].parameters()]
    outer = nesterov(shared)
    loops = []
    for replica, model in enumerate(replicas):
        inner, step = loop(model, replica)

        def counted(*_: Any, replica: int = replica) -> None:
            counts[replica] += 1

        inner.register_step_post_hook(counted)
        loops.append((step, batches(replica)))
    for end in range(1, ROUNDS + 1):
        for replica, (step, data) in enumerate(loops):
            while counts[replica] < end * SYNC_EVERY:
                step(next(data))
        with torch.no_grad():
            for whole, *live in zip(shared, *(model.parameters() for model in replicas), strict=True):
                if algorithm == "local_sgd":
                    whole.copy_((live[0] + live[1]) / 2)
                else:
                    whole.grad = ((whole - live[0]) + (whole - live[1])) / 2
            if algorithm == "diloco":
                outer.step()
            for model in replicas:
                for whole, own in zip(shared, model.parameters(), strict=True):
                    own.copy_(whole)
    return [one.detach() for one in shared]


def check(pair: Pair, wanted: list[torch.Tensor]) -> None:
    for weights in pair.weights:
        for place, (one, two) in enumerate(zip(weights, wanted, strict=True)):
            assert torch.equal(one, two), f"parameter {place}"


@pytest.fixture(params=["diloco", "local_sgd"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- what holds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: real(torch.bfloat16), lambda: torch.nn.Sequential(Rotation(), Rotation())], ids=["bf16", "complex"]
)
@pytest.mark.parametrize("settings", [{}, {"use_bucketization": True, "bucket_cap_mb": 1e-5}], ids=["", "buckets"])
def test_weights_of_any_kind(store: TCPStore, make: Callable[[], torch.nn.Module], settings: Any) -> None:
    check(Pair(store, plain, make=make, **settings), expected(plain, make=make))


@pytest.mark.parametrize("loop", [plain, with_a_scheduler, with_clipping], ids=lambda loop: loop.__name__)
def test_a_scheduler_and_clipping_go_with_the_inner_optimizer(store: TCPStore, algorithm: str, loop: Loop) -> None:
    check(Pair(store, loop, algorithm=algorithm), expected(loop, algorithm=algorithm))


def test_a_step_that_the_scaler_skips_is_no_inner_step(store: TCPStore, algorithm: str) -> None:
    """So the replica trains a batch more before it synchronizes, and nothing of the overflow is in the mean."""
    pair = Pair(store, with_a_scaler, algorithm=algorithm)
    check(pair, expected(with_a_scaler, algorithm=algorithm))
    assert pair.batches == [SYNC_EVERY * ROUNDS + 1, SYNC_EVERY * ROUNDS]
    assert all(weight.isfinite().all() for weight in pair.weights[0])


def test_one_replica_compiles_its_model_and_one_does_not(store: TCPStore, algorithm: str) -> None:
    """Whatever is compiled: names of parameters are those of the model, in the state too.

    The other trains when that is done: while a thread compiles, torch.compiler.is_compiling() is true in all of them,
    and AdamW's step rounds otherwise.
    """
    is_compiled = threading.Event()

    def compiles(model: torch.nn.Module, replica: int) -> tuple[torch.optim.Optimizer, Step]:
        if replica == 0:
            inner, step = compiled(model, replica)
            is_compiled.set()
            return inner, step
        assert is_compiled.wait(PATIENCE_S)
        return plain(model, replica)

    def fragments(model: torch.nn.Module, replica: int) -> list[torch.nn.Module]:
        return fragment_model(torch.compile(model, backend="eager") if replica == 0 else model, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about itself
        pair = Pair(store, compiles, algorithm=algorithm, fragments=fragments)
    check(pair, expected(plain, algorithm=algorithm))
    assert pair.fingerprints[0] == pair.fingerprints[1] != ()
    compiled_state, state = (strategy.state_dict() for strategy in pair.strategies)
    if algorithm == "diloco":
        compiled_state, state = (each["StreamingDiLoCoFragment_0"] for each in (compiled_state, state))
    assert list(compiled_state["original_parameters"]) == list(state["original_parameters"])
    assert list(state["original_parameters"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
