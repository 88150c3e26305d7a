"""What an operator may see and ask for: the view, the drain and the kill of a replica.

Law of this file: the cores' answers for a person; who may ask is decided at the ports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, final

from tft_coord import RefusedError
from tft_coord.lighthouse import (
    ALL_JOBS,
    TLS,
    TORCHFT_JOB,
    DescribedJob,
    Gate,
    LighthouseConfig,
    LighthouseCore,
    LighthouseDescription,
    Quorum,
    Refusal,
    TorchftCore,
    effects,
    events,
    kill_group,
    opens_job,
)
from tft_lighthouse.version import __version__
from tft_lighthouse.view import LighthouseView, find_replica

if TYPE_CHECKING:
    from tft_lighthouse.etcd.candidate import Candidate

logger = logging.getLogger("tft_lighthouse")


@final
class Operations:
    """The calls of an operator on one lighthouse. It runs on the lighthouse's loop only.

    Args:
        core, torchft: the cores.
        config: limits and timeouts.
        gate: knows the secret of each job.
        tls: certificates for the connections to replicas, or None.
        send: sends an order to its stream.
        num_streams: returns the number of open streams and waiting calls.
        now_ms: returns the time of a monotonic clock.
        wall_ms: returns milliseconds since 1970.
        candidate: of the election among several lighthouses; None: this one is alone.

    Attributes:
        address: under which replicas come to this lighthouse; "": not known yet.
    """

    def __init__(
        self,
        core: LighthouseCore,
        torchft: TorchftCore,
        config: LighthouseConfig,
        *,
        gate: Gate,
        tls: TLS | None,
        send: Callable[[effects.AskToLeave | effects.TellNewest], None],
        num_streams: Callable[[], int],
        now_ms: Callable[[], int],
        wall_ms: Callable[[], int],
        candidate: Candidate | None = None,
    ) -> None:
        self._candidate = candidate
        self._core = core
        self._torchft = torchft
        self._config = config
        self._gate = gate
        self._tls = tls
        self._send = send
        self._num_streams = num_streams
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self.address = ""

    def reconfigure(self, config: LighthouseConfig) -> None:
        """Use other settings from now on."""
        self._config = config

    def renew(self, core: LighthouseCore, torchft: TorchftCore) -> None:
        """Show other cores from now on: this lighthouse begins again, without memory."""
        self._core, self._torchft = core, torchft

    def view(self, opened: str | None = ALL_JOBS) -> LighthouseView:
        """Return what an operator may see whose secret opens one job, or ALL_JOBS."""
        now_ms, timeouts = self._now_ms(), self._config.timeouts
        theirs = self._torchft.status(TORCHFT_JOB, now_ms)
        leader = self._candidate.leader if self._candidate is not None else None
        return LighthouseView(
            version=__version__,
            started_ms=self._core.started_ms,
            now_ms=self._wall_ms(),
            address=self.address,
            has_secret=self._gate.has_secret,
            cluster_id=self._core.cluster_id,
            is_ready=self.is_ready,
            leader=leader.address if leader is not None else "",
            min_replicas=self._config.min_replicas,
            heartbeat_timeout_ms=timeouts.heartbeat_timeout_ms,
            join_timeout_ms=timeouts.join_timeout_ms,
            stragglers=self._config.stragglers.describe(),
            num_streams=self._num_streams(),
            limits=self._config.limits,
            jobs=tuple(
                job
                for job in (*self._core.status(now_ms), *((theirs,) if theirs is not None else ()))
                if opens_job(opened, job.name)
            ),
        )

    @property
    def started_ms(self) -> int:
        """Return when the lighthouse started, in milliseconds since 1970."""
        return self._core.started_ms

    @property
    def is_ready(self) -> bool:
        """Return whether replicas should come here: no other lighthouse of the cluster serves them."""
        return not self.why_not_ready()

    def why_not_ready(self) -> str:
        """Return why replicas should use another lighthouse, as one sentence; "": they should come here."""
        if self._candidate is not None and not self._candidate.leads():
            return self._candidate.sentence()
        return "a newer lighthouse of this cluster serves its replicas" if self._core.is_replaced else ""

    def check_leads(self) -> None:
        """Check before an answer that this lighthouse may give it. Raises: RefusedError: it stands by."""
        if self._candidate is not None and not self._candidate.leads():
            raise RefusedError(self._candidate.sentence(), code=Refusal.STANDBY.value)

    def drain(self, job: str | None, replica: str, *, reason: str, caller: str, opened: str | None = ALL_JOBS) -> str:
        """Ask a replica to leave after its running step.

        Args:
            job: its job; None: any.
            replica: as `find_replica` takes it.
            reason: for the replica's log.
            caller: the operator's address.
            opened: what the operator's secret opens.
        Returns: the id of the replica.
        Raises: RefusedError: there is no such replica, or it can't be asked.
        """
        self.check_leads()
        its_job, found = find_replica(self.view(opened).jobs, replica, job)
        self.ask_to_leave(events.DrainRequested(0, its_job.name, found.replica_id, reason), caller)
        return found.replica_id

    async def kill(
        self, job: str | None, replica: str, *, reason: str, caller: str, opened: str | None = ALL_JOBS
    ) -> str:
        """Ask the processes of a replica to end at once, as torchft's lighthouse does.

        Args: as for `drain`.
        Returns: the id of the replica.
        Raises: RefusedError: there is no such replica, or it refuses. CoordinationError: it can't be reached.
        """
        self.check_leads()
        its_job, found = find_replica(self.view(opened).jobs, replica, job)
        if not found.address:
            raise RefusedError(f"the address of replica {found.replica_id} is not known yet; try again", code="unknown")
        message = f"{reason or 'it is killed'} (asked by {caller})"
        facts = {"job": its_job.name, "replica_id": found.replica_id, "reason": message}
        logger.warning("job %s: replica %s is asked to end: %s", its_job.name, found.replica_id, message, extra=facts)
        await kill_group(
            found.address,
            message,
            token=self._gate.secret_of(its_job.name),
            timeouts=self._config.timeouts,
            tls=self._tls,
        )
        return found.replica_id

    def ask_to_leave(self, drain: events.DrainRequested, caller: str) -> None:
        """Ask a replica to leave, by the core's own rule for names. Raises: RefusedError: it can't be asked."""
        self.check_leads()
        reason = f"{drain.reason or 'it is drained'} (asked by {caller})"
        for order in self._core.drain(replace(drain, reason=reason)):
            if isinstance(order, effects.RefuseUnary):
                torchft = self._torchft.any_alive(self._now_ms()) if drain.job == TORCHFT_JOB else None
                more = f"; {torchft} is torchft's, which can't be asked to leave: end its process" if torchft else ""
                raise RefusedError(order.message + more, code=order.refusal.value)
            if isinstance(order, effects.AskToLeave):
                facts = {"job": drain.job, "replica_id": drain.replica, "reason": reason}
                logger.info("job %s: replica %s is asked to leave: %s", drain.job, drain.replica, reason, extra=facts)
            self._send(order)

    def description(self, opened: str | None = ALL_JOBS) -> LighthouseDescription:
        """Return what the lighthouse says of itself to a client whose secret opens one job, or ALL_JOBS."""
        timeouts = self._config.timeouts
        core, torchft = self._core, self._torchft
        jobs = tuple(
            _described(name, core.quorum(name), core.wait_sentence(name, self._now_ms()), core.warnings(name))
            for name in core.jobs
            if opens_job(opened, name)
        )
        lives = opens_job(opened, TORCHFT_JOB) and torchft.any_alive(self._now_ms()) is not None
        return LighthouseDescription(
            version=__version__,
            started_ms=self._core.started_ms,
            now_ms=self._wall_ms(),
            cluster_id=self._core.cluster_id,
            min_replicas=self._config.min_replicas,
            join_timeout_ms=timeouts.join_timeout_ms,
            heartbeat_timeout_ms=timeouts.heartbeat_timeout_ms,
            quorum_tick_ms=timeouts.quorum_tick_ms,
            lost_state_timeout_ms=self._config.lost_state_ms,
            stragglers=self._config.stragglers.describe(),
            jobs=jobs,
            torchft=_described(TORCHFT_JOB, torchft.previous, torchft.waiting_for) if lives else None,
        )


def _described(job: str, quorum: Quorum | None, waiting_for: str, warnings: tuple[str, ...] = ()) -> DescribedJob:
    quorum_id, num_members = (quorum.key.quorum_id, len(quorum.members)) if quorum is not None else (0, 0)
    return DescribedJob(job, quorum_id, num_members, waiting_for, warnings)
