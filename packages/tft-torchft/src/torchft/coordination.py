"""The servers and clients of coordination: torchft's public names. Law of this file: names."""

from __future__ import annotations

from torchft._torchft import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerServer,
    Quorum,
    QuorumMember,
)

__all__ = ["LighthouseClient", "LighthouseServer", "ManagerServer", "ManagerClient", "Quorum", "QuorumMember"]  # noqa: RUF022  # torchft's order
