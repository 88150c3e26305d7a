"""The cost of strangers without the secret for servers that have one: no memory, no wait of members, few log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from socket import create_connection
from typing import Any, Final, TypeAlias

import grpc
import pytest
import torch

from integration_tests.hostile import (
    Watched,
    crowd,
    lighthouse_program,
    manager_server_program,
    serving,
    state_server_program,
)
from tft_ckpt import HTTPTransport, StateKey
from tft_ckpt.transfer.routes import manifest_path
from tft_coord import LighthouseClient, ManagerClient
from tft_coord.wire import services

SECRET: Final = "of-this-job"
LATE: Final = timedelta(seconds=30)
LARGE: Final = bytes(8 << 20)
CALLS: Final = 150
WAIT_S: Final = 20.0
IDLE: Final = 700
Port: TypeAlias = Callable[[Path], AbstractContextManager[tuple[Watched, Callable[[], object]]]]


@contextmanager
def a_lighthouse(folder: Path) -> Iterator[tuple[Watched, Callable[[], object]]]:
    with (
        serving(lighthouse_program(SECRET), folder / "log") as server,
        LighthouseClient(f"127.0.0.1:{server.port}", LATE, token=SECRET) as client,
    ):
        yield server, client.describe


@contextmanager
def a_manager_server(folder: Path) -> Iterator[tuple[Watched, Callable[[], object]]]:
    with serving(manager_server_program(SECRET), folder / "log", in_child=True) as server:

        def honest() -> None:
            ManagerClient(f"127.0.0.1:{server.port}", LATE, token=SECRET).close()

        yield server, honest


@pytest.mark.in_parts
@pytest.mark.parametrize("port", [a_lighthouse, a_manager_server])
def test_calls_of_eight_megabytes_cost_no_memory(port: Port, tmp_path: Path) -> None:
    """They once cost as much memory as they announced, for good."""
    with (
        port(tmp_path) as (server, honest),
        grpc.insecure_channel(f"127.0.0.1:{server.port}", options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        server.check(honest, "nothing")
        for method in (services.LIGHTHOUSE_QUORUM, services.MANAGER_QUORUM):
            stub = services.unary_stub(channel, method)
            calls = [stub.future(LARGE[:-16], timeout=WAIT_S) for _ in range(CALLS)]
            for call in calls:
                assert call.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
        server.check(honest, f"{CALLS} calls of 8 MiB")


@pytest.mark.in_parts
@pytest.mark.parametrize("port", [a_lighthouse, a_manager_server])
def test_a_flood_of_refused_calls_takes_little_of_a_core(port: Port, tmp_path: Path) -> None:
    with port(tmp_path) as (server, honest), grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = services.unary_stub(channel, services.LIGHTHOUSE_DESCRIBE)
        stub = services.unary_stub(channel, services.MANAGER_QUORUM) if port is a_manager_server else stub
        end, refused = time.monotonic() + 3, 0
        while time.monotonic() < end:
            calls = [stub.future(b"", timeout=WAIT_S) for _ in range(100)]
            refused += sum(call.code() is grpc.StatusCode.UNAUTHENTICATED for call in calls)
        server.check(honest, f"{refused} refused calls")
        assert refused < 1_000  # it would be thousands a second if each were answered at once


@pytest.mark.in_parts
def test_crowds_at_a_state_port_keep_nobody_out(tmp_path: Path) -> None:
    """The limit is 512 open files, at which the server once stood still."""
    command = state_server_program(SECRET, "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))")
    key = StateKey(quorum_id=0, nonce=0, step=1, lineage=0)
    wrong = f"GET {manifest_path(key)} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n".encode()
    with serving(command, tmp_path / "log") as server, HTTPTransport[Any](bind="127.0.0.1", token=SECRET) as member:

        def honest() -> None:
            got = member.recv_checkpoint(0, f"http://127.0.0.1:{server.port}", 1, LATE)
            assert got["a"].equal(torch.ones(9))

        server.check(honest, "nothing")
        for words in (b"", b"GET /state", wrong):
            with ExitStack() as ends, suppress(ConnectionError):
                ends.enter_context(crowd(server.port, IDLE, words))
                assert len(server.check(honest, f"{IDLE} connections that say {words!r}")) < 5
        create_connection(("127.0.0.1", server.port), 5).close()
