"""Connections over TLS: who can read a state, who can serve one, and what is said of certificates that don't fit."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

from tft_ckpt import ConfigError, HTTPTransport, Limits, StateKey, StateUnavailableError, TransportClosedError
from tft_ckpt.transfer.address import is_tls, listen, parse_url
from tft_ckpt.transfer.connection import Connection, SourceSilentError, StopSignal
from tft_ckpt.transfer.routes import WAIT_HEADER, data_path, manifest_path
from tft_ckpt.transfer.server import StateServer
from tft_ckpt.transfer.tls import TLS

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
STATE = [torch.arange(1 << 20, dtype=torch.int32)]
BOUND_S = 20.0


class Job:
    """An authority, and a certificate of it for this host."""

    def __init__(self, folder: Path, *names: str) -> None:
        folder.mkdir()
        authority = trustme.CA()
        own = authority.issue_cert(*names)
        self.authority, self.certificate, self.key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        authority.cert_pem.write_to_path(self.authority)
        own.private_key_pem.write_to_path(self.key)
        Path(self.certificate).write_bytes(b"".join(each.bytes() for each in own.cert_chain_pems))

    def tls(self, check_client: bool = False) -> TLS:
        return TLS(self.certificate, self.key, self.authority, check_client)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job") / "own", "127.0.0.1", "localhost")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job") / "stranger", "127.0.0.1", "localhost")


@contextmanager
def serving(tls: TLS, silence_s: float = BOUND_S) -> Iterator[int]:
    """A server of a state. Gives: its port."""
    listener = listen("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    server = StateServer(
        listener, token=None, chunk_bytes=1 << 20, limits=Limits(), silence_s=silence_s, tls=tls.server_context
    )
    try:
        server.offer(STATE, key=KEY, expected=True, check=lambda: None)
        yield port
    finally:
        server.close(wait=True)


@contextmanager
def stopping() -> Iterator[StopSignal]:
    with closing(StopSignal(BOUND_S, None)) as stop:
        yield stop


def fetch(port: int, context: ssl.SSLContext | None, host: str = "127.0.0.1") -> bytes:
    """The whole run, after the manifest, over one connection."""
    with stopping() as stop, closing(Connection(host, port, silence_s=BOUND_S, stop=stop, tls=context)) as connection:
        response = connection.get(manifest_path(KEY), {WAIT_HEADER: "20000"}, patience_s=BOUND_S)
        assert response.status == 200, response.read()
        response.read()
        return connection.get(data_path(KEY), {}).read()


@pytest.mark.parametrize("check_client", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_state_arrives_over_tls(job: Job, check_client: bool, host: str) -> None:
    before = threading.active_count()
    with serving(job.tls(check_client)) as port:
        assert fetch(port, job.tls().client_context(), host) == STATE[0].numpy().tobytes()
    assert threading.active_count() == before


def test_a_source_must_be_of_the_job_and_be_the_host_that_was_asked_for(
    job: Job, stranger: Job, tmp_path: Path
) -> None:
    elsewhere = Job(tmp_path / "elsewhere", "node7.example")
    with serving(job.tls()) as port, pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        fetch(port, stranger.tls().client_context())
    with serving(elsewhere.tls()) as port, pytest.raises(ssl.SSLCertVerificationError, match=r"127\.0\.0\.1"):
        fetch(port, elsewhere.tls().client_context())


def test_a_reader_must_be_of_the_job_if_that_is_checked(job: Job, stranger: Job) -> None:
    nobody = ssl.create_default_context(cafile=job.authority)
    other = ssl.create_default_context(cafile=job.authority)
    other.load_cert_chain(stranger.certificate, stranger.key)
    with serving(job.tls()) as port:
        assert fetch(port, nobody)
    with serving(job.tls(check_client=True)) as port:
        for context in (nobody, other):
            with pytest.raises(OSError):  # noqa: PT011 - an alert, or a connection that ends first
                fetch(port, context)
        assert fetch(port, job.tls().client_context())


def test_plain_and_secured_do_not_meet(job: Job) -> None:
    with serving(job.tls()) as port, pytest.raises((OSError, EOFError)):
        fetch(port, None)
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            sock, _ = plain.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ssl.SSLError):
            fetch(plain.getsockname()[1], job.tls().client_context())
        thread.join(BOUND_S)


def test_who_does_not_prove_who_it_is_is_sent_off(job: Job) -> None:
    with serving(job.tls(), silence_s=0.1) as port, socket.create_connection(("127.0.0.1", port), BOUND_S) as sock:
        sock.sendall(b"\x16\x03\x01")
        assert sock.recv(1) == b""


def test_a_server_ends_while_somebody_has_not_proved_yet_who_it_is(job: Job) -> None:
    with serving(job.tls()) as port:
        sock = socket.create_connection(("127.0.0.1", port), BOUND_S)
        sock.sendall(b"\x16\x03\x01")
        assert fetch(port, job.tls().client_context())
    with sock:
        assert sock.recv(1) == b""


@pytest.mark.parametrize("ending", ["silence", "stop"])
def test_a_source_that_never_proves_who_it_is_ends_as_any_silent_one(job: Job, ending: str) -> None:
    context = job.tls().client_context()
    with socket.create_server(("127.0.0.1", 0)) as silent, stopping() as stop:
        port = int(silent.getsockname()[1])
        if ending == "stop":
            stop.stop("enough")
        with pytest.raises(SourceSilentError if ending == "silence" else TransportClosedError):
            Connection("127.0.0.1", port, silence_s=0.05, stop=stop, tls=context)


def test_a_reader_that_reads_nothing_is_sent_off_over_tls_too(job: Job) -> None:
    with (
        serving(job.tls(), silence_s=0.2) as port,
        socket.create_connection(("127.0.0.1", port), BOUND_S) as sock,
        job.tls().client_context().wrap_socket(sock, server_hostname="127.0.0.1") as reader,
    ):
        reader.sendall(f"GET {data_path(KEY)} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        poll = select.poll()
        poll.register(reader, 0)
        assert poll.poll(BOUND_S * 1e3), "the connection was not broken"


# ---- settings ----


def test_what_the_environment_asks_for(job: Job) -> None:
    paths = {"TFT_TLS_CERT": job.certificate, "TFT_TLS_KEY": job.key, "TFT_TLS_CA": job.authority}
    assert TLS.from_environment({}) is None
    assert TLS.from_environment({"TFT_TLS_CLIENT_AUTH": "0", "TFT_TLS_CERT": ""}) is None
    assert TLS.from_environment(paths) == job.tls()
    assert TLS.from_environment({**paths, "TFT_TLS_CLIENT_AUTH": "1"}) == job.tls(check_client=True)
    for wrong, word in (
        ({"TFT_TLS_CERT": job.certificate}, "TFT_TLS_KEY, TFT_TLS_CA is not set"),
        ({"TFT_TLS_CLIENT_AUTH": "1"}, "TFT_TLS_CERT"),
        ({**paths, "TFT_TLS_CLIENT_AUTH": "perhaps"}, "TFT_TLS_CLIENT_AUTH is 'perhaps'"),
    ):
        with pytest.raises(ConfigError, match=word):
            TLS.from_environment(wrong)


def test_files_that_do_not_fit_are_named(job: Job, stranger: Job, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    text = tmp_path / "text.pem"
    text.write_text("nothing")
    missing = str(tmp_path / "missing.pem")
    for certificate, key, authority, named in (
        (missing, job.key, job.authority, missing),
        (job.certificate, missing, job.authority, missing),
        (job.certificate, stranger.key, job.authority, stranger.key),
        (job.certificate, str(locked), job.authority, str(locked)),
        (job.certificate, job.key, missing, missing),
        (job.certificate, job.key, str(text), str(text)),
        ("", job.key, job.authority, "TLS.certificate"),
    ):
        with pytest.raises(ConfigError, match=named):
            TLS(certificate, key, authority)
    with pytest.raises(ConfigError, match="check_client"):
        TLS(job.certificate, job.key, job.authority, check_client="yes")  # type: ignore[arg-type]


def test_an_address_says_whether_it_is_secured() -> None:
    assert is_tls("https://h:1")
    assert is_tls("HTTPS://h:1")
    assert not is_tls("http://h:1")
    assert parse_url("https://h:1") == ("h", 1)


# ---- whole transports ----


def test_transports_of_a_job_heal_over_tls_and_no_others_do(job: Job, stranger: Job) -> None:
    bound = timedelta(seconds=BOUND_S)
    with HTTPTransport[Any](bind="127.0.0.1", tls=job.tls(check_client=True)) as source:
        source.send_checkpoint([1], 1, STATE, bound)
        assert source.metadata().startswith("https://127.0.0.1:")
        for num_chunks in (0, 3):
            with HTTPTransport[Any](bound, num_chunks, interface="lo", tls=job.tls()) as receiver:
                assert receiver.recv_checkpoint(0, source.metadata(), 1, bound)[0].equal(STATE[0])
        for tls in (None, stranger.tls()):
            with HTTPTransport[Any](bind="127.0.0.1", tls=tls) as other, pytest.raises(StateUnavailableError):
                other.recv_checkpoint(0, source.metadata(), 1, bound)


def test_a_transport_with_tls_believes_no_plain_source(job: Job) -> None:
    bound = timedelta(seconds=BOUND_S)
    with (
        HTTPTransport[Any](bind="127.0.0.1") as plain,
        HTTPTransport[Any](bind="127.0.0.1", tls=job.tls()) as receiver,
    ):
        plain.send_checkpoint([1], 1, STATE, bound)
        with pytest.raises(StateUnavailableError, match="uses plain HTTP"):
            receiver.recv_checkpoint(0, plain.metadata(), 1, bound)
