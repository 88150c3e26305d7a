"""`ManagerClient`: a group rank asks for the next quorum and votes through it.

Law of this file: one method for each call. docs/protocol defines what a call means, and the manager server decides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, final

from tft_coord.client.caller import Caller, seconds
from tft_coord.client.rank_session import RankSession
from tft_coord.core.progress import Progress
from tft_coord.core.types import Plan, Purpose, QuorumKey, RankRequest, Verdict
from tft_coord.errors import CoordinationClosedError, CoordinationError, ProtocolError
from tft_coord.notifications import Notification
from tft_coord.security import Trust
from tft_coord.timeouts import Timeouts
from tft_coord.tls import TLS
from tft_coord.tokens import Token
from tft_coord.wire import rank_codec, services
from tft_coord.wire.limits import MAX_HEALED_BYTES

if TYPE_CHECKING:
    from tft_coord.compat.views import QuorumResult


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The quorum of that key stands, and every member is at the state of the caller.

    The plan of that key stands too, with the caller's step and lineage as the reference, and no member heals.
    """

    key: QuorumKey


@final
class ManagerClient:
    """A group rank's client of its manager server. Several threads may call it at the same time.

    Args:
        addr: of the manager server, `host:port` or `http://host:port`.
        connect_timeout: how long the constructor tries to reach the server.
        group_rank: opens this rank's session at once, as `open_session` does; None leaves it to the caller.
        token: shared secret of the job, a `TokenFile` with it, or None.
        timeouts: of the job.
        listener: receives the session's notifications: losses in a quorum or this group, newcomers that ask for state,
            and requests that this rank leave or end. A thread of this client calls it; it must return at once.
        progress: returns where in its step this rank is. A thread of this client calls it ten times a second. None: the
            rank reports no progress and never counts as hung.
        beat_number: returns the number of the beat that is sent now. The answer is a `QuorumNews` for the listener,
            which renews the lease of a standing quorum. 0: no answer is wanted.
        is_alive: called several times a second while the session opens, and while it is broken. False means that the
            manager server has ended: opening stops and all waiting calls fail.
        connect_now: check that the server answers. False: the first call connects, and reports a failure.
        tls: certificates for the connections; None: they are not encrypted.
    Raises: ConfigError: the address is invalid. UnreachableError: no server answered in time. ProtocolError: the group
        has no such rank. RefusedError: another process is this rank.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta = timedelta(seconds=60),
        *,
        group_rank: int | None = None,
        token: Token = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # frozen
        listener: Callable[[Notification], None] = lambda _: None,
        progress: Callable[[], Progress | None] = lambda: None,
        beat_number: Callable[[], int] = lambda: 0,
        is_alive: Callable[[], bool] = lambda: True,
        connect_now: bool = True,
        tls: TLS | None = None,
    ) -> None:
        self._caller = Caller(
            "manager server", addr, connect_timeout, token, timeouts, is_known=not connect_now, tls=tls
        )
        self._trust = Trust(token, tls)
        self._timeouts = timeouts
        self._connect_within_s = connect_timeout.total_seconds()
        self._quorum_stub = self._caller.stub(services.MANAGER_QUORUM)
        self._commit_stub = self._caller.stub(services.MANAGER_SHOULD_COMMIT)
        self._metadata_stub = self._caller.stub(services.MANAGER_CHECKPOINT_METADATA)
        self._kill_stub = self._caller.stub(services.MANAGER_KILL)
        self._listener = listener
        self._progress = progress
        self._beat_number = beat_number
        self._is_alive = is_alive
        self._session: RankSession | None = None
        self._closed = False
        if group_rank is not None:
            try:
                self.open_session(group_rank)
            except BaseException:
                self.close()
                raise

    def quorum(self, group_rank: int, request: RankRequest, timeout: timedelta) -> Plan | Unchanged:
        """Ask for the next quorum and wait for it. The client resends the request when the connection breaks.

        Args:
            group_rank: the rank that asks.
            request: this rank's state and settings.
            timeout: time limit for the plan.
        Returns: this rank's plan, or Unchanged when the plan of `request.held` stands.
        Raises:
            RequestTimeoutError: the request timed out and is withdrawn; the message names the missing peers.
            StaleQuorumError: this rank asked again from another thread; the newer request stands.
            RefusedError: the lighthouse refuses this replica; the message says why.
            ReplicaGroupLostError: a rank of this group is lost.
            UnreachableError: the manager server is gone.
        """
        what = f"rank {group_rank}'s quorum for step {request.step}"
        ask, timeout_s = rank_codec.Ask(group_rank, request), seconds(timeout)
        answer: Plan | QuorumKey | Verdict
        if (session := self._session_of(group_rank)) is not None:
            answer = session.call(ask, timeout_s, what)
        else:
            encoded = rank_codec.encode_rank_request(ask)
            answer = rank_codec.decode_plan(self._caller.call(self._quorum_stub, encoded, timeout_s, what, again=True))
        match answer:
            case Plan():
                return answer
            case QuorumKey():
                return Unchanged(answer)
            case _:
                raise ProtocolError(
                    f"{what}: the manager server answered with a verdict, not a plan; check its version"
                )

    def should_commit(
        self,
        group_rank: int,
        step: int,
        should_commit: bool,
        timeout: timedelta,
        *,
        key: QuorumKey | None = None,
        purpose: Purpose = Purpose.COMMIT,
    ) -> bool:
        """Vote, and wait for the verdict of the group.

        The verdict is final. The client resends a vote with a key when the connection breaks, and gets the same
        verdict.

        Args:
            group_rank, step: the rank that votes, and the step.
            should_commit: this rank's vote.
            timeout: time limit for the verdict; when it passes, an open round is sealed as no.
            key: of the quorum that the step belongs to; None votes as torchft's clients do, in the one open round.
            purpose: what the vote is about.
        Returns: True iff every rank of the group voted yes.
        Raises: RequestTimeoutError, ReplicaGroupLostError, UnreachableError: there is no verdict; the caller must
        neither step nor continue.
        """
        return self.vote(group_rank, step, should_commit, timeout, key=key, purpose=purpose).yes

    def vote(
        self,
        group_rank: int,
        step: int,
        yes: bool,
        timeout: timedelta,
        *,
        key: QuorumKey | None,
        purpose: Purpose = Purpose.COMMIT,
        leaving: bool = False,
        stands: bool = False,
    ) -> Verdict:
        """Vote as `should_commit` does, with the rank's wish to leave and its view of the round.

        Args:
            leaving: this rank wishes that the group leaves after this step.
            stands: by the word of the round, no replica asked, left or recovered.
        Returns: the verdict, whether all ranks of the group leave now, and whether the quorum stands for all of them.
        Raises: as `should_commit`.
        """
        what = f"rank {group_rank}'s vote on step {step}" + (f" of quorum {key}" if key is not None else "")
        vote, timeout_s = rank_codec.Vote(group_rank, step, yes, key, purpose, leaving, stands), seconds(timeout)
        session = self._session_of(group_rank)
        # A vote without a key that is sent twice could open the next round, so it travels as a separate call.
        if session is None or key is None:
            encoded = rank_codec.encode_vote(vote)
            again = key is not None
            return rank_codec.decode_verdict(
                self._caller.call(self._commit_stub, encoded, timeout_s, what, again=again)
            )
        verdict = session.call(vote, timeout_s, what)
        if not isinstance(verdict, Verdict):
            raise ProtocolError(f"{what}: the manager server answered with a plan, not a verdict; check its version")
        return verdict

    def leave(
        self,
        group_rank: int,
        reason: str,
        serve_ms: int,
        timeout: timedelta,
        *,
        finished_step: int | None = None,
    ) -> None:
        """Leave the job with the whole group, after a verdict to leave or between two steps.

        Args:
            group_rank: the rank that leaves; it has a session here.
            reason: why.
            serve_ms: for how long the group serves its state, at most.
            timeout: time limit for the manager server to accept the request.
            finished_step: the last step of the finished training; None: other replicas may train on.
        Raises: CoordinationError: this rank has no session here. RequestTimeoutError, ReplicaGroupLostError,
            UnreachableError: the manager server has not accepted the request.
        """
        session = self._session_of(group_rank)
        if session is None:
            raise CoordinationError(f"rank {group_rank} has no session with this manager server; open one first")
        leave = rank_codec.Leave(group_rank, reason, serve_ms, finished_step)
        session.call(leave, seconds(timeout), f"rank {group_rank}'s request to leave")

    def kill(self, msg: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """End the processes of the manager server's group at once, each with exit code 1.

        Args:
            msg: why; the processes log it, with the address of the caller.
            timeout: time limit for the manager server to notify the processes.
        Raises: RequestTimeoutError, UnreachableError, RefusedError: no process was notified.
        """
        self._caller.call(self._kill_stub, rank_codec.encode_kill(msg), seconds(timeout), "a kill request", again=False)

    def _session_of(self, group_rank: int) -> RankSession | None:
        """Return the session that carries that rank's calls; None: the rank makes unary calls."""
        session = self._session
        return session if session is not None and session.group_rank == group_rank else None

    def checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """Return where the live state of that rank of this manager server's group can be fetched.

        Raises: ProtocolError: "rank not found": the rank has asked for no quorum yet. RequestTimeoutError,
        UnreachableError.
        """
        what = f"the checkpoint metadata of rank {rank}"
        request = rank_codec.encode_metadata_request(rank)
        return rank_codec.decode_metadata(
            self._caller.call(self._metadata_stub, request, seconds(timeout), what, again=True)
        )

    def open_session(self, group_rank: int) -> None:
        """Open this rank's stream and keep it until `close`; return when the manager server knows the rank.

        A rank whose stream is broken for longer than reconnect_grace is lost.

        Raises: ProtocolError: the group has no such rank. RefusedError: another process has it. UnreachableError: the
            manager server did not answer.
        """
        if self._closed:
            raise CoordinationClosedError("this manager client was closed; make a new one")
        if self._session is not None:
            raise CoordinationError("this manager client has a session already; make one client for each rank")
        self._session = RankSession(
            self._caller.target,
            group_rank=group_rank,
            trust=self._trust,
            timeouts=self._timeouts,
            listener=self._listener,
            progress=self._progress,
            beat_number=self._beat_number,
            connect_within_s=self._connect_within_s,
            is_alive=self._is_alive,
        )

    def healed(self, healed_bytes: int) -> None:
        """Record how many bytes of live state this process has received so far; the beats carry the highest number.

        While the number rises, a quorum waits for this group longer than join_timeout. The call is cheap; call it for
        every chunk.
        """
        if self._session is not None:
            # The wire format carries no larger number.
            most = min(healed_bytes, MAX_HEALED_BYTES)
            self._session.healed_bytes = max(self._session.healed_bytes, most)

    @property
    def is_answered(self) -> bool:
        """Return whether the manager server answers on this rank's session; True without a session.

        The value is False from 1.125 heartbeat_timeout after a manager server has stopped, and while a broken stream
        redials.
        """
        session = self._session
        return session is None or session.is_welcome

    def late(self, key: QuorumKey, step: int) -> None:
        """Report that this rank has waited for `join_timeout` in the round of that step of a standing quorum."""
        if self._session is not None:
            self._session.late(key, step)

    def beat(self) -> None:
        """Report this rank's progress now, ahead of the next beat: a rank that never reports can't be found to hang."""
        if self._session is not None:
            self._session.beat()

    def close(self) -> None:
        """Say goodbye for this rank, if it has a session, and close; calls in progress end with
        CoordinationClosedError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            session.close()
        self._caller.close()

    def __enter__(self) -> ManagerClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- torchft's names ------------------------------------------------------------------------------------------

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        init_sync: bool,
        commit_failures: int,
        timeout: timedelta,
        reconfigure_handle: str = "",
    ) -> QuorumResult:
        """Make torchft's call. As in torchft, replicas at the same step count as holding the same state."""
        from tft_coord.compat.views import (
            result_view,  # no other method needs it, and each import delays a trainer's start
        )

        request = RankRequest(
            step=step,
            lineage=0,
            live=True,
            checkpoint_metadata=checkpoint_metadata,
            shrink_only=shrink_only,
            init_sync=init_sync,
            commit_failures=commit_failures,
            reconfigure_handle=reconfigure_handle,
        )
        answer = self.quorum(group_rank, request, timeout)
        assert isinstance(answer, Plan), "a request without a quorum was answered without a plan"
        return result_view(answer)

    _checkpoint_metadata = checkpoint_metadata
