"""A trainer starts against a server that is no lighthouse of its job: the error names it, and the start ends at
once."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Final

import grpc
import grpc.aio
import pytest
import trustme

from tft_algos import Manager
from tft_coord import LighthouseClient
from tft_coord.errors import CoordinationError, ProtocolError, RefusedError, RequestTimeoutError, UnreachableError
from tft_coord.timeouts import Timeouts
from tft_coord.transport.dial import dial
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

SOON_S: Final = 15.0
LATE: Final = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def nothing_held(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    caplog.get_records("call").clear()  # records hold errors, and errors hold the frames that they passed


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, name="test-http")
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def grpc_server() -> Iterator[int]:
    """Yield the port of a grpc server of another service, which knows no call."""
    with ThreadPoolExecutor(1, thread_name_prefix="test-grpc") as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield port
        server.stop(0).wait()


@contextmanager
def guarded_lighthouse() -> Iterator[int]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, token="the-right-one") as lighthouse:
        yield int(lighthouse.address.rpartition(":")[2])


@pytest.mark.parametrize(
    ("serving", "says"),
    [
        (http_server, "is not a lighthouse: an HTTP server answers there"),
        (grpc_server, "is not a lighthouse: another gRPC service answers there"),
        (guarded_lighthouse, "refuses this process's secret"),
    ],
)
def test_a_start_against_what_is_no_lighthouse_ends_at_once(
    serving: Callable[[], AbstractContextManager[int]], says: str
) -> None:
    with serving() as port:
        started = time.monotonic()
        with Manager(
            ProcessGroupGloo(),
            lambda _: None,
            dict,
            replica_id="stray",
            lighthouse_addr=f"127.0.0.1:{port}",
            hostname="localhost",
            quorum_timeout=LATE,
            token="a-wrong-one",
        ) as manager:
            manager.start_quorum()
            with pytest.raises(RefusedError, match=says) as raised:
                manager.should_commit()
        assert time.monotonic() - started < SOON_S
        address = f"127.0.0.1:{port}"
        with pytest.raises(CoordinationError) as told:  # the error that `tft doctor` shows
            LighthouseClient(address, LATE, token="a-wrong-one", waits=False).describe()
        assert str(told.value) in str(raised.value)


# --- who listens at an address -----------------------------------------------------------------------------------


@asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def test_nobody_listens_is_said_only_where_nobody_does() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with pytest.raises(UnreachableError, match="no server listens there"):
            await dial(f"127.0.0.1:{port}", Timeouts())
        with pytest.raises(UnreachableError, match=r"the name no\.such\.host\.invalid is unknown"):
            await dial("no.such.host.invalid:1", Timeouts())

        async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with listening(hangs_up) as port:
            with pytest.raises(UnreachableError, match="accepts the connection and closes it"):
                await dial(f"127.0.0.1:{port}", Timeouts())

    asyncio.run(scenario())


def test_a_server_that_wants_tls_is_said_as_such() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # suppresses the server's own messages
        async with listening(serve, context) as port:
            with pytest.raises(ProtocolError, match="uses TLS, and this process has no certificates"):
                await dial(f"127.0.0.1:{port}", Timeouts())

    asyncio.run(scenario())


def test_a_server_that_answers_late_is_reached() -> None:
    """A connection that takes longer than a second is not restarted: the lighthouse may be far, or the machine busy."""

    async def scenario() -> None:
        server = grpc.aio.server()
        real = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        waited = asyncio.Event()
        copies: list[asyncio.Task[None]] = []

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    writer.write(data)
            writer.close()

        async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(1.5)  # longer than grpc's own second, because the test is about the delay
            waited.set()
            theirs, ours = await asyncio.open_connection("127.0.0.1", real)
            copies.extend([asyncio.create_task(copy(reader, ours)), asyncio.create_task(copy(theirs, writer))])
            await asyncio.wait(copies)

        async with listening(late) as port:
            channel = await dial(f"127.0.0.1:{port}", Timeouts())
            assert waited.is_set()
            await channel.close()
            await asyncio.wait(copies)
        await server.stop(0)

    asyncio.run(scenario())


def test_a_lighthouse_that_is_away_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Manager(
        ProcessGroupGloo(),
        lambda _: None,
        dict,
        replica_id="early",
        lighthouse_addr=f"127.0.0.1:{port}",
        hostname="localhost",
        quorum_timeout=timedelta(seconds=3),
    ) as manager:
        manager.start_quorum()
        with pytest.raises(RequestTimeoutError, match="no server listens there"):
            manager.wait_quorum()


# --- a lighthouse whose connections take long to make ------------------------------------------------------------


class SlowWay:
    """A proxy to a lighthouse on which each new connection takes longer than a second. Open connections are fast."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self.listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _start(self, run: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=run, args=arguments, name="test-slow-way"))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                self._sockets.append(near)
                self._start(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        time.sleep(1.5)  # longer than grpc's own second, because the test is about the delay
        with contextlib.suppress(OSError):
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets.append(far)
            self._start(self._copy, far, near)
            self._copy(near, far)

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


def replica(lighthouse_addr: str, name: str, *, quorum_timeout_s: float) -> Manager:
    return Manager(
        ProcessGroupGloo(),
        lambda _: None,
        dict,
        replica_id=name,
        lighthouse_addr=lighthouse_addr,
        hostname="localhost",
        init_sync=False,
        quorum_timeout=timedelta(seconds=quorum_timeout_s),
    )


@pytest.mark.in_parts
def test_a_newcomer_gets_in_although_its_connections_take_long() -> None:
    """Its connection was given up after a second and restarted for ever, while the others trained on."""
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=100) as lighthouse:
        way = SlowWay(int(lighthouse.address.rpartition(":")[2]))
        address = f"127.0.0.1:{way.listener.getsockname()[1]}"
        try:
            with (
                replica(lighthouse.address, "old", quorum_timeout_s=60) as old,
                replica(address, "far", quorum_timeout_s=15) as far,
            ):
                far.start_quorum()
                while True:
                    old.start_quorum()
                    old.wait_quorum()
                    plan = old.status().plan
                    assert plan is not None
                    if plan.replica_world_size == 2:
                        break
                    assert old.should_commit()
                    assert not far.strategy.quorum_is_known(), "it has given up"
                far.wait_quorum()
                with ThreadPoolExecutor(2) as threads:  # each waits for the other's word
                    assert list(threads.map(Manager.should_commit, [old, far])) == [True, True]
        finally:
            way.close()
