"""A server whose port goes on answering, whatever strangers call their methods."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from tft_coord import descriptors
from tft_coord.security import Gate
from tft_coord.timeouts import Timeouts
from tft_coord.transport import registered_server, settings
from tft_coord.transport import server as module
from tft_coord.transport.server import Server
from tft_coord.transport.settings import Options
from tft_coord.wire import services
from tft_coord.wire.services import Context, Services, call_stub, stream_stub

ECHO = "/torchft.ManagerService/Quorum"
STREAM = "/torchft.TftManagerService/Session"
WITHIN_S = 20.0
NO_TEXT = b"/torchft.\xefManager/Quorum"
OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
UNIMPLEMENTED = b"grpc-status\x0212"
UNAUTHENTICATED = b"grpc-status\x0216"


async def echo(request: bytes, _context: Context) -> bytes:
    return request


async def echo_all(_requests: object, context: Context) -> None:
    while isinstance(message := await context.read(), bytes):
        await context.write(message)


def opening(method: bytes, message: bytes = b"") -> bytes:
    """What a client of HTTP/2 says first, and the headers of one call with the beginning of a message."""

    def text(words: bytes) -> bytes:
        return bytes([len(words)]) + words

    headers = b"\x83\x86\x04" + text(method) + b"\x01" + text(b"here") + b"\x0f\x10" + text(b"application/grpc")
    headers += b"\x00" + text(b"te") + text(b"trailers")
    data = bytes([0, 0, len(message), 0, 0, 0, 0, 0, 1]) + message if message else b""
    headers = bytes([0, 0, len(headers), 1, 4, 0, 0, 0, 1]) + headers
    return OPENING + headers + data


async def say(port: int, words: bytes) -> bytes:
    """Returns: all that is answered until a call is, or the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(words)
        heard = b""
        while b"grpc-status" not in heard and (part := await reader.read(1 << 16)):
            heard += part
        return heard
    finally:
        writer.close()


async def until_answered(channel: grpc.aio.Channel) -> None:
    assert await call_stub(channel, ECHO)(b"a word", wait_for_ready=True, timeout=WITHIN_S) == b"a word"


async def status_of(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_stub(channel, method)(b"", timeout=WITHIN_S)
    return caught.value.code()


def at(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


def serving(token: str | None = None, options: Options = [("grpc.so_reuseport", 0)]) -> Server:  # noqa: B006
    return Server(options, Services(unary={ECHO: echo}, streams={STREAM: echo_all}, gate=Gate(token)))


@asynccontextmanager
async def listening(token: str | None = None, *, with_limits: bool = False) -> AsyncIterator[tuple[Server, int]]:
    """A server that answers, and its port.

    Args:
        with_limits: it has the options that the servers of this package have.
    """
    server = serving(token, settings.server_options(Timeouts())) if with_limits else serving(token)
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


def test_a_name_that_is_no_text_is_one_call_that_is_unimplemented(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody's connection is ended by it, nor the listening; versions of grpc without the fault behave alike."""

    async def run() -> None:
        async with listening() as (_, port), at(port) as channel:
            stream = stream_stub(channel, STREAM)()
            for count in range(3):
                answer = await asyncio.wait_for(say(port, opening(NO_TEXT)), WITHIN_S)
                assert not registered_server.is_supported() or UNIMPLEMENTED in answer
                await until_answered(channel)
                async with at(port) as newcomer:
                    await until_answered(newcomer)
                    assert await status_of(newcomer, "/torchft.ManagerService/Unknown") is grpc.StatusCode.UNIMPLEMENTED
                await stream.write(b"%d" % count)
                assert await stream.read() == b"%d" % count
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF

    with caplog.at_level(logging.ERROR, "tft_coord"):
        asyncio.run(run())
    assert not caplog.records


def test_the_secret_is_asked_for() -> None:
    async def run() -> None:
        async with listening(token="a secret of the job") as (_, port), at(port) as channel:
            assert await status_of(channel, ECHO) is grpc.StatusCode.UNAUTHENTICATED
            assert await status_of(channel, STREAM) is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(run())


@pytest.mark.parametrize("method", [ECHO, STREAM])
def test_a_refused_call_is_refused_by_its_headers(method: str) -> None:
    """It announces eight megabytes and sends none of them: who waits for them, waits."""

    async def run() -> None:
        async with listening(token="a secret of the job") as (_, port):
            answer = await asyncio.wait_for(say(port, opening(method.encode(), b"\0\0\x80\0\0")), WITHIN_S)
            assert UNAUTHENTICATED in answer

    asyncio.run(run())


def test_a_flood_of_refused_calls_is_answered_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "REFUSAL_DELAY_S", 2 * WITHIN_S)
    most_at_once = 2 * services.PROMPT_REFUSALS_PER_S  # a second may end meanwhile

    async def run() -> None:
        async with listening(token="a secret of the job") as (_, port), at(port) as channel, at(port) as honest:
            calls = [asyncio.ensure_future(status_of(channel, ECHO)) for _ in range(4 * most_at_once)]
            while sum(each.done() for each in calls) < services.PROMPT_REFUSALS_PER_S:
                await asyncio.wait([each for each in calls if not each.done()], return_when=asyncio.FIRST_COMPLETED)
            show = (("authorization", "Bearer a secret of the job"),)
            for _ in range(10):
                assert await call_stub(honest, ECHO)(b"a word", metadata=show, timeout=WITHIN_S) == b"a word"
            done = [each for each in calls if each.done()]
            assert {each.result() for each in done} == {grpc.StatusCode.UNAUTHENTICATED}
            assert len(done) <= most_at_once
            for each in calls:
                each.cancel()
            await asyncio.wait(calls)

    asyncio.run(run())


def test_no_more_refused_calls_wait_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "REFUSAL_DELAY_S", 2 * WITHIN_S)
    monkeypatch.setattr(services, "MAX_DELAYED_REFUSALS", 3)

    async def run() -> None:
        async with listening(token="a secret of the job") as (_, port), at(port) as channel:
            calls = [asyncio.ensure_future(status_of(channel, ECHO)) for _ in range(80)]
            while sum(not each.done() for each in calls) > services.MAX_DELAYED_REFUSALS:
                await asyncio.wait([each for each in calls if not each.done()], return_when=asyncio.FIRST_COMPLETED)
            for each in calls:
                each.cancel()
            await asyncio.wait(calls)

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def test_a_connection_without_a_call_is_ended_and_its_client_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CONNECTION_IDLE_MS", 50)

    async def run() -> None:
        async with listening(with_limits=True) as (_, port), at(port) as channel:
            await until_answered(channel)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(OPENING)
            assert b"idle" in await asyncio.wait_for(reader.read(-1), WITHIN_S)
            writer.close()
            while channel.get_state() is not grpc.ChannelConnectivity.IDLE:
                await channel.wait_for_state_change(channel.get_state())
            assert await call_stub(channel, ECHO)(b"again", timeout=WITHIN_S) == b"again"

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def test_a_stream_outlives_the_age_of_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection takes no new calls; the client's next one opens another."""
    monkeypatch.setattr(settings, "CONNECTION_AGE_MS", 50)

    async def run() -> None:
        async with listening(with_limits=True) as (_, port), at(port) as channel:
            stream = stream_stub(channel, STREAM)()
            await stream.write(b"young")
            assert await stream.read() == b"young"
            while channel.get_state() is not grpc.ChannelConnectivity.IDLE:
                await channel.wait_for_state_change(channel.get_state())
            await until_answered(channel)
            await stream.write(b"old")
            assert await stream.read() == b"old"
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def test_connections_are_fewer_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "limit", lambda: 6)

    async def run() -> None:
        async with listening(with_limits=True) as (_, port), at(port) as channel:
            await until_answered(channel)
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            reading = [asyncio.ensure_future(reader.read(1)) for reader, _ in silent]
            ended = 0
            for answered in asyncio.as_completed(reading):
                ended += await answered == b""
                if ended == 2:
                    break
            assert ended == 2
            await until_answered(channel)
            for reader in reading:
                reader.cancel()
            for _, writer in silent:
                writer.close()
            await asyncio.wait(reading)

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def test_few_descriptors_are_warned_of_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(descriptors, "limit", lambda: 20)
    looks: list[int] = []

    def lowest_free() -> int:
        looks.append(7 if len(looks) < 3 else 8)
        return looks[-1]

    monkeypatch.setattr(descriptors, "_lowest_free", lowest_free)

    async def run() -> None:
        async with listening():
            while len(looks) < 9:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has 8 files open, and accepts at most 10 connections, half of its 20 file descriptors" in line


def test_the_number_of_open_files_is_seen() -> None:
    before = descriptors._lowest_free()
    with open(os.devnull), open(os.devnull):
        assert descriptors._lowest_free() > before
    assert descriptors._lowest_free() == before < descriptors.limit()


def test_open_calls_have_the_grace() -> None:
    async def run() -> None:
        async with listening() as (server, port), at(port) as channel:
            stream = stream_stub(channel, STREAM)()
            await stream.write(b"open")
            assert await stream.read() == b"open"
            stop = asyncio.ensure_future(server.stop(WITHIN_S))
            await stream.write(b"still")
            assert await stream.read() == b"still"
            await stream.done_writing()
            await asyncio.wait_for(stop, WITHIN_S)

    asyncio.run(run())


def test_an_address_that_cant_be_bound_is_refused() -> None:
    async def run() -> None:
        first, second = serving(), serving()
        port = first.bind("127.0.0.1:0")
        with pytest.raises(RuntimeError):
            second.bind(f"127.0.0.1:{port}")
        await first.start()
        await first.stop(0)

    asyncio.run(run())


class Ends(logging.Handler):
    """What is said of listenings that have ended, when it is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.put_nowait(record.getMessage())


def test_where_registered_methods_are_unsupported_another_server_takes_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what has ended is stopped once more: grpc's own stop of it breaks off before its memory is given back.
    Versions of grpc without the fault do not end.
    """
    made: list[grpc.aio.Server] = []
    stopped: list[grpc.aio.Server] = []
    make = grpc.aio.server

    def spied(**settings: Any) -> grpc.aio.Server:
        server = make(**settings)
        stop = server.stop

        async def stop_and_tell(grace: float | None) -> None:
            await stop(grace)
            stopped.append(server)

        monkeypatch.setattr(server, "stop", stop_and_tell)
        made.append(server)
        return server

    monkeypatch.setattr(module, "is_supported", lambda: False)
    monkeypatch.setattr(grpc.aio, "server", spied)

    async def run() -> None:
        ends = Ends()
        module.logger.addHandler(ends)
        try:
            async with listening() as (_, port):
                for _ in range(3):
                    await asyncio.wait_for(say(port, opening(NO_TEXT)), WITHIN_S)
                    if registered_server.is_supported():
                        assert "closed the port" in await asyncio.wait_for(ends.said.get(), WITHIN_S)
                    async with at(port) as channel:
                        await until_answered(channel)
        finally:
            module.logger.removeHandler(ends)

    asyncio.run(run())
    assert len(made) == (4 if registered_server.is_supported() else 1)
    assert set(made) == set(stopped)
