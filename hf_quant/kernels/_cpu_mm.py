"""x @ dequant(w).T on CPU with stock torch ops: `product`, which the CPU backends of all matmul ops share.

Which path runs depends on the format and on M (a run-time value: the ops are opaque to torch.compile). `PATHS` tells
them apart for the plan; "from the second use" paths read a prepacked copy of the weight (see `kernels._cpu`).

Accuracy, bf16 input: weights are rounded to bf16 (their scales too), products accumulate in fp32, the output is
rounded to bf16; where one scale serves a whole row the weights are exact and the scale multiplies the output. fp16 and
fp32 input is computed in fp32 throughout: torch's fp16 GEMM is no faster on CPUs without AVX512-FP16.
"""

import torch
from torch import Tensor

from hf_quant.kernels._cpu import prepacked, scratch
from hf_quant.kernels._cpu_decode import (
    code_bytes,
    code_values,
    decode,
    dequantize_block,
    expand_rows,
    is_table_decoded,
    padded,
    scale_values,
)
from hf_quant.kernels._op import Path, Problem
from hf_quant.kernels.codes import CODES, CodeSpec


_BLOCK = 2**20  # weights dequantized at once: 2 MB in bf16, the L2 caches of two cores
_VNNI = torch.cpu._is_vnni_supported()
# Largest M of the paths that lose to dequantizing from there on (14336 x 4096, one core of Zen 5).
_SMALL_M = {"int8pack": 4, "split": 256, "int4pack": 32, "terms": 16, "groups": 16, "fp6": 256}
# fp8 codes become bf16 by: sign-extend to 16 bits, shift left, mask; that is the value times 2**-exponent.
_SHIFTS = {torch.float8_e4m3fn: (4, -0x7810, 120), torch.float8_e5m2: (5, -0x7020, 112)}
# level = a * p + b * q with p, q in -8..7 (chosen nearest): exact for e2m1; nf4 within 2**-9 of its rms, as bf16 is.
_TERMS = {"nf4": (0.13915411, 0.02673128), "mxfp4": (2.0, 0.5), "nvfp4": (2.0, 0.5)}


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K], contiguous, without autograd (what `out=` needs)."""
    if x.requires_grad:
        x = x.detach()
    return x if x.dim() == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()


def product(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    spec: CodeSpec,
    group_size: int,
) -> Tensor:
    """x [M, K] contiguous @ dequant(w [N, K]).T + bias [N] -> [M, N] in x's dtype; the arguments have been checked."""
    M = x.shape[0]
    bf16, one_scale = x.dtype == torch.bfloat16, scale.shape[1] == 1
    y = None
    if M == 0:
        return x.new_empty(0, qdata.shape[0])
    if spec.dtype == torch.int8 and one_scale:
        y = _int8(x, qdata, scale, bias)
    elif not bf16:
        pass
    elif spec.bits <= 4:
        if M <= _SMALL_M["int4pack" if spec.is_integer else "terms"]:
            y = _int4pack(x, qdata, scale, zero_point, global_scale, bias, spec, group_size)
    elif one_scale:
        y = _shifted(x, qdata, scale, bias, spec)
    elif M <= _SMALL_M["groups"]:
        y = _by_groups(x, qdata, scale, bias, spec, group_size)
    if y is None:
        y = _blocks(x, qdata, scale, zero_point, global_scale, bias, spec, group_size)
    return y


# int8 with one scale per row


def _int8(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
    M, K = x.shape
    N = qdata.shape[0]
    bf16 = x.dtype == torch.bfloat16
    # Splitting x costs some 25 us of small ops: more than it saves on a small matrix at small M.
    if (not bf16 or M <= _SMALL_M["split"]) and (M > _SMALL_M["int8pack"] or N * K >= 2**21) and not no_qlinear(K):
        weight = prepacked("qlinear", (qdata,), pack_qlinear, qdata)
        if weight is not None:
            return _split(x, weight, row_vector(scale, N, torch.float32), bias, pieces=2 if bf16 else 3)
    # With K % 16 != 0 int8pack reads out of bounds: NaN, or a crash. It also loads 16 bytes by instructions that crash
    # at other addresses than multiples of 16 (M=4, torch 2.13); a mapped safetensors file has multiples of 8.
    if bf16 and M <= _SMALL_M["int8pack"] and K % 16 == 0:
        aligned = qdata if qdata.data_ptr() % 16 == 0 else prepacked("aligned", (qdata,), torch.clone, qdata)
        if aligned is not None:
            y = torch._weight_int8pack_mm(x, aligned, row_vector(scale, N, torch.bfloat16))
            return y if bias is None else y.add_(bias)
    return None


def row_vector(scale: Tensor, N: int, dtype: torch.dtype) -> Tensor:
    """Scales [N | 1, 1] -> [N], contiguous: torch's kernels ignore strides here."""
    return scale.to(dtype).reshape(-1) if scale.shape[0] == N else scale.to(dtype).repeat(N, 1).view(-1)


def no_qlinear(K: int) -> str | None:
    """Why oneDNN's int8 GEMM cannot be used, None if it can."""
    if not _VNNI:
        return "needs a CPU with VNNI: others saturate sums of pairs in 16 bits"
    return f"K={K} could overflow int32 sums; at most 65536" if K > 65536 else None


def pack_qlinear(qdata: Tensor) -> Tensor:
    """int8 [N, K] in oneDNN's blocked layout: an opaque mkldnn tensor."""
    return torch.ops.onednn.qlinear_prepack(qdata.contiguous(), None)


def qlinear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """(x - 128) [M, K] uint8 @ weight.T * scale [N] fp32 -> fp32 [M, N]; sums are exact.

    With int8 x oneDNN would silently run its reference code, 300 times slower.
    """
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 128, weight, scale, _no_zero_point(), None, 1.0, 0, torch.float32, "none", [], ""
    )


def _no_zero_point() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


def _split(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, pieces: int) -> Tensor:
    """x in fixed point with 8 * pieces bits, relative to each row's largest magnitude: one byte of it per GEMM row.

    The error, 2**-16 (2**-24) of the largest magnitude per element, stays below bf16's (fp32's) rounding of y for K up
    to 2**16 even where one element dominates its row.
    """
    M, K = x.shape
    offset = sum(128 << (8 * i) for i in range(pieces))  # every byte becomes uint8 with zero point 128
    limit = 2 ** (8 * pieces - 1) - 2 ** (8 * pieces - 8)  # a little less than fits, as x / unit may round up
    amax = torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True, dtype=torch.float32)
    unit = amax.div_(limit).clamp_(min=torch.finfo(torch.float32).tiny)
    fixed = scratch("fixed", (M, K), torch.float32)
    torch.div(fixed.copy_(x), unit, out=fixed).round_()
    integer = scratch("integer", (M, K), torch.int32).copy_(fixed).add_(offset)
    rows = scratch("rows", (pieces, M, K), torch.uint8)
    for i in reversed(range(pieces)):
        rows[i].copy_(integer)  # the conversion keeps the low byte
        integer >>= 8
    sums = qlinear(rows.view(-1, K), weight, scale).view(pieces, M, -1)
    y = sums[0]
    for i in range(1, pieces):
        y = torch.add(sums[i], y, alpha=256, out=sums[i])
    y.mul_(unit)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


# Formats of at most 4 bits


def _int4pack(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    spec: CodeSpec,
    group_size: int,
) -> Tensor | None:
    M, K = x.shape
    group = _pack_group(spec, qdata.shape[0], K, group_size)
    if group is None:
        return None
    sources = tuple(t for t in (qdata, scale, zero_point, global_scale) if t is not None)
    weight = (qdata, scale, zero_point, global_scale)
    packed = prepacked("int4pack", sources, pack_int4, *weight, spec, K, group_size, group)
    if packed is None:
        return None
    if not spec.is_integer:
        terms = torch.tensor(_TERMS[spec.name]).view(2, 1)
        x = (x.float().view(M, -1, 1, group // 2) * terms).to(x.dtype).view(M, 2 * K)
    y = torch._weight_int4pack_mm_for_cpu(x, packed[0], group, packed[1])
    return y if bias is None else y.add_(bias)


def _pack_group(spec: CodeSpec, N: int, K: int, group_size: int) -> int | None:
    """The group size to pack with, it divides the weight's own; None if int4pack cannot take the weight."""
    if N % 16 or K % group_size:
        return None
    if spec.is_integer:
        return next((g for g in (256, 128, 64, 32) if group_size % g == 0), None)
    if spec.name not in _TERMS:
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
) -> tuple[Tensor, Tensor]:
    """The weight for `_weight_int4pack_mm_for_cpu`, w = (c - 8) * scale + zero with c in 0..15.

    int2 and int3 with a zero point have q - z in -7..7 and need no zero; int4 has, rounded to bf16. A codebook format
    becomes two terms, [N, K / g, 2, g] with g = group / 2.
    """
    N = qdata.shape[0]
    zero_point = None if zero_point is None else expand_rows(zero_point, N)
    packed = None
    step = 1024  # rows at a time: the op wants int32 codes
    for start in range(0, N, step):
        rows = slice(start, start + step)
        codes = code_bytes(qdata[rows], spec)[:, :K]
        if not spec.is_integer:
            codes = _term_codes(spec)[codes.int()].view(-1, K // (group // 2), group // 2, 2).transpose(2, 3)
        elif zero_point is None:
            codes = codes + (8 - 2 ** (spec.bits - 1))
        elif spec.bits < 4:
            z = zero_point[rows].to(torch.int8).repeat_interleave(group_size, 1)
            codes = codes + 8 - z
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
    return packed, pairs.transpose(0, 1).to(torch.bfloat16).contiguous()


def _term_codes(spec: CodeSpec) -> Tensor:
    """[16, 2] int8 in 0..15: the p and q, offset by 8, whose a * p + b * q is nearest to each level."""
    a, b = _TERMS[spec.name]
    grid = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8))
    sums = grid.double() @ torch.tensor([a, b], dtype=torch.float64)
    nearest = (sums[None, :] - torch.tensor(spec.levels, dtype=torch.float64)[:, None]).abs().argmin(1)
    return (grid[nearest] + 8).to(torch.int8)


# 8-bit floats, and fp6 expanded to them


def _shifted(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, spec: CodeSpec) -> Tensor | None:
    """One scale per row: GEMM of the codes shifted into place, the scale on the output."""
    N, K = qdata.shape[0], x.shape[1]
    if spec.is_packed:
        if x.shape[0] > _SMALL_M["fp6"]:
            return None
        qdata = prepacked("fp8", (qdata,), expand_to_fp8, qdata, spec, K)
        if qdata is None:
            return None
    elif not prepacked("shift", (qdata,), can_shift, qdata, K):
        return None
    shift, mask, exponent = _SHIFTS[qdata.dtype]
    # Half of the exponent is made up for in x, half in the scale, so that neither leaves the range of bf16.
    half = exponent // 2
    x = x * 2.0**half
    factor = expand_rows(scale.float(), N) * 2.0 ** (exponent - half)
    y = x.new_empty(x.shape[0], N)
    rows = _rows(K)
    for start in range(0, N, rows):
        block = slice(start, min(start + rows, N))
        words = scratch("block", (block.stop - start, K), torch.int16)
        words.copy_(qdata[block].view(torch.int8)).bitwise_left_shift_(shift).bitwise_and_(mask)
        _gemm(x, words.view(torch.bfloat16), y[:, block], factor[block], None if bias is None else bias[block])
    return y


def can_shift(qdata: Tensor, group_size: int) -> bool:
    """Whether losing the subnormals (bf16 GEMMs flush what they become) changes no group by over 2**-10 of its norm.

    It cannot where a scale fits its own group, but can where one outlier sets the scale of many rows.
    """
    smallest = torch.finfo(qdata.dtype).smallest_normal
    N, K = qdata.shape
    spec = next(s for s in CODES.values() if s.dtype == qdata.dtype)
    rows = _rows(K)
    for start in range(0, N, rows):
        codes = qdata[start : start + rows]
        values = scratch("values", tuple(codes.shape), torch.float32)
        decode(codes, spec, values)
        groups = values.square_().unflatten(1, (-1, group_size))
        total = groups.sum(-1)
        lost = groups.masked_fill(groups >= smallest**2, 0).sum(-1)
        if not bool((lost <= total * 2.0**-20).all()):  # also refuses NaN and inf
            return False
    return True


def expand_to_fp8(qdata: Tensor, spec: CodeSpec, K: int) -> Tensor:
    """fp6 codes -> fp8_e4m3 [N, K]: every value of either fp6 is a normal number (or zero) of e4m3."""
    values = code_values(spec).to(torch.float8_e4m3fn).view(torch.uint8)
    out = torch.empty(qdata.shape[0], K, dtype=torch.uint8)
    rows = _rows(K)
    for start in range(0, out.shape[0], rows):
        codes = code_bytes(qdata[start : start + rows], spec)[:, :K]
        out[start : start + rows] = values[codes.int()]
    return out.view(torch.float8_e4m3fn)


# Groups of 8-bit codes at small M


def _by_groups(
    x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, spec: CodeSpec, group_size: int
) -> Tensor | None:
    """A batch of products, one per group, on unscaled codes; the scales multiply the partial sums."""
    M, K = x.shape
    N = qdata.shape[0]
    if spec.is_packed or K % group_size or group_size < 32:
        return None
    factor = expand_rows(scale_values(scale, None), N).float()
    if spec.dtype in _SHIFTS:
        if not prepacked("shift", (qdata,), can_shift, qdata, group_size):
            return None
        shift, mask, exponent = _SHIFTS[spec.dtype]
        x, factor = x * 2.0 ** (exponent // 2), factor * 2.0 ** (exponent - exponent // 2)
    groups = K // group_size
    parts = x.view(M, groups, group_size).permute(1, 2, 0).contiguous()
    y = x.new_empty(M, N)
    rows = _rows(K)
    for start in range(0, N, rows):
        block = slice(start, min(start + rows, N))
        n = block.stop - start
        codes = qdata[block].view(torch.int8).view(n, groups, group_size).transpose(0, 1)
        values = scratch("block", (groups, n, group_size), torch.bfloat16)
        if spec.dtype in _SHIFTS:
            values.view(torch.int16).copy_(codes).bitwise_left_shift_(shift).bitwise_and_(mask)
        else:
            values.copy_(codes)
        sums = scratch("sums", (groups, n, M), torch.float32).copy_(torch.bmm(values, parts))
        total = sums.mul_(factor[block].t().unsqueeze(-1)).sum(0)
        y[:, block].copy_((total if bias is None else total.add_(bias[block, None])).t())
    return y


# Any format, any M


def _rows(K: int) -> int:
    """Rows of a block."""
    return max(_BLOCK // max(K, 1), 1)


def _blocks(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    spec: CodeSpec,
    group_size: int,
) -> Tensor:
    """Dequantize a block of rows into scratch, multiply, go on."""
    N, K = qdata.shape[0], x.shape[1]
    bf16 = x.dtype == torch.bfloat16
    dtype = torch.bfloat16 if bf16 else torch.float32
    y = x.new_empty(x.shape[0], N)
    factor = expand_rows(scale_values(scale, global_scale), N)
    zero_point = None if zero_point is None else expand_rows(zero_point, N)
    x = x.to(dtype)
    on_output = bf16 and factor.shape[1] == 1 and zero_point is None
    if bf16 and not on_output and is_table_decoded(spec) and group_size >= 32:
        factor = factor.to(dtype)
    rows = _rows(K)
    for start in range(0, N, rows):
        block = slice(start, min(start + rows, N))
        block_bias = None if bias is None else bias[block]
        if on_output:
            weights = scratch("block", (block.stop - start, padded(K, spec)), dtype)
            decode(qdata[block], spec, weights)
            _gemm(x, weights[:, :K], y[:, block], factor[block].float(), block_bias)
        else:
            weights = scratch("block", (block.stop - start, K), dtype)
            zero = None if zero_point is None else zero_point[block]
            dequantize_block(weights, qdata[block], factor[block], zero, spec, group_size)
            _gemm(x, weights, y[:, block], None, block_bias)
    return y


def _gemm(x: Tensor, weights: Tensor, out: Tensor, factor: Tensor | None, bias: Tensor | None) -> None:
    """out [M, n] <- x [M, K] @ weights [n, K].T * factor [n, 1] + bias [n]; factor and bias are applied in fp32."""
    if factor is None and bias is None and out.dtype == x.dtype:
        torch.mm(x, weights.t(), out=out)
        return
    y = _gemm_fp32(x, weights) if x.dtype == torch.float32 else torch.mm(x, weights.t())
    total = scratch("total", tuple(y.shape), torch.float32).copy_(y)
    if factor is not None:
        total.mul_(factor.view(-1))
    if bias is not None:
        total.add_(bias)
    out.copy_(total)


def _gemm_fp32(x: Tensor, weights: Tensor) -> Tensor:
    """oneDNN's fp32 GEMM: on AMD twice as fast as MKL's, which `torch.mm` takes."""
    if x.shape[0] >= 8 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weights, None, "none", [], "")
    return torch.mm(x, weights.t())


# What the plan and the support matrix are told


def _supports_int8(problem: Problem) -> str | None:
    return None if problem.format == "int8" and problem.group_size >= problem.K else "only int8 with one scale per row"


def _supports_int8pack(problem: Problem) -> str | None:
    if problem.K % 16:
        return f"K={problem.K} is not a multiple of 16"
    return _supports_int8(problem) or _needs_bf16(problem)


def _supports_split(problem: Problem) -> str | None:
    return _supports_int8(problem) or no_qlinear(problem.K)


def _supports_int4pack(problem: Problem) -> str | None:
    spec = CODES[problem.format]
    if spec.bits > 4:
        return "only formats of at most 4 bits"
    if _pack_group(spec, problem.N, problem.K, problem.group_size) is None:
        return (
            f"N={problem.N} must be a multiple of 16, and K={problem.K} of the group size {problem.group_size}, "
            f"which must be one of {32 if spec.is_integer else 16}"
        )
    return _needs_bf16(problem)


def _supports_shift(problem: Problem) -> str | None:
    spec = CODES[problem.format]
    if spec.dtype not in _SHIFTS and spec.bits != 6 or problem.group_size < problem.K:
        return "only fp8 and fp6 with one scale per row"
    return _needs_bf16(problem)


def _supports_groups(problem: Problem) -> str | None:
    spec = CODES[problem.format]
    if spec.is_packed or problem.group_size >= problem.K or problem.group_size < 32 or problem.K % problem.group_size:
        return "only int8 and fp8 with whole groups of at least 32"
    return _needs_bf16(problem)


def _needs_bf16(problem: Problem) -> str | None:
    return None if problem.dtype == torch.bfloat16 else "only bf16 input"


PATHS = (
    Path("int8 GEMM, x in two bytes (oneDNN)", "M <= 256, from the second use", _supports_split),
    Path("int8pack", "M <= 4", _supports_int8pack),
    Path("int4pack", "M <= 32 (codebooks 16), from the second use", _supports_int4pack),
    Path("GEMM of shifted codes", "any M (fp6: <= 256), from the second use", _supports_shift),
    Path("products per group", "M <= 16", _supports_groups),
    Path("dequantize blocks", "any other M", lambda problem: None),
)
