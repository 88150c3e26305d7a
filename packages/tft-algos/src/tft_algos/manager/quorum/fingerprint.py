"""The fingerprint of this replica, which the other replicas compare before the first collective.

It contains settings that all replicas of a job must share, the parameters of the models, and values of the user. The
first request for a quorum carries it, and so does the next request after each addition.

Law of this file: the names and values of the parts. The refusal of replicas is decided elsewhere.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from typing import Final, final

import torch

from tft_algos.errors import ConfigError
from tft_algos.manager.config import ResolvedConfig
from tft_coord.core.fingerprint import OF_A_RANK, PROTOCOL_VERSION, Fingerprint, fingerprint_of

USER: Final = "user/"
_UNKNOWN: Final = "not initialized"
COMPILED: Final = "_orig_mod"  # the prefix that torch.compile puts before a module's own names


@final
class OwnFingerprint:
    """The fingerprint of one Manager. The training thread adds parts, and the quorum thread sends them.

    Args:
        config: its settings are parts.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self._parts = {
            "protocol version": str(PROTOCOL_VERSION),
            "rank0_synchronization_only": str(config.rank0_synchronization_only),
            "use_async_quorum": str(config.use_async_quorum),
            "world_size_mode": config.world_size_mode.name,
            "min_replica_size": str(config.min_replica_size),
            "init_sync": str(config.init_sync),
        }
        self._is_rank0_only = config.rank0_synchronization_only
        if not self._is_rank0_only:
            self._parts["group world size"] = str(config.world_size)
        self._lock = threading.Lock()
        self._whole: Fingerprint = ()  # the current fingerprint; empty: to be computed again
        self._sent: Fingerprint = ()
        self._num_models = 0
        self._num_optimizers = 0
        for name, value in config.fingerprint.items():
            self.add(USER + name, value)

    def add(self, name: str, value: str) -> None:
        """Add a part.

        Raises: ConfigError: a part of that name has another value, or name and value are not texts.
        """
        if not (isinstance(name, str) and isinstance(value, str)) or name in ("", USER):
            raise ConfigError(f"the fingerprint's part {name!r} is {value!r}; give a name and a value, both text")
        with self._lock:
            if name not in self._parts:
                self._parts[name] = value
                self._whole = ()
            elif self._parts[name] != value:
                raise ConfigError(
                    f"the fingerprint's part {name.removeprefix(USER)!r} is {self._parts[name]!r} already and can't "
                    f"become {value!r}, because other replicas may have been compared with it; give it another name"
                )

    def add_model(self, model: torch.nn.Module, *, strides: bool = False) -> None:
        """Add the parameters of a model, by name, and their order.

        Args:
            strides: gradients are reduced in the layout of the parameters, so the strides are included.
        """
        prefix = f"{OF_A_RANK}{self._num_models}"
        self._num_models += 1
        described = [
            (
                uncompiled(name),
                _describe(parameter) + (strides_of(parameter) if strides and parameter.requires_grad else ""),
            )
            for name, parameter in model.named_parameters()
        ]
        names = hashlib.sha256("\n".join(name for name, _ in described).encode()).hexdigest()
        self.add(prefix, f"{len(described)} parameters, their names and order {names[:16]}")
        if self._is_rank0_only:
            # Rank 0 communicates for all ranks. A parameter that only other ranks have would never be synchronized.
            whole = hashlib.sha256("\n".join(f"{name} {words}" for name, words in described).encode()).hexdigest()
            self.add(f"model {self._num_models - 1}", f"{len(described)} parameters, {whole[:16]}")
        for name, words in described:
            self.add(f"{prefix}/{name}", words)

    def add_optimizer(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add the dtypes and shapes of an optimizer's parameters, even if a model has already added them."""
        described = [_dtype_and_shape(parameter) for parameter in parameters]
        whole = hashlib.sha256("\n".join(described).encode()).hexdigest()
        self.add(
            f"{OF_A_RANK}optimizer {self._num_optimizers}",
            f"{len(described)} parameters, their dtypes, shapes and order {whole[:16]}",
        )
        self._num_optimizers += 1

    def unsent(self) -> Fingerprint:
        """Return the fingerprint for the next request. Empty if everything was sent before."""
        with self._lock:
            self._whole = self._whole or fingerprint_of(self._parts)
            return () if self._whole is self._sent else self._whole

    def whole(self) -> Fingerprint:
        """Return the whole fingerprint, for a manager server that has received none."""
        with self._lock:
            self._whole = self._whole or fingerprint_of(self._parts)
            return self._whole

    def was_sent(self, fingerprint: Fingerprint) -> None:
        """Record that a request with this fingerprint was answered."""
        if fingerprint:
            with self._lock:
                self._sent = fingerprint


def uncompiled(name: str) -> str:
    """Return the name of a parameter without torch.compile's prefixes, so that only some replicas may compile."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def strides_of(parameter: torch.nn.Parameter) -> str:
    """Return as text where the elements of a parameter's gradient are in torch's buckets; "": in order.

    Torch lays out a gradient like its parameter if that is dense, and in order otherwise.
    """
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter) or parameter.is_contiguous():
        return ""
    # The stride of a dimension of size one has no effect.
    strides = [step if size > 1 else 0 for size, step in zip(parameter.shape, parameter.stride(), strict=True)]
    length = 1
    for step, size in sorted(zip(strides, parameter.shape, strict=True)):
        if step not in (0, length):
            return ""
        length *= size
    return f", strides {strides}"


def _describe(parameter: torch.nn.Parameter) -> str:
    words = _dtype_and_shape(parameter)
    return words if parameter.requires_grad or words == _UNKNOWN else f"{words}, frozen"


def _dtype_and_shape(parameter: torch.Tensor) -> str:
    """Return dtype and shape as text. For a DTensor, the global shape."""
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        return _UNKNOWN
    return f"{str(parameter.dtype).removeprefix('torch.')} {[int(size) for size in parameter.shape]}"
