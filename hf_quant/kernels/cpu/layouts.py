"""Layouts of weights that torch's own CPU kernels read. Each function here is called once for a weight."""

import torch
from torch import Tensor

from hf_quant.kernels.codes import CodeSpec, expand_rows
from hf_quant.kernels.cpu.decode import code_bytes, mapped_codes, scale_values, weight_block
from hf_quant.kernels.weight import Weight


# level = a * p + b * q with p, q in -8..7 (chosen nearest): exact for e2m1; nf4 within 2**-9 of its rms, as bf16 is.
# The pair for nf4 is the best of a search over 1.5 million.
TERMS = {"nf4": (0.13915411, 0.02673128), "mxfp4": (2.0, 0.5), "nvfp4": (2.0, 0.5)}

_ROWS = 256  # rows unpacked at a time


def dequantized(w: Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype`, rounded once."""
    factor = expand_rows(scale_values(w.scale, w.global_scale), w.N).float()
    block = weight_block(w, factor, dtype, w.N)
    block.fill(0)
    return block.rows.clone()


def pack_qlinear(qdata: Tensor) -> Tensor:
    """int8 [N, K] in oneDNN's blocked layout: an opaque mkldnn tensor."""
    return torch.ops.onednn.qlinear_prepack(qdata.contiguous(), None)


def int4pack_group(spec: CodeSpec, N: int, K: int, group_size: int) -> int | None:
    """The group size to pack with, a divisor of the weight's own; None if int4pack cannot take the weight."""
    if spec.bits > 4 or N % 16 or K % group_size or not (spec.is_integer or spec.name in TERMS):
        return None
    group = next((g for g in (256, 128, 64, 32, 16) if group_size % g == 0), 1)
    if not spec.is_integer:  # two terms for each column: groups of twice as many, at most 256
        group = 2 * min(group, 128)
    return group if group >= 32 else None


def pack_int4(w: Weight, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, scales and zeros, terms) for `_weight_int4pack_mm_for_cpu`: w = (c - 8) * scale + zero, c in 0..15.

    int2 and int3 with a zero point have q - z in -7..7 and need no zero; int4 has, rounded to bf16. A codebook format
    becomes two terms, columns [K / g, 2, g] with g = group / 2, where x * terms is wanted.
    """
    spec, packed = w.spec, None
    zero_point = None if w.zero_point is None else expand_rows(w.zero_point, w.N)
    for start in range(0, w.N, _ROWS):
        rows = slice(start, start + _ROWS)
        if not spec.is_integer:
            parts = [mapped_codes(w.qdata[rows], spec, i, column) for i, column in enumerate(_term_codes(spec))]
            codes = torch.stack([part[:, : w.K].unflatten(1, (-1, group // 2)) for part in parts], 2)
        else:
            codes = code_bytes(w.qdata[rows], spec)[:, : w.K]
            if zero_point is None:
                codes = codes + (8 - 2 ** (spec.bits - 1))
            elif spec.bits < 4:
                codes = codes + 8 - zero_point[rows].to(torch.int8).repeat_interleave(w.group_size, 1)
        words = torch._convert_weight_to_int4pack_for_cpu(codes.flatten(1).int(), 1)
        if packed is None:
            packed = words.new_empty(w.N, words.shape[1])
        packed[rows] = words
    factor = expand_rows(scale_values(w.scale, w.global_scale), w.N).float()
    zero = torch.zeros_like(factor)
    if zero_point is not None and spec.bits == 4:
        zero = (8 - zero_point.float()) * factor
    repeat = w.group_size // (group if spec.is_integer else group // 2)
    pairs = torch.stack([factor, zero], -1).repeat_interleave(repeat, 1)
    terms = torch.tensor(TERMS.get(spec.name, ()), dtype=torch.float32).unsqueeze(-1)
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


def have_middle_exponents(scale: Tensor) -> bool:
    """True if e8m0 scales are so far from the ends of bf16's range that `exponent_block` can take them."""
    low, high = scale.view(torch.uint8).aminmax()
    return 127 - 63 <= int(low) and int(high) <= 127 + 60
