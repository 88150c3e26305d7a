"""A process that serves or fetches state and forks: its children keep no port and no connection, and end nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SERVES = """
import gc, os, sys, threading, time
from datetime import timedelta
import torch
from tft_ckpt import TransportClosedError, HTTPTransport

SOON = timedelta(seconds=20)
source, receiver = HTTPTransport(SOON), HTTPTransport(SOON)
state = {"weights": torch.arange(1000.0)}

def fetch(step):
    source.send_checkpoint([1], step, state, SOON)
    got = receiver.recv_checkpoint(0, source.metadata(), step, SOON)
    assert torch.equal(got["weights"], state["weights"])

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

fetch(1)
# A reader that waits for a state that comes later: a connection is open at both ends while this process forks.
reader = threading.Thread(target=lambda: receiver.recv_checkpoint(0, source.metadata(), 2, SOON))
reader.start()
while len(tcp_sockets()) < 4 and reader.is_alive():
    time.sleep(0.01)
child = os.fork()
if child == 0:
    print("held", len(tcp_sockets()), flush=True)
    if sys.argv[1] == "use":
        for call in (lambda: source.send_checkpoint([], 3, state, SOON), lambda: fetch(3)):
            try:
                call()
            except TransportClosedError as error:
                print(str(error).partition(" to process")[0], flush=True)
        source.shutdown()
        receiver.abort()
        receiver.shutdown()
        with HTTPTransport(SOON) as own:
            own.send_checkpoint([], 1, state, SOON)
    source = receiver = None
    gc.collect()
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
source.send_checkpoint([1], 2, state, SOON)
reader.join(20)
print("reader", reader.is_alive(), flush=True)
fetch(3)
source.shutdown()
receiver.shutdown()
"""


@pytest.mark.parametrize("what", ["drop", "use"])
def test_a_child_holds_no_connection_and_ends_nothing_of_its_parents(what: str) -> None:
    """It ends as a program does: what is registered for the end runs in it, and objects are destroyed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _SERVES, what],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    said = ["this transport belongs"] * 2 if what == "use" else []
    assert done.stdout.splitlines() == ["held 0", *said, "child 7", "reader False"], done.stderr
    lines = [line for line in done.stderr.splitlines() if "no token is set" not in line]
    assert lines == []


_LOOKS_UP = """
import os, socket, sys, threading, time
from datetime import timedelta
from tft_ckpt.transfer.connection import StopSignal, _look_up

asked, answer = threading.Event(), threading.Event()
real = socket.getaddrinfo
def slow(host, *arguments, **more):
    if host != "a-name":
        return real(host, *arguments, **more)
    if more.get("flags"):
        raise socket.gaierror("it is no number")
    asked.set()
    answer.wait(20)
    return real("127.0.0.1", *arguments, **more)
socket.getaddrinfo = slow

def fork_and_answer():
    asked.wait(20)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    print(child, flush=True)
    answer.set()

threading.Thread(target=fork_and_answer).start()
began = time.monotonic()
stop = StopSignal(20, None)
assert _look_up("a-name", 80, 20.0, stop)
print(time.monotonic() - began, flush=True)
"""


def test_a_name_is_looked_up_though_a_child_holds_the_pipe() -> None:
    process = subprocess.Popen([sys.executable, "-c", _LOOKS_UP], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        took_s = float(process.stdout.readline())
    finally:
        os.kill(child, 9)
        process.communicate(timeout=30)
    assert took_s < 10


_OPENS = """
import os, socket, stat, sys, threading
from tft_ckpt.transfer import connection
from tft_ckpt.transfer.address import listen

real, there, forked = socket.socket, [], threading.Event()

def fork():
    child = os.fork()
    if child == 0:
        kept = any(stat.S_ISSOCK(os.fstat(number).st_mode) for number in there)
        os.write(1, b"kept" if kept else b"let go")
        os._exit(0)
    forked.set()
    os.waitpid(child, 0)

thread = threading.Thread(target=fork)

def fork_before_it_is_known(sock):
    there.append(sock.fileno())
    thread.start()
    forked.wait(0.5)  # it does not, where forks wait
    return sock

class Secured(real):
    def do_handshake(self):
        pass

class Context:
    def wrap_socket(self, sock, **_):
        return fork_before_it_is_known(Secured(fileno=sock.detach()))

class Opening(real):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        if not there:
            fork_before_it_is_known(self)

connection.let_go_in_child(connection.opened)  # the hooks are there when anything of ours is
server = socket.create_server(("127.0.0.1", 0))
stop = connection.StopSignal(20, None)
if sys.argv[1] == "secures":
    wire = connection._Wire(connection._connect(*server.getsockname(), 20.0, stop), stop)
    wire.secure(Context(), "host")
else:
    socket.socket = Opening
    if sys.argv[1] == "connects":
        sock = connection._connect(*server.getsockname(), 20.0, stop)
    else:
        sock = listen("127.0.0.1", 0)
thread.join(20)
"""


@pytest.mark.in_parts
@pytest.mark.parametrize("does", ["connects", "secures", "listens"])
def test_a_child_keeps_no_socket_that_was_made_a_moment_before_the_fork(does: str) -> None:
    done = subprocess.run([sys.executable, "-c", _OPENS, does], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("let go", "")
