"""One shared secret for each job: only a caller that shows it is served.

The secret travels as gRPC metadata `authorization: Bearer ...` on every call, and a server with a secret answers
nothing without it. One call of a stranger can end a replica or give the whole job other weights. A server without a
secret therefore serves only this machine, unless it is told to be insecure.

Law of this file: the secret, its source, its comparison, and the rules without one; no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from tft_coord.errors import ConfigError
from tft_coord.tls import TLS
from tft_coord.tokens import JobTokens, Token, TokenFile, accepted_secrets, is_accepted, looks_again
from tft_coord.tokens import check_token as check_token
from tft_coord.transport.address import interface_of, is_loopback

METADATA_KEY: Final = "authorization"
INSECURE: Final = "TFT_INSECURE"
HOW_TO_SERVE_OTHERS: Final = (
    "to serve other machines set TFT_TOKEN to the same secret in every process of the job (make one with "
    f"`openssl rand -hex 32`), or set {INSECURE}=1 to serve everybody without one"
)
ALL_JOBS: Final = ""
_PREFIX: Final = "Bearer "


def read_token(environment: Mapping[str, str]) -> str | TokenFile | None:
    """Return the secret that the environment names, or None.

    Args:
        environment: TFT_TOKEN is the secret itself, TFT_TOKEN_FILE the file that holds it.
    Raises: ConfigError: both are set, the file can't be read, or the secret is invalid.
    """
    token, path = environment.get("TFT_TOKEN"), environment.get("TFT_TOKEN_FILE")
    if token is not None and path is not None:
        raise ConfigError("TFT_TOKEN and TFT_TOKEN_FILE are both set; unset one of them")
    if path is not None:
        if not path:
            raise ConfigError("TFT_TOKEN_FILE is empty; give the path of a file, or unset it")
        return read_token_file(path, "TFT_TOKEN_FILE")
    if token is None:
        return None
    try:
        return check_token(token)
    except ConfigError as error:
        raise ConfigError(f"TFT_TOKEN is {'invalid' if token else 'empty; set it, or unset it'}: {error}") from None


def read_token_file(path: str, setting: str) -> TokenFile:
    """Return the secrets in a file, which is followed from then on.

    Args:
        path: of the file.
        setting: what names it, for messages.
    Raises: ConfigError: the file can't be read, or holds no valid secret.
    """
    try:
        return TokenFile(path)
    except ConfigError as error:
        raise _unusable(path, setting, error) from error.__cause__


def read_job_tokens(path: str, setting: str) -> JobTokens:
    """Return the secrets of single jobs in a file, which is followed from then on. Args and Raises: as above."""
    try:
        return JobTokens(path)
    except ConfigError as error:
        raise _unusable(path, setting, error) from error.__cause__


def _unusable(path: str, setting: str, error: ConfigError) -> ConfigError:
    why = str(error) if "can't be read" in str(error) else f"{path}, which holds no valid secret: {error}"
    return ConfigError(f"{setting} names {why}")


def read_insecure(environment: Mapping[str, str]) -> bool:
    """Return whether TFT_INSECURE asks to serve everybody without a secret. Raises: ConfigError: it is neither 0 nor
    1."""
    text = environment.get(INSECURE) or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{INSECURE} is {text[:64]!r}; give 0 or 1")
    return text == "1"


def bind_without_secret(bind: str, name: str = "bind") -> str:
    """Return where a server without a secret listens: at loopback only.

    Args:
        bind: the requested `host:port`. All interfaces become `localhost`.
        name: of the setting.
    Raises: ConfigError: it names an interface that other machines reach.
    """
    host = interface_of(bind)
    if not host:
        return f"localhost:{bind.rpartition(':')[2]}"
    if not is_loopback(host):
        raise ConfigError(f"{name} is {bind!r} and no shared secret is set; {HOW_TO_SERVE_OTHERS}")
    return bind


def check_host_without_secret(name: str, host: str) -> None:
    """Check that a server without a secret may use that host as its name.

    Args:
        name: of the setting.
        host: a name or an address.
    Raises: ConfigError: it means another machine to others.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"{name} is {host!r} and no shared secret is set, so the server accepts only this machine, as localhost; "
            f"{HOW_TO_SERVE_OTHERS}"
        )


def call_metadata(token: Token) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a client sends with its next call."""
    return tuple((METADATA_KEY, _PREFIX + secret) for secret in accepted_secrets(token)[:1])


def admits(token: Token, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether a call with that metadata may be answered."""
    if token is None:
        return True
    shown = shown_secret(metadata)
    return shown is not None and is_accepted(token, shown)


def shown_secret(metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
    """Return the secret that a call shows, or None."""
    shown = [value.encode() if isinstance(value, str) else value for key, value in metadata if key == METADATA_KEY]
    prefix = _PREFIX.encode()
    return shown[0].removeprefix(prefix) if len(shown) == 1 and shown[0].startswith(prefix) else None


@final
@dataclass(frozen=True, slots=True)
class Trust:
    """What a client shows to the servers of its job, and by what it knows them.

    Args:
        token: the secret, or None.
        tls: the certificates, or None.
    """

    token: Token = field(repr=False)
    tls: TLS | None = None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of the next call."""
        return call_metadata(self.token)

    def looks_again(self) -> bool:
        """Look at the secret's file after a refusal. Return whether it has changed."""
        return looks_again(self.token)


def is_for_this_machine(token: Token, tls: TLS | None, *, insecure: bool) -> bool:
    """Return whether a server may serve only this machine, because it can't tell who asks."""
    return token is None and not insecure and not (tls is not None and tls.check_client)


@final
class Gate:
    """What the secret of a caller opens at a server.

    Args:
        token: opens everything; None: everything is open to everybody.
        jobs: secrets that open one job each, at a lighthouse.
    Raises: ConfigError: there are secrets of jobs and no secret that opens everything, or one secret is both.
    """

    def __init__(self, token: Token, jobs: JobTokens | None = None) -> None:
        if jobs is not None and token is None:
            raise ConfigError(
                f"{jobs.path} has secrets of jobs, and this lighthouse has none of its own, so it would serve "
                "everybody; set TFT_TOKEN or TFT_TOKEN_FILE as well"
            )
        if jobs is not None:
            _check_apart(token, jobs)
        self._token = token
        self._jobs = jobs

    def opens(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """Return what a call with that metadata may use: ALL_JOBS, the name of one job, or None for nothing."""
        if self._token is None:
            return ALL_JOBS
        shown = shown_secret(metadata)
        if shown is None:
            return None
        job = self._jobs.job_of(shown) if self._jobs is not None else None
        return ALL_JOBS if is_accepted(self._token, shown) else job

    @property
    def has_secret(self) -> bool:
        """Return whether a caller must show a secret."""
        return self._token is not None

    def secret_of(self, job: str) -> Token:
        """Return the secret that opens the servers of a job."""
        own = self._jobs.shown(job) if self._jobs is not None else None
        return own if own is not None else self._token


def _check_apart(token: Token, jobs: JobTokens) -> None:
    for secret in accepted_secrets(token):
        job = jobs.job_of(secret.encode())
        if job is not None:
            raise ConfigError(
                f"{jobs.path} gives job {job} the secret of this lighthouse, which opens all jobs; give the job its own"
            )


def opens_job(opened: str | None, job: str) -> bool:
    """Return whether a result of `Gate.opens` includes that job."""
    return opened is not None and opened in (ALL_JOBS, job)


def wrong_job(opened: str | None, job: str) -> str:
    """Return the sentence that refuses a call for another job than the secret's."""
    if opened is None:
        return "the secret of this call is no longer valid; show the present one"
    return f"the secret of this call opens job {opened!r} alone, and the call is for job {job[:64]!r}; show that job's"
