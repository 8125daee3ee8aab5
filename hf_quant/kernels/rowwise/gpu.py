"""Row quantization in Triton, one kernel for every prologue: `_quantize_rowwise_kernel`.

A program takes whole rows and holds them in registers: one read of x, one write of codes, 3 bytes a value from bf16 (5
with `up`). The vectors of norms and modulations come from the L1 cache. Rows of more than 16384 values are read again
for the codes, from the L2 cache.

Modelled on an H200 (4.3 TB/s; 132 multiprocessors, 128 instructions a clock at 1.755 GHz) for M = 4608: memory takes
9.9 us for K = 3072 and 46 us for K = 14336, 16.4 and 77 us with `up`. Instructions take as long as memory at 20.7 of
them a value, 34 with `up`. Executed for each value, int8, machine code for sm90, K = 3072 | 14336:

    quantize_rowwise 12.5 | 11.5, with a seed 26 | 23, rms_norm 15 | 12, layer_norm with modulation 22 | 18,
    silu * up 17 | 14.5 (of 34), gelu_tanh 17 | 14.5, gelu 25 | 22.

So all but `gelu` and random rounding are bound by memory. 8 to 64 values a thread, 40 to 128 registers, no spills,
16-byte loads; only the reductions use shared memory.

A rotation in blocks of 128 adds 19: of 7 stages of butterflies 3 lie in a thread, and 4 in lanes take a shuffle, an
addition and an fma. Instructions bound it then: 18.3 us instead of 10.6 for layer_norm with modulation, K = 3072. A
kernel of its own would move 4 bytes a value more, 13 us, besides those of its instructions.

What was tried and lost, in instructions a value at K = 4096: `div_rn` for the quotient 25 instead of 16 (a check and a
branch each), `x / scale` 13 but other codes at ties; `tl.exp` and a division for the sigmoid 29 instead of 16;
`tl.erf` 45 instead of 22; two rows in a block 13, but the vectors of a norm then pass through shared memory; bf16 read
in pairs as int32 12.2 instead of 12.5. Rotations by `tl.dot` with a sign matrix of 128 columns: 34 us instead of 17
where K = 3072, and up to 9 KB of local memory a thread.
"""

import math

import torch
from torch import Tensor

from hf_quant.kernels.codes import ROW_FORMATS, row_max
from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.gpu.launch import Target, config_table, launch, target_of, tl, triton, unavailable_reason
from hf_quant.kernels.gpu.row_codes import (
    code_options,
    encode,
    larger_magnitude,
    quotient_of_scale,
    random_offsets,
    round_stochastically,
    scale_of_row_or_given,
)
from hf_quant.kernels.gpu.rows import load, row_mask
from hf_quant.kernels.rowwise import op
from hf_quant.kernels.rowwise.gpu_values import _deviation, _normed, _rotated, _value
from hf_quant.kernels.rowwise.op import PHILOX_ROUNDS


_FLOATING = (torch.bfloat16, torch.float16, torch.float32)
_ANY = 2**31 - 1
# (for M up to, for K up to, rows of a block, values of a row taken at once, warps). Few rows: many warps for each, as
# its latency counts; many rows: few, so that one block waits for memory while others compute.
_SM80 = (
    (256, 256, 4, 256, 4),
    (256, 1024, 1, 1024, 4),
    (256, 2048, 1, 2048, 8),
    (256, 4096, 1, 4096, 16),
    (256, 16384, 1, 8192, 32),
    (256, _ANY, 1, 4096, 16),
    (_ANY, 64, 32, 64, 4),
    (_ANY, 128, 16, 128, 4),
    (_ANY, 256, 8, 256, 4),
    (_ANY, 2048, 1, 256, 1),
    (_ANY, 8192, 1, 1024, 4),
    (_ANY, 16384, 1, 2048, 8),
    (_ANY, _ANY, 1, 4096, 8),
)
# Warps of 64.
_GFX942 = tuple((*row, max(warps // 2, 1)) for *row, warps in _SM80)
CONFIGS = {"sm80": _SM80, "sm89": _SM80, "sm90": _SM80, "sm100": _SM80, "gfx942": _GFX942}
# Values that the threads of a block hold at most (64 for each of 8 warps); longer rows are read again for each step.
_IN_REGISTERS = 16384


@triton.jit(do_not_specialize=["M", "rows_per_mod"])
def _quantize_rowwise_kernel(
    x,
    up,
    weight,
    bias,
    mod_scale,
    mod_shift,
    seed,
    diagonal,
    input_scale,
    codes,
    scales,
    M,
    K,
    x_stride,
    up_stride,
    mod_scale_stride,
    mod_shift_stride,
    rows_per_mod,
    eps,
    PROLOGUE: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    PTX: tl.constexpr,
    SAME_MOD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    LOG_B: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_m = (row < M)[:, None]
    row = row.to(tl.int64)
    x_rows, up_rows, code_rows = row[:, None] * x_stride, row[:, None] * up_stride, row[:, None] * K
    if SAME_MOD:  # for all rows of the block
        mod_row = (tl.program_id(0) * ROWS // rows_per_mod).to(tl.int64)
    else:  # the last block has rows beyond M, which have no modulation of their own to read
        mod_row = (tl.minimum(row, M - 1) // rows_per_mod)[:, None]
    scale_rows, shift_rows = mod_row * mod_scale_stride, mod_row * mod_shift_stride
    column = tl.arange(0, BLOCK_K)[None, :]
    IS_NORM: tl.constexpr = PROLOGUE == "rms_norm" or PROLOGUE == "layer_norm"
    # What a norm, an activation or a rotation has made is within rounding of the reference's; only x itself is equal.
    EXACT: tl.constexpr = PROLOGUE == "none" and LOG_B == 0
    mean, key = None, None
    if seed is not None:
        key = tl.load(seed)
    total = tl.zeros([ROWS, BLOCK_K], tl.float32)
    magnitudes = tl.zeros([ROWS, BLOCK_K], tl.float32)

    if BLOCKS is not None:  # the row stays in registers
        values = ()
        for i in tl.static_range(BLOCKS):
            columns = column + i * BLOCK_K
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _value(x, up, x_rows, up_rows, columns, mask, PROLOGUE, PTX, "evict_first")
            if PROLOGUE == "layer_norm":
                total += v
            elif PROLOGUE == "rms_norm":
                total += v * v
            else:
                if diagonal is not None:
                    v = _rotated(v, diagonal, columns, K, EVEN_K, LOG_B)
                magnitudes = larger_magnitude(magnitudes, v)
            values = values + (v,)
        if PROLOGUE == "layer_norm":
            mean = tl.sum(total, 1, keep_dims=True) / K
            total = tl.zeros([ROWS, BLOCK_K], tl.float32)
            deviations = ()
            for i in tl.static_range(BLOCKS):
                v = _deviation(values[i], mean, column + i * BLOCK_K, K, EVEN_K)
                total += v * v
                deviations = deviations + (v,)
            values = deviations
        if IS_NORM:
            rstd = tl.rsqrt(tl.sum(total, 1, keep_dims=True) / K + eps)
            normed = ()
            for i in tl.static_range(BLOCKS):
                columns = column + i * BLOCK_K
                mask = row_mask(in_m, columns, K, EVEN_K)
                v = _normed(
                    values[i], rstd, weight, bias, mod_scale, mod_shift, scale_rows, shift_rows, columns, K, EVEN_K
                )
                if diagonal is not None:
                    v = _rotated(v, diagonal, columns, K, EVEN_K, LOG_B)
                magnitudes = larger_magnitude(magnitudes, v)
                normed = normed + (v,)
            values = normed
        scale = scale_of_row_or_given(magnitudes, input_scale, NORM, LIMIT, SMALLEST)
        inverse = NORM * tl.div_rn(1.0, scale)[:, None]
        for i in tl.static_range(BLOCKS):
            columns = column + i * BLOCK_K
            q = quotient_of_scale(values[i], scale[:, None], inverse, input_scale, LIMIT, NORM, EXACT)
            if seed is not None:
                offsets = random_offsets(key, row, i * BLOCK_K, BLOCK_K, ROUNDS)
                q = round_stochastically(q, offsets, LIMIT, IS_FLOAT)
            mask = row_mask(in_m, columns, K, EVEN_K)
            tl.store(codes + (code_rows + columns), encode(q, IS_FLOAT, CONVERTS), mask=mask)
    else:  # the row is read again for each step, from the L2 cache
        if PROLOGUE == "layer_norm":
            for start in range(0, K, BLOCK_K):
                columns = column + start
                total += load(x, x_rows, columns, row_mask(in_m, columns, K, EVEN_K), "evict_last")
            mean = tl.sum(total, 1, keep_dims=True) / K
            total = tl.zeros([ROWS, BLOCK_K], tl.float32)
        if IS_NORM:
            for start in range(0, K, BLOCK_K):
                columns = column + start
                v = load(x, x_rows, columns, row_mask(in_m, columns, K, EVEN_K), "evict_last")
                v = _deviation(v, mean, columns, K, EVEN_K)
                total += v * v
            rstd = tl.rsqrt(tl.sum(total, 1, keep_dims=True) / K + eps)
        for start in range(0, K, BLOCK_K):
            columns = column + start
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _value(x, up, x_rows, up_rows, columns, mask, PROLOGUE, PTX, "evict_last")
            if IS_NORM:
                v = _deviation(v, mean, columns, K, EVEN_K)
                v = _normed(v, rstd, weight, bias, mod_scale, mod_shift, scale_rows, shift_rows, columns, K, EVEN_K)
            if diagonal is not None:
                v = _rotated(v, diagonal, columns, K, EVEN_K, LOG_B)
            magnitudes = larger_magnitude(magnitudes, v)
        scale = scale_of_row_or_given(magnitudes, input_scale, NORM, LIMIT, SMALLEST)
        inverse = NORM * tl.div_rn(1.0, scale)[:, None]
        for start in range(0, K, BLOCK_K):
            columns = column + start
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _value(x, up, x_rows, up_rows, columns, mask, PROLOGUE, PTX, "evict_first")
            if IS_NORM:
                v = _deviation(v, mean, columns, K, EVEN_K)
                v = _normed(v, rstd, weight, bias, mod_scale, mod_shift, scale_rows, shift_rows, columns, K, EVEN_K)
            if diagonal is not None:
                v = _rotated(v, diagonal, columns, K, EVEN_K, LOG_B)
            q = quotient_of_scale(v, scale[:, None], inverse, input_scale, LIMIT, NORM, EXACT)
            if seed is not None:
                offsets = random_offsets(key, row, start, BLOCK_K, ROUNDS)
                q = round_stochastically(q, offsets, LIMIT, IS_FLOAT)
            tl.store(codes + (code_rows + columns), encode(q, IS_FLOAT, CONVERTS), mask=mask)
    tl.store(scales + row, scale, mask=row < M)


def supports(problem: Problem) -> str | None:
    """The reason why no kernel of rows computes a problem, None if one does."""
    reason = unavailable_reason("cuda")
    if reason is None and problem.dtype not in _FLOATING:
        reason = f"no kernel for {problem.dtype}"
    return reason


PATHS = (Path("one pass over the rows", "any M", supports),)


def serves(x: Tensor, *others: Tensor | None) -> bool:
    """True if the kernels compute these; otherwise the reference does, in torch ops on the same device."""
    if unavailable_reason(x.device) is not None or x.numel() == 0 or x.dtype not in _FLOATING:
        return False
    return all([part is None or part.dtype in _FLOATING for part in others])


def dense_rows(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K] whose last dimension is dense; a copy only if there is no such view."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def config(target: Target, M: int, K: int, block: int = 1) -> tuple[int, int, int | None, int]:
    """(rows of a block, values of a row taken at once, how often or None for a loop, warps); block: of a rotation."""
    table = config_table("quantize_rowwise", CONFIGS, target)
    rows, block_k, num_warps = next(row[2:] for row in table if M <= row[0] and K <= row[1])
    if block > block_k:
        num_warps, block_k = max(num_warps, min(4, block // 256)), block
    blocks = -(-K // block_k)
    return rows, block_k, blocks if rows * blocks * block_k <= _IN_REGISTERS else None, num_warps


def _launch(
    x: Tensor,
    format: str,
    prologue: str = "none",
    *,
    up: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mod_scale: Tensor | None = None,
    mod_shift: Tensor | None = None,
    seed: Tensor | None = None,
    diagonal: Tensor | None = None,
    input_scale: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on x [..., K] with at least one element."""
    target = target_of(x.device)
    rows, K = dense_rows(x), x.shape[-1]
    M = rows.shape[0]
    codes = torch.empty(x.shape, dtype=torch.int8 if format == "int8" else torch.uint8, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    up = None if up is None else dense_rows(up)
    mod_scale, mod_shift = (None if part is None else dense_rows(part) for part in (mod_scale, mod_shift))
    modulation = mod_scale if mod_scale is not None else mod_shift
    num_mods = 1 if modulation is None else modulation.shape[0]
    rows_per_mod = M // num_mods
    block = 1 if diagonal is None else diagonal.shape[1]
    ROWS, BLOCK_K, BLOCKS, num_warps = config(target, M, K, block)
    options = {**code_options(format, target), "num_warps": num_warps}
    if seed is not None and target.table == "sm100":
        options["maxnreg"] = 96  # left alone, ptxas takes 80 and keeps 32 bytes on the stack (Triton 3.6)
    launch(
        _quantize_rowwise_kernel,
        (-(-M // ROWS),),
        rows,
        up,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        mod_scale,
        mod_shift,
        seed,
        diagonal,
        input_scale,
        codes,
        scale,
        M,
        K,
        rows.stride(0),
        0 if up is None else up.stride(0),
        0 if mod_scale is None else mod_scale.stride(0),
        0 if mod_shift is None else mod_shift.stride(0),
        rows_per_mod,
        eps,
        PROLOGUE=prologue,
        ROUNDS=PHILOX_ROUNDS,
        SAME_MOD=num_mods == 1 or rows_per_mod % ROWS == 0,  # with one, every M shares the compiled kernel
        PTX=target.is_nvidia,
        ROWS=ROWS,
        BLOCK_K=BLOCK_K,
        BLOCKS=BLOCKS,
        EVEN_K=K % BLOCK_K == 0,
        LOG_B=block.bit_length() - 1,
        NORM=1 / math.sqrt(block),
        **options,
    )
    return codes.view(ROW_FORMATS[format]), scale


@implements(op.quantize_rowwise, "XPU", PATHS)
@implements(op.quantize_rowwise, "CUDA", PATHS)
def quantize_rowwise_gpu(x: Tensor, seed: Tensor | None = None, *, format: str) -> tuple[Tensor, Tensor]:
    """Compute `quantize_rowwise_reference`, bit for bit in rows without NaN or inf."""
    row_max(format)
    op.check_seed(x, seed)
    if not serves(x):
        return op.quantize_rowwise_reference(x, seed, format=format)
    return _launch(x, format, seed=seed)


@implements(op.quantize_static, "XPU", PATHS)
@implements(op.quantize_static, "CUDA", PATHS)
def quantize_static_gpu(
    x: Tensor, input_scale: Tensor, input_diagonal: Tensor | None = None, *, format: str
) -> tuple[Tensor, Tensor]:
    """Compute `quantize_static_reference`, without a transform bit for bit."""
    row_max(format)
    op.check_static(x, input_scale, input_diagonal)
    if not serves(x):
        return op.quantize_static_reference(x, input_scale, input_diagonal, format=format)
    return _launch(x, format, diagonal=input_diagonal, input_scale=input_scale)


@implements(op.rms_norm_quantize_rowwise, "XPU", PATHS)
@implements(op.rms_norm_quantize_rowwise, "CUDA", PATHS)
def rms_norm_quantize_rowwise_gpu(
    x: Tensor, weight: Tensor | None, input_diagonal: Tensor | None = None, *, eps: float, format: str
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_quantize_rowwise_reference`; sums in another order."""
    row_max(format)
    op.check_vector("weight", weight, x.shape[-1], input_diagonal)
    if not serves(x, weight):
        return op.rms_norm_quantize_rowwise_reference(x, weight, input_diagonal, eps=eps, format=format)
    return _launch(x, format, "rms_norm", weight=weight, diagonal=input_diagonal, eps=eps)


@implements(op.layer_norm_quantize_rowwise, "XPU", PATHS)
@implements(op.layer_norm_quantize_rowwise, "CUDA", PATHS)
def layer_norm_quantize_rowwise_gpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mod_scale: Tensor | None,
    mod_shift: Tensor | None,
    input_diagonal: Tensor | None = None,
    *,
    eps: float,
    format: str,
) -> tuple[Tensor, Tensor]:
    """Compute `layer_norm_quantize_rowwise_reference`; sums in another order."""
    row_max(format)
    op.check_layer_norm(x, weight, bias, mod_scale, mod_shift, input_diagonal)
    if not serves(x, weight, bias, mod_scale, mod_shift):
        parts = (x, weight, bias, mod_scale, mod_shift, input_diagonal)
        return op.layer_norm_quantize_rowwise_reference(*parts, eps=eps, format=format)
    return _launch(
        x,
        format,
        "layer_norm",
        weight=weight,
        bias=bias,
        mod_scale=mod_scale,
        mod_shift=mod_shift,
        diagonal=input_diagonal,
        eps=eps,
    )


@implements(op.act_quantize_rowwise, "XPU", PATHS)
@implements(op.act_quantize_rowwise, "CUDA", PATHS)
def act_quantize_rowwise_gpu(
    x: Tensor, up: Tensor | None, input_diagonal: Tensor | None = None, *, act: str, format: str
) -> tuple[Tensor, Tensor]:
    """Compute `act_quantize_rowwise_reference`; the activation to about 1e-6 of the row's largest value."""
    row_max(format)
    op.check_act(x, up, act, input_diagonal)
    if not serves(x, up):
        return op.act_quantize_rowwise_reference(x, up, input_diagonal, act=act, format=format)
    return _launch(x, format, act, up=up, diagonal=input_diagonal)
