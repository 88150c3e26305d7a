"""torchft's interface of a transport. Law of this file: the interface alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Generic, TypeVar

__all__ = ["CheckpointTransport"]

T = TypeVar("T")


class CheckpointTransport(ABC, Generic[T]):
    """An object that sends and receives states of type T."""

    @abstractmethod
    def metadata(self) -> str:
        """Return the string that a receiver needs to reach this process."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Offer a state to these replica ranks. It may be changed after `disallow_checkpoint`."""

    def disallow_checkpoint(self) -> None:
        """Wait until the state may be changed."""

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of a replica rank at a step."""

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving. `wait`: return only after that is done."""
