"""A child-process group at the limits of the machine: memory, descriptors, and processes that hang."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from tft_pg import (
    CommunicatorFailedError,
    ConfigError,
    ConfigureError,
    OperationRefusedError,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupClosedError,
    ProcessGroupError,
    StoreUnreachableError,
)
from tft_pg.child import gloo, segments
from tft_pg.child import nursery as nurseries
from tft_pg.child.call import Call, CallMemory
from tft_pg.child.link import Link
from tft_pg.child.messages import MESSAGE_BYTES_MAX, decode, decode_error, encode_answer, encode_error
from tft_pg.child.nursery import NURSERY, ChildProcess, Nursery
from tft_pg.child.segments import Pool
from tft_pg.errors import Where
from tft_pg.testing import Bench

GUARD: Final = timedelta(seconds=20)
MEBIBYTE: Final = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[None]:
    NURSERY.child(check=lambda: None).close()
    yield
    NURSERY.end()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(ProcessGroupBabyGloo, timeout=GUARD) as bench:
        yield bench


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + GUARD.total_seconds()
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def failure(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except ProcessGroupError as error:
        return error
    return None


def reduce(group: ProcessGroup, length: int = 3) -> None:
    tensor = torch.ones(length)
    group.allreduce([tensor]).wait()
    assert bool((tensor == 1).all())


def child_of(group: Any) -> int:
    pid = group.child_pid
    assert isinstance(pid, int)
    return pid


def descriptors_of(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def segments_of(pid: int | str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:tft-pg")


# --- shared memory --------------------------------------------------------------------------------------------------


def test_a_child_unmaps_the_segments_that_the_trainer_drops(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of operations needs more than may stay free, so each drops a segment."""
    monkeypatch.setattr(segments, "_FREE_BYTES_MAX", MEBIBYTE)
    group = bench.configured(1)[0]
    for _ in range(20):
        reduce(group, MEBIBYTE // 4)
        reduce(group)
    pid = child_of(group)
    until(lambda: segments_of(pid) <= 3, "the child keeps dropped segments")
    assert segments_of("self") <= 3


def test_a_segment_costs_no_descriptor_once_the_child_has_it(bench: Bench) -> None:
    groups = bench.configured(2)
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait())
    pid = child_of(groups[0])
    here, there = descriptors_of("self"), descriptors_of(pid)
    works = [groups[0].allreduce([torch.ones(3)]) for _ in range(50)]
    assert descriptors_of("self") <= here
    works += [groups[1].allreduce([torch.ones(3)]) for _ in range(50)]
    for work in works:
        work.wait()
    assert descriptors_of(pid) <= there + 2


def test_the_least_recently_used_segments_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_FREE_BYTES_MAX", MEBIBYTE)
    monkeypatch.setattr(segments, "_FREE_MAX", 3)
    pool = Pool()
    small, large, too_large = pool.take(9), pool.take(MEBIBYTE - 9), pool.take(MEBIBYTE + 9)
    for segment in (small, large, too_large):
        segment.close()  # the child has it
    pool.give(small)
    pool.give(large)
    assert pool.dropped() == [small.number]
    pool.give(too_large)
    assert pool.dropped() == [too_large.number]
    assert pool.take(MEBIBYTE - 9) is large
    several = [pool.take(9) for _ in range(4)]
    for segment in several:
        pool.give(segment)
    assert len(pool._free) == 3
    assert several[0].descriptor == -1
    assert pool.dropped() == []  # the child never had it
    pool.close()


def test_a_segment_is_about_as_large_as_what_it_holds() -> None:
    pool = Pool()
    for size in (1, 1 << 14, (1 << 14) + 1, 100_000, 513 * MEBIBYTE, 16 * MEBIBYTE):
        segment = pool.take(size)
        assert size <= segment.size <= max(1 << 14, size * 5 // 4, size + (1 << 14))
        pool.give(segment)
    assert segment.size == 16 * MEBIBYTE
    pool.close()


def test_a_sparse_tensor_is_refused_and_takes_no_memory(bench: Bench) -> None:
    group = bench.configured(1)[0]
    reduce(group)
    pool: Pool = group._sharing._pool  # type: ignore[attr-defined]
    error = failure(lambda: group.allreduce([torch.eye(3).to_sparse()]))
    assert isinstance(error, OperationRefusedError)
    assert "pass a dense tensor" in str(error)
    assert len(pool._all) == len(pool._free) == 1
    assert group.errored() is None
    reduce(group)


def test_a_failed_copy_gives_its_memory_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    group = bench.configured(1)[0]
    reduce(group)
    pool: Pool = group._sharing._pool  # type: ignore[attr-defined]

    def copy(*args: object) -> None:
        raise RuntimeError("this can't be copied")

    with monkeypatch.context() as patch:
        patch.setattr(gloo, "copy_in", copy)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't be copied"):
                group.allreduce([torch.ones(3)])
    assert len(pool._all) == len(pool._free) == 1
    reduce(group)


@pytest.mark.parametrize("way", ["grown", "freed"])
def test_a_tensor_that_is_resized_during_the_call_is_not_written(bench: Bench, way: str) -> None:
    groups = bench.configured(2)
    tensor = torch.ones(8)
    work = groups[0].allreduce([tensor])
    if way == "grown":
        tensor.resize_(1 << 20)
    else:
        tensor.untyped_storage().resize_(0)
    groups[1].allreduce([torch.ones(8)]).wait()
    error = failure(work.wait)
    assert isinstance(error, OperationRefusedError)
    assert "resized or freed" in str(error)
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait())


@pytest.mark.parametrize("timeout", [timedelta.max, timedelta(days=10**6)], ids=str)
def test_the_longest_timeouts_are_no_error(bench: Bench, timeout: timedelta) -> None:
    group = bench.make()
    group.set_timeout(timeout)
    bench.configure([group])
    reduce(group)
    options = AllreduceOptions()
    options.timeout = timeout
    group.allreduce([torch.ones(3)], options).wait()
    assert group.exchange_word([1], round_number=0, timeout=timeout).wait() == (1,)


def test_a_variable_that_the_trainer_has_removed_is_not_in_the_child(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    NURSERY.end()
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
        NURSERY.child(check=lambda: None).close()  # whose imports take longer than a bench waits, on a loaded machine
    groups = bench.configured(2)
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait())


def test_a_group_that_is_shut_down_has_no_store_and_no_handle(bench: Bench) -> None:
    before, threads = descriptors_of("self"), len(os.listdir("/proc/self/task"))
    groups = [ProcessGroupBabyGloo() for _ in range(3)]
    for group in groups:
        group.get_reconfigure_handle()
    assert descriptors_of("self") > before
    for group in groups:
        group.shutdown()
        assert isinstance(failure(group.get_reconfigure_handle), ProcessGroupClosedError)
    until(lambda: descriptors_of("self") <= before, "descriptors are left")
    until(lambda: len(os.listdir("/proc/self/task")) <= threads, "threads are left")


# --- a child that answers nonsense ----------------------------------------------------------------------------------


def learn_patience(answer: Mapping[str, Any]) -> None:
    ProcessGroupBabyGloo()._learn(answer)


@pytest.mark.parametrize(
    "packet",
    [
        b"[" * 60_000,
        b'{"call":Infinity}',
        b'{"call":' + b"9" * 5000 + b"}",
        b'{"call":0,"value":"x"}',
        b'{"call":0,"error":{"kind":"ConfigError","text":"x","where":[1,2,3,4,5,6]}}',
        b'{"call":0,"patience":{"a":1}}',
    ],
    ids=["deep", "infinite", "long number", "text", "where", "patience"],
)
def test_an_answer_that_is_none_fails_all_calls_and_ends_the_child(packet: bytes) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(ChildProcess(process.pid, os.pidfd_open(process.pid), mine), Where(0, 1), CallMemory(lambda call: None))
    errors: list[Exception] = []
    failed = [threading.Event() for _ in range(2)]

    def call(number: int) -> Call:
        def fail(error: Exception) -> None:
            errors.append(error)
            failed[number].set()

        return Call("allreduce", lambda answer: int(answer["value"]), fail, 1000.0, learn=learn_patience)

    with theirs:
        for number in range(2):
            link.call(call(number), {"do": "run"})
        theirs.send(packet)
        assert all(each.wait(GUARD.total_seconds()) for each in failed)
        assert process.wait(GUARD.total_seconds()) == -signal.SIGKILL
        link.join()
    assert [type(error) for error in errors] == [CommunicatorFailedError] * 2
    assert isinstance(link.failed, CommunicatorFailedError)
    assert mine.fileno() == -1


def test_an_error_too_long_for_a_message_loses_its_lists_only() -> None:
    error = StoreUnreachableError("x" * 9000, where=Where(1, 9000), host="h", port=1, why="y" * 70_000)
    listed = ConfigureError("configure failed", where=Where(1, 9000))
    listed.missing_ranks = tuple(range(9000))
    listed.unreached = dict.fromkeys(range(9000), "did not answer")
    packet = encode_answer({"call": 7, "error": encode_error(listed), "latched": encode_error(error)})
    assert len(packet) <= MESSAGE_BYTES_MAX
    answer = decode(packet)
    assert answer["call"] == 7
    found = decode_error(answer["error"])
    assert isinstance(found, ConfigureError)
    assert (found.args, found.where, found.missing_ranks) == (listed.args, listed.where, ())
    assert str(decode_error(answer["latched"])).startswith("xxx")
    assert decode(encode_answer({"call": 7, "error": encode_error(ConfigError("short"))}))["error"]["text"] == "short"


# --- the nursery ----------------------------------------------------------------------------------------------------


def no_descriptors(*args: object, **kwargs: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def no_answer(control: socket.socket) -> tuple[bytes, list[int]]:
    """As the kernel gives a message to a process without a free descriptor."""
    packet, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
    for descriptor in descriptors:
        os.close(descriptor)
    return packet, []


@pytest.mark.parametrize("place", ["socket", "answer"])
def test_without_descriptors_for_one_group_the_others_keep_their_children(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    group = bench.configured(1)[0]
    before = NURSERY.pid
    with monkeypatch.context() as patch:
        if place == "socket":
            patch.setattr(nurseries.socket, "socketpair", no_descriptors)
        else:
            patch.setattr(nurseries, "_receive", no_answer)
        error = failure(lambda: NURSERY.child(check=lambda: None))
    assert isinstance(error, ConfigureError)
    assert "descriptor" in str(error) or "open files" in str(error)
    assert NURSERY.pid == before
    reduce(group)
    NURSERY.child(check=lambda: None).close()


def test_a_group_can_be_made_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `configure` reports that, if there still are none."""
    nursery = Nursery()
    with monkeypatch.context() as patch:
        patch.setattr(nurseries.socket, "socketpair", no_descriptors)
        nursery.start()
        assert isinstance(failure(lambda: nursery.child(check=lambda: None)), ConfigureError)
    assert nursery.pid is None


def test_a_hung_nursery_costs_the_limit_and_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    group = bench.configured(1)[0]
    hung = NURSERY.pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    limit = timedelta(seconds=0.3)
    error = failure(lambda: NURSERY.child(check=lambda: None, limit=limit))
    assert isinstance(error, ConfigureError)
    assert f"the helper process {hung} does not answer" in str(error)
    assert NURSERY.pid == hung  # one short limit does not end the children of others
    reduce(group)
    monkeypatch.setattr(nurseries, "_HUNG_S", 0.0)
    assert isinstance(failure(lambda: NURSERY.child(check=lambda: None, limit=limit)), ConfigureError)
    assert not Path(f"/proc/{hung}").exists()
    assert NURSERY.pid not in (None, hung)
    bench.configure([group])
    reduce(group)


def test_a_nursery_that_answers_late_is_kept(bench: Bench) -> None:
    bench.configured(1)
    slow = NURSERY.pid
    assert slow is not None
    os.kill(slow, signal.SIGSTOP)
    assert failure(lambda: NURSERY.child(check=lambda: None, limit=timedelta(seconds=0.1)))
    os.kill(slow, signal.SIGCONT)
    NURSERY.child(check=lambda: None).close()
    assert NURSERY.pid == slow
    assert NURSERY._silent_s is None


def test_a_group_is_made_while_another_waits_for_the_nursery(bench: Bench) -> None:
    bench.configured(1)
    pid = NURSERY.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    waits = threading.Event()
    thread = threading.Thread(target=lambda: NURSERY.child(check=waits.set).close())
    thread.start()
    try:
        assert waits.wait(GUARD.total_seconds())
        ProcessGroupBabyGloo().shutdown()
        assert thread.is_alive()
    finally:
        os.kill(pid, signal.SIGCONT)
        thread.join(GUARD.total_seconds())
    assert not thread.is_alive()


def test_a_long_wait_for_the_imports_is_logged_and_ends_with_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork of the trainer may hold the nursery's socket open, so that only its process shows the end."""
    nursery = Nursery()
    helper = subprocess.Popen(["sleep", "1000"])
    nursery._process = helper
    nursery._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(nurseries, "_REPORTS_S", (0.0,))
    monkeypatch.setattr(nursery, "_discard", lambda: setattr(nursery, "_process", None))
    monkeypatch.setattr(nurseries.subprocess, "Popen", no_descriptors)

    def check() -> None:
        if caplog.messages:
            helper.kill()

    control = nursery._control
    with theirs, control, caplog.at_level(logging.WARNING, logger="tft_pg"):
        assert isinstance(failure(lambda: nursery.child(check=check, limit=GUARD)), ConfigureError)
    assert f"waiting for the helper process {helper.pid} that imports torch" in caplog.text
    helper.wait()
    assert nursery._control is not None
    nursery._control.close()
