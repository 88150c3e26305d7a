"""Flight records from files, which are untrusted input.

Everything is bounded before it is read: the number of files, the size of each, the size of all, and the number of
calls. A broken file is reported with the reason, and the others are still read.

Law of this file: reading and checking; no conclusions.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tft_suite.errors import ConfigError
from tft_suite.trace.model import BrokenFile, Call, Process, RankTrace, Tensor

__all__ = ["SUFFIX", "parse_trace", "read_traces"]

SUFFIX: Final = ".trace.json"
FORMAT: Final = "tft-trace"
VERSION: Final = 1
FILES_MAX: Final = 4096
FILE_BYTES_MAX: Final = 16 << 20
ALL_BYTES_MAX: Final = 512 << 20
CALLS_MAX: Final = 100_000
_TENSORS_MAX: Final = 256
_DIMENSIONS_MAX: Final = 64
_TEXT_MAX: Final = 512
_INT_MAX: Final = 2**63 - 1
_RANKS_MAX: Final = 1 << 16


class _BrokenError(Exception):
    """The reason why a file is no usable flight record. Never leaves this file."""


def read_traces(
    directories: Sequence[Path], *, files_max: int = FILES_MAX, all_bytes_max: int = ALL_BYTES_MAX
) -> tuple[list[RankTrace], list[BrokenFile]]:
    """Read all flight records of some directories.

    Args:
        directories: the directories; their subdirectories are not read.
        files_max: the limit for the number of files.
        all_bytes_max: the limit for the bytes of all files together.

    Returns: the records, and the unusable files with the reasons.
    Raises: ConfigError: a directory can't be read.
    """
    paths = [path for directory in directories for path in _paths(directory)]
    traces: list[RankTrace] = []
    broken: list[BrokenFile] = []
    bytes_left = all_bytes_max
    for index, path in enumerate(paths):
        try:
            if index >= files_max:
                raise _BrokenError(f"not read, because there are more than {files_max} files; move old ones away")
            text = _read(path, bytes_left)
            bytes_left -= len(text)
            traces.append(parse_trace(text, path=str(path)))
        except _BrokenError as error:
            broken.append(BrokenFile(str(path), str(error)))
    return traces, broken


def _paths(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.name.endswith(SUFFIX))
    except OSError as error:
        raise ConfigError(
            f"{directory} can't be read ({error.strerror}); give the directory that TFT_TRACE_DIR named"
        ) from error


def _read(path: Path, bytes_left: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
        with os.fdopen(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise _BrokenError("not a regular file")
            if state.st_size > FILE_BYTES_MAX:
                raise _BrokenError(f"{state.st_size} bytes, and at most {FILE_BYTES_MAX} are read")
            if state.st_size > bytes_left:
                raise _BrokenError("not read, because the files before it used up the limit for all files together")
            return file.read(min(FILE_BYTES_MAX, bytes_left))
    except OSError as error:
        raise _BrokenError(f"can't be read ({error.strerror})") from error


def parse_trace(text: bytes, *, path: str) -> RankTrace:
    """Parse one flight record. Raises: an error that `read_traces` reports with the path."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BrokenError(f"no valid JSON ({str(error)[:120]}); the file may be incomplete") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _BrokenError(f"not a flight record: its format is not {FORMAT!r}")
    if content.get("version") != VERSION:
        raise _BrokenError(f"version {str(content.get('version'))[:20]}, and this tft reads version {VERSION}")
    world_size = _int(content, "world_size", 1, _RANKS_MAX)
    calls = content.get("calls")
    if not isinstance(calls, list) or len(calls) > CALLS_MAX:
        raise _BrokenError(f"calls is not a list of at most {CALLS_MAX} entries")
    return RankTrace(
        path=path,
        process=Process(
            job=_text(content, "job"),
            replica=_text(content, "replica"),
            group_rank=_int(content, "group_rank", 0, _RANKS_MAX),
            host=_text(content, "host"),
            pid=_int(content, "pid", 0, _INT_MAX),
        ),
        rank=_int(content, "rank", 0, world_size - 1),
        world_size=world_size,
        quorum=None if content.get("quorum") is None else _int(content, "quorum", -_INT_MAX, _INT_MAX),
        group=_text(content, "group"),
        reason=_text(content, "reason"),
        time_ns=_int(content, "time_ns", 0, _INT_MAX),
        calls=tuple(map(_call, calls)),
    )


def _call(entry: object) -> Call:
    if not isinstance(entry, dict):
        raise _BrokenError("an entry of calls is not an object")
    return Call(
        number=_int(entry, "number", 0, _INT_MAX),
        name=_text(entry, "name"),
        is_p2p=_bool(entry, "p2p"),
        inputs=_tensors(entry, "inputs"),
        outputs=_tensors(entry, "outputs"),
        started_ns=_int(entry, "started_ns", 0, _INT_MAX),
        has_ended=_bool(entry, "ended"),
    )


def _tensors(entry: Mapping[str, object], key: str) -> tuple[Tensor, ...]:
    value = entry.get(key)
    if not isinstance(value, list) or len(value) > _TENSORS_MAX:
        raise _BrokenError(f"{key} is not a list of at most {_TENSORS_MAX} tensors")
    return tuple(map(_tensor, value))


def _tensor(value: object) -> Tensor:
    if not isinstance(value, list) or len(value) != 2:
        raise _BrokenError("a tensor is not a pair of dtype and sizes")
    dtype, sizes = value
    if not isinstance(sizes, list) or len(sizes) > _DIMENSIONS_MAX:
        raise _BrokenError(f"the sizes of a tensor are not a list of at most {_DIMENSIONS_MAX} numbers")
    if not all(type(size) is int and 0 <= size <= _INT_MAX for size in sizes):
        raise _BrokenError("a size of a tensor is not a number from 0")
    return Tensor(_checked_text("a dtype", dtype), tuple(sizes))


def _int(content: Mapping[str, object], key: str, least: int, most: int) -> int:
    value = content.get(key)
    if type(value) is not int or not least <= value <= most:
        raise _BrokenError(f"{key} is not a number from {least} to {most}")
    return value


def _bool(content: Mapping[str, object], key: str) -> bool:
    value = content.get(key)
    if not isinstance(value, bool):
        raise _BrokenError(f"{key} is not true or false")
    return value


def _text(content: Mapping[str, object], key: str) -> str:
    return _checked_text(key, content.get(key))


def _checked_text(what: str, value: object) -> str:
    # Printable, because the text goes to a terminal.
    if not isinstance(value, str) or len(value) > _TEXT_MAX or not value.isprintable():
        raise _BrokenError(f"{what} is not printable text of at most {_TEXT_MAX} characters")
    return value
