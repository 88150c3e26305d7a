"""Every order of a few events, on a core alone. It covers cases that random seeds may never reach.

The search takes a world through every sequence of events up to a length, breadth first. Two sequences that end in the
same state are one from there on. After every event the search checks all invariants. From every state the world must
recover when the faults stop. A failing sequence is shown event by event, and no shorter one fails.

    python -m tft_sim --explore 4 --replicas 3
    python -m tft_sim --explore 6 --replicas 3 --kinds ask,die,leave,hang,wake,grace

Law of this file: the search only. The processes that it starts have ended when it returns.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from tft_coord.testing import copied

BATCH_SIZE = 50  # paths that one process tries together
Path = tuple[str, ...]


class World(Protocol):
    """A core and its surroundings, which the search explores."""

    def choices(self) -> Sequence[str]:
        """Return the names of the events that can happen now. Equal worlds have equal ones."""

    def happen(self, choice: str) -> None:
        """Let one event happen. Raises: InvariantError, or any error that a core raises by mistake."""

    def state(self) -> object:
        """Return everything that the future depends on, as a hashable value."""

    def calm_down(self) -> None:
        """Stop the faults. Raises: InvariantError: the world does not recover."""


@dataclass(frozen=True, slots=True)
class Explored:
    """The extent of a search.

    Args:
        num_states: number of different states, the start included.
        num_events: number of tried events.
    """

    num_states: int
    num_events: int


class ExplorationError(AssertionError):
    """A sequence of events that violates an invariant. The message shows it."""

    def __init__(self, path: Sequence[str], cause: Exception) -> None:
        super().__init__(f"{' → '.join(path) or 'the start'}: {cause}")
        self.path = tuple(path)
        self.cause = cause


class _BatchResult(NamedTuple):
    """The result of trying some paths: for each new state its hash, the number of its path, and the last event.

    `failed`: the sequence that failed, if one did.
    """

    num_events: int
    reached: list[tuple[int, int, str]]
    failed: Path | None = None


@dataclass(slots=True)
class _Search:
    """The progress of a search. `frontier`: the paths to continue from. `seen`: the hashes of all states so far."""

    start: World
    kinds: frozenset[str]
    seen: set[int]
    frontier: list[Path] = field(default_factory=lambda: [()])


def explore(
    make: Callable[[], World],
    num_events: int,
    *,
    kinds: Collection[str] = (),
    on_length: Callable[[int, Explored], None] = lambda _length, _explored: None,
    processes: int = 1,
) -> Explored:
    """Take a world through every sequence of at most so many events.

    Args:
        make: makes the world at its start.
        num_events: length of the longest sequence.
        kinds: first words of the events to try. Empty: all.
        on_length: called with the extent so far when all sequences of a length have been tried.
        processes: number of processes, at least 1. More than one are forks of this one, which may then have no other
            thread.
    Returns: the extent of the search.
    Raises: ExplorationError: a sequence fails, and no shorter one does.
    """
    start = make()
    search = _Search(start, frozenset(kinds), {hash(start.state())})
    _replay(start, ())
    tried = 0
    for length in range(1, num_events + 1):
        reached: list[Path] = []
        batches = [range(first, first + BATCH_SIZE) for first in range(0, len(search.frontier), BATCH_SIZE)]
        with _batch_results(search, batches, processes) as results:
            for batch, found in zip(batches, results, strict=True):
                if found.failed is not None:
                    _replay(start, found.failed)
                    raise RuntimeError(f"{' → '.join(found.failed)} failed, and does not again; report this")
                tried += found.num_events
                for state, path, choice in found.reached:
                    if state not in search.seen:  # another process may have reached it too
                        search.seen.add(state)
                        if length < num_events:
                            reached.append((*search.frontier[batch[path]], choice))
        search.frontier = reached
        on_length(length, Explored(len(search.seen), tried))
    return Explored(len(search.seen), tried)


def _replay(start: World, path: Path) -> None:
    """Repeat a path. Raises: ExplorationError: it fails on the way, or when the faults stop at its end."""
    world = copied(start)
    so_far: list[str] = []
    try:
        for choice in path:
            so_far.append(choice)
            world.happen(choice)
        so_far.append("calm")
        world.calm_down()
    except Exception as error:  # the message must name the path, whatever the error is
        raise ExplorationError(so_far, error) from error


@contextmanager
def _batch_results(search: _Search, batches: Sequence[range], processes: int) -> Iterator[Iterable[_BatchResult]]:
    """Try the paths of the frontier, batch by batch and in order, in this process or in forks of it."""
    if processes == 1 or len(batches) < 2 * processes:
        yield (_try(search, batch, set()) for batch in batches)
        return
    # A fork has all results so far, and sends only its own.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=fork, initializer=_set_search, initargs=(search,)) as pool:
        try:
            yield pool.map(_try_in_fork, batches)
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure nothing waits for unused results


_try_in_fork_of: Callable[[range], _BatchResult]


def _set_search(search: _Search) -> None:
    global _try_in_fork_of
    _try_in_fork_of = partial(_try, search, found_in_batch=set())
    # Millions of states are no garbage. Scanning them repeatedly took two thirds of the time. Scanning the states that
    # came with the fork copied their pages.
    gc.freeze()


def _try_in_fork(batch: range) -> _BatchResult:
    return _try_in_fork_of(batch)


def _try(search: _Search, batch: range, found_in_batch: set[int]) -> _BatchResult:
    """Try every event after each of these paths of the frontier."""
    tried = 0
    reached: list[tuple[int, int, str]] = []
    for number, path in enumerate(search.frontier[batch.start : batch.stop]):
        before = copied(search.start)
        for choice in path:
            before.happen(choice)
        for choice in before.choices():
            if search.kinds and choice.split()[0] not in search.kinds:
                continue
            tried += 1
            world = copied(before)
            try:
                world.happen(choice)
                state = hash(world.state())
                if state in search.seen or state in found_in_batch:
                    continue
                found_in_batch.add(state)
                world.calm_down()
            except Exception:  # the caller replays the path for a better message
                return _BatchResult(tried, reached, (*path, choice))
            reached.append((state, number, choice))
    return _BatchResult(tried, reached)
