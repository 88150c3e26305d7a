"""A state at one moment: a copy in separate memory or, without enough memory, the live tensors.

The trainer may change its tensors as soon as its call returns. So every storage is copied once, during that call, into
one buffer. That copy is the trainer's only cost. Several threads share it, because one core does not reach the memory's
speed. The server computes checksums afterwards, one piece at a time.

A live snapshot copies nothing. It is valid only while the trainer waits, so the server must end it before the trainer
continues. After that it gives no byte. Its checksums come from the same bytes, so a reader would detect a change.

Law of this file: a snapshot never changes after it was taken. The snapshot store knows the readers of its buffer.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias, final

import torch

from tft_ckpt.key import StateKey
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.live import LivePayload
from tft_ckpt.state.manifest import Layout, StorageSpan, checksum, describe, encode, encode_layout
from tft_ckpt.state.tree import Limits

__all__ = ["Snapshot"]

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # uint8 of equal length: destination, source

_log = logging.getLogger("tft_ckpt")

COPY_THREAD_NAME: Final = "tft-ckpt-copy"
# One core does not reach the memory's speed, and more than four bring little.
_COPY_THREADS_MAX: Final = 4
_PIECE_BYTES: Final = 8 << 20
_COPIED_ALONE_BYTES: Final = 8 * _PIECE_BYTES  # a smaller state is copied before a thread has started


@final
class Snapshot:
    """One state with its layout and its copied data.

    Fields:
        layout: the structure of the state.
        buffer: the state's payload, from the first byte on; None: the snapshot is live.
    """

    def __init__(self, layout: Layout, body: bytes, buffer: Buffer | None, live: LivePayload | None = None) -> None:
        self.layout = layout
        self.buffer = buffer
        self._live = live
        self._body = body
        self._checksums: list[int] = []
        self._manifest_bytes: bytes | None = None

    @classmethod
    def take(
        cls,
        state: object,
        *,
        key: StateKey,
        chunk_bytes: int,
        limits: Limits,
        allocate: Callable[[int], Buffer],
    ) -> Snapshot:
        """Copy every storage once, and return when the copies are complete. Running device work continues in the
        meantime.

        Args:
            state: the state. No other code may change it during the call.
            key: the name of the state.
            chunk_bytes: length of a chunk.
            limits: larger states are refused.
            allocate: called once, with a number of bytes, for a buffer that belongs to the snapshot from then on.

        Raises:
            StateUnsupportedError: a leaf can't be transferred. Nothing has been allocated or copied then.
            StateUnavailableError: not enough memory.
            ConfigError: chunk_bytes is out of range.
        """
        layout, spans = describe(state, key=key, chunk_bytes=chunk_bytes, limits=limits)
        body = encode_layout(layout, limits=limits)
        buffer = allocate(layout.data_bytes)
        _clear_padding(layout, buffer)
        _copy(layout, spans, buffer)
        return cls(layout, body, buffer)

    @classmethod
    def live(cls, state: object, *, key: StateKey, chunk_bytes: int, limits: Limits) -> Snapshot:
        """Describe a state without a copy. No code may change the state until `end`.

        Raises: StateUnsupportedError, ConfigError: as `take`.
        """
        layout, spans = describe(state, key=key, chunk_bytes=chunk_bytes, limits=limits)
        payload = LivePayload(layout, spans)
        payload.wait_for_devices()
        return cls(layout, encode_layout(layout, limits=limits), None, payload)

    def end(self) -> None:
        """Stop giving bytes of a live state. Any thread may call this."""
        self._live = None

    @property
    def key(self) -> StateKey:
        """Return the name of the state."""
        return self.layout.key

    def named(self, key: StateKey, *, limits: Limits) -> Snapshot:
        """Return the same state in the same buffer, under another key. This object must not be used afterwards."""
        layout = replace(self.layout, key=key)
        return Snapshot(layout, encode_layout(layout, limits=limits), self.buffer)

    @property
    def data(self) -> memoryview:
        """Return the state's payload, read-only."""
        assert self.buffer is not None, "a live state has no contiguous payload"
        return self.buffer.view[: self.layout.data_bytes].toreadonly()

    def views(self, start: int, end: int) -> list[memoryview]:
        """Return views of these bytes, in order. Raises: ConnectionResetError: the snapshot was live, and has ended."""
        if self.buffer is not None:
            return [self.data[start:end]]
        live = self._live
        if live is None:
            raise ConnectionResetError("the live state is no longer served, because training continues")
        return [live.piece(start, end)]

    @property
    def manifest_bytes(self) -> bytes | None:
        """Return the encoded manifest, or None until all checksums are known."""
        return self._manifest_bytes

    def checksum_next_chunk(self) -> bool:
        """Compute one more checksum. Only one thread at a time may call this, and not the trainer's.

        Returns: whether the manifest is complete, or never will be because a live state has ended.
        """
        if self._manifest_bytes is not None or (self.buffer is None and self._live is None):
            return True
        if len(self._checksums) < self.layout.num_chunks:
            start, end = self.layout.chunk_span(len(self._checksums))
            self._checksums.append(checksum(self.views(start, end)[0]))
        if len(self._checksums) == self.layout.num_chunks:
            self._manifest_bytes = encode(self._body, self._checksums)
        return self._manifest_bytes is not None


def _clear_padding(layout: Layout, buffer: Buffer) -> None:
    """Clear the bytes between segments. They are part of the checksums, so equal states need equal padding."""
    end = 0
    for segment in layout.segments:
        if segment.offset > end:
            buffer.view[end : segment.offset] = bytes(segment.offset - end)
        end = segment.offset + segment.length


def _copy(layout: Layout, spans: Sequence[StorageSpan], buffer: Buffer) -> None:
    """Copy every storage: CUDA data on a separate stream, and the rest on the CPU at the same time."""
    streams = {span.device: torch.cuda.Stream(span.device) for span in spans if span.device.type == "cuda"}
    if streams:
        why_not = buffer.pin()
        if why_not:
            _log.warning("the memory for snapshots can't be pinned (%s), so they take longer", why_not)
    for device, stream in streams.items():
        # Kernels that the trainer has started may still write to the state.
        stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.no_grad():
            on_cpu: list[_Pair] = []
            on_other_devices: list[_Pair] = []
            for segment, span in zip(layout.segments, spans, strict=True):
                destination, source = buffer.tensor[segment.offset : segment.offset + segment.length], span.bytes()
                if span.device in streams:
                    with torch.cuda.stream(streams[span.device]):
                        destination.copy_(source, non_blocking=True)
                else:
                    (on_cpu if span.device.type == "cpu" else on_other_devices).append((destination, source))
            for destination, source in on_other_devices:
                destination.copy_(source)
            _copy_on_cpu(on_cpu)
    finally:
        # After the return the optimizer may write, and the buffer may be reused, also after an error.
        for stream in streams.values():
            stream.synchronize()


def _copy_on_cpu(pairs: Sequence[_Pair]) -> None:
    """Copy data in this machine's memory, with several threads if it is large. Return when all is done."""
    num_helpers = min(_COPY_THREADS_MAX, _cores()) - 1
    if num_helpers < 1 or sum(len(destination) for destination, _ in pairs) < _COPIED_ALONE_BYTES:
        for destination, source in pairs:
            destination.copy_(source)
        return
    jobs: deque[_Pair] = deque()
    for destination, source in pairs:
        if len(destination) <= _PIECE_BYTES:
            jobs.append((destination, source))
        else:
            jobs.extend(zip(destination.split(_PIECE_BYTES), source.split(_PIECE_BYTES), strict=True))

    def work() -> None:
        while jobs:
            try:
                destination, source = jobs.popleft()
            except IndexError:  # another thread has just taken the last one
                return
            destination.copy_(source)

    with ThreadPoolExecutor(num_helpers, COPY_THREAD_NAME) as threads:
        futures = []
        # The system has no more threads, or the interpreter ends: continue with fewer threads.
        with suppress(RuntimeError):
            for _ in range(num_helpers):
                futures.append(threads.submit(work))
        work()
    for each in futures:
        each.result()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
