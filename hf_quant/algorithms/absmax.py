"""absmax: the scale puts the largest weight of a group on the end of the grid; asymmetric: min and max."""

import torch
from torch import Tensor

from hf_quant.algorithms._groups import Groups


def absmax(groups: Groups, shrink: float | Tensor = 1.0) -> tuple[Tensor, Tensor | None]:
    """-> (scale [R, G, 1] fp32, one that can be stored; zero_point or None).

    zero_point [R, G, 1] holds integers in [0, 2**bits - 1] as fp32; the range includes 0, so that 0 stays exact.
    `shrink` < 1 clips: it puts that part of the extremes on the ends of the grid.
    """
    if groups.symmetric:
        amax = torch.maximum(groups.high, -groups.low)
        return groups.round_scale(amax / groups.format.max * shrink), None
    top = 2**groups.format.bits - 1
    low, high = groups.low.clamp(max=0) * shrink, groups.high.clamp(min=0) * shrink
    scale = groups.round_scale((high - low) / top)
    return scale, torch.round(-low / scale).clamp_(0, top)
