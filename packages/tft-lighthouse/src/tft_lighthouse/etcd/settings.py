"""The settings of the election: endpoints of etcd, the prefix of its keys, the time to live of the lease.

Law of this file: flags and environment variables to one checked value; nothing is opened.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from tft_coord import ConfigError
from tft_coord.lighthouse import MAX_NAME_BYTES, target
from tft_lighthouse.etcd.flags import CA_ENV, CERT_ENV, ENDPOINTS_ENV, KEY_ENV, PREFIX, PREFIX_ENV, TTL_S

LONGEST_TTL_S: Final = 60
MOST_ENDPOINTS: Final = 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """Where the lighthouses of one job elect their leader.

    Args:
        endpoints: of etcd's members, `host:port` or `http://host:port`, or all `https://host:port`.
        prefix: of the keys; one for each group of lighthouses.
        ttl_s: time to live of the leader's lease, in seconds. A standby leads about that long after the leader's end.
        ca: file with the certificates that sign etcd's, PEM; None: those of this machine. For https only.
        cert, key: files with this lighthouse's own certificate and its key, PEM; None: it shows none. For https only.
    Raises: ConfigError: a value is invalid, or two of them clash.
    """

    endpoints: tuple[str, ...]
    prefix: str = PREFIX
    ttl_s: int = TTL_S
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.endpoints) <= MOST_ENDPOINTS:
            raise ConfigError(f"etcd has {len(self.endpoints)} endpoints; give 1 to {MOST_ENDPOINTS}")
        for endpoint in self.endpoints:
            try:
                target(_without_scheme(endpoint))
            except ConfigError:
                raise ConfigError(
                    f"etcd endpoint {endpoint[:MAX_NAME_BYTES]!r} is no address; give host:port, such as 10.0.0.1:2379"
                ) from None
        if len({endpoint.startswith("https://") for endpoint in self.endpoints}) > 1:
            raise ConfigError("some etcd endpoints have https:// and others have not; give it to all or to none")
        prefix = self.prefix
        if not (prefix.isprintable() and 0 < len(prefix.encode()) <= MAX_NAME_BYTES) or not prefix.strip("/"):
            raise ConfigError(f"the etcd prefix is {prefix[:64]!r}; give 1 to {MAX_NAME_BYTES} bytes, printable")
        if not TTL_S <= self.ttl_s <= LONGEST_TTL_S:
            raise ConfigError(f"etcd_ttl_s is {self.ttl_s}; give {TTL_S} to {LONGEST_TTL_S} seconds")
        files = {CA_ENV: self.ca, CERT_ENV: self.cert, KEY_ENV: self.key}
        given = [name for name, path in files.items() if path is not None]
        if given and not self.is_encrypted:
            raise ConfigError(f"{given[0]} has no effect without https:// endpoints of etcd; leave one of the two out")
        if (self.cert is None) is not (self.key is None):
            raise ConfigError(f"a certificate for etcd needs its key: set both {CERT_ENV} and {KEY_ENV}, or neither")

    @property
    def is_encrypted(self) -> bool:
        """Return whether the endpoints are https."""
        return self.endpoints[0].startswith("https://")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the endpoints as grpc takes them."""
        return tuple(dict.fromkeys(target(_without_scheme(endpoint)) for endpoint in self.endpoints))

    def read(self, name: str, path: str | None) -> bytes | None:
        """Return the content of a file of a setting, or None for no file. Raises: ConfigError: it can't be read."""
        if path is None:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} is {path!r}, which can't be read: {error.strerror}") from None


def read_flags(settings: argparse.Namespace, environment: Mapping[str, str]) -> EtcdConfig | None:
    """Return the settings of the election, or None for a lighthouse without etcd.

    Raises: ConfigError: a value is invalid, or there is one without endpoints.
    """
    endpoints = settings.etcd or environment.get(ENDPOINTS_ENV, "")
    prefix = settings.etcd_prefix or environment.get(PREFIX_ENV, "")
    if not endpoints:
        if settings.etcd_prefix or settings.etcd_ttl_s != TTL_S:
            raise ConfigError("--etcd_prefix and --etcd_ttl_s have no effect without --etcd; give the endpoints")
        return None
    return EtcdConfig(
        endpoints=tuple(endpoint.strip() for endpoint in endpoints.split(",")),
        prefix=prefix or PREFIX,
        ttl_s=settings.etcd_ttl_s,
        ca=environment.get(CA_ENV) or None,
        cert=environment.get(CERT_ENV) or None,
        key=environment.get(KEY_ENV) or None,
    )


def _without_scheme(endpoint: str) -> str:
    return endpoint.removeprefix("https://").rstrip("/") if endpoint.startswith("https://") else endpoint
