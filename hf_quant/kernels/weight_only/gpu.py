"""Weight-only products on a GPU: dequantize into x's dtype, then the vendor's GEMM.

Traffic per call: the codes once, the 16-bit weight once out and once in: about (b/16 + 2) times what a bf16 GEMM
reads, so it saves memory, not time, below some hundred rows; above, the GEMM dominates.
"""

import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels._op import Path, implements
from hf_quant.kernels.weight_only.op import check, check_weight, dequantize, weight_only_mm, weight_only_mm_backward


DENSE = (Path("dequantize + GEMM", "any M", lambda problem: None),)


@implements(weight_only_mm, "XPU", DENSE)
@implements(weight_only_mm, "CUDA", DENSE)
def weight_only_mm_gpu(
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
    """See `weight_only_mm_reference`; the weight is rounded to x's dtype before the product."""
    check(x, qdata, scale, zero_point, global_scale, bias, format, group_size)
    weight = dequantize(
        qdata, scale, zero_point, global_scale, format=format, group_size=group_size, K=x.shape[-1], dtype=x.dtype
    )
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


@implements(weight_only_mm_backward, "XPU", DENSE)
@implements(weight_only_mm_backward, "CUDA", DENSE)
def weight_only_mm_backward_gpu(
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
    """See `weight_only_mm_backward_reference`; the weight is rounded to grad's dtype before the product."""
    check_weight(qdata, scale, zero_point, global_scale, format, group_size, K)
    weight = dequantize(
        qdata, scale, zero_point, global_scale, format=format, group_size=group_size, K=K, dtype=grad.dtype
    )
    return grad @ weight
