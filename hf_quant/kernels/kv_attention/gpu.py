"""Attention over the codes of a quantized KV cache on a GPU.

Few queries (decoding): the tokens are split over the grid, and a second, tiny launch adds the splits in their order.
The rows of a tile are all positions and all query heads that belong to one head of keys, so each code is read once.
- Words go to shared memory by asynchronous copies, 16 bytes a lane, and from there straight into the layout of the
  matrix units' operand (values transposed by ldmatrix), where they are decoded: no code ever moves between lanes.
  Element i of every word is an operand of its own ("place"), see `gpu_places`; queries are gathered accordingly.
- Scales enter after the products. With G groups a tile has G * R rows: row (g, r) is query r with all channels zero
  but those of group g, so that its sum is multiplied by the scale of group g, and the G rows are added. For values
  the weights of row (g, r) carry the scale of group g, of whose sums only the channels of group g are kept. A tile
  has 16 rows at least: 4 heads of queries and up to 4 groups cost what one row would.
- Offsets, and what the magic number adds to keys, need only the sum of each query's channels: the products start
  from there. Offsets of values are added up beside the weights.
- The reference of the softmax moves only when weights would pass 2 ** 8.
- fp16 and fp32 queries, and their weights, go as two bf16 parts: 16 bits of mantissa.

Many queries: flash attention over tiles that are decoded, scaled and rounded to 16 bits in registers on their way to
shared memory; one scale a token (8 bits, bf16) is folded into scores and weights instead. On sm80 to sm89 and sm120,
too, each token is decoded once, not by every warp: a step of int4 has 486 instructions there, not 1011 (Triton 3.6).
Blocks behind the diagonal are skipped. fp32 takes the other kernel, in tiles of a few rows.

`length` is read by each program: each token behind it costs a program's start. The number of splits follows from the
heads and the GPU alone: a growing cache compiles nothing anew.

Rotated values: the launch that adds the splits rotates the sums in fp32, and runs for one split, too: 4 bytes a value
are written and read, .03 ms of a prefill's 1.35 (modelled). What the first key lacks is added to the scores of its
token, whose block, with all before it, goes with those that are masked.

Rotated and framed queries: by a launch before (2 us). In the kernel each of some 400 programs would make the sign
matrix again: about 800 instructions a thread, a tenth of a split of 2048 tokens.

Traffic and time, modelled on an H200 (132 multiprocessors at 1.755 GHz, 4.3 TB/s): 32 / 8 heads of 128,
131072 tokens, batch 1; instructions of the loop's machine code for sm90 per decoded channel, without the rescaling,
at 29.7e12 a second; 16 rows on the matrix units at 60 % of their rate take 15 us. bf16 reads 537 MB: 125 us.
- int8 (one bf16 scale): 273 MB, 63 us; 3.6 instructions, 33 us. 165 registers, 12 warps a multiprocessor. 1.97 x.
- fp8_e4m3: as int8; 5.0 instructions, 45 us.
- int4 g64: 151 MB, 35 us; 3.0 instructions, 27 us. 152 registers, 12 warps. 3.6 x.
- int2 g32: 101 MB, 23.4 us; 2.45 instructions, 22 us. 230 registers, 8 warps. 5.3 x at most: bytes and instructions
  take equally long, so the target of 4.2 leaves them 6 us that do not overlap.
Measured there with Triton 3.6 (docs/gpu.md): int8 82 us, int4 58, int2 53 (torch's bf16: 124), the sum of the splits
included; with 8 sequences 533, 379 and 328 us (924).
The sum of the splits reads .8 MB (49 splits) to 2.1 MB (128) from L2, and takes some 2 us with its launch.
Prefill, 2048 tokens at 32768: 1.07 TFLOP, 1.35 ms at 790 TFLOP/s; the loop's instructions take 1.2 (int4, int2) to
1.5 ms (int8). One block of 8 warps has a multiprocessor for itself, so the two overlap in part only.

Tried and lost, by the compiler's output: int2 with 2 or 4 warps (a place is 16 columns wide, and Triton then gives all
warps the same rows: each does everything; two places side by side need a pass through shared memory: 3.1 instead of
2.8 instructions); blocks of 128 tokens for int4 (2.8 instead of 3.2 instructions, but 217 registers: 8 warps);
one warp for each program for int4 and int8 (spills); decoding all places at once (the same registers); rescaling in
every step (10 % more instructions); strides of queries that the compiler may not assume to be multiples of 16 (the
tile's pointers alone took 128 registers of the prefill kernel, which spilled 592 bytes).
Tried and lost on an H200, at 32768 tokens: the program that comes last adds the splits, without a launch for it (1.02
times as long for a batch of 8, 2.0 for one sequence, 3.3 for one of int2); programmatic dependent launches (.97 to
1.04 times as long).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, CodeSpec
from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.gpu.decode import bits_of, ptx
from hf_quant.kernels.gpu.launch import (
    HAS_TRITON,
    Target,
    cached_plan,
    config_table,
    launch,
    target_of,
    tl,
    unavailable_reason,
)
from hf_quant.kernels.hadamard.gpu import hadamard_gpu
from hf_quant.kernels.kv_attention import op
from hf_quant.kernels.kv_attention.cpu import attend_in_blocks
from hf_quant.kernels.kv_attention.gpu_decode import _kv_decode_kernel
from hf_quant.kernels.kv_attention.gpu_merge import _kv_merge_kernel
from hf_quant.kernels.kv_attention.gpu_parts import _kv_query_kernel
from hf_quant.kernels.kv_attention.gpu_places import place_ptx, places
from hf_quant.kernels.kv_attention.gpu_prefill import _kv_prefill_kernel


_MAX_D = 256
_ROWS = 32  # of a tile of the decoding kernel: rows of queries times groups
_MAX_SPLITS = 128
_QUERIES = 8  # positions of a program that puts queries into a frame
_LEAST_TOKENS = 256  # of a split
_FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32} if HAS_TRITON else {}
# (bits, largest D, bf16 parts of a query, BLOCK_N, num_warps, num_stages, programs of a multiprocessor)
_DECODE = (
    (2, 128, 1, 32, 1, 3, 8),
    (2, 128, 2, 32, 2, 3, 6),
    (2, 256, 2, 32, 4, 3, 3),
    (4, 64, 1, 64, 2, 3, 5),
    (4, 64, 2, 32, 2, 3, 6),
    (4, 128, 1, 64, 4, 3, 3),
    (4, 128, 2, 32, 4, 3, 4),
    (4, 256, 2, 64, 4, 3, 2),
    (8, 128, 1, 64, 4, 3, 3),
    (8, 128, 2, 64, 8, 3, 2),
    (8, 256, 2, 64, 4, 2, 2),
)
DECODE_CONFIGS = dict.fromkeys(("sm80", "sm89", "sm90"), _DECODE)
# Of plain attention to heads of 128; on an H200 1.03 to 1.16 times as fast as 4 warps.
_TWO_WARPS = ((4, 128, 1, 64, 2, 3, 4), (8, 128, 1, 64, 2, 3, 4))
# In 2 warps Triton 3.6 keeps 16 to 24 bytes of many rows, and of capped scores, in local memory.
_SM90 = {row[:3]: row for row in ((2, 128, 2, 32, 4, 3, 3), *_TWO_WARPS)}
DECODE_CONFIGS["sm90"] = tuple(_SM90.get(row[:3], row) for row in _DECODE)
# Where ptxas keeps 8 to 32 bytes in local memory: on sm100 int4 in 4 warps, on both int2 in 168 registers.
_SM120 = {(2, 128, 2): (2, 128, 2, 32, 2, 3, 5)}
_SM100 = {**_SM120, (4, 128, 2): (4, 128, 2, 32, 8, 3, 2)}
DECODE_CONFIGS["sm100"] = tuple(_SM100.get(row[:3], row) for row in _DECODE)
DECODE_CONFIGS["sm120"] = tuple(_SM120.get(row[:3], row) for row in _DECODE)
DECODE_CONFIGS["gfx942"] = tuple((*row[:3], 32, row[4], 1, row[6]) for row in _DECODE)
# (largest D, whether with a mask, BLOCK_M, BLOCK_N, num_warps, num_stages). A mask is read as it is in memory, which
# Triton then makes the layout of the scores, too: smaller tiles. Without wgmma, heads above 128 spill: tiles of a few
# rows serve.
_PREFILL = ((64, 0, 128, 64, 8, 2), (64, 1, 64, 32, 8, 2), (128, 0, 128, 64, 8, 2), (128, 1, 64, 32, 8, 2))
_HALF = tuple((D, mask, m, 32, 8, 2) for D, mask, m, *_ in _PREFILL)
PREFILL_CONFIGS = {
    # In tiles of 64 rows both groups of four warps compute the same scores, and ptxas begins a product twice (C7519 if
    # scores are capped). Tiles of 128, D = 256: 469 instructions a step instead of 460, for twice the rows.
    "sm90": (
        (64, 0, 128, 64, 8, 2),
        (64, 1, 128, 32, 8, 2),
        (128, 0, 128, 64, 8, 2),
        (128, 1, 128, 16, 8, 2),
        (256, 1, 128, 16, 8, 2),
    ),
    # Operands in registers: half the tokens a step. So have 8-bit keys on sm100, by Triton 3.6: 200 bytes of stack.
    **dict.fromkeys(("sm80", "sm89"), _HALF),
    "sm100": (*_HALF, (256, 1, 64, 16, 8, 2)),
    # As sm89, whose ptxas finds room for 32 tokens.
    "sm120": tuple((128, 0, 128, 16, 8, 2) if row[:2] == (128, 0) else row for row in _HALF),
    "gfx942": tuple((D, mask, 64, 32, 4, 1) for D, mask, *_ in _PREFILL),
}


def attention_unsupported_reason(D: int, group_size: int, dtype: torch.dtype, format: str) -> str | None:
    """The reason why the kernels do not serve heads of D channels, None if they do."""
    if not HAS_TRITON:
        return "triton is not installed"
    if format not in op.CACHE_FORMATS:
        return f"no kernel decodes {format}; they decode {', '.join(op.CACHE_FORMATS)}"
    if dtype not in _FLOATS:
        return f"only bf16, fp16 and fp32 queries, not {dtype}"
    if D > _MAX_D or D % 16:
        return f"heads of {D} channels: needs a multiple of 16, at most {_MAX_D}"
    if group_size % 16:
        return f"groups of {group_size} are no multiple of 16"
    return None


def _supports(problem: Problem) -> str | None:
    return attention_unsupported_reason(problem.K, problem.group_size, problem.dtype, problem.format)


def _supports_prefill(problem: Problem) -> str | None:
    reason = _supports(problem)
    if reason is None and problem.dtype == torch.float32:
        reason = "fp32 queries take the kernel for few rows, by tiles"
    if reason is None and problem.group_size != problem.K and problem.group_size & (problem.group_size - 1):
        reason = f"groups of {problem.group_size}: needs a power of two, or one group"
    return reason


PATHS = (
    Path("Triton, split over the tokens", f"rows of a head of keys * groups <= {_ROWS}", _supports),
    Path("Triton, tiles of queries", "more rows", _supports_prefill),
    Path("decoded blocks of tokens, torch ops", "any length", lambda problem: None),
)


class Shape(NamedTuple):
    """The facts that a plan follows from, besides the lengths."""

    heads: int  # of keys, times the batch
    D: int
    groups: int
    format: str
    dtype: torch.dtype
    scale_dtype: torch.dtype
    has_offset: bool
    has_mask: bool
    is_capped: bool = False


class AttentionPlan(NamedTuple):
    """The launch of one attention."""

    kernel: object
    tiles: int  # of rows, for each head of keys
    max_splits: int
    options: dict
    merge: dict  # options of the launch that adds the splits


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _multiplier(spec: CodeSpec, dtype: torch.dtype) -> float:
    """The power of two between the exponent biases of a minifloat and of dtype."""
    return 2.0 ** ((127 if dtype == torch.bfloat16 else 15) - spec.minifloat[2]) if spec.minifloat else 1.0


@cached_plan
def attention_plan(shape: Shape, rows: int, target: Target) -> AttentionPlan | None:
    """The plan for `rows` rows of queries of each head of keys, None where torch ops serve.

    One for all lengths of a cache: each token would make another.
    """
    group = shape.D // shape.groups
    if not target.has_dot or attention_unsupported_reason(shape.D, group, shape.dtype, shape.format):
        return None
    spec, G = CODES[shape.format], _power(shape.groups)
    most = _ROWS if shape.D <= 128 else _ROWS // 2  # registers
    few = G * _power(rows) <= most or shape.dtype == torch.float32
    table = config_table("kv_prefill", PREFILL_CONFIGS, target)
    row = next((r for r in table if shape.D <= r[0] and shape.has_mask <= r[1]), None)
    # No tile of queries spreads groups of other sizes: several tiles of a few rows.
    few = few or row is None or (group != shape.D and bool(group & (group - 1)))
    options = {"D": shape.D, "G": G, "KIND": "minifloat" if spec.minifloat else "integer"}
    options |= {"BITS": spec.bits, "CODES": 16 // spec.bits, "SCALE": _FLOATS[shape.scale_dtype]}
    if few:
        parts = 1 if shape.dtype == torch.bfloat16 else 2
        table = config_table("kv_decode", DECODE_CONFIGS, target)
        row = next(r for r in table if r[0] == spec.bits and shape.D <= r[1] and parts <= r[2])
        few_rows = shape.D == 128 and G * _power(rows) <= 16 and not shape.has_mask
        if row in _TWO_WARPS and (not few_rows or shape.is_capped):  # they keep 232 and more bytes in local memory
            row = next(r for r in _DECODE if r[:3] == row[:3])
        _, _, _, block_n, num_warps, stages, programs = row
        # With 64 tokens ptxas keeps 8 to 120 bytes in local memory, for sm80 in the first case alone: 8 bytes with 32.
        if shape.is_capped and shape.D > 128 and ((spec.bits == 8 and shape.has_mask) or target.capability != 80):
            block_n = min(block_n, 32)
        if shape.is_capped and spec.bits == 4 and parts == 1 and shape.has_mask:
            block_n = min(block_n, 32)  # else Triton 3.6 keeps 8 bytes in local memory (sm90)
        R = max(min(_power(rows), most // parts // G), 16 // G, 1)  # two parts are twice the operands
        if spec.bits == 2 and G == 1:
            R = 16  # of one warp: with 32 rows ptxas keeps 800 bytes in local memory
        E = max(_power(shape.D // options["CODES"]), 16)
        join = 1
        while num_warps > 1 and E * join <= G * R and join < options["CODES"]:
            join *= 2
        use_ptx = target.is_nvidia
        options |= {"GROUP": group, "R": R, "E": E, "JOIN": join, "BLOCK_N": block_n, "STAGES": stages, "PARTS": parts}
        options |= {"MULTIPLIER": _multiplier(spec, torch.bfloat16), "MAGIC": use_ptx and spec.bits < 8}
        options |= {"K_PTX": place_ptx(shape.format, centered=False) if use_ptx else None}
        options |= {"V_PTX": place_ptx(shape.format, centered=True) if use_ptx else None}
        options |= {"PLACES": places(shape.format, use_ptx=use_ptx)}
        if use_ptx and few_rows and row[:3] == (8, 128, 1) and num_warps == 4:
            options["maxnreg"] = 168  # of 3 programs: ptxas aims at as many, and keeps 8 bytes on the stack (sm90)
        if target.capability >= 100 and row[:3] == (2, 128, 2) and not shape.is_capped:
            options["maxnreg"] = 192  # of 5 programs
        kernel, tiles = _kv_decode_kernel, -(-rows // R)
    else:
        _, _, block_m, block_n, num_warps, stages = row
        block_m = max(min(block_m, _power(rows)), 16 * num_warps // 2)
        dot = torch.bfloat16 if shape.dtype == torch.bfloat16 else torch.float16
        scaled = shape.groups > 1 or shape.has_offset or dot == torch.float16
        options |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": _power(shape.D), "STAGES": stages}
        options |= {"SCALED": scaled, "DOT": _FLOATS[dot]}
        options["G"] = _power(shape.D) // group if shape.groups > 1 else 1
        options |= {"MULTIPLIER": _multiplier(spec, dot)}
        options |= {"PTX": ptx(shape.format, dot) if target.is_nvidia else None}
        options |= {"ONCE": target.has_warp_dot}
        kernel, tiles, programs = _kv_prefill_kernel, -(-rows // block_m), 1
    options |= {"num_warps": num_warps, "num_stages": stages}
    # By what fits at once, not by how long the cache is, so that a growing one compiles nothing anew.
    most = min(max(programs * target.multiprocessors // (shape.heads * tiles), 1), _MAX_SPLITS)
    merge = {"D": shape.D, "BLOCK_D": _power(shape.D), "SPLITS": max(_power(most), 2), "num_warps": 4}
    merge["STEP"] = min(merge["SPLITS"], 4096 // merge["BLOCK_D"])
    return AttentionPlan(kernel, tiles, most, options, merge)


class Operand(NamedTuple):
    """Keys or values as a kernel reads them."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    code_strides: tuple[int, ...]  # in units of `align` elements of 16 bits
    scale_strides: tuple[int, ...]
    offset_strides: tuple[int, ...]
    align: int
    is_paired: bool


def _operand(codes: Tensor, scale: Tensor, offset: Tensor | None) -> Operand | None:
    """Keys or values as a kernel reads them; None if their strides or their alignment are unsupported."""
    size = codes.element_size()
    spans = [n * size for n in codes.stride()[:3]]
    if codes.stride(3) != 1 or any(n % 2 for n in (codes.data_ptr(), *spans)) or scale.dtype not in _FLOATS:
        return None
    align = 8
    while any(n // 2 % align for n in (codes.data_ptr(), *spans)):
        align //= 2
    offset_strides = (0, 0, 0, 0) if offset is None else offset.stride()
    if offset is None:
        is_paired = False
    else:
        # Side by side, as one word of 32 bits. Tensors without memory ("meta") have only a place in their storage.
        distance = offset.data_ptr() - scale.data_ptr()
        if scale.is_meta:
            distance = 2 * (offset.storage_offset() - scale.storage_offset())
        is_paired = scale.element_size() == 2 and distance == 2 and scale.data_ptr() % 4 == 0
        is_paired &= scale.stride() == offset.stride() and not any(n % 2 for n in scale.stride())
    unit = 2 if is_paired else 1
    return Operand(
        bits_of(codes),
        scale,
        None if is_paired else offset,
        tuple(n // 2 // align for n in spans),
        tuple(n // unit for n in scale.stride()),
        offset_strides,
        align,
        is_paired,
    )


def _mask_operand(mask: Tensor | None) -> tuple[Tensor | None, tuple[int, ...], str]:
    """A mask as a kernel reads it: (mask, strides, kind)."""
    if mask is None:
        return None, (0, 0, 0, 0), "none"
    strides = tuple(0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride()))
    return (mask.view(torch.uint8), strides, "bool") if mask.dtype == torch.bool else (mask, strides, "added")


def _queries(q: Tensor, frame: Tensor | None, *, rotates: bool, is_capped: bool) -> tuple[Tensor, Tensor | None]:
    """`op.query_rows` in a launch of its own: every split would do the same, some 800 instructions a thread.

    If scores are capped, also what `op.mean_scores` gives for a scale of 1: fp32 [B, H, S].
    The transform of `hadamard` takes rows that follow each other in memory: [B, S, H, D] or [B, H, S, D].
    """
    (B, H, S, D), block = q.shape, op.rotation_block(q.shape[3])
    shift = torch.empty((B, H, S), dtype=torch.float32, device=q.device) if is_capped else None
    if frame is not None:
        q, y = q if q.stride(3) == 1 else q.contiguous(), torch.empty_like(q)
        y = y if y.stride(3) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sizes = (S, H, H // frame.shape[1], *q.stride()[:3], *y.stride()[:3])
        options = {"D": D, "BLOCK_D": max(_power(D), 16), "LOG_ROTATION": block.bit_length() - 1 if rotates else 0}
        options |= {"NORM": block**-0.5, "TOKENS": _QUERIES, "num_warps": 4}
        launch(_kv_query_kernel, (-(-S // _QUERIES) * B * H,), q, frame.contiguous(), y, shift, *sizes, **options)
        return y, shift
    shift = None if shift is None else shift.zero_()
    if not rotates or q.dtype == torch.float32:
        return op.query_rows(q, None, rotates=rotates), shift
    if q.transpose(1, 2).is_contiguous():
        return hadamard_gpu(q.transpose(1, 2), block_size=block).transpose(1, 2), shift
    return hadamard_gpu(q, block_size=block), shift


@implements(op.kv_attention, "XPU", PATHS)
@implements(op.kv_attention, "CUDA", PATHS)
def kv_attention_gpu(
    q: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_offset: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    v_offset: Tensor | None,
    mask: Tensor | None,
    length: Tensor | None,
    *,
    format: str,
    is_causal: bool,
    window: int,
    scale: float | None,
    rotates_keys: bool,
    rotates_values: bool = False,
    k_frame: Tensor | None = None,
    k_first: Tensor | None = None,
    starts: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `kv_attention_reference`."""
    op.check(q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, mask, length, format, is_causal, window, scale)
    op.check_more(q, k_codes, k_frame, k_first, starts, softcap)
    (B, H, S, D), (kv_heads, T), spec = q.shape, k_codes.shape[1:3], CODES[format]
    scale = D**-0.5 if scale is None else scale
    out, q = torch.empty_like(q), q.detach()
    keys, values = _operand(k_codes, k_scale, k_offset), _operand(v_codes, v_scale, v_offset)
    plan = None
    if unavailable_reason(q.device) is None and None not in (keys, values) and q.numel() and T:
        repeats, flags = H // kv_heads, (not (k_offset is None and v_offset is None), mask is not None)
        flags += (softcap is not None,)
        shape = Shape(B * kv_heads, D, k_scale.shape[3], format, q.dtype, k_scale.dtype, *flags)
        plan = attention_plan(shape, S * repeats, target_of(q.device))
    if plan is None:
        shift = None if softcap is None else op.mean_scores(q, k_frame, scale)
        how = {"is_causal": is_causal, "window": window, "scale": scale, "softcap": softcap, "shift": shift}
        how |= {"rotates_values": rotates_values, "k_first": k_first, "starts": starts}
        q = op.query_rows(q, k_frame, rotates=rotates_keys)
        parts = (k_codes, k_scale, k_offset), (v_codes, v_scale, v_offset)
        return attend_in_blocks(q, *parts, mask, length, spec, **how)
    q, shift = _queries(q, k_frame, rotates=rotates_keys, is_capped=softcap is not None)
    k_first, starts = (part if part is None else part.contiguous() for part in (k_first, starts))
    q = q if q.stride(3) == 1 else q.contiguous()
    y = out if out.stride(3) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, S), dtype=torch.float32, device=q.device)
    parts = stats = None
    splits = min(plan.max_splits, -(-T // _LEAST_TOKENS))
    adds = splits > 1 or rotates_values  # the launch that adds the splits rotates the sums, too
    if adds:
        rows = B * kv_heads * splits * S * repeats
        workspace = torch.empty(rows * (D + 1), dtype=torch.float32, device=q.device)
        parts, stats = workspace[: rows * D], workspace[rows * D :]
    mask, mask_strides, kind = _mask_operand(mask)
    launch(
        *(plan.kernel, (B * kv_heads * plan.tiles, splits), q, keys.codes, keys.scale, keys.offset),
        *(values.codes, values.scale, values.offset, mask, length, k_first, starts, shift, y, lse, parts, stats),
        *(scale * math.log2(math.e), 1 / scale, (softcap or 1.0) / scale, S, T, kv_heads, repeats, plan.tiles, window),
        *(k_scale.shape[3], *q.stride()[:3], *keys.code_strides, *keys.scale_strides, *keys.offset_strides),
        *(*values.code_strides, *values.scale_strides, *values.offset_strides, *mask_strides, *y.stride()[:3]),
        shared=plan.options,
        **{"K_PAIRED": keys.is_paired, "V_PAIRED": values.is_paired, "K_ALIGN": keys.align, "V_ALIGN": values.align},
        **{"CAUSAL": is_causal, "WINDOWED": window > 0, "MASK": kind},
    )
    if adds:
        block = op.rotation_block(D) if rotates_values else 1
        launch(
            *(_kv_merge_kernel, (S * repeats * B * kv_heads,), parts, stats, y, lse, S, kv_heads, repeats, splits),
            *y.stride()[:3],
            shared=plan.merge,
            **{"LOG_ROTATION": block.bit_length() - 1, "NORM": block**-0.5},
        )
    return (y if y is out else out.copy_(y)), lse
