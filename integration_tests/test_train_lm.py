"""The language model as users start it: shells and torchrun, one killed and restarted, and the loss falls."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch

from examples.train_lm import FaultTolerance, Settings, read_settings
from integration_tests.conftest import ROOT, Kill, Launch, Spawn
from integration_tests.scripts import SECONDS_TO_END, SECRET, WATCHED, Shells, refused, wait_for
from tft_algos import ConfigError
from tft_lighthouse import LighthouseServer

EXAMPLE: Final = ROOT / "examples" / "train_lm.py"
SMALL: Final = ("--width=32", "--layers=1", "--context=32", "--batch=12", "--characters=100000", "--print_every=10")
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=3")
FT: Final = "--fault_tolerance."
STREAMING: Final = (
    "--layers=2",
    f"{FT}semi_sync_method=diloco",
    f"{FT}sync_steps=10",
    f"{FT}num_fragments=2",
    f"{FT}fragment_sync_delay=2",
)
AT_ONCE: Final = (f"{FT}fragment_sync_delay=0", f"{FT}num_fragments=1")
LOCAL_SGD: Final = (f"{FT}semi_sync_method=local_sgd", f"{FT}fragment_update_alpha=0")
REPLICA: Final = "fault_tolerance.replica_id (or REPLICA_GROUP_ID)"
GROUPS: Final = "fault_tolerance.group_size (or NUM_REPLICA_GROUPS)"
RANK0: Final = "fault_tolerance.rank0_synchronization_only (or TFT_RANK0_SYNCHRONIZATION_ONLY)"
LAUNCHED: Final = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
SET_METHOD: Final = "set fault_tolerance.semi_sync_method to"

pytestmark = pytest.mark.timeout(180)  # eight interpreters import torch, on a machine that may be busy


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[LighthouseServer]:
    """Yield a lighthouse with the test's smallest quorum."""
    with LighthouseServer("127.0.0.1:0", min_replicas=request.param, join_timeout_ms=5_000, token=SECRET) as server:
        yield server


def shell(replica: int, lighthouse: LighthouseServer) -> dict[str, str]:
    job = {"TFT_LIGHTHOUSE": str(lighthouse.address), "TFT_TOKEN": SECRET, "NUM_REPLICA_GROUPS": "2"}
    return {**job, "REPLICA_GROUP_ID": str(replica)}


def test_it_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 460


@pytest.mark.in_parts(always=["every step-1"])
@pytest.mark.parametrize("lighthouse", [1], indirect=True)
@pytest.mark.parametrize("words", [[], STREAMING], ids=["every step", "Streaming DiLoCo"])
def test_a_shell_that_is_killed_and_started_again_heals_and_the_loss_falls(
    spawn: Spawn, lighthouse: LighthouseServer, words: list[str]
) -> None:
    words = ["--steps=1000000", *SMALL, *words]
    with Shells(spawn, EXAMPLE, shell(0, lighthouse)) as shells:
        (first,) = shells.start(0, words)
        at_first = float(first.wait_for(r"step 10 .*participants 1 loss (\S+)")[1])
        for _ in range(2):
            (second,) = shells.start(1, words)
            second.wait_for(r"healed from replica_0:\S+ to step \d+")
            second.wait_for(r"participants 2 loss")
            first.wait_for(r"participants 2 loss")
            second.kill()
            at_last = float(first.wait_for(r"participants 1 loss (\S+)")[1])
    assert at_last < at_first - 0.5


@pytest.mark.in_parts
@pytest.mark.parametrize("lighthouse", [1], indirect=True)
def test_a_group_with_another_model_is_refused_and_harms_nobody(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    """The refusal comes before its first reduction, which would end a process that receives more bytes than
    expected."""
    words = ["--steps=1000000", *SMALL]
    with Shells(spawn, EXAMPLE, shell(0, lighthouse)) as shells:
        (first,) = shells.start(0, words)
        first.wait_for(r"step 10 .*participants 1 loss")
        for other in ("--width=64", "--layers=2"):
            (second,) = shells.start(1, [*words, other])
            second.wait_for(r"differs from replica_0:\S+ of job 'default': parameter/optimizer 0 is")
        step = int(first.wait_for(r"step (\d+) participants 1 loss")[1])
        first.wait_for(rf"step {step + 20} participants 1 loss")


@pytest.mark.in_parts
@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_torchrun_starts_a_killed_process_again_and_both_groups_end_with_the_same_loss(
    launch: Launch, kill: Kill, lighthouse: LighthouseServer
) -> None:
    """min_replicas is two, so that the remaining group waits for the other."""
    command = [sys.executable, *TORCHRUN, WATCHED, str(EXAMPLE), "--steps=60", *SMALL]
    shells = [launch(command, env=shell(replica, lighthouse)) for replica in range(2)]
    wait_for(r"step 20 participants 2 loss", shells[1])
    kill(psutil.Process(shells[1].pid).children()[1].pid)
    wait_for(r"healed from replica_0:\S+ to step [2-5]\d", shells[1])
    losses = set()
    for process in shells:
        output, _ = process.communicate(timeout=SECONDS_TO_END)
        assert process.returncode == 0, output
        found = re.findall(r"step 60 validation loss (\d+\.\d{4})", output)  # two processes may share a line
        assert len(found) == 2, output
        losses |= {*found}
    assert len(losses) == 1
    assert 2 < float(losses.pop()) < 3.5


APART: Final = """
[training]
steps = 24
width = 32
layers = 2
context = 16
batch = 12
characters = 100000
print_every = 8

[fault_tolerance]
semi_sync_method = "diloco"
sync_steps = 8
num_fragments = 2
fragment_sync_delay = 2
fragment_update_alpha = 0.1
"""


@pytest.mark.in_parts(always=["Streaming DiLoCo-2"])
@pytest.mark.parametrize("lighthouse", [2], indirect=True)
@pytest.mark.parametrize(
    ("words", "ranks", "last"),
    [
        pytest.param([], (1, 1), "step 24 synchronizations 6", id="Streaming DiLoCo"),
        # The first sync ends a period later than it would alone.
        pytest.param([f"{FT}fragment_sync_delay=5"], (1, 1), "step 28 synchronizations 6", id="two in flight"),
        pytest.param(AT_ONCE, (2, 2), "step 24 synchronizations 3", id="DiLoCo"),
        pytest.param(
            [f"{FT}rank0_synchronization_only"], (1, 2), "step 24 synchronizations 6", id="islands of different sizes"
        ),
        pytest.param([*AT_ONCE, *LOCAL_SGD], (1, 1), "step 24 synchronizations 3", id="LocalSGD"),
    ],
)
def test_groups_that_train_apart_learn_together(
    spawn: Spawn, tmp_path: Path, lighthouse: LighthouseServer, words: list[str], ranks: tuple[int, int], last: str
) -> None:
    file = tmp_path / "lm.toml"
    file.write_text(APART)
    with Shells(spawn, EXAMPLE, shell(0, lighthouse)) as shells:
        words = [f"--config={file}", *words]
        for script in [script for replica in range(2) for script in shells.start(replica, words, ranks[replica])]:
            written = script.ended()
            assert re.search(rf"^{last} participants 2 loss \d", written, re.MULTILINE), written
            (loss,) = re.findall(r"^step 2\d validation loss (\d+\.\d+)$", written, re.MULTILINE)
            assert float(loss) < 4.5, written  # 4.85 at first


def test_without_fault_tolerance_there_is_no_lighthouse(spawn: Spawn) -> None:
    with Shells(spawn, EXAMPLE, {"TFT_LIGHTHOUSE": ""}) as shells:
        (script,) = shells.start(0, ["--fault_tolerance.enable=false", "--steps=10", *SMALL])
        script.wait_for(r"^step 10 loss \d")
        script.wait_for(r"^step 10 validation loss \d")
        script.ended()


# --- the settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (["--fault_tolerance.replica_id=7"], {}, f"{REPLICA} is 7; give 0 to 1, or a larger {GROUPS[:26]}"),
        ([], {"NUM_REPLICA_GROUPS": "0"}, f"{GROUPS} is 0; give 1 or more"),
        ([], {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; give a whole number"),
        ([], {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0; give 1 or more, or start it with torchrun"),
        (
            [],
            {"WORLD_SIZE": "2", "RANK": "", "MASTER_ADDR": "localhost", "MASTER_PORT": ""},
            "WORLD_SIZE is 2 without RANK and MASTER_PORT; set them too, or use torchrun",
        ),
        ([], {**LAUNCHED, "RANK": "2"}, "RANK is 2 of WORLD_SIZE 2; give 0 to 1, or use torchrun"),
        ([], {**LAUNCHED, "RANK": "one"}, "RANK is 'one'; give a whole number"),
        (["--batch=1"], {}, "batch is 1; give at least 2, one for each process"),
        (
            ["--steps=9", f"{FT}semi_sync_method=diloco"],
            {},
            "steps is 9; give at least 20, to the end of the first synchronization",
        ),
        (
            ["--config=missing.toml"],
            {},
            "--config is 'missing.toml', which can't be read ([Errno 2] No such file or "
            "directory: 'missing.toml'); give a file of TOML",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    spawn: Spawn, words: list[str], environment: dict[str, str], sentence: str
) -> None:
    said = refused(spawn, EXAMPLE, words, environment)
    assert said == f"train_lm.py: {sentence}\n"


def test_the_file_the_environment_and_the_flags_each_beat_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "lm.toml"
    file.write_text(
        """
        [training]
        steps = 7
        learning_rate = 1
        [fault_tolerance]
        enable = false
        replica_id = 1
        group_size = 5
        semi_sync_method = "diloco"
        sync_steps = 30
        fragment_update_alpha = 0.5
        """
    )
    defaults = Settings(), FaultTolerance()
    assert read_settings([], {}) == defaults
    settings, ft = read_settings([f"--config={file}"], {})
    assert settings == replace(defaults[0], steps=7, learning_rate=1)
    expected = replace(
        defaults[1],
        enable=False,
        replica_id=1,
        group_size=5,
        semi_sync_method="diloco",
        sync_steps=30,
        fragment_update_alpha=0.5,
    )
    assert ft == expected
    environment = {"REPLICA_GROUP_ID": "3", "NUM_REPLICA_GROUPS": ""}
    assert read_settings(["--config", str(file)], environment)[1] == replace(expected, replica_id=3)
    flags = ["--fault_tolerance.replica_id=2", "--fault_tolerance.enable", "--fault_tolerance.sync_steps", "40"]
    settings, ft = read_settings([f"--config={file}", "--steps=9", *flags], environment)
    assert settings.steps == 9
    assert ft == replace(expected, replica_id=2, enable=True, sync_steps=40)


def test_every_name_that_is_promised_is_a_flag_and_a_key_of_the_table(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "enable": True,
        "replica_id": 1,
        "group_size": 3,
        "min_replica_size": 2,
        "sync_steps": 8,
        "num_fragments": 2,
        "semi_sync_method": "diloco",
        "process_group": "gloo",
        "process_group_timeout_ms": 500,
        "fragment_sync_delay": 3,
        "fragment_update_alpha": 0.25,
        "rank0_synchronization_only": True,
        "copy_pseudogradients_to_cpu": True,
    }
    assert vars(FaultTolerance()).keys() == values.keys()
    by_flags = read_settings([f"--fault_tolerance.{name}={value}" for name, value in values.items()], {})
    file = tmp_path / "lm.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    file.write_text("\n".join(["[fault_tolerance]", *lines]))
    assert by_flags == read_settings([f"--config={file}"], {}) == (Settings(), FaultTolerance(**values))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"context": 0}, "context is 0; give more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; give more than 0"),
        ({"heads": 7}, "width is 96; give a multiple of 14, for 7 heads"),
        ({"characters": 600}, "600 characters are too few for sequences of 64"),
        ({"steps": 1.5}, "steps is 1.5; give a whole number"),
        ({"seed": 2**40}, f"seed is {2**40}; give one of at most 31 bits"),
    ],
)
def test_settings_that_can_t_work_are_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Settings(**flags)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("enable=perhaps", "--fault_tolerance.enable is 'perhaps'; give true or false"),
        ("replica_id=first", "--fault_tolerance.replica_id is 'first'; give a whole number"),
        ("replica_id=-1", f"{REPLICA} is -1; give 0 to 1, or a larger {GROUPS[:26]}"),
        ("group_size=1.5", "--fault_tolerance.group_size is '1.5'; give a whole number"),
        (
            "min_replica_size=3",
            "fault_tolerance.min_replica_size is 3; give 1 to 2, or a larger fault_tolerance.group_size",
        ),
        ("process_group=mpi", "fault_tolerance.process_group is 'mpi'; give gloo or nccl"),
        ("process_group_timeout_ms=0", "fault_tolerance.process_group_timeout_ms is 0; give 1 to 604800000"),
        ("semi_sync_method=heloco", "fault_tolerance.semi_sync_method is 'heloco'; give diloco, local_sgd or none"),
        ("sync_steps=0", "fault_tolerance.sync_steps is 0; give 1 or more"),
        ("num_fragments=0", "fault_tolerance.num_fragments is 0; give 1 to 20, or a larger fault_tolerance.sync_steps"),
        ("num_fragments=3", "fault_tolerance.sync_steps is 20; give a multiple of fault_tolerance.num_fragments, 3"),
        ("fragment_sync_delay=20", "fault_tolerance.fragment_sync_delay is 20; give 0 to 19, or a larger fault_t"),
        ("fragment_update_alpha=1.5", "fault_tolerance.fragment_update_alpha is 1.5; give 0 to 1"),
        ("fragment_update_alpha=nan", "fault_tolerance.fragment_update_alpha is nan; give 0 to 1"),
        ("rank0_synchronization_only", f"{RANK0} is True; {SET_METHOD} diloco or local_sgd, or leave this out"),
        ("sync_steps=40", f"fault_tolerance.sync_steps is 40; {SET_METHOD} diloco or local_sgd, or leave this out"),
        ("num_fragments=2", f"fault_tolerance.num_fragments is 2; {SET_METHOD} diloco, or leave this out"),
        ("fragment_sync_delay=3", f"fault_tolerance.fragment_sync_delay is 3; {SET_METHOD} diloco, or leave this out"),
        ("fragment_update_alpha=0.5", f"fault_tolerance.fragment_update_alpha is 0.5; {SET_METHOD} diloco, or leave"),
        ("copy_pseudogradients_to_cpu", f"copy_pseudogradients_to_cpu is True; {SET_METHOD} diloco, or leave this out"),
        ("num_fragment=2", "no flag of this program; the nearest is --fault_tolerance.num_fragments"),
    ],
)
def test_flags_that_can_t_work_are_refused(word: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as raised:
        read_settings([f"--fault_tolerance.{word}"], {})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_fragments", 2),
        ("fragment_sync_delay", 2),
        ("fragment_update_alpha", 0.5),
        ("copy_pseudogradients_to_cpu", True),
    ],
)
def test_what_local_sgd_has_not_is_refused_with_it(name: str, value: Any) -> None:
    values = {"semi_sync_method": "local_sgd", name: value}
    with pytest.raises(ConfigError, match=rf"\.{name} is {value}; {SET_METHOD} diloco, or leave this out"):
        FaultTolerance(**values)
    FaultTolerance(enable=False, **values)  # a disabled setting has no effect


def test_a_flag_beats_the_variable_that_makes_islands_of_groups() -> None:
    on = {"TFT_RANK0_SYNCHRONIZATION_ONLY": "1"}
    assert read_settings(["--fault_tolerance.semi_sync_method=diloco"], on)[1].rank0_synchronization_only
    assert not read_settings(["--fault_tolerance.rank0_synchronization_only=false"], on)[1].rank0_synchronization_only
    with pytest.raises(ConfigError, match=re.escape(f"{RANK0} is True; {SET_METHOD} diloco or local_sgd")):
        read_settings([], on)
    with pytest.raises(ConfigError, match="TFT_RANK0_SYNCHRONIZATION_ONLY is 'perhaps'; give true or false"):
        read_settings([], {"TFT_RANK0_SYNCHRONIZATION_ONLY": "perhaps"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_is_refused_where_there_is_no_device_for_it() -> None:
    with pytest.raises(ConfigError, match="process_group is 'nccl'; there is no CUDA device here, so give gloo"):
        FaultTolerance(process_group="nccl")


def test_a_file_with_a_mark_before_its_text_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lm.toml"
    file.write_text("[training]\nsteps = 7", encoding="utf-8-sig")
    assert read_settings([f"--config={file}"], {})[0].steps == 7


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[fault_tolerance", "which can't be read (Expected"),
        ("steps = 3", "has 'steps'; give it tables [training] and [fault_tolerance]"),
        ("[model]", "has 'model'; give it tables [training] and [fault_tolerance]"),
        ("[training]\nstep = 3", "sets 'step' in [training], which there is not; the nearest is steps"),
        (
            "[fault_tolerance]\nenabled = true",
            "sets 'enabled' in [fault_tolerance], which there is not; the nearest is",
        ),
        ("[training]\n'fault_tolerance.enable' = true", "sets 'fault_tolerance.enable' in [training], which there"),
        ("[fault_tolerance]\nenable = 1", "fault_tolerance.enable is 1; give true or false"),
        ("[fault_tolerance]\nsync_steps = '20'", "fault_tolerance.sync_steps is '20'; give a whole number"),
        ("[fault_tolerance]\nsemi_sync_method = []", "fault_tolerance.semi_sync_method is []; give text"),
        ("[training]\nlearning_rate = true", "learning_rate is True; give a number"),
    ],
)
def test_a_file_that_can_t_work_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "lm.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(sentence)) as raised:
        read_settings([f"--config={file}"], {})
    assert "\n" not in str(raised.value)


def test_a_file_without_a_reader_of_toml_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the case on Python 3.10 without the package tomli."""
    monkeypatch.setitem(sys.modules, "tomllib" if sys.version_info >= (3, 11) else "tomli", None)
    with pytest.raises(
        ConfigError, match=r"--config needs Python 3\.11, or the package tomli; install it, or give flags"
    ):
        read_settings([f"--config={tmp_path}"], {})
