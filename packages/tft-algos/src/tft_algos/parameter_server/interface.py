"""What a user subclasses to write a parameter server, and calls to use one.

A server and one client form a process group of two, a session. So the user needs no protocol of messages: both sides
call the group's collectives, sends and receives. A session knows no lighthouse and no quorum. If the client dies, its
session ends, and the server serves the others.

Law of this file: the public class. What runs behind it is in `server`.
"""

from __future__ import annotations

import abc
import time
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

from tft_algos.errors import ConfigError, SessionRefusedError
from tft_algos.parameter_server.client import requested_session
from tft_algos.parameter_server.joining import join, why_not_joined
from tft_algos.parameter_server.server import SessionServer
from tft_algos.parameter_server.settings import (
    ServerSettings,
    checked_flag,
    resolve_insecure,
    resolve_tls,
    resolve_token,
    seconds_of,
)
from tft_coord.tls import TLS
from tft_pg import ConfigureError, ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo

__all__ = ["ParameterServer"]

_Self = TypeVar("_Self", bound="ParameterServer")
_LEAST_S = 0.001


class ParameterServer(abc.ABC):
    """A server that many clients use at the same time, each over a process group of two.

    Subclass it with `new_process_group` and `forward`. The server is rank 0 of each group, and the client is rank 1. A
    constructor of yours calls this one last, because clients are served as soon as it returns.

    Args:
        port: where clients ask for a session. 0: a free port.
        store_port: of the store at which the two sides of a session meet. 0: a free port.
        bind: the name or address to listen on. None: all interfaces if there is a secret, else loopback.
        advertise_addr: the name or address by which clients reach this machine. None: this machine's own.
        token: the job's secret, which a client must show. None: what TFT_TOKEN or TFT_TOKEN_FILE names. Without a
            secret, only this machine is served.
        insecure: whether to serve other machines without a secret. None: TFT_INSECURE.
        max_sessions: the number of sessions at one time. Further clients get `ServerBusyError`. Each session has a
            thread.
        join_timeout: how long a client may take to configure its group. The session of a client that disconnects before
            then ends at once, and that of a machine that vanishes ends after this time.
        isolate: whether the server runs the Gloo of each session in a child process. Gloo ends its process if a
            message is longer than the tensor that receives it. With False, a client can end the server in this way.
        tls: certificates for the requests of sessions; the groups' own traffic is not encrypted. None: what
            TFT_TLS_CERT, TFT_TLS_KEY and TFT_TLS_CA name.

    Raises: ConfigError: a setting is invalid, a port is taken, or the server would serve other machines without a
        secret.
    """

    def __init__(
        self,
        port: int = 0,
        store_port: int = 0,
        *,
        bind: str | None = None,
        advertise_addr: str | None = None,
        token: str | None = None,
        insecure: bool | None = None,
        max_sessions: int = 64,
        join_timeout: timedelta = timedelta(seconds=60),
        isolate: bool = True,
        tls: TLS | None = None,
    ) -> None:
        self._session_server = SessionServer(
            ServerSettings(
                port=port,
                store_port=store_port,
                bind=bind,
                advertise_addr=advertise_addr,
                max_sessions=max_sessions,
                join_timeout=join_timeout,
            ),
            token=resolve_token(token),
            tls=resolve_tls(tls),
            insecure=resolve_insecure(insecure),
            new_group=self._new_isolated_group if checked_flag("isolate", isolate) else self._new_group,
            forward=self.forward,
        )

    @classmethod
    @abc.abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """Return a new process group that is not configured. Both sides call this once a session.

        The group's timeout bounds each operation, also the wait for the other side's next call. In place of a
        `ProcessGroupGloo`, the server uses a `ProcessGroupBabyGloo` with the same settings, see `isolate`. A group of
        another type is used as it is.
        """

    @classmethod
    def _new_group(cls) -> ProcessGroup:
        group = cls.new_process_group()
        if not isinstance(group, ProcessGroup):
            raise ConfigError(
                f"{cls.__name__}.new_process_group returned {repr(group)[:200]}; return a tft_pg.ProcessGroup, such "
                "as ProcessGroupGloo()"
            )
        return group

    def _new_isolated_group(self) -> ProcessGroup:
        group = self._new_group()
        if not isinstance(group, ProcessGroupGloo):
            return group
        try:
            return ProcessGroupBabyGloo.like(group)
        finally:
            group.shutdown()

    @abc.abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve one session, on a thread of its own. The session ends when this method returns or raises.

        The method runs for several sessions at the same time, so guard what they share. An operation on the group
        raises `PeerDisconnectedError` when the client has left or died, and `AbortedError` when the server stops. Let
        both pass: they end the session, and are no errors.

        Args:
            session_id: of the session.
            pg: the group, in which this process is rank 0 and the client is rank 1. A group of devices has exchanged
                the words of rounds 0 and 1 already.
        """

    @classmethod
    def new_session(
        cls,
        address: str,
        *,
        timeout: timedelta = timedelta(seconds=60),
        token: str | None = None,
        tls: TLS | None = None,
    ) -> ProcessGroup:
        """Open a session as its client, and block until its group is configured.

        Args:
            address: what the server's `address()` returns.
            timeout: for the whole call.
            token: the job's secret. None: what TFT_TOKEN or TFT_TOKEN_FILE names.
            tls: certificates for the request. None: what TFT_TLS_CERT, TFT_TLS_KEY and TFT_TLS_CA name.

        Returns: the group, in which this process is rank 1 and the server is rank 0. Call its `shutdown` to end the
            session.
        Raises:
            ConfigError: an argument is invalid, or `new_process_group` returns no `ProcessGroup`.
            UnreachableError: nothing answers at the address.
            RequestTimeoutError: the server did not answer in time.
            SessionRefusedError: the server opened no session; `ServerBusyError` if it has no room for one or stops. Or
                the process that joined is not the server.
            ConfigureError: the session is open, but its group was not built in time.
        """
        deadline_s = time.monotonic() + seconds_of("timeout", timeout)
        secret, certificates = resolve_token(token), resolve_tls(tls)
        group = cls._new_group()  # before the request, so that no session is opened if this fails
        try:
            left_s = max(_LEAST_S, deadline_s - time.monotonic())
            with requested_session(address, token=secret, timeout_s=left_s, tls=certificates) as session:
                left_s = max(_LEAST_S, deadline_s - time.monotonic())
                if not join(group, session, 1, timedelta(seconds=left_s)):
                    raise SessionRefusedError(
                        f"the parameter server at {address} opened a session, but the process that joined in its place "
                        "does not know the session's key; check who reaches the port of its store",
                        status=200,
                    )
        except ConfigureError as error:
            group.shutdown()
            raise ConfigureError(
                f"the parameter server at {address} opened a session, but {why_not_joined(error, 'its own side')}; "
                "open another session",
                where=error.where,
                missing_ranks=error.missing_ranks,
                unreached=error.unreached,
                is_own=error.is_own,
            ) from error
        except BaseException:
            group.shutdown()
            raise
        return group

    def address(self) -> str:
        """Return the URL for `new_session`, such as `http://host:29600/new_session`."""
        return self._started().address

    def num_sessions(self) -> int:
        """Return the number of open sessions."""
        return self._started().num_sessions

    def shutdown(self) -> None:
        """Stop the server: close its ports, end all sessions, and wait for their threads.

        A client's operation then raises `PeerDisconnectedError`. A `forward` that does not end within 10 s is left
        alone, with a warning. A second call does nothing.
        """
        self._started().shutdown()

    def _started(self) -> SessionServer:
        server: SessionServer | None = getattr(self, "_session_server", None)
        if server is None:
            name = type(self).__name__
            raise ConfigError(f"{name} serves nothing; call super().__init__() as the last line of {name}.__init__")
        return server

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
