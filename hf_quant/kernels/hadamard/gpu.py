"""Hadamard transforms in Triton: two products with sign matrices for a tile of a row, on the matrix units.

A row of n = A * B values is a matrix [A, B]: y = H_A @ x @ H_B. The signs are exact in 16 bits, so the first product
loses nothing; its sums are the left operand of the second in the registers that hold them, as 8 + 8 bits of mantissa
in two bf16 products. So the row passes through shared memory once, in 16 bits, where butterflies in lanes and warps
would take it through there some four times in fp32. Larger n: tiles of the same program, and butterflies between
them. The sign matrices are made by each program, which then loops over rows (a table in memory would have to exist
before a CUDA graph is captured): about 400 instructions a thread, as much as one row of 4096 takes.

Traffic: x in, y out: 4 bytes a value, 3 with quantization. Modelled on an H200 (4.3 TB/s; 20.7 instructions a value
take as long as 3 bytes, 27.5 as long as 4; 790 TFLOP/s), M = 4608: n = 4096 17.6 us, quantized 13.2; n = 14336 61 and
46 us. Loop over rows, machine code for sm90, instructions a value with int8 codes (bf16 results) and operations on
the matrix units: n = 128 7.9 (5.8), 256 ops; n = 4096 11.1 (7.5), 384 ops = 9.2 us; n = 14336 12.7 (10.6), 439 ops =
37 us (585). Memory bounds them all; at n = 14336 only if products and memory overlap, hence two programs a
multiprocessor. A diagonal adds 1: it stays in registers, in 16 bits. No spills under Triton 3.6 and 3.9 for sm80 to
sm120 and gfx942; 16-byte copies into shared memory (LDGSTS), HGMMA on sm90.

What was tried and lost: H_B first, then H_A: its operand goes through shared memory, 9.5 instead of 7.5. A split of
the sums by rounding: the conversions run one by one (F2F). Tiles of 64 columns on sm80: ptxas keeps H_B in 64
registers and spills. fp32 input in three bf16 parts: 255 registers and spills on sm80, for what only rotates weights
once.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import ROW_FORMATS, row_max
from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.gpu.launch import (
    Target,
    cached_plan,
    config_table,
    launch,
    target_of,
    tl,
    triton,
    unavailable_reason,
)
from hf_quant.kernels.gpu.row_codes import code_options, encode, larger_magnitude, scale_of_row
from hf_quant.kernels.hadamard import op
from hf_quant.kernels.rowwise.gpu import quantize_rowwise_gpu
from hf_quant.kernels.sign_matrices import PALEY_FIELDS, mix, odd_factor, squares, transform


_LARGEST = 16384  # values of a row that a program holds: 64 for each of 256 threads
# (for rows of up to so many values; tile rows, tile columns, warps, stages of the loop over rows, programs of a
# multiprocessor). Where the matrix units take sign matrices from registers, narrow ones leave more of them.
_SM80 = ((8192, 64, 32, 4, 3, 4), (_LARGEST, 128, 32, 8, 3, 1))
_SM90 = ((4096, 64, 64, 4, 3, 4), (8192, 64, 64, 4, 3, 3))
_SM100 = ((4096, 64, 64, 4, 3, 4), (_LARGEST, 128, 64, 8, 3, 2))
_GFX942 = ((4096, 64, 64, 4, 1, 2), (_LARGEST, 128, 64, 8, 1, 1))
_OTHERS = {"sm80": _SM80, "sm89": _SM80, "sm100": _SM100, "gfx942": _GFX942}
CONFIGS = {
    "hadamard": _OTHERS | {"sm90": (*_SM90, (_LARGEST, 128, 64, 8, 3, 1))},
    # Two programs of 250 registers a thread: one multiplies while the other quantizes. Not for 16-bit results, which
    # take more registers to write, and leave more time.
    "hadamard_quantize_rowwise": _OTHERS | {"sm90": (*_SM90, (_LARGEST, 64, 64, 4, 2, 2))},
}


class Tiling(NamedTuple):
    """Tiles [T, B] of rows of K values that are transformed in blocks of n: TILES for each row, or ROWS in one tile.

    A tile row ("segment") is B neighbouring values. With right = I (x) H_INNER and left = I (x) H_A, padded to A_PAD,
    left @ tile @ right transforms blocks of A segments; butterflies between SPAN tiles do the rest.
    """

    B: int
    INNER: int
    A: int
    A_PAD: int
    SPAN: int
    T: int
    TILES: int
    ROWS: int


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tiling(K: int, n: int, tile_rows: int, columns: int) -> Tiling:
    """The tiling of rows of K values that are transformed in blocks of n <= 16384."""
    m = odd_factor(n)
    if n <= 128:
        # A small block is not alone in its segment, which would be mostly padding.
        B, A, span = n, 1, 1
        while m == 1 and B < 64 and K % (2 * B) == 0:
            B *= 2
    else:
        B, span = min(columns, n // m), 1
        A = n // B
        while A > tile_rows:
            A, span = A // 2, span * 2
        assert A % m == 0, f"{tile_rows} tile rows do not hold the factor {m} of {n}"
    A_PAD = _next_power(A)
    needed = K // (A * span * B) * A_PAD * span
    rows = 1 if needed > tile_rows else tile_rows // _next_power(needed)
    return Tiling(B, min(n, B), A, A_PAD, span, tile_rows, -(-needed // tile_rows), rows)


@triton.jit
def _signs(
    SIZE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, MASK: tl.constexpr
):
    """fp32 [SIZE, SIZE]: the Hadamard matrix of N in each diagonal block of BLOCK, else 0; see `paley_matrix`."""
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    a, b = i % BLOCK, j % BLOCK
    TWOS: tl.constexpr = N // M
    parity = (a % TWOS) & (b % TWOS)
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    if M > 1:
        u, s, v, t = a // TWOS // 2, a // TWOS % 2, b // TWOS // 2, b // TWOS % 2
        e, f = tl.maximum(u, 1) - 1, tl.maximum(v, 1) - 1
        difference = (e // P - f // P + P) % P * P + (e % P - f % P + P) % P
        is_other = (u > 0) & (v > 0) & (((MASK >> (difference % 32)) & 1) == 0)
        parity ^= tl.where(u == v, s | t, (s & t) ^ is_other.to(tl.int32))
    inside = (i // BLOCK == j // BLOCK) & (a < N) & (b < N)
    return tl.where(inside, tl.where((parity & 1) == 1, -1.0, 1.0), 0.0)


@triton.jit
def _dot_right(y, right):
    """y @ right, y in fp32, of whose mantissa 16 bits count: its first 8, and the rest rounded to 8."""
    high = (y.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    z = tl.dot(high.to(tl.bfloat16), right)
    return tl.dot((y - high).to(tl.bfloat16), right, z)


@triton.jit
def _factors(
    diagonal,
    tile_row,
    c: tl.constexpr,
    column,
    X_TYPE: tl.constexpr,
    K,
    U: tl.constexpr,
    A: tl.constexpr,
    A_PAD: tl.constexpr,
    A_M: tl.constexpr,
    B: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """The entries of the diagonal for the values of tile c, in their type."""
    segment, inside = _segment(tile_row % U, c, U, A, A_PAD, A_M, SPAN)
    offset = segment * B + column
    mask = tl.full([1, 1], True, tl.int1) if EVEN_K else inside & (column < B) & (offset < K)
    return tl.load(diagonal + offset, mask=mask, other=0.0).to(X_TYPE)


@triton.jit
def _butterflies(tiles, COUNT: tl.constexpr, LOG_SPAN: tl.constexpr):
    """The unscaled transform across each 2**LOG_SPAN of the tiles."""
    for stage in tl.static_range(LOG_SPAN):
        mixed = ()
        for c in tl.static_range(COUNT):
            if (c >> stage) & 1:
                mixed = mixed + (tiles[c ^ (1 << stage)] - tiles[c],)
            else:
                mixed = mixed + (tiles[c] + tiles[c ^ (1 << stage)],)
        tiles = mixed
    return tiles


@triton.jit
def _segment(
    place,
    c: tl.constexpr,
    U: tl.constexpr,
    A: tl.constexpr,
    A_PAD: tl.constexpr,
    A_M: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Tile rows [U] of tile c -> (which segments of the row they hold [U, 1], whether they hold one)."""
    if SPAN == 1:
        place += c * U
        return (place // A_PAD * A + place % A_PAD)[:, None], (place % A_PAD < A)[:, None]
    else:
        RUN: tl.constexpr = A // A_M  # segments of a tile that follow each other in memory
        first = (c // SPAN * A_M + place // RUN) * SPAN + c % SPAN
        return (first * RUN + place % RUN)[:, None], (place < A)[:, None]


@triton.jit(do_not_specialize=["M"])
def _hadamard_kernel(
    x,
    diagonal,
    out,
    scales,
    M,
    K,
    x_stride,
    NORM: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    INNER: tl.constexpr,
    INNER_M: tl.constexpr,
    A: tl.constexpr,
    A_PAD: tl.constexpr,
    A_M: tl.constexpr,
    SPAN: tl.constexpr,
    LOG_SPAN: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
    FIELD: tl.constexpr,
    MASK: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    X_TYPE: tl.constexpr = x.dtype.element_ty
    right = _signs(B_PAD, B_PAD if INNER_M > 1 else INNER, INNER, INNER_M, FIELD, MASK)
    right = right.to(tl.bfloat16 if A > 1 else X_TYPE)
    if A > 1:
        left = _signs(T, A_PAD, A, A_M, FIELD, MASK).to(X_TYPE)
    tile_row = tl.arange(0, T)
    column = tl.arange(0, B_PAD)[None, :]
    U: tl.constexpr = T // ROWS
    factors = ()
    KEEPS: tl.constexpr = STAGES > 1 or TILES * T * B_PAD <= 8192
    if diagonal is not None and KEEPS:
        # Loaded before the loop: inside of it, stages of it in fp32 would fill the shared memory.
        for c in tl.static_range(TILES):
            factors = factors + (
                _factors(diagonal, tile_row, c, column, X_TYPE, K, U, A, A_PAD, A_M, B, SPAN, EVEN_K),
            )
    for unit in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        if ROWS == 1:
            row, in_m = unit, True
        else:
            row = (unit * ROWS + tile_row // U)[:, None]
            in_m = row < M
        x_row, out_row = x + tl.cast(row, tl.int64) * x_stride, out + tl.cast(row, tl.int64) * K
        tiles = ()
        for c in tl.static_range(TILES):
            segment, inside = _segment(tile_row % U, c, U, A, A_PAD, A_M, SPAN)
            offset = segment * B + column
            mask = in_m if EVEN_K else in_m & inside & (column < B) & (offset < K)
            v = tl.load(x_row + offset, mask=mask, other=0.0)
            if diagonal is not None and KEEPS:
                v *= factors[c]
            elif diagonal is not None:  # without stages (gfx942), long rows need the registers
                v *= _factors(diagonal, tile_row, c, column, X_TYPE, K, U, A, A_PAD, A_M, B, SPAN, EVEN_K)
            if A == 1:
                z = tl.dot(v, right)
            else:
                z = _dot_right(tl.dot(left, v), right)
            tiles = tiles + (z,)
        tiles = _butterflies(tiles, TILES, LOG_SPAN)
        factor = NORM
        if scales is not None:
            magnitudes = tl.zeros([T, B_PAD], tl.float32)
            for c in tl.static_range(TILES):
                magnitudes = larger_magnitude(magnitudes, tiles[c])
            # As integers they have the same order, NaN last.
            amax = tl.max(magnitudes.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
            scale = scale_of_row(tl.reshape(amax * NORM, (ROWS, U)), LIMIT, SMALLEST)
            each = unit * ROWS + tl.arange(0, ROWS)
            tl.store(scales + each, scale, mask=each < M)
            inverse = NORM * tl.div_rn(1.0, scale)
            factor = tl.reshape(tl.broadcast_to(inverse[:, None], (ROWS, U)), (T,))[:, None]
        for c in tl.static_range(TILES):
            z = tiles[c] * factor
            value = z.to(out.dtype.element_ty) if scales is None else encode(z, IS_FLOAT, CONVERTS)
            segment, inside = _segment(tile_row % U, c, U, A, A_PAD, A_M, SPAN)
            offset = segment * B + column
            mask = in_m if EVEN_K else in_m & inside & (column < B) & (offset < K)
            tl.store(out_row + offset, value, mask=mask)


def _supports(problem: Problem) -> str | None:
    reason = unavailable_reason("cuda")
    if reason is None and problem.dtype not in (torch.bfloat16, torch.float16):
        reason = f"no kernel for {problem.dtype}"
    return reason


PATHS = (
    Path("products with sign matrices on matrix units", "any M", _supports),
    Path("products with dense factors", "any M", lambda problem: None),
)


def _serves(x: Tensor, target: Target) -> bool:
    """True if the kernel computes this; otherwise torch ops do, on the same device."""
    supported = x.dtype in (torch.bfloat16, torch.float16) and target.has_dot
    return supported and unavailable_reason(x.device) is None and x.numel() > 0


@cached_plan
def _options(op_name: str, K: int, n: int, target: Target) -> tuple[dict[str, int | float | bool], int] | None:
    """(constexprs and launch options, programs that run at once) for rows of K values; None if they are too long."""
    table = config_table(op_name, CONFIGS[op_name], target)
    config = next((row[1:] for row in table if K <= row[0]), table[-1][1:])
    tile_rows, columns, num_warps, stages, programs = config
    if target.table == "gfx942" and n <= 128:
        tile_rows = 64  # tiles of 128 spill 17 registers at K = 14336 with a diagonal
    cut = tiling(K, n, tile_rows, columns)
    B_PAD = max(_next_power(cut.B), 16)
    if cut.TILES * cut.T * B_PAD > _LARGEST:
        return None
    # Tiles on their way, one that is written, and where matrix units read them there (wgmma, tcgen05) sign matrices.
    tile = 2 * cut.TILES * cut.T * B_PAD
    shared = 8192
    if target.table in ("sm90", "sm100"):
        shared += 2 * (B_PAD**2 + (cut.T**2 if cut.A > 1 else 0))
    while stages > 2 and programs * (shared + stages * tile) > target.shared_memory:
        stages -= 1
    programs = max(min(programs, target.shared_memory // (shared + stages * tile)), 1)
    m = odd_factor(n)
    field, mask = squares(PALEY_FIELDS[m]) if m > 1 else (1, 0)
    options = cut._asdict() | {
        "NORM": 1 / math.sqrt(n),
        "B_PAD": B_PAD,
        "INNER_M": m if cut.A == 1 else 1,
        "A_M": m if cut.A > 1 else 1,
        "LOG_SPAN": cut.SPAN.bit_length() - 1,
        "EVEN_K": B_PAD == cut.B and cut.A == cut.A_PAD and cut.ROWS * K == cut.TILES * cut.T * cut.B,
        "FIELD": field,
        "MASK": mask,
        "STAGES": stages,
        "num_warps": num_warps,
        "num_stages": stages,
    }
    if target.capability >= 100 and num_warps == 4 and cut.TILES <= 2:
        # Left alone, ptxas takes 96 or 128 and spills 1 to 5 of them; with more tiles it does not.
        options["maxnreg"] = 168
    return options, programs * target.multiprocessors


def _launch(
    x: Tensor, diagonal: Tensor | None, K: int, n: int, out: Tensor, scale: Tensor | None, format: str
) -> bool:
    """Run the kernel on x, taken as rows of K values; False if they are too long for it."""
    target = target_of(x.device)
    plan = _options("hadamard" if scale is None else "hadamard_quantize_rowwise", K, n, target)
    if plan is None:
        return False
    options, programs = plan
    rows = x.reshape(-1, K)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    M = rows.shape[0]
    launch(
        _hadamard_kernel,
        (min(-(-M // options["ROWS"]), programs),),
        rows,
        diagonal,
        out,
        scale,
        M,
        K,
        rows.stride(0),
        **options,
        **code_options(format, target),
    )
    return True


def _transform(x: Tensor, diagonal: Tensor | None, n: int, dtype: torch.dtype) -> Tensor:
    """The transform of x [..., K] in `dtype`, contiguous."""
    if not _serves(x, target_of(x.device)):
        return transform(x if x.dtype == torch.float64 else x.float(), n, diagonal).to(dtype).contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if diagonal is not None:
        if _launch(x, diagonal, x.shape[-1], n, out, None, "int8"):
            return out
        x = (x * diagonal.view(-1)).to(x.dtype)
    if n > _LARGEST:  # the last factors by the kernel, the first one between their results
        inner = min(n // odd_factor(n), _LARGEST)
        y = mix(_transform(x, None, inner, torch.float32), n // inner, inner)
        return y.mul_(math.sqrt(inner / n)).to(dtype)
    width = n
    while width < 64 and x.shape[-1] % (2 * width) == 0:  # small blocks share a segment
        width *= 2
    served = _launch(x, None, width, n, out, None, "int8")
    assert served
    return out


@implements(op.hadamard, "XPU", PATHS)
@implements(op.hadamard, "CUDA", PATHS)
def hadamard_gpu(x: Tensor, diagonal: Tensor | None = None, *, block_size: int | None = None) -> Tensor:
    """Compute `hadamard_reference`; sums in fp32, half-way with 16 bits of mantissa.

    The diagonal, and its product with x, are rounded to x's dtype: signs are exact.
    """
    return _transform(x, diagonal, op.check(x, block_size, diagonal), x.dtype)


@implements(op.hadamard_quantize_rowwise, "XPU", PATHS)
@implements(op.hadamard_quantize_rowwise, "CUDA", PATHS)
def hadamard_quantize_rowwise_gpu(
    x: Tensor, diagonal: Tensor | None = None, *, block_size: int | None = None, format: str
) -> tuple[Tensor, Tensor]:
    """Compute `hadamard_quantize_rowwise_reference`; sums as in `hadamard_gpu`.

    Rows that do not fit into the registers of a program are transformed by one kernel and quantized by another, in
    fp32 between them.
    """
    n = op.check(x, block_size, diagonal)
    row_max(format)
    if n <= _LARGEST and _serves(x, target_of(x.device)):
        codes = torch.empty(x.shape, dtype=torch.int8 if format == "int8" else torch.uint8, device=x.device)
        scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        if _launch(x, diagonal, x.shape[-1], n, codes, scale, format):
            return codes.view(ROW_FORMATS[format]), scale
    return quantize_rowwise_gpu(_transform(x, diagonal, n, torch.float32), format=format)
