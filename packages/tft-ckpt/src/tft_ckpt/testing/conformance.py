"""The conformance checks of transports.

Each check makes and ends its own transports. `check_transport(make)` runs all checks, and `CHECKS` contains each one
for a test suite. Checks with a proxy between the two sides apply to transports whose metadata is an http URL. Checks
that damage messages apply to transports over a process group. For other transports they do nothing.

A source may return from `send_checkpoint` at once, or when the receivers have the state. So every check sends on a
separate thread, or while the receivers run.

Law of this file: plain assertions; waits end with an event, and `BOUND` is only the limit for giving up.
"""

from __future__ import annotations

import itertools
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final
from urllib.parse import urlsplit

import torch

from tft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    StateCorruptError,
    StateLayoutError,
    StateMismatchError,
    StateUnavailableError,
    StateUnsupportedError,
    TransferTimeoutError,
    TransportClosedError,
)
from tft_ckpt.key import StateKey
from tft_ckpt.testing.groups import FaultyGroup, GroupFault
from tft_ckpt.testing.proxy import Fault, FaultyProxy
from tft_ckpt.testing.states import assert_same_state, sample_state
from tft_ckpt.transport import CheckpointTransport

__all__ = ["CHECKS", "Together", "check_transport"]

Transport: TypeAlias = CheckpointTransport[Any]
Wrap: TypeAlias = Callable[[Any], Any]


@final
class Together:
    """A factory of transports that must be made together, such as transports over one process group.

    Args:
        make: makes this many transports, the first with replica rank 0. `wraps` maps a rank to a function, which gets
            the process group and returns its replacement.
        mend: makes the given transports usable again after an interrupted transfer; None: that is impossible.
        may_miss_a_death: whether a member's death may be noticed only when the transport's timeout expires. That
            applies to torch's own Gloo, which forgets a waiter for a partly received message.
    """

    def __init__(
        self,
        make: Callable[[int, Mapping[int, Wrap]], Sequence[Transport]],
        mend: Callable[[Sequence[Transport]], None] | None = None,
        *,
        may_miss_a_death: bool = False,
    ) -> None:
        self.make = make
        self.mend = mend
        self.may_miss_a_death = may_miss_a_death


Make: TypeAlias = Callable[[], Transport] | Together

BOUND = timedelta(seconds=30)
SHORT = timedelta(milliseconds=300)
READERS = 20
LARGE_BYTES = 96 << 20

KEY = StateKey(quorum_id=3, nonce=2**64 - 1, step=5, lineage=0xABC)
NEXT_KEY = StateKey(quorum_id=4, nonce=7, step=6, lineage=0xDEF)


def check_transport(make: Make) -> None:
    """Run every check.

    Args:
        make: returns a new, serving transport; its transports can reach each other. Or a Together.

    Raises: AssertionError, or the errors of the transport.
    """
    for check in CHECKS.values():
        check(make)


@contextmanager
def _transports(make: Make, count: int, wraps: Mapping[int, Wrap] | None = None) -> Iterator[list[Transport]]:
    made: list[Transport] = []
    try:
        if isinstance(make, Together):
            made += make.make(count, wraps or {})
        else:
            for _ in range(count):
                made.append(make())
        yield made
    finally:
        for transport in made:
            transport.shutdown()


def _send(source: Transport, state: object, key: StateKey = KEY, dst_ranks: Sequence[int] = (1,)) -> None:
    source.send_checkpoint(list(dst_ranks), key.step, state, BOUND, key=key)


@contextmanager
def _offering(
    source: Transport, state: object, key: StateKey = KEY, *, dst_ranks: Sequence[int] = (1,), may_fail: bool = False
) -> Iterator[None]:
    """Offer a state while the block runs, and before it if the source does not wait for the receivers."""
    with _background(lambda: _send(source, state, key, dst_ranks)) as sent:
        if _is_http(source):
            sent.result(BOUND.total_seconds())
        yield
        error = sent.exception(BOUND.total_seconds())
        assert may_fail or error is None, f"the source's send failed: {error!r}"
        assert error is None or isinstance(error, CheckpointError), repr(error)


def _telling(event: threading.Event) -> Callable[[], bool]:
    """Return a `cancelled` callback that sets the event at its first call, when the receive has begun to wait."""

    def cancelled() -> bool:
        event.set()
        return False

    return cancelled


def _recv(receiver: Transport, metadata: str, key: StateKey = KEY, **more: Any) -> Any:
    return receiver.recv_checkpoint(0, metadata, key.step, more.pop("timeout", BOUND), key=key, **more)


def _fails(expected: type[CheckpointError] | tuple[type[CheckpointError], ...], call: Callable[[], object]) -> Any:
    raised: CheckpointError | None = None
    try:
        call()
    except expected as error:
        raised = error
    assert raised is not None, f"nothing was raised, expected {expected}"
    assert str(raised), "the error says nothing"
    return raised


@contextmanager
def _background(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            # The check gets it from the future.
            future.set_exception(error)

    thread = threading.Thread(target=run, name="tft-ckpt-check")
    thread.start()
    try:
        yield future
    finally:
        thread.join(BOUND.total_seconds())
        assert not thread.is_alive(), "a call did not return"


def check_round_trip(make: Make) -> None:
    """Check that a received state is bit-identical and writable."""
    state = sample_state()
    with _transports(make, 2) as (source, receiver), _offering(source, state):
        seen: list[tuple[int, int]] = []
        got = _recv(receiver, source.metadata(), progress=lambda done, total: seen.append((done, total)))
        assert_same_state(got, state)
        got["bulk"].zero_()
        assert seen == sorted(seen), "progress went back"
        assert seen[-1][0] == seen[-1][1] >= state["bulk"].nbytes, seen[-1]


def check_in_place(make: Make) -> None:
    """Check that `into` fills the existing tensors, and that another form is refused without writing."""
    state, here, other = sample_state(seed=1), sample_state(seed=2), {"bulk": torch.ones(3)}
    with _transports(make, 2) as (source, receiver):
        with _offering(source, state):
            got = _recv(receiver, source.metadata(), into=here)
        assert_same_state(got, state)
        assert got["bulk"] is here["bulk"]
        assert_same_state(here["bulk"], state["bulk"])
        with _offering(source, state, NEXT_KEY, may_fail=True):
            error = _fails(StateLayoutError, lambda: _recv(receiver, source.metadata(), NEXT_KEY, into=other))
        assert error.path == "state['bulk']", error.path
        assert_same_state(other, {"bulk": torch.ones(3)})


def check_torchft_arguments(make: Make) -> None:
    """Check torchft's positional arguments without a key, and the transfer of empty states."""
    with _transports(make, 2) as (source, receiver):
        for step, state in enumerate(({}, {"a": torch.empty(0)}, {"a": 1}, [torch.zeros(3)])):
            with _background(partial(source.send_checkpoint, [1], step, state, BOUND)) as sent:
                assert_same_state(receiver.recv_checkpoint(0, source.metadata(), step, BOUND), state)
                sent.result(BOUND.total_seconds())
            source.disallow_checkpoint()
        _fails(ConfigError, lambda: source.send_checkpoint([1], KEY.step + 1, {}, BOUND, key=KEY))
        _fails(ConfigError, lambda: _recv(receiver, source.metadata(), timeout=timedelta(0)))


def check_the_copy_is_of_its_moment(make: Make) -> None:
    """Check that the trainer may write to its tensors after disallow_checkpoint."""
    weight = torch.ones(1000)

    def send() -> None:
        _send(source, {"weight": weight})
        source.disallow_checkpoint()
        weight.zero_()

    with _transports(make, 2) as (source, receiver), _background(send) as sent:
        if _is_http(source):
            sent.result(BOUND.total_seconds())
        assert_same_state(_recv(receiver, source.metadata()), {"weight": torch.ones(1000)})
        sent.result(BOUND.total_seconds())
    assert not weight.any()


def check_another_state_is_refused(make: Make) -> None:
    """Check that a state with another step, quorum, nonce or lineage never arrives in place of the requested one."""
    others = [
        StateKey(quorum_id=KEY.quorum_id, nonce=KEY.nonce, step=KEY.step - 1, lineage=KEY.lineage),
        StateKey(quorum_id=KEY.quorum_id - 1, nonce=KEY.nonce, step=KEY.step, lineage=KEY.lineage),
        StateKey(quorum_id=KEY.quorum_id, nonce=KEY.nonce - 1, step=KEY.step, lineage=KEY.lineage),
        StateKey(quorum_id=KEY.quorum_id, nonce=KEY.nonce, step=KEY.step, lineage=KEY.lineage + 1),
    ]
    with _transports(make, 2) as (source, receiver):
        for other in others:
            with _offering(source, {"a": 1}, may_fail=True):
                error = _fails(StateMismatchError, partial(_recv, receiver, source.metadata(), other))
            assert (error.wanted, error.offered) == (other, KEY)
        with _offering(source, {"a": 2}, NEXT_KEY, may_fail=True):
            _fails(StateMismatchError, lambda: _recv(receiver, source.metadata(), KEY))
        with _offering(source, {"a": 2}, NEXT_KEY):
            assert _recv(receiver, source.metadata(), NEXT_KEY) == {"a": 2}


def check_waiting_for_the_source(make: Make) -> None:
    """Check that a receiver that asks before the source's snapshot waits and gets the state."""
    with _transports(make, 2) as (source, receiver):
        waits = threading.Event()
        with _background(lambda: _recv(receiver, source.metadata(), NEXT_KEY, cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            _send(source, {"a": 1}, KEY)
            _send(source, {"a": 2}, NEXT_KEY)
            assert got.result(BOUND.total_seconds()) == {"a": 2}


def check_the_deadline(make: Make) -> None:
    """Check that a receive without a state ends with TransferTimeoutError, which is a TimeoutError."""
    with _transports(make, 2) as (source, receiver):
        error = _fails(TransferTimeoutError, lambda: _recv(receiver, source.metadata(), timeout=SHORT))
        assert error.timeout_s <= SHORT.total_seconds()
    assert issubclass(TransferTimeoutError, TimeoutError)


def check_a_failed_snapshot_is_told(make: Make) -> None:
    """Check that a state that can't be transferred is refused with its path, and that waiting receivers learn it
    at once.
    """
    with _transports(make, 2) as (source, receiver):
        waits = threading.Event()
        with _background(lambda: _recv(receiver, source.metadata(), cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            error = _fails(StateUnsupportedError, lambda: _send(source, {"a": {"b": object()}}))
            assert error.path == "state['a']['b']"
            refused = _fails(StateUnavailableError, lambda: got.result(BOUND.total_seconds()))
            assert "['a']['b']" in str(refused), str(refused)
        with _offering(source, {"a": 1}):
            assert _recv(receiver, source.metadata()) == {"a": 1}


def check_a_refusal_after_a_failed_send(make: Make) -> None:
    """Check that a refusal may follow a failed send of the same state, without a wait for informed receivers.

    This applies to transports that can refuse.
    """
    with _transports(make, 2) as (source, receiver):
        if type(source).refuse_checkpoint is CheckpointTransport.refuse_checkpoint:
            return
        waits = threading.Event()
        with _background(lambda: _recv(receiver, source.metadata(), cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            _fails(StateUnsupportedError, lambda: _send(source, {"a": object()}))
            refused = _fails(StateUnavailableError, lambda: got.result(BOUND.total_seconds()))
            assert "['a']" in str(refused), str(refused)
        with _background(lambda: _refuse_again(source)) as refused:
            refused.result(BOUND.total_seconds() / 6)  # no wait for informed receivers
        with _offering(source, {"a": 1}, NEXT_KEY):
            assert _recv(receiver, source.metadata(), NEXT_KEY) == {"a": 1}


def _refuse_again(source: Transport) -> None:
    source.refuse_checkpoint(KEY.step, "its trainer raised", key=KEY, dst_ranks=[1])


def check_a_state_is_looked_at(make: Make) -> None:
    """Check that `check_state` refuses an unsupported state with its path. Applies to transports that implement it."""
    with _transports(make, 1) as (source,):
        if type(source).check_state is not CheckpointTransport.check_state:
            error = _fails(StateUnsupportedError, lambda: source.check_state({"a": {"b": object()}}))
            assert error.path == "state['a']['b']"
            source.check_state({"a": {"b": torch.ones(2)}})


def check_a_refusal_is_told(make: Make) -> None:
    """Check that receivers of a refused state learn the reason at once. Applies to transports that can refuse."""
    with _transports(make, 2) as (source, receiver):
        if type(source).refuse_checkpoint is CheckpointTransport.refuse_checkpoint:
            return
        waits = threading.Event()
        with _background(lambda: _recv(receiver, source.metadata(), cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            source.refuse_checkpoint(KEY.step, "its trainer raised", key=KEY, dst_ranks=[1])
            refused = _fails(StateUnavailableError, lambda: got.result(BOUND.total_seconds()))
            assert "its trainer raised" in str(refused), str(refused)
        with _offering(source, {"a": 1}, NEXT_KEY):
            assert _recv(receiver, source.metadata(), NEXT_KEY) == {"a": 1}


def check_abort(make: Make) -> None:
    """Check that abort from another thread ends a running receive, and no later one."""
    with _transports(make, 2) as (source, receiver):
        waits = threading.Event()
        with _background(lambda: _recv(receiver, source.metadata(), cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            receiver.abort()
            _fails(TransportClosedError, lambda: got.result(BOUND.total_seconds()))
        if isinstance(make, Together):
            if make.mend is None:
                return
            make.mend([source, receiver])
        with _offering(source, {"a": 1}):
            assert _recv(receiver, source.metadata()) == {"a": 1}


def check_cancelled(make: Make) -> None:
    """Check that the caller's `cancelled` ends a receive."""
    with _transports(make, 2) as (source, receiver):
        answers = itertools.chain([False], itertools.repeat(True))
        _fails(TransportClosedError, lambda: _recv(receiver, source.metadata(), cancelled=lambda: next(answers)))


def check_shutdown(make: Make) -> None:
    """Check that shutdown ends receives, closes the port, and leaves no thread. Later calls raise
    TransportClosedError."""
    before = set(threading.enumerate())
    with _transports(make, 2) as (source, receiver):
        with _offering(source, {"a": 1}):
            _recv(receiver, source.metadata())
        metadata = source.metadata()
        waits = threading.Event()
        with _background(lambda: _recv(receiver, metadata, NEXT_KEY, cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            receiver.shutdown()
            _fails(TransportClosedError, lambda: got.result(BOUND.total_seconds()))
        source.shutdown()
        source.shutdown()
        left = {thread.name for thread in set(threading.enumerate()) - before}
        if isinstance(make, Together):  # the group has its own threads, and continues to run
            left = {name for name in left if name.startswith("tft-ckpt")}
        assert not left, f"threads are left: {left}"
        _fails(TransportClosedError, lambda: _send(source, {"a": 1}))
        _fails(TransportClosedError, lambda: _recv(receiver, metadata))
        if _is_http(source):
            _fails_to_connect(metadata)
            with _transports(make, 1) as (other,):
                _fails(StateUnavailableError, lambda: _recv(other, metadata))


def check_several_readers(make: Make) -> None:
    """Check that twenty concurrent receivers each get the whole state."""
    state = sample_state(num_bytes=4 << 20)
    with _transports(make, 1 + READERS) as (source, *receivers):
        results: list[Future[Any]] = []

        def run(receiver: Transport, result: Future[Any]) -> None:
            try:
                result.set_result(_recv(receiver, source.metadata()))
            except BaseException as error:
                # The check gets it from the future.
                result.set_exception(error)

        threads = []
        with _offering(source, state, dst_ranks=range(1, 1 + READERS)):
            for receiver in receivers:
                results.append(Future())
                threads.append(threading.Thread(target=run, args=(receiver, results[-1]), name="tft-ckpt-check"))
                threads[-1].start()
            for thread, result in zip(threads, results, strict=True):
                thread.join(BOUND.total_seconds())
                assert_same_state(result.result(BOUND.total_seconds()), state)


def check_no_memory(make: Make) -> None:
    """Check that a receiver without memory reports that, and gets the state once there is memory."""
    state = {"bulk": torch.zeros(LARGE_BYTES, dtype=torch.uint8)}
    with _transports(make, 2) as (source, receiver):
        with _offering(source, state, may_fail=True), _little_memory(LARGE_BYTES // 2):
            error = _fails(StateUnavailableError, lambda: _recv(receiver, source.metadata()))
            assert "memory" in str(error), str(error)
        with _offering(source, state):
            assert_same_state(_recv(receiver, source.metadata()), state)


@contextmanager
def _little_memory(num_bytes: int) -> Iterator[None]:
    """Limit this process to this much more address space than it uses now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check_damage_is_mended(make: Make) -> None:
    """Check that a chunk or manifest that is damaged once is fetched again."""
    state = sample_state(num_bytes=10 << 20)
    for on in ("manifest", "data"):
        with _transports(make, 2) as (source, receiver):
            if not _is_http(source):
                return
            with FaultyProxy(source.metadata(), Fault(on, "flip", times=1)) as proxy:
                _send(source, state)
                assert_same_state(_recv(receiver, proxy.url), state)


def check_no_damaged_byte_passes(make: Make) -> None:
    """Check that damage to any byte of an answer, including its head, gives the correct state or an error."""
    state = sample_state(num_bytes=2 << 20)
    head, body = b"HTTP/1.", b"\r\n\r\n"
    places = {
        "status": (head, 3),
        "length": (b"ength: ", 0),
        "magic": (body, 3),
        "version": (body, 8),
        "manifest length": (body, 12),
        "manifest checksum": (body, 20),
        "manifest": (body, 40),
        "a chunk's checksum": (b'"sums":"', 5),
        "data": (body, 1 << 20),
    }
    for what, (after, at) in places.items():
        for on in ("manifest", "data") if after in (head, b"ength: ") else ("data" if what == "data" else "manifest",):
            with _transports(make, 2) as (source, receiver):
                if not _is_http(source):
                    return
                fault = Fault(on, "flip", at=at, after=after, mask=0x01, times=1)
                with FaultyProxy(source.metadata(), fault) as proxy, _offering(source, state):
                    # Another status has another meaning, and the receiver waits for the rest of a length that is too
                    # long.
                    may_fail = (CheckpointError,) if what in ("status", "length") else ()
                    with suppress(*may_fail):
                        got = _recv(receiver, proxy.url, timeout=3 * SHORT if what == "length" else BOUND)
                        assert_same_state(got, state)


def check_no_damaged_message_passes(make: Make) -> None:
    """Check that damage to any byte of a message over a process group gives an error on both sides."""
    state = sample_state(num_bytes=4 << 20)
    offer = {"magic": 1, "version": 8, "kind": 12, "quorum": 16, "step": 32, "lineage": 40, "length": 48, "sum": 56}
    manifest = {"magic": 1, "version": 8, "length": 12, "checksum": 20, "body": 40, "a chunk's checksum": -10}
    answer = {"magic": 1, "version": 8, "code": 12, "key": 32, "checksum": 56, "sentence": 100}
    faults = [
        *((0, GroupFault("flip", message=0, at=at)) for at in offer.values()),
        *((0, GroupFault("flip", message=1, at=at)) for at in manifest.values()),
        *((0, GroupFault("flip", message=message, at=777)) for message in (2, 3)),
        *((1, GroupFault("flip", message=0, at=at)) for at in answer.values()),
        *((1, GroupFault("flip", message=message, at=13)) for message in (1, 2)),
    ]
    for rank, fault in faults:
        with _transports(make, 2, {rank: partial(FaultyGroup, fault=fault)}) as (source, receiver):
            if not isinstance(make, Together):
                return
            with _background(lambda: _send(source, state)) as sent:
                if rank == 0:
                    # A different version may be honest until its checksum shows damage.
                    error = _fails(StateCorruptError, lambda: _recv(receiver, source.metadata()))
                    assert error.source, str(error)
                    _fails(CheckpointError, lambda: sent.result(BOUND.total_seconds()))
                else:
                    # The receiver sends its last answer when it has the whole state. Then only the source sees an
                    # error.
                    with suppress(CheckpointError):
                        assert_same_state(_recv(receiver, source.metadata()), state)
                    _fails(StateCorruptError, lambda: sent.result(BOUND.total_seconds()))
            assert fault.happened.is_set(), fault


def check_a_source_of_a_group_is_killed(make: Make) -> None:
    """Check that the receiver raises an error if the source dies during the transfer."""
    state = sample_state(num_bytes=32 << 20)
    for per_cent in (1, 50, 99):
        if not isinstance(make, Together):
            return
        expected = (StateUnavailableError, TransferTimeoutError) if make.may_miss_a_death else StateUnavailableError
        fault = GroupFault("kill", per_cent=per_cent, of_bytes=state["bulk"].nbytes)
        with _transports(make, 2, {0: partial(FaultyGroup, fault=fault)}) as (source, receiver):
            with _offering(source, state, may_fail=True):
                _fails(expected, partial(_recv, receiver, source.metadata()))
            assert fault.happened.is_set()


def check_a_member_of_a_group_stops(make: Make) -> None:
    """Check that a receiver or source that stalls ends the other side's call at its deadline."""
    state = sample_state(num_bytes=32 << 20)
    for rank in (0, 1):
        if not isinstance(make, Together):
            return
        fault = GroupFault("stall", per_cent=50, of_bytes=state["bulk"].nbytes)
        with _transports(make, 2, {rank: partial(FaultyGroup, fault=fault)}) as (source, receiver):

            def send() -> None:
                source.send_checkpoint([1], KEY.step, state, 4 * SHORT if stops == 1 else BOUND, key=KEY)  # noqa: B023

            def receive() -> None:
                _recv(receiver, source.metadata(), timeout=4 * SHORT if stops == 0 else BOUND)  # noqa: B023

            stops = rank
            waits, hangs = (receive, send) if rank == 0 else (send, receive)
            with _background(hangs) as hung:
                _fails(TransferTimeoutError, waits)
                assert fault.happened.is_set()
                fault.release.set()
                _fails(CheckpointError, lambda: hung.result(BOUND.total_seconds()))


def check_lasting_damage_is_named(make: Make) -> None:
    """Check that a source with only damaged data causes StateCorruptError with its address, or gives way to another
    source.
    """
    state = sample_state(num_bytes=10 << 20)
    for on in ("manifest", "data"):
        fault = Fault(on, "flip", at=1200)
        with _transports(make, 3) as (source, healthy, receiver):
            if not _is_http(source):
                return
            with FaultyProxy(source.metadata(), fault) as proxy:
                _send(source, state)
                _send(healthy, state)
                error = _fails(StateCorruptError, partial(_recv, receiver, proxy.url))
                assert error.source == proxy.url
                assert error.part.split()[0] == ("manifest" if on == "manifest" else "chunk")
                assert_same_state(_recv(receiver, proxy.url, sources=[healthy.metadata()]), state)


def check_a_broken_connection_is_resumed(make: Make) -> None:
    """Check that only the missing part is fetched after a lost connection."""
    state = sample_state(num_bytes=32 << 20)
    total = state["bulk"].nbytes
    with _transports(make, 2) as (source, receiver):
        if not _is_http(source):
            return
        with FaultyProxy(source.metadata(), Fault("data", "cut", at=total // 2, times=1)) as proxy:
            _send(source, state)
            assert_same_state(_recv(receiver, proxy.url), state)
            assert proxy.passed_bytes < 1.3 * total, f"{proxy.passed_bytes} bytes were fetched of {total}"


def check_a_killed_source(make: Make) -> None:
    """Check that another source completes the state if a source dies, and that there is an error without one."""
    state = sample_state(num_bytes=32 << 20)
    total = state["bulk"].nbytes
    for at in (total // 100, total // 2, total * 99 // 100):
        with _transports(make, 3) as (source, second, receiver):
            if not _is_http(source):
                return
            _send(source, state)
            _send(second, state)
            with (
                FaultyProxy(source.metadata(), Fault("data", "kill", at=at)) as dying,
                FaultyProxy(second.metadata()) as alive,
            ):
                assert_same_state(_recv(receiver, dying.url, sources=[alive.url]), state)
                fetched = dying.passed_bytes + alive.passed_bytes
                assert fetched < 1.3 * total, f"{fetched} bytes were fetched of {total}"
                _fails(StateUnavailableError, partial(_recv, receiver, dying.url))


def check_sources_that_differ(make: Make) -> None:
    """Check that two sources with different bytes under one key never give a mixture."""
    state, other = sample_state(seed=1, num_bytes=32 << 20), sample_state(seed=2, num_bytes=32 << 20)
    with _transports(make, 3) as (source, second, receiver):
        if not _is_http(source):
            return
        _send(source, state)
        _send(second, other)
        with FaultyProxy(source.metadata(), Fault("data", "kill", at=16 << 20)) as dying:
            assert_same_state(_recv(receiver, dying.url, sources=[second.metadata()]), other)


def check_a_stalled_reader(make: Make) -> None:
    """Check that a stalled reader delays neither the trainer nor other readers, and gets its own state in the end."""
    state, other = sample_state(seed=1, num_bytes=24 << 20), sample_state(seed=2, num_bytes=24 << 20)
    with _transports(make, 3) as (source, slow, quick):
        if not _is_http(source):
            return
        fault = Fault("data", "stall", at=1 << 20)  # for each connection, because a silent connection is replaced
        _send(source, state)
        with FaultyProxy(source.metadata(), fault) as proxy, _background(lambda: _recv(slow, proxy.url)) as got:
            try:
                assert fault.happened.wait(BOUND.total_seconds())
                assert_same_state(_recv(quick, source.metadata()), state)
                _send(source, other, NEXT_KEY)
                assert_same_state(_recv(quick, source.metadata(), NEXT_KEY), other)
                assert not got.done()
            finally:
                proxy.release()
            assert_same_state(got.result(BOUND.total_seconds()), state)


def check_a_stalled_source(make: Make) -> None:
    """Check that a source that stalls during the transfer causes TransferTimeoutError."""
    with _transports(make, 2) as (source, receiver):
        if not _is_http(source):
            return
        _send(source, sample_state(num_bytes=10 << 20))
        with FaultyProxy(source.metadata(), Fault("data", "stall", at=1 << 20)) as proxy:
            _fails(TransferTimeoutError, lambda: _recv(receiver, proxy.url, timeout=2 * SHORT))


def _is_http(transport: Transport) -> bool:
    return transport.metadata().startswith("http://")


def _fails_to_connect(url: str) -> None:
    parts = urlsplit(url)
    assert parts.hostname is not None
    try:
        socket.create_connection((parts.hostname, parts.port or 0), timeout=BOUND.total_seconds()).close()
    except ConnectionRefusedError:
        return
    raise AssertionError(f"{url} is still listening")


CHECKS: Mapping[str, Callable[[Make], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and check is not check_transport
}
"""Every check by its name."""
