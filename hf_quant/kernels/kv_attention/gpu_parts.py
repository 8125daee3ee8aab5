"""Parts of the kernels of `kv_attention`: addresses, scales, masks, the tokens of a split."""

from hf_quant.kernels.gpu.launch import tl, triton


# Nothing that the length of a cache changes may compile a kernel anew.
SIZES = (
    *("S", "T", "kv_heads", "repeats", "tiles", "window", "groups", "k_batch", "k_head", "k_token"),
    *("ks_batch", "ks_head", "ko_batch", "ko_head", "v_batch", "v_head", "v_token", "vs_batch", "vs_head"),
    *("vo_batch", "vo_head", "mask_batch", "mask_head", "mask_row"),
)
# Neither may the place that a sliding window has got to. A token's codes take multiples of 16 bytes in usual heads.
UNALIGNED = ("k_scale", "k_offset", "v_scale", "v_offset")


@triton.jit
def butterfly(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, LOG_SIZE: tl.constexpr, NORM: tl.constexpr):
    """`op.rotate` of x [ROWS, BLOCK_D], in blocks of 2 ** LOG_SIZE channels.

    The xor of a pair's bits is what turns either into the other: values stay with their threads. Where pairs were
    split and joined again, Triton 3.6 gave each thread a whole row: three times as many instructions.
    """
    is_right = (tl.arange(0, 2) == 1)[None, None, :, None]
    for stage in tl.static_range(LOG_SIZE):
        pairs = tl.reshape(x, (ROWS, BLOCK_D // (2 << stage), 2, 1 << stage))
        bits = pairs.to(tl.int32, bitcast=True)
        others = (bits ^ tl.expand_dims(tl.xor_sum(bits, 2), 2)).to(tl.float32, bitcast=True)
        x = tl.reshape(tl.where(is_right, others - pairs, pairs + others), (ROWS, BLOCK_D))
    return x * NORM


@triton.jit(do_not_specialize=["S", "heads", "repeats", "q_batch", "q_head", "y_batch", "y_head"])
def _kv_query_kernel(
    q,
    frame,
    y,
    shift,
    S,
    heads,
    repeats,
    q_batch,
    q_head,
    q_token,
    y_batch,
    y_head,
    y_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOG_ROTATION: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program: `op.query_rows`, of keys in a frame, of a block of TOKENS positions of a head of queries.

    With `shift` [B, H, S] their products with the mean of the frame, too.
    """
    blocks = tl.cdiv(S, TOKENS)
    s, d = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_D)
    b, h = tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads
    inside = (s < S)[:, None] & (d < D)[None, :]
    q += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    rows = tl.load(q + s.to(tl.int64)[:, None] * q_token + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if shift is not None:
        mean = frame + (b * (heads // repeats) + h // repeats).to(tl.int64) * 2 * D
        found = tl.sum(rows * tl.load(mean + d, mask=d < D, other=0.0)[None, :], 1)
        tl.store(shift + (b * heads + h).to(tl.int64) * S + s, found, mask=s < S)
    spread = frame + ((b * (heads // repeats) + h // repeats).to(tl.int64) * 2 + 1) * D
    rows *= tl.load(spread + d, mask=d < D, other=0.0)[None, :]
    if LOG_ROTATION > 0:
        rows = butterfly(rows, TOKENS, BLOCK_D, LOG_ROTATION, NORM)
    y += b.to(tl.int64) * y_batch + h.to(tl.int64) * y_head
    tl.store(y + s.to(tl.int64)[:, None] * y_token + d[None, :], rows.to(y.dtype.element_ty), mask=inside)


@triton.jit
def head_start(pointer, b, h, batch_stride, head_stride, ALIGN: tl.constexpr):
    """The offset of a head; strides are in units of ALIGN elements."""
    return pointer + (b.to(tl.int64) * batch_stride + h.to(tl.int64) * head_stride) * ALIGN


@triton.jit
def load_words(row, token_stride, at, e, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Codes of the tokens from `at` on [BLOCK_N, E] as int16; 0 behind WIDTH elements of a token."""
    pointers = row + (at.to(tl.int64) * token_stride) * ALIGN
    if e.shape[0] == WIDTH:
        return tl.load(pointers + e[None, :], eviction_policy="evict_first")
    else:
        return tl.load(pointers + e[None, :], mask=(e < WIDTH)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def load_words_until(row, token_stride, at, e, inside, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """`load_words` with 0 for tokens that are not `inside` [BLOCK_N]."""
    pointers = row + (at.to(tl.int64) * token_stride) * ALIGN
    return tl.load(pointers + e[None, :], mask=inside[:, None] & (e < WIDTH)[None, :], other=0)


@triton.jit
def load_scales(scale, offset, at, token_stride, offset_stride, inside, PAIRED: tl.constexpr):
    """(scale, offset) [G, BLOCK_N] as they are stored, 0 where not `inside`; if PAIRED both in one int32, twice."""
    shift = at.to(tl.int64) * token_stride
    if PAIRED:
        pairs = tl.load(scale + shift, mask=inside, other=0)
        return pairs, pairs
    else:
        scales = tl.load(scale + shift, mask=inside, other=0.0)
        if offset is None:
            return scales, scales
        else:
            return scales, tl.load(offset + at.to(tl.int64) * offset_stride, mask=inside, other=0.0)


@triton.jit
def scales_of(raw, TYPE: tl.constexpr, PAIRED: tl.constexpr):
    """Result of `load_scales` -> (scale, offset) in fp32."""
    if not PAIRED:
        return raw[0].to(tl.float32), raw[1].to(tl.float32)
    elif TYPE == tl.bfloat16:  # the lower half comes first in memory
        return (raw[0] << 16).to(tl.float32, bitcast=True), (raw[0] & -65536).to(tl.float32, bitcast=True)
    else:
        low = raw[0].to(tl.int16).to(tl.float16, bitcast=True)
        high = (raw[0] >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def capped(scores, shift, cap):
    """cap * tanh((scores + shift) / cap): scores [R, BLOCK_N], shift [R] and cap are not scaled yet."""
    power = tl.exp2((scores + shift[:, None]) * (2.8853900817779268 / cap))
    return cap - 2 * cap / (1 + power)


@triton.jit
def masked(
    scores,
    t,
    inside,
    positions,
    mask,
    mask_token,
    rows_inside,
    window,
    inverse_scale,
    WINDOWED: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Scores [R, BLOCK_N], not scaled yet, with the mask, -inf where a row does not see a token."""
    seen = inside[None, :]
    if CAUSAL:
        past = positions[:, None] - t[None, :]
        seen = seen & (past >= 0)
        if WINDOWED:
            seen = seen & (past < window)
    if MASK != "none":
        found = tl.load(
            mask + t[None, :].to(tl.int64) * mask_token, mask=inside[None, :] & rows_inside[:, None], other=0
        )
        if MASK == "bool":
            seen = seen & (found != 0)
        else:
            scores += found.to(tl.float32) * inverse_scale
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def token_ranges(
    split, splits, end, first, last, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The tokens of a split: (start, end, first and end of the blocks that all rows see whole).

    Rows stand at positions first to last of `end` tokens. Blocks are counted from the start, of BLOCK_N tokens each.
    """
    low, high = 0, end
    whole_low, whole_high = 0, end
    if CAUSAL:
        high = tl.maximum(tl.minimum(end, last + 1), 0)
        whole_high = tl.maximum(tl.minimum(end, first + 1), 0)
        if WINDOWED:
            low = tl.minimum(tl.maximum(first - window + 1, 0), high)
            whole_low = tl.maximum(last - window + 1, 0)
    blocks = tl.cdiv(tl.cdiv(high - low, BLOCK_N), splits)
    start = tl.minimum(low + split * (blocks * BLOCK_N), high)
    stop = tl.minimum(start + blocks * BLOCK_N, high)
    whole = tl.cdiv(tl.maximum(whole_low - start, 0), BLOCK_N)
    whole = tl.minimum(whole, tl.cdiv(stop - start, BLOCK_N))
    whole_end = tl.maximum(tl.maximum(tl.minimum(stop, whole_high) - start, 0) // BLOCK_N, whole)
    return start, stop, whole, whole_end
