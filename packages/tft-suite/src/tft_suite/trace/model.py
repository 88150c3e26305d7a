"""Flight records and findings, as values.

Law of this file: values only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, final

__all__ = ["BrokenFile", "Call", "Finding", "Process", "RankTrace", "Tensor"]

_UUID: Final = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


@final
@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A training process: a rank of a replica group."""

    job: str
    replica: str
    group_rank: int
    host: str
    pid: int


@final
@dataclass(frozen=True, slots=True)
class Tensor:
    """The dtype and the sizes of one tensor."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        product = 1
        for size in self.sizes:
            product *= size
        return product

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.sizes))}]"


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective on one rank.

    Args:
        number: the number of the collective in its group, the same on all ranks that agree.
        name: the collective.
        is_p2p: the call is a send or a receive, which has no number that all ranks share.
        inputs, outputs: the recorded tensors; long lists are cut.
        started_ns: the time of the call, in nanoseconds since 1970.
        has_ended: the call had ended when the record was taken.
    """

    number: int
    name: str
    is_p2p: bool
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    started_ns: int
    has_ended: bool

    def __str__(self) -> str:
        return f"{self.name} (call {self.number})"


@final
@dataclass(frozen=True, slots=True)
class RankTrace:
    """The flight record of one rank in one configured group.

    Args:
        path: the file.
        process: the recorded process.
        rank, world_size: in the group.
        quorum: the id of the quorum; None if the group was configured without one.
        group: the store prefix of this configuration, the same on all its ranks.
        reason: why the file was written: `abort`, `failure`, `end` or `request`.
        time_ns: the time of the record, in nanoseconds since 1970.
        calls: the oldest first.
    """

    path: str
    process: Process
    rank: int
    world_size: int
    quorum: int | None
    group: str
    reason: str
    time_ns: int
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        replica = _UUID.sub(r"\1", self.process.replica)
        return f"rank {self.rank} ({replica}/{self.process.group_rank})" if replica else f"rank {self.rank}"


@final
@dataclass(frozen=True, slots=True)
class BrokenFile:
    """A file that is not a usable flight record. The other files are read nevertheless."""

    path: str
    reason: str


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One problem, as a sentence and as values.

    Args:
        kind: `deadlock`, `waiting`, `stuck`, `mismatched_collective`, `mismatched_tensors`, `straggler` or
            `missing_file`.
        sentence: what, who and where.
        job, quorum, group: the configured group; the first one, where several are concerned.
        ranks: the ranks that cause the problem; of many, the first 16.
        num_ranks: how many ranks cause the problem.
        call: the number of the collective; None if the finding concerns no single call.
        seconds: how long, or how late; None if the finding has no duration.
    """

    kind: str
    sentence: str
    job: str
    quorum: int | None
    group: str
    ranks: tuple[int, ...]
    num_ranks: int
    call: int | None = None
    seconds: float | None = None
