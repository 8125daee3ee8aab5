"""The quantized counterparts of the hosts' classes: registered ones, and those that are derived for subclasses."""

from typing import TYPE_CHECKING, Any

from torch import nn


if TYPE_CHECKING:
    from hf_quant.modules._base import QuantizedModule


_BASES: dict[type[nn.Module], type["QuantizedModule"]] = {}
_CLASSES: dict[type[nn.Module], type["QuantizedModule"]] = {}


def register_module(host_class: type[nn.Module], quantized: type["QuantizedModule"]) -> None:
    """Make instances of `host_class`, and of its subclasses, quantizable as `quantized`."""
    quantized.host_class, quantized.quantized_base = host_class, quantized
    _BASES[host_class] = _CLASSES[host_class] = quantized


def quantized_class(host_class: type[nn.Module]) -> "type[QuantizedModule] | None":
    """The quantized counterpart of a module class, None if there is none or it is quantized itself."""
    if hasattr(host_class, "quantized_base"):
        return None
    host_class = getattr(host_class, "_hf_quant_block_of", host_class)  # of a layer that has a native block
    if host_class not in _CLASSES:
        base = next((_BASES[c] for c in host_class.__mro__ if c in _BASES), None)
        if base is None:
            return None
        # The subclass's own methods come first: what its `super().forward` reaches is the quantized layer.
        derive_class(host_class, base, (host_class, base))
    return _CLASSES[host_class]


def derive_class(
    host_class: type[nn.Module], base: type["QuantizedModule"], bases: tuple[type, ...], **attributes: Any
) -> type["QuantizedModule"]:
    """Make (once) the quantized counterpart of a host class as a subclass of `bases`, with attributes of its own."""
    if host_class not in _CLASSES:
        namespace = {"host_class": host_class, "quantized_base": base, **attributes}
        _CLASSES[host_class] = type(f"Quant{host_class.__name__}", bases, namespace)
    return _CLASSES[host_class]


def check_model(model: Any, argument: str = "model") -> None:
    """Raise ValueError if a model is none: the name of one, a pipeline, ...; `argument` is what it was given as."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{argument} is a {type(model).__name__}; needs a torch.nn.Module: what from_pretrained of a model's "
            "class returns, or a part of a pipeline, such as pipe.transformer"
        )
