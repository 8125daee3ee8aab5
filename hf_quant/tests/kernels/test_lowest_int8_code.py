"""int8 codes of -128, which other libraries' checkpoints hold and ours do not: every kernel takes them for -128."""

import pytest
import torch

from hf_quant.kernels import dequantize, dynamic_mm, grouped_mm, weight_only_mm, weight_only_mm_backward
from hf_quant.kernels.gpu.launch import TARGETS, pretend
from hf_quant.kernels.grouped_mm.gpu import grouped_mm_gpu
from hf_quant.kernels.rowwise.op import quantize_rowwise_reference
from hf_quant.kernels.scaled_mm.gpu import dynamic_mm_gpu
from hf_quant.kernels.weight_only.gpu import weight_only_mm_gpu
from hf_quant.kernels.weight_only.gpu_dequantize import dequantize_gpu
from hf_quant.tests.kernels.cases import assert_product, rejects


N, K = 72, 288
ROWS = (1, 3, 17, 128)  # of x: each side of the M at which the CPU paths change


def weight(group_size: int, scale_dtype: torch.dtype):
    """((qdata, scale, None, None), exact weight): every third code is -128, and a row has no other."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (N, K), generator=generator).to(torch.int8)
    codes[:, ::3], codes[5] = -128, -128
    scale = (torch.rand(N, K // group_size, generator=generator) * 0.01 + 0.001).to(scale_dtype)
    exact = codes.double() * scale.double().repeat_interleave(group_size, 1)
    return (codes, scale, None, None), exact


def inputs(M: int) -> torch.Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(1)).bfloat16()


def rows_as_int8(x: torch.Tensor) -> torch.Tensor:
    codes, scale = quantize_rowwise_reference(x, format="int8")
    return codes.double() * scale.double().view(-1, 1)


def without_it(exact: torch.Tensor, packed) -> torch.Tensor:
    """The weight of a kernel that takes -128 for -127."""
    return exact * torch.where(packed[0] == -128, 127 / 128, 1.0)


@pytest.mark.usefixtures("poison_empty", "cpu_kernels")
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size", [K, 32])
def test_on_cpus(group_size, scale_dtype):
    packed, exact = weight(group_size, scale_dtype)
    options = {"format": "int8", "group_size": group_size}
    decoded = dequantize(*packed, **options, K=K, dtype=torch.float32)
    assert torch.equal(decoded, exact.float()) and decoded.min() < 0
    for M in ROWS:
        x, grad = inputs(M), torch.randn(M, N).bfloat16()
        for _ in range(2):  # some weights are repacked at their second use
            y = weight_only_mm(x, *packed, None, **options)
            assert_product(y, x.double() @ exact.t(), exact)
            y = dynamic_mm(x, *packed, None, activation="int8", **options)
            assert_product(y, rows_as_int8(x) @ exact.t(), exact)
        y = weight_only_mm_backward(grad, *packed, **options, K=K)
        assert_product(y, grad.double() @ exact, exact.t())
    fused = [None if part is None else part.expand(2, *part.shape).contiguous() for part in packed]
    x, offsets = inputs(4), torch.tensor([1, 4], dtype=torch.int32)
    for activation in (None, "int8"):
        y = grouped_mm(x, *fused, None, offsets, activation=activation, **options)
        assert_product(y, (x.double() if activation is None else rows_as_int8(x)) @ exact.t(), exact)


def test_a_kernel_that_cuts_it_off_is_seen():
    packed, exact = weight(K, torch.float32)
    x = torch.ones(1, K).bfloat16()
    y = weight_only_mm(x.float(), *packed, None, format="int8", group_size=K)
    assert rejects(y, x.double() @ without_it(exact, packed).t(), exact)


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize("group_size", [K, 32])
def test_on_gpus(group_size, target):
    packed, exact = weight(group_size, torch.bfloat16)
    options = {"format": "int8", "group_size": group_size}
    with pretend(TARGETS[target]):
        decoded = dequantize_gpu(*packed, **options, K=K, dtype=torch.float32)
        assert torch.equal(decoded, exact.float())
        for M in (3, 40):
            x = inputs(M)
            assert_product(weight_only_mm_gpu(x, *packed, None, **options), x.double() @ exact.t(), exact)
            y = dynamic_mm_gpu(x, *packed, None, activation="int8", **options)
            assert_product(y, rows_as_int8(x) @ exact.t(), exact)
        fused = [None if part is None else part.expand(2, *part.shape).contiguous() for part in packed]
        x, offsets = inputs(4), torch.tensor([1, 4], dtype=torch.int32)
        y = grouped_mm_gpu(x, *fused, None, offsets, activation=None, **options)
        assert_product(y, x.double() @ exact.t(), exact)
