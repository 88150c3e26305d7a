"""Live state over HTTP: `server` for the side that has it, `client` for the side that needs it.

The one serves with `app` what is on the shelf and, with `relay`, what is still being received; the other reads over one
connection (`reader`) or several (`workers`), as `plan` and `chunks` decide.

Law of this folder: `plan`, `chunks`, `tracker`, `pace` and `routes` are pure; everything that talks is in the others.
"""

from __future__ import annotations

from tft_ckpt.http.client import ReceiveReport
from tft_ckpt.http.transport import HTTPTransport

__all__ = ["HTTPTransport", "ReceiveReport"]
