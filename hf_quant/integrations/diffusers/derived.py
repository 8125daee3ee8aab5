"""Make a model of parts of a quantized one: a ControlNet of a denoiser, a motion model of a UNet.

Class methods of diffusers (`from_unet`, `from_transformer`, `from_unet2d`) load state dicts of the given model's parts
into a new one, some with strict=False: codes would be left out, and the new layers would keep their random weights.
Within such a method the parts of a quantized model yield dequantized weights, and so they do where a method saves a
part (`save_motion_modules`). No list names these methods: every class method `from_...`, and every method `save_...`,
of a model class is wrapped, unless it is one of `ModelMixin`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import diffusers.models.modeling_utils as modeling_utils
from torch import Tensor, nn

from hf_quant.integrations.diffusers.quantizer import forget
from hf_quant.integrations.wrapping import wrap_once
from hf_quant.modules import STORED_NAMES, QuantizedModule, packed_key


_logger = logging.getLogger("hf_quant")


def register() -> None:
    """Wrap the methods of all model classes, also of those that are defined later. Further calls do nothing."""
    host = modeling_utils.ModelMixin
    if "__init_subclass__" not in vars(host):
        host.__init_subclass__ = classmethod(_wrap_subclass)
        for cls in _subclasses(host):
            _wrap_methods(cls)


def _wrap_subclass(cls: type, **kwargs: Any) -> None:
    """Replace `ModelMixin.__init_subclass__`."""
    super(modeling_utils.ModelMixin, cls).__init_subclass__(**kwargs)
    _wrap_methods(cls)


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _wrap_methods(cls: type) -> None:
    for name, method in list(vars(cls).items()):
        if hasattr(modeling_utils.ModelMixin, name):
            continue
        if name.startswith("from_") and isinstance(method, classmethod):
            wrap_once(cls, name, _of_weights)
        elif name.startswith("save_") and isinstance(method, FunctionType):
            wrap_once(cls, name, _saving_weights)


def _of_weights(host: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a class method that makes a model of another one."""

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, modeling_utils.ModelMixin) and _is_quantized(a)]
        if not given:
            return host(cls, *args, **kwargs)
        with weights_in_state_dicts(given):
            made = host(cls, *args, **kwargs)
        if isinstance(made, modeling_utils.ModelMixin) and not _is_quantized(made):
            forget(made)  # the config of the given model may have been taken over
            _logger.warning(
                "the new %s has the dequantized weights of the %s; hf_quant.quantize_(model, config) quantizes it too",
                *(type(made).__name__, type(given[0]).__name__),
            )
        return made

    return make


def _saving_weights(host: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that saves a part of a model."""

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        with weights_in_state_dicts([self]):
            return host(self, *args, **kwargs)

    return save


def _is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedModule) for module in model.modules())


@contextmanager
def weights_in_state_dicts(models: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager: state dicts of the models, and of their parts, have weights in place of codes."""

    def exchange(module: QuantizedModule, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any) -> None:
        for weight in module.weight_names:
            for part in STORED_NAMES:
                state_dict.pop(f"{prefix}{packed_key(part, weight)}", None)
            state_dict[f"{prefix}{weight}"] = module.dequantize_weight(weight)

    layers = (layer for model in models for layer in model.modules() if isinstance(layer, QuantizedModule))
    handles = [layer.register_state_dict_post_hook(exchange) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


register()
