"""`grouped_mm` and its backward on CPU; no copy beyond a block.

The native kernels take all experts in one call, whose tasks are shared by the threads; the rest goes expert by expert,
by the paths of one product.
"""

from functools import partial

from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.cpu.product import NATIVE_PATH, PATHS, product
from hf_quant.kernels.cpu.rows import as_rows
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.grouped_mm import op
from hf_quant.kernels.scaled_mm.cpu import INT8_PATH, dynamic_product
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.by_parts import by_parts
from hf_quant.kernels.weight_only.cpu import product_backward


def _knows(x: Tensor, w: Weight, bias: Tensor | None, offsets: Tensor, *, activation: str | None) -> bool:
    """True if the native kernels take floating-point zero points."""
    return activation is None and native.serves(w, x.dtype)


@implements(op.grouped_mm, "CPU", paths=(NATIVE_PATH, INT8_PATH, *PATHS[1:]))
@takes_weight(op.check, transforms=True, quantizes=True)
@partial(by_parts, knows=_knows)
def grouped_mm_cpu(x: Tensor, w: Weight, bias: Tensor | None, offsets: Tensor, *, activation: str | None) -> Tensor:
    """Compute `grouped_mm_reference`. M in the paths is the number of rows of one expert."""
    x = as_rows(x)
    if bias is not None and bias.requires_grad:
        bias = bias.detach()
    integer = activation == "int8" and native.takes_int8(w.spec)
    if x.shape[0] > 0 and (activation is None or integer) and native.serves(w, x.dtype, int8=integer):
        return native.product(x, w, bias, integer=integer, ends=offsets.contiguous())
    y = x.new_zeros(x.shape[0], w.N)
    for e, rows in op.rows_of_experts(offsets):
        expert, expert_bias = w.expert(e), None if bias is None else bias[e]
        if activation is None:
            y[rows] = product(x[rows], expert, expert_bias)
        else:
            y[rows] = dynamic_product(x[rows], expert, expert_bias, activation)
    return y


@implements(op.grouped_mm_backward, "CPU")
@takes_weight(K_is_option=True)
def grouped_mm_backward_cpu(grad: Tensor, w: Weight, offsets: Tensor) -> Tensor:
    """Compute `grouped_mm_backward_reference`."""
    grad = as_rows(grad)
    grad_x = grad.new_zeros(grad.shape[0], w.K)
    for e, rows in op.rows_of_experts(offsets):
        grad_x[rows] = product_backward(grad[rows], w.expert(e))
    return grad_x
