"""torchft's servers, groups, transports and command over real ports, as code for torchft calls them."""

from __future__ import annotations

import re
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]

from integration_tests.conftest import Launch
from integration_tests.scripts import wait_for
from torchft._torchft import QuorumResult
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.http_transport_bench import main as http_bench
from torchft.checkpointing.pg_transport_bench import main as pg_bench
from torchft.coordination import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer
from torchft.parameter_server import ParameterServer
from torchft.process_group import (
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    ReconfigureOptions,
    reconfigure_with_store,
)

LONG: Final = timedelta(seconds=60)
SHORT: Final = timedelta(seconds=0.3)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer(bind="[::]:0", min_replicas=1)
    yield server
    server.shutdown()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def both(call: Callable[[int], Any]) -> list[Any]:
    """Call a function for rank 0 and rank 1 at the same time. Return what both returned."""
    with ThreadPoolExecutor(2) as executor:
        return list(executor.map(call, (0, 1)))


# --- coordination ---


def test_a_client_asks_a_lighthouse_for_a_quorum(lighthouse: LighthouseServer) -> None:
    client = LighthouseClient(addr=lighthouse.address(), connect_timeout=LONG)
    client.heartbeat("foo")
    quorum = client.quorum(replica_id="foo", timeout=LONG, step=3, data={"my_data": 1234})
    (member,) = quorum.participants
    assert (member.replica_id, member.step, member.data) == ("foo", 3, {"my_data": 1234})
    assert quorum.quorum_id > 0
    assert quorum.created.seconds > 0
    with pytest.raises(TypeError):
        client.quorum(replica_id="foo", timeout=LONG, data=[1])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="JSON"):
        client.quorum(replica_id="foo", timeout=LONG, data={"x": object()})
    with pytest.raises(TimeoutError, match="Timeout expired"):
        client.quorum(replica_id="bar", timeout=SHORT, shrink_only=True)


def test_a_lighthouse_that_is_not_there_and_a_port_that_is_taken_are_runtime_errors(
    lighthouse: LighthouseServer,
) -> None:
    port = lighthouse.address().rpartition(":")[2]
    with pytest.raises(RuntimeError, match="in use"):
        LighthouseServer(bind=f"[::]:{port}", min_replicas=1)
    with pytest.raises(RuntimeError, match="localhost:1"):
        LighthouseClient(addr="http://localhost:1", connect_timeout=SHORT)


def test_managers_get_their_parts_of_a_quorum_and_vote() -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
    servers = [
        ManagerServer(
            replica_id=f"replica_{rank}",
            lighthouse_addr=lighthouse.address(),
            hostname="localhost",
            bind="[::]:0",
            store_addr=f"localhost:{rank + 1}",
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=LONG,
            quorum_retries=0,
        )
        for rank in (0, 1)
    ]
    clients = [ManagerClient(server.address(), connect_timeout=LONG) for server in servers]

    def ask(rank: int) -> QuorumResult:
        return clients[rank]._quorum(
            group_rank=0,
            step=7 if rank else 3,
            checkpoint_metadata=f"of {rank}",
            shrink_only=False,
            init_sync=True,
            commit_failures=0,
            timeout=LONG,
            reconfigure_handle=f"handle {rank}",
        )

    results = both(ask)
    assert {result.quorum_id for result in results} == {results[0].quorum_id}
    assert [result.heal for result in results] == [True, False]
    assert [result.max_step for result in results] == [7, 7]
    assert results[0].recover_src_replica_rank == 1
    assert results[1].recover_dst_replica_ranks == [0]
    assert results[0].replica_ids == ["replica_0", "replica_1"]
    assert results[1].reconfigure_handles == ["handle 0", "handle 1"]
    source = ManagerClient(results[0].recover_src_manager_address, connect_timeout=LONG)
    assert source._checkpoint_metadata(rank=0, timeout=LONG) == "of 1"
    with pytest.raises(RuntimeError, match="rank not found"):
        source._checkpoint_metadata(rank=5, timeout=LONG)
    assert clients[0].should_commit(0, 3, True, timeout=LONG)
    assert not clients[1].should_commit(0, 7, False, timeout=LONG)
    for server in servers:
        server.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        servers[0].address()
    lighthouse.shutdown()


# --- process groups ---


def groups_of(store: TCPStore, prefix: str, *made: ProcessGroup) -> tuple[Any, ...]:
    """Configure two groups by torchft's order of arguments."""
    address = f"localhost:{store.port}/{prefix}"
    both(lambda rank: made[rank].configure(address, f"replica_{rank}", rank, 2, quorum_id=1))
    return made


def check_sum(*groups: Any) -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    both(lambda rank: groups[rank].allreduce(tensors=[tensors[rank]], opts=ReduceOp.SUM).wait())
    assert all(torch.equal(tensor, torch.full((3,), 2.0)) for tensor in tensors)


def test_gloo_is_configured_aborted_shut_down_and_configured_again(store: TCPStore) -> None:
    groups = groups_of(store, "a", ProcessGroupGloo(timeout=LONG), ProcessGroupGloo(timeout=LONG))
    check_sum(*groups)
    assert [(group.rank(), group.size()) for group in groups] == [(0, 2), (1, 2)]
    groups[0].abort()
    assert "aborted" in str(groups[0].errored())
    with pytest.raises(RuntimeError):
        groups[0].allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    check_sum(*groups_of(store, "b", *groups))
    assert groups[0].errored() is None
    for group in groups:
        group.shutdown()
    check_sum(*groups_of(store, "c", *groups))
    outputs = [torch.zeros(1), torch.zeros(1)]
    inputs = [[torch.tensor([rank + 1.0]), torch.tensor([rank + 10.0])] for rank in (0, 1)]
    both(lambda rank: groups[rank].reduce_scatter([outputs[rank]], [inputs[rank]], dist.ReduceScatterOptions()).wait())
    assert [output.item() for output in outputs] == [3.0, 21.0]
    for group in groups:
        group.shutdown()


def test_groups_are_reconfigured_by_the_handles_of_all_ranks(store: TCPStore) -> None:
    groups = ProcessGroupGloo(timeout=LONG), ProcessGroupGloo(timeout=LONG)
    for rank, group in enumerate(groups):
        group.set_rank_info(f"replica_{rank}", 0, 1, rank)
    for uuid in (1, 2):
        handles = [group.get_reconfigure_handle() for group in groups]
        both(lambda rank: groups[rank].reconfigure(ReconfigureOptions(uuid=uuid, handles=handles)).wait())  # noqa: B023
        check_sum(*groups)
    both(lambda rank: reconfigure_with_store(groups[rank], f"localhost:{store.port}/s", rank, 2, LONG))
    check_sum(*groups)
    with pytest.raises(dist.DistStoreError):
        reconfigure_with_store(groups[0], f"localhost:{store.port}/t", 0, 2, SHORT)
    for group in groups:
        group.shutdown()


def test_a_wrapper_of_a_user_makes_torchs_own_groups(store: TCPStore) -> None:
    class Mine(ProcessGroupWrapper):
        def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
            group: Any = dist.ProcessGroupGloo(store, rank, world_size, LONG)
            return group  # type: ignore[no-any-return]

    groups = groups_of(store, "d", Mine(timeout=LONG), Mine(timeout=LONG))
    check_sum(*groups)
    check_sum(*groups_of(store, "e", *groups))
    for group in groups:
        group.shutdown()


# --- live state ---


def test_http_gives_a_state_and_refuses_as_urllib_does() -> None:
    source: HTTPTransport[Any] = HTTPTransport(timeout=LONG, num_chunks=2)
    receiver: HTTPTransport[Any] = HTTPTransport(timeout=LONG, num_chunks=2)
    state = {"weights": torch.arange(1000.0), "step": 3}
    source.send_checkpoint([1], 3, state, LONG)
    state["weights"].zero_()  # type: ignore[attr-defined]  # a copy is served
    received = receiver.recv_checkpoint(0, source.metadata(), 3, timeout=None)
    assert torch.equal(received["weights"], torch.arange(1000.0))
    source.allow_checkpoint(4)
    assert receiver.recv_checkpoint(0, source.metadata(), 4, LONG)["step"] == 3
    source.disallow_checkpoint()
    with pytest.raises(urllib.error.HTTPError):
        receiver.recv_checkpoint(0, source.metadata(), 2, LONG)
    with pytest.raises(TimeoutError):
        receiver.recv_checkpoint(0, source.metadata(), 9, SHORT)
    with pytest.raises(urllib.error.URLError):
        receiver.recv_checkpoint(0, source.metadata(), 9, timedelta(0))
    for transport in (source, receiver):
        transport.shutdown()


def test_the_benches_print_times(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--chunk-size", "1000", "--total-size", "10500"]
    http_bench(["--num-chunks", "2", *sizes])
    pg_bench(["--inplace", *sizes])
    assert re.fullmatch(r"(send \d+\.\d{3} s, receive \d+\.\d{3} s\n){2}", capsys.readouterr().out)


# --- the parameter server and the command ---


class Doubling(ParameterServer):
    """A server that doubles one tensor of each client."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(timeout=LONG)

    def forward(self, session_id: str, pg: Any) -> None:
        tensor = torch.zeros(2)
        pg.recv([tensor], src_rank=1, tag=0).wait()
        pg.send([tensor * 2], dst_rank=1, tag=0).wait()
        self.done.set()

    def __init__(self) -> None:
        self.done = threading.Event()
        super().__init__(port=0)


def test_a_client_of_a_parameter_server_has_a_group_of_two() -> None:
    server = Doubling()
    assert server.address().endswith("/new_session")
    group: Any = Doubling.new_session(server.address())
    assert (group.rank(), group.size()) == (1, 2)
    tensor = torch.ones(2)
    group.send([tensor], dst_rank=0, tag=0).wait()
    group.recv([tensor], src_rank=0, tag=0).wait()
    assert torch.equal(tensor, torch.full((2,), 2.0))
    assert server.done.wait(30)
    group.shutdown()
    server.shutdown()


class Endless(ParameterServer):
    """A server that receives tensors of two numbers until its client leaves."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(timeout=LONG)

    def forward(self, session_id: str, pg: Any) -> None:
        while True:
            pg.recv([torch.zeros(2)], src_rank=1, tag=0).wait()


def test_a_client_with_wrong_sizes_ends_its_own_session_only() -> None:
    server = Endless(port=0)
    wrong, right = (Endless.new_session(server.address()) for _ in range(2))
    with suppress(RuntimeError):  # Gloo would end the process of the server, which is this one
        wrong.send([torch.ones(100_000)], dst_rank=0, tag=0).wait()
    with pytest.raises(RuntimeError):
        wrong.recv([torch.zeros(2)], src_rank=0, tag=0).wait()
    right.send([torch.ones(2)], dst_rank=0, tag=0).wait()
    for each in (wrong, right):
        each.shutdown()
    server.shutdown()


def test_the_command_serves_and_logs_torchfts_lines(launch: Launch) -> None:
    command = [sys.executable, "-m", "torchft.lighthouse", "--bind", "127.0.0.1:0", "--min_replicas", "1"]
    process = launch([*command, "--join_timeout_ms", "100"], env={"RUST_LOG": "info"})
    address = wait_for(r"listening at (\S+)", process)[1]
    client = LighthouseClient(address, connect_timeout=LONG)
    client.quorum(replica_id="foo", timeout=LONG)
    assert "foo" in wait_for(r"Quorum! Quorum \d+.*", process)[0]
    wait_for(r"Detected quorum change, bumping quorum_id to \d+", process)
    process.terminate()
    assert process.wait(30) == 0
