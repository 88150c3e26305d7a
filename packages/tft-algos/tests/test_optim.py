"""The optimizer wrapper: a step is a transaction, and everything else is the wrapped optimizer's."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tft_algos import ConfigError, DistributedDataParallel, Optimizer, UnsupportedFeatureError, UsageError
from tft_algos.testing import plan_of
from tft_coord.core.types import QuorumKey


class Decides:
    """A Manager that writes down what it was asked; it commits where no verdicts are left."""

    def __init__(self, *verdicts: bool) -> None:
        self.verdicts = list(verdicts)
        self.calls: list[str] = []
        self.torn: BaseException | None = None
        self.applies = False
        self.attempt = 0
        self.verdict: bool | None = None
        self.is_untouched = False  # its steps have reductions
        self.participates = True
        self.step = 0
        self.strategy = self

    def start_quorum(self) -> None:
        self.calls.append("start_quorum")
        self.attempt += 1
        self.verdict = None

    def should_commit(self) -> bool:
        self.calls.append("should_commit")
        self.verdict = self.verdicts.pop(0) if self.verdicts else True
        return self.verdict

    def is_participating(self) -> bool:
        return self.participates

    def current_step(self) -> int:
        return self.step

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        self.applies = True
        yield
        self.applies = False

    def report_torn(self, error: BaseException) -> None:
        self.torn = error


def wrap(manager: Decides, optimizer: torch.optim.Optimizer) -> Optimizer:
    return Optimizer(manager, optimizer)  # type: ignore[arg-type]


def wrapped(*verdicts: bool) -> tuple[Optimizer, torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    manager = Decides(*verdicts)
    return wrap(manager, torch.optim.SGD([parameter], lr=0.5)), parameter, manager


def test_it_steps_when_the_group_commits_and_only_then_and_says_so() -> None:
    optimizer, parameter, manager = wrapped(False, True)
    for committed, expected in ((False, 1.0), (True, 0.5)):
        optimizer.zero_grad()
        parameter.sum().backward()
        assert optimizer.step() is committed
        assert parameter.tolist() == [expected, expected]
    assert manager.calls == ["start_quorum", "should_commit"] * 2


def test_while_it_steps_it_says_so() -> None:
    optimizer, parameter, manager = wrapped(False, True)
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(manager.applies))
    for _ in range(2):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
    assert seen == [True]
    assert not manager.applies


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


# --- fault 13: all that an optimizer has ------------------------------------------------------------------------------


def test_fault_13_it_is_an_optimizer_whose_parts_are_the_wrapped_ones() -> None:
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


def test_its_state_can_be_set_anew_as_that_of_every_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = wrap(Decides(), torch.optim.SGD([parameter], lr=0.5, momentum=0.9))  # type: ignore[arg-type]
    parameter.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.step()
    assert optimizer.state
    optimizer.state = defaultdict(dict)
    optimizer.defaults = {"lr": 0.25}
    optimizer.param_groups = [{**group, "lr": 0.25} for group in optimizer.param_groups]
    assert not optimizer.optim.state
    assert optimizer.optim.defaults == {"lr": 0.25}
    assert optimizer.optim.param_groups[0]["lr"] == 0.25


def test_fault_13_hooks_of_every_kind_run_when_the_wrapped_optimizer_steps() -> None:
    optimizer, parameter, _ = wrapped(False, True)
    seen: list[str] = []
    everywhere = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before any")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after any")),
    ]
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    optimizer.zero_grad()
    parameter.grad = torch.zeros(2)
    optimizer.step()
    assert seen == []
    optimizer.zero_grad()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in everywhere:
        handle.remove()
    assert sorted(seen[:2]) == ["before", "before any"]
    assert sorted(seen[2:4]) == ["after", "after any"]
    assert seen[4:] == ["saving", "saved", "loading", "loaded"]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda _: 0.9),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [1, 3]),
    "ConstantLR": lambda it: lr_scheduler.ConstantLR(it),
    "LinearLR": lambda it: lr_scheduler.LinearLR(it),
    "ExponentialLR": lambda it: lr_scheduler.ExponentialLR(it, 0.9),
    "PolynomialLR": lambda it: lr_scheduler.PolynomialLR(it),
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 5),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 3),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.1, 0.5, step_size_up=2),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.5, total_steps=20),
    "ReduceLROnPlateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=0),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.ConstantLR(it), lr_scheduler.ExponentialLR(it, 0.9)], [2]
    ),
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(it), lr_scheduler.ExponentialLR(it, 0.9)], it
    ),
    "SWALR": lambda it: torch.optim.swa_utils.SWALR(it, 0.01, anneal_epochs=3),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    there = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert there - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_the_wrapped_one(name: str) -> None:
    def learning_rates(make: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[tuple[float, float]]:
        parameter = torch.nn.Parameter(torch.ones(2))
        inner = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
        optimizer = make(inner)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler = SCHEDULERS[name](optimizer)
            seen = []
            for _ in range(6):
                optimizer.zero_grad()
                parameter.square().sum().backward()
                optimizer.step()
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                seen.append((inner.param_groups[0]["lr"], inner.param_groups[0]["momentum"]))
        scheduler.load_state_dict(scheduler.state_dict())
        return seen

    assert learning_rates(lambda inner: wrap(Decides(), inner)) == learning_rates(lambda inner: inner)


def test_a_scheduler_that_steps_only_with_the_optimizer_counts_commits() -> None:
    optimizer, parameter, _ = wrapped(False, True, False, True)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        parameter.sum().backward()
        if optimizer.step():
            scheduler.step()
    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_a_step_with_infinities_and_the_next_zero_grad_begins_another(fused: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    manager = Decides()
    optimizer = wrap(manager, torch.optim.SGD([parameter], lr=0.5, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    stepped = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([parameter], 2**0.5)
        stepped.append(scaler.step(optimizer))
        scaler.update()
    assert stepped == [True, None, True]
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(parameter.detach(), torch.zeros(2), atol=1e-5, rtol=0)
    assert manager.calls == ["start_quorum", "should_commit", "start_quorum", "start_quorum", "should_commit"]


@pytest.mark.parametrize("wrapped_by", ["nothing", "a scheduler"])
@pytest.mark.parametrize("healed_to", [4.0, 64.0])
def test_gradients_that_were_unscaled_before_another_scale_was_healed_are_not_stepped_with(
    healed_to: float, wrapped_by: str
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    source = torch.amp.GradScaler("cpu", init_scale=healed_to, growth_interval=100).state_dict()

    class Heals(Decides):
        def should_commit(self) -> bool:
            if not self.participates:
                scaler.load_state_dict(source)
            return super().should_commit()

    manager, parameter = Heals(), torch.nn.Parameter(torch.ones(1))
    optimizer = wrap(manager, torch.optim.SGD([parameter], lr=0.5))
    if wrapped_by == "a scheduler":
        lr_scheduler.ConstantLR(optimizer, factor=1.0)
    stepped = []
    for manager.participates in (False, False, True):  # it heals twice
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        stepped.append(scaler.step(optimizer))
        scaler.update()
    differed = healed_to != 4.0
    assert stepped == [not differed, True, True]
    assert (manager.torn is not None) == differed
    if differed:
        assert "unscaled by 4, and the scale that this replica healed to is 64" in str(manager.torn)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_optimizer_that_raises_after_the_commit_leaves_a_torn_replica(error: type[BaseException]) -> None:
    optimizer, _, manager = wrapped(True)

    def fail(*_: object) -> None:
        raise error("no room")

    optimizer.register_step_pre_hook(fail)
    optimizer.zero_grad()
    with pytest.raises(error, match="no room"):
        optimizer.step()
    assert isinstance(manager.torn, error)


@pytest.mark.parametrize(("verdict", "torn"), [(True, True), (False, False), (None, False)])
def test_an_interrupt_between_the_verdict_and_the_step_leaves_a_torn_replica(verdict: bool | None, torn: bool) -> None:
    class Interrupted(Decides):
        def should_commit(self) -> bool:
            self.verdict = verdict
            raise KeyboardInterrupt

    manager = Interrupted()
    optimizer = wrap(manager, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5))
    optimizer.zero_grad()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert isinstance(manager.torn, KeyboardInterrupt) == torn


@pytest.mark.parametrize(
    ("swap", "optim", "given"),
    [
        (False, torch.optim.SGD, "a Decides and SGD"),
        (False, None, "a Decides and NoneType"),
        (True, torch.optim.SGD([torch.zeros(1)]), "a SGD and Decides"),
    ],
)
def test_what_is_no_optimizer_of_a_manager_is_refused_when_it_is_wrapped(swap: bool, optim: Any, given: str) -> None:
    arguments: list[Any] = [optim, Decides()] if swap else [Decides(), optim]
    with pytest.raises(
        ConfigError, match=f"Optimizer was given {given}; give a Manager, and the torch.optim.Optimizer after it"
    ):
        Optimizer(*arguments)


def test_it_says_what_it_wraps_and_is_neither_copied_nor_pickled() -> None:
    optimizer, _, _ = wrapped()
    assert repr(optimizer).startswith("Optimizer(SGD (")
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
            copied(optimizer)


# --- several optimizers on one Manager --------------------------------------------------------------------------------


def pair(*verdicts: bool) -> tuple[list[Optimizer], list[torch.nn.Parameter], Decides]:
    manager = Decides(*verdicts)
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    return [wrap(manager, torch.optim.SGD([parameter], lr=0.5)) for parameter in parameters], parameters, manager


def test_optimizers_that_begin_together_share_one_vote() -> None:
    optimizers, parameters, manager = pair(True, False, True)
    stepped = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (parameters[0] + parameters[1]).backward()
        stepped.append([optimizer.step() for optimizer in optimizers])
    assert stepped == [[True, True], [False, False], [True, True]]
    assert manager.calls == ["start_quorum", "should_commit"] * 3
    assert [parameter.item() for parameter in parameters] == [0.0, 0.0]


def test_optimizers_that_alternate_have_steps_of_their_own() -> None:
    optimizers, parameters, manager = pair()
    for _ in range(2):
        for optimizer, parameter in zip(optimizers, parameters, strict=True):
            optimizer.zero_grad()
            parameter.backward()
            assert optimizer.step()
    assert manager.calls == ["start_quorum", "should_commit"] * 4


def test_a_manager_counts_what_they_share_once(rigs: Any) -> None:
    rig = rigs(plan_of(7), *[QuorumKey(7, 7)] * 4, verdicts=[True, False, True, True, True])
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [Optimizer(rig.manager, torch.optim.SGD([parameter], lr=0.5)) for parameter in parameters]
    stepped = []
    for _ in range(3):  # together
        for optimizer in optimizers:
            optimizer.zero_grad()
        (parameters[0] + parameters[1]).backward()
        stepped += [optimizer.step() for optimizer in optimizers]
    for optimizer, parameter in zip(optimizers, parameters, strict=True):  # in turn
        optimizer.zero_grad()
        parameter.backward()
        stepped.append(optimizer.step())
    assert stepped == [True, True, False, False, True, True, True, True]
    assert (len(rig.coordinator.votes), rig.manager.current_step()) == (5, 4)


def test_a_step_that_the_user_began_is_joined() -> None:
    optimizer, parameter, manager = wrapped()
    manager.start_quorum()
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step()
    assert manager.calls == ["start_quorum", "should_commit"]


def test_a_quorum_that_could_not_be_started_is_started_again() -> None:
    class Fails(Decides):
        def start_quorum(self) -> None:
            super().start_quorum()
            if self.attempt == 1:
                raise TimeoutError("no lighthouse")

    manager = Fails()
    optimizer = wrap(manager, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5))
    with pytest.raises(TimeoutError):
        optimizer.zero_grad()
    optimizer.zero_grad()
    assert manager.attempt == 2


def test_steps_out_of_turn_are_refused_with_a_sentence() -> None:
    (first, second), _, manager = pair()
    with pytest.raises(UsageError, match=r"call zero_grad\(\) before the forward pass"):
        first.step()
    first.zero_grad()
    first.step()
    with pytest.raises(UsageError, match="called twice in attempt 1"):
        first.step()
    second.zero_grad()
    with pytest.raises(UsageError, match=r"attempt 1, but another optimizer's .* has begun attempt 2 since"):
        first.step()
    assert manager.calls == ["start_quorum", "should_commit", "start_quorum"]


def test_a_second_optimizer_that_raises_after_the_first_stepped_leaves_a_torn_replica() -> None:
    (first, second), parameters, manager = pair()

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    second.register_step_pre_hook(fail)
    for optimizer in (first, second):
        optimizer.zero_grad()
    (parameters[0] + parameters[1]).backward()
    assert first.step()
    with pytest.raises(MemoryError):
        second.step()
    assert isinstance(manager.torn, MemoryError)


# --- a container of optimizers that calls back ------------------------------------------------------------------------


class Container(torch.optim.Optimizer):
    """Like torchtitan's: an optimizer that is a list of optimizers."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.optimizers = [torch.optim.SGD([parameter], lr=0.5) for parameter in parameters]
        super().__init__(parameters, {})

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)


class CallsBack(Container):
    """Its methods are those that the training loop calls; with a flag it knows when the wrapper calls them."""

    def __init__(self, manager: Decides, parameters: list[torch.nn.Parameter], *, has_flag: bool) -> None:
        super().__init__(parameters)
        self.has_flag = has_flag
        self.called_by_wrapper = False
        self.wrapper = wrap(manager, self)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.dispatch(self.wrapper.zero_grad, super().zero_grad, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.dispatch(self.wrapper.step, super().step, *args, **kwargs)

    def dispatch(self, outer: Callable[..., Any], inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.called_by_wrapper and self.has_flag:
            inner(*args, **kwargs)
            return
        self.called_by_wrapper = True
        try:
            outer(*args, **kwargs)
        finally:
            self.called_by_wrapper = False


def test_a_container_that_knows_who_calls_steps_its_parts_once_a_commit() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    manager = Decides(True, False, True)
    container = CallsBack(manager, parameters, has_flag=True)
    for _ in range(3):
        container.zero_grad()
        (parameters[0] + parameters[1]).backward()
        container.step()
    assert manager.calls == ["start_quorum", "should_commit"] * 3
    assert [parameter.item() for parameter in parameters] == [0.0, 0.0]


def test_a_container_that_does_not_know_who_calls_is_refused_before_anything_is_voted_on() -> None:
    manager = Decides()
    container = CallsBack(manager, [torch.nn.Parameter(torch.ones(1))], has_flag=False)
    with pytest.raises(UsageError, match="keep a flag for this"):
        container.zero_grad()
    assert "should_commit" not in manager.calls
    with pytest.raises(UsageError, match=r"called the wrapper's step\(\) in turn"):
        container.step()
    assert isinstance(manager.torn, UsageError)  # here it was: the step counts, and nobody has stepped


# --- checkpoints of torch.distributed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before any step", "between zero_grad and backward"])
def test_torchs_checkpoint_functions_see_the_wrapped_optimizers_state_and_vote_on_nothing(when: str) -> None:
    torch.manual_seed(0)
    manager = Decides()
    model = torch.nn.Linear(2, 2)
    optimizer = wrap(manager, torch.optim.AdamW(model.parameters(), lr=0.1))
    lr_scheduler.ExponentialLR(optimizer, 0.9)
    if when != "before any step":
        optimizer.zero_grad()
    calls = list(manager.calls)
    weight = model.weight.detach().clone()
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {"weight", "bias"}
    assert manager.calls == calls
    assert torch.equal(model.weight, weight)
    if when == "before any step":
        optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert optimizer.step()
    assert manager.calls == ["start_quorum", "should_commit"]


def test_a_checkpoint_of_torch_brings_the_state_back(tmp_path: Path) -> None:
    def train(model: torch.nn.Module, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ours = wrap(Decides(), torch.optim.AdamW(first.parameters(), lr=0.1))
    train(first, ours, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about a single process
        dcp.save(  # type: ignore[attr-defined]  # public, not in __all__
            {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, ours)},
            checkpoint_id=tmp_path,
            no_dist=True,
        )
        theirs = wrap(Decides(), torch.optim.AdamW(second.parameters(), lr=0.3))
        state = {"model": second.state_dict(), "optimizer": get_optimizer_state_dict(second, theirs)}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)  # type: ignore[attr-defined]
    second.load_state_dict(state["model"])
    set_optimizer_state_dict(second, theirs, state["optimizer"])
    train(first, ours, 2)
    train(second, theirs, 2)
    assert torch.equal(first.weight, second.weight)


# --- every optimizer of torch, alone ----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {},
    "AdamW": {},
    "Adamax": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "SparseAdam": {},
    "LBFGS": {},
}


def test_every_optimizer_of_torch_is_tried() -> None:
    there = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert there == set(OPTIMIZERS)


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, settings in OPTIMIZERS.items():
        if name == "LBFGS":
            continue
        yield name, settings
        supported = getattr(torch.optim, name).__init__.__code__.co_varnames
        for flag in ("foreach", "fused"):
            if flag in supported and not (name == "Adafactor" and flag == "fused"):
                yield name, settings | {flag: True}


@pytest.mark.parametrize(("name", "settings"), list(variants()))
def test_a_replica_group_alone_is_bit_equal_to_plain_torch(rigs: Any, name: str, settings: dict[str, Any]) -> None:
    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        if name == "SparseAdam":
            return torch.nn.Embedding(8, 4, sparse=True)
        return torch.nn.Linear(8, 4, bias=name != "Muon")

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for step in range(4):
            batch = torch.arange(step, step + 4) if name == "SparseAdam" else torch.full((2, 8), step + 1.0)
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    plain, ours = module(), module()
    make = getattr(torch.optim, name)
    rig = rigs(plan_of(7), *[QuorumKey(7, 7)] * 3)
    expected = train(plain, make(plain.parameters(), lr=0.1, **settings))
    # Sparse gradients are refused by DistributedDataParallel; an optimizer steps on them all the same.
    trained = ours if name == "SparseAdam" else DistributedDataParallel(rig.manager, ours)
    optimizer = Optimizer(rig.manager, make(ours.parameters(), lr=0.1, **settings))
    assert torch.equal(train(trained, optimizer), expected)
    assert rig.manager.current_step() == 4


def test_an_optimizer_that_needs_a_closure_is_refused_when_it_is_wrapped() -> None:
    with pytest.raises(UnsupportedFeatureError, match="LBFGS evaluates the model again through a closure"):
        wrap(Decides(), torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]))
