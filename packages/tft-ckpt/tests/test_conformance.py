"""The HTTP transport is put through the published checks, with one connection and with several."""

from __future__ import annotations

from typing import Any

import pytest

from tft_ckpt import HTTPTransport
from tft_ckpt.testing import CHECKS


def one_connection() -> HTTPTransport[Any]:
    return HTTPTransport(bind="127.0.0.1", token="a secret", chunk_bytes=1 << 20)


def four_connections() -> HTTPTransport[Any]:
    return HTTPTransport(num_chunks=4, bind="127.0.0.1", token="a secret", chunk_bytes=1 << 20)


def kept_buffers() -> HTTPTransport[Any]:
    return HTTPTransport(bind="127.0.0.1", token="a secret", reuse_buffers=True)


@pytest.mark.parametrize("make", [one_connection, four_connections, kept_buffers])
@pytest.mark.parametrize("name", CHECKS)
def test_the_transport_passes(name: str, make: Any) -> None:
    CHECKS[name](make)
