"""FreeNoise for AnimateDiff: videos longer than the motion modules were trained for, of a quantized model.

`enable_free_noise` and `disable_free_noise` of such pipelines exchange the blocks of the motion modules for blocks of
another class, and load the state dicts of the old ones into them. The new blocks get the quantized layers themselves:
not a code changes. `hf_quant._boot` imports this module after diffusers has loaded that part, and never before.
"""

from collections.abc import Callable
from typing import Any

import diffusers.pipelines.free_noise_utils as free_noise_utils
from torch import nn

from hf_quant.integrations.diffusers.derived import weights_in_state_dicts
from hf_quant.integrations.wrapping import wrap_once
from hf_quant.modules import QuantizedModule


def register() -> None:
    """Wrap the two methods that exchange blocks. Further calls do nothing."""
    for name in ("_enable_free_noise_in_block", "_disable_free_noise_in_block"):
        wrap_once(free_noise_utils.AnimateDiffFreeNoiseMixin, name, _with_quantized_layers)


def _with_quantized_layers(host: Callable[..., None]) -> Callable[..., None]:
    def exchange_blocks(self: Any, block: nn.Module) -> None:
        quantized = {name: layer for name, layer in block.named_modules() if isinstance(layer, QuantizedModule)}
        with weights_in_state_dicts([block]):
            host(self, block)
        for name, layer in quantized.items():
            block.set_submodule(name, layer)

    return exchange_blocks


register()
