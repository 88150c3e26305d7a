"""What the package promises as a package: its README runs, and importing it does nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tft_pg

HERE = Path(__file__).resolve().parent.parent


def test_the_readmes_example_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (HERE / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text(blocks[0], encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    zero, one, two, three = done.stdout.splitlines()
    assert [zero, one, three] == ["step 0: mean 0.5 of 2", "step 1: mean 0.5 of 2", "step 3: mean 0 of 1"]
    assert two.startswith("step 2: thrown away, allreduce failed (rank 0 of 2): the connection to another rank ended; ")


def test_the_readmes_wrapper_counts(tmp_path: Path) -> None:
    _, block = re.findall(r"^```python\n(.*?)^```$", (HERE / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "400\n"), done.stderr


def test_importing_starts_nothing() -> None:
    code = (
        "import threading, os, torch\n"
        "before = threading.enumerate(), len(os.listdir('/proc/self/fd')), dict(os.environ)\n"
        "import tft_pg, tft_pg.testing\n"
        "assert before == (threading.enumerate(), len(os.listdir('/proc/self/fd')), dict(os.environ))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(tft_pg.__all__) == sorted(set(tft_pg.__all__))
    for name in tft_pg.__all__:
        value = getattr(tft_pg, name)
        assert not isinstance(value, type) or value.__doc__, name
