"""Which tensors of a wrapped model or optimizer a state lacks; copies of them are no fault."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.utils import parameters_to_vector

from tft_algos.manager.recovery.coverage import (
    forgotten_schedulers,
    shortened,
    tensors_of_models,
    tensors_of_optimizers,
    uncovered,
)
from tft_ckpt import LocalShard, Placement, Sharding


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def trained(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer that has made a step."""
    module = model()
    optimizer = kind(module.parameters(), lr=0.01)  # type: ignore[call-arg]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return module, optimizer


def lacking(module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> list[str]:
    held = tensors_of_models([module])
    return uncovered([*held, *tensors_of_optimizers([optimizer], held)], state)


def test_a_forgotten_model_optimizer_or_buffer_is_named() -> None:
    module, adam = trained()
    whole = {"m": module.state_dict(), "o": adam.state_dict()}
    assert lacking(module, adam, whole) == []
    moments = [f"AdamW.{key} of Sequential.{name}" for name, _ in module.named_parameters() for key in adam_keys()]
    assert lacking(module, adam, {"m": module.state_dict()}) == moments
    buffers = {"Sequential.1.running_mean", "Sequential.1.running_var", "Sequential.1.num_batches_tracked"}
    assert set(lacking(module, adam, whole | {"m": dict(module.named_parameters())})) == buffers
    assert "Sequential.0.weight" in lacking(module, adam, {"o": adam.state_dict()})
    assert len(lacking(module, adam, {})) == len(moments) + 7


def adam_keys() -> list[str]:
    return ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(
    "take",
    [
        lambda m: {k: v.clone() for k, v in m.state_dict().items()},
        lambda m: {k: v.double() for k, v in m.state_dict().items()},
        lambda m: get_model_state_dict(m),
        lambda m: {k: v.numpy().copy() for k, v in m.state_dict().items()},
        lambda m: {k: sharded(v) for k, v in m.state_dict().items()},
        lambda m: {"parameters": parameters_to_vector(m.parameters()), "buffers": [b.clone() for b in m.buffers()]},
        lambda m: {"saved": bytes(10_000)},
        lambda m: {"views": [v.view(-1)[:1] for v in m.state_dict().values()]},
    ],
    ids=["copies", "other dtype", "torch's own", "numpy", "shards", "one vector", "bytes", "views"],
)
def test_copies_raise_no_false_alarm(take: Callable[[torch.nn.Module], dict[str, Any]]) -> None:
    module, adam = trained()
    assert lacking(module, adam, {"m": take(module), "o": adam.state_dict()}) == []


def sharded(whole: torch.Tensor) -> LocalShard:
    """What one of two processes has of a tensor, if it has a dimension to be cut, in memory of its own."""
    how = Placement(0 if whole.dim() else None)
    local = whole.clone().chunk(2)[0].clone() if whole.dim() else whole.clone()
    return LocalShard(local, Sharding(tuple(whole.shape), tuple(whole.stride()), (how,), (2,), None, (0,)))


def test_what_no_state_dict_holds_is_not_missed() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(3))
    module.register_buffer("mask", torch.ones(5), persistent=False)
    module.register_buffer("nothing", None)
    module.register_buffer("empty", torch.ones(0))
    module.register_buffer("sparse", torch.eye(7).to_sparse())
    held = tensors_of_models([module])
    assert uncovered(held, {"m": dict(module[0].named_parameters())}) == []
    assert {one.name for one in held} >= {"Sequential.0.weight", "Sequential.empty"}
    tied = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)])
    tied[1].weight = tied[0].weight
    assert uncovered(tensors_of_models([tied]), {"w": tied[1].weight}) == []


def test_parameters_that_only_an_optimizer_has_are_looked_for_too() -> None:
    lone = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([lone])
    assert uncovered(tensors_of_optimizers([sgd], []), {}) == ["SGD.params[0]"]
    assert uncovered(tensors_of_optimizers([sgd], []), {"lone": lone}) == []
    assert not sgd.state, "looking makes no state"


def test_few_names_are_told_and_how_many_more() -> None:
    assert shortened(list("abcde")) == "a, b, c, d, e"
    assert shortened(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_what_is_frozen_is_not_missed_and_running_statistics_are() -> None:
    base, adapter = model(), torch.nn.Linear(4, 4)
    base.append(torch.nn.LayerNorm(4))
    base[2].register_buffer("scale", torch.ones(9))
    base.requires_grad_(False)
    both = torch.nn.Sequential(base, adapter)
    adam = torch.optim.AdamW(both.parameters())
    statistics = {f"Sequential.0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(lacking(both, adam, {"adapter": adapter.state_dict()})) == statistics
    base.eval()
    assert lacking(both, adam, {"adapter": adapter.state_dict()}) == []
    assert uncovered(tensors_of_optimizers([adam], []), {"adapter": adapter.state_dict()}) == []
    assert lacking(base, adam, {"adapter": adapter.state_dict()}) == []


def test_frozen_weights_that_are_registered_are_no_copies_of_others() -> None:
    both = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    both[0].requires_grad_(False)
    held = tensors_of_models([both])
    assert uncovered(held, {"base": both[0].state_dict()}) == ["Sequential.1.weight", "Sequential.1.bias"]


# --- schedulers -------------------------------------------------------------------------------------------------------

schedulers = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 3]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o), schedulers.LinearLR(o)], [2]),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o), schedulers.StepLR(o, 2)]),
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 9),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
}


def forgotten(optimizers: list[torch.optim.Optimizer], state: dict[str, Any]) -> list[str]:
    found = forgotten_schedulers(optimizers, state)
    assert found.unreadable == []
    return found.forgotten


def test_every_scheduler_of_this_torch_is_tried() -> None:
    of_torch = {name for name in schedulers.__all__ if name != "LRScheduler"} | {"SWALR"}
    assert set(SCHEDULERS) == of_torch


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_forgotten_scheduler_is_named(kind: str) -> None:
    _, adam = trained()
    whole = {"o": adam.state_dict()}
    assert forgotten([adam], whole) == []
    scheduler = SCHEDULERS[kind](adam)
    whole["o"] = adam.state_dict()
    assert forgotten([adam], whole) == [f"{kind} of AdamW"]
    assert forgotten([trained()[1]], whole) == [], "of another optimizer"
    assert forgotten([adam], whole | {"rate": scheduler.state_dict()}) == []
    other = schedulers.StepLR(adam, 7)
    both = {"rates": [scheduler.state_dict(), {"second": other.state_dict()}]}
    assert forgotten([adam], whole | both) == []
    assert forgotten([adam], whole | {"s": other.state_dict()}) == [f"{kind} of AdamW"] or kind == "StepLR"
    del other
    gc.collect()
    adam.load_state_dict(whole["o"])  # makes other groups
    assert forgotten([adam], whole) == [f"{kind} of AdamW"]


class Halving(schedulers.LRScheduler):
    """A scheduler of a user's own, in a cycle with itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.myself = self

    def get_lr(self) -> list[Any]:
        return [base * 0.5**self.last_epoch for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"halvings": self.last_epoch}


@pytest.mark.parametrize(
    "take",
    [
        lambda s: {"scheduler": s.state_dict()},
        lambda s: {"LRScheduler": s.last_epoch},
        lambda s: {"progress": {"lr_sched": torch.tensor(s.last_epoch)}},
        lambda s: {"all": b"saved"},
        lambda s: {"mine": {"last_epoch": s.last_epoch}},
        lambda s: {"scheduler": {}},
        lambda s: {"mine": s.state_dict()},
        lambda s: {"loop": {"global_steps": s.last_epoch}},
        lambda s: {"iteration": s.last_epoch},
    ],
    ids=["own form", "a number", "a tensor", "bytes", "a part", "nothing, on purpose", "keys", "steps", "iteration"],
)
def test_a_scheduler_in_another_form_raises_no_false_alarm(take: Callable[[Any], dict[str, Any]]) -> None:
    _, adam = trained()
    halving = Halving(adam)
    assert forgotten([adam], {"o": adam.state_dict()}) == ["Halving of AdamW"]
    assert forgotten([adam], {"o": adam.state_dict(), **take(halving)}) == []


@pytest.mark.parametrize(
    "loop",
    [
        {"last_epoch": 3},
        {"last_epoch": 3, "best": 0.1},
        {"last_epoch": 3, "_step_count": 4},
        {"step": 7, "seed": 0, "epochs_left": 0},
        {"resumed_at_step": True, "steps": [5]},
    ],
)
def test_counters_of_the_loop_hide_no_forgotten_scheduler(loop: dict[str, Any]) -> None:
    _, adam = trained()
    scheduler = schedulers.StepLR(adam, 2)
    adam.step()
    scheduler.step()
    assert {int(entries["step"]) for entries in adam.state.values()} >= {2}, "nor do those of the optimizer"
    assert scheduler.last_epoch == 1
    assert forgotten([adam], {"o": adam.state_dict(), "loop": loop}) == ["StepLR of AdamW"]
    own = {key: value for key, value in scheduler.state_dict().items() if key != "gamma"}
    assert forgotten([adam], {"o": adam.state_dict(), "loop": loop, "rate": own | {"why": "no reason"}}) == []


class Raising(Halving):
    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("it has none")


def test_a_scheduler_whose_state_can_not_be_read_hides_no_other() -> None:
    _, adam = trained()
    both = Raising(adam), schedulers.StepLR(adam, 2)
    found = forgotten_schedulers([adam], {"o": adam.state_dict()})
    assert found.unreadable == ["Raising of AdamW: NotImplementedError('it has none')"]
    assert found.forgotten == ["StepLR of AdamW"]
    del both


class WithoutHash(type):
    """A class of classes that can't stand in a set."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("nobody asked for that")

    __hash__ = None  # type: ignore[assignment]


def test_other_objects_are_not_touched() -> None:
    class Proxy(metaclass=WithoutHash):
        @property
        def __class__(self) -> Any:
            raise AssertionError("nobody asked for that")

    proxies = [Proxy()]
    _, adam = trained()
    step = schedulers.StepLR(adam, 2)
    assert any(each is proxies[0] for each in gc.get_objects())
    assert forgotten([adam], {"o": adam.state_dict()}) == ["StepLR of AdamW"]
    del step, proxies


def test_a_scheduler_that_is_gone_is_not_missed() -> None:
    _, adam = trained()
    Halving(adam)
    assert adam.param_groups[0]["initial_lr"]
    assert forgotten([adam], {"o": adam.state_dict()}) == []
