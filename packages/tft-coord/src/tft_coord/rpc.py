"""grpc, imported so that a process that forks does not crash in it.

grpc's C library runs its own handlers around each fork of a process that has imported it. If another thread is inside
grpc at that moment, as this package's threads always are, the handlers log a line. Now and then they crash the child or
the parent.

The library reads `GRPC_ENABLE_FORK_SUPPORT` once, while `grpc` is imported. This module sets the variable for that
import only and then restores it, so that programs that this process starts do not inherit it. A variable that the user
has set stays.

This is the only module whose import has an effect. The law of this file: every other module imports grpc from here.
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
"""Whether other code imported grpc first, so that this module could not set the variable."""

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
    """Log that grpc's fork handlers are active, if they are because grpc was imported too early."""
    if imported_before and FORK_SUPPORT_ENV not in os.environ:
        logger.warning(
            "this process forks, and grpc was imported before tft. The fork handlers of grpc log a line at each fork, "
            "and sometimes crash the child or this process; set %s=0 in this process's environment",
            FORK_SUPPORT_ENV,
        )
