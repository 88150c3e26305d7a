"""What every transport must do.

Each check makes its own transports and ends them. `check_transport(make)` runs them all; a test suite that wants one
test for each takes them from `CHECKS`. Checks that put a proxy between the two sides concern transports whose metadata
is an http URL, and pass over others.

Law of this file: plain assertions; waits end with an event, and `BOUND` only says when to give up.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import torch

from tft_ckpt.errors import (
    CheckpointError,
    Closed,
    DeadlinePassed,
    StateCorrupt,
    StateMismatch,
    StateUnavailable,
    StateUnsupported,
    WrongSetting,
)
from tft_ckpt.key import StateKey
from tft_ckpt.testing.proxy import Fault, FaultyProxy
from tft_ckpt.testing.states import assert_same_state, sample_state
from tft_ckpt.transport import CheckpointTransport

__all__ = ["CHECKS", "check_transport"]

Transport: TypeAlias = CheckpointTransport[Any]
Make: TypeAlias = Callable[[], Transport]

BOUND = timedelta(seconds=30)
SHORT = timedelta(milliseconds=300)

KEY = StateKey(quorum_id=3, nonce=2**64 - 1, step=5, lineage=0xABC)
NEXT_KEY = StateKey(quorum_id=4, nonce=7, step=6, lineage=0xDEF)


def check_transport(make: Make) -> None:
    """Run every check.

    Args:
        make: gives a new transport, which serves from then on; those it gives can reach each other.
    Raises: AssertionError, or what the transport raised.
    """
    for check in CHECKS.values():
        check(make)


@contextmanager
def _transports(make: Make, count: int) -> Iterator[list[Transport]]:
    made: list[Transport] = []
    try:
        for _ in range(count):
            made.append(make())
        yield made
    finally:
        for transport in made:
            transport.shutdown()


def _send(source: Transport, state: object, key: StateKey = KEY) -> None:
    source.send_checkpoint([1], key.step, state, BOUND, key=key)


def _telling(event: threading.Event) -> Callable[[], bool]:
    """A cancelled callback that says when it is first asked, which is when the receive has begun to wait."""

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
            # The future hands it to the check.
            future.set_exception(error)

    thread = threading.Thread(target=run, name="tft-ckpt-check")
    thread.start()
    try:
        yield future
    finally:
        thread.join(BOUND.total_seconds())
        assert not thread.is_alive(), "a call did not return"


def check_round_trip(make: Make) -> None:
    """What arrives is what was sent, to the bit, and can be written to."""
    state = sample_state()
    with _transports(make, 2) as (source, receiver):
        _send(source, state)
        seen: list[tuple[int, int]] = []
        got = _recv(receiver, source.metadata(), progress=lambda done, total: seen.append((done, total)))
        assert_same_state(got, state)
        got["bulk"].zero_()
        assert seen == sorted(seen), "progress went back"
        assert seen[-1][0] == seen[-1][1] >= state["bulk"].nbytes, seen[-1]


def check_torchft_arguments(make: Make) -> None:
    """torchft's positional arguments and no key; empty states travel as well."""
    with _transports(make, 2) as (source, receiver):
        for step, state in enumerate(({}, {"a": torch.empty(0)}, {"a": 1}, [torch.zeros(3)])):
            source.send_checkpoint([1], step, state, BOUND)
            assert_same_state(receiver.recv_checkpoint(0, source.metadata(), step, BOUND), state)
            source.disallow_checkpoint()
        _fails(WrongSetting, lambda: source.send_checkpoint([1], KEY.step + 1, {}, BOUND, key=KEY))
        _fails(WrongSetting, lambda: _recv(receiver, source.metadata(), timeout=timedelta(0)))


def check_the_copy_is_of_its_moment(make: Make) -> None:
    """After disallow_checkpoint the trainer may write to its tensors."""
    weight = torch.ones(1000)
    with _transports(make, 2) as (source, receiver):
        _send(source, {"weight": weight})
        source.disallow_checkpoint()
        weight.zero_()
        assert_same_state(_recv(receiver, source.metadata()), {"weight": torch.ones(1000)})


def check_another_state_is_refused(make: Make) -> None:
    """A state with another step, quorum, nonce or lineage never arrives in place of the one asked for."""
    others = [
        StateKey(quorum_id=KEY.quorum_id, nonce=KEY.nonce, step=KEY.step - 1, lineage=KEY.lineage),
        StateKey(quorum_id=KEY.quorum_id - 1, nonce=KEY.nonce, step=KEY.step, lineage=KEY.lineage),
        StateKey(quorum_id=KEY.quorum_id, nonce=KEY.nonce - 1, step=KEY.step, lineage=KEY.lineage),
        StateKey(quorum_id=KEY.quorum_id, nonce=KEY.nonce, step=KEY.step, lineage=KEY.lineage + 1),
    ]
    with _transports(make, 2) as (source, receiver):
        _send(source, {"a": 1})
        for other in others:
            error = _fails(StateMismatch, partial(_recv, receiver, source.metadata(), other))
            assert (error.wanted, error.offered) == (other, KEY)
        _send(source, {"a": 2}, NEXT_KEY)
        _fails(StateMismatch, lambda: _recv(receiver, source.metadata(), KEY))
        assert _recv(receiver, source.metadata(), NEXT_KEY) == {"a": 2}


def check_waiting_for_the_source(make: Make) -> None:
    """Who asks before the source has taken its snapshot waits, and gets it."""
    with _transports(make, 2) as (source, receiver):
        waits = threading.Event()
        with _background(lambda: _recv(receiver, source.metadata(), NEXT_KEY, cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            _send(source, {"a": 1}, KEY)
            _send(source, {"a": 2}, NEXT_KEY)
            assert got.result(BOUND.total_seconds()) == {"a": 2}


def check_the_deadline(make: Make) -> None:
    """What never comes ends with DeadlinePassed, which is a TimeoutError."""
    with _transports(make, 2) as (source, receiver):
        error = _fails(DeadlinePassed, lambda: _recv(receiver, source.metadata(), timeout=SHORT))
        assert error.timeout_s == SHORT.total_seconds()
    assert issubclass(DeadlinePassed, TimeoutError)


def check_a_failed_snapshot_is_told(make: Make) -> None:
    """A state that can't travel is refused with its path, and who waits for it is told at once."""
    with _transports(make, 2) as (source, receiver):
        waits = threading.Event()
        with _background(lambda: _recv(receiver, source.metadata(), cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            error = _fails(StateUnsupported, lambda: _send(source, {"a": {"b": object()}}))
            assert error.path == "state['a']['b']"
            _fails(StateUnavailable, lambda: got.result(BOUND.total_seconds()))
        _send(source, {"a": 1})
        assert _recv(receiver, source.metadata()) == {"a": 1}


def check_abort(make: Make) -> None:
    """abort from another thread ends a running receive, and no later one."""
    with _transports(make, 2) as (source, receiver):
        waits = threading.Event()
        with _background(lambda: _recv(receiver, source.metadata(), cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            receiver.abort()
            _fails(Closed, lambda: got.result(BOUND.total_seconds()))
        _send(source, {"a": 1})
        assert _recv(receiver, source.metadata()) == {"a": 1}


def check_cancelled(make: Make) -> None:
    """The caller's own word ends a receive."""
    with _transports(make, 2) as (source, receiver):
        answers = iter([False, True])
        _fails(Closed, lambda: _recv(receiver, source.metadata(), cancelled=lambda: next(answers)))


def check_shutdown(make: Make) -> None:
    """shutdown ends receives, closes the port, and leaves no thread; what is called afterwards says so."""
    before = set(threading.enumerate())
    with _transports(make, 2) as (source, receiver):
        _send(source, {"a": 1})
        metadata = source.metadata()
        waits = threading.Event()
        with _background(lambda: _recv(receiver, metadata, NEXT_KEY, cancelled=_telling(waits))) as got:
            assert waits.wait(BOUND.total_seconds())
            receiver.shutdown()
            _fails(Closed, lambda: got.result(BOUND.total_seconds()))
        source.shutdown()
        source.shutdown()
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert not left, f"threads are left: {left}"
        _fails(Closed, lambda: _send(source, {"a": 1}))
        _fails(Closed, lambda: _recv(receiver, metadata))
        if _is_http(source):
            _fails_to_connect(metadata)
        with _transports(make, 1) as (other,):
            _fails(StateUnavailable, lambda: _recv(other, metadata))


def check_several_readers(make: Make) -> None:
    """Several receivers at once each get the whole."""
    state = sample_state(num_bytes=4 << 20)
    with _transports(make, 5) as (source, *receivers):
        _send(source, state)
        results: list[Future[Any]] = []

        def run(receiver: Transport, result: Future[Any]) -> None:
            try:
                result.set_result(_recv(receiver, source.metadata()))
            except BaseException as error:
                # The future hands it to the check.
                result.set_exception(error)

        threads = []
        for receiver in receivers:
            results.append(Future())
            threads.append(threading.Thread(target=run, args=(receiver, results[-1])))
            threads[-1].start()
        for thread, result in zip(threads, results, strict=True):
            assert_same_state(result.result(BOUND.total_seconds()), state)
            thread.join()


def check_damage_is_mended(make: Make) -> None:
    """A chunk or manifest that is damaged once is fetched again."""
    state = sample_state(num_bytes=10 << 20)
    for on in ("manifest", "data"):
        with _transports(make, 2) as (source, receiver):
            if not _is_http(source):
                return
            with FaultyProxy(source.metadata(), Fault(on, "flip", times=1)) as proxy:
                _send(source, state)
                assert_same_state(_recv(receiver, proxy.url), state)


def check_lasting_damage_is_named(make: Make) -> None:
    """A source that serves nothing but damage ends in StateCorrupt with its address, or in another source's state."""
    state = sample_state(num_bytes=10 << 20)
    for on in ("manifest", "data"):
        fault = Fault(on, "flip", at=1200)
        with _transports(make, 3) as (source, healthy, receiver):
            if not _is_http(source):
                return
            with FaultyProxy(source.metadata(), fault) as proxy:
                _send(source, state)
                _send(healthy, state)
                error = _fails(StateCorrupt, partial(_recv, receiver, proxy.url))
                assert error.source == proxy.url
                assert error.part.split()[0] == ("manifest" if on == "manifest" else "chunk")
                assert_same_state(_recv(receiver, proxy.url, sources=[healthy.metadata()]), state)


def check_a_broken_connection_is_resumed(make: Make) -> None:
    """After a break, only what is missing is fetched."""
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
    """When a source dies on the way, another one completes the state; without one, there is an error."""
    state = sample_state(num_bytes=32 << 20)
    total = state["bulk"].nbytes
    for at in (total // 100, total // 2, total * 99 // 100):
        with _transports(make, 3) as (source, second, receiver):
            if not _is_http(source):
                return
            _send(source, state)
            _send(second, state)
            with (
                FaultyProxy(source.metadata(), Fault("data", "kill", at=at)) as dies,
                FaultyProxy(second.metadata()) as lives,
            ):
                assert_same_state(_recv(receiver, dies.url, sources=[lives.url]), state)
                fetched = dies.passed_bytes + lives.passed_bytes
                assert fetched < 1.3 * total, f"{fetched} bytes were fetched of {total}"
                _fails(StateUnavailable, partial(_recv, receiver, dies.url))


def check_sources_that_differ(make: Make) -> None:
    """If the second source has other bytes under the same key, the state is one source's, never a mixture."""
    state, other = sample_state(seed=1, num_bytes=32 << 20), sample_state(seed=2, num_bytes=32 << 20)
    with _transports(make, 3) as (source, second, receiver):
        if not _is_http(source):
            return
        _send(source, state)
        _send(second, other)
        with FaultyProxy(source.metadata(), Fault("data", "kill", at=16 << 20)) as dies:
            assert_same_state(_recv(receiver, dies.url, sources=[second.metadata()]), other)


def check_a_stalled_reader(make: Make) -> None:
    """A reader that stops reading holds up neither the trainer nor other readers, and gets its own state in the end."""
    state, other = sample_state(seed=1, num_bytes=24 << 20), sample_state(seed=2, num_bytes=24 << 20)
    with _transports(make, 3) as (source, slow, quick):
        if not _is_http(source):
            return
        fault = Fault("data", "stall", at=1 << 20, times=1)
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
    """A source that falls silent on the way ends with the deadline, naming how far it came."""
    with _transports(make, 2) as (source, receiver):
        if not _is_http(source):
            return
        _send(source, sample_state(num_bytes=10 << 20))
        with FaultyProxy(source.metadata(), Fault("data", "stall", at=1 << 20)) as proxy:
            _fails(DeadlinePassed, lambda: _recv(receiver, proxy.url, timeout=2 * SHORT))


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
