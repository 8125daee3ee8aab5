"""`ReadyProduct`: the product of one layer on a CPU as earlier calls have found it, for eager calls without gradients.

A small layer takes longer to be checked than to be multiplied with. What the checks depend on is watched instead: the
layer's parameters, where their data is, and the counts of changes of those whose values were checked.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_quant.kernels import prepack
from hf_quant.kernels.cpu import Run
from hf_quant.kernels.native.places import Place, entries_of, place_of, unchanged


if TYPE_CHECKING:
    from hf_quant.modules._base import QuantizedModule


READY = "_ready"  # the attribute of a layer with its ready products, {dtype of x: product}; copies begin without
_CHECKED = ("zero_point", "input_scale")  # parameters whose values decide whether a product may be computed
_version = Tensor._version.__get__  # type: ignore[attr-defined]


def versions_of(tensors: Iterable[Tensor]) -> list[Any]:
    """`numbers` of a place, which change when one of the tensors is written in place."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    return [part for tensor in counted for part in (partial(_version, tensor), tensor._version)]


class ReadyProduct:
    """The product of a layer that has these parameters; it holds them until it finds another one in their place."""

    __slots__ = ("K", "parameters", "place", "run")

    def __init__(self, K: int, parameters: dict[str, Tensor | None], held: dict[str, Tensor | None], run: Run) -> None:
        """Take `run`, which multiplies x [..., K] with what the parameters of a layer were then, `held`."""
        tensors = {name: value for name, value in held.items() if value is not None}
        zeros = tensors.get("zero_point")
        # What floating-point zero points add to a product is made of them and of the scales.
        names = _CHECKED if zeros is None or zeros.dtype == torch.uint8 else (*_CHECKED, "scale")
        numbers = versions_of(value for name, value in tensors.items() if name in names)
        entries: list[Any] = [part for name, value in held.items() for part in (parameters, name, value)]
        entries += entries_of(prepack.era)
        self.K, self.parameters, self.run = K, parameters, run
        self.place: Place | None = place_of(entries, numbers, (), list(tensors.values()))

    def __call__(self, x: Tensor, bias: Tensor | None, parameters: dict[str, Tensor | None]) -> Tensor | None:
        """The output for a plain x, None if it has to be computed as if there were no such product."""
        place = self.place
        if place is None or parameters is not self.parameters or x.shape[-1] != self.K or not x.is_cpu:
            return None
        if unchanged(place):
            return self.run(x if x.is_contiguous() else x.contiguous(), parameters["qdata"], bias)
        self.place = None
        return None


def make_ready(module: "QuantizedModule", x: Tensor, held: dict[str, Tensor | None], run: Run) -> None:
    """Let further calls of a layer with plain x [..., K] of this dtype go by `run`, made for the parameters `held`.

    Not if a host has hooked its forward to put other parameters in their place at every call (offloading).
    """
    if "forward" not in module.__dict__:
        ready = module.__dict__.setdefault(READY, {})
        ready[x.dtype] = ReadyProduct(x.shape[-1], module._parameters, held, run)
