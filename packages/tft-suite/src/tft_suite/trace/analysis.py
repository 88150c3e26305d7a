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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from tft_suite.trace.model import Call, Finding, Process, RankTrace, Tensor

__all__ = ["GroupTraces", "find_problems", "group_traces"]

_NS: Final = 1_000_000_000
_CYCLES_MAX: Final = 10
# The tensors of these have the same number of elements on all ranks.
_SAME_INPUTS: Final = ("allreduce", "all_reduce", "broadcast", "reduce", "allgather", "all_gather")
_ON_REQUEST: Final = "request"
_BROKEN_OFF: Final = ("abort", "failure")

_Key = tuple[int, int]  # the number of a call, and its place among the calls of that number


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

    def collectives(self) -> dict[int, dict[_Key, Call]]:
        """Return the collectives of each rank by number, in their order."""
        found: dict[int, dict[_Key, Call]] = {}
        for rank, trace in self.traces.items():
            seen: dict[int, int] = defaultdict(int)
            calls = found[rank] = {}
            for call in trace.calls:
                if not call.is_p2p:
                    calls[call.number, seen[call.number]] = call
                    seen[call.number] += 1
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
    found.extend(map(_waiting, waits))
    return sorted([*_deadlocks(waits), *found], key=lambda each: _ORDER.index(each.kind))


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


def _first_mismatch(group: GroupTraces, collectives: Mapping[int, Mapping[_Key, Call]]) -> tuple[_Key, Finding] | None:
    for key, calls in _by_key(collectives):
        names = _ranks_by({rank: call.name for rank, call in calls.items()})
        if len(names) > 1:
            kinds = "; ".join(f"{name} on {_ranks(group, ranks)}" for name, ranks in names.items())
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
            kinds = "; ".join(
                f"{_tensors(calls[ranks[0]].inputs)} on {_ranks(group, ranks)}" for ranks in signatures.values()
            )
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


def _by_key(collectives: Mapping[int, Mapping[_Key, Call]]) -> Iterator[tuple[_Key, dict[int, Call]]]:
    for key in sorted({key for calls in collectives.values() for key in calls}):
        yield key, {rank: calls[key] for rank, calls in collectives.items() if key in calls}


def _ranks_by(values: Mapping[int, object]) -> dict[object, tuple[int, ...]]:
    found: dict[object, tuple[int, ...]] = {}
    for rank, value in values.items():
        found[value] = (*found.get(value, ()), rank)
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
    group: GroupTraces, collectives: Mapping[int, Mapping[_Key, Call]], *, late_s: float, before: _Key | None
) -> _Wait | None:
    last = {rank: max(calls, default=(-1, 0)) for rank, calls in collectives.items()}
    for key, calls in _by_key(collectives):
        if before is not None and key >= before:
            return None
        began_ns = min(call.started_ns for call in calls.values())
        waiting = tuple(rank for rank, call in calls.items() if _waits(group.traces[rank], call, key == last[rank]))
        missing = tuple(
            rank
            for rank, trace in group.traces.items()
            # A record from before the call can't show whether the rank entered it.
            if key > last[rank] and trace.time_ns >= began_ns
        )
        if not waiting or not missing:
            continue
        seconds = max(_waited_s(group.traces[rank], calls[rank]) for rank in waiting)
        if seconds < late_s:
            continue
        return _Wait(group, key, calls[waiting[0]], waiting, missing, seconds)
    return None


def _waits(trace: RankTrace, call: Call, is_last: bool) -> bool:
    """Return whether a rank waits in a call. A library may call an operation ended that an abort or a fault ended."""
    return not call.has_ended or (is_last and trace.reason in _BROKEN_OFF)


def _waited_s(trace: RankTrace, call: Call) -> float:
    return max(0, trace.time_ns - call.started_ns) / _NS


def _waiting(wait: _Wait) -> Finding:
    lasts = []
    for rank in wait.missing:
        trace = wait.group.traces[rank]
        before = [call for call in trace.calls if not call.is_p2p]
        lasts.append(f"the last call of {trace} was {before[-1]}" if before else f"{trace} has entered no call")
    return _finding(
        "waiting",
        wait.group,
        f"{_ranks(wait.group, wait.waiting)} {'wait' if len(wait.waiting) > 1 else 'waits'} in {wait.call} for "
        f"{_ranks(wait.group, wait.missing)}, for {wait.seconds:.1f} s at the record; {'; '.join(lasts)}",
        ranks=wait.missing,
        call=wait.key[0],
        seconds=wait.seconds,
    )


def _stuck(group: GroupTraces, collectives: Mapping[int, Mapping[_Key, Call]], *, late_s: float) -> Iterator[Finding]:
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
            ranks=tuple(running),
            call=key[0],
            seconds=seconds,
        )
        return


def _deadlocks(waits: Sequence[_Wait]) -> Iterator[Finding]:
    """Find processes that wait for each other in several groups."""
    edges: dict[Process, list[tuple[Process, _Wait]]] = defaultdict(list)
    for wait in waits:
        for rank in wait.waiting:
            for missing in wait.missing:
                edge = (wait.group.traces[missing].process, wait)
                edges[wait.group.traces[rank].process].append(edge)
    for _ in range(_CYCLES_MAX):
        cycle = _cycle(edges)
        if not cycle:
            return
        steps = []
        for process, (target, wait) in cycle:
            steps.append(
                f"{_named(wait.group, process)} waits in {wait.call} of {wait.group.place} for "
                f"{_named(wait.group, target)}"
            )
            edges[process].remove((target, wait))
        first = cycle[0][1][1]
        yield Finding(
            "deadlock",
            f"{len(cycle)} processes wait for each other: {'; '.join(steps)}",
            first.group.job,
            first.group.quorum,
            first.group.group,
            tuple(sorted({trace.rank for trace in first.group.traces.values() if trace.process in dict(cycle)})),
            first.key[0],
            max(wait.seconds for _, (_, wait) in cycle),
        )


_Edge = tuple[Process, _Wait]


def _cycle(edges: Mapping[Process, Sequence[_Edge]]) -> list[tuple[Process, _Edge]]:
    """Return one cycle as its processes with the edge that each follows, or nothing."""
    finished: set[Process] = set()
    for start in list(edges):
        path: list[tuple[Process, _Edge]] = []
        on_path: dict[Process, int] = {}
        stack: list[tuple[Process, Iterator[_Edge]]] = [(start, iter(edges.get(start, ())))]
        on_path[start] = 0
        while stack:
            process, following = stack[-1]
            edge = next(following, None)
            if edge is None:
                stack.pop()
                finished.add(process)
                del on_path[process]
                if path:
                    path.pop()
                continue
            target = edge[0]
            if target in on_path:
                return [*path, (process, edge)][on_path[target] :]
            if target not in finished:
                path.append((process, edge))
                on_path[target] = len(path)
                stack.append((target, iter(edges.get(target, ()))))
    return []


# --- lateness --------------------------------------------------------------------------------------------------------


def _stragglers(
    group: GroupTraces, collectives: Mapping[int, Mapping[_Key, Call]], *, late_s: float, before: _Key | None
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
    absent = tuple(rank for rank in range(group.world_size) if rank not in group.traces)
    if absent:
        shown = ", ".join(map(str, absent[:16])) + (", ..." if len(absent) > 16 else "")
        yield _finding(
            "missing_file",
            group,
            f"there is no record of rank {shown} of {group.world_size}; its process may have been killed, or its "
            "files are on another machine",
            ranks=absent,
        )


# --- sentences -------------------------------------------------------------------------------------------------------


def _finding(
    kind: str,
    group: GroupTraces,
    what: str,
    *,
    ranks: tuple[int, ...],
    call: int | None = None,
    seconds: float | None = None,
) -> Finding:
    return Finding(kind, f"{group.place}: {what}", group.job, group.quorum, group.group, ranks, call, seconds)


def _ranks(group: GroupTraces, ranks: Sequence[int]) -> str:
    shown = ", ".join(str(group.traces[rank]) for rank in ranks[:8])
    return f"{shown}, and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _named(group: GroupTraces, process: Process) -> str:
    return next(str(trace) for trace in group.traces.values() if trace.process == process)
