"""Calls of the rank that started the manager server, on the pair of sockets that it shares with it.

The caller writes, and sleeps in the kernel until its answer is there: no loop and no second thread come between.

Law of this file: one call at a time, its deadline, and the end of the link; no meaning of any call.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import suppress
from typing import Final, final

from tft_coord.core.types import Plan, QuorumKey, Verdict
from tft_coord.errors import Closed, DeadlinePassed, ProtocolError, Unreachable
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.transport.frames import FrameReader, framed
from tft_coord.transport.settings import error_of_code
from tft_coord.wire import rank_codec

# At the deadline the manager server answers with a verdict, or with a sentence that says who was waited for. A busy
# machine delivers it a moment late, and a rank without a verdict can't go on.
LATE_ANSWER_S: Final = 0.25
_RECEIVE_BYTES: Final = 64 * 1024


@final
class LocalLink:
    """A trainer's end of the sockets.

    Args:
        connection: our end; closed by `close`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._frames = FrameReader()
        self._arrived: list[bytes] = []
        self._closed = False
        let_go_in_child(self)

    def call(
        self, asked: rank_codec.Ask | rank_codec.Vote | rank_codec.Leave, timeout_s: float, what: str
    ) -> Plan | QuorumKey | Verdict:
        """Ask and wait for the answer. A second thread waits until the first has its own.

        Args:
            asked: the question, of the rank that started the manager server.
            timeout_s: within which the answer must be here.
            what: the caller's words for what it wants, for messages.
        Raises: an error of tft_coord.errors. Unreachable: the manager server has ended.
        """
        with self._lock:
            number = next(self._numbers)
            deadline = time.monotonic() + timeout_s + LATE_ANSWER_S
            try:
                self._send(rank_codec.RankCall(number, int(timeout_s * 1000), asked), deadline)
                answer = self._answer_to(number, deadline)
            except TimeoutError:
                with suppress(OSError):
                    self._send(rank_codec.RankWithdraw(number), time.monotonic() + LATE_ANSWER_S)
                raise DeadlinePassed(f"{what}: no answer from the manager server in {timeout_s:g} s") from None
            except OSError as error:
                if self._closed:
                    raise Closed(f"{what}: this manager client was closed; make a new one") from error
                raise Unreachable(f"{what}: the manager server has ended ({error})") from error
        if isinstance(answer, rank_codec.Failure):
            raise error_of_code(answer.code, answer.message, what)
        return answer

    def close(self) -> None:
        """End; a call under way ends with Closed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in it; a close alone does not
        with self._lock:
            self._connection.close()

    def forked(self) -> Inheritance:
        """In a child: closed, and a thread of the parent's that waits here holds no lock."""
        self._closed = True
        self._lock = threading.Lock()
        return Inheritance([self._connection.fileno()])

    def _send(self, message: rank_codec.FromRank, deadline: float) -> None:
        """Raises: TimeoutError: nobody reads; the link has ended then."""
        self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            self._connection.sendall(framed(rank_codec.encode_from_rank(message)))
        except TimeoutError:
            # A part of it may be under way, and nothing behind a part can be understood.
            self._connection.shutdown(socket.SHUT_RDWR)
            raise

    def _answer_to(self, number: int, deadline: float) -> Plan | QuorumKey | Verdict | rank_codec.Failure:
        while True:
            while self._arrived:
                message = rank_codec.decode_to_rank(self._arrived.pop(0))
                if isinstance(message, rank_codec.RankAnswer) and message.call == number:
                    return message.answer
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._connection.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            try:
                self._arrived += self._frames.feed(data)
            except ProtocolError as error:
                raise ConnectionResetError(str(error)) from error
