"""What torch's own models, optimizers and schedulers hold travels to the bit, and is good to go on with."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler, swa_utils

from tft_ckpt import (
    CheckpointError,
    ConfigError,
    Limits,
    StateCorruptError,
    StateKey,
    StateLayoutError,
    StateUnsupportedError,
    register_tensor_subclass,
)
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import HEADER_BYTES, MAGIC, VERSION, checksum, decode, describe
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.target import Target
from tft_ckpt.state.tree import DTYPES
from tft_ckpt.testing import assert_same_state, sample_state

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
LIMITS = Limits()

quick = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def snapshot_of(state: object) -> Snapshot:
    snapshot = Snapshot.take(state, key=KEY, chunk_bytes=4096, limits=LIMITS, allocate=Buffer)
    while not snapshot.checksum_next_chunk():
        pass
    return snapshot


def encoded(state: object) -> bytes:
    manifest = snapshot_of(state).manifest_bytes
    assert manifest is not None
    return manifest


def transferred(state: object, into: object = None) -> Any:
    """The state as a receiver would have it, from the manifest's bytes and the run's bytes alone."""
    snapshot = snapshot_of(state)
    assert snapshot.manifest_bytes is not None
    layout = decode(snapshot.manifest_bytes, limits=LIMITS).layout
    target = Target.into(layout, into, Buffer)
    at = 0
    for piece in target.views(0, layout.data_bytes):
        piece[:] = snapshot.data[at : at + len(piece)]
        at += len(piece)
    return target.finish()


def sealed(body: bytes) -> bytes:
    """A manifest with a right header: what a hostile source would send."""
    summed = struct.pack("<IQ", VERSION, len(body))
    return struct.pack("<8sIQQ", MAGIC, VERSION, len(body), checksum(summed + body)) + body


# ---- optimizers ----


def subclasses_in(module: Any, base: type[Any]) -> dict[str, type[Any]]:
    found = {name: getattr(module, name) for name in sorted(vars(module))}
    return {name: cls for name, cls in found.items() if inspect.isclass(cls) and issubclass(cls, base) and cls != base}


OPTIMIZERS = subclasses_in(torch.optim, torch.optim.Optimizer)
EXTRA: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": torch.tensor(0.01), "amsgrad": True},
    "AdamW": {"foreach": True},
    "LBFGS": {"history_size": 3, "max_iter": 3},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {"decoupled_weight_decay": True},
}


def learner(name: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A small model, an optimizer of the given name, and one step of training with it."""
    torch.manual_seed(seed)
    model: torch.nn.Module = torch.nn.Linear(3, 2, bias=name != "Muon")
    inputs = torch.ones(2, 3)
    if name == "SparseAdam":
        model = torch.nn.Embedding(5, 3, sparse=True)
        inputs = torch.tensor([1, 2, 2])
    optimizer = OPTIMIZERS[name](model.parameters(), **EXTRA.get(name, {}))

    def step() -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(inputs).square().sum()
            value.backward()
            return value

        optimizer.step(loss)

    return model, optimizer, step


def both(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_received_an_optimizer_steps_as_its_source_does(name: str) -> None:
    model, optimizer, step = learner(name, seed=1)
    step()
    step()
    mine, my_optimizer, my_step = learner(name, seed=2)
    state = both(model, optimizer)
    got = transferred(state)
    assert_same_state(got, state)
    mine.load_state_dict(got["model"])
    my_optimizer.load_state_dict(got["optimizer"])
    step()
    my_step()
    assert_same_state(both(mine, my_optimizer), both(model, optimizer))
    # And in place, now that there is something to receive into.
    step()
    got = transferred(both(model, optimizer), both(mine, my_optimizer))
    assert_same_state(mine.state_dict(), model.state_dict())
    my_optimizer.load_state_dict(got["optimizer"])
    assert_same_state(both(mine, my_optimizer), both(model, optimizer))


# ---- schedulers ----


class Halving:
    """A callable object, of which a scheduler keeps the attributes."""

    def __init__(self) -> None:
        self.factor = 0.5

    def __call__(self, step: float) -> float:
        return float(self.factor**step)


O = torch.optim.Optimizer  # noqa: E741
SCHEDULERS: dict[str, Callable[[O], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Halving()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, scale_fn=Halving(), scale_mode="iterations"),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.1),
}


def scheduled(name: str, num_steps: int) -> tuple[torch.optim.Optimizer, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    parameter.grad = torch.ones(2)
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    return optimizer, scheduler


def test_every_scheduler_of_torch_is_among_them() -> None:
    known = set(SCHEDULERS) | {"_LRScheduler"}
    assert set(subclasses_in(lr_scheduler, lr_scheduler.LRScheduler)) <= known


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_travel_and_go_on(name: str) -> None:
    optimizer, scheduler = scheduled(name, num_steps=3)
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    got = transferred(state)
    assert_same_state(got, state)
    mine, my_scheduler = scheduled(name, num_steps=0)
    mine.load_state_dict(got["optimizer"])
    my_scheduler.load_state_dict(got["scheduler"])
    assert_same_state(my_scheduler.state_dict(), scheduler.state_dict())
    assert_same_state(mine.state_dict(), optimizer.state_dict())


# ---- modules, scalers, random numbers ----


class Extra(torch.nn.Module):
    """Keeps plain data beside its tensors, as torch lets a module do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([[True, False]]))
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.float8_e5m2))
        self.seen = {"words": {3: ("a", None)}}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def channels_last(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "batch norm": lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)),
    "lstm": lambda: torch.nn.LSTM(3, 4, num_layers=2),
    "transformer": lambda: torch.nn.TransformerEncoderLayer(8, 2, 16),
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(2, 2)),
    "averaged": lambda: swa_utils.AveragedModel(torch.nn.Linear(2, 2), use_buffers=True),
    "complex": lambda: torch.nn.Linear(2, 2, dtype=torch.complex64),
    "channels last": lambda: channels_last(torch.nn.Conv2d(4, 4, 3)),
    "extra state": Extra,
}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("kind", MODULES)
def test_modules_travel_with_buffers_and_versions(kind: str) -> None:
    torch.manual_seed(1)
    model = MODULES[kind]()
    torch.manual_seed(2)
    mine = MODULES[kind]()
    state = model.state_dict()
    got = transferred(state)
    assert_same_state(got, state)
    assert got._metadata == state._metadata  # type: ignore[attr-defined]
    mine.load_state_dict(got)
    assert_same_state(mine.state_dict(), state)
    torch.manual_seed(3)
    other = MODULES[kind]()
    transferred(state, other.state_dict())
    for name, tensor in other.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert_same_state(tensor, state[name])


def test_tied_weights_stay_tied() -> None:
    embedding = torch.nn.Embedding(6, 4)
    head = torch.nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    got = transferred({"embedding": embedding.state_dict(), "head": head.state_dict()})
    assert got["embedding"]["weight"].data_ptr() == got["head"]["weight"].data_ptr()


def test_a_scaler_travels() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1, requires_grad=True).sum())
    got = transferred(scaler.state_dict())
    assert_same_state(got, scaler.state_dict())
    mine = torch.amp.GradScaler("cpu")
    mine.load_state_dict(got)
    assert mine.state_dict() == scaler.state_dict()


def test_random_number_generators_go_on_with_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(5)
    python = random.Random(5)
    state = {"torch": generator.get_state(), "python": python.getstate()}
    got = transferred(state)
    assert_same_state(got, state)
    mine, my_python = torch.Generator(), random.Random(6)
    mine.set_state(got["torch"])
    my_python.setstate(got["python"])
    assert torch.rand(4, generator=mine).equal(torch.rand(4, generator=generator))
    assert my_python.random() == python.random()


# ---- tensor subclasses ----


class Scaled(torch.Tensor):
    """A table of small integers and their scale, as quantization libraries hold weights."""

    table: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, table: torch.Tensor, scale: float) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, table.shape, dtype=torch.float32)
        made.table, made.scale = table, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"nobody computes with it here: {func}")


class Tagged(torch.Tensor):
    """Another subclass, that nobody registers."""


def flatten(tensor: Scaled) -> dict[str, Any]:
    return {"table": tensor.table, "scale": tensor.scale}


def unflatten(parts: Any) -> Scaled:
    if not isinstance(parts["table"], torch.Tensor) or type(parts["scale"]) is not float:
        raise TypeError("a table and a scale are needed")
    return Scaled(parts["table"], parts["scale"])


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from tft_ckpt.state import tree

    monkeypatch.setattr(tree, "_tensor_subclasses", {})
    monkeypatch.setattr(tree, "_tensor_subclasses_by_type", {})
    register_tensor_subclass(Scaled, flatten, unflatten)


def scaled(start: int, scale: float, size: int = 8) -> Scaled:
    return Scaled(torch.arange(start, start + size, dtype=torch.int32), scale)


def test_a_subclass_is_refused_by_path_unless_it_is_registered() -> None:
    for tensor in (scaled(0, 1.0), torch.ones(2).as_subclass(Tagged)):
        with pytest.raises(StateUnsupportedError, match="register_tensor_subclass") as caught:
            encoded({"w": [tensor]})
        assert caught.value.path == "state['w'][0]"


@pytest.mark.usefixtures("_registered")
def test_a_registered_subclass_travels() -> None:
    state = {"w": scaled(0, 0.5), "again": torch.ones(2)}
    got = transferred(state)
    assert_same_state(got, state)
    assert type(got["w"]) is Scaled
    assert got["w"].scale == 0.5


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("size", [8, 1 << 15])
def test_a_registered_subclass_is_received_in_place(size: int) -> None:
    state, into = {"w": scaled(0, 0.5, size)}, {"w": scaled(9, 0.25, size)}
    got = transferred(state, into)
    assert_same_state(got, state)
    assert got["w"].table is into["w"].table
    assert into["w"].table.equal(state["w"].table)
    for other in (torch.ones(8), scaled(0, 1.0, size + 1)):
        with pytest.raises(StateLayoutError) as caught:
            transferred(state, {"w": other})
        assert caught.value.path.startswith("state['w']")


@pytest.mark.usefixtures("_registered")
def test_only_what_was_registered_is_called() -> None:
    """A name that arrives is looked up among those that were registered, and nowhere else."""
    body = json.loads(encoded({"w": scaled(0, 0.5)})[HEADER_BYTES:])
    name = body["state"][2][1]
    for other in ("os.system", "builtins.eval", name + "x", "torch.Tensor"):
        body["state"][2][1] = other
        with pytest.raises(StateUnsupportedError, match="not registered here"):
            decode(sealed(json.dumps(body).encode("ascii")), limits=LIMITS)
    for node in (["subclass"], ["subclass", name], ["subclass", [name], None], ["subclass", name, None, None]):
        body["state"] = node
        with pytest.raises(StateCorruptError):
            decode(sealed(json.dumps(body).encode("ascii")), limits=LIMITS)
    # Parts of another form are for the registered function to refuse, once everything is here.
    body["state"], body["segments"], body["sums"] = ["subclass", name, ["dict", "table", 1]], [], ""
    layout = decode(sealed(json.dumps(body).encode("ascii")), limits=LIMITS).layout
    with pytest.raises(StateUnsupportedError, match="`unflatten` function failed"):
        Target.fresh(layout, Buffer(0)).finish()


@pytest.mark.usefixtures("_registered")
def test_functions_that_fail_are_named() -> None:
    def broken(value: object) -> Any:
        raise KeyError("table")

    register_tensor_subclass(Scaled, broken, unflatten)
    with pytest.raises(StateUnsupportedError, match="Scaled") as caught:
        encoded([scaled(0, 1.0)])
    assert caught.value.path == "state[0]"
    register_tensor_subclass(Scaled, flatten, lambda parts: parts["table"])
    with pytest.raises(StateUnsupportedError, match="returned a Tensor"):
        transferred([scaled(0, 1.0)])


@pytest.mark.usefixtures("_registered")
def test_what_is_no_subclass_cannot_be_registered() -> None:
    from torch.distributed.tensor import DTensor

    for cls in (int, torch.Tensor, torch.nn.Parameter, DTensor, "Scaled"):
        with pytest.raises(ConfigError):
            register_tensor_subclass(cls, flatten, unflatten)  # type: ignore[arg-type]
    for functions in ((flatten, None), ("flatten", unflatten)):
        with pytest.raises(ConfigError, match="give two functions"):
            register_tensor_subclass(Scaled, *functions)  # type: ignore[arg-type]
    double = type("Scaled", (torch.Tensor,), {"__module__": __name__})
    with pytest.raises(ConfigError, match="another"):
        register_tensor_subclass(double, flatten, unflatten)


# ---- any state ----

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 0])]),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from([name for name in DTYPES if name != "complex32"]))]
    shape = draw(st.lists(st.integers(0, 70), max_size=2))
    numbers = torch.tensor(list(draw(st.binary(min_size=16, max_size=16))), dtype=torch.uint8)
    count = int(torch.Size(shape).numel())
    if dtype is torch.bool:
        numbers %= 2  # torch's own copies of other bytes are not equal to the bit
    raw = numbers.repeat(count * dtype.itemsize // 16 + 1)
    tensor = raw[: count * dtype.itemsize].view(dtype).view(shape)
    return tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor


states = st.recursive(
    st.one_of(plain, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=4)), inner, max_size=4),
    ),
    max_leaves=12,
)


def zeroed(state: Any) -> Any:
    """A state of the same form, with other numbers, contiguous."""
    if isinstance(state, torch.Tensor):
        return torch.empty(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, list | tuple) and type(state) is not torch.Size:
        return [zeroed(value) for value in state]
    return None


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ():
        yield from tensors_in(value)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Its values at the strides of its shape; torch calls every empty one contiguous, whatever its strides."""
    return tensor.contiguous() if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)


def test_an_empty_tensor_is_received_into_one_of_other_strides() -> None:
    state, into = torch.empty_strided((2, 0), (1, 2)), torch.empty_strided((2, 0), (1, 1))
    got = transferred(state, into)
    assert got is into
    assert_same_state(dense(got), dense(state))


@quick
@given(states)
def test_any_state_is_received_into_one_of_its_form(state: Any) -> None:
    into = zeroed(state)
    got = transferred(state, into)
    mine, theirs = list(tensors_in(got)), list(tensors_in(state))
    assert [id(tensor) for tensor in mine] == [id(tensor) for tensor in tensors_in(into)]
    for tensor, expected in zip(mine, theirs, strict=True):
        assert_same_state(dense(tensor), dense(expected))
    assert_same_state(transferred(state), state)


@quick
@given(states, states)
def test_any_state_is_received_into_any_other_one_or_refused_with_a_path(state: Any, into: Any) -> None:
    before = [tensor.clone() for tensor in tensors_in(into)]
    try:
        got = transferred(state, into)
    except StateLayoutError as error:
        refused = error
    else:
        for tensor, expected in zip(tensors_in(got), tensors_in(state), strict=True):
            assert_same_state(dense(tensor), dense(expected))
        return
    assert refused.path.startswith("state")
    for tensor, kept in zip(tensors_in(into), before, strict=True):
        assert_same_state(tensor.contiguous(), kept.contiguous())


# ---- manifests that were tampered with, under a right checksum ----

NUMBERS = [0, 1, -1, 2**31, 2**48 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), 1.5, 1e308]
ATOMS: list[Any] = [
    *NUMBERS,
    None,
    True,
    "",
    "tensor",
    "int",
    "0x" + "f" * 400,
    "\ud800",
    ["int", "0x" + "f" * 400],
    [],
    {},
    [[]],
    {"a": []},
]
TAGS = ["list", "tuple", "size", "dict", "odict", "counter", "ddict", "named", "subclass", "tensor", "shard"]
TAGS += ["int", "float", "complex", "bytes", "dtype", "device"]


def mutated(body: Any, rng: random.Random) -> Any:
    """One thing changed somewhere: a number, a length, a count, the nesting, or one part put in place of another."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in entries:
            places.append((node, key))
            walk(value)

    walk(body)
    parent, key = rng.choice(places)
    value = parent[key]
    match rng.randrange(8):
        case 0:
            parent[key] = copy.deepcopy(rng.choice(ATOMS))
        case 1 if isinstance(value, int):
            parent[key] = value + rng.choice([-64, -1, 1, 64, 2**40])
        case 2 if isinstance(parent, list):
            del parent[key]
        case 3 if isinstance(parent, list):
            parent.insert(key, copy.deepcopy(value))
        case 4:
            other, where = rng.choice(places)
            parent[key] = copy.deepcopy(other[where])
        case 5:
            for _ in range(rng.choice([1, 5, 70])):
                value = [rng.choice(TAGS), value]
            parent[key] = value
        case 6 if isinstance(value, list):
            parent[key] = (value * rng.choice([2, 50]))[:5000]
        case _:
            parent[key] = [rng.choice(TAGS), *(copy.deepcopy(rng.choice(ATOMS)) for _ in range(rng.randrange(8)))]
    return body


SAMPLE = sample_state(num_bytes=64)
SAMPLE_BODY = encoded(SAMPLE)[HEADER_BYTES:]
SMALL = Limits(data_bytes=1 << 16)


def try_to_use(body: bytes) -> None:
    """It is refused by name, or a state can be made of it; no other error, and no memory beyond what was announced."""
    tracemalloc.start()
    try:
        layout = decode(sealed(body), limits=SMALL).layout
    except (StateCorruptError, StateUnsupportedError):
        return
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100 * len(body) + (1 << 16), "a manifest takes memory in proportion to its length"
    assert layout.data_bytes <= SMALL.data_bytes
    target = Target.fresh(layout, Buffer(layout.data_bytes))
    target.finish()
    with suppress(StateLayoutError):
        Target.into(layout, SAMPLE, Buffer)


@settings(quick, max_examples=250)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_manifest_that_was_tampered_with_is_refused_or_right(seed: int, num_changes: int) -> None:
    rng = random.Random(seed)
    body = json.loads(SAMPLE_BODY)
    for _ in range(num_changes):
        body = mutated(body, rng)
    try_to_use(json.dumps(body).encode("ascii"))


def test_what_is_refused_is_of_one_family() -> None:
    assert all(
        issubclass(cls, CheckpointError)
        for cls in (StateCorruptError, StateUnsupportedError, StateLayoutError, ConfigError)
    )


# ---- many leaves ----


def many(count: int) -> dict[str, Any]:
    return {"exp_avg": {index: torch.zeros(4) for index in range(count)}, "step": list(range(count))}


def test_time_grows_as_the_number_of_leaves_does() -> None:
    """Eight times the leaves take nowhere near 64 times the time, in any of the passes over a state."""

    def seconds(count: int) -> list[float]:
        state, into = many(count), many(count)
        marks = [time.process_time()]
        describe(state, key=KEY, chunk_bytes=4096, limits=LIMITS)
        marks.append(time.process_time())
        manifest = encoded(state)
        marks.append(time.process_time())
        layout = decode(manifest, limits=LIMITS).layout
        marks.append(time.process_time())
        Target.into(layout, into, Buffer).finish()
        marks.append(time.process_time())
        return [after - before for before, after in itertools.pairwise(marks)]

    # What collecting garbage takes depends on all else that is alive in this process.
    gc.collect()
    gc.disable()
    try:
        small, large = seconds(1_250), seconds(10_000)
    finally:
        gc.enable()
    for before, after in zip(small, large, strict=True):
        assert after < 30 * before + 0.2, (small, large)
