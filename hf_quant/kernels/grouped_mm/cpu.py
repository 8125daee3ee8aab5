"""`grouped_mm` and its backward on CPU; no copy beyond a block.

The native kernels take all experts in one call, whose tasks are shared by the threads; the rest goes expert by expert,
by the paths of one product.
"""

from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.cpu.product import NATIVE_PATH, PATHS, product
from hf_quant.kernels.cpu.rows import as_rows
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.grouped_mm import op
from hf_quant.kernels.scaled_mm.cpu import INT8_PATH, dynamic_product
from hf_quant.kernels.weight import weight_of
from hf_quant.kernels.weight_only.cpu import product_backward


@implements(op.grouped_mm, "CPU", paths=(NATIVE_PATH, INT8_PATH, *PATHS[1:]))
def grouped_mm_cpu(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    *,
    activation: str | None,
    format: str,
    group_size: int,
) -> Tensor:
    """See `grouped_mm_reference`. M in the paths is the number of rows of one expert."""
    w = op.check(x, qdata, scale, zero_point, global_scale, bias, offsets, activation, format, group_size)
    x = as_rows(x)
    if bias is not None and bias.requires_grad:
        bias = bias.detach()
    integer = activation == "int8" and native.takes_int8(w.spec)
    if x.shape[0] > 0 and (activation is None or integer) and native.serves(w, x.dtype, int8=integer):
        return native.product(x, w, bias, integer=integer, ends=offsets.contiguous())
    y = x.new_zeros(x.shape[0], qdata.shape[1])
    for e, rows in op.rows_of_experts(offsets):
        expert, expert_bias = w.expert(e), None if bias is None else bias[e]
        if activation is None:
            y[rows] = product(x[rows], expert, expert_bias)
        else:
            y[rows] = dynamic_product(x[rows], expert, expert_bias, activation)
    return y


@implements(op.grouped_mm_backward, "CPU")
def grouped_mm_backward_cpu(
    grad: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    offsets: Tensor,
    *,
    format: str,
    group_size: int,
    K: int,
) -> Tensor:
    """See `grouped_mm_backward_reference`."""
    w = weight_of(qdata, scale, zero_point, global_scale, format, group_size, K)
    grad = as_rows(grad)
    grad_x = grad.new_zeros(grad.shape[0], K)
    for e, rows in op.rows_of_experts(offsets):
        grad_x[rows] = product_backward(grad[rows], w.expert(e))
    return grad_x
