"""Every public name of torchft is there, with torchft's arguments and defaults: the rows of surface.txt."""

from __future__ import annotations

import ast
import inspect
import socket
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.distributed import ReduceOp

from torchft.manager import WorldSizeMode

ROWS: Final = [
    line
    for line in Path(__file__).with_name("surface.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
VALUES: Final = {
    "HOSTNAME": socket.gethostname(),
    "ReduceOp": ReduceOp,
    "WorldSizeMode": WorldSizeMode,
    "ms": lambda milliseconds: timedelta(milliseconds=milliseconds),
    "s": lambda seconds: timedelta(seconds=seconds),
    "torch": torch,
}
FORWARDED: Final = ["self", "args", "kwargs"]  # the collectives, which test_process_group.py calls by these names


def find(path: str) -> Any:
    """Return the object of a dotted path: the longest module in it, then attributes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"there is no module in {path}")


def value_of(node: ast.expr) -> Any:
    return eval(compile(ast.Expression(node), "surface.txt", "eval"), dict(VALUES))


def check_signature(row: str) -> None:
    call = ast.parse(row, mode="eval").body
    assert isinstance(call, ast.Call)
    signature = inspect.signature(find(ast.unparse(call.func)))
    if list(signature.parameters) == FORWARDED:
        return
    own = list(signature.parameters.values())
    starred = [
        node.value.id for node in call.args if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name)
    ]
    assert [each.name for each in own if each.kind is each.VAR_POSITIONAL] == starred
    required = [node.id for node in call.args if isinstance(node, ast.Name)]
    names = [*required, *(keyword.arg for keyword in call.keywords)]
    own = [each for each in own if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    assert [each.name for each in own[: len(names)]] == names
    for each in own[: len(required)]:
        assert each.default is each.empty, each.name
    for keyword, each in zip(call.keywords, own[len(required) :], strict=False):
        expected = value_of(keyword.value)
        assert expected is ... or each.default == expected, each.name
    for each in own[len(names) :]:  # what tft has in addition
        assert each.default is not each.empty, each.name
        assert starred or not names or each.kind is each.KEYWORD_ONLY, each.name


@pytest.mark.parametrize("row", ROWS, ids=[row.split("(")[0].removeprefix("torchft.") for row in ROWS])
def test_a_name_is_there_as_torchfts_users_know_it(row: str) -> None:
    if " = " in row and "(" not in row.split(" = ")[0]:
        path, _, value = row.partition(" = ")
        assert find(path) == value_of(ast.parse(value, mode="eval").body)
    elif " < " in row:
        path, _, base = row.partition(" < ")
        assert issubclass(find(path), find(base))
    elif "(" in row:
        check_signature(row)
    else:
        find(row)


def test_the_check_sees_a_missing_name_a_wrong_order_and_a_wrong_default() -> None:
    for row in (
        "torchft.manager.Manger",
        "torchft.local_sgd.LocalSGD(model, manager, optimizer, sync_every)",
        "torchft.manager.Manager.shutdown(self, wait=False)",
        "torchft.manager.MANAGER_ADDR_KEY = 'manager'",
        "torchft.manager.Manager < builtins.Exception",
        "torchft.manager.extract_trailing_digits(s, n)",
    ):
        with pytest.raises((AssertionError, AttributeError)):
            test_a_name_is_there_as_torchfts_users_know_it(row)
