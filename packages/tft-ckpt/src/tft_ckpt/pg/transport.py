"""Live state transfer over a process group, for jobs whose process group is the fastest link between their hosts.

The members of a process group are already connected by the best available link. So the state goes from the source's
tensors, without a copy, as messages over that group, directly into the receiver's tensors if the caller gives them. The
price is that both sides must be there at the same time. `send_checkpoint` returns when the receivers have the state,
and the source's trainer waits that long. An interrupted transfer ends the group.

Law of this file: the conversation of one source with one receiver, on both sides, and the settings. The messages are
defined in `pg_frames`, and their transport in `pg_link`.

The conversation: the source sends an offer, and the receiver an answer. After TAKE, the source sends the manifest, and
the receiver an answer. After a second TAKE, the source sends every chunk, as one message each. The receiver then sends
an answer: TAKE if all chunks match the manifest. LATER, MISMATCH and DECLINE end the conversation.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar, final

import torch

from tft_ckpt.arguments import key_of, positive_seconds
from tft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    StateCorruptError,
    StateMismatchError,
    StateUnavailableError,
    StateUnsupportedError,
    TransferTimeoutError,
    TransportClosedError,
)
from tft_ckpt.key import StateKey
from tft_ckpt.pg.frames import ANSWER_BYTES, OFFER_BYTES, Answer, Code, Offer, shortened
from tft_ckpt.pg.link import Call, Link, ProcessGroupLike
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.live import LivePayload, bytes_of
from tft_ckpt.state.manifest import (
    Layout,
    Manifest,
    check_chunk_bytes,
    check_state,
    checksum,
    decode,
    describe,
    encode,
    encode_layout,
)
from tft_ckpt.state.target import Target
from tft_ckpt.state.tree import Limits
from tft_ckpt.texts import printable
from tft_ckpt.transport import CheckpointTransport

__all__ = ["PGTransport"]

T = TypeVar("T")

METADATA: Final = "<n/a>"
"""The metadata of every process, because members of the group need no address."""

_log = logging.getLogger("tft_ckpt.pg")

# Chunks in flight at the same time, so that one is checked while others arrive.
_WINDOW: Final = 4
# The interval of calls to `cancelled` and `progress`.
_POLL_S: Final = 0.05


@final
class PGTransport(CheckpointTransport[T]):
    """A transport over a process group, of tft-pg or of torch.

    A replica rank is a rank in the group. The caller owns the group, and configures it and shuts it down. An
    interrupted transfer (by `abort`, `cancelled`, a timeout, or the death of the other side) ends the group, because
    messages in flight can't be called back. The group must then be configured, or made, again.

    With a Manager, give its own group and leave `state_dict` None, because a Manager loads a state only when it is
    complete.

    Args:
        pg: the group. It reports its own errors. Errors that a wrapper swallows are noticed late.
        timeout: how long the other side may be silent before it counts as dead.
        device: the device of the group's messages: the CPU for Gloo, this process's accelerator for NCCL.
        state_dict: returns the state to receive into, tensor by tensor. Every `recv_checkpoint` without `into` calls
            it, on its thread. None: receive into new memory.
        chunk_bytes: length of a checked chunk, and of a message, when this process sends, 4 KiB to 1 GiB.
        limits: the largest state that is sent or received.

    Raises: ConfigError.
    """

    needs_group = True

    def __init__(
        self,
        pg: ProcessGroupLike,
        timeout: timedelta,
        device: torch.device,
        state_dict: Callable[[], T] | None = None,
        *,
        chunk_bytes: int = 4 << 20,
        limits: Limits | None = None,
    ) -> None:
        if not (callable(getattr(pg, "send", None)) and callable(getattr(pg, "recv", None))):
            raise ConfigError(f"pg is a {type(pg).__name__}; give a process group, which has send and recv")
        if not isinstance(device, torch.device):
            raise ConfigError(f"device is {device!r}; give a torch.device")
        if state_dict is not None and not callable(state_dict):
            raise ConfigError(f"state_dict is a {type(state_dict).__name__}; give a function that returns the state")
        check_chunk_bytes(chunk_bytes)
        self._group = pg
        self._silence_s = positive_seconds(timeout)
        self._device = device
        self._state_dict = state_dict
        self._chunk_bytes = chunk_bytes
        self._limits = Limits() if limits is None else limits
        self._lock = threading.Lock()
        self._running: dict[str, Call] = {}
        self._closed = False
        self._answered: StateKey | None = None  # the state whose outcome the receivers know

    def metadata(self) -> str:
        """Return the same string for all, because a receiver needs no address."""
        return METADATA

    def check_state(self, state_dict: T) -> None:
        """Check that a state can be transferred; see `CheckpointTransport.check_state`."""
        check_state(state_dict, chunk_bytes=self._chunk_bytes, limits=self._limits)

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta, *, key: StateKey | None = None
    ) -> None:
        """Send a state to all of these replica ranks, and return when they have it.

        The ranks receive at the same time, each at its own pace. A rank that waits for a later state is skipped.

        Raises: see `CheckpointTransport.send_checkpoint`. Of several failures the first one is raised, when all
            transfers have ended.
            StateMismatchError: a rank requests another state. StateUnavailableError: a rank did not take the state, or
            is gone.
            StateCorruptError: the state arrived damaged.
            TransferTimeoutError: a receiver did not request the state within the constructor's timeout, or `timeout`.
                The group ends too.
        """
        key = key_of(key, step)
        ranks = _ranks(dst_ranks)
        timeout_s = positive_seconds(timeout)
        if not ranks:
            # No receiver can request the state later. A state that can't be transferred is refused even so.
            self._check_open()
            self.check_state(state_dict)
            return
        with self._call("send", ranks, timeout_s) as call:
            links = [Link(call, rank=rank, device=self._device, is_source=True) for rank in ranks]
            try:
                outgoing = _OutgoingState(
                    state_dict,
                    key=key,
                    chunk_bytes=self._chunk_bytes,
                    limits=self._limits,
                    device=self._device,
                    check=call.check,
                )
            except StateUnsupportedError as error:
                sentence = f"the source can't transfer it: {error}"
                self._answered = key
                _to_all(links, lambda link: _refuse(link, key, sentence))
                raise
            except CheckpointError:
                # There is no time left for a reason, or this side has to stop.
                self._answered = key
                call.abort_group()
                raise
            self._answered = key
            failures = _to_all(links, lambda link: _send(link, key, outgoing))
        if failures:
            raise failures[0]

    def refuse_checkpoint(
        self, step: int, sentence: str, *, key: StateKey | None = None, dst_ranks: Sequence[int] = ()
    ) -> None:
        """Tell these replica ranks, in place of the state; see `CheckpointTransport.refuse_checkpoint`.

        The call waits for their requests, at most the constructor's timeout, and then ends the group, as a send does.
        After a failed send of the same state, it does nothing if that send notified the receivers or ended their group.
        """
        key = key_of(key, step)
        ranks = _ranks(dst_ranks)
        self._check_open()
        if not ranks or self._answered == key:
            return
        with self._call("send", ranks, self._silence_s) as call:
            links = [Link(call, rank=rank, device=self._device, is_source=True) for rank in ranks]
            for failure in _to_all(links, lambda link: _refuse(link, key, sentence)):
                _log.warning("refused state %s (%s), but a receiver was not notified: %s", key, sentence, failure)

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
        """Receive a state from a replica rank; see `CheckpointTransport.recv_checkpoint`.

        The group must be ready. Its end, for example by an abort, ends the receive too.

        Args:
            src_rank: the source's rank in the group.
            metadata: not used. `sources` are not used either, because only one member of the group can be the source.

        Returns: the state. Without `into` and `state_dict`, its tensors are on the CPU, in new memory.
        """
        key = key_of(key, step)
        if type(src_rank) is not int or src_rank < 0:
            raise ConfigError(f"src_rank is {src_rank!r}; give a rank in the group, 0 or more")
        timeout_s = positive_seconds(timeout)
        if into is None and self._state_dict is not None:
            into = self._state_dict()
        with self._call("receive", [src_rank], timeout_s) as call:
            link = Link(call, rank=src_rank, device=self._device, is_source=False)
            receive = _Receive(link, key, limits=self._limits, into=into)
            state: T = receive.run(progress, cancelled).finish()
        return state

    def disallow_checkpoint(self) -> None:
        """Return at once, because nothing is in flight after send_checkpoint."""

    def abort(self) -> None:
        """End running receives and sends at once with TransportClosedError, from any thread, and the group with
        them."""
        self._stop("the transfer was aborted on this side")

    def shutdown(self, wait: bool = True) -> None:
        """End running receives and sends. A second call does nothing. The group ends only together with a running
        transfer.
        """
        with self._lock:
            self._closed = True
        self._stop("the transport was shut down")

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosedError("the transport was shut down; make a new one")

    def _stop(self, reason: str) -> None:
        with self._lock:
            running = list(self._running.values())
        for call in running:
            call.stop(reason)

    @contextmanager
    def _call(self, what: str, ranks: Sequence[int], timeout_s: float) -> Iterator[Call]:
        call = Call(self._group, ranks=ranks, timeout_s=timeout_s, silence_s=self._silence_s)
        with self._lock:
            self._check_open()
            if what in self._running:
                raise ConfigError(f"a {what} is already running on this transport; wait until it ends")
            self._running[what] = call
        try:
            yield call
        finally:
            with self._lock:
                del self._running[what]


# --- the source's side -----------------------------------------------------------------------------------------------


@final
class _OutgoingState:
    """A state in its own tensors, ready to be sent chunk by chunk.

    Args:
        check: called for every chunk during the computation of checksums. Its exceptions propagate.

    Fields:
        manifest_bytes: the encoded manifest.
    """

    def __init__(
        self,
        state: object,
        *,
        key: StateKey,
        chunk_bytes: int,
        limits: Limits,
        device: torch.device,
        check: Callable[[], None],
    ) -> None:
        self.layout, spans = describe(state, key=key, chunk_bytes=chunk_bytes, limits=limits)
        self._device = device
        self._payload = LivePayload(self.layout, spans)
        body = encode_layout(self.layout, limits=limits)
        checksums = []
        for chunk in range(self.layout.num_chunks):
            check()
            message = self._chunk(chunk).cpu()
            checksums.append(checksum(bytes_of(message)))
        self.manifest_bytes = encode(body, checksums)

    def message(self, chunk: int) -> torch.Tensor:
        """Return the chunk's bytes as uint8 on the group's device, copied only if they are not there in one piece."""
        return self._chunk(chunk).to(self._device)

    def _chunk(self, chunk: int) -> torch.Tensor:
        """Return the chunk's bytes in place, or on the CPU."""
        return self._payload.tensor(*self.layout.chunk_span(chunk))


def _to_all(links: Sequence[Link], talk: Callable[[Link], CheckpointError | None]) -> list[CheckpointError]:
    """Talk to all receivers at the same time, to one on this thread. Returns: the failures."""
    failures: list[CheckpointError] = []
    crashes: list[BaseException] = []

    def run(link: Link) -> None:
        try:
            failure = talk(link)
        except CheckpointError as error:
            # The conversation was interrupted. Its messages in flight must not reach another conversation.
            link.call.abort_group()
            failure = error
        except BaseException as error:
            # The caller's thread raises it when all conversations have ended.
            link.call.abort_group()
            crashes.append(error)
            return
        if failure is not None:
            failures.append(failure)

    threads = [
        threading.Thread(target=run, args=(link,), name=f"tft-ckpt-pg-send-{link.rank}", daemon=True)
        for link in links[1:]
    ]
    for thread in threads:
        thread.start()
    run(links[0])
    for thread in threads:
        thread.join()
    if crashes:
        raise crashes[0]
    return failures


def _send(link: Link, key: StateKey, outgoing: _OutgoingState) -> CheckpointError | None:
    """Send the state to one receiver. Returns: why it did not take the state. Raises: the conversation was
    interrupted.
    """
    manifest = outgoing.manifest_bytes
    answer, failure = _offer(link, Offer(key, len(manifest)))
    if answer.code is not Code.TAKE:
        return failure
    link.send_bytes(manifest)
    failure = _receive_outcome(link, key)
    if failure is not None:
        return failure
    in_flight: deque[tuple[Any, torch.Tensor]] = deque()
    for chunk in range(outgoing.layout.num_chunks):
        if len(in_flight) == _WINDOW:
            link.end(in_flight.popleft()[0])
        message = outgoing.message(chunk)
        # The message is held until it has been sent, because it may be a copy.
        in_flight.append((link.start_send(message), message))
    while in_flight:
        link.end(in_flight.popleft()[0])
    return _receive_outcome(link, key)


def _refuse(link: Link, key: StateKey, sentence: str) -> CheckpointError | None:
    """Tell one receiver why it can't have the state. Raises: the conversation was interrupted."""
    text = shortened(sentence)
    answer, failure = _offer(link, Offer(key, len(text), is_refusal=True))
    if answer.code is Code.TAKE:
        link.send_bytes(text)
    return failure


def _offer(link: Link, offer: Offer) -> tuple[Answer, CheckpointError | None]:
    link.send_bytes(offer.encode())
    answer = Answer.decode(link.receive_bytes(ANSWER_BYTES), receiver=link.name)
    if answer.code is Code.LATER:
        _log.info("%s skipped state %s and waits for state %s", link.name, offer.key, answer.key)
        return answer, None
    return answer, _failure(link, offer.key, answer)


def _receive_outcome(link: Link, key: StateKey) -> CheckpointError | None:
    return _failure(link, key, Answer.decode(link.receive_bytes(ANSWER_BYTES), receiver=link.name))


def _failure(link: Link, key: StateKey, answer: Answer) -> CheckpointError | None:
    if answer.code is Code.TAKE:
        return None
    if answer.code is Code.MISMATCH:
        return StateMismatchError(
            f"{link.name} requested state {answer.key}, but was offered {key}; both must use the same quorum",
            wanted=answer.key,
            offered=key,
            source=link.name,
        )
    return StateUnavailableError(
        f"{link.name} refused state {key}: {answer.sentence or 'it gave no reason'}", source=link.name, key=key
    )


# --- the receiver's side ---------------------------------------------------------------------------------------------


@final
class _Receive:
    """One receive. A thread talks to the source, while the caller's thread waits, reports progress and checks
    `cancelled`.

    Args:
        link: to the source.
        wanted: the requested state.
        limits: larger states are refused.
        into: an existing state to receive into; None: new memory.
    """

    def __init__(self, link: Link, wanted: StateKey, *, limits: Limits, into: object | None) -> None:
        self._link = link
        self._call = link.call
        self._wanted = wanted
        self._limits = limits
        self._into = into
        self._over = threading.Event()
        self._has_begun = False
        self._target: Target | None = None
        self._error: BaseException | None = None
        self._good_bytes = 0
        self._writes = False
        self._total_bytes: int | None = None

    def run(self, progress: Callable[[int, int], None] | None, cancelled: Callable[[], bool] | None) -> Target:
        """Run the receive. Returns: the target with the complete, checked payload. Raises: as recv_checkpoint."""
        thread = threading.Thread(target=self._talk, name="tft-ckpt-pg-receive", daemon=True)
        thread.start()
        try:
            reported = -1
            while not self._over.wait(_POLL_S):
                good, total = self._good_bytes, self._total_bytes
                if progress is not None and total is not None and good != reported:
                    reported = good
                    progress(good, total)
                if cancelled is not None and cancelled():
                    self._call.stop("the transfer was cancelled by its caller")
        except BaseException:
            self._call.stop("an error of the caller interrupted the transfer")
            raise
        finally:
            thread.join()
        if self._error is not None:
            raise self._with_tensor_state(self._error)
        assert self._target is not None
        if progress is not None:
            progress(self._target.layout.data_bytes, self._target.layout.data_bytes)
        return self._target

    def _with_tensor_state(self, error: BaseException) -> BaseException:
        """Return the error, extended by the state of the caller's tensors."""
        if self._writes and isinstance(error, CheckpointError):
            error.args = (f"{error}; the receiving tensors now hold a mixture of two states",)
        return error

    def _talk(self) -> None:
        try:
            self._error = self._receive()
        except TransferTimeoutError as error:
            self._abort_group()
            self._error = TransferTimeoutError(
                f"timed out receiving state {self._wanted} from {self._link.name} after {self._call.timeout_s:g} s "
                f"({self._good_bytes} bytes received): {error}",
                timeout_s=error.timeout_s,
            )
        except BaseException as error:
            # The caller's thread raises it.
            self._abort_group()
            self._error = error
        finally:
            self._over.set()

    def _abort_group(self) -> None:
        # A source that has not begun does not wait, and another owner may use the group by now.
        if self._has_begun or self._call.has_messages:
            self._call.abort_group()

    def _receive(self) -> CheckpointError | None:
        """Receive the state.

        Returns: why the state was not taken, as both sides know.
        Raises: the conversation was interrupted.
        """
        link = self._link
        while True:
            first = link.receive_bytes(OFFER_BYTES, patience_s=self._call.remaining_s())
            self._has_begun = True
            try:
                offer = Offer.decode(first, source=link.name, bytes_max=self._limits.manifest_bytes)
            except CheckpointError as error:
                return self._decline(error)
            if offer.key == self._wanted:
                break
            if not self._wanted.comes_after(offer.key):
                self._answer(Code.MISMATCH)
                return StateMismatchError(
                    f"{link.name} offers state {offer.key}, but this process needs {self._wanted}; wait for the next "
                    "quorum, which assigns sources again",
                    wanted=self._wanted,
                    offered=offer.key,
                    source=link.name,
                )
            self._answer(Code.LATER)
            self._has_begun = False
        self._answer(Code.TAKE)
        following = link.receive_bytes(offer.following_bytes)
        if offer.is_refusal:
            sentence = printable(following)
            return StateUnavailableError(
                f"{link.name} has no state {self._wanted}: {sentence}", source=link.name, key=self._wanted
            )
        try:
            manifest = decode(following, limits=self._limits, source=link.name)
            if manifest.layout.key != self._wanted:
                raise StateCorruptError(
                    f"{link.name} offered state {self._wanted} and sent the manifest of {manifest.layout.key}",
                    part="manifest",
                    source=link.name,
                )
            target = self._make_target(manifest.layout)
        except CheckpointError as error:
            return self._decline(error)
        self._answer(Code.TAKE)
        self._total_bytes = manifest.layout.data_bytes
        damaged = self._receive_chunks(manifest, target)
        if damaged is not None:
            return self._decline(
                StateCorruptError(
                    f"chunk {damaged} of state {self._wanted} arrived damaged from {link.name}; check its memory and "
                    "the network, and whether its trainer changed the state during the transfer",
                    part=f"chunk {damaged}",
                    source=link.name,
                )
            )
        self._answer(Code.TAKE)
        self._target = target
        return None

    def _make_target(self, layout: Layout) -> Target:
        if self._into is None:
            return Target.fresh(layout, Buffer(layout.data_bytes))
        return Target.into(layout, self._into, Buffer)

    def _receive_chunks(self, manifest: Manifest, target: Target) -> int | None:
        """Receive every chunk. Returns: the first damaged chunk, or None. Raises: the conversation was interrupted."""
        layout, link = manifest.layout, self._link
        damaged: int | None = None
        scratch = _Scratch(layout, link.device)
        in_flight: deque[tuple[int, Any, torch.Tensor]] = deque()

        def take_one() -> None:
            nonlocal damaged
            chunk, work, message = in_flight.popleft()
            link.end(work)
            start, end = layout.chunk_span(chunk)
            if scratch.has(chunk):
                _scatter(message.cpu(), target.views(start, end))
            if target.checksum(start, end) == manifest.checksums[chunk]:
                self._good_bytes += end - start
            elif damaged is None:
                damaged = chunk

        self._writes = self._into is not None
        for chunk in range(layout.num_chunks):
            if len(in_flight) == _WINDOW:
                take_one()
            start, end = layout.chunk_span(chunk)
            views = target.views(start, end)
            if len(views) == 1 and link.device.type == "cpu":
                message = torch.frombuffer(views[0], dtype=torch.uint8)
            else:
                message = scratch.take(chunk, end - start)
            in_flight.append((chunk, link.start_recv(message), message))
        while in_flight:
            take_one()
        return damaged

    def _answer(self, code: Code, sentence: str = "") -> None:
        self._link.send_bytes(Answer(code, self._wanted, sentence).encode())

    def _decline(self, error: CheckpointError) -> CheckpointError:
        self._answer(Code.DECLINE, str(error))
        return error


@final
class _Scratch:
    """Memory for chunks in flight without a place in one piece. A few places are used in turn."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._num_bytes = min(layout.chunk_bytes, layout.data_bytes)
        self._device = device
        self._places: dict[int, torch.Tensor] = {}
        self._used: dict[int, int] = {}

    def take(self, chunk: int, num_bytes: int) -> torch.Tensor:
        """Return uint8 (num_bytes,), valid until the window has passed. Raises: StateUnavailableError: not enough
        memory."""
        place = chunk % _WINDOW
        if place not in self._places:
            if self._device.type == "cpu":
                self._places[place] = Buffer(self._num_bytes).tensor
            else:
                try:
                    self._places[place] = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
                except RuntimeError as error:
                    raise StateUnavailableError(
                        f"can't allocate {self._num_bytes} bytes of memory on {self._device} for a chunk; free memory, "
                        "or lower chunk_bytes at the source"
                    ) from error
        self._used[place] = chunk
        return self._places[place][:num_bytes]

    def has(self, chunk: int) -> bool:
        """Return whether the chunk's message is in this memory."""
        return self._used.get(chunk % _WINDOW) == chunk


def _scatter(message: torch.Tensor, views: Sequence[memoryview]) -> None:
    data, start = bytes_of(message), 0
    for piece in views:
        piece[:] = data[start : start + len(piece)]
        start += len(piece)


def _ranks(dst_ranks: Sequence[int]) -> list[int]:
    if any(type(rank) is not int or rank < 0 for rank in dst_ranks):
        raise ConfigError(f"dst_ranks is {dst_ranks!r}; give replica ranks, 0 or more")
    return list(dict.fromkeys(dst_ranks))
