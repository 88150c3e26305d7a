"""Where a model is cut into fragments, what goes with what, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tft_algos import ConfigError, UsageError, fragment_model
from tft_algos.local_sgd.splitting import _cuts


class Decoder(nn.Module):
    """As most decoders are written: embeddings, a stack, a norm and a head."""

    def __init__(self, layers: int, *, width: int = 4, tied: bool = False, vocabulary: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def names(fragments: Sequence[nn.Module]) -> list[list[str]]:
    return [[name for name, _ in fragment.named_parameters()] for fragment in fragments]


def layers(fragments: Sequence[nn.Module], prefix: str = "layers") -> list[list[int]]:
    """Which layers of the stack have parameters in each fragment."""
    return [
        sorted({int(name.removeprefix(f"{prefix}.").split(".")[0]) for name in each if name.startswith(f"{prefix}.")})
        for each in names(fragments)
    ]


def check_whole(model: nn.Module, fragments: Sequence[nn.Module]) -> None:
    """Each parameter is in one fragment, itself, under its own name."""
    found = [item for fragment in fragments for item in fragment.named_parameters()]
    assert len({id(parameter) for _, parameter in found}) == len(found)
    own = dict(model.named_parameters())
    assert dict(found).keys() == own.keys()
    assert all(own[name] is parameter for name, parameter in found)


@pytest.mark.parametrize(("number", "expected"), [(1, [4]), (2, [2, 2]), (4, [1, 1, 1, 1])])
def test_a_decoder_is_cut_between_its_layers(number: int, expected: list[int]) -> None:
    model = Decoder(4)
    fragments = fragment_model(model, number)
    assert [len(each) for each in layers(fragments)] == expected
    assert names(fragments)[0][0] == "embedding.weight"
    assert names(fragments)[-1][-2:] == ["norm.weight", "head.weight"]
    check_whole(model, fragments)


def test_the_fragment_with_a_large_embedding_gets_fewer_layers() -> None:
    assert layers(fragment_model(Decoder(8, vocabulary=10), 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    model = Decoder(8, vocabulary=10)
    model.head = nn.Linear(4, 1)
    assert layers(fragment_model(model, 2)) == [[0, 1, 2], [3, 4, 5, 6, 7]]


def test_the_model_is_not_modified_and_its_parameters_are_not_copied() -> None:
    model = Decoder(3)
    text, state, hooks = repr(model), {k: v.clone() for k, v in model.state_dict().items()}, dict(vars(model))
    modules = {name: dict(vars(module)) for name, module in model.named_modules()}
    fragments = fragment_model(model, 3)
    assert repr(model) == text
    assert vars(model) == hooks
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == modules
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    with torch.no_grad():
        next(fragments[1].parameters()).fill_(7.0)
    assert model.layers[1][0].weight.eq(7.0).all()
    model(torch.tensor([0, 1])).sum().backward()
    assert all(parameter.grad is not None for fragment in fragments for parameter in fragment.parameters())


def test_a_shared_parameter_belongs_to_the_first_of_its_fragments() -> None:
    model = Decoder(4, tied=True)
    fragments = fragment_model(model, 2)
    check_whole(model, fragments)
    assert "embedding.weight" in names(fragments)[0]
    assert names(fragments)[1] == [
        "layers.2.0.weight",
        "layers.2.0.bias",
        "layers.3.0.weight",
        "layers.3.0.bias",
        "norm.weight",
    ]


def test_a_layer_that_is_used_several_times_is_one() -> None:
    model = nn.Module()
    shared, other = nn.Linear(3, 3), nn.Linear(3, 3)
    model.layers = nn.ModuleList([shared, shared, other, shared])
    fragments = fragment_model(model, 2)
    assert names(fragments) == [["layers.0.weight", "layers.0.bias"], ["layers.2.weight", "layers.2.bias"]]
    with pytest.raises(ConfigError, match="num_fragments is 3 and this Module has 2 layers"):
        fragment_model(model, 3)


def test_the_stack_is_found_in_every_usual_shape() -> None:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8)

    as_dict = nn.Module()
    as_dict.layers = nn.ModuleDict({str(index): block() for index in range(4)})
    as_dict.output = nn.Linear(4, 4)
    assert layers(fragment_model(as_dict, 2)) == [[0, 1], [2, 3]]

    sequential = nn.Sequential(nn.Embedding(5, 4), *[block() for _ in range(4)], nn.RMSNorm(4), nn.Linear(4, 5))
    assert [sorted({name[0] for name in each}) for each in names(fragment_model(sequential, 2))] == [
        ["0", "1", "2"],
        ["3", "4", "5", "6"],
    ]

    nested = nn.Module()  # two embeddings side by side are no layers, large as they may be
    nested.transformer = nn.ModuleDict(
        {"wte": nn.Embedding(999, 4), "wpe": nn.Embedding(999, 4), "h": nn.ModuleList([block() for _ in range(3)])}
    )
    assert layers(fragment_model(nested, 3), "transformer.h") == [[0], [1], [2]]

    perceptron = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 9))
    assert names(fragment_model(perceptron, 3)) == [[f"{n}.weight", f"{n}.bias"] for n in (0, 2, 4)]

    mixed = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 9))
    assert [len(each) for each in names(fragment_model(mixed, 2))] == [4, 2]


def test_experts_inside_a_layer_are_not_the_stack() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 8)
            self.experts = nn.ModuleList(nn.Linear(4, 64) for _ in range(8))

    model = nn.Module()
    model.layers = nn.ModuleList(Experts() for _ in range(2))
    assert layers(fragment_model(model, 2)) == [[0], [1]]
    with pytest.raises(ConfigError, match="has 2 layers"):
        fragment_model(model, 3)


@pytest.mark.parametrize("one_class", [True, False])
def test_an_encoder_and_a_decoder_are_one_row_of_layers(one_class: bool) -> None:
    class Encoder(Decoder):
        pass

    model = nn.Module()
    model.encoder = (Decoder if one_class else Encoder)(2)
    model.decoder = Decoder(2)
    found = names(fragment_model(model, 4))
    assert [each[0] for each in found] == [
        "encoder.embedding.weight",
        "encoder.layers.1.0.weight",
        "decoder.layers.0.0.weight",
        "decoder.layers.1.0.weight",
    ]


def test_a_small_stack_in_the_head_goes_with_the_last_fragment() -> None:
    model = Decoder(4, width=8)
    model.head = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 2))
    fragments = fragment_model(model, 4)
    assert layers(fragments) == [[0], [1], [2], [3]]
    assert names(fragments)[-1][-1] == "head.2.bias"


def test_frozen_layers_are_none_to_cut_between() -> None:
    model = Decoder(4)
    model.layers[1].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    assert layers(fragment_model(model, 2)) == [[0, 1, 2], [3]]
    with pytest.raises(ConfigError, match="num_fragments is 3 and this Decoder has 2 layers with parameters to train"):
        fragment_model(model, 3)


def test_parameters_of_the_model_itself_are_in_a_fragment_too() -> None:
    model = Decoder(2)
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    fragments = fragment_model(model, 2)
    check_whole(model, fragments)
    assert "scale" in names(fragments)[0]


def test_names_say_what_is_in_each_fragment() -> None:
    model = Decoder(3, tied=True)
    fragments = fragment_model(model, [["embedding", "layers.0"], "layers", ("norm.weight", "head")])
    check_whole(model, fragments)
    assert names(fragments) == [
        ["embedding.weight", "layers.0.0.weight", "layers.0.0.bias"],
        ["layers.1.0.weight", "layers.1.0.bias", "layers.2.0.weight", "layers.2.0.bias"],
        ["norm.weight"],
    ]


def test_layers_may_be_interleaved() -> None:
    fragments = fragment_model(
        Decoder(4), [["embedding", "layers.0", "layers.2"], ["layers.1", "layers.3", "norm", "head"]]
    )
    assert layers(fragments) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (0, "num_fragments is 0; give at least 1, or the names of modules"),
        (5, "num_fragments is 5 and this Decoder has 3 layers with parameters to train; give fewer fragments"),
        (True, "num_fragments is True; give a whole number"),
        (2.0, r"num_fragments is 2\.0; give a whole number, or a list with names for each fragment"),
        ("layers", "num_fragments is 'layers'; give a whole number, or a list"),
        ([], "num_fragments is an empty list"),
        ([["layers"], []], r"fragment 1 is \[\]; give the name of a module or parameter, or several"),
        ([1, 2], "fragment 0 is 1; give the name"),
        (
            ["layers.7"],
            "fragment 0 names 'layers.7', and this Decoder has no .* its children are embedding, layers, norm and 1 m",
        ),
        (
            ["layers", "layers.0"],
            r"fragment 1, layers\.0, has no trainable parameter that is not in an earlier fragment",
        ),
        (
            ["embedding", "layers", "norm"],
            r"head\.weight of this Decoder is in no fragment, so replicas would drift apart",
        ),
        (["norm"], r"embedding\.weight, layers\.0\.0\.weight, layers\.0\.0\.bias and 5 more of this Decoder are in no"),
    ],
)
def test_what_can_t_work_is_refused_in_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fragment_model(Decoder(3), given)


def test_what_is_no_model_or_has_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="fragment_model was given a list; give a module"):
        fragment_model([], 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no parameter of this Decoder is trainable"):
        fragment_model(Decoder(1).requires_grad_(False), 1)
    with pytest.raises(ConfigError, match="this Linear has no stack of layers with parameters to train"):
        fragment_model(nn.Linear(2, 2), 2)


def test_a_fragment_is_not_called() -> None:
    with pytest.raises(UsageError, match="call the model itself"):
        fragment_model(nn.Linear(2, 2), 1)[0](torch.ones(2))


@pytest.fixture
def world() -> Iterator[None]:
    """Torch's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("sharded_first", [True, False])
def test_a_sharded_model_is_cut_alike_before_and_after(sharded_first: bool) -> None:
    model = Decoder(4)
    plain = names(fragment_model(model, 2))
    fragments = [] if sharded_first else fragment_model(model, 2)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if sharded_first:
        fragments = fragment_model(model, 2)
        check_whole(model, fragments)
    assert names(fragments) == plain
    model(torch.tensor([0, 1])).sum().backward()


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=9), data=st.data())
def test_the_largest_fragment_is_as_small_as_it_can_be(sizes: list[int], data: Any) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    ends = _cuts(sizes, parts)

    def largest(cut: Sequence[int]) -> int:
        return max(sum(sizes[begin:end]) for begin, end in itertools.pairwise((0, *cut)))

    assert len(ends) == parts
    assert ends[-1] == len(sizes)
    assert all(begin < end for begin, end in itertools.pairwise((0, *ends)))
    every = ((*cut, len(sizes)) for cut in itertools.combinations(range(1, len(sizes)), parts - 1))
    assert largest(ends) == min(map(largest, every))
