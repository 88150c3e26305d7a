"""Many seeds on all cores, and the story of one that failed.

A seed is independent of every other, so they are dealt out in small hands to processes of their own; the first that
fails ends the run. It is then run once more, and told as a transcript.

Law of this file: seeds alone; the processes that it starts have ended when a function returns.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from itertools import islice

from tft_sim.marks import Marks
from tft_sim.scenario import Scenario
from tft_sim.simulator import Simulation, SimulationConfig, SimulationFailed, simulate

HAND = 10  # seeds that a process runs before it says how it went


def run_many(seeds: range, *, processes: int = 1, config: SimulationConfig | None = None) -> Marks:
    """Run these seeds.

    Args:
        seeds: which.
        processes: that run them, at least 1; one is this one.
        config: as in `simulate`.
    Returns: what they came by, all together.
    Raises: SimulationFailed: of the first seed that was seen to fail.
    """
    marks = Marks()
    if processes == 1:
        for seed in seeds:
            marks.add(simulate(seed, config).marks)
        return marks
    hands = iter([seeds[first : first + HAND] for first in range(0, len(seeds), HAND)])
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Not all at once: after a failure nobody should have to wait for what nobody will look at.
        running = {pool.submit(_run_hand, hand, config) for hand in islice(hands, 2 * processes)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            failed = _take(done, marks)
            if failed is not None:
                pool.shutdown(cancel_futures=True)
                simulate(failed, config)  # fails here as it did there, and says how
                raise RuntimeError(f"seed {failed} failed in another process and does not here; report this")
            running |= {pool.submit(_run_hand, hand, config) for hand in islice(hands, len(done))}
    return marks


def _take(done: set[Future[tuple[int | None, Marks]]], marks: Marks) -> int | None:
    failures = []
    for each in done:
        failed, reached = each.result()
        marks.add(reached)
        if failed is not None:
            failures.append(failed)
    return min(failures, default=None)


def _run_hand(seeds: range, config: SimulationConfig | None) -> tuple[int | None, Marks]:
    """In a process of its own: the first of these seeds that failed, and what the others came by."""
    marks = Marks()
    for seed in seeds:
        try:
            marks.add(simulate(seed, config).marks)
        except SimulationFailed:
            return seed, marks
    return None, marks


def story(seed: int, config: SimulationConfig | None = None) -> Iterator[str]:
    """What one seed did, as a transcript tells it, up to its end or to what is wrong in it.

    Args:
        seed: says everything.
        config: as in `simulate`.
    """
    simulation = Simulation(seed, config or SimulationConfig())
    teller = Scenario()
    teller.attend(simulation.cluster)
    with suppress(Exception):  # whatever it is, `simulate` says it; here is told what came before
        simulation.run()
    yield from teller.told()
