"""The Triton kernel of `kv_attention` for few queries; gpu.py says what it costs."""

from hf_quant.kernels.gpu.decode import decode_portable
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
def _place(
    words, i: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, MULTIPLIER: tl.constexpr, PTX: tl.constexpr
):
    """The values of the i-th codes of all elements in bf16, as the PTX of `gpu_places` gives them for values."""
    if PTX is not None:
        bits = tl.inline_asm_elementwise(PTX[i], "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        values = decode_portable(words, words, words, i, tl.bfloat16, KIND, BITS, BITS, 0, 3)
        if KIND == "minifloat":
            values = values * tl.full((1, 1), MULTIPLIER, tl.bfloat16)
        elif BITS < 8:
            values = values - tl.full((1, 1), 128 + 2 ** (BITS - 1), tl.bfloat16)
        return values


@triton.jit
def _beside(a, b):
    """a [N, E], b [N, E] -> [N, 2 * E]: a, then b."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _places_beside(
    words,
    i: tl.constexpr,
    COUNT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PTX: tl.constexpr,
):
    """Places i to i + COUNT of all elements [N, E], one behind the other [N, COUNT * E]."""
    if COUNT == 1:
        return _place(words, i, KIND, BITS, MULTIPLIER, PTX)
    else:
        HALF: tl.constexpr = COUNT // 2
        a = _places_beside(words, i, HALF, KIND, BITS, MULTIPLIER, PTX)
        return _beside(a, _places_beside(words, i + HALF, HALF, KIND, BITS, MULTIPLIER, PTX))


@triton.jit
def _high_and_low(x, PARTS: tl.constexpr):
    """x fp32 -> as one bf16, or as the sum of two."""
    high = x.to(tl.bfloat16)
    if PARTS == 1:
        return (high,)
    else:
        return (high, (x - high.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def _decode_step(
    acc,
    weight,
    offsets,
    largest,
    q,
    q_sum,
    q_magic,
    factor,
    slack,
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
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODES: tl.constexpr,
    JOIN: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    K_PTX: tl.constexpr,
    V_PTX: tl.constexpr,
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
    """Add BLOCK_N tokens: acc[i] [G * R, E], the i-th codes of values times weights times scales; see gpu.py."""
    scores = tl.broadcast_to(q_magic, (G * R, BLOCK_N))
    for i in tl.static_range(CODES):
        keys = tl.trans(_place(k_words, i, KIND, BITS, MULTIPLIER, K_PTX))
        for part in tl.static_range(PARTS):
            scores = tl.dot(q[PARTS * i + part], keys, scores)
    scale, offset = scales_of(k_raw, SCALE, K_PAIRED)
    scores = tl.reshape(scores, (G, R, BLOCK_N)) * scale[:, None, :]
    if K_OFFSET:
        scores += q_sum * offset[:, None, :]
    scores = tl.sum(scores, 0)
    if MASKED and FIRST:
        scores += tl.where(t == first_token, 1.0, 0.0)[None, :] * lacking[:, None]
    if shift is not None:
        scores = capped(scores, shift, cap)
    if MASKED:
        scores = masked(
            scores, t, inside, positions, mask, mask_token, rows_inside, window, inverse_scale, WINDOWED, CAUSAL, MASK
        )
    # The reference of the weights is moved only when they would grow above 2 ** 8: rescaling sums costs a tenth.
    top = tl.maximum(largest, tl.max(scores, 1))
    if tl.max((top > largest + slack).to(tl.int32), 0) > 0:
        shrink = tl.exp2((largest - tl.where(top == float("-inf"), 0.0, top)) * factor)
        weight *= shrink[:, None]
        if V_OFFSET:
            offsets *= shrink[None, :, None]
        rescale = tl.reshape(tl.broadcast_to(shrink[None, :], (G, R)), (G * R,))[:, None]
        rescaled = ()
        for i in tl.static_range(CODES // JOIN):
            rescaled = rescaled + (acc[i] * rescale,)
        acc = rescaled
        largest = top
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    p = tl.exp2(tl.fma(scores, factor, (safe * -factor)[:, None]))
    weight += p
    scale, offset = scales_of(v_raw, SCALE, V_PAIRED)
    if V_OFFSET:
        offsets += p[None, :, :] * offset[:, None, :]
    scaled = _high_and_low(tl.reshape(p[None, :, :] * scale[:, None, :], (G * R, BLOCK_N)), PARTS)
    total = ()
    for i in tl.static_range(CODES // JOIN):
        values = _places_beside(v_words, i * JOIN, JOIN, KIND, BITS, MULTIPLIER, V_PTX)
        one = acc[i]
        for part in tl.static_range(PARTS):
            one = tl.dot(scaled[part], values, one)
        total = total + (one,)
    return total, weight, offsets, largest


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def _kv_decode_kernel(
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
    GROUP: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    JOIN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    CODES: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    K_PTX: tl.constexpr,
    V_PTX: tl.constexpr,
    MAGIC: tl.constexpr,
    PLACES: tl.constexpr,
    SCALE: tl.constexpr,
    K_PAIRED: tl.constexpr,
    V_PAIRED: tl.constexpr,
    K_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASK: tl.constexpr,
):
    """Program (tile of R rows of a head of keys, split): attention over a part of the tokens; see gpu.py."""
    head, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile, head = head % tiles, head // tiles
    b, h = head // kv_heads, head % kv_heads
    end = T
    if length is not None:
        end = tl.minimum(tl.maximum(tl.load(length), 0), T).to(tl.int32)
    n, e = tl.arange(0, BLOCK_N), tl.arange(0, E)
    m, g, r = tl.arange(0, G * R), tl.arange(0, G), tl.arange(0, R)
    # A row is a position and one of the `repeats` heads that see the same keys, in this order.
    total_rows = S * repeats
    row = tile * R + m % R
    q_row = q + b.to(tl.int64) * q_batch + (h * repeats + row % repeats).to(tl.int64) * q_head
    q_row += (row // repeats).to(tl.int64) * q_token
    queries, acc = (), ()
    q_sum = tl.zeros((G * R,), tl.float32)
    q_magic = tl.zeros((G * R,), tl.float32)
    for i in tl.static_range(CODES):
        # Keys come as 2 ** place times what they are, and more than that by 128 and the middle of the codes.
        d, unit = e * CODES + i, 0.5 ** PLACES[i]
        mine = (row < total_rows)[:, None] & (d < D)[None, :] & (d[None, :] // GROUP == (m // R)[:, None])
        one = tl.load(q_row[:, None] + d[None, :], mask=mine, other=0.0).to(tl.float32)
        both = _high_and_low(one * unit, PARTS)
        for part in tl.static_range(PARTS):
            added = tl.sum(both[part].to(tl.float32), 1)
            q_sum += added * 2 ** PLACES[i]
            if MAGIC:
                q_magic -= added * (128 + 2 ** (PLACES[i] + BITS - 1))
        queries = queries + both
    for _ in tl.static_range(CODES // JOIN):
        acc = acc + (tl.zeros((G * R, JOIN * E), tl.float32),)
    row = tile * R + r
    lacking = tl.zeros((R,), tl.float32)
    if first_key is not None:
        d = tl.arange(0, E * CODES)
        q_row = q + b.to(tl.int64) * q_batch + (h * repeats + row % repeats).to(tl.int64) * q_head
        q_row += (row // repeats).to(tl.int64) * q_token
        rows = tl.load(q_row[:, None] + d[None, :], mask=(row < total_rows)[:, None] & (d < D)[None, :], other=0.0)
        first_key = tl.load(first_key + head.to(tl.int64) * D + d, mask=d < D, other=0.0)
        lacking = tl.sum(rows.to(tl.float32) * first_key[None, :], 1)
    first_token = 0 if first_token is None else tl.load(first_token + b).to(tl.int32)
    if shift is not None:
        shift += head.to(tl.int64) * repeats * S
        shift = tl.load(shift + row % repeats * S + row // repeats, mask=row < total_rows, other=0.0)
    q_sum, q_magic = tl.reshape(q_sum, (G, R))[:, :, None], q_magic[:, None]
    rows_inside = row < total_rows
    positions = end - S + row // repeats
    first = end - S + tile * R // repeats
    last = end - S + tl.minimum(tile * R + R - 1, total_rows - 1) // repeats
    if MASK != "none":
        mask += b.to(tl.int64) * mask_batch
        mask += ((h * repeats + row % repeats).to(tl.int64) * mask_head + (row // repeats).to(tl.int64) * mask_row)[
            :, None
        ]
    HALF: tl.constexpr = tl.int16
    k_row = head_start(k.to(tl.pointer_type(HALF)), b, h, k_batch, k_head, K_ALIGN) + n[:, None] * (k_token * K_ALIGN)
    v_row = head_start(v.to(tl.pointer_type(HALF)), b, h, v_batch, v_head, V_ALIGN) + n[:, None] * (v_token * V_ALIGN)
    if K_PAIRED:
        k_scale = k_scale.to(tl.pointer_type(tl.int32))
    if V_PAIRED:
        v_scale = v_scale.to(tl.pointer_type(tl.int32))
    in_group = (g < groups)[:, None]
    k_scale = head_start(k_scale, b, h, ks_batch, ks_head, 1) + g[:, None] * ks_group + n[None, :] * ks_token
    v_scale = head_start(v_scale, b, h, vs_batch, vs_head, 1) + g[:, None] * vs_group + n[None, :] * vs_token
    if k_offset is not None:
        k_offset = head_start(k_offset, b, h, ko_batch, ko_head, 1) + g[:, None] * ko_group + n[None, :] * ko_token
    if v_offset is not None:
        v_offset = head_start(v_offset, b, h, vo_batch, vo_head, 1) + g[:, None] * vo_group + n[None, :] * vo_token
    K_OFFSET: tl.constexpr = K_PAIRED or k_offset is not None
    V_OFFSET: tl.constexpr = V_PAIRED or v_offset is not None
    largest, slack = tl.full((R,), float("-inf"), tl.float32), 8 / factor
    weight = tl.zeros((R, BLOCK_N), tl.float32)
    offsets = tl.zeros((G, R, BLOCK_N), tl.float32)
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
            acc, weight, offsets, largest = _decode_step(
                *(acc, weight, offsets, largest, queries, q_sum, q_magic, factor, slack, inverse_scale),
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
                    R,
                    BLOCK_N,
                    CODES,
                    JOIN,
                    PARTS,
                    KIND,
                    BITS,
                ),
                *(MULTIPLIER, K_PTX, V_PTX, SCALE, K_OFFSET, V_OFFSET, K_PAIRED, V_PAIRED, False),
                *(CAUSAL, WINDOWED, MASK, first_key is not None),
            )
    # The blocks before and behind those.
    skipped = whole_end - whole
    for block in tl.range(0, tl.cdiv(stop - start, BLOCK_N) - skipped, num_stages=STAGES if MASK != "none" else 1):
        at = start + (block + tl.where(block < whole, 0, skipped)) * BLOCK_N
        inside = at + n < stop
        acc, weight, offsets, largest = _decode_step(
            *(acc, weight, offsets, largest, queries, q_sum, q_magic, factor, slack, inverse_scale),
            load_words_until(k_row, k_token, at, e, inside, WIDTH, K_ALIGN),
            load_words_until(v_row, v_token, at, e, inside, WIDTH, V_ALIGN),
            load_scales(k_scale, k_offset, at, ks_token, ko_token, in_group & inside[None, :], K_PAIRED),
            load_scales(v_scale, v_offset, at, vs_token, vo_token, in_group & inside[None, :], V_PAIRED),
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
                R,
                BLOCK_N,
                CODES,
                JOIN,
                PARTS,
                KIND,
                BITS,
            ),
            *(MULTIPLIER, K_PTX, V_PTX, SCALE, K_OFFSET, V_OFFSET, K_PAIRED, V_PAIRED, True),
            *(CAUSAL, WINDOWED, MASK, first_key is not None),
        )
    weight = tl.sum(weight, 1)
    found = tl.where(largest == float("-inf"), largest, largest * factor + tl.log2(weight))
    inverse = tl.where(weight == 0, 0.0, 1 / weight)
    inverse = tl.reshape(tl.broadcast_to(inverse[None, :], (G, R)), (G * R,))[:, None]
    added = tl.reshape(tl.sum(offsets, 2), (G * R,))[:, None]
    row = tile * R + m % R
    n = tl.arange(0, JOIN * E)
    for i in tl.static_range(CODES // JOIN):
        d = n % E * CODES + (i * JOIN + n // E)
        mine = (row < total_rows)[:, None] & (n % E * CODES < D)[None, :] & (d[None, :] // GROUP == (m // R)[:, None])
        value = acc[i]
        if V_OFFSET:
            value += added
        value *= inverse
        if stats is None:
            out = y + b.to(tl.int64) * y_batch + (h * repeats + row % repeats).to(tl.int64) * y_head
            out += (row // repeats).to(tl.int64) * y_token
            tl.store(out[:, None] + d[None, :], value.to(y.dtype.element_ty), mask=mine)
        else:
            out = parts + ((head.to(tl.int64) * splits + split) * total_rows + row) * D
            tl.store(out[:, None] + d[None, :], value, mask=mine)
    row = tile * R + r
    if stats is None:
        at = (b * kv_heads + h).to(tl.int64) * repeats + row % repeats
        tl.store(lse + at * S + row // repeats, found * 0.6931471805599453, mask=row < total_rows)
    else:
        tl.store(stats + (head.to(tl.int64) * splits + split) * total_rows + row, found, mask=row < total_rows)
