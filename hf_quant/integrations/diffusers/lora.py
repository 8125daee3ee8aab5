"""Load LoRA weights into a quantized Flux transformer by diffusers' own `load_lora_weights`.

diffusers looks up "<layer>.weight" in the transformer's state dict and reads its shape and device. A quantized layer
has no such key, so it gets one for the time of the look-up only: offloading would take a permanent one for a weight.
`hf_quant._boot` imports this module after diffusers has loaded its LoRA loaders, which takes seconds, never before.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import diffusers.loaders.lora_pipeline as lora_pipeline
import torch
from torch import Tensor, nn

from hf_quant.integrations.diffusers.quantizer import refresh_plan
from hf_quant.integrations.wrapping import wrap_once
from hf_quant.modules import QuantizedModule, QuantLinear, restore_module_


_logger = logging.getLogger("hf_quant")


def register() -> None:
    """Wrap two functions of diffusers' loader. Further calls do nothing."""
    for name, wrap in _WRAPPERS.items():
        wrap_once(lora_pipeline.FluxLoraLoaderMixin, name, wrap)


def _look_up(host: Callable) -> Callable:
    """Wrap the function that pads adapters with fewer input features than the layer has."""

    def with_weights(cls: type, transformer: nn.Module, lora_state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        with _weight_keys(transformer):
            return host(cls, transformer, lora_state_dict)

    return with_weights


def _widen(host: Callable) -> Callable:
    """Wrap the function that replaces layers if the adapter has more features (image input of control adapters)."""

    def with_plain_layers(
        cls: type,
        transformer: nn.Module,
        lora_state_dict: dict[str, Tensor] | None = None,
        norm_state_dict: dict[str, Tensor] | None = None,
        prefix: str | None = None,
    ) -> bool:
        _restore_narrow_layers_(transformer, lora_state_dict or {}, prefix or cls.transformer_name)
        return host(cls, transformer, lora_state_dict, norm_state_dict, prefix)

    return with_plain_layers


_WRAPPERS = {"_maybe_expand_lora_state_dict": _look_up, "_maybe_expand_transformer_param_shape_or_error_": _widen}


@contextmanager
def _weight_keys(model: nn.Module) -> Iterator[None]:
    """Context manager: `model.state_dict()` has a weight of one element, in the right shape, per quantized layer."""

    def add(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any) -> None:
        for name, layer in module.named_modules(prefix=prefix.removesuffix(".")):
            if isinstance(layer, QuantizedModule):
                for weight in layer.weight_names:
                    element = torch.zeros((), dtype=layer.compute_dtype, device=layer.packed_device(weight))
                    state_dict[f"{name}.{weight}"] = element.expand(layer.weight_shape(weight))

    handle = model.register_state_dict_post_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _restore_narrow_layers_(model: nn.Module, lora_state_dict: dict[str, Tensor], prefix: str) -> None:
    """Give the 16-bit weight back to layers that diffusers is about to replace by wider ones.

    The new layers are in 16 bit anyway, and diffusers keeps the old weight to undo the replacement.
    """
    narrow = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantLinear):
            continue
        adapter = f"{prefix}.{name.replace('.base_layer', '')}"
        a, b = (lora_state_dict.get(f"{adapter}.lora_{part}.weight") for part in "AB")
        if a is not None and b is not None and (a.shape[1] > layer.in_features or b.shape[0] > layer.out_features):
            narrow.append(name)
    for name in narrow:
        restore_module_(model.get_submodule(name))
    if narrow:
        _logger.warning("%s: in 16 bit from now on, because the LoRA weights widen it", ", ".join(narrow))
        refresh_plan(model)


register()
