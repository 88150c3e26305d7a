"""A training process of the simulated cluster: a shell of the real step core, without tensors.

Weights are a digest, a gradient is a name, and a process group is the set of members that were configured with one key.
The core decides. This shell reports events to it and performs its orders. `loops.py` and `syncs.py` hold the user's
loop. `recovery.py` holds the transfer of states.

Law of this file: one rank's events and effects, on the training thread and beside it.
"""

from __future__ import annotations

from collections.abc import Collection

from tft_coord.core.standing import State as Stand
from tft_coord.core.step import Effects, Phase
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.stragglers import PaceKind, StragglerNotice
from tft_coord.core.types import LossNotice, Plan, QuorumKey, QuorumNews
from tft_coord.errors import ReplicaGroupLostError
from tft_sim.config import TrainerSettings
from tft_sim.ending import Ending
from tft_sim.invariants import Contribution, Reduced
from tft_sim.quorum import Quorum
from tft_sim.rank import Rank, Surroundings
from tft_sim.recovery import Recovery
from tft_sim.speaking import Speaking
from tft_sim.waiting import Life, ReplicaLostError, UserError, Waiter

POLL_MS = 50
ABORT_AFTER_MS = 50  # a reduction that has its data can end
LEAVE_WITHIN_MS = 10_000  # a rank that was told to leave stays or serves for up to this time, for the others' sake


class Trainer(Rank):
    """One rank of a replica group.

    Args:
        job, replica_id, rank: its identity.
        settings: of the job.
        outside: its surroundings.
        host: its host, if another process runs under that replica id.
    """

    def __init__(
        self,
        job: str,
        replica_id: str,
        rank: int,
        world_size: int,
        settings: TrainerSettings,
        outside: Surroundings,
        *,
        host: str = "",
    ) -> None:
        super().__init__(job, replica_id, rank, world_size, settings, outside, host=host)
        self.recovery = Recovery(self)
        self.speaking = Speaking(self)
        self.quorum = Quorum(self, self.recovery, self.speaking)

    # --- the mailbox ------------------------------------------------------------------------------------------------

    def _perform(self, effect: do.Effect) -> None:
        match effect:
            case do.UsePlan(_, plan):
                self._plan_received(plan)
            case do.ForgetPace():
                self.own_time.forget()
            case do.RecordCommit(_, _, committed, excused):
                self.own_time.step_ended(counts=committed and not excused)
            case do.BreakQuorum(notice):
                self.recovery.lost(notice)
                self.after(ABORT_AFTER_MS, lambda: self._abort(notice.key))
            case do.EndQuorum(key):
                self.mark("the newest quorum broke the one that was held")
                self.note(f"learns that its quorum has ended ({self.phase})")
                self.after(ABORT_AFTER_MS, lambda: self._abort(key))
            case do.BreakAll() if self.group is not None:
                self._abort(self.group.key)
            case do.AbortGroup():
                self.leave_group()
            case do.Fetch(_, plan):
                self.recovery.fetch(plan)
            case do.RefuseState(plan):
                self.recovery.refuse(plan)
            case do.EndFetch():
                self.recovery.end_fetch()
            case do.ReportLeft():
                self._leaves()
            case do.ReportError(_, _, counts) if not counts:
                self.mark("an error came when its step was over")
            case do.ReportHealed() | do.ReportHealFailed():
                self.recovery.ended(effect)
            case do.HealAgain():
                self.mark("state was registered after a healing")
            case do.WarnLateState():
                self.mark("state was registered late")

    def _plan_received(self, plan: Plan) -> None:
        status, outside = self.core.status, self.outside
        in_flight = sum(each.plan is not None and each.plan.key == plan.key for each in status.aside)
        if self.settings.speaks and plan.lease_ms is None:
            self.mark("an older member made all ask in every step")
        outside.invariants.planned(plan, self.rank, in_flight)
        if status.configured == plan.key and self.group is None:
            # The group was aborted since the request. A key is for one meeting: under it this rank would meet departed
            # members, or none.
            self.mark("a key was not used twice")
        self.recovery.planned(plan)

    # --- news, on a thread of its own -------------------------------------------------------------------------------

    def loss_announced(self, notice: LossNotice) -> None:
        """Handle the notice of a lost member of a quorum."""
        held = self.core.status.held
        breaks = any(isinstance(each, do.BreakQuorum) for each in self._report_and_perform(on.LossNoticed(notice)))
        if breaks:
            self.mark(f"a notice came in: {self.phase}")
            self.note(f"receives a loss notice for its quorum ({self.phase})")
        elif held is not None and notice.key < held:
            self.mark("a notice came after the next quorum")
            self.note("receives a loss notice for an older quorum")
        elif notice.key == held:
            self.mark("a notice came twice")
            self.note("receives the same loss notice again")
        else:
            self.mark("a notice overtook its quorum")
            self.note("receives a loss notice for a quorum that it does not hold yet")

    def quorum_announced(self, news: QuorumNews) -> None:
        """Handle the news of the newest quorum."""
        before = self.core.status.standing
        self.report(on.QuorumNamed(news))
        if news.beat and news.age_ms > 2 * self.outside.timeouts.beat_interval_ms:
            self.mark("an answer to an old beat came to a rank")
        if self.core.status.standing is Stand.RECALLED is not before:
            self.mark("a standing rank was recalled")
            self.note("is told to ask for a quorum after its next word")

    def number_beat(self) -> int:
        """Return the number of a beat that is sent now. 0: the beat needs no answer."""
        return next((order.number for order in self.report(on.BeatDue()) if isinstance(order, do.NumberBeat)), 0)

    def _report_and_perform(self, event: on.Event) -> Effects:
        """Report an event, and return all its effects, performed or not."""
        effects = self.core.handle(event, self.outside.own_ms())
        for effect in effects:
            self._perform(effect)
        return effects

    def group_lost(self, message: str) -> None:
        """Handle the news that a rank of this group is lost."""
        self.mark("a rank heard that its group is lost")
        self.report(on.GroupWasLost(ReplicaGroupLostError(message)))

    def pace_announced(self, news: StragglerNotice) -> None:
        """Handle the lighthouse's news of this replica's pace. A new share of the batch holds from the next step on."""
        if news.sentence:
            self.note(f"receives news of its pace: {news.kind.name}")
        self.share = news.share
        self.left_out = news.kind is PaceKind.LEFT_OUT
        self.report(on.PaceHeard(self.left_out))

    def leave(self) -> None:
        """Leave after the current step, on request."""
        if not self.core.status.wishes:
            self.note("is told to leave")
        self.report(on.LeaveWished("it was told to", self.outside.own_ms() + LEAVE_WITHIN_MS))

    def check_waits(self) -> None:
        """Check once a beat whether this rank waits for too long, or leaves while it waits for a quorum."""
        waits_ms = self.clock.now_ms - self.phase_since_ms if self.phase in ("reduction", "word") else None
        for effect in self.report(on.Looked(self.left_out, waits_ms)):
            match effect:
                case do.TellLeaving():
                    self.mark("a rank left while it waited for a quorum")
                    self.outside.leave(self, effect)
                case do.TellLate(key, step):
                    self.mark("a standing round was late")
                    self.note(f"reports that step {step + 1} waits too long for a member")
                    self.outside.report_late(self, key, step)

    def report_error(self) -> None:
        """Report an error of the user's, at any moment."""
        inside = self.core.status.is_open
        self.mark("the user reported an error in a step" if inside else "the user reported an error between two steps")
        self.report(on.UserReportedError(UserError("the user's own")))

    def register_state(self) -> None:
        """Register a piece of state, late."""
        self.report(on.StateRegistered())

    # --- the process group ------------------------------------------------------------------------------------------

    def end(self, *, vanish: bool = False) -> None:
        """End, killed or gone with the host."""
        if not self.alive:
            return
        super().end(vanish=vanish)
        if not vanish:  # a host that is gone tells no process anything
            self.leave_group()

    def _abort(self, key: QuorumKey) -> None:
        """End the work in that quorum. Work in another quorum goes on."""
        self.recovery.check_sources()
        if self.group is None or self.group.key != key:
            return
        self.note("aborts the work in its broken quorum")
        # The group tells this to members that wait in the group itself. A member that only lacks a neighbour's answer
        # is not told.
        self.group.abort(self.replica_id)
        self.leave_group()

    # --- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, part: str, gradient: str) -> Life:
        """Reduce one tensor. Returns: `Reduced`. None: the reduction is lost."""
        for order in self.report(on.ReductionAsked()):
            match order:
                case do.Reduce():
                    return (yield from self._reduce(order, part, gradient))
                case do.ReduceAlone(name):
                    return (yield from self._reduce_alone(name.key, gradient))
                case do.LoseReduction(aborts):
                    if aborts and self.group is not None:
                        self.mark("a rank ended what the others would wait for")
                        self.leave_group()
        return None

    def _reduce(self, order: do.Reduce, part: str, gradient: str) -> Life:
        group, given = self.group, gradient if order.gives else None
        if group is None:
            self.report(on.ErrorReported(ReplicaLostError("the process group was aborted"), order.name))
            return None
        self.num_reductions += 1
        number = self.num_reductions
        contribution = Contribution(
            self.replica_id, self.state_held, given, part, order.factor, order.divide_by, order.weight
        )
        waiter = group.reduce(number, contribution)
        result = yield self.within(waiter, self.outside.timeouts.timeout_ms)
        if result is None:
            self.mark("a reduction failed")
            self.note("has lost its reduction")
            self.note_unreached(group)
            if self.group is group:
                self.leave_group()
            self.report(on.ErrorReported(ReplicaLostError("a reduction failed"), order.name))
        return result

    def _reduce_alone(self, key: QuorumKey | None, gradient: str) -> Life:
        assert key is not None
        self.num_reductions += 1
        yield self.sleep(self.outside.chance.spread_ms())
        result = Reduced(key, self.rank, (self.num_reductions,), (gradient,))
        self.outside.invariants.delivered(self.replica_id, result)
        return result

    # --- a step ends ------------------------------------------------------------------------------------------------

    def should_commit(self, number: int = 0, results: Collection[Waiter] = ()) -> Life:
        """End a step.

        Args:
            number: of a deferred step. 0: the open step.
            results: of its reductions.
        Returns: the outcome for the training loop, and the voted round, or None.
        """
        if number and self.core.status.is_open:
            yield from self.exchange_now(speaks=False)  # the reductions of the open step may still come
        orders = self.report(on.EndAsked(number))
        if not number:
            yield from self.quorum.wait()
        for result in results:
            if not result.done:
                self.phase = "reduction"
                yield result
        orders = orders or self.report(on.ReductionsEnded(number))
        end = Ending(self, self.speaking, number)
        while True:
            concluded: do.Concluded | None = None
            asks: on.Event | None = None
            for order in orders:
                match order:
                    case do.Raise(error):
                        yield from self.raises(error)
                    case do.SynchronizeDevice():
                        failed = ReplicaLostError("the process group failed") if self.group is None else None
                        asks = on.DeviceSynchronized(number, failed)
                    case do.SendWord():
                        asks = yield from end.speak(order)
                    case do.HearWord():
                        asks = yield from end.hear(order)
                    case do.ExchangeState():
                        yield from self.recovery.exchange()
                        asks = on.VoteAsked()
                    case do.CastVote():
                        asks = yield from end.cast(order)
                    case do.TellLeaving():
                        yield from self.tell_leaving(order)
                    case do.Concluded():
                        concluded = order
            if concluded is not None:
                return concluded, end.vote
            assert asks is not None, f"{self.name} does not know what to do after {orders}"
            orders = self.report(asks)

    def exchange_now(self, results: Collection[Waiter] = (), *, speaks: bool = True) -> Life:
        """Give or take state as soon as the plan is known, as a strategy wants it.

        Args:
            results: of the reductions.
            speaks: all reductions of the attempt were asked for, so its control word may go first.
        """
        self.report(on.StrategyExchanges())
        yield from self.quorum.wait()
        if speaks and self.status.speaks_first:
            for result in results:
                if not result.done:
                    self.phase = "reduction"
                    yield result
            failed = ReplicaLostError("the process group failed") if self.group is None else None
            for order in self.report(on.WordAsked(failed)):
                assert isinstance(order, do.SendWord)
                self.speaking.send(order)
        yield from self.recovery.exchange()

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _leaves(self) -> None:
        self.note(f"leaves after step {self.step}")
        self.outside.invariants.left(self.host, self.rank, self.state_held, self.core.status.check, torn=self.torn)
        if not self.core.status.wishes:
            self.mark("a rank left because another one was told to")

    def tell_leaving(self, order: do.TellLeaving) -> Life:
        """Tell the manager server that this group leaves."""
        if self.core.status.phase is Phase.IDLE and self.core.status.plan is None:
            self.mark("a rank left without a quorum")
        taken = yield self.outside.leave(self, order)
        self.mark("a rank left" if taken is not None else "a rank left without its manager server")

    def end_of_job(self) -> Life:
        """Shut this rank down."""
        self.phase = "left"
        if not self.core.status.left and self.core.status.wishes:
            self.mark("a rank left between two steps")
        for effect in self.report(on.EndingAsked(True, LEAVE_WITHIN_MS)):
            match effect:
                case do.TellLeaving():
                    yield from self.tell_leaving(effect)
                case do.ServeOn(until_ms):
                    while self.outside.is_healed_from(self) and self.outside.own_ms() < until_ms:
                        self.mark("one that has left was healed from")
                        yield self.sleep(POLL_MS)
        yield from self.speaking.let_the_last_word_pass()
        self.outside.ended(self, "left")
        yield Waiter()  # waits for ever
