"""`requantize_rows_` in Triton: a program reads a row twice, the second time from the cache."""

import torch
from torch import Tensor

from hf_quant.kernels.adam_step.op import key_of
from hf_quant.kernels.codes import SMALLEST_SCALE
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.gpu.launch import launch, tl, triton, unavailable_reason
from hf_quant.kernels.gpu.row_codes import encode, larger_magnitude, random_offsets
from hf_quant.kernels.requantize import op
from hf_quant.kernels.rowwise.op import PHILOX_ROUNDS


_BLOCK = 1024  # values of a row that a program holds


@triton.jit
def _requantize_kernel(
    codes,
    scale,
    values,
    K,
    key,
    row,
    LARGEST: tl.constexpr,
    NEW_LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    SMALLEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROUNDS: tl.constexpr,
    C: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    values += n * K
    codes += n * K
    column = tl.arange(0, C)[None, :]
    top = tl.zeros([1, C], tl.float32)
    for k in range(0, K, C):
        top = larger_magnitude(top, tl.load(values + k + column, mask=k + column < K, other=0.0))
    # As integers magnitudes have the order of their values, NaN last.
    amax = tl.max(tl.max(top.to(tl.int32, bitcast=True), 1), 0).to(tl.float32, bitcast=True)
    old = tl.load(scale + n)
    stays = (amax >= old * LEAST) & (amax <= old * LARGEST)
    fresh = tl.div_rn(amax, NEW_LARGEST)
    new = tl.where(stays, old, tl.where(fresh < SMALLEST, 1.0, fresh))
    kept = tl.where(stays, old, float("nan"))  # under a new scale no code is that of its value
    rows = row + n + tl.zeros([1], tl.int64)
    for k in range(0, K, C):
        inside = k + column < K
        value = tl.load(values + k + column, mask=inside, other=0.0)
        before = tl.load(codes + k + column, mask=inside, other=0)
        q = tl.minimum(tl.maximum(tl.div_rn(value, new), -LARGEST), LARGEST)
        if STOCHASTIC:
            q += random_offsets(tl.load(key), rows, k, C, ROUNDS)
        is_same = value == before.to(tl.float32) * kept
        tl.store(codes + k + column, tl.where(is_same, before, encode(q, False, False)), mask=inside)
    tl.debug_barrier()  # every thread has read the old scale
    tl.store(scale + n, new)


@implements(op.requantize_rows_, "XPU")
@implements(op.requantize_rows_, "CUDA")
def requantize_rows__gpu(
    codes: Tensor, scale: Tensor, values: Tensor, *, low: int | None = None, high: int = 0, row: int = 0
) -> None:
    """Compute `requantize_rows__reference`, bit for bit in rows without NaN or inf."""
    op.check(codes, scale, values)
    if values.numel() == 0 or unavailable_reason(codes.device) is not None:
        op.requantize_rows__reference(codes, scale, values, low=low, high=high, row=row)
        return
    launch(
        _requantize_kernel,
        (codes.shape[0],),
        codes,
        scale,
        values,
        codes.shape[1],
        torch.tensor(key_of(low or 0, high), dtype=torch.int64).to(codes.device, non_blocking=True),
        row,
        LARGEST=op.LARGEST,
        NEW_LARGEST=op.NEW_LARGEST,
        LEAST=op.LEAST,
        SMALLEST=SMALLEST_SCALE,
        STOCHASTIC=low is not None,
        ROUNDS=PHILOX_ROUNDS,
        C=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
