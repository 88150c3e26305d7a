"""The optimizer wrapper: a step is a transaction, and everything else is the wrapped optimizer's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from tft_algos import Optimizer, UsageError


class Decides:
    """A Manager that writes down what it was asked."""

    def __init__(self, *verdicts: bool) -> None:
        self.verdicts = list(verdicts)
        self.calls: list[str] = []
        self.torn: Exception | None = None

    def start_quorum(self) -> None:
        self.calls.append("start_quorum")

    def should_commit(self) -> bool:
        self.calls.append("should_commit")
        return self.verdicts.pop(0)

    def report_torn(self, error: Exception) -> None:
        self.torn = error


def wrapped(*verdicts: bool) -> tuple[Optimizer, torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    manager = Decides(*verdicts)
    return Optimizer(manager, torch.optim.SGD([parameter], lr=0.5)), parameter, manager  # type: ignore[arg-type]


def test_it_steps_when_the_group_commits_and_only_then() -> None:
    optimizer, parameter, manager = wrapped(False, True)
    for expected in (1.0, 0.5):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        assert parameter.tolist() == [expected, expected]
    assert manager.calls == ["start_quorum", "should_commit"] * 2


def test_zero_grad_clears_the_gradients() -> None:
    optimizer, parameter, _ = wrapped()
    parameter.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert parameter.grad is None


def test_a_closure_is_refused_with_a_sentence() -> None:
    optimizer, _, manager = wrapped(True)
    with pytest.raises(UsageError, match="compute the loss before step"):
        optimizer.step(lambda: 0.0)
    assert manager.calls == []


def test_it_is_an_optimizer_whose_parts_are_the_wrapped_ones() -> None:
    optimizer, _, _ = wrapped()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optim.param_groups
    assert optimizer.state is optimizer.optim.state
    assert optimizer.defaults is optimizer.optim.defaults
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert optimizer.optim.param_groups[0]["lr"] == 0.25
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optim.param_groups) == 2


def test_schedulers_drive_it() -> None:
    optimizer, parameter, _ = wrapped(True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == pytest.approx(0.05)


def test_hooks_run_when_the_wrapped_optimizer_steps() -> None:
    optimizer, parameter, _ = wrapped(False, True)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    parameter.grad = torch.zeros(2)
    optimizer.step()
    assert seen == []
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "saving", "saved", "loading", "loaded"]


def test_an_optimizer_that_raises_after_the_commit_leaves_a_torn_replica() -> None:
    optimizer, _, manager = wrapped(True)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError, match="no room"):
        optimizer.step()
    assert isinstance(manager.torn, MemoryError)


def test_it_says_what_it_wraps_and_is_not_pickled() -> None:
    optimizer, _, _ = wrapped()
    assert repr(optimizer).startswith("Optimizer(SGD (")
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        pickle.dumps(optimizer)
