"""gRPC's form of a job's certificates.

Law of this file: settings to credentials of grpc, and to channels and ports with them.
"""

from __future__ import annotations

from typing import Any

from tft_coord.rpc import grpc
from tft_coord.tls import TLS, Certificates, certificates_of
from tft_coord.transport.settings import Options


def open_channel(address: str, options: Options, tls: TLS | None) -> grpc.Channel:
    """Return a channel for blocking calls, with the present certificates."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(tls), options=options)


def open_aio_channel(address: str, options: Options, tls: TLS | None) -> grpc.aio.Channel:
    """Return a channel for asyncio, with the present certificates."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


def add_port(server: Any, address: str, tls: TLS | None) -> int:
    """Bind the port of a server. Returns: its number. Raises: RuntimeError: the address can't be bound."""
    port: int = (
        server.add_insecure_port(address) if tls is None else server.add_secure_port(address, server_credentials(tls))
    )
    return port


def channel_credentials(tls: TLS) -> grpc.ChannelCredentials:
    """Return the credentials of a client, from the present files."""
    found = certificates_of(tls)
    return grpc.ssl_channel_credentials(found.authority, found.key, found.certificate)


def server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Return the credentials of a server. Each new connection uses the files of its time."""
    used = certificates_of(tls)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        found = certificates_of(tls)
        if found is used:
            return None
        used = found
        return _configuration(found)

    fetch: Any = changed  # grpc's stubs don't know that None means no change
    return grpc.dynamic_ssl_server_credentials(_configuration(used), fetch, tls.check_client)


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], found.authority)
