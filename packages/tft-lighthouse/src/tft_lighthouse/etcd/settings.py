"""The settings of the election: endpoints of etcd, the prefix of its keys, the time to live of the lease.

Law of this file: one checked value, and the files that it names; nothing else is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from tft_coord import ConfigError
from tft_coord.lighthouse import MAX_NAME_BYTES, target
from tft_lighthouse import defaults

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
    prefix: str = defaults.ETCD_PREFIX
    ttl_s: int = defaults.ETCD_TTL_S
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.endpoints) <= MOST_ENDPOINTS:
            raise ConfigError(f"etcd has {len(self.endpoints)} endpoints; give 1 to {MOST_ENDPOINTS}")
        for endpoint in self.endpoints:
            if "@" in endpoint:  # it may be a password, which no log should have
                raise ConfigError(
                    "an etcd endpoint has a user or a password in front of an @, and none is used; give host:port, and "
                    "etcd_cert and etcd_key where etcd asks who calls"
                )
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
            raise ConfigError(f"etcd_prefix is {prefix[:64]!r}; give 1 to {MAX_NAME_BYTES} bytes, printable")
        least, most = defaults.ETCD_TTL_S, defaults.ETCD_TTL_S_MOST
        if not least <= self.ttl_s <= most:
            raise ConfigError(f"etcd_ttl_s is {self.ttl_s}; give {least} to {most} seconds")
        given = [name for name, path in self._files.items() if path is not None]
        if given and not self.is_encrypted:
            raise ConfigError(f"{given[0]} has no effect without https:// endpoints of etcd; leave one of the two out")
        if (self.cert is None) is not (self.key is None):
            raise ConfigError("a certificate for etcd needs its key: set both etcd_cert and etcd_key, or neither")

    @property
    def is_encrypted(self) -> bool:
        """Return whether the endpoints are https."""
        return self.endpoints[0].startswith("https://")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the endpoints as grpc takes them."""
        return tuple(dict.fromkeys(target(_without_scheme(endpoint)) for endpoint in self.endpoints))

    @property
    def _files(self) -> dict[str, str | None]:
        return {"etcd_ca": self.ca, "etcd_cert": self.cert, "etcd_key": self.key}

    def read_files(self) -> dict[str, bytes | None]:
        """Return the content of each file by the name of its setting, None for no file.

        Raises: ConfigError: one can't be read.
        """
        found: dict[str, bytes | None] = {}
        for name, path in self._files.items():
            try:
                found[name] = Path(path).read_bytes() if path is not None else None
            except OSError as error:
                raise ConfigError(f"{name} is {path!r}, which can't be read: {error.strerror}") from None
        return found


def _without_scheme(endpoint: str) -> str:
    return endpoint.removeprefix("https://").rstrip("/") if endpoint.startswith("https://") else endpoint
