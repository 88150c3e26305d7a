"""grpc, imported so that a process that forks does not crash in it.

grpc's C library runs handlers of its own around each fork of a process that has imported it. Where another thread is
inside grpc at that moment, and ours always is, they log a line, and now and then they crash the child or the parent.
The library reads `GRPC_ENABLE_FORK_SUPPORT` once, while `grpc` is imported, so it is set for the length of that import
and then put back: programs that this process starts do not inherit it. A user who has set the variable has decided.

This is our one module whose import does something. The law of this file: every other module imports grpc from here.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

__all__ = ["grpc"]

logger = logging.getLogger(__name__)

FORK_SUPPORT_ENV: Final = "GRPC_ENABLE_FORK_SUPPORT"

imported_before: Final = "grpc" in sys.modules
"""Whether somebody else imported grpc first, so that this module had no say."""

_is_ours: Final = not imported_before and FORK_SUPPORT_ENV not in os.environ
if _is_ours:
    os.environ[FORK_SUPPORT_ENV] = "0"
try:
    import grpc
    import grpc.aio
finally:
    if _is_ours:
        del os.environ[FORK_SUPPORT_ENV]


def warn_of_handlers() -> None:
    """Log that grpc's fork handlers are on, where that is so because grpc was imported too early."""
    if imported_before and FORK_SUPPORT_ENV not in os.environ:
        logger.warning(
            "this process forks, and grpc was imported before tft needed it: grpc's fork handlers log a line at each "
            "fork and now and then crash the child or this process; set %s=0 in this process's environment",
            FORK_SUPPORT_ENV,
        )
