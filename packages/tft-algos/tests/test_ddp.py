"""One layout of buckets in every step, reduced in its order and waited for at the end of the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tft_algos import DistributedDataParallel, Unsupported
from tft_algos.ddp import _Backward
from tft_coord.errors import GroupLost
from tft_pg.work import DummyWork


class Sums:
    """A Manager that doubles what it is given, when it is waited for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.errors: list[Exception] = []

    def allreduce(self, tensor: torch.Tensor) -> dist.Work:
        self.sizes.append(tensor.numel())
        return Doubled(tensor)

    def report_error(self, error: Exception) -> None:
        self.errors.append(error)


class Doubled(dist.Work):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def wait(self, timeout: Any = None) -> bool:
        self.tensor.mul_(2)
        return True


class OtherOrder(torch.nn.Module):
    """Modules are used in another order than that in which they are defined."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(300, 300)
        self.b = torch.nn.Linear(300, 400)
        self.c = torch.nn.Linear(400, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.a(self.c(self.b(x)))
        return result


def made(**kwargs: Any) -> tuple[Sums, DistributedDataParallel, OtherOrder]:
    torch.manual_seed(0)
    manager, module = Sums(), OtherOrder()
    return manager, DistributedDataParallel(manager, module, bucket_cap_mb=0.5, **kwargs), module  # type: ignore[arg-type]


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}])
def test_every_step_reduces_the_same_buckets_in_the_same_order(kwargs: dict[str, Any]) -> None:
    manager, model, module = made(**kwargs)
    seen = []
    for _ in range(4):
        manager.sizes.clear()
        model(torch.ones(2, 300)).sum().backward()
        seen.append(list(manager.sizes))
        model.zero_grad()
    assert len(seen[0]) > 1
    assert seen == [seen[0]] * 4
    assert sum(seen[0]) == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}])
def test_after_backward_the_gradients_are_the_reduced_ones(kwargs: dict[str, Any]) -> None:
    _, model, module = made(**kwargs)
    alone = OtherOrder()
    alone.load_state_dict(module.state_dict())
    for _ in range(2):
        x = torch.randn(2, 300)
        model.zero_grad()
        alone.zero_grad()
        model(x).square().mean().backward()
        alone(x).square().mean().backward()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, 2 * theirs.grad, rtol=0, atol=0)


def test_without_synchronization_gradients_add_up_and_are_reduced_once() -> None:
    manager, model, module = made()
    x = torch.ones(1, 300)
    with model.no_sync():
        model(x).sum().backward()
    assert manager.sizes == []
    model(x).sum().backward()
    assert sum(manager.sizes) == sum(parameter.numel() for parameter in module.parameters())
    # d sum / d bias is 1 in each pass, and the stand-in doubles what it reduces.
    assert module.a.bias.grad is not None
    assert module.a.bias.grad.tolist() == [4.0] * 300


def test_a_group_is_averaged_inside_first_and_passed_on_in_the_order_of_the_buckets() -> None:
    class Slow(dist.Work):
        """Ends only when it is waited for."""

        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: Any = None) -> bool:
            return True

    class Inside:
        """A group of two whose other rank gives nothing; its first reduction ends last."""

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def size(self) -> int:
            return 2

        def allreduce(self, tensors: list[torch.Tensor], op: object) -> dist.Work:
            self.sizes.append(tensors[0].numel())
            return Slow() if len(self.sizes) == 1 else DummyWork(tensors)

    manager, inside = Sums(), Inside()
    backward = _Backward(manager, inside)  # type: ignore[arg-type]
    first, second = torch.full((2,), 4.0), torch.full((3,), 4.0)
    backward._ends = True  # the engine's callback is called by hand
    backward.reduce(first)
    backward.reduce(second)
    assert (inside.sizes, manager.sizes) == ([2, 3], [])
    backward.end()
    assert manager.sizes == [2, 3]
    assert (first.tolist(), second.tolist()) == ([4.0] * 2, [4.0] * 3)


def test_a_reduction_that_fails_inside_the_group_is_the_end_of_the_group() -> None:
    class Broken(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            raise RuntimeError("Connection closed by peer")

        def is_completed(self) -> bool:
            return True

    class Inside:
        def size(self) -> int:
            return 2

        def allreduce(self, tensors: list[torch.Tensor], op: object) -> dist.Work:
            return Broken()

    manager = Sums()
    backward = _Backward(manager, Inside())  # type: ignore[arg-type]
    backward._ends = True
    backward.reduce(torch.ones(2))
    backward.end()
    assert [type(error) for error in manager.errors] == [GroupLost]
    assert "Connection closed by peer" in str(manager.errors[0])


def test_what_can_not_work_is_refused_with_a_sentence() -> None:
    with pytest.raises(Unsupported, match="find_unused_parameters does not exist here"):
        made(find_unused_parameters=True)
    with pytest.raises(Unsupported, match="static_graph needs gradient_as_bucket_view"):
        made(static_graph=True, gradient_as_bucket_view=False)
