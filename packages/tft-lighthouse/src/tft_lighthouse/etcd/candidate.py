"""One lighthouse in the election: it makes the core's calls, one at a time, and keeps the core's time.

Law of this file: the loop between the core and the client, and the log lines of the election.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, final

from tft_coord.lighthouse import Refusal, effects, election
from tft_lighthouse.etcd.client import EtcdClient
from tft_lighthouse.etcd.settings import EtcdConfig

logger = logging.getLogger("tft_lighthouse")

CALLS_IN_A_LEASE: Final = 4
RESIGN_WITHIN_S: Final = 1.0
# It goes on while the machine sleeps. Linux has it; where it is missing, the clock of the loop must do.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _now_ms() -> int:
    return time.clock_gettime_ns(_CLOCK) // 1_000_000


@final
class Candidate:
    """A lighthouse that leads, or stands by. It runs on one loop only.

    Args:
        config: of the election.
        began: called when this lighthouse leads from now on, with the number above which its quorum ids rise, and
            whether another one has led before.
        ended: called when it leads no more.
    """

    def __init__(self, config: EtcdConfig, *, began: Callable[[int, bool], None], ended: Callable[[], None]) -> None:
        self._config = config
        self._core = election.ElectionCore(ttl_ms=1_000 * config.ttl_s)
        self._began = began
        self._ended = ended
        self._client: EtcdClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._failing_since_s: float | None = None
        self._is_failure_logged = False
        self._logged_value = ""  # the failure about a value that was logged last

    def start(self, address: str) -> None:
        """Take part under that address. Raises: ConfigError: a certificate can't be read."""
        self._client = EtcdClient(self._config, address, within_s=self._config.ttl_s / CALLS_IN_A_LEASE)
        self._task = asyncio.get_running_loop().create_task(self._run(self._client))

    async def stop(self) -> None:
        """End: a standby may lead at once."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        lease = self._core.resign()
        if self._client is not None:
            if lease is not None:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._client.make(election.Revoke(lease)), RESIGN_WITHIN_S)
            await self._client.close()

    def leads(self) -> bool:
        """Return whether this lighthouse may answer. When its lease may have ended, it ends at once."""
        now_ms = _now_ms()
        if self._core.leads(now_ms):
            return True
        self._decide(self._core.tick(now_ms))
        return False

    @property
    def leader(self) -> election.Leader | None:
        """Return the leader that etcd named last; None: there was none."""
        return self._core.leader

    def sentence(self) -> str:
        """Return why this lighthouse serves nobody, for a replica or an operator."""
        if self._is_failure_logged and self._client is not None and self._client.failure:
            why = "it can't use what etcd has" if self._client.is_reached else "it can't reach etcd"
            return f"this lighthouse stands by, because {why}: {self._client.failure}"
        leader = self._core.leader
        if leader is None:
            return "this lighthouse stands by, and no lighthouse leads yet; one does within seconds"
        return f"this lighthouse stands by; use the leader at {leader.address}"

    def refusal(self) -> effects.RefuseSession:
        """Return the message for a replica that comes to a standby."""
        leader = self._core.leader
        address = leader.address if leader is not None else ""
        return effects.RefuseSession(0, Refusal.STANDBY, self.sentence(), leader=address)

    async def _run(self, client: EtcdClient) -> None:
        while True:
            try:
                await self._step(client)
            except Exception:
                logger.exception("an error of this lighthouse's own in the election; it goes on")
                await asyncio.sleep(1)

    async def _step(self, client: EtcdClient) -> None:
        call = self._core.call(_now_ms(), time.time_ns() // 1_000_000)
        if call is None:
            self._decide(self._core.tick(_now_ms()))
            await asyncio.sleep(max(1, self._core.next_ms - _now_ms()) / 1_000)
            return
        sent_ms = _now_ms()
        answer = await client.make(call)
        self._note(client.failure, is_reached=client.is_reached)
        self._decide(self._core.answered(call, answer, sent_ms, _now_ms()))

    def _decide(self, decisions: Sequence[election.Decision]) -> None:
        for decision in decisions:
            match decision:
                case election.Began(leader, is_successor):
                    logger.info(
                        "this lighthouse leads (%s, token %d): quorum ids rise above %d%s",
                        self._config.prefix,
                        leader.token,
                        leader.started_ms,
                        "; it follows another leader, with no memory of any job" if is_successor else "",
                    )
                    self._began(leader.started_ms, is_successor)
                case election.Ended(leader, reason):
                    logger.warning(
                        "this lighthouse leads no more (token %d): %s. It answers nothing until it leads again",
                        leader.token,
                        reason,
                    )
                    self._ended()
                case election.LeaderChanged(None):
                    logger.info("no lighthouse leads; this one campaigns")
                case election.LeaderChanged(leader):
                    assert leader is not None
                    logger.info(
                        "this lighthouse stands by for the leader at %s (token %d)", leader.address, leader.token
                    )

    def _note(self, failure: str, *, is_reached: bool) -> None:
        """Log that etcd fails, at most once in a while, and that it answers again.

        A value that can't be used is logged again when it changes: somebody is mending it.
        """
        if not failure:
            if self._failing_since_s is not None and self._is_failure_logged:
                lasted_s = time.monotonic() - self._failing_since_s
                logger.info("etcd answers again, after %.1f s", lasted_s)
            self._failing_since_s, self._is_failure_logged = None, False
            return
        now_s = time.monotonic()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        # One member that fails is no news: the next one answers.
        is_due = not self._is_failure_logged and now_s - self._failing_since_s >= self._config.ttl_s / 2
        if is_due or (self._is_failure_logged and is_reached and failure != self._logged_value):
            self._is_failure_logged = True
            self._logged_value = failure if is_reached else ""
            logger.warning("%s: %s", "etcd's keys can't be used" if is_reached else "etcd does not answer", failure)
