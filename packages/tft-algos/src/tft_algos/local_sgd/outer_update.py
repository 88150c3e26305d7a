"""The outer update: what a sync sends, and what it makes of the mean.

LocalSGD sends parameters and takes their mean. DiLoCo sends the progress of a replica, and steps an outer optimizer
with the mean. An outer update of your own is a subclass of `OuterUpdate`. `OuterLoop` runs it: the loop decides when a
sync begins and ends, which members take part, which failures belong together, and which members heal.

Law of this file: interfaces and their descriptions. Nothing is implemented here.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from tft_algos.errors import UserStateError


class OuterFragment(Protocol):
    """One fragment of a model, as an outer update sees it.

    Tensors are those of this rank. For a DTensor this is its local part. Lists are in the order of `parameters`. All
    changes are made in place.
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
        """Return the result of the last sync, the same on every replica, on `backup_device`."""
        ...

    @property
    def sent(self) -> Sequence[torch.Tensor]:
        """Return the tensors to send, for `capture` to fill. After a commit they hold the participants' mean."""
        ...

    def capture_difference(self) -> None:
        """Fill `sent` with the pseudogradient: global weights minus live parameters."""
        ...

    def capture_parameters(self) -> None:
        """Fill `sent` with the live parameters."""
        ...

    def restore(self) -> None:
        """Set the live parameters to the global weights, bit for bit."""
        ...

    def adopt(self) -> None:
        """Set the live parameters to the mean."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """Return the mean on the device of the parameters, with their shapes and sharding."""
        ...


class OuterUpdate(abc.ABC):
    """The update that decides what a fragment sends at the start of a sync, and makes its new weights at the end.

    Every replica computes the same. So an update may depend on the mean, the global weights and its own state (see
    `state_dict`), but on nothing that differs between replicas. Both methods run on the training thread, without
    gradients.
    """

    @abc.abstractmethod
    def capture(self, index: int, fragment: OuterFragment) -> None:
        """Fill `fragment.sent`, and change nothing else. The loop calls this at the start of a sync.

        Args:
            index: the index of the fragment, from 0, in the order of the syncs.
            fragment: its live parameters are as this replica has trained them.
        """

    @abc.abstractmethod
    def apply(self, index: int, fragment: OuterFragment) -> None:
        """Set the live parameters to the new global weights. The loop calls this when the sync is committed.

        At the call, `fragment.sent` holds the mean, and the live parameters are as this replica has trained them
        meanwhile. Call `fragment.restore()` to start from the global weights. Afterwards the loop saves the live
        parameters as the global weights. An error here leaves a half-written state, so the replica heals.
        """

    @property
    def name(self) -> str:
        """Return the name of the algorithm, by default the class name.

        It is used in messages and compared between replicas.
        """
        return type(self).__name__

    def fingerprint(self) -> Mapping[str, str]:
        """Return the settings that all replicas must share, by name. A replica that differs is refused by name."""
        return {}

    def state_key(self, index: int) -> str:
        """Return the key under which the state of a fragment is registered at the Manager."""
        return f"{self.name} fragment {index}"

    def state_dict(self, index: int) -> dict[str, Any]:
        """Return the part of this update's own state that belongs to a fragment, for healing and durable checkpoints.

        The state holds tensors, DTensors and plain data, under names that stay the same. It is also requested before
        the first sync. The global weights are stored beside it, under "original_parameters".
        """
        return {}

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Check whether a state from `state_dict` fits.

        Raises: UserStateError: the state does not fit. The message says what to do.
        """
        expected = set(self.state_dict(index))
        if set(state) != expected:
            raise UserStateError(
                f"the state of {self.name} has {sorted(state)} and this replica {sorted(expected)}; use the same outer "
                "update on every replica"
            )

    def load_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        """Load a state that `check_state` has accepted. A subclass with its own `state_dict` must override this too."""
        assert not state, f"{self.name} has a state_dict and no load_state_dict"
