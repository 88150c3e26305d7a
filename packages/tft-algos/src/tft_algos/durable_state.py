"""The content of a durable checkpoint: what is in it, and what of it this replica loads.

Law of this file: checks of the given parts, and choices between what is saved and what is wanted. Files and directories
are in `durable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from tft_algos.errors import ConfigError
from tft_algos.manager import Manager
from tft_algos.optim import Optimizer
from tft_algos.quantization import ErrorFeedback

RESIDUALS: Final = "residuals"
MOST_NAMED: Final = 8


def optimizers_in(given: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers without their wrappers. Raises: ConfigError: one of them is no optimizer."""
    if not isinstance(given, torch.optim.Optimizer | Sequence):
        raise ConfigError(f"optimizers is a {type(given).__name__}; give torch.optim.Optimizers")
    listed = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    for each in listed:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(f"optimizers holds a {type(each).__name__}; give torch.optim.Optimizers")
    return [each.optim if isinstance(each, Optimizer) else each for each in listed]


def others_in(given: object) -> dict[str, Stateful]:
    """Return the other state by name. Raises: ConfigError: it is no mapping of names to objects with state."""
    others = {} if given is None else given
    if not isinstance(others, Mapping):
        raise ConfigError(f"others is a {type(others).__name__}; give a mapping of names to Stateful objects")
    for key, other in others.items():
        if not isinstance(key, str):
            raise ConfigError(f"others has the key {key!r}; give strings as keys")
        if not isinstance(other, Stateful):
            raise ConfigError(
                f"others has a {type(other).__name__} under {key!r}, whose state can't be saved; give an object with "
                "state_dict and load_state_dict"
            )
    return dict(others)


@final
class SavedResiduals:
    """The residuals of one rank in a checkpoint.

    A residual belongs to its replica. So it is saved under the name of the replica and the place of the rank, and a
    replica looks for its own only.

    Args:
        manager: to which the feedback must belong.
        feedback: one ErrorFeedback, or several.
        rank, num_ranks: of the replica group.
    Raises: ConfigError: feedback is none, or belongs to another Manager.
    """

    def __init__(self, manager: Manager, feedback: object, rank: int, num_ranks: int) -> None:
        self._feedback: list[ErrorFeedback] = []
        for each in feedback if isinstance(feedback, Sequence) else [feedback]:
            if not isinstance(each, ErrorFeedback):
                raise ConfigError(f"feedback is a {type(each).__name__}; give an ErrorFeedback, or a list of them")
            if each.manager is not manager:
                raise ConfigError("the ErrorFeedback belongs to another Manager; give that of this Manager")
            self._feedback.append(each)
        self._rank = f"rank {rank} of {num_ranks}"

    def state(self) -> dict[str, Any]:
        """Return the part of the state to save. Nothing is copied."""
        if not self._feedback:
            return {}
        tensors: dict[str, torch.Tensor] = {}
        about = {}
        for feedback in self._feedback:
            state = feedback.state_dict()
            for slot in state["slots"].values():
                if slot["residual"] is not None:
                    number = str(len(tensors))
                    tensors[number], slot["residual"] = slot["residual"], number
            about[feedback.key] = state
        # A tuple is one leaf to torch, so its content may have other keys at every save.
        return self._placed({"about": (about,), **({"tensors": tensors} if tensors else {})})

    def wanted(self, metadata: Metadata) -> dict[str, Any]:
        """Return the part of the state to read, with memory for its tensors. Empty: nothing was saved for this rank."""
        if not self._feedback:
            return {}
        place = (RESIDUALS, self._feedback[0].owner, self._rank)
        tensors: dict[str, torch.Tensor] = {}
        is_there = False
        for leaf, keys in (metadata.planner_data or {}).items():
            if tuple(keys[:3]) == place:
                is_there = True
                written = metadata.state_dict_metadata[leaf]
                if isinstance(written, TensorStorageMetadata):
                    tensors[str(keys[4])] = torch.empty(written.size, dtype=torch.float32)
        if not is_there:
            return {}
        return self._placed({"about": ({},), **({"tensors": tensors} if tensors else {})})

    def load(self, state: Mapping[str, Any]) -> bool:
        """Take up the residuals that were read, or begin without any.

        Returns: whether there were residuals of this rank.
        Raises: UserStateError: they are no residuals.
        """
        part = state.get(RESIDUALS)
        about: dict[str, Any] = {}
        if part is not None:
            part = part[self._feedback[0].owner][self._rank]
            (about,), tensors = part["about"], part.get("tensors", {})
        for feedback in self._feedback:
            own = about.get(feedback.key, feedback.empty_state())
            for slot in own["slots"].values():
                if slot["residual"] is not None:
                    slot["residual"] = tensors[slot["residual"]]
            feedback.load_state_dict(own)
        return part is not None

    def _placed(self, part: dict[str, Any]) -> dict[str, Any]:
        return {RESIDUALS: {self._feedback[0].owner: {self._rank: part}}}


def named(names: Sequence[str]) -> str:
    """Return the first of the names, for a message."""
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")


def leave_out(wanted: dict[str, Any], saved: Mapping[str, Sequence[Any]] | None) -> list[str]:
    """Remove the optimizer state of parameters for which the checkpoint has none.

    An optimizer makes the state of a parameter at its first gradient. Torch makes the state of all parameters before a
    load. State that the writer did not have yet can't be read, and must not be made here either.

    Args:
        wanted: the state of the optimizers here, by parameter name. It is changed.
        saved: the keys of each leaf in the checkpoint, as recorded by torch.
    Returns: the names that were removed. Empty if the checkpoint has no optimizer state at all. Then the optimizer was
        of another kind, and torch refuses the load.
    """
    there = {keys[2] for keys in (saved or {}).values() if tuple(keys[:2]) == ("optimizer", "state") and len(keys) > 2}
    left_out = [name for name in wanted if name not in there] if there else []
    for name in left_out:
        del wanted[name]
    return left_out
