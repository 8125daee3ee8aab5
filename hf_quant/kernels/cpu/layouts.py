"""What the CPU paths prepack: builders for the cache of `kernels.cpu.prepack`, each called once per weight."""

import torch
from torch import Tensor

from hf_quant.kernels.codes import CodeSpec
from hf_quant.kernels.cpu.decode import (
    code_bytes,
    code_values,
    expand_rows,
    mapped_codes,
    scale_values,
    weight_block,
)


# level = a * p + b * q with p, q in -8..7 (chosen nearest): exact for e2m1; nf4 within 2**-9 of its rms, as bf16 is.
# The pair for nf4 is the best of a search over 1.5 million.
TERMS = {"nf4": (0.13915411, 0.02673128), "mxfp4": (2.0, 0.5), "nvfp4": (2.0, 0.5)}

_ROWS = 256  # rows unpacked at a time


def dequantized(
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    spec: CodeSpec,
    group_size: int,
    K: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [N, K] in `dtype`, rounded once."""
    N = qdata.shape[0]
    factor = expand_rows(scale_values(scale, global_scale), N).float()
    zero_point = None if zero_point is None else expand_rows(zero_point, N)
    block = weight_block(qdata, factor, zero_point, spec, group_size, K, dtype, N)
    block.fill(0)
    return block.rows.clone()


def pack_qlinear(qdata: Tensor) -> Tensor:
    """int8 [N, K] in oneDNN's blocked layout: an opaque mkldnn tensor."""
    return torch.ops.onednn.qlinear_prepack(qdata.contiguous(), None)


def int4pack_group(spec: CodeSpec, N: int, K: int, group_size: int) -> int | None:
    """The group size to pack with, it divides the weight's own; None if int4pack cannot take the weight."""
    if N % 16 or K % group_size:
        return None
    if spec.is_integer:
        return next((g for g in (256, 128, 64, 32) if group_size % g == 0), None)
    if spec.name not in TERMS:
        return None
    return next((2 * g for g in (128, 64, 32, 16) if group_size % g == 0), None)


def pack_int4(
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    spec: CodeSpec,
    K: int,
    group_size: int,
    group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, scales and zeros, terms) for `_weight_int4pack_mm_for_cpu`: w = (c - 8) * scale + zero, c in 0..15.

    int2 and int3 with a zero point have q - z in -7..7 and need no zero; int4 has, rounded to bf16. A codebook format
    becomes two terms, columns [K / g, 2, g] with g = group / 2, where x * terms is wanted.
    """
    N = qdata.shape[0]
    zero_point = None if zero_point is None else expand_rows(zero_point, N)
    packed = None
    for start in range(0, N, _ROWS):
        rows = slice(start, start + _ROWS)
        if not spec.is_integer:
            parts = [mapped_codes(qdata[rows], spec, i, column) for i, column in enumerate(_term_codes(spec))]
            codes = torch.stack([part[:, :K].unflatten(1, (-1, group // 2)) for part in parts], 2)
        else:
            codes = code_bytes(qdata[rows], spec)[:, :K]
            if zero_point is None:
                codes = codes + (8 - 2 ** (spec.bits - 1))
            elif spec.bits < 4:
                codes = codes + 8 - zero_point[rows].to(torch.int8).repeat_interleave(group_size, 1)
        words = torch._convert_weight_to_int4pack_for_cpu(codes.flatten(1).int(), 1)
        if packed is None:
            packed = words.new_empty(N, words.shape[1])
        packed[rows] = words
    factor = expand_rows(scale_values(scale, global_scale), N).float()
    zero = torch.zeros_like(factor)
    if zero_point is not None and spec.bits == 4:
        zero = (8 - zero_point.float()) * factor
    repeat = group_size // (group if spec.is_integer else group // 2)
    pairs = torch.stack([factor, zero], -1).repeat_interleave(repeat, 1)
    terms = torch.tensor(TERMS.get(spec.name, ())).unsqueeze(-1)
    return packed, pairs.transpose(0, 1).to(torch.bfloat16).contiguous(), terms


def _term_codes(spec: CodeSpec) -> Tensor:
    """[2, 16] int8 in 0..15: the p and q, offset by 8, whose a * p + b * q is nearest to each level.

    Of equally near ones the smallest, so that zero is two zeros and not a difference.
    """
    grid = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8))
    sums = grid.double() @ torch.tensor(TERMS[spec.name], dtype=torch.float64)
    distance = (sums[None, :] - torch.tensor(spec.levels, dtype=torch.float64)[:, None]).abs()
    nearest = (distance + 1e-6 * grid.square().sum(1)).argmin(1)
    return (grid[nearest] + 8).to(torch.int8).t()


def trust_float8(qdata: Tensor, group_size: int) -> str:
    """Whether fp8 codes can be shifted into bf16: "no" (NaN or inf), "finite", or "normal".

    bf16 GEMMs take for zero what subnormal codes become. "normal" means that this changes no group by over 2**-10 of
    its norm, judged by its number of subnormals and its largest code: where a scale fits its own group there are few
    beside a large one, but one outlier may set the scale of many rows.
    """
    values = torch.arange(128, dtype=torch.uint8).view(qdata.dtype).float()
    smallest = torch.finfo(qdata.dtype).smallest_normal
    num_subnormal = int((values < smallest).sum()) - 1  # they are the codes from 1 on
    K, trust = qdata.shape[1], "normal"
    whole = K // group_size * group_size
    for codes in qdata.view(torch.int8).split(_ROWS):
        magnitudes = codes & 127
        subnormal = torch.lt((magnitudes - 1).view(torch.uint8), num_subnormal, out=torch.empty(codes.shape))
        for first, last, size in ((0, whole, group_size), (whole, K, K - whole)):
            if first < last:
                top = values[magnitudes[:, first:last].unflatten(1, (-1, size)).amax(-1).int()]
                if not bool(top.isfinite().all()):
                    return "no"
                count = subnormal[:, first:last].unflatten(1, (-1, size)).sum(-1)
                if bool((count * smallest**2 > top.square() * 2.0**-20).any()):
                    trust = "finite"
    return trust


def expand_to_fp8(qdata: Tensor, spec: CodeSpec, K: int) -> Tensor:
    """fp6 codes -> fp8_e4m3 [N, K]: every value of either fp6 is a normal number (or zero) of e4m3."""
    values = code_values(spec).to(torch.float8_e4m3fn).view(torch.uint8)
    out = torch.empty(qdata.shape[0], K, dtype=torch.uint8)
    for start in range(0, out.shape[0], _ROWS):
        codes = code_bytes(qdata[start : start + _ROWS], spec)[:, :K]
        out[start : start + _ROWS] = values[codes.int()]
    return out.view(torch.float8_e4m3fn)


def have_middle_exponents(scale: Tensor) -> bool:
    """Whether e8m0 scales are so far from the ends of bf16's range that `exponent_block` can take them."""
    low, high = scale.view(torch.uint8).aminmax()
    return 127 - 63 <= int(low) and int(high) <= 127 + 60
