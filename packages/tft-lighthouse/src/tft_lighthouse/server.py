"""`LighthouseServer`: a lighthouse inside a program.

Law of this file: starting and ending the server on the process's loop, and its address.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, final

from tft_coord import ConfigError, CoordinationClosedError, StragglerPolicy, Timeouts
from tft_coord.lighthouse import (
    HOW_TO_SERVE_OTHERS,
    MAX_MEMBERS,
    MAX_NAME_BYTES,
    TLS,
    Gate,
    JobSettings,
    JobTokens,
    LighthouseConfig,
    Limits,
    LoopShare,
    Token,
    bind_without_secret,
    check,
    check_host,
    check_host_without_secret,
    interface_of,
    is_for_this_machine,
    join_host_port,
)
from tft_lighthouse import defaults
from tft_lighthouse.etcd.settings import EtcdConfig
from tft_lighthouse.http.listeners import listen_for_http
from tft_lighthouse.shell import LighthouseShell

if TYPE_CHECKING:
    from tft_lighthouse.http.app import HttpServer

logger = logging.getLogger("tft_lighthouse")


@final
class Address(str):
    """An address that is also callable.

    torchft's scripts use `lighthouse.address()`, this project's use `lighthouse.address`, and both get the same string.
    """

    __slots__ = ()

    def __call__(self) -> str:
        """Return the address itself."""
        return str(self)


@final
class LighthouseServer:
    """A lighthouse on a thread of this process; the command `tft-lighthouse` runs the same.

    Args:
        bind: `host:port` to listen at; port 0 takes a free one. `[::]` is all interfaces.
        min_replicas: smallest quorum.
        join_timeout_ms: how long a quorum waits for healthy replicas that have not asked.
        quorum_tick_ms: how often the lighthouse checks its timeouts.
        heartbeat_timeout_ms: silence after which a replica is lost.
        on_lost_state: "wait": if all holders of the newest state fell silent and may live, the job waits for them
            before it goes on from an older state. "restart": it waits for heartbeat_timeout_ms only.
        lost_state_timeout_ms: how long it waits; the longer of this and heartbeat_timeout_ms counts.
        hostname: other machines reach this machine under this name; None takes the host of `bind`, or this machine's
            name when that is all interfaces.
        cluster_id: one name for all lighthouses whose addresses a job is given, 1 to 256 bytes; None takes a random
            one, of this lighthouse alone.
        token: shared secret, a `TokenFile` with it, or None; with one, nothing is answered without it. Without one
            only this machine is served: `[::]` means loopback then.
        insecure: serve everybody without a secret.
        stragglers: the policy for a replica that slows the others down; None: a warning.
        http_bind: `host:port` for status, metrics and health over HTTP; port 0 takes a free one. None: no such port.
        job_tokens: secrets that open one job each; `token` opens all.
        tls: certificates for both ports and for the calls to replicas; None: nothing is encrypted. With `check_client`
            the certificates take the place of a secret.
        limits: what clients may use; None: the defaults of `Limits`.
        jobs: the settings of single jobs that differ from the others', by name.
        max_message_bytes: the largest message that a client may send.
        etcd: settings of the election of one lighthouse among several (`tft-lighthouse[etcd]`); None: this lighthouse
            always serves.
    Raises: ConfigError: an argument is invalid, two of them clash, or the address can't be bound.
    """

    def __init__(
        self,
        bind: str = "[::]:0",
        min_replicas: int = defaults.MIN_REPLICAS,
        join_timeout_ms: int = defaults.JOIN_TIMEOUT_MS,
        quorum_tick_ms: int = defaults.QUORUM_TICK_MS,
        heartbeat_timeout_ms: int = defaults.HEARTBEAT_TIMEOUT_MS,
        *,
        on_lost_state: str = defaults.ON_LOST_STATE,
        lost_state_timeout_ms: int = defaults.LOST_STATE_TIMEOUT_MS,
        hostname: str | None = None,
        cluster_id: str | None = None,
        token: Token = None,
        insecure: bool = False,
        stragglers: StragglerPolicy | None = None,
        http_bind: str | None = None,
        job_tokens: JobTokens | None = None,
        tls: TLS | None = None,
        limits: Limits | None = None,
        jobs: Mapping[str, JobSettings] | None = None,
        max_message_bytes: int = defaults.MAX_MESSAGE_BYTES,
        etcd: EtcdConfig | None = None,
    ) -> None:
        is_local = is_for_this_machine(token, tls, insecure=insecure)
        bind, http_bind = check_addresses(bind, http_bind, for_this_machine=is_local)
        host = _check_hostname(hostname, bind, for_this_machine=is_local)
        gate = Gate(check(token), job_tokens)
        check_message_bytes(max_message_bytes)
        self._config = lighthouse_config(
            min_replicas=min_replicas,
            join_timeout_ms=join_timeout_ms,
            quorum_tick_ms=quorum_tick_ms,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
            on_lost_state=on_lost_state,
            lost_state_timeout_ms=lost_state_timeout_ms,
            cluster_id=cluster_id,
            stragglers=stragglers,
            limits=limits,
            jobs=jobs,
        )
        self._shell: LighthouseShell | None = None
        self._http: HttpServer | None = None
        self._http_address: str | None = None
        listeners = listen_for_http(bind, http_bind)
        self._share = LoopShare("this lighthouse", at_exit=self.shutdown)
        try:
            self._shell, port = self._share.run(
                self._start(bind, listeners, gate, tls, cluster_id, max_message_bytes, etcd)
            )
        except BaseException:
            for listener in listeners:
                listener.close()
            self._share.give_back()
            raise
        self._address = Address(_url(tls, host or _this_machine(), port))
        self._log_start(bind, on_lost_state, is_local=is_local, is_open=token is None and insecure)
        try:
            if etcd is not None:
                self._share.run(self._campaign(self._address))
            self._serve_http(listeners, hostname or _host_of(http_bind or bind), gate, insecure=not is_local, tls=tls)
        except BaseException:
            self.shutdown()
            raise

    def _log_start(self, bind: str, on_lost_state: str, *, is_local: bool, is_open: bool) -> None:
        logger.info(
            "listening at %s (bind %s, min_replicas %d, stragglers %s, on_lost_state %s, for %g s)",
            self._address,
            bind,
            self._config.min_replicas,
            self._config.stragglers.describe(),
            on_lost_state,
            self._config.lost_state_ms / 1_000,
        )
        if is_local:
            sentence = "no shared secret is set, so only this machine is served, at %s; %s"
            logger.warning(sentence, self._address, HOW_TO_SERVE_OTHERS)
        elif is_open:
            logger.warning("insecure: any host that reaches %s can join, end and change the job", self._address)

    @property
    def http_address(self) -> str | None:
        """Return `http://host:port` of the HTTP port, `https://` with TLS; None: there is none."""
        return self._http_address

    @property
    def address(self) -> Address:
        """Return `http://host:port`, `https://` with TLS, for the managers. It is also callable, as torchft's is."""
        return self._address

    def reconfigure(
        self,
        *,
        min_replicas: int = defaults.MIN_REPLICAS,
        limits: Limits | None = None,
        jobs: Mapping[str, JobSettings] | None = None,
    ) -> None:
        """Use other settings from now on, while the jobs go on.

        A larger or smaller least number counts for the next quorum. A limit ends no replica that is connected. The
        files of secrets and certificates are not among these settings: their changes are noticed without a call.

        Args:
            min_replicas, limits, jobs: as at the start. Values that are left out become the defaults.
        Raises: ConfigError: a value is wrong; nothing has changed. CoordinationClosedError: it was shut down.
        """
        shell = self._shell
        if shell is None:
            raise CoordinationClosedError("this lighthouse was shut down; make a new one")
        _check_min_replicas(min_replicas)
        config = replace(self._config, min_replicas=min_replicas, limits=limits or Limits(), jobs=dict(jobs or {}))

        async def apply() -> None:
            shell.reconfigure(config)

        self._share.run(apply())
        self._config = config

    def shutdown(self) -> None:
        """Shut down: nothing is answered any more, on any connection; port and thread are free. Idempotent."""
        shell, self._shell = self._shell, None
        if shell is not None and not self._share.inherited:
            if self._http is not None:
                self._share.run(self._http.stop())
            self._share.run(shell.stop())
            self._share.give_back()

    def __enter__(self) -> LighthouseServer:
        if self._shell is None:
            raise CoordinationClosedError("this lighthouse was shut down; make a new one")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    async def _start(
        self,
        bind: str,
        listeners: Sequence[socket.socket],
        gate: Gate,
        tls: TLS | None,
        cluster_id: str | None,
        max_message_bytes: int,
        etcd: EtcdConfig | None,
    ) -> tuple[LighthouseShell, int]:
        shell = LighthouseShell(
            self._config, cluster_id=cluster_id, gate=gate, tls=tls, max_message_bytes=max_message_bytes, etcd=etcd
        )
        if listeners:
            shell.keep_journal()  # now: what replicas say before HTTP is served counts too, such as a quorum to resume
        return shell, await shell.start(bind, tls)

    async def _campaign(self, address: str) -> None:
        assert self._shell is not None, "it was started"
        assert self._shell.candidate is not None, "it has etcd's settings"
        self._shell.candidate.start(address)

    def _serve_http(
        self, listeners: Sequence[socket.socket], host: str, gate: Gate, *, insecure: bool, tls: TLS | None
    ) -> None:
        """Answer HTTP requests from now on, if there are listeners; `host` is this machine's name for others, or ""."""
        if not listeners:
            return
        host = host or _this_machine()
        # The import takes longer than the rest of the start, and the lighthouse answers its replicas meanwhile.
        from tft_lighthouse.http.access import Access
        from tft_lighthouse.http.app import HttpServer

        access = Access(gate, names=(host, _this_machine(), socket.gethostname()), insecure=insecure)
        shell = self._shell
        assert shell is not None
        shell.operations.address = str(self._address)

        async def start() -> HttpServer:
            server = HttpServer(shell.operations, shell.keep_journal(), listeners, access, tls)
            await server.start()
            return server

        self._http = self._share.run(start())
        self._http_address = _url(tls, host, listeners[0].getsockname()[1])
        logger.info("status, metrics and health at %s (/, /api/v1/status, /metrics, /healthz)", self._http_address)


def _url(tls: TLS | None, host: str, port: int) -> str:
    return f"{'http' if tls is None else 'https'}://{join_host_port(host, port)}"


def _check_hostname(hostname: str | None, bind: str, *, for_this_machine: bool) -> str:
    """Return the host under which others reach this one; "": by this machine's name. Raises: ConfigError: wrong."""
    if hostname is not None:
        check_host("hostname", hostname)
    host = hostname or _host_of(bind)
    if for_this_machine:
        check_host_without_secret("hostname", host)
    return host


def lighthouse_config(
    *,
    min_replicas: int,
    join_timeout_ms: int,
    quorum_tick_ms: int,
    heartbeat_timeout_ms: int,
    on_lost_state: str,
    lost_state_timeout_ms: int,
    cluster_id: str | None,
    stragglers: StragglerPolicy | None,
    limits: Limits | None,
    jobs: Mapping[str, JobSettings] | None,
) -> LighthouseConfig:
    """Return the core's settings. Raises: ConfigError: one is invalid, or two of them clash."""
    timeouts = Timeouts(
        join_timeout_ms=join_timeout_ms, quorum_tick_ms=quorum_tick_ms, heartbeat_timeout_ms=heartbeat_timeout_ms
    )
    _check_min_replicas(min_replicas)
    if cluster_id is not None and not (cluster_id.isprintable() and 0 < len(cluster_id.encode()) <= MAX_NAME_BYTES):
        raise ConfigError(f"cluster_id is {cluster_id[:64]!r}; give 1 to {MAX_NAME_BYTES} bytes, printable")
    if on_lost_state not in defaults.LOST_STATE_CHOICES:
        choices = " or ".join(defaults.LOST_STATE_CHOICES)
        raise ConfigError(f"on_lost_state is {on_lost_state!r}; give {choices}")
    if stragglers is not None and not isinstance(stragglers, StragglerPolicy):
        raise ConfigError(
            f"stragglers is {stragglers!r}; give a StragglerPolicy, such as "
            "StragglerPolicy(action=StragglerAction.LEAVE_OUT)"
        )
    if on_lost_state != "wait" and lost_state_timeout_ms != defaults.LOST_STATE_TIMEOUT_MS:
        raise ConfigError(
            f"on_lost_state is {on_lost_state!r} and lost_state_timeout_ms is {lost_state_timeout_ms}, which "
            "needs 'wait'; leave one of them out (a restart waits for heartbeat_timeout_ms)"
        )
    return LighthouseConfig(
        min_replicas=min_replicas,
        timeouts=timeouts,
        stragglers=stragglers or StragglerPolicy(),
        lost_state_timeout_ms=lost_state_timeout_ms if on_lost_state == "wait" else 0,
        limits=limits or Limits(),
        jobs=dict(jobs or {}),
    )


def check_addresses(bind: str, http_bind: str | None, *, for_this_machine: bool) -> tuple[str, str | None]:
    """Return where a lighthouse listens: without a secret at loopback alone.

    Args:
        bind, http_bind: `host:port`, as asked for; None: no HTTP port.
        for_this_machine: no other machine is served.
    Raises: ConfigError: one is no `host:port`, or names an interface that other machines reach, or both are one port.
    """
    _host_of(bind)
    if http_bind is not None:
        _host_of(http_bind, "http_bind")
        _check_ports_differ(bind, http_bind)
    if not for_this_machine:
        return bind, http_bind
    return bind_without_secret(bind), bind_without_secret(http_bind, "http_bind") if http_bind is not None else None


def _check_ports_differ(bind: str, http_bind: str) -> None:
    """Check that the two ports are not one. Raises: ConfigError: they are."""
    (host, port), (http_host, http_port) = ((interface_of(each), each.rpartition(":")[2]) for each in (bind, http_bind))
    if int(port) == int(http_port) != 0 and (host == http_host or "" in (host, http_host)):
        raise ConfigError(f"bind and http_bind are both port {int(port)}; give http_bind another one, or 0 for none")


def check_message_bytes(max_message_bytes: int) -> None:
    """Check the limit for one message. Raises: ConfigError: it is out of its range."""
    least, most = defaults.MESSAGE_BYTES_LEAST, defaults.MESSAGE_BYTES_MOST
    if not least <= max_message_bytes <= most:
        raise ConfigError(f"max_message_bytes is {max_message_bytes}; give {least} to {most} bytes")


def _check_min_replicas(min_replicas: int) -> None:
    if isinstance(min_replicas, bool) or not isinstance(min_replicas, int):
        raise ConfigError(f"min_replicas is {min_replicas!r}; give a whole number")
    if min_replicas > MAX_MEMBERS:
        raise ConfigError(f"min_replicas is {min_replicas}; give 1 to {MAX_MEMBERS}, the largest quorum")


def _host_of(bind: str, name: str = "bind") -> str:
    """Return the host that `bind` names, or "" for all interfaces. Raises: ConfigError: it is no `host:port`; the
    message has the name of the setting."""
    host, colon, port = bind.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{name} is {bind!r}; give host:port, such as [::]:29510")
    if not host.isprintable() or " " in host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ConfigError(f"{name} is {bind!r}; give host:port, an IPv6 address in brackets, such as [::1]:29510")
    return host if interface_of(bind) else ""


def _this_machine() -> str:
    """Return this machine's name if it can be resolved here, else localhost."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "localhost"
    return name
