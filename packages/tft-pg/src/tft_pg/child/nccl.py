"""NCCL in a child process. Law of this file: NCCL's names; see `accelerator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import final

import torch

from tft_pg.backends import gloo_table, nccl_calls
from tft_pg.backends.nccl import NCCL
from tft_pg.backends.torch_library import TorchLibrary, checked_device
from tft_pg.child.accelerator import DeviceSharing
from tft_pg.child.cuda_memory import CudaMemory, check_driver
from tft_pg.child.device import DeviceMemory
from tft_pg.child.group import ProcessGroupBaby
from tft_pg.ops import Collective
from tft_pg.settings import check_listening

__all__ = ["ProcessGroupBabyNCCL"]


@final
class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """`ProcessGroupNCCL` in a child process, for CUDA tensors. All ranks of a group must be of this class.

    The child works on the tensors in place. `wait()` orders the current stream after the operation, as soon as the
    child has started it; `wait(timeout)` and a barrier also wait on the host. A failure shows in `errored()`, and in
    every later `wait` of an operation that did not succeed. If the child is killed, streams that wait for it go on.

    Memory that torch frees with `empty_cache` stays in use while the child maps it, until the next `configure`.

    Args:
        timeout: of each operation, and of `configure` unless it is given another, in seconds or as a timedelta.
        device: a CUDA device. None or a device without an index means the current device of the thread that makes the
            group. If CUDA is not in use by then, it means the current device of the thread that configures the group.
        hostname: name or address of this machine for the other ranks; None: this machine's address on the route to the
            store.
        make_memory: a replacement of CUDA and NCCL, for tests; see `tft_pg.testing.FakeMemory`.

    Raises: UnsupportedOperationError: this torch has no NCCL, or not on this system. ConfigError: an argument, or the
        environment, is invalid.
    """

    def __init__(
        self,
        timeout: float | timedelta = 60.0,
        *,
        device: torch.device | int | str | None = None,
        hostname: str | None = None,
        make_memory: Callable[[], DeviceMemory] | None = None,
    ) -> None:
        check_listening(hostname=hostname)
        chosen = checked_device(device, NCCL)
        if make_memory is None:
            library = TorchLibrary(NCCL)
            library.check()
            check_driver()
            if chosen is None or chosen.index is None:
                chosen = library.current_device()
        index = None if chosen is None else chosen.index

        def make() -> DeviceMemory:
            return CudaMemory(torch.cuda.current_device() if index is None else index)

        super().__init__(
            timeout,
            kind="nccl" if make_memory is None else "fake nccl",
            sharing=DeviceSharing(make_memory or make, nccl_calls.lacks if make_memory is None else _fake_lacks),
            settings={"hostname": hostname},
        )

    def getBackendName(self) -> str:
        return "tft-child-nccl"


def _fake_lacks(collective: Collective, args: Sequence[object], kwargs: Mapping[str, object], world_size: int) -> str:
    return gloo_table.lacks(collective, args, kwargs)  # the fake library is over Gloo
