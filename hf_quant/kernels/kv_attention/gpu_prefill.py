"""Triton kernel of `kv_attention` for many queries; gpu.py says what it costs."""

from hf_quant.kernels.gpu.decode import decode_in_order, decoded_once, spread
from hf_quant.kernels.gpu.launch import tl, triton
from hf_quant.kernels.kv_attention.gpu_parts import (
    SIZES,
    UNALIGNED,
    capped,
    head_start,
    load_scales,
    load_words,
    load_words_until,
    masked,
    scales_of,
    token_ranges,
)


@triton.jit
def _dequantized(
    words,
    raw,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    SCALE: tl.constexpr,
    DOT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PTX: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Words [N, E] -> values [N, BLOCK_D] in DOT; without scales if not SCALED."""
    values = decode_in_order(words, words, words, DOT, KIND, BITS, BITS, 0, CODES, 3, MULTIPLIER, PTX)
    if BITS < 8:
        values = values - tl.full((1, 1), (128 if DOT == tl.bfloat16 else 1024) + 2 ** (BITS - 1), DOT)
    if SCALED:
        scale, offset = scales_of(raw, SCALE, PAIRED)
        values = values * spread(scale.to(DOT), N, G, BLOCK_D)
        if HAS_OFFSET:
            values = values + spread(offset.to(DOT), N, G, BLOCK_D)
    return decoded_once(values, DOT) if ONCE else values


@triton.jit
def _prefill_step(
    acc,
    weight,
    largest,
    q,
    factor,
    inverse_scale,
    k_words,
    v_words,
    k_raw,
    v_raw,
    t,
    inside,
    positions,
    mask,
    mask_token,
    rows_inside,
    window,
    lacking,
    first_token,
    shift,
    cap,
    G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PTX: tl.constexpr,
    ONCE: tl.constexpr,
    SCALE: tl.constexpr,
    K_OFFSET: tl.constexpr,
    V_OFFSET: tl.constexpr,
    K_PAIRED: tl.constexpr,
    V_PAIRED: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASK: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Add BLOCK_N tokens: acc [rows, BLOCK_D], online softmax."""
    keys = _dequantized(
        *(k_words, k_raw, BLOCK_N, BLOCK_D, G, SCALED, K_OFFSET, K_PAIRED, SCALE, DOT, KIND, BITS, CODES),
        *(MULTIPLIER, PTX, ONCE),
    )
    scores = tl.dot(q, tl.trans(keys))
    if not SCALED:
        scale, _ = scales_of(k_raw, SCALE, K_PAIRED)
        scores *= tl.reshape(scale, (1, BLOCK_N))
    if MASKED and FIRST:
        scores += tl.where(t == first_token, 1.0, 0.0)[None, :] * lacking[:, None]
    if shift is not None:
        scores = capped(scores, shift, cap)
    if MASKED:
        scores = masked(
            *(scores, t, inside, positions, mask, mask_token, rows_inside, window, inverse_scale),
            *(WINDOWED, CAUSAL, MASK),
        )
    top = tl.maximum(largest, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2((largest - safe) * factor)
    p = tl.exp2(tl.fma(scores, factor, (safe * -factor)[:, None]))
    weight = weight * shrink + tl.sum(p, 1)
    if not SCALED:
        scale, _ = scales_of(v_raw, SCALE, V_PAIRED)
        p *= tl.reshape(scale, (1, BLOCK_N))
    values = _dequantized(
        *(v_words, v_raw, BLOCK_N, BLOCK_D, G, SCALED, V_OFFSET, V_PAIRED, SCALE, DOT, KIND, BITS, CODES),
        *(MULTIPLIER, PTX, ONCE),
    )
    acc = tl.dot(p.to(DOT), values, acc * shrink[:, None])
    return acc, weight, top


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def _kv_prefill_kernel(
    q,
    k,
    k_scale,
    k_offset,
    v,
    v_scale,
    v_offset,
    mask,
    length,
    first_key,
    first_token,
    shift,
    y,
    lse,
    parts,
    stats,
    factor,
    inverse_scale,
    cap,
    S,
    T,
    kv_heads,
    repeats,
    tiles,
    window,
    groups,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    ks_batch,
    ks_head,
    ks_token,
    ks_group,
    ko_batch,
    ko_head,
    ko_token,
    ko_group,
    v_batch,
    v_head,
    v_token,
    vs_batch,
    vs_head,
    vs_token,
    vs_group,
    vo_batch,
    vo_head,
    vo_token,
    vo_group,
    mask_batch,
    mask_head,
    mask_row,
    mask_token,
    y_batch,
    y_head,
    y_token,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
    CODES: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PTX: tl.constexpr,
    ONCE: tl.constexpr,
    SCALE: tl.constexpr,
    K_PAIRED: tl.constexpr,
    V_PAIRED: tl.constexpr,
    K_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASK: tl.constexpr,
):
    """Program (tile of BLOCK_M rows of a head of keys, split): the last rows first, which see the most tokens."""
    head, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile, head = tiles - 1 - head % tiles, head // tiles
    b, h = head // kv_heads, head % kv_heads
    end = T
    if length is not None:
        end = tl.minimum(tl.maximum(tl.load(length), 0), T).to(tl.int32)
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    e, g = tl.arange(0, BLOCK_D // CODES), tl.arange(0, G)
    total_rows = S * repeats
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_inside = row < total_rows
    q_row = q + b.to(tl.int64) * q_batch + (h * repeats + row % repeats).to(tl.int64) * q_head
    q_row += (row // repeats).to(tl.int64) * q_token
    queries = tl.load(q_row[:, None] + d[None, :], mask=rows_inside[:, None] & (d < D)[None, :], other=0.0).to(DOT)
    lacking = tl.zeros((BLOCK_M,), tl.float32)
    if first_key is not None:
        first_key = tl.load(first_key + head.to(tl.int64) * D + d, mask=d < D, other=0.0)
        lacking = tl.sum(queries.to(tl.float32) * first_key[None, :], 1)
    first_token = 0 if first_token is None else tl.load(first_token + b).to(tl.int32)
    if shift is not None:
        shift += head.to(tl.int64) * repeats * S
        shift = tl.load(shift + row % repeats * S + row // repeats, mask=row < total_rows, other=0.0)
    positions = end - S + row // repeats
    first = end - S + tile * BLOCK_M // repeats
    last = end - S + tl.minimum(tile * BLOCK_M + BLOCK_M - 1, total_rows - 1) // repeats
    if MASK != "none":
        mask += b.to(tl.int64) * mask_batch
        mask += ((h * repeats + row % repeats).to(tl.int64) * mask_head + (row // repeats).to(tl.int64) * mask_row)[
            :, None
        ]
    k_row = head_start(k.to(tl.pointer_type(tl.int16)), b, h, k_batch, k_head, K_ALIGN)
    v_row = head_start(v.to(tl.pointer_type(tl.int16)), b, h, v_batch, v_head, V_ALIGN)
    k_row, v_row = k_row + n[:, None] * (k_token * K_ALIGN), v_row + n[:, None] * (v_token * V_ALIGN)
    if K_PAIRED:
        k_scale = k_scale.to(tl.pointer_type(tl.int32))
    if V_PAIRED:
        v_scale = v_scale.to(tl.pointer_type(tl.int32))
    in_group = (g < groups)[None, :]
    k_scale = head_start(k_scale, b, h, ks_batch, ks_head, 1) + g[None, :] * ks_group + n[:, None] * ks_token
    v_scale = head_start(v_scale, b, h, vs_batch, vs_head, 1) + g[None, :] * vs_group + n[:, None] * vs_token
    if k_offset is not None:
        k_offset = head_start(k_offset, b, h, ko_batch, ko_head, 1) + g[None, :] * ko_group + n[:, None] * ko_token
    if v_offset is not None:
        v_offset = head_start(v_offset, b, h, vo_batch, vo_head, 1) + g[None, :] * vo_group + n[:, None] * vo_token
    K_OFFSET: tl.constexpr = K_PAIRED or k_offset is not None
    V_OFFSET: tl.constexpr = V_PAIRED or v_offset is not None
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    start, stop, whole, whole_end = token_ranges(split, splits, end, first, last, window, CAUSAL, WINDOWED, BLOCK_N)
    if first_key is not None:
        # Its block, and those before it, go with those that are masked.
        blocks = tl.where(first_token >= start, (first_token - start) // BLOCK_N + 1, 0)
        whole = tl.minimum(tl.maximum(whole, blocks), tl.cdiv(stop - start, BLOCK_N))
        whole_end = tl.maximum(whole_end, whole)
    WIDTH: tl.constexpr = D // CODES
    if MASK != "none":
        whole_end = whole
    else:
        for block in tl.range(whole, whole_end, num_stages=STAGES):
            at = start + block * BLOCK_N
            acc, weight, largest = _prefill_step(
                *(acc, weight, largest, queries, factor, inverse_scale),
                load_words(k_row, k_token, at, e, WIDTH, K_ALIGN),
                load_words(v_row, v_token, at, e, WIDTH, V_ALIGN),
                load_scales(k_scale, k_offset, at, ks_token, ko_token, in_group, K_PAIRED),
                load_scales(v_scale, v_offset, at, vs_token, vo_token, in_group, V_PAIRED),
                *(
                    n,
                    n,
                    positions,
                    mask,
                    mask_token,
                    rows_inside,
                    window,
                    lacking,
                    first_token,
                    shift,
                    cap,
                    G,
                    BLOCK_N,
                    BLOCK_D,
                    SCALED,
                    DOT,
                ),
                *(KIND, BITS, CODES, MULTIPLIER, PTX, ONCE, SCALE, K_OFFSET, V_OFFSET, K_PAIRED, V_PAIRED, False),
                *(CAUSAL, WINDOWED, MASK, first_key is not None),
            )
    # The blocks before and behind those.
    skipped = whole_end - whole
    for block in tl.range(0, tl.cdiv(stop - start, BLOCK_N) - skipped, num_stages=1):
        at = start + (block + tl.where(block < whole, 0, skipped)) * BLOCK_N
        inside = at + n < stop
        acc, weight, largest = _prefill_step(
            *(acc, weight, largest, queries, factor, inverse_scale),
            load_words_until(k_row, k_token, at, e, inside, WIDTH, K_ALIGN),
            load_words_until(v_row, v_token, at, e, inside, WIDTH, V_ALIGN),
            load_scales(k_scale, k_offset, at, ks_token, ko_token, in_group & inside[:, None], K_PAIRED),
            load_scales(v_scale, v_offset, at, vs_token, vo_token, in_group & inside[:, None], V_PAIRED),
            *(
                at + n,
                inside,
                positions,
                mask,
                mask_token,
                rows_inside,
                window,
                lacking,
                first_token,
                shift,
                cap,
                G,
                BLOCK_N,
                BLOCK_D,
                SCALED,
            ),
            *(DOT, KIND, BITS, CODES, MULTIPLIER, PTX, ONCE, SCALE, K_OFFSET, V_OFFSET, K_PAIRED, V_PAIRED, True),
            *(CAUSAL, WINDOWED, MASK, first_key is not None),
        )
    found = tl.where(largest == float("-inf"), largest, largest * factor + tl.log2(weight))
    value = acc * tl.where(weight == 0, 0.0, 1 / weight)[:, None]
    mine = rows_inside[:, None] & (d < D)[None, :]
    if stats is None:
        out = y + b.to(tl.int64) * y_batch + (h * repeats + row % repeats).to(tl.int64) * y_head
        out += (row // repeats).to(tl.int64) * y_token
        tl.store(out[:, None] + d[None, :], value.to(y.dtype.element_ty), mask=mine)
        at = head.to(tl.int64) * repeats + row % repeats
        tl.store(lse + at * S + row // repeats, found * 0.6931471805599453, mask=rows_inside)
    else:
        at = (head.to(tl.int64) * splits + split) * total_rows + row
        tl.store((parts + at * D)[:, None] + d[None, :], value, mask=mine)
        tl.store(stats + at, found, mask=rows_inside)
