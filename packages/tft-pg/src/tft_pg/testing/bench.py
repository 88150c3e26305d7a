"""A bench for process groups: a store, and ranks that act concurrently, as threads of this process.

Several groups in one process, over one store, behave like separate processes, except that they can't be killed singly.

Law of this file: every wait has a bound, and the bench leaves no thread behind.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar, final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_pg.base import ProcessGroup
from tft_pg.store import format_store_addr

__all__ = ["Bench", "Outcome"]

_T = TypeVar("_T")

GUARD_S = 30.0
"""How long anything may take before the bench says that it hangs. No check waits for it to pass."""


@dataclass(frozen=True)
class Outcome(Generic[_T]):
    """The result of one rank's action: a value or an error."""

    value: _T | None = None
    error: BaseException | None = None

    def get(self) -> _T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


@final
class Bench:
    """A store on loopback and the groups made on it. The context manager shuts all groups down.

    Args:
        make: makes one unconfigured group; called once for each rank.
        timeout: given to every `configure`.
    """

    def __init__(self, make: Callable[[], ProcessGroup], *, timeout: timedelta = timedelta(seconds=GUARD_S)) -> None:
        self._make = make
        self._timeout = timeout
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._prefixes = itertools.count()
        self._groups: list[ProcessGroup] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self._groups:
            group.shutdown()

    def fresh_address(self) -> str:
        """Return a store address with an unused prefix."""
        return format_store_addr("127.0.0.1", self._store.port, f"bench/{next(self._prefixes)}")

    def make(self) -> ProcessGroup:
        """Make one more unconfigured group."""
        group = self._make()
        self._groups.append(group)
        return group

    def configured(self, world_size: int) -> list[ProcessGroup]:
        """Make and configure `world_size` new groups together."""
        groups = [self.make() for _ in range(world_size)]
        self.configure(groups)
        return groups

    def configure(self, groups: Sequence[ProcessGroup]) -> None:
        """Configure these groups together, with their ranks in this order."""
        address = self.fresh_address()
        self.all(
            groups,
            lambda rank, group: group.configure(
                address, rank, len(groups), replica_id=f"replica_{rank}", quorum_id=1, timeout=self._timeout
            ),
        )

    def all(self, groups: Sequence[ProcessGroup], action: Callable[[int, ProcessGroup], _T]) -> list[_T]:
        """Run the action on all ranks concurrently. Returns: their values in order. Raises: the first rank's error."""
        return [outcome.get() for outcome in self.outcomes(groups, action)]

    def outcomes(self, groups: Sequence[ProcessGroup], action: Callable[[int, ProcessGroup], _T]) -> list[Outcome[_T]]:
        """Run the action on all ranks concurrently. Returns: the result of each, in order."""
        started = [self.start(partial(action, rank, group)) for rank, group in enumerate(groups)]
        return [finish() for finish in started]

    def start(self, action: Callable[[], Any]) -> Callable[[], Outcome[Any]]:
        """Run the action in a separate thread. Returns: a function that waits for the thread."""
        outcomes: list[Outcome[Any]] = []

        def run() -> None:
            try:
                outcomes.append(Outcome(value=action()))
            except BaseException as error:
                outcomes.append(Outcome(error=error))

        thread = threading.Thread(target=run, name="tft-pg-bench-rank", daemon=True)
        thread.start()

        def finish() -> Outcome[Any]:
            thread.join(GUARD_S)
            assert not thread.is_alive(), f"still running after {GUARD_S:g} s"
            return outcomes[0]

        return finish
