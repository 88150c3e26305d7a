"""The calls of an election to etcd: read the keys, make, renew and end a lease, write the keys if nobody leads.

Each call goes to one member. A member that fails or is slow is left for the next one.

Law of this file: the calls and their bytes; when to make which is the election's.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, final

from google.protobuf.message import DecodeError, Message

from tft_coord import ProtocolError
from tft_coord.lighthouse import (
    MAX_ADDRESS_BYTES,
    MAX_INT64,
    Inheritance,
    election,
    grpc,
    let_go_in_child,
    names,
    services,
)
from tft_lighthouse.etcd import etcd_pb2 as pb
from tft_lighthouse.etcd.settings import EtcdConfig

RANGE: Final = "/etcdserverpb.KV/Range"
TXN: Final = "/etcdserverpb.KV/Txn"
LEASE_GRANT: Final = "/etcdserverpb.Lease/LeaseGrant"
LEASE_REVOKE: Final = "/etcdserverpb.Lease/LeaseRevoke"
LEASE_KEEP_ALIVE: Final = "/etcdserverpb.Lease/LeaseKeepAlive"

# Other keys may stand under the prefix. The two of an election are read each by its name.
MOST_BYTES: Final = 64 << 10
MOST_DIGITS: Final = 19  # of a number up to MAX_INT64
# A leader begins above it, and counts up from there.
MOST_FLOOR: Final = MAX_INT64 - 2 * election.IDS_OF_A_TERM
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    # A member that comes back is needed at once. grpc's own pause between two attempts grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
)


class KeyValueError(ProtocolError):
    """What a key of etcd holds can't be used, whichever member is asked."""


@final
class EtcdClient:
    """A client of one etcd cluster. It runs on one loop only.

    Args:
        config: its endpoints, and the prefix of the keys.
        address: of this lighthouse, which `Campaign` writes.
        within_s: time limit of a call to one member.
    Raises: ConfigError: a file of a certificate can't be read.

    Attributes:
        failure: why the last call failed; "": it did not.
        is_reached: etcd answered the last call, so that a failure is about what its keys hold.
    """

    def __init__(self, config: EtcdConfig, address: str, *, within_s: float) -> None:
        self._leader_key = f"{config.prefix.rstrip('/')}/leader".encode()
        self._floor_key = f"{config.prefix.rstrip('/')}/started_ms".encode()
        self._address = address
        self._within_s = within_s
        self._targets = config.addresses
        self._member = 0
        credentials = _credentials(config)
        self._channels = [
            grpc.aio.insecure_channel(each, options=OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(each, credentials, options=OPTIONS)
            for each in self._targets
        ]
        self.failure = ""
        self.is_reached = False
        for each in self._targets:
            names.look_up(each)
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """Return what a forked child inherits; the connections belong to the parent."""
        places = {place for each in self._targets for place in names.places(each)}
        return Inheritance(places=places, kept=self._channels)

    async def make(self, call: election.Call) -> election.Answer:
        """Make a call to one member. An error or the time limit gives `Failed`, and the next call another member."""
        is_reached = False
        try:
            answer = await asyncio.wait_for(self._make(call), self._within_s)
        except asyncio.TimeoutError:
            self.failure = f"{self._targets[self._member]} did not answer within {1_000 * self._within_s:.0f} ms"
        except grpc.aio.AioRpcError as error:
            if isinstance(call, election.Renew | election.Revoke) and error.code() is grpc.StatusCode.NOT_FOUND:
                return election.Renewed(0, 0) if isinstance(call, election.Renew) else election.Done()
            self.failure = f"{self._targets[self._member]}: {error.details() or error.code().name}"
        except asyncio.InvalidStateError:  # the stream of a renewal ended before the message was written
            self.failure = f"{self._targets[self._member]} has ended the call"
        except KeyValueError as error:
            self.failure, is_reached = str(error), True
        except (DecodeError, ProtocolError) as error:
            self.failure = f"{self._targets[self._member]} sent an answer that is not etcd's: {error}"
        else:
            self.failure, self.is_reached = "", True
            return answer
        self.is_reached = is_reached
        self._member = (self._member + 1) % len(self._targets)
        return election.Failed()

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _make(self, call: election.Call) -> election.Answer:
        match call:
            case election.Look():
                return await self._look()
            case election.Grant(ttl_ms):
                granted = pb.LeaseGrantResponse()
                await self._call(LEASE_GRANT, pb.LeaseGrantRequest(ttl_s=-(-ttl_ms // 1_000)), granted)
                return election.Granted(granted.id, 1_000 * granted.ttl_s)
            case election.Campaign():
                await self._call(TXN, self._campaign(call), pb.TxnResponse())
                return election.Done()
            case election.Renew(lease):
                return await self._renew(lease)
            case election.Revoke(lease):
                await self._call(LEASE_REVOKE, pb.LeaseRequest(id=lease), pb.Header())
                return election.Done()

    async def _look(self) -> election.Looked:
        # The floor is read first. If it is older than the leader, the next campaign fails and looks again.
        floors, leaders = pb.RangeResponse(), pb.RangeResponse()
        await self._call(RANGE, pb.RangeRequest(key=self._floor_key, limit=1), floors)
        await self._call(RANGE, pb.RangeRequest(key=self._leader_key, limit=1), leaders)
        term = leaders.header.raft_term if leaders.header.raft_term == floors.header.raft_term else 0
        floor = election.Floor(_floor_of(floors.kvs[0]), floors.kvs[0].mod_revision) if floors.kvs else election.Floor()
        return election.Looked(_leader_of(leaders.kvs[0]) if leaders.kvs else None, floor, term)

    async def _renew(self, lease: int) -> election.Renewed:
        call = services.stream_stub(self._channels[self._member], LEASE_KEEP_ALIVE)()
        try:
            await call.write(pb.LeaseRequest(id=lease).SerializeToString())
            answer = await call.read()
            if not isinstance(answer, bytes):
                raise ProtocolError("the stream of the renewal has ended")
            renewed = pb.LeaseKeepAliveResponse.FromString(answer)
            return election.Renewed(1_000 * renewed.ttl_s, renewed.header.raft_term)
        finally:
            call.cancel()

    def _campaign(self, call: election.Campaign) -> pb.TxnRequest:
        value = json.dumps({"address": self._address, "started_ms": call.started_ms}).encode()
        floor = str(call.started_ms).encode()
        return pb.TxnRequest(
            compare=[
                pb.Compare(target=pb.Compare.CREATE, key=self._leader_key, create_revision=0),
                pb.Compare(target=pb.Compare.MOD, key=self._floor_key, mod_revision=call.floor_revision),
            ],
            success=[
                pb.RequestOp(put=pb.PutRequest(key=self._leader_key, value=value, lease=call.lease)),
                pb.RequestOp(put=pb.PutRequest(key=self._floor_key, value=floor)),
            ],
        )

    async def _call(self, method: str, request: Message, into: Message) -> None:
        stub = services.call_stub(self._channels[self._member], method)
        into.ParseFromString(await stub(request.SerializeToString()))


def _leader_of(found: pb.KeyValue) -> election.Leader:
    """Return the leader that a key names. Raises: KeyValueError: another program wrote it."""
    try:
        value: Any = json.loads(found.value)
        address, started_ms = value["address"], value["started_ms"]
    except (ValueError, TypeError, KeyError, RecursionError):
        address, started_ms = None, None
    is_text = isinstance(address, str) and address.isprintable() and len(address.encode()) <= MAX_ADDRESS_BYTES
    if not is_text or type(started_ms) is not int or not 0 < started_ms <= MAX_INT64:
        raise KeyValueError(f"its key {_shown(found.key)} was not written by a lighthouse; give another prefix")
    return election.Leader(address, found.lease, found.mod_revision, started_ms)


def _floor_of(found: pb.KeyValue) -> int:
    """Return the number in a key. Raises: KeyValueError: another program wrote it, or no quorum id is left above it."""
    value = found.value
    if not (len(value) <= MOST_DIGITS and value.isdigit()):
        raise KeyValueError(
            f"the value {_shown(value)} of its key {_shown(found.key)} was not written by a lighthouse; give another "
            "prefix"
        )
    if int(value) > MOST_FLOOR:
        raise KeyValueError(
            f"the value {_shown(value)} of its key {_shown(found.key)} leaves no quorum ids above it; end the jobs, "
            f"delete that key (etcdctl del {found.key.decode('utf-8', 'replace')}), and start them again"
        )
    return int(value)


def _shown(data: bytes) -> str:
    return repr(data[:64].decode("utf-8", "replace"))


def _credentials(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    if not config.is_encrypted:
        return None
    files = config.read_files()
    return grpc.ssl_channel_credentials(
        root_certificates=files["etcd_ca"], private_key=files["etcd_key"], certificate_chain=files["etcd_cert"]
    )
