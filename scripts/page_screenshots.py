"""Make the pictures of docs/lighthouse-page.md from a real job: a lighthouse without replicas, a job that trains, a
fault, and a replica that heals, each for a wide window and a phone.

It takes about three minutes, and needs Chromium and Playwright. A replica heals within a second, so the page's view of
that moment is held: from then on the page gets no newer answer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

from integration_tests.page_job import PageJob  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER: Final = ROOT / "docs/_static/page"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
TRAINS_S: Final = 150.0  # before the fault, so that the lanes show something
AFTER_FAULT_S: Final = 6.0
MOST_BYTES: Final = 100_000
COLOURS: Final = 160


def views(browser: Browser, address: str) -> dict[str, Page]:
    """Open the page for each window."""
    found = {}
    for name, settings in {
        "1280": {"viewport": WIDE},
        "390": {"viewport": PHONE},
        "1280-dark": {"viewport": WIDE, "color_scheme": "dark"},
    }.items():
        found[name] = browser.new_context(**settings).new_page()  # type: ignore[arg-type]
        found[name].goto(address)
    return found


def shoot(pages: dict[str, Page], name: str, *, full: bool = True) -> None:
    """Save a picture of each window; of the dark one only where the documentation shows it."""
    for window, page in pages.items():
        if "dark" in window and name != "healing":
            continue
        file = FOLDER / f"{name}-{window}.png"
        page.screenshot(path=file, full_page=full)
        Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
        print(file.relative_to(ROOT), file.stat().st_size)
        if file.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{file} has more than {MOST_BYTES} bytes; show less on it")


def hold_when(page: Page, shows: Callable[[dict[str, Any]], bool]) -> None:
    """Give the page no newer answers than the first status that `shows` accepts."""
    held: dict[str, Any] = {}

    def answer(route: Any) -> None:
        if "body" not in held:
            response = route.fetch()
            body = response.json()
            if shows(body):
                held["body"] = body
            route.fulfill(response=response, json=body)
        else:
            route.fulfill(json=held["body"])

    def answer_timeline(route: Any) -> None:
        if "body" in held and "timeline" not in held:
            held["timeline"] = route.fetch().json()
        if "timeline" in held:
            route.fulfill(json=held["timeline"])
        else:
            route.continue_()

    page.route("**/api/v1/status", answer)
    page.route("**/api/v1/timeline?*", answer_timeline)


def heals(status: dict[str, Any]) -> bool:
    """Return whether a replica heals."""
    return any(each["state"] == "healing" for job in status["jobs"] for each in job["replicas"])


def main() -> None:
    """Make all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright, PageJob(Path(folder)) as job:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        pages = views(browser, job.page)
        for page in pages.values():
            page.set_default_timeout(120_000)
            page.locator("#empty").wait_for()
        shoot(pages, "empty", full=False)
        job.start_all()
        for page in pages.values():
            page.locator("#sentence").filter(has_text="3 members train").wait_for()
        ends_s = time.monotonic() + TRAINS_S
        while time.monotonic() < ends_s:
            pages["1280"].wait_for_timeout(1_000)
        shoot(pages, "healthy")
        job.kill(1)
        for page in pages.values():
            page.locator("#replicas .state-lost").wait_for()
            page.wait_for_timeout(AFTER_FAULT_S * 1_000 / len(pages))
        shoot(pages, "fault")
        for page in pages.values():
            hold_when(page, heals)
        job.start(1)
        for page in pages.values():
            page.locator("#replicas .state-healing").wait_for()
            page.locator("#lanes rect.lane-healing").last.wait_for(state="attached")
        shoot(pages, "healing")
        browser.close()


if __name__ == "__main__":
    main()
