"""The secrets that a process accepts and shows: given once, or read from files that may change.

A secret is changed without a restart in one of two ways. If all processes read the same file, write the new secret into
it. A file of each host's own may have several lines: the first secret is shown, and all are accepted.

Law of this file: secrets, the files they are in, and their comparison; no sockets.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, final

from tft_coord.errors import ConfigError
from tft_coord.secret_files import warn_if_readable

MAX_TOKEN_BYTES: Final = 4096
MAX_LINES: Final = 8  # of a file with one job's secrets
MAX_JOB_FILE_BYTES: Final = 1 << 20
LOOK_EVERY_S: Final = 1.0  # at a file
OVERLAP_S: Final = 60.0  # how long a secret that has left its file is still accepted
# A secret that is not known makes a server look at the file at once, because it may be new. Any host can show one, so
# these looks are at least so many times as far apart as the last one took, up to the longest pause.
_LOOK_TIMES: Final = 10
_LONGEST_PAUSE_S: Final = 0.1

logger = logging.getLogger(__name__)


def check_token(token: str) -> str:
    """Return the token if it is valid.

    Raises: ConfigError: it is empty, too long, or has characters that a header can't carry.
    """
    if not 0 < len(token) <= MAX_TOKEN_BYTES or not all("!" <= character <= "~" for character in token):
        raise ConfigError(
            f"the shared secret must be 1 to {MAX_TOKEN_BYTES} printable ASCII characters without spaces; "
            "make one with `openssl rand -hex 32`"
        )
    return token


@final
class _Watched:
    """The secrets in a file, by job, as they are now.

    Args:
        path: of the file.
        parse: returns the secrets in its text, by job. Raises: ConfigError.
        most_bytes: of the file.
        seconds: returns the time.
    Raises: ConfigError: the file can't be read, or is invalid.
    """

    def __init__(
        self,
        path: str,
        parse: Callable[[str], Mapping[str, tuple[str, ...]]],
        most_bytes: int,
        seconds: Callable[[], float],
    ) -> None:
        self._path = path
        self._parse = parse
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._lock = threading.Lock()
        self._fault = ""
        self._previous: dict[tuple[str, str], float] = {}  # (job, secret) that has left -> until when it is accepted
        self._version, self._found = self._read()
        self._looked_s = seconds()
        self._took_s = 0.0  # the last look

    def shown(self, job: str) -> str | None:
        """Return the secret to show for a job."""
        self._look(LOOK_EVERY_S)
        return next(iter(self._found.get(job, ())), None)

    def accepted(self) -> Iterable[tuple[str, str]]:
        """Return each job with each secret that it accepts."""
        self._look(LOOK_EVERY_S)
        now_s = self._seconds()
        current = [(job, secret) for job, found in self._found.items() for secret in found]
        return [*current, *(each for each, until_s in self._previous.copy().items() if now_s < until_s)]

    def job_of(self, secret: bytes) -> str | None:
        """Return the job that accepts a secret, or None. The file is looked at before that."""
        for _ in range(2):
            known, job = self._version, None
            for each, accepted in self.accepted():  # all of them: the time must not tell which one fits
                if hmac.compare_digest(accepted.encode(), secret):
                    job = each
            if job is not None or not self._is_changed_since(known):
                return job
        return None

    def look_again(self) -> bool:
        """Look at the file now, because a secret was refused. Return whether it has changed."""
        return self._is_changed_since(self._version)

    def _is_changed_since(self, known: object) -> bool:
        self._look(min(_LOOK_TIMES * self._took_s, _LONGEST_PAUSE_S))
        return self._version != known

    def _look(self, every_s: float) -> None:
        # If another thread reads, or one that a forked child does not have, what was there before is good meanwhile.
        if self._seconds() - self._looked_s < every_s or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked_s = self._seconds()
            self._update()
            self._took_s = self._seconds() - self._looked_s
        finally:
            self._lock.release()

    def _update(self) -> None:
        try:
            if _version_of(os.stat(self._path)) == self._version:
                self._fault = ""
                return
            version, found = self._read()
        except (OSError, ConfigError) as error:
            if str(error) != self._fault:
                self._fault = str(error)
                logger.warning("the secrets that were read before stay in use: %s", error)
            return
        self._fault = ""
        until_s = self._looked_s + OVERLAP_S
        gone = {(job, secret) for job, secrets in self._found.items() for secret in secrets if job in found}
        self._previous = {
            (job, secret): end_s
            for (job, secret), end_s in self._previous.items()
            if self._looked_s < end_s and job in found
        }
        self._previous.update(dict.fromkeys(gone - {(job, each) for job in found for each in found[job]}, until_s))
        closed = sorted(set(self._found) - set(found))
        self._version, self._found = version, found
        logger.info(
            "read the changed file %s; a secret that is no longer in it is accepted for %g s%s",
            self._path,
            OVERLAP_S,
            f", but none of the jobs that have left it: {', '.join(closed)}" if closed else "",
        )

    def _read(self) -> tuple[tuple[int, int, int], Mapping[str, tuple[str, ...]]]:
        try:
            status, text = _read_file(self._path, self._most_bytes)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"{self._path}, which can't be read: {reason or error}") from error
        found = self._parse(text)
        warn_if_readable(self._path, status.st_mode)
        return _version_of(status), found


@final
class TokenFile:
    """The secrets in a file, one a line: the first is shown, and all are accepted.

    The file is looked at once a second at most, and when a different secret is shown. A secret that has left the file
    is accepted for `OVERLAP_S` more. A file that can't be read leaves the secrets that were read before.

    Args:
        path: of the file.
        seconds: returns the time, on a monotonic clock.
    Raises: ConfigError: it can't be read, or a line is no secret.
    """

    def __init__(self, path: str, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._watched = _Watched(path, _lines, MAX_LINES * (MAX_TOKEN_BYTES + 2) + 16, seconds)

    def __call__(self) -> tuple[str, ...]:
        """Return the secrets: first the one to show, and then all others that are accepted."""
        first = self._watched.shown("")
        others = [secret for _, secret in self._watched.accepted() if secret != first]
        return (*(() if first is None else (first,)), *others)

    def accepts(self, secret: bytes) -> bool:
        """Return whether a server with this file accepts that secret."""
        return self._watched.job_of(secret) is not None

    def look_again(self) -> bool:
        """Look at the file now, because a secret was refused. Return whether it has changed."""
        return self._watched.look_again()

    def __repr__(self) -> str:
        """Return the path, without a secret."""
        return f"TokenFile({self.path!r})"


Token: TypeAlias = str | TokenFile | None
"""A secret, a file with secrets, or none."""


@final
class JobTokens:
    """The secrets of a lighthouse's jobs, in a file of lines `JOB = secret`; a job may have several lines.

    Args: as for `TokenFile`.
    Raises: ConfigError: it can't be read, or a line is invalid; the message has the number of the line.
    """

    def __init__(self, path: str, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._watched = _Watched(path, _job_lines, MAX_JOB_FILE_BYTES, seconds)

    def shown(self, job: str) -> str | None:
        """Return the secret that opens the servers of a job, or None if the job has none of its own."""
        return self._watched.shown(job)

    def job_of(self, secret: bytes) -> str | None:
        """Return the job that a secret opens, or None."""
        return self._watched.job_of(secret)

    def __repr__(self) -> str:
        """Return the path, without a secret."""
        return f"JobTokens({self.path!r})"


def check(token: Token) -> Token:
    """Return the secret if it is valid. Raises: ConfigError."""
    if isinstance(token, str):
        return check_token(token)
    if token is not None and not isinstance(token, TokenFile):
        raise ConfigError(f"token is of type {type(token).__name__}; give the secret as a string, a TokenFile, or None")
    return token


def accepted_secrets(token: Token) -> tuple[str, ...]:
    """Return the accepted secrets, first the one to show; none without a secret."""
    if isinstance(token, TokenFile):
        return token()
    return () if token is None else (token,)


def looks_again(token: Token) -> bool:
    """Look at the file of a secret that was refused, if there is one. Return whether it has changed."""
    return isinstance(token, TokenFile) and token.look_again()


def is_accepted(token: Token, secret: bytes) -> bool:
    """Return whether a server with that secret accepts the given one."""
    if isinstance(token, TokenFile):
        return token.accepts(secret)
    return token is not None and hmac.compare_digest(token.encode(), secret)


def _lines(text: str) -> Mapping[str, tuple[str, ...]]:
    found = [line.rstrip("\r") for line in text.rstrip("\r\n").split("\n")] if text else []
    found = [line for line in found if line] or [""]
    if len(found) > MAX_LINES:
        raise ConfigError(f"the file has {len(found)} lines; give at most {MAX_LINES} secrets, one a line")
    return {"": tuple(map(check_token, found))}


def _job_lines(text: str) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        job, equals, secret = (part.strip() for part in line.rpartition(" = "))
        if not equals or not job or not job.isprintable() or "/" in job:
            raise ConfigError(f"line {number} is no secret of a job; give `JOB = secret`, with spaces around the sign")
        try:
            found[job] = (*found.get(job, ()), check_token(secret))
        except ConfigError as error:
            raise ConfigError(f"line {number}, of job {job}: {error}") from None
        if len(found[job]) > MAX_LINES:
            raise ConfigError(f"job {job} has more than {MAX_LINES} secrets; remove the old ones")
    if not found:
        raise ConfigError("the file names no job; give lines `JOB = secret`, or no such file")
    owners: dict[str, str] = {}
    for job, secrets in found.items():
        for secret in secrets:
            if owners.setdefault(secret, job) != job:
                raise ConfigError(f"jobs {owners[secret]} and {job} have the same secret; give each job its own")
    return found


def _version_of(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read_file(path: str, most_bytes: int) -> tuple[os.stat_result, str]:
    """Return the status and the text of a file that may hold secrets. Raises: OSError, ValueError: it can't."""
    # Without O_NONBLOCK the open call would wait for ever for the writer of a pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        text = file.read(most_bytes + 1)
    if len(text) > most_bytes:
        raise ValueError(f"it is larger than a shared secret, which has at most {MAX_TOKEN_BYTES} bytes")
    return found, text.decode()
