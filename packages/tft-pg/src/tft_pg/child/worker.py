"""The child process of a group: a loop of commands around one real group of this package.

The main thread reads the commands and starts the operations in their order. It never waits for a peer, so that the end
of the trainer ends this process at once. A thread of its own waits for each operation and sends the answer.

Law of this file: runs in the child only; nothing here imports the parent's side.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist

from tft_pg.backends.gloo import ProcessGroupGloo
from tft_pg.backends.native import NativeProcessGroup
from tft_pg.backends.nccl import ProcessGroupNCCL
from tft_pg.child.arguments import dtype_of, unpack
from tft_pg.child.device import MappedMemory
from tft_pg.child.messages import (
    DESCRIPTORS_MAX,
    ENVIRONMENT,
    MESSAGE_BYTES_MAX,
    SEVERED,
    decode,
    encode_answer,
    encode_error,
)
from tft_pg.child.segments import map_segment, strided_view, view
from tft_pg.errors import CommunicatorFailedError, ConfigError
from tft_pg.ops import collective
from tft_pg.word import WordExchange

__all__ = ["KINDS", "serve"]

_Made = tuple[NativeProcessGroup, MappedMemory | None]


def _gloo(timeout: timedelta, **settings: Any) -> _Made:
    return ProcessGroupGloo(timeout, **settings), None


def _nccl(timeout: timedelta, *, device: int, flags: tuple[int, str, int], hostname: str | None) -> _Made:
    from tft_pg.child.cuda_memory import MappedCudaMemory

    memory = MappedCudaMemory(device, flags)
    return ProcessGroupNCCL(timeout, device=device, hostname=hostname), memory


def _fake_nccl(timeout: timedelta, *, hostname: str | None) -> _Made:
    from tft_pg.testing import FakeAccelerator
    from tft_pg.testing.fake_memory import MappedFakeMemory

    return ProcessGroupNCCL(timeout, hostname=hostname, backend=FakeAccelerator()), MappedFakeMemory()


KINDS: Final[Mapping[str, Callable[..., _Made]]] = {"gloo": _gloo, "nccl": _nccl, "fake nccl": _fake_nccl}
"""Makes the groups that a child can run, each with its side of a device's memory."""

_CALLS_MAX: Final = 4096
_HOUR: Final = timedelta(hours=1)


def serve(connection: socket.socket) -> None:
    """Run the commands from this socket until its other end is closed. The main function of a child."""
    torch.set_num_threads(1)
    _Worker(connection).run()


@final
class _Worker:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiters = ThreadPoolExecutor(_CALLS_MAX, thread_name_prefix="tft-child-wait")
        self._group: NativeProcessGroup | None = None
        self._memory: MappedMemory | None = None
        self._segments: dict[int, torch.Tensor] = {}
        self._word: tuple[int, WordExchange | Exception] | None = None  # the last one, with its round

    def run(self) -> None:
        while True:
            packet, descriptors, _, _ = socket.recv_fds(
                self._connection, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
            if not packet:
                os._exit(0)  # at once, as the trainer's own connections end when it is killed
            command = decode(packet)
            call = command.get("call", -1)
            try:
                self._obey(command, call, descriptors)
            except Exception as error:
                self._fail(call, error)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _obey(self, command: dict[str, Any], call: int, descriptors: list[int]) -> None:
        match command["do"]:
            case "run" if self._memory is not None:
                self._run_on_device(self._memory, command, call)
            case "run":
                self._run(command, call, descriptors)
            case "unmap":
                for number in command["segments"]:
                    self._segments.pop(number, None)
            case "look":
                self._look(call)
            case "word":
                self._start_word(command)
            case "wait for word":
                self._later(call, self._started_word(command["round"]).wait)
            case "linger":
                limit = timedelta(seconds=command["timeout_s"])
                self._later(call, lambda: self._made().linger(limit))
            case "set_timeout":
                self._made().set_timeout(timedelta(seconds=command["timeout_s"]))
            case "configure":
                self._configure(command, call)
            case "end":
                threading.Thread(target=self._end, name="tft-child-end", daemon=True).start()
            case other:
                raise ConfigError(f"there is no command {other!r}")

    def _made(self) -> NativeProcessGroup:
        if self._group is None:
            raise ConfigError("the child has no group; configure it first")
        return self._group

    def _configure(self, command: dict[str, Any], call: int) -> None:
        environment = command["environment"]
        for name in [each for each in os.environ if each.startswith(ENVIRONMENT) and each not in environment]:
            del os.environ[name]  # the trainer has removed it since the nursery started
        os.environ.update(environment)
        make = KINDS[command["kind"]]
        group, memory = make(timedelta(seconds=command["timeout_s"]), **command["settings"])
        self._group, self._memory = group, memory
        group.patience.restore(command["patience"])
        arguments = dict(command["arguments"])
        limit_s = arguments.pop("timeout_s")
        limit = None if limit_s is None else timedelta(seconds=limit_s)

        def configure() -> None:
            try:
                group.configure(timeout=limit, **arguments)
            except Exception as error:
                self._fail(call, error, patience=group.patience.state())
            else:
                self._answer(call, None, patience=group.patience.state())

        self._waiters.submit(configure)

    def _run(self, command: dict[str, Any], call: int, descriptors: list[int]) -> None:
        memory = None
        if command["segment"] is not None:
            number, size = command["segment"]
            try:
                if descriptors:
                    self._segments[number] = map_segment(descriptors[0], size)
                memory = self._segments[number]
            except (OSError, KeyError) as error:  # the other ranks wait for this one
                raise CommunicatorFailedError(
                    f"{command['name']} failed: the child process can't map the shared memory of the call ({error!r}); "
                    "free memory or descriptors, and configure the group again"
                ) from error
        tensors = []
        for offset, dtype, shape in command["tensors"]:
            assert memory is not None
            tensors.append(view(memory, offset, dtype_of(dtype), shape))
        row = collective(command["name"])
        args, kwargs = unpack(command["args"], command["kwargs"], tensors)
        work: dist.Work = getattr(self._made(), row.name)(*args, **kwargs)
        tells_source = row.name == "recv_anysource"

        def wait() -> int:
            work.wait()
            return work._source_rank() if tells_source else 0

        self._later(call, wait)

    def _run_on_device(self, memory: MappedMemory, command: dict[str, Any], call: int) -> None:
        try:
            mapped = {buffer: memory.map(buffer, handle) for buffer, handle in command["buffers"]}
        except (RuntimeError, OSError) as error:  # the other ranks wait for this one
            raise CommunicatorFailedError(
                f"{command['name']} failed: the child process can't map the memory of a tensor ({error}); configure "
                "the group again, or use a group without a child process"
            ) from error
        tensors = []
        for buffer, offset, name, shape, strides in command["tensors"]:
            dtype = dtype_of(name)
            if buffer not in mapped:
                tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=memory.device))
            else:
                tensors.append(strided_view(mapped[buffer], offset, dtype, shape, strides))
        row = collective(command["name"])
        args, kwargs = unpack(command["args"], command["kwargs"], tensors)
        memory.order_after(call)
        try:
            work: dist.Work = getattr(self._made(), row.name)(*args, **kwargs)
            if row.name != "barrier":  # whose wait would hold up this thread
                work.wait()
        finally:
            memory.set_passed(call)
        self._send({"call": call, "started": True})
        self._later(call, lambda: work.wait(_HOUR) and None)

    def _look(self, call: int) -> None:
        """Answer with the error of the group, if there is one."""
        error = self._made().errored()
        if error is None:
            self._answer(call, None)
        else:
            self._fail(call, error)

    def _start_word(self, command: dict[str, Any]) -> None:
        limit = timedelta(seconds=command["timeout_s"])
        try:
            exchange: WordExchange | Exception = self._made().exchange_word(
                command["words"], round_number=command["round"], timeout=limit
            )
        except Exception as error:
            exchange = error
        self._word = (command["round"], exchange)

    def _started_word(self, round_number: int) -> WordExchange:
        if self._word is None or self._word[0] != round_number:
            raise ConfigError(f"the word of round {round_number} was replaced by a later one; wait for each word")
        started = self._word[1]
        if isinstance(started, Exception):
            raise started
        return started

    def _later(self, call: int, wait: Callable[[], object]) -> None:
        def finish() -> None:
            try:
                value = wait()
            except Exception as error:
                self._fail(call, error)
            else:
                self._answer(call, value)

        self._waiters.submit(finish)

    def _answer(self, call: int, value: object, **more: object) -> None:
        self._send({"call": call, "value": value, **more})

    def _fail(self, call: int, error: Exception, **more: object) -> None:
        state = None if self._group is None else self._group.errored()
        latched = None if state is None else encode_error(state)
        self._send({"call": call, "error": encode_error(error), "latched": latched, **more})

    def _send(self, answer: dict[str, object]) -> None:
        with suppress(OSError):  # the trainer has ended, which the main thread notices
            self._connection.send(encode_answer(answer))

    def _end(self) -> None:
        """End the operations in the way that is kind to the peers, then the process."""
        try:
            if self._group is not None:
                self._group.abort()
                self._group.shutdown()
                self._answer(SEVERED, None)
        finally:
            os._exit(0)
