"""The settings of the command `tft-lighthouse`: one table, from which its flags, variables, file keys, help and
documentation come.

A flag beats a variable of the environment, which beats the file, which beats the default. Every value remembers where
it came from.

Law of this file: the table, and text or TOML values to checked values. Nothing heavy is imported, so that --help and a
wrong value get an answer at once.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from tft_coord import ConfigError
from tft_lighthouse import defaults

Given = int | float | str | bool | None

PREFIX: Final = "TFT_LIGHTHOUSE_"
CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"
DEFAULT: Final = "default"  # the source of a value that nobody has set
JOBS: Final = "jobs"
WEEK_MS: Final = 7 * 24 * 3_600_000
JOB_NAME_MOST_BYTES: Final = 256
SHOWN_MOST: Final = 64
# Kubernetes describes a service to every container of its namespace; one that is called tft-lighthouse gives these.
_OF_KUBERNETES: Final = re.compile(r"^TFT_\w+_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_.*)?)$")


class Kind(enum.Enum):
    """The type of a setting."""

    NUMBER = "a whole number"
    RATIO = "a number"
    TEXT = "text in quotes"
    CHOICE = "one of its words"
    SWITCH = "true or false"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table.

    Args:
        name: key in the file; the flag is `--name`.
        kind: its type.
        default: value that applies if nobody sets it; None: it has none.
        help: what it is, one phrase.
        least, most: the range of a number.
        unit: of that range, in words.
        choices: the words of a choice.
        metavar: stands for the value in the help.
        variable: of the environment; "": the prefix and the name.
        reloads: SIGHUP applies a change of it.
        of_job: a job may have its own value.
    """

    name: str
    kind: Kind
    default: Given
    help: str
    least: float = 1
    most: float = 0
    unit: str = ""
    choices: tuple[str, ...] = ()
    metavar: str = "N"
    variable: str = ""
    reloads: bool = False
    of_job: bool = False

    @property
    def environment(self) -> str:
        """Return the name of its variable."""
        return self.variable or PREFIX + self.name.upper()

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the spellings of its flag."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.name.replace('_', '-')}")))

    @property
    def allowed(self) -> str:
        """Return which values it takes, in words."""
        if self.kind in (Kind.NUMBER, Kind.RATIO):
            return f"{self.least:g} to {self.most:.15g}{self.unit}"
        if self.kind is Kind.CHOICE:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        return str(self.kind.value)

    def parsed(self, text: str, source: str) -> Given:
        """Return the value in the text of a flag or a variable. Raises: ConfigError: it is not allowed."""
        value: Given = text
        if self.kind is Kind.SWITCH:
            if text not in ("0", "1"):
                raise _wrong(source, self.name, text, "0 or 1")
            return text == "1"
        if self.kind in (Kind.NUMBER, Kind.RATIO):
            whole = re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip(), re.ASCII)
            try:
                value = int(text) if whole else float(text) if self.kind is Kind.RATIO else text
            except ValueError:
                value = text
        return self.checked(value, source)

    def checked(self, value: Any, source: str, where: str = "") -> Given:
        """Return the value if it is allowed.

        Args:
            value: from the text, or from TOML.
            source: where it was set, for the message.
            where: its place in the file; "": the name.
        Raises: ConfigError: it is not allowed.
        """
        where, kind = where or self.name, self.kind
        if not _is_of(kind, value):
            range_of = f", {self.allowed}" if kind in (Kind.NUMBER, Kind.RATIO) else ""
            raise _wrong(source, where, value, self.allowed if kind is Kind.CHOICE else f"{kind.value}{range_of}")
        if kind in (Kind.NUMBER, Kind.RATIO) and not self.least <= value <= self.most:
            raise _wrong(source, where, value, self.allowed)
        if kind is Kind.CHOICE and value not in self.choices:
            raise _wrong(source, where, value, self.allowed)
        if kind is Kind.TEXT and not value.isprintable():
            raise _wrong(source, where, value, "printable characters only")
        found: Given = value
        return found


def _is_of(kind: Kind, value: object) -> bool:
    """Return whether a value has the type of a kind; bool is a kind of int to Python only."""
    if isinstance(value, bool):
        return kind is Kind.SWITCH
    types: dict[Kind, tuple[type, ...]] = {Kind.NUMBER: (int,), Kind.RATIO: (int, float), Kind.SWITCH: ()}
    return isinstance(value, types.get(kind, (str,)))


def _number(name: str, default: int, help_text: str, least: int, most: int, **more: Any) -> Setting:
    return Setting(name=name, kind=Kind.NUMBER, default=default, help=help_text, least=least, most=most, **more)


def _milliseconds(name: str, default: int, help_text: str, least: int) -> Setting:
    return _number(name, default, help_text, least, WEEK_MS, unit=" milliseconds (a week)")


def _choice(name: str, default: str, help_text: str, choices: tuple[str, ...], **more: Any) -> Setting:
    metavar = "|".join(choices)
    return Setting(
        name=name, kind=Kind.CHOICE, default=default, help=help_text, choices=choices, metavar=metavar, **more
    )


def _text(name: str, default: str | None, help_text: str, metavar: str, **more: Any) -> Setting:
    return Setting(name=name, kind=Kind.TEXT, default=default, help=help_text, metavar=metavar, **more)


SETTINGS: Final = (
    _text("bind", defaults.BIND, "address to listen on for replicas; port 0 takes a free port", "HOST:PORT"),
    _text(
        "http_bind",
        None,
        "where to serve status, metrics and health over HTTP: an address, a port, or 0 for none; without it the port "
        "after that of bind",
        "HOST:PORT",
    ),
    _text(
        "cluster_id", None, "name shared by all lighthouses of a job; without it this one gets a random name", "NAME"
    ),
    _text(
        "token_file",
        None,
        "file with the secret that every process of the jobs must share; the file itself may change",
        "FILE",
        variable="TFT_TOKEN_FILE",
    ),
    _text(
        "job_tokens",
        None,
        "file with lines JOB = secret, of secrets that open one job each; the file itself may change",
        "FILE",
    ),
    Setting(
        name="insecure",
        kind=Kind.SWITCH,
        default=False,
        help="serve all machines without a secret; without it and without a secret only this machine is served",
        variable="TFT_INSECURE",
    ),
    _text(
        "tls_cert",
        None,
        "PEM file with the certificate of this machine; all connections use TLS then",
        "FILE",
        variable="TFT_TLS_CERT",
    ),
    _text("tls_key", None, "PEM file with the private key of the certificate", "FILE", variable="TFT_TLS_KEY"),
    _text("tls_ca", None, "PEM file with the only authorities that are trusted", "FILE", variable="TFT_TLS_CA"),
    Setting(
        name="tls_client_auth",
        kind=Kind.SWITCH,
        default=False,
        help="require a certificate of every client too",
        variable="TFT_TLS_CLIENT_AUTH",
    ),
    _number(
        "min_replicas", defaults.MIN_REPLICAS, "smallest quorum", 1, defaults.QUORUM_MOST, reloads=True, of_job=True
    ),
    _milliseconds(
        "join_timeout_ms",
        defaults.JOIN_TIMEOUT_MS,
        "how long a quorum waits for healthy replicas that have not asked",
        0,
    ),
    _milliseconds("heartbeat_timeout_ms", defaults.HEARTBEAT_TIMEOUT_MS, "silence after which a replica is lost", 2),
    _milliseconds("quorum_tick_ms", defaults.QUORUM_TICK_MS, "how often the lighthouse checks its timeouts", 1),
    _choice(
        "stragglers",
        defaults.STRAGGLERS[0],
        "action against a replica whose own part of a step takes much longer than the others'",
        defaults.STRAGGLERS,
    ),
    Setting(
        name="straggler_ratio",
        kind=Kind.RATIO,
        default=defaults.STRAGGLER_RATIO,
        help="a straggler takes more than this times the median of the others",
        least=1.1,
        most=1_000,
        metavar="X",
    ),
    _choice(
        "on_lost_state",
        defaults.ON_LOST_STATE,
        "if all holders of the newest state fell silent: wait for them, or restart from an older state",
        defaults.LOST_STATE_CHOICES,
    ),
    _milliseconds("lost_state_timeout_ms", defaults.LOST_STATE_TIMEOUT_MS, "how long on_lost_state = wait waits", 0),
    _number("max_jobs", defaults.MAX_JOBS, "most jobs that are remembered", 1, defaults.JOBS_MOST, reloads=True),
    _number(
        "max_replicas",
        defaults.MAX_REPLICAS,
        "most connected replicas of one job",
        1,
        defaults.QUORUM_MOST,
        reloads=True,
        of_job=True,
    ),
    _number(
        "max_streams",
        defaults.MAX_STREAMS,
        "most open streams and waiting calls, of all jobs together",
        1,
        defaults.STREAMS_MOST,
        reloads=True,
    ),
    _number(
        "max_message_bytes",
        defaults.MAX_MESSAGE_BYTES,
        "largest message that a client may send",
        defaults.MESSAGE_BYTES_LEAST,
        defaults.MESSAGE_BYTES_MOST,
        unit=" bytes",
    ),
    _text(
        "etcd",
        None,
        "endpoints of etcd, with commas between them: of all lighthouses with the same etcd and prefix one leads, and "
        "another one takes over when it dies; without it there is no election",
        "HOST:PORT,...",
    ),
    _text(
        "etcd_prefix",
        defaults.ETCD_PREFIX,
        "prefix of the keys in etcd, another one for each group of lighthouses",
        "PREFIX",
    ),
    _number(
        "etcd_ttl_s",
        defaults.ETCD_TTL_S,
        "time to live of the leader's lease: a standby leads about that long after the leader's death",
        defaults.ETCD_TTL_S,
        defaults.ETCD_TTL_S_MOST,
        unit=" seconds",
    ),
    _text(
        "etcd_ca",
        None,
        "for https:// endpoints of etcd: file with the certificates that sign etcd's, PEM; without it those of this "
        "machine",
        "FILE",
    ),
    _text(
        "etcd_cert", None, "for https:// endpoints of etcd: file with this lighthouse's own certificate, PEM", "FILE"
    ),
    _text("etcd_key", None, "file with the key of etcd_cert, PEM", "FILE"),
    _choice(
        "log_format",
        defaults.LOG_FORMATS[0],
        "log lines for people, or one JSON object a line",
        defaults.LOG_FORMATS,
    ),
    _choice("log_level", "info", "the least severe lines that are logged", defaults.LOG_LEVELS, reloads=True),
)
BY_NAME: Final = {setting.name: setting for setting in SETTINGS}


@final
@dataclass(frozen=True, slots=True)
class Value:
    """A value, and its source: a flag, a variable, the path of a file, or `DEFAULT`."""

    value: Given
    source: str


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """All settings in force.

    Args:
        values: of every setting, by name.
        jobs: the settings of single jobs, by job and name.
        file: path of the file; None: there is none.
    """

    values: Mapping[str, Value]
    jobs: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    file: str | None = None

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting."""
        return self.values[name].value

    def sources_of(self, sentence: str) -> str:
        """Return where the settings that a sentence names were set, as a phrase in brackets to put after it; "" if all
        are defaults."""
        named = [name for name, value in self.values.items() if value.source != DEFAULT]
        found = [name for name in named if re.search(rf"(?<![\w-]){name}\b", sentence)]
        return f" ({', '.join(f'{name} is set by {self.values[name].source}' for name in found)})" if found else ""


def resolve(
    flags: Mapping[str, str | None], environment: Mapping[str, str], file: Mapping[str, Any], path: str | None
) -> Settings:
    """Return the settings in force.

    Args:
        flags: text of each given flag, by name.
        environment: of this process.
        file: its keys; {} without one.
        path: of the file, or None.
    Raises: ConfigError: a value is not allowed, or a key or a variable is unknown.
    """
    _check_keys(file, [*BY_NAME, JOBS], path or "", "")
    _check_variables(environment)
    values = {}
    for name, setting in BY_NAME.items():
        flag, variable = flags.get(name), environment.get(setting.environment, "")
        if flag is not None:
            values[name] = Value(setting.parsed(flag, f"--{name}"), f"--{name}")
        elif variable:
            values[name] = Value(setting.parsed(variable, setting.environment), setting.environment)
        elif name in file:
            values[name] = Value(setting.checked(file[name], path or ""), path or "")
        else:
            values[name] = Value(setting.default, DEFAULT)
    return Settings(values, _jobs(file.get(JOBS, {}), path or ""), path)


def _jobs(found: Any, path: str) -> dict[str, dict[str, Value]]:
    if not isinstance(found, dict):
        raise _wrong(path, JOBS, found, f"tables, such as [{JOBS}.NAME]")
    jobs: dict[str, dict[str, Value]] = {}
    of_job = {name: setting for name, setting in BY_NAME.items() if setting.of_job}
    for job, table in found.items():
        if not (job.isprintable() and 0 < len(job.encode()) <= JOB_NAME_MOST_BYTES):
            raise _wrong(path, f"the name of a job in {JOBS}", job, f"1 to {JOB_NAME_MOST_BYTES} printable bytes")
        if not isinstance(table, dict):
            raise _wrong(path, f"{JOBS}.{job}", table, f"a table with {' or '.join(of_job)}")
        _check_keys(table, of_job, path, f"{JOBS}.{job}.")
        jobs[job] = {
            name: Value(of_job[name].checked(value, path, f"{JOBS}.{job}.{name}"), path)
            for name, value in table.items()
        }
    return jobs


def _check_keys(found: Iterable[str], known: Collection[str], path: str, prefix: str) -> None:
    for key in found:
        if key in known:
            continue
        if key in ("token", "secret"):
            raise ConfigError(f"{path}: {prefix}{key} is no key; put the secret into a file, and name it by token_file")
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {prefix}{near[0]}?" if near else f"the keys are {', '.join(sorted(known))}"
        raise ConfigError(f"{path}: unknown key {_shown(prefix + key)}; {hint}")


def _check_variables(environment: Mapping[str, str]) -> None:
    """Check that no variable of this project is misspelt."""
    # Here, because a request for help needs neither it nor grpc.
    from tft_coord.lighthouse import KNOWN_VARIABLES, nearest_variable

    known = [CONFIG_VARIABLE, *(setting.environment for setting in SETTINGS)]
    for name in sorted(environment):
        own = name.removeprefix(PREFIX)
        if name in KNOWN_VARIABLES or _OF_KUBERNETES.search(name):
            continue
        if own == JOBS.upper() and own != name:
            raise ConfigError(
                f"unknown variable {_shown(name)}; only a file (--config) sets the settings of single jobs"
            )
        near = f"TFT_{own}" if f"TFT_{own}" in KNOWN_VARIABLES else nearest_variable(name)
        if near is None and own == name:
            continue  # the user's own
        hint = f"did you mean {near}?" if near else f"the variables are {', '.join(sorted(known))}"
        raise ConfigError(f"unknown variable {_shown(name)} in the environment; {hint}")


def _wrong(source: str, where: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{source}: {where} is {_shown(value)}; give {allowed}")


def _shown(value: object) -> str:
    """Return a value as a message can show it: short, and on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**SHOWN_MOST:
        return f"a number of more than {SHOWN_MOST} digits"
    text = ("false", "true")[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_MOST else f"{text[:SHOWN_MOST]}…"
