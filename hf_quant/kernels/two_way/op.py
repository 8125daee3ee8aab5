"""`quantize_two_way`: the codes of a matrix by rows, and those of its transpose, from one call.

A linear layer in training multiplies each of its three matrices twice, and sums over another dimension each time: with
scales of the rows, and with scales of the columns. Codes lie so that sums run along their last dimension, as
`int8_scaled_mm` and `fp8_scaled_mm` take them.
"""

import torch
from torch import Tensor

from hf_quant.kernels.codes import SMALLEST_SCALE
from hf_quant.kernels.dispatch import define_op


DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALINGS = ("row", "power_of_two", "tensor")


def limit_of(format: str) -> float:
    """The largest magnitude of a code: 127, 448 or 57344."""
    return 127.0 if format == "int8" else torch.finfo(DTYPES[format]).max


def check(x: Tensor, format: str, scaling: str) -> None:
    """Raise ValueError unless x is a floating-point matrix, and both names are known."""
    if format not in DTYPES:
        raise ValueError(f"format is {format!r}; allowed: {', '.join(DTYPES)}")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}; allowed: {', '.join(SCALINGS)}")
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; needs a floating-point matrix [M, K]")


def scales_of(amax: Tensor, format: str, scaling: str) -> Tensor:
    """amax fp32 -> amax / limit; 1 if that is below 2**-90; NaN and inf stay. Powers of two are rounded up."""
    scale = amax / limit_of(format)
    if scaling == "power_of_two":
        # Without `log2`: the next power of two has the exponent of the largest number below it, and one more.
        bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        scale = torch.where(scale.isfinite(), bits.view(torch.float32), scale)
    return torch.where(scale < SMALLEST_SCALE, 1.0, scale)


def quantize_two_way_reference(
    x: Tensor, *, format: str, scaling: str = "row", columns: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> codes [M, K], row_scale [M, 1], codes_t [K, M], column_scale [K, 1]; scales in fp32, all contiguous.

    Without `columns` the last two are [0, M] and [0, 1].
    x ~ codes * row_scale, x.T ~ codes_t * column_scale. format: "int8", "fp8_e4m3" or "fp8_e5m2". scaling: "row", each
    row and each column has its largest magnitude / the format's largest; "power_of_two", that rounded up to a power of
    two; "tensor", all have that of the matrix, and codes_t is the transpose of codes. Scales below 2**-90, as of
    zeros, are 1. A row or column with NaN (inf) has that as its scale, and codes that mean nothing: no product with it
    is finite. A value is multiplied
    with the reciprocal of its scale, both in fp32, and rounded to the format, half to even. Not differentiable.
    """
    check(x, format, scaling)
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


def _quantize_two_way_fake(x, *, format, scaling="row", columns=True):
    check(x, format, scaling)
    (M, K), options = x.shape, {"dtype": DTYPES[format]}
    rows_t = K if columns else 0
    scales = (x.new_empty(size, 1, dtype=torch.float32) for size in (M, rows_t))
    return x.new_empty(M, K, **options), next(scales), x.new_empty(rows_t, M, **options), next(scales)


quantize_two_way = define_op("quantize_two_way", quantize_two_way_reference, _quantize_two_way_fake)
