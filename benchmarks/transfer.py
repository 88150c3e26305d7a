"""P6, P7 and P9: the cost of fetching a live state over HTTP, beside torchft and a bare socket.

Two processes on this machine have a state of 64 tensors on the CPU. P6 is a warm pair's receive, best of four, each
system with its best number of connections. tft checks every chunk, and receives into the same memory every time
(`reuse_buffers`), for which the peer has no setting.

P7 is the first receive of a fresh pair, and P9 is the memory for it. Both receive into existing tensors. The peer
receives into fresh tensors and copies. The systems take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.row import Row
from benchmarks.worker import Worker

MIB: Final = 1024
TRANSFERS: Final = 4
PEERS_NUM_CHUNKS: Final = (0, 2, 8)
MIN_OF_PEER: Final = 0.9
MIN_OF_SOCKET: Final = 0.85
MIN_FIRST_OF_PEER: Final = 2.0
MAX_EXTRA_MIB: Final = 64.0


@dataclass(frozen=True)
class Received:
    """The measurement of one receive.

    Args:
        receive_s, send_s: time of the receiver and, before it, of the source's trainer.
        extra_mib: maximum growth of the receiver's memory.
    """

    receive_s: float
    send_s: float
    extra_mib: float


def measure_warm(turns: int, mib: int = MIB) -> Row:
    """Measure P6. A turn is four transfers of each system in each of its forms."""
    ours: list[float] = []
    bare: list[float] = []
    theirs: dict[int, list[float]] = {num_chunks: [] for num_chunks in PEERS_NUM_CHUNKS}
    for _ in range(turns):
        for num_chunks, rates in theirs.items():
            rates.append(_best(mib, _transfers("torchft", mib, TRANSFERS, num_chunks=num_chunks)))
        bare.append(_best(mib, _transfers("tft", mib, TRANSFERS, way="socket")))
        ours.append(_best(mib, _transfers("tft", mib, TRANSFERS, reuse=True)))
    our, socket = statistics.median(ours), statistics.median(bare)
    num_chunks, their = max(
        ((num_chunks, statistics.median(rates)) for num_chunks, rates in theirs.items()), key=lambda pair: pair[1]
    )
    return Row(
        name="P6",
        what=f"live state, {mib} MiB, warm",
        ours=f"{our:.2f} GB/s",
        peer=f"{their:.2f} GB/s",
        other=f"bare socket {socket:.2f} GB/s",
        ratio=our / their,
        bar=f">= {MIN_OF_PEER:g} x torchft ({num_chunks} chunks), >= {MIN_OF_SOCKET:g} x socket",
        met=our >= MIN_OF_PEER * their and our >= MIN_OF_SOCKET * socket,
    )


def measure_first(turns: int, mib: int = MIB) -> Row:
    """Measure P7. A turn is one transfer of a fresh pair of processes in each system."""
    ours, theirs = _first_ones(turns, mib)
    our, their = _rate(mib, ours.receive_s), _rate(mib, theirs.receive_s)
    whole = (theirs.receive_s + theirs.send_s) / (ours.receive_s + ours.send_s)
    return Row(
        name="P7",
        what=f"the first one, {mib} MiB in place",
        ours=f"{our:.2f} GB/s",
        peer=f"{their:.2f} GB/s",
        other=f"with the snapshot {whole:.2f} x",
        ratio=our / their,
        bar=f">= {MIN_FIRST_OF_PEER:g} x torchft",
        met=our >= MIN_FIRST_OF_PEER * their,
    )


def measure_memory(turns: int, mib: int = MIB) -> Row:
    """Measure P9. A turn is as for P7."""
    ours, theirs = _first_ones(turns, mib)
    return Row(
        name="P9",
        what=f"receiver's extra memory, {mib} MiB",
        ours=f"{ours.extra_mib:.0f} MiB",
        peer=f"{theirs.extra_mib:.0f} MiB",
        other="",
        ratio=ours.extra_mib / theirs.extra_mib,
        bar=f"<= {MAX_EXTRA_MIB:g} MiB",
        met=ours.extra_mib <= MAX_EXTRA_MIB,
    )


def _first_ones(turns: int, mib: int) -> tuple[Received, Received]:
    """Return the medians of tft and of the peer."""
    found: dict[str, list[Received]] = {"torchft": [], "tft": []}
    for _ in range(turns):
        for system, so_far in found.items():
            so_far += _transfers(system, mib, 1, into=True)
    return _median(found["tft"]), _median(found["torchft"])


def _median(received: Sequence[Received]) -> Received:
    return Received(
        receive_s=statistics.median(each.receive_s for each in received),
        send_s=statistics.median(each.send_s for each in received),
        extra_mib=statistics.median(each.extra_mib for each in received),
    )


def _rate(mib: int, seconds: float) -> float:
    """Return the rate in GB/s."""
    return (mib << 20) / seconds / 1e9


def _best(mib: int, received: Sequence[Received]) -> float:
    return max(_rate(mib, each.receive_s) for each in received)


def _transfers(
    system: str,
    mib: int,
    times: int,
    *,
    way: str = "http",
    num_chunks: int = 0,
    into: bool = False,
    reuse: bool = False,
) -> list[Received]:
    """Transfer with one fresh pair of processes. Raises: RuntimeError: the received state differs from the sent one."""
    arguments = ["--way", way, "--mib", str(mib), "--num-chunks", str(num_chunks), *(["--reuse"] if reuse else [])]
    workers: list[Worker] = []
    try:
        for role in ("source", "receiver"):
            workers.append(Worker(system, "benchmarks.transfer_worker", ["--role", role, *arguments]))
        source, receiver = workers
        for worker in workers:
            worker.receive()
        found = []
        for step in range(1, times + 1):
            source.send({"step": step})
            sent = source.receive()
            receiver.send({"step": step, "metadata": sent["metadata"], "into": into})
            got = receiver.receive()
            if not got["right"]:
                raise RuntimeError(f"the received state of {system} differs from the sent state")
            found.append(Received(got["seconds"], sent["seconds"], got["extra_bytes"] / (1 << 20)))
        return found
    finally:
        for worker in workers:
            worker.end()
