"""`quantize_two_way` in Triton: one kernel for the largest magnitudes, one for both kinds of codes.

The first reads the matrix and leaves the largest magnitude of each row and each column by atomic maxima of integers,
whose order does not count. The second reads it again, tile by tile, and writes the codes of the tile and those of its
transpose. Memory bounds both: 2 + 2 bytes read and 2 written for each value in bf16, the second read from the L2 cache
where the matrix fits there. With groups of rows no tile has rows of two; programs find theirs as in `grouped_mm`, and
nothing is read on the host.
"""

import torch
from torch import Tensor

from hf_quant.kernels.codes import SMALLEST_SCALE
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.gpu.launch import launch, target_of, tl, triton, unavailable_reason
from hf_quant.kernels.gpu.row_codes import encode
from hf_quant.kernels.gpu.rows import rows_of_tile
from hf_quant.kernels.two_way import op


_BLOCK_M, _BLOCK_K, _NUM_WARPS = 64, 64, 4


@triton.jit
def block_of_group(offsets, group, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr):
    """(first row, rows filled up to a multiple of 16, all those of the groups before) of a group, see `blocks_of`."""
    e = tl.arange(0, EXPERTS_PADDED)
    end = tl.load(offsets + e, mask=e < EXPERTS, other=0)
    begin = tl.load(offsets + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
    units = (tl.maximum(end - begin, 0) + 15) // 16
    first = tl.sum(tl.where(e == group, begin, 0), 0)
    size, start = tl.sum(tl.where(e == group, units, 0), 0), tl.sum(tl.where(e < group, units, 0), 0)
    return first, size * 16, start.to(tl.int64) * 16


@triton.jit
def _tile(M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Rows and columns of this program's tile, and which of its values exist."""
    blocks = tl.cdiv(K, BLOCK_K)
    row = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    if EVEN:
        mask = tl.full([1, 1], True, tl.int1)
    else:
        mask = (row < M)[:, None] & (column < K)[None, :]
    return row, column, mask


@triton.jit
def _tile_of_group(
    offsets,
    M,
    K,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(group, first row, rows, columns, end of the group's rows, which values exist) of this program's tile."""
    blocks = tl.cdiv(K, BLOCK_K)
    tile = tl.program_id(0) // blocks
    group, first, end = rows_of_tile(offsets, tile, M, BLOCK_M, EXPERTS, EXPERTS_PADDED)
    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    return group, first, row, column, end, (row < end)[:, None] & (column < K)[None, :]


@triton.jit
def _largest_kernel(
    x,
    row_top,
    column_top,
    M,
    K,
    stride,
    TENSOR: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, column, mask = _tile(M, K, BLOCK_M, BLOCK_K, EVEN)
    value = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    # As integers magnitudes have the order of their values, NaN last.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if TENSOR:
        tl.atomic_max(row_top, tl.max(tl.max(bits, 1), 0))
    else:
        tl.atomic_max(row_top + row, tl.max(bits, 1), mask=row < M)
        if COLUMNS:
            tl.atomic_max(column_top + column, tl.max(bits, 0), mask=column < K)


@triton.jit
def _largest_of_groups_kernel(
    x,
    offsets,
    row_top,
    column_top,
    M,
    K,
    stride,
    TENSOR: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group, _, row, column, end, mask = _tile_of_group(offsets, M, K, EXPERTS, EXPERTS_PADDED, BLOCK_M, BLOCK_K)
    value = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    # As integers magnitudes have the order of their values, NaN last.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if TENSOR:
        tl.atomic_max(row_top + group, tl.max(tl.max(bits, 1), 0))
    else:
        tl.atomic_max(row_top + row, tl.max(bits, 1), mask=row < end)
        if COLUMNS:
            tl.atomic_max(column_top + group * K + column, tl.max(bits, 0), mask=column < K)


@triton.jit
def _scale(top, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale for a largest magnitude, given as bits of fp32."""
    scale = tl.div_rn(top.to(tl.float32, bitcast=True), LIMIT)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        power = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(bits < 0x7F800000, power, scale)
    return tl.where(scale < SMALLEST, 1.0, scale)


@triton.jit
def _code(value, KIND: tl.constexpr, LIMIT: tl.constexpr, CONVERTS: tl.constexpr):
    """fp32 -> the code of the nearest value of the format, as a byte."""
    if KIND != "int8":  # whose values are within half a step of the range, or mean nothing
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    if KIND == "fp8_e5m2":
        bits = value.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Drop 21 bits of the mantissa, half to even; the exponent's bias goes from 127 to 15.
        normal = (magnitude + 0xFFFFF + ((magnitude >> 21) & 1) - (112 << 23)) >> 21
        # Below 2**-14 the grid has steps of 2**-16: the last place of 2**7.
        small = (tl.abs(value) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        code = tl.where(magnitude < (113 << 23), small, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return encode(value, KIND != "int8", CONVERTS)


@triton.jit
def _two_way_kernel(
    x,
    row_top,
    column_top,
    codes,
    row_scale,
    codes_t,
    column_scale,
    M,
    K,
    stride,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    CONVERTS: tl.constexpr,
    TENSOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, column, mask = _tile(M, K, BLOCK_M, BLOCK_K, EVEN)
    top = tl.load(row_top + (row * 0 if TENSOR else row), mask=row < M, other=0)
    of_row = _scale(top, LIMIT, SMALLEST, POWER_OF_TWO)
    blocks = tl.cdiv(K, BLOCK_K)
    if tl.program_id(0) % blocks == 0:
        tl.store(row_scale + row, of_row, mask=row < M)
    at = row.to(tl.int64)
    value = tl.load(x + at[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    by_row = _code(value * tl.div_rn(1.0, of_row)[:, None], KIND, LIMIT, CONVERTS)
    tl.store(codes + at[:, None] * K + column[None, :], by_row, mask=mask)
    if COLUMNS:
        top = tl.load(row_top + column * 0 if TENSOR else column_top + column, mask=column < K, other=0)
        of_column = _scale(top, LIMIT, SMALLEST, POWER_OF_TWO)
        if tl.program_id(0) // blocks == 0:
            tl.store(column_scale + column, of_column, mask=column < K)
        by_column = _code(value * tl.div_rn(1.0, of_column)[None, :], KIND, LIMIT, CONVERTS)
        places = codes_t + column.to(tl.int64)[:, None] * M + row[None, :]
        tl.store(places, tl.trans(by_column), mask=tl.trans(mask))


@triton.jit
def _groups_kernel(
    x,
    offsets,
    row_top,
    column_top,
    codes,
    row_scale,
    codes_t,
    column_scale,
    M,
    K,
    stride,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    CONVERTS: tl.constexpr,
    TENSOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group, first, row, column, end, mask = _tile_of_group(offsets, M, K, EXPERTS, EXPERTS_PADDED, BLOCK_M, BLOCK_K)
    column_top += group * K
    if TENSOR:
        row_top += group
    top = tl.load(row_top + (row * 0 if TENSOR else row), mask=row < end, other=0)
    of_row = tl.where(group < EXPERTS, _scale(top, LIMIT, SMALLEST, POWER_OF_TWO), 1.0)
    blocks = tl.cdiv(K, BLOCK_K)
    if tl.program_id(0) % blocks == 0:
        tl.store(row_scale + row, of_row, mask=row < end)
    at = row.to(tl.int64)
    value = tl.load(x + at[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.where(group < EXPERTS, value, 0.0)
    by_row = _code(value * tl.div_rn(1.0, of_row)[:, None], KIND, LIMIT, CONVERTS)
    tl.store(codes + at[:, None] * K + column[None, :], by_row, mask=mask)
    if COLUMNS:
        tops = row_top + column * 0 if TENSOR else column_top + column
        of_column = _scale(tl.load(tops, mask=column < K, other=0), LIMIT, SMALLEST, POWER_OF_TWO)
        by_column = _code(value * tl.div_rn(1.0, of_column)[None, :], KIND, LIMIT, CONVERTS)
        # Rows of no group have a block without rows, to which nothing is written.
        begin, size, before = block_of_group(offsets, group, EXPERTS, EXPERTS_PADDED)
        if (first == begin) & (size > 0):
            tl.store(column_scale + group * K + column, of_column, mask=column < K)
        inner = tl.multiple_of(first - begin, BLOCK_M) + tl.arange(0, BLOCK_M)
        places = codes_t + before * K + column.to(tl.int64)[:, None] * size + inner[None, :]
        # With what fills up a group: whole vectors.
        tl.store(places, tl.trans(by_column), mask=(column < K)[:, None] & (inner < size)[None, :])


@implements(op.quantize_two_way, "XPU")
@implements(op.quantize_two_way, "CUDA")
def quantize_two_way_gpu(
    x: Tensor, offsets: Tensor | None = None, *, format: str, scaling: str = "row", columns: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `quantize_two_way_reference`, bit for bit in rows and columns without NaN or inf."""
    op.check(x, offsets, format, scaling)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if x.dtype not in floats or x.numel() == 0 or unavailable_reason(x.device) is not None:
        return op.quantize_two_way_reference(x, offsets, format=format, scaling=scaling, columns=columns)
    M, K = x.shape
    rows_t, E = K if columns else 0, 0 if offsets is None else len(offsets)
    x = x if x.stride(1) == 1 else x.contiguous()
    first = max(M, E + 1)  # of the columns' maxima
    tops = torch.zeros(first + (E + 1) * K, dtype=torch.int32, device=x.device)
    codes, row_scale = (
        torch.empty(M, K, dtype=torch.int8, device=x.device),
        torch.empty(M, 1, dtype=torch.float32, device=x.device),
    )
    if offsets is None:
        codes_t = torch.empty(rows_t, M, dtype=torch.int8, device=x.device)
        column_scale, tiles = torch.empty(rows_t, 1, dtype=torch.float32, device=x.device), triton.cdiv(M, _BLOCK_M)
    else:
        offsets = offsets.contiguous()
        # Where the groups' rows end is not known here: what fills them up is zero from the start.
        codes_t = torch.zeros(rows_t * op.padded_rows(M, E), dtype=torch.int8, device=x.device)
        column_scale = torch.ones(E, rows_t, 1, dtype=torch.float32, device=x.device)
        tiles = M // _BLOCK_M + min(E, M) + 1
    grid = (tiles * triton.cdiv(K, _BLOCK_K),)
    options = {"TENSOR": scaling == "tensor", "COLUMNS": columns, "BLOCK_M": _BLOCK_M, "BLOCK_K": _BLOCK_K}
    kernels, given = (_largest_kernel, _two_way_kernel), ()
    if offsets is None:
        options |= {"EVEN": M % _BLOCK_M == 0 and K % _BLOCK_K == 0, "num_warps": _NUM_WARPS}
    else:
        kernels, given = (_largest_of_groups_kernel, _groups_kernel), (offsets,)
        num_warps = 2 * _NUM_WARPS if target_of(x.device).is_nvidia else _NUM_WARPS  # of 32 lanes, or of 64
        options |= {"EXPERTS": E, "EXPERTS_PADDED": triton.next_power_of_2(E), "num_warps": num_warps}
    launch(kernels[0], grid, x, *given, tops[:first], tops[first:], M, K, x.stride(0), **options)
    launch(
        kernels[1],
        grid,
        x,
        *given,
        tops[:first],
        tops[first:],
        *(codes if format == "int8" else codes.view(torch.uint8), row_scale),
        *(codes_t if format == "int8" else codes_t.view(torch.uint8), column_scale),
        M,
        K,
        x.stride(0),
        KIND=format,
        LIMIT=op.limit_of(format),
        SMALLEST=SMALLEST_SCALE,
        CONVERTS=format == "fp8_e4m3" and target_of(x.device).has_fp8_dot,
        POWER_OF_TWO=scaling == "power_of_two",
        enable_fp_fusion=False,  # a product is rounded before it becomes a code
        **options,
    )
    dtype = op.DTYPES[format]
    return codes.view(dtype), row_scale, codes_t.view(dtype), column_scale
