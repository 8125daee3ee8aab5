"""Refuse what `EMAModel.save_pretrained` of diffusers cannot do: it copies averages into a new model in 16 bit.

The averages of a quantized model are those of its codes, which do not train, and of what is in 16 bit: they fit that
model alone. `hf_quant._boot` imports this module after diffusers has loaded that class, and never before.
"""

from collections.abc import Callable
from typing import Any

import diffusers.training_utils as training_utils

from hf_quant.config import QuantizerConfig
from hf_quant.integrations.wrapping import wrap_once


def register() -> None:
    """Wrap `EMAModel.save_pretrained`. Further calls do nothing."""
    wrap_once(training_utils.EMAModel, "save_pretrained", _of_16_bit)


def _of_16_bit(host: Callable[..., None]) -> Callable[..., None]:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance((self.model_config or {}).get("quantization_config"), QuantizerConfig):
            raise ValueError(
                "the model of this EMAModel is quantized, and its averages do not fit the 16-bit model that would be "
                "saved: copy_to(model.parameters()), then model.save_pretrained, or save the adapters alone"
            )
        host(self, *args, **kwargs)

    return save_pretrained


register()
