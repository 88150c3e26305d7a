"""Every order of a few events, on a core alone: what chance may not come by in a lifetime.

From its start a world is taken through every sequence of so many events, breadth first; two sequences that end in the
same state are one from there on. After every event all invariants are looked at, and from every state the world must
find its way back when the faults stop. A sequence that breaks something is shown event by event; no shorter one does.

    python -m tft_sim --explore 4 --replicas 3
    python -m tft_sim --explore 6 --replicas 3 --kinds ask,die,leave,hang,wake,grace

Law of this file: the search only; the processes that it starts have ended when it returns.
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

HAND = 50  # paths that are tried together, in one process
Path = tuple[str, ...]


class World(Protocol):
    """What is explored: a core and what stands around it."""

    def choices(self) -> Sequence[str]:
        """The events that can happen now, by name; equal worlds have equal ones."""

    def happen(self, choice: str) -> None:
        """Let one happen. Raises: InvariantBroken, or whatever a core raises by mistake."""

    def state(self) -> object:
        """All that the future depends on, as a hashable value."""

    def calm_down(self) -> None:
        """No more faults. Raises: InvariantBroken: it does not find its way back."""


@dataclass(frozen=True, slots=True)
class Explored:
    """What a search has seen.

    Args:
        num_states: different ones, the start included.
        num_events: that were tried.
    """

    num_states: int
    num_events: int


class ExplorationFailed(AssertionError):
    """A sequence of events breaks something; the message shows it."""

    def __init__(self, path: Sequence[str], cause: Exception) -> None:
        super().__init__(f"{' → '.join(path) or 'the start'}: {cause}")
        self.path = tuple(path)
        self.cause = cause


class _Found(NamedTuple):
    """What trying some paths gave: of each state that was not known its hash, and from which path by which event.

    `failed`: the sequence that broke something, if one did.
    """

    num_events: int
    reached: list[tuple[int, int, str]]
    failed: Path | None = None


@dataclass(slots=True)
class _Search:
    """Where a search stands: `frontier` are the paths to go on from, `seen` the hashes of all states so far."""

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
        kinds: of events, by their first word, that there are to be; none: all.
        on_length: told when all sequences of a length have been tried, what there was to see so far.
        processes: that try them, at least 1; more are forks of this one, which may have no other thread then.
    Returns: how much there was to see.
    Raises: ExplorationFailed: with a sequence that breaks something; none is shorter.
    """
    start = make()
    search = _Search(start, frozenset(kinds), {hash(start.state())})
    _replay(start, ())
    tried = 0
    for length in range(1, num_events + 1):
        reached: list[Path] = []
        hands = [range(first, first + HAND) for first in range(0, len(search.frontier), HAND)]
        with _dealt(search, hands, processes) as all_found:
            for hand, found in zip(hands, all_found, strict=True):
                if found.failed is not None:
                    _replay(start, found.failed)
                    raise RuntimeError(f"{' → '.join(found.failed)} failed, and does not again; report this")
                tried += found.num_events
                for state, path, choice in found.reached:
                    if state not in search.seen:  # another process may have come by it too
                        search.seen.add(state)
                        if length < num_events:
                            reached.append((*search.frontier[hand[path]], choice))
        search.frontier = reached
        on_length(length, Explored(len(search.seen), tried))
    return Explored(len(search.seen), tried)


def _replay(start: World, path: Path) -> None:
    """Raises: ExplorationFailed: something breaks on this path, or when the faults stop at its end."""
    world = copied(start)
    so_far: list[str] = []
    try:
        for choice in path:
            so_far.append(choice)
            world.happen(choice)
        so_far.append("calm")
        world.calm_down()
    except Exception as error:  # whatever it is, the path must be told
        raise ExplorationFailed(so_far, error) from error


@contextmanager
def _dealt(search: _Search, hands: Sequence[range], processes: int) -> Iterator[Iterable[_Found]]:
    """Try the paths of the frontier, hand by hand and in order, in this process or in forks of it."""
    if processes == 1 or len(hands) < 2 * processes:
        yield (_try(search, hand, set()) for hand in hands)
        return
    # A fork has all that was found so far, and sends only what it finds.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=fork, initializer=_begin, initargs=(search,)) as pool:
        try:
            yield pool.map(_try_in_fork, hands)
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure nobody waits for what nobody will look at


_try_in_fork_of: Callable[[range], _Found]


def _begin(search: _Search) -> None:
    global _try_in_fork_of
    _try_in_fork_of = partial(_try, search, found_here=set())
    # Millions of states are no garbage: looking at them again and again took two thirds of the time, and at those that
    # came with the fork copied them.
    gc.freeze()


def _try_in_fork(hand: range) -> _Found:
    return _try_in_fork_of(hand)


def _try(search: _Search, hand: range, found_here: set[int]) -> _Found:
    """Every event after each of these paths of the frontier."""
    tried = 0
    reached: list[tuple[int, int, str]] = []
    for number, path in enumerate(search.frontier[hand.start : hand.stop]):
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
                if state in search.seen or state in found_here:
                    continue
                found_here.add(state)
                world.calm_down()
            except Exception:  # the path tells it better: it is taken once more
                return _Found(tried, reached, (*path, choice))
            reached.append((state, number, choice))
    return _Found(tried, reached)
