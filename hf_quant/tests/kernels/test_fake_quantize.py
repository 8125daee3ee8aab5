"""Weights as they would be stored: against the codes of the formats, derivatives, and every backend."""

import pytest
import torch
from torch import Tensor

from hf_quant.algorithms import quantize_matrix
from hf_quant.formats import FORMATS
from hf_quant.kernels import dequantize, fake_quantize, fake_quantize_backward, native
from hf_quant.kernels.codes import CODES, expand_scale
from hf_quant.kernels.fake_quantize import gpu, op
from hf_quant.scheme import TensorQuant


pytestmark = pytest.mark.usefixtures("poison_empty")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = (32, 17, 300)  # of rows of 300: a last one that is shorter, odd sizes, and whole rows


def arguments(format: str, dtype: torch.dtype, group_size: int, *, has_zero: bool = False, K: int = 300) -> list:
    """grad, weight, scale and zero point; a part of the weights is clipped, and half of the scales are negative."""
    generator = torch.Generator().manual_seed(0)
    shape, groups = (2, 37, K), -(-K // group_size)
    weight, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    scale = (torch.rand(2, 37, groups, generator=generator) + 0.3) * 2 / op.bounds(format).high
    scale *= torch.where(torch.rand(scale.shape, generator=generator) > 0.5, 1.0, -1.0)
    zero = torch.randint(0, 2 ** CODES[format].bits, scale.shape, dtype=torch.uint8, generator=generator)
    return [grad, weight, scale, zero if has_zero else None]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def has_zero_point(format: str) -> bool:
    return CODES[format].is_packed and CODES[format].is_integer


def cases() -> list:
    return [(f, zero) for f in CODES for zero in (False, True) if not zero or has_zero_point(f)]


@pytest.mark.parametrize(("format", "has_zero"), cases())
def test_every_instruction_set_gives_the_bits_of_the_reference(format, has_zero):
    for dtype in DTYPES:
        for group_size in GROUPS:
            grad, *rest = arguments(format, dtype, group_size, has_zero=has_zero)
            options = {"format": format, "group_size": group_size}
            expected = op.fake_quantize_reference(*rest, **options)
            gradients = op.fake_quantize_backward_reference(grad, *rest, **options)
            for name in (None, *native.instruction_sets()):
                with native.using(name):
                    assert same_bits(fake_quantize(*rest, **options), expected), (name, dtype, group_size)
                    found = fake_quantize_backward(grad, *rest, **options)
                assert all(map(same_bits, found, gradients)), (name, dtype, group_size)


@pytest.mark.parametrize(("format", "has_zero"), cases())
def test_the_gpu_kernel_gives_the_reference(format, has_zero):
    for dtype, group_size, K in ((torch.bfloat16, 32, 300), (torch.float32, 17, 100), (torch.float16, 1100, 1100)):
        grad, *rest = arguments(format, dtype, group_size, has_zero=has_zero, K=K)
        rest = [None if part is None else part[:, :3].contiguous() for part in rest]
        options = {"format": format, "group_size": group_size}
        assert same_bits(gpu.fake_quantize_gpu(*rest, **options), op.fake_quantize_reference(*rest, **options))
        found = gpu.fake_quantize_backward_gpu(grad[:, :3], *rest, **options)
        expected = op.fake_quantize_backward_reference(grad[:, :3], *rest, **options)
        assert same_bits(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4 * op.bounds(format).high)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_is_the_value_of_the_codes(format, symmetric):
    """The algorithms are all that take the nearest codes; the weights are random, or lie between two codes."""
    if not symmetric and not has_zero_point(format):
        pytest.skip("the format has no zero point")
    group_size = FORMATS[format].group_size or 64
    scale_dtype = {"mxfp4": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn"}.get(format, "bfloat16")
    quant = TensorQuant(format, "group", group_size, symmetric, scale_dtype)
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(1))
    packed = quantize_matrix(weight, quant, "mse")
    scale = packed.scale.float()
    if packed.global_scale is not None:
        scale = scale * packed.global_scale
    options = {"format": format, "group_size": group_size}
    for dtype in DTYPES:
        found = fake_quantize(weight, scale, packed.zero_point, **options).to(dtype)
        assert same_bits(found, dequantize(*packed, **options, K=192, dtype=dtype))
    wrong = fake_quantize(weight, scale * (1 + 2**-7), packed.zero_point, **options)  # one ulp of bf16
    assert not torch.equal(wrong, dequantize(*packed, **options, K=192, dtype=torch.float32))
    half = expand_scale(scale, 64, 192, group_size) * (torch.arange(192) % 9 - 4.5)
    relative = half / expand_scale(scale, 64, 192, group_size)
    snapped = FORMATS[format].snap(relative.clone(), torch.empty_like(relative))
    if packed.zero_point is None:
        assert torch.equal(
            fake_quantize(half, scale, None, **options), snapped * expand_scale(scale, 64, 192, group_size)
        )


@pytest.mark.parametrize(("format", "has_zero"), cases())
def test_the_gradients_are_straight_through(format, has_zero):
    """Autograd gives the reference: the same sums, with the rounding taken as a constant."""
    grad, weight, scale, zero = arguments(format, torch.float32, 32, has_zero=has_zero)
    K = weight.shape[-1]
    w, s = weight.double().requires_grad_(), scale.double().requires_grad_()
    wide = expand_scale(s, 37, K, 32)
    relative = w / wide
    offset = 0.0 if zero is None else expand_scale(zero.double() - 2 ** (CODES[format].bits - 1), 37, K, 32)
    limits = op.bounds(format)
    level = (
        fake_quantize(weight, scale, zero, format=format, group_size=32) / expand_scale(scale, 37, K, 32)
    ).double()
    inside = (relative + offset > limits.inside_low) & (relative + offset < limits.inside_high)
    assert 0.01 < (~inside).float().mean() < 0.6
    straight = torch.where(inside, relative + (level - relative).detach(), level)
    (straight * wide).backward(grad.double())
    found = fake_quantize_backward(grad, weight, scale, zero, format=format, group_size=32)
    torch.testing.assert_close(found[0].double(), w.grad, rtol=1e-5, atol=1e-6)
    limit = 1e-5 * limits.high
    torch.testing.assert_close(found[1].double(), s.grad, rtol=1e-4, atol=limit)
    assert not torch.allclose(found[1].double().roll(1, -1), s.grad, rtol=1e-4, atol=limit)
    assert not torch.allclose(found[0], grad)


def test_the_ends_of_the_grids():
    """A value half a step beyond the last level counts as inside."""
    assert op.bounds("int4") == (-8, 7, -8.5, 7.5)
    assert op.bounds("int8") == (-127, 127, -127.5, 127.5)
    assert op.bounds("fp8_e4m3") == (-448, 448, -464, 464)
    assert op.bounds("fp8_e5m2") == (-57344, 57344, -61440, 61440)
    assert op.bounds("mxfp4") == (-6, 6, -7, 7)
    weight = torch.tensor([[-9.0, -8.4, 7.4, 7.6]])
    found = fake_quantize_backward(torch.ones(1, 4), weight, torch.ones(1, 1), None, format="int4", group_size=4)
    assert found[0].tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert found[1].item() == pytest.approx((-8) + (-8 + 8.4) + (7 - 7.4) + 7, abs=1e-5)


def test_the_ops_are_well_defined():
    grad, *rest = arguments("int4", torch.bfloat16, 32, has_zero=True)
    options = {"format": "int4", "group_size": 32}
    torch.library.opcheck(fake_quantize, tuple(rest), options)
    torch.library.opcheck(fake_quantize_backward, (grad, *rest), options)
    strided = [grad.transpose(0, 1).contiguous().transpose(0, 1), *rest]
    assert all(
        map(torch.equal, fake_quantize_backward(*strided, **options), fake_quantize_backward(grad, *rest, **options))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int5"}, "format is 'int5'; known: int8"),
        ({"group_size": 0}, "group_size is 0"),
        ({"scale": torch.ones(4, 2)}, r"scale is \(4, 2\) torch.float32; \(4, 64\) in groups of 16 needs \(4, 4\)"),
        ({"scale": torch.ones(4, 4).bfloat16()}, "needs .* torch.float32"),
        ({"zero_point": torch.ones(4, 4)}, "zero_point is .* torch.float32; needs .* torch.uint8"),
        ({"format": "nf4", "zero_point": torch.ones(4, 4, dtype=torch.uint8)}, "nf4 has no zero point"),
        ({"weight": torch.ones(4, 64, dtype=torch.int8)}, "needs a floating-point"),
    ],
)
def test_refusals(change, message):
    given: dict = {"weight": torch.ones(4, 64), "scale": torch.ones(4, 4), "zero_point": None}
    given |= {"format": "int4", "group_size": 16, **change}
    tensors: list[Tensor | None] = [given.pop(name) for name in ("weight", "scale", "zero_point")]
    with pytest.raises(ValueError, match=message):
        fake_quantize(*tensors, **given)
    with pytest.raises(ValueError, match=message):
        fake_quantize_backward(torch.ones(4, 64), *tensors, **given)
    with pytest.raises(ValueError, match="grad is"):
        fake_quantize_backward(
            torch.ones(4, 32), torch.ones(4, 64), torch.ones(4, 4), None, format="int4", group_size=16
        )
