"""`weight_only_mm`, its backward, and `dequantize` on CPU, by the native kernels or torch (see `cpu.product`)."""

import torch
from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.cpu.decode import Block, expand_rows, level_block, scale_values, weight_block
from hf_quant.kernels.cpu.paths import NATIVE_PATH, PATHS
from hf_quant.kernels.cpu.product import as_rows, product
from hf_quant.kernels.dispatch import Path, implements
from hf_quant.kernels.weight_only import op
from hf_quant.kernels.weight_only.op import check, check_weight


_BLOCK = 2**20  # weights dequantized at once
_BLOCK_BACKWARD = 2**22  # larger for the gradient: fewer partial products to add up


@implements(op.weight_only_mm, "CPU", paths=PATHS)
def weight_only_mm_cpu(
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
    """See `weight_only_mm_reference`; accuracy: `cpu.product`."""
    check(x, qdata, scale, zero_point, global_scale, bias, format, group_size)
    if bias is not None and bias.requires_grad:
        bias = bias.detach()
    y = product(as_rows(x), qdata, scale, zero_point, global_scale, bias, CODES[format], group_size)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


@implements(op.dequantize, "CPU", paths=(NATIVE_PATH, Path("torch, block by block", "any M", lambda problem: None)))
def dequantize_cpu(
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
    """See `dequantize_reference`: the same bits, in blocks of rows that stay in the cache."""
    check_weight(qdata, scale, zero_point, global_scale, format, group_size, K)
    *lead, N, _ = qdata.shape
    spec = CODES[format]
    refusal = native.refusal(spec, dtype, K, K if scale.shape[-1] == 1 else group_size)
    if len(lead) <= 1 and refusal is None and qdata.numel() and native.tensors_fit(scale, zero_point, spec):
        return native.dequantize(qdata, scale, zero_point, global_scale, spec, group_size, K, dtype)
    out = torch.empty(*lead, N, K, dtype=dtype)
    if out.numel() == 0:
        return out
    if scale.shape[-2] == N and global_scale is None:
        _dequantize_2d(
            out.view(-1, K),
            qdata.reshape(-1, qdata.shape[-1]),
            scale.reshape(-1, scale.shape[-1]),
            None if zero_point is None else zero_point.reshape(-1, scale.shape[-1]),
            None,
            format,
            group_size,
        )
        return out
    for i in torch.cartesian_prod(*(torch.arange(n) for n in lead)).view(-1, len(lead)).tolist() if lead else [()]:
        index = tuple(i)
        _dequantize_2d(
            out[index],
            qdata[index],
            scale[index],
            None if zero_point is None else zero_point[index],
            None if global_scale is None else (global_scale[index] if lead else global_scale),
            format,
            group_size,
        )
    return out


def _dequantize_2d(
    out: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    group_size: int,
) -> None:
    N, K = out.shape
    factor = expand_rows(scale_values(scale, global_scale).float(), N)
    zero = None if zero_point is None else expand_rows(zero_point, N)
    qdata, step = qdata.contiguous(), min(max(_BLOCK // max(K, 1), 1), N)
    block: Block | None = None
    for start in range(0, N, step):
        if block is None or start + step > N:
            n = min(step, N - start)
            block = weight_block(qdata, factor, zero, CODES[format], group_size, K, torch.float32, n)
        block.fill(start)
        out[start : start + step] = block.rows


@implements(op.weight_only_mm_backward, "CPU")
def weight_only_mm_backward_cpu(
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
    """See `weight_only_mm_backward_reference`; bf16 weights and products for a bf16 gradient, else fp32."""
    check_weight(qdata, scale, zero_point, global_scale, format, group_size, K)
    rows = as_rows(grad)
    grad_x = product_backward(rows, qdata, scale, zero_point, global_scale, format, group_size, K)
    return grad_x.view(*grad.shape[:-1], K)


def product_backward(
    grad: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    group_size: int,
    K: int,
) -> Tensor:
    """grad [M, N] contiguous @ dequant(w [N, K]) -> [M, K]; partial products of row blocks are added up in fp32."""
    M, N = grad.shape
    spec, qdata = CODES[format], qdata.contiguous()
    dtype = torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32
    factor = expand_rows(scale_values(scale, global_scale), N)
    zero_point = None if zero_point is None else expand_rows(zero_point, N)
    unscaled = dtype == torch.bfloat16 and factor.shape[1] == 1 and zero_point is None
    values = grad.to(dtype)
    if unscaled:  # the scale multiplies the gradient: M * N products instead of N * K
        values = values.float().mul_(factor.view(-1)).to(dtype)
    elif dtype == torch.bfloat16 and group_size >= 32:
        factor = factor.to(dtype)
    total = torch.zeros(M, K)
    step = min(max(_BLOCK_BACKWARD // max(K, 1), 1), N)
    for start in range(0, N, step):
        n = min(step, N - start)
        if start == 0 or n < step:
            if unscaled:
                weights, fill = level_block(qdata, spec, K, dtype, n)
            else:
                weights, fill = weight_block(qdata, factor, zero_point, spec, group_size, K, dtype, n)
        fill(start)
        part = values[:, start : start + n]
        if dtype == torch.float32:
            total.addmm_(part, weights)
        elif n == N:
            return torch.mm(part, weights)
        else:
            total.add_(torch.mm(part, weights))
    return total.to(grad.dtype)
