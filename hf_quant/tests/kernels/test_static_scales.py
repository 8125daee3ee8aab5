"""Inputs quantized with one scale that is given: `quantize_static` and products with `input_scale`, every backend."""

import pytest
import torch

from hf_quant.kernels import dynamic_mm, grouped_mm, native, quantize_static
from hf_quant.kernels.codes import row_max
from hf_quant.kernels.cpu import ready_product
from hf_quant.kernels.gpu.launch import TARGETS, pretend
from hf_quant.kernels.grouped_mm.gpu import grouped_mm_gpu
from hf_quant.kernels.rowwise import gpu
from hf_quant.kernels.rowwise.op import quantize_static_reference
from hf_quant.kernels.scaled_mm.gpu import dynamic_mm_gpu
from hf_quant.testing import assert_close
from hf_quant.tests.kernels.cases import assert_product, decode_slowly, packed_case, rejects
from hf_quant.tests.kernels.interpreter import install
from hf_quant.tests.kernels.test_input_diagonal import QUANTS, K, N, diagonal, moved, normal


install()
pytestmark = [
    pytest.mark.usefixtures("poison_empty"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]
FORMATS = ("int8", "fp8_e4m3")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def scale_for(x: torch.Tensor, format: str, share: float = 0.6) -> torch.Tensor:
    """A scale under which the largest values of x saturate."""
    return (share * x[x.isfinite()].float().abs().max() / row_max(format)).reshape(1)


def hard_rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows with values far beyond the range, inf, zeros, ties, and one with NaN."""
    x = normal(6, 70).to(dtype)
    x[0, :2] = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max])
    x[1, 5], x[2, 69] = torch.inf, torch.nan
    x[3] = 0
    x[4] = torch.arange(70) / 2 - 17
    return x


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_plain_math(format):
    for dtype in DTYPES:
        x = normal(5, 70).to(dtype)
        scale = scale_for(x, format)
        codes, row_scale = quantize_static(x, scale, format=format)
        exact = (x.double() / scale.double()).clamp(-row_max(format), row_max(format))
        assert torch.equal(row_scale, scale.expand(5, 1)) and row_scale.is_contiguous()
        assert (codes.double().abs() == row_max(format)).any()
        steps = 0.5 if format == "int8" else exact.abs().clamp(min=2.0**-6) / 16
        assert ((codes.double() - exact).abs() <= 1.001 * steps).all()
        assert not ((quantize_static(x, 2 * scale, format=format)[0].double() - exact).abs() <= 1.001 * steps).all()


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_not_finite(format):
    """They saturate; a row with NaN shows in its scale, so that no product with it is finite."""
    for dtype in DTYPES:
        x = hard_rows(dtype)
        want, scale = quantize_static_reference(x, torch.tensor([0.25]), format=format)
        codes, found = quantize_static(x, torch.tensor([0.25]), format=format)
        whole = [0, 1, 3, 4, 5]
        assert torch.equal(codes[whole].view(torch.int8), want[whole].view(torch.int8))
        assert found[2].isnan() and torch.equal(found[whole], torch.full((5, 1), 0.25)) and scale[2].isnan()
        limit = row_max(format)
        assert codes[0, :2].float().tolist() == [limit, -limit] and codes[1, 5].float() == limit


@pytest.mark.parametrize("target", ["sm80", "sm90", "gfx942"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_gpu_kernel_is_the_reference_to_the_bit(format, target, monkeypatch):
    whole = [0, 1, 3, 4, 5]
    for in_registers in (gpu._IN_REGISTERS, 0):
        monkeypatch.setattr(gpu, "_IN_REGISTERS", in_registers)
        for dtype in DTYPES:
            x, scale = hard_rows(dtype), torch.tensor([0.31])
            want, want_scale = quantize_static_reference(x, scale, format=format)
            with pretend(TARGETS[target]):
                codes, found = gpu.quantize_static_gpu(x, scale, format=format)
            assert torch.equal(codes[whole].view(torch.int8), want[whole].view(torch.int8))
            assert found[2].isnan() and torch.equal(found[whole], want_scale[whole])


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("format", FORMATS)
def test_transformed_rows(format):
    x, factors = normal(4, K).bfloat16(), diagonal(64)
    exact = moved(x, factors)
    scale = scale_for(exact, format, 1.0)
    with pretend(TARGETS["sm90"]):
        on_gpu = gpu.quantize_static_gpu(x, scale, factors, format=format)
    for codes, row_scale in (quantize_static(x, scale, factors, format=format), on_gpu):
        # Sums in fp32 may round a code the other way.
        assert_close(codes.double() * row_scale.double(), exact, rms=0.01 if format == "int8" else 0.03)
    with pytest.raises(AssertionError):
        assert_close(quantize_static(x, scale, format=format)[0].double() * scale, exact, rms=0.03)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("activation", FORMATS)
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_products(quant, activation):
    packed, options = packed_case(quant, N, K)
    options["activation"] = activation
    weight = decode_slowly(packed, quant, K)
    for factors in (None, diagonal(64)):
        for dtype in (torch.bfloat16, torch.float32):
            for M in (1, 5):
                x, bias = normal(M, K).to(dtype), normal(N, seed=2).to(dtype)
                rows = x.float() if factors is None else moved(x, factors)
                scale = scale_for(rows, activation, 0.9)
                codes, _ = quantize_static(x, scale, factors, format=activation)
                exact = codes.double() * scale.double() @ weight.t() + bias.double()
                y = dynamic_mm(x, *packed, bias, factors, scale, activation=activation, **_without(options))
                assert_product(y, exact, weight, dtype=torch.bfloat16)
                assert torch.equal(y, dynamic_mm(x, *packed, bias, factors, input_scale=scale, **options))
                if M == 5:  # both are one tile
                    with pretend(TARGETS["sm90"]):
                        assert_close(dynamic_mm_gpu(x, *packed, bias, factors, scale, **options), exact, rms=0.02)
                assert rejects(dynamic_mm(x, *packed, bias, factors, 4 * scale, **options), exact, weight)


def _without(options: dict) -> dict:
    return {name: value for name, value in options.items() if name != "activation"}


@pytest.mark.usefixtures("cpu_kernels")
def test_a_product_is_ready_for_its_own_scale_only():
    packed, options = packed_case(QUANTS[0], N, K)
    x, first, second = normal(1, K).bfloat16(), torch.tensor([0.01]), torch.tensor([0.03])
    results = [
        dynamic_mm(x, *packed, None, None, s, activation="int8", **options) for s in (first, second, None, first)
    ]
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert torch.equal(results[0], results[3])
    if native.active() is not None:

        def ready(scale):
            return ready_product(x, None, (*packed, scale), "int8", "int8", None)

        assert torch.equal(ready(first), results[0])
        assert ready(first.clone()) is None and ready(None) is None
        first.mul_(3)  # a change in place: what was made ready is not used
        assert ready(first) is None
        assert torch.equal(dynamic_mm(x, *packed, None, None, first, activation="int8", **options), results[1])


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("activation", FORMATS)
def test_experts_have_one_scale(activation):
    quant = QUANTS[1]
    cases = [packed_case(quant, N, K) for _ in range(3)]
    packed = [torch.stack(parts) if parts[0] is not None else None for parts in zip(*(case[0] for case in cases))]
    options = cases[0][1] | {"activation": activation}
    x, offsets = normal(7, K).bfloat16(), torch.tensor([2, 2, 6], dtype=torch.int32)
    weight, factors = decode_slowly(cases[0][0], quant, K), diagonal(64)
    for given in (None, factors):
        scale = scale_for(x.float() if given is None else moved(x, given), activation, 0.9)
        codes, _ = quantize_static(x, scale, given, format=activation)
        exact = codes.double() * scale.double() @ weight.t()
        exact[6:] = 0
        y = grouped_mm(x, *packed, None, offsets, given, scale, **options)
        assert_product(y, exact, weight, dtype=torch.bfloat16)
        assert rejects(grouped_mm(x, *packed, None, offsets, given, 4 * scale, **options), exact, weight)
        with pretend(TARGETS["sm90"]):
            assert_close(grouped_mm_gpu(x, *packed, None, offsets, given, scale, **options), exact, rms=0.02)


def test_wrong_scales_are_refused():
    x = normal(2, K)
    for scale in (torch.ones(2), torch.ones(1).double(), torch.ones(())):
        with pytest.raises(ValueError, match=r"input_scale is .*; needs one value, \[1\] torch.float32"):
            quantize_static(x, scale, format="int8")
    with pytest.raises(ValueError, match="activation format is 'int4'"):
        quantize_static(x, torch.ones(1), format="int4")
    with pytest.raises(ValueError, match="x is torch.int8"):
        quantize_static(x.to(torch.int8), torch.ones(1), format="int8")
    assert quantize_static(x[:0], torch.ones(1), format="int8")[1].shape == (0, 1)
