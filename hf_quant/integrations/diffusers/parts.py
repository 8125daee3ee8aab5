"""Mark the config that a pipeline gives to all of its parts: those with nothing to quantize then stay in 16 bit.

Vocoders, upsamplers and adapters of convolutions alone are parts of pipelines. Where a user names a part, or loads one
by itself, they are an error. `hf_quant._boot` imports this module after diffusers has loaded that class.
"""

from collections.abc import Callable
from typing import Any

from diffusers.quantizers import pipe_quant_config

from hf_quant.config import QuantizerConfig
from hf_quant.integrations.wrapping import wrap_once


def register() -> None:
    """Wrap `PipelineQuantizationConfig`. Further calls do nothing."""
    wrap_once(pipe_quant_config.PipelineQuantizationConfig, "_resolve_quant_config", _with_mark)


def _with_mark(host: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = host(self, *args, **kwargs)
        if isinstance(config, QuantizerConfig) and not (self.is_granular or self.components_to_quantize):
            vars(config)["is_for_all_parts"] = True  # `prepare_from_config` reads it
        return config

    return resolve


register()
