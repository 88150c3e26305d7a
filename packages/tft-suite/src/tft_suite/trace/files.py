"""Flight records from files, which are untrusted input.

Everything is bounded before it takes memory: the number of files, the size of each and of all, the values in a file,
and what all records together keep. A broken file is reported with the reason, and the others are still read.

Law of this file: reading and checking; no conclusions.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, final

from tft_suite.errors import ConfigError
from tft_suite.trace.model import BrokenFile, Call, Process, RankTrace, Tensor

__all__ = ["SUFFIX", "Kept", "parse_trace", "read_traces"]

SUFFIX: Final = ".trace.json"
FORMAT: Final = "tft-trace"
VERSION: Final = 1
FILES_MAX: Final = 4096
FILE_BYTES_MAX: Final = 8 << 20  # a process writes no larger file
ALL_BYTES_MAX: Final = 512 << 20
CALLS_MAX: Final = 100_000
ALL_CALLS_MAX: Final = 2_000_000
# In a file: 2000 calls with 64 tensors of 4 dimensions as input and as output have fewer.
VALUES_MAX: Final = 1_300_000
# In all files: the different lists of tensors, each with one for the list, one a tensor and one a dimension.
ALL_SIZES_MAX: Final = 2_000_000
# In all files: the different names of collectives and dtypes.
ALL_NAMES_MAX: Final = 10_000
_OBJECTS_MAX: Final = CALLS_MAX + 1000
_TENSORS_MAX: Final = 256
_DIMENSIONS_MAX: Final = 64
_TEXT_MAX: Final = 512
_INT_MAX: Final = 2**63 - 1
_RANKS_MAX: Final = 1 << 16


class _BrokenError(Exception):
    """The reason why a file is no usable flight record. Never leaves this file."""


@final
class Kept:
    """What all records together keep of calls, tensors and names. Equal values are kept once.

    Args:
        calls_max: the limit for the calls.
        sizes_max: the limit for the tensors and dimensions.
    """

    def __init__(self, *, calls_max: int = ALL_CALLS_MAX, sizes_max: int = ALL_SIZES_MAX) -> None:
        self._calls_max = calls_max
        self._sizes_max = sizes_max
        self._num_calls = 0
        self._num_sizes = 0
        self._names: dict[str, str] = {}
        self._tensors: dict[tuple[tuple[str, tuple[int, ...]], ...], tuple[Tensor, ...]] = {}

    def check_calls(self, number: int) -> None:
        """Check whether a record with this many calls may be kept too."""
        if number > self._calls_max - self._num_calls:
            raise _BrokenError(
                f"not read, because its {number} calls and the {self._num_calls} of the files before it are more than "
                f"{self._calls_max}; give fewer directories, or move old files away"
            )

    def add_calls(self, number: int) -> None:
        """Count the calls of a record that is kept."""
        self._num_calls += number

    def name(self, text: str) -> str:
        """Return the kept text that equals this name of a collective or a dtype."""
        found = self._names.get(text)
        if found is None:
            if len(self._names) >= ALL_NAMES_MAX:
                raise _BrokenError(
                    f"not read, because it and the files before it have more than {ALL_NAMES_MAX} different names of "
                    "collectives and dtypes; move files away that no process of tft wrote"
                )
            found = self._names[text] = text
        return found

    def tensors(self, parts: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[Tensor, ...]:
        """Return the kept tensors with these dtypes and sizes."""
        found = self._tensors.get(parts)
        if found is None:
            size = 1 + sum(1 + len(sizes) for _, sizes in parts)
            if size > self._sizes_max - self._num_sizes:
                raise _BrokenError(
                    f"not read, because it and the files before it have more than {self._sizes_max} different tensors "
                    "and sizes; give fewer directories, or move old files away"
                )
            self._num_sizes += size
            found = self._tensors[parts] = tuple(Tensor(dtype, sizes) for dtype, sizes in parts)
        return found


def read_traces(
    directories: Sequence[Path],
    *,
    files_max: int = FILES_MAX,
    all_bytes_max: int = ALL_BYTES_MAX,
    kept: Kept | None = None,
) -> tuple[list[RankTrace], list[BrokenFile]]:
    """Read all flight records of some directories.

    Args:
        directories: the directories; their subdirectories are not read. A file that occurs twice is read once.
        files_max: the limit for the number of files.
        all_bytes_max: the limit for the bytes of all files together.
        kept: the limits for the content of all files together.

    Returns: the records, and the unusable files with the reasons. The files above `files_max` are one entry for each
        directory.
    Raises: ConfigError: a directory can't be read.
    """
    kept = kept or Kept()
    traces: list[RankTrace] = []
    broken: list[BrokenFile] = []
    bytes_left = all_bytes_max
    files_left = files_max
    for directory, paths in _paths(directories):
        for path in paths[:files_left]:
            try:
                text = _read(path, bytes_left)
                bytes_left -= len(text)
                traces.append(parse_trace(text, path=path, kept=kept))
            except _BrokenError as error:
                broken.append(BrokenFile(path, str(error)))
        num_left_out = max(0, len(paths) - files_left)
        files_left -= len(paths) - num_left_out
        if num_left_out:
            reason = f"{num_left_out} files not read, because there are more than {files_max} files; move old ones away"
            broken.append(BrokenFile(str(directory), reason))
    return traces, broken


def _paths(directories: Sequence[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Return the files of each directory, without those of the directories before it."""
    seen: set[str] = set()
    for directory in directories:
        try:
            with os.scandir(directory) as entries:
                names = sorted(entry.path for entry in entries if entry.name.endswith(SUFFIX))
        except OSError as error:
            raise ConfigError(
                f"{directory} can't be read ({error.strerror}); give the directory that TFT_TRACE_DIR named"
            ) from error
        found = {os.path.realpath(name): name for name in reversed(names)}  # of several links, the first
        yield directory, sorted(name for target, name in found.items() if target not in seen)
        seen |= found.keys()


def _read(path: str, bytes_left: int) -> bytes:
    try:
        # Opening a device or a pipe already has an effect, so only a regular file is opened.
        _check_file(os.stat(path), bytes_left)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            state = os.fstat(descriptor)
            _check_file(state, bytes_left)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(state.st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _BrokenError(f"can't be read ({error.strerror})") from error


def _check_file(state: os.stat_result, bytes_left: int) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise _BrokenError("not a regular file")
    if state.st_size > FILE_BYTES_MAX:
        raise _BrokenError(f"{state.st_size} bytes, and at most {FILE_BYTES_MAX} are read")
    if state.st_size > bytes_left:
        raise _BrokenError("not read, because the files before it used up the limit for all files together")


def parse_trace(text: bytes, *, path: str, kept: Kept) -> RankTrace:
    """Parse one flight record. Raises: an error that `read_traces` reports with the path."""
    # A small text can have many values, and each takes up to 20 times the memory of its text.
    if max(text.count(b","), text.count(b"[")) > VALUES_MAX or text.count(b"{") > _OBJECTS_MAX:
        raise _BrokenError(f"not read, because it has more than {VALUES_MAX} values or {CALLS_MAX} calls")
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
    kept.check_calls(len(calls))
    trace = RankTrace(
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
        calls=tuple(_call(entry, kept) for entry in calls),
    )
    kept.add_calls(len(calls))
    return trace


def _call(entry: object, kept: Kept) -> Call:
    if not isinstance(entry, dict):
        raise _BrokenError("an entry of calls is not an object")
    return Call(
        number=_int(entry, "number", 0, _INT_MAX),
        name=kept.name(_text(entry, "name")),
        is_p2p=_bool(entry, "p2p"),
        inputs=_tensors(entry, "inputs", kept),
        outputs=_tensors(entry, "outputs", kept),
        started_ns=_int(entry, "started_ns", 0, _INT_MAX),
        has_ended=_bool(entry, "ended"),
    )


def _tensors(entry: Mapping[str, object], key: str, kept: Kept) -> tuple[Tensor, ...]:
    value = entry.get(key)
    if not isinstance(value, list) or len(value) > _TENSORS_MAX:
        raise _BrokenError(f"{key} is not a list of at most {_TENSORS_MAX} tensors")
    return kept.tensors(tuple(_tensor(each, kept) for each in value))


def _tensor(value: object, kept: Kept) -> tuple[str, tuple[int, ...]]:
    if not isinstance(value, list) or len(value) != 2:
        raise _BrokenError("a tensor is not a pair of dtype and sizes")
    dtype, sizes = value
    if not isinstance(sizes, list) or len(sizes) > _DIMENSIONS_MAX:
        raise _BrokenError(f"the sizes of a tensor are not a list of at most {_DIMENSIONS_MAX} numbers")
    if not all(type(size) is int and 0 <= size <= _INT_MAX for size in sizes):
        raise _BrokenError("a size of a tensor is not a number from 0")
    return kept.name(_checked_text("a dtype", dtype)), tuple(sizes)


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
