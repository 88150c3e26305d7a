"""The form of rendezvous of torchft 0.3, by ordered handles. Law of this file: names."""

from __future__ import annotations

from tft_pg import ReconfigureOptions
from torchft.process_group import reconfigure_with_store

__all__ = ["ReconfigureOptions", "reconfigure_with_store"]
