"""The socket beside a stream: who gets it, what comes over it, and how it ends. Real sockets on this machine."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tft_coord.errors import Unreachable
from tft_coord.transport import direct
from tft_coord.transport.direct import DirectPort, DirectSocket, Offer, connect
from tft_coord.transport.frames import framed
from tft_coord.transport.outbox import MOST_WAITING_BYTES, Outbox

HOST = "127.0.0.1"
LATE_S = 20.0
MOST_BYTES = 4 << 20
SO_ATTACH_FILTER = 26


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it, and see that it has left no task."""

    async def run() -> None:
        await asyncio.wait_for(test(), LATE_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@asynccontextmanager
async def served(silence_s: float = LATE_S) -> AsyncIterator[DirectPort]:
    port = DirectPort(most_bytes=MOST_BYTES, silence_s=silence_s)
    port.open(HOST)
    try:
        yield port
    finally:
        await port.close()


def offered(port: DirectPort, taken_up: Callable[[DirectSocket], None]) -> tuple[bytes, Offer]:
    ticket, metadata = port.offer(taken_up)
    offer = Offer.read((("other", b"x"), *metadata))
    assert offer is not None
    return ticket, offer


async def taken(offer: Offer, **more: Any) -> DirectSocket:
    settings = {"most_bytes": MOST_BYTES, "silence_s": LATE_S, "overflows": lambda: None, "within_s": LATE_S, **more}
    return await connect(HOST, offer, **settings)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[DirectSocket, DirectSocket]]:
    """The client's end and the server's."""
    ends: list[DirectSocket] = []
    async with served() as port:
        _, offer = offered(port, ends.append)
        client = await taken(offer)
        try:
            yield client, ends[0]
        finally:
            await end_both(client, ends[0])


async def end_both(client: DirectSocket, server: DirectSocket) -> None:
    """One that hears nothing yet does not notice that the other has ended."""
    for end in (client, server):
        end.abort()
        await end.ended


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_messages_of_any_length_pass_both_ways_in_order() -> None:
    async def test() -> None:
        async with pair() as (client, server):
            messages = [b"", b"one", bytes(MOST_BYTES), *(bytes([number]) for number in range(200))]
            for here, there in ((client, server), (server, client)):
                heard: list[bytes] = []
                for message in messages:
                    here.say(message)
                await asyncio.sleep(0.01)  # what comes before somebody hears is kept
                there.hear(heard.append)
                await until(lambda: len(heard) == len(messages))  # noqa: B023
                assert heard == messages

    in_loop(test)


def test_no_message_waits_for_the_acknowledgement_of_the_one_before() -> None:
    """The other host delays it by 40 ms, and a newcomer's name goes just before the quorum that has it."""

    async def test() -> None:
        async with pair() as (client, server):
            for end in (client, server):
                assert end._transport is not None
                own: socket.socket = end._transport.get_extra_info("socket")
                assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    in_loop(test)


def test_what_is_said_right_after_the_greeting_may_be_longer_than_one() -> None:
    """It comes in one piece with the greeting, of which no more than a few bytes are taken."""

    async def test() -> None:
        def greets(end: DirectSocket) -> None:
            end.say(b"long" * 1000)
            ends.append(end)

        ends: list[DirectSocket] = []
        async with served() as port:
            client = await taken(offered(port, greets)[1])
            heard: list[bytes] = []
            client.hear(heard.append)
            await until(lambda: bool(heard))
            assert heard == [b"long" * 1000]
            await end_both(client, ends[0])

    in_loop(test)


@pytest.mark.parametrize("how", ["unknown", "used", "withdrawn"])
def test_a_ticket_that_is_no_good_gives_no_socket(how: str) -> None:
    async def test() -> None:
        ends: list[DirectSocket] = []
        async with served() as port:
            ticket, offer = offered(port, ends.append)
            if how == "unknown":
                offer = Offer(offer.port, bytes(16))
            elif how == "withdrawn":
                port.withdraw(ticket)
            else:
                await end_both(await taken(offer), ends.pop())
            with pytest.raises(Unreachable, match="hung up"):
                await taken(offer)
            assert ends == []

    in_loop(test)


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\n\r\n", framed(bytes(1000)), framed(b"TFT direct 1\n"), framed(b""), b"\xff" * 100],
    ids=["http", "too long", "no ticket", "nothing", "noise"],
)
def test_who_greets_otherwise_is_sent_off(words: bytes) -> None:
    async def test() -> None:
        async with served() as port:
            _, offer = offered(port, lambda end: pytest.fail("a stranger was given the socket"))
            reader, writer = await asyncio.open_connection(HOST, offer.port)
            writer.write(words)
            with suppress(ConnectionError):
                assert await reader.read(1) == b""
            writer.close()

    in_loop(test)


def test_who_does_not_greet_is_sent_off_after_a_while() -> None:
    async def test() -> None:
        async with served(silence_s=0.05) as port:
            _, offer = offered(port, lambda end: None)
            reader, writer = await asyncio.open_connection(HOST, offer.port)
            writer.write(framed(b"TFT direct 1\n" + bytes(16))[:9])
            with suppress(ConnectionError):
                assert await reader.read(1) == b""
            writer.close()

    in_loop(test)


def test_a_message_that_is_too_long_ends_the_socket() -> None:
    async def test() -> None:
        async with pair() as (client, server):
            heard: list[bytes] = []
            server.hear(heard.append)
            client.say(b"good")
            client.say(bytes(MOST_BYTES + 1))
            await server.ended
            await client.ended
            assert heard == [b"good"]
            client.say(b"to nobody")

    in_loop(test)


def test_who_takes_nothing_costs_bounded_memory() -> None:
    async def test() -> None:
        overflown: list[bool] = []
        async with pair() as (_, server):
            server.overflows = lambda: overflown.append(True)
            piece = bytes(1 << 20)
            for _ in range(2 * (MOST_WAITING_BYTES >> 20)):
                server.say(piece)
            assert overflown == [True]
            await server.ended

    in_loop(test)


def test_who_reads_nothing_can_not_hold_an_ended_socket_open() -> None:
    async def test() -> None:
        async with pair() as (_, server):
            server.say(bytes(2 * MOST_BYTES))
            server.close()
            await server.ended

    in_loop(test)


def test_a_connection_whose_packets_are_lost_ends() -> None:
    """Neither end is told; what was said is not acknowledged."""

    async def test() -> None:
        ends: list[DirectSocket] = []
        async with served() as port:
            client = await taken(offered(port, ends.append)[1], silence_s=0.3)
            for end in (client, ends[0]):
                end.hear(lambda message: None)
                drop_all_that_arrives(end)
            client.say(b"a beat")
            await client.ended
            await end_both(client, ends[0])

    in_loop(test)


def drop_all_that_arrives(end: DirectSocket) -> None:
    """By a filter of the kernel's: one instruction, which keeps nothing of a packet."""
    assert end._transport is not None
    program = (ctypes.c_ubyte * 8)(6)
    filters = struct.pack("HP", 1, ctypes.addressof(program))
    end._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filters)


def test_an_ended_socket_holds_nothing_for_a_garbage_collector() -> None:
    async def test() -> None:
        async with pair() as (client, _):
            client.hear(Holder(client).take)
            held = weakref.ref(client._take.__self__)  # type: ignore[union-attr]
            client.abort()
            await client.ended
            assert held() is None

    gc.disable()
    try:
        in_loop(test)
    finally:
        gc.enable()


class Holder:
    def __init__(self, end: DirectSocket) -> None:
        self.end = end

    def take(self, message: bytes) -> None:
        """Nothing comes."""


def test_those_that_say_nothing_are_few() -> None:
    async def test() -> None:
        async with served() as port:
            _, offer = offered(port, lambda end: None)
            silent = [await asyncio.open_connection(HOST, offer.port) for _ in range(direct.MOST_SILENT + 2)]
            for reader, _ in silent[:2]:
                with suppress(ConnectionError):
                    assert await reader.read(1) == b""
            for _, writer in silent:
                writer.close()

    in_loop(test)


def test_one_host_does_not_push_out_another() -> None:
    async def test() -> None:
        async with served() as port:
            _, offer = offered(port, lambda end: None)
            other, others_writer = await asyncio.open_connection(HOST, offer.port, local_addr=("127.0.0.2", 0))
            silent = [await asyncio.open_connection(HOST, offer.port) for _ in range(direct.MOST_SILENT)]
            with suppress(ConnectionError):
                assert await silent[0][0].read(1) == b""
            assert not other.at_eof()
            for writer in (others_writer, *(writer for _, writer in silent)):
                writer.close()

    in_loop(test)


def test_without_a_descriptor_it_waits_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, fails = socket.socket.accept, iter(range(3))

    def accepted(listener: socket.socket) -> Any:
        if next(fails, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    async def test() -> None:
        monkeypatch.setattr(direct, "ACCEPT_AGAIN_S", 0.01)
        monkeypatch.setattr(socket.socket, "accept", accepted)
        async with pair():
            pass

    in_loop(test)
    assert [record.getMessage() for record in caplog.records] == [
        "no socket can be taken: [Errno 24] Too many open files; raise the limit of open files"
    ]


def test_the_end_comes_after_all_that_was_said() -> None:
    async def test() -> None:
        async with pair() as (client, server):
            heard: list[bytes] = []
            server.hear(heard.append)
            for number in range(100):
                client.say(bytes([number]) * 10_000)
            client.close()
            await server.ended
            assert [message[0] for message in heard] == list(range(100))

    in_loop(test)


@pytest.mark.parametrize("how", ["close", "abort", "reset"])
def test_an_end_is_told_by_the_other_host(how: str) -> None:
    """As it is for a process that ends: with a reset where something was unread."""

    async def test() -> None:
        async with pair() as (client, server):
            server.hear(lambda message: None)
            assert not server.hung_up
            if how == "reset":
                assert client._transport is not None
                connection = client._transport.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            (client.close if how == "close" else client.abort)()
            await server.ended
            assert server.hung_up
            await client.ended
            assert not client.hung_up, "this side ended it"

    in_loop(test)


def test_an_end_that_has_not_come_by_yet_is_seen() -> None:
    async def test() -> None:
        async with pair() as (client, server):
            client.abort()  # the server reads nothing yet
            await until(lambda: server.hung_up)
            assert not server.ended.done()

    in_loop(test)


def test_an_end_for_want_of_an_answer_is_told_by_nobody() -> None:
    async def test() -> None:
        ends: list[DirectSocket] = []
        async with served(silence_s=0.3) as port:
            client = await taken(offered(port, ends.append)[1])
            for end in (client, ends[0]):
                end.hear(lambda message: None)
                drop_all_that_arrives(end)
            ends[0].say(b"a quorum")
            await ends[0].ended
            assert not ends[0].hung_up
            await end_both(client, ends[0])

    in_loop(test)


def test_nobody_who_listens_is_told_so() -> None:
    async def test() -> None:
        with socket.create_server((HOST, 0)) as free:
            port = int(free.getsockname()[1])
        with pytest.raises(Unreachable, match="can't be reached"):
            await taken(Offer(port, bytes(16)))
        with pytest.raises(Unreachable, match="can't be reached"):
            await connect(
                "a..b",
                Offer(port, bytes(16)),
                most_bytes=MOST_BYTES,
                silence_s=LATE_S,
                overflows=lambda: None,
                within_s=LATE_S,
            )

    in_loop(test)


@pytest.mark.parametrize("says", [None, framed(b"SSH-2.0-OpenSSH"), b"SSH-2.0-OpenSSH_9.6p1"])
def test_somebody_else_at_the_port_is_left_at_once_or_in_time(says: bytes | None) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if says is not None:
                writer.write(says)
            with suppress(ConnectionError):
                while await reader.read(1000):
                    pass
            left.set()
            writer.close()

        server = await asyncio.start_server(stranger, HOST, 0)
        try:
            port = int(server.sockets[0].getsockname()[1])
            with pytest.raises(Unreachable):
                await taken(Offer(port, bytes(16)), within_s=LATE_S if says else 0.05)
            await left.wait()
        finally:
            server.close()

    in_loop(test)


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("tft-direct-port", "80"),),
        (("tft-direct-port", "0"), ("tft-direct-ticket", "00" * 16)),
        (("tft-direct-port", "65536"), ("tft-direct-ticket", "00" * 16)),
        (("tft-direct-port", "many"), ("tft-direct-ticket", "00" * 16)),
        (("tft-direct-port", "80"), ("tft-direct-ticket", "00" * 15)),
        (("tft-direct-port", "80"), ("tft-direct-ticket", "xy" * 16)),
        (("tft-direct-port", b"80"), ("tft-direct-ticket", b"\xff")),
    ],
)
def test_an_offer_that_can_not_be_is_none(metadata: direct.Metadata) -> None:
    assert Offer.read(metadata) is None


def test_a_port_of_all_interfaces_is_reached_by_both_families_and_freed() -> None:
    async def test() -> None:
        ends: list[DirectSocket] = []
        port = DirectPort(most_bytes=MOST_BYTES, silence_s=LATE_S)
        port.open("")
        _, offer = offered(port, ends.append)
        await end_both(await taken(offer), ends.pop())
        if socket.has_dualstack_ipv6():
            _, offer = offered(port, ends.append)
            six = await connect(
                "::1", offer, most_bytes=MOST_BYTES, silence_s=LATE_S, overflows=lambda: None, within_s=LATE_S
            )
            await end_both(six, ends.pop())
        _, waiting = await asyncio.open_connection(HOST, offer.port)
        await port.close()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(HOST, offer.port)
        waiting.close()

    in_loop(test)


def test_a_host_of_several_addresses_takes_the_first_that_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*_: object, **__: object) -> list[Any]:
        there = (socket.AF_INET, socket.SOCK_STREAM, 0, "", (HOST, 0))
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0)), there]

    async def test() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", found)
            port = DirectPort(most_bytes=MOST_BYTES, silence_s=LATE_S)
            port.open("two addresses")
        ends: list[DirectSocket] = []
        await end_both(await taken(offered(port, ends.append)[1]), ends[0])
        await port.close()

    in_loop(test)


def test_a_port_that_can_not_be_opened_offers_nothing() -> None:
    async def test() -> None:
        port = DirectPort(most_bytes=MOST_BYTES, silence_s=LATE_S)
        with pytest.raises(OSError, match="assign"):
            port.open("192.0.2.1")
        assert not port.is_asked_for(direct.ASK)
        await port.close()

    in_loop(test)


def test_an_outbox_that_is_diverted_says_the_last_word_here_and_the_rest_elsewhere() -> None:
    async def test() -> None:
        here: list[bytes] = []
        there: list[bytes] = []

        async def write(message: bytes) -> None:
            here.append(message)

        outbox = Outbox(lambda: None)
        outbox.put(b"first")
        outbox.divert(direct.LAST, there.append)
        outbox.put(b"second")
        outbox.close()
        outbox.put(b"too late")
        await outbox.write_all(write)
        assert (here, there) == ([b"first", direct.LAST], [b"second"])

    in_loop(test)
