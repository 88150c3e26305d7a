"""Many seeds on all CPU cores, and the story of a failed one.

Seeds are independent, so small batches of them go to separate processes. The first failure ends the run. The failed
seed then runs once more, and is reported as a transcript.

Law of this file: seeds alone. The processes that it starts have ended when a function returns.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from itertools import islice

from tft_sim.marks import Marks
from tft_sim.scenario import Scenario
from tft_sim.simulator import Simulation, SimulationConfig, SimulationError, simulate

BATCH_SIZE = 10  # seeds that a process runs before it reports


def run_many(seeds: range, *, processes: int = 1, config: SimulationConfig | None = None) -> Marks:
    """Run these seeds.

    Args:
        seeds: the seeds to run.
        processes: number of processes, at least 1. With 1, this process runs them.
        config: as in `simulate`.
    Returns: the marks that all of them hit.
    Raises: SimulationError: of the first seed that was seen to fail.
    """
    marks = Marks()
    if processes == 1:
        for seed in seeds:
            marks.add(simulate(seed, config).marks)
        return marks
    batches = iter([seeds[first : first + BATCH_SIZE] for first in range(0, len(seeds), BATCH_SIZE)])
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Batches are submitted a few at a time, so that after a failure nothing waits for unused results.
        running = {pool.submit(_run_batch, batch, config) for batch in islice(batches, 2 * processes)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            failed = _merge_results(done, marks)
            if failed is not None:
                pool.shutdown(cancel_futures=True)
                simulate(failed, config)  # fails here as it did there, with its message
                raise RuntimeError(f"seed {failed} failed in another process and does not here; report this")
            running |= {pool.submit(_run_batch, batch, config) for batch in islice(batches, len(done))}
    return marks


def _merge_results(done: set[Future[tuple[int | None, Marks]]], marks: Marks) -> int | None:
    failures = []
    for each in done:
        failed, reached = each.result()
        marks.add(reached)
        if failed is not None:
            failures.append(failed)
    return min(failures, default=None)


def _run_batch(seeds: range, config: SimulationConfig | None) -> tuple[int | None, Marks]:
    """Run a batch in a worker process. Return the first failed seed, and the marks of the others."""
    marks = Marks()
    for seed in seeds:
        try:
            marks.add(simulate(seed, config).marks)
        except SimulationError:
            return seed, marks
    return None, marks


def story(seed: int, config: SimulationConfig | None = None) -> Iterator[str]:
    """Tell what one seed did, as a transcript, up to its end or its failure.

    Args:
        seed: determines the whole run.
        config: as in `simulate`.
    """
    simulation = Simulation(seed, config or SimulationConfig())
    recorder = Scenario()
    recorder.attend(simulation.cluster)
    with suppress(Exception):  # `simulate` reports the error, and this transcript ends before it
        simulation.run()
    yield from recorder.reports()
