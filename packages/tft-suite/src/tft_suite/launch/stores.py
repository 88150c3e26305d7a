"""The stores of the replica groups on this host, as torchrun hosts one for each group.

It runs as `python -m tft_suite.launch.stores HOST PORT ...`, with one port for each group. 0 takes a free one. It
prints the ports in one line when all stores answer, and ends with its standard input.

Law of this file: torch's stores, and nothing of a job.
"""

from __future__ import annotations

import socket
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def host_store(host: str, port: int) -> TCPStore:
    """Host a store that listens on this address alone, where TCPStore itself would listen on all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")
    port = listener.getsockname()[1]
    near = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host)
    return TCPStore(near, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def main() -> None:
    """Host the stores until standard input ends."""
    host, *ports = sys.argv[1:]
    try:
        stores = [host_store(host, int(port)) for port in ports]
    except OSError as error:
        sys.exit(f"the stores of the replica groups can't listen on {host} ({error})")
    print(*(store.port for store in stores), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
