"""Process groups over NCCL, torch's backend for CUDA devices. Law of this file: NCCL's names; see `accelerator`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import final

import torch

from tft_pg.backends import nccl_calls
from tft_pg.backends.accelerator import AcceleratorProcessGroup
from tft_pg.backends.device_library import AcceleratorBackend
from tft_pg.backends.torch_library import Library, TorchLibrary, checked_device

__all__ = ["NCCL", "ProcessGroupNCCL"]

NCCL = Library(
    name="NCCL",
    torch_class="ProcessGroupNCCL",
    group="ProcessGroupNCCL",
    device_type="cuda",
    backend_type="NCCL",
    blocking_wait_envs=("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
    connect_limit_env="TORCH_NCCL_NONBLOCKING_TIMEOUT",
    is_abortable=True,
    lacks=nccl_calls.lacks,
    fit=nccl_calls.fit,
)


@final
class ProcessGroupNCCL(AcceleratorProcessGroup):
    """A process group over torch's NCCL.

    `wait()` of its Works orders the current stream after the operation, as in torch. `wait(timeout)` and a barrier also
    wait on the host. A failure shows in `errored()`, and in every later `wait` of an operation that did not succeed.
    Tensors on the CPU are refused.

    Args:
        timeout: of each operation, counted from its call, and of `configure` unless it is given another.
        device: a CUDA device. None or a device without an index means the current device of the thread that makes the
            group. If CUDA is not in use by then, it means the current device of the thread that configures the group.
        hostname: name or address of this machine for the other ranks; None: this machine's address on the route to the
            store.
        trace_dir: the directory for the flight record of each configuration at its end, for `tft trace`. None: the
            one that TFT_TRACE_DIR names. With neither, nothing is written.
        backend: a replacement of torch's library, for tests; see `tft_pg.testing.FakeAccelerator`.

    Raises: UnsupportedOperationError: this torch has no NCCL. ConfigError: an argument, or the environment, is invalid.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        device: torch.device | int | str | None = None,
        hostname: str | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        backend: AcceleratorBackend | None = None,
    ) -> None:
        super().__init__(
            timeout,
            backend=TorchLibrary(NCCL) if backend is None else backend,
            device=checked_device(device, NCCL),
            hostname=hostname,
            trace_dir=trace_dir,
        )

    def getBackendName(self) -> str:
        return "tft-nccl"
