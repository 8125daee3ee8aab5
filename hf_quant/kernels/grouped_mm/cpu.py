"""`grouped_mm` and its backward on CPU; no copy beyond a block.

The native kernels take all experts in one call, whose tasks are shared by the threads; the rest goes expert by expert,
by the paths of one product.
"""

from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.cpu.paths import NATIVE_PATH, PATHS
from hf_quant.kernels.cpu.product import as_rows, product
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.grouped_mm import op
from hf_quant.kernels.rowwise.op import row_max
from hf_quant.kernels.scaled_mm.cpu import INT8_PATH, dynamic_product
from hf_quant.kernels.weight_only.cpu import product_backward
from hf_quant.kernels.weight_only.op import check_weight


def _experts(offsets: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) for each expert that has rows."""
    ends = offsets.tolist()
    return [(e, slice(start, end)) for e, (start, end) in enumerate(zip([0, *ends], ends)) if end > start]


def _expert(tensor: Tensor | None, e: int) -> Tensor | None:
    return None if tensor is None else tensor[e]


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
    op.check(x, qdata, scale, zero_point, global_scale, bias, offsets, activation, format, group_size)
    x = as_rows(x)
    if bias is not None and bias.requires_grad:
        bias = bias.detach()
    spec = CODES[format]
    integer = activation == "int8" and native.takes_int8(spec)
    group = x.shape[1] if scale.shape[-1] == 1 else group_size
    refusal = native.refusal(spec, x.dtype, x.shape[1], group, int8=integer)
    in_one_call = refusal is None and (activation is None or integer) and native.tensors_fit(scale, zero_point, spec)
    if in_one_call and x.shape[0] > 0:
        weight = (qdata, scale, zero_point, global_scale)
        return native.product(x, *weight, bias, spec, group, integer=integer, ends=offsets.contiguous())
    y = x.new_zeros(x.shape[0], qdata.shape[1])
    for e, rows in _experts(offsets):
        weight = (qdata[e], scale[e], _expert(zero_point, e), _expert(global_scale, e), _expert(bias, e))
        if activation is None:
            y[rows] = product(x[rows], *weight, spec, group_size)
        else:
            y[rows] = dynamic_product(x[rows], *weight, activation, row_max(activation), format, group_size)
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
    check_weight(qdata, scale, zero_point, global_scale, format, group_size, K)
    grad = as_rows(grad)
    grad_x = grad.new_zeros(grad.shape[0], K)
    for e, rows in _experts(offsets):
        weight = (qdata[e], scale[e], _expert(zero_point, e), _expert(global_scale, e))
        grad_x[rows] = product_backward(grad[rows], *weight, format, group_size, K)
    return grad_x
