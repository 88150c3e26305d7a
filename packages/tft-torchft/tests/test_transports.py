"""Transports on the way to a Manager, and errors on the way back. No socket is opened."""

from __future__ import annotations

import urllib.error
from datetime import timedelta
from typing import Any

import pytest

from tft_ckpt import CheckpointTransport as OurTransport
from tft_ckpt import StateUnavailableError, TransferTimeoutError
from torchft.checkpointing._adapting import AT_ONCE, UserTransport, as_urllib, for_manager, limit_of
from torchft.checkpointing._rwlock import RWLock
from torchft.checkpointing.transport import CheckpointTransport

SECOND = timedelta(seconds=1)


class Written(CheckpointTransport[Any]):
    """A transport as a user of torchft writes it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: Exception | None = None

    def metadata(self) -> str:
        return "mine"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        self.calls.append(("send", dst_ranks, step, state_dict, timeout))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        if self.failing is not None:
            raise self.failing
        self.calls.append(("recv", src_rank, metadata, step, timeout))
        return {"step": step}

    def disallow_checkpoint(self) -> None:
        self.calls.append(("disallow",))

    def shutdown(self, wait: bool = True) -> None:
        self.calls.append(("shutdown", wait))


def test_a_transport_of_a_user_is_called_by_tfts_manager() -> None:
    written = Written()
    transport = for_manager(written)
    assert isinstance(transport, OurTransport)
    assert transport.metadata() == "mine"
    transport.send_checkpoint([1], 3, {"a": 1}, SECOND)
    assert transport.recv_checkpoint(0, "theirs", 3, SECOND, sources=("other",)) == {"step": 3}
    transport.disallow_checkpoint()
    transport.abort()
    transport.shutdown(False)
    assert written.calls == [
        ("send", [1], 3, {"a": 1}, SECOND),
        ("recv", 0, "theirs", 3, SECOND),
        ("disallow",),
        ("shutdown", False),
    ]
    written.failing = urllib.error.URLError("gone")
    with pytest.raises(StateUnavailableError, match="gone"):
        transport.recv_checkpoint(0, "theirs", 3, SECOND)
    written.failing = TimeoutError("too late")
    with pytest.raises(TransferTimeoutError, match="too late"):
        transport.recv_checkpoint(0, "theirs", 3, SECOND)


def test_a_transport_of_tft_and_none_stay_as_they_are() -> None:
    transport = UserTransport(Written())
    assert for_manager(transport) is transport
    assert for_manager(None) is None


def test_a_failed_receive_raises_what_urllib_raises() -> None:
    with pytest.raises(urllib.error.HTTPError) as refused, as_urllib("http://host:1"):
        raise StateUnavailableError("it is not offered")
    assert refused.value.code == 400
    assert "it is not offered" in str(refused.value)
    for kind in (urllib.error.URLError, TimeoutError):
        with pytest.raises(kind, match="too late"), as_urllib("http://host:1"):
            raise TransferTimeoutError("too late", timeout_s=1.0)


def test_a_call_without_a_time_out_has_the_transports_and_zero_means_at_once() -> None:
    assert limit_of(None, SECOND) == SECOND
    assert limit_of(timedelta(0), SECOND) == AT_ONCE
    assert limit_of(2 * SECOND, SECOND) == 2 * SECOND


def test_readers_share_the_lock_and_a_writer_does_not() -> None:
    lock = RWLock(timeout=0)
    with lock.r_lock(), lock.r_lock():
        assert not lock.w_locked()
        with pytest.raises(TimeoutError, match="wlock"):
            lock.w_acquire()
    with lock.w_lock():
        assert lock.w_locked()
        with pytest.raises(TimeoutError, match="rlock"):
            lock.r_acquire()
        with pytest.raises(TimeoutError, match="wlock"):
            lock.w_acquire()
    with pytest.raises(RuntimeError, match="no writer"):
        lock.w_release()
    with pytest.raises(RuntimeError, match="no reader"):
        lock.r_release()
    forever = RWLock()
    forever.w_acquire()
    forever.w_release()
