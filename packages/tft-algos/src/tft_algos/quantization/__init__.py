"""Quantization of tensors: codecs with scales for each block of elements, and error feedback.

`tft_algos.collectives` reduces with these codecs over a process group, and
`Manager.allreduce(should_quantize=...)` over the participants of a step. A codec also works alone.

Law of this file: names.
"""

from tft_algos.quantization.codecs import Codec, Int4, Int8
from tft_algos.quantization.feedback import ErrorFeedback, FeedbackSlot
from tft_algos.quantization.top_k import TopK

__all__ = ["Codec", "ErrorFeedback", "FeedbackSlot", "Int4", "Int8", "TopK"]
