"""The incidents over HTTP: as a list, and as they happen (server-sent events).

Law of this file: records to answers. A reader that is slow holds no memory here: it gets what has changed when it is
ready for more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from typing import Any, Final, final

from aiohttp import web

from tft_coord.lighthouse import opens_job
from tft_lighthouse.history import History, Incident
from tft_lighthouse.view import SCHEMA_VERSION, incident_as_json, unknown_job

OPENED: Final = web.RequestKey("opened", str)  # what the secret of a request opens
READERS_MOST: Final = 64  # of the events
KEEP_ALIVE_S: Final = 15.0
LISTED_MOST: Final = 1_000


class UnknownJobError(Exception):
    """A request names a job that this lighthouse does not know, or that the secret does not open."""


@final
class Incidents:
    """The two routes of incidents.

    Args:
        history: the records.
        extend: gives a connection the time of another request.
        jobs: the known jobs, those without a record too.
    """

    def __init__(
        self,
        history: History,
        *,
        extend: Callable[[asyncio.BaseTransport | None], None],
        jobs: Callable[[], Collection[str]],
    ) -> None:
        self._history = history
        self._jobs = jobs
        self._extend = extend
        self._readers: set[asyncio.Event] = set()

    def changed(self) -> None:
        """Wake the readers of events, because a record is new or has changed."""
        for reader in self._readers:
            reader.set()

    async def listed(self, request: web.Request) -> web.StreamResponse:
        """Answer with the records, the oldest first.

        The query may have `job`, `kind`, `after` (a number of a change) and `limit` (the newest so many).
        """
        after, limit = number_of(request, "after", 0), number_of(request, "limit", LISTED_MOST)
        job, kind = request.query.get("job"), request.query.get("kind")
        found = [each for each in self._history.incidents() if opens_job(request[OPENED], each.job)]
        if job is not None:
            known = {each.job for each in found}.union(
                each for each in self._jobs() if opens_job(request[OPENED], each)
            )
            if job not in known:
                raise UnknownJobError(unknown_job(job, known))
        found = [each for each in found if each.change > after and job in (None, each.job)]
        found = sorted((each for each in found if kind in (None, each.kind.value)), key=lambda each: each.number)
        return web.json_response(
            {
                "schema_version": SCHEMA_VERSION,
                "last_change": self._history.last_change,
                "incidents": [incident_as_json(each) for each in found[-limit:] if limit],
            }
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send each record when it is new and whenever it changes, until the reader goes.

        A reader that names the last change that it knows (`Last-Event-ID`, or `after` in the query) gets all later
        ones first. Another one gets all records.
        """
        known = number_of(request, "after", 0)
        last_id = request.headers.get("Last-Event-ID", "")
        known = int(last_id) if last_id.isascii() and last_id.isdigit() else known
        if known > self._history.last_change:
            known = 0  # of an earlier life of this lighthouse
        if len(self._readers) >= READERS_MOST:
            raise web.HTTPServiceUnavailable(reason=f"{READERS_MOST} readers follow the events already")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        reader = asyncio.Event()
        self._readers.add(reader)
        try:
            while True:
                reader.clear()
                found = [each for each in self._history.incidents(known) if opens_job(request[OPENED], each.job)]
                known = self._history.last_change
                self._extend(request.transport)
                await response.write("".join(map(_event, found)).encode() or b": alive\n\n")
                try:
                    await asyncio.wait_for(reader.wait(), KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    continue
        finally:
            self._readers.discard(reader)


def _event(incident: Incident) -> str:
    data = json.dumps(incident_as_json(incident))  # one line: JSON escapes line ends
    return f"id: {incident.change}\nevent: incident\ndata: {data}\n\n"


def number_of(request: web.Request, name: str, default: int) -> int:
    """Return a number of the query. Raises: HTTPBadRequest: it is none."""
    text: Any = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise web.HTTPBadRequest(reason=f"{name} must be a whole number")
    return int(text)
