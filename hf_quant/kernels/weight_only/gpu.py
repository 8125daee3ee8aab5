"""Weight-only products on a GPU: the weight is decoded in registers, or dequantized once for the vendor's GEMM.

Branches, by M (tokens):
- decode, M <= 64: bound by the bytes of the codes. The weight is the left operand, so few tokens cost little; K is
  split over blocks until they fill the multiprocessors twice, and the last block of a tile adds the parts in order.
- crossover, M to 256 (sm90: 128; sm100: 1024): a block decodes its weights once for 64 to 256 tokens.
- prefill: one pass writes the weight in 16 bit (2.5 bytes a weight of traffic), then the vendor's GEMM: its cost does
  not grow with M, the decoding of every tile of tokens does.
- on Hopper (sm90), from 17 tokens on (codes of 8 bits: 33): the kernel of `gpu.hopper`, at any M, which writes no
  weight in 16 bit. The others serve there what it cannot: codes in two planes, rows off 16 bytes, odd groups.

Measured on an H200 with Triton 3.6 (docs/gpu.md), int4 in groups of 128, 28672 x 4096: M = 1, 23.5 us, 2.6 TB/s of
the 4.3 that a copy moves and 2.4 times as fast as bf16; 16, 29.8 us. Without the kernel of `gpu.hopper` 32 tokens take
37.8 us, 64 50, 128 96 (bf16: 66), 256 170 by one pass and the GEMM (bf16: 88).

Why decoding on sm90 is slower than its bytes (machine code, and times of other tiles):
- With a weight that is decoded in registers, or an x that is split there, Triton waits for each wgmma, four times a
  step of int4. Up to 32 tokens mma.sync is faster (`batch_of`), and there x is read as `tile_product` says.
- At M = 1 neither bytes nor issue slots decide (31 % of them), but how long a step of a few KB takes: two warps on 32
  rows of 128 bytes, 23.3 us; four on 64 rows of 64 bytes, 24.4; four on 128 rows, 28.8; more stages or blocks lose.

Tried and lost there: equal stripes of work for two programs a multiprocessor (stream-K, see
https://arxiv.org/abs/2301.03598), 1.0 to 1.3 times as long; programmatic dependent launches, .98 to 1.3; a step of 256
columns that is loaded as a whole and cut in registers, 1.5, as it lies in shared memory row by row; a batch of dots
(mma.sync) at 64 tokens, 1.5 times as long as wgmma.

Tried and lost, by the compiler's output: x gathered from memory at stride 8 instead of split in registers (16 LDG and
16 STS more a step); int32 elements (8 dots of K = 16: twice the waits for the matrix unit); shifting and masking in
Triton (see `gpu.decode`); group scales before the dot (64 HMUL2 more a step), kept where a step holds several groups
that are shorter than a dot, or where a second accumulator would spill (BLOCK_M 128).

Floating-point zero points (see `float_zeros`) are added to the weights by the fma that scales them. Not timed. Beside
the products as they are one would need the sums of x over groups, which no tile has.

Turing (sm75, fp16): `tl.dot` is FMAs of fp32 there (see `Target.has_dot`), so few tokens are served only: 4096 x 4096,
modelled on a T4 (40 multiprocessors at 1.59 GHz, .32 TB/s): int4, M = 8, 31 us of instructions beside 27 of bytes, M =
16 50 us, M = 32 100 us; dequantize + GEMM moves 4.5 bytes a weight, 236 us, whatever M is.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels.codes import CODES
from hf_quant.kernels.dispatch import Path, Problem, direct, implements
from hf_quant.kernels.gpu.compiled import Address, address_of
from hf_quant.kernels.gpu.counters import tile_counters
from hf_quant.kernels.gpu.decode import (
    ANY_GROUP,
    bits_of,
    codes_per_element,
    common_unit,
    decode_options,
    levels_tensor,
    row_alignment,
    row_elements,
    scale_kind,
    scale_rows,
    undecodable_reason,
)
from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.launch import (
    HAS_TRITON,
    IS_OLD_TRITON,
    Target,
    cached_plan,
    config_table,
    launch,
    target_of,
    tl,
    triton,
    unavailable_reason,
)
from hf_quant.kernels.gpu.ready import Run, make_ready
from hf_quant.kernels.hadamard.op import hadamard
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.few import FEW, few_mm
from hf_quant.kernels.weight_only.gpu_kernels import _weight_only_mm_kernel
from hf_quant.kernels.weight_only.op import check, dequantize, weight_only_mm, weight_only_mm_backward


# Several rows of one largest M: from large tiles to such as fill the multiprocessors when N is small.
# (largest M, BLOCK_M, BLOCK_N, largest BLOCK_K, num_warps, num_stages, largest split of K, scales before the dot)
CONFIGS = {
    "sm75": (  # steps of 128 columns spill (int8: 272 bytes)
        (8, 8, 64, 64, 4, 1, 16, 0),
        (32, 16, 64, 64, 4, 1, 8, 0),
    ),
    "sm80": (
        (8, 8, 64, 128, 4, 5, 16, 0),
        (16, 16, 64, 128, 4, 4, 16, 0),
        (32, 32, 64, 128, 4, 4, 8, 0),
        (64, 64, 64, 128, 4, 4, 8, 0),
        (256, 128, 128, 64, 8, 3, 2, 1),
    ),
    "sm89": (
        (8, 8, 64, 128, 4, 4, 16, 0),
        (16, 16, 64, 128, 4, 4, 16, 0),
        (32, 32, 64, 128, 4, 3, 8, 0),
        (64, 64, 64, 128, 4, 3, 8, 0),
        (256, 128, 128, 64, 8, 3, 2, 1),
    ),
    "sm90": (
        (8, 8, 32, 256, 2, 3, 16, 0),
        (16, 16, 64, 128, 2, 3, 16, 0),
        (32, 32, 128, 128, 4, 3, 16, 0),
        (128, 64, 128, 128, 4, 3, 8, 0),
    ),
    "sm100": (
        (8, 8, 128, 128, 4, 4, 16, 0),
        (16, 16, 128, 128, 4, 4, 16, 0),
        (32, 32, 128, 128, 4, 4, 8, 0),
        (64, 64, 128, 128, 8, 4, 8, 0),
        (128, 128, 64, 64, 4, 4, 4, 1),
        (1024, 256, 128, 64, 8, 3, 1, 1),
        (1024, 128, 64, 64, 8, 4, 4, 1),
    ),
    "gfx942": (
        (16, 16, 64, 128, 4, 2, 16, 0),
        (32, 32, 64, 128, 4, 2, 8, 0),
        (64, 64, 64, 128, 4, 2, 8, 0),
        (256, 128, 128, 64, 8, 2, 2, 1),
    ),
}
_MIN_PART = 512  # columns of a part of K: fewer would not fill the pipeline of loads
_MIN_DOT_K = 16
_MAX_PARTS = 4  # groups of a step
_SEGMENT = 256  # bytes of a row that a step reads at most
_WARP_MMA = ("sm80", "sm89")  # tables of GPUs whose matrix units read both operands from registers
# BLOCK_M * BLOCK_N * CODES: of larger tiles Triton 3.6 wants 528 columns of tensor memory on sm100, which has 512 (the
# launch raises OutOfResources); 3.9 takes 512.
_TENSOR_MEMORY = 2**15
_MMA_SYNC = 32  # tokens of the largest tile whose dots are mma.sync on sm90


class Tiling(NamedTuple):
    """Tile sizes of one product: the config's row, with the values that depend on the format and the group."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    max_split: int
    scale_mode: str  # see `tile_product`


def tiling(row: tuple[int, ...], codes: int, group_size: int, K: int, table: str, zeros: str = "") -> Tiling | str:
    """The tiling for groups of `group_size` read `codes` at a time, or why there is none; `table`: of the target."""
    _, block_m, block_n, block_k, num_warps, num_stages, max_split, before = row
    adds_zeros = zeros == "values"  # to the weights, see `tile_product`
    before = before or adds_zeros
    block_k = min(block_k, max(_SEGMENT // 2 * codes, 128))
    while block_k > 128 and K % block_k:  # the masks of a last step cost more than short steps
        block_k //= 2
    mode = "before" if adds_zeros else "row"
    if codes == 8 and block_n == 256:
        block_n = 128  # two sums and eight operands spill (sm90, int3 g128: 192 bytes)
    if block_k // codes < _MIN_DOT_K:  # 2 and 3 bits: a longer step, which leaves room for fewer tokens
        block_k, block_m, num_stages = _MIN_DOT_K * codes, min(block_m, 128), min(num_stages, 3)
    if group_size < K:
        inside = block_k  # the largest step inside of one group
        while group_size % inside:
            inside //= 2
        takes_parts = table == "sm90" and not before and _MAX_PARTS * inside >= block_k > inside == group_size
        if takes_parts and inside // codes >= _MIN_DOT_K:
            mode = "after"  # a part of the step for each group
        elif inside // codes >= _MIN_DOT_K and not (adds_zeros and inside == group_size):
            # Without wgmma a second accumulator spills beside x (8 to 72 bytes, int3 g128, int4 with zero points).
            before = before or (codes >= 4 and row[1:3] == (64, 64) and table in _WARP_MMA)
            block_k, mode = inside, "before" if before else "after"
            if codes == 8 and row[1:3] == (128, 128) and table in _WARP_MMA:
                block_m = 64  # as below: 472 to 3744 bytes of stack (int3 g128, M = 256)
        elif block_k % group_size == 0 and group_size % codes == 0:
            mode = "before"
            if codes == 8 and row[1:3] == (128, 128):
                block_m = 64  # without wgmma x is in registers, too: 3.5 KB of stack (int3 g32, M = 65, sm80)
        else:
            return f"groups of {group_size} do not fit a tile of {block_k}"
    while table == "sm100" and IS_OLD_TRITON and block_m * block_n * codes > _TENSOR_MEMORY:
        block_m //= 2
    return Tiling(block_m, block_n, block_k, num_warps, num_stages, max_split, mode)


def choose_row(table: Sequence[tuple[int, ...]], M: int, N: int, K: int, target: Target) -> tuple[int, ...] | None:
    """The row of the smallest largest M that holds M tokens; of several, the first that fills the multiprocessors.

    Rows but the last also need a K of whole steps: the masks of others would spill beside the large tiles.
    """
    rows = [row for row in table if M <= row[0]]
    rows = [row for row in rows if row[0] == rows[0][0]]
    for row in rows[:-1]:
        if triton.cdiv(M, row[1]) * triton.cdiv(N, row[2]) >= target.multiprocessors and K % row[3] == 0:
            return row
    return rows[-1] if rows else None


def supports_fused(problem: Problem) -> str | None:
    """The reason why the weight cannot be decoded inside of the product, None if it can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} activations: the vendor's GEMM computes their products"
    spec = CODES[problem.format]
    if (reason := undecodable_reason(spec)) is not None:
        return reason
    found = tiling(CONFIGS["sm90"][1], codes_per_element(spec, problem.K, 2), problem.group_size, problem.K, "sm90")
    return found if isinstance(found, str) else None


FUSED = (Path("Triton, decoded in registers", "M <= 128 to 1024, by GPU; 32 on sm75", supports_fused),)
HOPPER = (Path("Gluon, decoded beside the product", "sm90: 17 tokens (8 bits: 33) and more", hopper.supports),)
DENSE = (Path("dequantize + GEMM", "any other M", lambda problem: None),)


def split_of_k(tiles: int, K: int, max_split: int, target: Target, fill: int) -> int:
    """Parts of K (a power of two) so that the blocks fill the multiprocessors `fill` times."""
    split = 1
    while 2 * split <= max_split and tiles * split < fill * target.multiprocessors and 2 * split * _MIN_PART <= K:
        split *= 2
    return split


def batch_of(block_m: int, num_warps: int, target: Target) -> int:
    """The blocks of rows that the dots of a tile are cut into, see `tile_product`; 1: none."""
    if target.table != "sm90" or num_warps % 4 or block_m > _MMA_SYNC or (block_m == 8 and IS_OLD_TRITON):
        return 1
    return num_warps


class FusedPlan(NamedTuple):
    """The launch of the fused kernel for a product: all that follows from sizes and types."""

    tiling: Tiling
    codes: int  # per element
    tiles: int
    split: int
    steps: int  # of K, for one part
    options: dict
    wide: bool  # whether tiles read x so, where its rows allow it


@cached_plan
def fused_plan(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    format: str,
    group_size: int,
    alignment: int,
    scale_shape: tuple[int, ...],
    scale_dtype: torch.dtype,
    zeros: str,
    target: Target,
) -> FusedPlan | None:
    """The plan for M tokens, None where the dense path takes them. `alignment`: of the codes, see `row_alignment`."""
    if M * N * K == 0 or dtype not in (torch.float16, torch.bfloat16) or undecodable_reason(CODES[format]) is not None:
        return None
    if dtype == torch.bfloat16 and not target.has_dot:
        return None
    row = choose_row(config_table("weight_only_mm", CONFIGS, target), M, N, K, target)
    if row is None:
        return None
    codes = codes_per_element(CODES[format], K, alignment)
    found = tiling(row, codes, group_size, K, target.table, zeros)
    if isinstance(found, str):
        return None
    tiles = triton.cdiv(M, found.block_m) * triton.cdiv(N, found.block_n)
    steps = triton.cdiv(K, found.block_k)
    split = split_of_k(tiles, K, found.max_split, target, 1 if found.block_m > 16 else 2)
    options = {
        "BLOCK_M": found.block_m,
        "BLOCK_N": found.block_n,
        "BLOCK_K": found.block_k,
        "EVEN_K": K % found.block_k == 0,
        "GROUP": group_size if group_size < K else ANY_GROUP,
        "SCALE_MODE": found.scale_mode,
        "SCALE": scale_kind(scale_dtype),
        "SCALE_ROWS": scale_rows(scale_shape, N),
        "SPLIT_K": split,
        "DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float16,
        **decode_options(format, dtype, codes, use_ptx=target.is_nvidia),
        "num_warps": found.num_warps,
        "num_stages": found.num_stages,
    }
    if target.table == "sm90" and (found.block_m, codes) == (32, 2):
        if found.scale_mode == "after" or not options["EVEN_K"]:
            options["num_warps"] = 8  # 4 keep 72 bytes on the stack (fp8 in blocks), and 184 to 472
    if target.table == "sm90" and found.block_m == 64 and options["KIND"] == "table":
        options["num_warps"] = 8  # 4 keep 112 bytes on the stack (nf4 g64, Triton 3.9)
    if target.table in _WARP_MMA and (found.block_m, codes) == (64, 4) and zeros == "values":
        options["num_warps"] = 8  # 4 keep 8 bytes on the stack (sm80, int4 g32)
    if target.table in _WARP_MMA and found.block_m == 32 and not options["EVEN_K"]:
        options["maxnreg"] = 200  # left alone, ptxas takes 168 and keeps 8 bytes on the stack (sm80, int4 g128)
    if target.table == "sm100" and found.block_m == 64 and codes == 4 and found.scale_mode == "before":
        options["maxnreg"] = 128  # as ptxas takes by itself, then with 8 bytes on the stack (mxfp4)
    if target.table in ("sm75", "sm89") and found.block_m <= 8 and codes <= 4:
        options["maxnreg"] = 128  # left alone, ptxas takes 72 or 80 and keeps 8 to 24 bytes on the stack (int8, W4A8)
    options["BATCH"] = batch_of(found.block_m, options["num_warps"], target)
    wide = is_wide(found.block_m, codes, options["BATCH"], K, target)
    return FusedPlan(found, codes, tiles, split, triton.cdiv(steps, split), options, wide)


def is_wide(block_m: int, codes: int, batch: int, K: int, target: Target) -> bool:
    """True if a tile may read four columns of x at once: where its dots are mma.sync, as `tile_product` wants it."""
    return target.table == "sm90" and codes == 4 and batch == 1 and block_m <= _MMA_SYNC and K % 4 == 0


def reads_wide(x: Tensor, wide: bool) -> bool:
    """True if a tile that may does so: rows of 16-bit numbers at multiples of 8 bytes."""
    return wide and x.element_size() == 2 and not (x.stride(0) % 4 or x.data_ptr() % 8)


class Operands(NamedTuple):
    """A weight as the kernel takes it: tensors, or what stands for them."""

    codes: Tensor | Address
    scale: Tensor | Address
    zero_point: Tensor | Address | None
    global_scale: Tensor | Address | None
    levels: Tensor
    N: int
    q_stride: int
    scale_stride: int


def operands_of(w: Weight, plan: FusedPlan, dtype: torch.dtype) -> Operands:
    """The operands for a product in `dtype`."""
    codes, scale = bits_of(w.qdata), bits_of(w.scale)
    levels = levels_tensor(w.format, dtype, codes.device)
    strides = row_elements(w.qdata, plan.codes), w.scale.stride(0)
    return Operands(codes, scale, w.zero_point, w.global_scale, levels, w.N, *strides)


def fused_product(
    x: Tensor, w: Operands, bias: Tensor | None, row_scale: Tensor | None, dtype: torch.dtype, plan: FusedPlan
) -> Tensor:
    """x [M, K] (rows contiguous; codes of a quantized x with its row_scale [M, 1]) -> [M, N] in `dtype`."""
    bias, row_scale = (None if t is None else t.contiguous() for t in (bias, row_scale))
    M, K = x.shape
    N, device = w.N, x.device
    y = torch.empty(M, N, dtype=dtype, device=device)
    unit = common_unit(x.stride(0), w.q_stride)
    partials = counters = None
    if plan.split > 1:
        shape = (plan.tiles, plan.split, plan.tiling.block_n, plan.tiling.block_m)
        partials = torch.empty(shape, dtype=torch.float32, device=device)
        counters = tile_counters(plan.tiles, device)
    launch(
        _weight_only_mm_kernel,
        (plan.tiles, plan.split),
        x,
        w.codes,
        w.scale,
        w.zero_point,
        w.global_scale,
        bias,
        row_scale,
        w.levels,
        y,
        partials,
        counters,
        M,
        N,
        K,
        x.stride(0) // unit,
        w.q_stride // unit,
        w.scale_stride,
        plan.steps,
        ALIGN=unit,
        HAS_ZERO=w.zero_point is not None,
        HAS_GLOBAL=w.global_scale is not None,
        HAS_BIAS=bias is not None,
        HAS_ROW_SCALE=row_scale is not None,
        WIDE_X=reads_wide(x, plan.wide),
        **plan.options,
    )
    return y


def _ready(operands: Operands, plan: FusedPlan) -> Run:
    """The product with a weight, by its addresses."""
    kept = Operands(*map(address_of, operands[:4]), *operands[4:])
    return lambda x, bias: fused_product(x, kept, bias, None, x.dtype, plan)


def _hopper_mm(
    rows: Tensor, w: Weight, bias: Tensor | None, row_scale: Tensor | None, dtype: torch.dtype, *, lasts: bool
) -> Tensor | None:
    """`fused_mm` by the kernel for Hopper, None where it does not serve; lasts: rows and w are the caller's."""
    if not hopper.has_kernels():
        return None
    sizes = (rows.shape[0], w.N, w.K, dtype, w.format, w.group_size)
    scales = (tuple(w.scale.shape), w.scale.dtype, w.zeros, target_of(rows.device))
    plan = hopper.plan(*sizes, *scales, codes=True) if rows.dtype == torch.int8 else None
    plan = plan or hopper.plan(*sizes, *scales)
    if plan is None:
        return None
    rows = rows if plan.codes else rows.to(dtype)
    if not hopper.can_run(rows, w.qdata):
        return None
    codes, parts = w.qdata.view(torch.int32), (bits_of(w.scale), w.zero_point, w.global_scale)
    stride = codes.stride(0)

    def weights(codes: Tensor | Address, parts: Iterable[Tensor | Address | None]) -> hopper.Weights:
        tiles = hopper.tiles_of_codes(codes, w.N, stride, plan)
        return hopper.Weights(tiles, *parts, w.N, w.scale.stride(0))

    if lasts and row_scale is None:
        make_ready(rows, w, lambda: _hopper_ready(weights(Address(codes), map(address_of, parts)), plan))
    bias, row_scale = (None if t is None else t.contiguous() for t in (bias, row_scale))
    return hopper.product(rows, weights(codes, parts), bias, row_scale, None, dtype, plan)


def _hopper_ready(w: hopper.Weights, plan: hopper.Plan) -> Run:
    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        x = x if x.data_ptr() % 16 == 0 else x.clone()
        return hopper.product(x, w, None if bias is None else bias.contiguous(), None, None, x.dtype, plan)

    return run


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K] with contiguous rows; copied only if its strides force it."""
    x = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def fused_mm(
    x: Tensor, w: Weight, bias: Tensor | None, row_scale: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor | None:
    """x [..., K] @ dequant(w).T [* row_scale] + bias in `dtype`, None where the fused kernel does not serve.

    With a row_scale [..., 1], x are codes: int8 or float8_e4m3fn, which 16-bit floats hold exactly.
    """
    if unavailable_reason(x.device) is not None:
        return None
    rows, target = as_rows(x), target_of(x.device)
    given, w = w, w.with_plain_rows()
    lasts = w is given and w.input_diagonal is None
    if row_scale is None and rows.dtype == dtype and (y := few_mm(rows, w, bias, lasts=lasts)) is not None:
        return y.view(*x.shape[:-1], w.N)
    if (y := _hopper_mm(rows, w, bias, row_scale, dtype, lasts=lasts)) is not None:
        return y.view(*x.shape[:-1], w.N)
    plan = fused_plan(
        *(rows.shape[0], w.N, w.K, dtype, w.format, w.group_size),
        *(row_alignment(w.qdata), tuple(w.scale.shape), w.scale.dtype, w.zeros, target),
    )
    if plan is None:
        return None
    if rows.dtype == torch.float8_e4m3fn and not target.has_fp8_dot:
        rows = rows.to(dtype)  # these GPUs cannot read it
    operands = operands_of(w, plan, dtype)
    if row_scale is None and lasts:
        make_ready(rows, w, lambda: _ready(operands, plan))
    y = fused_product(rows, operands, bias, row_scale, dtype, plan)
    return y.view(*x.shape[:-1], y.shape[1])


_hadamard = direct(hadamard)


@implements(weight_only_mm, "XPU", FUSED + DENSE)
@implements(weight_only_mm, "CUDA", FEW + FUSED + HOPPER + DENSE)
@takes_weight(check, transforms=True)
def weight_only_mm_gpu(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """Compute `weight_only_mm_reference`; weights are rounded to x's dtype if they are scaled before the product.

    So is a transformed x.
    """
    if w.input_diagonal is not None:
        x = _hadamard(x, w.input_diagonal, block_size=w.input_diagonal.shape[1])
    y = fused_mm(x, w, bias, dtype=x.dtype)
    if y is not None:
        return y
    return F.linear(x, dequantized(w, x.dtype), None if bias is None else bias.to(x.dtype))


def dequantized(w: Weight, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, by the op: in a graph of torch.compile it stays one."""
    return dequantize(*w.packed, format=w.format, group_size=w.group_size, K=w.K, dtype=dtype)


@implements(weight_only_mm_backward, "XPU", DENSE)
@implements(weight_only_mm_backward, "CUDA", DENSE)
@takes_weight(K_is_option=True)
def weight_only_mm_backward_gpu(grad: Tensor, w: Weight) -> Tensor:
    """Compute `weight_only_mm_backward_reference`; the weight is rounded to grad's dtype before the product."""
    return grad @ dequantized(w, grad.dtype)
