"""A codec that sends the largest numbers of each block only, with two bits for each of them.

The pseudogradients of DiLoCo are dense, but a few of their numbers carry most of their length. So each member sends the
128 largest of every 4096 numbers, and error feedback keeps the rest for later syncs.

A row has the positions in increasing order. With 128 of them, the upper seven bits of position number j are a one at
bit `upper + j` of a map of 256 bits, and its lower five bits follow as they are. That is seven bits for a position in
place of twelve. A number becomes its sign and one of two levels: the mean of the sizes above their mean, or of the
others.

Law of this file: pure functions of tensors. No process group, no state.
"""

from __future__ import annotations

from typing import Final, final

import torch

from tft_algos.errors import ConfigError
from tft_algos.quantization.codecs import SCALE_BYTES, Codec

_BLOCK: Final = 4096
_LOW_BITS: Final = {64: 6, 128: 5, 256: 4}  # of a position, by the numbers that are sent
_GROUP: Final = 8  # numbers whose largest is found first


@final
class TopK(Codec):
    """The largest of 4096 numbers, with 2 bits each. Only with `ErrorFeedback`, for the syncs of `DiLoCo`.

    A number that is not sent has an error of its own size. The members gather what all of them send, and add it in
    float32. So a member receives the rows of every other member, where a ring receives up to twice the bytes of
    float32. In a sync of 2 members, 128 numbers are 0.9 % of the ring's bytes, and of n members 0.45 % times n.

    A tensor takes at least one row of 148 bytes, so reduce large slices: `use_bucketization=True`.

    Args:
        sent: 64, 128 or 256 of each 4096 numbers: 0.5 %, 0.9 % or 1.6 % of the bytes with 2 members.
    Raises: ConfigError: sent is another number.
    Source: arXiv 2508.15706.
    """

    bits = 2
    block = _BLOCK
    is_sparse = True
    _tile_elements = 1 << 18

    def __init__(self, sent: int = 128) -> None:
        if not isinstance(sent, int) or sent not in _LOW_BITS:
            raise ConfigError(f"TopK sends {sent!r} of {_BLOCK} numbers; give 64, 128 or 256")
        self.sent = sent
        self._low_bits = _LOW_BITS[sent]
        self._signs = (2 + self._low_bits) * sent  # the first bit of the signs. The map has two bits for a number
        self._num_bits = self._signs + 2 * sent

    @property
    def name(self) -> str:
        return f"TopK({self.sent})"

    @property
    def row_bytes(self) -> int:
        return SCALE_BYTES + self._num_bits // 8

    @property
    def relative_error(self) -> float:
        return 1.0

    def check_levels(self, rows: torch.Tensor) -> None:
        """Check that the levels of rows are finite and in order.

        Raises: ValueError: a row has other levels, as it has if a number of its block was not finite.
        """
        low, high = _levels(rows)
        wrong = ~((low >= 0) & (low <= high) & (high < torch.inf))  # a comparison with NaN is false
        if bool(wrong.any()):
            row = int(wrong.flatten().nonzero()[0])
            raise ValueError(
                f"block {row} of {len(rows)} has the levels {float(low[row]):g} and {float(high[row]):g}, so it had "
                "numbers that are not finite"
            )

    def _encode(self, blocks: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        sent, signs = self.sent, self._signs
        torch.abs(blocks, out=scratch)
        positions = _largest(scratch, sent)
        values, sizes = blocks.gather(1, positions), scratch.gather(1, positions)
        above = sizes > sizes.mean(1, keepdim=True)
        low, high = _mean_where(~above, sizes), _mean_where(above, sizes)
        # All sizes are equal, up to the rounding of their mean, or not finite.
        low, high = low.where(~above.all(1, keepdim=True), high), high.where(above.any(1, keepdim=True), low)
        rows[:, :SCALE_BYTES].view(torch.bfloat16).copy_(torch.cat([low, high], 1))
        bits = torch.zeros(len(blocks), self._num_bits, dtype=torch.uint8, device=blocks.device)
        places = (positions >> self._low_bits).add_(torch.arange(sent, device=blocks.device))
        bits.scatter_(1, places, 1)
        lower = bits[:, 2 * sent : signs].view(-1, self._low_bits, sent)
        for bit in range(self._low_bits):
            lower[:, bit].copy_((positions >> bit) & 1)
        bits[:, signs:].copy_(torch.cat([values < 0, above], 1))
        rows[:, SCALE_BYTES:].copy_(_packed(bits))

    def _put(self, rows: torch.Tensor, blocks: torch.Tensor, scratch: torch.Tensor, add: float | None) -> None:
        bits = _unpacked(rows[:, SCALE_BYTES:])
        positions = self._positions(bits)
        low, high = _levels(rows)
        is_negative, is_high = bits[:, self._signs :].split(self.sent, dim=1)
        values = torch.where(is_high.bool(), high, low).mul_(1.0 - 2.0 * is_negative)
        if add is None:
            blocks.zero_().scatter_(1, positions, values)
        else:
            blocks.scatter_add_(1, positions, values.mul_(add))

    def _positions(self, bits: torch.Tensor) -> torch.Tensor:
        """Return the positions in each block: int64, with the shape (rows, sent).

        Raises: ValueError: the bits of a row do not name so many different positions.
        """
        sent = self.sent
        upper = bits[:, : 2 * sent]
        if bool((upper.sum(1) != sent).any() | upper[:, -1].any()):
            raise ValueError(f"a row does not name {sent} of {_BLOCK} positions")
        order = torch.arange(sent, device=bits.device)
        positions = upper.nonzero()[:, 1].view(-1, sent).sub_(order).mul_(1 << self._low_bits)
        lower = bits[:, 2 * sent : self._signs].view(-1, self._low_bits, sent)
        for bit in range(self._low_bits):
            positions.add_(lower[:, bit], alpha=1 << bit)
        if bool((positions[:, 1:] <= positions[:, :-1]).any()):
            raise ValueError("a row names a position twice")
        return positions


def _largest(sizes: torch.Tensor, sent: int) -> torch.Tensor:
    """Return the positions of the largest numbers of each block, in increasing order.

    The largest numbers are in as many groups with the largest maxima, so most numbers are looked at only once.

    Args:
        sizes: (blocks, block). NaN counts as the largest.
        sent: number of positions.
    """
    num_groups = sizes.shape[1] // _GROUP
    members = sizes.view(-1, _GROUP, num_groups)
    groups = members.amax(1).topk(sent, dim=1, sorted=False).indices
    candidates = members.gather(2, groups.unsqueeze(1).expand(-1, _GROUP, -1)).flatten(1)
    best = candidates.topk(sent, dim=1, sorted=False).indices
    positions = groups.gather(1, best % sent).add_(best // sent, alpha=num_groups)
    return positions.sort(dim=1).values


def _mean_where(chosen: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the mean of the chosen numbers of each row, with the shape (rows, 1). NaN where none is chosen."""
    return torch.where(chosen, sizes, 0.0).sum(1, keepdim=True).div_(chosen.sum(1, keepdim=True))


def _levels(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper level of each row: float32, with the shape (rows, 1)."""
    levels = rows[:, :SCALE_BYTES].view(torch.bfloat16).float()
    return levels[:, :1], levels[:, 1:]


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Return bits as bytes, eight to a byte. The first bit of a byte is its lowest."""
    columns = bits.view(len(bits), -1, 8)
    packed = columns[:, :, 0].clone()
    for bit in range(1, 8):
        packed.add_(columns[:, :, bit], alpha=1 << bit)
    return packed


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits of `_packed`: uint8, zeros and ones."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(2) >> shifts).bitwise_and_(1).view(len(packed), -1)
