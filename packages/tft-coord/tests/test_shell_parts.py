"""What the shells stand on: addresses, the shared secret, the process's loop, the outbox, the lazy names."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

import tft_coord
from tft_coord.core.effects import RefuseSession, TellLost, Welcome
from tft_coord.core.types import Refusal
from tft_coord.errors import ConfigError, CoordinationClosedError, CoordinationError, UnreachableError
from tft_coord.manager_server.link import LighthouseLink
from tft_coord.security import Trust, admits, call_metadata, read_token
from tft_coord.timeouts import Timeouts
from tft_coord.transport.address import check_host, check_scheme, join_host_port, target
from tft_coord.transport.dial import cancel_and_wait
from tft_coord.transport.loop import THREAD_NAME, LoopShare
from tft_coord.transport.outbox import Outbox
from tft_coord.transport.settings import error_of
from tft_coord.wire import codec


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("localhost:29510", "localhost:29510"),
        ("http://localhost:29510", "localhost:29510"),
        (" http://localhost:29510/ ", "localhost:29510"),
        ("http://[::1]:29510", "[::1]:29510"),
        ("[fe80::1%eth0]:1", "[fe80::1%eth0]:1"),
        ("10.0.0.1:65535", "10.0.0.1:65535"),
    ],
)
def test_addresses_as_users_write_them(address: str, dialled: str) -> None:
    assert target(address) == dialled


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "localhost:",
        ":29510",
        "localhost:0",
        "h:70000",
        "h:1/path",
        "::1:29510",
        "a b:1",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an address; give host:port, such as localhost:29510"):
        target(address)


@pytest.mark.parametrize("address", ["http://user:s3cret@h:1", "s3cret@h:1"])
def test_an_address_with_a_password_is_refused_without_it(address: str) -> None:
    with pytest.raises(ConfigError, match=r"a user or a password in front of an @") as refused:
        target(address)
    assert "s3cret" not in str(refused.value)


def test_an_address_that_asks_for_tls_needs_certificates() -> None:
    assert target("https://h:1/") == "h:1"
    check_scheme("http://h:1, https://h:2", has_certificates=True)
    with pytest.raises(ConfigError, match=r"'https://h:2' asks for TLS, and .* no certificates; set TFT_TLS_CERT"):
        check_scheme("http://h:1, https://h:2", has_certificates=False)


def test_an_ipv6_host_is_put_in_brackets() -> None:
    assert join_host_port("::1", 5) == "[::1]:5"
    assert join_host_port("[::1]", 5) == "[::1]:5"
    assert join_host_port("host", 5) == "host:5"


@pytest.mark.parametrize("host", ["node-1", "node_1.example.org", "10.0.0.1", "::1", "[::1]", "fe80::1%eth0"])
def test_hosts_as_users_write_them(host: str) -> None:
    check_host("hostname", host)


@pytest.mark.parametrize("host", ["", "x y", " x", "h:1", "[h:1]", "[h]", "http://h", "h/", "10.0.0.1:5", "::1]"])
def test_what_is_no_host_is_refused_by_the_settings_name(host: str) -> None:
    with pytest.raises(ConfigError, match=r"hostname is .*; give a host's name or address without a port"):
        check_host("hostname", host)


@pytest.mark.parametrize(
    ("details", "error"),
    [("Internal error from Core", UnreachableError), ("lighthouse quorum failed", CoordinationError)],
)
def test_a_stream_that_ended_while_it_was_written_to_is_a_broken_one(
    details: str, error: type[CoordinationError]
) -> None:
    nothing = grpc.aio.Metadata()
    failure = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details)
    assert type(error_of(failure, "the session")) is error


def test_the_secret_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    assert read_token({}) is None
    assert read_token({"TFT_TOKEN": "s3cret"}) == "s3cret"
    assert call_metadata(read_token({"TFT_TOKEN_FILE": str(file)})) == call_metadata("s3cret")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TFT_TOKEN": "a", "TFT_TOKEN_FILE": "b"}, "both set"),
        ({"TFT_TOKEN": ""}, "TFT_TOKEN is empty; .* printable ASCII"),
        ({"TFT_TOKEN": "two words"}, "TFT_TOKEN is invalid: .* printable ASCII"),
        ({"TFT_TOKEN_FILE": "/no/such/file"}, "/no/such/file, which can't be read"),
        ({"TFT_TOKEN_FILE": ""}, "TFT_TOKEN_FILE is empty"),
        ({"TFT_TOKEN_FILE": "/"}, "names /, which can't be read"),
        ({"TFT_TOKEN_FILE": "/dev/zero"}, "/dev/zero, which can't be read: it is not a regular file"),
    ],
)
def test_a_secret_that_is_none_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_token(environment)


def test_a_file_that_holds_no_secret_is_neither_waited_for_nor_read_whole(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"x" * 10_000_000)
    for path, says in ((pipe, "it is not a regular file"), (large, "larger than a shared secret")):
        with pytest.raises(ConfigError, match=f"{path.name}, which can't be read: .*{says}"):
            read_token({"TFT_TOKEN_FILE": str(path)})
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(
        ConfigError, match=r"TFT_TOKEN_FILE names .*empty, which holds no valid secret: .*printable ASCII"
    ):
        read_token({"TFT_TOKEN_FILE": str(empty)})


def test_who_shows_the_secret_is_admitted_and_nobody_else() -> None:
    assert admits(None, [])
    assert admits("s3cret", call_metadata("s3cret"))
    for shown in ([], call_metadata("other"), [("authorization", "s3cret")], [*call_metadata("s3cret")] * 2):
        assert not admits("s3cret", shown)


def nothing() -> None:
    """For shares that these tests give back themselves."""


def loop_threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_shares_of_the_loop_have_one_thread_and_the_last_one_ends_it() -> None:
    async def where() -> str:
        return threading.current_thread().name

    first, second = LoopShare("the first", nothing), LoopShare("the second", nothing)
    assert first.loop is second.loop
    assert first.run(where()) == THREAD_NAME
    assert loop_threads() == 1
    first.give_back()
    first.give_back()
    assert second.run(where()) == THREAD_NAME
    with pytest.raises(CoordinationClosedError, match="the first was shut down; make a new one"):
        first.run(where())
    second.give_back()
    assert loop_threads() == 0
    third = LoopShare("the third", nothing)
    assert third.run(where()) == THREAD_NAME
    third.give_back()


def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = 0

    async def dials_for_ever() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    async def main() -> bool:
        task = asyncio.create_task(dials_for_ever())
        await asyncio.sleep(0)
        await cancel_and_wait(task)
        return task.done()

    assert asyncio.run(main())
    assert lost == 3


def test_what_is_left_on_the_loop_is_cancelled_at_its_end() -> None:
    share = LoopShare("a test", nothing)
    cancelled = threading.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(wait_for_ever())
        await asyncio.sleep(0)
        return task

    task = share.run(start())
    share.give_back()
    assert cancelled.is_set()
    assert task.cancelled()


def test_an_outbox_writes_in_order_and_ends_when_it_is_closed_and_empty() -> None:
    written: list[bytes] = []

    async def write(message: bytes) -> None:
        await asyncio.sleep(0)
        written.append(message)

    async def scenario() -> None:
        outbox = Outbox(lambda: written.append(b"overflows"))
        outbox.put(b"1")
        writer = asyncio.create_task(outbox.write_all(write))
        await asyncio.sleep(0)
        outbox.put(b"2")
        outbox.put(b"3")
        outbox.close()
        outbox.put(b"too late")
        await writer

    asyncio.run(scenario())
    assert written == [b"1", b"2", b"3"]


def test_a_peer_that_does_not_read_costs_no_more_than_the_bound() -> None:
    ended: list[str] = []
    outbox = Outbox(lambda: ended.append("overflows"), most_bytes=10)
    outbox.put(b"x" * 100)  # one message may be as large as it must
    assert not outbox.closed
    outbox.put(b"y")
    assert outbox.closed
    outbox.put(b"z")
    assert ended == ["overflows"]


def test_what_is_written_does_not_count_as_waiting() -> None:
    async def scenario() -> None:
        started, ended = asyncio.Event(), list[str]()

        async def write(_message: bytes) -> None:
            started.set()
            await asyncio.Event().wait()

        outbox = Outbox(lambda: ended.append("overflows"), most_bytes=10)
        outbox.put(b"x" * 100)
        writer = asyncio.create_task(outbox.write_all(write))
        await started.wait()
        outbox.put(b"y" * 9)
        outbox.put(b"z")
        assert not ended
        outbox.put(b"!")
        assert ended
        writer.cancel()

    asyncio.run(scenario())


def link_to(addresses: str) -> LighthouseLink:
    return LighthouseLink(
        addresses,
        trust=Trust(None),
        timeouts=Timeouts(),
        job="job",
        replica_id="a",
        address="a:1",
        replaces="",
        arrived=lambda _: None,
        quorum=lambda: None,
    )


@pytest.mark.parametrize("said_goodbye", [True, False])
def test_after_our_own_goodbye_it_is_no_news_that_we_are_dead(
    said_goodbye: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        link = link_to("127.0.0.1:9")
        if said_goodbye:
            link.report_death("rank 0 shut down")
        link._received(codec.encode_from_lighthouse(RefuseSession(0, Refusal.DEAD, "replica a was reported dead")))
        await link.close()

    asyncio.run(scenario())
    news = "replica a: refused by the lighthouse (dead): replica a was reported dead"
    assert [record.getMessage() for record in caplog.records] == ([] if said_goodbye else [news])


def test_what_is_wrong_with_a_stranger_is_said_for_as_long_as_it_is_dialed() -> None:
    """A step that gets no quorum then says why; that the stranger takes us is no reason to forget it."""

    async def scenario() -> None:
        link = link_to("127.0.0.1:9,127.0.0.1:10")
        for cluster_id, trouble in (
            ("ours", ""),
            ("theirs", "belongs to cluster theirs;"),
            ("theirs", "belongs to cluster theirs;"),
        ):
            link._core.stream_opened(0)
            link._received(codec.encode_from_lighthouse(Welcome(0, link._core.session, 5, cluster_id)))
            assert trouble in link.failure
            assert bool(trouble) == bool(link.failure)
        await link.close()

    asyncio.run(scenario())


def test_a_stop_is_said_once_and_that_it_is_over_too(caplog: pytest.LogCaptureFixture) -> None:
    """While its trainer is stopped, a lost session hears of its loss with each report of the stop."""
    caplog.set_level("INFO")

    async def scenario() -> None:
        link = link_to("127.0.0.1:9")
        link._is_hung = lambda: True
        link._core.stream_opened(0)
        lost = codec.encode_from_lighthouse(TellLost(0, link._core.session, "replica a was lost: it is stopped"))
        for _ in range(3):
            link._received(lost)
        link.resumed()
        await link.close()

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "replica a: replica a was lost: it is stopped",
        "replica a has resumed, and rejoins with a new session",
    ]


def test_every_public_name_is_there() -> None:
    for name in tft_coord.__all__:
        assert getattr(tft_coord, name) is not None
    assert set(tft_coord.__all__) <= set(dir(tft_coord))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tft_coord.nothing


def test_importing_the_package_imports_neither_grpc_nor_torch() -> None:
    script = (
        "import sys, tft_coord, tft_coord.core.types;"
        "loaded = sorted({name.partition('.')[0] for name in sys.modules} & {'grpc', 'google', 'torch', 'numpy'});"
        "sys.exit(', '.join(loaded) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
