"""Load a part of a quantized checkpoint by the part's own class, such as the vision encoder of a CLIP.

The config of such a class is read from one field of the whole's config.json (`vision_config`), where no
`quantization_config` lies: the host would take the checkpoint for one in 16 bit, look for weights that it does not
have, and draw random ones. Its auto classes hand on the whole's config by themselves. `saving` imports this module.
"""

from collections.abc import Callable
from typing import Any

import transformers.configuration_utils as configuration_utils

from hf_quant.config import QuantMethod
from hf_quant.integrations.wrapping import wrap_once


_CONFIG = "quantization_config"


def register() -> None:
    """Wrap the method that reads configs. Further calls do nothing."""
    wrap_once(configuration_utils.PreTrainedConfig, "get_config_dict", _with_quantization)


def _with_quantization(host: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_config_dict`: the part that the class of a config stands for is quantized as all."""

    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        fields, rest = host(cls, *args, **kwargs)
        config = fields.get(_CONFIG)
        if isinstance(config, dict) and config.get("quant_method") == QuantMethod.HF_QUANT.value:
            for name in _parts(cls, fields):
                fields[name].setdefault(_CONFIG, config)
        return fields, rest

    return get_config_dict


def _parts(cls: Any, fields: dict[str, Any]) -> list[str]:
    """The fields of a config.json from which the host may make a config of this class, in place of all of them."""
    key, model_type = getattr(cls, "base_config_key", ""), getattr(cls, "model_type", "")
    if key and key in fields:
        return [key] if isinstance(fields[key], dict) else []
    if not model_type or fields.get("model_type", model_type) == model_type:
        return []
    return [name for name, part in fields.items() if isinstance(part, dict) and part.get("model_type") == model_type]


register()
