"""Process groups for tests: one with all members in this process, and one that injects faults into messages.

The latter wraps the group of one transport, and simulates faults of that member's network and host.

Law of this file: sends and receives of one tensor; the group does everything else.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, final

import torch
import torch.distributed as dist

from tft_ckpt.pg.link import Call, ProcessGroupLike

__all__ = ["FaultyGroup", "GroupFault", "members_of_gloo"]

BOUND_S = 30.0


def members_of_gloo(count: int) -> list[Any]:
    """Make a Gloo group of torch whose members all run in this process. Returns: the members, by rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not name it in __all__
    members: list[Any] = [None] * count

    def make(rank: int) -> None:
        members[rank] = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=BOUND_S))

    threads = [threading.Thread(target=make, args=(rank,), name="tft-ckpt-check") for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return members


@dataclass(slots=True)
class GroupFault:
    """One fault in the messages that a member sends. The kinds kill and stall also act on messages that it receives.

    Fields:
        kind: flip a bit of one message; kill the member, whose connections end; stall until `release` is set.
        message: for flip: the index of the member's message, counted from 0.
        at: for flip: the index of the byte, counted from the end if negative.
        per_cent: for kill and stall: the part of `of_bytes` that passes first.
        of_bytes: approximate length of the state.
        happened: set after the fault.
        release: set by the test to end a stall.
    """

    kind: Literal["flip", "kill", "stall"]
    message: int = 0
    at: int = 0
    per_cent: int = 0
    of_bytes: int = 0
    happened: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@final
class FaultyGroup:
    """One member's view of a group, with a fault.

    Args:
        group: the real group.
        fault: occurs once.
    """

    def __init__(self, group: ProcessGroupLike, fault: GroupFault) -> None:
        self._group = group
        self._fault = fault
        self._sent = 0
        self._passed_bytes = 0

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Send as the group does, with the fault."""
        index, self._sent = self._sent, self._sent + 1
        self._pass(tensors, rank)
        fault = self._fault
        if fault.kind == "flip" and index == fault.message:
            damaged = tensors[0].clone()
            damaged[fault.at] ^= 0x01
            fault.happened.set()
            return _Held(self._group.send([damaged], rank, tag), damaged)
        return self._group.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Receive as the group does, with the fault."""
        self._pass(tensors, rank)
        return self._group.recv(tensors, rank, tag)

    def _pass(self, tensors: list[torch.Tensor], rank: int) -> None:
        fault = self._fault
        self._passed_bytes += tensors[0].nbytes
        if (
            fault.kind == "flip"
            or fault.happened.is_set()
            or self._passed_bytes * 100 < fault.per_cent * fault.of_bytes
        ):
            return
        fault.happened.set()
        if fault.kind == "stall":
            fault.release.wait(BOUND_S)
            return
        Call(self._group, ranks=[rank], timeout_s=BOUND_S, silence_s=BOUND_S).abort_group()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@final
class _Held:
    """A Work that keeps its tensor."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, *args: Any) -> Any:
        """Wait as the Work does."""
        return self._work.wait(*args)
