"""The lighthouse's page with a real job and real kills behind it: the fault, the healing, and the incident's phases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from integration_tests.browser import browsing, opened
from integration_tests.page_job import NUM_REPLICAS, PageJob

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

STARTS_MS: Final = 120_000  # three processes that import torch, on a machine that is busy

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


def of_state(page: Page, state: str) -> Locator:
    return page.locator(f"#replicas .state-{state}")


def phases(incident: Locator) -> set[str]:
    return set(incident.locator(".phases .name").all_inner_texts())


def trains(page: Page, members: int) -> None:
    page.locator("#sentence").filter(has_text=f"{members} members train. No replica waits").wait_for(timeout=STARTS_MS)


def test_a_kill_of_a_real_replica_is_seen_with_its_fault_its_healing_and_its_phases(
    browser: Browser, tmp_path: Path
) -> None:
    with PageJob(tmp_path) as job, opened(browser, job.page) as page:
        page.locator("#empty").wait_for()
        job.start_all()
        trains(page, NUM_REPLICAS)
        first_step = int(page.locator("#figures dd").first.inner_text())
        page.wait_for_function(
            "step => Number(document.querySelector('#figures dd').textContent) > step", arg=first_step
        )
        victim = page.locator("#replicas tbody th").filter(has_text="replica_1:").inner_text()

        job.kill(1)
        loss = page.locator("#incidents .kind-loss").first
        loss.wait_for()
        loss.filter(has_text=f"Lost: {victim}").wait_for()
        loss.filter(has_text="resume").filter(has_text="lasted").wait_for()
        assert phases(loss) >= {"detect", "quorum", "resume"}
        assert re.search(r"quorum \d+ → \d+ · members 3 → 2", loss.inner_text())
        assert "rank 0 ended: its process ended" in loss.inner_text()
        of_state(page, "lost").wait_for()
        trains(page, NUM_REPLICAS - 1)
        gone = page.locator("#lanes li").filter(has_text=victim)
        gone.locator("rect.lane-gone").wait_for(state="attached")
        gone.locator("rect.lane-training").first.wait_for(state="attached")

        joins = page.locator("#incidents .kind-join").count()
        job.start(1)
        page.wait_for_function(
            "count => document.querySelectorAll('#incidents .kind-join').length > count", arg=joins, timeout=STARTS_MS
        )
        join = page.locator("#incidents .kind-join").first
        join.filter(has_text="Joined: replica_1:").filter(has_text="heal").filter(has_text="lasted").wait_for()
        assert phases(join) >= {"resume", "heal"}
        trains(page, NUM_REPLICAS)
        back = page.locator("#lanes li").filter(has_text="replica_1:").last
        back.locator("rect.lane-healing").first.wait_for(state="attached")
        assert re.search(r"\d+ now, \d+ to 3", page.get_by_role("group", name="participants").inner_text())


@pytest.mark.in_parts
def test_a_replica_that_is_killed_and_drained_from_the_page_ends(browser: Browser, tmp_path: Path) -> None:
    with PageJob(tmp_path) as job, opened(browser, job.page) as page:
        job.start_all()
        trains(page, NUM_REPLICAS)
        for what, replica, kind in (("Kill", 0, "loss"), ("Drain", 2, "leave")):
            page.get_by_role("button", name=f"{what} replica_{replica}:").click()
            page.get_by_label("Reason, for the logs").fill("from the page")
            page.locator("#change-ok").click()
            page.locator(f"#incidents .kind-{kind}").filter(has_text=f"replica_{replica}:").wait_for(timeout=STARTS_MS)
            assert "from the page" in (tmp_path / f"replica_{replica}.log").read_text()
            while not job.has_ended(replica):
                page.wait_for_timeout(50)
