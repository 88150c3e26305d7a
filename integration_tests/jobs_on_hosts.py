"""A job whose replicas run on separate hosts, with a lighthouse on a further one.

Law of this file: the hosts of a job's processes. The tests decide what happens to the cables.
"""

from __future__ import annotations

import multiprocessing.connection
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Final, cast

from integration_tests.conftest import Spawn
from integration_tests.hosts import INTERFACE, Hosts, on_host
from integration_tests.training import Address, Job
from tft_lighthouse import LighthouseServer

LIGHTHOUSE: Final = "lighthouse"  # name of its host
SECRET: Final = "of-this-job"  # without a secret other hosts are not served
ENVIRONMENT: Final = {"GLOO_SOCKET_IFNAME": INTERFACE, "TFT_TOKEN": SECRET}  # of a trainer


def job_of(cluster: Hosts, spawn: Spawn, lighthouse: str) -> Job:
    """Return a job without trainers yet. Each trainer runs on the host of its name."""

    def spawn_on_host(target: Callable[..., object], spec: Any, connection: Connection) -> ForkServerProcess:
        return spawn(on_host, cluster.namespace(spec.name), target, spec, connection)

    return Job(spawn_on_host, cast(LighthouseServer, Address(lighthouse)))


@contextmanager
def job_on_hosts(cluster: Hosts, spawn: Spawn, **settings: Any) -> Iterator[Job]:
    """Yield `job_of` with a lighthouse, while the block lasts. `settings` are the lighthouse's."""
    ours, theirs = multiprocessing.connection.Pipe()
    bind = f"{cluster.address(LIGHTHOUSE)}:0"
    serving = spawn(on_host, cluster.namespace(LIGHTHOUSE), _serve, bind, settings, theirs)
    theirs.close()
    assert ours.poll(20)
    yield job_of(cluster, spawn, ours.recv())
    ours.send("end")
    serving.join(20)
    ours.close()


def _serve(bind: str, settings: dict[str, Any], connection: Connection) -> None:
    with LighthouseServer(bind, hostname=bind.rpartition(":")[0], token=SECRET, **settings) as lighthouse:
        connection.send(str(lighthouse.address))
        connection.recv()
