"""Groups in torch's tables, and a mesh with a dimension across replica groups, in one process without a network."""

from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
import shutil
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import ReduceOp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tft_pg import (
    ConfigError,
    DummyWork,
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupClosedError,
    ProcessGroupDummy,
    UnsupportedOperationError,
    extend_device_mesh,
)
from tft_pg.testing.computing import all_gather, reduce_scatter

# Torch 2.13 renamed them, and warns of the old names.
functional_all_gather: Any = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
functional_reduce_scatter: Any = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state")


class Participants:
    """A Manager whose participants all give the same tensor, and that notes what it is asked to reduce."""

    def __init__(self, number: int = 3) -> None:
        self.number = number
        self.reduced: list[object] = []

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: object) -> dist.Work:
        assert type(tensor) is torch.Tensor
        self.reduced.append(reduce_op)
        if reduce_op == ReduceOp.SUM:
            tensor.mul_(self.number)
        return DummyWork([tensor])

    def num_participants(self) -> int:
        return self.number


@pytest.fixture
def world() -> Iterator[None]:
    """Torch's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture
def manager() -> Participants:
    return Participants()


@pytest.fixture
def pg(manager: Participants) -> ManagedProcessGroup:
    return ManagedProcessGroup(manager)


@pytest.fixture
def inner(world: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tp"))


@pytest.fixture
def mesh(inner: DeviceMesh, pg: ManagedProcessGroup) -> DeviceMesh:
    return extend_device_mesh(inner, pg)


def entries() -> list[int]:
    """How much stands in torch's tables."""
    world = dist.distributed_c10d._world
    return [*(len(getattr(world, table)) for table in TABLES), *(len(groups) for groups in world.tags_to_pg.values())]


# --- torch's tables ---


def test_a_registered_group_is_known_by_its_name(world: None) -> None:
    pg = ProcessGroupDummy()
    assert pg.register("dp") is pg
    assert dist.distributed_c10d._resolve_process_group(pg.group_name) is pg
    assert (dist.get_process_group_ranks(pg), dist.get_rank(pg), dist.get_backend(pg)) == ([0], 0, "tft-dummy")
    assert torch.equal(funcol.all_reduce(torch.ones(2), "sum", pg.group_name), torch.ones(2))
    pg.unregister()
    with pytest.raises(ConfigError, match=r"has no name, because it is not registered; call register first"):
        _ = pg.group_name


def test_a_group_that_comes_and_goes_leaves_nothing(world: None) -> None:
    def once() -> weakref.ref[ProcessGroup]:
        pg = ProcessGroupDummy()
        pg.register("dp")
        pg.unregister()
        pg.register("dp-again")
        pg.unregister()
        pg.shutdown()
        return weakref.ref(pg)

    once()
    before, kinds = sum(entries()), len(dist.Backend.backend_list)
    groups = [once() for _ in range(100)]
    gc.collect()
    assert [group() for group in groups] == [None] * 100
    assert (sum(entries()), len(dist.Backend.backend_list)) == (before, kinds)


def test_unregister_does_not_end_a_group(world: None) -> None:
    pg = ProcessGroupDummy()
    pg.register("dp")
    pg.unregister()
    assert pg.errored() is None
    pg.shutdown()
    assert isinstance(pg.errored(), ProcessGroupClosedError)


def test_groups_that_come_and_go_in_any_order_have_their_own_names(world: None) -> None:
    one, two, three = ProcessGroupDummy(), ProcessGroupDummy(), ProcessGroupDummy()
    one.register("one")
    two.register("two")
    one.unregister()
    three.register("three")
    one.register("one")
    assert len({group.group_name for group in (one, two, three)}) == 3


def test_a_group_registers_where_the_default_group_is_bound_to_a_device(world: None) -> None:
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = torch.device("cuda:0")
    pg = ProcessGroupDummy()
    pg.register("dp")
    pg.unregister()


def test_what_register_refuses(world: None) -> None:
    pg = ProcessGroupDummy()
    for name in ("", "a b", "a:b", "a,b", "ä"):
        with pytest.raises(ConfigError, match=r"the group name .* is invalid"):
            pg.register(name)
    with pytest.raises(ConfigError, match=r"ProcessGroupDummy\(.*\) is not registered; call register first"):
        pg.unregister()
    pg.register("dp")
    with pytest.raises(ConfigError, match="already registered as 'dp'; unregister it before"):
        pg.register("other")
    pg.unregister()
    with pytest.raises(ConfigError, match="is not registered"):
        pg.unregister()


def test_register_needs_torchs_default_group() -> None:
    with pytest.raises(ConfigError, match="call init_process_group first"):
        ProcessGroupDummy().register("dp")


def test_a_group_outlives_torchs_default_group(pg: ManagedProcessGroup) -> None:
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        pg.register("dp")
        dist.destroy_process_group()
    pg.unregister()


def test_a_group_has_no_name_once_torch_has_forgotten_it(pg: ManagedProcessGroup) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    first = pg.register("dp").group_name
    dist.destroy_process_group()
    with pytest.raises(ConfigError, match="is not registered; call register first"):
        _ = pg.group_name
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert ProcessGroupDummy().register("dp").group_name == first
    with pytest.raises(ConfigError, match="is not registered; call register first"):
        _ = pg.group_name
    dist.destroy_process_group(pg.register("dp"))
    dist.destroy_process_group()


def test_a_wrapper_has_a_parent_and_registers_itself(world: None) -> None:
    inside = ProcessGroupDummy()
    pg = ErrorSwallowingProcessGroupWrapper(inside)
    pg.register("dp")
    assert pg.parent is inside
    assert inside.parent is None
    with pytest.raises(ConfigError, match="has no name"):
        _ = inside.group_name


# --- the managed group ---


def test_a_managed_group_is_as_large_as_its_participants(pg: ManagedProcessGroup, manager: Participants) -> None:
    assert (pg.size(), pg.rank()) == (3, 0)
    manager.number = 0  # before the first quorum
    assert pg.size() == 1


def test_a_managed_group_moves_weights_nowhere(mesh: DeviceMesh, pg: ManagedProcessGroup) -> None:
    weights, out = torch.arange(3.0), torch.zeros(3)
    dist.broadcast(weights, 0, group=pg)
    dist.barrier(pg)
    dist.all_gather([out], weights, group=pg)
    assert torch.equal(out, weights)
    all_gather(out.zero_(), weights, group=pg)
    assert torch.equal(out, weights)
    dist.scatter(out.zero_(), [weights], 0, group=pg)
    assert torch.equal(out, weights)
    objects = ["state"]
    dist.broadcast_object_list(objects, 0, group=pg)
    assert objects == ["state"]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("_allgather_base over the part", lambda t, pg: all_gather(torch.ones(9), t, group=pg)),
        ("allgather over the participants", lambda t, pg: dist.all_gather([t.clone() for _ in "abc"], t, group=pg)),
        ("allgather_into_tensor_coalesced over", lambda t, pg: functional_all_gather(t, 0, pg)),
        ("_reduce_scatter_base, because it only reduces", lambda t, pg: reduce_scatter(t[:1], t, group=pg)),
        ("alltoall_base, because it only reduces", lambda t, pg: dist.all_to_all_single(t.clone(), t, group=pg)),
        ("reduce, because it only reduces", lambda t, pg: dist.reduce(t, 0, group=pg)),
        ("recv, because it only reduces", lambda t, pg: pg.recv([t], 0, 0)),
        ("PREMUL_SUM; multiply", lambda t, pg: pg.allreduce([t], dist._make_nccl_premul_sum(2.0))),
    ],
)
def test_what_a_managed_group_refuses(
    mesh: DeviceMesh, pg: ManagedProcessGroup, words: str, call: Callable[[torch.Tensor, ProcessGroup], object]
) -> None:
    with pytest.raises(UnsupportedOperationError, match=f"a managed group does not support {words}"):
        call(torch.ones(3), pg)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch, when it first loads its compiler
@pytest.mark.parametrize(
    ("instead", "act"),
    [
        (r"if FSDP calls it, .* mesh\['dp', 'shard'\]", lambda mesh: sharded(mesh["dp"])),
        (
            r"if FSDP calls it, .* or use the replicate of replicate_with_fsdp",
            lambda mesh: functional_reduce_scatter(torch.ones(3), "sum", 0, mesh["dp"]),
        ),
        ("if torch's DistributedDataParallel calls it, use that of tft-algos", lambda mesh: data_parallel(mesh["dp"])),
        (
            "if all_gather_object or gather_object calls it, pass a group inside the replica group",
            lambda mesh: dist.all_gather_object([None] * 3, "state", group=mesh.get_group("dp")),
        ),
    ],
)
def test_what_is_refused_says_what_to_do_instead(
    mesh: DeviceMesh, instead: str, act: Callable[[DeviceMesh], object]
) -> None:
    with pytest.raises(UnsupportedOperationError, match=instead):
        act(mesh)


def sharded(mesh: DeviceMesh) -> list[torch.Tensor]:
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    return backward_of(model, torch.ones(2, 4))


def data_parallel(mesh: DeviceMesh) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), device_mesh=mesh)


def test_a_managed_groups_root_is_0(pg: ManagedProcessGroup) -> None:
    with pytest.raises(ConfigError, match="broadcast of a managed group got root 1"):
        pg.broadcast(torch.ones(1), 1)
    pg.broadcast_one(torch.ones(1), 0).wait()


def test_a_managed_group_reduces_several_tensors_as_one(mesh: DeviceMesh, pg: ManagedProcessGroup) -> None:
    first, second = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(1)], "sum", pg)
    assert [first.tolist(), second.tolist()] == [[3.0, 3.0], [3.0]]
    tensors = [torch.ones(1), torch.ones(2)]
    work = pg.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
    assert work.get_future().wait() == tensors
    assert work.wait()
    assert work.is_completed()
    assert work.result() == tensors


# --- the mesh ---


def test_the_mesh_says_one_and_the_group_its_participants(mesh: DeviceMesh, pg: ManagedProcessGroup) -> None:
    assert (mesh.mesh_dim_names, mesh.shape, mesh.size(), mesh.ndim) == (("dp", "shard", "tp"), (1, 1, 1), 1, 3)
    for group in (mesh.get_group("dp"), mesh.get_group(0), mesh["dp"].get_group(), mesh["dp", "shard"].get_group("dp")):
        assert group is pg
    assert (mesh["dp"].size(), mesh["dp"].get_local_rank(), mesh.get_local_rank("dp"), pg.size()) == (1, 0, 0, 3)
    assert mesh["dp", "shard"].mesh.tolist() == [[0]]
    assert mesh.get_coordinate() == (0, 0, 0)
    assert repr(mesh).startswith("DeviceMesh((dp=1, shard=1, tp=1), 'cpu'")
    assert DeviceMesh._concatenate([mesh["dp"], mesh["tp"]]).get_group("dp") is pg


OLD_MESHES = torch.__version__ < "2.13"  # torch's layouts were others


@pytest.mark.skipif(OLD_MESHES, reason="before torch 2.13 it can only be the first")
def test_the_new_dimension_comes_where_it_is_wanted(inner: DeviceMesh, pg: ManagedProcessGroup) -> None:
    registered = pg.register("groups")
    for dim, names in enumerate([("r", "shard", "tp"), ("shard", "r", "tp"), ("shard", "tp", "r")]):
        mesh = extend_device_mesh(inner, pg, "r", dim)
        assert mesh.mesh_dim_names == names
        assert mesh.get_group("r") is registered
        assert mesh.get_group("tp") is inner.get_group("tp")


@pytest.mark.skipif(not OLD_MESHES, reason="since torch 2.13 it can be any")
def test_the_new_dimension_can_only_be_the_first(inner: DeviceMesh, pg: ManagedProcessGroup) -> None:
    with pytest.raises(
        UnsupportedOperationError, match=r"'dp' only as the first dimension, .* leave out dim=1, or install torch 2.13"
    ):
        extend_device_mesh(inner, pg, "dp", 1)
    assert extend_device_mesh(inner, pg).mesh_dim_names == ("dp", "shard", "tp")


def test_a_slice_and_a_flattened_mesh_can_be_extended(inner: DeviceMesh, pg: ManagedProcessGroup) -> None:
    assert extend_device_mesh(inner["shard"], pg).mesh_dim_names == ("dp", "shard")
    assert extend_device_mesh(inner._flatten("all"), pg).mesh_dim_names == ("dp", "all")
    inner["shard", "tp"]._flatten("still")


# Before torch 2.13 it takes no names, and refuses those that there are.
UNFLATTENED: list[Callable[[Any], object]] = [
    lambda mesh: mesh._unflatten("dp", (1,), ("other",)),
    lambda mesh: mesh["dp", "shard"]._unflatten("dp", (1, 1), ("a", "b")),
]


@pytest.mark.parametrize(
    "act",
    [
        lambda mesh: mesh["dp", "shard"]._flatten(),
        lambda mesh: mesh["dp", "shard"]._flatten("loss"),
        lambda mesh: mesh._flatten("all"),
        lambda mesh: mesh["dp"]._flatten("replicas"),
        lambda mesh: DeviceMesh._concatenate([mesh["dp"], mesh["shard"]])._flatten(),
        lambda mesh: copy.deepcopy(mesh)["dp", "shard"]._flatten(),
        *([] if OLD_MESHES else UNFLATTENED),
    ],
)
def test_what_would_leave_out_the_other_replicas_is_refused(mesh: DeviceMesh, act: Callable[[Any], object]) -> None:
    with pytest.raises(UnsupportedOperationError, match="across replica groups can't be flattened or unflattened"):
        act(mesh)


def test_what_extend_device_mesh_refuses(inner: DeviceMesh, pg: ManagedProcessGroup) -> None:
    closed = ProcessGroupDummy()
    closed.shutdown()
    refused: list[tuple[str, tuple[Any, ...]]] = [
        ("got a str as mesh; pass a DeviceMesh", ("mesh", pg)),
        ("got a ProcessGroup as group; pass a group of tft-pg", (inner, dist.group.WORLD)),
        ("already has a dimension 'tp'", (inner, pg, "tp")),
        ("so dim=3 is out of range", (inner, pg, "dp", 3)),
        ("so dim=-1 is out of range", (inner, pg, "dp", -1)),
        ("has no names for its dimensions", (init_device_mesh("cpu", (1,)), pg)),
        ("dim is True; pass a whole number", (inner, pg, "dp", True)),
        ("dim is None; pass a whole number", (inner, pg, "dp", None)),
        ("the group name None is invalid", (inner, pg, None)),
        ("the group name 7 is invalid", (inner, pg, 7)),
        ("the group for dimension 'dp' was shut down; make a new group", (inner, closed)),
    ]
    before = entries()
    for words, arguments in refused:
        with pytest.raises(ConfigError, match=words):
            extend_device_mesh(*arguments)
    assert entries() == before


def test_a_mesh_is_copied_compared_and_pickled(mesh: DeviceMesh, inner: DeviceMesh, pg: ManagedProcessGroup) -> None:
    for other in (copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
        assert (other, hash(other)) == (mesh, hash(mesh))
        assert other["dp"].get_group() is pg
    assert mesh != inner
    assert b"tft" not in pickle.dumps(mesh)


def test_meshes_over_different_groups_are_different(inner: DeviceMesh, pg: ManagedProcessGroup) -> None:
    mesh, other = extend_device_mesh(inner, pg), extend_device_mesh(inner, ManagedProcessGroup(Participants()))
    for names in ("dp", ("dp", "shard"), ("dp", "shard", "tp")):
        assert mesh[names] != other[names]
        assert hash(mesh[names]) != hash(other[names])
    assert DeviceMesh._concatenate([mesh["dp"], mesh["tp"]]) != DeviceMesh._concatenate([other["dp"], other["tp"]])
    for names in ("shard", ("shard", "tp")):
        assert mesh[names] == other[names] == inner[names]
    again = extend_device_mesh(inner, pg)
    assert (again, hash(again), again["dp"]) == (mesh, hash(mesh), mesh["dp"])
    twice = extend_device_mesh(mesh, other.get_group("dp"), "more")  # type: ignore[arg-type]  # it is ours
    assert (twice["dp"], twice["dp", "shard"]) == (mesh["dp"], mesh["dp", "shard"])
    assert twice != extend_device_mesh(other, pg, "more")
    assert twice.shape == (1, 1, 1, 1)


def test_torch_must_tell_the_meshes_apart(
    inner: DeviceMesh, pg: ManagedProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMesh, "__eq__", lambda mesh, other: mesh._flatten_rank_map == other._flatten_rank_map)
    with pytest.raises(UnsupportedOperationError, match="compiled code would confuse meshes of different groups"):
        extend_device_mesh(inner, pg)


def test_dtensors_see_one_replica(mesh: DeviceMesh, manager: Participants) -> None:
    tensor = torch.arange(4.0)
    sharded = distribute_tensor(tensor, mesh, [Replicate(), Shard(0), Replicate()])
    assert torch.equal(sharded.full_tensor(), tensor)
    partial = DTensor.from_local(tensor, mesh, [Partial(), Replicate(), Replicate()])
    assert torch.equal(partial.full_tensor(), tensor)
    saved = io.BytesIO()
    torch.save({"weight": sharded}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)["weight"]
    assert (loaded.device_mesh, loaded.placements) == (mesh, sharded.placements)
    assert copy.deepcopy(sharded).device_mesh.get_group("dp") is mesh.get_group("dp")
    assert not manager.reduced


REDUCTIONS: list[tuple[str, Callable[[torch.Tensor, DeviceMesh, Any], torch.Tensor]]] = [
    ("the group", lambda x, mesh, pg: funcol.all_reduce(x, "sum", pg)),
    ("mesh and dimension", lambda x, mesh, pg: funcol.all_reduce(x, "sum", (mesh, 0))),
    ("a slice", lambda x, mesh, pg: funcol.all_reduce(x, "sum", mesh["dp"])),
    ("the mesh's group", lambda x, mesh, pg: funcol.all_reduce(x, "sum", mesh.get_group("dp"))),
    ("several", lambda x, mesh, pg: funcol.all_reduce_coalesced([x], "sum", pg)[0]),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch, when it first loads inductor
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_functional_collectives(
    mesh: DeviceMesh, pg: ManagedProcessGroup, manager: Participants, backend: str | None
) -> None:
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler, and there is none here")
    for what, reduce in REDUCTIONS[:1] if backend == "inductor" else REDUCTIONS:

        def step(x: torch.Tensor, reduce: Any = reduce) -> torch.Tensor:
            total: torch.Tensor = reduce(x + 1, mesh, pg) * 2
            return total

        run = step if backend is None else torch.compile(step, backend=backend, fullgraph=True)
        assert run(torch.ones(2)).tolist() == [12.0, 12.0], what
        assert manager.reduced == [ReduceOp.SUM], what
        manager.reduced.clear()


SPELLINGS: list[Callable[[torch.Tensor, DeviceMesh], torch.Tensor]] = [
    lambda x, mesh: funcol.all_reduce(x + 1, "sum", mesh["dp"]) * 1,
    lambda x, mesh: funcol.all_reduce(x + 1, "sum", mesh["dp", "shard"].get_group("dp")) * 1,
    lambda x, mesh: funcol.all_reduce(x + 1, "sum", (mesh, 0)) * 1,
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("step", SPELLINGS)
def test_compiled_code_reduces_over_the_group_of_its_mesh(
    inner: DeviceMesh, step: Callable[[torch.Tensor, DeviceMesh], torch.Tensor]
) -> None:
    run = torch.compile(step, backend="aot_eager", fullgraph=True)
    meshes = [extend_device_mesh(inner, ManagedProcessGroup(Participants(number))) for number in (3, 5)]
    assert [run(torch.ones(1), mesh).item() for mesh in (*meshes, *meshes)] == [6.0, 10.0, 6.0, 10.0]
    plain = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "shard", "tp"))
    assert run(torch.ones(1), plain).item() == 2.0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_mesh_of_the_same_program_started_anew_is_equal(pg: ManagedProcessGroup) -> None:
    def start(pg: ManagedProcessGroup) -> DeviceMesh:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return extend_device_mesh(init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), pg)

    mesh = start(pg)
    run = torch.compile(lambda x, mesh: funcol.all_reduce(x, "sum", mesh["dp"]) * 1, backend="aot_eager")
    assert run(torch.ones(1), mesh).item() == 3.0
    dist.destroy_process_group()
    again = start(ManagedProcessGroup(Participants(5)))
    assert again == mesh
    assert run(torch.ones(1), again).item() == 5.0  # torch finds the group by its name
    dist.destroy_process_group()
    torch._dynamo.reset()


OUTSIDE_THE_GRAPH: list[tuple[str, Callable[[torch.Tensor, ProcessGroup], object], float]] = [
    ("broadcast", lambda x, pg: dist.broadcast(x, group=pg, group_src=0), 1.0),
    ("scatter", lambda x, pg: dist.scatter(x, [x.clone()], group=pg, group_src=0), 1.0),
    ("allreduce", lambda x, pg: dist.all_reduce(x, group=pg, async_op=True).wait(), 3.0),  # type: ignore[union-attr]
    ("barrier", lambda x, pg: dist.barrier(pg), 1.0),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # torch's own functions
@pytest.mark.parametrize(("what", "act", "expected"), OUTSIDE_THE_GRAPH)
def test_other_collectives_break_the_graph(
    mesh: DeviceMesh,
    pg: ManagedProcessGroup,
    what: str,
    act: Callable[[torch.Tensor, ProcessGroup], object],
    expected: float,
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(x: torch.Tensor) -> torch.Tensor:
        act(x, pg)
        return x * 2

    assert torch.compile(step, backend=backend)(torch.ones(1)).item() == 2 * expected
    operations = [node.target for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    assert operations == [operator.mul] if what != "scatter" else ["clone", operator.mul]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_dtensor_is_distributed_in_compiled_code(mesh: DeviceMesh) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (distribute_tensor(x, mesh, [Replicate()] * 3) * 2).full_tensor()

    assert torch.compile(step, backend="eager")(torch.ones(1)).item() == 2.0


# --- FSDP2 ---


def backward_of(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_one_shards_gradient_is_the_mean_over_the_participants(
    mesh: DeviceMesh, manager: Participants, number: int, dtype: torch.dtype, tensor_parallel: bool
) -> None:
    manager.number = number
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(dtype)
    alone = copy.deepcopy(model)
    x = torch.randn(3, 4, dtype=dtype)
    alone(x).square().mean().backward()
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model, mesh=mesh["dp", "shard"])
    # All participants give the same, so that the mean is what each gives.
    for gradient, expected in zip(backward_of(model, x), alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, expected.grad)
    assert len(manager.reduced) == 1


def test_replicate_takes_the_dimension_alone(mesh: DeviceMesh, manager: Participants) -> None:
    model = torch.nn.Linear(4, 4)
    alone, x = copy.deepcopy(model), torch.randn(3, 4)
    alone(x).square().mean().backward()
    replicate(model, mesh=mesh["dp"])
    for gradient, expected in zip(backward_of(model, x), alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, expected.grad)
    assert len(manager.reduced) == 1


def test_reductions_in_another_dtype_are_the_mean_too(mesh: DeviceMesh, manager: Participants) -> None:
    model = torch.nn.Linear(4, 4)
    alone, x = copy.deepcopy(model), torch.randn(3, 4)
    alone(x).square().mean().backward()
    fully_shard(model, mesh=mesh["dp", "shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    for gradient, expected in zip(backward_of(model, x), alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, expected.grad, atol=1e-3, rtol=1e-2)
    assert manager.reduced == [ReduceOp.SUM]  # 3 participants: FSDP2 divides by what the group says


def test_a_custom_divide_factor_divides_the_sum_over_the_participants(mesh: DeviceMesh, manager: Participants) -> None:
    model = torch.nn.Linear(4, 4)
    alone, x = copy.deepcopy(model), torch.randn(3, 4)
    alone(x).square().mean().backward()
    fully_shard(model, mesh=mesh["dp", "shard"])
    model.set_gradient_divide_factor(mesh["shard"].size() * mesh.get_group("dp").size())
    for gradient, expected in zip(backward_of(model, x), alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, expected.grad)
    model.zero_grad()
    model.set_gradient_divide_factor(1.0)
    for gradient, expected in zip(backward_of(model, x), alone.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(gradient, 3 * expected.grad)


def test_a_sharded_models_state_goes_out_and_in(mesh: DeviceMesh) -> None:
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    for model in models:
        fully_shard(model, mesh=mesh["dp", "shard"])
    state = get_model_state_dict(models[0])
    assert state["weight"].placements == (Replicate(), Shard(0))
    assert state["weight"].device_mesh == mesh["dp", "shard"]
    set_model_state_dict(models[1], state)
    assert torch.equal(models[0].weight.full_tensor(), models[1].weight.full_tensor())  # type: ignore[operator]
