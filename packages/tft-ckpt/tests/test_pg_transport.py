"""Live state over a process group: what the published checks do not ask of every transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_ckpt import (
    CheckpointError,
    ConfigError,
    Limits,
    PGTransport,
    StateCorruptError,
    StateKey,
    StateMismatchError,
    StateUnavailableError,
    TransferTimeoutError,
    TransportClosedError,
)
from tft_ckpt.pg.link import Call, Link
from tft_ckpt.testing import FaultyGroup, GroupFault, assert_same_state, members_of_gloo, sample_state

BOUND = timedelta(seconds=20)
SHORT = timedelta(milliseconds=300)
CPU = torch.device("cpu")
KEY = StateKey(quorum_id=3, nonce=4, step=5, lineage=6)
LATER = StateKey(quorum_id=3, nonce=4, step=6, lineage=6)


def transports(count: int, **settings: Any) -> list[PGTransport[Any]]:
    return [PGTransport(member, BOUND, CPU, **settings) for member in members_of_gloo(count)]


@contextmanager
def running(call: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """The call on a thread of its own, and its result or its error for who asks."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            # Raised again on the test's thread.
            outcome.append(error)

    thread = threading.Thread(target=run, name="test-call")
    thread.start()

    def result() -> Any:
        thread.join(BOUND.total_seconds())
        assert outcome, "the call did not return"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    try:
        yield result
    finally:
        thread.join(BOUND.total_seconds())


def transfer(source: PGTransport[Any], receiver: PGTransport[Any], state: object, **more: Any) -> Any:
    with running(lambda: source.send_checkpoint([1], KEY.step, state, BOUND, key=KEY)) as sent:
        got = receiver.recv_checkpoint(0, source.metadata(), KEY.step, BOUND, key=KEY, **more)
        sent()
    return got


def test_metadata_is_torchfts() -> None:
    (transport,) = transports(1)
    assert transport.metadata() == "<n/a>"


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20, 1 << 30])
def test_chunks_of_any_size_carry_tensors_of_any_size(chunk_bytes: int) -> None:
    state = {size: torch.arange(size, dtype=torch.uint8) for size in (1, 63, 4096, 5000, 100_000)} | {
        "all": sample_state()
    }
    source, receiver = transports(2, chunk_bytes=chunk_bytes)
    assert_same_state(transfer(source, receiver, state), state)


def test_what_lies_in_one_piece_is_sent_from_where_it_lies_and_received_where_it_belongs() -> None:
    """The messages of chunks are the tensors' own memory on both sides: no copy is made."""

    class Watching:
        def __init__(self, member: Any) -> None:
            self.member = member
            self.messages: list[int] = []

        def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
            self.messages.append(tensors[0].data_ptr())
            return self.member.send(tensors, rank, tag)

        def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
            self.messages.append(tensors[0].data_ptr())
            return self.member.recv(tensors, rank, tag)

    groups = [Watching(member) for member in members_of_gloo(2)]
    source, receiver = (PGTransport[Any](group, BOUND, CPU, chunk_bytes=1 << 20) for group in groups)
    there, here = torch.randn(1 << 20), torch.zeros(1 << 20)
    got = transfer(source, receiver, {"weight": there}, into={"weight": here})
    assert got["weight"] is here
    assert here.equal(there)
    for group, tensor in zip(groups, (there, here), strict=True):
        assert {tensor.data_ptr() + chunk * (1 << 20) for chunk in range(4)} <= set(group.messages)


def test_state_dict_is_what_is_received_into() -> None:
    """torchft's fourth argument: a function that gives the receiver's state, asked for every receive."""
    members = members_of_gloo(2)
    model = torch.nn.Linear(300, 300)
    module = torch.nn.Linear(300, 300)
    source = PGTransport[Any](members[0], BOUND, CPU)
    receiver = PGTransport[Any](members[1], BOUND, CPU, module.state_dict)
    got = transfer(source, receiver, model.state_dict())
    assert got["weight"].data_ptr() == module.weight.data_ptr()
    assert_same_state(dict(module.state_dict()), dict(model.state_dict()))


def test_parts_of_dtensors_are_received_in_place() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        there, here = (
            DTensor.from_local(torch.full((40, 300), value), mesh, [Shard(0)], run_check=False) for value in (1.0, 2.0)
        )
        source, receiver = transports(2)
        got = transfer(source, receiver, {"weight": there}, into={"weight": here})
        assert got["weight"] is here
        assert_same_state(got, {"weight": there})
    finally:
        dist.destroy_process_group()


def test_a_failure_in_place_says_that_the_tensors_hold_a_mixture() -> None:
    members = members_of_gloo(2)
    fault = GroupFault("flip", message=5, at=3)
    source = PGTransport[Any](FaultyGroup(members[0], fault), BOUND, CPU, chunk_bytes=1 << 16)
    receiver = PGTransport[Any](members[1], BOUND, CPU)
    here = {"weight": torch.zeros(1 << 20)}
    with running(lambda: source.send_checkpoint([1], 5, {"weight": torch.ones(1 << 20)}, BOUND, key=KEY)) as sent:
        with pytest.raises(StateCorruptError, match=r"chunk 3 .* hold a mixture of two states") as raised:
            receiver.recv_checkpoint(0, "", 5, BOUND, key=KEY, into=here)
        with pytest.raises(StateUnavailableError, match=r"chunk 3 of state .* arrived damaged"):
            sent()
    assert (raised.value.part, raised.value.source) == ("chunk 3", "replica rank 0")


def test_after_damage_the_group_is_as_good_as_before() -> None:
    members = members_of_gloo(2)
    source = PGTransport[Any](FaultyGroup(members[0], GroupFault("flip", message=2, at=3)), BOUND, CPU)
    receiver = PGTransport[Any](members[1], BOUND, CPU)
    with pytest.raises(CheckpointError):
        transfer(source, receiver, {"a": torch.ones(10)})
    assert_same_state(transfer(source, receiver, {"a": torch.ones(10)}), {"a": torch.ones(10)})


def test_of_several_receivers_one_that_refuses_does_not_harm_the_others() -> None:
    state = sample_state(num_bytes=3 << 20)
    source, *receivers = transports(4)

    def receive(receiver: PGTransport[Any], key: StateKey) -> Any:
        return receiver.recv_checkpoint(0, "", key.step, BOUND, key=key)

    other = StateKey(quorum_id=3, nonce=4, step=5, lineage=7)
    with (
        running(lambda: source.send_checkpoint([1, 2, 3], 5, state, BOUND, key=KEY)) as sent,
        running(lambda: receive(receivers[0], KEY)) as first,
        running(lambda: receive(receivers[1], other)) as second,
        running(lambda: receive(receivers[2], LATER)) as third,
    ):
        assert_same_state(first(), state)
        with pytest.raises(StateMismatchError) as raised:
            second()
        assert (raised.value.wanted, raised.value.offered) == (other, KEY)
        with pytest.raises(StateMismatchError, match="replica rank 2") as raised:
            sent()
        assert raised.value.wanted == other
        source.send_checkpoint([3], 6, {"a": 1}, BOUND, key=LATER)
        assert third() == {"a": 1}


def test_what_exceeds_the_receivers_limits_is_refused_before_memory_is_taken() -> None:
    members = members_of_gloo(2)
    source = PGTransport[Any](members[0], BOUND, CPU)
    receiver = PGTransport[Any](members[1], BOUND, CPU, limits=Limits(data_bytes=1000))
    with running(lambda: source.send_checkpoint([1], 5, {"a": torch.ones(1000)}, BOUND, key=KEY)) as sent:
        with pytest.raises(StateCorruptError, match="above the limit of 1000"):
            receiver.recv_checkpoint(0, "", 5, BOUND, key=KEY)
        with pytest.raises(StateUnavailableError, match="above the limit of 1000"):
            sent()


def test_those_that_wait_are_told_that_there_is_no_state_and_the_group_is_as_good_as_before() -> None:
    source, *receivers = transports(3)
    with (
        running(lambda: receivers[0].recv_checkpoint(0, "", 5, BOUND, key=KEY)) as first,
        running(lambda: receivers[1].recv_checkpoint(0, "", 5, BOUND, key=KEY)) as second,
    ):
        source.refuse_checkpoint(5, "its trainer raised KeyError", key=KEY, dst_ranks=[1, 2])
        for told in (first, second):
            with pytest.raises(StateUnavailableError, match=r"has no state 3.* its trainer raised KeyError"):
                told()
    assert_same_state(transfer(source, receivers[0], {"a": torch.ones(10)}), {"a": torch.ones(10)})


def test_a_refusal_that_nobody_hears_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    members = members_of_gloo(2)
    source = PGTransport[Any](members[0], SHORT, CPU)
    source.refuse_checkpoint(5, "nobody asks", key=KEY)
    source.refuse_checkpoint(5, "its trainer raised", key=KEY, dst_ranks=[1])
    assert "its trainer raised" in caplog.text
    source.shutdown()
    with pytest.raises(TransportClosedError):
        source.refuse_checkpoint(5, "it is over", key=KEY, dst_ranks=[1])


def test_two_members_give_each_other_a_state_at_the_same_time() -> None:
    states = [sample_state(seed=seed) for seed in (1, 2)]
    members = transports(2, chunk_bytes=1 << 16)
    with (
        running(lambda: members[0].send_checkpoint([1], 5, states[0], BOUND, key=KEY)) as first_sent,
        running(lambda: members[1].send_checkpoint([0], 5, states[1], BOUND, key=KEY)) as second_sent,
        running(lambda: members[0].recv_checkpoint(1, "", 5, BOUND, key=KEY)) as first_got,
    ):
        assert_same_state(members[1].recv_checkpoint(0, "", 5, BOUND, key=KEY), states[0])
        assert_same_state(first_got(), states[1])
        first_sent()
        second_sent()


def test_a_rank_that_is_not_in_the_group_is_refused_at_once() -> None:
    _, member = transports(2)
    for rank in (1, 2):
        with pytest.raises(ConfigError, match=rf"rank {rank} is not another member .* \(own rank 1\)"):
            member.recv_checkpoint(rank, "", 5, BOUND)
        with pytest.raises(ConfigError, match=rf"rank {rank} is not another member .* \(own rank 1\)"):
            member.send_checkpoint([0, rank], 5, {}, BOUND)


def test_what_breaks_the_talk_with_one_of_several_is_raised_by_the_send() -> None:
    class Broken(BaseException): ...

    class Breaks:
        def __init__(self, member: Any) -> None:
            self.member = member

        def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
            if rank == 2:
                raise Broken
            return self.member.send(tensors, rank, tag)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.member, name)

    members = members_of_gloo(3)
    source, receiver = (PGTransport[Any](group, BOUND, CPU) for group in (Breaks(members[0]), members[1]))
    with running(lambda: receiver.recv_checkpoint(0, "", 5, SHORT, key=KEY)) as got:
        with pytest.raises(Broken):
            source.send_checkpoint([1, 2], 5, {"a": 1}, SHORT, key=KEY)
        with suppress(CheckpointError):
            got()


def test_a_wait_that_a_group_cuts_off_to_whole_milliseconds_took_too_long() -> None:
    class Late:
        def wait(self, timeout: timedelta) -> bool:
            whole_ms = timeout // timedelta(milliseconds=1)
            ends = time.monotonic() + whole_ms / 1000
            while time.monotonic() < ends:
                pass
            raise RuntimeError(f"Timed out waiting {whole_ms}ms for send operation to complete")

    class Group:
        def send(self, *_: Any) -> Late:
            return Late()

        recv = send

    call = Call(Group(), ranks=[1], timeout_s=5, silence_s=0.0109)
    link = Link(call, rank=1, device=CPU, is_source=True)
    with pytest.raises(TransferTimeoutError):
        link.end(link.start_send(torch.ones(1)))


def test_nobody_to_send_to_costs_no_transfer() -> None:
    (source,) = transports(1)
    source.send_checkpoint([], 5, {"a": torch.ones(3)}, BOUND)


def test_a_receiver_that_does_not_come_ends_the_call_in_time() -> None:
    source, receiver = transports(2)
    with pytest.raises(TransferTimeoutError):
        source.send_checkpoint([1], 5, {"a": 1}, SHORT)
    with pytest.raises(StateUnavailableError, match="was interrupted"):
        receiver.recv_checkpoint(0, "", 5, BOUND)


def test_a_source_that_is_not_ready_in_time_lets_nobody_wait() -> None:
    source, receiver = transports(2, chunk_bytes=4096)
    with running(lambda: receiver.recv_checkpoint(0, "", 5, BOUND)) as got:
        with pytest.raises(TransferTimeoutError):
            source.send_checkpoint([1], 5, {"a": torch.ones(1 << 22)}, timedelta(microseconds=1))
        with pytest.raises(StateUnavailableError):
            got()


def test_a_group_that_is_not_configured_gives_no_state_and_is_left_alone() -> None:
    class NotYet:
        was_aborted = False

        def configure(self) -> None: ...

        def abort(self) -> None:
            self.was_aborted = True

        def send(self, *args: Any) -> Any:
            raise RuntimeError("the group is not configured")

        recv = send

    group = NotYet()
    with pytest.raises(StateUnavailableError, match=r"replica rank 0 was interrupted: the group is not configured"):
        PGTransport[Any](group, BOUND, CPU).recv_checkpoint(0, "", 5, BOUND)
    assert not group.was_aborted


def test_abort_ends_a_send_too() -> None:
    source, _ = transports(2)
    with running(lambda: source.send_checkpoint([1], 5, {"a": 1}, BOUND)) as sent:
        while not source._running:
            pass
        source.abort()
        with pytest.raises(TransportClosedError):
            sent()


class AbortedLater:
    """A group as those of tft-pg: an abort from any thread ends its waits, and it may be configured again."""

    def __init__(self) -> None:
        self.waits, self.aborted = threading.Event(), threading.Event()

    def configure(self) -> None: ...

    def abort(self) -> None:
        self.aborted.set()

    def recv(self, *args: Any) -> Any:
        return self

    send = recv

    def wait(self, timeout: timedelta) -> bool:
        self.waits.set()
        assert self.aborted.wait(timeout.total_seconds())
        raise RuntimeError("the group was aborted")


def test_a_receive_that_waits_for_its_source_ends_with_the_group() -> None:
    """The quorum of a Manager is broken before the source has offered its state."""
    group = AbortedLater()
    receiver = PGTransport[Any](group, BOUND, CPU)
    with running(lambda: receiver.recv_checkpoint(0, "", 5, timedelta(hours=1), key=KEY)) as got:
        assert group.waits.wait(BOUND.total_seconds())
        group.abort()
        with pytest.raises(StateUnavailableError, match="the group was aborted"):
            got()
    assert not receiver._running


def test_a_group_that_swallows_its_errors_gives_no_state() -> None:
    class Swallowing:
        def __init__(self, member: Any) -> None:
            self.member = member

        def __getattr__(self, name: str) -> Any:
            return getattr(self.member, name)

        def errored(self) -> Exception | None:
            return RuntimeError("a rank is gone")

    members = members_of_gloo(2)
    source, receiver = PGTransport[Any](members[0], BOUND, CPU), PGTransport[Any](Swallowing(members[1]), BOUND, CPU)
    with running(lambda: source.send_checkpoint([1], 5, {"a": 1}, BOUND, key=KEY)) as sent:
        with pytest.raises(StateUnavailableError, match="a rank is gone"):
            receiver.recv_checkpoint(0, "", 5, BOUND, key=KEY)
        with pytest.raises(StateUnavailableError):
            sent()


def test_settings_that_can_not_work_are_refused() -> None:
    (member,) = members_of_gloo(1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"pg": object()}, "give a process group"),
        ({"timeout": timedelta(0)}, "give more than 0"),
        ({"timeout": 3}, "give a timedelta"),
        ({"device": "cpu"}, "give a torch.device"),
        ({"state_dict": {}}, "give a function"),
        ({"chunk_bytes": 17}, "give 4096 to"),
    ]
    for arguments, sentence in wrong:
        with pytest.raises(ConfigError, match=sentence):
            PGTransport(**{"pg": member, "timeout": BOUND, "device": CPU} | arguments)
    transport = PGTransport[Any](member, BOUND, CPU)
    with pytest.raises(ConfigError, match="give replica ranks"):
        transport.send_checkpoint([-1], 5, {}, BOUND)
    with pytest.raises(ConfigError, match="give a rank in the group"):
        transport.recv_checkpoint(-1, "", 5, BOUND)
    with pytest.raises(ConfigError, match="give the same step in both"):
        transport.send_checkpoint([1], 6, {}, BOUND, key=KEY)


def test_one_send_and_one_receive_at_a_time() -> None:
    source, receiver = transports(2)
    waits = threading.Event()

    def cancelled() -> bool:
        waits.set()
        return False

    with running(lambda: receiver.recv_checkpoint(0, "", 5, BOUND, cancelled=cancelled)) as got:
        assert waits.wait(BOUND.total_seconds())
        with pytest.raises(ConfigError, match="already running"):
            receiver.recv_checkpoint(0, "", 5, BOUND)
        source.send_checkpoint([1], 5, {"a": 1}, BOUND)
        assert got() == {"a": 1}


def test_an_error_of_the_callers_progress_ends_the_receive_and_is_raised() -> None:
    class StopError(Exception):
        pass

    def cancelled() -> bool:
        raise StopError

    _, receiver = transports(2)
    with pytest.raises(StopError):
        receiver.recv_checkpoint(0, "", 5, BOUND, cancelled=cancelled)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tft-ckpt-pg")]
