"""Codecs alone: their bound, their bytes, and what can't be quantized."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from tft_algos import UnsupportedFeatureError
from tft_algos.quantization import Codec, Int4, Int8

CODECS = [Int8(), Int4()]
IDS = ["int8", "int4"]


def bound(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return the largest permitted error of each number: half a scale of its block, and the rounding of float32."""
    flat = values.flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % codec.block)).view(-1, codec.block)
    peaks = padded.abs().amax(1, keepdim=True).expand_as(padded).reshape(-1)[: flat.numel()]
    return peaks.view(values.shape) * codec.relative_error * (1 + 1e-5)


def through(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(tensor)
    codec.dequantize(codec.quantize(tensor), result)
    return result


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (63,), (64,), (257,), (3, 5, 7), (1000, 300)])
def test_the_error_is_within_the_bound_for_every_shape(codec: Codec, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 10
    assert bool(((through(codec, values) - values).abs() <= bound(codec, values)).all())


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128])
def test_other_dtypes(codec: Codec, dtype: torch.dtype) -> None:
    values = torch.randn(70, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    parts = torch.view_as_real(values) if dtype.is_complex else values
    result = through(codec, values)
    given = torch.view_as_real(result) if dtype.is_complex else result
    permitted = bound(codec, parts.float()) + 2**-7 * parts.float().abs()  # and the rounding to bfloat16
    assert bool(((given.float() - parts.float()).abs() <= permitted).all())


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_strides_do_not_matter(codec: Codec) -> None:
    values = torch.randn(37, 20).t()
    result = torch.empty(37, 20).t()
    codec.dequantize(codec.quantize(values), result)
    assert torch.equal(result, through(codec, values.contiguous()))


@pytest.mark.parametrize(("codec", "most"), [(Int8(), 0.27), (Int4(), 0.15)], ids=IDS)
def test_bytes(codec: Codec, most: float) -> None:
    values = torch.randn(100_000)
    assert codec.quantize(values).nbytes <= most * values.nbytes


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_exact_numbers(codec: Codec) -> None:
    """The largest code and every whole number below it stay what they are; a tie goes to the even one."""
    values = torch.arange(-codec.largest, codec.largest + 1).float()
    blocks = torch.zeros(-(-len(values) // codec.block) * codec.block)
    blocks[: len(values)] = values
    for block in blocks.view(-1, codec.block):
        block[-1] = codec.largest
    assert torch.equal(through(codec, blocks), blocks)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_block_nan(codec: Codec, wrong: float) -> None:
    values = torch.ones(3 * codec.block)
    values[codec.block + 1] = wrong
    result = through(codec, values).view(3, -1)
    assert bool(result[1].isnan().all())
    assert torch.equal(result[[0, 2]], torch.ones(2, codec.block))


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-39, 7e-31, 1e-20, 3e38])
def test_the_range_of_float32(codec: Codec, size: float) -> None:
    values = torch.full((codec.block,), size)
    error = (through(codec, values) - values).abs()
    assert bool((error <= size * 1e-5 + 2.0**-100).all())


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_rows_add_up_without_a_copy(codec: Codec) -> None:
    values = torch.randn(1000)
    rows = codec.quantize(values)
    total = torch.ones(1000)
    codec.add_to(rows, total, -2.0)
    assert torch.allclose(total, 1 - 2 * through(codec, values), atol=1e-6)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_what_cannot_be_quantized_is_refused(codec: Codec) -> None:
    for tensor, why in [
        (torch.ones(3, dtype=torch.int64), "would be rounded"),
        (torch.ones(3, dtype=torch.bool), "would be rounded"),
        (torch.eye(3).to_sparse(), "give a dense one"),
        (torch.ones(3, device="meta"), "meta device"),
    ]:
        with pytest.raises(UnsupportedFeatureError, match=why):
            codec.quantize(tensor)
    with pytest.raises(ValueError, match=r"needs \(1, "):
        codec.dequantize(codec.quantize(torch.ones(1000)), torch.ones(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_gpu_a_device_gives_the_numbers_of_a_cpu(codec: Codec) -> None:
    values = torch.randn(100_001)
    result = torch.empty(100_001, device="cuda")
    codec.dequantize(codec.quantize(values.cuda()), result)
    assert bool(((result.cpu() - values).abs() <= bound(codec, values)).all())
    codec.dequantize(codec.quantize(values).cuda(), result)  # rows of another machine
    assert torch.equal(result.cpu(), through(codec, values))


def test_gradients_and_inference_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(300))
    Int8().dequantize(Int8().quantize(parameter * 2), parameter)
    assert parameter.tolist() == [2.0] * 300
    with torch.inference_mode():
        values = torch.ones(10)
    Int4().dequantize(Int4().quantize(values), values)
    assert values.tolist() == [1.0] * 10


@pytest.mark.soak
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_a_core_encodes_and_decodes_a_gigabyte_a_second(codec: Codec) -> None:
    """The time is of this thread alone, and the best of several, so that other processes do not count."""
    values = torch.randn(16 << 20)
    rows = codec.quantize(values)
    calls: dict[str, Callable[[], None]] = {
        "encode": lambda: codec.encode(values, rows),
        "decode": lambda: codec.decode(rows, values),
        "add": lambda: codec.add_to(rows, values),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, call in calls.items():
            spent_s = []
            for _ in range(5):
                begun_s = time.thread_time()
                call()
                spent_s.append(time.thread_time() - begun_s)
            speed = values.nbytes / min(spent_s) / 1e9
            print(f"{type(codec).__name__} {name}: {speed:.1f} GB/s of float32 a core")
            assert speed >= 1.0
    finally:
        torch.set_num_threads(threads)
