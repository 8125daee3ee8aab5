"""Triton functions of kernels that take rows: masks and loads in fp32, activation functions, rows of experts."""

from hf_quant.kernels.gpu.launch import tl, triton


@triton.jit
def row_mask(in_m, columns, K, EVEN_K: tl.constexpr):
    """The mask of columns of rows; EVEN_K: there are no columns behind the last."""
    return in_m if EVEN_K else in_m & (columns < K)


@triton.jit
def load(x, rows, columns, mask, POLICY: tl.constexpr):
    """fp32 [R, C]; 0 where the mask is not set. rows: offsets of the rows, in elements."""
    return tl.load(x + (rows + columns), mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def sigmoid(v, PTX: tl.constexpr):
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
def normal_tail(a, PTX: tl.constexpr):
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
def activated(v, ACT: tl.constexpr, PTX: tl.constexpr):
    """An activation function of fp32 values, to about 1e-6."""
    if ACT == "silu":
        v *= sigmoid(v, PTX)
    elif ACT == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 * u), u = sqrt(2 / pi) * (v + .044715 * v**3)
        v *= sigmoid(v * (1.5957691216057308 + 0.0713548162726 * v * v), PTX)
    elif ACT == "quick_gelu":
        v *= sigmoid(v * 1.702, PTX)
    elif ACT == "gelu":
        v = tl.maximum(v, 0.0) - tl.abs(v) * normal_tail(tl.abs(v), PTX)
    else:
        v = tl.where(v < 0.0, 0.0, v)  # NaN stays
        if ACT == "relu_squared":
            v *= v
    return v


@triton.jit
def rows_of_tile(offsets, tile, M, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr):
    """(expert, first row, end of its rows) of a tile of rows; expert EXPERTS, rows of none, after the last."""
    e = tl.arange(0, EXPERTS_PADDED)
    end = tl.load(offsets + e, mask=e < EXPERTS, other=0)
    begin = tl.load(offsets + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
    tiles = (tl.maximum(end - begin, 0) + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(tiles, 0)
    expert = tl.minimum(tl.sum((until <= tile).to(tl.int32), 0), EXPERTS)
    mine = e == expert
    before = tl.sum(tl.where(e < expert, tiles, 0), 0)
    has_expert = expert < EXPERTS
    first = tl.where(has_expert, tl.sum(tl.where(mine, begin, 0), 0), tl.load(offsets + EXPERTS - 1))
    end_row = tl.where(has_expert, tl.sum(tl.where(mine, end, 0), 0), M)
    return expert, first + (tile - before) * BLOCK_M, end_row
