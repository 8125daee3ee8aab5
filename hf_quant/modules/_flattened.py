"""Weights of convolutions as matrices, and the norm of `torch.nn.utils.weight_norm`."""

import math
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from hf_quant.modules._base import QuantizedModule, weight_property


class FlattenedWeight(QuantizedModule):
    """Base of modules whose weight of any dimensions is quantized as a matrix [first dimension, all others]."""

    @classmethod
    def matrix_shape_of(cls, module: nn.Module, shape: tuple[int, ...], name: str = "weight") -> tuple[int, ...]:
        return shape[0], math.prod(shape[1:])

    def to_matrix(self, name: str, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def from_matrix(self, name: str, matrix: Tensor) -> Tensor:
        return matrix.view(self.weight_shape(name))


class ConvWeight(FlattenedWeight):
    """Base of quantized convolutions: of `weight`, or of its direction `weight_v` if a hook norms it before a call."""

    weight = weight_property("weight")
    weight_v = weight_property("weight_v")

    @classmethod
    def weight_names_of(cls, module: nn.Module) -> tuple[str, ...]:
        return ("weight_v",) if "weight_v" in module._parameters else ("weight",)

    @property
    def is_normed(self) -> bool:
        """True if torch's hook makes the weight of its direction and its magnitude `weight_g`."""
        return self.weight_names == ("weight_v",)

    def converted(self) -> None:
        if self.is_normed:
            self.drop_normed()

    @classmethod
    def restored(cls, module: nn.Module) -> None:
        if "weight_v" in module._parameters:
            module.__dict__["weight"] = _norm_of(module).compute_weight(module)

    def drop_normed(self) -> None:
        """Free the 16-bit weight that the hook has left."""
        self.__dict__.pop("weight", None)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.is_normed:  # read between two calls
            return _norm_of(self).compute_weight(self)
        return super().__getattr__(name)


def _norm_of(module: nn.Module) -> WeightNorm:
    return next(hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm))
