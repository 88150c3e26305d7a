"""The names of a Manager: which there are, how many, and that nothing else is public."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest

import tft_algos
from tft_algos import Manager, StepControl
from tft_algos.testing import plan_of

OF_TORCHFT = {
    "allow_state_dict_read",
    "allreduce",
    "batches_committed",
    "current_step",
    "disallow_state_dict_read",
    "errored",
    "is_participating",
    "load_state_dict",
    "num_participants",
    "participating_rank",
    "register_state_dict_fn",
    "report_error",
    "set_state_dict_fns",
    "should_commit",
    "shutdown",
    "start_quorum",
    "state_dict",
    "wait_quorum",
    "wrap_future",
}
OWN = {"leave", "leave_on_signal", "left", "replica_id", "set_weight", "status", "strategy"}
LOGGERS = {"commits_logger", "errors_logger", "quorum_logger"}  # attributes of torchft's Manager, too
OF_STRATEGIES = {
    "add_to_fingerprint",
    "applying",
    "attach",
    "attempt",
    "config",
    "defer",
    "describe_optimizer",
    "describe_parameters",
    "exchange_state",
    "give_up_deferred",
    "inner_step_ended",
    "is_untouched",
    "num_deferred",
    "quantizer_of",
    "quorum_is_known",
    "raise_if_left",
    "reduce_in_sync",
    "report_torn",
    "verdict",
    "wait_plan",
}
MOST = 26
MOST_OF_A_CLASS = 20
MOST_ATTRIBUTES = 15
MOST_LINES = 300  # of code: without docstrings, comments and empty lines


def public(something: object) -> set[str]:
    return {name for name in dir(something) if not name.startswith("_")}


def code_lines(cls: type) -> int:
    source = textwrap.dedent(inspect.getsource(cls))
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(number not in docs and bool(line.strip()) and not line.strip().startswith("#") for number, line in lines)


def test_the_public_names_of_a_manager_are_these(rigs: Any) -> None:
    assert public(Manager) == OF_TORCHFT | OWN
    assert len(public(Manager)) <= MOST
    # An instance has three more, loggers of torchft's, and nothing else.
    assert public(rigs(plan_of()).manager) == OF_TORCHFT | OWN | LOGGERS


def test_the_public_names_for_strategies_are_these(rigs: Any) -> None:
    assert public(StepControl) == public(rigs(plan_of()).manager.strategy) == OF_STRATEGIES
    assert len(OF_STRATEGIES) <= MOST_OF_A_CLASS


@pytest.mark.parametrize("part", ["manager", "_runner", "_life", "strategy"])
def test_a_manager_and_the_parts_of_its_shell_are_small(rigs: Any, part: str) -> None:
    manager = rigs(plan_of()).manager
    value = manager if part == "manager" else getattr(manager, part)
    assert len(vars(value)) <= MOST_ATTRIBUTES, sorted(vars(value))
    assert code_lines(type(value)) <= MOST_LINES


@pytest.mark.parametrize("cls", [Manager, StepControl])
def test_everything_public_is_documented(cls: type) -> None:
    undocumented = [name for name in public(cls) if not inspect.getdoc(getattr(cls, name))]
    assert not undocumented


def test_what_a_strategy_is_written_with_is_exported() -> None:
    names = {
        "Coordinator",
        "DeferredStep",
        "ProcessGroupLike",
        "ManagerStatus",
        "ResolvedConfig",
        "ServerRestartedError",
        "StepControl",
    }
    assert names <= set(tft_algos.__all__)
