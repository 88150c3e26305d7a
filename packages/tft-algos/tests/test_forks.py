"""What a forked child keeps of a Manager's: no port of its replica's store, and no handler of a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

_FORKS = """
import os, signal, sys, time
import torch
from tft_algos import Manager
from tft_algos.manager.quorum.group_store import open_group_store
from tft_algos.manager.config import config_of, from_environment
from tft_algos.manager.lifecycle.signals import SignalHandlers

config = from_environment(config_of(None, {"lighthouse_addr": "127.0.0.1:9"}), {}, own_host=lambda: "localhost")
group = open_group_store(config)
handlers = SignalHandlers()
handlers.handle([signal.SIGTERM], lambda name: print("leaves by", name, flush=True))
handlers.handle([signal.SIGUSR1], lambda name: print("parent", name, flush=True))

def tcp_sockets():
    rows = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            rows |= {line.split()[9] for line in list(lines)[1:]}
    held = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            pass
    return rows & held

assert len(tcp_sockets()) >= 3
child = os.fork()
if child == 0:
    print("held", len(tcp_sockets()), flush=True)
    if sys.argv[1] == "end":
        group = None
        sys.exit(7)
    print(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, flush=True)
    signal.raise_signal(signal.SIGTERM)
    time.sleep(30)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
signal.raise_signal(signal.SIGUSR1)
group.store.set("key", "value")
print(group.store.get("key").decode(), flush=True)
handlers.give_back()
"""


def run(what: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, what], capture_output=True, text=True, timeout=50, env=dict(os.environ)
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.in_parts
def test_a_child_that_ends_as_a_program_does_keeps_no_port_of_the_store() -> None:
    assert run("end") == ["held 0", "child 7", "parent SIGUSR1", "value"]


@pytest.mark.in_parts
def test_a_signal_means_to_a_child_what_it_meant_before_the_manager() -> None:
    assert run("signal") == ["held 0", "True", f"child {-signal.SIGTERM}", "parent SIGUSR1", "value"]
