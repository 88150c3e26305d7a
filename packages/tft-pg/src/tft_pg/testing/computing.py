"""Checks of a group's results: every collective, dtype, reduction, layout and call form against one process's
arithmetic.

A group may lack combinations. A supported combination gives the expected result on all ranks. An unsupported one is an
`OperationRefusedError` on all ranks that names the dtype or the reduction. The group then keeps working.

Law of this file: checks of results only; dying ranks are in `dying`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from tft_pg.base import ProcessGroup
from tft_pg.errors import CollectiveTimeoutError, OperationRefusedError
from tft_pg.ops import collective
from tft_pg.testing.bench import GUARD_S, Bench
from tft_pg.testing.cases import CASES, REDUCTIONS, Case, Sample, Started
from tft_pg.testing.subject import Subject, agree, all_work, failure, reduce_ones, require

__all__ = [
    "CHECKS",
    "DTYPES",
    "Combination",
    "both_call_forms_agree",
    "combinations",
    "every_combination_agrees_or_is_refused",
    "every_layout_agrees_or_is_refused",
    "futures_hold_the_results",
    "low_precision_is_as_good_as_its_rounding",
    "several_may_be_in_flight",
    "torchs_functions_take_the_group",
]

DTYPES: tuple[torch.dtype, ...] = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)

# Torch 2.13 renamed these functions, and warns about the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# If only one rank refuses an operation, the other ranks wait for that rank.
_PATIENCE = timedelta(seconds=GUARD_S / 3)
_LARGE = 1 << 21


@dataclass(frozen=True)
class Combination:
    """A collective with a dtype and a reduction. A collective without a reduction has an empty one.

    Args:
        row: the collective's name.
        dtype: without the `torch.`.
        op: the reduction's name.
    """

    row: str
    dtype: str
    op: str = ""


def combinations(subject: Subject, world_size: int) -> frozenset[Combination]:
    """Return the combinations that a kind of group supports, after trying all.

    Raises: AssertionError: a result was wrong, a refusal came on some ranks only or without a clear message, or the
        group failed after it.
    """
    trials = {
        Combination(case.row, _name(dtype), op): (case, Sample(0, world_size, dtype, op=op or "SUM"))
        for case in subject.cases
        if case.sends
        for dtype in DTYPES
        for op in (REDUCTIONS if case.reduces else ("",))
    }
    with Bench(subject.make) as bench:
        groups = bench.configured(world_size)
        had = _try(bench, groups, list(trials.values()), must_name=True)
    return frozenset(combination for combination, has in zip(trials, had, strict=True) if has)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _try(
    bench: Bench, groups: Sequence[ProcessGroup], trials: Sequence[tuple[Case, Sample]], *, must_name: bool = False
) -> list[bool]:
    """Try each case on all ranks concurrently. Returns: for each, whether the group supports it."""
    found = bench.all(groups, lambda rank, group: [_tried(group, case, sample.at(rank)) for case, sample in trials])
    had = []
    for (case, sample), outcomes in zip(trials, zip(*found, strict=True), strict=True):
        what = f"{case.row} of {_name(sample.dtype)}, {sample.op if case.reduces else 'no reduction'}"
        refusals = [outcome for outcome in outcomes if outcome is not None]
        assert len(refusals) in (0, len(outcomes)), f"{what}: refused on some ranks only: {outcomes}"
        for error in refusals:
            assert isinstance(error, OperationRefusedError), (
                f"{what}: expected a result or OperationRefusedError, got {error!r}"
            )
            words = str(error)
            named = not must_name or _name(sample.dtype) in words or (case.reduces and sample.op in words)
            assert named, f"{what}: names neither its dtype nor its reduction: {words}"
            assert case.row in words, f"{what}: does not name its collective: {words}"
        had.append(not refusals)
    return had


def _tried(group: ProcessGroup, case: Case, sample: Sample) -> BaseException | None:
    """Run a case. Returns: None for the expected result, or the refusal, after which the group still worked."""
    try:
        started = case.start(group, sample)
        for work in started.works:
            work.wait(_PATIENCE)
    except OperationRefusedError as error:
        agree(reduce_ones(group), torch.full((3,), float(sample.world_size)))
        return error
    except Exception as error:  # the caller reports it, for all ranks at once
        return error
    try:
        _compare(case, sample, started)
    except AssertionError as error:
        return error
    return None


def _compare(case: Case, sample: Sample, started: Started) -> None:
    expected = case.expected(sample)
    assert expected is not None, "it gave a result where there is none"
    rounding = _rounding(sample) if case.reduces else 0.0
    for got, wanted in zip(started.outputs, expected, strict=True):
        agree(_comparable(got), _comparable(wanted), rtol=rounding)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor for comparison: bools to bytes, because a valid bool is 0 or 1, and float8 to float32."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor


def _rounding(sample: Sample) -> float:
    """Return the allowed rounding error. The inputs are small whole numbers, so only AVG and PRODUCT may round."""
    short = sample.op == "PRODUCT" and sample.world_size > 3
    if not (sample.dtype.is_floating_point or sample.dtype.is_complex) or not (sample.op == "AVG" or short):
        return 0.0
    return sample.world_size * torch.finfo(sample.dtype).eps


def every_combination_agrees_or_is_refused(subject: Subject) -> None:
    """Check that each collective in each dtype and reduction gives the expected result or is refused, alike on all
    ranks.

    A refusal is an `OperationRefusedError` that names the collective and its dtype or reduction. The group keeps
    working without a `configure`.
    """
    for world_size in sorted({min(subject.world_sizes), subject.most}):
        combinations(subject, world_size)


def every_size_agrees(subject: Subject) -> None:
    """Check that each collective gives the expected result in every supported size."""
    for world_size in subject.world_sizes:
        with Bench(subject.make) as bench:
            groups = bench.configured(world_size)
            assert all(_try(bench, groups, [(case, Sample(0, world_size, length=13)) for case in subject.cases]))


def what_it_lacks_is_refused(subject: Subject) -> None:
    """Check that unsupported collectives raise an `OperationRefusedError` with their name, on all ranks, and the group
    works on.
    """
    lacking = [case for case in CASES if case.row in subject.lacks]
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        had = _try(bench, groups, [(case, Sample(0, subject.most)) for case in lacking])
    assert not any(had), f"of {[case.row for case in lacking]} it has {had}"


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def every_layout_agrees_or_is_refused(subject: Subject) -> None:
    """Check strided, empty, zero-dimensional and 8 MB tensors: the result is as expected, or the call is refused."""
    n = subject.most
    layouts = {
        "strided": Sample(0, n, lay_out=_strided),
        "empty": Sample(0, n, length=0),
        "without dimensions": Sample(0, n, length=1, flat=False),
        "large": Sample(0, n, length=_LARGE // n),
    }
    with Bench(subject.make) as bench:
        groups = bench.configured(n)
        for name, sample in layouts.items():
            try:
                had = _try(bench, groups, [(case, sample) for case in subject.cases])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            assert name != "large" or all(had), f"large tensors were refused: {had}"


def low_precision_is_as_good_as_its_rounding(subject: Subject) -> None:
    """Check that a sum of arbitrary numbers is within the rounding error of its additions."""
    n = subject.most
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    with Bench(subject.make) as bench:
        groups = bench.configured(n)
        for dtype in dtypes:
            inputs = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(n)]
            results = bench.all(groups, partial(_summed, inputs))
            exact = torch.stack(inputs).double()
            bound = n * torch.finfo(dtype).eps * exact.abs().sum(0)
            for result in results:
                assert bool(((result.double() - exact.sum(0)).abs() <= bound).all()), f"the sum in {dtype} is off"
                agree(result, results[0])  # bit for bit, because replicas must not drift apart


def _summed(inputs: Sequence[torch.Tensor], rank: int, group: ProcessGroup) -> torch.Tensor:
    tensor = inputs[rank].clone()
    group.allreduce([tensor], ReduceOp.SUM).wait()
    return tensor


# --- call forms ---


def both_call_forms_agree(subject: Subject) -> None:
    """Check that torch's short forms (a tensor and a root, a list and a tensor, an op) equal the long ones."""
    for world_size in sorted({min(subject.world_sizes), subject.most}):
        with Bench(subject.make) as bench:
            groups = bench.configured(world_size)
            for name, form in _FORMS.items():
                _check_form(bench, groups, f"pg.{name}", form)


def torchs_functions_take_the_group(subject: Subject) -> None:
    """Check that the functions of `torch.distributed` work with the group as their `group`."""
    for world_size in sorted({min(subject.world_sizes), subject.most}):
        with Bench(subject.make) as bench:
            groups = bench.configured(world_size)
            for name, form in _FUNCTIONS.items():
                if name in subject.lacks:
                    continue
                _check_form(bench, groups, f"dist.{name}", form)


_Form = Callable[[ProcessGroup, Sample], Iterator[tuple[Any, Any]]]


def _check_form(bench: Bench, groups: Sequence[ProcessGroup], name: str, form: _Form) -> None:
    def act(rank: int, group: ProcessGroup) -> list[tuple[Any, Any]]:
        return list(form(group, Sample(rank, len(groups))))

    for rank, pairs in enumerate(bench.all(groups, act)):
        for got, expected in pairs:
            try:
                agree(got, expected)
            except AssertionError as error:
                raise AssertionError(f"{name} on rank {rank} of {len(groups)}: {error}") from None


def _expected(row: str, sample: Sample) -> list[torch.Tensor]:
    expected = next(case for case in CASES if case.row == row).expected(sample)
    assert expected is not None
    return expected


def _form_allreduce(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    for op in ("SUM", "MAX"):
        sample = replace(s, op=op)
        tensors = [s.portion() for _ in range(5)]
        opts = dist.AllreduceOptions()
        opts.reduceOp = REDUCTIONS[op]
        group.allreduce([tensors[0]], opts).wait()
        group.allreduce([tensors[1]], REDUCTIONS[op]).wait()
        group.allreduce(tensors[2], REDUCTIONS[op]).wait()
        group.allreduce(tensor=tensors[3], op=REDUCTIONS[op]).wait()
        group.allreduce(tensors=[tensors[4]], opts=opts).wait()
        yield tensors, _expected("allreduce", sample) * 5


def _form_broadcast(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    root = s.world_size - 1
    opts = dist.BroadcastOptions()
    opts.rootRank = root
    tensors = [s.portion() for _ in range(4)]
    group.broadcast([tensors[0]], opts).wait()
    group.broadcast(tensors[1], root).wait()
    group.broadcast_one(tensors[2], root).wait()
    group.broadcast(tensor=tensors[3], root=root).wait()
    yield tensors, _expected("broadcast", s) * 4


def _form_reduce(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    tensor = s.portion()
    group.reduce(tensor, s.world_size - 1, ReduceOp.SUM).wait()
    expected = _expected("reduce", s)
    yield ([tensor] if expected else []), expected


def _methods(group: ProcessGroup, name: str) -> list[Callable[..., dist.Work]]:
    """Return a collective's methods, under each of its names."""
    row = collective(name)
    return [getattr(group, each) for each in (row.name, *row.aliases)]


def _form_gathers(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    root = s.world_size - 1
    outputs = s.blanks()
    group.allgather(outputs, s.portion()).wait()
    yield outputs, _expected("allgather", s)
    for form in _methods(group, "_allgather_base"):
        single = s.blank_whole()
        form(single, s.portion()).wait()
        yield [single], _expected("_allgather_base", s)
    for form in _methods(group, "allgather_into_tensor_coalesced"):
        coalesced = s.blank_whole()
        form([coalesced], [s.portion()]).wait()
        yield [coalesced], _expected("_allgather_base", s)
    at_root = s.blanks() if s.rank == root else []
    group.gather(at_root, s.portion(), root).wait()
    yield at_root, _expected("gather", s)


def _form_scatters(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    output = s.blank()
    group.reduce_scatter(output, s.portions(), ReduceOp.SUM).wait()
    yield [output], _expected("reduce_scatter", s)
    for form in _methods(group, "_reduce_scatter_base"):
        output = s.blank()
        form(output, s.whole(), dist.ReduceScatterOptions()).wait()
        yield [output], _expected("reduce_scatter", s)
    for form in _methods(group, "reduce_scatter_tensor_coalesced"):
        output = s.blank()
        form([output], [s.whole()]).wait()
        yield [output], _expected("reduce_scatter", s)
    root = s.world_size - 1
    output = s.blank()
    group.scatter(output, s.portions() if s.rank == root else [], root).wait()
    yield [output], _expected("scatter", s)


def _form_exchanges(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    for form in _methods(group, "alltoall_base"):
        for splits in ([s.length] * s.world_size, []):
            output = s.blank_whole()
            form(output, s.whole(), splits, splits).wait()
            yield [output], _expected("alltoall_base", s)


def _form_barrier(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    group.barrier().wait()
    group.barrier(timeout=_PATIENCE).wait()
    group.barrier(opts=dist.BarrierOptions()).wait()
    yield [], []


_FORMS: dict[str, _Form] = {
    "allreduce": _form_allreduce,
    "broadcast": _form_broadcast,
    "reduce": _form_reduce,
    "gathers": _form_gathers,
    "scatters": _form_scatters,
    "exchanges": _form_exchanges,
    "barrier": _form_barrier,
}


def _dist_reductions(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    tensor, rooted = s.portion(), s.portion()
    dist.all_reduce(tensor, group=group)
    yield [tensor], _expected("allreduce", s)
    dist.reduce(rooted, group=group, group_dst=s.world_size - 1)
    expected = _expected("reduce", s)
    yield ([rooted] if expected else []), expected
    outputs = [s.blank() for _ in range(2)]
    dist.reduce_scatter(outputs[0], s.portions(), group=group)
    reduce_scatter(outputs[1], s.whole(), group=group)
    yield outputs, _expected("reduce_scatter", s) * 2


def _dist_gathers(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    root = s.world_size - 1
    outputs, whole = s.blanks(), s.blank_whole()
    dist.all_gather(outputs, s.portion(), group=group)
    yield outputs, _expected("allgather", s)
    all_gather(whole, s.portion(), group=group)
    yield [whole], _expected("_allgather_base", s)
    at_root = s.blanks() if s.rank == root else []
    dist.gather(s.portion(), at_root or None, group=group, group_dst=root)
    yield at_root, _expected("gather", s)


def _dist_others(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    root = s.world_size - 1
    tensor, output = s.portion(), s.blank()
    dist.broadcast(tensor, group=group, group_src=root)
    yield [tensor], _expected("broadcast", s)
    dist.scatter(output, s.portions() if s.rank == root else None, group=group, group_src=root)
    yield [output], _expected("scatter", s)
    whole = s.blank_whole()
    dist.all_to_all_single(whole, s.whole(), group=group)
    yield [whole], _expected("alltoall_base", s)
    dist.barrier(group=group)


def _dist_alltoall(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    outputs = s.blanks()
    dist.all_to_all(outputs, s.portions(), group=group)
    yield outputs, _expected("alltoall", s)


def _dist_messages(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    if s.world_size == 1:
        return
    received = s.blank()
    before, after = ((s.rank + step) % s.world_size for step in (-1, 1))
    works = [
        dist.isend(s.portion(), group=group, group_dst=after),
        dist.irecv(received, group=group, group_src=before),
    ]
    for work in works:
        assert work is not None
        work.wait()
    yield [received], _expected("recv", s)


def _dist_coalesced(group: ProcessGroup, s: Sample) -> Iterator[tuple[Any, Any]]:
    """Check `_coalescing_manager`, which makes one call of several, as FSDP2 does."""
    tensors = [s.portion(salt) for salt in range(2)]
    with _coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    yield tensors, _expected("allreduce_coalesced", s)
    wholes = [s.blank_whole() for _ in range(2)]
    with _coalescing_manager(group=group, async_ops=True) as coalesced:
        for whole in wholes:
            all_gather(whole, s.portion(), group=group)
    coalesced.wait()
    yield wholes, _expected("_allgather_base", s) * 2
    outputs = [s.blank() for _ in range(2)]
    with _coalescing_manager(group=group, async_ops=True) as coalesced:
        for output in outputs:
            reduce_scatter(output, s.whole(), group=group)
    coalesced.wait()
    yield outputs, _expected("reduce_scatter", s) * 2


_FUNCTIONS: dict[str, _Form] = {
    "reductions": _dist_reductions,
    "gathers": _dist_gathers,
    "others": _dist_others,
    "alltoall": _dist_alltoall,
    "messages": _dist_messages,
    "coalesced": _dist_coalesced,
}


# --- ways to wait ---


def several_may_be_in_flight(subject: Subject) -> None:
    """Check that several collectives may run at once and be waited for in any order."""
    n = subject.most
    with Bench(subject.make) as bench:
        groups = bench.configured(n)

        def act(rank: int, group: ProcessGroup) -> None:
            for order in (1, -1):
                samples = [Sample(rank, n, length=length) for length in (1, 1000, 1 << 16, 7)]
                several = [(case, sample) for sample in samples for case in subject.cases]
                started = [case.start(group, sample) for case, sample in several]
                for one in started[::order]:
                    for work in one.works[::order]:
                        assert work.wait()
                        assert work.is_completed()
                for (case, sample), one in zip(several, started, strict=True):
                    _compare(case, sample, one)

        bench.all(groups, act)


def futures_hold_the_results(subject: Subject) -> None:
    """Check that a Work's future, and its `then` callbacks, give the results, before and after the end."""
    n = subject.most
    with Bench(subject.make) as bench:
        groups = bench.configured(n)

        def act(rank: int, group: ProcessGroup) -> None:
            for row in ("allreduce", "broadcast", "allgather", "_allgather_base", "alltoall_base"):
                case = next(case for case in CASES if case.row == row)
                sample = Sample(rank, n)
                started = case.start(group, sample)
                future = started.works[0].get_future()
                doubled = future.then(lambda done: _joined(done.value()) * 2)
                value = future.wait()
                expected = case.expected(sample)
                assert expected is not None
                agree(started.outputs, expected)
                for got in (value, future.then(lambda done: done.value()).wait()):
                    agree(_joined(got), _joined(expected))
                agree(doubled.wait(), _joined(expected) * 2)
                assert started.works[0].wait()

        bench.all(groups, act)


def _joined(value: Any) -> torch.Tensor:
    """Flatten the value of a future. Gloo's futures hold the filled tensor or a list of its parts."""
    if isinstance(value, torch.Tensor):
        return value.reshape(-1)
    return torch.cat([_joined(item) for item in value])


def a_wait_may_be_given_up_and_repeated(subject: Subject) -> None:
    """Check that a `wait` with an expired timeout raises `CollectiveTimeoutError`, and a later one succeeds once the
    peers start.
    """
    n = subject.most
    if n < 2:
        return
    with Bench(subject.make) as bench:
        groups = bench.configured(n)
        sample = Sample(0, n)
        case = CASES[0]
        started = case.start(groups[0], sample)
        early = failure(groups[0], lambda: started.works[0].wait(timedelta(milliseconds=20)))
        require(early, CollectiveTimeoutError)
        others = bench.outcomes(groups[1:], lambda rank, group: _tried(group, case, sample.at(rank + 1)))
        assert [outcome.get() for outcome in others] == [None] * (n - 1)
        assert started.works[0].wait()
        _compare(case, sample, started)
        bench.configure(groups)
        all_work(bench, groups)


CHECKS: tuple[Callable[[Subject], None], ...] = (
    every_size_agrees,
    every_combination_agrees_or_is_refused,
    every_layout_agrees_or_is_refused,
    what_it_lacks_is_refused,
    low_precision_is_as_good_as_its_rounding,
    both_call_forms_agree,
    torchs_functions_take_the_group,
    several_may_be_in_flight,
    futures_hold_the_results,
    a_wait_may_be_given_up_and_repeated,
)
"""What a group computes; each a function of a `Subject`."""
