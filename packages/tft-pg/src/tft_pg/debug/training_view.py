"""The view of the training on torch's debug page: what each rank's handler answers.

Law of this file: one view, which torch's page calls. It runs in the page's process only.
"""

from __future__ import annotations

from typing import Any, final

from torch.distributed.debug._frontend import DebugHandler, NavLink, Route, fetch_all

from tft_pg.debug.page import HANDLER

__all__ = ["TrainingView"]


@final
class TrainingView(DebugHandler):
    """The answers of all ranks, as JSON."""

    def routes(self) -> list[Route]:
        """Return the path of the view."""
        return [Route(f"/{HANDLER}", self._show)]

    def nav_links(self) -> list[NavLink]:
        """Return the view's link on the page."""
        return [NavLink(f"/{HANDLER}", "Training")]

    def _show(self, request: Any) -> bytes:
        urls, answers = fetch_all(HANDLER, timeout=self.fetch_timeout)
        shown: bytes = request.frontend.render_template("json_resp.html", title="Training", addrs=urls, resps=answers)
        return shown
