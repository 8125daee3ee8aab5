"""Least-squares fits of scale and zero point to weights whose codes are given."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.algorithms.groups import Choice, Groups


def fit(
    groups: Groups,
    scale: Tensor,
    zero_point: Tensor | None,
    outliers: Callable[[Tensor], Tensor] | None = None,
) -> Choice:
    """The scale and zero point that fit the weights best by the codes that the given ones lead to.

    They are fitted together, then rounded: the zero point to an integer, after that the scale, to its dtype.
    `outliers(residual)` gives the part of each residual, in steps of the grid, that the fit leaves out.
    """
    product, square, *sums = groups.total(_moments, scale, zero_point, outliers)
    if zero_point is None:
        return Choice(stored_scale(groups, scale * (product / square).float(), otherwise=scale))
    levels, values = sums
    count, top = groups.count, 2**groups.format.bits - 1
    # weight / scale = slope * level + offset; weight 0 is the level -offset / slope.
    slope = (product * count - levels * values) / (square * count - levels.square())
    move = ((slope * levels - values) / (count * slope)).round_()
    move = (zero_point + torch.where(move.isfinite(), move, 0.0)).clamp_(0, top).sub_(zero_point)
    # Levels count from the new zero point now.
    product, square = product - move * values, square - 2 * move * levels + count * move.square()
    fitted = stored_scale(groups, scale * (product / square).float(), otherwise=scale)
    return Choice(fitted, zero_point + move.float())


def _moments(
    groups: Groups, scale: Tensor, zero_point: Tensor | None, outliers: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, ...]:
    """Sums over each group of weights v = weight / scale and the levels l of their codes, 0 at the zero point.

    <l, v>, <l, l>, and with a zero point also sum(l), sum(v): fp64 [R, G, 1].
    """
    value = groups.relative(scale, zero_point)
    level = groups.snapped(value)
    if outliers is not None:
        value.sub_(outliers(value - level))
    if zero_point is not None:
        value.sub_(groups.signed(zero_point))
        level.sub_(groups.signed(zero_point))
    sums = [groups.sum(value * level), groups.sum(level.square())]
    if zero_point is not None:
        sums += [groups.sum(level), groups.sum(value)]
    return tuple(sums)


def squares(groups: Groups, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums over each group of the squares of weight / scale and of its code's level: fp64 [R, G, 1]."""
    value = groups.relative(scale, zero_point)
    level = groups.snapped(value)
    if zero_point is not None:
        value.sub_(groups.signed(zero_point))
        level.sub_(groups.signed(zero_point))
    return groups.sum(value.square_()), groups.sum(level.square_())


def stored_scale(groups: Groups, scale: Tensor, *, otherwise: Tensor) -> Tensor:
    """A fitted scale of either sign as it can be stored; `otherwise` where the fit is no scale (0, NaN or inf)."""
    fits = scale.isfinite() & (scale != 0)
    return torch.where(fits, groups.round_scale(scale.abs()) * scale.sign(), otherwise)
