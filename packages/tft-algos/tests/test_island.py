"""One rank of an island: who meets the others, what is given and taken for all, and how whole tensors are cut.

One process plays one rank of two: torch's fake process groups let collectives do nothing, so what a rank has of a
DTensor that others have more of means nothing here. `integration_tests/test_islands.py` has them all.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_algos import (
    ConfigError,
    DistributedDataParallel,
    HealingError,
    LocalSGD,
    ManagerConfig,
    PureDistributedDataParallel,
    extend_mesh,
    reduce_across,
)
from tft_algos.local_sgd.fragment import Fragment
from tft_algos.local_sgd.rank0_sync import Rank0Sync, rank0_sync_of
from tft_algos.manager.config import from_environment
from tft_algos.manager.quorum.rank0_groups import whole
from tft_algos.manager.recovery.healing import state_key
from tft_algos.manager.recovery.shards import shard_whole
from tft_algos.testing import MemoryTransport, plan_of
from tft_ckpt import LocalShard, PGTransport, StateUnavailableError
from tft_coord.core.types import Purpose, QuorumKey
from tft_coord.errors import ReplicaGroupLostError, RequestTimeoutError
from tft_pg import ProcessGroupDummy

OF_TWO: Final[dict[str, Any]] = {"world_size": 2, "store_addr": "nowhere", "store_port": 1}
UNCHANGED: Final = QuorumKey(7, 7)


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """Be rank 1 of two whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def mesh_of(size: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))


def an_island(rigs: Any, *answers: Any, rank: int = 0, size: int = 2, others: float = 0.0, **settings: Any) -> Any:
    """One rank of an island of that size."""
    place = {**OF_TWO, "rank": rank} if size == 2 else {}
    rig = rigs(*answers, rank0_synchronization_only=True, others=others, **place, **settings)
    rig.coordinator.rank = rank
    rig.coordinator.other_ranks = ("memory",) * (size - 1)  # what rank 0 gives when it has something to give
    return rig


def votes(rig: Any) -> list[tuple[bool, Purpose]]:
    return [(yes, purpose) for _, _, yes, purpose in rig.coordinator.votes]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "environ", "resolved"),
    [
        (None, {}, False),
        (None, {"TFT_RANK0_SYNCHRONIZATION_ONLY": "1"}, True),
        (None, {"TFT_RANK0_SYNCHRONIZATION_ONLY": "0"}, False),
        (True, {"TFT_RANK0_SYNCHRONIZATION_ONLY": "0"}, True),
        (False, {"TFT_RANK0_SYNCHRONIZATION_ONLY": "1"}, False),
    ],
)
def test_it_is_said_by_argument_or_environment(said: bool | None, environ: dict[str, str], resolved: bool) -> None:
    config = ManagerConfig(rank0_synchronization_only=said, lighthouse_addr="localhost:1")
    assert from_environment(config, environ, own_host=lambda: "here").rank0_synchronization_only is resolved


def test_what_is_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank0_synchronization_only is 1; give True or False"):
        ManagerConfig(rank0_synchronization_only=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="TFT_RANK0_SYNCHRONIZATION_ONLY is 'yes'; give 0 or 1"):
        from_environment(
            ManagerConfig(lighthouse_addr="localhost:1"),
            {"TFT_RANK0_SYNCHRONIZATION_ONLY": "yes"},
            own_host=lambda: "here",
        )


def test_a_transport_that_ends_at_rank_zero_is_refused(rigs: Any) -> None:
    transport = PGTransport[Any](ProcessGroupDummy(), timedelta(seconds=1), torch.device("cpu"))
    with pytest.raises(ConfigError, match="a PGTransport, which reaches only group rank 0"):
        rigs(rank0_synchronization_only=True, checkpoint_transport=transport, rank=0, **OF_TWO)


def test_an_island_says_what_it_is_and_not_how_large(rigs: Any) -> None:
    rig = an_island(rigs, plan_of(7, size=2))
    rig.manager.strategy.describe_parameters(nn.Linear(2, 3))
    rig.step()
    said = dict(rig.coordinator.requests[0].fingerprint)
    assert said["rank0_synchronization_only"] == "True"
    assert "group world size" not in said
    # Not under a name that may differ between ranks: rank 0 speaks for all of them.
    assert said["model 0"].startswith("2 parameters, ")


def test_strategies_that_average_on_every_rank_are_refused(rigs: Any, second_of_two: None) -> None:
    manager = an_island(rigs, rank=1).manager
    model = nn.Linear(2, 2)
    for strategy in (DistributedDataParallel, PureDistributedDataParallel, reduce_across):
        with pytest.raises(ConfigError, match="with which only group rank 0 reduces; use LocalSGD or DiLoCo"):
            strategy(manager, model)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="hybrid sharding"):
        extend_mesh(manager, mesh_of())


# --- a step -----------------------------------------------------------------------------------------------------------


def test_rank_zero_meets_the_other_islands(rigs: Any) -> None:
    rig = an_island(rigs, plan_of(7, size=2), others=2.5)
    rig.manager.start_quorum()
    tensor = torch.ones(2)
    assert rig.manager.allreduce(tensor).wait()
    assert rig.manager.should_commit()
    assert tensor.tolist() == [3.0, 3.0]
    assert rig.group.configured == [("localhost:1/tft/default/7.0000000000000007/0", 0, 2)]


def test_another_rank_reduces_nothing_asks_and_votes(rigs: Any, use_async_quorum: bool) -> None:
    answers = [plan_of(7, size=2), UNCHANGED, plan_of(8, step=2, size=2)]
    rig = an_island(rigs, *answers, rank=1, others=2.5, use_async_quorum=use_async_quorum)
    for _ in range(3):
        rig.manager.start_quorum()
        tensor = torch.ones(2)
        assert rig.manager.allreduce(tensor).wait()
        assert rig.manager.should_commit()
        assert tensor.tolist() == [1.0, 1.0]
    assert (rig.group.configured, rig.group.calls) == ([], [])
    assert [request.needs_configure for request in rig.coordinator.requests] == [False] * 3
    assert (rig.manager.current_step(), rig.manager.num_participants()) == (3, 2)
    rig.manager.shutdown()
    assert rig.group.closed


def test_another_rank_may_ask_for_a_quantized_reduction(rigs: Any) -> None:
    rig = an_island(rigs, plan_of(7, size=2), rank=1)
    rig.manager.start_quorum()
    tensor = torch.full((2,), 3.0)
    assert rig.manager.allreduce(tensor, should_quantize=True).wait()
    assert tensor.tolist() == [3.0, 3.0]
    assert rig.manager.should_commit()


def test_a_reduction_after_an_error_says_no_on_every_rank(rigs: Any) -> None:
    rig = an_island(rigs, plan_of(7, size=2), rank=1)
    rig.manager.start_quorum()
    rig.manager.report_error(RuntimeError("a bad batch"))
    assert not rig.manager.allreduce(torch.ones(1)).wait()
    assert not rig.manager.should_commit()


def test_a_vote_waits_for_the_reductions_of_rank_zero(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    for rank in range(2):
        rig = an_island(rigs, plan_of(7, size=2), rank=rank, timeout=timedelta(seconds=30))
        cast = rig.coordinator.vote

        def vote(step: int, yes: bool, timeout: timedelta, cast: Any = cast, **rest: Any) -> Any:
            waited.append(timeout.total_seconds())
            return cast(step, yes, timeout, **rest)

        monkeypatch.setattr(rig.coordinator, "vote", vote)
        rig.manager.start_quorum()
        assert rig.manager.should_commit(timeout=timedelta(seconds=5))
    assert waited == [5.0, 35.0]


# --- giving -----------------------------------------------------------------------------------------------------------


def test_rank_zero_gives_for_all_once_all_could_take_their_state(rigs: Any) -> None:
    for rank, sent in ((0, [[1]]), (1, [])):
        rig = an_island(rigs, plan_of(7, size=2, healing=[1]), rank=rank)
        assert rig.step()
        assert votes(rig) == [(True, Purpose.TAKEN), (True, Purpose.COMMIT)]
        assert len(rig.weights.threads) == 1, "every rank takes its state, for that may be a collective"
        assert rig.transport.sent_to == sent


def test_where_a_rank_could_not_take_its_state_the_newcomer_is_told(rigs: Any) -> None:
    plan = plan_of(7, size=2, healing=[1])
    rig = an_island(rigs, plan, verdicts=[False])
    assert rig.step(), "the step itself is sound"
    with pytest.raises(StateUnavailableError, match="another rank of replica replica_0 could not take its state"):
        rig.transport.recv_checkpoint(0, "memory", 0, timedelta(seconds=1), key=state_key(plan))


def test_what_several_processes_have_is_given_whole_and_the_own_state_stays(second_of_two: None) -> None:
    cut = distribute_tensor(torch.arange(10.0).view(5, 2), mesh_of(), [Shard(0)], src_data_rank=None)
    state: dict[str, Any] = defaultdict(list, a=[cut, 3], b=OrderedDict(c=(cut, "text")), d=torch.ones(1))
    made = whole(state)
    assert made["a"][0].shape == made["b"]["c"][0].shape == (5, 2)
    assert not isinstance(made["a"][0], DTensor)
    assert (type(made), type(made["b"]), made["a"][1], made["d"]) == (defaultdict, OrderedDict, 3, state["d"])
    assert state["a"][0] is cut
    assert whole(state, keep=False)["a"] == [None, 3]


def test_what_one_process_has_alone_is_not_copied() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        alone = distribute_tensor(torch.ones(3), mesh_of(1), [Shard(0)])
        assert whole([alone])[0].data_ptr() == alone.to_local().data_ptr()
    finally:
        dist.destroy_process_group()


# --- taking -----------------------------------------------------------------------------------------------------------


def healing(rigs: Any, *, rank: int, **settings: Any) -> tuple[Any, MemoryTransport]:
    """A rank of an island of two that is about to heal from an island of one."""
    transport = MemoryTransport()
    source = an_island(rigs, plan_of(7, size=2, healing=[1]), size=1, checkpoint_transport=transport)
    source.weights.tensor.fill_(7.0)
    assert source.step()
    member = an_island(
        rigs,
        plan_of(7, rank=1, size=2, healing=[1]),
        rank=rank,
        checkpoint_transport=MemoryTransport(transport.shelf),
        **settings,
    )
    return member, member.transport


HEALED: Final = [
    (True, Purpose.STAGED),
    (True, Purpose.SPREAD),
    (True, Purpose.MATCHED),
    (True, Purpose.LOADED),
    (True, Purpose.COMMIT),
]


def test_rank_zero_fetches_and_gives_it_to_its_island(rigs: Any, use_async_quorum: bool) -> None:
    member, transport = healing(rigs, rank=0, use_async_quorum=use_async_quorum)
    assert member.step()
    assert transport.received_from == [(0, "replica_0", [])]
    assert transport.sent_to == [[]]
    assert member.coordinator.gathered == [("spread 7.0000000000000007 0", "memory")]
    assert votes(member) == HEALED
    assert member.weights.tensor.tolist() == [7.0, 7.0]


def test_another_rank_takes_it_from_rank_zero(rigs: Any, use_async_quorum: bool) -> None:
    member, transport = healing(rigs, rank=1, use_async_quorum=use_async_quorum)
    assert member.step()
    assert transport.received_from == [(1, "memory", [])], "of its own replica, and not of another island"
    assert transport.sent_to == []
    assert votes(member) == HEALED
    assert member.weights.tensor.tolist() == [7.0, 7.0]
    assert member.manager.current_step() == 1


def test_where_rank_zero_could_not_fetch_no_rank_heals(rigs: Any) -> None:
    member, transport = healing(rigs, rank=1, verdicts=[False, False])
    assert not member.step()
    assert (transport.received_from, member.weights.threads) == ([], [])
    assert votes(member)[0] == (True, Purpose.STAGED)
    assert "could not fetch step 0; all ranks of a group heal together" in str(member.manager.status().errors[0])


def test_where_another_rank_could_not_take_it_rank_zero_does_not_load(rigs: Any) -> None:
    member, _ = healing(rigs, rank=0, verdicts=[True, False, False])
    assert not member.step()
    assert member.weights.threads == []
    assert "could not receive step 0; all ranks of a group heal together" in str(member.manager.status().errors[0])


def test_where_rank_zero_has_nothing_to_give_the_others_say_so(rigs: Any) -> None:
    member, _ = healing(rigs, rank=1)
    member.coordinator.other_ranks = ("",)
    assert not member.step()
    assert votes(member) == [(True, Purpose.STAGED), (False, Purpose.SPREAD), (False, Purpose.COMMIT)]
    assert "rank 0 of replica replica_1 could not offer the state of step 0 to the other ranks" in str(
        member.manager.status().errors[0]
    )


def test_a_rank_zero_whose_transport_fails_says_so_to_all(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    member, transport = healing(rigs, rank=0)

    def send(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(type(transport), "send_checkpoint", send)
    assert not member.step()
    assert member.coordinator.gathered == [("spread 7.0000000000000007 0", "")]
    assert "rank 0 could not receive the state of step 0 from rank 0 of replica replica_1 (no memory)" in str(
        member.manager.status().errors[0]
    )


def test_a_rank_that_has_other_state_registered_heals_nobody(rigs: Any) -> None:
    member, _ = healing(rigs, rank=1)
    member.manager.register_state_dict_fn("more", lambda _: None, lambda: 1)
    assert not member.step()
    assert votes(member)[1] == (False, Purpose.SPREAD)
    assert "register the same keys" in str(member.manager.status().errors[0])


@pytest.mark.parametrize("kind", ["a no", "no answer"])
def test_whose_group_is_lost_while_it_takes_over_ends(rigs: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    member, _ = healing(rigs, rank=1)

    def gather(name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
        member.coordinator.listener(ReplicaGroupLostError("rank 0 was killed"))
        if kind == "no answer":
            raise RequestTimeoutError("rank 0 gave nothing")
        return ("", "")

    monkeypatch.setattr(member.coordinator, "gather", gather)
    with pytest.raises(ReplicaGroupLostError, match="rank 0 was killed"):
        member.step()
    assert member.weights.threads == []


# --- whether all hold the same state ----------------------------------------------------------------------------------


def lineage_after_a_check(rigs: Any, *, rank: int = 0, size: int = 2, others: tuple[str, ...] = ()) -> int | None:
    rig = an_island(rigs, plan_of(7, size=2), plan_of(8, step=1, size=2), rank=rank, size=size, check_state_every=1)
    assert rig.step()

    def gather(name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
        if name.startswith("ready"):
            return (value, "yes")
        given = others or (value.split()[0],)
        return (*given, value) if rank else (value, *given)

    rig.coordinator.gather = gather
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    found: int | None = rig.coordinator.requests[-1].lineage
    return found


def test_islands_of_different_sizes_compare_what_rank_zero_has_whole(rigs: Any) -> None:
    alone = lineage_after_a_check(rigs, size=1)
    assert alone == lineage_after_a_check(rigs)
    # Rank 1 hears from rank 0 what it has, and its own is the same where nothing is cut.
    weights = rigs().weights
    rig = an_island(rigs, rank=1)
    digest = rig.manager._parts.exchange._check._digester.digest({"default": weights.take()})
    assert lineage_after_a_check(rigs, rank=1, others=(f"{digest} {digest}",)) == alone


def test_an_island_whose_ranks_differ_has_no_state_to_show(rigs: Any) -> None:
    unchecked = lineage_after_a_check(rigs, others=("b" * 32,))
    assert unchecked != lineage_after_a_check(rigs)


# --- cutting ----------------------------------------------------------------------------------------------------------


def test_whole_tensors_are_cut_as_the_own_ones_are(second_of_two: None) -> None:
    mesh = mesh_of()
    full = torch.arange(10.0).view(5, 2)
    own = {
        "rows": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)], src_data_rank=None),
        "columns": [distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)], src_data_rank=None)],
        "all": distribute_tensor(torch.zeros(5, 2), mesh, [Replicate()], src_data_rank=None),
        "plain": torch.zeros(5, 2),
        "number": 3,
    }
    state = {"rows": full, "columns": [full], "all": full, "plain": full, "number": 4}
    made = shard_whole(state, own)
    assert made["rows"].to_local().tolist() == [[6.0, 7.0], [8.0, 9.0]]
    assert made["columns"][0].to_local().tolist() == [[1.0], [3.0], [5.0], [7.0], [9.0]]
    assert torch.equal(made["all"].to_local(), full)
    for mine, theirs in ((made["rows"], own["rows"]), (made["columns"][0], own["columns"][0])):  # type: ignore[index]
        assert mine._spec == theirs._spec
        assert mine.to_local().untyped_storage().nbytes() < full.untyped_storage().nbytes()
    assert (made["plain"] is full, made["number"]) == (True, 4)


@pytest.mark.parametrize("by_name", [False, True], ids=["by number", "by name"])
def test_an_optimizer_that_has_no_state_yet_gets_it_cut(second_of_two: None, by_name: bool) -> None:
    source, model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    fully_shard(model, mesh=mesh_of())
    theirs, ours = torch.optim.AdamW(source.parameters()), torch.optim.AdamW(model.parameters())
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    moments = theirs.state_dict()
    if by_name:
        names = [name for name, _ in model.named_parameters()]
        moments["state"] = {names[number]: value for number, value in moments["state"].items()}
    made = shard_whole(
        {"model": dict(source.state_dict()), "optimizer": moments},
        {"model": model.state_dict(), "optimizer": ours.state_dict()},
    )
    model.load_state_dict(made["model"])
    assert not isinstance(made["model"]["1.running_mean"], DTensor)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        state = made["optimizer"]["state"][name if by_name else number]
        assert state["exp_avg"]._spec.placements == parameter._spec.placements  # type: ignore[attr-defined]
        assert not isinstance(state["step"], DTensor)
    if not by_name:
        ours.load_state_dict(made["optimizer"])


def test_what_is_missing_here_and_sharded_in_several_ways_is_refused(second_of_two: None) -> None:
    mesh = mesh_of()
    own = {
        "a": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)], src_data_rank=None),
        "b": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)], src_data_rank=None),
    }
    state = {"state": {0: torch.ones(4, 4)}}
    with pytest.raises(HealingError, match=r"state\['state'\]\[0\] .* missing here, .* sharded in several ways"):
        shard_whole(state, own)
    assert shard_whole({"state": {"b": {"x": torch.ones(4, 4)}}}, own)["state"]["b"]["x"].placements == (Shard(1),)


def test_what_does_not_fit_is_refused_with_its_path(second_of_two: None) -> None:
    own = {"a": distribute_tensor(torch.zeros(4, 4), mesh_of(), [Shard(0)], src_data_rank=None)}
    with pytest.raises(HealingError, match=r"state\['a'\] is of shape \(4, 3\) at the source and of shape \(4, 4\)"):
        shard_whole({"a": torch.ones(4, 3)}, own)
    with pytest.raises(HealingError, match="exchange whole tensors"):
        shard_whole({"a": LocalShard.of(own["a"])}, own)


# --- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [None, 3], ids=["no default group", "one of three"])
def test_a_strategy_of_an_island_needs_torchs_own_group_of_its_ranks(rigs: Any, others: int | None) -> None:
    manager = an_island(rigs, rank=1).manager
    model = nn.Linear(2, 2)
    sentence = "which does not exist" if others is None else "which has this process as rank 1 of 3"
    if others is not None:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=others)
    try:
        with pytest.raises(ConfigError, match=f"needs torch's default group .*, {sentence}, and this is rank 1 of 2"):
            LocalSGD(manager, model, torch.optim.SGD(model.parameters()), 2)
    finally:
        if others is not None:
            dist.destroy_process_group()


def test_an_island_of_one_needs_no_group(rigs: Any) -> None:
    assert rank0_sync_of(an_island(rigs, size=1).manager) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_zero_holds_whole_tensors(second_of_two: None, rank: int) -> None:
    model = nn.Linear(3, 5)
    fully_shard(model, mesh=mesh_of())
    fragment = Fragment(dict(model.named_parameters()), what="the model", rank0_sync=Rank0Sync(rank))
    assert [part.numel() for part in fragment.slices] == ([15, 5] if rank == 0 else [])
    assert [tuple(each.shape) for each in fragment.sent] == [(2, 3), (2,)]
    fragment.capture_difference()
    fragment.take_result()
    assert all(isinstance(gradient, DTensor) for gradient in fragment.gradients())


def test_what_fails_inside_an_island_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(dist, "broadcast", fail)
    fragment = Fragment(dict(nn.Linear(2, 2).named_parameters()), what="the model", rank0_sync=Rank0Sync(0))
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        fragment.take_result()
