"""`LighthouseClient`: torchft's unary calls to a lighthouse, ours or theirs.

Law of this file: one method a call.
"""

from __future__ import annotations

import json
from datetime import timedelta
from types import TracebackType
from typing import Any, final

from tft_coord.client.caller import Caller, seconds
from tft_coord.core.events import DrainRequested
from tft_coord.core.types import Member
from tft_coord.errors import CoordinationError, DeadlinePassed, ProtocolError, SettingError, UnknownCall, Unreachable
from tft_coord.timeouts import Timeouts
from tft_coord.transport.listener import OF_ANOTHER_KIND
from tft_coord.views import LighthouseDescription, Quorum, quorum_view
from tft_coord.wire import codec, services
from tft_coord.wire.services import UnaryStub


@final
class LighthouseClient:
    """A client without a stream. Calls may come from any thread, several at once.

    Args:
        addr: of the lighthouse, `host:port` or `http://host:port`.
        connect_timeout: how long the constructor tries to reach it.
        token: shared secret, or None.
        waits: a server that is not there yet, or whose name is unknown, is tried for the whole connect_timeout. False:
            only a connection that takes long is.
    Raises: SettingError: the address is none. Unreachable: nobody answered. ProtocolError: another kind of server did.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta = timedelta(seconds=60),
        *,
        token: str | None = None,
        waits: bool = True,
    ) -> None:
        self._caller = Caller("lighthouse", addr, connect_timeout, token, Timeouts(), waits=waits)
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
            replica_id: who asks.
            timeout: within which it must be here. When it passes, the request is withdrawn: no later quorum contains
                a member that is not there.
            address, store_address, step, world_size, shrink_only: told to all members.
            data: a JSON object of the user's own, told to all members.
        Raises: TypeError: data is no dict, timeout no timedelta. SettingError: data is not JSON. DeadlinePassed.
        """
        if data is not None and not isinstance(data, dict):
            raise TypeError(f"data must be a dict or None, not {type(data).__name__}")
        try:
            encoded_data = "" if data is None else json.dumps(data)
        except (TypeError, ValueError) as error:
            raise SettingError(f"data of replica {replica_id} can't be written as JSON: {error}") from error
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
        """Give a sign of life. Raises: DeadlinePassed, Unreachable."""
        request = codec.encode_heartbeat(replica_id)
        what = f"replica {replica_id}'s heartbeat"
        self._caller.call(self._heartbeat_stub, request, seconds(timeout), what, again=False)

    def describe(self, timeout: timedelta = timedelta(seconds=5)) -> LighthouseDescription:
        """What the lighthouse says of itself: version, clock, time-outs, jobs. Only ours does.

        Raises: UnknownCall: it is torchft's. ProtocolError: it is none. Refused: the secret is wrong.
            DeadlinePassed, Unreachable.
        """
        what = "what the lighthouse says of itself"
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
        """Ask a replica to leave its job after its running step. It is asked again until it has left.

        Args:
            job: that it belongs to.
            replica_id: its id, or the name in it (before the colon) if one living replica has that.
            timeout: within which the lighthouse must have taken it.
            reason: why; the replica logs it, and who asked.
            serve: for how long it may serve its state to those that heal; None: its own default.
        Raises: Refused: there is no such job or replica, the message says who is there; or the secret is wrong.
            UnknownCall: it is torchft's. ProtocolError: it is none. DeadlinePassed, Unreachable.
        """
        serve_ms = 0 if serve is None else int(1_000 * seconds(serve, "serve"))
        request = codec.encode_drain(DrainRequested(0, job, replica_id, reason, serve_ms))
        self._call_ours(self._drain_stub, request, seconds(timeout), f"draining {replica_id}", again=True)

    def close(self) -> None:
        """Calls under way end with Closed. Idempotent."""
        self._caller.close()

    def _call_ours(self, stub: UnaryStub, request: bytes, timeout_s: float, what: str, *, again: bool) -> bytes:
        """A call that torchft's lighthouse does not know, nor does another program's server."""
        try:
            return self._caller.call(stub, request, timeout_s, what, again=again)
        except UnknownCall:
            pass
        try:
            # Without a member in it a request changes nothing there; a lighthouse refuses it.
            self._caller.call(self._quorum_stub, b"", timeout_s, what, again=False)
        except UnknownCall:
            raise ProtocolError(f"{self._caller.peer} is no lighthouse: {OF_ANOTHER_KIND}") from None
        except (DeadlinePassed, Unreachable):
            raise
        except CoordinationError:
            pass  # it knows the call
        raise UnknownCall(
            f"{self._caller.peer} is torchft's, which does not know this call ({what}); start tft-lighthouse there"
        )

    def __enter__(self) -> LighthouseClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
