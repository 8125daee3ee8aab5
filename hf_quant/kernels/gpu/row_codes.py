"""Triton functions that turn fp32 rows into scales and codes, to the bit as `quantize_rowwise_reference` does.

They are what every kernel that ends in row quantization shares. Codes are written as bytes: uint8 for fp8_e4m3.
"""

from hf_quant.kernels.codes import SMALLEST_SCALE, row_max
from hf_quant.kernels.gpu.launch import Target, tl, triton


def code_options(format: str, target: Target) -> dict[str, float | bool | int]:
    """The constexprs of a kernel that calls `scale_of_row` and `encode`."""
    is_float = format != "int8"
    return {
        "LIMIT": row_max(format),
        "SMALLEST": SMALLEST_SCALE,
        "IS_FLOAT": is_float,
        # sm75 and sm80 have no conversion to float8_e4m3fn, and that of gfx942 has another exponent bias.
        "CONVERTS": is_float and target.has_fp8_dot,
    }


@triton.jit
def larger_magnitude(a, b):
    """max(a, |b|), elementwise; NaN if one is. One instruction (FMNMX.NAN) from sm80 on."""
    return tl.maximum(a, tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of_row(magnitudes, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """fp32 [R, C], not negative -> scale [R]."""
    # As integers they have the same order, NaN last; a maximum of floats would ignore NaN.
    amax = tl.max(magnitudes.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, LIMIT)
    return tl.where(scale < SMALLEST, 1.0, scale)


@triton.jit
def quotient(x, scale, inverse, EXACT: tl.constexpr):
    """x / scale with `inverse` = 1 / scale rounded to nearest: rounded to nearest if EXACT, else to 2 units.

    The first correction makes the quotient one of the two floats beside the exact one, the second the nearest (P.
    Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). 5 instructions; a
    division takes 9 and a branch, and its approximation (div.full) gives other codes at ties, as of amax / 2.
    """
    q = x * inverse
    if EXACT:
        # In this order -0 stays -0. A product with -1 is a sign; Triton 3.6 subtracts from 0 for a minus.
        negative, down = x * -1.0, inverse * -1.0
        q = tl.fma(tl.fma(q, scale, negative), down, q)
        q = tl.fma(tl.fma(q, scale, negative), down, q)
    return q


@triton.jit
def scale_of_row_or_given(magnitudes, input_scale, NORM: tl.constexpr, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """Scale [R] of rows with magnitudes [R, C] / NORM: their own, or the one that is given, NaN for a row with NaN."""
    if input_scale is None:
        return scale_of_row(magnitudes * NORM, LIMIT, SMALLEST)
    else:
        # As integers NaN comes last; a maximum of floats would ignore it.
        amax = tl.max(magnitudes.to(tl.int32, bitcast=True), axis=1)
        return tl.where(amax > 0x7F800000, amax.to(tl.float32, bitcast=True), tl.load(input_scale))


@triton.jit
def quotient_of_scale(v, scale, inverse, input_scale, LIMIT: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr):
    """`quotient`, within the format's range where the scale is given: before, so that nothing of it becomes inf."""
    if input_scale is None:
        return quotient(v, scale, inverse, EXACT)
    else:
        largest = scale * (2 * LIMIT / NORM)
        q = quotient(tl.minimum(tl.maximum(v, -largest), largest), scale, inverse, EXACT)
        return tl.minimum(tl.maximum(q, -LIMIT), LIMIT)


@triton.jit
def encode(q, IS_FLOAT: tl.constexpr, CONVERTS: tl.constexpr):
    """fp32 within the format's range (to 1 unit in the last place) -> its code as a byte, half to even."""
    if not IS_FLOAT:
        # 1.5 * 2**23 leaves no bits after the point: the low byte is the integer. FRND and F2I run at an eighth of it.
        return (q + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif CONVERTS:
        return q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = q.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Drop 20 bits of the mantissa, half to even; the exponent's bias goes from 127 to 7.
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
        # Below 2**-6 the grid has steps of 2**-9: the last place of 2**14.
        small = (tl.abs(q) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < (121 << 23), small, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def random_offsets(key, rows, first, C: tl.constexpr, ROUNDS: tl.constexpr):
    """Noise of `round_stochastically` for the values first to first + C of `rows` [R]: fp32 [R, C] in (-1/2, 1/2)."""
    group = (first // 8 + tl.arange(0, C // 8)[None, :]).to(tl.uint32) + tl.zeros([rows.shape[0], 1], tl.uint32)
    row = rows.to(tl.uint32)[:, None] + tl.zeros([1, C // 8], tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, group, row, row * 0, row * 0, ROUNDS)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (rows.shape[0], C // 2))
    # 16 bits as the mantissa of a number in [1, 2): exact, where a conversion from int takes four times as long.
    halves = tl.join((words << 7) & 0x7FFF80, (words >> 9) & 0x7FFF80)
    return (tl.reshape(halves, (rows.shape[0], C)) | 0x3F800000).to(tl.float32, bitcast=True) - (1.5 - 2.0**-17)


@triton.jit
def round_stochastically(q, offsets, LIMIT: tl.constexpr, IS_FLOAT: tl.constexpr):
    """fp32 -> values of the format, as the reference's `round_stochastically`."""
    q = tl.minimum(tl.maximum(q, -LIMIT), LIMIT)
    if IS_FLOAT:
        power = (q.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power, 0.015625) * 0.125
        inverse = ((254 << 23) - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        return ((q * inverse + offsets + 12582912.0) - 12582912.0) * step
    else:
        return q + offsets  # `encode` rounds it
