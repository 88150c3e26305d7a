"""`tft doctor`: what is wrong is found, said with its remedy, and nothing else is."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from tft_coord.compat.views import DescribedJob, LighthouseDescription
from tft_coord.timeouts import Timeouts
from tft_lighthouse import LighthouseServer
from tft_suite.cli.main import exit_code_of
from tft_suite.doctor.facts import Facts, LighthouseFacts
from tft_suite.doctor.findings import PACKAGES, findings
from tft_suite.doctor.report import report
from tft_suite.doctor.survey import survey

SOON = timedelta(seconds=5)
DESCRIPTION = LighthouseDescription(
    version="0.1.0",
    started_ms=1_000,
    now_ms=61_000,
    cluster_id="c",
    min_replicas=2,
    join_timeout_ms=60_000,
    heartbeat_timeout_ms=5_000,
    quorum_tick_ms=100,
    jobs=(DescribedJob("default", 7, 3, "nobody has asked"),),
    lost_state_timeout_ms=30_000,
    stragglers="warn (ratio 2)",
)
LIGHTHOUSE = LighthouseFacts(address="lh:1", description=DESCRIPTION, local_address="10.0.0.1")
GOOD = Facts(
    versions={**dict.fromkeys(PACKAGES, "0.1.0"), "torch": "2.13.0+cpu"},
    hostname="node-1",
    interfaces={"eth0": ("10.0.0.1", "fe80::1"), "ib0": ("10.1.0.1",), "lo": ("127.0.0.1",)},
    environ={"TFT_LIGHTHOUSE": "lh:1"},
    token_is_set=True,
    token_file_mode=0o600,
    timeouts=Timeouts(),
    lighthouses=(LIGHTHOUSE,),
)


def test_of_a_good_machine_nothing_is_said() -> None:
    assert findings(GOOD) == []
    text = report(GOOD, [])
    assert "tick 100 ms, lost state 30000 ms, stragglers warn (ratio 2); job default: quorum 7 of 3" in text
    assert "problems: none" in text
    assert "job default: quorum 7 of 3, waits for: nobody has asked" in text
    assert "up 60 s" in text
    assert "torchft" not in text


def test_a_job_of_torchfts_is_not_no_job() -> None:
    description = replace(DESCRIPTION, jobs=(), torchft=DescribedJob("default", 9, 2, "nobody has asked"))
    text = report(replace(GOOD, lighthouses=lighthouse(description=description)), [])
    assert "torchft's members: quorum 9 of 2, waits for: nobody has asked" in text
    assert "no job yet" not in text


def test_a_standby_is_in_order_beside_a_leader_and_trouble_without_one() -> None:
    standby = replace(LIGHTHOUSE, address="lh:2", description=None, trouble="lh:2 stands by", is_standby=True)
    assert findings(replace(GOOD, lighthouses=(LIGHTHOUSE, standby))) == []
    assert [each.sentence for each in findings(replace(GOOD, lighthouses=(standby,)))] == ["lh:2 stands by"]


def lighthouse(**changes: object) -> tuple[LighthouseFacts, ...]:
    return (replace(LIGHTHOUSE, **changes),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says", "is_problem"),
    [
        ({"versions": {**GOOD.versions, "tft-pg": ""}}, ["tft-pg is not installed", "install"], True),
        ({"versions": {**GOOD.versions, "tft-pg": "0.2.0"}}, ["tft-pg 0.2.0", "one release"], True),
        (
            {"versions": {**GOOD.versions, "tft-torchft": "0.1.0", "torchft-nightly": "2026.10.26"}},
            ["tft-torchft 0.1.0 and torchft-nightly 2026.10.26", "uninstall"],
            True,
        ),
        ({"versions": {**GOOD.versions, "torch": "2.9.1"}}, ["torch 2.9.1", "install a newer"], True),
        ({"versions": {**GOOD.versions, "torch": ""}}, ["torch is not installed"], True),
        ({"setting_error": "RANK is 'x'; give a whole number"}, ["refuse to start", "RANK is 'x'"], True),
        (
            {"environ": {"TFT_LIGHTHOSE": "a:1", "TFT_OTHER": "x"}},
            ["TFT_LIGHTHOSE is set", "you mean TFT_LIGHTHOUSE"],
            False,
        ),
        ({"token_is_set": False}, ["no shared secret", "TFT_TOKEN"], False),
        ({"token_file_mode": 0o644}, ["mode 644", "chmod 600"], False),
        ({"hostname": "localhost", "hostname_is_loopback": True}, ["'localhost'", "/etc/hosts"], True),
        ({"environ": {"GLOO_SOCKET_IFNAME": "eth7"}}, ["GLOO_SOCKET_IFNAME names 'eth7'", "eth0, ib0, lo"], True),
        ({"environ": {"NCCL_SOCKET_IFNAME": "docker"}}, ["NCCL_SOCKET_IFNAME names 'docker'"], True),
        ({"environ": {"GLOO_SOCKET_IFNAME": "ib0"}}, ["is ib0", "lighthouse is eth0"], False),
        ({"environ": {"GLOO_SOCKET_IFNAME": "lo"}}, ["is lo", "no other machine can reach", "set it to eth0"], True),
        (
            {"lighthouses": lighthouse(description=None, trouble="the lighthouse at lh:1: nothing")},
            ["lh:1: nothing"],
            True,
        ),
        (
            {"lighthouses": lighthouse(description=None, is_foreign=True)},
            ["lh:1", "its heartbeat timeout"],
            False,
        ),
        (
            {
                "lighthouses": lighthouse(
                    description=replace(DESCRIPTION, jobs=(DescribedJob("j", 7, 3, "nobody", ("two of 'a' live",)),))
                )
            },
            ["job j: two of 'a' live"],
            True,
        ),
        ({"lighthouses": lighthouse(answers_anybody=True)}, ["lighthouse at lh:1 has none", "TFT_TOKEN"], False),
        ({"lighthouses": lighthouse(clock_ahead_ms=-90_000)}, ["90 s behind", "NTP"], False),
        (
            {
                "lighthouses": (
                    LIGHTHOUSE,
                    replace(LIGHTHOUSE, address="b:1", description=replace(DESCRIPTION, cluster_id="d")),
                )
            },
            ["different clusters", "--cluster_id"],
            True,
        ),
        ({"timeouts": Timeouts(quorum_timeout_ms=60_000)}, ["quorum_timeout_ms", "join_timeout_ms"], False),
        (
            {"lighthouses": lighthouse(description=replace(DESCRIPTION, join_timeout_ms=600_000))},
            ["quorum_timeout_ms (70000)", "join_timeout_ms (600000)"],
            False,
        ),
    ],
)
def test_what_is_wrong_is_said_once_with_its_remedy(
    changes: dict[str, object], says: list[str], is_problem: bool
) -> None:
    (finding,) = findings(replace(GOOD, **changes))  # type: ignore[arg-type]
    assert all(words in finding.sentence for words in says), finding.sentence
    assert "\n" not in finding.sentence
    assert finding.is_problem is is_problem


def test_what_the_lighthouse_says_of_itself_counts_and_not_what_was_assumed_of_it() -> None:
    quick = replace(DESCRIPTION, join_timeout_ms=1_000)
    facts = replace(GOOD, timeouts=Timeouts(quorum_timeout_ms=20_000), lighthouses=lighthouse(description=quick))
    assert findings(facts) == []


def test_of_several_lighthouses_each_counts() -> None:
    slow = replace(LIGHTHOUSE, description=replace(DESCRIPTION, join_timeout_ms=600_000))
    for order in ((slow, LIGHTHOUSE), (LIGHTHOUSE, slow)):
        (finding,) = findings(replace(GOOD, lighthouses=order))
        assert "join_timeout_ms (600000)" in finding.sentence


def test_prefixes_of_interfaces_are_for_those_who_take_them() -> None:
    assert findings(replace(GOOD, environ={"NCCL_SOCKET_IFNAME": "ib,eth"})) == []
    assert findings(replace(GOOD, environ={"NCCL_SOCKET_IFNAME": "^docker"})) == []
    assert len(findings(replace(GOOD, environ={"NCCL_SOCKET_IFNAME": "=ib"}))) == 1
    assert len(findings(replace(GOOD, environ={"GLOO_SOCKET_IFNAME": "ib"}))) == 1


def test_on_one_machine_loopback_is_right() -> None:
    here = lighthouse(address="localhost:1", local_address="127.0.0.1")
    assert findings(replace(GOOD, hostname="localhost", hostname_is_loopback=True, lighthouses=here)) == []


# --- with a real lighthouse ----------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", token="a-long-enough-secret") as server:
        yield server


def test_a_lighthouse_is_heard(served: LighthouseServer) -> None:
    environ = {"TFT_LIGHTHOUSE": served.address, "TFT_TOKEN": "a-long-enough-secret", "TFT_OTHER": "x"}
    facts = survey(environ, lighthouse=None, timeout=SOON)
    (heard,) = facts.lighthouses
    assert heard.description is not None
    assert heard.description.heartbeat_timeout_ms == 5_000
    assert heard.description.jobs == ()  # asking joins no job
    assert abs(heard.clock_ahead_ms) < 5_000
    assert heard.local_address == "127.0.0.1"
    assert facts.environ["TFT_TOKEN"] == "set"
    assert "a-long-enough-secret" not in report(facts, findings(facts))
    assert [finding for finding in findings(facts) if finding.is_problem] == []
    assert not heard.answers_anybody


def test_a_wrong_secret_is_said(served: LighthouseServer) -> None:
    facts = survey({"TFT_TOKEN": "another-long-secret"}, lighthouse=served.address, timeout=SOON)
    (finding,) = [finding for finding in findings(facts) if finding.is_problem]
    assert "secret" in finding.sentence
    assert served.address.removeprefix("http://") in finding.sentence


def test_a_lighthouse_without_the_secret_that_is_set_here_is_said() -> None:
    with LighthouseServer("127.0.0.1:0") as served:
        with_secret = survey({"TFT_TOKEN": "a-long-enough-secret"}, lighthouse=served.address, timeout=SOON)
        without = survey({}, lighthouse=served.address, timeout=SOON)
    said = f"a shared secret is set here, but the lighthouse at {served.address} has none"
    assert [finding.is_problem for finding in findings(with_secret) if said in finding.sentence] == [False]
    assert not any(said in finding.sentence for finding in findings(without))


@contextmanager
def grpc_server(*handlers: grpc.GenericRpcHandler) -> Iterator[str]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, handlers=list(handlers))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


class Torchfts(grpc.GenericRpcHandler):
    """Knows torchft's calls, and refuses a request without a member."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if not call.method.startswith("/torchft.LighthouseService/"):
            return None
        return grpc.unary_unary_rpc_method_handler(
            lambda _, context: context.abort(grpc.StatusCode.INVALID_ARGUMENT, "missing requester")
        )


def test_torchfts_lighthouse_is_of_use() -> None:
    with grpc_server(Torchfts()) as address:
        facts = survey({}, lighthouse=address, timeout=SOON)
    assert facts.lighthouses[0].is_foreign
    assert not any(finding.is_problem for finding in findings(facts))


def test_another_programs_grpc_server_is_no_lighthouse(capsys: pytest.CaptureFixture[str]) -> None:
    with grpc_server() as address:
        told = said_by_both(capsys, address)
    assert "is not a lighthouse: another gRPC service answers there" in told


def test_the_command_prints_and_exits(
    served: LighthouseServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(os.environ):
        if name.startswith(("TFT_", "TORCHFT_")) or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    secret = tmp_path / "secret"
    secret.write_text("a-long-enough-secret")
    secret.chmod(0o600)
    monkeypatch.setenv("TFT_TOKEN_FILE", str(secret))
    monkeypatch.setenv("TFT_LIGHTHOUSE", served.address)
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "1.5")
    assert exit_code_of(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "problems: none" in said
    assert "timeout                   1500" in said
    assert exit_code_of(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["problems"], facts["timeouts"]["timeout_ms"]) == ([], 1_500)
    assert facts["lighthouses"][0]["description"]["version"] == "0.1.0"
    assert "a-long-enough-secret" not in str(facts)

    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "soon")
    assert exit_code_of(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "TORCHFT_TIMEOUT_SEC is 'soon'" in said
    assert "problems: 1" in said  # the secret of the file was shown to the lighthouse, which was asked all the same
    assert f"{served.address}: tft-lighthouse" in said


def test_nobody_there_is_a_problem_and_not_a_hang(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound and not listening: refused at once, and nobody else's
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = said_by_both(capsys, address)
    assert f"the lighthouse at {address} can't be reached: no server listens there (connection refused)" in told


def said_by_both(capsys: pytest.CaptureFixture[str], address: str) -> str:
    """What `tft doctor` and `tft drain` say of an address; both say it alike, and at once."""
    started = time.monotonic()
    assert exit_code_of(["doctor", "--lighthouse", address, "--timeout", "60"]) == 1
    (told,) = (line[5:] for line in capsys.readouterr().out.splitlines() if line.startswith("  1. the lighthouse"))
    assert exit_code_of(["drain", "a", "--lighthouse", address, "--timeout", "60"]) == 2
    assert capsys.readouterr().err.endswith(f"tft: a was not asked to leave: {told}\n")
    assert time.monotonic() - started < 20
    return told


def test_a_name_that_nobody_knows_is_said_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFT_INSECURE", "1")  # without a secret a lighthouse on another machine is a problem of its own
    assert "can't be reached: the name no.such.host.invalid is unknown" in said_by_both(
        capsys, "no.such.host.invalid:1"
    )


def test_an_http_server_is_no_lighthouse(capsys: pytest.CaptureFixture[str]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, name="test-http")
        thread.start()
        try:
            told = said_by_both(capsys, f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    assert "is not a lighthouse: an HTTP server answers there" in told


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("another-long-secret", "refuses this process's secret: "),
        (None, "refuses this process, which has no secret: "),
    ],
)
def test_a_wrong_secret_and_none_are_told_apart(
    served: LighthouseServer,
    token: str | None,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TFT_TOKEN_FILE", raising=False)
    monkeypatch.delenv("TFT_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("TFT_TOKEN", token)
    address = served.address.removeprefix("http://")
    told = said_by_both(capsys, address)
    assert told.startswith(f"the lighthouse at {address} {says}")
    assert "set TFT_TOKEN or TFT_TOKEN_FILE" in told


def test_a_lighthouse_that_is_busy_for_long_is_given_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert exit_code_of(["doctor", "--lighthouse", address, "--timeout", "0.3"]) == 1
    assert "can't be reached within 0.3 s (--timeout): a server accepts the connection" in capsys.readouterr().out


@pytest.mark.parametrize("address", ["nonsense", "host:port", "http://[::1", ","])
def test_a_bad_address_is_one_sentence(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["doctor", "--lighthouse", address, "--timeout", "0.3"]) == 1
    assert "problems: 1" in capsys.readouterr().out


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "1e9"])
def test_a_wrong_timeout_is_refused(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["doctor", "--timeout", timeout]) == 2
    assert capsys.readouterr().err.count("\n") == 1
