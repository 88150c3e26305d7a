"""The command: its words, its one-sentence complaints, and its end by a signal."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from tft_coord import LighthouseClient, RefusedError
from tft_lighthouse import __version__
from tft_lighthouse.launch import http_bind_of

COMMAND = [sys.executable, "-m", "tft_lighthouse"]
LATE = timedelta(seconds=20)


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=30, check=False, env={**os.environ, **environment}
    )


@contextmanager
def running(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command's process and the address at which it says it listens."""
    process = subprocess.Popen(
        [*COMMAND, "--bind", "127.0.0.1:0", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stderr is not None
        found = re.search(r"listening at (http://\S+)", process.stderr.readline())
        assert found is not None
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_help_shows_every_flag_and_its_default() -> None:
    done = run("--help")
    assert done.returncode == 0
    shown = " ".join(done.stdout.split())
    for flag, default in {
        "--bind": r"\[::\]:29510",
        "--min_replicas": "1",
        "--quorum_tick_ms": "100",
        "--join_timeout_ms": "60000",
        "--heartbeat_timeout_ms": "5000",
        "--stragglers": "warn",
        "--straggler_ratio": "2.0",
        "--on_lost_state": "wait",
        "--lost_state_timeout_ms": "30000",
    }.items():
        assert re.search(rf"{flag}\b.*?\(default: {default}\)", shown), flag


def test_help_is_answered_without_importing_grpc() -> None:
    script = (
        "import sys, tft_lighthouse.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30, check=False).returncode == 0


def test_version() -> None:
    assert run("--version").stdout == f"tft-lighthouse {__version__}\n"


# At the beginning of each call that it makes while it serves, the last of which waits for the signal.
INTERRUPTED = """
import signal, sys
from tft_lighthouse import cli

def calls(frame, event, _):
    if event == "call" and frame.f_back and frame.f_back.f_code is cli._serve.__code__:
        signal.raise_signal(signal.SIGTERM)

sys.setprofile(calls)
sys.exit(cli.main(["--bind", "127.0.0.1:0"]))
"""
AT_ONCE = 8


def test_a_signal_in_the_moment_in_which_it_begins_to_wait_ends_it() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def ended_at_once(_: int) -> int:
    with running() as (process, _):
        process.terminate()
        return process.wait(20)


def test_signals_as_soon_as_it_listens_end_all_of_them() -> None:
    """Several at once, so that the cores have other things to do: each may be anywhere on its way to wait."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert set(pool.map(ended_at_once, range(3 * AT_ONCE))) == {0}


LIMITED = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {})); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def limited(soft: int, hard: int) -> subprocess.Popen[str]:
    """The limits are set by the child: a `preexec_fn` would run this process's handlers of forks, threads or not."""
    return subprocess.Popen(
        [sys.executable, "-c", LIMITED.format(soft, hard), *COMMAND, "--bind", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("hard", "says"), [(4096, ""), (1000, "may open 1000 files, enough for about 468 replicas")])
def test_it_may_open_as_many_files_as_it_is_allowed_and_says_when_these_are_few(hard: int, says: str) -> None:
    process = limited(256, hard)
    try:
        assert process.stderr is not None
        said: list[str] = []
        while not said or "listening at" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], f"it ended with code {process.wait(30)}: {''.join(said)}"
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        process.terminate()
        said.append(process.stderr.read())
        assert process.wait(30) == 0
        assert says in "".join(said)
        assert ("Raise the hard limit" in "".join(said)) == bool(says)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--min_replicas", "many"], "--min_replicas: min_replicas is 'many'; give a whole number, 1 to 100000"),
        (["--min-replicas", "0"], "--min_replicas: min_replicas is 0; give 1 to 100000"),
        (["--quorum_tick_ms", "6000"], "quorum_tick_ms (6000 ms) exceeds heartbeat_timeout_ms (5000 ms)"),
        (
            ["--stragglers", "off", "--straggler_ratio", "3"],
            "straggler_ratio 3 has no effect with stragglers off; leave one of the two out (stragglers is set by ",
        ),
        (["--on-lost-state", "die"], "on_lost_state is 'die'; give wait or restart"),
        (["--lost-state-timeout-ms", "-1"], "lost_state_timeout_ms is -1; give 0 to 604800000 milliseconds (a week)"),
        (
            ["--on-lost-state", "restart", "--lost-state-timeout-ms", "100"],
            "which needs 'wait'; leave one of them",
        ),
        (["--bind", "here"], "bind is 'here'; give host:port"),
        (["--http-bind", "1.2.3.4:x"], "http_bind is '1.2.3.4:x'; give host:port"),
        (["--min_replica", "1"], "there is no flag --min_replica; did you mean --min_replicas?"),
        (["--token", "s3cret"], "there is no flag --token; put the secret into a file, and name it by --token_file"),
        (["--tokn=s3cret"], "there is no flag --tokn; did you mean --token_file?"),
        (["s3cret"], "there is a word that is no flag and no value of one"),
        (["--etcd", "http://root:s3cret@10.0.0.1:2379"], "an etcd endpoint has a user or a password in front of an @"),
        (
            ["--insecure", "--bind", "192.0.2.1:1"],
            "the lighthouse can't listen at 192.0.2.1:1: 192.0.2.1 is no address",
        ),
        (["--insecure", "--bind", "no.such.invalid:1"], "the lighthouse can't listen at no.such.invalid:1: "),
        (
            ["--bind", "localhost:65535", "--http_bind="],
            "bind has port 65535, and there is no next one for HTTP",
        ),
        (
            ["--bind", "localhost:70", "--http_bind", "70"],
            "bind and http_bind are both port 70; give",
        ),
        (["--bind", "192.0.2.1:1"], "bind is '192.0.2.1:1' and no shared secret is set; to serve other machines"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_exit_code_2(words: list[str], says: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert "s3cret" not in done.stderr
    assert done.stderr.startswith("tft-lighthouse: ")
    assert done.stderr.count("\n") == 1


def test_a_secret_that_cannot_be_read_is_one_sentence_and_exit_code_2() -> None:
    done = run("--bind", "127.0.0.1:0", TFT_TOKEN_FILE="/no/such/file")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "TFT_TOKEN_FILE names /no/such/file, which can't be read" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_ends_it_cleanly(number: signal.Signals) -> None:
    with (
        running("--min-replicas", "1", "--quorum-tick-ms", "20") as (process, address),
        LighthouseClient(address, LATE) as client,
    ):
        quorum = client.quorum("a", LATE, step=3)
        assert [member.step for member in quorum.participants] == [3]
        taken = run("--bind", address.removeprefix("http://"))
        assert taken.returncode == 2
        assert f"the lighthouse can't listen at {address.removeprefix('http://')}: the port is in use" in taken.stderr
        process.send_signal(number)
        assert process.stderr is not None
        rest = process.stderr.read()
        process.wait(10)
    assert process.returncode == 0
    assert "no shared secret is set, so only this machine is served" in rest
    assert f"new quorum {quorum.quorum_id}" in rest
    assert f"quorum changed, id none -> {quorum.quorum_id}, because" in rest
    assert f"received {number.name} and shuts down: replicas train on in their quorums" in rest
    assert "Traceback" not in rest


def test_json_lines_name_their_job() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--bind", "127.0.0.1:0", "--log-format", "json"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        assert first.keys() == {"time", "level", "logger", "message"}
        assert (first["level"], first["logger"]) == ("INFO", "tft_lighthouse")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
        with LighthouseClient(first["message"].split()[2], LATE) as client:
            quorum = client.quorum("a:3f2b0c1a-0000-4000-8000-000000000000", LATE, step=3)
        process.terminate()
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    (formed,) = [line for line in lines if line["message"].startswith("quorum changed")]
    assert (formed["job"], formed["quorum_id"]) == ("default", quorum.quorum_id)
    assert formed["message"].endswith("(job default)")


def test_a_level_leaves_lines_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        bind = "{}:{}".format(*free.getsockname())
    process = subprocess.Popen([*COMMAND, "--bind", bind, "--log_level", "error"], stderr=subprocess.PIPE, text=True)
    with process, LighthouseClient(bind, LATE) as client:
        client.quorum("a", LATE, step=3)
        process.terminate()
        assert process.communicate(timeout=20) == (None, "")


def test_the_secret_of_the_environment_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    with running(TFT_TOKEN_FILE=str(file)) as (process, address):
        with LighthouseClient(address, LATE) as stranger, pytest.raises(RefusedError, match="shared secret"):
            stranger.heartbeat("a")
        with LighthouseClient(address, LATE, token="s3cret") as friend:
            friend.heartbeat("a")
        process.terminate()
        assert process.stderr is not None
        (line,) = (line for line in process.stderr.read().splitlines() if "secret" in line)
        assert "refused 1 calls without the right shared secret, the last from 127.0.0.1:" in line
        assert "s3cret" not in line


@pytest.mark.parametrize(
    ("text", "bind", "expected"),
    [
        ("", "[::]:29510", "[::]:29511"),
        ("", "127.0.0.1:0", "127.0.0.1:0"),
        ("", "here", ":"),  # which is refused as such
        ("0", "[::]:29510", None),
        ("8080", "10.0.0.1:29510", "10.0.0.1:8080"),
        ("[::1]:8080", "10.0.0.1:29510", "[::1]:8080"),
        ("10.0.0.1:0", "[::]:29510", "10.0.0.1:0"),
    ],
)
def test_where_the_http_port_is(text: str, bind: str, expected: str | None) -> None:
    assert http_bind_of(text, bind) == expected


@pytest.mark.parametrize(
    ("words", "environment", "has_port"),
    [
        ([], {"TFT_LIGHTHOUSE_HTTP_BIND": ""}, True),
        ([], {"TFT_LIGHTHOUSE_HTTP_BIND": "127.0.0.1:0"}, True),
        (["--http-bind", "127.0.0.1:0"], {"TFT_LIGHTHOUSE_HTTP_BIND": "0"}, True),
        (["--http_bind", "0"], {"TFT_LIGHTHOUSE_HTTP_BIND": "127.0.0.1:0"}, False),
    ],
)
def test_a_flag_beats_the_environment_and_without_both_there_is_a_port(
    words: list[str], environment: dict[str, str], has_port: bool
) -> None:
    with running(*words, **environment) as (process, _):
        assert process.stderr is not None
        process.stderr.readline()  # that this machine alone is served
        if has_port:
            found = re.search(r"status, metrics and health at (http://127.0.0.1:\d+) ", process.stderr.readline())
            assert found is not None
            with urllib.request.urlopen(f"{found[1]}/healthz", timeout=20) as answer:
                assert answer.read() == b"ok\n"
        process.terminate()
        assert process.wait(20) == 0
        (rest,) = process.stderr.read().splitlines()
        assert "received SIGTERM and shuts down" in rest


def test_help_takes_less_than_a_second() -> None:
    started = time.monotonic()
    run("--help")
    assert time.monotonic() - started < 5.0  # a wide bound for a busy machine; the benchmark measures
