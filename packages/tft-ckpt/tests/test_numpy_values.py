"""Numpy's scalars and arrays arrive as what they were, type, bits and all; who has no numpy is told so."""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import numpy
import pytest
import torch

from tft_ckpt import StateCorruptError, StateKey, StateLayoutError, StateUnsupportedError
from tft_ckpt.state import numpy_values, tree
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import HEADER_BYTES, MAGIC, VERSION, check_state, checksum, decode
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.target import Target
from tft_ckpt.state.tree import Limits
from tft_ckpt.testing import assert_same_state

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
LIMITS = Limits()


def encoded(state: object) -> tuple[bytes, memoryview]:
    snapshot = Snapshot.take(state, key=KEY, chunk_bytes=4096, limits=LIMITS, allocate=Buffer)
    while not snapshot.checksum_next_chunk():
        pass
    assert snapshot.manifest_bytes is not None
    return snapshot.manifest_bytes, snapshot.data


def transferred(state: object, into: object = None) -> Any:
    manifest, data = encoded(state)
    layout = decode(manifest, limits=LIMITS).layout
    target = Target.into(layout, into, Buffer)
    at = 0
    for piece in target.views(0, layout.data_bytes):
        piece[:] = data[at : at + len(piece)]
        at += len(piece)
    return target.finish()


def with_state(node: Any) -> bytes:
    """A manifest of no tensor with that state, every checksum right."""
    body = json.loads(encoded(None)[0][HEADER_BYTES:])
    sealed = json.dumps({**body, "state": node}).encode("ascii")
    summed = struct.pack("<IQ", VERSION, len(sealed))
    return struct.pack("<8sIQQ", MAGIC, VERSION, len(sealed), checksum(summed + sealed)) + sealed


SCALARS = [
    numpy.float32(0.1),
    numpy.float64(0.1),
    numpy.float16(-0.0),
    numpy.float64("nan"),
    numpy.int64(-(2**63)),
    numpy.uint64(2**64 - 1),
    numpy.int8(-1),
    numpy.bool_(True),
    numpy.complex64(1 + 2j),
    numpy.str_("text \ud800"),
    numpy.bytes_(b"\x00\xff"),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_a_scalar_arrives_as_it_was(value: Any) -> None:
    got = transferred({"best": [value, 1]})["best"][0]
    assert type(got) is type(value)
    assert got.dtype == value.dtype
    assert got.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
        numpy.array(2.5),
        numpy.array(True),
        numpy.zeros((0, 3), dtype=numpy.int16),
        numpy.arange(12.0).reshape(3, 4)[:, ::2],
        numpy.arange(4, dtype=numpy.uint32)[::-1],
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        numpy.broadcast_to(numpy.float64(2.0), (3, 2)),
        numpy.array([1 + 2j, 3], dtype=numpy.complex128),
    ],
    ids=["matrix", "no dimensions", "one truth value", "empty", "gaps", "backwards", "fortran", "read-only", "complex"],
)
def test_an_array_arrives_as_it_was(array: Any) -> None:
    before = array.copy()
    got = transferred({"history": array})["history"]
    assert type(got) is numpy.ndarray
    assert (got.dtype, got.shape) == (before.dtype, before.shape)
    assert got.tobytes() == before.tobytes()
    got += got  # it is the receiver's own
    assert array.tobytes() == before.tobytes()


def test_states_with_numpy_in_them_are_compared_and_received_in_place() -> None:
    state = {"a": numpy.arange(1 << 14, dtype=numpy.float32), "lr": numpy.float64(0.1), "new": numpy.int32(3)}
    into = {"a": numpy.zeros(1 << 14, dtype=numpy.float32), "lr": numpy.float64(9.0)}
    got = transferred(state, into)
    assert_same_state(got, state)
    assert got["a"].ctypes.data == into["a"].ctypes.data
    with pytest.raises(AssertionError, match="is not"):
        assert_same_state({"lr": 0.1}, {"lr": numpy.float64(0.1)})
    with pytest.raises(StateLayoutError, match=r"state\['a'\]"):
        transferred(state, {"a": numpy.zeros(3, dtype=numpy.float32)})
    assert transferred({"lr": 0.5}, {"lr": numpy.float64(0.1)}) == {"lr": 0.5}


@pytest.mark.parametrize(
    "node",
    [
        ["subclass", "numpy.float32", ["bytes", "AAAA"]],
        ["subclass", "numpy.float32", 1.0],
        ["subclass", "numpy.bool", ["bytes", "Ag=="]],
        ["subclass", "numpy.ndarray", ["bytes", "AAAA"]],
        ["subclass", "numpy.str", 1],
    ],
)
def test_what_is_no_such_value_is_refused(node: Any) -> None:
    layout = decode(with_state(node), limits=LIMITS).layout
    with pytest.raises(StateUnsupportedError, match="`unflatten` function failed"):
        Target.fresh(layout, Buffer(0)).finish()


@pytest.mark.parametrize("name", ["numpy.load", "numpy.object", "numpy.", "numpy.float128"])
def test_no_name_that_arrives_is_looked_up_in_numpy(name: str) -> None:
    with pytest.raises(StateUnsupportedError, match="not registered here"):
        decode(with_state(["subclass", name, None]), limits=LIMITS)


def test_a_reader_without_numpy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, _ = encoded({"best": numpy.float32(1.0)})

    monkeypatch.setitem(sys.modules, "numpy", None)  # an import of it raises ImportError
    for cache in (numpy_values.kinds, tree._of_numpy):
        cache.cache_clear()
    with pytest.raises(
        StateUnsupportedError, match=r"state\['best'\] is a numpy.float32 at the source, and numpy is not"
    ):
        decode(manifest, limits=LIMITS)
    check_state({"a": torch.ones(2), "b": [1, 0.5, "x"]}, chunk_bytes=4096, limits=LIMITS)  # which needs none


def test_an_older_reader_refuses_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that knows nothing of numpy looks the name up among the registered tensor subclasses."""
    manifest, _ = encoded({"best": numpy.float32(1.0)})
    monkeypatch.setattr(numpy_values, "PREFIX", "no name begins like this")
    with pytest.raises(
        StateUnsupportedError,
        match=r"state\['best'\] is a tensor subclass 'numpy.float32', which is not registered here",
    ):
        decode(manifest, limits=LIMITS)


def test_a_tensor_on_an_arrays_memory_is_its_own() -> None:
    array = numpy.ones(4, dtype=numpy.float32)
    subclass = tree.tensor_subclass_of(array)
    assert subclass is not None
    parts = subclass.parts(array, "state")
    assert isinstance(parts, torch.Tensor)
    assert parts.data_ptr() == array.ctypes.data
    with pytest.raises(StateCorruptError):
        decode(with_state(["subclass", "numpy.ndarray"]), limits=LIMITS)
