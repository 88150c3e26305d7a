"""Fetched parts become DTensors on the meshes of the process that heals, or nothing is loaded.

One process plays one rank of several: torch's fake process groups let collectives do nothing, and none is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_algos import HealingError
from tft_algos.manager.recovery.shards import has_shards, place_shards
from tft_algos.testing import MemoryTransport, digest, plan_of
from tft_ckpt import LocalShard
from tft_coord.core.types import Purpose, Verdict
from tft_coord.errors import ReplicaGroupLostError, RequestTimeoutError
from tft_pg import ProcessGroupDummy, extend_device_mesh


@pytest.fixture(autouse=True)
def second_of_two() -> Iterator[None]:
    """Be rank 1 of two whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def mesh_of(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (1,) * (len(names) - 1) + (2,), mesh_dim_names=names)


def fetched(state: Any) -> Any:
    """A state as a transport gives it."""
    if isinstance(state, DTensor):
        part = LocalShard.of(state)
        return LocalShard(part.local.detach().clone(), part.sharding)
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return type(state)((key, fetched(value)) for key, value in state.items())
    if isinstance(state, list):
        return [fetched(value) for value in state]
    if type(state) is tuple:
        return tuple(fetched(value) for value in state)
    return state._make(fetched(value) for value in state) if hasattr(state, "_make") else state


def local(state: Any) -> Any:
    """A state with each DTensor replaced by its part here."""
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return [local(value) for value in state] if isinstance(state, list | tuple) else state


def sharded(mesh: DeviceMesh, rows: int = 4, placement: Any = None, fill: float = 0.0) -> DTensor:
    placements = [Replicate()] * (mesh.ndim - 1) + [placement or Shard(0)]
    # The fake group sends nothing, so every rank cuts out its own part.
    return distribute_tensor(torch.arange(rows * 2.0).view(rows, 2) + fill, mesh, placements, src_data_rank=None)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_parts_become_dtensors_wherever_they_stand() -> None:
    mesh = mesh_of("shard")

    def state(fill: float) -> dict[str, Any]:
        return {
            "dict": {"a": sharded(mesh, fill=fill), 3: sharded(mesh, rows=5, fill=fill)},
            "ordered": OrderedDict(weight=sharded(mesh, placement=Shard(1), fill=fill)),
            "list": [1, sharded(mesh, fill=fill)],
            "tuple": (sharded(mesh, placement=Replicate(), fill=fill), "text"),
            "named": Pair(sharded(mesh, rows=1, fill=fill), torch.full((2,), fill)),
            "plain": torch.full((3,), fill),
            "size": torch.Size([1, 2]),
        }

    source, own = state(7.0), state(0.0)
    received = fetched(source)
    assert has_shards(received)
    assert not has_shards({"a": [torch.ones(1), {"b": (1, None)}]})
    memory = received["dict"]["a"].local.data_ptr()
    placed = place_shards(received, own)
    assert not has_shards(placed)
    assert digest(local(placed)) == digest(local(source)) != digest(local(own))
    assert type(placed["named"]) is Pair
    for mine, theirs in ((placed["dict"]["a"], own["dict"]["a"]), (placed["dict"][3], own["dict"][3])):
        assert mine._spec == theirs._spec
        assert mine.device_mesh is theirs.device_mesh
    assert placed["dict"]["a"].to_local().data_ptr() == memory, "the part is not copied"


@pytest.mark.parametrize("by_name", [False, True], ids=["by number", "by name"])
def test_an_optimizer_that_has_no_state_yet_gets_that_of_the_source(by_name: bool) -> None:
    mesh = mesh_of("shard")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 5)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        moments = optimizer.state_dict()
        if by_name:
            names = [name for name, _ in model.named_parameters()]
            moments["state"] = {names[number]: value for number, value in moments["state"].items()}
        return {"model": model.state_dict(), "optimizer": moments}

    source, fresh = make(), make()
    for parameter in source[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    source[1].step()
    theirs, own = take(*source), take(*fresh)
    assert own["optimizer"]["state"] == {}
    placed = place_shards(fetched(theirs), own)
    assert digest(local(placed)) == digest(local(theirs))
    fresh[0].load_state_dict(placed["model"])
    if not by_name:
        fresh[1].load_state_dict(placed["optimizer"])
        assert all(isinstance(fresh[1].state[parameter]["exp_avg"], DTensor) for parameter in fresh[0].parameters())
        assert digest(local(take(*fresh))) == digest(local(theirs))


def test_what_is_saved_on_an_extended_mesh_is_placed_on_another_ones() -> None:
    groups = [ProcessGroupDummy(), ProcessGroupDummy()]
    meshes = [extend_device_mesh(mesh_of("shard"), group)["dp", "shard"] for group in groups]
    assert meshes[0] != meshes[1]
    theirs, own = ({"w": sharded(mesh)} for mesh in meshes)
    placed = place_shards(fetched(theirs | {"moment": sharded(meshes[0])}), own)
    assert placed["w"].device_mesh is placed["moment"].device_mesh is own["w"].device_mesh
    # With both of them here, only the name tells which is meant.
    both = {"model": {"one": sharded(meshes[0]), "two": sharded(meshes[1])}}
    state = {"model": both["model"], "state": {"two": {"moment": sharded(meshes[0])}}}
    assert place_shards(fetched(state), both)["state"]["two"]["moment"].device_mesh == meshes[1]
    with pytest.raises(HealingError, match=r"state\['state'\]\[0\] .* 2 different meshes here have that form"):
        place_shards(fetched({"model": both["model"], "state": {0: sharded(meshes[0])}}), both)
    for group in groups:
        group.unregister()
        group.shutdown()


def test_fsdp2_with_tensor_parallelism_on_an_extended_mesh_is_placed_and_loads() -> None:
    groups = [ProcessGroupDummy(), ProcessGroupDummy()]
    inner = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))

    def make(group: ProcessGroupDummy) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = extend_device_mesh(inner, group)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["dp", "shard"])
        fully_shard(model, mesh=mesh["dp", "shard"])
        return model, torch.optim.AdamW(model.parameters())

    source, fresh = make(groups[0]), make(groups[1])
    for parameter in source[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    source[1].step()
    theirs, own = ({"model": model.state_dict(), "adam": adam.state_dict()} for model, adam in (source, fresh))
    forms = {LocalShard.of(tensor).sharding.mesh_dim_names for tensor in theirs["model"].values()}
    assert forms == {("dp", "shard", "tp"), ("dp", "shard")}
    placed = place_shards(fetched(theirs), own)
    fresh[0].load_state_dict(placed["model"])
    fresh[1].load_state_dict(placed["adam"])
    for parameter, like in zip(fresh[0].parameters(), source[0].parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh != like.device_mesh
        assert fresh[1].state[parameter]["exp_avg"].device_mesh == parameter.device_mesh
    healed = {"model": fresh[0].state_dict(), "adam": fresh[1].state_dict()}
    assert digest(local(healed)) == digest(local(theirs))
    for group in groups:
        group.unregister()
        group.shutdown()


MISFITS = {
    "another placement": (lambda mesh: sharded(mesh, placement=Shard(1)), r"as Shard\(0\) .* as Shard\(1\)"),
    "replicated": (lambda mesh: sharded(mesh, placement=Replicate()), r"as Shard\(0\) .* as Replicate\(\)"),
    "another shape": (lambda mesh: sharded(mesh, rows=6), r"shape \(4, 2\) .* shape \(6, 2\)"),
    "another mesh": (lambda mesh: sharded(mesh_of("dp", "shard")), r"mesh \(2,\) .* mesh \(1, 2\)"),
    "other names": (lambda mesh: sharded(mesh_of("tp")), r"\('shard',\) .* \('tp',\)"),
    "a plain tensor": (lambda mesh: torch.ones(4, 2), "and a Tensor here; shard the same tensors"),
    "nothing": (lambda mesh: None, "and a NoneType here; shard the same tensors"),
    "a sum that was not reduced": (
        lambda mesh: DTensor.from_local(torch.ones(4, 2), mesh, [Partial()]),
        "which can't be transferred",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_part_that_does_not_fit_is_refused_with_its_path_and_both_sides(kind: str) -> None:
    mesh = mesh_of("shard")
    make, sentence = MISFITS[kind]
    with pytest.raises(HealingError, match=sentence) as caught:
        place_shards(fetched({"model": [sharded(mesh)]}), {"model": [make(mesh)]})
    assert str(caught.value).startswith("state['model'][0] is a part of")


def test_a_whole_tensor_where_a_part_belongs_is_refused() -> None:
    mesh = mesh_of("shard")
    with pytest.raises(HealingError, match=r"state\['b'\] is a whole tensor .* at the source and a part of"):
        place_shards({"a": fetched(sharded(mesh)), "b": torch.ones(4, 2)}, {"a": sharded(mesh), "b": sharded(mesh)})


def test_a_part_for_which_there_is_no_mesh_is_refused() -> None:
    with pytest.raises(HealingError, match="missing here, and no tensor here is on a mesh of that form"):
        place_shards({"a": fetched(sharded(mesh_of("shard")))}, {"b": sharded(mesh_of("tp")), "c": torch.ones(1)})


# --- in a Manager ---


class Model:
    """Sharded user state that counts who touches it."""

    def __init__(self, fill: float, mesh: DeviceMesh) -> None:
        self.tensor = sharded(mesh, fill=fill)
        self.taken: list[str] = []
        self.loaded: list[DTensor] = []

    def take(self) -> dict[str, Any]:
        self.taken.append(threading.current_thread().name)
        return {"weight": self.tensor}

    def load(self, state: dict[str, Any]) -> None:
        self.loaded.append(state["weight"])


def healing(rigs: Any, *, own: Model | None = None, verdicts: Any = (), **settings: Any) -> tuple[Any, Model, Model]:
    """A rig that is about to heal from another that trained on a sharded tensor."""
    shelf: dict[Any, Any] = {}
    mesh = mesh_of("shard")
    theirs, own = Model(7.0, mesh), own or Model(0.0, mesh)
    source = rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))
    source.manager.register_state_dict_fn("model", theirs.load, lambda: fetched(theirs.take()))
    assert source.step()
    member = rigs(
        plan_of(7, rank=1, size=2, healing=[1]),
        verdicts=verdicts,
        checkpoint_transport=MemoryTransport(shelf),
        **settings,
    )
    member.manager.register_state_dict_fn("model", own.load, own.take)
    return member, theirs, own


def test_a_healing_process_loads_dtensors_on_its_own_mesh(rigs: Any, use_async_quorum: bool) -> None:
    member, theirs, own = healing(rigs, use_async_quorum=use_async_quorum)
    assert member.step()
    (got,) = own.loaded
    assert got._spec == own.tensor._spec
    assert torch.equal(got.to_local(), theirs.tensor.to_local())
    assert own.taken == [threading.current_thread().name] * 2, "for its meshes, and to be compared when it is loaded"


def test_without_parts_the_own_state_is_not_taken_for_its_meshes(rigs: Any) -> None:
    shelf: dict[Any, Any] = {}
    assert rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf)).step()
    member = rigs(plan_of(7, rank=1, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))
    assert member.step()
    assert len(member.weights.threads) == 2, "it was loaded, and taken to be compared"


def test_what_does_not_fit_loads_nothing(rigs: Any) -> None:
    member, _, own = healing(rigs, own=Model(0.0, mesh_of("tp")))
    assert not member.step()
    assert own.loaded == []
    assert member.weights.tensor.tolist() == [1.0, 1.0]
    assert str(member.manager.status().errors[0]).startswith("state['model']['weight'] is a part of")


def test_an_own_state_that_cannot_be_taken_loads_nothing(rigs: Any) -> None:
    member, _, own = healing(rigs)
    own.take = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    member.manager._parts.shared.user_state._functions["model"] = (own.load, own.take)
    assert not member.step()
    assert own.loaded == []
    assert "registered under 'model' raised ZeroDivisionError" in str(member.manager.status().errors[0])


def votes(member: Any) -> list[tuple[bool, Purpose]]:
    return [(yes, purpose) for _, _, yes, purpose in member.coordinator.votes]


TWO = {"rank": 1, "world_size": 2, "store_addr": "nowhere", "store_port": 1}


def test_all_ranks_of_a_group_take_their_state_together_and_load_together(rigs: Any) -> None:
    member, _, own = healing(rigs, **TWO)
    assert member.step()
    assert votes(member) == [
        (True, Purpose.STAGED),
        (False, Purpose.WITHOUT_OWN),
        (True, Purpose.MATCHED),
        (True, Purpose.LOADED),
        (True, Purpose.COMMIT),
    ]
    assert len(own.loaded) == 1


def test_where_another_rank_could_not_load_this_one_heals_again_and_votes_with_it(rigs: Any) -> None:
    member, _, own = healing(rigs, verdicts=[True, False, True, False, False], **TWO)
    assert not member.step()
    assert votes(member)[-2:] == [(True, Purpose.LOADED), (False, Purpose.COMMIT)]
    assert member.coordinator.votes[-1][1] == 0, "of the step of the rank that has not loaded"
    assert (len(own.loaded), member.manager.status().is_torn) == (1, True)
    assert "could not load step 0; all ranks of a group heal together" in str(member.manager.status().errors[0])


def test_a_load_function_that_raises_is_told_to_the_other_ranks(rigs: Any) -> None:
    member, _, own = healing(rigs, verdicts=[True, False, True, False, False], **TWO)
    member.manager._parts.shared.user_state._functions["model"] = (lambda _: 1 / 0, own.take)
    assert not member.step()
    assert votes(member)[-2:] == [(False, Purpose.LOADED), (False, Purpose.COMMIT)]
    assert member.manager.status().is_torn


def test_a_rank_that_fetched_no_parts_takes_its_state_where_another_needs_its_own(rigs: Any) -> None:
    shelf: dict[Any, Any] = {}
    assert rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf)).step()
    member = rigs(
        plan_of(7, rank=1, size=2, healing=[1]),
        verdicts=[True, False, True, True],
        checkpoint_transport=MemoryTransport(shelf),
        **TWO,
    )
    assert member.step()
    assert votes(member)[1] == (True, Purpose.WITHOUT_OWN)
    assert len(member.weights.threads) == 3, "taken, loaded and taken to be compared"


def test_where_another_rank_could_not_fetch_no_function_of_the_users_is_called(rigs: Any) -> None:
    member, _, own = healing(rigs, verdicts=[False, False], **TWO)
    assert not member.step()
    assert (own.taken, own.loaded) == ([], [])
    assert "could not fetch step 0; all ranks of a group heal together" in str(member.manager.status().errors[0])


def test_where_another_rank_finds_no_mesh_nothing_is_loaded(rigs: Any) -> None:
    member, _, own = healing(rigs, verdicts=[True, False, False, False], **TWO)
    assert not member.step()
    assert (len(own.taken), own.loaded) == (1, [])
    assert "could not find the meshes for step 0; all ranks of a group heal together" in str(
        member.manager.status().errors[0]
    )


@pytest.mark.parametrize("verdict", [False, RequestTimeoutError("no verdict")], ids=["a no", "no answer"])
def test_whose_group_is_lost_before_that_takes_nothing(rigs: Any, verdict: Any) -> None:
    member, _, own = healing(rigs, **TWO)
    cast = member.coordinator.vote

    def vote(step: int, yes: bool, timeout: Any, *, key: Any, purpose: Purpose, **wish: bool) -> Verdict:
        if purpose is Purpose.WITHOUT_OWN:
            member.coordinator.listener(ReplicaGroupLostError("rank 0 was killed"))
            if isinstance(verdict, Exception):
                raise verdict
            return Verdict(yes=False)
        answer: Verdict = cast(step, yes, timeout, key=key, purpose=purpose, **wish)
        return answer

    member.coordinator.vote = vote
    with pytest.raises(ReplicaGroupLostError, match="rank 0 was killed"):
        member.step()
    assert (own.taken, own.loaded) == ([], [])


def test_a_rank_that_is_lost_in_a_collective_of_the_users_loses_its_group(rigs: Any, use_async_quorum: bool) -> None:
    member, _, own = healing(rigs, use_async_quorum=use_async_quorum, **TWO)

    def take() -> object:
        member.coordinator.listener(ReplicaGroupLostError("rank 0 was killed"))
        raise RuntimeError("connection closed by peer")

    member.manager._parts.shared.user_state._functions["model"] = (own.load, take)
    with pytest.raises(ReplicaGroupLostError, match="rank 0 was killed"):
        member.step()
    assert own.loaded == []
