"""mse: the scale (and zero point) with the smallest squared error: a clip search, then least squares.

A smaller scale clips the largest weights of a group and rounds all others more finely. Every candidate is judged by
the error of what would be stored, after its scale is rounded to the storage dtype, and the search starts from
`absmax`: it cannot lose to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms.absmax import absmax
from hf_quant.algorithms.fit import fit
from hf_quant.algorithms.groups import Choice, Groups, power_error
from hf_quant.formats import Format


class Search(NamedTuple):
    """The candidates that are tried for each group, in this order, besides `absmax`."""

    shrinks: tuple[float, ...] = ()  # clip factors
    turns: bool = False  # a negative scale turns the longer side of the grid to the longer side of the weights
    mirrors: bool = False  # each also with a scale of the other sign
    moves: bool = False  # each also with the zero point moved by -1 and by 1
    steps: tuple[float, ...] = ()  # then clip factors less and more by this than the best so far
    fits: bool = False  # last, the least-squares fit to the codes of the best so far


def mse(groups: Groups) -> Choice:
    """The smallest sum of squared errors found for each group."""
    return clip_search(groups).choice


class Best:
    """The best scale and zero point so far of each group, by the sum of |error|**power; starts at `absmax`."""

    def __init__(self, groups: Groups, power: float) -> None:
        self.groups, self.power = groups, power
        self.scale, self.zero_point, _ = absmax(groups)
        (self.error,) = groups.total(power_error, self.scale, self.zero_point, power)
        self.shrink = torch.ones_like(self.scale)  # of the candidate that is the best

    @property
    def choice(self) -> Choice:
        return Choice(self.scale, self.zero_point)

    def consider(self, choice: Choice, shrink: Tensor | None = None) -> None:
        """Take the candidate where its error is smaller."""
        scale, zero_point, _ = choice
        (error,) = self.groups.total(power_error, scale, zero_point, self.power)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        if zero_point is not None and self.zero_point is not None:
            self.zero_point = torch.where(better, zero_point, self.zero_point)
        if shrink is not None:
            self.shrink = torch.where(better, shrink, self.shrink)


def clip_search(groups: Groups) -> Best:
    """The best of: absmax, absmax with clipping, and the least-squares fit to the codes of the best of those."""
    best, search = Best(groups, 2.0), search_for(groups.format, groups.symmetric, groups.power_of_two_scales)
    top = 2**groups.format.bits - 1
    sign = torch.where(groups.high > -groups.low, -1.0, 1.0) if search.turns else 1.0
    for factor in search.shrinks:
        shrink = torch.full_like(best.shrink, factor)
        scale, zero_point, _ = absmax(groups, shrink)
        for move in (0, -1, 1) if search.moves else (0,):
            moved = None if zero_point is None else (zero_point + move).clamp_(0, top)
            best.consider(Choice(scale * sign, moved), shrink)
            if search.mirrors:
                best.consider(Choice(-scale * sign, moved), shrink)
    if search.mirrors:
        sign = best.scale.sign()
    for step in search.steps:
        for shrink in (best.shrink - step, best.shrink + step):
            scale = absmax(groups, shrink).scale
            best.consider(Choice(scale * sign, best.zero_point), shrink)
    if search.fits:
        best.consider(fit(groups, best.scale, best.zero_point))
    return best


def search_for(format: Format, symmetric: bool, power_of_two_scales: bool) -> Search:
    """The search for a grid and the kind of its scales."""
    if power_of_two_scales:
        return Search((0.5, 2.0))
    lowest, highest = _range(format)
    return Search(
        # Coarse to fine: the whole range first, then steps around the best.
        tuple(highest - 0.1 * i for i in range(round((highest - lowest) / 0.1) + 1)),
        # A two's complement grid reaches one step further down than up; a negative scale turns that side to where the
        # largest weight is. It costs nothing (the bytes and all arithmetic on them stay as they are) and takes a tenth
        # off the squared error of symmetric int4.
        turns=symmetric and format.spec.is_packed and format.spec.is_integer,
        # nf4 has eight levels above 0 and seven below: either way round fits half of the groups, which takes an eighth
        # off their squared error.
        mirrors=format.spec.is_packed and not format.spec.is_integer and format.spec.minifloat is None,
        # Few codes: the place of zero among them matters as much as the scale (2 % of the error at 2 bits, .1 % at 4).
        moves=not symmetric and format.bits < 4,
        steps=(0.05, 0.025),
        fits=True,
    )


def _range(format: Format) -> tuple[float, float]:
    """(smallest, largest) clip factor worth trying: the fewer codes, the smaller."""
    if format.spec.is_integer:
        return min(0.3 + 0.1 * format.bits, 0.9), 1.0
    # Levels thin out towards the ends: e2m1 gains from putting the largest weight on 4 instead of 6, nf4 on its last
    # but one (factors 1.5 and 1.38), and wider formats from the best phase within a power of two.
    return (0.8, 1.5) if format.bits == 4 else (0.9, 1.2)
