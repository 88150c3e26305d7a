"""Live state over HTTP: `server` for the side that has it, `client` for the side that needs it, `plan` what to fetch.

Law of this folder: `plan` and `routes` are pure; everything that talks is in the others.
"""

from __future__ import annotations

from tft_ckpt.http.client import ReceiveReport
from tft_ckpt.http.transport import HTTPTransport

__all__ = ["HTTPTransport", "ReceiveReport"]
