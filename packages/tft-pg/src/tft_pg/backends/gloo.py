"""Process groups over Gloo, torch's CPU backend, with an abort that ends running operations.

In torch 2.13, Gloo's `abort()` ends nothing. Shutting down the connections between the ranks does end everything that
waits. Each rank publishes the address of its listening socket in the store, and a store in between records the
addresses. The group's connections are exactly those with such an address at one end. A rank that waits for a peer's
connection has no connection yet. To end that wait, this file connects in the peer's place and disconnects.

Gloo forgets one thing when a connection ends: an operation that waits for the rest of a partly received message. Gloo
(pair.cc) signals operations that have not begun, and none that has. So an abort first gives messages on the wire some
milliseconds to pass. If a peer died in the middle of a message, this package's wait ends as soon as the operation
certainly can't finish. The operation's thread in torch stays until the operation's own timeout. A send or a receive has
no such thread, and its wait can be ended (see `transfers`).

Law of this file: how a Gloo group is built and disconnected, and what its errors mean. The life cycle is in `native`.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg import sockets
from tft_pg.backends.addresses import address_towards, loopback_of, own_name_is_loopback
from tft_pg.backends.attempt import EXAMINED_AFTER_S, Attempt
from tft_pg.backends.by_allreduce import start_reduce_scatter
from tft_pg.backends.examination import Examination, give_up, rank_names
from tft_pg.backends.gloo_place import INTERFACES_ENV, ListeningPlace, interface_names
from tft_pg.backends.gloo_table import lacks
from tft_pg.backends.lifeline import Lifeline
from tft_pg.backends.live import LiveGroup, keep_at_exit
from tft_pg.backends.native import NativeProcessGroup
from tft_pg.backends.patience import Phase
from tft_pg.backends.transfers import Transfers, check_supported
from tft_pg.backends.watch import Watch
from tft_pg.backends.word_line import WordLine
from tft_pg.backends.word_setup import WordSetup
from tft_pg.calls import NO_ANSWER, ProbeAddress, call_all
from tft_pg.checks import fault_of, is_plain
from tft_pg.errors import (
    CollectiveTimeoutError,
    ConfigureError,
    OperationRefusedError,
    PeerDisconnectedError,
    UnsupportedOperationError,
    Where,
)
from tft_pg.forks import Inheritance, forks_wait, let_go_in_child
from tft_pg.forwarding import forward
from tft_pg.ops import Collective
from tft_pg.settings import check_listening
from tft_pg.sockets import Endpoint

__all__ = ["ProcessGroupGloo", "all_threads", "classify", "is_reducing", "start_collective"]

_Gloo: Any = dist.ProcessGroupGloo

# Gloo's own timeout during the build. It must never expire first, because Gloo then leaves a dangling callback behind.
_NEVER_FIRST = timedelta(minutes=10)
_INTERRUPT_S = 0.2
# Each caller first sends this many bytes, the number of a connection.
_NUMBER_BYTES = 8
_PROBE_PEERS_S = 0.5
# This long after Gloo has closed the connections, an operation has failed or Gloo has forgotten it.
_FORGET_AFTER_S = 0.05
_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
_REDUCE_SCATTERS = frozenset({"reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"})
_THREADS = "/proc/self/task"
_REDUCER_THREAD = "(pt_gloo_runloop) "


@final
class ProcessGroupGloo(NativeProcessGroup):
    """A process group over torch's Gloo.

    Args:
        timeout: of each operation, and of `configure` unless it is given another.
        interface: network interface to listen on, for example `eth0`; several separated by commas.
        hostname: name or address of this machine to listen on, instead of an interface.
        trace_dir: the directory for the flight record of each configuration at its end, for `tft trace`. None: the
            one that TFT_TRACE_DIR names. With neither, nothing is written.

    Without either argument, the group uses the first of these that applies:

    - the interface that `GLOO_SOCKET_IFNAME` names
    - loopback, if the store is on loopback, because then every rank is on this machine
    - the address of this machine's own name, as torch does
    - this machine's address on the route to the store, if its own name means loopback or nothing

    Raises: ConfigError: both are given, or the timeout is not above zero. UnsupportedOperationError: not on this
    system.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        interface: str | None = None,
        hostname: str | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        check_listening(interface=interface, hostname=hostname)
        super().__init__(timeout, trace_dir=trace_dir)
        if not sockets.supported():
            raise UnsupportedOperationError("ProcessGroupGloo needs Linux: it finds its connections through /proc")
        self._trace_dir = trace_dir
        self._interface = interface
        self._hostname = hostname
        self._devices: tuple[object, ...] = ()
        self._listens = ListeningPlace()
        self._listeners: frozenset[Endpoint] = frozenset()  # of the devices, known after a group was built on them
        self._own_name_is_loopback: bool | None = None

    def getBackendName(self) -> str:
        return "tft-gloo"

    def settings(self) -> tuple[timedelta, dict[str, object]]:
        """Return the timeout and the other arguments with which another group is made like this one."""
        trace_dir = None if self._trace_dir is None else os.fspath(self._trace_dir)
        return self._timeout, {"interface": self._interface, "hostname": self._hostname, "trace_dir": trace_dir}

    def _build(self, store: Store, attempt: Attempt, timeout: timedelta) -> LiveGroup:
        where = attempt.where
        assert where.rank is not None
        assert where.world_size is not None
        mesh = _Mesh(where.rank)
        attempt.break_with(mesh.sever_unfinished)
        place = self._place()
        # Forks wait until Gloo publishes the address of a new listener. With several interfaces, the first listener
        # counts.
        with ExitStack() as unnamed:
            if not self._devices or place != self._listens or sockets.connected(local=self._listeners):
                # The previous group has no connections any more, so these belong to strangers. Gloo neither answers nor
                # closes them, and the end of such a connection would look like a member's.
                self._devices = ()
                unnamed.enter_context(forks_wait())
                self._listens, self._devices = place, place.make_devices()
            options = _Gloo._Options()
            options._devices = list(self._devices)
            options._timeout = attempt.timeout + _NEVER_FIRST
            examination = Examination(store, attempt, mesh.unconnected)
            setup = WordSetup(attempt)
            assert self._store_client is not None
            recording_store = _RecordingStore(
                store,
                mesh,
                setup,
                attempt,
                on_published=unnamed.close,
                silent=self._store_client.silent,
                examination=examination,
            )
            before = all_threads()
            began_s = time.monotonic()
            try:
                backend = _Gloo(recording_store, where.rank, where.world_size, options)
            except Exception as error:
                setup.end()
                # Otherwise the error's frames would keep the listeners, and late ranks would find them.
                options._devices = []
                # An exception of the store in between passes through C++ and loses its type.
                raise recording_store.error or examination.after(error) from None
        try:
            attempt.check()
            mesh.finish(where.world_size, len(self._devices), threads=all_threads() - before)
            mesh.lifeline = lifeline = setup.finish()
            if self._listeners != mesh.own():
                self._listeners = mesh.own()
                sockets.hide_from_programs(self._listeners)
            if time.monotonic() - began_s > EXAMINED_AFTER_S:
                # A listener accepts connections for a moment longer than its rank waits for them.
                examination.check_nobody_gave_up(self._store_client.silent)
        except Exception:
            setup.end()
            options._devices = []
            del backend  # otherwise the error would keep the backend and its threads
            raise
        backend.set_timeout(timeout)
        store.set_timeout(timeout)
        torch_group = dist.ProcessGroup(store, where.rank, where.world_size)
        torch_group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        torch_group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        transfers = Transfers(timeout)

        def set_timeout(timeout: timedelta) -> None:
            backend.set_timeout(timeout)
            transfers.set_timeout(timeout)

        live = LiveGroup(
            torch_group,
            set_timeout=set_timeout,
            sever=mesh.end,
            settle=mesh.settle,
            is_over=mesh.is_over,
            reports_end=lambda collective: collective.name not in _POINT_TO_POINT,
            classify=classify,
            where=where,
            start=partial(start_collective, where, transfers),
            blame=mesh.silent_ranks,
            words=None if lifeline is None else WordLine(lifeline, where),
        )
        keep_at_exit(live)
        # A weak reference, so that the watch does not keep an unreferenced group alive.
        fail_forgotten = weakref.WeakMethod(live.give_up)

        def on_severed() -> None:
            transfers.end()
            (fail_forgotten() or _nothing)()

        mesh.watch(on_severed)
        return live

    def _discard(self) -> None:
        # After a failure a listener may hold connections of the failed group.
        self._devices = ()
        self._own_name_is_loopback = None

    def forked(self) -> Inheritance:
        super().forked()
        devices, self._devices = self._devices, ()
        return Inheritance(local=self._listeners, kept=devices)

    def _place(self) -> ListeningPlace:
        """Return where to listen. The listeners stay from one group to the next as long as the place is the same."""
        if self._interface:
            names = interface_names(self._interface, "interface")
            return ListeningPlace(names, advice="pass another interface to the group")
        if self._hostname:
            return ListeningPlace(hostname=self._hostname, advice="pass another hostname to the group")
        if interfaces := os.environ.get(INTERFACES_ENV, ""):
            names = interface_names(interfaces, INTERFACES_ENV)
            return ListeningPlace(names, advice=f"set {INTERFACES_ENV} to another interface")
        assert self._store_client is not None
        host, port = self._store_client.host, self._store_client.port
        return ListeningPlace(hostname=loopback_of(host) or self._route_address(host, port))

    def _route_address(self, store_host: str, store_port: int) -> str:
        """Return where to listen if torch's choice, the address of this machine's own name, does not work; else ""."""
        # Resolved once for all groups, as torch does, because a resolver may be slow.
        if self._own_name_is_loopback is None:
            self._own_name_is_loopback = own_name_is_loopback()
        if not self._own_name_is_loopback:
            return ""
        try:
            return address_towards(store_host, store_port)
        except OSError as error:
            raise ConfigureError(
                f"this machine has no reachable address ({error}); set {INTERFACES_ENV} to a network interface",
                is_own=True,
            ) from error


def _nothing() -> None:
    return None


def start_collective(
    where: Where,
    transfers: Transfers,
    torch_group: dist.ProcessGroup,
    collective: Collective,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> dist.Work:
    """Start a collective of a torch group over Gloo.

    Args:
        where: the group's place, for messages.
        transfers: the sends and receives of the group.
        torch_group: runs the collective.
        collective, args, kwargs: the call.

    Raises: OperationRefusedError: Gloo lacks this call, or its arguments are wrong. RuntimeError: torch's error.
    """
    if is_plain(collective, args):
        return forward(torch_group, collective, args, kwargs)
    fault = fault_of(collective, args, kwargs, rank=where.rank or 0, world_size=where.world_size or 1)
    fault = fault or lacks(collective, args, kwargs)
    if fault:
        raise OperationRefusedError(f"{collective.name} was refused ({where}): {fault}; fix the call", where=where)
    if collective.name in _REDUCE_SCATTERS:
        return start_reduce_scatter(torch_group, collective, args, kwargs)
    if collective.name not in _POINT_TO_POINT:
        return forward(torch_group, collective, args, kwargs)
    check_supported()
    return transfers.adopt(forward(torch_group, collective, args, kwargs))


def all_threads() -> frozenset[str]:
    """Return the ids of this process's threads."""
    return frozenset(os.listdir(_THREADS))


def is_reducing(candidates: frozenset[str]) -> bool:
    """Return whether any of these threads is a Gloo thread of torch that computes at this moment."""
    for thread in candidates:
        try:
            with open(f"{_THREADS}/{thread}/stat", encoding="ascii", errors="replace") as stat:
                _, is_reducer, rest = stat.read().partition(_REDUCER_THREAD)
        except OSError:  # the thread has ended
            continue
        if is_reducer and not rest.startswith("S"):
            return True
    return False


@dataclass(frozen=True)
class _Published:
    """The record that one rank publishes for one device: its listening address, and a connection number for each
    peer.
    """

    family: int
    endpoint: Endpoint
    zone: int
    numbers: tuple[int, ...]

    @property
    def address(self) -> str:
        """Return the listening address, with the zone of a link-local address."""
        return f"{self.endpoint.address}%{self.zone}" if self.zone else self.endpoint.address

    @property
    def place(self) -> ProbeAddress:
        """Return the place to probe or connect to."""
        rest = (0, self.zone) if self.family == socket.AF_INET6 else ()
        return ProbeAddress(self.family, (*self.endpoint, *rest))

    @classmethod
    def read(cls, record: bytes) -> _Published:
        """Parse Gloo's record: host name, sockaddr_storage with a number, numbers; lengths first, native byte order.

        Raises: ConfigureError: the record has another form, as other versions of torch may publish.
        """
        try:
            (name_bytes,) = struct.unpack_from("=Q", record, 0)
            (address_bytes,) = struct.unpack_from("=Q", record, 8 + name_bytes)
            start = 16 + name_bytes
            address = record[start : start + address_bytes]
            (family,) = struct.unpack_from("=H", address, 0)
            (zone,) = struct.unpack_from("=I", address, 24) if family == socket.AF_INET6 else (0,)
            endpoint = Endpoint.read(address)
            if endpoint is None:
                raise ValueError(f"address family {family}")
            numbers = tuple(number for (number,) in struct.iter_unpack("=q", record[start + address_bytes :]))
        except (struct.error, ValueError, OverflowError) as error:
            raise ConfigureError(
                f"torch {torch.__version__} publishes Gloo addresses in an unknown format, so tft-pg can't abort its "
                "operations; install a torch version that tft-pg supports"
            ) from error
        return cls(family, endpoint, zone, numbers)


class _Mesh:
    """The connections between one rank and its peers, during and after the build."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._own: dict[str, _Published] = {}
        self._peers: set[Endpoint] = set()
        self._peer_records: dict[int, list[_Published]] = {}  # the peers' records, by rank
        self._unanswered: dict[int, str] = {}  # of the built group: the ranks that answer no probe
        self._interrupted: set[str] = set()
        self._inodes: frozenset[int] = frozenset()
        self._needed = 0  # the number of these connections that belong to peers
        self._threads: frozenset[str] = frozenset()
        self._is_built = False
        self._watch: Watch | None = None
        self.lifeline: Lifeline | None = None  # the connections for words
        let_go_in_child(self)

    def add_own(self, device: str, record: bytes) -> _Published:
        with self._lock:
            own = self._own[device] = _Published.read(record)
        return own

    def own(self) -> frozenset[Endpoint]:
        """Return the addresses at which this rank listens."""
        with self._lock:
            return frozenset(own.endpoint for own in self._own.values())

    def add_peer(self, rank: int, record: bytes) -> None:
        peer = _Published.read(record)
        with self._lock:
            self._peers.add(peer.endpoint)
            self._peer_records.setdefault(rank, []).append(peer)

    def unconnected(self) -> dict[int, list[ProbeAddress]]:
        """Return the listening addresses of the peers without a known connection, by rank.

        A connection that a peer has opened to this rank does not show the peer's rank. So the result contains all
        possible callers, until as many connections have come in.
        """
        with self._lock:
            known = [(rank, peer) for rank, peers in self._peer_records.items() for peer in peers]
            remote = frozenset(self._peers)
        called = sockets.remote_ends(remote)
        left = [(rank, peer) for rank, peer in known if peer.endpoint not in called]
        if len(_members_only(sockets.connected(local=self.own()))) >= len(left):
            return {}
        found: dict[int, list[ProbeAddress]] = {}
        for rank, peer in left:
            found.setdefault(rank, []).append(peer.place)
        return found

    def finish(self, world_size: int, num_devices: int, *, threads: frozenset[str]) -> None:
        """Record the connections of the group, now that it is built.

        Args:
            world_size: of the group.
            num_devices: the number of devices on which each rank listens.
            threads: the threads that started during the build: the group's own, and possibly some of another group.

        Raises: ConfigureError: connections are missing, so a peer is already gone.
        """
        self._threads = threads
        self._is_built = True
        self._inodes = self._connected()
        self._needed = expected = (world_size - 1) * num_devices
        if len(self._inodes) > expected:
            own = self.own()
            self._inodes -= sockets.connected(local=own) - _members_only(sockets.connected(local=own))
        if len(self._inodes) < expected:
            raise ConfigureError(
                f"only {len(self._inodes)} of {expected} connections to peers exist after configure, so a peer has "
                "disconnected; ask for a new quorum"
            )

    def watch(self, on_severed: Callable[[], None]) -> None:
        """Start to watch the connections. The end of one peer's connection ends all connections."""
        if self._inodes:
            probe_peers = weakref.WeakMethod(self._probe_peers)
            self._watch = Watch(
                self._inodes,
                on_severed,
                needed=self._needed,
                on_suspicion=lambda: (probe_peers() or _nothing)(),
            )
            # A group without a shutdown leaves no thread either. Not at the end of the process: ending the connections
            # there would wake waits that must not return from C++ any more.
            weakref.finalize(self, self._watch.end).atexit = False

    def silent_ranks(self) -> dict[int, str]:
        """Return the ranks whose silence has ended the built group, each with a short reason.

        For a connection that the peer has opened, only the peer's host is known. That names a rank only if it is alone
        on the host.
        """
        found: dict[int, str] = {}
        for end in () if self._watch is None else self._watch.silent:
            ranks = [rank for rank, peers in self._peer_records.items() if any(peer.endpoint == end for peer in peers)]
            if not ranks:
                at = [
                    rank
                    for rank, peers in self._peer_records.items()
                    if any(peer.endpoint.address == end.address for peer in peers)
                ]
                ranks = at if len(at) == 1 else []
            for rank in ranks:
                found[rank] = f"{end.address}: no acknowledgement of sent data"
        return {**self._unanswered, **found} if found else {}

    def _probe_peers(self) -> None:
        """Probe all peers, to find the other silent ranks.

        In a ring, a rank sends data to its neighbours alone. So only one or two ranks notice a rank that has lost its
        network.
        """
        addresses = {
            (rank, at): peer.place for rank, peers in self._peer_records.items() for at, peer in enumerate(peers)
        }
        watch = self._watch
        answers = call_all(
            addresses,
            until_s=time.monotonic() + _PROBE_PEERS_S,
            goes_on=lambda: watch is None or watch.severed_s is None,
        )
        # A peer that refuses has only ended its group, and listens at another address by now.
        self._unanswered = {
            rank: f"{addresses[rank, at]}: {why}" for (rank, at), why in answers.items() if NO_ANSWER in why
        }

    def end(self) -> None:
        """End every operation of the built group, here and at the peers."""
        # If a peer's end disconnects Gloo, the connections for words stay, because a word may not need that peer any
        # more.
        if self.lifeline is not None:
            self.lifeline.end()
        if self._watch is not None:
            self._watch.end()

    def is_over(self) -> bool:
        """Return whether unfinished operations can never finish: the connections have ended, and no thread of the
        group computes.
        """
        severed_s = None if self._watch is None else self._watch.severed_s
        straggled = severed_s is not None and time.monotonic() - severed_s > _FORGET_AFTER_S
        return straggled and not is_reducing(self._threads)

    def settle(self) -> None:
        if self._watch is not None:
            self._watch.join()

    def forked(self) -> Inheritance:
        """Release the listeners and connections in a forked child."""
        self._lock = threading.Lock()
        if self._peers and not self._is_built:
            sockets.wait_until_connected()
        return Inheritance(local=self.own(), remote=self._peers)

    def sever_unfinished(self) -> None:
        """End the builder's current wait. Callers repeat this, because the builder then enters its next wait."""
        with self._lock:
            peers = frozenset(self._peers)
            targets = [own for device, own in self._own.items() if device not in self._interrupted] if peers else []
            if peers:
                self._interrupted.update(self._own)
        sockets.shut_down(self._connected() | (sockets.connecting(remote=peers) if peers else frozenset()))
        for own in targets:
            self._connect_in_place_of_peers(own)

    def _connected(self) -> frozenset[int]:
        with self._lock:
            remote = frozenset(self._peers)
        return sockets.connected(local=self.own(), remote=remote)

    def _connect_in_place_of_peers(self, own: _Published) -> None:
        place = own.place
        for rank, number in enumerate(own.numbers):
            if rank == self._rank:
                continue
            with socket.socket(place.family, socket.SOCK_STREAM) as caller:
                caller.settimeout(_INTERRUPT_S)
                try:
                    caller.connect(place.sockaddr)
                    caller.sendall(struct.pack("=q", number))
                except OSError:  # the listener is gone, and the wait with it
                    return


def _members_only(accepted: frozenset[int]) -> frozenset[int]:
    """Return the connections whose caller has sent its connection number, as members do at once.

    A peer that probes this rank sends nothing and disconnects, and Gloo keeps the remainder of its connection.
    """
    return frozenset(inode for inode, passed in sockets.traffic(accepted).items() if passed.received >= _NUMBER_BYTES)


class _RecordingStore(Store):
    """The store given to Gloo. It passes everything on, and tells the mesh which addresses it has seen.

    Args:
        store: the real store.
        mesh: receives the addresses.
        setup: also connects the ranks for words.
        attempt: informed of each new phase.
        on_published: called when this rank's address is known.
        silent: returns the error if the store does not answer any more.
        examination: finds the reason for missing connections.
    """

    def __init__(
        self,
        store: Store,
        mesh: _Mesh,
        setup: WordSetup,
        attempt: Attempt,
        *,
        on_published: Callable[[], None],
        silent: Callable[[], ConfigureError],
        examination: Examination,
    ) -> None:
        super().__init__()
        self._on_published = on_published
        self._silent = silent
        self._examination = examination
        self._store = store
        self._mesh = mesh
        self._setup = setup
        self._attempt = attempt
        self._records: dict[str, bytes] = {}
        self.error: Exception | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """Publish this rank's record of one device. Fails if the prefix already has one for this rank."""
        record = value.encode() if isinstance(value, str) else bytes(value)
        with _ErrorRecorder(self):
            self._attempt.check()
            own = self._mesh.add_own(_device_of(key), record)
            published = self._setup.publish(_device_of(key), record, own.address)
            self._on_published()
            self._attempt.enter(Phase.RANKS, late=self._silent)
            found = self._store.compare_set(key, "", published)  # type: ignore[arg-type]  # takes bytes in fact
            if found != published:
                raise ConfigureError(
                    f"the store prefix is already used by rank {self._attempt.where.rank}; pass a fresh prefix to "
                    "each configure",
                    where=self._attempt.where,
                )
            self._records[key] = record

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._records[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for the records of all ranks at once, at the first request for any of them."""
        with _ErrorRecorder(self):
            for key in keys:
                if key not in self._records:
                    self._fetch(_device_of(key))

    def _fetch(self, device: str) -> None:
        world_size = self._attempt.where.world_size or 1
        keys = [f"{device}/{rank}" for rank in range(world_size)]
        keys = [key for key in keys if key not in self._records]
        self._store.set_timeout(self._attempt.remaining())
        try:
            found = self._store.multi_get(keys)
        except dist.DistStoreError as error:
            self._attempt.check()
            missing = tuple(int(key.rpartition("/")[2]) for key in keys if not self._store.check([key]))
            give_up(self._store, self._attempt.where.rank)
            reason = f"timed out waiting for {rank_names(missing)} to join"
            raise self._attempt.deadline_passed(reason, missing_ranks=missing) from error
        for key, published in zip(keys, found, strict=True):
            rank = int(key.rpartition("/")[2])
            self._records[key] = self._setup.add_record(device, rank, bytes(published))
            self._mesh.add_peer(rank, self._records[key])
        # Before this point the mesh did not know its peers, so an abort could not interrupt the connecting. From here
        # on it can.
        self._attempt.enter(Phase.CONNECTIONS, late=self._examination.late, examine=self._examination.run)
        try:
            self._setup.connect_lower(device)
        except ConfigureError as failure:
            raise self._examination.after(failure) from failure


class _ErrorRecorder:
    """A recorder of the first error that leaves a store, because C++ passes on only its text."""

    def __init__(self, store: _RecordingStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and self._store.error is None:
            self._store.error = error


def _device_of(key: str) -> str:
    return key.rpartition("/")[0]


# Error texts of Gloo (third_party/gloo of torch 2.13). Any other text is a refusal of the call.
_FAULTS: Mapping[str, type[PeerDisconnectedError] | type[CollectiveTimeoutError]] = {
    "Timed out waiting": CollectiveTimeoutError,
    "timed out": CollectiveTimeoutError,
    "Application timeout": CollectiveTimeoutError,
    "/transport/tcp/": PeerDisconnectedError,
    "Connection closed": PeerDisconnectedError,
    "Broken pipe": PeerDisconnectedError,
    "Connection reset": PeerDisconnectedError,
}


def classify(
    error: Exception,
) -> type[PeerDisconnectedError] | type[CollectiveTimeoutError] | type[OperationRefusedError]:
    """Return the kind of an error of Gloo, by its text."""
    text = str(error)
    return next((fault for words, fault in _FAULTS.items() if words in text), OperationRefusedError)
