"""Certificate files that change: what is used meanwhile, and what a process that starts in between does."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
import trustme

from tft_ckpt import TLS as StateTLS
from tft_ckpt.errors import ConfigError as StateConfigError
from tft_ckpt.transfer import tls as state_tls
from tft_coord import TLS, ConfigError, tls
from tft_coord.tls import certificates_of


class Files:
    """An authority, and the files of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        self.issue()

    def issue(self) -> None:
        own = self.authority.issue_cert("localhost")
        self._put("key.pem", own.private_key_pem.bytes())
        self._put("cert.pem", own.cert_chain_pems[0].bytes())

    def _put(self, name: str, content: bytes) -> None:
        new = self.folder / "new"
        new.write_bytes(content)
        new.replace(self.folder / name)

    @property
    def paths(self) -> tuple[str, str, str]:
        return str(self.folder / "cert.pem"), str(self.folder / "key.pem"), str(self.folder / "ca.pem")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(autouse=True)
def at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "LOOK_EVERY_S", 0.0)


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    files: Files, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TLS(*files.paths)
    before = certificates_of(settings)
    (files.folder / name).unlink()
    os.mkfifo(files.folder / name)
    with caplog.at_level(logging.WARNING):
        assert certificates_of(settings) is before
    assert f"{name}: it is not a regular file" in caplog.text
    with pytest.raises(ConfigError, match="it is not a regular file"):
        TLS(*files.paths)
    with pytest.raises(StateConfigError, match="it is not a regular file"):
        StateTLS(*files.paths)


def test_a_file_that_is_too_large_is_not_read(files: Files) -> None:
    os.truncate(files.folder / "ca.pem", tls.MAX_FILE_BYTES + 1)
    assert tls.MAX_FILE_BYTES == state_tls.MAX_FILE_BYTES
    for kind, error in ((TLS, ConfigError), (StateTLS, StateConfigError)):
        with pytest.raises(error, match="of at most 1 MiB"):
            kind(*files.paths)


def test_a_process_that_starts_in_the_middle_of_a_change_waits_for_the_rest(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHANGED_APART_S", -1.0)  # the files of a test are all new
    old_key = (files.folder / "key.pem").read_bytes()
    files.issue()
    new_key = (files.folder / "key.pem").read_bytes()
    (files.folder / "key.pem").write_bytes(old_key)
    waits = threading.Event()

    def finish() -> None:
        assert waits.wait(20)
        (files.folder / "key.pem").write_bytes(new_key)

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waits.set()

    handler, thread = Hears(), threading.Thread(target=finish)
    tls.logger.addHandler(handler)
    thread.start()
    try:
        assert certificates_of(TLS(*files.paths)).key == new_key
    finally:
        tls.logger.removeHandler(handler)
        thread.join()


def test_files_that_never_fit_are_refused_after_a_time(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    old_key = (files.folder / "key.pem").read_bytes()
    files.issue()
    (files.folder / "key.pem").write_bytes(old_key)
    with pytest.raises(ConfigError, match="belong together"):
        TLS(*files.paths)  # at once, because the two are as old as each other
    monkeypatch.setattr(tls, "CHANGED_APART_S", -1.0)
    monkeypatch.setattr(tls, "CHANGE_WITHIN_S", 0.5)
    with pytest.raises(ConfigError, match="belong together"):
        TLS(*files.paths)
