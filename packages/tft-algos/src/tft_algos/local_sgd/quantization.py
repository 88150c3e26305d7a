"""The quantization of what syncs send, chosen once for all fragments.

Law of this file: from the user's argument to the quantizer of each slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final

from tft_algos.errors import ConfigError
from tft_algos.local_sgd.fragment import Fragment
from tft_algos.manager import Manager
from tft_algos.manager.reduce.quantized import Quantizer
from tft_algos.quantization import Codec, ErrorFeedback, FeedbackSlot, Int8

SyncCodec: TypeAlias = bool | Codec | ErrorFeedback


@final
class SyncQuantization:
    """How each slice of each fragment is quantized.

    Args:
        manager: of the syncs.
        chosen: the user's argument, and not False.
        fragments: whose slices are sent.
    Raises: ConfigError: the argument is wrong. UnsupportedFeatureError: a slice or the process group can't be used.
    """

    def __init__(self, manager: Manager, chosen: SyncCodec, fragments: Sequence[Fragment]) -> None:
        if not isinstance(chosen, bool | Codec | ErrorFeedback):
            raise ConfigError(
                f"should_quantize is {chosen!r}; give True, False, a codec of tft_algos.quantization, or an "
                "ErrorFeedback of this Manager"
            )
        if isinstance(chosen, ErrorFeedback) and chosen.manager is not manager:
            raise ConfigError("the ErrorFeedback belongs to another Manager; give ErrorFeedback(manager)")
        self._chosen = chosen
        self._quantizers = {
            (index, number): manager.strategy.quantizer_of(self._of(index, number), part)
            for index, fragment in enumerate(fragments)
            for number, part in enumerate(fragment.slices)
        }

    def _of(self, index: int, number: int) -> bool | Codec | FeedbackSlot:
        if isinstance(self._chosen, ErrorFeedback):
            return self._chosen.of(f"fragment {index}, slice {number}")
        return self._chosen

    def quantizer(self, index: int, number: int) -> Quantizer:
        """Return the quantizer of a slice of the fragment with this index."""
        return self._quantizers[index, number]

    def describe(self) -> str:
        """Return a text that is equal on replicas whose codes fit together."""
        codec = self._chosen.codec if isinstance(self._chosen, ErrorFeedback) else self._chosen
        return (Int8() if isinstance(codec, bool) else codec).name


def sync_quantization_of(
    manager: Manager, should_quantize: SyncCodec, fragments: Sequence[Fragment]
) -> SyncQuantization | None:
    """Return how syncs are quantized; None: they are not. Raises: as `SyncQuantization`."""
    return None if should_quantize is False else SyncQuantization(manager, should_quantize, fragments)
