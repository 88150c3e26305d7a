"""Bad input gives one clear sentence, exit code 2 for commands, no traceback and no hang, and honest peers are served.

There are three tables: the arguments of a command, the settings of a group's ranks, and the input at each port.
"""

from __future__ import annotations

import itertools
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from integration_tests.conftest import ROOT, Spawn
from integration_tests.hostile import (
    Fuzzer,
    Watched,
    crowd,
    damaged,
    fuzz_for,
    openings,
    program,
    say,
    serving,
)
from integration_tests.strangers import HELD, RANK, SCRIPTS, a_round
from tft_algos import Manager
from tft_ckpt import HTTPTransport, StateKey
from tft_ckpt.transfer.routes import data_path, manifest_path
from tft_coord import ManagerClient, ManagerServer
from tft_coord.core.types import Plan, Purpose, RankRequest
from tft_coord.errors import CoordinationError
from tft_coord.wire import codec, rank_codec, services
from tft_coord.wire import coordination_pb2 as pb
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

LATE: Final = timedelta(seconds=10)
NOBODY: Final = "http://127.0.0.1:9"  # a port without a listener
LONG_S: Final = 50.0  # for a process of a test, where the first one waits until torch is imported
FUZZ_S: Final = 1.5
A_VOTE: Final = rank_codec.Vote(RANK, 2**63 - 1, True, HELD, Purpose.COMMIT)
SOAK_S: Final = 120.0


def sentence_of(stderr: str) -> str:
    """Return the only line of the output."""
    (line,) = stderr.splitlines()
    assert line.isprintable()
    return line


# --- commands ----------------------------------------------------------------------------------------------------

MODULES: Final = {
    "tft": ["-m", "tft_suite.cli.main"],
    "tft-lighthouse": ["-m", "tft_lighthouse"],
    "python -m tft_sim": ["-m", "tft_sim"],
    "python -m benchmarks.run": ["-m", "benchmarks.run"],
}


@pytest.mark.in_parts
@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("tft-lighthouse", ["--min_replicas", "9999999999"], "min_replicas is 9999999999; give 1 to 100000"),
        ("tft-lighthouse", ["--bind", "::1:500"], "bind is '::1:500'; give host:port, an IPv6 address in brackets"),
        ("tft-lighthouse", ["--bind", "{taken}"], "can't listen at {taken}: the port is in use"),
        ("tft-lighthouse", ["--heartbeat_timeout_ms", "1"], "heartbeat_timeout_ms is 1; give 2 to"),
        ("python -m tft_sim", ["--seeds", "0"], "--seeds is 0; give at least 1"),
        ("python -m tft_sim", ["--seeds", "2", "--trace"], "--trace prints one seed, and --seeds is 2"),
        ("python -m tft_sim", ["--sed", "2"], "unrecognized arguments: --sed 2"),
        ("python -m benchmarks.run", ["p99"], "there is no row p99; choose of p1"),
        ("python -m benchmarks.run", ["--long"], "unrecognized arguments: --long"),
    ],
)
def test_a_command_that_is_told_nonsense_says_one_sentence_and_exits_with_2(
    command: str, words: list[str], says: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, *MODULES[command], *(word.format(taken=address) for word in words)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
    assert done.returncode == 2
    assert done.stdout == ""
    said = sentence_of(done.stderr)
    assert said.startswith(f"{command}: ")
    assert says.format(taken=address) in said


# --- training scripts and the ranks of a group --------------------------------------------------------------------

LAUNCHED: Final = {"REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2", "TFT_LIGHTHOUSE": NOBODY}


def run_example(environment: dict[str, str], words: list[str], stderr: Path) -> None:
    """Run `python examples/train_ddp.py` in a process that has imported torch already."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(environment)
    sys.argv = ["train_ddp.py", *words]
    runpy.run_path(str(ROOT / "examples" / "train_ddp.py"), run_name="__main__")


def ended(process: ForkServerProcess, within_s: float) -> int | None:
    process.join(within_s)
    return process.exitcode


@pytest.mark.in_parts
@pytest.mark.parametrize(
    ("environment", "words", "says"),
    [
        ({"TFT_LIGHTHOUSE": ""}, [], "the lighthouse address is not set; set TFT_LIGHTHOUSE"),
        (
            {"TFT_LIGHTHOUSE": "garbage"},
            [],
            "lighthouse_addr, TFT_LIGHTHOUSE or TORCHFT_LIGHTHOUSE) can't be used: 'garbage' is not an address",
        ),
        ({"RANK": "3"}, [], "RANK is 3 and WORLD_SIZE 1; a rank is below the world size"),
        ({"RANK": "x"}, [], "RANK is 'x'; give a whole number, 0 to"),
        ({"WORLD_SIZE": "0"}, [], "WORLD_SIZE is '0'; give a whole number, 1 to"),
        ({"WORLD_SIZE": "9" * 5000}, [], "WORLD_SIZE is '999"),
        ({"WORLD_SIZE": "2"}, [], "has 2 processes and RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, [], "has 2 processes and MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "localhost"}, [], "MASTER_ADDR is localhost and MASTER_PORT is not set"),
        (
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "70000"},
            [],
            "MASTER_PORT is '70000'; give a whole number, 0 to 65535",
        ),
        ({"TORCHFT_MANAGER_PORT": "99999"}, [], "TORCHFT_MANAGER_PORT is '99999'; give a whole number, 0 to 65535"),
        ({"TORCHFT_TIMEOUT_SEC": "nan"}, [], "TORCHFT_TIMEOUT_SEC is 'nan'; give seconds"),
        ({"TFT_JOB_ID": "a\nb"}, [], "TFT_JOB_ID is 'a\\nb'; give a printable name"),
        ({"TFT_TOKEN": "a b"}, [], "the shared secret must be"),
        ({"REPLICA_GROUP_ID": "2"}, [], "REPLICA_GROUP_ID is 2 of NUM_REPLICA_GROUPS 2"),
        ({"NUM_REPLICA_GROUPS": "many"}, [], "--num_replica_groups: invalid int value: 'many'"),
        ({}, ["many"], "argument steps: invalid int value: 'many'"),
        ({}, ["--stepz", "3"], "unrecognized arguments: --stepz"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_training_script_that_is_told_nonsense_says_one_sentence_and_exits_with_2(
    spawn: Spawn, tmp_path: Path, environment: dict[str, str], words: list[str], says: str
) -> None:
    assert ended(spawn(run_example, {**LAUNCHED, **environment}, words, tmp_path / "stderr"), LONG_S) == 2
    said = sentence_of((tmp_path / "stderr").read_text())
    assert said.startswith("train_ddp.py: ")
    assert says in said


def test_a_training_script_without_its_store_or_its_port_says_so_and_exits_with_2(spawn: Spawn, tmp_path: Path) -> None:
    no_store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "TORCHFT_CONNECT_TIMEOUT_SEC": "0.5"}
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        rows = {
            "can't reach its replica group's store at 127.0.0.1:9 within 0.5 s": no_store,
            f"can't listen at [::]:{port}: the address is in use": {"TORCHFT_MANAGER_PORT": str(port)},
        }
        for number, (says, environment) in enumerate(rows.items()):
            stderr = tmp_path / str(number)
            secret = {"TFT_TOKEN": "s3cret"}  # without a token there would be a warning too
            assert ended(spawn(run_example, {**LAUNCHED, **secret, **environment}, [], stderr), LONG_S) == 2
            assert says in sentence_of(stderr.read_text())


@pytest.mark.in_parts
@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silence", "another protocol"])
def test_a_stranger_at_the_port_of_the_store_is_no_reason_to_hang(spawn: Spawn, tmp_path: Path, words: bytes) -> None:
    stderr = tmp_path / "stderr"
    with socket.create_server(("127.0.0.1", 0)) as stranger, ExitStack() as callers:
        port = stranger.getsockname()[1]
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHFT_CONNECT_TIMEOUT_SEC": "1"}
        process = spawn(run_example, {**LAUNCHED, "TFT_TOKEN": "s3cret", **store}, [], stderr)
        stranger.settimeout(0.2)
        began = time.monotonic()
        while process.is_alive():
            assert time.monotonic() - began < LONG_S
            with suppress(TimeoutError, OSError):
                callers.enter_context(stranger.accept()[0]).sendall(words)
        assert process.exitcode == 2
    # Torch writes its own message first.
    assert (
        f"the server at 127.0.0.1:{port} does not answer rank 0 like its replica group's store"
        in stderr.read_text().splitlines()[-1]
    )


def run_rank(environment: dict[str, str], stderr: Path) -> None:
    """Run a rank that asks for one quorum, and print the error that it gets instead."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update({**LAUNCHED, "TFT_TOKEN": "s3cret", **environment})
    timeout = timedelta(seconds=10)  # a manager server starts within it on a busy machine, too
    settings: dict[str, Any] = {"quorum_timeout": timeout, "connect_timeout": timeout, "use_async_quorum": False}
    try:
        with Manager(ProcessGroupGloo(), replica_id="a", hostname="localhost", **settings) as manager:
            manager.start_quorum()
    except (CoordinationError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


@dataclass(frozen=True)
class Rank:
    """One rank of a group: its settings, and its final message."""

    rank: int
    world_size: int
    says: str


@pytest.mark.in_parts
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(
            [
                Rank(0, 2, "rank 1 of the group has not asked"),
                Rank(
                    1,
                    3,
                    "ConfigError: rank 1 has WORLD_SIZE 3, and another process of its replica group has",
                ),
            ],
            id="different world sizes",
        ),
        pytest.param(
            [
                Rank(0, 2, "rank 1 of the group has not asked"),
                Rank(
                    0, 2, "is rank 0 of this replica group already; give every process of the group a RANK of its own"
                ),
            ],
            id="rank 0 twice",
        ),
        pytest.param(
            [
                Rank(1, 2, "check whether group rank 0 has started"),
                Rank(
                    1, 2, "is rank 1 of this replica group already; give every process of the group a RANK of its own"
                ),
            ],
            id="rank 1 twice",
        ),
    ],
)
def test_ranks_that_were_told_different_things_say_so(spawn: Spawn, tmp_path: Path, ranks: list[Rank]) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    first, second = (
        spawn(
            run_rank,
            {
                "RANK": str(rank.rank),
                "WORLD_SIZE": str(rank.world_size),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(store.port),
            },
            tmp_path / str(number),
        )
        for number, rank in in_order(store, ranks)
    )
    assert [ended(second, LONG_S), ended(first, LONG_S)] == [0, 0]
    for number, rank in enumerate(ranks):
        text = (tmp_path / str(number)).read_text()
        assert rank.says in text
        assert "Traceback" not in text


def in_order(store: TCPStore, ranks: list[Rank]) -> Iterator[tuple[int, Rank]]:
    """Yield each rank after those before it have their place in the store."""
    for number, rank in enumerate(ranks):
        yield number, rank
        if number == 0:
            store.wait([f"tft/default//0/holder_of_rank/{rank.rank}"], LATE)


@pytest.mark.in_parts
def test_an_unreachable_lighthouse_is_said_soon_and_again_at_the_deadline(spawn: Spawn, tmp_path: Path) -> None:
    assert ended(spawn(run_rank, {"RANK": "0", "WORLD_SIZE": "1"}, tmp_path / "stderr"), LONG_S) == 0
    text = (tmp_path / "stderr").read_text()
    away = "the lighthouse at 127.0.0.1:9 can't be reached: no server listens there (connection refused)"
    assert f"{away}; retrying" in text
    assert text.splitlines()[-1].startswith("RequestTimeoutError: rank 0's quorum for step 0")
    assert away in text.splitlines()[-1]
    assert "Traceback" not in text


# --- the lighthouse's port ----------------------------------------------------------------------------------------


@contextmanager
def lighthouse_under_attack(folder: Path) -> Iterator[tuple[Watched, Callable[[], object]]]:
    """Yield a lighthouse, and an honest replica that asks it for a quorum."""
    command = [sys.executable, "-m", "tft_lighthouse", "--bind", "127.0.0.1:0", "--quorum-tick-ms", "20"]
    with serving(command, folder / "lighthouse.log") as server:
        address = f"127.0.0.1:{server.port}"
        with (
            ManagerServer(
                "honest:1", address, "127.0.0.1", "127.0.0.1:0", "s:1", 1, job="honest", in_process=True
            ) as ours,
            ManagerClient(ours.address(), LATE, group_rank=0) as rank,
        ):
            steps = itertools.count()

            def honest() -> None:
                plan = rank.quorum(0, RankRequest(step=next(steps), lineage=1, live=True), LATE)
                assert isinstance(plan, Plan)
                assert plan.replica_ids == ("honest:1",)

            honest()
            server.check(honest, "nothing")
            yield server, honest


# --- the manager server's port --------------------------------------------------------------------------------------


@contextmanager
def training(rank: ManagerClient, request: RankRequest) -> Iterator[None]:
    """Run a rank that continues with any process as the other rank: it asks, votes, and accepts the answers."""
    rng, end = random.Random(1), threading.Event()

    def train() -> None:
        while not end.wait(0.01):
            with suppress(CoordinationError):
                rank.quorum(0, request, timedelta(milliseconds=200))
            step, key, purpose = a_round(rng)
            with suppress(CoordinationError):
                rank.should_commit(0, step, True, timedelta(milliseconds=30), key=key, purpose=purpose)

    thread = threading.Thread(target=train, name="rank 0")
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextmanager
def manager_server_under_attack(folder: Path) -> Iterator[tuple[Watched, Callable[[], object]]]:
    """Yield the manager server of a group of two, and an honest peer that asks for the address of rank 0's state.

    Rank 0 is honest and trains on. Rank 1 has no session, so any process may act as rank 1.
    """
    with LighthouseServer("127.0.0.1:0") as lighthouse:
        command = program(
            "from tft_coord import ManagerServer, Timeouts\n"
            # A rank without a process ends the group, so the grace is long enough for an attacker to take its place.
            "timeouts = Timeouts(reconnect_grace_ms=5_000)\n"
            f"at = 'a:1', '{lighthouse.address}', '127.0.0.1', '127.0.0.1:0', 's:1', 2\n"
            "server = ManagerServer(*at, timeouts=timeouts)\n"
            "print('listening at', server.address(), file=sys.stderr, flush=True)\n"
        )
        with serving(command, folder / "manager_server.log", in_child=True) as server:
            address = f"127.0.0.1:{server.port}"
            request = RankRequest(step=0, lineage=1, live=True, checkpoint_metadata="http://here:1")
            with ManagerClient(address, LATE, group_rank=0) as rank, ManagerClient(address, LATE) as other:
                asked = threading.Thread(target=other.quorum, args=(RANK, request, LATE))
                asked.start()
                rank.quorum(0, request, LATE)
                asked.join()

                def honest() -> None:
                    with ManagerClient(address, LATE) as peer:
                        assert peer.checkpoint_metadata(0, LATE) == "http://here:1"

                honest()
                server.check(honest, "nothing")
                with training(rank, request):
                    yield server, honest


# --- the checkpoint server's port ----------------------------------------------------------------------------------

KEY: Final = StateKey(quorum_id=0, nonce=0, step=1, lineage=0)
REQUESTS: Final = [
    f"GET {path} HTTP/1.1\r\nhost: x\r\n{header}\r\n\r\n".encode()
    for path in (manifest_path(KEY), data_path(KEY), "/state/%00%0a%ff/data", "/../../etc/passwd")
    for header in (
        "range: bytes=0-99",
        "range: bytes=99999999999999999999-5,7-8",
        "x-tft-wait-ms: 10",
        "expect: 100-continue",
    )
]


@contextmanager
def state_server_under_attack(folder: Path) -> Iterator[tuple[Watched, Callable[[], object]]]:
    """Yield a transport with a state, and an honest receiver."""
    command = program(
        "import logging, torch\n"
        "from datetime import timedelta\n"
        "from tft_ckpt import HTTPTransport\n"
        "logging.basicConfig(stream=sys.stderr)\n"
        "transport = HTTPTransport(timedelta(seconds=3), bind='127.0.0.1')\n"
        "transport.send_checkpoint([1], 1, {'a': torch.ones(100_000)}, timedelta(seconds=10))\n"
        "print('listening at', transport.address(), file=sys.stderr, flush=True)\n"
    )
    with serving(command, folder / "state.log") as server, HTTPTransport[Any](bind="127.0.0.1", token="x") as ours:

        def honest() -> None:
            assert ours.recv_checkpoint(0, f"http://127.0.0.1:{server.port}", 1, LATE)["a"].equal(torch.ones(100_000))

        honest()
        server.check(honest, "nothing")
        yield server, honest


# --- what must hold at each port -----------------------------------------------------------------------------------

UnderAttack: TypeAlias = Callable[[Path], "AbstractContextManager[tuple[Watched, Callable[[], object]]]"]
PORTS: Final[dict[str, UnderAttack]] = {
    "lighthouse": lighthouse_under_attack,
    "manager server": manager_server_under_attack,
    "state server": state_server_under_attack,
}
# For each answer, the maximum number of attacks after which the server must have given it. It shows the fuzz's reach.
REACHES: Final = {
    "lighthouse": {
        "Welcome": 6,
        "AskForQuorum": 50,
        "AnswerQuorum": 12,
        "Quorum": 80,
        "Heartbeat": 60,
        "Describe": 60,
        "Drain": 80,
    },
    "manager server": {
        "RankWelcome": 6,
        "a no": 8,
        "a yes": 250,
        "Plan": 150,
        "ShouldCommit": 20,
        "Quorum": 200,
        "CheckpointMetadata": 60,
    },
}


def fuzz(port: str, server: Watched, honest: Callable[[], object], *, seed: int, seconds: float) -> int:
    """Send damaged messages for that time, and good ones between them. Returns: number of attacks."""
    rng, number = random.Random(seed), 0
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        fuzzer = Fuzzer(channel, rng, SCRIPTS[port]) if port in SCRIPTS else None
        if fuzzer is not None:
            fuzzer.begin()

        def attack(spares: bool) -> int:
            nonlocal number
            number += 1
            if fuzzer is not None:
                fuzzer.attack(spares=spares)
            else:
                say(server.port, damaged(rng, rng.choice(REQUESTS)))
            if number % 50 == 0:
                server.check(honest, f"{number} damaged messages of seed {seed}")
            return number

        least, told = (REACHES[port], fuzzer.answers) if fuzzer is not None else ({}, {})
        fuzz_for(seconds, attack, least, told)
        server.check(honest, f"all {number} damaged messages of seed {seed}")
    if fuzzer is not None:
        print(f"{number} attacks on the {port}: {dict(fuzzer.answers)}")
    return number


@pytest.mark.parametrize("port", PORTS)
def test_nothing_that_arrives_at_a_port_hurts_those_that_it_serves(port: str, tmp_path: Path) -> None:
    with PORTS[port](tmp_path) as (server, honest):
        for name, words in openings(seed=1).items():
            say(server.port, words)
            server.check(honest, name)
        for words in (b"", b"PRI", b"GET "):
            with crowd(server.port, 500, words):
                server.check(honest, f"500 connections that say {words!r}")
            server.check(honest, "their end")
        assert fuzz(port, server, honest, seed=1, seconds=FUZZ_S) > 20


@pytest.mark.soak
@pytest.mark.parametrize("port", PORTS)
def test_nothing_does_for_minutes(port: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    with PORTS[port](tmp_path) as (server, honest):
        assert fuzz(port, server, honest, seed=seed, seconds=SOAK_S) > 1_000


@pytest.mark.in_parts
@pytest.mark.parametrize("port", SCRIPTS)
def test_the_offender_is_told_why(port: str, tmp_path: Path) -> None:
    member = pb.QuorumMember(replica_id="a", step=-1, world_size=2**63 - 1)
    refused = {
        "lighthouse": [
            (
                services.LIGHTHOUSE_HEARTBEAT,
                b"\xff\xff",
                "INVALID_ARGUMENT: 2 bytes are not a LighthouseHeartbeatRequest",
            ),
            (services.LIGHTHOUSE_HEARTBEAT, b"", "INVALID_ARGUMENT: replica_id is empty; give it a name"),
            (
                services.LIGHTHOUSE_HEARTBEAT,
                codec.encode_heartbeat("a\nb"),
                r"INVALID_ARGUMENT: replica_id is 'a\nb'; give",
            ),
            (services.LIGHTHOUSE_HEARTBEAT, codec.encode_heartbeat("x" * (9 << 20)), "RESOURCE_EXHAUSTED"),
            (
                services.LIGHTHOUSE_QUORUM,
                pb.LighthouseQuorumRequest(requester=member).SerializeToString(),
                "INVALID_ARGUMENT: step is -1; it must be 0..9223372036854775807",
            ),
            ("/torchft.LighthouseService/Nonsense", b"", "UNIMPLEMENTED"),
        ],
        "manager server": [
            (services.MANAGER_QUORUM, b"\xff\xff", "INVALID_ARGUMENT: 2 bytes are not a ManagerQuorumRequest"),
            (services.MANAGER_SHOULD_COMMIT, rank_codec.encode_vote(A_VOTE) + b"\x18\xff", "INVALID_ARGUMENT"),
            (
                services.MANAGER_CHECKPOINT_METADATA,
                rank_codec.encode_metadata_request(9),
                "INVALID_ARGUMENT: rank not found: rank 9",
            ),
            (services.MANAGER_KILL, b"\xff", "INVALID_ARGUMENT: 1 bytes are not a KillRequest message"),
        ],
    }
    sessions = {
        "lighthouse": [
            (b"\xff", "1 bytes are not a ToLighthouse message"),
            (b"", "has no content that this version knows"),
        ],
        "manager server": [
            (b"\xff", "1 bytes are not a ToManagerServer message"),
            (
                rank_codec.encode_from_rank(rank_codec.RankHello(9, 1)),
                "has world size 2 and no rank 9; give every process",
            ),
            (rank_codec.encode_from_rank(rank_codec.RankBeat(1)), "a rank's stream must begin with a hello"),
        ],
    }
    with PORTS[port](tmp_path) as (server, honest), grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        fuzzer = Fuzzer(channel, random.Random(0), SCRIPTS[port])
        for method, request, says in refused[port]:
            assert says in fuzzer.call(method, request, within_s=2)
        for words, says in sessions[port]:
            assert says in fuzzer.converse([words], within_s=2)
        server.check(honest, "all of them")
