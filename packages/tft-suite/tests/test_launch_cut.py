"""A cut cable on a real kernel: who is cut off, who is not, and what is left afterwards."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tft_suite.errors import ConfigError
from tft_suite.launch import cut as module
from tft_suite.launch.cut import Cut, Ports, check_cut, rules

WITHIN_S = 20.0

# A process that answers each line: it connects to a port, or sends a byte on its first connection.
PEER = """
import socket, sys
first = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
own = socket.create_server(("127.0.0.1", 0))
print(own.getsockname()[1], flush=True)
for line in sys.stdin:
    what = line.split()
    try:
        if what[0] == "send":
            first.sendall(b"x")
        else:
            port = own.getsockname()[1] if what[1] == "own" else int(what[1])
            socket.create_connection(("127.0.0.1", port), timeout=float(what[2]))
        print("done", flush=True)
    except OSError:
        print("failed", flush=True)
"""


@pytest.fixture(scope="module")
def may_cut() -> None:
    """Skip where no process can be cut off: without root or nft, in a container. With TFT_NEED_NFT=1 fail instead."""
    try:
        check_cut()
    except ConfigError as error:
        if os.environ.get("TFT_NEED_NFT") == "1":
            raise
        pytest.skip(str(error))


class Peer:
    """The other process, and this side of its first connection."""

    def __init__(self, listener: socket.socket) -> None:
        self.port = listener.getsockname()[1]
        words = [sys.executable, "-c", PEER, str(self.port)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first, _ = listener.accept()
        self.process = psutil.Process(self._process.pid)
        self.listens = int(self.reads())

    def reads(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def does(self, what: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self.reads()

    def is_heard(self, within_s: float) -> bool:
        self.first.settimeout(within_s)
        try:
            return self.first.recv(1) == b"x"
        except TimeoutError:
            return False

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self.first.close()


@contextmanager
def peer() -> Iterator[Peer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Peer(listener)
        try:
            yield found
        finally:
            found.end()


@contextmanager
def refreshed(cut: Cut) -> Iterator[None]:
    """Refresh the cut as `tft chaos` does, while the block lasts."""
    done = threading.Event()

    def refresh() -> None:
        while not done.wait(0.05):
            cut.refresh()

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def tables() -> str:
    return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("may_cut")
def test_a_process_that_is_cut_off_is_not_heard_and_reaches_nobody_until_the_end() -> None:
    with peer() as other:
        groups = module._group_of(other.process.pid)
        cut = Cut(other.process, WITHIN_S)
        try:
            assert other.does("send") == "done", "it does not notice"
            assert not other.is_heard(0.5)
            assert other.does(f"connect {other.port} 0.5") == "failed"
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", other.listens), timeout=0.5)
            with refreshed(cut):
                assert other.does("connect own 20") == "done", "what it says to itself passes"
        finally:
            cut.end()
        assert other.is_heard(WITHIN_S), "TCP sends it again"
        assert other.does(f"connect {other.port} 5") == "done"
        assert module._group_of(other.process.pid) == groups
    assert "tft_chaos" not in tables()


@pytest.mark.usefixtures("may_cut")
def test_a_cut_that_nobody_ends_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE_S", 1.0)
    with peer() as other:
        cut = Cut(other.process, 1.0)
        try:
            assert other.does("send") == "done"
            assert not other.is_heard(0.3)
            assert other.is_heard(WITHIN_S)
        finally:
            cut.end()
            cut.end()


@pytest.mark.usefixtures("may_cut")
def test_the_end_of_a_process_that_is_cut_off_leaves_nothing() -> None:
    with peer() as other:
        cut = Cut(other.process, WITHIN_S)
        other.end()
        cut._refreshed_s -= 1
        cut.refresh()
        cut.end()
    assert "tft_chaos" not in tables()
    assert not list(module._mount().glob("tft_chaos_*"))


def test_the_rules_expire() -> None:
    ports = Ports(frozenset({(50_000, 29_510), (50_001, 80), (80, 50_001), (50_002, 81)}), frozenset({81}))
    text = rules("tft_chaos_1_2", "unified/tft_chaos_1_2", ports, 9.6)
    assert "elements = { 80 . 50001 timeout 10s, 50000 . 29510 timeout 10s, 50001 . 80 timeout 10s" in text
    assert ports.inside == {(50_001, 80), (80, 50_001), (50_002, 81), (81, 50_002)}
    assert "elements = { tcp timeout 10s, udp timeout 10s }" in text
    assert 'socket cgroupv2 level 1 "unified/tft_chaos_1_2" drop' in text
    assert "set listens { type inet_service; flags timeout;  }" in rules("a", "b", Ports(), 0)


def test_what_a_cut_needs_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with monkeypatch.context() as without:
        without.setattr(shutil, "which", lambda _: None)
        with pytest.raises(ConfigError, match="needs Linux and the command nft"):
            check_cut()
    (tmp_path / "mounts").write_text("tmpfs /tmp tmpfs rw 0 0\n")
    monkeypatch.setattr(module, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/sbin/nft")
    with pytest.raises(ConfigError, match="control groups of version 2"):
        check_cut()


def test_a_trial_that_gets_through_is_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCut:
        def __init__(self, *_: object) -> None:
            pass

        def end(self) -> None:
            pass

    monkeypatch.setattr(module, "Cut", NoCut)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/sbin/nft")
    with pytest.raises(ConfigError, match="does not see the control groups"):
        check_cut()
