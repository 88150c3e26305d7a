"""The benchmark's rows of standing quorums, in short: their counts, and their sensitivity.

The benchmark has the figures: `python -m benchmarks.run p17 p18 p19`.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import standing_join, steady_steps
from benchmarks.swarm import Connection
from tft_coord.core.events import BeatReceived

pytestmark = pytest.mark.timeout(180)


class Socket:
    """A socket that discards its input."""

    def sendall(self, words: bytes, /) -> None:
        pass


@pytest.mark.in_parts
def test_steady_steps_send_only_beats() -> None:
    found = steady_steps.count_messages(steps=50)
    assert found.steps >= 50
    assert found.kinds[BeatReceived.__name__] > 0
    assert set(found.kinds) <= steady_steps.BEATS


@pytest.mark.in_parts
def test_no_step_is_lost_while_the_lighthouse_is_away() -> None:
    found = steady_steps.take_away(2.0)
    assert found.lost == 0
    assert min(len(found.before_ms), len(found.away_ms)) > 4 * steady_steps.REPLICAS_OF_P18


def test_a_lost_and_a_late_step_are_counted() -> None:
    steps = [(1.0, 5), (1.01, 6), (1.02, 6), (1.05, 7)]
    assert steady_steps._lost(steps) == 1
    assert steady_steps.Away(before_ms=[10.0, 20.0], away_ms=[39.0, 41.0], lost=0).late == 1


def test_all_have_the_quorum_in_which_the_newcomer_is() -> None:
    joined = standing_join.our_turn(20)
    assert joined.took_s > 0
    assert joined.lighthouse_s < 5
    assert joined.swarm_s < 5


def test_where_the_machine_allows_fewer_groups_fewer_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(_: Any) -> tuple[int, int]:
        return 1_024, 4_400

    monkeypatch.setattr("resource.getrlimit", limits)
    assert standing_join.allowed(1_000) == 1_000
    assert standing_join.allowed(10_000) == 2_000


def test_a_number_that_is_not_answered_costs_the_row_its_figure_and_not_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def our_turn(number: int) -> standing_join.Joined:
        if number > standing_join.JUDGED:
            raise standing_join.NotAnsweredError
        return standing_join.Joined(took_s=0.2, lighthouse_s=0.1, swarm_s=0.1, beats_core=0.1)

    monkeypatch.setattr(standing_join, "our_turn", our_turn)
    monkeypatch.setattr(standing_join, "_peers_turn", lambda number: 1.0 if number == 1_001 else 0.0)
    monkeypatch.setattr(standing_join, "allowed", lambda number: number)
    row = standing_join.measure(standing_join.TURNS)
    assert row.ours == "0.20/> 300 s"
    assert row.met
    monkeypatch.setattr(standing_join, "_peers_turn", lambda number: 0.5)
    assert not standing_join.measure(standing_join.TURNS).met


@pytest.mark.parametrize("piece", [1, 7, 100, 1_000_000])
def test_of_a_long_message_the_first_bytes_are_kept_and_the_next_message_is_whole(piece: int) -> None:
    """The bytes may arrive in pieces of any size."""
    connection = Connection(Socket())
    connection.open_stream("/service/method", b"")
    connection.keep_bytes = 50
    long, short = bytes(range(256)) * 200, b"the next one"
    # The end of one message and the beginning of the next share a frame, and one message comes by itself.
    joint = b"\0" + len(long).to_bytes(4, "big") + long + b"\0" + len(short).to_bytes(4, "big") + short
    frames = [joint[at : at + 16_000] for at in range(0, len(joint), 16_000)]
    words = b"".join(len(each).to_bytes(3, "big") + b"\0\0" + (1).to_bytes(4, "big") + each for each in frames)
    words += connection.framed(long)
    for at in range(0, len(words), piece):
        connection.hear(words[at : at + piece])
    assert connection.messages == [long[:50], short, long[:50]]
    assert connection.answers == 3
    assert connection.received_bytes == len(words)
