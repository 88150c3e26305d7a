"""Any state that travels comes back to the bit; anything else is refused with its path; no manifest does harm."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tft_ckpt import ConfigError, Limits, StateCorruptError, StateKey, StateUnsupportedError, register_named_tuple
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import HEADER_BYTES, MAGIC, VERSION, Manifest, check_state, decode, describe
from tft_ckpt.state.manifest import checksum as xxh3
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.tree import DTYPES, PATH_LENGTH_MAX
from tft_ckpt.testing import assert_same_state, sample_state

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
LIMITS = Limits()

quick = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def snapshot_of(state: object, *, limits: Limits = LIMITS, chunk_bytes: int = 4096) -> Snapshot:
    snapshot = Snapshot.take(state, key=KEY, chunk_bytes=chunk_bytes, limits=limits, allocate=Buffer)
    while not snapshot.checksum_next_chunk():
        pass
    return snapshot


def encoded(state: object, *, limits: Limits = LIMITS) -> bytes:
    manifest = snapshot_of(state, limits=limits).manifest_bytes
    assert manifest is not None
    return manifest


def transferred(state: object) -> Any:
    """The state as a receiver would build it: from the manifest's bytes and the run's bytes alone."""
    snapshot = snapshot_of(state)
    assert snapshot.manifest_bytes is not None
    manifest = decode(snapshot.manifest_bytes, limits=LIMITS)
    received = Buffer(manifest.layout.data_bytes)
    received.view[: manifest.layout.data_bytes] = snapshot.data
    for chunk, expected in enumerate(manifest.checksums):
        start, end = manifest.layout.chunk_span(chunk)
        assert xxh3(received.view[start:end]) == expected
    return manifest.layout.build(received.view)


def with_body(change: dict[str, Any], state: object = None) -> bytes:
    """A manifest with some fields replaced and every checksum right: what a hostile source would send."""
    body = json.loads(encoded(state)[HEADER_BYTES:])
    return sealed(json.dumps({**body, **change}).encode("ascii"))


def sealed(body: bytes, version: int = VERSION) -> bytes:
    summed = struct.pack("<IQ", version, len(body))
    return struct.pack("<8sIQQ", MAGIC, version, len(body), xxh3(summed + body)) + body


# ---- what travels ----


class Pair(NamedTuple):
    left: int
    right: torch.Tensor


def test_a_state_with_every_kind_of_leaf_comes_back() -> None:
    assert_same_state(transferred(sample_state()), sample_state())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_travels(name: str) -> None:
    raw = torch.arange(96, dtype=torch.uint8)
    tensor = torch.empty(0, dtype=DTYPES[name]).set_(raw.untyped_storage(), 1, (2,), (2,))
    got = transferred({"t": tensor})["t"]
    assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    size = tensor.element_size()
    assert got.data_ptr() % size == 0
    first = torch.empty(0, dtype=torch.uint8).set_(
        got.untyped_storage(), got.storage_offset() * size, (3 * size,), (1,)
    )
    assert first.equal(raw[size : 4 * size])
    assert_same_state(got, tensor)


def test_shared_storage_is_sent_once_and_stays_shared() -> None:
    table = torch.arange(1 << 16, dtype=torch.float32)
    state = {"a": table[10:100], "b": table[50:200:3], "bytes": table.view(torch.uint8)[44:48], "c": table.clone()[:5]}
    layout, spans = describe(state, key=KEY, chunk_bytes=4096, limits=LIMITS)
    assert len(spans) == 2
    assert layout.data_bytes < 2048, "only the part that is used is sent"
    got = transferred(state)
    assert_same_state(got, state)
    got["a"][1] = -1.0
    assert got["bytes"].view(torch.float32).item() == -1.0
    assert len(got["c"].untyped_storage()) <= 32, "a tensor that shares nothing has a storage of its own"


def test_views_that_are_not_in_memory_are_made_so() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugate": value.conj(), "imaginary": value.conj().imag}
    got = transferred(state)
    assert got["conjugate"].equal(value.conj())
    assert got["imaginary"].equal(value.conj().imag)


def test_a_module_and_its_optimizer_travel() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "parameters": list(model.parameters()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    got = transferred(state)
    assert got["model"]._metadata == state["model"]._metadata
    assert type(got["parameters"][0]) is torch.Tensor
    got["parameters"] = state["parameters"] = None
    assert_same_state(got, state)
    optimizer.load_state_dict(got["optimizer"])
    model.load_state_dict(got["model"])
    scheduler.load_state_dict(got["scheduler"])


def test_named_tuples_travel_when_registered() -> None:
    state = {"pair": Pair(1, torch.ones(2))}
    with pytest.raises(StateUnsupportedError, match="register") as caught:
        transferred(state)
    assert caught.value.path == "state['pair']"
    assert register_named_tuple(Pair) is Pair
    got = transferred(state)["pair"]
    assert type(got) is Pair
    assert got.right.equal(torch.ones(2))
    with pytest.raises(StateCorruptError, match="fields"):
        decode(with_body({"state": ["named", f"{__name__}.Pair", 1]}), limits=LIMITS)
    with pytest.raises(StateUnsupportedError, match="not registered here"):
        decode(with_body({"state": ["named", "os.system", "true"]}), limits=LIMITS)
    with pytest.raises(ConfigError):
        register_named_tuple(int)
    with pytest.raises(ConfigError, match="another"):
        register_named_tuple(collections.namedtuple("Pair", "left", module=__name__))


keys = st.one_of(st.text(max_size=5), st.integers(), st.floats(), st.booleans(), st.tuples(st.integers(), st.text()))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**62, max_value=2**300),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=40),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cuda:1"), torch.Size([3, 0])]),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and of any strides that lie in its storage, overlapping ones too."""
    dtype = DTYPES[draw(st.sampled_from([name for name in DTYPES if name != "complex32"]))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    stride = [draw(st.integers(0, 5)) for _ in shape]
    offset = draw(st.integers(0, 5))
    raw = torch.tensor(list(draw(st.binary(min_size=64, max_size=64))), dtype=torch.uint8).repeat(20)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), offset, shape, stride)


states = st.recursive(
    st.one_of(leaves, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(lambda pairs: defaultdict(list, pairs)),
        st.dictionaries(keys, inner, max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@quick
@given(states)
def test_any_state_comes_back(state: object) -> None:
    assert_same_state(transferred(state), state)


# ---- what does not ----


class Subclass(torch.Tensor):
    pass


class Text(str):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Point:
    x: int


class Named(dict[str, int]):
    pass


REFUSED = {
    "meta": torch.empty(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "subclass": torch.ones(2).as_subclass(Subclass),
    "object": object(),
    "function": len,
    "set": {1, 2},
    "bytearray": bytearray(b"x"),
    "text subclass": Text("x"),
    "enum": Colour.RED,
    "whole-number enum": Number.ONE,
    "dataclass": Point(1),
    "frozenset": frozenset({1}),
    "dict subclass": Named(a=1),
    "numpy time": numpy.datetime64("2025-11-25"),
    "numpy long double": numpy.longdouble(1.0),
    "numpy objects": numpy.array([None]),
    "one numpy object": numpy.array(None),
    "numpy text": numpy.array(["x"]),
    "numpy records": numpy.zeros(2, dtype=[("a", "f4")]),
    "numpy foreign byte order": numpy.ones(2, dtype=">f4" if sys.byteorder == "little" else "<f4"),
    "numpy matrix": numpy.ones(2).view(numpy.recarray),
    "factory": defaultdict(lambda: 0),
    "key": {frozenset(): 1},
    "deep key": {((((None, object()),),),): 1},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_travel_is_refused_with_its_path(kind: str) -> None:
    with pytest.raises(StateUnsupportedError) as caught:
        encoded({"ok": torch.ones(2), "a": [0, {"b": REFUSED[kind]}]})
    assert caught.value.path.startswith("state['a'][1]['b']")
    assert caught.value.path in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("enum", "store its .value"),
        ("whole-number enum", "store its .value"),
        ("dataclass", "store a dict of its fields"),
        ("set", r"store sorted\(...\)"),
        ("text subclass", r"convert it with str\(...\)"),
        ("dict subclass", r"convert it with dict\(...\)"),
        ("numpy time", "numpy scalar, or to an array of numbers"),
        ("object", "convert it to numbers, strings"),
    ],
)
def test_the_refusal_says_what_to_store_instead(kind: str, advice: str) -> None:
    with pytest.raises(StateUnsupportedError, match=advice):
        encoded([REFUSED[kind]])


def test_a_state_is_checked_without_its_bytes() -> None:
    huge = torch.empty(0).set_(torch.UntypedStorage(0), 0, (0,))
    check_state({"a": [huge, 1]}, chunk_bytes=1 << 20, limits=LIMITS)
    with pytest.raises(StateUnsupportedError, match=r"state\['a'\]\[1\] is a builtins.object"):
        check_state({"a": [1, object()]}, chunk_bytes=1 << 20, limits=LIMITS)
    with pytest.raises(StateUnsupportedError, match="limit of 1000"):
        check_state("x" * 1000, chunk_bytes=1 << 20, limits=Limits(manifest_bytes=1000))


def test_freed_memory_is_refused() -> None:
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateUnsupportedError, match="freed"):
        encoded([tensor])


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(StateUnsupportedError, match="contains itself"):
        encoded(state)


def test_a_state_larger_than_the_limits_is_refused() -> None:
    with pytest.raises(StateUnsupportedError, match="more than 3"):
        encoded([1, 2, 3], limits=Limits(nodes=3))
    with pytest.raises(StateUnsupportedError, match="limit of 100"):
        encoded([torch.ones(100)], limits=Limits(data_bytes=100))
    with pytest.raises(StateUnsupportedError, match=r"state\[0\] has 100 elements that share memory"):
        encoded([torch.ones(1).expand(100)], limits=Limits(data_bytes=100))
    with pytest.raises(StateUnsupportedError, match="limit of 1000"):
        encoded("x" * 1000, limits=Limits(manifest_bytes=1000))
    with pytest.raises(ConfigError):
        Limits(depth=0)
    with pytest.raises(ConfigError):
        Limits(depth=10_000)


# ---- hostile and damaged manifests ----


def tensor_node(**change: Any) -> list[Any]:
    node = {"dtype": "float32", "shape": [4], "stride": None, "segment": 0, "offset": 0, **change}
    return ["tensor", node["dtype"], node["shape"], node["stride"], node["segment"], node["offset"]]


HOSTILE_TENSORS = {
    "past the segment": tensor_node(shape=[5]),
    "past the segment by stride": tensor_node(stride=[2]),
    "past the segment by offset": tensor_node(offset=4),
    "before the segment": tensor_node(offset=-4),
    "between elements": tensor_node(shape=[2], offset=2),
    "no such segment": tensor_node(segment=1),
    "negative segment": tensor_node(segment=-1),
    "segment is no number": tensor_node(segment="0"),
    "segment is a truth value": tensor_node(segment=True),
    "negative size": tensor_node(shape=[-4]),
    "size is a fraction": tensor_node(shape=[4.0]),
    "huge size": tensor_node(shape=[2**62]),
    "sizes that overflow": tensor_node(shape=[2**40, 2**40], stride=[0, 0]),
    "more elements than the limits allow, in one place": tensor_node(shape=[2**20, 2**20], stride=[0, 0]),
    "empty that overflows": tensor_node(shape=[0, 2**40, 2**40], stride=[1, 1, 1], segment=-1),
    "empty that lies somewhere": tensor_node(shape=[0]),
    "negative stride": tensor_node(stride=[-1]),
    "huge stride": tensor_node(stride=[2**60]),
    "too few strides": tensor_node(stride=[]),
    "too many dimensions": tensor_node(shape=[1] * 65),
    "unknown dtype": tensor_node(dtype="qint8"),
    "dtype is no name": tensor_node(dtype=["float32"]),
    "attribute for a dtype": tensor_node(dtype="__class__"),
    "too short": ["tensor", "float32"],
}


@pytest.mark.parametrize("kind", HOSTILE_TENSORS)
def test_a_hostile_tensor_is_refused(kind: str) -> None:
    state = {"t": torch.ones(4)}
    assert decode(with_body({"state": ["dict", "t", tensor_node()]}, state), limits=LIMITS).layout.data_bytes == 16
    with pytest.raises(StateCorruptError):
        decode(with_body({"state": ["dict", "t", HOSTILE_TENSORS[kind]]}, state), limits=LIMITS)


def nested(depth: int) -> list[Any]:
    node: list[Any] = ["list"]
    for _ in range(depth):
        node = ["list", node]
    return node


HOSTILE_NODES = {
    "unknown tag": ["exec", "1"],
    "no tag": [],
    "tag is no text": [1, 2],
    "object": {"a": 1},
    "deep": nested(LIMITS.depth + 1),
    "long integer": ["int", "0x"],
    "integer with a sign inside": ["int", "0x-1"],
    "untagged long integer": 2**63,
    "odd dict": ["dict", 1],
    "key comes twice": ["dict", 1, 2, 1, 3],
    "long key comes twice": ["dict", *[["int", "0x" + "f" * 6000], 1] * 2],
    "keys of one hash": ["dict", *(part for k in range(2, 100) for part in (["int", hex(k * (2**61 - 1))], 1))],
    "key is a list": ["dict", ["list"], 1],
    "key is a tensor": ["dict", ["tensor", "float32", [0], None, -1, 0], 1],
    "key is empty": ["dict", [], 1],
    "unknown factory": ["ddict", "eval"],
    "factory is a list": ["ddict", ["list"]],
    "bare factory": ["ddict"],
    "bare ordered dict": ["odict"],
    "bare name": ["named"],
    "size of text": ["size", "a"],
    "size of a long integer": ["size", ["int", "0x" + "f" * 40]],
    "bad base64": ["bytes", "!"],
    "bytes of a number": ["bytes", 1],
    "too many parts": ["bytes", "AA==", "AA=="],
    "bad float": ["float", "zz"],
    "short float": ["float", "00"],
    "bad device": ["device", "cuda:99999999"],
    "unknown device": ["device", "nonsense"],
    "unknown dtype": ["dtype", "load"],
    "dtype is a list": ["dtype", ["float32"]],
}


def test_a_very_long_integer_may_be_a_key() -> None:
    """Python writes none of more than some thousand digits in decimals, as a path would have it."""
    state = {16**6000: 1, (16**6000,): [2]}
    assert transferred(state) == state


@pytest.mark.parametrize("kind", HOSTILE_NODES)
def test_a_hostile_node_is_refused(kind: str) -> None:
    with pytest.raises(StateCorruptError) as caught:
        decode(with_body({"state": HOSTILE_NODES[kind]}), limits=LIMITS, source="http://them:1")
    assert caught.value.source == "http://them:1"
    assert caught.value.part == "manifest"


HOSTILE_FIELDS: dict[str, dict[str, Any]] = {
    "chunk of one byte": {"chunk_bytes": 1},
    "chunk is text": {"chunk_bytes": "4096"},
    "huge chunk": {"chunk_bytes": 2**40},
    "key is no key": {"key": "1.2.3.4"},
    "key is a number": {"key": 1},
    "key out of range": {"key": f"{10**19}.{0:016x}.0.{0:016x}"},
    "too few sums": {"sums": ""},
    "too many sums": {"sums": "00" * 16},
    "sums are no hex": {"sums": "zz" * 8},
    "sums are a list": {"sums": [0]},
    "segments are text": {"segments": "x"},
    "segment is a number": {"segments": [1]},
    "segment of three": {"segments": [[0, 16, 1]]},
    "segment of fractions": {"segments": [[0.0, 16.0]]},
    "segments overlap": {"segments": [[0, 16], [0, 16]]},
    "segments leave a gap": {"segments": [[64, 16]]},
    "segment is empty": {"segments": [[0, 0]]},
    "segment is negative": {"segments": [[0, -1]]},
    "more data than the limit": {"segments": [[0, 2**60]]},
    "a field too many": {"more": 1},
}


@pytest.mark.parametrize("kind", HOSTILE_FIELDS)
def test_hostile_fields_are_refused(kind: str) -> None:
    with pytest.raises(StateCorruptError):
        decode(with_body(HOSTILE_FIELDS[kind], {"t": torch.ones(4)}), limits=LIMITS)


HOSTILE_BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "not ASCII": '{"é":1}'.encode(),
    "brackets without end": b"[" * 1_000_000,
    "a field twice": b'{"key":1,"key":1}',
    "not a number": b'{"key":NaN}',
    "a very long number": b'{"key":' + b"9" * 100_000 + b"}",
    "a float that overflows": encoded(1.5)[HEADER_BYTES:].replace(b"1.5", b"1e999"),
}


@pytest.mark.parametrize("kind", HOSTILE_BODIES)
def test_a_hostile_body_is_refused(kind: str) -> None:
    with pytest.raises(StateCorruptError):
        decode(sealed(HOSTILE_BODIES[kind]), limits=LIMITS)


def test_paths_are_cut_for_many_leaves_may_lie_under_a_long_one() -> None:
    def nested(leaf: object, depth: int = 20) -> object:
        return {"k" * 95: nested(leaf, depth - 1)} if depth else leaf

    with pytest.raises(StateUnsupportedError) as raised:
        encoded(nested(object()))
    leaves: list[Any] = []
    decode(encoded(nested(torch.ones(1))), limits=LIMITS).layout.read(leaves.append)
    (leaf,) = leaves
    for path in (leaf.path, raised.value.path):
        assert len(path) < PATH_LENGTH_MAX + 110
        assert path.endswith("…")


def test_limits_bind_the_reader() -> None:
    data = encoded([1, 2, 3, torch.ones(100)])
    for limits in (Limits(nodes=3), Limits(data_bytes=100), Limits(manifest_bytes=50)):
        with pytest.raises(StateCorruptError, match=r"limit|more than"):
            decode(data, limits=limits)


def test_another_version_is_told_apart_from_damage() -> None:
    with pytest.raises(StateUnsupportedError, match="version 2"):
        decode(sealed(b"{}", version=2), limits=LIMITS)


def test_every_flipped_bit_and_every_cut_is_seen() -> None:
    data = encoded({"a": torch.ones(3), "b": [1, 2.5, "x"]})
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(StateCorruptError):
            decode(bytes(damaged), limits=LIMITS)
        with pytest.raises(StateCorruptError):
            decode(data[:at], limits=LIMITS)


def try_to_use(body: bytes) -> None:
    """Decode, and build what is accepted: either works, or is refused by name."""
    try:
        manifest: Manifest = decode(sealed(body), limits=Limits(data_bytes=1 << 16))
    except (StateCorruptError, StateUnsupportedError):
        return
    manifest.layout.build(Buffer(manifest.layout.data_bytes).view)


SAMPLE_BODY = encoded(sample_state(num_bytes=64))[HEADER_BYTES:]


@settings(quick, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(SAMPLE_BODY) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_bytes_changed_under_a_right_checksum_do_no_harm(changes: list[tuple[int, int]]) -> None:
    body = bytearray(SAMPLE_BODY)
    for at, value in changes:
        body[at] = value
    try_to_use(bytes(body))


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 2**65), st.floats(allow_nan=False, allow_infinity=False), st.text()
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=10,
)
tags = st.sampled_from(
    ["list", "tuple", "dict", "odict", "ddict", "counter", "named", "size", "tensor", "shard", "int", "float", "bytes"]
)
tagged = st.recursive(
    json_values, lambda inner: st.tuples(tags, st.lists(inner, max_size=5)).map(lambda t: [t[0], *t[1]])
)


@settings(quick, max_examples=100)
@given(tagged)
def test_any_JSON_in_place_of_the_state_does_no_harm(node: Any) -> None:
    body = json.loads(SAMPLE_BODY)
    body["state"] = node
    try_to_use(json.dumps(body).encode("ascii"))
