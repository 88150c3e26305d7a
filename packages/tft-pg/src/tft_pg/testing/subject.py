"""The shared parts of the conformance checks: the kind of group under test, and its failures.

Law of this file: no backend is named; the subject's fields describe the allowed differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed import ReduceOp

from tft_pg.base import ProcessGroup
from tft_pg.testing.bench import Bench
from tft_pg.testing.cases import CASES, Case
from tft_pg.wrappers.swallowing import ErrorSwallowingProcessGroupWrapper
from tft_pg.wrappers.wrapping import WrappingProcessGroup

__all__ = ["GLOO_LACKS", "NCCL_LACKS", "Subject", "agree", "all_work", "failure", "reduce_ones", "require"]

GLOO_LACKS: Final = frozenset({"gather_into_tensor"} | ({"alltoall"} if torch.__version__ < "2.13" else set()))
"""What no group over torch's Gloo has in this release of torch."""

NCCL_LACKS: Final = frozenset({"allgather_coalesced"})
"""What no group over torch's NCCL has."""


@dataclass(frozen=True)
class Subject:
    """A kind of group under test.

    Args:
        make: makes one unconfigured group. It must be picklable if the group talks to other processes.
        world_sizes: the supported sizes.
        ready: whether the group works before its first `configure`.
        meets_peers: whether `configure` waits for the other ranks.
        lacks: the unsupported collectives, which the group refuses; by their names in `tft_pg.COLLECTIVES`.
        store_ports: of further stores that the groups need. A disconnected rank keeps its connections to them.
    """

    make: Callable[[], ProcessGroup]
    world_sizes: tuple[int, ...] = (1, 2, 3)
    ready: bool = False
    meets_peers: bool = True
    lacks: frozenset[str] = frozenset()
    store_ports: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        return max(self.world_sizes)

    @property
    def cases(self) -> tuple[Case, ...]:
        """Return the cases of the supported collectives."""
        return tuple(case for case in CASES if case.row not in self.lacks)


def _swallowed(group: ProcessGroup) -> Exception | None:
    """Return the error that a wrapper at any depth has swallowed, or None."""
    while isinstance(group, WrappingProcessGroup):
        if isinstance(group, ErrorSwallowingProcessGroupWrapper) and group.error() is not None:
            return group.error()
        group = group.parent
    return None


def failure(group: ProcessGroup, act: Callable[[], object]) -> Exception | None:
    """Return the error of an action: the raised one, or the one that a swallowing group reports instead."""
    try:
        act()
    except RuntimeError as error:
        return error
    return _swallowed(group)


def require(error: object, *kinds: type[BaseException]) -> None:
    """Require an error of one of these kinds, with a message. Raises: AssertionError."""
    names = " or ".join(kind.__name__ for kind in kinds)
    assert isinstance(error, kinds), f"expected {names}, got {error!r}"
    assert len(str(error)) > 10, f"{error!r} says nothing"


def agree(got: object, expected: object, *, rtol: float = 0, atol: float = 0) -> None:
    """Require that tensors, or lists of them, are equal in dtype, shape and value. Raises: AssertionError."""
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def reduce_ones(group: ProcessGroup) -> torch.Tensor:
    """Reduce a tensor of ones, and return the sum over all ranks."""
    tensor = torch.ones(3)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    return tensor


def all_work(bench: Bench, groups: Sequence[ProcessGroup]) -> None:
    """Check that the groups reduce together, know their ranks and are not in error. Raises: AssertionError, the
    error.
    """
    for rank, tensor in enumerate(bench.all(groups, lambda rank, group: reduce_ones(group))):
        agree(tensor, torch.full((3,), float(len(groups))))
        assert (groups[rank].rank(), groups[rank].size()) == (rank, len(groups))
        assert groups[rank].errored() is None
