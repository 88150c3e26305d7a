"""Error feedback: what a quantized reduction rounded away is added to the next one.

A replica keeps, for each tensor, the residual: its contribution minus what it has sent. The next contribution includes
the residual. A member also rounds the sum of its chunk, and adds this error to its own residual, so that the error
returns in the next sum whoever owns the chunk then. Over many steps nothing is lost. With `TopK` a residual is most of
the contribution, and each step takes a part of it off.

A residual is part of a step. It counts once the step has committed. After a failed step, the residual is that of the
last committed step.

Law of this file: residuals and their life. Sending is in `tft_algos.collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, final

import torch

from tft_algos.errors import ConfigError, UsageError, UserStateError
from tft_algos.quantization.codecs import Codec, Int4, flat_float32

OWNER: Final = "owner"
SLOTS: Final = "slots"
KIND: Final = "kind"
RESIDUAL: Final = "residual"
SPARSE_DECAY: Final = 0.95  # arXiv 2508.15706


class RegistersState(Protocol):
    """The interface that `ErrorFeedback` needs of a Manager."""

    @property
    def replica_id(self) -> str: ...

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any, *, compared: bool = True) -> None:
        """Add a part of the state that moves with the rest of it."""
        ...


@final
class Compensation:
    """The residual of one tensor in one reduction, until the step has ended.

    Args:
        slot: of the tensor.
        attempt: number of the attempt to which the reduction belongs.
        kind: what a unit of the residual is. A residual of another kind is dropped.
        scale: the contribution is scaled by this.
    """

    def __init__(self, slot: FeedbackSlot, attempt: int, *, kind: str, scale: float) -> None:
        self.slot = slot
        self.attempt = attempt
        self._kind = kind
        self._scale = scale
        self._next: torch.Tensor | None = None

    def compensated(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return a new flat float32 tensor: the contribution plus the residual."""
        values = flat_float32(tensors, copies=True)
        residual = self.slot.residual(self._kind, values.device)
        if residual is not None:
            values.add_(residual, alpha=self._scale * self.slot.decay)
        self._next = values
        return values

    def sent(self, codec: Codec, rows: torch.Tensor) -> None:
        """Record what was sent of the tensor that `compensated` returned."""
        assert self._next is not None
        codec.add_to(rows, self._next, -1.0)

    def owned(self, start: int, error: torch.Tensor) -> None:
        """Record the error of the rounded sum of this member's chunk.

        Args:
            start: index of the chunk's first element.
            error: float32, flat. Elements after the end of the tensor are padding.
        """
        assert self._next is not None
        part = self._next[start : start + error.numel()]
        part.add_(error[: part.numel()])

    def settle(self, *, committed: bool) -> None:
        """End the step. The new residual counts if the step has committed and the reduction had begun."""
        values, self._next = self._next, None
        if self.slot.pending is not self:
            return  # the step was abandoned, and a later one has used the slot
        self.slot.pending = None
        if committed and values is not None:
            # A gradient that is not finite leaves no residual. Otherwise all later gradients would be NaN.
            values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            if self._scale != 1.0:
                values.div_(self._scale)
            self.slot.keep(self._kind, values)


@final
class FeedbackSlot:
    """The residual of one tensor. `ErrorFeedback.of` makes it, and `Manager.allreduce(should_quantize=slot)` uses it.

    Args:
        name: of the tensor.
        feedback: the owner of this slot.
    Attributes:
        pending: the reduction of a step that has not ended. None: there is none.
    """

    def __init__(self, name: str, feedback: ErrorFeedback) -> None:
        self.name = name
        self.codec = feedback.codec
        self.decay = feedback.decay
        self.manager = feedback.manager
        self.pending: Compensation | None = None
        self._kind = ""
        self._residual: torch.Tensor | None = None

    def begin(self, tensor: torch.Tensor, attempt: int, *, kind: str, scale: float) -> Compensation:
        """Begin the reduction of a tensor. See `Compensation`.

        Raises: UsageError: another reduction uses the slot, in this step or in one that is still in flight. Or the
            tensor has another size than in earlier steps.
        """
        size = tensor.numel() * (2 if tensor.is_complex() else 1)
        if self._residual is not None and self._residual.numel() != size:
            raise UsageError(
                f"the error feedback of {self.name!r} has {self._residual.numel()} numbers, and the tensor has {size}; "
                "use one slot for each tensor, and load a checkpoint of the same model"
            )
        if self.pending is not None and self.pending.attempt == attempt:
            raise UsageError(
                f"the error feedback of {self.name!r} is used by another reduction of this step; use one slot for each "
                "tensor"
            )
        if self.pending is not None:  # its residual is not known yet, so the old one would be sent twice
            raise UsageError(
                f"the error feedback of {self.name!r} is used by an earlier step that is still in flight (start_quorum "
                f"number {self.pending.attempt}, and this is number {attempt}); end that step first, or use a slot for "
                "each step in flight"
            )
        self.pending = Compensation(self, attempt, kind=kind, scale=scale)
        return self.pending

    def residual(self, kind: str, device: torch.device) -> torch.Tensor | None:
        """Return the residual on a device. None: there is none of this kind."""
        if self._residual is None or self._kind != kind:
            return None
        self._residual = self._residual.to(device)
        return self._residual

    def keep(self, kind: str, residual: torch.Tensor) -> None:
        """Replace the residual."""
        self._kind, self._residual = kind, residual

    def state(self) -> dict[str, Any]:
        """Return the residual of the last committed step as state."""
        return {KIND: self._kind, RESIDUAL: self._residual}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take over a residual that `_checked` has made. None: begin without one.

        A reduction of an open step is not affected.
        """
        self._kind, self._residual = ("", None) if state is None else (state[KIND], state[RESIDUAL])


@final
class ErrorFeedback:
    """The residuals of one replica, which are part of the state of its Manager.

    A residual belongs to the replica that made it. A replica that heals begins without residuals: those of its source
    still count at the source. A replica that loads a state that it has made itself continues with its residuals. For
    this, the Manager needs a `replica_id` that is the same in each run. The memory is 4 bytes for each element, and as
    much again during a step.

    Args:
        manager: whose reductions use this. The state is registered here.
        codec: of all reductions. None: `Int4`.
        key: of the registered state, the same on every replica.
        decay: the share of a residual that the next contribution includes, above 0 and at most 1. None: 0.95 with
            `TopK`, whose residuals are old and large, otherwise 1.
    Raises: ConfigError: codec is not a codec, decay is out of range, or the key is used already.
    """

    def __init__(
        self,
        manager: RegistersState,
        codec: Codec | None = None,
        *,
        key: str = "error_feedback",
        decay: float | None = None,
    ) -> None:
        codec = Int4() if codec is None else codec
        if not isinstance(codec, Codec):
            raise ConfigError(f"codec is a {type(codec).__name__}; give a codec of tft_algos.quantization: Int4()")
        if decay is not None and (isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1):
            raise ConfigError(f"decay is {decay!r}; give a number above 0 and at most 1")
        self.key = key
        self.codec = codec
        self.decay = (SPARSE_DECAY if codec.is_sparse else 1.0) if decay is None else float(decay)
        self.manager = manager
        self._slots: dict[str, FeedbackSlot] = {}
        self._loaded: dict[str, Mapping[str, Any]] = {}  # of slots that nobody has used since the load
        manager.register_state_dict_fn(key, self.load_state_dict, self.empty_state, compared=False)

    def of(self, name: str) -> FeedbackSlot:
        """Return the slot of a tensor. Use one slot for each tensor, and the same one in every step.

        Args:
            name: of the tensor, for example of a parameter.
        Raises: ConfigError: the name is not a text.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a slot is {name!r}; give a name, such as that of the parameter")
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = FeedbackSlot(name, self)
            slot.load(self._loaded.pop(name, None))
        return slot

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of the last committed step, for a checkpoint of this replica."""
        slots = {name: dict(state) for name, state in self._loaded.items()}
        slots |= {name: slot.state() for name, slot in self._slots.items()}
        return {OWNER: self.owner, SLOTS: slots}

    def empty_state(self) -> dict[str, Any]:
        """Return a state without residuals, which a replica that heals begins with."""
        return {OWNER: self.owner, SLOTS: {}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over residuals that this replica has made, or begin without any.

        Raises: UserStateError: `state_dict` is not the state of an ErrorFeedback, or a residual is not dense, real and
            finite. Nothing has changed then.
        """
        slots = _checked(state_dict)
        if state_dict[OWNER] != self.owner:
            slots = {}
        self._loaded = {name: state for name, state in slots.items() if name not in self._slots}
        for name, slot in self._slots.items():
            slot.load(slots.get(name))

    @property
    def owner(self) -> str:
        """Return the name of this replica without the id of its process. A replica without a name has only that id."""
        name, _, _ = self.manager.replica_id.rpartition(":")
        return name or self.manager.replica_id


def _checked(state: object) -> dict[str, dict[str, Any]]:
    """Return the residuals in a state, as flat float32 copies. Raises: UserStateError."""
    slots = state.get(SLOTS) if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(state.get(OWNER), str) or not isinstance(slots, Mapping):
        raise UserStateError("this is not the state of an ErrorFeedback; load what its state_dict returned")
    return {name: _checked_slot(name, slot) for name, slot in slots.items()}


def _checked_slot(name: object, slot: object) -> dict[str, Any]:
    """Return the state of one slot, checked and copied. Raises: UserStateError."""
    if not isinstance(name, str) or not name:
        raise UserStateError(f"the state of error feedback has a slot {name!r}; load what state_dict returned")
    if not isinstance(slot, Mapping) or not isinstance(slot.get(KIND), str) or RESIDUAL not in slot:
        raise UserStateError(
            f"the state of error feedback has no kind or no residual of {name!r}; load what state_dict returned"
        )
    residual = slot[RESIDUAL]
    if residual is None:
        return {KIND: slot[KIND], RESIDUAL: None}
    if not isinstance(residual, torch.Tensor):
        raise UserStateError(f"the residual of {name!r} is a {type(residual).__name__}; load what state_dict returned")
    fault = _fault(residual)
    if fault is not None:
        raise UserStateError(f"the residual of {name!r} {fault}; load what state_dict returned")
    return {KIND: slot[KIND], RESIDUAL: flat_float32([residual], copies=True)}


def _fault(residual: torch.Tensor) -> str | None:
    """Return why a tensor can't be a residual; None: it can."""
    if residual.layout is not torch.strided or residual.is_nested or residual.is_quantized or residual.is_meta:
        return "is not dense, or is on the meta device"
    if not residual.is_floating_point():
        return f"is of {residual.dtype}, which is not floating-point"
    if not bool(flat_float32([residual]).isfinite().all()):
        return "has numbers that are not finite in float32"
    return None
