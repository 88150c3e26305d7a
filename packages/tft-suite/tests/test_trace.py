"""`tft trace`: what the flight records of many ranks show, and what broken files do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from tft_suite.cli.main import exit_code_of
from tft_suite.trace import files
from tft_suite.trace.analysis import find_problems, group_traces
from tft_suite.trace.files import read_traces
from tft_suite.trace.model import Finding

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
    assert [each.kind for each in found] == ["deadlock", "waiting", "waiting"]
    assert found[0].sentence == (
        "2 processes wait for each other: rank 0 (replica_0:5361b27c/0) waits in allreduce (call 1) of quorum 7 for "
        "rank 1 (replica_1:5361b27c/0); rank 1 (replica_1:5361b27c/0) waits in broadcast (call 5) of quorum 8 for "
        "rank 0 (replica_0:5361b27c/0)"
    )
    assert found[0].seconds == 90.0


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
    assert (len(traces), len(broken)) == (1, 2)
    traces, broken = read_traces([tmp_path], all_bytes_max=size + 1)
    assert (len(traces), [each.reason for each in broken][1]) == (1, "not a regular file")
    monkeypatch.setattr(files, "FILE_BYTES_MAX", size - 1)
    traces, broken = read_traces([tmp_path])
    assert not traces
    assert f"{size} bytes, and at most {size - 1} are read" in broken[0].reason


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
