"""One end of the serving benchmark, of tft or of torchft: a trainer that offers its state, or a reader.

A trainer receives {"step": n, "do": "offer"}, and reports the duration of the offer and the address of the state. It
receives {"do": "train"} and trains until {"do": "stop"}, or for "steps" steps. It then reports by how much its steps
exceeded the median of its steps alone at the start.

A reader receives {"step": n, "metadata": address, "bytes_per_s": rate of its link, or null}. It reports the start of
the transfer, and its end.

Law of this file: started as a module under the interpreter that has the system installed.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.step_worker import report
from benchmarks.transfer_worker import make_state

TIMEOUT = timedelta(seconds=120)
# Work of a step: the device computes while the trainer waits, and then the trainer's own thread works.
DEVICE_S = 0.02
WORK = torch.ones(96, 96)
ROUNDS = 100
ALONE_STEPS = 50
FORWARD_BYTES = 64 << 10


def main() -> None:
    """Perform orders until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft", "torchft"], required=True)
    parser.add_argument("--role", choices=["trainer", "reader"], required=True)
    parser.add_argument("--mib", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.system == "tft":
        from tft_ckpt import HTTPTransport

        transport: Any = HTTPTransport(TIMEOUT, advertise_addr="localhost")
    else:
        from torchft.checkpointing import HTTPTransport as PeersTransport

        transport = PeersTransport(TIMEOUT, 0)
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(orders,), daemon=True).start()
    if arguments.role == "trainer":
        _trainer(transport, arguments.mib, orders)
    else:
        _reader(transport, orders)
    transport.shutdown()


def _hear(orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)


def _step(transport: Any, state: dict[str, torch.Tensor]) -> float:
    begun = time.perf_counter()
    time.sleep(DEVICE_S)
    for _ in range(ROUNDS):
        WORK @ WORK
    transport.disallow_checkpoint()
    state["tensor_0"][:1000] += 1.0  # the optimizer writes
    return time.perf_counter() - begun


def _trainer(transport: Any, mib: int, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    state = make_state(mib)
    alone_s = statistics.median(_step(transport, state) for _ in range(ALONE_STEPS))
    report(alone_s=alone_s)
    while (order := orders.get()) is not None:
        if order["do"] == "offer":
            transport.disallow_checkpoint()  # the peer's lock would be taken twice
            begun = time.perf_counter()
            transport.send_checkpoint([1], order["step"], state, TIMEOUT)
            report(seconds=time.perf_counter() - begun, metadata=transport.metadata())
        elif order["do"] == "train":
            took: list[float] = []
            while len(took) < order.get("steps", sys.maxsize) and orders.empty():
                took.append(_step(transport, state))
            report(lost_s=sum(took) - alone_s * len(took), steps=len(took), longest_s=max(took, default=0.0))


def _reader(transport: Any, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    report(ready=True)
    while (order := orders.get()) is not None:
        with _link(order["metadata"], order["bytes_per_s"]) as metadata:
            report(begun=True)
            begun = time.perf_counter()
            got = transport.recv_checkpoint(0, metadata, order["step"], TIMEOUT)
            report(seconds=time.perf_counter() - begun, right=got["tensor_3"][17].item() == 3.0)
        del got


@contextmanager
def _link(metadata: str, bytes_per_s: float | None) -> Iterator[str]:
    """Yield an address to fetch from that limits the rate. With None it is the source itself."""
    if bytes_per_s is None:
        yield metadata
        return
    parts = urlsplit(metadata)
    with socket.create_server(("localhost", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=_carry, args=(client, parts, bytes_per_s), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield parts._replace(netloc=f"localhost:{listener.getsockname()[1]}").geturl()
        listener.shutdown(socket.SHUT_RDWR)


def _carry(client: socket.socket, parts: Any, bytes_per_s: float) -> None:
    # The buffers are small. Otherwise the kernel would take bytes from the source before the link has carried them.
    server = socket.socket(socket.AF_INET6 if _is_ipv6(parts) else socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, FORWARD_BYTES)
    with client, server:
        server.connect((parts.hostname, parts.port))
        threading.Thread(target=_questions, args=(client, server), daemon=True).start()
        free_s = time.perf_counter()
        while data := server.recv(FORWARD_BYTES):
            client.sendall(data)
            free_s = max(free_s, time.perf_counter() - 0.1) + len(data) / bytes_per_s
            time.sleep(max(0.0, free_s - time.perf_counter()))


def _is_ipv6(parts: Any) -> bool:
    found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    return all(info[0] == socket.AF_INET6 for info in found)


def _questions(client: socket.socket, server: socket.socket) -> None:
    try:
        while data := client.recv(FORWARD_BYTES):
            server.sendall(data)
        server.shutdown(socket.SHUT_WR)
    except OSError:
        return  # one of the two has ended, and the other direction finds that too


if __name__ == "__main__":
    main()
