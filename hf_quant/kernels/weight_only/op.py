"""`weight_only_mm`: y = x @ dequant(w).T + bias, its input gradient, and `dequantize`.

The references are the specification: decode in fp32, multiply and accumulate in fp32.
"""

import torch
from torch import Tensor

from hf_quant.kernels.codes import decode_codes, expand_scale
from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.weight import Weight, weight_of


def dequantize_reference(
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    *,
    format: str,
    group_size: int,
    K: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [..., N, K] in `dtype`: (level of code, or code - zero_point) * scale * global_scale, in fp32."""
    return dequantized(weight_of(qdata, scale, zero_point, global_scale, format, group_size, K), dtype)


def dequantized(w: Weight, dtype: torch.dtype) -> Tensor:
    """`dequantize_reference` of a weight that has been checked."""
    values = decode_codes(w.qdata, w.spec, w.K)
    if w.zero_point is not None:
        values = values + 2 ** (w.spec.bits - 1) - expand_scale(w.zero_point, w.N, w.K, w.group_size)
    factor = w.scale.float()
    if w.global_scale is not None:
        factor = factor * w.global_scale.reshape(*w.scale.shape[:-2], 1, 1)
    return (values * expand_scale(factor, w.N, w.K, w.group_size)).to(dtype)


def _dequantize_fake(qdata, scale, zero_point, global_scale, *, format, group_size, K, dtype):
    weight_of(qdata, scale, zero_point, global_scale, format, group_size, K)
    return qdata.new_empty((*qdata.shape[:-1], K), dtype=dtype)


dequantize = define_op("dequantize", dequantize_reference, _dequantize_fake)


def check(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    group_size: int,
) -> Weight:
    """The weight [N, K]; raises ValueError unless x is [..., K] floating, qdata is 2-D and bias is None or [N]."""
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; needs [..., K] in fp16, bf16 or fp32")
    return check_operands(x, qdata, scale, zero_point, global_scale, bias, format, group_size)


def check_operands(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    group_size: int,
) -> Weight:
    """`check` for x of any dtype."""
    if qdata.dim() != 2 or scale.dim() != 2:
        raise ValueError(f"qdata is {qdata.dim()}-D and scale {scale.dim()}-D; both must be 2-D")
    try:
        weight = weight_of(qdata, scale, zero_point, global_scale, format, group_size, x.shape[-1])
    except ValueError as error:
        raise ValueError(f"x is {tuple(x.shape)}, so K={x.shape[-1]}, but {error}") from None
    if bias is not None and bias.shape != qdata.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}; needs [{qdata.shape[0]}]")
    return weight


def weight_only_mm_reference(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    *,
    format: str,
    group_size: int,
) -> Tensor:
    """x [..., K] @ dequant(w [N, K]).T + bias [N] -> [..., N] in x's dtype. Not differentiable: see `modules`."""
    w = check(x, qdata, scale, zero_point, global_scale, bias, format, group_size)
    y = x.float() @ dequantized(w, torch.float32).t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _weight_only_mm_fake(x, qdata, scale, zero_point, global_scale, bias, *, format, group_size):
    check(x, qdata, scale, zero_point, global_scale, bias, format, group_size)
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


weight_only_mm = define_op("weight_only_mm", weight_only_mm_reference, _weight_only_mm_fake, is_row_by_row=True)


def weight_only_mm_backward_reference(
    grad: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    *,
    format: str,
    group_size: int,
    K: int,
) -> Tensor:
    """Gradient of `weight_only_mm` with respect to x: grad [..., N] @ dequant(w [N, K]) -> [..., K], grad's dtype."""
    w = weight_of(qdata, scale, zero_point, global_scale, format, group_size, K)
    return (grad.float() @ dequantized(w, torch.float32)).to(grad.dtype)


def _weight_only_mm_backward_fake(grad, qdata, scale, zero_point, global_scale, *, format, group_size, K):
    weight_of(qdata, scale, zero_point, global_scale, format, group_size, K)
    return grad.new_empty((*grad.shape[:-1], K))


weight_only_mm_backward = define_op(
    "weight_only_mm_backward", weight_only_mm_backward_reference, _weight_only_mm_backward_fake, is_row_by_row=True
)
