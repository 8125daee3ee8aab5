"""Codes of 4 bits times int8 codes of tokens, in Gluon: a sum of integers for each group of a row.

A thread of wgmma's left operand holds columns 4t to 4t + 3 of a chunk of 16 (https://docs.nvidia.com/cuda/parallel-
thread-execution, "Register Fragments for wgmma.mma_async.m64nNk32"). So it reads the 32-bit word that holds its four
codes, picks their two bytes by a selector of `prmt`, and puts each into the upper half of a byte: 16 times its value,
which four instructions make of four codes. To decode four codes to 16 bits takes eight to ten (`pairs`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hf_quant.kernels.gpu.decode import AND_XOR, SELECT, scale_in
from hf_quant.kernels.gpu.hopper.ring import _next


_scale_in = gluon.jit(scale_in.fn)
UNIT = gl.constexpr(1 / 16)  # of what is multiplied
_PTX = gl.constexpr(
    "{ .reg .b32 s, u; mov.b32 s, 0; prmt.b32 u, $1, s, $5; shl.b32 s, u, 4; "
    f"lop3.b32 u, 0x00FF00FF, s, u, 0x{SELECT:X}; lop3.b32 $0, u, 0xF0F0F0F0, 0x80808080, 0x{AND_XOR:X}; }}"
)


@gluon.constexpr_function
def _quad_layout(BLOCK_N, CHUNKS, WARPS):
    """The place of code [row, chunk of 16, t // 2, t % 2, b] in wgmma's left operand: column 4t + b of a chunk."""

    def unit(axis, size):
        return [size if i == axis else 0 for i in range(5)]

    registers = [unit(4, 1), unit(4, 2)] + [unit(1, 1 << i) for i in range(CHUNKS.bit_length() - 1)] + [unit(0, 8)]
    rows = 16 * WARPS
    while rows < BLOCK_N:
        registers.append(unit(0, rows))
        rows *= 2
    lanes = [unit(3, 1), unit(2, 1), unit(0, 1), unit(0, 2), unit(0, 4)]
    warps = [unit(0, 16 << i) for i in range(WARPS.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, CHUNKS, 2, 2, 4])


@gluon.jit
def _decode(codes, MMA: gl.constexpr, LAYOUT: gl.constexpr):
    """Codes of a step in shared memory [BLOCK_N, words] -> 16 times their values as wgmma's left operand."""
    BLOCK_N: gl.constexpr = LAYOUT.shape[0]
    CHUNKS: gl.constexpr = LAYOUT.shape[1]
    like = gl.full(LAYOUT.shape, 0, gl.int32, LAYOUT)
    PAIRS: gl.constexpr = gl.SliceLayout(4, LAYOUT)
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))) * 0x2222 + 0x1100
    for dim in gl.static_range(3):
        half = gl.expand_dims(half, dim)
    half, _ = gl.broadcast(gl.expand_dims(half, 4), like)
    words = codes.reshape([BLOCK_N, CHUNKS, 2]).load(gl.SliceLayout(3, PAIRS))
    words, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(words, 3), 4), like)
    values = gl.inline_asm_elementwise(_PTX, "=r,r,r,r,r,r,r,r,r", [words, half], dtype=gl.int8, is_pure=True, pack=4)
    values = gl.reshape(values, [BLOCK_N, CHUNKS * 16])
    return gl.convert_layout(values, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def _factor(scale, scale_rows, step, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, SCALE: gl.constexpr):
    """The factor of the sums of a step [BLOCK_N], which is inside of a group."""
    return _scale_in(gl.load(scale + scale_rows + step * BLOCK_K // GROUP), SCALE, gl.float32) * UNIT


@gluon.jit
def _multiply_codes(
    scale,
    scale_rows,
    xs,
    qs,
    full,
    empty,
    first,
    end,
    GROUP: gl.constexpr,
    SCALE: gl.constexpr,
    SCALING: gl.constexpr,
    STAGES: gl.constexpr,
    MMA: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The sum of the steps from `first` to `end`, fp32 [BLOCK_N, BLOCK_M].

    Each turn of the loop takes two steps: the codes of the second are decoded while the product of the first runs, and
    the sums of the first are scaled while that of the second does. SCALING "": scales are left to the end.
    """
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_N: gl.constexpr = qs.shape[1]
    BLOCK_K: gl.constexpr = xs.shape[2]
    LAYOUT: gl.constexpr = _quad_layout(BLOCK_N, BLOCK_K // 16, WARPS)
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.int32, MMA)
    f0 = gl.full([BLOCK_N], UNIT, gl.float32, gl.SliceLayout(1, MMA))
    f1 = f0
    slot, phase = 0, 0
    for step in range(first, end - 1, 2):
        mbarrier.wait(full.index(slot), phase)
        codes = _decode(qs.index(slot), MMA, LAYOUT)
        s0 = hopper.warpgroup_mma(codes, xs.index(slot).permute([1, 0]), nothing, use_acc=False, is_async=True)
        if SCALING != "":
            f0 = _factor(scale, scale_rows, step, BLOCK_K, GROUP, SCALE)
            f1 = _factor(scale, scale_rows, step + 1, BLOCK_K, GROUP, SCALE)
        before = slot
        slot, phase = _next(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
        codes = _decode(qs.index(slot), MMA, LAYOUT)
        s1 = hopper.warpgroup_mma(codes, xs.index(slot).permute([1, 0]), nothing, use_acc=False, is_async=True)
        s0 = hopper.warpgroup_mma_wait(1, deps=[s0])
        mbarrier.arrive(empty.index(before))
        total += s0.to(gl.float32) * f0[:, None]
        s1 = hopper.warpgroup_mma_wait(0, deps=[s1])
        mbarrier.arrive(empty.index(slot))
        total += s1.to(gl.float32) * f1[:, None]
        slot, phase = _next(slot, phase, STAGES)
    if (end - first) % 2 == 1:
        mbarrier.wait(full.index(slot), phase)
        codes = _decode(qs.index(slot), MMA, LAYOUT)
        s0 = hopper.warpgroup_mma(codes, xs.index(slot).permute([1, 0]), nothing, use_acc=False, is_async=True)
        if SCALING != "":
            f0 = _factor(scale, scale_rows, end - 1, BLOCK_K, GROUP, SCALE)
        s0 = hopper.warpgroup_mma_wait(0, deps=[s0])
        total += s0.to(gl.float32) * f0[:, None]
    return total
