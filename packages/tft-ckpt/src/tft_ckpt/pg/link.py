"""One side of a conversation with one member of a process group, in which every wait is bounded.

A process group sends and receives messages, and waits. Groups differ in how they report a failed wait, and in how
another thread can end a wait. Only this file knows these differences.

A message in flight can't be called back. After an interruption, the next conversation would take such messages for its
own. So an interrupted conversation ends the group, which must be configured, or made, again.

Law of this file: messages, waiting and errors; nothing about states.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, final

import torch

from tft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    StateUnavailableError,
    TransferTimeoutError,
    TransportClosedError,
)
from tft_ckpt.state.live import bytes_of

__all__ = ["Call", "Link", "ProcessGroupLike"]

# Tags that no collective uses and that users are unlikely to choose. There are two, because the sender of a state may
# receive another state from the same member at the same time.
_SOURCE_TAG = 0x7F7C
_RECEIVER_TAG = _SOURCE_TAG + 1
_NO_MESSAGE_TAG = _SOURCE_TAG + 2
# How long a member's connection may be too busy to end.
_END_S = 1.0


def _whole_milliseconds(seconds: float) -> timedelta:
    # Torch truncates a limit to whole milliseconds. A wait that ends a little early would not count as timed out, and
    # some groups take 0 for no limit.
    return timedelta(milliseconds=max(math.ceil(seconds * 1000), 1))


class ProcessGroupLike(Protocol):
    """The required methods of a process group, which torch's groups and those of tft-pg have."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Start to send one tensor to a rank, and return the Work."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Start to receive one tensor from a rank, and return the Work."""


@final
class Call:
    """One send or receive over a group, with a deadline and a stop request that may come from any thread.

    Args:
        group: the group.
        ranks: the other members' ranks in the group.
        timeout_s: for the whole call, from now.
        silence_s: for each wait for a member that has begun to talk.

    Raises: ConfigError: the group is known to lack these members.
    """

    def __init__(self, group: ProcessGroupLike, *, ranks: Sequence[int], timeout_s: float, silence_s: float) -> None:
        self.group = group
        self._ranks = ranks
        self.timeout_s = timeout_s
        self.silence_s = silence_s
        self._deadline = time.monotonic() + timeout_s
        self._reason: str | None = None
        self._lock = threading.Lock()
        self._in_flight = 0
        if not self.may_be_configured_again:
            self._check_ranks()

    def _check_ranks(self) -> None:
        size, own = (getattr(self.group, name, None) for name in ("size", "rank"))
        if not (callable(size) and callable(own)):
            return
        for rank in self._ranks:
            if rank == own() or rank >= size():
                raise ConfigError(
                    f"rank {rank} is not another member of this process group of {size()} (own rank {own()}); give "
                    "the rank of another member"
                )

    @property
    def may_be_configured_again(self) -> bool:
        """Return whether an unusable group may be configured again as the same object."""
        return hasattr(self.group, "configure")

    def remaining_s(self) -> float:
        """Return the remaining time, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def check(self) -> None:
        """Check that the call goes on. Raises: TransportClosedError, TransferTimeoutError."""
        if self._reason is not None:
            raise TransportClosedError(self._reason)
        if not self.remaining_s():
            raise TransferTimeoutError(f"the timeout of {self.timeout_s:g} s expired", timeout_s=self.timeout_s)

    def message_started(self) -> None:
        """Record that a message is about to be in flight. Raises: as check."""
        with self._lock:
            self.check()
            self._in_flight += 1

    def message_ended(self) -> None:
        """Record that a message is no longer in flight."""
        with self._lock:
            self._in_flight -= 1

    @property
    def has_messages(self) -> bool:
        """Return whether any messages are in flight."""
        with self._lock:
            return self._in_flight > 0

    def stop(self, reason: str) -> None:
        """Make every wait raise TransportClosedError with this sentence. Any thread may call this. Only the first
        reason counts."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        if self.has_messages:  # otherwise no thread waits in the group
            self.abort_group()

    def abort_group(self) -> None:
        """End the running operations of the group, here and at its other members."""
        # The group has ended, whatever it raises.
        with suppress(Exception):
            self.group.abort()  # type: ignore[attr-defined]  # not every group has it; that error is suppressed too
        if self.may_be_configured_again or not _is_gloo(self.group):
            return
        # Torch's own Gloo group ignores abort. But a wait with an expired timeout ends its connections, except busy
        # ones. A connection that has ended accepts no new operation.
        message = torch.empty(1, dtype=torch.uint8)
        until = time.monotonic() + _END_S
        for rank in self._ranks:
            with suppress(Exception):
                while time.monotonic() < until:
                    work = self.group.recv([message], rank, _NO_MESSAGE_TAG)
                    with suppress(Exception):
                        work.wait(_whole_milliseconds(0))


def _is_gloo(group: Any) -> bool:
    for name in ("name", "getBackendName"):
        with suppress(Exception):
            if "gloo" in str(getattr(group, name)()).lower():
                return True
    return False


@final
class Link:
    """The messages to and from one member.

    Args:
        call: the call of these messages.
        rank: the member's rank in the group.
        device: the device of the group's messages.
        is_source: whether this side has the state.
    """

    def __init__(self, call: Call, *, rank: int, device: torch.device, is_source: bool) -> None:
        self._tags = (_SOURCE_TAG, _RECEIVER_TAG) if is_source else (_RECEIVER_TAG, _SOURCE_TAG)
        self.call = call
        self.rank = rank
        self.device = device
        self.name = f"replica rank {rank}"

    def send_bytes(self, data: bytes) -> None:
        """Send a message and wait until it has been sent. Raises: as end."""
        self.end(self.start_send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)))

    def receive_bytes(self, num_bytes: int, *, patience_s: float | None = None) -> bytes:
        """Wait for a message of this length.

        Args:
            num_bytes: at least 1; the caller has bounded it.
            patience_s: None: the call's silence_s.

        Raises: as end.
        """
        message = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.end(self.start_recv(message), patience_s=patience_s)
        return bytes(bytes_of(message.cpu()))

    def start_send(self, message: torch.Tensor) -> Any:
        """Start to send. No other code may write to the tensor until `end`. Raises: as end."""
        return self._start(self.call.group.send, message, self._tags[0])

    def start_recv(self, message: torch.Tensor) -> Any:
        """Start to receive into a tensor. Raises: as end."""
        return self._start(self.call.group.recv, message, self._tags[1])

    def _start(self, operation: Any, message: torch.Tensor, tag: int) -> Any:
        self.call.message_started()
        try:
            return operation([message], self.rank, tag)
        except Exception as error:
            self.call.message_ended()
            raise self._converted(error) from error

    def end(self, work: Any, *, patience_s: float | None = None) -> None:
        """Wait until a message has been sent or received.

        Raises:
            StateUnavailableError: the group, or the connection to the member, is unusable.
            TransferTimeoutError: it took too long.
            TransportClosedError: the call was stopped.
        """
        limit_s = min(self.call.silence_s if patience_s is None else patience_s, self.call.remaining_s())
        started = time.monotonic()
        try:
            work.wait(_whole_milliseconds(limit_s))
            if self.device.type != "cpu":
                # Some groups only make the device wait.
                torch.accelerator.current_stream(self.device).synchronize()
        except Exception as error:
            if time.monotonic() - started >= limit_s:
                # The message stays in flight.
                self.call.check()
                raise TransferTimeoutError(
                    f"{self.name} was silent for {limit_s:g} s; check whether it is running, or raise the timeout",
                    timeout_s=limit_s,
                ) from error
            self.call.message_ended()
            raise self._converted(error) from error
        # A group that swallows errors returns from a failed wait without an exception.
        errored = getattr(self.call.group, "errored", None)
        problem = errored() if errored is not None else None
        if problem is None or self.call.may_be_configured_again:
            self.call.message_ended()
        if problem is not None:
            raise self._converted(problem) from problem

    def _converted(self, error: Exception) -> CheckpointError:
        try:
            self.call.check()
        except CheckpointError as ended:
            return ended
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        return StateUnavailableError(f"the transfer with {self.name} was interrupted: {reason}", source=self.name)
