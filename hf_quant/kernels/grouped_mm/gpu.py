"""Expert products on a GPU: one launch for all experts, each weight decoded in registers, none in 16 bit in memory.

Rows are sorted by expert, and how many each has is known on the device only. The grid is as large as any distribution
of M rows over E experts can need (M // BLOCK_M + min(E, M) + 1 tiles of rows); a program finds its expert from the
running sum of tiles over experts, E integers in registers, and leaves if there is none. So nothing is read on the
host, and a CUDA graph can be captured. Rows of no expert are set to zero by the tiles that follow the last expert's.

Traffic at decode: the codes of the experts that have rows, each once. Modelled at 4.3 TB/s, int4 g128, Qwen3-30B-A3B
(128 experts, 8 per token, up 1536 x 2048, down 2048 x 768), one token: 8 x 1.66 MB, 3.1 us, and 1.5 us; Mixtral 8x7B
(2 of 8, 28672 x 4096 and 4096 x 14336): 28.3 us and 14.1 us. At prefill the tiles of one expert are neighbours in the
grid and share its codes in L2; the scales enter before the dot, as in the crossover branch of `weight_only`.

On Hopper experts with 16 rows each and more are multiplied by the kernel of `gpu.hopper`: measured on an H100, int4
g128, Mixtral's gate and up, 4096 tokens, 3.2 ms, where this one takes 5.5 and torch's grouped product of bf16 3.1; at
256 tokens .47, .68 and .71. To dequantize all experts for torch's product takes 4.3 ms at 4096 tokens.

Measured on an H200 (docs/gpu.md): one token 47.8 us of Mixtral's gate and up, 4.4 times as fast as torch's grouped
product of bf16, 10.1 us of Qwen3's. The order of the grid (tiles of rows fastest) is modelled, not measured.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES
from hf_quant.kernels.dispatch import Path, Problem, direct, implements
from hf_quant.kernels.gpu.decode import (
    ANY_GROUP,
    bits_of,
    codes_per_element,
    common_unit,
    decode_options,
    levels_tensor,
    row_alignment,
    row_elements,
    scale_in,
    scale_kind,
    scale_rows,
    undecodable_reason,
)
from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.launch import (
    Target,
    cached_plan,
    config_table,
    launch,
    target_of,
    tl,
    triton,
    unavailable_reason,
)
from hf_quant.kernels.gpu.rows import rows_of_tile
from hf_quant.kernels.gpu.tile import tile_product
from hf_quant.kernels.grouped_mm.op import check, grouped_mm, rows_of_experts
from hf_quant.kernels.grouped_scaled_mm.gpu import FEW, grouped_product
from hf_quant.kernels.hadamard.op import hadamard
from hf_quant.kernels.rowwise.op import quantize_rowwise, quantize_static
from hf_quant.kernels.scaled_mm.gpu import codes_unsupported_reason, supports_scaled
from hf_quant.kernels.scaled_mm.op import dynamic_mm
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.gpu import (
    batch_of,
    choose_row,
    is_wide,
    reads_wide,
    supports_fused,
    tiling,
)
from hf_quant.kernels.weight_only.op import weight_only_mm


# (largest mean of rows per expert, BLOCK_M, BLOCK_N, largest BLOCK_K, num_warps, num_stages, 1, scales before the dot)
CONFIGS = {
    "sm75": (  # by FMAs, see `weight_only`; more rows go by the loop over experts
        (8, 8, 64, 64, 4, 1, 1, 0),
        (16, 16, 64, 64, 4, 1, 1, 0),
    ),
    "sm80": (
        (4, 8, 64, 128, 4, 5, 1, 0),
        (16, 16, 64, 128, 4, 4, 1, 0),
        (48, 64, 64, 128, 4, 4, 1, 0),
        (2**30, 128, 128, 64, 8, 3, 1, 1),
    ),
    "sm89": (
        (4, 8, 64, 128, 4, 4, 1, 0),
        (16, 16, 64, 128, 4, 4, 1, 0),
        (48, 64, 64, 128, 4, 3, 1, 0),
        (2**30, 128, 128, 64, 8, 3, 1, 1),
    ),
    "sm90": (
        (4, 8, 64, 128, 4, 4, 1, 0),
        (16, 16, 128, 128, 4, 3, 1, 0),
        (96, 32, 128, 128, 4, 3, 1, 0),
        (2**30, 128, 256, 64, 8, 3, 1, 1),
    ),
    "sm100": (
        (4, 8, 64, 128, 4, 6, 1, 0),
        (16, 16, 64, 128, 4, 5, 1, 0),
        (48, 64, 128, 128, 8, 4, 1, 0),
        (160, 128, 128, 64, 8, 4, 1, 1),
        (2**30, 256, 128, 64, 8, 3, 1, 1),
        (2**30, 128, 128, 64, 8, 4, 1, 1),
    ),
    "gfx942": (
        (16, 16, 64, 128, 4, 2, 1, 0),
        (48, 64, 64, 128, 4, 2, 1, 0),
        (2**30, 128, 128, 64, 8, 2, 1, 1),
    ),
}


def _supports_loop(problem: Problem) -> str | None:
    return "one launch serves all experts" if supports_fused(problem) is None else None


FUSED = (Path("Triton, decoded in registers", "any M; sm75: up to 16 rows an expert", supports_fused),)
HOPPER = (Path("Gluon, decoded beside the product", "sm90: 16 rows an expert and more", hopper.supports),)
SCALED = (Path("Triton, codes x codes", "65 rows an expert and more", supports_scaled),)
LOOP = (Path("dequantize + GEMM, expert by expert", "any M", _supports_loop),)


@triton.jit(do_not_specialize=["M", "tiles_m"])
def _grouped_mm_kernel(
    x,
    qdata,
    scale,
    zero_point,
    global_scale,
    bias,
    row_scale,
    offsets,
    levels,
    y,
    M,
    N,
    K,
    tiles_m,
    x_stride,
    q_stride,
    q_matrix,
    scale_stride,
    scale_matrix,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_MODE: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    DOT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANE0: tl.constexpr,
    PLANE1: tl.constexpr,
    CODES: tl.constexpr,
    MANTISSA: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PTX: tl.constexpr,
    BATCH: tl.constexpr,
    WIDE_X: tl.constexpr,
):
    """Program tile_n * tiles_m + tile_m: tiles of rows, and so the tiles of one expert, are neighbours."""
    program = tl.program_id(0)
    expert, first_row, end_row = rows_of_tile(offsets, program % tiles_m, M, BLOCK_M, EXPERTS, EXPERTS_PADDED)
    n = program // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    m = first_row + tl.arange(0, BLOCK_M)
    out = y + m.to(tl.int64)[:, None] * N + n[None, :]
    mask = (m < end_row)[:, None] & (n < N)[None, :]
    if expert == EXPERTS:
        tl.store(out, tl.zeros((BLOCK_M, BLOCK_N), y.dtype.element_ty), mask=mask)
    else:
        row = tl.minimum(n, N - 1)
        scales = expert * scale_matrix + row * 0
        if SCALE_ROWS > 0:
            scales += row // SCALE_ROWS * scale_stride
        total = tile_product(
            x,
            m.to(tl.int64) * (x_stride * ALIGN),
            m < end_row,
            qdata,
            expert.to(tl.int64) * q_matrix + row.to(tl.int64) * (q_stride * ALIGN),
            scale,
            scales,
            zero_point,
            levels,
            0,
            tl.cdiv(K, BLOCK_K),
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
            GROUP,
            SCALE_MODE,
            SCALE,
            HAS_ZERO,
            DOT,
            KIND,
            BITS,
            PLANE0,
            PLANE1,
            CODES,
            MANTISSA,
            MULTIPLIER,
            PTX,
            BATCH,
            WIDE_X,
        )
        if SCALE_MODE == "row":
            total *= scale_in(tl.load(scale + scales), SCALE, tl.float32)[:, None]
        if HAS_GLOBAL:
            total *= tl.load(global_scale + expert)
        if HAS_ROW_SCALE:
            total *= tl.load(row_scale + m, mask=m < end_row, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + expert * N + row).to(tl.float32)[:, None]
        tl.store(out, tl.trans(total.to(y.dtype.element_ty)), mask=mask)


class GroupedPlan(NamedTuple):
    """The launch of the kernel for a product: all that follows from sizes and types."""

    codes: int  # per element
    tiles_m: int
    tiles_n: int
    options: dict
    wide: bool  # whether tiles read x so, where its rows allow it


@cached_plan
def grouped_plan(
    M: int,
    shape: tuple[int, ...],
    K: int,
    dtype: torch.dtype,
    format: str,
    group_size: int,
    alignment: int,
    scale_shape: tuple[int, ...],
    scale_dtype: torch.dtype,
    zeros: str,
    target: Target,
) -> GroupedPlan | None:
    """The plan for M rows and codes of `shape` [E, N, words]; None where the loop over experts serves.

    `alignment`: of the codes, see `row_alignment`.
    """
    E, N, _ = shape
    if M * K * E * N == 0 or dtype not in (torch.float16, torch.bfloat16) or undecodable_reason(CODES[format]):
        return None
    if dtype == torch.bfloat16 and not target.has_dot:
        return None
    codes = codes_per_element(CODES[format], K, alignment)
    mean = triton.cdiv(M, min(E, M))
    row = choose_row(config_table("grouped_mm", CONFIGS, target), mean, N * min(E, M), K, target)
    if row is None:
        return None
    found = tiling(row, codes, group_size, K, target.table, zeros)
    if isinstance(found, str):
        return None
    options = {
        "BLOCK_M": found.block_m,
        "BLOCK_N": found.block_n,
        "BLOCK_K": found.block_k,
        "EXPERTS": E,
        "EXPERTS_PADDED": triton.next_power_of_2(E),
        "EVEN_K": K % found.block_k == 0,
        "GROUP": group_size if group_size < K else ANY_GROUP,
        "SCALE_MODE": found.scale_mode,
        "SCALE": scale_kind(scale_dtype),
        "SCALE_ROWS": scale_rows(scale_shape, N),
        "DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float16,
        **decode_options(format, dtype, codes, use_ptx=target.is_nvidia),
        "BATCH": batch_of(found.block_m, found.num_warps, target),
        "num_warps": found.num_warps,
        "num_stages": found.num_stages,
    }
    if target.table == "sm75":  # left alone, ptxas takes 80 or 128 and keeps 8 bytes on the stack (fp6, int3, W4A8)
        options["maxnreg"] = 168 if found.block_m == 8 else 232
    if target.table == "sm89" and found.block_m == 16:
        options["maxnreg"] = 128  # left alone, ptxas takes 80 to 95 and keeps 8 to 32 bytes on the stack (int3, fp8)
    elif target.table == "sm89" and codes == 8:
        if found.block_m == 64 and found.num_warps == 4 and group_size < found.block_k:
            options["num_stages"] = 2  # with 3 as many bytes (Triton 3.6, int3 g16); 4 leave room for one block only
    tiles_m = M // found.block_m + min(E, M) + 1
    wide = is_wide(found.block_m, codes, options["BATCH"], K, target)
    return GroupedPlan(codes, tiles_m, triton.cdiv(N, found.block_n), options, wide)


def _rows_of_codes(x: Tensor, w: Weight, activation: str) -> tuple[Tensor, Tensor]:
    """(codes of x [M, K], scale of each row)."""
    if w.input_scale is None:
        return quantize_rowwise(x, format=activation)
    return quantize_static(x, w.input_scale, w.input_diagonal, format=activation)


def _multiplies_codes(M: int, w: Weight, activation: str, target: Target) -> bool:
    """True if codes of M rows meet the codes of experts in the matrix units: where those are the bound.

    On Hopper, whose kernel for weights alone has been measured, not before this has been, too.
    """
    if M // min(len(w.qdata), M) <= FEW or w.global_scale is not None or w.N == 0:
        return False
    if target.name == "sm90" and not hopper.UNTRIED:
        return False
    problem = Problem(w.format, w.group_size, w.N, w.K, torch.float32, w.zero_point is None, activation)
    return codes_unsupported_reason(problem, target) is None


def _fused(
    x: Tensor,
    w: Weight,
    bias: Tensor | None,
    offsets: Tensor,
    activation: str | None,
    plan: GroupedPlan | hopper.Plan,
    target: Target,
) -> Tensor:
    """`grouped_mm` in one launch, two with quantized activations; weights contiguous."""
    M, K = x.shape
    dtype, row_scale = x.dtype, None
    if activation is not None:
        x, row_scale = _rows_of_codes(x, w, activation)
        if activation != "int8" and not target.has_fp8_dot:
            x = x.to(dtype)  # these GPUs cannot read float8_e4m3fn
    x = x if x.stride(1) == 1 else x.contiguous()
    bias, offsets = None if bias is None else bias.contiguous(), offsets.contiguous()
    if isinstance(plan, hopper.Plan):
        x = x if plan.codes else x.to(dtype)
        return hopper.product(x, _weights(w, plan), bias, row_scale, offsets, dtype, plan)
    y = torch.empty(M, w.N, dtype=dtype, device=x.device)
    stride = row_elements(w.qdata, plan.codes)
    unit = common_unit(x.stride(0), stride)
    launch(
        _grouped_mm_kernel,
        (plan.tiles_m * plan.tiles_n,),
        x,
        bits_of(w.qdata),
        bits_of(w.scale),
        w.zero_point,
        w.global_scale,
        bias,
        row_scale,
        offsets,
        levels_tensor(w.format, dtype, x.device),
        y,
        M,
        w.N,
        K,
        plan.tiles_m,
        x.stride(0) // unit,
        stride // unit,
        stride * w.N,
        w.scale.stride(1),
        w.scale.stride(0),
        ALIGN=unit,
        HAS_ZERO=w.zero_point is not None,
        HAS_GLOBAL=w.global_scale is not None,
        HAS_BIAS=bias is not None,
        HAS_ROW_SCALE=row_scale is not None,
        WIDE_X=reads_wide(x, plan.wide),
        **plan.options,
    )
    return y


def _weights(w: Weight, plan: hopper.Plan) -> hopper.Weights:
    """The weights of all experts as the kernel for Hopper takes them."""
    codes = w.qdata.view(torch.int32).flatten(0, 1)
    tiles = hopper.tiles_of_codes(codes, *codes.shape, plan)
    return hopper.Weights(
        *(tiles, bits_of(w.scale), w.zero_point, w.global_scale, w.N, w.scale.stride(1), w.scale.stride(0))
    )


def _hopper_plan(x: Tensor, w: Weight, activation: str | None, target: Target) -> hopper.Plan | None:
    """The plan of the kernel for Hopper, None where it does not serve."""
    if x.stride(1) != 1 or not hopper.can_run(x, w.qdata):
        return None
    given = (
        *(x.shape[0], w.N, w.K, x.dtype, w.format, w.group_size, tuple(w.scale.shape), w.scale.dtype),
        *(w.zeros, target, w.qdata.shape[0]),
    )
    return (activation == "int8" and hopper.plan(*given, codes=True)) or hopper.plan(*given)


_hadamard = direct(hadamard)


@implements(grouped_mm, "XPU", SCALED + FUSED + LOOP)
@implements(grouped_mm, "CUDA", SCALED + FUSED + HOPPER + LOOP)
@takes_weight(check, transforms=True, quantizes=True)
def grouped_mm_gpu(x: Tensor, w: Weight, bias: Tensor | None, offsets: Tensor, *, activation: str | None) -> Tensor:
    """Compute `grouped_mm_reference`; weights are rounded to x's dtype if they are scaled before the product.

    So is a transformed x, before its rows are quantized with scales of their own.
    """
    if w.input_diagonal is not None and w.input_scale is None:
        x = _hadamard(x, w.input_diagonal, block_size=w.input_diagonal.shape[1])
        w = w._replace(input_diagonal=None)
    if unavailable_reason(x.device) is None:
        target, w = target_of(x.device), w.contiguous()
        if activation is not None and x.numel() and _multiplies_codes(len(x), w, activation, target):
            codes, row_scale = _rows_of_codes(x, w, activation)
            return grouped_product(codes, w.qdata, row_scale.view(-1, 1), w.scale, bias, offsets, x.dtype)
        if (found := _hopper_plan(x, w, activation, target)) is not None:
            return _fused(x, w, bias, offsets, activation, found, target)
        plan = grouped_plan(
            *(x.shape[0], tuple(w.qdata.shape), w.K, x.dtype, w.format, w.group_size),
            *(row_alignment(w.qdata), tuple(w.scale.shape), w.scale.dtype, w.zeros, target),
        )
        if plan is not None:
            return _fused(x, w, bias, offsets, activation, plan, target)
    y, options = x.new_zeros(x.shape[0], w.N), {"format": w.format, "group_size": w.group_size}
    for e, rows in rows_of_experts(offsets):
        parts = (*w.expert(e).packed, None if bias is None else bias[e])
        if activation is None:
            y[rows] = weight_only_mm(x[rows], *parts, **options)
        else:
            inputs = (w.input_diagonal, w.input_scale)
            y[rows] = dynamic_mm(x[rows], *parts, *inputs, activation=activation, **options)
    return y
