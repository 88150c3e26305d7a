"""Streams of states, for code that imports torch's functions from here. tft itself writes and reads none.

Law of this file: names. A stream is a pickle: give `_streaming_load` weights_only=True, which is torch's default.
"""

from __future__ import annotations

from torch.distributed._serialization import _streaming_load, _streaming_save

__all__ = ["_streaming_load", "_streaming_save"]
