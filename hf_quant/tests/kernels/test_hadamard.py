"""`hadamard` and `hadamard_quantize_rowwise`: the matrix, the CPU, and the kernel in Triton's interpreter."""

import pytest
import torch
from torch.library import opcheck

from hf_quant.kernels import hadamard, hadamard_quantize_rowwise, native
from hf_quant.kernels.cpu import rows as cpu_rows
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.hadamard import gpu
from hf_quant.kernels.hadamard.op import (
    differentiable_hadamard,
    hadamard_quantize_rowwise_reference,
    hadamard_reference,
)
from hf_quant.kernels.sign_matrices import hadamard_matrix, odd_factor, sign_matrix
from hf_quant.testing import assert_close, rms_error
from hf_quant.tests.kernels.interpreter import install
from hf_quant.tests.kernels.test_rowwise import FORMATS, half_steps


install()
pytestmark = [
    pytest.mark.usefixtures("poison_empty"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # inf * 0, in numpy
]
# RMS error of a result in a dtype: its rounding, or fp32 sums.
ROUNDING = {torch.float64: 1e-14, torch.float32: 5e-7, torch.float16: 4e-4, torch.bfloat16: 3e-3}
SIZES = (1, 2, 4, 12, 16, 20, 24, 28, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 1280)
LONG = (3072, 4096, 12288, 14336, 16384)
# The kernel's sums have 16 bits half-way: up to 2**-17 of the largest is lost, where fp8 has steps of 2**-18.
HALF_STEPS = {"int8": 1.01, "fp8_e4m3": 1.5}
TARGET_NAMES = ("sm80", "sm90", "gfx942")


def case(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random values with an outlier in each row, which the transform spreads."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x[..., 3 % shape[-1]] *= 50
    return x.to(dtype)


def exact(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x.double().unflatten(-1, (-1, n)) @ hadamard_matrix(n)).flatten(-2)


@pytest.mark.parametrize("n", SIZES)
def test_the_matrix_is_a_symmetric_hadamard_matrix(n):
    signs = sign_matrix(n)
    assert set(signs.unique().tolist()) <= {-1.0, 1.0} and torch.equal(signs, signs.t())
    assert torch.equal(signs @ signs, n * torch.eye(n, dtype=torch.float64))


def test_the_matrix_of_sylvester():
    """m = 1: entry (i, j) is -1 to the number of bits that i and j share."""
    expected = [[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    assert sign_matrix(16).tolist() == expected
    assert torch.equal(sign_matrix(48), torch.kron(sign_matrix(12), sign_matrix(4)))


@pytest.mark.parametrize("n", SIZES)
def test_hadamard_is_its_definition(n):
    for dtype, allowed in ROUNDING.items():
        x = case(3, 2, 2 * n, dtype=dtype)
        for compute in (hadamard, hadamard_reference):
            y = compute(x, block_size=n)
            assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
            assert_close(y, exact(x, n), rms=allowed)
            assert_close(compute(y, block_size=n), x, rms=2 * allowed)  # its own inverse
    if n > 2:
        with pytest.raises(AssertionError):
            assert_close(hadamard(x.roll(1, -1), block_size=n), exact(x, n), rms=0.1)


@pytest.mark.skipif(native.active() is None, reason="needs the native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, 32, 128, 1024])
def test_torch_gives_the_bits_of_the_native_kernels(n, dtype, monkeypatch):
    """So weights in a rotated basis get the same codes with these kernels and without."""
    monkeypatch.setattr(cpu_rows, "_BLOCK", 8 * 4 * n)
    x, diagonal = case(3, 5, 2 * n, dtype=dtype), case(2 * n, dtype=torch.float32)
    for given in (None, diagonal):
        y = hadamard(x, given, block_size=n)
        with native.using(None):
            assert torch.equal(hadamard(x, given, block_size=n), y)


def test_shapes_and_strides():
    x = case(5, 4, 96, dtype=torch.float32)
    for view in (x[:, ::2], x.transpose(0, 1), x[..., ::3], x[0, 0], x[..., 16:80]):
        n = view.shape[-1]
        for compute in (hadamard, hadamard_reference, gpu.hadamard_gpu):
            assert_close(compute(view.bfloat16()), exact(view.bfloat16(), n), rms=3e-3)
        if view.dim() == 1:
            continue
        assert hadamard(view[:0]).shape == view[:0].shape == gpu.hadamard_gpu(view[:0]).shape
        codes, scale = hadamard_quantize_rowwise(view[:0], format="int8")
        assert codes.shape == view[:0].shape and scale.shape == (*view[:0].shape[:-1], 1)


@pytest.mark.parametrize("format", FORMATS)
def test_quantized(format):
    for n, K in ((64, 64), (96, 96), (20, 60), (1024, 1024)):
        x = case(2, 3, K, dtype=torch.float32)
        for compute in (hadamard_quantize_rowwise, hadamard_quantize_rowwise_reference):
            codes, scale = compute(x, block_size=n, format=format)
            assert half_steps(codes, scale, exact(x, n)) < 1.002
            assert half_steps(codes.roll(1, -1), scale, exact(x, n)) > 5  # other columns


def test_outliers_are_spread():
    x = case(8, 1024, dtype=torch.float32)
    codes, scale = hadamard_quantize_rowwise(x, format="int8")
    error = rms_error(hadamard(codes.float() * scale), x)
    direct = x.abs().amax(-1, keepdim=True) / 127
    assert error < 0.5 * rms_error((x / direct).round() * direct, x)


def test_gradient():
    x = case(2, 24, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: differentiable_hadamard(x, block_size=12), (x,))


def test_registration():
    for x in (case(3, 40), case(40, 3).t()):
        opcheck(hadamard, (x,), {"block_size": 20})
        opcheck(hadamard_quantize_rowwise, (x,), {"block_size": 8 if x.shape[-1] == 40 else 1, "format": "int8"})


def test_wrong_arguments_are_refused():
    x = case(2, 48)
    for bad, message in (
        ((case(2, 36), None), r"size 36; allowed: 2\*\*k, 12 \* 2\*\*k, 20 \* 2\*\*k and 28 \* 2\*\*k up to 32768"),
        ((case(1, 65536), None), "size 65536"),
        ((x, 32), "block_size is 32; it must divide the last dimension of x, 48"),
        ((x, 0), "size 0"),
        ((x.to(torch.int8), None), "torch.int8"),
    ):
        for compute in (hadamard, hadamard_reference, gpu.hadamard_gpu):
            with pytest.raises(ValueError, match=message):
                compute(bad[0], block_size=bad[1])
    with pytest.raises(ValueError, match="allowed: int8, fp8_e4m3"):
        gpu.hadamard_quantize_rowwise_gpu(x, format="int4")


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_the_kernel(target):
    with pretend(TARGETS[target]):
        for i, n in enumerate(SIZES):
            x = case(3 + i % 2, 2 * n, dtype=(torch.bfloat16, torch.float16)[i % 2])
            y = gpu.hadamard_gpu(x, block_size=n)
            assert y.dtype == x.dtype
            assert_close(y, exact(x, n), rms=ROUNDING[x.dtype])
            for format in FORMATS:
                codes, scale = gpu.hadamard_quantize_rowwise_gpu(x, block_size=n, format=format)
                assert half_steps(codes, scale, exact(x, n)) < HALF_STEPS[format]
        x = case(2, 60, dtype=torch.float32)  # no kernel: in torch ops
        assert_close(gpu.hadamard_gpu(x, block_size=20), exact(x, 20), rms=ROUNDING[torch.float32])


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("n", LONG)
def test_the_kernel_on_long_rows(n, target):
    x = case(1, n)
    with pretend(TARGETS[target]):
        expected = hadamard_reference(x.double())
        assert_close(gpu.hadamard_gpu(x), expected, rms=ROUNDING[x.dtype])
        codes, scale = gpu.hadamard_quantize_rowwise_gpu(x, format="int8")
        assert half_steps(codes, scale, expected) < 1.01
        assert half_steps(codes.roll(1, -1), scale, expected) > 5


def test_tilings_keep_the_odd_factor_whole():
    """What `scripts/tune.py` may try; half of 28 segments would need a Hadamard matrix of 14."""
    for n in (*SIZES, *LONG, 3584, 5120):
        for tile_rows in (32, 64, 256):
            for columns in (16, 64, 128):
                cut = gpu.tiling(n, n, tile_rows, columns)
                assert cut.A == 1 or cut.A % odd_factor(n) == 0
                assert cut.A <= cut.A_PAD <= cut.T and cut.A * cut.SPAN * cut.B == n
    with pytest.raises(AssertionError, match="16 tile rows do not hold the factor 28"):
        gpu.tiling(3584, 3584, 16, 64)


def test_sizes_beyond_the_kernel():
    """The first factor is applied by another product, and quantization is a kernel of its own."""
    for n, K in ((28672, 28672), (32768, 32768), (256, 22016)):
        x = case(1, K)
        expected = hadamard_reference(x.double(), block_size=n)
        assert_close(gpu.hadamard_gpu(x, block_size=n), expected, rms=ROUNDING[x.dtype])
        codes, scale = gpu.hadamard_quantize_rowwise_gpu(x, block_size=n, format="int8")
        assert half_steps(codes, scale, expected) < 1.01


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_of_a_row_share_its_scale(format):
    for K, n in ((384, 128), (960, 64), (96, 8), (3328, 256), (1792, 1792), (5120, 64)):
        x = case(5, K)
        codes, scale = gpu.hadamard_quantize_rowwise_gpu(x, block_size=n, format=format)
        assert scale.shape == (5, 1) and half_steps(codes, scale, exact(x, n)) < HALF_STEPS[format]


def test_rows_of_zeros_and_of_nan():
    x = case(70, 64)
    x[0], x[69, 5], x[68, 7] = 0, torch.nan, torch.inf
    codes, scale = gpu.hadamard_quantize_rowwise_gpu(x, format="int8")
    assert scale[0] == 1 and not codes[0].any() and scale[1:68].isfinite().all()
    assert not scale[68:].isfinite().any()


def launches(call) -> list:
    with pretend(TARGETS["sm90"]), record_launches() as recorded:
        call()
    return recorded


def test_one_launch_without_reading_a_tensor():
    """On meta tensors, which hold nothing; the options, so the compiled kernel, are those of any number of rows."""
    for K, n in ((3072, None), (4096, 128), (14336, None), (12288, 1024), (128, None)):
        plain, quantized = set(), set()
        for M in (1, 32, 999, 4608, 2**20):
            x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
            for found, call in (
                (plain, lambda x=x, n=n: gpu.hadamard_gpu(x, block_size=n)),
                (quantized, lambda x=x, n=n: gpu.hadamard_quantize_rowwise_gpu(x, block_size=n, format="int8")),
            ):
                (launched,) = launches(call)
                assert launched.grid[0] <= 4 * 132
                found.add(tuple(sorted(launched.options.items())))
        assert len(plain) == len(quantized) == 1


def test_the_plan_can_explain_it():
    problem = Problem("int8", 64, 64, 64, torch.bfloat16)
    assert explain(hadamard, "cuda", problem)[0][2] is None
    rows = explain(hadamard, "cuda", problem._replace(dtype=torch.float32))
    assert "float32" in rows[0][2] and rows[1][2] is None
