"""Products of experts in training on CPUs: expert by expert, by the paths of one product."""

import torch
from torch import Tensor

from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.grouped_mm.op import rows_of_experts
from hf_quant.kernels.grouped_scaled_mm import op
from hf_quant.kernels.scaled_mm.cpu import fp8_scaled_mm_cpu, int8_scaled_mm_cpu
from hf_quant.kernels.two_way.op import blocks_of


@implements(op.grouped_scaled_mm, "CPU")
def grouped_scaled_mm_cpu(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute `grouped_scaled_mm_reference`."""
    op.check(a, b, a_scale, b_scale, bias, offsets)
    multiply = int8_scaled_mm_cpu if a.dtype == torch.int8 else fp8_scaled_mm_cpu
    y = torch.zeros(len(a), b.shape[1], dtype=out_dtype)
    for e, rows in rows_of_experts(offsets):
        own_bias = None if bias is None else bias[e].detach()
        y[rows] = multiply(a[rows], b[e].contiguous(), a_scale[rows], b_scale[e], own_bias, out_dtype=out_dtype)
    return y


@implements(op.grouped_scaled_sums, "CPU")
def grouped_scaled_sums_cpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, *, M: int, out_dtype: torch.dtype
) -> Tensor:
    """Compute `grouped_scaled_sums_reference`."""
    op.check_sums(a, b, a_scale, b_scale, offsets, M=M)
    multiply = int8_scaled_mm_cpu if a.dtype == torch.int8 else fp8_scaled_mm_cpu
    N, K = a_scale.shape[1], b_scale.shape[1]
    y = torch.zeros(len(offsets), N, K, dtype=out_dtype)
    for (e, _, left), (_, _, right) in zip(blocks_of(a, N, offsets), blocks_of(b, K, offsets)):
        y[e] = multiply(left, right, a_scale[e], b_scale[e], None, out_dtype=out_dtype)
    return y
