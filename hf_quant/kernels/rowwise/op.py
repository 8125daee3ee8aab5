"""`quantize_rowwise`: dynamic quantization of activations, one fp32 scale per row (token)."""

import torch
from torch import Tensor

from hf_quant.kernels._op import define_op


ROW_FORMATS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


def row_max(format: str) -> float:
    """Largest magnitude of a row format: 127 for int8 (symmetric), 448 for fp8_e4m3."""
    if format not in ROW_FORMATS:
        raise ValueError(f"activation format is {format!r}; allowed: {', '.join(ROW_FORMATS)}")
    dtype = ROW_FORMATS[format]
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def quantize_rowwise_reference(x: Tensor, *, format: str) -> tuple[Tensor, Tensor]:
    """x [..., K] floating -> (codes [..., K] int8 | float8_e4m3fn, scale [..., 1] fp32), x ~ codes * scale.

    Both contiguous. scale = amax / max; a row of zeros gets scale 1. int8 rounds half to even. Not differentiable.
    """
    limit = row_max(format)
    values = x.float()
    amax = values.abs().amax(-1, keepdim=True) if x.shape[-1] else values.new_zeros((*x.shape[:-1], 1))
    scale = torch.where(amax > 0, amax / limit, torch.ones_like(amax))
    codes = (values / scale).clamp(-limit, limit)
    return (codes.round() if format == "int8" else codes).to(ROW_FORMATS[format]).contiguous(), scale


def _quantize_rowwise_fake(x, *, format):
    row_max(format)
    return x.new_empty(x.shape, dtype=ROW_FORMATS[format]), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


quantize_rowwise = define_op("quantize_rowwise", quantize_rowwise_reference, _quantize_rowwise_fake)
