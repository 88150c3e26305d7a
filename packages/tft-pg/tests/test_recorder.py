"""Flight records: what is written when, for whom, and what it may cost."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tft_pg import (
    ConfigError,
    ProcessGroup,
    ProcessGroupError,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    TraceWriteError,
    dump_traces,
    flush_traces,
)
from tft_pg.errors import Where
from tft_pg.recorder import group as recorder_group
from tft_pg.recorder import name_job
from tft_pg.recorder import writer as recorder_writer
from tft_pg.recorder.record import Snapshot, encode, file_stem
from tft_pg.recorder.writer import TraceWriter
from tft_pg.testing import Bench, FakeAccelerator

GUARD: Final = timedelta(seconds=20)
GUARD_S: Final = 20.0


@pytest.fixture(autouse=True)
def of_no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TFT_TRACE_DIR", "TFT_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(recorder_group, "_named_job", "")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(partial(ProcessGroupGloo, trace_dir=tmp_path), timeout=GUARD) as bench:
        yield bench
    assert flush_traces(GUARD_S)


def records(directory: Path) -> list[dict[str, Any]]:
    assert flush_traces(GUARD_S)
    return sorted(
        (json.loads(path.read_bytes()) for path in directory.iterdir()),
        key=lambda each: (each["rank"], len(each["calls"])),
    )


def failed(work: dist.Work) -> None:
    with pytest.raises(ProcessGroupError):
        work.wait()


def numbered(record: dict[str, Any]) -> list[tuple[int, str, bool]]:
    return [(call["number"], call["name"], call["ended"]) for call in record["calls"]]


def reduce(_: int, group: ProcessGroup) -> None:
    group.allreduce([torch.ones(2, 3)]).wait()


# --- what is written when --------------------------------------------------------------------------------------------


def test_an_abort_writes_what_each_rank_was_in(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_JOB_ID", "my job")
    groups = bench.configured(3)
    bench.all(groups, reduce)
    works = [groups[rank].broadcast_one(torch.ones(5, dtype=torch.float64), 2) for rank in (0, 1)]
    groups[0].abort()
    for work in works:
        failed(work)
    groups[1].abort()
    groups[2].abort()
    of_ranks = records(tmp_path)
    assert [each["rank"] for each in of_ranks] == [0, 1, 2]
    assert numbered(of_ranks[0]) == [(1, "all_reduce", True), (2, "broadcast", False)]
    assert numbered(of_ranks[2]) == [(1, "all_reduce", True)]
    first, last = of_ranks[0]["calls"]
    assert first["inputs"] == [["Float", [2, 3]]]
    assert last["inputs"] == [["Double", [5]]]
    assert first["started_ns"] <= last["started_ns"] <= of_ranks[0]["time_ns"]
    same = {(each["job"], each["quorum"], each["group"], each["world_size"], each["reason"]) for each in of_ranks}
    assert same == {("my job", 1, of_ranks[0]["group"], 3, "abort")}
    assert [each["replica"] for each in of_ranks] == ["replica_0", "replica_1", "replica_2"]
    names = sorted(path.name for path in tmp_path.iterdir())
    for rank, name in enumerate(names):
        assert name.startswith(f"my_job.replica_{rank}_0.rank{rank}.quorum1.{os.getpid()}-")


def test_a_group_that_ends_without_an_error_is_recorded_too(bench: Bench, tmp_path: Path) -> None:
    groups = bench.configured(2)
    bench.all(groups, reduce)
    bench.configure(groups)
    for group in groups:
        group.shutdown()
    assert [(each["rank"], each["reason"], len(each["calls"])) for each in records(tmp_path)] == [
        *((0, "end", calls) for calls in (0, 1)),
        *((1, "end", calls) for calls in (0, 1)),
    ]


def test_a_failure_is_recorded_by_the_next_configure(bench: Bench, tmp_path: Path) -> None:
    groups = bench.configured(2)
    work = groups[0].allreduce([torch.ones(1)])
    groups[1].shutdown()
    failed(work)
    bench.configure(groups[:1])
    record, of_the_other = records(tmp_path)
    assert (of_the_other["rank"], of_the_other["calls"]) == (1, [])
    assert (record["rank"], record["reason"], record["world_size"]) == (0, "failure", 2)
    assert "the connection to another rank ended" in record["error"]
    assert [call["name"] for call in record["calls"]] == ["all_reduce"]


def test_each_configuration_is_recorded_once(bench: Bench, tmp_path: Path) -> None:
    groups = bench.configured(1)
    groups[0].abort()
    groups[0].abort()
    groups[0].shutdown()
    assert len(records(tmp_path)) == 1


def test_a_record_holds_its_own_configuration_only(bench: Bench, tmp_path: Path) -> None:
    groups = bench.configured(2)
    bench.all(groups, reduce)
    bench.configure(groups)
    bench.all(groups, lambda _, group: group.barrier().wait())
    groups[1].abort()
    kinds = [[name for _, name, _ in numbered(each)] for each in records(tmp_path) if each["reason"] == "abort"]
    assert kinds == [["barrier"]]


def test_sends_leave_the_numbers_of_collectives_alike(bench: Bench, tmp_path: Path) -> None:
    groups = bench.configured(2)

    def talk(rank: int, group: ProcessGroup) -> None:
        (group.send([torch.ones(1)], 1, 0) if rank == 0 else group.recv([torch.ones(1)], 0, 0)).wait()

    bench.all(groups, reduce)
    bench.all(groups, talk)
    bench.all(groups, reduce)
    for group in groups:
        group.abort()
    left, right = records(tmp_path)
    assert numbered(left) == numbered(right) == [(1, "all_reduce", True), (2, "all_reduce", True)]


def test_the_variable_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_TRACE_DIR", str(tmp_path / "made" / "here"))
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        bench.configured(1)[0].abort()
        assert len(records(tmp_path / "made" / "here")) == 1


def test_the_named_job_stands_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_JOB_ID", "of the shell")
    name_job("of the Manager")
    with Bench(partial(ProcessGroupGloo, trace_dir=tmp_path), timeout=GUARD) as bench:
        bench.configured(1)[0].abort()
    assert [each["job"] for each in records(tmp_path)] == ["of the Manager"]


ENDS_AT_ONCE: Final = """
import sys, torch
from torch.distributed import TCPStore
from tft_pg import ProcessGroupGloo, format_store_addr
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = ProcessGroupGloo(trace_dir=sys.argv[1])
group.configure(format_store_addr("127.0.0.1", store.port, "once"), 0, 1, replica_id="a", quorum_id=3)
group.allreduce([torch.ones(1)]).wait()
group.abort()
"""


def test_a_process_that_ends_after_its_abort_leaves_the_record(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)], check=True, timeout=120)
    (record,) = records(tmp_path)
    assert (record["replica"], record["quorum"], numbered(record)) == ("a", 3, [(1, "all_reduce", True)])


# --- on request ------------------------------------------------------------------------------------------------------


def test_a_running_group_is_recorded_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of this process may still hold a group, which a request would record too.
    monkeypatch.setattr(recorder_group, "_recorders", weakref.WeakSet())
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        groups = bench.configured(2)
        bench.all(groups, reduce)
        work = groups[1].allreduce([torch.ones(1)])
        paths = dump_traces(tmp_path)
        groups[0].allreduce([torch.ones(1)]).wait()
        work.wait()
        assert sorted(tmp_path.iterdir()) == sorted(paths)
        left, right = records(tmp_path)
        assert numbered(left) == [(1, "all_reduce", True)]
        assert numbered(right) == [(1, "all_reduce", True), (2, "all_reduce", False)]
        assert left["reason"] == "request"
        with pytest.raises(ConfigError, match="pass one, or set TFT_TRACE_DIR"):
            dump_traces()
        groups[0].abort()  # without a directory an abort writes nothing
        groups[1].abort()
        assert dump_traces(tmp_path) == []
    assert len(records(tmp_path)) == 2


def test_groups_without_a_directory_are_left_out_of_a_request_without_one(tmp_path: Path) -> None:
    with Bench(lambda: ProcessGroupGloo(trace_dir=tmp_path)) as bench, Bench(ProcessGroupGloo) as other:
        (own,), (without,) = bench.configured(1), other.configured(1)
        own.allreduce([torch.ones(1)]).wait()
        without.allreduce([torch.ones(1)]).wait()
        assert len(dump_traces()) == 1


def test_a_directory_that_cant_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with Bench(partial(ProcessGroupGloo, trace_dir=file), timeout=GUARD) as bench:
        (group,) = bench.configured(1)
        with pytest.raises(TraceWriteError, match=r"can't be written \(rank 0 of 1.*check the directory"):
            dump_traces()
        with caplog.at_level(logging.WARNING, recorder_writer.__name__):
            group.abort()
            assert flush_traces(GUARD_S)
    assert "can't be written (rank 0 of 1, replica replica_0/0, quorum 1)" in caplog.text


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_directory_without_torchs_recorder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=f"{name} is 0, .* unset {name}"):
        ProcessGroupGloo(trace_dir=tmp_path)
    ProcessGroupGloo().shutdown()


def test_a_library_without_a_recorder_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if hasattr(torch._C._distributed_c10d, "_dump_nccl_trace_json"):
        pytest.skip("this torch has NCCL's flight recorder")
    make = partial(ProcessGroupNCCL, backend=FakeAccelerator(), trace_dir=tmp_path)
    with caplog.at_level(logging.WARNING, recorder_writer.__name__), Bench(make, timeout=GUARD) as bench:
        bench.configured(1)[0].abort()
        assert flush_traces(GUARD_S)
    assert "has no _dump_nccl_trace_json, so there is no flight record" in caplog.text
    assert list(tmp_path.iterdir()) == []


# --- what it may cost ------------------------------------------------------------------------------------------------


def test_an_abort_does_not_wait_for_the_record(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def slow(*args: Any) -> bytes:
        assert goes_on.wait(GUARD_S)
        return b"{}"

    monkeypatch.setattr(recorder_writer, "encode", slow)
    groups = bench.configured(2)
    work = groups[0].allreduce([torch.ones(1)])
    groups[0].abort()
    failed(work)
    bench.configure(groups)  # nor does the next configure
    bench.all(groups, reduce)
    assert list(tmp_path.iterdir()) == []
    goes_on.set()
    assert len(records_of(tmp_path)) == 2  # of the abort, and of the end that it was to the other rank


def records_of(directory: Path) -> list[Path]:
    assert flush_traces(GUARD_S)
    return list(directory.iterdir())


def test_a_shutdown_leaves_its_record_and_no_thread(bench: Bench, tmp_path: Path) -> None:
    (group,) = bench.configured(1)
    group.shutdown()
    assert len(list(tmp_path.iterdir())) == 1
    assert "tft-pg-trace" not in [thread.name for thread in threading.enumerate()]


def test_the_queue_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter()
    goes_on = threading.Event()

    def take() -> Snapshot:
        assert goes_on.wait(GUARD_S)
        return snapshot()

    with caplog.at_level(logging.WARNING, recorder_writer.__name__):
        for _ in range(20):
            writer.submit(tmp_path, Where(), take)
    goes_on.set()
    assert writer.flush(GUARD_S)
    assert len(list(tmp_path.iterdir())) in (8, 9)  # the thread may have taken one before
    assert "is left out, because 8 others still wait for the disk" in caplog.text


def test_a_process_keeps_its_newest_files_only(tmp_path: Path) -> None:
    writer = TraceWriter(files_max=2)
    paths = [writer.write(tmp_path, snapshot(quorum)) for quorum in range(5)]
    assert sorted(tmp_path.iterdir()) == sorted(paths[-2:])


def snapshot(quorum: int = 1, *, calls: int = 0, tensors: int = 1, replica: str = "a") -> Snapshot:
    entry = {
        "process_group": ["p", "d"],
        "is_p2p": False,
        "collective_seq_id": 0,
        "p2p_seq_id": 0,
        "profiling_name": "gloo:all_reduce",
        "input_dtypes": ["Float"] * tensors,
        "input_sizes": [[3]] * tensors,
        "output_dtypes": [],
        "output_sizes": [],
        "time_created_ns": 5,
        "retired": True,
        "state": "scheduled",
    }
    entries = [{**entry, "collective_seq_id": number} for number in range(calls)]
    return Snapshot(
        where=Where(0, 2, replica, quorum, 0),
        group="p",
        label=("p", "d"),
        backend="tft-gloo",
        job="default",
        host="node",
        pid=1,
        reason="abort",
        error="",
        unfinished=1,
        time_ns=9,
        ring=json.dumps({"entries": entries}).encode(),
    )


def test_a_record_is_bounded_and_keeps_the_newest_calls() -> None:
    whole = json.loads(encode(snapshot(calls=1000)))
    assert len(whole["calls"]) == 1000
    assert [call["ended"] for call in whole["calls"][-2:]] == [True, False]
    cut = encode(snapshot(calls=1000), bytes_max=20_000)
    assert len(cut) <= 20_000
    assert json.loads(cut)["calls"] == whole["calls"][-len(json.loads(cut)["calls"]) :] != []
    assert len(json.loads(encode(snapshot(calls=1, tensors=5000)))["calls"][0]["inputs"]) == 64


def test_names_of_files_are_plain() -> None:
    assert file_stem(snapshot(replica="../a b:c")) == "default.___a_b_c_0.rank0.quorum1"
    assert len(file_stem(snapshot(replica="x" * 500))) < 120
    assert file_stem(snapshot(replica="x" * 500)) != file_stem(snapshot(replica="x" * 501))


def test_a_forked_child_writes_its_own_records_only(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    content = b"{}"

    def slow(*args: Any) -> bytes:
        assert goes_on.wait(GUARD_S)
        return content

    monkeypatch.setattr(recorder_writer, "encode", slow)
    groups = bench.configured(2)
    groups[0].abort()  # its record is in the making, and the other group lives
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        written = len(dump_traces(tmp_path))
        idle = recorder_group._writer.flush(0)
        os.write(writes, f"{written} {idle}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reads, 100) == b"0 True"
    os.close(reads)
    os.close(writes)
    goes_on.set()
    assert len(records_of(tmp_path)) == 1


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not (dist.is_nccl_available() and torch.cuda.is_available()), reason="there is no CUDA device or no NCCL here"
)
def test_gpu_an_abort_of_nccl_is_recorded(tmp_path: Path) -> None:
    with Bench(partial(ProcessGroupNCCL, trace_dir=tmp_path), timeout=timedelta(seconds=60)) as bench:
        (group,) = bench.configured(1)
        group.allreduce([torch.ones(3, device="cuda")]).wait()
        torch.cuda.synchronize()
        group.abort()
        (record,) = records(tmp_path)
    assert (record["reason"], record["backend"], record["calls"][-1]["name"]) == ("abort", "tft-nccl", "all_reduce")
    assert record["calls"][-1]["inputs"] == [["Float", [3]]]
