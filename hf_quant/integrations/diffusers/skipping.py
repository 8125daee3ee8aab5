"""Let guiders skip the attention of models with 8-bit attention, as they do in 16 bit.

diffusers looks up the class of a processor in a table; a processor that computes in 8 bit has a class of its own (see
`attention`). `hf_quant._boot` imports this module after diffusers has loaded that table, and never before.
"""

from collections.abc import Callable
from typing import Any

import diffusers.hooks._helpers as helpers

from hf_quant.integrations.wrapping import wrap_once


def register() -> None:
    """Wrap the look-up. Further calls do nothing."""
    wrap_once(helpers.AttentionProcessorRegistry, "get", _of_host)


def _of_host(host: Callable[..., Any]) -> Callable[..., Any]:
    def get(cls: type, model_class: type) -> Any:
        return host(cls, getattr(model_class, "_hf_quant_host", model_class))

    return get


register()
