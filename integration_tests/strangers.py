"""The messages of broken or evil peers to the lighthouse and to a manager server, before any damage to them.

A server accepts nearly all of them. A peer that is refused at its hello is heard no further, and its fuzz would reach
nothing behind that. So extreme numbers, sessions of another time and orders that end a group come among many others.

Law of this file: scripts by number, where a higher number is a later session, and names for the answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from tft_coord.core import events
from tft_coord.core.fingerprint import FingerprintPart
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import Hello, Member, Purpose, Quorum, QuorumKey, RankRequest, Verdict
from tft_coord.errors import ProtocolError
from tft_coord.wire import codec, rank_codec, services
from tft_coord.wire.limits import MAX_HEALED_BYTES

BEGAN_MS: Final = 1_700_000_000_000
EVIL: Final = Member("evil:1", address="h:1", store_address="h:2", step=2**63 - 1, lineage=9)
HELD: Final = QuorumKey(BEGAN_MS, 2**64 - 1)
RANK: Final = 1  # rank of its group, and no other process has a session as that one
RANK_SESSION: Final = 2**62  # a damaged session is most often an older one, and replaces no other
STEPS: Final = (0, 1, 2, 3, 2**63 - 1)
FEW: Final = 16  # replicas that come back repeatedly, while others come once
SHARED_JOBS: Final = 4


@dataclass(frozen=True)
class Script:
    """The messages of one kind of peer, and the names of the answers to it.

    stream: method of the session.
    session: returns the session's messages, by number.
    call: returns a separate call, by number: method and message.
    name: returns the name of an answer on the stream. Raises: ProtocolError: an honest peer could not read it.
    ends: returns whether this message ends for good what later ones are to reach.
    """

    stream: str
    session: Callable[[int], list[bytes]]
    call: Callable[[int], tuple[str, bytes]]
    name: Callable[[bytes], str]
    ends: Callable[[bytes], bool] = lambda _: False


# --- to the lighthouse -----------------------------------------------------------------------------------------------


def lighthouse_session(number: int) -> list[bytes]:
    """Return the session of a manager server. A dead or departed one does not return, and others may replace it."""
    rng = random.Random(number)
    once = rng.random() < 0.25
    replica_id = f"evil:{number}" if once else f"evil:{rng.randrange(FEW)}"
    job = f"evil {rng.randrange(SHARED_JOBS)}" if rng.random() < 0.3 else f"job of {replica_id}"
    if rng.random() < 0.02:
        job = "default"  # the job of torchft's members
    session = 2**64 - 1 if rng.random() < 0.05 else BEGAN_MS + number
    held = rng.choice((None, HELD, replace_id(HELD, number)))
    evil = replace(EVIL, replica_id=replica_id, session=rng.choice((0, session)), step=rng.choice(STEPS))
    hello = Hello(
        job=job,
        replica_id=replica_id,
        session=session,
        address="h:1",
        replaces=f"evil:{number - rng.randrange(1, 9)}" if once and number > 9 else "",
        ready=rng.random() < 0.9,
        held=held,
        lighthouse_started_ms=2**63 - 1 if rng.random() < 0.05 else BEGAN_MS,
        cluster_id="evil",
        left=rng.random() < 0.05 and once,
        num_answers=rng.choice((0, 1, number)),
    )
    messages = [codec.encode_to_lighthouse(events.HelloReceived(0, hello))]
    if held is not None and rng.random() < (0.9 if once else 0.1):
        # The first of a job to come is asked for its report. A report without a question ends the stream.
        others = tuple(replace(evil, replica_id=f"other:{index}") for index in range(rng.randrange(3)))
        report = events.QuorumReported(0, Quorum(held, (evil, *others), created_ms=3))
        messages.append(codec.encode_to_lighthouse(report))
    previous: Member | None = None
    for request in range(1, rng.randint(2, 4)):
        member = replace(evil, step=rng.choice(STEPS), lineage=rng.choice((None, 9)), **_flags(rng))
        made_of = (FingerprintPart("parameter/a", rng.choice("ab")),) if rng.random() < 0.2 else ()
        asked = events.QuorumRequested(0, rng.choice((request, 2**64 - 1)), member, held, made_of)
        messages.append(codec.encode_to_lighthouse(asked, previous))
        previous = member
    messages.append(codec.encode_to_lighthouse(events.BeatReceived(0, rng.choice((1, 2**63 - 1)), _progress(rng))))
    messages.append(codec.encode_to_lighthouse(events.RequestWithdrawn(0, 1)))
    if once:
        ends = (
            events.DeathReported(0, "its process ended\nand forged a line"),
            events.LeaveReceived(0, "it leaves\nand forges a line", rng.choice((0, 2**31 - 1))),
        )
        messages.append(codec.encode_to_lighthouse(rng.choice(ends)))
    return messages


def replace_id(key: QuorumKey, more: int) -> QuorumKey:
    """Return the key of a later quorum."""
    return replace(key, quorum_id=key.quorum_id + more)


def _flags(rng: random.Random) -> dict[str, Any]:
    names = ("live", "torn", "needs_configure", "shrink_only", "init_sync", "use_async_quorum")
    return {name: rng.random() < 0.3 for name in names}


def _progress(rng: random.Random) -> Progress | None:
    if rng.random() < 0.5:
        return None
    times = (0, 50, 2**63 - 1)
    return Progress(rng.choice(STEPS), rng.choice(list(Phase)), rng.choice(times), slowest_step_ms=rng.choice(times))


def _lighthouse_call(number: int) -> tuple[str, bytes]:
    """Return a call of a torchft member, or of an operator that inspects or drains a lighthouse."""
    rng = random.Random(number)
    name = rng.choice((f"evil:{rng.randrange(FEW)}", f"evil:{number}"))
    away = events.DrainRequested(0, f"evil {rng.randrange(SHARED_JOBS)}", name, "now\nor never", 2**31 - 1)
    alone = events.DrainRequested(0, f"job of evil:{number % FEW}", "evil", "", 0)
    return rng.choice(
        [
            (services.LIGHTHOUSE_HEARTBEAT, codec.encode_heartbeat("evil:1")),
            (services.LIGHTHOUSE_QUORUM, codec.encode_lighthouse_request(replace(EVIL, step=rng.choice(STEPS)))),
            (services.LIGHTHOUSE_DESCRIBE, b""),
            (services.LIGHTHOUSE_DRAIN, codec.encode_drain(away)),
            (services.LIGHTHOUSE_DRAIN, codec.encode_drain(alone)),
        ]
    )


# --- to a manager server -----------------------------------------------------------------------------------------


def rank_session(number: int) -> list[bytes]:
    """Return the session of a group rank, most often of the process that was there before."""
    rng = random.Random(number)
    hello = rank_codec.RankHello(RANK, number if number and rng.random() < 0.05 else RANK_SESSION)
    messages: list[rank_codec.FromRank] = [hello]
    asks: list[rank_codec.Ask | rank_codec.Vote] = [_vote(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.7:
        asks.insert(rng.randrange(len(asks) + 1), _ask(rng))
    for call, asked in enumerate(asks, 1):
        timeout_ms = rng.choice((0, 20, 50, 2**31 - 1))
        messages.append(rank_codec.RankCall(rng.choice((call, call, call, 2**64 - 1)), timeout_ms, asked))
    messages.append(rank_codec.RankBeat(rng.choice((1, MAX_HEALED_BYTES)), _progress(rng)))
    if rng.random() < 0.3:
        messages.append(rank_codec.RankWithdraw(1))
    if rng.random() < 0.2:
        leave = rank_codec.Leave(RANK, "it leaves\nand forges a line", rng.choice((0, 2**31 - 1)))
        messages.append(rng.choice((rank_codec.RankGoodbye(), rank_codec.RankCall(9, 50, leave))))
    return [rank_codec.encode_from_rank(message) for message in messages]


def _ask(rng: random.Random) -> rank_codec.Ask:
    """Return a request, often at the state of rank 0, so that there is a plan."""
    step, lineage = rng.choice([*[(0, 1)] * 4, *((step, 3) for step in STEPS), (0, None)])
    request = RankRequest(
        step=step,
        lineage=lineage,
        live=rng.random() < 0.7,
        torn=rng.random() < 0.1,
        held=rng.choice((None, None, HELD)),
        checkpoint_metadata="there",
        needs_configure=rng.random() < 0.2,
        shrink_only=rng.random() < 0.2,
        attempt=rng.choice((0, 0, 0, 1, 2, 2**63 - 1)),
        fingerprint=(FingerprintPart("parameter/a", rng.choice("ab")),) if rng.random() < 0.2 else (),
    )
    return rank_codec.Ask(RANK, request)


def _vote(rng: random.Random) -> rank_codec.Vote:
    """Return a vote in one of a few shared rounds, or in a round of its own."""
    step, key, purpose = a_round(rng)
    if rng.random() < 0.5:
        step, purpose = rng.randrange(2**63), rng.choice(list(Purpose))
        key = rng.choice((None, QuorumKey(rng.randrange(2**63), rng.getrandbits(64))))
    return rank_codec.Vote(RANK, step, rng.random() < 0.7, key, purpose, leaving=rng.random() < 0.1)


def a_round(rng: random.Random) -> tuple[int, QuorumKey | None, Purpose]:
    """Return one of a few rounds in which ranks may meet."""
    return rng.randrange(2), rng.choice((None, HELD)), Purpose.COMMIT


def _rank_call(number: int) -> tuple[str, bytes]:
    """Return a call of a torchft rank, or of a peer of another group."""
    rng = random.Random(number)
    return rng.choice(
        [
            (services.MANAGER_QUORUM, rank_codec.encode_rank_request(_ask(rng))),
            (services.MANAGER_SHOULD_COMMIT, rank_codec.encode_vote(_vote(rng))),
            (services.MANAGER_SHOULD_COMMIT, rank_codec.encode_vote(_vote(rng))),
            (services.MANAGER_CHECKPOINT_METADATA, rank_codec.encode_metadata_request(RANK)),
            (services.MANAGER_KILL, rank_codec.encode_kill("please")),
        ]
    )


def _ends_the_group(message: bytes) -> bool:
    try:
        match rank_codec.decode_from_rank(message):
            case rank_codec.RankGoodbye() | rank_codec.RankCall(_, _, rank_codec.Leave()):
                return True
    except ProtocolError:
        pass
    return False


def _name_to_rank(message: bytes) -> str:
    match rank_codec.decode_to_rank(message):
        case rank_codec.RankAnswer(_, Verdict(yes)):
            return "a yes" if yes else "a no"
        case rank_codec.RankAnswer(_, answer):
            return type(answer).__name__
        case messages:
            return type(messages).__name__


SCRIPTS: Final = {
    "lighthouse": Script(
        services.LIGHTHOUSE_SESSION,
        lighthouse_session,
        _lighthouse_call,
        lambda message: type(codec.decode_from_lighthouse(message)).__name__,
    ),
    "manager server": Script(services.MANAGER_SESSION, rank_session, _rank_call, _name_to_rank, _ends_the_group),
}
