"""What a replica may say, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft_suite.demo.events import (
    MESSAGE_BYTES_MAX,
    HealingStarted,
    ReplicaEvent,
    ReplicaFailed,
    StepCommitted,
    StepDiscarded,
    TrainingEnded,
    decode,
    encode,
    one_line,
)
from tft_suite.errors import MessageError

SAID: list[ReplicaEvent] = [
    HealingStarted(at_s=1.5, replica=2),
    StepCommitted(at_s=1.5, replica=2, step=7, participants=3, took_part=True, loss=0.25),
    StepDiscarded(at_s=1.5, replica=2, step=7, reason="PeerDisconnectedError: gone"),
    TrainingEnded(at_s=1.5, replica=2, step=7, digest="ab", test_accuracy=0.5),
    ReplicaFailed(at_s=1.5, replica=2, error="ValueError: no"),
]


@pytest.mark.parametrize("event", SAID, ids=lambda event: type(event).__name__)
def test_what_is_said_is_what_is_heard(event: ReplicaEvent) -> None:
    assert decode(encode(event), replica=2, at_s=1.5) == event


def test_a_replica_can_speak_only_for_itself_and_not_of_the_time() -> None:
    assert b"replica" not in encode(SAID[1])
    assert b"at_s" not in encode(SAID[1])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (b"\xff", "not JSON"),
        (b"[1]", "is not an event"),
        (b'{"event": "ProcessKilled", "step": 1}', "is not an event"),
        (b'{"event": ["x"]}', "is not an event"),
        (b'{"event": "StepDiscarded", "step": 1}', "has the fields"),
        (b'{"event": "HealingStarted", "more": 2}', "has the fields"),
        (b'{"event": "StepDiscarded", "reason": "", "step": "1"}', "step='1'"),
        (b'{"event": "StepDiscarded", "reason": "", "step": true}', "step='True'"),
        (b'{"event": "StepDiscarded", "reason": "", "step": -1}', "step='-1'"),
        (b'{"event": "ReplicaFailed", "error": 1.5}', "error='1.5'"),
    ],
)
def test_what_is_no_event_is_refused_by_name(message: bytes, named: str) -> None:
    with pytest.raises(MessageError, match="replica 2") as refused:
        decode(message, replica=2, at_s=0)
    assert named in str(refused.value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5) | st.binary())
def test_any_message_is_an_event_or_refused(thing: object) -> None:
    message = (
        thing
        if isinstance(thing, bytes)
        else json.dumps({"event": "StepDiscarded", "step": thing, "reason": ""}).encode()
    )
    with suppress(MessageError):
        assert isinstance(decode(message, replica=0, at_s=0), StepDiscarded)


@given(st.text(max_size=3_000))
def test_an_error_is_one_bounded_line_with_its_cause(text: str) -> None:
    error = ValueError(text)
    error.__cause__ = KeyError("cause")
    line = one_line(error)
    assert line.startswith("ValueError: ")
    assert len(line.splitlines()) == 1
    assert len(encode(ReplicaFailed(at_s=0, replica=0, error=line))) <= MESSAGE_BYTES_MAX


def test_the_cause_of_an_error_is_named() -> None:
    error = ValueError("a\n b")
    error.__cause__ = KeyError("c")
    assert one_line(error) == "ValueError: a b (because of KeyError: 'c')"
