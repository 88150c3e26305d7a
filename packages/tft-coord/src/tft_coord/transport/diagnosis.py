"""The listener at an address where no gRPC connection succeeded.

grpc says only that a connection failed. A user needs to know whether the port refuses connections, the name is unknown,
or another kind of server answers. The first two may recover, the last one never does. After a failed dial one plain
connection therefore sends the first bytes of HTTP/2, and the first bytes of the answer decide.

Law of this file: short connections, and what their answers mean; at most `_FIRST_BYTES` are read of each. The common
sentences of a trainer and a server's clients are here as well.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
from contextlib import suppress
from typing import Final

from tft_coord.errors import ConfigError, ProtocolError, UnreachableError
from tft_coord.tls import TLS, own_fault, probe_context
from tft_coord.transport.address import host_of
from tft_coord.transport.trust import WANTS_TLS, UntrustedError, why_own_is_refused, why_untrusted

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # with empty SETTINGS
_FIRST_BYTES: Final = 16
_FRAME_HEAD_BYTES: Final = 9  # of HTTP/2: length, type, flags, stream
_FIRST_FRAMES: Final = (4, 7)  # SETTINGS; GOAWAY, from a server that ends
_TLS: Final = (b"\x15\x03", b"\x16\x03")
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_NOT_YET: Final = ("502", "503", "504")  # of a proxy: the server behind it is unreachable, not ready, or slow
_WITHIN_S: Final = 1.0
_DIAGNOSE_WITHIN_S: Final = 3 * _WITHIN_S  # two connections and a name that is slow to resolve

OF_ANOTHER_KIND: Final = "another gRPC service answers there; check the host and the port"


def no_peer(peer: str, why: UnreachableError | ProtocolError, *, within: str = "") -> str:
    """Return what is wrong with a server, as the end of a sentence that begins with its name and address.

    Args:
        peer: the expected server, in words.
        why: as `why_unreachable` gives it.
        within: the time limit of the attempts, in words.
    """
    if isinstance(why, UnreachableError):
        return f"can't be reached{within}: {why}; check the address, and that the server runs"
    return f"can't be used: {why}" if isinstance(why, UntrustedError) else f"is not a {peer}: {why}"


def secret_refused(details: str, *, shown: bool) -> str:
    """Return the phrase that a server refuses this process's secret, or a process without one."""
    what = "this process's secret" if shown else "this process, which has no secret"
    return f"refuses {what}: {details}"


def diagnose(address: str, tls: TLS | None = None) -> UnreachableError | ProtocolError:
    """Do the same as `why_unreachable`, blocking, from any thread."""
    found: list[UnreachableError | ProtocolError] = []

    async def ask() -> None:
        found.append(await why_unreachable(address, tls))

    # The check runs on a thread of its own, because a loop may run in this one.
    thread = threading.Thread(target=asyncio.run, args=(ask(),), name="tft-diagnose", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        return UnreachableError(f"no connection can be made ({error})")
    thread.join(_DIAGNOSE_WITHIN_S)
    return found[0] if found else UnreachableError(f"the check of its address timed out after {_DIAGNOSE_WITHIN_S:g} s")


async def why_unreachable(address: str, tls: TLS | None = None) -> UnreachableError | ProtocolError:
    """Find out what listens at the address.

    Args:
        address: `host:port`, as `target` gives it; no gRPC connection to it succeeded just now.
        tls: as the connection used it.
    Returns: UnreachableError: the port refuses connections, the name is unknown, or the server may be the right one
        while it starts or ends, maybe behind a proxy. ProtocolError: another kind of server answers there, or one with
        other certificates.
    """
    try:
        answer = await _first_bytes(address, None if tls is None else probe_context(tls))
        if tls is not None and not answer and answer is not None:
            return _closed_after_handshake(tls)
        if tls is None and answer is not None and not answer and await _speaks_tls(address):
            answer = b"\x15\x03"
    except ConnectionRefusedError:
        return UnreachableError("no server listens there (connection refused)")
    except socket.gaierror as error:
        return UnreachableError(f"the name {host_of(address)} is unknown ({error.strerror})")
    except ConfigError as error:
        return UnreachableError(str(error))  # the certificates change at this moment
    except (OSError, UnicodeError) as error:
        untrusted = why_untrusted(error, host_of(address)) if isinstance(error, OSError) else None
        if untrusted is not None:
            return UntrustedError(untrusted)
        return UnreachableError(f"no connection can be made ({error})")
    return _verdict(answer)


def _closed_after_handshake(tls: TLS) -> UnreachableError | ProtocolError:
    """Return the meaning of a server that ends a TLS connection without a byte. One that requires certificates of its
    clients does so when it refuses one; it need not say why."""
    fault = own_fault(tls)
    if fault is not None:
        return UntrustedError(f"the server there refuses this process's certificate, which {why_own_is_refused(fault)}")
    return UnreachableError(
        "a server accepts the TLS connection and closes it; it may require a certificate of another authority than "
        "this process's (TFT_TLS_CERT)"
    )


def _verdict(answer: bytes | None) -> UnreachableError | ProtocolError:
    """Return the meaning of an answer's first bytes; None: none came in time, b"": the server closed the connection."""
    if answer is None:
        return UnreachableError(f"a server accepts the connection and sends nothing within {_WITHIN_S:g} s")
    if not answer:
        return UnreachableError("a server accepts the connection and closes it")
    if answer.startswith(_TLS):
        return UntrustedError(WANTS_TLS)
    if _may_be_http2(answer):
        return UnreachableError("a server answers there, but the connection broke")
    status = _STATUS.match(answer)
    if status is not None and status[1].decode() in _NOT_YET:
        return UnreachableError(
            f"a proxy answers there with HTTP status {status[1].decode()}, so the server behind it may be starting"
        )
    what = "an HTTP server" if answer.startswith((b"HTTP/", b"<")) else "a server of another protocol"
    return ProtocolError(f"{what} answers there instead of a gRPC server; check the host and the port")


def _may_be_http2(answer: bytes) -> bool:
    """Return whether an HTTP/2 server's answer may begin with these bytes."""
    if len(answer) < _FRAME_HEAD_BYTES:
        return answer.startswith(b"\x00")  # from the length of a frame; no other protocol's banner begins with it
    return answer[3] in _FIRST_FRAMES and int.from_bytes(answer[5:9], "big") & 0x7FFFFFFF == 0


def _is_enough(answer: bytes) -> bool:
    """Return whether more bytes would not change the verdict."""
    if answer.startswith(_TLS):
        return True
    return len(answer) >= (_FIRST_BYTES if answer.startswith(b"HTTP/") else _FRAME_HEAD_BYTES)


async def _first_bytes(address: str, tls: ssl.SSLContext | None) -> bytes | None:
    """Read until the verdict is clear, the connection ends, or the time is over. The answer may come byte by byte.

    Returns: None: no byte came in time.
    Raises: OSError: no connection.
    """
    host, port = host_of(address), int(address.rpartition(":")[2])
    writer: asyncio.StreamWriter | None = None
    answer = b""

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # The attempts run one after the other, so that the error is that of one attempt. Concurrent attempts raise a
        # joint error.
        try:
            places = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except RuntimeError as error:  # asyncio resolves on a thread, which can't start, as when the interpreter exits
            raise OSError(f"the name can't be resolved: {error}") from error
        failure: OSError | None = None
        for _, _, _, _, place in places:
            try:
                return await asyncio.open_connection(
                    str(place[0]), port, ssl=tls, server_hostname=host if tls is not None else None
                )
            except OSError as error:
                failure = error
        raise failure or OSError("the name has no address")

    async def ask() -> bytes:
        nonlocal writer, answer
        reader, writer = await connect()
        writer.write(_PREFACE)
        with suppress(ConnectionError):
            while not _is_enough(answer):
                more = await reader.read(_FIRST_BYTES - len(answer))
                if not more:
                    break
                answer += more
        return answer

    asking = asyncio.ensure_future(ask())
    try:
        await asyncio.wait([asking], timeout=_WITHIN_S)  # not wait_for, which may swallow a cancellation
        if asking.done():
            return asking.result()
        if writer is None:
            raise TimeoutError(f"timed out after {_WITHIN_S:g} s; the host is down, or a firewall drops packets")
        return answer or None
    finally:
        asking.cancel()
        if writer is not None:
            writer.transport.abort()


async def _speaks_tls(address: str) -> bool:
    """Return whether a server that closed a plain connection without an answer accepts a TLS connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        return await _first_bytes(address, context) is not None
    except ssl.SSLError as error:
        return error.reason not in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", None)
    except OSError:
        return False
