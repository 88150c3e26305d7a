"""A lighthouse that is far away: a connection to it takes longer than heartbeat_timeout."""

from __future__ import annotations

import select
import socket
import threading
from datetime import timedelta
from typing import Final, final

from tft_coord import ManagerClient, ManagerServer
from tft_coord.core.types import Plan, RankRequest
from tft_coord.timeouts import Timeouts
from tft_lighthouse import LighthouseServer

HEARTBEAT_MS: Final = 600
FIRST_BYTES_S: Final = 1.0  # longer than one attempt may take, and shorter than two
PATIENCE: Final = timedelta(seconds=30)


@final
class FarDoor:
    """Stands before a server. The first bytes of each connection take their time, as the handshakes of TCP and of
    HTTP/2 do where a packet travels for seconds."""

    def __init__(self, port: int) -> None:
        self._port = port
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
            self._closed.wait(FIRST_BYTES_S)
            while not self._closed.is_set():
                for ready in select.select([client, server], [], [], 0.1)[0]:
                    try:
                        data = ready.recv(65536)
                        (server if ready is client else client).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return


def test_a_lighthouse_that_takes_longer_than_heartbeat_timeout_to_connect_is_reached() -> None:
    """Field report D8: each attempt was given up at heartbeat_timeout, and begun anew for ever."""
    timeouts = Timeouts(heartbeat_timeout_ms=HEARTBEAT_MS, beat_interval_ms=200)
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
        FarDoor(int(str(lighthouse.address).rpartition(":")[2])) as door,
        ManagerServer("a:1", door.address, "localhost", "[::]:0", "localhost:1", 1, timeouts=timeouts) as server,
        ManagerClient(server.address(), PATIENCE, group_rank=0, timeouts=timeouts) as client,
    ):
        plan = client.quorum(0, RankRequest(step=0, lineage=1), PATIENCE)
        assert isinstance(plan, Plan)
        assert plan.replica_ids == ("a:1",)
        assert door.num_connections >= 2, "the first attempt was given up"
