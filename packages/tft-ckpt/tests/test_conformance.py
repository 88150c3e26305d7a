"""Every transport is put through the published checks: HTTP over one connection and several, and a process group."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_ckpt import HTTPTransport, PGTransport
from tft_ckpt.testing import CHECKS, Together, members_of_gloo


def one_connection() -> HTTPTransport[Any]:
    return HTTPTransport(bind="127.0.0.1", token="a secret", chunk_bytes=1 << 20)


def four_connections() -> HTTPTransport[Any]:
    return HTTPTransport(num_chunks=4, bind="127.0.0.1", token="a secret", chunk_bytes=1 << 20)


def kept_buffers() -> HTTPTransport[Any]:
    return HTTPTransport(bind="127.0.0.1", token="a secret", reuse_buffers=True)


def over_gloo(count: int, wraps: Mapping[int, Any]) -> list[PGTransport[Any]]:
    return [
        PGTransport(
            wraps.get(rank, lambda member: member)(member),
            timedelta(seconds=20),
            torch.device("cpu"),
            chunk_bytes=1 << 20,
        )
        for rank, member in enumerate(members_of_gloo(count))
    ]


over_a_process_group = Together(over_gloo, may_miss_a_death=True)


@pytest.mark.parametrize(
    "make",
    [one_connection, four_connections, kept_buffers, over_a_process_group],
    ids=["one_connection", "four_connections", "kept_buffers", "process_group"],
)
@pytest.mark.parametrize("name", CHECKS)
def test_the_transport_passes(name: str, make: Any) -> None:
    CHECKS[name](make)
