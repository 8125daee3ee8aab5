"""Products with quantized activations.

`int8_scaled_mm` and `fp8_scaled_mm` multiply codes of one type with codes of the same; `quantized_mm` codes with a
weight of any format; `dynamic_mm` quantizes x itself.

None is differentiable; `modules` wraps them in an autograd.Function with the exact gradient to the input.
"""

import torch
from torch import Tensor

from hf_quant.kernels.codes import ROW_FORMATS, row_max
from hf_quant.kernels.dispatch import define_op, direct
from hf_quant.kernels.hadamard.op import hadamard_quantize_rowwise
from hf_quant.kernels.rowwise.op import (
    quantize_rowwise,
    quantize_rowwise_reference,
    quantize_static,
    quantize_static_reference,
)
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.op import check as check_weight_only
from hf_quant.kernels.weight_only.op import check_operands, dequantized, transformed


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless a [M, K] is of one of `dtypes`, b [N, K] of the first, a_scale [M, 1] and b_scale [N, 1]
    fp32, bias None or [N]."""
    if a.dtype not in dtypes or b.dtype != dtypes[0]:
        needed = (
            f"both must be {dtypes[0]}" if len(dtypes) == 1 else f"a must be {dtypes[0]} or {dtypes[1]}, b the first"
        )
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}; {needed}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a is {tuple(a.shape)}, b is {tuple(b.shape)}; needs [M, K] and [N, K]")
    M, N = a.shape[0], b.shape[0]
    if a_scale.shape != (M, 1) or b_scale.shape != (N, 1):
        raise ValueError(
            f"a_scale is {tuple(a_scale.shape)}, b_scale is {tuple(b_scale.shape)}; needs [{M}, 1] and [{N}, 1]"
        )
    if a_scale.dtype != torch.float32 or b_scale.dtype != torch.float32:
        raise ValueError(f"a_scale is {a_scale.dtype}, b_scale is {b_scale.dtype}; both must be torch.float32")
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"bias is {tuple(bias.shape)}; needs [{N}]")


def _scaled_mm(a, b, a_scale, b_scale, bias, out_dtype):
    accumulator = a.double() @ b.double().t()  # int8: sums stay below 2**53, hence exact
    y = accumulator.float() * a_scale * b_scale.t()
    return (y if bias is None else y + bias.float()).to(out_dtype)


def int8_scaled_mm_reference(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """(a @ b.T) * a_scale * b_scale.T + bias; a [M, K], b [N, K] int8; scales [M, 1], [N, 1] fp32 -> [M, N]."""
    check(a, b, a_scale, b_scale, bias, torch.int8)
    return _scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)


def _int8_scaled_mm_fake(a, b, a_scale, b_scale, bias, *, out_dtype):
    check(a, b, a_scale, b_scale, bias, torch.int8)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


int8_scaled_mm = define_op("int8_scaled_mm", int8_scaled_mm_reference, _int8_scaled_mm_fake)


def fp8_scaled_mm_reference(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """(a @ b.T) * a_scale * b_scale.T + bias; a [M, K], b [N, K] float8_e4m3fn; scales fp32 -> [M, N].

    a may be float8_e5m2, too, as gradients are.
    """
    check(a, b, a_scale, b_scale, bias, *FLOAT8)
    return _scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)


def _fp8_scaled_mm_fake(a, b, a_scale, b_scale, bias, *, out_dtype):
    check(a, b, a_scale, b_scale, bias, *FLOAT8)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


fp8_scaled_mm = define_op("fp8_scaled_mm", fp8_scaled_mm_reference, _fp8_scaled_mm_fake)


def check_quantized(
    codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, *, out_dtype: torch.dtype
) -> None:
    """Raise ValueError unless codes are [..., K] int8 or float8_e4m3fn and row_scale is [..., 1] fp32."""
    if codes.dtype not in ROW_FORMATS.values():
        raise ValueError(f"codes are {tuple(codes.shape)} {codes.dtype}; needs [..., K] in int8 or float8_e4m3fn")
    if row_scale.dtype != torch.float32 or row_scale.shape != (*codes.shape[:-1], 1):
        raise ValueError(
            f"row_scale is {tuple(row_scale.shape)} {row_scale.dtype}; needs {(*codes.shape[:-1], 1)} in fp32"
        )
    check_operands(w, bias)


def check_dynamic(x: Tensor, w: Weight, bias: Tensor | None, *, activation: str) -> None:
    """Raise ValueError unless `activation` is a format of activations and the operands fit each other."""
    row_max(activation)
    check_weight_only(x, w, bias)


@takes_weight(check_quantized)
def quantized_mm_reference(
    codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """(codes @ dequant(w).T) * row_scale + bias: what follows `quantize_rowwise` in `dynamic_mm`, bit for bit.

    codes [..., K] int8 or float8_e4m3fn, row_scale [..., 1] fp32, w [N, K] of any format -> [..., N] in out_dtype;
    accumulated in fp32. For several weights that are multiplied with the same codes.
    """
    return _product_of_codes(codes, row_scale, w, bias, out_dtype)


def _product_of_codes(
    codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    y = (codes.float() @ dequantized(w, torch.float32).t()) * row_scale
    return (y if bias is None else y + bias.float()).to(out_dtype)


@takes_weight(check_quantized)
def _quantized_mm_fake(codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, *, out_dtype: torch.dtype):
    return codes.new_empty((*codes.shape[:-1], w.N), dtype=out_dtype)


quantized_mm = define_op("quantized_mm", quantized_mm_reference, _quantized_mm_fake)


@takes_weight(check_dynamic, transforms=True, quantizes=True)
def dynamic_mm_reference(x: Tensor, w: Weight, bias: Tensor | None, *, activation: str) -> Tensor:
    """Quantize each row of x to `activation` ("int8", "fp8_e4m3"), then multiply with the weight of any format.

    x [..., K], w [N, K] -> (codes(x) @ dequant(w).T) * row_scale(x) + bias, in x's dtype; accumulated in fp32. With
    `input_diagonal` the rows are transformed first, see `weight_only_mm`, and not rounded in between. With
    `input_scale` [1] all rows have that scale, see `quantize_static`.
    """
    if w.input_scale is None:
        rows = quantize_rowwise_reference(x if w.input_diagonal is None else transformed(x, w), format=activation)
    else:
        rows = quantize_static_reference(x, w.input_scale, w.input_diagonal, format=activation)
    return _product_of_codes(*rows, w, bias, x.dtype)


@takes_weight(check_dynamic, transforms=True, quantizes=True)
def _dynamic_mm_fake(x: Tensor, w: Weight, bias: Tensor | None, *, activation: str):
    return x.new_empty((*x.shape[:-1], w.N))


_quantize = direct(quantize_rowwise)
_hadamard_quantize = direct(hadamard_quantize_rowwise)
_quantize_static = direct(quantize_static)


def quantized_for(x: Tensor, w: Weight, activation: str) -> tuple[Tensor, Tensor]:
    """(codes, row_scale) of x [..., K] as `dynamic_mm` multiplies it with w."""
    if w.input_scale is not None:
        return _quantize_static(x, w.input_scale, w.input_diagonal, format=activation)
    if w.input_diagonal is not None:
        return _hadamard_quantize(x, w.input_diagonal, block_size=w.input_diagonal.shape[1], format=activation)
    return _quantize(x, format=activation)


dynamic_mm = define_op("dynamic_mm", dynamic_mm_reference, _dynamic_mm_fake, is_row_by_row=True)
