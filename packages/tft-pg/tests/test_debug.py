"""The debug server: what it answers, on which address, how it ends, and what a forked child has of it."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_pg import ConfigError, DebugServer, PagePlace, StoreUnreachableError, UnsupportedOperationError
from tft_pg.debug import page as page_module
from tft_pg.debug import server as server_module

WAIT_S: Final = 60.0
HAS_TABULATE: Final = page_module.importlib.util.find_spec("tabulate") is not None
needs_tabulate = pytest.mark.skipif(not HAS_TABULATE, reason="torch's page needs the package tabulate")


@pytest.fixture
def server() -> Iterator[DebugServer]:
    with DebugServer(lambda: {"step": 3}) as server:
        yield server


def ask(url: str, method: str = "POST") -> tuple[int, bytes]:
    try:
        with urlopen(Request(url, method=method), timeout=WAIT_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


def handler(server: DebugServer, name: str) -> tuple[int, bytes]:
    return ask(f"{server.url}/handler/{name}")


def listening_ports(pid: int) -> dict[int, set[str]]:
    """Return the ports at which a process listens, each with its addresses as the kernel prints them."""
    held = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
            for row in [line.split() for line in list(lines)[1:]]:
                if row[3] == "0A" and f"socket:[{row[9]}]" in held:
                    address, port = row[1].split(":")
                    found.setdefault(int(port, 16), set()).add(address)
    return found


# --- what it answers --------------------------------------------------------------------------------------------------


def test_it_answers_with_stacks_records_and_the_facts(server: DebugServer) -> None:
    status, stacks = handler(server, "dump_traceback")
    assert status == 200
    assert b"test_it_answers_with_stacks_records_and_the_facts" in stacks
    status, record = handler(server, "fr_trace_json")
    assert status == 200
    assert "version" in json.loads(record)
    assert handler(server, "tft") == (200, b'{"step": 3}')
    assert handler(server, "no_such_handler")[0] == 404


_HANGS = """
import ctypes, os, subprocess, sys
from tft_pg import DebugServer

P_PID, WEXITED, WNOWAIT = 1, 4, 0x01000000
ASK = '''
import sys, urllib.request
with urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="POST"), timeout=60) as answer:
    print(answer.read().decode())
'''

server = DebugServer(dict)
client = subprocess.Popen([sys.executable, "-c", ASK, server.url + "/handler/fr_trace_json"], stdout=subprocess.PIPE)

def hangs_with_the_lock():  # until the client has ended
    ctypes.PyDLL(None).waitid(P_PID, client.pid, ctypes.create_string_buffer(128), WEXITED | WNOWAIT)

hangs_with_the_lock()
print(client.communicate()[0].decode())
"""


def test_the_flight_record_comes_from_a_process_whose_interpreter_is_locked() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=110)
    assert "version" in json.loads(done.stdout), done.stderr


def test_facts_that_fail_are_an_answer_with_the_error(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> dict[str, Any]:
        raise LookupError("no facts")

    with DebugServer(fails) as server:
        assert handler(server, "tft") == (500, b"LookupError: no facts")
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.exc_info is not None


def test_facts_that_are_no_json_are_an_answer_with_the_error() -> None:
    with DebugServer(lambda: {"step": object()}) as server:
        status, answer = handler(server, "tft")
    assert status == 500
    assert answer.startswith(b"TypeError")


# --- where it listens -------------------------------------------------------------------------------------------------


def test_it_listens_on_loopback_only_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = listening_ports(os.getpid())
    with DebugServer(dict) as server:
        ports = listening_ports(os.getpid())
        (port,) = ports.keys() - before.keys()
        assert ports[port] == {"0100007F"}
        assert server.url == f"http://127.0.0.1:{port}"
    assert f"a debug server without authentication listens at {server.url}" in caplog.text


def test_it_listens_on_the_given_address() -> None:
    with DebugServer(dict, host="127.0.0.2") as server:
        assert server.url.startswith("http://127.0.0.2:")
        assert handler(server, "ping") == (200, b"pong")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=WAIT_S)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"host": "0.0.0.0"},
            "means all interfaces, but a debug server has no authentication; give the address of one",
        ),
        ({"host": "::"}, "means all interfaces"),
        ({"host": "no.such.host.invalid"}, "which has no address .*; give one of this machine's"),
        (
            {"host": "192.0.2.7"},
            "can't listen on 192.0.2.7 port 0 .*; give an address of this machine, and a free port",
        ),
        ({"port": -1}, "port is -1; give a number from 0"),
        ({"port": 70_000}, "port is 70000; give a number from 0"),
        ({"page_port": "80"}, "page_port is '80'; give a number from 0"),
    ],
)
def test_a_wrong_setting_is_an_error_of_its_own_name(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        DebugServer(dict, **settings)
    with DebugServer(dict) as server:  # nothing was left
        assert handler(server, "ping")[0] == 200


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1 port {port}"):
            DebugServer(dict, port=port)


def test_a_process_has_one_server(server: DebugServer) -> None:
    with pytest.raises(ConfigError, match=f"has a debug server already, at {server.url}; close it first"):
        DebugServer(dict)
    assert handler(server, "tft")[0] == 200


def test_a_torch_without_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(server_module._distributed_c10d, "_WorkerServer")
    with pytest.raises(UnsupportedOperationError, match=r"has no debug server; install 2\.13 or later"):
        DebugServer(dict)


# --- its end ----------------------------------------------------------------------------------------------------------


def test_it_ends_with_its_port_and_threads() -> None:
    before = len(os.listdir("/proc/self/task"))
    server = DebugServer(dict)
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as idle:
        assert handler(server, "ping")[0] == 200
        server.close()
        assert idle.recv(1) == b""
    server.close()
    assert len(os.listdir("/proc/self/task")) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    with DebugServer(lambda: {"step": 4}, port=port) as another:
        assert handler(another, "tft") == (200, b'{"step": 4}')


def test_it_may_end_as_soon_as_it_has_started() -> None:
    for _ in range(50):
        DebugServer(dict).close()


def test_a_server_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not server_module._answers("127.0.0.1", silent.getsockname()[1], within_s=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(server_module, "_answers", lambda *_, **__: False)
        with pytest.raises(ConfigError, match="did not answer within 60 s of its start; check the load"):
            DebugServer(dict)
    with DebugServer(dict) as server:
        assert handler(server, "ping") == (200, b"pong")


def test_a_request_that_needs_the_interpreter_does_not_hang_its_end() -> None:
    """Torch's own shutdown waits for the request with the interpreter's lock held, which the request needs."""
    asked, goes_on = threading.Event(), threading.Event()

    def facts() -> dict[str, Any]:
        asked.set()
        assert goes_on.wait(WAIT_S)
        return {}

    server = DebugServer(facts)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(handler, server, "tft")
        assert asked.wait(WAIT_S)
        end = pool.submit(server.close)
        assert answer.exception(WAIT_S) is not None  # its connection was closed
        assert not end.done()
        goes_on.set()
        end.result(WAIT_S)


def test_a_request_that_does_not_end_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_END_S", 0.1)
    asked, goes_on = threading.Event(), threading.Event()

    def facts() -> dict[str, Any]:
        asked.set()
        assert goes_on.wait(WAIT_S)
        return {}

    server = DebugServer(facts)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(handler, server, "tft")
        assert asked.wait(WAIT_S)
        server.close()
        assert "still answers a request after 0.1 s; it takes no other one" in caplog.text
        goes_on.set()
        assert answer.exception(WAIT_S) is not None
    with DebugServer(lambda: {"step": 5}) as another:
        assert handler(another, "tft") == (200, b'{"step": 5}')


_PROGRAM = """
import os, sys, threading, urllib.request
from tft_pg import DebugServer

server = DebugServer(lambda: {"pid": os.getpid()})

def ask():
    with urllib.request.urlopen(urllib.request.Request(server.url + "/handler/tft", method="POST"), timeout=30) as got:
        return got.read().decode()

def ports():
    rows = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
            rows |= {line.split()[9] for line in lines}
    held = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            pass
    return len(rows & held)

child = os.fork()
if child == 0:
    print("held", ports(), flush=True)
    with DebugServer(lambda: {"of": "the child"}) as own:
        print(own.url != server.url, flush=True)
    server.close()
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(ask() == '{"pid": %d}' % os.getpid(), flush=True)
"""  # it ends without a close


def test_a_forked_child_has_nothing_of_the_server_and_a_process_ends_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["held 0", "True", "child 7", "True"], done.stderr


# --- torch's page -----------------------------------------------------------------------------------------------------


def test_a_page_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_PACKAGES", ("json", "no_such_package", "nor_this_one"))
    with pytest.raises(ConfigError, match="needs no_such_package and nor_this_one; install it, or leave page_port out"):
        DebugServer(dict, page_port=0)


def test_a_group_of_several_processes_needs_a_store() -> None:
    with pytest.raises(ConfigError, match="needs their store; give its host and port"):
        PagePlace(rank=1, world_size=2)


@needs_tabulate
def test_a_store_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_STORE_TIMEOUT", server_module.timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = PagePlace(0, 2, "127.0.0.1", silent.getsockname()[1])
        with pytest.raises(StoreUnreachableError):
            DebugServer(dict, page_port=0, place=place)
    with DebugServer(dict) as server:  # nothing was left
        assert handler(server, "ping")[0] == 200


@needs_tabulate
def test_the_page_shows_the_training_and_the_stacks_on_loopback_and_ends_with_the_server() -> None:
    with DebugServer(lambda: {"step": 3}, page_port=0) as server:
        assert server.page_url is not None
        status, shown = ask(f"{server.page_url}/tft", "GET")
        assert status == 200
        assert b"&#34;step&#34;: 3" in shown or b'"step": 3' in shown
        status, shown = ask(f"{server.page_url}/stacks", "GET")
        assert status == 200
        assert b"test_the_page_shows_the_training" in shown
        assert server._page is not None
        assert server._page._process is not None
        pid = server._page._process.pid
        assert {address for addresses in listening_ports(pid).values() for address in addresses} == {"0100007F"}
    assert not Path(f"/proc/{pid}").exists()


@needs_tabulate
def test_the_page_asks_every_rank_of_the_group() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = PagePlace(0, 2, "127.0.0.1", store.port)
    with closing(DebugServer(lambda: {"step": 3}, page_port=0, place=place)) as server:
        store.set("debug_server/rank1", "http://127.0.0.1:9")  # a rank that has died
        assert server.page_url is not None
        status, shown = ask(f"{server.page_url}/tft", "GET")
    assert status == 200
    assert b"Rank 0: " + server.url.encode() in shown
    assert b"Rank 1: http://127.0.0.1:9" in shown
    assert b"Failed to fetch" in shown


@needs_tabulate
def test_a_page_s_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"can't start on 127\.0\.0\.1 port {port} .*in use"):
            DebugServer(dict, page_port=port)
