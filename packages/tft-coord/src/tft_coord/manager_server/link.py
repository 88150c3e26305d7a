"""The manager server's stream to the lighthouse, kept up for as long as the process lives.

`SessionCore` decides when to dial and what to send. This shell dials, writes, reads and keeps the time. Each dial is a
new channel, so that no back-off of an earlier one delays it. A lighthouse that does not know this project's service is
torchft's: `TorchftConversation` then handles the rest of that channel's life.

Law of this file: one stream, its channel, its timers; no decision about quorums.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from tft_coord.compat.channel import TorchftConversation
from tft_coord.compat.replica_group import TorchftGroupCore
from tft_coord.compat.views import LighthouseDescription
from tft_coord.core import events
from tft_coord.core.effects import (
    AnnounceNewcomer,
    AnswerQuorum,
    AnswerUnchanged,
    AskForQuorum,
    AskToLeave,
    NotifyLoss,
    Probe,
    RefuseRequest,
    RefuseSession,
    Release,
    ReportStop,
    TellLost,
    TellNewest,
    TellStraggler,
    TellWait,
    TryPeers,
    Welcome,
)
from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.progress import Progress
from tft_coord.core.session import (
    Dial,
    GiveUp,
    HangUp,
    Look,
    Say,
    SendBeat,
    SendHello,
    SendLeave,
    SendRequest,
    SendWithdraw,
    SessionCore,
    SessionEffect,
)
from tft_coord.core.types import Member, PeerAddresses, Quorum, QuorumKey, Refusal
from tft_coord.errors import ProtocolError, UnreachableError
from tft_coord.logs import logger_for_people
from tft_coord.manager_server.absence import Absence
from tft_coord.manager_server.trial import try_peers
from tft_coord.rpc import grpc
from tft_coord.security import Trust
from tft_coord.timeouts import ROUND_TRIPS_TO_BE_BACK, Timeouts
from tft_coord.transport.address import index_of, targets
from tft_coord.transport.diagnosis import OF_ANOTHER_KIND, no_peer, secret_refused
from tft_coord.transport.dial import DialTimeoutError, cancel_and_wait, dial
from tft_coord.transport.outbox import Outbox
from tft_coord.wire import codec, services

logger = logger_for_people(__name__)

MAX_PATIENCE = 8  # times heartbeat_timeout, for the first connection to a lighthouse
CLOSE_WITHIN_S = 0.2  # the last report to the lighthouse may delay the end of a trainer by this


@final
class LighthouseLink:
    """One replica group's connection to the lighthouse. It runs on one loop only.

    Args:
        pid: of the trainer.
        lighthouse_addr: the address to dial; several addresses with commas between them.
        trust: the secret and the certificates of the job.
        timeouts: of the job.
        job, replica_id, address, replaces: as in `Hello`.
        arrived: receives the lighthouse's answers and notifications.
        quorum: returns the newest quorum that the group holds.
        progress: returns the group's progress, for a time of the loop's clock in milliseconds.
        waits: the same, whether all its ranks wait.
        stopped: the same, a phrase that names the stopped ranks, and for how long.
        is_hung: whether a rank hangs or is stopped now; while one does, a lost session stays lost.
    """

    def __init__(
        self,
        lighthouse_addr: str,
        *,
        trust: Trust,
        timeouts: Timeouts,
        job: str,
        replica_id: str,
        address: str,
        replaces: str,
        arrived: Callable[[events.GroupEvent], None],
        quorum: Callable[[], Quorum | None],
        progress: Callable[[int], Progress | None] = lambda _: None,
        waits: Callable[[int], bool] = lambda _: False,
        stopped: Callable[[int], tuple[str, int]] = lambda _: ("", 0),
        is_hung: Callable[[], bool] = lambda: False,
        pid: int = 0,
    ) -> None:
        self._targets = targets(lighthouse_addr)
        self._target = self._targets[0]  # the last dialed one
        self._trust = trust
        self._timeouts = timeouts
        self._replica_id = replica_id
        self._arrived = arrived
        self._quorum = quorum
        self._progress = progress
        self._waits = waits
        self._stopped = stopped
        self._is_hung = is_hung
        self._core = SessionCore(
            job=job,
            replica_id=replica_id,
            address=address,
            session=time.time_ns() // 1_000_000,
            timeouts=timeouts,
            jitter=random.random,
            replaces=replaces,
            num_addresses=len(self._targets),
            pid=pid,
            tries_peers=True,
        )
        self._torchft_core = TorchftGroupCore(
            job=job, replica_id=replica_id, timeouts=timeouts, words=lambda: secrets.randbits(64)
        )
        self._torchft: TorchftConversation | None = None
        self._warned_torchft = False
        self._job = job
        self._describing: set[asyncio.Task[None]] = set()
        self._trial: asyncio.Task[None] | None = None  # the last requested trial of the peers
        self._unreached: frozenset[str] = frozenset()  # the peers that the trial did not reach
        self._loop = asyncio.get_running_loop()
        self._outbox: Outbox | None = None
        self._sent_member: Member | None = None  # the member of the last request on this stream
        self._stream: asyncio.Task[None] | None = None
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self._redial: asyncio.TimerHandle | None = None
        self._next_beat: asyncio.TimerHandle | None = None
        self._open_request: int | None = None
        # time limits for a connection to a lighthouse; longer where an attempt took too long
        self._patience_ms: dict[str, int] = {}
        self._warned_far: set[str] = set()  # lighthouses with a logged warning that they are far away
        self._reached: set[str] = set()  # lighthouses that have accepted a connection
        self._accepted_by: set[str] = set()  # lighthouses that have answered a hello
        self._ended = False
        self._reported_death = False
        self._absence = Absence(replica_id)
        self._logged_lost: int | None = None  # the session whose loss was logged last
        self._are_compared = False
        self._refusal = ""  # the current lighthouse's refusal of this replica, or its fault
        self._faults: dict[str, str] = {}  # address -> the fault of its lighthouse, logged once
        self._failures: dict[str, str] = {}  # address -> why its last dial failed, since one was accepted last
        self.failure = f"the lighthouse at {self._target} has not been reached yet"

    def start(self) -> None:
        """Start to dial."""
        self._perform(self._core.start(self._now_ms()))

    def ask(self, request: int, member: Member, held: QuorumKey | None, fingerprint: Fingerprint) -> None:
        """Ask for the next quorum; `arrived` gets the answer, however often the stream breaks before."""
        refused = self._core.refused
        if refused is not None:
            self._arrived(events.RequestRefused(request, refused.code, refused.message))
            return
        self._open_request = request
        self._perform(self._core.ask(request, member, held, self._now_ms(), fingerprint))
        if self._torchft is not None:
            self._torchft.ask(request, member, held, self._core.session)

    def withdraw(self, request: int) -> None:
        """Withdraw the request."""
        if self._torchft is not None:
            self._torchft.withdraw(request)
        else:
            self._torchft_core.withdraw(request)
        self._perform(self._core.withdraw(request, self._now_ms()))

    def healed(self, healed_bytes: int) -> None:
        """Record the bytes of live state that the group's ranks have received so far; the beats carry the number."""
        self._core.healed(healed_bytes)

    @property
    def hangs(self) -> bool:
        """Return whether the session was lost while a trainer hangs; `resumed` opens the next one."""
        return self._core.hangs

    def resumed(self) -> None:
        """Handle a hung trainer that has resumed."""
        logger.info("replica %s has resumed, and rejoins with a new session", self._replica_id)
        self._perform(self._core.went_on(self._now_ms()))

    def leave(self, reason: str, serve_ms: int, finished_step: int | None) -> None:
        """Report that this group has left, on every stream from now on."""
        self._torchft_core.ended()  # a group that does not beat is dropped by the others after a while
        self._perform(self._core.leave(reason, serve_ms, finished_step))

    def say_waits(self) -> None:
        """Report now that the group waits for other replicas."""
        self._perform(self._core.say_waits(self._progress(self._now_ms())))

    def report_stop(self, report: ReportStop) -> None:
        """Report that ranks of this group are stopped; each probe of the lighthouse gets the report again."""
        if report.is_news:
            logger.warning("replica %s: %s", self._replica_id, report.reason)
        self._send(events.ProbeAnswered(0, report.probe, report.reason, report.stopped_ms))

    def report_late(self, key: QuorumKey, step: int) -> None:
        """Report that a round of a standing quorum waits for a member for too long."""
        logger.info("replica %s has waited for join_timeout in step %d of quorum %s", self._replica_id, step, key)
        self._send(events.LateReported(0, key, step))

    def report_death(self, reason: str) -> None:
        """Report that a trainer of this group ended."""
        self._reported_death = True
        self._torchft_core.ended()
        self._send(events.DeathReported(0, reason))

    async def close(self) -> None:
        """Send the waiting messages, for at most CLOSE_WITHIN_S, and end."""
        self._ended = True
        for timer in (self._redial, self._next_beat):
            if timer is not None:
                timer.cancel()
        for task in (*self._describing, *([self._trial] if self._trial is not None else [])):
            await cancel_and_wait(task)
        stream, outbox = self._stream, self._outbox
        if stream is None:
            return
        if outbox is not None:
            # The lighthouse closes its side when this side is closed, so the end of the stream shows that it has
            # received all.
            outbox.close()
            await asyncio.wait([stream], timeout=CLOSE_WITHIN_S)
        await cancel_and_wait(stream)

    # --- performing ----------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[SessionEffect]) -> None:
        for effect in effects:
            match effect:
                case SendRequest(request, member, held, fingerprint):
                    self._send(events.QuorumRequested(0, request, member, held, fingerprint))
                case SendWithdraw(request):
                    self._send(events.RequestWithdrawn(0, request))
                case SendBeat(healed_bytes, progress, waits, number):
                    self._send(events.BeatReceived(0, healed_bytes, progress, waits, number))
                case SendHello(hello):
                    self._send(events.HelloReceived(0, hello))
                case SendLeave(reason, serve_ms, finished_step):
                    self._send(events.LeaveReceived(0, reason, serve_ms, finished_step))
                case Dial(at_ms, address):
                    if not self._ended:
                        self._redial = self._loop.call_at(at_ms / 1000, self._dial, self._targets[address])
                case Look(address):
                    describing = self._loop.create_task(self._describe(address))
                    self._describing.add(describing)
                    describing.add_done_callback(self._describing.discard)
                case Say(address, message):
                    target = self._targets[address]
                    self._faults[target] = message
                    logger.warning("replica %s: the lighthouse at %s %s", self._replica_id, target, message)
                    if target == self._target:
                        self._note_failure("the lighthouse closed the stream")
                case HangUp():
                    if self._call is not None:
                        self._call.cancel()
                case GiveUp(code, message):
                    # A replica that has reported its own end is refused as dead, which is expected.
                    is_start = code in ("unauthenticated", "wrong_server")
                    if is_start:
                        logger.info("replica %s can't start: %s", self._replica_id, message)  # the trainer raises it
                    elif not (self._reported_death and code == Refusal.DEAD.value):
                        logger.error("replica %s: refused by the lighthouse (%s): %s", self._replica_id, code, message)
                    if not is_start:
                        self.failure = f"the lighthouse at {self._target} refuses this replica: {message}"
                    if self._open_request is not None:
                        self._arrived(events.RequestRefused(self._open_request, code, message))

    def _send(self, event: events.LighthouseEvent) -> None:
        if self._outbox is not None:
            self._outbox.put(codec.encode_to_lighthouse(event, self._sent_member))
            if isinstance(event, events.QuorumRequested):
                self._sent_member = event.member

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    # --- the stream --------------------------------------------------------------------------------------------------

    def _dial(self, target: str) -> None:
        self._target = target
        self._stream = self._loop.create_task(self._keep_stream())

    async def _keep_stream(self) -> None:
        """Dial once and, if that succeeds, run one stream until it ends."""
        self._refusal = ""
        within_ms = self._patience_ms.get(self._target, self._timeouts.heartbeat_timeout_ms)
        opened_s: float | None = None
        try:
            channel = await dial(self._target, self._timeouts, self._trust.tls, to_lighthouse=True, within_ms=within_ms)
            self._reached.add(self._target)
            opened_s = self._loop.time()
            try:
                try:
                    await self._converse(channel)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                        raise
                    await self._converse_by_calls(channel)
            finally:
                await channel.close()
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name
            if error.code() is grpc.StatusCode.UNAUTHENTICATED and not self._trust.looks_again():
                self._refusal = secret_refused(why, shown=self._trust.token is not None)
            self._note_failure(why)
            self._dial_failed("unauthenticated" if self._refusal else "")
        except ProtocolError as error:
            self._refusal = no_peer("lighthouse", error)
            self._note_failure(str(error))
            self._dial_failed("wrong_server")
        except UnreachableError as error:
            # A far lighthouse takes longer than heartbeat_timeout to connect. One that was reached before is away.
            if isinstance(error, DialTimeoutError) and self._target not in self._reached:
                self._extend_patience(2 * within_ms)
            self._note_failure(str(error))
            self._dial_failed("")
        finally:
            lasted_ms = 0.0 if opened_s is None else 1000 * (self._loop.time() - opened_s)
            if lasted_ms >= within_ms and self._target not in self._accepted_by:
                self._extend_patience(2 * within_ms)  # no answer came in that time; as above
            self._outbox = self._call = None
            if not self._ended:
                self._perform(self._core.stream_broke(self._now_ms()))

    def _dial_failed(self, code: str) -> None:
        message = f"{self.failure}. Correct TFT_LIGHTHOUSE or the secret, and start this process again"
        self._perform(self._core.dial_failed(self._targets.index(self._target), code, message))

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        call = services.stream_stub(channel, services.LIGHTHOUSE_SESSION)(metadata=self._trust.metadata())
        outbox = Outbox(call.cancel)
        self._call, self._outbox, self._sent_member = call, outbox, None
        writer = self._loop.create_task(self._write(call, outbox))
        try:
            self._perform(self._core.stream_opened(self._now_ms()))
            self._beat()
            while isinstance(message := await call.read(), bytes):
                self._received(message)
            self._note_failure("the lighthouse closed the stream")
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.wait([writer])

    async def _describe(self, address: int) -> None:
        """Ask another lighthouse for its description; an unreachable one does not matter now."""
        try:
            description = await _description_of(self._targets[address], self._trust, self._timeouts)
        except (grpc.aio.AioRpcError, ProtocolError, UnreachableError) as error:
            logger.debug("replica %s: the lighthouse at %s: %s", self._replica_id, self._targets[address], error)
            return
        serves = any(job.name == self._job for job in description.jobs)
        before = self._target
        orders = self._core.looked(address, description.cluster_id, description.started_ms, serves=serves)
        if description.cluster_id == self._core.cluster_id:
            self._faults.pop(self._targets[address], None)
        if HangUp() in orders:
            newer = self._targets[address]
            logger.info("replica %s moves from %s to the newer lighthouse at %s", self._replica_id, before, newer)
        self._perform(orders)

    async def _converse_by_calls(self, channel: grpc.aio.Channel) -> None:
        """Run a channel to torchft's lighthouse until it ends. Raises: AioRpcError: it has broken."""
        self._outbox = self._call = None
        await self._check_torchfts(channel)
        self._perform(self._core.found_foreign())
        if len(self._targets) > 1:
            self._note_failure("it is torchft's, which must be the only address")
            return
        if not self._warned_torchft:
            self._warned_torchft = True
            logger.warning(
                "replica %s: the lighthouse at %s is torchft's. It detects losses by timeouts alone, restarts quorum "
                "ids at 1, and does not refuse replicas with different parameters or settings",
                self._replica_id,
                self._target,
            )
        self._note_accepted()
        conversation = TorchftConversation(
            self._torchft_core, channel, self._timeouts, replica_id=self._replica_id, arrived=self._torchft_answered
        )
        self._torchft = conversation
        try:
            await conversation.hold(self._core.open_request, self._core.session)
        finally:
            self._torchft = None

    async def _check_torchfts(self, channel: grpc.aio.Channel) -> None:
        """Check that the server is torchft's.

        Raises: ProtocolError: it does not know torchft's calls either. AioRpcError: it has broken.
        """
        try:
            # A request without a member changes nothing on the server; a lighthouse refuses it.
            within_s = self._timeouts.heartbeat_timeout_ms / 1000
            await services.call_stub(channel, services.LIGHTHOUSE_QUORUM)(b"", timeout=within_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ProtocolError(OF_ANOTHER_KIND) from error
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise

    def _torchft_answered(self, event: events.QuorumArrived | events.RequestRefused) -> None:
        key = event.quorum.key if isinstance(event, events.QuorumArrived) else None
        if self._core.answered(event.request, key):
            self._arrived(event)

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes], outbox: Outbox) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader sees the same end
            await outbox.write_all(call.write)
            await call.done_writing()

    def _note_failure(self, why: str) -> None:
        what = self._refusal or self._faults.get(self._target) or f"can't be reached: {why}"
        self._failures[self._target] = f"the lighthouse at {self._target} {what}"
        never_dialed = {each: f"the lighthouse at {each} {fault}" for each, fault in self._faults.items()}
        before, self.failure = self.failure, "; ".join({**never_dialed, **self._failures}.values())
        if self._ended:
            return
        if self.failure != before:
            logger.info("replica %s: %s", self._replica_id, self.failure)
        if self._absence.lasts(self._now_ms(), self.failure):
            self._arrived(events.WaitTold(self.failure))

    def _note_accepted(self) -> None:
        """Note that the dialed lighthouse accepts this replica."""
        self._accepted_by.add(self._target)
        self.failure = ""
        self._failures.clear()
        self._faults.pop(self._target, None)
        self._absence.ends(self._now_ms(), self._target)

    # --- messages of the lighthouse -----------------------------------------------------------------------------------

    def _received(self, message: bytes) -> None:
        """Handle a message of the lighthouse. Raises: ProtocolError: the message is invalid; the stream ends."""
        now_ms = self._now_ms()
        match codec.decode_from_lighthouse(message):
            case AnswerUnchanged(_, request, key):
                if self._core.answered(request, key):
                    self._arrived(events.UnchangedArrived(request, key))
            case AnswerQuorum(_, request, quorum):
                if self._core.answered(request, quorum.key):
                    self._arrived(events.QuorumArrived(request, quorum))
            case RefuseRequest(_, request, Refusal.LOST, sentence):
                # This replica is alive: its next session sends the request again. A dead replica is refused for good.
                logger.info("replica %s, request %d: %s", self._replica_id, request, sentence)
            case RefuseRequest(_, request, refusal, sentence):
                if self._core.answered(request, None):
                    self._arrived(events.RequestRefused(request, refusal.value, sentence))
            case Welcome(_, session, started_ms, cluster_id, heartbeat_timeout_ms, join_timeout_ms):
                orders = self._core.welcomed(session, started_ms, now_ms, cluster_id, heartbeat_timeout_ms)
                # the lighthouse accepts this replica, but the core may reject the lighthouse
                if HangUp() not in orders:
                    self._note_accepted()
                    self._compare_timeouts(heartbeat_timeout_ms, join_timeout_ms)
                    self._check_distance(heartbeat_timeout_ms, join_timeout_ms)
                self._perform(orders)
                self._beat()
            case TellLost(_, session, sentence):
                if session != self._logged_lost:  # while a trainer is stopped, each report of it gets this answer
                    self._logged_lost = session
                    logger.warning("replica %s: %s", self._replica_id, sentence)
                self._perform(self._core.told_lost(session, now_ms, hung=self._is_hung()))
                self._arrived(events.SessionLost(session, sentence))
            case NotifyLoss(_, notice):
                logger.info("replica %s: %s", self._replica_id, notice)
                self._arrived(events.LossNoticed(notice))
            case AnnounceNewcomer(_, replica_id):
                self._arrived(events.NewcomerAnnounced(replica_id))
            case AskToLeave(_, reason, serve_ms):
                logger.info("replica %s is asked to leave: %s", self._replica_id, reason)
                self._arrived(events.LeaveAsked(reason, serve_ms))
            case TellNewest(_, named):
                self._arrived(events.NewestNamed(named, self._core.beat_answered(named.beat)))
            case TellStraggler(_, news):
                self._arrived(events.PaceTold(news))
            case TellWait(_, sentence, warns):
                self._arrived(events.WaitTold(sentence, warns))
            case TryPeers(_, number, peers):
                self._begin_trial(number, peers)
            case Release():
                self._arrived(events.NobodyHeals())
            case Probe(_, number):
                self._send(events.ProbeAnswered(0, number, *self._stopped(now_ms)))
                self._arrived(events.ProbeCame(number))
            case RefuseSession(_, refusal, sentence, silent_ms, leader):
                self._refusal = f"refuses this replica: {sentence}"
                self._note_failure("the lighthouse closed the stream")
                hung, at = self._is_hung(), index_of(leader, self._targets)
                self._perform(self._core.told_refused(refusal, sentence, now_ms, silent_ms, hung=hung, leader=at))
            case AskForQuorum(_, key):
                held = self._quorum()
                self._send(events.QuorumReported(0, held if held is not None and held.key == key else None))

    def _begin_trial(self, number: int, peers: Sequence[PeerAddresses]) -> None:
        """Dial these peers in the background, and report the unreachable ones; this cancels an older trial."""
        if self._trial is not None:
            self._trial.cancel()
        self._trial = self._loop.create_task(self._try_peers(number, peers, self._outbox))

    async def _try_peers(self, number: int, peers: Sequence[PeerAddresses], outbox: Outbox | None) -> None:
        unreached = await try_peers(peers)
        before, self._unreached = self._unreached, frozenset(each.replica_id for each in unreached)
        for each in [each for each in unreached if each.replica_id not in before]:
            logger.warning(
                "replica %s can't reach replica %s (%s), so it can't join its quorum. It tries again; check the "
                "addresses and the firewalls of both hosts",
                self._replica_id,
                each.replica_id,
                each.why,
            )
        if outbox is self._outbox:  # a new stream gets a new request
            self._send(events.PeersTried(0, number, unreached))

    def _compare_timeouts(self, heartbeat_timeout_ms: int, join_timeout_ms: int) -> None:
        """Warn once about conflicts between the lighthouse's timeouts and the local ones."""
        if self._are_compared or not heartbeat_timeout_ms:
            return
        self._are_compared = True
        for warning in self._timeouts.merged_with(heartbeat_timeout_ms, join_timeout_ms).warnings():
            logger.warning("replica %s, on the lighthouse at %s: %s", self._replica_id, self._target, warning)

    def _check_distance(self, heartbeat_timeout_ms: int, join_timeout_ms: int) -> None:
        """Warn once that a lighthouse is far away, and give the next connection to it more time."""
        round_trip_ms = self._core.round_trip_ms
        if round_trip_ms is None or not heartbeat_timeout_ms:
            return
        warning = self._timeouts.merged_with(heartbeat_timeout_ms, join_timeout_ms).too_far(round_trip_ms)
        if not warning:
            return
        self._extend_patience(ROUND_TRIPS_TO_BE_BACK * round_trip_ms)
        if self._target not in self._warned_far:
            self._warned_far.add(self._target)
            logger.warning("replica %s: the lighthouse at %s %s", self._replica_id, self._target, warning)

    def _extend_patience(self, within_ms: int) -> None:
        """Raise the time limit for a connection to this lighthouse, and for the answer to a ping on it, within
        a bound."""
        most_ms = MAX_PATIENCE * self._timeouts.heartbeat_timeout_ms
        before_ms = self._patience_ms.get(self._target, 0)
        self._patience_ms[self._target] = max(before_ms, min(within_ms, most_ms))

    def _beat(self) -> None:
        """Send a beat when it is due, for as long as this stream is open."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        if self._outbox is None or self._ended:
            return
        now_ms = self._now_ms()
        self._perform(self._core.tick(now_ms, lambda: self._progress(now_ms), lambda: self._waits(now_ms)))
        # Between a loss and the next welcome no beat is due. The timer therefore checks again soon.
        self._next_beat = self._loop.call_at(max(self._core.next_beat_ms, now_ms + 50) / 1000, self._beat)


async def _description_of(target: str, trust: Trust, timeouts: Timeouts) -> LighthouseDescription:
    """Return a lighthouse's description of itself. Raises: AioRpcError, ProtocolError, UnreachableError: none came."""
    channel = await dial(target, timeouts, trust.tls)
    try:
        describe = services.call_stub(channel, services.LIGHTHOUSE_DESCRIBE)
        answer = await describe(b"", metadata=trust.metadata(), timeout=timeouts.heartbeat_timeout_ms / 1000)
        return codec.decode_description(answer)
    finally:
        await channel.close()
