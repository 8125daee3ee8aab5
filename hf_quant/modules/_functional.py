"""Differentiable products with quantized weights: the ops, and the exact gradient to their input.

The weight is frozen. With quantized activations the gradient passes through their rounding unchanged
(straight-through): grad_x = grad_y @ dequant(w). Autograd sits outside the ops: an op call costs 5 us, one with
registered autograd 15.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_quant import kernels
from hf_quant.algorithms import PackedWeight
from hf_quant.kernels import grouped_mm, grouped_mm_backward, weight_only_mm_backward
from hf_quant.kernels._cpu_mm import ready_product
from hf_quant.kernels._op import direct, is_plain
from hf_quant.modules._rows import quantized_rows


weight_only_mm = direct(kernels.weight_only_mm)
dynamic_mm = direct(kernels.dynamic_mm)
quantized_mm = direct(kernels.quantized_mm)


def needs_grad(x: Tensor, bias: Tensor | None) -> bool:
    """Whether autograd has to see a product of x and frozen codes."""
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def linear(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    *,
    activation: str | None,
    format: str,
    group_size: int,
) -> Tensor:
    """x [..., K] @ dequant(packed [N, K]).T + bias [N] -> [..., N] in x's dtype; differentiable in x and bias.

    Without a gradient x is quantized once for all layers that read it, see `_rows`.
    """
    if needs_grad(x, bias):
        return _Linear.apply(x, bias, *packed, activation, format, group_size)
    if activation is None:
        return weight_only_mm(x, *packed, bias, format=format, group_size=group_size)
    rows = None if torch.compiler.is_compiling() else quantized_rows(x, activation, packed.qdata)
    if rows is not None:
        return quantized_mm(*rows, *packed, bias, format=format, group_size=group_size, out_dtype=x.dtype)
    return dynamic_mm(x, *packed, bias, activation=activation, format=format, group_size=group_size)


def ready_linear(x: Tensor, parameters: dict[str, Tensor | None], bias: Tensor | None, format: str) -> Tensor | None:
    """`linear`, the same bits, where an earlier call on CPU has left all but the product itself done; else None.

    A third of the time of `linear` for one token. No gradients, no subclasses, nothing traced.
    """
    if torch.compiler.is_compiling() or not is_plain(x) or needs_grad(x, bias):
        return None
    get = parameters.get
    weight = (parameters["qdata"], parameters["scale"], get("zero_point"), get("global_scale"))
    return ready_product(x, bias, *weight, format=format)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, qdata, scale, zero_point, global_scale, activation, format, group_size):
        ctx.save_for_backward(qdata, scale, zero_point, global_scale)
        ctx.format, ctx.group_size, ctx.K = format, group_size, x.shape[-1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        packed = PackedWeight(qdata, scale, zero_point, global_scale)
        y = linear(x, packed, bias, activation=activation, format=format, group_size=group_size)
        # A view that leaves a Function cannot be changed in place, as AdaLoRA does (`result += ...`).
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = weight_only_mm_backward(
                grad, *ctx.saved_tensors, format=ctx.format, group_size=ctx.group_size, K=ctx.K
            )
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_bias, None, None, None, None, None, None, None


def grouped_linear(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    offsets: Tensor,
    *,
    activation: str | None,
    format: str,
    group_size: int,
) -> Tensor:
    """x [M, K] sorted by expert, packed [E, N, K], bias [E, N] -> [M, N]; differentiable in x and bias."""
    if needs_grad(x, bias):
        return _GroupedLinear.apply(x, bias, offsets, *packed, activation, format, group_size)
    return grouped_mm(x, *packed, bias, offsets, activation=activation, format=format, group_size=group_size)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, offsets, qdata, scale, zero_point, global_scale, activation, format, group_size):
        ctx.save_for_backward(qdata, scale, zero_point, global_scale, offsets)
        ctx.format, ctx.group_size, ctx.K = format, group_size, x.shape[-1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        packed = PackedWeight(qdata, scale, zero_point, global_scale)
        y = grouped_mm(x, *packed, bias, offsets, activation=activation, format=format, group_size=group_size)
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *packed, offsets = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_mm_backward(grad, *packed, offsets, format=ctx.format, group_size=ctx.group_size, K=ctx.K)
        if ctx.needs_input_grad[1]:
            rows = torch.arange(grad.shape[0], dtype=offsets.dtype, device=grad.device)
            expert = torch.searchsorted(offsets, rows, right=True)  # E for rows of no expert
            sums = grad.new_zeros(offsets.shape[0] + 1, grad.shape[1], dtype=torch.float32)
            grad_bias = sums.index_add_(0, expert, grad.float())[:-1].to(ctx.bias_dtype)
        return grad_x, grad_bias, None, None, None, None, None, None, None, None
