"""Row quantization on CPU: the reference's arithmetic on rows that stay in the cache, int8 by the native kernels."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.codes import ROW_FORMATS, row_max
from hf_quant.kernels.cpu.rows import row_amax, transform_rows
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.rowwise import op
from hf_quant.kernels.rowwise.op import row_scale


_CHUNK = 2**18  # values that pass through the chain of elementwise ops at once: 1 MB in fp32


@implements(op.quantize_rowwise, "CPU")
def quantize_rowwise_cpu(x: Tensor, seed: Tensor | None = None, *, format: str) -> tuple[Tensor, Tensor]:
    """Compute `quantize_rowwise_reference`, bit for bit."""
    op.check_seed(x, seed)
    limit = row_max(format)
    if x.requires_grad:
        x = x.detach()
    codes = torch.empty(x.shape, dtype=ROW_FORMATS[format])
    if x.numel() == 0:
        return codes, torch.ones(*x.shape[:-1], 1, dtype=torch.float32)
    rows, flat = x.reshape(-1, x.shape[-1]), codes.view(-1, x.shape[-1])
    found = None
    if format == "int8":
        found = native.quantize_rows(rows, seed=seed)
    elif seed is not None:
        found = native.quantize_rows_to_e4m3(rows, seed)
    if found is not None:
        return found[0].view(x.shape), found[1].view(*x.shape[:-1], 1)
    scale = row_scales(rows, limit)
    for block in _blocks(*rows.shape):
        values = row_codes(rows[block], scale[block], limit, format, rounded=seed is None)
        if seed is not None:
            bits = op.random_bits(seed, *values.shape, start=block.start)
            values = op.round_stochastically(values, bits, format=format)
        flat[block].copy_(values)
    return codes, scale.view(*x.shape[:-1], 1)


def row_scales(x: Tensor, limit: float) -> Tensor:
    """x [M, K] -> scales [M, 1] in fp32, see `row_scale`."""
    return row_scale(row_amax(x), limit)


def scales_of(x: Tensor, limit: float, input_scale: Tensor | None) -> Tensor:
    """x [M, K] -> scales [M, 1] in fp32: those of its rows, or input_scale [1] for each, NaN for a row with NaN."""
    if input_scale is None:
        return row_scales(x, limit)
    amax = row_amax(x)
    return torch.where(amax.isnan(), amax, input_scale)


def row_codes(x: Tensor, scale: Tensor, limit: float, format: str, *, rounded: bool = True) -> Tensor:
    """x [M, K] / scale [M, 1] in fp32: rounded for int8, for fp8 left to the conversion to float8."""
    values = torch.div(x, scale).clamp_(-limit, limit)
    return values.round_() if rounded and format == "int8" else values


def _blocks(M: int, K: int) -> list[slice]:
    """The rows of [M, K] in blocks of about `_CHUNK` values."""
    step = max(_CHUNK // max(K, 1), 1)
    return [slice(start, min(start + step, M)) for start in range(0, M, step)]


def quantize_blocks(
    x: Tensor,
    format: str,
    values: Callable[[slice], Tensor],
    diagonal: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize fp32 `values(rows)` [m, K], which x [..., K] makes, block by block; results of x's shape.

    `values` gets slices of the rows of x taken as [M, K]. A diagonal [K / b, b] transforms them first; input_scale [1]
    is the scale of every row.
    """
    limit, K = row_max(format), x.shape[-1]
    codes = torch.empty(x.shape, dtype=ROW_FORMATS[format])
    if x.numel() == 0:
        return codes, torch.ones(*x.shape[:-1], 1, dtype=torch.float32)
    flat = codes.view(-1, K)
    scale = torch.empty(flat.shape[0], 1, dtype=torch.float32)
    for block in _blocks(*flat.shape):
        part = values(block)
        if diagonal is not None:
            part = transform_rows(part, diagonal.shape[1], diagonal, torch.float32)
        scale[block] = scales_of(part, limit, input_scale)
        flat[block].copy_(row_codes(part, scale[block], limit, format))
    return codes, scale.view(*x.shape[:-1], 1)


@implements(op.quantize_static, "CPU")
@torch.no_grad()
def quantize_static_cpu(
    x: Tensor, input_scale: Tensor, input_diagonal: Tensor | None = None, *, format: str
) -> tuple[Tensor, Tensor]:
    """Compute `quantize_static_reference`, without a transform bit for bit."""
    op.check_static(x, input_scale, input_diagonal)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    block = 0 if input_diagonal is None else input_diagonal.shape[1]
    row_max(format)
    found = native.quantize_rows(rows, block, input_diagonal, input_scale) if format == "int8" else None
    if found is not None:
        return found[0].view(x.shape), found[1].view(*x.shape[:-1], 1)
    return quantize_blocks(x, format, lambda block: rows[block].float(), input_diagonal, input_scale)


@implements(op.rms_norm_quantize_rowwise, "CPU")
@torch.no_grad()
def rms_norm_quantize_rowwise_cpu(
    x: Tensor, weight: Tensor | None, input_diagonal: Tensor | None = None, *, eps: float, format: str
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_quantize_rowwise_reference`."""
    op.check_vector("weight", weight, x.shape[-1], input_diagonal)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return quantize_blocks(x, format, lambda block: op.rms_norm_values(rows[block], weight, eps), input_diagonal)


@implements(op.layer_norm_quantize_rowwise, "CPU")
@torch.no_grad()
def layer_norm_quantize_rowwise_cpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mod_scale: Tensor | None,
    mod_shift: Tensor | None,
    input_diagonal: Tensor | None = None,
    *,
    eps: float,
    format: str,
) -> tuple[Tensor, Tensor]:
    """Compute `layer_norm_quantize_rowwise_reference`."""
    op.check_layer_norm(x, weight, bias, mod_scale, mod_shift, input_diagonal)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def values(block: slice) -> Tensor:
        modulation = [
            None if part is None else op.modulation_rows(part, rows.shape[0], block) for part in (mod_scale, mod_shift)
        ]
        return op.layer_norm_values(rows[block], weight, bias, *modulation, eps)

    return quantize_blocks(x, format, values, input_diagonal)


@implements(op.act_quantize_rowwise, "CPU")
@torch.no_grad()
def act_quantize_rowwise_cpu(
    x: Tensor, up: Tensor | None, input_diagonal: Tensor | None = None, *, act: str, format: str
) -> tuple[Tensor, Tensor]:
    """Compute `act_quantize_rowwise_reference`."""
    op.check_act(x, up, act, input_diagonal)
    M, K = math.prod(x.shape[:-1]), x.shape[-1]
    rows, factors = x.reshape(M, K), None if up is None else up.reshape(M, K)

    def values(block: slice) -> Tensor:
        return op.act_values(rows[block], None if factors is None else factors[block], act)

    return quantize_blocks(x, format, values, input_diagonal)
