"""Hadamard transforms on CPU: products with the dense factors in fp32, on rows that stay in the cache."""

import math

import torch
from torch import Tensor

from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.hadamard import op
from hf_quant.kernels.rowwise.cpu import quantize_blocks


_CHUNK = 2**17  # values at once: 512 KB, and as much again for the product


@implements(op.hadamard, "CPU")
@torch.no_grad()
def hadamard_cpu(x: Tensor, *, block_size: int | None = None) -> Tensor:
    """Compute `hadamard_reference`; fp64 in fp64, anything else in fp32."""
    n = op.check(x, block_size)
    if x.dtype == torch.float64:
        return op.hadamard_reference(x, block_size=block_size)
    y = torch.empty(x.shape, dtype=x.dtype)
    rows, flat = x.reshape(-1, n), y.view(-1, n)
    step = max(_CHUNK // n, 1)
    for start in range(0, rows.shape[0], step):
        flat[start : start + step] = op.transform(rows[start : start + step].float(), n)
    return y


@implements(op.hadamard_quantize_rowwise, "CPU")
@torch.no_grad()
def hadamard_quantize_rowwise_cpu(x: Tensor, *, block_size: int | None = None, format: str) -> tuple[Tensor, Tensor]:
    """Compute `hadamard_quantize_rowwise_reference`; the transform is computed in fp32."""
    n = op.check(x, block_size)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return quantize_blocks(x, format, lambda block: op.transform(rows[block].float(), n))
