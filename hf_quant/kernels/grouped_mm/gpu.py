"""Expert products on a GPU: one expert at a time, dequantized, then the vendor's GEMM.

The loop reads the offsets on the host: one synchronization a call, and no CUDA graph.
"""

from torch import Tensor

from hf_quant.kernels._op import implements
from hf_quant.kernels.grouped_mm.op import check, grouped_mm, grouped_mm_backward
from hf_quant.kernels.scaled_mm.op import dynamic_mm
from hf_quant.kernels.weight_only.gpu import DENSE
from hf_quant.kernels.weight_only.op import check_weight, weight_only_mm, weight_only_mm_backward


def _experts(offsets: Tensor, *weight: Tensor | None):
    """(slice of rows, weight tensors) of each expert that has rows."""
    start = 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            yield slice(start, end), tuple(None if t is None else t[e] for t in weight)
        start = end


@implements(grouped_mm, "XPU", DENSE)
@implements(grouped_mm, "CUDA", DENSE)
def grouped_mm_gpu(
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
    """See `grouped_mm_reference`."""
    check(x, qdata, scale, zero_point, global_scale, bias, offsets, activation, format, group_size)
    y = x.new_zeros(x.shape[0], qdata.shape[1])
    for rows, weight in _experts(offsets, qdata, scale, zero_point, global_scale, bias):
        if activation is None:
            y[rows] = weight_only_mm(x[rows], *weight, format=format, group_size=group_size)
        else:
            y[rows] = dynamic_mm(x[rows], *weight, activation=activation, format=format, group_size=group_size)
    return y


@implements(grouped_mm_backward, "XPU", DENSE)
@implements(grouped_mm_backward, "CUDA", DENSE)
def grouped_mm_backward_gpu(
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
    grad_x = grad.new_zeros(grad.shape[0], K)
    for rows, weight in _experts(offsets, qdata, scale, zero_point, global_scale):
        grad_x[rows] = weight_only_mm_backward(grad[rows], *weight, format=format, group_size=group_size, K=K)
    return grad_x
