"""The plan of `tft chaos`, its choice of replicas, and its report."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import Any

import psutil
import pytest

from tft_suite.errors import ConfigError
from tft_suite.launch.chaos import Chaos, Disturbance, is_this_host, process_here
from tft_suite.launch.faults import (
    ChaosSettings,
    Fault,
    FaultKind,
    Progress,
    draw_faults,
    goodput_text,
    kinds_of,
    pick_victim,
)


def test_a_seed_gives_one_plan_and_another_seed_another_one() -> None:
    settings = ChaosSettings(rate=30, duration_s=600)
    assert draw_faults(settings) == draw_faults(settings)
    assert draw_faults(settings) != draw_faults(ChaosSettings(rate=30, duration_s=600, seed=1))


def test_the_rate_is_kept_on_average_and_each_kind_comes() -> None:
    faults = draw_faults(ChaosSettings(rate=30, duration_s=6_000))
    assert 2_700 < len(faults) < 3_300
    assert [each.at_s for each in faults] == sorted(each.at_s for each in faults)
    assert all(0 < each.at_s < 6_000 for each in faults)
    assert {each.kind for each in faults} == {FaultKind.KILL, FaultKind.STOP, FaultKind.SLOW}, "a cut needs root"


def test_only_the_wanted_kinds_are_drawn() -> None:
    settings = ChaosSettings(kinds=kinds_of("kill, kill"), duration_s=600)
    assert {each.kind for each in draw_faults(settings)} == {FaultKind.KILL}


def test_a_victim_is_picked_among_the_undisturbed_ones_and_some_are_spared() -> None:
    def pick(pick: float, disturbed: list[str], spare: int) -> str | None:
        return pick_victim(Fault(0, FaultKind.KILL, pick), ["b", "a", "c"], disturbed, spare)

    assert [pick(each, [], 1) for each in (0.0, 0.5, 0.999999, 1.0)] == ["a", "b", "c", "c"]
    assert pick(0.0, ["a"], 1) == "b"
    assert pick(0.0, ["a", "b"], 1) is None
    assert pick(0.0, ["a", "b"], 0) == "c"
    assert pick(0.0, [], 3) is None


def test_goodput_is_what_was_trained_with_faults_as_a_part_of_what_was_trained_before() -> None:
    before = Progress(steps=50, batches=200, seconds=10)
    during = Progress(steps=120, batches=360, seconds=20)
    assert goodput_text(before, during) == (
        "goodput 90.0 %; with faults: 120 steps and 360 batches of replicas in 20 s (18.00 batches/s); "
        "before: 50 steps and 200 batches of replicas in 10 s (20.00 batches/s)"
    )
    assert goodput_text(Progress(0, 0, 10), during).startswith("goodput unknown")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rate": 0}, "--rate is 0"),
        ({"rate": float("nan")}, "--rate is nan"),
        ({"duration_s": 0}, "--duration is 0"),
        ({"slowness": 1}, "--slowness is 1"),
        ({"spare": -1}, "--spare is -1"),
        ({"kinds": ()}, "--kinds names no fault"),
    ],
)
def test_settings_check_themselves(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ChaosSettings(**values)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match="'kil' is no fault; give some of kill, stop, slow, cut"):
        kinds_of("kil,cut")


def test_a_process_is_a_victim_only_if_the_address_is_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = process_here(f"localhost:{port}", os.getpid())
        assert found is not None
        assert found.pid == os.getpid()
        for address in (f"localhost:{port - 1}", f"host.invalid:{port}", "nonsense", ""):
            assert process_here(address, os.getpid()) is None
        for pid in (0, 1, -1, 2**31 - 1):
            assert process_here(f"localhost:{port}", pid) is None
    assert is_this_host("127.0.0.1")
    assert not is_this_host("192.0.2.1")


def chaos_at(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any]) -> Chaos:
    monkeypatch.setattr("tft_suite.launch.chaos.fetch", lambda *_, **__: status)
    return Chaos(ChaosSettings(), ["head:29511"], {}, "job", print)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"jobs": []}, "no replica of job job trains on this host"),
        ({}, "head:29511 does not answer like a lighthouse"),
        ({"jobs": [{"name": "job", "step": "x", "quorum": None, "replicas": []}]}, "does not answer like a lighthouse"),
        (
            {
                "jobs": [
                    {
                        "name": "job",
                        "step": 3,
                        "quorum": None,
                        "replicas": [{"replica_id": "a", "state": "training", "address": "", "pid": os.getpid()}],
                    }
                ]
            },
            "no replica of job job trains on this host",
        ),
    ],
)
def test_without_replicas_here_nothing_is_broken(
    status: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said):
        chaos_at(monkeypatch, status).run()


def test_a_stopped_process_goes_on_at_the_end_of_its_fault() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            process = psutil.Process(child.pid)
            stop = Disturbance("a", process, FaultKind.STOP, 0.0, 5.0)
            assert stop.keep_up(1.0, 0.5)
            while process.status() != psutil.STATUS_STOPPED:
                assert child.poll() is None
            assert not stop.keep_up(5.0, 0.5)
            while process.status() == psutil.STATUS_STOPPED:
                assert child.poll() is None
            slow = Disturbance("a", process, FaultKind.SLOW, 0.0, 5.0)
            assert [(slow.keep_up(at_s, 0.5), slow.is_stopped) for at_s in (1.01, 1.06, 1.11, 5.0)] == [
                (True, True),
                (True, False),
                (True, True),
                (False, False),
            ]
        finally:
            child.kill()
