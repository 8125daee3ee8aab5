"""Weights with floating-point zero points: what is quantized to them, and which schemes have them."""

import pytest
import torch

from hf_quant.algorithms import SOLVERS, Statistics, quantize_matrix, solve_matrix
from hf_quant.kernels import dequantize
from hf_quant.resolve import fields_of
from hf_quant.scheme import LinearScheme, TensorQuant


def quant_of(format: str = "int4", group: int = 32, scale: str = "float32", zero: str = "float32") -> TensorQuant:
    return TensorQuant(format, "group", group, False, scale, zero_point_dtype=zero)


def decoded(weight: torch.Tensor, quant: TensorQuant) -> torch.Tensor:
    packed, K = quantize_matrix(weight, quant), weight.shape[-1]
    return dequantize(*packed, format=quant.format, group_size=quant.columns_per_scale(K), K=K, dtype=torch.float32)


@pytest.mark.parametrize("format", ["int2", "int3", "int4", "int8"])
def test_a_weight_on_such_a_grid_comes_back(format):
    torch.manual_seed(0)
    levels = 2 ** int(format[3])
    codes = torch.randint(0, levels, (3, 24, 200)).float()
    codes[..., 0::32], codes[..., 1::32] = 0, levels - 1  # every group has both ends
    codes[..., 192:194] = torch.tensor([0, levels - 1])
    weight = codes * 0.25 + 3
    assert torch.equal(decoded(weight, quant_of(format)), weight)
    if format != "int8":  # whose values bf16 does not hold
        assert torch.equal(decoded(weight.bfloat16(), quant_of(format, scale="bfloat16", zero="bfloat16")), weight)


def test_equal_weights_are_exact_and_the_fit_is_better_than_the_ends():
    flat = torch.full((4, 64), -0.7)
    flat[1] = 0
    for format in ("int4", "int8"):
        assert torch.equal(decoded(flat, quant_of(format)), flat)
    torch.manual_seed(0)
    weight = torch.randn(64, 128) + 0.5
    groups = weight.view(64, 4, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    ends = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    found = (decoded(weight, quant_of()) - weight).norm()
    assert found < 0.97 * (ends.flatten(1) - weight).norm()


def test_zero_points_of_int8_are_rounded_once():
    torch.manual_seed(0)
    weight = torch.randn(64, 128) + 3
    kinds = ("float32", "float16")
    exact, rounded = ((decoded(weight, quant_of("int8", zero=kind)) - weight).norm() for kind in kinds)
    assert rounded < 1.05 * exact


def test_what_cannot_be():
    weight = torch.ones(2, 64)
    weight[1, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN or inf"):
        quantize_matrix(weight, quant_of())
    with pytest.raises(ValueError, match="a solver needs zero points that are codes"):
        solve_matrix(torch.ones(2, 64), quant_of(), SOLVERS["gptq"], Statistics(9, amax=torch.ones(64)))
    of_tensor = {"granularity": "tensor", "group_size": None}
    for fields in ({"symmetric": True}, of_tensor, {"scale_dtype": "float8_e4m3fn"}):
        with pytest.raises(ValueError, match="it needs granularity 'row' or 'group', symmetric=False, and scales in"):
            TensorQuant(**{**quant_of().to_dict(), **fields})
    with pytest.raises(ValueError, match="zero_point_dtype is 'int8'; allowed: uint8, float16, bfloat16, float32"):
        quant_of(zero="int8")
    for scheme in (LinearScheme(quant_of("nf4")), LinearScheme(quant_of(), sparsity="2:4")):
        with pytest.raises(ValueError, match="this version has no scheme"):
            fields_of(scheme)


def test_schemes_are_stored_and_older_ones_as_before():
    scheme = LinearScheme(quant_of(), cpu_activation=TensorQuant("int8", "row"))
    assert LinearScheme.from_dict(scheme.to_dict()) == scheme and scheme.weight.has_float_zeros
    assert str(scheme) == "int4 g32 floating-point zero points, int8 activations on CPUs"
    assert "zero_point_dtype" not in str(LinearScheme(TensorQuant("int4", "row", symmetric=False)).to_dict())
    assert fields_of(LinearScheme(quant_of("int8")))["weights"] == "int8"
