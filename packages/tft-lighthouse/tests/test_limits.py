"""The limits of a running lighthouse: what a client that is refused learns, and the lines of the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

import pytest

from tft_coord import (
    ConfigError,
    CoordinationError,
    LighthouseClient,
    ManagerClient,
    ManagerServer,
    Plan,
    RankRequest,
    RefusedError,
    Timeouts,
)
from tft_coord.lighthouse import Refusal
from tft_lighthouse import JobSettings, LighthouseServer, Limits, log

LATE = timedelta(seconds=30)
TIMEOUTS = Timeouts(heartbeat_timeout_ms=5_000, beat_interval_ms=500)


class Replica:
    """A replica group of one rank, whose trainer lives until it is closed."""

    def __init__(self, lighthouse: LighthouseServer, name: str, job: str = "job") -> None:
        self._server = ManagerServer(
            name,
            str(lighthouse.address),
            "127.0.0.1",
            "127.0.0.1:0",
            f"{name}:1",
            1,
            job=job,
            timeouts=TIMEOUTS,
            in_process=True,
        )
        self._client = ManagerClient(self._server.address(), LATE, group_rank=0, timeouts=TIMEOUTS)

    def ask(self) -> Plan:
        return self._client.quorum(0, RankRequest(step=1, lineage=1), LATE)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._server.shutdown()


def refused(lighthouse: LighthouseServer, name: str, job: str) -> str:
    with Replica(lighthouse, name, job) as replica, pytest.raises(CoordinationError) as caught:
        replica.ask()
    return str(caught.value)


@pytest.mark.parametrize(
    ("limits", "jobs", "job", "says"),
    [
        (
            Limits(max_jobs=1),
            {},
            "other",
            "this lighthouse knows 1 jobs, the most that it may serve (max_jobs 1). Raise",
        ),
        (Limits(max_replicas=1), {}, "job", "job 'job' has 1 connected replicas, the most that it may have"),
        (
            Limits(),
            {"job": JobSettings(max_replicas=1)},
            "job",
            "Raise max_replicas of the lighthouse, for all jobs or",
        ),
        (
            Limits(max_streams=1),
            {},
            "job",
            "serves 1 streams and waiting calls, the most that it may serve (max_streams",
        ),
    ],
)
def test_a_replica_without_room_reads_the_limit_and_what_to_do(
    limits: Limits, jobs: dict[str, JobSettings], job: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        LighthouseServer("127.0.0.1:0", quorum_tick_ms=20, limits=limits, jobs=jobs) as lighthouse,
        Replica(lighthouse, "a") as first,
        caplog.at_level(logging.WARNING, "tft_lighthouse"),
    ):
        first.ask()
        for name in "bcd":
            assert says in refused(lighthouse, name, job)
        lines = [record for record in caplog.records if "a stream is refused (full)" in record.getMessage()]
        (line,) = [each for each in lines if each.name == "tft_lighthouse"]  # of three, and of their many dials
        assert says in line.getMessage()
        assert getattr(line, "job", None) == (job if limits.max_streams > 1 else None)


def test_refusals_of_one_kind_are_one_line_whatever_names_they_come_under(caplog: pytest.LogCaptureFixture) -> None:
    with LighthouseServer("127.0.0.1:0") as lighthouse:
        shell = lighthouse._shell
        assert shell is not None
        for kind in (Refusal.DUPLICATE, Refusal.MALFORMED):
            for name in "abc":
                shell._log_refusal("a stream", kind, f"replica {name} is refused", f"job of {name}")
    found = [line.partition(":")[0] for line in caplog.messages if "a stream is refused" in line]
    assert found == ["job job of a", "job job of a"]


def test_a_call_of_torchft_counts_as_a_stream() -> None:
    with (
        LighthouseServer("127.0.0.1:0", limits=Limits(max_streams=1)) as lighthouse,
        Replica(lighthouse, "a", "other") as first,
        LighthouseClient(lighthouse.address, LATE) as client,
    ):
        first.ask()
        with pytest.raises(RefusedError, match="max_streams 1"):
            client.quorum("b", LATE, step=1)


def test_a_message_that_is_too_large_is_refused_with_the_limit() -> None:
    with (
        LighthouseServer("127.0.0.1:0", max_message_bytes=64 * 1024) as lighthouse,
        LighthouseClient(lighthouse.address, LATE) as client,
    ):
        with pytest.raises(RefusedError) as caught:
            client.quorum("a", LATE, step=1, data={"note": "x" * 65_520})
        assert "larger than the receiver takes" in str(caught.value)
        assert "max_message_bytes" in str(caught.value)
        assert len(client.quorum("a", LATE, step=1).participants) == 1


@pytest.mark.parametrize("most", [1, 2**30])
def test_a_limit_for_messages_out_of_range_is_refused(most: int) -> None:
    with pytest.raises(ConfigError, match=f"max_message_bytes is {most}; give 65536 to 67108864 bytes"):
        LighthouseServer("127.0.0.1:0", max_message_bytes=most)


def a_log(seconds: Callable[[], float], caplog: pytest.LogCaptureFixture) -> log.Refusals:
    caplog.set_level(logging.WARNING, "tft_lighthouse")
    return log.Refusals(seconds)


def test_refusals_for_one_limit_are_one_line_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    refusals = a_log(lambda: now_s, caplog)
    for number in range(5):
        refusals.log("a stream", Refusal.FULL, f"replica {number} can't join", job="job", about="job is full")
    now_s = 61.0
    refusals.log("a stream", Refusal.FULL, "replica 9 can't join", job="job", about="job is full")
    assert caplog.messages == [
        "job job: a stream is refused (full): replica 0 can't join",
        "job job: a stream is refused (full): replica 9 can't join (4 others were refused for this since the last such "
        "line)",
    ]


def test_a_flood_of_names_leaves_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    refusals = a_log(lambda: 0.0, caplog)
    for number in range(3 * log.REFUSALS_KEPT):
        refusals.log("a stream", Refusal.MALFORMED, f"replica {number} is odd")
    assert len(refusals._logged) == log.REFUSALS_KEPT
