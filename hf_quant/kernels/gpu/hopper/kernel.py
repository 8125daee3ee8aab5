"""The Gluon kernel of products of quantized weights on Hopper; plan.py says when it runs, and what it takes.

Four warps copy tiles of codes and of x into a ring in shared memory (of them one thread does, by the tensor memory
accelerator). The others decode: codes in registers become the left operand of wgmma (`pairs`), x in shared memory is
the right one. The product of a step runs while the codes of the next are decoded; the warps wait only for the one
before it, whose registers and place in the ring come free. In Triton's own loops a decoded operand makes each wgmma
wait for the one before, and x has to be split in registers.

The structure is that of "Machete", https://github.com/vllm-project/vllm/pull/7174, with codes in their usual order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hf_quant.kernels.gpu.decode import offset_in, scale_in
from hf_quant.kernels.gpu.hopper.codes import _multiply_codes
from hf_quant.kernels.gpu.hopper.ring import _load_tile, _next, _ring
from hf_quant.kernels.gpu.hopper.tiles import _rows_of_tile, _tile_at


_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # a name that later Tritons changed
_scale_in, _offset_in = gluon.jit(scale_in.fn), gluon.jit(offset_in.fn)


@gluon.constexpr_function
def _pair_layout(BLOCK_N, GROUPS, CHUNKS, WARPS):
    """The place of code [row, group, chunk of 8, t // 2, t % 2, b] in wgmma's left operand: column 2t + b of 8."""
    names = {"b": 5, "t0": 4, "t1": 3, "chunk": 2, "group": 1, "row": 0}

    def unit(axis, size):
        return [size if i == names[axis] else 0 for i in range(6)]

    registers = [unit("b", 1)]
    registers += [unit("chunk", 1 << i) for i in range(CHUNKS.bit_length() - 1)]
    registers += [unit("group", 1 << i) for i in range(GROUPS.bit_length() - 1)]
    registers += [unit("row", 8)]
    rows = 16 * WARPS
    while rows < BLOCK_N:
        registers.append(unit("row", rows))
        rows *= 2
    lanes = [unit("t0", 1), unit("t1", 1), unit("row", 1), unit("row", 2), unit("row", 4)]
    warps = [unit("row", 16 << i) for i in range(WARPS.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, GROUPS, CHUNKS, 2, 2, 2])


@gluon.constexpr_function
def _slices(layout, dims):
    """The layout without some of its dimensions, the last of which comes first."""
    for dim in dims:
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.jit
def _wide(value, like, FIRST: gl.constexpr):
    """A tensor of the first dimensions of `like`, spread over the others, from FIRST on."""
    for dim in gl.static_range(FIRST, 6):
        value = gl.expand_dims(value, dim)
    value, _ = gl.broadcast(value, like)
    return value


@gluon.jit
def _load_scales(
    scale,
    zero_point,
    at,
    step,
    K,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):
    """Load scales and zero points of the groups of a step [BLOCK_N, GROUPS]; scales twice where there are no zeros.

    `at` [BLOCK_N] are the rows; the groups of a step that begins behind K are those of the last.
    """
    step = gl.minimum(step, (K - 1) // BLOCK_K)
    group = step * BLOCK_K // GROUP + gl.arange(0, GROUPS, gl.SliceLayout(0, at.type.layout.parent))
    at = at[:, None] + gl.minimum(group, (K - 1) // GROUP)[None, :]
    raw = gl.load(scale + at)
    return raw, gl.load(zero_point + at) if HAS_ZERO else raw


@gluon.jit
def _decode(
    codes,
    raw,
    zero,
    selector,
    BLOCK_K: gl.constexpr,
    BITS: gl.constexpr,
    SCALE: gl.constexpr,
    SCALING: gl.constexpr,
    DOT: gl.constexpr,
    MAGIC: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    PTX: gl.constexpr,
    LAYOUT: gl.constexpr,
    MMA: gl.constexpr,
):
    """Codes of a step in shared memory -> their values in DOT as wgmma's left operand [BLOCK_N, BLOCK_K]."""
    BLOCK_N: gl.constexpr = LAYOUT.shape[0]
    GROUPS: gl.constexpr = LAYOUT.shape[1]
    CHUNKS: gl.constexpr = LAYOUT.shape[2]
    like = gl.full(LAYOUT.shape, 0, gl.int32, LAYOUT)
    if BITS == 4:  # a word is a chunk
        words = codes.reshape([BLOCK_N, GROUPS, CHUNKS]).load(_slices(LAYOUT, (5, 4, 3)))
        words = _wide(words, like, 3)
    else:  # a word is half a chunk
        words = codes.reshape([BLOCK_N, GROUPS, CHUNKS, 2]).load(_slices(LAYOUT, (5, 4)))
        words = _wide(words, like, 4)
    if SCALING == "":
        pairs = gl.inline_asm_elementwise(PTX, "=r,r,r,r,r", [words, selector], dtype=gl.int16, is_pure=True, pack=2)
    else:
        factor = _scale_in(raw, SCALE, DOT)
        if SCALING == "*":
            factor = _wide(factor, like, 2)
            pairs = gl.inline_asm_elementwise(
                PTX, "=r,r,r,r,r,r", [words, selector, factor], dtype=gl.int16, is_pure=True, pack=2
            )
        else:
            if SCALING == "*+":
                offset = _offset_in(zero, _scale_in(raw, SCALE, gl.float32), BITS, DOT)
            elif HAS_ZERO:
                offset = (zero.to(gl.int16) + MAGIC).to(DOT)
            else:
                offset = factor * gl.full(factor.shape, -136.0, DOT, factor.type.layout)  # exact, see `gpu.tile`
            factor, offset = _wide(factor, like, 2), _wide(offset, like, 2)
            pairs = gl.inline_asm_elementwise(
                PTX, "=r,r,r,r,r,r,r", [words, selector, factor, offset], dtype=gl.int16, is_pure=True, pack=2
            )
    values = gl.reshape(pairs, [BLOCK_N, BLOCK_K]).to(DOT, bitcast=True)
    return gl.convert_layout(values, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _copy(x_tiles, q_tiles, xs, qs, full, empty, m0, n0, first, end, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """The warps that copy: tiles of x and of codes of each step, as places in the ring come free."""
    slot, phase = 0, 1
    WORDS: gl.constexpr = qs.shape[2]
    BYTES: gl.constexpr = xs.shape[1] * BLOCK_K * xs.dtype.primitive_bitwidth // 8 + qs.shape[1] * WORDS * 4
    for step in range(first, end):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), BYTES)
        _load_tile(q_tiles, [n0, step * WORDS], full.index(slot), qs.index(slot))
        _load_tile(x_tiles, [m0, step * BLOCK_K], full.index(slot), xs.index(slot))
        slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _multiply(
    scale,
    zero_point,
    scale_rows,
    xs,
    qs,
    full,
    empty,
    first,
    end,
    K,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    SCALE: gl.constexpr,
    SCALING: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    DOT: gl.constexpr,
    MAGIC: gl.constexpr,
    PTX: gl.constexpr,
    SELECTORS: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
    MMA: gl.constexpr,
):
    """The warps that decode and multiply: the sum of the steps from `first` to `end`, fp32 [BLOCK_N, BLOCK_M].

    Each turn of the loop takes two steps, so that the registers of neighbouring steps are not the same ones.
    """
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_N: gl.constexpr = qs.shape[1]
    GROUPS: gl.constexpr = LAYOUT.shape[1]
    like = gl.full(LAYOUT.shape, 0, gl.int32, LAYOUT)
    PAIR: gl.constexpr = _slices(LAYOUT, (5, 2, 1, 0))
    high = gl.arange(0, 2, gl.SliceLayout(1, PAIR))[:, None] * (SELECTORS[2] - SELECTORS[0])
    low = gl.arange(0, 2, gl.SliceLayout(0, PAIR))[None, :] * (SELECTORS[1] - SELECTORS[0])
    selector = SELECTORS[0] + high + low
    for dim in gl.static_range(3):
        selector = gl.expand_dims(selector, dim)
    selector, _ = gl.broadcast(gl.expand_dims(selector, 5), like)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    s0, z0 = _load_scales(scale, zero_point, scale_rows, first, K, BLOCK_K, GROUP, GROUPS, HAS_ZERO)
    s1, z1 = _load_scales(scale, zero_point, scale_rows, first + 1, K, BLOCK_K, GROUP, GROUPS, HAS_ZERO)
    mbarrier.wait(full.index(0), 0, pred=first < end)
    a0 = _decode(qs.index(0), s0, z0, selector, BLOCK_K, BITS, SCALE, SCALING, DOT, MAGIC, HAS_ZERO, PTX, LAYOUT, MMA)
    a1 = a0
    before, slot, phase = 0, 0, 0
    for step in range(first, end - 1, 2):
        acc = hopper.warpgroup_mma(a0, xs.index(slot).permute([1, 0]), acc, is_async=True)
        s0, z0 = _load_scales(scale, zero_point, scale_rows, step + 2, K, BLOCK_K, GROUP, GROUPS, HAS_ZERO)
        acc, a1 = hopper.warpgroup_mma_wait(1, deps=[acc, a1])
        mbarrier.arrive(empty.index(before), pred=step > first)
        before = slot
        slot, phase = _next(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
        a1 = _decode(
            qs.index(slot), s1, z1, selector, BLOCK_K, BITS, SCALE, SCALING, DOT, MAGIC, HAS_ZERO, PTX, LAYOUT, MMA
        )

        acc = hopper.warpgroup_mma(a1, xs.index(slot).permute([1, 0]), acc, is_async=True)
        s1, z1 = _load_scales(scale, zero_point, scale_rows, step + 3, K, BLOCK_K, GROUP, GROUPS, HAS_ZERO)
        acc, a0 = hopper.warpgroup_mma_wait(1, deps=[acc, a0])
        mbarrier.arrive(empty.index(before))
        before = slot
        slot, phase = _next(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase, pred=step + 2 < end)
        a0 = _decode(
            qs.index(slot), s0, z0, selector, BLOCK_K, BITS, SCALE, SCALING, DOT, MAGIC, HAS_ZERO, PTX, LAYOUT, MMA
        )
    if (end - first) % 2 == 1:
        acc = hopper.warpgroup_mma(a0, xs.index(slot).permute([1, 0]), acc, is_async=True)
        acc, a0, a1 = hopper.warpgroup_mma_wait(0, deps=[acc, a0, a1])
    else:
        acc, a0, a1 = hopper.warpgroup_mma_wait(0, deps=[acc, a0, a1])
    return acc


@gluon.jit
def _store(
    total,
    scale,
    scale_rows,
    global_scale,
    bias,
    row_scale,
    y,
    m0,
    n0,
    end_m,
    is_kept,
    N,
    SCALE: gl.constexpr,
    SCALING: gl.constexpr,
    HAS_GLOBAL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Store the sums [BLOCK_N, BLOCK_M] of a tile in y, with what is multiplied and added once; zeros if not is_kept.

    They are turned in shared memory, so that neighbouring threads write neighbouring n.
    """
    MMA: gl.constexpr = total.type.layout
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_M: gl.constexpr = total.shape[1]
    row = gl.minimum(n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), N - 1)
    if SCALING == "":
        total *= _scale_in(gl.load(scale + gl.convert_layout(scale_rows, row.type.layout)), SCALE, gl.float32)[:, None]
    if HAS_GLOBAL:
        total *= gl.load(global_scale)
    if HAS_ROW_SCALE:
        column = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
        total *= gl.load(row_scale + column, mask=column < end_m, other=0.0)[None, :]
    if HAS_BIAS:
        total += gl.load(bias + row).to(gl.float32)[:, None]
    total = gl.where(is_kept, total, 0.0)
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [WARPS, 1], [1, 0])
    values = gl.convert_layout(gl.permute(total.to(y.dtype.element_ty), [1, 0]), WHOLE)
    m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, WHOLE))
    n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, WHOLE))
    out = y + m.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(out, values, mask=(m < end_m)[:, None] & (n < N)[None, :])


@gluon.jit
def _sum_of_parts(total, partials, counters, tile, part, SPLIT_K: gl.constexpr):
    """(True for the part that comes last, its sum over all parts in the order of K: the same bits every time)."""
    MMA: gl.constexpr = total.type.layout
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_M: gl.constexpr = total.shape[1]
    n, m = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    sums = partials + tile.to(gl.int64) * (SPLIT_K * BLOCK_N * BLOCK_M) + n[:, None] * BLOCK_M + m[None, :]
    gl.store(sums + part * (BLOCK_N * BLOCK_M), total)
    _barrier()  # all warps have stored before the count says so
    is_last = gl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        for i in range(SPLIT_K):
            total += gl.load(sums + i * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        gl.store(counters + tile, 0)
    return is_last, total


@gluon.jit
def _compute(
    scale,
    zero_point,
    global_scale,
    bias,
    row_scale,
    y,
    partials,
    counters,
    xs,
    qs,
    full,
    empty,
    tile,
    part,
    m0,
    n0,
    end_m,
    is_kept,
    first,
    end,
    N,
    K,
    scale_stride,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALING: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_GLOBAL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SPLIT_K: gl.constexpr,
    TAIL: gl.constexpr,
    DOT: gl.constexpr,
    MAGIC: gl.constexpr,
    PTX: gl.constexpr,
    SELECTORS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """One tile, by the warps that decode and multiply; `tile` counts those that are in parts, below 0 are others."""
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_N: gl.constexpr = qs.shape[1]
    BLOCK_K: gl.constexpr = xs.shape[2]
    GROUPS: gl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    CODES: gl.constexpr = xs.dtype == gl.int8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32 if CODES else 16])
    LAYOUT: gl.constexpr = _pair_layout(BLOCK_N, GROUPS, BLOCK_K // 8 // GROUPS, WARPS)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA) if CODES else _slices(LAYOUT, (5, 4, 3, 2, 1))
    row = gl.minimum(n0 + gl.arange(0, BLOCK_N, ROW), N - 1)
    scale_rows = row * 0 if SCALE_ROWS == 0 else row // SCALE_ROWS * scale_stride
    if CODES:
        total = _multiply_codes(
            *(scale, scale_rows, xs, qs, full, empty, first, end, GROUP, SCALE, SCALING, STAGES, MMA, WARPS)
        )
    else:
        total = _multiply(
            *(scale, zero_point, scale_rows, xs, qs, full, empty, first, end, K, BLOCK_K, GROUP, BITS, SCALE),
            *(SCALING, HAS_ZERO, DOT, MAGIC, PTX, SELECTORS, STAGES, LAYOUT, MMA),
        )
    is_last = True
    if TAIL:
        is_last = tile < 0
        if tile >= 0:
            is_last, total = _sum_of_parts(total, partials, counters, tile, part, SPLIT_K)
    elif SPLIT_K > 1:
        is_last, total = _sum_of_parts(total, partials, counters, tile, part, SPLIT_K)
    if is_last:
        _store(
            *(total, scale, scale_rows, global_scale, bias, row_scale, y, m0, n0, end_m, is_kept, N, SCALE),
            *(SCALING, HAS_GLOBAL, HAS_BIAS, HAS_ROW_SCALE, WARPS),
        )


@gluon.jit(do_not_specialize=["M", "tiles_m", "steps", "whole"])
def _hopper_mm_kernel(
    y,
    scale,
    x_tiles,
    q_tiles,
    zero_point,
    global_scale,
    bias,
    row_scale,
    offsets,
    partials,
    counters,
    M,
    N,
    K,
    tiles_m,
    scale_stride,
    scale_matrix,
    steps,
    whole,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    PADDED: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALING: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_GLOBAL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SPLIT_K: gl.constexpr,
    TAIL: gl.constexpr,
    DOT: gl.constexpr,
    MAGIC: gl.constexpr,
    PTX: gl.constexpr,
    SELECTORS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """y [M, N] = x [M, K] @ weight [N, K].T; program (tile, part of K).

    TAIL: the first `whole` programs have a tile each, the others a part of one, in the order of parts.

    EXPERTS > 0: of weights [EXPERTS, N, K], those of the expert whose rows end at `offsets` [EXPERTS]; then zeros.
    """
    tile, part = gl.program_id(0), gl.program_id(1)
    split_tile = tile
    first = part * steps
    end = gl.minimum(first + steps, gl.cdiv(K, BLOCK_K))
    if TAIL:
        split_tile = tile - whole
        split_tiles = (gl.num_programs(0) - whole) // SPLIT_K
        first, end = 0, gl.cdiv(K, BLOCK_K)
        if split_tile >= 0:
            part = split_tile // split_tiles
            split_tile = split_tile % split_tiles
            tile = whole + split_tile
            first = part * steps
            end = gl.minimum(first + steps, end)
    tile_m, tile_n = _tile_at(tile, tiles_m, gl.cdiv(N, BLOCK_N))
    m0, end_m, n0 = tile_m * BLOCK_M, M, tile_n * BLOCK_N
    q0, is_kept = n0, True
    if EXPERTS > 0:
        expert, m0, end_m = _rows_of_tile(offsets, tile_m, M, BLOCK_M, EXPERTS, PADDED, WARPS)
        is_kept = expert < EXPERTS
        end = gl.where(is_kept, end, first)
        expert = gl.minimum(expert, EXPERTS - 1)
        q0 += expert * N
        scale += expert.to(gl.int64) * scale_matrix
        if HAS_ZERO:
            zero_point += expert.to(gl.int64) * scale_matrix
        if HAS_GLOBAL:
            global_scale += expert
        if HAS_BIAS:
            bias += expert * N
    xs = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BLOCK_M, BLOCK_K], x_tiles.layout)
    qs = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, q_tiles.block_shape[1]], q_tiles.layout)
    full, empty = _ring(STAGES)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute, (
                scale, zero_point, global_scale, bias, row_scale, y, partials, counters, xs, qs, full, empty,
                split_tile, part, m0, n0, end_m, is_kept, first, end, N, K, scale_stride, GROUP, BITS, SCALE,
                SCALE_ROWS, SCALING, HAS_ZERO, HAS_GLOBAL, HAS_BIAS, HAS_ROW_SCALE, SPLIT_K, TAIL, DOT, MAGIC,
                PTX, SELECTORS, STAGES, WARPS,
            )),
            (_copy, (x_tiles, q_tiles, xs, qs, full, empty, m0, q0, first, end, BLOCK_K, STAGES)),
        ],
        [1],
        [24],
    )
    # fmt: on
