"""XCCL in a child process, which torch does not make possible yet. Law of this file: XCCL's names."""

from __future__ import annotations

from datetime import timedelta
from typing import NoReturn, final

from tft_pg.child.group import ProcessGroupBaby
from tft_pg.errors import UnsupportedOperationError

__all__ = ["ProcessGroupBabyXCCL"]


@final
class ProcessGroupBabyXCCL(ProcessGroupBaby):
    """`ProcessGroupXCCL` in a child process. Torch can't share memory of an XPU with another process, so none exists.

    Args:
        timeout: as for the other groups.

    Raises: UnsupportedOperationError: always.
    """

    def __init__(self, timeout: float | timedelta = 60.0) -> None:
        raise UnsupportedOperationError(
            "ProcessGroupBabyXCCL can't exist: torch has no way to share the memory and the events of an XPU with a "
            "child process; use ProcessGroupXCCL, or ProcessGroupBabyGloo with tensors on the CPU"
        )

    def getBackendName(self) -> NoReturn:
        raise AssertionError("there is no such group")
