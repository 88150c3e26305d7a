"""The collectives of a process group, as one table.

Code that forwards, fakes, swallows or times collectives reads this table, so a new collective is one new row. A row
holds all names of a collective (torch 2.13 renamed some and keeps the old names). The row also holds the argument names
and which arguments are filled in. The table omits collectives that this release of torch lacks.

Law of this file: data and pure functions on it; nothing here calls a process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tft_pg.errors import ConfigError

__all__ = ["COLLECTIVES", "Collective", "collective"]


@dataclass(frozen=True)
class Collective:
    """One row: an operation of `torch.distributed.ProcessGroup`.

    Args:
        name: the method name used for forwarding.
        parameters: for each positional place, the keywords that torch's two call forms use for it.
        outputs: index of the parameter that is filled in; None for operations without a result.
        inputs: index of the parameter that is read, if it is a different one.
        aliases: other method names of the same operation.
    """

    name: str
    parameters: tuple[tuple[str, ...], ...]
    outputs: int | None = None
    inputs: int | None = None
    aliases: tuple[str, ...] = ()

    def argument(self, index: int, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Return the argument at a place, given by position or by any of its keywords. None: the caller left it out."""
        if index < len(args):
            return args[index]
        return next((kwargs[key] for key in self.parameters[index] if key in kwargs), None)

    def reduction(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the name of the requested reduction, as in `torch.distributed.ReduceOp`. The default is a sum."""
        given: object = None
        for index, keywords in enumerate(self.parameters):
            if "op" in keywords or "opts" in keywords:
                given = self.argument(index, args, kwargs)
                if given is not None and not isinstance(given, int):
                    break
        op = getattr(given, "reduceOp", given)
        op = getattr(op, "op", op)  # a ReduceOp object, which may carry a factor, holds its kind in `op`
        return op.name if isinstance(op, ReduceOp.RedOpType) else "SUM"

    def results(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
        """Return the tensors that the operation fills in, as one flat list. The Work's future holds this list."""
        if self.outputs is None:
            return []
        return list(_tensors(self.argument(self.outputs, args, kwargs)))

    def given(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
        """Return the tensors that the caller gives to the operation, as one flat list.

        These are the inputs. An operation without separate inputs (allreduce, broadcast, reduce, a send, a receive)
        gets its only tensors.
        """
        index = self.inputs if self.inputs is not None else self.outputs
        return list(_tensors(self.argument(0 if index is None else index, args, kwargs)))

    def copy_to_self(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Run the operation in a group of one: copy every input to its output.

        Raises: ConfigError: the outputs and inputs don't form pairs of equal size.
        """
        if self.outputs is None or self.inputs is None:
            return
        outputs = self.results(args, kwargs)
        inputs = list(_tensors(self.argument(self.inputs, args, kwargs)))
        if [output.numel() for output in outputs] != [input_.numel() for input_ in inputs]:
            raise ConfigError(
                f"{self.name} in a group of one needs outputs as large as its inputs, but got "
                f"{[tuple(output.shape) for output in outputs]} for {[tuple(input_.shape) for input_ in inputs]}"
            )
        for output, input_ in zip(outputs, inputs, strict=True):
            output.copy_(input_.reshape(output.shape))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Sequence):
        for item in value:
            yield from _tensors(item)


_OPTS = ("opts",)
_OPTS_OR_OP = ("opts", "op")
_TENSORS = ("tensors", "tensor")

_ROWS = (
    Collective("allreduce", (_TENSORS, _OPTS_OR_OP, ("timeout",)), outputs=0),
    Collective("allreduce_coalesced", (_TENSORS, _OPTS), outputs=0),
    Collective(
        "allgather",
        (("output_tensors",), ("input_tensors", "input_tensor"), ("opts", "timeout")),
        outputs=0,
        inputs=1,
    ),
    Collective("allgather_coalesced", (("output_lists",), ("input_list",), _OPTS), outputs=0, inputs=1),
    Collective(
        "_allgather_base",
        (("output",), ("input",), _OPTS),
        outputs=0,
        inputs=1,
        aliases=("all_gather_single",),
    ),
    Collective(
        "allgather_into_tensor_coalesced",
        (("outputs",), ("inputs",), _OPTS),
        outputs=0,
        inputs=1,
        aliases=("all_gather_single_coalesced",),
    ),
    Collective(
        "reduce_scatter",
        (("output_tensors", "output"), ("input_tensors", "input"), _OPTS_OR_OP, ("timeout",)),
        outputs=0,
        inputs=1,
    ),
    Collective(
        "_reduce_scatter_base",
        (("outputTensor",), ("inputTensor",), _OPTS),
        outputs=0,
        inputs=1,
        aliases=("reduce_scatter_single",),
    ),
    Collective(
        "reduce_scatter_tensor_coalesced",
        (("outputs",), ("inputs",), _OPTS),
        outputs=0,
        inputs=1,
        aliases=("reduce_scatter_single_coalesced",),
    ),
    Collective(
        "alltoall_base",
        (
            ("output_tensor", "output", "output_buffer"),
            ("input_tensor", "input", "input_buffer"),
            ("output_split_sizes",),
            ("input_split_sizes",),
            ("opts", "timeout"),
        ),
        outputs=0,
        inputs=1,
        aliases=("all_to_all_single",),
    ),
    Collective(
        "alltoall",
        (("output_tensors",), ("input_tensors",), _OPTS),
        outputs=0,
        inputs=1,
    ),
    Collective("broadcast", (_TENSORS, ("opts", "root"), ("timeout",)), outputs=0),
    Collective("reduce", (_TENSORS, ("opts", "root"), ("op",), ("timeout",)), outputs=0),
    Collective(
        "gather",
        (("output_tensors",), ("input_tensors", "input_tensor"), ("opts", "root"), ("timeout",)),
        outputs=0,
        inputs=1,
    ),
    Collective(
        "gather_into_tensor",  # since torch 2.15
        (("output",), ("input",), _OPTS),
        outputs=0,
        inputs=1,
        aliases=("gather_single",),
    ),
    Collective(
        "scatter",
        (("output_tensors", "output_tensor"), ("input_tensors",), ("opts", "root"), ("timeout",)),
        outputs=0,
        inputs=1,
    ),
    Collective("send", (("tensors",), ("dstRank", "dst_rank"), ("tag",))),
    Collective("recv", (("tensors",), ("srcRank", "src_rank"), ("tag",)), outputs=0),
    Collective("recv_anysource", (("tensors",), ("tag",)), outputs=0),
    Collective("barrier", (("opts", "timeout"),)),
)


def _is_torchs(name: str) -> bool:
    return hasattr(dist.ProcessGroup, name)


COLLECTIVES: tuple[Collective, ...] = tuple(
    replace(row, aliases=tuple(filter(_is_torchs, row.aliases))) for row in _ROWS if _is_torchs(row.name)
)
"""Every collective that this release of torch has, once. The order has no meaning."""

_BY_NAME = {name: row for row in COLLECTIVES for name in (row.name, *row.aliases)}


def collective(name: str) -> Collective:
    """Return the row of a collective, by any of its names.

    Raises: ConfigError: no collective has that name.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ConfigError(f"unknown collective {name!r}; use one of {', '.join(sorted(_BY_NAME))}") from None
