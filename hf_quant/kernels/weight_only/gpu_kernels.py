"""The Triton kernel of weight-only products; gpu.py says when it runs and why."""

from hf_quant.kernels.gpu.launch import tl, triton
from hf_quant.kernels.gpu.tile import store_product, tile_product


@triton.jit(do_not_specialize=["M", "steps"])
def _weight_only_mm_kernel(
    x,
    qdata,
    scale,
    zero_point,
    global_scale,
    bias,
    row_scale,
    levels,
    y,
    partials,
    counters,
    M,
    N,
    K,
    x_stride,
    q_stride,
    scale_stride,
    steps,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_MODE: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SPLIT_K: tl.constexpr,
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
    """Program (tile, part): rows of y that share weights are neighbours, so that the weights are read from L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(n, N - 1)  # rows past the end compute a copy that is not stored
    if SCALE_ROWS == 0:
        scale_rows = row * 0
    else:
        scale_rows = row // SCALE_ROWS * scale_stride
    total = tile_product(
        x,
        m.to(tl.int64) * (x_stride * ALIGN),
        m < M,
        qdata,
        row.to(tl.int64) * (q_stride * ALIGN),
        scale,
        scale_rows,
        zero_point,
        levels,
        part * steps,
        tl.minimum(part * steps + steps, tl.cdiv(K, BLOCK_K)),
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
    last = True
    if SPLIT_K > 1:
        # Every part leaves its sum; the one that comes last adds them up in the order of K: the same bits every time.
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        sums = partials + tile.to(tl.int64) * (SPLIT_K * BLOCK_N * BLOCK_M) + inner
        tl.store(sums + part * (BLOCK_N * BLOCK_M), total)
        tl.debug_barrier()  # all warps have stored before the count says so
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            # Large parts one by one: all at once took 255 registers and a stack (W4A8, sm90, M = 65) instead of 128.
            UNROLL: tl.constexpr = SPLIT_K if BLOCK_M < 64 else 1
            for i in tl.range(SPLIT_K, num_stages=1, loop_unroll_factor=UNROLL):
                total += tl.load(sums + i * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        store_product(
            *(total, y, scale, scale_rows, global_scale, bias, row_scale, row, n, m, M, N),
            *(SCALE_MODE, SCALE, HAS_GLOBAL, HAS_BIAS, HAS_ROW_SCALE),
        )
