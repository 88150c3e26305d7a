"""The parts of a launcher: exit codes, variables of a rank, the guard, the settings, the view, the TorchX component."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tft_coord.errors import ConfigError as CoordinationConfigError
from tft_coord.errors import JobOverError, UnreachableError
from tft_suite.cli.main import exit_code_of
from tft_suite.errors import ConfigError, MissingExtraError
from tft_suite.integrations import torchx
from tft_suite.launch import guard
from tft_suite.launch.core import Group, GroupState
from tft_suite.launch.jobs import Replica, living
from tft_suite.launch.processes import clean, make_logs, rank_command, rank_environment, tail
from tft_suite.launch.rank import code_of_error, code_of_exit
from tft_suite.launch.settings import LaunchSettings
from tft_suite.launch.view import View, table


def exit_after(error: Exception, code: object) -> SystemExit:
    """Return the SystemExit of a script that handles an error by ending with a code."""
    try:
        try:
            raise error
        except Exception:
            sys.exit(code)  # type: ignore[arg-type]
    except SystemExit as ended:
        return ended


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CoordinationConfigError("no"), 3),
        (SyntaxError("no"), 3),
        (UnreachableError("no"), 1),
        (ValueError("no"), 1),
        (ConfigError("the command's own"), 1),
    ],
)
def test_our_errors_that_a_restart_can_not_mend_end_with_3(error: Exception, code: int) -> None:
    assert code_of_error(error) == code


def test_a_job_that_is_over_is_done_for_a_restarted_rank_and_an_error_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = JobOverError("the job ended", code="job_over")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert code_of_error(error) == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert code_of_error(error) == 0


@pytest.mark.parametrize(
    ("error", "given", "code"),
    [
        (CoordinationConfigError("no"), 2, 3),
        (CoordinationConfigError("no"), 0, 0),
        (UnreachableError("no"), 2, 2),
        (ValueError("no"), 3, 3),
        (ValueError("no"), "a text", 1),
        (ValueError("no"), None, 0),
    ],
)
def test_a_script_that_handles_an_error_by_an_exit_code(error: Exception, given: object, code: int) -> None:
    assert code_of_exit(exit_after(error, given)) == code


def test_the_variables_of_a_rank_are_torchrun_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = LaunchSettings(command=("python", "train.py"), replicas=2, nproc=2, first=4, total=8)
    found = rank_environment(
        settings, replica=5, rank=1, attempt=3, lighthouse="http://head:29510", port=4711, run="run"
    )
    assert found == {
        "TFT_LIGHTHOUSE": "http://head:29510",
        "REPLICA_GROUP_ID": "5",
        "NUM_REPLICA_GROUPS": "8",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "run-5",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "4711",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 4)),
    }
    alone = rank_environment(settings, replica=5, rank=0, attempt=1, lighthouse="x", port=None, run="run")
    assert "MASTER_ADDR" not in alone


def test_the_command_of_a_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    wrapper = [sys.executable, "-m", "tft_suite.launch.rank"]
    assert rank_command(LaunchSettings(command=(str(script), "--lr", "3"))) == [*wrapper, str(script), "--lr", "3"]
    assert rank_command(LaunchSettings(command=("json.tool",), is_module=True)) == [*wrapper, "-m", "json.tool"]
    assert rank_command(LaunchSettings(command=("bash", "-c", "true"))) == ["bash", "-c", "true"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--replicas", "0", "--", "true"], "--replicas is 0"),
        (["--replicas", "4", "--total", "2", "--", "true"], "the groups 0 to 3 of this host"),
        (["--first", "-1", "--", "true"], "the groups -1 to 0"),
        (["--min-replicas", "3", "--", "true"], "--min-replicas 3 exceeds the 2 replicas"),
        (["--lighthouse", "a:1", "--bind", "b:2", "--", "true"], "--bind is for a lighthouse"),
        (["--max-restarts", "-1", "--", "true"], "--max-restarts is -1"),
        (["--", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["-m", "--", "nowhere"], "there is no module 'nowhere'; correct the name"),
        (["-m", "--", "__main__"], "there is no module '__main__'"),
        (["-m", "--", ".json"], "there is no module '.json'"),
        (["-m", "--", "tft_suite.nowhere"], "there is no module 'tft_suite.nowhere'"),
        (["-m", "--", "tft_suite.errors.nowhere"], "there is no module 'tft_suite.errors.nowhere'"),
        (["-m", "--lighthouse", "a:1", "--bind", "b:1", "--", "tft_suite"], "--bind is for a lighthouse"),
        (["-m", "--lighthouse", "a:1", "--min-replicas", "1", "--", "tft_suite"], "--min-replicas is for a lighthouse"),
        (["--", ""], "there is nothing to launch"),
        ([], "command"),
        (["--lr", "3", "true"], "--lr"),
    ],
)
def test_a_wrong_call_is_one_sentence(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["launch", *words]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("tft: ")
    assert named.lower() in line.lower()


def test_a_smallest_quorum_beside_a_lighthouse_of_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFT_LIGHTHOUSE", "http://head:29510")
    assert exit_code_of(["launch", "--min-replicas", "2", "--", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the environment names one, http://head:29510; leave it out" in line


def test_a_folder_does_not_hide_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository is often cloned into a folder with the name of its package."""
    (tmp_path / "tft_suite").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    LaunchSettings(command=("tft_suite.launch.rank",), is_module=True)
    LaunchSettings(command=("own.train",), is_module=True)


def test_the_guard_finds_a_mark_and_those_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    children = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, guard.VARIABLE: mark})
        for mark in ("test-guard/1", "test-guard/10", "other/1")
    ]
    try:
        while [guard.mark_of(each.pid) for each in children] != ["test-guard/1", "test-guard/10", "other/1"]:
            assert all(each.poll() is None for each in children)  # until each runs its program
        assert list(guard.marked("test-guard/1")) == [children[0].pid]
        assert set(guard.marked("test-guard")) == {children[0].pid, children[1].pid}
        assert guard.mark_of(2**22 + 1) == ""
    finally:
        for each in children:
            each.kill()
            each.wait()


def test_the_end_of_a_log_can_not_change_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(
        b"x" * 100_000 + b"\n" + b"\n".join(b"line %d" % each for each in range(20)) + b"\n\x1b[2Jred\xff\n"
    )
    assert tail(log) == [f"line {each}" for each in range(13, 20)] + ["?[2Jred\ufffd"]
    assert tail(tmp_path / "missing") == []
    assert len(clean("x" * 10_000)) == 1_000


def test_logs_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give another folder"):
        make_logs(tmp_path / "file", "run")


def test_the_table_shows_each_group_and_what_the_lighthouse_knows_of_it() -> None:
    groups = [
        Group(0, GroupState.RUNNING, attempt=1, started_s=10),
        Group(1, GroupState.WAITING, attempt=2, until_s=25),
        Group(2, GroupState.DONE, attempt=1),
    ]
    lines = table(groups, {0: Replica("job", "replica_0:x", "left_out", 42, 1)}, 20)
    assert [" ".join(line.split()) for line in lines] == [
        "replica state attempt step since",
        "0 left out 1 42 10 s",
        "1 waiting 2 - in 5 s",
        "2 done 1 - -",
    ]


def test_on_a_terminal_the_table_is_drawn_again_below_the_notes() -> None:
    out = io.StringIO()
    view = View(out, is_live=True)
    groups = [Group(0, GroupState.RUNNING, attempt=1, started_s=10)]
    view.show(groups, {}, 20)
    view.show(groups, {}, 20.1)  # too soon
    first = out.getvalue()
    assert first.count("replica  state") == 1
    view.note("\x1b[2Jhostile", is_bad=True)
    noted = out.getvalue().removeprefix(first)
    assert noted.startswith("\x1b[2F\x1b[J")  # removes the two lines of the table
    assert "?[2Jhostile" in noted
    view.show(groups, {}, 20.2)
    view.close()
    assert out.getvalue().endswith("\x1b[2F\x1b[J")


def test_elsewhere_there_are_only_lines_and_a_reader_that_has_gone_ends_nothing() -> None:
    out = io.StringIO()
    view = View(out, is_live=False)
    view.show([Group(0)], {}, 20)
    view.note("a note")
    view.close()
    assert re.fullmatch(r"\d\d:\d\d:\d\d a note\n", out.getvalue())
    out.close()
    view.note("nobody reads this")


def test_only_living_replicas_of_a_status_count() -> None:
    def replica(name: str, state: str) -> dict[str, Any]:
        return {"replica_id": name, "state": state, "step": 3, "pid": None}

    status = {"jobs": [{"name": "job", "replicas": [replica("a", "training"), replica("b", "lost")]}]}
    assert living(status) == [Replica("job", "a", "training", 3, 0)]


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for TorchX in place. The component has run with TorchX 0.7 itself, by hand."""
    module = ModuleType("torchx.specs")
    for name in ("AppDef", "Role", "Resource"):
        setattr(module, name, SimpleNamespace)
    module.RetryPolicy = SimpleNamespace(REPLICA="REPLICA")  # type: ignore[attr-defined]
    package = ModuleType("torchx")
    package.specs = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchx", package)
    monkeypatch.setitem(sys.modules, "torchx.specs", module)


@pytest.mark.usefixtures("specs")
def test_the_component_has_a_role_for_each_group_that_the_launcher_accepts() -> None:
    app: Any = torchx.hsdp(
        "20", "--x", replicas=3, workers_per_replica=2, script="bash", lighthouse="http://head:29510", gpu=2
    )
    assert [role.name for role in app.roles] == ["replica0", "replica1", "replica2"]
    role = app.roles[1]
    assert (role.entrypoint, role.num_replicas, role.retry_policy) == ("tft", 1, "REPLICA")
    assert role.resource == SimpleNamespace(cpu=2, gpu=2, memMB=4096)
    words = "launch --replicas 1 --first 1 --total 3 --nproc 2 --lighthouse http://head:29510 -- bash 20 --x"
    assert " ".join(role.args) == words


@pytest.mark.usefixtures("specs")
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"script": "", "lighthouse": "x"}, "either script or module"),
        ({"script": "a", "module": "b", "lighthouse": "x"}, "either script or module"),
        ({"script": "a"}, "lighthouse is not given"),
        ({"script": "a", "lighthouse": "x", "replicas": 0}, "replicas is 0"),
        ({"script": "a", "lighthouse": "x", "workers_per_replica": 0}, "workers_per_replica 0"),
    ],
)
def test_a_component_with_a_wrong_setting_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        torchx.hsdp(**wrong)


def test_without_torchx_the_component_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchx", None)
    with pytest.raises(MissingExtraError, match=r"tft-suite\[torchx\]"):
        torchx.hsdp(script="train.py", lighthouse="x")
