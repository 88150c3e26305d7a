"""torchft's process groups: names of arguments, both forms of rendezvous, hooks, and what may follow a shutdown."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as options
from torch.distributed import HashStore, ReduceOp, Store  # type: ignore[attr-defined]

import tft_pg
import torchft.process_group
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBaby,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
    ReconfigureOptions,
    trigger_nccl_fr_trace_through_pipe,
)


def test_collectives_take_torchfts_names() -> None:
    group, one = ProcessGroupDummy(0, 1), torch.ones(2)
    out = torch.zeros(2)
    group.allgather(output_tensors=[[out]], input_tensor=[one], opts=options.AllgatherOptions())
    assert torch.equal(out, one)
    out.zero_()
    group.allgather_into_tensor_coalesced(output_tensors=[out], input_tensors=[one], opts=options.AllgatherOptions())
    assert torch.equal(out, one)
    out.zero_()
    group.alltoall_base(
        output_buffer=out,
        input_buffer=one,
        output_split_sizes=[],
        input_split_sizes=[],
        opts=options.AllToAllOptions(),
    )
    assert torch.equal(out, one)
    out.zero_()
    group.reduce_scatter(output_tensors=[out], input_tensors=[[one]], opts=options.ReduceScatterOptions())
    assert torch.equal(out, one)
    out.zero_()
    group.reduce_scatter_tensor_coalesced(
        output_tensors=[out], input_tensors=[one], opts=options.ReduceScatterOptions()
    )
    assert torch.equal(out, one)
    group.allreduce(tensors=[out], opts=ReduceOp.SUM).wait()
    group.allreduce_coalesced(tensors=[out], opts=options.AllreduceCoalescedOptions())
    group.broadcast(tensor_list=[out], opts=options.BroadcastOptions())
    group.broadcast_one(out, root=0)
    group.send(tensors=[out], dst_rank=0, tag=0)
    group.recv(tensors=[out], src_rank=0, tag=0)
    group.barrier(opts=None)
    group.barrier(opts=options.BarrierOptions())
    group.allreduce([out], options.AllreduceOptions()).get_future().wait()
    assert (group.wait_count, group.get_future_count) == (1, 1)


def test_a_dummy_is_rank_0_of_1_and_counts() -> None:
    with pytest.raises(AssertionError, match="rank 0 of 1"):
        ProcessGroupDummy(1, 2)
    group = ProcessGroupDummy(0, 1)
    group.configure("host:1/p", "replica_0", 0, 1)
    group.shutdown()
    group.configure("host:1/p", "replica_0", 0, 1)
    assert (group.configure_count, group.reconfigure_count) == (2, 2)
    assert group.getBackendName() == "torchft-dummy"


def test_the_base_has_no_collectives_and_no_rendezvous() -> None:
    group = ProcessGroup()
    for call in (
        lambda: group.allreduce([torch.ones(1)], ReduceOp.SUM),
        lambda: group.configure("host:1/p", "replica_0", 0, 1),
        lambda: group.size(),
        lambda: group.getBackendName(),
        lambda: group.set_timeout(timedelta(seconds=1)),
    ):
        with pytest.raises(NotImplementedError, match="not implemented"):
            call()
    assert group.errored() is None
    assert repr(group) == "ProcessGroup()"
    with pytest.raises(ValueError, match="registered"):
        _ = group.group_name
    group.abort()
    group.shutdown()


class Written02(ProcessGroup):
    """A group as a user of torchft 0.2 writes it: `configure` by position, in torchft's order."""

    def __init__(self) -> None:
        super().__init__()
        self.configured: list[tuple[Any, ...]] = []

    def configure(  # type: ignore[override]
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.configured.append((store_addr, replica_id, rank, world_size, quorum_id))


def test_a_group_of_a_user_is_configured_in_torchfts_order() -> None:
    group = Written02()
    ProcessGroupWrapper(pg=group).configure("host:1/p", "replica_0", 1, 2, 7)
    ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper(pg=group)).configure("host:1/q", "replica_0", 0, 1, 8)
    assert group.configured == [("host:1/p", "replica_0", 1, 2, 7), ("host:1/q", "replica_0", 0, 1, 8)]


def test_a_group_for_handles_alone_gets_a_rendezvous_by_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Written03(ProcessGroup):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[ReconfigureOptions] = []

        def get_reconfigure_handle(self) -> str:
            return "handle"

        def reconfigure(self, opts: ReconfigureOptions) -> dist.Work:
            self.seen.append(opts)
            return tft_pg.DummyWork([])

    monkeypatch.setattr(torchft.process_group, "create_store_client", lambda address, timeout: HashStore())
    group = Written03()
    group.configure("host:1/p", "replica_0", 0, 1)
    torchft.process_group.reconfigure_with_store(group, "host:1/q", 0, 1)
    assert [list(opts.handles) for opts in group.seen] == [["handle"]] * 2


def test_a_subclass_makes_its_own_group_and_has_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tft_pg.ProcessGroupDummy] = []
    seen: list[object] = []

    class Mine(ProcessGroupWrapper):
        def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
            made.append(tft_pg.ProcessGroupDummy(rank, world_size))
            return made[-1]

        def _opts_hook(self, opts: Any) -> Any:
            seen.append(opts)
            return opts

        def _wrap_work(self, work: dist.Work, opts: object) -> dist.Work:
            seen.append(work)
            return work

        def getBackendName(self) -> str:
            return "mine"

    monkeypatch.setattr(torchft.process_group, "create_store_client", lambda address, timeout: HashStore())
    group = Mine()
    with pytest.raises(AssertionError, match="process group not initialized"):
        group.size()
    assert group.errored() is None
    group.configure("host:1/p", "replica_0", 0, 1)
    given = options.AllreduceOptions()
    group.allreduce([torch.ones(1)], opts=given).wait()
    assert seen[0] is given
    assert len(seen) == 2
    group.abort()
    assert "aborted" in str(group.errored())
    group.configure("host:1/q", "replica_0", 0, 1)
    assert group.errored() is None
    assert len(made) == 2
    group.abort(errored=False)
    assert group.errored() is None
    with pytest.raises(AssertionError, match="process group not initialized"):
        group.allreduce([torch.ones(1)], given)


def test_an_abort_is_recorded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_ID", "job_7")
    group = ProcessGroupWrapper(pg=tft_pg.ProcessGroupDummy())
    group.configure("host:1/p", "replica_0", 0, 1, quorum_id=5)
    with caplog.at_level(logging.INFO, logger="torchft_errors"):
        group.abort()
    facts = vars(caplog.records[-1])
    assert (facts["job_id"], facts["replica_id"], facts["rank"], facts["quorum_id"]) == ("job_7", "replica_0", 0, 5)
    assert facts["error"] == "process_group_abort"
    assert "aborted" in str(group.errored())
    assert isinstance(group.errored(), tft_pg.AbortedError)


def test_groups_have_torchfts_backend_names_before_they_are_configured() -> None:
    assert ProcessGroupGloo().getBackendName() == "torchft-gloo"
    assert ProcessGroupNCCL().getBackendName() == "torchft-nccl"
    assert ProcessGroupBabyGloo(1.0).getBackendName() == "torchft-baby-gloo"
    assert ProcessGroupGloo().supports_reconfigure
    assert repr(ProcessGroupGloo()) == "ProcessGroupGloo(pg=None)"


def test_a_baby_names_its_library() -> None:
    with pytest.raises(NotImplementedError):
        ProcessGroupBaby().configure("host:1/p", "replica_0", 0, 1)
    assert ProcessGroupBabyGloo(timedelta(seconds=3)).num_active_work() == 0
    group = ProcessGroupBabyGloo()
    group.shutdown()
    with pytest.raises(OSError, match="handle is closed"):
        group.size()


def test_a_fake_fails_the_next_allreduce_and_a_swallowing_wrapper_hides_it() -> None:
    fake = FakeProcessGroupWrapper(ProcessGroupDummy(0, 1))
    group = ErrorSwallowingProcessGroupWrapper(fake)
    group.configure("host:1/p", "replica_0", 0, 1)
    assert group.parent is fake
    fake.report_future_error(RuntimeError("injected"))
    work = group.allreduce([torch.ones(1)], ReduceOp.SUM)
    work.get_future().wait()
    assert "injected" in str(group.error())
    group.configure("host:1/q", "replica_0", 0, 1)
    assert group.error() is None
    group.report_error(RuntimeError("mine"))
    assert str(group.error()) == "mine"
    # A word of a Manager is never a dummy, because the words tell the other ranks of errors.
    assert group.exchange_word([5], round_number=1, timeout=timedelta(seconds=5)).wait() == (5,)
    group.abort()
    with pytest.raises(tft_pg.AbortedError):
        group.exchange_word([5], round_number=2, timeout=timedelta(seconds=5)).wait()


def test_a_reconfigure_needs_ordered_handles() -> None:
    group, other = ProcessGroupDummy(0, 1), ProcessGroupDummy(0, 1)
    own = group.get_reconfigure_handle()
    group.reconfigure(ReconfigureOptions(uuid=1, handles=[own]))
    assert group.reconfigure_count == 1
    with pytest.raises(ValueError, match="list"):
        group.reconfigure(ReconfigureOptions(uuid=1, handles={own}))
    with pytest.raises(ValueError, match="not among"):
        group.reconfigure(ReconfigureOptions(uuid=1, handles=[other.get_reconfigure_handle()]))
    for each in (group, other):
        each.shutdown()


def test_a_dump_is_asked_for_through_the_pipe_of_the_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", raising=False)
    assert not trigger_nccl_fr_trace_through_pipe(0)
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(tmp_path / "rank_"))
    monkeypatch.setattr("torchft.process_group._DUMP_S", 0)
    assert not trigger_nccl_fr_trace_through_pipe(3), "there is no such pipe"
    os.mkfifo(tmp_path / "rank_3.pipe")
    assert not trigger_nccl_fr_trace_through_pipe(3), "nobody reads it"
    reader = os.open(tmp_path / "rank_3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert trigger_nccl_fr_trace_through_pipe(3)
    assert os.read(reader, 10) == b"1\n"
    os.close(reader)
