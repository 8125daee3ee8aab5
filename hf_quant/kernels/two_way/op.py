"""`quantize_two_way`: the codes of a matrix by rows, and those of its transpose, from one call.

A linear layer in training multiplies each of its three matrices twice, and sums over another dimension each time: with
scales of the rows, and with scales of the columns. Codes lie so that sums run along their last dimension, as
`int8_scaled_mm` and `fp8_scaled_mm` take them. Those of groups of rows, the tokens of experts, go to
`grouped_scaled_mm` and `grouped_scaled_sums`.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hf_quant.kernels.codes import SMALLEST_SCALE, divided
from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.grouped_mm.op import rows_of_experts


DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALINGS = ("row", "power_of_two", "tensor")
BLOCK_ROWS = 16  # the rows of a group are filled up to a multiple of it: the bytes that a GPU loads at once
Result = tuple[Tensor, Tensor, Tensor, Tensor]


def limit_of(format: str) -> float:
    """The largest magnitude of a code: 127, 448 or 57344."""
    return 127.0 if format == "int8" else torch.finfo(DTYPES[format]).max


def check(x: Tensor, offsets: Tensor | None, format: str, scaling: str) -> None:
    """Raise ValueError unless x is a floating-point matrix, offsets None or [E] int32, and both names are known."""
    if format not in DTYPES:
        raise ValueError(f"format is {format!r}; allowed: {', '.join(DTYPES)}")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}; allowed: {', '.join(SCALINGS)}")
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; needs a floating-point matrix [M, K]")
    if offsets is not None:
        check_offsets(offsets)


def check_offsets(offsets: Tensor) -> None:
    """Raise ValueError unless offsets is [E] int32."""
    if offsets.dim() != 1 or offsets.dtype != torch.int32 or offsets.numel() == 0:
        raise ValueError(
            f"offsets is {tuple(offsets.shape)} {offsets.dtype}; needs [E] torch.int32, the end of each group's rows"
        )


def scales_of(amax: Tensor, format: str, scaling: str) -> Tensor:
    """amax fp32 -> amax / limit; 1 if that is below 2**-90; NaN and inf stay. Powers of two are rounded up."""
    scale = divided(amax, limit_of(format))
    if scaling == "power_of_two":
        # Without `log2`: the next power of two has the exponent of the largest number below it, and one more.
        bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        scale = torch.where(scale.isfinite(), bits.view(torch.float32), scale)
    return torch.where(scale < SMALLEST_SCALE, 1.0, scale)


def filled_up(rows: int) -> int:
    """The rows of a group's block: the next multiple of BLOCK_ROWS."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def padded_rows(M: int, E: int) -> int:
    """The rows that the blocks of E groups of M rows take at most, together."""
    return filled_up(M + (BLOCK_ROWS - 1) * min(E, M))


def blocks_of(codes_t: Tensor, K: int, offsets: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """(group, its rows, its block [K, rows filled up]) of each group that has rows; blocks are views of codes_t."""
    start = 0
    for e, rows in rows_of_experts(offsets):
        size = filled_up(rows.stop - rows.start)
        yield e, rows, codes_t[K * start : K * (start + size)].view(K, size)
        start += size


def by_groups(
    x: Tensor, offsets: Tensor, quantize: Callable[[Tensor], Result], *, format: str, columns: bool
) -> Result:
    """`quantize_two_way` of groups, each by `quantize`."""
    (M, K), E = x.shape, len(offsets)
    rows_t = K if columns else 0
    codes, codes_t = (
        torch.zeros(shape, dtype=torch.uint8, device=x.device).view(DTYPES[format])
        for shape in ((M, K), (rows_t * padded_rows(M, E),))
    )
    row_scale, column_scale = (
        torch.ones(*shape, 1, dtype=torch.float32, device=x.device) for shape in ((M,), (E, rows_t))
    )
    for e, rows, block in blocks_of(codes_t, rows_t, offsets):
        found = quantize(x[rows])
        codes[rows], row_scale[rows], column_scale[e] = found[0], found[1], found[3]
        block[:, : rows.stop - rows.start] = found[2]
    return codes, row_scale, codes_t, column_scale


def quantize_two_way_reference(
    x: Tensor, offsets: Tensor | None = None, *, format: str, scaling: str = "row", columns: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> codes [M, K], row_scale [M, 1], codes_t [K, M], column_scale [K, 1]; scales in fp32, all contiguous.

    Without `columns` the last two are [0, M] and [0, 1].
    x ~ codes * row_scale, x.T ~ codes_t * column_scale. format: "int8", "fp8_e4m3" or "fp8_e5m2". scaling: "row", each
    row and each column has its largest magnitude / the format's largest; "power_of_two", that rounded up to a power of
    two; "tensor", all have that of the matrix, and codes_t is the transpose of codes. Scales below 2**-90, as of
    zeros, are 1. A row or column with NaN (inf) has that as its scale, and codes that mean nothing: no product with it
    is finite. A value is multiplied with the reciprocal of its scale, both in fp32, and rounded to the format, half to
    even. Not differentiable.

    With `offsets` [E] int32, the ends of E groups of rows, every group is a matrix of its own. column_scale is then
    [E, K, 1], and codes_t is flat, see `blocks_of`: one block [K, rows] for each group, whose rows are filled up by
    zeros to a multiple of 16. Rows behind the last group have codes of 0 and scales of 1.
    """
    check(x, offsets, format, scaling)
    if offsets is not None:

        def quantize(part: Tensor) -> Result:
            return quantize_two_way_reference(part, format=format, scaling=scaling, columns=columns)

        return by_groups(x, offsets, quantize, format=format, columns=columns)
    M, K = x.shape
    values = x.float()
    if x.numel() == 0:
        scales = [values.new_ones(size, 1) for size in (M, K)]
    elif scaling == "tensor":
        scale = scales_of(values.abs().amax().view(1, 1), format, scaling)
        scales = [scale.repeat(size, 1) for size in (M, K)]
    else:
        scales = [scales_of(values.abs().amax(dim), format, scaling).view(-1, 1) for dim in (1, 0)]
    codes = rounded(values * (1 / scales[0]), format)
    if not columns:
        return codes, scales[0], codes.new_empty(0, M), scales[0].new_empty(0, 1)
    return codes, scales[0], rounded(values.t() * (1 / scales[1]), format), scales[1]


def rounded(values: Tensor, format: str) -> Tensor:
    """fp32 values in units of their scale -> codes: the nearest of the format, contiguous."""
    values = values.clamp(-limit_of(format), limit_of(format))
    return (values.round() if format == "int8" else values).to(DTYPES[format]).contiguous()


def _quantize_two_way_fake(x, offsets=None, *, format, scaling="row", columns=True):
    check(x, offsets, format, scaling)
    (M, K), options = x.shape, {"dtype": DTYPES[format]}
    rows_t = K if columns else 0
    if offsets is not None:
        E = len(offsets)
        codes_t = x.new_empty(rows_t * padded_rows(M, E), **options)
        scales = x.new_empty(M, 1, dtype=torch.float32), x.new_empty(E, rows_t, 1, dtype=torch.float32)
        return x.new_empty(M, K, **options), scales[0], codes_t, scales[1]
    scales = (x.new_empty(size, 1, dtype=torch.float32) for size in (M, rows_t))
    return x.new_empty(M, K, **options), next(scales), x.new_empty(rows_t, M, **options), next(scales)


quantize_two_way = define_op("quantize_two_way", quantize_two_way_reference, _quantize_two_way_fake)
