"""The guard against silent divergence: digests, what differs, and what a replica does that has gone astray."""

from __future__ import annotations

import logging
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_algos import ConfigError, StateDivergedError, UserStateError
from tft_algos.manager.quorum.group_store import GroupStore
from tft_algos.manager.recovery.divergence import (
    CHUNK_WORDS,
    StateDigester,
    combine,
    describe,
    differences,
)
from tft_algos.manager.recovery.healing import state_key
from tft_algos.testing import MemoryTransport, plan_of
from tft_algos.testing import digest as digest_of_states
from tft_coord.core.lineage import checked_lineage, fold_lineage, initial_lineage
from tft_coord.core.types import Plan, QuorumKey
from tft_coord.errors import RequestTimeoutError

KEY = QuorumKey(1, 1)


DIGESTER = StateDigester()


def digest(state: dict[str, Any]) -> str:
    return DIGESTER.digest(state)


# --- digests and differences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
@pytest.mark.parametrize("size", [1, 7, 33])
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype, size: int) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    octets = tensor.view(torch.uint8)
    seen = {digest({"a": tensor})}
    bits = [0] if dtype is torch.bool else range(8)
    for place in range(len(octets)):
        for bit in bits:
            octets[place] ^= 1 << bit
            seen.add(digest({"a": tensor}))
            octets[place] ^= 1 << bit
    assert len(seen) == 1 + len(octets) * len(bits)


def test_two_signs_that_flip_do_not_make_up_for_each_other() -> None:
    tensor, seen = torch.ones(9), set()
    for one in range(9):
        for other in range(one):
            tensor[[one, other]] *= -1
            seen.add(digest({"a": tensor}))
            tensor[[one, other]] *= -1
    assert len(seen) == 36


def test_what_is_swapped_between_places_chunks_and_tensors_changes_the_digest() -> None:
    tensor = torch.zeros(2 * CHUNK_WORDS + 3, dtype=torch.int64)
    seen = set()
    for place in (0, 1, CHUNK_WORDS, 2 * CHUNK_WORDS, 2 * CHUNK_WORDS + 2):
        tensor[place] = 1
        seen.add(digest({"a": tensor}))
        tensor[place] = 0
    one, other = torch.ones(3), torch.zeros(3)
    seen |= {digest({"a": one, "b": other}), digest({"a": other, "b": one}), digest({"a": [one, other]})}
    assert len(seen) == 8


def test_the_layout_in_memory_and_the_order_of_keys_do_not_count() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    plain = digest({"a": tensor, "b": {"c": 1, "d": [2.5, "x"]}})
    strided = tensor.t().contiguous().t()
    flat = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(3, 4)  # does not begin at a word of eight bytes
    for same in (strided, flat):
        assert digest({"b": OrderedDict(d=(2.5, "x"), c=1), "a": same}) == plain


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0.0, -0.0), (0.1, 0.1 + 2**-56), ("1", 1), (None, []), ([1], [[1]]), (b"a", "a")],
)
def test_plain_data_of_other_values_or_types_has_another_digest(one: Any, other: Any) -> None:
    if one is None:
        assert digest({"a": one}) == digest({"a": other})  # nothing is nothing
    else:
        assert digest({"a": one}) != digest({"a": other})


@pytest.mark.parametrize(
    "leaf",
    [object(), torch.ones(2).to_sparse(), torch.ones(2, device="meta"), {1, 2}],
    ids=["object", "sparse", "meta", "set"],
)
def test_what_can_t_be_compared_is_named(leaf: Any) -> None:
    with pytest.raises(UserStateError, match=r"model\.layers\.1 is a .* can't be compared"):
        digest({"model": {"layers": [0, leaf]}})


def test_a_single_element_with_a_stride_is_compared_as_every_other() -> None:
    column = torch.tensor([[1.5, 2.0]])[:, 0]
    assert column.stride() == (2,)
    imaginary = torch.tensor([1 - 2j]).conj().imag  # a negated view of every second number
    for view, plain in ((column, torch.tensor([1.5])), (imaginary, torch.tensor([2.0]))):
        assert digest({"a": view}) == digest({"a": plain})
        assert digest_of_states({"a": view}) == digest_of_states({"a": plain})
        assert differences({"a": view}, {"a": plain}) == []


def test_what_holds_itself_is_named() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UserStateError, match=r"\['self'\]\['self'\].*contains itself, so it can't be compared"):
        digest(state)


def test_text_that_no_encoding_knows_is_compared() -> None:
    assert digest({"\ud800": "\ud801"}) not in (digest({"\ud802": "\ud801"}), digest({"\ud800": "\ud802"}))


def test_an_empty_state_and_a_scalar_tensor_have_digests() -> None:
    assert len({digest({}), digest({"a": torch.ones(())}), digest({"a": torch.ones(0)}), digest({"a": {}})}) == 4


def test_differences_name_the_place_and_what_is_there() -> None:
    own = {"model": {"w": torch.zeros(5, 2)}, "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}}
    other = {"model": {"w": torch.zeros(5, 2)}, "optimizer": {"param_groups": [{"lr": 0.2, "betas": [0.9, 0.95]}]}}
    other["model"]["w"][1, 1] = 1.0  # type: ignore[index]
    assert differences(own, other) == [
        ("model.w", "1 of 10 elements differ"),
        ("optimizer.param_groups.0.lr", "0.1 here, 0.2 at the source"),
    ]
    assert differences(own, own) == []


def test_differences_of_kind() -> None:
    own = {"a": torch.ones(2), "b": 1, "c": torch.ones(2), "d": torch.tensor(3), "e": "x" * 500, "f": 0}
    other = {"a": torch.ones(3), "c": 4, "d": torch.tensor(5), "e": "y", "f": 0, "g": 2}
    assert dict(differences(own, other)) == {
        "a": "torch.float32 of shape (2,) here, torch.float32 of shape (3,) at the source",
        "b": "is missing at the source",
        "c": "a Tensor here, a int at the source",
        "d": "3 here, 5 at the source",
        "e": f"'{'x' * 76}... here, 'y' at the source",
        "g": "is missing here",
    }


def test_a_long_list_of_differences_is_cut() -> None:
    found = [(str(place), "differs") for place in range(20)]
    assert describe(found).endswith("15: differs; and 4 more")
    assert describe(found[:16]).endswith("15: differs")
    assert describe([]) == "no difference on this rank"


def test_of_a_dtensor_the_part_that_is_here_counts() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        one, other = (DTensor.from_local(torch.full((2, 3), value), mesh, [Shard(0)]) for value in (1.0, 2.0))
        assert digest({"a": one}) == digest({"a": torch.ones(2, 3)})
        assert differences({"a": one}, {"a": other}) == [("a", "6 of 6 elements differ")]
        assert differences({"a": one}, {"a": one.clone()}) == []
    finally:
        dist.destroy_process_group()


# --- the Manager -----------------------------------------------------------------------------------------------------

LOCAL = {"use_async_quorum": False, "check_state_every": 1}


def after_one_step(state: dict[str, Any]) -> tuple[int, int]:
    """The lineages of a replica that holds that state at step 1: before the check, and after it."""
    before = fold_lineage(initial_lineage("default"), KEY, 1)
    return before, checked_lineage(before, combine([digest(state)]))


def source_state(user: dict[str, Any], *, compared: dict[str, Any] | None = None) -> tuple[Plan, dict[Any, Any]]:
    """The plan in which replica_1 heals at step 1 from one that holds another state, and what that one offers."""
    before, after = after_one_step(user if compared is None else compared)
    plan = plan_of(2, step=1, lineage=after, rank=1, size=2, healing=[1])
    check = [1, f"{before:016x}", f"{after:016x}"]
    tft = {"step": 1, "batches_committed": 1, "lineage": f"{after:016x}", "check": check}
    return plan, {state_key(plan): {"user": user, "tft": tft}}


def test_who_differs_says_so_heals_and_goes_on(rigs: Any, use_async_quorum: bool, caplog: Any) -> None:
    plan, shelf = source_state({"default": {"tensor": torch.full((2,), 7.0)}})
    settings = LOCAL | {"use_async_quorum": use_async_quorum}
    rig = rigs(plan_of(), plan, checkpoint_transport=MemoryTransport(shelf), **settings)
    with caplog.at_level(logging.ERROR, logger="tft_algos.manager"):
        assert rig.step()
        assert rig.step()
    assert rig.coordinator.requests[1].lineage == after_one_step({"default": rig.weights.__class__(1.0).take()})[1]
    assert rig.weights.tensor.tolist() == [7.0, 7.0]
    (error,) = [record.getMessage() for record in caplog.records]
    assert "the state of replica replica_0, rank 0, at step 1 differs from that of replica_0" in error
    assert "(default.tensor: 2 of 2 elements differ); this replica heals" in error


def test_who_is_to_stop_stops_before_anything_is_loaded(rigs: Any) -> None:
    plan, shelf = source_state({"default": {"tensor": torch.tensor([1.0, 2.0])}})
    rig = rigs(plan_of(), plan, checkpoint_transport=MemoryTransport(shelf), on_divergence="stop", **LOCAL)
    assert rig.step()
    with pytest.raises(StateDivergedError, match=r"1 of 2 elements differ.*on_divergence is stop") as raised:
        rig.manager.start_quorum()
    assert (raised.value.paths, raised.value.source, raised.value.step) == (("default.tensor",), "replica_0", 1)
    assert rig.weights.tensor.tolist() == [1.0, 1.0]


def test_what_is_not_compared_may_differ(rigs: Any) -> None:
    taken: list[str] = []
    rig = rigs(plan_of(), plan_of(), **LOCAL)
    rig.manager.register_state_dict_fn("cursor", taken.append, lambda: {"at": object()}, compared=False)
    assert rig.step()
    assert rig.step()
    assert rig.coordinator.requests[1].lineage == after_one_step({"default": rig.weights.take()})[1]


def test_what_is_not_compared_is_not_named_either(rigs: Any) -> None:
    compared = {"default": {"tensor": torch.full((2,), 7.0)}}
    plan, shelf = source_state(compared | {"cursor": {"at": 5}}, compared=compared)
    rig = rigs(plan_of(), plan, checkpoint_transport=MemoryTransport(shelf), on_divergence="stop", **LOCAL)
    rig.manager.register_state_dict_fn("cursor", print, lambda: {"at": 4}, compared=False)
    assert rig.step()
    with pytest.raises(StateDivergedError) as raised:
        rig.manager.start_quorum()
    assert raised.value.paths == ("default.tensor",)


def test_a_state_that_can_t_be_taken_leaves_the_lineage_and_says_so(rigs: Any, caplog: Any) -> None:
    rig = rigs(plan_of(), plan_of(), **LOCAL)

    def broken() -> dict[str, Any]:
        raise ValueError("no")

    rig.manager.register_state_dict_fn("other", print, broken)
    with caplog.at_level(logging.ERROR, logger="tft_algos.manager"):
        assert rig.step()
        assert rig.step()
    assert rig.coordinator.requests[1].lineage == after_one_step({})[0]
    assert "the state_dict registered under 'other' raised ValueError('no')" in caplog.text


def test_a_state_that_is_half_written_is_not_compared(rigs: Any) -> None:
    rig = rigs(plan_of(), plan_of(), **LOCAL)
    assert rig.step()
    rig.manager.disallow_state_dict_read()
    with pytest.raises(UserStateError, match="call allow_state_dict_read first"):
        rig.manager.start_quorum()
    rig.manager.allow_state_dict_read()
    assert rig.step()


@pytest.mark.parametrize(
    "others", [("a" * 32,), ("",), RequestTimeoutError("rank 1 hangs")], ids=["all", "one", "late"]
)
def test_the_ranks_of_a_group_are_compared_whole(rigs: Any, others: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    rig = rigs(plan_of(), plan_of(), rank=0, world_size=2, **LOCAL)
    if isinstance(others, Exception):

        def late(name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
            raise others

        monkeypatch.setattr(rig.coordinator, "gather", late)
    else:
        rig.coordinator.other_ranks = others
    assert rig.step()
    assert rig.step()
    own = digest({"default": rig.weights.take()})
    before = after_one_step({})[0]
    if others == ("a" * 32,):
        assert rig.coordinator.gathered == [("check 1, attempt 2", own)]
        assert rig.coordinator.requests[1].lineage == checked_lineage(before, combine([own, "a" * 32]))
    else:
        assert rig.coordinator.requests[1].lineage == before


def test_a_rank_that_is_half_written_gives_the_others_nothing(rigs: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    rig = rigs(plan_of(), plan_of(), rank=0, world_size=2, **LOCAL)
    rig.coordinator.other_ranks = ("b" * 32,)
    assert rig.step()
    rig.manager.strategy.report_torn(RuntimeError("the optimizer raised"))
    taken = len(rig.weights.threads)
    assert rig.step()
    assert len(rig.weights.threads) == taken + 1  # what takes it may be a collective
    assert rig.coordinator.gathered == [("check 1, attempt 2", "")]


@pytest.mark.parametrize(
    "settings", [{"check_state_every": -1}, {"check_state_every": 1.5}, {"on_divergence": "go on"}]
)
def test_settings_that_can_t_work_are_refused(rigs: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        rigs(**settings)


# --- the ranks of a group --------------------------------------------------------------------------------------------


def test_ranks_exchange_through_their_store_and_leave_no_more_than_two_keys_each() -> None:
    store = HashStore()
    ranks = [GroupStore(store, "localhost:1", "run", "group") for _ in range(2)]
    patience = timedelta(seconds=10)
    for name in ("one", "two", "three"):
        store.set(f"run/gathered/{name}/1", f"b {name}")
        assert ranks[0].gather(name, f"a {name}", 0, 2, patience) == (f"a {name}", f"b {name}")
        assert ranks[1].gather(name, f"b {name}", 1, 2, patience) == (f"a {name}", f"b {name}")
    assert store.num_keys() == 4


def test_a_rank_that_gives_nothing_is_not_waited_for_for_ever() -> None:
    store = GroupStore(HashStore(), "localhost:1", "run", "group")
    with pytest.raises(
        RequestTimeoutError,
        match=r"rank 0 timed out after 0.001 s waiting in the store localhost:1 .* for 'check 4'; check",
    ):
        store.gather("check 4", "a", 0, 2, timedelta(milliseconds=1))
