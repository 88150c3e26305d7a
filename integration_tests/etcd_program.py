"""An etcd cluster of several members on this machine, each a separate program that a test kills, stops and restarts.

Law of this file: processes and ports, but no test.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Final, final

import grpc
import pytest

NEED: Final = "TFT_NEED_ETCD"
UP_WITHIN_S: Final = 40.0
END_WITHIN_S: Final = 10.0


def require_etcd() -> str:
    """Return the path of etcd, or skip the test. With TFT_NEED_ETCD=1 the test fails instead."""
    found = shutil.which("etcd")
    if found is None and os.environ.get(NEED) != "1":
        pytest.skip("etcd is not installed here (Debian: apt-get install etcd-server)")
    assert found is not None, f"{NEED} is 1, and there is no etcd"
    return found


def free_ports(number: int) -> list[int]:
    """Return free ports of loopback; another program may take one before it is used."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@final
class EtcdProgram:
    """The members of one cluster, by number.

    Args:
        folder: for the members' data and logs.
        size: number of members.
        scheme: of the clients' port.
        settings: additional flags of each member.
    """

    def __init__(self, folder: Path, *, size: int = 3, scheme: str = "http", settings: tuple[str, ...] = ()) -> None:
        self._etcd = require_etcd()
        self._folder = folder
        self._scheme = scheme
        self._settings = settings
        ports = free_ports(2 * size)
        self._clients, self._peers = ports[:size], ports[size:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> str:
        """Return the members' addresses, with commas between them."""
        return ",".join(f"{self._scheme}://127.0.0.1:{port}" for port in self._clients)

    def start(self) -> None:
        """Start all members that do not run, and wait until each has a leader."""
        for number in range(len(self._clients)):
            if number not in self._processes:
                self._start(number)
        for number in range(len(self._clients)):
            self._wait(number)

    def kill(self, number: int) -> None:
        """Kill a member with kill -9."""
        process = self._processes.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait(END_WITHIN_S)

    def stop(self) -> None:
        """Stop all members with SIGSTOP, until `go_on`."""
        for process in self._processes.values():
            process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume all members with SIGCONT."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill all members."""
        for number in list(self._processes):
            self.kill(number)

    def _start(self, number: int) -> None:
        client = f"{self._scheme}://127.0.0.1:{self._clients[number]}"
        peers = [f"http://127.0.0.1:{port}" for port in self._peers]
        with (self._folder / f"etcd_{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [
                    self._etcd,
                    f"--name=m{number}",
                    f"--data-dir={self._folder / f'etcd_{number}'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peers[number]}",
                    f"--initial-advertise-peer-urls={peers[number]}",
                    "--initial-cluster=" + ",".join(f"m{each}={peer}" for each, peer in enumerate(peers)),
                    "--log-level=warn",
                    *self._settings,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
            )

    def _wait(self, number: int) -> None:
        deadline = time.monotonic() + UP_WITHIN_S
        while not self._answers(number):
            assert self._processes[number].poll() is None, f"it ended: {self._log(number)}"
            assert time.monotonic() < deadline, f"it does not answer: {self._log(number)}"
            time.sleep(0.05)

    def _answers(self, number: int) -> bool:
        """Return whether a member answers a read, for which it needs a majority."""
        if self._scheme == "https":  # the port opens once the member has joined
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self._clients[number])) == 0
        with grpc.insecure_channel(f"127.0.0.1:{self._clients[number]}") as channel:
            method = "/etcdserverpb.KV/Range"
            read: Any = channel.unary_unary(method, request_serializer=None, response_deserializer=None)
            try:
                read(b"\x0a\x01x", timeout=1)
            except grpc.RpcError:
                return False
            return True

    def _log(self, number: int) -> str:
        return (self._folder / f"etcd_{number}.log").read_text(errors="replace")[-2_000:]
