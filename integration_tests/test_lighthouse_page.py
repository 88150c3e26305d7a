"""The lighthouse's page in a real browser, with replicas that do as they are told: what it shows and survives."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from queue import Queue
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration_tests.browser import (
    FOCUSABLE,
    PHONE,
    browsing,
    least_contrast,
    opened,
    reached_by_tab,
    unnamed,
    width_needed,
)
from tft_coord import ManagerClient, ManagerServer, Plan, QuorumKey, RankRequest, Timeouts
from tft_coord.core.types import KillOrder, LeaveRequest
from tft_lighthouse import LighthouseServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LATE: Final = timedelta(seconds=20)
LATE_S: Final = 20.0
SECRET: Final = "s3cret-of-the-job"
QUICK: Final = Timeouts(heartbeat_timeout_ms=2_000, beat_interval_ms=200)
ID: Final = "replica_0:0f3a9c1d-0000-4000-8000-000000000000"
HOSTILE: Final = '<img src=x onerror="window.hacked=1">\'"><script>window.hacked=1</script>'

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@contextmanager
def serving(**settings: Any) -> Iterator[LighthouseServer]:
    usual: dict[str, Any] = {"bind": "127.0.0.1:0", "quorum_tick_ms": 20, "http_bind": "127.0.0.1:0"}
    with LighthouseServer(**(usual | settings)) as lighthouse:
        yield lighthouse


class Replica:
    """A replica group of one rank, which keeps what it is told."""

    def __init__(
        self, lighthouse: LighthouseServer, name: str = ID, *, job: str = "job", token: str | None = None
    ) -> None:
        self.told: Queue[Any] = Queue()
        self.held: QuorumKey | None = None
        self._members = 0
        self._server = ManagerServer(
            name,
            str(lighthouse.address),
            "127.0.0.1",
            "127.0.0.1:0",
            str(lighthouse.address).removeprefix("http://"),  # members dial it, and something answers there
            1,
            job=job,
            timeouts=QUICK,
            token=token,
            in_process=True,
        )
        self._client = ManagerClient(
            self._server.address(), LATE, group_rank=0, token=token, timeouts=QUICK, listener=self.told.put
        )

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._server.shutdown()

    def ask(self, step: int = 0, members: int = 1) -> None:
        """Ask, as a trainer does in each step, until the quorum has that many members."""
        ends_s = time.monotonic() + LATE_S
        while True:
            answer = self._client.quorum(0, RankRequest(step=step, lineage=1, held=self.held), LATE)
            self.held = answer.key
            if isinstance(answer, Plan):
                self._members = answer.replica_world_size
            if self._members >= members:
                return
            assert time.monotonic() < ends_s, f"a quorum of {self._members}"
            time.sleep(0.02)

    def hears(self, kind: type) -> Any:
        while not isinstance(news := self.told.get(timeout=LATE_S), kind):
            pass
        return news


@contextmanager
def a_job(lighthouse: LighthouseServer, *names: str, job: str = "job", step: int = 7) -> Iterator[list[Replica]]:
    """Run replicas in one quorum."""
    with ExitStack() as stack:
        found = [stack.enter_context(Replica(lighthouse, name, job=job)) for name in names]
        asks = [threading.Thread(target=each.ask, args=(step, len(names))) for each in found]
        for each in asks:
            each.start()
        for each in asks:
            each.join(LATE_S)
        ends_s = time.monotonic() + LATE_S
        while not lanes(lighthouse, job).keys() >= set(names):  # a look must have seen them before they go on
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        yield found


def lanes(lighthouse: LighthouseServer, job: str) -> dict[str, str]:
    """What the replicas of a job that are in a quorum do, as the timeline has it."""
    address = f"{lighthouse.http_address}/api/v1/timeline?{urllib.parse.urlencode({'job': job})}"
    try:
        with urllib.request.urlopen(address, timeout=LATE_S) as answer:
            newest = {lane["replica_id"]: lane["runs"][-1][1] for lane in json.load(answer)["lanes"]}
    except urllib.error.HTTPError:  # it has not looked yet
        return {}
    return {name: state for name, state in newest.items() if state in ("training", "healing")}


def shown(page: Page, selector: str, text: str) -> None:
    page.locator(selector).filter(has_text=text).first.wait_for()


# --- what it shows ----------------------------------------------------------------------------------------------------


def test_an_empty_lighthouse_says_how_to_start_a_replica_and_shows_the_first(browser: Browser) -> None:
    with serving() as lighthouse, opened(browser, str(lighthouse.http_address)) as page:
        shown(page, "#empty", "No replica has connected yet")
        assert f"export TFT_LIGHTHOUSE={lighthouse.address}\n" in page.locator("#how-to").inner_text()
        assert page.locator("#job").is_hidden()
        with a_job(lighthouse, ID):
            shown(page, "#replicas tbody tr", "replica_0:0f3a9c1d")
            assert page.locator("#empty").is_hidden()
            assert page.title() == "training | job | tft lighthouse"
            shown(page, "#sentence", "1 member trains")
            assert page.locator("#figures dd").first.inner_text() == "7"


def test_a_wait_is_a_sentence(browser: Browser) -> None:
    with serving(min_replicas=2) as lighthouse, Replica(lighthouse, ID) as replica:
        asks = threading.Thread(target=replica.ask)
        asks.start()
        try:
            with opened(browser, str(lighthouse.http_address)) as page:
                shown(page, "#sentence", "Waiting. 1 of min_replicas 2 have asked; no other replica is known")
                shown(page, "#lanes li", "replica_0:0f3a9c1d")
                page.locator("rect.lane-waiting").first.wait_for(state="attached")
                page.get_by_text("waits", exact=True).wait_for()
                with a_job(lighthouse, "replica_1:00000000-0000-4000-8000-000000000000", step=0):
                    shown(page, "#sentence", "1 member trains. 1 replica receives the live state from a peer: replica_")
        finally:
            asks.join(LATE_S)


def test_a_page_that_is_opened_late_shows_what_was_and_a_loss_is_told(browser: Browser) -> None:
    names = [f"replica_{index}:0000000{index}-0000-4000-8000-000000000000" for index in range(2)]
    with serving() as lighthouse, a_job(lighthouse, *names) as (first, second):
        second.__exit__()
        with opened(browser, str(lighthouse.http_address)) as page:
            shown(page, "#incidents .kind-loss h4", "Lost: replica_1:00000001")
            shown(page, "#incidents .kind-start h4", "Start of the job")
            page.locator("#lanes li").filter(has_text="replica_1").locator("rect.lane-gone").wait_for(state="attached")
            assert page.locator("#lanes rect.lane-training").count() == 2
            shown(page, "#incidents .kind-loss .phases", "detect")
            shown(page, "#replicas .state-lost", "lost")
            assert page.get_by_role("button", name="Kill replica_1:00000001").is_disabled()
            first.ask(8)
            shown(page, "#incidents .kind-loss .phases", "quorum")


def test_several_jobs_are_a_table_and_the_address_of_the_page_names_one(browser: Browser) -> None:
    with serving() as lighthouse, a_job(lighthouse, "a:1", job="first"), a_job(lighthouse, "b:1", job="my job #2&x=1"):
        with opened(browser, str(lighthouse.http_address)) as page:
            shown(page, "#job-title", "Job first")
            page.get_by_role("link", name="my job #2&x=1").click()
            shown(page, "#job-title", "Job my job #2&x=1")
            shown(page, "#lanes", "b:1")
            assert page.locator("#lanes li").count() == 1
            address = page.url
        with opened(browser, address) as page:
            shown(page, "#job-title", "Job my job #2&x=1")
            page.keyboard.press("Tab")
            page.keyboard.press("Enter")  # the link that skips the header is no other job
            shown(page, "#job-title", "Job my job #2&x=1")


def test_of_many_replicas_a_hundred_are_shown_and_the_others_are_found(browser: Browser) -> None:
    with serving() as lighthouse, a_job(lighthouse, "replica_0:1"), opened(browser, "about:blank") as page:

        def more(route: Any) -> None:
            answer = route.fetch()
            body = answer.json()
            (job,) = body["jobs"]
            (one,) = job["replicas"]
            job["replicas"] = [one | {"replica_id": f"replica_{index}:1", "rank": index} for index in range(300)]
            job["replicas"][250]["state"] = "healing"
            route.fulfill(response=answer, json=body)

        page.route("**/api/v1/status", more)
        page.goto(str(lighthouse.http_address))
        shown(page, "#replicas", "100 of 300 are shown")
        assert page.locator("#replicas tbody tr").count() == 100
        shown(page, "#replicas .state-healing", "healing")
        page.get_by_label("Find a replica").fill("replica_299")
        shown(page, "#replicas", "1 of 300 are shown")


# --- hostile text -----------------------------------------------------------------------------------------------------


def test_text_from_replicas_is_text(browser: Browser) -> None:
    names = (f"{HOSTILE}:1", f"\u202e{'x' * 200}:2" if "\u202e".isprintable() else f"{'x' * 200}:2")
    with (
        serving() as lighthouse,
        a_job(lighthouse, *names, job=HOSTILE) as (first, _),
        opened(browser, str(lighthouse.http_address), viewport=PHONE) as page,
    ):
        shown(page, "#job-title", HOSTILE)
        shown(page, "#replicas tbody th", HOSTILE)
        shown(page, "#lanes", HOSTILE)
        shown(page, "#incidents", HOSTILE)
        page.get_by_role("button", name=f"Drain {HOSTILE}:1").click()
        page.get_by_label("Reason, for the logs").fill(HOSTILE)
        page.locator("#change-ok").click()
        assert first.hears(LeaveRequest).reason.startswith(HOSTILE)
        first.__exit__()
        shown(page, "#incidents .incident", "Lost")
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.hacked") is None
        assert width_needed(page) <= PHONE["width"]


def test_hostile_values_in_answers_are_text_too(browser: Browser) -> None:
    """A lighthouse that was taken over, or a field that comes from elsewhere one day, makes no markup either."""
    with serving() as lighthouse, a_job(lighthouse, "a:1") as (only,):

        def poisoned(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: poisoned(each) for name, each in value.items()}
            if isinstance(value, list):
                return [poisoned(each) for each in value]
            return HOSTILE if isinstance(value, str) else value

        def poison(route: Any) -> None:
            answer = route.fetch()
            body = poisoned(answer.json())
            for job in body.get("jobs", []):
                job.update(warnings=[HOSTILE], waits={"sentence": HOSTILE, "lasted_ms": 5_000}, state="waiting")
                job["quorum"]["broken"] = HOSTILE
                job["replicas"][0].update(reason=HOSTILE, gone_ms=1, phase=HOSTILE, phase_ms=1, address=HOSTILE)
            route.fulfill(response=answer, json=body)

        with opened(browser, "about:blank") as page:
            page.route("**/api/v1/status", poison)
            page.route("**/api/v1/timeline*", poison)
            page.goto(str(lighthouse.http_address))
            shown(page, "#sentence", HOSTILE)
            shown(page, "#warnings", HOSTILE)
            shown(page, "#replicas tbody", HOSTILE)
            only.ask(8)
            assert page.locator("main img, main script").count() == 0
            assert page.evaluate("window.hacked") is None


# --- drain and kill ---------------------------------------------------------------------------------------------------


def test_a_kill_names_replica_and_job_and_asks_first(browser: Browser) -> None:
    with (
        serving() as lighthouse,
        a_job(lighthouse, ID) as (replica,),
        opened(browser, str(lighthouse.http_address)) as page,
    ):
        page.get_by_role("button", name="Kill replica_0:0f3a9c1d").click()
        dialog = page.get_by_role("dialog", name="Kill replica_0:0f3a9c1d of job job?")
        dialog.wait_for()
        assert page.evaluate("document.activeElement.textContent") == "Cancel"
        assert page.get_by_label("Shared secret").is_hidden()
        page.keyboard.press("Enter")
        dialog.wait_for(state="hidden")
        page.get_by_role("button", name="Kill replica_0:0f3a9c1d").click()
        page.keyboard.press("Escape")
        dialog.wait_for(state="hidden")
        assert page.evaluate("document.activeElement.textContent") == "Kill", "the focus goes back"
        assert not any(isinstance(each, KillOrder) for each in replica.told.queue)
        page.get_by_role("button", name="Kill replica_0:0f3a9c1d").click()
        dialog.get_by_label("Reason, for the logs").fill("it hangs")
        dialog.get_by_role("button", name="Kill replica_0:0f3a9c1d").click()
        assert replica.hears(KillOrder).message.startswith("it hangs (asked by 127.0.0.1:")
        shown(page, "#news", "replica_0:0f3a9c1d is asked to end.")


def test_a_drain_that_the_lighthouse_refuses_says_why(browser: Browser) -> None:
    with (
        serving() as lighthouse,
        a_job(lighthouse, ID) as (replica,),
        opened(browser, str(lighthouse.http_address)) as page,
    ):
        page.get_by_role("button", name="Drain replica_0:0f3a9c1d").click()
        replica.__exit__()
        page.locator("#replicas .state-lost").wait_for()
        page.locator("#change-ok").click()
        shown(page, "#change-error", "Not done: ")
        assert page.locator("#change-ok").is_enabled()


def test_with_a_secret_a_drain_asks_for_it_and_keeps_it_in_memory_only(browser: Browser) -> None:
    with serving(token=SECRET) as lighthouse, Replica(lighthouse, ID, token=SECRET) as replica:
        replica.ask()
        login = {"username": "me", "password": SECRET}
        with opened(browser, str(lighthouse.http_address), http_credentials=login) as page:
            page.get_by_role("button", name="Drain replica_0:0f3a9c1d").click()
            secret, send = page.get_by_label("Shared secret"), page.locator("#change-ok")
            send.click()
            assert page.locator("#change").is_visible(), "an empty secret is not sent"
            secret.fill("wrong")
            send.click()
            shown(page, "#change-error", "The lighthouse has another secret")
            assert secret.input_value() == ""
            secret.fill("it has spaces")
            send.click()
            shown(page, "#change-error", "without spaces")
            secret.fill(SECRET)
            send.click()
            replica.hears(LeaveRequest)
            page.locator("#change").wait_for(state="hidden")
            page.get_by_role("button", name="Kill replica_0:0f3a9c1d").click()
            assert secret.input_value() == SECRET, "it is asked for once"
            kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
            assert SECRET not in kept
            page.reload()
            page.get_by_role("button", name="Kill replica_0:0f3a9c1d").click()
            assert secret.input_value() == ""


def test_without_the_secret_the_page_shows_nothing(browser: Browser) -> None:
    with serving(token=SECRET) as lighthouse, opened(browser, "about:blank") as page:
        answer = page.request.get(str(lighthouse.http_address))
        assert answer.status == 401
        assert "<script" not in answer.text()


# --- the connection ---------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_told_and_a_restarted_lighthouse_is_followed(browser: Browser) -> None:
    with serving() as lighthouse:
        address = str(lighthouse.http_address)
        place = address.removeprefix("http://")
        with opened(browser, address) as page:
            with a_job(lighthouse, ID):
                shown(page, "#replicas", "replica_0:0f3a9c1d")
                shown(page, "#incidents", "Start of the job")
            lighthouse.shutdown()
            shown(page, "#connection", "No connection to the lighthouse since")
            assert re.search(r"since \d\d:\d\d:\d\d \(", page.locator("#connection").inner_text())
            shown(page, "#replicas", "replica_0:0f3a9c1d")
            assert page.get_by_role("button", name="Kill replica_0:0f3a9c1d").is_disabled()
            with serving(http_bind=place) as again, a_job(again, "replica_9:1", job="next"):
                page.locator("#connection").wait_for(state="hidden")
                shown(page, "#job-title", "Job next")
                shown(page, "#about", "It was started again at")
                shown(page, "#lanes", "replica_9:1")
                shown(page, "#incidents", "replica_9:1")
                assert page.get_by_text("replica_0:0f3a9c1d").count() == 0


# --- for everybody ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 900}, PHONE], ids=["wide", "phone"])
def test_it_is_read_on_a_phone_in_the_dark_by_keyboard_and_by_a_screen_reader(
    browser: Browser, scheme: Any, viewport: Any
) -> None:
    names = [f"replica_{index}:0000000{index}-0000-4000-8000-000000000000" for index in range(2)]
    with serving() as lighthouse, a_job(lighthouse, *names) as (_, second), a_job(lighthouse, "b:1", job="other"):
        second.__exit__()
        with opened(browser, str(lighthouse.http_address), viewport=viewport, color_scheme=scheme) as page:
            shown(page, "#incidents .kind-loss", "replica_1:00000001")
            page.locator("#replicas .state-lost").wait_for()
            shown(page, "#lanes", "replica_1:00000001")
            assert width_needed(page) <= viewport["width"]
            assert unnamed(page) == []
            ratio, which = least_contrast(page)
            assert ratio >= 4.5, which
            visible = [each for each in page.locator(FOCUSABLE).all() if each.is_visible()]
            assert len(reached_by_tab(page)) == len(visible) >= 5
            assert page.locator("h1").count() == 1
            assert all(each.locator("caption").count() == 1 for each in page.locator("table").all())
            assert page.locator("#sentence").get_attribute("aria-live") == "polite"
            assert page.locator("#connection").get_attribute("role") == "alert"
            words = page.locator("#lanes svg").last.get_attribute("aria-label")
            assert re.search(
                r"^replica_1:00000001 is gone since \d\d:\d\d:\d\d\. In this time: .*training ", words or ""
            )
            page.get_by_role("button", name="Kill replica_0:00000000").click()
            assert unnamed(page) == []
            assert width_needed(page) <= viewport["width"]
            ratio, which = least_contrast(page)
            assert ratio >= 4.5, which


def test_the_focus_stays_while_the_page_is_live(browser: Browser) -> None:
    names = [f"replica_{index}:0000000{index}-0000-4000-8000-000000000000" for index in range(3)]
    with serving() as lighthouse, a_job(lighthouse, *names[:2]), opened(browser, str(lighthouse.http_address)) as page:
        page.get_by_role("button", name="Drain replica_1:00000001").focus()
        with Replica(lighthouse, names[2]):
            shown(page, "#replicas", "replica_2:00000002")
            assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Drain replica_1:00000001"
