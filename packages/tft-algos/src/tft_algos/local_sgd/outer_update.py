"""What a sync of replicas that train on their own sends, and what it makes of the mean: the outer update.

LocalSGD sends parameters and takes their mean. DiLoCo sends how far a replica got, and steps an outer optimizer with
the mean. An outer update of your own is a subclass of `OuterUpdate`, which `OuterLoop` runs: when a sync begins and
ends, who takes part, what fails with what, and who heals is the loop's.

Law of this file: interfaces and their words; nothing is done here.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from tft_algos.errors import StateUnavailable


class OuterFragment(Protocol):
    """One fragment of a model, as an outer update sees it.

    Tensors are those of this rank: of a DTensor its local part. Lists are in the order of `parameters`. All changes are
    made in place.
    """

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Return the live parameters that are synchronized."""
        ...

    def local(self) -> list[torch.Tensor]:
        """Return the live parameters without gradient, in their own memory."""
        ...

    @property
    def global_weights(self) -> Sequence[torch.Tensor]:
        """Return the weights that the last sync has left, the same on every replica; on `backup_device`."""
        ...

    @property
    def sent(self) -> Sequence[torch.Tensor]:
        """Return what is sent, to be filled; when the sync is committed, the mean over the participants."""
        ...

    def capture_difference(self) -> None:
        """Send the pseudogradient: global weights less live parameters."""
        ...

    def capture_parameters(self) -> None:
        """Send the live parameters."""
        ...

    def restore(self) -> None:
        """Make the live parameters the global weights again, to the last bit."""
        ...

    def adopt(self) -> None:
        """Make the live parameters the mean."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """Return the mean on the parameters' device, shaped and sharded as they are."""
        ...


class OuterUpdate(abc.ABC):
    """Decides what a fragment sends at a sync's start, and makes new weights of the mean at its end.

    Every replica computes the same: an update may depend on the mean, the global weights and state of its own that goes
    with `state_dict`, and on nothing that differs between replicas. Both methods run on the training thread, without
    recording gradients.
    """

    @abc.abstractmethod
    def capture(self, index: int, fragment: OuterFragment) -> None:
        """Fill `fragment.sent`, and change nothing else; called at a sync's start.

        Args:
            index: of the fragment, from 0, in the order in which they are synchronized.
            fragment: whose live parameters are as this replica has trained them.
        """

    @abc.abstractmethod
    def apply(self, index: int, fragment: OuterFragment) -> None:
        """Make the live parameters the new global weights; called when the sync is committed.

        Before, `fragment.sent` holds the mean, and the live parameters are as this replica has trained them meanwhile:
        call `fragment.restore()` to start from the global weights. Afterwards they are kept as the global weights. What
        is raised here leaves a replica whose state is half written, so that it heals.
        """

    @property
    def name(self) -> str:
        """Return the name of the algorithm, for messages, and compared between replicas: that of the class."""
        return type(self).__name__

    def fingerprint(self) -> Mapping[str, str]:
        """Return settings in which all replicas have to be alike, by name; who differs is refused by name."""
        return {}

    def state_key(self, index: int) -> str:
        """Return the key under which the state of a fragment is registered at the Manager."""
        return f"{self.name} fragment {index}"

    def state_dict(self, index: int) -> dict[str, Any]:
        """Return what of this update's own state belongs to a fragment, for who heals and for durable checkpoints.

        Tensors, DTensors and plain data, by names that stay the same; it is asked for before the first sync, too. The
        global weights go beside it, under "original_parameters".
        """
        return {}

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Look whether a state, as `state_dict` has given it, fits.

        Raises: StateUnavailable: it does not; the sentence says what to do.
        """
        expected = set(self.state_dict(index))
        if set(state) != expected:
            raise StateUnavailable(
                f"the state of {self.name} has {sorted(state)} and this replica {sorted(expected)}; use the same outer "
                "update on every replica"
            )

    def load_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        """Take over a state that `check_state` has let pass; to be written by whoever writes `state_dict`."""
        assert not state, f"{self.name} has a state_dict and no load_state_dict"
