"""A parameter server and clients as processes: several at once, one killed, a wrong secret, a server that ends."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Final, final

import pytest
import torch

from integration_tests.conftest import ROOT, Kill, Spawn
from integration_tests.scripts import SECRET, Script
from tft_algos import ParameterServer
from tft_pg import ProcessGroup, ProcessGroupGloo

EXAMPLE: Final = ROOT / "examples" / "parameter_server.py"
WAIT_S: Final = 30.0
CLIENTS: Final = 4
ROUNDS: Final = 20


class Sums(ParameterServer):
    """A server that answers each vector with the sum of all vectors of its session."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(timeout=timedelta(seconds=WAIT_S))

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        total, vector = torch.zeros(1000), torch.empty(1000)
        while True:
            pg.recv([vector], 1, 0).wait()
            total += vector
            pg.send([total], 1, 0).wait()


def set_secret(secret: str | None) -> None:
    """Set the secret of this process, whose environment is that of the test which started the forkserver."""
    os.environ.pop("TFT_TOKEN", None)
    if secret is not None:
        os.environ["TFT_TOKEN"] = secret


def rounds(pg: ProcessGroup, value: float, total: float, count: int) -> float:
    """Send a value that many times, and check each sum. Returns: the last sum."""
    answer = torch.empty(1000)
    for _ in range(count):
        pg.send([torch.full((1000,), value)], 0, 0).wait()
        pg.recv([answer], 0, 0).wait()
        total += value
        assert torch.equal(answer, torch.full((1000,), total))
    return total


def be_client(address: str, value: float, pipe: Connection) -> None:
    """Open a session. Then do rounds for each number that comes on the pipe, and answer with the sum; 0 ends it.

    An error is answered with its type and text.
    """
    try:
        pg = Sums.new_session(address)
        pipe.send("joined")
        total = 0.0
        while count := pipe.recv():
            total = rounds(pg, value, total, count)
            pipe.send(total)
        pg.shutdown()
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def be_server(pipe: Connection) -> None:
    """Serve without a secret until the process is killed, or a message comes on the pipe."""
    set_secret(None)
    with Sums() as server:
        pipe.send(server.address())
        pipe.recv()
    pipe.send("stopped")


@final
class Peer:
    """A spawned process with a pipe."""

    def __init__(self, spawn: Spawn, target: Callable[..., None], *args: object) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self.process: ForkServerProcess = spawn(target, *args, theirs)
        theirs.close()

    def say(self, what: object) -> None:
        self._pipe.send(what)

    def heard(self) -> object:
        assert self._pipe.poll(WAIT_S), "the process says nothing"
        return self._pipe.recv()

    def ask(self, what: object) -> object:
        self.say(what)
        return self.heard()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sums]:
    monkeypatch.setenv("TFT_TOKEN", SECRET)
    with Sums(bind="127.0.0.1") as found:
        yield found


def wait_until(is_so: Callable[[], object], what: str) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up_s, f"timed out waiting until {what}"
        time.sleep(0.005)


def keys(server: Sums) -> list[str]:
    store = server._session_server._store._store
    assert store is not None
    return list(store.list_keys())


def with_secret(secret: str | None, address: str, value: float, pipe: Connection) -> None:
    set_secret(secret)
    be_client(address, value, pipe)


def test_a_client_that_is_killed_ends_its_session_alone(spawn: Spawn, kill: Kill, server: Sums) -> None:
    clients = [Peer(spawn, with_secret, SECRET, server.address(), float(number)) for number in range(1, CLIENTS + 1)]
    assert [each.heard() for each in clients] == ["joined"] * CLIENTS
    assert server.num_sessions() == CLIENTS
    for each in clients:
        each.say(ROUNDS)
    assert [each.heard() for each in clients] == [ROUNDS * float(number) for number in range(1, CLIENTS + 1)]
    used = len(keys(server))
    victim, *others = clients
    victim.say(1_000_000)  # it dies in the middle of a round
    for each in others:
        each.say(10 * ROUNDS)
    assert victim.process.pid is not None
    kill(victim.process.pid)
    wait_until(lambda: server.num_sessions() == CLIENTS - 1, "the session ended")
    assert [each.heard() for each in others] == [11 * ROUNDS * float(number) for number in range(2, CLIENTS + 1)]
    assert len(keys(server)) == used * (CLIENTS - 1) // CLIENTS
    late = Peer(spawn, with_secret, SECRET, server.address(), 1.0)
    assert late.heard() == "joined"
    assert late.ask(ROUNDS) == ROUNDS
    for each in [*others, late]:
        each.say(0)
    wait_until(lambda: server.num_sessions() == 0, "all sessions ended")
    assert keys(server) == []


def test_a_client_with_another_secret_gets_no_session(spawn: Spawn, server: Sums) -> None:
    for secret in ("another-secret", None):
        stranger = Peer(spawn, with_secret, secret, server.address(), 1.0)
        said = str(stranger.heard())
        assert said.startswith("SessionRefusedError: the parameter server at http://127.0.0.1:")
        assert said.endswith(
            "opened no session (401): this job's secret is missing or wrong; give every process of the job the same "
            "one (TFT_TOKEN or TFT_TOKEN_FILE)"
        )
        stranger.process.join(WAIT_S)
    assert server.num_sessions() == 0


@pytest.mark.parametrize("way", ["stops", "is killed"])
def test_clients_notice_at_once_that_the_server_ends(spawn: Spawn, kill: Kill, way: str) -> None:
    server = Peer(spawn, be_server)
    address = server.heard()
    clients = [Peer(spawn, with_secret, None, address, 1.0) for _ in range(3)]
    assert [each.heard() for each in clients] == ["joined"] * 3
    assert [each.ask(ROUNDS) for each in clients] == [ROUNDS] * 3
    for each in clients[1:]:
        each.say(1_000_000)  # in the middle of rounds; the first one is idle
    began_s = time.monotonic()
    if way == "stops":
        assert server.ask("stop") == "stopped"
    else:
        assert server.process.pid is not None
        kill(server.process.pid)
    said = [str(each.heard()) for each in clients[1:]] + [str(clients[0].ask(1))]
    assert [each.split(":")[0] for each in said] == ["PeerDisconnectedError"] * 3, said
    assert time.monotonic() - began_s < WAIT_S / 2  # not by the groups' timeout
    late = Peer(spawn, with_secret, None, address, 1.0)
    assert str(late.heard()).startswith("UnreachableError: ")


def test_a_stopped_server_costs_a_client_its_timeout_and_no_more(spawn: Spawn) -> None:
    server = Peer(spawn, be_server)
    address = server.heard()
    assert server.process.pid is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    client = Peer(spawn, impatient, address)
    assert str(client.heard()).startswith("RequestTimeoutError: the parameter server at ")


def impatient(address: str, pipe: Connection) -> None:
    set_secret(None)
    try:
        Sums.new_session(address, timeout=timedelta(seconds=0.5))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def test_the_example_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 95


@pytest.mark.in_parts
@pytest.mark.timeout(120)
def test_workers_of_the_example_learn_together_and_one_may_die(spawn: Spawn) -> None:
    job = {"TFT_TOKEN": SECRET}
    server = Script(spawn, EXAMPLE, ["serve", "--port", "0"], job)
    address = server.wait_for(r"serving at (http://\S+/new_session)")[1]
    victim = Script(spawn, EXAMPLE, ["work", address, "--steps", "1000000"], job)
    worker = Script(spawn, EXAMPLE, ["work", address], job)
    victim.wait_for(r"step 100, loss")
    victim.kill()
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", worker.ended())]
    assert losses[-1] < losses[0] / 4
    again = Script(spawn, EXAMPLE, ["work", address, "--steps", "1"], job)
    assert float(again.wait_for(r"step 1, loss (\S+)")[1]) < losses[0] / 4  # the weights are the server's
    again.ended()
    assert server.process.pid is not None
    os.kill(server.process.pid, signal.SIGINT)
    assert "Traceback" not in server.ended()
