"""Save a diffusers model with the plan of the quantized modules that it has at that moment.

No hook runs when a user quantizes a part of a model, or exchanges a layer. So `save_pretrained` of the host's class is
wrapped; without quantized modules the host's method runs alone. `hf_quant._boot` imports this module after diffusers
has loaded that class, and never before.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import diffusers.models.modeling_utils as modeling_utils
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME

import hf_quant.integrations.diffusers.derived  # noqa: F401  (wraps other methods of the same class)
from hf_quant.checkpoint import config_of
from hf_quant.integrations.diffusers.quantizer import DiffusersQuantizer, _is_own, refresh_plan
from hf_quant.integrations.leftovers import without_leftovers
from hf_quant.integrations.methods import stored_schemes
from hf_quant.integrations.wrapping import wrap_once
from hf_quant.planning import updated


def register() -> None:
    """Wrap `save_pretrained`. Further calls do nothing."""
    wrap_once(modeling_utils.ModelMixin, "save_pretrained", _with_plan)


def _with_plan(host: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_own(self):  # a container without a config, which some cannot save
            return host(self, *args, **kwargs)
        schemes = stored_schemes(self)
        quantizer = getattr(self, "hf_quantizer", None)
        if schemes and quantizer is None:
            self.hf_quantizer = DiffusersQuantizer(config_of(self), pre_quantized=False)
            refresh_plan(self)
        elif isinstance(quantizer, DiffusersQuantizer):
            known = quantizer.quantization_config
            if updated(known, schemes) is not known:
                refresh_plan(self)
        given = {**inspect.signature(host).bind(self, *args, **kwargs).arguments, **kwargs}
        with without_leftovers(SAFETENSORS_WEIGHTS_NAME, given) if schemes else nullcontext():
            return host(self, *args, **kwargs)

    return save_pretrained


register()
