"""A bench to try process groups on: a store, and ranks that act at once, as threads of this process.

Several groups in one process, over one store, behave like as many processes would, save that they can't be killed
one by one. The law of this file: every wait has a bound, and the bench leaves no thread behind.
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
    """What one rank's action came to: a value or an error."""

    value: _T | None = None
    error: BaseException | None = None

    def get(self) -> _T:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


@final
class Bench:
    """A store on loopback and the groups made on it; a context manager, which shuts all of them down.

    Args:
        make: makes one unconfigured group; called once a rank.
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
        """A store address with a prefix that nobody has used."""
        return format_store_addr("127.0.0.1", self._store.port, f"bench/{next(self._prefixes)}")

    def make(self) -> ProcessGroup:
        """One more unconfigured group."""
        group = self._make()
        self._groups.append(group)
        return group

    def configured(self, world_size: int) -> list[ProcessGroup]:
        """That many new groups, configured together."""
        groups = [self.make() for _ in range(world_size)]
        self.configure(groups)
        return groups

    def configure(self, groups: Sequence[ProcessGroup]) -> None:
        """Configure these groups together, their ranks in this order."""
        address = self.fresh_address()
        self.all(
            groups,
            lambda rank, group: group.configure(
                address, rank, len(groups), replica_id=f"replica_{rank}", quorum_id=1, timeout=self._timeout
            ),
        )

    def all(self, groups: Sequence[ProcessGroup], action: Callable[[int, ProcessGroup], _T]) -> list[_T]:
        """Let every rank act at once; gives their values in order, or raises the first rank's error."""
        return [outcome.get() for outcome in self.outcomes(groups, action)]

    def outcomes(self, groups: Sequence[ProcessGroup], action: Callable[[int, ProcessGroup], _T]) -> list[Outcome[_T]]:
        """Let every rank act at once; gives what each came to, in order."""
        started = [self.start(partial(action, rank, group)) for rank, group in enumerate(groups)]
        return [finish() for finish in started]

    def start(self, action: Callable[[], Any]) -> Callable[[], Outcome[Any]]:
        """Act in a thread of its own; gives a function that waits for it."""
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
