"""Roundings that training sees, through which gradients pass unchanged, and rotations of weights and inputs."""

import torch
from torch import Tensor

from hf_quant.algorithms.driver import scale_rounder
from hf_quant.kernels import fake_quantize, fake_quantize_backward, hadamard_quantize_rowwise, quantize_rowwise
from hf_quant.modules import in_basis, rotated
from hf_quant.modules.products import autocast
from hf_quant.modules.rotation import rotated_back, signs
from hf_quant.scheme import LinearScheme


class FakeQuantize(torch.autograd.Function):
    """`fake_quantize`, differentiable in weight and scale."""

    @staticmethod
    def forward(ctx, weight, scale, zero_point, format, group_size):
        ctx.save_for_backward(weight, scale, zero_point)
        ctx.options = {"format": format, "group_size": group_size}
        return fake_quantize(weight, scale, zero_point, **ctx.options)

    @staticmethod
    def backward(ctx, grad):
        of_weight, of_scale = fake_quantize_backward(grad, *ctx.saved_tensors, **ctx.options)
        return of_weight, of_scale, None, None, None


class StoredScale(torch.autograd.Function):
    """Scales as their dtype can hold them, in fp32; the gradient passes through the rounding unchanged."""

    @staticmethod
    def forward(ctx, scale, dtype):
        return scale_rounder(dtype, None)(scale.abs()) * scale.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class InBasis(torch.autograd.Function):
    """`in_basis`, differentiable."""

    @staticmethod
    def forward(ctx, matrix, transform):
        ctx.transform, ctx.dtype = transform, matrix.dtype
        return in_basis(matrix, transform)

    @staticmethod
    def backward(ctx, grad):
        return rotated_back(grad, ctx.transform).to(ctx.dtype), None


class _Input(torch.autograd.Function):
    """An input [..., K] rotated, and rounded to the codes of its rows; the gradient passes through the rounding."""

    @staticmethod
    def forward(ctx, x, transform, format):
        ctx.transform = transform
        if format is None:
            return rotated(x, transform)
        if transform is None:
            codes, scale = quantize_rowwise(x, format=format)
        else:
            diagonal = signs(transform, x.shape[-1], x.device)
            codes, scale = hadamard_quantize_rowwise(x, diagonal, block_size=transform.block_size, format=format)
        return (codes.float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return rotated_back(grad, ctx.transform), None, None


def input_as_seen(x: Tensor, scheme: LinearScheme) -> Tensor:
    """An input [..., K] as the product of a quantized layer sees it, under autocast in its dtype; differentiable."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = autocast(x, device)
    format = scheme.activation_on(device)
    if format is None and scheme.input_transform is None:
        return x
    return _Input.apply(x, scheme.input_transform, format)
