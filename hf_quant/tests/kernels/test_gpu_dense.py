"""The GPU implementations that dequantize use torch ops only, so that their arithmetic is tested on any device."""

import pytest
import torch

from hf_quant.algorithms import geometry, quantize_matrix
from hf_quant.kernels.scaled_mm.gpu import dynamic_mm_gpu
from hf_quant.kernels.scaled_mm.op import dynamic_mm_reference
from hf_quant.kernels.weight_only.gpu import weight_only_mm_backward_gpu, weight_only_mm_gpu
from hf_quant.kernels.weight_only.op import weight_only_mm_backward_reference, weight_only_mm_reference
from hf_quant.scheme import TensorQuant
from hf_quant.testing import sqnr


QUANTS = (
    TensorQuant("int8", "row"),
    TensorQuant("int4", "group", 64, symmetric=False, scale_dtype="bfloat16"),
    TensorQuant("fp8_e4m3", "block"),
    TensorQuant("nvfp4", "group", 16, scale_dtype="float8_e4m3fn"),
    TensorQuant("int4", "group", 32, symmetric=False, zero_point_dtype="float32"),
    TensorQuant("int8", "row", symmetric=False, zero_point_dtype="float32"),
)


def _case(quant: TensorQuant, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 96, generator=generator)
    x = torch.randn(7, 96, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype)
    kwargs = {"format": quant.format, "group_size": geometry(quant, 50, 96)[1]}
    return x, bias, quantize_matrix(weight, quant), kwargs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_products_match_the_reference(quant, dtype):
    x, bias, packed, kwargs = _case(quant, dtype)
    limit = {torch.float32: 110, torch.float16: 60, torch.bfloat16: 44}[dtype]
    expected = weight_only_mm_reference(x, *packed, bias, **kwargs)
    assert sqnr(expected, weight_only_mm_gpu(x, *packed, bias, **kwargs)) > limit
    without_last_tile = torch.cat([x[:, :64], torch.zeros_like(x[:, 64:])], 1)
    assert sqnr(expected, weight_only_mm_gpu(without_last_tile, *packed, bias, **kwargs)) < 20
    grad = bias.expand(7, 50).contiguous()
    expected = weight_only_mm_backward_reference(grad, *packed, **kwargs, K=96)
    assert sqnr(expected, weight_only_mm_backward_gpu(grad, *packed, **kwargs, K=96)) > limit
    for activation in ("int8", "fp8_e4m3"):
        expected = dynamic_mm_reference(x, *packed, bias, activation=activation, **kwargs)
        assert sqnr(expected, dynamic_mm_gpu(x, *packed, bias, activation=activation, **kwargs)) > limit - 3


def test_fp16_sums_of_codes_do_not_overflow():
    quant = TensorQuant("int8", "row")
    packed = quantize_matrix(torch.full((4, 512), 3.0), quant)
    y = dynamic_mm_gpu(
        torch.ones(1, 512, dtype=torch.float16), *packed, None, activation="int8", format="int8", group_size=512
    )
    assert torch.allclose(y.float(), torch.full((1, 4), 1536.0), rtol=2e-3)
