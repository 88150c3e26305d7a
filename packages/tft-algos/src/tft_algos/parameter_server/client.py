"""The client's request for a session.

Law of this file: one HTTP request with a deadline, and the errors that it can end with.
"""

from __future__ import annotations

import http.client
from contextlib import closing

from tft_algos.errors import ServerBusyError, SessionRefusedError
from tft_algos.parameter_server.routes import (
    ANSWER_BYTES_MAX,
    NEW_SESSION_ROUTE,
    OpenedSession,
    parse_address,
    parse_answer,
)
from tft_ckpt import TransferTimeoutError
from tft_ckpt.transfer.connection import Connection, SourceSilentError, StopSignal
from tft_ckpt.transfer.routes import authorization
from tft_coord.errors import RequestTimeoutError, UnreachableError

__all__ = ["request_session"]

_SENTENCE_CHARS_MAX = 300


def request_session(address: str, *, token: str | None, timeout_s: float) -> OpenedSession:
    """Ask a parameter server for a session.

    Args:
        address: what the server's `address()` returns.
        token: the job's secret, or None.
        timeout_s: for the whole request.

    Raises:
        ConfigError: the address is malformed.
        UnreachableError: nothing answers there, or the connection was lost.
        RequestTimeoutError: there was no complete answer in time.
        ServerBusyError: the server has no room for a session, or stops.
        SessionRefusedError: the secret is wrong, the server can't make a group, or it is not a parameter server.
    """
    host, port = parse_address(address)
    headers = {} if token is None else {"authorization": authorization(token)}
    try:
        with closing(StopSignal(timeout_s, None)) as stop:
            connection = Connection(host, port, silence_s=timeout_s, stop=stop)
            with closing(connection):
                response = connection.get(NEW_SESSION_ROUTE, headers)
                status, body = response.status, response.read(ANSWER_BYTES_MAX + 1)
    except (TransferTimeoutError, SourceSilentError) as error:
        raise RequestTimeoutError(
            f"the parameter server at {address} did not answer within {timeout_s:.3g} s; check whether its process is "
            "stopped, and the network to it"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(
            f"the parameter server at {address} can't be reached ({error or type(error).__name__}); check the address, "
            "and that the server runs"
        ) from error
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
