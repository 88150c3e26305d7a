"""A process that forks beside grpc: its children hold nothing of its coordination, and end nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

# A whole trainer's coordination: streams, a server with its port. The child is a copy of all of it.
_FORKS = """
import gc, os, sys, time
from datetime import timedelta
from tft_coord import CoordinationClosedError, LighthouseClient, ManagerClient, ManagerServer
from tft_coord.core.types import QuorumKey

SOON = timedelta(seconds=10)
key = QuorumKey(1, 1)
host = sys.argv[2]
server = ManagerServer("group:1", "127.0.0.1:9", host, "127.0.0.1:0", "", 1)
inside = ManagerServer("group:2", "127.0.0.1:9", host, "127.0.0.1:0", "", 1, in_process=True)
client = ManagerClient(server.address(), group_rank=0)
other = ManagerClient(inside.address(), group_rank=0)

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

assert len(tcp_sockets()) >= 4
child = os.fork()
if child == 0:
    print("held", len(tcp_sockets()), flush=True)
    if sys.argv[1] == "use":
        for call in (client.kill, other.kill):
            try:
                call("no", SOON)
            except CoordinationClosedError as error:
                print(str(error).partition(": ")[2].partition(" belongs")[0], flush=True)
        for each in (client, other, server, inside):
            each.close() if isinstance(each, ManagerClient) else each.shutdown()
        with ManagerServer("child:1", "127.0.0.1:9", "127.0.0.1", "127.0.0.1:0", "", 1) as own:
            print("own", own.alive(), flush=True)
    client = other = server = inside = None
    gc.collect()
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
for rank in (client, other):
    assert rank.should_commit(0, 1, True, SOON, key=key) is True
print("parent", server.alive(), inside.alive(), flush=True)
for each in (client, other):
    each.close()
for each in (server, inside):
    each.shutdown()
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize(
    ("what", "said"), [("drop", []), ("use", ["this client", "this client", "own True"])], ids=["drop", "use"]
)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_child_holds_no_connection_and_ends_nothing_of_its_parents(what: str, said: Sequence[str], host: str) -> None:
    """It ends as a program does: what is registered for the end runs in it, and objects are destroyed."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not show a process its descriptors")
    done = run(_FORKS, what, host)
    # There is no lighthouse, which the manager servers say after some seconds.
    assert [line for line in done.stderr.splitlines() if "can't be reached" not in line] == []
    lines = done.stdout.splitlines()
    assert lines == ["held 0", *said, "child 7", "parent True True"]


_USERS_OWN = """
import os, socket, sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from tft_coord import LighthouseClient
from tft_coord.rpc import grpc

server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
far = socket.create_server(("127.0.0.2", port))
own = socket.create_connection(far.getsockname())
peer, _ = far.accept()
client = LighthouseClient(f"{sys.argv[1]}:{port}", timedelta(seconds=30))

def connected_to_server():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            look = socket.socket(fileno=int(name))
        except OSError:
            continue
        try:
            address, its_port = look.getpeername()[:2]
            count += (address.removeprefix("::ffff:"), its_port) == ("127.0.0.1", port)
        except OSError:
            pass
        finally:
            look.detach()
    return count

assert connected_to_server() == 1
if os.fork() == 0:
    try:
        own.sendall(b"the user's own")
    finally:
        print(connected_to_server(), flush=True)
        os._exit(0)
os.wait()
own.close()
print(peer.recv(100).decode())
client.close()
server.stop(None).wait()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_child_keeps_the_users_own_connections_to_the_same_port_of_another_host(host: str) -> None:
    done = run(_USERS_OWN, host)
    # gRPC may log the end of the server's connections by itself.
    errors = [line for line in done.stderr.splitlines() if "Got goaway" not in line]
    assert (done.stdout, errors) == ("0\nthe user's own\n", [])


_ENVIRONMENT = """
import os, sys
if sys.argv[1] == "user":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "true"
before = dict(os.environ)
seen = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            seen.append(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))
sys.meta_path.insert(0, Finder())
import tft_coord
assert "grpc" not in sys.modules
tft_coord.ManagerClient
assert dict(os.environ) == before
print(*seen)
"""


@pytest.mark.parametrize(("who", "setting"), [("nobody", "0"), ("user", "true")])
def test_grpc_is_imported_without_its_fork_handlers_unless_the_user_wants_them(who: str, setting: str) -> None:
    """And the environment, which other programs inherit, is afterwards as it was."""
    done = run(_ENVIRONMENT, who)
    assert (done.stdout, done.stderr) == (f"{setting}\n", "")
