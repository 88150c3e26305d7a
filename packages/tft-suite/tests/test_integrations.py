"""The adapters for other trainers: what stands without those trainers."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from tft_algos import ConfigError
from tft_suite.integrations import data


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("huggingface", "transformers", "tft-suite[huggingface]"),
        ("huggingface", "accelerate.optimizer", "tft-suite[huggingface]"),
        ("lightning", "pytorch_lightning.strategies", "tft-suite[lightning]"),
    ],
)
def test_without_its_library_an_import_names_the_extra(
    module: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"tft_suite.integrations.{module}", raising=False)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    for name in (missing.split(".")[0], missing):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as raised:
        import_module(f"tft_suite.integrations.{module}")
    assert extra in str(raised.value)
    assert missing.split(".")[0] in str(raised.value)


def test_an_endless_data_set_repeats_every_sample_in_another_order() -> None:
    samples = list("abcdefgh")
    endless = iter(data.endless(samples, seed=7))
    rounds = [[next(endless) for _ in samples] for _ in range(3)]
    assert all(sorted(each) == samples for each in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    again = iter(data.endless(samples, seed=7))
    assert [next(again) for _ in samples] == rounds[0]


def test_workers_divide_an_endless_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = list(range(10))
    endless = data.endless(samples)
    drawn: list[int] = []
    for worker in range(2):
        monkeypatch.setattr(data, "get_worker_info", lambda: SimpleNamespace(id=worker, num_workers=2))  # noqa: B023
        share = iter(endless)
        drawn += [next(share) for _ in range(5)]
    assert sorted(drawn) == samples


def test_without_a_seed_two_starts_differ() -> None:
    samples = torch.arange(1000)
    first, second = ([next(each).item() for _ in range(20)] for each in (iter(data.endless(samples)) for _ in range(2)))
    assert first != second


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        data.endless([])
