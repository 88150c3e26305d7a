"""`tft drain`: who is asked to leave, and what is said where nobody can be."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc
import pytest

from tft_coord import ManagerClient, ManagerServer, RankRequest
from tft_coord.core.lineage import initial_lineage
from tft_lighthouse import LighthouseServer
from tft_suite.cli.main import exit_code_of


def test_a_replica_that_nobody_knows_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with LighthouseServer("127.0.0.1:0") as lighthouse:
        assert exit_code_of(["drain", "a", "--lighthouse", str(lighthouse.address)]) == 2
    assert "a was not asked to leave: " in (told := capsys.readouterr().err)
    assert "this lighthouse knows no job 'default'" in told


def test_a_lighthouse_must_be_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TFT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    assert exit_code_of(["drain", "a"]) == 2
    assert "give --lighthouse, or set TFT_LIGHTHOUSE" in capsys.readouterr().err
    assert exit_code_of(["drain", "a", "--timeout", "0"]) == 2


def test_each_lighthouse_of_the_list_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LighthouseServer("127.0.0.1:0") as first, LighthouseServer("127.0.0.1:0") as second:
        monkeypatch.setenv("TFT_LIGHTHOUSE", f"{first.address},{second.address}")
        monkeypatch.setenv("TFT_JOB_ID", "of-this-shell")
        minute = timedelta(seconds=60)
        with (
            ManagerServer(
                "a:3f2b0c1a-0000-4000-8000-000000000000",
                second.address,
                "localhost",
                "127.0.0.1:0",
                "127.0.0.1:1",
                1,
                job="of-this-shell",
                in_process=True,
            ) as server,
            ManagerClient(server.address(), minute, group_rank=0) as client,
        ):
            client.quorum(0, RankRequest(step=0, lineage=initial_lineage("of-this-shell")), minute)
            assert exit_code_of(["drain", "a"]) == 0
            assert "asked a of job of-this-shell to leave" in capsys.readouterr().out
            assert exit_code_of(["drain", "a", "--json"]) == 0
            facts = {"job": "of-this-shell", "replica": "a", "asked_to": "leave"}
            assert json.loads(capsys.readouterr().out) == facts
        assert exit_code_of(["drain", "a", "--job", "another"]) == 2
        told = capsys.readouterr().err
        assert told.count("this lighthouse knows no job 'another'") == 2
        assert told.count("\n") == 1


def test_what_is_no_lighthouse_of_ours_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            assert exit_code_of(["drain", "a", "--lighthouse", f"127.0.0.1:{port}"]) == 2
        finally:
            server.stop(None).wait()
    assert "is not a lighthouse: another gRPC service answers there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["", "--lighthouse", "h:1"], ["a", "--lighthouse", "h:1,"], ["a", "--lighthouse", "h"]]
)
def test_a_wrong_call_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["drain", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
