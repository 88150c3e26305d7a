"""The word of a round over the connections that a group keeps between its ranks.

The calling thread sends its own word at the start, and reads the other words while it waits. There is no other thread,
and nothing is read between two words. The kernel buffers the frame of a peer that is a round ahead. That is at most one
frame, because the peer needs this rank's word of its own round. A read never exceeds the current round's frame, so it
never takes a byte of the next round.

An exchange fails as soon as a connection ends whose rank still owes its word. If a rank disconnects after its word, it
may have finished its exchange, and then all words are on their way. The other ranks then get a moment to finish. A
failed exchange shuts down this rank's connections, so that the other ranks fail too.

Law of this file: it moves the bytes of `word_round`, and knows no library. The group says what an error means for it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, final

from tft_pg.backends.examination import rank_names
from tft_pg.backends.lifeline import Lifeline
from tft_pg.backends.word_round import BadFrameError, Step, WordRound, steps_of
from tft_pg.errors import CollectiveTimeoutError, ConfigError, PeerDisconnectedError, ProcessGroupError, Where
from tft_pg.word import EndedExchange, WordExchange, check_round, checked_sums

__all__ = ["WordLine"]

_DISCONNECTED: Final = select.POLLRDHUP
_READABLE: Final = select.POLLIN | select.POLLRDHUP
_LINGERS: Final = b"\0"
# Words sent to a rank that has finished its exchange reach this rank too, within a moment of a busy machine.
_GRACE_S: Final = 0.25
# After this time, a waiting thread checks whether its data was acknowledged, because a cut cable ends no connection.
_LOOK_S: Final = 0.25
# The kernel doubles its wait each time, after 0.2 s and a round trip at first. This many retransmissions take 1.4 s.
_RETRANSMITS_MAX: Final = 3
_TCP_RETRANSMITS: Final = 2  # the byte of struct tcp_info
_TCP_INFO_BYTES: Final = 8

_Fail = Callable[[ProcessGroupError], ProcessGroupError]


@final
class WordLine:
    """The words of one configured group, one after another.

    Args:
        lifeline: the connections; empty in a group of one.
        where: this rank's place.
        direct_most: the largest group in which each rank sends its word to every other one; None: the measured default.
    """

    def __init__(self, lifeline: Lifeline, where: Where, *, direct_most: int | None = None) -> None:
        rank, world_size = where.rank or 0, where.world_size or 1
        self.lifeline = lifeline
        self.where = where
        self._steps: tuple[Step, ...] = (
            steps_of(rank, world_size) if direct_most is None else steps_of(rank, world_size, direct_most=direct_most)
        )
        self._last_round = -1
        self._poll: select.poll | None = None
        self._ranks: dict[int, int] = {}  # by descriptor

    def ends(self, peers: dict[int, socket.socket]) -> tuple[select.poll, dict[int, int]]:
        """Return a poll object for the end of a connection, and the ranks by descriptor. Both are the same for
        each round.
        """
        if self._poll is None:
            self._poll = select.poll()
            for rank, peer in peers.items():
                self._ranks[peer.fileno()] = rank
                self._poll.register(peer, _DISCONNECTED)
        return self._poll, self._ranks

    def start(self, values: tuple[int, ...], *, round_number: int, timeout: timedelta, fail: _Fail) -> WordExchange:
        """Start an exchange: send this rank's word, or the first step of it.

        Args:
            values: checked values.
            round_number: of the round. The exchange of the previous round must have ended.
            timeout: from now.
            fail: receives an error that ends the group's words, and returns the error to raise.

        Raises: ConfigError: the round's number; nothing was sent. ProcessGroupError: a peer is gone.
        """
        check_round(round_number, self._last_round)
        if self.lifeline.is_exchanging:
            raise ConfigError(
                f"exchange_word for round {round_number} was called while round {self._last_round} is still running; "
                "wait for that exchange first",
                where=self.where,
            )
        self._last_round = round_number
        if not self._steps:
            return EndedExchange(values)
        deadline_s = time.monotonic() + timeout.total_seconds()
        exchange = _LineExchange(
            self, WordRound(self._steps, round_number, values), round_number, (timeout, deadline_s), fail
        )
        exchange.start()
        return exchange

    def linger(self, timeout: timedelta) -> bool:
        """Wait until every other rank has disconnected, has sent a word of a later round, or lingers itself.

        Ranks that end together would otherwise wait for each other until the time is over. So each of them sends a byte
        that is no word. A rank that has begun the next round fails in it, as it does when this rank disconnects.

        Returns: whether all ranks have done so within the time.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        with self.lifeline as peers:
            poll = select.poll()
            waiting = set()
            for peer in () if self.lifeline.ended else peers.values():
                with contextlib.suppress(OSError):  # the peer has gone on
                    peer.send(_LINGERS, socket.MSG_DONTWAIT)
                poll.register(peer, _READABLE)
                waiting.add(peer.fileno())
            while waiting and not self.lifeline.ended:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                for descriptor, _ in poll.poll(math.ceil(left_s * 1000)):
                    poll.unregister(descriptor)
                    waiting.discard(descriptor)
        return not waiting


@final
class _LineExchange(WordExchange):
    """One exchange.

    Args:
        line: of the group.
        state: of the exchange.
        round_number: for messages.
        limit: the timeout, and its end on the monotonic clock.
        fail: as for `WordLine.start`.
    """

    def __init__(
        self, line: WordLine, state: WordRound, round_number: int, limit: tuple[timedelta, float], fail: _Fail
    ) -> None:
        self._line = line
        self._state = state
        self._round_number = round_number
        self._timeout, self._deadline_s = limit
        self._fail = fail
        self._ended_rank: int | None = None  # the first rank that disconnected after its own word
        self._outcome: tuple[int, ...] | ProcessGroupError | None = None

    def start(self) -> None:
        """Send the first step."""
        lifeline = self._line.lifeline
        lifeline.is_exchanging = True
        try:
            with lifeline as peers:
                self._check_all_there(peers)
                self._send(peers)
        except BaseException as error:
            raise self._failed(error) from None

    def wait(self) -> tuple[int, ...]:
        if self._outcome is None:
            try:
                with self._line.lifeline as peers:
                    self._run(peers)
            except BaseException as error:
                raise self._failed(error) from None
            self._line.lifeline.is_exchanging = False
            try:
                self._outcome = checked_sums(self._state.sums, self._round_number)
            except ProcessGroupError as overflow:
                self._outcome = copy.copy(overflow)
        if isinstance(self._outcome, ProcessGroupError):
            raise copy.copy(self._outcome)
        return self._outcome

    def _failed(self, error: BaseException) -> BaseException:
        """Shut down the connections, because their later data could not be distinguished from this round's."""
        # First, so that an abort which has ended the connections is found as the reason.
        reported = self._fail(error) if isinstance(error, ProcessGroupError) else error
        self._line.lifeline.is_exchanging = False
        self._line.lifeline.end(f"the word of round {self._round_number} failed")
        if isinstance(reported, ProcessGroupError):
            self._outcome = copy.copy(reported)
        return reported

    def _run(self, peers: dict[int, socket.socket]) -> None:
        state = self._state
        while True:
            if state.missing:
                self._receive(peers)
            if not state.advance():
                return
            self._send(peers)

    def _check_all_there(self, peers: dict[int, socket.socket]) -> None:
        """Check that every rank is connected.

        Such a rank can't have finished its exchange without this rank's word. Its own word may have arrived even so,
        and then no other check would notice.

        Raises: PeerDisconnectedError: a rank disconnected before it could get this rank's word.
        """
        self._check_not_ended()
        poll, ranks = self._line.ends(peers)
        for descriptor, _ in poll.poll(0):
            rank = ranks[descriptor]
            raise self._peer_failed(rank, f"the connection to {self._name(rank)} ended before the exchange")

    def _send(self, peers: dict[int, socket.socket]) -> None:
        self._check_not_ended()
        recipients = self._state.recipients
        if not recipients:
            return
        frame = self._state.frame()
        for rank in recipients:
            try:
                sent = peers[rank].send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._check_not_ended()
                raise self._peer_failed(rank, f"the connection to {self._name(rank)} has ended") from None
            if sent < len(frame):  # the kernel's buffer holds many words
                raise self._peer_failed(rank, f"{self._name(rank)} does not read, so its buffers are full")

    def _receive(self, peers: dict[int, socket.socket]) -> None:
        """Read the frame of each rank that is missing in this step."""
        self._check_not_ended()
        missing = self._state.missing
        poll, ranks = self._line.ends(peers)
        for rank in missing:
            poll.register(peers[rank], _READABLE)
        while missing:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._timeout_error()
            ready = poll.poll(math.ceil(min(left_s, _LOOK_S) * 1000))
            for descriptor, _ in ready:
                rank = ranks[descriptor]
                if rank not in missing:
                    poll.unregister(descriptor)
                    self._has_ended(rank)
                elif self._read(rank, peers[rank]):
                    poll.register(descriptor, _DISCONNECTED)
            if not ready:
                self._check_acknowledged(peers)

    def _has_ended(self, rank: int) -> None:
        """Record the end of a rank whose own word has arrived."""
        if self._ended_rank is None:
            self._ended_rank = rank
            self._deadline_s = min(self._deadline_s, time.monotonic() + _GRACE_S)

    def _read(self, rank: int, connection: socket.socket) -> bool:
        """Read the data that a rank has sent. Returns: whether its frame is complete."""
        try:
            received = connection.recv(self._state.due_bytes(rank))
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        self._check_not_ended()
        if not received:
            raise self._peer_failed(rank, f"the connection to {self._name(rank)} ended before its word arrived")
        try:
            return self._state.receive(rank, received)
        except BadFrameError as fault:
            raise self._peer_failed(rank, f"{self._name(rank)} {fault}") from None

    def _check_not_ended(self) -> None:
        """Check this rank's own connections. Raises: PeerDisconnectedError: they were shut down."""
        if self._line.lifeline.ended:
            raise self._peer_failed(None, self._line.lifeline.ended_because or "the group was ended")

    def _check_acknowledged(self, peers: dict[int, socket.socket]) -> None:
        """Check that the missing ranks acknowledge data. Raises: PeerDisconnectedError: the machine of a missing rank
        does not."""
        for rank in self._state.missing:
            information = peers[rank].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if information[_TCP_RETRANSMITS] >= _RETRANSMITS_MAX:
                why = "no acknowledgement of sent data"
                raise self._peer_failed(rank, f"{self._name(rank)} is unreachable: {why}", unreached={rank: why})

    def _timeout_error(self) -> ProcessGroupError:
        missing = f"the word of {rank_names(self._state.missing)}"
        if self._ended_rank is not None:
            why = f"the connection to {self._name(self._ended_rank)} ended, and {missing} did not arrive"
            return self._peer_failed(self._ended_rank, why)
        return CollectiveTimeoutError(
            f"exchange_word failed ({self._line.where}): {missing} for round {self._round_number} did not arrive "
            f"within {self._timeout.total_seconds():g} s; abort the group and configure it again",
            where=self._line.where,
        )

    def _peer_failed(
        self, rank: int | None, why: str, *, unreached: dict[int, str] | None = None
    ) -> PeerDisconnectedError:
        return PeerDisconnectedError(
            f"exchange_word failed ({self._line.where}) in round {self._round_number}: {why}; configure the group "
            "without the disconnected rank",
            where=self._line.where,
            unreached=unreached,
            rank=rank,
        )

    def _name(self, rank: int) -> str:
        return self._line.lifeline.name_of(rank)
