"""Persistent flat buffers, and their division into reductions.

The tensors of a fragment are adjacent in one buffer for each dtype and device. So a bucket is a slice of that buffer.
Nothing is packed into a bucket and nothing is copied back. A tensor that is larger than a bucket is cut at the end of
the bucket, and no tensor can be left out.

Law of this file: memory and its division. The meaning of the numbers is decided elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, final

import torch

from tft_algos.errors import ConfigError

Place: TypeAlias = tuple[torch.dtype, torch.device, bool]  # the last element: page-locked

MIB: Final = 1 << 20
DEFAULT_BUCKET_CAP_MB: Final = 1024
USE_BUCKETIZATION_ENV: Final = "TORCHFT_USE_BUCKETIZATION"
_VARIABLES: Final = ("TFT_USE_BUCKETIZATION", USE_BUCKETIZATION_ENV)
_WORDS: Final = {"true": True, "1": True, "false": False, "0": False}


def bucket_bytes(use_bucketization: bool | None, bucket_cap_mb: float | None, environ: Mapping[str, str]) -> int | None:
    """Return the size of one reduction.

    Args:
        use_bucketization: None: the value of TFT_USE_BUCKETIZATION or TORCHFT_USE_BUCKETIZATION, otherwise False.
        bucket_cap_mb: MiB for each bucket. None: 1024.
        environ: `os.environ`, or another mapping.
    Returns: bytes for each reduction. None: one reduction for each tensor.
    Raises: ConfigError: a value is invalid.
    """
    cap = DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < 2**33:
        raise ConfigError(f"bucket_cap_mb is {bucket_cap_mb!r}; give the size of a bucket in MiB, above zero")
    uses = use_bucketization
    if uses is None:
        name = next((name for name in _VARIABLES if environ.get(name)), None)
        text = environ[name] if name is not None else "false"
        uses = _WORDS.get(text.lower())
        if uses is None:
            raise ConfigError(f"{name} is {text[:64]!r}; give True or False")
    return max(int(cap * MIB), 1) if uses else None


@final
class SharedBuffer:
    """Memory that several `FlatBuffers` use in turn, with the size of the largest. It is allocated at the first use."""

    def __init__(self) -> None:
        self._sizes: dict[Place, int] = {}
        self._memory: dict[Place, torch.Tensor] = {}

    def reserve(self, place: Place, size: int) -> None:
        """Reserve memory for `size` elements. Call this before any memory is taken."""
        assert place not in self._memory, "room was reserved after it was taken"
        self._sizes[place] = max(self._sizes.get(place, 0), size)

    def take(self, place: Place, size: int) -> torch.Tensor:
        """Return memory for `size` elements. It holds what the last user left."""
        if place not in self._memory:
            dtype, device, pins = place
            self._memory[place] = torch.zeros(self._sizes[place], dtype=dtype, device=device, pin_memory=pins)
        return self._memory[place][:size]


@final
class FlatBuffers:
    """Buffers for some tensors, one for each dtype and device.

    Args:
        like: the tensors whose shapes, dtypes and devices the buffers match, at least one.
        device: the device of the buffers. None: the devices of the tensors.
        pin_memory: use page-locked memory, if that makes copies to an accelerator faster.
        room: memory shared with other buffers that are used at other times. None: own memory.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        *,
        device: torch.device | None = None,
        pin_memory: bool = False,
        room: SharedBuffer | None = None,
    ) -> None:
        self._shapes = [tensor.shape for tensor in like]
        self._members: dict[Place, list[int]] = {}
        pins = pin_memory and torch.accelerator.is_available()
        for index, tensor in enumerate(like):
            place = device or tensor.device
            self._members.setdefault((tensor.dtype, place, pins and place.type == "cpu"), []).append(index)
        self._room = room or SharedBuffer()
        for where, indices in self._members.items():
            self._room.reserve(where, self._size(indices))

    def _size(self, indices: Sequence[int]) -> int:
        return sum(self._shapes[index].numel() for index in indices)

    @functools.cached_property
    def flats(self) -> list[torch.Tensor]:
        """Return the buffers, one dimension each, in the order of first use."""
        return [self._room.take(place, self._size(indices)) for place, indices in self._members.items()]

    @functools.cached_property
    def views(self) -> list[torch.Tensor]:
        """Return views of the buffers, in the order and the shapes of `like`. The views are contiguous."""
        views: dict[int, torch.Tensor] = {}
        for flat, indices in zip(self.flats, self._members.values(), strict=True):
            parts = flat.split([self._shapes[index].numel() for index in indices])
            views |= {index: part.view(self._shapes[index]) for index, part in zip(indices, parts, strict=True)}
        return [views[index] for index in range(len(self._shapes))]

    def slices(self, cap_bytes: int | None) -> list[torch.Tensor]:
        """Return the slices of the buffers, one for each reduction. Together the slices hold everything.

        Args:
            cap_bytes: maximum size of a slice, at least one element. None: one slice for each tensor.
        Returns: slices of the buffers, one dimension each, in the same order on every replica.
        """
        if cap_bytes is None:
            return [view.view(-1) for view in self.views if view.numel()]
        return [
            part for flat in self.flats if flat.numel() for part in flat.split(max(cap_bytes // flat.element_size(), 1))
        ]
