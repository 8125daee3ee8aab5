"""nf4: the 16 levels of QLoRA (https://arxiv.org/abs/2305.14314, appendix E), quantiles of a normal distribution.

The published recipe in numbers: 8 positive and 7 negative quantiles, evenly spaced in probability between 0.5 and
0.9677083, and zero; normalized to [-1, 1].
"""

import torch
from torch import Tensor

from hf_quant.formats._format import Format
from hf_quant.kernels.codes import CodeSpec


_OFFSET = 0.9677083  # the mean of 1 - 1/(2*15) and 1 - 1/(2*16)


def _levels() -> tuple[float, ...]:
    def quantiles(count: int) -> Tensor:
        # The probabilities are those of fp32, as in the published table: bit for bit the same levels.
        return torch.special.ndtri(torch.linspace(_OFFSET, 0.5, count + 1)[:-1].double())

    positive, negative = quantiles(8), -quantiles(7)
    levels = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values.float()
    return tuple((levels / levels.max()).tolist())


_LEVELS = _levels()


def _encode(values: Tensor) -> Tensor:
    # bucketize sends a tie to the lower level; ties have no "even" side in a table.
    levels = torch.tensor(_LEVELS, dtype=torch.float64)
    midpoints = ((levels[1:] + levels[:-1]) / 2).float().to(values.device)
    return torch.bucketize(values, midpoints, out_int32=True).to(torch.uint8)


NF4 = Format(
    spec=CodeSpec("nf4", 4, torch.int32, (4,), _LEVELS),
    max=1.0,
    round=_encode,
    granularity="group",
    group_size=64,
)
