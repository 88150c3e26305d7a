"""Receives in place, below a rate, and over a link that is faster than they are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_ckpt import ConfigError, HTTPTransport, StateLayoutError, StateUnavailableError, TransportClosedError
from tft_ckpt.testing import Fault, FaultyProxy, assert_same_state, sample_state
from tft_ckpt.transfer import transport as transport_module
from tft_ckpt.transfer.link import TRANSFER_BYTES_MIN, interface_of, link_bytes_per_s, slow_link_sentence

BOUND = timedelta(seconds=60)


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport[Any](bind="127.0.0.1", chunk_bytes=1 << 20) as transport:
        yield transport


@pytest.fixture
def receiver() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport[Any](bind="127.0.0.1") as transport:
        yield transport


# ---- in place ----


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_a_state_is_received_into_the_tensors_that_are_there(source: HTTPTransport[Any], num_chunks: int) -> None:
    state, into = sample_state(seed=1, num_bytes=12 << 20), sample_state(seed=2, num_bytes=12 << 20)
    into = {**into, "extra": None}
    source.send_checkpoint([1], 1, {**state, "extra": 3}, BOUND)
    with HTTPTransport[Any](BOUND, num_chunks, bind="127.0.0.1") as receiver:
        place = into["bulk"].data_ptr()
        got = receiver.recv_checkpoint(0, source.metadata(), 1, BOUND, into=into)
        assert got["bulk"] is into["bulk"]
        assert got["bulk"].data_ptr() == place
        assert_same_state(got, {**state, "extra": 3})
        assert receiver.last_receive is not None
        assert receiver.last_receive.state_bytes == receiver.last_receive.fetched_bytes


def test_a_state_of_another_form_touches_nothing(source: HTTPTransport[Any], receiver: HTTPTransport[Any]) -> None:
    source.send_checkpoint([1], 1, {"a": torch.ones(5000), "b": torch.ones(7)}, BOUND)
    into = {"a": torch.zeros(5000), "b": torch.zeros(8)}
    with pytest.raises(StateLayoutError) as caught:
        receiver.recv_checkpoint(0, source.metadata(), 1, BOUND, into=into)
    assert caught.value.path == "state['b']"
    assert "mixture" not in str(caught.value)
    assert not into["a"].any()


def test_a_receive_in_place_that_fails_says_what_the_tensors_hold(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    state = {"a": torch.ones(1 << 20)}
    source.send_checkpoint([1], 1, state, BOUND)
    into = {"a": torch.zeros(1 << 20)}
    with (
        FaultyProxy(source.metadata(), Fault("data", "kill", at=2 << 20)) as proxy,
        pytest.raises(StateUnavailableError, match="hold a mixture") as caught,
    ):
        receiver.recv_checkpoint(0, proxy.url, 1, BOUND, into=into)
    assert caught.value.source == proxy.url
    assert_same_state(receiver.recv_checkpoint(0, source.metadata(), 1, BOUND, into=into), state)


def test_a_source_whose_state_does_not_fit_is_no_more_than_one_that_has_none(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    state = {"a": torch.ones(1 << 20)}
    source.send_checkpoint([1], 1, state, BOUND)
    with HTTPTransport[Any](bind="127.0.0.1") as other:
        other.send_checkpoint([1], 1, {"a": torch.ones(6)}, BOUND)
        into = {"a": torch.zeros(1 << 20)}
        got = receiver.recv_checkpoint(0, other.metadata(), 1, BOUND, into=into, sources=[source.metadata()])
        assert_same_state(got, state)
        with (
            FaultyProxy(source.metadata(), Fault("data", "kill", at=2 << 20)) as proxy,
            pytest.raises(StateLayoutError, match="hold a mixture") as caught,
        ):
            receiver.recv_checkpoint(0, proxy.url, 1, BOUND, into=into, sources=[other.metadata()])
    assert caught.value.path == "state['a']"
    assert proxy.url in str(caught.value)


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_it_says_so_too_when_not_even_the_first_chunk_was_whole(num_chunks: int, source: HTTPTransport[Any]) -> None:
    state, into = {"a": torch.ones(1 << 18)}, {"a": torch.zeros(1 << 18)}
    source.send_checkpoint([1], 1, state, BOUND)
    fault = Fault("data", "stall", at=300_000)
    with (
        FaultyProxy(source.metadata(), fault) as proxy,
        HTTPTransport[Any](BOUND, num_chunks, bind="127.0.0.1") as receiver,
        pytest.raises(TransportClosedError, match="hold a mixture"),
    ):
        # By then some of it is in its place, for the first part of a stalled answer has gone through.
        receiver.recv_checkpoint(0, proxy.url, 1, BOUND, into=into, cancelled=lambda: bool(into["a"].any()))
    assert into["a"].any()
    assert not into["a"].all()


# ---- the cap ----


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_all_connections_together_keep_to_the_rate(source: HTTPTransport[Any], num_chunks: int) -> None:
    state = {"a": torch.ones(1 << 20)}
    source.send_checkpoint([1], 1, state, BOUND)
    with HTTPTransport[Any](BOUND, num_chunks, bind="127.0.0.1", receive_bytes_per_s=16e6) as receiver:
        assert_same_state(receiver.recv_checkpoint(0, source.metadata(), 1, BOUND), state)
        assert receiver.last_receive is not None
        assert receiver.last_receive.fetching_s >= (4 << 20) / 16e6 - 0.1


@pytest.mark.parametrize("name", ["send_bytes_per_s", "receive_bytes_per_s"])
@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), "fast"])
def test_a_rate_that_is_none_is_named(name: str, rate: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        HTTPTransport[Any](bind="127.0.0.1", **{name: rate})


# ---- the link ----


def sentence(num_bytes: int, seconds: float, link: float | None = 12.5e9, interface: str | None = "eth7") -> str | None:
    return slow_link_sentence(
        num_bytes,
        seconds,
        ("10.0.0.1", "10.0.0.2"),
        find_interface=lambda address: interface if address == "10.0.0.1" else None,
        find_bytes_per_s=lambda name: link if name == interface else None,
    )


def test_a_transfer_far_below_its_link_is_named_with_addresses_and_both_rates() -> None:
    said = sentence(1 << 30, 10.0)
    assert said is not None
    for word in ("10.0.0.1", "10.0.0.2", "eth7", "107 MB/s", "12500 MB/s"):
        assert word in said


@pytest.mark.parametrize(
    "case",
    [
        {"num_bytes": TRANSFER_BYTES_MIN - 1, "seconds": 1000.0},
        {"num_bytes": 1 << 30, "seconds": 0.8},
        {"num_bytes": 1 << 30, "seconds": 1000.0, "link": None},
        {"num_bytes": 1 << 30, "seconds": 1000.0, "interface": None},
        {"num_bytes": 1 << 30, "seconds": 0.0},
    ],
)
def test_nothing_is_said_of_a_short_or_quick_transfer_or_an_unknown_link(case: dict[str, Any]) -> None:
    assert sentence(**case) is None


def test_interfaces_are_found_by_their_addresses() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    assert interface_of("2001:db8::9") is None
    assert interface_of("no address") is None
    assert link_bytes_per_s("lo") is None, "a loopback has no speed"
    assert link_bytes_per_s("nonesuch0") is None


@pytest.mark.parametrize("capped", [False, True])
def test_a_slow_transfer_is_warned_about_unless_it_is_capped(
    capped: bool, source: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport_module, "link_bytes_per_s", lambda interface: 1e15 if interface == "lo" else None)
    source.send_checkpoint([1], 1, {"a": torch.zeros(TRANSFER_BYTES_MIN, dtype=torch.uint8)}, BOUND)
    with HTTPTransport[Any](bind="127.0.0.1", receive_bytes_per_s=1e12 if capped else None) as receiver:
        receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)
    assert ("received a state from 127.0.0.1 at 127.0.0.1 (interface lo)" in caplog.text) == (not capped)
