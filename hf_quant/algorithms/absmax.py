"""absmax: the scale puts the largest weight of a group on the end of the grid; asymmetric: min and max."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.formats import Format


def absmax(
    values: Tensor, format: Format, symmetric: bool, round_scale: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """values [R, G, g] fp32 -> (scale [R, G, 1] fp32, already rounded to its storage dtype; zero_point or None).

    zero_point [R, G, 1] holds integers in [0, 2**bits - 1] as fp32; the range includes 0, so that 0 stays exact.
    """
    if symmetric:
        return round_scale(values.abs().amax(-1, keepdim=True) / format.max), None
    top = 2**format.bits - 1
    low = values.amin(-1, keepdim=True).clamp_(max=0)
    high = values.amax(-1, keepdim=True).clamp_(min=0)
    scale = round_scale((high - low) / top)
    return scale, torch.round(-low / scale).clamp_(0, top)
