"""The product of one tile of a quantized weight: what the kernels of `weight_only` and `grouped_mm` share.

A tile is `weight [BLOCK_N, K] @ x.T [K, BLOCK_M]`: the weight is the left operand, which tensor cores read from
registers, where it is decoded; few tokens cost little, as the right side of an MMA can be 8 wide.

**The order of K inside a dot is free.** The i-th dot of a tile takes the i-th code of every element, and x is split
accordingly, which is a renaming of registers. No code ever moves to another lane, and the canonical byte order needs
no shuffle. Compiled for sm90 (BLOCK_N 128, BLOCK_M 16, BLOCK_K 128, 4 warps), with the decoding left to Triton, a K
step of int4 takes 6 % more instructions with int32 elements (8 dots of K = 16) than with int16 (4 dots of K = 32).
"""

from hf_quant.kernels.gpu.decode import (
    _decode_ptx,
    decode_portable,
    e4m3_by_ptx,
    load_planes,
    offset_in,
    scale_in,
    spread,
)
from hf_quant.kernels.gpu.launch import tl, triton


@triton.jit
def _split2(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [ROWS, COLUMNS] -> its even and odd columns."""
    return tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))


@triton.jit
def _split4(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [ROWS, COLUMNS] -> its columns 4j, 4j + 1, 4j + 2, 4j + 3."""
    even, odd = _split2(x, ROWS, COLUMNS)
    x0, x2 = _split2(even, ROWS, COLUMNS // 2)
    x1, x3 = _split2(odd, ROWS, COLUMNS // 2)
    return x0, x1, x2, x3


@triton.jit
def _split8(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    even, odd = _split2(x, ROWS, COLUMNS)
    x0, x2, x4, x6 = _split4(even, ROWS, COLUMNS // 2)
    x1, x3, x5, x7 = _split4(odd, ROWS, COLUMNS // 2)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _wide_x(x, x_rows, x_mask, element, limit, WHOLE: tl.constexpr, DOT: tl.constexpr):
    """Columns 4j, 4j + 1, 4j + 2, 4j + 3 of x for j in `element`, each [M, elements]; rows at multiples of 8 bytes.

    They are read as words of 64 bits and taken apart in registers. So they lie in shared memory as the matrix units'
    operand wants it; as 16-bit numbers that are split they would lie row by row, and 8 rows in the same banks.
    """
    at = x.to(tl.pointer_type(tl.int64)) + (x_rows // 4)[None, :] + element[:, None]
    if WHOLE:
        words = tl.load(at, mask=x_mask[None, :], other=0)
    else:
        words = tl.load(at, mask=x_mask[None, :] & (element < limit)[:, None], other=0)
    x0, x1 = words.to(tl.int16).to(DOT, bitcast=True), (words >> 16).to(tl.int16).to(DOT, bitcast=True)
    x2, x3 = (words >> 32).to(tl.int16).to(DOT, bitcast=True), (words >> 48).to(tl.int16).to(DOT, bitcast=True)
    return tl.trans(x0), tl.trans(x1), tl.trans(x2), tl.trans(x3)


@triton.jit
def _dot(weight, x, total, BATCH: tl.constexpr):
    """total + weight [N, K] @ x [M, K].T; total is [N, M], or [BATCH, N / BATCH, M] if BATCH is not 1.

    A dot of a batch is mma.sync, also where Triton makes wgmma of others: with a weight that is decoded in registers,
    or an x that is split there, it waits for each wgmma. BATCH is the number of warps: each has rows of its own.
    """
    if BATCH == 1:
        return tl.dot(weight, tl.trans(x), total)
    else:
        N: tl.constexpr = weight.shape[0]
        K: tl.constexpr = weight.shape[1]
        M: tl.constexpr = x.shape[0]
        right = tl.broadcast_to(tl.trans(x)[None, :, :], (BATCH, K, M))
        return tl.dot(tl.reshape(weight, (BATCH, N // BATCH, K)), right, total)


@triton.jit
def _scaled(partial, factor, BATCH: tl.constexpr):
    """Sums [N, M], or [BATCH, N / BATCH, M], times factor [N]."""
    if BATCH == 1:
        return partial * factor[:, None]
    else:
        return partial * tl.reshape(factor, (BATCH, factor.shape[0] // BATCH))[:, :, None]


@triton.jit
def _add_step(
    total,
    step,
    x,
    x_rows,
    x_mask,
    qdata,
    q_rows,
    scale,
    scale_rows,
    zero_point,
    levels,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_MODE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
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
    """Return total + weight @ x.T of one step of BLOCK_K; not WHOLE: K ends inside of it."""
    ELEMENTS: tl.constexpr = BLOCK_K // CODES
    element = tl.arange(0, ELEMENTS)
    column = tl.arange(0, BLOCK_K)
    limit = (K + CODES - 1) // CODES
    # 128 and 1024 are the magic numbers' own value; see `ptx`.
    MAGIC: tl.constexpr = 128 if DOT == tl.bfloat16 else 1024
    INT8: tl.constexpr = KIND == "integer" and BITS == 8 and DOT == tl.bfloat16  # comes in two parts
    # magic + code, times a scale of 4 bits, plus what the magic number adds: the fma and its constant are exact, as
    # 17 * 15 < 256.
    FMA: tl.constexpr = SCALE == "e4m3" and KIND == "integer" and BITS == 4 and not HAS_ZERO and DOT == tl.bfloat16
    FLOAT_ZERO: tl.constexpr = HAS_ZERO and zero_point.dtype.element_ty.is_floating()
    k = step * BLOCK_K  # a multiple of 16, as the compiler must see to load 16 bytes at a time
    first, second = load_planes(qdata, q_rows, k // CODES + element, limit, PLANE0, PLANE1, CODES, not WHOLE)
    if WIDE_X:
        parts = _wide_x(x, x_rows, x_mask, k // CODES + element, limit, WHOLE, DOT)
    else:
        x_pointers = x + x_rows[:, None] + (k + column)[None, :]
        if WHOLE:
            values = tl.load(x_pointers, mask=x_mask[:, None], other=0.0)
        else:
            values = tl.load(x_pointers, mask=x_mask[:, None] & ((k + column) < K)[None, :], other=0.0)
        values = values.to(DOT)
        if CODES == 1:
            parts = (values,)
        elif CODES == 2:
            parts = _split2(values, BLOCK_M, BLOCK_K)
        elif CODES == 4:
            parts = _split4(values, BLOCK_M, BLOCK_K)
        else:
            parts = _split8(values, BLOCK_M, BLOCK_K)
    if PTX is not None:
        decoded = _decode_ptx(first, second, PLANE1, CODES * 2 if INT8 else CODES, PTX)
    if SCALE_MODE == "before":
        # One value for each group of the step, spread over the group's elements.
        GROUPS: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
        if BLOCK_K > GROUP:  # so that the compiler sees a multiple of GROUPS, and loads those of a row at once
            group = step * GROUPS + tl.arange(0, GROUPS)
        else:
            group = k // GROUP + tl.arange(0, GROUPS)
        in_range = (group * GROUP < K)[None, :]
        at = scale_rows[:, None] + group[None, :]
        if WHOLE:
            raw = tl.load(scale + at)
        else:
            raw = tl.load(scale + at, mask=in_range, other=0)
        if SCALE == "e4m3" and PTX is not None:
            factor = e4m3_by_ptx(raw, DOT)
        else:
            factor = scale_in(raw, SCALE, DOT)
        if FMA:
            centre = spread(factor * tl.full((1, 1), -136.0, DOT), BLOCK_N, GROUPS, ELEMENTS)  # 128 + 8
        factor = spread(factor, BLOCK_N, GROUPS, ELEMENTS)
        if HAS_ZERO:
            if WHOLE:
                zero = tl.load(zero_point + at)
            else:
                zero = tl.load(zero_point + at, mask=in_range, other=0)
            if FLOAT_ZERO:
                offset = offset_in(zero, scale_in(raw, SCALE, tl.float32), BITS, DOT)
            else:
                offset = (zero.to(tl.int16) + MAGIC).to(DOT)
            offset = spread(offset, BLOCK_N, GROUPS, ELEMENTS)
    else:
        group = k // GROUP
        if not WHOLE:  # a step that begins behind K has no scales
            group = tl.minimum(group, (K - 1) // GROUP)
        if SCALE_MODE == "after":
            factor = scale_in(tl.load(scale + scale_rows + group), SCALE, tl.float32)
        if HAS_ZERO:
            offset = (tl.load(zero_point + scale_rows + group).to(tl.int16) + MAGIC).to(DOT)[:, None]
    partial = tl.zeros_like(total) if SCALE_MODE == "after" else total
    for i in tl.static_range(CODES):
        if PTX is None:
            weight = decode_portable(first, second, levels, i, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
        else:
            weight = decoded[i].to(DOT, bitcast=True)
            if INT8:
                weight = weight - decoded[CODES + i].to(DOT, bitcast=True)
        if FMA and SCALE_MODE == "before":
            weight = tl.fma(weight, factor, centre)
        elif KIND == "integer" and BITS == 8:
            if DOT == tl.float16:
                weight = weight - tl.full((1, 1), 1024 + 128, DOT)
        elif KIND == "integer":
            if HAS_ZERO and not FLOAT_ZERO:
                weight = weight - offset
            else:
                weight = weight - tl.full((1, 1), MAGIC + 2 ** (BITS - 1), DOT)
        elif MULTIPLIER != 1.0:
            weight = weight * tl.full((1, 1), MULTIPLIER, DOT)
        if FLOAT_ZERO:
            weight = tl.fma(weight, factor, offset)
        elif SCALE_MODE == "before" and not FMA:
            weight = weight * factor
        partial = _dot(weight, parts[i], partial, BATCH)
    return total + _scaled(partial, factor, BATCH) if SCALE_MODE == "after" else partial


@triton.jit
def tile_product(
    x,
    x_rows,
    x_mask,
    qdata,
    q_rows,
    scale,
    scale_rows,
    zero_point,
    levels,
    first_step,
    end_step,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_MODE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
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
    """sum of weight[n, k] * x[m, k] over the given steps of BLOCK_K -> fp32 [BLOCK_N, BLOCK_M].

    x_rows [BLOCK_M], q_rows (see `load_planes`) and scale_rows [BLOCK_N] are the offsets of the rows. SCALE_MODE says
    where the scales enter. "row": not at all, the caller multiplies the sum. "after": once per step, inside of one
    group, on the partial sums. "before": on the weights in DOT, for groups smaller than a step, where a second
    accumulator has no room, and with floating-point zero points, which are added to the weights. BATCH: see `_dot`;
    WIDE_X: see `_wide_x`.
    """
    # A step of several groups whose scales enter behind the dots is made of a part for each.
    PARTS: tl.constexpr = BLOCK_K // GROUP if SCALE_MODE == "after" and BLOCK_K > GROUP else 1
    # The step that K ends inside of comes by itself: with masks the loop would have 20 to 35 % more instructions.
    whole = end_step if EVEN_K else tl.minimum(end_step, K // BLOCK_K)
    if BATCH == 1:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BATCH, BLOCK_N // BATCH, BLOCK_M), tl.float32)
    for step in range(first_step, whole):
        for part in tl.static_range(PARTS):
            total = _add_step(
                *(total, step * PARTS + part, x, x_rows, x_mask, qdata, q_rows, scale, scale_rows, zero_point),
                *(levels, K, BLOCK_M, BLOCK_N, BLOCK_K // PARTS, True, GROUP, SCALE_MODE, SCALE, HAS_ZERO),
                *(DOT, KIND, BITS, PLANE0, PLANE1, CODES, MANTISSA, MULTIPLIER, PTX, BATCH, WIDE_X),
            )
    if not EVEN_K:
        if whole < end_step:
            for part in tl.static_range(PARTS):
                total = _add_step(
                    *(total, whole * PARTS + part, x, x_rows, x_mask, qdata, q_rows, scale, scale_rows, zero_point),
                    *(levels, K, BLOCK_M, BLOCK_N, BLOCK_K // PARTS, False, GROUP, SCALE_MODE, SCALE, HAS_ZERO),
                    *(DOT, KIND, BITS, PLANE0, PLANE1, CODES, MANTISSA, MULTIPLIER, PTX, BATCH, WIDE_X),
                )
    return total if BATCH == 1 else tl.reshape(total, (BLOCK_N, BLOCK_M))


@triton.jit
def store_product(
    total,
    y,
    scale,
    scale_rows,
    global_scale,
    bias,
    row_scale,
    row,
    n,
    m,
    M,
    N,
    SCALE_MODE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
):
    """Store the sums [BLOCK_N, BLOCK_M] of a tile in y [M, N], with what is multiplied and added once."""
    if SCALE_MODE == "row":
        total *= scale_in(tl.load(scale + scale_rows), SCALE, tl.float32)[:, None]
    if HAS_GLOBAL:
        total *= tl.load(global_scale)
    if HAS_ROW_SCALE:
        total *= tl.load(row_scale + m, mask=m < M, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    # Neighbouring lanes write neighbouring n.
    out = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, tl.trans(total.to(y.dtype.element_ty)), mask=(m < M)[:, None] & (n < N)[None, :])
