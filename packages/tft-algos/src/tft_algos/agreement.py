"""What the members of a quantized reduction must have in common, compared before they exchange its numbers.

Only rows of bytes travel. Rows of another tensor, dtype or codec would be added without an error, or end the process
if they are of another size. So each member first sends a short text of a fixed size, and all members compare all texts.
They receive the same texts, so either all of them go on or none does.

Law of this file: the text, and its comparison. What is reduced is in `collectives` and `gathered`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, final

import torch
import torch.distributed as dist

from tft_algos.errors import ContributionError
from tft_algos.quantization.codecs import Codec

Issue: TypeAlias = Callable[[Callable[[], dist.Work]], dist.Work]

HEADER_BYTES: Final = 128
_DIGEST_BYTES: Final = 8
_NOT_RECEIVED: Final = bytes(HEADER_BYTES)


def at_once(start: Callable[[], dist.Work]) -> dist.Work:
    """Start a collective."""
    return start()


def describe(codec: Codec, operation: str, tensors: Sequence[torch.Tensor]) -> str:
    """Return a text that is equal on members whose reductions fit together.

    Args:
        codec: encodes the numbers.
        operation: such as "sum".
        tensors: of the caller, with the dtypes in which they receive the result.
    """
    kinds = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in tensors)
    if len(tensors) > 1:
        kinds = f"{len(tensors)} tensors with {sum(math.prod(each.shape) for each in tensors)} numbers, {kinds}"
    return f"{codec.name} {operation} ({codec.block} numbers in {codec.row_bytes} bytes) of {kinds}"


@final
class Agreement:
    """The comparison of one reduction's text.

    Args:
        group: all its members begin the same reduction.
        text: of `describe`. A long one is sent as its beginning and a digest.
        device: of the tensors.
        issue: starts a collective, if the group is still configured as it was.
        member: what a rank of the group is called in messages.
        read_later: the texts are on a device, and the Work of the reduction does not wait for it. The caller of
            `failure` has waited.
    """

    def __init__(
        self,
        group: Any,
        text: str,
        device: torch.device,
        *,
        issue: Issue = at_once,
        member: str = "rank",
        read_later: bool = False,
    ) -> None:
        self.issue = issue
        self.read_later = read_later
        self._group = group
        self._rank: int = group.rank()
        self._member = member
        self._own = _header(text)
        self._device = device
        self._received: torch.Tensor | None = None
        self._gathering: dist.Work | None = None

    def begin(self) -> None:
        """Start the exchange of the texts. Raises: errors of the process group."""
        sent = torch.frombuffer(bytearray(self._own), dtype=torch.uint8)
        if self._device.type != "cpu":  # a copy from other memory would wait for the device
            sent = sent.pin_memory().to(self._device, non_blocking=True)
        received = torch.zeros(self._group.size() * HEADER_BYTES, dtype=torch.uint8, device=self._device)
        self._received = received
        self._gathering = self.issue(lambda: self._group._allgather_base(received, sent))

    def wait(self, timeout: timedelta | None) -> None:
        """Wait for the texts. On an accelerator, only later work on the current stream waits.

        Args:
            timeout: maximum wait. None: that of the process group.
        Raises: errors of the process group.
        """
        gathering, self._gathering = self._gathering, None
        assert gathering is not None, "the exchange of the texts has not begun"
        if timeout is None:
            gathering.wait()
        else:
            gathering.wait(timeout)

    def failure(self) -> ContributionError | None:
        """Return how another member's reduction differs from this one; None: it does not. Waits for the device."""
        assert self._received is not None, "the exchange of the texts has not begun"
        everything = bytes(self._received.tolist())
        for rank in range(len(everything) // HEADER_BYTES):
            header = everything[rank * HEADER_BYTES : (rank + 1) * HEADER_BYTES]
            if header not in (self._own, _NOT_RECEIVED):  # if the group was aborted, another error says so
                return ContributionError(
                    f"{self._member} {rank} reduces {_text(header)}, and {self._member} {self._rank} reduces "
                    f"{_text(self._own)}; the result is not used, so give the same codec, and tensors of the same "
                    "dtypes and shapes, on all of them, and run the same version",
                    replica_rank=rank,
                )
        return None


def _header(text: str) -> bytes:
    """Return a text as bytes of the fixed size."""
    encoded = text.encode()
    if len(encoded) > HEADER_BYTES:
        end = f" ... #{hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()}".encode()
        encoded = encoded[: HEADER_BYTES - len(end)] + end
    return encoded.ljust(HEADER_BYTES, b"\0")


def _text(header: bytes) -> str:
    """Return the text of a header, as far as it can be printed."""
    text = header.rstrip(b"\0").decode(errors="replace")
    return "".join(each if each.isprintable() else "?" for each in text)
