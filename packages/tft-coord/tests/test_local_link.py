"""A trainer's calls to its manager server on a pair of sockets, when nobody reads at the other end."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tft_coord.client.local_link import LocalLink
from tft_coord.core.fingerprint import fingerprint_of
from tft_coord.core.types import RankRequest
from tft_coord.errors import Closed, DeadlinePassed, Unreachable
from tft_coord.wire import rank_codec

# More than the sockets hold, as the first question of a large model is.
LARGE = RankRequest(step=0, fingerprint=fingerprint_of({f"model/{number}": "x" * 40 for number in range(8_000)}))


@pytest.fixture
def pair() -> Iterator[tuple[LocalLink, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    link = LocalLink(ours)
    yield link, theirs
    link.close()
    theirs.close()


def test_a_question_that_nobody_reads_ends_at_its_deadline_and_with_it_the_link(
    pair: tuple[LocalLink, socket.socket],
) -> None:
    link, _ = pair
    begun = time.monotonic()
    with pytest.raises(DeadlinePassed, match=r"the first quorum: no answer from the manager server in 0\.2 s"):
        link.call(rank_codec.Ask(0, LARGE), 0.2, "the first quorum")
    assert time.monotonic() - begun < 10  # also on a busy machine; a send without a deadline never ends
    with pytest.raises(Unreachable, match="the second quorum: the manager server has ended"):
        link.call(rank_codec.Ask(0, RankRequest(step=0)), 5.0, "the second quorum")


def test_an_answer_that_does_not_come_ends_the_call_alone(pair: tuple[LocalLink, socket.socket]) -> None:
    link, theirs = pair
    for what in ("the first quorum", "the second quorum"):
        with pytest.raises(DeadlinePassed, match=what):
            link.call(rank_codec.Ask(0, RankRequest(step=0)), 0.05, what)
        assert theirs.recv(4_096)


def test_a_closed_link_says_so(pair: tuple[LocalLink, socket.socket]) -> None:
    link, _ = pair
    link.close()
    with pytest.raises(Closed, match="this manager client was closed"):
        link.call(rank_codec.Ask(0, RankRequest(step=0)), 5.0, "a quorum")
