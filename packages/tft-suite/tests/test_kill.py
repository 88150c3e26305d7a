"""`tft kill`: who ends, and what is said where nobody does."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from datetime import timedelta

import pytest

from tft_coord import ManagerClient, ManagerServer, Notification, RankRequest
from tft_coord.core.lineage import initial_lineage
from tft_coord.core.types import KillOrder
from tft_lighthouse import LighthouseServer
from tft_suite.cli.main import exit_code_of

SECRET = "s3cret-of-the-job"
MINUTE = timedelta(seconds=60)
REPLICA = "a:3f2b0c1a-0000-4000-8000-000000000000"
SEVERAL = 'it is "new", & <b>old</b>\x1b[31m'

Heard = queue.SimpleQueue[Notification]


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[LighthouseServer]:
    for name in ("TFT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE", "TFT_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TFT_TOKEN", SECRET)
    with LighthouseServer("127.0.0.1:0", token=SECRET, http_bind="127.0.0.1:0") as lighthouse:
        yield lighthouse


@pytest.fixture
def heard(lighthouse: LighthouseServer) -> Iterator[Heard]:
    """A replica of the job "llama", and what its rank is told."""
    told: Heard = queue.SimpleQueue()
    with (
        ManagerServer(
            REPLICA,
            lighthouse.address,
            "localhost",
            "127.0.0.1:0",
            "127.0.0.1:1",
            1,
            job="llama",
            token=SECRET,
            in_process=True,
        ) as server,
        ManagerClient(server.address(), MINUTE, group_rank=0, token=SECRET, listener=told.put) as client,
    ):
        client.quorum(0, RankRequest(step=0, lineage=initial_lineage("llama")), MINUTE)
        yield told


@pytest.mark.parametrize("name", ["a", "a:3f2b0c1a", REPLICA])
def test_a_replica_ends_by_any_of_its_names(
    lighthouse: LighthouseServer, heard: Heard, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--http", str(lighthouse.http_address), "--job", "llama"]
    assert exit_code_of(["kill", *words, "--reason", SEVERAL]) == 0
    assert capsys.readouterr().out == f"asked the processes of {REPLICA} of job llama to end\n"
    order = next(each for each in iter(lambda: heard.get(timeout=20), None) if isinstance(each, KillOrder))
    assert order.message.startswith('it is "new", & <b>old</b>[31m (asked by 127.0.0.1:')
    assert exit_code_of(["kill", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": "llama", "replica_id": REPLICA, "asked_to": "end"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["b", "--job", "llama"], "knows no replica 'b'; known replicas: a:3f2b0c1a"),
        (["a"], "knows no job 'default'; known jobs: llama"),
        (["../../api/v1/status", "--job", "llama"], "knows no replica '../../api/v1/status'"),
        (["a?job=llama", "--job", "llama"], "knows no replica 'a?job=llama'"),
        (["a\n", "--job", "llama"], "is not a replica id; give the id or the name of a replica"),
        ([" ", "--job", "llama"], "is not a replica id"),
        (["a", "--job", "llama", "--timeout", "0"], "--timeout is 0.0; give seconds, 0.001 to 3600"),
    ],
)
def test_who_can_t_be_killed_is_one_sentence(
    lighthouse: LighthouseServer,
    heard: Heard,
    words: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(["kill", *words, "--http", str(lighthouse.http_address)]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_nobody_kills_without_the_secret(
    lighthouse: LighthouseServer, heard: Heard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFT_TOKEN", "another")
    assert exit_code_of(["kill", "a", "--job", "llama", "--http", str(lighthouse.http_address)]) == 2
    said = capsys.readouterr().err
    assert "a was not killed: " in said
    assert "(status 401), because it requires a shared secret" in said
    assert "another" not in said
    while not heard.empty():
        assert not isinstance(heard.get(), KillOrder)


def test_each_lighthouse_of_the_list_is_asked(
    lighthouse: LighthouseServer, heard: Heard, capsys: pytest.CaptureFixture[str]
) -> None:
    with LighthouseServer("127.0.0.1:0", token=SECRET, http_bind="127.0.0.1:0") as empty:
        both = f"{empty.http_address},{lighthouse.http_address}"
        assert exit_code_of(["kill", "a", "--job", "llama", "--http", both]) == 0
        assert exit_code_of(["kill", "b", "--job", "llama", "--http", both]) == 2
    said = capsys.readouterr().err
    assert "knows no job 'llama'" in said
    assert "knows no replica 'b'" in said
