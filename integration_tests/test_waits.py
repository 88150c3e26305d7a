"""No process waits in silence: waiter and lighthouse log each long wait, with the name of the missing replica."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Final

import pytest
import torch

from tft_algos import Manager
from tft_algos.manager.quorum import coordinator
from tft_coord import LighthouseClient, ManagerServer
from tft_coord.core.names import shorten
from tft_coord.errors import RequestTimeoutError
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo
from tft_suite.doctor.findings import findings
from tft_suite.doctor.survey import survey

BOUND: Final = timedelta(seconds=30)
UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-")


@pytest.fixture(autouse=True)
def nothing_held(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    yield
    caplog.get_records("call").clear()  # records hold errors, and errors hold the frames that they passed


Said = Callable[[str, str], threading.Event]


@pytest.fixture
def said() -> Iterator[Said]:
    """Return `said("logger", "words")`, which gives an event that is set when that logger logs these words."""
    added: list[tuple[logging.Logger, logging.Handler]] = []

    def listen(name: str, words: str) -> threading.Event:
        event = threading.Event()

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if words in record.getMessage():
                    event.set()

        added.append((logging.getLogger(name), Listener()))
        added[-1][0].addHandler(added[-1][1])
        return event

    yield listen
    for logger, handler in added:
        logger.removeHandler(handler)


def manager(lighthouse: LighthouseServer, name: str, quorum_timeout: timedelta | None = None) -> Manager:
    return Manager(
        ProcessGroupGloo(timeout=BOUND),
        lambda _: None,
        dict,
        replica_id=name,
        lighthouse_addr=lighthouse.address,
        hostname="localhost",
        init_sync=False,
        timeout=BOUND,
        quorum_timeout=quorum_timeout,
        lease=timedelta(),  # each step has a request that can be waited for
    )


def step(both: list[Manager]) -> None:
    for each in both:
        each.start_quorum()
    for work in [each.allreduce(torch.ones(1)) for each in both]:
        work.wait()
    commit(both)


def commit(both: list[Manager]) -> None:
    """Commit on both at the same time, because each waits for the other's word."""
    with ThreadPoolExecutor(len(both)) as threads:
        assert list(threads.map(Manager.should_commit, both)) == [True, True]


@pytest.mark.in_parts
def test_one_of_two_that_does_not_come_is_named_everywhere(caplog: pytest.LogCaptureFixture, said: Said) -> None:
    """The other one may evaluate. Before, neither side logged anything, and the error named no replica."""
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2) as lighthouse,
        manager(lighthouse, "early", quorum_timeout=timedelta(seconds=9)) as early,
        manager(lighthouse, "evaluates") as late,
    ):
        step([early, late])
        heard, over = (said(name, "is over after") for name in ("tft_lighthouse", "tft_algos.manager"))
        early.start_quorum()
        with pytest.raises(RequestTimeoutError) as raised:
            early.wait_quorum()
        with LighthouseClient(lighthouse.address, BOUND) as client:
            early.start_quorum()
            doctor = ""
            while "not asked" not in doctor and not heard.is_set():
                doctor = client.describe(BOUND).jobs[0].waiting_for
        late.start_quorum()
        early.wait_quorum()
        assert all(each.wait(BOUND.total_seconds()) for each in (heard, over))
    unique = late.replica_id.split(":")[1][:8]
    place = rf"evaluates:{unique} at localhost:\d+ \(step 1, between two steps for \d+ s\)"
    sentence = rf"1 of min_replicas 2 have asked; not asked: {place}; ends when another replica asks, or min_replicas"
    assert re.search(sentence, str(raised.value)), raised.value
    assert re.search(sentence, doctor), doctor
    lines = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    trainer = [line for line in lines if line.startswith("[early") and "no quorum:" not in line]
    assert len(trainer) == 1, lines
    assert re.search(rf"waiting for a quorum for \d s: {sentence}", trainer[0])
    assert "time limit: quorum_timeout (9 s)" in trainer[0]
    of_lighthouse = [line for line in lines if line.startswith("job default")]
    assert len(of_lighthouse) == 1, lines
    assert not any(line.startswith("[evaluates") for line in lines), "who evaluates waits for nobody"
    assert re.search(rf"waiting for \d s: {sentence}", of_lighthouse[0])
    ends = [record.getMessage() for record in caplog.records if "is over after" in record.getMessage()]
    assert any(line.startswith("[early") and "the wait for a quorum is over after" in line for line in ends), ends
    assert any(line.startswith("job default: the wait is over after") for line in ends), ends
    assert not any(UUID.search(line) for line in lines + ends)


def test_a_reduction_that_waits_names_who_is_not_in_it(caplog: pytest.LogCaptureFixture, said: Said) -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2) as lighthouse,
        manager(lighthouse, "reduces") as early,
        manager(lighthouse, "computes") as late,
    ):
        step([early, late])
        for each in (early, late):
            each.start_quorum()
        for each in (early, late):
            each.wait_quorum()
        heard = [said("tft_algos.manager", "waiting for a reduction"), said("tft_lighthouse", "waiting for")]
        work = early.allreduce(torch.ones(1))
        assert all(each.wait(BOUND.total_seconds()) for each in heard)
        late.allreduce(torch.ones(1)).wait()
        work.wait()
        commit([early, late])
    (line,) = (message for message in caplog.messages if "waiting for a reduction" in message)
    who = r"computes:[0-9a-f]{8} at localhost:\d+ \(step 1, busy with its own part of the step for \d+ s\)"
    assert re.search(rf"waiting for a reduction for \d s: step 1: waits for {who}", line), line
    assert re.search(rf"job default: waiting for \d s: step 1: waits for {who}", caplog.text)


@pytest.mark.in_parts
def test_two_lives_of_one_name_are_warned_of_on_all_sides(
    caplog: pytest.LogCaptureFixture, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_check_alone", lambda config: None)  # as if each had its own process
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse:
        heard = said("tft_lighthouse", "two running replicas have the name 'twin'")
        with (
            manager(lighthouse, "twin") as one,
            manager(lighthouse, "twin") as other,
            manager(lighthouse, "third") as third,
        ):
            trainers = [
                said(
                    "tft_algos.manager",
                    f"[{shorten(each.replica_id)}/0 - step 0] two running replicas have the name 'twin'",
                )
                for each in (one, other, third)
            ]
            assert all(each.wait(BOUND.total_seconds()) for each in (heard, *trainers))
            facts = survey({}, lighthouse=lighthouse.address, timeout=BOUND)
            problems = [finding.sentence for finding in findings(facts) if finding.is_problem]
    (line,) = (message for message in caplog.messages if message.startswith("job default: two running replicas"))
    assert len(re.findall(rf"twin:[0-9a-f]{{8}} at localhost:\d+ \(pid {os.getpid()}\)", line)) == 2, line
    assert line in problems


START: Final = """\
import sys
from tft_coord import ManagerServer
with ManagerServer("r:0f3a9c1d-1234-4abc-8def-0123456789ab", "127.0.0.1:9", "localhost", "[::]:0", "s:1", 1):
    sys.stdin.read()
"""


def test_the_manager_server_logs_with_the_time_and_short_ids() -> None:
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", START], **pipes) as process:  # type: ignore[call-overload]
        line = process.stderr.readline()
        process.stdin.close()
        process.wait(BOUND.total_seconds())
    words = (
        r"WARNING tft_coord\.manager_server\.absence: job default: replica r:0f3a9c1d: the lighthouse at 127\.0\.0\.1:9"
    )
    assert re.match(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {words}", line), line


@pytest.mark.in_parts
def test_a_manager_server_that_starts_slowly_is_said(
    caplog: pytest.LogCaptureFixture, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = said("tft_algos.manager", "the manager server has not started for 5 s")
    address = ManagerServer.address
    monkeypatch.setattr(ManagerServer, "address", lambda self: (go_on.wait(BOUND.total_seconds()), address(self))[1])
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse, manager(lighthouse, "slow") as slow:
        slow.start_quorum()
        slow.wait_quorum()
    assert any("the manager server started after" in message for message in caplog.messages)
