"""Layers in training: the host's modules with other classes, which keep their parameters and their names.

Optimizers, PEFT, FSDP and `state_dict` see what they saw before.
"""

import inspect
from typing import Any, SupportsIndex

from torch import Tensor, nn

from hf_quant.modules import QuantizedModule, check_model, quantized_class, runs_its_class


class LayerInTraining(nn.Module):
    """Mixin of all such layers. Instances come from a change of `__class__`, not from a constructor.

    Attributes:
        family: the name of the layers that are trained in one way, the prefix of their classes.
        host_class: the class that the layer had before, and has again afterwards.
    """

    is_in_training = True  # by which `quantize_` knows such layers
    family: str
    host_class: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        # As in QuantizedModule: PEFT builds adapters by `type(base_layer)(in, out, ...)`.
        return cls.host_class(*args, **kwargs) if args or kwargs else object.__new__(cls)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> tuple[Any, ...]:
        return _rebuild, (self.host_class, self.family), self.__dict__

    @property
    def quantized(self) -> type[QuantizedModule]:
        """The quantized counterpart of the host's class."""
        return counterpart(self.host_class)

    def matrix(self, name: str, weight: Tensor | None = None) -> Tensor:
        """A weight, its own by default, as a matrix [..., N, K] in the host's basis; a view where that is one."""
        own = getattr(self, name) if weight is None else weight
        # `to_matrix` reads only what the host's module has.
        return self.quantized.to_matrix(self, name, own)  # pyrefly: ignore[bad-argument-type]


FAMILIES: dict[str, dict[str, type[LayerInTraining]]] = {}  # {family: {kind of the quantized counterpart: its layer}}
_CLASSES: dict[tuple[type[nn.Module], str], type[LayerInTraining]] = {}


def counterpart(host_class: type[nn.Module]) -> type[QuantizedModule]:
    """The quantized counterpart of the class of a planned layer."""
    found = quantized_class(host_class)
    assert found is not None  # it was planned
    return found


def class_in_training(host_class: type[nn.Module], family: str) -> type[LayerInTraining]:
    """The class that layers of a host's class have in training, as `quantized_class` derives that of codes.

    A subclass's own methods come first: what its `super().forward` reaches is the layer in training.
    """
    key = (host_class, family)
    if key not in _CLASSES:
        quantized = counterpart(host_class)
        bases: tuple[type, ...] = (FAMILIES[family][quantized.kind], host_class)
        if quantized.kind != "experts" and host_class is not quantized.quantized_base.host_class:
            bases = (host_class, class_in_training(quantized.quantized_base.host_class, family))
        _CLASSES[key] = type(f"{family}{host_class.__name__}", bases, {"host_class": host_class})
    return _CLASSES[key]


def reason_not_called(model: nn.Module, name: str, *, in_evaluation: bool = True) -> str:
    """The reason why a planned layer in training would not compute all of its outputs; empty if it would.

    in_evaluation: what only happens in evaluation mode without gradients counts, too.
    """
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "torch's attention multiplies with its weight by itself"
    if isinstance(parent, nn.TransformerEncoderLayer) and in_evaluation:
        return "torch's encoder layer multiplies with its weight by itself in evaluation mode"
    if not runs_its_class(module):
        return "something has replaced its forward"
    quantized = counterpart(type(module))
    if not any(quantized.kind in kinds for kinds in FAMILIES.values()):
        return f"a {type(module).__name__} multiplies with its weights by itself"
    own = inspect.unwrap(type(module).forward)
    is_own = quantized.kind != "experts" and own is not quantized.quantized_base.host_class.forward
    code = getattr(own, "__code__", None)
    if is_own and (code is None or "forward" not in code.co_names):  # of `super().forward`
        return f"the forward of {type(module).__name__} multiplies with its weight by itself"
    return ""


def check_trainable(model: nn.Module) -> None:
    """Raise ValueError if a part of a model is quantized, or in training already, or the model is none."""
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            raise ValueError(f"{name or 'the model'} is quantized: train the 16-bit model, or adapters of this one")
        if isinstance(module, LayerInTraining):
            raise ValueError(f"{name or 'the model'} is in training already: finish_training_ or convert_qat_ first")


# Pickles of whole models hold the name of this function and of this file.
def _rebuild(host_class: type[nn.Module], family: str) -> nn.Module:
    """Unpickle: an instance of the class in training, which another process may not have derived yet."""
    module = host_class.__new__(host_class)
    module.__class__ = class_in_training(host_class, family)
    return module
