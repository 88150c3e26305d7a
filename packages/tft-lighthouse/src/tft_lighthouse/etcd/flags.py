"""The flags and variables of the election, for the command's parser.

Law of this file: plain values and argparse, so that the command can print its help without importing anything.
"""

from __future__ import annotations

import argparse
from typing import Final

ENDPOINTS_ENV: Final = "TFT_LIGHTHOUSE_ETCD"
PREFIX_ENV: Final = "TFT_LIGHTHOUSE_ETCD_PREFIX"
CA_ENV: Final = "TFT_LIGHTHOUSE_ETCD_CA"
CERT_ENV: Final = "TFT_LIGHTHOUSE_ETCD_CERT"
KEY_ENV: Final = "TFT_LIGHTHOUSE_ETCD_KEY"
PREFIX: Final = "/tft/lighthouse"
TTL_S: Final = 2  # the least that etcd grants with its own defaults


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the election."""
    parser.add_argument(
        "--etcd",
        default="",
        metavar="HOST:PORT,...",
        help="endpoints of etcd, with commas between them: of all lighthouses with the same etcd and prefix one leads, "
        f"and another one takes over when it dies (env {ENDPOINTS_ENV})",
    )
    parser.add_argument(
        "--etcd_prefix",
        "--etcd-prefix",
        default="",
        metavar="PREFIX",
        help=f"prefix of the keys in etcd; without it {PREFIX} (env {PREFIX_ENV})",
    )
    parser.add_argument(
        "--etcd_ttl_s",
        "--etcd-ttl-s",
        type=int,
        default=TTL_S,
        metavar="N",
        help="seconds after which a standby takes over from a leader that has died",
    )
