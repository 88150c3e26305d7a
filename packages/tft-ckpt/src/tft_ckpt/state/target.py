"""The memory that receives a payload.

A state may arrive in new memory. The payload is then in one piece there, and its tensors use that memory. Or the state
may arrive in place, in existing tensors, without additional memory. Then each part of the payload has a place in one of
them. All other parts use a scratch buffer and are copied at the end: the padding between tensors, tensors on another
device or with other strides, very small tensors, and new tensors.

Law of this file: the writers of these places are not known here. Every byte of the payload has exactly one place, and
no two have the same. All misfits are found before the first byte.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import torch
import xxhash

from tft_ckpt.errors import CheckpointError, StateLayoutError, StateUnsupportedError
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import ALIGNMENT_BYTES, Layout, TensorLeaf, checksum, extent
from tft_ckpt.state.sharding import LocalShard, part_of
from tft_ckpt.state.tree import TensorSubclass, tensor_subclass_of

__all__ = ["Target"]

# Below this size, a separate piece costs more than a copy.
IN_PLACE_BYTES_MIN: Final = 16 << 10
DEPTH_MAX: Final = 200
_PLAIN: Final = (type(None), int, float, complex, str, bytes, torch.dtype, torch.device)
# Integer types of each size, so that the bits of any dtype can be copied between tensors with different strides.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class Target:
    """The memory that receives the payload of one layout: a fresh buffer, or existing tensors.

    Any thread may write into the pieces. After a failed receive into existing tensors, they hold a mixture of old and
    new data. Only a complete receive makes them one state again.

    Fields:
        layout: of the received state.
    """

    def __init__(self, layout: Layout, regions: Sequence[_Region], finish: Callable[[], object]) -> None:
        self.layout = layout
        self._regions = regions
        self._starts = [region.start for region in regions]
        self._finish = finish

    @classmethod
    def fresh(cls, layout: Layout, buffer: Buffer) -> Target:
        """Return a target with all of the payload in one buffer of at least layout.data_bytes, which the state's
        tensors use.
        """
        view = buffer.view[: layout.data_bytes]
        return cls(layout, [_Region(0, layout.data_bytes, view)], lambda: layout.build(buffer.view))

    @classmethod
    def into(cls, layout: Layout, state: object, allocate: Callable[[int], Buffer]) -> Target:
        """Return a target in the tensors of an existing state. Each receives the tensor at the same place in the
        layout.

        Plain data need not agree, because it comes from the source. A received tensor without a counterpart (such as
        the state of a new optimizer) gets new memory. Tensors that share memory here must share memory at the source
        too. For views with gaps a violation is not detected.

        Args:
            layout: of the received state.
            state: its tensors are written to, including DTensors and LocalShards. All other values are only read.
            allocate: called once at most, with a number of bytes, for the data that can't be written in place.

        Raises:
            StateLayoutError: a tensor has another dtype, shape or sharding than its counterpart. Or an existing tensor
                gets no data or can't be written to. Nothing has been written or allocated then.
            StateUnavailableError: not enough memory.
        """
        places = _Matching(layout, state).places()
        staged = _staged_segments(layout, places)
        in_place = [span for span in _in_place_spans(layout, places) if span.segment not in staged]
        scratch = _Scratch(layout, in_place)
        buffer = allocate(scratch.num_bytes) if scratch.num_bytes else None
        regions = scratch.regions(buffer)

        def finish() -> object:
            return _build_result(layout, places, staged, scratch, buffer)

        return cls(layout, regions, finish)

    def views(self, start: int, end: int) -> list[memoryview]:
        """Return writable views, in order, of exactly the payload bytes from start to end. They may use shared
        scratch memory.
        """
        found: list[memoryview] = []
        at = max(0, bisect.bisect_right(self._starts, start) - 1)
        while start < end:
            region = self._regions[at]
            until = min(end, region.end)
            found.append(region.view[start - region.start : until - region.start])
            start, at = until, at + 1
        return found

    def checksum(self, start: int, end: int) -> int:
        """Return the checksum of these payload bytes, as `manifest.checksum` of the joined bytes."""
        views = self.views(start, end)
        if len(views) == 1:
            return checksum(views[0])
        digest = xxhash.xxh3_64()
        for piece in views:
            digest.update(piece)
        return digest.intdigest()

    def finish(self) -> Any:
        """Return the state after the complete payload has arrived. Called once.

        Returns: containers and plain data as at the source. If the existing state has a counterpart of a tensor, it is
            that object (a parameter, a DTensor). Other tensors are in new memory, with a LocalShard for each DTensor.
        """
        return self._finish()


class _Region(NamedTuple):
    """The memory of the payload bytes from start to end."""

    start: int
    end: int
    view: memoryview


class _Place(NamedTuple):
    """A received tensor and its destination.

    Fields:
        leaf: the received tensor.
        value: its counterpart in the state: a tensor, a DTensor, a LocalShard; None: nothing.
        tensor: the plain tensor to write to, or None.
        is_alike: whether equal bytes at equal offsets make the tensor.
        has_no_gap: whether every position between its first and its last element is an element.
    """

    leaf: TensorLeaf
    value: object = None
    tensor: torch.Tensor | None = None
    is_alike: bool = False
    has_no_gap: bool = False


@final
class _Slot:
    """A placeholder for a tensor in a state that was read without its bytes."""

    __slots__ = ("leaf", "place")

    def __init__(self, leaf: TensorLeaf) -> None:
        self.leaf = leaf
        self.place = _Place(leaf)


class _Parts(NamedTuple):
    """A placeholder for a tensor of a registered subclass in such a state."""

    subclass: TensorSubclass
    path: str
    parts: object


@final
class _Matching:
    """A matching of the received state with the existing one."""

    def __init__(self, layout: Layout, state: object) -> None:
        self._slots: list[_Slot] = []
        received = layout.read(self._slot, on_subclass=_Parts)
        self._match(received, state, "state")

    def places(self) -> list[_Place]:
        """Return one place for each received tensor, in the order of the layout."""
        places = [slot.place for slot in self._slots]
        _check_overlaps(places)
        return places

    def _slot(self, leaf: TensorLeaf) -> _Slot:
        self._slots.append(_Slot(leaf))
        return self._slots[-1]

    def _match(self, received: object, existing: object, path: str, depth: int = 0) -> None:
        if depth > DEPTH_MAX:
            raise StateLayoutError(
                f"{path[:200]} is nested deeper than {DEPTH_MAX} levels in `into`; check whether it contains itself",
                path=path,
            )
        if type(received) is _Slot:
            received.place = _place(received.leaf, existing)
        elif type(received) is _Parts and type(existing) is received.subclass.cls:
            self._match(received.parts, received.subclass.parts(existing, path), f"{path}.parts", depth + 1)
        elif isinstance(existing, torch.Tensor | LocalShard):
            raise StateLayoutError(f"{path} is a tensor in `into`, but not in the source's state; {_ADVICE}", path=path)
        elif isinstance(existing, dict):
            pairs = received if isinstance(received, dict) else {}
            for key, value in existing.items():
                self._match(pairs.get(key), value, f"{path}[{_short(key)}]", depth + 1)
        elif isinstance(existing, list | tuple):
            items = received if isinstance(received, list | tuple) and type(received) is not _Parts else ()
            for index, value in enumerate(existing):
                self._match(items[index] if index < len(items) else None, value, f"{path}[{index}]", depth + 1)
        elif not isinstance(existing, _PLAIN) and tensor_subclass_of(existing) is None:
            raise StateLayoutError(
                f"{path} is a {type(existing).__module__}.{type(existing).__qualname__} in `into`, and its tensors are "
                "unknown; use dicts, lists and tensors",
                path=path,
            )


_ADVICE: Final = "receive without `into`, or use states of the same form on both sides"


def _short(key: object) -> str:
    try:
        return repr(key)[:100]
    except ValueError:  # Python refuses to print integers with thousands of decimal digits
        return type(key).__qualname__


def _place(leaf: TensorLeaf, existing: object) -> _Place:
    path = leaf.path
    try:
        part = part_of(existing, path)
    except StateUnsupportedError as error:
        raise StateLayoutError(f"can't receive into {path}: {error}", path=path) from error
    tensor = existing if part is None else part.local
    if not isinstance(tensor, torch.Tensor):
        return _Place(leaf)
    if leaf.sharding != (None if part is None else part.sharding):
        raise StateLayoutError(
            f"{path} is {leaf.sharding or 'a whole tensor'} at the source, but "
            f"{'a whole tensor' if part is None else part.sharding} in `into`; {_ADVICE}",
            path=path,
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        raise StateLayoutError(
            f"{path} is a {type(tensor).__qualname__} of layout {tensor.layout} on device {tensor.device} in `into`, "
            f"which can't receive data; {_ADVICE}",
            path=path,
        )
    if tensor.dtype != leaf.dtype or tuple(tensor.shape) != leaf.shape:
        raise StateLayoutError(
            f"{path} is {leaf.dtype} of shape {leaf.shape} at the source, but {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} in `into`; {_ADVICE}",
            path=path,
        )
    tensor = tensor.detach()
    if not leaf.length:
        return _Place(leaf, existing, tensor)
    end = (int(tensor.storage_offset()) + extent(tensor.shape, tensor.stride())) * tensor.dtype.itemsize
    if end > tensor.untyped_storage().nbytes():
        raise StateLayoutError(f"the memory of {path} in `into` was freed; {_ADVICE}", path=path)
    is_alike = tensor.stride() == leaf.stride and not (tensor.is_conj() or tensor.is_neg())
    has_no_gap = tensor.is_contiguous() or _has_no_gap(tensor)
    if not (_has_no_overlap(tensor) or (is_alike and has_no_gap)):
        raise StateLayoutError(
            f"several elements of {path} share memory in `into` (strides {tensor.stride()}), so it can't hold the "
            f"received data; {_ADVICE}",
            path=path,
        )
    return _Place(leaf, existing, tensor, is_alike, has_no_gap)


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of the dimensions with more than one element, smallest stride first."""
    return sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _has_no_gap(tensor: torch.Tensor) -> bool:
    reach = 1
    for step, size in _steps(tensor):
        if step > reach:
            return False
        reach += step * (size - 1)
    return True


def _has_no_overlap(tensor: torch.Tensor) -> bool:
    """Return whether all elements have separate memory, as far as a simple check shows."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for step, size in _steps(tensor):
        if step < reach:
            return False
        reach += step * (size - 1)
    return True


def _check_overlaps(places: Sequence[_Place]) -> None:
    """Check that no memory receives two different tensors. Raises: StateLayoutError."""
    spans = []
    for place in places:
        tensor, leaf = place.tensor, place.leaf
        if tensor is None or not leaf.length or not place.has_no_gap:
            continue
        start = tensor.data_ptr()
        # Equal marks mean that overlapping memory holds the same payload bytes.
        mark = leaf.offset - start if place.is_alike else (leaf.offset, start, leaf.stride, tensor.stride())
        end = start + extent(tensor.shape, tensor.stride()) * tensor.dtype.itemsize
        spans.append((str(tensor.device), start, end, mark, leaf.path))
    spans.sort(key=lambda span: span[:2])
    last: tuple[str, int, int, object, str] | None = None
    for span in spans:
        if last is not None and span[0] == last[0] and span[1] < last[2]:
            if span[3] != last[3]:
                raise StateLayoutError(
                    f"{span[4]} and {last[4]} share memory in `into`, but not at the source; {_ADVICE}", path=span[4]
                )
            if span[2] <= last[2]:
                continue
        last = span


class _InPlaceSpan(NamedTuple):
    """The payload bytes from start to end, in one piece in an existing tensor."""

    start: int
    end: int
    address: int
    segment: int
    owner: torch.Tensor


def _staged_segments(layout: Layout, places: Sequence[_Place]) -> set[int]:
    """Return the indices of the segments that can't be received in place."""
    staged = {index for index, segment in enumerate(layout.segments) if segment.length < IN_PLACE_BYTES_MIN}
    # In one segment, all tensors must have the same relative places here as in the payload. Each byte must be covered
    # by a tensor without gaps.
    shifts: dict[int, int] = {}
    for place in places:
        leaf, tensor = place.leaf, place.tensor
        if not leaf.length or leaf.segment in staged:
            continue
        fits_in_place = tensor is not None and tensor.device.type == "cpu" and place.is_alike
        shift = tensor.data_ptr() - leaf.offset if tensor is not None else 0
        if not fits_in_place or shifts.setdefault(leaf.segment, shift) != shift:
            staged.add(leaf.segment)
    spans = _in_place_spans(layout, places)
    starts = [span.start for span in spans]
    for place in places:
        leaf = place.leaf
        if leaf.length and leaf.segment not in staged and not place.has_no_gap:
            at = bisect.bisect_right(starts, leaf.offset) - 1
            if at < 0 or spans[at].end < leaf.offset + leaf.length:
                staged.add(leaf.segment)
    return staged


def _in_place_spans(layout: Layout, places: Sequence[_Place]) -> list[_InPlaceSpan]:
    """Return the runs in tensors without gaps, in payload order. They are correct for segments that are not staged."""
    found: list[_InPlaceSpan] = []
    for place in sorted(places, key=lambda place: place.leaf.offset):
        leaf, tensor = place.leaf, place.tensor
        if tensor is None or not leaf.length or not place.is_alike or not place.has_no_gap:
            continue
        end = leaf.offset + leaf.length
        # Adjacent runs stay separate, because they may be adjacent by chance and have different owners.
        if found and found[-1].segment == leaf.segment and leaf.offset < found[-1].end:
            if end > found[-1].end:
                found[-1] = found[-1]._replace(end=end)
        else:
            found.append(_InPlaceSpan(leaf.offset, end, tensor.data_ptr(), leaf.segment, tensor))
    return found


def _view(span: _InPlaceSpan) -> memoryview:
    memory = (ctypes.c_ubyte * (span.end - span.start)).from_address(span.address)
    # The view keeps the array, and so the storage, as long as the view exists.
    memory.owner = span.owner.untyped_storage()  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


@final
class _Scratch:
    """Memory for the payload parts without a place in an existing tensor, in payload order."""

    def __init__(self, layout: Layout, in_place: Sequence[_InPlaceSpan]) -> None:
        self._in_place = in_place
        # (first byte in the payload, byte after the last, first byte in the scratch)
        self._gaps: list[tuple[int, int, int]] = []
        self.num_bytes = 0
        at = 0
        for span in in_place:
            self._add(at, span.start)
            at = span.end
        self._add(at, layout.data_bytes)

    def _add(self, start: int, end: int) -> None:
        if start < end:
            # Segments begin at multiples of 64 in the payload, and also in the scratch.
            place = -(-self.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + start % ALIGNMENT_BYTES
            self._gaps.append((start, end, place))
            self.num_bytes = place + end - start

    def regions(self, buffer: Buffer | None) -> list[_Region]:
        """Return the regions of the whole payload."""
        found = [_Region(span.start, span.end, _view(span)) for span in self._in_place]
        if buffer is not None:
            for start, end, place in self._gaps:
                found.append(_Region(start, end, buffer.view[place : place + end - start]))
        return sorted(found, key=lambda region: region.start)

    def place_of(self, offset: int) -> int:
        """Return the scratch offset of a payload byte that is in the scratch."""
        start, _, place = self._gaps[bisect.bisect_right(self._gaps, (offset, 1 << 62, 0)) - 1]
        return place + offset - start


def _build_result(
    layout: Layout, places: Sequence[_Place], staged: set[int], scratch: _Scratch, buffer: Buffer | None
) -> object:
    storages: dict[int, torch.UntypedStorage] = {}

    def storage_of(index: int) -> torch.UntypedStorage:
        if index not in storages:
            assert buffer is not None
            segment = layout.segments[index]
            storages[index] = torch.frombuffer(
                buffer.view, dtype=torch.uint8, count=segment.length, offset=scratch.place_of(segment.offset)
            ).untyped_storage()
        return storages[index]

    def values() -> Iterator[object]:
        for place in places:
            leaf = place.leaf
            storage = storage_of(leaf.segment) if leaf.segment in staged else None
            if place.tensor is None:
                yield layout.value(leaf, storage)
                continue
            if storage is not None:
                _copy_to_place(place, layout.tensor(leaf, storage))
            elif leaf.length and not place.tensor.is_inference():
                torch.autograd.graph.increment_version(place.tensor)
            yield place.value

    results = values()
    return layout.read(lambda leaf: next(results))


def _copy_to_place(place: _Place, received: torch.Tensor) -> None:
    tensor = place.tensor
    assert tensor is not None
    try:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if not _has_no_overlap(tensor):
                # Elements that share memory: the raw bytes are copied, each position once.
                _bytes(tensor, place.leaf.length).copy_(_bytes(received, place.leaf.length))
            elif tensor.dtype.itemsize in _BITS and not (tensor.is_conj() or tensor.is_neg()):
                bits = _BITS[tensor.dtype.itemsize]
                tensor.view(bits).copy_(received.view(bits))
            else:
                tensor.copy_(received)
    except RuntimeError as error:
        raise CheckpointError(
            f"{place.leaf.path} was received, but can't be copied to {tensor.device}: {error}; the receiving tensors "
            "now hold a mixture of two states, so receive the state again"
        ) from error


def _bytes(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Return uint8 (num_bytes,) from the tensor's first element on."""
    offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), offset, (num_bytes,), (1,))
