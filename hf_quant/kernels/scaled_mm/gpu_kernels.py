"""Triton kernels of `int8_scaled_mm` and `fp8_scaled_mm`; gpu.py says when each runs and why."""

from hf_quant.kernels.gpu.launch import tl, triton


@triton.jit
def scaled(total, row_scale, b_scale, bias, n, N, SCALE_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sums of products [M, N] -> fp32 sums * row_scale [M] * b_scale [N] + bias [N]; SCALE_ROWS 0: one b_scale."""
    value = total.to(tl.float32) * row_scale[:, None]
    if SCALE_ROWS == 0:
        value *= tl.load(b_scale).to(tl.float32)
    else:
        value *= tl.load(b_scale + n // SCALE_ROWS, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def _load(pointers, k, rest, EVEN_K: tl.constexpr, EVICTION: tl.constexpr):
    """A tile [rows, BLOCK_K] of codes; zeros where k [BLOCK_K] is not below rest."""
    if EVEN_K:
        return tl.load(pointers, eviction_policy=EVICTION)
    else:
        return tl.load(pointers, mask=(k < rest)[None, :], other=0.0, eviction_policy=EVICTION)


@triton.jit(do_not_specialize=["M", "steps"])
def _scaled_mm_split_kernel(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    y,
    partials,
    counters,
    M,
    N,
    K,
    a_stride,
    b_stride,
    steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    UNROLL: tl.constexpr,
    ALIGN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Program (tile, part of K): tiles of the same weights are neighbours. The weight is the left operand.

    K and the strides come in units of ALIGN: Triton itself sees only multiples of 16 in an argument.
    """
    K, a_stride, b_stride = K * ALIGN, a_stride * ALIGN, b_stride * ALIGN
    ACC: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = part * steps
    # Rows past the end compute a copy that is not stored: no mask on N and M.
    a_pointers = a + tl.minimum(m, M - 1).to(tl.int64)[:, None] * a_stride + (first * BLOCK_K + k)[None, :]
    b_pointers = b + tl.minimum(n, N - 1).to(tl.int64)[:, None] * b_stride + (first * BLOCK_K + k)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), ACC)
    for step in range(first, tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))):
        weights = _load(b_pointers, k, K - step * BLOCK_K, EVEN_K, "evict_first")
        tokens = _load(a_pointers, k, K - step * BLOCK_K, EVEN_K, "evict_last")
        total = tl.dot(weights, tl.trans(tokens), total, out_dtype=ACC)
        a_pointers += BLOCK_K
        b_pointers += BLOCK_K
    last = True
    if SPLIT:
        # Every part leaves its sum; the one that comes last adds them up in the order of K: the same bits every time.
        parts = tl.num_programs(1)
        inner = tl.arange(0, BLOCK_M)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        sums = partials + tile.to(tl.int64) * (parts * BLOCK_N * BLOCK_M) + inner
        tl.store(sums + part * (BLOCK_N * BLOCK_M), total, mask=(m < M)[None, :])
        # All warps have stored before one thread counts. Its release then covers their stores, its acquire the loads
        # below, which go past L1 (.cg).
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == parts - 1
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_M), ACC)
            for i in tl.range(0, parts, loop_unroll_factor=UNROLL):
                total += tl.load(
                    sums + i * (BLOCK_N * BLOCK_M), mask=(m < M)[None, :], other=0.0, cache_modifier=".cg"
                )
            tl.store(counters + tile, 0)
    if last:
        row_scale = tl.load(a_scale + m, mask=m < M, other=0.0)
        value = scaled(tl.trans(total), row_scale, b_scale, bias, n, N, SCALE_ROWS, HAS_BIAS)
        out = y + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, value.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _products(
    a,
    b,
    m0,
    n0,
    first,
    end,
    M,
    N,
    K,
    a_stride,
    b_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    ACC: tl.constexpr,
):
    """Sum of a[m0:, k] * b[n0:, k] over the K steps first..end; a and b are descriptors if TMA, else pointers."""
    total = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if TMA:
        for step in range(first, end):
            tokens = a.load([m0, step * BLOCK_K])
            weights = b.load([n0, step * BLOCK_K])
            total = tl.dot(tokens, weights.T, total, out_dtype=ACC)
    else:
        k = tl.arange(0, BLOCK_K)
        rows = tl.minimum(m0 + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
        columns = tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
        a_pointers = a + rows[:, None] * a_stride + (first * BLOCK_K + k)[None, :]
        b_pointers = b + columns[:, None] * b_stride + (first * BLOCK_K + k)[None, :]
        for step in range(first, end):
            tokens = _load(a_pointers, k, K - step * BLOCK_K, EVEN_K, "")
            weights = _load(b_pointers, k, K - step * BLOCK_K, EVEN_K, "")
            total = tl.dot(tokens, weights.T, total, out_dtype=ACC)
            a_pointers += BLOCK_K
            b_pointers += BLOCK_K
    return total


@triton.jit
def _store_part(
    total,
    row_scale,
    b_scale,
    bias,
    y,
    y_desc,
    m0,
    n0,
    M,
    N,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write WIDTH columns of a tile: y[m0:, n0:]."""
    n = n0 + tl.arange(0, WIDTH)
    value = scaled(total, row_scale, b_scale, bias, n, N, SCALE_ROWS, HAS_BIAS).to(y.dtype.element_ty)
    if TMA:
        y_desc.store([m0, n0], value)
    else:
        m = m0 + tl.arange(0, BLOCK_M)
        out = y + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, value, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M", "chain_steps"])
def _scaled_mm_tiles_kernel(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    y,
    M,
    N,
    K,
    a_stride,
    b_stride,
    chain_steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Tiles program_id, program_id + programs, ... of y; GROUP_M rows of tiles share the weights that are in L2.

    UNIT other than 0: sums over chain_steps K steps are added up in fp16, in units of 1 / UNIT. ALIGN: as above.
    """
    K, a_stride, b_stride = K * ALIGN, a_stride * ALIGN, b_stride * ALIGN
    ACC: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    tiles_m, tiles_n, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    HALF: tl.constexpr = BLOCK_N // 2
    if TMA:
        left = tl.make_tensor_descriptor(a, [M, K], [a_stride, 1], [BLOCK_M, BLOCK_K])
        right = tl.make_tensor_descriptor(b, [N, K], [b_stride, 1], [BLOCK_N, BLOCK_K])
        out = tl.make_tensor_descriptor(y, [M, N], [N, 1], [BLOCK_M, HALF])
    else:
        left, right, out = a, b, y
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (GROUP_M * tiles_n)
        rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        m0 = (group * GROUP_M + tile % (GROUP_M * tiles_n) % rows) * BLOCK_M
        n0 = tile % (GROUP_M * tiles_n) // rows * BLOCK_N
        if UNIT == 0:
            total = _products(
                *(left, right, m0, n0, 0, steps, M, N, K, a_stride, b_stride),
                *(BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, TMA, ACC),
            )
        else:
            chains = tl.zeros((BLOCK_M, BLOCK_N), tl.float16)
            for first in tl.range(0, steps, chain_steps, num_stages=1):
                chain = _products(
                    *(left, right, m0, n0, first, tl.minimum(first + chain_steps, steps), M, N, K, a_stride, b_stride),
                    *(BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, TMA, ACC),
                )
                chains = (chains.to(tl.float32) + chain * UNIT).to(tl.float16)
            total = chains.to(tl.float32) * (1 / UNIT)
        m = m0 + tl.arange(0, BLOCK_M)
        row_scale = tl.load(a_scale + m, mask=m < M, other=0.0)
        # Two halves, one after the other: half the shared memory and registers for what is stored.
        low, high = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        _store_part(*(low, row_scale, b_scale, bias, y, out, m0, n0, M, N, BLOCK_M, HALF, TMA, SCALE_ROWS, HAS_BIAS))
        _store_part(
            *(high, row_scale, b_scale, bias, y, out, m0, n0 + HALF, M, N, BLOCK_M, HALF, TMA, SCALE_ROWS, HAS_BIAS)
        )
