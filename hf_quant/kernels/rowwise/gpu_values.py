"""Triton functions that make the values which `_quantize_rowwise_kernel` quantizes: norms, activations, rotations."""

from hf_quant.kernels.gpu.launch import tl, triton


@triton.jit
def _mask(in_m, columns, K, EVEN_K: tl.constexpr):
    return in_m if EVEN_K else in_m & (columns < K)


@triton.jit
def _load(x, rows, columns, mask, POLICY: tl.constexpr):
    """fp32 [R, C]; 0 where the mask is not set. rows: offsets of the rows, in elements."""
    return tl.load(x + (rows + columns), mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _sigmoid(v, PTX: tl.constexpr):
    """1 / (1 + exp(-v)) to 3 units in the last place."""
    if PTX:
        # 5 instructions, where those for subnormal numbers in `tl.exp` and in the division make it 14.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [v],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def _normal_tail(a, PTX: tl.constexpr):
    """The normal distribution's weight beyond a >= 0, (1 - erf(a / sqrt(2))) / 2, to 8e-8.

    Abramowitz and Stegun, "Handbook of mathematical functions", 7.1.26. `tl.erf` takes 30 instructions.
    """
    x = 1.0 + 0.23164189 * a
    if PTX:
        t = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [a * a * -0.7213475204], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        t = 1.0 / x
        e = tl.exp2(a * a * -0.7213475204)
    poly = ((((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796) * t
    return poly * e


@triton.jit
def _value(x, up, x_rows, up_rows, columns, mask, PROLOGUE: tl.constexpr, PTX: tl.constexpr, POLICY: tl.constexpr):
    """The values to quantize, or to norm first: x, or act(x) * up, in fp32."""
    v = _load(x, x_rows, columns, mask, POLICY)
    if PROLOGUE == "silu":
        v *= _sigmoid(v, PTX)
    elif PROLOGUE == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 * u), u = sqrt(2 / pi) * (v + .044715 * v**3)
        v *= _sigmoid(v * (1.5957691216057308 + 0.0713548162726 * v * v), PTX)
    elif PROLOGUE == "gelu":
        v = tl.maximum(v, 0.0) - tl.abs(v) * _normal_tail(tl.abs(v), PTX)
    if up is not None:
        v *= _load(up, up_rows, columns, mask, POLICY)
    return v


@triton.jit
def _deviation(v, mean, columns, K, EVEN_K: tl.constexpr):
    """v - mean; 0 beyond K. The mean of an RMS norm is None."""
    if mean is None:
        return v
    elif EVEN_K:
        return v - mean
    else:
        return tl.where(columns < K, v - mean, 0.0)


@triton.jit
def _normed(v, rstd, weight, bias, mod_scale, mod_shift, scale_rows, shift_rows, columns, K, EVEN_K: tl.constexpr):
    """(v * rstd * weight + bias) * (1 + mod_scale) + mod_shift."""
    v *= rstd
    mask = tl.full([1, 1], True, tl.int1) if EVEN_K else columns < K
    # The vectors of one row are those of the next: they stay in the L1 cache, while x passes through it.
    if weight is not None:
        v *= _load(weight, 0, columns, mask, "evict_last")
    if bias is not None:
        v += _load(bias, 0, columns, mask, "evict_last")
    if mod_scale is not None:
        v *= 1.0 + _load(mod_scale, scale_rows, columns, mask, "evict_last")
    if mod_shift is not None:
        v += _load(mod_shift, shift_rows, columns, mask, "evict_last")
    return v


@triton.jit
def _rotated(v, diagonal, columns, K, EVEN_K: tl.constexpr, LOG_B: tl.constexpr):
    """v [R, C] times the diagonal, then butterflies in each 2**LOG_B columns, without their factor.

    Sums of pairs are reductions (shuffles, if in two lanes): a + b in both places, less 2 * b in the second.
    """
    mask = tl.full([1, 1], True, tl.int1) if EVEN_K else columns < K
    v *= _load(diagonal, 0, columns, mask, "evict_last")
    second = (tl.arange(0, 2) * -2).to(tl.float32)[None, None, :, None]
    for stage in tl.static_range(LOG_B):
        pairs = tl.reshape(v, (v.shape[0], v.shape[1] // (2 << stage), 2, 1 << stage))
        v = tl.reshape(tl.sum(pairs, 2, keep_dims=True) + pairs * second, v.shape)
    return v
