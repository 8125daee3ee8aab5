"""`hadamard`: the orthonormal Walsh-Hadamard transform along the last dimension, alone and with row quantization.

The matrices are those of `kernels.sign_matrices`: symmetric, so that a transform is its own inverse.
"""

import torch
from torch import Tensor

from hf_quant.kernels.codes import ROW_FORMATS, row_max
from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.rowwise.op import quantize_rowwise_reference
from hf_quant.kernels.sign_matrices import odd_factor, transform


def check(x: Tensor, block_size: int | None, diagonal: Tensor | None = None) -> int:
    """The size of the transforms: block_size, or K of x [..., K].

    Raises ValueError if it is none or does not fit, or if diagonal is neither None nor K values in fp32.
    """
    K = x.shape[-1]
    n = K if block_size is None else block_size
    odd_factor(n)
    if K % n:
        raise ValueError(f"block_size is {n}; it must divide the last dimension of x, {K}")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; needs a floating dtype")
    if diagonal is not None and (diagonal.numel() != K or diagonal.dtype != torch.float32):
        raise ValueError(f"diagonal is {tuple(diagonal.shape)} {diagonal.dtype}; needs {K} values in torch.float32")
    return n


def hadamard_reference(x: Tensor, diagonal: Tensor | None = None, *, block_size: int | None = None) -> Tensor:
    """x [..., K] -> (x * diagonal) @ H in x's dtype, in fp64 from dense factors; H of K, or of blocks of `block_size`.

    diagonal: K values in fp32, of any shape; None: ones, and then the transform is its own inverse. Not
    differentiable; `differentiable_hadamard` is.
    """
    return transform(x.double(), check(x, block_size, diagonal), diagonal).to(x.dtype).contiguous()


def _hadamard_fake(x, diagonal=None, *, block_size=None):
    check(x, block_size, diagonal)
    return x.new_empty(x.shape)


hadamard = define_op("hadamard", hadamard_reference, _hadamard_fake, is_row_by_row=True)


def hadamard_quantize_rowwise_reference(
    x: Tensor, diagonal: Tensor | None = None, *, block_size: int | None = None, format: str
) -> tuple[Tensor, Tensor]:
    """`quantize_rowwise` of the transform of x [..., K] in fp32, without rounding it to x's dtype; see `hadamard`."""
    n = check(x, block_size, diagonal)
    return quantize_rowwise_reference(transform(x.double(), n, diagonal).float(), format=format)


def _hadamard_quantize_rowwise_fake(x, diagonal=None, *, block_size=None, format):
    check(x, block_size, diagonal)
    row_max(format)
    return x.new_empty(x.shape, dtype=ROW_FORMATS[format]), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


hadamard_quantize_rowwise = define_op(
    "hadamard_quantize_rowwise", hadamard_quantize_rowwise_reference, _hadamard_quantize_rowwise_fake
)


class _Hadamard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block_size):
        ctx.block_size = block_size
        return hadamard(x, block_size=block_size)

    @staticmethod
    def backward(ctx, grad):
        return hadamard(grad, block_size=ctx.block_size), None


def differentiable_hadamard(x: Tensor, *, block_size: int | None = None) -> Tensor:
    """`hadamard` with its gradient: the transform of the output's, as the matrix is symmetric."""
    return _Hadamard.apply(x, block_size)
