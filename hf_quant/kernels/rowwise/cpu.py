"""`quantize_rowwise` on CPU: the reference's arithmetic, bit for bit, on rows that stay in the cache."""

import torch
from torch import Tensor

from hf_quant.kernels._op import implements
from hf_quant.kernels.rowwise import op
from hf_quant.kernels.rowwise.op import ROW_FORMATS, row_max


_CHUNK = 2**18  # values that pass through the chain of elementwise ops at once: 1 MB in fp32


@implements(op.quantize_rowwise, "CPU")
def quantize_rowwise_cpu(x: Tensor, *, format: str) -> tuple[Tensor, Tensor]:
    """See `quantize_rowwise_reference`."""
    limit = row_max(format)
    if x.requires_grad:
        x = x.detach()
    codes = torch.empty(x.shape, dtype=ROW_FORMATS[format])
    if x.numel() == 0:
        return codes, torch.ones(*x.shape[:-1], 1)
    rows, flat = x.reshape(-1, x.shape[-1]), codes.view(-1, x.shape[-1])
    scale = row_scales(rows, limit)
    step = max(_CHUNK // x.shape[-1], 1)
    for start in range(0, rows.shape[0], step):
        block = slice(start, start + step)
        flat[block].copy_(row_codes(rows[block], scale[block], limit, format))
    return codes, scale.view(*x.shape[:-1], 1)


def row_scales(x: Tensor, limit: float) -> Tensor:
    """x [M, K] -> amax / limit [M, 1] in fp32; 1 for a row of zeros."""
    amax = row_amax(x)
    return torch.where(amax > 0, amax / limit, 1.0)


def row_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each row of x [M, K] -> [M, 1] in fp32; NaN if the row has one."""
    magnitudes = x.abs()
    if x.dtype == torch.bfloat16:
        # As integers they have the same order, NaN last, and a maximum takes a ninth of the time.
        return magnitudes.view(torch.int16).amax(1, keepdim=True).view(x.dtype).float()
    return magnitudes.amax(1, keepdim=True).float()


def row_codes(x: Tensor, scale: Tensor, limit: float, format: str) -> Tensor:
    """x [M, K] / scale [M, 1] in fp32: rounded for int8, for fp8 left to the conversion to float8."""
    values = torch.div(x, scale).clamp_(-limit, limit)
    return values.round_() if format == "int8" else values
