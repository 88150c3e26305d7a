"""The encoded messages of the lighthouse: what many streams get is encoded once.

Law of this file: values to bytes, and the bytes of the last value of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

from tft_coord import LossNotice
from tft_coord.lighthouse import Quorum, QuorumNews, codec, effects, packing

_T = TypeVar("_T")


@final
class CachedEncoder(Generic[_T]):
    """An encoder that returns the same bytes again while the value stays the same object."""

    def __init__(self, encode: Callable[[_T], bytes]) -> None:
        self._encode = encode
        self._last: tuple[_T, bytes] | None = None

    def __call__(self, value: _T) -> bytes:
        if self._last is None or self._last[0] is not value:
            self._last = (value, self._encode(value))
        return self._last[1]


@final
class Encoders:
    """The encoders of one lighthouse.

    Attributes:
        notice, news: of what all members of a quorum are told.
        response: of a quorum for torchft's clients.
    """

    def __init__(self) -> None:
        self.notice: CachedEncoder[LossNotice] = CachedEncoder(
            lambda notice: codec.encode_from_lighthouse(effects.NotifyLoss(0, notice))
        )
        self.news: CachedEncoder[QuorumNews] = CachedEncoder(
            lambda news: codec.encode_from_lighthouse(effects.TellNewest(0, news))
        )
        self.response = CachedEncoder(codec.encode_lighthouse_response)
        self._quorum = CachedEncoder(codec.encode_quorum)
        self._packed = CachedEncoder(packing.pack_quorum)
        # the last answer: request, quorum, and the framed message
        self._framed: tuple[int, bytes, bytes] = (0, b"", b"")

    def answer(self, request: int, quorum: Quorum, *, packs: bool) -> bytes:
        """Return the framed answer; replicas that started together use the same request numbers, and get the same
        bytes.

        Args:
            request: the number of the request.
            quorum: the answer.
            packs: the other end can decode a packed quorum.
        """
        encoded = self._quorum(quorum)
        packs = packs and packing.is_packed(encoded)
        if packs:
            encoded = self._packed(encoded)
        if self._framed[0] != request or self._framed[1] is not encoded:
            self._framed = (request, encoded, codec.frame_quorum_answer(request, encoded, packed=packs))
        return self._framed[2]
