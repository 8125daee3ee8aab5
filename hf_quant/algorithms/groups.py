"""`Groups`, the view of a weight that an algorithm gets: values that share a scale, and sums over them."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.formats import Format


class Choice(NamedTuple):
    """The decision of an algorithm for groups [R, G, 1].

    scale: fp32, one that can be stored. zero_point: integers in [0, 2**bits - 1] as fp32, or None. divisor: the codes
    are those nearest to weight / divisor; None: to weight / scale.
    """

    scale: Tensor
    zero_point: Tensor | None = None
    divisor: Tensor | None = None


class Groups:
    """A block of R x G groups of g weights; the weights of a group share a scale (and a zero point).

    The buffers belong to the driver and are reused from block to block: a fresh temporary costs more in page faults
    than the arithmetic on it. Padding is zeros, which every grid holds exactly: they add nothing to any sum.

    Attributes:
        values: the weights, fp32 [R, G, g].
        format, symmetric: what they are quantized to.
        round_scale: positive fp32 scale -> the nearest that can be stored, as fp32.
        power_of_two_scales: whether only powers of two can be stored.
        count: sum of the importance of a group; without importance its size, padding included.
        importance: weight of each squared error, fp32, broadcast to `values`; None: all count alike.
    """

    def __init__(
        self,
        values: Tensor,
        work: Tensor,
        spare: Tensor,
        *,
        format: Format,
        symmetric: bool,
        round_scale: Callable[[Tensor], Tensor],
        power_of_two_scales: bool,
        importance: Tensor | None = None,
    ) -> None:
        self.values, self._work, self._spare = values, work, spare
        self.importance = importance
        self.format, self.symmetric = format, symmetric
        self.round_scale, self.power_of_two_scales = round_scale, power_of_two_scales
        self.count = values.shape[-1] if importance is None else total(importance)

    @cached_property
    def low(self) -> Tensor:
        """Smallest weight of each group, [R, G, 1]."""
        return self.values.amin(-1, keepdim=True)

    @cached_property
    def high(self) -> Tensor:
        """Largest weight of each group, [R, G, 1]."""
        return self.values.amax(-1, keepdim=True)

    def total(self, function: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
        """`function(block, *args)`, sums over each group [R, G, 1], for groups that may be larger than a block."""
        return function(self, *args)

    def sum(self, terms: Tensor) -> Tensor:
        """The sum of `terms` [R, G, g], each times its importance, over each group: fp64 [R, G, 1]; see `total`."""
        return total(terms if self.importance is None else terms * self.importance)

    def relative(self, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """The weights on the grid's scale: values / scale + signed zero point [R, G, g]. In a scratch buffer."""
        relative = torch.div(self.values, scale, out=self._work)
        return relative if zero_point is None else relative.add_(self.signed(zero_point))

    def snapped(self, relative: Tensor) -> Tensor:
        """The grid values nearest to `relative` [R, G, g]. In another scratch buffer."""
        return self.format.snap(relative, self._spare)

    def codes(self, choice: Choice) -> Tensor:
        """Codes [R, G, g], the nearest on the grid."""
        divisor = choice.scale if choice.divisor is None else choice.divisor
        relative = torch.div(self.values, divisor, out=self._work)
        if choice.zero_point is not None:
            relative.round_().add_(self.signed(choice.zero_point))
        return self.format.round(relative)

    def signed(self, zero_point: Tensor) -> Tensor:
        """The grid value of weight 0: zero_point counts from the lowest code, the grid from 0."""
        return zero_point - 2 ** (self.format.bits - 1)


class TensorGroups(Groups):
    """A whole matrix as one group: sums run over its blocks, each of them [1, 1, n]."""

    def __init__(self, blocks: Callable[[], Iterator[Groups]]) -> None:
        self._blocks = blocks
        self.count = 0
        for i, block in enumerate(blocks()):
            if i == 0:
                self.format, self.symmetric = block.format, block.symmetric
                self.round_scale, self.power_of_two_scales = block.round_scale, block.power_of_two_scales
                self.low, self.high = block.low, block.high
            self.low, self.high = torch.minimum(self.low, block.low), torch.maximum(self.high, block.high)
            self.count += block.count

    def total(self, function: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
        parts = [function(block, *args) for block in self._blocks()]
        return tuple(torch.stack(terms).sum(0) for terms in zip(*parts))


def total(values: Tensor) -> Tensor:
    """Sum over each group of fp32 [R, G, g]: fp64 [R, G, 1].

    It rounds so finely that what is chosen by such sums does not depend on the order of adding up, and with it on the
    device, the instruction set or the number of threads.
    """
    return values.sum(-1, keepdim=True, dtype=torch.float64)


def power_error(groups: Groups, scale: Tensor, zero_point: Tensor | None, power: float) -> tuple[Tensor]:
    """Sum over each group of |what would be stored - weight|**power: fp64 [R, G, 1], whose range holds any power."""
    relative = groups.relative(scale, zero_point)
    error, unit = groups.snapped(relative).sub_(relative), scale.abs().double()
    if power == 2:
        return (groups.sum(error.square_()) * unit.square_(),)
    return (groups.sum(error.abs_().pow_(power)) * unit.pow_(power),)
