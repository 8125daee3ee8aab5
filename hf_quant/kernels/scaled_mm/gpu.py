"""Products with quantized activations on a GPU: the codes, exact in 16 bit, times the dequantized weight."""

import torch
from torch import Tensor

from hf_quant.kernels._op import implements
from hf_quant.kernels.rowwise.op import quantize_rowwise
from hf_quant.kernels.scaled_mm.op import dynamic_mm
from hf_quant.kernels.weight_only.gpu import DENSE
from hf_quant.kernels.weight_only.op import check, dequantize


@implements(dynamic_mm, "XPU", DENSE)
@implements(dynamic_mm, "CUDA", DENSE)
def dynamic_mm_gpu(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    *,
    activation: str,
    format: str,
    group_size: int,
) -> Tensor:
    """See `dynamic_mm_reference`; the weight is rounded to the product's dtype first."""
    check(x, qdata, scale, zero_point, global_scale, bias, format, group_size)
    codes, row_scale = quantize_rowwise(x, format=activation)
    # int8 and fp8 codes are exact in bf16. A sum of 127 * w can pass fp16's 65504, hence fp32 there.
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    weight = dequantize(
        qdata, scale, zero_point, global_scale, format=format, group_size=group_size, K=x.shape[-1], dtype=dtype
    )
    y = (codes.to(dtype) @ weight.t()).float() * row_scale
    return (y if bias is None else y + bias.float()).to(x.dtype)
