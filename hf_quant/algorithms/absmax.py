"""absmax: the scale puts the largest weight of a group on the end of the grid; asymmetric: min and max."""

import torch
from torch import Tensor

from hf_quant.algorithms.groups import Choice, Groups
from hf_quant.kernels.codes import divided


def absmax(groups: Groups, shrink: float | Tensor = 1.0) -> Choice:
    """`shrink` < 1 clips: it puts that part of the extremes on the ends of the grid.

    An asymmetric range includes 0, so that 0 stays exact.
    """
    if groups.symmetric:
        amax = torch.maximum(groups.high, -groups.low)
        return Choice(groups.round_scale(divided(amax, groups.format.max) * shrink))
    top = 2**groups.format.bits - 1
    low, high = groups.low.clamp(max=0) * shrink, groups.high.clamp(min=0) * shrink
    scale = groups.round_scale(divided(high - low, top))
    return Choice(scale, torch.round(-low / scale).clamp_(0, top))
