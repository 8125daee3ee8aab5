"""`grouped_scaled_mm` and `grouped_scaled_sums`: the products of experts in training, of codes with codes.

Rows are sorted by expert, as in `grouped_mm`. The first op multiplies each expert's rows with its matrix: that is the
output, and the gradient of the input. The second sums over each expert's rows: that is the gradient of its weight.
Both take codes as `quantize_two_way` gives them with `offsets`. Neither is differentiable.
"""

import torch
from torch import Tensor

from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.grouped_mm.op import rows_of_experts
from hf_quant.kernels.scaled_mm.op import FLOAT8, fp8_scaled_mm_reference, int8_scaled_mm_reference
from hf_quant.kernels.two_way.op import blocks_of, check_offsets, padded_rows


def _check_codes(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless both are int8, or b is float8_e4m3fn and a float8_e4m3fn or float8_e5m2."""
    if not (a.dtype == b.dtype == torch.int8 or (a.dtype in FLOAT8 and b.dtype == FLOAT8[0])):
        raise ValueError(
            f"a is {a.dtype} and b is {b.dtype}; both must be torch.int8, or a {FLOAT8[0]} or {FLOAT8[1]} and b the "
            "first"
        )


def _check_scales(a_scale: Tensor, b_scale: Tensor, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    if a_scale.shape != a_shape or b_scale.shape != b_shape or {a_scale.dtype, b_scale.dtype} != {torch.float32}:
        raise ValueError(
            f"a_scale is {tuple(a_scale.shape)} {a_scale.dtype}, b_scale is {tuple(b_scale.shape)} {b_scale.dtype}; "
            f"needs {list(a_shape)} and {list(b_shape)} in torch.float32"
        )


def check(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, offsets: Tensor) -> None:
    """Raise ValueError unless the operands are as `grouped_scaled_mm_reference` says."""
    _check_codes(a, b)
    check_offsets(offsets)
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[2] or b.shape[0] != len(offsets):
        raise ValueError(
            f"a is {tuple(a.shape)}, b is {tuple(b.shape)}; needs [M, K] and [E, N, K], where E is the number of "
            f"offsets, {len(offsets)}"
        )
    E, N, _ = b.shape
    _check_scales(a_scale, b_scale, (a.shape[0], 1), (E, N, 1))
    if bias is not None and bias.shape != (E, N):
        raise ValueError(f"bias is {tuple(bias.shape)}; needs [{E}, {N}]")


def grouped_scaled_mm_reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """(a @ b[e].T) * a_scale * b_scale[e].T + bias[e] for the rows of each expert e -> [M, N] in out_dtype.

    a [M, K], b [E, N, K]: both int8, or both float8_e4m3fn; a may be float8_e5m2 then. a_scale [M, 1] and b_scale
    [E, N, 1] fp32, bias [E, N]. Rows offsets[e - 1] to offsets[e] belong to expert e. Rows behind the last give zeros.
    """
    check(a, b, a_scale, b_scale, bias, offsets)
    multiply = int8_scaled_mm_reference if a.dtype == torch.int8 else fp8_scaled_mm_reference
    y = torch.zeros(len(a), b.shape[1], dtype=out_dtype, device=a.device)
    for e, rows in rows_of_experts(offsets):
        own_bias = None if bias is None else bias[e]
        y[rows] = multiply(a[rows], b[e], a_scale[rows], b_scale[e], own_bias, out_dtype=out_dtype)
    return y


def _grouped_scaled_mm_fake(a, b, a_scale, b_scale, bias, offsets, *, out_dtype):
    check(a, b, a_scale, b_scale, bias, offsets)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


grouped_scaled_mm = define_op("grouped_scaled_mm", grouped_scaled_mm_reference, _grouped_scaled_mm_fake)


def check_sums(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, *, M: int) -> None:
    """Raise ValueError unless the operands are as `grouped_scaled_sums_reference` says."""
    _check_codes(a, b)
    check_offsets(offsets)
    E, rows = len(offsets), padded_rows(M, len(offsets))
    N, K = a.numel() // max(rows, 1), b.numel() // max(rows, 1)
    if a.shape != (N * rows,) or b.shape != (K * rows,):
        raise ValueError(
            f"a is {tuple(a.shape)}, b is {tuple(b.shape)}; needs the blocks of {M} rows in {E} groups, which are "
            f"[N * {rows}] and [K * {rows}] codes"
        )
    if rows:
        _check_scales(a_scale, b_scale, (E, N, 1), (E, K, 1))


def grouped_scaled_sums_reference(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, *, M: int, out_dtype: torch.dtype
) -> Tensor:
    """(block of a @ block of b.T) * a_scale[e] * b_scale[e].T for each expert e -> [E, N, K] in out_dtype.

    a and b: flat codes of M rows by columns, in blocks [N, rows] and [K, rows] of experts, as `quantize_two_way` gives
    them with `offsets`; dtypes as in `grouped_scaled_mm`. a_scale [E, N, 1] and b_scale [E, K, 1] fp32. An expert
    without rows gives zeros.
    """
    check_sums(a, b, a_scale, b_scale, offsets, M=M)
    multiply = int8_scaled_mm_reference if a.dtype == torch.int8 else fp8_scaled_mm_reference
    N, K = a_scale.shape[1], b_scale.shape[1]
    y = torch.zeros(len(offsets), N, K, dtype=out_dtype, device=a.device)
    for (e, _, left), (_, _, right) in zip(blocks_of(a, N, offsets), blocks_of(b, K, offsets)):
        y[e] = multiply(left, right, a_scale[e], b_scale[e], None, out_dtype=out_dtype)
    return y


def _grouped_scaled_sums_fake(a, b, a_scale, b_scale, offsets, *, M, out_dtype):
    check_sums(a, b, a_scale, b_scale, offsets, M=M)
    return a.new_empty((len(offsets), a_scale.shape[1], b_scale.shape[1]), dtype=out_dtype)


grouped_scaled_sums = define_op("grouped_scaled_sums", grouped_scaled_sums_reference, _grouped_scaled_sums_fake)
