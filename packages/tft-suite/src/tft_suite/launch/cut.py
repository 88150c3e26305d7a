"""A cut cable of one process and its children: the kernel drops all packets between them and everybody else.

The packet filter of Linux does this, by its command `nft`, so it needs root. It knows the connections that exist by
their ports. It knows new ones by a control group that the processes are in meanwhile. What the processes say to
one another on this host passes. Each rule needs an element of a set that expires, so a killed `tft chaos` leaves nobody
cut. TCP and UDP are cut.

Law of this file: rules and control groups of one cut. When and whom is decided elsewhere.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import psutil

from tft_suite.errors import ConfigError

REFRESH_EVERY_S: Final = 0.25
SPARE_S: Final = 5.0  # the rules expire so long after the end of the cut, if nobody removes them
_NFT_WITHIN_S: Final = 10.0
_TRIAL_S: Final = 0.3
_SYSFS: Final = "/sys/fs/cgroup"  # nft names a control group by its path from here
_MOUNTS: Final = Path("/proc/mounts")
_TRIAL: Final = "import socket, sys; sys.stdin.readline(); socket.create_connection(('127.0.0.1', {port}), {within})"


@final
@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of the sockets of some processes.

    Fields:
        pairs: local and remote port of each connection.
        listens: local ports of the other sockets.
    """

    pairs: frozenset[tuple[int, int]] = frozenset()
    listens: frozenset[int] = frozenset()

    @property
    def inside(self) -> frozenset[tuple[int, int]]:
        """Return the pairs, in both directions, of connections whose other end may be a socket here too."""
        own = {(near, far) for near, far in self.pairs if far in self.listens or (far, near) in self.pairs}
        return frozenset(own | {(far, near) for near, far in own})

    def elements(self, lasts_s: float) -> dict[str, str]:
        """Return the elements of each set of the rules, as text. They expire after so many seconds."""
        seconds = _expiry(lasts_s)
        sets = {
            "pairs": [f"{near} . {far}" for near, far in sorted(self.pairs)],
            "inside": [f"{near} . {far}" for near, far in sorted(self.inside)],
            "listens": [str(port) for port in sorted(self.listens)],
        }
        return {name: ", ".join(f"{each} {seconds}" for each in found) for name, found in sets.items()}


def _expiry(lasts_s: float) -> str:
    return f"timeout {max(1, round(lasts_s))}s"


def rules(name: str, group: str, ports: Ports, lasts_s: float) -> str:
    """Return the commands of nft that begin a cut.

    Args:
        name: of the table.
        group: path of the control group, from `/sys/fs/cgroup`. It is directly below the root of its hierarchy.
        ports: of the processes.
        lasts_s: seconds until the rules expire.
    """
    seconds = _expiry(lasts_s)
    sets = {each: f"elements = {{ {text} }}" if text else "" for each, text in ports.elements(lasts_s).items()}
    return f"""\
table inet {name} {{
  set active {{ type inet_proto; flags timeout; elements = {{ tcp {seconds}, udp {seconds} }} }}
  set pairs {{ type inet_service . inet_service; flags timeout; {sets["pairs"]} }}
  set inside {{ type inet_service . inet_service; flags timeout; {sets["inside"]} }}
  set listens {{ type inet_service; flags timeout; {sets["listens"]} }}
  chain out {{
    type filter hook output priority 0;
    meta l4proto != @active accept
    oif lo th sport . th dport @inside accept
    th sport . th dport @pairs drop
    th sport @listens drop
    socket cgroupv2 level 1 "{group}" drop
  }}
  chain in {{
    type filter hook input priority 0;
    meta l4proto != @active accept
    iif lo th sport . th dport @inside accept
    th dport . th sport @pairs drop
    th dport @listens drop
  }}
}}
"""


@final
class Cut:
    """A cut that has begun.

    Args:
        process: its children are cut with it, also those that it starts meanwhile.
        lasts_s: seconds until `end` is called.
    Raises: ConfigError: the kernel refuses it. psutil.Error: the process has ended.
    """

    def __init__(self, process: psutil.Process, lasts_s: float) -> None:
        self._process = process
        self._name = f"tft_chaos_{os.getpid()}_{process.pid}"
        self._expires_s = time.monotonic() + lasts_s + SPARE_S
        self._refreshed_s = time.monotonic()
        self._home = _mount() / _group_of(process.pid).lstrip("/")
        self._group = _mount() / self._name
        self._ports = _ports_of(process)
        try:
            self._group.mkdir(exist_ok=True)
            _move(_pids_of(process), self._group)
            _nft(rules(self._name, os.path.relpath(self._group, _SYSFS), self._ports, lasts_s + SPARE_S))
        except OSError as error:
            self.end()
            raise ConfigError(
                f"tft chaos can't make the control group {self._group} ({error}); run it as root"
            ) from error
        except BaseException:
            self.end()
            raise

    def refresh(self) -> None:
        """Cut the ports that the processes have opened since the last call; rarely, and cheap otherwise."""
        now_s = time.monotonic()
        if now_s - self._refreshed_s < REFRESH_EVERY_S:
            return
        self._refreshed_s = now_s
        with suppress(psutil.Error):  # it has ended
            ports = _ports_of(self._process)
            if ports == self._ports:
                return
            self._ports = ports
            sets = ports.elements(self._expires_s - now_s)
            _nft("".join(f"add element inet {self._name} {each} {{ {text} }}\n" for each, text in sets.items() if text))

    def end(self) -> None:
        """Let all packets pass again. Idempotent."""
        with suppress(ConfigError):
            _nft(f"delete table inet {self._name}\n")
        with suppress(OSError):
            pids = (self._group / "cgroup.procs").read_text().split()
            _move((int(pid) for pid in pids), self._home if self._home.is_dir() else _mount())
            self._group.rmdir()


def check_cut() -> None:
    """Check by a trial that this process can cut others off. Raises: ConfigError: it can't; the message says why."""
    if not sys.platform.startswith("linux") or shutil.which("nft") is None:
        raise ConfigError(
            "--kinds cut needs Linux and the command nft (the package nftables); install it, or leave cut out"
        )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = _TRIAL.format(port=listener.getsockname()[1], within=_TRIAL_S)
        words = [sys.executable, "-I", "-c", command]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as trial:
            try:
                _try_to_connect(trial)
            finally:
                trial.kill()
    if trial.returncode == 0:
        raise ConfigError(
            "--kinds cut can't work here: the packet filter does not see the control groups of processes, as in a "
            "container; run tft chaos on the host, or leave cut out"
        )


def _try_to_connect(trial: subprocess.Popen[bytes]) -> None:
    """Let the trial connect while it is cut off, and wait for its end."""
    cut = Cut(psutil.Process(trial.pid), _NFT_WITHIN_S)
    try:
        trial.communicate(b"\n", timeout=_NFT_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise ConfigError("--kinds cut: the trial of a cut did not end; leave cut out") from None
    finally:
        cut.end()


def _mount() -> Path:
    """Return where the control groups of version 2 are. Raises: ConfigError: nowhere."""
    for line in _MOUNTS.read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise ConfigError("--kinds cut needs control groups of version 2, and none are mounted here; leave cut out")


def _group_of(pid: int) -> str:
    """Return the path of a process's control group of version 2, from the root of the hierarchy."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:]
    return "/"


def _pids_of(process: psutil.Process) -> list[int]:
    return [each.pid for each in [process, *process.children(recursive=True)]]


def _ports_of(process: psutil.Process) -> Ports:
    """Return the ports of all sockets of a process and its children."""
    pairs, listens = set(), set()
    near: tuple[Any, ...]  # an address and a port, or nothing
    far: tuple[Any, ...]
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for connection in each.net_connections(kind="inet"):
                near, far = tuple(connection.laddr), tuple(connection.raddr)
                if far:
                    pairs.add((int(near[1]), int(far[1])))
                elif near:
                    listens.add(int(near[1]))
    return Ports(frozenset(pairs), frozenset(listens))


def _move(pids: Iterable[int], group: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(f"{pid}\n")


def _nft(commands: str) -> None:
    try:
        done = subprocess.run(
            ["nft", "-f", "-"], input=commands, text=True, capture_output=True, timeout=_NFT_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"tft chaos can't run nft ({error}); leave cut out of --kinds") from error
    if done.returncode:
        why = " ".join(done.stderr.split())[:300]
        raise ConfigError(
            f"tft chaos can't cut a connection: nft says {why!r}; run it as root, or leave cut out of --kinds"
        )
