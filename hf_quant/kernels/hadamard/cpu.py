"""Hadamard transforms on CPU: butterflies of the native kernels, or products with the dense factors in fp32."""

import math

import torch
from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.codes import row_max
from hf_quant.kernels.cpu.rows import transform_rows
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.hadamard import op
from hf_quant.kernels.rowwise.cpu import quantize_blocks


@implements(op.hadamard, "CPU")
@torch.no_grad()
def hadamard_cpu(x: Tensor, diagonal: Tensor | None = None, *, block_size: int | None = None) -> Tensor:
    """Compute `hadamard_reference`; fp64 in fp64, anything else in fp32."""
    n = op.check(x, block_size, diagonal)
    if x.dtype == torch.float64:
        return op.hadamard_reference(x, diagonal, block_size=block_size)
    return transform_rows(x.reshape(-1, x.shape[-1]), n, diagonal, x.dtype).view(x.shape)


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
