"""TLS for all connections of a job, against eavesdropping and forgery.

One certificate authority for each job is enough. Every process trusts it, and has its own certificate for its
advertised address. With `check_client` a server also requires a certificate of its clients. Then the certificates alone
decide the membership in the job.

The files may change while a process runs. Each new connection uses the present ones. Files that do not fit together,
as in the middle of a change, are not used: the previous ones stay until the change is complete.

Law of this file: certificate files, and the standard library's contexts made of them; no sockets, no grpc.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

from tft_coord.errors import ConfigError
from tft_coord.secret_files import warn_if_readable

__all__ = ["LOOK_EVERY_S", "TLS", "Certificates", "certificates_of", "own_fault", "probe_context"]

LOOK_EVERY_S: Final = 1.0  # at the files
MAX_FILE_BYTES: Final = 1 << 20
# A certificate and its key are changed by two commands. A process that starts between them waits for the second one.
CHANGE_WITHIN_S: Final = 30.0
CHANGED_LATELY_S: Final = 60.0
CHANGED_APART_S: Final = 1.0  # files that are made together are as old as each other
_RETRY_S: Final = 0.2
_KEPT_MOST: Final = 64
_Version: TypeAlias = "tuple[tuple[int, int, int], ...]"

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class TLS:
    """The TLS settings of both sides of every connection; at least TLS 1.2.

    Fields:
        certificate: path of a PEM file: this process's certificate and the intermediate ones.
        key: path of a PEM file: the certificate's private key, without a password.
        authority: path of a PEM file: the only trusted authorities.
        check_client: whether a server also requires a certificate of the authority from its clients.

    Raises: ConfigError: a file is missing, unreadable, or does not fit the others.
    """

    certificate: str
    key: str
    authority: str
    check_client: bool = False

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):
            path = getattr(self, name)
            if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                raise ConfigError(f"TLS.{name} is {path!r}; give the path of a PEM file")
        if type(self.check_client) is not bool:
            raise ConfigError(f"TLS.check_client is {self.check_client!r}; give True or False")
        _keep(self, _read_when_changed(self))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> TLS | None:
        """Return the settings of the environment, or None if it names no certificate.

        Args:
            environment: TFT_TLS_CERT, TFT_TLS_KEY and TFT_TLS_CA are paths, all three or none of them.
                TFT_TLS_CLIENT_AUTH is 1 or 0 (the default). None is the process's own environment.

        Raises: ConfigError.
        """
        found = os.environ if environment is None else environment
        paths = {name: found.get(name, "") for name in ("TFT_TLS_CERT", "TFT_TLS_KEY", "TFT_TLS_CA")}
        answer = found.get("TFT_TLS_CLIENT_AUTH") or "0"
        if answer not in ("0", "1"):
            raise ConfigError(f"TFT_TLS_CLIENT_AUTH is {answer[:64]!r}; give 0 or 1")
        check_client = answer == "1"
        unset = [name for name, path in paths.items() if not path]
        if len(unset) == len(paths) and not check_client:
            return None
        if unset:
            raise ConfigError(f"TLS is half configured: {', '.join(unset)} is not set; set all of {', '.join(paths)}")
        certificate, key, authority = paths.values()
        return cls(certificate, key, authority, check_client=check_client)

    def server_context(self) -> ssl.SSLContext:
        """Return the context for the serving side, from the present files."""
        return certificates_of(self).server

    def client_context(self) -> ssl.SSLContext:
        """Return the context for the requesting side, from the present files. It checks the server's name."""
        return certificates_of(self).client


@final
@dataclass(frozen=True, slots=True, eq=False)
class Certificates:
    """The contents of one version of the three files, which fit together.

    Fields:
        version: differs from that of all other contents.
        certificate, key, authority: the files, PEM.
        server, client: contexts made of them.
    """

    version: _Version
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    server: ssl.SSLContext
    client: ssl.SSLContext


def certificates_of(tls: TLS) -> Certificates:
    """Return the present contents of the files, which are looked at once in `LOOK_EVERY_S` at most.

    Raises: ConfigError: no contents have fitted together so far, which a constructed `TLS` excludes.
    """
    watch = _watches.get(tls)
    if watch is None:  # of a forgotten or copied value
        watch = _keep(tls, _read(tls))
    now_s = time.monotonic()
    # Another thread, or one that a forked child does not have, may be reading: what it had before is good meanwhile.
    if now_s >= watch.next_look_s and watch.lock.acquire(blocking=False):
        try:
            watch.next_look_s = now_s + LOOK_EVERY_S
            watch.look(tls)
        finally:
            watch.lock.release()
    return watch.found


def probe_context(tls: TLS) -> ssl.SSLContext:
    """Return a context of a client of gRPC, from the present files. Raises: ConfigError: they don't fit together."""
    context = _context(tls, ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    return context


def own_fault(tls: TLS) -> ssl.SSLError | None:
    """Return why this process's own authorities do not accept its own certificate now; None: they do."""
    try:
        server_side, client_side = (_context(tls, side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    except ConfigError:
        return None
    client_side.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return error
    return None


@final
class _Watch:
    """The last good contents of the files of one `TLS`."""

    def __init__(self, found: Certificates) -> None:
        self.found = found
        self.lock = threading.Lock()
        self.next_look_s = time.monotonic() + LOOK_EVERY_S
        self._fault = ""

    def look(self, tls: TLS) -> None:
        try:
            if _version(tls) == self.found.version:
                self._fault = ""
                return
            self.found = _read(tls)
        except ConfigError as error:
            fault = str(error)
            if fault != self._fault:
                self._fault = fault
                logger.warning("the new certificate files can't be used, and the previous ones stay: %s", fault)
            return
        self._fault = ""
        logger.info("read the new certificate %s; new connections use it", tls.certificate)


_watches: dict[TLS, _Watch] = {}


def _keep(tls: TLS, found: Certificates) -> _Watch:
    watch = _Watch(found)
    for oldest in list(_watches)[: max(0, len(_watches) + 1 - _KEPT_MOST)]:
        _watches.pop(oldest, None)
    _watches[tls] = watch
    return watch


def _version(tls: TLS) -> _Version:
    """Return what changes with the files. Raises: ConfigError: one is missing."""
    found = []
    for path in (tls.certificate, tls.key, tls.authority):
        try:
            status = os.stat(path)
        except OSError as error:
            raise ConfigError(f"TLS can't read {path}: {error.strerror}; give the path of a PEM file") from error
        # Nothing opens the path before this: the open call would wait for ever for the writer of a pipe.
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"TLS can't read {path}: it is not a regular file of at most {MAX_FILE_BYTES >> 20} MiB; give the path "
                "of a PEM file"
            )
        found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _read_when_changed(tls: TLS) -> Certificates:
    """Return the contents of the files. While a change of them seems to be half done, wait for the rest of it.

    Raises: ConfigError: they do not fit together, within a time.
    """
    give_up_s, is_noted = time.monotonic() + CHANGE_WITHIN_S, False
    while True:
        try:
            return _read(tls)
        except ConfigError as error:
            if time.monotonic() >= give_up_s or not _is_changing(tls):
                raise
            if not is_noted:
                is_noted = True
                logger.warning(
                    "waiting up to %g s for the rest of a change of the certificate files: %s", CHANGE_WITHIN_S, error
                )
        time.sleep(_RETRY_S)


def _is_changing(tls: TLS) -> bool:
    """Return whether the certificate and the key are of different ages, and the younger one is new."""
    try:
        changed_s = [os.stat(path).st_ctime for path in (tls.certificate, tls.key)]
    except OSError:
        return False
    return abs(changed_s[0] - changed_s[1]) > CHANGED_APART_S and time.time() - max(changed_s) < CHANGED_LATELY_S


def _read(tls: TLS) -> Certificates:
    """Return the contents of the files. Raises: ConfigError: they do not fit together, or change meanwhile."""
    version = _version(tls)
    server, client = (_context(tls, side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    server.verify_mode = ssl.CERT_REQUIRED if tls.check_client else ssl.CERT_NONE
    contents = []
    for path in (tls.certificate, tls.key, tls.authority):
        try:
            with open(path, "rb") as file:
                if path == tls.key:
                    warn_if_readable(os.fspath(path), os.fstat(file.fileno()).st_mode)
                contents.append(file.read())
        except OSError as error:
            raise ConfigError(f"TLS can't read {path}: {error.strerror}; give the path of a PEM file") from error
    if _version(tls) != version:
        raise ConfigError(f"TLS can't use {tls.certificate}: the files change while they are read; try again")
    certificate, key, authority = contents
    return Certificates(version, certificate, key, authority, server, client)


def _context(tls: TLS, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty password. Otherwise Python would ask for the password of an encrypted key on the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"TLS can't use the certificate {tls.certificate} with the key {tls.key}: {error}; give PEM files "
            "that belong together, the key without a password"
        ) from error
    try:
        context.load_verify_locations(tls.authority)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"TLS can't use the authority {tls.authority}: {error}; give a PEM file of certificates"
        ) from error
    return context
