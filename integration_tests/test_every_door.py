"""Every RPC and every HTTP route of ours, for every kind of caller.

The rows are checked against the .proto and against the running servers' tables of methods and routes. So a new RPC or
route without a row fails here.
"""

from __future__ import annotations

import http.client
import logging
import ssl
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import pytest
import trustme

from integration_tests import certificates
from tft_algos import ParameterServer
from tft_ckpt import HTTPTransport
from tft_coord import TLS, JobTokens, ManagerServer
from tft_coord.core import events
from tft_coord.core.types import Hello, Member
from tft_coord.transport.credentials import channel_credentials
from tft_coord.wire import codec, coordination_pb2, rank_codec, services
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroup, ProcessGroupGloo

MAIN: Final = "secret-of-the-lighthouse"
MINE: Final = "secret-of-my-job"
OTHER: Final = "secret-of-another-job"
SECRETS: Final = {"none": None, "wrong": "guessed", "other": OTHER, "mine": MINE, "main": MAIN}
LATE_S: Final = 30.0
JOB: Final = "mine"
REFUSED: Final = "UNAUTHENTICATED"

HELLO: Final = codec.encode_to_lighthouse(events.HelloReceived(0, Hello(JOB, "a:1", 1, "127.0.0.1:1")))
ALONE: Final = Member("t:1", address="127.0.0.1:1", store_address="127.0.0.1:2", world_size=1)
DRAIN: Final = codec.encode_drain(events.DrainRequested(0, JOB, "nobody", ""))


@dataclass(frozen=True)
class Rpc:
    """A row of an RPC: who answers it, a request, and the status of the answer to each kind of caller."""

    server: str
    request: bytes
    answers: dict[str, str]


def lighthouse_rpc(request: bytes, *, mine: str, main: str, other: str = REFUSED) -> Rpc:
    return Rpc("lighthouse", request, {"none": REFUSED, "wrong": REFUSED, "other": other, "mine": mine, "main": main})


def manager_rpc(request: bytes, mine: str) -> Rpc:
    """A manager server has its job's own secret; the main one is the lighthouse's."""
    return Rpc("manager", request, {"none": REFUSED, "wrong": REFUSED, "other": REFUSED, "mine": mine, "main": REFUSED})


UNSERVED: Final = Rpc("lighthouse", b"", dict.fromkeys(SECRETS, "UNIMPLEMENTED"))
RPCS: Final = {
    "/torchft.CoordinatorService/RaftMessage": UNSERVED,  # torchft's own, between its lighthouses
    "/torchft.CoordinatorService/Info": UNSERVED,
    # torchft's calls are of the job "default", which is neither job here
    services.LIGHTHOUSE_QUORUM: lighthouse_rpc(codec.encode_lighthouse_request(ALONE), mine=REFUSED, main="OK"),
    services.LIGHTHOUSE_HEARTBEAT: lighthouse_rpc(codec.encode_heartbeat("t:1"), mine=REFUSED, main="OK"),
    services.LIGHTHOUSE_DESCRIBE: lighthouse_rpc(b"", mine="OK", main="OK", other="OK"),
    services.LIGHTHOUSE_DRAIN: lighthouse_rpc(DRAIN, mine="NOT_FOUND", main="NOT_FOUND"),
    services.LIGHTHOUSE_SESSION: lighthouse_rpc(HELLO, mine="OK", main="OK"),
    services.MANAGER_QUORUM: manager_rpc(b"\xff", "INVALID_ARGUMENT"),
    services.MANAGER_SHOULD_COMMIT: manager_rpc(b"\xff", "INVALID_ARGUMENT"),
    services.MANAGER_CHECKPOINT_METADATA: manager_rpc(rank_codec.encode_metadata_request(0), "INVALID_ARGUMENT"),
    services.MANAGER_KILL: manager_rpc(rank_codec.encode_kill("a test"), "OK"),
    services.MANAGER_SESSION: manager_rpc(rank_codec.encode_from_rank(rank_codec.RankHello(0, 1)), "OK"),
    # an orchestrator's probe has no secret
    services.HEALTH_CHECK: Rpc("lighthouse", b"", dict.fromkeys(SECRETS, "OK")),
}

PUBLIC: Final = {"none": 200, "wrong": 200, "other": 200, "mine": 200, "main": 200}
READ: Final = {"none": 401, "wrong": 401, "other": 200, "mine": 200, "main": 200}
CHANGE: Final = {"none": 401, "wrong": 401, "other": 404, "mine": 404, "main": 404}  # there is no such replica
OWN: Final = {"none": 401, "wrong": 401, "other": 401, "main": 401}
ROUTES: Final = {
    ("lighthouse", "/"): READ,
    ("lighthouse", "/status"): READ,
    ("lighthouse", "/healthz"): PUBLIC,
    ("lighthouse", "/readyz"): PUBLIC,
    ("lighthouse", "/metrics"): READ,
    ("lighthouse", "/api/v1/status"): READ,
    ("lighthouse", "/api/v1/incidents"): READ,
    ("lighthouse", "/api/v1/events"): READ,
    ("lighthouse", "/api/v1/timeline"): {**READ, "other": 404},  # for a stranger there is no such job
    ("lighthouse", "/assets/{name}"): READ,
    ("lighthouse", "/replica/{replica}/kill"): CHANGE,
    ("lighthouse", "/replica/{replica}/drain"): CHANGE,
    ("state", "/state/{key}/manifest"): {**OWN, "mine": 503},
    ("state", "/state/{key}/data"): {**OWN, "mine": 503},
    ("state", "/state/{key}/chunks"): {**OWN, "mine": 503},
    ("parameters", "/new_session"): {**OWN, "mine": 200},
}


class Parameters(ParameterServer):
    """A parameter server without parameters."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(timeout=timedelta(seconds=5))

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """No client joins in these tests."""


@dataclass
class House:
    """All servers of one job, and the certificates of its callers."""

    grpc_ports: dict[str, int]
    http_ports: dict[str, int]
    methods: set[str]
    routes: set[tuple[str, str, str]]
    good: TLS
    expired: TLS
    strange: TLS


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    authority = trustme.CA()
    certificates.write(folder / "good", authority, "127.0.0.1")
    certificates.write(folder / "strange", trustme.CA(), "127.0.0.1", trusted=authority.cert_pem.bytes())
    certificates.write(folder / "expired", authority, "127.0.0.1", **certificates.LONG_AGO)
    (folder / "jobs").write_text(f"# of a test\n{JOB} = {MINE}\nother = {OTHER}\n")
    good = certificates.settings(folder / "good", check_client=True)
    with ExitStack() as ends:
        lighthouse = ends.enter_context(
            LighthouseServer(
                "127.0.0.1:0",
                http_bind="127.0.0.1:0",
                token=MAIN,
                job_tokens=JobTokens(str(folder / "jobs")),
                tls=good,
                join_timeout_ms=100,
            )
        )
        manager = ends.enter_context(
            ManagerServer(
                "m:1",
                str(lighthouse.address),
                "127.0.0.1",
                "127.0.0.1:0",
                "s:1",
                1,
                job=JOB,
                token=MINE,
                tls=good,
                in_process=True,
            )
        )
        state = ends.enter_context(HTTPTransport[Any](bind="127.0.0.1", token=MINE, tls=good))
        parameters = ends.enter_context(
            closing(_Closing(Parameters(bind="127.0.0.1", token=MINE, insecure=False, tls=good)))
        ).server
        # The web server of a state starts on its own thread.
        assert ask_port(_port(state.address()), "GET", "/nothing", MINE, good)[0] == 404
        yield House(
            {"lighthouse": _port(lighthouse.address), "manager": _port(manager.address())},
            {
                "lighthouse": _port(str(lighthouse.http_address)),
                "state": _port(state.address()),
                "parameters": _port(parameters.address()),
            },
            {*lighthouse._shell._server.services.methods, *manager._server._shell._server.services.methods},  # type: ignore[union-attr]
            {
                *_routes("lighthouse", lighthouse._http._runner.app),  # type: ignore[union-attr]
                *_routes("state", state._server._app._server._runner.app),  # type: ignore[union-attr]
                *_routes("parameters", parameters._session_server._app._server._runner.app),  # type: ignore[union-attr]
            },
            good,
            certificates.settings(folder / "expired", check_client=True),
            certificates.settings(folder / "strange", check_client=True),
        )


@dataclass
class _Closing:
    server: Parameters

    def close(self) -> None:
        self.server.shutdown()


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def _routes(server: str, app: Any) -> Iterable[tuple[str, str, str]]:
    for route in app.router.routes():
        yield server, route.method, route.resource.canonical


def call(house: House, name: str, secret: str | None, tls: TLS | None) -> str:
    """Return the status of one call, in which a stream counts as answered with its first message."""
    row, port = RPCS[name], house.grpc_ports[RPCS[name].server]
    address = f"127.0.0.1:{port}"
    channel = grpc.insecure_channel(address) if tls is None else grpc.secure_channel(address, channel_credentials(tls))
    metadata = () if secret is None else (("authorization", f"Bearer {secret}"),)
    with channel:
        try:
            if name.endswith("/Session"):
                opens: Any = channel.stream_stream(name)
                answers = opens(iter([row.request]), metadata=metadata, timeout=LATE_S)
                next(answers)
                answers.cancel()
            else:
                services.unary_stub(channel, name)(row.request, metadata=metadata, timeout=LATE_S)
        except grpc.RpcError as error:
            return str(error.code().name)
        except StopIteration:
            return "ended"
    return "OK"


def ask(house: House, server: str, method: str, route: str, secret: str | None, tls: TLS | None) -> tuple[int, str]:
    """Return the status of one request, and the first bytes of its body; 0: the TLS handshake failed."""
    path = route.replace("{replica}", "nobody").replace("{key}", "1.0000000000000001.1.0000000000000001")
    path = path.replace("{name}", "main.js").replace("/timeline", f"/timeline?job={JOB}")
    return ask_port(house.http_ports[server], method, path, secret, tls)


def ask_port(port: int, method: str, path: str, secret: str | None, tls: TLS | None) -> tuple[int, str]:
    connection: http.client.HTTPConnection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=LATE_S)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=LATE_S, context=tls.client_context())
    )
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    with closing(connection):
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
        except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
            return 0, ""
        endless = path == "/api/v1/events"
        return answer.status, (answer.read1(4096) if endless else answer.read()).decode("utf-8", "replace")


def test_every_rpc_of_the_proto_and_every_served_one_has_a_row(house: House) -> None:
    described = {
        f"/{service.full_name}/{method.name}"
        for service in coordination_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert described | {services.HEALTH_CHECK} == set(RPCS)
    unserved = {name for name, row in RPCS.items() if row is UNSERVED}
    assert house.methods == set(RPCS) - unserved


def test_every_route_has_a_row(house: House) -> None:
    assert {(server, path) for server, _, path in house.routes} == set(ROUTES)


@pytest.mark.parametrize("caller", SECRETS)
@pytest.mark.parametrize("name", RPCS)
def test_an_rpc_is_answered_or_refused_by_its_secret(house: House, name: str, caller: str) -> None:
    assert call(house, name, SECRETS[caller], house.good) == RPCS[name].answers[caller]


@pytest.mark.parametrize("name", RPCS)
def test_no_rpc_is_answered_without_a_good_certificate(house: House, name: str) -> None:
    for tls in (None, house.expired, house.strange):
        assert call(house, name, MAIN, tls) == "UNAVAILABLE"
        assert call(house, name, MINE, tls) == "UNAVAILABLE"


@pytest.mark.parametrize(("server", "path"), ROUTES)
def test_a_route_is_answered_or_refused_by_its_secret(house: House, server: str, path: str) -> None:
    methods = [method for its_server, method, its_path in house.routes if (its_server, its_path) == (server, path)]
    assert methods
    for method in methods:
        for caller, status in ROUTES[server, path].items():
            found, body = ask(house, server, method, path, SECRETS[caller], house.good)
            assert found == status, (method, caller, body)
            if caller == "other":
                assert "m:1" not in body, "a secret of another job shows a replica of this one"
            assert not any(secret in body for secret in (MAIN, MINE, OTHER))


@pytest.mark.parametrize(("server", "path"), ROUTES)
def test_no_route_is_answered_without_a_good_certificate(house: House, server: str, path: str) -> None:
    for its_server, method, its_path in house.routes:
        if (its_server, its_path) == (server, path):
            for tls in (None, house.expired, house.strange):
                for secret in (MAIN, MINE):
                    assert ask(house, server, method, path, secret, tls) == (0, "")


def test_a_jobs_secret_shows_that_job_alone(house: House) -> None:
    for path in ("/api/v1/status", "/status", "/metrics"):
        _, of_all = ask(house, "lighthouse", "GET", path, MAIN, house.good)
        _, of_mine = ask(house, "lighthouse", "GET", path, MINE, house.good)
        _, of_other = ask(house, "lighthouse", "GET", path, OTHER, house.good)
        assert JOB in of_all
        assert JOB in of_mine
        assert f'"{JOB}"' not in of_other
        assert f"Job {JOB}" not in of_other


def test_a_flood_of_refusals_is_one_line_a_minute_without_a_secret(
    house: House, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(10):
        for name in RPCS:
            assert call(house, name, "guessed", house.good) == RPCS[name].answers["wrong"]
        for server, path in ROUTES:
            ask(house, server, "GET", path, "guessed", house.good)
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refusals) <= len(house.grpc_ports) + len(house.http_ports)
    printed = "".join(capfd.readouterr())
    for secret in (MAIN, MINE, OTHER, "guessed"):
        assert secret not in caplog.text
        assert secret not in printed
