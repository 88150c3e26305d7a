"""TLS for all connections, against eavesdropping and forgery.

One certificate authority for each job is enough. Every process trusts it, and has its own certificate for its
advertised address. With `check_client` a server also requires a certificate of its readers. Then the certificates alone
decide the membership in the job.

Law of this file: certificate files, and the standard library's contexts made of them; no sockets.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from tft_ckpt.errors import ConfigError

__all__ = ["TLS"]

_YES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


@final
@dataclass(frozen=True, slots=True)
class TLS:
    """The TLS settings of both sides of every connection; at least TLS 1.2.

    Fields:
        certificate: path of a PEM file: this process's certificate and the intermediate ones.
        key: path of a PEM file: the certificate's private key, without a password.
        authority: path of a PEM file: the only trusted authorities.
        check_client: whether a server also requires a certificate of the authority from its readers.

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
        self.server_context()
        self.client_context()

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
        answer = found.get("TFT_TLS_CLIENT_AUTH", "")
        if answer.lower() not in _YES:
            raise ConfigError(f"TFT_TLS_CLIENT_AUTH is {answer!r}; set it to 1 or 0")
        check_client = _YES[answer.lower()]
        unset = [name for name, path in paths.items() if not path]
        if len(unset) == len(paths) and not check_client:
            return None
        if unset:
            raise ConfigError(f"TLS is half configured: {', '.join(unset)} is not set; set all of {', '.join(paths)}")
        certificate, key, authority = paths.values()
        return cls(certificate, key, authority, check_client=check_client)

    def server_context(self) -> ssl.SSLContext:
        """Return a context for the serving side, from the present files. Raises: ConfigError."""
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.verify_mode = ssl.CERT_REQUIRED if self.check_client else ssl.CERT_NONE
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return a context for the requesting side, from the present files. It checks the server's name. Raises:
        ConfigError.
        """
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An empty password. Otherwise Python would ask for the password of an encrypted key on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TLS can't use the certificate {self.certificate} with the key {self.key}: {error}; give PEM files "
                "that belong together, the key without a password"
            ) from error
        try:
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TLS can't use the authority {self.authority}: {error}; give a PEM file of certificates"
            ) from error
        return context
