"""`weight_only_mm`: y = x @ dequant(w).T + bias, its input gradient, and `dequantize`.

The references are the specification: decode in fp32, multiply and accumulate in fp32.
"""

import torch
from torch import Tensor

from hf_quant.kernels.codes import decode_codes, expand_scale
from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.sign_matrices import transform
from hf_quant.kernels.weight import Weight, takes_weight


@takes_weight(K_is_option=True)
def dequantize_reference(w: Weight, *, dtype: torch.dtype) -> Tensor:
    """The weight [..., N, K] in `dtype`: (level of code, or code - zero_point) * scale * global_scale, in fp32.

    With a floating-point zero_point it is code * scale + zero_point.
    """
    return dequantized(w, dtype)


def dequantized(w: Weight, dtype: torch.dtype) -> Tensor:
    """`dequantize_reference` of a weight that has been checked."""
    values = decode_codes(w.qdata, w.spec, w.K)
    if w.zero_point is not None and w.spec.is_packed:
        values = values + 2 ** (w.spec.bits - 1)
    if w.zero_point is not None and not w.has_float_zeros:
        values = values - expand_scale(w.zero_point, w.N, w.K, w.group_size)
    factor = w.scale.float()
    if w.global_scale is not None:
        factor = factor * w.global_scale.reshape(*w.scale.shape[:-2], 1, 1)
    values = values * expand_scale(factor, w.N, w.K, w.group_size)
    if w.zero_point is not None and w.has_float_zeros:
        values = values + expand_scale(w.zero_point.float(), w.N, w.K, w.group_size)
    return values.to(dtype)


@takes_weight(K_is_option=True)
def _dequantize_fake(w: Weight, *, dtype: torch.dtype):
    return w.qdata.new_empty((*w.qdata.shape[:-1], w.K), dtype=dtype)


dequantize = define_op("dequantize", dequantize_reference, _dequantize_fake)


def check(x: Tensor, w: Weight, bias: Tensor | None) -> None:
    """Raise ValueError unless x is [..., K] floating, w one matrix and bias None or [N]."""
    if not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; needs [..., K] in fp16, bf16 or fp32")
    check_operands(w, bias)


def check_operands(w: Weight, bias: Tensor | None) -> None:
    """`check` for x of any dtype."""
    if w.qdata.dim() != 2:
        raise ValueError(f"qdata is {w.qdata.dim()}-D and scale {w.scale.dim()}-D; both must be 2-D")
    if bias is not None and bias.shape != (w.N,):
        raise ValueError(f"bias is {tuple(bias.shape)}; needs [{w.N}]")


@takes_weight(check, transforms=True)
def weight_only_mm_reference(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """x [..., K] @ dequant(w [N, K]).T + bias [N] -> [..., N] in x's dtype. Not differentiable: see `modules`.

    With `input_diagonal` [K / b, b] x is transformed first: x * diagonal times the Hadamard matrix of each b columns.
    """
    y = transformed(x, w) @ dequantized(w, torch.float32).t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def transformed(x: Tensor, w: Weight) -> Tensor:
    """x [..., K] in fp32, in the basis of the columns of w."""
    if w.input_diagonal is None:
        return x.float()
    return transform(x.double(), w.input_diagonal.shape[1], w.input_diagonal).float()


@takes_weight(check, transforms=True)
def _weight_only_mm_fake(x: Tensor, w: Weight, bias: Tensor | None):
    return x.new_empty((*x.shape[:-1], w.N))


weight_only_mm = define_op("weight_only_mm", weight_only_mm_reference, _weight_only_mm_fake, is_row_by_row=True)


@takes_weight(K_is_option=True)
def weight_only_mm_backward_reference(grad: Tensor, w: Weight) -> Tensor:
    """Gradient of `weight_only_mm` with respect to x: grad [..., N] @ dequant(w [N, K]) -> [..., K], grad's dtype."""
    return (grad.float() @ dequantized(w, torch.float32)).to(grad.dtype)


@takes_weight(K_is_option=True)
def _weight_only_mm_backward_fake(grad: Tensor, w: Weight):
    return grad.new_empty((*grad.shape[:-1], w.K))


weight_only_mm_backward = define_op(
    "weight_only_mm_backward", weight_only_mm_backward_reference, _weight_only_mm_backward_fake, is_row_by_row=True
)
