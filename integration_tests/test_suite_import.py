"""One import gives every name that a training script needs, and costs nothing until a name is used."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from importlib import import_module

import pytest

import tft_suite


@pytest.mark.parametrize("name", sorted(set(tft_suite.__all__) - {"ConfigError"}))
def test_a_name_is_the_one_of_its_own_package(name: str) -> None:
    value = getattr(tft_suite, name)
    assert value.__module__.startswith("tft_")
    homes = ("tft_coord", "tft_lighthouse", "tft_pg", "tft_ckpt", "tft_algos", "tft_suite.errors")
    assert any(getattr(import_module(home), name, None) is value for home in homes)


def test_one_except_clause_catches_the_wrong_settings_of_all_packages() -> None:
    from tft_suite import TLS, ConfigError, Timeouts, init_group

    with pytest.raises(ConfigError, match="heartbeat_timeout_ms"):
        Timeouts(heartbeat_timeout_ms=0)
    with pytest.raises(ConfigError, match="certificate"):
        TLS(certificate="", key="key", authority="authority")
    with pytest.raises(ConfigError, match="pass a timedelta above zero"):
        init_group(timeout=timedelta(0))
    assert {error.__module__ for error in ConfigError} == {
        f"tft_{package}.errors" for package in ("coord", "pg", "ckpt", "algos", "suite")
    }


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
    lighthouses = (
        "{'tft_coord.core.events', 'tft_coord.core.effects', 'tft_coord.wire.codec', 'tft_coord.compat.views'}"
    )
    run(f"import sys; from tft_coord import ManagerClient; assert not {lighthouses} & set(sys.modules)")


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
