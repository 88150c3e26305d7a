"""P8: the time that a trainer loses because others read its state, beside torchft.

One process trains: it waits for its device, works, and lets its optimizer write. It offers its state and goes on.
Another process reads the state, over a link as fast as this machine, or of 50 MB/s.

The loss is the time for the offer, plus the extra time of the steps until the reader has everything, compared with the
steps before. The loss of a bystander in that time is subtracted. The bystander is an equal trainer whose state no
process reads. The readers are on this machine as well, and take its cores from both.

A second row has four readers on slow links, during 100 steps. Buffers are warm. The first snapshot is reported
separately.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.row import Row
from benchmarks.worker import Worker

MIB: Final = 1024
SLOW_BYTES_PER_S: Final = 50e6
SLOW_READERS: Final = 4
SLOW_STEPS: Final = 100
MAX_LOST_S: Final = 0.15
PATIENCE_S: Final = 300.0


@dataclass(frozen=True)
class Lost:
    """The time that the trainer lost.

    Args:
        first_s: for its first snapshot.
        fast_s, slow_s: while one reader reads at full speed, and over a slow link.
    """

    first_s: float
    fast_s: float
    slow_s: float


def measure(turns: int, mib: int = MIB) -> Row:
    """Measure P8. A turn is a fresh set of processes in each system, which transfers twice."""
    found: dict[str, list[Lost]] = {"torchft": [], "tft": []}
    for _ in range(turns):
        for system, so_far in found.items():
            so_far.append(_pair(system, mib))
    ours, theirs = _median(found["tft"]), _median(found["torchft"])
    return Row(
        name="P8",
        what=f"trainer loses, {mib} MiB, fast / slow",
        ours=f"{ours.fast_s:.2f} / {ours.slow_s:.2f} s",
        peer=f"{theirs.fast_s:.2f} / {theirs.slow_s:.2f} s",
        other=f"first snapshot {ours.first_s:.2f} s",
        ratio=max(ours.fast_s, ours.slow_s) / max(theirs.fast_s, theirs.slow_s),
        bar=f"<= {MAX_LOST_S:g} s in both",
        met=max(ours.fast_s, ours.slow_s) <= MAX_LOST_S,
    )


def measure_slow_readers(turns: int, mib: int = MIB) -> Row:
    """Measure four slow readers over 100 steps. A turn is one fresh set of processes in each system."""
    found: dict[str, list[float]] = {"torchft": [], "tft": []}
    for _ in range(turns):
        for system, so_far in found.items():
            so_far.append(_slow_readers(system, mib))
    ours, theirs = statistics.median(found["tft"]), statistics.median(found["torchft"])
    return Row(
        name="P8s",
        what=f"{SLOW_READERS} slow readers, {SLOW_STEPS} steps",
        ours=f"{ours:.2f} s",
        peer=f"{theirs:.2f} s",
        other="",
        ratio=ours / theirs,
        bar=f"<= {MAX_LOST_S:g} s",
        met=ours <= MAX_LOST_S,
    )


def _median(found: Sequence[Lost]) -> Lost:
    return Lost(
        first_s=statistics.median(each.first_s for each in found),
        fast_s=statistics.median(each.fast_s for each in found),
        slow_s=statistics.median(each.slow_s for each in found),
    )


@dataclass(frozen=True)
class _Processes:
    """A trainer, an equal trainer without readers, and the readers."""

    trainer: Worker
    bystander: Worker
    readers: Sequence[Worker]


def _start(stack: ExitStack, system: str, mib: int, num_readers: int) -> _Processes:
    workers: list[Worker] = []
    for role in ("trainer", "trainer", *["reader"] * num_readers):
        worker = Worker(system, "benchmarks.serving_worker", ["--role", role, "--mib", str(mib)])
        stack.callback(worker.end)
        workers.append(worker)
        worker.receive(PATIENCE_S)
    return _Processes(workers[0], workers[1], workers[2:])


def _pair(system: str, mib: int) -> Lost:
    with ExitStack() as stack:
        processes = _start(stack, system, mib, 1)
        first_s = _warm(processes.trainer)
        return Lost(first_s, _read(processes, 2, None), _read(processes, 3, SLOW_BYTES_PER_S))


def _slow_readers(system: str, mib: int) -> float:
    with ExitStack() as stack:
        processes = _start(stack, system, mib, SLOW_READERS)
        _warm(processes.trainer)
        return _read(processes, 2, SLOW_BYTES_PER_S, steps=SLOW_STEPS)


def _warm(trainer: Worker) -> float:
    """Let the trainer offer a state without readers, and train until its checksums exist. Returns: time of the
    offer."""
    first_s = _offer(trainer, 1)[0]
    trainer.send({"do": "train", "steps": SLOW_STEPS})
    trainer.receive(PATIENCE_S)
    return first_s


def _offer(trainer: Worker, step: int) -> tuple[float, str]:
    trainer.send({"do": "offer", "step": step})
    answer = trainer.receive(PATIENCE_S)
    return float(answer["seconds"]), str(answer["metadata"])


def _read(processes: _Processes, step: int, bytes_per_s: float | None, steps: int | None = None) -> float:
    """Return the trainer's loss in s while these read, to their end or for that many steps.

    Raises: RuntimeError: the received state differs from the sent one.
    """
    offered_s, metadata = _offer(processes.trainer, step)
    for reader in processes.readers:
        reader.send({"step": step, "metadata": metadata, "bytes_per_s": bytes_per_s})
    for reader in processes.readers:
        reader.receive(PATIENCE_S)
    trainers = (processes.trainer, processes.bystander)
    for trainer in trainers:
        trainer.send({"do": "train"} if steps is None else {"do": "train", "steps": steps})
    lost: list[float] = [] if steps is None else [trainer.receive(PATIENCE_S)["lost_s"] for trainer in trainers]
    for reader in processes.readers:
        if not reader.receive(PATIENCE_S)["right"]:
            raise RuntimeError("the received state differs from the sent state")
    if steps is None:
        for trainer in trainers:
            trainer.send({"do": "stop"})
        lost = [trainer.receive(PATIENCE_S)["lost_s"] for trainer in trainers]
    return offered_s + max(0.0, lost[0] - max(0.0, lost[1]))
