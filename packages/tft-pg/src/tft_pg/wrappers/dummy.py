"""A group of one without a backend, in which every collective is a copy.

For code that needs a process group without peers: torch's DistributedDataParallel under a Manager, and tests.

Law of this file: no threads, no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from tft_pg.base import ProcessGroup
from tft_pg.errors import AbortedError, ConfigError, OperationRefusedError, ProcessGroupClosedError, ProcessGroupError
from tft_pg.handles import OwnHandle
from tft_pg.ops import Collective
from tft_pg.settings import check_place, checked_timeout, checks_argument_order, refuses_errored_false
from tft_pg.word import EndedExchange, WordExchange, check_round, checked_values
from tft_pg.work import DummyWork

__all__ = ["ProcessGroupDummy"]


@final
class ProcessGroupDummy(ProcessGroup):
    """Rank 0 of 1. Every collective succeeds at once, and gathers and scatters copy their input to their output.

    Only PREMUL_SUM is refused. The group is ready without a `configure`, which only checks and counts. The public
    counters `configure_count`, `wait_count` and `get_future_count` hold the number of calls.

    Args:
        rank: 0.
        world: 1.

    Raises: ConfigError: another rank or size.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self._check_rank(rank, world)
        self._handle = OwnHandle(hosts=False)
        self.configure_count = 0
        self.wait_count = 0
        self.get_future_count = 0
        self._error: ProcessGroupError | None = None
        self._last_round = -1

    def _check_rank(self, rank: int, world_size: int) -> None:
        if (rank, world_size) != (0, 1):
            raise ConfigError(f"a dummy group has only rank 0 of 1, but got rank {rank} of {world_size}")

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        if self._error is not None:
            raise type(self._error)(f"{collective.name} was called on an unusable group: {self._error}")
        if collective.reduction(args, kwargs) == "PREMUL_SUM":
            raise OperationRefusedError(
                f"{collective.name} of a dummy group does not support PREMUL_SUM; multiply the tensor and use SUM"
            )
        collective.copy_to_self(args, kwargs)
        return _CountingWork(self, collective.results(args, kwargs))

    @checks_argument_order
    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        *,
        replica_id: str = "",
        quorum_id: int | None = None,
        group_rank: int = 0,
        group_world_size: int = 1,
        global_ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if isinstance(self._error, ProcessGroupClosedError):
            raise ProcessGroupClosedError(f"configure was called on an unusable group: {self._error}")
        check_place(
            rank,
            world_size,
            replica_id=replica_id,
            quorum_id=quorum_id,
            group_rank=group_rank,
            group_world_size=group_world_size,
            global_ranks=global_ranks,
        )
        self._check_rank(rank, world_size)
        self.configure_count += 1
        self._error = None
        self._last_round = -1

    @refuses_errored_false
    def abort(self) -> None:
        if not isinstance(self._error, ProcessGroupClosedError):
            self._error = AbortedError("abort was called (dummy group); configure the group again")

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        if self._error is not None:
            raise type(self._error)(f"exchange_word was called on an unusable group: {self._error}")
        values = checked_values(words)
        check_round(round_number, self._last_round)
        checked_timeout(timeout)
        self._last_round = round_number
        return EndedExchange(values)

    def errored(self) -> Exception | None:
        return self._error

    def shutdown(self) -> None:
        self._error = ProcessGroupClosedError("the dummy group was shut down; make a new group")
        self._handle.close()

    def set_timeout(self, timeout: timedelta) -> None:
        checked_timeout(timeout)

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return "tft-dummy"

    def __repr__(self) -> str:
        return f"ProcessGroupDummy(configured {self.configure_count} times)"


@final
class _CountingWork(dist.Work):
    """A finished Work that counts its calls in its group."""

    def __init__(self, group: ProcessGroupDummy, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._group = group
        self._work = DummyWork(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.wait_count += 1
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self._group.get_future_count += 1
        return self._work.get_future()

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        return None
