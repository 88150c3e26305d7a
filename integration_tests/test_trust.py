"""Certificates and secrets of a job: what the sides say that do not fit, and rotation while the job trains."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
import torch
import trustme

from integration_tests import certificates
from tft_algos import Manager
from tft_coord import (
    TLS,
    ConfigError,
    CoordinationError,
    JobTokens,
    LighthouseClient,
    ManagerClient,
    ManagerServer,
    ProtocolError,
    RefusedError,
    TokenFile,
)
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo
from tft_suite.errors import ConfigError as SuiteConfigError
from tft_suite.launch.jobs import living
from tft_suite.launch.processes import Processes
from tft_suite.launch.services import start_lighthouse
from tft_suite.operate.client import fetch, post

LATE: Final = timedelta(seconds=60)
SOON_S: Final = 20.0  # a third of the time-out, on a busy machine
SECRET: Final = "a-secret"


class Kit:
    """The certificates of one test, in folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        certificates.write(folder / "good", self.authority, "127.0.0.1")
        certificates.write(folder / "elsewhere", self.authority, "example.org")
        certificates.write(folder / "expired", self.authority, "127.0.0.1", **certificates.LONG_AGO)
        certificates.write(folder / "strange", trustme.CA(), "127.0.0.1")

    def tls(self, name: str, *, check_client: bool = False) -> TLS | None:
        """Return the settings of that name; "plain": none."""
        return None if name == "plain" else certificates.settings(self.folder / name, check_client=check_client)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("kit"))


MISFITS: Final = [
    ("good", "plain", "uses TLS, and this process has no certificates; set TFT_TLS_CERT"),
    ("plain", "good", "does not use TLS, and this process does; set TFT_TLS_CERT"),
    ("strange", "good", r"of another authority than this process trusts; .* \(TFT_TLS_CA\)"),
    ("elsewhere", "good", r"is not for 127\.0\.0\.1; dial it by a name or address in the certificate"),
    ("expired", "good", "has expired; issue a new one"),
    ("good", "expired", "refuses this process's certificate, which has expired|certificate: it has expired"),
]


def no_scheme(address: str) -> str:
    return address.partition("://")[2]


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < SOON_S


@pytest.mark.parametrize(("server", "client", "says"), MISFITS)
def test_sides_that_do_not_fit_say_so_at_once(kit: Kit, server: str, client: str, says: str) -> None:
    theirs, ours = kit.tls(server, check_client=True), kit.tls(client)
    environ = {"TFT_TOKEN": SECRET} | (certificates.environment(kit.folder / client) if ours is not None else {})
    with LighthouseServer("127.0.0.1:0", token=SECRET, tls=theirs, http_bind="127.0.0.1:0") as lighthouse:
        address = no_scheme(lighthouse.address)
        with at_once(), pytest.raises(ProtocolError, match=says):
            LighthouseClient(address, LATE, token=SECRET, tls=ours)
        with at_once(), pytest.raises(ProtocolError, match=says):
            ManagerClient(address, LATE, token=SECRET, tls=ours)
        known = ManagerClient(address, LATE, token=SECRET, tls=ours, connect_now=False)
        with contextlib.closing(known), at_once(), pytest.raises(ProtocolError, match=says):
            known.open_session(0)
        http = no_scheme(str(lighthouse.http_address))
        with at_once(), pytest.raises(SuiteConfigError, match=says):
            fetch([http], "/api/v1/status", environ, timeout_s=LATE.total_seconds())


# A trainer whose own certificate has expired fails at its own manager server before.
@pytest.mark.parametrize(("server", "client", "says"), [each for each in MISFITS if each[1] != "expired"])
def test_a_trainer_whose_lighthouse_does_not_fit_says_so_at_once(
    kit: Kit, server: str, client: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFT_TOKEN", SECRET)
    for name, path in certificates.environment(kit.folder / client).items() if client != "plain" else ():
        monkeypatch.setenv(name, path)
    if client != "plain":
        monkeypatch.setenv("TFT_TLS_CLIENT_AUTH", "0")
    with LighthouseServer("127.0.0.1:0", token=SECRET, tls=kit.tls(server, check_client=True)) as lighthouse:
        replica = Replica(no_scheme(lighthouse.address), "a")
        try:
            with at_once(), pytest.raises((RefusedError, CoordinationError), match=says):
                replica.step()
        finally:
            replica.manager.shutdown()


def test_an_address_with_https_needs_certificates() -> None:
    with pytest.raises(ConfigError, match="'https://localhost:1' asks for TLS, and this process has no certificates"):
        LighthouseClient("https://localhost:1", LATE)


class Replica:
    """A Manager in this process, whose state is one tensor."""

    def __init__(self, address: str, name: str, job: str = "default") -> None:
        self.weights = torch.zeros(4)
        self.manager = Manager(
            ProcessGroupGloo(timeout=LATE),
            load_state_dict=lambda state: self._load(state),
            state_dict=lambda: {"weights": self.weights},
            lighthouse_addr=address,
            replica_id=name,
            hostname="127.0.0.1",
            job=job,
            rank=0,
            world_size=1,
            timeout=LATE,
            init_sync=False,
        )

    def _load(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])

    def step(self) -> bool:
        self.manager.start_quorum()
        gradient = torch.ones(4)
        self.manager.allreduce(gradient).wait()
        committed = self.manager.should_commit()
        if committed:
            self.weights += gradient
        return committed


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def until(found: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + LATE.total_seconds()
    while not found():
        assert time.monotonic() < ends_s, "it did not become true"
        time.sleep(0.05)


def test_a_job_trains_on_while_secret_certificate_and_authority_change(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    old, new = trustme.CA(), trustme.CA()
    both = old.cert_pem.bytes() + new.cert_pem.bytes()
    own, secret = tmp_path / "own", tmp_path / "secret"
    certificates.write(own, old, "127.0.0.1", trusted=both)
    replace(secret, "the-old-secret\n")
    for name, value in certificates.environment(own, check_client=True).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TFT_TOKEN_FILE", str(secret))
    tls = certificates.settings(own, check_client=True)
    ended, errors = threading.Event(), []
    lighthouse = LighthouseServer("127.0.0.1:0", join_timeout_ms=200, token=TokenFile(str(secret)), tls=tls)
    with lighthouse:
        first = Replica(lighthouse.address, "a")

        def train() -> None:
            try:
                while not ended.is_set():
                    first.step()
            except BaseException as error:
                errors.append(error)

        trainer = threading.Thread(target=train, name="test-trainer")
        trainer.start()
        newcomers = []
        try:
            until(lambda: first.manager.current_step() >= 2 or bool(errors))
            # a certificate of the new authority, whose key comes first, and a new secret
            certificates.write(own, new, "127.0.0.1", trusted=both)
            replace(secret, "the-new-secret\n")
            before = first.manager.current_step()
            until(lambda: first.manager.current_step() >= before + 5 or bool(errors))
            certificates.write(own, new, "127.0.0.1")  # the old authority is no longer trusted
            second = Replica(lighthouse.address, "b")
            newcomers.append(second)
            until(lambda: second.step() and second.manager.num_participants() == 2)
            # a certificate of the old authority, or another secret, opens nothing
            stale = tmp_path / "stale"
            certificates.write(stale, old, "127.0.0.1", trusted=both)
            with pytest.raises(CoordinationError):
                LighthouseClient(
                    lighthouse.address, timedelta(seconds=2), token="the-new-secret", tls=certificates.settings(stale)
                )
            with LighthouseClient(lighthouse.address, LATE, token="the-new-secret", tls=tls) as client:
                assert client.describe(LATE).jobs
            with (
                LighthouseClient(lighthouse.address, LATE, token="never-a-secret", tls=tls) as client,
                pytest.raises(RefusedError),
            ):
                client.describe(LATE)
        finally:
            ended.set()
            for each in newcomers:
                each.manager.shutdown()
            trainer.join(LATE.total_seconds())
            first.manager.shutdown()
    assert not errors
    assert not trainer.is_alive()
    printed = "".join((caplog.text, *capfd.readouterr()))
    assert "read the changed file" in printed
    for word in ("the-old-secret", "the-new-secret", "never-a-secret"):
        assert word not in printed


def test_a_client_with_a_long_life_follows_both_files(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    own, secret = tmp_path / "own", tmp_path / "secret"
    certificates.write(own, old, "127.0.0.1")
    replace(secret, "old\n")
    tls, token = certificates.settings(own, check_client=True), TokenFile(str(secret))
    with LighthouseServer("127.0.0.1:0", token=token, tls=tls) as lighthouse:
        port = lighthouse.address.rpartition(":")[2]
        with LighthouseClient(lighthouse.address, LATE, token=TokenFile(str(secret)), tls=tls) as client:
            client.describe(LATE)
            lighthouse.shutdown()
            certificates.write(own, new, "127.0.0.1")
            replace(secret, "new\n")
            until(lambda: token()[0] == "new")
            with LighthouseServer(f"127.0.0.1:{port}", token="new", tls=tls):
                until(lambda: _answers(client))


def _answers(client: LighthouseClient) -> bool:
    try:
        client.describe(LATE)
    except CoordinationError:
        return False
    return True


def test_a_jobs_secret_starts_that_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = tmp_path / "jobs"
    jobs.write_text("mine = secret-of-mine\nother = secret-of-other\n")
    with LighthouseServer(
        "127.0.0.1:0", token=SECRET, job_tokens=JobTokens(str(jobs)), join_timeout_ms=100
    ) as lighthouse:
        monkeypatch.setenv("TFT_TOKEN", "secret-of-mine")
        replica = Replica(lighthouse.address, "a", job="mine")
        stranger = Replica(lighthouse.address, "b", job="other")
        try:
            until(lambda: replica.step())
            with pytest.raises(RefusedError, match="opens job 'mine' alone, and the call is for job 'other'"):
                stranger.step()
        finally:
            replica.manager.shutdown()
            stranger.manager.shutdown()


def test_a_manager_server_and_its_ranks_speak_tls_alone(kit: Kit) -> None:
    good = kit.tls("good", check_client=True)
    with (
        LighthouseServer("127.0.0.1:0", token=SECRET, tls=good) as lighthouse,
        ManagerServer(
            "m:1", lighthouse.address, "127.0.0.1", "127.0.0.1:0", "s:1", 1, token=SECRET, tls=good
        ) as server,
    ):
        assert server.address().startswith("https://")
        with ManagerClient(server.address(), LATE, group_rank=0, token=SECRET, tls=good):
            until(lambda: bool(_jobs(lighthouse.address, good)))
        with at_once(), pytest.raises(ProtocolError, match="uses TLS, and this process has no certificates"):
            ManagerClient(no_scheme(server.address()), LATE, group_rank=0, token=SECRET)


def _jobs(address: str, tls: TLS | None) -> tuple[Any, ...]:
    with LighthouseClient(address, LATE, token=SECRET, tls=tls) as client:
        return client.describe(LATE).jobs


def test_a_launched_lighthouse_drains_with_certificates(tmp_path: Path) -> None:
    certificates.write(tmp_path / "here", trustme.CA(), "localhost", "127.0.0.1")
    (tmp_path / "secret").write_text(SECRET)
    environ = {
        **os.environ,
        **certificates.environment(tmp_path / "here", check_client=True),
        "TFT_TOKEN_FILE": str(tmp_path / "secret"),
    }
    with Processes(tmp_path, environ) as processes:
        service, address, http = start_lighthouse(processes, bind="", min_replicas=1, logs=tmp_path, environ=environ)
        with contextlib.closing(service):
            assert address.startswith("https://localhost:")
            tls = certificates.settings(tmp_path / "here", check_client=True)
            with ManagerServer(
                "m:1", address, "127.0.0.1", "127.0.0.1:0", "s:1", 1, token=SECRET, tls=tls, in_process=True
            ):
                deadline_s = time.monotonic() + LATE.total_seconds()
                while not (found := living(fetch([http], "/api/v1/status", environ, timeout_s=SOON_S))):
                    assert time.monotonic() < deadline_s
                    time.sleep(0.05)
                path = f"/replica/{quote(found[0].replica_id, safe='')}/drain?job={found[0].job}"
                (tmp_path / "wrong").write_text("another-secret")
                stranger = {**environ, "TFT_TOKEN_FILE": str(tmp_path / "wrong")}
                with pytest.raises(SuiteConfigError, match="status 401"):
                    post([http], path, stranger, timeout_s=SOON_S)
                assert post([http], path, environ, timeout_s=SOON_S)["replica_id"] == found[0].replica_id
            processes.kill(service.name)


def test_a_launcher_says_at_once_that_the_certificate_is_not_for_this_machine(kit: Kit, tmp_path: Path) -> None:
    environ = {**os.environ, **certificates.environment(kit.folder / "elsewhere")}
    with (
        Processes(tmp_path, environ) as processes,
        at_once(),
        pytest.raises(SuiteConfigError, match="is not for local"),
    ):
        start_lighthouse(processes, bind="", min_replicas=1, logs=tmp_path, environ=environ)
