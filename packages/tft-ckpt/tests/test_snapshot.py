"""Snapshots of what lies on devices, and the memory that they are copied into."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tft_ckpt import Limits, StateKey
from tft_ckpt.state import buffers
from tft_ckpt.state import snapshot as snapshot_module
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.snapshot import Snapshot

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)


class Library:
    """Stands for the device's library, as far as pinning goes."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls += 1
        self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"fault {code}"


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system knows no huge pages")
def test_large_memory_alone_is_of_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Memory(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            asked.append(option)

    monkeypatch.setattr(buffers.mmap, "mmap", Memory)
    Buffer(64 << 20)
    assert asked == []
    Buffer(1 << 30)  # of which nothing is touched
    assert asked == [mmap.MADV_HUGEPAGE]


def test_memory_is_pinned_once_and_until_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    buffer = Buffer(5000)
    assert (buffer.pin(), buffer.pin()) == ("", "")
    assert library.calls == 1
    assert library.pinned == {buffer.tensor.data_ptr(): 5000}
    del buffer
    gc.collect()
    assert library.pinned == {}


def test_memory_that_cannot_be_pinned_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(7)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    buffer = Buffer(5000)
    assert buffer.pin() == "fault 7"
    del buffer
    gc.collect()
    assert len(library.pinned) == 1, "nothing was unpinned that was not"


class Copies:
    """Counts the threads that `_copy_here` starts, beside the caller's, and lets them do their work."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(self, number: int, name: str) -> ThreadPoolExecutor:
        self.threads.append(number)
        return ThreadPoolExecutor(number, name)


@pytest.mark.parametrize(
    ("cores", "elements", "others"),
    [(1, 1 << 25, []), (2, 1 << 25, [1]), (64, 1 << 25, [3]), (64, 1 << 16, [])],
    ids=["one core", "two cores", "many cores", "a small state"],
)
def test_a_large_state_is_copied_by_several_threads(
    cores: int, elements: int, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors of any length, each in pieces or whole; and none of the threads outlives the call."""
    copies = Copies()
    monkeypatch.setattr(snapshot_module, "ThreadPoolExecutor", copies)
    monkeypatch.setattr(snapshot_module, "_cores", lambda: cores)
    lengths = [elements, 0, 1, (8 << 20) + 1, 8 << 20, 77]
    state = [torch.arange(length, dtype=torch.int32) + at for at, length in enumerate(lengths)]
    kept: list[Buffer] = []

    def allocate(num_bytes: int) -> Buffer:
        kept.append(Buffer(num_bytes))
        return kept[-1]

    if elements < 1 << 20:
        state = [state[0], *state[1:3]]
    snapshot = Snapshot.take(state, key=KEY, chunk_bytes=1 << 20, limits=Limits(), allocate=allocate)
    assert copies.threads == others
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(snapshot_module.COPY_THREAD_NAME)]
    wanted = [tensor.clone() for tensor in state]
    for tensor in state:
        tensor.fill_(-1)
    for got, tensor in zip(snapshot.layout.build(kept[0].view), wanted, strict=True):
        assert torch.equal(got, tensor)


@pytest.mark.parametrize("granted", [0, 1])
def test_where_the_system_gives_fewer_threads_the_others_do_the_work(
    granted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, itertools.count()

    def refuse(thread: threading.Thread) -> None:
        if next(started) >= granted:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(snapshot_module, "_cores", lambda: 4)
    state = [torch.arange(1 << 25, dtype=torch.int32)]
    buffer = Buffer(1 << 27)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        snapshot = Snapshot.take(state, key=KEY, chunk_bytes=1 << 20, limits=Limits(), allocate=lambda _: buffer)
    assert next(started) > granted
    assert torch.equal(snapshot.layout.build(buffer.view)[0], state[0])


@pytest.mark.gpu
def test_a_state_on_a_device_is_copied_as_it_was_when_it_was_taken() -> None:
    """Work that was started before is waited for, and the next step may write as soon as the call returns."""
    state: Any = [torch.zeros(1 << 24, device="cuda"), torch.ones(1000), torch.zeros(3, 5, device="cuda").t()]
    for tensor in (state[0], state[2]):
        for _ in range(50):
            tensor.add_(1.0)
    buffers: list[Buffer] = []

    def allocate(num_bytes: int) -> Buffer:
        buffers.append(Buffer(num_bytes))
        return buffers[-1]

    snapshot = Snapshot.take(state, key=KEY, chunk_bytes=1 << 20, limits=Limits(), allocate=allocate)
    state[0].fill_(-1.0)
    state[2].fill_(-1.0)
    torch.cuda.synchronize()
    got = snapshot.layout.build(buffers[0].view)
    assert got[0].eq(50.0).all()
    assert got[1].eq(1.0).all()
    assert got[2].eq(50.0).all()
    assert got[2].stride() == state[2].stride()
    assert buffers[0].pin() == "", "it is pinned already"
