"""`weight_only_mm`: y = x @ dequant(w).T + bias, its input gradient, and `dequantize`.

The references are the specification: decode in fp32, multiply and accumulate in fp32.
"""

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, decode_codes, expand_scale, packed_words
from hf_quant.kernels.dispatch import define_op


def check_weight(
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    group_size: int,
    K: int,
) -> None:
    """Raise ValueError unless the tensors are a weight [..., N, K] of the format.

    qdata [..., N, K] or, packed, [..., N, words] int32; scale floating [..., N | 1 | ceil(N/128), ceil(K/group_size)];
    zero_point uint8 of the scale's shape, integer formats only; global_scale fp32, one element per leading index.
    """
    spec = CODES.get(format)
    if spec is None:
        raise ValueError(f"format is {format!r}; known: {', '.join(CODES)}")
    shape, scale_shape, groups = qdata.shape, scale.shape, -(-K // max(group_size, 1))
    width = packed_words(K, spec.bits) if spec.planes else K
    if qdata.dtype != spec.dtype or shape[-1] != width:
        raise ValueError(
            f"qdata is {tuple(shape)} {qdata.dtype}; {format} with K={K} needs [..., {width}] {spec.dtype}"
        )
    if group_size < 1 or scale_shape[-1] != groups or not scale.is_floating_point():
        raise ValueError(
            f"scale is {tuple(scale_shape)} {scale.dtype}; K={K} in groups of {group_size} needs a floating-point "
            f"[..., {groups}]"
        )
    if scale_shape[-2] not in (shape[-2], 1, -(-shape[-2] // 128)):
        raise ValueError(f"scale has {scale_shape[-2]} rows; qdata has {shape[-2]}")
    if scale_shape[:-2] != shape[:-2]:
        raise ValueError(f"scale is {tuple(scale_shape)}; qdata is {tuple(shape)}, their leading sizes must be equal")
    if zero_point is not None and (zero_point.shape != scale_shape or zero_point.dtype != torch.uint8):
        raise ValueError(
            f"zero_point is {tuple(zero_point.shape)} {zero_point.dtype}; needs {tuple(scale_shape)} torch.uint8"
        )
    if zero_point is not None and not (spec.is_packed and spec.is_integer):
        raise ValueError(f"{format} has no zero point")
    if global_scale is not None:
        weights = shape[:-2].numel()
        if global_scale.dtype != torch.float32 or global_scale.numel() != weights:
            raise ValueError(
                f"global_scale is {tuple(global_scale.shape)} {global_scale.dtype}; qdata is {tuple(shape)}, which "
                f"needs {weights} of torch.float32"
            )


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
    check_weight(qdata, scale, zero_point, global_scale, format, group_size, K)
    spec, N = CODES[format], qdata.shape[-2]
    values = decode_codes(qdata, spec, K)
    if zero_point is not None:
        values = values + 2 ** (spec.bits - 1) - expand_scale(zero_point, N, K, group_size)
    factor = scale.float()
    if global_scale is not None:
        factor = factor * global_scale.reshape(*scale.shape[:-2], 1, 1)
    return (values * expand_scale(factor, N, K, group_size)).to(dtype)


def _dequantize_fake(qdata, scale, zero_point, global_scale, *, format, group_size, K, dtype):
    check_weight(qdata, scale, zero_point, global_scale, format, group_size, K)
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
) -> None:
    """Raise ValueError unless x is [..., K] floating, qdata is 2-D and bias is None or [N]."""
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; needs [..., K] in fp16, bf16 or fp32")
    check_operands(x, qdata, scale, zero_point, global_scale, bias, format, group_size)


def check_operands(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    group_size: int,
) -> None:
    """`check` for x of any dtype."""
    if qdata.dim() != 2 or scale.dim() != 2:
        raise ValueError(f"qdata is {qdata.dim()}-D and scale {scale.dim()}-D; both must be 2-D")
    try:
        check_weight(qdata, scale, zero_point, global_scale, format, group_size, x.shape[-1])
    except ValueError as error:
        raise ValueError(f"x is {tuple(x.shape)}, so K={x.shape[-1]}, but {error}") from None
    if bias is not None and bias.shape != qdata.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}; needs [{qdata.shape[0]}]")


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
    check(x, qdata, scale, zero_point, global_scale, bias, format, group_size)
    weight = dequantize_reference(
        qdata,
        scale,
        zero_point,
        global_scale,
        format=format,
        group_size=group_size,
        K=x.shape[-1],
        dtype=torch.float32,
    )
    y = x.float() @ weight.t()
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
    weight = dequantize_reference(
        qdata, scale, zero_point, global_scale, format=format, group_size=group_size, K=K, dtype=torch.float32
    )
    return (grad.float() @ weight).to(grad.dtype)


def _weight_only_mm_backward_fake(grad, qdata, scale, zero_point, global_scale, *, format, group_size, K):
    check_weight(qdata, scale, zero_point, global_scale, format, group_size, K)
    return grad.new_empty((*grad.shape[:-1], K))


weight_only_mm_backward = define_op(
    "weight_only_mm_backward", weight_only_mm_backward_reference, _weight_only_mm_backward_fake, is_row_by_row=True
)
