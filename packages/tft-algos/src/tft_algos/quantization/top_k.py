"""A codec that sends the largest numbers of each block only, with two bits for each of them.

The pseudogradients of DiLoCo are dense, but a few of their numbers carry most of their length. So each member sends the
128 largest of every 4096 numbers, and error feedback keeps the rest for later syncs.

A row has the positions in increasing order. The upper seven bits of position number j are a one at bit `upper + j` of a
map of 256 bits, and its lower five bits follow as they are. That is seven bits for a position in place of twelve. A
number becomes its sign and one of two levels: the mean of the sizes above their mean, or of the others.

Law of this file: pure functions of tensors. No process group, no state.
"""

from __future__ import annotations

from typing import Final, final

import torch

from tft_algos.quantization.codecs import SCALE_BYTES, Codec

_SENT: Final = 128  # numbers of a block
_LOW_BITS: Final = 5  # a block has 2**5 * 128 numbers
_GROUP: Final = 8  # numbers whose largest is found first
_MAP: Final = 2 * _SENT  # bits
_SIGNS: Final = _MAP + _LOW_BITS * _SENT
_LEVELS: Final = _SIGNS + _SENT
_BITS: Final = _LEVELS + _SENT


@final
class TopK(Codec):
    """The 128 largest of 4096 numbers, with 2 bits each: 0.9 % of the bytes of float32. Only with `ErrorFeedback`.

    A number that is not sent has an error of its own size. Use this for the syncs of `DiLoCo`, not for gradients of
    every step. The members gather what all of them send, and add it in float32. So a member receives 0.9 % for each
    other member, where a ring receives up to twice the bytes of float32. In a sync of 2 members that is 0.9 % of the
    ring's bytes, of 4 members 1.8 %, of n members 0.45 % times n.

    A tensor takes at least one row of 148 bytes, so reduce large slices: `use_bucketization=True`.

    Source: arXiv 2508.15706.
    """

    bits = 2
    block = _SENT << _LOW_BITS
    is_sparse = True
    _tile_elements = 1 << 18

    @property
    def row_bytes(self) -> int:
        return SCALE_BYTES + _BITS // 8

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
        torch.abs(blocks, out=scratch)
        positions = _largest(scratch)
        values, sizes = blocks.gather(1, positions), scratch.gather(1, positions)
        above = sizes > sizes.mean(1, keepdim=True)
        low, high = _mean_where(~above, sizes), _mean_where(above, sizes)
        # All sizes are equal, up to the rounding of their mean, or not finite.
        low, high = low.where(~above.all(1, keepdim=True), high), high.where(above.any(1, keepdim=True), low)
        rows[:, :SCALE_BYTES].view(torch.bfloat16).copy_(torch.cat([low, high], 1))
        bits = torch.zeros(len(blocks), _BITS, dtype=torch.uint8, device=blocks.device)
        places = (positions >> _LOW_BITS).add_(torch.arange(_SENT, device=blocks.device))
        bits.scatter_(1, places, 1)
        lower = bits[:, _MAP:_SIGNS].view(-1, _LOW_BITS, _SENT)
        for bit in range(_LOW_BITS):
            lower[:, bit].copy_((positions >> bit) & 1)
        bits[:, _SIGNS:_LEVELS].copy_(values < 0)
        bits[:, _LEVELS:].copy_(above)
        rows[:, SCALE_BYTES:].copy_(_packed(bits))

    def _put(self, rows: torch.Tensor, blocks: torch.Tensor, scratch: torch.Tensor, add: float | None) -> None:
        bits = _unpacked(rows[:, SCALE_BYTES:])
        positions = _positions(bits)
        low, high = _levels(rows)
        values = torch.where(bits[:, _LEVELS:].bool(), high, low)
        values.mul_(1.0 - 2.0 * bits[:, _SIGNS:_LEVELS])
        if add is None:
            blocks.zero_().scatter_(1, positions, values)
        else:
            blocks.scatter_add_(1, positions, values.mul_(add))


def _largest(sizes: torch.Tensor) -> torch.Tensor:
    """Return the positions of the largest numbers of each block, in increasing order.

    The 128 largest numbers are in the 128 groups with the largest maxima, so most numbers are looked at only once.

    Args:
        sizes: (blocks, block). NaN counts as the largest.
    """
    num_groups = sizes.shape[1] // _GROUP
    members = sizes.view(-1, _GROUP, num_groups)
    groups = members.amax(1).topk(_SENT, dim=1, sorted=False).indices
    candidates = members.gather(2, groups.unsqueeze(1).expand(-1, _GROUP, -1)).flatten(1)
    best = candidates.topk(_SENT, dim=1, sorted=False).indices
    positions = groups.gather(1, best % _SENT).add_(best // _SENT, alpha=num_groups)
    return positions.sort(dim=1).values


def _mean_where(chosen: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the mean of the chosen numbers of each row, with the shape (rows, 1). NaN where none is chosen."""
    return torch.where(chosen, sizes, 0.0).sum(1, keepdim=True).div_(chosen.sum(1, keepdim=True))


def _levels(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper level of each row: float32, with the shape (rows, 1)."""
    levels = rows[:, :SCALE_BYTES].view(torch.bfloat16).float()
    return levels[:, :1], levels[:, 1:]


def _positions(bits: torch.Tensor) -> torch.Tensor:
    """Return the positions in each block: int64, with the shape (rows, 128).

    Raises: ValueError: the bits of a row name other than 128 different positions.
    """
    upper = bits[:, :_MAP]
    if bool((upper.sum(1) != _SENT).any() | upper[:, -1].any()):
        raise ValueError("a row does not name 128 of 4096 positions")
    order = torch.arange(_SENT, device=bits.device)
    positions = upper.nonzero()[:, 1].view(-1, _SENT).sub_(order).mul_(1 << _LOW_BITS)
    lower = bits[:, _MAP:_SIGNS].view(-1, _LOW_BITS, _SENT)
    for bit in range(_LOW_BITS):
        positions.add_(lower[:, bit], alpha=1 << bit)
    if bool((positions[:, 1:] <= positions[:, :-1]).any()):
        raise ValueError("a row names a position twice")
    return positions


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
