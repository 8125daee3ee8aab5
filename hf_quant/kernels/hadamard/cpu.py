"""Hadamard transforms on CPU in fp32: butterflies of the native kernels or of torch, or products with factors."""

import math

import torch
from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.codes import row_max
from hf_quant.kernels.cpu.rows import transform_rows
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.hadamard import op
from hf_quant.kernels.rowwise.cpu import quantize_blocks
from hf_quant.kernels.sign_matrices import transform


@implements(op.hadamard, "CPU")
@torch.no_grad()
def hadamard_cpu(x: Tensor, diagonal: Tensor | None = None, *, block_size: int | None = None) -> Tensor:
    """Compute `hadamard_reference`; fp64 in fp64, anything else in fp32.

    With a power of two the bits are those of the native kernels, with them and without: so are codes of weights.
    """
    n = op.check(x, block_size, diagonal)
    if x.dtype == torch.float64:
        return op.hadamard_reference(x, diagonal, block_size=block_size)
    by = transform if n & (n - 1) else _butterflies
    return transform_rows(x.reshape(-1, x.shape[-1]), n, diagonal, x.dtype, by).view(x.shape)


def _butterflies(x: Tensor, n: int, diagonal: Tensor | None) -> Tensor:
    """x [M, K] in fp32 times the diagonal and the matrix of each block of n, by sums and differences in a fixed order.

    In turn those of values that are 1, 2, 4, ... places apart, as in `rotation.h` of the native kernels.
    """
    y = (x if diagonal is None else x * diagonal.view(-1)).t().contiguous()  # each sum is then of whole rows
    other, half = torch.empty_like(y), 1
    while half < n:
        (low, high), (sums, differences) = (part.view(-1, 2, half, len(x)).unbind(1) for part in (y, other))
        torch.add(low, high, out=sums)
        torch.sub(low, high, out=differences)
        y, other, half = other, y, 2 * half
    return (y * (1 / math.sqrt(n))).t()


@implements(op.hadamard_quantize_rowwise, "CPU")
@torch.no_grad()
def hadamard_quantize_rowwise_cpu(
    x: Tensor, diagonal: Tensor | None = None, *, block_size: int | None = None, format: str
) -> tuple[Tensor, Tensor]:
    """Compute `hadamard_quantize_rowwise_reference`; the transform is computed in fp32."""
    n = op.check(x, block_size, diagonal)
    row_max(format)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    found = native.quantize_rows(rows, n, diagonal) if format == "int8" else None
    if found is not None:
        return found[0].view(x.shape), found[1].view(*x.shape[:-1], 1)
    return quantize_blocks(x, format, lambda block: transform_rows(rows[block], n, diagonal, torch.float32))
