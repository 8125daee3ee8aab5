"""The Gluon kernel of 8-bit attention on Hopper, for heads whose scores are bounded; attention.py says when it runs.

Four warps copy tiles of keys and values into two rings in shared memory. Two groups of four take 64 queries each. A
group makes the weights of one step while its own product of the weights before with their values runs, and while the
other group multiplies: the structure of FlashAttention-3, https://arxiv.org/abs/2407.08608. As scores are bounded (see
`int8_attention.gpu`), there is no maximum, and the sums stay in the matrix unit's registers untouched.

An integer score becomes a float without a conversion, as those take the unit that makes the exponentials: the bits of
1.5 * 2**23 are added to it, which gives that float plus the score for magnitudes below 2**22 (of 128 codes: 2**21).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hf_quant.kernels.gpu.hopper.ring import _barriers, _load_tile, _next


_MAGIC = gl.constexpr(12582912.0)  # 1.5 * 2**23, and its bits
_MAGIC_BITS = gl.constexpr(0x4B400000)
GROUP_ROWS = gl.constexpr(64)  # queries of four warps


@gluon.jit
def _copy(
    q_tiles,
    k_tiles,
    v_tiles,
    qs,
    ks,
    vs,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    q_row,
    k_row,
    batch,
    kv_head,
    steps,
    STAGES: gl.constexpr,
):
    """The warps that copy: the queries, then keys and values, of the last block of keys first."""
    BLOCK_N: gl.constexpr = ks.shape[1]
    BLOCK_D: gl.constexpr = ks.shape[2]
    if steps > 0:
        mbarrier.expect(q_full.index(0), 2 * GROUP_ROWS * BLOCK_D)
        _load_tile(q_tiles, [q_row, 0], q_full.index(0), qs.index(0))
        _load_tile(q_tiles, [q_row + GROUP_ROWS, 0], q_full.index(0), qs.index(1))
    slot, phase = 0, 1
    at = (steps - 1) * BLOCK_N
    for step in range(steps):
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), BLOCK_N * BLOCK_D)
        _load_tile(k_tiles, [k_row + at, 0], k_full.index(slot), ks.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), 2 * BLOCK_N * BLOCK_D)
        _load_tile(v_tiles, [batch, kv_head, at, 0], v_full.index(slot), vs.index(slot))
        slot, phase = _next(slot, phase, STAGES)
        at = step * BLOCK_N


@gluon.jit
def _weights(scores, slope, reference):
    """2 ** (slope * scores - reference) of integer scores [M, N], slope and reference [M]."""
    raised = (scores + _MAGIC_BITS).to(gl.float32, bitcast=True)
    return gl.exp2(gl.fma(raised, slope[:, None], (gl.fma(slope, -_MAGIC, -reference))[:, None]))


@gluon.jit
def _attend(
    qs,
    ks,
    vs,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    q_stats,
    k_scale,
    key_norm,
    y,
    head_row,
    all_rows,
    row,
    S,
    T,
    y_token,
    steps,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One group of warps: 64 of the queries from `row` on, of a head whose first row of all is `head_row`.

    It has nothing to do where another kernel serves the head, with no steps.
    """
    BLOCK_N: gl.constexpr = ks.shape[1]
    BLOCK_D: gl.constexpr = ks.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row += GROUP * GROUP_ROWS
    if steps > 0:
        rows = row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SCORES))
        stats = q_stats + head_row + gl.minimum(rows, S - 1)
        factor = gl.load(stats)
        reference = gl.load(stats + all_rows) * key_norm - 80.0  # see `_int8_attention_kernel`
        q = qs.index(GROUP)
        total = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, SUMS)
        # The last keys, of which some rows may see a part.
        at = (steps - 1) * BLOCK_N
        slope = factor * gl.load(k_scale + at // KEYS)
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(k_full.index(0), 0)
        scores = gl.zeros([GROUP_ROWS, BLOCK_N], gl.int32, SCORES)
        scores = hopper.warpgroup_mma(q, ks.index(0).permute([1, 0]), scores, use_acc=False, is_async=True)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(0))
        key = at + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        seen = (key < T)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= rows[:, None])
        weights = gl.where(seen, _weights(scores, slope, reference), 0.0)
        weight = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(gl.bfloat16), LEFT, assert_trivial=True)
        before, before_phase = 0, 0
        slot, phase = _next(0, 0, STAGES)
        mbarrier.wait(k_full.index(slot), phase, pred=steps > 1)
        for step in range(1, steps):
            slope = factor * gl.load(k_scale + (step - 1) * BLOCK_N // KEYS)
            scores = hopper.warpgroup_mma(q, ks.index(slot).permute([1, 0]), scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), before_phase)
            values = vs.index(before).reshape([BLOCK_N, BLOCK_D])
            total = hopper.warpgroup_mma(p, values, total, is_async=True)
            scores = hopper.warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(slot))
            weights = _weights(scores, slope, reference)
            weight += gl.sum(weights, 1)
            new = gl.convert_layout(weights.to(gl.bfloat16), LEFT, assert_trivial=True)
            last = before
            before, before_phase = slot, phase
            slot, phase = _next(slot, phase, STAGES)
            # This wait is a loop, behind which ptxas does not move the weights, as it does behind the next one.
            mbarrier.wait(k_full.index(slot), phase, pred=step + 1 < steps)
            total, p = hopper.warpgroup_mma_wait(0, deps=[total, p])
            mbarrier.arrive(v_empty.index(last))
            p = new
        mbarrier.wait(v_full.index(before), before_phase)
        total = hopper.warpgroup_mma(p, vs.index(before).reshape([BLOCK_N, BLOCK_D]), total, is_async=True)
        total, p = hopper.warpgroup_mma_wait(0, deps=[total, p])
        total *= gl.convert_layout(1.0 / weight, gl.SliceLayout(1, SUMS))[:, None]
        WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
        result = gl.convert_layout(total.to(y.dtype.element_ty), WHOLE)
        m = row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, WHOLE))
        d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WHOLE))
        gl.store(y + m.to(gl.int64)[:, None] * y_token + d[None, :], result, mask=(m < S)[:, None] & (d < D)[None, :])


@gluon.jit(do_not_specialize=["S", "T", "blocks"])
def _hopper_attention_kernel(
    y,
    q_tiles,
    k_tiles,
    v_tiles,
    q_stats,
    k_scale,
    norms,
    S,
    T,
    HEADS,
    KV_HEADS,
    kv_heads,
    blocks,
    y_batch,
    y_head,
    y_token,
    D: gl.constexpr,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    LIMIT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Program (block of 128 queries, head), as `_int8_attention_kernel`; heads beyond LIMIT are left to that."""
    BLOCK_N: gl.constexpr = k_tiles.block_shape[0]
    BLOCK_D: gl.constexpr = k_tiles.block_shape[1]
    block, head, heads = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    batch, kv_head = head // HEADS, head % HEADS // (HEADS // KV_HEADS)
    kv_row = batch * KV_HEADS + kv_head
    key_norm = gl.load(norms + kv_heads + kv_row).to(gl.float32, bitcast=True)
    is_bounded = gl.load(norms + kv_row).to(gl.float32, bitcast=True) * key_norm <= LIMIT
    gl.static_assert(BLOCK_N == 2 * GROUP_ROWS, "only the last keys of a program are hidden from some of its queries")
    if CAUSAL:
        block = gl.num_programs(0) - 1 - block
    row = block * (2 * GROUP_ROWS)
    end = gl.minimum(T, row + 2 * GROUP_ROWS) if CAUSAL else T
    steps = gl.where(is_bounded, gl.cdiv(end, BLOCK_N), 0)
    head_row = head.to(gl.int64) * S
    y += batch.to(gl.int64) * y_batch + (head % HEADS).to(gl.int64) * y_head
    k_scale += kv_row * blocks
    qs = gl.allocate_shared_memory(gl.int8, [2, GROUP_ROWS, BLOCK_D], q_tiles.layout)
    ks = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_D], k_tiles.layout)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_tiles.layout)
    q_full, k_full, v_full = _barriers(1, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    k_empty, v_empty = _barriers(STAGES, 2), _barriers(STAGES, 2)
    hopper.fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (
                qs, ks, vs, q_full, k_full, k_empty, v_full, v_empty, q_stats, k_scale, key_norm, y, head_row,
                heads * S, row, S, T, y_token, steps, 0, D, KEYS, CAUSAL, STAGES,
            )),
            (_attend, (
                qs, ks, vs, q_full, k_full, k_empty, v_full, v_empty, q_stats, k_scale, key_norm, y, head_row,
                heads * S, row, S, T, y_token, steps, 1, D, KEYS, CAUSAL, STAGES,
            )),
            (_copy, (
                q_tiles, k_tiles, v_tiles, qs, ks, vs, q_full, k_full, k_empty, v_full, v_empty, head * S + row,
                kv_row * (blocks * KEYS), batch, kv_head, steps, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
