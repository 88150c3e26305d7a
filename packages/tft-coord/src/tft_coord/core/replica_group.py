"""The manager server: it merges the requests of a replica group's ranks into one, and agrees with them.

All ranks ask before the group asks. The group's request is the merge of theirs. Every rank gets its own plan of the
same quorum. A rank that disconnects takes its request with it. A rank that is lost ends the group, because a group
commits as a whole or not at all.

Law of this file: decisions only; the caller gives the time and performs the effects in order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tft_coord.core import effects, events
from tft_coord.core.assignment import assign, plan_for
from tft_coord.core.commit import MAX_ROUNDS, RoundName, Votes
from tft_coord.core.fingerprint import Fingerprint, differences_of_ranks, list_differences, merged
from tft_coord.core.merge import merged as merged_fields
from tft_coord.core.newest import NewestQuorum
from tft_coord.core.progress import GroupProgress, Phase, Progress
from tft_coord.core.stops import REPORT_AGAIN_MS, StopWatch, stop_reason
from tft_coord.core.stragglers import PaceKind, StragglerNotice, left_out_wait
from tft_coord.core.types import (
    UNREACHED_MOST,
    DrainComplete,
    KillOrder,
    LeaveRequest,
    LossNotice,
    Member,
    Purpose,
    Quorum,
    QuorumKey,
    QuorumNews,
    RankRequest,
    Refusal,
    Unreached,
    Verdict,
    WaitsFor,
)
from tft_coord.core.waits import NAMES_MOST, TELL_AFTER_MS, TELL_EVERY_MS
from tft_coord.errors import ProtocolError
from tft_coord.timeouts import Timeouts

MAX_NOTICES_KEPT = 1024
SAME_WAIT_MS = 200  # two reports of the same wait differ by less


@dataclass(frozen=True, slots=True)
class _Asked:
    call: int
    request: RankRequest
    deadline_ms: int


def _all_at_state_of(own: Member, quorum: Quorum) -> Quorum:
    """Return the quorum that "unchanged" stands for: all members are intact and at the state of the group's own
    request."""
    members = tuple(
        replace(
            member,
            step=own.step,
            lineage=own.lineage,
            torn=False,
            live=True,
            commit_failures=0,
            needs_configure=False,
            failed_heals=0,
            poor_sources=(),
        )
        for member in quorum.members
    )
    return Quorum(quorum.key, members, quorum.created_ms)


def _all_unreached(requests: Collection[RankRequest]) -> tuple[Unreached, ...]:
    """Return the peers that some rank could not reach, each once per port, as many as a message may name."""
    found = {(each.replica_id, each.via): each for request in requests for each in request.unreached}
    return tuple(found[key] for key in sorted(found, key=lambda key: (key[0], key[1].value))[:UNREACHED_MOST])


def _identity_of(notice: LossNotice) -> tuple[QuorumKey, str, int, bool]:
    """Return what the notice is about; two notices that differ only in their reasons are the same."""
    return notice.key, notice.replica_id, notice.session, notice.lives


class ReplicaGroupCore:
    """The decisions of one replica group's manager server.

    Args:
        replica_id: of the group.
        address: of the manager server, `host:port`.
        store_address: of the group's rendezvous store, `host:port`.
        world_size: ranks in the group, at least 1.
        timeouts: reconnect_grace_ms is the time limit for a rank's broken stream.
    """

    def __init__(
        self, *, replica_id: str, address: str, store_address: str, world_size: int, timeouts: Timeouts
    ) -> None:
        if world_size < 1:
            raise ProtocolError(f"replica {replica_id} has world_size {world_size}; give at least 1")
        self.quorum: Quorum | None = None
        self._unchanged_at: Member | None = None  # the group's last request that was answered "unchanged"
        self._replica_id = replica_id
        self._address = address
        self._store_address = store_address
        self._world_size = world_size
        self._timeouts = timeouts
        self._asked: dict[int, _Asked] = {}
        self._open_request: int | None = None
        self._open_member: Member | None = None
        self._all_up_to_date = False  # in the ranks' current plan no member heals and all are up to date
        self._planned_step = 0  # the step of that plan
        self._last_request = 0
        self._votes = Votes(world_size)
        # For each rank: its newest attempt that was answered, and the answer. Attempt 0 means that the rank sends no
        # attempt number.
        self._answers: dict[int, tuple[int, effects.AnswerPlan | effects.AnswerRankUnchanged]] = {}
        self._metadata: dict[int, str] = {}
        self._fingerprints: dict[int, Fingerprint] = {}  # each rank's newest fingerprint
        self._fingerprint_changed = False  # since the last request to the lighthouse
        self._streams: dict[int, int] = {}
        self._sessions: dict[int, int] = {}  # the session of each rank's newest process that has said hello
        self._broken_ms: dict[int, int] = {}
        self._progress = GroupProgress(world_size, timeouts)
        self._stops = StopWatch()
        self._reported_stop: tuple[int, ...] = ()  # the ranks of the reported stop, while it lasts
        self._reported_ms = 0
        # the number of the newest probe; an older lighthouse sends no probes and gets no reports of stops
        self._probe = 0
        self._reported_wait_ms = -SAME_WAIT_MS  # the start of the wait that was last reported out of turn
        self._followed: QuorumKey | None = None  # the key of the ranks' newest plan
        self._wait_sentence = ""  # the replicas that the group's open request waits for, in the lighthouse's words
        self._newest = NewestQuorum()
        # the news that this group is left out as a straggler, and its end time
        self._left_out: tuple[StragglerNotice, int] | None = None
        self._wait_sent_ms: dict[int, int] = {}  # when each rank was told which other ranks it waits for
        self._lost: str | None = None
        self._left = False  # the group was lost by a goodbye
        self._leaves: str | None = None  # the reason why the group has left the job
        self._news: list[
            LeaveRequest | DrainComplete | KillOrder | StragglerNotice
        ] = []  # for every rank, also for ranks that are disconnected now
        self._notices: list[LossNotice] = []  # of the held quorum and of quorums still to come

    @property
    def lost(self) -> str | None:
        """Return why the group is lost, or None."""
        return self._lost

    @property
    def is_recalled(self) -> bool:
        """Return whether the lighthouse has recalled the newest quorum, as far as this group knows."""
        return self._newest.pushed().recalled

    def report(self) -> Quorum | None:
        """Return the newest quorum with its members as they were at its last answer, for a lighthouse without memory.

        A member that such a lighthouse takes for lost has held that state.
        """
        if self.quorum is None or self._unchanged_at is None:
            return self.quorum
        return _all_at_state_of(self._unchanged_at, self.quorum)

    def checkpoint_metadata(self, rank: int) -> str | None:
        """Return where that rank's live state can be fetched, as its last request said; None before that."""
        return self._metadata.get(rank)

    def progress(self, now_ms: int) -> Progress | None:
        """Return where in its step the group is, for the next beat to the lighthouse. None: the ranks report no
        progress."""
        return self._progress.now(now_ms)

    def is_hung(self, now_ms: int) -> bool:
        """Return whether a rank of the group hangs or is stopped, so that the group can't go on."""
        return self._stops.is_stopped() or self._progress.is_hung(now_ms)

    def waits(self, now_ms: int) -> bool:
        """Return whether all ranks have reported that they wait for other replicas."""
        return self._lost is None and self._progress.waits_since_ms(now_ms) is not None

    def stopped(self, now_ms: int) -> tuple[str, int]:
        """Return a phrase that names the stopped ranks, and for how long, as the answer to a probe; "": no rank is
        known to be stopped."""
        ranks = self._stops.stopped(now_ms)
        if not ranks:
            return "", 0
        stopped_ms = self._stops.stopped_ms(now_ms)
        if any(rank in self._broken_ms for rank in ranks):
            stopped_ms += self._timeouts.heartbeat_timeout_ms  # the rank was silent for so long when its stream ended
        return stop_reason(ranks), stopped_ms

    def looks(self, now_ms: int) -> bool:
        """Return whether the shell must look at the processes of the ranks on this host every LOOK_EVERY_MS."""
        broken = any(rank in self._sessions for rank in self._broken_ms)
        return self._lost is None and (broken or self._stops.looks(now_ms))

    def handle(self, event: events.GroupEvent, now_ms: int) -> list[effects.GroupEffect]:
        """Handle one event; return the effects, in order."""
        out = self._handle(event, now_ms)
        self._follow(event, out, now_ms)
        return out

    def _follow(self, event: events.GroupEvent, decided: list[effects.GroupEffect], now_ms: int) -> None:
        """Update the ranks' progress from this event and its effects, because their beats may not come."""
        progress = self._progress
        match event:
            case events.RankProgressed():
                if 0 <= event.rank < self._world_size:
                    progress.reported(event.rank, event.progress, now_ms)
            case events.RankAsked():
                progress.asked(event.rank, event.request.step, now_ms)
            case events.RankVoted():
                progress.votes(event.rank, now_ms)
        voted_on = event.step if isinstance(event, events.RankVoted) and event.purpose is Purpose.COMMIT else None
        key = self._followed
        for order in decided:
            match order:
                case effects.AnswerPlan(_, rank, plan):
                    self._followed, new = plan.key, plan.key != key
                    progress.planned(rank, plan.step, now_ms, excused=new, heals=plan.heal, lease_ms=plan.lease_ms)
                case effects.AnswerRankUnchanged(_, rank):
                    progress.planned(rank, None, now_ms, excused=False, heals=False)
                case effects.AnswerVote(_, rank, verdict) if voted_on is not None:
                    progress.ended(rank, voted_on + verdict.yes, now_ms, stands=verdict.stands)

    def _handle(self, event: events.GroupEvent, now_ms: int) -> list[effects.GroupEffect]:
        match event:
            case events.RankProgressed():
                return [*self._tell_wait(event, now_ms), *self._report_wait(now_ms)]
            case events.RankBeat(rank, number):
                return [effects.TellRank(rank, news) for news in self._newest.answer(number, now_ms)]
            case events.NewestNamed(news, sent_ms):
                return self._newest_named(news, sent_ms)
            case events.RankLate(_, key, step):
                return [effects.ReportLate(key, step)] if self._newest.is_late(key, step) else []
            case events.ProbeCame():
                self._probe = event.number
                self._stops.asked(now_ms)
                return []
            case events.RanksLookedAt():
                return self._looked_at(event, now_ms)
            case events.RankConnected():
                return self._connected(event)
            case events.RankDisconnected():
                return self._disconnected(event, now_ms)
            case events.RankDied():
                self._streams.pop(event.rank, None)
                self._stops.forget(event.rank)
                if event.left and self._leaves is not None and self._lost is None:
                    # This server ends with its rank. Another rank that still has to leave learns it at once.
                    message = self._left_message()
                    return [effects.TellGroupLost(rank, message, left=True) for rank in sorted(self._streams)]
                return self._lose(f"rank {event.rank} ended: {event.reason}", left=event.left)
            case events.RankAsked():
                return self._rank_asked(event, now_ms)
            case events.RankWithdrew():
                return self._withdrew(event.rank, event.call)
            case events.RankVoted():
                return self._voted(event)
            case events.QuorumArrived():
                return self._arrived(event.request, event.quorum)
            case events.UnchangedArrived():
                return self._unchanged(event.request, event.key)
            case events.RequestRefused():
                if event.request != self._open_request:
                    return []
                return self._fail_all(event.code, event.message)
            case events.LossNoticed():
                return self._noticed(event.notice)
            case events.NewcomerAnnounced():
                return self._newcomer(event.replica_id)
            case events.SessionLost():
                return self._session_lost(event)
            case events.RankLeft():
                return self._rank_left(event)
            case events.LeaveAsked(reason, serve_ms):
                return self._tell_all(LeaveRequest(reason, serve_ms))
            case events.NobodyHeals():
                return self._tell_all(DrainComplete())
            case events.WaitTold(sentence, warns):
                self._wait_sentence = self._wait_sentence if warns else sentence
                return [effects.TellRank(rank, WaitsFor(sentence, warns)) for rank in sorted(self._streams)]
            case events.PaceTold(news):
                if news.kind is not PaceKind.LEFT_OUT:
                    self._left_out = None
                elif self._left_out is None or self._left_out[0] != news:  # repeated news does not extend the pause
                    self._left_out = (news, now_ms + news.pause_ms)
                return self._tell_all(news)
            case events.KillAsked(message):
                return self._tell_all(KillOrder(message))

    def _tell_wait(self, event: events.RankProgressed, now_ms: int) -> list[effects.GroupEffect]:
        """Tell a waiting rank which other ranks of the group it waits for."""
        rank, progress = event.rank, event.progress
        if self._world_size == 1 or progress.phase is not Phase.WAITING or progress.since_ms < TELL_AFTER_MS:
            return []
        what, missing = "voted", self._votes.missing_to(rank)
        if not missing and rank in self._asked:
            what, missing = "asked for the quorum", [r for r in range(self._world_size) if r not in self._asked]
        if not missing or now_ms - self._wait_sent_ms.get(rank, now_ms - TELL_EVERY_MS) < TELL_EVERY_MS:
            return []
        self._wait_sent_ms[rank] = now_ms
        seen = ", ".join(self._progress.last_seen(each, now_ms) for each in missing[:NAMES_MOST])
        sentence = f"{len(missing)} of {self._world_size} ranks of this group have not {what}: {seen}"
        return [effects.TellRank(rank, WaitsFor(sentence))]

    def _report_wait(self, now_ms: int) -> list[effects.GroupEffect]:
        """Report at once to the lighthouse that all ranks wait, because a replica that they wait for may be gone."""
        since_ms = self._progress.waits_since_ms(now_ms) if self._lost is None else None
        if since_ms is None or since_ms - self._reported_wait_ms < SAME_WAIT_MS:
            return []
        self._reported_wait_ms = since_ms
        return [effects.SayWaits()]

    def _looked_at(self, event: events.RanksLookedAt, now_ms: int) -> list[effects.GroupEffect]:
        """Record which ranks of this host are stopped or running. Report each stop to the lighthouse once."""
        self._stops.seen(event.stopped, now_ms)
        for rank in self._broken_ms:
            if self._probe and self._stops.is_stopped(rank):
                # A stopped rank can't redial before it goes on, and a machine that was suspended takes a while then. No
                # replica waits for the rank meanwhile: the others have gone on, or there are none.
                patience_ms = self._timeouts.heartbeat_timeout_ms - self._timeouts.reconnect_grace_ms
                self._broken_ms[rank] = now_ms + patience_ms
        ranks, before = self._stops.stopped(now_ms), self._reported_stop
        self._reported_stop = ranks
        if not ranks or self._lost is not None:
            return []
        # A stop that outlasts the rank's stream is long. The rank may be lost although only a few replicas wait, and
        # they have no probe sent.
        again = any(rank in self._broken_ms for rank in ranks) and now_ms - self._reported_ms >= REPORT_AGAIN_MS
        if ranks == before and not again:
            return []
        self._reported_ms = now_ms
        return [effects.ReportStop(*self.stopped(now_ms), ranks != before, self._probe)]

    def tick(self, now_ms: int) -> list[effects.GroupEffect]:
        """Handle graces and deadlines that have passed."""
        out: list[effects.GroupEffect] = []
        for rank, broken_ms in list(self._broken_ms.items()):
            if now_ms - broken_ms >= self._timeouts.reconnect_grace_ms:
                del self._broken_ms[rank]
                grace_ms = self._timeouts.reconnect_grace_ms
                out += self._lose(f"rank {rank}'s stream disconnected and did not return within {grace_ms} ms")
        for rank, asked in list(self._asked.items()):
            if now_ms >= asked.deadline_ms:
                message = f"timed out waiting for a quorum; {self._missing(now_ms)}"
                out += self._withdrew(rank, asked.call)
                out.append(effects.FailRank(asked.call, rank, "deadline", message))
        out += [effects.AnswerVote(call, rank, verdict) for call, rank, verdict in self._votes.tick(now_ms)]
        return out

    def next_deadline_ms(self) -> int | None:
        """Return when `tick` has something to do next."""
        deadlines = [broken_ms + self._timeouts.reconnect_grace_ms for broken_ms in self._broken_ms.values()]
        deadlines += [asked.deadline_ms for asked in self._asked.values()]
        vote = self._votes.next_deadline_ms()
        if vote is not None:
            deadlines.append(vote)
        return min(deadlines, default=None)

    # --- the ranks' streams --------------------------------------------------------------------------------------

    def _connected(self, event: events.RankConnected) -> list[effects.GroupEffect]:
        rank = event.rank
        if not 0 <= rank < self._world_size:
            return []
        session = self._sessions.get(rank, event.session)
        whose = f"rank {rank} of replica {self._replica_id}"
        if event.session != session and (rank in self._streams or rank in self._broken_ms):
            message = f"{whose} is already running (session {session}); give each process of the group its own RANK"
            return [effects.RefuseSession(event.stream, Refusal.DUPLICATE, message)]
        if event.session < session:
            message = f"{whose} has session {session}, and {event.session} is older; end this process"
            return [effects.RefuseSession(event.stream, Refusal.STALE, message)]
        self._sessions[rank] = event.session
        self._streams[rank] = event.stream
        self._broken_ms.pop(rank, None)
        return self._resend(rank)

    def _disconnected(self, event: events.RankDisconnected, now_ms: int) -> list[effects.GroupEffect]:
        if self._streams.get(event.rank) != event.stream:
            return []  # the end of an older stream of that rank
        del self._streams[event.rank]
        if event.left:
            # The rank said goodbye: open rounds can't be a yes without it, and nothing else is wrong.
            return self._lose(f"rank {event.rank} shut down", left=True)
        self._broken_ms[event.rank] = now_ms
        return []

    def _lose(self, reason: str, *, left: bool = False) -> list[effects.GroupEffect]:
        if self._lost is not None or (left and self._leaves is not None):
            return []
        self._lost, self._left = reason, left
        out: list[effects.GroupEffect] = [effects.ReportDeath(reason)]
        out += [effects.AnswerVote(call, rank, verdict) for call, rank, verdict in self._votes.lose_rank(reason)]
        out += self._fail_all("group_lost", self._lost_message())
        return out + [self._tell_lost(rank) for rank in sorted(self._streams)]

    def _tell_lost(self, rank: int) -> effects.TellGroupLost:
        return effects.TellGroupLost(rank, self._lost_message(), self._left)

    # --- leaving ------------------------------------------------------------------------------------------------

    def _rank_left(self, event: events.RankLeft) -> list[effects.GroupEffect]:
        """Let the group leave with the first of its ranks: no other rank can commit a step or train on without it."""
        out: list[effects.GroupEffect] = []
        if self._leaves is None:
            self._leaves = event.reason
            out.append(effects.LeaveJob(event.reason, event.serve_ms, event.finished_step))
            out += [effects.AnswerVote(call, rank, verdict) for call, rank, verdict in self._votes.leave()]
            out += self._fail_all(Refusal.LEFT.value, self._left_message())
        return [*out, effects.AnswerVote(event.call, event.rank, Verdict(yes=False, leaves=True))]

    def _left_message(self) -> str:
        return f"replica {self._replica_id} has left the job ({self._leaves}); end this process"

    def _tell_all(self, news: LeaveRequest | DrainComplete | KillOrder | StragglerNotice) -> list[effects.GroupEffect]:
        if news in self._news:
            return []
        self._news = [*(each for each in self._news if type(each) is not type(news)), news]
        return [effects.TellRank(rank, news) for rank in sorted(self._streams)]

    # --- losses of others ---------------------------------------------------------------------------------------

    def _noticed(self, notice: LossNotice) -> list[effects.GroupEffect]:
        """Handle the loss of a member of a quorum: tell the ranks if they hold that quorum, keep the notice if it is to
        come."""
        held = self.quorum.key if self.quorum is not None else None
        if (held is not None and notice.key < held) or _identity_of(notice) in map(_identity_of, self._notices):
            return []
        # The notices with the lowest keys are kept, so notices of quorums to come never push out those of the held one.
        self._notices = sorted([*self._notices, notice], key=lambda each: each.key)[:MAX_NOTICES_KEPT]
        return [effects.NotifyRank(rank, notice) for rank in sorted(self._streams)] if notice.key == held else []

    def _newcomer(self, replica_id: str) -> list[effects.GroupEffect]:
        """Tell the rank of a group of one that a newcomer will heal from it.

        A single rank may take a snapshot of its state at its next step boundary. In a larger group some ranks would
        hear of the newcomer before that boundary and some after it. Taking the state may need all of them at once.
        """
        if self._world_size > 1:
            return []
        return [effects.TellNewcomer(rank, replica_id) for rank in sorted(self._streams)]

    def _session_lost(self, event: events.SessionLost) -> list[effects.GroupEffect]:
        """Notice the loss of this group's own session: the other members of the held quorum go on."""
        quorum, lost = self.quorum, (self._replica_id, event.session)
        if quorum is None or lost not in [(member.replica_id, member.session) for member in quorum.members]:
            return []
        return self._noticed(LossNotice(quorum.key, self._replica_id, event.session, event.reason))

    def _resend(self, rank: int) -> list[effects.GroupEffect]:
        """Return what a rank has missed while its stream was broken."""
        out: list[effects.GroupEffect] = [effects.TellRank(rank, news) for news in self._news]
        if self._newest.is_news:
            out.append(effects.TellRank(rank, self._newest.pushed()))
        if self._lost is not None:
            return [*out, self._tell_lost(rank)]
        return [*out, *(effects.NotifyRank(rank, notice) for notice in self._notices_now())]

    def _notices_now(self) -> list[LossNotice]:
        return [notice for notice in self._notices if self.quorum is not None and notice.key == self.quorum.key]

    def _lost_message(self) -> str:
        return f"replica {self._replica_id} lost a rank ({self._lost}); end this process and start the group again"

    # --- requests ---------------------------------------------------------------------------------------------------

    def _rank_asked(self, event: events.RankAsked, now_ms: int) -> list[effects.GroupEffect]:
        rank = event.rank
        if not 0 <= rank < self._world_size:
            message = (
                f"rank {rank} asks in replica {self._replica_id}, which has world size {self._world_size}; "
                "give every process of the group the same WORLD_SIZE and its own RANK below it"
            )
            return [effects.FailRank(event.call, rank, "malformed", message)]
        if self._lost is not None:
            return [effects.FailRank(event.call, rank, "group_lost", self._lost_message())]
        if self._leaves is not None:
            return [effects.FailRank(event.call, rank, Refusal.LEFT.value, self._left_message())]
        out: list[effects.GroupEffect] = []
        again = self._repeated_answer(event)
        if again is not None:
            return [again]
        before = self._asked.get(rank)
        if before is not None:
            if 0 < event.request.attempt < before.request.attempt:
                message = f"rank {rank} of replica {self._replica_id} has sent a newer request; this one is too late"
                return [effects.FailRank(event.call, rank, "stale", message)]
            out += self._withdrew(rank, before.call)
            message = f"rank {rank} of replica {self._replica_id} sent a newer request; this older one is discarded"
            out.append(effects.FailRank(before.call, rank, "stale", message))
        out += self._leave_standing(rank, event.request.held)
        if not self._asked:
            self._wait_sentence = ""
        self._asked[rank] = _Asked(event.call, event.request, event.deadline_ms)
        self._metadata[rank] = event.request.checkpoint_metadata
        if event.request.fingerprint:
            self._fingerprints[rank] = event.request.fingerprint
            self._fingerprint_changed = True
        out += self._fail_outdated()
        if len(self._asked) < self._world_size:
            return out
        found = differences_of_ranks(self._fingerprints) if self._fingerprint_changed else []
        if found:
            message = (
                f"the ranks of replica {self._replica_id} differ: {list_differences(found)}; give every process of the "
                "group the same settings"
            )
            return [*out, *self._fail_all(Refusal.DIFFERS.value, message)]
        member, held = self._merge()
        self._votes.forget_before(member.step)
        self._last_request += 1
        self._open_request = self._last_request
        self._open_member = member
        self._newest.asked(now_ms)
        return [*out, effects.AskLighthouse(self._open_request, member, held, self._fingerprint())]

    def _leave_standing(self, rank: int, held: QuorumKey | None) -> list[effects.GroupEffect]:
        """Fail the rounds of a standing quorum in which one rank asks for a new quorum.

        The group's verdict was that the quorum stands, so the other ranks have begun the next round or are about to.
        None of its rounds can be committed any more, and the ranks are told so.
        """
        if held is None or self._votes.stands_in != held or self._world_size == 1:
            return []
        self._votes.stands_in = None
        answers = self._votes.seal(held)
        others = [other for other in sorted(self._streams) if other != rank]
        return [
            *(effects.AnswerVote(call, other, verdict) for call, other, verdict in answers),
            *(effects.TellRank(other, QuorumNews(held, broken=True)) for other in others),
        ]

    def _newest_named(self, news: QuorumNews, sent_ms: int | None) -> list[effects.GroupEffect]:
        """Handle the lighthouse's name of the newest quorum. Tell the ranks at once what changes by it."""
        held = self.quorum.key if self.quorum is not None else None
        if not self._newest.named(news, sent_ms, held):
            return []
        changed = self._newest.pushed()
        return [effects.TellRank(rank, changed) for rank in sorted(self._streams)]

    def _repeated_answer(self, event: events.RankAsked) -> effects.AnswerPlan | effects.AnswerRankUnchanged | None:
        """Return the earlier answer to this very attempt, if the rank has not received it.

        A second request to the lighthouse would count as the next one, and this group would be one behind the others
        from then on.
        """
        attempt, answer = self._answers.get(event.rank, (0, None))
        if answer is None or not 0 < attempt == event.request.attempt:
            return None
        return replace(answer, call=event.call)

    def _answer(self, answer: effects.AnswerPlan | effects.AnswerRankUnchanged) -> effects.GroupEffect:
        self._answers[answer.rank] = self._asked[answer.rank].request.attempt, answer
        return answer

    def _fingerprint(self) -> Fingerprint:
        """Return the group's fingerprint if it has changed since the last request to the lighthouse, else ()."""
        changed, self._fingerprint_changed = self._fingerprint_changed, False
        return merged(self._fingerprints) if changed else ()

    def _fail_outdated(self) -> list[effects.GroupEffect]:
        """Fail the requests of ranks that wait in an older attempt.

        A rank whose request has failed is one attempt ahead of the other ranks. It would stay ahead for ever, and each
        would wait for the other in another step.
        """
        newest = max(asked.request.attempt for asked in self._asked.values())
        out: list[effects.GroupEffect] = []
        for rank, asked in sorted(self._asked.items()):
            if 0 < asked.request.attempt < newest:
                message = (
                    f"another rank of replica {self._replica_id} got no quorum in attempt {asked.request.attempt}, so "
                    f"neither does rank {rank}; the next step asks again"
                )
                out += self._withdrew(rank, asked.call)
                out.append(effects.FailRank(asked.call, rank, "stale", message))
        return out

    def _withdrew(self, rank: int, call: int) -> list[effects.GroupEffect]:
        self._votes.withdraw(call)
        asked = self._asked.get(rank)
        if asked is None or asked.call != call:
            return []
        del self._asked[rank]
        request, self._open_request = self._open_request, None
        return [] if request is None else [effects.WithdrawFromLighthouse(request)]

    def _merge(self) -> tuple[Member, QuorumKey | None]:
        """Return the group's request, merged from the requests of its ranks, and the quorum that the group holds.

        The fields of `RankRequest` name the rules; the fields here depend on several of them.
        """
        requests = [self._asked[rank].request for rank in range(self._world_size)]
        first = requests[0]
        states = {(request.step, request.lineage) for request in requests}
        # Unknown lineages equal nothing, but the ranks of one group that all loaded the same step are in one state.
        torn = len(states) > 1 or any(request.torn for request in requests)
        # If some ranks have begun in the newest quorum and others never got it, the lighthouse can't give it to the
        # group again.
        holds = {request.held for request in requests}
        held = max((key for key in holds if key is not None), default=None)
        member = Member(
            **merged_fields(requests),
            replica_id=self._replica_id,
            address=self._address,
            store_address=self._store_address,
            lineage=None if torn else first.lineage,
            world_size=self._world_size,
            needs_configure=len(holds) > 1 or any(request.needs_configure for request in requests),
            torn=torn,
            reconfigure_handles=tuple(request.reconfigure_handle for request in requests)
            if any(request.reconfigure_handle for request in requests)
            else (),
            unreached=_all_unreached(requests),
        )
        return member, held

    def _arrived(self, request: int, quorum: Quorum) -> list[effects.GroupEffect]:
        if request != self._open_request:
            return []  # the request was withdrawn or answered before
        try:
            common = assign(quorum)
            plans = [plan_for(quorum, self._replica_id, rank, common) for rank in range(self._world_size)]
        except ProtocolError as error:
            return self._fail_all("malformed", str(error))
        self.quorum = quorum
        self._left_out = None  # another lighthouse may have left this group out
        self._unchanged_at = None
        self._newest.given(quorum.key)
        self._votes.unseal()
        self._planned_step = common.step
        self._all_up_to_date = len(common.up_to_date) == len(quorum.members)
        self._open_request = None
        out: list[effects.GroupEffect] = [
            self._answer(effects.AnswerPlan(self._asked[rank].call, rank, plans[rank], quorum))
            for rank in range(self._world_size)
        ]
        self._asked.clear()
        self._notices = [notice for notice in self._notices if notice.key >= quorum.key]
        out += [effects.NotifyRank(rank, notice) for rank in sorted(self._streams) for notice in self._notices_now()]
        return out

    def _unchanged(self, request: int, key: QuorumKey) -> list[effects.GroupEffect]:
        if request != self._open_request:
            return []
        if self.quorum is None or self.quorum.key != key:
            message = f"the lighthouse kept quorum {key}, which replica {self._replica_id} never received"
            return self._fail_all("malformed", message)
        own = self._open_member
        if own is not None and not (self._all_up_to_date and own.step > self._planned_step):
            # In the ranks' plan some member heals, or the ranks have not stepped since they got another plan, so that
            # the answer may have been lost. All members are at this group's state now, so the new plan needs no
            # request.
            return self._arrived(request, _all_at_state_of(own, self.quorum))
        self._unchanged_at = own
        self._newest.given(key)
        self._votes.unseal()
        self._open_request = None
        out: list[effects.GroupEffect] = [
            self._answer(effects.AnswerRankUnchanged(asked.call, rank, key))
            for rank, asked in sorted(self._asked.items())
        ]
        self._asked.clear()
        return out

    def _fail_all(self, code: str, message: str) -> list[effects.GroupEffect]:
        out: list[effects.GroupEffect] = []
        if self._open_request is not None:
            out.append(effects.WithdrawFromLighthouse(self._open_request))
            self._open_request = None
        out += [effects.FailRank(asked.call, rank, code, message) for rank, asked in sorted(self._asked.items())]
        self._asked.clear()
        return out

    def _missing(self, now_ms: int) -> str:
        absent = [str(rank) for rank in range(self._world_size) if rank not in self._asked]
        if absent:
            return f"rank {', '.join(absent)} of the group has not asked; check whether it hangs"
        if self._left_out is not None:
            news, until_ms = self._left_out
            return left_out_wait(news, until_ms - now_ms)
        if self._wait_sentence:
            return f"the lighthouse reports: {self._wait_sentence}"
        return "the lighthouse has not answered; `tft doctor` shows what it waits for"

    # --- votes --------------------------------------------------------------------------------------------------------

    def _voted(self, event: events.RankVoted) -> list[effects.GroupEffect]:
        if not 0 <= event.rank < self._world_size:
            message = f"rank {event.rank} votes in replica {self._replica_id}, which has world size {self._world_size}"
            return [effects.FailRank(event.call, event.rank, "malformed", f"{message}; check RANK and WORLD_SIZE")]
        name = RoundName(event.key, event.step, event.purpose)
        if not self._votes.has_room(name):
            message = (
                f"replica {self._replica_id} has {MAX_ROUNDS} undecided votes, so rank {event.rank} can't vote "
                f"on step {event.step}; ask for a quorum with every rank between two votes"
            )
            return [effects.FailRank(event.call, event.rank, "malformed", message)]
        # A new manager server of a living rank does not hold the rank's quorum, and tells no lighthouse of it. So the
        # rank asks for a quorum before it begins another round.
        answers = self._votes.cast(
            name,
            event.rank,
            event.call,
            event.yes,
            event.deadline_ms,
            leaving=event.leaving,
            stands=event.stands and self.quorum is not None and event.key == self.quorum.key,
        )
        return [effects.AnswerVote(call, rank, verdict) for call, rank, verdict in answers]
