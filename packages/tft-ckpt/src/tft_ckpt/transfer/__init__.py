"""Live state transfer over HTTP: `server` for the side that has the state, `client` for the side that needs it.

The server side serves, with `app`, the published state, and with `relay`, a state that is still being received. The
client side reads over one connection (`reader`) or several (`worker_pool`), as `plan` and `chunks` decide.

Law of this folder: `plan`, `chunks`, `peers`, `rate_limiter` and `routes` are pure. The other files communicate.
"""

from __future__ import annotations

from tft_ckpt.transfer.client import ReceiveReport
from tft_ckpt.transfer.transport import HTTPTransport

__all__ = ["HTTPTransport", "ReceiveReport"]
