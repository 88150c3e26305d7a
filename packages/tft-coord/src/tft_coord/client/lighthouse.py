"""`LighthouseClient`: torchft's unary calls to a lighthouse, of this project or of torchft.

Law of this file: one method for each call.
"""

from __future__ import annotations

import json
from datetime import timedelta
from types import TracebackType
from typing import Any, final

from tft_coord.client.caller import Caller, Stub, seconds
from tft_coord.compat.views import LighthouseDescription, Quorum, quorum_view
from tft_coord.core.events import DrainRequested
from tft_coord.core.types import Member
from tft_coord.errors import (
    ConfigError,
    CoordinationError,
    ProtocolError,
    RequestTimeoutError,
    UnknownCallError,
    UnreachableError,
)
from tft_coord.timeouts import Timeouts
from tft_coord.tls import TLS
from tft_coord.tokens import Token
from tft_coord.transport.diagnosis import OF_ANOTHER_KIND
from tft_coord.wire import codec, services


@final
class LighthouseClient:
    """A client without a stream. Several threads may call it at the same time.

    Args:
        addr: of the lighthouse, `host:port` or `http://host:port`.
        connect_timeout: how long the constructor tries to reach the lighthouse.
        token: shared secret, a `TokenFile` with it, or None.
        waits: retry for the whole connect_timeout when the server is not there yet or its name is unknown. False: use
            the connect_timeout only for a connection that takes long.
        tls: certificates for the connection; None: it is not encrypted.
    Raises: ConfigError: the address is invalid. UnreachableError: no server answered. ProtocolError: another kind of
        server answered.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta = timedelta(seconds=60),
        *,
        token: Token = None,
        waits: bool = True,
        tls: TLS | None = None,
    ) -> None:
        self._caller = Caller("lighthouse", addr, connect_timeout, token, Timeouts(), waits=waits, tls=tls)
        self._quorum_stub = self._caller.stub(services.LIGHTHOUSE_QUORUM)
        self._describe_stub = self._caller.stub(services.LIGHTHOUSE_DESCRIBE)
        self._heartbeat_stub = self._caller.stub(services.LIGHTHOUSE_HEARTBEAT)
        self._drain_stub = self._caller.stub(services.LIGHTHOUSE_DRAIN)

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str = "",
        store_address: str = "",
        step: int = 0,
        world_size: int = 0,
        shrink_only: bool = False,
        data: dict[str, Any] | None = None,
    ) -> Quorum:
        """Ask for a quorum that contains this replica and wait for it; counts as a heartbeat.

        Args:
            replica_id: of the replica that asks.
            timeout: time limit for the quorum. When it passes, the request is withdrawn, so that no later quorum
                contains a member that has gone.
            address, store_address, step, world_size, shrink_only: sent to all members.
            data: a JSON object of the user, sent to all members.
        Raises: TypeError: data is no dict, timeout no timedelta. ConfigError: data is not JSON. RequestTimeoutError.
        """
        if data is not None and not isinstance(data, dict):
            raise TypeError(f"data must be a dict or None, not {type(data).__name__}")
        try:
            encoded_data = "" if data is None else json.dumps(data)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data of replica {replica_id} can't be written as JSON: {error}") from error
        member = Member(
            replica_id,
            address=address,
            store_address=store_address,
            step=step,
            world_size=world_size,
            shrink_only=shrink_only,
            data=encoded_data,
        )
        request = codec.encode_lighthouse_request(member)
        what = f"replica {replica_id}'s quorum for step {step}"
        answer = self._caller.call(self._quorum_stub, request, seconds(timeout), what, again=True)
        return quorum_view(codec.decode_lighthouse_response(answer))

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Send a heartbeat. Raises: RequestTimeoutError, UnreachableError."""
        request = codec.encode_heartbeat(replica_id)
        what = f"replica {replica_id}'s heartbeat"
        self._caller.call(self._heartbeat_stub, request, seconds(timeout), what, again=False)

    def describe(self, timeout: timedelta = timedelta(seconds=5)) -> LighthouseDescription:
        """Return the lighthouse's description of itself: version, clock, timeouts, jobs.

        torchft's lighthouse does not support this call.

        Raises: UnknownCallError: the lighthouse is torchft's. ProtocolError: the server is no lighthouse.
            RefusedError: the secret is wrong. RequestTimeoutError, UnreachableError.
        """
        what = "a request for its description"
        answer = self._call_ours(self._describe_stub, b"", seconds(timeout), what, again=False)
        return codec.decode_description(answer)

    def drain(
        self,
        job: str,
        replica_id: str,
        timeout: timedelta = timedelta(seconds=5),
        *,
        reason: str = "",
        serve: timedelta | None = None,
    ) -> None:
        """Ask a replica to leave its job after its current step. The lighthouse repeats the request until the replica
        has left.

        Args:
            job: of the replica.
            replica_id: its id, or the name in it (before the colon) if exactly one live replica has that name.
            timeout: time limit for the lighthouse to accept the request.
            reason: why; the replica logs it, with the address of the caller.
            serve: for how long the replica may serve its state to healing replicas; None: the replica's default.
        Raises: RefusedError: there is no such job or replica (the message lists those present), or the secret is wrong.
            UnknownCallError: the lighthouse is torchft's. ProtocolError: the server is no lighthouse.
            RequestTimeoutError, UnreachableError.
        """
        serve_ms = 0 if serve is None else int(1_000 * seconds(serve, "serve"))
        request = codec.encode_drain(DrainRequested(0, job, replica_id, reason, serve_ms))
        self._call_ours(self._drain_stub, request, seconds(timeout), f"a request to drain {replica_id}", again=True)

    def close(self) -> None:
        """Close the channel; calls in progress end with CoordinationClosedError. Idempotent."""
        self._caller.close()

    def _call_ours(self, stub: Stub, request: bytes, timeout_s: float, what: str, *, again: bool) -> bytes:
        """Make a call that neither torchft's lighthouse nor another program's server knows."""
        try:
            return self._caller.call(stub, request, timeout_s, what, again=again)
        except UnknownCallError:
            pass
        try:
            # A request without a member changes nothing on the server; a lighthouse refuses it.
            self._caller.call(self._quorum_stub, b"", timeout_s, what, again=False)
        except UnknownCallError:
            raise ProtocolError(f"{self._caller.peer} is not a lighthouse: {OF_ANOTHER_KIND}") from None
        except (RequestTimeoutError, UnreachableError):
            raise
        except CoordinationError:
            pass  # the server knows the quorum call, so it is a lighthouse
        raise UnknownCallError(
            f"{self._caller.peer} is torchft's, which does not support this call ({what}); start tft-lighthouse there"
        )

    def __enter__(self) -> LighthouseClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
