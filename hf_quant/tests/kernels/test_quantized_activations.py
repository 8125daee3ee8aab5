"""`quantize_rowwise` and the products of quantized matrices: codes to the bit, integer sums exact."""

import pytest
import torch

from hf_quant.kernels import fp8_scaled_mm, int8_scaled_mm, quantize_rowwise
from hf_quant.kernels.rowwise.op import quantize_rowwise_reference
from hf_quant.kernels.scaled_mm.op import fp8_scaled_mm_reference, int8_scaled_mm_reference
from hf_quant.testing import assert_close, assert_sqnr


pytestmark = pytest.mark.usefixtures("poison_empty", "cpu_kernels")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def activations(M: int, K: int) -> torch.Tensor:
    """fp32, with a row of zeros, a huge, a tiny and a rounding row (ties, where K allows)."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0))
    if M > 4:
        x[0] = 0
        x[1] *= 1e4
        x[2] *= 1e-6
        x[3] = torch.arange(K) % 2 + 0.5
        x[3, 0] = 127
    return x


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("shape", [(1, 64), (7, 33), (3000, 96), (5, 1), (0, 16), (4, 0)], ids=str)
def test_quantize_rowwise_is_the_reference_to_the_bit(shape, format):
    for dtype in DTYPES:
        x = activations(*shape).to(dtype)
        codes, scale = quantize_rowwise(x, format=format)
        expected, expected_scale = quantize_rowwise_reference(x, format=format)
        assert codes.dtype == expected.dtype and scale.dtype == torch.float32
        assert torch.equal(codes.float(), expected.float()) and torch.equal(scale, expected_scale)


@pytest.mark.parametrize("format,limit", [("int8", 127), ("fp8_e4m3", 448)])
def test_quantize_rowwise_against_its_definition(format, limit):
    x = activations(9, 200)
    codes, scale = quantize_rowwise(x, format=format)
    assert codes[0].float().count_nonzero() == 0 and scale[0] == 1
    assert torch.equal(codes[1:].float().abs().amax(1), torch.full((8,), float(limit)))
    decoded = codes.double() * scale
    for row in (1, 2, 4):
        assert_sqnr(decoded[row], x[row], at_least=28, at_most=50)
    if format == "int8":
        assert ((decoded - x).abs() <= scale * 0.5000001).all()
        assert torch.equal(codes[3, 1:], (torch.arange(1, 200) % 2 * 2).to(torch.int8))  # ties go to the even code
    strided = x.t().contiguous().t()
    again, _ = quantize_rowwise(strided.view(3, 3, 200), format=format)
    assert again.is_contiguous() and torch.equal(again.view(9, 200).float(), codes.float())


@pytest.mark.parametrize("shape", [(1, 64, 128), (5, 7, 33), (17, 300, 256), (64, 33, 1), (0, 8, 8)], ids=str)
def test_int8_scaled_mm(shape):
    M, N, K = shape
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-128, 128, (M, K), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8)
    a[:1], b[:1] = 127, 127  # the largest sums
    ones = torch.ones(M, 1), torch.ones(N, 1)
    exact = a.long() @ b.long().t()
    for _ in range(2):
        assert torch.equal(int8_scaled_mm(a, b, *ones, None, out_dtype=torch.float32).long(), exact)
    scales = torch.rand(M, 1, generator=generator) + 0.1, torch.rand(N, 1, generator=generator) + 0.1
    bias = torch.randn(N, generator=generator)
    for dtype, rms in ((torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 1e-3)):
        scaled = exact.double() * 1e-3 * scales[0] * scales[1].t() + bias
        y = int8_scaled_mm(a, b, scales[0] * 1e-3, scales[1], bias, out_dtype=dtype)
        assert y.dtype == dtype and y.shape == (M, N)
        assert_close(y, scaled, rms=rms)
        reference = int8_scaled_mm_reference(a, b, scales[0] * 1e-3, scales[1], bias, out_dtype=dtype)
        assert_close(reference, scaled, rms=rms)
    if M > 1 and K > 1:
        with pytest.raises(AssertionError):
            assert_close(int8_scaled_mm(a.roll(1, 1), b, *ones, None, out_dtype=torch.float32), exact, rms=3e-3)


@pytest.mark.parametrize("shape", [(1, 64, 128), (5, 7, 33), (17, 300, 256), (0, 8, 8)], ids=str)
def test_fp8_scaled_mm(shape):
    M, N, K = shape
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(M, K, generator=generator).mul_(50).to(torch.float8_e4m3fn)
    b = torch.randn(N, K, generator=generator).mul_(50).to(torch.float8_e4m3fn)
    scales = torch.rand(M, 1, generator=generator) + 0.1, torch.rand(N, 1, generator=generator) + 0.1
    bias = torch.randn(N, generator=generator)
    scaled = (a.double() @ b.double().t()) * scales[0] * scales[1].t() + bias
    for dtype, rms in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
        if dtype == torch.float16:
            scales, scaled = (scales[0] / 1000, scales[1]), (scaled - bias) / 1000 + bias  # its range
        for compute in (fp8_scaled_mm, fp8_scaled_mm_reference):
            y = compute(a, b, *scales, bias, out_dtype=dtype)
            assert y.dtype == dtype and y.shape == (M, N)
            assert_close(y, scaled, rms=rms)


def test_wrong_arguments_are_refused():
    a, b = torch.zeros(3, 8, dtype=torch.int8), torch.zeros(5, 8, dtype=torch.int8)
    ones = torch.ones(3, 1), torch.ones(5, 1)
    for bad, message in (
        ((a.float(), b, *ones, None), "float32"),
        ((a, b[:, :4], *ones, None), "5, 4"),
        ((a, b, ones[0][:2], ones[1], None), "3, 1"),
        ((a, b, ones[0].double(), ones[1], None), "float64"),
        ((a, b, *ones, torch.zeros(4)), "4"),
    ):
        with pytest.raises(ValueError, match=message):
            int8_scaled_mm(*bad, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="allowed: int8, fp8_e4m3"):
        quantize_rowwise(torch.zeros(2, 2), format="fp8")
