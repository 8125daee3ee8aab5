"""Rows of activations on CPU: their shape, their largest magnitude, and factors on the rows of a product."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.sign_matrices import transform


_BLOCK = 2**20  # values that pass through a chain of elementwise ops at once: temporaries stay in the cache


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K], contiguous, without autograd (what `out=` needs)."""
    if x.requires_grad:
        x = x.detach()
    if x.is_contiguous():
        return x if x.dim() == 2 else x.view(-1, x.shape[-1])
    return x.reshape(-1, x.shape[-1]).contiguous()


def row_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each row of x [M, K] -> [M, 1] in fp32; NaN if the row has one."""
    magnitudes = x.abs()
    if x.dtype == torch.bfloat16:
        # As integers they have the same order, NaN last, and a maximum takes a ninth of the time.
        return magnitudes.view(torch.int16).amax(1, keepdim=True).view(x.dtype).float()
    return magnitudes.amax(1, keepdim=True).float()


def row_vector(scale: Tensor, N: int, dtype: torch.dtype) -> Tensor:
    """Scales [N | 1, 1] -> [N], contiguous: torch's kernels ignore strides here."""
    if scale.dtype != dtype:
        scale = scale.to(dtype)
    if scale.shape[0] != N:
        scale = scale.repeat(N, 1)
    return (scale if scale.is_contiguous() else scale.contiguous()).view(-1)


def scaled(
    y: Tensor, row_factor: Tensor | None, factor: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(y [M, N] * row_factor [M, 1] * factor [N] + bias [N]) in fp32 -> dtype; y may be overwritten."""
    M, step = y.shape[0], max(_BLOCK // max(y.shape[1], 1), 1)
    if M > step:
        out = y if y.dtype == dtype else y.new_empty(y.shape, dtype=dtype)
        for start in range(0, M, step):
            rows = slice(start, start + step)
            out[rows] = scaled(y[rows], None if row_factor is None else row_factor[rows], factor, bias, dtype)
        return out
    total = y.float()
    if row_factor is not None:
        total.mul_(row_factor)
    if factor is not None:
        total.mul_(factor)
    if bias is not None:
        total.add_(bias)
    return total.to(dtype)


def transform_rows(
    x: Tensor,
    block_size: int,
    diagonal: Tensor | None,
    dtype: torch.dtype,
    by: Callable[[Tensor, int, Tensor | None], Tensor] = transform,
) -> Tensor:
    """x [M, K], not fp64, times the diagonal and the Hadamard matrix of each block, in fp32 -> [M, K] in `dtype`.

    `by` computes rows in torch, where the native kernels do not.
    """
    y = native.transform_rows(x, block_size, diagonal, dtype)
    if y is not None:
        return y
    y = torch.empty(x.shape, dtype=dtype)
    step = max(_BLOCK // 8 // max(x.shape[1], 1), 1)
    for start in range(0, x.shape[0], step):
        y[start : start + step] = by(x[start : start + step].float(), block_size, diagonal)
    return y
