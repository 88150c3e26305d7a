"""`tft status` and `tft incidents`: what is shown, and one sentence where nothing can be."""

from __future__ import annotations

import json
import re
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tft_coord import LighthouseClient
from tft_lighthouse import LighthouseServer
from tft_suite.cli import main
from tft_suite.cli.main import exit_code_of
from tft_suite.errors import ConfigError
from tft_suite.operate import text
from tft_suite.operate.client import http_addresses

MINUTE = timedelta(seconds=60)
STATUS: dict[str, Any] = {
    "schema_version": 1,
    "now_ms": 1_795_719_950_000,
    "lighthouse": {"version": "0.1.0", "started_ms": 1_795_700_000_000, "is_ready": True},
    "jobs": [
        {
            "name": "llama",
            "state": "waiting",
            "step": 6410,
            "quorum": {"id": 17, "num_members": 2, "age_ms": 61_000, "broken": "b was lost"},
            "waits": {"sentence": "step 6410: waits for b", "lasted_ms": 3_200},
            "ended": None,
            "warnings": ["look at \x1b[31mb"],
            "num_replicas": 3,
            "replicas": [
                {
                    "replica_id": "a:0f3a9c1d-0000-4000-8000-000000000000",
                    "state": "training",
                    "rank": 0,
                    "step": 6410,
                    "phase": "reducing",
                    "phase_ms": 3_200,
                    "own_step_ms": 310,
                    "heard_ms": 400,
                    "reason": None,
                    "gone_ms": None,
                    "address": "host-a:1",
                },
                {
                    "replica_id": "b",
                    "state": "lost",
                    "rank": 1,
                    "step": 6409,
                    "phase": None,
                    "phase_ms": None,
                    "own_step_ms": None,
                    "heard_ms": None,
                    "reason": "silent for 5000 ms",
                    "gone_ms": 2_000,
                    "address": "",
                },
            ],
        }
    ],
}
INCIDENT: dict[str, Any] = {
    "job": "llama",
    "kind": "failed_round",
    "is_open": False,
    "replica_ids": ["a:0f3a9c1d-0000-4000-8000-000000000000", "b", "c", "d"],
    "num_replicas": 60,
    "reason": "a failed to commit\n",
    "began_ms": 1_795_719_950_000,
    "lasted_ms": 812,
    "phases_ms": {"quorum": 12, "resume": 800},
    "step": 6410,
    "quorum_before": 1_795_719_000_017,
    "quorum_after": 1_795_719_000_018,
    "members_before": 60,
    "members_after": 60,
    "waited_for": "b waits for a",
}


def test_the_text_of_a_status() -> None:
    assert text.status_text(STATUS).splitlines() == [
        "lighthouse 0.1.0, up 5 h 32 min, ready",
        "",
        "job llama: waiting, step 6410, quorum 17 of 2, 1 min old",
        "  broken: b was lost",
        "  waiting for 3.2 s: step 6410: waits for b",
        "  warning: look at ?[31mb",
        "  rank  replica     state                               step  phase           own step  heard      address",
        "  0     a:0f3a9c1d  training                            6410  reducing 3.2 s  310 ms    0.4 s ago  host-a:1",
        "  1     b           lost 2.0 s ago: silent for 5000 ms  6409  -               -         -          -",
        "  and 1 more replicas",
    ]
    assert text.of_job(STATUS, "llama") == STATUS
    with pytest.raises(ConfigError, match=r"knows no job 'other'; known jobs: llama$"):
        text.of_job(STATUS, "other")


def test_the_text_of_incidents() -> None:
    head, line = text.incidents_text([INCIDENT]).splitlines()
    assert tuple(re.split(r"  +", head)) == text.INCIDENT_COLUMNS
    assert line == (
        "2026-11-26 19:05:50  llama  failed round  812 ms  0.8 s   quorum 12 ms, resume 800 ms  6410  0017 -> 0018  "
        "60 -> 60  "
        "a:0f3a9c1d, b, c and 57 more  a failed to commit?; waited for: b waits for a"
    )
    spent = {"detect": 1_500, "quorum": 12, "commit": 100, "heal": 1_200}
    slowest = {"slowest": "b:0f3a9c1d-0000-4000-8000-000000000000", "cost_ms": 1_512, "lasted_ms": 1_612}
    _, line = text.incidents_text([{**INCIDENT, **slowest, "phases_ms": spent}]).splitlines()
    shown = "slowest b:0f3a9c1d: detect 1.5 s, quorum 12 ms, commit 100 ms; beside: heal 1.2 s"
    assert f"  1.5 s  1.6 s   {shown}  " in line
    of_an_earlier_release = {**INCIDENT, "lasted_ms": 900, "phases_ms": {"commit": 100, "quorum": 800}}
    assert "  800 ms  0.9 s   commit 100 ms, quorum 800 ms  " in text.incidents_text([of_an_earlier_release])


def test_the_text_of_an_incident_about_no_replica() -> None:
    nobody = {"replica_ids": [], "num_replicas": 0, "phases_ms": {}, "lasted_ms": 0, "waited_for": None}
    same = {"kind": "lighthouse", "quorum_before": 1_795_719_000_018, "reason": "it has started"}
    _, line = text.incidents_text([{**INCIDENT, **nobody, **same}]).splitlines()
    assert re.split(r"  +", line)[2:] == [
        "lighthouse",
        "0 ms",
        "0.0 s",
        "-",
        "6410",
        "0018",
        "60 -> 60",
        "-",
        "it has started",
    ]
    begun = {**INCIDENT, "quorum_before": None}
    assert "none -> 0018" in text.incidents_text([begun])
    assert re.split(r"  +", text.incidents_text([{**INCIDENT, "quorum_after": None}]).splitlines()[1])[7:9] == [
        "-",
        "-",
    ]
    assert text.incidents_text([]).startswith("no incident is known")


def test_a_lighthouse_is_asked_at_the_port_after_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"TFT_LIGHTHOUSE": "http://first:29510,[::1]:7"}
    assert http_addresses(environ, lighthouse=None, http=None) == ("first:29511", "[::1]:8")
    assert http_addresses(environ, lighthouse="other:1", http=None) == ("other:2",)
    assert http_addresses(environ, lighthouse="other:1", http="http://there:80") == ("there:80",)
    assert exit_code_of(["status", "--lighthouse", "a:65535"]) == 2
    assert "give --http" in capsys.readouterr().err


def test_status_and_incidents_of_a_real_lighthouse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFT_TOKEN", "s3cret")
    with LighthouseServer("127.0.0.1:0", token="s3cret", http_bind="127.0.0.1:0") as lighthouse:
        address = str(lighthouse.http_address)
        assert exit_code_of(["status", "--http", address]) == 0
        assert "no replica has connected yet" in capsys.readouterr().out
        with LighthouseClient(lighthouse.address, MINUTE, token="s3cret") as client:
            client.quorum("a", MINUTE, step=3)
        assert exit_code_of(["incidents", "--http", address]) == 0
        shown = capsys.readouterr().out
        assert "start" in shown
        assert "the members changed" in shown
        for command, known in (("incidents", "default"), ("status", "none so far")):
            said = ""
            until = time.monotonic() + MINUTE.total_seconds()
            while f"knows no job 'other'; known jobs: {known}" not in said:  # torchft's member goes soon
                assert time.monotonic() < until, said
                assert exit_code_of([command, "--http", address, "--job", "other", "--json"]) == 2
                said = capsys.readouterr().err

        rounds: list[float] = []

        def sleep(seconds: float) -> None:
            rounds.append(seconds)
            if len(rounds) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(main.time, "sleep", sleep)
        assert exit_code_of(["status", "--http", address, "--watch", "--json"]) == 130
        shown_twice = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [each["schema_version"] for each in shown_twice] == [1, 1]
        rounds.clear()
        monkeypatch.setattr(main.sys.stdout, "isatty", lambda: True)
        assert exit_code_of(["status", "--http", address, "--watch"]) == 130
        pictures = capsys.readouterr().out.split("\x1b[2J\x1b[H")
        assert [picture.startswith("lighthouse ") for picture in pictures] == [False, True, True]
        monkeypatch.setenv("TFT_TOKEN", "another")
        assert exit_code_of(["status", "--http", address]) == 2
        said = capsys.readouterr().err
        assert "refuses the request (status 401), because it requires a shared secret" in said
        assert "set TFT_TOKEN or TFT_TOKEN_FILE" in said
        assert "another" not in said


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"<html>", "is no lighthouse's HTTP port (status 200, and no JSON)"),
        (200, b"[1]", "is no lighthouse's HTTP port"),
        (200, b"[" * 100_000, "is no lighthouse's HTTP port"),
        (200, b'{"schema_version": 9}', "speaks schema version 9; use the tft-suite of its version"),
        (503, b'{"error": "too many"}', "answers with status 503: too many"),
        (302, b"", "is no lighthouse's HTTP port (status 302"),
    ],
)
def test_another_server_is_one_sentence(
    status: int, body: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body, Location="http://127.0.0.1:1/") as address:
        assert exit_code_of(["status", "--http", address]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_nobody_there_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code_of(["incidents", "--http", "127.0.0.1:1,127.0.0.1:2"]) == 2
    assert capsys.readouterr().err.count("check that the lighthouse runs with --http-bind") == 2
    for name in ("TFT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    assert exit_code_of(["status"]) == 2
    assert "no lighthouse is known" in capsys.readouterr().err
    assert exit_code_of(["incidents", "--http", "a:1", "--limit", "0"]) == 2
    assert exit_code_of(["incidents", "--http", "a:1", "--timeout", "0"]) == 2
