"""A source without memory for a second copy: its state is served from its own tensors, and training waits."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tft_ckpt import CheckpointError, HTTPTransport, StateKey, StateUnavailableError, TransferTimeoutError
from tft_ckpt.state import lending as lending_module
from tft_ckpt.state.buffers import BufferPool
from tft_ckpt.state.lending import GRACE_S, NO_SHOW_S, Lending
from tft_ckpt.state.live import LivePayload
from tft_ckpt.state.manifest import describe
from tft_ckpt.state.memory import FreeMemory
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.tree import Limits
from tft_ckpt.testing import assert_same_state, sample_state
from tft_ckpt.transfer import server as server_module
from tft_ckpt.transfer.address import parse_url
from tft_ckpt.transfer.routes import data_path, manifest_path
from tft_ckpt.transfer.snapshot_store import KEYS_REQUESTED_MAX, REQUESTERS_MAX, SnapshotStore

BOUND = timedelta(seconds=20)
STEP_1 = StateKey(0, 0, 1, 0)


# ---- when it is over: pure ----


def test_it_is_over_when_all_have_come_and_left() -> None:
    lending = Lending(2, 10.0)
    assert not lending.is_over(num_seen=1, num_holding=1, now_s=10.1)
    assert not lending.is_over(num_seen=1, num_holding=0, now_s=10.2)
    assert not lending.is_over(num_seen=2, num_holding=3, now_s=100.0)
    assert not lending.is_over(num_seen=2, num_holding=0, now_s=100.0 + GRACE_S - 0.1), "its connection may have broken"
    assert not lending.is_over(num_seen=2, num_holding=1, now_s=100.4)
    assert lending.is_over(num_seen=2, num_holding=0, now_s=100.4 + GRACE_S)


def test_who_came_before_and_got_it_elsewhere_is_not_waited_for() -> None:
    lending = Lending(1, 10.0)
    assert not lending.is_over(num_seen=1, num_holding=0, now_s=10.0)
    assert lending.is_over(num_seen=1, num_holding=0, now_s=10.0 + GRACE_S)


def test_who_does_not_come_is_given_up() -> None:
    lending = Lending(2, 10.0)
    assert not lending.is_over(num_seen=0, num_holding=0, now_s=9.9 + NO_SHOW_S)
    assert not lending.is_over(num_seen=1, num_holding=0, now_s=10.0 + NO_SHOW_S), "one more has come just now"
    assert lending.is_over(num_seen=1, num_holding=0, now_s=10.0 + 2 * NO_SHOW_S)


def test_the_shelf_counts_readers_before_the_state_is_there() -> None:
    store = SnapshotStore()
    wanted, later = StateKey(1, 0, 1, 0), StateKey(1, 0, 2, 0)
    for name in ("a", "b", "a"):
        store.record_request(wanted, name)
    assert store.num_requested(wanted) == 2
    store.begin(wanted)
    assert store.num_requested(wanted) == 2
    store.begin(later)
    assert store.num_requested(wanted) == 0
    store.record_request(wanted, "a")
    assert store.num_requested(wanted) == 0, "it will not come any more"


def test_what_readers_can_make_the_shelf_remember_is_bounded() -> None:
    store = SnapshotStore()
    for number in range(REQUESTERS_MAX + 5):
        store.record_request(STEP_1, str(number))
    assert store.num_requested(STEP_1) == REQUESTERS_MAX
    for step in range(2, 20):
        store.record_request(StateKey(0, 0, step, 0), "a")
    assert sum(store.num_requested(StateKey(0, 0, step, 0)) > 0 for step in range(20)) == KEYS_REQUESTED_MAX


# ---- the run of a live state ----


def test_every_range_of_a_live_run_is_that_of_a_copy() -> None:
    state = [torch.arange(10, dtype=torch.uint8), torch.arange(200, 255, dtype=torch.uint8), torch.zeros(0)]
    layout, spans = describe(state, key=STEP_1, chunk_bytes=4096, limits=Limits())
    run = LivePayload(layout, spans)
    whole = Snapshot.take(
        state, key=STEP_1, chunk_bytes=4096, limits=Limits(), allocate=BufferPool().take
    ).data.tobytes()
    for start in range(len(whole) + 1):
        for end in range(start, len(whole) + 1):
            assert bytes(run.piece(start, end)) == whole[start:end], (start, end)
            assert bytes(run.tensor(start, end).tolist()) == whole[start:end], (start, end)


def test_a_piece_in_one_tensor_is_no_copy() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    layout, spans = describe([tensor], key=STEP_1, chunk_bytes=4096, limits=Limits())
    piece = LivePayload(layout, spans).piece(10, 20)
    tensor.fill_(7)
    assert bytes(piece) == b"\7" * 10


def test_a_live_state_that_has_ended_gives_nothing() -> None:
    snapshot = Snapshot.live([torch.ones(9000)], key=STEP_1, chunk_bytes=4096, limits=Limits())
    assert not snapshot.checksum_next_chunk()
    snapshot.end()
    assert snapshot.checksum_next_chunk(), "there is nothing to sum any more"
    assert snapshot.manifest_bytes is None
    with pytest.raises(ConnectionResetError, match="training continues"):
        snapshot.views(0, 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_state_on_a_device_is_read_a_piece_at_a_time() -> None:
    state = [torch.randn(1 << 20, device="cuda"), torch.ones(3), torch.arange(5, device="cuda")]
    layout, spans = describe(state, key=STEP_1, chunk_bytes=4096, limits=Limits())
    run = LivePayload(layout, spans)
    run.wait_for_devices()
    whole = Snapshot.take(
        state, key=STEP_1, chunk_bytes=4096, limits=Limits(), allocate=BufferPool().take
    ).data.tobytes()
    step = 300_001
    got = b"".join(bytes(run.piece(at, min(at + step, len(whole)))) for at in range(0, len(whole), step))
    assert got == whole


# ---- served ----


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory is free, so that no second copy is made."""

    def no_copy(pool: BufferPool, num_bytes: int) -> None:
        raise AssertionError(f"{num_bytes} bytes were taken for a second copy")

    monkeypatch.setattr(server_module, "free_memory", lambda: FreeMemory(1 << 20, "a test"))
    monkeypatch.setattr(BufferPool, "take", no_copy)


@contextmanager
def sending(transport: HTTPTransport[Any], state: object, timeout: timedelta = BOUND) -> Iterator[Callable[[], None]]:
    """A trainer that offers a state. Gives: a wait for its end, which raises what it raised."""
    ended: list[BaseException] = []

    def send() -> None:
        try:
            transport.send_checkpoint([1], 1, state, timeout)
        except BaseException as error:
            ended.append(error)

    def wait() -> None:
        thread.join(BOUND.total_seconds())
        assert not thread.is_alive()
        if ended:
            raise ended[0]

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        transport.shutdown()
        thread.join(BOUND.total_seconds())


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("connections", [1, 4])
def test_a_reader_gets_the_state_and_then_training_goes_on(caplog: pytest.LogCaptureFixture, connections: int) -> None:
    caplog.set_level(logging.INFO, "tft_ckpt")
    state = sample_state(num_bytes=20 << 20)
    with (
        HTTPTransport[Any](bind="127.0.0.1", token="t") as source,
        HTTPTransport[Any](bind="127.0.0.1", token="t", num_chunks=connections) as receiver,
        sending(source, state) as wait,
    ):
        got = receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)
        wait()
        assert_same_state(got, state)
        with pytest.raises(StateUnavailableError, match="only while training waited"):
            receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)
    (warning,) = [record.getMessage() for record in caplog.records if "without a second copy" in record.getMessage()]
    assert "training waits until 1 replicas have it" in warning
    assert "are free (a test)" in warning
    assert "training continues after" in caplog.text


@pytest.mark.usefixtures("short")
def test_a_reader_is_never_given_a_byte_that_training_has_changed() -> None:
    """It reads half, and the trainer's time is over, so that it goes on and writes."""
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    asks = "".join(
        f"GET {path} HTTP/1.1\r\nhost: x\r\nx-tft-wait-ms: 5000\r\n\r\n"
        for path in (manifest_path(STEP_1), data_path(STEP_1))
    )
    with (
        HTTPTransport[Any](bind="127.0.0.1", token=None) as source,
        sending(source, [tensor], timedelta(seconds=1.5)) as wait,
        socket.create_connection(parse_url(source.metadata()), BOUND.total_seconds()) as reader,
    ):
        reader.sendall(asks.encode())
        got = bytearray(reader.recv(1 << 16))
        with pytest.raises(TransferTimeoutError, match="offering state"):
            wait()
        tensor.fill_(2)
        with suppress(ConnectionError):
            while piece := reader.recv(1 << 20):
                got += piece
    body = got[got.rindex(b"\r\n\r\n") + 4 :]
    assert 0 < len(body) < len(tensor), "it was broken off"
    assert body.count(1) == len(body), "and was given nothing of what came later"


@pytest.mark.usefixtures("short")
def test_readers_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_module, "NO_SHOW_S", 0.05)
    with (
        HTTPTransport[Any](bind="127.0.0.1", token="t") as source,
        HTTPTransport[Any](bind="127.0.0.1", token="t") as receiver,
    ):
        source.send_checkpoint([1], 1, [torch.ones(10)], BOUND)
        with pytest.raises(StateUnavailableError, match="recover from the next state"):
            receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)


@pytest.mark.usefixtures("short")
def test_a_shutdown_ends_the_wait() -> None:
    with HTTPTransport[Any](bind="127.0.0.1", token="t") as source, sending(source, [torch.ones(10)]) as wait:
        source.shutdown()
        with pytest.raises(CheckpointError, match="shut down"):
            wait()


@pytest.mark.usefixtures("short")
def test_nobody_is_waited_for_where_nobody_was_announced() -> None:
    with (
        HTTPTransport[Any](bind="127.0.0.1", token="t") as source,
        HTTPTransport[Any](bind="127.0.0.1", token="t") as receiver,
    ):
        with pytest.raises(StateUnavailableError, match="no memory for a second copy"):
            source.send_checkpoint([], 1, [torch.ones(10)], BOUND)
        with pytest.raises(StateUnavailableError, match=r"no memory for a second copy.*are free \(a test\)"):
            receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)
        with pytest.raises(StateUnavailableError, match="no memory for a second copy"):
            source.stage_checkpoint([torch.ones(10)], BOUND)


@pytest.mark.usefixtures("short")
def test_no_memory_is_got_ready_where_none_is_free(caplog: pytest.LogCaptureFixture) -> None:
    with HTTPTransport[Any](bind="127.0.0.1", token="t") as source:
        source.prepare_to_send(1 << 20)
        source.shutdown()
    assert "no memory is reserved for serving a state: there is no memory for a second copy" in caplog.text


def test_memory_that_the_system_refuses_is_as_if_none_were_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pool: BufferPool, num_bytes: int) -> None:
        raise StateUnavailableError(f"this process got no {num_bytes} bytes")

    monkeypatch.setattr(BufferPool, "take", refuse)
    with (
        HTTPTransport[Any](bind="127.0.0.1", token="t") as source,
        HTTPTransport[Any](bind="127.0.0.1", token="t") as receiver,
        sending(source, [torch.ones(10)]) as wait,
    ):
        assert_same_state(receiver.recv_checkpoint(0, source.metadata(), 1, BOUND), [torch.ones(10)])
        wait()


# ---- in a real cgroup ----

TRAINER = """
import sys
from datetime import timedelta
import torch
from tft_ckpt import HTTPTransport

state = [torch.full((STATE_BYTES,), 7, dtype=torch.uint8)]
with HTTPTransport(bind="127.0.0.1", token="t") as transport:
    print(transport.metadata(), flush=True)
    sys.stdin.readline()
    transport.send_checkpoint([1], 1, state, timedelta(seconds=60))
    optimizer = torch.ones(OPTIMIZER_BYTES, dtype=torch.uint8)
    state[0].add_(optimizer[0])
    print("stepped", flush=True)
    sys.stdin.readline()
"""
STATE_BYTES, OPTIMIZER_BYTES, ROOM_BYTES = 192 << 20, 64 << 20, 160 << 20


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of its own, at the top of what is mounted here."""
    folder = next(
        (
            top / f"tft-test-{threading.get_native_id()}"
            for top, name in (
                (Path("/sys/fs/cgroup"), "cgroup.subtree_control"),
                (Path("/sys/fs/cgroup/memory"), "tasks"),
            )
            if (top / name).exists()
        ),
        None,
    )
    if folder is None:
        pytest.skip("no memory cgroup is mounted")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            pytest.skip("its memory is not controlled here")
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.in_parts
def test_a_source_that_has_no_room_for_a_copy_serves_and_lives(cgroup: Path) -> None:
    code = TRAINER.replace("STATE_BYTES", str(STATE_BYTES)).replace("OPTIMIZER_BYTES", str(OPTIMIZER_BYTES))
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        (cgroup / "cgroup.procs").write_text(str(trainer.pid))
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        url = trainer.stdout.readline().strip()
        is_v2 = (cgroup / "memory.max").exists()
        used = int((cgroup / ("memory.current" if is_v2 else "memory.usage_in_bytes")).read_text())
        assert used > STATE_BYTES, "the state is accounted for here"
        (cgroup / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(used + ROOM_BYTES))
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        with HTTPTransport[Any](bind="127.0.0.1", token="t") as receiver:
            (got,) = receiver.recv_checkpoint(0, url, 1, BOUND)
        assert bool((got == 7).all())
        assert trainer.stdout.readline() == "stepped\n"
        _, errors = trainer.communicate("end\n", timeout=BOUND.total_seconds())
        assert trainer.returncode == 0, errors
        assert "without a second copy" in errors
    finally:
        trainer.kill()
        trainer.communicate()
