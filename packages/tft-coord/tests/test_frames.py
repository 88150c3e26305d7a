"""Where a message on the local socket begins and ends, however the bytes come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft_coord.errors import ProtocolError
from tft_coord.transport.frames import MAX_MESSAGE_BYTES, FrameReader, framed


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50))
def test_messages_come_out_as_they_went_in_however_they_are_cut(messages: list[bytes], size: int) -> None:
    data = b"".join(framed(message) for message in messages)
    reader = FrameReader()
    out = [message for start in range(0, len(data), size) for message in reader.feed(data[start : start + size])]
    assert out == messages


def test_a_length_beyond_the_bound_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(ProtocolError, match="at most 67108864 are taken"):
        FrameReader().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
