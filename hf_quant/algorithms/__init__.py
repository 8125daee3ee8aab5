"""How values are chosen: weight -> codes, scale, zero point.

An algorithm is one function in one file, `(values, format, symmetric, round_scale) -> (scale, zero_point)`; it sees
only the format's `encode` and `decode`, hence works for every format. Codes are then the nearest on the grid.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms.absmax import absmax
from hf_quant.formats import FORMATS, Format
from hf_quant.scheme import BLOCK_SIZE, TensorQuant


Algorithm = Callable[[Tensor, Format, bool, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor | None]]
ALGORITHMS: dict[str, Algorithm] = {"absmax": absmax}

_BLOCK_ELEMENTS = 2**20  # weights quantized at a time: temporaries stay in the cache and are reused


class PackedWeight(NamedTuple):
    """A quantized weight [..., N, K] in its canonical bytes (see `formats`); scales in their true dtype.

    qdata [..., N, K] or [..., N, words] int32; scale [..., N | 1 | ceil(N/128), groups]; zero_point uint8 of the
    scale's shape or None; global_scale fp32 [...] (at least [1]) or None.
    """

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None


def default_algorithm(quant: TensorQuant) -> str:
    """The best data-free algorithm for a format."""
    return "absmax"


def quantize_matrix(
    weight: Tensor, quant: TensorQuant, algorithm: str | None = None, *, name: str = "weight"
) -> PackedWeight:
    """Quantize weight [..., N, K] (fp16, bf16, fp32) on its device, in row blocks with bounded temporaries.

    `algorithm` is a key of ALGORITHMS, None the default for the format; `name` is what errors call the weight.
    Raises ValueError on NaN or inf, on an unknown algorithm, and on a weight without elements.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; allowed: {', '.join(ALGORITHMS)}")
    if not weight.is_floating_point() or weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(
            f"{name} is {tuple(weight.shape)} {weight.dtype}; needs a floating-point matrix [N, K] with elements"
        )
    choose = ALGORITHMS[algorithm or default_algorithm(quant)]
    packed = empty_packed(weight.shape, quant, weight.device)
    lead = weight.shape[:-2]
    for i in range(lead.numel()):
        index = torch.unravel_index(torch.tensor(i), lead) if lead else ()
        views = PackedWeight(*(t if t is None or not lead else t[index] for t in packed))
        _quantize_2d(weight[index] if lead else weight, quant, choose, views, name)
    return packed


def geometry(quant: TensorQuant, N: int, K: int) -> tuple[int, int]:
    """(rows, columns) of a [N, K] weight that share one scale."""
    if quant.granularity == "block":
        return BLOCK_SIZE, BLOCK_SIZE
    return (N if quant.granularity == "tensor" else 1), (quant.group_size or K)


def empty_packed(shape: torch.Size | tuple[int, ...], quant: TensorQuant, device) -> PackedWeight:
    """Uninitialized `PackedWeight` tensors for a weight of `shape` [..., N, K] (use device "meta" for sizes)."""
    *lead, N, K = shape
    spec = FORMATS[quant.format].spec
    rows, columns = geometry(quant, N, K)
    scale_shape = (*lead, -(-N // rows), -(-K // columns))
    scale_dtype = getattr(torch, quant.scale_dtype)
    width = FORMATS[quant.format].packed_width(K)
    return PackedWeight(
        qdata=torch.empty((*lead, N, width), dtype=spec.dtype, device=device),
        scale=torch.empty(scale_shape, dtype=scale_dtype, device=device),
        zero_point=None if quant.symmetric else torch.empty(scale_shape, dtype=torch.uint8, device=device),
        global_scale=(
            torch.empty(lead or (1,), dtype=torch.float32, device=device)
            if scale_dtype == torch.float8_e4m3fn
            else None
        ),
    )


def _quantize_2d(weight: Tensor, quant: TensorQuant, choose: Algorithm, out: PackedWeight, name: str) -> None:
    """Fill `out` with the quantized [N, K] weight, a block of rows at a time."""
    format, (N, K) = FORMATS[quant.format], weight.shape
    rows, columns = geometry(quant, N, K)
    if out.global_scale is not None:
        # The largest scale lands on the end of fp8's grid, as NVIDIA's recipe for nvfp4 has it.
        amax = torch.linalg.vector_norm(weight, float("inf"), dtype=torch.float32)
        _check_finite(amax, name)
        limit = format.max * torch.finfo(out.scale.dtype).max
        out.global_scale.copy_(torch.where(amax > 0, amax / limit, torch.ones_like(amax)))
    round_scale = scale_rounder(out.scale.dtype, out.global_scale)
    step = max(_BLOCK_ELEMENTS // K // rows * rows, rows)
    for start in range(0, N, step):
        block = _grouped(weight[start : start + step], rows, columns)  # [R, G, g]
        scale, zero_point = choose(block, format, quant.symmetric, round_scale)
        _check_finite(scale, name)
        values = block.div_(scale) if zero_point is None else block.div_(scale).round_().add_(zero_point)
        if zero_point is not None:
            values.sub_(2 ** (format.bits - 1))  # encode expects signed units
        count = min(step, N - start)
        codes = _ungrouped(format.encode(values), rows, columns, count, K)
        out.qdata[start : start + count] = format.pack(codes)
        at = slice(start // rows, -(-(start + count) // rows))
        stored = scale.squeeze(-1) if out.global_scale is None else scale.squeeze(-1) / out.global_scale
        out.scale[at] = stored.to(out.scale.dtype)
        if zero_point is not None:
            out.zero_point[at] = zero_point.squeeze(-1).to(torch.uint8)


def _grouped(block: Tensor, rows: int, columns: int) -> Tensor:
    """[n, K] -> fp32 copy [ceil(n/rows), ceil(K/columns), rows * columns], padded with zeros."""
    n, K = block.shape
    values = torch.empty(-(-n // rows) * rows, -(-K // columns) * columns, dtype=torch.float32, device=block.device)
    values[:n, :K] = block
    values[n:] = 0
    values[:n, K:] = 0
    if rows == 1:
        return values.view(values.shape[0], -1, columns)
    tiles = values.view(-1, rows, values.shape[1] // columns, columns).transpose(1, 2)
    return tiles.reshape(tiles.shape[0], tiles.shape[1], -1)


def _ungrouped(codes: Tensor, rows: int, columns: int, n: int, K: int) -> Tensor:
    """Inverse of `_grouped` for codes: [R, G, rows * columns] -> [n, K]."""
    if rows > 1:
        codes = codes.view(codes.shape[0], codes.shape[1], rows, columns).transpose(1, 2)
    return codes.reshape(codes.shape[0] * rows, -1)[:n, :K]


def scale_rounder(dtype: torch.dtype, global_scale: Tensor | None) -> Callable[[Tensor], Tensor]:
    """fp32 scale -> the nearest that the storage dtype can hold, as fp32; 0 becomes 1, nothing else rounds to 0."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * (info.eps if dtype != torch.float8_e8m0fnu else 1.0)
    unit = 1.0 if global_scale is None else global_scale

    def round_scale(scale: Tensor) -> Tensor:
        relative = scale / unit
        if dtype == torch.float8_e8m0fnu:
            # amax / 6 -> 2**floor(log2(amax) - 2), the rule of the OCP specification: round up from a mantissa of 4/3.
            mantissa, exponent = torch.frexp(relative * 1.5)
            stored = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
            stored = torch.where(relative.isfinite(), stored, relative)
        else:
            stored = relative.clamp(max=info.max).to(dtype).float()
        return torch.where(scale == 0, torch.ones_like(stored), stored.clamp(min=smallest)) * unit

    return round_scale


def _check_finite(statistic: Tensor, name: str) -> None:
    if not bool(torch.isfinite(statistic).all()):
        raise ValueError(f"{name} contains NaN or inf and cannot be quantized; repair the checkpoint or exclude it")
