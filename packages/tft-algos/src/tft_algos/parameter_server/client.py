"""The client's request for a session, and its connection until both sides have joined.

Law of this file: one HTTP request with a deadline, and the errors that it can end with.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

from tft_algos.errors import ServerBusyError, SessionRefusedError
from tft_algos.parameter_server.routes import (
    ANSWER_BYTES_MAX,
    HOLDS_HEADER,
    NEW_SESSION_ROUTE,
    OpenedSession,
    parse_address,
    parse_answer,
)
from tft_ckpt import TransferTimeoutError
from tft_ckpt.transfer.connection import Connection, SourceSilentError, StopSignal
from tft_coord.errors import RequestTimeoutError, UnreachableError
from tft_coord.security import call_metadata
from tft_coord.tls import TLS
from tft_coord.tokens import Token
from tft_coord.transport.trust import why_untrusted

__all__ = ["requested_session"]

_SENTENCE_CHARS_MAX = 300


@contextmanager
def requested_session(
    address: str, *, token: Token, timeout_s: float, tls: TLS | None = None
) -> Iterator[OpenedSession]:
    """Ask a parameter server for a session, which the caller joins inside the context.

    The connection stays open inside the context. If it ends early, because this process dies or the caller raises, the
    server ends the session at once. The end of the context waits until the server has joined too.

    Args:
        address: what the server's `address()` returns.
        token: the job's secret, or None.
        timeout_s: for the whole context.
        tls: certificates for the connection, or None.

    Raises:
        ConfigError: the address is malformed.
        UnreachableError: nothing answers there, or the connection was lost.
        RequestTimeoutError: there was no complete answer in time, or the server has not joined in time.
        ServerBusyError: the server has no room for a session, or stops.
        SessionRefusedError: the secret is wrong, the server can't make a group, or it is not a parameter server.
    """
    host, port = parse_address(address, has_certificates=tls is not None)
    headers = {HOLDS_HEADER: "1", **dict(call_metadata(token))}
    context = None if tls is None else tls.client_context()
    late = (
        f"the parameter server at {address} did not answer within {timeout_s:.3g} s; check whether its process is "
        "stopped, and the network to it"
    )
    with ExitStack() as held:
        try:
            stop = held.enter_context(closing(StopSignal(timeout_s, None)))
            connection = held.enter_context(
                closing(Connection(host, port, silence_s=timeout_s, stop=stop, tls=context))
            )
            response = connection.get(NEW_SESSION_ROUTE, headers)
            read = response.readline if response.status == 200 else response.read
            status, body = response.status, read(ANSWER_BYTES_MAX + 1)
        except (TransferTimeoutError, SourceSilentError) as error:
            raise RequestTimeoutError(late) from error
        except (OSError, http.client.HTTPException) as error:
            untrusted = why_untrusted(error, host) if isinstance(error, OSError) else None
            if untrusted is not None:
                raise SessionRefusedError(
                    f"the parameter server at {address} can't be used: {untrusted}", status=0
                ) from error
            raise UnreachableError(
                f"the parameter server at {address} can't be reached ({error or type(error).__name__}); check the "
                "address, and that the server runs"
            ) from error
        yield _opened(address, status, body)
        try:
            # A session that ends instead is an error of the group's next operation.
            with suppress(http.client.HTTPException, ConnectionError):
                response.read(1)
        except (TransferTimeoutError, SourceSilentError) as error:
            raise RequestTimeoutError(late) from error


def _opened(address: str, status: int, body: bytes) -> OpenedSession:
    """Return the session of an answer. Raises: ServerBusyError, SessionRefusedError: there is none."""
    if status == 200 and len(body) <= ANSWER_BYTES_MAX:
        try:
            return parse_answer(body)
        except ValueError as error:
            raise _not_a_parameter_server(address, str(error)) from error
    if status == 200:
        raise _not_a_parameter_server(address, f"its answer has more than {ANSWER_BYTES_MAX} bytes")
    raise _refusal(address, status, body)


def _not_a_parameter_server(address: str, why: str) -> SessionRefusedError:
    return SessionRefusedError(
        f"the server at {address} does not answer like a parameter server ({why}); check the address", status=200
    )


def _refusal(address: str, status: int, body: bytes) -> SessionRefusedError:
    text = body[:_SENTENCE_CHARS_MAX].decode("ascii", "replace")
    sentence = "".join(each if each.isprintable() else " " for each in text).strip() or "it gave no reason"
    kind = ServerBusyError if status == 503 else SessionRefusedError
    return kind(f"the parameter server at {address} opened no session ({status}): {sentence}", status=status)
