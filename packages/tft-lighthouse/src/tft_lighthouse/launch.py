"""From settings to a lighthouse, and from other settings to the same lighthouse.

Law of this file: values of settings to arguments of the server; of files it opens those with secrets and certificates.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tft_coord import ConfigError, StragglerAction, StragglerPolicy
from tft_coord.lighthouse import (
    TLS,
    Gate,
    JobSettings,
    JobTokens,
    Limits,
    Token,
    is_for_this_machine,
    read_job_tokens,
    read_token,
    read_token_file,
)
from tft_lighthouse import defaults
from tft_lighthouse.etcd.settings import EtcdConfig
from tft_lighthouse.server import LighthouseServer, check_addresses, lighthouse_config
from tft_lighthouse.settings import BY_NAME, DEFAULT, Settings, Value

TOKEN_VARIABLES = ("TFT_TOKEN", "TFT_TOKEN_FILE")
MOST_PORT = "65535"
TLS_FILES = ("tls_cert", "tls_key", "tls_ca")


def start(settings: Settings) -> LighthouseServer:
    """Return a lighthouse with these settings. Raises: ConfigError: one is wrong, or an address can't be bound."""
    check(settings)
    return LighthouseServer(
        bind=settings["bind"],
        on_lost_state=settings["on_lost_state"],
        cluster_id=settings["cluster_id"],
        token=_secret(settings)[0],
        job_tokens=_job_tokens(settings),
        tls=_tls(settings),
        insecure=settings["insecure"],
        http_bind=http_bind_of(settings["http_bind"] or "", settings["bind"]),
        max_message_bytes=settings["max_message_bytes"],
        stragglers=_stragglers(settings),
        etcd=_etcd(settings),
        **_timeouts(settings),
        **_reloadable(settings),
    )


def check(settings: Settings) -> str | None:
    """Check settings as `start` does, without a port.

    Returns: what has set the shared secret; None: there is none.
    Raises: ConfigError: a setting is wrong, or two of them clash.
    """
    lighthouse_config(
        on_lost_state=settings["on_lost_state"],
        cluster_id=settings["cluster_id"],
        stragglers=_stragglers(settings),
        **_timeouts(settings),
        **_reloadable(settings),
    )
    etcd = _etcd(settings)
    if etcd is not None:
        etcd.read_files()
    token, source = _secret(settings)
    Gate(token, _job_tokens(settings))
    is_local = is_for_this_machine(token, _tls(settings), insecure=settings["insecure"])
    http_bind = http_bind_of(settings["http_bind"] or "", settings["bind"])
    check_addresses(settings["bind"], http_bind, for_this_machine=is_local)
    return source


def apply(server: LighthouseServer, before: Settings, now: Settings) -> tuple[Settings, str]:
    """Use what may change of other settings.

    Args:
        server: it runs with `before`.
        before, now: the settings.
    Returns: the settings in force from now on; and what has changed, and what needs a restart, in words.
    Raises: ConfigError: a setting is wrong; nothing has changed.
    """
    check(now)
    changes = list(_changes(before, now))
    reloaded = [sentence for sentence, reloads in changes if reloads]
    late = [sentence for sentence, reloads in changes if not reloads]
    server.reconfigure(**_reloadable(now))
    said = f"reloaded {now.file or 'the settings'}; {', '.join(reloaded) or 'no setting has changed'}"
    values = {name: (now if setting.reloads else before).values[name] for name, setting in BY_NAME.items()}
    return replace(now, values=values), f"{said}; these need a restart: {', '.join(late)}" if late else said


def http_bind_of(text: str, bind: str) -> str | None:
    """Return where the HTTP port listens, or None for no such port.

    Args:
        text: `host:port`, or a port on the interface of `bind`; "0" for none. "": the port after that of `bind`, or a
            free one if `bind` takes a free one.
        bind: where the lighthouse listens for its replicas.
    Raises: ConfigError: the port after that of `bind` is needed, and there is none.
    """
    if text == "0":
        return None
    if ":" in text:
        return text
    host, _, port = bind.rpartition(":")
    if not text and port == MOST_PORT:
        raise ConfigError(f"bind has port {port}, and there is no next one for HTTP; give http_bind, or 0 for none")
    if not text and port.isascii() and port.isdigit():
        text = str(int(port) + 1 if int(port) else 0)
    return f"{host}:{text}"


def _reloadable(settings: Settings) -> dict[str, Any]:
    """Return the arguments that a running lighthouse takes too."""
    return {
        "min_replicas": settings["min_replicas"],
        "limits": Limits(
            max_jobs=settings["max_jobs"],
            max_replicas=settings["max_replicas"],
            max_streams=settings["max_streams"],
        ),
        "jobs": {
            job: JobSettings(**{name: _number_of(found) for name, found in values.items()})
            for job, values in settings.jobs.items()
        },
    }


def _number_of(found: Value) -> int:
    assert isinstance(found.value, int), "the settings of a job are numbers"
    return found.value


def _timeouts(settings: Settings) -> dict[str, Any]:
    names = ("join_timeout_ms", "quorum_tick_ms", "heartbeat_timeout_ms", "lost_state_timeout_ms")
    return {name: settings[name] for name in names}


def _stragglers(settings: Settings) -> StragglerPolicy:
    action, ratio = settings["stragglers"], settings["straggler_ratio"]
    if action == "off" and ratio != defaults.STRAGGLER_RATIO:
        raise ConfigError(f"straggler_ratio {ratio:g} has no effect with stragglers off; leave one of the two out")
    return StragglerPolicy(action=StragglerAction(action), ratio=ratio)


def _secret(settings: Settings) -> tuple[Token, str | None]:
    """Return the shared secret and what has set it. Raises: ConfigError: it can't be read, or is set twice."""
    path, source = str(_path(settings, "token_file")), settings.values["token_file"].source
    if source.startswith("--"):
        return read_token_file(path, source), f"{source} {path}"
    from_environment = read_token(os.environ)
    if from_environment is not None:
        return from_environment, next(name for name in TOKEN_VARIABLES if name in os.environ)
    if source == DEFAULT:
        return None, None
    return read_token_file(path, f"token_file in {source}"), f"token_file in {source}"


def _job_tokens(settings: Settings) -> JobTokens | None:
    """Return the secrets of single jobs. Raises: ConfigError: they can't be read, or are wrong."""
    path = _path(settings, "job_tokens")
    return read_job_tokens(path, "job_tokens") if path is not None else None


def _tls(settings: Settings) -> TLS | None:
    """Return the certificates. Raises: ConfigError: they can't be read, or don't fit together."""
    named = {BY_NAME[name].environment: _path(settings, name) or "" for name in TLS_FILES}
    return TLS.from_environment({**named, "TFT_TLS_CLIENT_AUTH": str(int(settings["tls_client_auth"]))})


def _path(settings: Settings, name: str) -> str | None:
    """Return the path that a setting names, None for none. In the file of settings it is relative to its folder."""
    path, source = settings.values[name].value, settings.values[name].source
    if path is None or source != settings.file:
        return str(path) if path is not None else None
    return os.path.join(os.path.dirname(source), str(path))


def _etcd(settings: Settings) -> EtcdConfig | None:
    """Return the settings of the election; None: there is none. Raises: ConfigError: one is wrong, or has no use."""
    if not settings["etcd"]:
        for name in ("etcd_prefix", "etcd_ttl_s", "etcd_ca", "etcd_cert", "etcd_key"):
            if settings[name] != BY_NAME[name].default:
                raise ConfigError(f"{name} has no effect without etcd; give etcd its endpoints, or leave {name} out")
        return None
    return EtcdConfig(
        endpoints=tuple(endpoint.strip() for endpoint in settings["etcd"].split(",")),
        prefix=settings["etcd_prefix"],
        ttl_s=settings["etcd_ttl_s"],
        ca=_path(settings, "etcd_ca"),
        cert=_path(settings, "etcd_cert"),
        key=_path(settings, "etcd_key"),
    )


def _changes(before: Settings, now: Settings) -> Iterator[tuple[str, bool]]:
    """Yield each change in words, and whether a running lighthouse takes it."""
    for name, setting in BY_NAME.items():
        if before[name] != now[name]:
            yield f"{name} {_said(before[name])} -> {_said(now[name])}", setting.reloads
    for job in {**before.jobs, **now.jobs}:
        old, new = before.jobs.get(job, {}), now.jobs.get(job, {})
        for name in {**old, **new}:
            was, is_now = (each[name].value if name in each else None for each in (old, new))
            if was != is_now:
                yield f"jobs.{job}.{name} {_said(was)} -> {_said(is_now)}", True


def _said(value: object) -> str:
    return "(not set)" if value is None else str(value)
