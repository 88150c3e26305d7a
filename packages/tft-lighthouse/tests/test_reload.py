"""SIGHUP: what changes while the jobs go on, what needs a restart, and what a broken file does."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import trustme

from tft_coord import ConfigError, CoordinationClosedError, LighthouseClient, RefusedError, RequestTimeoutError
from tft_lighthouse import JobSettings, LighthouseServer, Limits
from tft_lighthouse.launch import apply
from tft_lighthouse.settings import Settings, resolve

LATE = timedelta(seconds=30)
SOON = timedelta(seconds=1)
COMMAND = [sys.executable, "-m", "tft_lighthouse", "--bind", "127.0.0.1:0"]


class Running:
    """The command's process, its address, and the lines that it logs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self.line("listening at").split("listening at ")[1].split()[0]

    def line(self, words: str) -> str:
        """Return the next line that has those words."""
        assert self.process.stderr is not None
        while words not in (line := self.process.stderr.readline()):
            assert line, f"it ended without {words!r}"
        return line

    def hang_up(self) -> str:
        """Send SIGHUP, and return the line that says what it did."""
        self.process.send_signal(signal.SIGHUP)
        return self.line("received SIGHUP")


@contextmanager
def running(*words: str, **environment: str) -> Iterator[Running]:
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_a_file_is_read_again_and_a_waiting_job_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "l.toml"
    file.write_text("min_replicas = 2\nmax_jobs = 5\n")
    with running("--config", str(file)) as lighthouse, LighthouseClient(lighthouse.address, LATE) as client:
        with pytest.raises(RequestTimeoutError):
            client.quorum("a", SOON, step=3)
        file.write_text("max_jobs = 6\nquorum_tick_ms = 50\nlog_level = 'warning'\n[jobs.default]\nmin_replicas = 1\n")
        said = lighthouse.hang_up()
        assert f"reloaded {file}; min_replicas 2 -> 1, max_jobs 5 -> 6, log_level info -> warning, " in said
        assert "jobs.default.min_replicas (not set) -> 1; these need a restart: quorum_tick_ms 100 -> 50\n" in said
        assert len(client.quorum("a", LATE, step=3).participants) == 1
        lighthouse.process.terminate()
        assert lighthouse.process.stderr is not None
        rest = lighthouse.process.stderr.read()
        assert "received SIGTERM" not in rest, "the level leaves out what is normal"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("min_replicas = 0", "{file}: min_replicas is 0; give 1 to 100000"),
        ("min_replicas = ", "{file}: this is no TOML: "),
        ("min_replicas = 9\nmax_replicas = 2", "min_replicas (9) exceeds max_replicas (2)"),
        (None, "{file} can't be read: No such file or directory"),
    ],
)
def test_a_broken_file_keeps_the_settings_and_logs_one_line(content: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "l.toml"
    file.write_text("min_replicas = 1")
    with running("--config", str(file)) as lighthouse, LighthouseClient(lighthouse.address, LATE) as client:
        file.unlink()
        if content is not None:
            file.write_text(content)
        line = lighthouse.hang_up()
        assert "ERROR tft_lighthouse: received SIGHUP, and keeps all settings as they were: " in line
        assert says.format(file=file) in line
        assert len(client.quorum("a", LATE, step=3).participants) == 1
        file.write_text("min_replicas = 1")
        assert "no setting has changed\n" in lighthouse.hang_up()


def test_a_secret_needs_no_signal_and_counts_for_new_calls_on_both_ports(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    words = ("--token_file", str(secret), "--http-bind", "127.0.0.1:0")
    with running(*words) as lighthouse:
        page = lighthouse.line("status, metrics and health at").split(" at ")[1].split()[0]
        before = LighthouseClient(lighthouse.address, LATE, token="first")
        before.heartbeat("a")
        replace(secret, "second\n")
        with LighthouseClient(lighthouse.address, LATE, token="second") as after:
            after.heartbeat("a")
        with before:
            before.heartbeat("a")  # the one before is accepted for a minute more
        assert status_of(page, "second") == 200
        assert status_of(page, "third") == 401
        assert "reloaded the settings; no setting has changed\n" in lighthouse.hang_up()
        replace(secret, "not a secret\n")
        assert "keeps all settings as they were: --token_file names" in lighthouse.hang_up()
        secret.unlink()
        assert "which can't be read" in lighthouse.hang_up()
        assert status_of(page, "second") == 200


def replace(file: Path, content: str) -> None:
    """Give a file other content at once, as a careful tool does it."""
    file.with_suffix(".new").write_text(content)
    file.with_suffix(".new").replace(file)


def status_of(page: str, secret: str) -> int:
    request = urllib.request.Request(f"{page}/api/v1/status", headers={"Authorization": f"Bearer {secret}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_without_a_file_sighup_changes_nothing_and_ends_nothing() -> None:
    with running() as lighthouse, LighthouseClient(lighthouse.address, LATE) as client:
        assert "received SIGHUP: reloaded the settings; no setting has changed\n" in lighthouse.hang_up()
        assert len(client.quorum("a", LATE, step=3).participants) == 1
        lighthouse.process.terminate()
        assert lighthouse.process.wait(30) == 0


def test_a_terminal_that_closes_ends_the_lighthouse_that_was_started_in_it() -> None:
    pid, terminal = pty.fork()
    if pid == 0:  # the child has that terminal
        os.execv(sys.executable, COMMAND)
    said = b""
    while b"listening at" not in said:
        said += os.read(terminal, 4_096)
    os.close(terminal)
    for _ in range(300):  # the test's own time limit would leave the lighthouse behind
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        signal.sigtimedwait([], 0.1)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("it goes on")
    assert os.waitstatus_to_exitcode(status) == 0


# --- the server object --------------------------------------------------------------------------------------------


def test_a_server_takes_other_settings_while_it_runs() -> None:
    with LighthouseServer("127.0.0.1:0", min_replicas=2, quorum_tick_ms=20) as lighthouse:
        with LighthouseClient(lighthouse.address, LATE) as client:
            lighthouse.reconfigure(jobs={"default": JobSettings(min_replicas=1)}, min_replicas=2)
            assert len(client.quorum("a", LATE, step=1).participants) == 1
            lighthouse.reconfigure(limits=Limits(max_replicas=1))
            with pytest.raises(RefusedError, match="has 1 members, the most that it may have"):
                client.quorum("b", LATE, step=1)
        with pytest.raises(ConfigError, match="min_replicas is 0; give at least 1"):
            lighthouse.reconfigure(min_replicas=0)
    with pytest.raises(CoordinationClosedError, match="was shut down"):
        lighthouse.reconfigure()


def settings(**flags: str) -> Settings:
    return resolve({"bind": "127.0.0.1:0", "http_bind": "0", **flags}, {}, {}, None)


def test_what_needs_a_restart_is_said_again_until_it_is_done() -> None:
    before, after = settings(), settings(join_timeout_ms="7", max_streams="9")
    with LighthouseServer("127.0.0.1:0") as lighthouse:
        in_force, said = apply(lighthouse, before, after)
        late = "these need a restart: join_timeout_ms 60000 -> 7"
        assert said == f"reloaded the settings; max_streams 50000 -> 9; {late}"
        assert (in_force["join_timeout_ms"], in_force["max_streams"]) == (60_000, 9)
        assert apply(lighthouse, in_force, after)[1] == f"reloaded the settings; no setting has changed; {late}"
        assert apply(lighthouse, in_force, before)[1] == "reloaded the settings; max_streams 9 -> 50000"


@pytest.mark.parametrize("name", ["token_file", "job_tokens", "tls_cert"])
def test_another_file_of_secrets_or_certificates_needs_a_restart(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "jobs").write_text("job = secret-of-it\n")
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "node.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    secret = {"token_file": str(tmp_path / "secret")}
    flags = {
        "token_file": secret,
        "job_tokens": {**secret, "job_tokens": str(tmp_path / "jobs")},
        "tls_cert": {
            "tls_cert": str(tmp_path / "node.pem"),
            "tls_key": str(tmp_path / "node.pem"),
            "tls_ca": str(tmp_path / "ca.pem"),
        },
    }[name]
    before, after = settings(), settings(**flags)
    with LighthouseServer("127.0.0.1:0") as lighthouse:
        in_force, said = apply(lighthouse, before, after)
        assert in_force[name] is None
        assert f"{name} (not set) -> {flags[name]}" in said.partition("; these need a restart: ")[2]
        with LighthouseClient(lighthouse.address, LATE) as client:
            client.heartbeat("a")
        with pytest.raises(ConfigError, match=r"can't (be )?read"):
            apply(lighthouse, before, settings(**{**flags, name: str(tmp_path / "none")}))


def test_what_changed_counts_for_the_next_term_of_a_leader_too() -> None:
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse:
        lighthouse.reconfigure(min_replicas=2, limits=Limits(max_jobs=7), jobs={"default": JobSettings(min_replicas=3)})
        shell = lighthouse._shell
        assert shell is not None

        async def lead_again() -> None:
            shell._begin_again(shell._core.started_ms + 1, True)

        lighthouse._share.run(lead_again())
        assert (shell._core._config.min_replicas, shell._core._config.limits.max_jobs) == (2, 7)
        assert shell._torchft_core._config.min_replicas == 3, "torchft's clients are the job default"
        lighthouse.reconfigure(min_replicas=4)
        assert shell._core._config.min_replicas == shell._torchft_core._config.min_replicas == 4
