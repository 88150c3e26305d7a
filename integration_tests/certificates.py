"""Certificates for tests: an authority, and what it issues, as files."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import trustme

from tft_coord import TLS

LONG_AGO: Final[dict[str, Any]] = {
    "not_before": datetime(2020, 1, 1, tzinfo=timezone.utc),
    "not_after": datetime(2021, 1, 1, tzinfo=timezone.utc),
}


def write(folder: Path, authority: trustme.CA, *names: str, trusted: bytes | None = None, **more: Any) -> None:
    """Write a certificate, its key and the authority. Each file is replaced at once, as a careful tool does it.

    Args:
        folder: gets `cert.pem`, `key.pem` and `ca.pem`.
        authority: issues the certificate.
        names: host names and addresses in it.
        trusted: what `ca.pem` holds; None: the authority.
        more: for `trustme.CA.issue_cert`.
    """
    folder.mkdir(exist_ok=True)
    issued = authority.issue_cert(*names, **more)
    contents = {
        "key.pem": issued.private_key_pem.bytes(),
        "cert.pem": b"".join(each.bytes() for each in issued.cert_chain_pems),
        "ca.pem": authority.cert_pem.bytes() if trusted is None else trusted,
    }
    for name, content in contents.items():
        (folder / f"{name}.new").write_bytes(content)
        (folder / f"{name}.new").replace(folder / name)


def settings(folder: Path, *, check_client: bool = False) -> TLS:
    """Return the settings that name the files of a folder."""
    return TLS(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem"), check_client=check_client)


def environment(folder: Path, *, check_client: bool = False) -> dict[str, str]:
    """Return the variables that name the files of a folder."""
    return {
        "TFT_TLS_CERT": str(folder / "cert.pem"),
        "TFT_TLS_KEY": str(folder / "key.pem"),
        "TFT_TLS_CA": str(folder / "ca.pem"),
        "TFT_TLS_CLIENT_AUTH": str(int(check_client)),
    }
