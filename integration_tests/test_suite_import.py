"""One import gives every name that a training script needs, and costs nothing until a name is used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import tft_suite


@pytest.mark.parametrize("name", tft_suite.__all__)
def test_a_name_is_the_one_of_its_own_package(name: str) -> None:
    value = getattr(tft_suite, name)
    home = value.__module__.partition(".")[0]
    assert home.startswith("tft_")
    assert home != "tft_suite"
    assert getattr(import_module(home), name) is value


def test_the_import_block_of_a_training_script() -> None:
    from tft_suite import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    assert all((DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"tft_suite.*Managr"):
        _ = tft_suite.Managr


def test_the_import_and_the_supervisor_bring_no_torch() -> None:
    program = "\n".join(
        [
            "import sys, tft_suite",
            "assert set(tft_suite.__all__) <= set(dir(tft_suite))",
            "assert not {'torch', 'grpc', 'typer'} & set(sys.modules)",
            "import tft_suite.cli.main, tft_suite.demo.run",
            "assert 'torch' not in sys.modules",
        ]
    )
    run(program)


def test_a_manager_imports_what_it_talks_with_while_its_server_starts_and_not_before() -> None:
    run("import sys, tft_algos; assert not {'grpc', 'tft_coord.client'} & set(sys.modules)")
    lighthouses = "{'tft_coord.core.events', 'tft_coord.core.effects', 'tft_coord.wire.codec', 'tft_coord.views'}"
    run(f"import sys; from tft_coord import ManagerClient; assert not {lighthouses} & set(sys.modules)")


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
