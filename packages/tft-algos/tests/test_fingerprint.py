"""What a Manager tells the other replicas of itself, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_algos import (
    ConfigError,
    DistributedDataParallel,
    PureDistributedDataParallel,
    WorldSizeMode,
    reduce_across,
)
from tft_algos.errors import ServerRestartedError
from tft_algos.testing import plan_of
from tft_coord.core.types import QuorumKey
from tft_coord.errors import RefusedError, RequestTimeoutError

UNCHANGED = QuorumKey(7, 7)


def said(rig: Any, request: int = -1) -> dict[str, str]:
    return dict(rig.coordinator.requests[request].fingerprint)


def test_the_settings_by_which_all_must_go_are_said_with_the_first_request(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), UNCHANGED, min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    rig.step()
    assert said(rig) == {
        "protocol version": "1",
        "rank0_synchronization_only": "False",
        "group world size": "1",
        "use_async_quorum": "True",
        "world_size_mode": "FIXED_WITH_SPARES",
        "min_replica_size": "2",
        "init_sync": "True",
    }
    rig.step()
    assert said(rig) == {}


def test_a_request_that_failed_says_it_again(rigs: Any) -> None:
    rig = rigs(RequestTimeoutError("nobody"), plan_of(7), UNCHANGED)
    for _ in range(3):
        rig.step()
    assert [bool(request.fingerprint) for request in rig.coordinator.requests] == [True, True, False]


def test_a_new_manager_server_hears_it_anew(rigs: Any) -> None:
    rig = rigs(plan_of(7), ServerRestartedError(), plan_of(8))
    rig.step()
    rig.step()
    assert [bool(request.fingerprint) for request in rig.coordinator.requests] == [True, False, True]


def test_the_users_own_parts(rigs: Any) -> None:
    rig = rigs(plan_of(7), UNCHANGED, UNCHANGED, fingerprint={"tokenizer": "ab12"})
    rig.manager.strategy.add_to_fingerprint("data", "v3")
    rig.step()
    assert (said(rig)["user/tokenizer"], said(rig)["user/data"]) == ("ab12", "v3")
    rig.manager.strategy.add_to_fingerprint("data", "v3")
    rig.step()
    assert said(rig) == {}
    rig.manager.strategy.add_to_fingerprint("sampler", "exact")
    rig.step()
    assert said(rig)["user/sampler"] == "exact"


def test_a_part_keeps_its_value(rigs: Any) -> None:
    manager = rigs(fingerprint={"data": "v3"}).manager
    with pytest.raises(ConfigError, match=r"part 'data' is 'v3' already and can't become 'v4'"):
        manager.strategy.add_to_fingerprint("data", "v4")


@pytest.mark.parametrize(("name", "value"), [("", "x"), (1, "x"), ("x", 1)])
def test_parts_are_texts(rigs: Any, name: Any, value: Any) -> None:
    manager = rigs().manager
    with pytest.raises(ConfigError, match="give a name and a value, both text"):
        manager.strategy.add_to_fingerprint(name, value)
    with pytest.raises(ConfigError, match="names and values that are text"):
        rigs(fingerprint={name: value})


def test_a_fingerprint_is_a_mapping(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="fingerprint is a list; give a mapping"):
        rigs(fingerprint=["x"])


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_wrappers_describe_their_parameters(rigs: Any, wrapper: Any) -> None:
    rig = rigs(plan_of(7))
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).double())
    module[1].bias.requires_grad_(False)
    wrapper(rig.manager, module)
    wrapper(rig.manager, torch.nn.Linear(1, 1, bias=False))
    rig.step()
    parts = said(rig)
    assert parts["parameter/0"].startswith("4 parameters, their names and order ")
    assert parts["parameter/0/0.weight"] == "float32 [2, 3]"
    assert parts["parameter/0/1.bias"] == "float64 [1], frozen"
    assert parts["parameter/1/weight"] == "float32 [1, 1]"


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], *, frozen: bool = False) -> torch.nn.Parameter:
    """A parameter whose dimensions lie in memory in that order, the outermost first."""
    inverse = [order.index(place) for place in range(len(order))]
    data = torch.zeros(shape).permute(order).contiguous().permute(inverse)
    return torch.nn.Parameter(data, requires_grad=not frozen)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_buckets_are_laid_out_as_parameters_are_which_is_a_part_then(rigs: Any, wrapper: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.nn.Parameter(torch.zeros(2, 3))
            self.transposed = laid_out((2, 3), (1, 0))
            self.channels_last = laid_out((2, 3, 4, 5), (0, 2, 3, 1))
            self.same_memory = laid_out((2, 3, 1, 1), (0, 2, 3, 1))  # channels_last has other strides here, and no gap
            self.with_gaps = torch.nn.Parameter(torch.zeros(2, 6)[:, ::2])  # torch's gradient of it is in order
            self.frozen = laid_out((2, 3), (1, 0), frozen=True)

    rig = rigs(plan_of(7))
    wrapper(rig.manager, Model())
    rig.step()
    parts = {name.removeprefix("parameter/0/"): value for name, value in said(rig).items()}
    in_buckets = wrapper is DistributedDataParallel
    assert {name: parts[name] for name in Model().state_dict()} == {
        "plain": "float32 [2, 3]",
        "transposed": "float32 [2, 3]" + (", strides [1, 2]" if in_buckets else ""),
        "channels_last": "float32 [2, 3, 4, 5]" + (", strides [60, 1, 15, 3]" if in_buckets else ""),
        "same_memory": "float32 [2, 3, 1, 1]",
        "with_gaps": "float32 [2, 3]",
        "frozen": "float32 [2, 3], frozen",
    }


def test_another_order_of_the_same_parameters_is_another_model(rigs: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))

    parts = []
    for names in ("ab", "ba", "ab"):
        rig = rigs(plan_of(7))
        rig.manager.strategy.describe_parameters(Model(names))
        rig.step()
        parts.append(said(rig)["parameter/0"])
    assert parts[0] != parts[1]
    assert parts[0] == parts[2]


def test_parameters_without_a_shape_yet(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    rig.manager.strategy.describe_parameters(torch.nn.LazyLinear(2))
    rig.step()
    assert said(rig)["parameter/0/weight"] == "not initialized"


def test_of_a_sharded_parameter_the_global_shape_counts(rigs: Any) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        module = torch.nn.Module()
        local = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])
        module.register_parameter("weight", torch.nn.Parameter(local))
        rig = rigs(plan_of(7))
        rig.manager.strategy.describe_parameters(module)
        rig.step()
        assert said(rig)["parameter/0/weight"] == "float32 [4, 3]"
    finally:
        dist.destroy_process_group()


def test_sharded_models_describe_themselves(rigs: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model = fully_shard(torch.nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,)))
        rig = rigs(plan_of(7))
        reduce_across(rig.manager, model)
        rig.step()
        assert said(rig)["parameter/0/weight"] == "float32 [3, 3]"
    finally:
        dist.destroy_process_group()


def test_who_is_refused_is_told_before_any_reduction(rigs: Any) -> None:
    rig = rigs(RefusedError("min_replica_size is '1' there and '2' here", code="differs"))
    with pytest.raises(RefusedError, match="is '1' there and '2' here"):
        rig.step()
    assert rig.group.calls == []
