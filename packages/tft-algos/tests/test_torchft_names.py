"""What a script that was written for torchft's local_sgd finds here: names, their order, their defaults.

A default of None where torchft has a value means that value, unless the environment says otherwise.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import tft_algos
from tft_algos import DiLoCo, LocalSGD, extract_local_tensor
from tft_algos.local_sgd import USE_BUCKETIZATION_ENV

DEMANDED = inspect.Parameter.empty
LOCAL_SGD = {"manager": DEMANDED, "model": DEMANDED, "optimizer": DEMANDED, "sync_every": DEMANDED}
DILOCO = {
    "manager": DEMANDED,
    "model_fragments": DEMANDED,
    "inner_optimizer": DEMANDED,
    "outer_optimizer": DEMANDED,
    "sync_every": DEMANDED,
    "backup_device": None,
    "pin_memory": True,
    "use_bucketization": None,  # False
    "bucket_cap_mb": None,
    "should_quantize": False,
    "fragment_sync_delay": 0,
    "fragment_update_alpha": 0.0,
}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(LocalSGD, LOCAL_SGD), (DiLoCo, DILOCO), (extract_local_tensor, {"t": DEMANDED})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_arguments_have_their_order_and_their_defaults(function: Any, arguments: dict[str, object]) -> None:
    parameters = inspect.signature(function).parameters.values()
    by_position = {each.name: each.default for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert list(by_position.items())[: len(arguments)] == list(arguments.items())
    assert all(each.kind is each.KEYWORD_ONLY for each in list(parameters)[len(arguments) :])


def test_they_are_context_managers_and_local_sgd_can_be_told_to_synchronize() -> None:
    assert all(hasattr(each, name) for each in (LocalSGD, DiLoCo) for name in ("__enter__", "__exit__"))
    assert callable(LocalSGD.sync)
    assert USE_BUCKETIZATION_ENV == "TORCHFT_USE_BUCKETIZATION"


@pytest.mark.parametrize("name", ["DiLoCo", "LocalSGD", "extract_local_tensor", "fragment_model"])
def test_the_names_stand_in_the_package_though_they_are_imported_when_they_are_used(name: str) -> None:
    assert name in tft_algos.__all__
    assert name in dir(tft_algos)
    assert getattr(tft_algos, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'tft_algos' has no attribute 'DiLoco'"):
        _ = tft_algos.DiLoco
