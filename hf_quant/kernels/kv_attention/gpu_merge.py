"""The Triton kernel that adds the splits of `kv_attention`; gpu.py says what it costs."""

from hf_quant.kernels.gpu.launch import tl, triton
from hf_quant.kernels.kv_attention.gpu_parts import butterfly


@triton.jit(do_not_specialize=["S", "kv_heads", "repeats", "splits", "y_batch", "y_head", "y_token"])
def _kv_merge_kernel(
    parts,
    stats,
    y,
    lse,
    S,
    kv_heads,
    repeats,
    splits,
    y_batch,
    y_head,
    y_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    LOG_ROTATION: tl.constexpr,
    NORM: tl.constexpr,
):
    """Program: the attention of all splits to a row of a head of keys, in their order; rotated as values were."""
    rows = S * repeats
    row, head = tl.program_id(0) % rows, tl.program_id(0) // rows
    b, h = head // kv_heads, head % kv_heads
    n, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    first = head.to(tl.int64) * splits
    found = tl.load(stats + (first + n) * rows + row, mask=n < splits, other=float("-inf"))
    top = tl.max(found, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.sum(tl.exp2(found - safe), 0)
    total = tl.zeros((STEP, BLOCK_D), tl.float32)
    for at in tl.static_range(0, SPLITS, STEP):
        n = at + tl.arange(0, STEP)
        found = tl.load(stats + (first + n) * rows + row, mask=n < splits, other=float("-inf"))
        sees = (found != float("-inf"))[:, None] & (d < D)[None, :]
        part = tl.load(parts + ((first + n) * rows + row)[:, None] * D + d[None, :], mask=sees, other=0.0)
        total += part * tl.exp2(found - safe)[:, None]
    value = tl.sum(total, 0) * tl.where(weight == 0, 0.0, 1 / weight)
    if LOG_ROTATION > 0:
        value = tl.reshape(butterfly(tl.reshape(value, (1, BLOCK_D)), 1, BLOCK_D, LOG_ROTATION, NORM), (BLOCK_D,))
    q_head, position = h * repeats + row % repeats, row // repeats
    out = y + b.to(tl.int64) * y_batch + q_head.to(tl.int64) * y_head + position.to(tl.int64) * y_token
    tl.store(out + d, value.to(y.dtype.element_ty), mask=d < D)
    found = tl.where(top == float("-inf"), top, top + tl.log2(weight)) * 0.6931471805599453
    tl.store(lse + (head.to(tl.int64) * repeats + row % repeats) * S + position, found)
