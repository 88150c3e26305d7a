"""What is registered is looked at in the first step, and what was loaded is compared with what was received."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_algos import (
    ConfigError,
    LocalSGD,
    Manager,
    Optimizer,
    PureDistributedDataParallel,
    StateDivergedError,
    UserStateError,
)
from tft_algos.manager.recovery.divergence import StateDigester, difference, differences
from tft_algos.manager.recovery.healing import state_key
from tft_algos.manager.recovery.speculative import leaf_digests
from tft_algos.testing import MemoryTransport, plan_of
from tft_ckpt import StateKey
from tft_ckpt.state.manifest import check_state
from tft_ckpt.state.tree import Limits
from tft_coord.core.step.repeats import Repeats
from tft_coord.core.types import Plan

AGAIN = plan_of(8, step=6, lineage=10, size=2, rank=1, healing=[1])
HIGH, LOW = torch.float32, torch.bfloat16
HEALING = plan_of(7, step=5, lineage=9, size=2, rank=1, healing=[1])


def offered(user: dict[str, Any], *plans: Plan) -> MemoryTransport:
    """A transport from which the references of some plans can be fetched, which all hold the same state."""
    shelf: dict[StateKey | None, Any] = {}
    for plan in plans or (HEALING,):
        own = {"step": plan.step, "batches_committed": 10, "lineage": f"{plan.lineage:016x}"}
        shelf[state_key(plan)] = {"user": user, "tft": own}
    return MemoryTransport(shelf)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


# --- nothing is registered -------------------------------------------------------------------------------------------

WRAPPERS: dict[str, tuple[Callable[[Manager], object], str]] = {
    "model": (lambda manager: PureDistributedDataParallel(manager, torch.nn.Linear(3, 3)), "trains Linear, and no"),
    "optimizer": (lambda manager: Optimizer(manager, torch.optim.SGD(model().parameters())), "trains SGD, and no"),
    "own strategy": (lambda manager: manager.strategy.describe_parameters(model()), "trains Sequential, and no"),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_is_wrapped_and_not_registered_when_the_first_step_is_over_is_refused(rigs: Any, kind: str) -> None:
    wrap, says = WRAPPERS[kind]
    rig = rigs(plan_of(), plan_of(2, step=1), registers=False, looks=True)
    kept = wrap(rig.manager)
    assert rig.step(), "state may be registered as late as here"
    for _ in range(2):
        with pytest.raises(ConfigError, match=says + ".*rank 0|rank 0.*" + says) as raised:
            rig.step()
        assert "call register_state_dict_fn before the second step" in str(raised.value)
    assert len(rig.coordinator.requests) == 1, "nothing was begun"
    rig.manager.register_state_dict_fn("late", print, dict)
    assert rig.step()
    del kept


def test_nothing_wrapped_needs_nothing_registered_and_a_strategy_registers_itself(rigs: Any) -> None:
    assert rigs(plan_of(), registers=False, looks=True).step()
    trained = torch.nn.Linear(3, 3)
    rig = rigs(plan_of(), registers=False, looks=True)
    with LocalSGD(rig.manager, trained, torch.optim.SGD(trained.parameters(), lr=0.1), 4):
        assert rig.manager.current_step() == 1


# --- what is wrapped and not in the state -----------------------------------------------------------------------------


def test_one_warning_names_what_is_missing_and_the_steps_after_cost_nothing(rigs: Any, caplog: Any) -> None:
    rig = rigs(*(plan_of(n, step=n) for n in range(4)), registers=False, looks=True)
    module = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(module.parameters())
    wrapped = PureDistributedDataParallel(rig.manager, module), Optimizer(rig.manager, adam)
    taken: list[int] = []
    rig.manager.register_state_dict_fn("m", print, lambda: taken.append(1) or {"weight": module.weight})
    with caplog.at_level(logging.WARNING, logger="tft_algos.manager"):
        assert rig.step()
        (first,) = caplog.messages
        assert "1 of 2 tensors of wrapped models and optimizers are missing in the registered state" in first
        assert ": Linear.bias; add them" in first
        module.bias.grad, module.weight.grad = torch.ones(2), torch.ones(2, 2)
        adam.step()
        assert rig.step()
        _, second = caplog.messages
        assert "6 of 8 tensors" in second
        assert "AdamW.step of Linear.weight, AdamW.exp_avg of Linear.weight" in second
        assert rig.step()
        assert rig.step()
    assert len(caplog.messages) == 2
    assert len(taken) == 2
    del wrapped


def test_a_look_leaves_an_optimizer_without_state_as_it_was(rigs: Any) -> None:
    """Torch makes a state by a step when it is asked for one, which the first step of the training would count."""
    module = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(module.parameters())
    rig = rigs(plan_of(), plan_of(2, step=1), registers=False, looks=True)
    wrapped = Optimizer(rig.manager, adam)
    rig.manager.register_state_dict_fn("m", print, module.state_dict)
    rig.manager.register_state_dict_fn("o", print, lambda: get_optimizer_state_dict(module, adam))
    assert rig.step()
    assert not adam.state
    module(torch.ones(1, 2)).sum().backward()
    adam.step()
    assert rig.step()
    assert {float(entries["step"]) for entries in adam.state.values()} == {1.0}
    del wrapped


# --- what can't travel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])  # which makes no state at all
def test_a_look_runs_no_hook_of_a_step(rigs: Any, kind: Any, wraps: bool) -> None:
    module = torch.nn.Linear(2, 2)
    inner = kind(module.parameters())
    rig = rigs(plan_of(), plan_of(2, step=1), registers=False, looks=True)
    wrapped = Optimizer(rig.manager, inner)
    ran: list[str] = []
    own = [
        inner.register_step_pre_hook(lambda *_: ran.append("before")),
        inner.register_step_post_hook(lambda *_: ran.append("after")),
        register_optimizer_step_pre_hook(lambda *_: ran.append("before any")),
        register_optimizer_step_post_hook(lambda *_: ran.append("after any")),
    ]
    try:
        rig.manager.register_state_dict_fn("m", print, module.state_dict)
        asked = wrapped if wraps else inner
        rig.manager.register_state_dict_fn("o", print, lambda: get_optimizer_state_dict(module, asked))
        assert rig.step()
        assert rig.step()
        assert ran == []
        module(torch.ones(1, 2)).sum().backward()
        inner.step()
        assert ran == ["before any", "before", "after", "after any"]
        rig.manager._parts.shared.user_state.take()
        assert len(ran) == 4
    finally:
        for handle in own:
            handle.remove()
    inner.step()
    assert len(ran) == 4, "a hook can be removed as before"


def test_a_forgotten_scheduler_is_named_once_after_the_first_step(rigs: Any, caplog: Any) -> None:
    rig = rigs(*(plan_of(n, step=n) for n in range(4)), registers=False, looks=True)
    module = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(module.parameters())
    wrapped = Optimizer(rig.manager, adam)
    schedule = torch.optim.lr_scheduler.StepLR(wrapped, 2)  # the wrapper's groups are the optimizer's
    rig.manager.register_state_dict_fn("m", print, module.state_dict)
    rig.manager.register_state_dict_fn("o", print, adam.state_dict)
    with caplog.at_level(logging.WARNING, logger="tft_algos.manager"):
        assert rig.step()
        assert caplog.messages == [], "it may be registered when the first step is over"
        assert rig.step()
        (message,) = caplog.messages
        assert "StepLR of AdamW; register their state_dict and load_state_dict" in message
        rig.manager.register_state_dict_fn("other", print, dict)
        assert rig.step()
        assert len([message for message in caplog.messages if "StepLR" in message]) == 1
    del wrapped, schedule


def test_what_can_not_be_looked_at_ends_no_step_and_is_said_once(rigs: Any, caplog: Any) -> None:
    class Stateless(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self) -> list[Any]:
            return self.base_lrs

        def state_dict(self) -> dict[str, Any]:
            raise NotImplementedError("stateless by design")

    class Secretive(torch.nn.Linear):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("modules")

    rig = rigs(*(plan_of(n, step=n) for n in range(4)), registers=False, looks=True)
    module = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(module.parameters())
    rig.manager._parts.audit.model_wrapped(secret := Secretive(2, 2))
    wrapped, schedule = Optimizer(rig.manager, adam), Stateless(adam)
    rig.manager.register_state_dict_fn("m", print, module.state_dict)
    rig.manager.register_state_dict_fn("o", print, adam.state_dict)
    with caplog.at_level(logging.DEBUG, logger="tft_algos.manager"):
        assert rig.step()
        assert rig.step()
        rig.manager.register_state_dict_fn("other", print, dict)
        assert rig.step()
    told = [record for record in caplog.records if "can't tell whether" in record.getMessage()]
    assert [record.levelname for record in told] == ["DEBUG", "DEBUG"]
    assert [record.getMessage().rpartition("schedulers: ")[2] for record in told] == [
        "KeyError('modules')",
        "Stateless of AdamW: NotImplementedError('stateless by design')",
    ]
    del wrapped, schedule, secret


def test_a_scheduler_that_is_registered_after_the_first_step_is_not_missed(rigs: Any, caplog: Any) -> None:
    rig = rigs(*(plan_of(n, step=n) for n in range(3)), registers=False, looks=True)
    module = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(module.parameters())
    wrapped = Optimizer(rig.manager, adam)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 2)
    with caplog.at_level(logging.WARNING, logger="tft_algos.manager"):
        assert rig.step()
        for name, part in (("m", module), ("o", adam), ("rate", schedule)):
            rig.manager.register_state_dict_fn(name, print, part.state_dict)
        assert rig.step()
        assert rig.step()
    assert caplog.messages == []
    del wrapped


def test_what_can_not_travel_is_raised_in_the_first_step_with_its_path(rigs: Any) -> None:
    rig = rigs(plan_of(), plan_of(2, step=1), looks=True)
    rig.transport.check_state = lambda state: check_state(state, chunk_bytes=1 << 20, limits=Limits())
    extra: dict[str, Any] = {"best": numpy.float32(0.5), "callbacks": [1, object()]}
    rig.manager.register_state_dict_fn("extra", print, lambda: extra)
    says = r"rank 0, can't be sent .*: state\['extra'\]\['callbacks'\]\[1\] is a builtins.object, which can't be"
    for _ in range(2):
        with pytest.raises(UserStateError, match=says):
            rig.manager.start_quorum()
    assert rig.coordinator.requests == []
    extra["callbacks"] = []
    assert rig.step()
    extra["callbacks"] = [print]  # as an optimizer may make its state in its first step
    with pytest.raises(UserStateError, match=r"state\['extra'\]\['callbacks'\]\[0\] is a builtins.builtin_function"):
        rig.manager.start_quorum()


def test_what_is_registered_late_is_looked_at_then(rigs: Any) -> None:
    rig = rigs(plan_of(), plan_of(2, step=1), plan_of(3, step=2), looks=True)
    rig.transport.check_state = lambda state: check_state(state, chunk_bytes=1 << 20, limits=Limits())
    assert rig.step()
    assert rig.step()
    rig.manager.register_state_dict_fn("late", print, lambda: {1, 2})
    with pytest.raises(UserStateError, match=r"state\['late'\] is a builtins.set, .*store sorted"):
        rig.manager.start_quorum()


def test_a_state_function_that_raises_is_found_in_the_first_step(rigs: Any) -> None:
    rig = rigs(plan_of(), looks=True)
    rig.manager.register_state_dict_fn("scheduler", print, lambda: {}["lr"])
    with pytest.raises(UserStateError, match=r"registered under 'scheduler' raised KeyError\('lr'\)") as raised:
        rig.manager.start_quorum()
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_half_written_state_is_looked_at_later(rigs: Any) -> None:
    rig = rigs(plan_of(), plan_of(2, step=1), looks=True)
    rig.manager.disallow_state_dict_read()
    assert rig.step()
    assert rig.weights.threads == []
    rig.manager.allow_state_dict_read()
    assert rig.step()
    assert len(rig.weights.threads) == 1


# --- after a recovery -------------------------------------------------------------------------------------------------


def moments_of(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    return {
        (index, key): value
        for index, entries in enumerate(optimizer.state.values())
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def stepped(kind: Any, parameters: torch.dtype, moments: torch.dtype | None, lr: float) -> Any:
    """A model and an optimizer after three steps; `moments`: the dtype that its state is set to, None: torch's own."""
    module = torch.nn.Linear(3, 3).to(parameters)
    optimizer = kind(module.parameters(), lr=lr)
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, lr)
        optimizer.step()
    if moments is not None:
        for entries in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                entries[key] = entries[key].to(moments)
    return module, optimizer


@pytest.mark.parametrize(
    ("kind", "parameters", "moments"),
    [
        (torch.optim.AdamW, torch.float32, torch.bfloat16),
        (torch.optim.AdamW, torch.bfloat16, torch.float32),
        (torch.optim.NAdam, torch.bfloat16, None),
        (torch.optim.ASGD, torch.float16, None),
        (torch.optim.AdamW, torch.float32, None),
    ],
)
@pytest.mark.parametrize("has_stepped", [True, False])
def test_the_moments_of_an_optimizer_are_loaded_as_they_came(
    rigs: Any, caplog: Any, kind: Any, parameters: Any, moments: Any, has_stepped: bool
) -> None:
    source_model, source = stepped(kind, parameters, moments, 0.01)
    state = copy.deepcopy({"m": source_model.state_dict(), "o": source.state_dict()})
    module, optimizer = stepped(kind, parameters, moments, 0.02)
    if not has_stepped:
        optimizer = kind(module.parameters(), lr=0.02)
    rig = rigs(HEALING, checkpoint_transport=offered(state), registers=False)
    rig.manager.register_state_dict_fn("m", module.load_state_dict, module.state_dict)
    rig.manager.register_state_dict_fn("o", optimizer.load_state_dict, optimizer.state_dict)
    wrapped = Optimizer(rig.manager, optimizer)
    with caplog.at_level(logging.INFO, logger="tft_algos.manager"):
        assert rig.step()
    came, here = moments_of(source), moments_of(optimizer)
    assert came.keys() == here.keys()
    for place, value in came.items():
        assert (here[place].dtype, here[place].shape) == (value.dtype, value.shape), place
        assert here[place].equal(value), place
    text = " ".join(caplog.messages)
    assert ("restored the received tensors" in text) == (moments is not None or kind is not torch.optim.AdamW)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert rig.manager._parts.audit.loaded_exactly
    del wrapped


def test_parts_of_sharded_moments_are_set_back_too(rigs: Any) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight, moment = (DTensor.from_local(torch.ones(2, 3, dtype=d), mesh, [Shard(0)]) for d in (HIGH, LOW))
        parameter = torch.nn.Parameter(weight)
        adam = torch.optim.AdamW([parameter])
        audit = rigs(registers=False).manager._parts.audit
        audit.optimizer_wrapped(adam)
        audit._shared.user_state.register("o", adam.load_state_dict, adam.state_dict)
        state = adam.state_dict() | {"state": {0: {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment}}}
        received = audit.received({"o": state})
        adam.load_state_dict(state)
        audit.loaded(received, "a")
        assert audit.loaded_exactly
        for key in ("exp_avg", "exp_avg_sq"):
            here = adam.state[parameter][key]
            assert (here.dtype, here.placements, here.device_mesh) == (LOW, moment.placements, mesh)
    finally:
        dist.destroy_process_group()


def healed(rigs: Any, caplog: Any, load: Any, take: Any, came: Any, **registered: Any) -> list[str]:
    """The warnings of a replica that heals, whose state 'x' has these functions."""
    rig = rigs(HEALING, checkpoint_transport=offered({"x": came}), registers=False)
    rig.manager.register_state_dict_fn("x", load, take, **registered)
    with caplog.at_level(logging.WARNING, logger="tft_algos.manager"):
        assert rig.step()
    return list(caplog.messages)


def test_what_a_load_function_leaves_out_is_named_with_both_values(rigs: Any, caplog: Any) -> None:
    here: dict[str, Any] = {"lr": 0.5, "w": torch.zeros(100, 100), "only here": 1, "dtype": torch.zeros(2)}
    came = {"lr": 0.25, "w": torch.ones(100, 100), "only there": 2, "dtype": torch.zeros(2).half(), "same": [1, 2]}

    def load(state: dict[str, Any]) -> None:
        here["same"] = state.pop("same")  # the containers are the function's own

    (warning,) = healed(rigs, caplog, load, lambda: here, came)
    assert "differs from the state received from replica_0: " in warning
    assert "x.lr: 0.5 here, 0.25 at the source" in warning
    assert "x.w: 5000 of 5000 elements differ" in warning or "elements differ" in warning
    assert "x.only here: is missing at the source" in warning
    assert "x.only there: is missing here" in warning
    assert "x.dtype: torch.float32 of shape (2,) here, torch.float16" in warning
    assert "x.same" not in warning


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (numpy.float32(0.1), numpy.float32(0.2)),
        (numpy.arange(5), numpy.arange(5) * 2),
        (torch.ones(3, 3).t(), torch.zeros(3, 3)),
        (None, 1),
    ],
    ids=["nan", "numpy scalar", "array", "strided", "none"],
)
def test_only_what_differs_is_named(rigs: Any, caplog: Any, value: Any, other: Any) -> None:
    here: dict[str, Any] = {}
    assert healed(rigs, caplog, here.update, lambda: dict(here), {"v": value}) == []
    assert healed(rigs, caplog, print, lambda: {"v": other}, {"v": value})


def test_what_rightly_differs_is_not_compared(rigs: Any, caplog: Any) -> None:
    assert healed(rigs, caplog, print, lambda: {"at": 3}, {"at": 4}, compared=False) == []


def test_a_state_that_can_not_be_compared_is_said_to_be_so(rigs: Any, caplog: Any) -> None:
    (warning,) = healed(rigs, caplog, print, lambda: {"at": object()}, {"at": 4})
    assert "can't compare the loaded state" in warning


@pytest.mark.parametrize(
    ("load", "take", "says"),
    [
        (print, lambda: {"lr": 2}, "because load_state_dict did not restore the received values (x.lr: 2 here, 1 at"),
        (print, lambda: {"lr": 1}, "although load_state_dict restored the received values, so the steps since then"),
        (print, lambda: {"lr": object()}, "and the state loaded then could not be compared; check what load"),
    ],
)
def test_who_diverges_again_blames_the_load_function_only_where_it_is_to_blame(
    rigs: Any, load: Any, take: Any, says: str
) -> None:
    rig = rigs(HEALING, AGAIN, checkpoint_transport=offered({"x": {"lr": 1}}, HEALING, AGAIN), registers=False)
    rig.manager.register_state_dict_fn("x", load, take)
    assert rig.step()
    own = rig.manager._parts.shared.step._core._state.own
    own.divergences = 2
    own.diverges_from = lambda fetched: True
    with pytest.raises(StateDivergedError) as raised:
        rig.step()
    assert f"the last healing did not fix this, {says}" in str(raised.value)


def test_long_tensors_are_compared_all_over(rigs: Any) -> None:
    for shape in ((1 << 16,), (300, 300), (2, 3, 70_000), (50_000, 1), (1, 50_000)):
        whole = torch.zeros(shape)
        assert difference(whole, torch.zeros(shape), "w", sampled=True) == ""
        assert difference(whole, torch.ones(shape), "w", sampled=True)
        for dim, size in enumerate(shape):
            if size >= 300:
                half = torch.zeros(shape)
                half.narrow(dim, size // 2, size // 4).fill_(1)
                assert difference(whole, half, "w", sampled=True), (shape, dim)


def test_values_of_numpy_are_digested_and_looked_at() -> None:
    digester = StateDigester()
    states: list[dict[str, Any]] = [
        {"a": numpy.arange(4)},
        {"a": numpy.arange(4) * 2},
        {"a": numpy.int32(1)},
        {"a": numpy.float32(1)},
        {"a": 1},
    ]
    assert len({digester.digest(state) for state in states}) == len(states)
    assert differences(states[0], states[1]) == [("a", "3 of 4 elements differ")]
    long = numpy.zeros(1 << 16)
    before = leaf_digests({"a": long})
    long[50_000] = 1.0  # torch knows nothing of it
    assert leaf_digests({"a": long}) != before


# --- functions that raise ---------------------------------------------------------------------------------------------


def raising(rigs: Any, *errors: Exception | None, use_async_quorum: bool = True) -> Any:
    """A replica that heals in each of its steps, and whose load function raises these errors in turn."""
    left = list(errors)

    def load(state: object) -> None:
        error = left.pop(0)
        if error is not None:
            raise error

    plans = [plan_of(7 + n, step=5, lineage=9, size=2, rank=1, healing=[1]) for n in range(len(errors))]
    transport = offered({"x": {"lr": 1}}, *plans)
    rig = rigs(*plans, checkpoint_transport=transport, registers=False, use_async_quorum=use_async_quorum)
    rig.manager.register_state_dict_fn("x", load, lambda: {"lr": 1})
    return rig


def test_a_load_function_that_raises_shows_its_traceback_once_and_twice_is_the_end(
    rigs: Any, caplog: Any, use_async_quorum: bool
) -> None:
    rig = raising(rigs, KeyError("model"), KeyError("model"), use_async_quorum=use_async_quorum)
    with caplog.at_level(logging.WARNING, logger="tft_algos.manager"):
        if use_async_quorum:
            assert not rig.step()
        else:
            rig.manager.start_quorum()
            assert not rig.manager.should_commit()
        (record,) = [record for record in caplog.records if "KeyError" in record.getMessage()][:1]
        assert record.levelno == logging.ERROR
        assert "load_state_dict of the state registered under 'x' raised KeyError('model')" in record.getMessage()
        assert record.exc_info is not None
        assert record.exc_info[1].__traceback__.tb_next.tb_frame.f_code.co_name == "load"
        caplog.clear()
        with pytest.raises(UserStateError, match=r"twice for the same reason: .*'x'.*'model'.*fix the cause") as end:
            rig.step()
    assert isinstance(end.value.__cause__, KeyError)
    assert not [record for record in caplog.records if record.exc_info]
    assert rig.manager.status().is_torn


def test_other_errors_and_successes_between_them_are_tried_again(rigs: Any) -> None:
    rig = raising(rigs, KeyError("a"), KeyError("b"), OSError("a"), None, OSError("a"), None)
    assert [rig.step() for _ in range(6)] == [False, False, False, True, False, True]


def test_the_address_of_an_object_does_not_tell_two_errors_apart() -> None:
    repeats = Repeats()
    assert not repeats.again("<object at 0x7f01> is no tensor")
    assert repeats.again("<object at 0x7fee> is no tensor")
    assert not repeats.again("another")
    repeats.forget()
    assert not repeats.again("another")


def test_a_source_whose_state_dict_raises_shows_the_traceback_once_and_the_newcomer_ends(
    rigs: Any, caplog: Any
) -> None:
    shelf: dict[Any, Any] = {}
    plans = [plan_of(n, size=2, healing=[1]) for n in (7, 8)]
    source = rigs(*plans, checkpoint_transport=MemoryTransport(shelf))
    source.manager._parts.shared.user_state._functions["default"] = (source.weights.load, lambda: {}["missing"])
    with caplog.at_level(logging.ERROR, logger="tft_algos.manager"):
        assert source.step()
        assert source.manager.current_step() == 1
        source.manager.load_state_dict({"step": 0, "batches_committed": 0, "lineage": f"{plans[0].lineage:016x}"})
        assert source.step(), "its own steps are sound"
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]
    plans = [plan_of(n, rank=1, size=2, healing=[1]) for n in (7, 8)]
    member = rigs(*plans, checkpoint_transport=MemoryTransport(shelf))
    assert not member.step()
    with pytest.raises(UserStateError, match=r"twice for the same reason: .*state_dict registered under 'default'"):
        member.step()


def test_a_state_that_does_not_fit_what_is_registered_is_tried_twice(rigs: Any) -> None:
    plans = [plan_of(n, rank=1, size=2, healing=[1]) for n in (7, 8)]
    member = rigs(*plans, checkpoint_transport=offered({"default": {}, "more": 1}, *plans))
    assert not member.step()
    with pytest.raises(
        UserStateError, match=r"same reason: the source has state registered under \['default', 'more'\]"
    ):
        member.step()
    assert not member.manager.status().is_torn


def test_a_lost_source_is_no_reason_to_end(rigs: Any) -> None:
    plans = [plan_of(n, rank=1, size=2, healing=[1]) for n in (7, 8, 9)]
    member = rigs(*plans, checkpoint_transport=MemoryTransport())
    assert [member.step() for _ in range(3)] == [False, False, False]
