"""Transports on the way to a Manager of tft, and errors on the way back to code for torchft.

Law of this file: translation between the two interfaces of a transport.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from email.message import Message
from typing import Any, Final, final

import tft_ckpt
from tft_ckpt import CheckpointError, StateKey, StateMismatchError, TransferTimeoutError
from torchft.checkpointing.transport import CheckpointTransport

AT_ONCE: Final = timedelta(milliseconds=1)


class FetchError(urllib.error.HTTPError):
    """A source refused a state. Next: look at the reason in the message."""

    def __init__(self, url: str, message: str) -> None:
        super().__init__(url, 400, message, Message(), None)


class FetchTimeoutError(urllib.error.URLError, TimeoutError):
    """A state did not arrive in time. Next: allow more time, or check whether the source still runs."""


@contextmanager
def as_urllib(url: str) -> Iterator[None]:
    """Raise the errors of a receive as those of urllib.

    Raises: FetchTimeoutError, a URLError and TimeoutError: the time is up. FetchError, an HTTPError: all else.
    """
    try:
        yield
    except TransferTimeoutError as error:
        raise FetchTimeoutError(str(error)) from error
    except StateMismatchError as error:
        text = "" if error.offered is None or error.wanted is None else _mismatch(error.offered.step, error.wanted.step)
        raise FetchError(url, f"{text}{error}") from error
    except CheckpointError as error:
        raise FetchError(url, str(error)) from error


def _mismatch(serving: int, step: int) -> str:
    return f"invalid checkpoint requested, serving {serving} but got step={step}; "


def limit_of(timeout: timedelta | None, otherwise: timedelta) -> timedelta:
    """Return the time-out of one call. None: the transport's. Zero: what is there at once."""
    return otherwise if timeout is None else max(timeout, AT_ONCE)


def for_manager(transport: Any) -> tft_ckpt.CheckpointTransport[Any] | None:
    """Return a transport for tft's Manager.

    Those of this package hold one. One that a user wrote for torchft is adapted, so its methods are called.
    """
    if transport is None or isinstance(transport, tft_ckpt.CheckpointTransport):
        return transport
    own = getattr(transport, "for_manager", None)
    inner = own() if callable(own) and isinstance(transport, CheckpointTransport) else None
    return inner if isinstance(inner, tft_ckpt.CheckpointTransport) else UserTransport(transport)


@final
class UserTransport(tft_ckpt.CheckpointTransport[Any]):
    """A transport that a user wrote for torchft, for a Manager of tft.

    It knows steps and no keys, and can't be aborted. An aborted receive ends at its own time-out.

    Args:
        transport: has the methods of torchft's `CheckpointTransport`.
    """

    needs_group = True  # as in torchft, a receive begins after the group was configured, and may use it

    def __init__(self, transport: CheckpointTransport[Any]) -> None:
        self._transport = transport

    def metadata(self) -> str:
        return self._transport.metadata()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta, *, key: StateKey | None = None
    ) -> None:
        self._transport.send_checkpoint(dst_ranks, step, state_dict, timeout)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta,
        *,
        key: StateKey | None = None,
        into: Any = None,
        sources: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Any:
        try:
            return self._transport.recv_checkpoint(src_rank, metadata, step, timeout)
        except TimeoutError as error:
            raise TransferTimeoutError(str(error), timeout_s=timeout.total_seconds()) from error
        except CheckpointError:
            raise
        except Exception as error:
            raise tft_ckpt.StateUnavailableError(
                f"{type(self._transport).__name__}.recv_checkpoint raised {error!r}", source=metadata, key=key
            ) from error

    def disallow_checkpoint(self) -> None:
        self._transport.disallow_checkpoint()

    def abort(self) -> None:
        """Do nothing, because torchft's interface has no abort."""

    def shutdown(self, wait: bool = True) -> None:
        self._transport.shutdown(wait)
