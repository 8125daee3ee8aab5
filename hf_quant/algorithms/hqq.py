"""hqq: half-quadratic quantization, with integer zero points.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023,
https://mobiusml.github.io/hqq_blog/: minimize |w - w'|_p^p with p < 1, which forgives a few large errors, by splitting
off sparse outliers e: min over e, scale, zero point of |e|_p^p + beta / 2 * |w - w' - e|_2^2. In turns, e is the
residual shrunk towards 0, and scale and zero point are a least-squares fit to w - e; beta grows.

Here residuals are counted in steps of the grid, so that the result does not depend on the unit of the weights. The
published method keeps absmax's scale and stores a fractional zero point; since zero points are integers here, the
scale is fitted too, and it alone where the grid is symmetric. The iterate with the smallest |w - w'|_p^p is kept; the
first is `absmax`.
"""

from functools import partial

from torch import Tensor

from hf_quant.algorithms.fit import fit
from hf_quant.algorithms.groups import Choice, Groups
from hf_quant.algorithms.mse import Best


POWER = 0.7  # as published
_BETA, _BETA_GROWTH, _ITERATIONS = 1.0, 1.5, 6


def hqq(groups: Groups) -> Choice:
    """The best of a few half-quadratic steps from `absmax`."""
    best = Best(groups, POWER)
    choice = best.choice
    if groups.power_of_two_scales:
        return choice
    for i in range(_ITERATIONS):
        outliers = partial(_outliers, beta=_BETA * _BETA_GROWTH**i)
        choice = fit(groups, choice.scale, choice.zero_point, outliers)
        best.consider(choice)
    return best.choice


def _outliers(residual: Tensor, beta: float) -> Tensor:
    """argmin over e of |e|**p + beta / 2 * (residual - e)**2: the shrinkage |r| - p / beta * |r|**(p - 1)."""
    magnitude = residual.abs()
    return magnitude.sub_(magnitude.pow(POWER - 1).mul_(POWER / beta)).clamp_(min=0).copysign_(residual)
