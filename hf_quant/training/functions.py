"""Roundings that training sees, through which gradients pass unchanged, and rotations of weights and inputs."""

from typing import Any

import torch
from torch import Tensor

from hf_quant.algorithms.driver import scale_rounder
from hf_quant.kernels import fake_quantize, fake_quantize_backward, hadamard_quantize_rowwise, quantize_rowwise
from hf_quant.kernels.codes import expand_scale
from hf_quant.kernels.dispatch import is_transformed
from hf_quant.modules import in_basis, rotated
from hf_quant.modules.products import autocast
from hf_quant.modules.rotation import rotated_back, signs
from hf_quant.scheme import LinearScheme


class FakeQuantize(torch.autograd.Function):
    """`fake_quantize`, differentiable in weight and scale, as often as wanted."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight, scale, zero_point, format, group_size):
        return fake_quantize(weight, scale, zero_point, format=format, group_size=group_size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        *tensors, ctx.format, ctx.group_size = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        of_weight, of_scale = _of_gradient(FakeQuantizeBackward, grad, *ctx.saved_tensors, ctx.format, ctx.group_size)
        return of_weight, of_scale, None, None, None


class FakeQuantizeBackward(torch.autograd.Function):
    """`fake_quantize_backward`, differentiable in the gradient that it is given.

    It is linear in that gradient. Its factors have no derivatives: level - weight / scale counts as a constant, as
    rounding passes gradients unchanged.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grad, weight, scale, zero_point, format, group_size):
        return fake_quantize_backward(grad, weight, scale, zero_point, format=format, group_size=group_size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, *tensors, ctx.format, ctx.group_size = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, of_weight, of_scale):
        weight, scale, zero_point = ctx.saved_tensors
        options = {"format": ctx.format, "group_size": ctx.group_size}
        N, K = weight.shape[-2:]
        inside = fake_quantize_backward(torch.ones_like(weight), weight, scale, zero_point, **options)[0]
        change = fake_quantize(weight, scale, zero_point, **options).float() - inside * weight.float()
        by_scale = expand_scale(of_scale / scale, N, K, ctx.group_size)
        return (of_weight * inside + by_scale * change).to(weight.dtype), *[None] * 5


class StoredScale(torch.autograd.Function):
    """Scales as their dtype can hold them, in fp32; the gradient passes through the rounding unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scale, dtype):
        return scale_rounder(dtype, None)(scale.abs()) * scale.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class InBasis(torch.autograd.Function):
    """`in_basis`, differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix, transform):
        return in_basis(matrix, transform)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        matrix, ctx.transform = inputs
        ctx.dtype = matrix.dtype

    @staticmethod
    def backward(ctx, grad):
        return _of_gradient(RotatedBack, grad, ctx.transform).to(ctx.dtype), None


class RotatedBack(torch.autograd.Function):
    """`rotated_back`, differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values, transform):
        return rotated_back(values, transform)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.transform = inputs

    @staticmethod
    def backward(ctx, grad):
        return rotated(grad, ctx.transform), None


class _Input(torch.autograd.Function):
    """An input [..., K] rotated, and rounded to the codes of its rows; the gradient passes through the rounding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, transform, format):
        if format is None:
            return rotated(x, transform)
        if transform is None:
            codes, scale = quantize_rowwise(x, format=format)
        else:
            diagonal = signs(transform, x.shape[-1], x.device)
            codes, scale = hadamard_quantize_rowwise(x, diagonal, block_size=transform.block_size, format=format)
        y = codes.float() * scale
        # torch.compile of torch 2.11 loses the gradient of a result that `.to` returns as it is.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.transform, _ = inputs

    @staticmethod
    def backward(ctx, grad):
        return _of_gradient(RotatedBack, grad, ctx.transform), None, None


def _of_gradient(function: type[torch.autograd.Function], grad: Tensor, *arguments: Any) -> Any:
    """Apply a function to a gradient and further arguments, as a part of the graph if the gradient is in one."""
    if not torch.compiler.is_compiling() and (grad.requires_grad or is_transformed()):
        return function.apply(grad, *arguments)
    return function.forward(grad, *arguments)


def input_as_seen(x: Tensor, scheme: LinearScheme) -> Tensor:
    """An input [..., K] as the product of a quantized layer sees it, under autocast in its dtype; differentiable."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = autocast(x, device)
    format = scheme.activation_on(device)
    if format is None and scheme.input_transform is None:
        return x
    return _Input.apply(x, scheme.input_transform, format)
