"""`weight_only_mm`, its backward, and `dequantize` on CPU, by the native kernels or torch (see `cpu.product`)."""

from functools import partial

import torch
from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.codes import expand_rows
from hf_quant.kernels.cpu.decode import Block, level_block, scale_values, weight_block
from hf_quant.kernels.cpu.product import NATIVE_PATH, PATHS, product
from hf_quant.kernels.cpu.rows import as_rows
from hf_quant.kernels.dispatch import Path, implements
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only import op
from hf_quant.kernels.weight_only.by_parts import by_parts


_BLOCK = 2**20  # weights dequantized at once
_BLOCK_BACKWARD = 2**22  # larger for the gradient: fewer partial products to add up


@implements(op.weight_only_mm, "CPU", paths=PATHS)
@takes_weight(op.check, transforms=True)
@partial(by_parts, knows=lambda x, w, bias: native.serves(w, x.dtype))
def weight_only_mm_cpu(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """Compute `weight_only_mm_reference`; accuracy: `cpu.product`."""
    if bias is not None and bias.requires_grad:
        bias = bias.detach()
    y = product(as_rows(x), w, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


@implements(op.dequantize, "CPU", paths=(NATIVE_PATH, Path("torch, block by block", "any M", lambda problem: None)))
@takes_weight(K_is_option=True)
def dequantize_cpu(w: Weight, *, dtype: torch.dtype) -> Tensor:
    """Compute `dequantize_reference`, bit for bit, in blocks of rows that stay in the cache."""
    qdata = w.qdata
    if qdata.dim() <= 3 and qdata.numel() and native.decodes(w, dtype):
        return native.dequantize(w, dtype)
    out = torch.empty(*qdata.shape[:-1], w.K, dtype=dtype)
    if out.numel() == 0:
        return out
    if w.scale.shape[-2] == w.N and w.global_scale is None:  # the rows of all matrices are those of one
        parts = (part if part is None else part.reshape(-1, part.shape[-1]) for part in w.packed)
        _dequantize_matrix(out.view(-1, w.K), Weight(*parts, *w[4:]))
    else:
        for matrix, part in zip(out.view(-1, w.N, w.K), _matrices(w)):
            _dequantize_matrix(matrix, part)
    return out


def _matrices(w: Weight) -> list[Weight]:
    """A weight [..., N, K] as weights [N, K]."""
    if w.qdata.dim() == 2:
        return [w]
    return [part for e in range(w.qdata.shape[0]) for part in _matrices(w.expert(e))]


def _dequantize_matrix(out: Tensor, w: Weight) -> None:
    w = w._replace(qdata=w.qdata.contiguous())
    factor = expand_rows(scale_values(w.scale, w.global_scale).float(), w.N)
    step = min(max(_BLOCK // max(w.K, 1), 1), w.N)
    block: Block | None = None
    for start in range(0, w.N, step):
        if block is None or start + step > w.N:
            block = weight_block(w, factor, torch.float32, min(step, w.N - start))
        block.fill(start)
        out[start : start + step] = block.rows


@implements(op.weight_only_mm_backward, "CPU")
@takes_weight(K_is_option=True)
def weight_only_mm_backward_cpu(grad: Tensor, w: Weight) -> Tensor:
    """Compute `weight_only_mm_backward_reference`; bf16 weights and products for a bf16 gradient, else fp32."""
    return product_backward(as_rows(grad), w).view(*grad.shape[:-1], w.K)


def product_backward(grad: Tensor, w: Weight) -> Tensor:
    """grad [M, N] contiguous @ dequant(w [N, K]) -> [M, K]; partial products of row blocks are added up in fp32."""
    M, N = grad.shape
    w = w._replace(qdata=w.qdata.contiguous())
    dtype = torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32
    factor = expand_rows(scale_values(w.scale, w.global_scale), N)
    unscaled = dtype == torch.bfloat16 and factor.shape[1] == 1 and w.zero_point is None
    values = grad.to(dtype)
    if unscaled:  # the scale multiplies the gradient: M * N products instead of N * K
        values = values.float().mul_(factor.view(-1)).to(dtype)
    elif dtype == torch.bfloat16 and w.group_size >= 32:
        factor = factor.to(dtype)
    total = torch.zeros(M, w.K, dtype=torch.float32)
    step = min(max(_BLOCK_BACKWARD // max(w.K, 1), 1), N)
    for start in range(0, N, step):
        n = min(step, N - start)
        if start == 0 or n < step:
            if unscaled:
                weights, fill = level_block(w.qdata, w.spec, w.K, dtype, n)
            else:
                weights, fill = weight_block(w, factor, dtype, n)
        fill(start)
        part = values[:, start : start + n]
        if dtype == torch.float32:
            total.addmm_(part, weights)
        elif n == N:
            return torch.mm(part, weights)
        else:
            total.add_(torch.mm(part, weights))
    return total.to(grad.dtype)
