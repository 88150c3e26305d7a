"""A Work that is done. Law of this file: a name."""

from __future__ import annotations

from tft_pg import DummyWork as _DummyWork

__all__ = ["_DummyWork"]
