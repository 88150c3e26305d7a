"""The HTTP port of a lighthouse: what it answers, to whom, and what a hostile client can't do."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tft_coord import (
    ConfigError,
    LighthouseClient,
    ManagerClient,
    ManagerServer,
    Notification,
    QuorumKey,
    RankRequest,
    Timeouts,
)
from tft_coord.core import events, types
from tft_coord.core.types import KillOrder, LeaveRequest
from tft_coord.wire import codec, services
from tft_lighthouse import LighthouseServer
from tft_lighthouse.http import app, connections, site
from tft_lighthouse.http import incidents as incidents_over_http

LATE = timedelta(seconds=20)
LATE_S = 20.0
SECRET = "s3cret-of-the-job"
QUICK = Timeouts(heartbeat_timeout_ms=2_000, beat_interval_ms=200)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", quorum_tick_ms=20, http_bind="127.0.0.1:0") as lighthouse:
        yield lighthouse


def ask(
    lighthouse: LighthouseServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    """The status, the headers and the body of an answer."""
    request = urllib.request.Request(f"{lighthouse.http_address}{path}", method=method)
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with urllib.request.urlopen(request, timeout=LATE_S) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read().decode()


def status(lighthouse: LighthouseServer, **headers: str) -> dict[str, Any]:
    code, _, body = ask(lighthouse, "/api/v1/status", **headers)
    assert code == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def until(found: Callable[[], Any]) -> Any:
    """Wait until that is true, and return it."""
    ends_s = time.monotonic() + LATE_S
    while not (result := found()):
        assert time.monotonic() < ends_s, "it did not become true"
        time.sleep(0.05)
    return result


class Group:
    """A replica group of one rank, which keeps what it is told."""

    def __init__(self, name: str, lighthouse: LighthouseServer, *, job: str = "job", token: str | None = None) -> None:
        self.told: queue.Queue[Notification] = queue.Queue()
        self.held: QuorumKey | None = None
        address = str(lighthouse.address)
        self.server = ManagerServer(
            name,
            address,
            "127.0.0.1",
            "127.0.0.1:0",
            f"{name}:1",
            1,
            job=job,
            timeouts=QUICK,
            token=token,
            in_process=True,
        )
        self.client = ManagerClient(
            self.server.address(), LATE, group_rank=0, token=token, timeouts=QUICK, listener=self.told.put
        )

    def ask(self, step: int = 0) -> None:
        self.held = self.client.quorum(0, RankRequest(step=step, lineage=1, held=self.held), LATE).key

    def hears(self, kind: type) -> Any:
        while not isinstance(news := self.told.get(timeout=LATE_S), kind):
            pass
        return news

    def close(self) -> None:
        self.client.close()
        self.server.shutdown()


@pytest.fixture
def group(lighthouse: LighthouseServer) -> Iterator[Group]:
    group = Group("a:0f3a9c1d-0000-4000-8000-000000000000", lighthouse)
    try:
        yield group
    finally:
        group.close()


def test_the_status_of_a_job(lighthouse: LighthouseServer, group: Group) -> None:
    assert status(lighthouse)["schema_version"] == 1
    group.ask(step=3)
    found = until(lambda: [job for job in status(lighthouse)["jobs"] if job["quorum"] is not None])
    (job,) = found
    (replica,) = job["replicas"]
    assert (job["name"], job["kind"], job["state"], job["step"]) == ("job", "tft", "training", 3)
    assert (job["quorum"]["num_members"], job["quorum"]["broken"], job["num_replicas"]) == (1, None, 1)
    assert (replica["name"], replica["state"], replica["rank"], replica["step"]) == ("a", "training", 0, 3)
    assert f"http://{replica['address']}" == group.server.address()
    assert replica["heard_ms"] < 20_000


def test_a_wait_says_who_is_missing_and_for_how_long() -> None:
    with LighthouseServer("127.0.0.1:0", min_replicas=2, quorum_tick_ms=20, http_bind="127.0.0.1:0") as lighthouse:
        group = Group("a", lighthouse)
        asking = threading.Thread(target=group.ask)
        asking.start()
        try:
            found = until(lambda: [job for job in status(lighthouse)["jobs"] if job["state"] == "waiting"])
            assert found[0]["waits"]["lasted_ms"] >= 2_000
            assert found[0]["waits"]["sentence"].startswith("1 of min_replicas 2 have asked")
            with LighthouseClient(lighthouse.address, LATE, token=None):
                other = Group("b", lighthouse)
                other.ask()
                other.close()
        finally:
            asking.join(LATE_S)
            group.close()


def test_the_metrics_are_what_prometheus_reads(lighthouse: LighthouseServer, group: Group) -> None:
    group.ask(step=7)

    def samples() -> dict[tuple[str, str], float]:
        code, headers, body = ask(lighthouse, "/metrics")
        assert code == 200
        assert headers["Content-Type"].startswith("text/plain; version=")
        found = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
        return {(each.name, each.labels.get("state", "")): each.value for each in found}

    found = until(lambda: (now := samples()).get(("tft_quorums_total", "")) == 1 and now)
    assert found["tft_committed_steps_total", ""] == 7
    assert found["tft_replica_joins_total", ""] == 1
    assert found["tft_replica_losses_total", ""] == 0
    assert (found["tft_replicas", "training"], found["tft_replicas", "lost"]) == (1, 0)
    assert (found["tft_job_state", "training"], found["tft_job_state", "ended"]) == (1, 0)
    assert found["tft_quorum_members", ""] == 1
    assert found["process_resident_memory_bytes", ""] > 1e7
    group.close()
    found = until(lambda: (now := samples()).get(("tft_replica_losses_total", "")) == 1 and now)
    assert found["tft_replicas", "lost"] == 1


def test_torchft_s_fragment_escapes_what_comes_from_outside() -> None:
    with LighthouseServer("127.0.0.1:0", quorum_tick_ms=20, http_bind="127.0.0.1:0") as lighthouse:
        with LighthouseClient(lighthouse.address, LATE) as client:
            client.quorum("<script>alert(1)</script>", LATE, step=4, address="a:1")
        code, headers, body = ask(lighthouse, "/status")
        assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; base-uri 'none'")
        assert "<script" not in body
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in body
        assert "Job default: training, step 4" in body


def test_the_page_runs_scripts_of_this_port_alone(lighthouse: LighthouseServer) -> None:
    code, headers, body = ask(lighthouse, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"<script(?![^>]* src=)|<style|\bstyle=|\son\w+=|//", body.partition("\n")[2])
    loads = re.findall(r'(?:src|href)="(assets/[^"]+)"', body)
    assert len(loads) == 3
    for path in loads:
        assert ask(lighthouse, f"/{path}")[0] == 200, path
    for path in ("/assets/none.js", "/assets/../app.py", "/assets/%2e%2e/app.py", "/assets/"):
        assert ask(lighthouse, path)[0] == 404, path


def test_no_script_of_the_page_makes_markup_of_text_or_asks_another_host() -> None:
    for name, file in site.load().items():
        text = file.body.decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(", text), name
        others = re.sub(r"http://www\.w3\.org/2000/svg", "", text)
        assert not re.search(r"https?://|@import|localStorage|sessionStorage|document\.cookie", others), name


def test_the_timeline_of_a_job(lighthouse: LighthouseServer, group: Group) -> None:
    assert ask(lighthouse, "/api/v1/timeline")[0] == 400
    assert ask(lighthouse, "/api/v1/timeline?job=job&after=-1")[0] == 400
    code, _, body = ask(lighthouse, f"/api/v1/timeline?job={quote('<b>')}")
    assert (code, json.loads(body)) == (404, {"error": "this lighthouse knows no job '<b>'; known jobs: none so far"})
    group.ask(step=3)

    def timeline(after_ms: int = 0) -> Any:
        code, _, body = ask(lighthouse, f"/api/v1/timeline?job=job&after={after_ms}")
        return json.loads(body) if code == 200 else {}

    found = until(lambda: (now := timeline()).get("lanes") and now["points"][-1][1] == 1 and now)
    assert (found["schema_version"], found["job"], found["span_ms"]) == (1, "job", 1_800_000)
    assert found["started_ms"] == status(lighthouse)["lighthouse"]["started_ms"]
    (lane,) = found["lanes"]
    assert lane["replica_id"] == "a:0f3a9c1d-0000-4000-8000-000000000000"
    assert lane["runs"][-1][1] == "training"
    assert found["points"][-1][1:] == [1, 3]
    assert timeline(found["now_ms"] + 10_000)["lanes"] == []
    group.close()
    assert until(lambda: [run[1] for run in timeline()["lanes"][0]["runs"]][-2:] == ["training", "gone"])


def test_health_over_http_and_grpc(lighthouse: LighthouseServer) -> None:
    assert ask(lighthouse, "/healthz")[::2] == (200, "ok\n")
    assert ask(lighthouse, "/readyz")[::2] == (200, "ready\n")
    assert health_of(lighthouse) == b"\x08\x01"
    shell = lighthouse._shell
    assert shell is not None
    shell._core._superseded_by_ms = 1 << 60
    assert ask(lighthouse, "/healthz")[0] == 200
    assert ask(lighthouse, "/readyz")[::2] == (503, "a newer lighthouse of this cluster serves its replicas\n")
    assert health_of(lighthouse) == b"\x08\x02"
    assert status(lighthouse)["lighthouse"]["is_ready"] is False


def health_of(lighthouse: LighthouseServer, request: bytes = b"\x0a\x01x") -> bytes:
    with grpc.insecure_channel(lighthouse.address.removeprefix("http://")) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=None, response_deserializer=None)
        answer: bytes = check(request, timeout=LATE_S)
        return answer


def test_a_kill_and_a_drain_reach_the_replica(lighthouse: LighthouseServer, group: Group) -> None:
    group.ask()
    code, _, body = ask(lighthouse, f"/replica/{quote('a:0f3a9c1d')}/drain?job=job&reason=new%20disk", "POST")
    assert (code, json.loads(body)["asked_to"]) == (200, "leave"), body
    assert json.loads(body)["replica_id"] == "a:0f3a9c1d-0000-4000-8000-000000000000"
    assert group.hears(LeaveRequest).reason.startswith("new disk (asked by 127.0.0.1:")
    code, _, body = ask(lighthouse, "/replica/a/kill", "POST")
    assert (code, json.loads(body)["asked_to"]) == (200, "end"), body
    assert "it is killed (asked by 127.0.0.1:" in group.hears(KillOrder).message


@pytest.mark.parametrize("header", ["Via", "Forwarded", "X-Forwarded-For", "x-forwarded-proto", "X-Real-IP"])
def test_without_a_secret_a_request_through_a_proxy_kills_nothing(
    lighthouse: LighthouseServer, group: Group, header: str
) -> None:
    group.ask()
    code, _, body = ask(lighthouse, "/replica/a/kill", "POST", **{header: "1.1 proxy"})
    assert code == 403, body


# As torchft's manager: its process ends with the call, and never answers it.
VICTIM = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import grpc

def end(request, context):
    os._exit(1)

class Services(grpc.GenericRpcHandler):
    def service(self, call):
        if call.method == "/torchft.ManagerService/Kill":
            return grpc.unary_unary_rpc_method_handler(end)

server = grpc.server(ThreadPoolExecutor(1), handlers=[Services()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


def test_a_manager_of_torchft_that_ends_before_it_answers_was_killed(lighthouse: LighthouseServer) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([sys.executable, "-c", VICTIM], **pipes) as victim,  # type: ignore[call-overload]
        LighthouseClient(lighthouse.address, LATE) as client,
    ):
        client.quorum("t", LATE, address=f"http://127.0.0.1:{int(victim.stdout.readline())}")
        code, _, body = ask(lighthouse, "/replica/t/drain", "POST")
        assert code == 404
        assert "t is torchft's, which can't be asked to leave: end its process" in body
        code, _, body = ask(lighthouse, "/replica/t/kill", "POST")
        assert (code, json.loads(body)) == (200, {"replica_id": "t", "asked_to": "end"}), body
        assert victim.wait(LATE_S) == 1
        code, _, body = ask(lighthouse, "/replica/t/kill", "POST")
        assert code == 502
        assert "no server listens there" in body


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("/replica/nobody/kill", 404, "knows no replica 'nobody'; known replicas: a:0f3a9c1d"),
        ("/replica/a/kill?job=other", 404, "knows no job 'other'; known jobs: job"),
        ("/replica/nobody/drain", 404, "knows no replica 'nobody'"),
        ("/replica/a/other", 404, "there is nothing here; this port answers /, /status, /api/v1/status"),
        ("/replica/a/kil", 404, "/readyz, and POST /replica/REPLICA/drain and /replica/REPLICA/kill"),
        ("/replica/a/kill?jobs=job", 400, "unknown key 'jobs' in the query; /replica/{replica}/kill has job, reason"),
        ("/replica/a/drain?job=a&job=b", 400, "job is 2 times in the query; give it once"),
    ],
)
def test_what_can_t_be_asked_for_is_one_sentence(
    lighthouse: LighthouseServer, group: Group, path: str, code: int, says: str
) -> None:
    found, headers, body = ask(lighthouse, path, "POST")
    assert (found, headers["Content-Type"]) == (code, "application/json; charset=utf-8")
    assert says in json.loads(body)["error"]
    assert headers["Connection"] == "close"


def test_get_does_not_kill(lighthouse: LighthouseServer, group: Group) -> None:
    code, headers, _ = ask(lighthouse, "/replica/a/kill")
    assert (code, headers["Allow"]) == (405, "POST")


def test_with_a_secret_nothing_but_health_is_answered_without_it(caplog: pytest.LogCaptureFixture) -> None:
    right, wrong = f"Bearer {SECRET}", "Bearer s3cret-of-another"
    as_password = "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()
    with (
        caplog.at_level(logging.DEBUG),
        LighthouseServer("127.0.0.1:0", token=SECRET, quorum_tick_ms=20, http_bind="127.0.0.1:0") as lighthouse,
    ):
        group = Group("a", lighthouse, token=SECRET)
        try:
            for path in ("/", "/status", "/api/v1/status", "/metrics", "/nothing"):
                code, headers, body = ask(lighthouse, path)
                assert (code, headers["WWW-Authenticate"]) == (401, 'Basic realm="tft-lighthouse"')
                assert "requires a shared secret" in body
                assert ask(lighthouse, path, Authorization=wrong)[0] == 401
            assert ask(lighthouse, "/", Authorization=as_password)[0] == 200
            assert status(lighthouse, Authorization=right)["jobs"][0]["name"] == "job"
            assert ask(lighthouse, "/healthz")[0] == 200
            assert health_of(lighthouse) == b"\x08\x01"
            for header in ({}, {"Authorization": wrong}, {"Authorization": as_password}):
                assert ask(lighthouse, "/replica/a/kill", "POST", **header)[0] == 401
            assert ask(lighthouse, "/replica/a/kill", "POST", Authorization=right)[0] == 200
            group.hears(KillOrder)
        finally:
            group.close()
    assert "replica a is asked to end" in caplog.text
    assert SECRET not in caplog.text
    assert "another" not in caplog.text


def test_a_page_of_another_server_kills_nothing(lighthouse: LighthouseServer, group: Group) -> None:
    assert ask(lighthouse, "/replica/a/kill", "POST", Origin="http://evil.example")[0] == 403
    own = urlsplit(lighthouse.http_address).netloc
    assert ask(lighthouse, "/replica/a/kill", "POST", Origin="http://evil.example", Host="evil.example")[0] == 421
    assert group.told.empty()
    assert ask(lighthouse, "/replica/a/kill", "POST", Origin=f"http://{own}")[0] == 200


# --- incidents --------------------------------------------------------------------------------------------------------


def incidents(lighthouse: LighthouseServer, query: str = "") -> list[dict[str, Any]]:
    code, _, body = ask(lighthouse, f"/api/v1/incidents{query}")
    assert code == 200, body
    found: list[dict[str, Any]] = json.loads(body)["incidents"]
    return found


class Reader:
    """A reader of events: it keeps what comes."""

    def __init__(self, lighthouse: LighthouseServer, path: str = "/api/v1/events", **headers: str) -> None:
        request = urllib.request.Request(f"{lighthouse.http_address}{path}", headers=headers)
        self._answer = urllib.request.urlopen(request, timeout=LATE_S)
        assert self._answer.headers["Content-Type"] == "text/event-stream"

    def next(self) -> dict[str, Any]:
        """The next event; what only keeps the connection alive is left out."""
        found: dict[str, str] = {}
        while line := self._answer.readline().decode():
            name, _, text = line.rstrip("\n").partition(": ")
            if name:
                found[name] = text
            elif not found.get("id"):
                found = {}
            else:
                assert found["event"] == "incident"
                data: dict[str, Any] = json.loads(found["data"])
                assert str(data["change"]) == found["id"]
                return data
        raise AssertionError("the lighthouse has ended the stream")

    def until(self, **facts: object) -> dict[str, Any]:
        while True:
            found = self.next()
            if all(found[name] == value for name, value in facts.items()):
                return found

    def close(self) -> None:
        self._answer.close()


def resume(lighthouse: LighthouseServer) -> None:
    """Report a quorum that had formed before; the second report, which nobody asked for, ends the stream."""
    key, now_ms = types.QuorumKey(17, 7), time.time_ns() // 1_000_000
    hello = events.HelloReceived(0, types.Hello("resumed", "a:1", now_ms, "h:1", held=key, ready=True))
    report = events.QuorumReported(0, types.Quorum(key, (types.Member("a:1"), types.Member("b:1"))))
    said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for event in (hello, report, report):
        said.put(codec.encode_to_lighthouse(event))
    with grpc.insecure_channel(lighthouse.address.removeprefix("http://")) as channel:
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(services.LIGHTHOUSE_SESSION)
        assert list(stub(iter(said.get, None), timeout=20))
        said.put(None)


def test_a_lighthouse_that_resumes_a_quorum_says_so(lighthouse: LighthouseServer) -> None:
    resume(lighthouse)
    (resumed,) = incidents(lighthouse, "?kind=lighthouse")
    assert (resumed["job"], resumed["quorum_after"], resumed["members_after"]) == ("resumed", 17, 2)
    assert resumed["reason"] == "this lighthouse has started; it resumed quorum 17 with 2 members, as reported by a:1"
    assert (resumed["replica_ids"], resumed["is_open"], resumed["cost_ms"]) == ([], False, 0)


def test_what_happens_before_http_is_served_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the replicas come at once, and the import of the HTTP server takes a while."""
    serve = LighthouseServer._serve_http

    def serve_late(lighthouse: LighthouseServer, *arguments: Any, **named: Any) -> None:
        resume(lighthouse)
        serve(lighthouse, *arguments, **named)

    monkeypatch.setattr(LighthouseServer, "_serve_http", serve_late)
    with LighthouseServer("127.0.0.1:0", http_bind="127.0.0.1:0") as started:
        assert [each["kind"] for each in incidents(started)][:1] == ["lighthouse"]


def test_a_start_and_a_loss_are_told_as_they_happen_and_kept(lighthouse: LighthouseServer, group: Group) -> None:
    reader = Reader(lighthouse)
    group.ask(step=3)
    begun = reader.until(kind="start")
    assert (begun["job"], begun["is_open"], begun["quorum_before"], begun["members_after"]) == ("job", True, None, 1)
    group.ask(step=4)
    ended = reader.until(kind="start", is_open=False)
    assert ended["phases_ms"].keys() == {"resume"}
    group.close()
    lost = reader.until(kind="loss")
    assert (lost["replica_ids"], lost["step"]) == (["a:0f3a9c1d-0000-4000-8000-000000000000"], 4)
    assert incidents(lighthouse)[-1] == lost
    assert [each["kind"] for each in incidents(lighthouse, "?limit=1")] == ["loss"]
    assert [each["kind"] for each in incidents(lighthouse, "?kind=start&job=job")] == ["start"]
    assert incidents(lighthouse, f"?after={lost['change']}&job=job") == []
    reader.close()
    again = Reader(lighthouse, **{"Last-Event-ID": str(ended["change"])})
    assert again.next()["kind"] == "loss"
    again.close()
    after_a_restart = Reader(lighthouse, "/api/v1/events?after=999999")
    assert after_a_restart.next()["kind"] == "start"
    after_a_restart.close()


@pytest.mark.parametrize("query", ["?after=x", "?limit=-1", "?after=" + "9" * 30, "?limit=%C2%B2"])
def test_a_wrong_number_is_refused(lighthouse: LighthouseServer, query: str) -> None:
    code, _, body = ask(lighthouse, f"/api/v1/incidents{query}")
    assert code == 400
    assert json.loads(body)["error"].endswith("must be a whole number")


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("/api/v1/status?jobs=q", 400, "unknown key 'jobs' in the query; /api/v1/status takes none"),
        ("/api/v1/incidents?lim=3", 400, "unknown key 'lim' in the query; /api/v1/incidents has job, kind, after"),
        ("/api/v1/incidents?kind=los", 400, "kind is 'los'; give start, loss, leave"),
        ("/api/v1/events?job=a", 400, "unknown key 'job' in the query; /api/v1/events has after"),
        ("/api/v1/timeline?job=a&since=3", 400, "/api/v1/timeline has job, after"),
        ("/api/v1/incidents?job=other", 404, "this lighthouse knows no job 'other'; known jobs: job"),
    ],
)
def test_a_query_that_is_misspelt_is_refused(
    lighthouse: LighthouseServer, group: Group, path: str, code: int, says: str
) -> None:
    """It was ignored, so that the answer was about all jobs, or empty."""
    group.ask(step=3)
    until(lambda: incidents(lighthouse, "?kind=start"))
    found, _, body = ask(lighthouse, path)
    assert found == code
    assert says in json.loads(body)["error"]


def test_readers_of_events_are_bounded_and_leave_no_trace(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents_over_http, "READERS_MOST", 2)
    readers = [Reader(lighthouse) for _ in range(2)]
    code, _, body = ask(lighthouse, "/api/v1/events")
    assert (code, json.loads(body)["error"]) == (503, "2 readers follow the events already")
    for reader in readers:
        reader.close()
    running = lighthouse._http
    assert running is not None
    monkeypatch.setattr(incidents_over_http, "KEEP_ALIVE_S", 0.05)
    running._incidents.changed()
    until(lambda: not running._incidents._readers)


def test_a_reader_that_waits_keeps_its_connection(
    lighthouse: LighthouseServer, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.5)
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)
    monkeypatch.setattr(incidents_over_http, "KEEP_ALIVE_S", 0.1)
    reader = Reader(lighthouse)
    time.sleep(1.5)  # several times as long as a request may take
    group.ask()
    assert reader.next()["kind"] == "start"
    reader.close()


# --- hostile clients --------------------------------------------------------------------------------------------------


def place_of(lighthouse: LighthouseServer) -> tuple[str, int]:
    parts = urlsplit(lighthouse.http_address)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def is_closed(client: socket.socket) -> bool:
    """Whether the other side closes the connection in time."""
    client.settimeout(LATE_S)
    try:
        while client.recv(65_536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: y\r\n" % each for each in range(200)) + b"\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03 a client that speaks TLS \r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_a_request_that_is_too_large_or_no_http_is_refused_and_closed(
    lighthouse: LighthouseServer, request_head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(place_of(lighthouse)) as client:
        client.sendall(request_head)
        assert client.recv(100).startswith(b"HTTP/1.0 400") or is_closed(client)
        assert is_closed(client)
    assert ask(lighthouse, "/healthz")[0] == 200
    assert "Traceback" not in caplog.text


def test_a_large_body_is_not_read(lighthouse: LighthouseServer, group: Group) -> None:
    with socket.create_connection(place_of(lighthouse)) as client:
        head = b"POST /replica/nobody/kill HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
        client.sendall(head)
        assert client.recv(100).startswith(b"HTTP/1.1 404")
        assert is_closed(client)


def test_a_silent_connection_and_one_that_does_not_read_end(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_S", 0.3)
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)
    monkeypatch.setattr(connections, "SWEEP_S", 0.1)
    monkeypatch.setattr(app.fragment, "of_view", lambda _: "x" * 50_000_000)
    with (
        socket.create_connection(place_of(lighthouse)) as silent,
        socket.create_connection(place_of(lighthouse)) as slow,
    ):
        slow.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert is_closed(silent)
        running = lighthouse._http
        assert running is not None
        until(lambda: len(running._connections) == 0)
        received = 0
        slow.settimeout(LATE_S)
        with suppress(ConnectionResetError):
            while data := slow.recv(1 << 20):
                received += len(data)
        assert received < 50_000_000


def test_one_host_takes_only_so_many_connections(lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_OF_ONE_HOST_MOST", 3)
    held = [socket.create_connection(place_of(lighthouse)) for _ in range(3)]
    try:
        for client in held:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        with socket.create_connection(place_of(lighthouse)) as one_more:
            assert is_closed(one_more)
    finally:
        for client in held:
            client.close()
    until(lambda: answers(lighthouse))


def answers(lighthouse: LighthouseServer) -> bool:
    try:
        return ask(lighthouse, "/healthz")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_a_flood_without_the_secret_is_answered_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "PROMPT_DENIALS_PER_S", 2)
    delayed: list[float] = []
    sleep = app.asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds == app.DENIAL_DELAY_S:
            delayed.append(seconds)
            seconds = 0
        await sleep(seconds)

    monkeypatch.setattr(app.asyncio, "sleep", note)
    monkeypatch.setattr(app._DenialRate, "_second_of", lambda self: 7)
    with LighthouseServer("127.0.0.1:0", token=SECRET, http_bind="127.0.0.1:0") as lighthouse:
        for _ in range(5):
            assert ask(lighthouse, "/metrics")[0] == 401
            status(lighthouse, Authorization=f"Bearer {SECRET}")
    assert len(delayed) == 3


def test_many_readers_cost_one_look(lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, made = 100.0, 0
    answers = app._Answers(lambda: now_s)

    def make() -> bytes:
        nonlocal made, now_s
        made += 1
        now_s += 0.05  # so long it takes
        return b"%d" % made

    assert [answers.get("status", make) for _ in range(3)] == [b"1"] * 3
    now_s += 0.9
    assert answers.get("status", make) == b"1", "twenty times as long"
    now_s += 0.1
    assert answers.get("status", make) == b"2"
    for number in range(2 * app.ANSWERS_KEPT_MOST):
        answers.get(f"timeline of job {number}", make)
    assert len(answers._kept) == app.ANSWERS_KEPT_MOST


# --- start and end ----------------------------------------------------------------------------------------------------


def test_without_it_nothing_is_imported_for_it() -> None:
    script = (
        "import sys\nfrom tft_lighthouse import LighthouseServer\n"
        "with LighthouseServer('127.0.0.1:0') as lighthouse: assert lighthouse.http_address is None\n"
        "sys.exit(bool({'aiohttp', 'prometheus_client'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=50, check=False).returncode == 0


def test_a_port_in_use_is_one_sentence_and_nothing_stays(lighthouse: LighthouseServer) -> None:
    taken = lighthouse.http_address.removeprefix("http://")
    with pytest.raises(
        ConfigError, match=rf"HTTP port can't listen at {taken}: the port is in use; .*another --http-bind"
    ):
        LighthouseServer("127.0.0.1:0", http_bind=taken)


@pytest.mark.parametrize(
    ("http_bind", "says"),
    [
        ("here", "http_bind is 'here'; give host:port"),
        ("192.0.2.1:1", "http_bind is '192.0.2.1:1' and no shared secret is set"),
    ],
)
def test_a_wrong_http_bind_is_one_sentence(http_bind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LighthouseServer("127.0.0.1:0", http_bind=http_bind)


@pytest.mark.parametrize("path", [b"/healthz", b"/api/v1/events"])
def test_after_shutdown_the_port_is_free_and_an_open_connection_ends(path: bytes) -> None:
    with LighthouseServer("127.0.0.1:0", http_bind="[::]:0") as lighthouse:
        assert lighthouse.http_address.startswith("http://localhost:"), "without a secret this machine alone is served"
        place = place_of(lighthouse)
        client = socket.create_connection(("127.0.0.1", place[1]))
        client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    with client:
        assert is_closed(client)
    socket.create_server(("127.0.0.1", place[1])).close()


# In a process of its own: a child of this one has all that other tests have left in it.
FORKS = """
import os, signal, socket
from urllib.parse import urlsplit
from tft_lighthouse import LighthouseServer

lighthouse = LighthouseServer("127.0.0.1:0", http_bind="127.0.0.1:0")
place = "127.0.0.1", urlsplit(lighthouse.http_address).port
client = socket.create_connection(place)
client.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
assert client.recv(100).startswith(b"HTTP/1.1 200")
runs, says = os.pipe()
child = os.fork()
if child == 0:
    os.write(says, b"it runs")
    signal.pause()
assert os.read(runs, 7) == b"it runs"
try:
    lighthouse.shutdown()
    client.settimeout(20)
    while client.recv(65_536):
        pass
    try:
        socket.create_connection(place)
    except ConnectionRefusedError:
        print("refused")
finally:
    os.kill(child, signal.SIGKILL)
"""


def test_a_forked_child_keeps_no_port_and_no_connection() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == "refused\n", done.stderr
