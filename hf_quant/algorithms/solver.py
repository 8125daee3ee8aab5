"""`Solver`: algorithms that see the inputs of a layer, such as GPTQ (https://arxiv.org/abs/2210.17323).

A solver walks over the columns of one weight [N, K]. It asks the `Grid` for the scales of each group when it reaches
the group, with the weights as corrected by then, and for the values that can be stored. It returns the weights, each
as it was when it was rounded, and the scales: the driver stores the nearest codes. So a solver knows no format, no
packing and no dtype of scales, and serves all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.formats import Format
from hf_quant.kernels.codes import expand_rows
from hf_quant.scheme import TensorQuant


@dataclass(frozen=True)
class Statistics:
    """Means over the inputs x [K] that calibration has sent through one layer, in fp32; None: not recorded.

    Attributes:
        num_tokens: the number of inputs.
        amax: the largest magnitude of each feature [K].
        second_moment: the mean of x**2 [K].
        hessian: the mean of x x^T [K, K]; the squared error of the layer's output is the trace of dW H dW^T.
        held_out: some inputs [any, K] that are in none of the means.
        token_amax: the geometric mean over the inputs of their largest magnitude, a tensor of one value []: that of a
            usual token, however large a few others are.
    """

    num_tokens: int
    amax: Tensor | None = None
    second_moment: Tensor | None = None
    hessian: Tensor | None = None
    held_out: Tensor | None = None
    token_amax: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {size for tensor in self._recorded for size in tensor.shape}
        if len(sizes) != 1:
            raise ValueError(
                f"statistics have the sizes {sorted(sizes)}; needs amax [K], second_moment [K] or hessian [K, K] of "
                "one layer"
            )
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens is {self.num_tokens}; statistics are of one input at least")

    @property
    def _recorded(self) -> list[Tensor]:
        return [tensor for tensor in (self.amax, self.second_moment, self.hessian) if tensor is not None]

    def to(self, device: torch.device) -> "Statistics":
        """The same on another device."""
        moved = {name: t if t is None else t.to(device) for name, t in self._tensors.items()}
        return Statistics(self.num_tokens, **moved)

    @property
    def _tensors(self) -> dict[str, Tensor | None]:
        names = ("amax", "second_moment", "hessian", "held_out", "token_amax")
        return {name: getattr(self, name) for name in names}

    @property
    def num_features(self) -> int:
        """K, the width of the inputs."""
        return self._recorded[0].shape[0]


PackedScales = tuple[Tensor, Tensor | None, Tensor | None]  # scale, zero_point, global_scale in their own dtypes
Choose = Callable[
    [Tensor, Tensor | None], PackedScales
]  # of the weights of a group, and the importance of its columns


class Scales(NamedTuple):
    """The scales of one group of columns, as they are stored: fp32, for each row of the weight [N, 1]."""

    scale: Tensor
    zero_point: Tensor | None
    stored: tuple[Tensor, Tensor | None]  # (scale, zero_point) [rows of scales, 1] in their own dtypes


class Solution(NamedTuple):
    """The result of a solver."""

    weight: Tensor  # fp32 [N, K]; each weight as it was when it was rounded
    scales: list[Scales]  # of each group of columns, in their order


class Grid:
    """The values that one weight [N, K] may take.

    Attributes:
        format: the number format.
        group_size: columns of a group, which share their scales.
        num_groups: groups of columns; the last may be smaller.
    """

    def __init__(self, quant: TensorQuant, format: Format, K: int, choose: Choose) -> None:
        self.format, self.group_size = format, quant.columns_per_scale(K)
        self.num_groups = -(-K // self.group_size)
        self._choose = choose

    def columns(self, group: int) -> slice:
        """The columns of a group."""
        return slice(group * self.group_size, (group + 1) * self.group_size)

    def choose(self, weights: Tensor, importance: Tensor | None = None) -> Scales:
        """The scales that the algorithm without data chooses for the weights of one group [N, columns].

        `importance` [columns]: the weight of the squared errors of each column; None: all count alike.
        """
        scale, zero_point, global_scale = self._choose(weights, importance)
        values, N = scale.float(), weights.shape[0]
        if global_scale is not None:
            values = values * global_scale
        zeros = None if zero_point is None else expand_rows(zero_point.float(), N)
        return Scales(expand_rows(values, N), zeros, (scale, zero_point))

    def snap(self, weights: Tensor, scales: Scales) -> Tensor:
        """The values nearest to the weights [N, any] that can be stored with these scales."""
        offset = 0.0 if scales.zero_point is None else scales.zero_point - 2 ** (self.format.bits - 1)
        relative = weights / scales.scale
        relative = relative if scales.zero_point is None else relative.round_() + offset
        return (self.format.snap(relative, torch.empty_like(relative)) - offset) * scales.scale


Solver = Callable[[Tensor, Statistics, Grid], Solution]
