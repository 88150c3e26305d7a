"""The communication of a replica group with the lighthouse and among its ranks.

Rank 0 runs the manager server in a child process. Every rank has a client and a session to it. In a group of one, a new
server replaces a server that ended or was stopped. A larger group is lost with its server, and reports this.

Law of this file: translation between the Manager and tft_coord. Nothing is decided about steps.
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from torch.distributed import DistNetworkError, DistStoreError

from tft_algos.errors import ServerRestartedError, UsageError
from tft_algos.manager.config import ResolvedConfig
from tft_algos.manager.quorum.group_store import GroupStore, open_group_store
from tft_coord import ManagerServer
from tft_coord.core.names import shorten
from tft_coord.core.progress import Progress
from tft_coord.core.types import Plan, Purpose, QuorumKey, RankRequest, Verdict
from tft_coord.core.waits import WaitNotice
from tft_coord.errors import (
    CoordinationClosedError,
    CoordinationError,
    ReplicaGroupLostError,
    RequestTimeoutError,
    UnreachableError,
)
from tft_coord.notifications import Notification
from tft_pg.threads import join_within

if TYPE_CHECKING:
    from tft_coord import ManagerClient

T = TypeVar("T")

logger = logging.getLogger("tft_algos.manager")

WATCH_INTERVAL_S: Final = 0.1
ANSWER_INTERVAL_S: Final = 0.02
# A running manager server that leaves its rank without an answer for this many checks is killed. The stream breaks only
# after heartbeat_timeout. Checks are counted, so that a pause of this process does not count.
UNANSWERED_LOOKS_MOST: Final = 10
NOTICED_WITHIN_S: Final = 1.0
MAX_UNDELIVERED: Final = 256
MAX_STARTS: Final = 3  # of a manager server that is killed, or does not answer, while it starts


class _Stage(enum.Enum):
    STARTING = enum.auto()  # the server starts, or the client connects to it; `close` ends both
    STARTED = enum.auto()  # the server is ready, or can't start


@final
class _Deliveries:
    """The notifications of a rank. Those that arrive before there is a listener are kept for it."""

    def __init__(self) -> None:
        self._listener: Callable[[Notification], None] | None = None
        self._undelivered: deque[Notification] = deque(maxlen=MAX_UNDELIVERED)
        self._lock = threading.Lock()

    def listen(self, listener: Callable[[Notification], None]) -> None:
        """Give the kept notifications to the listener, and from now on each one at its arrival."""
        with self._lock:  # later notifications wait, so that the order is kept
            for notification in self._undelivered:
                listener(notification)
            self._undelivered.clear()
            self._listener = listener

    def notify(self, notification: Notification) -> None:
        """Give a notification to the listener, or keep it."""
        with self._lock:
            listener = self._listener
            if listener is None:
                self._undelivered.append(notification)
                return
        listener(notification)


@final
class GroupCoordinator:
    """One rank's side of its replica group.

    Rank 0 does not wait for its manager server, which starts while the rest of the trainer is constructed. The first
    call waits for it, and raises the error of a failed start.

    Args:
        config: resolved.
    Raises: UsageError: this process has an earlier coordinator of the same replica and rank that was not closed.
        UnreachableError, RequestTimeoutError: the store did not answer within connect_timeout. On a rank other than 0,
        this also holds for the manager server. ConfigError: a setting is invalid, or the manager server's port is in
        use.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        _check_alone(config)
        self._config = config
        self._server: ManagerServer | None = None
        self._client: ManagerClient | None = None
        self._replaces = ""
        self._lock = threading.Condition()  # notified when the client changes, or can't be had
        self._stage = _Stage.STARTING
        self._no_start: Exception | None = None
        self._own_name = ""  # the problem with this host's name, which the connection to the server needs too
        self._closing = threading.Event()
        # Without other members no word tells this rank that its quorum has ended, but its manager server may know.
        self._decides_alone = False
        self._has_answered = threading.Event()  # rank 0 has answered all ranks, and all have claimed their ranks
        self._deliveries = _Deliveries()
        self._progress: Callable[[], Progress | None] = lambda: None
        self._beat_number: Callable[[], int] = lambda: 0
        self._watch: threading.Thread | None = None
        self._address = ""  # the address of the manager server, on rank 0
        self._store: GroupStore = open_group_store(config)
        try:
            if config.rank == 0:
                self._replaces = self._store.predecessor()
                unique = str(uuid.uuid4())
                self.replica_id = f"{config.replica_id}:{unique}" if config.replica_id else unique
                self._store.publish_id(self.replica_id)
                if config.world_size > 1:
                    self._store.claim(self.replica_id, 0, config.world_size)
                self._server = self._new_server()
                self._watch = threading.Thread(
                    target=self._serve, args=[self._server], name="tft-watch-server", daemon=True
                )
            else:
                self.replica_id, address = self._store.ask(config.rank, config.connect_timeout)
                self._store.claim(self.replica_id, config.rank, config.world_size)
                self._client = self._new_client(address, config.connect_timeout)
                self._stage = _Stage.STARTED
        except BaseException:
            self._watch = None
            self.close()
            raise
        _open_coordinators[_place(config)] = self
        if self._watch is not None:
            self._watch.start()

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        answer = self._ask(timeout, lambda client, left: client.quorum(self._config.rank, request, left))
        if not isinstance(answer, Plan):
            return answer.key
        self._decides_alone = self._config.world_size == 1 and answer.replica_world_size > 1
        return answer

    def vote(
        self,
        step: int,
        yes: bool,
        timeout: timedelta,
        *,
        key: QuorumKey,
        purpose: Purpose,
        leaving: bool = False,
        stands: bool = False,
    ) -> Verdict:
        rank = self._config.rank
        if self._decides_alone:
            return Verdict(yes, leaving, yes and stands)  # in a group of one, the verdict is its own vote

        def ask(client: ManagerClient, left: timedelta) -> Verdict:
            return client.vote(rank, step, yes, left, key=key, purpose=purpose, leaving=leaving, stands=stands)

        try:
            return self._ask(timeout, ask)
        except ReplicaGroupLostError as error:
            if not leaving:
                raise
            # Another rank has said for the group that it leaves, or has ended. No rank needs this one any more.
            logger.info("[%s/%s] leaves; its group ended during the vote: %s", self.replica_id, rank, error)
            return Verdict(yes=False, leaves=True)

    def number_beats(self, number: Callable[[], int]) -> None:
        self._beat_number = number

    def late(self, key: QuorumKey, step: int) -> None:
        if (client := self._client) is not None:
            client.late(key, step)

    def leave(self, reason: str, serve: timedelta, timeout: timedelta, *, finished_step: int | None = None) -> None:
        rank, serve_ms = self._config.rank, int(1_000 * serve.total_seconds())
        self._ask(timeout, lambda client, left: client.leave(rank, reason, serve_ms, left, finished_step=finished_step))
        if rank == 0 and finished_step is not None:
            self._store.forget_id()  # the next start in this place has no predecessor

    def listen(self, listener: Callable[[Notification], None]) -> None:
        self._deliveries.listen(listener)

    def follow(self, progress: Callable[[], Progress]) -> None:
        with self._lock:  # without the lock, a client under construction could miss this function
            self._progress = progress
        self.beat()

    def beat(self) -> None:
        if (client := self._client) is not None:  # a rank that soon holds its interpreter's lock is judged by this
            client.beat()

    def gather(self, name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
        if self._config.world_size == 1:
            return (value,)
        # The other ranks wait for the server's address first, and the store takes one call at a time.
        _, left = self._client_in_use(timeout)
        if self._config.rank == 0:
            give_up_at = time.monotonic() + left.total_seconds()
            if not self._has_answered.wait(left.total_seconds()):
                raise RequestTimeoutError(
                    f"timed out after {timeout.total_seconds():g} s waiting for all {self._config.world_size} ranks of "
                    f"replica {self.replica_id} to start; look at the logs of the missing ranks"
                )
            left = timedelta(seconds=max(give_up_at - time.monotonic(), 0.001))
        return self._store.gather(f"{self.replica_id}/{name}", value, self._config.rank, self._config.world_size, left)

    def source_metadata(self, address: str, timeout: timedelta) -> str:
        config = self._config
        within = min(timeout, config.connect_timeout)
        make = _client_class()
        with make(address, within, connect_now=False, **_trust(config)) as client:
            return client.checkpoint_metadata(config.rank, timeout)

    def healed(self, bytes_total: int) -> None:
        client = self._client
        if client is not None:
            client.healed(bytes_total)

    def close(self) -> None:
        place = _place(self._config)
        if _open_coordinators.get(place) is self:
            del _open_coordinators[place]
        with self._lock:
            self._closing.set()
            server = self._server if self._stage is _Stage.STARTING else None
            self._lock.notify_all()
        if server is not None:
            server.shutdown()  # ends the wait for the server, and for the connection to it
        if self._watch is not None:
            join_within(self._watch)
        with self._lock:
            client, self._client = self._client, None
            server, self._server = self._server, None
            self._lock.notify_all()
        if client is not None:
            client.close()
        if server is not None:
            server.shutdown()

    def _client_in_use(self, timeout: timedelta) -> tuple[ManagerClient, timedelta]:
        """Return the client and the remaining time, above zero. Waits while the server starts.

        Raises: RequestTimeoutError: the server has not started within `timeout`. ReplicaGroupLostError: the server
        can't start.
        """
        give_up_at = time.monotonic() + timeout.total_seconds()
        with self._lock:  # this also waits while a new server starts
            within_s = timeout.total_seconds()
            if not self._wait_for_start(give_up_at):
                next_step = self._own_name or "look whether the machine is out of memory or of processor time"
                raise RequestTimeoutError(
                    f"the manager server of replica {self.replica_id} has not started within {within_s:g} s; "
                    f"{next_step}"
                )
            client = self._client
        if client is None:
            raise self._end_error() from self._no_start
        return client, timedelta(seconds=max(give_up_at - time.monotonic(), 0.001))

    def _wait_for_start(self, give_up_at: float) -> bool:
        """Wait until the manager server is ready or can't start, and log a long wait. Call this with the lock held.

        Beats check the waits later, but no beat is sent before there is a server. So this wait logs itself.

        Returns: whether the wait ended in time.
        """
        began, notice = time.monotonic(), WaitNotice()
        while True:
            ready = self._stage is _Stage.STARTED or self._closing.is_set()
            now = time.monotonic()
            ends = ready or now >= give_up_at
            line = notice.look(None if ends else round(began * 1_000), round(now * 1_000))
            if line is not None:
                logger.log(
                    logging.INFO if line.is_over else logging.WARNING,
                    "[%s/%d] the manager server %s %d s%s",
                    shorten(self.replica_id),
                    self._config.rank,
                    "started after" if line.is_over and ready else "has not started for",
                    line.seconds,
                    f": {self._own_name}" if self._own_name and not ready else "",
                )
            if ends:
                return ready
            self._lock.wait(min(1.0, give_up_at - now))

    def _end_error(self) -> CoordinationError:
        if self._closing.is_set():
            return CoordinationClosedError(f"the Manager of replica {self.replica_id} was shut down; make a new one")
        return self._lost()

    def _lost(self) -> ReplicaGroupLostError:
        if self._no_start is not None:
            why = f"the manager server of replica {self.replica_id} does not start: {self._no_start}"
            return ReplicaGroupLostError(why)
        return ReplicaGroupLostError(
            f"the manager server of replica {self.replica_id} has ended, and its {self._config.world_size} ranks can't "
            f"vote without it (this is rank {self._config.rank}); end this process and start the group again"
        )

    def _ask(self, timeout: timedelta, ask: Callable[[ManagerClient, timedelta], T]) -> T:
        """Ask the manager server with the client in use, and the time that is left then.

        Raises: errors of the client, and those of `_after_the_loss` in the place of a lost connection.
        """
        client, left = self._client_in_use(timeout)
        try:
            return ask(client, left)
        except (UnreachableError, CoordinationClosedError) as error:
            raise self._after_the_loss(client, error) from error

    def _after_the_loss(self, client: ManagerClient, error: CoordinationError) -> Exception:
        """Return the error to raise for a call that lost its manager server.

        A group of one has a new server now or soon. A larger group is lost, because its ranks can't agree any more.
        """
        with self._lock:
            if self._watch is not None:
                # The connection to the server ends a moment before its process does.
                self._lock.wait_for(lambda: self._client is not client, NOTICED_WITHIN_S)
                within_s = self._config.connect_timeout.total_seconds()
                self._lock.wait_for(lambda: self._stage is _Stage.STARTED or self._closing.is_set(), within_s)
            newer = self._client
        if newer is not None and newer is not client:
            return ServerRestartedError()
        if self._config.world_size == 1 and newer is not None and isinstance(error, UnreachableError):
            return RequestTimeoutError(
                f"the manager server of replica {self.replica_id} runs but does not answer ({error}); check whether "
                "the machine is out of memory or CPU time"
            )
        return self._end_error()

    def _serve(self, server: ManagerServer) -> None:
        """Run the manager server until this coordinator closes. This is the main function of a thread on rank 0.

        In a group of one, another server replaces a server that has ended or hangs. A larger group is lost with its
        server.
        """
        client = self._start(server)
        while client is not None and self._wait_for_end(client):
            replaces = self._config.world_size == 1
            with self._lock:
                ended, self._client = self._server, None
                self._stage = _Stage.STARTING if replaces else _Stage.STARTED
                self._lock.notify_all()
            client.close()  # running calls end, and are repeated with the new client
            if ended is not None:
                ended.shutdown()
            client = self._start(None) if replaces else None
            if client is not None and not self._closing.is_set():
                message = "[%s/0] the manager server ended; a new one runs at %s"
                logger.warning(message, self.replica_id, self._address)
        if client is None and not self._closing.is_set():
            self._deliveries.notify(self._lost())

    def _start(self, server: ManagerServer | None) -> ManagerClient | None:
        """Wait until the server is ready, or a new one if `server` is None, and connect to it.

        Returns: the client. None: the start failed, and the reason is kept, or this coordinator closes.
        """
        try:
            client = self._connect_to(server or self._replace_server())
        except Exception as error:
            # A caller waits for the start, so it gets any error.
            self._no_start, client = error, None
        with self._lock:
            self._client = client
            if client is not None:
                client.beat()  # see beat
            self._stage = _Stage.STARTED
            self._lock.notify_all()
        return client

    def _connect_to(self, server: ManagerServer) -> ManagerClient:
        """Wait until the server is ready, and connect to it. Replace a server that is killed or hangs before that.

        Raises: CoordinationError: no server is ready, or this coordinator closes.
        """
        for start in itertools.count(1):
            # Only the last server gets all the time, because a server that is stopped as it starts never answers.
            within = self._config.connect_timeout / (1 if start == MAX_STARTS else MAX_STARTS)
            try:
                return self._connect_once(server, within)
            except CoordinationError as error:
                hangs = isinstance(error, (RequestTimeoutError, UnreachableError)) and server.alive()
                if start == MAX_STARTS or self._closing.is_set() or not (hangs or server.was_killed()):
                    raise
                logger.warning("[%s/0] %s; starting another one", self.replica_id, error)
                server.kill()
                server.shutdown()
            server = self._replace_server()
        raise AssertionError("counting has no end")

    def _connect_once(self, server: ManagerServer, within: timedelta) -> ManagerClient:
        address = server.address()
        self._own_name = unknown_name(self._config.hostname)
        # Not an error yet, because a name service may learn of a host after its processes have started.
        if self._own_name:
            logger.warning("[%s/0] %s", self.replica_id, self._own_name)
        client = self._new_client(address, within)
        self._address = address  # rank 0 gives this to the other ranks from now on
        return client

    def _replace_server(self) -> ManagerServer:
        with self._lock:  # `close` ends either the old server or the new one
            if self._closing.is_set():
                raise self._end_error()
            server = self._server = self._new_server()
            return server

    def _wait_for_end(self, client: ManagerClient) -> bool:
        """Wait until the process of the manager server has ended, or kill it if it hangs.

        No call detects the end of the process as fast.

        Returns: False: this coordinator closes.
        """
        unanswered = 0
        while not self._closing.wait(self._answer_ranks()):
            server = self._server
            if server is None:
                continue
            unanswered = 0 if client.is_answered else unanswered + 1
            if unanswered > UNANSWERED_LOOKS_MOST and self._config.world_size == 1 and server.alive():
                logger.warning(
                    "[%s/0] killing the manager server, which does not answer, and starting another one; check "
                    "whether it was stopped, or the machine is out of memory or CPU time",
                    self.replica_id,
                )
                server.kill()
                return not self._closing.is_set()
            if not server.alive():
                # The interpreter may be exiting, which ends the child. `close` then follows in a moment.
                return not self._closing.is_set()
        return False

    def _answer_ranks(self) -> float:
        """Answer the ranks that look for the manager server. Return the seconds until the next check."""
        if self._config.world_size == 1 or self._has_answered.is_set():
            return WATCH_INTERVAL_S
        try:
            all_came = self._store.answer(self.replica_id, self._address, self._config.world_size)
        except (DistStoreError, DistNetworkError) as error:
            logger.warning(
                "[%s/0] lost the connection to the replica group's store %s (%s), so ranks that have not started yet "
                "can't start; check whether torchrun, or the process that hosts the store, still runs",
                self.replica_id,
                self._store.address,
                str(error).partition("\n")[0],
            )
            all_came = True
        if all_came:
            self._has_answered.set()
        return ANSWER_INTERVAL_S

    def _new_server(self) -> ManagerServer:
        config = self._config
        assert config.lighthouse_addr is not None, "rank 0 without a lighthouse; from_environment refuses that"
        return ManagerServer(
            self.replica_id,
            config.lighthouse_addr,
            config.hostname,
            f"[::]:{config.port}",
            self._store.address,
            config.world_size,
            config.heartbeat_interval,
            config.connect_timeout,
            config.quorum_retries,
            job=config.job,
            replaces=self._replaces,
            insecure=config.insecure,
            wait=False,
            **_trust(config),
        )

    def _new_client(self, address: str, within: timedelta) -> ManagerClient:
        config, server = self._config, self._server
        return _client_class()(
            address,
            within,
            group_rank=config.rank,
            listener=self._deliveries.notify,
            progress=lambda: self._progress(),
            beat_number=lambda: self._beat_number(),
            is_alive=server.alive if server is not None else lambda: True,
            **_trust(config),
            connect_now=server is None,  # rank 0's own server has just given its address
        )


def _trust(config: ResolvedConfig) -> dict[str, Any]:
    """Return the arguments that a server and its clients share."""
    return {"token": config.token, "tls": config.tls, "timeouts": config.timeouts}


def unknown_name(hostname: str) -> str:
    """Return what is wrong with the name of this host, and what to do. "": the name can be resolved here."""
    try:
        socket.getaddrinfo(hostname.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return (
            f"the name {hostname} can't be resolved on this host ({why}), and other replicas would use it to reach "
            "this replica; set hostname= to a name or address of this host that all replicas can resolve"
        )
    return ""


# The open coordinators of this process, by replica and rank. The pid separates a forked child from its parent.
_open_coordinators: weakref.WeakValueDictionary[tuple[object, ...], GroupCoordinator] = weakref.WeakValueDictionary()


def _place(config: ResolvedConfig) -> tuple[object, ...]:
    return os.getpid(), config.lighthouse_addr, config.job, config.replica_id, config.rank


def _check_alone(config: ResolvedConfig) -> None:
    """Refuse a second Manager of the same replica and rank in this process.

    The new replica would wait for ever for the earlier Manager, because no loop runs the earlier one. Replicas without
    a name always count as different.

    Raises: UsageError: an earlier Manager is still open.
    """
    earlier = _open_coordinators.get(_place(config)) if config.replica_id else None
    if earlier is not None:
        raise UsageError(
            f"this process has an earlier Manager of replica {earlier.replica_id}, rank {config.rank}, of job "
            f"{config.job}; call shutdown() on it first, or give this one another replica_id"
        )


def _client_class() -> type[ManagerClient]:
    # A late import, because grpc is imported here while rank 0's server starts in a child.
    from tft_coord import ManagerClient

    return ManagerClient
