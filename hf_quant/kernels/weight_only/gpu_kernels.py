"""The Triton kernels of weight-only products: tiles and parts of K, and equal stripes of work.

Stripes (stream-K) are a trial, see gpu/trials.py. Modelled on 132 multiprocessors, int4 groups of 128, M = 1 (not
measured), in steps of K on the busiest multiprocessor, beside the mean: 4096 x 4096 8 by parts and by stripes (7.8);
6144 x 4096 12 and 12 (11.6); 4096 x 14336 28 and 28 (27.2); 28672 x 4096 64 by parts and 56 by stripes (54.3). So they
can win 1.14 in gate_up, which has more than half of a layer's bytes, and nothing elsewhere.
"""

from hf_quant.kernels.gpu.launch import begin, tl, triton
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
    DEPENDENT: tl.constexpr,
):
    """Program (tile, part): rows of y that share weights are neighbours, so that the weights are read from L2."""
    begin(DEPENDENT)
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


@triton.jit(do_not_specialize=["M", "steps"])
def _weight_only_mm_stripes_kernel(
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
    DEPENDENT: tl.constexpr,
):
    """Program: `steps` steps of K, of one tile or several, counted through all tiles in their order.

    A tile that several programs share is added by the last of them, in the order of K: the same bits every time.
    """
    begin(DEPENDENT)
    tiles_m, length = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K)
    program = tl.program_id(0)
    start = program * steps
    end = tl.minimum(start + steps, tiles_m * tl.cdiv(N, BLOCK_N) * length)
    inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    for tile in tl.range(start // length, tl.cdiv(end, length), num_stages=1):
        n = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
        m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
        row = tl.minimum(n, N - 1)
        if SCALE_ROWS == 0:
            scale_rows = row * 0
        else:
            scale_rows = row // SCALE_ROWS * scale_stride
        first_step = tl.maximum(start - tile * length, 0)
        total = tile_product(
            *(x, m.to(tl.int64) * (x_stride * ALIGN), m < M, qdata, row.to(tl.int64) * (q_stride * ALIGN)),
            *(scale, scale_rows, zero_point),
            *(levels, first_step, tl.minimum(end - tile * length, length), K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K),
            *(
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
            ),
        )
        first, final = tile * length // steps, ((tile + 1) * length - 1) // steps  # programs that share the tile
        last = first == final
        if first < final:
            # Two places a program: for the tile that it begins with in the middle, and for the one that it leaves so.
            place = (program * 2 + (first_step == 0).to(tl.int32)).to(tl.int64)
            tl.store(partials + place * (BLOCK_N * BLOCK_M) + inner, total)
            tl.debug_barrier()  # all warps have stored before the count says so
            last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == final - first
            if last:
                total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                for i in tl.range(first, final + 1, num_stages=1):
                    place = (i * 2 + (i == first).to(tl.int32)).to(tl.int64)
                    total += tl.load(partials + place * (BLOCK_N * BLOCK_M) + inner, cache_modifier=".cg")
                tl.store(counters + tile, 0)
        if last:
            store_product(
                *(total, y, scale, scale_rows, global_scale, bias, row_scale, row, n, m, M, N),
                *(SCALE_MODE, SCALE, HAS_GLOBAL, HAS_BIAS, HAS_ROW_SCALE),
            )
