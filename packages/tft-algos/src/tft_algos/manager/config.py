"""The settings of a Manager, and the one place that reads the environment.

A setting comes from the argument, otherwise from the environment variable that launchers set, otherwise from a default.
A setting that is not given is None until `from_environment` fills it in. A Manager does this once, at the start. So a
training script runs alike under `python`, `torchrun` and a cluster's own launcher.

Law of this file: values and their checks. Nothing is opened here and nothing waits.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias

from tft_algos.errors import ConfigError, UnknownSettingError
from tft_ckpt import CheckpointTransport
from tft_coord.core.stragglers import StragglerNotice
from tft_coord.errors import ConfigError as CoordinationConfigError
from tft_coord.security import check_host_without_secret, check_token, is_for_this_machine, read_insecure, read_token
from tft_coord.timeouts import LONGEST_MS, Timeouts
from tft_coord.tls import TLS
from tft_coord.tokens import Token
from tft_coord.transport.address import check_host, check_scheme, host_of, targets

DEFAULT_JOB: Final = "default"
MAX_PORT: Final = 65_535
MAX_WHOLE: Final = 2**31 - 1
LONGEST_TIMEOUT: Final = timedelta(milliseconds=LONGEST_MS)

OnStraggler: TypeAlias = Callable[[StragglerNotice], object]


class WorldSizeMode(enum.Enum):
    """The replicas over which a step is averaged, as replicas come and go.

    DYNAMIC: all that participate. FIXED_WITH_SPARES: at most `min_replica_size` replicas participate. The others are
    spares: they give zeros with weight zero, and replace a participant that is lost.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerConfig:
    """All settings of a Manager. A name that torchft has too means the same as in torchft.

    Args:
        min_replica_size: minimum number of participants for a commit, at least 1.
        use_async_quorum: request the quorum, and heal, in the background of the forward pass.
        timeout: maximum time of one reduction or one vote. Env TORCHFT_TIMEOUT_SEC. If it is given in either way, it is
            also set on the process group. Default 60 s.
        quorum_timeout: maximum wait for the next quorum, also while the lighthouse is unreachable or not started yet.
            Env TORCHFT_QUORUM_TIMEOUT_SEC. The step in which it expires fails, and the next step waits again.
            `max_retries` limits the number of such steps. Default 70 s, or `timeout` if that is longer.
        connect_timeout: maximum time to connect to the store, the manager server or a source, but not the lighthouse.
            Env TORCHFT_CONNECT_TIMEOUT_SEC. Default 60 s.
        heal_timeout: maximum time of a whole healing, including the wait for the source. Default 600 s.
        heartbeat_timeout: a rank that sends its manager server no heartbeat for this long is lost. Its process was
            stopped, or its network is down. Env TFT_HEARTBEAT_TIMEOUT_SEC. Default 5 s. The lighthouse's
            `--heartbeat-timeout-ms` is the same limit between manager servers and the lighthouse. Shorten both.
        slowest_step: maximum time of a trainer's own part of a step (forward, backward). A trainer that takes longer
            hangs: it is lost, and the others continue without it. The first step after a start, a healing or a
            reconfiguration may take any time. Zero: no limit. Env TFT_SLOWEST_STEP_SEC. Default 600 s.
        lease: how long a steady job continues without an answer from the lighthouse. Env TFT_LEASE_SEC. In each of its
            steps the replicas agree among themselves, and send no request. When the lease expires, they send a request
            and wait for the lighthouse. The shortest lease of the job's replicas counts. Zero: send a request in every
            step. Default 60 s.
        timeouts: all time-outs in one value, in place of the single ones above.
        rank: the rank of this process in its replica group. Env RANK. Default 0.
        world_size: number of processes in the replica group. Env WORLD_SIZE. Default 1.
        world_size_mode: see `WorldSizeMode`.
        store_addr: host of the replica group's store, which runs already. Env MASTER_ADDR. A group of one process
            without it hosts its own store.
        store_port: port of that store. Env MASTER_PORT.
        lighthouse_addr: `host:port` or `http://host:port`, or several of one cluster, separated by commas. Env
            TFT_LIGHTHOUSE, then TORCHFT_LIGHTHOUSE. Group rank 0 needs it.
        replica_id: a name for this replica group. Its full id is `name:uuid4`.
        port: port of the manager server. Env TORCHFT_MANAGER_PORT. Default 0, a free port.
        hostname: the name or address by which other replicas reach this machine. Default: its host name if it does not
            resolve to loopback, otherwise its address. Without a token and without `insecure`: localhost.
        heartbeat_interval: time between heartbeats, on a lighthouse without streams.
        checkpoint_transport: moves live state. Default: an HTTPTransport with these time-outs.
        init_sync: at step 0 all replicas take the weights of one replica.
        rank0_synchronization_only: group rank 0 alone reduces, gives and fetches, for all ranks of its group. Groups
            may then have different sizes. Every replica sets the same value. Env TFT_RANK0_SYNCHRONIZATION_ONLY, 0 or
            1. For LocalSGD and DiLoCo. Default False.
        max_retries: maximum number of failed steps in a row. None: no limit.
        check_state_every: compare the registered state between the replicas after this many committed steps, the same
            on every replica. Env TFT_CHECK_STATE_EVERY. Default 0: never.
        on_divergence: what a replica does if its state differs from the state of most replicas. "heal", or "stop":
            raise StateDivergedError.
        quorum_retries: torchft's number of attempts of a quorum. Env TORCHFT_QUORUM_RETRIES. Default 0. For any value,
            connection attempts to the lighthouse continue until quorum_timeout has passed.
        fingerprint: the user's own values, by name, that all replicas of the job must share: a digest of the tokenizer,
            the name of the data set. A replica that differs is refused, and the error names the value.
            `Manager.strategy.add_to_fingerprint` adds later ones.
        on_straggler: a function that is called with a `tft_coord.StragglerNews` at each change of this replica's pace.
            The replica is a straggler, is left out, may join again, or should take another share of its batch
            (`Manager.status().share`). A thread of the Manager calls the function, so it must return at once. Each
            change is logged in any case.
        log_steps: log one line for each step: its result, its quorum, and what its time went to. Env TFT_LOG_STEPS, 0
            or 1. Default False.
        job: jobs with different names on one lighthouse never meet. Env TFT_JOB_ID. Default "default".
        token: the job's shared secret, which this process shows to all peers and demands of them. Env TFT_TOKEN or
            TFT_TOKEN_FILE. Without a token the job is limited to this machine: its servers listen on loopback.
        insecure: serve every client without a secret. Env TFT_INSECURE, 0 or 1. Default False.
    Raises: ConfigError: a value can't work. One sentence names it.
    """

    min_replica_size: int = 1
    use_async_quorum: bool = True
    timeout: timedelta | None = None
    quorum_timeout: timedelta | None = None
    connect_timeout: timedelta | None = None
    heal_timeout: timedelta | None = None
    heartbeat_timeout: timedelta | None = None
    slowest_step: timedelta | None = None
    lease: timedelta | None = None
    timeouts: Timeouts | None = None
    rank: int | None = None
    world_size: int | None = None
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    store_addr: str | None = None
    store_port: int | None = None
    lighthouse_addr: str | None = None
    replica_id: str | None = None
    port: int | None = None
    hostname: str | None = None
    heartbeat_interval: timedelta = timedelta(milliseconds=100)
    checkpoint_transport: CheckpointTransport[Any] | None = None
    init_sync: bool = True
    rank0_synchronization_only: bool | None = None
    max_retries: int | None = None
    check_state_every: int | None = None
    on_divergence: Literal["heal", "stop"] = "heal"
    quorum_retries: int | None = None
    fingerprint: Mapping[str, str] | None = None
    on_straggler: OnStraggler | None = None
    log_steps: bool | None = None
    job: str | None = None
    token: str | None = field(default=None, repr=False)
    insecure: bool | None = None

    def __post_init__(self) -> None:
        self._check_whole("min_replica_size", 1)
        if self.on_divergence not in ("heal", "stop"):
            raise ConfigError(f'on_divergence is {self.on_divergence!r}; give "heal" or "stop"')
        for name in (
            "timeout",
            "quorum_timeout",
            "connect_timeout",
            "heal_timeout",
            "heartbeat_timeout",
            "heartbeat_interval",
        ):
            self._check_duration(name)
        for name in ("slowest_step", "lease"):
            if getattr(self, name) != timedelta():
                self._check_duration(name)
        for name in ("use_async_quorum", "init_sync"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give True or False")
        for name in ("rank0_synchronization_only", "insecure", "log_steps"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give True or False")
        if not isinstance(self.world_size_mode, WorldSizeMode):
            raise ConfigError(f"world_size_mode is {self.world_size_mode!r}; give a WorldSizeMode")
        for name in ("rank", "world_size", "max_retries", "quorum_retries", "check_state_every"):
            self._check_whole(name, 0)
        for name in ("port", "store_port"):
            self._check_whole(name, 0)
            if (getattr(self, name) or 0) > MAX_PORT:
                raise ConfigError(f"{name} is {getattr(self, name)}; a port is 0 to 65535")
        if self.rank is not None and self.world_size and self.rank >= self.world_size:
            raise ConfigError(f"rank is {self.rank} and world_size {self.world_size}; a rank is below the world size")
        for name in ("store_addr", "lighthouse_addr", "replica_id", "hostname", "job", "token"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} is a {type(value).__name__}; give a string")
            if isinstance(value, str) and not value.isprintable():
                raise ConfigError(f"{name} has unprintable characters; give printable ones, without line breaks")
        if self.hostname:
            _check_hostname(self.hostname)
        if self.timeouts is not None and not isinstance(self.timeouts, Timeouts):
            raise ConfigError(f"timeouts is a {type(self.timeouts).__name__}; give a tft_coord.Timeouts")
        check_part("checkpoint_transport", self.checkpoint_transport, "send_checkpoint", "shutdown")
        if not isinstance(self.checkpoint_transport, CheckpointTransport | None):
            raise ConfigError(
                f"checkpoint_transport is a {type(self.checkpoint_transport).__name__}; make that class a subclass of "
                "tft_ckpt.CheckpointTransport, which implements the optional methods"
            )
        self._check_fingerprint()
        if self.on_straggler is not None and not callable(self.on_straggler):
            raise ConfigError(f"on_straggler is a {type(self.on_straggler).__name__}; give a function of one argument")
        if self.job is not None and (not self.job or "/" in self.job):
            raise ConfigError(f"job is {self.job!r}; give a name without a slash")

    def _check_fingerprint(self) -> None:
        parts = self.fingerprint if self.fingerprint is not None else {}
        if not isinstance(parts, Mapping):
            raise ConfigError(f"fingerprint is a {type(parts).__name__}; give a mapping of names to values, all text")
        for name, value in parts.items():
            if not (isinstance(name, str) and name and isinstance(value, str)):
                raise ConfigError(f"fingerprint has the part {name!r}: {value!r}; give names and values that are text")

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}; give a whole number, at least {least}")

    def _check_duration(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, timedelta) or value < timedelta(milliseconds=1):
            zero = f", or timedelta(0) {_ZERO_MEANS[name]}" if name in _ZERO_MEANS else ""
            raise ConfigError(f"{name} is {value!r}; give a timedelta of at least a millisecond{zero}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A ManagerConfig in which every setting has a value. Other fields are those of ManagerConfig.

    Args:
        timeout_is_explicit: `timeout` came from the user, so the process group gets it too.
        store_addr: None: this process hosts the store.
        tls: TLS settings of all connections of the Manager, of its servers, and of the transport that it makes; or
            None.
        run_scope: key prefix of the group and its restart count, for a store that outlives the group. A launcher need
            not give a restart count, nor raise it.
        group_scope: key prefix of the group across its restarts, for the same store.
    """

    min_replica_size: int
    use_async_quorum: bool
    timeouts: Timeouts
    timeout_is_explicit: bool
    rank: int
    world_size: int
    world_size_mode: WorldSizeMode
    store_addr: str | None
    store_port: int
    lighthouse_addr: str | None
    replica_id: str | None
    port: int
    hostname: str
    heartbeat_interval: timedelta
    checkpoint_transport: CheckpointTransport[Any] | None
    init_sync: bool
    rank0_synchronization_only: bool
    max_retries: int | None
    check_state_every: int
    on_divergence: Literal["heal", "stop"]
    quorum_retries: int
    fingerprint: Mapping[str, str]
    on_straggler: OnStraggler | None
    log_steps: bool
    job: str
    token: Token = field(repr=False)
    insecure: bool
    tls: TLS | None
    run_scope: str
    group_scope: str

    @property
    def is_passive_rank(self) -> bool:
        """Return whether group rank 0 reduces, gives and fetches in place of this rank."""
        return self.rank0_synchronization_only and self.rank > 0

    @property
    def timeout(self) -> timedelta:
        return timedelta(milliseconds=self.timeouts.timeout_ms)

    @property
    def quorum_timeout(self) -> timedelta:
        return timedelta(milliseconds=self.timeouts.quorum_timeout_ms)

    @property
    def connect_timeout(self) -> timedelta:
        return timedelta(milliseconds=self.timeouts.connect_timeout_ms)

    @property
    def heal_timeout(self) -> timedelta:
        return timedelta(milliseconds=self.timeouts.heal_timeout_ms)


STANDING_METHODS: Final = ("number_beats", "late")  # needed in addition, if quorums may stand
COORDINATOR_METHODS: Final = (
    "quorum",
    "vote",
    "listen",
    "leave",
    "follow",
    "gather",
    "source_metadata",
    "healed",
    "close",
)


def check_made_coordinator(made: object) -> None:
    """Check the coordinator that the user gave, or that the user's function returned.

    Raises: ConfigError: the object can't act as a coordinator.
    """
    if made is None:
        raise ConfigError("coordinator is a function that returned None; return the coordinator from it")
    check_part("coordinator", made, *COORDINATOR_METHODS)
    if not isinstance(getattr(made, "replica_id", None), str):
        raise ConfigError(
            f"coordinator is a {type(made).__name__} whose replica_id is not a string; set it to a string"
        )


def limit_of(value: timedelta | None, otherwise: timedelta, name: str = "timeout") -> timedelta:
    """Return the time-out that an argument gives; `otherwise` if the argument is None.

    Raises: ConfigError: the argument is not a timedelta above zero and of at most a week.
    """
    if value is None:
        return otherwise
    if not isinstance(value, timedelta) or value <= timedelta():
        raise ConfigError(f"{name} is {value!r}; give a timedelta above zero")
    if value > LONGEST_TIMEOUT:
        raise ConfigError(f"{name} is {value!r}; give a timedelta of at most a week")
    return value


def check_part(name: str, part: object, *methods: str) -> None:
    """Check that `part` has the methods that the Manager needs. None is allowed.

    Raises: ConfigError: a method is missing, or `part` is a class.
    """
    if part is None or (not isinstance(part, type) and all(callable(getattr(part, one, None)) for one in methods)):
        return
    what = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
    raise ConfigError(f"{name} is {what}; give an object that has {' and '.join(methods)}, or leave it out")


def config_of(
    config: ManagerConfig | None, settings: Mapping[str, object], min_replica_size: int | None = None
) -> ManagerConfig:
    """Return a config with single settings laid over it, and `min_replica_size` if it is given.

    Raises: UnknownSettingError: a name is not a setting of ManagerConfig. ConfigError: a value can't work.
    """
    known = [item.name for item in fields(ManagerConfig)]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            nearest = close[0] if close else None
            raise UnknownSettingError(
                f"Manager has no setting {name!r}; the nearest is {nearest!r}", name=name, nearest=nearest
            )
    if config is not None and not isinstance(config, ManagerConfig):
        raise ConfigError(f"config is a {type(config).__name__}; give a ManagerConfig")
    merged = {**settings, "min_replica_size": min_replica_size} if min_replica_size is not None else settings
    return replace(config if config is not None else ManagerConfig(), **merged)  # type: ignore[arg-type]


def from_environment(
    config: ManagerConfig, environ: Mapping[str, str], *, own_host: Callable[[], str]
) -> ResolvedConfig:
    """Fill in missing settings of a config from the environment, then from the defaults.

    Args:
        config: the user's settings, which take precedence over the environment.
        environ: `os.environ`, or another mapping.
        own_host: returns the name of this machine. It is called if the user gave no host name.
    Raises: ConfigError: a variable has a value that can't work, or a required variable is missing.
    """
    world_size = config.world_size or _whole(environ, "WORLD_SIZE", 1, least=1) or 1
    rank = config.rank if config.rank is not None else _whole(environ, "RANK", None)
    if rank is None:
        if world_size > 1:
            raise ConfigError(
                f"the replica group has {world_size} processes and RANK is not set; set RANK to this process's place "
                "in it, or start the script with torchrun"
            )
        rank = 0
    if rank >= world_size:
        raise ConfigError(
            f"RANK is {rank} and WORLD_SIZE {world_size}; a rank is below the world size: set both for this replica "
            "group alone, or start the script with torchrun"
        )
    store_addr = config.store_addr or environ.get("MASTER_ADDR") or None
    store_port = config.store_port or _whole(environ, "MASTER_PORT", 0, most=MAX_PORT) or 0
    if store_addr is None and world_size > 1:
        raise ConfigError(
            f"the replica group has {world_size} processes and MASTER_ADDR is not set; set MASTER_ADDR and MASTER_PORT "
            "to the group's store, or start the script with torchrun"
        )
    if store_addr is not None and not store_port:
        raise ConfigError(
            f"MASTER_ADDR is {store_addr} and MASTER_PORT is not set; set MASTER_PORT to the port of the group's store"
        )
    lighthouse = config.lighthouse_addr or environ.get("TFT_LIGHTHOUSE") or environ.get("TORCHFT_LIGHTHOUSE") or None
    if lighthouse is None and rank == 0:
        raise ConfigError(
            "the lighthouse address is not set; set TFT_LIGHTHOUSE (or torchft's TORCHFT_LIGHTHOUSE) to it, such as "
            "http://localhost:29510"
        )
    if lighthouse is not None:
        _check_address("the lighthouse (lighthouse_addr, TFT_LIGHTHOUSE or TORCHFT_LIGHTHOUSE)", lighthouse)
    token, tls, insecure = _trust(config, environ, lighthouse)
    rank0_only = _yes_or_no(config.rank0_synchronization_only, environ, "TFT_RANK0_SYNCHRONIZATION_ONLY")
    if is_for_this_machine(token, tls, insecure=insecure):
        _check_this_machine("hostname", config.hostname)
        if rank == 0 and lighthouse is not None:
            for address in targets(lighthouse):
                _check_this_machine(
                    "the lighthouse's host (lighthouse_addr, TFT_LIGHTHOUSE or TORCHFT_LIGHTHOUSE)", host_of(address)
                )
        own_host = _this_machine
    timeouts, timeout_is_explicit = _timeouts(config, environ)
    job = config.job or environ.get("TFT_JOB_ID") or DEFAULT_JOB
    if "/" in job or not job.isprintable() or not job.strip():
        raise ConfigError(f"TFT_JOB_ID is {job!r}; give a printable name without a slash")
    group_scope = f"tft/{job}/{environ.get('TORCHELASTIC_RUN_ID', '')}"
    return ResolvedConfig(
        min_replica_size=config.min_replica_size,
        use_async_quorum=config.use_async_quorum,
        timeouts=timeouts,
        timeout_is_explicit=timeout_is_explicit,
        rank=rank,
        world_size=world_size,
        world_size_mode=config.world_size_mode,
        store_addr=store_addr,
        store_port=store_port,
        lighthouse_addr=lighthouse,
        replica_id=config.replica_id or None,
        port=_whole_or_0(config.port, environ, "TORCHFT_MANAGER_PORT", most=MAX_PORT),
        hostname=config.hostname or own_host(),
        heartbeat_interval=config.heartbeat_interval,
        checkpoint_transport=config.checkpoint_transport,
        init_sync=config.init_sync,
        rank0_synchronization_only=rank0_only,
        max_retries=config.max_retries,
        check_state_every=_whole_or_0(config.check_state_every, environ, "TFT_CHECK_STATE_EVERY"),
        on_divergence=config.on_divergence,
        quorum_retries=_whole_or_0(config.quorum_retries, environ, "TORCHFT_QUORUM_RETRIES"),
        fingerprint=dict(config.fingerprint or {}),
        on_straggler=config.on_straggler,
        log_steps=_yes_or_no(config.log_steps, environ, "TFT_LOG_STEPS"),
        job=job,
        token=token,
        insecure=insecure,
        tls=tls,
        run_scope=f"{group_scope}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        group_scope=group_scope,
    )


def _trust(config: ManagerConfig, environ: Mapping[str, str], lighthouse: str | None) -> tuple[Token, TLS | None, bool]:
    """Return the secret, the certificates, and whether all machines are served without either."""
    try:
        token = check_token(config.token) if config.token is not None else read_token(environ)
        insecure = config.insecure if config.insecure is not None else read_insecure(environ)
        tls = TLS.from_environment(environ)
        check_scheme(lighthouse or "", has_certificates=tls is not None)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error
    return token, tls, insecure


def _check_this_machine(name: str, host: str | None) -> None:
    try:
        if host:
            check_host_without_secret(name, host)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error


def _this_machine() -> str:
    return "localhost"


def _timeouts(config: ManagerConfig, environ: Mapping[str, str]) -> tuple[Timeouts, bool]:
    """Return all time-outs, and whether the user or the environment gave `timeout`."""
    chosen: dict[str, int] = {}
    variables = {
        "timeout": "TORCHFT_TIMEOUT_SEC",
        "quorum_timeout": "TORCHFT_QUORUM_TIMEOUT_SEC",
        "connect_timeout": "TORCHFT_CONNECT_TIMEOUT_SEC",
        "heal_timeout": "",
        "heartbeat_timeout": "TFT_HEARTBEAT_TIMEOUT_SEC",
        "slowest_step": "TFT_SLOWEST_STEP_SEC",
        "lease": "TFT_LEASE_SEC",
    }
    for name, variable in variables.items():
        value: timedelta | None = getattr(config, name)
        if value is not None:
            chosen[f"{name}_ms"] = round(value.total_seconds() * 1_000)
        elif config.timeouts is None and environ.get(variable):
            chosen[f"{name}_ms"] = _milliseconds(variable, environ[variable], zero=_ZERO_MEANS.get(name, ""))
    try:
        timeouts = replace(config.timeouts, **chosen) if config.timeouts is not None else Timeouts(**chosen)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error
    return timeouts, "timeout_ms" in chosen or config.timeouts is not None


_ZERO_MEANS: Final = {"slowest_step": "for any time", "lease": "to ask in every step"}


def _milliseconds(variable: str, text: str, *, zero: str) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if zero and seconds == 0:
        return 0
    # A shorter time would round to 0, which means "no limit" for some settings.
    if not 0.001 <= seconds <= 7 * 24 * 3_600:
        or_any = f", or 0 {zero}" if zero else ""
        raise ConfigError(f"{variable} is {text[:64]!r}; give seconds, for example 60 or 1.5{or_any}")
    return round(seconds * 1_000)


def _whole(
    environ: Mapping[str, str], variable: str, default: int | None, *, least: int = 0, most: int = MAX_WHOLE
) -> int | None:
    text = environ.get(variable)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
        raise ConfigError(f"{variable} is {text[:64]!r}; give a whole number, {least} to {most}")
    return int(text)


def _whole_or_0(value: int | None, environ: Mapping[str, str], variable: str, *, most: int = MAX_WHOLE) -> int:
    return value if value is not None else _whole(environ, variable, 0, most=most) or 0


def _yes_or_no(value: bool | None, environ: Mapping[str, str], variable: str) -> bool:
    text = environ.get(variable) or "0"
    if value is None and text not in ("0", "1"):
        raise ConfigError(f"{variable} is {text[:64]!r}; give 0 or 1")
    return value if value is not None else text == "1"


def _check_hostname(hostname: str) -> None:
    try:
        check_host("hostname", hostname)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error


def _check_address(what: str, address: str) -> None:
    try:
        targets(address)
    except CoordinationConfigError as error:
        raise ConfigError(f"the address of {what} can't be used: {error}") from error
