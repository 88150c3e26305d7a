"""A distant lighthouse: a connection to it, or every answer, takes longer than heartbeat_timeout."""

from __future__ import annotations

import logging
import re
import select
import socket
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Final, final

import pytest

from tft_coord import ManagerClient, ManagerServer
from tft_coord.core.types import Plan, RankRequest
from tft_coord.timeouts import Timeouts
from tft_lighthouse import LighthouseServer

HEARTBEAT_MS: Final = 600
FIRST_BYTES_S: Final = 1.0  # longer than the limit of one attempt, and shorter than two
EACH_WAY_S: Final = 0.5
PATIENCE: Final = timedelta(seconds=30)


@final
class FarDoor:
    """A proxy in front of a server that delays some traffic, as a distant network does.

    Args:
        port: of the server.
        first_s: delay of the first bytes of each connection, as of the handshakes of TCP and of HTTP/2.
        each_s: delay of all bytes, each way.
    """

    def __init__(self, port: int, *, first_s: float = 0.0, each_s: float = 0.0) -> None:
        self._port = port
        self._first_s = first_s
        self._each_s = each_s
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.num_connections = 0
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, name="test-door")]
        self._threads[0].start()

    def __enter__(self) -> FarDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                self.num_connections += 1
                self._threads.append(threading.Thread(target=self._pass, args=(client,), name="test-door"))
                self._threads[-1].start()

    def _pass(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            self._closed.wait(self._first_s)
            travels: deque[tuple[float, socket.socket, bytes]] = deque()  # arrival time, target and bytes
            while not self._closed.is_set():
                wait_s = max(0.0, travels[0][0] - time.monotonic()) if travels else 0.1
                try:
                    for ready in select.select([client, server], [], [], min(wait_s, 0.1))[0]:
                        data = ready.recv(65536)
                        travels.append((time.monotonic() + self._each_s, server if ready is client else client, data))
                        if not data:
                            return
                    while travels and travels[0][0] <= time.monotonic():
                        _, to, data = travels.popleft()
                        to.sendall(data)
                except OSError:
                    return


@pytest.mark.in_parts
def test_a_lighthouse_that_takes_longer_than_heartbeat_timeout_to_connect_is_reached() -> None:
    """Field report D8: each attempt was given up at heartbeat_timeout, and repeated for ever."""
    timeouts = Timeouts(heartbeat_timeout_ms=HEARTBEAT_MS, beat_interval_ms=200)
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
        FarDoor(int(str(lighthouse.address).rpartition(":")[2]), first_s=FIRST_BYTES_S) as door,
        ManagerServer("a:1", door.address, "localhost", "[::]:0", "localhost:1", 1, timeouts=timeouts) as server,
        ManagerClient(server.address(), PATIENCE, group_rank=0, timeouts=timeouts) as client,
    ):
        plan = client.quorum(0, RankRequest(step=0, lineage=1), PATIENCE)
        assert isinstance(plan, Plan)
        assert plan.replica_ids == ("a:1",)
        assert door.num_connections >= 2, "the first attempt was given up"


@pytest.mark.in_parts
def test_a_lighthouse_whose_answers_take_longer_than_heartbeat_timeout_serves_and_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pings timed out at heartbeat_timeout, and with them every connection, for ever."""
    timeouts = Timeouts(heartbeat_timeout_ms=HEARTBEAT_MS, beat_interval_ms=200)
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=HEARTBEAT_MS) as lighthouse,
        FarDoor(int(str(lighthouse.address).rpartition(":")[2]), each_s=EACH_WAY_S) as door,
        ManagerServer(
            "a:1", door.address, "localhost", "[::]:0", "localhost:1", 1, timeouts=timeouts, in_process=True
        ) as server,
        ManagerClient(server.address(), PATIENCE, group_rank=0, timeouts=timeouts) as client,
    ):
        caplog.set_level(logging.WARNING, "tft_coord")
        held = None
        for step in range(4):  # longer than a ping that timed out
            plan = client.quorum(0, RankRequest(step=step, lineage=1, held=held, live=step > 0), PATIENCE)
            held = plan.key
            assert client.should_commit(0, step, True, PATIENCE, key=held)
        num_connections = door.num_connections
        for step in range(4, 7):
            plan = client.quorum(0, RankRequest(step=step, lineage=1, held=held, live=True), PATIENCE)
            assert plan.key == held, "it was never lost"
            assert client.should_commit(0, step, True, PATIENCE, key=held)
        assert door.num_connections == num_connections, "one connection carries it all"
    said = [record.getMessage() for record in caplog.records if "answers after" in record.getMessage()]
    assert len(said) == 1, said
    found = re.search(r"answers after (\d+) ms: .* --heartbeat-timeout-ms to at least (\d+),", said[0])
    assert found is not None, said
    assert int(found[1]) >= 2_000 * EACH_WAY_S
    assert int(found[2]) == 3 * int(found[1])
