"""When and how products of quantized weights run on Hopper by the Gluon kernel of kernel.py.

Measured on an H100 with Triton 3.6 (docs/gpu.md), int4 in groups of 128, 28672 x 4096: 32 tokens, 35 us; 64, 40; 128,
56; 256, 91; 1024, 331; in bf16 85, 87, 89, 102 and 311.

Which tile a product takes follows from three numbers of each, measured there (`ROWS`): how long one of its columns of
K takes where all multiprocessors work, and how much longer where each has one block only, which then has nothing to
do while it waits. From them `choose` computes the time of a product for each tile and split of K.
"""

import importlib.util
import math
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES
from hf_quant.kernels.dispatch import Problem
from hf_quant.kernels.gpu.counters import tile_counters
from hf_quant.kernels.gpu.decode import ANY_GROUP, scale_kind, scale_rows
from hf_quant.kernels.gpu.hopper.pairs import pair_ptx, selectors, undecodable_reason
from hf_quant.kernels.gpu.launch import (
    HAS_TRITON,
    Target,
    cached_plan,
    interpreting,
    launch,
    recording,
    target_of,
    triton,
)


HAS_GLUON = HAS_TRITON and importlib.util.find_spec("triton.experimental.gluon") is not None
# Tokens, or rows of each expert, from which on it is faster than the kernels of `weight_only` and `grouped_mm`.
LEAST_TOKENS = {4: 17, 8: 33}  # by bits
LEAST_ROWS = 16
_PARTS = (2, 4)  # of K
_TILE_TIME = 300  # of the beginning and the end of a tile, in columns
_SPLIT_TIME, _PARTIAL_TIME = 1500, 0.0015  # of adding up parts, and of one number of a part, in units of `Row.time`
_MIN_PART = 512  # columns


class Row(NamedTuple):
    """A tile, and how fast it is.

    Attributes:
        block_m: tokens, the second operand of wgmma: a multiple of 8.
        block_n: rows of the weight, 16 for each warp or a multiple of that.
        block_k: columns of a step.
        warps: that decode and multiply; 4 more copy.
        stages: steps in the ring.
        registers: of a thread, all warps alike at the start of the kernel.
        time: of a column of K, relative to that of the tile of 64 x 64.
        alone: that many times as long, where a multiprocessor has one block.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    registers: int
    time: float
    alone: float


ROWS = (
    Row(32, 64, 128, 4, 6, 96, 0.82, 1.45),
    Row(32, 128, 64, 8, 6, 80, 1.55, 1.2),  # steps of 128 columns leave too few registers (ptxas: C7512)
    Row(64, 64, 128, 4, 4, 96, 0.91, 1.35),
    Row(64, 128, 64, 8, 5, 80, 1.74, 1.2),
    Row(128, 64, 128, 4, 3, 128, 1.27, 1.45),
    Row(128, 128, 64, 8, 4, 104, 2.7, 1.05),
    Row(256, 64, 64, 4, 4, 160, 2.38, 1.0),
    Row(256, 128, 64, 8, 4, 168, 4.15, 1.0),
)


# Of codes of 4 bits times codes of tokens; modelled, not measured. 128 tokens leave no registers for two steps.
CODE_ROWS = (
    Row(32, 64, 128, 4, 8, 72, 0.4, 1.35),
    Row(64, 64, 128, 4, 6, 96, 0.5, 1.35),
    Row(64, 128, 128, 8, 5, 120, 0.95, 1.2),
)
# Whether kernels, and splits of K, that no GPU has run yet are taken.
UNTRIED = os.environ.get("HF_QUANT_UNTRIED_KERNELS") == "1"


class Split(NamedTuple):
    """The first `whole` tiles are one block each; K of each other tile is split into as many parts, a block each."""

    parts: int
    whole: int = 0


class Plan(NamedTuple):
    """The launch of a product: all that follows from sizes and types."""

    row: Row
    words: int  # of 32 bits, of one row and step
    tiles_m: int
    tiles: int
    split: Split
    steps: int  # of one part of K
    codes: bool  # whether x is multiplied as int8 codes
    options: dict[str, Any]


def supports(problem: Problem) -> str | None:
    """The reason why the kernel cannot serve a product, None if it can."""
    if not HAS_GLUON:
        return "Gluon, a part of triton, is not installed"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} activations"
    return unsupported_reason(problem.format, problem.group_size, problem.K)


def unsupported_reason(format: str, group_size: int, K: int) -> str | None:
    """The reason why no tile serves a weight, None if one does."""
    if (reason := undecodable_reason(CODES[format])) is not None:
        return reason
    bits = 4 if CODES[format].is_packed else 8
    if K * bits % 128:
        return f"rows of {K} codes, which are no whole 16 bytes"
    if group_size < K and any(
        group_size % row.block_k and (row.block_k % group_size or group_size % 8) for row in ROWS
    ):
        return f"groups of {group_size}, which neither divide a step nor hold whole ones"
    return None


def choose(
    M: int, N: int, K: int, target: Target, experts: int = 0, table: tuple[Row, ...] = ROWS
) -> tuple[Row, Split]:
    """(tile, split of K) of the least time; experts: as many have M / experts rows each, and K is not split."""
    served, at_once = max(experts, 1), target.multiprocessors

    def time(row: Row, split: Split) -> float:
        tiles = _tiles(M, N, row)
        if experts:  # the last tile of each is half full
            tiles = served * max(M / served / row.block_m + 0.5, 1) * triton.cdiv(N, row.block_n)
        blocks = (tiles - split.whole) * split.parts
        steps = triton.cdiv(K, row.block_k)
        columns = [part * row.block_k + _TILE_TIME for part in (steps, triton.cdiv(steps, split.parts))]
        rounds = [split.whole // at_once, math.ceil(blocks / at_once)]
        spent = sum(count * length for count, length in zip(rounds, columns)) * row.time
        added = _SPLIT_TIME + _PARTIAL_TIME * blocks * row.block_m * row.block_n if split.parts > 1 else 0
        return spent * (row.alone if sum(rounds) == 1 else 1) + added

    def splits(row: Row) -> list[Split]:
        """No split, of all tiles, or (untried) of those that the last full round leaves over, or the last but one."""
        full = _tiles(M, N, row) // at_once if UNTRIED and not experts else 0
        some = [Split(parts, count * at_once) for parts in _PARTS for count in {0, max(full - 1, 0), full}]
        return [Split(1)] + [split for split in some if not experts and K >= split.parts * _MIN_PART]

    # Tiles of 64 rows read x twice as often, and the rows of all experts are too many for the cache.
    rows = [row for row in table if row.block_n >= 128 or not experts]
    return min(((row, split) for row in rows for split in splits(row)), key=lambda pair: time(*pair))


def _tiles(M: int, N: int, row: Row) -> int:
    return triton.cdiv(M, row.block_m) * triton.cdiv(N, row.block_n)


@cache
def _gluon() -> Any:
    """The module of the kernel: importing it needs Gluon."""
    from hf_quant.kernels.gpu.hopper import kernel

    return kernel


@cache
def _scaled_mm_kernel() -> Any:
    """The kernel of products of codes with codes."""
    from hf_quant.kernels.gpu.hopper.scaled_kernel import _hopper_scaled_mm_kernel

    return _hopper_scaled_mm_kernel


@cache
def layout(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The layout of a tile in shared memory, which copies write and wgmma reads."""
    gl = _gluon().gl
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32, torch.int8: gl.int8}
    return gl.NVMMASharedLayout.get_default_for(list(shape), kinds.get(dtype, gl.float8e4nv))


@cache
def descriptor() -> Any:
    """The class of what tells a kernel where tiles of a tensor are."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor


def tiles_of(tensor: Any, shape: tuple[int, ...], stride: int, block: tuple[int, int]) -> Any:
    """A matrix of that shape and stride of rows as the copies of a kernel take it, in tiles of `block`."""
    return descriptor()(tensor, list(shape), [stride, 1], list(block), layout(block, tensor.dtype))


@cached_plan
def plan(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    format: str,
    group_size: int,
    scale_shape: tuple[int, ...],
    scale_dtype: torch.dtype,
    zeros: str,
    target: Target,
    experts: int = 0,
    codes: bool = False,
) -> Plan | None:
    """The plan for M tokens, None where another path serves.

    zeros: see `Weight.zeros`. experts: how many have weights, 0 for a plain weight. codes: x is int8, multiplied as it
    is.
    """
    if target.name != "sm90" or dtype not in (torch.float16, torch.bfloat16) or M * N * K == 0:
        return None
    takes_codes = UNTRIED and format == "int4" and not zeros and (group_size >= K or group_size % 128 == 0)
    if unsupported_reason(format, group_size, K) is not None or (codes and not takes_codes):
        return None
    spec, served = CODES[format], min(experts, M)
    bits = 4 if spec.is_packed else 8
    if (M // served < LEAST_ROWS) if experts else M < LEAST_TOKENS[bits]:
        return None
    gl = _gluon().gl
    row, split = choose(M, N, K, target, served, CODE_ROWS if codes else ROWS)
    words = row.block_k * bits // 32
    scale, scaling = scale_kind(scale_dtype), "*" if group_size < K else ""
    if zeros:
        scaling = "*+" if zeros == "values" else "-*"
    elif scaling and scale == "e4m3" and format == "int4" and dtype == torch.bfloat16:
        scaling = "fma"
    options = {
        "BLOCK_M": row.block_m,
        "BLOCK_N": row.block_n,
        "BLOCK_K": row.block_k,
        "EXPERTS": experts,
        "PADDED": triton.next_power_of_2(experts) if experts else 0,
        "GROUP": group_size if group_size < K else ANY_GROUP,
        "BITS": bits,
        "SCALE": scale,
        "SCALE_ROWS": scale_rows(scale_shape, N),
        "SCALING": scaling,
        "HAS_ZERO": bool(zeros),
        "SPLIT_K": split.parts,
        "TAIL": split.whole > 0,
        "DOT": gl.bfloat16 if dtype == torch.bfloat16 else gl.float16,
        "MAGIC": 128 if dtype == torch.bfloat16 else 1024,
        "PTX": "" if codes else pair_ptx(format, dtype, scaling),
        "SELECTORS": selectors(spec),
        "STAGES": row.stages,
        "WARPS": row.warps,
        "num_warps": row.warps,
        # By Triton 3.6 80 keep 8 to 16 bytes on the stack where a step has the scales of four groups (nvfp4), or
        # experts have zero points (int4 g128).
        "maxnreg": 104 if row.registers == 80 and (group_size < 32 or (zeros and experts)) else row.registers,
    }
    # As many tiles of tokens as any distribution over the experts can need, and one of rows of none.
    tiles_m = M // row.block_m + served + 1 if experts else triton.cdiv(M, row.block_m)
    steps = triton.cdiv(triton.cdiv(K, row.block_k), split.parts)
    tiles = tiles_m * triton.cdiv(N, row.block_n)
    return Plan(row, words, tiles_m, tiles, split, steps, codes, options)


def has_kernels() -> bool:
    """True if there is Gluon, which Triton's interpreter does not know."""
    return HAS_GLUON and (recording() or not interpreting())


def can_run(x: Tensor, qdata: Tensor) -> bool:
    """True if there is the kernel, and rows of x and of codes start at multiples of 16 bytes, as it copies them."""
    if not has_kernels():
        return False
    starts = x.data_ptr() | qdata.data_ptr() | x.stride(0) * x.element_size()
    return (starts | qdata.stride(-2) * qdata.element_size()) % 16 == 0


class Weights(NamedTuple):
    """A weight [N, K], or those of all experts, as the kernel takes them: tensors, or what stands for them.

    tiles: of the codes, see `tiles_of_codes`. scale_stride, scale_matrix: strides of the rows of scales, and of the
    experts' scales.
    """

    tiles: Any
    scale: Any
    zero_point: Any
    global_scale: Any
    N: int
    scale_stride: int
    scale_matrix: int = 0


def tiles_of_codes(codes: Any, rows: int, stride: int, plan: Plan) -> Any:
    """Codes as int32 words [rows, stride], of all experts one after the other, in tiles of a plan."""
    return tiles_of(codes, (rows, stride), stride, (plan.row.block_n, plan.words))


def product(
    x: Tensor,
    w: Weights,
    bias: Tensor | None,
    row_scale: Tensor | None,
    offsets: Tensor | None,
    dtype: torch.dtype,
    plan: Plan,
) -> Tensor:
    """x [M, K] -> [M, N] in `dtype`, for operands that `can_run`; bias, row_scale and offsets are contiguous."""
    M, K = x.shape
    y = torch.empty(M, w.N, dtype=dtype, device=x.device)
    row = plan.row
    x_tiles = tiles_of(x, (M, K), x.stride(0), (row.block_m, row.block_k))
    partials = counters = None
    (parts, whole), split_tiles = plan.split, plan.tiles - plan.split.whole
    if parts > 1:
        shape = (split_tiles, parts, row.block_n, row.block_m)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        counters = tile_counters(split_tiles, x.device)
    launch(
        _gluon()._hopper_mm_kernel,
        (whole + split_tiles * parts, 1) if whole else (plan.tiles, parts),
        y,
        w.scale,
        x_tiles,
        w.tiles,
        w.zero_point,
        w.global_scale,
        bias,
        row_scale,
        offsets,
        partials,
        counters,
        M,
        w.N,
        K,
        plan.tiles_m,
        w.scale_stride,
        w.scale_matrix,
        plan.steps,
        whole,
        HAS_GLOBAL=w.global_scale is not None,
        HAS_BIAS=bias is not None,
        HAS_ROW_SCALE=row_scale is not None,
        shared=plan.options,
    )
    return y


def product_of_codes(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    y: Tensor,
    tiles_m: int,
    chain_steps: int,
    options: dict[str, Any],
) -> Tensor:
    """y [M, N] = (a [M, K] @ b [N, K].T) * a_scale * b_scale + bias, of codes whose rows start at 16 bytes.

    offsets: where the rows of each expert end; b, b_scale and bias are those of all of them, one behind the other.
    options: constexprs of the kernel. Its blocks stay on their multiprocessors.
    """
    (M, K), N = a.shape, y.shape[1]
    blocks = ((rows, options["BLOCK_K"]) for rows in (options["BLOCK_M"], options["BLOCK_N"]))
    tiles = [tiles_of(codes, codes.shape, codes.stride(0), block) for codes, block in zip((a, b), blocks)]
    grid = min(tiles_m * triton.cdiv(N, options["BLOCK_N"]), target_of(a.device).multiprocessors)
    launch(
        _scaled_mm_kernel(),
        (grid,),
        *(a_scale, *tiles, b_scale, bias, offsets, y, M, N, K, tiles_m, chain_steps),
        HAS_BIAS=bias is not None,
        **options,
    )
    return y
