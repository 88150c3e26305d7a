"""The reason why two sides of a TLS connection do not trust each other, in a sentence.

Law of this file: the standard library's errors to words; no sockets.
"""

from __future__ import annotations

import ssl
from typing import Final, final

from tft_coord.errors import ProtocolError

SET_ALL: Final = "TFT_TLS_CERT, TFT_TLS_KEY and TFT_TLS_CA"
WANTS_TLS: Final = (
    f"the server there uses TLS, and this process has no certificates; set {SET_ALL} (see docs/certificates.md), or "
    "check the port"
)
NO_TLS: Final = (
    f"the server there does not use TLS, and this process does; set {SET_ALL} for the server too, or check the port"
)
_NO_TLS_REASONS: Final = (
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_LAYER_FAILURE",
    "UNKNOWN_PROTOCOL",
    "WRONG_VERSION_NUMBER",
)
_CODES: Final = {  # of OpenSSL's verification
    9: "is not valid yet; check the clocks of both machines",
    10: "has expired; issue a new one, or check this machine's clock",
}
_NAME_CODES: Final = (62, 63, 64)  # the host's name, an e-mail address, an IP address
_ISSUER_CODES: Final = (2, 18, 19, 20, 21)
_REFUSED: Final = {
    "CERTIFICATE_EXPIRED": "it has expired; give this process a new one",
    "CERTIFICATE_REQUIRED": f"it has none; set {SET_ALL}",
    "UNKNOWN_CA": "it is of another authority; give both sides the same one (TFT_TLS_CA)",
}


@final
class UntrustedError(ProtocolError):
    """The server is there, and one side does not accept the other's certificate, or has none."""


def why_untrusted(error: OSError, host: str) -> str | None:
    """Return what is wrong between the two sides of a TLS connection, and what to do; None: it is another fault.

    Args:
        error: of the handshake, or of the first bytes after it.
        host: the name or address under which the server was dialed.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code in _NAME_CODES:
            return (
                f"the certificate of the server there is not for {host}; dial it by a name or address in the "
                "certificate, or issue one with this name (subjectAltName)"
            )
        if code in _ISSUER_CODES:
            return (
                "the certificate of the server there is of another authority than this process trusts; give both sides "
                "the same one (TFT_TLS_CA)"
            )
        return f"the certificate of the server there {_CODES.get(code, f'is invalid: {error.verify_message}')}"
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason is None:
        return None
    if reason in _NO_TLS_REASONS:
        return NO_TLS
    for name, what in _REFUSED.items():
        if reason.endswith(name):
            return f"the server there refuses this process's certificate: {what}"
    if "ALERT" in reason:
        return (
            f"the server there refuses this process in the TLS handshake ({reason.lower().replace('_', ' ')}); check "
            f"{SET_ALL} of both"
        )
    return None


def why_own_is_refused(error: ssl.SSLError) -> str:
    """Return what is wrong with this process's own certificate, as `tls.own_fault` has found it."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"can't be used: {error.reason or error}"
    if error.verify_code in _ISSUER_CODES:
        return "is of another authority; issue one of the authority that the server trusts (TFT_TLS_CERT)"
    return _CODES.get(error.verify_code, f"is invalid: {error.verify_message}")
