"""`fake_quantize`: a weight as it would be stored with given scales, in its own dtype, and the gradients through that.

Rounding has no derivative: the gradient passes through it unchanged where the weight is not clipped (Bengio et al.,
https://arxiv.org/abs/1308.3432). That of the scale: Esser et al., "Learned step size quantization",
https://arxiv.org/abs/1902.08153.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, CodeSpec, expand_scale
from hf_quant.kernels.dispatch import define_op


class Bounds(NamedTuple):
    """Bounds of a grid.

    Attributes:
        low, high: its smallest and its largest value.
        inside_low, inside_high: half a step beyond them; what is further away is clipped.
    """

    low: float
    high: float
    inside_low: float
    inside_high: float


@cache
def bounds(format: str) -> Bounds:
    """The bounds of a format's grid. Symmetric int8 has no -128, as in `formats`."""
    spec = CODES[format]
    if spec.is_packed:
        levels = sorted(set(spec.levels))
    elif spec.minifloat is None:
        levels = [-127.0, -126.0, 126.0, 127.0]
    else:
        info, step = torch.finfo(spec.dtype), 2.0 ** -spec.minifloat[1]
        power = 2.0 ** (2 ** spec.minifloat[0] - 1 - spec.minifloat[2] - (spec.name == "fp8_e5m2"))
        levels = [-info.max, power * step - info.max, info.max - power * step, info.max]
    low, high = levels[0], levels[-1]
    return Bounds(low, high, low - (levels[1] - low) / 2, high + (high - levels[-2]) / 2)


def nearest(values: Tensor, zero: Tensor | None, spec: CodeSpec) -> Tensor:
    """fp32 values in units of the scale -> the nearest of the grid, half to even (of 16 levels: to the lower).

    `zero`, the grid value of weight 0, of an integer format is added to the rounded values and taken off the result.
    """
    low, high, *_ = bounds(spec.name)
    if spec.is_integer:
        if zero is None:
            return values.round().clamp(low, high) + 0.0  # no negative zero, which integers do not have
        return (values.round() + zero).clamp(low, high) - zero
    if spec.minifloat is not None:
        _, mantissa_bits, bias = spec.minifloat
        _, exponent = torch.frexp(values)  # of values from half of 2**exponent on
        step = torch.ldexp(torch.ones_like(values), exponent.clamp(min=2 - bias) - 1 - mantissa_bits)
        return ((values / step).round() * step).clamp(low, high)
    levels = torch.tensor(sorted(set(spec.levels)), dtype=torch.float64, device=values.device)
    return levels.float()[torch.bucketize(values, ((levels[1:] + levels[:-1]) / 2).float())]


def check(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, format: str, group_size: int, grad: Tensor | None = None
) -> None:
    """Raise ValueError unless all is as `fake_quantize_reference` and its backward describe."""
    spec = CODES.get(format)
    if spec is None:
        raise ValueError(f"format is {format!r}; known: {', '.join(CODES)}")
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}; needs a floating-point [..., N, K]")
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; needs at least 1")
    shape = (*weight.shape[:-1], -(-weight.shape[-1] // group_size))
    if scale.shape != shape or scale.dtype != torch.float32:
        raise ValueError(
            f"scale is {tuple(scale.shape)} {scale.dtype}; {tuple(weight.shape)} in groups of {group_size} needs "
            f"{shape} torch.float32"
        )
    if zero_point is not None:
        if zero_point.shape != shape or zero_point.dtype != torch.uint8:
            raise ValueError(
                f"zero_point is {tuple(zero_point.shape)} {zero_point.dtype}; needs {shape} torch.uint8, as scale"
            )
        if not (spec.is_packed and spec.is_integer):
            raise ValueError(f"{format} has no zero point")
    if grad is not None and (grad.shape != weight.shape or not grad.is_floating_point()):
        raise ValueError(f"grad is {tuple(grad.shape)} {grad.dtype}; needs {tuple(weight.shape)}, as weight")


def _parts(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, spec: CodeSpec, group_size: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The weight in units of the scale, the grid value of weight 0, and the level of the weight counted from it."""
    N, K = weight.shape[-2:]
    relative = weight.float() / expand_scale(scale, N, K, group_size)
    zero = None
    if zero_point is not None:
        zero = expand_scale(zero_point.float() - 2 ** (spec.bits - 1), N, K, group_size)
    return relative, zero, nearest(relative, zero, spec)


def fake_quantize_reference(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, *, format: str, group_size: int
) -> Tensor:
    """weight [..., N, K] -> the value of its nearest code, level * scale, [..., N, K] in its dtype.

    scale: fp32 [..., N, ceil(K / group_size)], with global scales in it; it may be negative. zero_point: uint8 of
    scale's shape, or None. What is computed is `dequantize` of the codes that these scales give, bit for bit. Not
    differentiable: its gradients are `fake_quantize_backward`.
    """
    check(weight, scale, zero_point, format, group_size)
    _, _, level = _parts(weight, scale, zero_point, CODES[format], group_size)
    return (level * expand_scale(scale, *weight.shape[-2:], group_size)).to(weight.dtype)


def fake_quantize_backward_reference(
    grad: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, *, format: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """grad of the result [..., N, K] -> the gradients of weight [..., N, K], in its dtype, and of scale, in fp32.

    A weight is inside of the grid unless it is more than half a step beyond its ends. grad_weight is grad inside, else
    0. grad_scale is the sum over a group of grad * (level - [inside] * weight / scale); each product in fp32, the sum
    in fp64.
    """
    check(weight, scale, zero_point, format, group_size, grad)
    spec = CODES[format]
    relative, zero, level = _parts(weight, scale, zero_point, spec, group_size)
    on_grid = relative if zero is None else relative + zero
    limits = bounds(format)
    inside = (on_grid >= limits.inside_low) & (on_grid <= limits.inside_high)
    gradient = grad.float()
    terms = gradient * (level - torch.where(inside, relative, 0.0))
    groups = torch.nn.functional.pad(terms, (0, -weight.shape[-1] % group_size)).unflatten(-1, (-1, group_size))
    return torch.where(inside, gradient, 0.0).to(weight.dtype), groups.sum(-1, dtype=torch.float64).float()


def _fake_quantize_fake(weight, scale, zero_point, *, format, group_size):
    check(weight, scale, zero_point, format, group_size)
    return weight.new_empty(weight.shape)


def _fake_quantize_backward_fake(grad, weight, scale, zero_point, *, format, group_size):
    check(weight, scale, zero_point, format, group_size, grad)
    return weight.new_empty(weight.shape), scale.new_empty(scale.shape)


fake_quantize = define_op("fake_quantize", fake_quantize_reference, _fake_quantize_fake)
fake_quantize_backward = define_op(
    "fake_quantize_backward", fake_quantize_backward_reference, _fake_quantize_backward_fake
)
