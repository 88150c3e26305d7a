"""The small modules: quantized collectives, futures, pipes, streams, and what needs another package."""

from __future__ import annotations

import importlib.util
import multiprocessing
import subprocess
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import ReduceOp

import torchft
from tft_pg.futures import watchdog_timeout
from torchft import coordination, futures, multiprocessing_dummy_context, otel, quantization, torchx, utils
from torchft._torchft import QuorumResult
from torchft.collectives import (
    allocate_reduce_scatter_output,
    allreduce_quantized,
    get_padded_sizes,
    reduce_scatter_quantized,
)
from torchft.lighthouse import main
from torchft.multiprocessing import _MonitoredPipe
from torchft.process_group import ProcessGroupDummy
from torchft.work import _DummyWork

SOON = timedelta(seconds=0.01)


def test_submodules_are_reachable_and_an_import_starts_nothing() -> None:
    program = "\n".join(
        [
            "import logging, sys, threading",
            "import torchft",
            "assert not logging.getLogger().handlers and not logging.getLogger('torchft_quorums').handlers",
            "assert not [each for each in threading.enumerate() if each is not threading.main_thread()]",
            "assert not {'torch', 'tft_algos'} & set(sys.modules)",
            "assert torchft.Manager is torchft.manager.Manager",
            "assert not {'grpc', 'torchx', 'opentelemetry', 'tft_lighthouse'} & set(sys.modules)",
            "assert torchft.local_sgd.DiLoCo and torchft.checkpointing.HTTPTransport and torchft.coordination.Quorum",
            "assert set(torchft.__all__) <= set(dir(torchft))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="local_sdg"):
        _ = torchft.local_sdg


def test_what_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchx.specs", "torchx", "triton", "triton.language", "opentelemetry.sdk._logs"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torchft._otel", raising=False)
    with pytest.raises(ImportError, match=r"tft-torchft\[torchx\]"):
        torchx.hsdp()
    with pytest.raises(ImportError, match=r"tft-torchft\[torchcomms\]"):
        _ = torchft.torchcomms
    with pytest.raises(ImportError, match="Triton"):
        _ = quantization.SCALE_TL_DTYPE
    otel.setup_logger("torchft_quorums")  # nothing is asked for
    otel.shutdown()
    monkeypatch.setenv("TORCHFT_USE_OTEL", "true")
    with pytest.raises(ImportError, match=r"tft-torchft\[otel\]"):
        otel.setup_logger("torchft_quorums")
    with pytest.raises(ImportError, match=r"tft-torchft\[otel\]"):
        _ = otel.TeeLogExporter


def test_a_component_needs_a_replica_and_a_worker() -> None:
    for wrong in ({"replicas": 0}, {"workers_per_replica": 0}):
        with pytest.raises(AssertionError, match="give at least 1"):
            torchx.hsdp(**wrong)


def test_rows_are_padded_to_the_number_of_ranks() -> None:
    tensors = [torch.zeros(5, 3), torch.zeros(4)]
    assert get_padded_sizes(tensors, 2) == [torch.Size([6, 3]), torch.Size([4, 1])]
    output, sizes = allocate_reduce_scatter_output(tensors, 2)
    assert output.shape == (9 + 2,)
    assert sizes == get_padded_sizes(tensors, 2)
    with pytest.raises(AssertionError, match="one dtype"):
        allocate_reduce_scatter_output([torch.zeros(1), torch.zeros(1, dtype=torch.float16)], 2)


def test_quantized_reductions_of_one_round_nothing_and_refuse_a_maximum() -> None:
    group, tensor = ProcessGroupDummy(0, 1), torch.randn(5, 3)
    output, _ = allocate_reduce_scatter_output([tensor], 1)
    reduce_scatter_quantized(output, [tensor], ReduceOp.AVG, group).wait()
    assert torch.equal(output.view(5, 3), tensor)
    before = tensor.clone()
    allreduce_quantized([tensor], ReduceOp.SUM, group).wait()
    assert torch.equal(before, tensor)
    with pytest.raises(NotImplementedError):
        allreduce_quantized([tensor], ReduceOp.MAX, group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_hold_a_value_to_a_part_of_the_largest_in_its_row(dtype: torch.dtype) -> None:
    tensors = [torch.randn(5, 7).to(dtype), torch.randn(3).to(dtype), torch.zeros(2, 2, dtype=dtype)]
    buffer = quantization.fused_quantize_into_fp8(tensors, 2)
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == 6 * (4 + 8) + 4 * (4 + 4) + 2 * (4 + 4)
    results = [torch.full_like(tensor, 9.0) for tensor in tensors]
    quantization.fused_dequantize_from_fp8(results, buffer, 2)
    for tensor, result in zip(tensors, results, strict=True):
        matrix, found = (each.float().view(each.shape[0], -1) for each in (tensor, result))
        bound = matrix.abs().amax(dim=1, keepdim=True) / 127 + 0.02 * (dtype is not torch.float32)
        assert ((matrix - found).abs() <= bound).all()
    with pytest.raises(AssertionError, match="two dimensions"):
        quantization.fused_quantize_into_fp8([torch.zeros(1, 1, 1)], 2)


@pytest.mark.parametrize(("reduce_op", "factor"), [(ReduceOp.SUM, 1.0), (ReduceOp.AVG, 0.5)])
def test_the_slices_of_a_buffer_are_reduced_into_one_of_them(reduce_op: Any, factor: float) -> None:
    tensor = torch.arange(8.0).view(4, 2)
    buffer = quantization.fused_quantize_into_fp8([tensor], 2)
    quantization.fused_reduce_fp8([tensor], buffer, 2, 1, reduce_op)
    result = torch.empty(4, 2)
    quantization.fused_dequantize_from_fp8([result], buffer, 2)
    assert torch.allclose(result[2:], factor * (tensor[:2] + tensor[2:]), atol=0.2)
    assert torch.allclose(result[:2], tensor[:2], atol=0.1)


def test_futures_time_out_and_mocks_pass_through() -> None:
    mock = MagicMock()
    assert futures.future_timeout(mock, SOON) is mock
    pending: torch.futures.Future[int] = torch.futures.Future()
    with pytest.raises(TimeoutError, match="future did not"):
        futures.future_timeout(pending, SOON).wait()
    with pytest.raises(TimeoutError, match="future did not"):
        futures.future_wait(pending, SOON)
    pending.set_result(5)
    assert futures.future_wait(pending, SOON) == 5
    assert futures._TIMEOUT_MANAGER._clear_del_queue() == 0
    futures._TIMEOUT_MANAGER._del_queue.put(pending)
    assert futures._TIMEOUT_MANAGER._clear_del_queue() == 1


def test_the_watchdogs_interval_is_that_of_the_next_timer_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(futures.WATCHDOG_TIMEOUT_SEC, raising=False)
    manager = futures._TIMEOUT_MANAGER
    assert manager._watchdog_interval is None
    manager._watchdog_interval = timedelta(seconds=90)
    assert watchdog_timeout() == manager._watchdog_interval == timedelta(seconds=90)
    manager._watchdog_interval = None
    assert watchdog_timeout() is None
    assert _DummyWork([1]).get_future().wait() == [1]


def test_a_pipe_raises_what_was_sent_and_times_out() -> None:
    ends = multiprocessing.Pipe()
    here, there = _MonitoredPipe(ends[0]), _MonitoredPipe(ends[1])
    there.send({"a": 1})
    assert here.recv(SOON) == {"a": 1}
    there.send(KeyError("theirs"))
    with pytest.raises(KeyError, match="theirs"):
        here.recv(1.0)
    with pytest.raises(TimeoutError, match=r"pipe.recv\(\) timed out after 0.01 seconds"):
        here.recv(SOON)
    there.close()
    assert there.closed()
    with pytest.raises(EOFError):
        here.recv(1.0)
    here.close()


def test_a_context_of_threads_looks_like_one_of_processes() -> None:
    context = multiprocessing_dummy_context.get_context("spawn")
    queue = context.get_context().Queue()
    process = context.Process(target=queue.put, args=(3,))
    process.start()
    process.join()
    assert queue.get() == 3


def test_streams_without_an_accelerator() -> None:
    with utils.get_stream_context(None):
        utils.synchronize()
    assert (utils.record_event() is None) is not torch.accelerator.is_available()


def test_a_result_of_a_quorum_can_be_changed() -> None:
    result = QuorumResult()
    result.heal, result.max_step = True, 7
    assert (result.heal, result.max_step, result.replica_world_size) == (True, 7, 1)


def test_a_client_wants_a_timedelta_above_zero() -> None:
    client = coordination.LighthouseClient.__new__(coordination.LighthouseClient)
    with pytest.raises(TypeError, match="timedelta"):
        client.heartbeat("a", 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="above zero"):
        client.quorum("a", timedelta(seconds=-1))


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ([], 1, "--min_replicas"),
        (["--min_replicas", "few"], 1, "few"),
        (["--min-replicas", "1"], 1, "--min"),
        (["--min_replicas", "1", "--heartbeat_timeout_ms", "0"], 2, "heartbeat_timeout_ms"),
        (["--version"], 0, "torchft "),
        (["-h"], 0, "--quorum_tick_ms"),
    ],
)
def test_the_command_ends_as_torchfts(
    words: list[str], status: int, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    try:
        ended: object = main(words)
    except SystemExit as end:
        ended = end.code
    assert ended == status
    output = capfd.readouterr()
    assert text in output.out + output.err


@pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is None, reason="the extra otel is not installed")
def test_records_go_to_opentelemetry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    import logging

    (tmp_path / "attributes.json").write_text('{"torchft_test": {"cluster": "blue"}}')
    monkeypatch.setenv("TORCHFT_USE_OTEL", "1")
    monkeypatch.setenv("TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON", str(tmp_path / "attributes.json"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    otel.setup_logger("torchft_test")
    otel.setup_logger("torchft_test")
    logger = logging.getLogger("torchft_test")
    assert len(logger.handlers) == 1
    logger.info("", extra={"quorum_id": 5})
    otel.shutdown()
    logger.handlers.clear()
    said = capsys.readouterr().out
    assert '"quorum_id": 5' in said
    assert '"cluster": "blue"' in said
