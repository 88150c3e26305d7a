"""The parts of a state: a manifest that describes it, and one payload of raw bytes.

The tensors of a state use storages, and several tensors may share one. Every used storage becomes one segment of the
payload, from the first used byte to the last. So shared memory stays shared, and strides stay the same. The payload is
divided into chunks of one size, each with a checksum. So a receiver can request, check and repeat any part, from any
source with the same bytes. The manifest describes all that, as JSON after a short header with a version and a checksum.

Law of this file: pure. It reads the shapes and addresses of tensors but never their memory, and it opens nothing.
`_Reader` decides what a manifest may contain, before anything is built from it.

The form, version 1: b"TFTSTATE", version u32, body length u64, xxh3-64 of (version, length, body) u64, little-endian,
and then the body. The body is an object with "key", "chunk_bytes", "segments" ([offset, length] each), "sums" (16 hex
digits for each chunk) and "state" (see `tree`).

A tensor is ["tensor", dtype, shape, stride or null, segment or -1, byte offset in segment]. A DTensor is ["shard",
shape, stride, placements, mesh shape, names of the mesh's dimensions or null, place in the mesh or null, the tensor of
the local part]. A placement is null (each process has all), the sharded dimension, or [dimension, split factor].
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
import xxhash

from tft_ckpt.errors import ConfigError, StateCorruptError, StateUnsupportedError
from tft_ckpt.key import StateKey
from tft_ckpt.state.sharding import MAX_DIMENSIONS, MAX_ELEMENTS, MAX_SIZE, LocalShard, Sharding
from tft_ckpt.state.tree import DTYPE_NAMES, DTYPES, Limits, Node, TensorSubclass, TreeReader, TreeWriter

__all__ = [
    "Layout",
    "Manifest",
    "Segment",
    "StorageSpan",
    "TensorLeaf",
    "check_chunk_bytes",
    "check_state",
    "checksum",
    "decode",
    "describe",
    "encode",
    "encode_layout",
    "extent",
]

MAGIC = b"TFTSTATE"
VERSION = 1
HEADER_BYTES = 28
ALIGNMENT_BYTES = 64
CHUNK_BYTES_MIN = 4 << 10
CHUNK_BYTES_MAX = 1 << 30

_HEADER = struct.Struct("<8sIQQ")
_CHECKSUMMED = struct.Struct("<IQ")
# The size of the largest element. A segment starts at a multiple of it in its storage, so that every offset is a whole
# number of elements.
_MAX_ITEM_BYTES = 16


def checksum(data: bytes | memoryview) -> int:
    """Return xxh3-64 of the bytes, which detects damage but not forgery."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True, slots=True)
class Segment:
    """One storage's place in the payload, in bytes. The offset is a multiple of 64."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """One tensor's place in the state and in the payload.

    Fields:
        path: its place in the state.
        dtype: its element type.
        shape, stride: in elements.
        segment: index of its segment, or -1 if it has no elements.
        offset: of its first element in the payload, in bytes.
        length: from the first byte of its first element to the last byte of its last element, in bytes.
        sharding: the sharding of the whole tensor, or None if the tensor is whole.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    segment: int
    offset: int
    length: int
    sharding: Sharding | None


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """A state without its bytes and their checksums.

    Fields:
        key: the name of the state.
        chunk_bytes: length of every chunk except the last, which may be shorter.
        segments: in the order of the payload, packed at multiples of 64 bytes.
        root: the state as JSON nodes, already validated.
    """

    key: StateKey
    chunk_bytes: int
    segments: tuple[Segment, ...]
    root: Node

    @property
    def data_bytes(self) -> int:
        """Return the length of the payload."""
        return self.segments[-1].offset + self.segments[-1].length if self.segments else 0

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks in the payload, 0 if it is empty."""
        return -(-self.data_bytes // self.chunk_bytes)

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """Return the first byte of a chunk, and the first byte after it."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.data_bytes)

    def fits(self, other: Layout) -> bool:
        """Return whether equal payload bytes mean equal chunks in both layouts."""
        return self.chunk_bytes == other.chunk_bytes and self.segments == other.segments

    def read(
        self,
        on_leaf: Callable[[TensorLeaf], object],
        *,
        on_subclass: Callable[[TensorSubclass, str, Any], object] = TensorSubclass.rebuild,
    ) -> Any:
        """Return the state with the result of on_leaf in the place of each tensor. Calls are in the order of the state.

        Args:
            on_leaf: called with each tensor's leaf.
            on_subclass: called with (subclass, path, the state of its parts) for a tensor of a registered subclass.
        """
        reader = _Reader(self.segments, limits=_NO_LIMITS, source="")
        return reader.tree(on_leaf, on_subclass=on_subclass).read(self.root)

    def tensor(self, leaf: TensorLeaf, storage: torch.UntypedStorage | None) -> torch.Tensor:
        """Return a tensor of the leaf's form on the storage with its segment's bytes. None: it has no storage."""
        if leaf.segment < 0 or storage is None:
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)
        offset = (leaf.offset - self.segments[leaf.segment].offset) // leaf.dtype.itemsize
        return torch.empty(0, dtype=leaf.dtype).set_(storage, offset, leaf.shape, leaf.stride)

    def value(self, leaf: TensorLeaf, storage: torch.UntypedStorage | None) -> torch.Tensor | LocalShard:
        """Return the leaf's tensor in its received form: a LocalShard if it is a part."""
        tensor = self.tensor(leaf, storage)
        return tensor if leaf.sharding is None else LocalShard(tensor, leaf.sharding)

    def build(self, data: memoryview) -> Any:
        """Build the state with tensors that use the payload's memory, and a LocalShard in the place of each DTensor.

        Args:
            data: writable, at least data_bytes long, its first byte at a multiple of 64. It is not copied, and lives as
                long as any of the tensors.
        """
        # A storage for each segment. With one storage for all tensors, saving or resizing one would save or resize all.
        storages = [
            torch.frombuffer(data, dtype=torch.uint8, count=segment.length, offset=segment.offset).untyped_storage()
            for segment in self.segments
        ]
        return self.read(lambda leaf: self.value(leaf, storages[leaf.segment] if leaf.segment >= 0 else None))


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """A layout and the checksum of each of its chunks."""

    layout: Layout
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageSpan:
    """The place of one segment's bytes in the sender's memory.

    Fields:
        storage: the storage that holds them.
        device: the storage's device.
        offset: first byte in the storage.
        length: number of bytes.
    """

    storage: torch.UntypedStorage
    device: torch.device
    offset: int
    length: int

    def bytes(self) -> torch.Tensor:
        """Return uint8 (length,) on the storage's memory."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        return whole.set_(self.storage, self.offset, (self.length,), (1,))


def _no_subclass(subclass: TensorSubclass, path: str, parts: object) -> None:
    """Return None in the place of a tensor if only the state's form matters. This calls no registered function."""


_NO_LIMITS = Limits(manifest_bytes=1 << 62, nodes=1 << 62, data_bytes=1 << 62, depth=200)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last, inclusive; 0 if there are none."""
    reach = 1
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        reach += (size - 1) * step
    return reach


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Check the length of a chunk. Raises: ConfigError: it is out of range."""
    if type(chunk_bytes) is not int or not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX:
        raise ConfigError(f"chunk_bytes is {chunk_bytes!r}; give {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}")


def describe(
    state: object, *, key: StateKey, chunk_bytes: int, limits: Limits
) -> tuple[Layout, tuple[StorageSpan, ...]]:
    """Describe a state without reading its bytes.

    Returns: the layout, and for each of its segments the memory to copy from.
    Raises:
        StateUnsupportedError: a leaf can't be transferred, or the state is larger than the limits.
        ConfigError: chunk_bytes is out of its range.
    """
    check_chunk_bytes(chunk_bytes)
    plan = _SegmentPlan(limits)
    root = TreeWriter(plan.add, limits=limits).write(state)
    segments, sources = plan.finish()
    layout = Layout(key=key, chunk_bytes=chunk_bytes, segments=segments, root=root)
    if layout.data_bytes > limits.data_bytes:
        raise StateUnsupportedError(
            f"the state's tensors have {layout.data_bytes} bytes, above the limit of {limits.data_bytes}", path="state"
        )
    return layout, sources


def check_state(state: object, *, chunk_bytes: int, limits: Limits) -> None:
    """Check that a state can be transferred, without reading or copying its bytes.

    Raises: StateUnsupportedError: a leaf can't be transferred, or the state is larger than the limits.
    """
    key = StateKey(quorum_id=0, nonce=0, step=0, lineage=0)
    layout, _ = describe(state, key=key, chunk_bytes=chunk_bytes, limits=limits)
    encode_layout(layout, limits=limits)


@final
class _SegmentPlan:
    """A collector of tensors, which then gives every storage its place in the payload."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # If two storages begin at one address, the longer one covers both.
        self._storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        self._spans: dict[tuple[torch.device, int], tuple[int, int]] = {}
        self._pending: list[tuple[list[Node], tuple[torch.device, int], int]] = []

    def add(self, path: str, tensor: torch.Tensor) -> list[Node]:
        tensor = _plain(path, tensor)
        shape, stride = list(tensor.shape), list(tensor.stride())
        if len(shape) > MAX_DIMENSIONS or max(shape + stride, default=0) > MAX_SIZE:
            raise StateUnsupportedError(f"{path} has a shape or stride above the limits: {shape}, {stride}", path=path)
        node = [
            "tensor",
            DTYPE_NAMES[tensor.dtype],
            shape,
            None if tuple(stride) == _contiguous(shape) else stride,
            -1,
            0,
        ]
        if tensor.numel() == 0:
            return node
        storage = tensor.untyped_storage()
        start = int(tensor.storage_offset()) * tensor.dtype.itemsize
        num_elements = extent(shape, stride)
        end = start + num_elements * tensor.dtype.itemsize
        if tensor.numel() > num_elements and tensor.numel() * tensor.dtype.itemsize > self._limits.data_bytes:
            raise StateUnsupportedError(
                f"{path} has {tensor.numel()} elements that share memory, and a copy of it would exceed the limit of "
                f"{self._limits.data_bytes} bytes; send the tensor that it was expanded from",
                path=path,
            )
        if end > storage.nbytes():
            raise StateUnsupportedError(
                f"{path} needs {end} bytes, but its storage has {storage.nbytes()} because its memory was freed; take "
                "the state while the parameters are allocated",
                path=path,
            )
        where = (tensor.device, storage.data_ptr())
        known = self._storages.get(where)
        if known is None or known.nbytes() < storage.nbytes():
            self._storages[where] = storage
        low, high = self._spans.get(where, (start, end))
        self._spans[where] = (min(low, start), max(high, end))
        self._pending.append((node, where, start))
        return node

    def finish(self) -> tuple[tuple[Segment, ...], tuple[StorageSpan, ...]]:
        segments: list[Segment] = []
        sources: list[StorageSpan] = []
        places: dict[tuple[torch.device, int], tuple[int, int]] = {}
        end = 0
        for where, (low, high) in self._spans.items():
            low -= low % _MAX_ITEM_BYTES
            places[where] = (len(segments), low)
            segments.append(Segment(offset=_aligned(end), length=high - low))
            sources.append(StorageSpan(storage=self._storages[where], device=where[0], offset=low, length=high - low))
            end = segments[-1].offset + segments[-1].length
        for node, where, start in self._pending:
            index, low = places[where]
            node[4:] = [index, start - low]
        return tuple(segments), tuple(sources)


def _plain(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a form whose storage holds its values. Otherwise raise a refusal with its path."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        raise StateUnsupportedError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass, which can't be transferred; "
            "register it on both sides with tft_ckpt.register_tensor_subclass, or send its plain tensors",
            path=path,
        )
    if tensor.is_meta:
        raise StateUnsupportedError(f"{path} is on the meta device and has no values; materialize it first", path=path)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in DTYPE_NAMES:
        raise StateUnsupportedError(
            f"{path} is a {tensor.layout} tensor of {tensor.dtype}, which can't be transferred; make it a dense one",
            path=path,
        )
    return tensor.detach().resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def encode_layout(layout: Layout, *, limits: Limits) -> bytes:
    """Return the manifest's body up to the checksums, which are known last.

    Raises: StateUnsupportedError: with the checksums the body exceeds the limits.
    """
    fields = {
        "key": str(layout.key),
        "chunk_bytes": layout.chunk_bytes,
        "segments": [[segment.offset, segment.length] for segment in layout.segments],
        "state": layout.root,
    }
    body = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii")[:-1] + b',"sums":"'
    length = HEADER_BYTES + len(body) + 16 * layout.num_chunks + 2
    if length > limits.manifest_bytes:
        raise StateUnsupportedError(
            f"the state's plain data and names take {length} bytes, above the limit of {limits.manifest_bytes}; "
            "store large data in tensors",
            path="state",
        )
    return body


def encode(body: bytes, checksums: Sequence[int]) -> bytes:
    """Return the encoded manifest, from the result of encode_layout and the checksum of every chunk."""
    body += b"".join(value.to_bytes(8, "big") for value in checksums).hex().encode("ascii") + b'"}'
    return _header(body, VERSION) + body


def _header(body: bytes, version: int) -> bytes:
    checksummed = _CHECKSUMMED.pack(version, len(body))
    return _HEADER.pack(MAGIC, version, len(body), checksum(checksummed + body))


def decode(data: bytes, *, limits: Limits, source: str = "") -> Manifest:
    """Parse an untrusted manifest.

    Args:
        data: the output of `encode`; the caller has bounded its length by limits.manifest_bytes.
        limits: larger states are refused; this function allocates no memory for the payload.
        source: the source's address, for the errors.

    Raises:
        StateCorruptError: it is damaged, or no honest source would send it.
        StateUnsupportedError: it has another version, or holds a named tuple or a tensor subclass that is not
            registered here.
    """

    def fail(sentence: str) -> NoReturn:
        raise StateCorruptError(
            f"the manifest{f' from {source}' if source else ''} is damaged: {sentence}", part="manifest", source=source
        )

    if len(data) > limits.manifest_bytes:
        fail(f"it has {len(data)} bytes, above the limit of {limits.manifest_bytes}")
    if len(data) < HEADER_BYTES:
        fail(f"it ends after {len(data)} bytes")
    magic, version, length, expected = _HEADER.unpack_from(data)
    body = data[HEADER_BYTES:]
    if magic != MAGIC or length != len(body):
        fail("its header is not a manifest header, or has another length")
    if checksum(_CHECKSUMMED.pack(version, length) + body) != expected:
        fail("its checksum does not match")
    if version != VERSION:
        raise StateUnsupportedError(
            f"{source or 'the source'} sends manifests of version {version}, but this process reads version {VERSION}; "
            "install the same release of tft-ckpt everywhere",
            path="state",
        )
    try:
        fields = json.loads(
            body.decode("ascii"),
            object_pairs_hook=_only_once,
            parse_constant=_no_constant,
            parse_int=_short_int,
        )
    except (ValueError, RecursionError):
        fail("its body can't be read")
    if type(fields) is not dict or set(fields) != {"key", "chunk_bytes", "segments", "sums", "state"}:
        fail("its fields are not those of version 1")
    return _checked(fields, limits=limits, source=source, fail=fail)


def _only_once(pairs: list[tuple[str, Node]]) -> dict[str, Node]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _short_int(text: str) -> int:
    if len(text) > 20:
        raise ValueError("an integer is too long")
    return int(text)


def _checked(fields: dict[str, Node], *, limits: Limits, source: str, fail: Any) -> Manifest:
    try:
        key = StateKey.parse(fields["key"])
        checksums = bytes.fromhex(fields["sums"])
    except (TypeError, ValueError):
        fail("its key or its checksums can't be read")
    chunk_bytes = fields["chunk_bytes"]
    if type(chunk_bytes) is not int or not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX:
        fail("its chunk_bytes is out of range")
    segments = _checked_segments(fields["segments"], limits=limits, fail=fail)
    layout = Layout(key=key, chunk_bytes=chunk_bytes, segments=segments, root=fields["state"])
    if len(checksums) != 8 * layout.num_chunks:
        fail(f"it has {len(checksums) // 8} checksums for {layout.num_chunks} chunks")
    reader = _Reader(segments, limits=limits, source=source)
    reader.tree(lambda leaf: None, on_subclass=_no_subclass).read(layout.root)
    return Manifest(layout, tuple(int.from_bytes(checksums[at : at + 8], "big") for at in range(0, len(checksums), 8)))


def _checked_segments(nodes: Node, *, limits: Limits, fail: Any) -> tuple[Segment, ...]:
    if type(nodes) is not list or len(nodes) > limits.nodes:
        fail("its segments are not a list, or are too many")
    segments: list[Segment] = []
    end = 0
    for node in nodes:
        if type(node) is not list or len(node) != 2 or any(type(number) is not int for number in node):
            fail("a segment is not two numbers")
        offset, length = node
        if offset != _aligned(end) or length < 1:
            fail(f"segment {len(segments)} does not follow the one before it")
        end = offset + length
        if end > limits.data_bytes:
            fail(f"its data has {end} bytes or more, above the limit of {limits.data_bytes}")
        segments.append(Segment(offset=offset, length=length))
    return tuple(segments)


@final
class _Reader:
    """A reader of tensor nodes, which checks them against their segments."""

    def __init__(self, segments: Sequence[Segment], *, limits: Limits, source: str) -> None:
        self._segments = segments
        self._limits = limits
        self._source = source

    def tree(
        self,
        on_leaf: Callable[[TensorLeaf], object],
        *,
        on_subclass: Callable[[TensorSubclass, str, Any], object],
    ) -> TreeReader:
        """Return a reader of one whole state. It calls on_leaf with each TensorLeaf and puts the result in its
        place.
        """

        def on_tensor(path: str, node: Node, sharding: Sharding | None) -> object:
            return on_leaf(self._leaf(path, node, sharding, reader))

        reader = TreeReader(on_tensor, on_subclass=on_subclass, limits=self._limits, source=self._source)
        return reader

    def _leaf(self, path: str, node: Node, sharding: Sharding | None, reader: TreeReader) -> TensorLeaf:
        if type(node) is not list or len(node) != 6 or node[0] != "tensor":
            raise reader.corrupt(path, "its tensor has an unknown form")
        if type(node[1]) is not str or node[1] not in DTYPES:
            raise reader.corrupt(path, "its tensor has an unknown dtype")
        dtype = DTYPES[node[1]]
        shape = self._sizes(node[2], path, reader)
        stride = _contiguous(shape) if node[3] is None else self._sizes(node[3], path, reader)
        segment, offset = node[4], node[5]
        if len(stride) != len(shape) or type(segment) is not int or type(offset) is not int:
            raise reader.corrupt(path, "its tensor's stride, segment or offset is invalid")
        elements = 1
        for size in shape:
            elements *= max(size, 1)
        if elements > MAX_ELEMENTS:
            raise reader.corrupt(path, "its tensor has too many elements")
        if sharding is not None:
            try:
                sharding.check_part(shape)
            except ConfigError as error:
                raise reader.corrupt(path, str(error)[:300]) from None
        length = extent(shape, stride) * dtype.itemsize
        if length == 0:
            if segment != -1 or offset != 0:
                raise reader.corrupt(path, "its tensor is empty, but has a place in the payload")
            return TensorLeaf(path, dtype, shape, stride, -1, 0, 0, sharding)
        if elements * dtype.itemsize > self._limits.data_bytes:
            # A stride of 0 puts all elements in one place, and a later copy of the tensor would be too large.
            raise reader.corrupt(path, "its tensor has more elements than the limits allow")
        if not 0 <= segment < len(self._segments) or offset < 0 or offset % dtype.itemsize:
            raise reader.corrupt(path, "its tensor is outside every segment")
        if offset + length > self._segments[segment].length:
            raise reader.corrupt(path, "its tensor extends beyond its segment")
        place = self._segments[segment].offset + offset
        return TensorLeaf(path, dtype, shape, stride, segment, place, length, sharding)

    def _sizes(self, node: Node, path: str, reader: TreeReader) -> tuple[int, ...]:
        if type(node) is not list or len(node) > MAX_DIMENSIONS:
            raise reader.corrupt(path, "its tensor's shape or stride is not a list, or is too long")
        if any(type(size) is not int or not 0 <= size <= MAX_SIZE for size in node):
            raise reader.corrupt(path, "its tensor's shape or stride has an invalid number")
        return tuple(node)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
