"""Row quantization fused with norms and activations, and random rounding, on CPU: against independent fp64 math."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hf_quant.kernels import (
    act_quantize_rowwise,
    layer_norm_quantize_rowwise,
    quantize_rowwise,
    rms_norm_quantize_rowwise,
)
from hf_quant.kernels.rowwise.op import (
    act_quantize_rowwise_reference,
    layer_norm_quantize_rowwise_reference,
    quantize_rowwise_reference,
    random_bits,
    rms_norm_quantize_rowwise_reference,
    round_stochastically,
)


pytestmark = pytest.mark.usefixtures("poison_empty")
FORMATS = ("int8", "fp8_e4m3")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fused_cases(M: int = 6, K: int = 70, dtype: torch.dtype = torch.float32) -> dict:
    """{name: (op, reference, tensors, options, exact values in fp64)}; x is [2, M / 2, K] with a row of zeros."""
    x, up = normal(2, M // 2, K), normal(2, M // 2, K, seed=1)
    x[0, 0] = 0
    x, up, weight, bias = (t.to(dtype) for t in (x, up, normal(K, seed=2), normal(K, seed=3)))
    mod_scale, mod_shift = (normal(2, 2 * K, seed=4).to(dtype).chunk(2, 1)[i] for i in (0, 1))  # with strides
    value, factor = x.double(), up.double()
    rms = value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    norm = (value - value.mean(-1, keepdim=True)) / (value.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    modulated = norm * (1 + mod_scale.double()[:, None]) + mod_shift.double()[:, None]
    affine = norm * weight.double() + bias.double()
    eps = {"eps": 1e-5}
    rms_ops = rms_norm_quantize_rowwise, rms_norm_quantize_rowwise_reference
    layer_ops = layer_norm_quantize_rowwise, layer_norm_quantize_rowwise_reference
    act_ops = act_quantize_rowwise, act_quantize_rowwise_reference
    phi = 0.5 * (1 + torch.erf(value / 2**0.5))
    tanh = 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (value + 0.044715 * value**3)))
    return {
        "rms": (*rms_ops, (x, weight), eps, rms * weight.double()),
        "rms without weight": (*rms_ops, (x, None), eps, rms),
        "layer": (*layer_ops, (x, None, None, None, None), eps, norm),
        "layer affine": (*layer_ops, (x, weight, bias, None, None), eps, affine),
        "layer modulated": (*layer_ops, (x, None, None, mod_scale, mod_shift), eps, modulated),
        # As blocks of diffusion models leave it: their factor minus one, which 16 bit would round.
        "layer modulated in fp32": (*layer_ops, (x, None, None, mod_scale.float(), mod_shift), eps, modulated),
        "layer shifted": (
            *layer_ops,
            (x, weight, bias, mod_scale[:1], None),
            eps,
            affine * (1 + mod_scale[:1].double()),
        ),
        "silu * up": (*act_ops, (x, up), {"act": "silu"}, value * torch.sigmoid(value) * factor),
        "silu": (*act_ops, (x, None), {"act": "silu"}, value * torch.sigmoid(value)),
        "gelu": (*act_ops, (x, None), {"act": "gelu"}, value * phi),
        "gelu * up": (*act_ops, (x, up), {"act": "gelu"}, value * phi * factor),
        "gelu_tanh": (*act_ops, (x, None), {"act": "gelu_tanh"}, value * tanh),
    }


def half_steps(codes: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest distance of codes * scale from `exact`, in halves of the grid's step: at most 1 for the nearest code."""
    largest = exact.abs().amax(-1, keepdim=True)
    limit = 127 if codes.dtype == torch.int8 else 448
    assert torch.allclose(scale.double(), torch.where(largest > 0, largest / limit, 1.0), rtol=2e-5, atol=0)
    if codes.dtype == torch.int8:
        step = scale.double().expand(exact.shape)
    else:
        power = torch.floor(torch.log2((exact / scale.double()).abs().clamp(2.0**-6, 448)))
        step = torch.exp2(power - 3) * scale.double()
    return ((codes.double() * scale.double() - exact).abs() / (step / 2)).max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", fused_cases())
def test_fused(name, format, dtype):
    op, reference, tensors, options, exact = fused_cases(dtype=dtype)[name]
    for compute in (op, reference):
        codes, scale = compute(*tensors, **options, format=format)
        assert codes.shape == exact.shape and scale.shape == (2, 3, 1) and codes.is_contiguous()
        assert half_steps(codes, scale, exact) < 1.002
        assert half_steps(codes.roll(1, -1), scale, exact) > 10  # other columns
    x, *rest = tensors
    strided = torch.cat([x, x], -1)[..., : x.shape[-1]]
    assert half_steps(*op(strided, *rest, **options, format=format), exact) < 1.002


def test_rows_of_a_batch_get_its_modulation():
    op, _, (x, *_, mod_scale, mod_shift), options, exact = fused_cases()["layer modulated"]
    swapped = op(x, None, None, mod_scale.flip(0), mod_shift.flip(0), **options, format="int8")
    with pytest.raises(AssertionError):
        assert half_steps(*swapped, exact) < 1.002
    flat = op(x.flatten(0, 1), None, None, mod_scale, mod_shift, **options, format="int8")
    each = (part.repeat_interleave(3, 0) for part in (mod_scale, mod_shift))
    per_row = op(x.flatten(0, 1), None, None, *each, **options, format="int8")
    assert torch.equal(flat[0], per_row[0]) and torch.equal(flat[1], per_row[1])


@pytest.mark.parametrize("format", FORMATS)
def test_empty(format):
    for shape in ((0, 8), (2, 0, 8), (3, 0)):
        x = torch.zeros(shape)
        mod = torch.zeros(1, shape[-1])
        for codes, scale in (
            quantize_rowwise(x, format=format),
            quantize_rowwise(x, torch.tensor(1), format=format),
            quantize_rowwise_reference(x, torch.tensor(1), format=format),
            rms_norm_quantize_rowwise(x, None, eps=1e-6, format=format),
            layer_norm_quantize_rowwise(x, None, None, mod, mod, eps=1e-6, format=format),
            act_quantize_rowwise(x, x, act="silu", format=format),
        ):
            assert codes.shape == shape and scale.shape == (*shape[:-1], 1) and bool((scale == 1).all())


def test_rows_that_are_not_finite_make_no_finite_product():
    """A scale that hides NaN would turn a broken model into a plausible one."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = normal(4, 9).to(dtype)
        x[1, 3], x[2, 0] = torch.nan, -torch.inf
        for format in FORMATS:
            for compute in (quantize_rowwise, quantize_rowwise_reference):
                codes, scale = compute(x, format=format)
                assert scale[1].isnan() and scale[2].isinf() and scale[[0, 3]].isfinite().all()
                assert not (codes.float() * scale)[1:3].isfinite().any() or format == "int8"
                assert not ((codes.float() * scale)[1:3].sum(1)).isfinite().any()


def test_tiny_rows_count_as_zeros():
    x = torch.tensor([[127 * 2.0**-90, 0], [126.9 * 2.0**-90, 0], [1e-45, 1e-45]])
    for compute in (quantize_rowwise, quantize_rowwise_reference):
        codes, scale = compute(x, format="int8")
        assert scale.flatten().tolist() == [2.0**-90, 1, 1]
        assert codes.tolist() == [[127, 0], [0, 0], [0, 0]]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-7 as the paper writes it, one block, Python integers."""
    for _ in range(7):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b % 2**32, a >> 32 ^ counter[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_random_bits_are_philox():
    assert philox([0, 0, 0, 0], [0, 0]) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]  # Random123's kat_vectors
    seed = 0x123456789ABCDEF0
    bits = random_bits(torch.tensor(seed), 3, 21, start=5)
    for row in range(3):
        for k in range(21):
            word = philox([k // 8, row + 5, 0, 0], [seed % 2**32, seed >> 32])[k % 8 // 2]
            assert bits[row, k] == (word >> 16 * (k % 2)) & 0xFFFF
    assert not torch.equal(random_bits(torch.tensor(-1), 3, 21), random_bits(torch.tensor(1), 3, 21))


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_carries_exactly(format):
    """Every multiple of 2**-16 between two values of the grid goes up for as many of the 2**16 bits as it says."""
    grid = [-1.0, 0.0, 126.0] if format == "int8" else [2.0**-9, -3 * 2.0**-9, 2.0**-6, 0.4375, 416.0, -448.0]
    bits = torch.arange(2**16)
    for lower in grid:
        step = 1.0 if format == "int8" else max(2.0 ** (np.floor(np.log2(abs(lower))) - 3), 2.0**-9)
        for part in (0, 1, 5, 2**15, 2**16 - 1):
            value = (abs(lower) + (0 if abs(lower) == 448 else part * 2.0**-16 * step)) * (-1 if lower < 0 else 1)
            values = torch.full((2**16,), value)
            rounded = round_stochastically(values, bits, format=format)
            up = (rounded.abs() > abs(lower)).sum().item()
            assert set(rounded.abs().tolist()) <= {abs(lower), abs(lower) + step}
            assert up == (0 if abs(lower) == 448 else part)
            assert torch.equal(rounded.to(torch.float8_e4m3fn).float(), rounded) or format == "int8"


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_is_unbiased(format):
    x = normal(1, 64).repeat(4000, 1)
    codes, scale = quantize_rowwise(x, torch.tensor(7), format=format)
    expected, expected_scale = quantize_rowwise_reference(x, torch.tensor(7), format=format)
    assert torch.equal(codes.view(torch.int8), expected.view(torch.int8)) and torch.equal(scale, expected_scale)
    nearest = quantize_rowwise(x, format=format)[0].double() * scale
    values = codes.double() * scale
    allowed = 4.5 * values.std(0, correction=0) / 4000**0.5 + 1e-6 * x[0].abs()
    assert ((values.mean(0) - x[0]).abs() <= allowed).all()
    assert ((nearest.mean(0) - x[0]).abs() > allowed).sum() > 20  # rounding to nearest is not
    assert codes.float().abs().max() == (127 if format == "int8" else 448)
    other = quantize_rowwise(x, torch.tensor(8), format=format)[0]
    assert (other.float() != codes.float()).float().mean() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_codes_are_those_of_the_reference(dtype, cpu_kernels):
    """Rows shorter and longer than what a kernel draws and holds at once, on every instruction set."""
    seed = torch.tensor(-12345678901)
    for M, K in ((3, 7), (5, 64), (2, 1023), (3, 2500)):
        x = normal(M, K).to(dtype)
        x[0] *= 1e-3
        x[1, : K // 2] *= 1e-3  # steps of every power of two
        for format in FORMATS:
            codes, scale = quantize_rowwise(x, seed, format=format)
            expected, expected_scale = quantize_rowwise_reference(x, seed, format=format)
            assert codes.dtype == expected.dtype and torch.equal(scale, expected_scale)
            assert torch.equal(codes.view(torch.int8), expected.view(torch.int8))
            assert not torch.equal(codes.view(torch.int8), quantize_rowwise(x, format=format)[0].view(torch.int8))


def test_wrong_arguments_are_refused():
    x = torch.zeros(2, 3, 4)
    bad = {
        "needs \\[4\\]": lambda: rms_norm_quantize_rowwise(x, torch.ones(3), eps=1e-6, format="int8"),
        "bias is \\(2, 4\\)": lambda: layer_norm_quantize_rowwise(
            x, None, torch.ones(2, 4), None, None, eps=1e-6, format="int8"
        ),
        "where B divides 6": lambda: layer_norm_quantize_rowwise(
            x, None, None, torch.ones(4, 4), None, eps=1e-6, format="int8"
        ),
        "must be equal": lambda: layer_norm_quantize_rowwise(
            x, None, None, torch.ones(1, 4), torch.ones(2, 4), eps=1e-6, format="int8"
        ),
        "allowed: silu, gelu, gelu_tanh": lambda: act_quantize_rowwise(x, None, act="relu", format="int8"),
        "up is \\(4,\\)": lambda: act_quantize_rowwise(x, torch.ones(4), act="silu", format="int8"),
        "allowed: int8, fp8_e4m3": lambda: act_quantize_rowwise(x, None, act="silu", format="int4"),
        "one torch.int64": lambda: quantize_rowwise(x, torch.tensor([1, 2]), format="int8"),
        "seed is torch.int32": lambda: quantize_rowwise(x, torch.tensor(1, dtype=torch.int32), format="int8"),
    }
    for message, call in bad.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_gelu_of_torch():
    x = normal(4, 100)
    for act, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        codes, scale = act_quantize_rowwise(x, None, act=act, format="int8")
        expected, expected_scale = quantize_rowwise(F.gelu(x, approximate=approximate), format="int8")
        assert torch.equal(codes, expected) and torch.equal(scale, expected_scale)
