"""Weights with floating-point zero points: codes between the ends of each group, and the best numbers for them."""

import torch
from torch import Tensor

from hf_quant.formats import FORMATS
from hf_quant.kernels.weight import PackedWeight
from hf_quant.scheme import TensorQuant


_CHUNK = 2**20  # weights at a time, which bounds the temporaries
_FITS = 2


def unused_scale(dtype: torch.dtype) -> float:
    """The scale of a group whose codes are all 0, with a floating-point zero point.

    As small as products of normal numbers allow: what kernels take from a sum and add to it is next to nothing.
    """
    return max(torch.finfo(dtype).smallest_normal, 2.0**-110)


def quantize_with_float_zeros(weight: Tensor, quant: TensorQuant, packed: PackedWeight) -> bool:
    """Fill the packed tensors of weight [..., N, K]; False if it has NaN or inf, which makes them worthless.

    A weight is code * scale + zero_point. Both numbers start from the minimum and the maximum of a group; then they
    are twice those that fit the group best in the least squares, by its codes, and the better ones are kept.
    """
    K, format = weight.shape[-1], FORMATS[quant.format]
    assert packed.zero_point is not None
    rows, qdata = weight.reshape(-1, K), packed.qdata.view(-1, packed.qdata.shape[-1])
    scale, zero_point = (part.view(len(rows), -1) for part in (packed.scale, packed.zero_point))
    step = max(_CHUNK // max(K, 1), 1)
    for start in range(0, len(rows), step):
        at, size = slice(start, start + step), quant.columns_per_scale(K)
        groups = _in_groups(rows[at].float(), size)
        codes, scale[at], zero_point[at] = _fitted(groups, quant)
        codes = codes.to(torch.uint8 if format.spec.is_packed else torch.int8)
        qdata[at] = format.pack(codes.flatten(1)[:, :K])
    return bool(weight.isfinite().all())


def _in_groups(rows: Tensor, size: int) -> Tensor:
    """rows [n, K] -> [n, groups, size]; the last group is filled up with its last value, which moves neither end."""
    missing = -rows.shape[1] % size
    if missing:
        rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], 1)
    return rows.view(len(rows), -1, size)


def _fitted(groups: Tensor, quant: TensorQuant) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, groups, size] in fp32, and (scale, zero_point) [n, groups] in their stored dtypes."""
    first, last = _ends(quant)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / (last - first)
    best = _encoded(groups, scale, low - first * scale, quant)
    for _ in range(_FITS):
        codes, _, _, error = best
        mean, middle = groups.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
        spread = (codes - middle).square().sum(-1, keepdim=True)
        scale = ((codes - middle) * groups).sum(-1, keepdim=True) / spread.clamp(min=1.0)
        found = _encoded(groups, scale, mean - scale * middle, quant)
        better = found[3] < error
        best = tuple(torch.where(better, new, old) for new, old in zip(found, best))
    codes, scale, zero_point, _ = best
    return codes, scale.squeeze(-1), zero_point.squeeze(-1)


def _ends(quant: TensorQuant) -> tuple[int, int]:
    """The smallest and the largest code as they are stored."""
    spec = FORMATS[quant.format].spec
    return (0, 2**spec.bits - 1) if spec.is_packed else (-128, 127)


def _encoded(
    groups: Tensor, scale: Tensor, zero_point: Tensor, quant: TensorQuant
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, scale, zero_point, squared error) of groups, where scale and zero point are rounded as they are stored.

    A scale of 0, of equal weights, becomes `unused_scale`.
    """
    dtype = getattr(torch, quant.scale_dtype)
    scale = scale.to(dtype)
    scale = torch.where(scale > 0, scale, unused_scale(dtype))
    zero_point = zero_point.to(getattr(torch, quant.zero_point_dtype))
    s, z = scale.float(), zero_point.float()
    codes = ((groups - z) / s).round_().clamp_(*_ends(quant))
    error = (codes * s + z - groups).square_().sum(-1, keepdim=True)
    return codes, scale, zero_point, error
