"""The process group over torchcomms, which can't be had. Law of this file: the reason."""

from __future__ import annotations

raise ImportError(
    "torchft.torchcomms needs the extra tft-torchft[torchcomms], which does not exist yet, because the package "
    "torchcomms has no release that can be imported; use torchft.ProcessGroupNCCL or torchft.ProcessGroupGloo"
)
