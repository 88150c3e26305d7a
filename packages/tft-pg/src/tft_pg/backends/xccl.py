"""Process groups over XCCL, torch's backend for Intel's XPU devices.

Torch's class can't end what runs on such a device. An abort lets go of it, tells the peers, and makes every later wait
an error, but a kernel that hangs stays until the process ends. The law of this file: XCCL's names; see `accelerator`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import final

import torch

from tft_pg.backends.accelerator import AcceleratorBackend, AcceleratorProcessGroup
from tft_pg.backends.torch_library import Library, TorchLibrary, checked_device

__all__ = ["ProcessGroupXCCL"]

_XCCL = Library(
    name="XCCL",
    torch_class="ProcessGroupXCCL",
    group="ProcessGroupXCCL",
    device_type="xpu",
    backend_type="XCCL",
    blocking_wait_envs=("TORCH_XCCL_BLOCKING_WAIT",),
    connect_limit_env="TORCH_XCCL_NONBLOCKING_TIMEOUT",
    is_abortable=False,
)


@final
class ProcessGroupXCCL(AcceleratorProcessGroup):
    """A process group over torch's XCCL.

    `wait()` of its Works puts the operation before what the current stream does next, as with torch alone;
    `wait(timeout)` and a barrier also wait on the host. A failure shows in `errored()`, and in every later `wait` of an
    operation that did not end well. Tensors on the CPU are refused. What runs on the device can't be aborted.

    Args:
        timeout: of each operation, counted from its call, and of `configure` unless it is given another.
        device: an XPU device; None, or one without an index: the one that is current for the thread that makes the
            group, if one is in use by then, else the one that is current for the thread that configures it.
        hostname: name or address of this machine that the other ranks reach it by; None: the address by which this
            machine talks to the store.
        backend: another library in the place of torch's, for tests; see `tft_pg.testing.FakeAccelerator`.

    Raises: Unsupported: this torch has no XCCL. InvalidSetting: an argument, or the environment, can't work.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        device: torch.device | int | str | None = None,
        hostname: str | None = None,
        backend: AcceleratorBackend | None = None,
    ) -> None:
        super().__init__(
            timeout,
            backend=TorchLibrary(_XCCL) if backend is None else backend,
            device=checked_device(device, _XCCL),
            hostname=hostname,
        )

    def getBackendName(self) -> str:
        return "tft-xccl"
