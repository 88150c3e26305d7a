"""Machines whose own names mean loopback to themselves, as in Debian's /etc/hosts: their ranks still meet.

Each rank is on a separate host, named `localhost`, without a configured interface or host name.
"""

from __future__ import annotations

import ctypes
import os
import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Final

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from integration_tests.conftest import Spawn
from integration_tests.hosts import Hosts, hosts, on_host, why_not
from tft_pg import ProcessGroupGloo, format_store_addr

TIMEOUT: Final = timedelta(seconds=20)
_CLONE_NEWUTS: Final = 0x0400_0000


def call_this_machine(name: str) -> None:
    """Give the host of this process another name, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "can't leave the machine's name")
    socket.sethostname(name)


def meet(rank: int, store_host: str, connection: Connection) -> None:
    call_this_machine("localhost")
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if rank == 0:
        store = TCPStore(store_host, 0, is_master=True, wait_for_workers=False)  # listens on all interfaces
        connection.send(store.port)
    group = ProcessGroupGloo(TIMEOUT)
    try:
        group.configure(format_store_addr(store_host, connection.recv(), "met"), rank, 2)
        tensor = torch.full((3,), float(rank + 1))
        group.allreduce([tensor]).wait()
        connection.send(tensor.tolist())
    except Exception as error:
        connection.send(repr(error))
    connection.recv()  # waits until both have it, because the store is rank 0's
    group.shutdown()


def reduced_between(cluster: Hosts, spawn: Spawn, forkserver: ForkServerContext) -> list[object]:
    pipes = []
    for rank, name in enumerate(("a", "b")):
        ours, theirs = forkserver.Pipe()
        spawn(on_host, cluster.namespace(name), meet, rank, cluster.address("a"), theirs)
        theirs.close()
        pipes.append(ours)
    assert pipes[0].poll(20), "rank 0 has no store"
    port = pipes[0].recv()
    for ours in pipes:
        ours.send(port)
    found: list[object] = []
    for ours in pipes:
        assert ours.poll(2 * TIMEOUT.total_seconds()), "a rank says nothing"
        found.append(ours.recv())
    for ours in pipes:
        ours.send("end")
        ours.close()
    return found


def test_two_machines_whose_own_names_mean_loopback_reduce(spawn: Spawn, forkserver: ForkServerContext) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts("a", "b") as cluster:
        assert reduced_between(cluster, spawn, forkserver) == [[3.0] * 3] * 2
