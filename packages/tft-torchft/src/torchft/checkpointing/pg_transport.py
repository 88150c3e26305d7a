"""Live state over a process group, under torchft's names. Law of this file: names and arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

import tft_ckpt
from torchft.checkpointing._adapting import limit_of
from torchft.checkpointing._dtensors import as_dtensors
from torchft.checkpointing.transport import CheckpointTransport

__all__ = ["PGTransport"]

T = TypeVar("T")


class PGTransport(CheckpointTransport[T]):
    """A transport over a process group, in which a replica rank is a rank.

    Args:
        pg: the group.
        timeout: how long the other side may be silent, and the limit of a call that gives none.
        device: of the group's messages.
        state_dict: returns the state to receive into, tensor by tensor. A Manager does not call it, because it loads a
            state only when it is complete.
    Raises: ValueError: an argument is wrong.
    """

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], Any] | None = None,
    ) -> None:
        self._timeout = timeout
        self._state_dict = state_dict
        self._transport: tft_ckpt.PGTransport[Any] = tft_ckpt.PGTransport(pg, timeout, torch.device(device))

    def for_manager(self) -> tft_ckpt.CheckpointTransport[Any] | None:
        """Return tft's transport for a Manager. None: a subclass has methods of its own, which must be called."""
        names = ("send_checkpoint", "recv_checkpoint", "metadata", "disallow_checkpoint", "shutdown")
        is_own = all(getattr(type(self), name) is getattr(PGTransport, name) for name in names)
        return self._transport if is_own else None

    def metadata(self) -> str:
        """Return the same string for all, because a receiver needs no address."""
        return self._transport.metadata()

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | None = None) -> None:
        """Send a state to these ranks, and return when they have it. `timeout` None: the constructor's."""
        self._transport.send_checkpoint(dst_ranks, step, state_dict, limit_of(timeout, self._timeout))

    def disallow_checkpoint(self) -> None:
        """Return at once, because no state is under way between two calls."""
        self._transport.disallow_checkpoint()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta | None = None) -> T:
        """Receive a state from a rank. `timeout` None: the constructor's.

        Returns: the state. Without `state_dict`, a DTensor arrives on a mesh of the same form: see `as_dtensors`.
        Raises: TimeoutError. tft_ckpt.CheckpointError: the source has another state, or none.
        """
        into = None if self._state_dict is None else self._state_dict()
        limit = limit_of(timeout, self._timeout)
        state: T = as_dtensors(self._transport.recv_checkpoint(src_rank, metadata, step, limit, into=into))
        return state

    def shutdown(self, wait: bool = True) -> None:
        """End running transfers. The group stays."""
        self._transport.shutdown(wait)
