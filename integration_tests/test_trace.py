"""From real groups to `tft trace`: the records that Gloo groups write, and what the command says about them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tft_pg import ProcessGroup, ProcessGroupError, ProcessGroupGloo, dump_traces, flush_traces
from tft_pg.testing import Bench
from tft_suite.cli.main import exit_code_of

GUARD: Final = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def records_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_TRACE_DIR", str(tmp_path))
    monkeypatch.delenv("TFT_JOB_ID", raising=False)


def gloo_bench() -> Bench:
    return Bench(ProcessGroupGloo, timeout=GUARD)


def reduce(_: int, group: ProcessGroup) -> None:
    group.allreduce([torch.ones(4)]).wait()


def end(groups: list[ProcessGroup], works: list[dist.Work]) -> None:
    """Abort the first group, as its Manager does after a timeout, and end the others."""
    time.sleep(0.01)  # longer than the shortest wait that --late can ask for
    groups[0].abort()
    for work in works:
        with pytest.raises(ProcessGroupError):
            work.wait()
    for group in groups[1:]:
        group.shutdown()
    assert flush_traces()


def problems(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    code = exit_code_of(["trace", str(directory), "--json", *options])
    content = json.loads(capsys.readouterr().out)
    assert content["unusable_files"] == []
    assert code == int(bool(content["problems"]))
    return list(content["problems"])


def waits(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the problems without the stragglers, of groups that were aborted at once."""
    found = problems(directory, capsys, "--late", "0.001")
    return [each for each in found if each["kind"] != "straggler"]


def test_the_rank_that_all_others_wait_for_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gloo_bench() as bench:
        groups = bench.configured(3)
        bench.all(groups, reduce)
        end(groups, [groups[rank].allreduce([torch.ones(4)]) for rank in (0, 1)])
        (found,) = waits(tmp_path, capsys)
        assert (found["kind"], found["ranks"], found["call"], found["quorum"]) == ("waiting", [2], 2, 1)
        assert (
            "quorum 1: rank 0 (replica_0/0), rank 1 (replica_1/0) wait in all_reduce (call 2) for rank 2 (replica_2/0)"
        ) in found["sentence"]
        assert found["sentence"].endswith("the last call of rank 2 (replica_2/0) was all_reduce (call 1)")


def test_collectives_in_another_order_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gloo_bench() as bench:
        groups = bench.configured(2)
        bench.all(groups, reduce)
        end(groups, [groups[0].allreduce([torch.ones(4)]), groups[1].broadcast_one(torch.ones(4), 0)])
        (found,) = waits(tmp_path, capsys)
        assert (found["kind"], found["call"]) == ("mismatched_collective", 2)
        assert "all_reduce on rank 0 (replica_0/0); broadcast on rank 1 (replica_1/0)" in found["sentence"]


def test_ranks_that_wait_in_two_groups_for_each_other_are_a_deadlock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gloo_bench() as bench:
        first, second = bench.configured(2), bench.configured(2)
        works = [first[0].allreduce([torch.ones(4)]), second[1].allreduce([torch.ones(4)])]
        # Of two processes: a process has the same replica in both of its groups.
        end(first, works[:1])
        end(second[::-1], works[1:])
        found = waits(tmp_path, capsys)
        assert [each["kind"] for each in found] == ["deadlock"]
        assert (
            "rank 0 (replica_0/0) waits in all_reduce (call 1) of quorum 1 for rank 1 (replica_1/0)"
            in (found[0]["sentence"])
        )


def test_a_straggler_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gloo_bench() as bench:
        groups = bench.configured(2)
        for _ in range(2):
            work = groups[0].allreduce([torch.ones(4)])
            with pytest.raises(ProcessGroupError):
                work.wait(timedelta(milliseconds=300))  # the other rank is late by at least this
            groups[1].allreduce([torch.ones(4)]).wait()
            work.wait()  # it ends now, and is no running operation in the record
        dump_traces()
        (found,) = problems(tmp_path, capsys, "--late", "0.25")
        assert (found["kind"], found["ranks"]) == ("straggler", [1])
        assert found["seconds"] >= 0.29


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "barrier", "alltoall_base", "broadcast"])
def test_a_healthy_job_shows_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str], collective: str) -> None:
    with gloo_bench() as bench:
        groups = bench.configured(2)

        def act(rank: int, group: ProcessGroup) -> None:
            one, two = torch.ones(2), torch.ones(4)
            calls: dict[str, Callable[[], dist.Work]] = {
                "allgather": partial(group.allgather, [[torch.ones(2), torch.ones(2)]], [one]),
                "reduce_scatter": partial(group.reduce_scatter, [one], [[torch.ones(2), torch.ones(2)]]),
                "barrier": group.barrier,
                "alltoall_base": partial(
                    group.alltoall_base,
                    torch.ones(4 if rank == 0 else 2),
                    torch.ones(3),
                    [2, 2] if rank == 0 else [1, 1],
                    [2, 1],
                ),
                "broadcast": partial(group.broadcast_one, two, 0),
            }
            for _ in range(3):
                calls[collective]().wait()

        bench.all(groups, act)
        dump_traces()
        assert problems(tmp_path, capsys, "--late", "20") == []
        for group in groups:
            group.shutdown()
        assert flush_traces()
        assert problems(tmp_path, capsys, "--late", "20") == []
