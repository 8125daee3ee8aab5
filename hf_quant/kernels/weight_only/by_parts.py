"""Products with floating-point zero points by implementations that know none, see `float_zeros`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_quant.kernels.dispatch import direct
from hf_quant.kernels.float_zeros import group_sums, kept_offsets, symmetric
from hf_quant.kernels.grouped_mm.op import rows_of_experts
from hf_quant.kernels.hadamard.op import hadamard
from hf_quant.kernels.scaled_mm.op import quantized_for
from hf_quant.kernels.weight import Weight
from hf_quant.kernels.weight_only.op import dequantize


_MOST_ROWS = 16  # that are multiplied in fp32, so that the sum of both parts is rounded once


def _knows_none(*args: Any, **how: Any) -> bool:
    return False


def by_parts(fn: Callable[..., Tensor], knows: Callable[..., bool] = _knows_none) -> Callable[..., Tensor]:
    """Decorate an implementation of `weight_only_mm`, or of `grouped_mm`.

    It is called as fn(x [..., K], w, bias), with the ends of each expert's rows as a fourth argument where w is a
    weight of experts, and with `activation` where it may quantize x. `knows` is asked with the same arguments: True if
    fn computes it as it is.
    """

    @wraps(fn)
    def call(x: Tensor, w: Weight, bias: Tensor | None, *ends: Tensor, **how: Any) -> Tensor:
        if not w.has_float_zeros or knows(x, w, bias, *ends, **how):
            return fn(x, w, bias, *ends, **how)
        if w.input_diagonal is not None:
            x = direct(hadamard)(x, w.input_diagonal, block_size=w.input_diagonal.shape[1])
            w = w._replace(input_diagonal=None)
        x = x.contiguous()
        rows = x.numel() // max(w.K, 1)
        if rows > _MOST_ROWS and not ends and x.dtype != torch.float32:
            return _by_dense(x, w, bias)
        rest = _matmul(_sums(x, w, how.get("activation")), kept_offsets(w).transpose(-1, -2), *ends)
        return rest.add_(fn(x.float(), symmetric(w), bias, *ends, **how)).to(x.dtype)

    return call


def by_parts_of_rows(fn: Callable[..., Tensor], knows: Callable[..., bool] = _knows_none) -> Callable[..., Tensor]:
    """`by_parts` for `quantized_mm`: fn(codes [..., K], row_scale [..., 1], w, bias, out_dtype=...)."""

    @wraps(fn)
    def call(x: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        if not w.has_float_zeros or knows(x, row_scale, w, bias, out_dtype=out_dtype):
            return fn(x, row_scale, w, bias, out_dtype=out_dtype)
        rest = group_sums(x, w).mul_(row_scale) @ kept_offsets(w).t()
        return rest.add_(fn(x, row_scale, symmetric(w), bias, out_dtype=torch.float32)).to(out_dtype)

    return call


def _by_dense(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    dense = direct(dequantize)(*w.packed, format=w.format, group_size=w.group_size, K=w.K, dtype=x.dtype)
    return linear(x, dense, None if bias is None else bias.to(x.dtype))


def _sums(x: Tensor, w: Weight, activation: str | None) -> Tensor:
    """`group_sums` of x as the product sees it."""
    if activation is None:
        return group_sums(x, w)
    codes, row_scale = quantized_for(x, w, activation)
    return group_sums(codes, w).mul_(row_scale)


def _matmul(x: Tensor, matrix: Tensor, ends: Tensor | None = None) -> Tensor:
    """x [..., A] times a matrix [A, B], or [M, A] times those of each row's expert [E, A, B], in fp32."""
    if ends is None:
        return x @ matrix
    y = x.new_zeros(x.shape[0], matrix.shape[-1])
    for e, rows in rows_of_experts(ends):
        y[rows] = x[rows] @ matrix[e]
    return y
