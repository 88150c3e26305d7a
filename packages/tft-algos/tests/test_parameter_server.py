"""A parameter server and its clients in one process: sessions, their ends, refusals, and what is left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_algos import (
    ConfigError,
    ParameterServer,
    RequestTimeoutError,
    ServerBusyError,
    SessionRefusedError,
    UnreachableError,
)
from tft_algos.parameter_server import session_store
from tft_algos.parameter_server.joining import join
from tft_algos.parameter_server.routes import ANSWER_BYTES_MAX, OpenedSession, parse_address, parse_answer
from tft_pg import (
    ConfigureError,
    ErrorSwallowingProcessGroupWrapper,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupError,
    ProcessGroupGloo,
)
from tft_pg.child.nursery import NURSERY

SECRET = "made-by-openssl-rand"
KEY = "5e" * 32
WAIT_S = 60.0
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module", autouse=True)
def nursery() -> None:
    """Wait for the interpreter from which the children of the sessions are forked. Its imports may take a minute."""
    NURSERY.child(check=lambda: None).close()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TFT_TOKEN", "TFT_TOKEN_FILE", "TFT_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no thread of a server or of a group is left."""
    yield
    for thread in [each for each in threading.enumerate() if each.name.startswith("tft-ps")]:
        thread.join(0)
        assert not thread.is_alive(), f"{thread.name} is left"


class Doubles(ParameterServer):
    """A server that sends back the double of each number, until the client sends 0."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(timeout=timedelta(seconds=WAIT_S))

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        number = torch.ones(1)
        while number.item():
            pg.recv([number], 1, 0).wait()
            pg.send([2 * number], 1, 0).wait()


def double(pg: ProcessGroup, value: float) -> float:
    pg.send([torch.tensor([value])], 0, 0).wait()
    answer = torch.empty(1)
    pg.recv([answer], 0, 0).wait()
    return answer.item()


@contextmanager
def session(server: ParameterServer, **settings: Any) -> Iterator[ProcessGroup]:
    pg = type(server).new_session(server.address(), **settings)
    try:
        yield pg
    finally:
        pg.shutdown()


def wait_until(is_so: Callable[[], object], what: str) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up_s, f"timed out waiting until {what}"
        time.sleep(0.005)


def keys(server: ParameterServer) -> list[str]:
    store = server._session_server._store._store
    assert store is not None
    return list(store.list_keys())


def ask(server: ParameterServer, headers: dict[str, str] | None = None, path: str = "") -> tuple[int, str]:
    url = server.address() if not path else server.address().replace("/new_session", path)
    try:
        with urlopen(Request(url, headers=headers or {}), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_session_is_a_group_of_two_and_ends_with_its_client() -> None:
    with Doubles() as server:
        assert server.address().startswith("http://")
        assert server.address().endswith("/new_session")
        with session(server) as pg:
            assert (pg.rank(), pg.size()) == (1, 2)
            assert [double(pg, value) for value in (1.0, 2.5)] == [2.0, 5.0]
            assert server.num_sessions() == 1
            assert keys(server)
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        assert keys(server) == []
        with session(server) as pg:
            assert double(pg, 3.0) == 6.0


def test_a_session_ends_when_forward_returns() -> None:
    with Doubles() as server, session(server) as pg:
        assert double(pg, 0.0) == 0.0
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        assert keys(server) == []
        with pytest.raises(ProcessGroupError):
            double(pg, 1.0)


def test_many_clients_are_served_at_a_time() -> None:
    all_here = threading.Barrier(8, timeout=WAIT_S)

    def use(value: int) -> list[float]:
        with session(server) as pg:
            all_here.wait()
            return [double(pg, float(value + number)) for number in range(1, 20)]

    with Doubles() as server, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(use, range(0, 800, 100)))
    assert found == [[2.0 * (value + number) for number in range(1, 20)] for value in range(0, 800, 100)]


def test_sessions_leave_no_thread_and_no_descriptor() -> None:
    def used() -> int:
        return threading.active_count() + len(os.listdir("/proc/self/fd"))

    with Doubles() as server:
        for number in range(31):
            with session(server) as pg:
                assert double(pg, 1.0) == 2.0
            if number == 0:  # torch keeps some resources from the first use on
                wait_until(lambda: server.num_sessions() == 0, "the session ended")
                before = used()
        wait_until(lambda: server.num_sessions() == 0 and used() < before + 5, "all was given back")


def test_an_error_in_forward_ends_its_session_alone(caplog: pytest.LogCaptureFixture) -> None:
    class FailsAtThirteen(Doubles):
        def forward(self, session_id: str, pg: ProcessGroup) -> None:
            number = torch.ones(1)
            while True:
                pg.recv([number], 1, 0).wait()
                if number.item() == 13:
                    raise LookupError("no number")
                pg.send([2 * number], 1, 0).wait()

    with FailsAtThirteen() as server, session(server) as other, session(server) as pg:
        pg.send([torch.tensor([13.0])], 0, 0).wait()
        with pytest.raises(PeerDisconnectedError):
            pg.recv([torch.empty(1)], 0, 0).wait()
        wait_until(lambda: server.num_sessions() == 1, "the session ended")
        assert double(other, 4.0) == 8.0
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.getMessage().endswith("ended by an error in forward")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)


def test_a_client_more_than_the_most_is_told_so_and_gets_the_place_of_one_that_leaves() -> None:
    with Doubles(max_sessions=2) as server:
        with session(server), session(server):
            with pytest.raises(ServerBusyError, match="has 2 sessions, as many as it allows; ask again later") as info:
                Doubles.new_session(server.address())
            assert info.value.status == 503
        wait_until(lambda: server.num_sessions() == 0, "the sessions ended")
        with session(server) as pg:
            assert double(pg, 1.0) == 2.0


def test_a_client_that_never_joins_loses_its_session_after_join_timeout() -> None:
    with Doubles(join_timeout=timedelta(seconds=0.3), max_sessions=1) as server:
        status, body = ask(server)
        assert status == 200
        late = json.loads(body)
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        assert keys(server) == []
        pg = ProcessGroupGloo()
        with pytest.raises(ConfigureError, match="rank 0"):  # it is late, and leaves a key
            pg.configure(late["store_addr"], 1, 2, timeout=timedelta(seconds=0.3))
        pg.shutdown()
        with session(server) as pg:
            assert double(pg, 1.0) == 2.0
            assert not [key for key in keys(server) if late["session_id"] in key]


def warnings_of(caplog: pytest.LogCaptureFixture, session_id: str) -> list[str]:
    """Return the warnings and errors of one session, none of which has a traceback."""
    found = [each for each in caplog.records if each.levelname in ("WARNING", "ERROR") and session_id in each.message]
    assert not [each for each in found if each.exc_info or each.levelname == "ERROR"]
    return [each.message for each in found]


def test_a_client_that_never_joins_is_one_warning_without_a_quorum(caplog: pytest.LogCaptureFixture) -> None:
    with Doubles(join_timeout=timedelta(seconds=0.3)) as server:
        session_id = json.loads(ask(server)[1])["session_id"][:8]
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        (sentence,) = warnings_of(caplog, session_id)
        assert sentence.endswith("ended before it began: the client did not join in time")


def test_a_client_whose_server_never_joins_is_told_to_open_another_session() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    opened = OpenedSession("0f3a", f"127.0.0.1:{store.port}/tft/session/0f3a", KEY)
    with (
        answering(http(opened.body())) as address,
        pytest.raises(ConfigureError, match="opened a session, but its own side did not join in time; open") as info,
    ):
        Doubles.new_session(address, timeout=timedelta(seconds=1))
    assert info.value.missing_ranks == (0,)
    assert "quorum" not in str(info.value)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_client_that_pauses_for_too_long_is_one_warning(caplog: pytest.LogCaptureFixture, isolate: bool) -> None:
    class Hurried(Doubles):
        def forward(self, session_id: str, pg: ProcessGroup) -> None:
            pg.set_timeout(timedelta(seconds=0.2))
            opened.append(session_id[:8])
            super().forward(session_id, pg)

    opened: list[str] = []
    with Hurried(isolate=isolate) as server, session(server):
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        (sentence,) = warnings_of(caplog, opened[0])
        assert "ended, because the client was silent for longer than the group's timeout; give the group of" in sentence


@contextmanager
def holding(server: ParameterServer) -> Iterator[tuple[socket.socket, OpenedSession]]:
    """Open a session as a client that has not joined yet, and holds its connection."""
    with socket.create_connection(parse_address(server.address()), timeout=WAIT_S) as sock:
        sock.sendall(b"GET /new_session HTTP/1.0\r\ntft-holds-connection: 1\r\n\r\n")
        with sock.makefile("rb") as answer:
            assert b" 200 " in answer.readline()
            while answer.readline().strip():
                pass
            yield sock, parse_answer(answer.readline())


def test_a_client_that_dies_before_it_joins_loses_its_session_at_once() -> None:
    with Doubles(join_timeout=HOUR, max_sessions=1) as server:
        for _ in range(3):
            with holding(server):
                assert server.num_sessions() == 1
            wait_until(lambda: server.num_sessions() == 0, "the session ended")
            assert keys(server) == []
        with session(server) as pg:
            assert double(pg, 1.0) == 2.0


def test_a_client_holds_its_connection_until_both_sides_have_joined() -> None:
    with Doubles(join_timeout=HOUR) as server, holding(server) as (sock, opened):
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        pg = Doubles.new_process_group()
        assert join(pg, opened, 1, timedelta(seconds=WAIT_S))
        sock.settimeout(WAIT_S)
        assert sock.recv(1) == b""
        assert double(pg, 1.0) == 2.0
        pg.shutdown()


class Served(Doubles):
    """A server that records which sessions were served."""

    def __init__(self, **settings: Any) -> None:
        self.served: list[str] = []
        super().__init__(**settings)

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        self.served.append(session_id)
        super().forward(session_id, pg)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_stranger_in_the_client_s_place_is_not_served(caplog: pytest.LogCaptureFixture, isolate: bool) -> None:
    with Served(join_timeout=HOUR, isolate=isolate) as server, holding(server) as (_, opened):
        pg = Doubles.new_process_group()
        # The key of another session: the stranger knows all that is in the store.
        assert not join(pg, replace(opened, key=KEY), 1, timedelta(seconds=WAIT_S))
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        pg.shutdown()
        assert server.served == []
        (sentence,) = warnings_of(caplog, opened.session_id[:8])
        assert "because the process that joined does not know the session's key; check who reaches port" in sentence
        with session(server) as pg:
            assert double(pg, 1.0) == 2.0
        assert len(server.served) == 1


def test_a_client_whose_place_is_taken_is_told_to_open_another_session() -> None:
    with Doubles(join_timeout=HOUR) as server, holding(server) as (_, opened):
        pg = Doubles.new_process_group()
        assert join(pg, opened, 1, timedelta(seconds=WAIT_S))
        with answering(http(opened.body())) as address, pytest.raises(ConfigureError) as info:
            Doubles.new_session(address)
        assert str(info.value).endswith(
            "opened a session, but the store prefix is already used by rank 1; open another session"
        )
        assert double(pg, 1.0) == 2.0
        pg.shutdown()


def test_a_stranger_that_proves_nothing_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    with Served(join_timeout=HOUR) as server, holding(server) as (_, opened):
        pg = Doubles.new_process_group()
        pg.configure(opened.store_addr, 1, 2, timeout=timedelta(seconds=WAIT_S))
        pg.shutdown()
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        assert server.served == []
        (sentence,) = warnings_of(caplog, opened.session_id[:8])
        assert "rank 1 has joined, but sent no proof of the session's key" in sentence


def test_a_client_refuses_a_stranger_in_the_server_s_place() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    opened = OpenedSession("0f3a", f"127.0.0.1:{store.port}/tft/session/0f3a", KEY)
    stranger = Doubles.new_process_group()
    with answering(http(opened.body())) as address, ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join, stranger, replace(opened, key=KEY[::-1]), 0, timedelta(seconds=WAIT_S))
        with pytest.raises(SessionRefusedError, match="does not know the session's key; check who reaches"):
            Doubles.new_session(address)
        assert not joined.result(WAIT_S)
    stranger.shutdown()


def test_the_key_of_a_session_is_not_in_the_store() -> None:
    with Doubles() as server, holding(server) as (_, opened):
        pg = Doubles.new_process_group()
        assert join(pg, opened, 1, timedelta(seconds=WAIT_S))
        store = server._session_server._store._store
        assert store is not None
        assert [key for key in keys(server) if opened.session_id in key]
        for key in keys(server):
            assert opened.key not in key
            assert opened.key.encode() not in store.get(key)
            assert bytes.fromhex(opened.key) not in store.get(key)
        pg.shutdown()


def test_keys_of_strangers_are_removed_and_too_many_refuse_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "_KEYS_MAX", 10)
    monkeypatch.setattr(session_store, "_REMOVED_MAX", 100)
    with Doubles(max_sessions=1) as server, session(server) as pg:
        own = keys(server)
        assert 0 < len(own) <= session_store._KEYS_OF_SESSION_MAX
        assert double(pg, 0.0) == 0.0
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        stranger = TCPStore("127.0.0.1", server._session_server._store.port, is_master=False, wait_for_workers=False)
        for number in range(450):
            stranger.set(f"tft/session/{number}/k" if number % 2 else f"k{number}", "v")
        # Each of these removes 100 keys before it is refused, and 100 at its end.
        with pytest.raises(ServerBusyError, match="has 350 keys, more than 110, which sessions did not write; close"):
            Doubles.new_session(server.address())
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        assert len(keys(server)) == 250
        with pytest.raises(ServerBusyError, match="has 150 keys"):
            Doubles.new_session(server.address())
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
        with session(server) as pg:
            assert double(pg, 1.0) == 2.0
            assert len(keys(server)) == len(own)


def test_a_message_that_is_too_long_ends_its_session_alone(caplog: pytest.LogCaptureFixture) -> None:
    with Doubles() as server, session(server) as other, session(server) as pg:
        sending = pg.send([torch.ones(100_000)], 0, 0)
        with suppress(ProcessGroupError):  # it may end before the server has read the message
            sending.wait()
        with pytest.raises(ProcessGroupError):
            pg.recv([torch.empty(1)], 0, 0).wait()
        wait_until(lambda: server.num_sessions() == 1, "the session ended")
        assert double(other, 4.0) == 8.0
    (record,) = [each for each in caplog.records if "the library of its group failed" in each.getMessage()]
    assert record.levelname == "WARNING"


@pytest.mark.parametrize(("isolate", "kind"), [(True, ProcessGroupBabyGloo), (False, ProcessGroupGloo)])
def test_the_server_s_group_runs_in_a_child_process_unless_told_otherwise(isolate: bool, kind: type) -> None:
    kinds: list[type] = []

    class TellsKind(Doubles):
        def forward(self, session_id: str, pg: ProcessGroup) -> None:
            kinds.append(type(pg))
            super().forward(session_id, pg)

    with TellsKind(isolate=isolate) as server, session(server) as pg:
        assert double(pg, 1.0) == 2.0
    assert kinds == [kind]


def test_a_group_of_another_type_is_used_as_it_is() -> None:
    class OfItsOwn(Doubles):
        @classmethod
        def new_process_group(cls) -> ProcessGroup:
            return ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(timeout=timedelta(seconds=WAIT_S)))

        def forward(self, session_id: str, pg: ProcessGroup) -> None:
            assert isinstance(pg, ErrorSwallowingProcessGroupWrapper)
            pg.send([torch.ones(1)], 1, 0).wait()

    with OfItsOwn() as server, session(server) as pg:
        answer = torch.zeros(1)
        pg.recv([answer], 0, 0).wait()
        assert answer.item() == 1.0


def test_a_secret_is_demanded_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with Doubles(bind="127.0.0.1", token=SECRET) as server:
        for wrong in (None, "another-secret"):
            with pytest.raises(SessionRefusedError, match="secret is missing or wrong; give every process") as info:
                Doubles.new_session(server.address(), token=wrong)
            assert info.value.status == 401
            assert SECRET not in str(info.value)
        assert ask(server, path="/other")[0] == 401
        assert ask(server, {"authorization": "Bearer \xfc"})[0] == 401
        assert server.num_sessions() == 0
        with session(server, token=SECRET) as pg:
            assert double(pg, 1.0) == 2.0
        monkeypatch.setenv("TFT_TOKEN", SECRET)
        with session(server) as pg:
            assert double(pg, 1.0) == 2.0


def test_the_secret_of_the_environment_is_the_server_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_TOKEN", SECRET)
    with Doubles(bind="127.0.0.1") as server:
        assert ask(server)[0] == 401
        assert ask(server, {"authorization": f"Bearer {SECRET}"})[0] == 200


def test_without_a_secret_only_this_machine_is_served() -> None:
    with pytest.raises(ConfigError, match="no shared secret is set; to serve other machines set TFT_TOKEN"):
        Doubles(bind="0.0.0.0")
    with Doubles() as server:
        ports = [server._session_server._port, server._session_server._store._port]
        bound = [line.split()[1] for table in ("tcp", "tcp6") for line in listening(table)]
        hosts = {each.split(":")[0] for each in bound if int(each.split(":")[1], 16) in ports}
        assert hosts <= {"0100007F", "00000000000000000000000001000000"}
        assert len(hosts) == 1


def listening(table: str) -> list[str]:
    with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
        return [line for line in list(lines)[1:] if line.split()[3] == "0A"]


def test_other_machines_are_served_with_a_secret_or_on_demand() -> None:
    for settings in ({"token": SECRET}, {"insecure": True}):
        with Doubles(bind="0.0.0.0", advertise_addr="localhost", **settings) as server:
            assert server.address().startswith("http://localhost:")
            with session(server, token=settings.get("token")) as pg:
                assert double(pg, 1.0) == 2.0


def test_shutdown_ends_sessions_threads_and_ports() -> None:
    server = Doubles()
    with session(server) as pg:
        began_s = time.monotonic()
        server.shutdown()
        assert time.monotonic() - began_s < 5
        assert [each.name for each in threading.enumerate() if each.name.startswith("tft-ps")] == []
        with pytest.raises(PeerDisconnectedError):
            double(pg, 1.0)
    server.shutdown()
    with pytest.raises(UnreachableError, match="can't be reached"):
        Doubles.new_session(server.address())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", server._session_server._store._port), timeout=WAIT_S)


def test_shutdown_does_not_wait_for_a_client_that_has_not_joined() -> None:
    server = Doubles()
    assert ask(server)[0] == 200
    assert server.num_sessions() == 1
    began_s = time.monotonic()
    server.shutdown()
    assert time.monotonic() - began_s < 5


def test_a_session_may_stop_its_server() -> None:
    class Stops(Doubles):
        def forward(self, session_id: str, pg: ProcessGroup) -> None:
            self.shutdown()

    server = Stops()
    with session(server):
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
    with pytest.raises(UnreachableError):
        Stops.new_session(server.address())
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("tft-ps")], "it ended")


def test_a_group_that_can_t_be_made_is_reported_to_the_client() -> None:
    here = threading.get_ident()

    class HasNoGroup(Doubles):
        @classmethod
        def new_process_group(cls) -> ProcessGroup:
            if threading.get_ident() != here:
                raise OSError("no device")
            return super().new_process_group()

    with HasNoGroup() as server:
        with pytest.raises(SessionRefusedError, match=r"new_process_group failed on the server \(OSError\)") as info:
            HasNoGroup.new_session(server.address())
        assert info.value.status == 500
        wait_until(lambda: server.num_sessions() == 0, "the session ended")


@pytest.mark.parametrize("isolate", [True, False])
def test_a_method_that_returns_no_group_is_named_on_both_sides(caplog: pytest.LogCaptureFixture, isolate: bool) -> None:
    class Forgets(Doubles):
        @classmethod
        def new_process_group(cls) -> ProcessGroup:
            return None  # type: ignore[return-value]

    sentence = "Forgets.new_process_group returned None; return a tft_pg.ProcessGroup, such as ProcessGroupGloo"
    with Forgets(isolate=isolate) as server:
        with pytest.raises(ConfigError, match=sentence):
            Forgets.new_session(server.address())
        assert server.num_sessions() == 0
        with pytest.raises(SessionRefusedError, match=f"the server can't make a group: {sentence}") as info:
            Doubles.new_session(server.address())
        assert info.value.status == 500
        wait_until(lambda: server.num_sessions() == 0, "the session ended")
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.exc_info is None
    assert sentence in record.message


def test_a_client_without_a_group_opens_no_session() -> None:
    class HasNone(Doubles):
        @classmethod
        def new_process_group(cls) -> ProcessGroup:
            raise OSError("no device")

    with HasNone() as server:
        with pytest.raises(OSError, match="no device"):
            HasNone.new_session(server.address())
        assert server.num_sessions() == 0


def test_bad_requests_are_refused_and_change_nothing() -> None:
    with Doubles() as server:
        assert ask(server, path="/state") == (404, "a parameter server answers only /new_session")
        host, port = parse_address(server.address())
        for request in (
            b"POST /new_session HTTP/1.1\r\nhost: a\r\ncontent-length: 100000000000\r\n\r\n" + b"x" * 100_000,
            b"GET /new_session HTTP/1.1\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
            b"\x16\x03\x01 no request\r\n\r\n",
        ):
            with socket.create_connection((host, port), timeout=WAIT_S) as stranger:
                answer = b""
                try:
                    stranger.sendall(request)
                    while more := stranger.recv(4096):
                        answer += more
                except ConnectionError:
                    pass  # closed before it has sent all
                assert b" 200 " not in answer
        assert server.num_sessions() == 0
        with session(server) as pg:
            assert double(pg, 1.0) == 2.0


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """Yield the address of a server that gives this answer to one request. None: it gives none."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one() -> None:
            connection, _ = listener.accept()
            with connection:
                if answer is None:
                    over.wait(WAIT_S)
                else:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_one)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/new_session"
        finally:
            over.set()
            thread.join()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("answer", "kind", "sentence"),
    [
        (http(b"{}"), SessionRefusedError, "does not answer like a parameter server .its session_id is missing"),
        (http(b"[" * 4000), SessionRefusedError, "does not answer like a parameter server"),
        (http(b" " * (ANSWER_BYTES_MAX + 1)), SessionRefusedError, "more than 4096 bytes"),
        (http(b"no\n\x1bway", "403 Forbidden"), SessionRefusedError, r"opened no session \(403\): no  way"),
        (http(b"", "503 Full"), ServerBusyError, r"opened no session \(503\): it gave no reason"),
        (b"SSH-2.0\r\n", UnreachableError, "can't be reached"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
            SessionRefusedError,
            "does not answer like a parameter",
        ),
    ],
)
def test_what_is_no_parameter_server_s_answer_is_an_error(answer: bytes, kind: type[Exception], sentence: str) -> None:
    with answering(answer) as address, pytest.raises(kind, match=sentence):
        Doubles.new_session(address)


def test_a_server_that_does_not_answer_is_not_waited_for_longer_than_the_timeout() -> None:
    with answering(None) as address, pytest.raises(RequestTimeoutError, match=r"did not answer within 0\.\d+ s"):
        Doubles.new_session(address, timeout=timedelta(seconds=0.3))


@pytest.mark.parametrize(
    "address", ["", "localhost:29600", "https://host:1/new_session", "http://host/new_session", "http://host:1/other"]
)
def test_an_address_is_checked_first(address: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a parameter server; give what its address"):
        Doubles.new_session(address)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"port": 70_000}, "port is 70000; give a number from 0"),
        ({"store_port": -1}, "store_port is -1; give a number from 0"),
        ({"max_sessions": 0}, "max_sessions is 0; give a number above zero"),
        ({"join_timeout": 5}, "join_timeout: the timeout is 5; pass timedelta"),
        ({"token": "two words"}, "the shared secret must be 1 to 4096 printable ASCII characters"),
        ({"bind": "no.such.host.invalid"}, "can't listen on no.such.host.invalid"),
        ({"advertise_addr": "a/b"}, "advertise_addr is 'a/b'"),
        ({"insecure": "0"}, "insecure is '0'; give True or False"),
        ({"insecure": "no", "bind": "0.0.0.0"}, "insecure is 'no'; give True or False"),
        ({"insecure": 1}, "insecure is 1; give True or False"),
        ({"isolate": "no"}, "isolate is 'no'; give True or False"),
        ({"bind": 5}, "bind is 5; give a name or an address as a string, or None"),
        ({"advertise_addr": 7}, "advertise_addr is 7; give a name or an address as a string, or None"),
        ({"token": 5}, "token is of type int; give the job's secret as a string, or None"),
        ({"token": SECRET.encode()}, "token is of type bytes; give the job's secret as a string, or None"),
    ],
)
def test_a_wrong_setting_is_an_error_of_its_own_name(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Doubles(**settings)


def test_a_secret_of_a_client_that_is_no_string_is_named() -> None:
    with pytest.raises(ConfigError, match="token is of type int; give the job's secret as a string, or None"):
        Doubles.new_session("http://localhost:1/new_session", token=5)  # type: ignore[arg-type]


def test_a_server_that_was_not_constructed_says_so() -> None:
    class Forgets(Doubles):
        def __init__(self) -> None:
            pass

    server = Forgets()
    sentence = r"Forgets serves nothing; call super\(\).__init__\(\) as the last line of Forgets.__init__"
    for use in (server.address, server.num_sessions, server.shutdown):
        with pytest.raises(ConfigError, match=sentence):
            use()
    with pytest.raises(ConfigError, match=sentence), server:
        pytest.fail("it serves")


def test_a_port_that_is_taken_is_named() -> None:
    with Doubles() as server:
        _, port = parse_address(server.address())
        for name in ("port", "store_port"):
            with pytest.raises(ConfigError, match=f"can't listen on .* port {port}"):
                Doubles(**{name: port})


def test_an_answer_survives_the_way() -> None:
    opened = OpenedSession("0f3a", "[::1]:29500/tft/session/0f3a", KEY)
    assert parse_answer(opened.body()) == opened
    assert KEY not in repr(opened)
    without = OpenedSession("0f3a", opened.store_addr, "")
    with pytest.raises(ValueError, match="its key is missing or invalid; client and server need the same version"):
        parse_answer(without.body())


def test_a_server_without_its_two_methods_is_no_server() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ParameterServer()  # type: ignore[abstract]


_FORKS = """
import os, sys
from datetime import timedelta
sys.path.insert(0, sys.argv[1])
from test_parameter_server import Doubles, double, session, tcp_sockets

with Doubles() as server, session(server) as pg:
    assert double(pg, 1.0) == 2.0
    child = os.fork()
    if child == 0:
        print("held", len(tcp_sockets()), flush=True)
        server.shutdown()
        sys.exit(7)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print(double(pg, 2.0), flush=True)
    with session(server) as other:
        print(double(other, 3.0), flush=True)
"""


def tcp_sockets() -> set[str]:
    rows = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
            rows |= {line.split()[9] for line in list(lines)[1:]}
    held = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the list itself
            held.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    return rows & held


@pytest.mark.in_parts
def test_a_forked_child_keeps_nothing_of_the_server() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKS, os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        timeout=50,
        env=dict(os.environ),
    )
    assert done.stdout.splitlines() == ["held 0", "child 7", "4.0", "6.0"], done.stderr
