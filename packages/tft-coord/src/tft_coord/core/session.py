"""The manager server's side of its stream to the lighthouse: when to dial, what to send, which answers to accept.

A stream breaks for many reasons, most of them harmless. The client therefore redials at once, often in the first
second, and keeps its session number. It raises the number only when the lighthouse says that the session was lost: a
loss ends with a newer session. The client resends an open request on every new stream, so a broken stream costs no
replica a quorum.

Law of this file: no I/O; the shell dials, sends and tells the time. Jitter comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.progress import Progress
from tft_coord.core.types import Hello, Member, QuorumKey, Refusal
from tft_coord.timeouts import Timeouts

STALE_DOUBLINGS_MOST = 40  # 2^40 ms are 35 years
UNANSWERED_MOST = 64  # beats whose send times are kept


@dataclass(frozen=True, slots=True)
class Dial:
    """The order to open a stream at `at_ms` to the lighthouse address with that index."""

    at_ms: int
    address: int = 0


@dataclass(frozen=True, slots=True)
class SendHello:
    """The order to send the hello; always the first message of a stream and of a newer session."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class SendRequest:
    """The order to ask for a quorum. The first request of a session on a stream carries `fingerprint`, and so does one
    after a change."""

    request: int
    member: Member
    held: QuorumKey | None
    fingerprint: Fingerprint = ()


@dataclass(frozen=True, slots=True)
class SendWithdraw:
    """The order to withdraw a request."""

    request: int


@dataclass(frozen=True, slots=True)
class SendBeat:
    """The order to send a heartbeat."""

    healed_bytes: int
    progress: Progress | None = None
    waits: bool = False
    number: int = 0  # the answer names the newest quorum; 0: no answer is wanted


@dataclass(frozen=True, slots=True)
class SendLeave:
    """The order to report that the group has left the job; `finished_step` as in `LeaveReceived`."""

    reason: str
    serve_ms: int
    finished_step: int | None = None


@dataclass(frozen=True, slots=True)
class HangUp:
    """The order to close the open stream."""


@dataclass(frozen=True, slots=True)
class Look:
    """The order to ask the lighthouse at that address for its description and whether it serves this job; see
    `looked`."""

    address: int


@dataclass(frozen=True, slots=True)
class Say:
    """The order to log once what is wrong with the lighthouse at that address."""

    address: int
    message: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The order to stop for good: the lighthouse refused this replica, or the start found no lighthouse. Nothing more
    is sent."""

    code: str
    message: str


SessionEffect = Dial | SendHello | SendRequest | SendWithdraw | SendBeat | SendLeave | HangUp | Look | Say | GiveUp


class SessionCore:
    """One replica group's side of its sessions with the lighthouse.

    Args:
        job, replica_id, address, replaces: as in `Hello`.
        session: first session number; a number that rises with restarts (milliseconds since 1970 do).
        timeouts: beat interval and redial pace.
        jitter: returns a number in [0, 1); spreads redials.
        num_addresses: of the lighthouse. Several addresses must be of one cluster, and the client dials the next one
            when one is unreachable or stops answering.
        pid, answers_probes, tries_peers: as in `Hello`.
    """

    def __init__(
        self,
        *,
        job: str,
        replica_id: str,
        address: str,
        session: int,
        timeouts: Timeouts,
        jitter: Callable[[], float],
        replaces: str = "",
        num_addresses: int = 1,
        pid: int = 0,
        answers_probes: bool = True,
        tries_peers: bool = False,
    ) -> None:
        self._job = job
        self._replica_id = replica_id
        self._address = address
        self._replaces = replaces
        self._timeouts = timeouts
        self._jitter = jitter
        self._num_addresses = num_addresses
        self._pid = pid
        self._answers_probes = answers_probes
        self._tries_peers = tries_peers
        self._address_dialed = 0
        self._redials_same = False  # the last dialed lighthouse serves this replica, or will
        self._next_look_ms = 0
        self._served = False  # by any lighthouse, since the start
        self._hopeless: set[int] = set()  # addresses whose last dial found a fault that waiting can't repair
        self._strangers: set[int] = set()  # addresses whose last lighthouse was of another cluster, or torchft's
        self.session = session
        self.connected = False
        self.refused: GiveUp | None = None
        self.held: QuorumKey | None = None
        self.round_trip_ms: int | None = None  # from the hello to the welcome of the newest stream
        self._opened_ms: int | None = None
        self.num_answers = 0  # how often the held quorum was given or confirmed
        self.lighthouse_started_ms = 0
        self.cluster_id = ""
        self._ready = False
        self._welcomed = False
        self._beats_count = False  # this stream announced the session, and the session is not known to be lost
        self._open: SendRequest | None = None
        self._fingerprint: Fingerprint = ()
        self._fingerprint_sent = False  # in this session, on this stream
        self._leave: SendLeave | None = None
        self._broken_at_ms: int | None = None
        self._next_beat_ms = 0
        self._beat_interval_ms = timeouts.beat_interval_ms
        self._healed_bytes = 0
        self._lease_ms = 0  # of the newest request
        self._beats: dict[int, int] = {}  # number -> send time, of the unanswered beats of this stream
        self._last_beat = 0
        self._stale_in_a_row = 0
        self._duplicate_since_ms: int | None = None
        self.hangs = False  # the session was lost, and no newer one opens while the trainer hangs

    def start(self, now_ms: int) -> list[SessionEffect]:
        """Start: dial at once."""
        self._broken_at_ms = now_ms
        return [Dial(now_ms, self._address_dialed)]

    def stream_opened(self, now_ms: int) -> list[SessionEffect]:
        """Handle a dial that succeeded: send the hello first."""
        if self.refused is not None:
            return [HangUp()]
        self.connected = True
        self._opened_ms = now_ms
        self._welcomed = self._redials_same = False
        self._beats_count = True
        self._fingerprint_sent = False
        self._beats.clear()
        self._next_beat_ms = now_ms + self._timeouts.beat_interval_ms
        return [self._hello()]

    def stream_broke(self, now_ms: int) -> list[SessionEffect]:
        """Handle the end of the stream or a failed dial: redial, fast at first, then more slowly."""
        self.connected = False
        self._welcomed = self._beats_count = False
        if self.refused is not None:
            return []
        if self._broken_at_ms is None:  # only a welcome ends a break, so redials after refusals slow down too
            self._broken_at_ms = now_ms
        if not self._redials_same:
            self._address_dialed = self._next_address()
        self._redials_same = False
        return [Dial(now_ms + self._redial_delay_ms(now_ms), self._address_dialed)]

    def welcomed(
        self,
        session: int,
        lighthouse_started_ms: int,
        now_ms: int,
        cluster_id: str = "",
        heartbeat_timeout_ms: int = 0,
    ) -> list[SessionEffect]:
        """Handle the lighthouse's welcome. A lighthouse that is older than one accepted before, of the same cluster, is
        rejected.

        A lighthouse of another cluster at the only address is a restart without memory, whatever its clock says. Among
        several addresses it is a stranger. A group that accepted it would leave the other groups, which may never reach
        it. If the lighthouse declares replicas lost sooner than the local timeouts do, the beats come as often as that
        takes.
        """
        if session != self.session:
            return []
        if self._num_addresses > 1 and self.cluster_id and cluster_id != self.cluster_id:
            return self._leave_stranger(f"belongs to cluster {cluster_id}")
        if cluster_id == self.cluster_id and lighthouse_started_ms < self.lighthouse_started_ms:
            return [HangUp()]
        self.lighthouse_started_ms = lighthouse_started_ms
        self.cluster_id = cluster_id
        if self._opened_ms is not None:
            self.round_trip_ms, self._opened_ms = now_ms - self._opened_ms, None
        self._welcomed = self._redials_same = self._served = True
        self.hangs = False  # a lighthouse that has forgotten the loss will judge for itself
        self._broken_at_ms = None
        self._stale_in_a_row = 0
        self._duplicate_since_ms = None
        self._beat_interval_ms = self._timeouts.beat_interval_ms
        if heartbeat_timeout_ms:
            self._beat_interval_ms = max(1, min(self._beat_interval_ms, heartbeat_timeout_ms // 2))
            self._next_beat_ms = min(self._next_beat_ms, now_ms + self._beat_interval_ms)
        asked = [self._request(self._open)] if self._open is not None else []
        return [*([self._leave] if self._leave is not None else []), *asked]

    def leave(self, reason: str, serve_ms: int, finished_step: int | None = None) -> list[SessionEffect]:
        """Report that the group has left, now and on every new stream."""
        if self._leave is not None:
            return []
        self._leave = SendLeave(reason, serve_ms, finished_step)
        return [self._leave] if self._welcomed else []

    def told_lost(self, session: int, now_ms: int, *, hung: bool = False) -> list[SessionEffect]:
        """Handle the loss of a session whose process lives: open a newer session on the same stream.

        A loss ends with a newer session whose trainer lives. For a hung trainer no session opens before the trainer
        goes on.
        """
        if session != self.session or not self.connected:
            return []
        self._welcomed = self._beats_count = False
        self.hangs = hung
        return [] if hung else self._open_newer()

    def went_on(self, now_ms: int) -> list[SessionEffect]:
        """Handle a hung trainer that goes on: open the session that was held back."""
        if not self.hangs:
            return []
        self.hangs = False
        return self._open_newer() if self.connected else []

    def _open_newer(self) -> list[SessionEffect]:
        self.session += 1
        self._beats_count = True
        self._fingerprint_sent = False
        return [self._hello()]

    def told_refused(
        self, refusal: Refusal, message: str, now_ms: int, silent_ms: int = 0, *, hung: bool = False
    ) -> list[SessionEffect]:
        """Handle the lighthouse's refusal of the session.

        A stale session retries with a newer number, farther ahead each time, because it is unknown how far a clock was
        set back. It does not retry while the trainer is `hung` (see `told_lost`): another process may have had its id
        meanwhile, and have ended. A duplicate of the replica id may be dead without the lighthouse knowing it. The
        duplicate lives if the lighthouse heard it, `silent_ms` ago, long after this replica first asked. The elapsed
        time alone proves nothing, because a lighthouse that was away or slow declares no losses. The client leaves an
        older lighthouse for the next dial, and so a lighthouse whose clock is far behind, and one without room. All
        other refusals are final.
        """
        self._welcomed = self._beats_count = False  # nothing more is sent on this stream
        if refusal in (Refusal.STALE, Refusal.LOST):
            self._redials_same = True
            if not hung:
                self.session += 1 << min(self._stale_in_a_row, STALE_DOUBLINGS_MOST)
                self._stale_in_a_row += 1
            return [HangUp()]
        if refusal is Refusal.OLD_LIGHTHOUSE:
            self._redials_same = False
            return [HangUp()]
        if refusal in (Refusal.CLOCK, Refusal.FULL):
            # A replica that was served before waits until the operator has corrected the clock or the limit, as it
            # waits for a lighthouse that is away.
            self._redials_same = False
            return [*self.dial_failed(self._address_dialed, refusal.value, message), HangUp()]
        if refusal is Refusal.DUPLICATE:
            if self._duplicate_since_ms is None:
                self._duplicate_since_ms = now_ms
            patience_ms = self._timeouts.heartbeat_timeout_ms + self._timeouts.reconnect_grace_ms
            if now_ms - silent_ms - self._duplicate_since_ms < patience_ms:
                self._redials_same = True
                return [HangUp()]
        self.refused = GiveUp(refusal.value, message)
        return [self.refused, HangUp()]

    def looked(self, address: int, cluster_id: str, lighthouse_started_ms: int, *, serves: bool) -> list[SessionEffect]:
        """Handle the description of the lighthouse at another address. `serves`: it has heard of this job.

        Some groups may have moved to a newer lighthouse of the cluster, because they could not reach this one for a
        moment. Two halves would go on, each with its own lighthouse. All groups therefore follow to the newest one. A
        lighthouse of another cluster can't replace this one; the log tells the operator in time.
        """
        if not self._welcomed:
            return []
        if cluster_id != self.cluster_id:
            return self._found_stranger(address, f"belongs to cluster {cluster_id}") if self.cluster_id else []
        self._strangers.discard(address)  # it was restarted with the cluster's name
        if lighthouse_started_ms <= self.lighthouse_started_ms or not serves:
            return []
        self._address_dialed = address
        self._redials_same = True
        return [HangUp()]

    def found_foreign(self) -> list[SessionEffect]:
        """Handle a lighthouse that does not know this service: it is torchft's, and can serve only as the single
        lighthouse."""
        if self._num_addresses > 1:
            return self._leave_stranger("is torchft's, which has no clusters")
        self._redials_same = self._served = True
        self._broken_at_ms = None
        return []

    def dial_failed(self, address: int, code: str, message: str) -> list[SessionEffect]:
        """Handle a dial that led to no lighthouse that serves this replica; `stream_broke` follows.

        Before the first lighthouse served this replica, a wrong secret or a wrong server at every address ends the
        start: the user has to change a setting. For a server that is only away the client waits. Once the replica was
        served, it waits in all cases: a running job must survive a proxy or a neighbour that answers for a moment.

        Args:
            code: "" where the address may serve later; else what is wrong with it, as in `GiveUp`.
            message: the fault in words, for a user.
        """
        if not code:
            self._hopeless.discard(address)
            return []
        self._hopeless.add(address)
        if self._served or self.refused is not None or len(self._hopeless) < self._num_addresses:
            return []
        self.refused = GiveUp(code, message)
        return [self.refused]

    def ask(
        self, request: int, member: Member, held: QuorumKey | None, now_ms: int, fingerprint: Fingerprint = ()
    ) -> list[SessionEffect]:
        """Ask for the next quorum; every new stream resends the request until it is answered or withdrawn.

        The first request on each stream carries the fingerprint, because a lighthouse may have no memory. So does the
        first request of each newer session: the lighthouse has missed or forgotten what the lost session sent.
        """
        if fingerprint:
            self._fingerprint, self._fingerprint_sent = fingerprint, False
        self._ready = True
        if held is not None and (self.held is None or held > self.held):
            # An older key never replaces a newer one: ranks that ask as before have not got the newest quorum, or their
            # request is late. The hello names the quorum that was given here, because the ranks may be in it.
            self.held, self.num_answers = held, 0
        self._open = SendRequest(request, member, held)
        self._lease_ms = member.lease_ms or 0
        return [self._request(self._open)] if self._welcomed else []

    def withdraw(self, request: int, now_ms: int) -> list[SessionEffect]:
        """Withdraw the request."""
        if self._open is None or self._open.request != request:
            return []
        self._open = None
        return [SendWithdraw(request)] if self._welcomed else []

    def answered(self, request: int, key: QuorumKey | None) -> bool:
        """Record an answer; return False if its request is no longer open. `key` is None for a refusal."""
        if self._open is None or self._open.request != request:
            return False
        if key is not None:
            self.held, self.num_answers = key, self.num_answers + 1 if key == self.held else 1
        self._open = None
        return True

    def beat_answered(self, number: int) -> int | None:
        """Return when the beat of that number was sent; None: it is no beat of this stream, or was answered before."""
        sent_ms = self._beats.pop(number, None)
        if sent_ms is not None:
            self._beats = {each: at_ms for each, at_ms in self._beats.items() if each > number}
        return sent_ms

    def healed(self, healed_bytes: int) -> None:
        """Record the bytes of live state received so far; the beats carry the number."""
        self._healed_bytes = max(self._healed_bytes, healed_bytes)

    def say_waits(self, progress: Progress | None) -> list[SessionEffect]:
        """Beat ahead of time, because the group waits for other replicas. The next beat keeps its time."""
        return [SendBeat(self._healed_bytes, progress, waits=True)] if self._welcomed else []

    def tick(
        self,
        now_ms: int,
        progress: Callable[[], Progress | None] = lambda: None,
        waits: Callable[[], bool] = lambda: False,
    ) -> list[SessionEffect]:
        """Beat when it is time; `progress` returns the trainers' progress, `waits` whether they wait.

        Beats begin with the hello, not with the welcome. Where the welcome takes longer than `heartbeat_timeout`, the
        lighthouse would take the silence until then for a loss.
        """
        if not self._beats_count or now_ms < self._next_beat_ms:
            return []
        looks: list[SessionEffect] = []
        if self._welcomed and now_ms >= self._next_look_ms:
            # Twice in the time for which a lighthouse without memory assumes that members on another lighthouse live.
            self._next_look_ms = now_ms + self._timeouts.heartbeat_timeout_ms // 2
            looks += [Look(each) for each in range(self._num_addresses) if each != self._address_dialed]
        self._next_beat_ms = now_ms + self._beat_interval_ms
        return [SendBeat(self._healed_bytes, progress(), waits(), self._number(now_ms)), *looks]

    def _number(self, now_ms: int) -> int:
        """Return the number of the beat that is sent now if this group trains on a lease, else 0."""
        if not self._lease_ms:
            return 0
        self._last_beat += 1
        self._beats[self._last_beat] = now_ms
        if len(self._beats) > UNANSWERED_MOST:
            del self._beats[next(iter(self._beats))]
        return self._last_beat

    @property
    def open_request(self) -> SendRequest | None:
        """Return the request that is neither answered nor withdrawn."""
        return self._open

    @property
    def next_beat_ms(self) -> int:
        """Return when `tick` has something to do next."""
        return self._next_beat_ms

    def _request(self, request: SendRequest) -> SendRequest:
        was_sent, self._fingerprint_sent = self._fingerprint_sent, True
        return request if was_sent or not self._fingerprint else replace(request, fingerprint=self._fingerprint)

    def _next_address(self) -> int:
        """Return the next address in turn, without those of strangers, unless there are no others."""
        turn = [(self._address_dialed + 1 + each) % self._num_addresses for each in range(self._num_addresses)]
        return next((address for address in turn if address not in self._strangers), turn[0])

    def _leave_stranger(self, what: str) -> list[SessionEffect]:
        return [*self._found_stranger(self._address_dialed, what), HangUp()]

    def _found_stranger(self, address: int, what: str) -> list[SessionEffect]:
        if address in self._strangers:
            return []
        self._strangers.add(address)
        ours = f"those of cluster {self.cluster_id}" if self.cluster_id else "our own"
        message = f"{what}; of several lighthouses only {ours} are used: start all of them with one --cluster_id"
        return [Say(address, message)]

    def _hello(self) -> SendHello:
        return SendHello(
            Hello(
                job=self._job,
                replica_id=self._replica_id,
                session=self.session,
                address=self._address,
                replaces=self._replaces,
                ready=self._ready,
                held=self.held,
                lighthouse_started_ms=self.lighthouse_started_ms,
                cluster_id=self.cluster_id,
                left=self._leave is not None,
                num_answers=self.num_answers,
                pid=self._pid,
                answers_probes=self._answers_probes,
                tries_peers=self._tries_peers,
                lease_ms=self._lease_ms,
            )
        )

    def _redial_delay_ms(self, now_ms: int) -> int:
        # After the first second the delay stays at most 250 ms. A lighthouse that restarts without memory must hear of
        # the running quorum inside its first grace, or it takes a fresh replica for the whole job.
        broken_for = now_ms - (self._broken_at_ms if self._broken_at_ms is not None else now_ms)
        low, high = (50, 100) if broken_for < self._timeouts.redial_fast_for_ms else (100, 250)
        return low + int(self._jitter() * (high - low))
