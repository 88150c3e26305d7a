"""One blocking call with a deadline, retried when the connection breaks.

Law of this file: attempts, deadlines and the translation of failures; no meaning of any call.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias, final

from tft_coord.errors import (
    ConfigError,
    CoordinationClosedError,
    ProtocolError,
    RefusedError,
    RequestTimeoutError,
    UnreachableError,
)
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.rpc import grpc
from tft_coord.security import call_metadata
from tft_coord.timeouts import Timeouts
from tft_coord.tls import TLS, Certificates, certificates_of
from tft_coord.tokens import Token, looks_again
from tft_coord.transport.address import check_scheme, target
from tft_coord.transport.credentials import open_channel
from tft_coord.transport.diagnosis import diagnose, no_peer, secret_refused
from tft_coord.transport.names import AGAIN_AFTER_S, names
from tft_coord.transport.settings import Options, channel_options, error_of
from tft_coord.wire.limits import MAX_COUNT
from tft_coord.wire.services import UnaryStub, unary_stub

Stub: TypeAlias = Callable[..., bytes]
# No server implements this method: an answer of any kind shows that a gRPC server is there.
_PROBE = "/torchft.TftProbe/Probe"
_AGAIN_S = 0.1
# a server accepts a whole number up to this; it closes the connection on a larger one
LONGEST = timedelta(milliseconds=MAX_COUNT)


def seconds(timeout: timedelta, name: str = "timeout") -> float:
    """Return the timeout in seconds.

    Raises: TypeError: `timeout` is no timedelta. ConfigError: `timeout` is not positive, or is too long to be sent.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"{name} must be a datetime.timedelta, not {type(timeout).__name__}")
    if timeout <= timedelta(0):
        raise ConfigError(f"{name} is {timeout}; give a time above zero")
    if timeout > LONGEST:
        raise ConfigError(f"{name} is {timeout}; give at most {LONGEST.days} days")
    return timeout.total_seconds()


@final
class Caller:
    """A channel to one server.

    Args:
        peer: the kind of server, for messages.
        address: `host:port` or `http://host:port`.
        connect_timeout: how long the constructor tries to reach the server.
        token: shared secret of the job, or a file with it, or None.
        timeouts: heartbeat_timeout_ms bounds how long a call retries a broken connection.
        is_known: the server is known to run at this address, so the first call connects and the constructor does not
            probe.
        waits: retry for the whole connect_timeout when the port refuses connections or the name is unknown, because the
            server may start later.
        tls: of the job, or None.
    Raises: ConfigError: the address is invalid. UnreachableError: no server answered. ProtocolError: another kind of
        server answered.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        connect_timeout: timedelta,
        token: Token,
        timeouts: Timeouts,
        *,
        is_known: bool = False,
        waits: bool = True,
        tls: TLS | None = None,
    ) -> None:
        self.target = target(address)
        check_scheme(address, has_certificates=tls is not None)
        self._peer_kind = peer
        self.peer = f"the {peer} at {self.target}"
        self._retry_for_s = timeouts.heartbeat_timeout_ms / 1000
        self._token = token
        within_s = seconds(connect_timeout, "connect_timeout")
        self._tls = tls
        self._closed = False
        self._parent_pid = 0  # in a forked child: the process that owns this client
        self._channel = _Channel(self.target, channel_options(timeouts), tls)
        let_go_in_child(self)
        resolved = names.look_up(self.target)
        try:
            if not is_known:
                self._probe(within_s, waits=waits)
                resolved.wait(AGAIN_AFTER_S)  # grpc has resolved the name already, so this wait is short
        except BaseException:
            self._channel.close()
            raise

    def stub(self, method: str) -> Stub:
        """Return the stub of this method, for `call`."""
        return self._channel.stub(method)

    def call(self, stub: Stub, request: bytes, timeout_s: float, what: str, *, again: bool) -> bytes:
        """Call the method and wait for the answer.

        Args:
            stub: of the method.
            request: the encoded request.
            timeout_s: time limit for the answer.
            what: names the call in messages.
            again: the request is idempotent, so the client may resend it on a new connection.
        Raises: an error of tft_coord.errors, never one of grpc.
        """
        give_up_at = time.monotonic() + timeout_s
        broken_since: float | None = None
        is_refused = False
        while True:
            metadata = call_metadata(self._token)
            tried_at = time.monotonic()
            self._check_open(what)
            if tried_at >= give_up_at:
                raise RequestTimeoutError(f"{what}: no answer from {self.peer} within {timeout_s:g} s")
            try:
                return stub(request, timeout=give_up_at - tried_at, metadata=metadata)
            except grpc.RpcError as failure:
                error = error_of(failure, f"{what}, sent to {self.peer}")
                self._check_open(what)
                if failure.code() is grpc.StatusCode.UNAUTHENTICATED:
                    if not is_refused and (looks_again(self._token) or metadata != call_metadata(self._token)):
                        is_refused = True  # the secret has changed meanwhile
                        continue
                    refused = secret_refused(failure.details() or "no reason given", shown=bool(metadata))
                    raise RefusedError(f"{self.peer} {refused}", code="unauthenticated") from None
                if not isinstance(error, UnreachableError) or not again:
                    raise error from None  # grpc's own text only repeats this error
                now = time.monotonic()
                # A call that waited before it failed had a connection until now.
                if broken_since is None or now - tried_at > 1.0:
                    broken_since = now
                    self._check_trust()
                if now - broken_since >= self._retry_for_s:
                    raise error from None
            except ValueError as error:  # grpc raises ValueError when the channel closes between two lines
                raise CoordinationClosedError(f"{what}: this client was closed; make a new one") from error
            names.look_up(self.target)  # grpc resolves the name too, and the server may have moved
            time.sleep(random.uniform(0.05, 0.1))

    def close(self) -> None:
        """Close the channel; calls in progress end with CoordinationClosedError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._channel.close()

    def forked(self) -> Inheritance:
        """Mark the copy in a forked child as closed and return what it inherits.

        The connection belongs to the parent.
        """
        was_closed, self._closed, self._parent_pid = self._closed, True, os.getppid()
        return Inheritance(places=() if was_closed else names.places(self.target), kept=[self._channel])

    def _check_open(self, what: str) -> None:
        if self._parent_pid:
            raise CoordinationClosedError(
                f"{what}: this client belongs to process {self._parent_pid}, from which process {os.getpid()} was "
                "forked; use it there, or make a new one here"
            )
        if self._closed:
            raise CoordinationClosedError(f"{what}: this client was closed; make a new one")

    def _check_trust(self) -> None:
        """Raise ProtocolError if the connection broke because the server has other certificates, or none."""
        why = diagnose(self.target, self._tls) if self._tls is not None else None
        if isinstance(why, ProtocolError):
            raise ProtocolError(f"{self.peer} {no_peer(self._peer_kind, why)}") from None

    def _probe(self, within_s: float, *, waits: bool) -> None:
        """Check that a gRPC server answers.

        A failure that waiting can't repair, such as another kind of server, raises at once.
        """
        give_up_at = time.monotonic() + within_s
        left_s, again = within_s, False
        while True:
            failure = self._failure(left_s, wait_for_ready=again)
            if failure is None:
                return
            why = diagnose(self.target, self._tls)
            left_s = give_up_at - time.monotonic()
            if not waits or isinstance(why, ProtocolError) or left_s <= 0:
                break
            if again:
                # A proxy that speaks HTTP/2 answers at once, and each time, that the server behind it is unavailable.
                if failure.code() is not grpc.StatusCode.UNAVAILABLE:
                    break
                time.sleep(_AGAIN_S)
                left_s = max(left_s - _AGAIN_S, _AGAIN_S)
            again = True
        within = f" within {within_s:g} s (connect_timeout)" if left_s <= 0 else ""
        kind = UnreachableError if isinstance(why, UnreachableError) else ProtocolError
        raise kind(f"{self.peer} {no_peer(self._peer_kind, why, within=within)}") from None

    def _failure(self, within_s: float, *, wait_for_ready: bool) -> grpc.RpcError | None:
        """Return why no gRPC server has answered, or None if one has."""
        try:
            self.stub(_PROBE)(b"", timeout=within_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as failure:
            answered = failure.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)
            return None if answered else failure
        return None


@final
class _Channel:
    """A channel to one address. With TLS it is another one when the certificates have changed.

    The one before stays open for the calls in progress on it.
    """

    def __init__(self, address: str, options: Options, tls: TLS | None) -> None:
        self._address = address
        self._options = options
        self._tls = tls
        self._lock = threading.Lock()
        self._certificates: Certificates | None = None
        self._open: list[grpc.Channel] = []
        self._is_closed = False
        if tls is None:
            self._open.append(open_channel(address, options, None))

    def stub(self, method: str) -> Stub:
        """Return a stub that uses the channel of the moment of each call."""
        if self._tls is None:
            return unary_stub(self._open[0], method)
        made: dict[grpc.Channel, UnaryStub] = {}

        def call(request: bytes, **options: Any) -> bytes:
            channel = self._present()
            if channel not in made:
                made.clear()
                made[channel] = unary_stub(channel, method)
            return made[channel](request, **options)

        return call

    def _present(self) -> grpc.Channel:
        """Return the channel with the present certificates. Raises: ValueError: it was closed."""
        assert self._tls is not None
        found = certificates_of(self._tls)
        with self._lock:
            if self._is_closed:
                raise ValueError("closed")
            if found is not self._certificates:
                self._certificates = found
                self._open.append(open_channel(self._address, self._options, self._tls))
                if len(self._open) > 2:
                    self._open.pop(0).close()
            return self._open[-1]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for channel in self._open:
            channel.close()
