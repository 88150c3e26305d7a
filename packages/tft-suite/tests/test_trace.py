"""`tft trace`: what the flight records of many ranks show, and what broken files do."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import ItemsView, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tft_suite.cli.main import exit_code_of
from tft_suite.trace import files
from tft_suite.trace.analysis import find_problems, group_traces
from tft_suite.trace.files import read_traces
from tft_suite.trace.model import Call, Finding, Process, RankTrace
from tft_suite.trace.report import as_json

START_NS: Final = 1_700_000_000_000_000_000
UUID: Final = "5361b27c-0000-4000-8000-000000000000"


def call(number: int, name: str = "allreduce", *, at: float = 0.0, ended: bool = True, **others: Any) -> dict[str, Any]:
    tensor = [["Float", [4, 2]]]
    return {
        "number": number,
        "name": name,
        "p2p": False,
        "inputs": tensor,
        "outputs": tensor,
        "started_ns": START_NS + int(at * 1e9),
        "ended": ended,
        **others,
    }


def write(
    folder: Path, rank: int, calls: list[dict[str, Any]], *, world_size: int = 2, at: float = 100.0, **others: Any
) -> Path:
    content = {
        "format": "tft-trace",
        "version": 1,
        "job": "default",
        "replica": f"replica_{rank}:{UUID}",
        "group_rank": 0,
        "rank": rank,
        "world_size": world_size,
        "quorum": 7,
        "group": "tft/7",
        "host": f"node-{rank}",
        "pid": 100 + rank,
        "reason": "abort",
        "time_ns": START_NS + int(at * 1e9),
        "calls": calls,
        **others,
    }
    path = folder / f"{len(list(folder.iterdir()))}{files.SUFFIX}"
    path.write_text(json.dumps(content))
    return path


def problems(folder: Path, late_s: float = 1.0) -> list[Finding]:
    traces, broken = read_traces([folder])
    assert not broken
    return find_problems(group_traces(traces), late_s=late_s)


def test_equal_records_show_no_problem(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [call(1), call(2, "broadcast", at=1.0)])
    assert problems(tmp_path) == []


def test_ranks_wait_for_the_rank_that_has_not_entered(tmp_path: Path) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, [call(1), call(2, at=40.0, ended=False)], world_size=3)
    write(tmp_path, 1, [call(1, "broadcast")], world_size=3)
    for path in tmp_path.iterdir():  # the first call is the same on all
        path.write_text(path.read_text().replace('"broadcast"', '"allreduce"'))
    (found,) = problems(tmp_path)
    assert (found.kind, found.ranks, found.call, found.seconds) == ("waiting", (1,), 2, 60.0)
    assert found.sentence == (
        "quorum 7: rank 0 (replica_0:5361b27c/0), rank 2 (replica_2:5361b27c/0) wait in allreduce (call 2) for rank 1 "
        "(replica_1:5361b27c/0), for 60.0 s at the record; the last call of rank 1 (replica_1:5361b27c/0) was "
        "allreduce (call 1)"
    )


def test_an_operation_that_the_abort_ended_was_waited_in(tmp_path: Path) -> None:
    write(tmp_path, 0, [call(1), call(2, at=40.0, ended=True)])
    write(tmp_path, 1, [call(1)])
    assert [each.kind for each in problems(tmp_path)] == ["waiting"]


def test_a_record_from_before_the_call_blames_nobody(tmp_path: Path) -> None:
    write(tmp_path, 0, [call(1), call(2, at=40.0, ended=False)], at=90.0)
    write(tmp_path, 1, [call(1)], at=30.0)
    assert problems(tmp_path) == []


def test_a_short_wait_in_a_running_job_is_no_problem(tmp_path: Path) -> None:
    write(tmp_path, 0, [call(1), call(2, at=99.9, ended=False)], reason="request")
    write(tmp_path, 1, [call(1)], reason="request")
    assert problems(tmp_path) == []
    assert [each.kind for each in problems(tmp_path, late_s=0.05)] == ["waiting"]


def test_the_record_of_the_first_abort_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, [call(1), call(2, ended=False)], at=50.0)
    write(tmp_path, 0, [call(1), call(2)], at=60.0)
    write(tmp_path, 0, [], at=10.0, reason="request")
    write(tmp_path, 1, [call(1)], at=60.0)
    (found,) = problems(tmp_path)
    assert (found.kind, found.seconds) == ("waiting", 50.0)


def test_processes_that_wait_for_each_other_in_two_groups_are_a_deadlock(tmp_path: Path) -> None:
    write(tmp_path, 0, [call(1, at=10.0, ended=False)])
    write(tmp_path, 1, [])
    write(tmp_path, 0, [], group="other", quorum=8)
    write(tmp_path, 1, [call(5, "broadcast", at=20.0, ended=False)], group="other", quorum=8)
    found = problems(tmp_path)
    assert [each.kind for each in found] == ["deadlock"]
    assert found[0].sentence == (
        "processes wait for each other, for 90.0 s at the record: rank 0 (replica_0:5361b27c/0) waits in allreduce "
        "(call 1) of quorum 7 for rank 1 (replica_1:5361b27c/0); rank 1 (replica_1:5361b27c/0) waits in broadcast "
        "(call 5) of quorum 8 for rank 0 (replica_0:5361b27c/0)"
    )
    assert (found[0].ranks, found[0].num_ranks, found[0].seconds) == ((0, 1), 2, 90.0)


def test_who_waits_for_a_deadlock_waits(tmp_path: Path) -> None:
    for rank, group in ((0, "a"), (1, "b"), (2, "c")):
        write(tmp_path, rank, [call(1, at=10.0, ended=False)], group=group, quorum=None, world_size=3)
    for rank, group in ((1, "a"), (0, "b"), (0, "c")):
        write(tmp_path, rank, [], group=group, quorum=None, world_size=3)
    found = [each for each in problems(tmp_path) if each.kind != "missing_file"]
    assert [(each.kind, each.group) for each in found] == [("deadlock", "a"), ("waiting", "c")]


def test_the_first_call_that_differs_is_the_cause(tmp_path: Path) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, [call(1), call(2), call(3, "barrier", ended=False)], world_size=3)
    write(tmp_path, 1, [call(1), call(2, "broadcast"), call(3, ended=False)], world_size=3)
    (found,) = problems(tmp_path)
    assert (found.kind, found.ranks, found.call) == ("mismatched_collective", (1,), 2)
    assert "allreduce on rank 0 (replica_0:5361b27c/0), rank 2 (replica_2:5361b27c/0); broadcast on" in found.sentence


@pytest.mark.parametrize("tensor", [["Double", [4, 2]], ["Float", [4, 3]]])
def test_other_tensors_are_named(tmp_path: Path, tensor: list[Any]) -> None:
    write(tmp_path, 0, [call(1)])
    write(tmp_path, 1, [call(1, inputs=[tensor], ended=False)])
    (found,) = problems(tmp_path)
    assert (found.kind, found.call) == ("mismatched_tensors", 1)
    assert f"Float[4, 2] on rank 0 (replica_0:5361b27c/0); {tensor[0]}[4, {tensor[1][1]}] on rank 1" in found.sentence


def test_another_shape_of_the_same_size_and_uneven_splits_are_no_mismatch(tmp_path: Path) -> None:
    write(tmp_path, 0, [call(1), call(2, "all_to_all", inputs=[["Float", [3]]])])
    write(tmp_path, 1, [call(1, inputs=[["Float", [8]]]), call(2, "all_to_all", inputs=[["Float", [5]]])])
    assert problems(tmp_path) == []


def test_a_straggler_is_named_with_its_delay(tmp_path: Path) -> None:
    for rank in range(3):
        calls = [call(number, at=number + (2.5 if rank == 1 and number % 2 else 0.0)) for number in range(4)]
        write(tmp_path, rank, calls, world_size=3)
    (found,) = problems(tmp_path)
    assert (found.kind, found.ranks, found.seconds) == ("straggler", (1,), 2.5)
    assert "entered 2 of 4 calls last, 2.5 s after the others on average and 2.5 s at most" in found.sentence
    assert "by the clocks of 3 hosts" in found.sentence


def test_a_transfer_that_does_not_end_is_stuck(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [call(1, at=10.0, ended=False)])
    (found,) = problems(tmp_path)
    assert (found.kind, found.ranks, found.seconds) == ("stuck", (0, 1), 90.0)


def test_a_rank_without_a_record_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, [call(1, at=10.0, ended=False)])
    found = problems(tmp_path)
    assert [(each.kind, each.ranks) for each in found] == [("stuck", (0,)), ("missing_file", (1,))]
    assert "a rank without a record may not have entered it" in found[0].sentence


# --- many ranks ------------------------------------------------------------------------------------------------------


def record(rank: int, calls: list[Call], *, world_size: int, job: str = "default") -> RankTrace:
    process = Process(job, f"replica_{rank}", 0, "node", rank)
    return RankTrace("path", process, rank, world_size, 7, "tft/7", "abort", START_NS + 10**11, tuple(calls))


def made(number: int, name: str = "allreduce", *, ended: bool = True) -> Call:
    return Call(number, name, False, (), (), START_NS, ended)


def test_a_large_world_without_records_is_counted_and_not_listed() -> None:
    groups = group_traces([record(3, [], world_size=1 << 16)])
    (found,) = find_problems(groups, late_s=1.0)
    assert (found.kind, found.num_ranks) == ("missing_file", (1 << 16) - 1)
    assert found.ranks == (0, 1, 2, *range(4, 17))
    assert "no record of rank 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, ... of 65536" in found.sentence
    assert len(as_json(groups, [found], [])) < 2000


class CountedRanks(dict[int, RankTrace]):
    """Records by rank that count how often somebody goes over all of them."""

    num_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return super().__iter__()

    def items(self) -> ItemsView[int, RankTrace]:
        self.num_passes += 1
        return super().items()


def test_ranks_with_call_numbers_of_their_own_cost_no_more_than_their_calls() -> None:
    ranks, num_calls = range(40), 25
    traces = [
        record(rank, [made(rank * 1000 + each, ended=False) for each in range(num_calls)], world_size=len(ranks))
        for rank in ranks
    ]
    (group,) = group_traces(traces)
    counted = CountedRanks(group.traces)
    assert find_problems([dataclasses.replace(group, traces=counted)], late_s=200.0) == []
    assert counted.num_passes < 10
    (found,) = find_problems([group], late_s=100.0)
    assert (found.kind, found.ranks, found.call) == ("waiting", (0,), 1000)


def test_a_sentence_names_the_first_of_many() -> None:
    num_ranks = 12
    traces = [record(rank, [made(1, f"name_{rank}")], world_size=num_ranks) for rank in range(num_ranks)]
    (found,) = find_problems(group_traces(traces), late_s=1.0)
    assert found.sentence.count(" on rank ") == 8
    assert ", and 4 more. All ranks" in found.sentence
    traces = [record(0, [made(1, ended=False)], world_size=num_ranks + 20)]
    traces += [record(rank, [], world_size=num_ranks + 20) for rank in range(1, num_ranks + 20)]
    (found,) = find_problems(group_traces(traces), late_s=1.0)
    assert found.sentence.count("has entered no call") == 8
    assert (found.ranks, found.num_ranks) == (tuple(range(1, 17)), num_ranks + 19)


# --- files that can't be used ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "no valid JSON"),
        (b'{"format": "tft-tr', "no valid JSON"),
        (b"\x80\x04\x95", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"pid": ' + b"9" * 5000 + b"}", "no valid JSON"),
        (b"[]", "not a flight record"),
        (b'{"format": "other"}', "not a flight record"),
        (b'{"format": "tft-trace", "version": 2}', "version 2, and this tft reads version 1"),
        (b'{"format": "tft-trace", "version": 1}', "world_size is not a number"),
    ],
)
def test_a_broken_file_is_named_and_the_others_are_read(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / f"broken{files.SUFFIX}").write_bytes(text)
    write(tmp_path, 0, [])
    traces, (broken,) = read_traces([tmp_path])
    assert [trace.rank for trace in traces] == [0]
    assert reason in broken.reason
    assert broken.path.endswith(f"broken{files.SUFFIX}")


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2},
        {"rank": True},
        {"rank": "0"},
        {"world_size": 1 << 40},
        {"job": "a\x1b[31m"},
        {"replica": "x" * 600},
        {"time_ns": -1},
        {"time_ns": 1e300},
        {"quorum": "7"},
        {"calls": {}},
        {"calls": [1]},
        {"calls": [call(1, ended=1)]},
        {"calls": [call(1, inputs=[["Float", [-1]]])]},
        {"calls": [call(1, inputs=[["Float"]])]},
        {"calls": [call(1, inputs=[["Float", []]] * 300)]},
    ],
)
def test_a_wrong_field_makes_a_file_unusable(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, 0, **{"calls": [], **change}) if "rank" not in change else write_raw(tmp_path, change)
    traces, broken = read_traces([tmp_path])
    assert not traces
    assert len(broken) == 1


def write_raw(folder: Path, change: dict[str, Any]) -> None:
    path = write(folder, 0, [])
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_the_number_and_the_size_of_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = write(tmp_path, 0, []).stat().st_size
    write(tmp_path, 1, [])
    os.mkfifo(tmp_path / f"pipe{files.SUFFIX}")
    traces, broken = read_traces([tmp_path], files_max=1)
    assert (len(traces), len(broken)) == (1, 1)
    assert broken[0].path == str(tmp_path)
    assert broken[0].reason.startswith("2 files not read, because there are more than 1 files")
    traces, broken = read_traces([tmp_path], all_bytes_max=size + 1)
    assert (len(traces), [each.reason for each in broken][1]) == (1, "not a regular file")
    monkeypatch.setattr(files, "FILE_BYTES_MAX", size - 1)
    traces, broken = read_traces([tmp_path])
    assert not traces
    assert f"{size} bytes, and at most {size - 1} are read" in broken[0].reason


def test_a_directory_twice_and_a_link_are_read_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    path = write(first, 0, [])
    (first / f"broken{files.SUFFIX}").write_bytes(b"{")
    (first / f"link{files.SUFFIX}").symlink_to(path)
    (second / f"other{files.SUFFIX}").symlink_to(path)
    traces, broken = read_traces([first, second, first / ".." / "first", first])
    assert (len(traces), len(broken)) == (1, 1)


def test_what_is_no_file_is_not_opened_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"directory{files.SUFFIX}").mkdir()
    os.mkfifo(tmp_path / f"fifo{files.SUFFIX}")
    (tmp_path / f"device{files.SUFFIX}").symlink_to("/dev/zero")
    (tmp_path / f"loop{files.SUFFIX}").symlink_to(tmp_path / f"loop{files.SUFFIX}")
    (tmp_path / f"nowhere{files.SUFFIX}").symlink_to(tmp_path / "nothing")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / f"s{files.SUFFIX}"))
        opened: list[str] = []
        plain_open = os.open
        monkeypatch.setattr(os, "open", lambda path, flags: opened.append(path) or plain_open(path, flags))
        traces, broken = read_traces([tmp_path])
    assert (traces, opened) == ([], [])
    reasons = {Path(each.path).name.removesuffix(files.SUFFIX): each.reason for each in broken}
    assert reasons == {
        "device": "not a regular file",
        "directory": "not a regular file",
        "fifo": "not a regular file",
        "loop": "can't be read (Too many levels of symbolic links)",
        "nowhere": "can't be read (No such file or directory)",
        "s": "not a regular file",
    }


def test_a_file_that_becomes_a_directory_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 0, [])
    state = path.stat()
    path.unlink()
    path.mkdir()
    monkeypatch.setattr(os, "stat", lambda path: state)
    before = os.listdir("/proc/self/fd")
    _, (broken,) = read_traces([tmp_path])
    assert broken.reason == "not a regular file"
    assert os.listdir("/proc/self/fd") == before


def test_values_are_counted_before_they_take_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("the text was parsed"))
    for number, text in enumerate((b"1," * 1_300_001, b"[" * 1_300_001, b"{" * 101_001)):
        (tmp_path / f"{number}{files.SUFFIX}").write_bytes(text)
    traces, broken = read_traces([tmp_path])
    assert (traces, len(broken)) == ([], 3)
    assert {each.reason for each in broken} == {"not read, because it has more than 1300000 values or 100000 calls"}


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (files.Kept(calls_max=3), "its 2 calls and the 2 of the files before it are more than 3"),
        (files.Kept(sizes_max=8), "more than 8 different tensors and sizes"),
    ],
)
def test_what_all_files_keep_is_bounded(tmp_path: Path, kept: files.Kept, reason: str) -> None:
    tensor = ["Float", [4, 2]]
    write(tmp_path, 0, [call(1), call(2)])
    write(tmp_path, 1, [call(1), call(2, inputs=[tensor, tensor])])
    write(tmp_path, 2, [call(1)], world_size=3)
    traces, (broken,) = read_traces([tmp_path], kept=kept)
    assert [trace.rank for trace in traces] == [0, 2]
    assert reason in broken.reason
    assert traces[0].calls[0].inputs is traces[1].calls[0].outputs


def test_the_names_of_all_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ALL_NAMES_MAX", 2)
    write(tmp_path, 0, [call(1)])
    write(tmp_path, 1, [call(1, "broadcast")])
    traces, (broken,) = read_traces([tmp_path])
    assert [trace.rank for trace in traces] == [0]
    assert "more than 2 different names of collectives and dtypes" in broken.reason


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_sentences_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [call(1), call(2, at=40.0, ended=False)])
    write(tmp_path, 1, [call(1)])
    (tmp_path / f"broken{files.SUFFIX}").write_bytes(b"{")
    assert exit_code_of(["trace", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "job default, quorum 7: records of 2 of 2 ranks, 3 calls (abort)" in text
    assert "problems: 1\n  1. waiting: quorum 7: rank 0 (replica_0:5361b27c/0) waits in allreduce (call 2)" in text
    assert "unusable files: 1" in text
    assert exit_code_of(["trace", str(tmp_path), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in content["problems"]] == ["waiting"]
    assert [each["rank"] for each in content["groups"][0]["ranks"]] == [0, 1]
    assert len(content["unusable_files"]) == 1


def test_the_command_shows_the_first_of_many_unusable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(25):
        (tmp_path / f"{number}{files.SUFFIX}").write_bytes(b"{")
    assert exit_code_of(["trace", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text.count("no valid JSON") == 20
    assert "unusable files: 25" in text
    assert "and 5 more, which --json shows" in text


def test_the_command_is_quiet_without_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [], world_size=1)
    assert exit_code_of(["trace", str(tmp_path)]) == 0
    assert "problems: none" in capsys.readouterr().out


def test_a_wrong_call_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["trace", str(tmp_path)]) == 2
    assert "there is no flight record (*.trace.json) in" in capsys.readouterr().err
    assert exit_code_of(["trace", str(tmp_path / "none")]) == 2
    assert "can't be read (No such file or directory)" in capsys.readouterr().err
    assert exit_code_of(["trace", str(tmp_path), "--late", "0"]) == 2
    assert "--late is 0.0" in capsys.readouterr().err
