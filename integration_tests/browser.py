"""A real browser for tests of pages: Debian's Chromium, driven by Playwright.

Without one the tests are skipped with the reason, or fail if TFT_NEED_BROWSER=1, which .ci/run sets.

Law of this file: starting and ending the browser, and questions that any page can be asked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NEED: Final = "TFT_NEED_BROWSER"
WIDE: Final = {"width": 1280, "height": 900}
PHONE: Final = {"width": 390, "height": 844}
WITHIN_MS: Final = 30_000
FOCUSABLE: Final = "a[href], button:not([disabled]), input, [tabindex='0']"

# The contrast of each element that has text of its own, by WCAG's formula, with the background that is behind it.
CONTRASTS: Final = """
() => {
  const channels = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const found = channels(getComputedStyle(each).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0] : [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.disabled || element.closest(".unseen, noscript")) continue;
    const style = getComputedStyle(element);
    const colour = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(channels(colour)), light(behind(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), element.tagName, element.textContent.slice(0, 40)]);
  }
  return found;
}
"""


def why_none() -> str | None:
    """Return why there is no browser here, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError:
        return "Playwright is not installed; run make"
    return None if shutil.which("chromium") else "chromium is not installed; apt-get install chromium"


@contextmanager
def browsing() -> Iterator[Browser]:
    """Run a browser without a window. It ends with the context."""
    reason = why_none()
    if reason is not None:
        if os.environ.get(NEED) == "1":
            pytest.fail(f"{NEED} is 1, and {reason}")
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, address: str, **settings: Any) -> Iterator[Page]:
    """Open a page in a fresh profile. Raises: AssertionError: the page logged an error or a broken policy, or a script
    of it failed."""
    context = browser.new_context(**({"viewport": WIDE} | settings))
    page = context.new_page()
    page.set_default_timeout(WITHIN_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: errors.append(message.text) if message.type == "error" and is_own(message.text) else None,
    )
    try:
        page.goto(address)
        yield page
    finally:
        page.unroute_all(behavior="ignoreErrors")  # a handler may be in the middle of a request
        context.close()
    assert errors == []


def is_own(text: str) -> bool:
    """Return whether an error is the page's own; the browser itself logs each request that fails."""
    return not text.startswith("Failed to load resource")


def unnamed(page: Page) -> list[str]:
    """Return what a screen reader meets in a page and can't name: roles that need a name and have none."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    needs = {"button", "link", "textbox", "searchbox", "image", "img", "table", "dialog", "article", "heading", "alert"}
    seen = [node for node in nodes if not node["ignored"]]
    without = [node for node in seen if not node.get("name", {}).get("value", "").strip()]
    return [node["role"]["value"] for node in without if node["role"]["value"] in needs - {"alert"}]


def reached_by_tab(page: Page, most: int = 200) -> list[str]:
    """Return what the tab key reaches, in its order, as HTML. Each must show that it has the focus."""
    page.evaluate("document.activeElement.blur()")
    found: list[str] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        at = page.evaluate(
            "(() => { const at = document.activeElement; if (at === document.body) return null;"
            " return [at.outerHTML.slice(0, 200), getComputedStyle(at).outlineStyle]; })()"
        )
        if at is None or at[0] in found[:1]:
            return found
        assert at[1] != "none", f"the focus is not seen at {at[0]}"
        found.append(at[0])
    return found


def width_needed(page: Page) -> int:
    """Return how wide a window must be so that the page has no horizontal scroll bar."""
    return int(page.evaluate("document.documentElement.scrollWidth"))


def least_contrast(page: Page) -> tuple[float, str]:
    """Return the contrast of the text that is read worst, and which it is."""
    ratio, tag, text = min(page.evaluate(CONTRASTS))
    return float(ratio), f"{tag}: {text}"
