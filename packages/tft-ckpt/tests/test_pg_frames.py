"""The two forms that open a transfer over a process group: they come back as they were, and nothing else is taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tft_ckpt import StateCorruptError, StateKey, StateUnsupportedError
from tft_ckpt.pg.frames import ANSWER_BYTES, OFFER_BYTES, SENTENCE_BYTES, Answer, Code, Offer, shortened
from tft_ckpt.state.manifest import checksum
from tft_ckpt.texts import printable

SOURCE = "replica rank 3"
KEY = StateKey(quorum_id=2**63 - 1, nonce=2**64 - 1, step=5, lineage=0xABC)
LIMIT = 1 << 20

quick = settings(derandomize=True, database=None, deadline=None, max_examples=200)
keys = st.builds(
    StateKey,
    quorum_id=st.integers(0, 2**63 - 1),
    nonce=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**63 - 1),
    lineage=st.integers(0, 2**64 - 1),
)


def resealed(data: bytes) -> bytes:
    """An offer whose checksum is right: what a hostile source would send."""
    return data[:-8] + checksum(data[:-8]).to_bytes(8, "little")


@quick
@given(keys, st.integers(1, LIMIT))
def test_an_offer_comes_back(key: StateKey, length: int) -> None:
    offer = Offer(key, length)
    assert len(offer.encode()) == OFFER_BYTES
    assert Offer.decode(offer.encode(), source=SOURCE, bytes_max=LIMIT) == offer


@quick
@given(keys, st.sampled_from(Code), st.text(max_size=2 * SENTENCE_BYTES))
def test_an_answer_comes_back_and_its_sentence_is_cut(key: StateKey, code: Code, sentence: str) -> None:
    data = Answer(code, key, sentence).encode()
    assert len(data) == ANSWER_BYTES
    answer = Answer.decode(data, receiver=SOURCE)
    assert (answer.code, answer.key) == (code, key)
    cut = shortened(sentence)
    assert sentence.encode().startswith(cut)
    assert cut == sentence.encode() or SENTENCE_BYTES - 4 < len(cut) <= SENTENCE_BYTES
    assert answer.sentence == printable(cut)


@quick
@given(st.integers(0, 8 * OFFER_BYTES - 1))
def test_every_bit_of_an_offer_counts(bit: int) -> None:
    data = bytearray(Offer(KEY, 100).encode())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StateCorruptError, match=SOURCE) as raised:
        Offer.decode(bytes(data), source=SOURCE, bytes_max=LIMIT)
    assert raised.value.part == "header"
    assert raised.value.source == SOURCE


@quick
@given(st.integers(0, 8 * ANSWER_BYTES - 1))
def test_every_bit_of_an_answer_counts(bit: int) -> None:
    data = bytearray(Answer(Code.TAKE, KEY, "a sentence").encode())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StateCorruptError, match=SOURCE):
        Answer.decode(bytes(data), receiver=SOURCE)


@quick
@given(st.binary(min_size=OFFER_BYTES - 8, max_size=OFFER_BYTES - 8))
def test_a_hostile_offer_is_refused(body: bytes) -> None:
    with pytest.raises((StateCorruptError, StateUnsupportedError)):
        Offer.decode(resealed(body + bytes(8)), source=SOURCE, bytes_max=LIMIT)


@pytest.mark.parametrize("length", [0, LIMIT + 1, 2**64 - 1])
def test_no_memory_is_taken_for_what_an_offer_announces_beyond_the_limit(length: int) -> None:
    with pytest.raises(StateCorruptError, match="the limit is"):
        Offer.decode(Offer(KEY, length).encode(), source=SOURCE, bytes_max=LIMIT)


def test_a_long_refusal_is_refused() -> None:
    with pytest.raises(StateCorruptError, match=f"the limit is {SENTENCE_BYTES}"):
        Offer.decode(Offer(KEY, SENTENCE_BYTES + 1, is_refusal=True).encode(), source=SOURCE, bytes_max=LIMIT)


def test_another_version_is_named() -> None:
    data = bytearray(Offer(KEY, 100).encode())
    data[8] = 2
    with pytest.raises(StateUnsupportedError, match="version 2, but this process reads version 1"):
        Offer.decode(resealed(bytes(data)), source=SOURCE, bytes_max=LIMIT)


def test_a_sentence_of_a_members_can_not_steer_a_terminal_or_make_a_line_of_its_own() -> None:
    sent = Answer(Code.DECLINE, KEY, "red \x1b[31m\nERROR all is lost\r\0é").encode()
    assert Answer.decode(sent, receiver="r").sentence == "red \ufffd[31m\ufffdERROR all is lost\ufffd\ufffdé"
