"""The expected state of a LocalSGD or DiLoCo job after each inner step, computed in one process.

This is a second implementation, as the papers describe it, for tests to compare with. The replicas are models in a
list, the global weights are separate parameters, and the outer optimizer steps on those.

Law of this file: plain torch, and nothing of `tft_algos.local_sgd`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch

Parameters = list[torch.nn.Parameter]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The training of the replicas.

    Args:
        algorithm: the algorithm.
        fragments: splits a model. LocalSGD has one fragment.
        inner: makes the optimizer of one replica.
        outer: makes an outer optimizer.
        one_outer: True: one outer optimizer for all fragments. False: one for each.
        sync_every, delay, alpha: as in `DiLoCo`.
        fails: the ends that fail, by number from 0. The syncs in flight fail with such an end, and have no end
            themselves.
    """

    algorithm: Literal["diloco", "local_sgd"]
    fragments: Callable[[torch.nn.Module], Sequence[torch.nn.Module]] = lambda model: [model]
    inner: Callable[[Parameters], torch.optim.Optimizer]
    outer: Callable[[Parameters], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    one_outer: bool = True
    sync_every: int
    delay: int = 0
    alpha: float = 0.0
    fails: Collection[int] = ()


@final
@dataclass(frozen=True, slots=True)
class Trajectory:
    """The result.

    Args:
        weights: by inner step, then by replica: its parameters, in the order of the model.
        shared: by inner step: the global weights, in the order of the fragments.
    """

    weights: list[list[list[torch.Tensor]]]
    shared: list[list[torch.Tensor]]


def reference(
    models: Sequence[torch.nn.Module],
    recipe: Recipe,
    train: Callable[[torch.nn.Module, int, int], torch.Tensor],
    inner_steps: int,
) -> Trajectory:
    """Train some replicas side by side.

    Args:
        models: one model for each replica, of equal form. They are trained. All begin with the weights of the first.
        recipe: how they are trained.
        train: returns the loss of (model, replica, inner step). Steps count from 0.
        inner_steps: the number of inner steps.
    """
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    inner = [recipe.inner(list(model.parameters())) for model in models]
    live = [[list(part.parameters()) for part in recipe.fragments(model)] for model in models]
    shared = [[torch.nn.Parameter(one.detach().clone()) for one in part] for part in live[0]]
    if recipe.one_outer:
        outer = [recipe.outer([one for part in shared for one in part])] * len(shared)
    else:
        outer = [recipe.outer(part) for part in shared]
    period = recipe.sync_every // len(shared)
    first = period - recipe.delay % period
    commits = ends = 0
    flight: list[tuple[int, int, list[torch.Tensor]]] = []  # fragment, last inner step, mean
    trajectory = Trajectory([], [])

    def begin(now: int) -> None:
        part = (commits + len(flight)) % len(shared)
        mean = []
        for index, whole in enumerate(shared[part]):
            given = [own[part][index].detach() for own in live]
            if recipe.algorithm == "diloco":
                given = [whole.detach() - one for one in given]
            mean.append(sum(given[1:], given[0]) / len(live))
        flight.append((part, now + recipe.delay, mean))

    def end() -> None:
        nonlocal commits, ends
        ends += 1
        if ends - 1 in recipe.fails:
            for part, _, _ in flight:
                for own in live:
                    _set(own[part], shared[part])
            flight.clear()
            return
        part, _, mean = flight.pop(0)
        if recipe.algorithm == "diloco":
            for one, gradient in zip(shared[part], mean, strict=True):
                one.grad = gradient
            outer[part].step()
            for one in shared[part]:
                one.grad = None
        else:
            _set(shared[part], mean)
        for own in live:
            _set(own[part], [whole.lerp(one, recipe.alpha) for whole, one in zip(shared[part], own[part], strict=True)])
        commits += 1

    for now in range(1, inner_steps + 1):
        for replica, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            train(model, replica, now - 1).backward()
            optimizer.step()
        if flight and flight[0][1] == now:
            end()
        if now >= first and (now - first) % period == 0:
            begin(now)
            if recipe.delay == 0:
                end()
        trajectory.weights.append([[one.detach().clone() for one in model.parameters()] for model in models])
        trajectory.shared.append([one.detach().clone() for part in shared for one in part])
    return trajectory


@torch.no_grad()
def _set(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for one, value in zip(into, values, strict=True):
        one.copy_(value)
