"""How a state gets from a process that has it to one that needs it.

The source names its address once (`metadata`), offers its state at a step boundary (`send_checkpoint`), and trains on.
The receiver, which got the address and the name of the state from its quorum, asks (`recv_checkpoint`) and waits.

Law of this file: the interface alone. Names and positional order are those that torchft's users know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import ClassVar, Generic, TypeVar

from tft_ckpt.errors import WrongSetting
from tft_ckpt.key import StateKey

__all__ = ["CheckpointTransport", "StagedCheckpoint"]

T = TypeVar("T")


class StagedCheckpoint(ABC):
    """A copy of a state that has no name yet. It ends with one call of either method, from any thread."""

    @abstractmethod
    def offer(self, dst_ranks: list[int], *, key: StateKey) -> None:
        """Put it up under a name, in place of the state before; returns at once.

        Args:
            dst_ranks: replica ranks that will ask for it; may be empty.
            key: names the state.
        Raises: Closed.
        """

    @abstractmethod
    def drop(self) -> None:
        """Nobody wants it: let go of its memory, which may be used for the next one."""


class CheckpointTransport(ABC, Generic[T]):
    """Sends and receives states of type T, a state dict as a rule. One per process that trains.

    Where a key is None on both sides, it stands for StateKey(0, 0, step, 0).

    Attributes:
        stages: it can copy a state before its name is known, by `stage_checkpoint`.
    """

    stages: ClassVar[bool] = False

    @abstractmethod
    def metadata(self) -> str:
        """What a receiver passes to recv_checkpoint to reach this process; constant until shutdown."""

    @abstractmethod
    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta, *, key: StateKey | None = None
    ) -> None:
        """Offer a state, on the thread that trains, at a step boundary.

        Args:
            dst_ranks: replica ranks that will ask for it; may be empty.
            step: committed steps.
            state_dict: the state; may be changed after disallow_checkpoint.
            timeout: for the call.
            key: names the state; its step equals step.
        Raises:
            StateUnsupported: a leaf can't travel. Those that wait for this state are told.
            DeadlinePassed: it took longer than timeout. Those that wait for this state are told.
            WrongSetting, Closed.
        """

    def refuse_checkpoint(
        self, step: int, sentence: str, *, key: StateKey | None = None, dst_ranks: Sequence[int] = ()
    ) -> None:
        """Say in place of `send_checkpoint` that this process can't give the state, and why.

        It is called also after `send_checkpoint` has raised, with the same key, because that may have failed before it
        had told anybody. Those that wait for the state are told the sentence, where the transport can tell them; by
        default it can't, and they wait until their time-out. One that can't be told waits until its time-out too, and
        that is no error.

        Args:
            step: committed steps.
            sentence: why; it may be cut.
            key: names the state; its step equals step.
            dst_ranks: replica ranks that will ask for it. A transport that has to go to them tells no others.
        Raises: WrongSetting, Closed.
        """

    def check_state(self, state_dict: T) -> None:
        """Look whether a state can travel, before somebody wants it; nothing is copied.

        A transport that does not say so by a method of its own refuses what can't travel when it is to send it.

        Raises: StateUnsupported: a leaf can't travel, or the state is too large.
        """

    def stage_checkpoint(self, state_dict: T, timeout: timedelta) -> StagedCheckpoint:
        """Copy a state that somebody may ask for soon, on the thread that trains, at a step boundary.

        What is on offer and nobody reads is taken down for it, so that its memory can be used.

        Args:
            state_dict: the state; may be changed when this returns.
            timeout: for the call.
        Raises:
            StateUnsupported: a leaf can't travel.
            StateUnavailable: there is no memory for it.
            DeadlinePassed: it took longer than timeout.
            WrongSetting: this transport stages nothing. Closed.
        """
        raise WrongSetting(f"a {type(self).__name__} stages nothing; look at its `stages` first")

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
        """Fetch a state, waiting for a source that has not offered it yet.

        Where the source's state has a DTensor there is a LocalShard: a mesh can't travel, so it is for who receives it
        to make a DTensor of it, with `to_dtensor`. With `into`, it is the tensor that stands there in `into`.

        Args:
            src_rank: replica rank of the source, for messages.
            metadata: the source's.
            step: committed steps.
            timeout: for the call, waiting included.
            key: names the state; its step equals step.
            into: a state of the same form, into whose tensors the one that arrives is written; nobody else may use them
                meanwhile. If the call fails after bytes have come, they hold a mixture of two states, of no use until a
                later call succeeds. A CheckpointError says so at the end of its message; if it does not, they are as
                they were. What `into` has no tensor for comes in memory of its own.
            sources: metadata of others that have the same state, to go on with if the first one fails.
            progress: called with (bytes that are here and checked, bytes in all), on the calling thread.
            cancelled: asked several times a second, on the calling thread; True ends the call.
        Raises:
            StateUnavailable: no source can give it.
            StateMismatch: the sources have another one.
            StateCorrupt: a source serves damage, and no other one helped.
            StateUnsupported: it holds what this process can't rebuild.
            StateDiffers: it does not fit `into`.
            DeadlinePassed: timeout is over.
            Closed: abort or shutdown was called, or cancelled said so.
            WrongSetting.
        """

    def poor_sources(self) -> Mapping[str, str]:
        """The sources that hung, lied or were slow in recent receives.

        Returns: their metadata, and a sentence for each. A transport that keeps no record returns an empty mapping.
        """
        return {}

    def prepare_to_send(self, num_bytes: int = 0) -> None:
        """Get ready, in the background, to send a state; a hint, and no more.

        Who has trained some steps may be a source in any step from then on, so may who has healed a while ago, and who
        has lost a member, which may come back; and a first transfer costs more than a later one.

        Args:
            num_bytes: how large the state is, about; 0: as the one that was received last.
        """

    @abstractmethod
    def disallow_checkpoint(self) -> None:
        """Return when the state last given to send_checkpoint may be changed."""

    @abstractmethod
    def abort(self) -> None:
        """End running receives at once with Closed, from any thread. Later ones are not concerned."""

    @abstractmethod
    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, end running receives, release threads and ports; again does nothing.

        Args:
            wait: until all of that is done.
        """
