"""The Triton kernels of norms, gates and rotary embeddings; `gpu` launches them."""

from hf_quant.kernels.gpu.launch import tl, triton
from hf_quant.kernels.gpu.rows import activated, load, row_mask


@triton.jit
def _rounded(v, y):
    """fp32 values rounded to the dtype of y's elements."""
    return v.to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def _scaled(v, rstd, weight, rows, columns, mask, y, PLUS_ONE: tl.constexpr, ROUNDS: tl.constexpr):
    """v * rstd * weight in fp32; the weights of one row are those of the next: they stay in the L1 cache."""
    v *= rstd
    if ROUNDS:
        v = _rounded(v, y)
    if weight is not None:
        w = load(weight, rows, columns, mask, "evict_last")
        v *= w + 1.0 if PLUS_ONE else w
    return v


@triton.jit
def _sum(x, more, x_rows, more_rows, columns, mask, POLICY: tl.constexpr):
    """x, or x + more as rounded to their dtype, in fp32."""
    v = load(x, x_rows, columns, mask, POLICY)
    if more is not None:
        v = _rounded(v + load(more, more_rows, columns, mask, POLICY), x)
    return v


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x,
    more,
    weight,
    total,
    y,
    M,
    K,
    x_stride,
    more_stride,
    eps,
    PLUS_ONE: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_m = (row < M)[:, None]
    row = row.to(tl.int64)[:, None]
    x_rows, more_rows, y_rows = row * x_stride, row * more_stride, row * K
    column = tl.arange(0, BLOCK_K)[None, :]
    # All weights of a row, whatever rows of the block are beyond M.
    any_row = tl.full([1, 1], True, tl.int1)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    if BLOCKS is not None:  # the row stays in registers
        values = ()
        for i in tl.static_range(BLOCKS):
            columns = column + i * BLOCK_K
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _sum(x, more, x_rows, more_rows, columns, mask, "evict_first")
            squares += v * v
            values = values + (v,)
        rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / K + eps)
        for i in tl.static_range(BLOCKS):
            columns = column + i * BLOCK_K
            if more is not None:
                mask = row_mask(in_m, columns, K, EVEN_K)
                tl.store(total + (y_rows + columns), values[i].to(total.dtype.element_ty), mask=mask)
            mask = row_mask(any_row, columns, K, EVEN_K)
            v = _scaled(values[i], rstd, weight, 0, columns, mask, y, PLUS_ONE, ROUNDS)
            tl.store(y + (y_rows + columns), v.to(y.dtype.element_ty), mask=row_mask(in_m, columns, K, EVEN_K))
    else:
        for start in range(0, K, BLOCK_K):
            columns = column + start
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _sum(x, more, x_rows, more_rows, columns, mask, "evict_last")
            if more is not None:
                tl.store(total + (y_rows + columns), v.to(total.dtype.element_ty), mask=mask)
            squares += v * v
        rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / K + eps)
        for start in range(0, K, BLOCK_K):
            columns = column + start
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _sum(x, more, x_rows, more_rows, columns, mask, "evict_first")
            v = _scaled(v, rstd, weight, 0, columns, row_mask(any_row, columns, K, EVEN_K), y, PLUS_ONE, ROUNDS)
            tl.store(y + (y_rows + columns), v.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _gate_kernel(x, up, y, K, blocks, x_stride, up_stride, ACT: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < K
    v = load(x, row * x_stride, column, mask, "evict_first")
    v = activated(v, ACT, PTX)
    if up is not None:
        v = _rounded(v, y) * load(up, row * up_stride, column, mask, "evict_first")
    tl.store(y + (row * K + column), v.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _pair(x, rows, in_rows, half, C: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr):
    """Both channels [R, C] of each pair in fp32; `rows`: offsets [R, 1], `in_rows`: which of them there are."""
    if HALVES:
        column = tl.arange(0, C)[None, :]
        mask = row_mask(in_rows, column, half, EVEN)
        return load(x, rows, column, mask, "evict_last"), load(x, rows, column + half, mask, "evict_last")
    else:
        column = tl.arange(0, 2 * C)[None, :]
        v = load(x, rows, column, row_mask(in_rows, column, 2 * half, EVEN), "evict_last")
        return tl.split(tl.reshape(v, (v.shape[0], C, 2)))


@triton.jit
def _store_pair(y, rows, in_rows, a, b, half, C: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        column = tl.arange(0, C)[None, :]
        mask = row_mask(in_rows, column, half, EVEN)
        tl.store(y + (rows + column), a.to(y.dtype.element_ty), mask=mask)
        tl.store(y + (rows + column + half), b.to(y.dtype.element_ty), mask=mask)
    else:
        column = tl.arange(0, 2 * C)[None, :]
        v = tl.reshape(tl.join(a, b), (a.shape[0], 2 * C))
        tl.store(y + (rows + column), v.to(y.dtype.element_ty), mask=row_mask(in_rows, column, 2 * half, EVEN))


@triton.jit
def _turned(own, other, cos, sin, y, SIGN: tl.constexpr, ROUNDS: tl.constexpr):
    """own * cos + SIGN * other * sin."""
    own, other = own * cos, other * sin
    if ROUNDS:
        own, other = _rounded(own, y), _rounded(other, y)
    return own + SIGN * other


@triton.jit
def _turn_heads(
    x,
    weight,
    cos,
    sin,
    y,
    token,
    angle,
    block,
    heads,
    x_token,
    x_head,
    half,
    D,
    eps,
    HALVES: tl.constexpr,
    BY_PAIR: tl.constexpr,
    ROUNDS: tl.constexpr,
    NORMS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    NORM_ROUNDS: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Norm and turn HEADS heads of one token: C pairs, and REST channels behind them."""
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    inside, any_row = head < heads, tl.full([1, 1], True, tl.int1)
    x_rows, y_rows = token * x_token + head.to(tl.int64) * x_head, (token * heads + head) * D
    # Vectors are read once for each head, from the L1 cache: read once for all they would pass through shared memory.
    same = tl.zeros([HEADS, 1], tl.int64)
    squares = tl.zeros([HEADS, 1], tl.float32)
    if C > 0:
        a, b = _pair(x, x_rows, inside, half, C, EVEN, HALVES)
        squares += tl.sum(a * a + b * b, 1, keep_dims=True)
    column = 2 * half + tl.arange(0, REST if REST > 0 else 1)[None, :]
    if REST > 0:
        rest = load(x, x_rows, column, inside & (column < D), "evict_first")
        squares += tl.sum(rest * rest, 1, keep_dims=True)
    if NORMS:
        rstd = tl.rsqrt(squares / D + eps)
        if C > 0:
            a, b = a * rstd, b * rstd
            if NORM_ROUNDS:
                a, b = _rounded(a, y), _rounded(b, y)
            if weight is not None:
                u, v = _pair(weight, same, any_row, half, C, EVEN, HALVES)
                a, b = a * (u + 1.0 if PLUS_ONE else u), b * (v + 1.0 if PLUS_ONE else v)
            a, b = _rounded(a, y), _rounded(b, y)
        if REST > 0:
            rest = _scaled(rest, rstd, weight, same, column, column < D, y, PLUS_ONE, NORM_ROUNDS)
    if C > 0:
        at = same + angle
        if BY_PAIR:
            pair = tl.arange(0, C)[None, :]
            mask = row_mask(any_row, pair, half, EVEN)
            cos_a, sin_a = load(cos, at, pair, mask, "evict_last"), load(sin, at, pair, mask, "evict_last")
            cos_b, sin_b = cos_a, sin_a
        else:
            cos_a, cos_b = _pair(cos, at, any_row, half, C, EVEN, HALVES)
            sin_a, sin_b = _pair(sin, at, any_row, half, C, EVEN, HALVES)
        first, second = _turned(a, b, cos_a, sin_a, y, -1, ROUNDS), _turned(b, a, cos_b, sin_b, y, 1, ROUNDS)
        _store_pair(y, y_rows, inside, first, second, half, C, EVEN, HALVES)
    if REST > 0:
        tl.store(y + (y_rows + column), rest.to(y.dtype.element_ty), mask=inside & (column < D))


@triton.jit(do_not_specialize=["angle_rows"])
def _rotary_kernel(
    q,
    k,
    cos,
    sin,
    q_weight,
    k_weight,
    q_out,
    k_out,
    angle_rows,
    q_heads,
    k_heads,
    q_token,
    q_head,
    k_token,
    k_head,
    half,
    D,
    eps,
    HALVES: tl.constexpr,
    BY_PAIR: tl.constexpr,
    ROUNDS: tl.constexpr,
    NORMS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    NORM_ROUNDS: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
):
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)
    token, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    angle = (token % angle_rows).to(tl.int64) * (2 * half)
    token = token.to(tl.int64)
    if block < q_blocks:
        _turn_heads(
            *(q, q_weight, cos, sin, q_out, token, angle, block, q_heads, q_token, q_head, half, D, eps),
            *(HALVES, BY_PAIR, ROUNDS, NORMS, PLUS_ONE, NORM_ROUNDS, HEADS, C, REST, EVEN),
        )
    else:
        _turn_heads(
            *(k, k_weight, cos, sin, k_out, token, angle, block - q_blocks, k_heads, k_token, k_head, half, D, eps),
            *(HALVES, BY_PAIR, ROUNDS, NORMS, PLUS_ONE, NORM_ROUNDS, HEADS, C, REST, EVEN),
        )
