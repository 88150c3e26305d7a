"""A state that is copied before its name is known."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_ckpt import (
    ConfigError,
    HTTPTransport,
    PGTransport,
    StateKey,
    StateMismatchError,
    StateUnavailableError,
    StateUnsupportedError,
    TransferTimeoutError,
    TransportClosedError,
)
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.testing import assert_same_state

BOUND = timedelta(seconds=20)
SOON = timedelta(seconds=0.3)
KEY = StateKey(quorum_id=3, nonce=4, step=5, lineage=6)


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport(bind="127.0.0.1", chunk_bytes=4096) as transport:
        yield transport


@pytest.fixture
def receiver() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport(bind="127.0.0.1") as transport:
        yield transport


def receive(receiver: HTTPTransport[Any], source: HTTPTransport[Any], key: StateKey, limit: timedelta = BOUND) -> Any:
    return receiver.recv_checkpoint(0, source.metadata(), key.step, limit, key=key)


def test_what_was_staged_is_had_under_the_name_that_it_gets(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    assert source.stages
    tensor = torch.arange(5000)
    staged = source.stage_checkpoint({"a": tensor, "b": [1, "x"]}, BOUND)
    expected = {"a": tensor.clone(), "b": [1, "x"]}
    tensor.zero_()  # the trainer goes on
    with pytest.raises(TransferTimeoutError):
        receive(receiver, source, KEY, SOON)
    staged.offer([1], key=KEY)
    assert_same_state(receive(receiver, source, KEY), expected)
    with pytest.raises(StateMismatchError):
        receive(receiver, source, StateKey(quorum_id=3, nonce=4, step=5, lineage=7))


def test_it_takes_the_place_of_the_state_before_and_its_memory(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[Any] = []
    take = Snapshot.take

    def seen(*args: Any, **settings: Any) -> Snapshot:
        snapshot = take(*args, **settings)
        buffers.append(snapshot.buffer)
        return snapshot

    monkeypatch.setattr(Snapshot, "take", seen)
    source.send_checkpoint([], 4, {"a": torch.ones(5000)}, BOUND)
    source.stage_checkpoint({"a": torch.zeros(5000)}, BOUND).drop()
    staged = source.stage_checkpoint({"a": torch.zeros(5000)}, BOUND)
    assert buffers[0] is buffers[1] is buffers[2]
    with pytest.raises((StateUnavailableError, StateMismatchError), match="its memory was needed for the next state"):
        receive(receiver, source, StateKey(0, 0, 4, 0))
    staged.offer([], key=KEY)
    assert_same_state(receive(receiver, source, KEY), {"a": torch.zeros(5000)})


def test_what_can_not_be_staged_leaves_nothing(source: HTTPTransport[Any], receiver: HTTPTransport[Any]) -> None:
    with pytest.raises(StateUnsupportedError):
        source.stage_checkpoint({"a": object()}, BOUND)
    with pytest.raises(TransferTimeoutError):
        source.stage_checkpoint({"a": torch.ones(1 << 20)}, timedelta(microseconds=1))
    source.send_checkpoint([1], 5, {"a": torch.ones(3)}, BOUND, key=KEY)
    assert_same_state(receive(receiver, source, KEY), {"a": torch.ones(3)})


def test_after_the_end_nothing_is_staged_or_offered(source: HTTPTransport[Any]) -> None:
    staged, other = (source.stage_checkpoint({"a": torch.ones(3)}, BOUND) for _ in range(2))
    source.shutdown()
    with pytest.raises(TransportClosedError):
        staged.offer([1], key=KEY)
    other.drop()
    with pytest.raises(TransportClosedError):
        source.stage_checkpoint({"a": torch.ones(3)}, BOUND)


def test_a_transport_that_can_not_says_so() -> None:
    assert not PGTransport.stages
    with pytest.raises(ConfigError, match="can't stage a state; check its `stages` first"):
        PGTransport.stage_checkpoint(object.__new__(PGTransport), {}, BOUND)
