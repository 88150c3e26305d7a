"""Exact conversion of a state dict to plain JSON values, and back.

Every value in a state dict is a known container, a known kind of plain data, or a tensor. The first two are written as
JSON. Null, booleans, short integers, finite floats and strings are written as themselves. All other values are arrays
that begin with their type's tag.

A tensor is passed to a callback and becomes one array. A DTensor becomes an array that describes the sharding of its
local part. A registered tensor subclass, or a scalar or array of numpy, becomes an array with its name and its parts. A
reader without numpy refuses the latter by name. Types are matched exactly. A subclass may carry hidden data, so it is
refused with its path.

Reading is the reverse and trusts nothing. It makes only the types listed here, by calling only the constructors listed
here, and counts the nodes.

Law of this file: pure functions of values; no tensors' memory, no I/O, no pickle. A new type gets a tag, a writer and a
reader, side by side.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import functools
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch

from tft_ckpt.errors import ConfigError, StateCorruptError, StateUnsupportedError
from tft_ckpt.state import numpy_values
from tft_ckpt.state.sharding import MAX_MESH_DIMENSIONS, LocalShard, Placement, Sharding, part_of

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "Limits",
    "TensorSubclass",
    "TreeReader",
    "TreeWriter",
    "register_named_tuple",
    "register_tensor_subclass",
    "tensor_subclass_of",
]

# A value that json.loads returns and json.dumps accepts.
Node = Any

ROOT_PATH = "state"

PATH_LENGTH_MAX = 1000
"""Maximum length of a path in characters. Longer paths end in an ellipsis."""

KEYS_PER_HASH_MAX = 64
"""Maximum number of keys with the same hash in one dict. Honest dicts have two or three."""

_SHORT_INT = 2**63

_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
"""Name in a manifest to dtype: every dtype of dense tensors that this torch has."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""Dtype to name in a manifest."""

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "odict": OrderedDict,
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}

_DEVICE = re.compile(r"[a-z]{1,16}(:[0-9]{1,4})?")

_named_tuples: dict[str, type[Any]] = {}
_named_tuple_names: dict[type[Any], str] = {}

C = TypeVar("C", bound=type[Any])


def register_named_tuple(cls: C) -> C:
    """Register a named tuple for transfer. Both sides must register it. The function works as a decorator too.

    Its module and name identify it, and its fields go by position.

    Raises: ConfigError: cls is not a named tuple, or another one has that name already.
    """
    if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make")):
        raise ConfigError(f"{cls!r} is not a named tuple and can't be registered as one")
    name = f"{cls.__module__}.{cls.__qualname__}"
    if _named_tuples.setdefault(name, cls) is not cls:
        raise ConfigError(f"another named tuple is registered as {name} already; rename one of the two")
    _named_tuple_names[cls] = name
    return cls


@final
@dataclass(frozen=True, slots=True)
class TensorSubclass:
    """A subclass of tensors, or a type of numpy, that is transferred as its parts.

    Fields:
        cls: the subclass.
        name: its name in a manifest.
        flatten, unflatten: as given to `register_tensor_subclass`.
    """

    cls: type[Any]
    name: str
    flatten: Callable[[Any], object]
    unflatten: Callable[[Any], Any]

    def parts(self, value: object, path: str) -> object:
        """Return the tensor's parts. Raises: StateUnsupportedError: the registered function fails."""
        try:
            return self.flatten(value)
        except Exception as error:
            raise StateUnsupportedError(
                f"{path} is a {self.name}, and its `flatten` function failed: {error!r}; fix that function",
                path=path,
            ) from error

    def rebuild(self, path: str, parts: object) -> Any:
        """Rebuild the tensor from its parts. Raises: StateUnsupportedError: the registered function fails."""
        try:
            value = self.unflatten(parts)
        except Exception as error:
            raise StateUnsupportedError(
                f"{path} is a {self.name}, and its `unflatten` function failed: {error!r}; fix that function",
                path=path,
            ) from error
        if type(value) is not self.cls:
            raise StateUnsupportedError(
                f"{path} is a {self.name}, and its `unflatten` function returned a {type(value).__name__}; fix that "
                "function",
                path=path,
            )
        return value


_tensor_subclasses: dict[str, TensorSubclass] = {}
_tensor_subclasses_by_type: dict[type[Any], TensorSubclass] = {}


def register_tensor_subclass(cls: type[Any], flatten: Callable[[Any], object], unflatten: Callable[[Any], Any]) -> None:
    """Register a subclass of tensors for transfer as the state of its parts. Both sides must register it.

    Its module and name identify it. A process without that registration refuses it, and nothing is looked up, imported
    or called by a received name.

    Args:
        cls: a subclass of torch.Tensor; only instances of exactly this class are transferred so.
        flatten: returns the parts of a tensor, as any state. Its tensors must be the tensor's own and not copies, so
            that data can be received into them.
        unflatten: makes a tensor from such a state, without a copy. The state is well-formed but comes from the
            network, so the function must check it, and may raise any error.

    Raises: ConfigError: cls can't be registered, or another class has that name already.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.Tensor)) or cls in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(f"{cls!r} can't be registered; give a subclass of torch.Tensor other than Parameter")
    if cls.__module__.startswith("torch.distributed.tensor"):
        raise ConfigError(f"{cls.__qualname__} is already transferred as a LocalShard; don't register it")
    for function in (flatten, unflatten):
        if not callable(function):
            raise ConfigError(f"{function!r} is not callable; give two functions, flatten and unflatten")
    name = f"{cls.__module__}.{cls.__qualname__}"
    known = _tensor_subclasses.get(name)
    if known is not None and known.cls is not cls:
        raise ConfigError(f"another tensor subclass is registered as {name} already; rename one of the two")
    record = TensorSubclass(cls=cls, name=name, flatten=flatten, unflatten=unflatten)
    _tensor_subclasses[name] = _tensor_subclasses_by_type[cls] = record


def tensor_subclass_of(value: object) -> TensorSubclass | None:
    """Return the record of the value's type, if it is a registered tensor subclass or a type of numpy; else None."""
    kind = type(value)
    found = _tensor_subclasses_by_type.get(kind)
    if found is None and kind.__module__ == "numpy" and "numpy" in sys.modules:
        found = next((known for known in _of_numpy().values() if known.cls is kind), None)
        if found is not None and found.name == numpy_values.ARRAY and not numpy_values.has_numbers(value):
            return None
    return found


@functools.cache
def _of_numpy() -> dict[str, TensorSubclass]:
    """Return numpy's types, by their names in a manifest. Raises: ImportError: numpy is not installed."""
    return {kind.name: TensorSubclass(*kind) for kind in numpy_values.kinds()}


@dataclass(frozen=True, slots=True)
class Limits:
    """The size limits of a state, on either side. Larger states are refused before memory is allocated."""

    manifest_bytes: int = 64 << 20
    """Size of the encoded manifest. The decoded form takes about ten times as much, and a hostile one up to thirty."""
    depth: int = 64
    """Nesting depth of containers."""
    nodes: int = 2_000_000
    """Number of containers and leaves."""
    data_bytes: int = 1 << 40
    """Size of all tensors together."""

    def __post_init__(self) -> None:
        for name in ("manifest_bytes", "depth", "nodes", "data_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Limits.{name} is {getattr(self, name)}; give at least 1")
        if self.depth > 200:
            raise ConfigError(f"Limits.depth is {self.depth}; the interpreter's own stack allows at most 200")


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float_from_bits(text: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


@final
class TreeWriter:
    """A writer that converts one state to one node, for one use.

    Args:
        on_tensor: called with (path, tensor) for every tensor, depth first, and returns its node. Of a DTensor it gets
            the local part.
        limits: larger states are refused.
    """

    def __init__(self, on_tensor: Callable[[str, torch.Tensor], Node], *, limits: Limits) -> None:
        self._on_tensor = on_tensor
        self._limits = limits
        self._num_nodes = 0

    def write(self, value: object, path: str = ROOT_PATH, depth: int = 0) -> Node:
        """Convert a value to a node.

        Raises: StateUnsupportedError: a leaf can't be transferred, or the whole is larger than the limits allow.
        """
        self._num_nodes += 1
        if self._num_nodes > self._limits.nodes:
            raise StateUnsupportedError(
                f"the state has more than {self._limits.nodes} leaves and containers (the first above the limit is "
                f"{path[:200]}); store large data in tensors",
                path=path,
            )
        if depth > self._limits.depth:
            raise StateUnsupportedError(
                f"{path[:200]} is nested deeper than {self._limits.depth} levels; check whether it contains itself",
                path=path,
            )
        subclass = tensor_subclass_of(value)
        if subclass is not None:
            parts = subclass.parts(value, path)
            return ["subclass", subclass.name, self.write(parts, _below(path, ".parts"), depth + 1)]
        if isinstance(value, torch.Tensor | LocalShard):
            part = part_of(value, path)
            return self._on_tensor(path, value) if part is None else self._write_shard(path, part)  # type: ignore[arg-type]
        leaf = self._write_leaf(value)
        return self._write_container(value, path, depth) if leaf is _NO_LEAF else leaf

    def _write_shard(self, path: str, part: LocalShard) -> Node:
        sharding = part.sharding
        return [
            "shard",
            list(sharding.shape),
            list(sharding.stride),
            [
                placement.dim if placement.split_factor is None else [placement.dim, placement.split_factor]
                for placement in sharding.placements
            ],
            list(sharding.mesh_shape),
            None if sharding.mesh_dim_names is None else list(sharding.mesh_dim_names),
            None if sharding.coordinate is None else list(sharding.coordinate),
            self._on_tensor(path, part.local),
        ]

    def _write_leaf(self, value: object) -> Node:
        if value is None or type(value) is bool or type(value) is str:
            return value
        if type(value) is int:
            return value if -_SHORT_INT <= value < _SHORT_INT else ["int", hex(value)]
        if type(value) is float:
            return value if math.isfinite(value) else ["float", _float_bits(value)]
        if type(value) is complex:
            return ["complex", _float_bits(value.real), _float_bits(value.imag)]
        if type(value) is bytes:
            return ["bytes", base64.b64encode(value).decode("ascii")]
        if type(value) is torch.dtype and value in DTYPE_NAMES:
            return ["dtype", DTYPE_NAMES[value]]
        if type(value) is torch.device:
            return ["device", str(value)]
        return _NO_LEAF

    def _write_container(self, value: object, path: str, depth: int) -> Node:
        kind = type(value)
        if kind is list or kind is tuple:
            return ["list" if kind is list else "tuple", *self._items(value, path, depth)]
        if kind is torch.Size:
            return ["size", *self._items(value, path, depth)]
        if kind is dict:
            return ["dict", *self._pairs(value, path, depth)]
        if kind is OrderedDict:
            # A module's state dict has its version table in this attribute, and load_state_dict reads it.
            metadata = getattr(value, "_metadata", None)
            return [
                "odict",
                self.write(metadata, _below(path, "._metadata"), depth + 1),
                *self._pairs(value, path, depth),
            ]
        if kind is Counter:
            return ["counter", *self._pairs(value, path, depth)]
        if kind is defaultdict:
            factory = value.default_factory  # type: ignore[attr-defined]
            if factory not in _FACTORY_NAMES:
                raise StateUnsupportedError(
                    f"{path} is a defaultdict of {factory!r}, which can't be transferred; use a defaultdict of "
                    f"{', '.join(_FACTORIES)}, or a dict",
                    path=path,
                )
            return ["ddict", _FACTORY_NAMES[factory], *self._pairs(value, path, depth)]
        if kind in _named_tuple_names:
            return ["named", _named_tuple_names[kind], *self._items(value, path, depth)]
        raise StateUnsupportedError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which can't be transferred; {_advice(value)}",
            path=path,
        )

    def _items(self, value: Any, path: str, depth: int) -> Iterator[Node]:
        for index, item in enumerate(value):
            yield self.write(item, _below(path, f"[{index}]"), depth + 1)

    def _pairs(self, value: Any, path: str, depth: int) -> Iterator[Node]:
        for key, item in value.items():
            yield self._write_key(key, path, depth + 1)
            yield self.write(item, _below(path, f"[{_label(key)}]"), depth + 1)

    def _write_key(self, key: object, path: str, depth: int) -> Node:
        if type(key) is tuple:
            if depth > self._limits.depth:
                raise StateUnsupportedError(f"a key of {path[:200]} is nested too deeply", path=path)
            return ["tuple", *(self._write_key(part, path, depth + 1) for part in key)]
        node = self._write_leaf(key)
        if node is _NO_LEAF:
            raise StateUnsupportedError(
                f"{path} has a key of type {type(key).__qualname__}; use numbers, strings, bytes or tuples",
                path=path,
            )
        return node


_NO_LEAF = object()


def _below(path: str, step: str) -> str:
    """Return a member's path, with a length limit. Every tensor has a path, and a peer may nest a million under a
    long one.
    """
    if len(path) < PATH_LENGTH_MAX:
        return path + step
    return path if path.endswith("…") else f"{path}…"


def _label(key: object) -> str:
    """Return a short text for a key in a path, even for a very long key."""
    try:
        text = repr(key)
    except ValueError:  # Python refuses to print integers with thousands of decimal digits
        text = f"a {type(key).__qualname__} with a very long integer"
    return text if len(text) <= 100 else f"{text[:100]}…"


def _advice(value: object) -> str:
    if type(value).__module__ == "numpy":
        return "convert it to a numpy scalar, or to an array of numbers or booleans"
    if isinstance(value, enum.Enum):
        return "store its .value, and rebuild the member when the state is loaded"
    if isinstance(value, set | frozenset):
        return "store sorted(...) of it, and rebuild the set when the state is loaded"
    if dataclasses.is_dataclass(value):
        return "store a dict of its fields, and rebuild the object when the state is loaded"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "register it on both sides with tft_ckpt.register_named_tuple"
    for plain in (int, float, complex, str, bytes, dict, list, tuple):
        if isinstance(value, plain):
            return f"it is a subclass, which may contain hidden data; convert it with {plain.__name__}(...)"
    return "convert it to numbers, strings, bytes, lists, dicts or tensors in the state dict's own hooks"


@final
class TreeReader:
    """A reader that converts one untrusted node to one state, for one use.

    Args:
        on_tensor: called with (path, node, sharding) for every tensor node, depth first, and returns its replacement.
            The sharding belongs to the whole tensor, or is None if the tensor is whole.
        on_subclass: called with (subclass, path, parts) for every tensor of a registered subclass, and returns its
            replacement.
        limits: larger states are refused.
        source: the node's source address, for the errors.
    """

    def __init__(
        self,
        on_tensor: Callable[[str, Node, Sharding | None], object],
        *,
        on_subclass: Callable[[TensorSubclass, str, Any], object],
        limits: Limits,
        source: str,
    ) -> None:
        self._on_tensor = on_tensor
        self._on_subclass = on_subclass
        self._limits = limits
        self._source = source
        self._num_nodes = 0

    def read(self, node: Node, path: str = ROOT_PATH, depth: int = 0) -> Any:
        """Rebuild a value.

        Raises:
            StateCorruptError: TreeWriter never writes such a node.
            StateUnsupportedError: it names a named tuple or a tensor subclass that is not registered here.
        """
        self._num_nodes += 1
        if self._num_nodes > self._limits.nodes:
            raise self.corrupt(path, f"there are more than {self._limits.nodes} leaves and containers")
        if depth > self._limits.depth:
            raise self.corrupt(path, f"it is nested deeper than {self._limits.depth}")
        if node is None or type(node) in (bool, str):
            return node
        if type(node) is int:
            if not -_SHORT_INT <= node < _SHORT_INT:
                raise self.corrupt(path, "its untagged integer is too long")
            return node
        if type(node) is float:
            if not math.isfinite(node):
                raise self.corrupt(path, "its float overflows")
            return node
        if type(node) is not list or not node or type(node[0]) is not str:
            raise self.corrupt(path, "it is neither plain data nor a tagged list")
        tag = node[0]
        if tag == "tensor":
            return self._on_tensor(path, node, None)
        if tag == "shard":
            if len(node) != 8:
                raise self.corrupt(path, "its shard has a wrong number of fields")
            return self._on_tensor(path, node[7], self._read_sharding(node, path))
        if tag in _LEAF_READERS:
            try:
                return _LEAF_READERS[tag](*node[1:])
            except (TypeError, ValueError, KeyError, RuntimeError, struct.error, binascii.Error):
                raise self.corrupt(path, f"its {tag} can't be read") from None
        return self._read_container(tag, node, path, depth)

    def _read_sharding(self, node: list[Node], path: str) -> Sharding:
        shape, stride, placements, mesh_shape, names, coordinate = node[1:7]
        if type(placements) is not list or len(placements) > MAX_MESH_DIMENSIONS:
            raise self.corrupt(path, "its placements are not a list, or are too many")
        try:
            return Sharding(
                shape=_as_tuple(shape),
                stride=_as_tuple(stride),
                placements=tuple(
                    Placement(*placement) if type(placement) is list else Placement(placement)
                    for placement in placements
                ),
                mesh_shape=_as_tuple(mesh_shape),
                mesh_dim_names=None if names is None else _as_tuple(names),
                coordinate=None if coordinate is None else _as_tuple(coordinate),
            )
        except (TypeError, ConfigError) as error:
            raise self.corrupt(path, f"its sharding is invalid ({str(error)[:300]})") from None

    def corrupt(self, path: str, sentence: str) -> StateCorruptError:
        """Return the error for a bad node."""
        source = f" from {self._source}" if self._source else ""
        return StateCorruptError(
            f"the manifest{source} is damaged at {path[:200]}: {sentence}", part="manifest", source=self._source
        )

    def _read_container(self, tag: str, node: list[Node], path: str, depth: int) -> Any:
        match tag:
            case "list":
                return self._items(node, 1, path, depth)
            case "tuple":
                return tuple(self._items(node, 1, path, depth))
            case "size":
                sizes = self._items(node, 1, path, depth)
                if any(type(size) is not int or not -_SHORT_INT <= size < _SHORT_INT for size in sizes):
                    raise self.corrupt(path, "its torch.Size contains other values than short integers")
                return torch.Size(sizes)
            case "dict":
                return self._pairs(node, 1, path, depth, into={})
            case "odict":
                return self._read_ordered(node, path, depth)
            case "counter":
                return self._pairs(node, 1, path, depth, into=Counter())
            case "ddict":
                if len(node) < 2 or type(node[1]) is not str or node[1] not in _FACTORIES:
                    raise self.corrupt(path, "its defaultdict has an unknown factory")
                return self._pairs(node, 2, path, depth, into=defaultdict(_FACTORIES[node[1]]))
            case "named":
                return self._read_named(node, path, depth)
            case "subclass":
                return self._read_subclass(node, path, depth)
            case _:
                raise self.corrupt(path, f"its tag {tag[:40]!r} is unknown")

    def _read_ordered(self, node: list[Node], path: str, depth: int) -> OrderedDict[Any, Any]:
        if len(node) < 2:
            raise self.corrupt(path, "its ordered dict is incomplete")
        result: OrderedDict[Any, Any] = OrderedDict()
        metadata = self.read(node[1], _below(path, "._metadata"), depth + 1)
        if metadata is not None:
            result._metadata = metadata  # type: ignore[attr-defined]
        self._pairs(node, 2, path, depth, into=result)
        return result

    def _read_named(self, node: list[Node], path: str, depth: int) -> Any:
        if len(node) < 2 or type(node[1]) is not str:
            raise self.corrupt(path, "its named tuple has no name")
        cls = _named_tuples.get(node[1])
        if cls is None:
            raise StateUnsupportedError(
                f"{path} is a named tuple {node[1][:200]!r}, which is not registered here; use register_named_tuple",
                path=path,
            )
        items = self._items(node, 2, path, depth)
        if len(items) != len(cls._fields):
            raise self.corrupt(path, f"its named tuple has {len(items)} fields, not {len(cls._fields)}")
        return cls._make(items)

    def _read_subclass(self, node: list[Node], path: str, depth: int) -> Any:
        if len(node) != 3 or type(node[1]) is not str:
            raise self.corrupt(path, "its tensor subclass has no name, or not exactly one part")
        subclass = _tensor_subclasses.get(node[1])
        if subclass is None and node[1].startswith(numpy_values.PREFIX):
            subclass = self._numpy_kind(node[1], path)
        if subclass is None:
            raise StateUnsupportedError(
                f"{path} is a tensor subclass {node[1][:200]!r}, which is not registered here; use "
                "register_tensor_subclass",
                path=path,
            )
        return self._on_subclass(subclass, path, self.read(node[2], _below(path, ".parts"), depth + 1))

    def _numpy_kind(self, name: str, path: str) -> TensorSubclass | None:
        try:
            return _of_numpy().get(name)
        except ImportError as error:
            raise StateUnsupportedError(
                f"{path} is a {name[:200]} at the source, and numpy is not installed here ({error}); install it, or "
                "store only plain numbers and tensors in the state",
                path=path,
            ) from error

    def _items(self, node: list[Node], first: int, path: str, depth: int) -> list[Any]:
        return [self.read(node[at], _below(path, f"[{at - first}]"), depth + 1) for at in range(first, len(node))]

    def _pairs(self, node: list[Node], first: int, path: str, depth: int, *, into: Any) -> Any:
        if (len(node) - first) % 2:
            raise self.corrupt(path, "the value of a key is missing")
        by_hash: Counter[int] = Counter()
        for at in range(first, len(node), 2):
            key = self._read_key(node[at], path, depth + 1)
            # Numbers with equal hashes are easy to find, and a dict of n such keys takes n * n comparisons.
            by_hash[hash(key)] += 1
            if by_hash[hash(key)] > KEYS_PER_HASH_MAX:
                raise self.corrupt(path, f"more than {KEYS_PER_HASH_MAX} of its keys have the same hash")
            if key in into:
                raise self.corrupt(path, f"its key {_label(key)} occurs twice")
            into[key] = self.read(node[at + 1], _below(path, f"[{_label(key)}]"), depth + 1)
        return into

    def _read_key(self, node: Node, path: str, depth: int) -> Any:
        if type(node) is list and node[:1] == ["tuple"]:
            if depth > self._limits.depth:
                raise self.corrupt(path, "a key is nested too deeply")
            return tuple(self._read_key(part, path, depth + 1) for part in node[1:])
        if type(node) is list and (not node or type(node[0]) is not str or node[0] not in _LEAF_READERS):
            raise self.corrupt(path, "a key is neither a leaf nor a tuple")
        return self.read(node, path, depth)


def _as_tuple(node: Node) -> tuple[Any, ...]:
    if type(node) is not list:
        raise TypeError("a list is missing")
    return tuple(node)


def _read_int(text: str) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", text):
        raise ValueError(text[:40])
    return int(text, 16)


def _read_device(text: str) -> torch.device:
    if not _DEVICE.fullmatch(text):
        raise ValueError(text[:40])
    return torch.device(text)


_LEAF_READERS: dict[str, Callable[..., object]] = {
    "int": _read_int,
    "float": _float_from_bits,
    "complex": lambda real, imag: complex(_float_from_bits(real), _float_from_bits(imag)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "dtype": lambda name: DTYPES[name],
    "device": _read_device,
}
