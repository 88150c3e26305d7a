"""Several lighthouses elect a leader on a real etcd of three members: one leads, and none that was replaced answers.

A client asks every lighthouse again and again, and records the answers: only a leader gives one. An answer to a call
that was sent after a later leader had answered proves two leaders at one time.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import cast, final

import grpc
import pytest
import trustme

from integration_tests import certificates
from integration_tests.conftest import Spawn
from integration_tests.etcd_program import EtcdProgram
from integration_tests.lighthouse_program import LighthouseProgram
from integration_tests.training import Address, Job
from tft_coord import CoordinationError, LighthouseClient, ManagerClient, ManagerServer, Plan, RankRequest, RefusedError
from tft_lighthouse import LighthouseServer
from tft_lighthouse.etcd import etcd_pb2 as pb

pytestmark = pytest.mark.timeout(480)  # several real processes, on a machine that may be busy

COMMAND = Path(sys.executable).parent / "tft-lighthouse"
LEADS = re.compile(
    r"^(\S+ \S+) .* this lighthouse leads \(\S+, token (\d+)\): quorum ids rise above (\d+)", re.MULTILINE
)
NEW_QUORUM = re.compile(r"^(\S+ \S+) .*new quorum (\d+), job default", re.MULTILINE)
LATE_S = 40.0
ASK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Lead:
    """A line of a lighthouse's log: it leads since `at_s`."""

    token: int
    started_ms: int
    at_s: float
    lighthouse: LighthouseProgram


@dataclass(frozen=True, slots=True)
class Given:
    """An answer of a leader, to a call that was sent at `sent_s`."""

    sent_s: float
    received_s: float
    started_ms: int


@final
class Cluster:
    """Three lighthouses that elect a leader under one prefix."""

    def __init__(
        self,
        etcd: EtcdProgram,
        folder: Path,
        prefix: str,
        environment: dict[str, str] | None = None,
        **settings: object,
    ) -> None:
        chosen: dict[str, object] = {"join_timeout_ms": 3_000, "heartbeat_timeout_ms": 3_000, "http_bind": 0}
        chosen |= {"etcd": etcd.endpoints, "etcd_prefix": prefix} | settings
        command: list[str | Path] = [COMMAND, *(f"--{key}={value}" for key, value in chosen.items())]
        self.programs = [
            LighthouseProgram(command, folder / f"lighthouse_{number}.log", environment=environment)
            for number in range(3)
        ]
        for program in self.programs:
            program.start()
        self.address = ",".join(program.address for program in self.programs)

    def leads(self) -> list[Lead]:
        """Return all leaders so far, the first one first."""
        found = [
            Lead(int(token), int(started_ms), seconds(at), program)
            for program in self.programs
            for at, token, started_ms in LEADS.findall(program.log_text)
        ]
        return sorted(found, key=lambda lead: lead.token)

    def leader_after(self, token: int) -> Lead:
        """Wait for the first leader with a higher token than that, and return it."""
        until(lambda: any(lead.token > token for lead in self.leads()), "a lighthouse leads", self.logs)
        return next(lead for lead in self.leads() if lead.token > token)

    def quorum_ids(self) -> list[int]:
        """Return the ids of all new quorums, in the order of their time."""
        found = [line for program in self.programs for line in NEW_QUORUM.findall(program.log_text)]
        return [int(number) for _, number in sorted(found)]

    def logs(self) -> str:
        """Return the end of each log."""
        return "\n\n".join(program.log_text[-1_500:] for program in self.programs)

    def end(self) -> None:
        """Kill all."""
        for program in self.programs:
            program.end()


@final
class Recorder:
    """Asks each lighthouse of a cluster again and again, on a thread of its own, and records who answers."""

    def __init__(self, cluster: Cluster) -> None:
        self.given: list[Given] = []
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._record, args=(program.address,), name="test-recorder")
            for program in cluster.programs
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the threads."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Check that no leader has answered a call that was sent after a later leader's answer."""
        assert self.given, "nothing was recorded"
        for later in self.given:
            for earlier in self.given:
                if earlier.started_ms < later.started_ms:
                    assert earlier.sent_s <= later.received_s, (earlier, later)

    def since(self, at_s: float) -> list[Given]:
        """Return the answers to calls that were sent since then."""
        return [each for each in list(self.given) if each.sent_s >= at_s]

    def _record(self, address: str) -> None:
        while not self._ends.wait(ASK_EVERY_S):
            with suppress(CoordinationError):
                within = timedelta(seconds=1)
                with LighthouseClient(address, within, waits=False) as client:
                    while not self._ends.wait(ASK_EVERY_S):
                        sent_s = time.time()
                        started_ms = client.describe(within).started_ms
                        self.given.append(Given(sent_s, time.time(), started_ms))


def seconds(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def until(holds: Callable[[], object], what: str, shown: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + LATE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen in {LATE_S} s: {shown()}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProgram]:
    program = EtcdProgram(tmp_path_factory.mktemp("etcd"))
    try:
        program.start()
        yield program
    finally:
        program.end()


@pytest.fixture
def cluster(etcd: EtcdProgram, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    etcd.start()  # a member that an earlier test has killed
    found = Cluster(etcd, tmp_path, f"/test/{request.node.name}", **getattr(request, "param", {}))
    yield found
    found.end()


@pytest.fixture
def recorder(cluster: Cluster) -> Iterator[Recorder]:
    found = Recorder(cluster)
    yield found
    found.end()


def test_a_leader_that_was_stopped_answers_nothing_when_it_wakes(cluster: Cluster, recorder: Recorder) -> None:
    first = cluster.leader_after(0)
    until(lambda: recorder.since(first.at_s), "the leader answers")
    first.lighthouse.stop()
    second = cluster.leader_after(first.token)
    until(lambda: recorder.since(second.at_s), "the second answers", cluster.logs)
    first.lighthouse.go_on()
    until(lambda: "leads no more" in first.lighthouse.log_text, "the first knows", cluster.logs)
    woken_s = time.time()
    until(lambda: len(recorder.since(woken_s)) > 10, "the second answers on")
    recorder.end()
    recorder.check()
    assert {given.started_ms for given in recorder.since(woken_s)} == {second.started_ms}
    assert second.started_ms > first.started_ms
    assert second.lighthouse is not first.lighthouse


@pytest.mark.parametrize("cluster", [{"etcd_ttl_s": 60}], indirect=True, ids=["long"])
def test_one_that_ends_hands_over_at_once(cluster: Cluster) -> None:
    """Its lease would last 45 s longer at least, had the leader not ended it."""
    first = cluster.leader_after(0)
    first.lighthouse.terminate()
    assert cluster.leader_after(first.token).lighthouse is not first.lighthouse


@pytest.mark.parametrize("cluster", [{"http_bind": "127.0.0.1:0"}], indirect=True, ids=["http"])
def test_a_standby_names_the_leader_on_every_port(cluster: Cluster) -> None:
    leader = cluster.leader_after(0).lighthouse
    standby = next(program for program in cluster.programs if program is not leader)
    until(lambda: f"stands by for the leader at {leader.address}" in standby.log_text, "it knows the leader")
    sentence = f"this lighthouse stands by; use the leader at {leader.address}"
    with LighthouseClient(standby.address, timedelta(seconds=10)) as client:
        calls: list[Callable[[], object]] = [
            client.describe,
            lambda: client.drain("default", "a"),
            lambda: client.heartbeat("a"),
            lambda: client.quorum("a", timedelta(seconds=5)),
        ]
        for call in calls:
            with pytest.raises(RefusedError, match=re.escape(sentence)) as caught:
                call()
            assert caught.value.code == "standby"
    assert get(standby, "/readyz") == (503, sentence + "\n")
    assert get(standby, "/healthz")[0] == 200
    status, body = get(standby, "/api/v1/status")
    told = json.loads(body)["lighthouse"]
    assert (status, told["is_ready"], told["leader"]) == (200, False, leader.address)
    assert leader.address in get(standby, "/status")[1]
    assert get(standby, "/replica/a/drain", b"")[0] == 409
    assert get(leader, "/readyz") == (200, "ready\n")


def test_replicas_go_to_the_leader_and_to_the_next_one(cluster: Cluster) -> None:
    leader = cluster.leader_after(0)
    order = [program for program in cluster.programs if program is not leader.lighthouse] + [leader.lighthouse]
    addresses = ",".join(program.address for program in order)
    late = timedelta(seconds=LATE_S)
    server = ManagerServer("a", addresses, "127.0.0.1", "127.0.0.1:0", "", 1, in_process=True)
    try:
        client = ManagerClient(server.address(), late, group_rank=0)
        first = client.quorum(0, RankRequest(step=0), late)
        leader.lighthouse.kill()
        # It asks for another quorum, which only the next leader can give.
        second = client.quorum(0, RankRequest(step=0, commit_failures=1), late)
        client.close()
    finally:
        server.shutdown()
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    started_ms = cluster.leader_after(leader.token).started_ms
    assert leader.started_ms < first.key.quorum_id < started_ms < second.key.quorum_id


def test_a_prefix_that_another_program_uses_is_named(etcd: EtcdProgram, tmp_path: Path) -> None:
    put(etcd, b"/taken/leader", b"not ours")
    cluster = Cluster(etcd, tmp_path, "/taken")
    try:
        words = "its key '/taken/leader' was not written by a lighthouse; give another prefix"
        until(lambda: all(words in program.log_text for program in cluster.programs), "all say so", cluster.logs)
        assert cluster.leads() == []
    finally:
        cluster.end()


def test_a_server_that_is_not_etcd_is_named(tmp_path: Path) -> None:
    with LighthouseServer("127.0.0.1:0") as other:
        program = LighthouseProgram(
            [Path(sys.executable).parent / "tft-lighthouse", f"--etcd={other.address}", "--http_bind=0"],
            tmp_path / "log",
        )
        program.start()
        try:
            words = f"etcd does not answer: {other.address.removeprefix('http://')}: Method not found!"
            until(lambda: words in program.log_text, "it says so", lambda: program.log_text)
        finally:
            program.end()


def test_etcd_over_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = {"ca": authority.cert_pem, "stranger": stranger.cert_pem}
    for name in ("etcd", "lighthouse"):
        issued = authority.issue_cert("127.0.0.1", "localhost")
        files |= {f"{name}_cert": issued.cert_chain_pems[0], f"{name}_key": issued.private_key_pem}
    for name, pem in files.items():
        pem.write_to_path(str(tmp_path / f"{name}.pem"))
    etcd = EtcdProgram(
        tmp_path,
        size=1,
        scheme="https",
        settings=(
            f"--cert-file={tmp_path / 'etcd_cert.pem'}",
            f"--key-file={tmp_path / 'etcd_key.pem'}",
            "--client-cert-auth",
            f"--trusted-ca-file={tmp_path / 'ca.pem'}",
        ),
    )
    own = {"TFT_LIGHTHOUSE_ETCD_CERT": "lighthouse_cert.pem", "TFT_LIGHTHOUSE_ETCD_KEY": "lighthouse_key.pem"}
    chosen = {
        "right": {**own, "TFT_LIGHTHOUSE_ETCD_CA": "ca.pem"},
        "no certificate": {"TFT_LIGHTHOUSE_ETCD_CA": "ca.pem"},
        "another authority": {**own, "TFT_LIGHTHOUSE_ETCD_CA": "stranger.pem"},
    }
    command: list[str | Path] = [COMMAND, f"--etcd={etcd.endpoints}", "--http_bind=0"]
    programs = {
        name: LighthouseProgram(
            [*command, f"--etcd_prefix=/{number}"],
            tmp_path / f"{name}.log",
            environment={variable: str(tmp_path / file) for variable, file in variables.items()},
        )
        for number, (name, variables) in enumerate(chosen.items())
    }
    try:
        etcd.start()
        for program in programs.values():
            program.start()
        until(lambda: LEADS.search(programs["right"].log_text), "it leads", lambda: programs["right"].log_text)
        for name in ("no certificate", "another authority"):
            until(lambda name=name: "etcd does not answer" in programs[name].log_text, name)  # type: ignore[misc]
            assert not LEADS.search(programs[name].log_text)
    finally:
        for program in programs.values():
            program.end()
        etcd.end()


def test_lighthouses_with_certificates_and_secrets_elect_a_leader(etcd: EtcdProgram, tmp_path: Path) -> None:
    """Standbys, and a leader that was deposed, refuse on ports with TLS as on others, and only who shows a secret."""
    certificates.write(tmp_path / "here", trustme.CA(), "127.0.0.1", "localhost")
    (tmp_path / "jobs").write_text("default = of-the-job\n")
    own = {"TFT_TOKEN": "of-all", "TFT_LIGHTHOUSE_JOB_TOKENS": str(tmp_path / "jobs")}
    environment = certificates.environment(tmp_path / "here", check_client=True) | own
    tls = certificates.settings(tmp_path / "here", check_client=True)
    etcd.start()
    cluster = Cluster(etcd, tmp_path, "/test/certificates", environment=environment)
    late = timedelta(seconds=LATE_S)

    def refusal_of(program: LighthouseProgram, token: str = "of-the-job") -> str:
        with LighthouseClient(program.address, late, token=token, tls=tls) as client:
            try:
                client.describe()
            except RefusedError as error:
                return error.code
            return ""

    try:
        first = cluster.leader_after(0)
        order = sorted(cluster.programs, key=lambda program: program is first.lighthouse)
        sentence = f"stands by for the leader at {first.lighthouse.address}"
        until(lambda: all(sentence in each.log_text for each in order[:2]), "the others know it", cluster.logs)
        assert first.lighthouse.address.startswith("https://")
        assert [refusal_of(each) for each in order] == ["standby", "standby", ""]
        assert [refusal_of(each, "another") for each in order] == ["unauthenticated"] * 3
        addresses = ",".join(each.address for each in order)
        with ManagerServer(
            "a", addresses, "127.0.0.1", "127.0.0.1:0", "", 1, token="of-the-job", tls=tls, in_process=True
        ) as server:
            client = ManagerClient(server.address(), late, group_rank=0, token="of-the-job", tls=tls)
            plans = [client.quorum(0, RankRequest(step=0), late)]
            first.lighthouse.stop()
            second = cluster.leader_after(first.token)
            plans.append(client.quorum(0, RankRequest(step=0, commit_failures=1), late))
            client.close()
        first.lighthouse.go_on()
        assert refusal_of(first.lighthouse) == "standby"
        assert refusal_of(second.lighthouse) == ""
        ids = [plan.key.quorum_id for plan in plans if isinstance(plan, Plan)]
        assert first.started_ms < ids[0] < second.started_ms < ids[1]
        assert not any(token in each.log_text for each in order for token in ("of-all", "of-the-job"))
    finally:
        cluster.end()


# --- under a job ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lasts_s", "median_s_most", "s_most"),
    [(20, LATE_S, LATE_S), pytest.param(120, 3, 5, marks=[pytest.mark.soak, pytest.mark.timeout(600)])],
)
def test_a_leader_that_is_killed_every_5_s_costs_a_job_nothing(
    cluster: Cluster, spawn: Spawn, lasts_s: int, median_s_most: float, s_most: float
) -> None:
    """No trainer ends, ids rise strictly, and a new leader comes within seconds."""
    job = Job(spawn, cast(LighthouseServer, Address(cluster.address)))
    trainers = [job.start(name) for name in ("a", "b", "c", "d")]
    job.until(lambda: all(each.committed_with(4) for each in trainers), "all commit together")
    waits_s: list[float] = []
    for number in range(lasts_s // 5):
        leader = cluster.leads()[-1]
        killed_s = time.time()
        leader.lighthouse.kill()
        job.until(lambda token=leader.token: cluster.leads()[-1].token > token, "another one leads")  # type: ignore[misc]
        waits_s.append(cluster.leads()[-1].at_s - killed_s)
        leader.lighthouse.start()
        if number == lasts_s // 10:
            trainers.append(job.start("e"))  # a newcomer gets a new quorum of a later leader
        while time.time() < killed_s + 5:
            job.take_in(0.1)
        step = max(each.step for each in trainers)
        job.until(lambda step=step: min(each.step for each in trainers) > step, "all go on")  # type: ignore[misc]
    job.until(lambda: all(each.committed_with(5) for each in trainers), "all commit together with the newcomer")
    job.finish()
    ids = cluster.quorum_ids()
    assert ids == sorted(set(ids)), "ids rise, whoever gives them"
    assert len(ids) >= 2
    assert ids[-1] > cluster.leads()[1].started_ms
    failed = [len(each.of_kind("failed")) for each in trainers[:4]]
    median_s, longest_s = statistics.median(waits_s), max(waits_s)
    figures = (
        f"{len(waits_s)} kills; a new leader in {median_s:.2f} s (median), {longest_s:.2f} s (most); failed {failed}"
    )
    print(figures)
    assert max(failed) <= len(waits_s), job.history()
    assert median_s <= median_s_most, figures
    assert longest_s <= s_most, figures


def test_etcd_may_lose_a_member_or_stop_for_a_while(
    etcd: EtcdProgram, cluster: Cluster, recorder: Recorder, spawn: Spawn
) -> None:
    job = Job(spawn, cast(LighthouseServer, Address(cluster.address)))
    trainers = [job.start(name) for name in ("a", "b")]
    job.until(lambda: all(each.committed_with(2) for each in trainers), "both commit together")

    def all_go_on(since_s: float) -> None:
        until(lambda: recorder.since(since_s), "a lighthouse leads", cluster.logs)
        job.until(lambda: all(each.committed_with(2, since_s=since_s) for each in trainers), "both go on")

    for member in range(2):
        etcd.kill(member)
        all_go_on(time.time())
        etcd.start()
    stopped_s = time.time()
    etcd.stop()
    while time.time() < stopped_s + 20:
        job.take_in(0.1)
    answered = recorder.since(stopped_s + 3)
    returned_s = time.time()
    etcd.go_on()
    assert answered == [], "nobody answers once the lease has ended"
    trainers.append(job.start("c"))
    job.until(lambda: all(each.committed_with(3, since_s=returned_s) for each in trainers), "a newcomer joins")
    steps_s = min(event.at_s for event in trainers[0].of_kind("commit") if event.at_s > returned_s) - returned_s
    leads_s = min(given.received_s for given in recorder.since(returned_s)) - returned_s
    print(f"after etcd's return: a step in {steps_s:.2f} s, a leader's answer in {leads_s:.2f} s")
    job.finish()
    recorder.end()
    recorder.check()
    assert all(each.of_kind("failed") == [] for each in trainers), job.history()
    ids = cluster.quorum_ids()
    assert ids == sorted(set(ids))


def get(program: LighthouseProgram, path: str, body: bytes | None = None) -> tuple[int, str]:
    found = re.search(r"status, metrics and health at (http://\S+)", program.log_text)
    assert found is not None
    try:
        with urllib.request.urlopen(urllib.request.Request(found[1] + path, body), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def put(etcd: EtcdProgram, key: bytes, value: bytes) -> None:
    request = pb.PutRequest(key=key, value=value).SerializeToString()
    with grpc.insecure_channel(etcd.endpoints.split(",")[0].removeprefix("http://")) as channel:
        call: Callable[..., object] = channel.unary_unary(
            "/etcdserverpb.KV/Put", request_serializer=None, response_deserializer=None
        )
        call(request, timeout=10)
