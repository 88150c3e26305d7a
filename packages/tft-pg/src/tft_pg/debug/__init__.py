"""Torch's debug server: stacks and flight records of a running process over HTTP, on one address.

Law of this folder: torch's server and torch's page are started and ended here. What they answer is torch's, except for
one handler, which its user gives.
"""

from __future__ import annotations

from tft_pg.debug.page import PagePlace
from tft_pg.debug.server import DebugServer

__all__ = ["DebugServer", "PagePlace"]
