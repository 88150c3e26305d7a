"""A stranger joins a job as its most advanced member, so that all others fetch their state from its address.

In a job without a secret, any process that reaches the lighthouse can become a member and a source. All that it gains
is a step that does not commit. Nothing that it serves is executed or reaches the user's state. After its end the job
continues where it was. In a job with a secret it is refused.
"""

from __future__ import annotations

import http.server
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tft_algos import Manager
from tft_ckpt import HTTPTransport
from tft_coord import ManagerClient, ManagerServer, Plan, RankRequest, Timeouts
from tft_coord.errors import CoordinationError, RefusedError
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

BOUND: Final = timedelta(seconds=20)
FAR: Final = 10**9
TIMEOUTS: Final = Timeouts(join_timeout_ms=1_000, heartbeat_timeout_ms=2_000)


class Payload:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._path),)


@contextmanager
def serving(answer: bytes) -> Iterator[tuple[str, list[str]]]:
    """Run an HTTP server with one fixed answer. Yields its URL, and the paths that were requested."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def fake_member(
    lighthouse: str, url: str, ended: threading.Event, seen: list[Plan | Exception], within: timedelta = BOUND
) -> None:
    """Join with the highest possible step, and offer the state at `url`, until told to end."""
    try:
        with (
            ManagerServer(
                "fake:1", lighthouse, "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1, timeouts=TIMEOUTS, in_process=True
            ) as server,
            ManagerClient(server.address(), BOUND, group_rank=0, timeouts=TIMEOUTS) as client,
        ):
            request = RankRequest(step=FAR, lineage=1, live=True, checkpoint_metadata=url)
            answer = client.quorum(0, request, within)
            assert isinstance(answer, Plan)
            seen.append(answer)
            ended.wait(BOUND.total_seconds())
    except CoordinationError as error:
        seen.append(error)


@pytest.mark.parametrize("kind", ["a pickle", "a torch.save", "a manifest's magic before a pickle"])
def test_the_chain_from_a_fake_member_to_execution_ends_in_an_error(kind: str, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    body = pickle.dumps(Payload(trap))
    if kind == "a torch.save":
        torch.save(Payload(trap), tmp_path / "state.pt")
        body = (tmp_path / "state.pt").read_bytes()
    elif kind.startswith("a manifest"):
        body = b"TFTSTATE" + body
    loaded: list[Any] = []
    weights = torch.ones(8)
    with (
        LighthouseServer(
            "127.0.0.1:0", min_replicas=1, join_timeout_ms=1_000, heartbeat_timeout_ms=2_000
        ) as lighthouse,
        serving(body) as (url, asked),
        Manager(
            ProcessGroupGloo(timeout=BOUND),
            load_state_dict=loaded.append,
            state_dict=lambda: {"weights": weights},
            checkpoint_transport=HTTPTransport(bind="127.0.0.1", token="x"),
            lighthouse_addr=lighthouse.address,
            replica_id="honest",
            hostname="127.0.0.1",
            rank=0,
            world_size=1,
            timeouts=TIMEOUTS,
            timeout=timedelta(seconds=2),
            heal_timeout=timedelta(seconds=3),
            init_sync=False,
        ) as manager,
    ):
        while manager.current_step() < 3:
            manager.start_quorum()
            manager.allreduce(torch.ones(4)).wait()
            manager.should_commit()
        ended = threading.Event()
        seen: list[Plan | Exception] = []
        stranger = threading.Thread(target=fake_member, args=(lighthouse.address, url, ended, seen))
        stranger.start()
        try:
            committed = True
            while not asked or committed:
                manager.start_quorum()
                manager.allreduce(torch.ones(4)).wait()
                committed = manager.should_commit()
        finally:
            ended.set()
            stranger.join()
        assert isinstance(seen[0], Plan), seen
        assert seen[0].num_participants >= 1
        step = manager.current_step()
        assert step < FAR
        while manager.current_step() < step + 3:
            manager.start_quorum()
            manager.allreduce(torch.ones(4)).wait()
            manager.should_commit()
    assert not loaded
    assert not trap.exists()
    assert weights.equal(torch.ones(8))


def test_with_a_secret_the_fake_member_is_not_let_in() -> None:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, token="secret") as lighthouse:
        seen: list[Plan | Exception] = []
        fake_member(lighthouse.address, "http://127.0.0.1:1", threading.Event(), seen, timedelta(seconds=1))
    assert isinstance(seen[0], RefusedError), seen
    assert "shared secret" in str(seen[0])
