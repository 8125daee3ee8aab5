"""Products with quantized activations on a GPU: int8 x int8 and fp8 x fp8 in the matrix units, scales in the epilogue.

Three branches, by M (tokens) and by how many tiles there are:
- decode, M <= 64: bound by the bytes of the weight, N*K. The weight is the left operand, because the matrix unit's own
  tile is 64 rows there and 8 columns: 16 tokens cost a quarter of 64. K is split over blocks until they fill the
  multiprocessors twice; the last block of a tile adds the parts in the order of K.
- crossover, fewer 128 x 128 tiles than multiprocessors: the same kernel with tiles of 128 x 128, once over the GPU.
- prefill: bound by the matrix unit. Tiles of 128 x 256 (1.2 bytes from L2 for 100 products; 128 x 128: 1.6), by the
  copy engine (sm90, sm100, rows at multiples of 16 bytes) with one block per multiprocessor that walks over the tiles,
  8 warps, the result stored in two halves. The row of the table with the least work in the
  last, partly filled round of tiles is taken. On sm90 it is the Gluon kernel of `gpu.hopper`, whose copies have warps
  of their own: a product waits for the one before the last, where Triton's loop waits for each of int8.

Measured on an H100 with Triton 3.6 (docs/gpu.md): 28672 x 4096, 4096 tokens, .70 ms int8 and fp8, 1.75 times as fast
as bf16; by the Triton kernel .89 and .71 ms. 4096 x 14336: .29 and .33 ms, .36 and .34; bf16 .60. On an H200, where
the Triton kernel ran: 8192 x 8192 x 8192 int8 .98 ms, 1.49 times as fast as bf16 and 1.38 as torch._int_mm; fp8 .92
ms, .86 as fast as torch._scaled_mm. With activations that are quantized before, 28672 x 4096: M = 1, 38.6 us; 128,
45.0 us. For 128 and 256 tokens tiles of 64 x 64 take half the time of 128 x 128: more of them are on their way.

Sums. int8: exact, in int32. fp8: the matrix units of sm89 and sm90 keep some 13 bits of a sum and cut what is below
(https://arxiv.org/abs/2411.10958; https://arxiv.org/abs/2412.19437 promotes to fp32 every 128). Modelled as a cut of
half a unit every 32 products, sums grow by a random walk: .5 % of the result at K = 4096, 1.8 % at 14336, beside 3.7 %
of noise from rounding both operands to fp8. So no sum is longer than 4096: parts of K are added in fp32 (decode,
crossover) or, beside the 128 fp32 registers of a 128 x 256 tile, in fp16 at a unit that cannot overflow, which adds
.02 %. fp32 sums beside the tile spill (255 registers, 56 bytes of stack on sm90); a promotion every 128 by
`max_num_imprecise_acc` waits for the matrix unit every step and spills, too; its value 0 leaves the fp8 units unused.

Rivals, not taken by default: `torch._scaled_mm` with row scales (needs bf16 output, N and K divisible by 16, scales in
fp32; its fast accumulation is the uncorrected sum above) and `torch._int_mm` (scales in a second pass over int32).

Tried and lost, by the compiler's output: `flatten=True` (with wgmma it moves or clears 128 registers every step while
the matrix unit still writes them: it waits each time); tiles stored in one piece (263 KB of shared memory with 4
stages). Triton waits for int8 wgmma every step (its sums are not fp32): some 150 of 1024 cycles, modelled. Triton
has no int8 product that is 256 wide: two of 128.
sm75: Triton makes no matrix instructions for it (see `Target.has_dot`), so the vendor's GEMM multiplies the codes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import expand_rows
from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.gpu.counters import tile_counters
from hf_quant.kernels.gpu.decode import scale_rows
from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.launch import (
    HAS_TRITON,
    Target,
    cached_plan,
    config_table,
    launch,
    launch_with_scratch,
    target_of,
    triton,
    unavailable_reason,
)
from hf_quant.kernels.scaled_mm import op
from hf_quant.kernels.scaled_mm.gpu_kernels import _scaled_mm_split_kernel, _scaled_mm_tiles_kernel
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.gpu import DENSE, FUSED, HOPPER, as_rows, dequantized, fused_mm


# Decode and crossover. (largest M, BLOCK_M, BLOCK_N, BLOCK_K, blocks per multiprocessor, num_warps, num_stages)
SPLIT_CONFIGS = {
    "sm80": (
        (16, 16, 64, 128, 2, 4, 5),
        (32, 32, 64, 128, 2, 4, 5),
        (64, 64, 64, 128, 2, 4, 4),
        (2**30, 128, 128, 128, 1, 8, 3),
    ),
    "sm89": (
        (16, 16, 64, 128, 2, 4, 4),
        (32, 32, 64, 128, 2, 4, 4),
        (64, 64, 64, 128, 2, 4, 3),
        (2**30, 128, 128, 64, 1, 8, 4),
    ),
    "sm90": (
        (16, 16, 64, 256, 2, 4, 3),
        (32, 32, 64, 128, 1, 4, 5),
        (64, 64, 64, 128, 1, 4, 3),
        (256, 64, 64, 128, 1, 4, 6),
        (2**30, 128, 64, 128, 1, 4, 4),
    ),
    "sm100": (
        (16, 16, 64, 128, 2, 4, 5),
        (32, 32, 64, 128, 2, 4, 5),
        (64, 64, 64, 128, 2, 4, 4),
        (2**30, 128, 128, 128, 1, 8, 4),
    ),
    "gfx942": (
        (16, 16, 64, 128, 2, 4, 2),
        (32, 32, 64, 128, 2, 4, 2),
        (64, 64, 64, 128, 2, 4, 2),
        (2**30, 128, 128, 128, 1, 8, 2),
    ),
}
# Prefill. (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, time per product beside the first row's in %, num_warps, num_stages)
TILE_CONFIGS = {
    "sm80": ((128, 256, 64, 8, 100, 8, 3), (128, 128, 64, 8, 112, 8, 4)),
    "sm89": ((128, 256, 64, 8, 100, 8, 3), (128, 128, 64, 8, 105, 8, 4)),
    "sm90": ((128, 256, 128, 8, 100, 8, 4), (256, 128, 128, 8, 101, 8, 4), (128, 128, 128, 8, 110, 8, 4)),
    "sm100": ((128, 256, 128, 8, 100, 8, 4), (128, 128, 128, 8, 115, 8, 4)),
    "gfx942": ((128, 128, 128, 8, 100, 8, 2), (128, 64, 128, 8, 115, 4, 2)),
}
_UNALIGNED = (2**30, 32, 64, 32, 2, 4, 2)  # as in SPLIT_CONFIGS: single bytes are loaded; no real weight is such
_DECODE = 64  # tokens
_MIN_PART = 256  # columns of a part of K
_CHAIN = 4096  # of K: the longest sum that fp8 matrix units of 13 bits make
FORMATS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


def supports_scaled(problem: Problem) -> str | None:
    """The reason why codes of activations are not multiplied with codes of the weight, None if they are."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    return codes_unsupported_reason(problem, None if device is None else target_of(device))


SCALED = (Path("Triton, codes x codes", "any M", supports_scaled),)


def codes_unsupported_reason(problem: Problem, target: Target | None) -> str | None:
    """`supports_scaled` for a target; None: whatever the GPU."""
    if not HAS_TRITON:
        return "triton is not installed"
    if problem.format not in FORMATS or problem.activation != problem.format:
        return f"{problem.activation} x {problem.format}: only int8 x int8 and fp8_e4m3 x fp8_e4m3"
    if problem.group_size < problem.K:
        return f"groups of {problem.group_size}: only one scale per row"
    if not problem.symmetric:
        return "zero points, which the sums of codes do not have"
    if target is not None and not has_units(problem.format != "int8", target):
        return f"the GPU has no matrix units for {problem.format} (int8: sm80, gfx9 and newer; fp8: sm89 and newer)"
    return None


def has_units(fp8: bool, target: Target) -> bool:
    """True if the matrix units take the codes, by way of Triton."""
    return target.has_fp8_dot if fp8 else target.has_dot


class ScaledPlan(NamedTuple):
    """The launch of one product: all that follows from sizes and types; without a kernel, of the one for Hopper."""

    kernel: object | None
    grid: tuple[int, ...]
    steps: int  # of K, for one part or chain
    block: tuple[int, int]  # BLOCK_M, BLOCK_N
    options: dict


def _split_row(
    table: Sequence[tuple[int, ...]], M: int, N: int, alignment: int, target: Target
) -> tuple[int, ...] | None:
    """The row of decode or crossover; None for prefill."""
    if alignment < 4:
        return _UNALIGNED
    if M > _DECODE and triton.cdiv(M, 128) * triton.cdiv(N, 128) >= target.multiprocessors:
        return None
    # Narrower loads have more addresses: no registers for them beside the largest tile.
    rows = min(M, _DECODE) if alignment < 16 else M
    return next(row for row in table if rows <= row[0])


def _tile_row(
    table: Sequence[tuple[int, ...]], M: int, N: int, max_area: int, max_rows: int, target: Target
) -> tuple[int, ...]:
    """The row that takes the least time: rounds of tiles over the multiprocessors times the time of a tile."""

    def time(row: tuple[int, ...]) -> int:
        rounds = triton.cdiv(triton.cdiv(M, row[0]) * triton.cdiv(N, row[1]), target.multiprocessors)
        return rounds * row[0] * row[1] * row[4]

    rows = [row for row in table if row[0] * row[1] <= max_area and row[0] <= max_rows]
    return min(rows or table[-1:], key=time)


def chains(K: int, steps: int, largest: float) -> tuple[int, float]:
    """(steps of a sum of fp8 codes that the matrix unit makes, unit of the sums that fp16 adds up).

    largest: magnitude of a product of two codes. largest * K is the largest sum; 2**15 leaves fp16 a factor of 2.
    """
    return triton.cdiv(steps, triton.cdiv(K, _CHAIN)), 2.0 ** -math.ceil(math.log2(largest * K / 2**15))


@cached_plan
def scaled_plan(
    M: int,
    N: int,
    K: int,
    fp8: bool,
    output_bytes: int,
    scale_rows: int,
    alignment: int,
    target: Target,
    largest: float = 448.0**2,
    gluon: bool = False,
) -> ScaledPlan | None:
    """The plan, None where the dense path serves. `alignment`: K and all rows are multiples of it, up to 16 bytes.

    largest: magnitude of a product of two fp8 codes. gluon: whether the kernel for Hopper may be taken.
    """
    if M * N * K == 0 or not has_units(fp8, target):
        return None
    short_sums = fp8 and target.capability in (89, 90, 120, 121)
    common = {"SCALE_ROWS": scale_rows, "ALIGN": alignment if alignment < 16 else 1}
    row = _split_row(config_table("scaled_mm_split", SPLIT_CONFIGS, target), M, N, alignment, target)
    if row is not None:
        _, block_m, block_n, block_k, fill, num_warps, num_stages = row
        tiles, steps = triton.cdiv(M, block_m) * triton.cdiv(N, block_n), triton.cdiv(K, block_k)
        split = max(min(triton.cdiv(fill * target.multiprocessors, tiles), K // _MIN_PART), 1)
        if short_sums:
            split = max(split, triton.cdiv(K, _CHAIN))
        part = triton.cdiv(steps, split)
        split = triton.cdiv(steps, part)  # no part is empty
        options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "EVEN_K": K % block_k == 0}
        options |= {"SPLIT": split > 1, "UNROLL": 4 if block_m < 64 else 1}
        options |= {**common, "num_warps": num_warps, "num_stages": num_stages}
        return ScaledPlan(_scaled_mm_split_kernel, (tiles, split), part, (block_m, block_n), options)
    chained = short_sums and K > _CHAIN
    # 128 x 256 sums leave no registers for an fp16 copy beside operands (no wgmma) or for twice the addresses. Triton
    # 3.6 has int8 operands in registers on sm100, too.
    small = alignment < 16 or (chained and target.capability != 90) or (not fp8 and target.table == "sm100")
    max_area = 128 * 128 if small else 2**30
    # Of 256 rows: int8, 8192 x 8192 x 8192, 1.07 times as fast on an H200; fp8 .98.
    table = config_table("scaled_mm_tiles", TILE_CONFIGS, target)
    block_m, block_n, block_k, group_m, _, num_warps, num_stages = _tile_row(
        table, M, N, max_area, 128 if fp8 else 256, target
    )
    tiles, steps = triton.cdiv(M, block_m) * triton.cdiv(N, block_n), triton.cdiv(K, block_k)
    # The half that is stored passes through shared memory: one in fp64 has no room there.
    tma = target.has_tma and alignment == 16 and N * output_bytes % 16 == 0 and output_bytes <= 4
    if tma:
        num_stages -= output_bytes == 4  # room for a stored half in fp32
    chain, unit = chains(K, steps, largest) if chained else (steps, 0.0)
    options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "UNIT": unit, "num_warps": num_warps}
    blocks = min(tiles, target.multiprocessors) if tma else tiles
    if gluon and tma and output_bytes == 2 and target.name == "sm90":  # of fp32 a thread keeps 16 bytes on the stack
        options |= {"EXPERTS": 0, "PADDED": 0, "SCALE_ROWS": scale_rows, "STAGES": num_stages, "WARPS": num_warps}
        return ScaledPlan(None, (blocks,), chain, (block_m, block_n), {**options, "maxnreg": 168})
    options |= {"GROUP_M": group_m, "EVEN_K": tma or K % block_k == 0, "TMA": tma, **common, "num_stages": num_stages}
    return ScaledPlan(_scaled_mm_tiles_kernel, (blocks,), chain, (block_m, block_n), options)


def _alignment(a: Tensor, b: Tensor) -> int:
    """The largest of 16, 8, 4, 1 that divides K and the strides of rows; 1 unless 16 divides the first addresses."""
    if (a.data_ptr() | b.data_ptr()) % 16:
        return 1
    sizes = a.stride(0) | b.stride(0) | a.shape[1]
    return next(size for size in (16, 8, 4, 1) if sizes % size == 0)


def scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """(a @ b.T) * a_scale * b_scale.T + bias for codes a [M, K], b [N, K], on any device and target.

    Both are int8, or float8_e4m3fn; a may be float8_e5m2 beside the latter.
    a_scale [M, 1] fp32; b_scale [N | 1 | ceil(N / 128), 1] in fp32, bf16 or fp16.
    """
    M, K, N = *a.shape, b.shape[0]
    plan = None
    if unavailable_reason(a.device) is None:
        a, b = (codes if codes.stride(1) == 1 else codes.contiguous() for codes in (a, b))
        target = target_of(a.device)
        sizes = (M, N, K, a.dtype != torch.int8, out_dtype.itemsize, scale_rows(tuple(b_scale.shape), N))
        largest = 448.0**2 if a.dtype == b.dtype else 448.0 * torch.finfo(a.dtype).max
        gluon = a.dtype == b.dtype and hopper.has_kernels()
        plan = scaled_plan(*sizes, _alignment(a, b), target, largest, gluon)
    if plan is None:
        return _dense_product(a, b, a_scale, b_scale, bias, out_dtype)
    y = torch.empty(M, N, dtype=out_dtype, device=a.device)
    bias = None if bias is None else bias.contiguous()
    operands = (a, b, a_scale.contiguous(), b_scale.contiguous(), bias, y)
    has_bias = {"HAS_BIAS": bias is not None}
    if plan.kernel is None:
        tiles_m = triton.cdiv(M, plan.block[0])
        return hopper.product_of_codes(*operands[:-1], None, y, tiles_m, plan.steps, plan.options)
    unit = plan.options["ALIGN"]
    sizes = (M, N, K // unit, a.stride(0) // unit, b.stride(0) // unit, plan.steps)
    if plan.kernel is _scaled_mm_split_kernel:
        partials = counters = None
        if plan.options["SPLIT"]:
            sums = torch.int32 if a.dtype == torch.int8 else torch.float32
            partials = torch.empty((*plan.grid, *plan.block), dtype=sums, device=a.device)
            counters = tile_counters(plan.grid[0], a.device)
        launch(plan.kernel, plan.grid, *operands, partials, counters, *sizes, **has_bias, **plan.options)
    else:
        run = launch_with_scratch if plan.options["TMA"] else launch
        run(plan.kernel, plan.grid, *operands, *sizes, **has_bias, **plan.options)
    return y


def _dense_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`scaled_product` by the vendor's GEMM on the codes, which are exact in bf16 (sums are fp32)."""
    # A sum of codes can pass fp16's 65504, hence fp32 for fp16.
    dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    y = (a.to(dtype) @ b.to(dtype).t()).float() * a_scale * expand_rows(b_scale, b.shape[0]).float().t()
    return (y if bias is None else y + bias.float()).to(out_dtype)


@implements(op.int8_scaled_mm, "XPU", SCALED + DENSE)
@implements(op.int8_scaled_mm, "CUDA", SCALED + DENSE)
def int8_scaled_mm_gpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """Compute `int8_scaled_mm_reference`; for bf16 output the dense path rounds sums to bf16 before the scales."""
    op.check(a, b, a_scale, b_scale, bias, torch.int8)
    return scaled_product(a, b, a_scale, b_scale, bias, out_dtype)


@implements(op.fp8_scaled_mm, "XPU", SCALED + DENSE)
@implements(op.fp8_scaled_mm, "CUDA", SCALED + DENSE)
def fp8_scaled_mm_gpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """Compute `fp8_scaled_mm_reference`; for bf16 output the dense path rounds sums to bf16 before the scales."""
    op.check(a, b, a_scale, b_scale, bias, *op.FLOAT8)
    return scaled_product(a, b, a_scale, b_scale, bias, out_dtype)


@implements(op.quantized_mm, "XPU", SCALED + FUSED + DENSE)
@implements(op.quantized_mm, "CUDA", SCALED + FUSED + HOPPER + DENSE)
@takes_weight(op.check_quantized)
def quantized_mm_gpu(
    codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """Compute `quantized_mm_reference`; a weight that is not multiplied as codes is rounded to the product's dtype."""
    return _product_of_codes(codes, row_scale, w, bias, out_dtype)


def _product_of_codes(
    codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    activation = "int8" if codes.dtype == torch.int8 else "fp8_e4m3"
    problem = Problem(w.format, w.group_size, w.N, w.K, out_dtype, w.zero_point is None, activation)
    if w.global_scale is None and codes_unsupported_reason(problem, target_of(codes.device)) is None:
        y = scaled_product(as_rows(codes), w.qdata, row_scale.view(-1, 1), w.scale, bias, out_dtype)
        return y.view(*codes.shape[:-1], w.N)
    y = fused_mm(codes, w, bias, row_scale, dtype=out_dtype)
    if y is not None:
        return y
    # int8 and fp8 codes are exact in bf16. A sum of 127 * w can pass fp16's 65504, hence fp32 there.
    dtype = torch.float32 if out_dtype == torch.float16 else out_dtype
    y = codes.to(dtype) @ dequantized(w, dtype).t()
    if bias is None and dtype == out_dtype:
        return y.mul_(row_scale)  # in one pass, rounded as below
    y = y.float() * row_scale
    return (y if bias is None else y + bias.float()).to(out_dtype)


@implements(op.dynamic_mm, "XPU", SCALED + FUSED + DENSE)
@implements(op.dynamic_mm, "CUDA", SCALED + FUSED + HOPPER + DENSE)
@takes_weight(op.check_dynamic, transforms=True, quantizes=True)
def dynamic_mm_gpu(x: Tensor, w: Weight, bias: Tensor | None, *, activation: str) -> Tensor:
    """Compute `dynamic_mm_reference`; a weight that is not multiplied as codes is rounded to the product's dtype."""
    return _product_of_codes(*op.quantized_for(x, w, activation), w, bias, x.dtype)
