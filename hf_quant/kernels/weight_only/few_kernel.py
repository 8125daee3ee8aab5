"""The Gluon kernel of products with few tokens; few.py says when it runs, and why it is made so."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hf_quant.kernels.gpu import decode


ROWS = gl.constexpr(16)  # of the weight, in a block: those of one mma.sync
STEP = gl.constexpr(32)  # 16-bit elements of a step: 16 bytes for each of the four threads that share a row
_PAIRS = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")  # the halves of two words
_2 = gl.constexpr((gl.int16, gl.int16))
_SAME = gl.constexpr("mov.b32 $0, $1;")
_scale_in, _decode_ptx = gluon.jit(decode.scale_in.fn), gluon.jit(decode._decode_ptx.fn)
_offset_in = gluon.jit(decode.offset_in.fn)


@gluon.constexpr_function
def _weight_layout(WARPS, GROUPS=0):
    """The left operand of mma.sync, [warp, row, element]: a thread has 8 neighbouring elements of two rows.

    With GROUPS the elements are [group, element].
    """
    size = 32 // max(GROUPS, 1)

    def unit(row, column):
        return [0, row] + ([column] if not GROUPS else [0, column] if column < size else [column // size, 0])

    registers = [unit(0, 1), unit(0, 2), unit(0, 4), unit(8, 0)]
    lanes = [unit(0, 8), unit(0, 16), unit(1, 0), unit(2, 0), unit(4, 0)]
    warps = [[1 << i] + unit(0, 0)[1:] for i in range(WARPS.bit_length() - 1)]
    shape = [WARPS, 16, GROUPS, size] if GROUPS else [WARPS, 16, 32]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.constexpr_function
def _x_layout(WARPS, BLOCK_M):
    """The right operand of mma.sync, [warp, token, element], its elements as those of the left one."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + ([[0, 8, 0]] if BLOCK_M == 16 else [])
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << i, 0, 0] for i in range(WARPS.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [WARPS, BLOCK_M, 32])


@gluon.constexpr_function
def _along(layout, rank, dim):
    """The layout of one dimension of a layout."""
    for other in range(rank - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _places(SIZE: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, ... along a dimension of a layout; the others have the size 1."""
    found = gl.arange(0, SIZE, _along(LAYOUT, RANK, DIM))
    for other in gl.static_range(RANK):
        if other != DIM:
            found = gl.expand_dims(found, other)
    return found


@gluon.jit
def _wide(value, like):
    value, _ = gl.broadcast(value, like)
    return value


@gluon.jit
def _spread(values, like):
    """values [warp, row, group, 1] -> one for each element, as `like` has them."""
    GROUPS: gl.constexpr = values.shape[2]
    WEIGHT: gl.constexpr = like.type.layout
    GROUPED: gl.constexpr = _weight_layout(like.shape[0], GROUPS)
    wide = _wide(values, gl.full([like.shape[0], ROWS, GROUPS, STEP // GROUPS], 0, gl.int16, GROUPED))
    return gl.convert_layout(gl.reshape(wide, like.shape), WEIGHT, assert_trivial=True)


@gluon.jit
def _of_rows(scale, row, stride, ROWS_OF_ONE: gl.constexpr):
    """The places of the scales of rows; ROWS_OF_ONE: how many rows share theirs, 0 for all."""
    if ROWS_OF_ONE == 0:
        return scale + row * 0
    else:
        return scale + row // ROWS_OF_ONE * stride


@gluon.jit
def _load_of_groups(values, first, step, last, GROUP: gl.constexpr, CODES: gl.constexpr, EVEN_K: gl.constexpr):
    """Scales or zero points of the groups of a step; first: columns at which the warp's share of K and groups begin.

    Behind K there are none: those of the last group stand for them.
    """
    group = (first + step * (STEP * CODES)) // GROUP
    return gl.load(values + (group if EVEN_K else gl.minimum(group, last)))


@gluon.jit
def _load_step(
    codes,
    element,
    scales,
    scale_first,
    zeros,
    zero_first,
    step,
    limit,
    GROUP: gl.constexpr,
    SCALE_MODE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    CODES: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """Codes, scales and zero points of a step; codes for what there is not. Codes need not stay in the cache."""
    at, last = codes + step * STEP, (limit * CODES - 1) // GROUP
    if EVEN_K:
        found = gl.load(at, eviction_policy="evict_first")
    else:
        found = gl.load(at, mask=element + step * STEP < limit, other=0, eviction_policy="evict_first")
    raw, zero = found, found
    if SCALE_MODE != "row":
        raw = _load_of_groups(scales, scale_first, step, last, GROUP, CODES, EVEN_K)
    if HAS_ZERO:
        zero = _load_of_groups(zeros, zero_first, step, last, GROUP, CODES, EVEN_K)
    return found, raw, zero


@gluon.jit
def _load_x(x, element, is_given, step, limit, CODES: gl.constexpr, EVEN_K: gl.constexpr):
    """x for each code of the elements of a step, as bits: CODES right operands.

    The values of an element are one word, which is taken apart in registers.
    """
    words = gl.load(x + step * STEP, mask=is_given if EVEN_K else is_given & (element + step * STEP < limit), other=0)
    low = words.to(gl.int32)
    a, b = gl.inline_asm_elementwise(_PAIRS, "=&r,=&r,r,r", [low], dtype=_2, is_pure=True, pack=2)
    if CODES == 2:
        return a, b
    else:
        high = (words >> 32).to(gl.int32)
        c, d = gl.inline_asm_elementwise(_PAIRS, "=&r,=&r,r,r", [high], dtype=_2, is_pure=True, pack=2)
        return a, b, c, d


@gluon.jit
def _product(weight, tokens, total, DOT: gl.constexpr):
    """total [warp, row, token] + weight [warp, row, element] @ tokens [warp, token, element].T"""
    MMA: gl.constexpr = total.type.layout
    a = gl.convert_layout(weight, gl.DotOperandLayout(0, MMA, 8), assert_trivial=True)
    b = gl.permute(tokens.to(DOT, bitcast=True), [0, 2, 1])
    b = gl.convert_layout(b, gl.DotOperandLayout(1, MMA, 8), assert_trivial=True)
    return mma_v2(a, b, total)


@gluon.jit
def _add_step(
    total,
    codes,
    raw,
    zero,
    middle,
    tokens,
    SCALE_MODE: gl.constexpr,
    SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    BY_SUM: gl.constexpr,
    DOT: gl.constexpr,
    KIND: gl.constexpr,
    BITS: gl.constexpr,
    CODES: gl.constexpr,
    MAGIC: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    PTX: gl.constexpr,
):
    """total + the products of a step; middle: what is added to each decoded code, as an operand."""
    MMA: gl.constexpr = total.type.layout
    WEIGHT: gl.constexpr = codes.type.layout
    INT8: gl.constexpr = KIND == "integer" and BITS == 8 and DOT == gl.bfloat16  # comes in two parts, see `decode.ptx`
    # magic + code, times a scale of 4 bits, plus what the magic number adds: exact, as 17 * 15 < 256.
    INT4: gl.constexpr = KIND == "integer" and BITS == 4 and not HAS_ZERO
    FMA: gl.constexpr = INT4 and SCALE_MODE == "before" and SCALE == "e4m3" and DOT == gl.bfloat16
    FLOAT_ZERO: gl.constexpr = HAS_ZERO and zero.dtype.is_floating()
    bits = _decode_ptx(codes, codes, 0, CODES * 2 if INT8 else CODES, PTX)
    if SCALE_MODE == "before":
        narrow = _scale_in(raw, SCALE, DOT)
        factor = _spread(narrow, codes)
        if FMA:
            NARROW: gl.constexpr = narrow.type.layout
            centre = _spread(narrow * gl.full(narrow.shape, -136.0, DOT, NARROW), codes)
    if FLOAT_ZERO:
        offset = _spread(_offset_in(zero, _scale_in(raw, SCALE, gl.float32), BITS, DOT), codes)
    elif HAS_ZERO:
        offset = _spread((zero.to(gl.int16) + MAGIC).to(DOT), codes)
    # Two sums, as a product waits for the one before it.
    even = gl.zeros(total.shape, gl.float32, MMA)
    odd = even
    if BY_SUM:
        for i in gl.static_range(0, CODES, 2):
            even = _product(middle, tokens[i], even, DOT)
            odd = _product(middle, tokens[i + 1], odd, DOT)
    for i in gl.static_range(CODES):
        weight = bits[i].to(DOT, bitcast=True)
        if FMA:
            weight = gl.fma(weight, factor, centre)
        else:
            if INT8:
                weight = weight - bits[CODES + i].to(DOT, bitcast=True)
            elif HAS_ZERO and not FLOAT_ZERO:
                weight = weight - offset
            elif KIND == "integer" and not BY_SUM:
                weight = weight + middle
            elif MULTIPLIER != 1.0:
                weight = weight * gl.full(codes.shape, MULTIPLIER, DOT, WEIGHT)
            if FLOAT_ZERO:
                weight = gl.fma(weight, factor, offset)
            elif SCALE_MODE == "before":
                weight = weight * factor
        if i % 2 == 0:
            even = _product(weight, tokens[i], even, DOT)
        else:
            odd = _product(weight, tokens[i], odd, DOT)
    if SCALE_MODE == "after":
        return total + (even + odd) * _wide(_scale_in(raw, SCALE, gl.float32), total)
    else:
        return total + (even + odd)


@gluon.jit(do_not_specialize=["M", "steps"])
def _few_mm_kernel(
    x,
    qdata,
    scale,
    zero_point,
    global_scale,
    bias,
    y,
    M,
    N,
    limit,
    steps,
    x_stride,
    q_stride,
    scale_stride,
    BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr,
    EVEN_K: gl.constexpr,
    GROUP: gl.constexpr,
    SCALE_MODE: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_GLOBAL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BY_SUM: gl.constexpr,
    DOT: gl.constexpr,
    KIND: gl.constexpr,
    BITS: gl.constexpr,
    CODES: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    PTX: gl.constexpr,
):
    """A program computes ROWS rows of the weight times all tokens; each warp takes `steps` steps of K, an even number.

    limit: elements of a row. x_stride counts 8 values, q_stride 16 bytes. SCALE_MODE: see `gpu.tile`. BY_SUM: what
    decoded codes have too much is a product of its own, for all rows alike, and not taken from each code.
    """
    GROUPS: gl.constexpr = STEP * CODES // GROUP if STEP * CODES > GROUP else 1
    WEIGHT: gl.constexpr = _weight_layout(WARPS)
    GROUPED: gl.constexpr = _weight_layout(WARPS, GROUPS)
    X: gl.constexpr = _x_layout(WARPS, BLOCK_M)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    MAGIC: gl.constexpr = 128 if DOT == gl.bfloat16 else 1024  # see `decode.ptx`
    n0, share = gl.program_id(0) * ROWS, steps * STEP

    row = gl.minimum(n0 + _places(ROWS, 1, 3, WEIGHT), N - 1)  # those behind the end are copies that are not stored
    element = _places(WARPS, 0, 3, WEIGHT) * share + _places(STEP, 2, 3, WEIGHT)
    codes = qdata.to(gl.pointer_type(gl.int16)) + row.to(gl.int64) * (q_stride * 8) + element

    token, x_element = _places(BLOCK_M, 1, 3, X), _places(WARPS, 0, 3, X) * share + _places(STEP, 2, 3, X)
    is_given = token < M
    words = x.to(gl.pointer_type(gl.int64 if CODES == 4 else gl.int32)) + token * (x_stride * (8 // CODES)) + x_element

    row = gl.minimum(n0 + _places(ROWS, 1, 4, GROUPED), N - 1)
    zeros = _of_rows(zero_point if HAS_ZERO else scale, row, scale_stride, SCALE_ROWS)
    first = _places(WARPS, 0, 4, GROUPED) * (share * CODES) + _places(GROUPS, 2, 4, GROUPED) * (STEP * CODES // GROUPS)
    scales, scale_first = _of_rows(scale, row, scale_stride, SCALE_ROWS), first
    if SCALE_MODE == "after":
        row = gl.minimum(n0 + _places(ROWS, 1, 3, MMA), N - 1)
        scales = _of_rows(scale, row, scale_stride, SCALE_ROWS)
        scale_first = _places(WARPS, 0, 3, MMA) * (share * CODES)

    # An operand whose value the compiler does not know: it would make it anew for each product.
    middle = gl.full([WARPS, ROWS, STEP], -MAGIC - 2 ** (BITS - 1), DOT, WEIGHT)
    if BY_SUM:
        middle = gl.inline_asm_elementwise(_SAME, "=r,r", [middle], dtype=gl.int16, is_pure=False, pack=2)
        middle = middle.to(DOT, bitcast=True)
    total = gl.zeros([WARPS, ROWS, BLOCK_M], gl.float32, MMA)
    codes0, raw0, zero0 = _load_step(
        *(codes, element, scales, scale_first, zeros, first, 0, limit, GROUP, SCALE_MODE, HAS_ZERO, CODES, EVEN_K)
    )
    codes1, raw1, zero1 = _load_step(
        *(codes, element, scales, scale_first, zeros, first, 1, limit, GROUP, SCALE_MODE, HAS_ZERO, CODES, EVEN_K)
    )
    for step in range(0, steps, 2):
        # The codes of the next two steps are on their way while these are multiplied.
        next0, next1 = gl.minimum(step + 2, steps - 2), gl.minimum(step + 3, steps - 1)
        tokens = _load_x(words, x_element, is_given, step, limit, CODES, EVEN_K)
        total = _add_step(
            *(total, codes0, raw0, zero0, middle, tokens, SCALE_MODE, SCALE, HAS_ZERO, BY_SUM, DOT, KIND, BITS),
            *(CODES, MAGIC, MULTIPLIER, PTX),
        )
        codes0, raw0, zero0 = _load_step(
            *(codes, element, scales, scale_first, zeros, first, next0, limit, GROUP, SCALE_MODE, HAS_ZERO),
            *(CODES, EVEN_K),
        )
        tokens = _load_x(words, x_element, is_given, step + 1, limit, CODES, EVEN_K)
        total = _add_step(
            *(total, codes1, raw1, zero1, middle, tokens, SCALE_MODE, SCALE, HAS_ZERO, BY_SUM, DOT, KIND, BITS),
            *(CODES, MAGIC, MULTIPLIER, PTX),
        )
        codes1, raw1, zero1 = _load_step(
            *(codes, element, scales, scale_first, zeros, first, next1, limit, GROUP, SCALE_MODE, HAS_ZERO),
            *(CODES, EVEN_K),
        )

    sums = gl.sum(total, 0)
    SUMS: gl.constexpr = sums.type.layout
    n, m = n0 + _places(ROWS, 0, 2, SUMS), _places(BLOCK_M, 1, 2, SUMS)
    row = gl.minimum(n, N - 1)
    if SCALE_MODE == "row":
        sums *= _scale_in(gl.load(_of_rows(scale, row, scale_stride, SCALE_ROWS)), SCALE, gl.float32)
    if HAS_GLOBAL:
        sums *= gl.load(global_scale)
    if HAS_BIAS:
        sums += gl.load(bias + row).to(gl.float32)
    gl.store(y + m * N + n, sums.to(y.dtype.element_ty), mask=(m < M) & (n < N))
