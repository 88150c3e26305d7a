"""Detecting replicas whose states differ: a digest of a state, and the differences between two states.

Every reduction gives all replicas the same gradients. So replicas that started from the same state hold the same state,
bit for bit, after every commit. A flipped bit, a learning rate that was set on one replica, or an incomplete load
function breaks this without an error. So each replica periodically reduces its state to a few bytes. A replica whose
bytes differ from the majority has diverged. A comparison of two states shows where.

The digest of a tensor is a sum over its 64-bit words. Each word is mixed and multiplied by an odd number for its
position. The integers wrap around, so the order in which a device adds them has no effect. A change of one word always
changes the sum. The sum is computed on the tensor's own device, so only sums leave an accelerator.

Law of this file: functions of states. Nothing is changed, and nothing is communicated.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch

from tft_algos.dtensors import is_dtensor
from tft_algos.errors import UserStateError
from tft_ckpt import StateUnsupportedError
from tft_ckpt.state.numpy_values import ARRAY
from tft_ckpt.state.tree import tensor_subclass_of
from tft_ckpt.state.walk import CONTAINERS, walk

CHUNK_WORDS: Final = 1 << 18  # maximum size of one product in memory
MOST_DIFFERENCES: Final = 16
MOST_CHARACTERS: Final = 80
SAMPLED_ELEMENTS: Final = 4096

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SPREAD: Final = -7_046_029_254_386_353_131  # 2**64 / golden ratio, as a signed word
_MIX: Final = -4_658_895_280_553_007_687


@final
class StateDigester:
    """A digest function, and the memory that it reuses: 4 MiB for each device."""

    def __init__(self) -> None:
        self._scratch: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def digest(self, state: Mapping[str, Any]) -> str:
        """Reduce a state to one number.

        Args:
            state: mappings, lists and tuples of tensors and plain data. Of a DTensor, only the part on this rank
                counts. Mappings may be in any order.
        Returns: 32 hexadecimal digits, equal for states that are equal bit for bit, also on devices of different kinds.
        Raises: UserStateError: a leaf is neither a tensor nor plain data. The message says where.
        """
        total = hashlib.blake2b(digest_size=16)
        sums: list[torch.Tensor] = []
        for path, leaf in leaves(state):
            total.update(f"{path}\0".encode(errors="surrogatepass"))
            leaf = as_tensor(leaf)
            if isinstance(leaf, torch.Tensor):
                part = local_part(leaf, path)
                total.update(f"{part.dtype} {tuple(part.shape)}\0".encode())
                sums.extend(self._sums(part))
            else:
                total.update(f"{_plain(leaf, path)}\0".encode(errors="surrogatepass"))
        for device in dict.fromkeys(one.device for one in sums):  # one wait for each device
            words = torch.stack([one for one in sums if one.device == device]).cpu()
            total.update(memory_of(as_octets(words)))
        return total.hexdigest()

    def _sums(self, part: torch.Tensor) -> Iterator[torch.Tensor]:
        octets = as_octets(part)
        whole = octets.numel() // 8 * 8
        if octets.storage_offset() % 8:
            octets = octets.clone()
        words, rest = octets[:whole].view(torch.int64), octets[whole:].to(torch.int64)
        for piece in (*words.split(CHUNK_WORDS), rest):
            if piece.numel():
                weights, scratch = (memory[: piece.numel()] for memory in self._scratch_on(piece.device))
                # With only the high bits, which hold the signs, few positions could be told apart.
                torch.bitwise_right_shift(piece, 32, out=scratch)
                yield scratch.bitwise_xor_(piece).mul_(weights).sum()

    def _scratch_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights, and scratch memory for a product."""
        if device not in self._scratch:
            words = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device) * _SPREAD
            words = (words ^ (words >> 29)) * _MIX
            self._scratch[device] = ((words ^ (words >> 32)) | 1, torch.empty_like(words))
        return self._scratch[device]


def combine(digests: Sequence[str]) -> bytes:
    """Combine the digests of the ranks, in rank order, into the digest of a replica group."""
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=16).digest()


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return where two states differ.

    Args:
        own, other: as for `StateDigester.digest`.
    Returns: path and difference for each place that differs, in the order of the paths. Values are cut to 80
        characters. For tensors, the number of different elements is given.
    """
    ours, theirs = dict(leaves(own)), dict(leaves(other))
    found = []
    for path in sorted({*ours, *theirs}):
        if path not in theirs:
            found.append((path, "is missing at the source"))
        elif path not in ours:
            found.append((path, "is missing here"))
        else:
            how = difference(ours[path], theirs[path], path)
            if how:
                found.append((path, how))
    return found


def describe(found: Sequence[tuple[str, str]]) -> str:
    """Describe the differences in one text. The first 16 are given in full."""
    if not found:
        return "no difference on this rank"
    shown = "; ".join(f"{path}: {how}" for path, how in found[:MOST_DIFFERENCES])
    more = len(found) - MOST_DIFFERENCES
    return f"{shown}; and {more} more" if more > 0 else shown


def leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield every tensor, plain value and empty container of a state with its path: `optimizer.param_groups.0.lr`.

    Mappings are walked in the order of their keys' text, so the order of insertion has no effect. An empty container is
    yielded as None.

    Raises: UserStateError: the state is nested too deep, for example because it contains itself.
    """
    try:
        for path, leaf in walk(state, sort=True):
            yield ".".join(map(str, path)), None if isinstance(leaf, CONTAINERS) else leaf
    except StateUnsupportedError as error:
        raise UserStateError(f"{error}, so it can't be compared; make it flat") from error


def as_tensor(leaf: Any) -> Any:
    """Return a numpy array as a tensor on the same memory. Any other leaf is returned unchanged."""
    subclass = tensor_subclass_of(leaf)
    return subclass.parts(leaf, "state") if subclass is not None and subclass.name == ARRAY else leaf


def local_part(leaf: torch.Tensor, path: str) -> torch.Tensor:
    """Return the part of a tensor on this rank.

    Raises: UserStateError: the tensor has no plain memory.
    """
    part = leaf.detach()
    if is_dtensor(part):
        part = part.to_local()
    if part.layout is not torch.strided or part.is_meta or part.is_quantized:
        raise UserStateError(
            f"{path} is a tensor without plain memory ({part.layout}, on {part.device}), which can't be compared; "
            "register the state that contains it with compared=False"
        )
    return part


def as_octets(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in one row."""
    # A single element is contiguous with any stride. The stride is set to 1, because a view with another dtype needs
    # this.
    row = part.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return row.as_strided(row.shape, (1,)).view(torch.uint8)


def memory_of(octets: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Expose the memory of a tensor as a buffer, without a copy and without numpy.

    Args:
        octets: contiguous uint8, on the CPU.
    Returns: a buffer that keeps the tensor alive.
    """
    memory = (ctypes.c_ubyte * octets.numel()).from_address(octets.data_ptr())
    memory.owner = octets  # type: ignore[attr-defined]
    return memory


def _plain(leaf: Any, path: str) -> str:
    # A leaf that is sent by the name of its class and is not a tensor is a numpy scalar.
    if not isinstance(leaf, _PLAIN) and (isinstance(leaf, torch.Tensor) or tensor_subclass_of(leaf) is None):
        raise UserStateError(
            f"{path} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which can't be compared; hold tensors and "
            "plain data, or register what it belongs to with compared=False"
        )
    if isinstance(leaf, float):
        return leaf.hex()
    return f"{type(leaf).__name__} {leaf!r}"


def difference(own: Any, other: Any, path: str, *, sampled: bool = False) -> str:
    """Return the difference of two leaves as text; "" if there is none.

    `sampled`: compare some elements of long tensors.

    Raises: UserStateError: a leaf can't be compared.
    """
    own, other = as_tensor(own), as_tensor(other)
    if isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor):
        ours, theirs = local_part(own, path), local_part(other, path)
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return (
                f"{ours.dtype} of shape {tuple(ours.shape)} here, {theirs.dtype} of shape {tuple(theirs.shape)} at the "
                "source"
            )
        if sampled:
            ours, theirs = _sample(ours), _sample(theirs)
        here, there = as_octets(ours).cpu(), as_octets(theirs).cpu()
        if here.equal(there):
            return ""
        unequal = here != there
        count = int(unequal.view(-1, ours.element_size()).any(dim=1).sum()) if unequal.numel() else 0
        if count == 1 == ours.numel():
            return f"{_short(ours.item())} here, {_short(theirs.item())} at the source"
        return f"{count} of {ours.numel()} elements differ" if count else ""
    if isinstance(own, torch.Tensor) or isinstance(other, torch.Tensor):
        return f"a {type(own).__name__} here, a {type(other).__name__} at the source"
    if _plain(own, path) == _plain(other, path):
        return ""
    return f"{_short(own)} here, {_short(other)} at the source"


def _sample(part: torch.Tensor) -> torch.Tensor:
    """Return a view of some elements of a tensor, at most about 4096, spread over the whole tensor."""
    for dim in range(part.dim()):
        over = -(-part.numel() // SAMPLED_ELEMENTS)
        if over <= 1:
            break
        step = min(part.shape[dim], max(1, round(over ** (1 / (part.dim() - dim)))))
        part = part[(slice(None),) * dim + (slice(None, None, step),)]
    return part


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
