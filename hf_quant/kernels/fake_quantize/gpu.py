"""`fake_quantize` and its backward in Triton: one kernel, which reads and writes each value once.

A program takes some groups, or one of more than 2048 values (NVIDIA's backward: 1024) in several steps, and so needs
no second pass for the gradient of a scale. Memory bounds it: 4 bytes a weight forward and 6 backward in bf16. Levels
are those of the reference, bit for bit; the gradient of a scale is summed in fp32.
"""

from functools import lru_cache

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, CodeSpec
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.fake_quantize import op
from hf_quant.kernels.gpu.launch import launch, target_of, tl, triton, unavailable_reason


_VALUES = 2048  # of a program at a time: 16 bytes of bf16 a lane, also where a warp has 64 lanes


@triton.jit
def _level(
    x,
    zero,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    NORMAL: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The level nearest to x, counted from `zero` if the format has integers."""
    if KIND == "integer":
        # Adding 1.5 * 2**23 rounds to an integer; what is beyond 1024 is beyond every grid.
        rounded = tl.minimum(tl.maximum(x, -1024.0), 1024.0) + 12582912.0 - 12582912.0
        level = tl.minimum(tl.maximum(rounded + zero, LOW), HIGH) - zero
    elif KIND == "minifloat":
        # 1.5 * 2**23 quanta of the binade of a magnitude.
        magnitude = tl.minimum(tl.abs(x), HIGH)
        binade = tl.maximum(magnitude.to(tl.int32, bitcast=True), NORMAL) & 0x7F800000
        quanta = (binade + ((23 - MANTISSA) << 23) + 0x400000).to(tl.float32, bitcast=True)
        level = magnitude + quanta - quanta
        level = tl.where(x < 0, level * -1.0, level)  # -level would be 0 - level, which loses the sign of zero
    else:
        level = tl.zeros_like(x) + TABLE[0]
        for i in tl.static_range(15):
            level = tl.where(x > TABLE[16 + i], TABLE[1 + i], level)
    return level


@triton.jit
def _fake_quantize_kernel(
    weight,
    scale,
    zero_point,
    grad,
    result,
    grad_scale,
    count,
    groups,
    K,
    group_size,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    INSIDE_LOW: tl.constexpr,
    INSIDE_HIGH: tl.constexpr,
    OFFSET: tl.constexpr,  # of zero points
    MANTISSA: tl.constexpr,
    NORMAL: tl.constexpr,  # bits of the smallest normal magnitude
    TABLE: tl.constexpr,  # 16 levels, and the 15 midpoints between them
    EVEN: tl.constexpr,  # groups are multiples of C, and of 16, and rows of groups
    R: tl.constexpr,
    C: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_group = group < count
    first = (group % groups) * group_size
    row = (group // groups) * K
    end = tl.minimum(first + group_size, K)
    s = tl.load(scale + group, mask=is_group, other=1.0)[:, None]
    if zero_point is None:
        zero = 0.0
    else:
        zero = (tl.load(zero_point + group, mask=is_group, other=0).to(tl.float32) - OFFSET)[:, None]
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, group_size, C):
        column = first[:, None] + start + tl.arange(0, C)[None, :]
        offsets = row[:, None] + column
        if EVEN:
            offsets = tl.multiple_of(offsets, (1, 16))
            mask = is_group[:, None]
        else:
            mask = is_group[:, None] & (column < end[:, None])
        x = tl.div_rn(tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32), s + tl.zeros([R, C], tl.float32))
        level = _level(x, zero, KIND, LOW, HIGH, MANTISSA, NORMAL, TABLE)
        if grad is None:
            value = level * s
        else:
            g = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
            inside = (x + zero >= INSIDE_LOW) & (x + zero <= INSIDE_HIGH)
            total += g * (level - tl.where(inside, x, 0.0))
            value = tl.where(inside, g, 0.0)
        tl.store(result + offsets, value.to(result.dtype.element_ty), mask=mask)
    if grad is not None:
        tl.store(grad_scale + group, tl.sum(total, 1), mask=is_group)


@implements(op.fake_quantize, "XPU")
@implements(op.fake_quantize, "CUDA")
def fake_quantize_gpu(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, *, format: str, group_size: int
) -> Tensor:
    """Compute `fake_quantize_reference`, bit for bit."""
    options = {"format": format, "group_size": group_size}
    op.check(weight, scale, zero_point, **options)
    if not _serves(weight, CODES[format]):
        return op.fake_quantize_reference(weight, scale, zero_point, **options)
    return _launch(weight, scale, zero_point, None, **options)[0]


@implements(op.fake_quantize_backward, "XPU")
@implements(op.fake_quantize_backward, "CUDA")
def fake_quantize_backward_gpu(
    grad: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, *, format: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """Compute `fake_quantize_backward_reference`; the gradient of the scale in another order of summing up."""
    options = {"format": format, "group_size": group_size}
    op.check(weight, scale, zero_point, **options, grad=grad)
    if not _serves(weight, CODES[format]):
        return op.fake_quantize_backward_reference(grad, weight, scale, zero_point, **options)
    return _launch(weight, scale, zero_point, grad, **options)


def _serves(weight: Tensor, spec: CodeSpec) -> bool:
    is_kind = spec.is_integer or spec.minifloat is not None or len(set(spec.levels)) == 16
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return is_kind and weight.dtype in floats and weight.numel() > 0 and unavailable_reason(weight.device) is None


def _launch(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, grad: Tensor | None, format: str, group_size: int
) -> tuple[Tensor, Tensor]:
    spec, limits = CODES[format], op.bounds(format)
    weight, scale = weight.contiguous(), scale.contiguous()
    result = torch.empty_like(weight)
    grad_scale = torch.empty_like(scale) if grad is not None else scale
    K, is_table = weight.shape[-1], not spec.is_integer and spec.minifloat is None
    group_size = min(group_size, K)
    is_even = K % group_size == 0 and group_size % min(triton.next_power_of_2(group_size), _VALUES) == 0
    is_even = is_even and group_size % 16 == 0
    # An access for each value takes more registers, and so does the backward: Triton 3.6 spills 16 of mxfp4 (sm120).
    takes_more = not is_even or (grad is not None and target_of(weight.device).is_nvidia)
    values = _VALUES // 2 if takes_more else _VALUES
    C = min(triton.next_power_of_2(group_size), values)
    _, mantissa_bits, bias = spec.minifloat or (0, 0, 0)
    launch(
        _fake_quantize_kernel,
        (triton.cdiv(scale.numel(), values // C),),
        weight,
        scale,
        None if zero_point is None else zero_point.contiguous(),
        None if grad is None else grad.contiguous(),
        result,
        grad_scale,
        scale.numel(),
        scale.shape[-1],
        K,
        group_size,
        KIND="table" if is_table else "integer" if spec.is_integer else "minifloat",
        LOW=limits.low,
        HIGH=limits.high,
        INSIDE_LOW=limits.inside_low,
        INSIDE_HIGH=limits.inside_high,
        OFFSET=2.0 ** (spec.bits - 1),
        MANTISSA=mantissa_bits,
        NORMAL=(128 - bias) << 23,
        TABLE=_table(format) if is_table else (),
        EVEN=is_even,
        R=values // C,
        C=C,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return result, grad_scale


@lru_cache(maxsize=16)
def _table(format: str) -> tuple[float, ...]:
    """The 16 levels, ascending, then the midpoints between them, each rounded to fp32."""
    levels = torch.tensor(sorted(CODES[format].levels), dtype=torch.float64, device="cpu")
    return tuple(torch.cat([levels, (levels[1:] + levels[:-1]) / 2]).float().tolist())
