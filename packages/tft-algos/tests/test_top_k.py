"""The codec of the largest numbers alone: what it sends, its bytes, and rows that can't be read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from tft_algos import ConfigError
from tft_algos.quantization import TopK

BLOCK, SENT = 4096, 128


def through(tensor: torch.Tensor, sent: int = SENT) -> torch.Tensor:
    result = torch.full_like(tensor, 7.0)
    TopK(sent).dequantize(TopK(sent).quantize(tensor), result)
    return result


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def levels(sizes: torch.Tensor) -> torch.Tensor:
    """Return what each of the sent sizes becomes, apart from the rounding of the levels to eight bits."""
    above = sizes > sizes.mean()
    return torch.where(above, sizes[above].mean(), sizes[~above].mean())


@pytest.mark.parametrize("num_sent", [64, 128, 256])
def test_the_largest_numbers_of_each_block_are_sent_with_two_levels(num_sent: int) -> None:
    values = numbers(3 * BLOCK)
    result = through(values, num_sent)
    for block, given in zip(values.view(3, BLOCK), result.view(3, BLOCK), strict=True):
        sent = block.abs().topk(num_sent).indices
        assert sorted(sent.tolist()) == given.nonzero().flatten().tolist()
        assert torch.equal(given[sent].sign(), block[sent].sign())
        assert len(set(given.abs()[sent].tolist())) == 2
        assert torch.allclose(given[sent].abs(), levels(block[sent].abs()), rtol=2**-8)


@pytest.mark.parametrize("size", [0, 1, 5, 127, 128, 129, BLOCK - 1, BLOCK, BLOCK + 1])
def test_every_size(size: int) -> None:
    values = numbers(size)
    result = through(values)
    left = float((values - result).norm())
    assert left <= float(values.norm())
    whole = size // BLOCK * BLOCK
    assert len(result[whole:].nonzero()) >= min(size - whole, SENT) - 1
    # What feedback adds to the next contribution arrives in the end.
    for _ in range(200):
        values -= through(values)
    assert float(values.norm()) <= 0.01 * left


@pytest.mark.parametrize("where", [[0], [BLOCK - 1], [31, 32], list(range(SENT)), list(range(BLOCK - SENT, BLOCK))])
def test_positions_at_the_ends_of_their_parts(where: list[int]) -> None:
    values = torch.zeros(BLOCK)
    values[where] = -3.0
    result = through(values)
    assert torch.equal(result, values)


@pytest.mark.parametrize("sent", [64, 128, 256])
def test_random_positions_are_exact(sent: int) -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.zeros(200, BLOCK)
    chosen = torch.rand(200, BLOCK, generator=draw).topk(sent, dim=1).indices
    values.scatter_(1, chosen, torch.randint(0, 2, (200, sent), generator=draw) * 4.0 - 2.0)
    assert torch.equal(through(values.flatten(), sent).view(200, BLOCK), values)


@pytest.mark.parametrize("wrong", [0, 127, 129, 512, "128", True, 128.0])
def test_other_numbers_to_send_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="give 64, 128 or 256"):
        TopK(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1.0, 0.1, 0.7, 1e-3, 12345.678])
def test_equal_numbers_whose_mean_is_rounded(size: float) -> None:
    result = through(torch.full((BLOCK,), size))
    assert len(result.nonzero()) == SENT
    assert torch.allclose(result[result != 0], torch.full((SENT,), size), rtol=2**-8)


def test_zeros() -> None:
    assert not bool(through(torch.zeros(BLOCK)).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    values = numbers(80, 70).to(dtype).t()
    result = through(values)
    assert torch.equal(result, through(values.contiguous()))
    assert 0 < float((values - result).abs().max()) < float(values.abs().max())


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e35])
def test_the_range_of_float32(size: float) -> None:
    values = numbers(BLOCK) * size
    assert torch.allclose(through(values) / size, through(values / size), rtol=2**-7)


@pytest.mark.parametrize(("sent", "most"), [(64, 0.0055), (128, 0.0095), (256, 0.016)])
def test_bytes(sent: int, most: float) -> None:
    values = numbers(1_000_000)
    rows = TopK(sent).quantize(values)
    assert rows.shape == (TopK(sent).num_rows(1_000_000), TopK(sent).row_bytes)
    assert rows.nbytes <= most * values.nbytes


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_levels_that_are_not_finite_are_named(wrong: float) -> None:
    values = numbers(3 * BLOCK)
    TopK().check_levels(TopK().quantize(values))
    values[BLOCK + 9] = wrong
    with pytest.raises(ValueError, match="block 1 of 3 has the levels"):
        TopK().check_levels(TopK().quantize(values))


def test_no_damaged_row_is_decoded_silently() -> None:
    """Every single changed bit of the positions is an error, or moves one number. Memory beside the block is safe."""
    rows = TopK().quantize(numbers(BLOCK))
    refused = 0
    for bit in range(256 + 5 * SENT):
        damaged = rows.clone()
        damaged[0, 4 + bit // 8] ^= 1 << bit % 8
        result = torch.zeros(BLOCK)
        try:
            TopK().add_to(damaged, result)
        except ValueError:
            refused += 1
        else:
            assert len(result.nonzero()) == SENT
    assert refused >= 256  # each bit of the map
    for row in (torch.zeros_like(rows), torch.full_like(rows, 255)):
        with pytest.raises(ValueError, match="does not name 128 of 4096"):
            TopK().dequantize(row, torch.zeros(BLOCK))
    swapped = rows.repeat(2, 1)
    swapped[0, 4] ^= 1
    swapped[1, 4] ^= 1
    with pytest.raises(ValueError, match="does not name 128 of 4096"):
        TopK().dequantize(swapped, torch.zeros(2 * BLOCK))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_gpu_a_device_gives_the_numbers_of_a_cpu() -> None:
    values = numbers(100_001)
    rows = TopK().quantize(values)
    result = torch.empty(100_001, device="cuda")
    TopK().dequantize(rows.cuda(), result)
    assert torch.equal(result.cpu(), through(values))
    TopK().dequantize(TopK().quantize(values.cuda()), result)
    assert torch.allclose(result.cpu(), through(values), rtol=2**-7)


@pytest.mark.soak
def test_the_speed_of_a_core() -> None:
    """The time is of this thread alone, and the best of several, so that other processes do not count."""
    values = numbers(16 << 20)
    rows = TopK().quantize(values)
    calls: dict[str, tuple[float, Callable[[], None]]] = {
        "encode": (0.15, lambda: TopK().encode(values, rows)),
        "add": (0.7, lambda: TopK().add_to(rows, values)),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (least, call) in calls.items():
            spent_s = []
            for _ in range(5):
                begun_s = time.thread_time()
                call()
                spent_s.append(time.thread_time() - begun_s)
            speed = values.nbytes / min(spent_s) / 1e9
            print(f"TopK {name}: {speed:.2f} GB/s of float32 a core")
            assert speed >= least
    finally:
        torch.set_num_threads(threads)
