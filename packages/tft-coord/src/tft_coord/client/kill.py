"""An operator's request that a replica group end, made by a lighthouse.

Law of this file: one call to the group's manager server, of this project or of torchft.
"""

from __future__ import annotations

from typing import Final

from tft_coord.errors import UnreachableError
from tft_coord.rpc import grpc
from tft_coord.security import call_metadata
from tft_coord.timeouts import Timeouts
from tft_coord.tls import TLS
from tft_coord.tokens import Token
from tft_coord.transport.address import target
from tft_coord.transport.dial import dial
from tft_coord.transport.settings import error_of
from tft_coord.wire import rank_codec, services

ANSWER_WITHIN_S: Final = 5.0


async def kill_group(address: str, message: str, *, token: Token, timeouts: Timeouts, tls: TLS | None = None) -> None:
    """Ask all processes of a replica group to end at once, with exit code 1.

    A manager server of this project answers before its trainer ends. torchft's manager ends with the call, so its
    connection breaks without an answer. Both count as success.

    Args:
        address: of the group's manager server.
        message: the reason and the caller; the trainer logs it.
        token: the job's shared secret, or None.
        timeouts: of the lighthouse.
        tls: of the job, or None.
    Raises: ConfigError: the address is invalid. UnreachableError: no server answered there. RefusedError: the secret is
        wrong. RequestTimeoutError: the server did not answer in time. ProtocolError: another kind of server answered.
    """
    channel = await dial(target(address), timeouts, tls)
    try:
        call = services.call_stub(channel, services.MANAGER_KILL)
        await call(rank_codec.encode_kill(message), timeout=ANSWER_WITHIN_S, metadata=call_metadata(token))
    except grpc.aio.AioRpcError as failure:
        error = error_of(failure, f"a kill request to {address}")
        if not isinstance(error, UnreachableError):
            raise error from failure
    finally:
        await channel.close()
