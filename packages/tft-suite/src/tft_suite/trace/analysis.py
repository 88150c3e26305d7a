"""What the flight records of many ranks show together.

All ranks of a group number their collectives alike. So the records are compared call by call: the first call that the
ranks disagree about is the cause, and later disagreements follow from it.

A rank that has not entered a call which others have entered is a rank that they wait for. Processes that wait for each
other, also in several groups, are a deadlock.

Law of this file: pure functions from records to findings.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Final, final

from tft_suite.trace.model import Call, Finding, Process, RankTrace, Tensor

__all__ = ["GroupTraces", "find_problems", "group_traces"]

_NS: Final = 1_000_000_000
_CYCLES_MAX: Final = 10
_SHOWN_MAX: Final = 8  # ranks, kinds and last calls in a sentence
_RANKS_MAX: Final = 16  # ranks of a finding
# The tensors of these have the same number of elements on all ranks.
_SAME_INPUTS: Final = ("allreduce", "all_reduce", "broadcast", "reduce", "allgather", "all_gather")
_ON_REQUEST: Final = "request"
_BROKEN_OFF: Final = ("abort", "failure")

_Key = tuple[int, int]  # the number of a call, and its place among the calls of that number
_Entry = tuple[int, int, int, Call]  # the key, the rank and the call


@final
@dataclass(frozen=True, slots=True)
class GroupTraces:
    """The records of one configured group, by rank.

    Args:
        job, quorum, group: the configuration.
        world_size: the number of ranks, with or without a record.
        traces: one record a rank.
    """

    job: str
    quorum: int | None
    group: str
    world_size: int
    traces: Mapping[int, RankTrace]

    @property
    def place(self) -> str:
        """Return the beginning of a sentence about this group."""
        return f"quorum {self.quorum}" if self.quorum is not None else f"group {self.group}"

    def collectives(self) -> list[_Entry]:
        """Return the collectives of all ranks, by number and rank."""
        found: list[_Entry] = []
        for rank, trace in self.traces.items():
            seen: dict[int, int] = defaultdict(int)
            for call in trace.calls:
                if not call.is_p2p:
                    found.append((call.number, seen[call.number], rank, call))
                    seen[call.number] += 1
        found.sort(key=itemgetter(0, 1, 2))
        return found


@final
@dataclass(frozen=True, slots=True)
class _Wait:
    """Ranks that wait in a call for other ranks."""

    group: GroupTraces
    key: _Key
    call: Call
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float


def group_traces(traces: Sequence[RankTrace]) -> list[GroupTraces]:
    """Sort the records by configured group. Where a rank has several records, the one of the group's end counts."""
    by_group: dict[tuple[str, int | None, str], list[RankTrace]] = defaultdict(list)
    for trace in traces:
        by_group[trace.process.job, trace.quorum, trace.group].append(trace)
    groups = []
    for (job, quorum, group), members in by_group.items():
        chosen: dict[int, RankTrace] = {}
        for trace in sorted(members, key=lambda each: each.time_ns):
            before = chosen.get(trace.rank)
            if before is None or before.reason == _ON_REQUEST:
                chosen[trace.rank] = trace
        size = max(trace.world_size for trace in members)
        groups.append(GroupTraces(job, quorum, group, size, dict(sorted(chosen.items()))))
    return sorted(groups, key=lambda each: (each.job, each.quorum is not None, each.quorum or 0, each.group))


def find_problems(groups: Sequence[GroupTraces], *, late_s: float) -> list[Finding]:
    """Return what is wrong in these groups, the most certain causes first.

    Args:
        groups: the records.
        late_s: a rank that enters a collective this much later than the others is a straggler. A shorter wait is no
            problem.
    """
    found: list[Finding] = []
    waits: list[_Wait] = []
    for group in groups:
        collectives = group.collectives()
        mismatch = _first_mismatch(group, collectives)
        if mismatch is not None:
            found.append(mismatch[1])
        before = None if mismatch is None else mismatch[0]
        wait = _first_wait(group, collectives, late_s=late_s, before=before)
        if wait is not None:
            waits.append(wait)
        elif before is None:
            found.extend(_stuck(group, collectives, late_s=late_s))
        found.extend(_stragglers(group, collectives, late_s=late_s, before=before))
        found.extend(_missing_files(group))
    deadlocks, others = _deadlocks(waits)
    return sorted([*deadlocks, *found, *map(_waiting, others)], key=lambda each: _ORDER.index(each.kind))


_ORDER: Final = (
    "deadlock",
    "mismatched_collective",
    "mismatched_tensors",
    "waiting",
    "stuck",
    "missing_file",
    "straggler",
)


# --- disagreement ----------------------------------------------------------------------------------------------------


def _first_mismatch(group: GroupTraces, collectives: Sequence[_Entry]) -> tuple[_Key, Finding] | None:
    for key, calls in _by_key(collectives):
        names = _ranks_by({rank: call.name for rank, call in calls.items()})
        if len(names) > 1:
            kinds = _joined((f"{name} on {_ranks(group, ranks)}" for name, ranks in names.items()), len(names))
            return key, _finding(
                "mismatched_collective",
                group,
                f"call {key[0]} is not the same collective on all ranks: {kinds}. All ranks must call the same "
                "collectives in the same order",
                ranks=min(names.values(), key=len),
                call=key[0],
            )
        signatures = _ranks_by({rank: _signature(call) for rank, call in calls.items()})
        if len(signatures) > 1:
            parts = (f"{_tensors(calls[ranks[0]].inputs)} on {_ranks(group, ranks)}" for ranks in signatures.values())
            kinds = _joined(parts, len(signatures))
            name = next(iter(names))
            return key, _finding(
                "mismatched_tensors",
                group,
                f"{name} (call {key[0]}) has other tensors on some ranks: {kinds}. All ranks must pass the same dtype "
                "and number of elements",
                ranks=min(signatures.values(), key=len),
                call=key[0],
            )
    return None


def _by_key(collectives: Sequence[_Entry]) -> Iterator[tuple[_Key, dict[int, Call]]]:
    for key, entries in groupby(collectives, key=itemgetter(0, 1)):
        yield key, {rank: call for _, _, rank, call in entries}


def _ranks_by(values: Mapping[int, object]) -> dict[object, list[int]]:
    found: dict[object, list[int]] = defaultdict(list)
    for rank, value in values.items():
        found[value].append(rank)
    return found


def _signature(call: Call) -> tuple[tuple[str, int], ...]:
    """Return what must be equal on all ranks: dtypes and numbers of elements. Empty: nothing must."""
    if not call.name.rpartition(":")[2].removeprefix("_").startswith(_SAME_INPUTS):
        return ()
    return tuple((tensor.dtype, tensor.elements) for tensor in call.inputs)


def _tensors(tensors: Sequence[Tensor]) -> str:
    shown = ", ".join(map(str, tensors[:4]))
    return f"{shown}, and {len(tensors) - 4} more" if len(tensors) > 4 else shown or "no tensor"


# --- waiting ---------------------------------------------------------------------------------------------------------


def _first_wait(
    group: GroupTraces, collectives: Sequence[_Entry], *, late_s: float, before: _Key | None
) -> _Wait | None:
    last: dict[int, _Key] = dict.fromkeys(group.traces, (-1, 0))
    for number, nth, rank, _ in collectives:
        last[rank] = (number, nth)
    behind = sorted(group.traces, key=last.__getitem__, reverse=True)  # the ranks that may still enter the call
    newest_ns = -1  # of the records of all other ranks
    for key, calls in _by_key(collectives):
        if before is not None and key >= before:
            return None
        while behind and last[behind[-1]] < key:
            newest_ns = max(newest_ns, group.traces[behind.pop()].time_ns)
        began_ns = min(call.started_ns for call in calls.values())
        if newest_ns < began_ns:  # a record from before the call can't show whether the rank entered it
            continue
        waiting = tuple(rank for rank, call in calls.items() if _waits(group.traces[rank], call, key == last[rank]))
        seconds = max((_waited_s(group.traces[rank], calls[rank]) for rank in waiting), default=-1.0)
        if seconds >= late_s:
            missing = (rank for rank, trace in group.traces.items() if last[rank] < key and trace.time_ns >= began_ns)
            return _Wait(group, key, calls[waiting[0]], waiting, tuple(missing), seconds)
    return None


def _waits(trace: RankTrace, call: Call, is_last: bool) -> bool:
    """Return whether a rank waits in a call. A library may call an operation ended that an abort or a fault ended."""
    return not call.has_ended or (is_last and trace.reason in _BROKEN_OFF)


def _waited_s(trace: RankTrace, call: Call) -> float:
    return max(0, trace.time_ns - call.started_ns) / _NS


def _waiting(wait: _Wait) -> Finding:
    lasts = _joined((_last_call(wait.group.traces[rank]) for rank in wait.missing), len(wait.missing))
    return _finding(
        "waiting",
        wait.group,
        f"{_waiting_ranks(wait)} for {_ranks(wait.group, wait.missing)}, for {wait.seconds:.1f} s at the record; "
        f"{lasts}",
        ranks=wait.missing,
        call=wait.key[0],
        seconds=wait.seconds,
    )


def _waiting_ranks(wait: _Wait) -> str:
    return f"{_ranks(wait.group, wait.waiting)} {'wait' if len(wait.waiting) > 1 else 'waits'} in {wait.call}"


def _last_call(trace: RankTrace) -> str:
    last = next((call for call in reversed(trace.calls) if not call.is_p2p), None)
    return f"{trace} has entered no call" if last is None else f"the last call of {trace} was {last}"


def _stuck(group: GroupTraces, collectives: Sequence[_Entry], *, late_s: float) -> Iterator[Finding]:
    for key, calls in _by_key(collectives):
        running = [rank for rank, call in calls.items() if not call.has_ended]
        if not running or len(calls) < len(group.traces):
            continue
        seconds = max(_waited_s(group.traces[rank], calls[rank]) for rank in running)
        if seconds < late_s:
            continue
        absent = len(calls) < group.world_size
        entered = "all ranks with a record" if absent else "all ranks"
        cause = "a rank without a record may not have entered it" if absent else "so the transfer itself does not end"
        yield _finding(
            "stuck",
            group,
            f"{entered} have entered {calls[running[0]]}, and {_ranks(group, running)} had not finished it after "
            f"{seconds:.1f} s; {cause}",
            ranks=running,
            call=key[0],
            seconds=seconds,
        )
        return


def _deadlocks(waits: Sequence[_Wait]) -> tuple[list[Finding], list[_Wait]]:
    """Find processes that wait for each other in several groups. Returns: the deadlocks, and the other waits."""
    left = dict(enumerate(waits))
    found: list[Finding] = []
    while len(found) < _CYCLES_MAX and (cycle := [left.pop(each) for each in _cycle(left)]):
        seconds = max(wait.seconds for wait in cycle)
        sides = (
            f"{_waiting_ranks(wait)} of {wait.group.place} for {_ranks(wait.group, wait.missing)}" for wait in cycle
        )
        waiting = {wait.group.traces[rank].process for wait in cycle for rank in wait.waiting}
        missing = {wait.group.traces[rank].process for wait in cycle for rank in wait.missing}
        both, first = waiting & missing, cycle[0]
        ranks = [rank for rank, trace in first.group.traces.items() if trace.process in both]
        found.append(
            Finding(
                "deadlock",
                f"processes wait for each other, for {seconds:.1f} s at the record: {_joined(sides, len(cycle))}",
                first.group.job,
                first.group.quorum,
                first.group.group,
                tuple(ranks[:_RANKS_MAX]),
                len(ranks),
                first.key[0],
                seconds,
            )
        )
    return found, list(left.values())


def _cycle(waits: Mapping[int, _Wait]) -> list[int]:
    """Return the waits of one cycle by number, each with a missing process that waits in the next. Empty: none."""
    following: dict[Process | int, list[Process | int]] = defaultdict(list)
    for number, wait in waits.items():
        for rank in wait.waiting:
            following[wait.group.traces[rank].process].append(number)
        following[number].extend(wait.group.traces[rank].process for rank in wait.missing)
    finished: set[Process | int] = set()
    for start in waits:
        if start in finished:
            continue
        path: dict[Process | int, Iterator[Process | int]] = {start: iter(following[start])}
        while path:
            node = next(reversed(path))
            after = next(path[node], None)
            if after is None:
                del path[node]
                finished.add(node)
            elif after in path:
                nodes = list(path)
                return [each for each in nodes[nodes.index(after) :] if isinstance(each, int)]
            elif after not in finished:
                path[after] = iter(following[after])
    return []


# --- lateness --------------------------------------------------------------------------------------------------------


def _stragglers(
    group: GroupTraces, collectives: Sequence[_Entry], *, late_s: float, before: _Key | None
) -> Iterator[Finding]:
    late: dict[int, list[tuple[float, Call]]] = defaultdict(list)
    compared = 0
    for key, calls in _by_key(collectives):
        if (before is not None and key >= before) or len(calls) < max(2, len(group.traces)):
            continue
        compared += 1
        rank = max(calls, key=lambda each: calls[each].started_ns)
        others = [call.started_ns for other, call in calls.items() if other != rank]
        seconds = (calls[rank].started_ns - statistics.median(others)) / _NS
        if seconds >= late_s:
            late[rank].append((seconds, calls[rank]))
    hosts = {trace.process.host for trace in group.traces.values()}
    clocks = f" (by the clocks of {len(hosts)} hosts)" if len(hosts) > 1 else ""
    for rank, entries in sorted(late.items(), key=lambda item: -sum(seconds for seconds, _ in item[1])):
        most, call = max(entries, key=lambda entry: entry[0])
        mean = sum(seconds for seconds, _ in entries) / len(entries)
        yield _finding(
            "straggler",
            group,
            f"{group.traces[rank]} entered {len(entries)} of {compared} calls last, {mean:.1f} s after the others on "
            f"average and {most:.1f} s at most, in {call}{clocks}",
            ranks=(rank,),
            call=call.number,
            seconds=most,
        )


def _missing_files(group: GroupTraces) -> Iterator[Finding]:
    number = group.world_size - len(group.traces)
    if number:
        absent = tuple(islice((rank for rank in range(group.world_size) if rank not in group.traces), _RANKS_MAX))
        shown = ", ".join(map(str, absent)) + (", ..." if number > len(absent) else "")
        yield _finding(
            "missing_file",
            group,
            f"there is no record of rank {shown} of {group.world_size}; its process may have been killed, or its "
            "files are on another machine",
            ranks=absent,
            num_ranks=number,
        )


# --- sentences -------------------------------------------------------------------------------------------------------


def _finding(
    kind: str,
    group: GroupTraces,
    what: str,
    *,
    ranks: Sequence[int],
    num_ranks: int | None = None,
    call: int | None = None,
    seconds: float | None = None,
) -> Finding:
    number = len(ranks) if num_ranks is None else num_ranks
    first = tuple(ranks[:_RANKS_MAX])
    return Finding(kind, f"{group.place}: {what}", group.job, group.quorum, group.group, first, number, call, seconds)


def _ranks(group: GroupTraces, ranks: Sequence[int]) -> str:
    return _joined((str(group.traces[rank]) for rank in ranks), len(ranks), separator=", ")


def _joined(parts: Iterable[str], number: int, *, separator: str = "; ") -> str:
    """Join the first of some parts of a sentence, and say how many more there are. `number`: of all parts."""
    shown = separator.join(islice(parts, _SHOWN_MAX))
    return f"{shown}, and {number - _SHOWN_MAX} more" if number > _SHOWN_MAX else shown
