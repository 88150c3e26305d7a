"""The transfer of a state from a process that has it to a process that needs it.

The source reports its address once (`metadata`), offers its state at a step boundary (`send_checkpoint`), and continues
training. The receiver gets the address and the name of the state from its quorum. It requests the state
(`recv_checkpoint`) and waits.

Law of this file: the interface alone. Names and positional order match torchft's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import ClassVar, Generic, TypeVar

from tft_ckpt.errors import ConfigError
from tft_ckpt.key import StateKey

__all__ = ["CheckpointTransport", "StagedCheckpoint"]

T = TypeVar("T")


class StagedCheckpoint(ABC):
    """A copy of a state without a name yet. One call of either method ends it, from any thread."""

    @abstractmethod
    def offer(self, dst_ranks: list[int], *, key: StateKey) -> None:
        """Publish the copy under a name, in place of the previous state, and return at once.

        Args:
            dst_ranks: replica ranks that will request it; may be empty.
            key: the name of the state.

        Raises: TransportClosedError.
        """

    @abstractmethod
    def drop(self) -> None:
        """Discard the unused copy and release its memory, which the next copy may use."""


class CheckpointTransport(ABC, Generic[T]):
    """An object that sends and receives states of type T, usually a state dict. Each training process has one.

    If the key is None on both sides, it means StateKey(0, 0, step, 0).

    Attributes:
        stages: whether the transport can copy a state before its name is known, by `stage_checkpoint`.
        needs_group: whether states travel over the process group of a quorum. A Manager then receives a state only
            after it has configured its group for the quorum, and a receive ends with that group.
    """

    stages: ClassVar[bool] = False
    needs_group: bool = False

    @abstractmethod
    def metadata(self) -> str:
        """Return the string that a receiver passes to recv_checkpoint to reach this process. Constant until
        shutdown.
        """

    @abstractmethod
    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta, *, key: StateKey | None = None
    ) -> None:
        """Offer a state, on the training thread, at a step boundary.

        Args:
            dst_ranks: replica ranks that will request it; may be empty.
            step: committed steps.
            state_dict: the state. The caller may change it after disallow_checkpoint.
            timeout: for the call.
            key: the name of the state; its step equals `step`.

        Raises:
            StateUnsupportedError: a leaf can't be transferred. Waiting receivers are notified.
            TransferTimeoutError: the call took longer than `timeout`. Waiting receivers are notified.
            ConfigError, TransportClosedError.
        """

    def refuse_checkpoint(
        self, step: int, sentence: str, *, key: StateKey | None = None, dst_ranks: Sequence[int] = ()
    ) -> None:
        """Report, in place of `send_checkpoint`, that this process can't give the state, and why.

        A caller may also call this after `send_checkpoint` has raised, with the same key, because that call may have
        failed before it informed any receiver. Receivers that wait for the state get the sentence, if the transport can
        reach them. By default it can't, and they wait until their timeout. A receiver that can't be reached also waits
        until its timeout, and that is no error.

        Args:
            step: committed steps.
            sentence: the reason; it may be cut.
            key: the name of the state; its step equals `step`.
            dst_ranks: replica ranks that will request it. A transport that sends to its receivers informs only these.

        Raises: ConfigError, TransportClosedError.
        """

    def check_state(self, state_dict: T) -> None:
        """Check that a state can be transferred, before a receiver requests it. Nothing is copied.

        A transport without its own version of this method refuses such a state only when it sends.

        Raises: StateUnsupportedError: a leaf can't be transferred, or the state is too large.
        """

    def stage_checkpoint(self, state_dict: T, timeout: timedelta) -> StagedCheckpoint:
        """Copy a state that a receiver may request soon, on the training thread, at a step boundary.

        A published state without readers is removed, so that its memory can be used.

        Args:
            state_dict: the state. The caller may change it when this call returns.
            timeout: for the call.

        Raises:
            StateUnsupportedError: a leaf can't be transferred.
            StateUnavailableError: not enough memory.
            TransferTimeoutError: the call took longer than `timeout`.
            ConfigError: this transport can't stage. TransportClosedError.
        """
        raise ConfigError(f"a {type(self).__name__} can't stage a state; check its `stages` first")

    @abstractmethod
    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta,
        *,
        key: StateKey | None = None,
        into: T | None = None,
        sources: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> T:
        """Fetch a state, and wait for a source that has not offered it yet.

        A DTensor in the source's state arrives as a LocalShard, because a mesh can't be transferred. The receiver makes
        a DTensor of it with `to_dtensor`. With `into`, the result holds the DTensor of `into` instead.

        Args:
            src_rank: replica rank of the source, for messages.
            metadata: the source's.
            step: committed steps.
            timeout: for the call, waiting included.
            key: the name of the state; its step equals `step`.
            into: a state of the same form. Its tensors receive the data, and no other code may use them during the
                call. If the call fails after bytes have arrived, they hold a mixture of two states, until a later call
                succeeds. A CheckpointError then says so at the end of its message; otherwise the tensors are unchanged.
                Values without a tensor in `into` arrive in new memory.
            sources: metadata of other sources with the same state, as fallbacks.
            progress: called with (received and checked bytes, all bytes), on the calling thread.
            cancelled: called several times a second, on the calling thread; True ends the call.

        Raises:
            StateUnavailableError: no source can give it.
            StateMismatchError: the sources have another state.
            StateCorruptError: a source sends damaged data, and no other source helped.
            StateUnsupportedError: it holds a value that this process can't rebuild.
            StateLayoutError: it does not fit `into`.
            TransferTimeoutError: the timeout expired.
            TransportClosedError: abort or shutdown was called, or `cancelled` returned True.
            ConfigError.
        """

    def poor_sources(self) -> Mapping[str, str]:
        """Return the sources that hung, sent wrong data or were slow in recent receives.

        Returns: their metadata, and a sentence for each. A transport that keeps no record returns an empty mapping.
        """
        return {}

    def prepare_to_send(self, num_bytes: int = 0) -> None:
        """Prepare in the background to send a state. The call is only a hint.

        A first transfer costs more than a later one. A process that has trained some steps may be a source at any later
        step. The same holds for a process that recovered a while ago, or that has lost a member, which may come back.

        Args:
            num_bytes: approximate size of the state; 0: the size of the last received state.
        """

    @abstractmethod
    def disallow_checkpoint(self) -> None:
        """Wait until the state last given to send_checkpoint may be changed."""

    @abstractmethod
    def abort(self) -> None:
        """End the running receives at once with TransportClosedError, from any thread. Later receives are not
        affected."""

    @abstractmethod
    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, end running receives, and release threads and ports. A second call does nothing.

        Args:
            wait: whether to return only after all of that is done.
        """
