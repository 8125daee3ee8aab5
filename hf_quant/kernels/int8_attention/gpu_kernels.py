"""Triton kernels of `int8_attention`; gpu.py says what they cost."""

from hf_quant.kernels.gpu.launch import tl, triton
from hf_quant.kernels.gpu.row_codes import encode, larger_magnitude, quotient, scale_of_row


@triton.jit
def _head(pointer, program, HEADS, batch_stride, head_stride):
    """The offset of head `program` % HEADS of batch `program` // HEADS."""
    return pointer + (program // HEADS).to(tl.int64) * batch_stride + (program % HEADS).to(tl.int64) * head_stride


@triton.jit(do_not_specialize=["T"])
def _int8_attention_stats_kernel(
    k,
    v,
    sums,
    counters,
    mean,
    v_scale,
    norms,
    T,
    HEADS,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    FP8: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Program (part of the tokens, head): mean of k over tokens [D]; if FP8 the scale of each channel of v, too.

    The last part of a head to finish adds the sums in the order of the parts. It also clears norms [2, heads].
    """
    part, head, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    k = _head(k, head, HEADS, k_batch, k_head)
    v = _head(v, head, HEADS, v_batch, v_head)
    # Tiles that are added up once, after the loop: 8 bytes in local memory otherwise (sm100, sm80).
    totals = tl.zeros((STEP, BLOCK_D), tl.float32)
    largest = tl.zeros((STEP, BLOCK_D), tl.float32)
    for step in range(0, tl.minimum(TOKENS, T - part * TOKENS), STEP):
        t = part * TOKENS + step + tl.arange(0, STEP)
        inside = (t < T)[:, None] & (d < D)[None, :]
        row = t.to(tl.int64)[:, None]
        totals += tl.load(k + row * k_token + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if FP8:
            tile = tl.load(v + row * v_token + d[None, :], mask=inside, other=0.0).to(tl.float32)
            largest = larger_magnitude(largest, tile)
    sums += (head.to(tl.int64) * parts * 2) * BLOCK_D + d
    tl.store(sums + part * (2 * BLOCK_D), tl.sum(totals, 0))
    if FP8:
        bits = tl.max(largest.to(tl.int32, bitcast=True), 0)  # in the order of the floats, NaN last
        tl.store(sums + part * (2 * BLOCK_D) + BLOCK_D, bits.to(tl.float32, bitcast=True))
    tl.debug_barrier()  # all warps have stored before one thread counts; see `_scaled_mm_split_kernel`
    if tl.atomic_add(counters + head, 1, sem="acq_rel") == parts - 1:
        total = tl.zeros((BLOCK_D,), tl.float32)
        bits = tl.zeros((BLOCK_D,), tl.int32)
        for i in range(0, parts):
            total += tl.load(sums + i * (2 * BLOCK_D), cache_modifier=".cg")
            if FP8:
                found = tl.load(sums + i * (2 * BLOCK_D) + BLOCK_D, cache_modifier=".cg")
                bits = tl.maximum(bits, found.to(tl.int32, bitcast=True))
        tl.store(mean + head * BLOCK_D + d, total / T)
        if FP8:
            scale = scale_of_row(bits.to(tl.float32, bitcast=True)[:, None], LIMIT, SMALLEST)
            tl.store(v_scale + head * BLOCK_D + d, scale)
        tl.store(norms + head, 0)
        tl.store(norms + tl.num_programs(1) + head, 0)
        tl.store(counters + head, 0)


@triton.jit
def _quantize_rows(tile, SMALLEST: tl.constexpr, ONE_SCALE: tl.constexpr):
    """fp32 [R, D] -> int8 codes, scale [R] (the same for all if ONE_SCALE), Euclidean norm of each decoded row [R]."""
    scale = scale_of_row(tl.abs(tile), 127.0, SMALLEST)
    if ONE_SCALE:  # of the largest row; as integers floats have the same order, NaN last
        bits = tl.max(tl.max(tl.abs(tile).to(tl.int32, bitcast=True), 1), 0)
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
        scale = tl.where(scale < SMALLEST, 1.0, scale) + tl.zeros((tile.shape[0],), tl.float32)
    codes = encode(quotient(tile, scale[:, None], tl.div_rn(1.0, scale)[:, None], True), False, False)
    values = codes.to(tl.int32)
    # A little more than the norm: a bound must stay one after rounding.
    return codes, scale, scale * (tl.sqrt(tl.sum(values * values, 1).to(tl.float32)) * 1.000001)


@triton.jit(do_not_specialize=["S", "T", "blocks"])
def _int8_attention_quantize_kernel(
    q,
    k,
    v,
    mean,
    v_scale,
    q_codes,
    q_stats,
    k_codes,
    k_scale,
    v_codes,
    norms,
    softmax_scale,
    S,
    T,
    HEADS,
    KV_HEADS,
    kv_heads,
    blocks,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """The first kv_heads * blocks programs quantize KEYS keys of a head each, the others KEYS queries.

    Keys: codes and one scale of k - mean; if FP8 the codes of v, too, transposed. Queries: codes, and of each row the
    factor that makes scores of sums, in units of log 2, and the norm with that factor: q_stats [2, rows]. norms
    [2, kv_heads]: the largest norm of the queries and of the keys of each head of k, as bits.
    """
    program, d, t = tl.program_id(0), tl.arange(0, BLOCK_D), tl.arange(0, KEYS)
    if program < kv_heads * blocks:
        head, block = program // blocks, program % blocks
        t += block * KEYS
        row, inside = t.to(tl.int64)[:, None], (t < T)[:, None] & (d < D)[None, :]
        k_row = _head(k, head, KV_HEADS, k_batch, k_head) + row * k_token
        tile = tl.load(k_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
        tile = tl.where(inside, tile - tl.load(mean + head * BLOCK_D + d)[None, :], 0.0)
        codes, scale, norm = _quantize_rows(tile, SMALLEST, True)
        start = head.to(tl.int64) * (blocks * KEYS) * BLOCK_D
        tl.store(k_codes + start + row * BLOCK_D + d[None, :], codes)
        tl.store(k_scale + program, tl.max(scale, 0))
        tl.atomic_max(norms + kv_heads + head, tl.max(norm.to(tl.int32, bitcast=True), 0))
        if FP8:
            v_row = _head(v, head, KV_HEADS, v_batch, v_head) + row * v_token
            tile = tl.load(v_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
            channel = tl.load(v_scale + head * BLOCK_D + d)
            tile = quotient(tile, channel[None, :], tl.div_rn(1.0, channel)[None, :], True)
            out = v_codes + start + d.to(tl.int64)[:, None] * (blocks * KEYS) + t[None, :]
            tl.store(out, tl.trans(encode(tile, True, True)))
    else:
        query_blocks = tl.cdiv(S, KEYS)
        head = (program - kv_heads * blocks) // query_blocks
        heads = (tl.num_programs(0) - kv_heads * blocks) // query_blocks
        t += (program - kv_heads * blocks) % query_blocks * KEYS
        row, inside = t.to(tl.int64)[:, None], (t < S)[:, None] & (d < D)[None, :]
        q_row = _head(q, head, HEADS, q_batch, q_head) + row * q_token
        tile = tl.load(q_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
        codes, scale, norm = _quantize_rows(tile, SMALLEST, False)
        start = head.to(tl.int64) * S
        tl.store(q_codes + start * BLOCK_D + row * BLOCK_D + d[None, :], codes, mask=(t < S)[:, None])
        unit = softmax_scale * 1.4426950408889634
        tl.store(q_stats + start + t, scale * unit, mask=t < S)
        tl.store(q_stats + (heads.to(tl.int64) * S + start) + t, norm * unit, mask=t < S)
        kv_head = head // HEADS * KV_HEADS + head % HEADS // (HEADS // KV_HEADS)
        tl.atomic_max(norms + kv_head, tl.max((norm * unit).to(tl.int32, bitcast=True), 0))


@triton.jit
def _attend(
    total,
    weight,
    largest,
    q,
    factor,
    reference,
    rows,
    k,
    k_scale,
    v,
    start,
    end,
    T,
    v_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
    TMA: tl.constexpr,
    BOUNDED: tl.constexpr,
    SEPARATE: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Add the keys start..end: total [M, D] = sum of p * v, weight [M, 1] = sum of p, p = 2 ** (score - reference).

    The reference [M, 1] is given if BOUNDED, else it is `largest`, the largest score so far, and grows. SEPARATE: sums
    of a step in registers of their own; to shrink those that wgmma adds to makes ptxas 12.8 wait for each one (C7515).
    """
    tl.static_assert(KEYS % BLOCK_N == 0, "the keys of a step share one scale, that of KEYS keys")
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    if not TMA:
        k_pointers = k + (start + n)[:, None] * BLOCK_D + d[None, :]
    if TMA:
        v_pointers = v
    elif FP8:
        v_pointers = v + d[:, None] * v_token + (start + n)[None, :]
    else:
        v_pointers = v + (start + n).to(tl.int64)[:, None] * v_token + d[None, :]
    for at in range(start, end, BLOCK_N):
        if TMA:
            keys = k.load([at, 0])
        else:
            keys = tl.load(k_pointers)
            k_pointers += BLOCK_N * BLOCK_D
        scores = tl.dot(q, keys.T, out_dtype=tl.int32).to(tl.float32)
        slope = factor * tl.load(k_scale + at // KEYS)
        if MASKED:
            seen = (at + n < T)[None, :]
            if CAUSAL:
                seen = seen & (at + n[None, :] <= rows[:, None])
        if not BOUNDED:
            if MASKED:
                scores = tl.where(seen, scores, float("-inf"))
            # Slopes are not negative, so the largest score is that of the largest sum.
            top = tl.maximum(largest, tl.max(scores, 1)[:, None] * slope)
            shrink = tl.exp2(largest - top)
            largest = top
            weight *= shrink
            # fp8 ends at 2**-9: the largest p is 448 there, in the sum of weights, too.
            reference = top - 8.807354922057604 if FP8 else top
        p = tl.exp2(tl.fma(scores, slope, -reference))
        if MASKED:
            p = tl.where(seen, p, 0.0)  # -inf times a slope of 0 is NaN
        weight += tl.sum(p, 1)[:, None]
        if FP8:
            # The matrix unit keeps some 13 bits of a sum: a sum of its own for every step, added in fp32.
            part = tl.dot(p.to(tl.float8e4nv), tl.load(v_pointers).to(tl.float8e4nv, bitcast=True).T)
            total = tl.fma(total, shrink, part)
            v_pointers += BLOCK_N
        else:
            if TMA:
                values = v.load([at, 0])
            elif MASKED or D < BLOCK_D:
                values = tl.load(v_pointers, mask=(at + n < T)[:, None] & (d < D)[None, :], other=0.0)
            else:
                values = tl.load(v_pointers)
            if SEPARATE:
                total = tl.fma(total, shrink, tl.dot(p.to(DOT), values.to(DOT)))
            else:
                if not BOUNDED:
                    total *= shrink
                total = tl.dot(p.to(DOT), values.to(DOT), total)
            if not TMA:
                v_pointers += BLOCK_N * v_token
    return total, weight, largest


@triton.jit(do_not_specialize=["S", "T", "blocks"])
def _int8_attention_kernel(
    q_codes,
    q_stats,
    k_codes,
    k_scale,
    v,
    v_scale,
    norms,
    y,
    S,
    T,
    HEADS,
    KV_HEADS,
    kv_heads,
    blocks,
    v_batch,
    v_head,
    v_token,
    y_batch,
    y_head,
    y_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
    BOUNDED: tl.constexpr,
    SEPARATE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Program (block of queries, head): the last queries first if CAUSAL, as they see the most keys.

    LIMIT 0: every head; else only heads whose scores are bounded by LIMIT if BOUNDED, only the others if not.
    """
    block, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    kv_head = head // HEADS * KV_HEADS + head % HEADS // (HEADS // KV_HEADS)
    key_norm = tl.load(norms + kv_heads + kv_head).to(tl.float32, bitcast=True)
    if LIMIT > 0:
        is_bounded = tl.load(norms + kv_head).to(tl.float32, bitcast=True) * key_norm <= LIMIT
        if is_bounded != BOUNDED:
            return
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
    rows, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = tl.minimum(rows, S - 1) + head.to(tl.int64) * S
    q = tl.load(q_codes + row[:, None] * BLOCK_D + d[None, :])
    factor = tl.load(q_stats + row)[:, None]
    # 2 ** 80 leaves room for sums above, and 2 ** -126 leaves 24 bits below, as LIMIT is such (see gpu.py).
    reference = tl.load(q_stats + heads.to(tl.int64) * S + row)[:, None] * key_norm - 80.0
    k = k_codes + kv_head.to(tl.int64) * (blocks * KEYS) * BLOCK_D
    k_scale += kv_head * blocks
    if FP8:
        values = v + kv_head.to(tl.int64) * (blocks * KEYS) * BLOCK_D
    else:
        values = _head(v, kv_head, KV_HEADS, v_batch, v_head)
    if TMA:
        k = tl.make_tensor_descriptor(k, [blocks * KEYS, BLOCK_D], [BLOCK_D, 1], [BLOCK_N, BLOCK_D])
        values = tl.make_tensor_descriptor(values, [T, D], [v_token, 1], [BLOCK_N, BLOCK_D])
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    weight = tl.zeros((BLOCK_M, 1), tl.float32)
    largest = tl.full((BLOCK_M, 1), float("-inf"), tl.float32)
    end = tl.minimum(T, (block + 1) * BLOCK_M) if CAUSAL else T
    whole = (tl.minimum(T, block * BLOCK_M) if CAUSAL else T) // BLOCK_N * BLOCK_N
    total, weight, largest = _attend(
        *(total, weight, largest, q, factor, reference, rows, k, k_scale, values, whole, end, T, v_token),
        *(D, BLOCK_D, BLOCK_N, KEYS, FP8, DOT, TMA, BOUNDED, SEPARATE, True, CAUSAL),
    )
    total, weight, largest = _attend(
        *(total, weight, largest, q, factor, reference, rows, k, k_scale, values, 0, whole, T, v_token),
        *(D, BLOCK_D, BLOCK_N, KEYS, FP8, DOT, TMA, BOUNDED, SEPARATE, False, CAUSAL),
    )
    result = total * (1 / weight)
    if FP8:
        result *= tl.load(v_scale + kv_head * BLOCK_D + d)[None, :]
    y_start = _head(y, head, HEADS, y_batch, y_head)
    if TMA:
        out = tl.make_tensor_descriptor(y_start, [S, D], [y_token, 1], [BLOCK_M, BLOCK_D])
        out.store([block * BLOCK_M, 0], result.to(y.dtype.element_ty))
    else:
        out = y_start + rows.to(tl.int64)[:, None] * y_token + d[None, :]
        tl.store(out, result.to(y.dtype.element_ty), mask=(rows < S)[:, None] & (d < D)[None, :])
