"""What the checks of the conformance suite share: what they are about, and how a group's failures are told.

The law of this file: no backend is named; what a group may do otherwise is said by the subject's fields.
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

__all__ = ["GLOO_LACKS", "Subject", "agree", "all_work", "failure", "reduce_ones", "require"]

GLOO_LACKS: Final = frozenset({"gather_into_tensor"} | ({"alltoall"} if torch.__version__ < "2.13" else set()))
"""What no group over torch's Gloo has in this release of torch."""


@dataclass(frozen=True)
class Subject:
    """A kind of group under test.

    Args:
        make: makes one unconfigured group; can be pickled if the group talks to other processes.
        world_sizes: the sizes that it can have.
        ready: whether it works before its first `configure`.
        meets_peers: whether `configure` waits for the other ranks.
        lacks: collectives that it does not have, and refuses; by their names in `tft_pg.COLLECTIVES`.
    """

    make: Callable[[], ProcessGroup]
    world_sizes: tuple[int, ...] = (1, 2, 3)
    ready: bool = False
    meets_peers: bool = True
    lacks: frozenset[str] = frozenset()

    @property
    def most(self) -> int:
        return max(self.world_sizes)

    @property
    def cases(self) -> tuple[Case, ...]:
        """What it has."""
        return tuple(case for case in CASES if case.row not in self.lacks)


def _swallowed(group: ProcessGroup) -> Exception | None:
    """The error that a wrapper, however deep, keeps to itself."""
    while isinstance(group, WrappingProcessGroup):
        if isinstance(group, ErrorSwallowingProcessGroupWrapper) and group.error() is not None:
            return group.error()
        group = group.parent
    return None


def failure(group: ProcessGroup, act: Callable[[], object]) -> Exception | None:
    """What an action fails with: what it raises, or what a swallowing group reports instead."""
    try:
        act()
    except RuntimeError as error:
        return error
    return _swallowed(group)


def require(error: object, *kinds: type[BaseException]) -> None:
    """The error is of one of these kinds and says something. Raises: AssertionError."""
    names = " or ".join(kind.__name__ for kind in kinds)
    assert isinstance(error, kinds), f"expected {names}, got {error!r}"
    assert len(str(error)) > 10, f"{error!r} says nothing"


def agree(got: object, expected: object, *, rtol: float = 0, atol: float = 0) -> None:
    """Tensors, or lists of them, are equal in dtype, shape and value. Raises: AssertionError."""
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def reduce_ones(group: ProcessGroup) -> torch.Tensor:
    """The sum of a one from each rank."""
    tensor = torch.ones(3)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    return tensor


def all_work(bench: Bench, groups: Sequence[ProcessGroup]) -> None:
    """The groups reduce together, know their places and are not in error. Raises: AssertionError, the error."""
    for rank, tensor in enumerate(bench.all(groups, lambda rank, group: reduce_ones(group))):
        agree(tensor, torch.full((3,), float(len(groups))))
        assert (groups[rank].rank(), groups[rank].size()) == (rank, len(groups))
        assert groups[rank].errored() is None
