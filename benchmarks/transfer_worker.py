"""One end of the transfer benchmark, of tft, torchft or a bare socket: it sends or receives a state on request.

A source receives {"step": n}, offers its state and reports its address. A receiver receives {"step": n, "metadata":
address, "into": whether it fills existing tensors}. It reports the duration and the growth of its memory.

Law of this file: started as a module under the interpreter that has the system installed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from benchmarks.step_worker import report

TENSORS = 64
TIMEOUT = timedelta(seconds=60)
# The positions of a step's number in a tensor. With them, old content can't be mistaken for received content.
PLACES = (0, -1)


def make_state(mib: int) -> dict[str, torch.Tensor]:
    """Return a state of that size in TENSORS tensors, with its memory touched."""
    return {f"tensor_{index}": torch.full(((mib << 18) // TENSORS,), float(index)) for index in range(TENSORS)}


def main() -> None:
    """Perform orders until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft", "torchft"], required=True)
    parser.add_argument("--way", choices=["http", "socket"], required=True)
    parser.add_argument("--role", choices=["source", "receiver"], required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--num-chunks", type=int, required=True)
    parser.add_argument("--reuse", action="store_true", help="receive into the same memory every time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.way == "socket":
        _SOCKET[arguments.role](arguments.mib << 20)
        return
    if arguments.system == "tft":
        from tft_ckpt import HTTPTransport

        transport: Any = HTTPTransport(
            TIMEOUT, arguments.num_chunks, advertise_addr="localhost", reuse_buffers=arguments.reuse
        )
    else:
        from torchft.checkpointing import HTTPTransport as PeersTransport

        transport = PeersTransport(TIMEOUT, arguments.num_chunks)
    state = make_state(arguments.mib)
    report(ready=True)
    act = _send if arguments.role == "source" else _receive
    for line in sys.stdin:
        act(transport, state, json.loads(line))
    transport.shutdown()


def _send(transport: Any, state: dict[str, torch.Tensor], order: dict[str, Any]) -> None:
    for place in PLACES:
        state["tensor_1"][place] = float(order["step"])
    transport.disallow_checkpoint()  # the peer's lock would be taken twice
    begun = time.perf_counter()
    transport.send_checkpoint([1], order["step"], state, TIMEOUT)
    report(seconds=time.perf_counter() - begun, metadata=transport.metadata())


def _receive(transport: Any, state: dict[str, torch.Tensor], order: dict[str, Any]) -> None:
    gc.collect()
    with Memory() as memory:
        begun = time.perf_counter()
        arguments = (0, order["metadata"], order["step"], TIMEOUT)
        if not order["into"]:
            got = transport.recv_checkpoint(*arguments)
        elif hasattr(transport, "prepare_to_send"):
            got = transport.recv_checkpoint(*arguments, into=state)
        else:
            got = state
            for name, tensor in transport.recv_checkpoint(*arguments).items():
                state[name].copy_(tensor)
        seconds = time.perf_counter() - begun
    right = all(got["tensor_1"][place].item() == order["step"] for place in PLACES) and all(
        tensor[17].item() == index for index, tensor in enumerate(got.values())
    )
    report(seconds=seconds, extra_bytes=memory.grown_bytes, right=right)


class Memory:
    """The maximum growth of this process's memory within the block."""

    def __enter__(self) -> Memory:
        with open("/proc/self/clear_refs", "w") as marks:
            marks.write("5")  # reset the peak
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.grown_bytes = max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _socket_source(num_bytes: int) -> None:
    data = memoryview((ctypes.c_ubyte * num_bytes)()).cast("B")
    ctypes.memset((ctypes.c_ubyte * num_bytes).from_buffer(data), 1, num_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        report(ready=True)
        for _ in sys.stdin:
            thread = threading.Thread(target=_serve_once, args=(listener, data))
            thread.start()
            report(seconds=0.0, metadata=str(listener.getsockname()[1]))
            thread.join()


def _serve_once(listener: socket.socket, data: memoryview) -> None:
    with listener.accept()[0] as connection:
        connection.sendall(data)


def _socket_receiver(num_bytes: int) -> None:
    data = memoryview((ctypes.c_ubyte * num_bytes)()).cast("B")
    ctypes.memset((ctypes.c_ubyte * num_bytes).from_buffer(data), 2, num_bytes)
    report(ready=True)
    for line in sys.stdin:
        begun, at = time.perf_counter(), 0
        with socket.create_connection(("127.0.0.1", int(json.loads(line)["metadata"]))) as connection:
            while at < num_bytes:
                at += connection.recv_into(data[at:])
        report(seconds=time.perf_counter() - begun, extra_bytes=0, right=data[-1] == 1)


_SOCKET: dict[str, Callable[[int], None]] = {"source": _socket_source, "receiver": _socket_receiver}


if __name__ == "__main__":
    main()
