"""The settings of a manager server, in a form for another process.

Law of this file: one frozen value that checks itself, and its JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields

from tft_coord.errors import ConfigError
from tft_coord.security import bind_without_secret, check_host_without_secret, is_for_this_machine
from tft_coord.timeouts import Timeouts
from tft_coord.tls import TLS
from tft_coord.tokens import Token, TokenFile, check
from tft_coord.transport.address import check_host, check_scheme, targets
from tft_coord.wire.limits import MAX_ADDRESS_BYTES, MAX_NAME_BYTES, MAX_WORLD_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerServerConfig:
    """The settings of one replica group's manager server.

    Args:
        replica_id: of the group, 1 to 256 bytes.
        lighthouse_addr: `host:port` or `http://host:port`; several of one cluster with commas between them.
        hostname: the ranks and the other groups reach this server under this name.
        bind: `host:port` to listen at; port 0 takes a free one.
        store_addr: of the group's rendezvous store.
        world_size: ranks in the group.
        job: of the group.
        replaces: replica id of the group's predecessor, or "".
        token: shared secret of the job, or a file with it, or None.
        timeouts: of the job.
        insecure: serve everybody without a secret. Otherwise a server without one listens at loopback only.
        tls: of the job, or None.
    Raises: ConfigError: one of them is invalid; the message names it.
    """

    replica_id: str
    lighthouse_addr: str
    hostname: str
    bind: str
    store_addr: str
    world_size: int
    job: str
    replaces: str
    token: Token = field(repr=False)
    timeouts: Timeouts
    insecure: bool = False
    tls: TLS | None = None

    def __post_init__(self) -> None:
        for name, text in (("replica_id", self.replica_id), ("job", self.job), ("hostname", self.hostname)):
            if not 0 < len(text.encode()) <= MAX_NAME_BYTES:
                raise ConfigError(f"{name} is {text[:64]!r}; give 1 to {MAX_NAME_BYTES} bytes")
        check_host("hostname", self.hostname)
        if len(self.replaces.encode()) > MAX_NAME_BYTES:
            raise ConfigError(f"replaces is {self.replaces[:64]!r}...; a replica id has at most {MAX_NAME_BYTES} bytes")
        if len(self.store_addr.encode()) > MAX_ADDRESS_BYTES:
            raise ConfigError(f"store_addr is longer than {MAX_ADDRESS_BYTES} bytes; give host:port")
        if isinstance(self.world_size, bool) or not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ConfigError(f"world_size is {self.world_size!r}; give 1 to {MAX_WORLD_SIZE}")
        check(self.token)
        if self._is_for_this_machine:
            check_host_without_secret("hostname", self.hostname)
            bind_without_secret(self.bind)
        targets(self.lighthouse_addr)
        check_scheme(self.lighthouse_addr, has_certificates=self.tls is not None)

    @property
    def _is_for_this_machine(self) -> bool:
        return is_for_this_machine(self.token, self.tls, insecure=self.insecure)

    @property
    def listens_at(self) -> str:
        """Return `bind`, or without a secret the loopback part of it."""
        return bind_without_secret(self.bind) if self._is_for_this_machine else self.bind

    def cannot_listen(self) -> ConfigError:
        """Return the error for a `bind` that is not available."""
        return ConfigError(
            f"replica {self.replica_id} can't listen at {self.bind}: the address is in use or not of this machine; "
            "give the manager server another port (TORCHFT_MANAGER_PORT), or 0 for a free one"
        )

    def to_json(self) -> str:
        """Return the value as one line, for `from_json`."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["timeouts"] = asdict(self.timeouts)
        plain["tls"] = None if self.tls is None else asdict(self.tls)
        plain["token"] = {"path": self.token.path} if isinstance(self.token, TokenFile) else self.token
        return json.dumps(plain)

    @classmethod
    def from_json(cls, line: str) -> ManagerServerConfig:
        """Return the value that `to_json` wrote. Raises: ConfigError: it is invalid."""
        plain = json.loads(line)
        token, tls = plain["token"], plain["tls"]
        plain["timeouts"] = Timeouts(**plain["timeouts"])
        plain["tls"] = None if tls is None else TLS(**tls)
        plain["token"] = TokenFile(token["path"]) if isinstance(token, dict) else token
        return cls(**plain)
