"""The debug server of a training process: what it says of the Manager, and its end."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_algos import ConfigError, ManagerClosedError, start_debug_server
from tft_algos.testing import plan_of
from tft_coord.core.types import LossNotice
from tft_pg import ProcessGroupGloo, flush_traces

WAIT_S: Final = 60.0


def ask(url: str) -> Any:
    with urlopen(Request(f"{url}/handler/tft", method="POST"), timeout=WAIT_S) as answer:
        return json.loads(answer.read())


def test_it_reports_the_job_the_quorum_the_step_and_the_phase(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=3, rank=1), job="my-job")
    manager = rig.manager
    with start_debug_server(manager) as server:
        before = ask(server.url)
        assert (before["job"], before["replica_id"], before["group_rank"]) == ("my-job", manager.replica_id, 0)
        assert (before["step"], before["phase"], before["quorum"]) == (0, "between two steps", None)
        manager.start_quorum()
        manager.wait_quorum()
        during = ask(server.url)
        status = manager.status()
        assert (during["phase"], during["attempt"], during["participating_rank"]) == ("computing", 1, 1)
        assert during["quorum"] == {"id": 7, "nonce": status.quorum.nonce}
        assert during["participants"] == list(status.participants)
        manager.allreduce(torch.ones(2)).wait()
        assert manager.should_commit()
        after = ask(server.url)
        assert (after["step"], after["committed"], after["errors"], after["incidents"]) == (1, True, [], [])


def test_it_reports_the_last_errors_and_losses(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=3))
    manager = rig.manager
    began_s = time.time()
    manager.start_quorum()
    manager.wait_quorum()
    plan = manager.status().plan
    manager.report_error(RuntimeError("no room " + 5000 * "x"))
    rig.coordinator.listener(LossNotice(plan.key, plan.replica_ids[2], 1, "its connection ended"))
    with start_debug_server(manager) as server:
        facts = ask(server.url)
    assert facts["errors"][0].startswith("RuntimeError: no room xxx")
    assert len(facts["errors"][0]) == 2000
    texts = [each["text"] for each in facts["incidents"]]
    assert texts[0].startswith("RuntimeError: no room")
    assert any(f"replica {plan.replica_ids[2]} was lost (its connection ended)" in text for text in texts)
    assert {(each["step"], each["quorum_id"]) for each in facts["incidents"]} == {(0, 7)}
    assert all(began_s <= each["time_s"] <= time.time() for each in facts["incidents"])


def test_it_keeps_the_newest_incidents_only(rigs: Any) -> None:
    manager = rigs(plan_of()).manager
    for number in range(40):
        manager.report_error(RuntimeError(f"number {number}"))
    incidents = manager.status().incidents
    assert [each.text for each in incidents] == [f"RuntimeError: number {number}" for number in range(8, 40)]


def test_flight_records_have_the_manager_s_job(rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_JOB_ID", "of the shell")
    rigs(plan_of(), job="my-job")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(trace_dir=tmp_path)
    group.configure(f"127.0.0.1:{store.port}/once", 0, 1)
    group.shutdown()
    assert flush_traces(WAIT_S)
    assert [json.loads(path.read_bytes())["job"] for path in tmp_path.iterdir()] == ["my-job"]


def test_the_shutdown_of_the_manager_ends_it(rigs: Any) -> None:
    manager = rigs(plan_of()).manager
    server = start_debug_server(manager)
    port = int(server.url.rpartition(":")[2])
    manager.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    with pytest.raises(ManagerClosedError):
        start_debug_server(manager)
    server.close()


def test_a_wrong_setting_is_an_error_of_this_package(rigs: Any) -> None:
    manager = rigs(plan_of()).manager
    with pytest.raises(ConfigError, match="means all interfaces, but a debug server has no authentication"):
        start_debug_server(manager, host="0.0.0.0")
    with start_debug_server(manager), pytest.raises(ConfigError, match="has a debug server already"):
        start_debug_server(manager)
