"""The table, the forwarder, the works, the errors and the wrappers, without a backend, thread or socket."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import tft_pg
from tft_pg import (
    COLLECTIVES,
    AbortedError,
    Collective,
    CollectiveTimeoutError,
    ConfigError,
    ConfigureError,
    DummyWork,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupClosedError,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupWrapper,
    StoreAddressError,
    UnsupportedOperationError,
    WrappingProcessGroup,
    forward,
)
from tft_pg.backends.gloo import classify
from tft_pg.checks import fault_of, is_plain
from tft_pg.errors import OperationRefusedError, Where
from tft_pg.ops import collective
from tft_pg.work import GuardedWork, PendingWork

NAMES = [name for row in COLLECTIVES for name in (row.name, *row.aliases)]


# --- the table and the forwarder ---


def test_every_name_is_one_row() -> None:
    assert len(NAMES) == len(set(NAMES))
    for row in COLLECTIVES:
        assert all(collective(name) is row for name in (row.name, *row.aliases))
    with pytest.raises(ConfigError, match="unknown collective 'allredcue'"):
        collective("allredcue")


def test_torch_knows_every_name() -> None:
    for name in NAMES:
        assert callable(getattr(dist.ProcessGroup, name))


def test_no_collective_of_torch_is_missing() -> None:
    torchs_own = {
        name
        for name in dir(dist.ProcessGroup)
        if any(word in name for word in ("all", "reduce", "gather", "scatter", "broad", "send", "recv", "barrier"))
    }
    elsewhere = {"monitored_barrier", "_start_coalescing", "_end_coalescing", "__reduce__", "__reduce_ex__"}
    elsewhere |= {name for name in torchs_own if name.startswith("__")}
    assert torchs_own - elsewhere == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_collective_passes_its_arguments_on_as_they_are(name: str) -> None:
    seen: list[tuple[str, tuple[object, ...], Mapping[str, object]]] = []
    group = Recorder(seen)
    for wrapped in (group, ProcessGroupWrapper(group), FakeProcessGroupWrapper(ProcessGroupWrapper(group))):
        getattr(wrapped, name)(1, 2, opts="x")
    assert seen == [(collective(name).name, (1, 2), {"opts": "x"})] * 3


class Recorder(ProcessGroup):
    """As little as a group can be."""

    def __init__(self, seen: list[tuple[str, tuple[object, ...], Mapping[str, object]]]) -> None:
        super().__init__()
        self.seen = seen

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        self.seen.append((collective.name, args, kwargs))
        return DummyWork(None)

    def configure(self, *args: object, **kwargs: object) -> None: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...
    def set_timeout(self, timeout: timedelta) -> None: ...

    def errored(self) -> Exception | None:
        return None

    def size(self) -> int:
        return 5

    def rank(self) -> int:
        return 3

    def getBackendName(self) -> str:
        return "tft-recorder"

    def __repr__(self) -> str:
        return "Recorder()"


def test_an_abstract_group_says_what_it_lacks() -> None:
    class Half(ProcessGroup):
        def size(self) -> int:
            return 1

    with pytest.raises(TypeError, match="Half is abstract; implement __repr__, _run, abort"):
        Half()


def test_torch_sees_the_groups_size_and_rank() -> None:
    group = Recorder([])
    assert isinstance(group, dist.ProcessGroup)
    assert (dist.ProcessGroup.size(group), dist.ProcessGroup.rank(group), group.name()) == (5, 3, "tft-recorder")


def test_a_group_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="bound to its process"):
        pickle.dumps(ProcessGroupDummy())


def test_arguments_by_position_and_by_either_keyword() -> None:
    row, tensor = collective("allreduce"), torch.ones(2)
    assert row.argument(0, (tensor,), {}) is tensor
    assert row.argument(0, (), {"tensor": tensor}) is tensor
    assert row.argument(1, (tensor,), {"op": ReduceOp.MAX}) == ReduceOp.MAX
    assert row.argument(1, (tensor,), {}) is None
    assert row.results(([tensor],), {}) == [tensor]
    assert collective("barrier").results((), {}) == []


def test_what_a_collective_is_given_is_its_inputs_or_its_only_tensors() -> None:
    first, second = torch.zeros(1), torch.ones(2)
    assert collective("allreduce").given(([first, second],), {}) == [first, second]
    gathered = collective("allgather").given(([[first, first]],), {"input_tensors": [second]})
    assert len(gathered) == 1
    assert gathered[0] is second
    assert collective("_allgather_base").given((), {"output": first, "input": second})[0] is second
    assert collective("send").given(([second], 1, 0), {})[0] is second
    assert collective("recv").given(([second], 1, 0), {})[0] is second
    assert collective("scatter").given(([first], []), {}) == []  # on a rank that is not the root
    assert collective("barrier").given((dist.BarrierOptions(),), {}) == []


class Counting(WrappingProcessGroup):
    """A wrapper of one method."""

    num_bytes = 0

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        self.num_bytes += sum(tensor.nbytes for tensor in collective.given(args, kwargs))
        return forward(self.parent, collective, args, kwargs)


def test_a_wrapper_needs_one_method() -> None:
    group = Counting(ProcessGroupDummy())
    group.configure("127.0.0.1:1/x", 0, 1)
    group.allreduce([torch.ones(100)]).wait()
    group.allgather([[torch.zeros(2)]], [torch.ones(2)]).wait()
    group.barrier().wait()
    assert group.num_bytes == 408
    group.abort()
    assert group.errored() is not None
    group.shutdown()


# --- works ---


def test_a_dummy_work_is_done() -> None:
    work = DummyWork([1])
    assert work.wait()
    assert work.wait(timedelta(seconds=1))
    assert work.is_completed()
    assert work.result() == [1]
    assert work.get_future() is work.get_future()
    assert work.get_future().then(lambda future: future.value()[0] + 1).wait() == 2


class Converter:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.futures_of: list[GuardedWork] = []
        self.over = False

    def convert(self, operation: str, error: Exception) -> Exception:
        self.told.append(f"{operation}: {error}")
        return PeerDisconnectedError("in other words")

    def forgotten(self, operation: str) -> Exception | None:
        return PeerDisconnectedError(f"{operation} was forgotten") if self.over else None

    def track_future(self, work: GuardedWork) -> None:
        self.futures_of.append(work)


def pending() -> PendingWork:
    return PendingWork(
        on_timeout=lambda limit: CollectiveTimeoutError(f"{limit.total_seconds():g} s"), limit=timedelta(seconds=20)
    )


def test_a_pending_work_is_finished_once() -> None:
    work = pending()
    assert not work.is_completed()
    work.finish([])
    work.fail(KeyError("late"))
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait() == []


def test_a_pending_work_fails_once() -> None:
    work = pending()
    work.fail(PeerDisconnectedError("gone"))
    work.finish([])
    with pytest.raises(PeerDisconnectedError, match="gone"):
        work.wait()
    with pytest.raises(RuntimeError, match="PeerDisconnectedError: gone"):
        work.get_future().wait()


def test_a_pending_work_that_nobody_finishes() -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"0.01 s"):
        pending().wait(timedelta(milliseconds=10))


class Failing(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError("backend's words")

    def is_completed(self) -> bool:
        return True


def test_a_guarded_work_speaks_its_groups_words_and_lets_go_of_the_backends() -> None:
    converter = Converter()
    work = GuardedWork(Failing(), converter, "allreduce")
    for _ in range(2):
        with pytest.raises(PeerDisconnectedError, match="in other words"):
            work.wait()
    assert converter.told == ["allreduce: backend's words"]
    assert not isinstance(work._work, Failing)
    with pytest.raises(RuntimeError, match="in other words"):
        work.get_future().wait()


def test_a_guarded_work_tells_of_an_error_in_its_future() -> None:
    converter, inner = Converter(), pending()
    inner.fail(KeyError("raw"))  # another process group's own, unconverted
    future = GuardedWork(inner, converter, "broadcast").get_future()
    with pytest.raises(RuntimeError, match="raw"):
        future.wait()
    assert len(converter.told) == 1
    assert converter.told[0].startswith("broadcast:")


class Forgotten(dist.Work):
    """Never ends: what Gloo makes of an operation whose connection ended in the middle of a message."""

    def __init__(self) -> None:
        super().__init__()
        self.limits_s: list[float] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.limits_s.append(timeout.total_seconds() if timeout else math.inf)
        raise RuntimeError("Operation timed out!")

    def get_future(self) -> torch.futures.Future[object]:
        return torch.futures.Future()

    def is_completed(self) -> bool:
        return False


def test_a_guarded_work_is_left_when_its_group_says_that_it_never_ends() -> None:
    converter, inner = Converter(), Forgotten()
    converter.over = True
    work = GuardedWork(inner, converter, "allreduce")
    future = work.get_future()
    assert converter.futures_of == [work]
    with pytest.raises(PeerDisconnectedError, match="allreduce was forgotten"):
        work.wait()
    assert max(inner.limits_s) < 1
    assert converter.told == []  # the backend said nothing
    work.give_up()
    work.give_up()
    with pytest.raises(RuntimeError, match="allreduce was forgotten"):
        future.wait()
    assert work.is_completed()


class EndsLate(dist.Work):
    """Ends well in the very moment in which a wait for it runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.ended


def test_a_guarded_work_that_ended_well_is_never_taken_for_late() -> None:
    converter = Converter()
    assert GuardedWork(EndsLate(), converter, "allreduce").wait()
    assert GuardedWork(EndsLate(), converter, "allreduce").wait(timedelta(seconds=5))
    assert converter.told == []


def test_a_guarded_work_waits_no_longer_than_it_is_told() -> None:
    converter, inner = Converter(), Forgotten()
    with pytest.raises(PeerDisconnectedError, match="in other words"):
        GuardedWork(inner, converter, "allreduce").wait(timedelta(milliseconds=1))
    assert converter.told[0] == "allreduce: Operation timed out!"
    assert max(inner.limits_s) <= 0.001


class AtOnce(dist.Work):
    """Waited for once, with the time-out as it was given: what a send or a receive needs."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.limits: list[timedelta | None] = []
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.limits.append(timeout)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return bool(self.limits)


def test_a_guarded_work_that_is_not_waited_for_in_shares_is_waited_for_once() -> None:
    converter, inner = Converter(), AtOnce()
    work = GuardedWork(inner, converter, "send", in_shares=False)
    assert work.wait()
    assert work.wait(timedelta(seconds=5))
    assert inner.limits == [None, timedelta(seconds=5)]
    failed = GuardedWork(AtOnce(RuntimeError("Connection closed")), converter, "send", in_shares=False)
    for _ in range(2):
        with pytest.raises(PeerDisconnectedError, match="in other words"):
            failed.wait()
    assert converter.told == ["send: Connection closed"]


def test_a_work_without_a_future_says_so_each_time() -> None:
    work = GuardedWork(AtOnce(), Converter(), "send")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not implemented"):
            work.get_future()
    assert work.wait()


# --- what one rank can see to be wrong ---


def fault(name: str, *args: object, rank: int = 0, world_size: int = 2, **kwargs: object) -> str:
    return fault_of(collective(name), args, kwargs, rank=rank, world_size=world_size)


def test_a_fault_of_a_call_reads_as_a_part_of_a_sentence() -> None:
    one, two, elsewhere = torch.ones(1), torch.ones(2), torch.ones(2, device="meta")
    assert fault("allreduce", [elsewhere]) == "a tensor is on meta, but this group is for the CPU"
    assert fault("allgather", [[two, elsewhere]], [two]).startswith("a tensor is on meta")
    assert fault("send", [two], 2, 0) == "there is no rank 2 in a group of 2"
    assert fault("recv", tensors=[two], srcRank=1, tag=0, rank=1) == "rank 1 is this rank itself"
    assert "[3, 0] are not 2 sizes that add up to its 2 rows" in fault("alltoall_base", two, two, [1, 1], [3, 0])
    assert fault("alltoall_base", two, two, [1, 1], [2, 0]) == "rank 0 receives 1 rows from itself but sends itself 2"
    assert fault("_reduce_scatter_base", two, two).endswith("is not 2 times as large as its output of (2,) float32")
    assert fault("reduce_scatter", [two], [[two, one]]).startswith("an input of (1,) float32 is not as large")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("barrier", ()),
        ("allreduce", ([torch.ones(2)], ReduceOp.SUM)),
        ("send", ([torch.ones(2)], 1, 0)),
        ("alltoall_base", (torch.ones(4), torch.ones(4), [1, 3], [1, 3])),
        ("alltoall_base", (torch.ones(4, 3), torch.ones(4, 3), [], [])),
        ("alltoall_base", (torch.ones(0), torch.ones(3), [0, 0], [0, 3])),
        ("_reduce_scatter_base", (torch.ones(2), torch.ones(2, 2))),
        ("reduce_scatter", (torch.ones(2), [torch.ones(2), torch.ones(2)], ReduceOp.SUM)),
        ("reduce_scatter_tensor_coalesced", ([torch.ones(1), torch.ones(2)], [torch.ones(2), torch.ones(4)])),
    ],
)
def test_what_is_right_has_no_fault(name: str, args: tuple[object, ...]) -> None:
    assert fault(name, *args) == ""


def test_a_plain_call_is_known_at_a_glance() -> None:
    row, gaps = collective("allreduce"), torch.ones(4, 4)[:, 0]
    assert is_plain(row, ([torch.ones(2)],))
    for tensor in (gaps, torch.ones(2, device="meta"), torch.ones(2, dtype=torch.int16), torch.eye(2).to_sparse()):
        assert not is_plain(row, ([tensor],))
    for args in ((), (torch.ones(2),), ([],), ([torch.ones(2)] * 2,)):
        assert not is_plain(row, args)
    assert not is_plain(collective("send"), ([torch.ones(2)], 1, 0))


# --- errors ---


@pytest.mark.parametrize(
    "kind", [error for error in vars(tft_pg).values() if isinstance(error, type) and issubclass(error, Exception)]
)
def test_every_error_is_one_of_the_family_and_travels(kind: type[ProcessGroupError]) -> None:
    assert issubclass(kind, ProcessGroupError)
    assert issubclass(kind, RuntimeError)
    assert kind.__doc__
    error = kind("what, where, what next", where=Where(1, 3, "a", 7)) if kind is not StoreAddressError else kind("x")
    for copied in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(copied) is kind
        assert (str(copied), copied.where) == (str(error), error.where)


def test_a_place_reads_as_a_sentence_part() -> None:
    assert str(Where()) == "unconfigured group"
    assert str(Where(1, 3)) == "rank 1 of 3"
    assert str(Where(1, 3, "a", 7, 2)) == "rank 1 of 3, replica a/2, quorum 7"
    assert ConfigureError("x", missing_ranks=(2,)).missing_ranks == (2,)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[/x/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 100ms for recv", CollectiveTimeoutError),
        ("[/x/gloo/gloo/transport/tcp/pair.cc:1] Application timeout caused pair closure", CollectiveTimeoutError),
        ("[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:56536", PeerDisconnectedError),
        ("[/x/gloo/gloo/transport/tcp/pair.cc:1] Read error [::1]:5: Connection reset by peer", PeerDisconnectedError),
        ("Operation timed out!", CollectiveTimeoutError),
        ("Invalid scalar type", OperationRefusedError),
    ],
)
def test_gloos_words_are_understood(text: str, kind: type[ProcessGroupError]) -> None:
    assert classify(RuntimeError(text)) is kind


# --- dummy ---


def test_a_dummy_group_copies_and_counts() -> None:
    group = ProcessGroupDummy(0, 1)
    output, tensor = torch.zeros(2), torch.ones(2)
    group.allgather([[output]], [tensor]).wait()
    assert output.tolist() == [1.0, 1.0]
    group.configure("anywhere:1/x", 0, 1)
    group.allreduce([tensor], ReduceOp.AVG).get_future().wait()
    assert (group.configure_count, group.wait_count, group.get_future_count) == (1, 1, 1)


def test_a_dummy_group_is_alone() -> None:
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        ProcessGroupDummy(1, 2)
    with pytest.raises(ConfigError, match="rank 0 of 2"):
        ProcessGroupDummy().configure("anywhere:1/x", 0, 2)
    with pytest.raises(ConfigError, match="outputs as large as its inputs"):
        ProcessGroupDummy().allgather([[torch.zeros(3)]], [torch.ones(2)])


# --- managed ---


class Manager:
    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, object]] = []

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: object) -> dist.Work:
        self.calls.append((tensor, reduce_op))
        return DummyWork([tensor])

    def num_participants(self) -> int:
        return 4


def test_a_managed_group_reduces_through_its_manager() -> None:
    manager, tensor = Manager(), torch.ones(2)
    group = ManagedProcessGroup(manager)
    dist.all_reduce(tensor, group=group, op=ReduceOp.AVG)
    dist.all_reduce(tensor, group=group)
    group.allreduce([tensor], ReduceOp.MAX).wait()
    group.allreduce(tensor, op=ReduceOp.MIN).wait()
    group.allreduce([tensor]).wait()
    assert all(seen is tensor for seen, _ in manager.calls)
    assert [op for _, op in manager.calls] == [ReduceOp.AVG, ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.SUM]
    assert (group.size(), group.rank(), group.errored()) == (4, 0, None)


def test_a_managed_group_does_nothing_else() -> None:
    group = ManagedProcessGroup(Manager())
    with pytest.raises(UnsupportedOperationError, match="does not support send"):
        group.send([torch.ones(1)], 0, 0)
    with pytest.raises(ConfigError, match="one tensor, but got 2"):
        group.allreduce([torch.ones(1), torch.ones(1)])
    for act in (group.abort, lambda: group.set_timeout(timedelta(1)), lambda: group.configure("h:1", 0, 1)):
        with pytest.raises(UnsupportedOperationError, match="its Manager does that"):
            act()
    group.shutdown()


# --- swallowing and faulty ---


def test_after_an_error_every_collective_is_a_finished_dummy() -> None:
    faulty = FakeProcessGroupWrapper(ProcessGroupDummy())
    group = ErrorSwallowingProcessGroupWrapper(faulty)
    faulty.fail(nth=2)
    assert group.allreduce([torch.ones(1)]).wait()
    assert group.error() is None
    assert not group.broadcast([torch.ones(1)]).wait()
    assert isinstance(group.error(), PeerDisconnectedError)
    output = torch.zeros(2)
    work = group.allgather([[output]], [torch.ones(2)])
    assert work.wait()
    assert work.get_future().wait() == [output]
    assert output.tolist() == [0.0, 0.0]
    group.configure("anywhere:1/x", 0, 1)
    assert group.error() is None
    assert group.allreduce([torch.ones(1)]).wait()


def test_an_error_in_a_future_is_swallowed() -> None:
    faulty = FakeProcessGroupWrapper(ProcessGroupDummy())
    group, tensor = ErrorSwallowingProcessGroupWrapper(faulty), torch.ones(1)
    faulty.report_future_error(PeerDisconnectedError("asked for"))
    assert group.allreduce([tensor]).get_future().wait() == [tensor]
    assert "asked for" in str(group.error())


def test_a_reported_error_swallows_too() -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupDummy())
    group.report_error(PeerDisconnectedError("first"))
    group.report_error(PeerDisconnectedError("second"))
    assert group.allreduce([torch.ones(1)]).wait()
    assert "first" in str(group.error())


def test_a_fault_comes_at_the_call_that_was_named() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.fail(nth=2, operation="allreduce", error=PeerDisconnectedError("asked for"))
    group.allreduce([torch.ones(1)]).wait()
    group.barrier().wait()
    work = group.allreduce([torch.ones(1)])
    with pytest.raises(PeerDisconnectedError, match="asked for"):
        work.wait()
    assert group.allreduce([torch.ones(1)]).wait()
    with pytest.raises(ConfigError, match="nth is 0"):
        group.fail(nth=0)
    with pytest.raises(ConfigError, match="unknown collective"):
        group.fail(operation="fly")


@pytest.mark.parametrize("end", ["abort", "shutdown", "configure"])
def test_a_hanging_call_is_ended(end: str) -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.hang()
    work = group.allreduce([torch.ones(1)])
    assert not work.is_completed()
    if end == "configure":
        group.configure("anywhere:1/x", 0, 1)
    else:
        getattr(group, end)()
    with pytest.raises(AbortedError):
        work.wait()


def test_a_hanging_call_has_a_time_out() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy(), timeout=timedelta(milliseconds=10))
    group.hang()
    with pytest.raises(CollectiveTimeoutError, match="allreduce hung"):
        group.allreduce([torch.ones(1)]).wait()


def test_a_delay_is_cut_short_by_an_abort() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.delay(seconds=3600)
    group.abort()
    with pytest.raises(AbortedError):
        group.allreduce([torch.ones(1)])
    group.shutdown()
    with pytest.raises(ProcessGroupClosedError):
        group.allreduce([torch.ones(1)])


def test_configure_forgets_faults() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.fail()
    group.configure("anywhere:1/x", 0, 1)
    assert group.allreduce([torch.ones(1)]).wait()
