"""Live state over HTTP, under torchft's names. Law of this file: names, arguments and types of errors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import tft_ckpt
from torchft._settings import certificates, secret
from torchft.checkpointing._adapting import as_urllib, limit_of
from torchft.checkpointing._dtensors import as_dtensors
from torchft.checkpointing.transport import CheckpointTransport

__all__ = ["HTTPTransport"]

T = TypeVar("T")


class HTTPTransport(CheckpointTransport[T]):
    """A transport that serves and fetches states over HTTP. Nothing is unpickled, and each chunk is checked.

    Args:
        timeout: how long the other side may be silent, and the limit of a call that gives none.
        num_chunks: connections to a source at the same time. 0: one.
    Raises: ValueError: an argument is wrong.
    """

    def __init__(self, timeout: timedelta, num_chunks: int) -> None:
        token, insecure = secret()
        self._timeout = timeout
        self._state: tuple[Any] | None = None  # the state that was offered last
        self._transport: tft_ckpt.HTTPTransport[Any] = tft_ckpt.HTTPTransport(
            timeout, num_chunks, token=token, insecure=insecure, tls=certificates()
        )

    def for_manager(self) -> tft_ckpt.CheckpointTransport[Any] | None:
        """Return tft's transport for a Manager. None: a subclass has methods of its own, which must be called."""
        names = ("send_checkpoint", "recv_checkpoint", "metadata", "disallow_checkpoint", "shutdown")
        is_own = all(getattr(type(self), name) is getattr(HTTPTransport, name) for name in names)
        return self._transport if is_own else None

    def address(self) -> str:
        """Return this process's URL."""
        return self._transport.address()

    def metadata(self) -> str:
        """Return this process's URL, for `recv_checkpoint`."""
        return self._transport.metadata()

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | None = None) -> None:
        """Offer a copy of a state, and return.

        Args:
            dst_ranks: replica ranks that will request it.
            step: committed steps.
            state_dict: the state.
            timeout: of this call. None or zero: the constructor's.
        """
        self._state = (state_dict,)
        self._transport.send_checkpoint(dst_ranks, step, state_dict, timeout or self._timeout)

    def allow_checkpoint(self, step: int) -> None:
        """Offer the last state again, under another step."""
        if self._state is not None:
            self._transport.send_checkpoint([], step, self._state[0], self._timeout)

    def disallow_checkpoint(self) -> None:
        """Return at once, because a copy is served, so the state may be changed."""
        self._transport.disallow_checkpoint()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta | None = None) -> T:
        """Fetch a state.

        Args:
            src_rank: replica rank of the source, for messages.
            metadata: of the source.
            step: committed steps.
            timeout: of this call. None: the constructor's. Zero: what is there at once.
        Returns: the state. A DTensor arrives on a mesh of the same form: see `as_dtensors`.
        Raises: urllib.error.HTTPError: the source refused. urllib.error.URLError: it can't be reached, or the time is
            up (also a TimeoutError then).
        """
        with as_urllib(metadata):
            received = self._transport.recv_checkpoint(src_rank, metadata, step, limit_of(timeout, self._timeout))
        state: T = as_dtensors(received)
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, and close the port. A second call does nothing."""
        self._state = None
        self._transport.shutdown(wait)
