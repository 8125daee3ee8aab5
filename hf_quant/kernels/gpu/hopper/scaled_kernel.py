"""The Gluon kernel of products of codes with codes on Hopper: some warps copy, the others multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hf_quant.kernels.gpu.hopper.ring import _load_tile, _next, _ring
from hf_quant.kernels.gpu.hopper.tiles import _rows_of_tile, _tile_at


@gluon.jit
def _place(
    offsets,
    tile,
    tiles_m,
    tiles_n,
    M,
    BLOCK_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    PADDED: gl.constexpr,
    WARPS: gl.constexpr,
):
    """(first token, end of its tokens, tile of rows of the weight, expert); expert EXPERTS behind the rows of all."""
    tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n)
    if EXPERTS > 0:
        expert, m0, end_m = _rows_of_tile(offsets, tile_m, M, BLOCK_M, EXPERTS, PADDED, WARPS)
    else:
        expert, m0, end_m = 0, tile_m * BLOCK_M, M
    return m0, end_m, tile_n, expert


@gluon.jit
def _copy(
    a_tiles,
    b_tiles,
    offsets,
    as_,
    bs,
    full,
    empty,
    tiles_m,
    tiles_n,
    steps,
    M,
    N,
    EXPERTS: gl.constexpr,
    PADDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warps that copy: the tiles of each step of all products of this block, as places in the ring come free."""
    BLOCK_M: gl.constexpr = as_.shape[1]
    BLOCK_N: gl.constexpr = bs.shape[1]
    BLOCK_K: gl.constexpr = as_.shape[2]
    slot, phase = 0, 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m0, _, tile_n, expert = _place(offsets, tile, tiles_m, tiles_n, M, BLOCK_M, EXPERTS, PADDED, 1)
        n0 = expert * N + tile_n * BLOCK_N
        if EXPERTS == 0 or expert < EXPERTS:
            for step in range(steps):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), (BLOCK_M + BLOCK_N) * BLOCK_K)
                _load_tile(a_tiles, [m0, step * BLOCK_K], full.index(slot), as_.index(slot))
                _load_tile(b_tiles, [n0, step * BLOCK_K], full.index(slot), bs.index(slot))
                slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _store(
    total,
    a_scale,
    b_scale,
    bias,
    y,
    m0,
    n0,
    M,
    N,
    SCALE_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Store sums [BLOCK_M, columns] times their scales in y, up to row M."""
    MMA: gl.constexpr = total.type.layout
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    m, n = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, MMA)), n0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
    value = total.to(gl.float32) * gl.load(a_scale + m, mask=m < M, other=0.0)[:, None]
    if SCALE_ROWS == 0:
        value *= gl.load(b_scale).to(gl.float32)
    else:
        value *= gl.load(b_scale + n // SCALE_ROWS, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if HAS_BIAS:
        value += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [WARPS, 1], [1, 0])
    value = gl.convert_layout(value.to(y.dtype.element_ty), WHOLE)
    m, n = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE)), n0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, WHOLE))
    out = y + m.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(out, value, mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit
def _clear(y, m0, n0, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """Store zeros in a tile of y."""
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [WARPS, 1], [1, 0])
    m, n = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, WHOLE)), n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, WHOLE))
    zeros = gl.zeros([BLOCK_M, BLOCK_N], y.dtype.element_ty, WHOLE)
    gl.store(y + m.to(gl.int64)[:, None] * N + n[None, :], zeros, mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit
def _sum(as_, bs, full, empty, slot, phase, steps, STAGES: gl.constexpr, MMA: gl.constexpr):
    """(sum of the next `steps` products, the place in the ring behind them, its phase)."""
    ACC: gl.constexpr = gl.int32 if as_.dtype == gl.int8 else gl.float32
    BLOCK_M: gl.constexpr = as_.shape[1]
    BLOCK_N: gl.constexpr = bs.shape[1]
    total = gl.zeros([BLOCK_M, BLOCK_N], ACC, MMA)
    before = slot + 0  # of the very value of `slot` Triton 3.6 does not see that the loop changes it
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        total = hopper.warpgroup_mma(as_.index(slot), bs.index(slot).permute([1, 0]), total, is_async=True)
        total = hopper.warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(empty.index(before), pred=step > 0)
        before = slot
        slot, phase = _next(slot, phase, STAGES)
    total = hopper.warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(empty.index(before))
    return total, slot, phase


@gluon.jit
def _compute(
    a_scale,
    b_scale,
    bias,
    offsets,
    y,
    as_,
    bs,
    full,
    empty,
    tiles_m,
    tiles_n,
    steps,
    chain_steps,
    M,
    N,
    EXPERTS: gl.constexpr,
    PADDED: gl.constexpr,
    UNIT: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The warps that multiply: a product runs until the next one is under way."""
    BLOCK_M: gl.constexpr = as_.shape[1]
    BLOCK_N: gl.constexpr = bs.shape[1]
    # Triton has no products of integers that are 256 wide.
    WIDTH: gl.constexpr = 128 if as_.dtype == gl.int8 else BLOCK_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 32])
    slot, phase = 0, 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m0, end_m, tile_n, expert = _place(offsets, tile, tiles_m, tiles_n, M, BLOCK_M, EXPERTS, PADDED, WARPS)
        n0 = tile_n * BLOCK_N
        if EXPERTS == 0 or expert < EXPERTS:
            if UNIT == 0:
                total, slot, phase = _sum(as_, bs, full, empty, slot, phase, steps, STAGES, MMA)
            else:
                chains = gl.zeros([BLOCK_M, BLOCK_N], gl.float16, MMA)
                for first in range(0, steps, chain_steps):
                    count = gl.minimum(chain_steps, steps - first)
                    chain, slot, phase = _sum(as_, bs, full, empty, slot, phase, count, STAGES, MMA)
                    chains = (chains.to(gl.float32) + chain * UNIT).to(gl.float16)
                total = chains.to(gl.float32) * (1 / UNIT)
            left, right = gl.split(gl.permute(gl.reshape(total, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1]))
            own_scale = b_scale + expert * (1 if SCALE_ROWS == 0 else gl.cdiv(N, SCALE_ROWS))
            for half in gl.static_range(2):
                _store(
                    right if half else left,
                    a_scale,
                    own_scale,
                    bias + expert * N if HAS_BIAS else None,
                    y,
                    m0,
                    n0 + half * (BLOCK_N // 2),
                    end_m,
                    N,
                    SCALE_ROWS,
                    HAS_BIAS,
                    WARPS,
                )
        else:
            _clear(y, m0, n0, M, N, BLOCK_M, BLOCK_N, WARPS)


@gluon.jit(do_not_specialize=["M", "tiles_m", "chain_steps"])
def _hopper_scaled_mm_kernel(
    a_scale,
    a_tiles,
    b_tiles,
    b_scale,
    bias,
    offsets,
    y,
    M,
    N,
    K,
    tiles_m,
    chain_steps,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    PADDED: gl.constexpr,
    UNIT: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Tiles program_id, program_id + programs, ... of y [M, N] = (a [M, K] @ b [N, K].T) * a_scale * b_scale + bias.

    EXPERTS > 0: b [EXPERTS, N, K], of which each expert's rows, which end at `offsets` [EXPERTS], meet their own; rows
    behind them are zeros. UNIT other than 0: sums over chain_steps K steps are added up in fp16, in units of 1 / UNIT.
    """
    as_ = gl.allocate_shared_memory(a_tiles.dtype, [STAGES, BLOCK_M, BLOCK_K], a_tiles.layout)
    bs = gl.allocate_shared_memory(b_tiles.dtype, [STAGES, BLOCK_N, BLOCK_K], b_tiles.layout)
    full, empty = _ring(STAGES)
    tiles_n, steps = gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute, (
                a_scale, b_scale, bias, offsets, y, as_, bs, full, empty, tiles_m, tiles_n, steps, chain_steps, M, N,
                EXPERTS, PADDED, UNIT, SCALE_ROWS, HAS_BIAS, STAGES, WARPS,
            )),
            (_copy, (
                a_tiles, b_tiles, offsets, as_, bs, full, empty, tiles_m, tiles_n, steps, M, N, EXPERTS, PADDED,
                STAGES,
            )),
        ],
        [1],
        [24 if PADDED <= 128 else 40],
    )
    # fmt: on
