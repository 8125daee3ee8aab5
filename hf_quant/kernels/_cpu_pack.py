"""What the CPU paths prepack: builders for the cache of `kernels._cpu`, each called once per weight."""

import torch
from torch import Tensor

from hf_quant.kernels._cpu_decode import code_bytes, code_values, expand_rows, level_block, scale_values
from hf_quant.kernels.codes import CODES, CodeSpec


# level = a * p + b * q with p, q in -8..7 (chosen nearest): exact for e2m1; nf4 within 2**-9 of its rms, as bf16 is.
# The pair for nf4 is the best of a search over 1.5 million.
TERMS = {"nf4": (0.13915411, 0.02673128), "mxfp4": (2.0, 0.5), "nvfp4": (2.0, 0.5)}

_ROWS = 256  # rows unpacked at a time


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
        codes = code_bytes(qdata[rows], spec)[:, :K]
        if not spec.is_integer:
            codes = _term_codes(spec)[codes.int()].view(-1, K // (group // 2), group // 2, 2).transpose(2, 3)
        elif zero_point is None:
            codes = codes + (8 - 2 ** (spec.bits - 1))
        elif spec.bits < 4:
            codes = codes + 8 - zero_point[rows].to(torch.int8).repeat_interleave(group_size, 1)
        words = torch._convert_weight_to_int4pack_for_cpu(codes.reshape(codes.shape[0], -1).int(), 1)
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
    """[16, 2] int8 in 0..15: the p and q, offset by 8, whose a * p + b * q is nearest to each level."""
    grid = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8))
    sums = grid.double() @ torch.tensor(TERMS[spec.name], dtype=torch.float64)
    nearest = (sums[None, :] - torch.tensor(spec.levels, dtype=torch.float64)[:, None]).abs().argmin(1)
    return (grid[nearest] + 8).to(torch.int8)


def trust_float8(qdata: Tensor, group_size: int) -> str:
    """Whether fp8 codes can be shifted into bf16: "no" (NaN or inf), "finite", or "normal".

    bf16 GEMMs take for zero what subnormal codes become. "normal" means that this changes no group by over 2**-10 of
    its norm; where a scale fits its own group it cannot, but one outlier may set the scale of many rows.
    """
    smallest = torch.finfo(qdata.dtype).smallest_normal
    spec = next(s for s in CODES.values() if s.dtype == qdata.dtype)
    trust = "normal"
    for codes in qdata.split(_ROWS):
        block = level_block(codes, spec, codes.shape[1], torch.float32, codes.shape[0])
        block.fill(0)
        squares = block.rows.square_()
        for group in squares.split(group_size, 1):
            total = group.sum(1)
            if not bool(total.isfinite().all()):
                return "no"
            lost = group.masked_fill(group >= smallest**2, 0).sum(1)
            if bool((lost > total * 2.0**-20).any()):
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
