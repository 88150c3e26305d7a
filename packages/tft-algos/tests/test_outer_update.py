"""An outer update of one's own, in the loop that runs LocalSGD and DiLoCo too: the test is all but one member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tft_algos import ConfigError, DiLoCo, LocalSGD, OuterFragment, OuterLoop, OuterUpdate, UserStateError
from tft_algos.local_sgd.diloco import OuterOptimizerStep
from tft_algos.local_sgd.local_sgd import ParameterMean
from tft_algos.testing import plan_of
from tft_coord.core.types import QuorumKey

SAME = QuorumKey(7, 7)  # the quorum stands unchanged


class Remembers(OuterUpdate):
    """Adds up the means that it has seen, and takes so much off the global weights."""

    def __init__(self, num_fragments: int = 1) -> None:
        self.sums = [torch.zeros(1) for _ in range(num_fragments)]
        self.calls: list[str] = []
        self.raises: Exception | None = None

    def capture(self, index: int, fragment: OuterFragment) -> None:
        assert not torch.is_grad_enabled()
        self.calls.append(f"capture {index}")
        for sent, whole, own in zip(fragment.sent, fragment.global_weights, fragment.local(), strict=True):
            torch.sub(whole, own, out=sent)

    def apply(self, index: int, fragment: OuterFragment) -> None:
        assert not torch.is_grad_enabled()
        self.calls.append(f"apply {index}")
        if self.raises is not None:
            raise self.raises
        fragment.restore()
        for parameter, mean in zip(fragment.parameters, fragment.sent, strict=True):
            self.sums[index] += mean.mean()
            parameter.sub_(self.sums[index])

    def fingerprint(self) -> Mapping[str, str]:
        return {"sums": "as they are"}

    def state_dict(self, index: int) -> dict[str, Any]:
        return {"sum": self.sums[index]}

    def load_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        self.sums[index].copy_(state["sum"])


class Trains:
    """A model of weights of ten, of which each inner step takes one."""

    def __init__(self, num_layers: int = 1) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(num_layers)))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(10.0)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def train(self, inner_steps: int) -> list[float]:
        """Returns: the weights."""
        for _ in range(inner_steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.inner.step()
        return [parameter.item() for parameter in self.model.parameters()]


def test_it_says_what_is_sent_and_what_is_made_of_the_mean(rigs: Any) -> None:
    rig, own, update = rigs(plan_of(7, size=1), SAME, SAME), Trains(), Remembers()
    with OuterLoop(rig.manager, [own.model], own.inner, update, 2) as loop:
        assert own.train(2) == [8.0]  # 10 less 2
        assert own.train(2) == [4.0]  # 8 less 2 and 2
        assert update.calls == ["capture 0", "apply 0"] * 2
        state = loop.state_dict()
    assert list(state) == ["Remembers fragment 0"]
    kept = state["Remembers fragment 0"]
    assert kept["sum"].item() == 4.0
    assert [weight.item() for weight in kept["original_parameters"].values()] == [4.0]


def test_fragments_have_state_of_their_own_and_go_one_after_the_other(rigs: Any) -> None:
    rig, own, update = rigs(plan_of(7, size=1), *[SAME] * 4), Trains(2), Remembers(2)
    with OuterLoop(rig.manager, list(own.model), own.inner, update, 4):
        own.train(8)
    assert [call for call in update.calls if call.startswith("apply")] == ["apply 0", "apply 1"] * 2
    assert [each.item() for each in update.sums] == [6.0, 8.0]  # 2 + 4 and 4 + 4 inner steps


def test_a_sync_that_fails_applies_nothing(rigs: Any) -> None:
    rig, own, update = rigs(plan_of(7, size=1), SAME, verdicts=[True, False]), Trains(), Remembers()
    with OuterLoop(rig.manager, [own.model], own.inner, update, 2):
        assert own.train(2) == [10.0]
    assert (update.calls, update.sums[0].item()) == (["capture 0"], 0.0)


def test_what_apply_raises_leaves_a_state_that_heals(rigs: Any) -> None:
    rig, own, update = rigs(plan_of(7, size=1), SAME), Trains(), Remembers()
    update.raises = MemoryError("no memory")
    with OuterLoop(rig.manager, [own.model], own.inner, update, 2):
        with pytest.raises(MemoryError, match="no memory"):
            own.train(2)
        assert rig.manager.status().is_torn


def test_some_of_the_live_weights_may_stay(rigs: Any) -> None:
    rig, own = rigs(plan_of(7, size=1), SAME), Trains()
    with OuterLoop(rig.manager, [own.model], own.inner, Remembers(), 4, fragment_update_alpha=0.25) as loop:
        assert own.train(4) == [6.0]  # both are
        (state,) = loop.state_dict().values()
        assert [weight.item() for weight in state["original_parameters"].values()] == [6.0]


def test_its_state_goes_with_the_weights(rigs: Any) -> None:
    first, second = rigs(plan_of(7, size=1), SAME), rigs(plan_of(7, size=1), SAME)
    own, other, update, fresh = Trains(), Trains(), Remembers(), Remembers()
    with OuterLoop(first.manager, [own.model], own.inner, update, 2) as loop:
        own.train(2)
        state = loop.state_dict()
    OuterLoop(second.manager, [other.model], other.inner, fresh, 2).load_state_dict(state)
    assert (fresh.sums[0].item(), other.train(0)) == (2.0, [8.0])
    # A newcomer gets the same from the Manager, under the same key.
    taken = first.manager._parts.shared.user_state.take()["Remembers fragment 0"]
    assert taken["sum"].item() == 2.0


def test_a_state_of_another_update_is_refused_and_changes_nothing(rigs: Any) -> None:
    rig, own, update = rigs(plan_of(7, size=1)), Trains(), Remembers()
    loop = OuterLoop(rig.manager, [own.model], own.inner, update, 2)
    (key, state), *_ = loop.state_dict().items()
    with pytest.raises(UserStateError, match=r"Remembers has \[\] and this replica \['sum'\]; use the same outer"):
        loop.load_state_dict({key: {"original_parameters": state["original_parameters"]}})
    with pytest.raises(UserStateError, match="this is not a state of Remembers"):
        loop.load_state_dict({key: {"sum": torch.zeros(1)}})


def test_what_has_to_be_alike_is_compared_between_replicas(rigs: Any) -> None:
    rig, own = rigs(plan_of(7, size=1)), Trains()
    with OuterLoop(rig.manager, [own.model], own.inner, Remembers(), 2):
        parts = dict(rig.coordinator.requests[0].fingerprint)
    assert {"user/algorithm", "user/fragments", "user/reductions", "user/sums"} <= set(parts)


class Half(OuterUpdate):
    """Has a state that nobody can load."""

    def capture(self, index: int, fragment: OuterFragment) -> None: ...

    def apply(self, index: int, fragment: OuterFragment) -> None: ...

    def state_dict(self, index: int) -> dict[str, Any]:
        return {"sum": 1}


@pytest.mark.parametrize(
    ("update", "sentence"),
    [
        ("mean", "outer_update is a str; give an object of a subclass of OuterUpdate"),
        (Remembers, "outer_update is a ABCMeta; give an object of a subclass of OuterUpdate"),
        (Half(), "Half has only one of state_dict and load_state_dict, and a replica that heals needs both"),
    ],
)
def test_what_is_no_outer_update_is_refused(rigs: Any, update: Any, sentence: str) -> None:
    rig, own = rigs(plan_of(7, size=1)), Trains()
    with pytest.raises(ConfigError, match=sentence):
        OuterLoop(rig.manager, [own.model], own.inner, update, 2)


@pytest.mark.parametrize("algorithm", ["LocalSGD", "DiLoCo"])
def test_local_sgd_and_diloco_are_this_loop_with_an_update_of_theirs(rigs: Any, algorithm: str) -> None:
    found = []
    for is_loop in (False, True):
        rig, own = rigs(plan_of(7, size=2), SAME, SAME), Trains()
        outer = torch.optim.SGD(own.model.parameters(), lr=0.5, momentum=0.9)
        if is_loop:
            update = ParameterMean() if algorithm == "LocalSGD" else OuterOptimizerStep([outer])
            strategy: Any = OuterLoop(rig.manager, [own.model], own.inner, update, 2)
        elif algorithm == "LocalSGD":
            strategy = LocalSGD(rig.manager, own.model, own.inner, 2)
        else:
            strategy = DiLoCo(rig.manager, [own.model], own.inner, outer, 2)
        with strategy:
            weights = own.train(2), own.train(2)
        parts = dict(rig.coordinator.requests[0].fingerprint)
        found.append((weights, parts, rig.manager._parts.shared.user_state.names))
    assert found[0] == found[1]
