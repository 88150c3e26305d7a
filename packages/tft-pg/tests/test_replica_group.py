"""init_group: what it refuses, which backend it takes, and that ranks meet only those of their own start.

The stores here are in memory, and the other ranks are played between two looks of the one that is tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from tft_pg import ConfigError, ConfigureError, init_group, replica_group

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Clock:
    """The time in which `between` happens at each look."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self._now_s = 0.0
        self._between = between

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
        self._between()


def agree(
    monkeypatch: pytest.MonkeyPatch, store: Any, rank: int, world_size: int, between: Callable[[], None] = lambda: None
) -> str:
    monkeypatch.setattr(replica_group, "time", Clock(between))
    return replica_group._agree(store, replica_group._Place(rank, world_size, "host:1"), SECOND * 10)


def test_without_a_launcher_this_process_is_the_group() -> None:
    group = init_group("cpu")
    assert group is dist.group.WORLD
    assert (group.rank(), group.size(), dist.get_backend()) == (0, 1, "gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match="already exists; call init_group once, instead of init_process_group"):
        init_group("cpu")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; set it to a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0; set it to the number of processes"),
        (
            {"WORLD_SIZE": "2"},
            "RANK is not set, but WORLD_SIZE is above 1; set RANK, or start",
        ),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2; ranks count from 0"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_ADDR is not set, .* with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
    ],
)
def test_a_wrong_environment_is_named_at_once(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        init_group("cpu")
    assert not dist.is_initialized()


def test_a_wrong_argument_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"no backend is known for .meta.; pass backend= and device='cpu'"):
        init_group("meta")
    with pytest.raises(ConfigError, match="above zero"):
        init_group("cpu", timeout=timedelta(0))
    with pytest.raises(ConfigError, match=r"pass timedelta\(seconds=\.\.\.\)"):
        init_group("cpu", join_timeout=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), (None, "cpu:gloo,cuda:nccl")]
)
def test_an_accelerator_has_a_backend_for_its_tensors_and_one_for_those_of_the_cpu(
    device: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    backends: list[str] = []

    def start(name: str, **more: Any) -> None:
        backends.append(name)
        original("gloo", **more)

    original = dist.init_process_group
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setenv("LOCAL_RANK", "3")
    init_group(device)
    assert (chosen, backends) == ([3], [backend])
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 4, but this machine has 4 .* devices"):
        replica_group._select_device(device, {"LOCAL_RANK": "4"})


def test_rank_0_meets_the_living_and_not_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    keys = PrefixStore("tft/init_group", store)
    keys.set("asked/1", "of one that died")  # before rank 0 of this start looks

    def rank_1() -> None:
        """The new process of rank 1 comes late, and reads only what answers its own word."""
        keys.set("asked/1", "mine")
        if keys.check(["answered/mine"]):
            start, world_size = keys.get("answered/mine").decode().split()
            assert world_size == "2"
            keys.set(f"{start}/1", "mine")

    first = agree(monkeypatch, store, 0, 2, rank_1)
    keys.set("asked/1", "of one that died again")
    keys.delete_key("answered/mine")  # else it confirms what its word was answered before
    second = agree(monkeypatch, store, 0, 2, rank_1)
    assert first != second
    assert all(prefix.startswith("tft/init_group/") for prefix in (first, second))


def test_rank_0_names_who_did_not_start_though_the_dead_left_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    keys = PrefixStore("tft/init_group", store)
    for rank in (1, 2):
        keys.set(f"asked/{rank}", f"of rank {rank}, which died")
    with pytest.raises(ConfigureError, match="rank 0 of 3 timed out waiting for ranks 1, 2 of its replica group") as e:
        agree(monkeypatch, store, 0, 3)
    assert e.value.missing_ranks == (1, 2)


def test_another_rank_takes_no_answer_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    keys = PrefixStore("tft/init_group", store)
    keys.set("answered/of one that died", "old 2")
    keys.set("old/0", "complete")
    with pytest.raises(ConfigureError, match="rank 1 of 2 timed out waiting for ranks 0 of its replica group"):
        agree(monkeypatch, store, 1, 2)

    def rank_0() -> None:
        word = keys.get("asked/1").decode()
        keys.set(f"answered/{word}", "new 2")
        if keys.check(["new/1"]):
            keys.set("new/0", "complete")

    assert agree(monkeypatch, store, 1, 2, rank_0) == "tft/init_group/new"


def test_a_rank_0_that_is_restarted_alone_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has an answer of the rank 0 that died, before rank 2 came."""
    store = HashStore()
    keys = PrefixStore("tft/init_group", store)
    lives = itertools.chain(["first", "first"], itertools.repeat("second"))

    def others() -> None:
        start, word = next(lives), keys.get("asked/1").decode()
        if start == "second" and keys.check(["second/1"]):
            assert keys.get("second/1").decode() == word
            keys.set("second/0", "complete")
        keys.set(f"answered/{word}", f"{start} 3")

    assert agree(monkeypatch, store, 1, 3, others) == "tft/init_group/second"
    assert keys.check(["first/1"]), "it had confirmed the first one"


def test_rank_0_meets_a_rank_that_is_restarted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 confirms, dies before rank 2 comes, and asks again under another word."""
    store = HashStore()
    keys = PrefixStore("tft/init_group", store)
    looks = itertools.count()
    met: list[str] = []

    def confirm(rank: int, word: str) -> None:
        keys.set(f"asked/{rank}", word)
        if keys.check([f"answered/{word}"]):
            start = keys.get(f"answered/{word}").decode().split()[0]
            keys.set(f"{start}/{rank}", word)
            met.append(word)

    def others() -> None:
        if next(looks) < 3:
            confirm(1, "of its first process")
        else:
            confirm(1, "of its second process")
            confirm(2, "of rank 2")

    agree(monkeypatch, store, 0, 3, others)
    assert {"of its first process", "of its second process", "of rank 2"} == set(met)


def test_a_rank_names_those_that_have_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    keys = PrefixStore("tft/init_group", store)

    def rank_0_and_2() -> None:
        keys.set(f"answered/{keys.get('asked/1').decode()}", "new 4")
        keys.set("new/2", "its word")

    with pytest.raises(ConfigureError, match="rank 1 of 4 timed out waiting for ranks 3 of its replica group") as e:
        agree(monkeypatch, store, 1, 4, rank_0_and_2)
    assert e.value.missing_ranks == (3,)


def test_ranks_that_were_told_different_sizes_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    keys = PrefixStore("tft/init_group", store)

    def rank_0() -> None:
        keys.set(f"answered/{keys.get('asked/1').decode()}", "new 3")

    with pytest.raises(ConfigError, match="WORLD_SIZE is 2 on rank 1 and 3 on rank 0"):
        agree(monkeypatch, store, 1, 2, rank_0)


def test_a_long_wait_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigureError):
        agree(monkeypatch, HashStore(), 0, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 waits for ranks [1] of its replica group to start"
    ]
