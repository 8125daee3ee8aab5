"""Products of experts in training: against sums in fp64, every backend against the reference."""

import pytest
import torch
from torch import Tensor

from hf_quant.kernels import grouped_scaled_mm, grouped_scaled_sums, quantize_two_way
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.grouped_scaled_mm import gpu, op
from hf_quant.kernels.two_way.gpu import quantize_two_way_gpu
from hf_quant.testing import assert_close
from hf_quant.tests.kernels.interpreter import install


install()
pytestmark = pytest.mark.usefixtures("poison_empty")
FORMATS = (("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"))
COUNTS = ([2, 0, 37], [0, 0, 5], [130, 1, 0, 20])


def rows_case(counts: list[int], formats: tuple[str, str], *, N: int, K: int, tail: int) -> tuple[tuple, Tensor]:
    """The operands of `grouped_scaled_mm`, and its exact result."""
    generator = torch.Generator().manual_seed(0)
    M, E = sum(counts) + tail, len(counts)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    a, a_scale, *_ = quantize_two_way(torch.randn(M, K, generator=generator), offsets, format=formats[0])
    b, b_scale, *_ = quantize_two_way(torch.randn(E * N, K, generator=generator), format=formats[1])
    bias = torch.randn(E, N, generator=generator)
    b, b_scale, exact = b.view(E, N, K), b_scale.view(E, N, 1), torch.zeros(M, N, dtype=torch.float64)
    left, right = a.double() * a_scale, b.double() * b_scale
    for e, end in enumerate(offsets.tolist()):
        rows = slice(end - counts[e], end)
        exact[rows] = left[rows] @ right[e].t() + bias[e]
    return (a, b, a_scale, b_scale, bias, offsets), exact


def sums_case(counts: list[int], formats: tuple[str, str], *, N: int, K: int, tail: int) -> tuple[tuple, int, Tensor]:
    """The operands of `grouped_scaled_sums`, the number of rows, and its result but for the noise of the codes."""
    generator = torch.Generator().manual_seed(0)
    M, E = sum(counts) + tail, len(counts)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    g, x = (torch.randn(M, size, generator=generator) for size in (N, K))
    _, _, a, a_scale = quantize_two_way(g, offsets, format=formats[0])
    _, _, b, b_scale = quantize_two_way(x, offsets, format=formats[1])
    ends = [0, *offsets.tolist()]
    parts = [slice(*ends[e : e + 2]) for e in range(E)]
    near = torch.stack([g[rows].double().t() @ x[rows].double() for rows in parts])
    return (a, b, a_scale, b_scale, offsets), M, near


@pytest.mark.parametrize("formats", FORMATS, ids=lambda pair: " x ".join(pair))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_of_experts(counts, formats):
    args, exact = rows_case(counts, formats, N=40, K=72, tail=3)
    for dtype, rms in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        for compute in (op.grouped_scaled_mm_reference, grouped_scaled_mm):
            # CPUs round sums of fp8 codes to bf16 before they are scaled.
            assert_close(compute(*args, out_dtype=dtype), exact, rms=rms)
        for target in ("sm75", "sm80", "sm90", "gfx942"):  # sm75: expert by expert; sm80, gfx942: fp8 codes in fp16
            with pretend(TARGETS[target]):
                assert_close(gpu.grouped_scaled_mm_gpu(*args, out_dtype=dtype), exact, rms=rms)
    y = grouped_scaled_mm(*args, out_dtype=torch.float32)
    assert not y[sum(counts) :].any()
    args[4].zero_()
    assert not torch.equal(grouped_scaled_mm(*args, out_dtype=torch.float32), y)


@pytest.mark.parametrize("formats", FORMATS, ids=lambda pair: " x ".join(pair))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_sums_over_the_rows_of_experts(counts, formats):
    args, M, near = sums_case(counts, formats, N=40, K=72, tail=3)
    expected = op.grouped_scaled_sums_reference(*args, M=M, out_dtype=torch.float32)
    assert_close(expected, near, rms=0.01 if formats[0] == "int8" else 0.1)
    for dtype, rms in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        results = [grouped_scaled_sums(*args, M=M, out_dtype=dtype)]
        for target in ("sm75", "sm80", "sm90", "gfx942"):
            with pretend(TARGETS[target]):
                results.append(gpu.grouped_scaled_sums_gpu(*args, M=M, out_dtype=dtype))
        for y in results:
            assert_close(y, expected, rms=rms)
            assert not y[[e for e, count in enumerate(counts) if count == 0]].any()


def test_long_sums_of_fp8_are_added_up_in_parts(monkeypatch):
    args, exact = rows_case([20, 5], FORMATS[1], N=24, K=1040, tail=0)
    sums, M, _ = sums_case([300, 70], FORMATS[1], N=24, K=40, tail=0)
    expected = op.grouped_scaled_sums_reference(*sums, M=M, out_dtype=torch.float32)
    monkeypatch.setattr(gpu, "_CHAIN", 256)
    with pretend(TARGETS["sm90"]):
        assert_close(gpu.grouped_scaled_mm_gpu(*args, out_dtype=torch.float32), exact, rms=1e-6)
        assert_close(gpu.grouped_scaled_sums_gpu(*sums, M=M, out_dtype=torch.float32), expected, rms=1e-6)


def test_strides_of_experts():
    args, exact = rows_case([3, 9], FORMATS[0], N=40, K=72, tail=0)
    wide = torch.zeros(2, 40, 80, dtype=torch.int8)
    wide[..., :72] = args[1]
    given = (args[0], wide[..., :72], *args[2:])
    for compute in (grouped_scaled_mm, gpu.grouped_scaled_mm_gpu):
        assert_close(compute(*given, out_dtype=torch.float32), exact, rms=1e-6)


def test_nothing_is_read_on_the_host():
    """Tensors on the meta device hold nothing to be read."""
    x, weight = torch.empty(300, 256, device="meta"), torch.empty(8, 512, 256, dtype=torch.int8, device="meta")
    offsets, scale = torch.empty(8, dtype=torch.int32, device="meta"), torch.empty(8, 512, 1, device="meta")
    with pretend(TARGETS["sm90"]), record_launches() as launches:
        codes, row_scale, codes_t, column_scale = quantize_two_way_gpu(x, offsets, format="int8")
        gpu.grouped_scaled_mm_gpu(codes, weight, row_scale, scale, None, offsets, out_dtype=torch.bfloat16)
        gpu.grouped_scaled_sums_gpu(
            codes_t, codes_t, column_scale, column_scale, offsets, M=300, out_dtype=torch.bfloat16
        )
    assert len(launches) == 4


def test_without_matrix_units_the_vendor_multiplies():
    args, _ = rows_case([20, 5], FORMATS[0], N=24, K=40, tail=0)
    sums, M, _ = sums_case([30, 7], FORMATS[0], N=24, K=40, tail=0)
    with pretend(TARGETS["sm75"]), record_launches() as launches:
        gpu.grouped_scaled_mm_gpu(*args, out_dtype=torch.float32)
        gpu.grouped_scaled_sums_gpu(*sums, M=M, out_dtype=torch.float32)
    assert not launches


def test_bad_input_and_tracing():
    args, _ = rows_case([2, 0, 3], FORMATS[0], N=8, K=16, tail=1)
    torch.library.opcheck(grouped_scaled_mm, args, {"out_dtype": torch.bfloat16})
    sums, M, _ = sums_case([2, 0, 3], FORMATS[0], N=8, K=16, tail=1)
    torch.library.opcheck(grouped_scaled_sums, sums, {"M": M, "out_dtype": torch.bfloat16})
    a, b, a_scale, b_scale, bias, offsets = args

    def refused(match: str, *given: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            grouped_scaled_mm(*given, out_dtype=torch.float32)

    refused("a is torch.float32 and b is torch.int8; both must be", a.float(), *args[1:])
    refused(r"needs \[M, K\] and \[E, N, K\], where E is the number of offsets, 3", a[:, 1:], *args[1:])
    refused(r"a_scale is \(5, 1\).* needs \[6, 1\] and \[3, 8, 1\]", a, b, a_scale[1:], b_scale, bias, offsets)
    refused(r"bias is \(2, 8\); needs \[3, 8\]", a, b, a_scale, b_scale, bias[1:], offsets)
    refused("offsets is .* torch.int64", a, b, a_scale, b_scale, bias, offsets.long())
    with pytest.raises(ValueError, match="needs the blocks of 60 rows in 3 groups"):
        grouped_scaled_sums(*sums, M=60, out_dtype=torch.float32)
    none = torch.zeros(0, 16, dtype=torch.int8)
    for compute in (grouped_scaled_mm, gpu.grouped_scaled_mm_gpu):
        y = compute(none, b, a_scale[:0], b_scale, bias, offsets * 0, out_dtype=torch.float32)
        assert y.shape == (0, 8)
