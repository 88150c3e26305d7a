"""Codecs: float32 numbers as small whole numbers, with one float32 scale for each block.

A block becomes a row of bytes: the scale, then the codes. A code times the scale is the number again, with an error of
at most half a scale. All codes of a row depend on this block alone, so rows can be sent to different members. The codec
in `top_k` sends only a few numbers of each block.

The code is plain torch, so it runs on every device. On a CPU it works on tiles that fit into the cache, because each
operation passes over its operands once more.

Law of this file: pure functions of tensors. No process group, no state.
"""

from __future__ import annotations

import abc
import sys
from typing import Final, final

import torch

from tft_algos.dtensors import is_dtensor
from tft_algos.errors import UnsupportedFeatureError

SCALE_BYTES: Final = 4
_TILE: Final = 1 << 16  # elements: 256 KiB of float32, which fits into a core's cache
_TILE_ON_DEVICE: Final = 1 << 24
# The sum of a number and this one has the rounded number in its lowest bits, as a two's complement.
_ROUNDER: Final = 1.5 * 2.0**23
# A smaller block becomes zeros, because the inverse of its scale is not a float32.
_SMALLEST: Final = 2.0**-100

if sys.byteorder != "little":  # a row's bytes are the memory of its scale and codes
    raise UnsupportedFeatureError("quantization needs a little-endian machine; reduce without should_quantize")


class Codec(abc.ABC):
    """A codec. Objects have no state, and equal codecs have the same name.

    Attributes:
        bits: bits of a code.
        block: elements that share a row of bytes.
        is_sparse: a row has only a few numbers of its block. The reductions of such a codec need an `ErrorFeedback`,
            which keeps the others.
    """

    bits: int
    block: int
    is_sparse: bool = False
    _tile_elements: int = _TILE  # on a CPU

    @property
    def name(self) -> str:
        """Return the name, by which replicas compare their codecs."""
        return type(self).__name__

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Return the bytes of an encoded block, with its scale."""

    @property
    @abc.abstractmethod
    def relative_error(self) -> float:
        """Return the bound of the error of one number, relative to the largest absolute value in its block."""

    def num_rows(self, num_elements: int) -> int:
        """Return the number of blocks that hold so many elements."""
        return -(-num_elements // self.block)

    def quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as rows of bytes, with the shape (blocks, row_bytes) and the dtype uint8.

        A block with NaN or infinity becomes NaN, or NaN and infinity where a codec sends only a few numbers.

        Args:
            tensor: dense, of any shape and any floating-point or complex dtype. It is converted to float32.
        Raises: UnsupportedFeatureError: the tensor can't be quantized.
        """
        values = flat_float32([tensor])
        rows = torch.empty(self.num_rows(values.numel()), self.row_bytes, dtype=torch.uint8, device=values.device)
        self.encode(values, rows)
        return rows

    def dequantize(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Write the numbers of `rows` into a tensor, in place.

        Args:
            rows: of `quantize`, of a tensor with the same number of elements.
            into: as the argument of `quantize`.
        Raises: UnsupportedFeatureError: the tensor can't be quantized. ValueError: the rows belong to a tensor of
            another size, or to another codec, or are damaged.
        """
        check_quantizable(into)
        num_elements = into.numel() * (2 if into.is_complex() else 1)
        expected = (self.num_rows(num_elements), self.row_bytes)
        if tuple(rows.shape) != expected or rows.dtype != torch.uint8:
            raise ValueError(
                f"the rows have the shape {tuple(rows.shape)} and the dtype {rows.dtype}, and {type(self).__name__} "
                f"needs {expected} and torch.uint8 for {num_elements} numbers; give the rows of a tensor of that size"
            )
        values = torch.empty(num_elements, dtype=torch.float32, device=into.device)
        self.decode(rows, values)
        write_back(values, [into])

    # --- on flat float32 ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Encode numbers into rows. Rows after the last block become zeros.

        Args:
            values: float32, flat, contiguous.
            rows: uint8, with at least `num_rows` rows.
        """
        full = values.numel() // self.block
        scratch = self._scratch(values.device, min(full, self._tile(values.device)))
        for start, end in self._tiles(full, values.device):
            part = values[start * self.block : end * self.block].view(-1, self.block)
            self._encode(part, rows[start:end], scratch[: end - start])
        rest = values.numel() - full * self.block
        if rest:
            last = values.new_zeros(1, self.block)
            last[0, :rest] = values[full * self.block :]
            self._encode(last, rows[full : full + 1], torch.empty_like(last))
            full += 1
        rows[full:].zero_()

    @torch.no_grad()
    def decode(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write the numbers of rows into `values`, which are float32, flat and contiguous."""
        self._each(rows, values, add=None)

    @torch.no_grad()
    def add_to(self, rows: torch.Tensor, values: torch.Tensor, factor: float = 1.0) -> None:
        """Add the numbers of rows, times a factor, to `values`, which are float32, flat and contiguous."""
        self._each(rows, values, add=factor)

    def _each(self, rows: torch.Tensor, values: torch.Tensor, *, add: float | None) -> None:
        """Decode into `values`, or add to them, one tile after the other."""
        full, device = values.numel() // self.block, values.device
        scratch = self._scratch(device, max(1, min(full, self._tile(device))))
        for start, end in self._tiles(full, device):
            part = values[start * self.block : end * self.block].view(-1, self.block)
            self._put(rows[start:end], part, scratch[: end - start], add)
        rest = values.numel() - full * self.block
        if rest:
            tail = values[full * self.block :]
            last = values.new_zeros(1, self.block)
            last[0, :rest] = tail
            self._put(rows[full : full + 1], last, scratch[:1], add)
            tail.copy_(last[0, :rest])

    def _tile(self, device: torch.device) -> int:
        return (self._tile_elements if device.type == "cpu" else _TILE_ON_DEVICE) // self.block

    def _tiles(self, num_blocks: int, device: torch.device) -> list[tuple[int, int]]:
        tile = self._tile(device)
        return [(start, min(start + tile, num_blocks)) for start in range(0, num_blocks, tile)]

    def _scratch(self, device: torch.device, num_blocks: int) -> torch.Tensor:
        return torch.empty(num_blocks, self.block, dtype=torch.float32, device=device)

    @abc.abstractmethod
    def _encode(self, blocks: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write the rows of blocks. `blocks` and `scratch` are float32, with the shape (blocks, block)."""

    @abc.abstractmethod
    def _put(self, rows: torch.Tensor, blocks: torch.Tensor, scratch: torch.Tensor, add: float | None) -> None:
        """Write the numbers of rows into blocks, or add them times `add`. Raises: ValueError: a row is damaged."""


class ScaledCodec(Codec):
    """A codec that sends a code for every number, and one scale for each block.

    A block whose numbers are all below 2**-100 becomes zeros.

    Attributes:
        largest: the largest code. The smallest code is its negative.
    """

    largest: int

    @property
    def row_bytes(self) -> int:
        return SCALE_BYTES + self.block * self.bits // 8

    @property
    def relative_error(self) -> float:
        return 0.5 / self.largest

    def _put(self, rows: torch.Tensor, blocks: torch.Tensor, scratch: torch.Tensor, add: float | None) -> None:
        scales = rows[:, :SCALE_BYTES].view(torch.float32)
        if add is None:
            self._codes(rows, blocks)
            blocks.mul_(scales)
        else:
            self._codes(rows, scratch)
            blocks.addcmul_(scratch, scales, value=add)

    def _encode(self, blocks: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        torch.abs(blocks, out=scratch)
        peaks = scratch.amax(1, keepdim=True)
        # A comparison with NaN is false, so that a block with NaN keeps it as its scale.
        is_zero = peaks < _SMALLEST
        rows[:, :SCALE_BYTES].view(torch.float32).copy_(peaks.div(self.largest).masked_fill_(is_zero, 0.0))
        torch.mul(blocks, peaks.reciprocal_().mul_(self.largest).masked_fill_(is_zero, 0.0), out=scratch)
        self._put_codes(scratch.add_(_ROUNDER), rows)

    @abc.abstractmethod
    def _put_codes(self, rounded: torch.Tensor, rows: torch.Tensor) -> None:
        """Write codes into rows.

        Args:
            rounded: (blocks, block), each number in the range of the codes, plus `_ROUNDER`. May be overwritten.
            rows: of these blocks.
        """

    @abc.abstractmethod
    def _codes(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Write the codes of rows into float32 blocks, as numbers."""


@final
class Int8(ScaledCodec):
    """Codes of 8 bits: 25.4 % of the bytes of float32, scales included.

    The error of a number is at most 1/254 of the largest absolute value among its 256 neighbours.
    """

    bits = 8
    block = 256
    largest = 127

    def _put_codes(self, rounded: torch.Tensor, rows: torch.Tensor) -> None:
        rows[:, SCALE_BYTES:].view(torch.int8).copy_(rounded.view(torch.int32))

    def _codes(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(rows[:, SCALE_BYTES:].view(torch.int8))


@final
class Int4(ScaledCodec):
    """Codes of 4 bits: 14.1 % of the bytes of float32, scales included. Use it with `ErrorFeedback`.

    The error of a number is at most 1/14 of the largest absolute value among its 64 neighbours. Without feedback, small
    numbers beside large ones are always lost.
    """

    bits = 4
    block = 64
    largest = 7

    def _put_codes(self, rounded: torch.Tensor, rows: torch.Tensor) -> None:
        # A byte is low + 16 * high, between -119 and 119. The first half of a block has the low codes.
        half = self.block // 2
        rounded.sub_(_ROUNDER)
        low = rounded[:, :half]
        low.add_(rounded[:, half:], alpha=16)
        rows[:, SCALE_BYTES:].view(torch.int8).copy_(low)

    def _codes(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        half = self.block // 2
        low, high = into[:, :half], into[:, half:]
        low.copy_(rows[:, SCALE_BYTES:].view(torch.int8))
        torch.add(low, 8.0, out=high)
        high.div_(16.0).floor_()
        low.sub_(high, alpha=16)


# --- tensors as flat float32 ------------------------------------------------------------------------------------------


def check_quantizable(tensor: torch.Tensor) -> None:
    """Check that a tensor can be quantized.

    Raises: UnsupportedFeatureError: it is a DTensor, is not dense, has no memory, or holds whole numbers.
    """
    if is_dtensor(tensor):
        raise UnsupportedFeatureError(
            "a DTensor can't be quantized, because each rank holds a part of it; give the part: tensor.to_local()"
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.layout}"
        raise UnsupportedFeatureError(f"a tensor that is {kind} can't be quantized; give a dense one with memory")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UnsupportedFeatureError(
            f"a tensor of {tensor.dtype} can't be quantized, because its sum would be rounded; reduce it without "
            "quantization"
        )


def flat_float32(tensors: list[torch.Tensor], *, copies: bool = False) -> torch.Tensor:
    """Return the elements of tensors as one flat float32 tensor. One contiguous float32 tensor is not copied.

    Args:
        tensors: on one device.
        copies: return a copy in every case.
    Raises: UnsupportedFeatureError, as `check_quantizable`.
    """
    for tensor in tensors:
        check_quantizable(tensor)
    parts = [_real(tensor.detach()).reshape(-1) for tensor in tensors]
    if len(parts) == 1:
        return parts[0].to(torch.float32, copy=copies)
    return torch.cat([part.to(torch.float32) for part in parts])


def write_back(values: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Write the elements of a flat tensor into tensors, in place. The reverse of `flat_float32`."""
    start = 0
    for tensor in tensors:
        size = tensor.numel() * (2 if tensor.is_complex() else 1)
        part = values[start : start + size]
        start += size
        if part.data_ptr() == tensor.data_ptr() and part.dtype == tensor.dtype:
            continue  # `values` are the memory of this tensor
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if tensor.is_complex():
                # A complex number begins at an even place.
                even = part.clone() if part.storage_offset() % 2 else part
                tensor.copy_(torch.view_as_complex(even.view(*tensor.shape, 2)))
            else:
                tensor.copy_(part.view(tensor.shape))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
