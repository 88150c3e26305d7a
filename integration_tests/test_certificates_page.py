"""The page about certificates is true: its commands make an authority, and a job that is started with them works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import ROOT
from integration_tests.pages import blocks
from tft_coord import TLS
from tft_coord.tokens import OVERLAP_S, JobTokens
from tft_coord.transport import trust
from tft_lighthouse import LighthouseServer

PAGE: Final = ROOT / "docs" / "certificates.md"
LATE_S: Final = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("authority")
    for script in blocks(PAGE, "bash"):
        subprocess.run(["bash", "-euc", script], cwd=found, check=True, capture_output=True, timeout=LATE_S)
    return found


def variables(folder: Path) -> dict[str, str]:
    """Return the page's own `export` lines, for that folder."""
    text = "\n".join(re.findall(r"^\$ export (.*)$", PAGE.read_text(), re.MULTILINE))
    return {name: path.replace("$PWD", str(folder)) for name, path in re.findall(r"(\w+)=(\S+)", text)}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the page's commands need openssl")
def test_the_commands_make_what_a_lighthouse_and_its_operator_need(folder: Path) -> None:
    (folder / "tft-token").write_text("made-by-openssl-rand\n")
    found = variables(folder)
    assert set(found) == {"TFT_TOKEN_FILE", "TFT_TLS_CERT", "TFT_TLS_KEY", "TFT_TLS_CA", "TFT_TLS_CLIENT_AUTH"}
    tls = TLS.from_environment(found)
    assert tls is not None
    assert tls.check_client
    environ = {**os.environ, **found}
    with LighthouseServer("127.0.0.1:0", http_bind="127.0.0.1:0", token="made-by-openssl-rand", tls=tls) as lighthouse:
        tft = [sys.executable, "-c", "from tft_suite.cli.main import main; main()"]
        command = [*tft, "status", "--http", str(lighthouse.http_address)]
        asked = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LATE_S)
        assert asked.returncode == 0, asked.stderr
        assert "lighthouse" in asked.stdout
        plain = subprocess.run(
            [*command[:-1], str(lighthouse.http_address).replace("https", "http")],
            env={name: value for name, value in environ.items() if not name.startswith("TFT_TLS")},
            capture_output=True,
            text=True,
            timeout=LATE_S,
        )
        assert plain.returncode != 0
        assert trust.WANTS_TLS.partition(";")[0] in plain.stderr + plain.stdout


def test_the_page_says_the_overlap_and_the_format_of_the_jobs_file(tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert f"{OVERLAP_S:g} s more" in text
    (example,) = blocks(PAGE, "text")
    file = tmp_path / "jobs"
    file.write_text(example.replace("…", "e"))
    assert JobTokens(str(file)).shown("vision") == "1c0ee"


def test_the_page_has_the_sentences_of_the_errors() -> None:
    said = PAGE.read_text()
    for sentence in (trust.WANTS_TLS, trust.NO_TLS):
        assert sentence.partition(";")[0] in said
